/*
 * values_tmpl.h - template of adding the values of a chunk of pages to the outputs.
 * Parameters: VLEN, the words of vec_avx2.h, and those of lines_tmpl.h, dots_tmpl.h and
 * scores_tmpl.h.
 *
 * An output is the product of a row of weights with the line of a channel, of floats or of
 * integers, as scores are.
 */
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "../page.h"

/* Pages that are weighed together, and the rows that see any of them. */
struct chunk {
    const struct kvc_attend_page *pages;
    uint32_t n_pages, n_rows;
    uint8_t row[KVC_TILE_ROWS];
    float l[KVC_TILE_ROWS][CHUNK_PAGES]; /* sums of weights, by place in row */
};

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

/* Scores of a page, and then weights: [n_rows][64]. */
static inline float *page_weights(const struct kvc_attend_tile *tile,
                                  const struct kvc_attend_page *page)
{
    const size_t size = (size_t)tile->n_rows * KVC_PAGE_ROWS;
    return tile->masses && tile->masses->weights
               ? tile->masses->weights + page->slot * size
               : rooms_of(tile).scores + page->slot % CHUNK_PAGES * size;
}

static inline float *chunk_weights(const struct kvc_attend_tile *tile, const struct chunk *chunk,
                                   uint32_t p, uint32_t i)
{
    return page_weights(tile, &chunk->pages[p]) + (size_t)chunk->row[i] * KVC_PAGE_ROWS;
}

static inline float *output_row(const struct kvc_attend_tile *tile, const struct chunk *chunk,
                                uint32_t i)
{
    return tile->o + chunk->row[i] * kvc_attend_stride(tile->pages[0].layout->d_v);
}

/* Weights of all rows times the factors of a group of channels. */
static inline void group_weights(const struct kvc_attend_tile *tile, const struct chunk *chunk,
                                 uint32_t p, uint32_t group, float *dst)
{
    const struct kvc_page_layout *layout = chunk->pages[p].layout;
    float factors[KVC_PAGE_ROWS];
    token_factors(layout->v_format, layout->v_scale, chunk->pages[p].data + layout->v_params, group,
                  1.0f, factors);
    for (uint32_t i = 0; i < chunk->n_rows; i++, dst += KVC_PAGE_ROWS) {
        const float *w = chunk_weights(tile, chunk, p, i);
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN)
            v_store(dst + t, v_mul(v_load(w + t), v_load(factors + t)));
    }
}

/* Transposed V of one page: the outputs of the rows += their weights times the lines of all
 * channels. */
static inline void add_lines(const struct kvc_attend_tile *tile, const struct chunk *chunk,
                             uint32_t p, struct ahead *ahead)
{
    const struct kvc_page_layout *layout = chunk->pages[p].layout;
    const uint8_t *data = chunk->pages[p].data, *params = data + layout->v_params;
    const struct rooms rooms = rooms_of(tile);
    const bool channels = has_channels(layout->v_format, layout->v_scale);
    const bool plain = channels || layout->v_format == KVC_F16;
    const uint32_t n_groups = kvc_scale_groups(layout->v_format, layout->v_scale, layout->d8_v);
    float of_group[KVC_TILE_ROWS * KVC_PAGE_ROWS];
    const float *w[KVC_TILE_ROWS];
    uint8_t place[KVC_TILE_ROWS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < chunk->n_rows; i++) {
        if (!(chunk->pages[p].mask[chunk->row[i]] & held_rows(&chunk->pages[p])))
            continue;
        w[n] = plain ? chunk_weights(tile, chunk, p, i) : of_group + (size_t)i * KVC_PAGE_ROWS;
        place[n++] = (uint8_t)i;
    }
    for (uint32_t c = 0; c < layout->d8_v; c += TILE_LINES) {
        if (!plain && c % KVC_GROUP_CHANNELS == 0)
            group_weights(tile, chunk, p, kvc_group_of(c, n_groups), of_group);
        struct lines lines = {.reader = code_reader(layout->v_format, READ_F16_FINITE),
                              .data = data + layout->v_codes + (size_t)c * layout->v_stride,
                              .stride = layout->v_stride,
                              .n = layout->d8_v - c < TILE_LINES ? layout->d8_v - c : TILE_LINES,
                              .len = KVC_PAGE_ROWS,
                              .ahead = ahead};
        float sums[KVC_TILE_ROWS * TILE_LINES];
        if (lines.n < TILE_LINES)
            memset(sums, 0, sizeof(sums));
        if (n > BLOCK_ROWS)
            lines = unpack(&lines, rooms.tile);
        multiply(&lines, w, n, sums, TILE_LINES);
        for (uint32_t j = 0; j < lines.n; j += VLEN) {
            struct channels v = {0};
            if (channels)
                v = load_channels(layout->v_format, layout->d8_v, params, c + j);
            for (uint32_t i = 0; i < n; i++) {
                float *o = output_row(tile, chunk, place[i]) + c + j;
                vf sum = v_load(sums + (size_t)i * TILE_LINES + j);
                if (channels)
                    sum = v_fma(sum, v.scale, v_mul(v.middle, v_set1(chunk->l[place[i]][p])));
                v_store(o, v_add(v_load(o), sum));
            }
        }
    }
}

