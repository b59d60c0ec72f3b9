/*
 * lines_tmpl.h - template of products of rows of floats with lines of codes, the inner loop of
 * attention.
 * Parameters: VLEN, the words of vec_avx2.h, and those of quant_tmpl.h.
 *
 * Each product is one chain of fused operations along the line and one tree over the lanes,
 * whatever the tiling, so that the bits of a row do not depend on its neighbours.
 */
#include "../kernels.h"
#include "../page.h"

_Static_assert(KVC_BIAS8_K == KVC_BIAS8_V, "keys and values are read by the same code");

/* Lines (tokens of K or channels of V) that are worked on together. */
#define TILE_LINES 16
/* Rows that share an unpacked vector in registers: 4 lines of each fill v_hadd_all(). */
#define BLOCK_ROWS (VLEN / 4)

/* How a line is stored. FINITE: NaN and Inf become finite, as 0 times NaN is not 0. SCALED: groups
 * of codes have scales of their own. */
enum reader {
    READ_F32,
    READ_F16,
    READ_F16_FINITE,
    READ_INT8,
    READ_INT8_SCALED,
    READ_INT8_UNSIGNED,
    READ_INT4,
    READ_INT4_SCALED,
    READ_INT4_UNSIGNED
};

/* Codes less their bias, of CHANNEL too; INT6 as widen() leaves it. */
static inline enum reader code_reader(uint8_t format, enum reader half)
{
    switch (format) {
    case KVC_F16: return half;
    case KVC_INT4: return READ_INT4;
    default: return READ_INT8;
    }
}

/* Pages whose values are multiplied together, and streams of memory that are read at once: few of
 * them are faster than one. */
enum { CHUNK_PAGES = 4 };

/* Memory that will be read soon: size bytes at each of a few addresses. Their lines are asked for
 * in turn, between the loads of what is read now and at their pace. */
struct ahead {
    const uint8_t *at[CHUNK_PAGES];
    size_t done, size;
    size_t due; /* bytes that were read and not asked for yet */
};

/* The quarters of some memory. */
static inline struct ahead ahead_of(const uint8_t *data, size_t size)
{
    struct ahead ahead = {.size = size / CHUNK_PAGES};
    for (size_t i = 0; i < CHUNK_PAGES; i++)
        ahead.at[i] = data + i * ahead.size;
    return ahead;
}

/* So many bytes are read. */
V_INLINE void look_ahead(struct ahead *ahead, size_t n_bytes)
{
    ahead->due += n_bytes;
    const size_t at_once = (size_t)64 * CHUNK_PAGES;
    for (; ahead->due >= at_once; ahead->due -= at_once) {
        if (ahead->done >= ahead->size)
            continue;
        V_UNROLL
        for (int i = 0; i < CHUNK_PAGES; i++)
            v_prefetch(ahead->at[i] + ahead->done);
        ahead->done += 64;
    }
}

struct lines {
    enum reader reader;
    const uint8_t *data;
    size_t stride;   /* bytes */
    uint32_t n, len; /* at most TILE_LINES lines of len elements; len is a multiple of 8 */
    /* SCALED: [n_groups][KVC_PAGE_ROWS], that of the first line first. */
    uint32_t n_groups;
    const float *scales;
    struct ahead *ahead; /* or NULL */
};

/* Elements i ... i + n - 1 of a line as floats; n is VLEN or 8. */
V_INLINE vf read_line(enum reader reader, const uint8_t *line, size_t i, size_t n)
{
    const void *at = line;
    switch (reader) {
    case READ_F32: return v_load((const float *)at + i);
    case READ_F16: return v_load_half((const uint16_t *)at + i, n);
    case READ_F16_FINITE:
        return v_min(v_max(v_load_half((const uint16_t *)at + i, n), v_set1(-KVC_HALF_MAX)),
                     v_set1(KVC_HALF_MAX));
    case READ_INT8:
    case READ_INT8_SCALED: return v_load_page_i8(line + i, n, KVC_BIAS8_K);
    case READ_INT8_UNSIGNED: return v_load_page_i8(line + i, n, 0);
    case READ_INT4:
    case READ_INT4_SCALED: return v_load_page_i4(line + i / 2, n, KVC_BIAS4);
    default: return v_load_page_i4(line + i / 2, n, 0);
    }
}

