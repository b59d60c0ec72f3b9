/*
 * page_tmpl.h - template of the SIMD kernels that seal and read pages.
 * Parameters: KVC_FN (name suffix), VLEN, the words of vec_avx2.h, and those of quant_tmpl.h,
 * lines_tmpl.h and attend_tmpl.h.
 */
#include "../page.h"

/* One side (K or V) of a page while it is sealed: its rows, and where its codes go. */
struct side {
    const uint16_t *src; /* [64][d8] halves, all finite */
    uint32_t d, d8, n_rows;
    uint8_t format, scale;
    uint32_t stride; /* bytes between lines of codes */
    int bias;
    uint8_t *codes, *params;
    struct ahead ahead; /* what is sealed next */
};

/* The coders of a side: by channel or by token. */
struct side_coders {
    bool by_channel;
    uint32_t n_groups;
    float offset[KVC_MAX_HEAD_DIM], factor[KVC_MAX_HEAD_DIM];
    vf lo, hi;
};

V_INLINE vf load_side(const struct side *side, uint32_t t, uint32_t c, size_t n)
{
    return v_load_half(side->src + (size_t)t * side->d8 + c, n);
}

/* Of VLEN tokens from t on, over the channels begin ... end - 1: max, and min with its sign turned,
 * neither below 0; both 0 for tokens that are not there. */
static inline void token_spans(const struct side *side, uint32_t t, uint32_t begin, uint32_t end,
                               vf *max, vf *down)
{
    vf high[VLEN], low[VLEN];
    for (uint32_t i = 0; i < VLEN; i++) {
        vf most = v_zero(), least = v_zero();
        uint32_t c = begin;
        for (; t + i < side->n_rows && c + VLEN <= end; c += VLEN) {
            const vf x = load_side(side, t + i, c, VLEN);
            most = v_max(x, most);
            least = v_min(x, least);
        }
        if (t + i < side->n_rows && c < end) {
            const vf x = load_side(side, t + i, c, end - c);
            most = v_max(x, most);
            least = v_min(x, least);
        }
        high[i] = most;
        low[i] = v_sub(v_zero(), least);
    }
    *max = v_hmax_all(high);
    *down = v_hmax_all(low);
}

/* The scales that kvc_token_coder() gives, as floats. */
V_INLINE vf token_scales(vf max, vf down, int bits)
{
    const vf absmax = v_max(max, down);
    const vf extreme = v_select(v_lt(max, down), v_sub(v_zero(), down), max);
    const vf exact = bits == 8 ? v_div(absmax, v_set1(127.0f))
                               : v_div(extreme, v_set1((float)kvc_token_code_min(bits)));
    const vf scale = v_copysign(v_half_up(v_min(v_abs(exact), v_set1(KVC_HALF_MAX))), exact);
    return v_select(v_lt(absmax, v_set1(KVC_QUANT_TINY)), v_zero(), scale);
}

/* The coder of a group of channels of token t has the number group * 64 + t. */
static inline void token_coders(const struct side *side, int bits, struct side_coders *coders)
{
    const uint32_t n_groups = coders->n_groups;
    uint16_t *scales = (uint16_t *)(void *)side->params;
    for (uint32_t g = 0; g < n_groups; g++) {
        const uint32_t begin = g * KVC_GROUP_CHANNELS;
        const uint32_t end = g + 1 < n_groups ? begin + KVC_GROUP_CHANNELS : side->d;
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN) {
            const size_t i = (size_t)g * KVC_PAGE_ROWS + t;
            vf max, down;
            token_spans(side, t, begin, end, &max, &down);
            const vf scale = token_scales(max, down, bits);
            v_store_half(scales + i, scale, VLEN);
            const vm empty = v_lt(v_abs(scale), v_set1(KVC_QUANT_TINY));
            const vf factor = v_div(v_set1(1.0f), v_select(empty, v_set1(1.0f), scale));
            v_store(coders->factor + i, v_select(empty, v_zero(), factor));
        }
    }
    coders->lo = v_set1((float)kvc_token_code_min(bits));
    coders->hi = v_set1((float)kvc_code_max(bits));
}

