// selftest_faults.cc - programs with one mistake each, which has to be seen.
#include "selftest.h"

#include <cublas_v2.h>

#include <cmath>

namespace
{

typedef float row_64[64];
typedef float row_6000[6000];

constexpr unsigned all_lanes = 0xffffffff;

// Runs a kernel that takes an array of 64 floats, and gives the array back.
std::vector<float> run(void (*kernel)(float *), unsigned n_threads, unsigned n_blocks = 1,
                       size_t dynamic_shared = 0)
{
    const device_array<float> x(std::vector<float>(64, 1.0f));
    CUDA(kvc_launch(kernel, n_blocks, n_threads, dynamic_shared, nullptr, x.data));
    CUDA(cudaDeviceSynchronize());
    return x.values();
}

// Neighbours.
__global__ void skip_syncwarp(float *x)
{
    KVC_SHARED(row_64, row);
    const int t = int(threadIdx.x);
    row[t] = float(t);
    x[t] = row[t ^ 1];
}

void missing_syncwarp()
{
    const std::vector<float> x = run(skip_syncwarp, 32);
    for (int i = 0; i < 32; i++)
        CHECK(x[size_t(i)] == float(i ^ 1));
}

__global__ void skip_barrier(float *x)
{
    KVC_SHARED(row_64, row);
    const int t = int(threadIdx.x);
    row[t] = float(t);
    __syncwarp();
    x[t] = row[63 - t];
}

void missing_barrier()
{
    const std::vector<float> x = run(skip_barrier, 64);
    for (int i = 0; i < 64; i++)
        CHECK(x[size_t(i)] == float(63 - i));
}

__global__ void skip_second_barrier(float *x)
{
    KVC_SHARED(row_64, row);
    const int t = int(threadIdx.x);
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        row[t] = float(100 * i + t);
        __syncthreads();
        sum += row[63 - t]; // some are here when others write the next round
    }
    x[t] = sum;
}

void missing_second_barrier()
{
    const std::vector<float> x = run(skip_second_barrier, 64);
    for (int i = 0; i < 64; i++)
        CHECK(x[size_t(i)] == float(600 + 4 * (63 - i)));
}

__global__ void use_next_round(float *x)
{
    KVC_SHARED(row_64, row);
    const unsigned t = threadIdx.x;
    __syncthreads();
    if (t == 0)
        row[0] = 1;
    if (t == 63)
        x[0] = row[0];
    __syncthreads();
}

void race_between_barriers()
{
    run(use_next_round, 64);
}

__global__ void write_one_place(float *x)
{
    x[0] = 1;
}

void race_between_blocks()
{
    run(write_one_place, 1, 8);
}

__global__ void skip_fence(float *x)
{
    unsigned *n_done = reinterpret_cast<unsigned *>(x + 32);
    x[blockIdx.x] = 2;
    if (atomicAdd(n_done, 1) == 0x3f800000 + gridDim.x - 1) // it begins as 1.0f
        x[63] = x[0] + x[1] + x[2] + x[3];
}

void missing_fence()
{
    CHECK(run(skip_fence, 1, 4)[63] == 8);
}

// Control flow.
__global__ void leave_before_barrier(float *x)
{
    if (threadIdx.x == 5)
        return;
    __syncthreads();
    x[threadIdx.x] = 1;
}

void exit_before_barrier()
{
    run(leave_before_barrier, 64);
}

__global__ void leave_before_shuffle(float *x)
{
    if (threadIdx.x >= 30)
        return;
    x[threadIdx.x] = __shfl_down_sync(all_lanes, 1.0f, 1);
}

void exit_before_shuffle()
{
    run(leave_before_shuffle, 32);
}

__global__ void split_barriers(float *x)
{
    if (threadIdx.x < 16)
        __syncthreads();
    else
        __syncthreads();
    x[threadIdx.x] = 1;
}

void divergent_barriers()
{
    run(split_barriers, 32);
}

__global__ void split_shuffles(float *x)
{
    if (threadIdx.x % 2)
        x[threadIdx.x] = __shfl_xor_sync(all_lanes, 1.0f, 1);
    else
        x[threadIdx.x] = __shfl_xor_sync(all_lanes, 2.0f, 1);
}

