/* ref/transform.c - the definition of the kernel that transforms rows. */
#include <math.h>

#include "../kernels.h"

static void rotate(float *x, size_t block)
{
    const float norm = (float)(1.0 / sqrt((double)block));

    for (size_t h = 1; h < block; h *= 2)
        for (size_t i = 0; i < block; i++) {
            if (i & h)
                continue;
            const float a = x[i], b = x[i + h];
            x[i] = a + b;
            x[i + h] = a - b;
        }
    for (size_t i = 0; i < block; i++)
        x[i] *= norm;
}

kvc_status kvc_transform_rows_ref(const struct kvc_queue *queue, const struct kvc_rows *src,
                                  const struct kvc_row_transform *transform, float *dst,
                                  size_t dst_stride, size_t n_padded)
{
    const struct kvc_row_transform t = *transform;

    kvc_load_rows_ref(queue, src, dst, dst_stride, n_padded);
    for (size_t r = 0; r < src->n_rows; r++, dst += dst_stride) {
        for (size_t c = 0; c < src->n_cols && t.sub; c++)
            dst[c] -= t.sub[c];
        for (size_t c = 0; c < src->n_cols && t.mul; c++)
            dst[c] *= t.mul[c];
        for (size_t c = 0; c < src->n_cols && t.block > 1; c += t.block)
            rotate(dst + c, t.block);
        for (size_t c = 0; c < src->n_cols && t.mul_after; c++)
            dst[c] *= t.mul_after[c];
        for (size_t c = 0; c < src->n_cols && t.add_after; c++)
            dst[c] += t.add_after[c];
    }
    return KVC_OK;
}
