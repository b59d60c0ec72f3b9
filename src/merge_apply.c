/* merge_apply.c - weights and bias of merged tokens, and what becomes of the rows. */
#include "merge.h"

#include "arena.h"

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
    r->k = kvc_arena_take(&arena, n_layers, sizeof(kvc_view), KVC_WS_ALIGN);
    r->v = kvc_arena_take(&arena, n_layers, sizeof(kvc_view), KVC_WS_ALIGN);
    r->pairs = kvc_arena_take(&arena, n / 2, sizeof(kvc_merge_pair), KVC_WS_ALIGN);
    r->map = kvc_arena_take(&arena, n, sizeof(int32_t), KVC_WS_ALIGN);
    r->rows = kvc_arena_take(&arena, n, sizeof(int32_t), KVC_WS_ALIGN);
    r->ws = kvc_arena_take(&arena, r->ws_size, 1, KVC_WS_ALIGN);
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
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
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
