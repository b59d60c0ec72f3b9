/** @file kvc/quant.h
 * Quantize K or V rows that the caller owns to INT8 and INT4, and back.
 *
 * The cache (cache.h) uses the same arithmetic on its pages; the bytes of both are frozen in
 * docs/formats.md. Sources (docs/sources.md): per-head scales with a sliding calibration window
 * (article 002, section 3), signed-extreme 4-bit codes (the rule of ggml's q4_0), scale and minimum
 * a channel for keys (KIVI, arXiv 2402.02750).
 */
#ifndef KVC_QUANT_H
#define KVC_QUANT_H

#include <stdbool.h>

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What to do. kvc_quant_options_default() fills it; a zero in a field is a zero. */
typedef struct kvc_quant_options {
    size_t struct_size;  /**< sizeof(kvc_quant_options) of the caller's header */
    kvc_format format;   /**< KVC_INT8 or KVC_INT4; default KVC_INT8 */
    kvc_scale scale;     /**< default KVC_SCALE_TOKEN */
    size_t block_tokens; /**< HEAD, LAYER, CHANNEL: tokens that share parameters, >= 1; default 64.
                            The last block may be shorter */
    size_t
        window_tokens; /**< HEAD, LAYER: a multiple of block_tokens, >= block_tokens; default 64 */
    bool strict;       /**< true: NaN and Inf are refused; default false: counted and replaced */
} kvc_quant_options;

