/*
 * rope_tmpl.h - template of the SIMD kernel that rotates rows: the bits of ref/rope.c.
 * Parameters: KVC_FN (name suffix), VLEN, the words of vec_avx2.h, and those of quant_tmpl.h.
 */
#include "../kernels.h"

/* Pairs (j, j + n). */
static inline void rotate_halves(float *x, const float *c, const float *s, size_t n)
{
    for (size_t j = 0; j < n; j += VLEN) {
        const size_t left = lanes_left(j, n);
        const vf cos = v_load_n(c + j, left), sin = v_load_n(s + j, left);
        const vf a = v_load_n(x + j, left), b = v_load_n(x + n + j, left);
        v_store_n(x + j, v_sub(v_mul(a, cos), v_mul(b, sin)), left);
        v_store_n(x + n + j, v_add(v_mul(a, sin), v_mul(b, cos)), left);
    }
}

/* Pairs (2 j, 2 j + 1). */
static inline void rotate_neighbours(float *x, const float *c, const float *s, size_t n)
{
    for (size_t j = 0; j < n; j += VLEN / 2) {
        const size_t left = n - j < VLEN / 2 ? n - j : VLEN / 2;
        const vf cos = v_twice(v_load_n(c + j, left)), sin = v_twice(v_load_n(s + j, left));
        const vf pairs = v_load_n(x + 2 * j, 2 * left);
        const vf turned = v_sub_add(v_mul(pairs, cos), v_mul(v_swap_pairs(pairs), sin));
        v_store_n(x + 2 * j, turned, 2 * left);
    }
}

kvc_status KVC_FN(kvc_rotate_rows)(const struct kvc_queue *queue, float *x, size_t n_rows,
                                   size_t stride, const float *c, const float *s, size_t n_pairs,
                                   bool interleaved)
{
    (void)queue;
    for (size_t r = 0; r < n_rows; r++, x += stride, c += n_pairs, s += n_pairs)
        if (interleaved)
            rotate_neighbours(x, c, s, n_pairs);
        else
            rotate_halves(x, c, s, n_pairs);
    return KVC_OK;
}