/* The pages of a chunk whose values are multiplied together, and the channels of one scale. */
struct int_values {
    uint32_t n_pages;
    uint8_t page[CHUNK_PAGES];
    enum codes codes;
    uint32_t first, end;         /* channels */
    float factors[CHUNK_TOKENS]; /* of the tokens, page after page */
};

static inline enum split split_of(const struct int_values *values)
{
    return V_WIDE && values->codes == NIBBLES ? PAIRS : WHOLE;
}

/* Weights of a row times factors, in the order of the pages of values; their sum is returned, and
 * their maximum goes to max. */
static inline float weigh(const struct kvc_attend_tile *tile, const struct chunk *chunk,
                          const struct int_values *values, uint32_t i, float *dst, float *max)
{
    vf largest = v_zero(), sum = v_zero();
    for (uint32_t p = 0; p < values->n_pages; p++) {
        const float *w = chunk_weights(tile, chunk, values->page[p], i);
        const float *factors = values->factors + (size_t)p * KVC_PAGE_ROWS;
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN, dst += VLEN) {
            const vf x = v_mul(v_load(w + t), v_load(factors + t));
            largest = v_max(v_abs(x), largest);
            sum = v_add(sum, v_abs(x));
            v_store(dst, x);
        }
    }
    *max = v_hmax(largest);
    return v_hadd(sum);
}

/* Rows of weights as integers, arranged, and what their sums are turned into numbers by. */
struct weight_rows {
    uint32_t n;
    uint8_t place[KVC_TILE_ROWS]; /* in the rows of the chunk */
    float scale[KVC_TILE_ROWS];
    int32_t bias[KVC_TILE_ROWS];
};

/*
 * Adds a row of weights x, which has a NaN if sum is NaN; x becomes its rests.
 * They count: where one weight is a large part of all, integers in units of it lose what many small
 * ones have together.
 */
static inline void add_weight_row(const struct kvc_attend_tile *tile,
                                  const struct int_values *values, uint32_t place, float largest,
                                  float sum, float *x, struct weight_rows *rows)
{
    const uint32_t n = values->n_pages * KVC_PAGE_ROWS;
    const int32_t units = 1 << spare_bits(values->codes);
    int16_t integers[CHUNK_TOKENS], rests[CHUNK_TOKENS];
    float scale = NAN;
    if (isnan(sum)) {
        memset(integers, 0, n * sizeof(*integers));
        memset(rests, 0, n * sizeof(*rests));
    } else {
        scale = to_integers(largest, x, n, integers, x);
        rests_of(x, n, scale, rests);
    }
    rows->place[rows->n] = (uint8_t)place;
    rows->scale[rows->n] = scale / (float)units;
    rows->bias[rows->n] = units * bias_of(values->codes) * sum_of(integers, n);
    arrange(values->codes, split_of(values), integers, rests, n,
            rooms_of(tile).values + (size_t)rows->n * WEIGHTS_SIZE);
    rows->n++;
}

