/* score.cu - what kept query rows see of the rows of a cache: the same bits as on a CPU, since
 * decisions hang on them. Compiled without contraction into fused multiplications. */
#include "score.h"

#include "kernels/exp.h"
#include "page.cuh"

namespace
{

enum {
    THREADS = 256,
    ROWS = KVC_TILE_ROWS,
    KEYS = KVC_PAGE_ROWS,
    SUMS = 16, /* of a dot product, of an lse */
    ROWS_A_THREAD = ROWS * KEYS / THREADS
};

typedef float tile_scores[ROWS][KEYS];
typedef uint64_t tile_masks[ROWS];
typedef float key_chunk[SUMS][KEYS + 1];

/* A page and what it tells of its rows. */
struct page_view {
    const uint8_t *data;
    const kvc_page_layout *layout;
    const int32_t *ordinals; /* NULL: consecutive */
    const float *bias;       /* or NULL */
    int32_t first;
    uint64_t live;
};

__device__ __forceinline__ page_view view_of(const kvc_device_cache &cache,
                                             const kvc_device_entry &e)
{
    const kvc_page_layout *layout = &cache.layouts[e.layout];
    page_view page;
    page.data = cache.memory + e.page;
    page.layout = layout;
    page.ordinals = layout->ordinals
                        ? reinterpret_cast<const int32_t *>(page.data + layout->ordinals)
                        : nullptr;
    page.bias =
        layout->groups ? reinterpret_cast<const float *>(page.data + layout->groups) : nullptr;
    page.first = e.first;
    page.live = e.live;
    return page;
}

/* The rows of a page that a query at that ordinal sees. */
__device__ uint64_t seen_rows(const kvc_device_probes &p, const page_view &page, int64_t at)
{
    const int64_t first = p.window > 0 && p.window <= at ? at + 1 - p.window : 0;
    uint64_t seen = 0;
    for (int t = 0; t < KEYS; t++) {
        const int64_t ordinal = page.ordinals ? page.ordinals[t] : page.first + t;
        seen |= (uint64_t)(ordinal >= first && ordinal <= at) << t;
    }
    return seen & page.live;
}

/* Elements c ... c + SUMS - 1 of the keys that are seen; the others, and those beyond a row, are 0.
 */
__device__ __forceinline__ void load_keys(const page_view &page, uint64_t seen, uint32_t c,
                                          key_chunk &keys)
{
    for (uint32_t at = threadIdx.x; at < SUMS * KEYS; at += THREADS) {
        const uint32_t token = at / SUMS, i = at % SUMS;
        keys[i][token] = c + i < page.layout->d_k && (seen >> token & 1)
                             ? kvc_page_k(page.layout, page.data, token, c + i)
                             : 0.0f;
    }
}

template <int HALF> __device__ __forceinline__ void add_half(float (&sums)[SUMS])
{
#pragma unroll
    for (int i = 0; i < HALF; i++)
        sums[i] += sums[i + HALF];
}

/* By halves, as kvc_dot_rows_fn has it; in steps that keep them in registers. */
__device__ __forceinline__ float add_sums(float (&sums)[SUMS])
{
    add_half<8>(sums);
    add_half<4>(sums);
    add_half<2>(sums);
    add_half<1>(sums);
    return sums[0];
}

/* A tile of query rows. */
struct tile {
    uint32_t first, n; /* rows of the head */
    size_t row;        /* the first, among those of all heads */
};

__device__ __forceinline__ tile tile_at(const kvc_device_probes &p, uint32_t head, uint32_t i)
{
    tile t;
    t.first = i * ROWS;
    t.n = p.n_rows - t.first < ROWS ? p.n_rows - t.first : (uint32_t)ROWS;
    t.row = (size_t)head * p.n_rows + t.first;
    return t;
}

__device__ __forceinline__ float logit(const kvc_device_probes &p, const page_view &page,
                                       const tile &t, uint32_t r, uint32_t token, float dot)
{
    float s = dot * p.scale + (p.shift ? p.shift[t.row + r] : 0.0f);
    if (p.softcap > 0.0f)
        s = p.softcap * tanhf(s / p.softcap);
    return page.bias ? s + page.bias[token] : s;
}

/* Logits of a tile for a page, and what its rows see of it; false if none sees anything. A thread
 * has one key and every fourth row. */
__device__ bool tile_logits(const kvc_device_probes &p, const page_view &page, const tile &t,
                            tile_scores &s, tile_masks &masks, key_chunk &keys)
{
    const uint32_t token = threadIdx.x % KEYS, part = threadIdx.x / KEYS;
    const size_t stride = kvc_attend_stride(p.d_k);
    __syncthreads(); /* the last tile's are read */
    if (threadIdx.x < ROWS)
        masks[threadIdx.x] =
            threadIdx.x < t.n ? seen_rows(p, page, p.ordinals[t.first + threadIdx.x]) : 0;
    __syncthreads();
    uint64_t any = 0;
    for (uint32_t r = 0; r < ROWS; r++)
        any |= masks[r];
    if (any == 0)
        return false;
    float sums[ROWS_A_THREAD][SUMS] = {};
    for (uint32_t c = 0; c < p.d_k; c += SUMS) {
        load_keys(page, any, c, keys);
        __syncthreads();
#pragma unroll
        for (uint32_t i = 0; i < SUMS; i++) {
            const float k = keys[i][token];
#pragma unroll
            for (uint32_t j = 0; j < ROWS_A_THREAD; j++) {
                const uint32_t r = part + j * (THREADS / KEYS);
                sums[j][i] += p.q[(t.row + (r < t.n ? r : 0)) * stride + c + i] * k;
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (uint32_t j = 0; j < ROWS_A_THREAD; j++) {
        const uint32_t r = part + j * (THREADS / KEYS);
        const float dot = add_sums(sums[j]);
        if (r < t.n)
            s[r][token] = logit(p, page, t, r, token, dot);
    }
    __syncthreads();
    return true;
}

/* One row taken over a page further (kvc_lse_block_fn). */
__device__ __forceinline__ void take_further(const float (&s)[KEYS], uint64_t mask, float &m,
                                             float &l)
{
    float max = m, sums[SUMS] = {};
    for (int t = 0; t < KEYS; t++)
        if (mask >> t & 1)
            max = s[t] > max ? s[t] : max;
    if (max == -INFINITY)
        return;
    for (int first = 0; first < KEYS; first += SUMS)
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (mask >> (first + i) & 1)
                sums[i] += kvc_exp(s[first + i] - max);
    l = l * kvc_exp(m - max) + add_sums(sums);
    m = max;
}

__device__ __forceinline__ const kvc_device_entry *row_of(const kvc_device_probes &p, uint32_t head)
{
    const size_t pair = (size_t)(p.layer * p.cache.n_kv_heads) + head;
    return p.cache.entries +
           ((size_t)p.seq * (size_t)p.cache.n_pairs + pair) * (size_t)p.cache.row_entries;
}

/* A block a head and tile: pages follow one another. */
__global__ void __launch_bounds__(THREADS) probe_lse(kvc_device_probes p, float *lse)
{
    KVC_SHARED(tile_scores, s);
    KVC_SHARED(tile_masks, masks);
    KVC_SHARED(key_chunk, keys);
    const tile t = tile_at(p, blockIdx.y, blockIdx.x);
    const kvc_device_entry *entries = row_of(p, blockIdx.y);
    const int32_t n = p.cache.seqs[p.seq].n_slots;
    float m = -INFINITY, l = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        if (entries[i].live == 0)
            continue;
        if (tile_logits(p, view_of(p.cache, entries[i]), t, s, masks, keys) && threadIdx.x < t.n)
            take_further(s[threadIdx.x], masks[threadIdx.x], m, l);
    }
    if (threadIdx.x < t.n)
        lse[t.row + threadIdx.x] = m + logf(l);
}

/* A block a head and entry. */
__global__ void __launch_bounds__(THREADS)
    probe_mass(kvc_device_probes p, const float *lse, float weight, float *mass)
{
    KVC_SHARED(tile_scores, s);
    KVC_SHARED(tile_masks, masks);
    KVC_SHARED(key_chunk, keys);
    const int32_t entry = (int32_t)blockIdx.x;
    const kvc_device_entry &e = row_of(p, blockIdx.y)[entry];
    float sum = 0.0f;
    if (entry >= p.cache.seqs[p.seq].n_slots)
        return;
    for (uint32_t i = 0; i * ROWS < p.n_rows && e.live != 0; i++) {
        const tile t = tile_at(p, blockIdx.y, i);
        if (!tile_logits(p, view_of(p.cache, e), t, s, masks, keys) || threadIdx.x >= KEYS)
            continue;
        float of_tile = 0.0f;
        for (uint32_t r = 0; r < t.n; r++)
            if (isfinite(lse[t.row + r]) && (masks[r] >> threadIdx.x & 1))
                of_tile += weight * kvc_exp(s[r][threadIdx.x] - lse[t.row + r]);
        sum += of_tile;
    }
    if (threadIdx.x < KEYS)
        mass[((size_t)blockIdx.y * (size_t)p.cache.row_entries + (size_t)entry) * KEYS +
             threadIdx.x] = sum;
}

} // namespace

kvc_status kvc_cuda_probe_lse(const struct kvc_queue *queue, const struct kvc_device_probes *p,
                              float *lse)
{
    const dim3 grid((p->n_rows + ROWS - 1) / ROWS, (unsigned)p->cache.n_kv_heads);
    const cudaError_t e =
        kvc_launch(probe_lse, grid, THREADS, 0, (cudaStream_t)queue->stream, *p, lse);
    return status_of(e);
}

kvc_status kvc_cuda_probe_mass(const struct kvc_queue *queue, const struct kvc_device_probes *p,
                               const float *lse, float weight, float *mass)
{
    const dim3 grid((unsigned)p->cache.row_entries, (unsigned)p->cache.n_kv_heads);
    const cudaError_t e = kvc_launch(probe_mass, grid, THREADS, 0, (cudaStream_t)queue->stream, *p,
                                     lse, weight, mass);
    return status_of(e);
}
