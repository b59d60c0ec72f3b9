/** @file kvc/cache.h
 * The cache: owns compressed pages of K and V inside one memory budget.
 *
 * An engine announces tokens (kvc_tokens_add()), hands over their K and V layer by layer
 * (kvc_append()), and asks for attention (kvc_attend()). What has left the recent window is sealed:
 * quantized once, from the exact values, and never coded again. The first sink_tokens tokens stay
 * exact for ever.
 *
 * Three numbers that must not be confused: the *token count* of a sequence (ordinals 0 ... n - 1 as
 * announced), its *row count* in one layer and head (what is left after removals), and its *next
 * position* (rotary position, which the patches of an image share). Ranges are ordinals. Causality
 * is: key ordinal <= query ordinal.
 *
 * Threads: a cache, and the context it was made from, are used by one thread at a time. All work is
 * done when a call returns. Nothing is allocated after kvc_cache_create(). docs/architecture.md
 * describes the parts, docs/formats.md the bytes.
 */
#ifndef KVC_CACHE_H
#define KVC_CACHE_H

#include <stdbool.h>

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Tokens of a page. */
#define KVC_PAGE_TOKENS 64

/** A cache. Opaque. */
typedef struct kvc_cache kvc_cache;

/** A sequence: a value that is never 0 and that its cache never gives out twice. It means nothing
 * to another cache. */
typedef uint64_t kvc_seq;

/** Rules of pruning and merging: policy.h. */
typedef struct kvc_policy kvc_policy;

/** What a compression did to each row: policy.h. Opaque. */
typedef struct kvc_map kvc_map;

/** How one layer and KV head is stored once it is sealed. */
typedef struct kvc_precision {
    kvc_format k;      /**< format of K */
    kvc_format v;      /**< format of V */
    kvc_scale k_scale; /**< HEAD, TOKEN or CHANNEL; ignored for KVC_F16 */
    kvc_scale v_scale; /**< HEAD or TOKEN; ignored for KVC_F16 */
} kvc_precision;

/**
 * What a cache does to K, V and queries before it stores or multiplies them; bits. H is the
 * orthonormal Walsh-Hadamard transform (docs/formats.md, section 4) of each run of channels of the
 * largest power of two that divides the head size. Nothing of it shows outside: scores, outputs and
 * log-sum-exps are those of the values that came, and rows are read back as they came.
 *
 *     K' = H((K - mean) / scale),   Q' = H(Q scale),   Q' K'^T = Q K^T - Q mean^T
 *     V' = H V,   output = H output'
 *
 * Sources (docs/sources.md): rotation QuaRot; mean of K as in SageAttention; scale article 003.
 */
typedef enum kvc_transform_flag {
    KVC_TRANSFORM_ROTATE_K = 1, /**< H of K and of the queries */
    KVC_TRANSFORM_ROTATE_V = 2, /**< H of V */
    KVC_TRANSFORM_K_ROTATED = 4 /**< K and queries come from the engine as H K and H Q, instead of
                                   KVC_TRANSFORM_ROTATE_K; k_mean and k_scale are still those of K.
                                   An engine that rotates V says nothing: its output is rotated */
} kvc_transform_flag;

/** Which attention masses are added up for each key. */
typedef enum kvc_score_mode {
    KVC_SCORE_NONE = 0, /**< none; no memory is used */
    KVC_SCORE_PAGE = 1, /**< one sum a page */
    KVC_SCORE_TOKEN = 2 /**< one sum a row */
} kvc_score_mode;

/** Geometry and rules of a cache. kvc_cache_params_default() fills it; a zero in a field is a zero.
 */
