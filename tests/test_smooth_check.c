/* The check of a fold: right folds pass, every kind of wrong one is told. */
#include <math.h>
#include <string.h>

#include "kvc/smooth.h"
#include "support/fold_model.h"
#include "support/tables.h"

static kvc_rope rope_of(kvc_rope_layout layout, int32_t n_dims)
{
    kvc_rope rope;

    kvc_rope_default(&rope);
    rope.layout = layout;
    rope.n_dims = n_dims;
    return rope;
}

/* The change of scores between two sets of rows. */
static double change_of(kvc_ctx *ctx, struct fold_rows *was, struct fold_rows *is,
                        const kvc_rope *rope)
{
    const kvc_view q = kvc_view_packed(was->q, KVC_DTYPE_F32, FOLD_ROWS, 4, FOLD_DIM);
    const kvc_view k = kvc_view_packed(was->k, KVC_DTYPE_F32, FOLD_ROWS, 2, FOLD_DIM);
    const kvc_view q_folded = kvc_view_packed(is->q, KVC_DTYPE_F32, FOLD_ROWS, 4, FOLD_DIM);
    const kvc_view k_folded = kvc_view_packed(is->k, KVC_DTYPE_F32, FOLD_ROWS, 2, FOLD_DIM);
    const kvc_smooth_probe probe = {sizeof(probe),  &q,  &k, &q_folded, &k_folded,
                                    fold_positions, rope};
    double change = -1.0;

    assert_int_equal(kvc_smooth_check(ctx, &probe, &change), KVC_OK);
    return change;
}

/* What a fold with these scales changes. */
static double change_by(kvc_ctx *ctx, const float *scales, kvc_rope_layout layout, int32_t n_rot)
{
    const kvc_rope rope = rope_of(layout, n_rot);
    struct fold_model m = fold_model_of(3);
    struct fold_rows was = fold_model_rows(&m), is;

    fold_model_fold(ctx, &m, scales, false);
    is = fold_model_rows(&m);
    return change_of(ctx, &was, &is, &rope);
}

static void right_folds_change_roundings_and_powers_of_two_nothing(void **state)
{
    for (size_t i = 0; i < sizeof(fold_golden) / sizeof(*fold_golden); i++) {
        const struct fold_golden *g = &fold_golden[i];
        const double change = change_by(best(state), g->scales, g->layout, g->n_rot);

        if (g->power_of_two)
            assert_true(change == 0.0);
        else
            assert_true(change > 0.0 && change < 3e-7);
    }
}

static void scales_that_differ_in_a_pair_are_told(void **state)
{
    float scales[16];

    for (size_t i = 0; i < 16; i++)
        scales[i] = i % 8 == 0 ? 4.0f : 1.0f;
    const double change = change_by(best(state), scales, KVC_ROPE_HALF_SPLIT, 8);
    assert_true(fabs(change - 0.1321) < 5e-5);
}

/* Known fault F4. */
static void pairs_of_the_other_layout_are_told(void **state)
{
    float scales[16];
    const struct fold_model m = fold_model_of(3);

    fold_model_scales(best(state), &m, KVC_ROPE_INTERLEAVED, 8, scales);
    const double change = change_by(best(state), scales, KVC_ROPE_HALF_SPLIT, 8);
    assert_true(fabs(change - 0.3659) < 5e-5);
}

/* Known faults F2, F3 and F5: a bias that was forgotten, heads that were mixed up, a fold twice. */
static void parts_that_were_folded_wrongly_are_told(void **state)
{
    const struct fold_golden *g = &fold_golden[0];
    const kvc_rope rope = rope_of(g->layout, g->n_rot);
    const struct fold_model m = fold_model_of(3);
    struct fold_rows was = fold_model_rows(&m), is;
    struct fold_model bad = m;
    float swapped[16];

    fold_model_fold(best(state), &bad, g->scales, false);
    memcpy(bad.bk, m.bk, sizeof(m.bk));
    is = fold_model_rows(&bad);
    assert_true(change_of(best(state), &was, &is, &rope) > 1e-2);

    memcpy(swapped, g->scales + 8, sizeof(swapped) / 2);
    memcpy(swapped + 8, g->scales, sizeof(swapped) / 2);
    bad = m;
    fold_model_fold(best(state), &bad, swapped, false);
    memcpy(bad.wk, m.wk, sizeof(m.wk));
    memcpy(bad.bk, m.bk, sizeof(m.bk));
    is = fold_model_rows(&bad);
    assert_true(change_of(best(state), &was, &is, &rope) > 1e-2);

    bad = m;
    fold_model_fold(best(state), &bad, g->scales, false);
    memcpy(bad.wq, m.wq, sizeof(m.wq)); /* K once, Q never */
    is = fold_model_rows(&bad);
    assert_true(change_of(best(state), &was, &is, &rope) > 1e-2);
}

