/*
 * attend.c - attention over rows of an engine: checks, tiles, partial results, kernel calls.
 *
 * The query rows of a KV head (row t * g + j is head j of its group in query t) form tiles of 16,
 * the keys blocks. Few queries are split: a unit of work is a tile of several heads over one block,
 * and the blocks are added when all are done. Else a unit is a tile of one head over all blocks,
 * added in the same order: the bits do not depend on it.
 */
#include "kvc/attend.h"

#include <math.h>
#include <string.h>

#include "arena.h"
#include "check.h"
#include "ctx.h"

enum {
    LANES = 64,      /* tasks at a time: each has its own scratch */
    SPLIT_ROWS = 256 /* queries times heads that are split at most */
};

struct shape {
    size_t n_queries, n_heads, n_keys, n_kv_heads, d_k, d_v;
    size_t group, n_rows; /* query rows of a KV head */
    size_t n_tiles, n_blocks;
    size_t stride_k, stride_v;
};

/* Scratch of one task. */
struct lane {
    float *q;                         /* rows of a unit */
    struct kvc_attend_part sum, part; /* of a tile of one head */
    float *work;
};

struct call {
    const kvc_ctx *ctx;
    const kvc_view *q, *out;
    const kvc_row_view *k, *v;
    kvc_attend_rows_options options;
    float *lse;
    struct shape shape;
    bool split;
    size_t n_chunks, n_units, n_lanes; /* chunks of KV heads; split: of a unit */
    /* The workspace: scratch of the tasks, and [n_blocks][n_kv_heads * n_rows] partial results. */
    char *lanes;
    size_t lane_bytes, lane_rows; /* rows of q of a lane */
    struct kvc_attend_part parts;
};

static const kvc_attend_rows_options defaults = {
    .struct_size = sizeof(defaults),
    .first_query = INT64_MAX,
};

void kvc_attend_rows_options_init(kvc_attend_rows_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &defaults, sizeof(defaults));
}

