/* probe.c - what the kept query rows see: attention masses of rows, and the error of a choice. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "choose.h"
#include "kernels/exp.h"

/* Rows of a pair in one place. */
struct part {
    const struct kvc_page_layout *layout;
    const uint8_t *data;
    const int32_t *ordinals; /* NULL: consecutive from start */
    const float *bias;
    int32_t start, n_rows;
    uint64_t live;
};

static struct part strip_part(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t pair)
{
    return (struct part){
        .layout = &cache->layouts[KVC_LAYOUT_STRIP],
        .data = kvc_strip(cache, seq, pair),
        .n_rows = kvc_min32(seq->n_tokens, cache->params.sink_tokens),
        .live = seq->strip_live,
    };
}

static struct part column_part(const kvc_cache *cache, const struct kvc_column *column,
                               int32_t pair)
{
    const struct kvc_entry *e = &column->entries[pair];
    if (e->page < 0)
        return (struct part){.live = 0};
    const struct kvc_groups *groups = kvc_page_groups(cache, e->page);
    return (struct part){
        .layout = kvc_page_layout_of(cache, e->page),
        .data = kvc_page_data(cache, e->page),
        .ordinals = kvc_page_ordinals(cache, e->page),
        .bias = groups ? groups->bias : NULL,
        .start = column->first,
        .n_rows = e->n_rows,
        .live = e->live,
    };
}

static int32_t n_parts_now(const struct kvc_sequence *seq)
{
    return seq->n_slots + 1;
}

static struct part part_now(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t pair,
                            int32_t i)
{
    return i == 0 ? strip_part(cache, seq, pair)
                  : column_part(cache, kvc_slot(cache, seq, i - 1), pair);
}

/* The same once a choice is carried out: the strip, sealed slots less what goes, the new columns,
 * and the slots behind. */
static int32_t n_parts_after(const struct kvc_choice *c)
{
    return 1 + c->seq->n_slots - (c->end - c->seq->first_unsealed) + c->n_columns;
}

static struct part part_after(const struct kvc_choice *c, int32_t pair, int32_t i)
{
    const struct kvc_sequence *seq = c->seq;
    if (i == 0)
        return strip_part(c->cache, seq, pair);
    int32_t slot = i - 1;
    if (slot >= seq->first_unsealed && slot < seq->first_unsealed + c->n_columns)
        return column_part(c->cache,
                           kvc_column_at(c->cache, c->columns[slot - seq->first_unsealed]), pair);
    if (slot >= seq->first_unsealed)
        slot += c->end - seq->first_unsealed - c->n_columns;
    const struct kvc_column *column = kvc_slot(c->cache, seq, slot);
    struct part part = column_part(c->cache, column, pair);
    if (part.live)
        part.live = kvc_rows_staying(c, column, pair);
    return part;
}

/* Query rows of one KV head: query row r of probe p is row p * group + r. */
struct probes {
    const kvc_cache *cache;
    struct kvc_probe_use use;
    const int64_t *ordinals; /* [probe_rows] of the ring, -1: none */
    enum kvc_probe_part part;
    int64_t middle;                 /* ordinal of the first row of the newer half */
    const uint16_t *q;              /* [probe_rows][n_heads][head_dim_k] */
    int32_t layer, kv_head, n_rows; /* rows: probe_rows * group, empty ones too */
};

static struct probes find_probes(const kvc_cache *cache, const struct kvc_sequence *seq,
                                 int32_t pair, enum kvc_probe_part part)
{
    const kvc_cache_params *p = &cache->params;
    const size_t layer = (size_t)(pair / p->n_kv_heads);
    const size_t first =
        ((size_t)kvc_seq_index(cache, seq) * (size_t)p->n_layers + layer) * (size_t)p->probe_rows;
    int64_t newest = -1;
    for (int32_t i = 0; i < p->probe_rows; i++)
        if (cache->probe_ordinals[first + (size_t)i] > newest)
            newest = cache->probe_ordinals[first + (size_t)i];
    return (struct probes){
        .cache = cache,
        .middle = newest + 1 - p->probe_rows / 2,
        .use = cache->probe_uses[layer],
        .part = part,
        .ordinals = cache->probe_ordinals + first,
        .q = cache->probes + first * (size_t)p->n_heads * (size_t)p->head_dim_k,
        .layer = (int32_t)layer,
        .kv_head = pair % p->n_kv_heads,
        .n_rows = p->probe_rows * cache->group,
    };
}

