/* attend.h - launchers of attention over the pages of a cache. */
#ifndef KVC_CUDA_ATTEND_H
#define KVC_CUDA_ATTEND_H

#include "table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most query rows of a KV head whose pages are split into blocks for several parts of the device;
 * with more, rows are enough to fill it. */
#define KVC_DEVICE_SPLIT_ROWS 16

/* Entries of a block, and blocks of a call. */
static inline int32_t kvc_device_block_entries(const struct kvc_device_cache *cache, int32_t n_q)
{
    return n_q * cache->group > KVC_DEVICE_SPLIT_ROWS ? cache->row_entries : KVC_DEVICE_BLOCK_PAGES;
}

static inline int32_t kvc_device_blocks(const struct kvc_device_cache *cache, int32_t n_q)
{
    const int32_t n = kvc_device_block_entries(cache, n_q);
    return (cache->row_entries + n - 1) / n;
}

/*
 * What attention leaves to make masses of, for calls of at most KVC_DEVICE_SPLIT_ROWS rows: of each
 * page, half h of its rows (where a sum of weights begins anew) and query row, a reference m and
 * the sum of 2^(s log2(e) - m) over its rows; and on request that of each row of the page. Entries
 * without live rows are not written.
 */
struct kvc_device_masses {
    float *pages;  /* [n_items][n_kv_heads][row_entries][2][n_q * group][2], or NULL: none */
    float *tokens; /* [n_items][n_kv_heads][row_entries][n_q * group][64], or NULL */
};

/*
 * Attention of the query rows of a call (kvc_cuda_load_queries()) over all pages of their sequences
 * and layer that belong to one of the families:
 *
 *     s = scale * q . k + shift, then softcap * tanh(s / softcap) if softcap > 0, then + bias of
 *     the row of a page with groups; over live rows with ordinals in first ... at, where at is
 *     n_tokens - n_q + token and first is at + 1 - window, or 0
 *     out = sum exp(s) v / sum exp(s), turned back, lse = ln sum exp(s)
 *
 * Nothing seen: out = 0, lse = -inf. parts, n_families and n_blocks (kvc_device_blocks()) are those
 * of the call. Rows that no query row sees may hold NaN in unsealed pages. Layouts of pages must be
 * in a family. The bits of a row do not depend on the number of items, on the order of blocks, nor
 * on memory beyond what it sees.
 */
kvc_status kvc_cuda_attend(const struct kvc_queue *queue, const struct kvc_device_call *call,
                           const struct kvc_device_family *families,
                           const struct kvc_device_transform *transform,
                           const struct kvc_device_masses *masses);

/*
 * Adds masses to scores [max_sequences][n_pairs][row_entries][of_rows ? 64 : 1]: of each entry but
 * a strip (the first, if has_strip), the sum over query rows, ascending, of exp(s - lse +
 * log_weight) over the rows of the page, or of each of them; log_weight is (ordinal - score_base of
 * the sequence) * log_decay. After kvc_cuda_attend() of the same call, which has left masses and
 * call.lse.
 */
kvc_status kvc_cuda_add_masses(const struct kvc_queue *queue, const struct kvc_device_call *call,
                               const struct kvc_device_masses *masses, float log_decay,
                               bool has_strip, bool of_rows, float *scores);

#ifdef __cplusplus
}
#endif
#endif
