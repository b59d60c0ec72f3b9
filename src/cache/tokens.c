/* tokens.c - announcing tokens, which settles and reserves, and taking their K and V. */
#include <string.h>

#include "check.h"
#include "choose.h"

static bool token_ok(const kvc_token *t)
{
    static const uint8_t zeros[sizeof(t->reserved)];
    return t->t >= 0 && t->y >= 0 && t->x >= 0 && t->t < INT32_MAX && t->y < INT32_MAX &&
           t->x < INT32_MAX && t->kind <= KVC_TOKEN_SEPARATOR &&
           memcmp(t->reserved, zeros, sizeof(zeros)) == 0;
}

static bool tokens_ok(const struct kvc_sequence *seq, const kvc_token *tokens, size_t n)
{
    if (!tokens)
        return seq->next_position + (int64_t)n <= INT32_MAX;
    for (size_t i = 0; i < n; i++)
        if (!token_ok(&tokens[i]))
            return false;
    return true;
}

static kvc_token text_token(int64_t position)
{
    const int32_t p = (int32_t)position;
    return (kvc_token){.t = p, .y = p, .x = p, .image = -1, .row = -1, .col = -1};
}

/* Slots that n more tokens open, given the ordinal where the first of them would begin. */
static int32_t new_slots(const kvc_cache *cache, int64_t begin, int64_t end)
{
    int32_t n = 0;
    for (; begin < end; n++)
        begin = kvc_next_border(cache, (int32_t)begin);
    return n;
}

/* Whether dropping rows of the sequence could make room for n more tokens. */
static bool could_fit(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t n)
{
    const kvc_cache_params *p = &cache->params;
    const int64_t end = (int64_t)seq->n_tokens + n;
    return end <= INT32_MAX / 2 && n <= p->max_sequence_tokens &&
           cache->n_facts - seq->n_facts + n <= p->max_tokens &&
           (seq->hold_from < 0 || end - seq->hold_from <= p->max_hold_tokens);
}

/* F16 pages of a sequence that sealing up to a slot frees. */
static int64_t freed_pages(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t sealed)
{
    int64_t n = 0;
    for (int32_t slot = seq->first_unsealed; slot < sealed; slot++)
        for (int32_t pair = 0; pair < cache->n_pairs; pair++)
            n += cache->pages[kvc_slot(cache, seq, slot)->entries[pair].page].owners == 1;
    return n;
}

/* F16 pages that rows will be added to and that other sequences see. */
static int64_t shared_pages(const kvc_cache *cache, const struct kvc_column *open)
{
    int64_t n = 0;
    for (int32_t pair = 0; pair < cache->n_pairs && open; pair++)
        n += cache->pages[open->entries[pair].page].owners > 1;
    return n;
}

/* What an announcement of n tokens needs, besides the room for sealing. The reserve of F16 pages
 * covers tokens that are known: pages of others may have used it up. */
static bool tables_fit(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t n,
                       int32_t sealed)
{
    const kvc_cache_params *p = &cache->params;
    const int64_t end = (int64_t)seq->n_tokens + n;
    const struct kvc_column *column = kvc_seq_open_slot(cache, seq, sealed);
    int64_t begin = seq->n_tokens > p->sink_tokens ? seq->n_tokens : p->sink_tokens;
    if (column)
        begin = kvc_next_border(cache, column->first);
    const int32_t n_new = new_slots(cache, begin, end);
    return kvc_facts_fit(cache, seq, n) && n_new <= cache->n_free_columns &&
           seq->n_slots + n_new <= cache->max_slots &&
           n_new * (int64_t)cache->n_pairs + shared_pages(cache, n > 0 ? column : NULL) <=
               cache->classes[0].n_free + freed_pages(cache, seq, sealed);
}

/* Before rows are added to an open slot: an F16 page that other sequences see is copied, one that
 * they have left parts from the sealed copy that they made. */
static void own_pages(kvc_cache *cache, struct kvc_column *column)
{
    for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
        struct kvc_entry *e = &column->entries[pair];
        if (cache->pages[e->page].owners == 1) {
            kvc_page_forget_twin(cache, e->page);
            continue;
        }
        const int32_t page = kvc_page_copy(cache, e->page, e->n_rows);
        kvc_page_release(cache, e->page);
        e->page = page;
    }
}

