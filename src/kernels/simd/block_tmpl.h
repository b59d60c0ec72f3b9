/*
 * block_tmpl.h - template of the SIMD kernel of attention of many query rows over pages.
 * Parameters: KVC_FN (name suffix), VLEN, the words of vec_avx2.h, and those of quant_tmpl.h,
 * lines_tmpl.h and attend_tmpl.h.
 *
 * A lane is a query row. Each side of a page becomes lines of floats once for all rows; then an
 * element of a line times vectors of rows, which lie transposed, is added to sums in registers. So
 * nothing is added across lanes, no page is transposed, and no row knows of another one.
 */
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "../page.h"

/* Vectors of rows that are worked on together, lines, and their products in registers. */
#define PANEL_VECTORS (VLEN == 16 ? 4 : 3)
#define PANEL_LINES   8
#define PANEL_SUMS    (VLEN == 16 ? 24 : 12)

struct panel {
    uint32_t first; /* row */
    uint32_t n;     /* vectors */
};

/* What the rows see of a page. */
struct sight {
    uint32_t first, end;         /* no row sees a token outside; first is a multiple of 8 */
    uint64_t rows;               /* that see something */
    bool all;                    /* all rows see all of these tokens */
    uint64_t row[KVC_PAGE_ROWS]; /* if not: that see each token */
};

/* A block at work. Matrices of rows are panels behind one another: [..][vectors of the panel]. */
struct block {
    const struct kvc_attend_tile *tile;
    float *q, *lines, *s; /* transposed queries, one side of a page, scores; o is in tile->o */
    float m[KVC_BLOCK_ROWS], l[KVC_BLOCK_ROWS], shift[KVC_BLOCK_ROWS];
    float shrink[KVC_BLOCK_ROWS]; /* of the page at work */
    struct ahead ahead;           /* the next page */
    size_t at_once;               /* bytes of it */
};

/* Bit j of word i becomes bit i of word j. */
static inline void transpose_bits(uint64_t *words)
{
    uint64_t keep = UINT64_C(0xffffffff);
    for (uint32_t by = 32; by > 0; by /= 2, keep ^= keep << by)
        for (uint32_t i = 0; i < 64; i = ((i | by) + 1) & ~by) {
            const uint64_t swap = (words[i] >> by ^ words[i | by]) & keep;
            words[i] ^= swap << by;
            words[i | by] ^= swap;
        }
}

static inline void look(const struct kvc_attend_page *page, uint32_t n_rows, struct sight *sight)
{
    const uint64_t held = low_bits(page->n_rows);
    uint64_t any = 0, all = held;
    sight->rows = 0;
    for (uint32_t r = 0; r < n_rows; r++) {
        const uint64_t mask = page->mask[r] & held;
        sight->rows |= (uint64_t)(mask != 0) << r;
        any |= mask;
        all &= mask;
    }
    if (!any)
        return;
    sight->first = (uint32_t)__builtin_ctzll(any) & ~7u;
    sight->end = 64 - (uint32_t)__builtin_clzll(any);
    sight->all = (low_bits(sight->end) & ~low_bits(sight->first) & ~all) == 0;
    if (sight->all)
        return;
    memset(sight->row, 0, sizeof(sight->row));
    for (uint32_t r = 0; r < n_rows; r++)
        sight->row[r] = page->mask[r] & held;
    transpose_bits(sight->row);
}

/* What elements of a line are multiplied by: nothing, one number, or each its own. */
enum factor { BY_NOTHING, BY_ONE, BY_EACH };

V_INLINE void unpack_some(enum reader reader, enum factor factor, const uint8_t *line, size_t i,
                          size_t n, const float *by, float add, float *dst)
{
    vf x = read_line(reader, line, i, n);
    if (factor != BY_NOTHING)
        x = v_fma(x, factor == BY_EACH ? v_load(by + i) : v_set1(*by), v_set1(add));
    v_store(dst + i, x);
}

/* Elements i ... end - 1 of a line; their number is a multiple of 8, and what follows up to a whole
 * vector is written too. */
