// selftest_runtime.cc - the runtime without mistakes: what it says of the device, errors and how
// long they last, failures on demand.
#include "selftest.h"

#include <cublas_v2.h>

#include <string.h>

#include <algorithm>

extern "C" int selftest_in_c(void);

namespace
{

__global__ void fill(int *x, int value)
{
    x[threadIdx.x] = value;
}

__global__ void count_up(int *x)
{
    KVC_DYN_SHARED(int, shared);
    x += blockIdx.x * blockDim.x;
    shared[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = shared[threadIdx.x ^ 1] + 1;
}

cudaError_t launch_fill(const device_array<int> &x, int value)
{
    return kvc_launch(fill, 1, unsigned(x.n), 0, nullptr, x.data, value);
}

void c_programs_work()
{
    CHECK(selftest_in_c());
}

void device_describes_itself()
{
    struct cudaDeviceProp prop;
    struct cudaFuncAttributes attributes;
    int n = -1, value = -1, blocks = 0;

    CUDA(cudaGetDeviceCount(&n));
    CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
    CHECK(n == 1 && value == 8);
    CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(value == 163 * 1024);
    emu_set_capability(9, 0);
    CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(value == 227 * 1024);
    CUDA(cudaGetDeviceProperties(&prop, 0));
    CHECK(prop.major == 9 && prop.minor == 0 && prop.warpSize == 32 && prop.l2CacheSize > 0);
    CUDA(cudaDriverGetVersion(&value));
    CHECK(value == 13000);
    CUDA(cudaFuncGetAttributes(&attributes, count_up));
    CHECK(attributes.numRegs == 0 && attributes.binaryVersion == 90);
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, count_up, 256, 40 * 1024));
    CHECK(blocks == 5);
    CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
    emu_set_devices(2);
    CUDA(cudaSetDevice(1));
    CUDA(cudaGetDevice(&value));
    CHECK(value == 1);
    CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice);
}

void machines_without_a_gpu_say_so()
{
    cublasHandle_t blas;
    cudaStream_t stream;
    void *ptr;
    int n = -1;

    emu_set_devices(0);
    CHECK(cudaGetDeviceCount(&n) == cudaErrorNoDevice && n == 0);
    CHECK(cudaMalloc(&ptr, 4) == cudaErrorNoDevice && cudaSetDevice(0) == cudaErrorNoDevice);
    CHECK(cudaStreamCreate(&stream) == cudaErrorNoDevice);
    CHECK(cublasCreate(&blas) == CUBLAS_STATUS_NOT_INITIALIZED);
    emu_set_devices(EMU_OLD_DRIVER);
    CHECK(cudaGetDeviceCount(&n) == cudaErrorInsufficientDriver && n == 0);
    CHECK(cudaGetLastError() == cudaErrorInsufficientDriver && cudaGetLastError() == cudaSuccess);
    emu_set_devices(1);
    CUDA(cudaGetDeviceCount(&n));
    CHECK(n == 1);
}

void errors_stay_until_asked_for()
{
    const device_array<int> x(4);

    CHECK(kvc_launch(fill, 1, 2000, 0, nullptr, x.data, 1) == cudaErrorInvalidConfiguration);
    CUDA(launch_fill(x, 3)); // a good call leaves it
    CHECK(cudaPeekAtLastError() == cudaErrorInvalidConfiguration);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(strcmp(cudaGetErrorName(cudaErrorLaunchFailure), "cudaErrorLaunchFailure") == 0);
    CHECK(strcmp(cudaGetErrorString(cudaErrorInvalidValue), "invalid argument") == 0);
}

