/*
 * attend.cuh - attention over the pages of one family: the kernel of all formats.
 *
 * A block of two warps takes a tile of query rows through pages, one page at a time, 32 of its
 * tokens a warp; pages come through cp.async in stages. S = K Q^T and O^T = V^T P^T by mma, with
 * codes as the A operand: masked out of their words as halves, INT4 and INT6 as subnormal ones,
 * whose products are exact. Q and weights go in as sums of two halves, so that only sums round.
 * Where the words of V hold tokens interleaved, rows of K are taken in that order, and channels of
 * Q in that of the words of K.
 */
#ifndef KVC_ATTEND_CUH
#define KVC_ATTEND_CUH

#include "attend_call.cuh"

namespace
{

enum {
    ATTEND_WARPS = 2,
    ATTEND_THREADS = ATTEND_WARPS * 32,
    WARP_TOKENS = KVC_PAGE_ROWS / ATTEND_WARPS,
    ALL = 0xffffffff
};

/* What weights are multiplied with, so that the small ones of halves are not lost, and the least
 * that a scale of V counts in the exponent of a weight. */
#define WEIGHT_UNIT 0x1p14f
#define LEAST_LOG   (-40.0f)

/* What a page that is staged tells. */
struct staged_page {
    uint64_t live;
    int32_t first, entry, block, layout;
    bool all_seen;
};

typedef uint4 q_fragment; /* words b0 and b1 of the larger parts, then of the smaller */

/* What a query row's products are multiplied with, what is added, and ordinals that it sees. */
struct alignas(16) row_facts {
    float factor, shift;
    int32_t from, at;
};

/* One launch, and what follows from it and the template's parameters. */
template <int KF, int VF, bool ROWS, int D, int NT> struct attention {
    enum {
        TILE = 8 * NT,
        MT = D / 16, /* tiles of 16 channels of V */
        K_BITS = KF == KVC_F16    ? 16
                 : KF == KVC_INT8 ? 8
                                  : 4, /* of the line that ldmatrix reads */
        V_BITS = VF == KVC_F16    ? 16
                 : VF == KVC_INT8 ? 8
                                  : 4,
        V_GROUPS = VF == KVC_INT4 ? D / KVC_GROUP_CHANNELS : 1,
        SMALL_K = KF == KVC_INT4 || KF == KVC_INT6
    };

    /* Scores and sums of a lane: tokens g and g + 8 of two tiles, query rows 2 t and 2 t + 1 of
     * each 8, where g is lane / 4 and t is lane % 4. */
    struct sums {
        float m[NT][2], l[NT][2]; /* what exponents begin at, and weights */
        float o[MT][NT][4];
        float z[V_GROUPS][NT][2]; /* of weights, for the bias of codes of V */
    };

    const attend_args &a;
    const kvc_device_item &item;
    uint32_t lane, warp, kd, k_line, v_first, v_n;
    uint32_t first_token;       /* of the lane's four: token_at(0, 0) */
    uint32_t k_lane[2], v_lane; /* where the lane's rows for ldmatrix begin in a stage, by tile */
    int32_t i_item, head, n_slots, tile_first, n_rows, first_at, last_at;
    unsigned char *q_words, *stages, *merge;
    float *row_norm, *group_sums, *page_shift; /* [TILE], [8][TILE], [TILE] */
    staged_page *pages;                        /* [n_stages] */
    row_facts *facts;                          /* [TILE] */

    __device__ attention(const attend_args &args, unsigned char *shared)
        : a(args), item(args.call.items[blockIdx.y / (uint32_t)args.call.cache.n_kv_heads])
    {
        lane = threadIdx.x % 32;
        warp = threadIdx.x / 32;
        kd = D < 256 ? (uint32_t)D : a.kd;
        k_line = kd * K_BITS / 8;
        i_item = (int32_t)(blockIdx.y / (uint32_t)a.call.cache.n_kv_heads);
        head = (int32_t)(blockIdx.y % (uint32_t)a.call.cache.n_kv_heads);
        n_slots = a.call.cache.seqs[item.seq].n_slots;
        n_rows = a.call.n_q * a.call.cache.group;
        tile_first = (int32_t)(blockIdx.z / a.n_slices) * TILE;
        v_first = blockIdx.z % a.n_slices * D;
        v_n = a.family.layout[0].d8_v - v_first < D ? a.family.layout[0].d8_v - v_first : D;
        first_at = row_at(0);
        last_at = row_at(TILE - 1);
        q_words = shared;
        merge = q_words + (size_t)kd / 16 * NT * 32 * sizeof(q_fragment);
        row_norm = reinterpret_cast<float *>(merge + (size_t)(D + 2) * TILE * sizeof(float));
        group_sums = row_norm + TILE;
        page_shift = group_sums + KVC_MAX_GROUPS * TILE;
        facts = reinterpret_cast<row_facts *>(page_shift + TILE);
        pages = reinterpret_cast<staged_page *>(facts + TILE);
        stages = shared + a.stages_at;
        first_token = warp * WARP_TOKENS + token_of(lane / 4, 0);
        const uint32_t m = lane / 8, r = lane % 8;
        for (uint32_t j = 0; j < 2; j++)
            k_lane[j] = k_at(warp * WARP_TOKENS + token_of((m & 1) * 8 + r, j), m >> 1);
        v_lane = ROWS ? v_at(warp * WARP_TOKENS + 8 * (m >> 1) + r, m & 1)
                      : v_at(VF == KVC_INT4 ? m * 8 + r : (m & 1) * 8 + r,
                             VF == KVC_INT4   ? warp
                             : VF == KVC_INT8 ? warp * 2 + (m >> 1)
                                              : warp * 4 + (m >> 1));
    }

    /* Query rows of the tile; those beyond the last are the last. */
    __device__ int32_t row_of(int32_t r) const
    {
        return min(tile_first + r, n_rows - 1);
    }

    __device__ int32_t row_at(int32_t r) const
    {
        return ordinal_of(a.call, item, row_of(r));
    }

    __device__ size_t query_of(int32_t r) const
    {
        return row_index(a.call, i_item, head, row_of(r));
    }

    __device__ const float *query(int32_t r) const
    {
        return a.call.q_rows + query_of(r) * kvc_attend_stride(a.call.d_k);
    }

    /* ---- where things lie ---- */

    /* Token of row r of tile j of a warp: where words of V hold it. */
    static __device__ __forceinline__ uint32_t token_of(uint32_t r, uint32_t j)
    {
        const uint32_t pair = (r & 7) >> 1, high = r >> 3, odd = r & 1;
        return VF == KVC_INT4   ? 8 * pair + 4 * j + 2 * high + odd
               : VF == KVC_INT8 ? 16 * j + 4 * pair + 2 * high + odd
                                : 16 * j + r;
    }

    /* The lane's tokens: that of row lane / 4 + 8 h of tile j. */
    __device__ __forceinline__ uint32_t token_at(uint32_t j, uint32_t h) const
    {
        return first_token + (VF == KVC_INT4   ? 4 * j + 2 * h
                              : VF == KVC_INT8 ? 16 * j + 2 * h
                                               : 16 * j + 8 * h);
    }

    /* Piece c, even, of a line whose even pieces begin at `first`: where bits are mixed below 128
     * bytes, and lines begin at multiples of what they are mixed with. */
    static __device__ __forceinline__ uint32_t piece_of(uint32_t first, uint32_t c)
    {
        return (first ^ (c % 8 * 16)) + c / 8 * 128;
    }

    /* Bytes of 16-byte piece c of line r of K: rows that one ldmatrix reads lie in other banks. */
    __device__ __forceinline__ uint32_t k_at(uint32_t r, uint32_t c) const
    {
        const uint32_t n = k_line / 16;
        uint32_t mix;
        if (n >= 8)
            mix = VF == KVC_INT4   ? (r & 1) | (r >> 2 & 6)
                  : VF == KVC_INT8 ? (r & 1) | (r >> 1 & 6)
                                   : r & 7;
        else if (n == 4)
            mix = (VF == KVC_INT4 ? r >> 3 : VF == KVC_INT8 ? r >> 2 : r >> 1) & 3;
        else
            mix = VF == KVC_INT4   ? (r >> 3 & 1) | (r >> 4 & 1) << 2
                  : VF == KVC_INT8 ? (r >> 2 & 1) | (r >> 3 & 1) << 2
                                   : r >> 2 & 1;
        return ((r * n + c) ^ mix) * 16;
    }

    /* The same of V: lines are channels, or tokens. */
    static __device__ __forceinline__ uint32_t v_at(uint32_t r, uint32_t c)
    {
        if (ROWS)
            return ((r * (D / 8) + c) ^ (r & 7)) * 16;
        return VF == KVC_INT4   ? ((r * 2 + c) ^ (r >> 2 & 1)) * 16
               : VF == KVC_INT8 ? ((r * 4 + c) ^ (r >> 1 & 3)) * 16
                                : ((r * 8 + c) ^ (r & 7)) * 16;
    }

    __device__ unsigned char *stage(uint32_t s) const
    {
        return stages + (size_t)s * a.stage_bytes;
    }

    /* ---- pages into stages ---- */

    /* Lines of n bytes, stride apart, in pieces of 16, 4 or 2; line r goes to to(r, piece of 16).
     */
    template <class F>
    __device__ void copy_lines(const uint8_t *src, uint32_t stride, uint32_t n, uint32_t n_lines,
                               uint64_t seen, F to) const
    {
        if ((n | stride) % 16 == 0) {
            const uint32_t pieces = n / 16;
            for (uint32_t i = threadIdx.x; i < n_lines * pieces; i += ATTEND_THREADS) {
                const uint32_t r = i / pieces, c = i % pieces;
                if (!ROWS)
                    cp_async_16(smem_u32(to(r, c)), src + (size_t)r * stride + c * 16);
                else {
                    const bool is = seen >> r & 1;
                    cp_async_16_zfill(smem_u32(to(r, c)),
                                      is ? src + (size_t)r * stride + c * 16 : src, is ? 16 : 0);
                }
            }
            return;
        }
        if ((n | stride) % 4 == 0) {
            const uint32_t pieces = n / 4;
            for (uint32_t i = threadIdx.x; i < n_lines * pieces; i += ATTEND_THREADS) {
                const uint32_t r = i / pieces, c = i % pieces;
                cp_async_4(smem_u32(to(r, c / 4)) + c % 4 * 4, src + (size_t)r * stride + c * 4);
            }
            return;
        }
        const uint32_t pieces = n / 2;
        for (uint32_t i = threadIdx.x; i < n_lines * pieces; i += ATTEND_THREADS) {
            const uint32_t r = i / pieces, c = i % pieces;
            *reinterpret_cast<uint16_t *>(to(r, c / 8) + c % 8 * 2) =
                *reinterpret_cast<const uint16_t *>(src + (size_t)r * stride + c * 2);
        }
    }

    __device__ void copy_flat(const uint8_t *src, unsigned char *to, uint32_t n) const
    {
        for (uint32_t i = threadIdx.x; i * 16 < n; i += ATTEND_THREADS)
            cp_async_16(smem_u32(to + i * 16), src + i * 16);
    }

    __device__ void load(uint32_t s, const page_cursor &cursor) const
    {
        const kvc_page_layout &l = a.family.layout[cursor.page.layout];
        const uint8_t *page = a.call.cache.memory + cursor.page.offset;
        unsigned char *to = stage(s);
        const uint64_t seen = cursor.page.seen;
        const uint32_t nibbles = l.d8_k / 2u;
        const auto k_to = [&](uint32_t r, uint32_t c) { return to + k_at(r, c); };
        copy_lines(page, l.k_stride, KF == KVC_INT6 ? nibbles : l.k_stride, KVC_PAGE_ROWS, seen,
                   k_to);
        if (KF == KVC_INT6)
            copy_lines(page + nibbles, l.k_stride, nibbles / 2, KVC_PAGE_ROWS, seen,
                       [&](uint32_t r, uint32_t c) {
                           return to + KVC_PAGE_ROWS * k_line + r * (k_line / 2) + c * 16;
                       });
        const uint8_t *v = page + l.v_codes + (size_t)v_first * (ROWS ? 2 : l.v_stride);
        const auto v_to = [&](uint32_t r, uint32_t c) { return to + a.v_at + v_at(r, c); };
        copy_lines(v, l.v_stride, ROWS ? v_n * 2 : l.v_stride, ROWS ? (uint32_t)KVC_PAGE_ROWS : v_n,
                   seen, v_to);
        copy_flat(page + l.k_params, to + a.params_at, a.params_bytes);
        if (l.ordinals)
            copy_flat(page + l.ordinals, to + a.ordinals_at, KVC_PAGE_ROWS * 4);
        if (l.groups)
            copy_flat(page + l.groups, to + a.bias_at, KVC_PAGE_ROWS * 4);
        if (threadIdx.x == 0) {
            staged_page &p = pages[s];
            p.live = cursor.page.live;
            p.first = cursor.page.first;
            p.entry = cursor.page.entry;
            p.block = cursor.block;
            p.layout = cursor.page.layout;
            p.all_seen = !l.ordinals && !l.groups && p.live == ~UINT64_C(0) &&
                         p.first >= first_seen(a.call, last_at) &&
                         p.first + KVC_PAGE_ROWS - 1 <= first_at;
        }
    }

    /* The next page of the family; blocks without one get a partial result of nothing. */
    __device__ bool next(page_cursor &c) const
    {
        while (!c.take(a.call, a.family, item, head, first_seen(a.call, first_at), last_at)) {
            if (c.block >= 0 && !c.found)
                put_nothing(c.block);
            if (!c.enter(c.block < 0 ? (int32_t)blockIdx.x : c.block + (int32_t)gridDim.x,
                         a.block_entries, n_slots))
                return false;
        }
        return true;
    }

    __device__ float *part(int32_t block, int32_t r) const
    {
        const size_t i =
            ((size_t)i_item * (size_t)a.call.n_blocks + (size_t)block) * (size_t)a.call.n_families +
            (size_t)a.number;
        const size_t rows = (size_t)n_rows * (size_t)a.call.cache.n_kv_heads;
        const size_t row = query_of(r) - (size_t)i_item * rows;
        return a.call.parts + (i * rows + row) * (2 + kvc_attend_stride(a.call.d_v));
    }

    __device__ void put_nothing(int32_t block) const
    {
        const int32_t r = (int32_t)threadIdx.x;
        if (r < TILE && tile_first + r < n_rows && v_first == 0) {
            float *to = part(block, r);
            to[0] = -INFINITY;
            to[1] = 0.0f;
        }
    }

    /* ---- query rows ---- */

    /* Channel of element e of word `high` of a fragment of step k for thread t of 4. */
    static __device__ __forceinline__ uint32_t channel_of(uint32_t k, uint32_t t, uint32_t high,
                                                          uint32_t e)
    {
        return SMALL_K          ? k / 2 * 32 + 8 * t + k % 2 * 4 + 2 * high + e
               : KF == KVC_INT8 ? 16 * k + 4 * t + 2 * high + e
                                : 16 * k + 8 * high + 2 * t + e;
    }

    /* Each row times a power of two that brings it to 2^8 ... 2^9, so that halves hold it. */
    __device__ void find_norms()
    {
        for (uint32_t r = warp; r < TILE; r += ATTEND_WARPS) {
            const float *q = query((int32_t)r);
            float most = 0.0f;
            for (uint32_t c = lane; c < a.call.d_k; c += 32)
                most = fmaxf(most, fabsf(q[c]));
            most = warp_max(most);
            const uint32_t exponent = min(max(as_u32(most) >> 23, 20u), 254u);
            if (lane == 0)
                row_norm[r] = as_float((262 - exponent) << 23);
        }
    }

    /* Fragments of the tile; each channel times by(c), which may be 1. */
    template <class F> __device__ void make_fragments(F by) const
    {
        for (uint32_t i = threadIdx.x; i < kd / 16 * NT * 32; i += ATTEND_THREADS) {
            const uint32_t l = i % 32, k = i / 32 / NT, r = i / 32 % NT * 8 + l / 4, t = l % 4;
            const float *q = query((int32_t)r);
            uint32_t words[4];
#pragma unroll
            for (uint32_t high = 0; high < 2; high++) {
                float x[2];
#pragma unroll
                for (uint32_t e = 0; e < 2; e++) {
                    const uint32_t c = channel_of(k, t, high, e);
                    x[e] = c < a.call.d_k ? q[c] * row_norm[r] * by(c) : 0.0f;
                    if (SMALL_K && high)
                        x[e] *= 0.0625f; /* its codes are masked 4 bits up */
                }
                const __half2 most = __floats2half2_rn(x[0], x[1]);
                words[high] = as_u32(most);
                words[2 + high] =
                    as_u32(__floats2half2_rn(x[0] - __low2float(most), x[1] - __high2float(most)));
            }
            q_fragment f;
            f.x = words[0];
            f.y = words[1];
            f.z = words[2];
            f.w = words[3];
            reinterpret_cast<q_fragment *>(q_words)[i] = f;
        }
    }

    /* Of each row and group of 64 channels what the bias of codes takes. */
    __device__ void sum_groups() const
    {
        for (uint32_t i = warp; i < kd / KVC_GROUP_CHANNELS * TILE; i += ATTEND_WARPS) {
            const uint32_t r = i % TILE, first = i / TILE * KVC_GROUP_CHANNELS;
            const float *q = query((int32_t)r);
            float sum = 0.0f;
            for (uint32_t c = first + lane; c < first + KVC_GROUP_CHANNELS && c < a.call.d_k;
                 c += 32)
                sum += q[c];
            sum = lanes_sum(sum);
            if (lane == 0)
                group_sums[i] = sum * row_norm[r] * a.k_bias;
        }
    }

    /* Mode CHANNEL: scales of the page go into Q, brought to about 1 together, its minima into the
     * shift. Returns what products are to be multiplied with. */
    __device__ float fold(const unsigned char *params)
    {
        const uint16_t *scales = reinterpret_cast<const uint16_t *>(params);
        const uint16_t *minima = scales + a.family.layout[0].d8_k;
        float most = 0.0f;
        for (uint32_t c = lane; c < a.call.d_k; c += 32)
            most = fmaxf(most, fabsf(half_value(scales[c])));
        const uint32_t exponent = max(as_u32(warp_max(most)) >> 23, 64u);
        const float norm = as_float((254 - exponent) << 23);
        make_fragments([&](uint32_t c) { return half_value(scales[c]) * norm; });
        for (uint32_t r = warp; r < TILE; r += ATTEND_WARPS) {
            const float *q = query((int32_t)r);
            float sum = 0.0f;
            for (uint32_t c = lane; c < a.call.d_k; c += 32)
                sum = fmaf(q[c], half_value(minima[c]), sum);
            sum = lanes_sum(sum);
            if (lane == 0)
                page_shift[r] = sum * a.call.scale;
        }
        __syncthreads();
        return as_float(exponent << 23);
    }

    __device__ void set_rows() const
    {
        const int32_t r = (int32_t)threadIdx.x;
        if (r >= TILE)
            return;
        row_facts f;
        f.factor = a.call.scale / row_norm[r] * (SMALL_K ? 0x1p24f : 1.0f);
        f.shift = a.call.shift ? a.call.shift[query_of(r)] : 0.0f;
        f.at = row_at(r);
        f.from = first_seen(a.call, f.at);
        facts[r] = f;
    }

    /* ---- logits ---- */

    /* Scale of a token of a page: of a group of its channels. */
    static __device__ __forceinline__ float scale_at(const unsigned char *params, uint8_t format,
                                                     uint8_t mode, uint32_t token, uint32_t group)
    {
        if (format == KVC_F16 || mode == KVC_SCALE_CHANNEL)
            return 1.0f;
        if (mode == KVC_SCALE_HEAD)
            return *reinterpret_cast<const float *>(params);
        return half_value(
            reinterpret_cast<const uint16_t *>(params)[group * KVC_PAGE_ROWS + token]);
    }

    /* Two halves of a word of bytes u each, less the bias. */
    static __device__ __forceinline__ uint32_t bytes_of(uint32_t word, uint32_t selectors,
                                                        uint32_t bias)
    {
        const uint32_t magic = prmt(word, 0x64646464u, selectors); /* 1024 + u */
        return as_u32(__hsub2(as_half2(magic), as_half2(bias)));
    }

    /* Pair i of the codes of a word of nibbles; odd pairs are 16 times as large. */
    static __device__ __forceinline__ uint32_t nibbles_of(uint32_t word, int i)
    {
        return (i & 2 ? word >> 8 : word) & (i & 1 ? 0x00f000f0u : 0x000f000fu);
    }

    /* The two high bits of the same codes, to be added. */
    static __device__ __forceinline__ uint32_t high_bits_of(uint32_t word, int i)
    {
        const uint32_t mask = i & 1 ? 0x03000300u : 0x00300030u;
        return (i == 0 ? word << 4 : i == 1 ? word << 6 : i == 2 ? word : word << 2) & mask;
    }

    /* Adds the products of step k; x are fragments of both tiles. */
    __device__ __forceinline__ void multiply_q(float (&acc)[2][NT][4], uint32_t k,
                                               const uint32_t (&x)[2][4]) const
    {
#pragma unroll
        for (uint32_t nt = 0; nt < NT; nt++) {
            const q_fragment q =
                reinterpret_cast<const q_fragment *>(q_words)[(k * NT + nt) * 32 + lane];
#pragma unroll
            for (uint32_t j = 0; j < 2; j++) {
                mma_m16n8k16_f16(acc[j][nt], x[j][0], x[j][1], x[j][2], x[j][3], q.x, q.y);
                mma_m16n8k16_f16(acc[j][nt], x[j][0], x[j][1], x[j][2], x[j][3], q.z, q.w);
            }
        }
    }

    /* Words 2 h and 2 h + 1 of a tile become step s of 2 of 32 channels, from piece c on. */
    __device__ __forceinline__ void small_fragment(uint32_t (&x)[4], const uint32_t (&w)[4],
                                                   const unsigned char *k, uint32_t c, uint32_t h,
                                                   uint32_t j, int s) const
    {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            x[i] = nibbles_of(w[2 * h + i], 2 * s);
            x[2 + i] = nibbles_of(w[2 * h + i], 2 * s + 1);
            if (KF == KVC_INT6) {
                const uint16_t *line = reinterpret_cast<const uint16_t *>(
                    k + KVC_PAGE_ROWS * k_line + token_at(j, i) * (k_line / 2));
                const uint32_t bits = prmt(line[(c + h) * 4 + lane % 4], 0, 0x4140);
                x[i] |= high_bits_of(bits, 2 * s);
                x[2 + i] |= high_bits_of(bits, 2 * s + 1);
            }
        }
    }

