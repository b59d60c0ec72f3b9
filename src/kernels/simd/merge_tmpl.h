/*
 * merge_tmpl.h - template of the SIMD kernel that mixes rows: the bits of ref/merge.c.
 * Parameters: KVC_FN (name suffix), VLEN, the words of vec_avx2.h, and those of quant_tmpl.h.
 */
#include "../kernels.h"

kvc_status KVC_FN(kvc_mix_rows)(const struct kvc_queue *queue, const float *a, float w_a,
                                const float *b, float w_b, size_t n, float *out)
{
    const vf by_a = v_set1(w_a), by_b = v_set1(w_b);

    (void)queue;
    for (size_t i = 0; i < n; i += VLEN) {
        const size_t left = lanes_left(i, n);
        const vf x = v_mul(v_load_n(a + i, left), by_a), y = v_mul(v_load_n(b + i, left), by_b);
        v_store_n(out + i, v_add(x, y), left);
    }
    return KVC_OK;
}
