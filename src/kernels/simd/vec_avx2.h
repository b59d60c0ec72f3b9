/*
 * vec_avx2.h - the vector words of the templates for AVX2, FMA and F16C.
 *
 * vf: VLEN floats, vi: VLEN int32, vm: a mask of VLEN lanes, vb: up to 16 bytes (vec_x86.h). Words
 * with a count n <= VLEN touch n elements; lanes that are not loaded are 0. v_min and v_max give
 * their second operand where either is NaN.
 */
#include "vec_x86.h"

#define KVC_FN(name) name##_avx2
#define VLEN         8
#define V_WIDE       0 /* 64 nibbles are half a vector */
#define V_BYTE_DOTS  0 /* i_dot(sums, u, s) adds the products of four unsigned and signed bytes */

typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm;

#define v_zero()         _mm256_setzero_ps()
#define v_set1(a)        _mm256_set1_ps(a)
#define v_load(p)        _mm256_loadu_ps(p)
#define v_store(p, a)    _mm256_storeu_ps((p), (a))
#define v_add(a, b)      _mm256_add_ps((a), (b))
#define v_sub(a, b)      _mm256_sub_ps((a), (b))
#define v_mul(a, b)      _mm256_mul_ps((a), (b))
#define v_div(a, b)      _mm256_div_ps((a), (b))
#define v_fma(a, b, c)   _mm256_fmadd_ps((a), (b), (c)) /* a * b + c */
#define v_min(a, b)      _mm256_min_ps((a), (b))
#define v_max(a, b)      _mm256_max_ps((a), (b))
#define v_abs(a)         _mm256_andnot_ps(_mm256_set1_ps(-0.0f), (a))
#define v_number(a)      _mm256_and_ps((a), _mm256_cmp_ps((a), (a), _CMP_ORD_Q))      /* NaN: 0 */
#define v_copysign(a, s) _mm256_or_ps((a), _mm256_and_ps((s), _mm256_set1_ps(-0.0f))) /* a >= 0 */

#define v_lt(a, b)        _mm256_cmp_ps((a), (b), _CMP_LT_OQ)
#define v_select(m, a, b) _mm256_blendv_ps((b), (a), (m)) /* m ? a : b */
#define m_and(a, b)       _mm256_and_ps((a), (b))
#define m_or(a, b)        _mm256_or_ps((a), (b))
#define m_count(m)        ((uint32_t)__builtin_popcount((unsigned)_mm256_movemask_ps(m)))

#define v_swap_pairs(a) _mm256_permute_ps((a), 0xb1) /* lane i is lane i ^ 1 */
#define v_sub_add(a, b) _mm256_addsub_ps((a), (b))   /* even lanes a - b, odd ones a + b */

#define i_set1(a)       _mm256_set1_epi32(a)
#define i_add(a, b)     _mm256_add_epi32((a), (b))
#define i_keep(m, a)    _mm256_and_si256(_mm256_castps_si256(m), (a)) /* others 0 */
#define i_from_bytes(b) _mm256_cvtepi8_epi32(b)
#define i_round(a)      _mm256_cvtps_epi32(a) /* to nearest even */
#define i_zero()        _mm256_setzero_si256()
#define i_load(p)       _mm256_loadu_si256((const __m256i *)(const void *)(p))
#define i_store(p, a)   _mm256_storeu_si256((__m256i *)(void *)(p), (a))
#define i_sub(a, b)     _mm256_sub_epi32((a), (b))
#define i_and(a, b)     _mm256_and_si256((a), (b))
#define i_shl(a, n)     _mm256_slli_epi32((a), (n))
#define i_sra(a, n)     _mm256_srai_epi32((a), (n))
#define i_srl16(a, n)   _mm256_srli_epi16((a), (n)) /* of 16-bit lanes */
#define i_madd(a, b)    _mm256_madd_epi16((a), (b)) /* sums of two products of 16-bit lanes */
#define v_from_i(a)     _mm256_cvtepi32_ps(a)

