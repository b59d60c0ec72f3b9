/*
 * attend_tmpl.h - template of the SIMD kernels of attention over pages.
 * Parameters: KVC_FN (name suffix), VLEN, the words of vec_avx2.h, and those of quant_tmpl.h and
 * lines_tmpl.h.
 *
 * Keys and transposed values are both lines of codes: scores are products of query rows with lines
 * of tokens, outputs are products of rows of weights with lines of channels.
 */
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "../page.h"

/* The query rows that see something of a page, and what. */
struct seen {
    uint32_t n;
    uint8_t row[KVC_TILE_ROWS];
    uint64_t mask[KVC_TILE_ROWS], any;
};

static inline struct seen seen_rows(const struct kvc_attend_page *page, uint32_t n_rows)
{
    const uint64_t held = page->n_rows ? ~UINT64_C(0) >> (KVC_PAGE_ROWS - page->n_rows) : 0;
    struct seen seen = {.n = 0};
    for (uint32_t row = 0; row < n_rows; row++) {
        const uint64_t mask = page->mask[row] & held;
        if (!mask)
            continue;
        seen.row[seen.n] = (uint8_t)row;
        seen.mask[seen.n++] = mask;
        seen.any |= mask;
    }
    return seen;
}

static inline void fill(float *factors, float x)
{
    for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN)
        v_store(factors + t, v_set1(x));
}

/* What the products of a group of channels with the codes of each token are multiplied by. */
static inline void token_factors(uint8_t format, uint8_t scale, const uint8_t *params,
                                 uint32_t group, float factor, float *dst)
{
    const vf by = v_set1(factor);
    float head = 1.0f;
    if (format != KVC_F16 && scale == KVC_SCALE_TOKEN) {
        const uint16_t *scales =
            (const uint16_t *)(const void *)params + (size_t)group * KVC_PAGE_ROWS;
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN)
            v_store(dst + t, v_mul(by, v_load_half(scales + t, VLEN)));
        return;
    }
    if (format != KVC_F16 && scale != KVC_SCALE_CHANNEL)
        memcpy(&head, params, sizeof(head));
    fill(dst, factor * head);
}

/* Room in tile->work: a tile of floats, query rows or a tile of bytes, then rows of 64 scores. */
static inline float *folded_rows(const struct kvc_attend_tile *tile)
{
    const size_t d_k = tile->pages[0].layout->d_k;
    return tile->work + TILE_LINES * kvc_attend_stride(d_k > KVC_PAGE_ROWS ? d_k : KVC_PAGE_ROWS);
}

static inline float *score_rows(const struct kvc_attend_tile *tile)
{
    return folded_rows(tile) + KVC_TILE_ROWS * kvc_attend_stride(tile->pages[0].layout->d_k);
}

/* Some channels of a CHANNEL side: their scales, and the numbers of codes that are their bias. */
struct channels {
    vf scale, middle;
};

static inline bool has_channels(uint8_t format, uint8_t scale)
{
    return format != KVC_F16 && scale == KVC_SCALE_CHANNEL;
}

V_INLINE struct channels load_channels(uint8_t format, uint32_t d8, const uint8_t *params,
                                       uint32_t c)
{
    const vf bias = v_set1(format == KVC_INT8 ? KVC_BIAS8_K : KVC_BIAS4);
    const uint16_t *scales = (const uint16_t *)(const void *)params;
    const vf scale = v_load_half(scales + c, lanes_left(c, d8));
    const vf minimum = v_load_half(scales + d8 + c, lanes_left(c, d8));
    return (struct channels){.scale = scale, .middle = v_fma(bias, scale, minimum)};
}

/* CHANNEL keys: q . k is (q scale) . code + q . middle. The rows become the first factor, in dst,
 * and add the last term. */
