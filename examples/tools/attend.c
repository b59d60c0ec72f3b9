/* attend.c - 'kvc-bench attend': decode attention of one token over a sealed cache. */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "attend.h"
#include "sealed.h"

/* Tokens that are appended one by one for the cost of that: they fill a page, which is sealed. */
enum { STEPS = KVC_PAGE_TOKENS };

const char *const attend_states[ATTEND_N_STATES] = {"whole", "holes", "compacted"};
const char *const attend_scores[ATTEND_N_SCORES] = {"none", "page", "token"};

struct options {
    struct bench_grid grid; /* first: its functions set it */
    struct bench_list scores;
    struct bench_list blocks;
    double keep; /* 1: all */
    bool exact;
};

/* What is measured of one shape and table, in a cache of its own. */
struct variant {
    long scores;
    long block; /* 0: the whole cache; else holes, then compacted */
};

static bool set_scores(void *options, const char *value)
{
    return bench_parse_names(value, attend_scores, ATTEND_N_SCORES,
                             &((struct options *)options)->scores);
}

static bool set_blocks(void *options, const char *value)
{
    return bench_parse_longs(value, 1, 1 << 20, &((struct options *)options)->blocks);
}

static bool set_keep(void *options, const char *value)
{
    char *end;
    double keep = strtod(value, &end);
    ((struct options *)options)->keep = keep;
    return end != value && *end == '\0' && keep > 0 && keep <= 1;
}

static bool set_exact(void *options, const char *value)
{
    (void)value;
    return ((struct options *)options)->exact = true;
}

static const struct bench_option option_table[] = {
    {"--formats", "LIST", "of f16,int8,int4,k6v4,k8v4,int4-raw; default the first four",
     grid_set_formats},
    {"--tables", "LIST", "of " BENCH_TABLE_NAMES "; default those that this CPU has",
     grid_set_tables},
    {"--n-kv", "LIST", "cached tokens; default 4096,16384,32768", grid_set_n_kv},
    {"--heads", "LIST", "query heads/KV heads; default 32/8,32/32", grid_set_heads},
    {"--threads", "LIST", "thread counts; default 1,2", grid_set_threads},
    {"--head-dim", "N", "elements of a head, up to 512; default 128", grid_set_head_dim},
    {"--seconds", "S", "time for each row, at least 3 runs; 0: a trial; default 0.3",
     grid_set_seconds},
    {"--transforms", NULL, "K and V are stored rotated, K less a mean and scaled",
     grid_set_transforms},
    {"--keep", "F", "also with this share of the rows, the others removed: as holes, and compacted",
     set_keep},
    {"--block", "LIST", "with --keep: tokens that go or stay together; default 1,16,64",
     set_blocks},
    {"--scores", "LIST", "of none,page,token: attention masses to add up; default none",
     set_scores},
    {"--exact", NULL, "products of floats, not of 16-bit integers (kvc_attend_options)", set_exact},
    {"--small-pages", NULL, "do not ask for huge pages", grid_set_small_pages},
    {"--json", NULL, "print JSON instead of a table", grid_set_json},
};

/* Rows of a variant, for each thread count. */
static size_t variant_states(const struct variant *variant)
{
    return variant->block == 0 ? 1 : 2;
}

static size_t list_variants(const struct options *o, struct variant *variants)
{
    size_t n = 0;
    for (size_t i = 0; i < o->scores.n; i++) {
        variants[n++] = (struct variant){.scores = o->scores.items[i]};
        for (size_t j = 0; o->keep < 1 && j < o->blocks.n; j++)
            variants[n++] =
                (struct variant){.scores = o->scores.items[i], .block = o->blocks.items[j]};
    }
    return n;
}

/* Time of a token in one layer, sealing of its page included. */
static int measure_append(struct sealed *s, double *us)
{
    double start = bench_seconds();
    for (int step = 0; step < STEPS; step++) {
        int code = sealed_append(s, 1);
        if (code != BENCH_GO)
            return code;
    }
    kvc_status status = kvc_seq_settle(s->cache, s->seq);
    *us = 1e6 * (bench_seconds() - start) / STEPS / s->n_layers;
    return status == KVC_OK ? BENCH_GO : bench_fail("kvc_seq_settle", status);
}

/* Blocks of so many tokens stay and go, spread evenly. */
static int remove_rows(struct sealed *s, double keep, long block)
{
    long n_kv = s->params.shape.n_kv;
    for (long b = 0; b * block < n_kv; b++) {
        if (floor((double)(b + 1) * keep) > floor((double)b * keep))
            continue;
        long end = (b + 1) * block < n_kv ? (b + 1) * block : n_kv;
        kvc_status status = kvc_seq_remove(s->cache, s->seq, b * block, end);
        if (status != KVC_OK)
            return bench_fail("kvc_seq_remove", status);
    }
    return sealed_count(s);
}

