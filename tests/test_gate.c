/* The gate: reference numbers, the hysteresis, known faults, what is monotone, what is refused. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvc/gate.h"

#include "support/rng.h"

enum { DRAWS = 200000 };

/* Unlike assert_float_equal(), false for NaN. */
static void assert_near(float x, float want, float tolerance)
{
    assert_true(fabsf(x - want) <= tolerance);
}

static kvc_gate_input input_of(double pressure, float entropy, size_t n_tokens)
{
    const kvc_gate_input input = {.struct_size = sizeof(input),
                                  .used_bytes = (uint64_t)(pressure * 1000000.0 + 0.5),
                                  .budget_bytes = 1000000,
                                  .entropy = entropy,
                                  .n_tokens = n_tokens};
    return input;
}

/* All terms of one update that must succeed. */
static kvc_gate_terms update(kvc_gate *gate, const kvc_gate_params *params,
                             const kvc_gate_input *input)
{
    kvc_gate_terms terms = {.struct_size = sizeof(terms)};
    float rate = -1.0f;

    assert_int_equal(kvc_gate_update(gate, params, input, &terms, &rate), KVC_OK);
    assert_true(rate == terms.rate);
    return terms;
}

/* The terms of the first update of a gate. */
static kvc_gate_terms first_terms(const kvc_gate_params *params, kvc_gate_input input)
{
    kvc_gate gate;

    kvc_gate_reset(&gate);
    return update(&gate, params, &input);
}

static float entropy_of(const float *p, size_t n)
{
    float e = -1.0f;

    assert_int_equal(kvc_entropy(p, n, NULL, &e), KVC_OK);
    return e;
}

static void default_params_set_every_field(void **state)
{
    kvc_gate_params p;

    (void)state;
    memset(&p, 0xFF, sizeof(p));
    kvc_gate_params_default(&p);
    assert_int_equal(p.struct_size, sizeof(p));
    assert_true(p.base == 0.5f && p.min_rate == 0.2f && p.max_rate == 0.7f);
    assert_true(p.high == 0.8f && p.low == 0.6f);
    assert_true(p.up == 1.0f && p.down == 0.1f && p.rise == 0.1f);
    assert_true(p.guard_low == 256 && p.guard_high == 576);
    assert_true(p.dense_entropy == 0.95f && p.dense_texture == 0.5f && p.dense_factor == 0.5f);
    kvc_gate_params_default(NULL);
    kvc_gate_reset(NULL);
}

/* Reference G4, computed in double. */
static void the_rate_is_that_of_the_reference(void **state)
{
    static const struct {
        double pressure;
        float base, entropy, unclamped, clamped;
    } cases[] = {
        {0.1, 0.5f, 0.83f, 0.201f, 0.201f}, {0.9, 0.5f, 0.83f, 0.469f, 0.469f},
        {0.9, 0.5f, 0.50f, 0.700f, 0.700f}, {0.0, 0.5f, 1.00f, 0.125f, 0.200f},
        {1.0, 0.5f, 0.00f, 1.125f, 0.700f}, {0.9, 0.3f, 0.83f, 0.2814f, 0.2814f},
        {0.5, 0.4f, 0.90f, 0.240f, 0.240f},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        kvc_gate_params params;

        kvc_gate_params_default(&params);
        params.base = cases[i].base;
        const kvc_gate_terms t =
            first_terms(&params, input_of(cases[i].pressure, cases[i].entropy, 576));
        assert_near(t.unclamped, cases[i].unclamped, 1e-6f);
        assert_near(t.clamped, cases[i].clamped, 1e-6f);
        assert_true(t.rate == t.clamped);
    }
}

static void the_entropy_is_that_of_the_reference(void **state)
{
    static const float raw[6] = {0.05625f, 0.08625f, 0.16375f, 0.0975f, 0.0425f, 0.0475f};
    static const float skewed[4] = {0.7f, 0.1f, 0.1f, 0.1f};
    static const float one[4] = {1, 0, 0, 0};
    float even[576];

    (void)state;
    for (size_t i = 0; i < 576; i++) {
        even[i] = 1.0f;
    }
    assert_near(entropy_of(raw, 6), 0.934811345f, 1e-6f);
    assert_near(entropy_of(skewed, 4), 0.678389825f, 1e-6f);
    assert_near(entropy_of(even, 576), 1.0f, 1e-6f);
    assert_true(entropy_of(one, 4) == 0.0f);
    assert_false(signbit(entropy_of(one, 4)));
}

