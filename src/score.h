/* score.h - what the files of this module share. */
#ifndef KVC_SRC_SCORE_H
#define KVC_SRC_SCORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Token i of a bitmap, which may be NULL. */
static inline bool has_bit(const uint64_t *bits, size_t i)
{
    return bits && (bits[i / 64] >> i % 64 & 1);
}

/* need is SIZE_MAX where a size does not fit size_t. */
static inline bool workspace_ok(const void *ws, size_t ws_size, size_t need)
{
    return need != SIZE_MAX && ws && (uintptr_t)ws % 64 == 0 && ws_size >= need;
}

#endif
