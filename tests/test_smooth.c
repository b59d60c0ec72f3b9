/* Scales of keys: reference numbers, each rule, normalisation and option, known faults, errors. */
#include <math.h>
#include <string.h>

#include "kvc/smooth.h"
#include "support/fold_golden.h"
#include "support/rng.h"
#include "support/tables.h"

enum { MAX_D = 16 };

/* An observation of one layer that has seen one row of K, and n_q rows of Q. */
static kvc_observation *seen(kvc_ctx *ctx, int32_t n_kv_heads, int32_t head_dim, const float *k,
                             int32_t n_heads, const float *q, size_t n_q)
{
    const kvc_observed_shape shape = {sizeof(shape), 1, n_heads, n_kv_heads, head_dim};
    const size_t d = (size_t)head_dim;
    const kvc_view k_view = kvc_view_packed((void *)k, KVC_DTYPE_F32, 1, (size_t)n_kv_heads, d);
    const kvc_view q_view = kvc_view_packed((void *)q, KVC_DTYPE_F32, n_q, (size_t)n_heads, d);
    kvc_observation *o;

    assert_int_equal(kvc_observation_create(ctx, &shape, &o), KVC_OK);
    assert_int_equal(kvc_observe_keys(o, 0, &k_view), KVC_OK);
    if (n_q > 0)
        assert_int_equal(kvc_observe_queries(o, 0, &q_view), KVC_OK);
    return o;
}

static kvc_smooth_options options_of(kvc_smooth_rule rule, kvc_smooth_norm norm)
{
    kvc_smooth_options o;

    kvc_smooth_options_default(&o);
    o.rule = rule;
    o.norm = norm;
    return o;
}

static void assert_ratio(float x, double want, double tolerance)
{
    assert_true(fabs((double)x / want - 1.0) <= tolerance);
}

/* The scales of one head of 4 channels whose absmax is given. */
static void scales_of_4(kvc_ctx *ctx, const float *absmax, const kvc_smooth_options *o,
                        float *scales)
{
    kvc_observation *observation = seen(ctx, 1, 4, absmax, 1, NULL, 0);

    assert_int_equal(kvc_smooth_scales(observation, 0, o, scales), KVC_OK);
    kvc_observation_destroy(observation);
}

static void expect_4(kvc_ctx *ctx, const float *absmax, const kvc_smooth_options *o,
                     const double *want)
{
    float scales[4];

    scales_of_4(ctx, absmax, o, scales);
    for (size_t c = 0; c < 4; c++)
        assert_ratio(scales[c], want[c], 1e-7);
}

static void scales_are_those_of_the_reference(void **state)
{
    for (size_t i = 0; i < sizeof(fold_golden) / sizeof(*fold_golden); i++) {
        const struct fold_golden *g = &fold_golden[i];
        kvc_observation *observation = seen(best(state), 2, 8, g->absmax, 4, NULL, 0);
        kvc_smooth_options o;
        float scales[16];

        kvc_smooth_options_default(&o);
        o.layout = g->layout;
        o.n_rot = g->n_rot;
        o.power_of_two = g->power_of_two;
        assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
        for (size_t c = 0; c < 16; c++)
            if (g->power_of_two)
                assert_true(scales[c] == g->scales[c]);
            else
                assert_ratio(scales[c], (double)g->scales[c], 2e-7);
        kvc_observation_destroy(observation);
    }
}

static void the_defaults_are_the_documented_ones(void **state)
{
    const float absmax[4] = {1, 2, 3, 4};
    kvc_smooth_options o;
    float given[4], defaults[4];

    memset(&o, 0xee, sizeof(o));
    kvc_smooth_options_default(&o);
    assert_int_equal(o.struct_size, sizeof(o));
    assert_int_equal(o.rule, KVC_SMOOTH_ABSMAX);
    assert_int_equal(o.norm, KVC_SMOOTH_GEOMETRIC);
    assert_true(o.factor == 1.0f && o.floor == 1e-6f);
    assert_true(!o.power_of_two && !o.shared && o.pairs);
    assert_int_equal(o.layout, KVC_ROPE_HALF_SPLIT);
    assert_int_equal(o.n_rot, -1);
    scales_of_4(best(state), absmax, &o, given);
    scales_of_4(best(state), absmax, NULL, defaults);
    assert_memory_equal(given, defaults, sizeof(given));
    kvc_smooth_options_init(NULL, sizeof(o));
}