static void small_images_are_kept_whole(void **state)
{
    static const struct {
        size_t n;
        float guard;
    } cases[] = {{0, 0}, {196, 0}, {256, 0}, {400, 0.45f}, {576, 1}, {2880, 1}, {SIZE_MAX, 1}};
    kvc_gate_params params;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const kvc_gate_terms t = first_terms(NULL, input_of(0.9, 0.83f, cases[i].n));

        assert_near(t.guard, cases[i].guard, 1e-6f);
        assert_near(t.rate, 0.469f * cases[i].guard, 1e-6f);
    }
    kvc_gate_params_default(&params);
    params.guard_low = params.guard_high = 10;
    assert_true(first_terms(&params, input_of(0.9, 0.83f, 10)).guard == 0.0f);
    assert_true(first_terms(&params, input_of(0.9, 0.83f, 11)).guard == 1.0f);
}

static void dense_text_is_pruned_by_half(void **state)
{
    kvc_gate_input in = input_of(0.9, 0.96f, 576);
    float full, dense;

    (void)state;
    full = first_terms(NULL, in).rate;
    in.texture = 0.51f;
    dense = first_terms(NULL, in).rate;
    assert_near(dense, 0.5f * full, 1e-7f);
    in.texture = 0.5f;
    assert_true(first_terms(NULL, in).dense == 1.0f);
    in.texture = 0.51f;
    in.entropy = 0.95f;
    assert_true(first_terms(NULL, in).dense == 1.0f);
}

static void the_level_follows_the_reference(void **state)
{
    static const double p[13] = {.30, .55, .70, .79, .81, .90, .79, .65, .61, .59, .50, .30, .30};
    static const float level[2][13] = {
        {.3f, .3f, .3f, .3f, .81f, .9f, .9f, .9f, .9f, .869f, .8321f, .77889f, .731001f},
        {.3f, .325f, .3625f, .40525f, .81f, .9f, .9f, .9f, .9f, .869f, .8321f, .77889f, .731001f},
    };

    (void)state;
    for (int rise = 0; rise < 2; rise++) {
        kvc_gate_params params;
        kvc_gate gate;

        kvc_gate_params_default(&params);
        params.rise = 0.1f * (float)rise;
        kvc_gate_reset(&gate);
        for (size_t i = 0; i < 13; i++) {
            const kvc_gate_input in = input_of(p[i], 0.5f, 576);
            const kvc_gate_terms t = update(&gate, &params, &in);

            assert_near(t.pressure, (float)p[i], 1e-6f);
            assert_near(t.level, level[rise][i], 1e-6f);
            assert_true(gate.pressure == t.level);
        }
    }
}

static void every_term_is_told(void **state)
{
    kvc_gate_input in = input_of(0.9, 0.96f, 400);
    kvc_gate_terms t;

    (void)state;
    in.texture = 0.6f;
    t = first_terms(NULL, in);
    assert_true(t.pressure == 0.9f && t.level == 0.9f && t.entropy == 0.96f);
    assert_near(t.unclamped, 0.5f * 1.4f * 0.54f, 1e-6f);
    assert_true(t.clamped == t.unclamped && t.guard == 0.45f && t.dense == 0.5f);
    assert_near(t.rate, t.clamped * t.guard * t.dense, 1e-7f);
}

static void a_reset_gate_takes_the_next_pressure_as_its_level(void **state)
{
    const kvc_gate_input high = input_of(0.9, 0.5f, 576), low = input_of(0.2, 0.5f, 576);
    kvc_gate gate;

    (void)state;
    kvc_gate_reset(&gate);
    update(&gate, NULL, &high);
    assert_true(update(&gate, NULL, &low).level > 0.8f);
    kvc_gate_reset(&gate);
    assert_true(update(&gate, NULL, &low).level == 0.2f);
}