void failed_kernels_break_the_device()
{
    int *x, value = 1;
    cudaStream_t stream;

    CUDA(cudaMalloc(&x, 4));
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaMemsetAsync(x, 0, 4, stream));
    emu_fail(EMU_FAIL_LAUNCH_ASYNC, 2);
    CUDA(kvc_launch(fill, 1, 1, 0, stream, x, 5));
    CUDA(kvc_launch(fill, 1, 1, 0, stream, x, 6));
    CUDA(cudaGetLastError());
    CHECK(cudaStreamSynchronize(stream) == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
    CHECK(kvc_launch(fill, 1, 1, 0, stream, x, 5) == cudaErrorLaunchFailure);
    CHECK(cudaFree(x) == cudaErrorLaunchFailure);
    CHECK(cudaMemcpy(&value, x, 4, cudaMemcpyDeviceToHost) == cudaErrorLaunchFailure);
    CUDA(cudaDeviceReset());
    CUDA(cudaGetLastError());
    CUDA(cudaMalloc(&x, 4));
    CUDA(kvc_launch(fill, 1, 1, 0, nullptr, x, 7));
    CUDA(cudaMemcpy(&value, x, 4, cudaMemcpyDeviceToHost));
    CHECK(value == 7);
    CUDA(cudaFree(x));
}

