/* Folding scales into projections and norms: reference numbers, known faults, rounding, errors. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kvc/smooth.h"
#include "support/fold_model.h"
#include "support/tables.h"

static kvc_weight weight_of(float *data, size_t n_rows, size_t n_cols, float *bias)
{
    const kvc_weight w = {.struct_size = sizeof(w),
                          .data = data,
                          .dtype = KVC_DTYPE_F32,
                          .n_rows = n_rows,
                          .n_cols = n_cols,
                          .stride = n_cols,
                          .bias = bias,
                          .bias_dtype = KVC_DTYPE_F32};
    return w;
}

static void folds_are_those_of_the_reference(void **state)
{
    for (size_t i = 0; i < sizeof(fold_golden) / sizeof(*fold_golden); i++) {
        const struct fold_golden *g = &fold_golden[i];
        struct fold_model m = fold_model_of(3);

        fold_model_fold(best(state), &m, g->scales, false);
        assert_memory_equal(m.wk, g->wk, sizeof(g->wk));
        assert_memory_equal(m.bk, g->bk, sizeof(g->bk));
        assert_memory_equal(m.bq, g->bq, sizeof(g->bq));
    }
}

static void gains_are_those_of_the_reference(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(norm_golden) / sizeof(*norm_golden); i++) {
        const struct norm_golden *g = &norm_golden[i];
        float scales[16], k_gain[8], q_gain[8];

        memcpy(scales, g->scales, sizeof(g->scales));
        memcpy(scales + 8, g->scales, sizeof(g->scales));
        norm_gains(q_gain, k_gain);
        assert_int_equal(kvc_fold_norm(k_gain, KVC_DTYPE_F32, 8, g->offset, KVC_FOLD_K, false,
                                       scales, 2, 8, NULL),
                         KVC_OK);
        assert_int_equal(kvc_fold_norm(q_gain, KVC_DTYPE_F32, 8, g->offset, KVC_FOLD_Q, false,
                                       scales, 2, 8, NULL),
                         KVC_OK);
        assert_memory_equal(k_gain, g->k_gain, sizeof(k_gain));
        assert_memory_equal(q_gain, g->q_gain, sizeof(q_gain));
    }
}

/* Row 8 h + 4 j + i of half-split heads becomes row 8 h + 2 i + j of interleaved ones. */
static void permute(const float *from, size_t n_heads, size_t n_cols, float *to)
{
    for (size_t h = 0; h < n_heads; h++)
        for (size_t i = 0; i < 4; i++)
            for (size_t j = 0; j < 2; j++)
                memcpy(to + (8 * h + 2 * i + j) * n_cols, from + (8 * h + 4 * j + i) * n_cols,
                       n_cols * sizeof(*to));
}

static struct fold_model permuted(const struct fold_model *m)
{
    struct fold_model p = *m;

    permute(m->wq, 4, FOLD_EMB, p.wq);
    permute(m->bq, 4, 1, p.bq);
    permute(m->wk, 2, FOLD_EMB, p.wk);
    permute(m->bk, 2, 1, p.bk);
    return p;
}

static void a_fold_of_permuted_rows_is_the_permuted_fold(void **state)
{
    const struct fold_model m = fold_model_of(6);
    struct fold_model folded = m, other = permuted(&m);
    float scales[16], permuted_scales[16];

    fold_model_scales(best(state), &m, KVC_ROPE_HALF_SPLIT, 8, scales);
    fold_model_scales(best(state), &other, KVC_ROPE_INTERLEAVED, 8, permuted_scales);
    fold_model_fold(best(state), &folded, scales, false);
    fold_model_fold(best(state), &other, permuted_scales, false);
    const struct fold_model want = permuted(&folded);
    /* The scales pass a sum of logarithms in another order. */
    for (size_t i = 0; i < sizeof(want.wk) / sizeof(float); i++)
        assert_true(fabsf(other.wk[i] - want.wk[i]) <= 0x1p-22f * fabsf(want.wk[i]));
    float expected[16];
    permute(scales, 2, 1, expected);
    other = permuted(&m);
    fold_model_fold(best(state), &other, expected, false);
    assert_memory_equal(&other, &want, sizeof(want));
}