/* Adds the products of rows of weights with the channels c ... c + n - 1 to the outputs. */
static inline void multiply_values(const struct kvc_attend_tile *tile, const struct chunk *chunk,
                                   const struct int_values *values, const struct weight_rows *rows,
                                   uint32_t c, uint32_t n, struct ahead *ahead)
{
    const uint8_t *arranged = rooms_of(tile).values;
    const struct kvc_page_layout *layout = chunk->pages[values->page[0]].layout;
    const uint32_t of_page = layout->v_stride > VECTOR_BYTES ? layout->v_stride / VECTOR_BYTES : 1;
    const bool pairs = split_of(values) == PAIRS;
    int32_t sums[BLOCK_ROWS * KVC_PAGE_ROWS];
    struct code_lines lines = {.n_vectors = values->n_pages * of_page,
                               .n = pairs ? n / 2 : n,
                               .stride = pairs ? 2 * layout->v_stride : layout->v_stride};
    for (uint32_t v = 0; v < lines.n_vectors; v++) {
        const struct kvc_attend_page *page = &chunk->pages[values->page[v / of_page]];
        lines.at[v] = page->data + page->layout->v_codes + (size_t)c * layout->v_stride +
                      (size_t)(v % of_page) * VECTOR_BYTES;
    }
    for (uint32_t i = 0; i < rows->n; i += BLOCK_ROWS) {
        const uint32_t n_rows = rows->n - i < BLOCK_ROWS ? rows->n - i : BLOCK_ROWS;
        const uint8_t *row[BLOCK_ROWS];
        for (uint32_t r = 0; r < BLOCK_ROWS; r++)
            row[r] = arranged + (size_t)(i + (r < n_rows ? r : n_rows - 1)) * WEIGHTS_SIZE;
        dot_values(values->codes, &lines, row, n_rows, ahead,
                   &(struct sums){.low = sums, .stride = KVC_PAGE_ROWS});
        for (uint32_t r = 0; r < n_rows; r++) {
            float *o = output_row(tile, chunk, rows->place[i + r]) + c;
            const vf scale = v_set1(rows->scale[i + r]);
            const vi bias = i_set1(rows->bias[i + r]);
            for (uint32_t j = 0; j < n; j += VLEN) {
                const vi x = i_sub(i_load(sums + (size_t)r * KVC_PAGE_ROWS + j), bias);
                const vf y = v_select(m_first(n - j), v_mul(v_from_i(x), scale), v_zero());
                v_store(o + j, v_add(v_load(o + j), y));
            }
        }
    }
}

/* One group of channels. */
static inline void add_group(const struct kvc_attend_tile *tile, const struct chunk *chunk,
                             const struct int_values *values, struct ahead *ahead)
{
    struct weight_rows rows = {.n = 0};
    for (uint32_t i = 0; i < chunk->n_rows; i++) {
        float x[CHUNK_TOKENS], largest;
        const float sum = weigh(tile, chunk, values, i, x, &largest);
        if (largest >= TINY || isnan(sum))
            add_weight_row(tile, values, i, largest, sum, x, &rows);
    }
    for (uint32_t c = values->first; c < values->end && rows.n; c += KVC_PAGE_ROWS)
        multiply_values(tile, chunk, values, &rows, c,
                        values->end - c < KVC_PAGE_ROWS ? values->end - c : KVC_PAGE_ROWS, ahead);
}

/* Pages whose factors are far apart are not multiplied together: where one of a large factor has
 * only small values, integers in units of its weights would lose the others. Under TOKEN each
 * large factor has a large value. */
