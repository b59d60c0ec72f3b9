/* Scores of an attention on random rows before and after a fold. */
#include "probe.h"

#include <math.h>
#include <stdlib.h>

/* Near, far and very far: a scale that differs inside a pair shows at each distance but 0. */
static const int32_t positions[] = {0, 1, 37, 1000};

enum { N_ROWS = sizeof(positions) / sizeof(*positions) };

/* Uniform in -1 ... 1, the same for every run. */
static float next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

static double dot(const float *a, const float *b, size_t n)
{
    double sum = 0.0;

    for (size_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

static float single(const struct weight *vector, size_t row)
{
    float x = 0.0f;

    if (vector->data)
        weight_row(vector, row, &x);
    return x;
}

/* out[t][r] = bias[r] + weight[r] . x[t] */
static void project(const struct weight *weight, const struct weight *bias, const float *x,
                    float *row, float *out)
{
    for (size_t r = 0; r < weight->n_rows; r++) {
        weight_row(weight, r, row);
        for (size_t t = 0; t < N_ROWS; t++)
            out[t * weight->n_rows + r] =
                (float)(dot(x + t * weight->n_cols, row, weight->n_cols) + (double)single(bias, r));
    }
}

/* What a norm gives is random too: out[t][head][c] = (offset + gain[c]) x[t][head][c] */
static void apply_gain(const struct weight *gain, float offset, const float *x, size_t n,
                       float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (offset + single(gain, i % gain->n_rows)) * x[i];
}

/* Rows of random numbers and what becomes of them. */
struct probe {
    float *x, *row; /* [N_ROWS][inputs]; [inputs] */
    float *q, *k, *q_folded, *k_folded;
};

static size_t n_inputs(const struct checkpoint *c, const struct attention *a)
{
    const size_t n_heads = c->n_heads * c->head_dim;

    if (c->type == KVC_SMOOTH_ROPE_NORM)
        return n_heads;
    return a->q.n_cols > a->k.n_cols ? a->q.n_cols : a->k.n_cols;
}

static bool allocate(struct probe *p, size_t n_in, size_t n_q, size_t n_k)
{
    p->x = calloc(N_ROWS * n_in, sizeof(float));
    p->row = calloc(n_in, sizeof(float));
    p->q = calloc(N_ROWS * n_q, sizeof(float));
    p->q_folded = calloc(N_ROWS * n_q, sizeof(float));
    p->k = calloc(N_ROWS * n_k, sizeof(float));
    p->k_folded = calloc(N_ROWS * n_k, sizeof(float));
    return p->x && p->row && p->q && p->q_folded && p->k && p->k_folded;
}

static void release(struct probe *p)
{
    free(p->x);
    free(p->row);
    free(p->q);
    free(p->q_folded);
    free(p->k);
    free(p->k_folded);
}

static void run(const struct checkpoint *c, const struct attention *a, const struct probe *p,
                float *q, float *k)
{
    if (c->type == KVC_SMOOTH_ROPE_LINEAR) {
        project(&a->q, &a->q_bias, p->x, p->row, q);
        project(&a->k, &a->k_bias, p->x, p->row, k);
        return;
    }
    apply_gain(&a->q_norm, c->gain_offset, p->x, N_ROWS * c->n_heads * c->head_dim, q);
    apply_gain(&a->k_norm, c->gain_offset, p->x, N_ROWS * checkpoint_width(c), k);
}

bool probe_change(kvc_ctx *ctx, const struct checkpoint *c, const struct attention *before,
                  const struct attention *after, double *change, struct failure *failure)
{
    const size_t n_in = n_inputs(c, before), d = c->head_dim;
    struct probe p = {0};
    uint64_t state = 1;

    if (!allocate(&p, n_in, c->n_heads * d, c->n_kv_heads * d)) {
        release(&p);
        return fail_with(failure, "out of memory");
    }
    for (size_t i = 0; i < N_ROWS * n_in; i++)
        p.x[i] = next_random(&state);
    run(c, before, &p, p.q, p.k);
    run(c, after, &p, p.q_folded, p.k_folded);
    const kvc_view q = kvc_view_packed(p.q, KVC_DTYPE_F32, N_ROWS, c->n_heads, d);
    const kvc_view k = kvc_view_packed(p.k, KVC_DTYPE_F32, N_ROWS, c->n_kv_heads, d);
    const kvc_view q2 = kvc_view_packed(p.q_folded, KVC_DTYPE_F32, N_ROWS, c->n_heads, d);
    const kvc_view k2 = kvc_view_packed(p.k_folded, KVC_DTYPE_F32, N_ROWS, c->n_kv_heads, d);
    const kvc_smooth_probe probe = {.struct_size = sizeof(probe),
                                    .q = &q,
                                    .k = &k,
                                    .q_folded = &q2,
                                    .k_folded = &k2,
                                    .positions = positions,
                                    .rope = &c->rope};
    const kvc_status status = kvc_smooth_check(ctx, &probe, change);
    release(&p);
    return status == KVC_OK ||
           fail_with(failure, "the scores cannot be compared: %s", kvc_status_str(status));
}
