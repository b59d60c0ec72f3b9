/* peer.c - 'kvc-bench peer': its options and how its rows are printed. */
#include <stdio.h>

#include "peer.h"

const char *const peer_layouts[PEER_N_LAYOUTS] = {"token-major", "head-major"};

static bool set_formats(void *options, const char *value)
{
    return bench_parse_names(value, bench_formats, PEER_N_FORMATS,
                             &((struct peer_options *)options)->grid.formats);
}

static bool set_layouts(void *options, const char *value)
{
    return bench_parse_names(value, peer_layouts, PEER_N_LAYOUTS,
                             &((struct peer_options *)options)->layouts);
}

static bool set_heads(void *options, const char *value)
{
    struct peer_options *o = options;
    o->grid.n_heads.n = 1;
    return bench_parse_long(value, 1, 1024, &o->grid.n_heads.items[0]);
}

static bool set_kv_heads(void *options, const char *value)
{
    return bench_parse_longs(value, 1, 1024, &((struct peer_options *)options)->grid.n_kv_heads);
}

/* ggml's blocks are 32 wide. */
static bool set_head_dim(void *options, const char *value)
{
    struct peer_options *o = options;
    return bench_parse_long(value, 32, KVC_MAX_HEAD_DIM, &o->grid.head_dim) &&
           o->grid.head_dim % 32 == 0;
}

static const struct bench_option option_table[] = {
    {"--formats", "LIST", "of f16,int8,int4, beside ggml's f16,q8_0,q4_0; default all",
     set_formats},
    {"--layouts", "LIST", "ggml's: of token-major (llama.cpp's),head-major; default both",
     set_layouts},
    {"--n-kv", "LIST", "cached tokens; default 16384,32768", grid_set_n_kv},
    {"--heads", "N", "query heads; default 32", set_heads},
    {"--kv-heads", "LIST", "KV heads, divisors of the query heads; default 32,8", set_kv_heads},
    {"--head-dim", "N", "elements of a head, a multiple of 32 up to 512; default 128",
     set_head_dim},
    {"--threads", "LIST", "thread counts; default 1,2", grid_set_threads},
    {"--tables", "LIST", "of " BENCH_TABLE_NAMES "; default the best of this CPU", grid_set_tables},
    {"--seconds", "S", "time for each row, at least 5 pairs of runs; 0: a trial; default 0.5",
     grid_set_seconds},
    {"--small-pages", NULL, "do not ask for huge pages, on either side", grid_set_small_pages},
    {"--json", NULL, "print JSON instead of a table", grid_set_json},
};

/* Pairs, as the grid has them. */
static bool pair_heads(struct bench_grid *grid)
{
    long n_heads = grid->n_heads.items[0];
    grid->n_heads.n = grid->n_kv_heads.n;
    for (size_t i = 0; i < grid->n_kv_heads.n; i++) {
        grid->n_heads.items[i] = n_heads;
        if (n_heads % grid->n_kv_heads.items[i] != 0) {
            fprintf(stderr, "kvc-bench peer: %ld KV heads do not divide %ld heads\n",
                    grid->n_kv_heads.items[i], n_heads);
            return false;
        }
    }
    return true;
}

int bench_peer(int argc, char **argv)
{
    struct peer_options options = {
        .grid = bench_grid_default(),
        .layouts = {PEER_N_LAYOUTS, {PEER_TOKEN_MAJOR, PEER_HEAD_MAJOR}}};
    options.grid.formats.n = PEER_N_FORMATS;
    options.grid.n_kv = (struct bench_list){2, {16384, 32768}};
    options.grid.n_heads = (struct bench_list){1, {32}};
    options.grid.n_kv_heads = (struct bench_list){2, {32, 8}};
    options.grid.seconds = 0.5;
    options.grid.best_table = true;
    int code = bench_parse("peer", option_table, sizeof option_table / sizeof *option_table,
                           &options, argc, argv);
    if (code == BENCH_GO && !pair_heads(&options.grid))
        code = BENCH_USAGE;
    return code == BENCH_GO ? peer_run(&options) : code;
}

void peer_print_json(const struct peer_row *rows, size_t n_rows)
{
    printf("{\"rows\":[");
    for (size_t i = 0; i < n_rows; i++) {
        const struct peer_row *row = &rows[i];
        printf("%s\n{\"format\":\"%s\",\"layout\":\"%s\",\"heads\":%ld,\"kv_heads\":%ld,"
               "\"head_dim\":%ld,\"n_kv\":%ld,\"threads\":%ld,\"table\":\"%s\",\"ours_us\":%.2f,"
               "\"ggml_us\":%.2f,\"ratio\":%.3f,\"ratio_low\":%.3f,\"ratio_high\":%.3f,"
               "\"pairs\":%zu,\"difference\":%.6f}",
               i ? "," : "", bench_formats[row->shape.format], peer_layouts[row->layout],
               row->shape.n_heads, row->shape.n_kv_heads, row->shape.head_dim, row->shape.n_kv,
               row->n_threads, row->table, row->ours_us, row->ggml_us, row->ratio, row->ratio_low,
               row->ratio_high, row->n_pairs, row->difference);
    }
    printf("\n]}\n");
}

void peer_print_table(const struct peer_row *rows, size_t n_rows)
{
    printf("%-9s %4s %8s %-6s %7s %-7s %-11s %10s %10s %7s %14s %6s %10s\n", "heads", "dim", "n_kv",
           "format", "threads", "table", "ggml's", "ours us", "ggml us", "ratio", "middle half",
           "pairs", "difference");
    for (size_t i = 0; i < n_rows; i++) {
        const struct peer_row *row = &rows[i];
        char heads[32], spread[64];
        snprintf(heads, sizeof heads, "%ld/%ld", row->shape.n_heads, row->shape.n_kv_heads);
        snprintf(spread, sizeof spread, "%.2f-%.2f", row->ratio_low, row->ratio_high);
        printf("%-9s %4ld %8ld %-6s %7ld %-7s %-11s %10.0f %10.0f %6.2fx %14s %6zu %10.5f\n", heads,
               row->shape.head_dim, row->shape.n_kv, bench_formats[row->shape.format],
               row->n_threads, row->table, peer_layouts[row->layout], row->ours_us, row->ggml_us,
               row->ratio, spread, row->n_pairs, row->difference);
    }
    printf(
        "\nOf a token and layer, medians. ratio: ggml's time by ours, the median of pairs of runs\n"
        "that follow one another. difference: the largest between both outputs, by the largest\n"
        "output of its head; K and V are such that all formats hold them.\n");
}
