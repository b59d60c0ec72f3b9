/* Scores refined: temperature, priors, trend, sinks; and mixed with learned ones. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "kvc/score.h"

enum { N = 6 };

static const float g1_raw[N] = {.056250f, .086250f, .163750f, .097500f, .042500f, .047500f};

static void assert_near(const float *got, const float *want, size_t n, double tolerance)
{
    for (size_t i = 0; i < n; i++) {
        if (!(fabs((double)got[i] - (double)want[i]) <= tolerance)) {
            print_error("[%zu]: %.9g, not %.9g\n", i, (double)got[i], (double)want[i]);
        }
        assert_true(fabs((double)got[i] - (double)want[i]) <= tolerance);
    }
}

static void assert_order(const float *scores, const int *order, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        assert_true(scores[order[i - 1]] >= scores[order[i]]);
    }
}

static void default_options_set_every_field(void **state)
{
    kvc_refine_options r;

    (void)state;
    memset(&r, 0xFF, sizeof(r));
    kvc_refine_options_default(&r);
    assert_int_equal(r.struct_size, sizeof(r));
    assert_true(r.temperature == 0.7f && r.centre == 0.02f && r.sigma == 0.5f);
    assert_true(r.texture == 0.05f && r.sink_factor == 10.0f && r.max_sinks == 8);
    assert_true(!r.debias && r.debias_clamp && !r.excluded);
    kvc_refine_options_default(NULL);
}

static kvc_refine_options plain(void)
{
    kvc_refine_options o;

    kvc_refine_options_default(&o);
    o.temperature = 1.0f;
    o.centre = o.texture = 0.0f;
    return o;
}

static void reference_numbers_of_refinement_are_met(void **state)
{
    static const float soft_05[N] = {.118f, .277431f, 1, .354525f, .067362f, .084144f};
    static const float soft_2[N] = {.586098f, .725753f, 1, .771635f, .509453f, .538587f};
    static const float centre[N] = {.499352f, .778801f, .499352f, .499352f, .778801f, .499352f};
    static const float final_05[N] = {.123892f, .336491f, 1.199935f, .377546f, .077660f, .088346f};
    static const float final_2[N] = {.615365f, .880251f, 1.199935f, .821741f, .587338f, .565482f};
    static const float texture[N] = {0, .9f, 1, .1f, .5f, 0}, ones[N] = {1, 1, 1, 1, 1, 1};
    const kvc_grid grid = kvc_grid_image(2, 3);
    kvc_refine_options o = plain();
    float out[N];

    (void)state;
    o.temperature = 0.5f;
    assert_int_equal(kvc_score_refine(g1_raw, &grid, NULL, &o, out, NULL), KVC_OK);
    assert_near(out, soft_05, N, 1e-6);
    o.temperature = 2.0f;
    assert_int_equal(kvc_score_refine(g1_raw, &grid, NULL, &o, out, NULL), KVC_OK);
    assert_near(out, soft_2, N, 1e-6);
    assert_order(out, (const int[]){2, 3, 1, 0, 5, 4}, N); /* no temperature changes it */
    o.centre = 1.0f;
    assert_int_equal(kvc_score_refine(ones, &grid, NULL, &o, out, NULL), KVC_OK);
    for (size_t i = 0; i < N; i++) {
        out[i] -= 1.0f;
    }
    assert_near(out, centre, N, 1e-6);
    o.centre = 0.10f;
    o.texture = 0.15f;
    assert_int_equal(kvc_score_refine(g1_raw, &grid, texture, &o, out, NULL), KVC_OK);
    assert_near(out, final_2, N, 1e-6);
    assert_order(out, (const int[]){2, 1, 3, 0, 4, 5}, N); /* here the priors do */
    o.temperature = 0.5f;
    assert_int_equal(kvc_score_refine(g1_raw, &grid, texture, &o, out, NULL), KVC_OK);
    assert_near(out, final_05, N, 1e-6);
    assert_order(out, (const int[]){2, 3, 1, 0, 5, 4}, N);
}

static void a_trend_is_taken_out(void **state)
{
    static const float want[N] = {.043848f, .074277f, .155793f, .102480f, .049351f, .060935f};
    const kvc_grid grid = kvc_grid_image(2, 3);
    kvc_refine_options o = plain();
    float ramped[N], scaled[N], out[N], level[N];

    (void)state;
    for (size_t i = 0; i < N; i++) {
        ramped[i] = (float)((double)g1_raw[i] * exp(0.15 * (double)i));
        scaled[i] = want[i] / want[2];
    }
    o.debias = true;
    o.debias_clamp = false;
    assert_int_equal(kvc_score_refine(g1_raw, &grid, NULL, &o, level, NULL), KVC_OK);
    assert_near(level, scaled, N, 1e-5);
    assert_int_equal(kvc_score_refine(ramped, &grid, NULL, &o, out, NULL), KVC_OK);
    assert_near(out, level, N, 1e-6);
    o.debias_clamp = true; /* the slope of raw falls: nothing to do */
    assert_int_equal(kvc_score_refine(g1_raw, &grid, NULL, &o, out, NULL), KVC_OK);
    for (size_t i = 0; i < N; i++) {
        scaled[i] = g1_raw[i] / g1_raw[2];
    }
    assert_near(out, scaled, N, 1e-6);
    assert_int_equal(kvc_score_refine(ramped, &grid, NULL, &o, out, NULL), KVC_OK);
    assert_near(out, level, N, 1e-6);
}

