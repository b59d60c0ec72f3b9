/* vec_x86.h - words that the x86 instruction sets share, mostly of 16 bytes in an SSE register. */
#ifndef KVC_VEC_X86_H
#define KVC_VEC_X86_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "../half.h"
#include "../layout.h"

/* Kernels that take a constant argument apart must be inlined into the call that gives it. */
#define V_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define V_UNROLL _Pragma("unroll")
#else
#define V_UNROLL _Pragma("GCC unroll 16")
#endif

#define V_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define V_UPWARD  (_MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)

/* Lanes of a vector that begins at element c of n. */
#define lanes_left(c, n) ((size_t)((n) - (c) < VLEN ? (n) - (c) : VLEN))

/* Asks for a line of memory in the second cache. */
#define v_prefetch(p) _mm_prefetch((const char *)(const void *)(p), _MM_HINT_T1)

typedef __m128i vb;

/* n <= 16 bytes, the others 0. */
V_INLINE vb b_load(const void *p, size_t n)
{
    uint8_t bytes[16] = {0};
    switch (n) {
    case 16: return _mm_loadu_si128((const __m128i *)p);
    case 8: return _mm_loadl_epi64((const __m128i *)p);
    default: memcpy(bytes, p, n); return _mm_loadu_si128((const __m128i *)(const void *)bytes);
    }
}

V_INLINE void b_store(void *p, vb x, size_t n)
{
    uint8_t bytes[16];
    switch (n) {
    case 16: _mm_storeu_si128((__m128i *)p, x); break;
    case 8: _mm_storel_epi64((__m128i *)p, x); break;
    case 4: memcpy(p, &(int32_t){_mm_cvtsi128_si32(x)}, 4); break;
    default: _mm_storeu_si128((__m128i *)(void *)bytes, x); memcpy(p, bytes, n);
    }
}

/* The last n halves of a row as floats. Scalar: with a second vector conversion beside that of
 * whole vectors, clang 14 merges both into conversions one by one. */
static inline const float *half_tail(const uint16_t *p, size_t n, float *dst)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = kvc_half_to_float(p[i]);
    return dst;
}

/* The low nibbles of 16 bytes in 8, the even one first. */
static inline vb b_pack_nibbles(vb x)
{
    const __m128i low = _mm_and_si128(x, _mm_set1_epi8(15));
    const __m128i pairs = _mm_maddubs_epi16(low, _mm_set1_epi16(0x1001));
    return _mm_packus_epi16(pairs, pairs);
}

/* The reverse, as two's complement: the sign bit is flipped, then its weight taken off. */
static inline vb b_unpack_nibbles(vb x)
{
    const __m128i pairs = _mm_cvtepu8_epi16(x), eight = _mm_set1_epi8(8);
    const __m128i u =
        _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi16(pairs, 4)), _mm_set1_epi8(15));
    return _mm_sub_epi8(_mm_xor_si128(u, eight), eight);
}

/* Two words of a page's INT4 codes (kvc_nibble_element). */
static inline vb b_pack_page_nibbles(vb x)
{
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    return b_pack_nibbles(_mm_shuffle_epi8(x, order));
}

/* Bits 4 and 5 of 16 bytes: two half words of the second plane of a page's INT6 codes. */
V_INLINE vb b_pack_page_pairs(vb x)
{
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(x, 4), _mm_set1_epi8(3));
    const __m128i twos = _mm_maddubs_epi16(_mm_shuffle_epi8(high, order), _mm_set1_epi16(0x0401));
    const __m128i fours = _mm_madd_epi16(twos, _mm_set1_epi32(0x00100001));
    const __m128i words = _mm_packs_epi32(fours, fours);
    return _mm_packus_epi16(words, words);
}

/* The reverse: unsigned codes plus bias. */
static inline vb b_unpack_page_nibbles(vb x, int bias)
{
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m128i pairs = _mm_cvtepu8_epi16(x);
    const __m128i u =
        _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi16(pairs, 4)), _mm_set1_epi8(15));
    return _mm_shuffle_epi8(_mm_add_epi8(u, _mm_set1_epi8((char)bias)), order);
}