void divergent_shuffles()
{
    run(split_shuffles, 32);
}

__global__ void mix(float *x)
{
    if (threadIdx.x < 16)
        __syncthreads();
    else
        x[threadIdx.x] = __shfl_xor_sync(all_lanes, 1.0f, 1);
}

void barrier_and_shuffle()
{
    run(mix, 32);
}

__global__ void name_other_lanes(float *x)
{
    x[threadIdx.x] = __shfl_sync(0xffff0000, 1.0f, 16);
}

void lane_outside_its_mask()
{
    run(name_other_lanes, 32);
}

__global__ void read_outside(float *x)
{
    if (threadIdx.x < 16)
        x[threadIdx.x] = __shfl_down_sync(0x0000ffff, 1.0f, 1);
}

void shuffle_from_outside_the_mask()
{
    run(read_outside, 32);
}

__global__ void part_at_barrier(float *x)
{
    if (threadIdx.x < 16 || threadIdx.x >= 48)
        named_barrier_sync(1, 32);
    x[threadIdx.x] = 1;
}

void parts_of_warps_at_named_barrier()
{
    run(part_at_barrier, 64);
}

__global__ void count_differently(float *x)
{
    named_barrier_sync(3, threadIdx.x < 32 ? 64 : 32);
    x[threadIdx.x] = 1;
}

void named_barrier_of_two_sizes()
{
    run(count_differently, 64);
}

__global__ void wait_forever(float *x)
{
    volatile float *flag = x;
    while (*flag != 0) {
    }
}

void endless_loop()
{
    setenv("KVC_EMU_TIMEOUT", "0.5", 1);
    run(wait_forever, 32);
}

__global__ void trap(float *)
{
    __trap();
}

void trapped()
{
    run(trap, 1);
}

int descend(volatile int *at, int depth)
{
    volatile int local[256];
    local[0] = depth;
    return depth > 1000 ? *at : descend(local, depth + 1) + local[0];
}

__global__ void recurse(float *x)
{
    volatile int start = 0;
    x[0] = float(descend(&start, 0));
}

void stack_overflow()
{
    run(recurse, 1);
}

// Memory.
__global__ void pass_static_end(float *x)
{
    KVC_SHARED(row_64, row);
    float *p = row;
    p[threadIdx.x + 33] = x[threadIdx.x];
}

void write_behind_static_shared()
{
    run(pass_static_end, 32);
}

__global__ void pass_dynamic_end(float *x)
{
    KVC_DYN_SHARED(float, row);
    row[threadIdx.x] = x[threadIdx.x];
}

void write_behind_dynamic_shared()
{
    run(pass_dynamic_end, 33, 1, 128);
}

__global__ void read_static_end(float *x)
{
    KVC_SHARED(row_64, row);
    float *p = row;
    p[threadIdx.x] = p[threadIdx.x + 32] = 1;
    __syncthreads();
    x[threadIdx.x] = p[threadIdx.x + 33];
}

void read_behind_static_shared()
{
    for (float x : run(read_static_end, 32))
        CHECK(x == 1);
}

__global__ void read_undefined(float *x)
{
    KVC_SHARED(row_64, row);
    x[threadIdx.x] = row[threadIdx.x];
}

void undefined_shared()
{
    for (float x : run(read_undefined, 64))
        CHECK(!std::isnan(x));
}

void undefined_global()
{
    const device_array<float> x(1);
    CHECK(!std::isnan(x.values()[0]));
}

__global__ void use_large_tile(float *x)
{
    KVC_SHARED(row_6000, tile);
    KVC_DYN_SHARED(float, row);
    tile[threadIdx.x] = row[threadIdx.x] = 1;
    x[threadIdx.x] = tile[threadIdx.x];
}

void static_and_dynamic_too_large()
{
    run(use_large_tile, 32, 1, 26 * 1024);
}

void dynamic_too_large()
{
    run(pass_dynamic_end, 32, 1, 50 * 1024);
}

