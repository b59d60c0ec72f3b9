/* sequence.c - the life of a sequence: create, fork, truncate, remove, hold, destroy. */
#include <string.h>

#include "check.h"
#include "state.h"

/* A handle is the generation above the index plus one. */
static kvc_seq handle_of(const kvc_cache *cache, const struct kvc_sequence *seq)
{
    return (uint64_t)seq->generation << 32 | (uint32_t)(kvc_seq_index(cache, seq) + 1);
}

struct kvc_sequence *kvc_seq_find(const kvc_cache *cache, kvc_seq seq)
{
    const uint64_t index = (seq & UINT32_MAX) - 1;
    if (!cache || index >= (uint64_t)cache->params.max_sequences)
        return NULL;
    struct kvc_sequence *s = &cache->sequences[index];
    return s->alive && s->generation == seq >> 32 ? s : NULL;
}

bool kvc_seq_complete(const kvc_cache *cache, const struct kvc_sequence *seq)
{
    for (int32_t l = 0; l < cache->params.n_layers; l++)
        if (seq->appended[l] != seq->n_tokens)
            return false;
    return true;
}

static struct kvc_sequence *find_free(const kvc_cache *cache)
{
    for (int32_t i = 0; i < cache->params.max_sequences; i++)
        if (!cache->sequences[i].alive)
            return &cache->sequences[i];
    return NULL;
}

static int64_t *probe_ordinals(const kvc_cache *cache, const struct kvc_sequence *seq)
{
    const size_t rows = (size_t)cache->params.n_layers * (size_t)cache->params.probe_rows;
    return cache->probe_ordinals + (size_t)kvc_seq_index(cache, seq) * rows;
}

/* Forgets the probe rows of ordinals from n_tokens on. */
static void cut_probes(const kvc_cache *cache, const struct kvc_sequence *seq, int64_t n_tokens)
{
    int64_t *ordinals = probe_ordinals(cache, seq);
    const int64_t n = (int64_t)cache->params.n_layers * cache->params.probe_rows;
    for (int64_t i = 0; i < n; i++)
        if (ordinals[i] >= n_tokens)
            ordinals[i] = -1;
}

static void start(kvc_cache *cache, struct kvc_sequence *seq)
{
    seq->alive = true;
    seq->generation++;
    seq->n_tokens = seq->n_slots = seq->first_unsealed = 0;
    seq->n_facts = seq->first_next = seq->merged_end = 0;
    seq->score_base = 0;
    kvc_gate_init(&seq->gate, sizeof(seq->gate));
    seq->next_position = 0;
    seq->hold_from = -1;
    seq->strip_live = 0;
    memset(seq->appended, 0, (size_t)cache->params.n_layers * sizeof(*seq->appended));
    cut_probes(cache, seq, INT64_MIN);
}

kvc_status kvc_seq_create(kvc_cache *cache, kvc_seq *out)
{
    KVC_CHECK(out, KVC_E_ARG);
    *out = 0;
    KVC_CHECK(cache, KVC_E_ARG);
    struct kvc_sequence *seq = find_free(cache);
    KVC_CHECK(seq, KVC_E_FULL);
    start(cache, seq);
    *out = handle_of(cache, seq);
    return KVC_OK;
}

struct kvc_column *kvc_seq_open_slot(const kvc_cache *cache, const struct kvc_sequence *seq,
                                     int32_t n_sealed)
{
    if (n_sealed == seq->n_slots)
        return NULL;
    struct kvc_column *column = kvc_slot(cache, seq, seq->n_slots - 1);
    return kvc_slot_full(cache, column) ? NULL : column;
}

int32_t kvc_page_copy(kvc_cache *cache, int32_t page, uint32_t n_rows)
{
    const kvc_ctx *ctx = cache->ctx;
    const int32_t copy = kvc_page_alloc(cache, KVC_LAYOUT_OPEN);
    if (n_rows)
        ctx->k->move_rows(&ctx->queue, &cache->layouts[KVC_LAYOUT_OPEN], kvc_page_data(cache, page),
                          NULL, n_rows, kvc_page_data(cache, copy), 0);
    return copy;
}

