// shared.cc - shared memory: an arena a block, with guards around each tile, and cp.async into it.
#include <sys/mman.h>

#include "machine.h"

namespace emu
{
namespace
{

constexpr size_t arena_size = 320 << 10, guard_size = 64;
constexpr size_t dynamic_offset = 1024 + 128; // aligned to 128 bytes and not to more
constexpr size_t static_limit = 48 << 10;

auto &spare_arenas = *new std::vector<uint8_t *>; // never destroyed: not a leak

uint8_t *take_arena()
{
    const int access = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    uint8_t *arena = nullptr;

    if (!spare_arenas.empty()) {
        arena = spare_arenas.back();
        spare_arenas.pop_back();
    }
    // A new mapping makes ThreadSanitizer forget what earlier blocks did here.
    if (!arena || EMU_TSAN) {
        void *memory = mmap(arena, arena_size, access, arena ? flags | MAP_FIXED : flags, -1, 0);
        if (memory == MAP_FAILED)
            fail(nowhere, "no memory for the shared memory of a block");
        arena = static_cast<uint8_t *>(memory);
    }
    return arena;
}

// The least alignment that is asked for and not more: what relies on more shows.
size_t place(size_t offset, size_t align)
{
    offset = (offset + align - 1) / align * align;
    return offset % (2 * align) ? offset : offset + align;
}

void add_tile(block *b, const void *key, size_t offset, size_t size)
{
    uint8_t *tile = b->arena + offset;
    const size_t before = offset - b->arena_used;

    asan_unpoison(tile - before, before + size + guard_size);
    fill_guard(tile - before, before);
    fill_undefined(tile, size);
    fill_guard(tile + size, guard_size);
    asan_poison(tile - before, before);
    asan_poison(tile + size, guard_size);
    b->tiles.push_back({key, offset, size});
    b->arena_used = offset + size;
}

void finish(const async_copy &copy)
{
    uint8_t *to = current->home->arena + copy.dst;
    const uint8_t *from = static_cast<const uint8_t *>(copy.src);

    tsan_reads(from, size_t(copy.src_size));
    tsan_writes(to, size_t(copy.size));
    for (int i = 0; i < copy.size; i++)
        to[i] = i < copy.src_size ? from[i] : 0;
}

// Finishes what was issued before group end; what is left keeps its order.
void finish_before(int end)
{
    std::vector<async_copy> &copies = current->copies;
    size_t n_left = 0;

    for (const async_copy &copy : copies)
        if (copy.group < end)
            finish(copy);
        else
            copies[n_left++] = copy;
    copies.resize(n_left);
}

} // namespace

void open_arena(block *b, size_t dynamic_shared)
{
    b->arena = take_arena();
    asan_poison(b->arena, arena_size);
    b->arena_used = dynamic_offset - guard_size;
    add_tile(b, nullptr, dynamic_offset, dynamic_shared);
}

void close_arena(block *b)
{
    size_t end = dynamic_offset - guard_size;

    asan_unpoison(b->arena, arena_size);
    b->tiles.push_back({nullptr, b->arena_used + guard_size, 0});
    for (const tile &t : b->tiles) {
        if (!EMU_ASAN && !is_guard_intact(b->arena + end, t.offset - end))
            fail(nowhere,
                 "block (%u, %u, %u) wrote beside its shared memory, near byte %ld of the "
                 "dynamic part",
                 b->index.x, b->index.y, b->index.z, long(end) - long(dynamic_offset));
        end = t.offset + t.size;
    }
    spare_arenas.push_back(b->arena);
}

void *static_shared(const void *key, size_t size, size_t align, site at)
{
    const tsan_silence silence;
    block *b = current->home;
    size_t n_static = size;

    for (const tile &t : b->tiles) {
        if (t.key == key)
            return b->arena + t.offset;
        n_static += t.key ? t.size : 0;
    }
    const size_t n_all = n_static + b->tiles[0].size;
    if (n_static > static_limit || n_all > shared_limit(running_kernel()->kernel))
        fail(at, "%zu bytes of shared memory, %zu of them static: more than a launch may use",
             n_all, n_static);
    add_tile(b, key, place(b->arena_used + guard_size, std::max(align, size_t(16))), size);
    return b->arena + b->tiles.back().offset;
}

void *dynamic_shared()
{
    return current->home->arena + dynamic_offset;
}

uint32_t shared_address(const void *ptr)
{
    const uint8_t *arena = current->home->arena;
    const ptrdiff_t offset = static_cast<const uint8_t *>(ptr) - arena;

    if (offset < 0 || offset >= ptrdiff_t(arena_size))
        fail(nowhere, "%p is no shared memory of the block", ptr);
    return uint32_t(offset);
}

uint8_t *check_shared(uint32_t address, size_t size, size_t align, const char *what, site at)
{
    const block &b = *current->home;
    bool inside = false;

    for (const tile &t : b.tiles)
        inside |= address >= t.offset && address + size <= t.offset + t.size;
    if (!inside)
        fail(at,
             "%s: bytes %ld to %ld of shared memory, counted from its dynamic part of %zu bytes, "
             "are not within a tile",
             what, long(address) - long(dynamic_offset),
             long(address + size) - long(dynamic_offset), b.tiles[0].size);
    if (address % align)
        fail(at, "%s: shared address %u is no multiple of %zu", what, address, align);
    return b.arena + address;
}

// From the issue to the wait the destination is undefined; only at the wait is the source read. So
// one schedule shows both a missing wait and a buffer that is refilled too early.
void cp_async(uint32_t dst, const void *src, int size, int src_size, site at)
{
    if (src_size < 0 || src_size > size)
        fail(at, "cp.async of %d bytes takes %d from the source", size, src_size);
    uint8_t *to = check_shared(dst, size_t(size), size_t(size), "cp.async", at);
    check_global(src, size_t(src_size), size_t(size), "cp.async", at);
    stats.cp_async++;
    tsan_writes(to, size_t(size));
    const tsan_silence silence;
    fill_undefined(to, size_t(size));
    current->copies.push_back({dst, src, size, src_size, current->copy_group, at});
}

void cp_async_commit()
{
    current->copy_group++;
}

void cp_async_wait(int n_pending)
{
    finish_before(current->copy_group - n_pending);
}

void cp_async_wait_all()
{
    finish_before(current->copy_group + 1);
}

} // namespace emu