/* An RMS norm of every head, then its gain. */
static void normalise(float *x, size_t n_heads, const float *gain, float offset)
{
    for (size_t i = 0; i < FOLD_ROWS * n_heads; i++, x += FOLD_DIM) {
        double sum = 0.0;
        for (size_t c = 0; c < FOLD_DIM; c++)
            sum += (double)x[c] * (double)x[c];
        for (size_t c = 0; c < FOLD_DIM; c++)
            x[c] = (float)((double)x[c] / sqrt(sum / FOLD_DIM + 1e-6) *
                           ((double)offset + (double)gain[c]));
    }
}

static struct fold_rows normed_rows(const struct fold_model *m, const float *q_gain,
                                    const float *k_gain, float offset)
{
    struct fold_rows rows;

    fold_project(m->x, m->wq, NULL, FOLD_Q, rows.q);
    fold_project(m->x, m->wk, NULL, FOLD_K, rows.k);
    normalise(rows.q, 4, q_gain, offset);
    normalise(rows.k, 2, k_gain, offset);
    return rows;
}

static void folds_into_gains_change_roundings_only(void **state)
{
    const struct fold_model m = fold_model_of(4);
    const kvc_rope rope = rope_of(KVC_ROPE_HALF_SPLIT, 8);
    float q_gain[8], k_gain[8];

    norm_gains(q_gain, k_gain);
    for (size_t i = 0; i < sizeof(norm_golden) / sizeof(*norm_golden); i++) {
        const struct norm_golden *g = &norm_golden[i];
        struct fold_rows was = normed_rows(&m, q_gain, k_gain, g->offset);
        struct fold_rows is = normed_rows(&m, g->q_gain, g->k_gain, g->offset);
        assert_true(change_of(best(state), &was, &is, &rope) < 5e-7);
        is = normed_rows(&m, g->q_gain, g->k_gain, 1.0f - g->offset); /* the other way to store */
        assert_true(change_of(best(state), &was, &is, &rope) > 1e-2);
    }
}

/* What is folded into a projection in front of a norm leaks into other channels. */
static void a_projection_in_front_of_a_norm_is_told(void **state)
{
    const struct fold_model m = fold_model_of(4);
    const kvc_rope rope = rope_of(KVC_ROPE_HALF_SPLIT, 8);
    struct fold_model bad = m;
    float q_gain[8], k_gain[8], scales[16];

    for (size_t i = 0; i < 16; i++)
        scales[i] = i % 4 == 2 ? 4.0f : 1.0f;
    norm_gains(q_gain, k_gain);
    fold_model_fold(best(state), &bad, scales, false);
    struct fold_rows was = normed_rows(&m, q_gain, k_gain, 0.0f);
    struct fold_rows is = normed_rows(&bad, q_gain, k_gain, 0.0f);
    assert_true(change_of(best(state), &was, &is, &rope) > 1e-2);
}

/* Without a rotation pairs need not agree. */
static void without_a_rotation_any_scales_are_right(void **state)
{
    struct fold_model m = fold_model_of(3);
    struct fold_rows was = fold_model_rows(&m), is;
    float scales[16];

    for (size_t i = 0; i < 16; i++)
        scales[i] = 1.0f + (float)i;
    fold_model_fold(best(state), &m, scales, false);
    is = fold_model_rows(&m);
    assert_true(change_of(best(state), &was, &is, NULL) < 3e-7);
}

/* One query and one key: scores 2 * 3 = 6 and 2 * 2 = 4, so 1 / 3. */
static void the_change_is_relative_to_the_largest_score(void **state)
{
    float q[1] = {2}, k[1] = {3}, k_folded[1] = {2};
    const int32_t at = 0;
    const kvc_view q_view = kvc_view_packed(q, KVC_DTYPE_F32, 1, 1, 1);
    const kvc_view k_view = kvc_view_packed(k, KVC_DTYPE_F32, 1, 1, 1);
    const kvc_view folded = kvc_view_packed(k_folded, KVC_DTYPE_F32, 1, 1, 1);
    const kvc_view none = kvc_view_packed(NULL, KVC_DTYPE_F32, 0, 1, 1);
    kvc_smooth_probe probe = {sizeof(probe), &q_view, &k_view, &q_view, &folded, &at, NULL};
    double change = -1.0;

    assert_int_equal(kvc_smooth_check(best(state), &probe, &change), KVC_OK);
    assert_true(fabs(change - 1.0 / 3.0) < 1e-15);
    k_folded[0] = INFINITY;
    assert_int_equal(kvc_smooth_check(best(state), &probe, &change), KVC_OK);
    assert_true(isnan(change));
    k_folded[0] = 3.0f;
    k[0] = NAN;
    assert_int_equal(kvc_smooth_check(best(state), &probe, &change), KVC_OK);
    assert_true(isnan(change));
    probe = (kvc_smooth_probe){sizeof(probe), &none, &none, &none, &none, NULL, NULL};
    assert_int_equal(kvc_smooth_check(best(state), &probe, &change), KVC_OK);
    assert_true(change == 0.0);
}

