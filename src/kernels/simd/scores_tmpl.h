/*
 * scores_tmpl.h - template of the logits of query rows over one page.
 * Parameters: VLEN, the words of vec_avx2.h, and those of exp_tmpl.h, lines_tmpl.h and dots_tmpl.h.
 *
 * A score is the product of a query row with the line of a token: of floats, or, if the tile is not
 * exact and the page holds codes, of integers.
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

static inline uint64_t low_bits(uint32_t n)
{
    return n ? ~UINT64_C(0) >> (64 - n) : 0;
}

static inline uint64_t held_rows(const struct kvc_attend_page *page)
{
    return low_bits(page->n_rows);
}

static inline struct seen seen_rows(const struct kvc_attend_page *page, uint32_t n_rows)
{
    const uint64_t held = held_rows(page);
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

/* What tile->work is divided into; kvc_attend_work_size() knows the sum. */
struct rooms {
    float *tile;     /* 16 lines of floats */
    float *folded;   /* query rows times scales, or 16 lines of INT6 keys as bytes */
    float *products; /* [KVC_TILE_ROWS][64] of one page */
    float *scores;   /* [CHUNK_PAGES][n_rows][64] */
    uint8_t *keys;   /* query rows and then their rests, arranged, row_size bytes each */
    uint8_t *values; /* rows of weights, arranged, WEIGHTS_SIZE bytes each */
};

/* Bytes of an arranged row of weights of a chunk, with rests. */
enum { WEIGHTS_SIZE = 4 * CHUNK_TOKENS + 64 };

/* Bytes of an arranged query row. */
static inline size_t row_size(size_t d_k)
{
    return 2 * ((d_k + 127) & ~(size_t)127);
}

