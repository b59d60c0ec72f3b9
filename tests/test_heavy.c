/* Heavy hitters: reference numbers, decay, the form for decode steps, several layers as one. */
#include <math.h>
#include <string.h>

#include "support/rng.h"
#include "support/select.h"

enum { MAX_ROWS = 200, MAX_QUERIES = 40 };

static kvc_heavy_options heavy_options(float decay, float recent_weight, int32_t recent)
{
    const kvc_heavy_options o = {
        .struct_size = sizeof(o), .decay = decay, .recent_weight = recent_weight, .recent = recent};
    return o;
}

static void assert_close(const float *x, const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        assert_near(x[i], want[i], 1e-6f);
    }
}

static void default_heavy_options_set_every_field(void **state)
{
    kvc_heavy_options o;

    (void)state;
    memset(&o, 0xFF, sizeof(o));
    kvc_heavy_options_default(&o);
    assert_int_equal(o.struct_size, sizeof(o));
    assert_true(o.decay == 0.98f && o.recent_weight == 2.0f && o.recent == 32);
    kvc_heavy_options_default(NULL);
}

/* Reference G5: plain sums of even attention would be 2.45 for the first row, 0.17 for the last. */
static void even_attention_lifts_every_row_by_one(void **state)
{
    const kvc_heavy_options plain = heavy_options(1.0f, 1.0f, 0);
    float even[6][6] = {{0}}, scores[6];
    static const float ones[6] = {1, 1, 1, 1, 1, 1};

    (void)state;
    for (int q = 0; q < 6; q++) {
        for (int i = 0; i <= q; i++) {
            even[q][i] = 1.0f / (float)(q + 1);
        }
    }
    assert_int_equal(kvc_heavy_scores(even[0], 6, 6, 6, 0, &plain, scores), KVC_OK);
    assert_close(scores, ones, 6);
    assert_int_equal(kvc_heavy_scores(even[0], 6, 6, 6, 0, NULL, scores), KVC_OK);
    assert_close(scores, ones, 6);
}

static const float reference[6][6] = {
    {1, 0, 0, 0, 0, 0},         {.6f, .4f, 0, 0, 0, 0},         {.5f, .3f, .2f, 0, 0, 0},
    {.4f, .1f, .4f, .1f, 0, 0}, {.3f, .1f, .5f, .05f, .05f, 0}, {.2f, .05f, .6f, .05f, .05f, .05f},
};
static const float reference_lift[6] = {1.346472f, 0.501239f, 2.516089f,
                                        0.298048f, 0.276316f, 0.300000f};

/* Reference G5: decay 0.9, the newest two queries count twice. */
static void decayed_lift_is_that_of_the_reference(void **state)
{
    const kvc_heavy_options o = heavy_options(0.9f, 2.0f, 2);
    float scores[6];
    int32_t rows[6];

    (void)state;
    assert_int_equal(kvc_heavy_scores(reference[0], 6, 6, 6, 0, &o, scores), KVC_OK);
    assert_close(scores, reference_lift, 6);
    /* Plain sums would rank row 0 first. */
    assert_rows(rows, select_rows(scores, 6, 1, NULL, 1, KVC_BLOCK_MEAN, rows), (int32_t[]){2}, 1);
    /* Blocks of two: means .923855 1.407068 .288158, maxima 1.346472 2.516089 .3. */
    for (int how = 0; how < 2; how++) {
        assert_rows(rows, select_rows(scores, 6, 2, NULL, 2, (kvc_block_score)how, rows),
                    (int32_t[]){2, 3}, 2);
    }
}

/* Reference G5: num .65 .47 .78, den 1.9, with attention in place of lift. */
static void sums_of_decode_steps_are_those_of_the_reference(void **state)
{
    static const float a[2][3] = {{.5f, .3f, .2f}, {.2f, .2f, .6f}};
    static const float num_want[3] = {3 * .65f, 3 * .47f, 3 * .78f},
                       den_want[3] = {1.9f, 1.9f, 1.9f};
    static const float want[3] = {3 * .342105f, 3 * .247368f, 3 * .410526f};
    const kvc_heavy_options o = heavy_options(0.9f, 2.0f, 32);
    float num[3] = {0}, den[3] = {0}, scores[3];

    (void)state;
    assert_int_equal(kvc_heavy_add(a[0], 3, &o, num, den), KVC_OK);
    assert_int_equal(kvc_heavy_add(a[1], 3, &o, num, den), KVC_OK);
    assert_close(num, num_want, 3);
    assert_close(den, den_want, 3);
    assert_int_equal(kvc_heavy_ratio(num, den, 3, scores), KVC_OK);
    for (int i = 0; i < 3; i++) {
        assert_near(scores[i], want[i], 3e-6f);
    }
}