static size_t min_of(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t divide_up(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

/* What follows from the counts for some of the queries. */
static void set_queries(struct shape *s, size_t n_queries)
{
    s->n_queries = n_queries;
    s->n_rows = n_queries * s->group;
    s->n_tiles = divide_up(s->n_rows, KVC_TILE_ROWS);
}

static kvc_status take_shape(struct shape *s, size_t n_queries, size_t n_heads, size_t n_keys,
                             size_t n_kv_heads, size_t d_k, size_t d_v)
{
    size_t rows;

    KVC_CHECK(n_heads > 0 && n_kv_heads > 0 && d_k > 0 && d_v > 0, KVC_E_ARG);
    KVC_CHECK(n_heads % n_kv_heads == 0 && n_keys <= PTRDIFF_MAX / 2, KVC_E_ARG);
    KVC_CHECK(!__builtin_mul_overflow(n_queries, n_heads, &rows) && rows <= PTRDIFF_MAX / 2,
              KVC_E_ARG);
    KVC_CHECK(d_k <= KVC_MAX_HEAD_DIM && d_v <= KVC_MAX_HEAD_DIM, KVC_E_UNSUPPORTED);
    *s = (struct shape){
        .n_heads = n_heads,
        .n_keys = n_keys,
        .n_kv_heads = n_kv_heads,
        .d_k = d_k,
        .d_v = d_v,
        .group = n_heads / n_kv_heads,
        .n_blocks = divide_up(n_keys, KVC_ROWS_KEYS),
        .stride_k = kvc_attend_stride(d_k),
        .stride_v = kvc_attend_stride(d_v),
    };
    set_queries(s, n_queries);
    return KVC_OK;
}

static bool is_split(const struct shape *s)
{
    return s->n_queries * s->n_heads <= SPLIT_ROWS && s->n_blocks > 0;
}

static void take_part(struct kvc_arena *arena, const struct shape *s, size_t n_rows,
                      struct kvc_attend_part *part)
{
    part->m = kvc_arena_take(arena, n_rows, sizeof(float), 64);
    part->l = kvc_arena_take(arena, n_rows, sizeof(float), 64);
    part->o = kvc_arena_take(arena, n_rows, s->stride_v * sizeof(float), 64);
}

/* The scratch of a task whose units have n_rows query rows; its bytes are returned. */
static size_t carve_lane(void *base, const struct shape *s, size_t n_rows, struct lane *lane)
{
    struct kvc_arena arena = {.base = base};
    lane->q = kvc_arena_take(&arena, n_rows, s->stride_k * sizeof(float), 64);
    lane->work =
        kvc_arena_take(&arena, kvc_rows_work_size(n_rows, s->d_k, s->d_v), sizeof(float), 64);
    take_part(&arena, s, KVC_TILE_ROWS, &lane->sum);
    take_part(&arena, s, KVC_TILE_ROWS, &lane->part);
    return divide_up(arena.used, 64) * 64;
}

/* Bytes of the workspace of a call, SIZE_MAX if they do not fit. Split ones have room for units of
 * all heads. */
static size_t carve(void *ws, const struct shape *s, struct call *call)
{
    struct kvc_arena arena = {.base = ws};
    struct lane lane;
    size_t n_units = s->n_tiles * s->n_kv_heads, n_parts = 0;
    call->split = is_split(s);
    call->lane_rows = min_of(s->n_rows, KVC_TILE_ROWS);
    if (call->split) {
        call->lane_rows *= s->n_kv_heads;
        if (__builtin_mul_overflow(n_units, s->n_blocks, &n_units) ||
            __builtin_mul_overflow(s->n_rows * s->n_kv_heads, s->n_blocks, &n_parts))
            return SIZE_MAX;
    }
    call->lane_bytes = carve_lane(NULL, s, call->lane_rows, &lane);
    call->lanes = kvc_arena_take(&arena, min_of(n_units, LANES), call->lane_bytes, 64);
    take_part(&arena, s, n_parts, &call->parts);
    return arena.overflow ? SIZE_MAX : arena.used;
}

/* Enough for fewer queries, which may be split, too. */
static size_t workspace_bytes(const struct shape *s)
{
    struct call ignored;
    struct shape few = *s;
    set_queries(&few, min_of(s->n_queries, SPLIT_ROWS / s->n_heads));
    const size_t all = carve(NULL, s, &ignored);
    const size_t split = few.n_queries > 0 ? carve(NULL, &few, &ignored) : 0;
    return all > split ? all : split;
}

kvc_status kvc_attend_rows_workspace_size(size_t n_queries, size_t n_heads, size_t n_keys,
                                          size_t n_kv_heads, size_t head_dim_k, size_t head_dim_v,
                                          size_t *size)
{
    struct shape s;

    KVC_CHECK(size, KVC_E_ARG);
    KVC_TRY(take_shape(&s, n_queries, n_heads, n_keys, n_kv_heads, head_dim_k, head_dim_v));
    const size_t need = workspace_bytes(&s);
    KVC_CHECK(need != SIZE_MAX, KVC_E_ARG);
    *size = need;
    return KVC_OK;
}

/* A tile of query rows of any KV head: row r of the head is first + r. */
struct tile {
    size_t first, n;
};

static struct tile tile_at(const struct shape *s, size_t i)
{
    const size_t first = i * KVC_TILE_ROWS;
    return (struct tile){first, min_of(s->n_rows - first, KVC_TILE_ROWS)};
}

/* Rows of a tile that belong to one query: the heads head ... head + n - 1. */
struct stretch {
    size_t query, head, n;
};

static struct stretch stretch_at(const struct shape *s, const struct tile *tile, size_t kv_head,
                                 size_t r)
{
    const size_t row = tile->first + r, j = row % s->group;
    return (struct stretch){
        .query = row / s->group,
        .head = kv_head * s->group + j,
        .n = min_of(s->group - j, tile->n - r),
    };
}

/* The rows of a tile for n KV heads. */
static void load_q(const struct call *call, const struct tile *tile, size_t first, size_t n,
                   float *at)
{
    const struct shape *s = &call->shape;
    for (size_t head = first; head < first + n; head++)
        for (size_t r = 0; r < tile->n;) {
            const struct stretch some = stretch_at(s, tile, head, r);
            struct kvc_rows rows = kvc_view_rows(call->q, some.query, some.n, some.head);
            rows.stride = call->q->head_stride;
            call->ctx->k->load_rows(&call->ctx->queue, &rows, at, s->stride_k, s->stride_k);
            at += some.n * s->stride_k;
            r += some.n;
        }
}

/* The keys first ... first + n - 1 that a query may see: so many from the first on. */
static uint32_t n_seen(const struct call *call, size_t query, size_t first, size_t n)
{
    const int64_t at = call->options.first_query, n_keys = (int64_t)call->shape.n_keys;
    if (at >= n_keys)
        return (uint32_t)n;
    const int64_t end = at + (int64_t)query + 1;
    return end <= (int64_t)first ? 0 : (uint32_t)min_of((size_t)(end - (int64_t)first), n);
}

static struct kvc_stored_rows stored_rows(const kvc_row_view *view, size_t head, size_t token)
{
    return (struct kvc_stored_rows){
        .data = (const uint8_t *)view->data + token * view->token_stride_bytes +
                head * view->head_stride_bytes,
        .format = view->format,
        .d = (uint32_t)view->head_dim,
        .token_stride = view->token_stride_bytes,
        .head_stride = view->head_stride_bytes,
    };
}

/* A tile, whose queries are loaded, of n KV heads over one block. */
static void attend_block(const struct call *call, const struct lane *lane, const struct tile *tile,
                         size_t block, size_t head, size_t n, const struct kvc_attend_part *to)
{
    const struct shape *s = &call->shape;
    const kvc_attend_rows_options *o = &call->options;
    const size_t first = block * KVC_ROWS_KEYS, n_keys = min_of(s->n_keys - first, KVC_ROWS_KEYS);
    uint32_t seen[KVC_TILE_ROWS];
    const void *mask[KVC_TILE_ROWS];

    for (size_t r = 0; r < tile->n; r++) {
        const size_t query = (tile->first + r) / s->group;
        seen[r] = n_seen(call, query, first, n_keys);
        mask[r] = o->mask ? (const char *)o->mask +
                                (query * o->mask_stride + first) * kvc_dtype_size(o->mask_dtype)
                          : NULL;
    }
    const struct kvc_rows_tile job = {
        .k = stored_rows(call->k, head, first),
        .v = stored_rows(call->v, head, first),
        .n_heads = (uint32_t)n,
        .n_rows = (uint32_t)tile->n,
        .n_keys = (uint32_t)n_keys,
        .exact = o->exact,
        .q = lane->q,
        .scale = o->scale,
        .softcap = o->softcap,
        .n_seen = seen,
        .mask = o->mask ? mask : NULL,
        .mask_dtype = o->mask_dtype,
        .m = to->m,
        .l = to->l,
        .o = to->o,
        .work = lane->work,
    };
    call->ctx->k->attend_rows(&call->ctx->queue, &job);
}

static void merge(const struct call *call, const struct tile *tile, struct kvc_attend_part *into,
                  const struct kvc_attend_part *part)
{
    call->ctx->k->merge_parts(&call->ctx->queue, into, part, tile->n, call->shape.d_v);
}

/* Writes the output of a tile of one head. */
static void finish(const struct call *call, const struct tile *tile, size_t kv_head,
                   const struct kvc_attend_part *sum)
{
    const struct shape *s = &call->shape;
    float ignored[KVC_TILE_ROWS];
    for (size_t r = 0; r < tile->n;) {
        const struct stretch some = stretch_at(s, tile, kv_head, r);
        const struct kvc_attend_part part = {sum->m + r, sum->l + r, sum->o + r * s->stride_v};
        float *lse = call->lse ? call->lse + some.query * s->n_heads + some.head : ignored;
        call->ctx->k->finish_rows(&call->ctx->queue, &part, some.n, s->d_v,
                                  kvc_view_at(call->out, some.query, some.head), call->out->dtype,
                                  call->out->head_stride, lse);
        r += some.n;
    }
}

/* The partial results of a tile and block from one KV head on. */
static struct kvc_attend_part part_at(const struct call *call, const struct tile *tile,
                                      size_t block, size_t head)
{
    const struct shape *s = &call->shape;
    const size_t row = (block * s->n_rows + tile->first) * s->n_kv_heads + head * tile->n;
    return (struct kvc_attend_part){call->parts.m + row, call->parts.l + row,
                                    call->parts.o + row * s->stride_v};
}

/* A tile of a chunk of heads over one block. */
static void run_split(const struct call *call, const struct lane *lane, size_t unit)
{
    const struct shape *s = &call->shape;
    const struct tile tile = tile_at(s, unit % s->n_tiles);
    const size_t chunk = unit / s->n_tiles % call->n_chunks;
    const size_t block = unit / s->n_tiles / call->n_chunks;
    const size_t first = chunk * s->n_kv_heads / call->n_chunks;
    const size_t n = (chunk + 1) * s->n_kv_heads / call->n_chunks - first;
    const struct kvc_attend_part part = part_at(call, &tile, block, first);

    load_q(call, &tile, first, n, lane->q);
    attend_block(call, lane, &tile, block, first, n, &part);
}

/* A tile of one head over all blocks. */
static void run_whole(const struct call *call, struct lane *lane, size_t unit)
{
    const struct shape *s = &call->shape;
    const struct tile tile = tile_at(s, unit % s->n_tiles);
    const size_t head = unit / s->n_tiles;

    load_q(call, &tile, head, 1, lane->q);
    for (size_t r = 0; r < tile.n && s->n_blocks == 0; r++) {
        lane->sum.m[r] = -INFINITY;
        lane->sum.l[r] = 0.0f;
        memset(lane->sum.o + r * s->stride_v, 0, s->stride_v * sizeof(float));
    }
    for (size_t b = 0; b < s->n_blocks; b++) {
        attend_block(call, lane, &tile, b, head, 1, b ? &lane->part : &lane->sum);
        if (b > 0)
            merge(call, &tile, &lane->sum, &lane->part);
    }
    finish(call, &tile, head, &lane->sum);
}

static void run_lane(void *arg, size_t i)
{
    const struct call *call = arg;
    struct lane lane;
    carve_lane(call->lanes + i * call->lane_bytes, &call->shape, call->lane_rows, &lane);
    for (size_t unit = i; unit < call->n_units; unit += call->n_lanes) {
        if (call->split)
            run_split(call, &lane, unit);
        else
            run_whole(call, &lane, unit);
    }
}

/* Adds up the blocks of a tile of one head. */
static void run_merge(void *arg, size_t i)
{
    const struct call *call = arg;
    const struct tile tile = tile_at(&call->shape, i % call->shape.n_tiles);
    const size_t head = i / call->shape.n_tiles;
    struct kvc_attend_part sum = part_at(call, &tile, 0, head);
    for (size_t b = 1; b < call->shape.n_blocks; b++) {
        const struct kvc_attend_part part = part_at(call, &tile, b, head);
        merge(call, &tile, &sum, &part);
    }
    finish(call, &tile, head, &sum);
}

static bool rows_ok(const kvc_row_view *view)
{
    if (!view || view->struct_size < sizeof(*view) || (unsigned)view->format > KVC_ROWS_Q4_0 ||
        view->n_heads == 0 || view->head_dim == 0 || view->head_dim > PTRDIFF_MAX / 4 ||
        (view->format != KVC_ROWS_F16 && view->head_dim % 32 != 0))
        return false;
    const size_t row = kvc_row_bytes(view->format, view->head_dim);
    size_t heads, tokens, last;
    if ((view->n_heads > 1 && view->head_stride_bytes < row) || view->head_stride_bytes % 2 != 0 ||
        (view->n_tokens > 1 && view->token_stride_bytes < row) || view->token_stride_bytes % 2 != 0)
        return false;
    if (view->n_tokens == 0)
        return true;
    return view->data && (uintptr_t)view->data % 2 == 0 &&
           !__builtin_mul_overflow(view->n_heads - 1, view->head_stride_bytes, &heads) &&
           !__builtin_mul_overflow(view->n_tokens - 1, view->token_stride_bytes, &tokens) &&
           !__builtin_add_overflow(heads, tokens, &last) &&
           !__builtin_add_overflow(last, row, &last) && last <= PTRDIFF_MAX;
}

static bool mask_ok(const kvc_attend_rows_options *o, size_t n_queries, size_t n_keys)
{
    size_t last;
    if (!o->mask)
        return true;
    if (o->mask_dtype != KVC_DTYPE_F32 && o->mask_dtype != KVC_DTYPE_F16)
        return false;
    const size_t size = kvc_dtype_size(o->mask_dtype);
    return (uintptr_t)o->mask % size == 0 && (n_queries <= 1 || o->mask_stride >= n_keys) &&
           !__builtin_mul_overflow(n_queries, o->mask_stride, &last) && last <= PTRDIFF_MAX / size;
}

static kvc_status take_options(struct call *call, const kvc_attend_rows_options *options)
{
    kvc_attend_rows_options *o = &call->options;
    *o = defaults;
    if (options)
        KVC_TRY(kvc_struct_read(o, sizeof(*o), options, sizeof(*options)));
    KVC_CHECK(isfinite(o->scale) && isfinite(o->softcap) && o->softcap >= 0.0f, KVC_E_ARG);
    KVC_CHECK(mask_ok(o, call->q->n_tokens, call->k->n_tokens), KVC_E_ARG);
    if (o->scale == 0.0f)
        o->scale = (float)(1.0 / sqrt((double)call->q->head_dim));
    return KVC_OK;
}

static bool views_fit(const struct call *call)
{
    return call->k->n_tokens == call->v->n_tokens && call->k->n_heads == call->v->n_heads &&
           call->q->head_dim == call->k->head_dim && call->out->head_dim == call->v->head_dim &&
           call->q->n_tokens == call->out->n_tokens && call->q->n_heads == call->out->n_heads &&
           kvc_view_distinct(call->out);
}

kvc_status kvc_attend_rows(kvc_ctx *ctx, const kvc_view *q, const kvc_row_view *k,
                           const kvc_row_view *v, const kvc_attend_rows_options *options,
                           const kvc_view *out, float *lse, void *ws, size_t ws_size)
{
    struct call call = {.ctx = ctx, .q = q, .k = k, .v = v, .out = out, .lse = lse};
    struct shape *s = &call.shape;

    KVC_CHECK(ctx && kvc_view_ok(q) && rows_ok(k) && rows_ok(v) && kvc_view_ok(out), KVC_E_ARG);
    KVC_CHECK(views_fit(&call), KVC_E_ARG);
    KVC_TRY(
        take_shape(s, q->n_tokens, q->n_heads, k->n_tokens, k->n_heads, k->head_dim, v->head_dim));
    KVC_TRY(take_options(&call, options));
    if (s->n_queries == 0)
        return KVC_OK;
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, carve(ws, s, &call)), KVC_E_WORKSPACE);

    call.n_units = s->n_tiles * s->n_kv_heads;
    if (call.split) {
        call.n_chunks = min_of(divide_up(LANES, s->n_blocks * s->n_tiles), s->n_kv_heads);
        call.n_units = s->n_blocks * s->n_tiles * call.n_chunks;
    }
    call.n_lanes = min_of(call.n_units, LANES);
    kvc_ctx_parallel(ctx, call.n_lanes, run_lane, &call);
    if (call.split)
        kvc_ctx_parallel(ctx, s->n_tiles * s->n_kv_heads, run_merge, &call);
    return KVC_OK;
}
