/*
 * kernels.h - the kernel table: the only door between algorithms and machine code.
 *
 * A kernel works in the memory of its own backend, allocates nothing, waits for nothing, starts no
 * thread, keeps no state and may assume that its arguments are valid: the algorithm above has
 * checked them, and nothing to do never reaches it. It returns KVC_OK or KVC_E_DEVICE (no CPU table
 * does). Codes, parameters, halves and counts are the same bytes in every table; floating-point
 * sums have the tolerance stated here.
 */
#ifndef KVC_KERNELS_H
#define KVC_KERNELS_H

#include "kvc/base.h"
#include "layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where to run: stream NULL and device -1 for the CPU. */
struct kvc_queue {
    int device;
    void *stream;
};

/* A matrix of the caller; stride in elements. */
struct kvc_rows {
    const void *data;
    kvc_dtype dtype;
    size_t stride;
    size_t n_rows, n_cols;
};

/* Range over the finite elements, both 0 if there is none; and how many are not finite. */
struct kvc_range {
    float min, max;
    uint64_t n_nonfinite;
};

typedef kvc_status kvc_range_rows_fn(const struct kvc_queue *queue, const struct kvc_rows *src,
                                     struct kvc_range *range);

/*
 * One factor (or divisor) for all elements: code = clamp(rint(x * factor), lo, hi), or x / factor.
 * dst rows are dst_stride bytes apart: int8, or INT4 in two's complement, low nibble first, odd
 * rows end with a zero nibble. Needs no alignment.
 */
struct kvc_fixed_code {
    int bits, lo, hi;
    float factor;
    bool divide;
};

typedef kvc_status kvc_quantize_fixed_fn(const struct kvc_queue *queue, const struct kvc_rows *src,
                                         const struct kvc_fixed_code *code, uint8_t *dst,
                                         size_t dst_stride);

/* Mode TOKEN: a half scale a row, scales[r * scale_stride] (codes.h). Adds to *n_saturated. */
typedef kvc_status kvc_quantize_tokens_fn(const struct kvc_queue *queue, const struct kvc_rows *src,
                                          int bits, uint8_t *dst, size_t dst_stride,
                                          uint16_t *scales, size_t scale_stride,
                                          uint64_t *n_saturated);

/* Mode CHANNEL over all rows: scales[c], minima[c]; codes as stored by the operator, minus half the
 * range. Adds to *n_saturated. */
typedef kvc_status kvc_quantize_channels_fn(const struct kvc_queue *queue,
                                            const struct kvc_rows *src, int bits, uint8_t *dst,
                                            size_t dst_stride, uint16_t *scales, uint16_t *minima,
                                            uint64_t *n_saturated);

/* Parameters of packed operator codes: fixed scale if scales is NULL; minima NULL: a scale a row.
 */
struct kvc_dequant {
    int bits;
    float scale;
    const uint16_t *scales;
    size_t scale_stride;
    const uint16_t *minima;
};

/* dst[r][c] = code * scale (+ minimum), rows dst_stride elements apart; gaps are not written. */
typedef kvc_status kvc_dequantize_rows_fn(const struct kvc_queue *queue, const uint8_t *codes,
                                          size_t src_stride, const struct kvc_dequant *params,
                                          size_t n_rows, size_t n_cols, float *dst,
                                          size_t dst_stride);

/* What storing rows met. */
struct kvc_store_counts {
    uint64_t n_nonfinite, n_saturated;
};

/*
 * dst[r][c] = half(src[r][c]): finite values saturate at +-65504, NaN becomes 0, Inf the largest
 * finite magnitude of its row, after saturation, with its sign. Columns n_cols ... n_padded - 1
 * become 0. Adds to counts.
 */
typedef kvc_status kvc_store_rows_fn(const struct kvc_queue *queue, const struct kvc_rows *src,
                                     uint16_t *dst, size_t dst_stride, size_t n_padded,
                                     struct kvc_store_counts *counts);

