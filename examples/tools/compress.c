/* compress.c - 'kvc-bench compress': what scoring, pruning and merging after a prefill cost. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "compress.h"
#include "grid.h"

static const float prune_rate = 0.3f;

static bool set_layers(void *options, const char *value)
{
    return bench_parse_long(value, 1, 512, &((struct compress_options *)options)->n_layers);
}

static bool set_heads(void *options, const char *value)
{
    return bench_parse_long(value, 1, 1024, &((struct compress_options *)options)->n_heads);
}

static bool set_kv_heads(void *options, const char *value)
{
    return bench_parse_long(value, 1, 1024, &((struct compress_options *)options)->n_kv_heads);
}

static bool set_head_dim(void *options, const char *value)
{
    return bench_parse_long(value, 1, KVC_MAX_HEAD_DIM,
                            &((struct compress_options *)options)->head_dim);
}

static bool set_tokens(void *options, const char *value)
{
    return bench_parse_long(value, 16, 8192, &((struct compress_options *)options)->n_tokens);
}

static bool set_window(void *options, const char *value)
{
    return bench_parse_long(value, 1, 8192, &((struct compress_options *)options)->window);
}

static bool set_repeat(void *options, const char *value)
{
    return bench_parse_long(value, 1, 1000, &((struct compress_options *)options)->repeat);
}

static bool set_kernels(void *options, const char *value)
{
    struct compress_options *o = options;
    struct bench_list list;
    if (!bench_parse_names(value, bench_tables, BENCH_N_TABLES, &list) || list.n != 1)
        return false;
    snprintf(o->kernels, sizeof o->kernels, "%s", value);
    return true;
}

static bool set_json(void *options, const char *value)
{
    (void)value;
    ((struct compress_options *)options)->json = true;
    return true;
}

static const struct bench_option option_table[] = {
    {"--layers", "N", "1 to 512; default 32", set_layers},
    {"--heads", "N", "query heads; default 32", set_heads},
    {"--kv-heads", "N", "KV heads, a divisor of the query heads; default 8", set_kv_heads},
    {"--head-dim", "N", "elements of a head, up to 512; default 128", set_head_dim},
    {"--tokens", "N", "visual tokens, 16 to 8192; default 576", set_tokens},
    {"--window", "N", "rows and columns that merging looks, 1 to 8192; default 4", set_window},
    {"--repeat", "N", "measured runs of each step, 1 to 1000; default 10", set_repeat},
    {"--kernels", "NAME", "one of " BENCH_TABLE_NAMES "; default the best of this CPU",
     set_kernels},
    {"--json", NULL, "print JSON instead of a table", set_json},
};

/* ---- inputs ---- */

static float uniform(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-23f - 1.0f;
}

/* Rounded towards zero; what is below the normal numbers becomes 0. */
static uint16_t to_half(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    return (uint16_t)(magnitude < 0x38800000u ? sign : sign | ((magnitude - 0x38000000u) >> 13));
}

enum { CONTROL = 5, CONTROLS = CONTROL * CONTROL };

/* The smooth field of one element at a patch: bilinear between points of a coarse grid. */
static float field_at(const float *points, const kvc_grid *grid, size_t token)
{
    const size_t n_cols = (size_t)grid->n_cols, row = token / n_cols, col = token % n_cols;
    const float y = (float)row * (CONTROL - 1) / (float)grid->n_rows;
    const float x = (float)col * (CONTROL - 1) / (float)grid->n_cols;
    const size_t i = (size_t)y, j = (size_t)x;
    const float fy = y - (float)i, fx = x - (float)j;
    const float *p = points + i * CONTROL + j;
    return (1 - fy) * ((1 - fx) * p[0] + fx * p[1]) +
           fy * ((1 - fx) * p[CONTROL] + fx * p[CONTROL + 1]);
}

