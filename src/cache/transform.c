/* transform.c - what K, V and queries become before they are stored or multiplied, and back. */
#include <math.h>
#include <string.h>

#include "balance.h"
#include "check.h"
#include "state.h"

enum { ALL_FLAGS = KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_ROTATE_V | KVC_TRANSFORM_K_ROTATED };

#define MOST_MEAN  65504.0f /* of rows that are halves */
#define MOST_SHIFT 1e30f    /* sums of mean / scale stay finite */

static bool has_vectors(const kvc_cache_params *p)
{
    return p->k_mean || p->k_scale || p->online_pages > 0;
}

/* Pages of a sequence that mean and scale are measured on; 0: they are not. */
static int32_t measured_pages(const kvc_cache_params *p)
{
    return p->k_mean || p->k_scale ? 0 : p->online_pages;
}

static bool mean_ok(float mean, float scale)
{
    return fabsf(mean) <= MOST_MEAN && fabsf(mean) / scale <= MOST_SHIFT; /* NaN is not */
}

kvc_status kvc_transform_check(const kvc_cache_params *p)
{
    const size_t n = (size_t)p->n_layers * (size_t)p->n_kv_heads * (size_t)p->head_dim_k;
    const uint32_t both = KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_K_ROTATED;

    KVC_CHECK((p->transform & ~(uint32_t)ALL_FLAGS) == 0 && (p->transform & both) != both,
              KVC_E_ARG);
    KVC_CHECK(p->online_pages >= 0 && p->online_pages <= 64, KVC_E_ARG);
    for (size_t i = 0; i < n && p->k_scale; i++)
        KVC_CHECK(p->k_scale[i] > 0.0f && isfinite(p->k_scale[i]) && isfinite(1.0f / p->k_scale[i]),
                  KVC_E_ARG);
    for (size_t i = 0; i < n && p->k_mean; i++)
        KVC_CHECK(mean_ok(p->k_mean[i], p->k_scale ? p->k_scale[i] : 1.0f), KVC_E_ARG);
    return KVC_OK;
}

int32_t kvc_transform_waiting_tokens(const kvc_cache_params *p)
{
    return measured_pages(p) * KVC_PAGE_TOKENS;
}

void kvc_transform_carve(kvc_cache *cache, struct kvc_arena *arena)
{
    const kvc_cache_params *p = &cache->params;
    const size_t n_pairs = (size_t)cache->n_pairs, d = (size_t)p->head_dim_k;
    struct kvc_transform *t = &cache->transform;

    *t = (struct kvc_transform){0};
    if (!has_vectors(p))
        return;
    t->mean = kvc_arena_take(arena, n_pairs * kvc_attend_stride(d), sizeof(float), 64);
    t->scale = kvc_arena_take(arena, n_pairs * kvc_attend_stride(d), sizeof(float), 64);
    t->inverse = kvc_arena_take(arena, n_pairs * kvc_attend_stride(d), sizeof(float), 64);
    t->shift = kvc_arena_take(arena, n_pairs * kvc_attend_stride(d), sizeof(float), 64);
    if (measured_pages(p) == 0)
        return;
    t->q_square = kvc_arena_take(arena, n_pairs * d, sizeof(double), 64);
    t->n_queries = kvc_arena_take(arena, (size_t)p->n_layers, sizeof(int64_t), 64);
}

static uint32_t largest_block(int32_t d)
{
    return (uint32_t)(d & -d);
}

static size_t stride_of(const kvc_cache *cache)
{
    return kvc_attend_stride((size_t)cache->params.head_dim_k);
}

/* ---- rows of floats ---- */

static void apply(const kvc_cache *cache, const struct kvc_row_transform *transform, float *x,
                  size_t n_rows, size_t stride, size_t d)
{
    const struct kvc_rows rows = {x, KVC_DTYPE_F32, stride, n_rows, d};
    cache->ctx->k->transform_rows(&cache->ctx->queue, &rows, transform, x, stride, d);
}

