/** @file kvc/rope.h
 * Rotary positions: frequencies with the usual scalings, the ids of prompts with images, and moving
 * cached keys from one set of frequencies to another.
 *
 * Keys lie in a cache rotated. Pruning and merging never touch the rotation: what stays keeps its
 * position, and the next position goes on from what was announced, not from the rows that are left.
 * Only a change of the frequencies needs keys to be turned again: kvc_rope_rebase().
 *
 * Sources (docs/sources.md): rotary positions (arXiv 2104.09864), YaRN (arXiv 2309.00071), M-RoPE
 * (arXiv 2409.12191), scaling of the base and grid coordinates of pruned images (article 000,
 * sections 4.2 and 4.3).
 */
#ifndef KVC_ROPE_H
#define KVC_ROPE_H

#include <stdbool.h>

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** How frequencies are stretched for contexts longer than those of the training. */
typedef enum kvc_rope_scaling {
    KVC_ROPE_NONE = 0,        /**< as trained */
    KVC_ROPE_LINEAR = 1,      /**< all frequencies / factor */
    KVC_ROPE_NTK = 2,         /**< a larger base: fast pairs stay, the slowest is / factor */
    KVC_ROPE_DYNAMIC_NTK = 3, /**< as NTK, growing with the length */
    KVC_ROPE_YARN = 4         /**< fast pairs stay, slow ones are / factor, a ramp between */
} kvc_rope_scaling;

/** Which elements of a head form pair j. */
typedef enum kvc_rope_layout {
    KVC_ROPE_HALF_SPLIT = 0, /**< j and j + n_dims / 2 (NEOX) */
    KVC_ROPE_INTERLEAVED = 1 /**< 2 j and 2 j + 1 */
} kvc_rope_layout;

/** Which of the three coordinates of a position turns pair j. */
typedef enum kvc_rope_axes {
    KVC_ROPE_AXES_ONE = 0,        /**< t turns all pairs; sections are not read */
    KVC_ROPE_AXES_CONTIGUOUS = 1, /**< t the first sections[0], y the next [1], x the last [2]
                                     (Qwen2-VL: 16, 24, 24) */
    KVC_ROPE_AXES_INTERLEAVED = 2 /**< y where j mod 3 = 1 and j < 3 sections[1], x where
                                     j mod 3 = 2 and j < 3 sections[2], t elsewhere
                                     (Qwen3-VL: 24, 20, 20) */
} kvc_rope_axes;

/** How a model rotates Q and K. kvc_rope_default() fills it; a zero in a field is a zero. */
typedef struct kvc_rope {
    size_t struct_size;       /**< sizeof(kvc_rope) of the caller's header */
    int32_t n_dims;           /**< rotated elements of a head, the first ones: even,
                                 2..KVC_MAX_HEAD_DIM; no default */
    kvc_rope_layout layout;   /**< default KVC_ROPE_HALF_SPLIT */
    double base;              /**< > 1; default 10000 */
    kvc_rope_scaling scaling; /**< default KVC_ROPE_NONE */
    int32_t original_context; /**< DYNAMIC_NTK, YARN: length of the training, >= 1; default 4096 */
    double factor;            /**< all but NONE: >= 1; default 1 */
    int64_t length;           /**< DYNAMIC_NTK: tokens so far, >= 0; default 0 */
    double beta_fast;         /**< YARN: pairs with more turns over original_context stay, > 0;
                                 default 32 */
    double beta_slow;         /**< YARN: pairs with fewer turns are / factor, > 0, at most
                                 beta_fast; default 1 */
    double attention_factor;  /**< YARN: magnitude of cosine and sine, > 0; 0 (default) is
                                 0.1 ln factor + 1 */
    kvc_rope_axes axes;       /**< default KVC_ROPE_AXES_ONE */
    int32_t sections[4];      /**< pairs of t, y, x and a fourth axis, which must have none;
                                 together n_dims / 2; default 0 */
} kvc_rope;

