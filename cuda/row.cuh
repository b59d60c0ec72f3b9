/* row.cuh - device words for a row of K, V or Q that lies in the registers of a warp. */
#ifndef KVC_ROW_CUH
#define KVC_ROW_CUH

#include <type_traits>

#include "page.cuh"

namespace
{

enum { WARPS = 4, LANES = 32 };

/* A row in a warp: element 32 i + lane is x[i]; those beyond the row are 0. */
template <int N> struct row {
    float x[N];
};

__device__ __forceinline__ float load_element(const void *data, kvc_dtype dtype, size_t i)
{
    if (dtype == KVC_DTYPE_F32)
        return static_cast<const float *>(data)[i];
    const uint16_t bits = static_cast<const uint16_t *>(data)[i];
    return dtype == KVC_DTYPE_F16 ? half_value(bits) : kvc_bf16_to_float(bits);
}

__device__ __forceinline__ void store_element(void *data, kvc_dtype dtype, size_t at, float x)
{
    if (dtype == KVC_DTYPE_F32)
        static_cast<float *>(data)[at] = x;
    else
        static_cast<uint16_t *>(data)[at] =
            dtype == KVC_DTYPE_F16 ? half_bits(x) : kvc_bf16_from_float(x);
}

/* What a half holds of each element, as kvc_store_rows_fn says; counts what changed. */
template <int N>
__device__ __forceinline__ void round_row(row<N> &r, uint32_t &n_nonfinite, uint32_t &n_saturated)
{
    float absmax = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float a = fabsf(r.x[i]);
        absmax = isfinite(a) ? fmaxf(absmax, a) : absmax;
    }
    absmax = fminf(warp_max(absmax), KVC_HALF_MAX);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float x = r.x[i];
        if (isfinite(x)) {
            n_saturated += fabsf(x) > KVC_HALF_MAX;
            r.x[i] = fminf(fmaxf(x, -KVC_HALF_MAX), KVC_HALF_MAX);
        } else {
            n_nonfinite++;
            r.x[i] = isnan(x) ? 0.0f : copysignf(absmax, x);
        }
        r.x[i] = half_value(half_bits(r.x[i]));
    }
}

/* H of each run of `block` elements (kvc_row_transform); 1: none. */
template <int N> __device__ __forceinline__ void rotate_row(row<N> &r, uint32_t block, float norm)
{
    const uint32_t lane = threadIdx.x % LANES;
    if (block == 1)
        return;
    for (uint32_t h = 1; h < LANES && h < block; h *= 2)
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float other = __shfl_xor_sync(0xffffffffu, r.x[i], (int)h);
            r.x[i] = lane & h ? other - r.x[i] : r.x[i] + other;
        }
#pragma unroll
    for (int h = 1; h < N; h *= 2)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!(i & h) && (uint32_t)h * LANES < block) {
                const float a = r.x[i], b = r.x[i + h];
                r.x[i] = a + b;
                r.x[i + h] = a - b;
            }
#pragma unroll
    for (int i = 0; i < N; i++)
        r.x[i] *= norm;
}

template <int N>
__device__ __forceinline__ void load_row(row<N> &r, const void *data, kvc_dtype dtype, size_t at,
                                         uint32_t d)
{
    const uint32_t lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t c = (uint32_t)i * LANES + lane;
        r.x[i] = c < d ? load_element(data, dtype, at + c) : 0.0f;
    }
}

template <int N>
__device__ __forceinline__ void store_row(const row<N> &r, uint32_t d, uint32_t d8, uint16_t *to)
{
    const uint32_t lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint32_t c = (uint32_t)i * LANES + lane;
        if (c < d8)
            to[c] = c < d ? half_bits(r.x[i]) : (uint16_t)0;
    }
}

/* As kvc_row_transform has it. */
inline float norm_of(uint32_t block)
{
    return (float)(1.0 / sqrt((double)block));
}

/* Calls f with the elements a lane holds of rows of d. */
template <class F> cudaError_t by_size(uint32_t d, F f)
{
    return d <= 64    ? f(std::integral_constant<int, 2>())
           : d <= 128 ? f(std::integral_constant<int, 4>())
           : d <= 256 ? f(std::integral_constant<int, 8>())
                      : f(std::integral_constant<int, 16>());
}

} // namespace

#endif