V_INLINE void unpack_line(enum reader reader, enum factor factor, const uint8_t *line, size_t i,
                          size_t end, const float *by, float add, float *dst)
{
    for (; i + VLEN <= end; i += VLEN)
        unpack_some(reader, factor, line, i, VLEN, by, add, dst);
    if (i < end)
        unpack_some(reader, factor, line, i, 8, by, add, dst);
}

/* What is left of the parameters of a side once its lines are floats. */
struct side_factors {
    float token[KVC_MAX_GROUPS * KVC_PAGE_ROWS]; /* of each group of channels */
    float channel[KVC_MAX_HEAD_DIM], middle[KVC_MAX_HEAD_DIM];
};

static inline void channel_factors(uint8_t format, uint32_t d8, const uint8_t *params,
                                   struct side_factors *factors)
{
    for (uint32_t c = 0; c < d8; c += VLEN) {
        const struct channels at = load_channels(format, d8, params, c);
        v_store(factors->channel + c, at.scale);
        v_store(factors->middle + c, at.middle);
    }
}

V_INLINE void unpack_key(enum reader reader, const struct kvc_page_layout *layout,
                         const struct side_factors *factors, uint32_t n_groups, uint32_t t,
                         const uint8_t *line, float *dst)
{
    const uint32_t d8 = layout->d8_k;
    if (n_groups > 1) {
        for (uint32_t g = 0; g < n_groups; g++)
            unpack_line(reader, BY_ONE, line, (size_t)g * KVC_GROUP_CHANNELS,
                        g + 1 < n_groups ? (g + 1) * KVC_GROUP_CHANNELS : d8,
                        factors->token + (size_t)g * KVC_PAGE_ROWS + t, 0.0f, dst);
    } else if (has_channels(layout->k_format, layout->k_scale)) {
        unpack_line(reader, BY_EACH, line, 0, d8, factors->channel, 0.0f, dst);
    } else {
        unpack_line(reader, BY_NOTHING, line, 0, d8, NULL, 0.0f, dst);
    }
}

V_INLINE void unpack_keys(enum reader reader, const struct kvc_attend_page *page,
                          const struct sight *sight, const struct side_factors *factors,
                          uint32_t n_groups, float *lines)
{
    const struct kvc_page_layout *layout = page->layout;
    const size_t stride = kvc_attend_stride(layout->d_k);
    for (uint32_t t = sight->first; t < sight->end; t++)
        unpack_key(reader, layout, factors, n_groups, t, page->data + (size_t)t * layout->k_stride,
                   lines + t * stride);
}

static inline void unpack_six(const struct kvc_attend_page *page, const struct sight *sight,
                              const struct side_factors *factors, uint32_t n_groups, float *lines)
{
    const struct kvc_page_layout *layout = page->layout;
    const size_t stride = kvc_attend_stride(layout->d_k);
    uint8_t codes[KVC_MAX_HEAD_DIM];
    for (uint32_t t = sight->first; t < sight->end; t++) {
        const struct lines line = {
            .data = page->data + (size_t)t * layout->k_stride, .n = 1, .len = layout->d8_k};
        widen(&line, codes);
        unpack_key(READ_INT8, layout, factors, n_groups, t, codes, lines + t * stride);
    }
}

/* The keys as lines; token: what is left to multiply their products by. CHANNEL keys lack what
 * their minima add, q . middle, which is the same for all. */
