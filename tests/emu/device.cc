// device.cc - what the device says of itself, errors and how long they last, failures on demand.
#include <map>

#include "machine.h"

namespace emu
{
namespace
{

int n_devices = 1, capability_major = 8, capability_minor = 0;
size_t memory_size = size_t(4) << 30;
cudaError_t broken = cudaSuccess; // of a kernel that failed; every call returns it
int failures[EMU_N_FAILURES];     // calls until the one that fails; 0: none
std::map<const void *, size_t> dynamic_limits;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;

constexpr size_t kib = 1024, reserved_shared = kib, default_shared = 48 * kib;
constexpr int n_multiprocessors = 4, l2_size = 40 << 20;
constexpr int multiprocessor_threads = 2048, multiprocessor_blocks = 32, n_registers = 65536;
constexpr int driver_version = 13000, old_driver_version = 11040;

struct error_text {
    cudaError_t error;
    const char *name, *text;
};

#define EMU_ERROR(name, text)                                                                      \
    {                                                                                              \
        name, #name, text                                                                          \
    }
constexpr error_text error_texts[] = {
    EMU_ERROR(cudaSuccess, "no error"),
    EMU_ERROR(cudaErrorInvalidValue, "invalid argument"),
    EMU_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    EMU_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    EMU_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    EMU_ERROR(cudaErrorInsufficientDriver,
              "CUDA driver version is insufficient for CUDA runtime version"),
    EMU_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    EMU_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    EMU_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    EMU_ERROR(cudaErrorNoKernelImageForDevice,
              "no kernel image is available for execution on the device"),
    EMU_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    EMU_ERROR(cudaErrorNotReady, "device not ready"),
    EMU_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    EMU_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    EMU_ERROR(cudaErrorStreamCaptureUnsupported,
              "operation not permitted when stream is capturing"),
    EMU_ERROR(cudaErrorStreamCaptureInvalidated,
              "operation failed due to a previous error during capture"),
    EMU_ERROR(cudaErrorStreamCaptureUnmatched,
              "capture was not ended in the same stream as it began"),
    EMU_ERROR(cudaErrorStreamCaptureIsolation,
              "dependency created on uncaptured work in another stream"),
    EMU_ERROR(cudaErrorStreamCaptureImplicit,
              "operation would make the legacy stream depend on a capturing blocking stream"),
    EMU_ERROR(cudaErrorCapturedEvent,
              "operation not permitted on an event last recorded in a capturing stream"),
    EMU_ERROR(cudaErrorUnknown, "unknown error"),
};

const error_text *find_text(cudaError_t error)
{
    for (const error_text &t : error_texts)
        if (t.error == error)
            return &t;
    return nullptr;
}

// Shared memory of a multiprocessor, by capability.
size_t shared_per_multiprocessor()
{
    switch (10 * capability_major + capability_minor) {
    case 75: return 65 * kib;
    case 86:
    case 89:
    case 120: return 100 * kib;
    case 90:
    case 100: return 228 * kib;
    default: return 164 * kib;
    }
}

bool is_device(int device)
{
    return device >= 0 && device < n_devices;
}

int value_of_attribute(cudaDeviceAttr attribute)
{
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return max_block_threads;
    case cudaDevAttrMaxSharedMemoryPerBlock: return int(default_shared);
    case cudaDevAttrWarpSize: return warp_size;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return n_registers;
    case cudaDevAttrMultiProcessorCount: return n_multiprocessors;
    case cudaDevAttrL2CacheSize: return l2_size;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return multiprocessor_threads;
    case cudaDevAttrComputeCapabilityMajor: return capability_major;
    case cudaDevAttrComputeCapabilityMinor: return capability_minor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return int(shared_per_multiprocessor());
    case cudaDevAttrManagedMemory: return 0;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return int(shared_optin());
    case cudaDevAttrMaxBlocksPerMultiprocessor: return multiprocessor_blocks;
    }
    return -1;
}

} // namespace

cudaError_t report(cudaError_t error)
{
    if (error)
        last_error = error;
    return error;
}

cudaError_t device_error()
{
    return n_devices == 0  ? cudaErrorNoDevice
           : n_devices < 0 ? cudaErrorInsufficientDriver
                           : broken;
}

void break_device(cudaError_t error)
{
    broken = error;
}

bool fails_now(enum emu_failure kind)
{
    return failures[kind] > 0 && --failures[kind] == 0;
}

bool has_kernel_image()
{
    return capability_major >= 8;
}