/* fault C2, case (b): with decay 0.5, 100 five steps ago is worth less than 10 in each step since.
 */
static void old_attention_is_outranked(void **state)
{
    const kvc_heavy_options o = heavy_options(0.5f, 1.0f, 0);
    /* Rows A and B, lifts of 100 and 10: two rows are seen, so half of that is attention. */
    float attention[6][2] = {{50, 0}, {0, 5}, {0, 5}, {0, 5}, {0, 5}, {0, 5}};
    float num[2] = {0}, den[2] = {0}, ratio[2], scores[2];
    int32_t row;

    (void)state;
    for (int q = 0; q < 6; q++) {
        assert_int_equal(kvc_heavy_add(attention[q], 2, &o, num, den), KVC_OK);
    }
    assert_true(num[0] == 3.125f && num[1] == 19.375f);
    assert_true(den[0] == den[1]);
    assert_int_equal(kvc_heavy_ratio(num, den, 2, ratio), KVC_OK);
    assert_int_equal(kvc_heavy_scores(attention[0], 6, 2, 2, 1, &o, scores), KVC_OK);
    assert_close(ratio, scores, 2);
    assert_rows(&row, select_rows(scores, 2, 1, NULL, 1, KVC_BLOCK_MEAN, &row), (int32_t[]){1}, 1);
}

static void steps_added_one_by_one_give_the_same_scores(void **state)
{
    uint64_t rng = 1;

    (void)state;
    for (int draw = 0; draw < 200; draw++) {
        static float attention[MAX_QUERIES][MAX_ROWS];
        const size_t n = 1 + rng_below(&rng, MAX_ROWS), n_queries = rng_below(&rng, MAX_QUERIES);
        const size_t first = rng_below(&rng, n + 10);
        const kvc_heavy_options o = heavy_options(0.75f + 0.2f * rng_unit(&rng), 5.0f, 0);
        float num[MAX_ROWS] = {0}, den[MAX_ROWS] = {0}, ratio[MAX_ROWS], scores[MAX_ROWS];

        for (size_t q = 0; q < n_queries; q++) {
            const size_t seen = first + q + 1 < n ? first + q + 1 : n;
            for (size_t i = 0; i < MAX_ROWS; i++) {
                attention[q][i] = i < seen ? 0.5f + 0.5f * rng_unit(&rng) : NAN;
            }
            assert_int_equal(kvc_heavy_add(attention[q], seen, &o, num, den), KVC_OK);
        }
        assert_int_equal(kvc_heavy_ratio(num, den, n, ratio), KVC_OK);
        assert_int_equal(kvc_heavy_scores(attention[0], n_queries, n, MAX_ROWS, first, &o, scores),
                         KVC_OK);
        for (size_t i = 0; i < n; i++) {
            assert_near(ratio[i], scores[i], 1e-5f * (1.0f + scores[i]));
        }
    }
}

static void the_newest_queries_weigh_more(void **state)
{
    static const float a[3][2] = {{.5f, .5f}, {.5f, .5f}, {.75f, .25f}};
    const kvc_heavy_options once = heavy_options(1.0f, 2.0f, 1), all = heavy_options(1.0f, 2.0f, 3);
    float scores[2];

    (void)state;
    assert_int_equal(kvc_heavy_scores(a[0], 3, 2, 2, 1, &once, scores), KVC_OK);
    assert_close(scores, (float[]){(1 + 1 + 2 * 1.5f) / 4, (1 + 1 + 2 * 0.5f) / 4}, 2);
    assert_int_equal(kvc_heavy_scores(a[0], 3, 2, 2, 1, &all, scores), KVC_OK);
    assert_close(scores, (float[]){(1 + 1 + 1.5f) / 3, (1 + 1 + 0.5f) / 3}, 2);
}

