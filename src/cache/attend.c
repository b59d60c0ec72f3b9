/*
 * attend.c - attention over the pages of sequences.
 *
 * The pages of a sequence (its strip first) form blocks of KVC_TILE_PAGES. The query rows of one KV
 * head (token t, head g is row t * group + g) form tiles: of KVC_TILE_ROWS, or, where several
 * tokens fill more than one such tile, of up to KVC_BLOCK_ROWS, for which there is another kernel.
 * A block gives a tile a partial result, and partial results are added in ascending order: so how
 * the work is divided, by blocks or not, changes no bit.
 */
#include <math.h>
#include <string.h>

#include "check.h"
#include "state.h"

struct call {
    kvc_cache *cache;
    int32_t layer;
    kvc_attend_options options;
    size_t n_items, n_units, n_lanes, n_parts;
    bool scores; /* add masses: of single query tokens from the partial results, of others in a
                  * second pass over the pages */
};

static size_t up16(size_t n)
{
    return (n + 15) & ~(size_t)15;
}

/* Rows of the tiles of large calls; KVC_TILE_ROWS: no append is large enough for others. */
static int32_t block_rows(const kvc_cache_params *p)
{
    const int64_t most = (int64_t)p->max_append * (p->n_heads / p->n_kv_heads);
    return most < KVC_BLOCK_ROWS ? (int32_t)up16((size_t)most) : KVC_BLOCK_ROWS;
}

static size_t work_floats(const kvc_cache_params *p)
{
    const size_t d_k = (size_t)p->head_dim_k, n_rows = (size_t)block_rows(p);
    const size_t tile = kvc_attend_work_size(d_k);
    const size_t block = kvc_block_work_size(d_k, (size_t)p->head_dim_v, n_rows);
    return up16(n_rows > KVC_TILE_ROWS && block > tile ? block : tile);
}

size_t kvc_attend_lane_floats(const kvc_cache_params *p)
{
    const size_t d_k = (size_t)p->head_dim_k, d_v = (size_t)p->head_dim_v;
    return (size_t)block_rows(p) * (kvc_attend_stride(d_k) + 2 * kvc_attend_stride(d_v) + 6) +
           work_floats(p) + (size_t)KVC_TILE_PAGES * KVC_PAGE_ROWS;
}

/* Scratch of one task at a time. */
struct lane {
    float *q, *work, *mass, *lse, *shift_room;
    const float *shift; /* of the logits of a tile, or NULL */
    struct kvc_attend_part sum, part;
};

static float *take(float **at, size_t n)
{
    float *taken = *at;
    *at += n;
    return taken;
}

static struct lane lane_at(const kvc_cache *cache, size_t i)
{
    const size_t s_k = kvc_attend_stride((size_t)cache->params.head_dim_k);
    const size_t s_v = kvc_attend_stride((size_t)cache->params.head_dim_v);
    const size_t n_rows = (size_t)block_rows(&cache->params);
    float *at = cache->lanes + i * cache->lane_floats;
    struct lane lane;
    lane.q = take(&at, n_rows * s_k);
    lane.sum.o = take(&at, n_rows * s_v);
    lane.part.o = take(&at, n_rows * s_v);
    lane.work = take(&at, work_floats(&cache->params));
    lane.mass = take(&at, (size_t)KVC_TILE_PAGES * KVC_PAGE_ROWS);
    lane.sum.m = take(&at, n_rows);
    lane.sum.l = take(&at, n_rows);
    lane.part.m = take(&at, n_rows);
    lane.part.l = take(&at, n_rows);
    lane.lse = take(&at, n_rows);
    lane.shift_room = take(&at, n_rows);
    lane.shift = NULL;
    return lane;
}

/* What masses are made of, for a head of a part: m, l and weights of its pages. */
static size_t mass_floats(const kvc_cache_params *p)
{
    return p->score_mode == KVC_SCORE_NONE   ? 0
           : p->score_mode == KVC_SCORE_PAGE ? 2 * KVC_TILE_PAGES
                                             : (2 + KVC_PAGE_ROWS) * KVC_TILE_PAGES;
}

