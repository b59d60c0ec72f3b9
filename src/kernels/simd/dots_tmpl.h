/*
 * dots_tmpl.h - template of products of rows of 16-bit integers with lines of codes, the inner loop
 * of attention that is not exact.
 * Parameters: VLEN, the integer words of vec_avx2.h, V_BYTE_DOTS, and those of lines_tmpl.h.
 *
 * A row of floats becomes scale * n with integers n, and a sum of products n * code is an integer:
 * exact, in whatever order. Rows are laid out as the instruction wants them (arrange()):
 *
 * V_BYTE_DOTS: a dot instruction multiplies unsigned with signed bytes. Codes are the unsigned
 * side, n is 256 high + low, and each half has a sum of its own.
 *
 * Else codes become 16-bit integers and are multiplied in pairs.
 *
 * Codes keep their bias; its product with the sum of the row is taken off in the end. No sum leaves
 * 32 bits: 512 codes of -128 with numbers of ROW_MAX are below 2^31, and what passes it on the way
 * comes back.
 */
#include "../kernels.h"
#include "../page.h"

enum { VECTOR_BYTES = 4 * VLEN };

enum { CHUNK_TOKENS = CHUNK_PAGES * KVC_PAGE_ROWS };

enum { ROW_MAX = 127 * 256 + 127 };

enum codes { BYTES, NIBBLES };

/* What a vector of codes holds: part of one line; of two groups of a line, half and half; or two
 * lines, which are vectors of half the size. The latter two only where 64 nibbles are half a
 * vector. */
enum split { WHOLE, GROUPS, PAIRS };

/* Vectors of a row that belong to one of codes. */
V_INLINE size_t parts_of(enum codes codes)
{
    return codes == BYTES ? 2 : 4;
}

/* Bytes of one of them: of pairs of lines both take the same half. */
V_INLINE size_t part_bytes(enum split split)
{
    return split == PAIRS ? VECTOR_BYTES / 2 : VECTOR_BYTES;
}

V_INLINE vi load_part(enum split split, const uint8_t *p)
{
#if V_WIDE
    if (split == PAIRS)
        return i_load_twice(p);
#endif
    (void)split;
    return i_load(p);
}

V_INLINE uint32_t elements_of(enum codes codes)
{
    return codes == BYTES ? VECTOR_BYTES : 2 * VECTOR_BYTES;
}

/* What codes are too large by. */
V_INLINE int32_t bias_of(enum codes codes)
{
    return codes == NIBBLES ? KVC_BIAS4 : KVC_BIAS8_K;
}

/* Lines of codes: vector v of the first one is at[v]. */
struct code_lines {
    const uint8_t *at[KVC_MAX_HEAD_DIM / VLEN / 4];
    uint32_t n_vectors, n;
    size_t stride; /* bytes from one line, or pair of them, to the next */
};

/* A vector of codes as the factors of products, and the products of one row, added; high counts
 * 256 times. */
#if V_BYTE_DOTS
V_INLINE void unpack_codes(enum codes codes, const uint8_t *at, vi *part)
{
    const vi x = i_load(at), mask = i_set1(0x0f0f0f0f);
    part[0] = codes == BYTES ? x : i_and(x, mask);
    if (codes == NIBBLES)
        part[1] = i_and(i_srl16(x, 4), mask);
}

V_INLINE void add_products(enum codes codes, enum split split, const vi *part, const uint8_t *row,
                           vi *high, vi *low)
{
    V_UNROLL
    for (size_t k = 0; k < parts_of(codes); k += 2) {
        *high = i_dot(*high, part[k / 2], load_part(split, row + k * part_bytes(split)));
        *low = i_dot(*low, part[k / 2], load_part(split, row + (k + 1) * part_bytes(split)));
    }
}

V_INLINE vi join_sums(vi high, vi low)
{
    return i_add(low, i_shl(high, 8));
}
#else
V_INLINE void unpack_codes(enum codes codes, const uint8_t *at, vi *part)
{
    if (codes == BYTES) {
        part[0] = i_widen(at);
        part[1] = i_widen(at + VECTOR_BYTES / 2);
        return;
    }
    const vi x = i_load(at), mask = i_set1(0x000f000f);
    part[0] = i_and(x, mask);
    part[1] = i_and(i_srl16(x, 4), mask);
    part[2] = i_and(i_srl16(x, 8), mask);
    part[3] = i_srl16(x, 12);
}

