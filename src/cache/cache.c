/* cache.c - creation: checks, the layout of the budget, precisions, statistics. */
#include <math.h>
#include <string.h>

#include "arena.h"
#include "check.h"
#include "choose.h"

static const kvc_cache_params defaults = {
    .struct_size = sizeof(defaults),
    .max_sequences = 1,
    .max_tokens = 8192,
    .max_sequence_tokens = INT32_MAX,
    .max_append = 512,
    .probe_rows = 16,
    .precision = {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    .scale_window = KVC_PAGE_TOKENS,
    .recent_tokens = 128,
    .sink_tokens = 4,
    .score_decay = 1.0f,
};

void kvc_cache_params_init(kvc_cache_params *params, size_t struct_size)
{
    kvc_struct_init(params, struct_size, &defaults, sizeof(defaults));
}

/* What a preset sets. */
struct preset {
    const char *name;
    kvc_precision precision;
    bool transforms;
};

static const struct preset presets[] = {
    {"f16", {KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN}, false},
    {"int8", {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN}, true},
    {"int4", {KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN}, true},
    {"k6v4", {KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN}, true},
    {"int4-raw", {KVC_INT4, KVC_INT4, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN}, false},
};

kvc_status kvc_cache_params_preset(kvc_cache_params *params, const char *name)
{
    const size_t end = offsetof(kvc_cache_params, online_pages) + sizeof(params->online_pages);
    KVC_CHECK(params && name && params->struct_size >= end, KVC_E_ARG);
    for (size_t i = 0; i < sizeof(presets) / sizeof(*presets); i++) {
        const struct preset *preset = &presets[i];
        if (strcmp(preset->name, name) != 0)
            continue;
        params->precision = preset->precision;
        params->transform =
            preset->transforms ? KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_ROTATE_V : 0;
        params->online_pages = preset->transforms ? 4 : 0;
        return KVC_OK;
    }
    return KVC_E_ARG;
}

static bool in_range(int32_t x, int32_t low, int32_t high)
{
    return x >= low && x <= high;
}

kvc_status kvc_precision_check(const kvc_precision *p)
{
    KVC_CHECK((unsigned)p->k <= KVC_INT6 && (unsigned)p->v <= KVC_INT6, KVC_E_ARG);
    if (p->k != KVC_F16) {
        KVC_CHECK((unsigned)p->k_scale <= KVC_SCALE_LAYER, KVC_E_ARG);
        KVC_CHECK(p->k_scale != KVC_SCALE_LAYER, KVC_E_UNSUPPORTED);
        KVC_CHECK(p->k != KVC_INT6 || p->k_scale == KVC_SCALE_TOKEN, KVC_E_UNSUPPORTED);
    }
    if (p->v != KVC_F16) {
        KVC_CHECK((unsigned)p->v_scale <= KVC_SCALE_LAYER, KVC_E_ARG);
        KVC_CHECK(p->v_scale <= KVC_SCALE_TOKEN && p->v != KVC_INT6, KVC_E_UNSUPPORTED);
    }
    return KVC_OK;
}

static kvc_status check_params(const kvc_cache_params *p)
{
    const int32_t most = INT32_MAX / 4;

    KVC_CHECK(in_range(p->n_layers, 1, 65536) && in_range(p->n_heads, 1, 65536) &&
                  in_range(p->n_kv_heads, 1, p->n_heads) && p->n_heads % p->n_kv_heads == 0,
              KVC_E_ARG);
    KVC_CHECK(p->n_layers <= most / p->n_kv_heads, KVC_E_ARG);
    KVC_CHECK(p->head_dim_k >= 1 && p->head_dim_v >= 1, KVC_E_ARG);
    KVC_CHECK(
        in_range(p->max_sequences, 1, 65536) && in_range(p->max_tokens, 1, most) &&
            p->max_sequence_tokens >= 1 && in_range(p->max_append, 1, most) &&
            in_range(p->max_hold_tokens, 0, most) && in_range(p->probe_rows, 0, 1024) &&
            in_range(p->recent_tokens, 0, most) && in_range(p->sink_tokens, 0, KVC_PAGE_TOKENS) &&
            in_range(p->scale_window, KVC_PAGE_TOKENS, most) &&
            p->scale_window % KVC_PAGE_TOKENS == 0 && (unsigned)p->score_mode <= KVC_SCORE_TOKEN &&
            in_range(p->max_merge_tokens, 0, most) && p->score_decay > 0.0f &&
            p->score_decay <= 1.0f,
        KVC_E_ARG);
    KVC_CHECK(p->head_dim_k <= KVC_MAX_HEAD_DIM && p->head_dim_v <= KVC_MAX_HEAD_DIM,
              KVC_E_UNSUPPORTED);
    KVC_TRY(kvc_precision_check(&p->precision));
    return kvc_transform_check(p);
}

/* The parameters of a caller, checked. */
static kvc_status take_params(const kvc_cache_params *params, kvc_cache_params *out)
{
    *out = defaults;
    KVC_TRY(kvc_struct_read(out, sizeof(*out), params, sizeof(*out)));
    KVC_TRY(check_params(out));
    if (out->on_full) {
        const kvc_cache cache = {.params = *out};
        kvc_policy policy;
        return kvc_policy_check(&cache, out->on_full, true, &policy);
    }
    return KVC_OK;
}

/* A number for each precision: 0 is F16, then INT8 and INT4 in each of their scales, then INT6 in
 * its one scale. */
static uint8_t side_tag(kvc_format format, kvc_scale scale, int n_scales)
{
    switch (format) {
    case KVC_F16: return 0;
    case KVC_INT6: return (uint8_t)(1 + 2 * n_scales);
    default: return (uint8_t)(1 + ((int)format - 1) * n_scales + (int)scale);
    }
}

uint8_t kvc_precision_tag(const kvc_precision *p)
{
    return (uint8_t)(side_tag(p->k, p->k_scale, 3) * 5 + side_tag(p->v, p->v_scale, 2));
}

static void side_of_tag(int tag, int n_scales, uint8_t *format, uint8_t *scale)
{
    *format = (uint8_t)(tag == 0 ? KVC_F16 : 1 + (tag - 1) / n_scales);
    *scale = (uint8_t)(tag == 0              ? KVC_SCALE_HEAD
                       : *format == KVC_INT6 ? KVC_SCALE_TOKEN
                                             : (tag - 1) % n_scales);
}

static void make_layouts(struct kvc_page_layout *layouts, const kvc_cache_params *p)
{
    for (int tag = 0; tag < KVC_N_TAGS; tag++) {
        uint8_t k, ks, v, vs;
        side_of_tag(tag / 5, 3, &k, &ks);
        side_of_tag(tag % 5, 2, &v, &vs);
        layouts[tag] =
            kvc_page_layout_make(p->head_dim_k, p->head_dim_v, k, ks, v, vs, false, KVC_PAGE_ROWS);
        struct kvc_page_layout moved = layouts[tag];
        moved.ordinals = moved.n_bytes;
        moved.n_bytes += KVC_PAGE_ROWS * sizeof(int32_t);
        layouts[tag + KVC_MOVED] = moved;
        moved.groups = moved.n_bytes;
        moved.n_bytes = (moved.n_bytes + (uint32_t)sizeof(struct kvc_groups) + 127u) & ~127u;
        layouts[tag + KVC_MERGED] = moved;
    }
    layouts[KVC_LAYOUT_OPEN] = kvc_page_layout_make(p->head_dim_k, p->head_dim_v, KVC_F16, 0,
                                                    KVC_F16, 0, true, KVC_PAGE_ROWS);
    layouts[KVC_LAYOUT_STRIP] = kvc_page_layout_make(p->head_dim_k, p->head_dim_v, KVC_F16, 0,
                                                     KVC_F16, 0, true, (uint32_t)p->sink_tokens);
    if (p->sink_tokens == 0)
        layouts[KVC_LAYOUT_STRIP].n_bytes = 0;
}

/* Pages between two borders for a run of tokens that begins and ends anywhere. */
static size_t pages_of(int32_t n_tokens)
{
    return ((size_t)n_tokens + (size_t)2 * KVC_PAGE_TOKENS - 2) / KVC_PAGE_TOKENS + 1;
}

/* Unsealed pages of one sequence in one layer and head, at most: the recent window, or what waits
 * for a transform, what is left of the page before it, the largest append, a short page after a
 * truncation; and the same for a hold. */
static size_t open_pages(const kvc_cache_params *p)
{
    const int32_t waiting = kvc_transform_waiting_tokens(p);
    const int32_t recent = p->recent_tokens > waiting ? p->recent_tokens : waiting;
    const size_t pages = pages_of(recent + p->max_append);
    const size_t held = p->max_hold_tokens ? pages_of(p->max_hold_tokens) : 0;
    return held > pages ? held : pages;
}

static size_t score_bytes(kvc_score_mode mode)
{
    return mode == KVC_SCORE_NONE   ? 0
           : mode == KVC_SCORE_PAGE ? sizeof(float)
                                    : KVC_PAGE_ROWS * sizeof(float);
}

/* Sets the sizes that follow from the parameters alone. */
static void size_cache(kvc_cache *cache, const kvc_cache_params *p)
{
    uint32_t smallest = UINT32_MAX;

    cache->params = *p;
    cache->n_pairs = p->n_layers * p->n_kv_heads;
    cache->group = p->n_heads / p->n_kv_heads;
    make_layouts(cache->layouts, p);
    for (int i = 0; i < KVC_N_TAGS; i++)
        if (cache->layouts[i].n_bytes < smallest)
            smallest = cache->layouts[i].n_bytes;
    cache->slab_bytes = (size_t)KVC_SLAB_OPEN_PAGES * cache->layouts[KVC_LAYOUT_OPEN].n_bytes;
    cache->max_per_slab = (uint32_t)(cache->slab_bytes / smallest);
    cache->score_bytes = score_bytes(p->score_mode);
    cache->column_bytes =
        (sizeof(struct kvc_column) +
         (size_t)cache->n_pairs * (sizeof(struct kvc_entry) + cache->score_bytes) + 63) &
        ~(size_t)63;
    const int32_t longest = kvc_min32(p->max_tokens, p->max_sequence_tokens);
    cache->max_fact_pages = longest / KVC_PAGE_TOKENS + 1;
    cache->n_fact_pages = p->max_tokens / KVC_PAGE_TOKENS + p->max_sequences;
    /* Twice the full pages: truncation and compression make short ones. */
    cache->max_slots = longest / KVC_PAGE_TOKENS * 2 + 4;
    cache->n_columns = p->max_tokens / KVC_PAGE_TOKENS * 2 + 4 * p->max_sequences;
    cache->strip_bytes = (size_t)cache->n_pairs * cache->layouts[KVC_LAYOUT_STRIP].n_bytes;
    cache->lane_floats = kvc_attend_lane_floats(p);
    cache->n_parts = (size_t)cache->n_columns / KVC_TILE_PAGES + 2 * (size_t)p->max_sequences;
}

/* Carves everything; with arena->base NULL it counts. cache->n_slabs is set. */
static void carve(kvc_cache *cache, struct kvc_arena *arena)
{
    const kvc_cache_params *p = &cache->params;
    const size_t n_seq = (size_t)p->max_sequences, n_layers = (size_t)p->n_layers;
    const size_t n_columns = (size_t)cache->n_columns, n_facts = (size_t)cache->n_fact_pages;
    const size_t probe_rows = n_seq * n_layers * (size_t)p->probe_rows;

    kvc_arena_take(arena, 1, sizeof(*cache), 64); /* this structure, at the start */
    cache->tags = kvc_arena_take(arena, (size_t)cache->n_pairs, 1, 1);
    cache->class_of = kvc_arena_take(arena, KVC_N_LAYOUTS, 1, 1);
    cache->sequences = kvc_arena_take(arena, n_seq, sizeof(struct kvc_sequence), 64);
    for (size_t i = 0; i < n_seq; i++) {
        int32_t *slots = kvc_arena_take(arena, (size_t)cache->max_slots, sizeof(int32_t), 4);
        int32_t *facts = kvc_arena_take(arena, (size_t)cache->max_fact_pages, sizeof(int32_t), 4);
        int32_t *appended = kvc_arena_take(arena, n_layers, sizeof(int32_t), 4);
        if (arena->base)
            cache->sequences[i] =
                (struct kvc_sequence){.slots = slots, .facts = facts, .appended = appended};
    }
    cache->free_columns = kvc_arena_take(arena, n_columns, sizeof(int32_t), 4);
    cache->free_facts = kvc_arena_take(arena, n_facts, sizeof(int32_t), 4);
    cache->slabs = kvc_arena_take(arena, cache->n_slabs, sizeof(struct kvc_slab), 64);
    cache->pages =
        kvc_arena_take(arena, cache->n_slabs, cache->max_per_slab * sizeof(struct kvc_page), 64);

    kvc_transform_carve(cache, arena);

    size_t start = arena->used;
    cache->probes = kvc_arena_take(arena, probe_rows * (size_t)p->n_heads,
                                   (size_t)p->head_dim_k * sizeof(uint16_t), 64);
    cache->probe_ordinals = kvc_arena_take(arena, probe_rows, sizeof(int64_t), 64);
    cache->probe_uses = kvc_arena_take(arena, n_layers, sizeof(struct kvc_probe_use), 64);
    cache->probe_bytes = arena->used - start;

    start = arena->used;
    cache->lanes = kvc_arena_take(arena, KVC_LANES, cache->lane_floats * sizeof(float), 64);
    cache->parts =
        kvc_arena_take(arena, cache->n_parts, kvc_attend_part_floats(p) * sizeof(float), 64);
    cache->infos = kvc_arena_take(arena, n_seq, sizeof(struct kvc_attend_info), 64);
    kvc_choice_carve(cache, arena);
    kvc_fuse_carve(cache, arena);
    cache->compactions = kvc_arena_take(arena, (size_t)cache->n_pairs, kvc_compaction_bytes(), 64);
    kvc_build_carve(cache, arena);
    cache->scratch_bytes = arena->used - start;

    cache->facts = kvc_arena_take(arena, n_facts, KVC_PAGE_TOKENS * sizeof(struct kvc_fact), 64);
    cache->columns = kvc_arena_take(arena, n_columns, cache->column_bytes, 64);
    cache->strips = kvc_arena_take(arena, n_seq, cache->strip_bytes, 128);
    cache->pool = kvc_arena_take(arena, cache->n_slabs, cache->slab_bytes, 128);
}

/* Bytes of a cache with that many slabs; 0 if they do not fit size_t. */
static size_t cache_bytes(kvc_cache *cache, size_t n_slabs)
{
    struct kvc_arena arena = {0};
    cache->n_slabs = n_slabs;
    carve(cache, &arena);
    return arena.overflow || arena.used > PTRDIFF_MAX ? 0 : arena.used;
}

/* F16 pages of all sequences: what each may need, or fewer if max_tokens cannot fill them; more
 * than ids can number where the product does not fit. */
static size_t reserved_pages(const kvc_cache *cache)
{
    const kvc_cache_params *p = &cache->params;
    const size_t n_seq = (size_t)p->max_sequences;
    const size_t most = (size_t)p->max_tokens / KVC_PAGE_TOKENS + 3 * n_seq; /* sum of pages_of() */
    size_t n = open_pages(p) * n_seq;
    n = n < most ? n : most;
    if (__builtin_mul_overflow(n, (size_t)cache->n_pairs, &n) || n > INT32_MAX)
        return INT32_MAX;
    return n;
}

/* Free slabs that a cache with on_full keeps, so that rows can be moved together when it is full:
 * pages for one page of every layer and head, and what lies between slabs. */
static size_t kept_slabs(const kvc_cache *cache)
{
    const uint8_t tag = kvc_precision_tag(&cache->params.precision);
    const size_t per_slab = cache->slab_bytes / cache->layouts[tag + KVC_MOVED].n_bytes;
    return cache->params.on_full ? ((size_t)cache->n_pairs + per_slab - 1) / per_slab + 2 : 0;
}

static size_t min_slabs(const kvc_cache *cache)
{
    return (reserved_pages(cache) + KVC_SLAB_OPEN_PAGES - 1) / KVC_SLAB_OPEN_PAGES + 1 +
           kept_slabs(cache);
}

/* Page ids are int32. */
static bool slabs_ok(const kvc_cache *cache, size_t n_slabs)
{
    return n_slabs <= (size_t)INT32_MAX / cache->max_per_slab;
}

/* Slabs of sealed pages for max_tokens in the precision of the parameters. */
static size_t full_slabs(const kvc_cache *cache)
{
    const kvc_cache_params *p = &cache->params;
    const size_t page = cache->layouts[kvc_precision_tag(&p->precision)].n_bytes;
    const size_t per_slab = cache->slab_bytes / page;
    const size_t pages =
        (size_t)p->max_tokens / KVC_PAGE_TOKENS + 2 * (size_t)p->max_sequences; /* short ones */
    return pages * (size_t)cache->n_pairs / per_slab + 1;
}

static kvc_status plan_budget(const kvc_cache_params *params, bool full, size_t *bytes)
{
    kvc_cache plan = {0};
    kvc_cache_params p;

    KVC_CHECK(bytes && params, KVC_E_ARG);
    KVC_TRY(take_params(params, &p));
    size_cache(&plan, &p);
    const size_t slabs = min_slabs(&plan) + (full ? full_slabs(&plan) : 0);
    const size_t need = slabs_ok(&plan, slabs) ? cache_bytes(&plan, slabs) : 0;
    KVC_CHECK(need, KVC_E_ARG);
    *bytes = need;
    return KVC_OK;
}

kvc_status kvc_cache_min_budget(const kvc_cache_params *params, size_t *bytes)
{
    return plan_budget(params, false, bytes);
}

kvc_status kvc_cache_full_budget(const kvc_cache_params *params, size_t *bytes)
{
    return plan_budget(params, true, bytes);
}

/* The most slabs that the budget holds; the caller knows that the least number fits. */
static size_t fit_slabs(kvc_cache *plan, size_t budget)
{
    const size_t least = min_slabs(plan);
    const size_t most = (size_t)INT32_MAX / plan->max_per_slab;
    const size_t each =
        plan->slab_bytes + sizeof(struct kvc_slab) + plan->max_per_slab * sizeof(struct kvc_page);
    size_t n = least + (budget - cache_bytes(plan, least)) / each;

    n = n < most ? n : most;
    while (n > least && cache_bytes(plan, n) - 1 >= budget) /* alignment; 0 wraps and is refused */
        n--;
    return n;
}

kvc_status kvc_cache_create(kvc_ctx *ctx, const kvc_cache_params *params, kvc_cache **out)
{
    kvc_cache plan = {0};
    kvc_cache_params p;
    size_t need;

    KVC_CHECK(out, KVC_E_ARG);
    *out = NULL;
    KVC_CHECK(ctx && params, KVC_E_ARG);
    KVC_TRY(take_params(params, &p));
    KVC_TRY(kvc_cache_min_budget(params, &need));
    KVC_CHECK(p.budget_bytes >= need && p.budget_bytes <= PTRDIFF_MAX, KVC_E_ARG);
    size_cache(&plan, &p);
    plan.ctx = ctx;
    plan.n_slabs = fit_slabs(&plan, p.budget_bytes);

    struct kvc_arena arena = {.base = ctx->mem.alloc(ctx->mem.user, p.budget_bytes, 128)};
    KVC_CHECK(arena.base, KVC_E_NOMEM);
    carve(&plan, &arena);
    kvc_cache *cache = (kvc_cache *)(void *)arena.base;
    *cache = plan;

    cache->n_kept_slabs = (int32_t)kept_slabs(cache);
    cache->params.on_full = NULL; /* the caller's may go */
    cache->has_on_full = p.on_full != NULL;
    if (p.on_full) /* take_params() has checked it */
        kvc_policy_check(cache, p.on_full, true, &cache->on_full);
    memset(cache->tags, kvc_precision_tag(&p.precision), (size_t)cache->n_pairs);
    kvc_transform_start(cache);
    kvc_pages_init(cache, reserved_pages(cache));
    cache->n_free_columns = cache->n_columns;
    for (int32_t i = 0; i < cache->n_columns; i++)
        cache->free_columns[i] = cache->n_columns - 1 - i;
    cache->n_free_facts = cache->n_fact_pages;
    for (int32_t i = 0; i < cache->n_fact_pages; i++)
        cache->free_facts[i] = cache->n_fact_pages - 1 - i;
    *out = cache;
    return KVC_OK;
}

void kvc_cache_destroy(kvc_cache *cache)
{
    if (cache)
        cache->ctx->mem.free(cache->ctx->mem.user, cache);
}

static int32_t live_sequences(const kvc_cache *cache)
{
    int32_t n = 0;
    for (int32_t i = 0; i < cache->params.max_sequences; i++)
        n += cache->sequences[i].alive;
    return n;
}

kvc_status kvc_cache_set_precision(kvc_cache *cache, int32_t layer, int32_t kv_head,
                                   const kvc_precision *precision)
{
    KVC_CHECK(cache && precision && live_sequences(cache) == 0, KVC_E_ARG);
    KVC_CHECK(in_range(layer, -1, cache->params.n_layers - 1) &&
                  in_range(kv_head, -1, cache->params.n_kv_heads - 1),
              KVC_E_ARG);
    KVC_TRY(kvc_precision_check(precision));
    for (int32_t pair = 0; pair < cache->n_pairs; pair++)
        if ((layer < 0 || pair / cache->params.n_kv_heads == layer) &&
            (kv_head < 0 || pair % cache->params.n_kv_heads == kv_head))
            cache->tags[pair] = kvc_precision_tag(precision);
    kvc_pages_init(cache, reserved_pages(cache));
    return KVC_OK;
}

size_t kvc_used_bytes(const kvc_cache *cache)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};
    kvc_cache_stats(cache, &stats);
    return stats.used_bytes;
}