/*
 * Turns rows into the form that a cache stores, or back: in this order
 *
 *     x -= sub[c],  x *= mul[c],  H,  x *= mul_after[c],  x += add_after[c]
 *
 * each step with one rounding an element, those whose pointer is NULL left out. H is the
 * Walsh-Hadamard transform of each run of `block` channels: for h = 1, 2, 4 ... block / 2 the pairs
 * (a, b) at distance h become (a + b, a - b); then all times the float nearest 1 / sqrt(block).
 * block is a power of two that divides d, at most KVC_MAX_HEAD_DIM; 1: no H. The same bits in every
 * table.
 */
struct kvc_row_transform {
    const float *sub, *mul;
    uint32_t block;
    const float *mul_after, *add_after;
};

/* dst[r][c] = transform(float(src[r][c])); columns n_cols ... n_padded - 1 become 0. dst rows are
 * dst_stride >= n_padded apart; dst may be src where that is F32 of the same stride. The vectors of
 * the transform have n_cols elements and may be read up to the next multiple of 16. */
typedef kvc_status kvc_transform_rows_fn(const struct kvc_queue *queue, const struct kvc_rows *src,
                                         const struct kvc_row_transform *transform, float *dst,
                                         size_t dst_stride, size_t n_padded);

/* dst[r][c] = float(src[r][c]); columns n_cols ... n_padded - 1 become 0. */
typedef kvc_status kvc_load_rows_fn(const struct kvc_queue *queue, const struct kvc_rows *src,
                                    float *dst, size_t dst_stride, size_t n_padded);

/*
 * Turns the first n_rows rows of an unsealed page (layout from) into a sealed one (layout to) and
 * writes all its bytes; rows and pads that hold no value get the code of 0 (CHANNEL: 0), unused
 * scales 0. absmax_k and absmax_v set the scales of mode HEAD. All halves are finite.
 */
struct kvc_seal_job {
    const struct kvc_page_layout *from, *to;
    const uint8_t *src;
    const uint8_t *after; /* NULL, or the unsealed page of the next job, so that a kernel may ask
                           * for it */
    uint8_t *dst;
    uint32_t n_rows;
    float absmax_k, absmax_v;
};

typedef kvc_status kvc_seal_page_fn(const struct kvc_queue *queue, const struct kvc_seal_job *job);

/* Rows first ... first + n_rows - 1 of a page in any layout as floats: k [n_rows][k_stride] and v
 * [n_rows][v_stride], each or NULL; elements beyond a row are not written. A code times its scale,
 * then plus its minimum: two roundings. */
typedef kvc_status kvc_read_page_fn(const struct kvc_queue *queue,
                                    const struct kvc_page_layout *layout, const uint8_t *page,
                                    uint32_t first, uint32_t n_rows, float *k, size_t k_stride,
                                    float *v, size_t v_stride);

/*
 * Copies the rows src_rows[i] (i where src_rows is NULL) of src to rows dst_row + i of dst: codes
 * and token scales, bit for bit. src == dst is allowed when src_rows ascends and dst_row + i <=
 * src_rows[i]. Not for HEAD and CHANNEL.
 */
typedef kvc_status kvc_move_rows_fn(const struct kvc_queue *queue,
                                    const struct kvc_page_layout *layout, const uint8_t *src,
                                    const uint8_t *src_rows, uint32_t n_rows, uint8_t *dst,
                                    uint32_t dst_row);

/* A sealed page without rows: the codes of 0 (CHANNEL: 0), all parameters 0. */
typedef kvc_status kvc_clear_page_fn(const struct kvc_queue *queue,
                                     const struct kvc_page_layout *layout, uint8_t *page);

/* Most query rows and pages of one tile. */
#define KVC_TILE_ROWS  16
#define KVC_TILE_PAGES 16

/* A page as attention sees it. */
struct kvc_attend_page {
    const uint8_t *data;
    const struct kvc_page_layout *layout;
    uint32_t n_rows;      /* rows that hold something */
    uint32_t slot;        /* its number in the block, where others may be left out; ascending */
    const uint64_t *mask; /* [rows of the tile]: the page's rows that each query row sees */
    const float *bias;    /* [64], or NULL: of each row, added to its logit after the softcap */
};