/* Known fault F2: of a fused projection only the rows of the side change, of weight and bias. */
static void a_fused_projection_is_folded_by_its_rows(void **state)
{
    const float scales[2] = {2, 2}, want_bias[6] = {2, 4, 1.5f, 2, 5, 6};
    const float want[12] = {2, 4, 6, 8, 2.5f, 3, 3.5f, 4, 9, 10, 11, 12};
    float weight[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, bias[6] = {1, 2, 3, 4, 5, 6};
    const kvc_weight q = weight_of(weight, 2, 2, bias), k = weight_of(weight + 4, 2, 2, bias + 2);

    assert_int_equal(kvc_fold_linear(best(state), &q, KVC_FOLD_Q, false, scales, 1, 2, NULL),
                     KVC_OK);
    assert_int_equal(kvc_fold_linear(best(state), &k, KVC_FOLD_K, false, scales, 1, 2, NULL),
                     KVC_OK);
    assert_memory_equal(weight, want, sizeof(want));
    assert_memory_equal(bias, want_bias, sizeof(want_bias));
}

/* Known fault F3: query head j takes the scales of the KV head that it reads. */
static void query_heads_take_the_scales_of_their_kv_head(void **state)
{
    const float scales[4] = {2, 2, 4, 4}, want[8] = {2, 2, 2, 2, 4, 4, 4, 4};
    float weight[8] = {1, 1, 1, 1, 1, 1, 1, 1}, bias[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    const kvc_weight w = weight_of(weight, 8, 1, bias);

    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_Q, false, scales, 2, 2, NULL),
                     KVC_OK);
    assert_memory_equal(weight, want, sizeof(want));
    assert_memory_equal(bias, want, sizeof(want));
}

/* q . k of one head of 4, rotated at 5 and 2, where q' = q s and k' = k / s. */
static double score_at_5_and_2(kvc_rope_layout layout, const float *s)
{
    const double q[4] = {1, 2, 3, 4}, k[4] = {1, -1, 2, 0.5};
    double turned[2][4], sum = 0.0;

    for (size_t c = 0; c < 4; c++) {
        turned[0][c] = q[c] * (double)s[c];
        turned[1][c] = k[c] / (double)s[c];
    }
    fold_rotate(turned[0], layout, 4, 5);
    fold_rotate(turned[1], layout, 4, 2);
    for (size_t c = 0; c < 4; c++)
        sum += turned[0][c] * turned[1][c];
    return sum;
}

/* Known fault F4: scales follow the pairs of the layout; those of the other change the score. */
static void scales_of_the_layout_keep_the_score_and_others_do_not(void **state)
{
    const float absmax[4] = {1, 2, 3, 4}, ones[4] = {1, 1, 1, 1};
    const double kept[2] = {-6.92109, 8.368062}, lost[2] = {-7.380586, 8.218026};
    float scales[2][4];

    for (int layout = 0; layout < 2; layout++)
        fold_scales_of_row(best(state), absmax, (kvc_rope_layout)layout, scales[layout]);
    for (int layout = 0; layout < 2; layout++) {
        const kvc_rope_layout l = (kvc_rope_layout)layout;
        assert_true(fabs(score_at_5_and_2(l, ones) - kept[layout]) < 2e-6);
        assert_true(fabs(score_at_5_and_2(l, scales[layout]) - kept[layout]) < 2e-6);
        assert_true(fabs(score_at_5_and_2(l, scales[1 - layout]) - lost[layout]) < 2e-6);
    }
}

static bool within_one_ulp(float x, float want)
{
    return x == want || x == nextafterf(want, INFINITY) || x == nextafterf(want, -INFINITY);
}

/* Known fault F5: the bias follows its rows, and undo restores where the inverse is not exact. */
static void undo_restores_weight_and_bias(void **state)
{
    const float scales[2] = {3, 3};
    float weight[4] = {1, -0.7f, 0.1f, 5}, bias[2] = {10, -1.1f}, before[4], bias_before[2];
    const kvc_weight w = weight_of(weight, 2, 2, bias);

    memcpy(before, weight, sizeof(before));
    memcpy(bias_before, bias, sizeof(bias_before));
    for (int side = 0; side < 2; side++) {
        assert_int_equal(
            kvc_fold_linear(best(state), &w, (kvc_fold_side)side, false, scales, 1, 2, NULL),
            KVC_OK);
        for (size_t i = 0; i < 2; i++)
            assert_true(bias[i] == (side == KVC_FOLD_K ? bias_before[i] / 3 : bias_before[i] * 3));
        assert_true(weight[3] == (side == KVC_FOLD_K ? before[3] / 3 : before[3] * 3));
        assert_int_equal(
            kvc_fold_linear(best(state), &w, (kvc_fold_side)side, true, scales, 1, 2, NULL),
            KVC_OK);
        for (size_t i = 0; i < 4; i++)
            assert_true(within_one_ulp(weight[i], before[i]));
        for (size_t i = 0; i < 2; i++)
            assert_true(within_one_ulp(bias[i], bias_before[i]));
        memcpy(weight, before, sizeof(before));
        memcpy(bias, bias_before, sizeof(bias_before));
    }
}

