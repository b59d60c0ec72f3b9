/* prefill.c - 'kvc-bench prefill': attention of the last tokens of a sealed cache, many at once. */
#include <stdio.h>
#include <stdlib.h>

#include "machine.h"
#include "sealed.h"

/* What limits it is arithmetic: a layer need not come from memory each time. */
enum { N_LAYERS = 2 };

struct options {
    struct bench_grid grid; /* first: its functions set it */
    struct bench_list n_rows;
};

struct row {
    struct bench_shape shape;
    const char *table;
    long n_rows;
    long n_threads;
    double us;
    size_t bytes; /* of the pages, once */
    double gflops;
};

static bool set_rows(void *options, const char *value)
{
    return bench_parse_longs(value, 1, 4096, &((struct options *)options)->n_rows);
}

static const struct bench_option option_table[] = {
    {"--rows", "LIST", "query tokens, 1 to 4096; default 64,512", set_rows},
    {"--formats", "LIST", "of f16,int8,int4,k6v4,k8v4,int4-raw; default the first three",
     grid_set_formats},
    {"--tables", "LIST", "of " BENCH_TABLE_NAMES "; default the best of this CPU", grid_set_tables},
    {"--n-kv", "LIST", "cached tokens, the query tokens among them; default 4096", grid_set_n_kv},
    {"--heads", "LIST", "query heads/KV heads; default 32/8", grid_set_heads},
    {"--threads", "LIST", "thread counts; default 1,2", grid_set_threads},
    {"--head-dim", "N", "elements of a head, up to 512; default 128", grid_set_head_dim},
    {"--seconds", "S", "time for each row, at least 3 runs; 0: a trial; default 0.3",
     grid_set_seconds},
    {"--transforms", NULL, "K and V are stored rotated, K less a mean and scaled",
     grid_set_transforms},
    {"--small-pages", NULL, "do not ask for huge pages", grid_set_small_pages},
    {"--json", NULL, "print JSON instead of a table", grid_set_json},
};

static int measure_cache(const struct options *o, const struct bench_shape *shape,
                         const char *table, struct row *rows)
{
    struct sealed_params params = {.shape = *shape,
                                   .table = table,
                                   .n_threads = bench_most(&o->grid.threads),
                                   .n_queries = bench_most(&o->n_rows),
                                   .n_layers = N_LAYERS,
                                   .transforms = o->grid.transforms,
                                   .small_pages = o->grid.small_pages};
    struct sealed s;
    int code = sealed_open(&s, &params);
    for (size_t i = 0; i < o->n_rows.n * o->grid.threads.n && code == BENCH_GO; i++) {
        struct row row = {.shape = *shape,
                          .table = table,
                          .n_rows = o->n_rows.items[i / o->grid.threads.n],
                          .n_threads = o->grid.threads.items[i % o->grid.threads.n]};
        kvc_status status = bench_threads_set(&s.threads, (size_t)row.n_threads);
        s.params.n_queries = row.n_rows;
        code = status == KVC_OK ? sealed_time(&s, NULL, o->grid.seconds, &row.us)
                                : bench_fail("kvc_pool_create", status);
        /* The last query sees all rows, the one before one less, and so on. */
        double n = (double)row.n_rows, n_pairs = n * (double)shape->n_kv - n * (n - 1) / 2;
        row.gflops = 4e-3 * (double)shape->head_dim * (double)shape->n_heads * n_pairs / row.us;
        row.bytes = s.layer_bytes;
        rows[i] = row;
    }
    sealed_close(&s);
    return code;
}

static void print_json(const struct row *rows, size_t n_rows, const struct machine *machine)
{
    printf("{");
    machine_print_json(machine);
    printf(",\"rows\":[");
    for (size_t i = 0; i < n_rows; i++) {
        const struct row *row = &rows[i];
        const struct machine_peak *peak = machine_peak(machine, row->n_threads);
        printf("%s\n{\"table\":\"%s\",\"format\":\"%s\",\"rows\":%ld,\"n_kv\":%ld,\"heads\":%ld,"
               "\"kv_heads\":%ld,\"head_dim\":%ld,\"threads\":%ld,\"us\":%.2f,\"bytes\":%zu,"
               "\"gflops\":%.4g,"
               "\"fma_share\":%.4g}",
               i ? "," : "", row->table, bench_formats[row->shape.format], row->n_rows,
               row->shape.n_kv, row->shape.n_heads, row->shape.n_kv_heads, row->shape.head_dim,
               row->n_threads, row->us, row->bytes, row->gflops, row->gflops / peak->fma);
    }
    printf("\n]}\n");
}

