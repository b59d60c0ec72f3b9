// cuda_runtime.h - the CUDA language on the host: what a kernel may say, and how it reaches the
// emulator. A kernel is an ordinary function here; each of its threads runs it on its own stack.
#ifndef EMU_CUDA_RUNTIME_H
#define EMU_CUDA_RUNTIME_H

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cuda_runtime_api.h"

// There is no __shared__ (KVC_SHARED of device.cuh says it). The bounds of __launch_bounds__ are
// not checked.
#define __global__
#define __device__
#define __host__
#define __constant__    static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

// Vector types, aligned as on the device so that -fsanitize=alignment checks their loads.
#define EMU_VECTOR2(type, name, alignment)                                                         \
    struct alignas(alignment) name {                                                               \
        type x, y;                                                                                 \
    };                                                                                             \
    inline name make_##name(type x, type y)                                                        \
    {                                                                                              \
        return {x, y};                                                                             \
    }
#define EMU_VECTOR4(type, name, alignment)                                                         \
    struct alignas(alignment) name {                                                               \
        type x, y, z, w;                                                                           \
    };                                                                                             \
    inline name make_##name(type x, type y, type z, type w)                                        \
    {                                                                                              \
        return {x, y, z, w};                                                                       \
    }
EMU_VECTOR2(signed char, char2, 2)
EMU_VECTOR2(unsigned char, uchar2, 2)
EMU_VECTOR2(short, short2, 4)
EMU_VECTOR2(unsigned short, ushort2, 4)
EMU_VECTOR2(int, int2, 8)
EMU_VECTOR2(unsigned, uint2, 8)
EMU_VECTOR2(float, float2, 8)
EMU_VECTOR2(double, double2, 16)
EMU_VECTOR2(long long, longlong2, 16)
EMU_VECTOR2(unsigned long long, ulonglong2, 16)
EMU_VECTOR4(signed char, char4, 4)
EMU_VECTOR4(unsigned char, uchar4, 4)
EMU_VECTOR4(short, short4, 8)
EMU_VECTOR4(unsigned short, ushort4, 8)
EMU_VECTOR4(int, int4, 16)
EMU_VECTOR4(unsigned, uint4, 16)
EMU_VECTOR4(float, float4, 16)

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz)
    {
    }
};

// Of the thread that runs; the emulator sets them at every switch.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emu
{

// Where a kernel calls the emulator: the caller's line, as a default argument.
struct site {
    const char *file;
    int line;
};

constexpr site here(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    return {file, line};
}

[[noreturn]] void fail(site at, const char *format, ...) __attribute__((format(printf, 2, 3)));

// What the lanes of a warp do together. Each lane brings an argument of the operation's own type;
// the last one to arrive computes all results.
enum class collective {
    syncwarp,
    shuffle,
    vote,
    match,
    reduce,
    ldmatrix,
    movmatrix,
    mma_f16,
    mma_s8
};
void meet(collective what, uint32_t mask, int variant, void *argument, site at);

enum class predicate { none, count, all, any };
int sync_block(predicate kind, bool value, site at);

void fence();
void yield();
void check_atomic(const void *address, size_t size, site at);

void *static_shared(const void *key, size_t size, size_t align, site at);
void *dynamic_shared();
uint32_t shared_address(const void *ptr);

enum class source { index, up, down, exchange };
struct shuffle_argument {
    uint64_t value, result;
    int operand, width;
};

template <class T> T shuffle(source from, uint32_t mask, T value, int operand, int width, site at)
{
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "not a register or two");
    shuffle_argument argument{0, 0, operand, width};
    memcpy(&argument.value, &value, sizeof(value));
    meet(collective::shuffle, mask, int(from) * 64 + width, &argument, at);
    memcpy(&value, &argument.result, sizeof(value));
    return value;
}

struct vote_argument {
    bool value;
    uint32_t result;
};

inline uint32_t vote(uint32_t mask, bool value, site at)
{
    vote_argument argument{value, 0};
    meet(collective::vote, mask, 0, &argument, at);
    return argument.result;
}

enum class reduction { add, min, max, bit_and, bit_or, bit_xor };
struct reduce_argument {
    int64_t value, result;
};

template <class T> T reduce(reduction kind, uint32_t mask, T value, site at)
{
    reduce_argument argument{value, 0};
    meet(collective::reduce, mask, int(kind), &argument, at);
    return T(argument.result);
}

struct match_argument {
    uint64_t value;
    uint32_t result;
};

