/* gate.c - the rate of pruning from pressure and entropy. */
#include "kvc/gate.h"

#include <math.h>

#include "bits.h"
#include "check.h"
#include "ctx.h"

static const kvc_gate_params defaults = {
    .struct_size = sizeof(defaults),
    .base = 0.5f,
    .min_rate = 0.2f,
    .max_rate = 0.7f,
    .high = 0.8f,
    .low = 0.6f,
    .up = 1.0f,
    .down = 0.1f,
    .rise = 0.1f,
    .guard_low = 256,
    .guard_high = 576,
    .dense_entropy = 0.95f,
    .dense_texture = 0.5f,
    .dense_factor = 0.5f,
};

void kvc_gate_params_init(kvc_gate_params *params, size_t struct_size)
{
    kvc_struct_init(params, struct_size, &defaults, sizeof(defaults));
}

void kvc_gate_init(kvc_gate *gate, size_t struct_size)
{
    const kvc_gate fresh = {.struct_size = sizeof(fresh)};
    kvc_struct_init(gate, struct_size, &fresh, sizeof(fresh));
}

/* lo <= x <= hi; false for NaN. */
static bool inside(float x, float lo, float hi)
{
    return x >= lo && x <= hi;
}

static double clamp(double x, double lo, double hi)
{
    return x < lo ? lo : x > hi ? hi : x;
}

static bool params_ok(const kvc_gate_params *p)
{
    return inside(p->base, 0, 1) && inside(p->max_rate, 0, 1) &&
           inside(p->min_rate, 0, p->max_rate) && inside(p->high, 0, 1) &&
           inside(p->low, 0, p->high) && inside(p->up, 0, 1) && inside(p->down, 0, 1) &&
           inside(p->rise, 0, p->up) && p->guard_low >= 0 && p->guard_high >= p->guard_low &&
           isfinite(p->dense_entropy) && isfinite(p->dense_texture) &&
           inside(p->dense_factor, 0, 1);
}

/* The point that lies share of the way from a to b. As a sum of two products of factors >= 0 it
 * grows with a and with b, whatever the rounding. */
static double between(double a, double b, double share)
{
    return (1.0 - share) * a + share * b;
}

static double next_level(const kvc_gate_params *o, double level, double p)
{
    if (p > (double)o->high)
        return p > level ? between(level, p, (double)o->up) : level;
    const double q = p > level ? between(level, p, (double)o->rise) : level;
    return p < (double)o->low && p < q ? between(q, p, (double)o->down) : q;
}

static double guard_of(const kvc_gate_params *o, size_t n_tokens)
{
    const double n = (double)n_tokens, lo = (double)o->guard_low, hi = (double)o->guard_high;
    if (n <= lo)
        return 0.0;
    return n >= hi ? 1.0 : (n - lo) / (hi - lo);
}

static kvc_gate_terms terms_of(const kvc_gate_params *o, const kvc_gate_input *in, float level,
                               float pressure)
{
    const double e = clamp((double)in->entropy, 0.0, 1.0);
    const double rate = (double)o->base * (0.5 + (double)level) * (0.5 + (1.0 - e));
    const double clamped = clamp(rate, (double)o->min_rate, (double)o->max_rate);
    const double guard = guard_of(o, in->n_tokens);
    const bool dense = (float)e > o->dense_entropy && in->texture > o->dense_texture;
    const double factor = dense ? (double)o->dense_factor : 1.0;

    return (kvc_gate_terms){
        .struct_size = sizeof(kvc_gate_terms),
        .pressure = pressure,
        .level = level,
        .entropy = (float)e,
        .unclamped = (float)rate,
        .clamped = (float)clamped,
        .guard = (float)guard,
        .dense = (float)factor,
        .rate = (float)(clamped * guard * factor),
    };
}

kvc_status kvc_gate_update(kvc_gate *gate, const kvc_gate_params *params,
                           const kvc_gate_input *input, kvc_gate_terms *terms, float *rate)
{
    kvc_gate_params o = defaults;
    kvc_gate_input in = {0};
    kvc_gate g = {0};

    KVC_CHECK(gate && input && rate, KVC_E_ARG);
    KVC_CHECK(!terms || terms->struct_size >= sizeof(*terms), KVC_E_ARG);
    KVC_TRY(kvc_struct_read(&g, sizeof(g), gate, sizeof(g)));
    KVC_TRY(kvc_struct_read(&in, sizeof(in), input, sizeof(in)));
    if (params)
        KVC_TRY(kvc_struct_read(&o, sizeof(o), params, sizeof(o)));
    KVC_CHECK(params_ok(&o) && in.budget_bytes > 0 && isfinite(in.entropy) && isfinite(in.texture),
              KVC_E_ARG);
    KVC_CHECK(inside(g.pressure, 0, 1), KVC_E_ARG);

    const double used = (double)in.used_bytes / (double)in.budget_bytes;
    const float pressure = (float)clamp(used, 0.0, 1.0);
    g.pressure = g.started ? (float)next_level(&o, (double)g.pressure, (double)pressure) : pressure;
    g.started = true;
    const kvc_gate_terms out = terms_of(&o, &in, g.pressure, pressure);
    kvc_struct_write(gate, &g, sizeof(g));
    if (terms)
        kvc_struct_write(terms, &out, sizeof(out));
    *rate = out.rate;
    return KVC_OK;
}

kvc_status kvc_entropy(const float *p, size_t n, const uint64_t *excluded, float *entropy)
{
    double sum = 0.0, h = 0.0;
    size_t m = 0;

    KVC_CHECK(entropy && (p || n == 0), KVC_E_ARG);
    for (size_t i = 0; i < n; i++) {
        if (kvc_bit(excluded, i))
            continue;
        KVC_CHECK(p[i] >= 0.0f && isfinite(p[i]), KVC_E_ARG);
        sum += (double)p[i];
        m++;
    }
    if (m < 2 || sum <= 0.0) {
        *entropy = 1.0f;
        return KVC_OK;
    }
    for (size_t i = 0; i < n; i++) {
        const double x = kvc_bit(excluded, i) ? 0.0 : (double)p[i] / sum;
        if (x > 0.0)
            h -= x * log(x);
    }
    *entropy = (float)clamp(h / log((double)m), 0.0, 1.0);
    return KVC_OK;
}
