/* peer_ggml.c - ggml's side of 'kvc-bench peer': FLASH_ATTN_EXT on the CPU, through ggml's public
 * functions. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ggml-cpu.h>
#include <ggml.h>

#include "peer.h"
#include "sealed.h"

/* Tensors of one layer, at most: K, V and the queries, two views of each, the output. */
static const size_t layer_tensors = 10;

struct layer {
    void *k, *v;
    struct ggml_cgraph *graph;
};

struct peer {
    struct bench_shape shape;
    enum ggml_type type;
    long layout;
    struct ggml_context *ctx;
    struct ggml_threadpool *pool;
    struct ggml_cplan plan; /* the same for all layers */
    float *q, *out;
    size_t n_layers;
    struct layer layers[];
};

/* Beside bench_formats. */
static const enum ggml_type types[PEER_N_FORMATS] = {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};

/* K or V as attention wants it: [dim][token][head], the fastest first. llama.cpp
 * keeps the heads of a token together and permutes; the other layout has that order in memory. */
static struct ggml_tensor *rows_tensor(const struct peer *p, void *bytes)
{
    int64_t dim = p->shape.head_dim, heads = p->shape.n_kv_heads, n = p->shape.n_kv;
    if (p->layout == PEER_HEAD_MAJOR) {
        struct ggml_tensor *rows = ggml_new_tensor_3d(p->ctx, p->type, dim, n, heads);
        rows->data = bytes;
        return rows;
    }
    struct ggml_tensor *cache = ggml_new_tensor_2d(p->ctx, p->type, dim * heads, n);
    cache->data = bytes;
    struct ggml_tensor *view = ggml_view_4d(
        p->ctx, cache, dim, heads, n, 1, ggml_row_size(p->type, dim),
        ggml_row_size(p->type, dim * heads), ggml_row_size(p->type, dim * heads * n), 0);
    return ggml_permute(p->ctx, view, 0, 2, 1, 3);
}

/* No mask: llama.cpp gives one of zeros, which ggml would have to read. */
static void build_layer(struct peer *p, struct layer *layer)
{
    struct ggml_tensor *q =
        ggml_new_tensor_4d(p->ctx, GGML_TYPE_F32, p->shape.head_dim, p->shape.n_heads, 1, 1);
    q->data = p->q;
    struct ggml_tensor *out = ggml_flash_attn_ext(
        p->ctx, ggml_permute(p->ctx, q, 0, 2, 1, 3), rows_tensor(p, layer->k),
        rows_tensor(p, layer->v), NULL, 1.0f / sqrtf((float)p->shape.head_dim), 0.0f, 0.0f);
    out->data = p->out;
    layer->graph = ggml_new_graph_custom(p->ctx, layer_tensors, false);
    ggml_build_forward_expand(layer->graph, out);
}

/* The rows of some tokens, as ggml codes them, go to their places in all layers. */
static void store(struct peer *p, bool is_v, const uint8_t *coded, size_t first, size_t n)
{
    size_t heads = (size_t)p->shape.n_kv_heads, n_kv = (size_t)p->shape.n_kv;
    size_t row = ggml_row_size(p->type, p->shape.head_dim);
    for (size_t l = 0; l < p->n_layers; l++) {
        uint8_t *bytes = is_v ? p->layers[l].v : p->layers[l].k;
        if (p->layout == PEER_TOKEN_MAJOR) {
            memcpy(bytes + first * heads * row, coded, n * heads * row);
            continue;
        }
        for (size_t h = 0; h < heads; h++)
            for (size_t t = 0; t < n; t++)
                memcpy(bytes + (h * n_kv + first + t) * row, coded + (t * heads + h) * row, row);
    }
}