template <class T> T bit_cast(const void *ptr)
{
    T value;
    memcpy(&value, ptr, sizeof(value));
    return value;
}

// Keeps a parameter out of the deduction of T, so that literals convert.
template <class T> using value_of = std::common_type_t<T>;

template <class T, class F> T update(T *address, F change, site at)
{
    T before, after;
    check_atomic(address, sizeof(T), at);
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    after = change(before);
    __atomic_store(address, &after, __ATOMIC_RELAXED);
    return before;
}

template <class T>
constexpr bool is_atomic_integer =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;

inline int saturate_to_int(double x)
{
    return x != x ? 0 : x >= 0x1p31 ? INT32_MAX : x <= -0x1p31 ? INT32_MIN : int(x);
}

struct launch_shape {
    dim3 grid, block;
    size_t dynamic_shared;
    cudaStream_t stream;
};

// text begins with the name of the kernel; pointers has one entry a parameter, null where it is not
// a pointer.
cudaError_t enqueue(const char *text, const void *kernel, const launch_shape &shape,
                    size_t n_parameter_bytes, std::vector<const volatile void *> pointers,
                    std::function<void()> body);

template <class T> const volatile void *pointer_of(const T &value)
{
    if constexpr (std::is_pointer_v<T>)
        return value;
    else
        return nullptr;
}

template <class... P> constexpr size_t parameter_bytes()
{
    size_t size = 0;
    ((size = (size + alignof(P) - 1) / alignof(P) * alignof(P) + sizeof(P)), ...);
    return size;
}

template <class... P, class... A>
cudaError_t launch(const char *text, void (*kernel)(P...), dim3 grid, dim3 block,
                   size_t dynamic_shared, cudaStream_t stream, A &&...arguments)
{
    static_assert((std::is_trivially_copyable_v<P> && ...), "a kernel takes plain values");
    const std::tuple<P...> values{static_cast<P>(arguments)...};
    return enqueue(text, reinterpret_cast<const void *>(kernel),
                   {grid, block, dynamic_shared, stream}, parameter_bytes<P...>(),
                   std::apply(
                       [](const P &...value) {
                           return std::vector<const volatile void *>{pointer_of(value)...};
                       },
                       values),
                   [kernel, values] { std::apply(kernel, values); });
}

} // namespace emu

// The runtime as C++ sees it.
template <class T> cudaError_t cudaMalloc(T **ptr, size_t size)
{
    return cudaMalloc(reinterpret_cast<void **>(ptr), size);
}

template <class T> cudaError_t cudaMallocHost(T **ptr, size_t size)
{
    return cudaMallocHost(reinterpret_cast<void **>(ptr), size);
}

template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

template <class... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*kernel)(P...))
{
    return cudaFuncGetAttributes(attributes, reinterpret_cast<const void *>(kernel));
}

template <class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n_blocks, void (*kernel)(P...),
                                                          int n_threads, size_t dynamic_shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        n_blocks, reinterpret_cast<const void *>(kernel), n_threads, dynamic_shared);
}

// Barriers and fences.
inline void __syncthreads(emu::site at = emu::here())
{
    emu::sync_block(emu::predicate::none, false, at);
}

inline int __syncthreads_count(int value, emu::site at = emu::here())
{
    return emu::sync_block(emu::predicate::count, value != 0, at);
}

inline int __syncthreads_and(int value, emu::site at = emu::here())
{
    return emu::sync_block(emu::predicate::all, value != 0, at);
}

inline int __syncthreads_or(int value, emu::site at = emu::here())
{
    return emu::sync_block(emu::predicate::any, value != 0, at);
}

inline void __syncwarp(unsigned mask = ~0u, emu::site at = emu::here())
{
    emu::meet(emu::collective::syncwarp, mask, 0, nullptr, at);
}

inline void __threadfence()
{
    emu::fence();
}

inline void __threadfence_block()
{
    emu::fence();
}

inline void __threadfence_system()
{
    emu::fence();
}

inline void __nanosleep(unsigned)
{
    emu::yield();
}

[[noreturn]] inline void __trap(emu::site at = emu::here())
{
    emu::fail(at, "__trap()");
}

inline size_t __cvta_generic_to_shared(const void *ptr)
{
    return emu::shared_address(ptr);
}