V_INLINE void add_products(enum codes codes, enum split split, const vi *part, const uint8_t *row,
                           vi *high, vi *low)
{
    (void)high;
    V_UNROLL
    for (size_t k = 0; k < parts_of(codes); k++)
        *low = i_add(*low, i_madd(part[k], load_part(split, row + k * part_bytes(split))));
}

V_INLINE vi join_sums(vi high, vi low)
{
    (void)high;
    return low;
}
#endif

/* A line and n_rows rows: sums[r]. */
V_INLINE void dot_line(enum codes codes, enum split split, const struct code_lines *lines,
                       uint32_t n_vectors, size_t offset, const uint8_t *const *rows, int n_rows,
                       vi *sums)
{
    vi high[BLOCK_ROWS], low[BLOCK_ROWS];
    V_UNROLL
    for (int r = 0; r < n_rows; r++)
        high[r] = low[r] = i_zero();
    for (uint32_t v = 0; v < n_vectors; v++) {
        vi part[4];
        unpack_codes(codes, lines->at[v] + offset, part);
        V_UNROLL
        for (int r = 0; r < n_rows; r++)
            add_products(codes, split, part,
                         rows[r] + (size_t)v * parts_of(codes) * part_bytes(split), &high[r],
                         &low[r]);
    }
    V_UNROLL
    for (int r = 0; r < n_rows; r++)
        sums[r] = join_sums(high[r], low[r]);
}

/* Sums of the lines from offset on with n_rows (1 or BLOCK_ROWS) rows: of one row VLEN lines, of a
 * block 4; in runs, as i_hadd_all() takes them. Lines beyond the n_lines stand for the last. */
V_INLINE void dot_some_lines(enum codes codes, enum split split, const struct code_lines *lines,
                             uint32_t n_vectors, uint32_t first, const uint8_t *const *rows,
                             int n_rows, struct ahead *ahead, vi *runs)
{
    size_t offset = first * lines->stride;
    V_UNROLL
    for (int k = 0; k < VLEN / 4; k++) {
        vi sums[4];
        V_UNROLL
        for (int i = 0; i < 4; i += n_rows) {
            dot_line(codes, split, lines, n_vectors, offset, rows, n_rows, sums + i);
            offset += ++first < lines->n ? lines->stride : 0;
        }
        look_ahead(ahead, (size_t)n_vectors * VECTOR_BYTES * (size_t)(4 / n_rows));
        runs[k] = i_hadd_runs(sums);
    }
}

/* Where sums go: of line j and row r to low[r * stride + j], in pairs of lines j counts lines; of
 * the second of two groups to high[r * stride + j]. */
struct sums {
    int32_t *low, *high;
    size_t stride;
};

V_INLINE void store_part(vi sums, int32_t *to, size_t stride, int n_rows)
{
    if (n_rows == 1)
        i_store(to, sums);
    else
        i_store_quads(to, stride, sums);
}

/* runs of dot_some_lines(), whose lanes are in the order of the sums: of a block, row by row. */
V_INLINE void store_sums(enum split split, const vi *runs, size_t first, int n_rows,
                         const struct sums *to)
{
#if V_WIDE
    if (split != WHOLE) {
        vi low, high;
        i_hadd_halves(runs, &low, &high);
        if (n_rows > 1) {
            low = i_rows_first(low);
            high = i_rows_first(high);
        }
        if (split == GROUPS) {
            store_part(low, to->low + first, to->stride, n_rows);
            store_part(high, to->high + first, to->stride, n_rows);
            return;
        }
        i_zip(n_rows > 1, &low, &high);
        store_part(low, to->low + 2 * first, to->stride, n_rows);
        store_part(high, to->low + 2 * first + (n_rows == 1 ? VLEN : 4), to->stride, n_rows);
        return;
    }
#endif
    (void)split;
    const vi sums = i_hadd_all(runs);
    store_part(n_rows == 1 ? sums : i_rows_first(sums), to->low + first, to->stride, n_rows);
}

