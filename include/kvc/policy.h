/** @file kvc/policy.h
 * Policies: which tokens a cache keeps, prunes and merges, and in what precision.
 *
 * kvc_cache_compress() applies a policy to a sequence, after a prefill or between decode steps:
 *
 *     score   every token, from the query rows that attention kept (or as kvc_score_source says)
 *     gate    how many visual tokens go, from memory pressure and entropy
 *     prune   visual tokens down to that rate, then all tokens down to a number of rows
 *     merge   visual tokens that look alike, with a bias that keeps their share of attention
 *     seal    what is left behind the recent window, strong tokens as F16 if the policy says so
 *
 * One list of rows moves keys, values, ordinals, biases, sizes, scores and scales. Tokens keep
 * their positions; the next position does not change. kvc_cache_params::on_full applies a policy
 * when a cache is full. The arithmetic is that of score.h, gate.h, prune.h and merge.h; decisions
 * are the same on every kernel table and with any parallel_for, unless they rest on what attention
 * computes within its tolerance: KVC_SOURCE_SUMS and max_rel_err.
 *
 * Sources (docs/sources.md): article 000, sections 2 to 6; what differs is in docs/policy.md.
 */
#ifndef KVC_POLICY_H
#define KVC_POLICY_H

#include "cache.h"
#include "gate.h"
#include "merge.h"
#include "prune.h"
#include "score.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Where the score of a token comes from. Higher stays. */
typedef enum kvc_score_source {
    KVC_SOURCE_PROBES = 0, /**< attention mass that the kept query rows give it; see
                              kvc_cache_params::probe_rows */
    KVC_SOURCE_SUMS = 1,   /**< what kvc_attend_options::accumulate added up, per query that could
                              see it; needs kvc_cache_params::score_mode */
    KVC_SOURCE_CALLER = 2, /**< kvc_policy::scores */
    KVC_SOURCE_AGE = 3     /**< its ordinal: the newest stay, as in a sliding window */
} kvc_score_source;

/** Which layers and heads share a set of tokens. */
typedef enum kvc_scope {
    KVC_SCOPE_SHARED = 0, /**< all: scores are combined over layers and heads */
    KVC_SCOPE_LAYER = 1,  /**< the heads of a layer */
    KVC_SCOPE_HEAD = 2    /**< none: each layer and head has its own */
} kvc_scope;

/** A policy. kvc_policy_default() or kvc_policy_preset() fills it; edit what you like. A zero in a
 * field is a zero. The structs in it never change their sizes. */
struct kvc_policy {
    size_t struct_size;      /**< sizeof(kvc_policy) of the caller's header */
    kvc_score_source source; /**< default KVC_SOURCE_PROBES */
    kvc_scope scope;         /**< default KVC_SCOPE_SHARED */
    const float *scores;     /**< KVC_SOURCE_CALLER: [n_scores], of the token with that ordinal;
                                finite, >= 0; tokens beyond have score 0 */
    size_t n_scores;         /**< see scores */
    kvc_layer_choice layers; /**< KVC_SCOPE_SHARED: layers whose scores count; default
                                KVC_LAYERS_ALL */
    int32_t last_layers;     /**< KVC_LAYERS_LAST: how many; default 4 */

    /* Visual tokens: those of kind KVC_TOKEN_VISUAL with image >= 0, each image by itself; it must
     * be whole when it is first judged. The rate is of all its tokens, sinks included. */
    float visual_rate; /**< share of them that is pruned, 0..1; with gate: its base; default 0 */
    bool gate;         /**< let pressure and entropy set the rate; the pressure is
                          kvc_stats::used_bytes over what it could be (budget less probe rows,
                          scratch and overhead); default false */
    kvc_gate_params gating; /**< base is not read: visual_rate is */
    int32_t keep_min;       /**< visual tokens of an image that always stay, >= 0; default 64 */
    float centre;           /**< weight of the centre prior (kvc_refine_options), >= 0; default 0 */
    float temperature;      /**< of the same, > 0; default 0.7 */
    int32_t coverage;       /**< > 0: at least one token in each cell of a coverage x coverage grid
                               stays; default 0 */
    float sink_factor;      /**< visual tokens above this many means stay and do not count in the
                               entropy; 0: none; default 10 */

    /* Merging of visual tokens that are sealed by this call. An image with more candidates than
     * kvc_cache_params::max_merge_tokens, and tokens that always stay, are left alone. */
    int32_t merge_rounds;      /**< 0..3; default 0. > 0 needs kvc_cache_params::max_merge_tokens */
    kvc_merge_options merging; /**< which pairs, what weights */
    bool recode; /**< let tokens that are already coded merge too: they are decoded and coded once
                    more, which is counted (kvc_report::n_recoded); default false */

