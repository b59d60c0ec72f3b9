/*
 * parts_tmpl.h - template of the SIMD kernels that add partial results of attention and finish
 * them.
 * Parameters: KVC_FN (name suffix), VLEN, and the words of vec_avx2.h.
 */
#include <math.h>

#include "../kernels.h"

kvc_status KVC_FN(kvc_merge_parts)(const struct kvc_queue *queue, struct kvc_attend_part *into,
                                   const struct kvc_attend_part *part, size_t n_rows, size_t d_v)
{
    const size_t stride = kvc_attend_stride(d_v);

    (void)queue;
    for (size_t r = 0; r < n_rows; r++) {
        float *o = into->o + r * stride;
        if (part->m[r] == -INFINITY)
            continue;
        const float m = isnan(part->m[r]) || part->m[r] > into->m[r] ? part->m[r] : into->m[r];
        const float a = into->m[r] == -INFINITY ? 0.0f : expf(into->m[r] - m);
        const float b = expf(part->m[r] - m);
        for (size_t c = 0; c < stride; c += VLEN)
            v_store(o + c, v_add(v_mul(v_load(o + c), v_set1(a)),
                                 v_mul(v_load(part->o + r * stride + c), v_set1(b))));
        into->l[r] = into->l[r] * a + part->l[r] * b;
        into->m[r] = m;
    }
    return KVC_OK;
}

_Static_assert(KVC_TILE_PAGES % VLEN == 0, "the pages of a block are whole vectors");

/* Weights are asked for that many rows early: another core may have written them. */
enum { AHEAD_ROWS = 16 };

/* Weights of the rows that see a page, added times by[row][slot]. */
static inline void add_weights(const float *weights, const float *by, size_t n_rows, size_t slot,
                               float *mass)
{
    vf sums[KVC_PAGE_ROWS / VLEN];
    weights += slot * n_rows * KVC_PAGE_ROWS;
    V_UNROLL
    for (size_t i = 0; i < KVC_PAGE_ROWS / VLEN; i++)
        sums[i] = v_load(mass + i * VLEN);
    for (size_t r = 0; r < n_rows; r++, weights += KVC_PAGE_ROWS) {
        V_UNROLL
        for (size_t i = 0; i < KVC_PAGE_ROWS; i += 16)
            v_prefetch(weights + (size_t)AHEAD_ROWS * KVC_PAGE_ROWS + i);
        const float f = by[r * KVC_TILE_PAGES + slot];
        if (f == 0.0f)
            continue;
        V_UNROLL
        for (size_t i = 0; i < KVC_PAGE_ROWS / VLEN; i++)
            sums[i] = v_fma(v_set1(f), v_load(weights + i * VLEN), sums[i]);
    }
    V_UNROLL
    for (size_t i = 0; i < KVC_PAGE_ROWS / VLEN; i++)
        v_store(mass + i * VLEN, sums[i]);
}

kvc_status KVC_FN(kvc_mass_parts)(const struct kvc_queue *queue,
                                  const struct kvc_attend_masses *from, size_t n_rows,
                                  const float *lse, float *const *mass)
{
    float by[KVC_TILE_ROWS * KVC_TILE_PAGES], sums[KVC_TILE_PAGES];

    (void)queue;
    for (size_t i = 0; i < KVC_TILE_PAGES; i += VLEN) {
        vf sum = v_zero();
        for (size_t r = 0, at = i; r < n_rows; r++, at += KVC_TILE_PAGES) {
            const vf l = v_load(from->l + at);
            vf f = v_exp(v_sub(v_load(from->m + at), v_set1(lse[r])));
            f = v_select(isfinite(lse[r]) ? v_lt(v_zero(), l) : m_first(0), f, v_zero());
            sum = v_fma(f, v_select(v_lt(v_zero(), f), l, v_zero()), sum);
            v_store(by + at, f);
        }
        v_store(sums + i, sum);
    }
    for (size_t slot = 0; slot < KVC_TILE_PAGES; slot++) {
        if (mass[slot] && sums[slot] > 0.0f) {
            if (from->weights)
                add_weights(from->weights, by, n_rows, slot, mass[slot]);
            else
                mass[slot][0] += sums[slot];
        }
    }
    return KVC_OK;
}

static inline void store_elements(void *dst, kvc_dtype dtype, size_t i, vf x, size_t n)
{
    switch (dtype) {
    case KVC_DTYPE_F16: v_store_half((uint16_t *)dst + i, x, n); break;
    case KVC_DTYPE_BF16: v_store_bf16((uint16_t *)dst + i, x, n); break;
    default: v_store_n((float *)dst + i, x, n);
    }
}

kvc_status KVC_FN(kvc_finish_rows)(const struct kvc_queue *queue,
                                   const struct kvc_attend_part *part, size_t n_rows, size_t d_v,
                                   void *dst, kvc_dtype dtype, size_t dst_stride, float *lse)
{
    (void)queue;
    for (size_t r = 0; r < n_rows; r++) {
        const float *o = part->o + r * kvc_attend_stride(d_v);
        const vf inverse = v_set1(part->l[r] == 0.0f ? 0.0f : 1.0f / part->l[r]);
        for (size_t c = 0; c < d_v; c += VLEN)
            store_elements(dst, dtype, r * dst_stride + c, v_mul(v_load(o + c), inverse),
                           lanes_left(c, d_v));
        lse[r] = part->l[r] == 0.0f ? -INFINITY : part->m[r] + logf(part->l[r]);
    }
    return KVC_OK;
}