static void both_channels_of_a_pair_get_the_larger_statistic(void **state)
{
    const float absmax[4] = {1, 2, 3, 4};
    kvc_smooth_options o = options_of(KVC_SMOOTH_ABSMAX, KVC_SMOOTH_PLAIN);

    expect_4(best(state), absmax, &o, (const double[]){3, 4, 3, 4});
    o.layout = KVC_ROPE_INTERLEAVED;
    expect_4(best(state), absmax, &o, (const double[]){2, 2, 4, 4});
    o.n_rot = 2;
    expect_4(best(state), absmax, &o, (const double[]){2, 2, 3, 4});
    o.layout = KVC_ROPE_HALF_SPLIT;
    expect_4(best(state), absmax, &o, (const double[]){2, 2, 3, 4});
    o.n_rot = 0;
    expect_4(best(state), absmax, &o, (const double[]){1, 2, 3, 4});
    o.n_rot = -1;
    o.pairs = false;
    expect_4(best(state), absmax, &o, (const double[]){1, 2, 3, 4});
}

static void the_factor_is_an_exponent(void **state)
{
    const float absmax[4] = {1, 4, 9, 16};
    kvc_smooth_options o = options_of(KVC_SMOOTH_ABSMAX, KVC_SMOOTH_PLAIN);

    o.pairs = false;
    o.factor = 0.5f;
    expect_4(best(state), absmax, &o, (const double[]){1, 2, 3, 4});
    o.factor = 1.5f;
    expect_4(best(state), absmax, &o, (const double[]){1, 8, 27, 64});
}

static void normalising_divides_a_head_by_one_number(void **state)
{
    const float absmax[4] = {1, 2, 4, 32}; /* geometric mean 4, middle of the logarithms sqrt 32 */
    const double r = sqrt(32.0);
    kvc_smooth_options o = options_of(KVC_SMOOTH_ABSMAX, KVC_SMOOTH_GEOMETRIC);

    o.pairs = false;
    expect_4(best(state), absmax, &o, (const double[]){0.25, 0.5, 1, 8});
    o.norm = KVC_SMOOTH_MIDRANGE;
    expect_4(best(state), absmax, &o, (const double[]){1 / r, 2 / r, 4 / r, 32 / r});
}

static void heads_are_normalised_apart_unless_they_share(void **state)
{
    const float absmax[4] = {1, 4, 9, 1}; /* two heads of two channels */
    kvc_observation *observation = seen(best(state), 2, 2, absmax, 2, NULL, 0);
    kvc_smooth_options o = options_of(KVC_SMOOTH_ABSMAX, KVC_SMOOTH_GEOMETRIC);
    const double apart[4] = {0.5, 2, 3, 1 / 3.0}, shared[4] = {1.5, 2 / 3.0, 1.5, 2 / 3.0};
    float scales[4];

    o.pairs = false;
    assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
    for (size_t c = 0; c < 4; c++)
        assert_ratio(scales[c], apart[c], 1e-7);
    o.shared = true;
    assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
    for (size_t c = 0; c < 4; c++)
        assert_ratio(scales[c], shared[c], 1e-7);
    kvc_observation_destroy(observation);
}