/* A part: m, l and o of all heads, and what masses are made of. */
size_t kvc_attend_part_floats(const kvc_cache_params *p)
{
    const size_t n = (size_t)p->n_heads;
    return 2 * up16(n) + n * (kvc_attend_stride((size_t)p->head_dim_v) + mass_floats(p));
}

static struct kvc_attend_part part_at(const kvc_cache *cache, size_t i, size_t row)
{
    const kvc_cache_params *p = &cache->params;
    const size_t n = up16((size_t)p->n_heads);
    float *base = cache->parts + i * kvc_attend_part_floats(p);
    return (struct kvc_attend_part){
        .m = base + row,
        .l = base + n + row,
        .o = base + 2 * n + row * kvc_attend_stride((size_t)p->head_dim_v),
    };
}

/* What masses are made of, for a tile of n rows that begins at that row. */
static struct kvc_attend_masses part_masses(const kvc_cache *cache, size_t i, size_t row, size_t n)
{
    const kvc_cache_params *p = &cache->params;
    float *base = part_at(cache, i, (size_t)p->n_heads).o + row * mass_floats(p);
    return (struct kvc_attend_masses){
        .m = base,
        .l = base + n * KVC_TILE_PAGES,
        .weights = p->score_mode == KVC_SCORE_TOKEN ? base + 2 * n * KVC_TILE_PAGES : NULL,
    };
}

/* A tile of query rows of one KV head. */
struct tile {
    const struct kvc_attend_info *info;
    int32_t kv_head;
    int32_t first, n_rows;
};

static struct tile tile_at(const kvc_cache *cache, const struct kvc_attend_info *info,
                           int32_t kv_head, int32_t i)
{
    const int32_t first = i * info->tile_rows, all = info->n_q * cache->group;
    return (struct tile){info, kv_head, first, kvc_min32(all - first, info->tile_rows)};
}

/* Rows of a tile that belong to one token: row r is query head `head` of token `token`. */
struct stretch {
    size_t token, head;
    int32_t n;
};

static struct stretch stretch_at(const kvc_cache *cache, const struct tile *tile, int32_t r)
{
    const int32_t row = tile->first + r, g = row % cache->group;
    return (struct stretch){
        .token = (size_t)(row / cache->group),
        .head = (size_t)(tile->kv_head * cache->group + g),
        .n = kvc_min32(cache->group - g, tile->n_rows - r),
    };
}

/* The heads of one token of a view, as rows. */
static struct kvc_rows head_rows(const kvc_view *view, const struct stretch *s)
{
    struct kvc_rows rows = kvc_view_rows(view, s->token, (size_t)s->n, s->head);
    rows.stride = view->head_stride;
    return rows;
}

static void load_q(const struct call *call, const struct tile *tile, struct lane *lane)
{
    const kvc_cache *cache = call->cache;
    const size_t stride = kvc_attend_stride((size_t)cache->params.head_dim_k);
    const int32_t pair = kvc_pair(cache, call->layer, tile->kv_head);
    float *q = lane->q;
    for (int32_t r = 0; r < tile->n_rows;) {
        const struct stretch s = stretch_at(cache, tile, r);
        const struct kvc_rows rows = head_rows(tile->info->item->q, &s);
        cache->ctx->k->load_rows(&cache->ctx->queue, &rows, q + (size_t)r * stride, stride, stride);
        r += s.n;
    }
    lane->shift = kvc_transform_queries(cache, pair, q, (size_t)tile->n_rows, call->options.scale,
                                        lane->shift_room);
}

/* Writes the output of a tile; lse holds room for its rows. */
static void finish(const kvc_cache *cache, const struct tile *tile,
                   const struct kvc_attend_part *sum, float *lse)
{
    const size_t d_v = (size_t)cache->params.head_dim_v, stride = kvc_attend_stride(d_v);
    const kvc_attend_item *item = tile->info->item;
    kvc_restore_outputs(cache, sum->o, (size_t)tile->n_rows);
    for (int32_t r = 0; r < tile->n_rows;) {
        const struct stretch s = stretch_at(cache, tile, r);
        const struct kvc_attend_part part = {sum->m + r, sum->l + r, sum->o + (size_t)r * stride};
        cache->ctx->k->finish_rows(&cache->ctx->queue, &part, (size_t)s.n, d_v,
                                   kvc_view_at(item->out, s.token, s.head), item->out->dtype,
                                   item->out->head_stride, lse + r);
        if (item->lse)
            memcpy(item->lse + s.token * (size_t)cache->params.n_heads + s.head, lse + r,
                   (size_t)s.n * sizeof(float));
        r += s.n;
    }
}

