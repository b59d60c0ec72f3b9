/* append.c - 'kvc-bench append': what storing a token costs, and sealing the page that it fills. */
#include <stdio.h>
#include <stdlib.h>

#include "machine.h"
#include "sealed.h"

enum { MIN_ROUNDS = 3, MAX_ROUNDS = 256 };

struct options {
    struct bench_grid grid; /* first: its functions set it */
};

struct row {
    struct bench_shape shape;
    const char *table;
    bool transforms;
    long n_threads;
    double append_us; /* of a token and layer, without sealing */
    double seal_us;   /* the same of sealing */
    double seal_gbps; /* F16 pages read and sealed pages written */
    double attend_us; /* of a token and layer, over n_kv tokens */
};

static const struct bench_option option_table[] = {
    {"--formats", "LIST", "of f16,int8,int4,k6v4,k8v4,int4-raw; default the first three",
     grid_set_formats},
    {"--tables", "LIST", "of " BENCH_TABLE_NAMES "; default the best of this CPU", grid_set_tables},
    {"--n-kv", "LIST", "cached tokens of the attention beside it; default 4096", grid_set_n_kv},
    {"--heads", "LIST", "query heads/KV heads; default 32/8", grid_set_heads},
    {"--threads", "LIST", "thread counts; default 1,2", grid_set_threads},
    {"--head-dim", "N", "elements of a head, up to 512; default 128", grid_set_head_dim},
    {"--seconds", "S", "time for each row, at least 3 pages; 0: a trial; default 0.3",
     grid_set_seconds},
    {"--transforms", NULL, "only with K and V rotated, K less a mean and scaled; default with both",
     grid_set_transforms},
    {"--small-pages", NULL, "do not ask for huge pages", grid_set_small_pages},
    {"--json", NULL, "print JSON instead of a table", grid_set_json},
};

/* A page of each layer and head is filled token by token and sealed; then it is forgotten. */
static int fill_page(struct sealed *s, double *append, double *seal)
{
    double start = bench_seconds();
    for (int i = 0; i < KVC_PAGE_TOKENS; i++) {
        int code = sealed_append(s, 1);
        if (code != BENCH_GO)
            return code;
    }
    double filled = bench_seconds();
    kvc_status status = kvc_seq_settle(s->cache, s->seq);
    *append = filled - start;
    *seal = bench_seconds() - filled;
    if (status != KVC_OK)
        return bench_fail("kvc_seq_settle", status);
    status = kvc_seq_truncate(s->cache, s->seq, s->params.shape.n_kv);
    return status == KVC_OK ? BENCH_GO : bench_fail("kvc_seq_truncate", status);
}

static int measure_pages(struct sealed *s, double seconds, struct row *row)
{
    double append[MAX_ROUNDS], seal[MAX_ROUNDS];
    size_t n = 0;
    double end = 0;
    /* The first round only warms up. */
    for (int round = 0; n < MIN_ROUNDS || (n < MAX_ROUNDS && bench_seconds() < end); round++) {
        int code = fill_page(s, &append[n], &seal[n]);
        if (code != BENCH_GO)
            return code;
        if (round == 0)
            end = bench_seconds() + seconds;
        else
            n++;
    }
    double n_tokens = (double)KVC_PAGE_TOKENS * (double)s->n_layers;
    row->append_us = 1e6 * bench_median(append, n) / n_tokens;
    row->seal_us = 1e6 * bench_median(seal, n) / n_tokens;
    struct bench_shape page = row->shape, exact = row->shape;
    page.n_kv = exact.n_kv = KVC_PAGE_TOKENS;
    exact.format = 0;
    double bytes = (double)(bench_layer_bytes(&page) + bench_layer_bytes(&exact));
    row->seal_gbps = 1e-3 * bytes / (row->seal_us * KVC_PAGE_TOKENS);
    return BENCH_GO;
}