/* Whether a place of the ring holds a row that counts. */
static bool counts(const struct probes *probes, int32_t p)
{
    const int64_t ordinal = probes->ordinals[p];
    return ordinal >= 0 && (probes->part == KVC_PROBES_ALL ||
                            (ordinal < probes->middle) == (probes->part == KVC_PROBES_OLDER));
}

/* A tile of query rows as floats; places that do not count are left out. */
struct tile {
    int32_t n;
    int64_t ordinals[KVC_TILE_ROWS];
    float shift_room[KVC_TILE_ROWS];
    const float *shift; /* of the logits, or NULL */
};

static void load_tile(const struct probes *probes, int32_t *at, float *q, struct tile *tile)
{
    const kvc_cache *cache = probes->cache;
    const int32_t pair = kvc_pair(cache, probes->layer, probes->kv_head);
    const size_t d = (size_t)cache->params.head_dim_k, stride = kvc_attend_stride(d);
    const size_t n_heads = (size_t)cache->params.n_heads;

    for (tile->n = 0; *at < probes->n_rows && tile->n < KVC_TILE_ROWS; ++*at) {
        const int32_t p = *at / cache->group, head = *at % cache->group;
        if (!counts(probes, p))
            continue;
        const size_t row = (size_t)p * n_heads + (size_t)(probes->kv_head * cache->group + head);
        const struct kvc_rows src = {probes->q + row * d, KVC_DTYPE_F16, d, 1, d};
        cache->ctx->k->load_rows(&cache->ctx->queue, &src, q + (size_t)tile->n * stride, stride,
                                 stride);
        tile->ordinals[tile->n++] = probes->ordinals[p];
    }
    tile->shift = NULL;
    if (tile->n > 0)
        tile->shift = kvc_transform_queries(cache, pair, q, (size_t)tile->n, probes->use.scale,
                                            tile->shift_room);
}

/* The rows of a part that each query row of a tile sees; false: none. */
static bool see(const struct probes *probes, const struct tile *tile, const struct part *part,
                uint64_t *masks)
{
    uint64_t any = 0;
    for (int32_t r = 0; r < tile->n && part->live; r++) {
        const int64_t last = tile->ordinals[r] + 1, window = probes->use.window;
        const int64_t first = window > 0 && window < last ? last - window : 0;
        masks[r] =
            part->live & kvc_rows_range(part->ordinals, part->start, part->n_rows, first, last);
        any |= masks[r];
    }
    return any != 0;
}

/* Keys that are read and multiplied at a time. */
enum { N_KEYS = 16 };

/* Logits of a tile for the rows of a part, [rows][64]; keys is room for N_KEYS. */
static void logits(const struct probes *probes, const struct tile *tile, const struct part *part,
                   const float *q, float *keys, float *s)
{
    const kvc_cache *cache = probes->cache;
    const kvc_ctx *ctx = cache->ctx;
    const size_t d = (size_t)cache->params.head_dim_k, stride = kvc_attend_stride(d);

    memset(s, 0, (size_t)tile->n * KVC_PAGE_ROWS * sizeof(*s));
    memset(keys, 0, N_KEYS * stride * sizeof(*keys));
    for (int32_t t = 0; t < part->n_rows; t += N_KEYS) {
        const int32_t n = kvc_min32(part->n_rows - t, N_KEYS);
        if (!(part->live >> t & 0xffff))
            continue;
        ctx->k->read_page(&ctx->queue, part->layout, part->data, (uint32_t)t, (uint32_t)n, keys,
                          stride, NULL, 0);
        ctx->k->dot_rows(&ctx->queue, q, (size_t)tile->n, keys, (size_t)n, d, s + t, KVC_PAGE_ROWS);
    }
    for (int32_t r = 0; r < tile->n; r++, s += KVC_PAGE_ROWS)
        for (int32_t t = 0; t < part->n_rows; t++) {
            s[t] = s[t] * probes->use.scale + (tile->shift ? tile->shift[r] : 0.0f);
            if (probes->use.softcap > 0.0f)
                s[t] = probes->use.softcap * tanhf(s[t] / probes->use.softcap);
            if (part->bias)
                s[t] += part->bias[t];
        }
}

/* Scratch of a task: a lane of attention, used otherwise. */
struct room {
    float *q, *keys, *s;
};

static struct room room_at(const kvc_cache *cache, size_t lane)
{
    const size_t stride = kvc_attend_stride((size_t)cache->params.head_dim_k);
    float *at = cache->lanes + lane * cache->lane_floats;
    struct room room;
    room.q = at;
    room.keys = room.q + KVC_TILE_ROWS * stride;
    room.s = room.keys + N_KEYS * stride;
    return room;
}