    /* Adds the products of half h of a loaded piece and of the one after it. */
    __device__ __forceinline__ void multiply_k_codes(float (&acc)[2][NT][4],
                                                     const uint32_t (&w)[2][4],
                                                     const unsigned char *k, uint32_t piece,
                                                     uint32_t h) const
    {
        uint32_t x[2][4];
        if constexpr (KF == KVC_INT8) {
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    x[j][i] = bytes_of(w[j][2 * h + i % 2], i < 2 ? 0x4140 : 0x4342, a.k_magic);
            multiply_q(acc, piece + h, x);
        } else {
#pragma unroll
            for (int s = 0; s < 2; s++) {
#pragma unroll
                for (uint32_t j = 0; j < 2; j++)
                    small_fragment(x[j], w[j], k, piece, h, j, s);
                multiply_q(acc, 2 * (piece + h) + (uint32_t)s, x);
            }
        }
    }

    /* Adds the products of 64 channels, the c-th such, of both tiles. */
    __device__ __forceinline__ void multiply_k(float (&acc)[2][NT][4], const unsigned char *k,
                                               uint32_t c) const
    {
        const uint32_t pieces = KVC_GROUP_CHANNELS * K_BITS / 128, base = smem_u32(k);
#pragma unroll
        for (uint32_t p = 0; p < pieces; p += 2) {
            const uint32_t piece = c * pieces + p;
            uint32_t w[2][4];
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
                ldmatrix_x4(w[j], piece_of(base + k_lane[j], piece));
            if constexpr (KF == KVC_F16)
                multiply_q(acc, piece / 2, w);
            else {
#pragma unroll
                for (uint32_t h = 0; h < 2; h++)
                    multiply_k_codes(acc, w, k, piece, h);
            }
        }
    }

