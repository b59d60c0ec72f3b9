/* merge.c - merging of visual tokens: cosines and matching. */
#include "merge.h"

#include "arena.h"

enum { TILE_ROWS = 16, TILE_COLS = 64 };

static const kvc_merge_options defaults = {
    .struct_size = sizeof(defaults),
    .tau = 0.85f,
    .max_norm_ratio = 1.25f,
    .max_share = 0.25f,
};

void kvc_merge_options_init(kvc_merge_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &defaults, sizeof(defaults));
}

static bool in_window(const kvc_merge_token *a, const kvc_merge_token *b, int64_t window)
{
    const int64_t down = (int64_t)a->row - b->row, right = (int64_t)a->col - b->col;
    return window == 0 ||
           (down <= window && -down <= window && right <= window && -right <= window);
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t count_of(size_t n, size_t step)
{
    return n / step + (n % step != 0);
}

/* The first entry of row i of the triangle. */
static size_t row_start(size_t n, size_t i)
{
    return (i % 2 == 0) ? i / 2 * (2 * n - i - 1) : (2 * n - i - 1) / 2 * i;
}

struct cosines {
    const kvc_ctx *ctx;
    const kvc_view *k;
    const kvc_merge_token *tokens;
    const kvc_merge_options *options;
    size_t n, stride, n_tiles; /* tiles of a block of rows */
    size_t head;
    float *similarity, *norms;
    float *rows;  /* [n][stride], of one head, of length 1 */
    bool *wanted; /* [blocks][n_tiles]: a tile with a pair that may merge */
};

static kvc_status carve_cosines(struct cosines *job, const kvc_view *k, void *ws, size_t *size)
{
    KVC_CHECK(view_fits(k), KVC_E_ARG);
    KVC_CHECK(k->head_dim <= KVC_MAX_HEAD_DIM, KVC_E_UNSUPPORTED);
    struct kvc_arena arena = {.base = ws};
    job->n = k->n_tokens;
    job->stride = kvc_attend_stride(k->head_dim);
    job->n_tiles = count_of(job->n, TILE_COLS);
    job->rows = kvc_arena_take(&arena, job->n, job->stride * sizeof(float), KVC_WS_ALIGN);
    job->wanted = kvc_arena_take(&arena, count_of(job->n, TILE_ROWS), job->n_tiles, 1);
    KVC_CHECK(!arena.overflow, KVC_E_ARG);
    *size = arena.used;
    return KVC_OK;
}

kvc_status kvc_merge_similarity_workspace_size(const kvc_view *k, size_t *size)
{
    struct cosines job;
    KVC_CHECK(size, KVC_E_ARG);
    return carve_cosines(&job, k, NULL, size);
}

/* Tile t of a block of rows begins just right of the block's first diagonal entry. */
static size_t tile_start(size_t block, size_t t)
{
    return block * TILE_ROWS + 1 + t * TILE_COLS;
}

static bool tile_wanted(const struct cosines *job, size_t block, size_t first)
{
    const size_t i_end = min_size(job->n, (block + 1) * TILE_ROWS);
    const size_t j_end = min_size(job->n, first + TILE_COLS);
    if (!job->tokens)
        return true;
    for (size_t i = block * TILE_ROWS; i < i_end; i++)
        for (size_t j = first > i ? first : i + 1; j < j_end; j++)
            if (same_image(&job->tokens[i], &job->tokens[j], job->options) &&
                in_window(&job->tokens[i], &job->tokens[j], job->options->window))
                return true;
    return false;
}

static void mark_tiles(void *arg, size_t block)
{
    const struct cosines *job = arg;
    for (size_t t = 0; t < job->n_tiles; t++) {
        const size_t first = tile_start(block, t);
        job->wanted[block * job->n_tiles + t] = first < job->n && tile_wanted(job, block, first);
    }
}

/* Loads 64 rows and gives them length 1, so that a product is a cosine. */
static void load_rows(void *arg, size_t block)
{
    const struct cosines *job = arg;
    const struct kvc_kernels *kernels = job->ctx->k;
    const struct kvc_queue *queue = &job->ctx->queue;
    const size_t first = block * TILE_COLS, n = min_size(job->n - first, TILE_COLS);
    const size_t d = job->k->head_dim;
    const struct kvc_rows src = kvc_view_rows(job->k, first, n, job->head);
    float *x = job->rows + first * job->stride;

    kernels->load_rows(queue, &src, x, job->stride, job->stride);
    for (size_t r = 0; r < n; r++, x += job->stride) {
        float square;
        kernels->dot_rows(queue, x, 1, x, 1, d, &square, 1);
        const float norm = sqrtf(square);
        kernels->mix_rows(queue, x, square < 0x1p-100f ? 0.0f : 1.0f / norm, x, 0.0f, d, x);
        job->norms[first + r] += norm;
    }
}

/* The part of the triangle in 16 rows: each entry belongs to one task. */
static void add_tiles(void *arg, size_t block)
{
    const struct cosines *job = arg;
    const size_t i0 = block * TILE_ROWS, n_rows = min_size(job->n - i0, TILE_ROWS);
    float dots[TILE_ROWS * TILE_COLS];

    for (size_t t = 0; t < job->n_tiles; t++) {
        if (!job->wanted[block * job->n_tiles + t])
            continue;
        const size_t j0 = tile_start(block, t), n_cols = min_size(job->n - j0, TILE_COLS);
        job->ctx->k->dot_rows(&job->ctx->queue, job->rows + i0 * job->stride, n_rows,
                              job->rows + j0 * job->stride, n_cols, job->k->head_dim, dots,
                              TILE_COLS);
        for (size_t r = 0; r < n_rows; r++) {
            const size_t i = i0 + r, j = i < j0 ? j0 : i + 1;
            float *sums = job->similarity + row_start(job->n, i) + (j - i - 1);
            for (size_t c = j - j0; c < n_cols; c++)
                *sums++ += dots[r * TILE_COLS + c];
        }
    }
}

kvc_status kvc_merge_similarity(kvc_ctx *ctx, const kvc_view *k, const kvc_merge_token *tokens,
                                const kvc_merge_options *options, float *similarity, float *norms,
                                void *ws, size_t ws_size)
{
    kvc_merge_options o;
    struct cosines job = {0};
    size_t need;

    KVC_CHECK(ctx && similarity && norms, KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    KVC_TRY(carve_cosines(&job, k, NULL, &need));
    KVC_CHECK(!tokens || tokens_ok(tokens, k->n_tokens), KVC_E_ARG);
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
    if (need == 0)
        return KVC_OK;
    KVC_TRY(carve_cosines(&job, k, ws, &need));
    job.ctx = ctx;
    job.k = k;
    job.tokens = tokens;
    job.options = &o;
    job.similarity = similarity;
    job.norms = norms;

    const size_t n_blocks = count_of(job.n, TILE_ROWS);
    kvc_ctx_parallel(ctx, n_blocks, mark_tiles, &job);
    for (job.head = 0; job.head < k->n_heads; job.head++) {
        kvc_ctx_parallel(ctx, count_of(job.n, TILE_COLS), load_rows, &job);
        kvc_ctx_parallel(ctx, n_blocks, add_tiles, &job);
    }
    return KVC_OK;
}

struct match {
    const float *similarity, *norms;
    const kvc_merge_token *tokens;
    const kvc_merge_options *options;
    size_t n;
    float *best;      /* [n]: similarity to the partner; -inf: none */
    int32_t *partner; /* [n] */
    bool *taken;      /* [n] */
};

static kvc_status carve_match(struct match *job, size_t n, void *ws, size_t *size)
{
    struct kvc_arena arena = {.base = ws};
    KVC_CHECK(n <= INT32_MAX, KVC_E_ARG);
    job->n = n;
    job->best = kvc_arena_take(&arena, n, sizeof(float), KVC_WS_ALIGN);
    job->partner = kvc_arena_take(&arena, n, sizeof(int32_t), sizeof(int32_t));
    job->taken = kvc_arena_take(&arena, n, sizeof(bool), 1);
    KVC_CHECK(!arena.overflow, KVC_E_ARG);
    *size = arena.used;
    return KVC_OK;
}

kvc_status kvc_merge_match_workspace_size(size_t n, size_t *size)
{
    struct match job;
    KVC_CHECK(size, KVC_E_ARG);
    return carve_match(&job, n, NULL, size);
}

/* All that is asked of a pair but its cosine. */
static bool may_merge(const struct match *job, size_t i, size_t j)
{
    const kvc_merge_options *o = job->options;
    if (!same_image(&job->tokens[i], &job->tokens[j], o) ||
        !in_window(&job->tokens[i], &job->tokens[j], o->window))
        return false;
    if (!job->norms || o->force_quarter || o->max_norm_ratio == 0.0f)
        return true;
    const float a = job->norms[i], b = job->norms[j];
    return a <= o->max_norm_ratio * b && b <= o->max_norm_ratio * a;
}

/* The nearest later token that is not taken; NaN is never nearer. */
static void find_partner(const struct match *job, size_t i)
{
    const float *s = job->similarity + row_start(job->n, i);
    float best = -INFINITY;
    int32_t partner = -1;
    for (size_t j = i + 1; j < job->n; j++, s++)
        if (*s > best && !job->taken[j] && may_merge(job, i, j)) {
            best = *s;
            partner = (int32_t)j;
        }
    job->best[i] = best;
    job->partner[i] = partner;
}

static void offer(const struct match *job, size_t i, size_t j, float s)
{
    if (s > job->best[i]) {
        job->best[i] = s;
        job->partner[i] = (int32_t)j;
    }
}

/* The nearest of all tokens, earlier ones too; what is not mutual is dropped. */
static void find_mutual(const struct match *job)
{
    const float *s = job->similarity;
    for (size_t i = 0; i < job->n; i++)
        for (size_t j = i + 1; j < job->n; j++, s++)
            if ((*s > job->best[i] || *s > job->best[j]) && may_merge(job, i, j)) {
                offer(job, i, j, *s);
                offer(job, j, i, *s);
            }
    for (size_t i = 0; i < job->n; i++) {
        const int32_t j = job->partner[i];
        if (j < (int32_t)i || job->partner[j] != (int32_t)i)
            job->best[i] = -INFINITY;
    }
}

/* floor(n share), where share may have been rounded down from a fraction of n. */
static size_t most_pairs(const kvc_merge_token *tokens, size_t n, float share)
{
    size_t n_free = 0;
    for (size_t i = 0; i < n; i++)
        n_free += is_free(&tokens[i]);
    return (size_t)((double)n_free * (double)share * (1.0 + 0x1p-23));
}

/* The row whose partner is nearest; n: none has one. */
static size_t nearest(const struct match *job)
{
    size_t top = job->n;
    float best = -INFINITY;
    for (size_t i = 0; i < job->n; i++)
        if (job->best[i] > best) {
            best = job->best[i];
            top = i;
        }
    return top;
}

kvc_status kvc_merge_match(const float *similarity, float scale, const float *norms,
                           const kvc_merge_token *tokens, size_t n,
                           const kvc_merge_options *options, kvc_merge_pair *pairs, size_t *n_pairs,
                           void *ws, size_t ws_size)
{
    kvc_merge_options o;
    struct match job;
    size_t need, count = 0;

    KVC_CHECK(n_pairs && (n == 0 || tokens) && (n < 2 || (similarity && pairs)) && scale > 0.0f &&
                  is_amount(scale),
              KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    KVC_TRY(carve_match(&job, n, NULL, &need));
    KVC_CHECK(tokens_ok(tokens, n), KVC_E_ARG);
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
    KVC_TRY(carve_match(&job, n, ws, &need));
    job.similarity = similarity;
    job.norms = norms;
    job.tokens = tokens;
    job.options = &o;

    for (size_t i = 0; i < n; i++) {
        job.best[i] = -INFINITY;
        job.partner[i] = -1;
        job.taken[i] = false;
    }
    const size_t most = most_pairs(tokens, n, o.max_share);
    if (o.mutual)
        find_mutual(&job);
    for (size_t i = 0; i < n && !o.mutual; i++)
        if (is_free(&tokens[i]))
            find_partner(&job, i);
    while (count < most) {
        const size_t i = nearest(&job);
        if (i == n || (!o.force_quarter && job.best[i] * scale < o.tau))
            break;
        const size_t j = (size_t)job.partner[i];
        if (job.taken[j]) { /* the next best of i is no nearer: order is kept */
            find_partner(&job, i);
            continue;
        }
        pairs[count++] =
            (kvc_merge_pair){.a = (int32_t)i, .b = (int32_t)j, .similarity = job.best[i] * scale};
        job.taken[i] = job.taken[j] = true;
        job.best[i] = job.best[j] = -INFINITY;
    }
    *n_pairs = count;
    return KVC_OK;
}

struct plan {
    float *similarity, *norms;
    size_t n, n_similarity, n_heads; /* heads of all layers */
    void *ws;                        /* of the two calls, one after the other */
    size_t ws_size;
};

static kvc_status carve_plan(struct plan *plan, const kvc_view *k, size_t n_layers, void *ws,
                             size_t *size)
{
    struct kvc_arena arena = {.base = ws};

    KVC_CHECK(k && n_layers > 0 && view_fits(k), KVC_E_ARG);
    const size_t n = k->n_tokens;
    KVC_TRY(check_views(k, n_layers, n, false));
    *plan = (struct plan){.n = n, .n_similarity = kvc_merge_triangle(n)};
    KVC_TRY(kvc_merge_match_workspace_size(n, &plan->ws_size));
    for (size_t l = 0; l < n_layers; l++) {
        size_t need;
        KVC_TRY(kvc_merge_similarity_workspace_size(view_at(k, l), &need));
        plan->ws_size = need > plan->ws_size ? need : plan->ws_size;
        KVC_CHECK(!__builtin_add_overflow(plan->n_heads, view_at(k, l)->n_heads, &plan->n_heads),
                  KVC_E_ARG);
    }
    KVC_CHECK(n < 2 || plan->n_similarity / (n / 2) >= n - 1, KVC_E_ARG);
    plan->similarity = kvc_arena_take(&arena, plan->n_similarity, sizeof(float), KVC_WS_ALIGN);
    plan->norms = kvc_arena_take(&arena, n, sizeof(float), KVC_WS_ALIGN);
    plan->ws = kvc_arena_take(&arena, plan->ws_size, 1, KVC_WS_ALIGN);
    KVC_CHECK(!arena.overflow, KVC_E_ARG);
    *size = arena.used;
    return KVC_OK;
}

kvc_status kvc_merge_plan_workspace_size(const kvc_view *k, size_t n_layers, size_t *size)
{
    struct plan plan;
    KVC_CHECK(size, KVC_E_ARG);
    return carve_plan(&plan, k, n_layers, NULL, size);
}

kvc_status kvc_merge_plan(kvc_ctx *ctx, const kvc_view *k, size_t n_layers,
                          const kvc_merge_token *tokens, const kvc_merge_options *options,
                          kvc_merge_pair *pairs, size_t *n_pairs, void *ws, size_t ws_size)
{
    kvc_merge_options o;
    struct plan plan;
    size_t need;

    KVC_CHECK(ctx && n_pairs, KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    KVC_TRY(carve_plan(&plan, k, n_layers, NULL, &need));
    KVC_CHECK((plan.n == 0 || tokens) && (plan.n < 2 || pairs) && tokens_ok(tokens, plan.n),
              KVC_E_ARG);
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
    *n_pairs = 0;
    if (plan.n < 2)
        return KVC_OK;

    KVC_TRY(carve_plan(&plan, k, n_layers, ws, &need));
    memset(plan.similarity, 0, plan.n_similarity * sizeof(float));
    memset(plan.norms, 0, plan.n * sizeof(float));
    for (size_t l = 0; l < n_layers; l++)
        KVC_TRY(kvc_merge_similarity(ctx, view_at(k, l), tokens, &o, plan.similarity, plan.norms,
                                     plan.ws, plan.ws_size));
    return kvc_merge_match(plan.similarity, 1.0f / (float)plan.n_heads, plan.norms, tokens, plan.n,
                           &o, pairs, n_pairs, plan.ws, plan.ws_size);
}
