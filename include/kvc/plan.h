/** @file kvc/plan.h
 * Capacity: what a token costs under a profile of compression, and how many fit a budget.
 *
 * A planner counts rows, codes and parameters, on average over the tokens that a user sends. What
 * a cache needs besides (page tables, recent window, sinks) is told by kvc_cache_min_budget() and
 * kvc_cache_stats(). Source: article 000 (docs/sources.md), sections 4.1, 4.4 and 6.1.
 */
#ifndef KVC_PLAN_H
#define KVC_PLAN_H

#include <stdbool.h>

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Shape of a model's K and V. */
typedef struct kvc_plan_model {
    size_t struct_size; /**< sizeof(kvc_plan_model) of the caller's header */
    int32_t n_layers;   /**< 1..65536 */
    int32_t n_heads;    /**< query heads, a multiple of n_kv_heads, at most 65536; cost nothing */
    int32_t n_kv_heads; /**< heads of K and V, >= 1 */
    int32_t head_dim_k; /**< 1..KVC_MAX_HEAD_DIM */
    int32_t head_dim_v; /**< 1..KVC_MAX_HEAD_DIM */
} kvc_plan_model;

/** A way to compress. kvc_plan_profile_default() fills it; a zero in a field is a zero. */
typedef struct kvc_plan_profile {
    size_t struct_size;  /**< sizeof(kvc_plan_profile) of the caller's header */
    const char *name;    /**< the caller's; default "f16" */
    double visual_share; /**< visual tokens of all tokens, 0..1; default 1, as article 000 counts */
    double prune_rate;   /**< visual tokens that are dropped, 0 <= rate < 1; default 0 */
    int32_t merge_rounds; /**< each leaves 3/4 of the visual tokens, 0..16; default 0 */
    double heavy_share;   /**< rows that are left and stay F16, 0..1; default 0 */
    kvc_format k;         /**< format of the other rows of K; default KVC_F16 */
    kvc_format v;         /**< format of the other rows of V; default KVC_F16 */
    kvc_scale k_scale;    /**< HEAD, TOKEN or CHANNEL; ignored for KVC_F16; default TOKEN */
    kvc_scale v_scale;    /**< HEAD or TOKEN; ignored for KVC_F16; default TOKEN */
} kvc_plan_profile;

/**
 * Fill the defaults for a struct of a given size: nothing is compressed.
 *
 * @param[out] profile  NULL does nothing.
 * @param struct_size   sizeof(kvc_plan_profile) of the caller; written to struct_size too.
 */
KVC_API void kvc_plan_profile_init(kvc_plan_profile *profile, size_t struct_size);

/** Fill the defaults: nothing is compressed. @param[out] profile  NULL does nothing. */
static inline void kvc_plan_profile_default(kvc_plan_profile *profile)
{
    kvc_plan_profile_init(profile, sizeof(*profile));
}

/**
 * A profile by its name. All scales are TOKEN but that of K in int4-raw, visual_share is 1.
 *
 *     name         pruned   rounds   rows that are left
 *     f16          0        0        F16
 *     int8         0        0        INT8
 *     int4         0        0        INT4
 *     k6v4         0        0        K INT6, V INT4
 *     int4-raw     0        0        INT4, K with CHANNEL scales
 *     light        0.15     0        F16
 *     balanced     0.30     1        INT8
 *     aggressive   0.50     2        heavy hitters (0.2) F16, others INT4
 *     extreme      0.65     3        heavy hitters (0.2) F16, others INT4
 *
 * The last four are those of article 000, section 6.1; the share of heavy hitters is this
 * library's, the article names none.
 *
 * @param name             One of the names.
 * @param[in,out] profile  struct_size set; the other fields are overwritten, the name with static
 *                         text.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, struct_size is too small, or the name is unknown. Nothing
 *                    was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_plan_profile_preset(const char *name, kvc_plan_profile *profile);

/**
 * Bytes of rows that one token costs on average, over all layers.
 *
 *     rows   = visual_share (1 - prune_rate) 0.75^merge_rounds + (1 - visual_share)
 *     bytes  = n_layers n_kv_heads rows (row_k + row_v)
 *     row_x  = heavy_share 2 d + (1 - heavy_share) (codes + parameters)     d = head_dim_x
 *
 *     codes       F16: 2 d, INT8: d, INT4: ceil(d / 2)
 *     parameters  F16: 0, TOKEN: 2, HEAD: 4 / 64, CHANNEL: 4 d / 64     (pages of 64 tokens)
 *
 * 32 layers of 32 heads of 128 take 524288 bytes as F16, 266240 as INT8, 139264 as INT4.
 *
 * @param model               Shape.
 * @param profile             NULL: the defaults.
 * @param[out] bytes_per_token  Of a token that the user sent, dropped or not; >= 0. In double: sums
 *                            beyond 32 bits are no matter.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          A pointer is NULL or a field is out of range. Nothing was written.
 * @retval KVC_E_UNSUPPORTED  A head size above KVC_MAX_HEAD_DIM, KVC_SCALE_LAYER, or
 *                            KVC_SCALE_CHANNEL for V. Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_plan_bytes(const kvc_plan_model *model, const kvc_plan_profile *profile,
                                  double *bytes_per_token);

/**
 * Tokens whose rows fit a budget: floor(budget_bytes / bytes of kvc_plan_bytes()).
 *
 * @param model         Shape.
 * @param profile       NULL: the defaults.
 * @param budget_bytes  Memory for K and V.
 * @param[out] tokens   At most 2^63 - 1.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          As kvc_plan_bytes(). Nothing was written.
 * @retval KVC_E_UNSUPPORTED  As kvc_plan_bytes(). Nothing was written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_plan_tokens(const kvc_plan_model *model, const kvc_plan_profile *profile,
                                   uint64_t budget_bytes, int64_t *tokens);

/**
 * What a machine leaves for K and V beside the weights.
 *
 *     budget = memory - ceil(n_params weight_bits / 8) - overhead, at least 0
 *
 * @param memory_bytes       Of the machine or device.
 * @param n_params           Weights, >= 0.
 * @param weight_bits        Bits of a weight with its share of scales, >= 0.
 * @param overhead_bytes     Activations, buffers, the driver's context.
 * @param[out] budget_bytes  What is left; 0 if nothing is.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  @p budget_bytes is NULL, or a number is negative, NaN or infinite. Nothing was
 *                    written.
 *
 * Threads: any. Cost: constant.
 */
KVC_API kvc_status kvc_plan_budget(uint64_t memory_bytes, double n_params, double weight_bits,
                                   uint64_t overhead_bytes, uint64_t *budget_bytes);

#ifdef __cplusplus
}
#endif
#endif
