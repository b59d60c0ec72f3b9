// memory.cc - the memory of the device and pinned memory of the host. The device's heap is one
// range of addresses that cannot be touched while host code runs.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <map>

#include "machine.h"

namespace emu
{
namespace
{

constexpr size_t heap_size = size_t(16) << 30, granularity = 256, page = 4096;
constexpr size_t quarantine_size = 16 << 20;

struct range {
    uint8_t *begin;
    size_t size; // as asked for
    int device;
};

uint8_t *heap, *heap_end; // from heap_end on nothing was ever handed out
bool is_open;
size_t n_allocated_bytes;
std::map<const uint8_t *, range> allocated;
std::deque<range> quarantine; // freed, oldest first: guarded, not given out again
size_t n_quarantine_bytes;
std::map<uint8_t *, size_t> vacant; // ranges to give out again, with their room
std::map<const uint8_t *, range> pinned;

struct sigaction next_action;

// Each allocation is followed by a red zone of 256 to 511 bytes.
size_t room_of(size_t size)
{
    return (size + 2 * granularity - 1) / granularity * granularity;
}

void protect(uint8_t *begin, size_t size, int access)
{
    if (size > 0 && mprotect(begin, size, access))
        fail(nowhere, "mprotect of device memory");
}

// What was handed out, in whole pages.
size_t heap_used()
{
    return (size_t(heap_end - heap) + page - 1) / page * page;
}

// A thread that runs off its stack, or an access to device memory out of turn; everything else is
// somebody else's.
void on_fault(int, siginfo_t *info, void *)
{
    const void *ptr = info->si_addr;

    if (on_device(ptr) && in_kernel())
        fail(nowhere, "the thread touches device address %p, which is not allocated", ptr);
    if (on_device(ptr))
        fail(nowhere, "the host touches device memory, address %p", ptr);
    if (is_stack_guard(ptr))
        fail(nowhere, "the thread needs a larger stack");
    sigaction(SIGSEGV, &next_action, nullptr);
}

void catch_faults()
{
    static uint8_t memory[64 << 10];
    stack_t stack = {}, before = {};
    struct sigaction action = {};

    sigaltstack(nullptr, &before);
    if (before.ss_flags & SS_DISABLE) {
        stack.ss_sp = memory;
        stack.ss_size = sizeof(memory);
        sigaltstack(&stack, nullptr);
    }
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &next_action);
}

void make_heap()
{
    void *memory =
        mmap(nullptr, heap_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        fail(nowhere, "no addresses for the device's heap");
    heap = heap_end = static_cast<uint8_t *>(memory);
    catch_faults();
}

void add_vacant(uint8_t *begin, size_t room)
{
    auto next = vacant.lower_bound(begin);

    if (next != vacant.end() && begin + room == next->first) {
        room += next->second;
        next = vacant.erase(next);
    }
    if (next != vacant.begin() && std::prev(next)->first + std::prev(next)->second == begin)
        std::prev(next)->second += room;
    else
        vacant[begin] = room;
}

uint8_t *take_vacant(size_t room)
{
    for (auto i = vacant.begin(); i != vacant.end(); ++i) {
        uint8_t *begin = i->first;
        const size_t left = i->second - room;
        if (i->second < room)
            continue;
        vacant.erase(i);
        if (left > 0)
            vacant[begin + room] = left;
        return begin;
    }
    return nullptr;
}

uint8_t *take_new(size_t room)
{
    uint8_t *begin = heap_end;

    if (size_t(heap + heap_size - heap_end) < room)
        return nullptr;
    heap_end += room;
    return begin;
}

void *allocate(size_t size)
{
    const tsan_silence silence;
    const size_t room = room_of(size);
    int device = 0;

    if (!heap)
        make_heap();
    if (size > total_memory() || n_allocated_bytes > total_memory() - size)
        return nullptr;
    uint8_t *begin = take_vacant(room);
    if (!begin)
        begin = take_new(room);
    if (!begin)
        return nullptr;
    const device_range access(begin, room);
    asan_unpoison(begin, room);
    fill_undefined(begin, size);
    fill_guard(begin + size, room - size);
    asan_poison(begin + size, room - size);
    cudaGetDevice(&device);
    allocated[begin] = {begin, size, device};
    n_allocated_bytes += size;
    return begin;
}

// AddressSanitizer sees the access itself.
void check_red_zone(const range &r)
{
    if (!EMU_ASAN && !is_guard_intact(r.begin + r.size, room_of(r.size) - r.size))
        fail(nowhere, "there was a write behind a device allocation of %zu bytes", r.size);
}

void check_no_write(const range &freed)
{
    if (!EMU_ASAN && !is_guard_intact(freed.begin, freed.size))
        fail(nowhere, "there was a write into a device allocation of %zu bytes that is freed",
             freed.size);
}

void release(const range &r)
{
    const tsan_silence silence;
    const device_range access(r.begin, room_of(r.size));

    check_red_zone(r);
    asan_unpoison(r.begin, room_of(r.size));
    fill_guard(r.begin, r.size);
    asan_poison(r.begin, room_of(r.size));
    n_allocated_bytes -= r.size;
    n_quarantine_bytes += r.size;
    quarantine.push_back(r);
    allocated.erase(r.begin);
    while (n_quarantine_bytes > quarantine_size) {
        const range oldest = quarantine.front();
        quarantine.pop_front();
        n_quarantine_bytes -= oldest.size;
        const device_range last_access(oldest.begin, oldest.size);
        check_no_write(oldest);
        add_vacant(oldest.begin, room_of(oldest.size));
    }
}

const range *find(const std::map<const uint8_t *, range> &ranges, const volatile void *ptr)
{
    const uint8_t *byte = const_cast<const uint8_t *>(static_cast<const volatile uint8_t *>(ptr));
    auto next = ranges.upper_bound(byte);

    if (next == ranges.begin())
        return nullptr;
    const range &r = std::prev(next)->second;
    return byte <= r.begin + r.size ? &r : nullptr;
}

} // namespace

void open_device()
{
    if (!is_open)
        protect(heap, heap_used(), PROT_READ | PROT_WRITE);
    is_open = true;
}

void close_device()
{
    if (is_open)
        protect(heap, heap_used(), PROT_NONE);
    is_open = false;
}

device_range::device_range(const void *ptr, size_t n) : begin(nullptr), size(0)
{
    if (is_open || !on_device(ptr))
        return;
    const size_t first = size_t(static_cast<const uint8_t *>(ptr) - heap) / page * page;
    const size_t last = size_t(static_cast<const uint8_t *>(ptr) - heap) + n;
    begin = heap + first;
    size = (last - first + page - 1) / page * page;
    protect(begin, size, PROT_READ | PROT_WRITE);
}

device_range::~device_range()
{
    protect(begin, size, PROT_NONE);
}

bool on_device(const volatile void *ptr)
{
    const volatile uint8_t *byte = static_cast<const volatile uint8_t *>(ptr);
    return heap && byte >= heap && byte < heap + heap_size;
}

bool is_allocated(const volatile void *ptr, size_t size)
{
    const range *r = find(allocated, ptr);
    return r && size <= size_t(r->begin + r->size - static_cast<const volatile uint8_t *>(ptr));
}

bool is_pinned(const volatile void *ptr)
{
    return find(pinned, ptr) != nullptr;
}

void check_global(const void *ptr, size_t size, size_t align, const char *what, site at)
{
    if (size > 0 && !is_allocated(ptr, size) && !is_pinned(ptr))
        fail(at, "%s: %zu bytes at %p are not within an allocation", what, size, ptr);
    if (reinterpret_cast<uintptr_t>(ptr) % align)
        fail(at, "%s: address %p is no multiple of %zu", what, ptr, align);
}

const void *check_load(const void *ptr, size_t size, site at)
{
    check_global(ptr, size, size, "ld.global", at);
    return ptr;
}

void check_atomic(const void *address, size_t size, site at)
{
    const block &b = *current->home;
    const uint8_t *byte = static_cast<const uint8_t *>(address);
    bool shared = false;

    for (const tile &t : b.tiles)
        shared |= byte >= b.arena + t.offset && byte + size <= b.arena + t.offset + t.size;
    if (!shared)
        check_global(address, size, size, "an atomic", at);
    yield();
}

void check_red_zones()
{
    for (const auto &[begin, r] : allocated)
        check_red_zone(r);
}

void check_freed()
{
    for (const range &freed : quarantine) {
        const device_range access(freed.begin, freed.size);
        check_no_write(freed);
    }
}

void free_everything()
{
    while (!allocated.empty()) {
        const range r = allocated.begin()->second;
        release(r);
    }
}

size_t n_allocations()
{
    return allocated.size();
}

size_t n_pinned()
{
    return pinned.size();
}

} // namespace emu