static inline void fold_channels(const struct kvc_attend_page *page, const float **q, uint32_t n,
                                 float *dst, float *add)
{
    const struct kvc_page_layout *layout = page->layout;
    const uint8_t *params = page->data + layout->k_params;
    const size_t stride = kvc_attend_stride(layout->d_k);
    vf sums[KVC_TILE_ROWS];
    for (uint32_t i = 0; i < n; i++)
        sums[i] = v_zero();
    for (uint32_t c = 0; c < layout->d8_k; c += VLEN) {
        const struct channels k = load_channels(layout->k_format, layout->d8_k, params, c);
        for (uint32_t i = 0; i < n; i++) {
            const vf x = v_load(q[i] + c);
            sums[i] = v_fma(x, k.middle, sums[i]);
            v_store(dst + i * stride + c, v_mul(x, k.scale));
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        add[i] = v_hadd(sums[i]);
        q[i] = dst + i * stride;
    }
}

static inline enum reader key_reader(const struct kvc_page_layout *layout, uint32_t n_groups)
{
    const enum reader reader = code_reader(layout->k_format, READ_F16);
    if (n_groups == 1)
        return reader;
    return reader == READ_INT8 ? READ_INT8_SCALED : READ_INT4_SCALED;
}

/* What the numbers of key_reader() are multiplied by: for each token, or by their scales already.
 */
static inline void key_factors(const struct kvc_attend_tile *tile,
                               const struct kvc_attend_page *page, uint32_t n_groups, float *scales,
                               float *factors)
{
    const struct kvc_page_layout *layout = page->layout;
    const uint8_t *params = page->data + layout->k_params;
    if (n_groups == 1) {
        token_factors(layout->k_format, layout->k_scale, params, 0, tile->scale, factors);
        return;
    }
    fill(factors, tile->scale);
    for (uint32_t g = 0; g < n_groups; g++, scales += KVC_PAGE_ROWS)
        token_factors(layout->k_format, layout->k_scale, params, g, 1.0f, scales);
}

/* Scores of the rows that see something, [seen->n][64]; those that are not seen mean nothing. */
static inline void page_scores(const struct kvc_attend_tile *tile,
                               const struct kvc_attend_page *page, const struct seen *seen,
                               float *scores)
{
    const struct kvc_page_layout *layout = page->layout;
    const uint32_t n_groups = kvc_scale_groups(layout->k_format, layout->k_scale, layout->d8_k);
    const float *q[KVC_TILE_ROWS];
    float scales[KVC_MAX_GROUPS * KVC_PAGE_ROWS], factors[KVC_PAGE_ROWS];
    float add[KVC_TILE_ROWS] = {0};

    key_factors(tile, page, n_groups, scales, factors);
    for (uint32_t i = 0; i < seen->n; i++)
        q[i] = tile->q + seen->row[i] * kvc_attend_stride(layout->d_k);
    if (has_channels(layout->k_format, layout->k_scale))
        fold_channels(page, q, seen->n, folded_rows(tile), add);
    for (uint32_t t = 0; t < page->n_rows; t += TILE_LINES) {
        struct lines lines = {.reader = key_reader(layout, n_groups),
                              .data = page->data + (size_t)t * layout->k_stride,
                              .stride = layout->k_stride,
                              .n = page->n_rows - t < TILE_LINES ? page->n_rows - t : TILE_LINES,
                              .len = layout->d8_k,
                              .n_groups = n_groups,
                              .scales = scales + t};
        if (!(seen->any >> t & 0xffff))
            continue;
        if (layout->k_format == KVC_INT6)
            lines = widen(&lines, (uint8_t *)folded_rows(tile));
        if (seen->n > BLOCK_ROWS)
            lines = unpack(&lines, tile->work);
        multiply(&lines, q, seen->n, scores + t, KVC_PAGE_ROWS);
    }
    for (uint32_t i = 0; i < seen->n; i++, scores += KVC_PAGE_ROWS) {
        const vf shift =
            v_set1(tile->scale * add[i] + (tile->shift ? tile->shift[seen->row[i]] : 0.0f));
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN)
            v_store(scores + t, v_add(v_mul(v_load(scores + t), v_load(factors + t)), shift));
        for (uint64_t left = tile->softcap > 0.0f ? seen->mask[i] : 0; left; left &= left - 1) {
            const int t = __builtin_ctzll(left);
            scores[t] = tile->softcap * tanhf(scores[t] / tile->softcap);
        }
        for (uint32_t t = 0; page->bias && t < KVC_PAGE_ROWS; t += VLEN)
            v_store(scores + t, v_add(v_load(scores + t), v_load(page->bias + t)));
    }
}

/* exp by 2^n exp(r), |r| <= ln 2 / 2, and the Taylor polynomial of degree 7 (error 5e-9). Below
 * -87.3 zero, not a subnormal; NaN stays. */
