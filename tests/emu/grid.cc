// grid.cc - runs the blocks of a kernel: which of them are resident, which thread runs next, and
// the watchdog for a thread that never lets go.
#include <atomic>
#include <thread>

#include <time.h>
#include <unistd.h>

#include "machine.h"

namespace emu
{
namespace
{

constexpr int switch_odds = 4;      // a yield switches once in so many
constexpr int priority_change = 64; // picks between two changes of priority
constexpr uint32_t longest_burst = 512;

const kernel_launch *grid_launch; // the one that runs
block *running;                   // whose threads run
uint32_t burst;                   // switches until another block may run

[[maybe_unused]] char start_tag, end_tag, fence_tag;

enum class policy { random, fixed, changing };

policy the_policy()
{
    return policy(seed() % 3);
}

int pick_bit(uint32_t set)
{
    for (uint32_t n = random_below(uint32_t(__builtin_popcount(set))); n > 0; n--)
        set &= set - 1;
    return __builtin_ctz(set);
}

int highest_priority(const block &b)
{
    int best = -1;
    for (uint32_t set = b.ready_warps; set; set &= set - 1) {
        const int w = __builtin_ctz(set);
        if (best < 0 || b.warps[size_t(w)].priority > b.warps[size_t(best)].priority)
            best = w;
    }
    return best;
}

int first_lane(const warp &w)
{
    for (uint8_t lane : w.order)
        if (w.ready >> lane & 1)
            return lane;
    fail(nowhere, "no lane is ready");
}

fiber *pick(block *b)
{
    const policy how = the_policy();

    if (how == policy::changing && random_below(priority_change) == 0)
        b->warps[random_below(uint32_t(b->warps.size()))].priority = random_bits();
    const int w = how == policy::random ? pick_bit(b->ready_warps) : highest_priority(*b);
    warp &from = b->warps[size_t(w)];
    const int lane = how == policy::random ? pick_bit(from.ready) : first_lane(from);
    from.ready &= ~(1u << lane);
    if (!from.ready)
        b->ready_warps &= ~(1u << w);
    return b->threads[size_t(w * warp_size + lane)];
}

void give_order(warp *w)
{
    w->priority = random_bits();
    for (uint32_t i = 0; i < warp_size; i++)
        w->order[i] = uint8_t(i);
    for (uint32_t i = warp_size - 1; i > 0; i--)
        std::swap(w->order[i], w->order[random_below(i + 1)]);
}

uint3 unfold(uint32_t i, const dim3 &size)
{
    return {i % size.x, i / size.x % size.y, i / size.x / size.y};
}

block *open_block(uint32_t position)
{
    const tsan_silence silence;
    const dim3 &shape = grid_launch->shape.block;
    const uint32_t n_threads = shape.x * shape.y * shape.z;
    block *b = new block;

    b->index = unfold(position, grid_launch->shape.grid);
    b->n_live = int(n_threads);
    b->warps.resize((n_threads + warp_size - 1) / warp_size);
    for (warp &w : b->warps)
        give_order(&w);
    for (barrier &one : b->barriers)
        one.waiting.reserve(n_threads);
    for (uint32_t i = 0; i < n_threads; i++) {
        fiber *f = take_fiber();
        f->home = b;
        f->index = unfold(i, shape);
        f->warp = int(i) / warp_size;
        f->lane = int(i) % warp_size;
        f->copies.clear();
        f->copy_group = 0;
        b->warps[size_t(f->warp)].exists |= 1u << f->lane;
        b->threads.push_back(f);
        make_ready(f);
    }
    open_arena(b, grid_launch->shape.dynamic_shared);
    tsan_release(&start_tag);
    stats.blocks++;
    return b;
}

void close_block(block *b)
{
    const tsan_silence silence;
    close_arena(b);
    for (fiber *f : b->threads)
        return_fiber(f);
    delete b;
}

// Runs one resident block for a while; true if it is done.
bool advance(block *b)
{
    running = b;
    burst = 1 + random_below(longest_burst);
    if (b->ready_warps)
        switch_to(pick(b));
    if (b->ready_warps)
        return false;
    if (b->n_live > 0) {
        print_waiting(*b);
        fail(nowhere, "deadlock: %d threads of block (%u, %u, %u) wait for others that never come",
             b->n_live, b->index.x, b->index.y, b->index.z);
    }
    return true;
}

// The watchdog looks at the CPU time of the process, so a busy machine does not matter. It is a
// thread, because ThreadSanitizer keeps signals back from code that makes no calls.
std::atomic<double> started_at{-1};

double cpu_seconds()
{
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return double(now.tv_sec) + double(now.tv_nsec) * 1e-9;
}

void watch(double limit)
{
    const timespec pause = {0, 100000000};
    for (;;) {
        nanosleep(&pause, nullptr);
        const double start = started_at;
        if (start < 0 || cpu_seconds() - start < limit)
            continue;
        fprintf(stderr,
                "\nemulator: a kernel used more than %g s: does it wait in a loop?\n"
                "  block (%u, %u, %u), thread (%u, %u, %u)\n  kernel %s\n  seed %llu\n",
                limit, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z,
                grid_launch ? grid_launch->name.c_str() : "?",
                static_cast<unsigned long long>(seed()));
        _exit(87);
    }
}

void start_watchdog()
{
    static const bool started = [] {
        const char *text = getenv("KVC_EMU_TIMEOUT");
        std::thread(watch, text ? strtod(text, nullptr) : 120.0).detach();
        return true;
    }();
    (void)started;
    started_at = cpu_seconds();
}

} // namespace

const kernel_launch *running_kernel()
{
    return grid_launch;
}

void make_ready(fiber *f)
{
    f->home->warps[size_t(f->warp)].ready |= 1u << f->lane;
    f->home->ready_warps |= 1u << f->warp;
}

void suspend()
{
    if (burst == 0 || !running->ready_warps) {
        switch_to_host();
        return;
    }
    burst--;
    fiber *next = pick(running);
    if (next != current)
        switch_to(next);
}

// A thread that yields goes to another place in its warp, and its warp to another in the block:
// others run even where priorities are fixed.
void yield()
{
    warp &w = running->warps[size_t(current->warp)];
    uint32_t place = 0;

    if (random_below(switch_odds) != 0)
        return;
    while (w.order[place] != current->lane)
        place++;
    std::swap(w.order[place], w.order[random_below(warp_size)]);
    w.priority = random_bits();
    make_ready(current);
    suspend();
}

void fence()
{
    tsan_acquire(&fence_tag);
    tsan_release(&fence_tag);
    yield();
}

void run_thread()
{
    tsan_acquire(&start_tag);
    grid_launch->body();
    tsan_release(&end_tag);

    block &b = *current->home;
    warp &w = b.warps[size_t(current->warp)];
    const uint32_t lane = 1u << current->lane;
    const barrier &sync = b.barriers[0];

    if (!current->copies.empty())
        fail(current->copies[0].at, "a thread left the kernel without waiting for this cp.async");
    for (const meeting &m : w.meetings)
        if (m.mask & lane)
            fail(m.at, "lane %d left the kernel while lanes %08x wait for it in %s", current->lane,
                 m.arrived, name_of(m.what));
    if (sync.n_arrived > 0)
        fail(sync.at, "a thread left the kernel while %d others wait at this __syncthreads",
             sync.n_arrived);
    w.exited |= lane;
    b.n_live--;
    suspend();
}

void print_waiting(const block &b)
{
    int n_shown = 0;

    for (size_t i = 0; i < b.warps.size(); i++)
        for (const meeting &m : b.warps[i].meetings)
            if (m.mask && n_shown++ < 8)
                fprintf(
                    stderr,
                    "  warp %zu: lanes %08x wait in %s at %s:%d for lanes %08x (exited: %08x)\n", i,
                    m.arrived, name_of(m.what), m.at.file, m.at.line, m.mask & ~m.arrived,
                    b.warps[i].exited);
    for (int i = 0; i < n_barriers; i++) {
        const barrier &one = b.barriers[size_t(i)];
        if (one.n_arrived > 0)
            fprintf(stderr, "  barrier %d at %s:%d: %d of %d threads are there\n", i, one.at.file,
                    one.at.line, one.n_arrived, one.n_expected);
    }
}

void run_grid(const kernel_launch &which)
{
    const dim3 &grid = which.shape.grid, &shape = which.shape.block;
    const uint32_t n_blocks = grid.x * grid.y * grid.z;
    const uint32_t n_threads = shape.x * shape.y * shape.z;
    const size_t room = (EMU_TSAN ? 1 : 2) * max_block_threads / n_threads; // its fibers are dear
    const size_t n_resident = std::min(size_t(1 + seed() % 4), room);
    std::vector<uint32_t> order(n_blocks);
    std::vector<block *> resident;

    grid_launch = &which;
    blockDim = shape;
    gridDim = grid;
    stats.launches++;
    enter_host();
    start_watchdog();
    for (uint32_t i = 0; i < n_blocks; i++)
        order[i] = i;
    for (uint32_t i = n_blocks; i > 1; i--)
        std::swap(order[i - 1], order[random_below(i)]);
    while (!order.empty() || !resident.empty()) {
        while (resident.size() < n_resident && !order.empty()) {
            resident.push_back(open_block(order.back()));
            order.pop_back();
        }
        const uint32_t i = random_below(uint32_t(resident.size()));
        if (advance(resident[i])) {
            close_block(resident[i]);
            resident.erase(resident.begin() + i);
        }
    }
    tsan_acquire(&end_tag);
    started_at = -1;
    grid_launch = nullptr;
}

} // namespace emu
