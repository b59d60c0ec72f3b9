/*
 * rows_tmpl.h - template of the SIMD kernel of attention over rows of an engine.
 * Parameters: KVC_FN (name suffix), VLEN, V_BYTE_DOTS, the words of vec_avx2.h and rows_avx2.h,
 * with V_BYTE_DOTS those of steps (rows_avx512.h), and those of exp_tmpl.h, dots_tmpl.h,
 * scores_tmpl.h and attend_tmpl.h.
 *
 * Keys are worked on by spans, and a span by all heads before the next one: in most caches the rows
 * of a token lie together, and those of one head lie a page of memory apart. While a span is read,
 * the next one is asked for, in the order of its addresses.
 *
 * Each score is one chain of operations along the row and one tree over the lanes, and each output
 * one chain along the keys, so that the bits of a query row do not depend on its neighbours.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "../rows.h"

enum {
    SPAN_KEYS = 32,
    MAX_BLOCKS = KVC_MAX_HEAD_DIM / KVC_BLOCK,
    BLOCK_VECTORS = KVC_BLOCK / VLEN,
    /* Query rows that share what is unpacked of K or V, and blocks of V whose sums fill the
     * registers, for one row and for as many. */
    SHARED_ROWS = VLEN / 4,
    SUM_BLOCKS_ONE = VLEN / 4,
    SUM_BLOCKS_SHARED = VLEN / 8
};

_Static_assert(SUM_BLOCKS_ONE <= SHARED_ROWS * SUM_BLOCKS_SHARED, "one row needs no more sums");

/* Memory that will be read soon: streams of bytes that begin stride apart, some of which are asked
 * for in turn: few of them are faster than one. */
enum { STREAMS = 4 };

struct coming {
    const uint8_t *at; /* the first of the streams that are asked for now */
    size_t stride, bytes, done;
    uint32_t n;       /* streams that are left */
    size_t pace, due; /* bytes that are asked for with each row, and that are to be */
};

static inline size_t row_bytes(const struct kvc_stored_rows *rows)
{
    return rows->format == KVC_ROWS_F16 ? 2 * (size_t)rows->d
                                        : rows->d / KVC_BLOCK * kvc_block_bytes(rows->format);
}

static inline const uint8_t *row_at(const struct kvc_stored_rows *rows, uint32_t head,
                                    uint32_t token)
{
    return rows->data + token * rows->token_stride + head * rows->head_stride;
}

/* All heads of the tokens first ... first + n - 1, in about the order of their addresses: what lies
 * side by side, with a row between at most, is a stream, and a single one becomes four. */
static inline struct coming coming_rows(const struct kvc_stored_rows *rows, uint32_t n_heads,
                                        uint32_t first, uint32_t n)
{
    const size_t row = row_bytes(rows), line = 64;
    const bool heads = rows->head_stride < rows->token_stride;
    const size_t inner = heads ? rows->head_stride : rows->token_stride;
    const uint32_t n_inner = heads ? n_heads : n;
    struct coming coming = {.bytes = (n_inner - 1) * inner + row,
                            .stride = heads ? rows->token_stride : rows->head_stride,
                            .n = heads ? n : n_heads};
    if (n == 0 || (n_inner > 1 && inner > 2 * row + line))
        return (struct coming){0};
    coming.at = row_at(rows, 0, first);
    if (coming.n == 1 || coming.stride < coming.bytes + line) {
        coming.bytes += (coming.n - 1) * coming.stride;
        coming.stride = coming.bytes = (coming.bytes / STREAMS + line) / line * line;
        coming.n = STREAMS;
    }
    coming.pace = coming.n * (coming.bytes + line) / ((size_t)n * n_heads) + 1;
    return coming;
}

