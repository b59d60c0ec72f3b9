/* ref/prune.c - the definition of keeping some rows, in plain C. */
#include <string.h>

#include "../kernels.h"

kvc_status kvc_gather_rows_ref(const struct kvc_queue *queue, void *data, size_t row_bytes,
                               size_t stride, const int32_t *rows, size_t n)
{
    char *bytes = data;

    (void)queue;
    for (size_t i = 0; i < n; i++)
        if ((size_t)rows[i] != i)
            memmove(bytes + i * stride, bytes + (size_t)rows[i] * stride, row_bytes);
    return KVC_OK;
}
