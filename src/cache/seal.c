/* seal.c - sealing: settle, compress, and moving rows together. */
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
    int32_t i = seq->first_unsealed;
    for (; i < seq->n_slots; i++) {
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

/* A page without rows will be freed, not sealed: it has no part in any scale. */
static void measure(const kvc_cache *cache, struct kvc_entry *e)
{
    e->absmax_k = e->absmax_v = 0.0f;
    if (!e->live)
        return;
    const struct kvc_page_layout *open = &cache->layouts[KVC_LAYOUT_OPEN];
    const uint8_t *page = kvc_page_data(cache, e->page);
    e->absmax_k = absmax(cache->ctx, page, open->d8_k, e->n_rows, open->d_k);
    e->absmax_v = absmax(cache->ctx, page + open->v_codes, open->d8_v, e->n_rows, open->d_v);
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
                need[s->cache->class_of[s->cache->tags[pair]]]++;
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

static void seal_pair(void *arg, size_t i)
{
    const struct sealing *s = arg;
    const kvc_cache *cache = s->cache;
    for (int32_t slot = s->seq->first_unsealed; slot < s->end; slot++) {
        const struct kvc_entry *e = &kvc_slot(cache, s->seq, slot)->entries[i];
        if (e->sealed < 0 || cache->pages[e->sealed].owners > 1)
            continue; /* empty, or sealed by another sequence */
        const struct kvc_seal_job job = {
            .from = &cache->layouts[KVC_LAYOUT_OPEN],
            .to = sealed_layout(cache, (int32_t)i),
            .src = kvc_page_data(cache, e->page),
            .dst = kvc_page_data(cache, e->sealed),
            .n_rows = e->n_rows,
            .absmax_k = cache->pages[e->sealed].absmax_k,
            .absmax_v = cache->pages[e->sealed].absmax_v,
        };
        cache->ctx->k->seal_page(&cache->ctx->queue, &job);
    }
}

kvc_status kvc_seal_slots(kvc_cache *cache, struct kvc_sequence *seq, int32_t end)
{
    struct sealing s = {.cache = cache, .seq = seq, .end = end};
    const size_t n_pairs = (size_t)cache->n_pairs;

    if (seq->first_unsealed == end)
        return KVC_OK;
    kvc_ctx_parallel(cache->ctx, n_pairs, measure_pair, &s);
    KVC_CHECK(sealing_fits(&s), KVC_E_FULL);
    for (int32_t slot = seq->first_unsealed; slot < end; slot++)
        for (int32_t pair = 0; pair < cache->n_pairs; pair++)
            take_page(&s, slot, pair);
    kvc_ctx_parallel(cache->ctx, n_pairs, seal_pair, &s);
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
    return kvc_seal_slots(cache, s, kvc_seal_end(cache, s, false));
}

/* Slots whose pages of one pair fit fewer bytes. */
struct span {
    int32_t first, last; /* last not included */
    int32_t n_pages, n_rows;
    size_t n_bytes;
};

static int32_t pages_for(int32_t n_rows)
{
    return (n_rows + KVC_PAGE_ROWS - 1) / KVC_PAGE_ROWS;
}

static bool movable(const struct kvc_page_layout *layout)
{
    return (layout->k_format == KVC_F16 || layout->k_scale == KVC_SCALE_TOKEN) &&
           (layout->v_format == KVC_F16 || layout->v_scale == KVC_SCALE_TOKEN);
}

/* The shortest span from a slot on that moving makes smaller, filled up; or one slot, to be left
 * alone. Pages of moved rows are larger: they carry ordinals. */
static struct span find_span(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t pair,
                             int32_t first)
{
    const struct span alone = {.first = first, .last = first + 1};
    const size_t moved = cache->layouts[cache->tags[pair] + KVC_N_TAGS].n_bytes;
    struct span span = {.first = first, .last = first};
    for (; span.last < seq->first_unsealed; span.last++) {
        const struct kvc_entry *e = &kvc_slot(cache, seq, span.last)->entries[pair];
        if (e->page < 0)
            continue;
        const int32_t n_rows = __builtin_popcountll(e->live), pages = pages_for(span.n_rows);
        if (cache->pages[e->page].owners > 1) /* moving would free nothing */
            break;
        if (span.n_pages == 0 && n_rows == KVC_PAGE_ROWS)
            return alone;
        if ((size_t)pages * moved < span.n_bytes && n_rows > pages * KVC_PAGE_ROWS - span.n_rows)
            break;
        span.n_pages++;
        span.n_rows += n_rows;
        span.n_bytes += kvc_page_layout_of(cache, e->page)->n_bytes;
    }
    return (size_t)pages_for(span.n_rows) * moved < span.n_bytes ? span : alone;
}

/* A page that is being filled. */
struct target {
    int32_t page, n_rows;
    int32_t *ordinals;
    float scores[KVC_PAGE_ROWS]; /* one, or one a row */
};

static bool open_target(kvc_cache *cache, int32_t pair, struct target *to)
{
    *to = (struct target){.page = kvc_page_alloc(cache, (uint8_t)(cache->tags[pair] + KVC_N_TAGS))};
    if (to->page < 0)
        return false;
    uint8_t *data = kvc_page_data(cache, to->page);
    const struct kvc_page_layout *layout = kvc_page_layout_of(cache, to->page);
    to->ordinals = (int32_t *)(void *)(data + layout->ordinals);
    cache->ctx->k->clear_page(&cache->ctx->queue, layout, data);
    memset(to->ordinals, 0, KVC_PAGE_ROWS * sizeof(int32_t));
    return true;
}

/* Moves live rows of an entry behind those of the target, as many as fit. */
static void move_rows(const kvc_cache *cache, struct kvc_column *column, int32_t pair,
                      struct target *to)
{
    struct kvc_entry *e = &column->entries[pair];
    const int32_t *ordinals = kvc_page_ordinals(cache, e->page);
    const float n_live = (float)__builtin_popcountll(e->live);
    float *scores = kvc_slot_scores(cache, column, pair);
    uint8_t rows[KVC_PAGE_ROWS];
    int32_t n = 0;

    for (uint8_t r = 0; r < e->n_rows && to->n_rows + n < KVC_PAGE_ROWS; r++) {
        if (!(e->live >> r & 1))
            continue;
        e->live &= ~(UINT64_C(1) << r);
        to->ordinals[to->n_rows + n] = ordinals ? ordinals[r] : column->first + r;
        if (cache->params.score_mode == KVC_SCORE_TOKEN)
            to->scores[to->n_rows + n] = scores[r];
        rows[n++] = r;
    }
    if (cache->params.score_mode == KVC_SCORE_PAGE) {
        const float share = scores[0] * ((float)n / n_live);
        to->scores[0] += share;
        scores[0] -= share;
    }
    cache->ctx->k->move_rows(&cache->ctx->queue, kvc_page_layout_of(cache, to->page),
                             kvc_page_data(cache, e->page), rows, (uint32_t)n,
                             kvc_page_data(cache, to->page), (uint32_t)to->n_rows);
    to->n_rows += n;
}

static void place_target(kvc_cache *cache, struct kvc_column *column, int32_t pair,
                         const struct target *to)
{
    const int32_t end = to->ordinals[to->n_rows - 1] + 1;
    column->entries[pair] = (struct kvc_entry){
        .live = kvc_bits(0, to->n_rows), .page = to->page, .n_rows = (uint8_t)to->n_rows};
    column->end = end > column->end ? end : column->end;
    memcpy(kvc_slot_scores(cache, column, pair), to->scores, cache->score_bytes);
}

/*
 * Moves the rows of a span into new pages. Rows only move to earlier slots: when page i of the span
 * is full, its slots 0 ... i are empty. Without room it stops between two pages, with every row in
 * one place. Returns the pages that became free.
 */
static int64_t compact_span(kvc_cache *cache, struct kvc_sequence *seq, int32_t pair,
                            const struct span *span)
{
    int32_t source = span->first, n_emptied = 0, n_made = 0;
    struct target to;

    while (n_emptied < span->n_pages && open_target(cache, pair, &to)) {
        while (n_emptied < span->n_pages && to.n_rows < KVC_PAGE_ROWS) {
            struct kvc_column *column = kvc_slot(cache, seq, source);
            struct kvc_entry *e = &column->entries[pair];
            if (e->page >= 0)
                move_rows(cache, column, pair, &to);
            if (e->live)
                continue;
            n_emptied += e->page >= 0;
            kvc_entry_clear(cache, e);
            source++;
        }
        place_target(cache, kvc_slot(cache, seq, span->first + n_made++), pair, &to);
    }
    return n_emptied - n_made;
}

/* Moves rows together in every layer and head; returns the pages that became free. */
static int64_t compact(kvc_cache *cache, struct kvc_sequence *seq)
{
    int64_t n_freed = 0;
    for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
        if (!movable(sealed_layout(cache, pair)))
            continue;
        for (int32_t slot = 0; slot < seq->first_unsealed;) {
            const struct span span = find_span(cache, seq, pair, slot);
            if (span.n_pages)
                n_freed += compact_span(cache, seq, pair, &span);
            slot = span.last;
        }
    }
    kvc_seq_drop_empty_slots(cache, seq);
    return n_freed;
}

static size_t used_bytes(const kvc_cache *cache)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};
    kvc_cache_stats(cache, &stats);
    return stats.used_bytes;
}

kvc_status kvc_cache_compress(kvc_cache *cache, kvc_seq seq, const kvc_policy *policy,
                              kvc_report *report, kvc_map *map)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && kvc_seq_complete(cache, s), KVC_E_ARG);
    KVC_CHECK(!report || report->struct_size >= sizeof(*report), KVC_E_ARG);
    KVC_CHECK(!policy && !map, KVC_E_UNSUPPORTED);

    const size_t before = used_bytes(cache);
    const uint64_t sealed = cache->n_sealed_total;
    const int64_t hold_from = s->hold_from;
    s->hold_from = -1;
    const kvc_status status = kvc_seal_slots(cache, s, kvc_seal_end(cache, s, true));
    if (status != KVC_OK) {
        s->hold_from = hold_from;
        return status;
    }
    const int64_t n_freed = compact(cache, s);
    if (report) {
        const kvc_report r = {
            .n_pages_sealed = (int64_t)(cache->n_sealed_total - sealed),
            .n_pages_compacted = n_freed,
            .bytes_before = before,
            .bytes_after = used_bytes(cache),
        };
        kvc_struct_write(report, &r, sizeof(r));
    }
    return KVC_OK;
}