/* H, which undoes itself. */
static void rotate(const kvc_cache *cache, float *x, size_t n_rows, size_t stride, size_t d)
{
    const struct kvc_row_transform h = {.block = largest_block((int32_t)d)};
    apply(cache, &h, x, n_rows, stride, d);
}

static void store_k(const kvc_cache *cache, size_t pair, float *k, size_t n_rows, size_t stride)
{
    const struct kvc_transform *t = &cache->transform;
    const size_t at = pair * stride_of(cache), d = (size_t)cache->params.head_dim_k;
    const struct kvc_row_transform transform = {
        .sub = t->mean ? t->mean + at : NULL,
        .mul = t->mean ? t->inverse + at : NULL,
        .block = t->block_k,
    };
    if (t->comes_rotated)
        rotate(cache, k, n_rows, stride, d);
    apply(cache, &transform, k, n_rows, stride, d);
}

static void store_v(const kvc_cache *cache, float *v, size_t n_rows, size_t stride)
{
    rotate(cache, v, n_rows, stride, (size_t)cache->params.head_dim_v);
}

void kvc_restore_rows(const kvc_cache *cache, int32_t pair, float *k, size_t k_stride, float *v,
                      size_t v_stride, size_t n_rows)
{
    const struct kvc_transform *t = &cache->transform;
    const size_t at = (size_t)pair * stride_of(cache), d = (size_t)cache->params.head_dim_k;
    const struct kvc_row_transform back = {
        .block = t->block_k,
        .mul_after = t->mean ? t->scale + at : NULL,
        .add_after = t->mean ? t->mean + at : NULL,
    };
    if (!t->ready)
        return;
    if (k && t->changes_k)
        apply(cache, &back, k, n_rows, k_stride, d);
    if (k && t->comes_rotated)
        rotate(cache, k, n_rows, k_stride, d);
    if (v && t->changes_v)
        rotate(cache, v, n_rows, v_stride, (size_t)cache->params.head_dim_v);
}

const float *kvc_transform_queries(const kvc_cache *cache, int32_t pair, float *q, size_t n_rows,
                                   float scale, float *shift)
{
    const struct kvc_transform *t = &cache->transform;
    const size_t stride = stride_of(cache), at = (size_t)pair * stride;
    const size_t d = (size_t)cache->params.head_dim_k;
    const struct kvc_row_transform transform = {
        .mul = t->mean ? t->scale + at : NULL,
        .block = t->block_k,
    };

    if (!t->ready || !t->changes_k)
        return NULL;
    if (t->comes_rotated)
        rotate(cache, q, n_rows, stride, d);
    apply(cache, &transform, q, n_rows, stride, d);
    if (!t->mean)
        return NULL;
    cache->ctx->k->dot_rows(&cache->ctx->queue, q, n_rows, t->shift + at, 1, d, shift, 1);
    for (size_t r = 0; r < n_rows; r++)
        shift[r] *= scale;
    return shift;
}

void kvc_restore_outputs(const kvc_cache *cache, float *o, size_t n_rows)
{
    const size_t d = (size_t)cache->params.head_dim_v;
    if (cache->transform.ready && cache->transform.changes_v)
        rotate(cache, o, n_rows, kvc_attend_stride(d), d);
}

/* ---- rows of F16 pages ---- */

/* Halves of one side become what is stored, a tile of rows at a time; floats is room for one. */
static uint64_t rewrite(const kvc_cache *cache, int32_t pair, bool is_k, uint16_t *halves,
                        size_t padded, size_t d, size_t n_rows, float *floats)
{
    const kvc_ctx *ctx = cache->ctx;
    const size_t stride = kvc_attend_stride(d);
    struct kvc_store_counts counts = {0};

    for (size_t n; n_rows > 0; n_rows -= n, halves += n * padded) {
        n = n_rows < KVC_TILE_ROWS ? n_rows : KVC_TILE_ROWS;
        const struct kvc_rows from = {halves, KVC_DTYPE_F16, padded, n, d};
        const struct kvc_rows to = {floats, KVC_DTYPE_F32, stride, n, d};
        ctx->k->load_rows(&ctx->queue, &from, floats, stride, stride);
        if (is_k)
            store_k(cache, (size_t)pair, floats, n, stride);
        else
            store_v(cache, floats, n, stride);
        ctx->k->store_rows(&ctx->queue, &to, halves, padded, padded, &counts);
    }
    return counts.n_nonfinite + counts.n_saturated; /* both: beyond what a half holds */
}