/* A probe that is refused. Returns what is wrong, NULL past the end. */
static const char *spoil(kvc_smooth_probe *p, const kvc_view *other, kvc_rope *rope, int32_t *at,
                         size_t which)
{
    switch (which) {
    case 0: p->struct_size = 8; return "struct_size too small";
    case 1: p->q = NULL; return "no q";
    case 2: p->k = NULL; return "no k";
    case 3: p->q_folded = NULL; return "no q_folded";
    case 4: p->k_folded = NULL; return "no k_folded";
    case 5: p->positions = NULL; return "no positions";
    case 6: at[2] = -1; return "a negative position";
    case 7: p->q_folded = &other[0]; return "other heads of Q";
    case 8: p->k_folded = &other[1]; return "other rows of K";
    case 9: p->k = p->k_folded = &other[1]; return "fewer keys than queries";
    case 10: p->k = p->k_folded = &other[2]; return "another head size of K";
    case 11: p->k = p->k_folded = &other[0]; return "heads that do not divide";
    case 12: rope->n_dims = 10; return "n_dims above head_dim";
    case 13: rope->n_dims = 7; return "n_dims odd";
    case 14: rope->n_dims = -2; return "n_dims negative";
    case 15: rope->base = 0.0; return "base 0";
    }
    return NULL;
}

static void bad_probes_are_refused_and_nothing_is_written(void **state)
{
    struct fold_model m = fold_model_of(3);
    struct fold_rows rows = fold_model_rows(&m);
    const kvc_view q = kvc_view_packed(rows.q, KVC_DTYPE_F32, FOLD_ROWS, 4, FOLD_DIM);
    const kvc_view k = kvc_view_packed(rows.k, KVC_DTYPE_F32, FOLD_ROWS, 2, FOLD_DIM);
    const kvc_view other[3] = {kvc_view_packed(rows.q, KVC_DTYPE_F32, FOLD_ROWS, 3, FOLD_DIM),
                               kvc_view_packed(rows.k, KVC_DTYPE_F32, FOLD_ROWS - 1, 2, FOLD_DIM),
                               kvc_view_packed(rows.k, KVC_DTYPE_F32, FOLD_ROWS, 2, FOLD_DIM - 1)};
    double change = -1.0;
    const char *what = "";

    for (size_t i = 0; what; i++) {
        kvc_rope rope = rope_of(KVC_ROPE_HALF_SPLIT, 8);
        int32_t at[FOLD_ROWS] = {0, 1, 57};
        kvc_smooth_probe probe = {sizeof(probe), &q, &k, &q, &k, at, &rope};

        assert_int_equal(kvc_smooth_check(NULL, &probe, &change), KVC_E_ARG);
        assert_int_equal(kvc_smooth_check(best(state), NULL, &change), KVC_E_ARG);
        assert_int_equal(kvc_smooth_check(best(state), &probe, NULL), KVC_E_ARG);
        what = spoil(&probe, other, &rope, at, i);
        if (what && kvc_smooth_check(best(state), &probe, &change) != KVC_E_ARG)
            fail_msg("%s is accepted", what);
    }
    assert_true(change == -1.0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_folds_change_roundings_and_powers_of_two_nothing),
        cmocka_unit_test(scales_that_differ_in_a_pair_are_told),
        cmocka_unit_test(pairs_of_the_other_layout_are_told),
        cmocka_unit_test(parts_that_were_folded_wrongly_are_told),
        cmocka_unit_test(folds_into_gains_change_roundings_only),
        cmocka_unit_test(a_projection_in_front_of_a_norm_is_told),
        cmocka_unit_test(without_a_rotation_any_scales_are_right),
        cmocka_unit_test(the_change_is_relative_to_the_largest_score),
        cmocka_unit_test(bad_probes_are_refused_and_nothing_is_written),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