static struct kvc_column *new_slot(kvc_cache *cache, struct kvc_sequence *seq, int32_t first)
{
    seq->slots[seq->n_slots] = cache->free_columns[--cache->n_free_columns];
    struct kvc_column *column = kvc_slot(cache, seq, seq->n_slots++);
    memset(column, 0, cache->column_bytes);
    column->first = column->end = first;
    for (int32_t pair = 0; pair < cache->n_pairs; pair++)
        column->entries[pair].page = kvc_page_alloc(cache, KVC_LAYOUT_OPEN);
    return column;
}

/* Settles, and makes sure that n tokens fit; a cache with on_full drops rows until they do. */
static kvc_status make_room(kvc_cache *cache, struct kvc_sequence *seq, int32_t n)
{
    const int32_t most = cache->has_on_full ? cache->on_full.max_rows : 0;
    /* Probes score all rows at once: so that this is not due at every token, more rows go. */
    const int32_t slack = cache->on_full.source == KVC_SOURCE_PROBES ? most / 16 : 0;
    KVC_CHECK(could_fit(cache, seq, n), KVC_E_FULL);
    if (most > 0 && kvc_most_rows(cache, seq) > most - n)
        kvc_evict(cache, seq, &cache->on_full, most - n - slack, n);
    for (;;) {
        const int32_t sealed = kvc_seal_end(cache, seq, false);
        if (tables_fit(cache, seq, n, sealed) &&
            kvc_seal_slots(cache, seq, sealed, false) == KVC_OK)
            return KVC_OK;
        KVC_CHECK(cache->has_on_full, KVC_E_FULL);
        const int32_t rows = kvc_most_rows(cache, seq);
        KVC_CHECK(kvc_evict(cache, seq, &cache->on_full, rows - 1 - rows / 16, n), KVC_E_FULL);
    }
}

kvc_status kvc_tokens_add(kvc_cache *cache, kvc_seq seq, const kvc_token *tokens, size_t n)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && n <= (size_t)cache->params.max_append && kvc_seq_complete(cache, s), KVC_E_ARG);
    KVC_CHECK(tokens_ok(s, tokens, n), KVC_E_ARG);
    KVC_TRY(make_room(cache, s, (int32_t)n));

    const int32_t end = s->n_tokens + (int32_t)n;
    for (int32_t i = s->n_tokens; i < end; i++) {
        const kvc_token text = text_token(s->next_position);
        kvc_facts_put(cache, s, i, tokens ? &tokens[i - s->n_tokens] : &text);
    }
    struct kvc_column *column = kvc_seq_open_slot(cache, s, s->first_unsealed);
    if (column && n > 0)
        own_pages(cache, column);
    int32_t at = s->n_tokens > cache->params.sink_tokens ? s->n_tokens : cache->params.sink_tokens;
    while (at < end) {
        if (!column)
            column = new_slot(cache, s, at);
        const int32_t stop = kvc_min32(end, kvc_next_border(cache, column->first));
        column->n += stop - at;
        column->end = column->first + column->n;
        at = stop;
        column = NULL;
    }
    s->strip_live |= kvc_bits(s->n_tokens, kvc_min32(end, cache->params.sink_tokens));
    cache->n_tokens += (int64_t)n;
    s->n_tokens = end;
    return KVC_OK;
}

/* A run of rows of one layer that goes to one place: the strip, or one slot. */
struct run {
    int32_t first, n;
    int32_t slot; /* -1: the strip */
};

static struct run next_run(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t at,
                           int32_t end)
{
    const int32_t sinks = cache->params.sink_tokens;
    if (at < sinks)
        return (struct run){.first = at, .n = kvc_min32(end, sinks) - at, .slot = -1};
    int32_t slot = seq->n_slots - 1; /* rows that are missing lie in the last slots */
    while (kvc_slot(cache, seq, slot)->first > at)
        slot--;
    const struct kvc_column *column = kvc_slot(cache, seq, slot);
    return (struct run){
        .first = at, .n = kvc_min32(end, column->first + column->n) - at, .slot = slot};
}