static inline void block_keys(const struct block *b, const struct kvc_attend_page *page,
                              const struct sight *sight, struct side_factors *factors, float *token)
{
    const struct kvc_page_layout *layout = page->layout;
    const uint8_t *params = page->data + layout->k_params;
    const uint32_t n_groups = kvc_scale_groups(layout->k_format, layout->k_scale, layout->d8_k);

    if (n_groups == 1) {
        token_factors(layout->k_format, layout->k_scale, params, 0, b->tile->scale, token);
    } else {
        fill(token, b->tile->scale);
        for (uint32_t g = 0; g < n_groups; g++)
            token_factors(layout->k_format, layout->k_scale, params, g, 1.0f,
                          factors->token + (size_t)g * KVC_PAGE_ROWS);
    }
    if (has_channels(layout->k_format, layout->k_scale))
        channel_factors(layout->k_format, layout->d8_k, params, factors);
    switch (layout->k_format) {
    case KVC_F16: unpack_keys(READ_F16, page, sight, factors, n_groups, b->lines); break;
    case KVC_INT8: unpack_keys(READ_INT8, page, sight, factors, n_groups, b->lines); break;
    case KVC_INT6: unpack_six(page, sight, factors, n_groups, b->lines); break;
    default: unpack_keys(READ_INT4, page, sight, factors, n_groups, b->lines);
    }
}

/* Channels of transposed values, [d8_v][64]. */
V_INLINE void unpack_channels(enum reader reader, const struct kvc_attend_page *page,
                              struct side_factors *factors, float *lines)
{
    const struct kvc_page_layout *layout = page->layout;
    const uint8_t *codes = page->data + layout->v_codes, *params = page->data + layout->v_params;
    const bool channels = has_channels(layout->v_format, layout->v_scale);
    const uint32_t n_groups = kvc_scale_groups(layout->v_format, layout->v_scale, layout->d8_v);

    if (channels)
        channel_factors(layout->v_format, layout->d8_v, params, factors);
    for (uint32_t g = 0; g < n_groups && !channels; g++)
        token_factors(layout->v_format, layout->v_scale, params, g, 1.0f,
                      factors->token + (size_t)g * KVC_PAGE_ROWS);
    for (uint32_t c = 0; c < layout->d8_v; c++, codes += layout->v_stride, lines += KVC_PAGE_ROWS) {
        const float *token = factors->token + (size_t)kvc_group_of(c, n_groups) * KVC_PAGE_ROWS;
        if (reader == READ_F16_FINITE)
            unpack_line(reader, BY_NOTHING, codes, 0, KVC_PAGE_ROWS, NULL, 0.0f, lines);
        else if (channels)
            unpack_line(reader, BY_ONE, codes, 0, KVC_PAGE_ROWS, factors->channel + c,
                        factors->middle[c], lines);
        else
            unpack_line(reader, BY_EACH, codes, 0, KVC_PAGE_ROWS, token, 0.0f, lines);
    }
}

/* The values as lines, [d8_v][64] or [64][stride] as they are stored. They are finite: a token that
 * a row does not see has weight 0, and 0 times NaN is not 0. */
static inline void block_values(const struct block *b, const struct kvc_attend_page *page,
                                const struct sight *sight, struct side_factors *factors)
{
    const struct kvc_page_layout *layout = page->layout;
    const size_t stride = kvc_attend_stride(layout->d_v);
    if (layout->v_row_major) {
        for (uint32_t t = sight->first; t < sight->end; t++)
            unpack_line(READ_F16_FINITE, BY_NOTHING,
                        page->data + layout->v_codes + (size_t)t * layout->v_stride, 0,
                        layout->d8_v, NULL, 0.0f, b->lines + t * stride);
        return;
    }
    switch (layout->v_format) {
    case KVC_F16: unpack_channels(READ_F16_FINITE, page, factors, b->lines); break;
    case KVC_INT8: unpack_channels(READ_INT8, page, factors, b->lines); break;
    default: unpack_channels(READ_INT4, page, factors, b->lines);
    }
}

/* Element i of line j is at[j * line + i * step]. */
struct grid {
    const float *at;
    size_t line, step;
};

