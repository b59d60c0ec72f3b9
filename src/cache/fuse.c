/* fuse.c - which visual tokens merge in the pages that are about to be made. */
#include <string.h>

#include "choose.h"

/* Scratch: the tokens of one image that may merge, and what they have in common. */
struct kvc_fuse_room {
    float *keys;       /* [max][stride] */
    float *similarity; /* triangle */
    float *norms;
    kvc_merge_token *tokens;
    kvc_merge_pair *pairs;
    int32_t *index; /* places in the token table */
    void *ws;
    size_t ws_size;
};

static kvc_view key_view(const kvc_cache *cache, float *keys, size_t n)
{
    const size_t d = (size_t)cache->params.head_dim_k;
    kvc_view view = kvc_view_packed(keys, KVC_DTYPE_F32, n, 1, d);
    view.token_stride = view.head_stride = kvc_attend_stride(d);
    return view;
}

void kvc_fuse_carve(kvc_cache *cache, struct kvc_arena *arena)
{
    const size_t n = (size_t)cache->params.max_merge_tokens;
    const size_t stride = kvc_attend_stride((size_t)cache->params.head_dim_k);
    struct kvc_fuse_room *room = kvc_arena_take(arena, 1, sizeof(*room), 64), dummy;
    float none = 0.0f; /* only the shape counts */
    cache->fuse_room = room;
    room = room ? room : &dummy;
    *room = (struct kvc_fuse_room){0};
    if (n == 0)
        return;
    const kvc_view view = key_view(cache, &none, n);
    size_t similarity = 0, match = 0;
    kvc_merge_similarity_workspace_size(&view, &similarity);
    kvc_merge_match_workspace_size(n, &match);
    room->ws_size = similarity > match ? similarity : match;
    room->keys = kvc_arena_take(arena, n * stride, sizeof(float), 64);
    room->similarity = kvc_arena_take(arena, kvc_merge_triangle(n), sizeof(float), 64);
    room->norms = kvc_arena_take(arena, n, sizeof(float), 64);
    room->tokens = kvc_arena_take(arena, n, sizeof(kvc_merge_token), 64);
    room->pairs = kvc_arena_take(arena, n / 2 + 1, sizeof(kvc_merge_pair), 64);
    room->index = kvc_arena_take(arena, n, sizeof(int32_t), 64);
    room->ws = kvc_arena_take(arena, room->ws_size, 1, 64);
}

/* Ordinals of the slots that are built anew: *first ... *last - 1. */
static void fresh_range(const struct kvc_choice *c, int32_t *first, int32_t *last)
{
    *first = *last = c->seq->n_tokens;
    if (c->end == c->seq->first_unsealed)
        return;
    const struct kvc_column *column = kvc_slot(c->cache, c->seq, c->end - 1);
    *first = kvc_slot(c->cache, c->seq, c->seq->first_unsealed)->first;
    *last = column->first + column->n;
}

/* The rows that all pairs of a group keep, in c->group. */
static void find_common(const struct kvc_choice *c, int32_t first, int32_t last)
{
    memcpy(c->group, kvc_choice_bits(c, c->keep, first), c->words * sizeof(*c->group));
    for (int32_t pair = first + 1; pair < last; pair++)
        for (size_t w = 0; w < c->words; w++)
            c->group[w] &= kvc_choice_bits(c, c->keep, pair)[w];
}

static kvc_merge_token token_of(const struct kvc_choice *c, int32_t pair, int32_t i)
{
    const struct kvc_fact *fact = kvc_fact(c->cache, c->seq, i);
    const struct kvc_row_place at = kvc_find_row(c, pair, i);
    const struct kvc_groups *groups = kvc_page_groups(c->cache, at.column->entries[pair].page);
    return (kvc_merge_token){
        .image = fact->image,
        .row = fact->row,
        .col = fact->col,
        .size = groups ? (float)groups->size[at.row] : 1.0f,
        .bias = groups ? groups->bias[at.row] : 0.0f,
        .mass = c->scores[i],
        .fixed = fact->flags & KVC_TOKEN_KEEP ||
                 fact->ordinal >= c->seq->n_tokens - c->policy->last_tokens ||
                 kvc_marked(kvc_choice_bits(c, c->heavy, pair), i),
    };
}

