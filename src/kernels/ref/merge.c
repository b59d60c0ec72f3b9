/* ref/merge.c - the definition of mixing rows, in plain C. */
#include "../kernels.h"

kvc_status kvc_mix_rows_ref(const struct kvc_queue *queue, const float *a, float w_a,
                            const float *b, float w_b, size_t n, float *out)
{
    (void)queue;
    for (size_t i = 0; i < n; i++)
        out[i] = a[i] * w_a + b[i] * w_b;
    return KVC_OK;
}