/** A piece of a prompt: text, or an image or video. Arrays of it cross the API: its 32 bytes never
 * change. What is not set is 0. */
typedef struct kvc_rope_segment {
    int32_t n_text;      /**< tokens of text; 0: an image or video */
    int32_t n_frames;    /**< image or video: frames, >= 1; text: 0 */
    int32_t n_rows;      /**< patches of a frame, top to bottom, a multiple of merge */
    int32_t n_cols;      /**< patches of a frame, left to right, a multiple of merge */
    int32_t merge;       /**< merge x merge patches are one token; 0 counts as 1 */
    float frame_step;    /**< MROPE: t from one frame to the next, finite, > 0; 0 counts as 1
                            (Qwen2.5-VL: tokens a second times seconds a frame) */
    int32_t reserved[2]; /**< 0 */
} kvc_rope_segment;

/** What positions images get. */
typedef enum kvc_rope_ids {
    KVC_ROPE_IDS_1D = 0,   /**< the next number for each token, as for text */
    KVC_ROPE_IDS_2D = 1,   /**< rows and columns; each frame starts where the one before ended */
    KVC_ROPE_IDS_MROPE = 2 /**< frames, rows and columns from one start */
} kvc_rope_ids;

/**
 * Fill the defaults for a struct of a given size; n_dims becomes 0.
 *
 * @param[out] rope    NULL does nothing.
 * @param struct_size  sizeof(kvc_rope) of the caller; written to struct_size too.
 */
KVC_API void kvc_rope_init(kvc_rope *rope, size_t struct_size);

/** Fill the defaults; n_dims becomes 0. @param[out] rope  NULL does nothing. */
static inline void kvc_rope_default(kvc_rope *rope)
{
    kvc_rope_init(rope, sizeof(*rope));
}

/**
 * The frequencies of all pairs, j = 0 ... n_dims / 2 - 1. With d = n_dims, s = factor,
 * N = original_context, L = max(length, N):
 *
 *     NONE         f_j = b^(-2 j / d)          b = base
 *     LINEAR       f_j = b^(-2 j / d) / s
 *     NTK          f_j = b^(-2 j / d)          b = base s^(d / (d - 2))
 *     DYNAMIC_NTK  f_j = b^(-2 j / d)          b = base (s L / N - (s - 1))^(d / (d - 2))
 *     YARN         f_j = (r + (1 - r) / s) b^(-2 j / d)
 *                  r = 1 - clamp((j - low) / max(0.001, high - low), 0, 1)
 *                  low = max(0, floor(c(beta_fast))), high = min(d - 1, ceil(c(beta_slow)))
 *                  c(beta) = d ln(N / (2 pi beta)) / (2 ln b)
 *                  magnitude = attention_factor, or 0.1 ln s + 1
 *
 * In double; the magnitude of the others is 1. Dynamic NTK changes the frequencies of keys that are
 * in a cache already: turn those with kvc_rope_rebase().
 *
 * @param rope             How the model rotates.
 * @param[out] base        b, for engines that take a base; NULL is allowed.
 * @param[out] frequency   [n_dims / 2], radians a position; NULL is allowed.
 * @param[out] magnitude   Factor of what is rotated; NULL is allowed.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p rope is NULL or a field is out of range; NTK and DYNAMIC_NTK need
 *                    n_dims >= 4; or b is not finite. Nothing was written.
 *
 * Threads: any. Cost: a power a pair.
 */
KVC_API kvc_status kvc_rope_frequencies(const kvc_rope *rope, double *base, double *frequency,
                                        double *magnitude);

/**
 * Cosines and sines of positions, once for all layers.
 *
 *     cosines[i][j] = magnitude cos(p f_j), sines[i][j] = magnitude sin(p f_j)
 *
 * with p the coordinate of position i that turns pair j; in double, rounded once.
 *
 * @param rope          How the model rotates.
 * @param positions     [n][3]: t, y, x of each token; any values.
 * @param n             Tokens; 0 is allowed.
 * @param[out] cosines  [n][n_dims / 2].
 * @param[out] sines    [n][n_dims / 2].
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  As kvc_rope_frequencies(), or a pointer is NULL. Nothing was written.
 *
 * Threads: any. Cost: a cosine and a sine an element.
 */