typedef struct kvc_cache_params {
    size_t struct_size;    /**< sizeof(kvc_cache_params) of the caller's header */
    int32_t n_layers;      /**< 1..65536; no default */
    int32_t n_heads;       /**< query heads, a multiple of n_kv_heads, at most 65536; no default */
    int32_t n_kv_heads;    /**< query head q reads KV head q / (n_heads / n_kv_heads); no default */
    int32_t head_dim_k;    /**< 1..KVC_MAX_HEAD_DIM; no default */
    int32_t head_dim_v;    /**< 1..KVC_MAX_HEAD_DIM; no default */
    size_t budget_bytes;   /**< everything, allocated once at create; no default, see
                              kvc_cache_min_budget() */
    int32_t max_sequences; /**< 1..65536; default 1 */
    int32_t max_tokens; /**< tokens over all sequences, sizes the tables; default 8192. Those that
                           policies dropped everywhere no longer count */
    int32_t max_append; /**< most tokens one kvc_tokens_add() announces, >= 1; default 512 */
    int32_t max_sequence_tokens; /**< the same of one sequence; default 2^31 - 1: max_tokens */
    int32_t max_hold_tokens; /**< most tokens held by kvc_seq_hold() in one sequence; default 0 */
    int32_t probe_rows;      /**< query rows kept for kvc_seq_read_probes(), 0..1024; default 16 */
    const kvc_policy *on_full; /**< what kvc_tokens_add() does to a sequence that does not fit;
                                  copied, but for kvc_policy::scores, which must outlive the cache;
                                  default NULL: it answers KVC_E_FULL */
    kvc_precision precision;   /**< of every layer and head; default INT8, TOKEN */
    int32_t
        scale_window; /**< HEAD: tokens whose absmax sets a scale, a multiple of 64, default 64 */
    int32_t recent_tokens; /**< newest tokens kept as F16, >= 0; default 128 */
    int32_t sink_tokens;   /**< first tokens kept as F16 for ever, 0..64; default 4 */
    kvc_score_mode
        score_mode; /**< what kvc_attend_options::accumulate adds to; default KVC_SCORE_NONE */
    bool strict;    /**< true: NaN and Inf in K or V are refused; default false */
    int32_t max_merge_tokens; /**< most visual tokens of an image, left after pruning, that policies
                                 merge; larger images are not merged. Sizes their scratch (2 n^2
                                 bytes and more); default 0: none */
    float score_decay;    /**< 0 < decay <= 1: masses count by this factor less for each token that
                             was announced since; default 1 */
    uint32_t transform;   /**< kvc_transform_flag bits; default 0 */
    int32_t online_pages; /**< 1..64: where k_mean and k_scale are NULL, both are measured once: on
                             the first so many full pages of the first sequence that has had them,
                             less removed rows, and on the queries of tokens at those ordinals in
                             all sequences, each as often as it attends. Until then nothing is
                             sealed, see kvc_cache_read_transform(); default 0 */
    const float *k_mean;  /**< [n_layers][n_kv_heads][head_dim_k], at most 65504 in magnitude, and
                             1e30 times its scale; copied; NULL (default): zeros; see
                             kvc_observation_calibrate() */
    const float *k_scale; /**< the same, > 0, finite as its inverse; NULL (default): ones */
} kvc_cache_params;

/** Kinds of tokens; policies treat them differently. */
typedef enum kvc_token_kind {
    KVC_TOKEN_TEXT = 0,
    KVC_TOKEN_VISUAL = 1,   /**< a patch of an image: image, row and col are set */
    KVC_TOKEN_SEPARATOR = 2 /**< between or around images */
} kvc_token_kind;

/** Flags of tokens that policies know; the other bits are the caller's. */
typedef enum kvc_token_flag {
    KVC_TOKEN_SENTENCE = 1, /**< first of a sentence: stays while there is room */
    KVC_TOKEN_KEEP = 2      /**< never pruned and never merged */
} kvc_token_flag;

/** Immutable facts of one token. Arrays of it cross the API: its 32 bytes never change. */
typedef struct kvc_token {
    int32_t t;           /**< rotary position, 0 ... 2^31 - 2: time; text has t = y = x */
    int32_t y;           /**< rotary position: row */
    int32_t x;           /**< rotary position: column */
    int32_t image;       /**< number of the image, or -1 */
    int32_t row;         /**< row of the cell in the grid of the image, or -1 */
    int32_t col;         /**< its column, or -1 */
    uint8_t kind;        /**< a kvc_token_kind */
    uint8_t flags;       /**< kvc_token_flag bits, and the caller's */
    uint8_t reserved[6]; /**< 0 */
} kvc_token;

/** How kvc_attend() computes. kvc_attend_options_default() fills it. */
typedef struct kvc_attend_options {
    size_t struct_size; /**< sizeof(kvc_attend_options) of the caller's header */
    float scale;        /**< factor of q . k; default 1 / sqrt(head_dim_k); finite */
    float softcap;      /**< > 0: logit = softcap * tanh(logit / softcap); 0 (default): none */
    int64_t window;     /**< > 0: of a query at t, keys t - window + 1 ... t; 0 (default): all */
    bool accumulate;    /**< add the masses to the scores, if any are kept; default false */
    bool exact;         /**< products with codes of floats, not of 16-bit integers; default false */
} kvc_attend_options;

/** One sequence of a batch. */
typedef struct kvc_attend_item {
    size_t
        struct_size;   /**< sizeof(kvc_attend_item) of the caller's header; the same in all items */
    kvc_seq seq;       /**< as kvc_attend() */
    const kvc_view *q; /**< as kvc_attend() */
    const kvc_view *out; /**< as kvc_attend() */
    float *lse;          /**< as kvc_attend() */
} kvc_attend_item;

/** What a compression did to one layer; rows and bytes are sums over its KV heads. Arrays of it
 * cross the API: its 56 bytes never change. */
