/* rows_avx512.h - words for blocks of 32 codes with AVX-512, with and without dot products of
 * bytes; rows_avx2.h says what they mean. */
#include "../rows.h"

#define STEP_SPARE(format) ((format) == KVC_ROWS_Q4_0 ? 6 : 4)

V_INLINE __m128i load_16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

#if V_BYTE_DOTS
/* Codes are unsigned bytes; integers are 256 high + low, signed bytes. */
#define STEP_BLOCKS(format) ((format) == KVC_ROWS_Q4_0 ? 4u : 2u)
#define STEP_BIAS(format)   ((format) == KVC_ROWS_Q4_0 ? 8 : 128)
#define STEP_REST_BYTES     32

V_INLINE __m256i load_32(const uint8_t *p)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

/* Nibbles: one block a lane of 16 bytes, low ones in the first part. Blocks beyond n are those of
 * the first. */
V_INLINE void step_load(kvc_row_format format, const uint8_t *block, uint32_t n, vi *part)
{
    if (format == KVC_ROWS_Q8_0) {
        const __m256i second = load_32(block + (n > 1 ? 36 : 2));
        part[0] = _mm512_xor_si512(
            _mm512_inserti64x4(_mm512_castsi256_si512(load_32(block + 2)), second, 1),
            i_set1((int)0x80808080u));
        return;
    }
    const size_t third = n > 2 ? 38 : 2, fourth = n > 3 ? 56 : 2;
    const vi low = i_set1(0x0f0f0f0f);
    vi x = _mm512_castsi128_si512(load_16(block + 2));
    x = _mm512_inserti32x4(x, load_16(block + (n > 1 ? 20 : 2)), 1);
    x = _mm512_inserti32x4(x, load_16(block + third), 2);
    x = _mm512_inserti32x4(x, load_16(block + fourth), 3);
    part[0] = i_and(x, low);
    part[1] = i_and(i_srl16(x, 4), low);
}

V_INLINE vi step_dot(kvc_row_format format, const vi *part, const uint8_t *row,
                     const uint8_t *rests)
{
    vi high = i_dot(i_zero(), part[0], i_load(row));
    vi rest = i_dot(half_rest(STEP_SPARE(format)), part[0], i_load(rests));
    if (format == KVC_ROWS_Q8_0) {
        const vi sum = i_dot(i_shl(high, 8), part[0], i_load(row + 64));
        return join_rest(STEP_SPARE(format), sum, rest);
    }
    high = i_dot(high, part[1], i_load(row + 64));
    rest = i_dot(rest, part[1], i_load(rests + 64));
    const vi sum = i_dot(i_shl(high, 8), part[0], i_load(row + 128));
    return join_rest(STEP_SPARE(format), i_dot(sum, part[1], i_load(row + 192)), rest);
}

V_INLINE void step_sums(kvc_row_format format, const vi *dots, vi *sums)
{
    vi runs[4], x[2], y[2]; /* quad b of runs[k]: a quarter of the vectors 4 k ... 4 k + 3 */
    V_UNROLL
    for (size_t k = 0; k < 4; k++)
        runs[k] = i_hadd_runs(dots + 4 * k);
    if (format == KVC_ROWS_Q8_0) {
        i_hadd_halves(runs, &sums[0], &sums[1]);
        return;
    }
    x[0] = _mm512_shuffle_i32x4(runs[0], runs[1], 0x88);
    x[1] = _mm512_shuffle_i32x4(runs[0], runs[1], 0xdd);
    y[0] = _mm512_shuffle_i32x4(runs[2], runs[3], 0x88);
    y[1] = _mm512_shuffle_i32x4(runs[2], runs[3], 0xdd);
    V_UNROLL
    for (int b = 0; b < 2; b++) {
        sums[b] = _mm512_shuffle_i32x4(x[b], y[b], 0x88);
        sums[2 + b] = _mm512_shuffle_i32x4(x[b], y[b], 0xdd);
    }
}