static void bounds_below_the_defaults_can_be_set(void **state)
{
    kvc_gate_params params;

    (void)state;
    kvc_gate_params_default(&params);
    params.min_rate = params.max_rate = 0.15f;
    assert_true(first_terms(&params, input_of(1.0, 0.0f, 576)).rate == 0.15f);
    params.min_rate = 0.0f;
    params.base = 0.0f;
    assert_true(first_terms(&params, input_of(1.0, 0.0f, 576)).rate == 0.0f);
    params.base = params.min_rate = params.max_rate = 1.0f;
    assert_true(first_terms(&params, input_of(0.0, 1.0f, 576)).rate == 1.0f);
}

/* fault B1: 0 ln 0, underflow, and what is no probability. */
static void entropy_is_never_nan(void **state)
{
    static const float half[3] = {0, 0.5f, 0.5f}, one[3] = {0, 0, 1}, zeros[3] = {0, 0, 0};
    static const float softmax[2] = {1, 0}; /* of the logits 65504 and -65504 */
    static const float tiny[2] = {1e-45f, 3e38f};
    static const float bad[][3] = {
        {-0.1f, 0.6f, 0.5f}, {NAN, 0.5f, 0.5f}, {0.5f, INFINITY, 0.5f}, {65504, -65504, 0}};
    float e = 7.0f;

    (void)state;
    assert_near(entropy_of(half, 3), 0.630930f, 1e-6f);
    assert_near(entropy_of(half, 3) * logf(3.0f), 0.693147f, 1e-6f);
    assert_true(entropy_of(one, 3) == 0.0f);
    assert_true(entropy_of(softmax, 2) == 0.0f);
    assert_true(entropy_of(tiny, 2) >= 0.0f && entropy_of(tiny, 2) < 1e-6f);
    assert_true(entropy_of(zeros, 3) == 1.0f);
    assert_true(entropy_of(half, 1) == 1.0f);
    assert_true(entropy_of(NULL, 0) == 1.0f);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(kvc_entropy(bad[i], 3, NULL, &e), KVC_E_ARG);
        assert_true(e == 7.0f);
    }
    assert_int_equal(kvc_entropy(NULL, 3, NULL, &e), KVC_E_ARG);
    assert_int_equal(kvc_entropy(half, 3, NULL, NULL), KVC_E_ARG);
}

/* fault B1: the rates that go with it. */
static void the_rate_stays_inside_its_bounds(void **state)
{
    kvc_gate_params params;

    (void)state;
    kvc_gate_params_default(&params);
    params.base = 0.4f;
    assert_near(first_terms(&params, input_of(0.5, 0.5f, 576)).rate, 0.4f, 1e-6f);
    assert_true(first_terms(&params, input_of(1.0, 0.0f, 576)).rate == 0.7f);
    assert_true(first_terms(&params, input_of(0.0, 1.0f, 576)).rate == 0.2f);
}

static void excluded_tokens_are_not_read(void **state)
{
    static const float p[70] = {[0] = NAN, [1] = 0.5f, [2] = 0.5f, [64] = INFINITY, [69] = -1.0f};
    uint64_t excluded[2] = {1, 1 | 1 << 5};
    float even[64], e;

    (void)state;
    assert_int_equal(kvc_entropy(p, 70, excluded, &e), KVC_OK);
    assert_near(e, logf(2.0f) / logf(67.0f), 1e-6f);
    /* One sink with 40 % of an even map of 576: 0.71 with it, 1 without. */
    for (size_t i = 0; i < 64; i++) {
        even[i] = i == 9 ? 0.4f : 0.6f / 63.0f;
    }
    excluded[0] = 1 << 9;
    assert_int_equal(kvc_entropy(even, 64, excluded, &e), KVC_OK);
    assert_near(e, 1.0f, 1e-6f);
    assert_true(entropy_of(even, 64) < 0.8f);
    /* Nothing is left. */
    excluded[0] = UINT64_MAX;
    assert_int_equal(kvc_entropy(even, 64, excluded, &e), KVC_OK);
    assert_true(e == 1.0f);
}

