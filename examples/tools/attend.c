/* attend.c - 'kvc-bench attend': decode attention of one token over a sealed cache. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attend.h"

enum { BLOCK_TOKENS = 128, MAX_LAYERS = 512, MIN_RUNS = 3, MAX_RUNS = 4096 };

/* Tokens that are appended one by one for the cost of that: they fill a page, which is sealed. */
enum { STEPS = KVC_PAGE_TOKENS };

/* K and V of all layers: so much that no cache of the processor holds it, as far as MAX_LAYERS
 * allow; of one layer: at most. */
static const size_t min_total_bytes = (size_t)256 << 20;
static const size_t max_layer_bytes = (size_t)2 << 30;

/* K and V under the names of presets, and INT8 keys with INT4 values. */
const char *const attend_formats[ATTEND_N_FORMATS] = {"f16",  "int8", "int4",
                                                      "k6v4", "k8v4", "int4-raw"};
static const kvc_precision precisions[ATTEND_N_FORMATS] = {
    {KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_INT4, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
};

static const char *const table_names[] = {"ref", "avx2", "avx512", "vnni"};

enum { N_TABLES = sizeof table_names / sizeof *table_names };

struct options {
    struct bench_list formats; /* indices of attend_formats */
    struct bench_list tables;  /* indices of table_names */
    struct bench_list n_kv;
    struct bench_list n_heads; /* with n_kv_heads: pairs */
    struct bench_list n_kv_heads;
    struct bench_list threads;
    long head_dim;
    double seconds;
    bool all_tables; /* skip those that this CPU lacks */
    bool transforms;
    bool json;
};

/* What the measurements of one shape and table use. */
struct bench {
    kvc_ctx *ctx;
    kvc_cache *cache;
    kvc_seq seq;
    struct bench_threads *threads;
    int32_t n_layers;
    size_t bytes_per_step; /* pages that attention of one layer reads */
    float *block;          /* [BLOCK_TOKENS][n_kv_heads][head_dim] for K, the same for V */
    float *q;              /* [n_heads][head_dim] */
    float *out;            /* as q */
    float *vector;         /* [n_layers][n_kv_heads][head_dim], ones: mean and scale */
    double *samples;       /* [MAX_RUNS] */
};

static bool set_formats(void *options, const char *value)
{
    return bench_parse_names(value, attend_formats, ATTEND_N_FORMATS,
                             &((struct options *)options)->formats);
}

static bool set_tables(void *options, const char *value)
{
    struct options *o = options;
    o->all_tables = false;
    return bench_parse_names(value, table_names, N_TABLES, &o->tables);
}

static bool set_n_kv(void *options, const char *value)
{
    return bench_parse_longs(value, 1, 1 << 22, &((struct options *)options)->n_kv);
}

static bool set_heads(void *options, const char *value)
{
    struct options *o = options;
    size_t n = 0;
    do {
        char item[32];
        if (n == BENCH_MAX_ITEMS || !bench_next_item(&value, item, sizeof item))
            return false;
        char *slash = strchr(item, '/');
        if (!slash)
            return false;
        *slash = '\0';
        long heads, kv_heads;
        if (!bench_parse_long(item, 1, 1024, &heads) ||
            !bench_parse_long(slash + 1, 1, heads, &kv_heads) || heads % kv_heads != 0)
            return false;
        o->n_heads.items[n] = heads;
        o->n_kv_heads.items[n++] = kv_heads;
    } while (*value != '\0');
    o->n_heads.n = o->n_kv_heads.n = n;
    return true;
}

static bool set_threads(void *options, const char *value)
{
    return bench_parse_longs(value, 1, BENCH_MAX_THREADS, &((struct options *)options)->threads);
}

static bool set_head_dim(void *options, const char *value)
{
    return bench_parse_long(value, 1, KVC_MAX_HEAD_DIM, &((struct options *)options)->head_dim);
}

static bool set_seconds(void *options, const char *value)
{
    char *end;
    double seconds = strtod(value, &end);
    ((struct options *)options)->seconds = seconds;
    return end != value && *end == '\0' && seconds >= 0 && seconds <= 3600;
}

static bool set_json(void *options, const char *value)
{
    (void)value;
    ((struct options *)options)->json = true;
    return true;
}

static bool set_transforms(void *options, const char *value)
{
    (void)value;
    return ((struct options *)options)->transforms = true;
}

static const struct bench_option option_table[] = {
    {"--formats", "LIST", "of f16,int8,int4,k6v4,k8v4,int4-raw; default the first four",
     set_formats},
    {"--tables", "LIST", "of ref,avx2,avx512,vnni; default those that this CPU has", set_tables},
    {"--n-kv", "LIST", "cached tokens; default 4096,16384,32768", set_n_kv},
    {"--heads", "LIST", "query heads/KV heads; default 32/8,32/32", set_heads},
    {"--threads", "LIST", "thread counts; default 1,2", set_threads},
    {"--head-dim", "N", "elements of a head, up to 512; default 128", set_head_dim},
    {"--seconds", "S", "time for each row, 0 to 3600, but at least 3 runs; default 0.3",
     set_seconds},
    {"--transforms", NULL, "K and V are stored rotated, K less a mean and scaled", set_transforms},
    {"--json", NULL, "print JSON instead of a table", set_json},
};

/* A page of one side, K or V. */
static size_t side_bytes(kvc_format format, kvc_scale scale, size_t dim)
{
    static const size_t bits[] = {[KVC_F16] = 16, [KVC_INT8] = 8, [KVC_INT4] = 4, [KVC_INT6] = 6};
    size_t n_params = scale == KVC_SCALE_CHANNEL ? 2 * dim : KVC_PAGE_TOKENS;
    size_t params = format == KVC_F16 ? 0 : n_params * sizeof(uint16_t);
    return KVC_PAGE_TOKENS * dim * bits[format] / 8 + params;
}

static size_t layer_bytes(const struct attend_shape *shape)
{
    const kvc_precision *p = &precisions[shape->format];
    size_t n_pages = ((size_t)shape->n_kv + KVC_PAGE_TOKENS - 1) / KVC_PAGE_TOKENS;
    size_t padded_dim = ((size_t)shape->head_dim + 7) / 8 * 8;
    return n_pages * (size_t)shape->n_kv_heads *
           (side_bytes(p->k, p->k_scale, padded_dim) + side_bytes(p->v, p->v_scale, padded_dim));
}

/* Mean and scale, which may be anything: ones. */
static int set_vectors(struct bench *b, kvc_cache_params *params)
{
    size_t n = (size_t)b->n_layers * (size_t)params->n_kv_heads * (size_t)params->head_dim_k;
    b->vector = malloc(n * sizeof(float));
    if (!b->vector)
        return bench_fail("mean and scale", KVC_E_NOMEM);
    for (size_t i = 0; i < n; i++)
        b->vector[i] = 1.0f;
    params->transform = KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_ROTATE_V;
    params->k_mean = params->k_scale = b->vector;
    return BENCH_GO;
}

static int open_cache(struct bench *b, const struct options *o, const struct attend_shape *measured)
{
    struct attend_shape full = *measured, *shape = &full;
    full.n_kv += STEPS * (long)o->threads.n;
    size_t bytes = layer_bytes(shape);
    size_t n_layers = (min_total_bytes + bytes - 1) / bytes;
    b->n_layers = n_layers < MAX_LAYERS ? (int32_t)n_layers : MAX_LAYERS;

    kvc_cache_params params;
    kvc_cache_params_default(&params);
    params.n_layers = b->n_layers;
    params.n_heads = (int32_t)shape->n_heads;
    params.n_kv_heads = (int32_t)shape->n_kv_heads;
    params.head_dim_k = params.head_dim_v = (int32_t)shape->head_dim;
    params.max_tokens = (int32_t)shape->n_kv;
    params.max_append = BLOCK_TOKENS;
    params.probe_rows = 0;
    params.recent_tokens = 0;
    params.sink_tokens = 0;
    params.precision = precisions[shape->format];
    if (o->transforms && set_vectors(b, &params) != BENCH_GO)
        return BENCH_FAILED;
    kvc_status status = kvc_cache_min_budget(&params, &params.budget_bytes);
    if (status != KVC_OK)
        return bench_fail("kvc_cache_min_budget", status);
    /* A quarter more than the pages, for what slabs leave over; what is not used is never touched.
     */
    params.budget_bytes += (size_t)b->n_layers * bytes / 4 * 5;
    status = kvc_cache_create(b->ctx, &params, &b->cache);
    if (status != KVC_OK)
        return bench_fail("kvc_cache_create", status);
    status = kvc_seq_create(b->cache, &b->seq);
    return status == KVC_OK ? BENCH_GO : bench_fail("kvc_seq_create", status);
}

static int append_block(struct bench *b, const struct attend_shape *shape, size_t n)
{
    size_t heads = (size_t)shape->n_kv_heads, dim = (size_t)shape->head_dim;
    kvc_view k = kvc_view_packed(b->block, KVC_DTYPE_F32, n, heads, dim);
    kvc_view v =
        kvc_view_packed(b->block + BLOCK_TOKENS * heads * dim, KVC_DTYPE_F32, n, heads, dim);
    kvc_status status = kvc_tokens_add(b->cache, b->seq, NULL, n);
    if (status != KVC_OK)
        return bench_fail("kvc_tokens_add", status);
    for (int32_t layer = 0; layer < b->n_layers; layer++) {
        status = kvc_append(b->cache, b->seq, layer, &k, &v);
        if (status != KVC_OK)
            return bench_fail("kvc_append", status);
    }
    return BENCH_GO;
}

static int fill_cache(struct bench *b, const struct attend_shape *shape)
{
    for (long done = 0; done < shape->n_kv; done += BLOCK_TOKENS) {
        long rest = shape->n_kv - done;
        int code = append_block(b, shape, (size_t)(rest < BLOCK_TOKENS ? rest : BLOCK_TOKENS));
        if (code != BENCH_GO)
            return code;
    }
    kvc_status status = kvc_cache_compress(b->cache, b->seq, NULL, NULL, NULL);
    if (status != KVC_OK)
        return bench_fail("kvc_cache_compress", status);
    kvc_stats stats = {.struct_size = sizeof stats};
    status = kvc_cache_stats(b->cache, &stats);
    if (status != KVC_OK)
        return bench_fail("kvc_cache_stats", status);
    if (stats.n_pages_f16 != 0) {
        fprintf(stderr, "kvc-bench: %lld pages were not sealed\n", (long long)stats.n_pages_f16);
        return BENCH_FAILED;
    }
    b->bytes_per_step = stats.sealed_page_bytes / (size_t)b->n_layers;
    return BENCH_GO;
}

/* The layers take turns, so that each step finds its pages in memory and not in a cache. */
static int measure(struct bench *b, const struct attend_shape *shape, double seconds, double *us)
{
    size_t heads = (size_t)shape->n_heads, dim = (size_t)shape->head_dim;
    kvc_view q = kvc_view_packed(b->q, KVC_DTYPE_F32, 1, heads, dim);
    kvc_view out = kvc_view_packed(b->out, KVC_DTYPE_F32, 1, heads, dim);
    size_t n = 0;
    double end = 0;
    /* The first step only warms up. */
    for (int32_t step = 0; n < MIN_RUNS || (n < MAX_RUNS && bench_seconds() < end); step++) {
        double start = bench_seconds();
        kvc_status status = kvc_attend(b->cache, b->seq, step % b->n_layers, &q, NULL, &out, NULL);
        double stop = bench_seconds();
        if (status != KVC_OK)
            return bench_fail("kvc_attend", status);
        if (step == 0)
            end = stop + seconds;
        else
            b->samples[n++] = stop - start;
    }
    *us = 1e6 * bench_median(b->samples, n);
    return BENCH_GO;
}

/* Time of a token in one layer, sealing of its page included. */
static int measure_append(struct bench *b, const struct attend_shape *shape, double *us)
{
    double start = bench_seconds();
    for (int step = 0; step < STEPS; step++) {
        int code = append_block(b, shape, 1);
        if (code != BENCH_GO)
            return code;
    }
    kvc_status status = kvc_seq_settle(b->cache, b->seq);
    *us = 1e6 * (bench_seconds() - start) / STEPS / b->n_layers;
    return status == KVC_OK ? BENCH_GO : bench_fail("kvc_seq_settle", status);
}

static int allocate_block(struct bench *b, const struct attend_shape *shape)
{
    size_t dim = (size_t)shape->head_dim;
    size_t n_block = (size_t)2 * BLOCK_TOKENS * (size_t)shape->n_kv_heads * dim;
    size_t n_q = (size_t)shape->n_heads * dim;
    b->block = malloc(n_block * sizeof(float));
    b->q = malloc(n_q * sizeof(float));
    b->out = malloc(n_q * sizeof(float));
    b->samples = malloc(MAX_RUNS * sizeof(double));
    if (!b->block || !b->q || !b->out || !b->samples)
        return bench_fail("random rows", KVC_E_NOMEM);
    uint32_t state = 1;
    for (size_t i = 0; i < n_block + n_q; i++) {
        state = state * 1664525u + 1013904223u;
        float value = (float)(state >> 8) * 0x1p-23f - 1.0f;
        *(i < n_block ? &b->block[i] : &b->q[i - n_block]) = value;
    }
    return BENCH_GO;
}

static int measure_threads(struct bench *b, const struct options *o,
                           const struct attend_shape *shape, const char *table,
                           struct attend_row *rows)
{
    for (size_t i = 0; i < o->threads.n; i++) {
        struct attend_row row = {.shape = *shape, .table = table, .n_threads = o->threads.items[i]};
        kvc_status status = bench_threads_set(b->threads, (size_t)row.n_threads);
        if (status != KVC_OK)
            return bench_fail("kvc_pool_create", status);
        int code = measure(b, shape, o->seconds, &row.us);
        if (code != BENCH_GO)
            return code;
        row.gbps = 1e-3 * (double)b->bytes_per_step / row.us;
        code = measure_append(b, shape, &row.append_us);
        if (code != BENCH_GO)
            return code;
        rows[i] = row;
    }
    return BENCH_GO;
}

/* One cache serves all thread counts: rows[0] ... rows[o->threads.n - 1]. */
static int measure_table(const struct options *o, const struct attend_shape *shape,
                         const char *table, struct attend_row *rows)
{
    struct bench_threads threads = {NULL};
    struct bench b = {.threads = &threads};
    kvc_ctx_params params = {.struct_size = sizeof params,
                             .parallel_for = bench_parallel_for,
                             .parallel_user = &threads,
                             .kernels = table};
    long most = 1;
    for (size_t i = 0; i < o->threads.n; i++)
        most = o->threads.items[i] > most ? o->threads.items[i] : most;
    kvc_status status = kvc_ctx_create(&params, &b.ctx);
    int code = status == KVC_OK ? allocate_block(&b, shape) : bench_fail(table, status);
    if (code == BENCH_GO) {
        status = bench_threads_set(&threads, (size_t)most);
        code = status == KVC_OK ? open_cache(&b, o, shape) : bench_fail("kvc_pool_create", status);
    }
    if (code == BENCH_GO)
        code = fill_cache(&b, shape);
    if (code == BENCH_GO)
        code = measure_threads(&b, o, shape, table, rows);
    kvc_cache_destroy(b.cache);
    kvc_ctx_destroy(b.ctx);
    bench_threads_end(&threads);
    free(b.block);
    free(b.q);
    free(b.out);
    free(b.samples);
    free(b.vector);
    return code;
}

/* Tables that this CPU lacks are left out, or an error if the user named them. */
static int check_tables(struct options *o)
{
    struct bench_list able = {0};
    for (size_t i = 0; i < o->tables.n; i++) {
        const char *table = table_names[o->tables.items[i]];
        kvc_ctx_params params = {.struct_size = sizeof params, .kernels = table};
        kvc_ctx *ctx;
        kvc_status status = kvc_ctx_create(&params, &ctx);
        kvc_ctx_destroy(ctx);
        if (status == KVC_OK)
            able.items[able.n++] = o->tables.items[i];
        else if (status != KVC_E_UNSUPPORTED || !o->all_tables)
            return bench_fail(table, status);
    }
    o->tables = able;
    return able.n > 0 ? BENCH_GO : bench_fail("kernel tables", KVC_E_UNSUPPORTED);
}

static bool fits(const struct attend_shape *shape)
{
    size_t bytes = layer_bytes(shape);
    if (bytes <= max_layer_bytes)
        return true;
    fprintf(stderr,
            "kvc-bench attend: %ld tokens, %ld KV heads of %ld, %s: %zu MiB a layer, at most %zu\n",
            shape->n_kv, shape->n_kv_heads, shape->head_dim, attend_formats[shape->format],
            bytes >> 20, max_layer_bytes >> 20);
    return false;
}

/* All shapes in the order of the report; one that is too large is refused before any is measured.
 */
static int plan(const struct options *o, struct attend_shape *shapes)
{
    size_t n = 0;
    for (size_t h = 0; h < o->n_heads.n; h++)
        for (size_t t = 0; t < o->n_kv.n; t++)
            for (size_t f = 0; f < o->formats.n; f++) {
                shapes[n] = (struct attend_shape){.format = o->formats.items[f],
                                                  .n_kv = o->n_kv.items[t],
                                                  .n_heads = o->n_heads.items[h],
                                                  .n_kv_heads = o->n_kv_heads.items[h],
                                                  .head_dim = o->head_dim};
                if (!fits(&shapes[n]))
                    return BENCH_USAGE;
                n++;
            }
    return BENCH_GO;
}

static int measure_all(const struct options *o, const struct attend_shape *shapes, size_t n_shapes,
                       struct attend_row *rows)
{
    size_t n = 0, n_rows = n_shapes * o->tables.n * o->threads.n;
    for (size_t s = 0; s < n_shapes; s++)
        for (size_t t = 0; t < o->tables.n; t++) {
            const char *table = table_names[o->tables.items[t]];
            fprintf(stderr, "[%zu/%zu] %ld/%ld heads, %ld tokens, %s, %s\n", n + 1, n_rows,
                    shapes[s].n_heads, shapes[s].n_kv_heads, shapes[s].n_kv,
                    attend_formats[shapes[s].format], table);
            int code = measure_table(o, &shapes[s], table, rows + n);
            if (code != BENCH_GO)
                return code;
            n += o->threads.n;
        }
    return BENCH_GO;
}

static void add_missing(struct bench_list *list, long item)
{
    for (size_t i = 0; i < list->n; i++)
        if (list->items[i] == item)
            return;
    list->items[list->n++] = item;
}

/* Bandwidth with one thread, with all, and with as many as each row has. */
static int read_bandwidth(const struct options *o, struct bench_list *threads, double *gbps)
{
    kvc_pool *all;
    kvc_status status = kvc_pool_create(0, &all);
    if (status != KVC_OK)
        return bench_fail("kvc_pool_create", status);
    *threads = o->threads;
    add_missing(threads, 1);
    add_missing(threads, (long)kvc_pool_n_threads(all));
    kvc_pool_destroy(all);
    fprintf(stderr, "measuring the read bandwidth\n");
    return bench_read_bandwidth(threads, gbps);
}

static int measure_and_print(const struct options *o, const struct attend_shape *shapes,
                             size_t n_shapes)
{
    struct bench_list threads;
    double read_gbps[sizeof threads.items / sizeof *threads.items];
    size_t n_rows = n_shapes * o->tables.n * o->threads.n;
    assert(n_rows > 0);
    struct attend_row *rows = malloc(n_rows * sizeof *rows);
    if (!rows)
        return bench_fail("list of results", KVC_E_NOMEM);
    int code = read_bandwidth(o, &threads, read_gbps);
    if (code == BENCH_GO)
        code = measure_all(o, shapes, n_shapes, rows);
    if (code == BENCH_GO) {
        (o->json ? attend_print_json : attend_print_table)(rows, n_rows, &threads, read_gbps);
        code = BENCH_DONE;
    }
    free(rows);
    return code;
}

static int run(struct options *o)
{
    size_t n_shapes = o->n_heads.n * o->n_kv.n * o->formats.n;
    struct attend_shape *shapes = malloc(n_shapes * sizeof *shapes);
    if (!shapes)
        return bench_fail("list of shapes", KVC_E_NOMEM);
    int code = plan(o, shapes);
    if (code == BENCH_GO)
        code = check_tables(o);
    if (code == BENCH_GO)
        code = measure_and_print(o, shapes, n_shapes);
    free(shapes);
    return code;
}

int bench_attend(int argc, char **argv)
{
    struct options options = {.formats = {4, {0, 1, 2, 3}},
                              .tables = {N_TABLES, {0, 1, 2, 3}},
                              .n_kv = {3, {4096, 16384, 32768}},
                              .n_heads = {2, {32, 32}},
                              .n_kv_heads = {2, {8, 32}},
                              .threads = {2, {1, 2}},
                              .head_dim = 128,
                              .seconds = 0.3,
                              .all_tables = true};
    int code = bench_parse("attend", option_table, sizeof option_table / sizeof *option_table,
                           &options, argc, argv);
    return code == BENCH_GO ? run(&options) : code;
}
