/* ref/page.c - the definition of the kernels on pages: sealing, reading, moving rows. */
#include <string.h>

#include "../codes.h"
#include "../kernels.h"
#include "../page.h"

/* One side (K or V) of a page while it is sealed: its rows as floats, and where its codes go. */
struct side {
    const uint16_t *src; /* [64][src_stride] halves */
    size_t src_stride;
    uint32_t d, d8, n_rows;
    uint8_t format;
    bool by_channel; /* codes [d8][64], else [64][d8] */
    uint32_t stride; /* bytes between rows of codes */
    int bias;
    uint8_t *codes;
};

static void put_bits(uint8_t *at, uint32_t shift, unsigned mask, unsigned bits)
{
    *at = (uint8_t)((*at & ~(mask << shift)) | (bits & mask) << shift);
}

/* Writes a stored (unsigned) code or half at row r, element e of its line of codes. */
static void put(const struct side *side, uint32_t token, uint32_t channel, unsigned stored)
{
    const uint32_t line = side->by_channel ? channel : token;
    const uint32_t e = side->by_channel ? token : channel;
    uint8_t *at = side->codes + (size_t)line * side->stride;
    if (side->format == KVC_F16) {
        const uint16_t half = (uint16_t)stored;
        memcpy(at + 2 * (size_t)e, &half, sizeof(half));
    } else if (side->format == KVC_INT8) {
        at[e] = (uint8_t)stored;
    } else {
        put_bits(at + kvc_nibble_byte(e), kvc_nibble_shift(e), 15, stored);
        if (side->format == KVC_INT6)
            put_bits(at + kvc_pair_byte(e, side->d8), kvc_pair_shift(e), 3, stored >> 4);
    }
}

static float value(const struct side *side, uint32_t token, uint32_t channel)
{
    return kvc_half_to_float(side->src[token * side->src_stride + channel]);
}

/* Codes of tokens first ... last - 1 and channels begin ... end - 1 under one coder. */
static void encode(const struct side *side, const struct kvc_coder *coder, int bias, uint32_t first,
                   uint32_t last, uint32_t begin, uint32_t end)
{
    for (uint32_t t = first; t < last; t++)
        for (uint32_t c = begin; c < end; c++)
            put(side, t, c, (unsigned)(kvc_code(coder, value(side, t, c)) + bias));
}

/* The channels begin ... end - 1 of all tokens, with scales of their own. */
static void seal_group(const struct side *side, int bits, uint32_t begin, uint32_t end,
                       uint8_t *params)
{
    for (uint32_t t = 0; t < side->n_rows; t++) {
        float min = value(side, t, begin), max = min;
        for (uint32_t c = begin + 1; c < end; c++) {
            min = fminf(min, value(side, t, c));
            max = fmaxf(max, value(side, t, c));
        }
        uint16_t scale;
        const struct kvc_coder coder = kvc_token_coder(min, max, bits, &scale);
        memcpy(params + 2 * (size_t)t, &scale, sizeof(scale));
        encode(side, &coder, side->bias, t, t + 1, begin, end);
    }
}

static void seal_tokens(const struct side *side, int bits, uint8_t *params)
{
    const uint32_t n = kvc_scale_groups(side->format, KVC_SCALE_TOKEN, side->d8);
    for (uint32_t g = 0; g < n; g++)
        seal_group(side, bits, g * KVC_GROUP_CHANNELS,
                   g + 1 < n ? (g + 1) * KVC_GROUP_CHANNELS : side->d,
                   params + (size_t)g * KVC_PAGE_ROWS * 2);
}

static void seal_channels(const struct side *side, int bits, uint8_t *params)
{
    for (uint32_t c = 0; c < side->d; c++) {
        float min = value(side, 0, c), max = min;
        for (uint32_t t = 1; t < side->n_rows; t++) {
            min = fminf(min, value(side, t, c));
            max = fmaxf(max, value(side, t, c));
        }
        uint16_t half[2];
        const struct kvc_coder coder = kvc_channel_coder(min, max, bits, &half[0], &half[1]);
        memcpy(params + 2 * (size_t)c, &half[0], sizeof(half[0]));
        memcpy(params + 2 * ((size_t)side->d8 + c), &half[1], sizeof(half[1]));
        encode(side, &coder, 0, 0, side->n_rows, c, c + 1);
    }
}

static void seal_head(const struct side *side, int bits, float absmax, uint8_t *params)
{
    const struct kvc_coder coder = {.factor = kvc_fixed_factor(absmax, bits),
                                    .lo = -kvc_code_max(bits),
                                    .hi = kvc_code_max(bits)};
    const float scale = kvc_fixed_scale(absmax, bits);
    memcpy(params, &scale, sizeof(scale));
    encode(side, &coder, side->bias, 0, side->n_rows, 0, side->d);
}

