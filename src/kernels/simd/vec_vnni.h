/* vec_vnni.h - the vector words of AVX-512 with dot products of bytes (AVX512_VNNI). */
#define KVC_FN(name) name##_vnni
#define V_BYTE_DOTS  1

#include "vec_avx512.h"

#define i_dot(sums, u, s) _mm512_dpbusd_epi32((sums), (u), (s))

/* 32 bytes, halves of 16-bit numbers. */
typedef __m256i vh;

/* x = 256 high + low. */
V_INLINE void h_split(const int16_t *x, vh *high, vh *low)
{
    const __m512i n = i_load(x);
    *low = _mm512_cvtepi16_epi8(n);
    *high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(_mm512_add_epi16(n, _mm512_set1_epi16(128)), 8));
}

V_INLINE void h_store(uint8_t *p, vh a)
{
    _mm256_storeu_si256((__m256i *)(void *)p, a);
}

/* For 16 bytes of nibbles: the factors of their low ones to p, of their high ones distance bytes
 * behind (kvc_nibble_element). */
V_INLINE void h_store_nibbles(uint8_t *p, size_t distance, vh a)
{
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    const __m256i x = _mm256_shuffle_epi8(a, order);
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtepi64_epi32(x));
    _mm_storeu_si128((__m128i *)(void *)(p + distance),
                     _mm256_cvtepi64_epi32(_mm256_srli_epi64(x, 32)));
}