typedef struct kvc_layer_report {
    int64_t n_kept;       /**< rows afterwards, sinks included */
    int64_t n_pruned;     /**< rows that went by their score */
    int64_t n_merged;     /**< rows that went into others */
    int64_t bytes_before; /**< pages of the layer; one that is shared counts whole */
    int64_t bytes_after;  /**< the same, afterwards */
    double rel_err;  /**< estimated change of the attention output of coming queries: over the kept
                        query rows, square root of sum |out' - out|^2 / sum |out|^2, quantization
                        included; NaN without query rows or without a policy */
    double reserved; /**< 0 */
} kvc_layer_report;

/** What a compression did. */
typedef struct kvc_report {
    size_t struct_size;        /**< sizeof(kvc_report), set by the caller */
    int64_t n_pages_sealed;    /**< pages of single heads */
    int64_t n_pages_compacted; /**< pages freed by moving rows together */
    size_t bytes_before;       /**< bytes in use, as kvc_stats::used_bytes */
    size_t bytes_after;        /**< the same, afterwards */
    int64_t n_recoded;         /**< rows of one head that were decoded and coded again */
    float visual_rate;         /**< share of the visual tokens that the policy meant to prune, after
                                  gate and max_rel_err; mean over the images */
    float strength; /**< 1, or the part of its rates that max_rel_err left to the policy */
    kvc_layer_report *layers; /**< in: NULL, or where the layers go */
    int32_t n_layers;         /**< in: room in layers, at least the layers of the cache */
    int32_t n_forced_dropped; /**< tokens that must stay by a rule and did not fit the rows */
} kvc_report;

/** Where the budget went: used_bytes + fixed_bytes = budget_bytes, and each is the sum of its
 * lines. */
typedef struct kvc_stats {
    size_t struct_size;       /**< sizeof(kvc_stats), set by the caller */
    size_t budget_bytes;      /**< as in the parameters */
    size_t used_bytes;        /**< grows with the tokens: the five lines below */
    size_t f16_page_bytes;    /**< unsealed pages, whole, open ones included */
    size_t sealed_page_bytes; /**< sealed pages, whole */
    size_t strip_bytes;       /**< exact rows of the sinks, of every live sequence */
    size_t entry_bytes;       /**< page table, with scores */
    size_t token_bytes;       /**< token table */
    size_t fixed_bytes;       /**< the rest: the six lines below */
    size_t probe_bytes;       /**< query rows */
    size_t scratch_bytes;     /**< attention */
    size_t reserve_bytes;     /**< free part of the F16 pages that every sequence is sure of */
    size_t free_page_bytes;   /**< pool that holds no page, slab remainders included */
    size_t free_table_bytes;  /**< unused strips, entries and token tables */
    size_t overhead_bytes;    /**< structures, alignment and transforms */
    int64_t n_sequences;      /**< alive */
    int64_t n_tokens;         /**< announced, over all sequences */
    int64_t n_pages_f16;      /**< pages of one layer and head; a shared page counts once */
    int64_t n_pages_sealed;   /**< the same of sealed pages */
    int64_t n_free_slots; /**< ranges of at most 64 tokens that the page table still has room for */
    uint64_t n_sealed_total; /**< pages quantized since create */
    uint64_t n_nonfinite;    /**< NaN and Inf that kvc_append() replaced */
    uint64_t n_saturated;    /**< finite values beyond +-65504, as they came or transformed, that
                                became +-65504 */
} kvc_stats;

/** A page as it is stored; see kvc_seq_read_page(). */
typedef struct kvc_page_info {
    size_t struct_size;      /**< sizeof(kvc_page_info), set by the caller */
    bool sealed;             /**< false: F16, V row-major */
    kvc_precision precision; /**< of a sealed page; KVC_F16 otherwise */
    int32_t n_rows;          /**< rows 0 ... n_rows - 1 were written */
    uint64_t live;           /**< bit r: row r has not been removed */
    size_t n_bytes;          /**< size of the page */
    int32_t n_owners;        /**< sequences that share it */
} kvc_page_info;

/**
 * Fill the defaults for a struct of a given size; the geometry and budget_bytes become 0.
 *
 * @param[out] params  NULL does nothing.
 * @param struct_size  sizeof(kvc_cache_params) of the caller; written to struct_size too.
 */
KVC_API void kvc_cache_params_init(kvc_cache_params *params, size_t struct_size);

/** Fill the defaults; the geometry and budget_bytes become 0. @param[out] params  NULL does
 * nothing. */
static inline void kvc_cache_params_default(kvc_cache_params *params)
{
    kvc_cache_params_init(params, sizeof(*params));
}