/* Pages of the next block that a kernel hears of. */
enum { PAGES_AFTER = 4 };

/* What a block looks like to a tile. */
struct block {
    struct kvc_attend_page pages[KVC_TILE_PAGES];
    struct kvc_column *columns[KVC_TILE_PAGES]; /* NULL: the strip */
    uint64_t masks[KVC_TILE_PAGES][KVC_BLOCK_ROWS];
    struct kvc_attend_page after[PAGES_AFTER]; /* of the next block */
    uint32_t n_pages, n_after;
};

/* The ordinal of query row r of a tile. */
static int64_t query_at(const struct call *call, const struct tile *tile, int32_t r)
{
    const struct kvc_attend_info *info = tile->info;
    return info->seq->n_tokens - info->n_q + (tile->first + r) / call->cache->group;
}

/* Ordinals that query row r of a tile sees: first ... last - 1. */
static void visible(const struct call *call, const struct tile *tile, int32_t r, int64_t *first,
                    int64_t *last)
{
    const int64_t at = query_at(call, tile, r);
    *last = at + 1;
    *first =
        call->options.window > 0 && call->options.window <= at ? *last - call->options.window : 0;
}

/* The live rows of a page (of the strip, if e is NULL) that query row r of a tile sees. */
static uint64_t seen_rows(const struct call *call, const struct tile *tile,
                          const struct kvc_column *column, const struct kvc_entry *e, int32_t r)
{
    const int32_t pair = kvc_pair(call->cache, call->layer, tile->kv_head);
    int64_t first, last;
    visible(call, tile, r, &first, &last);
    return e ? e->live & kvc_entry_range(call->cache, column, pair, first, last)
             : tile->info->seq->strip_live & kvc_bits(first, last);
}

/* Whether what the first and the last row of a tile see overlaps or meets: then a page of which
 * they see the same is the same for all rows, because ranges ascend. */
static bool ranges_meet(const struct call *call, const struct tile *tile)
{
    int64_t first, last, end;
    visible(call, tile, 0, &first, &end);
    visible(call, tile, tile->n_rows - 1, &first, &last);
    return first <= end;
}

static void add_page(const struct call *call, const struct tile *tile, struct block *block,
                     uint32_t slot, struct kvc_column *column)
{
    const kvc_cache *cache = call->cache;
    const int32_t pair = kvc_pair(cache, call->layer, tile->kv_head);
    const struct kvc_entry *e = column ? &column->entries[pair] : NULL;
    const uint64_t live = e ? e->live : tile->info->seq->strip_live;
    uint64_t *masks = block->masks[block->n_pages];
    uint64_t any;

    if (live == 0)
        return;
    any = masks[0] = seen_rows(call, tile, column, e, 0);
    const bool alike =
        ranges_meet(call, tile) && masks[0] == seen_rows(call, tile, column, e, tile->n_rows - 1);
    for (int32_t r = 1; r < tile->n_rows; r++) {
        const bool same_token = (tile->first + r) % cache->group != 0;
        masks[r] = alike || same_token ? masks[r - 1] : seen_rows(call, tile, column, e, r);
        any |= masks[r];
    }
    if (any == 0)
        return;
    const struct kvc_groups *groups = e ? kvc_page_groups(cache, e->page) : NULL;
    block->columns[block->n_pages] = column;
    block->pages[block->n_pages++] = (struct kvc_attend_page){
        .data = e ? kvc_page_data(cache, e->page) : kvc_strip(cache, tile->info->seq, pair),
        .layout = e ? kvc_page_layout_of(cache, e->page) : &cache->layouts[KVC_LAYOUT_STRIP],
        .slot = slot,
        .n_rows = e ? e->n_rows
                    : (uint32_t)kvc_min32(tile->info->seq->n_tokens, cache->params.sink_tokens),
        .mask = masks,
        .bias = groups ? groups->bias : NULL,
    };
}