static void sinks_are_found_kept_and_left_out_of_the_scale(void **state)
{
    enum { MANY = 100 };
    const kvc_grid grid = kvc_grid_image(10, 10);
    kvc_refine_options o = plain();
    float raw[MANY], out[MANY];
    uint64_t sinks[2];

    (void)state;
    for (size_t i = 0; i < MANY; i++) {
        raw[i] = i % 2 ? 0.5f : 1.0f;
    }
    raw[70] = 40.0f;
    raw[7] = 30.0f;
    raw[8] = 10.0f; /* below ten means */
    raw[20] = 25.0f;
    o.centre = 0.25f;
    assert_int_equal(kvc_score_refine(raw, &grid, NULL, &o, out, sinks), KVC_OK);
    assert_true(sinks[0] == (1u << 7 | 1u << 20) && sinks[1] == 1u << 6);
    assert_true(out[70] == 1.25f && out[7] == 1.25f && out[20] == 1.25f);
    for (size_t i = 0; i < MANY; i++) {
        assert_true(out[i] <= 1.25f);
    }
    assert_true(out[8] >= 1.0f && out[9] < 0.07f); /* 8 is the largest of the others */
    o.max_sinks = 1;
    assert_int_equal(kvc_score_refine(raw, &grid, NULL, &o, out, sinks), KVC_OK);
    assert_true(sinks[0] == 0 && sinks[1] == 1u << 6);
    raw[7] = 40.0f; /* a tie goes to the lower index */
    assert_int_equal(kvc_score_refine(raw, &grid, NULL, &o, out, sinks), KVC_OK);
    assert_true(sinks[0] == 1u << 7 && sinks[1] == 0);
    o.sink_factor = 0.0f;
    assert_int_equal(kvc_score_refine(raw, &grid, NULL, &o, out, sinks), KVC_OK);
    assert_true(sinks[0] == 0 && sinks[1] == 0);
    raw[7] = 1e38f; /* nothing overflows */
    o.sink_factor = 10.0f;
    assert_int_equal(kvc_score_refine(raw, &grid, NULL, &o, out, NULL), KVC_OK);
    for (size_t i = 0; i < MANY; i++) {
        assert_true(isfinite(out[i]));
    }
}

static void all_zero_scores_become_equal(void **state)
{
    const kvc_grid grid = kvc_grid_image(2, 3);
    const kvc_refine_options o = plain();
    float raw[N] = {0}, out[N];

    (void)state;
    assert_int_equal(kvc_score_refine(raw, &grid, NULL, &o, out, NULL), KVC_OK);
    assert_near(out, (const float[]){1, 1, 1, 1, 1, 1}, N, 0.0);
}

/* fault C7, fault G4: padding neither reads, counts nor scores. */
static void excluded_tokens_count_nowhere(void **state)
{
    static const uint64_t excluded = 3;
    const kvc_grid six = kvc_grid_image(1, 6), four = kvc_grid_image(1, 4);
    kvc_refine_options o = plain();
    float raw[N] = {NAN, 9.0f, .1f, .2f, .4f, .3f}, out[N], want[4];

    (void)state;
    o.debias = true;
    assert_int_equal(kvc_score_refine(raw + 2, &four, NULL, &o, want, NULL), KVC_OK);
    o.excluded = &excluded;
    assert_int_equal(kvc_score_refine(raw, &six, NULL, &o, out, NULL), KVC_OK);
    assert_true(out[0] == 0.0f && out[1] == 0.0f);
    assert_memory_equal(out + 2, want, sizeof(want));
}

static void refinement_works_in_place(void **state)
{
    const kvc_grid grid = kvc_grid_image(2, 3);
    kvc_refine_options o;
    float x[N], out[N];

    (void)state;
    kvc_refine_options_default(&o);
    o.debias = true;
    memcpy(x, g1_raw, sizeof(x));
    assert_int_equal(kvc_score_refine(x, &grid, NULL, &o, out, NULL), KVC_OK);
    assert_int_equal(kvc_score_refine(x, &grid, NULL, &o, x, NULL), KVC_OK);
    assert_memory_equal(x, out, sizeof(x));
}

