/* vec_avx512.h - the vector words of the templates for AVX-512 F, BW, VL and DQ; vec_avx2.h says
 * what they mean. */
#include "vec_x86.h"

#ifndef KVC_FN
#define KVC_FN(name) name##_avx512
#define V_BYTE_DOTS  0
#endif
#define VLEN   16
#define V_WIDE 1

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

#define v_zero()         _mm512_setzero_ps()
#define v_set1(a)        _mm512_set1_ps(a)
#define v_load(p)        _mm512_loadu_ps(p)
#define v_store(p, a)    _mm512_storeu_ps((p), (a))
#define v_add(a, b)      _mm512_add_ps((a), (b))
#define v_sub(a, b)      _mm512_sub_ps((a), (b))
#define v_mul(a, b)      _mm512_mul_ps((a), (b))
#define v_div(a, b)      _mm512_div_ps((a), (b))
#define v_fma(a, b, c)   _mm512_fmadd_ps((a), (b), (c))
#define v_min(a, b)      _mm512_min_ps((a), (b))
#define v_max(a, b)      _mm512_max_ps((a), (b))
#define v_abs(a)         _mm512_abs_ps(a)
#define v_number(a)      _mm512_maskz_mov_ps(_mm512_cmp_ps_mask((a), (a), _CMP_ORD_Q), (a))
#define v_copysign(a, s) _mm512_or_ps((a), _mm512_and_ps((s), _mm512_set1_ps(-0.0f)))
#define v_hmin(a)        _mm512_reduce_min_ps(a)
#define v_hmax(a)        _mm512_reduce_max_ps(a)
#define v_hadd(a)        _mm512_reduce_add_ps(a)

#define v_lt(a, b)        _mm512_cmp_ps_mask((a), (b), _CMP_LT_OQ)
#define v_select(m, a, b) _mm512_mask_mov_ps((b), (m), (a))
#define m_and(a, b)       ((vm)((a) & (b)))
#define m_or(a, b)        ((vm)((a) | (b)))
#define m_count(m)        ((uint32_t)__builtin_popcount(m))
#define m_bits(bits)      ((vm)((bits)&0xffffu))

#define v_swap_pairs(a) _mm512_permute_ps((a), 0xb1)
#define v_sub_add(a, b) _mm512_mask_sub_ps(v_add((a), (b)), 0x5555, (a), (b))

#define i_set1(a)       _mm512_set1_epi32(a)
#define i_add(a, b)     _mm512_add_epi32((a), (b))
#define i_keep(m, a)    _mm512_maskz_mov_epi32((m), (a))
#define i_bytes(a)      _mm512_cvtepi32_epi8(a)
#define i_from_bytes(b) _mm512_cvtepi8_epi32(b)
#define i_round(a)      _mm512_cvtps_epi32(a)
#define i_zero()        _mm512_setzero_si512()
#define i_load(p)       _mm512_loadu_si512(p)
#define i_store(p, a)   _mm512_storeu_si512((p), (a))
#define i_sub(a, b)     _mm512_sub_epi32((a), (b))
#define i_and(a, b)     _mm512_and_si512((a), (b))
#define i_shl(a, n)     _mm512_slli_epi32((a), (unsigned)(n))
#define i_sra(a, n)     _mm512_srai_epi32((a), (unsigned)(n))
#define i_srl16(a, n)   _mm512_srli_epi16((a), (n))
#define i_madd(a, b)    _mm512_madd_epi16((a), (b))
#define v_from_i(a)     _mm512_cvtepi32_ps(a)

V_INLINE vm m_first(size_t n)
{
    return (vm)(n >= VLEN ? 0xffffu : (1u << n) - 1);
}

V_INLINE vf v_load_n(const float *p, size_t n)
{
    return _mm512_maskz_loadu_ps(m_first(n), p);
}

V_INLINE void v_store_n(float *p, vf a, size_t n)
{
    _mm512_mask_storeu_ps(p, m_first(n), a);
}