/* One row more is read. */
V_INLINE void ask_for_row(struct coming *coming)
{
    const size_t at_once = (size_t)64 * STREAMS;
    coming->due += coming->pace;
    for (; coming->due >= at_once; coming->due -= at_once) {
        if (coming->n == 0)
            continue;
        const uint32_t last = coming->n < STREAMS ? coming->n - 1 : STREAMS - 1;
        V_UNROLL
        for (uint32_t i = 0; i < STREAMS; i++)
            v_prefetch(coming->at + (i < last ? i : last) * coming->stride + coming->done);
        coming->done += 64;
        if (coming->done < coming->bytes + 63)
            continue;
        coming->done = 0;
        coming->at += STREAMS * coming->stride;
        coming->n -= last + 1;
    }
}

/* What tile->work is divided into; kvc_rows_work_size() knows the sum. */
struct row_rooms {
    uint8_t *integers; /* of each query row, row_size bytes; the second half are its rests */
    size_t row_size;
    int32_t *sums;    /* [MAX_BLOCKS] of each query row: what is too much in products */
    float *scales;    /* of each query row's integers, times that of the tile */
    float *factors_k; /* [blocks][SPAN_KEYS] */
    float *factors_v;
    float *scores;  /* [KVC_TILE_ROWS][SPAN_KEYS], then weights */
    float *weights; /* [SHARED_ROWS][blocks][SPAN_KEYS], times factors_v */
};

static inline struct row_rooms row_rooms(const struct kvc_rows_tile *tile)
{
    const size_t n = (size_t)tile->n_heads * tile->n_rows;
    const size_t blocks_k = (tile->k.d + KVC_BLOCK - 1) / KVC_BLOCK;
    const size_t blocks_v = (tile->v.d + KVC_BLOCK - 1) / KVC_BLOCK;
    struct row_rooms rooms;
    rooms.integers = (uint8_t *)tile->work;
    rooms.row_size = ((blocks_k + 3) & ~(size_t)3) * 128;
    rooms.sums = (int32_t *)(void *)(rooms.integers + n * rooms.row_size);
    rooms.scales = (float *)(void *)(rooms.sums + n * MAX_BLOCKS);
    rooms.factors_k = rooms.scales + n * MAX_BLOCKS;
    rooms.factors_v = rooms.factors_k + blocks_k * SPAN_KEYS;
    rooms.scores = rooms.factors_v + blocks_v * SPAN_KEYS;
    rooms.weights = rooms.scores + (size_t)KVC_TILE_ROWS * SPAN_KEYS;
    return rooms;
}

#if V_BYTE_DOTS
static inline bool by_integers(const struct kvc_rows_tile *tile)
{
    return !tile->exact && tile->k.format == KVC_ROWS_Q4_0;
}

/* A block of a query row as integers times what is returned, and their rests. */
static inline float round_block(const float *x, int16_t *to, int16_t *rests)
{
    float rest[KVC_BLOCK];
    vf max = v_zero();
    for (uint32_t i = 0; i < KVC_BLOCK; i += VLEN)
        max = v_max(v_abs(v_load(x + i)), max);
    const float largest = v_hmax(max);
    if (!(largest >= TINY)) {
        memset(to, 0, KVC_BLOCK * sizeof(*to));
        memset(rests, 0, KVC_BLOCK * sizeof(*rests));
        return 0.0f;
    }
    const float step = to_integers(largest, x, KVC_BLOCK, to, rest);
    rests_of(rest, KVC_BLOCK, step, rests);
    return step;
}

/*
 * Where few channels are much larger than the others, integers in units of them lose too much of
 * the others. The error of a product with a random row is that of its length that the rounding has:
 * sqrt(sum of step^2 / 12), of which this part is the most, with the step of a rest of one byte; of
 * rows without peaks it is about 2e-7.
 */
#define MAX_LOSS_OF_ROW 2e-6f