/**
 * Set how K and V are stored, by the name of a preset; docs/accuracy.md tells how each was chosen.
 *
 *     name      K                  V             transform
 *     f16       F16                F16           none
 *     int8      INT8 TOKEN         INT8 TOKEN    mean, scale, H of K and V
 *     int4      INT4 TOKEN         INT4 TOKEN    the same
 *     k6v4      INT6 TOKEN         INT4 TOKEN    the same
 *     int4-raw  INT4 CHANNEL       INT4 TOKEN    none: for engines that cannot give Q to the cache
 *
 * Mean and scale come from k_mean and k_scale, or online_pages, which becomes 4, measures them.
 *
 * @param[in,out] params  precision, transform and online_pages are set, the rest stays.
 * @param name            One of the names.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, struct_size is too small, or the name is unknown. Nothing
 *                    changed.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_cache_params_preset(kvc_cache_params *params, const char *name);

/**
 * The smallest budget that kvc_cache_create() accepts: tables, probe rows, scratch, sinks, one slab
 * for sealed pages, and for each of max_sequences the F16 pages that it may need at a time:
 *
 *     pages(recent_tokens + max_append), or pages(max_hold_tokens) if that is more, for each layer
 *     and KV head, with pages(n) = ceil((n + 63) / 64) + 1; all sequences together no more than
 *     max_tokens / 64 + 3 max_sequences. With online_pages, recent_tokens counts at least
 *     64 online_pages
 *
 * Each page size in use (precisions that differ, pages of moved rows) takes slabs of its own, of
 * the size of 16 F16 pages: sealed pages want some slabs beyond this minimum.
 *
 * @param params      budget_bytes is not read.
 * @param[out] bytes  The budget.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          As kvc_cache_create(), or the number does not fit size_t.
 * @retval KVC_E_UNSUPPORTED  As kvc_cache_create().
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_cache_min_budget(const kvc_cache_params *params, size_t *bytes);

/**
 * A budget in which max_tokens tokens fit, in up to max_sequences sequences, if every layer and
 * head keeps kvc_cache_params::precision: kvc_cache_min_budget() and the sealed pages.
 *
 * @param params      budget_bytes is not read.
 * @param[out] bytes  The budget.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          As kvc_cache_min_budget().
 * @retval KVC_E_UNSUPPORTED  As kvc_cache_min_budget().
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_cache_full_budget(const kvc_cache_params *params, size_t *bytes);

/**
 * Create a cache.
 *
 * @param ctx       Context; must outlive the cache.
 * @param params    Copied.
 * @param[out] out  The cache; NULL after any failure.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, a field is out of range (of on_full too), or
 *                            budget_bytes is below kvc_cache_min_budget().
 * @retval KVC_E_UNSUPPORTED  A head size above KVC_MAX_HEAD_DIM, KVC_SCALE_LAYER, KVC_SCALE_CHANNEL
 *                            for V, KVC_INT6 for V or with another scale than TOKEN, or on_full as
 *                            in kvc_cache_compress().
 * @retval KVC_E_NOMEM        The allocator returned NULL.
 *
 * Memory: one allocation of budget_bytes, aligned to 128. Cost: writes the tables, not the pages.
 */
KVC_API kvc_status kvc_cache_create(kvc_ctx *ctx, const kvc_cache_params *params, kvc_cache **out);

/** Destroy a cache and its sequences. @param cache  May be NULL. */
KVC_API void kvc_cache_destroy(kvc_cache *cache);

/**
 * Set how a layer and head is stored.
 *
 * @param cache      Without sequences.
 * @param layer      0 ... n_layers - 1, or -1 for all.
 * @param kv_head    0 ... n_kv_heads - 1, or -1 for all.
 * @param precision  Copied.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL, an index is out of range, a format or scale is
 *                            unknown, or the cache has a sequence. Nothing changed.
 * @retval KVC_E_UNSUPPORTED  As kvc_cache_create(). Nothing changed.
 */
KVC_API kvc_status kvc_cache_set_precision(kvc_cache *cache, int32_t layer, int32_t kv_head,
                                           const kvc_precision *precision);

/**
 * Account for every byte of the budget; changes nothing.
 *
 * @param cache       A cache.
 * @param[in,out] out struct_size set.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL or struct_size is too small.
 *
 * Cost: proportional to the slabs.
 */
KVC_API kvc_status kvc_cache_stats(const kvc_cache *cache, kvc_stats *out);

/**
 * Create an empty sequence.
 *
 * @param cache     A cache.
 * @param[out] out  The sequence; 0 after any failure.
 *
 * @retval KVC_OK      Done.
 * @retval KVC_E_ARG   A pointer is NULL.
 * @retval KVC_E_FULL  max_sequences are alive. Nothing changed.
 */
KVC_API kvc_status kvc_seq_create(kvc_cache *cache, kvc_seq *out);

/**
 * Create a copy of a sequence. Pages that are full or sealed are shared, open pages, sinks, page
 * table, token table, scores and probe rows are copied; the copy counts all its tokens in
 * max_tokens again.
 *
 * @param cache     A cache.
 * @param src       Every announced token has its K and V in every layer.
 * @param[out] out  The new sequence; 0 after any failure.
 *
 * @retval KVC_OK      Done.
 * @retval KVC_E_ARG   A pointer is NULL, @p src is not alive, or rows are missing.
 * @retval KVC_E_FULL  No room for a sequence or its tables. Nothing changed.
 */