/* fault B2: a dead band, and limits that belong to it. */
static void the_level_does_not_flap(void **state)
{
    static const double p[7] = {0.79, 0.81, 0.79, 0.81, 0.61, 0.60, 0.59};
    static const float level[7] = {0.3f, 0.81f, 0.81f, 0.81f, 0.81f, 0.81f, 0.788f};
    kvc_gate_params params;
    kvc_gate gate;
    kvc_gate_input in = input_of(0.3, 0.5f, 576);

    (void)state;
    kvc_gate_params_default(&params);
    params.rise = 0.0f;
    kvc_gate_reset(&gate);
    update(&gate, &params, &in);
    for (size_t i = 0; i < 7; i++) {
        in = input_of(p[i], 0.5f, 576);
        assert_near(update(&gate, &params, &in).level, level[i], 1e-6f);
    }
    /* Exactly 0.80 from below and exactly 0.60 from above change nothing. */
    gate.pressure = 0.3f;
    in.used_bytes = 80, in.budget_bytes = 100;
    assert_true(update(&gate, &params, &in).level == 0.3f);
    gate.pressure = 0.9f;
    in.used_bytes = 60;
    assert_true(update(&gate, &params, &in).level == 0.9f);
}

/* fault B3: an invalid budget is refused, more than the budget is pressure 1. */
static void pressure_needs_a_budget(void **state)
{
    kvc_gate_input in = input_of(0.5, 0.5f, 576);
    float rate = 7.0f;
    kvc_gate gate;

    (void)state;
    kvc_gate_reset(&gate);
    in.budget_bytes = 0;
    assert_int_equal(kvc_gate_update(&gate, NULL, &in, NULL, &rate), KVC_E_ARG);
    assert_false(gate.started);
    assert_true(rate == 7.0f);
    in.budget_bytes = 1000;
    in.used_bytes = UINT64_MAX;
    const kvc_gate_terms t = update(&gate, NULL, &in);
    assert_true(t.pressure == 1.0f && t.level == 1.0f);
    assert_true(t.rate >= 0.2f && t.rate <= 0.7f);
    in.used_bytes = 4456448, in.budget_bytes = 8388608; /* 8 x 128 x 4096 at 34 bytes per 32 */
    kvc_gate_reset(&gate);
    assert_true(update(&gate, NULL, &in).pressure == 0.53125f);
}

static float unit01(uint64_t *rng)
{
    return 0.5f + 0.5f * rng_unit(rng);
}

static kvc_gate_params random_params(uint64_t *rng)
{
    kvc_gate_params p;

    kvc_gate_params_default(&p);
    p.base = unit01(rng);
    p.max_rate = unit01(rng);
    p.min_rate = p.max_rate * unit01(rng);
    p.high = unit01(rng);
    p.low = p.high * unit01(rng);
    p.up = rng_below(rng, 2) ? 1.0f : unit01(rng);
    p.rise = rng_below(rng, 3) ? p.up * unit01(rng) : 0.0f;
    p.down = unit01(rng);
    p.guard_low = (int32_t)rng_below(rng, 300);
    p.guard_high = p.guard_low + (int32_t)rng_below(rng, 300);
    return p;
}

static kvc_gate_input random_gate_input(uint64_t *rng)
{
    kvc_gate_input in = input_of(0.0, unit01(rng), rng_below(rng, 700));

    in.used_bytes = rng_below(rng, 1100000);
    in.texture = unit01(rng);
    return in;
}

static void the_rate_is_monotone(void **state)
{
    uint64_t rng = 1;

    (void)state;
    for (int draw = 0; draw < DRAWS; draw++) {
        kvc_gate_params p = random_params(&rng);
        const float start = unit01(&rng);
        kvc_gate_input in = random_gate_input(&rng);
        kvc_gate gate = {.struct_size = sizeof(gate), .pressure = start, .started = draw % 4 != 0};
        const kvc_gate before = gate;
        const kvc_gate_terms t = update(&gate, &p, &in);
        kvc_gate_terms u;

        assert_true(t.clamped >= p.min_rate && t.clamped <= p.max_rate);
        assert_true(t.rate >= 0.0f && t.rate <= t.clamped);
        gate = before;
        switch (draw % 5) {
        case 0: in.used_bytes += rng_below(&rng, 300000); break;
        case 1: p.base += (1.0f - p.base) * unit01(&rng); break;
        case 2: in.n_tokens += rng_below(&rng, 300); break;
        case 3: in.entropy *= unit01(&rng); break;
        default: gate.pressure += (1.0f - start) * unit01(&rng); break;
        }
        u = update(&gate, &p, &in);
        assert_true(u.rate >= t.rate);
        assert_true(u.level >= t.level);
    }
}

