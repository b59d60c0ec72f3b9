/* sealed.c - a sealed cache of one shape, and the rows it is filled with. */
#include <stdio.h>
#include <stdlib.h>

#include "sealed.h"

enum { MAX_LAYERS = 512, MIN_RUNS = 3, MAX_RUNS = 4096 };

/* K and V of all layers: so much that no cache of the processor holds it, as far as MAX_LAYERS
 * allow. */
static const size_t min_total_bytes = (size_t)512 << 20;

/* A bijection of 32 bits: neighbouring tokens have nothing to do with each other. */
static uint32_t mix(uint32_t x)
{
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

static uint32_t next(uint32_t *state)
{
    return *state = *state * 1664525u + 1013904223u;
}

void bench_rows(float *rows, int side, long first, size_t n, size_t n_heads, size_t dim)
{
    for (size_t t = 0; t < n; t++) {
        uint32_t state = mix(2 * (uint32_t)(first + (long)t) + (uint32_t)side);
        for (size_t h = 0; h < n_heads; h++) {
            float *row = rows + (t * n_heads + h) * dim;
            float unit = 0;
            for (size_t i = 0; i < dim; i++) {
                uint32_t random = next(&state);
                if (i % 64 == 0) /* 4/32 ... 7/32 */
                    unit = (float)(4 + (random >> 30)) * 0x1p-5f;
                row[i] = i % 32 == 0 ? -8 * unit : unit * ((float)(random >> 28) - 8);
            }
        }
    }
}

void bench_queries(float *q, size_t n)
{
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++)
        q[i] = 8 * ((float)(next(&state) >> 8) * 0x1p-23f - 1.0f);
}

int32_t sealed_layers(const struct bench_shape *shape)
{
    size_t bytes = bench_layer_bytes(shape);
    size_t n = (min_total_bytes + bytes - 1) / bytes;
    return n < MAX_LAYERS ? (int32_t)n : MAX_LAYERS;
}

/* Mean and scale, which may be anything: ones. */
static int set_vectors(struct sealed *s, kvc_cache_params *params)
{
    size_t n = (size_t)s->n_layers * (size_t)params->n_kv_heads * (size_t)params->head_dim_k;
    s->vector = malloc(n * sizeof(float));
    if (!s->vector)
        return bench_fail("mean and scale", KVC_E_NOMEM);
    for (size_t i = 0; i < n; i++)
        s->vector[i] = 1.0f;
    params->transform = KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_ROTATE_V;
    params->k_mean = params->k_scale = s->vector;
    return BENCH_GO;
}

static int create_cache(struct sealed *s)
{
    struct bench_shape full = s->params.shape;
    full.n_kv += s->params.n_more;
    s->n_layers = s->params.n_layers ? (int32_t)s->params.n_layers : sealed_layers(&full);
    kvc_cache_params params;
    kvc_cache_params_default(&params);
    params.n_layers = s->n_layers;
    params.n_heads = (int32_t)full.n_heads;
    params.n_kv_heads = (int32_t)full.n_kv_heads;
    params.head_dim_k = params.head_dim_v = (int32_t)full.head_dim;
    params.max_tokens = (int32_t)full.n_kv;
    params.max_append = SEALED_BLOCK;
    params.probe_rows = 0;
    params.recent_tokens = 0;
    params.sink_tokens = 0;
    params.precision = bench_precisions[full.format];
    params.score_mode = s->params.scores;
    if (s->params.n_queries > params.max_append)
        params.max_append = (int32_t)s->params.n_queries;
    if (s->params.transforms && set_vectors(s, &params) != BENCH_GO)
        return BENCH_FAILED;
    kvc_status status = kvc_cache_min_budget(&params, &params.budget_bytes);
    if (status != KVC_OK)
        return bench_fail("kvc_cache_min_budget", status);
    /* A quarter more than the pages, for what slabs leave over, and half for pages that rows move
     * to, which are larger by their ordinals. */
    size_t pages = (size_t)s->n_layers * bench_layer_bytes(&full);
    params.budget_bytes += pages / 4 * (s->params.compacts ? 9 : 5);
    status = kvc_cache_create(s->ctx, &params, &s->cache);
    if (status != KVC_OK)
        return bench_fail("kvc_cache_create", status);
    status = kvc_seq_create(s->cache, &s->seq);
    return status == KVC_OK ? BENCH_GO : bench_fail("kvc_seq_create", status);
}

static int create_rows(struct sealed *s)
{
    const struct bench_shape *shape = &s->params.shape;
    size_t dim = (size_t)shape->head_dim;
    size_t n_block = SEALED_BLOCK * (size_t)shape->n_kv_heads * dim;
    size_t n_q = (size_t)s->params.n_queries * (size_t)shape->n_heads * dim;
    s->k = malloc(n_block * sizeof(float));
    s->v = malloc(n_block * sizeof(float));
    s->q = malloc(n_q * sizeof(float));
    s->out = malloc(n_q * sizeof(float));
    s->samples = malloc(MAX_RUNS * sizeof(double));
    if (!s->k || !s->v || !s->q || !s->out || !s->samples)
        return bench_fail("rows", KVC_E_NOMEM);
    bench_queries(s->q, n_q);
    return BENCH_GO;
}