KVC_API kvc_status kvc_seq_fork(kvc_cache *cache, kvc_seq src, kvc_seq *out);

/**
 * Forget the tokens from ordinal @p n_tokens on. Rows of a sealed page are cut off, not coded
 * again; the tokens that follow start a page of their own up to the next page border, and from that
 * border on the bytes are those of a sequence that never had the forgotten tokens (with HEAD scales
 * from where the scale window has left the cut page). Allowed while rows are missing.
 *
 * @param cache     A cache.
 * @param seq       A sequence.
 * @param n_tokens  0 ... token count.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p seq is not alive, @p n_tokens is out of range, or lies after the first and
 *                    not after the last token of a merged row. Nothing changed.
 *
 * The next position becomes that after the last token that stays; where policies forgot tokens just
 * behind it, that after these: never less. Cost: looks at every page.
 */
KVC_API kvc_status kvc_seq_truncate(kvc_cache *cache, kvc_seq seq, int64_t n_tokens);

/**
 * Remove the rows of the tokens @p first ... @p last - 1, sinks too; the others keep ordinals and
 * positions, the token count and the next position stay. Removed tokens keep their place in
 * max_tokens; only kvc_seq_truncate() and kvc_seq_destroy() give it back.
 *
 * @param cache        A cache.
 * @param seq          Every announced token has its K and V in every layer.
 * @param first, last  0 <= first <= last <= token count.
 *
 * @retval KVC_OK     Done; sealed pages without rows were freed, others have holes until
 *                    kvc_cache_compress(). A row that is removed before its page is sealed keeps
 *                    its part in the scales of the page; an unsealed page without rows is freed
 *                    when it would be sealed.
 * @retval KVC_E_ARG  @p seq is not alive, the range is wrong, rows are missing, or the range begins
 *                    or ends between the first and the last token of a merged row (or lies between
 *                    them). Nothing changed.
 */
KVC_API kvc_status kvc_seq_remove(kvc_cache *cache, kvc_seq seq, int64_t first, int64_t last);

/**
 * Keep everything that follows unsealed until kvc_cache_compress(). A second call changes nothing.
 *
 * @param cache  A cache.
 * @param seq    A sequence.
 *
 * @retval KVC_OK     Done. kvc_tokens_add() answers KVC_E_FULL for more than max_hold_tokens held
 *                    tokens.
 * @retval KVC_E_ARG  @p seq is not alive, or max_hold_tokens is 0. Nothing changed.
 */
KVC_API kvc_status kvc_seq_hold(kvc_cache *cache, kvc_seq seq);

/**
 * Seal every full page whose tokens all lie behind the recent window (and before a hold), now.
 *
 * @param cache  A cache.
 * @param seq    Every announced token has its K and V in every layer.
 *
 * @retval KVC_OK      Done.
 * @retval KVC_E_ARG   @p seq is not alive, or rows are missing. Nothing changed.
 * @retval KVC_E_FULL  No room for the sealed pages. Nothing changed.
 */
KVC_API kvc_status kvc_seq_settle(kvc_cache *cache, kvc_seq seq);

/**
 * Free a sequence; pages that it shares stay with their other owners.
 *
 * @param cache  A cache.
 * @param seq    A sequence.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p seq is not alive. Nothing changed.
 */
KVC_API kvc_status kvc_seq_destroy(kvc_cache *cache, kvc_seq seq);

/** Tokens announced. @param cache A cache. @param seq A sequence. @return The count, or -1 if not
 * alive. */
KVC_API int64_t kvc_seq_n_tokens(const kvc_cache *cache, kvc_seq seq);

/**
 * The rotary position after the last token: 1 + the largest t, y or x announced so far. It is
 * stored, never derived from rows: removals do not change it, kvc_seq_truncate() takes it back.
 *
 * @param cache  A cache.
 * @param seq    A sequence.
 * @return The position, 0 for an empty sequence, -1 if it is not alive.
 */
KVC_API int64_t kvc_seq_next_position(const kvc_cache *cache, kvc_seq seq);

/**
 * Rows that attention of one layer and KV head can see.
 *
 * @param cache           A cache.
 * @param seq             A sequence.
 * @param layer, kv_head  Which.
 * @return The count, or -1 if the sequence is not alive or an index is out of range.
 */
KVC_API int64_t kvc_seq_n_rows(const kvc_cache *cache, kvc_seq seq, int32_t layer, int32_t kv_head);

