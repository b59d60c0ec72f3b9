/* IEEE half precision by search: slow, plain, and apart from the library's own conversions. */
#ifndef KVC_TESTS_HALF_H
#define KVC_TESTS_HALF_H

#include <math.h>
#include <stdint.h>

enum { HALF_MAX = 0x7BFF, HALF_INF = 0x7C00, HALF_SIGN = 0x8000 };

static inline double half_value(uint16_t bits)
{
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double v;

    if (exponent == 31) {
        v = mantissa != 0 ? (double)NAN : (double)INFINITY;
    } else if (exponent == 0) {
        v = ldexp(mantissa, -24);
    } else {
        v = ldexp(1024 + mantissa, exponent - 25);
    }
    return (bits & HALF_SIGN) != 0 ? -v : v;
}

/* The smallest half >= v for v >= 0, at most 65504: the bits of halves are ordered as they are. */
static inline uint16_t half_ceil(double v)
{
    unsigned lo = 0, hi = HALF_MAX;

    while (lo < hi) {
        const unsigned mid = (lo + hi) / 2;

        if (half_value((uint16_t)mid) >= v) {
            hi = mid;
        } else {
            lo = mid + 1;
        }
    }
    return (uint16_t)lo;
}

/* Rounded up in magnitude, at most 65504. */
static inline uint16_t half_away(double v)
{
    return v < 0 ? (uint16_t)(HALF_SIGN | half_ceil(-v)) : half_ceil(v);
}

/* Rounded down (to minus infinity), within +-65504. */
static inline uint16_t half_down(double v)
{
    uint16_t bits;

    if (v < 0) {
        return half_away(v);
    }
    bits = half_ceil(v);
    return half_value(bits) > v ? (uint16_t)(bits - 1) : bits;
}

#endif
