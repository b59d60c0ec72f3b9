/* ref/rope.c - the definition of rotating rows, in plain C. */
#include "../kernels.h"

kvc_status kvc_rotate_rows_ref(const struct kvc_queue *queue, float *x, size_t n_rows,
                               size_t stride, const float *c, const float *s, size_t n_pairs,
                               bool interleaved)
{
    (void)queue;
    for (size_t r = 0; r < n_rows; r++, x += stride, c += n_pairs, s += n_pairs)
        for (size_t j = 0; j < n_pairs; j++) {
            float *a = x + (interleaved ? 2 * j : j), *b = a + (interleaved ? 1 : n_pairs);
            const float turned = *a * c[j] - *b * s[j];
            *b = *a * s[j] + *b * c[j];
            *a = turned;
        }
    return KVC_OK;
}
