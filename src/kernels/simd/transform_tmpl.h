/*
 * transform_tmpl.h - template of the SIMD kernel that transforms rows: the bits of ref/transform.c.
 * Parameters: KVC_FN (name suffix), VLEN, the words of vec_avx2.h, and those of quant_tmpl.h.
 */
#include <math.h>

#include "../kernels.h"

/* The stages of H between vectors; block is a multiple of VLEN. */
static inline void rotate_vectors(float *x, size_t block)
{
    for (size_t h = VLEN; h < block; h *= 2)
        for (size_t i = 0; i < block; i += 2 * h)
            for (size_t j = i; j < i + h; j += VLEN) {
                const vf a = v_load(x + j), b = v_load(x + j + h);
                v_store(x + j, v_add(a, b));
                v_store(x + j + h, v_sub(a, b));
            }
}

kvc_status KVC_FN(kvc_transform_rows)(const struct kvc_queue *queue, const struct kvc_rows *src,
                                      const struct kvc_row_transform *transform, float *dst,
                                      size_t dst_stride, size_t n_padded)
{
    const struct kvc_row_transform t = *transform;
    const vf norm = v_set1((float)(1.0 / sqrt((double)t.block)));
    const size_t d = src->n_cols;

    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++, dst += dst_stride) {
        for (size_t c = 0; c < d; c += VLEN) { /* up to the stages of H inside a vector */
            const size_t n = lanes_left(c, d);
            vf x = load_elements(src, r, c, n);
            x = t.sub ? v_sub(x, v_load_n(t.sub + c, n)) : x;
            x = t.mul ? v_mul(x, v_load_n(t.mul + c, n)) : x;
            v_store_n(dst + c, v_rotate(x, t.block), n);
        }
        for (size_t c = 0; c < d && t.block > VLEN; c += t.block)
            rotate_vectors(dst + c, t.block);
        for (size_t c = 0; c < d; c += VLEN) {
            const size_t n = lanes_left(c, d);
            vf x = v_load_n(dst + c, n);
            x = t.block > 1 ? v_mul(x, norm) : x;
            x = t.mul_after ? v_mul(x, v_load_n(t.mul_after + c, n)) : x;
            x = t.add_after ? v_add(x, v_load_n(t.add_after + c, n)) : x;
            v_store_n(dst + c, x, n);
        }
        for (size_t c = d; c < n_padded; c++)
            dst[c] = 0.0f;
    }
    return KVC_OK;
}