/* The query rows as integers. */
static inline void arrange_rows(const struct kvc_rows_tile *tile, const struct row_rooms *rooms)
{
    const int32_t units = 1 << STEP_SPARE;
    int16_t x[KVC_BLOCK], rests[KVC_BLOCK];
    for (size_t row = 0; row < (size_t)tile->n_heads * tile->n_rows; row++) {
        const float *q = tile->q + row * kvc_attend_stride(tile->k.d);
        uint8_t *to = rooms->integers + row * rooms->row_size;
        float *scales = rooms->scales + row * MAX_BLOCKS, loss = 0.0f;
        vf length = v_zero();
        memset(to, 0, rooms->row_size);
        for (uint32_t b = 0; b < tile->k.d / KVC_BLOCK; b++, q += KVC_BLOCK) {
            const float step = round_block(q, x, rests);
            scales[b] = step / (float)units;
            loss += step * step * (KVC_BLOCK / 12.0f / 16384.0f);
            for (uint32_t i = 0; i < KVC_BLOCK; i += VLEN)
                length = v_fma(v_load(q + i), v_load(q + i), length);
            step_arrange(x, rests, b, to, to + rooms->row_size / 2);
            rooms->sums[row * MAX_BLOCKS + b] =
                STEP_BIAS * (units * sum_of(x, KVC_BLOCK)) +
                STEP_BIAS * sum_of(rests, KVC_BLOCK) / ((1 << REST_BITS) / units);
        }
        /* NaN, too. */
        if (!(loss <= MAX_LOSS_OF_ROW * MAX_LOSS_OF_ROW * v_hadd(length)))
            scales[0] = -1.0f;
    }
}
#endif

/* Keys of a span, and which of them the query rows see. */
struct key_span {
    uint32_t first, n;
    uint64_t seen[KVC_TILE_ROWS], any;
};

V_INLINE vf load_mask(const struct kvc_rows_tile *tile, uint32_t row, uint32_t key)
{
    const size_t n = lanes_left(key, tile->n_keys);
    return tile->mask_dtype == KVC_DTYPE_F32
               ? v_load_n((const float *)tile->mask[row] + key, n)
               : v_load_half((const uint16_t *)tile->mask[row] + key, n);
}

static inline uint64_t seen_keys(const struct kvc_rows_tile *tile, uint32_t row, uint32_t first,
                                 uint32_t n)
{
    uint64_t closed = 0;
    if (tile->n_seen[row] <= first)
        return 0;
    n = tile->n_seen[row] - first < n ? tile->n_seen[row] - first : n;
    for (uint32_t t = 0; tile->mask && t < n; t += VLEN)
        closed |= m_lanes(v_lt(load_mask(tile, row, first + t), v_set1(-FLT_MAX))) << t;
    return low_bits(n) & ~closed;
}

static inline struct key_span span_at(const struct kvc_rows_tile *tile, uint32_t first)
{
    const uint32_t left = tile->n_keys - first;
    struct key_span span = {.first = first, .n = left < SPAN_KEYS ? left : SPAN_KEYS};
    for (uint32_t row = 0; row < tile->n_rows; row++) {
        const bool same = row > 0 && tile->n_seen[row] == tile->n_seen[row - 1] &&
                          (!tile->mask || tile->mask[row] == tile->mask[row - 1]);
        span.seen[row] = same ? span.seen[row - 1] : seen_keys(tile, row, first, span.n);
        span.any |= span.seen[row];
    }
    return span;
}

/* The scales of the blocks of a span of rows as floats, [blocks][SPAN_KEYS], up to whole vectors.
 */
static inline void load_factors(const struct kvc_stored_rows *rows, const uint8_t *data, size_t n,
                                float *factors)
{
    const size_t n_blocks = rows->d / KVC_BLOCK, bytes = kvc_block_bytes(rows->format);
    uint16_t halves[MAX_BLOCKS * SPAN_KEYS];
    if (rows->format == KVC_ROWS_F16)
        return;
    for (size_t t = 0; t < n; t++, data += rows->token_stride)
        for (size_t b = 0; b < n_blocks; b++)
            memcpy(halves + b * SPAN_KEYS + t, data + b * bytes, 2);
    for (size_t b = 0; b < n_blocks; b++) {
        memset(halves + b * SPAN_KEYS + n, 0, (SPAN_KEYS - n) * sizeof(*halves));
        for (size_t t = 0; t < n; t += VLEN)
            v_store(factors + b * SPAN_KEYS + t, v_load_half(halves + b * SPAN_KEYS + t, VLEN));
    }
}