    /* Products of the lane's tokens and query rows, scaled. */
    __device__ __forceinline__ void products(float (&x)[2][NT][4], const unsigned char *k,
                                             const unsigned char *params,
                                             const kvc_page_layout &l) const
    {
        const uint32_t groups = SMALL_K ? kvc_scale_groups(l.k_format, l.k_scale, l.d8_k) : 1;
        const uint32_t n = kd / KVC_GROUP_CHANNELS;
        float acc[2][NT][4] = {};
#pragma unroll
        for (uint32_t c = 0; c < n; c++) {
            if (SMALL_K)
#pragma unroll
                for (uint32_t nt = 0; nt < NT; nt++)
#pragma unroll
                    for (uint32_t i = 0; i < 4; i++)
                        acc[0][nt][i] = acc[1][nt][i] =
                            -group_sums[c * TILE + nt * 8 + lane % 4 * 2 + i % 2];
            multiply_k(acc, k, c);
            if (!SMALL_K && c + 1 < n)
                continue;
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
#pragma unroll
                for (uint32_t h = 0; h < 2; h++) {
                    const float scale =
                        scale_at(params, KF, l.k_scale, token_at(j, h), min(c, groups - 1));
#pragma unroll
                    for (uint32_t nt = 0; nt < NT; nt++)
#pragma unroll
                        for (uint32_t i = 2 * h; i < 2 * h + 2; i++)
                            x[j][nt][i] = SMALL_K && c > 0 ? fmaf(acc[j][nt][i], scale, x[j][nt][i])
                                                           : acc[j][nt][i] * scale;
                }
        }
    }

