/* rows.c - 'kvc-bench rows': kvc_attend_rows() over rows as engines keep them, token after token.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"
#include "sealed.h"

enum { BLOCK = 32, N_FORMATS = 3, MIN_RUNS = 3, MAX_RUNS = 4096 };

/* Beside f16, int8, int4 of bench_formats. */
static const char *const format_names[N_FORMATS] = {"f16", "q8_0", "q4_0"};
static const kvc_row_format formats[N_FORMATS] = {KVC_ROWS_F16, KVC_ROWS_Q8_0, KVC_ROWS_Q4_0};

struct options {
    struct bench_grid grid; /* first: its functions set it */
    bool exact;
};

/* One measurement. */
struct row {
    struct bench_shape shape;
    const char *table;
    bool exact; /* kvc_attend_rows_options::exact */
    long n_threads;
    double us;
    size_t bytes; /* of K and V */
    double gbps;
};

/* K and V of some layers, and what attention over them takes. */
struct store {
    const struct bench_shape *shape;
    bool exact;
    struct bench_threads threads;
    struct bench_memory memory;
    kvc_ctx *ctx;
    size_t n_layers, side_bytes;
    uint8_t *bytes; /* [n_layers][2: K, V][side_bytes] */
    float *q, *out; /* [n_heads][head_dim] */
    void *ws;
    size_t ws_size;
    double *samples;
};

static bool set_formats(void *options, const char *value)
{
    return bench_parse_names(value, format_names, N_FORMATS,
                             &((struct options *)options)->grid.formats);
}

static bool set_exact(void *options, const char *value)
{
    (void)value;
    return ((struct options *)options)->exact = true;
}

static const struct bench_option option_table[] = {
    {"--formats", "LIST", "of f16,q8_0,q4_0; default all", set_formats},
    {"--tables", "LIST", "of " BENCH_TABLE_NAMES "; default the best of this CPU", grid_set_tables},
    {"--n-kv", "LIST", "cached tokens; default 16384", grid_set_n_kv},
    {"--heads", "LIST", "query heads/KV heads; default 32/8,32/32", grid_set_heads},
    {"--threads", "LIST", "thread counts; default 1,2", grid_set_threads},
    {"--head-dim", "N", "elements of a head, up to 512; default 128", grid_set_head_dim},
    {"--seconds", "S", "time for each row, at least 3 runs; 0: a trial; default 0.3",
     grid_set_seconds},
    {"--exact", NULL, "products of floats only (kvc_attend_rows_options)", set_exact},
    {"--small-pages", NULL, "do not ask for huge pages", grid_set_small_pages},
    {"--json", NULL, "print JSON instead of a table", grid_set_json},
};

/* Of a number that is a half. */
static uint16_t half_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x == 0 ? 0
                  : (uint16_t)((bits >> 16 & 0x8000) | ((bits >> 23 & 255) - 112) << 10 |
                               (bits >> 13 & 0x3ff));
}

static uint8_t *put_half(uint8_t *to, float x)
{
    const uint16_t half = half_bits(x);
    to[0] = (uint8_t)half;
    to[1] = (uint8_t)(half >> 8);
    return to + 2;
}

/* n elements of bench_rows() as a format has them: in 32 of them multiples -8 ... 7 of a unit, the
 * first -8. */
static uint8_t *put_elements(kvc_row_format format, const float *x, size_t n, uint8_t *to)
{
    if (format == KVC_ROWS_F16) {
        for (size_t i = 0; i < n; i++)
            to = put_half(to, x[i]);
        return to;
    }
    for (size_t b = 0; b < n; b += BLOCK, x += BLOCK) {
        const float unit = x[0] / -8;
        to = put_half(to, unit);
        if (format == KVC_ROWS_Q8_0) {
            for (int i = 0; i < BLOCK; i++)
                *to++ = (uint8_t)(int8_t)(x[i] / unit);
        } else {
            for (int i = 0; i < BLOCK / 2; i++)
                *to++ = (uint8_t)((int)(x[i] / unit + 8) | (int)(x[i + BLOCK / 2] / unit + 8) << 4);
        }
    }
    return to;
}

static int fill(struct store *s)
{
    const size_t heads = (size_t)s->shape->n_kv_heads, dim = (size_t)s->shape->head_dim;
    float *rows = malloc(SEALED_BLOCK * heads * dim * sizeof *rows);
    if (!rows)
        return bench_fail("rows", KVC_E_NOMEM);
    for (int side = 0; side < 2; side++) {
        uint8_t *to = s->bytes + (size_t)side * s->side_bytes;
        for (long done = 0; done < s->shape->n_kv; done += SEALED_BLOCK) {
            const long rest = s->shape->n_kv - done;
            const size_t n = (size_t)(rest < SEALED_BLOCK ? rest : SEALED_BLOCK);
            bench_rows(rows, side, done, n, heads, dim);
            to = put_elements(formats[s->shape->format], rows, n * heads * dim, to);
        }
    }
    for (size_t l = 1; l < s->n_layers; l++)
        memcpy(s->bytes + l * 2 * s->side_bytes, s->bytes, 2 * s->side_bytes);
    free(rows);
    return BENCH_GO;
}

