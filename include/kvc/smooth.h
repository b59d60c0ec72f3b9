/** @file kvc/smooth.h
 * Smoothing of keys: statistics of K and Q, scales from them, and folding the scales into weights.
 *
 * A few channels of K are much larger than the others and spoil the scale of a quantized row. With
 * one factor s > 0 a channel
 *
 *     K' = K / s,  Q' = Q s,  Q' K'^T = Q K^T
 *
 * the outliers move into Q, which is not quantized. A cache can do it at run time
 * (kvc_cache_params::k_scale, any architecture); or the factors are folded into the weights before
 * the rotation, once, in the model's file. A fold is exact only if s is the same for both channels
 * of a rotary pair.
 *
 * Sources (docs/sources.md): KVSmooth (article 003: interface, rule absmax^factor, the two places
 * of a fold, wildcards); the balance rule minimises the error of scores after a Hadamard rotation
 * (docs/smooth.md derives it).
 *
 * Threads: any function runs in the calling thread; an object is used by one thread at a time.
 */
#ifndef KVC_SMOOTH_H
#define KVC_SMOOTH_H

#include <stdbool.h>

#include "base.h"
#include "rope.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- observation ---- */

/** What was seen of K and Q, by layer, KV head and channel. Opaque. */
typedef struct kvc_observation kvc_observation;

/** Shape of the attention that is observed. */
typedef struct kvc_observed_shape {
    size_t struct_size; /**< sizeof(kvc_observed_shape) of the caller's header */
    int32_t n_layers;   /**< 1..65536 */
    int32_t n_heads;    /**< query heads, a multiple of n_kv_heads, at most 65536 */
    int32_t n_kv_heads; /**< >= 1 */
    int32_t head_dim;   /**< of K and Q, 1..KVC_MAX_HEAD_DIM */
} kvc_observed_shape;

/** Sums of one layer; arrays are [n_kv_heads][head_dim] and live until the observation changes. */
typedef struct kvc_observed_layer {
    size_t struct_size;     /**< sizeof(kvc_observed_layer), set by the caller */
    uint64_t n_keys;        /**< rows of K, a row for all heads */
    uint64_t n_queries;     /**< rows of Q, a row for all heads */
    uint64_t n_nonfinite;   /**< elements that were NaN or Inf; they count as zeros */
    const double *k_absmax; /**< largest |k| */
    const double *k_sum;    /**< sum of k */
    const double *k_square; /**< sum of k^2 */
    const double *q_square; /**< sum of q^2 over the queries and the query heads of the group */
} kvc_observed_layer;

/**
 * Create an observation that has seen nothing.
 *
 * @param ctx       Context; must outlive the observation.
 * @param shape     Copied.
 * @param[out] out  The observation; NULL after any failure.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL or a field is out of range.
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM.
 * @retval KVC_E_NOMEM        The allocator returned NULL.
 *
 * Memory: one allocation, 32 bytes a layer, KV head and channel and a little.
 */
KVC_API kvc_status kvc_observation_create(kvc_ctx *ctx, const kvc_observed_shape *shape,
                                          kvc_observation **out);

/** Destroy an observation. @param observation  May be NULL. */
KVC_API void kvc_observation_destroy(kvc_observation *observation);

/**
 * Add rows of K of one layer, as they go into a cache: after the rotation.
 *
 * Elements that are NaN or Inf are counted and add nothing; their row counts, so that in means they
 * are zeros, as which a cache stores NaN. Sums are in double, row by row, so that cutting a text
 * into calls differently changes nothing.
 *
 * @param observation  An observation.
 * @param layer        0 ... n_layers - 1.
 * @param k            [n_tokens][n_kv_heads][head_dim]; F32, F16 or BF16.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, layer is out of range or the view is of another shape.
 *                    Nothing changed.
 *
 * Cost: one pass.
 */
KVC_API kvc_status kvc_observe_keys(kvc_observation *observation, int32_t layer, const kvc_view *k);

/**
 * Add rows of Q of one layer, after the rotation, before the factor 1 / sqrt(head_dim). Query head
 * h counts for KV head h / (n_heads / n_kv_heads).
 *
 * @param observation  An observation.
 * @param layer        0 ... n_layers - 1.
 * @param q            [n_tokens][n_heads][head_dim]; F32, F16 or BF16.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  As kvc_observe_keys().
 */