/**
 * Announce @p n tokens, once for all layers, before their K and V arrive. First seals what left the
 * recent window (kvc_seq_settle()), then reserves the pages of all layers and heads: kvc_append()
 * and kvc_attend() of these tokens cannot run out of room.
 *
 * With kvc_cache_params::on_full, rows of this sequence are dropped first: so many that no layer
 * and head has more than the policy's max_rows with the new tokens (on average, where its budget
 * gives them different shares), if that is set, and a sixteenth at a time until everything fits.
 * What must stay is not dropped. Of the policy the score source, scope, budget, block and what
 * always stays count here; nothing is merged or coded anew. Tokens without rows are forgotten, so a
 * sequence may go on without end.
 *
 * @param cache   A cache.
 * @param seq     Every token announced before has its K and V in every layer.
 * @param tokens  [n] facts, copied; NULL: text at the next positions.
 * @param n       0 ... max_append.
 *
 * @retval KVC_OK      Done.
 * @retval KVC_E_ARG   @p seq is not alive, rows are missing, @p n is above max_append, a position
 *                     is negative or too large, a kind is unknown or a reserved byte is not 0.
 *                     Nothing changed.
 * @retval KVC_E_FULL  No room for the tokens, the pages to seal or the hold; or the F16 pages that
 *                     kvc_cache_min_budget() counts are used up by rows that policies left, a few
 *                     in each of more pages than max_tokens fill. Nothing changed: nothing was
 *                     sealed. With on_full, no more rows could go; those that did are
 *                     gone.
 *
 * Cost: that of sealing. When rows go, all rows are scored and moved together: with max_rows that
 * is in every call at the limit, many times an attention, so decode with a block of 16 or more, add
 * tokens in groups, or use KVC_SOURCE_AGE or KVC_SOURCE_SUMS.
 */
KVC_API kvc_status kvc_tokens_add(kvc_cache *cache, kvc_seq seq, const kvc_token *tokens, size_t n);

/**
 * Hand over K (after rotation) and V of the next announced tokens of one layer: all of them, or a
 * part, in order. They are stored as F16, rounded to nearest even: finite values beyond +-65504
 * saturate, NaN becomes 0, Inf the largest finite magnitude of its token and head with its sign;
 * all three are counted. Pads and neighbours are never touched.
 *
 * @param cache  A cache.
 * @param seq    A sequence.
 * @param layer  0 ... n_layers - 1; layers may come in any order.
 * @param k      [n][n_kv_heads][head_dim_k]; F32, F16 or BF16.
 * @param v      [n][n_kv_heads][head_dim_v]; F32, F16 or BF16; the same n.
 *
 * @retval KVC_OK           Done.
 * @retval KVC_E_ARG        @p seq is not alive, a shape or stride is wrong, or n is above what was
 *                          announced. Nothing was written.
 * @retval KVC_E_NONFINITE  strict, and K or V holds NaN or Inf. Nothing was written.
 */
KVC_API kvc_status kvc_append(kvc_cache *cache, kvc_seq seq, int32_t layer, const kvc_view *k,
                              const kvc_view *v);

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param cache         Gives head_dim_k; NULL: the scale is 1.
 * @param[out] options  NULL does nothing.
 * @param struct_size   sizeof(kvc_attend_options) of the caller; written to struct_size too.
 */
KVC_API void kvc_attend_options_init(const kvc_cache *cache, kvc_attend_options *options,
                                     size_t struct_size);

/** Fill the defaults. @param cache  Gives head_dim_k. @param[out] options  NULL does nothing. */
static inline void kvc_attend_options_default(const kvc_cache *cache, kvc_attend_options *options)
{
    kvc_attend_options_init(cache, options, sizeof(*options));
}