static int fill(struct peer *p)
{
    size_t heads = (size_t)p->shape.n_kv_heads, dim = (size_t)p->shape.head_dim;
    size_t row = ggml_row_size(p->type, p->shape.head_dim);
    float *rows = malloc(SEALED_BLOCK * heads * dim * sizeof *rows);
    uint8_t *coded = malloc(SEALED_BLOCK * heads * row);
    for (long done = 0; rows && coded && done < p->shape.n_kv; done += SEALED_BLOCK) {
        long rest = p->shape.n_kv - done;
        size_t n = (size_t)(rest < SEALED_BLOCK ? rest : SEALED_BLOCK);
        for (int side = 0; side < 2; side++) {
            bench_rows(rows, side, done, n, heads, dim);
            ggml_quantize_chunk(p->type, rows, coded, 0, (int64_t)(n * heads), (int64_t)dim, NULL);
            store(p, side == 1, coded, (size_t)done, n);
        }
    }
    int code = rows && coded ? BENCH_GO : bench_fail("rows", KVC_E_NOMEM);
    free(rows);
    free(coded);
    return code;
}

static int allocate(struct peer *p, struct bench_memory *memory)
{
    size_t bytes = ggml_row_size(p->type, p->shape.head_dim) * (size_t)p->shape.n_kv_heads *
                   (size_t)p->shape.n_kv;
    size_t n_q = (size_t)p->shape.n_heads * (size_t)p->shape.head_dim;
    p->q = bench_memory_get(memory, n_q * sizeof(float));
    p->out = bench_memory_get(memory, n_q * sizeof(float));
    bool all = p->q && p->out;
    for (size_t l = 0; l < p->n_layers && all; l++) {
        p->layers[l].k = bench_memory_get(memory, bytes);
        p->layers[l].v = bench_memory_get(memory, bytes);
        all = p->layers[l].k && p->layers[l].v;
    }
    struct ggml_init_params params = {
        .mem_size = p->n_layers * (layer_tensors * ggml_tensor_overhead() +
                                   ggml_graph_overhead_custom(layer_tensors, false)),
        .no_alloc = true};
    p->ctx = all ? ggml_init(params) : NULL;
    return p->ctx ? BENCH_GO : bench_fail("ggml's K and V", KVC_E_NOMEM);
}

int peer_open(const struct bench_shape *shape, long layout, size_t n_layers,
              struct bench_memory *memory, const float *q, struct peer **out)
{
    *out = NULL;
    ggml_cpu_init();
    struct peer *p = calloc(1, sizeof *p + n_layers * sizeof *p->layers);
    if (!p)
        return bench_fail("ggml's layers", KVC_E_NOMEM);
    p->shape = *shape;
    p->type = types[shape->format];
    p->layout = layout;
    p->n_layers = n_layers;
    int code = allocate(p, memory);
    if (code == BENCH_GO)
        code = fill(p);
    if (code != BENCH_GO) {
        peer_close(p);
        return code;
    }
    memcpy(p->q, q, (size_t)shape->n_heads * (size_t)shape->head_dim * sizeof *q);
    for (size_t l = 0; l < n_layers; l++)
        build_layer(p, &p->layers[l]);
    *out = p;
    return BENCH_GO;
}

static void end_threads(struct peer *p)
{
    free(p->plan.work_data);
    p->plan.work_data = NULL;
    if (p->pool)
        ggml_threadpool_free(p->pool);
    p->pool = NULL;
}

void peer_close(struct peer *p)
{
    if (!p)
        return;
    end_threads(p);
    ggml_free(p->ctx);
    for (size_t l = 0; l < p->n_layers; l++) {
        free(p->layers[l].k);
        free(p->layers[l].v);
    }
    free(p->q);
    free(p->out);
    free(p);
}

int peer_set_threads(struct peer *p, int n_threads)
{
    end_threads(p);
    struct ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    p->pool = ggml_threadpool_new(&params);
    if (!p->pool)
        return bench_fail("ggml's threads", KVC_E_NOMEM);
    p->plan = ggml_graph_plan(p->layers[0].graph, n_threads, p->pool);
    if (p->plan.work_size == 0)
        return BENCH_GO;
    p->plan.work_data = malloc(p->plan.work_size);
    return p->plan.work_data ? BENCH_GO : bench_fail("ggml's work buffer", KVC_E_NOMEM);
}

int peer_attend(struct peer *p, size_t layer)
{
    if (ggml_graph_compute(p->layers[layer].graph, &p->plan) == GGML_STATUS_SUCCESS)
        return BENCH_GO;
    fprintf(stderr, "kvc-bench peer: ggml failed\n");
    return BENCH_FAILED;
}

const float *peer_out(const struct peer *p)
{
    return p->out;
}