/* 64 INT6 codes of a page become INT8 ones. Reads 32 bytes of nibbles and 16 of pairs, which may
 * be beyond the line, but not beyond the page. */
V_INLINE void b_widen_page_six(const uint8_t *nibbles, const uint8_t *pairs, uint8_t *dst)
{
    enum { ZERO = KVC_BIAS8_K - KVC_BIAS6 };
    const __m256i low = _mm256_set1_epi8(15);
    /* Two pairs, one in bits 0 and 1 of the index, one in bits 2 and 3. */
    const __m256i even =
        _mm256_broadcastsi128_si256(_mm_add_epi8(_mm_set1_epi8(ZERO), _mm_set1_epi32(0x30201000)));
    const __m256i odd = _mm256_broadcastsi128_si256(
        _mm_add_epi8(_mm_set1_epi8(ZERO), _mm_setr_epi32(0, 0x10101010, 0x20202020, 0x30303030)));
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)nibbles);
    const __m256i y = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)pairs));
    const __m256i index = _mm256_and_si256(_mm256_or_si256(y, _mm256_slli_epi16(y, 4)), low);
    const __m256i a = _mm256_or_si256(_mm256_and_si256(x, low), _mm256_shuffle_epi8(even, index));
    const __m256i b = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(x, 4), low),
                                      _mm256_shuffle_epi8(odd, index));
    const __m256i first = _mm256_shuffle_epi8(_mm256_unpacklo_epi8(a, b), order);
    const __m256i second = _mm256_shuffle_epi8(_mm256_unpackhi_epi8(a, b), order);
    _mm_storeu_si128((__m128i *)(void *)dst, _mm256_castsi256_si128(first));
    _mm_storeu_si128((__m128i *)(void *)(dst + 16), _mm256_castsi256_si128(second));
    _mm_storeu_si128((__m128i *)(void *)(dst + 32), _mm256_extracti128_si256(first, 1));
    _mm_storeu_si128((__m128i *)(void *)(dst + 48), _mm256_extracti128_si256(second, 1));
}

/* Interleaving the two halves of 2^k rows k times transposes them. */
static inline void b_transpose16(uint8_t tile[16][16])
{
    __m128i x[16], y[16];
    for (int i = 0; i < 16; i++)
        x[i] = _mm_loadu_si128((const __m128i *)(const void *)tile[i]);
    for (int round = 0; round < 4; round++) {
        for (size_t i = 0; i < 8; i++) {
            y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]);
            y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
        }
        memcpy(x, y, sizeof(x));
    }
    for (int i = 0; i < 16; i++)
        _mm_storeu_si128((__m128i *)(void *)tile[i], x[i]);
}

static inline void b_transpose8_u16(uint16_t tile[8][8])
{
    __m128i x[8], y[8];
    for (int i = 0; i < 8; i++)
        x[i] = _mm_loadu_si128((const __m128i *)(const void *)tile[i]);
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < 4; i++) {
            y[2 * i] = _mm_unpacklo_epi16(x[i], x[i + 4]);
            y[2 * i + 1] = _mm_unpackhi_epi16(x[i], x[i + 4]);
        }
        memcpy(x, y, sizeof(x));
    }
    for (int i = 0; i < 8; i++)
        _mm_storeu_si128((__m128i *)(void *)tile[i], x[i]);
}

/* 4 rows of 4 floats become 4 columns. */
V_INLINE void v_transpose4(const float *src, size_t src_stride, float *dst, size_t dst_stride)
{
    __m128 a = _mm_loadu_ps(src), b = _mm_loadu_ps(src + src_stride);
    __m128 c = _mm_loadu_ps(src + 2 * src_stride), d = _mm_loadu_ps(src + 3 * src_stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(dst, a);
    _mm_storeu_ps(dst + dst_stride, b);
    _mm_storeu_ps(dst + 2 * dst_stride, c);
    _mm_storeu_ps(dst + 3 * dst_stride, d);
}

#endif
