/* page.cuh - device words for rows of halves and lines of codes. */
#ifndef KVC_PAGE_CUH
#define KVC_PAGE_CUH

#include "device.cuh"
#include "kernels/codes.h"
#include "kernels/page.h"
#include "page.h"

namespace
{

/* Of a launch; the runtime forgets the error, which is not the next caller's. */
inline kvc_status status_of(cudaError_t error)
{
    if (error == cudaSuccess)
        return KVC_OK;
    (void)cudaGetLastError();
    return KVC_E_DEVICE;
}

__device__ __forceinline__ float half_value(uint16_t bits)
{
    return __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ uint16_t half_bits(float x)
{
    return __half_as_ushort(__float2half_rn(x));
}

__device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int h = 16; h > 0; h /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, h));
    return x;
}

__device__ __forceinline__ uint32_t warp_sum(uint32_t x)
{
    return __reduce_add_sync(0xffffffffu, x);
}

/* Writes octet o of a line, 8 stored codes or halves. */
__device__ __forceinline__ void put_octet(uint8_t format, uint8_t *line, uint32_t o, uint32_t d8,
                                          const uint32_t (&u)[8])
{
    if (format == KVC_F16) {
        uint4 halves;
        halves.x = u[0] | u[1] << 16;
        halves.y = u[2] | u[3] << 16;
        halves.z = u[4] | u[5] << 16;
        halves.w = u[6] | u[7] << 16;
        *reinterpret_cast<uint4 *>(line + (size_t)o * 16) = halves;
        return;
    }
    if (format == KVC_INT8) {
        uint2 bytes;
        bytes.x = u[0] | u[1] << 8 | u[2] << 16 | u[3] << 24;
        bytes.y = u[4] | u[5] << 8 | u[6] << 16 | u[7] << 24;
        *reinterpret_cast<uint2 *>(line + (size_t)o * 8) = bytes;
        return;
    }
    /* Elements 0, 2, 4, 6, 1, 3, 5, 7, the least significant first. */
    uint32_t nibbles = 0, pairs = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t stored = u[i < 4 ? 2 * i : 2 * i - 7];
        nibbles |= (stored & 15) << (4 * i);
        pairs |= (stored >> 4) << (2 * i);
    }
    if (format == KVC_INT4) {
        *reinterpret_cast<uint32_t *>(line + (size_t)o * 4) = nibbles;
        return;
    }
    uint16_t *low = reinterpret_cast<uint16_t *>(line + (size_t)o * 4); /* lines of 6 k bytes */
    low[0] = (uint16_t)nibbles;
    low[1] = (uint16_t)(nibbles >> 16);
    *reinterpret_cast<uint16_t *>(line + d8 / 2 + (size_t)o * 2) = (uint16_t)pairs;
}

} // namespace

#endif
