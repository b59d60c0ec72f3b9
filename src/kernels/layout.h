/* layout.h - where the parts of a page lie; docs/formats.md has the same in words. */
#ifndef KVC_LAYOUT_H
#define KVC_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "both.h"
#include "kvc/base.h"

#define KVC_PAGE_ROWS 64

/* INT8 codes in pages are stored as code + bias in a byte. */
#define KVC_BIAS8_K 128
#define KVC_BIAS8_V 128
/* INT4 codes in pages, K and V. */
#define KVC_BIAS4 8
/* INT6 codes, K only. */
#define KVC_BIAS6 32

/* Nibble i of a 32-bit word (least significant first) holds this one of its 8 elements. */
static const uint8_t kvc_nibble_element[8] = {0, 2, 4, 6, 1, 3, 5, 7};

struct kvc_page_layout {
    uint16_t d_k, d_v;                            /* elements of a row */
    uint16_t d8_k, d8_v;                          /* the same, padded to 8 */
    uint8_t k_format, v_format, k_scale, v_scale; /* kvc_format, kvc_scale */
    bool v_row_major;                             /* V is [token][d8_v], else [d8_v][64] */
    uint32_t k_stride;                            /* bytes from one token of K to the next */
    uint32_t v_stride; /* bytes from one token (row-major) or channel of V to the next */
    uint32_t v_codes, k_params, v_params; /* offsets in bytes; K codes begin at 0 */
    uint32_t
        ordinals; /* offset of int32 [64], the token of each row; 0: rows are consecutive tokens */
    uint32_t groups;  /* offset of struct kvc_groups (cache/state.h); 0: no row was merged */
    uint32_t n_bytes; /* a multiple of 128 */
};

KVC_BOTH static inline uint32_t kvc_code_bits(uint8_t format)
{
    return format == KVC_F16 ? 16 : format == KVC_INT8 ? 8 : format == KVC_INT6 ? 6 : 4;
}

/* Channels that share a scale of a token in fewer than 8 bits; the last group takes the rest. */
#define KVC_GROUP_CHANNELS 64
#define KVC_MAX_GROUPS     (KVC_MAX_HEAD_DIM / KVC_GROUP_CHANNELS)

KVC_BOTH static inline uint32_t kvc_scale_groups(uint8_t format, uint8_t scale, uint32_t d8)
{
    if (kvc_code_bits(format) >= 8 || scale != KVC_SCALE_TOKEN || d8 < 2 * KVC_GROUP_CHANNELS)
        return 1;
    return d8 / KVC_GROUP_CHANNELS;
}

KVC_BOTH static inline uint32_t kvc_group_of(uint32_t channel, uint32_t n_groups)
{
    const uint32_t group = channel / KVC_GROUP_CHANNELS;
    return group < n_groups ? group : n_groups - 1;
}

KVC_BOTH static inline uint32_t kvc_params_size(uint8_t format, uint8_t scale, uint32_t d8)
{
    if (format == KVC_F16)
        return 0;
    switch (scale) {
    case KVC_SCALE_TOKEN: return kvc_scale_groups(format, scale, d8) * KVC_PAGE_ROWS * 2;
    case KVC_SCALE_CHANNEL: return d8 * 4; /* scales, then minima */
    default: return 4;
    }
}

/* The layout of a page of n_rows tokens (64 but for the strip of sinks, which is row-major). */
KVC_BOTH static inline struct kvc_page_layout
kvc_page_layout_make(int d_k, int d_v, uint8_t k_format, uint8_t k_scale, uint8_t v_format,
                     uint8_t v_scale, bool v_row_major, uint32_t n_rows)
{
    struct kvc_page_layout p = {
        .d_k = (uint16_t)d_k,
        .d_v = (uint16_t)d_v,
        .d8_k = (uint16_t)((d_k + 7) & ~7),
        .d8_v = (uint16_t)((d_v + 7) & ~7),
        .k_format = k_format,
        .v_format = v_format,
        .k_scale = k_scale,
        .v_scale = v_scale,
        .v_row_major = v_row_major,
    };
    p.k_stride = p.d8_k * kvc_code_bits(k_format) / 8;
    p.v_stride = (v_row_major ? p.d8_v : KVC_PAGE_ROWS) * kvc_code_bits(v_format) / 8;
    p.v_codes = p.k_stride * n_rows;
    p.k_params = p.v_codes + p.v_stride * (v_row_major ? n_rows : p.d8_v);
    p.v_params = p.k_params + kvc_params_size(k_format, k_scale, p.d8_k);
    p.n_bytes = (p.v_params + kvc_params_size(v_format, v_scale, p.d8_v) + 127u) & ~127u;
    return p;
}

#endif
