/* Smooth the keys of one attention: observe, make scales, fold them into the weights, check. */
#include <kvc/kvc.h>
#include <stdio.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 8, INPUTS = 16, TOKENS = 32 };

static float noise(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(int32_t)*state * 0x1p-31f;
}

/* out = x w^T, rows of n_heads heads. */
static void project(const float *x, const float *w, int n_heads, float *out)
{
    for (int t = 0; t < TOKENS; t++)
        for (int r = 0; r < n_heads * DIM; r++) {
            float sum = 0.0f;
            for (int c = 0; c < INPUTS; c++)
                sum += x[t * INPUTS + c] * w[r * INPUTS + c];
            out[t * n_heads * DIM + r] = sum;
        }
}

static kvc_weight weight_of(float *data, size_t n_heads)
{
    const kvc_weight w = {.struct_size = sizeof(w),
                          .data = data,
                          .dtype = KVC_DTYPE_F32,
                          .n_rows = n_heads * DIM,
                          .n_cols = INPUTS,
                          .stride = INPUTS};
    return w;
}

int main(void)
{
    static float x[TOKENS * INPUTS], wq[HEADS * DIM * INPUTS], wk[KV_HEADS * DIM * INPUTS];
    static float q[2][TOKENS * HEADS * DIM], k[2][TOKENS * KV_HEADS * DIM];
    static float turned[TOKENS * KV_HEADS * DIM];
    static _Alignas(64) char ws[1 << 16];
    int32_t at[TOKENS], at3[TOKENS][3];
    float scales[KV_HEADS * DIM];
    uint32_t state = 1;
    double change = 1.0;

    for (size_t i = 0; i < sizeof(x) / sizeof(*x); i++)
        x[i] = noise(&state);
    for (size_t i = 0; i < sizeof(wq) / sizeof(*wq); i++)
        wq[i] = noise(&state);
    for (size_t i = 0; i < sizeof(wk) / sizeof(*wk); i++)
        wk[i] = noise(&state) * (i / INPUTS % DIM == 3 ? 20.0f : 1.0f); /* a loud channel */
    for (int32_t t = 0; t < TOKENS; t++)
        at[t] = at3[t][0] = at3[t][1] = at3[t][2] = t;

    /* What a model does: project, rotate, and show the keys that go into the cache. */
    const kvc_observed_shape shape = {sizeof(shape), 1, HEADS, KV_HEADS, DIM};
    const kvc_view keys = kvc_view_packed(turned, KVC_DTYPE_F32, TOKENS, KV_HEADS, DIM);
    kvc_observation *seen = NULL;
    kvc_rope rope;
    kvc_ctx *ctx = NULL;
    kvc_rope_default(&rope);
    rope.n_dims = DIM;
    project(x, wq, HEADS, q[0]);
    project(x, wk, KV_HEADS, k[0]);
    project(x, wk, KV_HEADS, turned);
    int ok = kvc_ctx_create(NULL, &ctx) == KVC_OK &&
             kvc_rope_apply(ctx, &rope, at3[0], &keys, ws, sizeof(ws)) == KVC_OK &&
             kvc_observation_create(ctx, &shape, &seen) == KVC_OK &&
             kvc_observe_keys(seen, 0, &keys) == KVC_OK;

    /* Scales, once, into both projections. */
    const kvc_weight q_weight = weight_of(wq, HEADS), k_weight = weight_of(wk, KV_HEADS);
    ok =
        ok && kvc_smooth_scales(seen, 0, NULL, scales) == KVC_OK &&
        kvc_fold_linear(ctx, &q_weight, KVC_FOLD_Q, false, scales, KV_HEADS, DIM, NULL) == KVC_OK &&
        kvc_fold_linear(ctx, &k_weight, KVC_FOLD_K, false, scales, KV_HEADS, DIM, NULL) == KVC_OK;

    /* The scores must be what they were. */
    project(x, wq, HEADS, q[1]);
    project(x, wk, KV_HEADS, k[1]);
    const kvc_view q0 = kvc_view_packed(q[0], KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    const kvc_view q1 = kvc_view_packed(q[1], KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    const kvc_view k0 = kvc_view_packed(k[0], KVC_DTYPE_F32, TOKENS, KV_HEADS, DIM);
    const kvc_view k1 = kvc_view_packed(k[1], KVC_DTYPE_F32, TOKENS, KV_HEADS, DIM);
    const kvc_smooth_probe probe = {sizeof(probe), &q0, &k0, &q1, &k1, at, &rope};
    ok = ok && kvc_smooth_check(ctx, &probe, &change) == KVC_OK && change < 1e-5;
    for (int c = 0; ok && c < DIM; c++)
        printf("channel %d: scale %.3f\n", c, (double)scales[c]);
    printf("scores changed by %.1e\n", change);
    kvc_observation_destroy(seen);
    kvc_ctx_destroy(ctx);
    return !ok;
}