/* What attention leaves of a block to make masses of (mass_parts()), by slot. */
struct kvc_attend_masses {
    float *m, *l;   /* [n_rows][KVC_TILE_PAGES]: of each page; l, relative to its m, is 0, and m
                     * -inf, where nothing is seen */
    float *weights; /* NULL, or [KVC_TILE_PAGES][n_rows][64]: exp(s - m), and 0 of what is not seen;
                     * anything where l is 0 */
};

/*
 * Attention of n_rows query rows over at most KVC_TILE_PAGES pages:
 *
 *     s = scale * q . k + shift of the query row, then softcap * tanh(s / softcap) if softcap > 0,
 *     then + bias of the row of the page, over the rows in mask
 *     m = max s, l = sum exp(s - m), o = sum exp(s - m) v
 *
 * Nothing seen: m = -inf, l = 0, o = 0. Rows outside a mask may hold anything, NaN too. The
 * arithmetic of a query row does not depend on the other rows, nor on pages that it does not see.
 * fp32; each table has its own order of sums. A tile that is not exact lets a table take products
 * with codes of 16-bit integers: q, and the weights of the pages whose slot / 4 is the same, round
 * to such.
 */
struct kvc_attend_tile {
    const struct kvc_attend_page *pages;
    uint32_t n_pages, n_rows;
    const struct kvc_attend_page
        *after;       /* [n_after]: what will be attended next, so that a kernel */
    uint32_t n_after; /* may ask for it; only data and layout are set */
    bool exact;
    const float *q; /* [n_rows][stride], pads 0; stride is kvc_attend_stride(d_k) */
    float scale, softcap;
    const float *shift;                     /* [n_rows], or NULL: zeros */
    float *m, *l;                           /* [n_rows] */
    float *o;                               /* [n_rows][kvc_attend_stride(d_v)] */
    const struct kvc_attend_masses *masses; /* NULL, or what else to write; not by attend_block() */
    float *work;                            /* kvc_attend_work_size() floats */
};

typedef kvc_status kvc_attend_pages_fn(const struct kvc_queue *queue,
                                       const struct kvc_attend_tile *tile);

/* Elements between rows of q and o: whole vectors of every table. */
KVC_BOTH static inline size_t kvc_attend_stride(size_t d)
{
    return (d + 15) & ~(size_t)15;
}

/* A tile of 16 rows of K or of 16 channels of V as floats, and for each query row: itself as
 * floats and twice as integers; 64 products, 256 scores, and 256 weights as twice 16 bits, and a
 * vector. */
static inline size_t kvc_attend_work_size(size_t d_k)
{
    const size_t integers = ((d_k + 127) & ~(size_t)127);
    return 16 * kvc_attend_stride(d_k > KVC_PAGE_ROWS ? d_k : KVC_PAGE_ROWS) +
           KVC_TILE_ROWS * (kvc_attend_stride(d_k) + integers + (size_t)9 * KVC_PAGE_ROWS + 16);
}

/*
 * The same for many query rows, at most KVC_BLOCK_ROWS, which share the work of unpacking a page;
 * always with products of floats, exact or not.
 * A row gives other bits than attend_pages(), but depends on its neighbours as little. Values of
 * unsealed pages are as finite as those of sealed ones: NaN and Inf that a row sees count as the
 * largest half. o has room for kvc_attend_stride(n_rows) rows, and work is
 * kvc_block_work_size() floats.
 */
#define KVC_BLOCK_ROWS 64

typedef kvc_status kvc_attend_block_fn(const struct kvc_queue *queue,
                                       const struct kvc_attend_tile *tile);

/* Transposed query rows, one side of a page as floats, and scores. */
static inline size_t kvc_block_work_size(size_t d_k, size_t d_v, size_t n_rows)
{
    const size_t s_k = kvc_attend_stride(d_k), s_v = kvc_attend_stride(d_v);
    return kvc_attend_stride(n_rows) * (s_k + KVC_PAGE_ROWS) +
           KVC_PAGE_ROWS * (s_k > s_v ? s_k : s_v);
}

/* Rows of K or V of an engine (rows.h): row t of head h begins at data + t * token_stride + h *
 * head_stride, in bytes, aligned to 2. */
