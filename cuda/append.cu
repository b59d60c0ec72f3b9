/* append.cu - rows of K and V become halves in unsealed pages, turned if the cache turns them. */
#include "row.cuh"

namespace
{

/* A side of a pair: what its rows are turned by. */
struct turning {
    const float *mean, *inverse; /* of the pair, or NULL */
    uint32_t block_in, block;
    float norm_in, norm;
    bool on;
};

__device__ __forceinline__ turning turning_of(const kvc_device_transform &t, const float (&norm)[3],
                                              bool is_v, size_t at)
{
    if (is_v)
        return {nullptr, nullptr, 1, t.block_v, 1.0f, norm[2], t.changes_v};
    return {t.mean ? t.mean + at : nullptr,
            t.mean ? t.inverse + at : nullptr,
            t.block_in,
            t.block_k,
            norm[0],
            norm[1],
            t.changes_k};
}

template <int N>
__device__ __forceinline__ void turn_row(row<N> &r, const turning &t, uint32_t d,
                                         uint32_t &n_saturated)
{
    const uint32_t lane = threadIdx.x % LANES;
    if (!t.on)
        return;
    rotate_row(r, t.block_in, t.norm_in);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t c = (uint32_t)i * LANES + lane;
        if (t.mean && c < d)
            r.x[i] = (r.x[i] - t.mean[c]) * t.inverse[c];
    }
    rotate_row(r, t.block, t.norm);
    round_row(r, n_saturated, n_saturated);
}

__device__ __forceinline__ void add_counts(kvc_device_counts *counts, uint32_t n_nonfinite,
                                           uint32_t n_saturated)
{
    n_nonfinite = warp_sum(n_nonfinite);
    n_saturated = warp_sum(n_saturated);
    if (threadIdx.x % LANES == 0 && n_nonfinite)
        atomicAdd(&counts->n_nonfinite, (unsigned long long)n_nonfinite);
    if (threadIdx.x % LANES == 0 && n_saturated)
        atomicAdd(&counts->n_saturated, (unsigned long long)n_saturated);
}

/* Where the row of an ordinal lies: in the strip, or in one of the last slots. */
__device__ __forceinline__ uint16_t *place_of(const kvc_device_append &a, int32_t pair,
                                              int32_t ordinal, bool is_v)
{
    const kvc_device_entry *entries =
        a.cache.entries +
        ((size_t)a.seq * (size_t)a.cache.n_pairs + (size_t)pair) * (size_t)a.cache.row_entries;
    const bool sink = ordinal < a.sinks;
    int32_t slot = sink ? 0 : a.cache.seqs[a.seq].n_slots - 1;
    while (!sink && entries[slot].first > ordinal)
        slot--;
    const kvc_page_layout &layout = sink ? a.strip : a.open;
    const size_t r = (size_t)(ordinal - entries[slot].first);
    const size_t at = is_v ? layout.v_codes + r * layout.v_stride : r * layout.k_stride;
    return reinterpret_cast<uint16_t *>(a.cache.memory + entries[slot].page + at);
}

template <int N>
__global__ void __launch_bounds__(WARPS *LANES)
    append_rows(kvc_device_append a, float norm_in, float norm_k, float norm_v)
{
    const uint32_t heads = (uint32_t)a.cache.n_kv_heads;
    const uint32_t job = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (job >= 2 * heads * (uint32_t)a.n)
        return;
    const bool is_v = job % 2;
    const uint32_t head = job / 2 % heads, token = job / 2 / heads;
    const uint32_t d = is_v ? a.open.d_v : a.open.d_k, d8 = is_v ? a.open.d8_v : a.open.d8_k;
    const int32_t pair = a.layer * a.cache.n_kv_heads + (int32_t)head;
    const size_t from = is_v ? token * a.v_token_stride + head * a.v_head_stride
                             : token * a.k_token_stride + head * a.k_head_stride;
    const float norm[3] = {norm_in, norm_k, norm_v};
    const size_t vectors = (size_t)pair * kvc_attend_stride(a.open.d_k);
    uint32_t n_nonfinite = 0, n_saturated = 0;
    row<N> r;
    load_row(r, is_v ? a.v : a.k, is_v ? a.v_dtype : a.k_dtype, from, d);
    round_row(r, n_nonfinite, n_saturated);
    turn_row(r, turning_of(a.transform, norm, is_v, vectors), d, n_saturated);
    const int32_t ordinal = a.cache.seqs[a.seq].n_tokens - a.from_end + (int32_t)token;
    store_row(r, d, d8, place_of(a, pair, ordinal, is_v));
    add_counts(a.counts, n_nonfinite, n_saturated);
}

/* Rows that are stored already. */
template <int N>
__global__ void __launch_bounds__(WARPS *LANES)
    rewrite_rows(kvc_device_append a, const kvc_device_rewrite *jobs, float norm_in, float norm_k,
                 float norm_v)
{
    const kvc_device_rewrite job = jobs[blockIdx.x];
    const kvc_page_layout &layout = job.is_strip ? a.strip : a.open;
    const float norm[3] = {norm_in, norm_k, norm_v};
    const size_t vectors = (size_t)job.pair * kvc_attend_stride(a.open.d_k);
    uint32_t n_saturated = 0;
    for (uint32_t i = threadIdx.x / LANES; i < 2 * job.n; i += WARPS) {
        const bool is_v = i % 2;
        const uint32_t d = is_v ? layout.d_v : layout.d_k, d8 = is_v ? layout.d8_v : layout.d8_k;
        const size_t r_at = job.first + i / 2;
        const size_t at = is_v ? layout.v_codes + r_at * layout.v_stride : r_at * layout.k_stride;
        uint16_t *halves = reinterpret_cast<uint16_t *>(a.cache.memory + job.page + at);
        const turning t = turning_of(a.transform, norm, is_v, vectors);
        row<N> r;
        if (!t.on)
            continue;
        load_row(r, halves, KVC_DTYPE_F16, 0, d);
        turn_row(r, t, d, n_saturated);
        store_row(r, d, d8, halves);
    }
    add_counts(a.counts, 0, n_saturated);
}

uint32_t longest_row(const kvc_device_append *a)
{
    return a->open.d_k > a->open.d_v ? a->open.d_k : a->open.d_v;
}

} // namespace

kvc_status kvc_cuda_append(const struct kvc_queue *queue, const struct kvc_device_append *a)
{
    const uint32_t n_rows = 2 * (uint32_t)a->n * (uint32_t)a->cache.n_kv_heads;
    const dim3 grid((n_rows + WARPS - 1) / WARPS);
    const kvc_device_transform &t = a->transform;
    const cudaError_t e = by_size(longest_row(a), [&](auto n) {
        return kvc_launch(append_rows<n()>, grid, WARPS * LANES, 0, (cudaStream_t)queue->stream, *a,
                          norm_of(t.block_in), norm_of(t.block_k), norm_of(t.block_v));
    });
    return status_of(e);
}

kvc_status kvc_cuda_rewrite(const struct kvc_queue *queue, const struct kvc_device_append *a,
                            const struct kvc_device_rewrite *jobs, uint32_t n_jobs)
{
    const kvc_device_transform &t = a->transform;
    const cudaError_t e = by_size(longest_row(a), [&](auto n) {
        return kvc_launch(rewrite_rows<n()>, dim3(n_jobs), WARPS * LANES, 0,
                          (cudaStream_t)queue->stream, *a, jobs, norm_of(t.block_in),
                          norm_of(t.block_k), norm_of(t.block_v));
    });
    return status_of(e);
}
