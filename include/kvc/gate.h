/** @file kvc/gate.h
 * How much to drop: a rate of pruning from memory pressure and from how spread the attention is.
 *
 * The formula and the hysteresis are those of article 000, sections 2.3 and 6.3 (docs/sources.md),
 * the latter in a form that is monotone. Everything here is a scalar and runs on the host.
 */
#ifndef KVC_GATE_H
#define KVC_GATE_H

#include <stdbool.h>

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Settings of the gate. kvc_gate_params_default() fills it; a zero in a field is a zero. */
typedef struct kvc_gate_params {
    size_t struct_size; /**< sizeof(kvc_gate_params) of the caller's header */
    float base;         /**< the rate at pressure 0.5 and entropy 0.5, 0..1; default 0.5 */
    float min_rate;     /**< lower bound of the rate before the guards, 0..max_rate; default 0.2 */
    float max_rate;     /**< upper bound of it, ..1; default 0.7 */
    float high;         /**< a pressure above it raises the level, low..1; default 0.8 */
    float low;          /**< a pressure below it lowers the level, 0..high; default 0.6 */
    float up;           /**< share of the way taken at once above high, 0..1; default 1 */
    float down;         /**< share taken below low, 0..1; default 0.1 */
    float rise;         /**< share taken upwards at or below high, 0..up; 0 makes the band dead;
                           default 0.1 */
    int32_t guard_low;  /**< visual tokens up to which nothing is dropped, >= 0; default 256 */
    int32_t guard_high; /**< visual tokens from which the rate is full, >= guard_low; default 576 */
    float dense_entropy; /**< together with dense_texture: above it an image counts as dense text;
                            default 0.95 */
    float dense_texture; /**< see dense_entropy; default 0.5 */
    float dense_factor; /**< factor of the rate for dense text, 0..1; 1 turns it off; default 0.5 */
} kvc_gate_params;

/** What a gate remembers: the caller owns one for each sequence or cache. kvc_gate_reset() starts
 * it; copying it saves the state. */
typedef struct kvc_gate {
    size_t struct_size; /**< sizeof(kvc_gate) of the caller's header */
    float pressure;     /**< the level: the smoothed pressure, 0..1 */
    bool started;       /**< false: the next pressure becomes the level */
} kvc_gate;

/** What the gate looks at. Zero it, set struct_size, then the fields. */
typedef struct kvc_gate_input {
    size_t struct_size;    /**< sizeof(kvc_gate_input) of the caller's header */
    uint64_t used_bytes;   /**< bytes in use */
    uint64_t budget_bytes; /**< bytes there are, >= 1 */
    float entropy;         /**< of kvc_entropy(): 0 looks at one token, 1 at all alike */
    float texture;         /**< mean texture of the image, 0..1; 0: unknown or plain */
    size_t n_tokens;       /**< visual tokens the rate is for */
} kvc_gate_input;

/** Every term of one update, in the order in which they are computed. */
typedef struct kvc_gate_terms {
    size_t struct_size; /**< sizeof(kvc_gate_terms), set by the caller */
    float pressure;     /**< p = min(1, used / budget) */
    float level;        /**< p~ after the hysteresis */
    float entropy;      /**< e, clamped to 0..1 */
    float unclamped;    /**< base (0.5 + p~) (0.5 + (1 - e)) */
    float clamped;      /**< the same inside min_rate..max_rate */
    float guard;        /**< g, 0..1 */
    float dense;        /**< dense_factor, or 1 */
    float rate;         /**< clamped * guard * dense */
} kvc_gate_terms;

/**
 * Fill the defaults for a struct of a given size.
 *
 * @param[out] params  NULL does nothing.
 * @param struct_size  sizeof(kvc_gate_params) of the caller; written to struct_size too.
 */
KVC_API void kvc_gate_params_init(kvc_gate_params *params, size_t struct_size);

/** Fill the defaults. @param[out] params  NULL does nothing. */
static inline void kvc_gate_params_default(kvc_gate_params *params)
{
    kvc_gate_params_init(params, sizeof(*params));
}