static inline void side_channel_coders(const struct side *side, int bits,
                                       struct side_coders *coders)
{
    for (uint32_t c = 0; c < side->d; c += VLEN) {
        const size_t n = lanes_left(c, side->d);
        struct span span = no_span();
        for (uint32_t t = 0; t < side->n_rows; t++)
            span_extend(&span, load_side(side, t, c, n), m_first(n));
        uint16_t scales[VLEN], minima[VLEN];
        uint64_t clipped;
        const struct lane_coder lanes = channel_coders(&span, n, bits, scales, minima, &clipped);
        memcpy(side->params + 2 * (size_t)c, scales, 2 * n);
        memcpy(side->params + 2 * ((size_t)side->d8 + c), minima, 2 * n);
        v_store(coders->offset + c, lanes.offset);
        v_store(coders->factor + c, lanes.factor);
        coders->lo = lanes.lo;
        coders->hi = lanes.hi;
    }
}

static inline void head_coders(const struct side *side, int bits, float absmax,
                               struct side_coders *coders)
{
    const float scale = kvc_fixed_scale(absmax, bits), factor = kvc_fixed_factor(absmax, bits);
    memcpy(side->params, &scale, sizeof(scale));
    for (uint32_t t = 0; t < side->n_rows; t++)
        coders->factor[t] = factor;
    coders->lo = v_set1((float)-kvc_code_max(bits));
    coders->hi = v_set1((float)kvc_code_max(bits));
}

static inline void make_coders(const struct side *side, float absmax, struct side_coders *coders)
{
    const int bits = (int)kvc_code_bits(side->format);
    coders->by_channel = side->scale == KVC_SCALE_CHANNEL;
    coders->n_groups = kvc_scale_groups(side->format, side->scale, side->d8);
    if (side->scale == KVC_SCALE_CHANNEL)
        side_channel_coders(side, bits, coders);
    else if (side->scale == KVC_SCALE_TOKEN)
        token_coders(side, bits, coders);
    else
        head_coders(side, bits, absmax, coders);
}

/* VLEN stored codes of token t from channel c on, of which n are there. Pads are loaded as 0 and
 * have offset 0: they get the code of 0. */
V_INLINE vb encode_side(bool by_channel, const struct side *side, const struct side_coders *coders,
                        uint32_t t, uint32_t c, size_t n)
{
    const uint32_t group = kvc_group_of(c, coders->n_groups);
    vf x = load_side(side, t, c, n);
    if (by_channel)
        x = v_mul(v_sub(x, v_load(coders->offset + c)), v_load(coders->factor + c));
    else
        x = v_mul(x, v_set1(coders->factor[group * KVC_PAGE_ROWS + t]));
    const vi codes = i_round(v_min(v_max(x, coders->lo), coders->hi));
    return i_bytes(i_add(codes, i_set1(side->bias)));
}

/* n stored codes (a multiple of 8) from element e of a line on. */
V_INLINE void store_line(uint8_t format, const struct side *side, uint32_t line, uint32_t e,
                         vb codes, size_t n)
{
    uint8_t *at = side->codes + (size_t)line * side->stride;
    if (format == KVC_INT8) {
        b_store(at + e, codes, n);
        return;
    }
    b_store(at + e / 2, b_pack_page_nibbles(codes), n / 2);
    if (format == KVC_INT6)
        b_store(at + side->d8 / 2 + e / 4, b_pack_page_pairs(codes), n / 4);
}

V_INLINE void seal_rows(uint8_t format, bool by_channel, struct side *side,
                        const struct side_coders *coders)
{
    for (uint32_t t = 0; t < side->n_rows; t++) {
        uint32_t c = 0;
        look_ahead(&side->ahead, (size_t)2 * side->d8);
        for (; c + VLEN <= side->d; c += VLEN)
            store_line(format, side, t, c, encode_side(by_channel, side, coders, t, c, VLEN), VLEN);
        if (c < side->d8)
            store_line(format, side, t, c,
                       encode_side(by_channel, side, coders, t, c, lanes_left(c, side->d)),
                       lanes_left(c, side->d8));
    }
}

