/* emu.h - what a test may ask of the emulated device, for C and C++. A fault that the emulator sees
 * ends the process: the message goes to stderr, the exit code is 86 (87 for a kernel that used more
 * than KVC_EMU_TIMEOUT seconds of CPU time, 120 by default). */
#ifndef EMU_EMU_H
#define EMU_EMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Counted since the start of the process or emu_reset_stats(). */
struct emu_stats {
    uint64_t switches;          /* between threads of kernels */
    uint64_t launches, blocks;  /* that ran */
    uint64_t mma;               /* tensor-core instructions, one a warp */
    uint64_t ldmatrix;          /* 8 x 8 matrices */
    uint64_t ldmatrix_conflict; /* extra passes through the banks that they took */
    uint64_t cp_async;          /* one a thread */
    uint64_t syncs;             /* calls that made the host wait, cudaFree too */
    uint64_t mallocs;           /* of device memory */
    uint64_t copies_to_device, copies_to_host, copies_on_device; /* that ran */
    uint64_t gemms, gemms_without_workspace; /* calls; without: cublasSetWorkspace is missing */
};

enum emu_failure {
    EMU_FAIL_LAUNCH_IMAGE,  /* a launch returns cudaErrorNoKernelImageForDevice */
    EMU_FAIL_LAUNCH_CONFIG, /* a launch returns cudaErrorInvalidConfiguration */
    EMU_FAIL_LAUNCH_ASYNC,  /* a launch succeeds, its kernel fails with cudaErrorLaunchFailure: from
                             * the next wait on every call returns it until cudaDeviceReset() */
    EMU_FAIL_MALLOC,        /* cudaMalloc, cudaMallocHost or cudaHostAlloc: out of memory */
    EMU_FAIL_CUBLAS,        /* a cuBLAS call: CUBLAS_STATUS_EXECUTION_FAILED, or ALLOC_FAILED from
                             * cublasCreate */
    EMU_N_FAILURES
};

#define EMU_OLD_DRIVER (-1)

/* Order of threads, blocks and streams, and the pattern of undefined memory; waits for the device.
 * seed % 3 selects how threads are scheduled: 0 at random, 1 by fixed priorities (the largest skew
 * between warps and lanes), 2 by changing ones. A process starts with KVC_EMU_SEED, or 1. */
void emu_set_seed(uint64_t seed);

void emu_get_stats(struct emu_stats *out);
void emu_reset_stats(void);

/* Ends the process if device or pinned memory, a stream, an event, a graph or a cuBLAS handle was
 * not given back. */
void emu_check_leaks(void);

/* 0 for a machine without a GPU, EMU_OLD_DRIVER for one whose driver is too old, at most 8. All of
 * them are the same memory and the same streams. */
void emu_set_devices(int n);

/* 8.0 at first. Shared memory follows; below 8.0 no kernel has an image. */
void emu_set_capability(int major, int minor);

/* Device memory, 4 GiB at first. */
void emu_set_memory(size_t total);

/* The n-th such call from now fails, once; 1 is the next, 0 none. */
void emu_fail(enum emu_failure kind, int n);

#ifdef __cplusplus
}
#endif

#endif
