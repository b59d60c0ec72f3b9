/* smooth.c - scales of keys from what was observed. */
#include "smooth.h"

#include <math.h>

#include "balance.h"

static const kvc_smooth_options defaults = {
    .struct_size = sizeof(defaults),
    .rule = KVC_SMOOTH_ABSMAX,
    .norm = KVC_SMOOTH_GEOMETRIC,
    .factor = 1.0f,
    .floor = 1e-6f,
    .pairs = true,
    .layout = KVC_ROPE_HALF_SPLIT,
    .n_rot = -1,
};

void kvc_smooth_options_init(kvc_smooth_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &defaults, sizeof(defaults));
}

static kvc_status take_options(const kvc_smooth_options *options, int32_t head_dim,
                               kvc_smooth_options *out)
{
    *out = defaults;
    if (options)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), options, sizeof(*out)));
    if (out->n_rot == -1)
        out->n_rot = head_dim;
    KVC_CHECK((unsigned)out->rule <= KVC_SMOOTH_BALANCE &&
                  (unsigned)out->norm <= KVC_SMOOTH_PLAIN && out->factor > 0.0f &&
                  isfinite(out->factor) && out->floor > 0.0f && out->floor < 1.0f &&
                  (unsigned)out->layout <= KVC_ROPE_INTERLEAVED && out->n_rot >= 0 &&
                  out->n_rot <= head_dim && (!out->pairs || out->n_rot % 2 == 0),
              KVC_E_ARG);
    return KVC_OK;
}

/* The other channel of a rotary pair; a channel that is not rotated is its own. */
static size_t partner(const kvc_smooth_options *o, size_t c)
{
    const size_t n_rot = (size_t)o->n_rot, half = n_rot / 2;
    if (!o->pairs || c >= n_rot)
        return c;
    if (o->layout == KVC_ROPE_INTERLEAVED)
        return c ^ 1;
    return c < half ? c + half : c - half;
}

/* The statistic of a head, the largest of those that must agree: channels of a pair, heads. */
static void gather(const kvc_observation *observation, const double *sums, size_t head,
                   const kvc_smooth_options *o, double *out)
{
    const size_t d = (size_t)observation->shape.head_dim;
    const size_t n_heads = (size_t)observation->shape.n_kv_heads;
    const size_t first = o->shared ? 0 : head, last = o->shared ? n_heads : head + 1;

    for (size_t c = 0; c < d; c++) {
        out[c] = 0.0;
        for (size_t h = first; h < last; h++)
            out[c] = fmax(out[c], fmax(sums[h * d + c], sums[h * d + partner(o, c)]));
    }
}

/* ln s of a head before it is normalised; false: nothing but zeros was seen. */
static bool log_scales(const kvc_observation *observation, int32_t layer, size_t head,
                       const kvc_smooth_options *o, double *out)
{
    const size_t d = (size_t)observation->shape.head_dim;
    const bool balance = o->rule == KVC_SMOOTH_BALANCE;
    const enum kvc_sum sum = balance ? KVC_K_SQUARE : KVC_K_ABSMAX;
    const double n_keys = (double)observation->counts[layer].n_keys;
    const double n_queries = kvc_observed_queries(observation, layer);
    const double floor = (double)o->floor, factor = (double)o->factor;
    double k[KVC_MAX_HEAD_DIM], q[KVC_MAX_HEAD_DIM];

    gather(observation, kvc_observed_sums(observation, layer, sum), head, o, k);
    gather(observation, kvc_observed_sums(observation, layer, KVC_Q_SQUARE), head, o, q);
    const double k_most = kvc_largest(k, d), q_most = kvc_largest(q, d);
    if (!(k_most > 0.0))
        return false;
    for (size_t c = 0; c < d; c++) {
        if (!balance) {
            out[c] = factor * kvc_log_floored(k[c], k_most, floor);
            continue;
        }
        out[c] = kvc_log_floored(k[c], k_most, floor * floor) - log(n_keys);
        if (q_most > 0.0)
            out[c] -= kvc_log_floored(q[c], q_most, floor * floor) - log(n_queries);
        out[c] *= factor / 4.0;
    }
    return true;
}

/* What is subtracted from ln s. */
static double middle(const double *x, size_t n, kvc_smooth_norm norm)
{
    double sum = 0.0, least = INFINITY, most = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        sum += x[i];
        least = fmin(least, x[i]);
        most = fmax(most, x[i]);
    }
    switch (norm) {
    case KVC_SMOOTH_GEOMETRIC: return sum / (double)n;
    case KVC_SMOOTH_MIDRANGE: return (least + most) / 2.0;
    default: return 0.0;
    }
}

static float scale_of(double x, bool power_of_two)
{
    return power_of_two ? kvc_scale_of_log(rint(x / log(2.0)) * log(2.0)) : kvc_scale_of_log(x);
}

kvc_status kvc_smooth_scales(const kvc_observation *observation, int32_t layer,
                             const kvc_smooth_options *options, float *scales)
{
    kvc_smooth_options o;
    double x[KVC_MAX_HEAD_DIM];

    KVC_CHECK(observation && scales && layer >= 0 && layer < observation->shape.n_layers,
              KVC_E_ARG);
    KVC_TRY(take_options(options, observation->shape.head_dim, &o));
    const struct kvc_observed_counts *counts = &observation->counts[layer];
    KVC_CHECK(counts->n_keys > 0 && (o.rule == KVC_SMOOTH_ABSMAX || counts->n_queries > 0),
              KVC_E_ARG);
    const size_t d = (size_t)observation->shape.head_dim;
    for (size_t h = 0; h < (size_t)observation->shape.n_kv_heads; h++) {
        const bool seen = log_scales(observation, layer, h, &o, x);
        const double shift = seen ? middle(x, d, o.norm) : 0.0;
        for (size_t c = 0; c < d; c++)
            scales[h * d + c] = seen ? scale_of(x[c] - shift, o.power_of_two) : 1.0f;
    }
    return KVC_OK;
}