/** What a quantization met. */
typedef struct kvc_quant_counts {
    size_t struct_size;   /**< sizeof(kvc_quant_counts), set by the caller */
    uint64_t n_nonfinite; /**< elements that were NaN or Inf */
    uint64_t n_saturated; /**< finite elements beyond the largest code, because no half holds their
                             scale */
} kvc_quant_counts;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_quant_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_quant_options_init(kvc_quant_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_quant_options_default(kvc_quant_options *options)
{
    kvc_quant_options_init(options, sizeof(*options));
}

/**
 * Bytes of codes and parameters.
 *
 * With n_blocks = ceil(n_tokens / block_tokens):
 *
 *     codes    INT8     int8 [n_tokens][n_heads][head_dim]
 *              INT4     uint8 [n_tokens][n_heads][ceil(head_dim / 2)], two's complement, low
 *                       nibble first; an odd row ends with a zero nibble
 *     params   HEAD     float [n_blocks][n_heads]
 *              LAYER    float [n_blocks]
 *              TOKEN    half [n_tokens][n_heads]
 *              CHANNEL  half [n_blocks][n_heads][2][head_dim], scales first, then minima
 *
 * @param n_tokens, n_heads, head_dim  Shape; head_dim 1..KVC_MAX_HEAD_DIM, n_heads >= 1, n_tokens
 *                                     may be 0.
 * @param options                      Format, scale and block.
 * @param[out] codes_bytes             May be NULL.
 * @param[out] params_bytes            May be NULL.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          options is NULL or out of range, a count is 0, or the size does not
 *                            fit size_t.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_quant_size(size_t n_tokens, size_t n_heads, size_t head_dim,
                                  const kvc_quant_options *options, size_t *codes_bytes,
                                  size_t *params_bytes);

/**
 * Quantize rows.
 *
 * All arithmetic is IEEE binary32, one operation at a time, rounded to nearest even; the bytes are
 * the same on every kernel table. absmax, max and min run over the finite elements of a group.
 *
 *     HEAD     group: one head, the tokens of the block and of the window_tokens / block_tokens - 1
 *              blocks before it
 *              scale = absmax / q; code = clamp(rint(x * (q / absmax)), -q, q); q = 127 or 7
 *     LAYER    as HEAD, the group spans all heads
 *     TOKEN    group: one token, one head
 *              INT8: s = half(absmax / 127), rounded up in magnitude
 *                    code = clamp(rint(x * (1 / s)), -127, 127)
 *              INT4: e = max if max >= -min, else min; s = half(e / -8), rounded up in magnitude
 *                    code = clamp(rint(x * (1 / s)), -8, 7)
 *     CHANNEL  group: one channel of one head, the tokens of the block; c = 255 or 15
 *              n = half(min), rounded down; s = half((max - n) / c), rounded up
 *              code = clamp(rint((x - n) * (1 / s)), 0, c) - (c + 1) / 2
 *
 * A symmetric group whose absmax is below 2^-100 (and one without a finite element) gets scale 0
 * and zero codes; a CHANNEL minimum or maximum below 2^-100 in magnitude counts as 0. A half scale
 * saturates at 65504; elements that this clips are counted. A CHANNEL group with max = n has scale
 * 0 and the codes of n. NaN counts as 0; Inf gets the largest code of its sign in its own group and
 * no part in any scale. In strict mode either is refused.
 *
 * @param ctx           Context; all pointers are host memory.
 * @param src           [n_tokens][n_heads][head_dim]; F32, F16 or BF16.
 * @param options       NULL: the defaults.
 * @param[out] codes    kvc_quant_size() bytes; no alignment needed; may not overlap @p src.
 * @param codes_bytes   Size of @p codes; must be what kvc_quant_size() tells.
 * @param[out] params   kvc_quant_size() bytes, aligned to 4.
 * @param params_bytes  Size of @p params; must be what kvc_quant_size() tells.
 * @param[out] counts   NULL, or struct_size set; the other fields are overwritten.
 *
 * @retval KVC_OK             Done. n_tokens 0 writes nothing but counts.
 * @retval KVC_E_ARG          A pointer is NULL, params is misaligned, an option, stride or size is
 *                            wrong. Nothing was written.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 * @retval KVC_E_NONFINITE    Strict mode met NaN or Inf. Only counts->n_nonfinite was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: reads @p src two to three
 * times; HEAD and LAYER read it once more for each further block of the window.
 */
KVC_API kvc_status kvc_quantize(kvc_ctx *ctx, const kvc_view *src, const kvc_quant_options *options,
                                void *codes, size_t codes_bytes, void *params, size_t params_bytes,
                                kvc_quant_counts *counts);

/**
 * Turn codes back into numbers.
 *
 *     HEAD, LAYER, TOKEN   x = code * scale
 *     CHANNEL              x = (code + (c + 1) / 2) * scale + minimum        c = 255 or 15
 *
 * @param ctx           Context; all pointers are host memory.
 * @param codes         As kvc_quantize() wrote them; any bytes are accepted.
 * @param codes_bytes   Must be what kvc_quant_size() tells for dst's shape.
 * @param params        Aligned to 4.
 * @param params_bytes  Must be what kvc_quant_size() tells: scales that are missing or too few are
 *                      an error.
 * @param options       The options of kvc_quantize(); NULL: the defaults.
 * @param[out] dst      F32 [n_tokens][n_heads][head_dim]; gaps between rows are not written.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, dst is not F32, an option, stride or size is wrong.
 *                            Nothing was written.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: one pass.
 */
KVC_API kvc_status kvc_dequantize(kvc_ctx *ctx, const void *codes, size_t codes_bytes,
                                  const void *params, size_t params_bytes,
                                  const kvc_quant_options *options, const kvc_view *dst);

/**
 * The function printed in article 002 (docs/sources.md, section 3.1), bit for bit, for comparison:
 * one scale a head, shared by the batch, from the newest @p window_tokens of each sequence; older
 * tokens that are larger saturate.
 *
 *     scale[h] = max(absmax(src[:][-window:][h]) / q, 1e-5)
 *     code     = clamp(rint(x / scale[h]), -q - 1, q)                      q = 127 or 7
 *
 * With one sequence, kvc_dequantize() reads the result: scale KVC_SCALE_HEAD, block_tokens and
 * window_tokens = n_tokens. The cache does not offer this: it would have to code every old token
 * again at each step.
 *
 * @param ctx           Context; all pointers are host memory.
 * @param src           [n_batch] views of one shape.
 * @param n_batch       Sequences, >= 1.
 * @param format        KVC_INT8 or KVC_INT4.
 * @param window_tokens Newest tokens that set the scale, >= 1 (the article: 512).
 * @param[out] codes    [n_batch][n_tokens][n_heads][head_dim], packed as by kvc_quantize().
 * @param codes_bytes   Size of @p codes: n_batch times what kvc_quant_size() tells.
 * @param[out] scales   [n_heads].
 *
 * @retval KVC_OK             Done. NaN became 0, Inf the largest code of its sign; neither sets a
 *                            scale.
 * @retval KVC_E_ARG          A pointer is NULL, shapes differ, a count or size is wrong. Nothing
 *                            was written.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: reads the window once and
 * @p src once.
 */
KVC_API kvc_status kvc_quantize_window(kvc_ctx *ctx, const kvc_view *src, size_t n_batch,
                                       kvc_format format, size_t window_tokens, void *codes,
                                       size_t codes_bytes, float *scales);

#ifdef __cplusplus
}
#endif
#endif
