/* half.h - IEEE binary16 in integer arithmetic, for code built for the baseline CPU. */
#ifndef KVC_HALF_H
#define KVC_HALF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "both.h"

#define KVC_HALF_MAX      65504.0f
#define KVC_HALF_MAX_BITS 0x7bffu

KVC_BOTH static inline uint32_t kvc_float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

KVC_BOTH static inline float kvc_float_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

KVC_BOTH static inline float kvc_half_to_float(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 31)
        return kvc_float_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0)
        return kvc_float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    const float x = (float)mantissa * 0x1p-24f;
    return sign ? -x : x;
}

/* Round to nearest even; beyond the range to infinity, NaN stays a quiet NaN. */
KVC_BOTH static inline uint16_t kvc_half_from_float(float x)
{
    const uint32_t u = kvc_float_bits(x);
    const uint32_t sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (a >> 13 & 0x3ffu));
    if (a >= 0x477ff000u) /* 65520 and above */
        return (uint16_t)(sign | 0x7c00u);
    if (a < 0x33000001u) /* 2^-25 and below round to zero */
        return (uint16_t)sign;
    if (a < 0x38800000u) { /* subnormal: shift the mantissa with its hidden bit to units of 2^-24 */
        const uint32_t shift = 126u - (a >> 23);
        const uint32_t m = (a & 0x7fffffu) | 0x800000u;
        const uint32_t half = 1u << (shift - 1), rest = m & ((1u << shift) - 1);
        uint32_t h = m >> shift;
        h += rest > half || (rest == half && (h & 1u));
        return (uint16_t)(sign | h);
    }
    const uint32_t r = a + 0xfffu + (a >> 13 & 1u);
    return (uint16_t)(sign | ((r >> 13) - (112u << 10)));
}

/* The half of smallest magnitude that is not below |x| (at most 65504), with the sign of x; x is
 * finite. */
KVC_BOTH static inline uint16_t kvc_half_away(float x)
{
    const float a = fabsf(x);
    const uint16_t sign = x < 0.0f ? 0x8000u : 0u;
    if (!(a < KVC_HALF_MAX))
        return (uint16_t)(sign | KVC_HALF_MAX_BITS);
    uint16_t h = kvc_half_from_float(a);
    h = (uint16_t)(h + (kvc_half_to_float(h) < a));
    return (uint16_t)(sign | h);
}

/* The largest half that is not above x, at least -65504, never -0; x is finite. */
KVC_BOTH static inline uint16_t kvc_half_floor(float x)
{
    if (x < 0.0f)
        return kvc_half_away(x);
    if (!(x < KVC_HALF_MAX))
        return KVC_HALF_MAX_BITS;
    const uint16_t h = kvc_half_from_float(fabsf(x)); /* fabsf: -0 gives +0 */
    return (uint16_t)(h - (kvc_half_to_float(h) > x));
}

KVC_BOTH static inline float kvc_bf16_to_float(uint16_t b)
{
    return kvc_float_from_bits((uint32_t)b << 16);
}

/* Round to nearest even; NaN stays a quiet NaN. */
KVC_BOTH static inline uint16_t kvc_bf16_from_float(float x)
{
    const uint32_t u = kvc_float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

#endif