static inline struct rooms rooms_of(const struct kvc_attend_tile *tile)
{
    const size_t d_k = tile->pages[0].layout->d_k;
    struct rooms rooms;
    rooms.tile = tile->work;
    rooms.folded =
        rooms.tile + TILE_LINES * kvc_attend_stride(d_k > KVC_PAGE_ROWS ? d_k : KVC_PAGE_ROWS);
    rooms.products = rooms.folded + KVC_TILE_ROWS * kvc_attend_stride(d_k);
    rooms.scores = rooms.products + (size_t)KVC_TILE_ROWS * KVC_PAGE_ROWS;
    rooms.keys = (uint8_t *)(rooms.scores + (size_t)KVC_TILE_ROWS * CHUNK_TOKENS);
    rooms.values = rooms.keys + (size_t)2 * KVC_TILE_ROWS * row_size(d_k);
    return rooms;
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

/* Query rows as integers, arranged for the keys of one layout. */
struct int_keys {
    const struct kvc_page_layout *layout; /* NULL: none yet */
    enum codes codes;
    enum split split;
    /* Vectors of a line whose products are summed together, and the groups of the scales of their
     * lower and upper halves. */
    struct segment {
        uint32_t first, n, group[2];
    } segments[KVC_MAX_GROUPS];
    uint32_t n_segments;
    /* Of the rows, and from KVC_TILE_ROWS on of their rests; bias: what is too much in the sums. */
    float scale[2 * KVC_TILE_ROWS];
    int32_t bias[2 * KVC_TILE_ROWS][KVC_MAX_GROUPS][2];
    bool has_rest[KVC_TILE_ROWS];
};

static inline bool is_exact(const struct kvc_attend_tile *tile, uint8_t format)
{
    return tile->exact || format == KVC_F16;
}

static inline void divide_keys(struct int_keys *keys, const struct kvc_page_layout *layout)
{
    const uint32_t d8 = layout->d8_k;
    const uint32_t n_groups = kvc_scale_groups(layout->k_format, layout->k_scale, d8);
    keys->codes = layout->k_format == KVC_INT4 ? NIBBLES : BYTES;
    const uint32_t size = elements_of(keys->codes), n_vectors = (d8 + size - 1) / size;
    const bool halves = size == 2 * KVC_GROUP_CHANNELS && n_groups > 1;
    keys->split = halves ? GROUPS : V_WIDE && keys->codes == NIBBLES && d8 == 64 ? PAIRS : WHOLE;
    keys->n_segments = halves ? n_vectors : n_groups;
    const uint32_t step = halves ? 1 : KVC_GROUP_CHANNELS / size;
    for (uint32_t i = 0; i < keys->n_segments; i++) {
        const uint32_t last = n_groups - 1, low = halves ? 2 * i : i;
        keys->segments[i] = (struct segment){
            .first = i * step,
            .n = i + 1 < keys->n_segments ? step : n_vectors - i * step,
            .group = {low < last ? low : last, low + 1 < last ? low + 1 : last},
        };
    }
}

/* x = integers times what is returned plus rest, which may be NULL, or x; n is a multiple of VLEN,
 * and largest the largest magnitude. */
V_INLINE float to_integers(float largest, const float *x, uint32_t n, int16_t *to, float *rest)
{
    const float step = largest / ROW_MAX;
    const vf by = v_set1(ROW_MAX / largest);
    for (uint32_t i = 0; i < n; i += VLEN) {
        const vf a = v_load(x + i);
        const vi integers = i_round(v_mul(a, by));
        i_store_low16(to + i, integers);
        if (rest)
            v_store(rest + i, v_fma(v_from_i(integers), v_set1(-step), a));
    }
    return step;
}

/* What to_integers() with this step left, in units of 2^-REST_BITS of a step. */
V_INLINE void rests_of(const float *rest, uint32_t n, float step, int16_t *to)
{
    const vf by = v_set1(1.0f / step), units = v_set1(1 << REST_BITS);
    for (uint32_t i = 0; i < n; i += VLEN)
        i_store_low16(to + i, i_round(v_mul(v_mul(v_load(rest + i), by), units)));
}

/* What the rest of to_integers() is at most: half a step, and what the product that was rounded may
 * have been off by. */
#define REST_OF(step) (0.51f * (step))

/* Below it, numbers are nothing: scales and products with them stay normal. */
#define TINY 1e-30f

/* A row whose largest number is more than that many times its mean has a rest: in units of the
 * largest number, the others would lose too much. */
#define MAX_PEAK 16

/* The row `slot` of keys: x becomes what rounding leaves. */
static inline void arrange_row(struct int_keys *keys, uint32_t d8, uint32_t slot, float largest,
                               float *x, uint8_t *to)
{
    int16_t integers[KVC_MAX_HEAD_DIM + 128] = {0};
    const uint32_t size = keys->split == PAIRS ? 64 : elements_of(keys->codes);
    const uint32_t half = keys->split == GROUPS ? size / 2 : 0;
    const int32_t bias = bias_of(keys->codes);
    keys->scale[slot] = 0.0f;
    if (isnan(largest))
        keys->scale[slot] = NAN;
    else if (largest >= TINY)
        keys->scale[slot] = to_integers(largest, x, (d8 + VLEN - 1u) / VLEN * VLEN, integers, x);
    arrange(keys->codes, keys->split, integers, NULL, (d8 + size - 1) / size * size, to);
    for (uint32_t i = 0; i < keys->n_segments; i++) {
        const struct segment *s = &keys->segments[i];
        const int16_t *from = integers + (size_t)s->first * size;
        keys->bias[slot][i][1] = bias * sum_of(from + (s->n * size - half), half);
        keys->bias[slot][i][0] = bias * sum_of(from, s->n * size - half);
    }
}

static inline void arrange_query(const struct kvc_attend_tile *tile, struct int_keys *keys,
                                 const struct kvc_page_layout *layout, uint32_t row, const float *q)
{
    const size_t size = row_size(layout->d_k);
    uint8_t *to = rooms_of(tile).keys + row * size;
    float x[KVC_MAX_HEAD_DIM + VLEN];
    vf max = v_zero(), sum = v_zero(), odd = v_zero();
    for (uint32_t i = 0; i < layout->d8_k; i += VLEN) {
        const vf a = v_load(q + i);
        max = v_max(v_abs(a), max);
        sum = v_add(sum, v_abs(a));
        odd = v_fma(a, v_zero(), odd); /* NaN if a is not finite */
        v_store(x + i, a);
    }
    const float largest = v_hadd(odd) == 0.0f ? v_hmax(max) : NAN;
    arrange_row(keys, layout->d8_k, row, largest, x, to);
    keys->has_rest[row] = largest >= TINY && largest * (float)layout->d_k > MAX_PEAK * v_hadd(sum);
    if (keys->has_rest[row])
        arrange_row(keys, layout->d8_k, KVC_TILE_ROWS + row, REST_OF(keys->scale[row]), x,
                    to + KVC_TILE_ROWS * size);
}

/* What is added to the sums that do not know of the middle of CHANNEL keys goes to add. */
static inline void arrange_queries(const struct kvc_attend_tile *tile,
                                   const struct kvc_attend_page *page, struct int_keys *keys,
                                   float *add)
{
    const struct kvc_page_layout *layout = page->layout;
    const struct rooms rooms = rooms_of(tile);
    const bool channels = has_channels(layout->k_format, layout->k_scale);
    const float *q[KVC_TILE_ROWS];
    if (layout == keys->layout && !channels)
        return;
    for (uint32_t row = 0; row < tile->n_rows; row++)
        q[row] = tile->q + row * kvc_attend_stride(layout->d_k);
    if (channels)
        fold_channels(page, q, tile->n_rows, rooms.folded, add);
    if (layout != keys->layout)
        divide_keys(keys, layout);
    for (uint32_t row = 0; row < tile->n_rows; row++)
        arrange_query(tile, keys, layout, row, q[row]);
    keys->layout = layout;
}

/* Sums of one segment become products, or are added to them. */
static inline void add_segment(const struct int_keys *keys, uint32_t segment, uint32_t slot,
                               const int32_t *low, const int32_t *high, uint32_t n,
                               const float *factors, bool add, float *products)
{
    const struct segment *s = &keys->segments[segment];
    const int32_t *bias = keys->bias[slot][segment];
    const float *by = factors + (size_t)s->group[0] * KVC_PAGE_ROWS;
    const float *by_high = factors + (size_t)s->group[1] * KVC_PAGE_ROWS;
    const vf scale = v_set1(keys->scale[slot]);
    for (uint32_t t = 0; t < n; t += VLEN) {
        vf x = v_mul(v_from_i(i_sub(i_load(low + t), i_set1(bias[0]))), v_load(by + t));
        if (keys->split == GROUPS)
            x = v_fma(v_from_i(i_sub(i_load(high + t), i_set1(bias[1]))), v_load(by_high + t), x);
        x = v_mul(x, scale);
        v_store(products + t, add ? v_add(v_load(products + t), x) : x);
    }
}

/* Rows that are multiplied: slot[i] of keys, whose products go to place[i]. */
struct key_rows {
    uint32_t n;
    uint8_t slot[KVC_TILE_ROWS], place[KVC_TILE_ROWS];
    bool add;
};

/* Lines of all or some tokens of a page: the first is that of token first. */
struct key_lines {
    const uint8_t *data;
    size_t stride;
    uint32_t first, n;
};

/* Products of tokens with rows by integers. */
static inline void multiply_keys(const struct kvc_attend_tile *tile, const struct int_keys *keys,
                                 const struct key_lines *from, const struct key_rows *rows,
                                 const float *factors, struct ahead *ahead)
{
    const struct rooms rooms = rooms_of(tile);
    const size_t size = row_size(keys->layout->d_k);
    int32_t low[BLOCK_ROWS * KVC_PAGE_ROWS], high[BLOCK_ROWS * KVC_PAGE_ROWS];
    const struct sums sums = {low, high, KVC_PAGE_ROWS};
    for (uint32_t i = 0; i < rows->n; i += BLOCK_ROWS) {
        const uint32_t n_rows = rows->n - i < BLOCK_ROWS ? rows->n - i : BLOCK_ROWS;
        for (uint32_t s = 0; s < keys->n_segments; s++) {
            const struct segment *segment = &keys->segments[s];
            struct code_lines lines = {
                .n_vectors = segment->n, .n = from->n, .stride = from->stride};
            const uint8_t *row[BLOCK_ROWS];
            for (uint32_t v = 0; v < segment->n; v++)
                lines.at[v] = from->data + (size_t)(segment->first + v) * VECTOR_BYTES;
            if (keys->split == PAIRS) {
                lines.n /= 2;
                lines.stride *= 2;
            }
            for (uint32_t r = 0; r < BLOCK_ROWS; r++)
                row[r] = rooms.keys + rows->slot[i + (r < n_rows ? r : n_rows - 1)] * size +
                         (size_t)segment->first * parts_of(keys->codes, NO_RESTS) *
                             part_bytes(keys->split);
            dot_keys(keys->codes, keys->split, &lines, row, n_rows, ahead, &sums);
            for (uint32_t r = 0; r < n_rows; r++)
                add_segment(keys, s, rows->slot[i + r], low + (size_t)r * KVC_PAGE_ROWS,
                            high + (size_t)r * KVC_PAGE_ROWS, from->n, factors + from->first,
                            rows->add || s > 0,
                            rooms.products + (size_t)rows->place[i + r] * KVC_PAGE_ROWS +
                                from->first);
        }
    }
}

/* rooms.products: the scores without what add says and what comes after it, by integers. */
static inline void int_products(const struct kvc_attend_tile *tile,
                                const struct kvc_attend_page *page, const struct seen *seen,
                                struct int_keys *keys, struct ahead *ahead, float *add)
{
    const struct kvc_page_layout *layout = page->layout;
    const struct rooms rooms = rooms_of(tile);
    const uint8_t *params = page->data + layout->k_params;
    float factors[KVC_MAX_GROUPS * KVC_PAGE_ROWS], of_row[KVC_TILE_ROWS] = {0};
    const uint32_t n_groups = kvc_scale_groups(layout->k_format, layout->k_scale, layout->d8_k);
    const bool narrow = layout->k_format == KVC_INT6;
    struct key_rows all = {.n = 0}, rests = {.add = true};

    arrange_queries(tile, page, keys, of_row);
    for (uint32_t g = 0; g < n_groups; g++)
        token_factors(layout->k_format, layout->k_scale, params, g, tile->scale,
                      factors + (size_t)g * KVC_PAGE_ROWS);
    for (uint32_t i = 0; i < seen->n; i++) {
        const uint8_t row = seen->row[i];
        add[i] = of_row[row];
        all.slot[all.n] = row;
        all.place[all.n++] = (uint8_t)i;
        if (!keys->has_rest[row])
            continue;
        rests.slot[rests.n] = (uint8_t)(KVC_TILE_ROWS + row);
        rests.place[rests.n++] = (uint8_t)i;
    }
    for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += narrow ? TILE_LINES : KVC_PAGE_ROWS) {
        struct lines wide = {.data = page->data + (size_t)t * layout->k_stride,
                             .stride = layout->k_stride,
                             .n = narrow ? TILE_LINES : KVC_PAGE_ROWS,
                             .len = layout->d8_k,
                             .ahead = ahead};
        if (narrow)
            wide = widen(&wide, (uint8_t *)rooms.folded);
        const struct key_lines lines = {wide.data, wide.stride, t, wide.n};
        multiply_keys(tile, keys, &lines, &all, factors, ahead);
        if (rests.n)
            multiply_keys(tile, keys, &lines, &rests, factors, ahead);
    }
}