static void copy_strips(const kvc_cache *cache, const struct kvc_sequence *src,
                        const struct kvc_sequence *dst)
{
    const kvc_ctx *ctx = cache->ctx;
    const int32_t n = kvc_min32(src->n_tokens, cache->params.sink_tokens);
    for (int32_t pair = 0; pair < cache->n_pairs && n > 0; pair++)
        ctx->k->move_rows(&ctx->queue, &cache->layouts[KVC_LAYOUT_STRIP],
                          kvc_strip(cache, src, pair), NULL, (uint32_t)n,
                          kvc_strip(cache, dst, pair), 0);
}

static void copy_probes(const kvc_cache *cache, const struct kvc_sequence *src,
                        const struct kvc_sequence *dst)
{
    const kvc_cache_params *p = &cache->params;
    const size_t rows = (size_t)p->n_layers * (size_t)p->probe_rows;
    const size_t row = (size_t)p->n_heads * (size_t)p->head_dim_k;
    const int64_t *ordinals = probe_ordinals(cache, src);
    for (size_t i = 0; i < rows; i++) {
        probe_ordinals(cache, dst)[i] = ordinals[i];
        if (ordinals[i] >= 0)
            memcpy(cache->probes + ((size_t)kvc_seq_index(cache, dst) * rows + i) * row,
                   cache->probes + ((size_t)kvc_seq_index(cache, src) * rows + i) * row,
                   row * sizeof(uint16_t));
    }
}

/* Shares the pages of a copied column, or copies them where rows will be added. */
static void copy_entries(kvc_cache *cache, struct kvc_column *column, bool open)
{
    for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
        struct kvc_entry *e = &column->entries[pair];
        if (e->page < 0)
            continue;
        if (!open) {
            kvc_page_share(cache, e->page);
            continue;
        }
        e->page = kvc_page_copy(cache, e->page, e->n_rows);
    }
}

kvc_status kvc_seq_fork(kvc_cache *cache, kvc_seq src, kvc_seq *out)
{
    KVC_CHECK(out, KVC_E_ARG);
    *out = 0;
    const struct kvc_sequence *from = kvc_seq_find(cache, src);
    KVC_CHECK(from && kvc_seq_complete(cache, from), KVC_E_ARG);
    struct kvc_sequence *to = find_free(cache);
    const struct kvc_column *open = kvc_seq_open_slot(cache, from, from->first_unsealed);
    /* The reserve of class 0 covers the open pages of every sequence. */
    KVC_CHECK(to && from->n_slots <= cache->n_free_columns &&
                  kvc_fact_pages(from->n_facts) <= cache->n_free_facts &&
                  cache->n_facts + from->n_facts <= cache->params.max_tokens &&
                  (!open || cache->n_pairs <= cache->classes[0].n_free),
              KVC_E_FULL);

    start(cache, to);
    kvc_facts_copy(cache, from, to);
    for (int32_t i = 0; i < from->n_slots; i++) {
        const struct kvc_column *column = kvc_slot(cache, from, i);
        to->slots[i] = cache->free_columns[--cache->n_free_columns];
        memcpy(kvc_slot(cache, to, i), column, cache->column_bytes);
        copy_entries(cache, kvc_slot(cache, to, i), column == open);
    }
    to->n_slots = from->n_slots;
    to->first_unsealed = from->first_unsealed;
    to->n_tokens = from->n_tokens;
    to->next_position = from->next_position;
    to->merged_end = from->merged_end;
    to->score_base = from->score_base;
    to->gate = from->gate;
    to->hold_from = from->hold_from;
    to->strip_live = from->strip_live;
    memcpy(to->appended, from->appended, (size_t)cache->params.n_layers * sizeof(*to->appended));
    cache->n_tokens += from->n_tokens;
    copy_strips(cache, from, to);
    copy_probes(cache, from, to);
    *out = handle_of(cache, to);
    return KVC_OK;
}

void kvc_entry_clear(kvc_cache *cache, struct kvc_entry *e)
{
    if (e->page >= 0)
        kvc_page_release(cache, e->page);
    *e = (struct kvc_entry){.page = -1};
}

static void free_slot(kvc_cache *cache, struct kvc_sequence *seq, int32_t slot)
{
    struct kvc_column *column = kvc_slot(cache, seq, slot);
    for (int32_t pair = 0; pair < cache->n_pairs; pair++)
        kvc_entry_clear(cache, &column->entries[pair]);
    cache->free_columns[cache->n_free_columns++] = seq->slots[slot];
}

