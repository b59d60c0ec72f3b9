/*
 * quant_tmpl.h - template of the SIMD kernels on the caller's rows.
 * Parameters: KVC_FN (name suffix), VLEN, and the words of vec_avx2.h.
 */
#include <float.h>
#include <math.h>

#include "../codes.h"
#include "../kernels.h"

static inline vf load_elements(const struct kvc_rows *rows, size_t r, size_t c, size_t n)
{
    const size_t i = r * rows->stride + c;
    switch (rows->dtype) {
    case KVC_DTYPE_F16: return v_load_half((const uint16_t *)rows->data + i, n);
    case KVC_DTYPE_BF16: return v_load_bf16((const uint16_t *)rows->data + i, n);
    default: return v_load_n((const float *)rows->data + i, n);
    }
}

static inline vm finite_lanes(vf x)
{
    return v_lt(v_abs(x), v_set1(INFINITY));
}

/* Range of each lane. */
struct span {
    vf min, max;
};

static inline struct span no_span(void)
{
    return (struct span){.min = v_set1(FLT_MAX), .max = v_set1(-FLT_MAX)};
}

static inline void span_extend(struct span *span, vf x, vm counted)
{
    span->min = v_select(counted, v_min(x, span->min), span->min);
    span->max = v_select(counted, v_max(x, span->max), span->max);
}

static inline struct kvc_range settled(float min, float max)
{
    const bool any = min <= max;
    return (struct kvc_range){.min = any ? min : 0.0f, .max = any ? max : 0.0f};
}

static inline struct span span_row(const struct kvc_rows *src, size_t r, struct span span,
                                   uint64_t *n_nonfinite)
{
    for (size_t c = 0; c < src->n_cols; c += VLEN) {
        const size_t n = lanes_left(c, src->n_cols);
        const vf x = load_elements(src, r, c, n);
        const vm counted = m_and(finite_lanes(x), m_first(n));
        span_extend(&span, x, counted);
        *n_nonfinite += n - m_count(counted);
    }
    return span;
}

kvc_status KVC_FN(kvc_range_rows)(const struct kvc_queue *queue, const struct kvc_rows *src,
                                  struct kvc_range *range)
{
    struct span span = no_span();
    uint64_t n_nonfinite = 0;

    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++)
        span = span_row(src, r, span, &n_nonfinite);
    *range = settled(v_hmin(span.min), v_hmax(span.max));
    range->n_nonfinite = n_nonfinite;
    return KVC_OK;
}

/* struct kvc_coder for each lane. */
struct lane_coder {
    vf offset, factor, lo, hi;
};

static inline struct lane_coder same_coder(const struct kvc_coder *coder)
{
    return (struct lane_coder){.offset = v_set1(coder->offset),
                               .factor = v_set1(coder->factor),
                               .lo = v_set1((float)coder->lo),
                               .hi = v_set1((float)coder->hi)};
}

/* Clamping to whole numbers before rounding gives the same as after it, and fits an int. */
static inline vi round_code(vf y, vf lo, vf hi)
{
    return i_round(v_min(v_max(v_number(y), lo), hi));
}

static inline vf scale_code(const struct lane_coder *coder, vf x)
{
    return v_mul(v_sub(v_number(x), coder->offset), coder->factor);
}

static inline vi encode(const struct lane_coder *coder, vf x)
{
    return round_code(scale_code(coder, x), coder->lo, coder->hi);
}

/* How many finite elements lie beyond the codes. */
static inline uint32_t count_saturated(const struct lane_coder *coder, vf x, vm clipped)
{
    const vf one = v_set1(1.0f);
    const vf y =
        v_from_i(round_code(scale_code(coder, x), v_sub(coder->lo, one), v_add(coder->hi, one)));
    const vm beyond = m_or(v_lt(y, coder->lo), v_lt(coder->hi, y));
    return m_count(m_and(m_and(beyond, clipped), finite_lanes(x)));
}