    __device__ __forceinline__ float capped(float s) const
    {
        const float y = ex2_approx(fminf(2.0f * LOG2_E / a.call.softcap * s, 126.0f));
        return a.call.softcap * (1.0f - 2.0f / (y + 1.0f));
    }

    /* Logits times log2(e); -inf of what a query row does not see. */
    __device__ __forceinline__ void logits(float (&x)[2][NT][4], const staged_page &page,
                                           const unsigned char *data, const kvc_page_layout &l,
                                           float page_factor) const
    {
        const bool channel = l.k_format != KVC_F16 && l.k_scale == KVC_SCALE_CHANNEL;
#pragma unroll
        for (uint32_t nt = 0; nt < NT; nt++)
#pragma unroll
            for (uint32_t e = 0; e < 2; e++) {
                const uint32_t r = nt * 8 + lane % 4 * 2 + e;
                const row_facts f = facts[r];
                const float shift = channel ? f.shift + page_shift[r] : f.shift;
#pragma unroll
                for (uint32_t i = e; i < 8; i += 2) {
                    float &s = x[i / 4][nt][i % 4];
                    s = fmaf(s, f.factor * page_factor, shift);
                    if (a.call.softcap > 0.0f)
                        s = capped(s);
                    s *= LOG2_E;
                }
                if (page.all_seen)
                    continue;
#pragma unroll
                for (uint32_t i = e; i < 8; i += 2) {
                    const uint32_t token = token_at(i / 4, i % 4 / 2);
                    int32_t ordinal = page.first + (int32_t)token;
                    float &s = x[i / 4][nt][i % 4];
                    if (l.ordinals)
                        ordinal = reinterpret_cast<const int32_t *>(data + a.ordinals_at)[token];
                    if (l.groups)
                        s = fmaf(reinterpret_cast<const float *>(data + a.bias_at)[token], LOG2_E,
                                 s);
                    if (!(page.live >> token & 1) || ordinal < f.from || ordinal > f.at)
                        s = -INFINITY;
                }
            }
    }