    /* All tokens. */
    float row_rate;   /**< share of all rows that is pruned, 0..1; default 0 */
    int32_t max_rows; /**< > 0: most rows of a layer and head, sinks and recent tokens included;
                         where budget gives layers or heads different shares: their mean; default
                         0: no limit */
    kvc_budget_options budget; /**< KVC_SCOPE_LAYER and HEAD: how the rows are shared out over
                                  layers or heads; default KVC_BUDGET_UNIFORM. WEIGHTS and HYBRID
                                  weigh one by the share of its rows with a score of 1 % or more of
                                  its largest. min and max are not read */
    int32_t block; /**< 1..64: neighbours in so many places stay or go together; default 1 */
    kvc_block_score block_score; /**< score of a block; default KVC_BLOCK_MEAN */
    int32_t last_tokens;         /**< newest tokens that always stay, >= 0; default 64 */
    bool keep_sentences; /**< tokens with KVC_TOKEN_SENTENCE stay while there is room; default true.
                            Sinks, the newest tokens, separators and KVC_TOKEN_KEEP stay before
                            them. Where max_rows or row_rate leave no room, sentences go first, then
                            KEEP and separators, then the older of the newest: see
                            kvc_report::n_forced_dropped. on_full drops only sentences and what no
                            rule keeps, so rows may exceed max_rows by the rest */

    /* Precision of what this call seals. */
    bool set_precision;      /**< use precision; default false: that of the cache */
    kvc_precision precision; /**< of all layers and heads; default INT8, TOKEN */
    float heavy_share; /**< share of the sealed rows with the highest scores that stays F16, 0..1;
                          default 0 */

    float max_rel_err; /**< > 0: prune and merge less where kvc_layer_report::rel_err of a layer
                          would be larger; needs probe_rows; default 0: no limit */
};

/**
 * Fill the defaults for a struct of a given size: a policy that prunes and merges nothing.
 *
 * @param[out] policy  NULL does nothing.
 * @param struct_size  sizeof(kvc_policy) of the caller; written to struct_size too.
 */
KVC_API void kvc_policy_init(kvc_policy *policy, size_t struct_size);

/** Fill the defaults. @param[out] policy  NULL does nothing. */
static inline void kvc_policy_default(kvc_policy *policy)
{
    kvc_policy_init(policy, sizeof(*policy));
}

/**
 * The profiles of article 000, section 6.1.
 *
 *     name        visual tokens pruned  sealed as                  rounds of merging
 *     light       15 %                  F16                        0
 *     balanced    30 %                  INT8                       1
 *     aggressive  50 %                  INT4, 20 % of rows F16     2
 *     extreme     65 %                  INT4, 20 % of rows F16     3
 *
 * All share one set of tokens, and merge pairs of a mean cosine of 0.85 or more.
 *
 * @param name         One of the names above.
 * @param struct_size  sizeof(kvc_policy) of the caller.
 * @param[out] policy  The policy.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, the name is unknown, or struct_size is too small.
 */
KVC_API kvc_status kvc_policy_preset_init(const char *name, kvc_policy *policy, size_t struct_size);

/** kvc_policy_preset_init() for this header. @param name As there. @param[out] policy As there.
 * @return As there. */
static inline kvc_status kvc_policy_preset(const char *name, kvc_policy *policy)
{
    return kvc_policy_preset_init(name, policy, sizeof(*policy));
}

/** What became of a row, and why. */
typedef enum kvc_fate {
    KVC_FATE_NONE = 0,     /**< no row: none was there */
    KVC_FATE_KEPT = 1,     /**< no rule had to save it: nothing of its kind was to be pruned */
    KVC_FATE_SCORE = 2,    /**< kept by its score */
    KVC_FATE_SINK = 3,     /**< kept: one of the first tokens, or a visual sink */
    KVC_FATE_RECENT = 4,   /**< kept: one of the newest tokens */
    KVC_FATE_SENTENCE = 5, /**< kept: first of a sentence */
    KVC_FATE_CALLER = 6,   /**< kept: KVC_TOKEN_KEEP or a separator */
    KVC_FATE_PRUNED = 7,   /**< gone: beyond the rate of its image */
    KVC_FATE_EVICTED = 8,  /**< gone: beyond the rows of its layer and head */
    KVC_FATE_MERGED = 9,   /**< gone: in the row of kvc_token_fate::partner */
    KVC_FATE_ABSORBED = 10 /**< kept, and holds other tokens: partner is one of them */
} kvc_fate;