/* A part of the query rows of a head: one, or SHARED_ROWS of which the last stand for missing ones.
 */
struct sharing {
    uint32_t n, row[SHARED_ROWS]; /* of all heads */
};

/* K or V of a head in a span. */
struct stored_span {
    const uint8_t *data;
    size_t stride;
    uint32_t n, d;
};

V_INLINE const uint8_t *stored_row(const struct stored_span *span, uint32_t t)
{
    return span->data + (t < span->n ? t : span->n - 1) * span->stride;
}

V_INLINE void store_scores(int n_rows, vf sums, float *scores)
{
    if (n_rows == 1)
        v_store(scores, sums);
    else
        v_store_quads(scores, SPAN_KEYS, sums);
}

#if V_BYTE_DOTS
/* Products of n_rows (1 or SHARED_ROWS) query rows with a span of blocks of Q4_0, by integers.
 * Scores up to whole vectors are written. */
V_INLINE void multiply_integers(const struct stored_span *k, const struct row_rooms *rooms,
                                const struct sharing *sharing, int n_rows, struct coming *coming,
                                float *scores)
{
    const uint32_t n_blocks = k->d / KVC_BLOCK, n_keys = n_rows == 1 ? VLEN : 4;
    const uint8_t *rows[SHARED_ROWS];
    vi bias[MAX_BLOCKS];
    vf by[MAX_BLOCKS];
    for (int r = 0; r < n_rows; r++)
        rows[r] = rooms->integers + sharing->row[r] * rooms->row_size;
    for (uint32_t b = 0; b < n_blocks; b++) {
        int32_t biases[4] = {0};
        float scales[4] = {0};
        for (int r = 0; r < n_rows; r++) {
            biases[r] = rooms->sums[sharing->row[r] * MAX_BLOCKS + b];
            scales[r] = rooms->scales[sharing->row[r] * MAX_BLOCKS + b];
        }
        bias[b] = n_rows == 1 ? i_set1(biases[0]) : i_load_each(biases);
        by[b] = n_rows == 1 ? v_set1(scales[0]) : v_load_each(scales);
    }
    for (uint32_t t = 0; t < k->n; t += n_keys) {
        vf score = v_zero();
        for (uint32_t b = 0; b < n_blocks; b += STEP_BLOCKS) {
            const uint32_t n = n_blocks - b < STEP_BLOCKS ? n_blocks - b : STEP_BLOCKS;
            vi dots[VLEN], sums[4];
            V_UNROLL
            for (uint32_t j = 0; j < n_keys; j++) {
                vi part[2];
                if (b == 0)
                    ask_for_row(coming);
                step_load(stored_row(k, t + j) + b * kvc_block_bytes(KVC_ROWS_Q4_0), n, part);
                V_UNROLL
                for (int r = 0; r < n_rows; r++)
                    dots[n_rows == 1 ? j : 4 * (uint32_t)r + j] =
                        step_dot(part, rows[r] + (size_t)b * 64,
                                 rows[r] + rooms->row_size / 2 + (size_t)b * STEP_REST_BYTES);
            }
            step_sums(dots, sums);
            V_UNROLL
            for (uint32_t i = 0; i < STEP_BLOCKS; i++) {
                const float *factors = rooms->factors_k + (size_t)(b + i) * SPAN_KEYS + t;
                if (i < n)
                    score = v_fma(v_mul(v_from_i(i_sub(sums[i], bias[b + i])), by[b + i]),
                                  n_rows == 1 ? v_load(factors) : v_load_quads(factors), score);
            }
        }
        store_scores(n_rows, score, scores + t);
    }
}
#endif

/* Elements c ... of a row as floats, without the scale of a block; 0 beyond element d. */
V_INLINE void load_run(kvc_row_format format, const uint8_t *row, uint32_t c, uint32_t d, vf *x)
{
    if (format != KVC_ROWS_F16) {
        block_load(format, row + c / KVC_BLOCK * kvc_block_bytes(format), x);
        return;
    }
    const uint16_t *halves = (const uint16_t *)(const void *)row + c;
    V_UNROLL
    for (uint32_t i = 0; i < BLOCK_VECTORS; i++) {
        if (c + (i + 1) * VLEN <= d)
            x[i] = v_load_half(halves + (size_t)i * VLEN, VLEN);
        else
            x[i] = c + i * VLEN < d ? v_load_half(halves + (size_t)i * VLEN, d - c - i * VLEN)
                                    : v_zero();
    }
}