    /* ---- weights and values ---- */

    /* About log2, never above, of the largest scale of V of each of the lane's tokens: what the
     * weight of a token adds is p * scale, and that may not leave the range of halves. */
    __device__ __forceinline__ void scale_logs(float (&logs)[2][2], const unsigned char *params,
                                               const kvc_page_layout &l, uint32_t groups) const
    {
#pragma unroll
        for (uint32_t j = 0; j < 2; j++)
#pragma unroll
            for (uint32_t h = 0; h < 2; h++) {
                logs[j][h] = 0.0f;
                if constexpr (VF != KVC_F16) {
                    float most = 0.0f;
                    for (uint32_t g = 0; g < groups; g++)
                        most =
                            fmaxf(most, fabsf(scale_at(params, VF, l.v_scale, token_at(j, h), g)));
                    const float log = fmaf((float)(int)as_u32(most), 0x1p-23f, -127.0f);
                    logs[j][h] = fmaxf(log, LEAST_LOG);
                }
            }
    }

    /* Adds what tiles of 16 channels from mt on have of values times the weights in b. */
    __device__ __forceinline__ void multiply_v(sums &s, const unsigned char *v, int mt, int n_mt,
                                               const uint32_t (&b)[2][NT][4]) const
    {
        const uint32_t first = smem_u32(v) + v_lane;
#pragma unroll
        for (int i = 0; i < n_mt; i += VF == KVC_INT4 ? 2 : 1) {
            uint32_t w[2][4];
            const uint32_t at = (uint32_t)(mt + i);
            if (at * 16 >= v_n)
                break;
            if (ROWS) {
                ldmatrix_x4_trans(w[0], piece_of(first, at * 2));
                ldmatrix_x4_trans(w[1], piece_of(first, at * 2) + 16 * D * 2);
            } else {
                ldmatrix_x4(w[0], first + at * (16 * KVC_PAGE_ROWS * V_BITS / 8));
                if (VF == KVC_F16)
                    ldmatrix_x4(w[1], (first ^ 32) + at * (16 * KVC_PAGE_ROWS * V_BITS / 8));
            }
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
#pragma unroll
                for (uint32_t nt = 0; nt < NT; nt++) {
                    const uint32_t *p = b[j][nt];
                    if constexpr (VF == KVC_INT4) {
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            uint32_t x[4];
#pragma unroll
                            for (int y = 0; y < 4; y++)
                                x[y] = nibbles_of(w[0][2 * n + y % 2], 2 * (int)j + y / 2);
                            mma_m16n8k16_f16(s.o[mt + i + n][nt], x[0], x[1], x[2], x[3], p[0],
                                             p[1]);
                            mma_m16n8k16_f16(s.o[mt + i + n][nt], x[0], x[1], x[2], x[3], p[2],
                                             p[3]);
                        }
                    } else {
                        uint32_t x[4];
#pragma unroll
                        for (uint32_t y = 0; y < 4; y++)
                            x[y] = VF == KVC_INT8 ? bytes_of(w[0][2 * j + y % 2],
                                                             y < 2 ? 0x4140 : 0x4342, BYTE_BIAS)
                                                  : w[j][y];
                        mma_m16n8k16_f16(s.o[mt + i][nt], x[0], x[1], x[2], x[3], p[0], p[1]);
                        mma_m16n8k16_f16(s.o[mt + i][nt], x[0], x[1], x[2], x[3], p[2], p[3]);
                    }
                }
        }
    }

    /* Weights of group g as fragments, times its scales and WEIGHT_UNIT. */
    __device__ __forceinline__ void weights_of(sums &s, const float (&p)[2][NT][4],
                                               const unsigned char *params,
                                               const kvc_page_layout &l, uint32_t g,
                                               uint32_t scale_group, uint32_t (&b)[2][NT][4]) const
    {
#pragma unroll
        for (uint32_t j = 0; j < 2; j++)
#pragma unroll
            for (uint32_t h = 0; h < 2; h++) {
                const float scale = scale_at(params, VF, l.v_scale, token_at(j, h), scale_group);
#pragma unroll
                for (uint32_t nt = 0; nt < NT; nt++) {
                    float w[2];
#pragma unroll
                    for (uint32_t e = 0; e < 2; e++) {
                        w[e] = p[j][nt][2 * h + e] * scale * WEIGHT_UNIT;
                        if (VF == KVC_INT4) {
                            s.z[g][nt][e] += w[e];
                            w[e] *= h ? 0.0625f : 1.0f; /* its codes are masked 4 bits up */
                        }
                    }
                    const __half2 most = __floats2half2_rn(w[0], w[1]);
                    const __half2 rest =
                        __floats2half2_rn(w[0] - __low2float(most), w[1] - __high2float(most));
                    b[j][nt][h] = movmatrix_trans(as_u32(most));
                    b[j][nt][2 + h] = movmatrix_trans(as_u32(rest));
                }
            }
    }

    /* A page more. */
    __device__ __forceinline__ void add_page(sums &s, const staged_page &page,
                                             const unsigned char *data)
    {
        const kvc_page_layout &l = a.family.layout[page.layout];
        const unsigned char *k_params = data + a.params_at;
        const unsigned char *v_params = k_params + (l.v_params - l.k_params);
        const uint32_t groups =
            VF == KVC_INT4 ? kvc_scale_groups(l.v_format, l.v_scale, l.d8_v) : 1;
        float x[2][NT][4], page_factor = 1.0f;
        if ((KF == KVC_INT8 || KF == KVC_INT4) && l.k_scale == KVC_SCALE_CHANNEL)
            page_factor = fold(k_params);
        products(x, data, k_params, l);
        logits(x, page, data, l, page_factor);

        float logs[2][2];
        scale_logs(logs, v_params, l, groups);
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float m = fmaxf(fmaxf(x[0][nt][e] + logs[0][0], x[0][nt][2 + e] + logs[0][1]),
                                fmaxf(x[1][nt][e] + logs[1][0], x[1][nt][2 + e] + logs[1][1]));
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    m = fmaxf(m, __shfl_xor_sync(ALL, m, step));
                m = fmaxf(m, s.m[nt][e]);
                const float less = ex2_approx(s.m[nt][e] - m);
                float sum = 0.0f;
                s.m[nt][e] = m;
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        float &p = x[j][nt][2 * h + e];
                        p = ex2_approx(p - m);
                        sum += p;
                    }
                s.l[nt][e] = fmaf(s.l[nt][e], less, sum);
