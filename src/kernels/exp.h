/* exp.h - the exponential of the kernels on which decisions hang: the same bits on every CPU. */
#ifndef KVC_EXP_H
#define KVC_EXP_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "both.h"

/* ln 2 in two parts: 17 bits, so that their product with an exponent is exact, and the rest. */
#define KVC_LN2_HIGH 0x1.62e4p-1f
#define KVC_LN2_LOW  0x1.7f7d1cp-20f
#define KVC_LOG2E    0x1.715476p+0f
#define KVC_EXP_LOW  (-87.3f)
#define KVC_EXP_HIGH 88.3f

/*
 * exp x by 2^i exp r, |r| <= ln 2 / 2, and the Taylor polynomial of degree 7, one rounded operation
 * at a time (relative error below 3e-7). Below -87.3 zero, above 88.3 as there, NaN stays.
 */
KVC_BOTH static inline float kvc_exp(float x)
{
    if (!(x >= KVC_EXP_LOW))
        return isnan(x) ? x : 0.0f;
    const float a = x > KVC_EXP_HIGH ? KVC_EXP_HIGH : x;
    const float n = rintf(a * KVC_LOG2E);
    const float r = (a - n * KVC_LN2_HIGH) - n * KVC_LN2_LOW;
    float p = 1.0f / 5040, scale;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}

#endif