/**
 * Attention of the last n_q announced tokens over the cache, with g = n_heads / n_kv_heads and j
 * over the rows whose ordinal is at most the query's (and inside the window):
 *
 *     s[h][j] = scale * q[h] . k[h / g][j], then softcap * tanh(s / softcap) if softcap > 0
 *     lse[h]  = ln sum_j exp(s[h][j])
 *     out[h]  = sum_j exp(s[h][j] - lse[h]) v[h / g][j]
 *
 * Sums are fp32. Against float64 on the stored values the error of an exact call is at most 2e-5 +
 * 2e-7 max |s| of the largest output of the row (of the weighted sum of |v| where values cancel):
 * logits of hundreds are rounded coarsely. Where a transform or CHANNEL parameters take something
 * off K, |s| is that of the parts: of scale |q| |mean|, of |Q'| |K'|, and of the largest key of the
 * page.
 *
 * By default, products with codes of sealed pages are those of 16-bit integers where this is
 * faster: q, and the weights times the scales of v of 4 pages, are rounded to 2^-16 of the largest
 * of them (2^-31 of it where one of them outweighs the others). The error is at most 2e-4 of the
 * largest output, but for two cases that need values of very different sizes: a logit is off by at
 * most 2^-16 scale max |q| sum |k|, which matters if a key is largest, by far, where the query is
 * smallest; and the output by 2^-18 of the largest |v|, which matters if nearly all weight lies on
 * values of nearly nothing.
 *
 * The result does not depend on parallel_for, bit for bit, nor on how many queries one call holds,
 * as long as they are one or n_q g <= 16, or else n_q g > 16: many rows are computed in another
 * order, always in floats. A query that sees no row gets zeros and lse -inf. The last probe_rows
 * query rows are kept for kvc_seq_read_probes(). A row that policies merged (policy.h) has its bias
 * added to s after the softcap.
 *
 * @param cache     A cache.
 * @param seq       Every announced token has its K and V in this layer.
 * @param layer     0 ... n_layers - 1.
 * @param q         [n_q][n_heads][head_dim_k], after rotation; F32, F16 or BF16; n_q <= token
 *                  count, and no query at or before a token that was merged. NaN and Inf reach only
 * their own row of @p out, and no score.
 * @param options   NULL: the defaults.
 * @param out       [n_q][n_heads][head_dim_v]; F32, F16 or BF16; may not overlap @p q, which is not
 *                  checked.
 * @param[out] lse  [n_q][n_heads], or NULL.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p seq is not alive, rows are missing, or a shape, stride or option is wrong.
 *                    Nothing was written.
 *
 * Cost: reads each page that a query can see once for each 16 query rows, or 64 of many (query
 * heads of one KV head share it). Source: online softmax, arXiv 1805.02867; split keys, arXiv
 * 2311.01282.
 */
KVC_API kvc_status kvc_attend(kvc_cache *cache, kvc_seq seq, int32_t layer, const kvc_view *q,
                              const kvc_attend_options *options, const kvc_view *out, float *lse);

/**
 * kvc_attend() for many sequences at once, for batched decoding; the same results.
 *
 * @param cache    A cache.
 * @param layer    0 ... n_layers - 1.
 * @param items    [n_items]; no sequence twice.
 * @param n_items  0 ... max_sequences.
 * @param options  NULL: the defaults.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  As kvc_attend() for any of the items, a sequence twice, or a struct_size that
 *                    is too small or not the same. Nothing was written.
 */
KVC_API kvc_status kvc_attend_batch(kvc_cache *cache, int32_t layer, const kvc_attend_item *items,
                                    size_t n_items, const kvc_attend_options *options);

/**
 * Release a hold and seal every page whose tokens all lie behind the recent window, short ones too.
 * Rows of pages with TOKEN scales (and F16) that removals left with holes, or truncations short,
 * are moved together, bit for bit, where that saves memory; pages that other sequences share stay.
 * With recent_tokens 0 each call may leave a short page, which takes the room of a full one: it is
 * meant for the end of a prompt, not for each token. With online_pages that still wait, mean and
 * scale are measured on the pages that the sequence has by now.
 *
 * With a policy (policy.h) it also prunes and merges. Pruned rows of pages that are sealed already
 * become holes, and pages with HEAD or CHANNEL scales keep them until they are empty. What this
 * call seals is gathered into new pages first, by precision, so that those have no holes; their
 * HEAD scales come from the page alone. A merged row stands for its tokens in this layer and head,
 * at the ordinal of the heaviest, with a bias on its logit. It stays correct:
 *
 *  - queries at or before the last merged token are refused (kvc_attend()),
 *  - a truncation or removal that would cut between the first and the last token of a merged row
 *    is refused,
 *  - forks share it.
 *
 * Tokens that have no row left in any layer and head are forgotten: their facts can no longer be
 * read, and they do not count in max_tokens.
 *
 * @param cache           A cache.
 * @param seq             Every announced token has its K and V in every layer.
 * @param policy          NULL: prunes and merges nothing.
 * @param[in,out] report  NULL, or struct_size set and layers NULL or room for all layers.
 * @param map             NULL, or kvc_map_create(); needs a policy.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          @p seq is not alive, rows are missing, report->struct_size or
 *                            n_layers is too small, the map is of another geometry or too small,
 *                            or a field of the policy is out of range or needs what the cache
 *                            lacks (score_mode, probe_rows). Nothing changed.
 * @retval KVC_E_UNSUPPORTED  The policy merges and max_merge_tokens is 0, its budget is
 *                            KVC_BUDGET_MASS, or its precision is not for caches. Nothing changed.
 * @retval KVC_E_FULL         No room for the sealed pages; with max_rel_err also for those of a
 *                            weaker attempt, which keeps more. Nothing changed, but that a weaker
 *                            attempt finds mean and scale measured.
 *
 * Pages that a policy makes carry their ordinals, 256 bytes each, and those with merged rows 832 or
 * more. Cost: scoring reads K twice a 16 rows of query heads; merging multiplies all pairs of
 * tokens of an image in every layer and head; sealing writes the new pages once; the error estimate
 * is two attentions of probe_rows queries.
 */