static void find_block(const struct call *call, const struct tile *tile, int32_t i,
                       struct block *block)
{
    const kvc_cache *cache = call->cache;
    const int32_t strip = cache->params.sink_tokens > 0;
    const int32_t end = kvc_min32((i + 1) * KVC_TILE_PAGES, tile->info->n_pages);

    block->n_pages = block->n_after = 0;
    for (int32_t p = end; p < kvc_min32(end + PAGES_AFTER, tile->info->n_pages); p++) {
        const struct kvc_entry *e = &kvc_slot(cache, tile->info->seq, p - strip)
                                         ->entries[kvc_pair(cache, call->layer, tile->kv_head)];
        if (e->live)
            block->after[block->n_after++] =
                (struct kvc_attend_page){.data = kvc_page_data(cache, e->page),
                                         .layout = kvc_page_layout_of(cache, e->page)};
    }
    for (int32_t p = i * KVC_TILE_PAGES; p < end; p++)
        add_page(call, tile, block, (uint32_t)(p % KVC_TILE_PAGES),
                 p < strip ? NULL : kvc_slot(cache, tile->info->seq, p - strip));
}

static struct kvc_attend_tile kernel_tile(const struct call *call, const struct tile *tile,
                                          const struct block *block, const struct lane *lane,
                                          const struct kvc_attend_part *to)
{
    return (struct kvc_attend_tile){
        .pages = block->pages,
        .n_pages = block->n_pages,
        .n_rows = (uint32_t)tile->n_rows,
        .after = block->after,
        .n_after = block->n_after,
        .exact = call->options.exact,
        .q = lane->q,
        .scale = call->options.scale,
        .softcap = call->options.softcap,
        .shift = lane->shift,
        .m = to->m,
        .l = to->l,
        .o = to->o,
        .work = lane->work,
    };
}

/* The partial result of a block; masses is NULL or where what they are made of goes. */
static void attend_block(const struct call *call, const struct tile *tile, const struct lane *lane,
                         int32_t i, const struct kvc_attend_part *to,
                         const struct kvc_attend_masses *masses)
{
    struct block block;
    find_block(call, tile, i, &block);
    if (block.n_pages == 0) { /* no kernel has nothing to do */
        for (int32_t r = 0; r < tile->n_rows; r++) {
            to->m[r] = -INFINITY;
            to->l[r] = 0.0f;
        }
        if (masses)
            memset(masses->l, 0, (size_t)tile->n_rows * KVC_TILE_PAGES * sizeof(float));
        memset(to->o, 0,
               (size_t)tile->n_rows * kvc_attend_stride((size_t)call->cache->params.head_dim_v) *
                   sizeof(float));
        return;
    }
    struct kvc_attend_tile job = kernel_tile(call, tile, &block, lane, to);
    job.masses = masses;
    if (tile->info->tile_rows > KVC_TILE_ROWS)
        call->cache->ctx->k->attend_block(&call->cache->ctx->queue, &job);
    else
        call->cache->ctx->k->attend_pages(&call->cache->ctx->queue, &job);
}

static void merge(const kvc_cache *cache, struct kvc_attend_part *into,
                  const struct kvc_attend_part *part, int32_t n_rows)
{
    cache->ctx->k->merge_parts(&cache->ctx->queue, into, part, (size_t)n_rows,
                               (size_t)cache->params.head_dim_v);
}

/* Adds masses of the pages of a block to the scores of their entries. */
static void add_scores(const struct call *call, const struct tile *tile, const struct block *block,
                       const float *mass)
{
    const kvc_cache *cache = call->cache;
    const int32_t pair = kvc_pair(cache, call->layer, tile->kv_head);
    for (uint32_t p = 0; p < block->n_pages; p++) {
        if (!block->columns[p])
            continue;
        float *scores = kvc_slot_scores(cache, block->columns[p], pair);
        for (uint32_t t = 0; t < block->pages[p].n_rows; t++)
            scores[cache->params.score_mode == KVC_SCORE_TOKEN ? t : 0] +=
                mass[p * KVC_PAGE_ROWS + t];
    }
}