/* Stores rows of K and V of a pair at row `row` of a row-major F16 page. */
static void store(kvc_cache *cache, int32_t pair, const struct kvc_page_layout *layout,
                  uint8_t *page, int32_t row, const struct kvc_rows *k, const struct kvc_rows *v)
{
    const kvc_ctx *ctx = cache->ctx;
    struct kvc_store_counts counts = {0};
    uint8_t *to_k = page + (size_t)row * layout->k_stride;
    uint8_t *to_v = page + layout->v_codes + (size_t)row * layout->v_stride;

    ctx->k->store_rows(&ctx->queue, k, (uint16_t *)(void *)to_k, layout->d8_k, layout->d8_k,
                       &counts);
    ctx->k->store_rows(&ctx->queue, v, (uint16_t *)(void *)to_v, layout->d8_v, layout->d8_v,
                       &counts);
    cache->n_nonfinite += counts.n_nonfinite;
    cache->n_saturated += counts.n_saturated;
    cache->n_saturated +=
        kvc_transform_page(cache, pair, layout, page, row, (int32_t)k->n_rows, cache->lanes);
}

static void store_run(kvc_cache *cache, struct kvc_sequence *seq, int32_t layer,
                      const struct run *run, const kvc_view *k, const kvc_view *v, int32_t from)
{
    for (int32_t h = 0; h < cache->params.n_kv_heads; h++) {
        const int32_t pair = kvc_pair(cache, layer, h);
        const struct kvc_rows k_rows = kvc_view_rows(k, (size_t)from, (size_t)run->n, (size_t)h);
        const struct kvc_rows v_rows = kvc_view_rows(v, (size_t)from, (size_t)run->n, (size_t)h);
        if (run->slot < 0) {
            store(cache, pair, &cache->layouts[KVC_LAYOUT_STRIP], kvc_strip(cache, seq, pair),
                  run->first, &k_rows, &v_rows);
            continue;
        }
        struct kvc_column *column = kvc_slot(cache, seq, run->slot);
        struct kvc_entry *e = &column->entries[pair];
        const int32_t row = run->first - column->first;
        store(cache, pair, &cache->layouts[KVC_LAYOUT_OPEN], kvc_page_data(cache, e->page), row,
              &k_rows, &v_rows);
        e->n_rows = (uint8_t)(row + run->n);
        e->live |= kvc_bits(row, row + run->n);
    }
}

static bool rows_fit(const kvc_view *view, int32_t n_heads, int32_t head_dim)
{
    return kvc_view_ok(view) && view->n_heads == (size_t)n_heads &&
           view->head_dim == (size_t)head_dim;
}

static bool all_finite(const kvc_ctx *ctx, const kvc_view *view)
{
    for (size_t h = 0; h < view->n_heads; h++) {
        const struct kvc_rows rows = kvc_view_rows(view, 0, view->n_tokens, h);
        struct kvc_range range;
        ctx->k->range_rows(&ctx->queue, &rows, &range);
        if (range.n_nonfinite)
            return false;
    }
    return true;
}

kvc_status kvc_append(kvc_cache *cache, kvc_seq seq, int32_t layer, const kvc_view *k,
                      const kvc_view *v)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && layer >= 0 && layer < cache->params.n_layers, KVC_E_ARG);
    const kvc_cache_params *p = &cache->params;
    KVC_CHECK(rows_fit(k, p->n_kv_heads, p->head_dim_k) &&
                  rows_fit(v, p->n_kv_heads, p->head_dim_v) && k->n_tokens == v->n_tokens,
              KVC_E_ARG);
    int32_t at = s->appended[layer];
    KVC_CHECK(k->n_tokens <= (size_t)(s->n_tokens - at), KVC_E_ARG);
    if (k->n_tokens == 0)
        return KVC_OK;
    if (p->strict)
        KVC_CHECK(all_finite(cache->ctx, k) && all_finite(cache->ctx, v), KVC_E_NONFINITE);

    const int32_t begin = at, end = at + (int32_t)k->n_tokens;
    while (at < end) {
        const struct run run = next_run(cache, s, at, end);
        store_run(cache, s, layer, &run, k, v, at - begin);
        at += run.n;
    }
    s->appended[layer] = end;
    return KVC_OK;
}
