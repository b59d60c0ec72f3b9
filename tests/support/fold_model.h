/* A projection of 4 query and 2 KV heads of 8 channels, its rows and a rotation in double. */
#ifndef KVC_TESTS_FOLD_MODEL_H
#define KVC_TESTS_FOLD_MODEL_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "fold_golden.h"
#include "kvc/smooth.h"
#include "rng.h"
#include "tables.h"

enum { FOLD_ROWS = 3, FOLD_EMB = 6, FOLD_Q = 32, FOLD_K = 16, FOLD_DIM = 8 };

static const int32_t fold_positions[FOLD_ROWS] = {0, 1, 57};

struct fold_model {
    float x[FOLD_ROWS * FOLD_EMB];
    float wq[FOLD_Q * FOLD_EMB], bq[FOLD_Q], wk[FOLD_K * FOLD_EMB], bk[FOLD_K];
};

/* Q and K of its rows, before the rotation. */
struct fold_rows {
    float q[FOLD_ROWS * FOLD_Q], k[FOLD_ROWS * FOLD_K];
};

static inline void lcg_fill(float *x, size_t n, uint32_t *state)
{
    for (size_t i = 0; i < n; i++)
        x[i] = lcg_unit(state);
}

/* One bias of KV head 0 and one row of KV head 1 are large. */
static inline struct fold_model fold_model_of(uint32_t seed)
{
    struct fold_model m;

    lcg_fill(m.x, FOLD_ROWS * FOLD_EMB, &seed);
    lcg_fill(m.wq, FOLD_Q * FOLD_EMB, &seed);
    lcg_fill(m.bq, FOLD_Q, &seed);
    lcg_fill(m.wk, FOLD_K * FOLD_EMB, &seed);
    lcg_fill(m.bk, FOLD_K, &seed);
    m.bk[3] = 24.0f;
    for (size_t c = 0; c < FOLD_EMB; c++)
        m.wk[(FOLD_DIM + 6) * FOLD_EMB + c] *= 16.0f;
    return m;
}

/* Gains of norms of Q and K; one of K is large. */
static inline void norm_gains(float *q, float *k)
{
    uint32_t seed = 5;

    lcg_fill(q, FOLD_DIM, &seed);
    lcg_fill(k, FOLD_DIM, &seed);
    k[2] = 12.0f;
}

static inline void fold_project(const float *x, const float *w, const float *bias, size_t n_rows,
                                float *out)
{
    for (size_t t = 0; t < FOLD_ROWS; t++)
        for (size_t r = 0; r < n_rows; r++) {
            double sum = bias ? (double)bias[r] : 0.0;
            for (size_t c = 0; c < FOLD_EMB; c++)
                sum += (double)x[t * FOLD_EMB + c] * (double)w[r * FOLD_EMB + c];
            out[t * n_rows + r] = (float)sum;
        }
}

static inline struct fold_rows fold_model_rows(const struct fold_model *m)
{
    struct fold_rows rows;

    fold_project(m->x, m->wq, m->bq, FOLD_Q, rows.q);
    fold_project(m->x, m->wk, m->bk, FOLD_K, rows.k);
    return rows;
}

/* Turns the pairs of a head at a position, base 10000. */
static inline void fold_rotate(double *x, kvc_rope_layout layout, size_t n_rot, int32_t position)
{
    for (size_t j = 0; j < n_rot / 2; j++) {
        const bool half = layout == KVC_ROPE_HALF_SPLIT;
        double *a = &x[half ? j : 2 * j], *b = &x[half ? j + n_rot / 2 : 2 * j + 1];
        const double angle = position * pow(10000.0, -2.0 * (double)j / (double)n_rot);
        const double turned = *a * cos(angle) - *b * sin(angle);
        *b = *a * sin(angle) + *b * cos(angle);
        *a = turned;
    }
}

/* The default scales of K after a rotation. */
static inline void fold_model_scales(kvc_ctx *ctx, const struct fold_model *m,
                                     kvc_rope_layout layout, size_t n_rot, float *scales)
{
    const kvc_observed_shape shape = {sizeof(shape), 1, 4, 2, FOLD_DIM};
    struct fold_rows rows = fold_model_rows(m);
    kvc_smooth_options options;
    kvc_observation *o;

    for (size_t i = 0; i < FOLD_ROWS * 2; i++) {
        double x[FOLD_DIM];
        for (size_t c = 0; c < FOLD_DIM; c++)
            x[c] = (double)rows.k[i * FOLD_DIM + c];
        fold_rotate(x, layout, n_rot, fold_positions[i / 2]);
        for (size_t c = 0; c < FOLD_DIM; c++)
            rows.k[i * FOLD_DIM + c] = (float)x[c];
    }
    const kvc_view k = kvc_view_packed(rows.k, KVC_DTYPE_F32, FOLD_ROWS, 2, FOLD_DIM);
    kvc_smooth_options_default(&options);
    options.layout = layout;
    options.n_rot = (int32_t)n_rot;
    assert_int_equal(kvc_observation_create(ctx, &shape, &o), KVC_OK);
    assert_int_equal(kvc_observe_keys(o, 0, &k), KVC_OK);
    assert_int_equal(kvc_smooth_scales(o, 0, &options, scales), KVC_OK);
    kvc_observation_destroy(o);
}

/* Scales of one head of 4 whose absmax is given, as the article makes them. */
static inline void fold_scales_of_row(kvc_ctx *ctx, const float *absmax, kvc_rope_layout layout,
                                      float *scales)
{
    const kvc_observed_shape shape = {sizeof(shape), 1, 1, 1, 4};
    const kvc_view k = kvc_view_packed((void *)absmax, KVC_DTYPE_F32, 1, 1, 4);
    kvc_smooth_options options;
    kvc_observation *o;

    kvc_smooth_options_default(&options);
    options.layout = layout;
    options.norm = KVC_SMOOTH_PLAIN;
    assert_int_equal(kvc_observation_create(ctx, &shape, &o), KVC_OK);
    assert_int_equal(kvc_observe_keys(o, 0, &k), KVC_OK);
    assert_int_equal(kvc_smooth_scales(o, 0, &options, scales), KVC_OK);
    kvc_observation_destroy(o);
}

/* Folds both projections with their biases. */
static inline void fold_model_fold(kvc_ctx *ctx, struct fold_model *m, const float *scales,
                                   bool undo)
{
    const kvc_weight q = {sizeof(q), m->wq,    KVC_DTYPE_F32, FOLD_Q,
                          FOLD_EMB,  FOLD_EMB, m->bq,         KVC_DTYPE_F32};
    const kvc_weight k = {sizeof(k), m->wk,    KVC_DTYPE_F32, FOLD_K,
                          FOLD_EMB,  FOLD_EMB, m->bk,         KVC_DTYPE_F32};

    assert_int_equal(kvc_fold_linear(ctx, &q, KVC_FOLD_Q, undo, scales, 2, FOLD_DIM, NULL), KVC_OK);
    assert_int_equal(kvc_fold_linear(ctx, &k, KVC_FOLD_K, undo, scales, 2, FOLD_DIM, NULL), KVC_OK);
}

#endif
