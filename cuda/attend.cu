/* attend.cu - attention of a call: its families, then the sum of its parts, then masses. */
#include "attend_call.cuh"

namespace
{

enum { COMBINE_WARPS = 8 };

/* Partial results of a row, added up. */
template <int N> struct partial {
    float m = MOST_NEGATIVE, l = 0.0f;
    row<N> o = {};

    __device__ void add(float other_m, float other_l, const row<N> &other)
    {
        if (!(other_l > 0.0f))
            return;
        const float most = fmaxf(m, other_m);
        const float mine = exp2f(m - most), its = exp2f(other_m - most);
        m = most;
        l = l * mine + other_l * its;
#pragma unroll
        for (int i = 0; i < N; i++)
            o.x[i] = o.x[i] * mine + other.x[i] * its;
    }
};

/* A block a query row: warps take every n-th part, then their sums are added in order. */
template <int N>
__global__ void __launch_bounds__(COMBINE_WARPS *LANES)
    combine_parts(const __grid_constant__ kvc_device_call call, int32_t block_entries,
                  const __grid_constant__ kvc_device_transform t, float norm)
{
    typedef float rows[COMBINE_WARPS][N * LANES + 2];
    KVC_SHARED(rows, room);
    const uint32_t lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    const uint32_t n_warps = blockDim.x / LANES;
    const uint32_t n_heads = (uint32_t)(call.cache.n_kv_heads * call.cache.group);
    const uint32_t n_rows = (uint32_t)call.n_q * n_heads;
    const uint32_t i_item = blockIdx.x / n_rows, r = blockIdx.x % n_rows;
    const kvc_device_item &item = call.items[i_item];
    const size_t stride = 2 + kvc_attend_stride(call.d_v);
    const int32_t n_slots = call.cache.seqs[item.seq].n_slots;
    const uint32_t n_parts =
        (uint32_t)((n_slots + block_entries - 1) / block_entries * call.n_families);
    partial<N> sum;
    for (uint32_t i = warp; i < n_parts; i += n_warps) {
        const size_t part = (size_t)i_item * (size_t)(call.n_blocks * call.n_families) + i;
        const float *from = call.parts + (part * n_rows + r) * stride;
        row<N> o = {};
        if (from[1] > 0.0f)
            load_row(o, from + 2, KVC_DTYPE_F32, 0, call.d_v);
        sum.add(from[0], from[1], o);
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        room[warp][(uint32_t)i * LANES + lane] = sum.o.x[i];
    if (lane == 0) {
        room[warp][N * LANES] = sum.m;
        room[warp][N * LANES + 1] = sum.l;
    }
    __syncthreads();
    if (warp > 0)
        return;
    for (uint32_t w = 1; w < n_warps; w++) {
        row<N> o;
#pragma unroll
        for (int i = 0; i < N; i++)
            o.x[i] = room[w][(uint32_t)i * LANES + lane];
        sum.add(room[w][N * LANES], room[w][N * LANES + 1], o);
    }
    const float by = sum.l > 0.0f ? 1.0f / sum.l : 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++)
        sum.o.x[i] *= by;
    if (t.changes_v)
        rotate_row(sum.o, t.block_v, norm);
    const size_t to = r / n_heads * item.out_token_stride + r % n_heads * item.out_head_stride;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t c = (uint32_t)i * LANES + lane;
        if (c < call.d_v)
            store_element(item.out, item.out_dtype, to + c, sum.o.x[i]);
    }
    const float lse = sum.l > 0.0f ? sum.m * LN_2 + logf(sum.l) : -INFINITY;
    if (lane == 0 && item.lse)
        item.lse[r] = lse;
    if (lane == 0 && call.lse)
        call.lse[blockIdx.x] = lse;
}