struct kvc_stored_rows {
    const uint8_t *data;
    kvc_row_format format;
    uint32_t d;
    size_t token_stride, head_stride;
};

/* Most keys of one call. */
#define KVC_ROWS_KEYS 512

/*
 * Attention of n_rows query rows a KV head over the first n_keys rows of n_heads KV heads:
 *
 *     s = scale * q . k, then softcap * tanh(s / softcap) if softcap > 0, then + mask[row][key],
 *     over the keys below n_seen[row] whose mask is not -inf
 *     m = max s, l = sum exp(s - m), o = sum exp(s - m) v
 *
 * Nothing seen: m = -inf, l = 0, o = 0. Keys that a row does not see may hold anything, NaN too. A
 * sum that is no number makes m, l and o of its row NaN. The arithmetic of a query row does not
 * depend on the other rows, nor on the other heads. fp32; each table has its own order of sums. A
 * tile that is not exact lets a table take products with blocks of 16-bit integers, to which q, or
 * the weights of keys, are rounded.
 */
struct kvc_rows_tile {
    struct kvc_stored_rows k, v;
    uint32_t n_heads, n_rows, n_keys; /* n_rows is at most KVC_TILE_ROWS */
    bool exact;
    const float *q; /* [n_heads][n_rows][stride], pads 0; stride is kvc_attend_stride(d of K) */
    float scale, softcap;
    const uint32_t *n_seen;  /* [n_rows]: 0 ... n_keys */
    const void *const *mask; /* [n_rows]: n_keys elements each; or NULL */
    kvc_dtype mask_dtype;    /* F32 or F16 */
    float *m, *l;            /* [n_heads][n_rows] */
    float *o;                /* [n_heads][n_rows][kvc_attend_stride(d of V)] */
    float *work;             /* kvc_rows_work_size() floats, aligned to 64 bytes */
};

typedef kvc_status kvc_attend_rows_fn(const struct kvc_queue *queue,
                                      const struct kvc_rows_tile *tile);

/* For each query row: itself as integers and rests, and a sum and a scale for each of its blocks;
 * and for 32 keys: a factor for each block of K and V, a score for each row of one head, and a
 * weight for each of 4 rows and block of V. */
static inline size_t kvc_rows_work_size(size_t n_rows, size_t d_k, size_t d_v)
{
    const size_t blocks_k = (d_k + 31) / 32, blocks_v = (d_v + 31) / 32;
    return n_rows * (((blocks_k + 3) & ~(size_t)3) * 32 + 32) +
           32 * (blocks_k + 5 * blocks_v + KVC_TILE_ROWS);
}

/* mass[page][token] += sum over the tile's rows of exp(s - lse[row]); rows whose lse is not finite
 * add nothing. Only pages, q, scale, softcap, shift and work of the tile are used. mass is
 * [n_pages][64].
 */
typedef kvc_status kvc_mass_pages_fn(const struct kvc_queue *queue,
                                     const struct kvc_attend_tile *tile, const float *lse,
                                     float *mass);

/* Adds the partial result (m, l, o) of later pages to an earlier one, row by row. */
struct kvc_attend_part {
    float *m, *l, *o;
};

typedef kvc_status kvc_merge_parts_fn(const struct kvc_queue *queue, struct kvc_attend_part *into,
                                      const struct kvc_attend_part *part, size_t n_rows,
                                      size_t d_v);

/*
 * The masses of a block: with f = exp(m - lse[row]),
 *
 *     mass[slot][0] += sum over the rows of f l, or, if there are weights,
 *     mass[slot][t] += sum over the rows of f weights[slot][row][t]
 *
 * A slot whose mass is NULL is left out; rows whose lse is not finite add nothing.
 */
typedef kvc_status kvc_mass_parts_fn(const struct kvc_queue *queue,
                                     const struct kvc_attend_masses *from, size_t n_rows,
                                     const float *lse, float *const *mass);

/* dst row r (elements dst_stride apart) = o / l, or zeros where l is 0; lse[r] = m + ln l, or -inf.
 */