static inline vf v_exp(vf x)
{
    const vf low = v_set1(-87.3f);
    const vf a = v_min(v_set1(88.3f), v_max(low, x));
    const vi i = i_round(v_mul(a, v_set1(0x1.715476p+0f)));
    const vf n = v_from_i(i);
    const vf r = v_fma(n, v_set1(0x1.05c610p-29f), v_fma(n, v_set1(-0x1.62e430p-1f), a));
    vf p = v_set1(1.0f / 5040);
    p = v_fma(p, r, v_set1(1.0f / 720));
    p = v_fma(p, r, v_set1(1.0f / 120));
    p = v_fma(p, r, v_set1(1.0f / 24));
    p = v_fma(p, r, v_set1(1.0f / 6));
    p = v_fma(p, r, v_set1(0.5f));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_select(v_lt(x, low), v_zero(), v_exp2_scale(p, i));
}

/* The running maximum and sum of one row, taken over one page further. */
struct row_state {
    float m, shrink, page_l;
};

/* Turns scores into weights times factors; what is not seen gets 0 by selection. */
static inline struct row_state page_weights(uint64_t mask, float m, const float *factors, float *s)
{
    struct row_state next;
    vf max = v_set1(-INFINITY), sum = v_zero();
    for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN)
        max = v_max(v_select(m_bits(mask >> t), v_load(s + t), v_set1(-INFINITY)), max);
    const float page_max = v_hmax(max);
    next.m = page_max > m ? page_max : m;
    next.shrink = m == next.m ? 1.0f : m == -INFINITY ? 0.0f : expf(m - next.m);
    for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN) {
        const vm in = m_bits(mask >> t);
        const vf weight = v_exp(v_sub(v_load(s + t), v_set1(next.m)));
        sum = v_add(sum, v_select(in, weight, v_zero()));
        v_store(s + t, v_select(in, v_mul(weight, v_load(factors + t)), v_zero()));
    }
    next.page_l = v_hadd(sum);
    if (isnan(next.page_l)) /* a score is NaN or Inf: the row says so */
        next.m = next.page_l;
    return next;
}

/* Vectors of channels whose sums are kept in registers. */
#define SUM_VECTORS 4

/* o[0 ... n - 1] += the weights times the tokens in mask; n is at most SUM_VECTORS * VLEN. */
V_INLINE void add_channels(const uint8_t *v, size_t stride, uint64_t mask, const float *weights,
                           size_t n, float *o)
{
    vf sums[SUM_VECTORS];
    V_UNROLL
    for (size_t i = 0; i < SUM_VECTORS; i++)
        sums[i] = i * VLEN < n ? v_load(o + i * VLEN) : v_zero();
    for (; mask; mask &= mask - 1) {
        const size_t t = (size_t)__builtin_ctzll(mask);
        const uint16_t *row = (const uint16_t *)(const void *)(v + t * stride);
        V_UNROLL
        for (size_t i = 0; i < SUM_VECTORS; i++)
            if (i * VLEN < n)
                sums[i] = v_fma(v_set1(weights[t]),
                                v_load_half(row + i * VLEN, lanes_left(i * VLEN, n)), sums[i]);
    }
    V_UNROLL
    for (size_t i = 0; i < SUM_VECTORS; i++)
        if (i * VLEN < n)
            v_store(o + i * VLEN, sums[i]);
}

/* Row-major V: only the tokens that the row sees are touched. */
static inline void add_tokens(const struct kvc_attend_page *page, uint64_t mask,
                              const float *weights, float *o)
{
    const struct kvc_page_layout *layout = page->layout;
    const uint8_t *v = page->data + layout->v_codes;
    const size_t block = (size_t)SUM_VECTORS * VLEN;
    size_t c = 0;
    for (; c + block <= layout->d8_v; c += block)
        add_channels(v + 2 * c, layout->v_stride, mask, weights, block, o + c);
    if (c < layout->d8_v)
        add_channels(v + 2 * c, layout->v_stride, mask, weights, layout->d8_v - c, o + c);
}

/* Weights times the factors of a group of channels. */
static inline void group_weights(const struct kvc_page_layout *layout, const uint8_t *params,
                                 uint32_t group, const float *weights, uint32_t n, float *dst)
{
    float factors[KVC_PAGE_ROWS];
    token_factors(layout->v_format, layout->v_scale, params, group, 1.0f, factors);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN, weights += VLEN, dst += VLEN)
            v_store(dst, v_mul(v_load(weights), v_load(factors + t)));
}

/* Transposed V: o[i] += weights[i] times the lines of all channels; sum_w: sums of the weights.
 * Where there are several groups of channels, the weights are without factors yet. */