V_INLINE vf v_load_half(const uint16_t *p, size_t n)
{
    if (n >= VLEN)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return v_load(half_tail(p, n, (float[VLEN]){0}));
}

V_INLINE void v_store_u16(uint16_t *p, __m256i a, size_t n)
{
    if (n >= VLEN)
        _mm256_storeu_si256((__m256i *)(void *)p, a);
    else
        _mm256_mask_storeu_epi16(p, m_first(n), a);
}

V_INLINE void v_store_half(uint16_t *p, vf a, size_t n)
{
    v_store_u16(p, _mm512_maskz_cvtps_ph((vm)0xffff, a, V_NEAREST), n);
}

/* Each lane of a, which is not negative, as the smallest half that is not below it. */
V_INLINE vf v_half_up(vf a)
{
    return _mm512_cvtph_ps(_mm512_maskz_cvtps_ph((vm)0xffff, a, V_UPWARD));
}

V_INLINE vf v_load_bf16(const uint16_t *p, size_t n)
{
    const __m256i a = _mm256_maskz_loadu_epi16(m_first(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
}

V_INLINE void v_store_bf16(uint16_t *p, vf a, size_t n)
{
    const __m512i u = _mm512_castps_si512(a), high = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, up), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    v_store_u16(p, _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet)), n);
}

V_INLINE vf v_load_page_i8(const uint8_t *p, size_t n, int bias)
{
    const __m128i u = b_load(p, n);
    if (bias == 0)
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(u));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_xor_si128(u, _mm_set1_epi8(-128))));
}

V_INLINE vf v_load_page_i4(const uint8_t *p, size_t n, int bias)
{
    const __m512i word = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i shift =
        _mm512_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28, 0, 16, 4, 20, 8, 24, 12, 28);
    const __m512 values = _mm512_sub_ps(
        _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), v_set1((float)bias));
    const __m512i words = _mm512_permutexvar_epi32(word, _mm512_castsi128_si512(b_load(p, n / 2)));
    /* The permutation looks at the low four bits only. */
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shift), values);
}

V_INLINE vf v_exp2_scale(vf a, vi n)
{
    const __m512i exponent = _mm512_add_epi32(n, _mm512_set1_epi32(127));
    return v_mul(a, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)));
}

/* The larger, or the sum; of a and b, half as long, side by side; and again. */
V_INLINE vf v_join(bool largest, vf a, vf b)
{
    return largest ? v_max(a, b) : v_add(a, b);
}