static void undo_restores_gains_that_are_stored_less_one(void **state)
{
    const float scales[4] = {3, 0.7f, 3, 0.7f};
    float gain[2] = {0.25f, -0.5f};

    (void)state;
    assert_int_equal(
        kvc_fold_norm(gain, KVC_DTYPE_F32, 2, 1.0f, KVC_FOLD_Q, false, scales, 2, 2, NULL), KVC_OK);
    assert_true(gain[0] == 2.75f && fabsf(gain[1] + 0.65f) < 1e-7f);
    assert_int_equal(
        kvc_fold_norm(gain, KVC_DTYPE_F32, 2, 1.0f, KVC_FOLD_Q, true, scales, 2, 2, NULL), KVC_OK);
    assert_true(fabsf(gain[0] - 0.25f) <= 0x1p-23f && fabsf(gain[1] + 0.5f) <= 0x1p-23f);
}

static void gains_of_heads_are_folded_head_by_head(void **state)
{
    const float scales[4] = {2, 4, 8, 16};
    const uint16_t one = 0x3f80; /* BF16 */
    uint16_t q_gain[8], k_gain[4];
    /* 2, 4, 8, 16 for two query heads each; their inverses */
    const uint16_t want_q[8] = {0x4000, 0x4080, 0x4000, 0x4080, 0x4100, 0x4180, 0x4100, 0x4180};
    const uint16_t want_k[4] = {0x3f00, 0x3e80, 0x3e00, 0x3d80};

    (void)state;
    for (size_t i = 0; i < 8; i++)
        q_gain[i] = k_gain[i % 4] = one;
    assert_int_equal(
        kvc_fold_norm(q_gain, KVC_DTYPE_BF16, 8, 0.0f, KVC_FOLD_Q, false, scales, 2, 2, NULL),
        KVC_OK);
    assert_int_equal(
        kvc_fold_norm(k_gain, KVC_DTYPE_BF16, 4, 0.0f, KVC_FOLD_K, false, scales, 2, 2, NULL),
        KVC_OK);
    assert_memory_equal(q_gain, want_q, sizeof(q_gain));
    assert_memory_equal(k_gain, want_k, sizeof(k_gain));
}

static void what_lies_between_rows_stays(void **state)
{
    const float scales[2] = {2, 4}, want[5] = {2, 7, 12, 7, 7};
    float weight[5] = {1, 7, 3, 7, 7};
    uint16_t bias[2] = {0x3c00, 0x3c00}; /* halves, 1 */
    kvc_weight w = weight_of(weight, 2, 1, NULL);

    w.stride = 2;
    w.bias = bias;
    w.bias_dtype = KVC_DTYPE_F16;
    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_Q, false, scales, 1, 2, NULL),
                     KVC_OK);
    assert_memory_equal(weight, want, sizeof(want));
    assert_int_equal(bias[0], 0x4000);
    assert_int_equal(bias[1], 0x4400);
}

/* The smallest normal half is 2^-14, the largest 65504. */
static void what_a_half_cannot_hold_is_counted(void **state)
{
    const float scale = 4;
    /* 32768, -40960, 1, 2^-13, a subnormal, 0, NaN, -Inf */
    uint16_t q[8] = {0x7800, 0xf900, 0x3c00, 0x0800, 0x0001, 0x0000, 0x7e00, 0xfc00}, k[8];
    const uint16_t want_q[8] = {0x7bff, 0xfbff, 0x4400, 0x1000, 0x0004, 0, 0x7e00, 0xfc00};
    const uint16_t want_k[8] = {0x7000, 0xf100, 0x3400, 0x0200, 0x0000, 0, 0x7e00, 0xfc00};
    kvc_weight w = {.struct_size = sizeof(w),
                    .data = k,
                    .dtype = KVC_DTYPE_F16,
                    .n_rows = 1,
                    .n_cols = 8,
                    .stride = 8};
    kvc_fold_counts counts = {.struct_size = sizeof(counts), .n_overflow = 9};

    memcpy(k, q, sizeof(k));
    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_K, false, &scale, 1, 1, &counts),
                     KVC_OK);
    assert_memory_equal(k, want_k, sizeof(k));
    assert_int_equal(counts.n_overflow, 0);
    assert_int_equal(counts.n_underflow, 1);
    assert_true(counts.max_rel_error == 0.0);
    w.data = q;
    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_Q, false, &scale, 1, 1, &counts),
                     KVC_OK);
    assert_memory_equal(q, want_q, sizeof(q));
    assert_int_equal(counts.n_overflow, 2);
    assert_int_equal(counts.n_underflow, 0);
    assert_true(fabs(counts.max_rel_error - (1.0 - 65504.0 / 163840.0)) < 1e-12);
}