/* Whether a row stands for as many tokens in all pairs of a group. */
static bool is_alike(const struct kvc_choice *c, int32_t first, int32_t last, int32_t i)
{
    const kvc_merge_token token = token_of(c, first, i);
    for (int32_t pair = first + 1; pair < last && c->seq->merged_end > 0; pair++) {
        const kvc_merge_token other = token_of(c, pair, i);
        if (other.size != token.size || other.bias != token.bias)
            return false;
    }
    return true;
}

/* Collects the tokens of the image of token `begin` that may merge; 0 where there are too many. */
static size_t collect(const struct kvc_choice *c, int32_t first, int32_t last, int32_t begin)
{
    const struct kvc_fuse_room *room = c->cache->fuse_room;
    const int32_t image = kvc_fact(c->cache, c->seq, begin)->image;
    const int32_t near = kvc_fact(c->cache, c->seq, begin)->ordinal + UINT16_MAX / 2;
    int32_t fresh, end;
    size_t n = 0, most = (size_t)c->cache->params.max_merge_tokens;
    float sum = 0.0f;

    fresh_range(c, &fresh, &end);
    for (int32_t i = begin; i < c->n; i++) {
        const struct kvc_fact *fact = kvc_fact(c->cache, c->seq, i);
        if (fact->kind != KVC_TOKEN_VISUAL || fact->image != image)
            continue;
        kvc_mark(c->done, i);
        if (!kvc_marked(c->group, i) || fact->ordinal >= end || fact->ordinal > near ||
            (fact->ordinal < fresh && !c->policy->recode))
            continue;
        if (n >= most) {
            n = most + 1;
            continue;
        }
        room->index[n] = i;
        room->tokens[n] = token_of(c, first, i);
        if (!is_alike(c, first, last, i))
            room->tokens[n].fixed = true;
        sum += room->tokens[n++].mass;
    }
    if (n > most)
        return 0;
    for (size_t m = 0; m < n && c->policy->sink_factor > 0.0f; m++)
        if (room->tokens[m].mass > c->policy->sink_factor * (sum / (float)n))
            room->tokens[m].fixed = true;
    return n;
}

/* Loading the keys of the tokens of an image, as they are merged so far. */
struct loading {
    const struct kvc_choice *c;
    int32_t pair;
    size_t n, n_lanes;
};

static void load_lane(void *arg, size_t lane)
{
    const struct loading *l = arg;
    const struct kvc_fuse_room *room = l->c->cache->fuse_room;
    const size_t stride = kvc_attend_stride((size_t)l->c->cache->params.head_dim_k);
    for (size_t m = lane; m < l->n; m += l->n_lanes) {
        float *key = room->keys + m * stride;
        kvc_load_row(l->c, l->pair, room->index[m], key, NULL, l->c->cache->build_lanes[lane].rows);
        kvc_restore_rows(l->c->cache, l->pair, key, stride, NULL, 0, 1); /* a mean hides cosines */
    }
}

/* The gone row's tokens join the chain of the one that stays; all weights of both are scaled. */
static void join(const struct kvc_choice *c, int32_t stays, float w_stays, int32_t goes,
                 float w_goes)
{
    int32_t last = stays;
    for (int32_t i = stays; i >= 0; i = c->next[i]) {
        c->weight[i] *= w_stays;
        last = i;
    }
    for (int32_t i = goes; i >= 0; i = c->next[i]) {
        c->weight[i] *= w_goes;
        c->head[i] = stays;
    }
    c->next[last] = goes;
}

