// report.cc - the seed and what follows from it, counters, the message that ends a process.
#include <stdarg.h>
#include <unistd.h>

#include "machine.h"

namespace emu
{

struct emu_stats stats;

namespace
{

uint64_t the_seed = 1, state = 1;

// All of them are NaN as float and as two halves; they differ as integers.
constexpr uint32_t undefined_words[4] = {0xffffffff, 0x7fff7fff, 0xffa5ffa5, 0x7fda7fda};

// NaN as float and as two halves too, and no number that programs write often.
constexpr uint64_t even_guard = 0xfffefffefffefffe, odd_guard = 0xfefffefffefffeff;

// The bytes of pattern from ptr on, again and again.
void fill(uint8_t *ptr, size_t size, uint64_t pattern)
{
    size_t i = 0;

    for (; i + 8 <= size; i += 8)
        memcpy(ptr + i, &pattern, 8);
    memcpy(ptr + i, &pattern, size - i);
}

void start(uint64_t value)
{
    the_seed = value;
    state = value * 0x9e3779b97f4a7c15 + 1;
    for (int i = 0; i < 8; i++)
        random_bits();
}

const bool started = [] {
    const char *text = getenv("KVC_EMU_SEED");
    start(text ? strtoull(text, nullptr, 10) : 1);
    return true;
}();

} // namespace

uint64_t seed()
{
    return the_seed;
}

uint32_t random_bits()
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return uint32_t(state >> 16);
}

uint32_t random_below(uint32_t n)
{
    return uint32_t(uint64_t(random_bits()) * n >> 32);
}

void fill_undefined(void *ptr, size_t size)
{
    const uint64_t word = undefined_words[the_seed % 4];
    fill(static_cast<uint8_t *>(ptr), size, word << 32 | word);
}

void fill_guard(uint8_t *ptr, size_t size)
{
    fill(ptr, size, reinterpret_cast<uintptr_t>(ptr) % 2 ? odd_guard : even_guard);
}

bool is_guard_intact(const uint8_t *ptr, size_t size)
{
    const uint64_t guard = reinterpret_cast<uintptr_t>(ptr) % 2 ? odd_guard : even_guard;

    return memcmp(ptr, &guard, std::min(size, size_t(2))) == 0 &&
           (size < 2 || memcmp(ptr, ptr + 2, size - 2) == 0);
}

void fail(site at, const char *format, ...)
{
    va_list arguments;

    fflush(stdout);
    fprintf(stderr, "\nemulator: ");
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    if (at.file)
        fprintf(stderr, "  at %s:%d\n", at.file, at.line);
    if (in_kernel())
        fprintf(stderr, "  block (%u, %u, %u), thread (%u, %u, %u), warp %d, lane %d\n", blockIdx.x,
                blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, current->warp,
                current->lane);
    if (running_kernel())
        fprintf(stderr, "  kernel %s\n", running_kernel()->name.c_str());
    fprintf(stderr, "  seed %llu\n", static_cast<unsigned long long>(the_seed));
    fflush(stderr);
    _exit(86);
}

} // namespace emu

using namespace emu;

void emu_set_seed(uint64_t seed)
{
    const runtime_lock lock;
    run_everything("emu_set_seed");
    start(seed);
}

void emu_get_stats(struct emu_stats *out)
{
    const runtime_lock lock;
    *out = stats;
}

void emu_reset_stats(void)
{
    const runtime_lock lock;
    stats = {};
}

void emu_check_leaks(void)
{
    const runtime_lock lock;
    run_everything("emu_check_leaks");
    check_freed();
    const struct {
        size_t n;
        const char *what;
    } leaks[] = {{n_allocations(), "device allocations"},
                 {n_pinned(), "pinned allocations"},
                 {n_streams(), "streams"},
                 {n_events(), "events"},
                 {n_graphs(), "graphs"},
                 {n_handles(), "cuBLAS handles"}};

    for (const auto &leak : leaks)
        if (leak.n > 0)
            fail(nowhere, "%zu %s were not given back", leak.n, leak.what);
}