V_INLINE vf v_fold_halves(bool largest, vf a, vf b)
{
    return v_join(largest, _mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}

V_INLINE vf v_fold_quads(bool largest, vf a, vf b)
{
    return v_join(largest, _mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

V_INLINE vf v_fold_all(bool largest, const vf *a)
{
    vf quads[4];
    V_UNROLL
    for (int k = 0; k < 4; k++)
        quads[k] = v_fold_quads(largest, v_fold_halves(largest, a[k], a[4 + k]),
                                v_fold_halves(largest, a[8 + k], a[12 + k]));
    const vf x = v_join(largest, _mm512_unpacklo_ps(quads[0], quads[1]),
                        _mm512_unpackhi_ps(quads[0], quads[1]));
    const vf y = v_join(largest, _mm512_unpacklo_ps(quads[2], quads[3]),
                        _mm512_unpackhi_ps(quads[2], quads[3]));
    return v_join(largest, _mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
}

#define v_hadd_all(a) v_fold_all(false, (a))
#define v_hmax_all(a) v_fold_all(true, (a))

V_INLINE vf v_rotate(vf a, size_t block)
{
    const __m512 minus = _mm512_set1_ps(-0.0f);
    if (block > 1)
        a = v_add(_mm512_permute_ps(a, 0xb1), _mm512_mask_xor_ps(a, 0xaaaa, a, minus));
    if (block > 2)
        a = v_add(_mm512_permute_ps(a, 0x4e), _mm512_mask_xor_ps(a, 0xcccc, a, minus));
    if (block > 4)
        a = v_add(_mm512_shuffle_f32x4(a, a, 0xb1), _mm512_mask_xor_ps(a, 0xf0f0, a, minus));
    if (block > 8)
        a = v_add(_mm512_shuffle_f32x4(a, a, 0x4e), _mm512_mask_xor_ps(a, 0xff00, a, minus));
    return a;
}

V_INLINE vf v_twice(vf a)
{
    const __m512i from = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(from, a);
}

V_INLINE void v_store_quads(float *p, size_t stride, vf a)
{
    _mm_storeu_ps(p, _mm512_castps512_ps128(a));
    _mm_storeu_ps(p + stride, _mm512_extractf32x4_ps(a, 1));
    _mm_storeu_ps(p + 2 * stride, _mm512_extractf32x4_ps(a, 2));
    _mm_storeu_ps(p + 3 * stride, _mm512_extractf32x4_ps(a, 3));
}

/* Half a vector, twice. */
V_INLINE vi i_load_twice(const uint8_t *p)
{
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

V_INLINE vi i_widen(const uint8_t *p)
{
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

V_INLINE void i_store_low16(int16_t *p, vi a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtepi32_epi16(a));
}

V_INLINE vi i_fold(__m512 a, __m512 b)
{
    return i_add(_mm512_castps_si512(a), _mm512_castps_si512(b));
}

/* The sums of the lanes of four vectors, in each run of four lanes, side by side. */
V_INLINE vi i_hadd_runs(const vi *a)
{
    const __m512 b[4] = {_mm512_castsi512_ps(a[0]), _mm512_castsi512_ps(a[1]),
                         _mm512_castsi512_ps(a[2]), _mm512_castsi512_ps(a[3])};
    const __m512 x =
        _mm512_castsi512_ps(i_fold(_mm512_unpacklo_ps(b[0], b[1]), _mm512_unpackhi_ps(b[0], b[1])));
    const __m512 y =
        _mm512_castsi512_ps(i_fold(_mm512_unpacklo_ps(b[2], b[3]), _mm512_unpackhi_ps(b[2], b[3])));
    return i_fold(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
}

/* Lane 4 k + i: the sum of the lower, or the upper, half of what became the run i of runs[k]. */
V_INLINE void i_hadd_halves(const vi *runs, vi *low, vi *high)
{
    const vi x = i_add(_mm512_shuffle_i32x4(runs[0], runs[1], 0x88),
                       _mm512_shuffle_i32x4(runs[0], runs[1], 0xdd));
    const vi y = i_add(_mm512_shuffle_i32x4(runs[2], runs[3], 0x88),
                       _mm512_shuffle_i32x4(runs[2], runs[3], 0xdd));
    *low = _mm512_shuffle_i32x4(x, y, 0x88);
    *high = _mm512_shuffle_i32x4(x, y, 0xdd);
}

V_INLINE vi i_hadd_all(const vi *runs)
{
    vi low, high;
    i_hadd_halves(runs, &low, &high);
    return i_add(low, high);
}

/* Four lines of four rows become four rows of four lines. */
V_INLINE vi i_rows_first(vi a)
{
    return _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), a);
}

/* Lanes of low and high in turn: of all, or in each run of four lanes. */
V_INLINE void i_zip(bool runs, vi *low, vi *high)
{
    const vi a = *low, b = *high;
    if (runs) {
        *low = _mm512_unpacklo_epi32(a, b);
        *high = _mm512_unpackhi_epi32(a, b);
        return;
    }
    const vi first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    *low = _mm512_permutex2var_epi32(a, first, b);
    *high = _mm512_permutex2var_epi32(a, i_add(first, i_set1(8)), b);
}

V_INLINE void i_store_quads(int32_t *p, size_t stride, vi a)
{
    v_store_quads((float *)(void *)p, stride, _mm512_castsi512_ps(a));
}