/* Codes c ... c + n - 1 of a row; the nibble after an odd end is 0. */
static inline void store_codes(uint8_t *row, size_t c, int bits, vi codes, size_t n)
{
    if (bits == 8)
        b_store(row + c, i_bytes(codes), n);
    else
        b_store(row + c / 2, b_pack_nibbles(i_bytes(i_keep(m_first(n), codes))), (n + 1) / 2);
}

kvc_status KVC_FN(kvc_quantize_fixed)(const struct kvc_queue *queue, const struct kvc_rows *src,
                                      const struct kvc_fixed_code *code, uint8_t *dst,
                                      size_t dst_stride)
{
    const vf factor = v_set1(code->factor);
    const vf lo = v_set1((float)code->lo), hi = v_set1((float)code->hi);

    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++)
        for (size_t c = 0; c < src->n_cols; c += VLEN) {
            const size_t n = lanes_left(c, src->n_cols);
            const vf x = load_elements(src, r, c, n);
            const vf y = code->divide ? v_div(x, factor) : v_mul(x, factor);
            store_codes(dst + r * dst_stride, c, code->bits, round_code(y, lo, hi), n);
        }
    return KVC_OK;
}

kvc_status KVC_FN(kvc_quantize_tokens)(const struct kvc_queue *queue, const struct kvc_rows *src,
                                       int bits, uint8_t *dst, size_t dst_stride, uint16_t *scales,
                                       size_t scale_stride, uint64_t *n_saturated)
{
    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++) {
        uint64_t n_nonfinite = 0;
        const struct span span = span_row(src, r, no_span(), &n_nonfinite);
        const struct kvc_range range = settled(v_hmin(span.min), v_hmax(span.max));
        const struct kvc_coder coder =
            kvc_token_coder(range.min, range.max, bits, &scales[r * scale_stride]);
        const struct lane_coder lanes = same_coder(&coder);
        for (size_t c = 0; c < src->n_cols; c += VLEN) {
            const size_t n = lanes_left(c, src->n_cols);
            const vf x = load_elements(src, r, c, n);
            store_codes(dst + r * dst_stride, c, bits, encode(&lanes, x), n);
            if (coder.clipped)
                *n_saturated += count_saturated(&lanes, x, m_first(n));
        }
    }
    return KVC_OK;
}

/* The coders of n channels, one a lane, their parameters, and which are clipped. */
static inline struct lane_coder channel_coders(const struct span *span, size_t n, int bits,
                                               uint16_t *scales, uint16_t *minima,
                                               uint64_t *clipped)
{
    float min[VLEN], max[VLEN], offset[VLEN] = {0}, factor[VLEN] = {0};
    v_store(min, span->min);
    v_store(max, span->max);
    *clipped = 0;
    for (size_t i = 0; i < n; i++) {
        const struct kvc_range range = settled(min[i], max[i]);
        const struct kvc_coder coder =
            kvc_channel_coder(range.min, range.max, bits, &scales[i], &minima[i]);
        offset[i] = coder.offset;
        factor[i] = coder.factor;
        *clipped |= (uint64_t)coder.clipped << i;
    }
    return (struct lane_coder){.offset = v_load(offset),
                               .factor = v_load(factor),
                               .lo = v_zero(),
                               .hi = v_set1(bits == 8 ? 255.0f : 15.0f)};
}

kvc_status KVC_FN(kvc_quantize_channels)(const struct kvc_queue *queue, const struct kvc_rows *src,
                                         int bits, uint8_t *dst, size_t dst_stride,
                                         uint16_t *scales, uint16_t *minima, uint64_t *n_saturated)
{
    const vi half_range = i_set1(bits == 8 ? -128 : -8);

    (void)queue;
    for (size_t c = 0; c < src->n_cols; c += VLEN) {
        const size_t n = lanes_left(c, src->n_cols);
        struct span span = no_span();
        for (size_t r = 0; r < src->n_rows; r++) {
            const vf x = load_elements(src, r, c, n);
            span_extend(&span, x, finite_lanes(x));
        }
        uint64_t clipped;
        const struct lane_coder lanes =
            channel_coders(&span, n, bits, scales + c, minima + c, &clipped);
        for (size_t r = 0; r < src->n_rows; r++) {
            const vf x = load_elements(src, r, c, n);
            const vi codes = i_add(encode(&lanes, x), half_range);
            store_codes(dst + r * dst_stride, c, bits, codes, n);
            if (clipped)
                *n_saturated += count_saturated(&lanes, x, m_bits(clipped));
        }
    }
    return KVC_OK;
}