/* Tiles of 16 tokens and 16 channels are coded by token and turned. */
V_INLINE void seal_columns(uint8_t format, bool by_channel, struct side *side,
                           const struct side_coders *coders)
{
    uint8_t tile[16][16];
    for (uint32_t c0 = 0; c0 < side->d8; c0 += 16)
        for (uint32_t t0 = 0; t0 < side->n_rows; t0 += 16) {
            const bool whole = c0 + 16 <= side->d && t0 + 16 <= side->n_rows;
            look_ahead(&side->ahead, sizeof(uint16_t[16][16]));
            if (!whole)
                memset(tile, side->bias, sizeof(tile));
            for (uint32_t t = 0; whole && t < 16; t++) {
                V_UNROLL
                for (uint32_t c = 0; c < 16; c += VLEN)
                    b_store(&tile[t][c],
                            encode_side(by_channel, side, coders, t0 + t, c0 + c, VLEN), VLEN);
            }
            for (uint32_t t = t0; !whole && t < side->n_rows && t < t0 + 16; t++)
                for (uint32_t c = c0; c < side->d8 && c < c0 + 16; c += VLEN)
                    b_store(&tile[t - t0][c - c0],
                            encode_side(by_channel, side, coders, t, c, lanes_left(c, side->d)),
                            VLEN);
            b_transpose16(tile);
            for (uint32_t c = c0; c < side->d8 && c < c0 + 16; c++)
                store_line(format, side, c, t0, b_load(tile[c - c0], 16), 16);
        }
}

static inline void seal_keys(struct side *side, const struct side_coders *coders)
{
    const bool by_channel = coders->by_channel;
    if (side->format == KVC_INT6)
        seal_rows(KVC_INT6, false, side, coders); /* TOKEN only */
    else if (side->format == KVC_INT8 && by_channel)
        seal_rows(KVC_INT8, true, side, coders);
    else if (side->format == KVC_INT8)
        seal_rows(KVC_INT8, false, side, coders);
    else if (by_channel)
        seal_rows(KVC_INT4, true, side, coders);
    else
        seal_rows(KVC_INT4, false, side, coders);
}

static inline void seal_values(struct side *side, const struct side_coders *coders)
{
    const bool by_channel = coders->by_channel;
    if (side->format == KVC_INT8 && by_channel)
        seal_columns(KVC_INT8, true, side, coders);
    else if (side->format == KVC_INT8)
        seal_columns(KVC_INT8, false, side, coders);
    else if (by_channel)
        seal_columns(KVC_INT4, true, side, coders);
    else
        seal_columns(KVC_INT4, false, side, coders);
}

static inline void copy_rows(const struct side *side)
{
    for (uint32_t t = 0; t < side->n_rows; t++)
        memcpy(side->codes + (size_t)t * side->stride, side->src + (size_t)t * side->d8,
               side->d * sizeof(*side->src));
}

static inline void copy_columns(const struct side *side)
{
    for (uint32_t c0 = 0; c0 < side->d; c0 += 8)
        for (uint32_t t0 = 0; t0 < side->n_rows; t0 += 8) {
            const size_t n = side->d - c0 < 8 ? side->d - c0 : 8;
            uint16_t tile[8][8] = {{0}};
            for (uint32_t t = t0; t < side->n_rows && t < t0 + 8; t++)
                memcpy(tile[t - t0], side->src + (size_t)t * side->d8 + c0, 2 * n);
            b_transpose8_u16(tile);
            for (uint32_t c = c0; c < c0 + 8; c++)
                memcpy(side->codes + (size_t)c * side->stride + 2 * (size_t)t0, tile[c - c0], 16);
        }
}

kvc_status KVC_FN(kvc_seal_page)(const struct kvc_queue *queue, const struct kvc_seal_job *job)
{
    const struct kvc_page_layout *from = job->from, *to = job->to;
    struct side k = {
        .src = (const uint16_t *)(const void *)job->src,
        .d = to->d_k,
        .d8 = to->d8_k,
        .n_rows = job->n_rows,
        .format = to->k_format,
        .scale = to->k_scale,
        .stride = to->k_stride,
        .bias = kvc_page_bias(to->k_format, to->k_scale, KVC_BIAS8_K),
        .codes = job->dst,
        .params = job->dst + to->k_params,
        .ahead = ahead_of(job->src + from->v_codes, from->k_params - from->v_codes),
    };
    struct side v = {
        .src = (const uint16_t *)(const void *)(job->src + from->v_codes),
        .d = to->d_v,
        .d8 = to->d8_v,
        .n_rows = job->n_rows,
        .format = to->v_format,
        .scale = to->v_scale,
        .stride = to->v_stride,
        .bias = kvc_page_bias(to->v_format, to->v_scale, KVC_BIAS8_V),
        .codes = job->dst + to->v_codes,
        .params = job->dst + to->v_params,
        .ahead = job->after ? ahead_of(job->after, from->v_codes) : (struct ahead){.size = 0},
    };
    struct side_coders coders;

    (void)queue;
    kvc_page_clear(to, job->dst);
    if (k.format == KVC_F16) {
        copy_rows(&k);
    } else {
        make_coders(&k, job->absmax_k, &coders);
        seal_keys(&k, &coders);
    }
    if (v.format == KVC_F16) {
        copy_columns(&v);
    } else {
        make_coders(&v, job->absmax_v, &coders);
        seal_values(&v, &coders);
    }
    return KVC_OK;
}

