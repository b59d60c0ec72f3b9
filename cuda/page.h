/* page.h - launchers of the kernels that write pages; each enqueues and returns. */
#ifndef KVC_CUDA_PAGE_H
#define KVC_CUDA_PAGE_H

#include "table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Values that became others: NaN and Inf, and finite ones beyond a half. In device memory. */
struct kvc_device_counts {
    unsigned long long n_nonfinite, n_saturated;
};

/* Rows of K and V of one layer. Strides in elements. */
struct kvc_device_append {
    struct kvc_device_cache cache;
    struct kvc_device_transform transform;
    struct kvc_device_counts *counts;
    struct kvc_page_layout open, strip;
    int32_t seq, layer, sinks;
    int32_t n, from_end; /* tokens n_tokens - from_end ... n_tokens - from_end + n - 1 */
    kvc_dtype k_dtype, v_dtype;
    const void *k, *v;
    size_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
};

kvc_status kvc_cuda_append(const struct kvc_queue *queue, const struct kvc_device_append *append);

/* Rows that are stored as they came become what they would be with a transform: rows first ...
 * first
 * + n - 1 of one unsealed page or strip. */
struct kvc_device_rewrite {
    uint64_t page; /* offset in the memory of the cache */
    int32_t pair;
    uint32_t first, n;
    bool is_strip;
};

kvc_status kvc_cuda_rewrite(const struct kvc_queue *queue, const struct kvc_device_append *cache,
                            const struct kvc_device_rewrite *jobs, uint32_t n_jobs);

/* A page of rows that becomes a page of codes. */
struct kvc_device_seal {
    uint64_t from, to; /* offsets */
    uint32_t n_rows;
    uint32_t layout;          /* of `to` */
    float absmax_k, absmax_v; /* what mode HEAD takes for its scales */
};

/* jobs lie in device memory. Writes codes, parameters and what follows them, all zeros. */
kvc_status kvc_cuda_seal(const struct kvc_queue *queue, const struct kvc_device_cache *cache,
                         const struct kvc_page_layout *open, const struct kvc_device_seal *jobs,
                         uint32_t n_jobs);

/* For each job absmax_k and absmax_v of its rows, over finite values. */
kvc_status kvc_cuda_absmax(const struct kvc_queue *queue, const struct kvc_device_cache *cache,
                           const struct kvc_page_layout *open, struct kvc_device_seal *jobs,
                           uint32_t n_jobs);

/* Rows that move to another page, or up in their own, codes and scales bit for bit: rows[i] goes to
 * row dst_row + i. Not for HEAD and CHANNEL. */
struct kvc_device_move {
    uint64_t from, to;
    uint32_t layout; /* of both */
    uint16_t n, dst_row;
    uint8_t rows[KVC_PAGE_ROWS];
};

kvc_status kvc_cuda_move(const struct kvc_queue *queue, const struct kvc_device_cache *cache,
                         const struct kvc_device_move *jobs, uint32_t n_jobs);

/* Pages without rows: the codes of 0, all parameters 0. Only `to` and `layout` are used. */
kvc_status kvc_cuda_clear(const struct kvc_queue *queue, const struct kvc_device_cache *cache,
                          const struct kvc_device_move *jobs, uint32_t n_jobs);

#ifdef __cplusplus
}
#endif
#endif