KVC_API kvc_status kvc_observe_queries(kvc_observation *observation, int32_t layer,
                                       const kvc_view *q);

/**
 * Add all that another observation has seen.
 *
 * @param into  Is changed.
 * @param from  Is not; may not be @p into.
 *
 * @retval KVC_OK          Done.
 * @retval KVC_E_ARG       A pointer is NULL, or both are the same.
 * @retval KVC_E_MISMATCH  The shapes differ. Nothing changed.
 */
KVC_API kvc_status kvc_observation_merge(kvc_observation *into, const kvc_observation *from);

/** Forget everything. @param observation  NULL does nothing. */
KVC_API void kvc_observation_reset(kvc_observation *observation);

/** The shape. @param observation  An observation. @param[out] shape  struct_size set.
 * @return KVC_OK, or KVC_E_ARG where a pointer is NULL or struct_size too small. */
KVC_API kvc_status kvc_observation_shape(const kvc_observation *observation,
                                         kvc_observed_shape *shape);

/**
 * What was seen in one layer.
 *
 * @param observation  An observation.
 * @param layer        0 ... n_layers - 1.
 * @param[out] out     struct_size set.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, layer is out of range or struct_size too small.
 */
KVC_API kvc_status kvc_observation_read(const kvc_observation *observation, int32_t layer,
                                        kvc_observed_layer *out);

/**
 * Bytes of an observation as a file (docs/formats.md, section 5). @param observation  NULL gives 0.
 */
KVC_API size_t kvc_observation_size(const kvc_observation *observation);

/**
 * Write an observation as the bytes of a file: versioned, checksummed, little-endian.
 *
 * @param observation  An observation.
 * @param[out] bytes   Room.
 * @param n_bytes      kvc_observation_size().
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL or n_bytes is another number. Nothing was written.
 */
KVC_API kvc_status kvc_observation_save(const kvc_observation *observation, void *bytes,
                                        size_t n_bytes);

/**
 * Read the bytes of a file. Any bytes are accepted; those that are no observation are refused.
 *
 * @param ctx       Context; must outlive the observation.
 * @param bytes     Needs no alignment.
 * @param n_bytes   Size.
 * @param[out] out  The observation; NULL after any failure.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL.
 * @retval KVC_E_FORMAT       Not an observation, damaged, truncated, of another version, or with a
 *                            sum that no observation can have (negative, NaN, Inf).
 * @retval KVC_E_UNSUPPORTED  head_dim is above KVC_MAX_HEAD_DIM.
 * @retval KVC_E_NOMEM        The allocator returned NULL.
 */
KVC_API kvc_status kvc_observation_load(kvc_ctx *ctx, const void *bytes, size_t n_bytes,
                                        kvc_observation **out);

/**
 * What a cache needs (kvc_cache_params::k_mean and k_scale): the mean of K, and the balance
 *
 *     mean_c = sum k_c / n,   s_c = (E (k_c - mean_c)^2 / E q_c^2)^(1/4)
 *
 * of every layer, KV head and channel, with the floors and the normalisation of
 * kvc_smooth_scales(). Without queries s_c = (E (k_c - mean_c)^2)^(1/4).
 *
 * @param observation  An observation.
 * @param[out] mean    [n_layers][n_kv_heads][head_dim], or NULL.
 * @param[out] scale   The same, or NULL.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  observation is NULL, or a layer has seen no key. Nothing was written.
 */
KVC_API kvc_status kvc_observation_calibrate(const kvc_observation *observation, float *mean,
                                             float *scale);

/* ---- scales ---- */

/** How scales follow from what was seen. */
typedef enum kvc_smooth_rule {
    KVC_SMOOTH_ABSMAX = 0, /**< s = absmax^factor: article 003 */
    KVC_SMOOTH_BALANCE = 1 /**< s = (E k^2 / E q^2)^(factor / 4), made for rotated keys */
} kvc_smooth_rule;

/** What a head's scales are divided by, which changes no quantization of that head. */
typedef enum kvc_smooth_norm {
    KVC_SMOOTH_GEOMETRIC = 0, /**< their geometric mean: Q keeps its size */
    KVC_SMOOTH_MIDRANGE = 1, /**< the middle of the smallest and largest ln s: for fold targets with
                                a small range */
    KVC_SMOOTH_PLAIN = 2     /**< nothing: as the article */
} kvc_smooth_norm;