/* A scale has 11 bits and a code at most 6: their product is exact. */
V_INLINE bool is_scaled(enum reader reader)
{
    return reader == READ_INT8_SCALED || reader == READ_INT4_SCALED;
}

V_INLINE vf read_scaled(enum reader reader, const uint8_t *line, vf scale, size_t i, size_t n)
{
    const vf x = read_line(reader, line, i, n);
    return is_scaled(reader) ? v_mul(x, scale) : x;
}

/* The groups of a line: one where it is not scaled. */
V_INLINE uint32_t groups_of(enum reader reader, const struct lines *lines)
{
    return is_scaled(reader) ? lines->n_groups : 1;
}

V_INLINE uint32_t group_end(enum reader reader, const struct lines *lines, uint32_t group)
{
    return group + 1 < groups_of(reader, lines) ? (group + 1) * KVC_GROUP_CHANNELS : lines->len;
}

V_INLINE vf group_scale(enum reader reader, const struct lines *lines, uint32_t group, uint32_t j)
{
    return is_scaled(reader) ? v_set1(lines->scales[group * KVC_PAGE_ROWS + j]) : v_zero();
}

V_INLINE void look_past(const struct lines *lines)
{
    if (lines->ahead)
        look_ahead(lines->ahead, lines->stride);
}

/* Products of a row with VLEN lines from first on, one a lane; 0 beyond the last line. */
V_INLINE vf multiply_row(enum reader reader, struct lines lines, uint32_t first, const float *x)
{
    vf sums[VLEN];
    for (uint32_t j = 0; j < VLEN; j++) {
        sums[j] = v_zero();
        if (first + j >= lines.n)
            continue;
        const uint8_t *line = lines.data + (first + j) * lines.stride;
        uint32_t i = 0;
        look_past(&lines);
        for (uint32_t g = 0; g < groups_of(reader, &lines); g++) {
            const uint32_t end = group_end(reader, &lines, g);
            const vf by = group_scale(reader, &lines, g, first + j);
            for (; i + VLEN <= end; i += VLEN)
                sums[j] = v_fma(v_load(x + i), read_scaled(reader, line, by, i, VLEN), sums[j]);
            if (i < end)
                sums[j] = v_fma(v_load(x + i), read_scaled(reader, line, by, i, 8), sums[j]);
        }
    }
    return v_hadd_all(sums);
}

/* One vector of 4 lines times BLOCK_ROWS rows. */
V_INLINE void multiply_step(enum reader reader, const uint8_t *const *line, const vf *by,
                            const float *const *x, size_t i, size_t n, vf *sums)
{
    vf y[4];
    V_UNROLL
    for (int j = 0; j < 4; j++)
        y[j] = read_scaled(reader, line[j], by[j], i, n);
    V_UNROLL
    for (int r = 0; r < BLOCK_ROWS; r++) {
        const vf a = v_load(x[r] + i);
        V_UNROLL
        for (int j = 0; j < 4; j++)
            sums[4 * r + j] = v_fma(a, y[j], sums[4 * r + j]);
    }
}

/* Products of BLOCK_ROWS rows with 4 lines from first on: lane 4 r + j. */
V_INLINE vf multiply_block(enum reader reader, struct lines lines, uint32_t first,
                           const float *const *x)
{
    const uint8_t *line[4];
    uint32_t place[4], i = 0;
    vf sums[VLEN], by[4];
    V_UNROLL
    for (uint32_t j = 0; j < 4; j++) {
        place[j] = first + j < lines.n ? first + j : lines.n - 1;
        line[j] = lines.data + place[j] * lines.stride;
        look_past(&lines);
    }
    V_UNROLL
    for (int k = 0; k < VLEN; k++)
        sums[k] = v_zero();
    for (uint32_t g = 0; g < groups_of(reader, &lines); g++) {
        const uint32_t end = group_end(reader, &lines, g);
        V_UNROLL
        for (int j = 0; j < 4; j++)
            by[j] = group_scale(reader, &lines, g, place[j]);
        for (; i + VLEN <= end; i += VLEN)
            multiply_step(reader, line, by, x, i, VLEN, sums);
        if (i < end)
            multiply_step(reader, line, by, x, i, 8, sums);
    }
    return v_hadd_all(sums);
}

/* out[r * stride + j] = x[r] . line j. Rows up to a multiple of BLOCK_ROWS and lines up to a
 * multiple of 4 are written too, with numbers without meaning. */