uint64_t kvc_transform_page(const kvc_cache *cache, int32_t pair,
                            const struct kvc_page_layout *layout, uint8_t *page, int32_t row,
                            int32_t n_rows, float *floats)
{
    const struct kvc_transform *t = &cache->transform;
    uint16_t *k = (uint16_t *)(void *)(page + (size_t)row * layout->k_stride);
    uint16_t *v = (uint16_t *)(void *)(page + layout->v_codes + (size_t)row * layout->v_stride);
    uint64_t n_saturated = 0;

    if (t->ready && t->changes_k)
        n_saturated +=
            rewrite(cache, pair, true, k, layout->d8_k, layout->d_k, (size_t)n_rows, floats);
    if (t->ready && t->changes_v)
        n_saturated +=
            rewrite(cache, pair, false, v, layout->d8_v, layout->d_v, (size_t)n_rows, floats);
    return n_saturated;
}

/* ---- the vectors ---- */

/* What follows from mean and scale of a pair. */
static void derive(const kvc_cache *cache, size_t pair)
{
    const struct kvc_transform *t = &cache->transform;
    const size_t stride = stride_of(cache), at = pair * stride;
    const size_t d = (size_t)cache->params.head_dim_k;
    const struct kvc_row_transform shift = {.mul = t->inverse + at, .block = t->block_k};

    for (size_t c = 0; c < stride; c++) {
        t->inverse[at + c] = c < d ? 1.0f / t->scale[at + c] : 0.0f;
        t->shift[at + c] = c < d ? t->mean[at + c] : 0.0f;
    }
    apply(cache, &shift, t->shift + at, 1, stride, d);
}

void kvc_transform_start(kvc_cache *cache)
{
    kvc_cache_params *p = &cache->params;
    struct kvc_transform *t = &cache->transform;
    const size_t stride = stride_of(cache), d = (size_t)p->head_dim_k;
    const uint32_t rotates_k = KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_K_ROTATED;
    const bool vectors = has_vectors(p);

    t->changes_k = vectors || p->transform & KVC_TRANSFORM_ROTATE_K;
    t->changes_v = p->transform & KVC_TRANSFORM_ROTATE_V;
    t->comes_rotated = vectors && p->transform & KVC_TRANSFORM_K_ROTATED;
    t->block_k = p->transform & rotates_k ? largest_block(p->head_dim_k) : 1;
    t->ready = measured_pages(p) == 0;
    if (!t->ready) {
        memset(t->q_square, 0, (size_t)cache->n_pairs * d * sizeof(*t->q_square));
        memset(t->n_queries, 0, (size_t)p->n_layers * sizeof(*t->n_queries));
    }
    for (size_t pair = 0; pair < (size_t)cache->n_pairs && vectors; pair++) {
        for (size_t c = 0; c < stride; c++) {
            t->mean[pair * stride + c] = p->k_mean && c < d ? p->k_mean[pair * d + c] : 0.0f;
            t->scale[pair * stride + c] = p->k_scale && c < d ? p->k_scale[pair * d + c] : 1.0f;
        }
        derive(cache, pair);
    }
    p->online_pages = measured_pages(p);
    p->k_mean = p->k_scale = NULL; /* the caller's may go */
}

kvc_status kvc_cache_read_transform(const kvc_cache *cache, int32_t layer, int32_t kv_head,
                                    float *mean, float *scale, bool *is_ready)
{
    KVC_CHECK(cache && is_ready && layer >= 0 && layer < cache->params.n_layers && kv_head >= 0 &&
                  kv_head < cache->params.n_kv_heads,
              KVC_E_ARG);
    const struct kvc_transform *t = &cache->transform;
    const size_t at = (size_t)kvc_pair(cache, layer, kv_head) * stride_of(cache);
    for (size_t c = 0; c < (size_t)cache->params.head_dim_k; c++) {
        if (mean)
            mean[c] = t->mean ? t->mean[at + c] : 0.0f;
        if (scale)
            scale[c] = t->mean ? t->scale[at + c] : 1.0f;
    }
    *is_ready = t->ready;
    return KVC_OK;
}