/** One row before a compression. Arrays of it cross the API: its 32 bytes never change. */
typedef struct kvc_token_fate {
    int32_t ordinal; /**< of its token */
    int32_t old_row; /**< its place among the rows of its layer and head before */
    int32_t new_row; /**< the place of the row that holds it now, or -1 */
    int32_t partner; /**< ordinal, see kvc_fate; or -1 */
    float score;     /**< what it was judged by; KVC_SCOPE_SHARED: 1 is the mean; 0 for sinks */
    uint8_t fate;    /**< a kvc_fate */
    uint8_t heavy;   /**< 1: stays F16 as one of the strong tokens */
    uint8_t reserved[10]; /**< 0 */
} kvc_token_fate;

/**
 * Create a map, which kvc_cache_compress() fills.
 *
 * @param cache       The cache whose sequences it will describe; must outlive the map.
 * @param max_tokens  Most rows of a layer and head that it can describe, >= 1.
 * @param[out] out    The map; NULL after any failure.
 *
 * @retval KVC_OK       Done.
 * @retval KVC_E_ARG    A pointer is NULL, max_tokens is below 1, or the size does not fit.
 * @retval KVC_E_NOMEM  The allocator returned NULL.
 *
 * Memory: 32 bytes for each layer, head and token, from the context's allocator.
 */
KVC_API kvc_status kvc_map_create(const kvc_cache *cache, int32_t max_tokens, kvc_map **out);

/** Destroy a map. @param map  May be NULL. */
KVC_API void kvc_map_destroy(kvc_map *map);

/**
 * What the last compression with this map did to each row of one layer and head: from old rows to
 * new ones, and why.
 *
 * @param map             A map.
 * @param layer, kv_head  Which.
 * @param max_rows        Room in @p fates.
 * @param[out] fates      By ascending ordinals, or NULL to ask for the number.
 * @param[out] n_rows     Rows before the compression.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, an index is out of range, or @p max_rows too small.
 */
KVC_API kvc_status kvc_explain(const kvc_map *map, int32_t layer, int32_t kv_head, size_t max_rows,
                               kvc_token_fate *fates, size_t *n_rows);

/**
 * The attention mass that the kept query rows give the rows of one layer and head: the scores of
 * KVC_SOURCE_PROBES.
 *
 *     score[i] = mean over query rows r and query heads of the KV head of exp(s[r][i] - lse[r])
 *
 * s as in kvc_attend(), with the options that the rows were last used with; a query row sees the
 * rows up to its own ordinal; lse runs over all of them, sinks included. The same bits on every
 * kernel table. Query rows with NaN count as zeros.
 *
 * @param cache           A cache.
 * @param seq             Every announced token has its K and V in this layer.
 * @param layer, kv_head  Which.
 * @param max_rows        Room; kvc_seq_n_rows() tells what is needed.
 * @param[out] scores     One a row, as kvc_seq_read_rows() orders them.
 * @param[out] n_rows     Rows written.
 *
 * @retval KVC_OK     Done. Without kept query rows all scores are 0.
 * @retval KVC_E_ARG  A pointer is NULL, @p seq is not alive, an index is out of range, rows are
 *                    missing or max_rows is too small.
 *
 * Cost: reads K twice for each 16 rows of query heads. Source: SnapKV, arXiv 2404.14469.
 */
KVC_API kvc_status kvc_seq_score_rows(kvc_cache *cache, kvc_seq seq, int32_t layer, int32_t kv_head,
                                      size_t max_rows, float *scores, size_t *n_rows);

/**
 * What the rows of one layer and head stand for.
 *
 * @param cache           A cache.
 * @param seq             A sequence; only rows that have been appended are read.
 * @param layer, kv_head  Which.
 * @param max_rows        Room; kvc_seq_n_rows() tells what is needed.
 * @param[out] biases     One a row, as kvc_seq_read_rows() orders them: what kvc_attend() adds to
 *                        its logits; 0 for a row of one token. Or NULL.
 * @param[out] sizes      Tokens that a row stands for, 255 if they are more. Or NULL.
 * @param[out] n_rows     Rows written.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p cache or n_rows is NULL, @p seq is not alive, an index is out of range or
 *                    max_rows too small.
 */
KVC_API kvc_status kvc_seq_read_groups(const kvc_cache *cache, kvc_seq seq, int32_t layer,
                                       int32_t kv_head, size_t max_rows, float *biases,
                                       int32_t *sizes, size_t *n_rows);

#ifdef __cplusplus
}
#endif
#endif
