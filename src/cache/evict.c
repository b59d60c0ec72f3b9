/* evict.c - dropping rows: what a choice lets go, and room for what is announced. */
#include <string.h>

#include "choose.h"

int32_t kvc_most_rows(const kvc_cache *cache, const struct kvc_sequence *seq)
{
    int32_t most = 0;
    for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
        int32_t n = __builtin_popcountll(seq->strip_live);
        for (int32_t slot = 0; slot < seq->n_slots; slot++)
            n += __builtin_popcountll(kvc_slot(cache, seq, slot)->entries[pair].live);
        most = n > most ? n : most;
    }
    return most;
}

void kvc_drop_rows(struct kvc_choice *c)
{
    for (int32_t slot = 0; slot < c->seq->n_slots; slot++) {
        struct kvc_column *column = kvc_slot(c->cache, c->seq, slot);
        if (slot >= c->seq->first_unsealed && slot < c->end)
            continue; /* its place is taken by new pages */
        for (int32_t pair = 0; pair < c->cache->n_pairs; pair++) {
            struct kvc_entry *e = &column->entries[pair];
            e->live = kvc_rows_staying(c, column, pair);
            if (e->live == 0 && slot < c->seq->first_unsealed)
                kvc_entry_clear(c->cache, e);
        }
    }
}

void kvc_forget_tokens(struct kvc_choice *c)
{
    memset(c->group, 0, c->words * sizeof(*c->group));
    for (int32_t pair = 0; pair < c->cache->n_pairs; pair++)
        for (size_t w = 0; w < c->words; w++)
            c->group[w] |= kvc_choice_bits(c, c->keep, pair)[w];
    for (int32_t i = 0; i < c->n; i++) {
        const int32_t ordinal = kvc_fact(c->cache, c->seq, i)->ordinal;
        if (kvc_is_sink(c->seq, ordinal))
            kvc_mark(c->group, i);
    }
    kvc_facts_keep(c->cache, c->seq, c->group);
}

/* Whether the rows of every sealed page can move alone. */
static bool rows_move(const kvc_cache *cache, const struct kvc_sequence *seq)
{
    for (int32_t slot = 0; slot < seq->first_unsealed; slot++)
        for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
            const int32_t page = kvc_slot(cache, seq, slot)->entries[pair].page;
            if (page >= 0 && !kvc_rows_move(cache, kvc_page_tag(cache, page)))
                return false;
        }
    return true;
}

bool kvc_evict(kvc_cache *cache, struct kvc_sequence *seq, const kvc_policy *policy,
               int32_t max_rows, int32_t n_coming)
{
    struct kvc_choice c;

    kvc_choice_start(&c, cache, seq, policy, NULL);
    c.max_rows = max_rows > 0 ? max_rows : 1;
    c.n_coming = n_coming;
    c.only_rows = true;
    if (!rows_move(cache, seq)) /* a page is freed only when it is empty */
        c.block = KVC_PAGE_TOKENS;
    kvc_choose(&c);
    if (memcmp(c.keep, c.live, (size_t)cache->n_pairs * c.words * sizeof(*c.live)) == 0)
        return false;
    kvc_drop_rows(&c);
    kvc_forget_tokens(&c);
    kvc_compact(cache, seq);
    return true;
}