/* The same by floats. */
V_INLINE void multiply_floats(kvc_row_format format, const struct stored_span *k,
                              const struct kvc_rows_tile *tile, const struct row_rooms *rooms,
                              const struct sharing *sharing, int n_rows, struct coming *coming,
                              float *scores)
{
    const uint32_t n_keys = n_rows == 1 ? VLEN : 4, whole = k->d / KVC_BLOCK * KVC_BLOCK;
    const float *q[SHARED_ROWS];
    for (int r = 0; r < n_rows; r++)
        q[r] = tile->q + sharing->row[r] * kvc_attend_stride(k->d);
    for (uint32_t t = 0; t < k->n; t += n_keys) {
        vf sums[VLEN];
        V_UNROLL
        for (int i = 0; i < VLEN; i++)
            sums[i] = v_zero();
        for (uint32_t c = 0; c < k->d; c += KVC_BLOCK) {
            const uint32_t end = c < whole ? c + KVC_BLOCK : k->d;
            V_UNROLL
            for (uint32_t j = 0; j < n_keys; j++) {
                const uint32_t key = t + j < k->n ? t + j : k->n - 1;
                vf x[BLOCK_VECTORS], by = v_zero();
                if (c == 0)
                    ask_for_row(coming);
                if (c < whole)
                    load_run(format, stored_row(k, key), c, c + KVC_BLOCK, x);
                else
                    load_run(format, stored_row(k, key), c, k->d, x);
                if (format != KVC_ROWS_F16)
                    by = v_set1(rooms->factors_k[(size_t)(c / KVC_BLOCK) * SPAN_KEYS + key]);
                V_UNROLL
                for (uint32_t i = 0; i < BLOCK_VECTORS; i++) {
                    if (format != KVC_ROWS_F16)
                        x[i] = v_mul(x[i], by);
                    V_UNROLL
                    for (int r = 0; r < n_rows; r++) {
                        vf *sum = &sums[n_rows == 1 ? j : 4 * (uint32_t)r + j];
                        if (c + i * VLEN < end)
                            *sum = v_fma(v_load(q[r] + c + (size_t)i * VLEN), x[i], *sum);
                    }
                }
            }
        }
        store_scores(n_rows, v_hadd_all(sums), scores + t);
    }
}

V_INLINE void multiply_span(kvc_row_format format, const struct stored_span *k,
                            const struct kvc_rows_tile *tile, const struct row_rooms *rooms,
                            const struct sharing *sharing, struct coming *coming, float *scores)
{
    if (sharing->n == 1)
        multiply_floats(format, k, tile, rooms, sharing, 1, coming, scores);
    else
        multiply_floats(format, k, tile, rooms, sharing, SHARED_ROWS, coming, scores);
}

/* Keys of Q4_0, by integers where that is right. */
static inline void multiply_nibbles(const struct stored_span *k, const struct kvc_rows_tile *tile,
                                    const struct row_rooms *rooms, const struct sharing *sharing,
                                    struct coming *coming, float *scores)
{
#if V_BYTE_DOTS
    struct coming none = {0};
    if (by_integers(tile)) {
        if (sharing->n == 1)
            multiply_integers(k, rooms, sharing, 1, coming, scores);
        else
            multiply_integers(k, rooms, sharing, SHARED_ROWS, coming, scores);
        for (uint32_t r = 0; r < sharing->n; r++)
            if (rooms->scales[(size_t)sharing->row[r] * MAX_BLOCKS] < 0.0f)
                multiply_floats(KVC_ROWS_Q4_0, k, tile, rooms,
                                &(struct sharing){1, {sharing->row[r]}}, 1, &none,
                                scores + (size_t)r * SPAN_KEYS);
        return;
    }
#endif
    multiply_span(KVC_ROWS_Q4_0, k, tile, rooms, sharing, coming, scores);
}