/* sums[j][k] = sum over i < len of element i of line j times vector k of row i of x. */
V_INLINE void panel_products(size_t n_lines, size_t n, struct grid grid, size_t len, const float *x,
                             vf sums[PANEL_LINES][PANEL_VECTORS])
{
    V_UNROLL
    for (size_t j = 0; j < n_lines; j++) {
        V_UNROLL
        for (size_t k = 0; k < n; k++)
            sums[j][k] = v_zero();
    }
    for (size_t i = 0; i < len; i++, grid.at += grid.step, x += n * VLEN) {
        vf rows[PANEL_VECTORS];
        V_UNROLL
        for (size_t k = 0; k < n; k++)
            rows[k] = v_load(x + k * VLEN);
        V_UNROLL
        for (size_t j = 0; j < n_lines; j++) {
            const vf a = v_set1(grid.at[j * grid.line]);
            V_UNROLL
            for (size_t k = 0; k < n; k++)
                sums[j][k] = v_fma(a, rows[k], sums[j][k]);
        }
    }
}

/* Lines whose products with n vectors fit into registers. */
V_INLINE size_t lines_at_once(size_t n)
{
    return n * PANEL_LINES <= PANEL_SUMS ? PANEL_LINES : PANEL_SUMS / n;
}

/* Whether 4 lines are next where 6 fit: a multiple of 8 is so many sixes and fours. */
V_INLINE bool four_next(size_t n, size_t left)
{
    return lines_at_once(n) == 6 && (left == 4 || left == 8);
}

/* How products become scores. */
struct scoring {
    const float *token, *bias;
    const float *middle; /* of CHANNEL keys, or NULL */
    float scale, softcap;
    const uint64_t *row; /* that see each token, or NULL: all */
};

/* What the minima of CHANNEL keys add to the products: in 8 sums, because they may be large. */
V_INLINE vf middle_product(size_t n, const float *q, const float *middle, size_t d8)
{
    vf sums[8];
    V_UNROLL
    for (size_t j = 0; j < 8; j++)
        sums[j] = v_zero();
    for (size_t c = 0; c < d8; c += 8) {
        V_UNROLL
        for (size_t j = 0; j < 8; j++)
            sums[j] = v_fma(v_set1(middle[c + j]), v_load(q + (c + j) * n * VLEN), sums[j]);
    }
    V_UNROLL
    for (size_t j = 0; j < 4; j++)
        sums[j] = v_add(sums[j], sums[j + 4]);
    return v_add(v_add(sums[0], sums[2]), v_add(sums[1], sums[3]));
}

V_INLINE vf score(const struct scoring *how, size_t t, size_t row, vf product, vf shift)
{
    vf s = v_fma(product, v_set1(how->token[t]), shift);
    if (how->softcap > 0.0f)
        s = v_softcap(s, how->softcap);
    if (how->bias)
        s = v_add(s, v_set1(how->bias[t]));
    return how->row ? v_select(m_bits(how->row[t] >> row), s, v_set1(-INFINITY)) : s;
}

V_INLINE void key_lines(size_t n_lines, size_t n, struct grid grid, size_t d, const float *q,
                        float *s)
{
    vf sums[PANEL_LINES][PANEL_VECTORS];
    panel_products(n_lines, n, grid, d, q, sums);
    V_UNROLL
    for (size_t j = 0; j < n_lines; j++) {
        V_UNROLL
        for (size_t k = 0; k < n; k++)
            v_store(s + (j * n + k) * VLEN, sums[j][k]);
    }
}

/* Scores of a panel, [64][rows], -inf where nothing is seen; and their maxima. */
V_INLINE void panel_scores(size_t n, struct block *b, size_t row, const struct sight *sight,
                           const struct scoring *how, vf *max)
{
    const struct kvc_page_layout *layout = b->tile->pages[0].layout;
    const size_t stride = kvc_attend_stride(layout->d_k);
    const size_t end = (sight->end + 7) & ~(size_t)7;
    const float *q = b->q + row * stride;
    float *s = b->s + row * KVC_PAGE_ROWS;
    vf shift[PANEL_VECTORS];

    for (size_t t = sight->first, step; t < end; t += step) {
        const struct grid grid = {b->lines + t * stride, stride, 1};
        step = four_next(n, end - t) ? 4 : lines_at_once(n);
        look_ahead(&b->ahead, b->at_once);
        if (four_next(n, end - t))
            key_lines(4, n, grid, layout->d_k, q, s + t * n * VLEN);
        else
            key_lines(lines_at_once(n), n, grid, layout->d_k, q, s + t * n * VLEN);
    }
    for (size_t k = 0; k < n; k++) {
        shift[k] = v_load(b->shift + row + k * VLEN);
        if (how->middle)
            shift[k] = v_fma(v_set1(how->scale),
                             middle_product(n, q + k * VLEN, how->middle, layout->d8_k), shift[k]);
        max[k] = v_set1(-INFINITY);
    }
    for (size_t t = sight->first; t < sight->end; t++) {
        V_UNROLL
        for (size_t k = 0; k < n; k++) {
            float *at = s + (t * n + k) * VLEN;
            const vf x = score(how, t, row + k * VLEN, v_load(at), shift[k]);
            v_store(at, x);
            max[k] = v_max(x, max[k]);
        }
    }
}

