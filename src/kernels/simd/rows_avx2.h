/*
 * rows_avx2.h - words for blocks of 32 codes in the row formats of engines (rows.h), with AVX2.
 *
 * A step is a vector of products: of STEP_BLOCKS blocks of Q4_0 of one row with 16-bit integers,
 * which step_arrange() lays out in 64 bytes a block, and with their rests (dots_tmpl.h), in
 * STEP_REST_BYTES a block. Codes are too large by STEP_BIAS, and sums, which are of 32 codes, count
 * in units of 2^-STEP_SPARE of an integer. Of Q8_0, which is sooner floats, integers save nothing.
 */
#include "../rows.h"

/* Whether there are steps. */
#define ROW_INTEGERS 1

enum { STEP_BLOCKS = 1, STEP_REST_BYTES = 64, STEP_BIAS = 8, STEP_SPARE = 6 };

V_INLINE __m128i load_16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

/* The factors that n blocks of codes become. */
V_INLINE void step_load(const uint8_t *block, uint32_t n, vi *part)
{
    const __m128i x = load_16(block + 2), low = _mm_set1_epi8(15);
    (void)n;
    part[0] = _mm256_cvtepu8_epi16(_mm_and_si128(x, low));
    part[1] = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(x, 4), low));
}

V_INLINE vi step_dot(const vi *part, const uint8_t *row, const uint8_t *rests)
{
    const vi sum = i_add(i_madd(part[0], i_load(row)), i_madd(part[1], i_load(row + 32)));
    const vi rest = i_add(i_madd(part[0], i_load(rests)), i_madd(part[1], i_load(rests + 32)));
    return join_rest(STEP_SPARE, sum, i_add(rest, half_rest(STEP_SPARE)));
}

/* VLEN vectors of products: lane i of sums[b] is what block b of dots[i] adds up to. */
V_INLINE void step_sums(const vi *dots, vi *sums)
{
    const vi runs[2] = {i_hadd_runs(dots), i_hadd_runs(dots + 4)};
    sums[0] = i_hadd_all(runs);
}

/* Puts 32 integers and their rests where step_dot() looks for those of a block. */
V_INLINE void step_arrange(const int16_t *x, const int16_t *rest, uint32_t block, uint8_t *row,
                           uint8_t *rests)
{
    memcpy(row + (size_t)block * 64, x, 64);
    memcpy(rests + (size_t)block * 64, rest, 64);
}

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

/* Each of VLEN / 4 integers four times. */
V_INLINE vi i_load_each(const int32_t *p)
{
    return _mm256_permutevar8x32_epi32(
        _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(const void *)p)),
        _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

V_INLINE vf v_load_each(const float *p)
{
    return _mm256_castsi256_ps(i_load_each((const int32_t *)(const void *)p));
}