/* Neighbouring patches look alike, as in a photo; text does not. */
static void fill_rows(const struct compress_bench *b, uint16_t *x, uint32_t *state)
{
    const size_t n_rows = (size_t)b->options->n_layers * b->n_all;
    for (size_t e = 0; e < b->width; e++) {
        float points[CONTROLS];
        for (size_t r = 0; r < n_rows; r++) {
            const size_t t = r % b->n_all;
            if (t == 0)
                for (size_t i = 0; i < CONTROLS; i++)
                    points[i] = uniform(state);
            const bool visual = t >= COMPRESS_SINKS && t < COMPRESS_SINKS + b->n_tokens;
            const float smooth = visual ? field_at(points, &b->grid, t - COMPRESS_SINKS) : 0.0f;
            x[r * b->width + e] = to_half(smooth + (visual ? 0.1f : 1.0f) * uniform(state));
        }
    }
}

static void fill_inputs(const struct compress_bench *b)
{
    uint32_t state = 1;
    float points[CONTROLS];
    const size_t n_q = COMPRESS_PROBES * (size_t)b->options->n_heads * (size_t)b->options->head_dim;
    fill_rows(b, b->k, &state);
    fill_rows(b, b->v, &state);
    for (size_t i = 0; i < n_q; i++)
        b->q[i] = uniform(&state);
    for (size_t i = 0; i < CONTROLS; i++)
        points[i] = 1.5f + uniform(&state);
    memset(b->given, 0, b->n_all * sizeof *b->given);
    for (size_t i = 0; i < b->n_tokens; i++)
        b->given[COMPRESS_SINKS + i] = field_at(points, &b->grid, i) + 0.2f * uniform(&state);
}

kvc_view compress_view(const struct compress_bench *b, uint16_t *x, size_t layer, bool visual)
{
    const size_t first = layer * b->n_all + (visual ? COMPRESS_SINKS : 0);
    return kvc_view_packed(x + first * b->width, KVC_DTYPE_F16, visual ? b->n_tokens : b->n_all,
                           (size_t)b->options->n_kv_heads, (size_t)b->options->head_dim);
}

/* ---- steps ---- */

void compress_lap(struct compress_laps *laps, const char *part)
{
    const double now = bench_seconds();
    if (part) {
        laps->parts[laps->n] = part;
        laps->ms[laps->n++] = 1e3 * (now - laps->last);
    }
    laps->last = bench_seconds();
}

/* Keys and values of the visual tokens as they were. */
static kvc_status restore(struct compress_bench *b)
{
    const size_t n = b->n_tokens * b->width;
    for (size_t layer = 0; layer < (size_t)b->options->n_layers; layer++) {
        kvc_view *k = &b->view_k[layer], *v = &b->view_v[layer];
        *k = compress_view(b, b->k, layer, true);
        *v = compress_view(b, b->v, layer, true);
        k->data = memcpy(b->work_k + layer * n, k->data, n * sizeof *b->work_k);
        v->data = memcpy(b->work_v + layer * n, v->data, n * sizeof *b->work_v);
    }
    return KVC_OK;
}

/* The rows of one layer, all heads of a token as one embedding. */
static kvc_view embeddings(const struct compress_bench *b, size_t layer)
{
    return kvc_view_packed(b->view_k[layer].data, KVC_DTYPE_F16, b->n_tokens, 1, b->width);
}

static kvc_status prune_all(struct compress_bench *b)
{
    kvc_status status = KVC_OK;
    for (size_t layer = 0; status == KVC_OK && layer < (size_t)b->options->n_layers; layer++) {
        kvc_view *k = &b->view_k[layer], *v = &b->view_v[layer];
        status = kvc_prune_rows(b->ctx, k, b->kept, b->n_left);
        if (status == KVC_OK)
            status = kvc_prune_rows(b->ctx, v, b->kept, b->n_left);
        k->n_tokens = v->n_tokens = b->n_left;
    }
    return status;
}

