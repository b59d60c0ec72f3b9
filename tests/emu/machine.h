// machine.h - what the emulator's files know of each other. One host thread at a time is inside,
// see runtime_lock.
#ifndef EMU_MACHINE_H
#define EMU_MACHINE_H

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "emu.h"
#include "sanitizer.h"

namespace emu
{

// report.cc: seeds, undefined memory, messages.
uint64_t seed();
uint32_t random_bits();
uint32_t random_below(uint32_t n);
void fill_undefined(void *ptr, size_t size);
void fill_guard(uint8_t *ptr, size_t size); // around what a kernel may touch
bool is_guard_intact(const uint8_t *ptr, size_t size);
constexpr site nowhere{nullptr, 0};
extern struct emu_stats stats;

// fiber.cc: threads of a kernel, each with its stack.
struct block;

struct async_copy {
    uint32_t dst;
    const void *src;
    int size, src_size, group;
    site at;
};

struct fiber {
    void *stack_pointer;
    uint8_t *stack;
    size_t stack_size;
    void *asan_stack, *tsan_fiber;
    block *home; // null for the host
    uint3 index;
    int warp, lane;
    std::vector<async_copy> copies; // that were not waited for
    int copy_group;
    int barrier_result;
};

extern fiber *current; // the host's outside of kernels
bool in_kernel();
fiber *take_fiber();
void return_fiber(fiber *f);
void enter_host();
void switch_to_host();
void switch_to(fiber *to);
bool is_stack_guard(const void *ptr);

// grid.cc: blocks and which thread runs next.
constexpr uint32_t full_mask = 0xffffffff;
constexpr int warp_size = 32, max_block_threads = 1024, n_barriers = 16;

// Lanes of one warp that are on the way into one collective.
struct meeting {
    uint32_t mask = 0, arrived = 0; // mask is 0 if there is none
    collective what = collective::syncwarp;
    int variant = 0;
    site at = nowhere;
    std::array<void *, warp_size> arguments = {};
};

struct warp {
    uint32_t exists = 0, exited = 0, ready = 0;
    uint32_t priority = 0;
    std::array<uint8_t, warp_size> order = {}; // of the lanes, first runs first
    std::array<meeting, 8> meetings;
    // Two for __syncwarp in turn: a lane that leaves late must not see the next round.
    char tags[2] = {};
    int round = 0;
};

struct barrier {
    int n_expected = 0, n_arrived = 0, n_true = 0;
    predicate kind = predicate::none;
    site at = nowhere;
    std::vector<fiber *> waiting;
    std::array<uint32_t, max_block_threads / warp_size> lanes = {};
    char tags[2] = {}; // as those of a warp
    int round = 0;
};

// A piece of shared memory at arena + offset.
struct tile {
    const void *key;
    size_t offset, size;
};

struct block {
    uint3 index;
    std::vector<fiber *> threads;
    std::vector<warp> warps;
    uint32_t ready_warps = 0;
    int n_live = 0;
    std::array<barrier, n_barriers> barriers;
    uint8_t *arena = nullptr;
    std::vector<tile> tiles; // the first is the dynamic one
    size_t arena_used = 0;
};

struct kernel_launch {
    std::string name;
    const void *kernel;
    launch_shape shape;
    std::vector<const volatile void *> pointers;
    std::function<void()> body;
};

void run_grid(const kernel_launch &launch);
const kernel_launch *running_kernel();
void make_ready(fiber *f);
void suspend(); // until somebody makes the thread ready
void run_thread();
void print_waiting(const block &b);

// warp.cc, barrier.cc, fragments.cc
const char *name_of(collective what);
void compute_fragments(const meeting &m);

// shared.cc
void open_arena(block *b, size_t dynamic_shared);
void close_arena(block *b);
uint8_t *check_shared(uint32_t address, size_t size, size_t align, const char *what, site at);

// memory.cc: the heap of the device, which cannot be touched except between open_device() and
// close_device(), or while the device_range of an address lives.
void open_device();
void close_device();
struct device_range {
    uint8_t *begin;
    size_t size;

    device_range(const void *ptr, size_t n);
    ~device_range();
    device_range(const device_range &) = delete;
    device_range &operator=(const device_range &) = delete;
};
bool on_device(const volatile void *ptr);
bool is_allocated(const volatile void *ptr, size_t size);
bool is_pinned(const volatile void *ptr);
void check_global(const void *ptr, size_t size, size_t align, const char *what, site at);
void check_red_zones(); // behind allocations
void check_freed();     // what was allocated
void free_everything();
size_t n_allocations();
size_t n_pinned();

// stream.cc
struct runtime_lock {
    runtime_lock();
    ~runtime_lock();
    runtime_lock(const runtime_lock &) = delete;
    runtime_lock &operator=(const runtime_lock &) = delete;
};
cudaError_t push(cudaStream_t stream, std::function<void()> work);
void run_everything(const char *who);         // that streams hold
cudaError_t wait_for_device(const char *who); // the same as a call of the program, which counts
cudaError_t refuse_capture();                 // of what is not allowed during a capture
void forget_streams();
size_t n_streams();
size_t n_events();
size_t n_graphs();

// device.cc
cudaError_t report(cudaError_t error); // and remember it for cudaGetLastError
cudaError_t device_error();            // of every call: no device, old driver, a kernel that failed
void break_device(cudaError_t error);

// What every call of the runtime does: nobody else is inside, the device is there, the error is
// remembered.
template <class F> cudaError_t enter(F body)
{
    const runtime_lock lock;
    const cudaError_t error = device_error();
    return report(error ? error : body());
}

bool fails_now(enum emu_failure kind);
bool has_kernel_image();
size_t shared_optin();
size_t shared_limit(const void *kernel);  // what its launch may use
size_t dynamic_limit(const void *kernel); // of which dynamic
size_t total_memory();

// cublas.cc
size_t n_handles();

} // namespace emu

#endif
