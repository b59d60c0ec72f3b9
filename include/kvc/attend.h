/** @file kvc/attend.h
 * Attention over keys and values that stay where an engine keeps them.
 *
 * kvc_attend_rows() reads the rows of a cache that is not kvc's (cache.h has that) in place: halves
 * and the blocks Q8_0 and Q4_0 of ggml, in any layout that two strides describe. It keeps no state.
 * docs/attend.md has the bytes, the order of work and figures. Sources (docs/sources.md): the
 * formats of ggml, the online softmax (arXiv 1805.02867), keys in blocks whose results are added
 * (arXiv 2311.01282).
 */
#ifndef KVC_ATTEND_H
#define KVC_ATTEND_H

#include <stdbool.h>

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Rows of K or V of an engine, [n_tokens][n_heads][head_dim]: the row of token t and head h begins
 * at data + t * token_stride_bytes + h * head_stride_bytes. Rows may not overlap. Fill it with
 * kvc_row_view_packed() or by hand.
 */
typedef struct kvc_row_view {
    size_t struct_size;        /**< sizeof(kvc_row_view) */
    const void *data;          /**< aligned to 2 bytes; not read where nothing is seen */
    kvc_row_format format;     /**< of all rows */
    size_t n_tokens;           /**< rows of each head; 0 is allowed */
    size_t n_heads;            /**< KV heads, >= 1 */
    size_t head_dim;           /**< elements of a row, >= 1; blocks: a multiple of 32 */
    size_t token_stride_bytes; /**< even; at least a row if there are several tokens */
    size_t head_stride_bytes;  /**< even; at least a row if there are several heads */
} kvc_row_view;

/**
 * Bytes of a row.
 *
 * @param format    KVC_ROWS_F16, KVC_ROWS_Q8_0 or KVC_ROWS_Q4_0.
 * @param head_dim  Elements; a multiple of 32 for blocks.
 * @return 2, 34 / 32 or 18 / 32 bytes an element; nothing is checked here.
 */
static inline size_t kvc_row_bytes(kvc_row_format format, size_t head_dim)
{
    switch (format) {
    case KVC_ROWS_Q8_0: return head_dim / 32 * 34;
    case KVC_ROWS_Q4_0: return head_dim / 32 * 18;
    default: return head_dim * 2;
    }
}

/**
 * A view of rows that lie side by side, token after token: [n_tokens][n_heads][head_dim].
 *
 * @param data      First row.
 * @param format    Of the rows.
 * @param n_tokens  Tokens.
 * @param n_heads   Heads of each token.
 * @param head_dim  Elements of each head.
 * @return The view; nothing is checked here.
 */
static inline kvc_row_view kvc_row_view_packed(const void *data, kvc_row_format format,
                                               size_t n_tokens, size_t n_heads, size_t head_dim)
{
    kvc_row_view view;
    view.struct_size = sizeof(kvc_row_view);
    view.data = data;
    view.format = format;
    view.n_tokens = n_tokens;
    view.n_heads = n_heads;
    view.head_dim = head_dim;
    view.head_stride_bytes = kvc_row_bytes(format, head_dim);
    view.token_stride_bytes = n_heads * view.head_stride_bytes;
    return view;
}