#pragma unroll
                for (int g = 0; g < V_GROUPS; g++)
                    s.z[g][nt][e] *= less;
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    s.o[mt][nt][e] *= less;
                    s.o[mt][nt][2 + e] *= less;
                }
                if (a.masses.pages && v_first == 0)
                    put_mass(page.entry, nt, e, m, sum, x);
            }
        const unsigned char *v = data + a.v_at;
        uint32_t b[2][NT][4];
        if (VF == KVC_INT4 && groups > 1) {
#pragma unroll
            for (uint32_t g = 0; g < V_GROUPS; g++) {
                const uint32_t of_page = v_first / KVC_GROUP_CHANNELS + g;
                weights_of(s, x, v_params, l, g, min(of_page, groups - 1), b);
                multiply_v(s, v, (int)g * 4, 4, b);
            }
            return;
        }
        weights_of(s, x, v_params, l, 0, 0, b);
        multiply_v(s, v, 0, MT, b);
#pragma unroll
        for (int g = 1; g < V_GROUPS; g++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    s.z[g][nt][e] = s.z[0][nt][e];
    }

    __device__ void put_mass(int32_t entry, int nt, int e, float m, float sum,
                             const float (&p)[2][NT][4]) const
    {
        const int32_t r = tile_first + nt * 8 + 2 * (int32_t)(lane % 4) + e;
        const size_t at_entry = mass_entry(a.call, i_item, head, entry);
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
            sum += __shfl_xor_sync(ALL, sum, step);
        if (r >= n_rows)
            return;
        if (lane < 4) {
            float *to = a.masses.pages + ((at_entry * 2 + warp) * (size_t)n_rows + (size_t)r) * 2;
            to[0] = m;
            to[1] = sum;
        }
        if (a.masses.tokens)
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
#pragma unroll
                for (uint32_t h = 0; h < 2; h++)
                    a.masses.tokens[(at_entry * (size_t)n_rows + (size_t)r) * KVC_PAGE_ROWS +
                                    token_at(j, h)] = p[j][nt][2 * h + e];
    }

    /* ---- partial results ---- */

    __device__ static void clear(sums &s)
    {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                s.m[nt][e] = MOST_NEGATIVE;
                s.l[nt][e] = 0.0f;
#pragma unroll
                for (int g = 0; g < V_GROUPS; g++)
                    s.z[g][nt][e] = 0.0f;
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s.o[mt][nt][i] = 0.0f;
        }
    }

    /* Sums of a warp become those of its rows, in their unit. */
    __device__ void settle(sums &s) const
    {
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    s.l[nt][e] += __shfl_xor_sync(ALL, s.l[nt][e], step);
#pragma unroll
                for (int g = 0; g < V_GROUPS && VF == KVC_INT4; g++)
#pragma unroll
                    for (int step = 4; step < 32; step *= 2)
                        s.z[g][nt][e] += __shfl_xor_sync(ALL, s.z[g][nt][e], step);
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        float &o = s.o[mt][nt][2 * h + e];
                        if (VF == KVC_INT4)
                            o = fmaf(o, 0x1p24f, -KVC_BIAS4 * s.z[mt / 4][nt][e]);
                        o *= 1.0f / WEIGHT_UNIT;
                    }
            }
    }

    /* Both warps' sums of a block become a partial result. */
    __device__ void put_part(int32_t block, sums &s) const
    {
        float *room = reinterpret_cast<float *>(merge);
        const uint32_t stride = 32;
        settle(s);
        if (warp == 1) {
#pragma unroll
            for (uint32_t nt = 0; nt < NT; nt++) {
#pragma unroll
                for (uint32_t mt = 0; mt < MT; mt++)
#pragma unroll
                    for (uint32_t i = 0; i < 4; i++)
                        room[((mt * NT + nt) * 4 + i) * stride + lane] = s.o[mt][nt][i];
#pragma unroll
                for (uint32_t e = 0; e < 2; e++)
                    if (lane < 4) {
                        const uint32_t r = nt * 8 + lane * 2 + e;
                        room[D * TILE + r * 2] = s.m[nt][e];
                        room[D * TILE + r * 2 + 1] = s.l[nt][e];
                    }
            }
        }
        __syncthreads();
        if (warp == 1)
            return;
#pragma unroll
        for (uint32_t nt = 0; nt < NT; nt++)
#pragma unroll
            for (uint32_t e = 0; e < 2; e++) {
                const uint32_t r = nt * 8 + lane % 4 * 2 + e;
                const float other_m = room[D * TILE + r * 2], other_l = room[D * TILE + r * 2 + 1];
                const float m = fmaxf(s.m[nt][e], other_m);
                const float mine = ex2_approx(s.m[nt][e] - m), other = ex2_approx(other_m - m);
                const float l = fmaf(s.l[nt][e], mine, other_l * other);
                if (tile_first + (int32_t)r >= n_rows)
                    continue;
                float *to = part(block, (int32_t)r);
                if (lane < 4 && v_first == 0) {
                    to[0] = l > 0.0f ? m : -INFINITY;
                    to[1] = l;
                }
#pragma unroll
                for (uint32_t mt = 0; mt < MT; mt++)
#pragma unroll
                    for (uint32_t h = 0; h < 2; h++) {
                        const uint32_t c = mt * 16 + lane / 4 + 8 * h, i = 2 * h + e;
                        if (c < v_n)
                            to[2 + v_first + c] =
                                fmaf(s.o[mt][nt][i], mine,
                                     room[((mt * NT + nt) * 4 + i) * stride + lane] * other);
                    }
            }
    }

    __device__ __forceinline__ void wait_for_page() const
    {
        switch (a.n_stages) {
        case 2: cp_async_wait<0>(); break;
        case 3: cp_async_wait<1>(); break;
        default: cp_async_wait<2>(); break;
        }
        __syncthreads();
    }

    __device__ void run()
    {
        page_cursor cursor;
        sums s;
        int32_t block = -1, i = 0;
        const int32_t ahead = a.n_stages - 1;
        bool more = true;
        /* Pads of lines stay 0 throughout. */
        for (uint32_t at_byte = threadIdx.x * 16; at_byte < a.n_stages * a.stage_bytes;
             at_byte += ATTEND_THREADS * 16)
            *reinterpret_cast<uint4 *>(stages + at_byte) = make_uint4(0, 0, 0, 0);
        find_norms();
        __syncthreads();
        set_rows();
        if (KF == KVC_F16 || a.family.layout[0].k_scale != KVC_SCALE_CHANNEL)
            make_fragments([](uint32_t) { return 1.0f; });
        if (SMALL_K)
            sum_groups();
        clear(s);
        int32_t n_loaded = 0;
        for (; n_loaded < ahead && more; n_loaded++) {
            more = next(cursor);
            if (!more)
                break;
            load((uint32_t)n_loaded, cursor);
            cp_async_commit();
        }
        for (int32_t empty = n_loaded; empty < ahead; empty++)
            cp_async_commit();
        for (;; i++) {
            if (ahead == 0)
                __syncthreads();
            else
                wait_for_page();
            if (more && (more = next(cursor))) {
                load((uint32_t)(n_loaded % a.n_stages), cursor);
                n_loaded++;
            }
            cp_async_commit();
            if (ahead == 0) {
                cp_async_wait<0>();
                __syncthreads();
            }
            if (i >= n_loaded)
                break;
            const staged_page &page = pages[i % a.n_stages];
            if (page.block != block) {
                if (block >= 0)
                    put_part(block, s);
                clear(s);
                block = page.block;
            }
            add_page(s, page, stage((uint32_t)(i % a.n_stages)));
        }
        if (block >= 0)
            put_part(block, s);
    }
};