/* The same by floats. */
static inline void float_products(const struct kvc_attend_tile *tile,
                                  const struct kvc_attend_page *page, const struct seen *seen,
                                  struct ahead *ahead, float *add)
{
    const struct kvc_page_layout *layout = page->layout;
    const struct rooms rooms = rooms_of(tile);
    const uint32_t n_groups = kvc_scale_groups(layout->k_format, layout->k_scale, layout->d8_k);
    const float *q[KVC_TILE_ROWS];
    float scales[KVC_MAX_GROUPS * KVC_PAGE_ROWS], factors[KVC_PAGE_ROWS];

    key_factors(tile, page, n_groups, scales, factors);
    for (uint32_t i = 0; i < seen->n; i++)
        q[i] = tile->q + seen->row[i] * kvc_attend_stride(layout->d_k);
    if (has_channels(layout->k_format, layout->k_scale))
        fold_channels(page, q, seen->n, rooms.folded, add);
    for (uint32_t t = 0; t < page->n_rows; t += TILE_LINES) {
        struct lines lines = {.reader = key_reader(layout, n_groups),
                              .data = page->data + (size_t)t * layout->k_stride,
                              .stride = layout->k_stride,
                              .n = page->n_rows - t < TILE_LINES ? page->n_rows - t : TILE_LINES,
                              .len = layout->d8_k,
                              .n_groups = n_groups,
                              .scales = scales + t,
                              .ahead = ahead};
        if (!(seen->any >> t & 0xffff))
            continue;
        if (layout->k_format == KVC_INT6)
            lines = widen(&lines, (uint8_t *)rooms.folded);
        if (seen->n > BLOCK_ROWS)
            lines = unpack(&lines, rooms.tile);
        multiply(&lines, q, seen->n, rooms.products + t, KVC_PAGE_ROWS);
    }
    for (uint32_t i = 0; i < seen->n; i++)
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN) {
            float *x = rooms.products + (size_t)i * KVC_PAGE_ROWS + t;
            v_store(x, v_mul(v_load(x), v_load(factors + t)));
        }
}

/* Scores of the rows that see something, [n_rows][64]; those that are not seen mean nothing. */
static inline void page_scores(const struct kvc_attend_tile *tile,
                               const struct kvc_attend_page *page, const struct seen *seen,
                               struct int_keys *keys, struct ahead *ahead, float *scores)
{
    const float *products = rooms_of(tile).products;
    float add[KVC_TILE_ROWS] = {0};

    if (is_exact(tile, page->layout->k_format))
        float_products(tile, page, seen, ahead, add);
    else
        int_products(tile, page, seen, keys, ahead, add);
    for (uint32_t i = 0; i < seen->n; i++, products += KVC_PAGE_ROWS) {
        const uint32_t row = seen->row[i];
        const vf shift = v_set1(tile->scale * add[i] + (tile->shift ? tile->shift[row] : 0.0f));
        float *s = scores + (size_t)row * KVC_PAGE_ROWS;
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN) {
            vf x = v_add(v_load(products + t), shift);
            if (tile->softcap > 0.0f)
                x = v_softcap(x, tile->softcap);
            v_store(s + t, page->bias ? v_add(x, v_load(page->bias + t)) : x);
        }
    }
}