/* The low bytes of the lanes. */
V_INLINE vb i_bytes(vi a)
{
    const __m256i low = _mm256_set1_epi32(0x0c080400);
    const __m256i b = _mm256_shuffle_epi8(a, low);
    return _mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
}

/* Lane i is bit i. */
V_INLINE vm m_bits(uint64_t bits)
{
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i a = _mm256_and_si256(_mm256_set1_epi32((int)(bits & 0xff)), lane);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, lane));
}

V_INLINE vm m_first(size_t n)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n < VLEN ? (int)n : VLEN), lane));
}

V_INLINE vf v_load_n(const float *p, size_t n)
{
    return n >= VLEN ? v_load(p) : _mm256_maskload_ps(p, _mm256_castps_si256(m_first(n)));
}

V_INLINE void v_store_n(float *p, vf a, size_t n)
{
    if (n >= VLEN)
        v_store(p, a);
    else
        _mm256_maskstore_ps(p, _mm256_castps_si256(m_first(n)), a);
}

V_INLINE vf v_load_half(const uint16_t *p, size_t n)
{
    if (n >= VLEN)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
    return v_load(half_tail(p, n, (float[VLEN]){0}));
}

V_INLINE void v_store_half(uint16_t *p, vf a, size_t n)
{
    b_store(p, _mm256_cvtps_ph(a, V_NEAREST), 2 * n);
}

/* Each lane of a, which is not negative, as the smallest half that is not below it. */
V_INLINE vf v_half_up(vf a)
{
    return _mm256_cvtph_ps(_mm256_cvtps_ph(a, V_UPWARD));
}

V_INLINE vf v_load_bf16(const uint16_t *p, size_t n)
{
    const __m256i u = _mm256_cvtepu16_epi32(b_load(p, 2 * n));
    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}

V_INLINE void v_store_bf16(uint16_t *p, vf a, size_t n)
{
    const __m256i u = _mm256_castps_si256(a), high = _mm256_srli_epi32(u, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, up), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i x = _mm256_blendv_epi8(rounded, quiet, nan);
    b_store(p, _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)), 2 * n);
}

/* Codes of a page less their bias (0, or the one of the format); n is 8 or VLEN. */
V_INLINE vf v_load_page_i8(const uint8_t *p, size_t n, int bias)
{
    const __m256i u = _mm256_cvtepu8_epi32(b_load(p, n));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(u, _mm256_set1_epi32(bias)));
}

V_INLINE vf v_load_page_i4(const uint8_t *p, size_t n, int bias)
{
    const __m256i shift = _mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28);
    int32_t word;
    memcpy(&word, p, n / 2);
    const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(word), shift);
    const __m256i u = _mm256_and_si256(nibbles, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(u, _mm256_set1_epi32(bias)));
}

