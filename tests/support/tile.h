/* Pages and tiles of attention with random content; each block of memory ends at a fault. */
#ifndef KVC_TESTS_TILE_H
#define KVC_TESTS_TILE_H

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "edge.h"
#include "kernels/kernels.h"
#include "kernels/page.h"
#include "rng.h"

enum {
    MAX_D = KVC_MAX_HEAD_DIM,
    ROWS = KVC_TILE_ROWS,
    MAX_ROWS = KVC_BLOCK_ROWS,
    PAGES = KVC_TILE_PAGES
};

static uint64_t seed = 1;

static inline bool bit(uint64_t mask, uint32_t i)
{
    return mask >> i & 1;
}

/* A page and what attention gets of it; data ends where its bytes end. */
struct test_page {
    struct kvc_page_layout layout;
    uint8_t *data;
    uint32_t n_rows;
    uint64_t mask[MAX_ROWS];
    bool biased;
    float bias[KVC_PAGE_ROWS];
};

/* The rows of an open page are random, and NaN where nobody looks. */
static inline uint8_t *open_page(const struct kvc_page_layout *layout, uint32_t n_rows,
                                 uint64_t seen)
{
    uint8_t *data = edge_new(layout->n_bytes);
    memset(data, 0xff, layout->n_bytes);
    for (uint32_t t = 0; t < n_rows; t++) {
        uint16_t *k = (uint16_t *)(void *)(data + (size_t)t * layout->k_stride);
        uint16_t *v = (uint16_t *)(void *)(data + layout->v_codes + (size_t)t * layout->v_stride);
        for (uint32_t c = 0; c < layout->d8_k && bit(seen, t); c++)
            k[c] = c < layout->d_k ? kvc_half_from_float(2 * rng_unit(&seed)) : 0;
        for (uint32_t c = 0; c < layout->d8_v && bit(seen, t); c++)
            v[c] = c < layout->d_v ? kvc_half_from_float(2 * rng_unit(&seed)) : 0;
    }
    return data;
}

/* NaN in transposed values that nobody sees: stored halves are finite, holes are anything. */
static inline void poison_values(const struct test_page *page, uint64_t seen)
{
    for (uint32_t c = 0; c < page->layout.d8_v; c++) {
        uint16_t *line = (uint16_t *)(void *)(page->data + page->layout.v_codes +
                                              (size_t)c * page->layout.v_stride);
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t++)
            if (!bit(seen, t))
                line[t] = t % 2 ? 0x7e00 : 0xfc00;
    }
}

static inline struct test_page sealed_page(int d_k, int d_v, int k_format, int k_scale,
                                           int v_format, int v_scale, uint32_t n_rows,
                                           uint64_t seen)
{
    const struct kvc_page_layout from =
        kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
    struct test_page page = {.layout = kvc_page_layout_make(d_k, d_v, (uint8_t)k_format,
                                                            (uint8_t)k_scale, (uint8_t)v_format,
                                                            (uint8_t)v_scale, false, KVC_PAGE_ROWS),
                             .n_rows = n_rows};
    uint8_t *open = open_page(&from, n_rows, ~UINT64_C(0));
    const struct kvc_seal_job job = {.from = &from,
                                     .to = &page.layout,
                                     .src = open,
                                     .dst = page.data = edge_new(page.layout.n_bytes),
                                     .n_rows = n_rows,
                                     .absmax_k = 2.0f,
                                     .absmax_v = 2.0f};
    kvc_seal_page_ref(NULL, &job);
    edge_free(open, from.n_bytes);
    if (v_format == KVC_F16)
        poison_values(&page, seen);
    return page;
}

static inline uint64_t random_mask(uint32_t n_rows, uint32_t row)
{
    const uint64_t held = ~UINT64_C(0) >> (KVC_PAGE_ROWS - n_rows), bits = rng_next(&seed);
    switch (rng_below(&seed, 6)) {
    case 0: return 0;
    case 1: return held & bits;
    case 2: return held & bits & rng_next(&seed) & rng_next(&seed);
    case 3: return held & ~UINT64_C(0) >> (63 - (bits % 48 + row) % 64);
    case 4: return UINT64_C(1) << bits % n_rows;
    default: return ~UINT64_C(0); /* bits beyond n_rows mean nothing */
    }
}

/* A bias for the rows that somebody sees, and NaN for the others; or none. */
static inline void random_bias(struct test_page *page, uint64_t seen)
{
    page->biased = rng_below(&seed, 2);
    for (uint32_t i = 0; i < KVC_PAGE_ROWS; i++)
        page->bias[i] = bit(seen, i) ? 2 * rng_unit(&seed) : NAN;
}