void calls_fail_on_demand()
{
    const device_array<int> x(4);
    cublasHandle_t blas;
    void *ptr;

    emu_fail(EMU_FAIL_LAUNCH_IMAGE, 1);
    CHECK(launch_fill(x, 1) == cudaErrorNoKernelImageForDevice);
    emu_fail(EMU_FAIL_LAUNCH_CONFIG, 2);
    CUDA(launch_fill(x, 2));
    CHECK(launch_fill(x, 3) == cudaErrorInvalidConfiguration);
    CUDA(launch_fill(x, 4));
    CHECK(x.values()[3] == 4);
    emu_set_capability(7, 5);
    CHECK(launch_fill(x, 5) == cudaErrorNoKernelImageForDevice);
    emu_set_capability(8, 0);
    emu_fail(EMU_FAIL_MALLOC, 2);
    CUDA(cudaMalloc(&ptr, 1));
    CUDA(cudaFree(ptr));
    CHECK(cudaMalloc(&ptr, 1) == cudaErrorMemoryAllocation && !ptr);
    emu_fail(EMU_FAIL_MALLOC, 1);
    CHECK(cudaMallocHost(&ptr, 1) == cudaErrorMemoryAllocation && !ptr);
    emu_fail(EMU_FAIL_MALLOC, 1);
    emu_fail(EMU_FAIL_MALLOC, 0);
    CUDA(cudaMalloc(&ptr, 1));
    CUDA(cudaFree(ptr));
    emu_fail(EMU_FAIL_CUBLAS, 1);
    CHECK(cublasCreate(&blas) == CUBLAS_STATUS_ALLOC_FAILED);
    CHECK(cublasCreate(&blas) == CUBLAS_STATUS_SUCCESS);
    emu_fail(EMU_FAIL_CUBLAS, 1);
    CHECK(cublasSetStream(blas, nullptr) == CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK(cublasSetWorkspace(blas, x.data + 1, 4) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(cublasDestroy(blas) == CUBLAS_STATUS_SUCCESS);
}

void memory_has_an_end()
{
    size_t free_bytes, total;
    void *first, *second;

    emu_set_memory(10 << 20);
    CUDA(cudaMalloc(&first, 6 << 20));
    CHECK(cudaMalloc(&second, 6 << 20) == cudaErrorMemoryAllocation);
    CUDA(cudaMemGetInfo(&free_bytes, &total));
    CHECK(total == 10 << 20 && free_bytes == 4 << 20);
    CUDA(cudaFree(first));
    CUDA(cudaMalloc(&second, 10 << 20));
    CUDA(cudaFree(second));
    uintptr_t lowest = UINTPTR_MAX, highest = 0;
    for (int i = 0; i < 100; i++) { // addresses come again after a while
        CUDA(cudaMalloc(&first, size_t(1 + i % 3) << 20));
        CUDA(cudaFree(first));
        lowest = std::min(lowest, reinterpret_cast<uintptr_t>(first));
        highest = std::max(highest, reinterpret_cast<uintptr_t>(first));
    }
    CHECK(highest > lowest && highest - lowest < 64 << 20);
}

void pointers_have_attributes()
{
    struct cudaPointerAttributes a;
    const device_array<int> x(4);
    int local, *pinned;

    CUDA(cudaMallocHost(&pinned, 4));
    CUDA(cudaPointerGetAttributes(&a, x.data + 1));
    CHECK(a.type == cudaMemoryTypeDevice && a.devicePointer == x.data + 1 && a.device == 0);
    CUDA(cudaPointerGetAttributes(&a, pinned));
    CHECK(a.type == cudaMemoryTypeHost && a.hostPointer == pinned);
    CUDA(cudaPointerGetAttributes(&a, &local));
    CHECK(a.type == cudaMemoryTypeUnregistered && !a.devicePointer);
    CUDA(cudaFreeHost(pinned));
}

void large_shared_memory_needs_leave()
{
    const int size = 100 * 1024;
    const device_array<int> x(std::vector<int>{1, 2, 3, 4});

    CHECK(kvc_launch(count_up, 1, 4, size_t(size), nullptr, x.data) == cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute(count_up, cudaFuncAttributeMaxDynamicSharedMemorySize, 164 * 1024) ==
          cudaErrorInvalidValue);
    CUDA(cudaFuncSetAttribute(count_up, cudaFuncAttributeMaxDynamicSharedMemorySize, size));
    CHECK(kvc_launch(count_up, 1, 4, size_t(size) + 1, nullptr, x.data) == cudaErrorInvalidValue);
    CUDA(kvc_launch(count_up, 1, 4, size_t(size), nullptr, x.data));
    CHECK(x.values()[0] == 3 && x.values()[3] == 4);
}

void captures_end_at_what_waits()
{
    enum cudaStreamCaptureStatus status;
    cudaStream_t stream;
    cudaGraph_t graph;
    void *ptr;

    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureUnmatched);
    for (int i = 0; i < 3; i++) {
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        CHECK((i == 0   ? cudaMalloc(&ptr, 4)
               : i == 1 ? cudaStreamSynchronize(stream)
                        : cudaDeviceSynchronize()) == cudaErrorStreamCaptureUnsupported);
        CUDA(cudaStreamIsCapturing(stream, &status));
        CHECK(status == cudaStreamCaptureStatusInvalidated);
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated && !graph);
    }
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CUDA(cudaMalloc(&ptr, 4));
    CUDA(cudaMemsetAsync(ptr, 0, 4, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaFree(ptr));
    CUDA(cudaStreamDestroy(stream));
}

void seeds_decide_everything()
{
    struct emu_stats stats[3];
    const device_array<int> x(std::vector<int>(5 * 256));
    uint32_t undefined[3];

    for (int i = 0; i < 3; i++) {
        emu_set_seed(i == 1 ? 40 : 41);
        emu_reset_stats();
        CUDA(kvc_launch(fill, 1, 256, 0, nullptr, x.data, 1));
        CUDA(kvc_launch(count_up, 5, 256, 1024, nullptr, x.data));
        CUDA(cudaDeviceSynchronize());
        emu_get_stats(&stats[i]);
        const device_array<uint32_t> fresh(1);
        undefined[i] = fresh.values()[0];
    }
    CHECK(memcmp(&stats[0], &stats[2], sizeof(stats[0])) == 0);
    CHECK(stats[0].switches != stats[1].switches && stats[0].blocks == 6);
    CHECK(undefined[0] == undefined[2] && undefined[0] != undefined[1]);
}

} // namespace

const test_group runtime_cases = {
    {"c_programs_work", c_programs_work, nullptr, every_build},
    {"device_describes_itself", device_describes_itself, nullptr, every_build},
    {"machines_without_a_gpu_say_so", machines_without_a_gpu_say_so, nullptr, every_build},
    {"errors_stay_until_asked_for", errors_stay_until_asked_for, nullptr, every_build},
    {"failed_kernels_break_the_device", failed_kernels_break_the_device, nullptr, every_build},
    {"calls_fail_on_demand", calls_fail_on_demand, nullptr, every_build},
    {"memory_has_an_end", memory_has_an_end, nullptr, every_build},
    {"pointers_have_attributes", pointers_have_attributes, nullptr, every_build},
    {"large_shared_memory_needs_leave", large_shared_memory_needs_leave, nullptr, every_build},
    {"captures_end_at_what_waits", captures_end_at_what_waits, nullptr, every_build},
    {"seeds_decide_everything", seeds_decide_everything, nullptr, every_build},
};