V_INLINE void step_arrange(kvc_row_format format, const int16_t *x, uint32_t block, uint8_t *row)
{
    vh high, low;
    h_split(x, &high, &low);
    if (format == KVC_ROWS_Q8_0) {
        row += (size_t)(block / 2) * 128 + (size_t)(block % 2) * 32;
        h_store(row, high);
        h_store(row + 64, low);
        return;
    }
    row += (size_t)(block / 4) * 256 + (size_t)(block % 4) * 16;
    _mm_storeu_si128((__m128i *)(void *)row, _mm256_castsi256_si128(high));
    _mm_storeu_si128((__m128i *)(void *)(row + 64), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i *)(void *)(row + 128), _mm256_castsi256_si128(low));
    _mm_storeu_si128((__m128i *)(void *)(row + 192), _mm256_extracti128_si256(low, 1));
}

V_INLINE void step_arrange_rests(kvc_row_format format, const int16_t *x, uint32_t block,
                                 uint8_t *rests)
{
    vh high, low;
    h_split(x, &high, &low);
    if (format == KVC_ROWS_Q8_0) {
        h_store(rests + (size_t)block * 32, low);
        return;
    }
    rests += (size_t)(block / 4) * 128 + (size_t)(block % 4) * 16;
    _mm_storeu_si128((__m128i *)(void *)rests, _mm256_castsi256_si128(low));
    _mm_storeu_si128((__m128i *)(void *)(rests + 64), _mm256_extracti128_si256(low, 1));
}
#else
#define STEP_BLOCKS(format) 1u
#define STEP_BIAS(format)   ((format) == KVC_ROWS_Q4_0 ? 8 : 0)
#define STEP_REST_BYTES     64

V_INLINE void step_load(kvc_row_format format, const uint8_t *block, uint32_t n, vi *part)
{
    (void)n;
    if (format == KVC_ROWS_Q8_0) {
        part[0] =
            _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)(block + 2)));
        return;
    }
    const __m128i x = load_16(block + 2), low = _mm_set1_epi8(15);
    part[0] = _mm512_cvtepu8_epi16(
        _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(x, 4), low), _mm_and_si128(x, low)));
}

V_INLINE vi step_dot(kvc_row_format format, const vi *part, const uint8_t *row,
                     const uint8_t *rests)
{
    const vi rest = i_add(i_madd(part[0], i_load(rests)), half_rest(STEP_SPARE(format)));
    (void)format;
    return join_rest(STEP_SPARE(format), i_madd(part[0], i_load(row)), rest);
}

V_INLINE void step_sums(kvc_row_format format, const vi *dots, vi *sums)
{
    vi runs[4];
    (void)format;
    V_UNROLL
    for (size_t k = 0; k < 4; k++)
        runs[k] = i_hadd_runs(dots + 4 * k);
    sums[0] = i_hadd_all(runs);
}

V_INLINE void step_arrange(kvc_row_format format, const int16_t *x, uint32_t block, uint8_t *row)
{
    (void)format;
    memcpy(row + (size_t)block * 64, x, 64);
}

V_INLINE void step_arrange_rests(kvc_row_format format, const int16_t *x, uint32_t block,
                                 uint8_t *rests)
{
    step_arrange(format, x, block, rests);
}
#endif

V_INLINE void block_load(kvc_row_format format, const uint8_t *block, vf *x)
{
    if (format == KVC_ROWS_Q8_0) {
        x[0] = v_from_i(i_from_bytes(load_16(block + 2)));
        x[1] = v_from_i(i_from_bytes(load_16(block + 18)));
        return;
    }
    /* The permutation looks at the low four bits only. */
    const vf values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const vi u = _mm512_cvtepu8_epi32(load_16(block + 2));
    x[0] = _mm512_permutexvar_ps(u, values);
    x[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(u, 4), values);
}

V_INLINE uint64_t m_lanes(vm m)
{
    return m;
}

V_INLINE vf v_load_quads(const float *p)
{
    return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
}

V_INLINE vi i_load_each(const int32_t *p)
{
    return _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
        _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)p)));
}

V_INLINE vf v_load_each(const float *p)
{
    return _mm512_castsi512_ps(i_load_each((const int32_t *)(const void *)p));
}