static inline struct sharing sharing_at(const struct kvc_rows_tile *tile, uint32_t head, uint32_t i)
{
    struct sharing sharing = {.n = tile->n_rows - i < SHARED_ROWS ? tile->n_rows - i : SHARED_ROWS};
    for (uint32_t r = 0; r < SHARED_ROWS; r++)
        sharing.row[r] = head * tile->n_rows + i + (r < sharing.n ? r : sharing.n - 1);
    return sharing;
}

/* Products of all query rows of a head with a span of keys. */
static inline void span_products(const struct kvc_rows_tile *tile, const struct row_rooms *rooms,
                                 const struct key_span *span, uint32_t head, struct coming *coming)
{
    const struct stored_span k = {row_at(&tile->k, head, span->first), tile->k.token_stride,
                                  span->n, tile->k.d};
    struct coming none = {0};
    load_factors(&tile->k, k.data, k.n, rooms->factors_k);
    for (uint32_t i = 0; i < tile->n_rows; i += SHARED_ROWS) {
        const struct sharing sharing = sharing_at(tile, head, i);
        float *scores = rooms->scores + (size_t)i * SPAN_KEYS;
        struct coming *next = i == 0 ? coming : &none;
        switch (tile->k.format) {
        case KVC_ROWS_F16:
            multiply_span(KVC_ROWS_F16, &k, tile, rooms, &sharing, next, scores);
            break;
        case KVC_ROWS_Q8_0:
            multiply_span(KVC_ROWS_Q8_0, &k, tile, rooms, &sharing, next, scores);
            break;
        case KVC_ROWS_Q4_0: multiply_nibbles(&k, tile, rooms, &sharing, next, scores); break;
        }
    }
}

/* Turns the products of a row into weights, 0 where nothing is seen, and takes its maximum and sum
 * further. */
static inline void span_weights(const struct kvc_rows_tile *tile, const struct key_span *span,
                                uint32_t row, size_t i, float *s)
{
    const uint64_t seen = span->seen[row];
    vf max = v_set1(-INFINITY), sum = v_zero();
    for (uint32_t t = 0; t < span->n; t += VLEN) {
        vf x = v_mul(v_load(s + t), v_set1(tile->scale));
        if (tile->softcap > 0.0f)
            x = v_softcap(x, tile->softcap);
        if (tile->mask)
            x = v_add(x, load_mask(tile, row, span->first + t));
        max = v_max(v_select(m_bits(seen >> t), x, v_set1(-INFINITY)), max);
        v_store(s + t, x);
    }
    const float span_max = v_hmax(max), old = tile->m[i];
    float m = span_max > old ? span_max : old;
    for (uint32_t t = 0; t < span->n; t += VLEN) {
        const vf weight = v_exp(v_sub(v_load(s + t), v_set1(m)));
        const vf some = v_select(m_bits(seen >> t), weight, v_zero());
        sum = v_add(sum, some);
        v_store(s + t, some);
    }
    const float l = v_hadd(sum), shrink = old == m ? 1.0f : old == -INFINITY ? 0.0f : expf(old - m);
    if (shrink != 1.0f) {
        const size_t stride = kvc_attend_stride(tile->v.d);
        scale_row(tile->o + i * stride, stride, shrink);
    }
    tile->l[i] = tile->l[i] * shrink + l;
    tile->m[i] = isnan(l) ? l : m; /* a score is NaN or Inf: the row says so */
}

/* Outputs of some rows, their weights, and what they see. */
struct weighing {
    float *o[SHARED_ROWS];
    const float *weights[SHARED_ROWS]; /* block b of V: b * stride behind */
    size_t stride;
    uint64_t seen[SHARED_ROWS], any, all;
};