static kvc_status prune(struct compress_bench *b, const struct compress_step *step,
                        struct compress_laps *laps)
{
    const kvc_view features = embeddings(b, (size_t)b->options->n_layers / 2);
    size_t keep;

    (void)step;
    compress_lap(laps, NULL);
    kvc_status status =
        kvc_score_refine(b->given + COMPRESS_SINKS, &b->grid, NULL, NULL, b->scores, NULL);
    compress_lap(laps, "kvc_score_refine");
    if (status == KVC_OK)
        status = kvc_keep_count(b->n_tokens, prune_rate, 0, &keep);
    if (status == KVC_OK)
        status = kvc_choose_tokens(b->ctx, b->scores, &features, &b->grid, NULL, keep, NULL,
                                   b->kept, &b->n_left, NULL, b->ws, b->ws_size);
    compress_lap(laps, "kvc_choose_tokens");
    if (status == KVC_OK)
        status = prune_all(b);
    compress_lap(laps, "kvc_prune_rows");
    return status;
}

static void describe_tokens(const struct compress_bench *b)
{
    for (size_t i = 0; i < b->n_left; i++) {
        const int32_t token = b->kept[i];
        b->merge_tokens[i] = (kvc_merge_token){.row = token / b->grid.n_cols,
                                               .col = token % b->grid.n_cols,
                                               .size = 1.0f,
                                               .mass = b->scores[token]};
    }
}

static kvc_status compare_keys(struct compress_bench *b, const kvc_merge_options *options)
{
    kvc_status status = KVC_OK;
    memset(b->similarity, 0, kvc_merge_triangle(b->n_left) * sizeof *b->similarity);
    memset(b->norms, 0, b->n_left * sizeof *b->norms);
    for (size_t layer = 0; status == KVC_OK && layer < (size_t)b->options->n_layers; layer++)
        status = kvc_merge_similarity(b->ctx, &b->view_k[layer], b->merge_tokens, options,
                                      b->similarity, b->norms, b->ws, b->ws_size);
    return status;
}

static kvc_status prune_and_merge(struct compress_bench *b, const struct compress_step *step,
                                  struct compress_laps *laps)
{
    const size_t n_layers = (size_t)b->options->n_layers;
    const float scale = 1.0f / (float)(n_layers * (size_t)b->options->n_kv_heads);
    size_t n_pairs = 0;
    kvc_merge_options options;
    kvc_merge_options_default(&options);
    options.force_quarter = true;
    options.window = step->window ? (int32_t)b->options->window : 0;

    kvc_status status = prune(b, step, laps);
    if (status != KVC_OK)
        return status;
    describe_tokens(b);
    status = compare_keys(b, &options);
    compress_lap(laps, "kvc_merge_similarity");
    if (status == KVC_OK)
        status = kvc_merge_match(b->similarity, scale, b->norms, b->merge_tokens, b->n_left,
                                 &options, b->pairs, &n_pairs, b->ws, b->ws_size);
    compress_lap(laps, "kvc_merge_match");
    if (status == KVC_OK)
        status = kvc_merge_apply(b->ctx, b->pairs, n_pairs, b->view_k, b->view_v, n_layers, NULL,
                                 &options, b->merge_tokens, b->map, b->rows, &b->n_left);
    compress_lap(laps, "kvc_merge_apply");
    return status;
}

static kvc_status score(struct compress_bench *b, const struct compress_step *step,
                        struct compress_laps *laps)
{
    const struct compress_options *o = b->options;
    const size_t n_heads = (size_t)o->n_heads, n_kv_heads = (size_t)o->n_kv_heads;
    const size_t n_layers = (size_t)o->n_layers;
    const kvc_view q =
        kvc_view_packed(b->q, KVC_DTYPE_F32, COMPRESS_PROBES, n_heads, (size_t)o->head_dim);
    kvc_status status = KVC_OK;