static inline void add_lines(const struct kvc_attend_tile *tile, const struct kvc_attend_page *page,
                             const struct seen *seen, const float *weights, const float *sum_w,
                             float *const *o)
{
    const struct kvc_page_layout *layout = page->layout;
    const uint8_t *params = page->data + layout->v_params;
    const bool channels = has_channels(layout->v_format, layout->v_scale);
    const uint32_t n_groups = kvc_scale_groups(layout->v_format, layout->v_scale, layout->d8_v);
    float of_group[KVC_TILE_ROWS * KVC_PAGE_ROWS];
    const float *w[KVC_TILE_ROWS];
    for (uint32_t i = 0; i < seen->n; i++)
        w[i] = (n_groups > 1 ? of_group : weights) + (size_t)i * KVC_PAGE_ROWS;
    for (uint32_t c = 0; c < layout->d8_v; c += TILE_LINES) {
        if (n_groups > 1 && c % KVC_GROUP_CHANNELS == 0)
            group_weights(layout, params, kvc_group_of(c, n_groups), weights, seen->n, of_group);
        struct lines lines = {.reader = code_reader(layout->v_format, READ_F16_FINITE),
                              .data = page->data + layout->v_codes + (size_t)c * layout->v_stride,
                              .stride = layout->v_stride,
                              .n = layout->d8_v - c < TILE_LINES ? layout->d8_v - c : TILE_LINES,
                              .len = KVC_PAGE_ROWS};
        float sums[KVC_TILE_ROWS * TILE_LINES];
        if (lines.n < TILE_LINES)
            memset(sums, 0, sizeof(sums));
        if (seen->n > BLOCK_ROWS)
            lines = unpack(&lines, tile->work);
        multiply(&lines, w, seen->n, sums, TILE_LINES);
        for (uint32_t j = 0; j < lines.n; j += VLEN) {
            struct channels v = {0};
            if (channels)
                v = load_channels(layout->v_format, layout->d8_v, params, c + j);
            for (uint32_t i = 0; i < seen->n; i++) {
                vf sum = v_load(sums + (size_t)i * TILE_LINES + j);
                if (channels)
                    sum = v_fma(sum, v.scale, v_mul(v.middle, v_set1(sum_w[i])));
                v_store(o[i] + c + j, v_add(v_load(o[i] + c + j), sum));
            }
        }
    }
}

static inline void scale_row(float *o, size_t n, float by)
{
    for (size_t c = 0; c < n; c += VLEN)
        v_store(o + c, v_mul(v_load(o + c), v_set1(by)));
}

static inline void attend_page(const struct kvc_attend_tile *tile, uint32_t p)
{
    const struct kvc_attend_page *page = &tile->pages[p];
    const struct kvc_page_layout *layout = page->layout;
    const struct seen seen = seen_rows(page, tile->n_rows);
    const size_t stride = kvc_attend_stride(layout->d_v);
    float *scores = score_rows(tile);
    float *o[KVC_TILE_ROWS];
    float factors[KVC_PAGE_ROWS], sum_w[KVC_TILE_ROWS];

    if (!seen.any)
        return;
    page_scores(tile, page, &seen, scores);
    if (kvc_scale_groups(layout->v_format, layout->v_scale, layout->d8_v) == 1)
        token_factors(layout->v_format, layout->v_scale, page->data + layout->v_params, 0, 1.0f,
                      factors);
    else
        fill(factors, 1.0f);
    for (uint32_t i = 0; i < seen.n; i++) {
        const uint32_t row = seen.row[i];
        const struct row_state next =
            page_weights(seen.mask[i], tile->m[row], factors, scores + (size_t)i * KVC_PAGE_ROWS);
        o[i] = tile->o + row * stride;
        sum_w[i] = next.page_l;
        if (next.shrink != 1.0f)
            scale_row(o[i], stride, next.shrink);
        tile->m[row] = next.m;
        tile->l[row] = tile->l[row] * next.shrink + next.page_l;
        if (tile->page_m) {
            tile->page_m[p * tile->n_rows + row] = next.m;
            tile->page_l[p * tile->n_rows + row] = next.page_l;
        }
    }
    if (!layout->v_row_major) {
        add_lines(tile, page, &seen, scores, sum_w, o);
        return;
    }
    for (uint32_t i = 0; i < seen.n; i++)
        add_tokens(page, seen.mask[i], scores + (size_t)i * KVC_PAGE_ROWS, o[i]);
}