size_t shared_optin()
{
    return shared_per_multiprocessor() - reserved_shared;
}

size_t shared_limit(const void *kernel)
{
    return dynamic_limits.count(kernel) ? shared_optin() : default_shared;
}

size_t dynamic_limit(const void *kernel)
{
    const auto found = dynamic_limits.find(kernel);
    return found == dynamic_limits.end() ? default_shared : std::max(found->second, default_shared);
}

size_t total_memory()
{
    return memory_size;
}

} // namespace emu

using namespace emu;

void emu_set_devices(int n)
{
    const runtime_lock lock;
    if (n > 8)
        fail(nowhere, "emu_set_devices: %d are too many", n);
    n_devices = n;
    current_device = 0;
}

void emu_set_capability(int major, int minor)
{
    const runtime_lock lock;
    capability_major = major;
    capability_minor = minor;
}

void emu_set_memory(size_t total)
{
    const runtime_lock lock;
    memory_size = total;
}

void emu_fail(enum emu_failure kind, int n)
{
    const runtime_lock lock;
    failures[kind] = n;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    const runtime_lock lock;
    *count = std::max(n_devices, 0);
    return report(device_error());
}

cudaError_t cudaGetDevice(int *device)
{
    const runtime_lock lock;
    *device = current_device;
    return report(device_error());
}

cudaError_t cudaSetDevice(int device)
{
    return enter([&] {
        if (!is_device(device))
            return cudaErrorInvalidDevice;
        current_device = device;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceReset(void)
{
    const runtime_lock lock;
    if (n_devices <= 0)
        return report(device_error());
    forget_streams();
    free_everything();
    dynamic_limits.clear();
    broken = last_error = cudaSuccess;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    return enter([&] {
        if (!is_device(device))
            return cudaErrorInvalidDevice;
        *value = value_of_attribute(attribute);
        return *value < 0 ? cudaErrorInvalidValue : cudaSuccess;
    });
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    return enter([&] {
        if (!is_device(device))
            return cudaErrorInvalidDevice;
        *prop = {};
        snprintf(prop->name, sizeof(prop->name), "emulated device");
        prop->totalGlobalMem = memory_size;
        prop->sharedMemPerBlock = default_shared;
        prop->sharedMemPerBlockOptin = shared_optin();
        prop->sharedMemPerMultiprocessor = shared_per_multiprocessor();
        prop->warpSize = warp_size;
        prop->maxThreadsPerBlock = max_block_threads;
        prop->major = capability_major;
        prop->minor = capability_minor;
        prop->multiProcessorCount = n_multiprocessors;
        prop->l2CacheSize = l2_size;
        return cudaSuccess;
    });
}

cudaError_t cudaDriverGetVersion(int *version)
{
    const runtime_lock lock;
    *version = n_devices > 0 ? driver_version : n_devices < 0 ? old_driver_version : 0;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    const runtime_lock lock;
    const cudaError_t error = broken ? broken : last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    const runtime_lock lock;
    return broken ? broken : last_error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    const error_text *t = find_text(error);
    return t ? t->name : "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    const error_text *t = find_text(error);
    return t ? t->text : "unrecognized error code";
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    return enter([&] {
        if (!has_kernel_image())
            return cudaErrorNoKernelImageForDevice;
        if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
            return cudaSuccess;
        if (value < 0 || size_t(value) > shared_optin())
            return cudaErrorInvalidValue;
        dynamic_limits[kernel] = size_t(value);
        return cudaSuccess;
    });
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel)
{
    return enter([&] {
        if (!has_kernel_image())
            return cudaErrorNoKernelImageForDevice;
        *attributes = {};
        attributes->maxThreadsPerBlock = max_block_threads;
        attributes->ptxVersion = 80;
        attributes->binaryVersion = 10 * capability_major + capability_minor;
        attributes->maxDynamicSharedSizeBytes = int(dynamic_limit(kernel));
        return cudaSuccess;
    });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n_blocks, const void *kernel,
                                                          int n_threads, size_t dynamic_shared)
{
    return enter([&] {
        if (n_threads <= 0)
            return cudaErrorInvalidValue;
        const size_t by_shared = shared_per_multiprocessor() / (dynamic_shared + reserved_shared);
        const int by_threads = multiprocessor_threads / n_threads;
        *n_blocks = std::min({multiprocessor_blocks, by_threads, int(by_shared)});
        if (n_threads > max_block_threads || dynamic_shared > dynamic_limit(kernel))
            *n_blocks = 0;
        return cudaSuccess;
    });
}
