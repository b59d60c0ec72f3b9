/** @file kvc/score.h
 * How much each visual token matters, and which to keep.
 *
 * Raw scores come from attention the engine has (kvc_score_attention()), from a few query rows and
 * the keys (kvc_score_queries(): never an N x N matrix), or from a learned scorer
 * (kvc_scorer_apply()). kvc_score_refine() softens them, adds saliency priors and finds sinks;
 * kvc_choose_tokens() picks exactly K of them, spread over the image. What is decided here is the
 * same, bit for bit, on every kernel table and for any parallel_for.
 *
 * Bitmaps are words of 64 bits: token i is bit i % 64 of word i / 64; NULL is empty. A workspace is
 * aligned to 64 bytes; its content need not be kept. No function but kvc_scorer_create() allocates.
 * Sources (docs/sources.md): article 000, section 2.2; docs/score.md has the formulas in one place.
 */
#ifndef KVC_SCORE_H
#define KVC_SCORE_H

#include <stdbool.h>

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Most sinks that kvc_score_refine() can be asked for. */
#define KVC_MAX_SINKS 64

/** Where the visual tokens lie: token (f, y, x) is f * n_rows * n_cols + y * n_cols + x. */
typedef struct kvc_grid {
    size_t struct_size; /**< sizeof(kvc_grid) */
    int32_t n_frames;   /**< images of the same size that follow each other; 1 for one image */
    int32_t n_rows;     /**< rows of tokens of a frame, >= 0 */
    int32_t n_cols;     /**< tokens of a row, >= 0 */
} kvc_grid;

/**
 * The grid of one image.
 *
 * @param n_rows  Rows of tokens.
 * @param n_cols  Tokens of a row.
 * @return The grid; nothing is checked here.
 */
static inline kvc_grid kvc_grid_image(int32_t n_rows, int32_t n_cols)
{
    kvc_grid grid;
    grid.struct_size = sizeof(kvc_grid);
    grid.n_frames = 1;
    grid.n_rows = n_rows;
    grid.n_cols = n_cols;
    return grid;
}

/**
 * The tokens of a grid: n_frames * n_rows * n_cols. Class tokens and separators are not part of a
 * grid: they are the engine's to keep.
 *
 * @param grid        A grid.
 * @param[out] count  Tokens, 0 if a side is 0.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, struct_size is too small, a side is negative, or there are
 *                    more than INT32_MAX tokens. Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_grid_tokens(const kvc_grid *grid, size_t *count);

/** Which layers count. */
typedef enum kvc_layer_choice {
    KVC_LAYERS_MIDDLE = 0,  /**< floor(L / 3) ... floor(2 L / 3) - 1, at least one layer */
    KVC_LAYERS_LAST = 1,    /**< the last last_layers, all if there are fewer */
    KVC_LAYERS_ALL = 2,     /**< all alike */
    KVC_LAYERS_WEIGHTED = 3 /**< as layer_weights says */
} kvc_layer_choice;