static inline uint32_t factor_class(const struct kvc_attend_page *page)
{
    uint32_t bits = 0;
    if (page->layout->v_scale == KVC_SCALE_HEAD)
        memcpy(&bits, page->data + page->layout->v_params, sizeof(bits));
    return bits >> 26; /* by 256 */
}

/* The next pages of one format and scale, of the lowest class of those that are left. */
static inline void take_pages(const struct chunk *chunk, uint8_t format, uint8_t scale, bool *done,
                              struct int_values *values)
{
    uint32_t lowest = UINT32_MAX;
    *values = (struct int_values){.codes = format == KVC_INT4 ? NIBBLES : BYTES};
    for (uint32_t p = 0; p < chunk->n_pages; p++) {
        const struct kvc_attend_page *page = &chunk->pages[p];
        if (done[p] || page->layout->v_format != format || page->layout->v_scale != scale)
            continue;
        const uint32_t class = factor_class(page);
        if (class < lowest)
            values->n_pages = 0;
        lowest = class < lowest ? class : lowest;
        if (class == lowest)
            values->page[values->n_pages++] = (uint8_t)p;
    }
    for (uint32_t i = 0; i < values->n_pages; i++)
        done[values->page[i]] = true;
}

/* The pages of a chunk whose values have this format and scale. */
static inline void add_values_of(const struct kvc_attend_tile *tile, const struct chunk *chunk,
                                 uint8_t format, uint8_t scale, struct ahead *ahead)
{
    struct int_values values;
    bool done[CHUNK_PAGES] = {false};
    for (take_pages(chunk, format, scale, done, &values); values.n_pages > 0;
         take_pages(chunk, format, scale, done, &values)) {
        const uint32_t d8 = chunk->pages[values.page[0]].layout->d8_v;
        const uint32_t n_groups = kvc_scale_groups(format, scale, d8);
        for (uint32_t g = 0; g < n_groups; g++) {
            values.first = g * KVC_GROUP_CHANNELS;
            values.end = g + 1 < n_groups ? values.first + KVC_GROUP_CHANNELS : d8;
            for (uint32_t p = 0; p < values.n_pages; p++) {
                const struct kvc_attend_page *page = &chunk->pages[values.page[p]];
                token_factors(format, scale, page->data + page->layout->v_params, g, 1.0f,
                              values.factors + (size_t)p * KVC_PAGE_ROWS);
            }
            add_group(tile, chunk, &values, ahead);
        }
    }
}

/* Adds the values of all pages; the outputs of a row do not depend on pages that it does not see,
 * nor on the order of formats in the chunk. */
static inline void add_values(const struct kvc_attend_tile *tile, const struct chunk *chunk,
                              struct ahead *ahead)
{
    for (uint32_t p = 0; p < chunk->n_pages; p++) {
        const struct kvc_attend_page *page = &chunk->pages[p];
        const struct kvc_page_layout *layout = page->layout;
        if (layout->v_row_major) {
            for (uint32_t i = 0; i < chunk->n_rows; i++)
                add_tokens(page, page->mask[chunk->row[i]] & held_rows(page),
                           chunk_weights(tile, chunk, p, i), output_row(tile, chunk, i));
        } else if (is_exact(tile, layout->v_format) ||
                   has_channels(layout->v_format, layout->v_scale)) {
            add_lines(tile, chunk, p, ahead);
        }
    }
    if (tile->exact)
        return;
    add_values_of(tile, chunk, KVC_INT8, KVC_SCALE_HEAD, ahead);
    add_values_of(tile, chunk, KVC_INT8, KVC_SCALE_TOKEN, ahead);
    add_values_of(tile, chunk, KVC_INT4, KVC_SCALE_HEAD, ahead);
    add_values_of(tile, chunk, KVC_INT4, KVC_SCALE_TOKEN, ahead);
}