static int open_store(struct store *s, const struct options *o, const struct bench_shape *shape,
                      const char *table)
{
    const size_t n_kv = (size_t)shape->n_kv, dim = (size_t)shape->head_dim;
    const size_t heads = (size_t)shape->n_heads, kv_heads = (size_t)shape->n_kv_heads;
    *s = (struct store){.shape = shape,
                        .exact = o->exact,
                        .memory = {.small_pages = o->grid.small_pages, .touched = true}};
    kvc_ctx_params params = {.struct_size = sizeof params,
                             .parallel_for = bench_parallel_for,
                             .parallel_user = &s->threads,
                             .kernels = table};
    kvc_status status = kvc_ctx_create(&params, &s->ctx);
    if (status != KVC_OK)
        return bench_fail(table, status);
    status = kvc_attend_rows_workspace_size(1, heads, n_kv, kv_heads, dim, dim, &s->ws_size);
    if (status != KVC_OK)
        return bench_fail("kvc_attend_rows_workspace_size", status);
    s->n_layers = bench_is_trial(&o->grid) ? 2 : (size_t)sealed_layers(shape);
    s->side_bytes = n_kv * kv_heads * kvc_row_bytes(formats[shape->format], dim);
    s->bytes = bench_memory_get(&s->memory, s->n_layers * 2 * s->side_bytes);
    s->ws = bench_memory_get(&s->memory, s->ws_size);
    s->q = malloc(heads * dim * sizeof(float));
    s->out = malloc(heads * dim * sizeof(float));
    s->samples = malloc(MAX_RUNS * sizeof(double));
    if (!s->bytes || !s->ws || !s->q || !s->out || !s->samples)
        return bench_fail("rows", KVC_E_NOMEM);
    bench_queries(s->q, heads * dim);
    return fill(s);
}

static void close_store(struct store *s)
{
    kvc_ctx_destroy(s->ctx);
    bench_threads_end(&s->threads);
    free(s->bytes);
    free(s->ws);
    free(s->q);
    free(s->out);
    free(s->samples);
}

static kvc_status attend(struct store *s, size_t layer)
{
    const size_t n_kv = (size_t)s->shape->n_kv, dim = (size_t)s->shape->head_dim;
    const size_t heads = (size_t)s->shape->n_heads, kv_heads = (size_t)s->shape->n_kv_heads;
    const uint8_t *bytes = s->bytes + layer * 2 * s->side_bytes;
    const kvc_row_format format = formats[s->shape->format];
    const kvc_row_view k = kvc_row_view_packed(bytes, format, n_kv, kv_heads, dim);
    const kvc_row_view v = kvc_row_view_packed(bytes + s->side_bytes, format, n_kv, kv_heads, dim);
    const kvc_view q = kvc_view_packed(s->q, KVC_DTYPE_F32, 1, heads, dim);
    const kvc_view out = kvc_view_packed(s->out, KVC_DTYPE_F32, 1, heads, dim);
    kvc_attend_rows_options options;
    kvc_attend_rows_options_default(&options);
    options.exact = s->exact;
    return kvc_attend_rows(s->ctx, &q, &k, &v, &options, &out, NULL, s->ws, s->ws_size);
}

/* A median; layers take turns, so that each run finds its rows in memory and not in a cache. */
static int time_rows(struct store *s, double seconds, double *us)
{
    size_t n = 0;
    double end = 0;
    /* The first step only warms up. */
    for (size_t step = 0; n < MIN_RUNS || (n < MAX_RUNS && bench_seconds() < end); step++) {
        const double start = bench_seconds();
        const kvc_status status = attend(s, step % s->n_layers);
        const double stop = bench_seconds();
        if (status != KVC_OK)
            return bench_fail("kvc_attend_rows", status);
        if (step == 0)
            end = stop + seconds;
        else
            s->samples[n++] = stop - start;
    }
    *us = 1e6 * bench_median(s->samples, n);
    return BENCH_GO;
}

/* One shape and table, for all thread counts: rows[0] ... rows[threads->n - 1]. */
static int measure_threads(const struct options *o, const struct bench_shape *shape,
                           const char *table, struct row *rows)
{
    struct store s;
    int code = open_store(&s, o, shape, table);
    for (size_t i = 0; i < o->grid.threads.n && code == BENCH_GO; i++) {
        struct row row = {.shape = *shape,
                          .table = table,
                          .exact = o->exact,
                          .n_threads = o->grid.threads.items[i],
                          .bytes = 2 * s.side_bytes};
        kvc_status status = bench_threads_set(&s.threads, (size_t)row.n_threads);
        code = status == KVC_OK ? time_rows(&s, o->grid.seconds, &row.us)
                                : bench_fail("kvc_pool_create", status);
        row.gbps = 1e-3 * (double)row.bytes / row.us;
        rows[i] = row;
    }
    close_store(&s);
    return code;
}

