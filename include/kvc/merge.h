/** @file kvc/merge.h
 * Merge visual tokens that look alike: one key and one value for two, and a bias that keeps their
 * share of the attention.
 *
 * Tensors are K after rotation and V, in the caller's memory; decisions need no attention matrix.
 * One round over the layers of a model that share one set of tokens is
 *
 *     kvc_merge_similarity()  once a layer, cosines added up
 *     kvc_merge_match()       who merges with whom, no token twice
 *     kvc_merge_apply()       K, V and tokens of all layers, then rows move together
 *
 * kvc_merge_rounds() does this one to three times. From then on the engine adds
 * kvc_merge_token::bias to the logits of each row: without it a merged row of two loses half of
 * its attention. docs/merge.md says when not to merge.
 *
 * Only visual tokens of one image merge (kvc_merge_token::image); text never does.
 *
 * Sources (docs/sources.md): merging in matched pairs (article 000, section 3.3), weighting by
 * size and its logarithm as bias (ToMe, arXiv 2210.09461), positions that stay (RESTORE, arXiv
 * 2606.01711). The identity behind the bias is Gibbs' inequality.
 */
#ifndef KVC_MERGE_H
#define KVC_MERGE_H

#include <stdbool.h>

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What weighs a member of a pair. */
typedef enum kvc_merge_weights {
    KVC_MERGE_SIZE = 0,     /**< tokens that it stands for */
    KVC_MERGE_ATTENTION = 1 /**< its attention mass, smoothed by the mean mass of a token */
} kvc_merge_weights;

/** Which pairs merge and how. kvc_merge_options_default() fills it; a zero in a field is a zero. */
typedef struct kvc_merge_options {
    size_t struct_size;   /**< sizeof(kvc_merge_options) of the caller's header */
    float tau;            /**< least mean cosine of a pair, -1..1; default 0.85 */
    float max_norm_ratio; /**< longer key at most this times the shorter, >= 1; default 1.25. The
                             cosine does not see lengths; 0: they do not matter */
    float max_share;      /**< at most floor(n * max_share) pairs of n tokens that may merge, 0..1
                             (never more than floor(n / 2)); default 0.25 */
    int32_t window;       /**< > 0: rows and columns of a pair differ by no more; default 0: any */
    kvc_merge_weights weights; /**< default KVC_MERGE_SIZE */
    bool mutual;               /**< true: only pairs that are each other's nearest; default false:
                                  greedy, which has all of these and more */
    bool force_quarter;        /**< true: tau and max_norm_ratio do not count, the floor(n *
                                  max_share) best pairs merge; default false */
    bool across_frames;        /**< true: frames of one image (a video) may merge; default false */
} kvc_merge_options;

/**
 * What merging knows of a row: its place, and what it stands for. Arrays of it cross the API: its
 * 32 bytes never change.
 */
typedef struct kvc_merge_token {
    int32_t image;       /**< number of the image; < 0: text, never merged */
    int32_t frame;       /**< frame of a video, or 0 */
    int32_t row;         /**< row of the patch in the grid; only the window reads it */
    int32_t col;         /**< its column */
    float size;          /**< tokens that it stands for, >= 1; 1 before any merge */
    float bias;          /**< to be added to its logits; 0 before any merge */
    float mass;          /**< attention mass (any unit), >= 0; 0 if unknown */
    bool fixed;          /**< true: never merged (sinks, forced tokens) */
    uint8_t reserved[3]; /**< 0 */
} kvc_merge_token;