/* ln of what the masses of a token count by: scores decay by letting later masses grow. */
static float log_weight(const kvc_cache *cache, const struct kvc_sequence *seq, int64_t ordinal)
{
    return (float)(ordinal - seq->score_base) * -logf(cache->params.score_decay);
}

/* At most KVC_TILE_ROWS rows, those at the start of the lane. */
static void score_rows(const struct call *call, const struct tile *tile, const struct lane *lane)
{
    for (int32_t r = 0; r < tile->n_rows; r++)
        lane->lse[r] -= log_weight(call->cache, tile->info->seq, query_at(call, tile, r));
    for (int32_t i = 0; i < tile->info->n_blocks; i++) {
        struct block block;
        find_block(call, tile, i, &block);
        if (block.n_pages == 0)
            continue;
        const struct kvc_attend_tile job = kernel_tile(call, tile, &block, lane, &lane->part);
        memset(lane->mass, 0, sizeof(float) * block.n_pages * KVC_PAGE_ROWS);
        call->cache->ctx->k->mass_pages(&call->cache->ctx->queue, &job, lane->lse, lane->mass);
        add_scores(call, tile, &block, lane->mass);
    }
}

static void score_tile(const struct call *call, const struct tile *tile, const struct lane *lane)
{
    const size_t stride = kvc_attend_stride((size_t)call->cache->params.head_dim_k);
    for (int32_t r = 0; r < tile->n_rows; r += KVC_TILE_ROWS) {
        struct tile part = *tile;
        struct lane at = *lane;
        part.first += r;
        part.n_rows = kvc_min32(tile->n_rows - r, KVC_TILE_ROWS);
        at.q += (size_t)r * stride;
        at.lse += r;
        at.shift = lane->shift ? lane->shift + r : NULL;
        score_rows(call, &part, &at);
    }
}

/* A tile over all blocks, one after the other. */
static void attend_tile(const struct call *call, const struct tile *tile, struct lane *lane)
{
    load_q(call, tile, lane);
    attend_block(call, tile, lane, 0, &lane->sum, NULL);
    for (int32_t i = 1; i < tile->info->n_blocks; i++) {
        attend_block(call, tile, lane, i, &lane->part, NULL);
        merge(call->cache, &lane->sum, &lane->part, tile->n_rows);
    }
    finish(call->cache, tile, &lane->sum, lane->lse);
    if (call->scores)
        score_tile(call, tile, lane);
}

/* Rows of the parts that a tile owns; only single query tokens are split. */
static size_t part_row(const kvc_cache *cache, const struct tile *tile)
{
    return (size_t)tile->kv_head * (size_t)cache->group + (size_t)tile->first;
}

/* The tiles of a head add to the same scores, so that they are one unit. */
static bool is_whole(const struct call *call, const struct kvc_attend_info *info)
{
    return call->scores && !info->split;
}

static size_t units_of(const struct call *call, const struct kvc_attend_info *info)
{
    const size_t heads = (size_t)call->cache->params.n_kv_heads;
    if (is_whole(call, info))
        return heads;
    return heads * (size_t)info->n_tiles * (info->split ? (size_t)info->n_blocks : 1);
}

static void run_unit(const struct call *call, struct lane *lane, size_t unit)
{
    const kvc_cache *cache = call->cache;
    size_t low = 0, high = call->n_items; /* the last item that begins at or before the unit */
    while (high - low > 1) {
        const size_t mid = (low + high) / 2;
        if (cache->infos[mid].first_unit <= unit)
            low = mid;
        else
            high = mid;
    }
    const struct kvc_attend_info *info = &cache->infos[low];
    int32_t i = (int32_t)(unit - info->first_unit);
    if (is_whole(call, info)) {
        for (int32_t t = 0; t < info->n_tiles; t++) {
            const struct tile tile = tile_at(cache, info, i, t);
            attend_tile(call, &tile, lane);
        }
        return;
    }
    const int32_t block = info->split ? i % info->n_blocks : 0;
    i = info->split ? i / info->n_blocks : i;
    const struct tile tile = tile_at(cache, info, i / info->n_tiles, i % info->n_tiles);
    if (!info->split) {
        attend_tile(call, &tile, lane);
        return;
    }
    const size_t part = info->first_part + (size_t)block, row = part_row(cache, &tile);
    const struct kvc_attend_part to = part_at(cache, part, row);
    const struct kvc_attend_masses masses = part_masses(cache, part, row, (size_t)tile.n_rows);
    load_q(call, &tile, lane);
    attend_block(call, &tile, lane, block, &to, call->scores ? &masses : NULL);
}