    (void)step;
    compress_lap(laps, NULL);
    for (size_t layer = 0; status == KVC_OK && layer < n_layers; layer++) {
        const kvc_view k = compress_view(b, b->k, layer, true);
        status =
            kvc_score_queries(b->ctx, &q, &k, NULL,
                              b->head_scores + layer * n_kv_heads * b->n_tokens, b->ws, b->ws_size);
    }
    compress_lap(laps, "kvc_score_queries");
    if (status == KVC_OK)
        status = kvc_combine_scores(b->head_at, n_layers * n_kv_heads, b->n_tokens, NULL, false,
                                    b->scores);
    compress_lap(laps, "kvc_combine_scores");
    b->n_left = b->n_tokens;
    return status;
}

#define CACHE_STEP .prepare = compress_cache_fill, .run = compress_cache_run

static const struct compress_step steps[] = {
    {.name = "prune", .prepare = restore, .run = prune},
    {.name = "prune+merge", .prepare = restore, .run = prune_and_merge},
    {.name = "prune+merge window", .prepare = restore, .run = prune_and_merge, .window = true},
    {.name = "score", .run = score},
    {.name = "cache seal", CACHE_STEP, .seal_only = true},
    {.name = "cache prune", CACHE_STEP},
    {.name = "cache prune+merge", CACHE_STEP, .rounds = 1},
    {.name = "cache score+prune+merge", CACHE_STEP, .rounds = 1, .probes = true},
    {.name = "cache score+prune+merge+report",
     CACHE_STEP,
     .rounds = 1,
     .probes = true,
     .report = true},
};

enum { N_STEPS = sizeof steps / sizeof *steps };

static void print_steps(void)
{
    printf("\nSteps, each over all layers:\n");
    for (size_t s = 0; s < N_STEPS; s++)
        printf("  %s\n", steps[s].name);
    printf("Those of the cache are kvc_cache_compress() after a prefill, which is not timed.\n");
}

/* ---- measuring ---- */

static struct compress_time summarize(double *samples, size_t n)
{
    const double median = bench_median(samples, n); /* sorts them */
    return (struct compress_time){samples[0], median, samples[n - 1]};
}

/* samples: [COMPRESS_MAX_PARTS + 2][repeat]; the last are sums over the parts, and processor time.
 * The first run only warms up. */
static int measure(struct compress_bench *b, const struct compress_step *step, double *samples,
                   struct compress_row *row)
{
    const size_t repeat = (size_t)b->options->repeat;
    double *sums = samples + COMPRESS_MAX_PARTS * repeat, *cpu = sums + repeat;
    struct compress_laps laps = {0};

    for (size_t r = 0; r <= repeat; r++) {
        laps.n = 0;
        kvc_status status = step->prepare ? step->prepare(b) : KVC_OK;
        const clock_t start = clock();
        if (status == KVC_OK)
            status = step->run(b, step, &laps);
        const clock_t stop = clock();
        if (status != KVC_OK)
            return bench_fail(step->name, status);
        if (r == 0)
            continue;
        cpu[r - 1] = 1e3 * (double)(stop - start) / CLOCKS_PER_SEC;
        sums[r - 1] = 0;
        for (size_t p = 0; p < laps.n; p++)
            sums[r - 1] += samples[p * repeat + r - 1] = laps.ms[p];
    }
    *row = (struct compress_row){.step = step->name,
                                 .n_left = b->n_left,
                                 .n_parts = laps.n,
                                 .time = summarize(sums, repeat),
                                 .cpu = summarize(cpu, repeat)};
    for (size_t p = 0; p < laps.n; p++) {
        row->parts[p] = laps.parts[p];
        row->part_times[p] = summarize(samples + p * repeat, repeat);
    }
    return BENCH_GO;
}

