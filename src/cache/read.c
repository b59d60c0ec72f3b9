/* read.c - reading a sequence back: tokens, rows, pages, probe rows. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "kvc/policy.h"
#include "state.h"

static bool pair_ok(const kvc_cache *cache, int32_t layer, int32_t kv_head)
{
    return layer >= 0 && layer < cache->params.n_layers && kv_head >= 0 &&
           kv_head < cache->params.n_kv_heads;
}

/* Sinks of a layer that can be read: appended and not removed. */
static uint64_t strip_rows(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t layer)
{
    return seq->strip_live &
           kvc_bits(0, kvc_min32(seq->appended[layer], cache->params.sink_tokens));
}

int64_t kvc_seq_n_rows(const kvc_cache *cache, kvc_seq seq, int32_t layer, int32_t kv_head)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    if (!s || !pair_ok(cache, layer, kv_head))
        return -1;
    int64_t n = __builtin_popcountll(strip_rows(cache, s, layer));
    for (int32_t i = 0; i < s->n_slots; i++)
        n += __builtin_popcountll(
            kvc_slot(cache, s, i)->entries[kvc_pair(cache, layer, kv_head)].live);
    return n;
}

kvc_status kvc_seq_read_tokens(const kvc_cache *cache, kvc_seq seq, int64_t first, size_t n,
                               kvc_token *tokens)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && tokens && first >= 0 && first <= s->n_tokens &&
                  n <= (size_t)(s->n_tokens - first),
              KVC_E_ARG);
    const int32_t begin = kvc_facts_find(cache, s, first);
    KVC_CHECK(kvc_facts_find(cache, s, first + (int64_t)n) - begin == (int32_t)n, KVC_E_ARG);
    for (size_t i = 0; i < n; i++) {
        const struct kvc_fact *f = kvc_fact(cache, s, begin + (int32_t)i);
        tokens[i] = (kvc_token){.t = f->t,
                                .y = f->y,
                                .x = f->x,
                                .image = f->image,
                                .row = f->row,
                                .col = f->col,
                                .kind = f->kind,
                                .flags = f->flags};
    }
    return KVC_OK;
}

/* Where rows are read to, and how many there are. */
struct rows {
    int32_t pair;
    int64_t *ordinals;
    float *k, *v, *scores, *biases;
    int32_t *sizes;
    size_t n;
};

static void read_row(const kvc_cache *cache, const struct kvc_page_layout *layout,
                     const uint8_t *page, uint32_t row, int64_t ordinal, float score,
                     struct rows *out)
{
    const kvc_ctx *ctx = cache->ctx;

    float *k = out->k ? out->k + out->n * layout->d_k : NULL;
    float *v = out->v ? out->v + out->n * layout->d_v : NULL;
    if (k || v) {
        ctx->k->read_page(&ctx->queue, layout, page, row, 1, k, layout->d_k, v, layout->d_v);
        kvc_restore_rows(cache, out->pair, k, layout->d_k, v, layout->d_v, 1);
    }
    if (out->ordinals)
        out->ordinals[out->n] = ordinal;
    if (out->scores)
        out->scores[out->n] = score;
    out->n++;
}

float kvc_row_score(const kvc_cache *cache, struct kvc_column *column, int32_t pair, uint32_t row)
{
    const float *scores = kvc_slot_scores(cache, column, pair);
    switch (cache->params.score_mode) {
    case KVC_SCORE_PAGE: return scores[0] / (float)__builtin_popcountll(column->entries[pair].live);
    case KVC_SCORE_TOKEN: return scores[row];
    default: return 0.0f;
    }
}

float kvc_score_factor(const kvc_cache *cache, const struct kvc_sequence *seq)
{
    const float decay = cache->params.score_decay;
    const float age = (float)(seq->n_tokens - 1 - seq->score_base);
    return decay < 1.0f ? expf(age * logf(decay)) : 1.0f;
}