V_INLINE void add_key(kvc_row_format format, const uint8_t *row, const struct weighing *w,
                      uint32_t t, uint32_t c, uint32_t d, uint32_t n_blocks, int n_rows,
                      bool seen_by_all, vf *sums)
{
    V_UNROLL
    for (uint32_t b = 0; b < n_blocks; b++) {
        vf x[BLOCK_VECTORS];
        load_run(format, row, c + b * KVC_BLOCK, d, x);
        V_UNROLL
        for (int r = 0; r < n_rows; r++) {
            if (!seen_by_all && !(w->seen[r] >> t & 1))
                continue;
            const vf by = v_set1(w->weights[r][(c / KVC_BLOCK + b) * w->stride + t]);
            V_UNROLL
            for (uint32_t i = 0; i < BLOCK_VECTORS; i++) {
                vf *sum = &sums[((uint32_t)r * n_blocks + b) * BLOCK_VECTORS + i];
                *sum = v_fma(by, x[i], *sum);
            }
        }
    }
}

/* Adds n_blocks blocks of channels, of which those below d are there. */
V_INLINE void add_blocks(kvc_row_format format, const struct stored_span *v,
                         const struct weighing *w, uint32_t c, uint32_t d, uint32_t n_blocks,
                         int n_rows, struct coming *coming)
{
    vf sums[SHARED_ROWS * SUM_BLOCKS_SHARED * BLOCK_VECTORS];
    V_UNROLL
    for (uint32_t i = 0; i < (uint32_t)n_rows * n_blocks * BLOCK_VECTORS; i++) {
        const uint32_t at = c + i % (n_blocks * BLOCK_VECTORS) * VLEN;
        sums[i] = at < d ? v_load(w->o[i / (n_blocks * BLOCK_VECTORS)] + at) : v_zero();
    }
    for (uint64_t left = w->any; left; left &= left - 1) {
        const uint32_t t = (uint32_t)__builtin_ctzll(left);
        ask_for_row(coming);
        if (w->all >> t & 1)
            add_key(format, v->data + t * v->stride, w, t, c, d, n_blocks, n_rows, true, sums);
        else
            add_key(format, v->data + t * v->stride, w, t, c, d, n_blocks, n_rows, false, sums);
    }
    V_UNROLL
    for (uint32_t i = 0; i < (uint32_t)n_rows * n_blocks * BLOCK_VECTORS; i++) {
        const uint32_t at = c + i % (n_blocks * BLOCK_VECTORS) * VLEN;
        if (at < d)
            v_store(w->o[i / (n_blocks * BLOCK_VECTORS)] + at, sums[i]);
    }
}

V_INLINE void add_span(kvc_row_format format, const struct stored_span *v, const struct weighing *w,
                       int n_rows, struct coming *coming)
{
    const uint32_t n_blocks = n_rows == 1 ? SUM_BLOCKS_ONE : SUM_BLOCKS_SHARED;
    struct coming none = {0};
    uint32_t c = 0;
    for (; c + n_blocks * KVC_BLOCK <= v->d; c += n_blocks * KVC_BLOCK)
        add_blocks(format, v, w, c, c + n_blocks * KVC_BLOCK, n_blocks, n_rows, c ? &none : coming);
    for (; c + KVC_BLOCK <= v->d; c += KVC_BLOCK)
        add_blocks(format, v, w, c, c + KVC_BLOCK, 1, n_rows, c ? &none : coming);
    if (c < v->d && format == KVC_ROWS_F16)
        add_blocks(format, v, w, c, v->d, 1, n_rows, c ? &none : coming);
}

V_INLINE void add_values_of_format(kvc_row_format format, const struct stored_span *v,
                                   const struct weighing *w, uint32_t n_rows, struct coming *coming)
{
    if (n_rows == 1)
        add_span(format, v, w, 1, coming);
    else
        add_span(format, v, w, SHARED_ROWS, coming);
}

/* Weights times the scales of the blocks of V. */
static inline void weigh_blocks(const struct row_rooms *rooms, const struct stored_span *v,
                                const float *scores, float *to)
{
    for (size_t b = 0; b < v->d / KVC_BLOCK; b++)
        for (size_t t = 0; t < v->n; t += VLEN)
            v_store(to + b * SPAN_KEYS + t,
                    v_mul(v_load(scores + t), v_load(rooms->factors_v + b * SPAN_KEYS + t)));
}