V_INLINE void multiply_lines(enum reader reader, struct lines lines, const float *const *x,
                             uint32_t n, float *out, size_t stride)
{
    if (n == 1) {
        for (uint32_t j = 0; j < TILE_LINES; j += VLEN)
            v_store(out + j, multiply_row(reader, lines, j, x[0]));
        return;
    }
    for (uint32_t r = 0; r < n; r += BLOCK_ROWS) {
        const float *rows[BLOCK_ROWS];
        for (uint32_t i = 0; i < BLOCK_ROWS; i++)
            rows[i] = x[r + i < n ? r + i : n - 1];
        for (uint32_t j = 0; j < lines.n; j += 4)
            v_store_quads(out + r * stride + j, stride, multiply_block(reader, lines, j, rows));
    }
}

static inline void multiply(const struct lines *lines, const float *const *x, uint32_t n,
                            float *out, size_t stride)
{
    switch (lines->reader) {
    case READ_F32: multiply_lines(READ_F32, *lines, x, n, out, stride); break;
    case READ_F16: multiply_lines(READ_F16, *lines, x, n, out, stride); break;
    case READ_F16_FINITE: multiply_lines(READ_F16_FINITE, *lines, x, n, out, stride); break;
    case READ_INT8: multiply_lines(READ_INT8, *lines, x, n, out, stride); break;
    case READ_INT8_SCALED: multiply_lines(READ_INT8_SCALED, *lines, x, n, out, stride); break;
    case READ_INT4_SCALED: multiply_lines(READ_INT4_SCALED, *lines, x, n, out, stride); break;
    default: multiply_lines(READ_INT4, *lines, x, n, out, stride);
    }
}

V_INLINE void unpack_part(enum reader reader, const uint8_t *line, vf by, size_t i, size_t end,
                          float *tile)
{
    for (; i + VLEN <= end; i += VLEN)
        v_store(tile + i, read_scaled(reader, line, by, i, VLEN));
    if (i < end)
        v_store(tile + i, read_scaled(reader, line, by, i, 8));
}

V_INLINE void unpack_lines(enum reader reader, struct lines lines, float *tile)
{
    for (uint32_t j = 0; j < lines.n; j++, tile += kvc_attend_stride(lines.len)) {
        const uint8_t *line = lines.data + j * lines.stride;
        look_past(&lines);
        if (!is_scaled(reader))
            unpack_part(reader, line, v_zero(), 0, lines.len, tile);
        for (uint32_t g = 0; is_scaled(reader) && g < lines.n_groups; g++)
            unpack_part(reader, line, group_scale(reader, &lines, g, j),
                        (size_t)g * KVC_GROUP_CHANNELS, group_end(reader, &lines, g), tile);
    }
}

/* The lines as floats in tile, their pads 0 or finite. */
static inline struct lines unpack(const struct lines *lines, float *tile)
{
    switch (lines->reader) {
    case READ_F16: unpack_lines(READ_F16, *lines, tile); break;
    case READ_F16_FINITE: unpack_lines(READ_F16_FINITE, *lines, tile); break;
    case READ_INT8: unpack_lines(READ_INT8, *lines, tile); break;
    case READ_INT8_SCALED: unpack_lines(READ_INT8_SCALED, *lines, tile); break;
    case READ_INT4_SCALED: unpack_lines(READ_INT4_SCALED, *lines, tile); break;
    default: unpack_lines(READ_INT4, *lines, tile);
    }
    return (struct lines){.reader = READ_F32,
                          .data = (const uint8_t *)tile,
                          .stride = kvc_attend_stride(lines->len) * sizeof(float),
                          .n = lines->n,
                          .len = (lines->len + VLEN - 1) / VLEN * VLEN};
}

/* INT6 lines as INT8 ones, in dst: 64 bytes for each 64 elements begun. */
static inline struct lines widen(const struct lines *lines, uint8_t *dst)
{
    struct lines wide = *lines;
    wide.data = dst;
    wide.ahead = NULL;
    wide.stride = (size_t)(lines->len + 63) / 64 * 64;
    for (uint32_t j = 0; j < lines->n; j++, dst += wide.stride) {
        const uint8_t *line = lines->data + j * lines->stride;
        look_past(lines);
        for (uint32_t i = 0; i < lines->len; i += 64)
            b_widen_page_six(line + i / 2, line + lines->len / 2 + i / 4, dst + i);
    }
    return wide;
}