typedef kvc_status kvc_finish_rows_fn(const struct kvc_queue *queue,
                                      const struct kvc_attend_part *part, size_t n_rows, size_t d_v,
                                      void *dst, kvc_dtype dtype, size_t dst_stride, float *lse);

/*
 * The kernels from here to rotate_rows decide what is kept and merged, and give the same bits in
 * every table: one rounded operation at a time, no fused ones, in this order.
 *
 * dots[i * stride + j] = a_i . b_j for n_a times n_b rows of d elements; rows lie
 * kvc_attend_stride(d) apart and end with zeros. 16 sums: sum l takes the products of the elements
 * l, l + 16, l + 32, ...; then sum l + sum l + 8 (8 sums), and so on by 4, 2 and 1.
 */
typedef kvc_status kvc_dot_rows_fn(const struct kvc_queue *queue, const float *a, size_t n_a,
                                   const float *b, size_t n_b, size_t d, float *dots,
                                   size_t stride);

/*
 * Takes at most 64 keys further: s [n_rows][64] logits, mask [n_rows] the keys that count.
 *
 *     m' = max(m, max s), l' = l exp(m - m') + sum exp(s - m'), kvc_exp() of exp.h
 *
 * The sum: 16 sums, sum i takes the keys i, i + 16, ... (0 for those that do not count), added as
 * in dot_rows. NaN does not reach m', but l'. Nothing counts or all s are -inf: unchanged. Start
 * with m = -inf, l = 0.
 */
typedef kvc_status kvc_lse_block_fn(const struct kvc_queue *queue, const float *s,
                                    const uint64_t *mask, size_t n_rows, float *m, float *l);

/* mass[t] += weights[r] * exp(s[r][t] - lse[r]) for each row r, ascending, whose lse is finite and
 * whose mask has bit t; mass is [64]. */
typedef kvc_status kvc_mass_block_fn(const struct kvc_queue *queue, const float *s,
                                     const uint64_t *mask, const float *lse, const float *weights,
                                     size_t n_rows, float *mass);

/* out[i] = a[i] * w_a + b[i] * w_b: three roundings. out may be a or b. */
typedef kvc_status kvc_mix_rows_fn(const struct kvc_queue *queue, const float *a, float w_a,
                                   const float *b, float w_b, size_t n, float *out);

/*
 * Rotates rows of n_pairs pairs in place: x' = x c - y s, y' = x s + y c, each with three
 * roundings, with c and s [n_rows][n_pairs]. Pair j is elements (2 j, 2 j + 1) if interleaved, else
 * (j, j + n_pairs). Elements beyond the pairs stay.
 */
typedef kvc_status kvc_rotate_rows_fn(const struct kvc_queue *queue, float *x, size_t n_rows,
                                      size_t stride, const float *c, const float *s, size_t n_pairs,
                                      bool interleaved);

/* Row i becomes row rows[i], for ascending rows, in place: row_bytes bytes that lie stride bytes
 * apart. */
typedef kvc_status kvc_gather_rows_fn(const struct kvc_queue *queue, void *data, size_t row_bytes,
                                      size_t stride, const int32_t *rows, size_t n);

struct kvc_kernels {
    const char *name;
    kvc_range_rows_fn *range_rows;
    kvc_quantize_fixed_fn *quantize_fixed;
    kvc_quantize_tokens_fn *quantize_tokens;
    kvc_quantize_channels_fn *quantize_channels;
    kvc_dequantize_rows_fn *dequantize_rows;
    kvc_store_rows_fn *store_rows;
    kvc_load_rows_fn *load_rows;
    kvc_transform_rows_fn *transform_rows;
    kvc_seal_page_fn *seal_page;
    kvc_read_page_fn *read_page;
    kvc_move_rows_fn *move_rows;
    kvc_clear_page_fn *clear_page;
    kvc_attend_pages_fn *attend_pages;
    kvc_attend_block_fn *attend_block;
    kvc_mass_pages_fn *mass_pages;
    kvc_attend_rows_fn *attend_rows;
    kvc_merge_parts_fn *merge_parts;
    kvc_mass_parts_fn *mass_parts;
    kvc_finish_rows_fn *finish_rows;
    kvc_dot_rows_fn *dot_rows;
    kvc_lse_block_fn *lse_block;
    kvc_mass_block_fn *mass_block;
    kvc_mix_rows_fn *mix_rows;
    kvc_rotate_rows_fn *rotate_rows;
    kvc_gather_rows_fn *gather_rows;
};

