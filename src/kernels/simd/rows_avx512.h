/*
 * rows_avx512.h - words for blocks of 32 codes with AVX-512; rows_avx2.h says what they mean.
 *
 * With V_BYTE_DOTS there are steps: a step is a vector of products of STEP_BLOCKS blocks of Q4_0 of
 * one row with 16-bit integers, 256 high + low, signed bytes, which step_arrange() lays out in 64
 * bytes a block, and with their rests (dots_tmpl.h), in STEP_REST_BYTES a block. Codes are too
 * large by STEP_BIAS, and sums, which are of 32 codes, count in units of 2^-STEP_SPARE of an
 * integer. Elsewhere, and of Q8_0, products of integers take as long as those of floats.
 */
#include "../rows.h"

V_INLINE __m128i load_16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

#if V_BYTE_DOTS
enum { STEP_BLOCKS = 4, STEP_REST_BYTES = 32, STEP_BIAS = 8, STEP_SPARE = 6 };

/* The factors that n blocks of codes become: one block a lane of 16 bytes, low nibbles in the first
 * part. Blocks beyond n are those of the first. */
V_INLINE void step_load(const uint8_t *block, uint32_t n, vi *part)
{
    const size_t third = n > 2 ? 38 : 2, fourth = n > 3 ? 56 : 2;
    const vi low = i_set1(0x0f0f0f0f);
    vi x = _mm512_castsi128_si512(load_16(block + 2));
    x = _mm512_inserti32x4(x, load_16(block + (n > 1 ? 20 : 2)), 1);
    x = _mm512_inserti32x4(x, load_16(block + third), 2);
    x = _mm512_inserti32x4(x, load_16(block + fourth), 3);
    part[0] = i_and(x, low);
    part[1] = i_and(i_srl16(x, 4), low);
}

V_INLINE vi step_dot(const vi *part, const uint8_t *row, const uint8_t *rests)
{
    const vi high = i_dot(i_dot(i_zero(), part[0], i_load(row)), part[1], i_load(row + 64));
    const vi low = i_dot(i_shl(high, 8), part[0], i_load(row + 128));
    const vi rest = i_dot(half_rest(STEP_SPARE), part[0], i_load(rests));
    return join_rest(STEP_SPARE, i_dot(low, part[1], i_load(row + 192)),
                     i_dot(rest, part[1], i_load(rests + 64)));
}

/* VLEN vectors of products: lane i of sums[b] is what block b of dots[i] adds up to. */
V_INLINE void step_sums(const vi *dots, vi *sums)
{
    vi runs[4], x[2], y[2]; /* quad b of runs[k]: a quarter of the vectors 4 k ... 4 k + 3 */
    V_UNROLL
    for (size_t k = 0; k < 4; k++)
        runs[k] = i_hadd_runs(dots + 4 * k);
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

V_INLINE void store_halves(uint8_t *to, vh bytes)
{
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)(void *)(to + 64), _mm256_extracti128_si256(bytes, 1));
}

/* Puts 32 integers and their rests where step_dot() looks for those of a block. */
V_INLINE void step_arrange(const int16_t *x, const int16_t *rest, uint32_t block, uint8_t *row,
                           uint8_t *rests)
{
    const size_t four = block / 4, lane = (size_t)(block % 4) * 16;
    vh high, low;
    h_split(x, &high, &low);
    store_halves(row + four * 256 + lane, high);
    store_halves(row + four * 256 + 128 + lane, low);
    h_split(rest, &high, &low);
    store_halves(rests + four * 128 + lane, low);
}
/* Each of VLEN / 4 integers four times. */
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