static int measure_and_print(struct compress_bench *b)
{
    struct compress_row rows[N_STEPS];
    const size_t repeat = (size_t)b->options->repeat;
    double *samples = malloc((COMPRESS_MAX_PARTS + 2) * repeat * sizeof *samples);
    int code = BENCH_GO;

    if (!samples)
        return bench_fail("samples", KVC_E_NOMEM);
    for (size_t s = 0; s < N_STEPS && code == BENCH_GO; s++) {
        fprintf(stderr, "[%zu/%d] %s\n", s + 1, (int)N_STEPS, steps[s].name);
        code = measure(b, &steps[s], samples, &rows[s]);
    }
    free(samples);
    if (code != BENCH_GO)
        return code;
    (b->options->json ? compress_print_json : compress_print_table)(b, rows, N_STEPS);
    return BENCH_DONE;
}

/* ---- set up ---- */

/* The most square grid of so many patches. */
static kvc_grid grid_of(long n)
{
    long rows = 1;
    for (long side = 1; side * side <= n; side++)
        if (n % side == 0)
            rows = side;
    return kvc_grid_image((int32_t)rows, (int32_t)(n / rows));
}

static kvc_status find_workspace(struct compress_bench *b)
{
    const struct compress_options *o = b->options;
    const kvc_view k = compress_view(b, b->k, 0, true);
    size_t sizes[4] = {0};
    kvc_status status = kvc_choose_tokens_workspace_size(&b->grid, b->width, &sizes[0]);
    if (status == KVC_OK)
        status = kvc_merge_similarity_workspace_size(&k, &sizes[1]);
    if (status == KVC_OK)
        status = kvc_merge_match_workspace_size(b->n_tokens, &sizes[2]);
    if (status == KVC_OK)
        status =
            kvc_score_queries_workspace_size(COMPRESS_PROBES, (size_t)o->n_heads, b->n_tokens,
                                             (size_t)o->n_kv_heads, (size_t)o->head_dim, &sizes[3]);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        b->ws_size = sizes[i] > b->ws_size ? sizes[i] : b->ws_size;
    b->ws_size = (b->ws_size + 63) / 64 * 64;
    return status;
}

static kvc_status allocate(struct compress_bench *b)
{
    const struct compress_options *o = b->options;
    const size_t n_layers = (size_t)o->n_layers, n = b->n_tokens;
    const size_t n_q = COMPRESS_PROBES * (size_t)o->n_heads * (size_t)o->head_dim;
    const size_t n_pairs = n_layers * (size_t)o->n_kv_heads;
    const kvc_status status = find_workspace(b);
    if (status != KVC_OK)
        return status;
    b->k = malloc(n_layers * b->n_all * b->width * sizeof *b->k);
    b->v = malloc(n_layers * b->n_all * b->width * sizeof *b->v);
    b->work_k = malloc(n_layers * n * b->width * sizeof *b->work_k);
    b->work_v = malloc(n_layers * n * b->width * sizeof *b->work_v);
    b->q = malloc(n_q * sizeof *b->q);
    b->out = malloc(n_q * sizeof *b->out);
    b->given = malloc(b->n_all * sizeof *b->given);
    b->view_k = malloc(n_layers * sizeof *b->view_k);
    b->view_v = malloc(n_layers * sizeof *b->view_v);
    b->scores = malloc(n * sizeof *b->scores);
    b->head_scores = malloc(n_pairs * n * sizeof *b->head_scores);
    b->head_at = malloc(n_pairs * sizeof *b->head_at);
    b->similarity = malloc(kvc_merge_triangle(n) * sizeof *b->similarity);
    b->norms = malloc(n * sizeof *b->norms);
    b->merge_tokens = malloc(n * sizeof *b->merge_tokens);
    b->pairs = malloc(n / 2 * sizeof *b->pairs);
    b->kept = malloc(n * sizeof *b->kept);
    b->map = malloc(n * sizeof *b->map);
    b->rows = malloc(n * sizeof *b->rows);
    b->tokens = malloc(b->n_all * sizeof *b->tokens);
    b->layers = malloc(n_layers * sizeof *b->layers);
    b->ws = aligned_alloc(64, b->ws_size);
    const void *all[] = {b->k,           b->v,       b->work_k,     b->work_v, b->q,
                         b->out,         b->given,   b->view_k,     b->view_v, b->scores,
                         b->head_scores, b->head_at, b->similarity, b->norms,  b->merge_tokens,
                         b->pairs,       b->kept,    b->map,        b->rows,   b->tokens,
                         b->layers,      b->ws};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!all[i])
            return KVC_E_NOMEM;
    for (size_t i = 0; i < n_pairs; i++)
        b->head_at[i] = b->head_scores + i * n;
    return KVC_OK;
}