/* One state of the cache, for all thread counts: rows[0] ... rows[threads->n - 1]. */
static int measure_threads(struct sealed *s, const struct options *o, struct attend_row row,
                           struct attend_row *rows)
{
    kvc_attend_options options;
    kvc_attend_options_default(s->cache, &options);
    options.accumulate = s->params.scores != KVC_SCORE_NONE;
    options.exact = row.exact;
    double n_rows = (double)kvc_seq_n_rows(s->cache, s->seq, 0, 0);
    row.bytes = s->layer_bytes;
    for (size_t i = 0; i < o->grid.threads.n; i++) {
        row.n_threads = o->grid.threads.items[i];
        kvc_status status = bench_threads_set(&s->threads, (size_t)row.n_threads);
        if (status != KVC_OK)
            return bench_fail("kvc_pool_create", status);
        int code = sealed_time(s, &options, o->grid.seconds, &row.us);
        row.gbps = 1e-3 * (double)row.bytes / row.us;
        row.gflops =
            4e-3 * (double)row.shape.head_dim * (double)row.shape.n_heads * n_rows / row.us;
        if (code == BENCH_GO && row.state == ATTEND_WHOLE)
            code = measure_append(s, &row.append_us);
        if (code != BENCH_GO)
            return code;
        rows[i] = row;
    }
    return BENCH_GO;
}

static int measure_variant(const struct options *o, const struct bench_shape *shape,
                           const char *table, const struct variant *variant,
                           struct attend_row *rows)
{
    struct sealed_params params = {.shape = *shape,
                                   .table = table,
                                   .n_layers = bench_is_trial(&o->grid) ? 2 : 0,
                                   .n_threads = bench_most(&o->grid.threads),
                                   .n_more = STEPS * (long)o->grid.threads.n,
                                   .scores = (kvc_score_mode)variant->scores,
                                   .transforms = o->grid.transforms,
                                   .small_pages = o->grid.small_pages,
                                   .compacts = variant->block > 0};
    struct attend_row row = {
        .shape = *shape, .table = table, .exact = o->exact, .scores = variant->scores, .keep = 1};
    struct sealed s;
    int code = sealed_open(&s, &params);
    if (code == BENCH_GO && variant->block == 0)
        code = measure_threads(&s, o, row, rows);
    if (code == BENCH_GO && variant->block > 0) {
        row.keep = o->keep;
        row.block = variant->block;
        row.state = ATTEND_HOLES;
        code = remove_rows(&s, o->keep, variant->block);
        if (code == BENCH_GO)
            code = measure_threads(&s, o, row, rows);
        row.state = ATTEND_COMPACTED;
        if (code == BENCH_GO)
            code = sealed_compress(&s);
        if (code == BENCH_GO)
            code = measure_threads(&s, o, row, rows + o->grid.threads.n);
    }
    sealed_close(&s);
    return code;
}

/* rows[0] ... of all variants. */
static int measure_table(const struct options *o, const struct bench_shape *shape,
                         const char *table, struct attend_row *rows)
{
    struct variant variants[BENCH_MAX_ITEMS * (1 + BENCH_MAX_ITEMS)];
    size_t n_variants = list_variants(o, variants);
    for (size_t i = 0; i < n_variants; i++) {
        int code = measure_variant(o, shape, table, &variants[i], rows);
        if (code != BENCH_GO)
            return code;
        rows += variant_states(&variants[i]) * o->grid.threads.n;
    }
    return BENCH_GO;
}

static size_t rows_per_table(const struct options *o)
{
    size_t n_states = 1 + (o->keep < 1 ? 2 * o->blocks.n : 0);
    return o->scores.n * n_states * o->grid.threads.n;
}

static int measure_all(const struct options *o, const struct bench_shape *shapes, size_t n_shapes,
                       struct attend_row *rows)
{
    size_t n = 0, n_caches = n_shapes * o->grid.tables.n;
    for (size_t s = 0; s < n_shapes; s++)
        for (size_t t = 0; t < o->grid.tables.n; t++) {
            const char *table = bench_tables[o->grid.tables.items[t]];
            fprintf(stderr, "[%zu/%zu] %ld/%ld heads, %ld tokens, %s, %s\n", n + 1, n_caches,
                    shapes[s].n_heads, shapes[s].n_kv_heads, shapes[s].n_kv,
                    bench_formats[shapes[s].format], table);
            int code = measure_table(o, &shapes[s], table, rows + n * rows_per_table(o));
            if (code != BENCH_GO)
                return code;
            n++;
        }
    return BENCH_GO;
}

static int measure_and_print(const struct options *o, const struct bench_shape *shapes,
                             size_t n_shapes)
{
    size_t n_rows = n_shapes * o->grid.tables.n * rows_per_table(o);
    assert(n_rows > 0);
    struct attend_row *rows = malloc(n_rows * sizeof *rows);
    if (!rows)
        return bench_fail("list of results", KVC_E_NOMEM);
    struct machine machine;
    int code = machine_measure(&o->grid.threads, bench_is_trial(&o->grid), &machine);
    if (code == BENCH_GO)
        code = measure_all(o, shapes, n_shapes, rows);
    if (code == BENCH_GO) {
        (o->grid.json ? attend_print_json : attend_print_table)(rows, n_rows, &machine);
        code = BENCH_DONE;
    }
    free(rows);
    return code;
}

int bench_attend(int argc, char **argv)
{
    struct options options = {.grid = bench_grid_default(),
                              .scores = {1, {KVC_SCORE_NONE}},
                              .blocks = {3, {1, 16, 64}},
                              .keep = 1};
    int code = bench_parse("attend", option_table, sizeof option_table / sizeof *option_table,
                           &options, argc, argv);
    struct bench_shape *shapes = NULL;
    size_t n_shapes = 0;
    if (code == BENCH_GO)
        code = bench_grid_shapes(&options.grid, "attend", &shapes, &n_shapes);
    if (code == BENCH_GO)
        code = bench_grid_check_tables(&options.grid);
    if (code == BENCH_GO)
        code = measure_and_print(&options, shapes, n_shapes);
    free(shapes);
    return code;
}
