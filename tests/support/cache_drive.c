/* The calls of cache_model.h that the cache and the model make together. */
#include <stdlib.h>

#include "cache_model.h"

kvc_cache_params drive_params(void)
{
    kvc_cache_params p;

    kvc_cache_params_default(&p);
    p.n_layers = 2;
    p.n_heads = 4;
    p.n_kv_heads = 2;
    p.head_dim_k = 16;
    p.head_dim_v = 8;
    p.max_sequences = 3;
    p.max_tokens = 2048;
    p.max_append = 200;
    return p;
}

void drive_start(struct cache_model *m, kvc_ctx *ctx, kvc_cache_params params, size_t extra_bytes)
{
    assert_int_equal(kvc_cache_min_budget(&params, &params.budget_bytes), KVC_OK);
    params.budget_bytes += extra_bytes;
    model_open(m, ctx, &params);
}

struct model_seq *model_free_slot(struct cache_model *m)
{
    for (int i = 0; i < MODEL_MAX_SEQS; i++)
        if (m->seqs[i].handle == 0)
            return &m->seqs[i];
    fail_msg("more sequences than the model holds");
    return NULL;
}

struct model_seq *drive_create(struct cache_model *m)
{
    struct model_seq *s = model_free_slot(m);
    kvc_seq handle = 0;

    assert_int_equal(kvc_seq_create(m->cache, &handle), KVC_OK);
    model_seq_begin(m, s, handle);
    return s;
}

kvc_stats drive_stats(const struct cache_model *m)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};

    assert_int_equal(kvc_cache_stats(m->cache, &stats), KVC_OK);
    return stats;
}

struct model_seq *drive_fork(struct cache_model *m, const struct model_seq *src)
{
    struct model_seq *s = model_free_slot(m);
    kvc_seq handle = 0;

    assert_int_equal(kvc_seq_fork(m->cache, src->handle, &handle), KVC_OK);
    model_fork(m, s, src, handle);
    return s;
}

void drive_destroy(struct cache_model *m, struct model_seq *s)
{
    assert_int_equal(kvc_seq_destroy(m->cache, s->handle), KVC_OK);
    model_seq_end(s);
}

void drive_add(struct cache_model *m, struct model_seq *s, const kvc_token *tokens, int n)
{
    assert_int_equal(kvc_tokens_add(m->cache, s->handle, tokens, (size_t)n), KVC_OK);
    model_tokens_add(m, s, tokens, n);
}

void drive_append(struct cache_model *m, struct model_seq *s, int layer, const kvc_view *k,
                  const kvc_view *v)
{
    assert_int_equal(kvc_append(m->cache, s->handle, layer, k, v), KVC_OK);
    model_append(m, s, layer, k, v);
}

void fill_view(const kvc_view *view, uint64_t *rng, float scale)
{
    for (size_t t = 0; t < view->n_tokens; t++)
        for (size_t h = 0; h < view->n_heads; h++)
            for (size_t d = 0; d < view->head_dim; d++)
                view_set(view, t, h, d, normal(rng) * scale);
}

void drive_rows(struct cache_model *m, struct model_seq *s, uint64_t *rng, float scale)
{
    const size_t heads = (size_t)m->params.n_kv_heads;
    const size_t dk = (size_t)m->params.head_dim_k, dv = (size_t)m->params.head_dim_v;

    for (int layer = 0; layer < m->params.n_layers; layer++) {
        const size_t n = (size_t)(s->n_tokens - s->appended[layer]);
        float *data = malloc((n * heads * (dk + dv) + 1) * sizeof(*data));
        const kvc_view k = kvc_view_packed(data, KVC_DTYPE_F32, n, heads, dk);
        const kvc_view v = kvc_view_packed(data + n * heads * dk, KVC_DTYPE_F32, n, heads, dv);

        fill_view(&k, rng, scale);
        fill_view(&v, rng, scale);
        if (n > 0)
            drive_append(m, s, layer, &k, &v);
        free(data);
    }
}

void drive_feed(struct cache_model *m, struct model_seq *s, int n, uint64_t *rng, float scale)
{
    drive_add(m, s, NULL, n);
    drive_rows(m, s, rng, scale);
}

void drive_truncate(struct cache_model *m, struct model_seq *s, int64_t n)
{
    assert_int_equal(kvc_seq_truncate(m->cache, s->handle, n), KVC_OK);
    model_truncate(m, s, n);
}

void drive_remove(struct cache_model *m, struct model_seq *s, int64_t first, int64_t last)
{
    assert_int_equal(kvc_seq_remove(m->cache, s->handle, first, last), KVC_OK);
    model_remove(m, s, first, last);
}

void drive_settle(struct cache_model *m, struct model_seq *s)
{
    assert_int_equal(kvc_seq_settle(m->cache, s->handle), KVC_OK);
    model_settle(m, s);
}

kvc_report drive_compress(struct cache_model *m, struct model_seq *s)
{
    kvc_report report = {.struct_size = sizeof(report)};

    assert_int_equal(kvc_cache_compress(m->cache, s->handle, NULL, &report, NULL), KVC_OK);
    model_compress(m, s);
    return report;
}

void drive_attend(struct cache_model *m, struct model_seq *s, int layer, int n_q,
                  const kvc_attend_options *options, uint64_t *rng)
{
    const size_t n = (size_t)n_q, heads = (size_t)m->params.n_heads;
    const size_t dk = (size_t)m->params.head_dim_k, dv = (size_t)m->params.head_dim_v;
    float *data = malloc(n * heads * (dk + dv + 1) * sizeof(*data));
    float *lse = data + n * heads * (dk + dv);
    const kvc_view q = kvc_view_packed(data, KVC_DTYPE_F32, n, heads, dk);
    const kvc_view out = kvc_view_packed(data + n * heads * dk, KVC_DTYPE_F32, n, heads, dv);
    kvc_attend_options defaults;

    kvc_attend_options_default(m->cache, &defaults);
    fill_view(&q, rng, 1);
    assert_int_equal(kvc_attend(m->cache, s->handle, layer, &q, options, &out, lse), KVC_OK);
    for (size_t row = 0; row < n; row++)
        check_attention(m, s, layer, &q, row, options ? options : &defaults, &out, lse);
    model_attended(m, s, layer, &q, options ? options : &defaults);
    free(data);
}
