/* merge.c - merging of visual tokens: cosines, matching, weights and bias, what it costs. */
#include "kvc/merge.h"

#include <float.h>
#include <math.h>

#include "arena.h"
#include "check.h"
#include "ctx.h"

#define ALIGN 64

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

/* The options of a caller, checked. */
static kvc_status take_options(const kvc_merge_options *options, kvc_merge_options *out)
{
    *out = defaults;
    if (options)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), options, sizeof(*out)));
    KVC_CHECK(out->tau >= -1.0f && out->tau <= 1.0f &&
                  (out->max_norm_ratio == 0.0f || out->max_norm_ratio >= 1.0f) &&
                  out->max_share >= 0.0f && out->max_share <= 1.0f && out->window >= 0 &&
                  (unsigned)out->weights <= KVC_MERGE_ATTENTION,
              KVC_E_ARG);
    return KVC_OK;
}

/* Finite and not negative. */
static bool is_amount(float x)
{
    return x >= 0.0f && x <= FLT_MAX;
}

static bool tokens_ok(const kvc_merge_token *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const kvc_merge_token *t = &tokens[i];
        if (!(t->size >= 1.0f) || !is_amount(t->size) || !is_amount(t->mass) ||
            !isfinite(t->bias) || (t->reserved[0] | t->reserved[1] | t->reserved[2]) != 0)
            return false;
    }
    return true;
}

/* Whether a token may merge at all. */
static bool is_free(const kvc_merge_token *t)
{
    return t->image >= 0 && !t->fixed;
}

static bool same_image(const kvc_merge_token *a, const kvc_merge_token *b,
                       const kvc_merge_options *o)
{
    return is_free(a) && is_free(b) && a->image == b->image &&
           (o->across_frames || a->frame == b->frame);
}

static bool in_window(const kvc_merge_token *a, const kvc_merge_token *b, int64_t window)
{
    const int64_t down = (int64_t)a->row - b->row, right = (int64_t)a->col - b->col;
    return window == 0 ||
           (down <= window && -down <= window && right <= window && -right <= window);
}

static bool view_fits(const kvc_view *view)
{
    return kvc_view_ok(view) && view->n_tokens <= INT32_MAX;
}