static void run_lane(void *arg, size_t i)
{
    const struct call *call = arg;
    struct lane lane = lane_at(call->cache, i);
    for (size_t unit = i; unit < call->n_units; unit += call->n_lanes)
        run_unit(call, &lane, unit);
}

/* Where the masses of the pages of a block are added; NULL: nowhere. */
static void find_masses(const struct call *call, const struct tile *tile, int32_t i,
                        float *mass[KVC_TILE_PAGES])
{
    const kvc_cache *cache = call->cache;
    const struct kvc_sequence *seq = tile->info->seq;
    const int32_t pair = kvc_pair(cache, call->layer, tile->kv_head);
    const int32_t first = i * KVC_TILE_PAGES - (cache->params.sink_tokens > 0);
    for (int32_t p = 0; p < KVC_TILE_PAGES; p++) {
        const int32_t slot = first + p;
        mass[p] = slot < 0 || slot >= seq->n_slots
                      ? NULL
                      : kvc_slot_scores(cache, kvc_slot(cache, seq, slot), pair);
        for (size_t at = 0; at < cache->score_bytes && mass[p]; at += 64) /* they lie far apart */
            __builtin_prefetch((const char *)mass[p] + at, 1);
    }
}

/* Masses of one tile of one query token, from the partial results. */
static void score_parts(const struct call *call, const struct tile *tile, float *lse)
{
    const kvc_cache *cache = call->cache;
    const struct kvc_attend_info *info = tile->info;
    float *mass[2][KVC_TILE_PAGES];
    for (int32_t r = 0; r < tile->n_rows; r++)
        lse[r] -= log_weight(cache, info->seq, info->seq->n_tokens - 1);
    find_masses(call, tile, 0, mass[0]);
    for (int32_t i = 0; i < info->n_blocks; i++) {
        const size_t n = (size_t)tile->n_rows;
        const struct kvc_attend_masses from =
            part_masses(cache, info->first_part + (size_t)i, part_row(cache, tile), n);
        find_masses(call, tile, i + 1, mass[(i + 1) % 2]);
        cache->ctx->k->mass_parts(&cache->ctx->queue, &from, n, lse, mass[i % 2]);
    }
}

/* Adds up the blocks of one KV head of one item and writes its output. */
static void run_merge(void *arg, size_t i)
{
    const struct call *call = arg;
    const kvc_cache *cache = call->cache;
    const size_t heads = (size_t)cache->params.n_kv_heads;
    const struct kvc_attend_info *info = &cache->infos[i / heads];
    float lse[KVC_TILE_ROWS];

    for (int32_t t = 0; t < info->n_tiles && info->split; t++) {
        const struct tile tile = tile_at(cache, info, (int32_t)(i % heads), t);
        const size_t row = part_row(cache, &tile);
        struct kvc_attend_part sum = part_at(cache, info->first_part, row);
        for (int32_t b = 1; b < info->n_blocks; b++) {
            const struct kvc_attend_part part = part_at(cache, info->first_part + (size_t)b, row);
            merge(cache, &sum, &part, tile.n_rows);
        }
        finish(cache, &tile, &sum, lse);
        if (call->scores)
            score_parts(call, &tile, lse);
    }
}

/* Where the probe row of an ordinal goes: its own place, or that of the smallest one, if smaller.
 */
static int32_t probe_place(const int64_t *ordinals, int32_t n, int64_t ordinal)
{
    int32_t place = 0;
    for (int32_t i = 0; i < n && ordinals[place] != ordinal; i++)
        if (ordinals[i] == ordinal || ordinals[i] < ordinals[place])
            place = i;
    return ordinals[place] <= ordinal ? place : -1;
}