static void a_row_that_nobody_sees_scores_zero(void **state)
{
    static const float a[1][3] = {{1, NAN, -1}};
    float scores[3] = {7, 7, 7}, num[2] = {1, 1}, den[2] = {0, 2};

    (void)state;
    assert_int_equal(kvc_heavy_scores(a[0], 1, 3, 3, 0, NULL, scores), KVC_OK);
    assert_true(scores[0] == 1.0f && scores[1] == 0.0f && scores[2] == 0.0f);
    assert_int_equal(kvc_heavy_scores(NULL, 0, 3, 3, 0, NULL, scores), KVC_OK);
    assert_true(scores[0] == 0.0f);
    assert_int_equal(kvc_heavy_ratio(num, den, 2, num), KVC_OK);
    assert_true(num[0] == 0.0f && num[1] == 0.5f);
}

static void heavy_hitters_refuse_bad_arguments(void **state)
{
    static const float good[2] = {.5f, .5f}, bad[][2] = {{-.1f, 1}, {NAN, 1}, {.5f, INFINITY}};
    const kvc_heavy_options wrong[] = {
        heavy_options(0.0f, 1, 1), heavy_options(1.1f, 1, 1),     heavy_options(NAN, 1, 1),
        heavy_options(1, 0.0f, 1), heavy_options(1, INFINITY, 1), heavy_options(1, 1, -1),
        {.struct_size = 8},
    };
    float num[2] = {7, 7}, den[2] = {7, 7}, s[2] = {7, 7};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(kvc_heavy_scores(bad[i], 1, 2, 2, 1, NULL, s), KVC_E_ARG);
        assert_int_equal(kvc_heavy_add(bad[i], 2, NULL, num, den), KVC_E_ARG);
    }
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(kvc_heavy_scores(good, 1, 2, 2, 1, &wrong[i], s), KVC_E_ARG);
        assert_int_equal(kvc_heavy_add(good, 2, &wrong[i], num, den), KVC_E_ARG);
    }
    assert_int_equal(kvc_heavy_scores(NULL, 1, 2, 2, 1, NULL, s), KVC_E_ARG);
    assert_int_equal(kvc_heavy_scores(good, 1, 2, 2, 1, NULL, NULL), KVC_E_ARG);
    assert_int_equal(kvc_heavy_scores(good, 1, 2, 1, 1, NULL, s), KVC_E_ARG);
    assert_int_equal(kvc_heavy_add(NULL, 2, NULL, num, den), KVC_E_ARG);
    assert_int_equal(kvc_heavy_add(good, 2, NULL, NULL, den), KVC_E_ARG);
    assert_int_equal(kvc_heavy_add(good, 2, NULL, num, NULL), KVC_E_ARG);
    assert_int_equal(kvc_heavy_ratio(NULL, den, 2, s), KVC_E_ARG);
    assert_int_equal(kvc_heavy_ratio(num, NULL, 2, s), KVC_E_ARG);
    assert_int_equal(kvc_heavy_ratio(num, den, 2, NULL), KVC_E_ARG);
    assert_true(s[0] == 7 && num[0] == 7 && num[1] == 7 && den[0] == 7);
    assert_int_equal(kvc_heavy_add(NULL, 0, NULL, NULL, NULL), KVC_OK);
    assert_int_equal(kvc_heavy_ratio(NULL, NULL, 0, NULL), KVC_OK);
}

