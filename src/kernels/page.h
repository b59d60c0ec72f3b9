/* page.h - single elements of a page: the meaning of the bytes that docs/formats.md describes. */
#ifndef KVC_PAGE_H
#define KVC_PAGE_H

#include "half.h"
#include "layout.h"

/* Byte of a line of INT4 codes that holds element e, and the shift of its nibble. */
static inline uint32_t kvc_nibble_byte(uint32_t e)
{
    const uint32_t nibble = (e & 1u) * 4 + (e & 7u) / 2;
    return e / 8 * 4 + nibble / 2;
}

static inline uint32_t kvc_nibble_shift(uint32_t e)
{
    const uint32_t nibble = (e & 1u) * 4 + (e & 7u) / 2;
    return nibble % 2 * 4;
}

/* What is added to a code before it is stored; CHANNEL codes are unsigned already. */
static inline int kvc_page_bias(uint8_t format, uint8_t scale, int bias8)
{
    if (format == KVC_F16 || scale == KVC_SCALE_CHANNEL)
        return 0;
    return format == KVC_INT8 ? bias8 : KVC_BIAS4;
}

/* A sealed page without rows: codes of 0, scales 0. */
static inline void kvc_page_clear(const struct kvc_page_layout *layout, uint8_t *page)
{
    const int k = kvc_page_bias(layout->k_format, layout->k_scale, KVC_BIAS8_K);
    const int v = kvc_page_bias(layout->v_format, layout->v_scale, KVC_BIAS8_V);
    memset(page, layout->k_format == KVC_INT4 ? k * 17 : k, layout->v_codes);
    memset(page + layout->v_codes, layout->v_format == KVC_INT4 ? v * 17 : v,
           layout->k_params - layout->v_codes);
    memset(page + layout->k_params, 0, layout->n_bytes - layout->k_params);
}

/* Element e of a line of codes, its bias taken off, or its half. */
static inline float kvc_line_element(uint8_t format, int bias, const uint8_t *line, uint32_t e)
{
    uint16_t half;
    switch (format) {
    case KVC_F16: memcpy(&half, line + 2 * (size_t)e, sizeof(half)); return kvc_half_to_float(half);
    case KVC_INT8: return (float)((int)line[e] - bias);
    default: return (float)((line[kvc_nibble_byte(e)] >> kvc_nibble_shift(e) & 15) - bias);
    }
}

static inline float kvc_param_half(const uint8_t *params, size_t i)
{
    uint16_t half;
    memcpy(&half, params + 2 * i, sizeof(half));
    return kvc_half_to_float(half);
}

/* A code (or half) with its parameters applied. */
static inline float kvc_page_scaled(uint8_t format, uint8_t scale, const uint8_t *params,
                                    uint32_t d8, uint32_t token, uint32_t channel, float code)
{
    float head;
    if (format == KVC_F16)
        return code;
    switch (scale) {
    case KVC_SCALE_TOKEN: return code * kvc_param_half(params, token);
    case KVC_SCALE_CHANNEL:
        return code * kvc_param_half(params, channel) + kvc_param_half(params, d8 + channel);
    default: memcpy(&head, params, sizeof(head)); return code * head;
    }
}

static inline float kvc_page_k(const struct kvc_page_layout *layout, const uint8_t *page,
                               uint32_t token, uint32_t channel)
{
    const int bias = kvc_page_bias(layout->k_format, layout->k_scale, KVC_BIAS8_K);
    const float code =
        kvc_line_element(layout->k_format, bias, page + (size_t)token * layout->k_stride, channel);
    return kvc_page_scaled(layout->k_format, layout->k_scale, page + layout->k_params, layout->d8_k,
                           token, channel, code);
}

static inline float kvc_page_v(const struct kvc_page_layout *layout, const uint8_t *page,
                               uint32_t token, uint32_t channel)
{
    const int bias = kvc_page_bias(layout->v_format, layout->v_scale, KVC_BIAS8_V);
    const uint32_t line = layout->v_row_major ? token : channel;
    const uint32_t e = layout->v_row_major ? channel : token;
    const float code = kvc_line_element(
        layout->v_format, bias, page + layout->v_codes + (size_t)line * layout->v_stride, e);
    return kvc_page_scaled(layout->v_format, layout->v_scale, page + layout->v_params, layout->d8_v,
                           token, channel, code);
}

#endif