/* 1 / 3 as the upper half of a float is 0x3eab, 0.333984375; 1 / 2 is exact. */
static void the_largest_rounding_is_told(void **state)
{
    const float scales[2] = {2, 3};
    uint16_t weight[2] = {0x3f80, 0x3f80};
    const kvc_weight w = {.struct_size = sizeof(w),
                          .data = weight,
                          .dtype = KVC_DTYPE_BF16,
                          .n_rows = 2,
                          .n_cols = 1,
                          .stride = 1};
    kvc_fold_counts counts = {.struct_size = sizeof(counts)};

    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_K, false, scales, 1, 2, &counts),
                     KVC_OK);
    assert_int_equal(weight[0], 0x3f00);
    assert_int_equal(weight[1], 0x3eab);
    assert_true(fabs(counts.max_rel_error - 0.001953125) < 1e-12);
}

static void floats_saturate_too(void **state)
{
    const float scale = 0x1p100f;
    float weight[3] = {-1e30f, 1, FLT_MAX};
    const kvc_weight w = weight_of(weight, 1, 3, NULL);
    kvc_fold_counts counts = {.struct_size = sizeof(counts)};

    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_Q, false, &scale, 1, 1, &counts),
                     KVC_OK);
    assert_true(weight[0] == -FLT_MAX && weight[1] == 0x1p100f && weight[2] == FLT_MAX);
    assert_int_equal(counts.n_overflow, 2);
}

/* A weight, its scales or the way that is refused. Returns what is wrong, NULL past the end. */
static const char *spoil(kvc_weight *w, float *scales, kvc_fold_side *side, size_t which)
{
    switch (which) {
    case 0: w->struct_size = 8; return "struct_size too small";
    case 1: w->data = NULL; return "no data";
    case 2: w->data = (char *)w->data + 2; return "data misaligned";
    case 3: w->dtype = (kvc_dtype)3; return "dtype 3";
    case 4: w->n_rows = 0; return "no rows";
    case 5: w->n_rows = 5; return "rows that are no heads";
    case 6: w->n_rows = 8; return "more rows of K than KV heads";
    case 7: w->n_cols = 0; return "no columns";
    case 8: w->stride = 1; return "stride below n_cols";
    case 9: w->stride = SIZE_MAX / 4; return "beyond the address space";
    case 10: w->bias = (char *)w->bias + 1; return "bias misaligned";
    case 11: w->bias_dtype = (kvc_dtype)-1; return "bias_dtype -1";
    case 12: *side = (kvc_fold_side)2; return "side 2";
    case 13: scales[3] = 0.0f; return "scale 0";
    case 14: scales[3] = -1.0f; return "scale -1";
    case 15: scales[0] = NAN; return "scale NaN";
    case 16: scales[0] = INFINITY; return "scale Inf";
    }
    return NULL;
}

/* Known fault F1: no bad scale reaches a weight. */
static void bad_arguments_are_refused_and_nothing_changes(void **state)
{
    float weight[16], bias[8];
    const char *what = "";
    kvc_fold_counts counts = {.struct_size = sizeof(counts) - 1};

    for (size_t i = 0; i < 16; i++)
        weight[i] = bias[i / 2] = 7.0f;
    kvc_weight w = weight_of(weight, 4, 2, bias);
    float scales[4] = {2, 3, 4, 5};
    for (size_t i = 0; what; i++) {
        kvc_weight bad = w;
        float bad_scales[4] = {2, 3, 4, 5};
        kvc_fold_side side = KVC_FOLD_K;
        what = spoil(&bad, bad_scales, &side, i);
        if (what &&
            kvc_fold_linear(best(state), &bad, side, false, bad_scales, 2, 2, NULL) != KVC_E_ARG)
            fail_msg("%s is accepted", what);
    }
    assert_int_equal(kvc_fold_linear(NULL, &w, KVC_FOLD_K, false, scales, 2, 2, NULL), KVC_E_ARG);
    assert_int_equal(kvc_fold_linear(best(state), NULL, KVC_FOLD_K, false, scales, 2, 2, NULL),
                     KVC_E_ARG);
    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_K, false, NULL, 2, 2, NULL),
                     KVC_E_ARG);
    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_K, false, scales, 0, 2, NULL),
                     KVC_E_ARG);
    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_K, false, scales, 2, 0, NULL),
                     KVC_E_ARG);
    assert_int_equal(kvc_fold_linear(best(state), &w, KVC_FOLD_K, false, scales, 2, 2, &counts),
                     KVC_E_ARG);
    for (size_t i = 0; i < 16; i++)
        assert_true(weight[i] == 7.0f && bias[i / 2] == 7.0f);
}