/** How queries look at rows. kvc_attend_rows_options_default() fills it. */
typedef struct kvc_attend_rows_options {
    size_t struct_size;   /**< sizeof(kvc_attend_rows_options) of the caller's header */
    float scale;          /**< of the logits; 0: 1 / sqrt(head_dim of K); default 0 */
    float softcap;        /**< c > 0: logits become c * tanh(logit / c); default 0: off */
    bool exact;           /**< products of floats only; false: products with Q4_0 blocks of K may
                             take the query as integers of 24 bits. Default false */
    int64_t first_query;  /**< query q sees the keys 0 ... first_query + q, none if that is
                             negative; default INT64_MAX: each sees all */
    const void *mask;     /**< [n_queries][n_keys], added to the logits of all heads after the
                             softcap; -Inf: not seen. NULL: none */
    kvc_dtype mask_dtype; /**< KVC_DTYPE_F32 or KVC_DTYPE_F16; default F32 */
    size_t mask_stride;   /**< elements from one query of the mask to the next; >= n_keys if there
                             are several */
} kvc_attend_rows_options;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_attend_rows_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_attend_rows_options_init(kvc_attend_rows_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_attend_rows_options_default(kvc_attend_rows_options *options)
{
    kvc_attend_rows_options_init(options, sizeof(*options));
}

/**
 * Workspace of kvc_attend_rows(). It does not shrink when n_queries or n_keys grows: the size for
 * the longest of either is enough for all.
 *
 * @param n_queries   Query tokens.
 * @param n_heads     Query heads.
 * @param n_keys      Tokens of K and V.
 * @param n_kv_heads  Heads of K and V.
 * @param head_dim_k  Elements of a row of K.
 * @param head_dim_v  Elements of a row of V.
 * @param[out] size   Bytes.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          size is NULL, a count but n_queries and n_keys is 0, n_heads is no
 *                            multiple of n_kv_heads, or the size does not fit size_t. Nothing was
 *                            written.
 * @retval KVC_E_UNSUPPORTED  A head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_attend_rows_workspace_size(size_t n_queries, size_t n_heads, size_t n_keys,
                                                  size_t n_kv_heads, size_t head_dim_k,
                                                  size_t head_dim_v, size_t *size);

/**
 * Attention of query rows over rows of K and V, read in place. Query head h reads KV head
 * floor(h / g) with g = n_heads / n_kv_heads; K and V are read once for as many as 16 query rows
 * of a KV head.
 *
 *     z = scale * q . k, then softcap * tanh(z / softcap) if softcap > 0, then + mask
 *     out[q][h] = sum over the keys seen of exp(z - lse) v,  lse = ln sum exp z
 *
 * A query that sees nothing gets zeros, and -Inf as lse. Rows of K and V that a query does not see
 * may hold anything, NaN too. A logit that is NaN or +Inf, from a row seen or the mask, makes the
 * output and lse of its query head NaN. A logit far below the others, as engines have it in masks
 * of finite numbers, weighs nothing, but its rows must be numbers.
 *
 * Error against the stored values, relative to the largest output of the query head, for logits up
 * to about 30: below 2e-5 if exact, else below 2e-4; both stay below 1e-5 in the tests
 * (docs/attend.md). Sums are fp32 in a fixed order: the same bits for any parallel_for; each kernel
 * table has its own.
 *
 * @param ctx       Context; all pointers are host memory.
 * @param q         [n_queries][n_heads][head_dim of K], rotated as the keys are; 0 queries do
 *                  nothing.
 * @param k         [n_keys][n_kv_heads]. K and V may differ in format, head_dim and strides.
 * @param v         [n_keys][n_kv_heads].
 * @param options   NULL: the defaults.
 * @param[out] out  [n_queries][n_heads][head_dim of V]; may not overlap an input.
 * @param[out] lse  [n_queries][n_heads], or NULL.
 * @param ws        Workspace, aligned to 64 bytes; its content need not be kept.
 * @param ws_size   At least what kvc_attend_rows_workspace_size() tells.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL or misaligned, a view or option is out of range, or
 *                            the views do not fit each other. Nothing was written.
 * @retval KVC_E_UNSUPPORTED  A head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 * @retval KVC_E_WORKSPACE    The workspace is missing, too small or misaligned. Nothing was
 *                            written.
 *
 * Memory: allocates nothing. Threads: runs through parallel_for, up to 64 tasks at a time; few
 * queries are split over the keys. Cost: reads K and V once for up to 16 query rows of a KV head,
 * and skips runs of keys that none of these sees.
 */
KVC_API kvc_status kvc_attend_rows(kvc_ctx *ctx, const kvc_view *q, const kvc_row_view *k,
                                   const kvc_row_view *v, const kvc_attend_rows_options *options,
                                   const kvc_view *out, float *lse, void *ws, size_t ws_size);

#ifdef __cplusplus
}
#endif
#endif
