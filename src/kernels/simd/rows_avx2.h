/* rows_avx2.h - words for blocks of 32 codes in the row formats of engines (rows.h), with AVX2. */
#include "../rows.h"

/* The elements of a block without its scale. */
V_INLINE void block_load(kvc_row_format format, const uint8_t *block, vf *x)
{
    V_UNROLL
    for (int i = 0; i < 4 && format == KVC_ROWS_Q8_0; i++)
        x[i] = v_from_i(_mm256_cvtepi8_epi32(
            _mm_loadl_epi64((const __m128i *)(const void *)(block + 2 + (size_t)i * 8))));
    V_UNROLL
    for (int i = 0; i < 2 && format == KVC_ROWS_Q4_0; i++) {
        const vi u = _mm256_cvtepu8_epi32(
            _mm_loadl_epi64((const __m128i *)(const void *)(block + 2 + (size_t)i * 8)));
        x[i] = v_from_i(i_sub(i_and(u, i_set1(15)), i_set1(8)));
        x[2 + i] = v_from_i(i_sub(_mm256_srli_epi32(u, 4), i_set1(8)));
    }
}

/* Lane i of a mask is bit i. */
V_INLINE uint64_t m_lanes(vm m)
{
    return (uint64_t)(uint32_t)_mm256_movemask_ps(m);
}

/* p[0 ... 3], repeated. */
V_INLINE vf v_load_quads(const float *p)
{
    const __m128 x = _mm_loadu_ps(p);
    return _mm256_set_m128(x, x);
}
