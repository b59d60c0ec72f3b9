/* grid.c - shapes, kernel tables and options that attend, prefill, append and peer share. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "grid.h"

/* Of one layer, K and V. */
static const size_t max_layer_bytes = (size_t)2 << 30;

const char *const bench_formats[BENCH_N_FORMATS] = {"f16",  "int8", "int4",
                                                    "k6v4", "k8v4", "int4-raw"};
const kvc_precision bench_precisions[BENCH_N_FORMATS] = {
    {KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_INT4, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
};

const char *const bench_tables[BENCH_N_TABLES] = {"ref", "avx2", "avx512", "vnni"};

struct bench_grid bench_grid_default(void)
{
    return (struct bench_grid){.formats = {4, {0, 1, 2, 3}},
                               .tables = {BENCH_N_TABLES, {0, 1, 2, 3}},
                               .n_kv = {3, {4096, 16384, 32768}},
                               .n_heads = {2, {32, 32}},
                               .n_kv_heads = {2, {8, 32}},
                               .threads = {2, {1, 2}},
                               .head_dim = 128,
                               .seconds = 0.3};
}

bool grid_set_formats(void *options, const char *value)
{
    return bench_parse_names(value, bench_formats, BENCH_N_FORMATS,
                             &((struct bench_grid *)options)->formats);
}

bool grid_set_tables(void *options, const char *value)
{
    struct bench_grid *grid = options;
    grid->tables_given = true;
    return bench_parse_names(value, bench_tables, BENCH_N_TABLES, &grid->tables);
}

bool grid_set_n_kv(void *options, const char *value)
{
    return bench_parse_longs(value, 1, 1 << 22, &((struct bench_grid *)options)->n_kv);
}

bool grid_set_heads(void *options, const char *value)
{
    struct bench_grid *grid = options;
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
        grid->n_heads.items[n] = heads;
        grid->n_kv_heads.items[n++] = kv_heads;
    } while (*value != '\0');
    grid->n_heads.n = grid->n_kv_heads.n = n;
    return true;
}

bool grid_set_threads(void *options, const char *value)
{
    return bench_parse_longs(value, 1, BENCH_MAX_THREADS, &((struct bench_grid *)options)->threads);
}

bool grid_set_head_dim(void *options, const char *value)
{
    return bench_parse_long(value, 1, KVC_MAX_HEAD_DIM, &((struct bench_grid *)options)->head_dim);
}

bool grid_set_seconds(void *options, const char *value)
{
    char *end;
    double seconds = strtod(value, &end);
    ((struct bench_grid *)options)->seconds = seconds;
    return end != value && *end == '\0' && seconds >= 0 && seconds <= 3600;
}

bool grid_set_transforms(void *options, const char *value)
{
    (void)value;
    return ((struct bench_grid *)options)->transforms = true;
}

bool grid_set_small_pages(void *options, const char *value)
{
    (void)value;
    return ((struct bench_grid *)options)->small_pages = true;
}

bool grid_set_json(void *options, const char *value)
{
    (void)value;
    return ((struct bench_grid *)options)->json = true;
}

int bench_grid_check_tables(struct bench_grid *grid)
{
    struct bench_list able = {0};
    for (size_t i = 0; i < grid->tables.n; i++) {
        const char *table = bench_tables[grid->tables.items[i]];
        kvc_ctx_params params = {.struct_size = sizeof params, .kernels = table};
        kvc_ctx *ctx;
        kvc_status status = kvc_ctx_create(&params, &ctx);
        kvc_ctx_destroy(ctx);
        /* A library that does not know the name answers KVC_E_ARG. */
        if (status == KVC_OK)
            able.items[able.n++] = grid->tables.items[i];
        else if (grid->tables_given || (status != KVC_E_UNSUPPORTED && status != KVC_E_ARG))
            return bench_fail(table, status);
    }
    if (grid->best_table && !grid->tables_given && able.n > 0)
        able = (struct bench_list){1, {able.items[able.n - 1]}};
    grid->tables = able;
    return able.n > 0 ? BENCH_GO : bench_fail("kernel tables", KVC_E_UNSUPPORTED);
}

/* A page of one side, K or V. */
static size_t side_bytes(kvc_format format, kvc_scale scale, size_t dim)
{
    static const size_t bits[] = {[KVC_F16] = 16, [KVC_INT8] = 8, [KVC_INT4] = 4, [KVC_INT6] = 6};
    size_t n_groups = bits[format] < 8 && dim >= 128 ? dim / 64 : 1;
    size_t n_params = scale == KVC_SCALE_CHANNEL ? 2 * dim : KVC_PAGE_TOKENS * n_groups;
    size_t params = format == KVC_F16 ? 0 : n_params * sizeof(uint16_t);
    return KVC_PAGE_TOKENS * dim * bits[format] / 8 + params;
}

size_t bench_layer_bytes(const struct bench_shape *shape)
{
    const kvc_precision *p = &bench_precisions[shape->format];
    size_t n_pages = ((size_t)shape->n_kv + KVC_PAGE_TOKENS - 1) / KVC_PAGE_TOKENS;
    size_t padded_dim = ((size_t)shape->head_dim + 7) / 8 * 8;
    return n_pages * (size_t)shape->n_kv_heads *
           (side_bytes(p->k, p->k_scale, padded_dim) + side_bytes(p->v, p->v_scale, padded_dim));
}

static bool fits(const char *command, const struct bench_shape *shape)
{
    size_t bytes = bench_layer_bytes(shape);
    if (bytes <= max_layer_bytes)
        return true;
    fprintf(stderr,
            "kvc-bench %s: %ld tokens, %ld KV heads of %ld, %s: %zu MiB a layer, at most %zu\n",
            command, shape->n_kv, shape->n_kv_heads, shape->head_dim, bench_formats[shape->format],
            bytes >> 20, max_layer_bytes >> 20);
    return false;
}

int bench_grid_shapes(const struct bench_grid *grid, const char *command,
                      struct bench_shape **shapes, size_t *n_shapes)
{
    *n_shapes = grid->n_heads.n * grid->n_kv.n * grid->formats.n;
    *shapes = malloc(*n_shapes * sizeof **shapes);
    if (!*shapes)
        return bench_fail("list of shapes", KVC_E_NOMEM);
    size_t n = 0;
    for (size_t h = 0; h < grid->n_heads.n; h++)
        for (size_t t = 0; t < grid->n_kv.n; t++)
            for (size_t f = 0; f < grid->formats.n; f++) {
                struct bench_shape *shape = &(*shapes)[n++];
                *shape = (struct bench_shape){.format = grid->formats.items[f],
                                              .n_kv = grid->n_kv.items[t],
                                              .n_heads = grid->n_heads.items[h],
                                              .n_kv_heads = grid->n_kv_heads.items[h],
                                              .head_dim = grid->head_dim};
                if (!fits(command, shape))
                    return BENCH_USAGE;
            }
    return BENCH_GO;
}

long bench_most(const struct bench_list *list)
{
    long most = list->items[0];
    for (size_t i = 1; i < list->n; i++)
        most = list->items[i] > most ? list->items[i] : most;
    return most;
}

bool bench_is_trial(const struct bench_grid *grid)
{
    return grid->seconds <= 0;
}