static void layers_count_alike_whatever_their_scale(void **state)
{
    static const float a[4] = {1, 2, 3, 2}, b[4] = {8e6f, 0, 0, 0}, zeros[4] = {0};
    static const float weights[3] = {3, 1, 0};
    const float *layers[3] = {a, b, zeros};
    float out[4];

    (void)state;
    /* Mean 1: .5 1 1.5 1 and 4 0 0 0. */
    assert_int_equal(kvc_combine_scores(layers, 2, 4, NULL, false, out), KVC_OK);
    assert_close(out, (float[]){2.25f, 0.5f, 0.75f, 0.5f}, 4);
    assert_int_equal(kvc_combine_scores(layers, 2, 4, NULL, true, out), KVC_OK);
    assert_close(out, (float[]){4, 1, 1.5f, 1}, 4);
    assert_int_equal(kvc_combine_scores(layers, 3, 4, weights, false, out), KVC_OK);
    assert_close(out, (float[]){1.375f, 0.75f, 1.125f, 0.75f}, 4);
    assert_int_equal(kvc_combine_scores(layers, 3, 4, weights, true, out), KVC_OK);
    assert_close(out, (float[]){4, 1, 1.5f, 1}, 4);
    assert_int_equal(kvc_combine_scores(layers, 3, 4, NULL, false, out), KVC_OK);
    assert_close(out, (float[]){1.5f, 1.0f / 3, 0.5f, 1.0f / 3}, 4);
    assert_int_equal(kvc_combine_scores(layers + 2, 1, 4, NULL, false, out), KVC_OK);
    assert_close(out, zeros, 4);
}

/* faults C6 and G4: what is not finite adds nothing and is never chosen. */
static void values_that_are_not_finite_add_nothing(void **state)
{
    static const float a[4] = {1, NAN, 3, NAN}, b[4] = {NAN, INFINITY, 2, -INFINITY};
    const float *layers[2] = {a, b};
    float out[4];
    int32_t rows[4];

    (void)state;
    assert_int_equal(kvc_combine_scores(layers, 2, 4, NULL, false, out), KVC_OK);
    assert_close(out, (float[]){0.25f}, 1);
    assert_near(out[2], 0.75f + 0.5f, 1e-6f);
    assert_true(isnan(out[1]) && isnan(out[3]));
    assert_rows(rows, select_rows(out, 4, 4, NULL, 1, KVC_BLOCK_MEAN, rows), (int32_t[]){0, 2}, 2);
}

static void combining_refuses_bad_arguments(void **state)
{
    static const float a[2] = {1, 2}, negative[2] = {1, -2};
    static const float weights[][2] = {{0, 0}, {-1, 2}, {NAN, 1}, {1, INFINITY}};
    const float *layers[2] = {a, a}, *bad[2] = {a, negative}, *missing[2] = {a, NULL};
    float out[2] = {7, 7};

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(kvc_combine_scores(layers, 2, 2, weights[i], false, out), KVC_E_ARG);
    }
    assert_int_equal(kvc_combine_scores(bad, 2, 2, NULL, false, out), KVC_E_ARG);
    assert_int_equal(kvc_combine_scores(missing, 2, 2, NULL, false, out), KVC_E_ARG);
    assert_int_equal(kvc_combine_scores(NULL, 2, 2, NULL, false, out), KVC_E_ARG);
    assert_int_equal(kvc_combine_scores(layers, 0, 2, NULL, false, out), KVC_E_ARG);
    assert_int_equal(kvc_combine_scores(layers, 2, 2, NULL, false, NULL), KVC_E_ARG);
    assert_true(out[0] == 7 && out[1] == 7);
    /* A layer of weight 0 is not read. */
    assert_int_equal(kvc_combine_scores(missing, 2, 2, (float[]){1, 0}, false, out), KVC_OK);
    assert_int_equal(kvc_combine_scores(layers, 2, 0, NULL, false, NULL), KVC_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_heavy_options_set_every_field),
        cmocka_unit_test(even_attention_lifts_every_row_by_one),
        cmocka_unit_test(decayed_lift_is_that_of_the_reference),
        cmocka_unit_test(sums_of_decode_steps_are_those_of_the_reference),
        cmocka_unit_test(old_attention_is_outranked),
        cmocka_unit_test(steps_added_one_by_one_give_the_same_scores),
        cmocka_unit_test(the_newest_queries_weigh_more),
        cmocka_unit_test(a_row_that_nobody_sees_scores_zero),
        cmocka_unit_test(heavy_hitters_refuse_bad_arguments),
        cmocka_unit_test(layers_count_alike_whatever_their_scale),
        cmocka_unit_test(values_that_are_not_finite_add_nothing),
        cmocka_unit_test(combining_refuses_bad_arguments),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