static void bad_gains_are_refused_and_nothing_changes(void **state)
{
    const float scales[4] = {2, 3, 2, 4}, bad[4] = {2, 3, 2, 0};
    float gain[9] = {7, 7, 7, 7, 7, 7, 7, 7, 7};
    kvc_fold_counts counts = {.struct_size = 8};
    const struct {
        void *gain;
        kvc_dtype dtype;
        size_t n;
        float offset;
        kvc_fold_side side;
        const float *scales;
        kvc_fold_counts *counts;
    } cases[] = {
        {NULL, KVC_DTYPE_F32, 4, 0, KVC_FOLD_K, scales, NULL},
        {(char *)gain + 1, KVC_DTYPE_F32, 4, 0, KVC_FOLD_K, scales, NULL},
        {gain, (kvc_dtype)3, 4, 0, KVC_FOLD_K, scales, NULL},
        {gain, KVC_DTYPE_F32, 0, 0, KVC_FOLD_K, scales, NULL},
        {gain, KVC_DTYPE_F32, 2, 0, KVC_FOLD_K, scales, NULL}, /* one gain, heads that differ */
        {gain, KVC_DTYPE_F32, 2, 0, KVC_FOLD_Q, scales, NULL},
        {gain, KVC_DTYPE_F32, 3, 0, KVC_FOLD_Q, scales, NULL},
        {gain, KVC_DTYPE_F32, 8, 0, KVC_FOLD_K, scales, NULL}, /* of four heads, but K has two */
        {gain, KVC_DTYPE_F32, 4, 0.5f, KVC_FOLD_K, scales, NULL},
        {gain, KVC_DTYPE_F32, 4, NAN, KVC_FOLD_K, scales, NULL},
        {gain, KVC_DTYPE_F32, 4, 0, (kvc_fold_side)2, scales, NULL},
        {gain, KVC_DTYPE_F32, 4, 0, KVC_FOLD_K, bad, NULL},
        {gain, KVC_DTYPE_F32, 4, 0, KVC_FOLD_K, NULL, NULL},
        {gain, KVC_DTYPE_F32, 4, 0, KVC_FOLD_K, scales, &counts},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        assert_int_equal(kvc_fold_norm(cases[i].gain, cases[i].dtype, cases[i].n, cases[i].offset,
                                       cases[i].side, false, cases[i].scales, 2, 2,
                                       cases[i].counts),
                         KVC_E_ARG);
    for (size_t i = 0; i < 9; i++)
        assert_true(gain[i] == 7.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(folds_are_those_of_the_reference),
        cmocka_unit_test(gains_are_those_of_the_reference),
        cmocka_unit_test(a_fold_of_permuted_rows_is_the_permuted_fold),
        cmocka_unit_test(a_fused_projection_is_folded_by_its_rows),
        cmocka_unit_test(query_heads_take_the_scales_of_their_kv_head),
        cmocka_unit_test(scales_of_the_layout_keep_the_score_and_others_do_not),
        cmocka_unit_test(undo_restores_weight_and_bias),
        cmocka_unit_test(undo_restores_gains_that_are_stored_less_one),
        cmocka_unit_test(gains_of_heads_are_folded_head_by_head),
        cmocka_unit_test(what_lies_between_rows_stays),
        cmocka_unit_test(what_a_half_cannot_hold_is_counted),
        cmocka_unit_test(the_largest_rounding_is_told),
        cmocka_unit_test(floats_saturate_too),
        cmocka_unit_test(bad_arguments_are_refused_and_nothing_changes),
        cmocka_unit_test(bad_gains_are_refused_and_nothing_changes),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
