/*
 * codes.h - the scalar arithmetic of codes and their parameters, shared by all kernels so that it
 * is written once. docs/formats.md states it in words.
 */
#ifndef KVC_CODES_H
#define KVC_CODES_H

#include <stdbool.h>

#include "half.h"

/* A symmetric group below this is stored as zeros: q / absmax stays finite, and nothing of the
 * arithmetic is subnormal, so that flush-to-zero modes change no byte. */
#define KVC_QUANT_TINY 0x1p-100f

/* The largest code with a sign: 127, 31 or 7. */
KVC_BOTH static inline int kvc_code_max(int bits)
{
    return (1 << (bits - 1)) - 1;
}

/* The smallest code of a row with a scale of its own: -127, or with fewer bits -32 or -8. */
KVC_BOTH static inline int kvc_token_code_min(int bits)
{
    return bits == 8 ? -127 : -kvc_code_max(bits) - 1;
}

/* Factor from values to codes for one fp32 scale; 0 for a tiny group. */
KVC_BOTH static inline float kvc_fixed_factor(float absmax, int bits)
{
    return absmax >= KVC_QUANT_TINY ? (float)kvc_code_max(bits) / absmax : 0.0f;
}

KVC_BOTH static inline float kvc_fixed_scale(float absmax, int bits)
{
    return absmax >= KVC_QUANT_TINY ? absmax / (float)kvc_code_max(bits) : 0.0f;
}

/* How a group becomes codes: code = clamp(rint((x - offset) * factor), lo, hi). */
struct kvc_coder {
    float offset, factor;
    int lo, hi;
    bool clipped; /* no half holds the scale: elements may lie beyond the codes */
};

/* TOKEN: INT8 symmetric, INT6 and INT4 signed-extreme. min and max are over the finite elements. */
KVC_BOTH static inline struct kvc_coder kvc_token_coder(float min, float max, int bits,
                                                        uint16_t *scale)
{
    const float absmax = fmaxf(max, -min);
    struct kvc_coder coder = {.lo = kvc_token_code_min(bits), .hi = kvc_code_max(bits)};
    *scale = 0;
    if (!(absmax >= KVC_QUANT_TINY))
        return coder;
    const float extreme = max >= -min ? max : min;
    const float exact = bits == 8 ? absmax / 127.0f : extreme / (float)coder.lo;
    *scale = kvc_half_away(exact);
    coder.factor = 1.0f / kvc_half_to_float(*scale);
    coder.clipped = fabsf(exact) > KVC_HALF_MAX;
    return coder;
}

/* CHANNEL: unsigned codes from a minimum. */
KVC_BOTH static inline struct kvc_coder kvc_channel_coder(float min, float max, int bits,
                                                          uint16_t *scale, uint16_t *minimum)
{
    struct kvc_coder coder = {.lo = 0, .hi = bits == 8 ? 255 : 15};
    if (fabsf(min) < KVC_QUANT_TINY)
        min = 0.0f;
    if (fabsf(max) < KVC_QUANT_TINY)
        max = 0.0f;
    *minimum = kvc_half_floor(min);
    coder.offset = kvc_half_to_float(*minimum);
    const float exact = (max - coder.offset) / (float)coder.hi;
    *scale = exact > 0.0f ? kvc_half_away(exact) : 0;
    coder.factor = *scale ? 1.0f / kvc_half_to_float(*scale) : 0.0f;
    coder.clipped = exact > KVC_HALF_MAX || min < coder.offset;
    return coder;
}

/* NaN, and Inf in a group without a scale, give the code of 0 - offset or 0. */
KVC_BOTH static inline float kvc_code_round(const struct kvc_coder *coder, float x)
{
    if (isnan(x))
        x = 0.0f;
    const float y = rintf((x - coder->offset) * coder->factor);
    return isnan(y) ? 0.0f : y;
}

KVC_BOTH static inline int kvc_code(const struct kvc_coder *coder, float x)
{
    const float y = kvc_code_round(coder, x);
    return y <= (float)coder->lo ? coder->lo : y >= (float)coder->hi ? coder->hi : (int)y;
}

/* Whether a finite x lies beyond the codes of a clipped group. */
KVC_BOTH static inline bool kvc_code_saturates(const struct kvc_coder *coder, float x)
{
    if (!coder->clipped || !isfinite(x))
        return false;
    const float y = kvc_code_round(coder, x);
    return y < (float)coder->lo || y > (float)coder->hi;
}

#endif