static void powers_of_two_are_the_nearest_and_ties_go_to_even(void **state)
{
    kvc_smooth_options o = options_of(KVC_SMOOTH_ABSMAX, KVC_SMOOTH_PLAIN);
    float scales[4];

    o.pairs = false;
    o.power_of_two = true;
    scales_of_4(best(state), (const float[]){1.41f, 1.42f, 0.36f, 3000.0f}, &o, scales);
    assert_true(scales[0] == 1.0f && scales[1] == 2.0f && scales[2] == 0.5f &&
                scales[3] == 4096.0f);
    o.factor = 0.5f; /* ln s = 1/2, 3/2, 5/2, -1/2 of ln 2 */
    scales_of_4(best(state), (const float[]){2, 8, 32, 0.5f}, &o, scales);
    assert_true(scales[0] == 1.0f && scales[1] == 4.0f && scales[2] == 4.0f && scales[3] == 1.0f);
}

static void no_scale_falls_below_the_floor(void **state)
{
    kvc_smooth_options o = options_of(KVC_SMOOTH_ABSMAX, KVC_SMOOTH_PLAIN);

    o.pairs = false;
    o.floor = 0.25f;
    expect_4(best(state), (const float[]){8, 1, 3, 0}, &o, (const double[]){8, 2, 3, 2});
}

static void scales_saturate_and_stay_normal(void **state)
{
    kvc_smooth_options o = options_of(KVC_SMOOTH_ABSMAX, KVC_SMOOTH_PLAIN);
    float scales[4];

    o.pairs = false;
    o.factor = 1000.0f;
    scales_of_4(best(state), (const float[]){1e38f, 1, 2, 1e38f}, &o, scales);
    assert_true(scales[0] == 0x1p100f && scales[1] == 0x1p100f); /* the floor is 1e32 */
    scales_of_4(best(state), (const float[]){1e-38f, 1e-44f, 0, 0}, &o, scales);
    for (size_t c = 0; c < 4; c++)
        assert_true(scales[c] == 0x1p-100f);
}

/* E k^2 = 16, 1 and, over two rows and two query heads, E q^2 = 1, 16. */
static void balance_is_the_fourth_root_of_the_squares(void **state)
{
    const float k[2] = {4, -1}, q[8] = {1, 4, -1, 4, 1, 5.65685424949238f, 1, 0};
    kvc_observation *observation = seen(best(state), 1, 2, k, 2, q, 2);
    kvc_smooth_options o = options_of(KVC_SMOOTH_BALANCE, KVC_SMOOTH_PLAIN);
    float scales[2];

    o.pairs = false;
    assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
    assert_ratio(scales[0], 2.0, 1e-6);
    assert_ratio(scales[1], 0.5, 1e-6);
    o.factor = 2.0f;
    assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
    assert_ratio(scales[0], 4.0, 1e-6);
    assert_ratio(scales[1], 0.25, 1e-6);
    o.factor = 1.0f;
    o.pairs = true; /* 16 and 16 */
    assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
    assert_ratio(scales[0], 1.0, 1e-6);
    assert_ratio(scales[1], 1.0, 1e-6);
    kvc_observation_destroy(observation);
}

static void balance_floors_both_statistics(void **state)
{
    const float k[2] = {4, 0}, q[2] = {2, 0}, zeros[2] = {0, 0};
    kvc_smooth_options o = options_of(KVC_SMOOTH_BALANCE, KVC_SMOOTH_PLAIN);
    kvc_observation *observation = seen(best(state), 1, 2, k, 1, q, 1);
    float scales[2];

    o.pairs = false;
    o.floor = 0.5f; /* E k^2 = 16, 4; E q^2 = 4, 1 */
    assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
    assert_ratio(scales[0], sqrt(2.0), 1e-7);
    assert_ratio(scales[1], sqrt(2.0), 1e-7);
    kvc_observation_destroy(observation);
    observation = seen(best(state), 1, 2, k, 1, zeros, 1); /* queries of zeros do not count */
    assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
    assert_ratio(scales[0], 2.0, 1e-7);
    assert_ratio(scales[1], sqrt(2.0), 1e-7);
    kvc_observation_destroy(observation);
}

