// cuda_fp16.h - binary16 as the device computes it, in integers: subnormals kept, one rounding.
#ifndef EMU_CUDA_FP16_H
#define EMU_CUDA_FP16_H

#include "cuda_runtime.h"

namespace emu
{

enum class rounding { nearest, zero, down, up };

constexpr uint16_t half_nan = 0x7fff, half_infinity = 0x7c00, half_largest = 0x7bff;

inline uint16_t float_to_half(float x, rounding mode = rounding::nearest)
{
    const uint32_t bits = bit_cast<uint32_t>(&x), magnitude = bits & 0x7fffffff;
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const bool away = mode == (sign ? rounding::down : rounding::up);
    const int exponent = int(magnitude >> 23) - 127;

    if (magnitude > 0x7f800000)
        return half_nan;
    if (magnitude == 0x7f800000)
        return sign | half_infinity;
    if (exponent > 15)
        return sign | (away || mode == rounding::nearest ? half_infinity : half_largest);
    // What the result drops of the 24-bit significand; all of it below half the least subnormal.
    const int n_dropped = exponent >= -14 ? 13 : exponent >= -25 ? -1 - exponent : 25;
    const uint32_t significand =
        magnitude >> 23 ? (magnitude & 0x7fffff) | 0x800000 : uint32_t(magnitude != 0);
    const uint32_t kept = significand >> n_dropped, rest = significand & ((1u << n_dropped) - 1);
    const uint32_t middle = 1u << (n_dropped - 1);
    uint32_t half = exponent >= -14 ? uint32_t(exponent + 14) << 10 : 0;

    half += kept; // the leading bit of a normal number adds one to the exponent
    if (mode == rounding::nearest)
        half += rest > middle || (rest == middle && (kept & 1));
    else
        half += away && rest;
    return uint16_t(sign | half);
}

inline float half_to_float(uint16_t half)
{
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31, fraction = half & 0x3ff;
    uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;

    if (exponent == 31)
        bits = fraction ? 0x7fffffff : sign | 0x7f800000;
    if (exponent == 0) {
        const float magnitude = float(fraction) * 0x1p-24f;
        bits = sign | bit_cast<uint32_t>(&magnitude);
    }
    return bit_cast<float>(&bits);
}

// sum + error to binary16 with one rounding, where |error| is at most half an ulp of sum: by way of
// a float rounded to odd, which keeps on which side of a tie the exact value lies.
inline uint16_t exact_to_half(double sum, double error)
{
    float odd = float(sum);
    const double rest = (sum - double(odd)) + error;
    uint32_t bits = bit_cast<uint32_t>(&odd);

    if (rest == 0 || !(bits << 1 < 0xff000000)) // exact, or infinity or NaN
        return float_to_half(odd);
    if (!(bits & 1))
        bits = (rest > 0) == (odd > 0) ? bits + 1 : bits - 1;
    return float_to_half(bit_cast<float>(&bits));
}

} // namespace emu

struct alignas(2) __half {
    unsigned short bits;

    __half() = default;
    explicit __half(float x) : bits(emu::float_to_half(x))
    {
    }
    operator float() const
    {
        return emu::half_to_float(bits);
    }
};
typedef __half half;

struct alignas(4) __half2 {
    __half x, y;

    __half2() = default;
    __half2(__half low, __half high) : x(low), y(high)
    {
    }
};
typedef __half2 half2;

inline __half __ushort_as_half(unsigned short bits)
{
    __half x;
    x.bits = bits;
    return x;
}

EMU_FUNCTION(unsigned short, __half_as_ushort, (__half x), x.bits)
EMU_FUNCTION(float, __half2float, (__half x), emu::half_to_float(x.bits))
EMU_FUNCTION(__half, __float2half, (float x), __half(x))
EMU_FUNCTION(__half, __float2half_rn, (float x), __half(x))
EMU_FUNCTION(__half, __float2half_rz, (float x),
             __ushort_as_half(emu::float_to_half(x, emu::rounding::zero)))
EMU_FUNCTION(__half, __float2half_rd, (float x),
             __ushort_as_half(emu::float_to_half(x, emu::rounding::down)))
EMU_FUNCTION(__half, __float2half_ru, (float x),
             __ushort_as_half(emu::float_to_half(x, emu::rounding::up)))
EMU_FUNCTION(__half, __int2half_rn, (int x), __ushort_as_half(emu::exact_to_half(double(x), 0)))
EMU_FUNCTION(int, __half2int_rn, (__half x), __float2int_rn(__half2float(x)))
EMU_FUNCTION(__half2, __halves2half2, (__half low, __half high), __half2(low, high))
EMU_FUNCTION(__half2, __half2half2, (__half x), __half2(x, x))
EMU_FUNCTION(__half2, __float2half2_rn, (float x), __half2half2(__float2half_rn(x)))
EMU_FUNCTION(__half2, __floats2half2_rn, (float low, float high),
             __half2(__float2half_rn(low), __float2half_rn(high)))