// Warp collectives.
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, emu::site at = emu::here())
{
    return emu::shuffle(emu::source::index, mask, value, lane, width, at);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, emu::site at = emu::here())
{
    return emu::shuffle(emu::source::up, mask, value, int(delta), width, at);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emu::site at = emu::here())
{
    return emu::shuffle(emu::source::down, mask, value, int(delta), width, at);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, emu::site at = emu::here())
{
    return emu::shuffle(emu::source::exchange, mask, value, lane_mask, width, at);
}

inline unsigned __ballot_sync(unsigned mask, int value, emu::site at = emu::here())
{
    return emu::vote(mask, value != 0, at);
}

inline int __any_sync(unsigned mask, int value, emu::site at = emu::here())
{
    return emu::vote(mask, value != 0, at) != 0;
}

inline int __all_sync(unsigned mask, int value, emu::site at = emu::here())
{
    return emu::vote(mask, value == 0, at) == 0;
}

template <class T> unsigned __match_any_sync(unsigned mask, T value, emu::site at = emu::here())
{
    emu::match_argument argument{0, 0};
    memcpy(&argument.value, &value, sizeof(value));
    emu::meet(emu::collective::match, mask, 0, &argument, at);
    return argument.result;
}

#define EMU_REDUCE(name, type, kind)                                                               \
    inline type name(unsigned mask, type value, emu::site at = emu::here())                        \
    {                                                                                              \
        return emu::reduce(emu::reduction::kind, mask, value, at);                                 \
    }
EMU_REDUCE(__reduce_add_sync, int, add)
EMU_REDUCE(__reduce_add_sync, unsigned, add)
EMU_REDUCE(__reduce_min_sync, int, min)
EMU_REDUCE(__reduce_min_sync, unsigned, min)
EMU_REDUCE(__reduce_max_sync, int, max)
EMU_REDUCE(__reduce_max_sync, unsigned, max)
EMU_REDUCE(__reduce_and_sync, unsigned, bit_and)
EMU_REDUCE(__reduce_or_sync, unsigned, bit_or)
EMU_REDUCE(__reduce_xor_sync, unsigned, bit_xor)

// Atomics: relaxed; other threads may run before each.
template <class T> T atomicAdd(T *address, emu::value_of<T> value, emu::site at = emu::here())
{
    static_assert(emu::is_atomic_integer<T> || std::is_floating_point_v<T>, "no such atomic");
    return emu::update(
        address, [value](T x) { return T(x + value); }, at);
}

template <class T> T atomicExch(T *address, emu::value_of<T> value, emu::site at = emu::here())
{
    static_assert(emu::is_atomic_integer<T> || std::is_same_v<T, float>, "no such atomic");
    return emu::update(
        address, [value](T) { return value; }, at);
}

template <class T>
T atomicCAS(T *address, emu::value_of<T> compare, emu::value_of<T> value,
            emu::site at = emu::here())
{
    static_assert(emu::is_atomic_integer<T>, "no such atomic");
    return emu::update(
        address, [=](T x) { return x == compare ? value : x; }, at);
}

#define EMU_ATOMIC(name, expression)                                                               \
    template <class T> T name(T *address, emu::value_of<T> value, emu::site at = emu::here())      \
    {                                                                                              \
        static_assert(emu::is_atomic_integer<T>, "no such atomic");                                \
        return emu::update(                                                                        \
            address, [value](T x) { return T(expression); }, at);                                  \
    }
EMU_ATOMIC(atomicSub, x - value)
EMU_ATOMIC(atomicMin, value < x ? value : x)
EMU_ATOMIC(atomicMax, value > x ? value : x)
EMU_ATOMIC(atomicAnd, (x & value))
EMU_ATOMIC(atomicOr, x | value)
EMU_ATOMIC(atomicXor, x ^ value)
EMU_ATOMIC(atomicInc, x >= value ? 0 : x + 1)
EMU_ATOMIC(atomicDec, x == 0 || x > value ? value : x - 1)

// Loads and stores with cache hints.
template <class T> T __ldg(const T *ptr)
{
    return *ptr;
}

template <class T> T __ldcg(const T *ptr)
{
    return *ptr;
}

template <class T> T __ldcs(const T *ptr)
{
    return *ptr;
}

template <class T> void __stcg(T *ptr, T value)
{
    *ptr = value;
}

template <class T> void __stcs(T *ptr, T value)
{
    *ptr = value;
}

// Arithmetic. glibc declares some of the names, so those are macros.
#define __expf(x)   expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x)   logf(x)
#define __log2f(x)  log2f(x)
#define rsqrtf(x)   (1.0f / sqrtf(x))

