// barrier.cc - __syncthreads, its counting kin, and the named barriers.
#include "machine.h"

namespace emu
{
namespace
{

bool is_same(site a, site b)
{
    return a.line == b.line && strcmp(a.file, b.file) == 0;
}

void open(barrier *b, int n_expected, predicate kind, site at)
{
    b->n_expected = n_expected;
    b->n_true = 0;
    b->kind = kind;
    b->at = at;
    b->lanes.fill(0);
}

int result_of(const barrier &b)
{
    switch (b.kind) {
    case predicate::count: return b.n_true;
    case predicate::all: return b.n_true == b.n_expected;
    case predicate::any: return b.n_true > 0;
    case predicate::none: break;
    }
    return 0;
}

void release(barrier *b)
{
    const int result = result_of(*b);

    for (fiber *f : b->waiting) {
        f->barrier_result = result;
        make_ready(f);
    }
    b->waiting.clear();
    b->n_arrived = 0;
    b->round++;
}

// The instruction is one of whole warps.
void check_warps(const barrier &b, const block &home, site at)
{
    for (size_t i = 0; i < home.warps.size(); i++)
        if (b.lanes[i] && b.lanes[i] != home.warps[i].exists)
            fail(at, "lanes %08x of warp %zu are at a named barrier, the others are not",
                 b.lanes[i], i);
}

} // namespace

int sync_block(predicate kind, bool value, site at)
{
    block &home = *current->home;
    barrier &b = home.barriers[0];
    const int n_threads = int(home.threads.size());
    char *tag = &b.tags[b.round % 2];

    if (home.n_live != n_threads)
        fail(at, "__syncthreads after %d threads of the block have left the kernel",
             n_threads - home.n_live);
    if (b.n_arrived == 0)
        open(&b, n_threads, kind, at);
    if (!is_same(b.at, at) || b.kind != kind) {
        print_waiting(home);
        fail(at, "divergent barrier: %d threads wait at %s:%d", b.n_arrived, b.at.file, b.at.line);
    }
    tsan_release(tag);
    b.n_arrived++;
    b.n_true += value;
    b.waiting.push_back(current);
    if (b.n_arrived == n_threads)
        release(&b);
    suspend();
    tsan_acquire(tag);
    return current->barrier_result;
}

void named_barrier(int id, int n_threads, bool waits, site at)
{
    block &home = *current->home;

    if (id < 1 || id >= n_barriers)
        fail(at, "there is no named barrier %d (1 to %d; 0 is that of __syncthreads)", id,
             n_barriers - 1);
    if (n_threads <= 0 || n_threads % warp_size || n_threads > int(home.threads.size()))
        fail(at, "a named barrier for %d threads in a block of %zu", n_threads,
             home.threads.size());
    barrier &b = home.barriers[size_t(id)];
    char *tag = &b.tags[b.round % 2];
    if (b.n_arrived == 0)
        open(&b, n_threads, predicate::none, at);
    if (b.n_expected != n_threads)
        fail(at, "named barrier %d is for %d threads here and for %d at %s:%d", id, n_threads,
             b.n_expected, b.at.file, b.at.line);
    uint32_t &lanes = b.lanes[size_t(current->warp)];
    if (lanes >> current->lane & 1)
        fail(at, "the thread is at named barrier %d twice in one round", id);
    lanes |= 1u << current->lane;
    tsan_release(tag);
    b.n_arrived++;
    if (waits)
        b.waiting.push_back(current);
    if (b.n_arrived == n_threads) {
        check_warps(b, home, at);
        release(&b);
    }
    if (!waits)
        return;
    suspend();
    tsan_acquire(tag);
}

} // namespace emu
