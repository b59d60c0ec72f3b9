/* ref/rows.c - the definition of attention over rows of an engine, in plain C. */
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "../rows.h"

static const uint8_t *row_at(const struct kvc_stored_rows *rows, uint32_t head, uint32_t token)
{
    return rows->data + token * rows->token_stride + head * rows->head_stride;
}

static float mask_of(const struct kvc_rows_tile *tile, uint32_t row, uint32_t key)
{
    if (!tile->mask)
        return 0.0f;
    return tile->mask_dtype == KVC_DTYPE_F32
               ? ((const float *)tile->mask[row])[key]
               : kvc_half_to_float(((const uint16_t *)tile->mask[row])[key]);
}

static float logit(const struct kvc_rows_tile *tile, const float *q, uint32_t head, uint32_t key)
{
    const uint8_t *k = row_at(&tile->k, head, key);
    float dot = 0.0f;
    for (uint32_t c = 0; c < tile->k.d; c++)
        dot += q[c] * kvc_row_element(tile->k.format, k, c);
    const float s = dot * tile->scale;
    return tile->softcap > 0.0f ? tile->softcap * tanhf(s / tile->softcap) : s;
}

static void attend_row(const struct kvc_rows_tile *tile, uint32_t head, uint32_t row)
{
    const size_t i = (size_t)head * tile->n_rows + row;
    float *s = tile->work, *o = tile->o + i * kvc_attend_stride(tile->v.d);
    float m = -INFINITY, l = 0.0f;

    for (uint32_t t = 0; t < tile->n_seen[row]; t++) {
        const float mask = mask_of(tile, row, t);
        if (mask == -INFINITY)
            continue;
        s[t] = logit(tile, tile->q + i * kvc_attend_stride(tile->k.d), head, t) + mask;
        m = s[t] > m ? s[t] : m;
    }
    memset(o, 0, kvc_attend_stride(tile->v.d) * sizeof(*o));
    for (uint32_t t = 0; t < tile->n_seen[row]; t++) {
        if (mask_of(tile, row, t) == -INFINITY)
            continue;
        const float weight = expf(s[t] - m);
        l += weight;
        for (uint32_t c = 0; c < tile->v.d; c++)
            o[c] += weight * kvc_row_element(tile->v.format, row_at(&tile->v, head, t), c);
    }
    tile->m[i] = isnan(l) ? l : m;
    tile->l[i] = l;
}

kvc_status kvc_attend_rows_ref(const struct kvc_queue *queue, const struct kvc_rows_tile *tile)
{
    (void)queue;
    for (uint32_t head = 0; head < tile->n_heads; head++)
        for (uint32_t row = 0; row < tile->n_rows; row++)
            attend_row(tile, head, row);
    return KVC_OK;
}