using namespace emu;

cudaError_t cudaMalloc(void **ptr, size_t size)
{
    return enter([&] {
        const cudaError_t error = refuse_capture();
        if (error)
            return error;
        stats.mallocs++;
        *ptr = size == 0 || fails_now(EMU_FAIL_MALLOC) ? nullptr : allocate(size);
        return *ptr || size == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
    });
}

cudaError_t cudaFree(void *ptr)
{
    return enter([&] {
        cudaError_t error = refuse_capture();
        if (!ptr || error)
            return error;
        error = wait_for_device("cudaFree");
        const range *r = find(allocated, ptr);
        if (!r || r->begin != ptr)
            fail(nowhere, "cudaFree of %p, which is no device allocation", ptr);
        release(range(*r));
        return error;
    });
}

cudaError_t cudaHostAlloc(void **ptr, size_t size, unsigned)
{
    return enter([&] {
        const size_t room = (size + page) / page * page;
        *ptr = fails_now(EMU_FAIL_MALLOC) ? nullptr : aligned_alloc(page, room);
        if (!*ptr)
            return cudaErrorMemoryAllocation;
        uint8_t *begin = static_cast<uint8_t *>(*ptr);
        fill_undefined(begin, size);
        pinned[begin] = {begin, size, 0};
        return cudaSuccess;
    });
}

cudaError_t cudaMallocHost(void **ptr, size_t size)
{
    return cudaHostAlloc(ptr, size, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *ptr)
{
    return enter([&] {
        if (!ptr)
            return cudaSuccess;
        const cudaError_t error = wait_for_device("cudaFreeHost");
        if (pinned.erase(static_cast<uint8_t *>(ptr)) == 0)
            fail(nowhere, "cudaFreeHost of %p, which is no pinned memory", ptr);
        free(ptr);
        return error;
    });
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    return enter([&] {
        *total_bytes = total_memory();
        *free_bytes = *total_bytes - std::min(*total_bytes, n_allocated_bytes);
        return cudaSuccess;
    });
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *ptr)
{
    return enter([&] {
        void *address = const_cast<void *>(ptr);
        if (const range *r = find(allocated, ptr))
            *attributes = {cudaMemoryTypeDevice, r->device, address, nullptr};
        else if (is_pinned(ptr))
            *attributes = {cudaMemoryTypeHost, 0, address, address};
        else
            *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, address};
        return cudaSuccess;
    });
}