/* Whether a slot has no rows and none will come: all that were announced have been here. */
static bool is_spent(const kvc_cache *cache, const struct kvc_column *column, bool sealed)
{
    if (!sealed && !kvc_slot_full(cache, column))
        return false;
    for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
        const struct kvc_entry *e = &column->entries[pair];
        if (sealed ? e->page >= 0 : e->live || e->n_rows < column->n)
            return false;
    }
    return true;
}

void kvc_seq_drop_empty_slots(kvc_cache *cache, struct kvc_sequence *seq)
{
    const int32_t n_sealed = seq->first_unsealed;
    int32_t n = 0;

    for (int32_t i = 0; i < seq->n_slots; i++) {
        if (!is_spent(cache, kvc_slot(cache, seq, i), i < n_sealed)) {
            seq->slots[n++] = seq->slots[i];
            continue;
        }
        free_slot(cache, seq, i);
        seq->first_unsealed -= i < n_sealed;
    }
    seq->n_slots = n;
}

uint64_t kvc_rows_range(const int32_t *ordinals, int32_t start, int32_t n_rows, int64_t first,
                        int64_t last)
{
    int32_t low = 0, high;

    if (!ordinals)
        return kvc_bits(first - start, last - start) & kvc_bits(0, n_rows);
    while (low < n_rows && ordinals[low] < first)
        low++;
    for (high = low; high < n_rows && ordinals[high] < last; high++) {
    }
    return kvc_bits(low, high);
}

uint64_t kvc_entry_range(const kvc_cache *cache, const struct kvc_column *column, int32_t pair,
                         int64_t first, int64_t last)
{
    const struct kvc_entry *e = &column->entries[pair];
    const int32_t *ordinals = e->page >= 0 ? kvc_page_ordinals(cache, e->page) : NULL;
    return kvc_rows_range(ordinals, column->first, e->n_rows, first, last);
}

/* Whether a range holds some members of a group of merged tokens and not others; taken from the
 * first and last member, so a range between two members counts too. */
static bool cuts_group(const kvc_cache *cache, const struct kvc_entry *e, int64_t first,
                       int64_t last)
{
    const struct kvc_groups *groups = kvc_page_groups(cache, e->page);
    const int32_t *ordinals = kvc_page_ordinals(cache, e->page);
    for (uint64_t left = groups ? e->live : 0; left; left &= left - 1) {
        const int r = __builtin_ctzll(left);
        const int64_t begin = ordinals[r] - groups->before[r];
        const int64_t end = ordinals[r] + INT64_C(1) + groups->after[r];
        const bool apart = last <= begin || first >= end;
        const bool whole = first <= begin && last >= end;
        if (!apart && !whole)
            return true;
    }
    return false;
}

static bool cuts_groups(const kvc_cache *cache, const struct kvc_sequence *seq, int64_t first,
                        int64_t last)
{
    if (first >= seq->merged_end || first >= last)
        return false;
    for (int32_t i = 0; i < seq->n_slots; i++) {
        const struct kvc_column *column = kvc_slot(cache, seq, i);
        for (int32_t pair = 0; pair < cache->n_pairs; pair++)
            if (column->entries[pair].page >= 0 &&
                cuts_group(cache, &column->entries[pair], first, last))
                return true;
    }
    return false;
}

/* The ordinal after the last member of any group. */
static int32_t find_merged_end(const kvc_cache *cache, const struct kvc_sequence *seq)
{
    int32_t last = 0;
    for (int32_t i = 0; i < seq->n_slots; i++)
        for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
            const struct kvc_entry *e = &kvc_slot(cache, seq, i)->entries[pair];
            const struct kvc_groups *groups = e->page >= 0 ? kvc_page_groups(cache, e->page) : NULL;
            const int32_t *ordinals = groups ? kvc_page_ordinals(cache, e->page) : NULL;
            for (uint64_t left = groups ? e->live : 0; left; left &= left - 1) {
                const int r = __builtin_ctzll(left);
                const int32_t end = ordinals[r] + 1 + groups->after[r];
                last = groups->size[r] > 1 && end > last ? end : last;
            }
        }
    return last;
}

/* Forgets the scores of the rows from n_rows on; of a page's sum only with the last row. */
static void cut_scores(const kvc_cache *cache, struct kvc_column *column, int32_t pair,
                       int32_t n_rows)
{
    float *scores = kvc_slot_scores(cache, column, pair);
    if (cache->params.score_mode == KVC_SCORE_TOKEN)
        memset(scores + n_rows, 0, (size_t)(KVC_PAGE_ROWS - n_rows) * sizeof(*scores));
    else if (cache->params.score_mode == KVC_SCORE_PAGE && n_rows == 0)
        scores[0] = 0.0f;
}