/* One side (K or V) of a page while it is read. */
struct read_side {
    const uint8_t *codes, *params;
    size_t stride; /* bytes between lines of codes */
    uint32_t d, d8, first, n_rows;
    uint8_t format, scale;
    float *dst;
    size_t dst_stride;
    uint32_t n_groups;
    float scales[KVC_MAX_GROUPS * KVC_PAGE_ROWS]; /* of tokens; not for CHANNEL */
};

/* Codes i ... i + n - 1 of a line as the numbers of channels from c on; n is VLEN or 8. */
V_INLINE vf read_numbers(enum reader reader, const struct read_side *side, const uint8_t *line,
                         uint32_t i, float scale, uint32_t c, size_t n)
{
    const uint16_t *scales = (const uint16_t *)(const void *)side->params;
    const vf codes = read_line(reader, line, i, n);
    switch (reader) {
    case READ_F16: return codes;
    case READ_INT8_UNSIGNED:
    case READ_INT4_UNSIGNED:
        return v_add(v_mul(codes, v_load_half(scales + c, n)),
                     v_load_half(scales + side->d8 + c, n));
    default: return v_mul(codes, v_set1(scale));
    }
}

/* Channels c ... end - 1 of token t: the codes of a line, from its start on. */
V_INLINE void read_row(enum reader reader, const struct read_side *side, const uint8_t *line,
                       uint32_t t, uint32_t c, uint32_t end)
{
    float *row = side->dst + (t - side->first) * side->dst_stride;
    for (uint32_t i = 0; c < end; c += VLEN, i += VLEN) {
        const uint32_t group = kvc_group_of(c, side->n_groups);
        const float scale = side->scales[group * KVC_PAGE_ROWS + t];
        if (c + VLEN <= end)
            v_store(row + c, read_numbers(reader, side, line, i, scale, c, VLEN));
        else
            v_store_n(row + c,
                      read_numbers(reader, side, line, i, scale, c, lanes_left(c, side->d8)),
                      end - c);
    }
}

V_INLINE void read_rows(enum reader reader, const struct read_side *side)
{
    for (uint32_t t = side->first; t < side->first + side->n_rows; t++)
        read_row(reader, side, side->codes + t * side->stride, t, 0, side->d);
}

static inline void read_six(const struct read_side *side)
{
    uint8_t codes[KVC_MAX_HEAD_DIM];
    for (uint32_t t = side->first; t < side->first + side->n_rows; t++) {
        const struct lines line = {.data = side->codes + t * side->stride, .n = 1, .len = side->d8};
        widen(&line, codes);
        read_row(READ_INT8, side, codes, t, 0, side->d);
    }
}

static inline enum reader stored_reader(uint8_t format, uint8_t scale)
{
    if (!has_channels(format, scale))
        return code_reader(format, READ_F16);
    return format == KVC_INT8 ? READ_INT8_UNSIGNED : READ_INT4_UNSIGNED;
}

static inline void read_lines_of_tokens(const struct read_side *side)
{
    switch (stored_reader(side->format, side->scale)) {
    case READ_F16: read_rows(READ_F16, side); break;
    case READ_INT8: read_rows(READ_INT8, side); break;
    case READ_INT8_UNSIGNED: read_rows(READ_INT8_UNSIGNED, side); break;
    case READ_INT4: read_rows(READ_INT4, side); break;
    default: read_rows(READ_INT4_UNSIGNED, side);
    }
}

