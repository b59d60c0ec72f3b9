/* kvc_select_rows() with a workspace of just its size, full of old bytes, between guards. */
#ifndef KVC_TESTS_SELECT_H
#define KVC_TESTS_SELECT_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "guard.h"
#include "kvc/prune.h"

/* Bytes aligned to 64 between guards, each of them fill. */
static inline struct guard workspace_new(size_t size, unsigned char fill)
{
    const struct guard probe = guard_new(size + 64, 0, fill);
    struct guard g = probe;

    g.data = (unsigned char *)(((uintptr_t)probe.data + 63) / 64 * 64);
    g.front = (size_t)(g.data - g.base);
    g.size = size;
    return g;
}

static inline bool workspace_intact(const struct guard *g)
{
    return guard_all_fill(g->base, g->front, g->fill) &&
           guard_all_fill(g->data + g->size, GUARD_BYTES, g->fill);
}

/* The rows that a call which must succeed selects; how many. */
static inline size_t select_rows(const float *scores, size_t n, size_t keep, const uint64_t *forced,
                                 size_t block, kvc_block_score how, int32_t *rows)
{
    size_t size, n_rows = SIZE_MAX;

    assert_int_equal(kvc_select_rows_workspace_size(n, block, &size), KVC_OK);
    struct guard ws = workspace_new(size, 0xA5);
    assert_int_equal(
        kvc_select_rows(scores, n, keep, forced, block, how, rows, &n_rows, ws.data, size), KVC_OK);
    assert_true(workspace_intact(&ws));
    guard_free(&ws);
    return n_rows;
}

/* The rows are those n listed ones. */
static inline void assert_rows(const int32_t *rows, size_t n_rows, const int32_t *want, size_t n)
{
    assert_int_equal(n_rows, n);
    assert_memory_equal(rows, want, n * sizeof(*want));
}

/* Unlike assert_float_equal(), false for NaN. */
static inline void assert_near(float x, float want, float tolerance)
{
    assert_true(fabsf(x - want) <= tolerance);
}

static inline bool bit_of(const uint64_t *bits, size_t i)
{
    return (bits[i / 64] >> (i % 64) & 1) != 0;
}

static inline void mark_bit(uint64_t *bits, size_t i)
{
    bits[i / 64] |= UINT64_C(1) << (i % 64);
}

#endif