/* Turns the scores of a panel into weights, and takes m and l one page further. */
V_INLINE void panel_weights(size_t n, struct block *b, size_t first_row, const struct sight *sight,
                            const vf *max)
{
    float *s = b->s + first_row * KVC_PAGE_ROWS;
    vf m[PANEL_VECTORS], from[PANEL_VECTORS], sum[PANEL_VECTORS];
    V_UNROLL
    for (size_t k = 0; k < n; k++) {
        const size_t row = first_row + k * VLEN;
        const vf old = v_load(b->m + row);
        m[k] = v_max(max[k], old);
        v_store(b->shrink + row, v_select(v_lt(old, m[k]), v_exp(v_sub(old, m[k])), v_set1(1.0f)));
        /* A row that sees nothing may have m = -inf, and -inf less that is NaN. */
        from[k] = v_select(m_bits(sight->rows >> row), m[k], v_zero());
        sum[k] = v_zero();
    }
    for (size_t t = sight->first; t < sight->end; t++) {
        V_UNROLL
        for (size_t k = 0; k < n; k++) {
            float *at = s + (t * n + k) * VLEN;
            const vf weight = v_exp(v_sub(v_load(at), from[k]));
            sum[k] = v_add(sum[k], weight);
            v_store(at, weight);
        }
    }
    V_UNROLL
    for (size_t k = 0; k < n; k++) {
        const size_t row = first_row + k * VLEN;
        /* A score is NaN or Inf: the row says so. */
        v_store(b->m + row, v_select(finite_lanes(sum[k]), m[k], sum[k]));
        v_store(b->l + row, v_fma(v_load(b->l + row), v_load(b->shrink + row), sum[k]));
    }
}

V_INLINE void panel_keys(size_t n, struct block *b, size_t row, const struct sight *sight,
                         const struct scoring *how)
{
    vf max[PANEL_VECTORS];
    panel_scores(n, b, row, sight, how, max);
    panel_weights(n, b, row, sight, max);
}

V_INLINE void value_lines(size_t n_lines, size_t n, struct grid grid, size_t n_tokens,
                          const float *weights, const float *shrink, float *o)
{
    vf sums[PANEL_LINES][PANEL_VECTORS];
    panel_products(n_lines, n, grid, n_tokens, weights, sums);
    V_UNROLL
    for (size_t j = 0; j < n_lines; j++) {
        V_UNROLL
        for (size_t k = 0; k < n; k++) {
            float *at = o + (j * n + k) * VLEN;
            v_store(at, v_fma(v_load(at), v_load(shrink + k * VLEN), sums[j][k]));
        }
    }
}