V_INLINE void dot_lines(enum codes codes, enum split split, const struct code_lines *lines,
                        uint32_t n_vectors, const uint8_t *const *rows, int n_rows,
                        struct ahead *ahead, const struct sums *to)
{
    struct ahead next = *ahead;
    for (uint32_t first = 0; first < lines->n; first += n_rows == 1 ? VLEN : 4) {
        vi runs[VLEN / 4];
        dot_some_lines(codes, split, lines, n_vectors, first, rows, n_rows, &next, runs);
        store_sums(split, runs, first, n_rows, to);
    }
    *ahead = next;
}

V_INLINE void dot_rows(enum codes codes, enum split split, const struct code_lines *lines,
                       uint32_t n_vectors, const uint8_t *const *rows, uint32_t n_rows,
                       struct ahead *ahead, const struct sums *to)
{
    if (n_rows == 1)
        dot_lines(codes, split, lines, n_vectors, rows, 1, ahead, to);
    else
        dot_lines(codes, split, lines, n_vectors, rows, BLOCK_ROWS, ahead, to);
}

/* The same with loops of known length where that is common. */
V_INLINE void dot_vectors(enum codes codes, enum split split, const struct code_lines *lines,
                          const uint8_t *const *rows, uint32_t n_rows, struct ahead *ahead,
                          const struct sums *to)
{
    switch (lines->n_vectors) {
    case 1: dot_rows(codes, split, lines, 1, rows, n_rows, ahead, to); break;
    case 2: dot_rows(codes, split, lines, 2, rows, n_rows, ahead, to); break;
    case 4: dot_rows(codes, split, lines, 4, rows, n_rows, ahead, to); break;
    default: dot_rows(codes, split, lines, lines->n_vectors, rows, n_rows, ahead, to);
    }
}

/* Sums of all lines with at most BLOCK_ROWS rows; those of rows beyond the last are written too,
 * and mean nothing, and so are those of lines up to whole vectors. */
static void dot_codes(enum codes codes, enum split split, const struct code_lines *lines,
                      const uint8_t *const *rows, uint32_t n_rows, struct ahead *ahead,
                      const struct sums *to)
{
    if (codes == BYTES)
        dot_vectors(BYTES, WHOLE, lines, rows, n_rows, ahead, to);
    else if (split == WHOLE)
        dot_vectors(NIBBLES, WHOLE, lines, rows, n_rows, ahead, to);
    else if (split == GROUPS)
        dot_rows(NIBBLES, GROUPS, lines, 1, rows, n_rows, ahead, to);
    else
        dot_vectors(NIBBLES, PAIRS, lines, rows, n_rows, ahead, to);
}

/* A row as the products want it; n is a multiple of elements_of(), or of 64 in pairs. */
static inline void arrange(enum codes codes, enum split split, const int16_t *x, uint32_t n,
                           uint8_t *row)
{
    const size_t part = part_bytes(split);
    const uint32_t size = split == PAIRS ? 64 : elements_of(codes);
#if V_BYTE_DOTS
    for (uint32_t i = 0; i < n; i += 32) {
        uint8_t *to = row + (size_t)(i / size) * parts_of(codes) * part;
        vh high, low;
        h_split(x + i, &high, &low);
        if (codes == BYTES) {
            h_store(to + i % size, high);
            h_store(to + part + i % size, low);
            continue;
        }
        h_store_nibbles(to + i % size / 2, 2 * part, high);
        h_store_nibbles(to + part + i % size / 2, 2 * part, low);
    }
#else
    if (codes == BYTES) {
        memcpy(row, x, n * sizeof(*x));
        return;
    }
    for (uint32_t i = 0; i < n; i += 2) /* dword w of part k is pair 4 w + k */
        memcpy(row + (size_t)(i / size) * 4 * part + i / 2 % 4 * part + (size_t)(i % size / 8) * 4,
               x + i, 4);
#endif
}

static inline int32_t sum_of(const int16_t *x, uint32_t n)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i];
    return sum;
}
