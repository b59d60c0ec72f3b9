/* queries.cu - query rows become what stored keys are multiplied with; outputs are turned back. */
#include "queries.h"

#include "row.cuh"

namespace
{

/* Which row of a call a warp has. */
struct query {
    uint32_t item, token, head, n_heads;
    size_t row; /* of all rows of the call */
};

__device__ __forceinline__ bool find_query(const kvc_device_call &call, query &q)
{
    q.n_heads = (uint32_t)(call.cache.n_kv_heads * call.cache.group);
    q.row = (size_t)blockIdx.x * WARPS + threadIdx.x / LANES;
    q.head = (uint32_t)(q.row % q.n_heads);
    q.token = (uint32_t)(q.row / q.n_heads % (uint32_t)call.n_q);
    q.item = (uint32_t)(q.row / q.n_heads / (uint32_t)call.n_q);
    return q.item < (uint32_t)call.n_items;
}

/* The sum of a lane's products p with those of the others, in the order of kvc_dot_rows_fn: lane l
 * of the first 16 takes the elements l, l + 16, ...; in lane 0. */
template <int N> __device__ __forceinline__ float dot_sum(const float (&p)[N])
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float next = __shfl_down_sync(0xffffffffu, p[i], 16);
        sum = sum + p[i] + next;
    }
#pragma unroll
    for (int h = 8; h > 0; h /= 2)
        sum += __shfl_down_sync(0xffffffffu, sum, (unsigned)h);
    return sum;
}

template <int N>
__device__ __forceinline__ void put_row(const row<N> &r, uint32_t d, uint32_t stride, float *to)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t c = (uint32_t)i * LANES + threadIdx.x % LANES;
        if (c < stride)
            to[c] = c < d ? r.x[i] : 0.0f;
    }
}

template <int N>
__global__ void __launch_bounds__(WARPS *LANES)
    load_queries(kvc_device_call call, kvc_device_transform t, float norm_in, float norm_k,
                 float *rows, float *shift)
{
    query q;
    row<N> r;
    if (!find_query(call, q))
        return;
    const kvc_device_item &item = call.items[q.item];
    const uint32_t stride = (uint32_t)kvc_attend_stride(call.d_k), lane = threadIdx.x % LANES;
    const int32_t pair = call.layer * call.cache.n_kv_heads + (int32_t)q.head / call.cache.group;
    load_row(r, item.q, item.q_dtype, q.token * item.q_token_stride + q.head * item.q_head_stride,
             call.d_k);
    float products[N] = {};
    if (t.changes_k) {
        rotate_row(r, t.block_in, norm_in);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint32_t c = (uint32_t)i * LANES + lane;
            if (t.scale && c < call.d_k)
                r.x[i] *= t.scale[(size_t)pair * stride + c];
        }
        rotate_row(r, t.block_k, norm_k);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint32_t c = (uint32_t)i * LANES + lane;
            if (t.shift && c < call.d_k)
                products[i] = r.x[i] * t.shift[(size_t)pair * stride + c];
        }
    }
    put_row(r, call.d_k, stride, rows + q.row * stride);
    const float dot = dot_sum(products);
    if (shift && lane == 0)
        shift[q.row] = dot * call.scale;
}

template <int N>
__global__ void __launch_bounds__(WARPS *LANES)
    store_outputs(kvc_device_call call, kvc_device_transform t, float norm, const float *rows)
{
    query q;
    row<N> r;
    if (!find_query(call, q))
        return;
    const kvc_device_item &item = call.items[q.item];
    const size_t to = q.token * item.out_token_stride + q.head * item.out_head_stride;
    load_row(r, rows, KVC_DTYPE_F32, q.row * kvc_attend_stride(call.d_v), call.d_v);
    if (t.changes_v)
        rotate_row(r, t.block_v, norm);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t c = (uint32_t)i * LANES + threadIdx.x % LANES;
        if (c < call.d_v)
            store_element(item.out, item.out_dtype, to + c, r.x[i]);
    }
}

template <int N>
__global__ void __launch_bounds__(WARPS *LANES)
    keep_probes(kvc_device_call call, uint16_t *probes, int32_t n_layers, int32_t n_rows)
{
    query q;
    row<N> r;
    uint32_t n_nonfinite = 0, n_saturated = 0;
    if (!find_query(call, q) || (int32_t)q.token < call.n_q - n_rows)
        return;
    const kvc_device_item &item = call.items[q.item];
    const int32_t ordinal = call.cache.seqs[item.seq].n_tokens - call.n_q + (int32_t)q.token;
    const size_t layer = (size_t)item.seq * (size_t)n_layers + (size_t)call.layer;
    const size_t at = layer * (size_t)n_rows + (size_t)(ordinal % n_rows);
    load_row(r, item.q, item.q_dtype, q.token * item.q_token_stride + q.head * item.q_head_stride,
             call.d_k);
    round_row(r, n_nonfinite, n_saturated);
    store_row(r, call.d_k, call.d_k, probes + (at * q.n_heads + q.head) * call.d_k);
}

dim3 warps_of(const kvc_device_call *call)
{
    const int64_t n =
        (int64_t)call->n_items * call->n_q * call->cache.n_kv_heads * call->cache.group;
    return dim3((unsigned)((n + WARPS - 1) / WARPS));
}

} // namespace

kvc_status kvc_cuda_load_queries(const struct kvc_queue *queue, const struct kvc_device_call *call,
                                 const struct kvc_device_transform *t, float *rows, float *shift)
{
    return status_of(by_size(call->d_k, [&](auto n) {
        return kvc_launch(load_queries<n()>, warps_of(call), WARPS * LANES, 0,
                          (cudaStream_t)queue->stream, *call, *t, norm_of(t->block_in),
                          norm_of(t->block_k), rows, shift);
    }));
}

kvc_status kvc_cuda_store_outputs(const struct kvc_queue *queue, const struct kvc_device_call *call,
                                  const struct kvc_device_transform *t, const float *rows)
{
    return status_of(by_size(call->d_v, [&](auto n) {
        return kvc_launch(store_outputs<n()>, warps_of(call), WARPS * LANES, 0,
                          (cudaStream_t)queue->stream, *call, *t, norm_of(t->block_v), rows);
    }));
}

kvc_status kvc_cuda_keep_probes(const struct kvc_queue *queue, const struct kvc_device_call *call,
                                uint16_t *probes, int32_t n_layers, int32_t n_rows)
{
    return status_of(by_size(call->d_k, [&](auto n) {
        return kvc_launch(keep_probes<n()>, warps_of(call), WARPS * LANES, 0,
                          (cudaStream_t)queue->stream, *call, probes, n_layers, n_rows);
    }));
}