/* Adds the rows of a slot that lie in first ... last - 1. */
static void read_slot(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t slot,
                      int32_t pair, int64_t first, int64_t last, struct rows *out)
{
    struct kvc_column *column = kvc_slot(cache, seq, slot);
    const struct kvc_entry *e = &column->entries[pair];
    const int32_t *list = e->page >= 0 ? kvc_page_ordinals(cache, e->page) : NULL;
    const struct kvc_groups *groups = e->page >= 0 ? kvc_page_groups(cache, e->page) : NULL;
    uint64_t left = e->live & kvc_entry_range(cache, column, pair, first, last);
    for (; left; left &= left - 1) {
        const uint32_t r = (uint32_t)__builtin_ctzll(left);
        if (out->biases)
            out->biases[out->n] = groups ? groups->bias[r] : 0.0f;
        if (out->sizes)
            out->sizes[out->n] = groups ? groups->size[r] : 1;
        read_row(cache, kvc_page_layout_of(cache, e->page), kvc_page_data(cache, e->page), r,
                 list ? list[r] : column->first + (int64_t)r,
                 kvc_row_score(cache, column, pair, r) * kvc_score_factor(cache, seq), out);
    }
}

/* The first ordinal from `from` on that a slot holds, or INT64_MAX. */
static int64_t next_ordinal(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t slot,
                            int32_t pair, int64_t from)
{
    const struct kvc_column *column = kvc_slot(cache, seq, slot);
    const struct kvc_entry *e = &column->entries[pair];
    const uint64_t rows = e->live & kvc_entry_range(cache, column, pair, from, INT32_MAX);
    if (!rows)
        return INT64_MAX;
    const int32_t *list = kvc_page_ordinals(cache, e->page);
    return list ? list[__builtin_ctzll(rows)] : column->first + __builtin_ctzll(rows);
}

/* Reads rows in ascending ordinals: pages of different formats may lie side by side. */
static void read_slots(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t pair,
                       struct rows *out)
{
    for (int64_t from = 0;;) {
        int64_t first = INT64_MAX, other = INT64_MAX;
        int32_t best = 0;
        for (int32_t slot = 0; slot < seq->n_slots; slot++) {
            const int64_t next = next_ordinal(cache, seq, slot, pair, from);
            if (next < first) {
                other = first;
                first = next;
                best = slot;
            } else if (next < other) {
                other = next;
            }
        }
        if (first == INT64_MAX)
            return;
        read_slot(cache, seq, best, pair, first, other, out);
        from = other;
    }
}

/* Reads the sinks and the slots of a pair. */
static void read_pair(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t layer,
                      int32_t kv_head, struct rows *out)
{
    const int32_t pair = kvc_pair(cache, layer, kv_head);
    for (uint64_t left = strip_rows(cache, seq, layer); left; left &= left - 1) {
        const uint32_t r = (uint32_t)__builtin_ctzll(left);
        if (out->biases)
            out->biases[out->n] = 0.0f;
        if (out->sizes)
            out->sizes[out->n] = 1;
        read_row(cache, &cache->layouts[KVC_LAYOUT_STRIP], kvc_strip(cache, seq, pair), r, r, 0.0f,
                 out);
    }
    read_slots(cache, seq, pair, out);
}

kvc_status kvc_seq_read_rows(const kvc_cache *cache, kvc_seq seq, int32_t layer, int32_t kv_head,
                             size_t max_rows, int64_t *ordinals, float *k, float *v, float *scores,
                             size_t *n_rows)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && n_rows && pair_ok(cache, layer, kv_head), KVC_E_ARG);
    KVC_CHECK((uint64_t)kvc_seq_n_rows(cache, seq, layer, kv_head) <= max_rows, KVC_E_ARG);

    struct rows out = {.pair = kvc_pair(cache, layer, kv_head),
                       .ordinals = ordinals,
                       .k = k,
                       .v = v,
                       .scores = scores};
    read_pair(cache, s, layer, kv_head, &out);
    *n_rows = out.n;
    return KVC_OK;
}

kvc_status kvc_seq_read_groups(const kvc_cache *cache, kvc_seq seq, int32_t layer, int32_t kv_head,
                               size_t max_rows, float *biases, int32_t *sizes, size_t *n_rows)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && n_rows && pair_ok(cache, layer, kv_head), KVC_E_ARG);
    KVC_CHECK((uint64_t)kvc_seq_n_rows(cache, seq, layer, kv_head) <= max_rows, KVC_E_ARG);

    struct rows out = {.biases = biases, .sizes = sizes};
    read_pair(cache, s, layer, kv_head, &out);
    *n_rows = out.n;
    return KVC_OK;
}

