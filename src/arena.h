/* arena.h - carves one block of memory; with base NULL it only counts, so sizes cannot drift. */
#ifndef KVC_ARENA_H
#define KVC_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvc_arena {
    char *base;
    size_t used;
    bool overflow; /* the sum does not fit size_t */
};

/* count * size bytes at the next multiple of align (a power of two); NULL while counting. */
static inline void *kvc_arena_take(struct kvc_arena *arena, size_t count, size_t size, size_t align)
{
    size_t bytes, start, end;
    if (__builtin_mul_overflow(count, size, &bytes) ||
        __builtin_add_overflow(arena->used, align - 1, &start) ||
        __builtin_add_overflow(start & ~(align - 1), bytes, &end)) {
        arena->overflow = true;
        return NULL;
    }
    arena->used = end;
    return arena->base ? arena->base + (end - bytes) : NULL;
}

/* Alignment of workspaces of the caller. */
#define KVC_WS_ALIGN 64

/* Whether a workspace holds need bytes; SIZE_MAX: they do not fit size_t. */
static inline bool kvc_workspace_ok(const void *ws, size_t ws_size, size_t need)
{
    return need == 0 ||
           (need != SIZE_MAX && ws && (uintptr_t)ws % KVC_WS_ALIGN == 0 && ws_size >= need);
}

#endif
