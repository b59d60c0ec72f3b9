/** @file kvc/prune.h
 * What to keep: heavy hitters, forced rows, exact budgets, the selection, and moving the rows.
 *
 * A row is one token of one layer and KV head. Scores come from here or from score.h; the higher
 * one stays. Sources (docs/sources.md): heavy hitters that decay, aggregation over layers, forced
 * tokens (article 000, sections 3.1, 5.2 and 6.2), budgets over layers (PyramidKV, VL-Cache,
 * PrefixKV, EffiVLM-Bench).
 *
 * Bitmaps are arrays of uint64_t: bit i % 64 of word i / 64 is row i; bits beyond the last row are
 * ignored in inputs and 0 in outputs. A workspace is aligned to 64 bytes. Lists of rows ascend. All
 * decisions are made on the host in a fixed order: the same input gives the same rows everywhere.
 */
#ifndef KVC_PRUNE_H
#define KVC_PRUNE_H

#include <stdbool.h>

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Scores. */

/** How heavy hitters are scored. kvc_heavy_options_default() fills it. */
typedef struct kvc_heavy_options {
    size_t struct_size;  /**< sizeof(kvc_heavy_options) of the caller's header */
    float decay;         /**< factor of what is one query older, 0 < decay <= 1; default 0.98, half
                            in 34 queries */
    float recent_weight; /**< extra weight of the newest queries, > 0; default 2 */
    int32_t recent;      /**< how many queries that are, >= 0; default 32 */
} kvc_heavy_options;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_heavy_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_heavy_options_init(kvc_heavy_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_heavy_options_default(kvc_heavy_options *options)
{
    kvc_heavy_options_init(options, sizeof(*options));
}

/**
 * Score rows by the attention they got: the decayed mean of their lift.
 *
 *     v_q     = min(n, first_query + q + 1)             rows that query q sees: 0 ... v_q - 1
 *     w_q     = decay^(n_queries - 1 - q) * (recent_weight if q >= n_queries - recent, else 1)
 *     score_i = sum w_q v_q attention[q][i] / sum w_q   over the queries that see row i
 *
 * The lift v_q attention[q][i] is 1 for every row of even attention; plain column sums favour the
 * first rows, which more queries see and early queries with few rows see strongly. A row that no
 * query sees scores 0.
 *
 * @param attention    [n_queries][stride], query heads of one KV head averaged or one by one; what
 *                     a query cannot see is not read.
 * @param n_queries    Queries, oldest first; 0 gives zeros.
 * @param n            Rows.
 * @param stride       Elements from one query to the next, >= n.
 * @param first_query  Row of the first query: it sees first_query + 1 rows.
 * @param options      NULL: the defaults.
 * @param[out] scores  [n]; may not overlap @p attention.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, stride < n, an option is out of range, or a value
 *                            that is seen is negative, NaN or infinite. Nothing was written.
 * @retval KVC_E_UNSUPPORTED  options has fields of a later version. Nothing was written.
 *
 * Memory: none. Threads: any. Cost: two passes over @p attention.
 */
KVC_API kvc_status kvc_heavy_scores(const float *attention, size_t n_queries, size_t n,
                                    size_t stride, size_t first_query,
                                    const kvc_heavy_options *options, float *scores);

/**
 * Take one more query into sums that decay: what a decode step adds.
 *
 *     num_i = decay num_i + n_visible attention_i        den_i = decay den_i + 1
 *
 * for the rows i < n_visible; kvc_heavy_ratio() makes scores of it. Without its recent_weight,
 * kvc_heavy_scores() gives the same. Set the sums of a new row to 0, and move both arrays with the
 * rows.
 *
 * @param attention      [n_visible], of the new query.
 * @param n_visible      Rows that the query sees.
 * @param options        NULL: the defaults; only decay is used.
 * @param[in,out] num    [n_visible], zeros at first.
 * @param[in,out] den    [n_visible], zeros at first.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, an option is out of range, or an attention is
 *                            negative, NaN or infinite. Nothing was written.
 * @retval KVC_E_UNSUPPORTED  options has fields of a later version. Nothing was written.
 *
 * Memory: none. Threads: any. Cost: constant a row.
 */
KVC_API kvc_status kvc_heavy_add(const float *attention, size_t n_visible,
                                 const kvc_heavy_options *options, float *num, float *den);

/**
 * The scores of sums made by kvc_heavy_add(): num / den, 0 where den is not above 0.
 *
 * @param num          [n].
 * @param den          [n].
 * @param n            Rows.
 * @param[out] scores  [n]; may be @p num or @p den.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL.
 *
 * Memory: none. Threads: any. Cost: one pass.
 */
KVC_API kvc_status kvc_heavy_ratio(const float *num, const float *den, size_t n, float *scores);

/**
 * One score for several layers or heads.
 *
 *     y_l,i = scores[l][i] / mean over the finite scores of l       all zero: stays 0
 *     out_i = sum_l weights_l y_l,i / sum_l weights_l               mean
 *           = max of y_l,i over the layers with weights_l > 0       max
 *
 * So a layer with large scores has no more say than another. A score that is NaN or infinite adds
 * nothing; a row with no finite score in any layer used is NaN, which no selection keeps.
 *
 * @param scores    [n_layers] pointers to [n] scores, >= 0 where finite.
 * @param n_layers  Layers (or heads), >= 1.
 * @param n         Rows.
 * @param weights   [n_layers], >= 0 and not all 0; NULL: all 1. A layer of weight 0 is not read.
 * @param max       true: max, false: mean.
 * @param[out] out  [n]; may not overlap a layer.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, n_layers is 0, a weight or a finite score is negative, a
 *                    weight is NaN or infinite, or all weights are 0. Nothing was written.
 *
 * Memory: none. Threads: any. Cost: two passes over @p scores.
 */
KVC_API kvc_status kvc_combine_scores(const float *const *scores, size_t n_layers, size_t n,
                                      const float *weights, bool max, float *out);

/* Counts and budgets. */

/**
 * How many of n rows are kept at a rate: the one place where a rate becomes a count.
 *
 *     keep = min(n, max(keep_min, ceil(n (1 - rate))))
 *
 * A float holds 0.3 or 0.7 only nearly; the product counts as the whole number that it is within
 * the rounding of @p rate, so 100 rows at 0.7f give 30, not 31. keep never rises with rate.
 *
 * @param n          Rows.
 * @param rate       Share to drop, 0..1, as kvc_gate_update() tells it.
 * @param keep_min   Never fewer than that.
 * @param[out] keep  The count.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  keep is NULL, or rate is NaN or outside 0..1. Nothing was written.
 *
 * Memory: none. Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_keep_count(size_t n, float rate, size_t keep_min, size_t *keep);

/** How a total is split over layers or heads. */
typedef enum kvc_budget_mode {
    KVC_BUDGET_UNIFORM = 0, /**< equal shares */
    KVC_BUDGET_PYRAMID = 1, /**< falling evenly from the first to the last */
    KVC_BUDGET_WEIGHTS = 2, /**< as the caller's weights, for example 1 - kvc_score_sparsity() */
    KVC_BUDGET_HYBRID = 3,  /**< uniform_share of UNIFORM and the rest as WEIGHTS */
    KVC_BUDGET_MASS = 4     /**< one threshold of score mass for all: kvc_budget_mass() only */
} kvc_budget_mode;

/** How to split. kvc_budget_options_default() fills it; a zero in a field is a zero. */
typedef struct kvc_budget_options {
    size_t struct_size;   /**< sizeof(kvc_budget_options) of the caller's header */
    kvc_budget_mode mode; /**< default KVC_BUDGET_HYBRID */
    float uniform_share;  /**< HYBRID: 0..1; default 0.8 */
    float pyramid;        /**< PYRAMID: share of the first over that of the last, > 0; default 3 */
    size_t min;           /**< fewest rows of one layer or head; default 0 */
    size_t max;           /**< most rows of one, >= min; at most 2^31 - 1, the default */
} kvc_budget_options;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_budget_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_budget_options_init(kvc_budget_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_budget_options_default(kvc_budget_options *options)
{
    kvc_budget_options_init(options, sizeof(*options));
}

/**
 * Split a total over layers or heads, to the row.
 *
 *     share_i  = c w_i, inside min..max, with the c that makes the sum total
 *     w        UNIFORM  1
 *              PYRAMID  pyramid + (1 - pyramid) i / (n - 1)
 *              WEIGHTS  weights_i
 *              HYBRID   uniform_share / n + (1 - uniform_share) weights_i / sum weights
 *
 * What a bound takes or leaves goes to the others in proportion (equally, where only weights of 0
 * are left). Shares become whole by largest remainder, the lower index on a tie. Weights that are
 * all 0 count as equal. The sum of @p budgets is exactly total, or n min or n max if total is
 * beyond them.
 *
 * @param weights       [n], >= 0 and finite; NULL for UNIFORM and PYRAMID, which do not read it.
 * @param n             Layers or heads; 0 does nothing.
 * @param total         Rows to give.
 * @param options       NULL: the defaults.
 * @param[out] budgets  [n] rows.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, weights are missing, negative, NaN or infinite, an
 *                            option is out of range, mode is MASS, or n min does not fit size_t.
 *                            Nothing was written.
 * @retval KVC_E_UNSUPPORTED  options has fields of a later version. Nothing was written.
 *
 * Memory: none. Threads: any. Cost: O(n^2) at worst, for n layers or heads.
 */
KVC_API kvc_status kvc_split_budget(const float *weights, size_t n, size_t total,
                                    const kvc_budget_options *options, int32_t *budgets);

/**
 * The share of attention probabilities that is nearly nothing: below 1 % of the largest in its row
 * (VL-Cache). 1 - sparsity is the weight of a layer for kvc_split_budget().
 *
 * @param probabilities  [n_rows][stride], for example the probe rows of all heads of a layer.
 * @param n_rows         Query rows. Rows of zeros do not count.
 * @param n_cols         Keys that every row sees.
 * @param stride         Elements from one row to the next, >= n_cols.
 * @param[out] sparsity  0..1; 0 if no row counts.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, stride < n_cols, or a value is negative, NaN or infinite.
 *                    Nothing was written.
 *
 * Memory: none. Threads: any. Cost: two passes.
 */
KVC_API kvc_status kvc_score_sparsity(const float *probabilities, size_t n_rows, size_t n_cols,
                                      size_t stride, float *sparsity);

/**
 * Bytes of workspace for kvc_budget_mass().
 *
 * @param n          Layers or heads.
 * @param n_tokens   Tokens of each, below 2^31.
 * @param[out] size  8 bytes for each score, and for the tokens of one layer more.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  size is NULL, n_tokens is out of range, or the product does not fit size_t.
 */
KVC_API kvc_status kvc_budget_mass_workspace_size(size_t n, size_t n_tokens, size_t *size);

/**
 * Split a total so that each layer or head keeps the same share of its score mass (PrefixKV).
 *
 *     m_i(c)   = sum of the c largest scores of i / sum of all + 2^-20 c / n_tokens
 *     budget_i = the fewest rows c in min..max with m_i(c) >= t, for the largest t within total
 *
 * The small second term parts equal masses and zeros evenly. What is left of total once no t gives
 * all of it (fewer than n rows, one each) goes to the lowest indices that the next t would raise.
 * Layers of few strong tokens get few rows, layers of even scores many. A layer whose scores are
 * all 0 counts as even. The sum of @p budgets is exactly total, or as kvc_split_budget() beyond
 * n min and n max.
 *
 * @param scores        [n][n_tokens], >= 0 and finite; the scale of a layer does not matter.
 * @param n             Layers or heads; 0 does nothing.
 * @param n_tokens      Tokens of each, below 2^31; a min or max above it counts as n_tokens.
 * @param total         Rows to give.
 * @param options       NULL: the defaults; only min and max are used.
 * @param[out] budgets  [n] rows.
 * @param ws            kvc_budget_mass_workspace_size() bytes.
 * @param ws_size       Size of @p ws.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, a score is negative, NaN or infinite, a count or an
 *                            option is out of range. Nothing was written.
 * @retval KVC_E_UNSUPPORTED  options has fields of a later version. Nothing was written.
 * @retval KVC_E_WORKSPACE    ws is missing, too small or misaligned. Nothing was written.
 *
 * Memory: the workspace. Threads: any. Cost: O(n n_tokens).
 */
KVC_API kvc_status kvc_budget_mass(const float *scores, size_t n, size_t n_tokens, size_t total,
                                   const kvc_budget_options *options, int32_t *budgets, void *ws,
                                   size_t ws_size);

/* Selection. */

/** What must stay. kvc_force_options_default() fills it; a zero in a field is a zero. */
typedef struct kvc_force_options {
    size_t struct_size;             /**< sizeof(kvc_force_options) of the caller's header */
    int32_t recent;                 /**< newest rows, >= 0; default 64 */
    int32_t sinks;                  /**< first rows, >= 0; default 4 */
    bool sentences;                 /**< use sentence_first; default true */
    const uint64_t *caller;         /**< bitmap of the caller's own rows; default NULL: none */
    const uint64_t *sentence_first; /**< bitmap of first tokens of sentences; default NULL: none */
} kvc_force_options;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_force_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_force_options_init(kvc_force_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_force_options_default(kvc_force_options *options)
{
    kvc_force_options_init(options, sizeof(*options));
}

/**
 * The rows that a selection must keep, never more than it may keep.
 *
 * In this order until @p keep rows are marked: the newest rows (newest first), the sinks, first
 * tokens of sentences, the caller's rows (lowest index first).
 *
 * @param n               Rows.
 * @param options         NULL: the defaults.
 * @param keep            Rows that will be kept.
 * @param[out] forced     Bitmap of n bits; may not be one of the inputs.
 * @param[out] n_forced   Rows marked, at most min(n, keep).
 * @param[out] truncated  NULL, or set to whether rows were left out for lack of room.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, a count is negative, or forced is one of the
 *                            inputs. Nothing was written.
 * @retval KVC_E_UNSUPPORTED  options has fields of a later version. Nothing was written.
 *
 * Memory: none. Threads: any. Cost: one pass over each bitmap.
 */
KVC_API kvc_status kvc_force_rows(size_t n, const kvc_force_options *options, size_t keep,
                                  uint64_t *forced, size_t *n_forced, bool *truncated);

/** The score of a block of rows. */
typedef enum kvc_block_score {
    KVC_BLOCK_MEAN = 0, /**< mean of the valid scores in it */
    KVC_BLOCK_MAX = 1   /**< the largest: a lone strong row keeps its block */
} kvc_block_score;

/**
 * Bytes of workspace for kvc_select_rows().
 *
 * @param n          Rows, below 2^31.
 * @param block      Rows of a block, 1..64.
 * @param[out] size  About 16 bytes a block.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  size is NULL, n or block is out of range.
 */
KVC_API kvc_status kvc_select_rows_workspace_size(size_t n, size_t block, size_t *size);

/**
 * The rows with the highest scores.
 *
 * With block 1: the forced rows, and of the others the best, min(keep, valid rows) in all. A row is
 * valid if it is forced or its score is neither NaN nor -inf; +inf is the best score. Of equal
 * scores the lower index wins. Too few valid rows: fewer than @p keep are returned.
 *
 * With block > 1: rows b block ... b block + block - 1 (the last block may be shorter) stay or go
 * together, less the rows that are not valid. Blocks with a forced row stay first, even if they
 * exceed @p keep; then the best blocks, each if it still fits. So at most max(keep, rows of the
 * forced blocks) are returned, and more than keep - block if enough rows are valid.
 *
 * @param scores       [n]. May be NULL if @p n is 0.
 * @param n            Rows, below 2^31.
 * @param keep         Rows to keep; more than n counts as n.
 * @param forced       Bitmap of rows to keep in any case, at most @p keep (kvc_force_rows() makes
 *                     such a one); NULL: none.
 * @param block        Rows of a block, 1..64.
 * @param how          Score of a block.
 * @param[out] rows    The rows, ascending; room for n, with block 1 for min(n, keep). May be
 *                     NULL if @p keep is 0.
 * @param[out] n_rows  Rows returned.
 * @param ws           kvc_select_rows_workspace_size() bytes.
 * @param ws_size      Size of @p ws.
 *
 * @retval KVC_OK           Done.
 * @retval KVC_E_ARG        A pointer is NULL, n, block or how is out of range, or more than
 *                          @p keep rows are forced. Nothing was written.
 * @retval KVC_E_WORKSPACE  ws is missing, too small or misaligned. Nothing was written.
 *
 * Memory: the workspace. Threads: any. Cost: O(n), whatever the scores.
 */
KVC_API kvc_status kvc_select_rows(const float *scores, size_t n, size_t keep,
                                   const uint64_t *forced, size_t block, kvc_block_score how,
                                   int32_t *rows, size_t *n_rows, void *ws, size_t ws_size);

/* Moving rows and what refers to them. */

/**
 * Keep some rows of a tensor, in place: row i becomes old row rows[i].
 *
 * Bytes are moved, never changed, whatever the element type: K, V, scores (head_dim 1), positions
 * (as F32). Everything that lies a row apart must be moved with the same list. Afterwards the
 * tensor has n_rows rows: set n_tokens of the view to it. Then the same list again is refused, or
 * 0, 1, ..., n_rows - 1, which changes nothing. What lies behind the kept rows is undefined.
 *
 * @param ctx     Context; all pointers are host memory.
 * @param view    The tensor; elements may not overlap.
 * @param rows    [n_rows], ascending, below n_tokens. May be NULL if @p n_rows is 0.
 * @param n_rows  Rows to keep.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, the view is malformed or overlaps itself, or rows do not
 *                    ascend inside it. Nothing was written.
 *
 * Memory: none. Threads: runs in the calling thread. Cost: each kept row that moves is copied once.
 */
KVC_API kvc_status kvc_prune_rows(kvc_ctx *ctx, const kvc_view *view, const int32_t *rows,
                                  size_t n_rows);

/**
 * Where each old row went: its new row, or -1.
 *
 * An index from before a removal means another row after it. Take it through the map; after two
 * removals through both maps, in their order.
 *
 * @param rows      [n_rows], ascending, below n_old. May be NULL if @p n_rows is 0.
 * @param n_rows    Rows kept.
 * @param n_old     Rows before, below 2^31.
 * @param[out] map  [n_old]; may be NULL if @p n_old is 0. May not overlap rows.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, n_old is out of range, or rows do not ascend below it.
 *                    Nothing was written.
 *
 * Memory: none. Threads: any. Cost: one pass.
 */
KVC_API kvc_status kvc_prune_map(const int32_t *rows, size_t n_rows, size_t n_old, int32_t *map);

/** A run of rows, such as the tokens of one image. Arrays of it cross the API: its 8 bytes never
 * change. */
typedef struct kvc_segment {
    int32_t first; /**< first row */
    int32_t count; /**< rows */
} kvc_segment;

/**
 * The segments of a prompt in rows after pruning.
 *
 *     out.first = kept rows before the segment        out.count = kept rows inside it
 *
 * A segment of which nothing is left has count 0 and the place where it was. Each segment is mapped
 * by itself; they may have gaps, overlap, and come in any order.
 *
 * @param segments    [n_segments], in rows before pruning. May be NULL if @p n_segments is 0.
 * @param n_segments  Segments.
 * @param rows        [n_rows] kept, ascending, below n_old. May be NULL if @p n_rows is 0.
 * @param n_rows      Rows kept.
 * @param n_old       Rows before, below 2^31; no segment reaches beyond.
 * @param[out] out    [n_segments]; may be @p segments.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, n_old is out of range, rows do not ascend below it, or a
 *                    segment has a negative field or reaches beyond it. Nothing was written.
 *
 * Memory: none. Threads: any. Cost: O(n_rows + n_segments log n_rows).
 */
KVC_API kvc_status kvc_segment_map(const kvc_segment *segments, size_t n_segments,
                                   const int32_t *rows, size_t n_rows, size_t n_old,
                                   kvc_segment *out);

#ifdef __cplusplus
}
#endif
#endif
