// selftest.h - what the emulator's own tests share. A case is a program of its own: it checks with
// CHECK and CUDA, or makes a mistake that has to be seen.
#ifndef EMU_SELFTEST_H
#define EMU_SELFTEST_H

#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "emu.h"
#include <device.cuh>

enum build { plain = 1, asan = 2, tsan = 4, every_build = plain | asan | tsan };

struct test_case {
    const char *name;
    void (*run)();
    const char *expected; // texts of which stderr must hold one, parted by |; null: has to pass
    int builds;           // that must see the mistake, with one of the seeds
};

using test_group = std::vector<test_case>;
extern const test_group fragment_cases, half_cases, program_cases, runtime_cases, fault_cases;

inline void check(bool ok, const char *text, const char *file, int line)
{
    if (ok)
        return;
    fprintf(stderr, "%s:%d: wrong result: %s\n", file, line, text);
    exit(1);
}

inline void check_cuda(cudaError_t error, const char *text, const char *file, int line)
{
    if (!error)
        return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, cudaGetErrorName(error), text);
    exit(1);
}

#define CHECK(condition) check(condition, #condition, __FILE__, __LINE__)
#define CUDA(call)       check_cuda(call, #call, __FILE__, __LINE__)

// An array on the device.
template <class T> struct device_array {
    T *data = nullptr;
    size_t n;

    explicit device_array(size_t count) : n(count)
    {
        CUDA(cudaMalloc(&data, n * sizeof(T)));
    }
    explicit device_array(const std::vector<T> &values) : device_array(values.size())
    {
        CUDA(cudaMemcpy(data, values.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~device_array()
    {
        cudaFree(data);
    }
    device_array(const device_array &) = delete;
    device_array &operator=(const device_array &) = delete;

    std::vector<T> values() const
    {
        std::vector<T> out(n);
        CUDA(cudaMemcpy(out.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost));
        return out;
    }
};

// Numbers that follow from where they start.
struct generator {
    uint64_t state;

    uint32_t bits()
    {
        state = state * 6364136223846793005 + 1442695040888963407;
        return uint32_t(state >> 32);
    }
    int between(int first, int last)
    {
        return first + int(bits() % uint32_t(last - first + 1));
    }
};

#endif