/** kvc_smooth_options_default() fills it; a zero in a field is a zero. */
typedef struct kvc_smooth_options {
    size_t struct_size;   /**< sizeof(kvc_smooth_options) of the caller's header */
    kvc_smooth_rule rule; /**< default KVC_SMOOTH_ABSMAX */
    kvc_smooth_norm norm; /**< default KVC_SMOOTH_GEOMETRIC */
    float factor;      /**< the article's smooth_factor: > 0, finite; default 1; above 1 is allowed
                          and rarely helps */
    float floor;       /**< no scale falls below this share of the head's largest statistic,
                          0 < floor < 1; default 1e-6 */
    bool power_of_two; /**< rounded to the nearest power of two (of ln s; ties to even): the fold
                          is exact to the bit; default false */
    bool shared;       /**< all KV heads get the same: for a gain of a norm that they share;
                          default false */
    bool pairs;        /**< equal in both channels of a rotary pair; default true, and needed by a
                          fold */
    kvc_rope_layout layout; /**< how pairs lie; default KVC_ROPE_HALF_SPLIT */
    int32_t n_rot;          /**< channels that are rotated, even; default -1: head_dim */
} kvc_smooth_options;

/** Fill the defaults. @param[out] options  NULL does nothing. @param struct_size  Of the caller. */
KVC_API void kvc_smooth_options_init(kvc_smooth_options *options, size_t struct_size);

/** Fill the defaults. @param[out] options  NULL does nothing. */
static inline void kvc_smooth_options_default(kvc_smooth_options *options)
{
    kvc_smooth_options_init(options, sizeof(*options));
}

/**
 * The scales of one layer.
 *
 *     1. a statistic a channel: absmax, or E k^2 and E q^2
 *     2. the larger one of each pair (options->pairs), of all heads (options->shared)
 *     3. at least floor times the largest of the head; a head (shared: a layer) that has seen
 *        nothing but zeros gets s = 1
 *     4. the rule, the normalisation, power_of_two
 *
 * Computed in double; every scale is finite, > 0 and a normal float (saturated to 2^-100 ...
 * 2^100).
 *
 * @param observation  An observation.
 * @param layer        0 ... n_layers - 1.
 * @param options      NULL: the defaults.
 * @param[out] scales  [n_kv_heads][head_dim].
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, layer or an option is out of range, the layer has seen no
 *                    key, or (BALANCE) no query. Nothing was written.
 */
KVC_API kvc_status kvc_smooth_scales(const kvc_observation *observation, int32_t layer,
                                     const kvc_smooth_options *options, float *scales);

/* ---- folds ---- */

/** A weight [n_rows][n_cols], row-major, and its bias, in the caller's memory. Rows are outputs:
 * row head * head_dim + channel. Of a fused projection, point to the first row of Q or of K. */
typedef struct kvc_weight {
    size_t struct_size;   /**< sizeof(kvc_weight) of the caller's header */
    void *data;           /**< elements, aligned to their type */
    kvc_dtype dtype;      /**< of the elements */
    size_t n_rows;        /**< heads x head_dim */
    size_t n_cols;        /**< inputs */
    size_t stride;        /**< elements from one row to the next, >= n_cols */
    void *bias;           /**< [n_rows], or NULL */
    kvc_dtype bias_dtype; /**< of the bias */
} kvc_weight;

/** What a fold does to a tensor. */
typedef enum kvc_fold_side {
    KVC_FOLD_K = 0, /**< divides by s */
    KVC_FOLD_Q = 1  /**< multiplies by s */
} kvc_fold_side;

/** How far a fold rounded. */
typedef struct kvc_fold_counts {
    size_t struct_size;   /**< sizeof(kvc_fold_counts), set by the caller */
    uint64_t n_overflow;  /**< finite elements that would have become Inf: they saturate */
    uint64_t n_underflow; /**< elements that became subnormal or 0 and were neither */
    double max_rel_error; /**< largest |stored / exact - 1| of the elements that are normal */
} kvc_fold_counts;