static void seal_side(const struct side *side, uint8_t scale, float absmax, uint8_t *params)
{
    const int bits = (int)kvc_code_bits(side->format);

    if (side->format == KVC_F16) {
        for (uint32_t t = 0; t < side->n_rows; t++)
            for (uint32_t c = 0; c < side->d; c++)
                put(side, t, c, side->src[t * side->src_stride + c]);
    } else if (scale == KVC_SCALE_TOKEN) {
        seal_tokens(side, bits, params);
    } else if (scale == KVC_SCALE_CHANNEL) {
        seal_channels(side, bits, params);
    } else {
        seal_head(side, bits, absmax, params);
    }
}

kvc_status kvc_seal_page_ref(const struct kvc_queue *queue, const struct kvc_seal_job *job)
{
    const struct kvc_page_layout *from = job->from, *to = job->to;
    const struct side k = {
        .src = (const uint16_t *)(const void *)job->src,
        .src_stride = from->d8_k,
        .d = to->d_k,
        .d8 = to->d8_k,
        .n_rows = job->n_rows,
        .format = to->k_format,
        .stride = to->k_stride,
        .bias = kvc_page_bias(to->k_format, to->k_scale, KVC_BIAS8_K),
        .codes = job->dst,
    };
    const struct side v = {
        .src = (const uint16_t *)(const void *)(job->src + from->v_codes),
        .src_stride = from->d8_v,
        .d = to->d_v,
        .d8 = to->d8_v,
        .n_rows = job->n_rows,
        .format = to->v_format,
        .by_channel = true,
        .stride = to->v_stride,
        .bias = kvc_page_bias(to->v_format, to->v_scale, KVC_BIAS8_V),
        .codes = job->dst + to->v_codes,
    };

    (void)queue;
    kvc_page_clear(to, job->dst);
    seal_side(&k, to->k_scale, job->absmax_k, job->dst + to->k_params);
    seal_side(&v, to->v_scale, job->absmax_v, job->dst + to->v_params);
    return KVC_OK;
}

kvc_status kvc_read_page_ref(const struct kvc_queue *queue, const struct kvc_page_layout *layout,
                             const uint8_t *page, uint32_t first, uint32_t n_rows, float *k,
                             size_t k_stride, float *v, size_t v_stride)
{
    (void)queue;
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t c = 0; k && c < layout->d_k; c++)
            k[r * k_stride + c] = kvc_page_k(layout, page, first + r, c);
        for (uint32_t c = 0; v && c < layout->d_v; c++)
            v[r * v_stride + c] = kvc_page_v(layout, page, first + r, c);
    }
    return KVC_OK;
}

/* Copies element src_e of a line of codes of V, or of half parameters, to dst_e. */
static void move_element(uint8_t format, const uint8_t *src, uint32_t src_e, uint8_t *dst,
                         uint32_t dst_e)
{
    if (format == KVC_F16) {
        memmove(dst + 2 * (size_t)dst_e, src + 2 * (size_t)src_e, 2);
    } else if (format == KVC_INT8) {
        dst[dst_e] = src[src_e];
    } else {
        put_bits(dst + kvc_nibble_byte(dst_e), kvc_nibble_shift(dst_e), 15,
                 (unsigned)kvc_line_nibble(src, src_e));
    }
}

/* The scales of a token in n_bytes of parameters: one in each 64. */
static void move_scales(const uint8_t *src, uint32_t from, uint8_t *dst, uint32_t to,
                        uint32_t n_bytes)
{
    for (uint32_t at = 0; at < n_bytes; at += KVC_PAGE_ROWS * 2)
        move_element(KVC_F16, src + at, from, dst + at, to);
}

kvc_status kvc_move_rows_ref(const struct kvc_queue *queue, const struct kvc_page_layout *layout,
                             const uint8_t *src, const uint8_t *src_rows, uint32_t n_rows,
                             uint8_t *dst, uint32_t dst_row)
{
    const uint8_t *src_v = src + layout->v_codes;
    uint8_t *dst_v = dst + layout->v_codes;
    const size_t k_stride = layout->k_stride, v_stride = layout->v_stride;

    (void)queue;
    for (uint32_t i = 0; i < n_rows; i++) {
        const uint32_t from = src_rows ? src_rows[i] : i, to = dst_row + i;
        memmove(dst + to * k_stride, src + from * k_stride, k_stride);
        move_scales(src + layout->k_params, from, dst + layout->k_params, to,
                    layout->v_params - layout->k_params);
        move_scales(src + layout->v_params, from, dst + layout->v_params, to,
                    kvc_params_size(layout->v_format, layout->v_scale, layout->d8_v));
        if (layout->v_row_major) {
            memmove(dst_v + to * v_stride, src_v + from * v_stride, v_stride);
            continue;
        }
        for (uint32_t c = 0; c < layout->d8_v; c++)
            move_element(layout->v_format, src_v + c * v_stride, from, dst_v + c * v_stride, to);
    }
    return KVC_OK;
}

kvc_status kvc_clear_page_ref(const struct kvc_queue *queue, const struct kvc_page_layout *layout,
                              uint8_t *page)
{
    (void)queue;
    kvc_page_clear(layout, page);
    return KVC_OK;
}