static inline vf load_codes(const uint8_t *row, size_t c, int bits, size_t n)
{
    const vb codes =
        bits == 8 ? b_load(row + c, n) : b_unpack_nibbles(b_load(row + c / 2, (n + 1) / 2));
    return v_from_i(i_from_bytes(codes));
}

kvc_status KVC_FN(kvc_dequantize_rows)(const struct kvc_queue *queue, const uint8_t *codes,
                                       size_t src_stride, const struct kvc_dequant *params,
                                       size_t n_rows, size_t n_cols, float *dst, size_t dst_stride)
{
    const vf half_range = v_set1(params->bits == 8 ? 128.0f : 8.0f);

    (void)queue;
    for (size_t r = 0; r < n_rows; r++) {
        const bool by_row = params->scales && !params->minima;
        const vf scale = v_set1(by_row ? kvc_half_to_float(params->scales[r * params->scale_stride])
                                       : params->scale);
        for (size_t c = 0; c < n_cols; c += VLEN) {
            const size_t n = lanes_left(c, n_cols);
            const vf code = load_codes(codes + r * src_stride, c, params->bits, n);
            vf x = v_mul(code, scale);
            if (params->minima)
                x = v_add(v_mul(v_add(code, half_range), v_load_half(params->scales + c, n)),
                          v_load_half(params->minima + c, n));
            v_store_n(dst + r * dst_stride + c, x, n);
        }
    }
    return KVC_OK;
}

/* The largest finite magnitude of a row, after saturation. */
static inline float saturated_absmax(const struct kvc_rows *src, size_t r)
{
    vf absmax = v_zero();
    for (size_t c = 0; c < src->n_cols; c += VLEN) {
        const vf a = v_abs(load_elements(src, r, c, lanes_left(c, src->n_cols)));
        absmax = v_select(v_lt(a, v_set1(INFINITY)), v_max(a, absmax), absmax);
    }
    return fminf(v_hmax(absmax), KVC_HALF_MAX);
}

kvc_status KVC_FN(kvc_store_rows)(const struct kvc_queue *queue, const struct kvc_rows *src,
                                  uint16_t *dst, size_t dst_stride, size_t n_padded,
                                  struct kvc_store_counts *counts)
{
    const vf half_max = v_set1(KVC_HALF_MAX);

    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++) {
        uint16_t *row = dst + r * dst_stride;
        const vf absmax = v_set1(saturated_absmax(src, r));
        for (size_t c = 0; c < src->n_cols; c += VLEN) {
            const size_t n = lanes_left(c, src->n_cols);
            const vf x = load_elements(src, r, c, n), a = v_abs(x);
            const vm finite = finite_lanes(x);
            counts->n_nonfinite += VLEN - m_count(finite);
            counts->n_saturated += m_count(m_and(finite, v_lt(half_max, a)));
            const vf limit = v_select(finite, half_max, absmax);
            const vf number = v_number(x);
            v_store_half(row + c, v_copysign(v_min(v_abs(number), limit), number), n);
        }
        for (size_t c = src->n_cols; c < n_padded; c++)
            row[c] = 0;
    }
    return KVC_OK;
}

kvc_status KVC_FN(kvc_load_rows)(const struct kvc_queue *queue, const struct kvc_rows *src,
                                 float *dst, size_t dst_stride, size_t n_padded)
{
    (void)queue;
    for (size_t r = 0; r < src->n_rows; r++) {
        float *row = dst + r * dst_stride;
        for (size_t c = 0; c < src->n_cols; c += VLEN) {
            const size_t n = lanes_left(c, src->n_cols);
            v_store_n(row + c, load_elements(src, r, c, n), n);
        }
        for (size_t c = src->n_cols; c < n_padded; c++)
            row[c] = 0;
    }
    return KVC_OK;
}