/* a * 2^n, n from -126 to 127. */
V_INLINE vf v_exp2_scale(vf a, vi n)
{
    const __m256i exponent = _mm256_add_epi32(n, _mm256_set1_epi32(127));
    return v_mul(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

V_INLINE float v_hmin(vf a)
{
    __m128 m = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_min_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_min_ss(m, _mm_movehdup_ps(m)));
}

V_INLINE float v_hmax(vf a)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

V_INLINE float v_hadd(vf a)
{
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}

/* The larger, or the sum. */
V_INLINE vf v_join(bool largest, vf a, vf b)
{
    return largest ? v_max(a, b) : v_add(a, b);
}

V_INLINE vf v_fold_halves(bool largest, vf a, vf b)
{
    return v_join(largest, _mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/* Lane i is the sum of the lanes of a[i], in the same order for every i; or the largest of them. */
V_INLINE vf v_fold_all(bool largest, const vf *a)
{
    vf quads[4];
    V_UNROLL
    for (int k = 0; k < 4; k++)
        quads[k] = v_fold_halves(largest, a[k], a[4 + k]);
    const vf x = v_join(largest, _mm256_unpacklo_ps(quads[0], quads[1]),
                        _mm256_unpackhi_ps(quads[0], quads[1]));
    const vf y = v_join(largest, _mm256_unpacklo_ps(quads[2], quads[3]),
                        _mm256_unpackhi_ps(quads[2], quads[3]));
    return v_join(largest, _mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));
}

#define v_hadd_all(a) v_fold_all(false, (a))
#define v_hmax_all(a) v_fold_all(true, (a))

/* Walsh-Hadamard butterflies at the distances below block and VLEN: (a, b) to (a + b, a - b). */
V_INLINE vf v_rotate(vf a, size_t block)
{
    const __m256 minus = _mm256_set1_ps(-0.0f);
    if (block > 1)
        a = v_add(_mm256_permute_ps(a, 0xb1),
                  _mm256_xor_ps(a, _mm256_blend_ps(v_zero(), minus, 0xaa)));
    if (block > 2)
        a = v_add(_mm256_permute_ps(a, 0x4e),
                  _mm256_xor_ps(a, _mm256_blend_ps(v_zero(), minus, 0xcc)));
    if (block > 4)
        a = v_add(_mm256_permute2f128_ps(a, a, 1),
                  _mm256_xor_ps(a, _mm256_blend_ps(v_zero(), minus, 0xf0)));
    return a;
}

/* Lanes 2 i and 2 i + 1 are lane i. */
V_INLINE vf v_twice(vf a)
{
    return _mm256_permutevar8x32_ps(a, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

/* Lanes 4 i ... 4 i + 3 to p + i * stride. */
V_INLINE void v_store_quads(float *p, size_t stride, vf a)
{
    _mm_storeu_ps(p, _mm256_castps256_ps128(a));
    _mm_storeu_ps(p + stride, _mm256_extractf128_ps(a, 1));
}

/* 2 VLEN bytes as unsigned 16-bit lanes. */
V_INLINE vi i_widen(const uint8_t *p)
{
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
}

/* The low halves of the lanes. */
V_INLINE void i_store_low16(int16_t *p, vi a)
{
    const __m256i low =
        _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                   0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1)));
    _mm_storeu_si128((__m128i *)(void *)p,
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(low, 0x08)));
}

V_INLINE vi i_fold(__m256 a, __m256 b)
{
    return i_add(_mm256_castps_si256(a), _mm256_castps_si256(b));
}

/* The sums of the lanes of four vectors, in each run of four lanes, side by side. */
V_INLINE vi i_hadd_runs(const vi *a)
{
    const __m256 b[4] = {_mm256_castsi256_ps(a[0]), _mm256_castsi256_ps(a[1]),
                         _mm256_castsi256_ps(a[2]), _mm256_castsi256_ps(a[3])};
    const __m256 x =
        _mm256_castsi256_ps(i_fold(_mm256_unpacklo_ps(b[0], b[1]), _mm256_unpackhi_ps(b[0], b[1])));
    const __m256 y =
        _mm256_castsi256_ps(i_fold(_mm256_unpacklo_ps(b[2], b[3]), _mm256_unpackhi_ps(b[2], b[3])));
    return i_fold(_mm256_shuffle_ps(x, y, 0x44), _mm256_shuffle_ps(x, y, 0xee));
}

/* Lane 4 k + i: the sum of what became the run i of runs[k]. */
V_INLINE vi i_hadd_all(const vi *runs)
{
    return i_add(_mm256_permute2x128_si256(runs[0], runs[1], 0x20),
                 _mm256_permute2x128_si256(runs[0], runs[1], 0x31));
}

/* Four lines of two rows become two rows of four lines. */
V_INLINE vi i_rows_first(vi a)
{
    return _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

V_INLINE void i_store_quads(int32_t *p, size_t stride, vi a)
{
    v_store_quads((float *)(void *)p, stride, _mm256_castsi256_ps(a));
}
