/* Caches with transforms: one sequence of random rows, its parameters, and what attention must
 * give. */
#ifndef KVC_TESTS_TRANSFORM_SCENE_H
#define KVC_TESTS_TRANSFORM_SCENE_H

#include <math.h>
#include <string.h>

#include "cache_model.h"

enum { SCENE_TOKENS = 400, SCENE_HEADS = 4, SCENE_KV_HEADS = 2, SCENE_LAYERS = 2, SCENE_D = 96 };

/* Rows are those of all layers: what differs are the transforms. */
struct scene {
    int d_k, d_v, n;
    float k[SCENE_TOKENS][SCENE_KV_HEADS * SCENE_D], v[SCENE_TOKENS][SCENE_KV_HEADS * SCENE_D];
    float q[SCENE_TOKENS][SCENE_HEADS * SCENE_D];
    float mean[SCENE_LAYERS * SCENE_KV_HEADS * SCENE_D];
    float scale[SCENE_LAYERS * SCENE_KV_HEADS * SCENE_D];
    float out[SCENE_TOKENS][SCENE_HEADS * SCENE_D], lse[SCENE_TOKENS][SCENE_HEADS];
};

/* K with an offset and a scale in each channel, halves all of them. */
static inline void scene_make(struct scene *s, int d_k, int d_v, int n, uint64_t *rng)
{
    *s = (struct scene){.d_k = d_k, .d_v = d_v, .n = n};
    for (int i = 0; i < SCENE_LAYERS * SCENE_KV_HEADS * d_k; i++) {
        s->mean[i] = i % d_k % 5 == 1 ? 3.0f : 0.5f * normal(rng);
        s->scale[i] = i % d_k % 7 == 2 ? 6.0f : 0.5f + fabsf(normal(rng));
    }
    for (int t = 0; t < n; t++) {
        for (int i = 0; i < SCENE_KV_HEADS * d_k; i++)
            s->k[t][i] = half_round(s->mean[i] + s->scale[i] * normal(rng) / 2);
        for (int i = 0; i < SCENE_KV_HEADS * d_v; i++)
            s->v[t][i] = half_round(normal(rng));
        for (int i = 0; i < SCENE_HEADS * d_k; i++)
            s->q[t][i] = half_round(normal(rng));
    }
}

static inline kvc_cache_params scene_params(const struct scene *s, uint32_t transform)
{
    kvc_cache_params p;
    kvc_cache_params_default(&p);
    p.n_layers = SCENE_LAYERS;
    p.n_heads = SCENE_HEADS;
    p.n_kv_heads = SCENE_KV_HEADS;
    p.head_dim_k = s->d_k;
    p.head_dim_v = s->d_v;
    p.max_tokens = 2048;
    p.max_sequences = 3;
    p.precision = (kvc_precision){KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN};
    p.transform = transform;
    return p;
}

static inline kvc_cache *scene_open(kvc_ctx *ctx, kvc_cache_params p)
{
    kvc_cache *cache = NULL;
    assert_int_equal(kvc_cache_full_budget(&p, &p.budget_bytes), KVC_OK);
    assert_int_equal(kvc_cache_create(ctx, &p, &cache), KVC_OK);
    return cache;
}

/* Tokens first ... last - 1 in all layers, at most `chunk` in a call. */
static inline void scene_feed(struct scene *s, kvc_cache *cache, kvc_seq seq, int first, int last,
                              int chunk, const kvc_attend_options *options)
{
    for (int t = first, n; t < last; t += n) {
        n = last - t < chunk ? last - t : chunk;
        kvc_view k =
            kvc_view_packed(s->k[t], KVC_DTYPE_F32, (size_t)n, SCENE_KV_HEADS, (size_t)s->d_k);
        kvc_view v =
            kvc_view_packed(s->v[t], KVC_DTYPE_F32, (size_t)n, SCENE_KV_HEADS, (size_t)s->d_v);
        kvc_view q =
            kvc_view_packed(s->q[t], KVC_DTYPE_F32, (size_t)n, SCENE_HEADS, (size_t)s->d_k);
        kvc_view out =
            kvc_view_packed(s->out[t], KVC_DTYPE_F32, (size_t)n, SCENE_HEADS, (size_t)s->d_v);
        k.token_stride = v.token_stride = SCENE_KV_HEADS * SCENE_D;
        q.token_stride = out.token_stride = SCENE_HEADS * SCENE_D;
        assert_int_equal(kvc_tokens_add(cache, seq, NULL, (size_t)n), KVC_OK);
        for (int l = 0; l < SCENE_LAYERS; l++) {
            assert_int_equal(kvc_append(cache, seq, l, &k, &v), KVC_OK);
            assert_int_equal(kvc_attend(cache, seq, l, &q, options, &out, s->lse[t]), KVC_OK);
        }
    }
}

/* Row h of token t against all tokens before it and itself, in double, from given keys and values:
 * [tokens][SCENE_KV_HEADS * SCENE_D]. */
static inline double scene_attend(const struct scene *s, const float (*k)[SCENE_KV_HEADS * SCENE_D],
                                  const float (*v)[SCENE_KV_HEADS * SCENE_D], int t, int h,
                                  const kvc_attend_options *options, double *out)
{
    const int kv = h / (SCENE_HEADS / SCENE_KV_HEADS);
    const float *q = s->q[t] + h * s->d_k;
    const int first =
        options->window > 0 && options->window <= t ? t + 1 - (int)options->window : 0;
    double logits[SCENE_TOKENS], most = -INFINITY, sum = 0.0;

    for (int i = first; i <= t; i++) {
        double dot = 0.0;
        for (int c = 0; c < s->d_k; c++)
            dot += (double)q[c] * (double)k[i][kv * s->d_k + c];
        logits[i] = dot * (double)options->scale;
        if (options->softcap > 0)
            logits[i] = (double)options->softcap * tanh(logits[i] / (double)options->softcap);
        most = fmax(most, logits[i]);
    }
    memset(out, 0, (size_t)s->d_v * sizeof(*out));
    for (int i = first; i <= t; i++) {
        const double weight = exp(logits[i] - most);
        sum += weight;
        for (int c = 0; c < s->d_v; c++)
            out[c] += weight * (double)v[i][kv * s->d_v + c];
    }
    for (int c = 0; c < s->d_v; c++)
        out[c] /= sum;
    return most + log(sum);
}

/* Walsh-Hadamard in float, as docs/formats.md has it: runs of the largest power of two in d. */
static inline void scene_rotate(float *x, int d)
{
    const int block = d & -d;
    const float norm = (float)(1.0 / sqrt(block));
    for (int b = 0; b < d && block > 1; b += block) {
        for (int h = 1; h < block; h *= 2)
            for (int i = 0; i < block; i++)
                if (!(i & h)) {
                    const float a = x[b + i], c = x[b + i + h];
                    x[b + i] = a + c;
                    x[b + i + h] = a - c;
                }
        for (int i = 0; i < block; i++)
            x[b + i] *= norm;
    }
}

#endif