static int fill(struct sealed *s)
{
    const struct bench_shape *shape = &s->params.shape;
    for (long done = 0; done < shape->n_kv; done += SEALED_BLOCK) {
        long rest = shape->n_kv - done;
        size_t n = (size_t)(rest < SEALED_BLOCK ? rest : SEALED_BLOCK);
        size_t heads = (size_t)shape->n_kv_heads, dim = (size_t)shape->head_dim;
        bench_rows(s->k, 0, done, n, heads, dim);
        bench_rows(s->v, 1, done, n, heads, dim);
        int code = sealed_append(s, n);
        if (code != BENCH_GO)
            return code;
    }
    return sealed_compress(s);
}

int sealed_open(struct sealed *s, const struct sealed_params *p)
{
    *s = (struct sealed){.params = *p, .memory = {.small_pages = p->small_pages, .touched = true}};
    if (s->params.n_queries == 0)
        s->params.n_queries = 1;
    kvc_ctx_params params = {.struct_size = sizeof params,
                             .allocator = bench_allocator(&s->memory),
                             .parallel_for = bench_parallel_for,
                             .parallel_user = &s->threads,
                             .kernels = p->table};
    kvc_status status = kvc_ctx_create(&params, &s->ctx);
    if (status != KVC_OK)
        return bench_fail(p->table ? p->table : "kvc_ctx_create", status);
    status = bench_threads_set(&s->threads, (size_t)p->n_threads);
    if (status != KVC_OK)
        return bench_fail("kvc_pool_create", status);
    int code = create_rows(s);
    if (code == BENCH_GO)
        code = create_cache(s);
    return code == BENCH_GO ? fill(s) : code;
}

void sealed_close(struct sealed *s)
{
    kvc_cache_destroy(s->cache);
    kvc_ctx_destroy(s->ctx);
    bench_threads_end(&s->threads);
    free(s->k);
    free(s->v);
    free(s->q);
    free(s->out);
    free(s->vector);
    free(s->samples);
}

int sealed_append(struct sealed *s, size_t n)
{
    size_t heads = (size_t)s->params.shape.n_kv_heads, dim = (size_t)s->params.shape.head_dim;
    kvc_view k = kvc_view_packed(s->k, KVC_DTYPE_F32, n, heads, dim);
    kvc_view v = kvc_view_packed(s->v, KVC_DTYPE_F32, n, heads, dim);
    kvc_status status = kvc_tokens_add(s->cache, s->seq, NULL, n);
    if (status != KVC_OK)
        return bench_fail("kvc_tokens_add", status);
    for (int32_t layer = 0; layer < s->n_layers; layer++) {
        status = kvc_append(s->cache, s->seq, layer, &k, &v);
        if (status != KVC_OK)
            return bench_fail("kvc_append", status);
    }
    return BENCH_GO;
}

int sealed_compress(struct sealed *s)
{
    kvc_status status = kvc_cache_compress(s->cache, s->seq, NULL, NULL, NULL);
    return status == KVC_OK ? sealed_count(s) : bench_fail("kvc_cache_compress", status);
}

int sealed_count(struct sealed *s)
{
    kvc_stats stats = {.struct_size = sizeof stats};
    kvc_status status = kvc_cache_stats(s->cache, &stats);
    if (status != KVC_OK)
        return bench_fail("kvc_cache_stats", status);
    if (stats.n_pages_f16 != 0) {
        fprintf(stderr, "kvc-bench: %lld pages were not sealed\n", (long long)stats.n_pages_f16);
        return BENCH_FAILED;
    }
    s->layer_bytes = stats.sealed_page_bytes / (size_t)s->n_layers;
    return BENCH_GO;
}

int sealed_attend(struct sealed *s, int32_t layer, const kvc_attend_options *options)
{
    size_t n = (size_t)s->params.n_queries, heads = (size_t)s->params.shape.n_heads;
    size_t dim = (size_t)s->params.shape.head_dim;
    kvc_view q = kvc_view_packed(s->q, KVC_DTYPE_F32, n, heads, dim);
    kvc_view out = kvc_view_packed(s->out, KVC_DTYPE_F32, n, heads, dim);
    kvc_status status = kvc_attend(s->cache, s->seq, layer, &q, options, &out, NULL);
    return status == KVC_OK ? BENCH_GO : bench_fail("kvc_attend", status);
}

int sealed_time(struct sealed *s, const kvc_attend_options *options, double seconds, double *us)
{
    size_t n = 0;
    double end = 0;
    /* The first step only warms up. */
    for (int32_t step = 0; n < MIN_RUNS || (n < MAX_RUNS && bench_seconds() < end); step++) {
        double start = bench_seconds();
        int code = sealed_attend(s, step % s->n_layers, options);
        double stop = bench_seconds();
        if (code != BENCH_GO)
            return code;
        if (step == 0)
            end = stop + seconds;
        else
            s->samples[n++] = stop - start;
    }
    *us = 1e6 * bench_median(s->samples, n);
    return BENCH_GO;
}