/* Keeps the query rows of the last probe_rows tokens. */
static void keep_probes(const struct call *call, const struct kvc_attend_info *info)
{
    const kvc_cache *cache = call->cache;
    const kvc_cache_params *p = &cache->params;
    const size_t d = (size_t)p->head_dim_k, row = (size_t)p->n_heads * d;
    const size_t first =
        ((size_t)kvc_seq_index(cache, info->seq) * (size_t)p->n_layers + (size_t)call->layer) *
        (size_t)p->probe_rows;
    struct kvc_store_counts ignored = {0};

    cache->probe_uses[call->layer] =
        (struct kvc_probe_use){call->options.scale, call->options.softcap, call->options.window};
    for (int32_t t = info->n_q - kvc_min32(info->n_q, p->probe_rows); t < info->n_q; t++) {
        const int64_t ordinal = info->seq->n_tokens - info->n_q + t;
        const int32_t place = probe_place(cache->probe_ordinals + first, p->probe_rows, ordinal);
        if (place < 0)
            continue;
        const size_t at = first + (size_t)place;
        const struct stretch s = {.token = (size_t)t, .n = p->n_heads};
        const struct kvc_rows rows = head_rows(info->item->q, &s);
        cache->ctx->k->store_rows(&cache->ctx->queue, &rows, cache->probes + at * row, d, d,
                                  &ignored);
        cache->probe_ordinals[at] = ordinal;
    }
}

void kvc_attend_options_init(const kvc_cache *cache, kvc_attend_options *options,
                             size_t struct_size)
{
    const kvc_attend_options defaults = {
        .struct_size = sizeof(defaults),
        .scale = cache ? 1.0f / sqrtf((float)cache->params.head_dim_k) : 1.0f,
    };
    kvc_struct_init(options, struct_size, &defaults, sizeof(defaults));
}

static bool options_ok(const kvc_attend_options *o)
{
    return isfinite(o->scale) && isfinite(o->softcap) && o->softcap >= 0.0f && o->window >= 0;
}

static bool item_ok(const kvc_cache *cache, const kvc_attend_item *item, int32_t layer)
{
    const kvc_cache_params *p = &cache->params;
    const struct kvc_sequence *seq = kvc_seq_find(cache, item->seq);
    return seq && seq->appended[layer] == seq->n_tokens && kvc_view_ok(item->q) &&
           kvc_view_ok(item->out) && kvc_view_distinct(item->out) &&
           item->q->n_heads == (size_t)p->n_heads && item->out->n_heads == (size_t)p->n_heads &&
           item->q->head_dim == (size_t)p->head_dim_k &&
           item->out->head_dim == (size_t)p->head_dim_v &&
           item->q->n_tokens == item->out->n_tokens &&
           item->q->n_tokens <= (size_t)(seq->n_tokens - seq->merged_end) &&
           item->q->n_tokens <= (size_t)(INT32_MAX - KVC_BLOCK_ROWS) / (size_t)cache->group;
}

/* Largest ln of a weight: before it is passed, all scores of the sequence are scaled down. */
static const float max_log_weight = 40.0f;

void kvc_scores_rebase(const kvc_cache *cache, struct kvc_sequence *seq, int32_t base)
{
    const float weight = log_weight(cache, seq, base);
    const float factor = expf(-weight < max_log_weight ? -weight : max_log_weight);
    const size_t n = (size_t)cache->n_pairs * cache->score_bytes / sizeof(float);

    for (int32_t slot = 0; slot < seq->n_slots; slot++) {
        float *scores = kvc_slot_scores(cache, kvc_slot(cache, seq, slot), 0);
        for (size_t i = 0; i < n; i++)
            scores[i] *= factor;
    }
    seq->score_base = base;
}