template <int KF, int VF, bool ROWS, int D, int NT>
__global__ void __launch_bounds__(ATTEND_THREADS)
    attend_pages(const __grid_constant__ attend_args a)
{
    KVC_DYN_SHARED(unsigned char, shared);
    attention<KF, VF, ROWS, D, NT> attention(a, shared);
    attention.run();
}

/* Shared memory, stages and grid of a launch. */
enum {
    MOST_SHARED = 163 * 1024,  /* what a block may have on every device from 8.0 on */
    STAGES_SHARED = 48 * 1024, /* what stages take if they are more than two */
    MOST_STAGES = 4,
    BLOCKS_OF_LAUNCH = 132 * 8 /* about: as many as a large device runs at a time */
};

uint32_t rounded(uint32_t x, uint32_t to)
{
    return (x + to - 1) / to * to;
}

template <int KF, int VF, bool ROWS, int D, int NT>
cudaError_t launch_attend_pages(attend_args &a, cudaStream_t stream)
{
    const kvc_page_layout &l = a.family.layout[0];
    const kvc_device_call &call = a.call;
    const uint32_t tile = 8 * NT, n_rows = (uint32_t)(call.n_q * call.cache.group);
    a.n_slices = (l.d8_v + (uint32_t)D - 1) / D;
    a.kd = D < 256 ? (uint32_t)D : l.d8_k <= 256 ? 256 : 512;
    a.k_bias =
        l.k_scale == KVC_SCALE_CHANNEL ? 0.0f : (KF == KVC_INT6 ? KVC_BIAS6 : KVC_BIAS4) * 0x1p-24f;
    a.k_magic = l.k_scale == KVC_SCALE_CHANNEL ? 0x64006400 : BYTE_BIAS;
    a.v_at = KVC_PAGE_ROWS * a.kd * kvc_code_bits(KF) / 8;
    a.params_at = a.v_at + KVC_PAGE_ROWS * D * kvc_code_bits(VF) / 8;
    a.params_bytes = l.v_params + kvc_params_size(l.v_format, l.v_scale, l.d8_v) - l.k_params;
    a.ordinals_at = a.params_at + rounded(a.params_bytes, 16);
    a.bias_at = a.ordinals_at + (ROWS ? 0 : KVC_PAGE_ROWS * 4);
    a.stage_bytes = rounded(a.bias_at + (ROWS ? 0 : KVC_PAGE_ROWS * 4), 128);
    const uint32_t words = a.kd / 16 * NT * 32 * sizeof(q_fragment);
    const uint32_t floats = (D + 2) * tile + tile + KVC_MAX_GROUPS * tile + tile;
    const uint32_t tables = tile * sizeof(row_facts) + MOST_STAGES * sizeof(staged_page);
    a.stages_at = rounded(words + floats * 4 + tables, 128);
    a.n_stages = (int32_t)min(max(STAGES_SHARED / a.stage_bytes, 2u), (uint32_t)MOST_STAGES);
    if (a.stages_at + 2 * a.stage_bytes > MOST_SHARED)
        a.n_stages = 1;
    const uint32_t shared = a.stages_at + (uint32_t)a.n_stages * a.stage_bytes;
    const dim3 units(1, (unsigned)(call.n_items * call.cache.n_kv_heads),
                     (n_rows + tile - 1) / tile * a.n_slices);
    dim3 grid = units;
    grid.x = min(max(BLOCKS_OF_LAUNCH / (units.y * units.z), 1u), (unsigned)call.n_blocks);
    void (*kernel)(attend_args) = attend_pages<KF, VF, ROWS, D, NT>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    if (error != cudaSuccess)
        return error;
    return kvc_launch(kernel, grid, ATTEND_THREADS, shared, stream, a);
}

