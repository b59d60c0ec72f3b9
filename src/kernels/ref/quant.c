/* ref/quant.c - the definition of the kernels on the caller's rows, in plain C. */
#include <float.h>

#include "../codes.h"
#include "../kernels.h"

static float element(const struct kvc_rows *rows, size_t r, size_t c)
{
    const size_t i = r * rows->stride + c;
    switch (rows->dtype) {
    case KVC_DTYPE_F16: return kvc_half_to_float(((const uint16_t *)rows->data)[i]);
    case KVC_DTYPE_BF16: return kvc_bf16_to_float(((const uint16_t *)rows->data)[i]);
    default: return ((const float *)rows->data)[i];
    }
}

/* Extends a range that begins as {FLT_MAX, -FLT_MAX, 0} by one element. */
static void extend(struct kvc_range *range, float x)
{
    if (!isfinite(x)) {
        range->n_nonfinite++;
        return;
    }
    range->min = x < range->min ? x : range->min;
    range->max = x > range->max ? x : range->max;
}

static void settle(struct kvc_range *range)
{
    if (range->min > range->max)
        range->min = range->max = 0.0f;
}

static const struct kvc_range no_range = {.min = FLT_MAX, .max = -FLT_MAX};

kvc_status kvc_range_rows_ref(const struct kvc_queue *queue, const struct kvc_rows *src,
                              struct kvc_range *range)
{
    (void)queue;
    *range = no_range;
    for (size_t r = 0; r < src->n_rows; r++)
        for (size_t c = 0; c < src->n_cols; c++)
            extend(range, element(src, r, c));
    settle(range);
    return KVC_OK;
}

/* Writes code c of a row; low nibbles come first and clear the byte. */
static void put_code(uint8_t *row, size_t c, int bits, int code)
{
    if (bits == 8)
        row[c] = (uint8_t)code;
    else if (c % 2 == 0)
        row[c / 2] = (uint8_t)(code & 15);
    else
        row[c / 2] = (uint8_t)(row[c / 2] | (unsigned)code << 4);
}

static int get_code(const uint8_t *row, size_t c, int bits)
{
    if (bits == 8)
        return (int8_t)row[c];
    const int nibble = row[c / 2] >> (c % 2 * 4) & 15;
    return nibble - (nibble & 8) * 2;
}

kvc_status kvc_quantize_fixed_ref(const struct kvc_queue *queue, const struct kvc_rows *src,
                                  const struct kvc_fixed_code *code, uint8_t *dst,
                                  size_t dst_stride)
{
    const struct kvc_coder coder = {.factor = 1.0f, .lo = code->lo, .hi = code->hi};

    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++)
        for (size_t c = 0; c < src->n_cols; c++) {
            const float x = element(src, r, c);
            const float y = code->divide ? x / code->factor : x * code->factor;
            put_code(dst + r * dst_stride, c, code->bits, kvc_code(&coder, y));
        }
    return KVC_OK;
}

kvc_status kvc_quantize_tokens_ref(const struct kvc_queue *queue, const struct kvc_rows *src,
                                   int bits, uint8_t *dst, size_t dst_stride, uint16_t *scales,
                                   size_t scale_stride, uint64_t *n_saturated)
{
    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++) {
        struct kvc_range range = no_range;
        for (size_t c = 0; c < src->n_cols; c++)
            extend(&range, element(src, r, c));
        settle(&range);
        const struct kvc_coder coder =
            kvc_token_coder(range.min, range.max, bits, &scales[r * scale_stride]);
        for (size_t c = 0; c < src->n_cols; c++) {
            const float x = element(src, r, c);
            put_code(dst + r * dst_stride, c, bits, kvc_code(&coder, x));
            *n_saturated += kvc_code_saturates(&coder, x);
        }
    }
    return KVC_OK;
}

kvc_status kvc_quantize_channels_ref(const struct kvc_queue *queue, const struct kvc_rows *src,
                                     int bits, uint8_t *dst, size_t dst_stride, uint16_t *scales,
                                     uint16_t *minima, uint64_t *n_saturated)
{
    (void)queue;
    for (size_t c = 0; c < src->n_cols; c++) {
        struct kvc_range range = no_range;
        for (size_t r = 0; r < src->n_rows; r++)
            extend(&range, element(src, r, c));
        settle(&range);
        const struct kvc_coder coder =
            kvc_channel_coder(range.min, range.max, bits, &scales[c], &minima[c]);
        const int bias = (coder.hi + 1) / 2;
        for (size_t r = 0; r < src->n_rows; r++) {
            const float x = element(src, r, c);
            put_code(dst + r * dst_stride, c, bits, kvc_code(&coder, x) - bias);
            *n_saturated += kvc_code_saturates(&coder, x);
        }
    }
    return KVC_OK;
}

kvc_status kvc_dequantize_rows_ref(const struct kvc_queue *queue, const uint8_t *codes,
                                   size_t src_stride, const struct kvc_dequant *params,
                                   size_t n_rows, size_t n_cols, float *dst, size_t dst_stride)
{
    const int bias = params->bits == 8 ? 128 : 8;

    (void)queue;
    for (size_t r = 0; r < n_rows; r++)
        for (size_t c = 0; c < n_cols; c++) {
            const int code = get_code(codes + r * src_stride, c, params->bits);
            float *x = &dst[r * dst_stride + c];
            if (params->minima)
                *x = (float)(code + bias) * kvc_half_to_float(params->scales[c]) +
                     kvc_half_to_float(params->minima[c]);
            else if (params->scales)
                *x = (float)code * kvc_half_to_float(params->scales[r * params->scale_stride]);
            else
                *x = (float)code * params->scale;
        }
    return KVC_OK;
}

/* A finite value inside the range of halves. */
static float saturate(float x)
{
    return fminf(fmaxf(x, -KVC_HALF_MAX), KVC_HALF_MAX);
}

kvc_status kvc_store_rows_ref(const struct kvc_queue *queue, const struct kvc_rows *src,
                              uint16_t *dst, size_t dst_stride, size_t n_padded,
                              struct kvc_store_counts *counts)
{
    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++) {
        uint16_t *row = dst + r * dst_stride;
        float absmax = 0.0f;
        for (size_t c = 0; c < src->n_cols; c++) {
            const float a = fabsf(element(src, r, c));
            absmax = isfinite(a) && a > absmax ? a : absmax;
        }
        absmax = saturate(absmax);
        for (size_t c = 0; c < src->n_cols; c++) {
            const float x = element(src, r, c);
            counts->n_nonfinite += isfinite(x) ? 0 : 1;
            counts->n_saturated += isfinite(x) && fabsf(x) > KVC_HALF_MAX;
            const float y = isnan(x) ? 0.0f : isinf(x) ? copysignf(absmax, x) : saturate(x);
            row[c] = kvc_half_from_float(y);
        }
        for (size_t c = src->n_cols; c < n_padded; c++)
            row[c] = 0;
    }
    return KVC_OK;
}

kvc_status kvc_load_rows_ref(const struct kvc_queue *queue, const struct kvc_rows *src, float *dst,
                             size_t dst_stride, size_t n_padded)
{
    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++) {
        for (size_t c = 0; c < src->n_cols; c++)
            dst[r * dst_stride + c] = element(src, r, c);
        for (size_t c = src->n_cols; c < n_padded; c++)
            dst[r * dst_stride + c] = 0.0f;
    }
    return KVC_OK;
}