/**
 * Start a gate whose struct has a given size.
 *
 * @param[out] gate    NULL does nothing.
 * @param struct_size  sizeof(kvc_gate) of the caller; written to struct_size too.
 */
KVC_API void kvc_gate_init(kvc_gate *gate, size_t struct_size);

/** Start a gate, or forget what it has seen. @param[out] gate  NULL does nothing. */
static inline void kvc_gate_reset(kvc_gate *gate)
{
    kvc_gate_init(gate, sizeof(*gate));
}

/**
 * See a new pressure and tell the rate of tokens to drop.
 *
 *     p    = min(1, used_bytes / budget_bytes)
 *     p~   = p                                               the first time
 *          = max(p~, p~ + up (p - p~))                       p > high
 *          = q,  q = p~ + rise max(0, p - p~)                low <= p <= high
 *          = q + down min(0, p - q)                          p < low
 *     r    = clamp(base (0.5 + p~) (0.5 + (1 - e)), min_rate, max_rate)
 *     g    = clamp((n_tokens - guard_low) / (guard_high - guard_low), 0, 1)
 *     rate = r g d,   d = dense_factor if e > dense_entropy and texture > dense_texture, else 1
 *
 * The level jumps up above high, falls slowly below low, and in between it stays (rise 0) or creeps
 * up; a pressure of exactly high or low is in between. The rate never falls when the pressure, the
 * level, base or n_tokens grow, never rises when the entropy does, and moves by no more than
 * 1.5 base times the move of the level. g keeps small images whole: a crop of few tokens has no
 * redundancy. With guard_low = guard_high, g is 0 up to it and 1 above. Scalars are computed in
 * double and rounded once to float.
 *
 * @param[in,out] gate  Set by kvc_gate_reset().
 * @param params        NULL: the defaults.
 * @param input         Pressure and content. entropy and texture are clamped to 0..1.
 * @param[out] terms    NULL, or struct_size set; the other fields are overwritten.
 * @param[out] rate     Share of the tokens to drop, 0..1; see kvc_keep_count() of prune.h.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          gate, input or rate is NULL, budget_bytes is 0, entropy or texture is
 *                            NaN or infinite, a parameter is out of range, or the gate was not
 *                            started by kvc_gate_reset(). Nothing was written.
 * @retval KVC_E_UNSUPPORTED  A struct has fields of a later version. Nothing was written.
 *
 * Memory: none but the arguments. Threads: any, one a gate. Cost: constant.
 */
KVC_API kvc_status kvc_gate_update(kvc_gate *gate, const kvc_gate_params *params,
                                   const kvc_gate_input *input, kvc_gate_terms *terms, float *rate);

/**
 * The normalised entropy of attention over the visual tokens.
 *
 *     x_i = p_i / sum p       over the m tokens that are not excluded
 *     e   = -sum x_i ln x_i / ln m        0 ln 0 = 0
 *
 * The tokens are renormalised, so rows of a softmax over a longer context may be given as they are;
 * without that, text would count as concentration. One sink with 40 % of an otherwise even map
 * lowers the entropy from 1 to 0.71: exclude sinks. The mean of the entropies of heads is another,
 * lower number than the entropy of the mean over heads: tune base for the one that is used.
 *
 * @param p             [n] masses, not necessarily of sum 1. May be NULL if @p n is 0.
 * @param n             Tokens.
 * @param excluded      Bitmap: bit i % 64 of word i / 64 excludes token i, whose p is not read.
 *                      NULL: none is.
 * @param[out] entropy  0..1; 1 (drop little) if fewer than two tokens are left or their sum is 0.
 *
 * @retval KVC_OK     Done.
 * @retval KVC_E_ARG  A pointer is NULL, or a p is negative, NaN or infinite. Nothing was written.
 *
 * Memory: none. Threads: any. Cost: two passes, n logarithms.
 */
KVC_API kvc_status kvc_entropy(const float *p, size_t n, const uint64_t *excluded, float *entropy);

#ifdef __cplusplus
}
#endif
#endif