/* The log-sum-exp of each row of a tile over everything that it sees. */
static void tile_lse(const struct probes *probes, const struct kvc_sequence *seq, int32_t pair,
                     const struct tile *tile, const struct room *room, float *lse)
{
    const kvc_cache *cache = probes->cache;
    float m[KVC_TILE_ROWS], l[KVC_TILE_ROWS] = {0};
    uint64_t masks[KVC_TILE_ROWS];

    for (int32_t r = 0; r < KVC_TILE_ROWS; r++)
        m[r] = -INFINITY;
    for (int32_t i = 0; i < n_parts_now(seq); i++) {
        const struct part part = part_now(cache, seq, pair, i);
        if (!see(probes, tile, &part, masks))
            continue;
        logits(probes, tile, &part, room->q, room->keys, room->s);
        cache->ctx->k->lse_block(&cache->ctx->queue, room->s, masks, (size_t)tile->n, m, l);
    }
    for (int32_t r = 0; r < tile->n; r++)
        lse[r] = m[r] + logf(l[r]);
}

/* Adds masses of the rows of a part to those of their tokens. */
static void add_masses(const kvc_cache *cache, const struct kvc_sequence *seq,
                       const struct part *part, const float *from, float *mass)
{
    for (uint64_t left = part->live; left; left &= left - 1) {
        const int r = __builtin_ctzll(left);
        const int32_t ordinal = part->ordinals ? part->ordinals[r] : part->start + r;
        const int32_t i = kvc_facts_find(cache, seq, ordinal);
        mass[i] += from[r];
    }
}

void kvc_probe_mass(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t pair,
                    enum kvc_probe_part part_of_rows, size_t lane, float *mass)
{
    const struct probes probes = find_probes(cache, seq, pair, part_of_rows);
    const struct room room = room_at(cache, lane);
    float lse[KVC_TILE_ROWS], weights[KVC_TILE_ROWS];
    uint64_t masks[KVC_TILE_ROWS];
    int32_t n = 0;

    for (int32_t p = 0; p < cache->params.probe_rows; p++)
        n += counts(&probes, p) ? cache->group : 0;
    for (int32_t r = 0; r < KVC_TILE_ROWS; r++)
        weights[r] = 1.0f / (float)n;
    for (int32_t at = 0; at < probes.n_rows;) {
        struct tile tile;
        load_tile(&probes, &at, room.q, &tile);
        if (tile.n == 0)
            break;
        tile_lse(&probes, seq, pair, &tile, &room, lse);
        for (int32_t i = 0; i < n_parts_now(seq); i++) {
            const struct part part = part_now(cache, seq, pair, i);
            float block[KVC_PAGE_ROWS] = {0};
            if (!see(&probes, &tile, &part, masks))
                continue;
            logits(&probes, &tile, &part, room.q, room.keys, room.s);
            cache->ctx->k->mass_block(&cache->ctx->queue, room.s, masks, lse, weights,
                                      (size_t)tile.n, block);
            add_masses(cache, seq, &part, block, mass);
        }
    }
}

kvc_status kvc_seq_score_rows(kvc_cache *cache, kvc_seq seq, int32_t layer, int32_t kv_head,
                              size_t max_rows, float *scores, size_t *n_rows)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && n_rows && layer >= 0 && layer < cache->params.n_layers && kv_head >= 0 &&
                  kv_head < cache->params.n_kv_heads && s->appended[layer] == s->n_tokens,
              KVC_E_ARG);
    const size_t n = (size_t)kvc_seq_n_rows(cache, seq, layer, kv_head);
    KVC_CHECK(n <= max_rows && (scores || n == 0), KVC_E_ARG);

    const int32_t pair = kvc_pair(cache, layer, kv_head);
    float *mass = cache->choice->mass;
    uint64_t *there = cache->choice->group;
    memset(mass, 0, (size_t)s->n_facts * sizeof(*mass));
    memset(there, 0, ((size_t)s->n_facts + 63) / 64 * sizeof(*there));
    kvc_probe_mass(cache, s, pair, KVC_PROBES_ALL, 0, mass);
    for (int32_t i = 0; i < n_parts_now(s); i++) {
        const struct part part = part_now(cache, s, pair, i);
        for (uint64_t left = part.live; left; left &= left - 1) {
            const int r = __builtin_ctzll(left);
            const int32_t ordinal = part.ordinals ? part.ordinals[r] : part.start + r;
            kvc_mark(there, kvc_facts_find(cache, s, ordinal));
        }
    }
    for (int32_t i = 0, row = 0; i < s->n_facts; i++)
        if (kvc_marked(there, i))
            scores[row++] = mass[i];
    *n_rows = n;
    return KVC_OK;
}