/* One round over the tokens of an image; returns how many are left. */
static size_t round_of(const struct kvc_choice *c, int32_t first, int32_t last, size_t n)
{
    const kvc_cache *cache = c->cache;
    const struct kvc_fuse_room *room = cache->fuse_room;
    const size_t n_similar = kvc_merge_triangle(n);
    const kvc_view view = key_view(cache, room->keys, n);
    struct loading loading = {.c = c, .n = n, .n_lanes = n < KVC_BUILD_LANES ? n : KVC_BUILD_LANES};
    size_t n_pairs = 0, left = 0;
    float mean = 0.0f;

    memset(room->similarity, 0, n_similar * sizeof(float));
    memset(room->norms, 0, n * sizeof(float));
    for (int32_t pair = first; pair < last; pair++) {
        loading.pair = pair;
        kvc_ctx_parallel(cache->ctx, loading.n_lanes, load_lane, &loading);
        kvc_merge_similarity(cache->ctx, &view, room->tokens, &c->policy->merging, room->similarity,
                             room->norms, room->ws, room->ws_size);
    }
    kvc_merge_match(room->similarity, 1.0f / (float)(last - first), room->norms, room->tokens, n,
                    &c->policy->merging, room->pairs, &n_pairs, room->ws, room->ws_size);
    kvc_merge_mean_mass(room->tokens, n, &mean);
    for (size_t p = 0; p < n_pairs; p++) {
        kvc_merge_token *a = &room->tokens[room->pairs[p].a], *b = &room->tokens[room->pairs[p].b];
        const int32_t i = room->index[room->pairs[p].a], j = room->index[room->pairs[p].b];
        float w_a, w_b;
        bool a_stays;
        kvc_merge_token merged;
        if (kvc_merge_combine(a, b, mean, 0.0f, &c->policy->merging, &w_a, &w_b, &merged,
                              &a_stays) != KVC_OK)
            continue;
        *(a_stays ? a : b) = merged;
        (a_stays ? b : a)->size = 0.0f; /* gone */
        c->bias[a_stays ? i : j] = merged.bias;
        join(c, a_stays ? i : j, a_stays ? w_a : w_b, a_stays ? j : i, a_stays ? w_b : w_a);
    }
    for (size_t m = 0; m < n; m++)
        if (room->tokens[m].size > 0.0f) {
            room->tokens[left] = room->tokens[m];
            room->index[left++] = room->index[m];
        }
    return left;
}

static void fuse_image(const struct kvc_choice *c, int32_t first, int32_t last, int32_t token,
                       int32_t rounds)
{
    size_t n = collect(c, first, last, token);
    for (int32_t round = 0; round < rounds && n >= 2; round++) {
        const size_t left = round_of(c, first, last, n);
        if (left == n)
            break;
        n = left;
    }
}

/* The rows of the new pages of a pair: what the slots to be sealed keep, and rows of older pages
 * that tokens were merged into. */
static void find_built(struct kvc_choice *c, int32_t pair)
{
    uint64_t *built = kvc_choice_bits(c, c->built, pair);
    uint64_t *keep = kvc_choice_bits(c, c->keep, pair);
    int32_t fresh, end;

    fresh_range(c, &fresh, &end);
    memset(built, 0, c->words * sizeof(*built));
    c->n_merged[pair] = 0;
    for (int32_t i = 0; i < c->n; i++) {
        const int32_t ordinal = kvc_fact(c->cache, c->seq, i)->ordinal;
        if (!kvc_marked(keep, i))
            continue;
        if (c->head[i] != i) {
            kvc_unmark(keep, i);
            c->n_merged[pair]++;
            c->n_recoded += ordinal < fresh;
        } else if ((ordinal >= fresh && ordinal < end) || c->next[i] >= 0) {
            kvc_mark(built, i);
            c->n_recoded += ordinal < fresh;
        }
    }
}

void kvc_fuse(struct kvc_choice *c, int32_t group, int32_t rounds)
{
    int32_t first, last;

    kvc_group_pairs(c, group, &first, &last);
    for (int32_t i = 0; i < c->n; i++) {
        c->head[i] = i;
        c->next[i] = -1;
        c->weight[i] = 1.0f;
    }
    if (rounds > 0) {
        if (c->policy->scope != KVC_SCOPE_SHARED)
            kvc_rank(c, group);
        find_common(c, first, last);
        memset(c->done, 0, c->words * sizeof(*c->done));
        for (int32_t i = 0; i < c->n; i++) {
            const struct kvc_fact *fact = kvc_fact(c->cache, c->seq, i);
            if (fact->kind == KVC_TOKEN_VISUAL && fact->image >= 0 && !kvc_marked(c->done, i))
                fuse_image(c, first, last, i, rounds);
        }
    }
    for (int32_t pair = first; pair < last; pair++) {
        find_built(c, pair);
        if (c->map)
            kvc_map_merges(c->map, c, pair);
    }
}