/* Fills the infos of the items that have work. */
static void plan(struct call *call, const kvc_attend_item *items, size_t n_items)
{
    kvc_cache *cache = call->cache;
    const int32_t strip = cache->params.sink_tokens > 0;
    const size_t step = n_items ? items->struct_size : 0;

    for (size_t i = 0; i < n_items; i++) {
        const kvc_attend_item *item =
            (const kvc_attend_item *)(const void *)((const char *)items + i * step);
        struct kvc_sequence *seq = kvc_seq_find(cache, item->seq);
        if (item->q->n_tokens == 0)
            continue;
        if (call->scores && log_weight(cache, seq, seq->n_tokens - 1) > max_log_weight)
            kvc_scores_rebase(cache, seq, seq->n_tokens - 1);
        struct kvc_attend_info *info = &cache->infos[call->n_items++];
        *info = (struct kvc_attend_info){
            .seq = seq,
            .item = item,
            .n_q = (int32_t)item->q->n_tokens,
            .n_pages = seq->n_slots + strip,
            .first_unit = call->n_units,
            .first_part = call->n_parts,
        };
        info->n_blocks = (info->n_pages + KVC_TILE_PAGES - 1) / KVC_TILE_PAGES;
        info->n_blocks = info->n_blocks ? info->n_blocks : 1;
        const int32_t n_rows = info->n_q * cache->group;
        info->tile_rows =
            info->n_q > 1 && n_rows > KVC_TILE_ROWS ? block_rows(&cache->params) : KVC_TILE_ROWS;
        info->n_tiles = (n_rows + info->tile_rows - 1) / info->tile_rows;
        info->split = info->n_q == 1;
        call->n_parts += info->split ? (size_t)info->n_blocks : 0;
        call->n_units += units_of(call, info);
    }
}

kvc_status kvc_attend_batch(kvc_cache *cache, int32_t layer, const kvc_attend_item *items,
                            size_t n_items, const kvc_attend_options *options)
{
    KVC_CHECK(cache && layer >= 0 && layer < cache->params.n_layers && (items || n_items == 0) &&
                  n_items <= (size_t)cache->params.max_sequences,
              KVC_E_ARG);
    struct call call = {.cache = cache, .layer = layer};
    kvc_attend_options_default(cache, &call.options);
    if (options)
        KVC_TRY(
            kvc_struct_read(&call.options, sizeof(call.options), options, sizeof(call.options)));
    KVC_CHECK(options_ok(&call.options), KVC_E_ARG);
    cache->n_calls++;
    for (size_t i = 0; i < n_items; i++) {
        const kvc_attend_item *item =
            (const kvc_attend_item *)(const void *)((const char *)items + i * items->struct_size);
        KVC_CHECK(item->struct_size >= sizeof(*item) && item->struct_size == items->struct_size &&
                      item_ok(cache, item, layer),
                  KVC_E_ARG);
        struct kvc_sequence *seq = kvc_seq_find(cache, item->seq);
        KVC_CHECK(seq->in_call != cache->n_calls, KVC_E_ARG);
        seq->in_call = cache->n_calls;
    }

    call.scores = call.options.accumulate && cache->params.score_mode != KVC_SCORE_NONE;
    plan(&call, items, n_items);
    for (size_t i = 0; i < call.n_items && !cache->transform.ready; i++)
        kvc_transform_watch(cache, layer, cache->infos[i].seq, cache->infos[i].item->q);
    call.n_lanes = call.n_units < KVC_LANES ? call.n_units : KVC_LANES;
    kvc_ctx_parallel(cache->ctx, call.n_lanes, run_lane, &call);
    if (call.n_parts > 0)
        kvc_ctx_parallel(cache->ctx, call.n_items * (size_t)cache->params.n_kv_heads, run_merge,
                         &call);
    for (size_t i = 0; i < call.n_items && cache->params.probe_rows > 0; i++)
        keep_probes(&call, &cache->infos[i]);
    return KVC_OK;
}

kvc_status kvc_attend(kvc_cache *cache, kvc_seq seq, int32_t layer, const kvc_view *q,
                      const kvc_attend_options *options, const kvc_view *out, float *lse)
{
    const kvc_attend_item item = {
        .struct_size = sizeof(item), .seq = seq, .q = q, .out = out, .lse = lse};
    return kvc_attend_batch(cache, layer, &item, 1, options);
}