/** How attention becomes one score a token. kvc_score_options_default() fills it. */
typedef struct kvc_score_options {
    size_t struct_size;         /**< sizeof(kvc_score_options) of the caller's header */
    kvc_layer_choice layers;    /**< default KVC_LAYERS_MIDDLE */
    int32_t last_layers;        /**< KVC_LAYERS_LAST: >= 1; default 4 */
    const float *layer_weights; /**< KVC_LAYERS_WEIGHTED: [n_layers], >= 0; else not read */
    const float *head_weights;  /**< [n_heads], >= 0, or NULL: all alike */
    const float *query_weights; /**< [n_queries], >= 0, or NULL: all alike */
    bool normalize_rows; /**< divide each row by its sum over the tokens, so that heads that look at
                            text do not vanish; default false */
    bool max_heads;      /**< the largest value over the heads instead of their mean; a head of
                            weight 0 is left out, other weights are ignored; default false */
    bool best_heads; /**< of each layer only the half of the heads, rounded up, that looks most at
                        the tokens; heads of weight 0 are left out first; default false */
    const uint64_t *masked; /**< tokens, such as padding, whose attention is not read and whose
                               score is 0 */
} kvc_score_options;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_score_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_score_options_init(kvc_score_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_score_options_default(kvc_score_options *options)
{
    kvc_score_options_init(options, sizeof(*options));
}

/**
 * The weight of one layer.
 *
 *     MIDDLE   1 for floor(L / 3) <= layer < max(floor(2 L / 3), floor(L / 3) + 1), else 0
 *     LAST     1 for layer >= L - last_layers, else 0
 *     ALL      1
 *     WEIGHTED layer_weights[layer]
 *
 * @param options      NULL: the defaults. Only layers, last_layers and layer_weights matter.
 * @param layer        0 ... n_layers - 1.
 * @param n_layers     Layers of the model, >= 1.
 * @param[out] weight  0: the layer does not count.
 *
 * @retval KVC_OK           Done.
 * @retval KVC_E_ARG        weight is NULL, layer or an option is out of range, layer_weights is
 *                          missing, or its value is negative. Nothing was written.
 * @retval KVC_E_NONFINITE  The weight is NaN or infinite. Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_layer_weight(const kvc_score_options *options, int32_t layer,
                                    int32_t n_layers, float *weight);

/**
 * Attention in the caller's memory: element (l, h, q, i) lies at
 * l * layer_stride + h * head_stride + q * query_stride + i * token_stride. Strides count elements;
 * 0 means packed.
 */
typedef struct kvc_attention_shape {
    size_t struct_size;  /**< sizeof(kvc_attention_shape) */
    size_t n_layers;     /**< >= 1 */
    size_t n_heads;      /**< >= 1; a batch may be folded into it */
    size_t n_queries;    /**< rows of each head, >= 1 */
    size_t n_tokens;     /**< visual tokens; 0 is allowed */
    size_t layer_stride; /**< 0: n_heads * head_stride */
    size_t head_stride;  /**< 0: n_queries * query_stride */
    size_t query_stride; /**< 0: n_tokens * token_stride */
    size_t token_stride; /**< 0: 1 */
} kvc_attention_shape;

/**
 * Workspace of kvc_score_attention(): 8 * n_tokens + 9 * n_heads bytes and gaps.
 *
 * @param shape      The shape.
 * @param[out] size  Bytes.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, a count is 0, or the tensor does not fit the address space.
 *                    Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_score_attention_workspace_size(const kvc_attention_shape *shape,
                                                      size_t *size);

/**
 * Scores from attention that the engine has.
 *
 *     raw[i] = sum over l, h, q of w_l w_h w_q A[l][h][q][i] / (sum w_l * sum w_h * sum w_q)
 *
 * A holds probabilities after the softmax over the full row, of which it may be any part: for
 * instance the columns of one image. The sums run over queries, then heads, then layers, each in
 * ascending order, in fp32; the weights are divided by their sum first.
 *
 * Options: normalize_rows uses A[l][h][q][i] / max(sum over i, 1e-12); max_heads takes the largest
 * head instead of the mean over h; best_heads keeps of each layer the ceil(n / 2) of its n heads
 * with the largest sum over q and i of w_q A (before normalize_rows; ties: lower head).
 *
 * The article's score_visual_tokens(), the mean over layers and heads of the last text token's row,
 * is: layers KVC_LAYERS_ALL, n_queries 1, attention at that row and the first visual column.
 *
 * @param attention    Non-negative; what layers, heads and queries of weight 0 and masked
 *                     tokens hold is not read.
 * @param shape        Its shape.
 * @param options      NULL: the defaults.
 * @param[out] scores  [n_tokens]; may not overlap @p attention.
 * @param ws           Workspace.
 * @param ws_size      At least what kvc_score_attention_workspace_size() tells.
 *
 * @retval KVC_OK           Done; n_tokens 0 writes nothing.
 * @retval KVC_E_ARG        A pointer is NULL, a count, stride or option is out of range, a value is
 *                          negative, or all weights of an axis are 0. Nothing was written.
 * @retval KVC_E_NONFINITE  A value or weight that counts is NaN or infinite. Nothing was written.
 * @retval KVC_E_WORKSPACE  The workspace is missing, too small or misaligned. Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: reads A twice, with
 * best_heads three times.
 */
KVC_API kvc_status kvc_score_attention(const float *attention, const kvc_attention_shape *shape,
                                       const kvc_score_options *options, float *scores, void *ws,
                                       size_t ws_size);

/** How query rows look at keys. kvc_probe_options_default() fills it. */
typedef struct kvc_probe_options {
    size_t struct_size;  /**< sizeof(kvc_probe_options) of the caller's header */
    float scale;         /**< of the logits; 0: 1 / sqrt(head_dim); default 0 */
    float softcap;       /**< c > 0: logits become c * tanh(logit / c); default 0: off */
    int64_t first_query; /**< query q sees the keys 0 ... first_query + q, none if that is
                            negative; default INT64_MAX: each sees all */
    const float *lse; /**< [n_queries][n_heads]: natural log-sum-exp of each full row, as attention
                         gives it; -Inf: the row adds nothing. NULL: over the keys given */
    const float *query_weights; /**< [n_queries], >= 0, or NULL: all alike */
    const float *bias;          /**< [n_keys], added to the logits after the softcap (merged keys),
                                   or NULL */
    const uint64_t *masked; /**< keys that nobody sees, such as padding and holes: what K and bias
                               hold there is not used, their score is 0 */
} kvc_probe_options;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_probe_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_probe_options_init(kvc_probe_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_probe_options_default(kvc_probe_options *options)
{
    kvc_probe_options_init(options, sizeof(*options));
}

/**
 * Workspace of kvc_score_queries(): about 4 * n_queries * n_heads * n_keys bytes, the logits.
 *
 * @param n_queries   Query rows.
 * @param n_heads     Heads of the queries.
 * @param n_keys      Keys.
 * @param n_kv_heads  Heads of the keys.
 * @param head_dim    Of both.
 * @param[out] size   Bytes.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          size is NULL, a count but n_keys is 0, n_heads is no multiple of
 *                            n_kv_heads, or the size does not fit size_t. Nothing was written.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_score_queries_workspace_size(size_t n_queries, size_t n_heads, size_t n_keys,
                                                    size_t n_kv_heads, size_t head_dim,
                                                    size_t *size);

/**
 * Scores from a few query rows and the keys: the attention mass that each key gets from the queries
 * of its KV head. Query head h reads KV head floor(h / g) with g = n_heads / n_kv_heads.
 *
 *     z = scale * q . k, then softcap * tanh(z / softcap) if softcap > 0, then + bias
 *     scores[kv][i] = sum over q, h of w_q exp(z[q][h][i] - lse[q][h]) / (g * sum w_q)
 *
 * lse is given, or the log-sum-exp over the keys that the row sees. Arithmetic: fp32 in a fixed
 * order, keys in blocks of 64; the same bits on every table. A row that sees nothing adds nothing.
 * For keys of a cache see kvc_seq_read_rows() and kvc_seq_read_probes().
 *
 * @param ctx          Context; all pointers are host memory.
 * @param q            [n_queries][n_heads][head_dim], rotated as the keys are; n_queries >= 1.
 * @param k            [n_keys][n_kv_heads][head_dim]; n_keys 0 does nothing.
 * @param options      NULL: the defaults.
 * @param[out] scores  [n_kv_heads][n_keys].
 * @param ws           Workspace.
 * @param ws_size      At least what kvc_score_queries_workspace_size() tells.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, the views do not fit each other, a weight or the
 *                            softcap is negative, or all weights are 0. Nothing was written.
 * @retval KVC_E_NONFINITE    An option, or a logit of a row that counts and a key it sees, is NaN
 *                            or infinite. Nothing was written but the workspace.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 * @retval KVC_E_WORKSPACE    The workspace is missing, too small or misaligned. Nothing was
 *                            written.
 *
 * Memory: allocates nothing. Threads: the KV heads run through parallel_for; the result does not
 * depend on it. Cost: each key is read and multiplied once; two exponentials a logit, one if lse is
 * given.
 */
KVC_API kvc_status kvc_score_queries(kvc_ctx *ctx, const kvc_view *q, const kvc_view *k,
                                     const kvc_probe_options *options, float *scores, void *ws,
                                     size_t ws_size);

/**
 * Texture of each token from the pixels: high frequencies are where text and edges are.
 *
 *     L = |4 p - up - down - left - right|, with the nearest pixel for one beyond the image
 *     texture[token] = mean of L over the token's pixels / the largest such mean of the call
 *
 * Token (f, y, x) covers pixel rows floor(y H / n_rows) ... floor((y + 1) H / n_rows) - 1 of frame
 * f, columns likewise. The sums are integers: exact. An image of one colour gives zeros.
 *
 * @param luma          [n_frames][height][stride] brightness.
 * @param width         Pixels of a row, >= n_cols.
 * @param height        Rows of a frame, >= n_rows.
 * @param stride        Bytes from row to row, >= width.
 * @param grid          The tokens.
 * @param[out] texture  One number of [0, 1] a token.
 *
 * @retval KVC_OK     Done; a grid without tokens writes nothing.
 * @retval KVC_E_ARG  A pointer is NULL, the grid or a size is wrong. Nothing was written.
 *
 * Memory: allocates nothing. Threads: any. Cost: one pass.
 */
KVC_API kvc_status kvc_score_texture(const uint8_t *luma, size_t width, size_t height,
                                     size_t stride, const kvc_grid *grid, float *texture);

/**
 * Workspace of kvc_score_texture_embeddings().
 *
 * @param grid       The tokens.
 * @param dim        Elements of an embedding, >= 1.
 * @param[out] size  Bytes.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, the grid is wrong, or the size does not fit size_t. Nothing
 *                    was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_score_texture_embeddings_workspace_size(const kvc_grid *grid, size_t dim,
                                                               size_t *size);

/**
 * Texture of each token where the pixels are not at hand.
 *
 *     texture[i] = |sum over neighbours j of (x_i - x_j)| / (neighbours), divided by the largest
 *
 * that is, the distance to the mean of the up to four neighbours in the frame; 0 without
 * neighbours.
 *
 * @param ctx           Context; all pointers are host memory.
 * @param x             [tokens of the grid][1][dim] embeddings.
 * @param grid          The tokens.
 * @param[out] texture  One number of [0, 1] a token; all 0 if all embeddings are equal.
 * @param ws            Workspace.
 * @param ws_size       At least what kvc_score_texture_embeddings_workspace_size() tells.
 *
 * @retval KVC_OK           Done; a grid without tokens writes nothing.
 * @retval KVC_E_ARG        A pointer is NULL, the grid is wrong, or x does not fit it. Nothing was
 *                          written.
 * @retval KVC_E_NONFINITE  An embedding is NaN, infinite, or so large that its square is. Nothing
 *                          was written but the workspace.
 * @retval KVC_E_WORKSPACE  The workspace is missing, too small or misaligned. Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: reads each row five times.
 */
KVC_API kvc_status kvc_score_texture_embeddings(kvc_ctx *ctx, const kvc_view *x,
                                                const kvc_grid *grid, float *texture, void *ws,
                                                size_t ws_size);

/** How raw scores are refined. kvc_refine_options_default() fills it. */
typedef struct kvc_refine_options {
    size_t struct_size; /**< sizeof(kvc_refine_options) of the caller's header */
    float temperature;  /**< T > 0; default 0.7. Below 1 widens gaps. It cannot change an order by
                           itself: it is felt through the priors and the diversity */
    float centre;       /**< weight of the centre prior, >= 0; default 0.02: text lies anywhere */
    float sigma;        /**< its width, > 0; default 0.5 */
    float texture;      /**< weight of the texture prior, >= 0; default 0.05 */
    bool debias;        /**< take out a trend along the index; default false: after a prefill the
                           biased mass is what the decoder will use */
    bool debias_clamp;  /**< only a rising trend; default true */
    float sink_factor;  /**< a sink is above this many means, >= 1, or 0: none; default 10 */
    int32_t max_sinks;  /**< 0 ... KVC_MAX_SINKS, the largest first; default 8 */
    const uint64_t *excluded; /**< tokens, such as padding, that are not read, count nowhere and get
                                 score 0 */
} kvc_refine_options;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_refine_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_refine_options_init(kvc_refine_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_refine_options_default(kvc_refine_options *options)
{
    kvc_refine_options_init(options, sizeof(*options));
}

/**
 * Softens scores, adds the saliency priors and finds the visual sinks.
 *
 *     sink    raw[i] > sink_factor * mean raw, at most the max_sinks largest
 *     r[i]    raw[i] * exp(-b (i - mean i)) if debias; b: slope of ln max(raw, 1e-12) over i,
 *             fitted by least squares, at least 0 if debias_clamp
 *     f[i]    (r[i] / max r)^(1 / temperature), 1 for all if max r is 0
 *     c[i]    exp(-(dx^2 + dy^2) / (4 sigma^2)), dx, dy in (-1, 1) from the middle of the frame
 *     out[i]  f[i] * (1 + centre * c[i] + texture * t[i])
 *
 * The fit, the means and the maximum leave out excluded tokens, the fit and the maximum sinks too.
 * A sink gets 1 + centre + texture, which no other token exceeds. Each number is computed in double
 * and rounded once.
 *
 * @param raw          Scores >= 0, one a token of the grid.
 * @param grid         The tokens.
 * @param texture      t in [0, 1], or NULL: no texture prior.
 * @param options      NULL: the defaults.
 * @param[out] scores  One a token; may be @p raw.
 * @param[out] sinks   NULL, or a bitmap that is overwritten; keep these tokens, and leave them out
 *                     of an entropy.
 *
 * @retval KVC_OK           Done; a grid without tokens writes nothing.
 * @retval KVC_E_ARG        A pointer is NULL, the grid or an option is wrong, a score is
 *                          negative or a texture outside [0, 1]. Nothing was written.
 * @retval KVC_E_NONFINITE  A score, texture or option is NaN or infinite. Nothing was written.
 *
 * Memory: allocates nothing. Threads: any. Cost: two or three passes.
 */
KVC_API kvc_status kvc_score_refine(const float *raw, const kvc_grid *grid, const float *texture,
                                    const kvc_refine_options *options, float *scores,
                                    uint64_t *sinks);

/** How tokens are chosen. kvc_choose_options_default() fills it. */
typedef struct kvc_choose_options {
    size_t struct_size; /**< sizeof(kvc_choose_options) of the caller's header */
    float diversity;    /**< lambda in [0, 1]; 0: the highest scores; default 0.5 */
    int32_t cell_rows;  /**< cells of a frame from top to bottom, >= 1; default 4 */
    int32_t cell_cols;  /**< cells from left to right, >= 1; default 4 */
    int32_t cell_min;   /**< tokens that each cell keeps, >= 0; 0: no coverage floor; default 1 */
    const uint64_t *excluded; /**< tokens, such as padding, that are never chosen; neither their
                                 scores nor their features are used */
} kvc_choose_options;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_choose_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_choose_options_init(kvc_choose_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_choose_options_default(kvc_choose_options *options)
{
    kvc_choose_options_init(options, sizeof(*options));
}

/**
 * Workspace of kvc_choose_tokens().
 *
 * @param grid       The tokens.
 * @param dim        head_dim of the features; 0: without features.
 * @param[out] size  Bytes.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, the grid is wrong, or the size does not fit size_t. Nothing
 *                    was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_choose_tokens_workspace_size(const kvc_grid *grid, size_t dim, size_t *size);

/**
 * Chooses exactly min(keep, tokens that may be chosen) tokens. A token may be chosen unless it is
 * excluded or its score is NaN; a forced one always is. In this order:
 *
 *     1. the forced tokens, ascending
 *     2. coverage: each cell in turn, its highest scores, until it has min(cell_min, its tokens)
 *     3. the highest score[i] * (1 - diversity * max(0, largest cosine of x_i to the chosen))
 *
 * Ties go to the lower index. Token (f, y, x) is in cell (f, floor(y cy / n_rows),
 * floor(x cx / n_cols)) with at most n_rows times n_cols cells a frame. While forced tokens and
 * floor do not fit into keep, both sides of the cell grid are halved, rounded up; if they do not
 * with one cell a frame, there is no floor. A feature of zeros, or so small that its
 * square is 0, has cosine 0 to all.
 *
 * @param ctx          Context; all pointers are host memory.
 * @param scores       [N] >= 0, or NaN: not to be chosen; not read where forced.
 * @param features     [N][1][dim] embeddings or keys; NULL or diversity 0: scores alone decide.
 * @param grid         The N tokens.
 * @param forced       Tokens to keep, at most @p keep, none of them excluded; NULL: none.
 * @param keep         Tokens wanted; more than there are: all that may be chosen.
 * @param options      NULL: the defaults.
 * @param[out] tokens  [min(keep, N)] indices, ascending.
 * @param[out] n       How many were chosen.
 * @param[out] order   NULL, or [min(keep, N)]: the same tokens in the order of choice.
 * @param ws           Workspace.
 * @param ws_size      At least what kvc_choose_tokens_workspace_size() tells.
 *
 * @retval KVC_OK           Done.
 * @retval KVC_E_ARG        A pointer is NULL, the grid, an option or the features' shape is
 *                          wrong, a score is negative, or forced does not fit. Nothing was
 *                          written.
 * @retval KVC_E_NONFINITE  A score is infinite, or a feature of a token that may be chosen is NaN,
 *                          infinite or so large that its square is. Nothing was written but the
 *                          workspace.
 * @retval KVC_E_WORKSPACE  The workspace is missing, too small or misaligned. Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: keep * N * dim
 * multiplications; no N x N matrix.
 */
KVC_API kvc_status kvc_choose_tokens(kvc_ctx *ctx, const float *scores, const kvc_view *features,
                                     const kvc_grid *grid, const uint64_t *forced, size_t keep,
                                     const kvc_choose_options *options, int32_t *tokens, size_t *n,
                                     int32_t *order, void *ws, size_t ws_size);

/** Kinds of learned scorers. */
typedef enum kvc_scorer_kind {
    KVC_SCORER_LINEAR = 0, /**< each token by itself */
    KVC_SCORER_CONV1D = 1  /**< a convolution over the tokens of a frame or of a row */
} kvc_scorer_kind;

/** What ends a learned scorer. */
typedef enum kvc_activation {
    KVC_ACTIVATION_NONE = 0,   /**< the sum itself, which may be negative */
    KVC_ACTIVATION_SIGMOID = 1 /**< 1 / (1 + exp(-sum)) */
} kvc_activation;

/** A learned scorer: what kvc_scorer_encode() writes and kvc_scorer_info() tells. */
typedef struct kvc_scorer_desc {
    size_t struct_size;        /**< sizeof(kvc_scorer_desc) of the caller's header */
    kvc_scorer_kind kind;      /**< linear or convolution */
    kvc_activation activation; /**< of the sum */
    kvc_dtype dtype;           /**< of the weights in the file: KVC_DTYPE_F32 or KVC_DTYPE_F16 */
    int32_t n_in;              /**< elements of an embedding, >= 1; n_in * kernel <= 2^24 */
    int32_t kernel;            /**< taps: 1 if linear, else 1, 3, 5, 7 or 9 */
    bool row_padding;     /**< zeros beyond each row of the grid, not only beyond the frame; false
                             if linear */
    uint8_t tag[32];      /**< names the encoder: a SHA-256, or text that ends with zeros */
    const float *mean;    /**< [n_in], or NULL as inv_std; NULL from kvc_scorer_info() */
    const float *inv_std; /**< [n_in], or NULL as mean; NULL from kvc_scorer_info() */
    const float *weights; /**< [kernel][n_in]; NULL from kvc_scorer_info() */
    float bias;           /**< added to the sum */
} kvc_scorer_desc;

/** A scorer read from a file. Opaque; not changed after its creation. */
typedef struct kvc_scorer kvc_scorer;

/**
 * Write a scorer as a file KVCS, version 1 (docs/score.md).
 *
 * @param desc        The scorer.
 * @param[out] bytes  The file; NULL: only @p n is written.
 * @param size        Room at @p bytes.
 * @param[out] n      Bytes of the file.
 *
 * @retval KVC_OK           Done.
 * @retval KVC_E_ARG        A pointer is NULL, a field is out of range, a weight does not fit the
 *                          dtype, or size is too small. Nothing was written.
 * @retval KVC_E_NONFINITE  A number is NaN or infinite. Nothing was written.
 *
 * Memory: allocates nothing. Threads: any. Cost: one pass.
 */
KVC_API kvc_status kvc_scorer_encode(const kvc_scorer_desc *desc, void *bytes, size_t size,
                                     size_t *n);

/**
 * Read a scorer from a file KVCS. Any bytes are safe.
 *
 * @param ctx       Context; gives the memory.
 * @param bytes     The file; not needed afterwards; no alignment.
 * @param n         Its size, exactly.
 * @param[out] out  The scorer; NULL after any failure. Destroy it before the context.
 *
 * @retval KVC_OK        Done.
 * @retval KVC_E_ARG     A pointer is NULL.
 * @retval KVC_E_FORMAT  Not such a file, another version, a wrong size or checksum, a field out of
 *                       range, a number that is NaN or infinite or becomes so when weights and
 *                       inv_std are multiplied.
 * @retval KVC_E_NOMEM   The allocator returned NULL.
 *
 * Memory: one allocation of about 4 * kernel * n_in bytes. Threads: any. Cost: one pass.
 */
KVC_API kvc_status kvc_scorer_create(kvc_ctx *ctx, const void *bytes, size_t n, kvc_scorer **out);

/** Destroy a scorer. @param scorer  May be NULL. */
KVC_API void kvc_scorer_destroy(kvc_scorer *scorer);

/**
 * What a scorer is.
 *
 * @param scorer    A scorer.
 * @param[out] out  struct_size set; the other fields are overwritten, the pointers with NULL.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL or struct_size is too small. Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_scorer_info(const kvc_scorer *scorer, kvc_scorer_desc *out);

/**
 * Workspace of kvc_scorer_apply().
 *
 * @param scorer     A scorer.
 * @param grid       The tokens.
 * @param[out] size  Bytes.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, the grid is wrong, or the size does not fit size_t. Nothing
 *                    was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_scorer_apply_workspace_size(const kvc_scorer *scorer, const kvc_grid *grid,
                                                   size_t *size);

/**
 * Scores from a learned scorer.
 *
 *     xh     = (x - mean) * inv_std, or x
 *     z[i]   = bias + sum over taps j of W[j] . xh[i + j - (kernel - 1) / 2]
 *     out[i] = z[i], or 1 / (1 + exp(-z[i]))
 *
 * A tap beyond the frame, with row_padding beyond the row, adds nothing: xh is 0 there. inv_std is
 * multiplied into W when the file is read, so that large means cost digits.
 *
 * @param ctx          Context; all pointers are host memory.
 * @param scorer       The scorer.
 * @param x            [N][1][n_in] embeddings.
 * @param grid         The N tokens.
 * @param[out] scores  [N].
 * @param ws           Workspace.
 * @param ws_size      At least what kvc_scorer_apply_workspace_size() tells.
 *
 * @retval KVC_OK           Done; a grid without tokens writes nothing.
 * @retval KVC_E_ARG        A pointer is NULL, the grid is wrong, or x does not fit it. Nothing was
 *                          written.
 * @retval KVC_E_MISMATCH   The embeddings do not have n_in elements. Nothing was written.
 * @retval KVC_E_NONFINITE  A sum is NaN or infinite. Nothing was written but the workspace.
 * @retval KVC_E_WORKSPACE  The workspace is missing, too small or misaligned. Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread; many threads may use one scorer,
 * each with its own context. Cost: kernel * N * n_in multiplications.
 */
KVC_API kvc_status kvc_scorer_apply(kvc_ctx *ctx, const kvc_scorer *scorer, const kvc_view *x,
                                    const kvc_grid *grid, float *scores, void *ws, size_t ws_size);

/**
 * Mixes raw and learned scores: raw^(1 - mu) * learned^mu.
 *
 * @param raw      [n], >= 0.
 * @param learned  [n], >= 0.
 * @param n        Tokens; 0 does nothing.
 * @param mu       In [0, 1]; 0 gives raw, 1 learned, to the bit.
 * @param[out] out [n]; may be raw or learned.
 *
 * @retval KVC_OK           Done.
 * @retval KVC_E_ARG        A pointer is NULL, mu is out of range, or a score is negative. Nothing
 *                          was written.
 * @retval KVC_E_NONFINITE  A score or mu is NaN or infinite. Nothing was written.
 *
 * Memory: allocates nothing. Threads: any. Cost: one pass.
 */
KVC_API kvc_status kvc_score_blend(const float *raw, const float *learned, size_t n, float mu,
                                   float *out);

#ifdef __cplusplus
}
#endif
#endif