static void print_table(const struct row *rows, size_t n_rows, const struct machine *machine)
{
    machine_print_table(machine);
    printf("%-7s %4s %7s %5s %-8s %7s %-6s %12s %9s %7s\n", "heads", "dim", "n_kv", "rows",
           "format", "threads", "table", "us", "GFLOP/s", "of FMA");
    for (size_t i = 0; i < n_rows; i++) {
        const struct row *row = &rows[i];
        char heads[32];
        snprintf(heads, sizeof heads, "%ld/%ld", row->shape.n_heads, row->shape.n_kv_heads);
        printf("%-7s %4ld %7ld %5ld %-8s %7ld %-6s %12.0f %9.1f %6.0f%%\n", heads,
               row->shape.head_dim, row->shape.n_kv, row->n_rows, bench_formats[row->shape.format],
               row->n_threads, row->table, row->us, row->gflops,
               100 * row->gflops / machine_peak(machine, row->n_threads)->fma);
    }
    printf(
        "\nOf a layer. rows: query tokens. of FMA: of the machine's peak with as many threads.\n");
}

static int measure_and_print(const struct options *o, const struct bench_shape *shapes,
                             size_t n_shapes)
{
    size_t n_caches = n_shapes * o->grid.tables.n, per_cache = o->n_rows.n * o->grid.threads.n;
    struct row *rows = calloc(n_caches * per_cache, sizeof *rows);
    if (!rows)
        return bench_fail("list of results", KVC_E_NOMEM);
    struct machine machine;
    int code = machine_measure(&o->grid.threads, bench_is_trial(&o->grid), &machine);
    for (size_t i = 0; i < n_caches && code == BENCH_GO; i++) {
        const struct bench_shape *shape = &shapes[i / o->grid.tables.n];
        const char *table = bench_tables[o->grid.tables.items[i % o->grid.tables.n]];
        fprintf(stderr, "[%zu/%zu] %ld/%ld heads, %ld tokens, %s, %s\n", i + 1, n_caches,
                shape->n_heads, shape->n_kv_heads, shape->n_kv, bench_formats[shape->format],
                table);
        code = measure_cache(o, shape, table, rows + i * per_cache);
    }
    if (code == BENCH_GO) {
        (o->grid.json ? print_json : print_table)(rows, n_caches * per_cache, &machine);
        code = BENCH_DONE;
    }
    free(rows);
    return code;
}

/* Queries are tokens of the cache. */
static bool rows_fit(const struct options *o)
{
    for (size_t i = 0; i < o->grid.n_kv.n; i++)
        if (o->grid.n_kv.items[i] < bench_most(&o->n_rows)) {
            fprintf(stderr, "kvc-bench prefill: %ld rows in a cache of %ld tokens\n",
                    bench_most(&o->n_rows), o->grid.n_kv.items[i]);
            return false;
        }
    return true;
}

int bench_prefill(int argc, char **argv)
{
    struct options options = {.grid = bench_grid_default(), .n_rows = {2, {64, 512}}};
    options.grid.best_table = true;
    options.grid.formats.n = 3;
    options.grid.n_kv = (struct bench_list){1, {4096}};
    options.grid.n_heads.n = options.grid.n_kv_heads.n = 1;
    int code = bench_parse("prefill", option_table, sizeof option_table / sizeof *option_table,
                           &options, argc, argv);
    struct bench_shape *shapes = NULL;
    size_t n_shapes = 0;
    if (code == BENCH_GO && !rows_fit(&options))
        code = BENCH_USAGE;
    if (code == BENCH_GO)
        code = bench_grid_shapes(&options.grid, "prefill", &shapes, &n_shapes);
    if (code == BENCH_GO)
        code = bench_grid_check_tables(&options.grid);
    if (code == BENCH_GO)
        code = measure_and_print(&options, shapes, n_shapes);
    free(shapes);
    return code;
}