static void print_json(const struct row *rows, size_t n_rows, const struct machine *machine)
{
    printf("{");
    machine_print_json(machine);
    printf(",\"rows\":[");
    for (size_t i = 0; i < n_rows; i++) {
        const struct row *row = &rows[i];
        printf("%s\n{\"table\":\"%s\",\"exact\":%s,\"format\":\"%s\",\"n_kv\":%ld,\"heads\":%ld,"
               "\"kv_heads\":%ld,\"head_dim\":%ld,\"threads\":%ld,\"us\":%.2f,\"bytes\":%zu,"
               "\"gbps\":%.4g,\"read_share\":%.4g}",
               i ? "," : "", row->table, row->exact ? "true" : "false",
               format_names[row->shape.format], row->shape.n_kv, row->shape.n_heads,
               row->shape.n_kv_heads, row->shape.head_dim, row->n_threads, row->us, row->bytes,
               row->gbps, row->gbps / machine_peak(machine, row->n_threads)->read);
    }
    printf("\n]}\n");
}

static void print_table(const struct row *rows, size_t n_rows, const struct machine *machine)
{
    machine_print_table(machine);
    printf("%-7s %4s %7s %-6s %7s %-6s %12s %8s %8s\n", "heads", "dim", "n_kv", "format", "threads",
           "table", "us", "GB/s", "of read");
    for (size_t i = 0; i < n_rows; i++) {
        const struct row *row = &rows[i];
        char heads[32];
        snprintf(heads, sizeof heads, "%ld/%ld", row->shape.n_heads, row->shape.n_kv_heads);
        printf("%-7s %4ld %7ld %-6s %7ld %-6s %12.1f %8.1f %7.0f%%\n", heads, row->shape.head_dim,
               row->shape.n_kv, format_names[row->shape.format], row->n_threads, row->table,
               row->us, row->gbps, 100 * row->gbps / machine_peak(machine, row->n_threads)->read);
    }
    printf("\nOf a layer, one query token, the heads of a token side by side. GB/s of K and V; of "
           "read: of what\nthe machine reads with as many threads.\n");
}

static int measure_and_print(const struct options *o, const struct bench_shape *shapes,
                             size_t n_shapes)
{
    const size_t n_stores = n_shapes * o->grid.tables.n, per_store = o->grid.threads.n;
    struct row *rows = calloc(n_stores * per_store, sizeof *rows);
    if (!rows)
        return bench_fail("list of results", KVC_E_NOMEM);
    struct machine machine;
    int code = machine_measure(&o->grid.threads, bench_is_trial(&o->grid), &machine);
    for (size_t i = 0; i < n_stores && code == BENCH_GO; i++) {
        const struct bench_shape *shape = &shapes[i / o->grid.tables.n];
        const char *table = bench_tables[o->grid.tables.items[i % o->grid.tables.n]];
        fprintf(stderr, "[%zu/%zu] %ld/%ld heads, %ld tokens, %s, %s\n", i + 1, n_stores,
                shape->n_heads, shape->n_kv_heads, shape->n_kv, format_names[shape->format], table);
        code = measure_threads(o, shape, table, rows + i * per_store);
    }
    if (code == BENCH_GO) {
        (o->grid.json ? print_json : print_table)(rows, n_stores * per_store, &machine);
        code = BENCH_DONE;
    }
    free(rows);
    return code;
}

static bool blocks_fit(const struct bench_grid *grid)
{
    for (size_t i = 0; i < grid->formats.n; i++)
        if (formats[grid->formats.items[i]] != KVC_ROWS_F16 && grid->head_dim % BLOCK != 0) {
            fprintf(stderr, "kvc-bench rows: %s has blocks of %d elements, a head has %ld\n",
                    format_names[grid->formats.items[i]], BLOCK, grid->head_dim);
            return false;
        }
    return true;
}

int bench_attend_rows(int argc, char **argv)
{
    struct options options = {.grid = bench_grid_default()};
    options.grid.best_table = true;
    options.grid.formats.n = N_FORMATS;
    options.grid.n_kv = (struct bench_list){1, {16384}};
    int code = bench_parse("rows", option_table, sizeof option_table / sizeof *option_table,
                           &options, argc, argv);
    struct bench_shape *shapes = NULL;
    size_t n_shapes = 0;
    if (code == BENCH_GO && !blocks_fit(&options.grid))
        code = BENCH_USAGE;
    if (code == BENCH_GO)
        code = bench_grid_shapes(&options.grid, "rows", &shapes, &n_shapes);
    if (code == BENCH_GO)
        code = bench_grid_check_tables(&options.grid);
    if (code == BENCH_GO)
        code = measure_and_print(&options, shapes, n_shapes);
    free(shapes);
    return code;
}