/* Adds the values of a span to the outputs of a head. */
static inline void span_values(const struct kvc_rows_tile *tile, const struct row_rooms *rooms,
                               const struct key_span *span, uint32_t head, struct coming *coming)
{
    const struct stored_span v = {row_at(&tile->v, head, span->first), tile->v.token_stride,
                                  span->n, tile->v.d};
    const bool halves = tile->v.format == KVC_ROWS_F16;
    const size_t of_row = halves ? 0 : (size_t)(v.d / KVC_BLOCK) * SPAN_KEYS;
    float nobody[KVC_MAX_HEAD_DIM];
    struct coming none = {0};

    load_factors(&tile->v, v.data, v.n, rooms->factors_v);
    for (uint32_t i = 0; i < tile->n_rows; i += SHARED_ROWS) {
        const struct sharing sharing = sharing_at(tile, head, i);
        struct weighing w = {.stride = halves ? 0 : SPAN_KEYS, .all = ~UINT64_C(0)};
        struct coming *next = i == 0 ? coming : &none;
        for (uint32_t r = 0; r < sharing.n; r++) {
            const float *scores = rooms->scores + (size_t)(i + r) * SPAN_KEYS;
            w.weights[r] = halves ? scores : rooms->weights + r * of_row;
            if (!halves)
                weigh_blocks(rooms, &v, scores, rooms->weights + r * of_row);
            w.o[r] = tile->o + sharing.row[r] * kvc_attend_stride(v.d);
            w.seen[r] = span->seen[i + r];
            w.any |= w.seen[r];
            w.all &= w.seen[r];
        }
        for (uint32_t r = sharing.n; r < SHARED_ROWS && sharing.n > 1; r++) {
            w.weights[r] = w.weights[0];
            w.o[r] = nobody;
            memset(nobody, 0, kvc_attend_stride(v.d) * sizeof(*nobody));
        }
        switch (tile->v.format) {
        case KVC_ROWS_F16: add_values_of_format(KVC_ROWS_F16, &v, &w, sharing.n, next); break;
        case KVC_ROWS_Q8_0: add_values_of_format(KVC_ROWS_Q8_0, &v, &w, sharing.n, next); break;
        case KVC_ROWS_Q4_0: add_values_of_format(KVC_ROWS_Q4_0, &v, &w, sharing.n, next); break;
        }
    }
}

kvc_status KVC_FN(kvc_attend_rows)(const struct kvc_queue *queue, const struct kvc_rows_tile *tile)
{
    const size_t n = (size_t)tile->n_heads * tile->n_rows, stride = kvc_attend_stride(tile->v.d);
    const struct row_rooms rooms = row_rooms(tile);

    (void)queue;
    for (size_t i = 0; i < n; i++) {
        tile->m[i] = -INFINITY;
        tile->l[i] = 0.0f;
    }
    memset(tile->o, 0, n * stride * sizeof(float));
#if V_BYTE_DOTS
    if (by_integers(tile))
        arrange_rows(tile, &rooms);
#endif
    for (uint32_t first = 0; first < tile->n_keys; first += SPAN_KEYS) {
        const struct key_span span = span_at(tile, first);
        const uint32_t next = first + span.n, left = tile->n_keys - next;
        const uint32_t n_next = left < SPAN_KEYS ? left : SPAN_KEYS;
        struct coming k = coming_rows(&tile->k, tile->n_heads, next, n_next);
        struct coming v = coming_rows(&tile->v, tile->n_heads, next, n_next);
        for (uint32_t head = 0; head < tile->n_heads && span.any; head++) {
            span_products(tile, &rooms, &span, head, &k);
            for (uint32_t row = 0; row < tile->n_rows; row++) {
                const size_t i = (size_t)head * tile->n_rows + row;
                if (span.seen[row])
                    span_weights(tile, &span, row, i, rooms.scores + (size_t)row * SPAN_KEYS);
            }
            span_values(tile, &rooms, &span, head, &v);
        }
    }
    return KVC_OK;
}