/* Error of scores behind a rotation: the size of K' times what Q' makes of an error. */
static double error_of(const float *k, const float *q, const double *s, size_t d)
{
    double keys = 0.0, queries = 0.0;

    for (size_t c = 0; c < d; c++) {
        keys += (double)k[c] * (double)k[c] / (s[c] * s[c]);
        queries += (double)q[c] * (double)q[c] * s[c] * s[c];
    }
    return keys * queries;
}

static void no_other_scales_have_a_smaller_error_than_the_balance(void **state)
{
    kvc_smooth_options o = options_of(KVC_SMOOTH_BALANCE, KVC_SMOOTH_GEOMETRIC);
    uint64_t rng = 1;

    o.pairs = false;
    for (int trial = 0; trial < 50; trial++) {
        float k[MAX_D], q[MAX_D], scales[MAX_D];
        double s[MAX_D], bound = 0.0;

        for (size_t c = 0; c < MAX_D; c++) {
            k[c] = expf(3.0f * rng_unit(&rng));
            q[c] = expf(3.0f * rng_unit(&rng));
            bound += (double)k[c] * (double)q[c];
        }
        kvc_observation *observation = seen(best(state), 1, MAX_D, k, 1, q, 1);
        assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
        kvc_observation_destroy(observation);
        for (size_t c = 0; c < MAX_D; c++)
            s[c] = (double)scales[c];
        const double least = error_of(k, q, s, MAX_D);
        assert_true(fabs(least / (bound * bound) - 1.0) < 1e-6); /* Cauchy-Schwarz */
        for (size_t c = 0; c < MAX_D; c++) {
            s[c] *= 1.0 + (double)rng_unit(&rng) / 2.0;
            assert_true(error_of(k, q, s, MAX_D) >= least * (1.0 - 1e-6));
        }
    }
}

/* Known fault F1: no zero becomes a divisor. */
static void a_channel_that_is_zero_gets_a_finite_scale(void **state)
{
    const float absmax[4] = {0, 4, 1e-30f, 2}, q[4] = {2, 2, 2, 2};
    kvc_observation *observation = seen(best(state), 1, 4, absmax, 1, q, 1);

    for (int i = 0; i < 12; i++) {
        kvc_smooth_options o = options_of((kvc_smooth_rule)(i % 2), (kvc_smooth_norm)(i / 2 % 3));
        float scales[4];
        double was = 0.0, is = 0.0;

        o.pairs = i / 6 == 1;
        assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
        for (size_t c = 0; c < 4; c++) {
            assert_true(isnormal(scales[c]) && scales[c] > 0.0f);
            was += (double)(absmax[c] * q[c]);
            is += (double)((absmax[c] / scales[c]) * (q[c] * scales[c]));
        }
        assert_true(fabs(is / was - 1.0) < 1e-5);
    }
    kvc_observation_destroy(observation);
}

/* Known fault F1. */
static void a_head_of_zeros_gets_ones(void **state)
{
    const float absmax[4] = {0, 0, 2, 8}, q[4] = {1, 1, 1, 1};
    kvc_observation *observation = seen(best(state), 2, 2, absmax, 2, q, 1);
    float scales[4];

    for (int rule = 0; rule < 2; rule++) {
        kvc_smooth_options o = options_of((kvc_smooth_rule)rule, KVC_SMOOTH_PLAIN);

        o.pairs = false;
        assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
        assert_true(scales[0] == 1.0f && scales[1] == 1.0f && scales[3] > 2.0f);
        o.shared = true;
        assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_OK);
        assert_true(scales[0] == scales[2] && scales[1] == scales[3] && scales[1] > 2.0f);
    }
    kvc_observation_destroy(observation);
}