size_t kvc_usable_bytes(const kvc_cache *cache)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};
    kvc_cache_stats(cache, &stats);
    return stats.used_bytes + stats.reserve_bytes + stats.free_page_bytes + stats.free_table_bytes;
}

kvc_status kvc_cache_stats(const kvc_cache *cache, kvc_stats *out)
{
    KVC_CHECK(cache && out && out->struct_size >= sizeof(*out), KVC_E_ARG);
    const size_t n_seq = (size_t)live_sequences(cache);
    const size_t all_seq = (size_t)cache->params.max_sequences;
    const size_t used_columns = (size_t)(cache->n_columns - cache->n_free_columns);
    const size_t used_facts = (size_t)(cache->n_fact_pages - cache->n_free_facts);
    const size_t fact_bytes = KVC_PAGE_TOKENS * sizeof(struct kvc_fact);
    kvc_stats s = {
        .struct_size = out->struct_size,
        .budget_bytes = cache->params.budget_bytes,
        .strip_bytes = n_seq * cache->strip_bytes,
        .entry_bytes = used_columns * cache->column_bytes,
        .token_bytes = used_facts * fact_bytes,
        .probe_bytes = cache->probe_bytes,
        .scratch_bytes = cache->scratch_bytes,
        .free_table_bytes = (all_seq - n_seq) * cache->strip_bytes +
                            (size_t)cache->n_free_columns * cache->column_bytes +
                            (size_t)cache->n_free_facts * fact_bytes,
        .n_sequences = (int64_t)n_seq,
        .n_tokens = cache->n_tokens,
        .n_pages_f16 = cache->classes[0].n_used,
        .n_free_slots = cache->n_free_columns,
        .n_sealed_total = cache->n_sealed_total,
        .n_nonfinite = cache->n_nonfinite,
        .n_saturated = cache->n_saturated,
    };
    s.f16_page_bytes = (size_t)cache->classes[0].n_used * cache->classes[0].n_bytes;
    for (int32_t i = 1; i < cache->n_classes; i++) {
        s.n_pages_sealed += cache->classes[i].n_used;
        s.sealed_page_bytes += (size_t)cache->classes[i].n_used * cache->classes[i].n_bytes;
    }
    s.used_bytes =
        s.f16_page_bytes + s.sealed_page_bytes + s.strip_bytes + s.entry_bytes + s.token_bytes;
    s.reserve_bytes = (size_t)cache->classes[0].n_free * cache->classes[0].n_bytes;
    s.free_page_bytes = cache->n_slabs * cache->slab_bytes - s.f16_page_bytes - s.reserve_bytes -
                        s.sealed_page_bytes;
    s.fixed_bytes = s.budget_bytes - s.used_bytes;
    s.overhead_bytes = s.fixed_bytes - s.probe_bytes - s.scratch_bytes - s.reserve_bytes -
                       s.free_page_bytes - s.free_table_bytes;
    kvc_struct_write(out, &s, sizeof(s));
    return KVC_OK;
}
