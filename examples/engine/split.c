/* Floats as pairs of halves. */
#include "split.h"

static float *row_of(const kvc_view *view, size_t t, size_t h)
{
    return (float *)view->data + t * view->token_stride + h * view->head_stride;
}

/* Veltkamp's splitting; needs arithmetic that is not reordered. */
static float upper_bits(float x)
{
    const float c = x * 8193.0f;

    return c - (c - x);
}

void split_keys(const kvc_view *src, float *dst)
{
    const size_t d = src->head_dim;

    for (size_t t = 0; t < src->n_tokens; t++)
        for (size_t h = 0; h < src->n_heads; h++, dst += 2 * d)
            for (size_t i = 0; i < d; i++) {
                const float x = row_of(src, t, h)[i];
                dst[i] = upper_bits(x);
                dst[d + i] = (x - dst[i]) * 2048.0f;
            }
}

void split_queries(const kvc_view *src, float *dst)
{
    const size_t d = src->head_dim;

    for (size_t t = 0; t < src->n_tokens; t++)
        for (size_t h = 0; h < src->n_heads; h++, dst += 2 * d)
            for (size_t i = 0; i < d; i++) {
                dst[i] = row_of(src, t, h)[i];
                dst[d + i] = dst[i] / 2048.0f;
            }
}

void split_join(const float *src, const kvc_view *dst)
{
    const size_t d = dst->head_dim;

    for (size_t t = 0; t < dst->n_tokens; t++)
        for (size_t h = 0; h < dst->n_heads; h++, src += 2 * d)
            for (size_t i = 0; i < d; i++)
                row_of(dst, t, h)[i] = src[i] + src[d + i] / 2048.0f;
}