extern const struct kvc_kernels kvc_kernels_ref;
extern const struct kvc_kernels kvc_kernels_avx2;
extern const struct kvc_kernels kvc_kernels_avx512;
extern const struct kvc_kernels kvc_kernels_vnni;

/* One line a variant. */
kvc_range_rows_fn kvc_range_rows_ref, kvc_range_rows_avx2, kvc_range_rows_avx512;
kvc_quantize_fixed_fn kvc_quantize_fixed_ref, kvc_quantize_fixed_avx2, kvc_quantize_fixed_avx512;
kvc_quantize_tokens_fn kvc_quantize_tokens_ref, kvc_quantize_tokens_avx2,
    kvc_quantize_tokens_avx512;
kvc_quantize_channels_fn kvc_quantize_channels_ref, kvc_quantize_channels_avx2,
    kvc_quantize_channels_avx512;
kvc_dequantize_rows_fn kvc_dequantize_rows_ref, kvc_dequantize_rows_avx2,
    kvc_dequantize_rows_avx512;
kvc_store_rows_fn kvc_store_rows_ref, kvc_store_rows_avx2, kvc_store_rows_avx512;
kvc_load_rows_fn kvc_load_rows_ref, kvc_load_rows_avx2, kvc_load_rows_avx512;
kvc_transform_rows_fn kvc_transform_rows_ref, kvc_transform_rows_avx2, kvc_transform_rows_avx512;
kvc_seal_page_fn kvc_seal_page_ref, kvc_seal_page_avx2, kvc_seal_page_avx512;
kvc_read_page_fn kvc_read_page_ref, kvc_read_page_avx2, kvc_read_page_avx512;
kvc_move_rows_fn kvc_move_rows_ref;
kvc_clear_page_fn kvc_clear_page_ref;
kvc_attend_pages_fn kvc_attend_pages_ref, kvc_attend_pages_avx2, kvc_attend_pages_avx512,
    kvc_attend_pages_vnni;
kvc_attend_block_fn kvc_attend_block_ref, kvc_attend_block_avx2, kvc_attend_block_avx512;
kvc_mass_pages_fn kvc_mass_pages_ref, kvc_mass_pages_avx2, kvc_mass_pages_avx512,
    kvc_mass_pages_vnni;
kvc_attend_rows_fn kvc_attend_rows_ref, kvc_attend_rows_avx2, kvc_attend_rows_avx512,
    kvc_attend_rows_vnni;
kvc_merge_parts_fn kvc_merge_parts_ref, kvc_merge_parts_avx2, kvc_merge_parts_avx512;
kvc_mass_parts_fn kvc_mass_parts_ref, kvc_mass_parts_avx2, kvc_mass_parts_avx512;
kvc_finish_rows_fn kvc_finish_rows_ref, kvc_finish_rows_avx2, kvc_finish_rows_avx512;
kvc_dot_rows_fn kvc_dot_rows_ref, kvc_dot_rows_avx2, kvc_dot_rows_avx512;
kvc_lse_block_fn kvc_lse_block_ref, kvc_lse_block_avx2, kvc_lse_block_avx512;
kvc_mass_block_fn kvc_mass_block_ref, kvc_mass_block_avx2, kvc_mass_block_avx512;
kvc_mix_rows_fn kvc_mix_rows_ref, kvc_mix_rows_avx2, kvc_mix_rows_avx512;
kvc_rotate_rows_fn kvc_rotate_rows_ref, kvc_rotate_rows_avx2, kvc_rotate_rows_avx512;
kvc_gather_rows_fn kvc_gather_rows_ref;

/* Tables this machine can run, best first, NULL-terminated. */
const struct kvc_kernels *const *kvc_kernels_available(void);

#ifdef __cplusplus
}
#endif
#endif