KVC_API kvc_status kvc_rope_angles(const kvc_rope *rope, const int32_t *positions, size_t n,
                                   float *cosines, float *sines);

/**
 * Cosines and sines that take keys from one rotation to another.
 *
 *     cosines[i][j] = m cos(p (f'_j - f_j)), sines[i][j] = m sin(p (f'_j - f_j))
 *
 * with f and f' the frequencies of @p from and @p to, m the quotient of their magnitudes.
 *
 * @param from          What rotated the keys.
 * @param to            What shall have rotated them.
 * @param positions     [n][3]: at which each row was rotated.
 * @param merged        Bit i of word i / 64: row i is a mixture of rows at other positions. NULL:
 *                      none is.
 * @param n             Rows; 0 is allowed.
 * @param[out] cosines  [n][n_dims / 2].
 * @param[out] sines    [n][n_dims / 2].
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          As kvc_rope_angles(). Nothing was written.
 * @retval KVC_E_UNSUPPORTED  It cannot be exact: n_dims, layout, axes or sections differ, or a row
 *                            is merged and a frequency differs. Nothing was written.
 *
 * Threads: any. Cost: a cosine and a sine an element.
 */
KVC_API kvc_status kvc_rope_rebase_angles(const kvc_rope *from, const kvc_rope *to,
                                          const int32_t *positions, const uint64_t *merged,
                                          size_t n, float *cosines, float *sines);

/**
 * Workspace of kvc_rope_rotate(), kvc_rope_apply() and kvc_rope_rebase().
 *
 * @param rope       How the model rotates.
 * @param[out] size  Bytes; the workspace is aligned to 64.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  As kvc_rope_frequencies(), or @p size is NULL.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_rope_workspace_size(const kvc_rope *rope, size_t *size);

/**
 * Rotate the pairs of every head of a tensor in place.
 *
 *     a' = a cos - b sin, b' = a sin + b cos           (a, b) pair j of a head of token i
 *
 * in binary32, three roundings each and one more to the type of @p x: the same bits on every kernel
 * table. Elements from n_dims on are neither read nor written. NaN and Inf spread over their pair;
 * an F16 element that grows beyond 65504 becomes Inf.
 *
 * @param ctx      Context; all pointers are host memory.
 * @param rope     n_dims and layout.
 * @param cosines  [x->n_tokens][n_dims / 2], of kvc_rope_angles() or kvc_rope_rebase_angles().
 * @param sines    As @p cosines.
 * @param[in,out] x  [n_tokens][n_heads][head_dim], head_dim >= n_dims; any type.
 * @param ws       Workspace, aligned to 64.
 * @param ws_size  At least kvc_rope_workspace_size().
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          As kvc_rope_frequencies(), or a pointer is NULL, or @p x is wrong or
 *                            its elements overlap. Nothing was written.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 * @retval KVC_E_WORKSPACE    @p ws is NULL, misaligned or too small. Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: one pass.
 */
KVC_API kvc_status kvc_rope_rotate(kvc_ctx *ctx, const kvc_rope *rope, const float *cosines,
                                   const float *sines, const kvc_view *x, void *ws, size_t ws_size);

/**
 * Rotate Q or K at their positions, in place: kvc_rope_angles() and kvc_rope_rotate() in one call.
 *
 * @param ctx        Context; all pointers are host memory.
 * @param rope       How the model rotates.
 * @param positions  [x->n_tokens][3]: t, y, x of each token.
 * @param[in,out] x  [n_tokens][n_heads][head_dim], head_dim >= n_dims; any type.
 * @param ws         Workspace, aligned to 64.
 * @param ws_size    At least kvc_rope_workspace_size().
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          As kvc_rope_rotate(). Nothing was written.
 * @retval KVC_E_UNSUPPORTED  As kvc_rope_rotate(). Nothing was written.
 * @retval KVC_E_WORKSPACE    As kvc_rope_rotate(). Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: one pass, and a cosine and
 * a sine for each token and pair.
 */