/* An option that is refused. Returns what is wrong, NULL past the end. */
static const char *spoil(kvc_smooth_options *o, size_t which)
{
    switch (which) {
    case 0: o->struct_size = 8; return "struct_size too small";
    case 1: o->rule = (kvc_smooth_rule)2; return "rule 2";
    case 2: o->norm = (kvc_smooth_norm)3; return "norm 3";
    case 3: o->factor = 0.0f; return "factor 0";
    case 4: o->factor = -1.0f; return "factor -1";
    case 5: o->factor = NAN; return "factor NaN";
    case 6: o->factor = INFINITY; return "factor Inf";
    case 7: o->floor = 0.0f; return "floor 0";
    case 8: o->floor = -1.0f; return "floor -1";
    case 9: o->floor = NAN; return "floor NaN";
    case 10: o->floor = 1.0f; return "floor 1";
    case 11: o->layout = (kvc_rope_layout)2; return "layout 2";
    case 12: o->n_rot = 3; return "n_rot odd";
    case 13: o->n_rot = 6; return "n_rot above head_dim";
    case 14: o->n_rot = -2; return "n_rot -2";
    }
    return NULL;
}

/* Known fault F1: a bad factor or floor is an error. */
static void bad_options_are_refused_and_nothing_is_written(void **state)
{
    const float absmax[4] = {1, 2, 3, 4};
    kvc_observation *observation = seen(best(state), 1, 4, absmax, 1, absmax, 1);
    kvc_smooth_options o;
    float scales[4] = {7, 7, 7, 7};
    const char *what = "";

    for (size_t i = 0; what; i++) {
        kvc_smooth_options_default(&o);
        what = spoil(&o, i);
        if (what && kvc_smooth_scales(observation, 0, &o, scales) != KVC_E_ARG)
            fail_msg("%s is accepted", what);
    }
    assert_int_equal(kvc_smooth_scales(NULL, 0, NULL, scales), KVC_E_ARG);
    assert_int_equal(kvc_smooth_scales(observation, 0, NULL, NULL), KVC_E_ARG);
    assert_int_equal(kvc_smooth_scales(observation, -1, NULL, scales), KVC_E_ARG);
    assert_int_equal(kvc_smooth_scales(observation, 1, NULL, scales), KVC_E_ARG);
    for (size_t c = 0; c < 4; c++)
        assert_true(scales[c] == 7.0f);
    kvc_observation_destroy(observation);
}

static void a_layer_that_was_not_seen_is_refused(void **state)
{
    const float k[4] = {1, 2, 3, 4};
    kvc_observation *observation = seen(best(state), 1, 4, k, 1, NULL, 0);
    kvc_smooth_options o = options_of(KVC_SMOOTH_BALANCE, KVC_SMOOTH_PLAIN);
    float scales[4];

    assert_int_equal(kvc_smooth_scales(observation, 0, NULL, scales), KVC_OK);
    assert_int_equal(kvc_smooth_scales(observation, 0, &o, scales), KVC_E_ARG);
    kvc_observation_reset(observation);
    assert_int_equal(kvc_smooth_scales(observation, 0, NULL, scales), KVC_E_ARG);
    kvc_observation_destroy(observation);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scales_are_those_of_the_reference),
        cmocka_unit_test(the_defaults_are_the_documented_ones),
        cmocka_unit_test(both_channels_of_a_pair_get_the_larger_statistic),
        cmocka_unit_test(the_factor_is_an_exponent),
        cmocka_unit_test(normalising_divides_a_head_by_one_number),
        cmocka_unit_test(heads_are_normalised_apart_unless_they_share),
        cmocka_unit_test(powers_of_two_are_the_nearest_and_ties_go_to_even),
        cmocka_unit_test(no_scale_falls_below_the_floor),
        cmocka_unit_test(scales_saturate_and_stay_normal),
        cmocka_unit_test(balance_is_the_fourth_root_of_the_squares),
        cmocka_unit_test(balance_floors_both_statistics),
        cmocka_unit_test(no_other_scales_have_a_smaller_error_than_the_balance),
        cmocka_unit_test(a_channel_that_is_zero_gets_a_finite_scale),
        cmocka_unit_test(a_head_of_zeros_gets_ones),
        cmocka_unit_test(bad_options_are_refused_and_nothing_is_written),
        cmocka_unit_test(a_layer_that_was_not_seen_is_refused),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