/* ---- measuring them ---- */

void kvc_transform_watch(kvc_cache *cache, int32_t layer, const struct kvc_sequence *seq,
                         const kvc_view *q)
{
    const kvc_cache_params *p = &cache->params;
    struct kvc_transform *t = &cache->transform;
    const size_t d = (size_t)p->head_dim_k;
    const int64_t first = p->sink_tokens, end = first + kvc_transform_waiting_tokens(p);
    float *x = cache->lanes;

    for (size_t i = 0; i < q->n_tokens; i++) {
        const int64_t ordinal = seq->n_tokens - (int64_t)(q->n_tokens - i);
        if (ordinal < first || ordinal >= end)
            continue;
        t->n_queries[layer]++;
        for (int32_t h = 0; h < p->n_heads; h++) {
            const struct kvc_rows row = kvc_view_rows(q, i, 1, (size_t)h);
            double *sum = t->q_square + (size_t)kvc_pair(cache, layer, h / cache->group) * d;
            cache->ctx->k->load_rows(&cache->ctx->queue, &row, x, stride_of(cache),
                                     stride_of(cache));
            if (t->comes_rotated)
                rotate(cache, x, 1, stride_of(cache), d);
            for (size_t c = 0; c < d; c++)
                sum[c] += isfinite(x[c]) ? (double)x[c] * (double)x[c] : 0.0;
        }
    }
}

/* One measurement, and what follows from it in all sequences. */
struct freeze {
    kvc_cache *cache;
    const struct kvc_sequence *seq;
    int32_t n_slots;
    size_t n_lanes;
    uint64_t n_saturated[KVC_LANES];
};

/* Adds up, over the rows of a pair, x (mean NULL) or (x - mean)^2; returns the rows. */
static size_t add_rows(const struct freeze *f, size_t pair, float *x, const float *mean,
                       double *sums)
{
    const kvc_cache *cache = f->cache;
    const struct kvc_page_layout *open = &cache->layouts[KVC_LAYOUT_OPEN];
    const size_t d = open->d_k, stride = stride_of(cache);
    size_t n = 0;

    memset(sums, 0, d * sizeof(*sums));
    for (int32_t slot = 0; slot < f->n_slots; slot++) {
        const struct kvc_entry *e = &kvc_slot(cache, f->seq, slot)->entries[pair];
        for (uint64_t left = e->live; left; left &= left - 1, n++) {
            const size_t row = (size_t)__builtin_ctzll(left);
            const uint8_t *from = kvc_page_data(cache, e->page) + row * open->k_stride;
            const struct kvc_rows rows = {from, KVC_DTYPE_F16, d, 1, d};
            cache->ctx->k->load_rows(&cache->ctx->queue, &rows, x, stride, stride);
            if (cache->transform.comes_rotated)
                rotate(cache, x, 1, stride, d);
            for (size_t c = 0; c < d; c++) {
                const double y = (double)x[c] - (mean ? (double)mean[c] : 0.0);
                sums[c] += mean ? y * y : y;
            }
        }
    }
    return n;
}

/* floats is room for a tile of rows: one row, and its sums. */
static void measure_pair(const struct freeze *f, size_t pair, float *floats)
{
    const kvc_cache *cache = f->cache;
    const struct kvc_transform *t = &cache->transform;
    const size_t d = (size_t)cache->params.head_dim_k, at = pair * stride_of(cache);
    double *k_square = (double *)(void *)(floats + stride_of(cache));
    double *q_square = t->q_square + pair * d;
    const int64_t n_queries = t->n_queries[pair / (size_t)cache->params.n_kv_heads];

    const size_t n = add_rows(f, pair, floats, NULL, k_square);
    for (size_t c = 0; c < d && n > 0; c++)
        t->mean[at + c] = (float)(k_square[c] / (double)n);
    add_rows(f, pair, floats, t->mean + at, k_square);
    for (size_t c = 0; c < d && n > 0; c++) {
        k_square[c] /= (double)n;
        q_square[c] /= (double)(n_queries * cache->group);
    }
    kvc_balance(k_square, n_queries > 0 ? q_square : NULL, d, t->scale + at);
    derive(cache, pair);
}