static void release(struct compress_bench *b)
{
    kvc_cache_destroy(b->cache);
    kvc_ctx_destroy(b->ctx);
    free(b->k);
    free(b->v);
    free(b->work_k);
    free(b->work_v);
    free(b->q);
    free(b->out);
    free(b->given);
    free(b->view_k);
    free(b->view_v);
    free(b->scores);
    free(b->head_scores);
    free((void *)b->head_at);
    free(b->similarity);
    free(b->norms);
    free(b->merge_tokens);
    free(b->pairs);
    free(b->kept);
    free(b->map);
    free(b->rows);
    free(b->tokens);
    free(b->layers);
    free(b->ws);
}

/* K and V are at most 256 MiB: all in all that takes less than 1.5 GiB. */
static bool options_fit(const struct compress_options *o)
{
    const size_t most = (size_t)256 << 20;
    const size_t n_rows = (size_t)(o->n_layers * o->n_kv_heads) *
                          (size_t)(o->n_tokens + COMPRESS_SINKS + COMPRESS_PROBES);
    const size_t bytes = 2 * n_rows * (size_t)o->head_dim * sizeof(uint16_t);
    if (o->n_heads % o->n_kv_heads != 0)
        fprintf(stderr, "kvc-bench compress: %ld heads are no multiple of %ld KV heads\n",
                o->n_heads, o->n_kv_heads);
    else if (bytes > most)
        fprintf(stderr, "kvc-bench compress: K and V take %zu MiB, at most %zu\n", bytes >> 20,
                most >> 20);
    else
        return true;
    return false;
}

static int run(const struct compress_options *o)
{
    struct compress_bench b = {.options = o,
                               .grid = grid_of(o->n_tokens),
                               .n_tokens = (size_t)o->n_tokens,
                               .n_all = (size_t)o->n_tokens + COMPRESS_SINKS + COMPRESS_PROBES,
                               .width = (size_t)(o->n_kv_heads * o->head_dim)};
    const kvc_ctx_params params = {.struct_size = sizeof params,
                                   .kernels = *o->kernels ? o->kernels : NULL};
    const char *what = "kernels";
    kvc_status status = kvc_ctx_create(&params, &b.ctx);
    if (status == KVC_OK) {
        what = "inputs";
        status = allocate(&b);
    }
    if (status == KVC_OK) {
        fill_inputs(&b);
        what = "kvc_cache_create";
        status = compress_cache_open(&b);
    }
    const int code = status == KVC_OK ? measure_and_print(&b) : bench_fail(what, status);
    release(&b);
    return code;
}

int bench_compress(int argc, char **argv)
{
    struct compress_options options = {.n_layers = 32,
                                       .n_heads = 32,
                                       .n_kv_heads = 8,
                                       .head_dim = 128,
                                       .n_tokens = 576,
                                       .window = 4,
                                       .repeat = 10};
    int code = bench_parse("compress", option_table, sizeof option_table / sizeof *option_table,
                           &options, argc, argv);
    if (code == BENCH_DONE) /* --help */
        print_steps();
    if (code != BENCH_GO)
        return code;
    return options_fit(&options) ? run(&options) : BENCH_USAGE;
}