static inline struct test_page random_page(int d_k, int d_v, uint32_t n_rows_of_tile)
{
    static const uint8_t scales[] = {KVC_SCALE_HEAD, KVC_SCALE_TOKEN, KVC_SCALE_CHANNEL};
    const bool strip = rng_below(&seed, 8) == 0;
    const uint32_t n_rows = strip                 ? 1 + (uint32_t)rng_below(&seed, 6)
                            : rng_below(&seed, 2) ? 64
                                                  : 1 + (uint32_t)rng_below(&seed, 64);
    struct test_page page;
    uint64_t mask[MAX_ROWS] = {0}, seen = 0;
    for (uint32_t row = 0; row < n_rows_of_tile; row++) {
        mask[row] = random_mask(n_rows, row);
        seen |= mask[row];
    }
    if (strip || rng_below(&seed, 6) == 0) { /* or an open page */
        page.layout = kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true,
                                           strip ? n_rows : KVC_PAGE_ROWS);
        page.data = open_page(&page.layout, n_rows, seen);
        page.n_rows = n_rows;
    } else {
        const int k = (int)rng_below(&seed, KVC_INT6 + 1); /* six bits: keys under TOKEN only */
        const int k_scale = k == KVC_INT6 ? KVC_SCALE_TOKEN : scales[rng_below(&seed, 3)];
        page = sealed_page(d_k, d_v, k, k_scale, (int)rng_below(&seed, 3),
                           scales[rng_below(&seed, 3)], n_rows, seen);
    }
    memcpy(page.mask, mask, sizeof(mask));
    random_bias(&page, seen);
    return page;
}

/* A tile with all its memory, each block ending at a fault. */
struct test_tile {
    struct test_page page[PAGES];
    struct kvc_attend_page attend[PAGES];
    uint32_t first_slot; /* pages lie in the slots from it on */
    struct kvc_attend_tile tile;
    struct kvc_attend_masses masses;
    float *q, *shift; /* of tile */
    size_t q_size, o_size, r_size, p_size, w_size;
};

static inline void tile_buffers(struct test_tile *t, int d_k, int d_v)
{
    struct kvc_attend_tile *tile = &t->tile;
    t->q_size = tile->n_rows * kvc_attend_stride((size_t)d_k) * sizeof(float);
    t->o_size = tile->n_rows * kvc_attend_stride((size_t)d_v) * sizeof(float);
    t->r_size = tile->n_rows * sizeof(float);
    t->p_size = PAGES * t->r_size;
    t->w_size = kvc_attend_work_size((size_t)d_k) * sizeof(float);
    t->q = edge_new(t->q_size);
    memset(t->q, 0, t->q_size);
    for (uint32_t r = 0; r < tile->n_rows; r++)
        for (int c = 0; c < d_k; c++)
            t->q[r * kvc_attend_stride((size_t)d_k) + (size_t)c] = 3 * rng_unit(&seed);
    t->shift = edge_new(t->r_size);
    for (uint32_t r = 0; r < tile->n_rows; r++)
        t->shift[r] = 4 * rng_unit(&seed);
    tile->q = t->q;
    tile->shift = rng_below(&seed, 2) ? t->shift : NULL;
    tile->pages = t->attend;
    tile->m = edge_new(t->r_size);
    tile->l = edge_new(t->r_size);
    tile->o = edge_new(t->o_size);
    t->masses.m = edge_new(t->p_size);
    t->masses.l = edge_new(t->p_size);
    t->masses.weights = edge_new(t->p_size * KVC_PAGE_ROWS);
    memset(t->masses.weights, 0xff, t->p_size * KVC_PAGE_ROWS);
    tile->masses = &t->masses;
    tile->work = edge_new(t->w_size);
    memset(tile->work, 0xff, t->w_size);
}

static inline void tile_point(struct test_tile *t)
{
    for (uint32_t p = 0; p < t->tile.n_pages; p++)
        t->attend[p] = (struct kvc_attend_page){.data = t->page[p].data,
                                                .slot = t->first_slot + p,
                                                .layout = &t->page[p].layout,
                                                .n_rows = t->page[p].n_rows,
                                                .mask = t->page[p].mask,
                                                .bias = t->page[p].biased ? t->page[p].bias : NULL};
}

static inline struct test_tile *tile_new(int d_k, int d_v, uint32_t n_rows, uint32_t n_pages,
                                         float softcap)
{
    struct test_tile *t = calloc(1, sizeof(*t));
    if (!t)
        abort();
    t->tile.n_rows = n_rows;
    t->tile.n_pages = n_pages;
    t->tile.scale = 1 / sqrtf((float)d_k);
    t->tile.softcap = softcap;
    for (uint32_t p = 0; p < n_pages; p++)
        t->page[p] = random_page(d_k, d_v, n_rows);
    t->first_slot = (uint32_t)rng_below(&seed, PAGES - n_pages + 1);
    tile_point(t);
    tile_buffers(t, d_k, d_v);
    return t;
}

static inline void tile_free(struct test_tile *t)
{
    for (uint32_t p = 0; p < t->tile.n_pages; p++)
        edge_free(t->page[p].data, t->page[p].layout.n_bytes);
    edge_free(t->q, t->q_size);
    edge_free(t->shift, t->r_size);
    edge_free(t->tile.m, t->r_size);
    edge_free(t->tile.l, t->r_size);
    edge_free(t->tile.o, t->o_size);
    edge_free(t->masses.m, t->p_size);
    edge_free(t->masses.l, t->p_size);
    edge_free(t->masses.weights, t->p_size * KVC_PAGE_ROWS);
    edge_free(t->tile.work, t->w_size);
    free(t);
}

#endif