/* Rows of each F16 page of a pair, wherever it is seen. */
static void mark_page(const kvc_cache *cache, const struct kvc_entry *e)
{
    if (e->page >= 0 && cache->pages[e->page].raw_rows < e->n_rows)
        cache->pages[e->page].raw_rows = e->n_rows;
}

static uint64_t rewrite_page(const kvc_cache *cache, int32_t pair, const struct kvc_entry *e,
                             float *floats)
{
    if (e->page < 0)
        return 0;
    const uint8_t n_rows = cache->pages[e->page].raw_rows;
    cache->pages[e->page].raw_rows = 0; /* the other owners find it done */
    return kvc_transform_page(cache, pair, &cache->layouts[KVC_LAYOUT_OPEN],
                              kvc_page_data(cache, e->page), 0, n_rows, floats);
}

static uint64_t rewrite_pair(const kvc_cache *cache, int32_t pair, float *floats)
{
    const int32_t layer = pair / cache->params.n_kv_heads;
    uint64_t n_saturated = 0;

    for (int32_t i = 0; i < cache->params.max_sequences; i++) {
        const struct kvc_sequence *seq = &cache->sequences[i];
        for (int32_t slot = 0; slot < seq->n_slots; slot++)
            mark_page(cache, &kvc_slot(cache, seq, slot)->entries[pair]);
    }
    for (int32_t i = 0; i < cache->params.max_sequences; i++) {
        const struct kvc_sequence *seq = &cache->sequences[i];
        const int32_t n_sinks = kvc_min32(seq->appended[layer], cache->params.sink_tokens);
        for (int32_t slot = 0; slot < seq->n_slots; slot++)
            n_saturated +=
                rewrite_page(cache, pair, &kvc_slot(cache, seq, slot)->entries[pair], floats);
        if (seq->alive && n_sinks > 0)
            n_saturated += kvc_transform_page(cache, pair, &cache->layouts[KVC_LAYOUT_STRIP],
                                              kvc_strip(cache, seq, pair), 0, n_sinks, floats);
    }
    return n_saturated;
}

static void freeze_lane(void *arg, size_t lane)
{
    struct freeze *f = arg;
    float *floats = f->cache->lanes + lane * f->cache->lane_floats;
    for (size_t pair = lane; pair < (size_t)f->cache->n_pairs; pair += f->n_lanes) {
        measure_pair(f, pair, floats);
        f->n_saturated[lane] += rewrite_pair(f->cache, (int32_t)pair, floats);
    }
}

bool kvc_transform_due(const kvc_cache *cache, const struct kvc_sequence *seq, bool early)
{
    const int32_t wanted = measured_pages(&cache->params);
    if (cache->transform.ready || seq->n_slots == 0)
        return false;
    return early || seq->n_tokens - (int64_t)cache->params.sink_tokens >=
                        wanted * (int64_t)KVC_PAGE_TOKENS; /* fewer slots if rows were dropped */
}

void kvc_transform_freeze(kvc_cache *cache, const struct kvc_sequence *seq)
{
    const size_t n_pairs = (size_t)cache->n_pairs;
    struct freeze f = {.cache = cache,
                       .seq = seq,
                       .n_slots = kvc_min32(seq->n_slots, measured_pages(&cache->params)),
                       .n_lanes = n_pairs < KVC_LANES ? n_pairs : KVC_LANES};

    cache->transform.ready = true;
    kvc_ctx_parallel(cache->ctx, f.n_lanes, freeze_lane, &f);
    for (size_t lane = 0; lane < f.n_lanes; lane++)
        cache->n_saturated += f.n_saturated[lane];
}