/** Two rows that merge. */
typedef struct kvc_merge_pair {
    int32_t a;        /**< the earlier row */
    int32_t b;        /**< the later row */
    float similarity; /**< mean cosine of their keys */
} kvc_merge_pair;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_merge_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_merge_options_init(kvc_merge_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_merge_options_default(kvc_merge_options *options)
{
    kvc_merge_options_init(options, sizeof(*options));
}

/**
 * Entries of the similarities of n tokens: the upper triangle, row by row. Pair i < j lies at
 * i (2 n - i - 1) / 2 + j - i - 1.
 *
 * @param n  Tokens, < 2^31.
 * @return n (n - 1) / 2.
 */
static inline size_t kvc_merge_triangle(size_t n)
{
    return n / 2 * ((n - 1) | 1); /* the even one of n and n - 1 is halved */
}

/**
 * Workspace of kvc_merge_similarity().
 *
 * @param k          Keys as they will be given; only the shape counts.
 * @param[out] size  Bytes.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, the view is wrong, or the size does not fit.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_merge_similarity_workspace_size(const kvc_view *k, size_t *size);

/**
 * Add the cosines of all pairs of tokens of one layer.
 *
 *     similarity[i, j] += sum over heads of  k_i . k_j / (|k_i| |k_j|)         i < j
 *     norms[i]         += sum over heads of  |k_i|
 *
 * Start from zeros and call it for each layer that shares the set of tokens; the mean cosine is
 * similarity / (layers * heads). A key shorter than 2^-50, or of 2^64 and more, counts as a zero
 * vector: its cosine to all others is 0. NaN or Inf in a key makes its entries NaN, which
 * never merge. Pairs of tokens that may not merge (image, frame, fixed, window) get their cosine or
 * nothing. Products and sums are fp32 in an order that depends neither on the kernel table nor on
 * threads.
 *
 * @param ctx                 Context; all pointers are host memory.
 * @param k                   [n][n_heads][d], after rotation; n < 2^31.
 * @param tokens              [n], or NULL: every pair is computed.
 * @param options             Window and across_frames are used. NULL: the defaults.
 * @param[in,out] similarity  [kvc_merge_triangle(n)], added to.
 * @param[in,out] norms       [n], added to.
 * @param[out] ws             Workspace, aligned to 64 bytes.
 * @param ws_size             At least kvc_merge_similarity_workspace_size().
 *
 * @retval KVC_OK             Done; fewer than two tokens add only norms.
 * @retval KVC_E_ARG          A pointer is NULL, the view, a token or an option is wrong. Nothing
 *                            was written.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 * @retval KVC_E_WORKSPACE    ws is NULL, misaligned or too small. Nothing was written.
 *
 * Memory: allocates nothing. Threads: the context's parallel_for. Cost: n^2 / 2 products of
 * n_heads * d elements, less with a window.
 */
KVC_API kvc_status kvc_merge_similarity(kvc_ctx *ctx, const kvc_view *k,
                                        const kvc_merge_token *tokens,
                                        const kvc_merge_options *options, float *similarity,
                                        float *norms, void *ws, size_t ws_size);

/**
 * Workspace of kvc_merge_match().
 *
 * @param n          Tokens, < 2^31.
 * @param[out] size  Bytes.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  size is NULL or n is too large.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_merge_match_workspace_size(size_t n, size_t *size);

/**
 * Choose the pairs that merge; no token is in two of them.
 *
 * A pair may merge when both tokens are of one image (and frame, unless across_frames), neither is
 * fixed, their cells are within the window, their norms within max_norm_ratio, and their mean
 * cosine is at least tau. With force_quarter only the first three count.
 *
 *     greedy   take pairs by falling similarity, then by lower a, then lower b, if both tokens are
 *              still free
 *     mutual   as greedy, but only pairs of which each is the other's nearest among all that it may
 *              merge with (the lower of equal ones)
 *     at most  min(floor(n max_share), floor(n / 2)) pairs, n: tokens that are neither text nor
 *              fixed
 *
 * Every mutual pair is also greedy if max_share does not cut. NaN never merges.
 *
 * @param similarity    [kvc_merge_triangle(n)], as kvc_merge_similarity() adds it or the caller's
 *                      own; may be NULL if n < 2.
 * @param scale         similarity * scale is the mean cosine: 1 / (layers * heads); > 0.
 * @param norms         [n], of any common unit; NULL: norms do not count.
 * @param tokens        [n].
 * @param n             Tokens, < 2^31; 0 gives no pair.
 * @param options       NULL: the defaults.
 * @param[out] pairs    Room for n / 2; best first, a < b in each.
 * @param[out] n_pairs  How many.
 * @param[out] ws       Workspace, aligned to 64 bytes.
 * @param ws_size       At least kvc_merge_match_workspace_size().
 *
 * @retval KVC_OK           Done.
 * @retval KVC_E_ARG        A pointer is NULL, a token, an option or scale is wrong. Nothing was
 *                          written.
 * @retval KVC_E_WORKSPACE  ws is NULL, misaligned or too small. Nothing was written.
 *
 * Memory: allocates nothing. Threads: runs in the calling thread. Cost: one pass over the
 * similarities and one row of them for each partner that was taken by another; at worst O(n^3).
 */
KVC_API kvc_status kvc_merge_match(const float *similarity, float scale, const float *norms,
                                   const kvc_merge_token *tokens, size_t n,
                                   const kvc_merge_options *options, kvc_merge_pair *pairs,
                                   size_t *n_pairs, void *ws, size_t ws_size);

/**
 * Workspace of kvc_merge_plan().
 *
 * @param k          [n_layers] keys as they will be given; only the shapes count.
 * @param n_layers   >= 1.
 * @param[out] size  Bytes.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, a view is wrong, or the size does not fit.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM.
 *
 * Threads: any. Cost: one look at each view.
 */
KVC_API kvc_status kvc_merge_plan_workspace_size(const kvc_view *k, size_t n_layers, size_t *size);

/**
 * Choose the pairs of layers that share one set of tokens: kvc_merge_similarity() of each and
 * kvc_merge_match().
 *
 * @param ctx           Context; all pointers are host memory.
 * @param k             [n_layers] views [n][heads][d], after rotation; n < 2^31. struct_size is
 *                      the distance of elements of the array.
 * @param n_layers      >= 1.
 * @param tokens        [n].
 * @param options       NULL: the defaults.
 * @param[out] pairs    Room for n / 2.
 * @param[out] n_pairs  How many.
 * @param[out] ws       Workspace, aligned to 64 bytes.
 * @param ws_size       At least kvc_merge_plan_workspace_size().
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, a view, a token or an option is wrong. Nothing was
 *                            written.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM. Nothing was written.
 * @retval KVC_E_WORKSPACE    ws is NULL, misaligned or too small. Nothing was written.
 *
 * Memory: allocates nothing. Threads: the context's parallel_for. Cost: that of the calls.
 */
KVC_API kvc_status kvc_merge_plan(kvc_ctx *ctx, const kvc_view *k, size_t n_layers,
                                  const kvc_merge_token *tokens, const kvc_merge_options *options,
                                  kvc_merge_pair *pairs, size_t *n_pairs, void *ws, size_t ws_size);

/**
 * Mean attention mass of one original token: what KVC_MERGE_ATTENTION smooths with.
 *
 *     mean = sum of mass / sum of size       over tokens that are neither text nor fixed; 0 if none
 *
 * @param tokens     [n].
 * @param n          Tokens.
 * @param[out] mean  The mean.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL or a token is wrong. Nothing was written.
 *
 * Threads: any. Cost: one pass.
 */
KVC_API kvc_status kvc_merge_mean_mass(const kvc_merge_token *tokens, size_t n, float *mean);

/**
 * Weights, bias and token of a merged pair.
 *
 *     SIZE        w_a = size_a / (size_a + size_b)
 *     ATTENTION   w_a = m_a / (m_a + m_b),  m = mass + mean_mass * size;  as SIZE if both are 0
 *     w_b = 1 - w_a
 *     bias = H(w) + w_a bias_a + w_b bias_b + w_a w_b spread / 2,   H(w) = -sum w ln w
 *     size, mass: sums
 *     place (image, frame, row, col): that of the heavier: more mass, then more size, then a
 *
 * With k = w_a k_a + w_b k_b the logit of any query is z = w_a z_a + w_b z_b, and
 *
 *     ln(e^(z_a + bias_a) + e^(z_b + bias_b)) = z + bias + KL(w || softmax(z + bias of members))
 *
 * with spread 0, so that the pair never gets more attention than its members had, and the same
 * where w is their softmax. SIZE: bias = ln(size) exactly, however many rounds, if no spread was
 * given and unmerged tokens have bias 0. The missing mass is about
 * e^(-w_a w_b (z_a - z_b)^2 / 2): the second-order term, spread = E[(z_a - z_b)^2] over the
 * queries that matter, makes up for it on average, and then the pair may get more than its members
 * had.
 *
 * @param a                  The earlier row.
 * @param b                  The later row.
 * @param mean_mass          kvc_merge_mean_mass(), >= 0; SIZE ignores it; 0: no smoothing.
 * @param spread             Mean square difference of the logits, >= 0; 0: no second-order term.
 * @param options            weights is used. NULL: the defaults.
 * @param[out] w_a           Weight of a's K and V.
 * @param[out] w_b           Weight of b's K and V.
 * @param[out] out           The merged token; may be a or b. fixed is that of either.
 * @param[out] a_is_heavier  Whether the place is a's: further positions (rotary ids) go with it.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, a token, an option, mean_mass or spread is wrong, or a sum
 *                    is above 2^127. Nothing was written.
 *
 * Whether the two may merge is not asked here. Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_merge_combine(const kvc_merge_token *a, const kvc_merge_token *b,
                                     float mean_mass, float spread,
                                     const kvc_merge_options *options, float *w_a, float *w_b,
                                     kvc_merge_token *out, bool *a_is_heavier);

/**
 * Merge pairs in all layers that share the set of tokens, and move the rows that are left together.
 *
 * K and V of the heavier row (kvc_merge_combine()) become w_a x_a + w_b x_b, computed in fp32 and
 * rounded once to the type of the view; the other row goes. The rows left keep their order, and
 * each keeps its own position, as the merged one has that of its heavier member.
 *
 * @param ctx              Context; all pointers are host memory.
 * @param pairs            [n_pairs], a < b, no row twice; each may merge by image, frame and fixed.
 * @param n_pairs          0 changes nothing but n_rows, rows and map.
 * @param k                [n_layers] views [n][heads][d] in place; struct_size is the distance of
 *                         elements of the array.
 * @param v                [n_layers] views [n][heads][d] in place.
 * @param n_layers         >= 1.
 * @param spread           [n_pairs], for kvc_merge_combine(), or NULL: zeros.
 * @param options          weights and across_frames are used. NULL: the defaults.
 * @param[in,out] tokens   [n]; the first n_rows are those of the rows that are left.
 * @param[out] map         [n]: the new row that holds an old one.
 * @param[out] rows        [n]: the old row that the new row has its place from, ascending; the
 *                         first n_rows are written. For what else has rows.
 * @param[out] n_rows      n - n_pairs.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, a view, pair, token, spread or option is wrong.
 *                            Nothing but map was written.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM. Nothing but map was written.
 *
 * Memory: allocates nothing. Threads: the context's parallel_for. Cost: reads and writes the rows
 * of pairs once, and what lies behind the first of them once more.
 */
KVC_API kvc_status kvc_merge_apply(kvc_ctx *ctx, const kvc_merge_pair *pairs, size_t n_pairs,
                                   const kvc_view *k, const kvc_view *v, size_t n_layers,
                                   const float *spread, const kvc_merge_options *options,
                                   kvc_merge_token *tokens, int32_t *map, int32_t *rows,
                                   size_t *n_rows);

/**
 * Workspace of kvc_merge_rounds().
 *
 * @param k          [n_layers] keys as they will be given; only the shapes count.
 * @param n_layers   >= 1.
 * @param[out] size  Bytes.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, a view is wrong, or the size does not fit.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_merge_rounds_workspace_size(const kvc_view *k, size_t n_layers,
                                                   size_t *size);

/**
 * Merge in rounds, each over what the last one left: similarity, match and apply. With max_share
 * 0.25 and enough similar tokens 576 become 432, 324, 243. One round is the rule; quality falls
 * clearly with the third (article 000, section 3.3).
 *
 * @param ctx             Context; all pointers are host memory.
 * @param k               [n_layers] views [n][heads][d] in place, as kvc_merge_apply().
 * @param v               [n_layers] views [n][heads][d] in place.
 * @param n_layers        >= 1; the layers share the set of tokens.
 * @param options         NULL: the defaults.
 * @param n_rounds        1..3.
 * @param[in,out] tokens  [n]; the first n_rows are those of the rows that are left.
 * @param[out] map        [n]: the new row that holds an old one.
 * @param[out] rows       [n]: the old row that a new row has its place from.
 * @param[out] n_rows     Rows that are left in all views.
 * @param[out] ws         Workspace, aligned to 64 bytes.
 * @param ws_size         At least kvc_merge_rounds_workspace_size().
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, a view, token, option or n_rounds is wrong.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM.
 * @retval KVC_E_WORKSPACE    ws is NULL, misaligned or too small.
 *
 * After an error nothing but ws was written. Memory: allocates nothing. Threads: the context's
 * parallel_for. Cost: that of the three calls, a round.
 */
KVC_API kvc_status kvc_merge_rounds(kvc_ctx *ctx, const kvc_view *k, const kvc_view *v,
                                    size_t n_layers, const kvc_merge_options *options,
                                    int32_t n_rounds, kvc_merge_token *tokens, int32_t *map,
                                    int32_t *rows, size_t *n_rows, void *ws, size_t ws_size);

/** What one query sees of a pair that merges. */
typedef struct kvc_merge_query {
    size_t struct_size;   /**< sizeof(kvc_merge_query) of the caller's header */
    float mass;           /**< attention mass of both members together, 0..1 */
    float difference;     /**< z_a - z_b, logits without biases; with within: at most that far from
                             0, e.g. scale |q| |k_a - k_b| */
    bool within;          /**< false: difference is exact; true: it is a limit, >= 0 */
    float w_a;            /**< weight of a, 0..1 */
    float bias_a;         /**< bias of a before the merge */
    float bias_b;         /**< bias of b before the merge */
    float bias;           /**< bias of the merged row; 0: what merging without bias does */
    float value_distance; /**< |v_a - v_b|, >= 0 */
    float rest_distance;  /**< |v - o_rest|, >= 0: merged value to the output of all other rows */
} kvc_merge_query;

/** What merging does to that query's output. */
typedef struct kvc_merge_loss {
    size_t struct_size; /**< sizeof(kvc_merge_loss), set by the caller */
    float deficit;      /**< eps: logarithm of the members' mass over the merged row's, before
                           normalization; with the bias of kvc_merge_combine() and no spread it is
                           KL(w || softmax), never below 0 */
    float share_a;      /**< a's part of the pair's mass before the merge */
    float merged_mass;  /**< attention mass of the merged row */
    float error;        /**< limit of |o' - o|, the change of the output */
} kvc_merge_loss;

/**
 * How much merging one pair changes the attention output of a query: the limit of it, from exact
 * identities.
 *
 *     y = z + bias of members;  share_a = e^(y_a) / (e^(y_a) + e^(y_b))
 *     deficit     = ln(e^(y_a) + e^(y_b)) - (w_a z_a + w_b z_b + bias)
 *     merged_mass = mass e^(-deficit) / (1 - mass + mass e^(-deficit))
 *     o' - o      = (merged_mass - mass) (v - o_rest) + mass (w_a - share_a) (v_a - v_b)
 *     error       = |merged_mass - mass| rest_distance + mass |w_a - share_a| value_distance
 *
 * with v = w_a v_a + w_b v_b. For weights 1/2 and the logarithm of 2 as bias the deficit is
 * ln cosh(difference / 2) <= difference^2 / 8. If only a limit of the difference is known (within),
 * each term is the worst that this limit allows, provided that bias is no more than the exact one.
 *
 * @param query      The pair as the query sees it.
 * @param[out] loss  struct_size set. With within, deficit, share_a and merged_mass are those of
 *                   the worse end.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL or a number is out of range or not finite. Nothing was
 *                    written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_merge_error(const kvc_merge_query *query, kvc_merge_loss *loss);

/**
 * How much dropping rows changes the attention output of a query, exactly.
 *
 *     |o' - o| = mass / (1 - mass) |o - v|
 *
 * @param mass        Attention mass of what is dropped, 0..1 (1 excluded).
 * @param distance    |o - v|, >= 0: output before to the mean value of the dropped rows, weighted
 *                    with their attention.
 * @param[out] error  |o' - o|.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  error is NULL or a number is out of range. Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_drop_error(float mass, float distance, float *error);

/**
 * The expected error of merging a pair, to order pairs by or to stop at a tolerance. First order of
 * kvc_merge_error() in the variance of the difference, for weights near 1/2:
 *
 *     cost = (mass_a + mass_b + robustness mean_mass (size_a + size_b))
 *            (spread / 8 value_norm + sqrt(spread) / 4 value_distance)
 *
 * @param a               One row.
 * @param b               The other.
 * @param robustness      >= 0. 0: only queries like those that gave the masses count; 1 to 3: later
 *                        questions may look elsewhere.
 * @param mean_mass       kvc_merge_mean_mass(), >= 0.
 * @param spread          E[(z_a - z_b)^2] over queries, >= 0.
 * @param value_norm      Length of the values, >= 0.
 * @param value_distance  |v_a - v_b|, >= 0.
 * @param[out] cost       In the unit of the values, if the masses sum to 1 over a query's rows.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, a token is wrong, or a number is negative or not finite.
 *                    Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_merge_cost(const kvc_merge_token *a, const kvc_merge_token *b,
                                  float robustness, float mean_mass, float spread, float value_norm,
                                  float value_distance, float *cost);

#ifdef __cplusplus
}
#endif
#endif
