/* seal.c - sealing: pages of exact rows become pages of codes, once. */
#include <string.h>

#include "check.h"
#include "state.h"

static const struct kvc_page_layout *sealed_layout(const kvc_cache *cache, int32_t pair)
{
    return &cache->layouts[cache->tags[pair]];
}

static bool uses_head_scale(const struct kvc_page_layout *layout)
{
    return (layout->k_format != KVC_F16 && layout->k_scale == KVC_SCALE_HEAD) ||
           (layout->v_format != KVC_F16 && layout->v_scale == KVC_SCALE_HEAD);
}

int32_t kvc_seal_end(const kvc_cache *cache, const struct kvc_sequence *seq, bool short_pages)
{
    const bool ready = cache->transform.ready || kvc_transform_due(cache, seq, short_pages);
    int32_t i = seq->first_unsealed;
    for (; i < seq->n_slots && ready; i++) {
        const struct kvc_column *column = kvc_slot(cache, seq, i);
        const int64_t end = column->first + (int64_t)column->n;
        if ((!short_pages && !kvc_slot_full(cache, column)) ||
            end > (int64_t)seq->n_tokens - cache->params.recent_tokens ||
            (seq->hold_from >= 0 && end > seq->hold_from))
            break;
    }
    return i;
}

/* Absmax of the first n_rows rows of one side of an F16 page; the values are finite. */
static float absmax(const kvc_ctx *ctx, const void *halves, size_t stride, size_t n_rows, size_t d)
{
    const struct kvc_rows rows = {halves, KVC_DTYPE_F16, stride, n_rows, d};
    struct kvc_range range;
    ctx->k->range_rows(&ctx->queue, &rows, &range);
    return range.max > -range.min ? range.max : -range.min;
}

void kvc_open_absmax(const kvc_cache *cache, const uint8_t *page, uint32_t n_rows, float *k,
                     float *v)
{
    const struct kvc_page_layout *open = &cache->layouts[KVC_LAYOUT_OPEN];
    *k = absmax(cache->ctx, page, open->d8_k, n_rows, open->d_k);
    *v = absmax(cache->ctx, page + open->v_codes, open->d8_v, n_rows, open->d_v);
}

/* A page without rows will be freed, not sealed: it has no part in any scale. */
static void measure(const kvc_cache *cache, struct kvc_entry *e)
{
    e->absmax_k = e->absmax_v = 0.0f;
    if (e->live)
        kvc_open_absmax(cache, kvc_page_data(cache, e->page), e->n_rows, &e->absmax_k,
                        &e->absmax_v);
}

/* Largest absmax of K and V over the pages of the window that ends with a slot. */
static void window_absmax(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t slot,
                          int32_t pair, float *k, float *v)
{
    const struct kvc_column *last = kvc_slot(cache, seq, slot);
    const int32_t start = last->first + last->n - cache->params.scale_window;

    *k = *v = 0.0f;
    for (int32_t i = slot; i >= 0; i--) {
        const struct kvc_column *column = kvc_slot(cache, seq, i);
        const struct kvc_entry *e = &column->entries[pair];
        if (column->first < start && i < slot)
            break;
        *k = e->absmax_k > *k ? e->absmax_k : *k;
        *v = e->absmax_v > *v ? e->absmax_v : *v;
    }
}

/* One sealing: the same slots of all layers and heads. */
struct sealing {
    kvc_cache *cache;
    struct kvc_sequence *seq;
    int32_t end;
    size_t n_lanes;
};

static void measure_pair(void *arg, size_t i)
{
    const struct sealing *s = arg;
    if (uses_head_scale(sealed_layout(s->cache, (int32_t)i)))
        for (int32_t slot = s->seq->first_unsealed; slot < s->end; slot++)
            measure(s->cache, &kvc_slot(s->cache, s->seq, slot)->entries[i]);
}

/* The sealed copy that another owner of this page has made, if it is what this one would make. */
static int32_t find_twin(const struct sealing *s, int32_t slot, int32_t pair)
{
    const kvc_cache *cache = s->cache;
    const struct kvc_entry *e = &kvc_slot(cache, s->seq, slot)->entries[pair];
    const int32_t twin = cache->pages[e->page].twin;
    float k, v;

    if (twin < 0 || e->n_rows != KVC_PAGE_ROWS || cache->pages[twin].layout != cache->tags[pair])
        return -1;
    window_absmax(cache, s->seq, slot, pair, &k, &v);
    const bool same = cache->pages[twin].absmax_k == k && cache->pages[twin].absmax_v == v;
    return same ? twin : -1;
}

/* Whether all pages to be made fit. */
static bool sealing_fits(const struct sealing *s)
{
    int32_t need[KVC_N_CLASSES] = {0};
    for (int32_t slot = s->seq->first_unsealed; slot < s->end; slot++)
        for (int32_t pair = 0; pair < s->cache->n_pairs; pair++)
            if (kvc_slot(s->cache, s->seq, slot)->entries[pair].live &&
                find_twin(s, slot, pair) < 0)
                need[kvc_page_class(s->cache, s->cache->tags[pair])]++;
    return kvc_pages_fit(s->cache, need);
}