/* o = o shrink + weights times values. */
V_INLINE void panel_values(size_t n, struct block *b, size_t row, const struct sight *sight,
                           const struct kvc_page_layout *layout)
{
    const size_t stride = kvc_attend_stride(layout->d_v), n_tokens = sight->end - sight->first;
    const size_t line = layout->v_row_major ? 1 : KVC_PAGE_ROWS;
    const size_t step = layout->v_row_major ? stride : 1;
    const float *weights = b->s + row * KVC_PAGE_ROWS + sight->first * n * VLEN;
    const float *shrink = b->shrink + row;
    float *o = b->tile->o + row * stride;

    for (size_t c = 0, n_lines; c < layout->d8_v; c += n_lines) {
        const struct grid grid = {b->lines + c * line + sight->first * step, line, step};
        const bool four = four_next(n, layout->d8_v - c);
        n_lines = four ? 4 : lines_at_once(n);
        look_ahead(&b->ahead, b->at_once);
        if (four)
            value_lines(4, n, grid, n_tokens, weights, shrink, o + c * n * VLEN);
        else
            value_lines(lines_at_once(n), n, grid, n_tokens, weights, shrink, o + c * n * VLEN);
    }
}

/* The panel that begins at a row: all of nearly the same size. */
static inline struct panel panel_at(uint32_t n_rows, uint32_t first)
{
    const uint32_t left = (n_rows - first + VLEN - 1) / VLEN;
    const uint32_t n_panels = (left + PANEL_VECTORS - 1) / PANEL_VECTORS;
    return (struct panel){first, (left + n_panels - 1) / n_panels};
}

static inline uint32_t panel_end(struct panel panel)
{
    return panel.first + panel.n * VLEN;
}

static inline bool panel_sees(struct panel panel, const struct sight *sight)
{
    return (sight->rows >> panel.first & low_bits(panel.n * VLEN)) != 0;
}

/* The page after p is asked for while p is multiplied, in equal parts between the lines. */
static inline void find_next(struct block *b, uint32_t p)
{
    const struct kvc_attend_tile *tile = b->tile;
    const struct kvc_attend_page *next = p + 1 < tile->n_pages ? &tile->pages[p + 1]
                                         : tile->n_after       ? tile->after
                                                               : NULL;
    const struct panel panel = panel_at(tile->n_rows, 0);
    const size_t n_lines = KVC_PAGE_ROWS + tile->pages[p].layout->d8_v;
    b->ahead = (struct ahead){.size = 0};
    if (!next)
        return;
    b->ahead = ahead_of(next->data, next->layout->n_bytes);
    b->at_once = next->layout->n_bytes * lines_at_once(panel.n) / n_lines + 64;
}

static inline void block_page(struct block *b, uint32_t p)
{
    const struct kvc_attend_tile *tile = b->tile;
    const struct kvc_attend_page *page = &tile->pages[p];
    const struct kvc_page_layout *layout = page->layout;
    struct side_factors factors;
    struct sight sight;
    struct panel panel;
    float token[KVC_PAGE_ROWS];

    look(page, tile->n_rows, &sight);
    if (!sight.rows)
        return;
    find_next(b, p);
    block_keys(b, page, &sight, &factors, token);
    const struct scoring how = {
        .token = token,
        .bias = page->bias,
        .middle = has_channels(layout->k_format, layout->k_scale) ? factors.middle : NULL,
        .scale = tile->scale,
        .softcap = tile->softcap,
        .row = sight.all ? NULL : sight.row};
    for (uint32_t r = 0; r < tile->n_rows; r = panel_end(panel)) {
        panel = panel_at(tile->n_rows, r);
        if (!panel_sees(panel, &sight))
            continue;
        switch (panel.n) {
        case 1: panel_keys(1, b, r, &sight, &how); break;
        case 2: panel_keys(2, b, r, &sight, &how); break;
        case 3: panel_keys(3, b, r, &sight, &how); break;
        default: panel_keys(PANEL_VECTORS, b, r, &sight, &how);
        }
    }
    block_values(b, page, &sight, &factors);
    for (uint32_t r = 0; r < tile->n_rows; r = panel_end(panel)) {
        panel = panel_at(tile->n_rows, r);
        if (!panel_sees(panel, &sight))
            continue;
        switch (panel.n) {
        case 1: panel_values(1, b, r, &sight, layout); break;
        case 2: panel_values(2, b, r, &sight, layout); break;
        case 3: panel_values(3, b, r, &sight, layout); break;
        default: panel_values(PANEL_VECTORS, b, r, &sight, layout);
        }
    }
}