__global__ void pass_global_end(float *x)
{
    x[threadIdx.x] = 1;
}

void write_behind_global()
{
    run(pass_global_end, 65);
}

__global__ void read_global_end(float *x)
{
    x[threadIdx.x] = x[threadIdx.x + 1];
}

void read_behind_global()
{
    for (float x : run(read_global_end, 64))
        CHECK(x == 1);
}

__global__ void count_behind(float *x)
{
    atomicAdd(x + 64, 1.0f);
}

void atomic_behind_global()
{
    run(count_behind, 1);
}

__global__ void load_unaligned(float *x)
{
    const float4 v = *reinterpret_cast<const float4 *>(x + 1);
    x[8] = v.x + v.w;
}

void misaligned_vector()
{
    run(load_unaligned, 1);
}

__global__ void load_once_unaligned(float *x)
{
    x[8] = float(ldg_nc_16(x + 1).x);
}

void misaligned_load()
{
    run(load_once_unaligned, 1);
}

template <int OFFSET> __global__ void load_matrix(float *x)
{
    KVC_DYN_SHARED(float, row);
    uint32_t words[1];
    row[threadIdx.x] = 1;
    __syncwarp();
    ldmatrix_x1(words, smem_u32(row) + threadIdx.x % 8 * 16 + OFFSET);
    x[threadIdx.x] = as_float(words[0]);
}

void misaligned_ldmatrix()
{
    run(load_matrix<8>, 32, 1, 256);
}

void ldmatrix_out_of_range()
{
    run(load_matrix<16>, 32, 1, 128);
}

// Copies into shared memory.
__global__ void copy_and_leave(float *x)
{
    KVC_DYN_SHARED(float, row);
    cp_async_16(smem_u32(row), x);
    cp_async_commit();
}

void exit_with_copy_under_way()
{
    run(copy_and_leave, 1, 1, 16);
}

template <int N> __global__ void wait_too_little(float *x)
{
    KVC_DYN_SHARED(float, row);
    cp_async_16(smem_u32(row), x);
    cp_async_commit();
    cp_async_wait<N>();
    x[0] = row[0];
    cp_async_wait_all();
}

void copy_not_waited_for()
{
    CHECK(run(wait_too_little<1>, 1, 1, 16)[0] == 1);
}

__global__ void forget_commit(float *x)
{
    KVC_DYN_SHARED(float, row);
    cp_async_16(smem_u32(row), x);
    cp_async_wait<0>();
    x[0] = row[0];
    cp_async_wait_all();
}

void copy_not_committed()
{
    CHECK(run(forget_commit, 1, 1, 16)[0] == 1);
}

__global__ void copy_unaligned(float *x)
{
    KVC_DYN_SHARED(float, row);
    cp_async_16(smem_u32(row), x + 2);
    cp_async_wait_all();
}

void misaligned_copy()
{
    run(copy_unaligned, 1, 1, 16);
}

__global__ void copy_from_behind(float *x)
{
    KVC_DYN_SHARED(float, row);
    cp_async_16(smem_u32(row), x + 64);
    cp_async_wait_all();
}

void copy_from_behind_global()
{
    run(copy_from_behind, 1, 1, 16);
}

void copy_to_behind_shared()
{
    run(copy_and_leave, 1, 1, 8);
}

// Lane 0 refills the only stage while others still read it.
__global__ void refill_early(float *x)
{
    KVC_DYN_SHARED(float, stage);
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        if (threadIdx.x == 0)
            cp_async_16(smem_u32(stage), x + 4 * i);
        cp_async_wait_all();
        __syncthreads();
        sum += stage[threadIdx.x % 4];
    }
    x[threadIdx.x] = sum;
}

void stage_refilled_early()
{
    std::vector<float> values(64);
    for (size_t i = 0; i < values.size(); i++)
        values[i] = float(i);
    const device_array<float> x(values);
    CUDA(kvc_launch(refill_early, 1, 64, 16, nullptr, x.data));
    CHECK(x.values()[40] == 0 + 4 + 8 + 12);
}

