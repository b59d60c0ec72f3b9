/*
 * dots_tmpl.h - template of products of rows of 16-bit integers with lines of codes, the inner loop
 * of attention that is not exact.
 * Parameters: VLEN, the integer words of vec_avx2.h, V_BYTE_DOTS, and those of lines_tmpl.h.
 *
 * A row of floats becomes scale * n with integers n, and a sum of products n * code is an integer:
 * exact, in whatever order. Rows are laid out as the instruction wants them (arrange()):
 *
 * V_BYTE_DOTS: a dot instruction multiplies unsigned with signed bytes. n is 256 high + low, and
 * each half has a sum of its own. Codes are the unsigned side, with their bias, and rows signed.
 * But weights times scales of INT8 are never negative: they are the unsigned side, and have one bit
 * more.
 *
 * Else codes become 16-bit integers, with their bias, and are multiplied in pairs.
 *
 * A bias leaves its product with the sum of a row, which is taken off in the end. No sum leaves 32
 * bits: 512 codes of -128 with rows of SIGNED_MAX, and 256 of them with rows of UNSIGNED_MAX, are
 * below 2^31; what passes it on the way, comes back.
 */
#include "../kernels.h"
#include "../page.h"

enum { VECTOR_BYTES = 4 * VLEN };

/* Pages whose values are summed before the lanes are. */
enum { CHUNK_PAGES = 4, CHUNK_TOKENS = CHUNK_PAGES * KVC_PAGE_ROWS };

enum { SIGNED_MAX = 127 * 256 + 127, UNSIGNED_MAX = 65535 };

enum codes { BYTES, NIBBLES };
enum rows_of { QUERIES, WEIGHTS };

/* What a vector of codes holds: part of one line; of two groups of a line, half and half; or two
 * lines, which are vectors of half the size. The latter two only where 64 nibbles are half a
 * vector. */
enum split { WHOLE, GROUPS, PAIRS };

/* Vectors of a row that belong to one of codes. */
V_INLINE int parts_of(enum codes codes)
{
    return codes == BYTES ? 2 : 4;
}

V_INLINE uint32_t elements_of(enum codes codes)
{
    return codes == BYTES ? VECTOR_BYTES : 2 * VECTOR_BYTES;
}

V_INLINE bool is_unsigned(enum codes codes, enum rows_of rows_of)
{
    return V_BYTE_DOTS && codes == BYTES && rows_of == WEIGHTS;
}

