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
 *
 * A row may have rests: what rounding to integers left, in units of 2^-REST_BITS of an integer.
 * Their products are rounded before they are added across lanes: to 2^-spare_bits() of an integer,
 * which are left since a chunk has half of 512 codes, and nibbles are small. So that codes of 0
 * stay exact, the bias is taken off in each lane first: a row begins with what rests start from.
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

/* Rows of integers alone, or with their rests. */
enum rests { NO_RESTS, RESTS };

/* Bits of a rest, which is at most half an integer; with V_BYTE_DOTS it is one byte. */
enum { REST_BITS = V_BYTE_DOTS ? 7 : 15 };

/* Sums with rests count in units of 2^-spare_bits() of an integer. */
V_INLINE int spare_bits(enum codes codes)
{
    return codes == BYTES ? 1 : 5;
}

/* What a sum of rests starts from to be rounded, and the sum of both in units of 2^-spare. */
V_INLINE vi half_rest(int spare)
{
    return i_set1(1 << (REST_BITS - spare - 1));
}

V_INLINE vi join_rest(int spare, vi sum, vi rest)
{
    return i_add(i_shl(sum, spare), i_sra(rest, REST_BITS - spare));
}

/* Vectors of a row that belong to one of codes. */
V_INLINE size_t parts_of(enum codes codes, enum rests rests)
{
    const size_t n = codes == BYTES ? 2 : 4;
    if (rests == NO_RESTS)
        return n;
    return V_BYTE_DOTS ? n / 2 * 3 : n * 2;
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

/* The products of a row with a line, added: of bytes high counts 256 times. */
struct products {
    vi high, low, rest;
};

/* A vector of codes as the factors of products, and the products of one row, added. */
#if V_BYTE_DOTS
V_INLINE void unpack_codes(enum codes codes, const uint8_t *at, vi *part)
{
    const vi x = i_load(at), mask = i_set1(0x0f0f0f0f);
    part[0] = codes == BYTES ? x : i_and(x, mask);
    if (codes == NIBBLES)
        part[1] = i_and(i_srl16(x, 4), mask);
}

V_INLINE void add_products(enum codes codes, enum split split, enum rests rests, const vi *part,
                           const uint8_t *row, struct products *sums)
{
    const size_t size = part_bytes(split);
    V_UNROLL
    for (size_t k = 0; k < parts_of(codes, NO_RESTS) / 2; k++, row += (rests ? 3 : 2) * size) {
        sums->high = i_dot(sums->high, part[k], load_part(split, row));
        sums->low = i_dot(sums->low, part[k], load_part(split, row + size));
        if (rests)
            sums->rest = i_dot(sums->rest, part[k], load_part(split, row + 2 * size));
    }
}

V_INLINE vi join_sums(enum codes codes, enum rests rests, const struct products *sums)
{
    const vi x = i_add(sums->low, i_shl(sums->high, 8));
    return rests ? join_rest(spare_bits(codes), x, sums->rest) : x;
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

V_INLINE void add_products(enum codes codes, enum split split, enum rests rests, const vi *part,
                           const uint8_t *row, struct products *sums)
{
    const size_t size = part_bytes(split), n = parts_of(codes, NO_RESTS);
    V_UNROLL
    for (size_t k = 0; k < n; k++, row += size) {
        sums->low = i_add(sums->low, i_madd(part[k], load_part(split, row)));
        if (rests)
            sums->rest = i_add(sums->rest, i_madd(part[k], load_part(split, row + n * size)));
    }
}

V_INLINE vi join_sums(enum codes codes, enum rests rests, const struct products *sums)
{
    return rests ? join_rest(spare_bits(codes), sums->low, sums->rest) : sums->low;
}
#endif

/* A line and n_rows rows: sums[r]. */
V_INLINE void dot_line(enum codes codes, enum split split, enum rests rests,
                       const struct code_lines *lines, uint32_t n_vectors, size_t offset,
                       const uint8_t *const *rows, int n_rows, vi *sums)
{
    const size_t size = parts_of(codes, rests) * part_bytes(split);
    const size_t start = rests ? VECTOR_BYTES : 0;
    struct products products[BLOCK_ROWS];
    V_UNROLL
    for (int r = 0; r < n_rows; r++)
        products[r] = (struct products){i_zero(), i_zero(), rests ? i_load(rows[r]) : i_zero()};
    for (uint32_t v = 0; v < n_vectors; v++) {
        vi part[4];
        unpack_codes(codes, lines->at[v] + offset, part);
        V_UNROLL
        for (int r = 0; r < n_rows; r++)
            add_products(codes, split, rests, part, rows[r] + start + v * size, &products[r]);
    }
    V_UNROLL
    for (int r = 0; r < n_rows; r++)
        sums[r] = join_sums(codes, rests, &products[r]);
}

/* Sums of the lines from first on with n_rows (1 or BLOCK_ROWS) rows: of one row VLEN lines, of a
 * block 4; in runs, as i_hadd_all() takes them. Lines beyond the n_lines stand for the last. */
V_INLINE void dot_some_lines(enum codes codes, enum split split, enum rests rests,
                             const struct code_lines *lines, uint32_t n_vectors, uint32_t first,
                             const uint8_t *const *rows, int n_rows, struct ahead *ahead, vi *runs)
{
    size_t offset = first * lines->stride;
    V_UNROLL
    for (int k = 0; k < VLEN / 4; k++) {
        vi sums[4];
        V_UNROLL
        for (int i = 0; i < 4; i += n_rows) {
            dot_line(codes, split, rests, lines, n_vectors, offset, rows, n_rows, sums + i);
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

V_INLINE void dot_lines(enum codes codes, enum split split, enum rests rests,
                        const struct code_lines *lines, uint32_t n_vectors,
                        const uint8_t *const *rows, int n_rows, struct ahead *ahead,
                        const struct sums *to)
{
    struct ahead next = *ahead;
    for (uint32_t first = 0; first < lines->n; first += n_rows == 1 ? VLEN : 4) {
        vi runs[VLEN / 4];
        dot_some_lines(codes, split, rests, lines, n_vectors, first, rows, n_rows, &next, runs);
        store_sums(split, runs, first, n_rows, to);
    }
    *ahead = next;
}

/* The same with loops of known length where that is common and one row fits into registers. */
V_INLINE void dot_rows(enum codes codes, enum split split, enum rests rests,
                       const struct code_lines *lines, const uint8_t *const *rows, uint32_t n_rows,
                       struct ahead *ahead, const struct sums *to)
{
    const uint32_t n = split == GROUPS ? 1 : lines->n_vectors;
    if (n_rows > 1) {
        dot_lines(codes, split, rests, lines, n, rows, BLOCK_ROWS, ahead, to);
        return;
    }
    switch (n) {
    case 1: dot_lines(codes, split, rests, lines, 1, rows, 1, ahead, to); break;
    case 2: dot_lines(codes, split, rests, lines, 2, rows, 1, ahead, to); break;
    case 4: dot_lines(codes, split, rests, lines, 4, rows, 1, ahead, to); break;
    default: dot_lines(codes, split, rests, lines, n, rows, 1, ahead, to);
    }
}

/* Sums of all lines of keys, or of values, with at most BLOCK_ROWS rows; those of rows beyond the
 * last are written too, and mean nothing, and so are those of lines up to whole vectors. */
static void dot_keys(enum codes codes, enum split split, const struct code_lines *lines,
                     const uint8_t *const *rows, uint32_t n_rows, struct ahead *ahead,
                     const struct sums *to)
{
    if (codes == BYTES)
        dot_rows(BYTES, WHOLE, NO_RESTS, lines, rows, n_rows, ahead, to);
    else if (split == WHOLE)
        dot_rows(NIBBLES, WHOLE, NO_RESTS, lines, rows, n_rows, ahead, to);
    else if (split == GROUPS)
        dot_rows(NIBBLES, GROUPS, NO_RESTS, lines, rows, n_rows, ahead, to);
    else
        dot_rows(NIBBLES, PAIRS, NO_RESTS, lines, rows, n_rows, ahead, to);
}

static void dot_values(enum codes codes, const struct code_lines *lines, const uint8_t *const *rows,
                       uint32_t n_rows, struct ahead *ahead, const struct sums *to)
{
    if (codes == BYTES)
        dot_rows(BYTES, WHOLE, RESTS, lines, rows, n_rows, ahead, to);
    else
        dot_rows(NIBBLES, V_WIDE ? PAIRS : WHOLE, RESTS, lines, rows, n_rows, ahead, to);
}

#if V_BYTE_DOTS
V_INLINE void arrange_parts(enum codes codes, enum split split, const int16_t *x,
                            const int16_t *rest, uint32_t n, uint8_t *row)
{
    const uint32_t size = split == PAIRS ? 64 : elements_of(codes), n_bytes = rest ? 3 : 2;
    const size_t part = part_bytes(split);
    for (uint32_t i = 0; i < n; i += 32) {
        uint8_t *to = row + i / size * parts_of(codes, rest ? RESTS : NO_RESTS) * part;
        vh bytes[3], none;
        h_split(x + i, &bytes[0], &bytes[1]);
        if (rest)
            h_split(rest + i, &none, &bytes[2]);
        for (uint32_t k = 0; k < n_bytes; k++, to += part) {
            if (codes == BYTES)
                h_store(to + i % size, bytes[k]);
            else
                h_store_nibbles(to + i % size / 2, n_bytes * part, bytes[k]);
        }
    }
}
#else
V_INLINE void arrange_words(enum codes codes, uint32_t size, size_t part, const int16_t *x,
                            uint32_t n, size_t stride, uint8_t *row)
{
    for (uint32_t i = 0; codes == BYTES && i < n; i += size)
        memcpy(row + i / size * stride, x + i, size * sizeof(*x));
    for (uint32_t i = 0; codes == NIBBLES && i < n; i += 2) /* dword w of part k is pair 4 w + k */
        memcpy(row + i / size * stride + i / 2 % 4 * part + (size_t)(i % size / 8) * 4, x + i, 4);
}

V_INLINE void arrange_parts(enum codes codes, enum split split, const int16_t *x,
                            const int16_t *rest, uint32_t n, uint8_t *row)
{
    const uint32_t size = split == PAIRS ? 64 : elements_of(codes);
    const size_t part = part_bytes(split);
    const size_t stride = parts_of(codes, rest ? RESTS : NO_RESTS) * part;
    arrange_words(codes, size, part, x, n, stride, row);
    if (rest)
        arrange_words(codes, size, part, rest, n, stride, row + parts_of(codes, NO_RESTS) * part);
}
#endif

/* What the rests of an arranged row start from: half a unit, less what codes of 0 add. */
V_INLINE vi rests_start(enum codes codes, enum split split, const uint8_t *row, size_t n_vectors)
{
    const size_t size = parts_of(codes, RESTS) * part_bytes(split);
    struct products sums = {i_zero(), i_zero(), i_zero()};
    uint8_t zeros[VECTOR_BYTES];
    vi part[4];
    memset(zeros, codes == BYTES ? KVC_BIAS8_K : KVC_BIAS4 * 0x11, sizeof(zeros));
    unpack_codes(codes, zeros, part);
    for (size_t v = 0; v < n_vectors; v++)
        add_products(codes, split, RESTS, part, row + v * size, &sums);
    return i_sub(half_rest(spare_bits(codes)), sums.rest);
}

V_INLINE void arrange_codes(enum codes codes, enum split split, const int16_t *x,
                            const int16_t *rest, uint32_t n, uint8_t *row)
{
    const uint32_t size = split == PAIRS ? 64 : elements_of(codes);
    uint8_t *parts = rest ? row + VECTOR_BYTES : row;
    arrange_parts(codes, split, x, rest, n, parts);
    if (rest)
        i_store(row, rests_start(codes, split, parts, n / size));
}

/* A row as the products want it, with rests or, if they are NULL, without; n is a multiple of
 * elements_of(), or of 64 in pairs. */
static inline void arrange(enum codes codes, enum split split, const int16_t *x,
                           const int16_t *rest, uint32_t n, uint8_t *row)
{
    if (codes == BYTES)
        arrange_codes(BYTES, split, x, rest, n, row);
    else
        arrange_codes(NIBBLES, split, x, rest, n, row);
}

static inline int32_t sum_of(const int16_t *x, uint32_t n)
{
    int32_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += x[i];
    return sum;
}