/* A tile of 16 channels as 16 tokens: bytes, for INT4 too, with the bias of INT8. */
static inline void turn_codes(const struct read_side *side, uint32_t t, uint32_t c,
                              uint8_t tile[16][16])
{
    const int bias = side->scale == KVC_SCALE_CHANNEL ? 0 : KVC_BIAS8_V - KVC_BIAS4;
    for (uint32_t i = 0; i < 16 && c + i < side->d8; i++) {
        const uint8_t *line = side->codes + (c + i) * side->stride;
        b_store(tile[i],
                side->format == KVC_INT8 ? b_load(line + t, 16)
                                         : b_unpack_page_nibbles(b_load(line + t / 2, 8), bias),
                16);
    }
    b_transpose16(tile);
}

static inline void turn_halves(const struct read_side *side, uint32_t t, uint32_t c,
                               uint16_t tile[16][16])
{
    uint16_t part[8][8];
    for (uint32_t i = 0; i < 16 && c + i < side->d8; i += 8)
        for (uint32_t j = 0; j < 16; j += 8) {
            for (uint32_t k = 0; k < 8; k++)
                memcpy(part[k], side->codes + (c + i + k) * side->stride + 2 * (size_t)(t + j), 16);
            b_transpose8_u16(part);
            for (uint32_t k = 0; k < 8; k++)
                memcpy(&tile[j + k][i], part[k], 16);
        }
}

V_INLINE void read_columns(enum reader reader, const struct read_side *side)
{
    const uint32_t last = side->first + side->n_rows;
    uint16_t halves[16][16] = {{0}};
    uint8_t bytes[16][16] = {{0}};
    for (uint32_t c = 0; c < side->d; c += 16)
        for (uint32_t t0 = side->first & ~15u; t0 < last; t0 += 16) {
            if (reader == READ_F16)
                turn_halves(side, t0, c, halves);
            else
                turn_codes(side, t0, c, bytes);
            for (uint32_t t = t0 < side->first ? side->first : t0; t < last && t < t0 + 16; t++)
                read_row(reader, side,
                         reader == READ_F16 ? (const uint8_t *)halves[t - t0] : bytes[t - t0], t, c,
                         side->d < c + 16 ? side->d : c + 16);
        }
}

static inline void read_lines_of_channels(const struct read_side *side)
{
    if (side->format == KVC_F16)
        read_columns(READ_F16, side);
    else if (side->scale == KVC_SCALE_CHANNEL)
        read_columns(READ_INT8_UNSIGNED, side);
    else
        read_columns(READ_INT8, side);
}

static inline void read_side(struct read_side *side, bool row_major)
{
    side->n_groups = kvc_scale_groups(side->format, side->scale, side->d8);
    for (uint32_t g = 0; g < side->n_groups; g++)
        token_factors(side->format, side->scale, side->params, g, 1.0f,
                      side->scales + (size_t)g * KVC_PAGE_ROWS);
    if (side->format == KVC_INT6)
        read_six(side);
    else if (row_major)
        read_lines_of_tokens(side);
    else
        read_lines_of_channels(side);
}

kvc_status KVC_FN(kvc_read_page)(const struct kvc_queue *queue,
                                 const struct kvc_page_layout *layout, const uint8_t *page,
                                 uint32_t first, uint32_t n_rows, float *k, size_t k_stride,
                                 float *v, size_t v_stride)
{
    struct read_side k_side = {
        .codes = page,
        .params = page + layout->k_params,
        .stride = layout->k_stride,
        .d = layout->d_k,
        .d8 = layout->d8_k,
        .first = first,
        .n_rows = n_rows,
        .format = layout->k_format,
        .scale = layout->k_scale,
        .dst = k,
        .dst_stride = k_stride,
    };
    struct read_side v_side = {
        .codes = page + layout->v_codes,
        .params = page + layout->v_params,
        .stride = layout->v_stride,
        .d = layout->d_v,
        .d8 = layout->d8_v,
        .first = first,
        .n_rows = n_rows,
        .format = layout->v_format,
        .scale = layout->v_scale,
        .dst = v,
        .dst_stride = v_stride,
    };

    (void)queue;
    if (k)
        read_side(&k_side, true);
    if (v)
        read_side(&v_side, layout->v_row_major);
    return KVC_OK;
}