template <int KF, int VF, bool ROWS> cudaError_t launch_by_size(attend_args &a, cudaStream_t stream)
{
    const kvc_page_layout &l = a.family.layout[0];
    const uint32_t d = max(l.d8_k, l.d8_v);
    const bool many = a.call.n_q * a.call.cache.group > 8;
    if (d > 128)
        return launch_attend_pages<KF, VF, ROWS, 256, 1>(a, stream);
    if (d > 64)
        return many ? launch_attend_pages<KF, VF, ROWS, 128, 2>(a, stream)
                    : launch_attend_pages<KF, VF, ROWS, 128, 1>(a, stream);
    return many ? launch_attend_pages<KF, VF, ROWS, 64, 2>(a, stream)
                : launch_attend_pages<KF, VF, ROWS, 64, 1>(a, stream);
}

/* Sealed pages of a format of K. */
template <int KF> cudaError_t launch_by_values(attend_args &a, cudaStream_t stream)
{
    switch (a.family.layout[0].v_format) {
    case KVC_F16: return launch_by_size<KF, KVC_F16, false>(a, stream);
    case KVC_INT8: return launch_by_size<KF, KVC_INT8, false>(a, stream);
    default: return launch_by_size<KF, KVC_INT4, false>(a, stream);
    }
}

} // namespace

#endif