static int measure_cache(const struct options *o, const struct bench_shape *shape,
                         const char *table, bool transforms, struct row *rows)
{
    struct sealed_params params = {.shape = *shape,
                                   .table = table,
                                   .n_layers = bench_is_trial(&o->grid) ? 2 : 0,
                                   .n_threads = bench_most(&o->grid.threads),
                                   .n_more = KVC_PAGE_TOKENS,
                                   .transforms = transforms,
                                   .small_pages = o->grid.small_pages};
    struct sealed s;
    int code = sealed_open(&s, &params);
    for (size_t i = 0; i < o->grid.threads.n && code == BENCH_GO; i++) {
        struct row row = {.shape = *shape,
                          .table = table,
                          .transforms = transforms,
                          .n_threads = o->grid.threads.items[i]};
        kvc_status status = bench_threads_set(&s.threads, (size_t)row.n_threads);
        code = status == KVC_OK ? sealed_time(&s, NULL, o->grid.seconds, &row.attend_us)
                                : bench_fail("kvc_pool_create", status);
        if (code == BENCH_GO)
            code = measure_pages(&s, o->grid.seconds, &row);
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
        printf("%s\n{\"table\":\"%s\",\"format\":\"%s\",\"transforms\":%s,\"n_kv\":%ld,"
               "\"heads\":%ld,\"kv_heads\":%ld,\"head_dim\":%ld,\"threads\":%ld,"
               "\"append_us\":%.4f,\"seal_us\":%.4f,\"seal_gbps\":%.4g,\"copy_share\":%.4g,"
               "\"attend_us\":%.2f,\"attend_share\":%.4g}",
               i ? "," : "", row->table, bench_formats[row->shape.format],
               row->transforms ? "true" : "false", row->shape.n_kv, row->shape.n_heads,
               row->shape.n_kv_heads, row->shape.head_dim, row->n_threads, row->append_us,
               row->seal_us, row->seal_gbps,
               row->seal_gbps / machine_peak(machine, row->n_threads)->copy, row->attend_us,
               (row->append_us + row->seal_us) / row->attend_us);
    }
    printf("\n]}\n");
}

static void print_table(const struct row *rows, size_t n_rows, const struct machine *machine)
{
    machine_print_table(machine);
    printf("%-7s %4s %7s %-8s %-10s %7s %-6s %10s %10s %10s %8s %10s %9s\n", "heads", "dim", "n_kv",
           "format", "transforms", "threads", "table", "append us", "seal us", "seal GB/s",
           "of copy", "attend us", "of attend");
    for (size_t i = 0; i < n_rows; i++) {
        const struct row *row = &rows[i];
        char heads[32];
        snprintf(heads, sizeof heads, "%ld/%ld", row->shape.n_heads, row->shape.n_kv_heads);
        printf("%-7s %4ld %7ld %-8s %-10s %7ld %-6s %10.3f %10.3f %10.2f %7.0f%% %10.1f %8.2f%%\n",
               heads, row->shape.head_dim, row->shape.n_kv, bench_formats[row->shape.format],
               row->transforms ? "yes" : "no", row->n_threads, row->table, row->append_us,
               row->seal_us, row->seal_gbps,
               100 * row->seal_gbps / machine_peak(machine, row->n_threads)->copy, row->attend_us,
               100 * (row->append_us + row->seal_us) / row->attend_us);
    }
    printf(
        "\nOf a token and layer. seal: its share of sealing a page. seal GB/s: bytes read and\n"
        "written; of copy: of what the machine copies with as many threads. of attend: append and\n"
        "seal, of decode attention over n_kv tokens.\n");
}

static int measure_and_print(const struct options *o, const struct bench_shape *shapes,
                             size_t n_shapes)
{
    size_t n_kinds = o->grid.transforms ? 1 : 2, n_tables = o->grid.tables.n;
    size_t n_caches = n_shapes * n_tables * n_kinds, n_threads = o->grid.threads.n;
    struct row *rows = calloc(n_caches * n_threads, sizeof *rows);
    if (!rows)
        return bench_fail("list of results", KVC_E_NOMEM);
    struct machine machine;
    int code = machine_measure(&o->grid.threads, bench_is_trial(&o->grid), &machine);
    for (size_t i = 0; i < n_caches && code == BENCH_GO; i++) {
        const struct bench_shape *shape = &shapes[i / n_kinds / n_tables];
        const char *table = bench_tables[o->grid.tables.items[i / n_kinds % n_tables]];
        bool transforms = o->grid.transforms || i % 2 == 1;
        fprintf(stderr, "[%zu/%zu] %ld/%ld heads, %ld tokens, %s, %s%s\n", i + 1, n_caches,
                shape->n_heads, shape->n_kv_heads, shape->n_kv, bench_formats[shape->format], table,
                transforms ? ", transforms" : "");
        code = measure_cache(o, shape, table, transforms, rows + i * n_threads);
    }
    if (code == BENCH_GO) {
        (o->grid.json ? print_json : print_table)(rows, n_caches * n_threads, &machine);
        code = BENCH_DONE;
    }
    free(rows);
    return code;
}

int bench_append(int argc, char **argv)
{
    struct options options = {.grid = bench_grid_default()};
    options.grid.best_table = true;
    options.grid.formats.n = 3;
    options.grid.n_kv = (struct bench_list){1, {4096}};
    options.grid.n_heads.n = options.grid.n_kv_heads.n = 1;
    int code = bench_parse("append", option_table, sizeof option_table / sizeof *option_table,
                           &options, argc, argv);
    struct bench_shape *shapes = NULL;
    size_t n_shapes = 0;
    if (code == BENCH_GO)
        code = bench_grid_shapes(&options.grid, "append", &shapes, &n_shapes);
    if (code == BENCH_GO)
        code = bench_grid_check_tables(&options.grid);
    if (code == BENCH_GO)
        code = measure_and_print(&options, shapes, n_shapes);
    free(shapes);
    return code;
}
