/* page.h - single elements of a page: the meaning of the bytes that docs/formats.md describes. */
#ifndef KVC_PAGE_H
#define KVC_PAGE_H

#include "half.h"
#include "layout.h"

/* Byte of a line of INT4 codes that holds element e, and the shift of its nibble. */
KVC_BOTH static inline uint32_t kvc_nibble_byte(uint32_t e)
{
    const uint32_t nibble = (e & 1u) * 4 + (e & 7u) / 2;
    return e / 8 * 4 + nibble / 2;
}

KVC_BOTH static inline uint32_t kvc_nibble_shift(uint32_t e)
{
    const uint32_t nibble = (e & 1u) * 4 + (e & 7u) / 2;
    return nibble % 2 * 4;
}

/* The same for the two high bits of INT6 codes, in the plane behind the nibbles of a line of d8. */
KVC_BOTH static inline uint32_t kvc_pair_byte(uint32_t e, uint32_t d8)
{
    const uint32_t pair = (e & 1u) * 4 + (e & 7u) / 2;
    return d8 / 2 + e / 8 * 2 + pair / 4;
}

KVC_BOTH static inline uint32_t kvc_pair_shift(uint32_t e)
{
    const uint32_t pair = (e & 1u) * 4 + (e & 7u) / 2;
    return pair % 4 * 2;
}

/* What is added to a code before it is stored; CHANNEL codes are unsigned already. */
KVC_BOTH static inline int kvc_page_bias(uint8_t format, uint8_t scale, int bias8)
{
    if (format == KVC_F16 || scale == KVC_SCALE_CHANNEL)
        return 0;
    return format == KVC_INT8 ? bias8 : format == KVC_INT6 ? KVC_BIAS6 : KVC_BIAS4;
}

/* A sealed page without rows: codes of 0, scales 0. */
KVC_BOTH static inline void kvc_page_clear(const struct kvc_page_layout *layout, uint8_t *page)
{
    const int k = kvc_page_bias(layout->k_format, layout->k_scale, KVC_BIAS8_K);
    const int v = kvc_page_bias(layout->v_format, layout->v_scale, KVC_BIAS8_V);
    memset(page, layout->k_format == KVC_INT4 ? k * 17 : k, layout->v_codes);
    if (layout->k_format == KVC_INT6) {
        memset(page, 0, layout->v_codes); /* 32 & 15, then 32 >> 4 four times */
        for (uint32_t at = layout->d8_k / 2u; at < layout->v_codes; at += layout->k_stride)
            memset(page + at, 0xaa, layout->d8_k / 4u);
    }
    memset(page + layout->v_codes, layout->v_format == KVC_INT4 ? v * 17 : v,
           layout->k_params - layout->v_codes);
    memset(page + layout->k_params, 0, layout->n_bytes - layout->k_params);
}

KVC_BOTH static inline int kvc_line_nibble(const uint8_t *line, uint32_t e)
{
    return line[kvc_nibble_byte(e)] >> kvc_nibble_shift(e) & 15;
}

KVC_BOTH static inline int kvc_line_pair(const uint8_t *line, uint32_t e, uint32_t d8)
{
    return line[kvc_pair_byte(e, d8)] >> kvc_pair_shift(e) & 3;
}

/* Element e of a line of d8 codes, its bias taken off, or its half. */
KVC_BOTH static inline float kvc_line_element(uint8_t format, int bias, const uint8_t *line,
                                              uint32_t e, uint32_t d8)
{
    uint16_t half;
    switch (format) {
    case KVC_F16: memcpy(&half, line + 2 * (size_t)e, sizeof(half)); return kvc_half_to_float(half);
    case KVC_INT8: return (float)((int)line[e] - bias);
    case KVC_INT6:
        return (float)(kvc_line_nibble(line, e) + 16 * kvc_line_pair(line, e, d8) - bias);
    default: return (float)(kvc_line_nibble(line, e) - bias);
    }
}

KVC_BOTH static inline float kvc_param_half(const uint8_t *params, size_t i)
{
    uint16_t half;
    memcpy(&half, params + 2 * i, sizeof(half));
    return kvc_half_to_float(half);
}

/* A code (or half) with its parameters applied. */
KVC_BOTH static inline float kvc_page_scaled(uint8_t format, uint8_t scale, const uint8_t *params,
                                             uint32_t d8, uint32_t token, uint32_t channel,
                                             float code)
{
    float head;
    uint32_t group;
    if (format == KVC_F16)
        return code;
    switch (scale) {
    case KVC_SCALE_TOKEN:
        group = kvc_group_of(channel, kvc_scale_groups(format, scale, d8));
        return code * kvc_param_half(params, (size_t)group * KVC_PAGE_ROWS + token);
    case KVC_SCALE_CHANNEL:
        return code * kvc_param_half(params, channel) + kvc_param_half(params, d8 + channel);
    default: memcpy(&head, params, sizeof(head)); return code * head;
    }
}

KVC_BOTH static inline float kvc_page_k(const struct kvc_page_layout *layout, const uint8_t *page,
                                        uint32_t token, uint32_t channel)
{
    const int bias = kvc_page_bias(layout->k_format, layout->k_scale, KVC_BIAS8_K);
    const float code = kvc_line_element(
        layout->k_format, bias, page + (size_t)token * layout->k_stride, channel, layout->d8_k);
    return kvc_page_scaled(layout->k_format, layout->k_scale, page + layout->k_params, layout->d8_k,
                           token, channel, code);
}

KVC_BOTH static inline float kvc_page_v(const struct kvc_page_layout *layout, const uint8_t *page,
                                        uint32_t token, uint32_t channel)
{
    const int bias = kvc_page_bias(layout->v_format, layout->v_scale, KVC_BIAS8_V);
    const uint32_t line = layout->v_row_major ? token : channel;
    const uint32_t e = layout->v_row_major ? channel : token;
    const float code =
        kvc_line_element(layout->v_format, bias,
                         page + layout->v_codes + (size_t)line * layout->v_stride, e, layout->d8_v);
    return kvc_page_scaled(layout->v_format, layout->v_scale, page + layout->v_params, layout->d8_v,
                           token, channel, code);
}

#endif
