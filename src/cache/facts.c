/* facts.c - the token tables: what a sequence knows of its tokens, in ascending ordinals. */
#include <string.h>

#include "state.h"

bool kvc_facts_fit(const kvc_cache *cache, const struct kvc_sequence *seq, int64_t n)
{
    const kvc_cache_params *p = &cache->params;
    const int64_t end = seq->n_facts + n;
    return cache->n_facts + n <= p->max_tokens && end <= p->max_sequence_tokens &&
           kvc_fact_pages((int32_t)end) - kvc_fact_pages(seq->n_facts) <= cache->n_free_facts;
}

void kvc_facts_put(kvc_cache *cache, struct kvc_sequence *seq, int32_t ordinal,
                   const kvc_token *token)
{
    const int32_t i = seq->n_facts++;
    if (i % KVC_PAGE_TOKENS == 0)
        seq->facts[i / KVC_PAGE_TOKENS] = cache->free_facts[--cache->n_free_facts];
    const int32_t yx = token->y > token->x ? token->y : token->x;
    const int64_t after = (token->t > yx ? token->t : yx) + INT64_C(1);
    seq->next_position = after > seq->next_position ? after : seq->next_position;
    *kvc_fact(cache, seq, i) = (struct kvc_fact){
        .t = token->t,
        .y = token->y,
        .x = token->x,
        .image = token->image,
        .row = token->row,
        .col = token->col,
        .ordinal = ordinal,
        .next = (int32_t)seq->next_position,
        .kind = token->kind,
        .flags = token->flags,
    };
    cache->n_facts++;
}

int32_t kvc_facts_find(const kvc_cache *cache, const struct kvc_sequence *seq, int64_t ordinal)
{
    int32_t low = 0, high = seq->n_facts;
    if (ordinal >= 0 && ordinal < high &&
        kvc_fact(cache, seq, (int32_t)ordinal)->ordinal == ordinal)
        return (int32_t)ordinal; /* nothing before it was forgotten */
    while (low < high) {
        const int32_t mid = low + (high - low) / 2;
        if (kvc_fact(cache, seq, mid)->ordinal < ordinal)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* Gives the pages beyond the first n facts back. */
static void shrink(kvc_cache *cache, struct kvc_sequence *seq, int32_t n)
{
    for (int32_t i = kvc_fact_pages(n); i < kvc_fact_pages(seq->n_facts); i++)
        cache->free_facts[cache->n_free_facts++] = seq->facts[i];
    cache->n_facts -= seq->n_facts - n;
    seq->n_facts = n;
}

void kvc_facts_cut(kvc_cache *cache, struct kvc_sequence *seq, int64_t n_tokens)
{
    shrink(cache, seq, kvc_facts_find(cache, seq, n_tokens));
    seq->next_position =
        seq->n_facts > 0 ? kvc_fact(cache, seq, seq->n_facts - 1)->next : seq->first_next;
    if (n_tokens == 0)
        seq->next_position = seq->first_next = 0;
}

void kvc_facts_copy(kvc_cache *cache, const struct kvc_sequence *src, struct kvc_sequence *dst)
{
    for (int32_t i = 0; i < kvc_fact_pages(src->n_facts); i++) {
        dst->facts[i] = cache->free_facts[--cache->n_free_facts];
        const int32_t n = kvc_min32(src->n_facts - i * KVC_PAGE_TOKENS, KVC_PAGE_TOKENS);
        memcpy(kvc_fact(cache, dst, i * KVC_PAGE_TOKENS), kvc_fact(cache, src, i * KVC_PAGE_TOKENS),
               (size_t)n * sizeof(struct kvc_fact));
    }
    dst->n_facts = src->n_facts;
    dst->first_next = src->first_next;
    cache->n_facts += src->n_facts;
}

void kvc_facts_keep(kvc_cache *cache, struct kvc_sequence *seq, const uint64_t *keep)
{
    int32_t n = 0;
    for (int32_t i = 0; i < seq->n_facts; i++) {
        const struct kvc_fact *from = kvc_fact(cache, seq, i);
        if (kvc_bit(keep, (size_t)i))
            *kvc_fact(cache, seq, n++) = *from;
        else if (n > 0)
            kvc_fact(cache, seq, n - 1)->next = from->next;
        else
            seq->first_next = from->next;
    }
    shrink(cache, seq, n);
}