EMU_FUNCTION(__half2, __float22half2_rn, (float2 x), __floats2half2_rn(x.x, x.y))
EMU_FUNCTION(float2, __half22float2, (__half2 x), make_float2(__half2float(x.x), __half2float(x.y)))
EMU_FUNCTION(__half, __low2half, (__half2 x), x.x)
EMU_FUNCTION(__half, __high2half, (__half2 x), x.y)
EMU_FUNCTION(float, __low2float, (__half2 x), __half2float(x.x))
EMU_FUNCTION(float, __high2float, (__half2 x), __half2float(x.y))
EMU_FUNCTION(__half2, __lows2half2, (__half2 a, __half2 b), __half2(a.x, b.x))
EMU_FUNCTION(__half2, __highs2half2, (__half2 a, __half2 b), __half2(a.y, b.y))

// A float holds sums and products of two halves closely enough that rounding twice is rounding once
// (24 >= 2 * 11 + 2 bits), and quotients too.
EMU_FUNCTION(__half, __hadd, (__half a, __half b), __half(__half2float(a) + __half2float(b)))
EMU_FUNCTION(__half, __hsub, (__half a, __half b), __half(__half2float(a) - __half2float(b)))
EMU_FUNCTION(__half, __hmul, (__half a, __half b), __half(__half2float(a) * __half2float(b)))
EMU_FUNCTION(__half, __hdiv, (__half a, __half b), __half(__half2float(a) / __half2float(b)))

inline __half __hfma(__half a, __half b, __half c)
{
    // The product is exact; the sum and its error are those of Knuth's two-sum.
    const double product = double(__half2float(a)) * double(__half2float(b));
    const double addend = double(__half2float(c)), sum = product + addend;
    const double part = sum - product;
    const double error = (product - (sum - part)) + (addend - part);
    return __ushort_as_half(isfinite(sum) ? emu::exact_to_half(sum, error)
                                          : emu::float_to_half(float(sum)));
}

EMU_FUNCTION(__half, __hneg, (__half x), __ushort_as_half(x.bits ^ 0x8000))
EMU_FUNCTION(__half, __habs, (__half x), __ushort_as_half(x.bits & 0x7fff))
EMU_FUNCTION(bool, __hisnan, (__half x), (x.bits & 0x7fff) > emu::half_infinity)

inline int __hisinf(__half x)
{
    return (x.bits & 0x7fff) != emu::half_infinity ? 0 : x.bits & 0x8000 ? -1 : 1;
}

inline __half __hmax(__half a, __half b)
{
    if (__hisnan(a) || __hisnan(b))
        return __hisnan(a) && __hisnan(b) ? __ushort_as_half(emu::half_nan) : __hisnan(a) ? b : a;
    if (((a.bits | b.bits) & 0x7fff) == 0) // +0 is larger than -0
        return __ushort_as_half(a.bits & b.bits);
    return __half2float(a) < __half2float(b) ? b : a;
}

inline __half __hmin(__half a, __half b)
{
    return __hisnan(a) || __hisnan(b) ? __hmax(a, b) : __hneg(__hmax(__hneg(a), __hneg(b)));
}

EMU_FUNCTION(bool, __heq, (__half a, __half b), __half2float(a) == __half2float(b))
EMU_FUNCTION(bool, __hne, (__half a, __half b),
             !__hisnan(a) && !__hisnan(b) && __half2float(a) != __half2float(b))
EMU_FUNCTION(bool, __hlt, (__half a, __half b), __half2float(a) < __half2float(b))
EMU_FUNCTION(bool, __hle, (__half a, __half b), __half2float(a) <= __half2float(b))
EMU_FUNCTION(bool, __hgt, (__half a, __half b), __half2float(a) > __half2float(b))
EMU_FUNCTION(bool, __hge, (__half a, __half b), __half2float(a) >= __half2float(b))
EMU_FUNCTION(__half2, __hneg2, (__half2 x), __half2(__hneg(x.x), __hneg(x.y)))
EMU_FUNCTION(__half2, __habs2, (__half2 x), __half2(__habs(x.x), __habs(x.y)))
EMU_FUNCTION(__half2, __hfma2, (__half2 a, __half2 b, __half2 c),
             __half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)))

#define EMU_HALF2(name, half)                                                                      \
    inline __half2 name(__half2 a, __half2 b)                                                      \
    {                                                                                              \
        return __half2(half(a.x, b.x), half(a.y, b.y));                                            \
    }
EMU_HALF2(__hadd2, __hadd)
EMU_HALF2(__hsub2, __hsub)
EMU_HALF2(__hmul2, __hmul)
EMU_HALF2(__hadd2_rn, __hadd)
EMU_HALF2(__hsub2_rn, __hsub)
EMU_HALF2(__hmul2_rn, __hmul)
EMU_HALF2(__hmax2, __hmax)
EMU_HALF2(__hmin2, __hmin)

#endif