/* What codes are too large by, when they are multiplied. */
V_INLINE int32_t bias_of(enum codes codes, enum rows_of rows_of)
{
    if (codes == NIBBLES)
        return KVC_BIAS4;
    return is_unsigned(codes, rows_of) ? 0 : KVC_BIAS8_K;
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
V_INLINE void unpack_codes(enum codes codes, enum rows_of rows_of, const uint8_t *at, vi *part)
{
    const vi x = i_load(at), low = i_set1(0x0f0f0f0f);
    if (codes == BYTES) {
        part[0] = is_unsigned(codes, rows_of) ? i_xor(x, i_set1((int)0x80808080u)) : x;
        return;
    }
    part[0] = i_and(x, low);
    part[1] = i_and(i_srl16(x, 4), low);
}

V_INLINE void add_products(enum codes codes, enum rows_of rows_of, const vi *part,
                           const uint8_t *row, vi *high, vi *low)
{
    V_UNROLL
    for (int k = 0; k < parts_of(codes); k++) {
        const vi x = i_load(row + k * VECTOR_BYTES);
        vi *sum = k % 2 ? low : high;
        *sum = is_unsigned(codes, rows_of) ? i_dot(*sum, x, part[k / 2])
                                           : i_dot(*sum, part[k / 2], x);
    }
}

V_INLINE vi join_sums(vi high, vi low)
{
    return i_add(low, i_shl(high, 8));
}
#else
V_INLINE void unpack_codes(enum codes codes, enum rows_of rows_of, const uint8_t *at, vi *part)
{
    (void)rows_of;
    if (codes == BYTES) {
        part[0] = i_widen(at);
        part[1] = i_widen(at + VECTOR_BYTES / 2);
        return;
    }
    const vi x = i_load(at), low = i_set1(0x000f000f);
    part[0] = i_and(x, low);
    part[1] = i_and(i_srl16(x, 4), low);
    part[2] = i_and(i_srl16(x, 8), low);
    part[3] = i_srl16(x, 12);
}

V_INLINE void add_products(enum codes codes, enum rows_of rows_of, const vi *part,
                           const uint8_t *row, vi *high, vi *low)
{
    (void)rows_of;
    (void)high;
    V_UNROLL
    for (int k = 0; k < parts_of(codes); k++)
        *low = i_add(*low, i_madd(part[k], i_load(row + k * VECTOR_BYTES)));
}

V_INLINE vi join_sums(vi high, vi low)
{
    (void)high;
    return low;
}
#endif

/* Sums of the lines first ... with n_rows (1 or BLOCK_ROWS) rows: of one row, VLEN lines; of a
 * block, 4 lines, sum 4 r + j. Lines beyond the last stand for it. */
V_INLINE void dot_codes(enum codes codes, enum rows_of rows_of, const struct code_lines *lines,
                        uint32_t n_vectors, uint32_t first, const uint8_t *const *rows, int n_rows,
                        struct ahead *ahead, vi *sums)
{
    const int n_lines = n_rows == 1 ? VLEN : 4, step = n_rows == 1 ? 4 : 2;
    V_UNROLL
    for (int j = 0; j < n_lines; j += step) {
        vi high[2 * BLOCK_ROWS > 4 ? 2 * BLOCK_ROWS : 4], low[sizeof(high) / sizeof(*high)];
        size_t offset[4];
        V_UNROLL
        for (int i = 0; i < step; i++) {
            const uint32_t line = first + (uint32_t)(j + i);
            offset[i] = (line < lines->n ? line : lines->n - 1) * lines->stride;
        }
        V_UNROLL
        for (int i = 0; i < n_rows * step; i++)
            high[i] = low[i] = i_zero();
        for (uint32_t v = 0; v < n_vectors; v++) {
            V_UNROLL
            for (int i = 0; i < step; i++) {
                vi part[4];
                look_ahead(ahead);
                unpack_codes(codes, rows_of, lines->at[v] + offset[i], part);
                V_UNROLL
                for (int r = 0; r < n_rows; r++)
                    add_products(codes, rows_of, part,
                                 rows[r] + (size_t)v * (size_t)parts_of(codes) * VECTOR_BYTES,
                                 &high[step * r + i], &low[step * r + i]);
            }
        }
        V_UNROLL
        for (int r = 0; r < n_rows; r++) {
            V_UNROLL
            for (int i = 0; i < step; i++) {
                sums[(n_rows == 1 ? 0 : 4 * r) + j + i] =
                    join_sums(high[step * r + i], low[step * r + i]);
            }
        }
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

V_INLINE void store_sums(enum split split, const vi *dots, uint32_t first, int n_rows,
                         const struct sums *to)
{
#if V_WIDE
    vi low, high;
    if (split == GROUPS) {
        i_hadd_halves(dots, &low, &high);
        store_part(low, to->low + first, to->stride, n_rows);
        store_part(high, to->high + first, to->stride, n_rows);
        return;
    }
    if (split == PAIRS) {
        i_hadd_halves(dots, &low, &high);
        i_zip(n_rows > 1, &low, &high);
        store_part(low, to->low + 2 * first, to->stride, n_rows);
        store_part(high, to->low + 2 * first + (n_rows == 1 ? VLEN : 4), to->stride, n_rows);
        return;
    }
#endif
    (void)split;
    store_part(i_hadd_all(dots), to->low + first, to->stride, n_rows);
}

V_INLINE void dot_lines(enum codes codes, enum rows_of rows_of, enum split split,
                        const struct code_lines *lines, uint32_t n_vectors,
                        const uint8_t *const *rows, int n_rows, struct ahead *ahead,
                        const struct sums *to)
{
    struct ahead next = *ahead;
    for (uint32_t first = 0; first < lines->n; first += n_rows == 1 ? VLEN : 4) {
        vi dots[VLEN];
        next_range(&next);
        dot_codes(codes, rows_of, lines, n_vectors, first, rows, n_rows, &next, dots);
        store_sums(split, dots, first, n_rows, to);
    }
    *ahead = next;
}

V_INLINE void dot_rows(enum codes codes, enum rows_of rows_of, enum split split,
                       const struct code_lines *lines, uint32_t n_vectors,
                       const uint8_t *const *rows, uint32_t n_rows, struct ahead *ahead,
                       const struct sums *to)
{
    if (n_rows == 1)
        dot_lines(codes, rows_of, split, lines, n_vectors, rows, 1, ahead, to);
    else
        dot_lines(codes, rows_of, split, lines, n_vectors, rows, BLOCK_ROWS, ahead, to);
}

/* The same with loops of known length where that is common. */
V_INLINE void dot_vectors(enum codes codes, enum rows_of rows_of, enum split split,
                          const struct code_lines *lines, const uint8_t *const *rows,
                          uint32_t n_rows, struct ahead *ahead, const struct sums *to)
{
    switch (lines->n_vectors) {
    case 1: dot_rows(codes, rows_of, split, lines, 1, rows, n_rows, ahead, to); break;
    case 2: dot_rows(codes, rows_of, split, lines, 2, rows, n_rows, ahead, to); break;
    case 4: dot_rows(codes, rows_of, split, lines, 4, rows, n_rows, ahead, to); break;
    default: dot_rows(codes, rows_of, split, lines, lines->n_vectors, rows, n_rows, ahead, to);
    }
}

/* Sums of all lines with at most BLOCK_ROWS rows; those of rows beyond the last are written too,
 * and mean nothing, and so are those of lines up to whole vectors. */
static void dot_keys(enum codes codes, enum split split, const struct code_lines *lines,
                     const uint8_t *const *rows, uint32_t n_rows, struct ahead *ahead,
                     const struct sums *to)
{
    if (codes == BYTES)
        dot_vectors(BYTES, QUERIES, WHOLE, lines, rows, n_rows, ahead, to);
    else if (split == WHOLE)
        dot_vectors(NIBBLES, QUERIES, WHOLE, lines, rows, n_rows, ahead, to);
    else if (split == GROUPS)
        dot_rows(NIBBLES, QUERIES, GROUPS, lines, 1, rows, n_rows, ahead, to);
    else
        dot_rows(NIBBLES, QUERIES, PAIRS, lines, 1, rows, n_rows, ahead, to);
}

static void dot_values(enum codes codes, const struct code_lines *lines, const uint8_t *const *rows,
                       uint32_t n_rows, struct ahead *ahead, const struct sums *to)
{
    if (codes == BYTES)
        dot_vectors(BYTES, WEIGHTS, WHOLE, lines, rows, n_rows, ahead, to);
    else
        dot_vectors(NIBBLES, WEIGHTS, V_WIDE ? PAIRS : WHOLE, lines, rows, n_rows, ahead, to);
}

/*
 * A row as the products want it: n is a multiple of elements_of(), or twice: 64 elements, once for
 * either line of a pair.
 */
static inline void arrange(enum codes codes, enum rows_of rows_of, bool twice, const uint16_t *x,
                           uint32_t n, uint8_t *row)
{
#if V_BYTE_DOTS
    const uint32_t size = twice ? VECTOR_BYTES : elements_of(codes);
    for (uint32_t i = 0; i < n; i += 32) {
        uint8_t *to = row + (size_t)(i / size) * (size_t)parts_of(codes) * VECTOR_BYTES;
        vh high, low;
        h_split(is_unsigned(codes, rows_of), x + i, &high, &low);
        if (codes == BYTES) {
            h_store(to + i % size, high);
            h_store(to + VECTOR_BYTES + i % size, low);
            continue;
        }
        for (uint32_t again = 0; again <= twice; again++, to += VECTOR_BYTES / 2) {
            h_store_nibbles(to + i % size / 2, 2 * VECTOR_BYTES, high);
            h_store_nibbles(to + VECTOR_BYTES + i % size / 2, 2 * VECTOR_BYTES, low);
        }
    }
#else
    (void)rows_of;
    if (codes == BYTES) {
        memcpy(row, x, n * sizeof(*x));
        return;
    }
    const uint32_t size = twice ? VECTOR_BYTES : elements_of(codes);
    for (uint32_t i = 0; i < n; i += 2) { /* dword w of part k is pair 4 w + k */
        uint8_t *to = row + (size_t)(i / size) * 4 * VECTOR_BYTES + i / 2 % 4 * VECTOR_BYTES +
                      (size_t)(i % size / 8) * 4;
        memcpy(to, x + i, 4);
        if (twice)
            memcpy(to + VECTOR_BYTES / 2, x + i, 4);
    }
#endif
}

static inline int32_t sum_of(bool is_unsigned, const uint16_t *x, uint32_t n)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += is_unsigned ? x[i] : (int16_t)x[i];
    return sum;
}