/* ---- the error of a choice ---- */

/* Outputs of a tile, rows of a stride. */
struct outputs {
    float *o, *part_o; /* sums, and those of one block of pages */
    float m[KVC_TILE_ROWS], l[KVC_TILE_ROWS], part_m[KVC_TILE_ROWS], part_l[KVC_TILE_ROWS];
    bool any;
};

static void attend_parts(const struct probes *probes, const struct tile *tile, const float *q,
                         float *work, const struct kvc_attend_page *pages, uint32_t n_pages,
                         struct outputs *out)
{
    const kvc_ctx *ctx = probes->cache->ctx;
    struct kvc_attend_part sum = {out->m, out->l, out->o};
    const struct kvc_attend_part part = {out->part_m, out->part_l, out->part_o};
    const struct kvc_attend_part *to = out->any ? &part : &sum;
    const struct kvc_attend_tile job = {
        .pages = pages,
        .n_pages = n_pages,
        .n_rows = (uint32_t)tile->n,
        .exact = true,
        .q = q,
        .scale = probes->use.scale,
        .softcap = probes->use.softcap,
        .shift = tile->shift,
        .m = to->m,
        .l = to->l,
        .o = to->o,
        .work = work,
    };
    ctx->k->attend_pages(&ctx->queue, &job);
    if (out->any)
        ctx->k->merge_parts(&ctx->queue, &sum, &part, (size_t)tile->n,
                            (size_t)probes->cache->params.head_dim_v);
    out->any = true;
}

/* Attention of a tile over the rows there are, or over those there will be. */
static void attend_tile(const struct kvc_choice *c, int32_t pair, bool after,
                        const struct probes *probes, const struct tile *tile, const float *q,
                        float *work, struct outputs *out)
{
    const int32_t n_parts = after ? n_parts_after(c) : n_parts_now(c->seq);
    struct kvc_attend_page pages[KVC_TILE_PAGES];
    uint64_t masks[KVC_TILE_PAGES][KVC_TILE_ROWS];
    uint32_t n = 0;

    out->any = false;
    for (int32_t i = 0; i < n_parts; i++) {
        const struct part part =
            after ? part_after(c, pair, i) : part_now(c->cache, c->seq, pair, i);
        if (!see(probes, tile, &part, masks[n]))
            continue;
        pages[n] = (struct kvc_attend_page){
            .data = part.data,
            .layout = part.layout,
            .n_rows = (uint32_t)part.n_rows,
            .slot = n,
            .mask = masks[n],
            .bias = part.bias,
        };
        if (++n == KVC_TILE_PAGES) {
            attend_parts(probes, tile, q, work, pages, n, out);
            n = 0;
        }
    }
    if (n > 0)
        attend_parts(probes, tile, q, work, pages, n, out);
}

static float part_of(const struct outputs *out, size_t row, size_t stride, size_t i)
{
    return out->any && out->l[row] > 0.0f ? out->o[row * stride + i] / out->l[row] : 0.0f;
}

void kvc_probe_error(const struct kvc_choice *c, int32_t pair, enum kvc_probe_part part,
                     size_t lane, double *error)
{
    const kvc_cache *cache = c->cache;
    const struct probes probes = find_probes(cache, c->seq, pair, part);
    const size_t stride = kvc_attend_stride((size_t)cache->params.head_dim_v);
    float *q = cache->lanes + lane * cache->lane_floats;
    float *work = q + KVC_TILE_ROWS * kvc_attend_stride((size_t)cache->params.head_dim_k);
    float *o = cache->build_lanes[lane].outputs;
    const size_t tile_floats = KVC_TILE_ROWS * stride;
    struct outputs before = {.o = o, .part_o = o + tile_floats};
    struct outputs then = {.o = o + 2 * tile_floats, .part_o = before.part_o};

    for (int32_t at = 0; at < probes.n_rows;) {
        struct tile tile;
        load_tile(&probes, &at, q, &tile);
        if (tile.n == 0)
            break;
        attend_tile(c, pair, false, &probes, &tile, q, work, &before);
        attend_tile(c, pair, true, &probes, &tile, q, work, &then);
        for (size_t r = 0; r < (size_t)tile.n; r++)
            for (size_t i = 0; i < (size_t)cache->params.head_dim_v; i++) {
                const double was = (double)part_of(&before, r, stride, i);
                const double is = (double)part_of(&then, r, stride, i);
                error[0] += (is - was) * (is - was);
                error[1] += was * was;
            }
    }
}