KVC_API kvc_status kvc_rope_apply(kvc_ctx *ctx, const kvc_rope *rope, const int32_t *positions,
                                  const kvc_view *x, void *ws, size_t ws_size);

/**
 * Turn keys that @p from rotated into what @p to would have made of them, in place:
 * kvc_rope_rebase_angles() and kvc_rope_rotate() in one call.
 *
 *     K' = R_to(p) R_from(p)^T K
 *
 * exact up to the roundings of kvc_rope_rotate(): do it before quantization, or dequantize first.
 * An engine that forms angles in binary32 differs from @p from by up to 2^-24 of the angle.
 *
 * @param ctx        Context; all pointers are host memory.
 * @param from       What rotated the keys.
 * @param to         What shall have rotated them.
 * @param positions  [k->n_tokens][3]: at which each row was rotated.
 * @param merged     Bit i of word i / 64: row i is a mixture of rows at other positions. NULL: none
 *                   is.
 * @param[in,out] k  [n_tokens][n_heads][head_dim], head_dim >= n_dims; any type.
 * @param ws         Workspace, aligned to 64.
 * @param ws_size    At least kvc_rope_workspace_size().
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          As kvc_rope_rotate(). Nothing was written.
 * @retval KVC_E_UNSUPPORTED  As kvc_rope_rotate(), and where kvc_rope_rebase_angles() refuses.
 *                            Nothing was written.
 * @retval KVC_E_WORKSPACE    As kvc_rope_rotate(). Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: one pass, and a cosine and
 * a sine for each token and pair.
 */
KVC_API kvc_status kvc_rope_rebase(kvc_ctx *ctx, const kvc_rope *from, const kvc_rope *to,
                                   const int32_t *positions, const uint64_t *merged,
                                   const kvc_view *k, void *ws, size_t ws_size);

/**
 * The positions of a prompt. Text at p: t = y = x = p, and p grows by one. Of an image or video
 * that starts at p, frame f, row y and column x of its tokens (F frames of R rows and C columns,
 * patches already put together by merge), in raster order:
 *
 *     1D     t = y = x: the next number
 *            p grows by F R C
 *     2D     t = p + f max(R, C), (t, t + y, t + x)
 *            p grows by F max(R, C)
 *     MROPE  (p + floor(f step), p + y, p + x)
 *            p grows by max(floor((F - 1) step) + 1, R, C)
 *
 * One frame gets the same from 2D and MROPE. Dropping tokens changes neither the positions of the
 * others nor @p next: store it, the number of rows does not tell it. Grids use fewer positions than
 * tokens, which makes @p delta negative.
 *
 * @param segments        [n_segments], in the order of the prompt.
 * @param n_segments      0 is allowed.
 * @param ids             What images get.
 * @param first           Position of the first token, 0 ... 2^31 - 2.
 * @param[out] positions  [n_tokens][3]: t, y, x; NULL: only counts.
 * @param max_tokens      Tokens that @p positions has room for; not read if it is NULL.
 * @param[out] n_tokens   Tokens of the prompt.
 * @param[out] next       Position of the token after the prompt; NULL is allowed.
 * @param[out] delta      next - first - n_tokens; NULL is allowed. The deltas of the parts of a
 *                        prompt add up.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, a segment is wrong (no tokens, text and frames, a grid that
 *                    merge does not divide, a reserved field that is not 0), a position is beyond
 *                    2^31 - 2, or there are more than @p max_tokens. Nothing was written.
 *
 * Threads: any. Cost: proportional to the tokens.
 */
KVC_API kvc_status kvc_rope_positions(const kvc_rope_segment *segments, size_t n_segments,
                                      kvc_rope_ids ids, int64_t first, int32_t *positions,
                                      size_t max_tokens, size_t *n_tokens, int64_t *next,
                                      int64_t *delta);

#ifdef __cplusplus
}
#endif
#endif
