// device.cuh - all inline PTX, bit casts, shared memory and launches of the kernels. Every name
// here has a twin in tests/emu/emu_device.h, with which the kernels run on the host.
#ifndef KVC_DEVICE_CUH
#define KVC_DEVICE_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#ifdef KVC_EMU
#include <emu_device.h>
#else

// KVC_SHARED(type, name) is a tile of shared memory, aligned to 16 bytes or what the type asks for;
// an array needs a typedef. KVC_DYN_SHARED(type, name) points to what the launch gave, at a
// multiple of 128.
#define KVC_SHARED(type, name) __shared__ __align__(16) type name
#define KVC_DYN_SHARED(type, name)                                                                 \
    extern __shared__ __align__(128) unsigned char kvc_dynamic_shared[];                           \
    type *const name = reinterpret_cast<type *>(kvc_dynamic_shared)

// kvc_launch(kernel, grid, block, dynamic_shared, stream, arguments...) returns the launch's error.
#define kvc_launch(...) kvc_launch_kernel(__VA_ARGS__)

template <class... P, class... A>
inline cudaError_t kvc_launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block,
                                     size_t dynamic_shared, cudaStream_t stream, A &&...arguments)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = dynamic_shared;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
}

__device__ __forceinline__ uint32_t as_u32(__half2 x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

__device__ __forceinline__ uint32_t as_u32(float x)
{
    return __float_as_uint(x);
}

__device__ __forceinline__ __half2 as_half2(uint32_t bits)
{
    __half2 x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

__device__ __forceinline__ float as_float(uint32_t bits)
{
    return __uint_as_float(bits);
}

// Addresses of shared memory as the instructions below take them.
__device__ __forceinline__ uint32_t smem_u32(const void *ptr)
{
    return uint32_t(__cvta_generic_to_shared(ptr));
}

// Copies 16 bytes from global to shared memory, past L1; both addresses are multiples of 16. The
// copy belongs to the next group that is committed.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src)
                 : "memory");
}

// The same, but only src_size bytes are read; the rest becomes zero.
__device__ __forceinline__ void cp_async_16_zfill(uint32_t dst, const void *src, int src_size)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(src_size)
                 : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

__device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most N groups of this thread are under way.
template <int N> __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Loads 8 x 8 matrices of 16-bit elements: lane 8 i + r gives the address of row r of matrix i,
// word i of lane l is elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix i (of its
// transpose).
__device__ __forceinline__ void ldmatrix_x1(uint32_t (&words)[1], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(words[0])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&words)[2], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&words)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&words)[2], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&words)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements that lies in registers as ldmatrix leaves it.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t word)
{
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

// c += A B with A[16][16] and B[16][8] of halves, sums in float.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], uint32_t a0, uint32_t a1,
                                                 uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += A B with A[16][32] and B[32][8] of bytes, sums in 32 bits that wrap.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k32_u8s8(int (&c)[4], uint32_t a0, uint32_t a1,
                                                  uint32_t a2, uint32_t a3, uint32_t b0,
                                                  uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Bit 4 a + 2 b + c of the table is the result for the bits a, b and c.
template <int LUT> __device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(LUT));
    return result;
}

__device__ __forceinline__ uint32_t prmt(uint32_t lo, uint32_t hi, uint32_t selectors)
{
    return __byte_perm(lo, hi, selectors);
}

// 2^x with a relative error of about 2^-22; subnormal arguments and results become zero.
__device__ __forceinline__ float ex2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Barriers 1 to 15 for n_threads threads, whole warps; who arrives goes on at once.
__device__ __forceinline__ void named_barrier_sync(int id, int n_threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int n_threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

// Loads 16 bytes that no kernel writes meanwhile and nobody reads again soon.
__device__ __forceinline__ uint4 ldg_nc_16(const void *ptr)
{
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(ptr));
    return x;
}

#endif
#endif
