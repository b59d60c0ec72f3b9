// warp.cc - what the lanes of a warp do together: the rendezvous, shuffles, votes, reductions.
#include "machine.h"

namespace emu
{
namespace
{

// Calls f with each lane of the meeting and its argument.
template <class T, class F> void each(const meeting &m, F f)
{
    for (int lane = 0; lane < warp_size; lane++)
        if (m.mask >> lane & 1)
            f(lane, *static_cast<T *>(m.arguments[size_t(lane)]));
}

int source_lane(const meeting &m, int lane, const shuffle_argument &a)
{
    const int width = a.width;

    if (width < 1 || width > warp_size || (width & (width - 1)))
        fail(m.at, "the width of a shuffle is %d", width);
    const int first = lane & ~(width - 1), last = first + width - 1;
    switch (source(m.variant / 64)) {
    case source::index: return first | (a.operand & (width - 1));
    case source::up: return lane - a.operand < first ? lane : lane - a.operand;
    case source::down: return lane + a.operand > last ? lane : lane + a.operand;
    case source::exchange: break;
    }
    return (lane ^ a.operand) > last ? lane : lane ^ a.operand;
}

void compute_shuffle(const meeting &m)
{
    each<shuffle_argument>(m, [&m](int lane, shuffle_argument &a) {
        const int from = source_lane(m, lane, a);
        if (from < 0 || from >= warp_size || !(m.mask >> from & 1))
            fail(m.at, "lane %d shuffles from lane %d, which is not in the mask %08x", lane, from,
                 m.mask);
        a.result = static_cast<shuffle_argument *>(m.arguments[size_t(from)])->value;
    });
}

void compute_vote(const meeting &m)
{
    uint32_t ballot = 0;
    each<vote_argument>(
        m, [&ballot](int lane, vote_argument &a) { ballot |= uint32_t(a.value) << lane; });
    each<vote_argument>(m, [ballot](int, vote_argument &a) { a.result = ballot; });
}

void compute_match(const meeting &m)
{
    each<match_argument>(m, [&m](int, match_argument &a) {
        each<match_argument>(m, [&a](int lane, match_argument &other) {
            a.result |= uint32_t(other.value == a.value) << lane;
        });
    });
}

int64_t combine(reduction kind, int64_t a, int64_t b)
{
    switch (kind) {
    case reduction::add: return a + b;
    case reduction::min: return std::min(a, b);
    case reduction::max: return std::max(a, b);
    case reduction::bit_and: return a & b;
    case reduction::bit_or: return a | b;
    case reduction::bit_xor: break;
    }
    return a ^ b;
}

void compute_reduce(const meeting &m)
{
    int64_t total = 0;
    bool any = false;
    each<reduce_argument>(m, [&](int, reduce_argument &a) {
        total = any ? combine(reduction(m.variant), total, a.value) : a.value;
        any = true;
    });
    each<reduce_argument>(m, [total](int, reduce_argument &a) { a.result = total; });
}

void compute(const meeting &m)
{
    switch (m.what) {
    case collective::syncwarp: break;
    case collective::shuffle: compute_shuffle(m); break;
    case collective::vote: compute_vote(m); break;
    case collective::match: compute_match(m); break;
    case collective::reduce: compute_reduce(m); break;
    default: compute_fragments(m); break;
    }
}

void check_mask(const warp &w, collective what, uint32_t mask, site at)
{
    if (what >= collective::ldmatrix && w.exists != full_mask)
        fail(at, "%s in a warp of fewer than 32 threads", name_of(what));
    if (!(mask >> current->lane & 1))
        fail(at, "%s: the lane is not in its own mask %08x", name_of(what), mask);
    if (mask & ~w.exists)
        fail(at, "%s: the mask %08x names lanes that do not exist", name_of(what), mask);
    if (mask & w.exited)
        fail(at, "%s: lanes %08x of the mask have left the kernel", name_of(what), mask & w.exited);
}

// The meeting that the lane belongs to. Lanes may be in another one that the lane is not part of,
// or the lane may come to that later; but two that wait for each other never end.
meeting &find_meeting(warp *w, collective what, uint32_t mask, int variant, site at)
{
    const uint32_t lane = 1u << current->lane;
    meeting *unused = nullptr;

    for (meeting &m : w->meetings) {
        if (!m.mask)
            unused = &m;
        if (!(m.mask & lane) || !(m.arrived & mask))
            continue;
        if (m.mask == mask && m.what == what && m.variant == variant && m.at.line == at.line &&
            strcmp(m.at.file, at.file) == 0)
            return m;
        print_waiting(*current->home);
        fail(at, "divergent warp: this lane is in %s with mask %08x, lanes %08x are in %s at %s:%d",
             name_of(what), mask, m.arrived, name_of(m.what), m.at.file, m.at.line);
    }
    if (!unused)
        fail(at, "more than 8 groups of lanes of one warp are in collectives");
    unused->mask = mask;
    unused->arrived = 0;
    unused->what = what;
    unused->variant = variant;
    unused->at = at;
    return *unused;
}

} // namespace

const char *name_of(collective what)
{
    switch (what) {
    case collective::syncwarp: return "__syncwarp";
    case collective::shuffle: return "a shuffle";
    case collective::vote: return "a vote";
    case collective::match: return "a match";
    case collective::reduce: return "a reduction";
    case collective::ldmatrix: return "ldmatrix";
    case collective::movmatrix: return "movmatrix";
    case collective::mma_f16: return "mma of halves";
    case collective::mma_s8: return "mma of bytes";
    }
    return "?";
}

void meet(collective what, uint32_t mask, int variant, void *argument, site at)
{
    warp &w = current->home->warps[size_t(current->warp)];
    const bool orders_memory = what == collective::syncwarp; // the others do not
    char *tag = &w.tags[w.round % 2];

    if (mask == full_mask) // all there are, in a last warp that is not full
        mask = w.exists;
    check_mask(w, what, mask, at);
    meeting &m = find_meeting(&w, what, mask, variant, at);
    m.arrived |= 1u << current->lane;
    m.arguments[size_t(current->lane)] = argument;
    if (orders_memory)
        tsan_release(tag);
    if (m.arrived == mask) {
        compute(m);
        m.mask = 0;
        w.round += orders_memory;
        w.ready |= mask;
        current->home->ready_warps |= 1u << current->warp;
    }
    suspend();
    if (orders_memory)
        tsan_acquire(tag);
}

} // namespace emu