// The host.
struct two_streams {
    cudaStream_t first, second;
    two_streams()
    {
        CUDA(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
        CUDA(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    }
    ~two_streams()
    {
        cudaStreamDestroy(first);
        cudaStreamDestroy(second);
    }
};

void read_without_synchronize()
{
    const device_array<int> x(std::vector<int>{7});
    int value = 0;
    CUDA(cudaMemcpyAsync(&value, x.data, 4, cudaMemcpyDeviceToHost));
    CHECK(value == 7);
}

void source_reused_early()
{
    const device_array<int> x(1);
    int value = 7;
    CUDA(cudaMemcpyAsync(x.data, &value, 4, cudaMemcpyHostToDevice));
    value = 8;
    CHECK(x.values()[0] == 7);
}

void streams_without_event()
{
    const two_streams streams;
    const device_array<int> x(std::vector<int>{7});
    int value = 0;
    CUDA(cudaMemsetAsync(x.data, 0, 4, streams.first));
    CUDA(cudaMemcpyAsync(&value, x.data, 4, cudaMemcpyDeviceToHost, streams.second));
    CUDA(cudaDeviceSynchronize());
    CHECK(value == 0);
}

void copy_beside_a_nonblocking_stream()
{
    const two_streams streams;
    const device_array<int> x(std::vector<int>{7});
    CUDA(cudaMemsetAsync(x.data, 0, 4, streams.first));
    CHECK(x.values()[0] == 0);
}

void host_reads_device_memory()
{
    const device_array<int> x(std::vector<int>{7});
    CHECK(*x.data == 7);
}

__global__ void add(float *x, const float *y)
{
    x[threadIdx.x] += y ? y[threadIdx.x] : 0;
}

void host_pointer_in_kernel()
{
    const device_array<float> x(std::vector<float>(4, 1.0f));
    const std::vector<float> y(4, 1.0f);
    CUDA(kvc_launch(add, 1, 4, 0, nullptr, x.data, y.data()));
    CHECK(x.values()[0] == 2);
}

void freed_pointer_in_kernel()
{
    const device_array<float> x(4);
    float *y;
    CUDA(cudaMalloc(&y, 16));
    CUDA(cudaFree(y));
    CUDA(kvc_launch(add, 1, 4, 0, nullptr, x.data, y));
    CUDA(cudaDeviceSynchronize());
}

__global__ void write_through(float **table)
{
    table[0][threadIdx.x] = 1;
}

void freed_pointer_in_table()
{
    float *y;
    CUDA(cudaMalloc(&y, 16));
    const device_array<float *> table(std::vector<float *>{y});
    CUDA(cudaFree(y));
    CUDA(kvc_launch(write_through, 1, 4, 0, nullptr, table.data));
    CUDA(cudaDeviceSynchronize());
}

void freed_pointer_in_memset()
{
    void *x;
    CUDA(cudaMalloc(&x, 16));
    CUDA(cudaFree(x));
    CUDA(cudaMemset(x, 0, 4));
    CUDA(cudaDeviceSynchronize());
}

void double_free()
{
    void *x;
    CUDA(cudaMalloc(&x, 16));
    CUDA(cudaFree(x));
    CUDA(cudaFree(x));
}

void wrong_kind()
{
    const device_array<int> x(1);
    int value = 0;
    CUDA(cudaMemcpyAsync(&value, x.data, 4, cudaMemcpyHostToDevice));
}

void copy_too_long()
{
    const device_array<int> x(1);
    int values[2] = {};
    CUDA(cudaMemcpyAsync(x.data, values, 8, cudaMemcpyHostToDevice));
}

void too_many_threads()
{
    run(write_one_place, 1025);
}

struct large {
    char bytes[4096];
};

__global__ void take(float *x, large values)
{
    x[0] = values.bytes[0];
}

void too_many_parameters()
{
    const device_array<float> x(1);
    CUDA(kvc_launch(take, 1, 1, 0, nullptr, x.data, large()));
}

void leaked_memory()
{
    void *x;
    CUDA(cudaMalloc(&x, 16));
}

void leaked_stream()
{
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
}

void destroyed_stream()
{
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaStreamDestroy(stream));
    CUDA(cudaStreamSynchronize(stream));
}

void destroyed_event()
{
    cudaEvent_t event;
    CUDA(cudaEventCreate(&event));
    CUDA(cudaEventDestroy(event));
    CUDA(cudaEventRecord(event));
}

void malloc_in_capture()
{
    const two_streams streams;
    void *x;
    CUDA(cudaStreamBeginCapture(streams.first, cudaStreamCaptureModeGlobal));
    CUDA(cudaMalloc(&x, 4));
}

void synchronize_in_capture()
{
    const two_streams streams;
    CUDA(cudaStreamBeginCapture(streams.first, cudaStreamCaptureModeGlobal));
    CUDA(cudaStreamSynchronize(streams.first));
}

void legacy_stream_in_capture()
{
    const device_array<int> x(1);
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CUDA(cudaMemsetAsync(x.data, 0, 4, nullptr));
}

void capture_over_two_streams()
{
    const two_streams streams;
    cudaEvent_t event;
    CUDA(cudaEventCreate(&event));
    CUDA(cudaStreamBeginCapture(streams.first, cudaStreamCaptureModeGlobal));
    CUDA(cudaEventRecord(event, streams.first));
    CUDA(cudaStreamWaitEvent(streams.second, event));
}

void replay_after_free()
{
    const two_streams streams;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    float *x;
    CUDA(cudaMalloc(&x, 4));
    CUDA(cudaStreamBeginCapture(streams.first, cudaStreamCaptureModeGlobal));
    CUDA(kvc_launch(write_one_place, 1, 1, 0, streams.first, x));
    CUDA(cudaStreamEndCapture(streams.first, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph));
    CUDA(cudaFree(x));
    CUDA(cudaGraphLaunch(exec, streams.first));
    CUDA(cudaStreamSynchronize(streams.first));
}

void product_out_of_range()
{
    const device_array<float> x(12);
    const float one = 1, zero = 0;
    cublasHandle_t blas;
    CHECK(cublasCreate(&blas) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSgemmStridedBatched(blas, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, x.data, 2, 4,
                                    x.data, 2, 4, &zero, x.data, 2, 4, 4) == CUBLAS_STATUS_SUCCESS);
    CUDA(cudaDeviceSynchronize());
}

constexpr char wrong[] = "wrong result";
constexpr char wrong_or_race[] = "wrong result|data race";
constexpr char beside_shared[] = "wrote beside its shared memory|use-after-poison";

} // namespace