static void the_rate_moves_no_faster_than_the_level_allows(void **state)
{
    uint64_t rng = 2;

    (void)state;
    for (int draw = 0; draw < DRAWS; draw++) {
        const kvc_gate_params p = random_params(&rng);
        kvc_gate_input in = random_gate_input(&rng);
        const kvc_gate_terms t = first_terms(&p, in);

        in.used_bytes = rng_below(&rng, 1100000);
        const kvc_gate_terms u = first_terms(&p, in);
        assert_true(fabsf(u.rate - t.rate) <=
                    1.5f * p.base * fabsf(u.pressure - t.pressure) + 2e-7f);
    }
}

static void the_level_stays_inside_what_it_has_seen(void **state)
{
    uint64_t rng = 3;

    (void)state;
    for (int run = 0; run < DRAWS / 50; run++) {
        kvc_gate_params p = random_params(&rng);
        float least = 1.0f, most = 0.0f, last = -1.0f;
        kvc_gate gate;

        kvc_gate_reset(&gate);
        for (int i = 0; i < 50; i++) {
            const kvc_gate_input in = random_gate_input(&rng);
            const kvc_gate_terms t = update(&gate, &p, &in);

            least = fminf(least, t.pressure);
            most = fmaxf(most, t.pressure);
            assert_true(t.level >= least && t.level <= most);
            if (i > 0 && p.rise == 0.0f && t.pressure >= p.low && t.pressure <= p.high) {
                assert_true(t.level == last);
            }
            last = t.level;
        }
    }
}

/* Parameters that no call accepts. Returns false past the end. */
static bool spoil_params(kvc_gate_params *p, int which)
{
    switch (which) {
    case 0: p->base = -0.1f; break;
    case 1: p->base = 1.5f; break;
    case 2: p->base = NAN; break;
    case 3: p->min_rate = -0.1f; break;
    case 4: p->min_rate = 0.71f; break;
    case 5: p->max_rate = 1.1f; break;
    case 6: p->max_rate = NAN; break;
    case 7: p->high = 1.1f; break;
    case 8: p->high = 0.5f; break;
    case 9: p->low = -0.1f; break;
    case 10: p->up = 1.1f; break;
    case 11: p->up = 0.05f; break; /* below rise: not monotone */
    case 12: p->down = -0.1f; break;
    case 13: p->down = 1.1f; break;
    case 14: p->rise = NAN; break;
    case 15: p->guard_low = -1; break;
    case 16: p->guard_high = 255; break;
    case 17: p->dense_entropy = NAN; break;
    case 18: p->dense_texture = INFINITY; break;
    case 19: p->dense_factor = 1.1f; break;
    case 20: p->struct_size = 8; break;
    default: return false;
    }
    return true;
}