/* A block an entry of a KV head of an item: a thread a row. */
__global__ void __launch_bounds__(KVC_PAGE_ROWS)
    add_masses(const __grid_constant__ kvc_device_call call, kvc_device_masses masses,
               float log_decay, bool has_strip, bool of_rows, float *scores)
{
    const int32_t entry = (int32_t)blockIdx.x, n_rows = call.n_q * call.cache.group;
    const int32_t i_item = (int32_t)blockIdx.y / call.cache.n_kv_heads;
    const int32_t head = (int32_t)blockIdx.y % call.cache.n_kv_heads;
    const kvc_device_item &item = call.items[i_item];
    const kvc_device_seq &seq = call.cache.seqs[item.seq];
    const int32_t token = (int32_t)threadIdx.x;
    if (entry >= seq.n_slots || (has_strip && entry == 0) || (!of_rows && token > 0))
        return;
    const kvc_device_entry &e = entries_of(call, item, head)[entry];
    const bool has_ordinals = e.n_rows > 0 && call.cache.layouts[e.layout].ordinals != 0;
    if (e.n_rows == 0 || seen_of(e, has_ordinals, first_seen(call, ordinal_of(call, item, 0)),
                                 ordinal_of(call, item, n_rows - 1)) == 0)
        return; /* attention has not written it */
    const size_t at = mass_entry(call, i_item, head, entry);
    float sum = 0.0f;
    for (int32_t r = 0; r < n_rows; r++) {
        const float lse = call.lse[row_index(call, i_item, head, r)];
        const float weight = expf((float)(ordinal_of(call, item, r) - seq.score_base) * log_decay);
        if (!isfinite(lse))
            continue;
        for (int32_t half = 0; half < 2; half++) {
            const float *page =
                masses.pages + ((at * 2 + (size_t)half) * (size_t)n_rows + (size_t)r) * 2;
            const float unit = weight * exp2f(page[0] - lse * LOG2_E);
            if (!of_rows)
                sum += unit * page[1];
            else if (token / (KVC_PAGE_ROWS / 2) == half)
                sum += unit * masses.tokens[(at * (size_t)n_rows + (size_t)r) * KVC_PAGE_ROWS +
                                            (size_t)token];
        }
    }
    const size_t pair = (size_t)item.seq * (size_t)call.cache.n_pairs +
                        (size_t)(call.layer * call.cache.n_kv_heads + head);
    const size_t to = pair * (size_t)call.cache.row_entries + (size_t)entry;
    scores[of_rows ? to * KVC_PAGE_ROWS + (size_t)token : to] += sum;
}

} // namespace

kvc_status kvc_cuda_attend(const struct kvc_queue *queue, const struct kvc_device_call *call,
                           const struct kvc_device_family *families,
                           const struct kvc_device_transform *t,
                           const struct kvc_device_masses *masses)
{
    const cudaStream_t stream = (cudaStream_t)queue->stream;
    const int32_t block_entries = kvc_device_block_entries(&call->cache, call->n_q);
    attend_args args = {};
    args.call = *call;
    args.block_entries = block_entries;
    if (masses)
        args.masses = *masses;
    for (args.number = 0; args.number < call->n_families; args.number++) {
        args.family = families[args.number];
        const uint8_t format = args.family.layout[0].k_format;
        const cudaError_t error = format == KVC_F16    ? kvc_attend_f16(args, stream)
                                  : format == KVC_INT8 ? kvc_attend_int8(args, stream)
                                  : format == KVC_INT6 ? kvc_attend_int6(args, stream)
                                                       : kvc_attend_int4(args, stream);
        if (error != cudaSuccess)
            return status_of(error);
    }
    const int32_t n_rows = call->n_items * call->n_q * call->cache.n_kv_heads * call->cache.group;
    const int32_t n_warps = min(call->n_blocks * call->n_families, (int32_t)COMBINE_WARPS);
    return status_of(by_size(call->d_v, [&](auto n) {
        return kvc_launch(combine_parts<n()>, (unsigned)n_rows, (unsigned)(n_warps * LANES), 0,
                          stream, *call, block_entries, *t, norm_of(t->block_v));
    }));
}

kvc_status kvc_cuda_add_masses(const struct kvc_queue *queue, const struct kvc_device_call *call,
                               const struct kvc_device_masses *masses, float log_decay,
                               bool has_strip, bool of_rows, float *scores)
{
    const dim3 grid((unsigned)call->cache.row_entries,
                    (unsigned)(call->n_items * call->cache.n_kv_heads));
    return status_of(kvc_launch(add_masses, grid, KVC_PAGE_ROWS, 0, (cudaStream_t)queue->stream,
                                *call, *masses, log_decay, has_strip, of_rows, scores));
}
