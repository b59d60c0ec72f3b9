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