template <class A, class B> std::common_type_t<A, B> min(A a, B b)
{
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return fmin(T(a), T(b));
    else
        return T(b) < T(a) ? T(b) : T(a);
}

template <class A, class B> std::common_type_t<A, B> max(A a, B b)
{
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return fmax(T(a), T(b));
    else
        return T(a) < T(b) ? T(b) : T(a);
}

#define EMU_FUNCTION(type, name, parameters, value)                                                \
    inline type name parameters                                                                    \
    {                                                                                              \
        return value;                                                                              \
    }
EMU_FUNCTION(int, __float_as_int, (float x), emu::bit_cast<int>(&x))
EMU_FUNCTION(unsigned, __float_as_uint, (float x), emu::bit_cast<unsigned>(&x))
EMU_FUNCTION(float, __int_as_float, (int x), emu::bit_cast<float>(&x))
EMU_FUNCTION(float, __uint_as_float, (unsigned x), emu::bit_cast<float>(&x))
EMU_FUNCTION(float, __fadd_rn, (float a, float b), a + b)
EMU_FUNCTION(float, __fsub_rn, (float a, float b), a - b)
EMU_FUNCTION(float, __fmul_rn, (float a, float b), (a * b))
EMU_FUNCTION(float, __fdiv_rn, (float a, float b), a / b)
EMU_FUNCTION(float, __fdividef, (float a, float b), a / b)
EMU_FUNCTION(float, __fmaf_rn, (float a, float b, float c), fmaf(a, b, c))
EMU_FUNCTION(float, __frcp_rn, (float x), 1.0f / x)
EMU_FUNCTION(float, __fsqrt_rn, (float x), sqrtf(x))
EMU_FUNCTION(float, __saturatef, (float x), x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)
EMU_FUNCTION(int, __float2int_rn, (float x), emu::saturate_to_int(rint(double(x))))
EMU_FUNCTION(int, __float2int_rz, (float x), emu::saturate_to_int(trunc(double(x))))
EMU_FUNCTION(int, __float2int_rd, (float x), emu::saturate_to_int(floor(double(x))))
EMU_FUNCTION(int, __float2int_ru, (float x), emu::saturate_to_int(ceil(double(x))))
EMU_FUNCTION(float, __int2float_rn, (int x), float(x))
EMU_FUNCTION(float, __uint2float_rn, (unsigned x), float(x))
EMU_FUNCTION(int, __popc, (unsigned x), __builtin_popcount(x))
EMU_FUNCTION(int, __popcll, (unsigned long long x), __builtin_popcountll(x))
EMU_FUNCTION(int, __clz, (int x), x ? __builtin_clz(unsigned(x)) : 32)
EMU_FUNCTION(int, __clzll, (long long x), x ? __builtin_clzll((unsigned long long)x) : 64)
EMU_FUNCTION(int, __ffs, (int x), __builtin_ffs(x))
EMU_FUNCTION(int, __mulhi, (int a, int b), int((int64_t(a) * b) >> 32))
EMU_FUNCTION(unsigned, __umulhi, (unsigned a, unsigned b), unsigned((uint64_t(a) * b) >> 32))
EMU_FUNCTION(unsigned, __funnelshift_r, (unsigned lo, unsigned hi, unsigned shift),
             unsigned((uint64_t(hi) << 32 | lo) >> (shift & 31)))
EMU_FUNCTION(unsigned, __funnelshift_l, (unsigned lo, unsigned hi, unsigned shift),
             unsigned((uint64_t(hi) << 32 | lo) << (shift & 31) >> 32))

inline unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++)
        reversed |= (x >> i & 1u) << (31 - i);
    return reversed;
}

// Bit 3 of a selector repeats the sign of the byte.
inline unsigned __byte_perm(unsigned lo, unsigned hi, unsigned selectors)
{
    const uint64_t bytes = uint64_t(hi) << 32 | lo;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned selector = selectors >> 4 * i & 15;
        unsigned byte = unsigned(bytes >> 8 * (selector & 7)) & 255;
        if (selector & 8)
            byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}

inline int __dp4a(int a, int b, int sum)
{
    for (int i = 0; i < 32; i += 8)
        sum = int(unsigned(sum) + unsigned(int8_t(a >> i) * int8_t(b >> i)));
    return sum;
}

inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum)
{
    for (int i = 0; i < 32; i += 8)
        sum += (a >> i & 255) * (b >> i & 255);
    return sum;
}

#endif