static void wrong_arguments_of_refinement_are_refused(void **state)
{
    const kvc_grid grid = kvc_grid_image(2, 3), none = kvc_grid_image(0, 3);
    kvc_refine_options bad[9];
    float raw[N] = {1, 1, 1, 1, 1, 1}, texture[N] = {0}, out[N] = {7};

    (void)state;
    for (size_t i = 0; i < 9; i++) {
        bad[i] = plain();
    }
    bad[0].temperature = 0.0f;
    bad[1].sigma = 0.0f;
    bad[2].centre = -0.1f;
    bad[3].texture = -0.1f;
    bad[4].sink_factor = 0.5f;
    bad[5].max_sinks = KVC_MAX_SINKS + 1;
    bad[6].max_sinks = -1;
    bad[7].struct_size = 8;
    bad[8].temperature = NAN;
    for (size_t i = 0; i < 9; i++) {
        assert_int_equal(kvc_score_refine(raw, &grid, NULL, &bad[i], out, NULL),
                         i < 8 ? KVC_E_ARG : KVC_E_NONFINITE);
    }
    texture[3] = 1.5f;
    assert_int_equal(kvc_score_refine(raw, &grid, texture, NULL, out, NULL), KVC_E_ARG);
    texture[3] = NAN;
    assert_int_equal(kvc_score_refine(raw, &grid, texture, NULL, out, NULL), KVC_E_NONFINITE);
    raw[5] = -1.0f;
    assert_int_equal(kvc_score_refine(raw, &grid, NULL, NULL, out, NULL), KVC_E_ARG);
    raw[5] = INFINITY;
    assert_int_equal(kvc_score_refine(raw, &grid, NULL, NULL, out, NULL), KVC_E_NONFINITE);
    assert_int_equal(kvc_score_refine(NULL, &grid, NULL, NULL, out, NULL), KVC_E_ARG);
    assert_int_equal(kvc_score_refine(raw, NULL, NULL, NULL, out, NULL), KVC_E_ARG);
    assert_int_equal(kvc_score_refine(g1_raw, &grid, NULL, NULL, NULL, NULL), KVC_E_ARG);
    assert_int_equal(kvc_score_refine(NULL, &none, NULL, NULL, NULL, NULL), KVC_OK);
    assert_true(out[0] == 7.0f);
}

static void blending_is_the_weighted_geometric_mean(void **state)
{
    static const float raw[3] = {.25f, 0.0f, .123456f}, learned[3] = {1.0f, .5f, .7654321f};
    float out[3] = {7};

    (void)state;
    assert_int_equal(kvc_score_blend(raw, learned, 3, 0.5f, out), KVC_OK);
    assert_near(out, (const float[]){.5f, 0, .307404f}, 3, 1e-6);
    assert_int_equal(kvc_score_blend(raw, learned, 1, 0.25f, out), KVC_OK);
    assert_near(out, (const float[]){.353553f}, 1, 1e-6);
    assert_int_equal(kvc_score_blend(raw, learned, 3, 0.0f, out), KVC_OK);
    assert_memory_equal(out, raw, sizeof(out));
    assert_int_equal(kvc_score_blend(raw, learned, 3, 1.0f, out), KVC_OK);
    assert_memory_equal(out, learned, sizeof(out));
    assert_int_equal(kvc_score_blend(raw, learned, 3, 1.5f, out), KVC_E_ARG);
    assert_int_equal(kvc_score_blend(raw, learned, 3, NAN, out), KVC_E_NONFINITE);
    assert_int_equal(kvc_score_blend(raw, NULL, 3, 0.5f, out), KVC_E_ARG);
    assert_int_equal(kvc_score_blend(raw, (const float[]){0, 0, -1}, 3, .5f, out), KVC_E_ARG);
    assert_int_equal(kvc_score_blend((const float[]){0, 0, NAN}, raw, 3, .5f, out),
                     KVC_E_NONFINITE);
    assert_memory_equal(out, learned, sizeof(out));
    assert_int_equal(kvc_score_blend(NULL, NULL, 0, 0.5f, NULL), KVC_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_options_set_every_field),
        cmocka_unit_test(reference_numbers_of_refinement_are_met),
        cmocka_unit_test(a_trend_is_taken_out),
        cmocka_unit_test(sinks_are_found_kept_and_left_out_of_the_scale),
        cmocka_unit_test(all_zero_scores_become_equal),
        cmocka_unit_test(excluded_tokens_count_nowhere),
        cmocka_unit_test(refinement_works_in_place),
        cmocka_unit_test(wrong_arguments_of_refinement_are_refused),
        cmocka_unit_test(blending_is_the_weighted_geometric_mean),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