kvc_status KVC_FN(kvc_attend_pages)(const struct kvc_queue *queue,
                                    const struct kvc_attend_tile *tile)
{
    const size_t stride = kvc_attend_stride(tile->pages[0].layout->d_v);

    (void)queue;
    for (uint32_t row = 0; row < tile->n_rows; row++) {
        tile->m[row] = -INFINITY;
        tile->l[row] = 0.0f;
    }
    memset(tile->o, 0, tile->n_rows * stride * sizeof(float));
    for (uint32_t i = 0; tile->page_m && i < tile->n_pages * tile->n_rows; i++) {
        tile->page_m[i] = -INFINITY;
        tile->page_l[i] = 0.0f;
    }
    for (uint32_t p = 0; p < tile->n_pages; p++)
        attend_page(tile, p);
    return KVC_OK;
}

kvc_status KVC_FN(kvc_mass_pages)(const struct kvc_queue *queue, const struct kvc_attend_tile *tile,
                                  const float *lse, float *mass)
{
    float *scores = score_rows(tile);

    (void)queue;
    for (uint32_t p = 0; p < tile->n_pages; p++, mass += KVC_PAGE_ROWS) {
        const struct seen seen = seen_rows(&tile->pages[p], tile->n_rows);
        if (!seen.any)
            continue;
        page_scores(tile, &tile->pages[p], &seen, scores);
        for (uint32_t i = 0; i < seen.n; i++) {
            if (!isfinite(lse[seen.row[i]]))
                continue;
            for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN) {
                const vf s = v_load(scores + (size_t)i * KVC_PAGE_ROWS + t);
                const vf weight = v_exp(v_sub(s, v_set1(lse[seen.row[i]])));
                const vf seen_weight = v_select(m_bits(seen.mask[i] >> t), weight, v_zero());
                v_store(mass + t, v_add(v_load(mass + t), seen_weight));
            }
        }
    }
    return KVC_OK;
}

kvc_status KVC_FN(kvc_merge_parts)(const struct kvc_queue *queue, struct kvc_attend_part *into,
                                   const struct kvc_attend_part *part, size_t n_rows, size_t d_v)
{
    const size_t stride = kvc_attend_stride(d_v);

    (void)queue;
    for (size_t r = 0; r < n_rows; r++) {
        float *o = into->o + r * stride;
        if (part->m[r] == -INFINITY)
            continue;
        const float m = isnan(part->m[r]) || part->m[r] > into->m[r] ? part->m[r] : into->m[r];
        const float a = into->m[r] == -INFINITY ? 0.0f : expf(into->m[r] - m);
        const float b = expf(part->m[r] - m);
        for (size_t c = 0; c < stride; c += VLEN)
            v_store(o + c, v_add(v_mul(v_load(o + c), v_set1(a)),
                                 v_mul(v_load(part->o + r * stride + c), v_set1(b))));
        into->l[r] = into->l[r] * a + part->l[r] * b;
        into->m[r] = m;
    }
    return KVC_OK;
}

static inline void store_elements(void *dst, kvc_dtype dtype, size_t i, vf x, size_t n)
{
    switch (dtype) {
    case KVC_DTYPE_F16: v_store_half((uint16_t *)dst + i, x, n); break;
    case KVC_DTYPE_BF16: v_store_bf16((uint16_t *)dst + i, x, n); break;
    default: v_store_n((float *)dst + i, x, n);
    }
}

kvc_status KVC_FN(kvc_finish_rows)(const struct kvc_queue *queue,
                                   const struct kvc_attend_part *part, size_t n_rows, size_t d_v,
                                   void *dst, kvc_dtype dtype, size_t dst_stride, float *lse)
{
    (void)queue;
    for (size_t r = 0; r < n_rows; r++) {
        const float *o = part->o + r * kvc_attend_stride(d_v);
        const vf inverse = v_set1(part->l[r] == 0.0f ? 0.0f : 1.0f / part->l[r]);
        for (size_t c = 0; c < d_v; c += VLEN)
            store_elements(dst, dtype, r * dst_stride + c, v_mul(v_load(o + c), inverse),
                           lanes_left(c, d_v));
        lse[r] = part->l[r] == 0.0f ? -INFINITY : part->m[r] + logf(part->l[r]);
    }
    return KVC_OK;
}