/**
 * Fold scales into a projection in front of the rotation (state-rope-linear of article 003):
 *
 *     K: row and bias of channel c of KV head h       x / s[h][c]
 *     Q: row and bias of channel c of query head j    x * s[j / (n_heads / n_kv_heads)][c]
 *
 * Each element: one operation, rounded to a float, and that to the weight's type. NaN and Inf stay.
 *
 * @param ctx        Context.
 * @param weight     Changed in place.
 * @param side       K or Q.
 * @param undo       true: the other way round; restores what was folded within one rounding.
 * @param scales     [n_kv_heads][head_dim], each finite and > 0.
 * @param n_kv_heads, head_dim  Shape of the scales; weight->n_rows is a multiple of their product,
 *                   for K equal to it.
 * @param[out] counts  NULL, or struct_size set.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, a shape, stride, type or scale is wrong. Nothing changed.
 */
KVC_API kvc_status kvc_fold_linear(kvc_ctx *ctx, const kvc_weight *weight, kvc_fold_side side,
                                   bool undo, const float *scales, int32_t n_kv_heads,
                                   int32_t head_dim, kvc_fold_counts *counts);

/**
 * Fold scales into the gain of a norm in front of the rotation (state-rope-norm):
 *
 *     K: g' = (offset + g) / s - offset,   Q: g' = (offset + g) * s - offset
 *
 * Each gain: double, rounded once to a float and that to the gain's type.
 *
 * @param gain       [n_gains] in place; n_gains is head_dim (one gain for all heads; the scales
 * must then be the same in all heads) or n_heads * head_dim.
 * @param dtype      Of the gain.
 * @param n_gains    See above.
 * @param offset     0: the gain itself; 1: stored as gain - 1 (Gemma's own files).
 * @param side, undo, scales, n_kv_heads, head_dim, counts  As kvc_fold_linear().
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, a shape, type, offset or scale is wrong, or one gain serves
 *                    heads whose scales differ. Nothing changed.
 */
KVC_API kvc_status kvc_fold_norm(void *gain, kvc_dtype dtype, size_t n_gains, float offset,
                                 kvc_fold_side side, bool undo, const float *scales,
                                 int32_t n_kv_heads, int32_t head_dim, kvc_fold_counts *counts);

/** What kvc_smooth_check() compares: rows before the rotation and before a fold. */
typedef struct kvc_smooth_probe {
    size_t struct_size;       /**< sizeof(kvc_smooth_probe) of the caller's header */
    const kvc_view *q;        /**< [n][n_heads][head_dim], as they were */
    const kvc_view *k;        /**< [n][n_kv_heads][head_dim], as they were */
    const kvc_view *q_folded; /**< as q, from the folded weights */
    const kvc_view *k_folded; /**< as k, from the folded weights */
    const int32_t *positions; /**< [n], >= 0 */
    const kvc_rope *rope;     /**< the model's rotation; NULL: none */
} kvc_smooth_probe;

/**
 * Compare scores before and after a fold: rotates all rows and multiplies every query with every
 * key of its head, in double.
 *
 * @param ctx        Context.
 * @param probe      Rows.
 * @param[out] max_rel_change  max |s' - s| / max |s| over all scores; NaN if one is not finite; 0
 *                   without rows.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL or shapes differ. Nothing was written.
 *
 * Cost: n^2 n_heads head_dim; made for a few rows (docs/smooth.md: three positions tell a wrong
 * layout, which changes scores by a tenth and more).
 */
KVC_API kvc_status kvc_smooth_check(kvc_ctx *ctx, const kvc_smooth_probe *probe,
                                    double *max_rel_change);

/* ---- units: which modules of a model are smoothed (article 003) ---- */

/** The two places of a fold. */
typedef enum kvc_smooth_type {
    KVC_SMOOTH_ROPE_LINEAR = 0, /**< "state-rope-linear": weight and bias of projections */
    KVC_SMOOTH_ROPE_NORM = 1    /**< "state-rope-norm": gains of norms */
} kvc_smooth_type;

/** One attention of a model and where its scales go; the article's KVSmoothFusedUnit. Arrays of it
 * cross the API: its fields never change. */
typedef struct kvc_smooth_unit {
    const char *attention_name; /**< whole name of the module: "model.layers.0.self_attn" */
    const char *q_name;         /**< module on the way of Q: "q_proj", "q_norm" */
    const char *k_name;         /**< module on the way of K */
    int32_t layer;              /**< number of its cache */
    kvc_smooth_type type;       /**< place */
} kvc_smooth_unit;