/* Cuts the entries of a slot down to the ordinals below n_tokens. */
static void cut_slot(kvc_cache *cache, struct kvc_sequence *seq, int32_t slot, int32_t n_tokens)
{
    struct kvc_column *column = kvc_slot(cache, seq, slot);
    if (column->end <= n_tokens)
        return;
    column->end = n_tokens;
    column->n = kvc_min32(column->n, n_tokens - column->first);
    for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
        struct kvc_entry *e = &column->entries[pair];
        if (e->page < 0)
            continue;
        const uint64_t keep = kvc_entry_range(cache, column, pair, 0, n_tokens);
        e->live &= keep;
        e->n_rows = (uint8_t)__builtin_popcountll(keep); /* rows ascend: a prefix is kept */
        cut_scores(cache, column, pair, e->n_rows);
        if (e->live == 0 && slot < seq->first_unsealed)
            kvc_entry_clear(cache, e);
    }
}

kvc_status kvc_seq_truncate(kvc_cache *cache, kvc_seq seq, int64_t n_tokens)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && n_tokens >= 0 && n_tokens <= s->n_tokens, KVC_E_ARG);
    const int32_t n = (int32_t)n_tokens;
    if (n == s->n_tokens)
        return KVC_OK;
    KVC_CHECK(!cuts_groups(cache, s, n, s->n_tokens), KVC_E_ARG);

    while (s->n_slots > 0 && kvc_slot(cache, s, s->n_slots - 1)->first >= n)
        free_slot(cache, s, --s->n_slots);
    s->first_unsealed = kvc_min32(s->first_unsealed, s->n_slots);
    for (int32_t i = 0; i < s->n_slots; i++)
        cut_slot(cache, s, i, n);
    kvc_facts_cut(cache, s, n);
    s->strip_live &= kvc_bits(0, n);
    for (int32_t l = 0; l < cache->params.n_layers; l++)
        s->appended[l] = kvc_min32(s->appended[l], n);
    if (s->hold_from > n)
        s->hold_from = n;
    if (s->score_base > n)
        kvc_scores_rebase(cache, s, n);
    cache->n_tokens -= s->n_tokens - n;
    s->n_tokens = n;
    if (s->merged_end > 0)
        s->merged_end = find_merged_end(cache, s);
    cut_probes(cache, s, n);
    kvc_seq_drop_empty_slots(cache, s);
    return KVC_OK;
}

kvc_status kvc_seq_remove(kvc_cache *cache, kvc_seq seq, int64_t first, int64_t last)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && kvc_seq_complete(cache, s), KVC_E_ARG);
    KVC_CHECK(first >= 0 && first <= last && last <= s->n_tokens, KVC_E_ARG);
    KVC_CHECK(!cuts_groups(cache, s, first, last), KVC_E_ARG);

    s->strip_live &= ~kvc_bits(first, last);
    for (int32_t i = 0; i < s->n_slots; i++) {
        struct kvc_column *column = kvc_slot(cache, s, i);
        for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
            struct kvc_entry *e = &column->entries[pair];
            e->live &= ~kvc_entry_range(cache, column, pair, first, last);
            if (e->live == 0 && i < s->first_unsealed)
                kvc_entry_clear(cache, e);
        }
    }
    kvc_seq_drop_empty_slots(cache, s);
    if (s->merged_end > 0)
        s->merged_end = find_merged_end(cache, s);
    return KVC_OK;
}

kvc_status kvc_seq_hold(kvc_cache *cache, kvc_seq seq)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && cache->params.max_hold_tokens > 0, KVC_E_ARG);
    if (s->hold_from < 0)
        s->hold_from = s->n_tokens;
    return KVC_OK;
}

kvc_status kvc_seq_destroy(kvc_cache *cache, kvc_seq seq)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s, KVC_E_ARG);
    KVC_TRY(kvc_seq_truncate(cache, seq, 0));
    s->alive = false;
    return KVC_OK;
}

int64_t kvc_seq_n_tokens(const kvc_cache *cache, kvc_seq seq)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    return s ? s->n_tokens : -1;
}

int64_t kvc_seq_next_position(const kvc_cache *cache, kvc_seq seq)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    return s ? s->next_position : -1;
}