static bool workspace_ok(const void *ws, size_t ws_size, size_t need)
{
    return ws_size >= need && (need == 0 || (ws && (uintptr_t)ws % ALIGN == 0));
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
    job->rows = kvc_arena_take(&arena, job->n, job->stride * sizeof(float), ALIGN);
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
    KVC_CHECK(workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
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
    job->best = kvc_arena_take(&arena, n, sizeof(float), ALIGN);
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
    KVC_CHECK(workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
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

/* Element i of an array of views, whose elements have the caller's size. */
static const kvc_view *view_at(const kvc_view *views, size_t i)
{
    return (const kvc_view *)(const void *)((const char *)views + i * views->struct_size);
}

/* Views of n tokens; distinct: to be written. */
static kvc_status check_views(const kvc_view *views, size_t n_layers, size_t n, bool distinct)
{
    for (size_t l = 0; l < n_layers; l++) {
        const kvc_view *view = view_at(views, l);
        KVC_CHECK(view_fits(view) && view->struct_size == views->struct_size &&
                      view->n_tokens == n && (!distinct || kvc_view_distinct(view)),
                  KVC_E_ARG);
    }
    for (size_t l = 0; l < n_layers; l++)
        KVC_CHECK(view_at(views, l)->head_dim <= KVC_MAX_HEAD_DIM, KVC_E_UNSUPPORTED);
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
    plan->similarity = kvc_arena_take(&arena, plan->n_similarity, sizeof(float), ALIGN);
    plan->norms = kvc_arena_take(&arena, n, sizeof(float), ALIGN);
    plan->ws = kvc_arena_take(&arena, plan->ws_size, 1, ALIGN);
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
    KVC_CHECK(workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
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

kvc_status kvc_merge_mean_mass(const kvc_merge_token *tokens, size_t n, float *mean)
{
    double mass = 0.0, size = 0.0;

    KVC_CHECK((n == 0 || tokens) && mean && tokens_ok(tokens, n), KVC_E_ARG);
    for (size_t i = 0; i < n; i++)
        if (is_free(&tokens[i])) {
            mass += (double)tokens[i].mass;
            size += (double)tokens[i].size;
        }
    *mean = size > 0.0 ? (float)(mass / size) : 0.0f;
    return KVC_OK;
}

static double entropy(double w)
{
    return w > 0.0 ? -w * log(w) : 0.0;
}

/* What the bias of a token has beyond the logarithm of its size: 0, to the bit, without spread. */
static double excess(const kvc_merge_token *t)
{
    return (double)(t->bias - (float)log((double)t->size));
}

struct mixture {
    float w_a, w_b;
    kvc_merge_token token;
    bool a_is_heavier;
};

static struct mixture combine(const kvc_merge_token *a, const kvc_merge_token *b, double mean_mass,
                              double spread, kvc_merge_weights weights)
{
    const double size = (double)a->size + (double)b->size;
    const double mass_a = (double)a->mass + mean_mass * (double)a->size;
    const double mass = mass_a + (double)b->mass + mean_mass * (double)b->size;
    const bool by_size = weights == KVC_MERGE_SIZE || mass == 0.0;
    const float weight = (float)(by_size ? (double)a->size / size : mass_a / mass);
    const double w_a = (double)weight, w_b = 1.0 - w_a; /* as they will be used */
    const double bias =
        by_size ? log(size) + w_a * excess(a) + w_b * excess(b)
                : entropy(w_a) + entropy(w_b) + w_a * (double)a->bias + w_b * (double)b->bias;
    const bool heavier = a->mass > b->mass || (a->mass == b->mass && a->size >= b->size);
    kvc_merge_token token = heavier ? *a : *b;
    token.size = (float)size;
    token.mass = a->mass + b->mass;
    token.bias = (float)(bias + 0.5 * w_a * w_b * spread);
    token.fixed = a->fixed || b->fixed;
    return (struct mixture){
        .w_a = weight, .w_b = (float)w_b, .token = token, .a_is_heavier = heavier};
}

/* No sum of sizes or masses leaves the range, in whatever order. */
static bool sums_ok(const kvc_merge_token *tokens, size_t n)
{
    double size = 0.0, mass = 0.0;
    for (size_t i = 0; i < n; i++) {
        size += (double)tokens[i].size;
        mass += (double)tokens[i].mass;
    }
    return size <= (double)FLT_MAX / 2 && mass <= (double)FLT_MAX / 2;
}

kvc_status kvc_merge_combine(const kvc_merge_token *a, const kvc_merge_token *b, float mean_mass,
                             float spread, const kvc_merge_options *options, float *w_a, float *w_b,
                             kvc_merge_token *out, bool *a_is_heavier)
{
    kvc_merge_options o;

    KVC_CHECK(a && b && w_a && w_b && out && a_is_heavier && is_amount(mean_mass) &&
                  is_amount(spread),
              KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    const kvc_merge_token both[2] = {*a, *b};
    KVC_CHECK(tokens_ok(both, 2) && sums_ok(both, 2), KVC_E_ARG);
    const struct mixture m = combine(a, b, (double)mean_mass, (double)spread, o.weights);
    *w_a = m.w_a;
    *w_b = m.w_b;
    *out = m.token;
    *a_is_heavier = m.a_is_heavier;
    return KVC_OK;
}

struct apply {
    const kvc_ctx *ctx;
    const kvc_merge_pair *pairs;
    const kvc_view *k, *v;
    size_t n_layers;
    const float *spread;
    const kvc_merge_options *options;
    float mean_mass;
    kvc_merge_token *tokens;
    int32_t *map;
    const int32_t *rows;
    size_t n_rows;
};

/* Every pair is right, and no row is in two; map marks those seen. */
static bool pairs_ok(const struct apply *job, size_t n_pairs, size_t n)
{
    memset(job->map, 0, n * sizeof(*job->map));
    for (size_t p = 0; p < n_pairs; p++) {
        const int32_t a = job->pairs[p].a, b = job->pairs[p].b;
        if (a < 0 || a >= b || (size_t)b >= n || job->map[a] != 0 || job->map[b] != 0 ||
            !same_image(&job->tokens[a], &job->tokens[b], job->options) ||
            (job->spread && !is_amount(job->spread[p])))
            return false;
        job->map[a] = job->map[b] = 1;
    }
    return true;
}

/* Row into of all heads becomes the mixture. finish_rows with sum 1 is the one kernel that stores
 * every type. */
static void mix_view(const struct apply *job, const kvc_view *x, const kvc_merge_pair *pair,
                     const struct mixture *m, size_t into)
{
    const struct kvc_kernels *kernels = job->ctx->k;
    const struct kvc_queue *queue = &job->ctx->queue;
    const size_t d = x->head_dim, stride = kvc_attend_stride(d);
    float a[KVC_MAX_HEAD_DIM], b[KVC_MAX_HEAD_DIM], max = 0.0f, sum = 1.0f, lse;
    const struct kvc_attend_part part = {.m = &max, .l = &sum, .o = a};

    for (size_t h = 0; h < x->n_heads; h++) {
        const struct kvc_rows row_a = kvc_view_rows(x, (size_t)pair->a, 1, h);
        const struct kvc_rows row_b = kvc_view_rows(x, (size_t)pair->b, 1, h);
        kernels->load_rows(queue, &row_a, a, stride, stride);
        kernels->load_rows(queue, &row_b, b, stride, stride);
        kernels->mix_rows(queue, a, m->w_a, b, m->w_b, d, a);
        kernels->finish_rows(queue, &part, 1, d, kvc_view_at(x, into, h), x->dtype, x->token_stride,
                             &lse);
    }
}

/* The lighter row is marked with the heavier one's complement. */
static void merge_pair(void *arg, size_t p)
{
    const struct apply *job = arg;
    const kvc_merge_pair *pair = &job->pairs[p];
    const struct mixture m =
        combine(&job->tokens[pair->a], &job->tokens[pair->b], (double)job->mean_mass,
                job->spread ? (double)job->spread[p] : 0.0, job->options->weights);
    const int32_t into = m.a_is_heavier ? pair->a : pair->b;
    const int32_t from = m.a_is_heavier ? pair->b : pair->a;

    for (size_t l = 0; l < job->n_layers; l++) {
        mix_view(job, view_at(job->k, l), pair, &m, (size_t)into);
        mix_view(job, view_at(job->v, l), pair, &m, (size_t)into);
    }
    job->tokens[into] = m.token;
    job->map[from] = ~into;
}

static void gather_view(const struct apply *job, const kvc_view *x)
{
    const size_t size = kvc_dtype_size(x->dtype);
    const bool packed = x->head_stride == x->head_dim; /* the heads of a token are one row */
    for (size_t h = 0; h < (packed ? 1 : x->n_heads); h++)
        job->ctx->k->gather_rows(&job->ctx->queue, kvc_view_at(x, 0, h),
                                 (packed ? x->n_heads : 1) * x->head_dim * size,
                                 x->token_stride * size, job->rows, job->n_rows);
}

/* Moves the rows of one layer together. */
static void gather_layer(void *arg, size_t layer)
{
    const struct apply *job = arg;
    gather_view(job, view_at(job->k, layer));
    gather_view(job, view_at(job->v, layer));
}

/* Numbers the rows that are left, and sends those that went to the row that holds them. */
static size_t number_rows(int32_t *map, int32_t *rows, size_t n)
{
    size_t n_rows = 0;
    for (size_t i = 0; i < n; i++)
        if (map[i] >= 0) {
            rows[n_rows] = (int32_t)i;
            map[i] = (int32_t)n_rows++;
        }
    for (size_t i = 0; i < n; i++)
        if (map[i] < 0)
            map[i] = map[~map[i]];
    return n_rows;
}

kvc_status kvc_merge_apply(kvc_ctx *ctx, const kvc_merge_pair *pairs, size_t n_pairs,
                           const kvc_view *k, const kvc_view *v, size_t n_layers,
                           const float *spread, const kvc_merge_options *options,
                           kvc_merge_token *tokens, int32_t *map, int32_t *rows, size_t *n_rows)
{
    kvc_merge_options o;

    KVC_CHECK(ctx && (n_pairs == 0 || pairs) && k && v && n_layers > 0 && view_fits(k) &&
                  view_fits(v) && n_rows,
              KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    const size_t n = k->n_tokens;
    KVC_TRY(check_views(k, n_layers, n, true));
    KVC_TRY(check_views(v, n_layers, n, true));
    KVC_CHECK((n == 0 || (tokens && map && rows)) && tokens_ok(tokens, n) && sums_ok(tokens, n),
              KVC_E_ARG);
    struct apply job = {
        .ctx = ctx,
        .pairs = pairs,
        .k = k,
        .v = v,
        .n_layers = n_layers,
        .spread = spread,
        .options = &o,
        .tokens = tokens,
        .map = map,
        .rows = rows,
    };
    KVC_TRY(kvc_merge_mean_mass(tokens, n, &job.mean_mass));
    KVC_CHECK(pairs_ok(&job, n_pairs, n), KVC_E_ARG);

    kvc_ctx_parallel(ctx, n_pairs, merge_pair, &job);
    job.n_rows = number_rows(map, rows, n);
    if (n_pairs > 0)
        kvc_ctx_parallel(ctx, n_layers, gather_layer, &job);
    for (size_t i = 0; i < job.n_rows; i++)
        tokens[i] = tokens[rows[i]];
    *n_rows = job.n_rows;
    return KVC_OK;
}

struct rounds {
    kvc_view *k, *v; /* [n_layers], of what is left */
    kvc_merge_pair *pairs;
    int32_t *map, *rows; /* of one round */
    void *ws;            /* of kvc_merge_plan() */
    size_t ws_size;
};

static kvc_status carve_rounds(struct rounds *r, const kvc_view *k, size_t n_layers, void *ws,
                               size_t *size)
{
    struct kvc_arena arena = {.base = ws};

    KVC_TRY(kvc_merge_plan_workspace_size(k, n_layers, &r->ws_size));
    const size_t n = k->n_tokens;
    r->k = kvc_arena_take(&arena, n_layers, sizeof(kvc_view), ALIGN);
    r->v = kvc_arena_take(&arena, n_layers, sizeof(kvc_view), ALIGN);
    r->pairs = kvc_arena_take(&arena, n / 2, sizeof(kvc_merge_pair), ALIGN);
    r->map = kvc_arena_take(&arena, n, sizeof(int32_t), ALIGN);
    r->rows = kvc_arena_take(&arena, n, sizeof(int32_t), ALIGN);
    r->ws = kvc_arena_take(&arena, r->ws_size, 1, ALIGN);
    KVC_CHECK(!arena.overflow, KVC_E_ARG);
    *size = arena.used;
    return KVC_OK;
}

kvc_status kvc_merge_rounds_workspace_size(const kvc_view *k, size_t n_layers, size_t *size)
{
    struct rounds rounds;
    KVC_CHECK(size, KVC_E_ARG);
    return carve_rounds(&rounds, k, n_layers, NULL, size);
}

static void copy_views(kvc_view *to, const kvc_view *from, size_t n_layers)
{
    for (size_t l = 0; l < n_layers; l++) {
        to[l] = *view_at(from, l);
        to[l].struct_size = sizeof(*to);
    }
}

kvc_status kvc_merge_rounds(kvc_ctx *ctx, const kvc_view *k, const kvc_view *v, size_t n_layers,
                            const kvc_merge_options *options, int32_t n_rounds,
                            kvc_merge_token *tokens, int32_t *map, int32_t *rows, size_t *n_rows,
                            void *ws, size_t ws_size)
{
    kvc_merge_options o;
    struct rounds r;
    size_t need;

    KVC_CHECK(ctx && v && view_fits(v) && n_rows && n_rounds >= 1 && n_rounds <= 3, KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    KVC_TRY(carve_rounds(&r, k, n_layers, NULL, &need));
    const size_t n = k->n_tokens;
    size_t left = n;
    KVC_TRY(check_views(k, n_layers, n, true));
    KVC_TRY(check_views(v, n_layers, n, true));
    KVC_CHECK((n == 0 || (tokens && map && rows)) && tokens_ok(tokens, n) && sums_ok(tokens, n),
              KVC_E_ARG);
    KVC_CHECK(workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
    KVC_TRY(carve_rounds(&r, k, n_layers, ws, &need));
    copy_views(r.k, k, n_layers);
    copy_views(r.v, v, n_layers);

    for (size_t i = 0; i < n; i++)
        map[i] = rows[i] = (int32_t)i;
    for (int32_t round = 0; round < n_rounds && left > 1; round++) {
        size_t n_pairs;
        KVC_TRY(kvc_merge_plan(ctx, r.k, n_layers, tokens, &o, r.pairs, &n_pairs, r.ws, r.ws_size));
        if (n_pairs == 0)
            break;
        KVC_TRY(kvc_merge_apply(ctx, r.pairs, n_pairs, r.k, r.v, n_layers, NULL, &o, tokens, r.map,
                                r.rows, &left));
        for (size_t i = 0; i < n; i++)
            map[i] = r.map[map[i]];
        for (size_t i = 0; i < left; i++)
            rows[i] = rows[r.rows[i]];
        for (size_t l = 0; l < n_layers; l++)
            r.k[l].n_tokens = r.v[l].n_tokens = left;
    }
    *n_rows = left;
    return KVC_OK;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* The terms for one difference of the logits; *mass_part and *value_part are those of the error. */
static void loss_at(const kvc_merge_query *q, double difference, kvc_merge_loss *loss,
                    double *mass_part, double *value_part)
{
    const double y_a = difference + (double)q->bias_a, y_b = (double)q->bias_b, m = (double)q->mass;
    const double lse = larger(y_a, y_b) + log1p(exp(-fabs(y_a - y_b)));
    const double deficit = lse - ((double)q->w_a * difference + (double)q->bias);
    const double share = 1.0 / (1.0 + exp(y_b - y_a));
    const double merged = m == 0.0 || m == 1.0 ? m : 1.0 / (1.0 + (1.0 - m) / m * exp(deficit));

    *mass_part = fabs(merged - m) * (double)q->rest_distance;
    *value_part = m * fabs((double)q->w_a - share) * (double)q->value_distance;
    loss->deficit = (float)deficit;
    loss->share_a = (float)share;
    loss->merged_mass = (float)merged;
    loss->error = (float)(*mass_part + *value_part);
}

kvc_status kvc_merge_error(const kvc_merge_query *query, kvc_merge_loss *loss)
{
    kvc_merge_query q;
    kvc_merge_loss one = {0}, other = {0};
    double mass[2], value[2];

    KVC_CHECK(query && loss && loss->struct_size >= sizeof(*loss), KVC_E_ARG);
    KVC_TRY(kvc_struct_read(&q, sizeof(q), query, sizeof(q)));
    KVC_CHECK(q.mass >= 0.0f && q.mass <= 1.0f && isfinite(q.difference) &&
                  (!q.within || q.difference >= 0.0f) && q.w_a >= 0.0f && q.w_a <= 1.0f &&
                  isfinite(q.bias_a) && isfinite(q.bias_b) && isfinite(q.bias) &&
                  is_amount(q.value_distance) && is_amount(q.rest_distance),
              KVC_E_ARG);
    loss_at(&q, (double)q.difference, &one, &mass[0], &value[0]);
    if (q.within) { /* the deficit is convex, the share monotone: the worst is at an end */
        loss_at(&q, -(double)q.difference, &other, &mass[1], &value[1]);
        one = other.error > one.error ? other : one;
        one.error = (float)(larger(mass[0], mass[1]) + larger(value[0], value[1]));
    }
    kvc_struct_write(loss, &one, sizeof(one));
    return KVC_OK;
}

kvc_status kvc_drop_error(float mass, float distance, float *error)
{
    KVC_CHECK(error && mass >= 0.0f && mass < 1.0f && is_amount(distance), KVC_E_ARG);
    *error = mass / (1.0f - mass) * distance;
    return KVC_OK;
}

kvc_status kvc_merge_cost(const kvc_merge_token *a, const kvc_merge_token *b, float robustness,
                          float mean_mass, float spread, float value_norm, float value_distance,
                          float *cost)
{
    KVC_CHECK(a && b && cost && tokens_ok(a, 1) && tokens_ok(b, 1) && is_amount(robustness) &&
                  is_amount(mean_mass) && is_amount(spread) && is_amount(value_norm) &&
                  is_amount(value_distance),
              KVC_E_ARG);
    const float mass = a->mass + b->mass + robustness * mean_mass * (a->size + b->size);
    *cost = mass * (spread / 8.0f * value_norm + sqrtf(spread) / 4.0f * value_distance);
    return KVC_OK;
}
