// selftest_half.cc - binary16 against exact integers: a half is a whole number of 2^-24, a product
// of two a whole number of 2^-48.
#include "selftest.h"

#include <algorithm>

namespace
{

__extension__ typedef __int128 wide;

constexpr int n_halves = 65536;
constexpr wide half_unit = 1 << 24; // of 2^-48 each
constexpr uint16_t infinity = 0x7c00, sign = 0x8000;

__half half_of(uint32_t bits)
{
    return __ushort_as_half(uint16_t(bits));
}

bool is_nan(uint16_t bits)
{
    return (bits & 0x7fff) > infinity;
}

bool is_finite(uint16_t bits)
{
    return (bits & 0x7fff) < infinity;
}

// In units of 2^-24; infinity counts as 2^16, the next number after the largest.
int64_t units(uint16_t bits)
{
    const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    const int64_t magnitude =
        exponent ? int64_t(1024 + fraction) << (exponent - 1) : int64_t(fraction);
    return bits & sign ? -magnitude : magnitude;
}

enum class mode { nearest, zero, down, up };

// value * 2^-48 as binary16: the nearest of the two halves around it, or the one that the mode asks
// for. The halves of one sign are in order, so the lower of the two is found by bisection.
uint16_t round_exactly(wide value, mode how)
{
    const wide magnitude = value < 0 ? -value : value;
    const uint16_t negative = uint16_t(value < 0 ? sign : 0);
    int low = 0, high = infinity; // units(low) <= magnitude < units(high), or infinity

    if (magnitude >= wide(units(infinity)) * half_unit)
        low = infinity - 1;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (wide(units(uint16_t(middle))) * half_unit <= magnitude ? low : high) = middle;
    }
    const wide below = magnitude - wide(units(uint16_t(low))) * half_unit;
    const wide above = wide(units(uint16_t(high))) * half_unit - magnitude;
    const bool away = how == mode::nearest ? below > above || (below == above && low % 2)
                                           : below > 0 && how == (negative ? mode::down : mode::up);
    return uint16_t(negative | (away ? high : low));
}

// A float in units of 2^-48, away from zero. Only a float below 2^-25, the first tie, is not exact
// then, and there it does not matter.
wide units_of_float(float x)
{
    const double scaled = ldexp(double(x), 48);
    const double whole = trunc(scaled);
    return wide(whole) + (whole == scaled ? 0 : x < 0 ? -1 : 1);
}

void halves_become_floats()
{
    for (int bits = 0; bits < n_halves; bits++) {
        const float x = __half2float(half_of(uint32_t(bits)));
        if (is_nan(uint16_t(bits)))
            CHECK(x != x);
        else if (!is_finite(uint16_t(bits)))
            CHECK(isinf(x) && (x < 0) == (bits & sign ? true : false));
        else
            CHECK(double(x) == ldexp(double(units(uint16_t(bits))), -24) &&
                  signbit(x) == (bits & sign ? true : false));
    }
}

void check_rounding(float x)
{
    const uint16_t rounded[] = {
        __half_as_ushort(__float2half_rn(x)), __half_as_ushort(__float2half_rz(x)),
        __half_as_ushort(__float2half_rd(x)), __half_as_ushort(__float2half_ru(x))};

    for (int i = 0; i < 4; i++)
        if (x != x)
            CHECK(rounded[i] == 0x7fff);
        else if (isinf(x))
            CHECK(rounded[i] == (x < 0 ? sign | infinity : infinity));
        else {
            const wide value =
                fabsf(x) < 0x1p60f ? units_of_float(x) : units_of_float(copysignf(0x1p60f, x));
            CHECK((rounded[i] & 0x7fff) == (round_exactly(value, mode(i)) & 0x7fff));
            CHECK((rounded[i] & sign ? true : false) == signbit(x));
        }
}

void floats_round_to_halves()
{
    for (uint64_t bits = 0; bits < uint64_t(1) << 32; bits += 9973)
        check_rounding(__uint_as_float(uint32_t(bits)));
    // Around each half and around the middle between it and the next.
    for (uint32_t bits = 0; bits < infinity; bits += 3)
        for (int quarter = 0; quarter < 4; quarter++) {
            const float here = float(ldexp(double(units(uint16_t(bits))), -24));
            const float next = float(ldexp(double(units(uint16_t(bits + 1))), -24));
            const float x = here + (next - here) * 0.25f * float(quarter);
            for (float y : {x, nextafterf(x, 0), nextafterf(x, INFINITY)}) {
                check_rounding(y);
                check_rounding(-y);
            }
        }
    for (float x : {0x1p-149f, 0x1p-126f, 0x1p-26f, 65519.0f, 65520.0f, 65535.0f, 3e38f}) {
        check_rounding(x);
        check_rounding(-x);
    }
}