int64_t kvc_seq_n_pages(const kvc_cache *cache, kvc_seq seq, int32_t layer, int32_t kv_head)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    if (!s || !pair_ok(cache, layer, kv_head))
        return -1;
    int64_t n = 0;
    for (int32_t i = 0; i < s->n_slots; i++)
        n += kvc_slot(cache, s, i)->entries[kvc_pair(cache, layer, kv_head)].page >= 0;
    return n;
}

/* The slot of the index-th page of a pair. */
static int32_t find_page(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t pair,
                         int64_t index)
{
    int32_t slot = 0;
    for (;; slot++)
        if (kvc_slot(cache, seq, slot)->entries[pair].page >= 0 && index-- == 0)
            return slot;
}

kvc_status kvc_seq_read_page(const kvc_cache *cache, kvc_seq seq, int32_t layer, int32_t kv_head,
                             int64_t index, kvc_page_info *info, int64_t *ordinals, void *bytes,
                             size_t n_bytes)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && info && info->struct_size >= sizeof(*info), KVC_E_ARG);
    KVC_CHECK(index >= 0 && index < kvc_seq_n_pages(cache, seq, layer, kv_head), KVC_E_ARG);

    const int32_t pair = kvc_pair(cache, layer, kv_head);
    const int32_t slot = find_page(cache, s, pair, index);
    const struct kvc_column *column = kvc_slot(cache, s, slot);
    const struct kvc_entry *e = &column->entries[pair];
    const struct kvc_page_layout *layout = kvc_page_layout_of(cache, e->page);
    const int32_t *list = kvc_page_ordinals(cache, e->page);
    KVC_CHECK(!bytes || n_bytes >= layout->n_bytes, KVC_E_ARG);
    const kvc_page_info i = {
        .sealed = slot < s->first_unsealed,
        .precision = {.k = (kvc_format)layout->k_format,
                      .v = (kvc_format)layout->v_format,
                      .k_scale = (kvc_scale)layout->k_scale,
                      .v_scale = (kvc_scale)layout->v_scale},
        .n_rows = e->n_rows,
        .live = e->live,
        .n_bytes = layout->n_bytes,
        .n_owners = cache->pages[e->page].owners,
    };
    kvc_struct_write(info, &i, sizeof(i));
    for (int32_t r = 0; r < e->n_rows && ordinals; r++)
        ordinals[r] = list ? list[r] : column->first + r;
    if (bytes)
        memcpy(bytes, kvc_page_data(cache, e->page), layout->n_bytes);
    return KVC_OK;
}

kvc_status kvc_seq_read_probes(const kvc_cache *cache, kvc_seq seq, int32_t layer,
                               int64_t *ordinals, float *q, size_t *n_rows)
{
    const struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && ordinals && n_rows && layer >= 0 && layer < cache->params.n_layers, KVC_E_ARG);

    const kvc_ctx *ctx = cache->ctx;
    const kvc_cache_params *p = &cache->params;
    const size_t n = (size_t)p->probe_rows, row = (size_t)p->n_heads * (size_t)p->head_dim_k;
    const size_t ring = ((size_t)kvc_seq_index(cache, s) * (size_t)p->n_layers + (size_t)layer) * n;
    size_t n_read = 0;
    int64_t last = -1;
    for (;;) { /* the next larger ordinal of the ring */
        size_t best = n;
        for (size_t i = 0; i < n; i++) {
            const int64_t o = cache->probe_ordinals[ring + i];
            if (o > last && (best == n || o < cache->probe_ordinals[ring + best]))
                best = i;
        }
        if (best == n)
            break;
        last = cache->probe_ordinals[ring + best];
        ordinals[n_read] = last;
        if (q) {
            const struct kvc_rows src = {cache->probes + (ring + best) * row, KVC_DTYPE_F16, row, 1,
                                         row};
            ctx->k->load_rows(&ctx->queue, &src, q + n_read * row, row, row);
        }
        n_read++;
    }
    *n_rows = n_read;
    return KVC_OK;
}