/* Takes the page that an entry will have: none, its twin, or a new one. */
static void take_page(const struct sealing *s, int32_t slot, int32_t pair)
{
    kvc_cache *cache = s->cache;
    struct kvc_entry *e = &kvc_slot(cache, s->seq, slot)->entries[pair];

    e->sealed = -1;
    if (!e->live)
        return;
    e->sealed = find_twin(s, slot, pair);
    if (e->sealed >= 0) {
        kvc_page_share(cache, e->sealed);
        return;
    }
    e->sealed = kvc_page_alloc(cache, cache->tags[pair]);
    struct kvc_page *page = &cache->pages[e->sealed];
    window_absmax(cache, s->seq, slot, pair, &page->absmax_k, &page->absmax_v);
    cache->n_sealed_total++;
    if (e->n_rows == KVC_PAGE_ROWS && cache->pages[e->page].owners > 1 &&
        cache->pages[e->page].twin < 0) {
        cache->pages[e->page].twin = e->sealed;
        page->twin_of = e->page;
    }
}

/* The page that is sealed after that of a slot, or NULL: of the same pair, or of the next one. */
static const uint8_t *page_after(const struct sealing *s, int32_t slot, size_t pair, size_t end)
{
    const bool same = slot + 1 < s->end;
    slot = same ? slot + 1 : s->seq->first_unsealed;
    pair += same ? 0 : 1;
    if (pair >= end)
        return NULL;
    const struct kvc_entry *e = &kvc_slot(s->cache, s->seq, slot)->entries[pair];
    return e->sealed >= 0 ? kvc_page_data(s->cache, e->page) : NULL;
}

/* Neighbours are sealed by one task, which asks for the next page while it seals one. */
static void seal_pairs(void *arg, size_t lane)
{
    const struct sealing *s = arg;
    const kvc_cache *cache = s->cache;
    const size_t n = (size_t)cache->n_pairs, end = (lane + 1) * n / s->n_lanes;
    for (size_t i = lane * n / s->n_lanes; i < end; i++)
        for (int32_t slot = s->seq->first_unsealed; slot < s->end; slot++) {
            const struct kvc_entry *e = &kvc_slot(cache, s->seq, slot)->entries[i];
            if (e->sealed < 0 || cache->pages[e->sealed].owners > 1)
                continue; /* empty, or sealed by another sequence */
            const struct kvc_seal_job job = {
                .from = &cache->layouts[KVC_LAYOUT_OPEN],
                .to = sealed_layout(cache, (int32_t)i),
                .src = kvc_page_data(cache, e->page),
                .after = page_after(s, slot, i, end),
                .dst = kvc_page_data(cache, e->sealed),
                .n_rows = e->n_rows,
                .absmax_k = cache->pages[e->sealed].absmax_k,
                .absmax_v = cache->pages[e->sealed].absmax_v,
            };
            cache->ctx->k->seal_page(&cache->ctx->queue, &job);
        }
}

kvc_status kvc_seal_slots(kvc_cache *cache, struct kvc_sequence *seq, int32_t end, bool short_pages)
{
    struct sealing s = {.cache = cache, .seq = seq, .end = end};
    const size_t n_pairs = (size_t)cache->n_pairs;

    if (kvc_transform_due(cache, seq, short_pages)) {
        KVC_CHECK(sealing_fits(&s), KVC_E_FULL); /* nothing was sealed yet: no page has a twin */
        kvc_transform_freeze(cache, seq);
    }
    if (seq->first_unsealed == end)
        return KVC_OK;
    kvc_ctx_parallel(cache->ctx, n_pairs, measure_pair, &s);
    KVC_CHECK(sealing_fits(&s), KVC_E_FULL);
    for (int32_t slot = seq->first_unsealed; slot < end; slot++)
        for (int32_t pair = 0; pair < cache->n_pairs; pair++)
            take_page(&s, slot, pair);
    s.n_lanes = n_pairs < KVC_LANES ? n_pairs : KVC_LANES;
    kvc_ctx_parallel(cache->ctx, s.n_lanes, seal_pairs, &s);
    for (int32_t slot = seq->first_unsealed; slot < end; slot++)
        for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
            struct kvc_entry *e = &kvc_slot(cache, seq, slot)->entries[pair];
            if (e->sealed < 0) {
                kvc_entry_clear(cache, e);
                continue;
            }
            kvc_page_release(cache, e->page);
            e->page = e->sealed;
        }
    seq->first_unsealed = end;
    kvc_seq_drop_empty_slots(cache, seq);
    return KVC_OK;
}

kvc_status kvc_seq_settle(kvc_cache *cache, kvc_seq seq)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && kvc_seq_complete(cache, s), KVC_E_ARG);
    return kvc_seal_slots(cache, s, kvc_seal_end(cache, s, false), false);
}