void fma_rounds_once()
{
    generator random{3};

    for (int i = 0; i < 600000; i++) {
        const uint16_t a = uint16_t(random.bits()), b = uint16_t(random.bits());
        uint16_t c = uint16_t(random.bits());
        if (i % 2) // what cancels most of the product, or lies half an ulp beside it
            c = uint16_t(__half_as_ushort(__hneg(__hmul(half_of(a), half_of(b)))) ^
                         (random.bits() & 3) << random.bits() % 14);
        if (!is_finite(a) || !is_finite(b) || !is_finite(c))
            continue;
        const wide exact = wide(units(a)) * units(b) + wide(units(c)) * half_unit;
        const uint16_t got = __half_as_ushort(__hfma(half_of(a), half_of(b), half_of(c)));
        CHECK(exact ? got == round_exactly(exact, mode::nearest) : (got & 0x7fff) == 0);
    }
    CHECK(__hisnan(__hfma(half_of(infinity), half_of(0), half_of(0))));
    CHECK(__half_as_ushort(__hfma(half_of(infinity), half_of(0x3c00), half_of(0))) == infinity);
}

void sums_and_products_round_once()
{
    generator random{4};

    for (int i = 0; i < 300000; i++) {
        const uint16_t a = uint16_t(random.bits()), b = uint16_t(random.bits());
        if (!is_finite(a) || !is_finite(b))
            continue;
        const __half x = half_of(a), y = half_of(b);
        const wide sum = wide(units(a) + units(b)) * half_unit, product = wide(units(a)) * units(b);
        const wide difference = wide(units(a) - units(b)) * half_unit;
        if (sum)
            CHECK(__half_as_ushort(__hadd(x, y)) == round_exactly(sum, mode::nearest));
        if (difference)
            CHECK(__half_as_ushort(__hsub(x, y)) == round_exactly(difference, mode::nearest));
        if (product)
            CHECK(__half_as_ushort(__hmul(x, y)) == round_exactly(product, mode::nearest));
    }
}

// q is the quotient's half if a lies between b times the middles on both sides of q.
void quotients_round_once()
{
    generator random{5};

    for (int i = 0; i < 300000; i++) {
        const uint16_t a = uint16_t(random.bits() & 0x7fff), b = uint16_t(random.bits() & 0x7fff);
        const uint16_t q = __half_as_ushort(__hdiv(half_of(a), half_of(b)));
        if (!is_finite(a) || !is_finite(b) || !units(b))
            continue;
        const wide twice = 2 * wide(units(a)) * half_unit;
        const int64_t above = units(q) + units(uint16_t(q + 1));
        const int64_t below = q ? units(q) + units(uint16_t(q - 1)) : 0;
        if (is_finite(q))
            CHECK(twice < units(b) * wide(above) ||
                  (twice == units(b) * wide(above) && q % 2 == 0));
        CHECK(twice > units(b) * wide(below) || (twice == units(b) * wide(below) && q % 2 == 0));
    }
}

void extremes_skip_nan()
{
    for (uint32_t a = 0; a < n_halves; a += 31)
        for (uint32_t b = 0; b < n_halves; b += 29) {
            const uint16_t larger = __half_as_ushort(__hmax(half_of(a), half_of(b)));
            const uint16_t smaller = __half_as_ushort(__hmin(half_of(a), half_of(b)));
            const bool nan_a = is_nan(uint16_t(a)), nan_b = is_nan(uint16_t(b));
            if (nan_a && nan_b)
                CHECK(larger == 0x7fff && smaller == 0x7fff);
            else if (nan_a || nan_b)
                CHECK(larger == (nan_a ? b : a) && smaller == (nan_a ? b : a));
            else {
                CHECK(units(larger) == std::max(units(uint16_t(a)), units(uint16_t(b))));
                CHECK(units(smaller) == std::min(units(uint16_t(a)), units(uint16_t(b))));
            }
        }
    CHECK(__half_as_ushort(__hmax(half_of(0), half_of(sign))) == 0);
    CHECK(__half_as_ushort(__hmin(half_of(0), half_of(sign))) == sign);
}

void integers_become_halves()
{
    generator random{6};

    for (int i = -70000; i < 70000; i++)
        CHECK((__half_as_ushort(__int2half_rn(i)) & 0x7fff) ==
              (round_exactly(wide(i) * half_unit * half_unit, mode::nearest) & 0x7fff));
    for (int i = 0; i < 100000; i++) {
        const int x = int(random.bits());
        CHECK(__half_as_ushort(__int2half_rn(x)) ==
              round_exactly(wide(x) * half_unit * half_unit, mode::nearest));
    }
    CHECK(__half2int_rn(__float2half(2.5f)) == 2 && __half2int_rn(__float2half(-3.5f)) == -4);
}

} // namespace

const test_group half_cases = {
    {"halves_become_floats", halves_become_floats, nullptr, every_build},
    {"floats_round_to_halves", floats_round_to_halves, nullptr, every_build},
    {"fma_rounds_once", fma_rounds_once, nullptr, every_build},
    {"sums_and_products_round_once", sums_and_products_round_once, nullptr, every_build},
    {"quotients_round_once", quotients_round_once, nullptr, every_build},
    {"extremes_skip_nan", extremes_skip_nan, nullptr, every_build},
    {"integers_become_halves", integers_become_halves, nullptr, every_build},
};