const test_group fault_cases = {
    {"missing_syncwarp", missing_syncwarp, wrong_or_race, plain | tsan},
    {"missing_barrier", missing_barrier, wrong_or_race, plain | tsan},
    {"missing_second_barrier", missing_second_barrier, wrong_or_race, plain | tsan},
    {"race_between_barriers", race_between_barriers, "data race", tsan},
    {"race_between_blocks", race_between_blocks, "data race", tsan},
    {"missing_fence", missing_fence, "data race", tsan},

    {"exit_before_barrier", exit_before_barrier, "left the kernel", every_build},
    {"exit_before_shuffle", exit_before_shuffle, "left the kernel", every_build},
    {"divergent_barriers", divergent_barriers, "divergent barrier", every_build},
    {"divergent_shuffles", divergent_shuffles, "divergent warp", every_build},
    {"barrier_and_shuffle", barrier_and_shuffle, "deadlock", every_build},
    {"lane_outside_its_mask", lane_outside_its_mask, "not in its own mask", every_build},
    {"shuffle_from_outside_the_mask", shuffle_from_outside_the_mask, "which is not in the mask",
     every_build},
    {"parts_of_warps_at_named_barrier", parts_of_warps_at_named_barrier, "are at a named barrier",
     every_build},
    {"named_barrier_of_two_sizes", named_barrier_of_two_sizes, "named barrier 3 is for",
     every_build},
    {"endless_loop", endless_loop, "used more than 0.5 s", every_build},
    {"trapped", trapped, "__trap()", every_build},
    {"stack_overflow", stack_overflow, "needs a larger stack", every_build},

    {"write_behind_static_shared", write_behind_static_shared, beside_shared, every_build},
    {"write_behind_dynamic_shared", write_behind_dynamic_shared, beside_shared, every_build},
    {"read_behind_static_shared", read_behind_static_shared, "wrong result|use-after-poison",
     every_build},
    {"undefined_shared", undefined_shared, wrong, every_build},
    {"undefined_global", undefined_global, wrong, every_build},
    {"static_and_dynamic_too_large", static_and_dynamic_too_large, "more than a launch may use",
     every_build},
    {"dynamic_too_large", dynamic_too_large, "cudaErrorInvalidValue", every_build},
    {"write_behind_global", write_behind_global,
     "write behind a device allocation|use-after-poison", every_build},
    {"read_behind_global", read_behind_global, "wrong result|use-after-poison", every_build},
    {"atomic_behind_global", atomic_behind_global, "not within an allocation", every_build},
    {"misaligned_vector", misaligned_vector, "misaligned address", asan},
    {"misaligned_load", misaligned_load, "no multiple of 16", every_build},
    {"misaligned_ldmatrix", misaligned_ldmatrix, "no multiple of 16", every_build},
    {"ldmatrix_out_of_range", ldmatrix_out_of_range, "not within a tile", every_build},

    {"exit_with_copy_under_way", exit_with_copy_under_way, "without waiting for this cp.async",
     every_build},
    {"copy_not_waited_for", copy_not_waited_for, wrong, every_build},
    {"copy_not_committed", copy_not_committed, wrong, every_build},
    {"misaligned_copy", misaligned_copy, "no multiple of 16", every_build},
    {"copy_from_behind_global", copy_from_behind_global, "not within an allocation", every_build},
    {"copy_to_behind_shared", copy_to_behind_shared, "not within a tile", every_build},
    {"stage_refilled_early", stage_refilled_early, wrong_or_race, plain | tsan},

    {"read_without_synchronize", read_without_synchronize, wrong, every_build},
    {"source_reused_early", source_reused_early, wrong, every_build},
    {"streams_without_event", streams_without_event, wrong, plain},
    {"copy_beside_a_nonblocking_stream", copy_beside_a_nonblocking_stream, wrong, plain},
    {"host_reads_device_memory", host_reads_device_memory, "the host touches device memory",
     every_build},
    {"host_pointer_in_kernel", host_pointer_in_kernel, "is not in device memory", every_build},
    {"freed_pointer_in_kernel", freed_pointer_in_kernel, "is not in device memory", every_build},
    {"freed_pointer_in_table", freed_pointer_in_table, "that is freed|use-after-poison",
     every_build},
    {"freed_pointer_in_memset", freed_pointer_in_memset, "is not within a device allocation",
     every_build},
    {"double_free", double_free, "which is no device allocation", every_build},
    {"wrong_kind", wrong_kind, "the kind is host to device", every_build},
    {"copy_too_long", copy_too_long, "leaves its device allocation", every_build},
    {"too_many_threads", too_many_threads, "cudaErrorInvalidConfiguration", every_build},
    {"too_many_parameters", too_many_parameters, "the parameters of kernel take", every_build},
    {"leaked_memory", leaked_memory, "1 device allocations were not given back", every_build},
    {"leaked_stream", leaked_stream, "1 streams were not given back", every_build},
    {"destroyed_stream", destroyed_stream, "use of a stream that was destroyed", every_build},
    {"destroyed_event", destroyed_event, "use of an event that was destroyed", every_build},
    {"malloc_in_capture", malloc_in_capture, "cudaErrorStreamCaptureUnsupported", every_build},
    {"synchronize_in_capture", synchronize_in_capture, "cudaErrorStreamCaptureUnsupported",
     every_build},
    {"legacy_stream_in_capture", legacy_stream_in_capture, "cudaErrorStreamCaptureImplicit",
     every_build},
    {"capture_over_two_streams", capture_over_two_streams,
     "captures of more than one stream are not emulated", every_build},
    {"replay_after_free", replay_after_free, "is not in device memory", every_build},
    {"product_out_of_range", product_out_of_range, "matrix A leaves its device allocation",
     every_build},
};