KVC_API kvc_status kvc_cache_compress(kvc_cache *cache, kvc_seq seq, const kvc_policy *policy,
                                      kvc_report *report, kvc_map *map);

/**
 * Read the facts of tokens back.
 *
 * @param cache        A cache.
 * @param seq          A sequence.
 * @param first, n     Ordinals first ... first + n - 1, all announced.
 * @param[out] tokens  [n].
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, @p seq is not alive, the range is wrong, or policies forgot
 * a token in it.
 */
KVC_API kvc_status kvc_seq_read_tokens(const kvc_cache *cache, kvc_seq seq, int64_t first, size_t n,
                                       kvc_token *tokens);

/**
 * Read the rows of one layer and KV head, in ascending ordinals: what attention makes of them, with
 * transforms undone. F16 rows are what was appended, to one rounding of a half, or to a few of them
 * with transforms.
 *
 * @param cache           A cache.
 * @param seq             A sequence; only rows that have been appended are read.
 * @param layer, kv_head  Which.
 * @param max_rows        Room in the outputs; kvc_seq_n_rows() tells what is needed.
 * @param[out] ordinals   [max_rows], or NULL.
 * @param[out] k          [max_rows][head_dim_k], or NULL.
 * @param[out] v          [max_rows][head_dim_v], or NULL.
 * @param[out] scores     [max_rows] attention masses, or NULL; a page's sum is given to each of its
 *                        rows in equal parts under KVC_SCORE_PAGE; zeros without scores and for
 *                        sinks.
 * @param[out] n_rows     Rows written.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p cache or n_rows is NULL, @p seq is not alive, an index is out of range or
 *                    max_rows too small.
 */
KVC_API kvc_status kvc_seq_read_rows(const kvc_cache *cache, kvc_seq seq, int32_t layer,
                                     int32_t kv_head, size_t max_rows, int64_t *ordinals, float *k,
                                     float *v, float *scores, size_t *n_rows);

/** Pages of one layer and KV head. @param cache A cache. @param seq A sequence. @param layer,
 * kv_head Which.
 * @return The count (the strip of the sinks is no page), or -1 as kvc_seq_n_rows(). */
KVC_API int64_t kvc_seq_n_pages(const kvc_cache *cache, kvc_seq seq, int32_t layer,
                                int32_t kv_head);

/**
 * What the cache subtracts from K and divides it by.
 *
 * @param cache           A cache.
 * @param layer, kv_head  Which.
 * @param[out] mean       [head_dim_k], or NULL; zeros where nothing is subtracted.
 * @param[out] scale      [head_dim_k], or NULL; ones where nothing is divided.
 * @param[out] is_ready   Whether they are in use; false while online_pages still waits for its
 *                        pages: rows are then stored as they came.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p cache or @p is_ready is NULL, or an index is out of range.
 */
KVC_API kvc_status kvc_cache_read_transform(const kvc_cache *cache, int32_t layer, int32_t kv_head,
                                            float *mean, float *scale, bool *is_ready);

/**
 * Read a page as it is stored, transformed; docs/formats.md describes the bytes.
 *
 * @param cache             A cache.
 * @param seq               A sequence.
 * @param layer, kv_head    Which.
 * @param index             0 ... kvc_seq_n_pages() - 1, by ascending first ordinals.
 * @param[in,out] info      struct_size set.
 * @param[out] ordinals     [64] of each row below info->n_rows, or NULL.
 * @param[out] bytes        Room for the page, or NULL. Rows of an unsealed page that were not
 *                          written are undefined.
 * @param n_bytes           Size of @p bytes.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p cache or @p info is NULL, @p seq is not alive, an index is out of range or
 * @p bytes is too small.
 */
KVC_API kvc_status kvc_seq_read_page(const kvc_cache *cache, kvc_seq seq, int32_t layer,
                                     int32_t kv_head, int64_t index, kvc_page_info *info,
                                     int64_t *ordinals, void *bytes, size_t n_bytes);

/**
 * Read the query rows that attention kept, in ascending ordinals.
 *
 * @param cache          A cache.
 * @param seq            A sequence.
 * @param layer          Which.
 * @param[out] ordinals  [probe_rows].
 * @param[out] q         [probe_rows][n_heads][head_dim_k], or NULL; stored as F16.
 * @param[out] n_rows    Rows written: the last probe_rows tokens that attended; those that a
 *                       truncation took away leave gaps, older rows do not come back.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p cache, ordinals or n_rows is NULL, @p seq is not alive or @p layer is out
 *                    of range.
 */
KVC_API kvc_status kvc_seq_read_probes(const kvc_cache *cache, kvc_seq seq, int32_t layer,
                                       int64_t *ordinals, float *q, size_t *n_rows);

#ifdef __cplusplus
}
#endif
#endif