/** What a model tells; the article's KVSmoothFusedInterface. A NULL function or a result of 0 is
 * something it cannot tell. */
typedef struct kvc_smooth_adapter {
    size_t struct_size;           /**< sizeof(kvc_smooth_adapter) of the caller's header */
    const kvc_smooth_unit *units; /**< [n_units] */
    size_t n_units;               /**< >= 1 */
    int32_t head_dim;             /**< 0: missing */
    int32_t n_kv_heads;           /**< 0: missing */
    int32_t n_kv_groups;          /**< query heads a KV head; 0: missing */
    /** Whether a module exists ("model.layers.0.self_attn.q_proj") and has a weight. NULL: all. */
    bool (*has_weight)(void *user, const char *module);
    void *user; /**< passed through */
} kvc_smooth_adapter;

/** What a selection has to say. */
typedef enum kvc_smooth_message_kind {
    KVC_SMOOTH_UNMATCHED = 0,        /**< warning: a pattern that no unit matches */
    KVC_SMOOTH_MISSING_GEOMETRY = 1, /**< error: the adapter does not tell head_dim ... */
    KVC_SMOOTH_MISSING_MODULE = 2,   /**< error: a named module does not exist or has no weight */
    KVC_SMOOTH_NOT_OBSERVED = 3,     /**< error: no key of the layer was observed */
    KVC_SMOOTH_LARGE_FACTOR = 4,     /**< warning: factor above 1 */
    KVC_SMOOTH_UNIT_INVALID = 5      /**< error: names missing or, of a module with its attention,
                                        above 255 characters, type unknown, layer out of range, or
                                        two units of one layer */
} kvc_smooth_message_kind;

/** One message. */
typedef struct kvc_smooth_message {
    kvc_smooth_message_kind kind; /**< what */
    bool is_error;                /**< an error stops, a warning does not */
    char text[256];               /**< English, one line, with the names; ends with 0, cut if too
                                     long */
} kvc_smooth_message;

/** Which units, by whole names. A pattern is a name with `*` (any text, dots too), `?` (one
 * character), `[a-z]`, `[!a-z]`, `{a,b}` (either, nested too); a backslash takes the next
 * character as it is. */
typedef struct kvc_smooth_filter {
    size_t struct_size;         /**< sizeof(kvc_smooth_filter) of the caller's header */
    const char *const *include; /**< [n_include]; a unit must match one; n_include 0: all units */
    size_t n_include;           /**< patterns */
    const char *const *exclude; /**< [n_exclude]; a unit must match none: exclude wins */
    size_t n_exclude;           /**< patterns */
} kvc_smooth_filter;

/** Whether a name matches a pattern of kvc_smooth_filter. A broken pattern, and one of 1024
 * characters and more, matches only itself. In brackets a backslash is a character like others.
 * @param pattern, name  Not NULL. Cost: the product of the lengths for each `*` and alternative. */
KVC_API bool kvc_smooth_match(const char *pattern, const char *name);

/**
 * Check a model against its observation and choose its units.
 *
 * @param adapter         Units and geometry.
 * @param filter          NULL: all units.
 * @param observation     NULL: not checked.
 * @param options         NULL: the defaults; only warns.
 * @param[out] selected   [n_units] of the adapter: true for the units to fold; all false after an
 *                        error.
 * @param[out] messages   [max_messages], or NULL.
 * @param max_messages    Room.
 * @param[out] n_messages All that there were, also those that did not fit; or NULL.
 *
 * @retval KVC_OK             Done; there may be warnings. An include pattern warns if it matches no
 *                            unit, an exclude pattern too; "*" never.
 * @retval KVC_E_ARG          A pointer is NULL, or a unit is invalid.
 * @retval KVC_E_UNSUPPORTED  Geometry or a module is missing.
 * @retval KVC_E_MISMATCH     The observation is of another geometry, or a selected layer was not
 *                            observed.
 */
KVC_API kvc_status kvc_smooth_select(const kvc_smooth_adapter *adapter,
                                     const kvc_smooth_filter *filter,
                                     const kvc_observation *observation,
                                     const kvc_smooth_options *options, bool *selected,
                                     kvc_smooth_message *messages, size_t max_messages,
                                     size_t *n_messages);

#ifdef __cplusplus
}
#endif
#endif
