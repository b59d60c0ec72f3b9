// emu_device.h - the emulator's twin of cuda/device.cuh: one function an instruction that the
// kernels use, checked where the device would not be.
#ifndef EMU_DEVICE_H
#define EMU_DEVICE_H

#include "cuda_fp16.h"

namespace emu
{

void named_barrier(int id, int n_threads, bool waits, site at);
void cp_async(uint32_t dst, const void *src, int size, int src_size, site at);
void cp_async_commit();
void cp_async_wait(int n_pending); // groups that may stay under way
void cp_async_wait_all();
const void *check_load(const void *ptr, size_t size, site at);

struct ldmatrix_argument {
    uint32_t address;
    int n;
    bool transposed;
    uint32_t words[4];
};

struct movmatrix_argument {
    uint32_t word;
};

template <class T> struct mma_argument {
    T *c;
    uint32_t a[4], b[2];
};

template <int N>
void load_matrices(uint32_t (&words)[N], uint32_t address, bool transposed, site at)
{
    ldmatrix_argument argument{address, N, transposed, {}};
    meet(collective::ldmatrix, ~0u, N * 2 + transposed, &argument, at);
    for (int i = 0; i < N; i++)
        words[i] = argument.words[i];
}

} // namespace emu

#define KVC_SHARED(type, name)                                                                     \
    static const char emu_key_##name = 0;                                                          \
    typedef type emu_type_##name;                                                                  \
    emu_type_##name &name = *static_cast<emu_type_##name *>(emu::static_shared(                    \
        &emu_key_##name, sizeof(emu_type_##name), alignof(emu_type_##name), emu::here()))
#define KVC_DYN_SHARED(type, name) type *const name = static_cast<type *>(emu::dynamic_shared())

#define kvc_launch(...) emu::launch(#__VA_ARGS__, __VA_ARGS__)

inline uint32_t as_u32(__half2 x)
{
    return emu::bit_cast<uint32_t>(&x);
}

inline uint32_t as_u32(float x)
{
    return emu::bit_cast<uint32_t>(&x);
}

inline __half2 as_half2(uint32_t x)
{
    return emu::bit_cast<__half2>(&x);
}

inline float as_float(uint32_t x)
{
    return emu::bit_cast<float>(&x);
}

inline uint32_t smem_u32(const void *ptr)
{
    return emu::shared_address(ptr);
}

inline void cp_async_16(uint32_t dst, const void *src, emu::site at = emu::here())
{
    emu::cp_async(dst, src, 16, 16, at);
}

inline void cp_async_16_zfill(uint32_t dst, const void *src, int src_size,
                              emu::site at = emu::here())
{
    emu::cp_async(dst, src, 16, src_size, at);
}

inline void cp_async_4(uint32_t dst, const void *src, emu::site at = emu::here())
{
    emu::cp_async(dst, src, 4, 4, at);
}

inline void cp_async_commit()
{
    emu::cp_async_commit();
}

template <int N> inline void cp_async_wait()
{
    emu::cp_async_wait(N);
}

inline void cp_async_wait_all()
{
    emu::cp_async_wait_all();
}

inline void ldmatrix_x1(uint32_t (&words)[1], uint32_t address, emu::site at = emu::here())
{
    emu::load_matrices(words, address, false, at);
}

inline void ldmatrix_x2(uint32_t (&words)[2], uint32_t address, emu::site at = emu::here())
{
    emu::load_matrices(words, address, false, at);
}

inline void ldmatrix_x4(uint32_t (&words)[4], uint32_t address, emu::site at = emu::here())
{
    emu::load_matrices(words, address, false, at);
}

inline void ldmatrix_x2_trans(uint32_t (&words)[2], uint32_t address, emu::site at = emu::here())
{
    emu::load_matrices(words, address, true, at);
}

inline void ldmatrix_x4_trans(uint32_t (&words)[4], uint32_t address, emu::site at = emu::here())
{
    emu::load_matrices(words, address, true, at);
}

inline uint32_t movmatrix_trans(uint32_t word, emu::site at = emu::here())
{
    emu::movmatrix_argument argument{word};
    emu::meet(emu::collective::movmatrix, ~0u, 0, &argument, at);
    return argument.word;
}

inline void mma_m16n8k16_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint32_t b0, uint32_t b1, emu::site at = emu::here())
{
    emu::mma_argument<float> argument{c, {a0, a1, a2, a3}, {b0, b1}};
    emu::meet(emu::collective::mma_f16, ~0u, 0, &argument, at);
}

inline void mma_m16n8k32_s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                            uint32_t b0, uint32_t b1, emu::site at = emu::here())
{
    emu::mma_argument<int> argument{c, {a0, a1, a2, a3}, {b0, b1}};
    emu::meet(emu::collective::mma_s8, ~0u, 1, &argument, at);
}

inline void mma_m16n8k32_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint32_t b0, uint32_t b1, emu::site at = emu::here())
{
    emu::mma_argument<int> argument{c, {a0, a1, a2, a3}, {b0, b1}};
    emu::meet(emu::collective::mma_s8, ~0u, 0, &argument, at);
}

// Bit 4 a + 2 b + c of the table is the result for the bits a, b and c.
template <int LUT> inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t result = 0;
    for (int i = 0; i < 8; i++)
        if (LUT >> i & 1)
            result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}

inline uint32_t prmt(uint32_t lo, uint32_t hi, uint32_t selectors)
{
    return __byte_perm(lo, hi, selectors);
}

// Subnormal arguments and results become zero.
inline float ex2_approx(float x)
{
    const float y = exp2f(fabsf(x) < 0x1p-126f ? 0.0f : x);
    return y < 0x1p-126f ? 0.0f : y;
}

inline void named_barrier_sync(int id, int n_threads, emu::site at = emu::here())
{
    emu::named_barrier(id, n_threads, true, at);
}

inline void named_barrier_arrive(int id, int n_threads, emu::site at = emu::here())
{
    emu::named_barrier(id, n_threads, false, at);
}

inline uint4 ldg_nc_16(const void *ptr, emu::site at = emu::here())
{
    return *static_cast<const uint4 *>(emu::check_load(ptr, sizeof(uint4), at));
}

#endif
