/* map.c - maps: what a compression did to each row. */
#include <string.h>

#include "check.h"
#include "choose.h"

struct kvc_map {
    kvc_ctx *ctx;
    int32_t n_layers, n_kv_heads, max_rows;
    int32_t *n_rows;       /* [n_pairs] */
    kvc_token_fate *fates; /* [n_pairs][max_rows] */
};

kvc_status kvc_map_create(const kvc_cache *cache, int32_t max_tokens, kvc_map **out)
{
    KVC_CHECK(out, KVC_E_ARG);
    *out = NULL;
    KVC_CHECK(cache && max_tokens >= 1, KVC_E_ARG);
    struct kvc_arena arena = {0};
    const size_t n_pairs = (size_t)cache->n_pairs;
    kvc_ctx *ctx = cache->ctx;
    for (int pass = 0; pass < 2; pass++) {
        kvc_map *map = kvc_arena_take(&arena, 1, sizeof(*map), 64);
        int32_t *n_rows = kvc_arena_take(&arena, n_pairs, sizeof(*n_rows), 64);
        kvc_token_fate *fates =
            kvc_arena_take(&arena, n_pairs, (size_t)max_tokens * sizeof(*fates), 64);
        if (map) {
            memset(n_rows, 0, n_pairs * sizeof(*n_rows));
            *map = (kvc_map){
                ctx, cache->params.n_layers, cache->params.n_kv_heads, max_tokens, n_rows, fates};
            *out = map;
            break;
        }
        KVC_CHECK(!arena.overflow && arena.used <= PTRDIFF_MAX, KVC_E_ARG);
        arena.base = ctx->mem.alloc(ctx->mem.user, arena.used, 64);
        KVC_CHECK(arena.base, KVC_E_NOMEM);
        arena.used = 0;
    }
    return KVC_OK;
}

void kvc_map_destroy(kvc_map *map)
{
    if (map)
        map->ctx->mem.free(map->ctx->mem.user, map);
}

kvc_status kvc_explain(const kvc_map *map, int32_t layer, int32_t kv_head, size_t max_rows,
                       kvc_token_fate *fates, size_t *n_rows)
{
    KVC_CHECK(map && n_rows && layer >= 0 && layer < map->n_layers && kv_head >= 0 &&
                  kv_head < map->n_kv_heads,
              KVC_E_ARG);
    const size_t pair = (size_t)layer * (size_t)map->n_kv_heads + (size_t)kv_head;
    const size_t n = (size_t)map->n_rows[pair];
    KVC_CHECK(!fates || n <= max_rows, KVC_E_ARG);
    if (fates)
        memcpy(fates, map->fates + pair * (size_t)map->max_rows, n * sizeof(*fates));
    *n_rows = n;
    return KVC_OK;
}

bool kvc_map_holds(const kvc_map *map, const kvc_cache *cache, const struct kvc_sequence *seq)
{
    return map->n_layers == cache->params.n_layers && map->n_kv_heads == cache->params.n_kv_heads &&
           kvc_most_rows(cache, seq) <= map->max_rows;
}

static kvc_token_fate *fates_of(const kvc_map *map, int32_t pair)
{
    return map->fates + (size_t)pair * (size_t)map->max_rows;
}

/* Whether token i has a row, as a sink or in a page. */
static bool has_row(const struct kvc_choice *c, const uint64_t *live, int32_t i)
{
    return kvc_marked(live, i) || kvc_is_sink(c->seq, kvc_fact(c->cache, c->seq, i)->ordinal);
}

void kvc_map_begin(kvc_map *map, const struct kvc_choice *c)
{
    for (int32_t pair = 0; pair < c->cache->n_pairs; pair++) {
        const uint64_t *live = kvc_choice_bits(c, c->live, pair);
        kvc_token_fate *fates = fates_of(map, pair);
        int32_t n = 0;
        for (int32_t i = 0; i < c->n; i++) {
            if (!has_row(c, live, i))
                continue;
            fates[n] = (kvc_token_fate){
                .ordinal = kvc_fact(c->cache, c->seq, i)->ordinal,
                .old_row = n,
                .new_row = -1,
                .partner = -1,
                .fate = kvc_marked(live, i) ? KVC_FATE_KEPT : KVC_FATE_SINK,
            };
            n++;
        }
        map->n_rows[pair] = n;
    }
}

void kvc_map_fates(kvc_map *map, const struct kvc_choice *c, int32_t pair)
{
    const uint64_t *live = kvc_choice_bits(c, c->live, pair);
    const uint64_t *heavy = kvc_choice_bits(c, c->heavy, pair);
    kvc_token_fate *fate = fates_of(map, pair);
    for (int32_t i = 0; i < c->n; i++) {
        if (!has_row(c, live, i))
            continue;
        if (kvc_marked(live, i)) {
            fate->score = c->scores[i];
            fate->fate = c->fates[i];
            fate->heavy = kvc_marked(heavy, i);
        }
        fate++;
    }
}

void kvc_map_merges(kvc_map *map, const struct kvc_choice *c, int32_t pair)
{
    const uint64_t *live = kvc_choice_bits(c, c->live, pair);
    kvc_token_fate *fate = fates_of(map, pair);
    for (int32_t i = 0; i < c->n; i++) {
        if (!has_row(c, live, i))
            continue;
        const int32_t partner = c->head[i] != i ? c->head[i] : c->next[i];
        if (partner >= 0 && kvc_marked(live, i)) {
            fate->fate = c->head[i] != i ? KVC_FATE_MERGED : KVC_FATE_ABSORBED;
            fate->partner = kvc_fact(c->cache, c->seq, partner)->ordinal;
        }
        fate++;
    }
}

/* The row with an ordinal among those that are left, or -1. */
static int32_t find_row(const kvc_token_fate *fates, int32_t n, int32_t ordinal)
{
    int32_t low = 0, high = n;
    while (low < high) {
        const int32_t mid = low + (high - low) / 2;
        if (fates[mid].ordinal < ordinal)
            low = mid + 1;
        else
            high = mid;
    }
    return low < n && fates[low].ordinal == ordinal ? fates[low].new_row : -1;
}

void kvc_map_end(kvc_map *map, const kvc_cache *cache)
{
    for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
        kvc_token_fate *fates = fates_of(map, pair);
        const int32_t n = map->n_rows[pair];
        int32_t row = 0;
        for (int32_t i = 0; i < n; i++) {
            const uint8_t fate = fates[i].fate;
            const bool gone =
                fate == KVC_FATE_PRUNED || fate == KVC_FATE_EVICTED || fate == KVC_FATE_MERGED;
            fates[i].new_row = gone ? -1 : row++;
        }
        for (int32_t i = 0; i < n; i++)
            if (fates[i].fate == KVC_FATE_MERGED)
                fates[i].new_row = find_row(fates, n, fates[i].partner);
    }
}