/* The queries of a panel, transposed; lanes without a row are 0. */
static inline void load_panel(const struct block *b, struct panel panel)
{
    const struct kvc_attend_tile *tile = b->tile;
    const size_t stride = kvc_attend_stride(tile->pages[0].layout->d_k);
    const size_t width = (size_t)panel.n * VLEN, d8 = tile->pages[0].layout->d8_k;
    const uint32_t end = panel_end(panel) < tile->n_rows ? panel_end(panel) : tile->n_rows;
    float *q = b->q + panel.first * stride;
    uint32_t r = panel.first;

    if (end < panel_end(panel))
        memset(q, 0, d8 * width * sizeof(float));
    for (; r + 4 <= end; r += 4, q += 4)
        for (size_t c = 0; c < d8; c += 4)
            v_transpose4(tile->q + r * stride + c, stride, q + c * width, width);
    for (; r < end; r++, q++)
        for (size_t c = 0; c < d8; c++)
            q[c * width] = tile->q[r * stride + c];
}

/* The outputs of a panel, which lie where its rows are going to, as rows. */
static inline void store_panel(const struct block *b, struct panel panel)
{
    const struct kvc_attend_tile *tile = b->tile;
    const size_t stride = kvc_attend_stride(tile->pages[0].layout->d_v);
    const size_t width = (size_t)panel.n * VLEN, d8 = tile->pages[0].layout->d8_v;
    const uint32_t end = panel_end(panel) < tile->n_rows ? panel_end(panel) : tile->n_rows;
    const float *o = b->lines;
    float *row = tile->o + panel.first * stride;
    uint32_t r = panel.first;

    memcpy(b->lines, row, d8 * width * sizeof(float));
    memset(row, 0, (end - r) * stride * sizeof(float));
    for (; r + 4 <= end; r += 4, o += 4, row += 4 * stride)
        for (size_t c = 0; c < d8; c += 4)
            v_transpose4(o + c * width, width, row + c, stride);
    for (; r < end; r++, o++, row += stride)
        for (size_t c = 0; c < d8; c++)
            row[c] = o[c * width];
}

static inline void block_begin(struct block *b)
{
    const struct kvc_attend_tile *tile = b->tile;
    const size_t s_v = kvc_attend_stride(tile->pages[0].layout->d_v);
    const size_t width = kvc_attend_stride(tile->n_rows);
    struct panel panel;

    for (uint32_t r = 0; r < tile->n_rows; r = panel_end(panel)) {
        panel = panel_at(tile->n_rows, r);
        load_panel(b, panel);
    }
    memset(tile->o, 0, width * s_v * sizeof(float));
    for (uint32_t r = 0; r < KVC_BLOCK_ROWS; r++) {
        b->m[r] = -INFINITY;
        b->l[r] = 0.0f;
        b->shift[r] = tile->shift && r < tile->n_rows ? tile->shift[r] : 0.0f;
    }
}

kvc_status KVC_FN(kvc_attend_block)(const struct kvc_queue *queue,
                                    const struct kvc_attend_tile *tile)
{
    const struct kvc_page_layout *layout = tile->pages[0].layout;
    const size_t s_k = kvc_attend_stride(layout->d_k), s_v = kvc_attend_stride(layout->d_v);
    struct block b = {.tile = tile, .q = tile->work};
    struct panel panel;

    (void)queue;
    b.lines = b.q + kvc_attend_stride(tile->n_rows) * s_k;
    b.s = b.lines + KVC_PAGE_ROWS * (s_k > s_v ? s_k : s_v);
    block_begin(&b);
    for (uint32_t p = 0; p < tile->n_pages; p++)
        block_page(&b, p);
    for (uint32_t r = 0; r < tile->n_rows; r = panel_end(panel)) {
        panel = panel_at(tile->n_rows, r);
        store_panel(&b, panel);
    }
    memcpy(tile->m, b.m, tile->n_rows * sizeof(float));
    memcpy(tile->l, b.l, tile->n_rows * sizeof(float));
    return KVC_OK;
}