static void bad_arguments_write_nothing(void **state)
{
    const kvc_gate fresh = {.struct_size = sizeof(fresh), .pressure = 0.5f, .started = true};
    const kvc_gate_input good = input_of(0.9, 0.5f, 576);
    kvc_gate_input bad[6];
    kvc_gate_terms terms = {.struct_size = sizeof(terms), .rate = 7.0f};
    kvc_gate gate = fresh;
    kvc_gate_params p;
    float rate = 7.0f;

    (void)state;
    kvc_gate_params_default(&p);
    for (int i = 0; spoil_params(&p, i); i++) {
        assert_int_equal(kvc_gate_update(&gate, &p, &good, &terms, &rate), KVC_E_ARG);
        kvc_gate_params_default(&p);
    }
    for (int i = 0; i < 6; i++) {
        bad[i] = good;
    }
    bad[0].entropy = NAN, bad[1].entropy = INFINITY, bad[2].texture = NAN;
    bad[3].texture = -INFINITY, bad[4].budget_bytes = 0, bad[5].struct_size = 16;
    for (int i = 0; i < 6; i++) {
        assert_int_equal(kvc_gate_update(&gate, NULL, &bad[i], &terms, &rate), KVC_E_ARG);
    }
    assert_int_equal(kvc_gate_update(NULL, NULL, &good, &terms, &rate), KVC_E_ARG);
    assert_int_equal(kvc_gate_update(&gate, NULL, NULL, &terms, &rate), KVC_E_ARG);
    assert_int_equal(kvc_gate_update(&gate, NULL, &good, &terms, NULL), KVC_E_ARG);
    assert_memory_equal(&gate, &fresh, sizeof(gate));
    terms.struct_size = sizeof(size_t);
    assert_int_equal(kvc_gate_update(&gate, NULL, &good, &terms, &rate), KVC_E_ARG);
    gate.pressure = NAN;
    assert_int_equal(kvc_gate_update(&gate, NULL, &good, NULL, &rate), KVC_E_ARG);
    memset(&gate, 0, sizeof(gate));
    assert_int_equal(kvc_gate_update(&gate, NULL, &good, NULL, &rate), KVC_E_ARG);
    assert_true(rate == 7.0f && terms.rate == 7.0f);
}

static void entropy_and_texture_a_little_beyond_one_are_clamped(void **state)
{
    kvc_gate_input in = input_of(0.9, 1.0001f, 576), one = input_of(0.9, 1.0f, 576);

    (void)state;
    assert_true(first_terms(NULL, in).rate == first_terms(NULL, one).rate);
    assert_true(first_terms(NULL, in).entropy == 1.0f);
    in.entropy = -0.5f, one.entropy = 0.0f;
    assert_true(first_terms(NULL, in).rate == first_terms(NULL, one).rate);
}

static void fields_of_a_later_version_must_be_zero(void **state)
{
    struct {
        kvc_gate_params known;
        uint64_t added;
    } params = {.added = 0};
    const kvc_gate_input in = input_of(0.9, 0.5f, 576);
    kvc_gate gate;
    float rate = 7.0f;

    (void)state;
    kvc_gate_reset(&gate);
    kvc_gate_params_init(&params.known, sizeof(params));
    params.added = 1;
    assert_int_equal(kvc_gate_update(&gate, &params.known, &in, NULL, &rate), KVC_E_UNSUPPORTED);
    assert_true(rate == 7.0f && !gate.started);
    params.added = 0;
    assert_int_equal(kvc_gate_update(&gate, &params.known, &in, NULL, &rate), KVC_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_params_set_every_field),
        cmocka_unit_test(the_rate_is_that_of_the_reference),
        cmocka_unit_test(the_entropy_is_that_of_the_reference),
        cmocka_unit_test(small_images_are_kept_whole),
        cmocka_unit_test(dense_text_is_pruned_by_half),
        cmocka_unit_test(the_level_follows_the_reference),
        cmocka_unit_test(every_term_is_told),
        cmocka_unit_test(a_reset_gate_takes_the_next_pressure_as_its_level),
        cmocka_unit_test(bounds_below_the_defaults_can_be_set),
        cmocka_unit_test(entropy_is_never_nan),
        cmocka_unit_test(the_rate_stays_inside_its_bounds),
        cmocka_unit_test(excluded_tokens_are_not_read),
        cmocka_unit_test(the_level_does_not_flap),
        cmocka_unit_test(pressure_needs_a_budget),
        cmocka_unit_test(the_rate_is_monotone),
        cmocka_unit_test(the_rate_moves_no_faster_than_the_level_allows),
        cmocka_unit_test(the_level_stays_inside_what_it_has_seen),
        cmocka_unit_test(bad_arguments_write_nothing),
        cmocka_unit_test(fields_of_a_later_version_must_be_zero),
        cmocka_unit_test(entropy_and_texture_a_little_beyond_one_are_clamped),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
