/* Output buffers between guard bytes. */
#ifndef KVC_TESTS_GUARD_H
#define KVC_TESTS_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD_BYTES = 64 };

struct guard {
    unsigned char *base;
    unsigned char *data; /* size bytes */
    size_t size;
    size_t front; /* guard bytes before data */
    unsigned char fill;
};

/* Every byte is fill; data is aligned to no more than misalign (0 .. 63; 0: as malloc). */
static inline struct guard guard_new(size_t size, size_t misalign, unsigned char fill)
{
    struct guard g = {.size = size, .front = GUARD_BYTES + misalign, .fill = fill};

    g.base = malloc(g.front + size + GUARD_BYTES);
    if (g.base == NULL) {
        abort();
    }
    memset(g.base, fill, g.front + size + GUARD_BYTES);
    g.data = g.base + g.front;
    return g;
}

static inline bool guard_all_fill(const unsigned char *p, size_t n, unsigned char fill)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != fill) {
            return false;
        }
    }
    return true;
}

/* Nothing outside of data was written. */
static inline bool guard_intact(const struct guard *g)
{
    return guard_all_fill(g->base, g->front, g->fill) &&
           guard_all_fill(g->data + g->size, GUARD_BYTES, g->fill);
}

/* Nothing at all was written. */
static inline bool guard_untouched(const struct guard *g)
{
    return guard_all_fill(g->base, g->front + g->size + GUARD_BYTES, g->fill);
}

static inline void guard_free(struct guard *g)
{
    free(g->base);
    g->base = NULL;
}

#endif
