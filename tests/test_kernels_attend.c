/* Attention over pages: every table, ref included, against float64 over the rows that are stored.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "support/truth.h"

/* The promise of a mode, of the largest output or of a sum of weights. */
static double tolerance(const struct test_tile *t)
{
    return t->tile.exact ? 2e-5 : 2e-4;
}

static void check_row(const struct test_tile *t, uint32_t row, const struct truth *truth,
                      const float *out, float lse)
{
    const uint32_t d_v = t->page[0].layout.d_v, stride = (uint32_t)kvc_attend_stride(d_v);
    for (uint32_t c = d_v; c < stride; c++)
        assert_true(t->tile.o[(size_t)row * stride + c] == 0);
    if (isinf(truth->lse)) {
        assert_true(lse == -INFINITY && t->tile.l[row] == 0 && t->tile.m[row] == -INFINITY);
        for (uint32_t c = 0; c < d_v; c++)
            assert_true(out[c] == 0);
        return;
    }
    assert_true(fabs((double)lse - truth->lse) <= tolerance(t) / 2 * (1 + fabs(truth->lse)));
    assert_true(relative_error(out, truth->out, d_v) <= tolerance(t));
}

static void attend(const struct kvc_kernels *k, const struct test_tile *t, float *out, float *lse)
{
    const uint32_t d_v = t->page[0].layout.d_v;
    const struct kvc_attend_part part = {.m = t->tile.m, .l = t->tile.l, .o = t->tile.o};
    assert_int_equal(k->attend_pages(NULL, &t->tile), KVC_OK);
    assert_int_equal(
        k->finish_rows(NULL, &part, t->tile.n_rows, d_v, out, KVC_DTYPE_F32, MAX_D, lse), KVC_OK);
}

/* The masses of tokens, each from 1 on, by a second pass and of what the first one left; in the
 * latter case a slot without a page and a page without a place are left alone. */
static void token_masses(const struct kvc_kernels *k, const struct test_tile *t, const float *lse,
                         bool of_parts, float *mass)
{
    float *place[PAGES] = {NULL};
    for (size_t i = 0; i < (size_t)t->tile.n_pages * KVC_PAGE_ROWS; i++)
        mass[i] = 1;
    for (uint32_t p = 0; p < t->tile.n_pages; p++)
        place[t->attend[p].slot] = mass + (size_t)p * KVC_PAGE_ROWS;
    if (of_parts)
        assert_int_equal(k->mass_parts(NULL, &t->masses, t->tile.n_rows, lse, place), KVC_OK);
    else
        assert_int_equal(k->mass_pages(NULL, &t->tile, lse, mass), KVC_OK);
}

static void check_page_masses(const struct kvc_kernels *k, const struct test_tile *t,
                              const struct truth *truth, const float *lse)
{
    const struct kvc_attend_masses without = {.m = t->masses.m, .l = t->masses.l};
    float *place[PAGES], mass[PAGES];
    double want[PAGES] = {0};
    for (uint32_t slot = 0; slot < PAGES; slot++) {
        mass[slot] = 1;
        place[slot] = slot % 5 == 4 ? NULL : &mass[slot];
    }
    for (uint32_t p = 0; p < t->tile.n_pages; p++)
        for (uint32_t row = 0; row < t->tile.n_rows && place[t->attend[p].slot]; row++)
            want[t->attend[p].slot] += truth[row].page[p];
    assert_int_equal(k->mass_parts(NULL, &without, t->tile.n_rows, lse, place), KVC_OK);
    for (uint32_t slot = 0; slot < PAGES; slot++)
        assert_true(fabs((double)mass[slot] - 1 - want[slot]) <= tolerance(t) * (1 + want[slot]));
}

static void check_masses(const struct kvc_kernels *k, const struct test_tile *t,
                         const struct truth *truth, const float *lse)
{
    const size_t n = (size_t)t->tile.n_pages * KVC_PAGE_ROWS;
    float *mass = edge_new(n * sizeof(float));
    for (int of_parts = 0; of_parts < 2; of_parts++) {
        token_masses(k, t, lse, of_parts, mass);
        for (uint32_t p = 0; p < t->tile.n_pages; p++)
            for (uint32_t i = 0; i < KVC_PAGE_ROWS; i++) {
                double want = 1;
                for (uint32_t row = 0; row < t->tile.n_rows; row++)
                    want += truth[row].weight[p][i];
                assert_true(fabs((double)mass[p * KVC_PAGE_ROWS + i] - want) <=
                            tolerance(t) * want);
            }
    }
    check_page_masses(k, t, truth, lse);
    edge_free(mass, n * sizeof(float));
}

static void check_tile_as_it_is(const struct test_tile *t)
{
    static struct truth truth[ROWS];
    static float out[ROWS * MAX_D], again[ROWS * MAX_D];
    float lse[ROWS], lse_again[ROWS];
    for (uint32_t row = 0; row < t->tile.n_rows; row++)
        true_row(t, row, &truth[row]);
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        attend(*k, t, out, lse);
        for (uint32_t row = 0; row < t->tile.n_rows; row++)
            check_row(t, row, &truth[row], out + (size_t)row * MAX_D, lse[row]);
        attend(*k, t, again, lse_again);
        for (uint32_t row = 0; row < t->tile.n_rows; row++)
            assert_memory_equal(out + (size_t)row * MAX_D, again + (size_t)row * MAX_D,
                                t->page[0].layout.d_v * sizeof(float));
        assert_memory_equal(lse, lse_again, t->tile.n_rows * sizeof(float));
        check_masses(*k, t, truth, lse);
    }
}

static void check_tile(struct test_tile *t)
{
    for (int exact = 0; exact < 2; exact++) {
        t->tile.exact = exact;
        check_tile_as_it_is(t);
    }
}

static void attention_equals_float64(void **state)
{
    static const int sizes[] = {64, 80, 96, 112, 128, 256, 512};
    (void)state;
    for (int i = 0; i < 160; i++) {
        const bool big = i >= 80;
        const int d_k = big ? sizes[rng_below(&seed, 7)] : 1 + i;
        const int d_v = big ? sizes[rng_below(&seed, 7)] : 1 + (int)rng_below(&seed, 80);
        const uint32_t n_rows = 1 + (uint32_t)(i % ROWS);
        const uint32_t n_pages = 1 + (uint32_t)rng_below(&seed, big ? 6 : PAGES);
        struct test_tile *t = tile_new(d_k, d_v, n_rows, n_pages, (const float[]){0, 2, 30}[i % 3]);
        check_tile(t);
        tile_free(t);
    }
}

/* Every pair of codes of K and V, with one row, a block and more. */
static void every_format_equals_float64(void **state)
{
    static const uint8_t codes[8][2] = {{KVC_F16, 0},  {KVC_INT8, 0}, {KVC_INT8, 1}, {KVC_INT8, 2},
                                        {KVC_INT4, 0}, {KVC_INT4, 1}, {KVC_INT4, 2}, {KVC_INT6, 1}};
    /* From 128 channels on, tokens have several scales; the last counts for the rest of the row. */
    static const int sizes[3][2] = {{40, 72}, {200, 136}, {128, 256}};
    (void)state;
    for (int i = 0; i < 56 * 4 * 3; i++) {
        const uint8_t *k = codes[i % 8], *v = codes[i / 8 % 7];
        const int d_k = sizes[i / 224][0], d_v = sizes[i / 224][1];
        struct test_tile *t = tile_new(d_k, d_v, (const uint32_t[]){1, 2, 3, 7}[i / 56 % 4], 1, 0);
        edge_free(t->page[0].data, t->page[0].layout.n_bytes);
        const struct test_page old = t->page[0];
        uint64_t seen = 0;
        for (uint32_t r = 0; r < t->tile.n_rows; r++)
            seen |= old.mask[r];
        t->page[0] = sealed_page(d_k, d_v, k[0], k[1], v[0], v[1], old.n_rows, seen);
        memcpy(t->page[0].mask, old.mask, sizeof(old.mask));
        random_bias(&t->page[0], seen);
        tile_point(t);
        check_tile(t);
        tile_free(t);
    }
}

/* Page p of a tile becomes a whole sealed one, all of which every row sees. */
static struct test_page *seal_whole(struct test_tile *t, uint32_t p, int k, int k_scale, int v,
                                    int v_scale)
{
    struct test_page *page = &t->page[p];
    const int d_k = page->layout.d_k, d_v = page->layout.d_v;
    edge_free(page->data, page->layout.n_bytes);
    *page = sealed_page(d_k, d_v, k, k_scale, v, v_scale, 64, ~UINT64_C(0));
    memset(page->mask, 0xff, sizeof(page->mask));
    return page;
}

/* Values of a page: 100 (INT8) or 7 codes of 1 / 128, but of the first token only in channel 0. */
static void level_values(struct test_page *page, bool first)
{
    const struct kvc_page_layout *layout = &page->layout;
    const bool narrow = layout->v_format == KVC_INT4;
    uint16_t *scales = (uint16_t *)(void *)(page->data + layout->v_params);
    for (uint32_t i = 0; i < (layout->n_bytes - layout->v_params) / 2 / 64 * 64; i++)
        scales[i] = 0x2000;
    for (uint32_t c = 0; c < layout->d8_v; c++) {
        uint8_t *line = page->data + layout->v_codes + (size_t)c * layout->v_stride;
        memset(line, narrow ? 0xff : 228, layout->v_stride);
        if (first && c > 0)
            line[0] = narrow ? 0xf8 : 128;
    }
}

/* One token outweighs 255 others, of which none is half a step of 16 bits, but which are all that
 * most channels have. */
static void small_weights_beside_a_large_one_count(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        const int v = i % 2 ? KVC_INT4 : KVC_INT8, d = i / 2 % 2 ? 64 : 128;
        struct test_tile *t = tile_new(d, d, i / 4 ? 5 : 1, 4, 0);
        for (uint32_t p = 0; p < 4; p++) {
            struct test_page *page =
                seal_whole(t, p, KVC_INT8, KVC_SCALE_TOKEN, v, KVC_SCALE_TOKEN);
            level_values(page, p == 0);
            page->biased = true;
            for (int c = 0; c < KVC_PAGE_ROWS; c++)
                page->bias[c] = p + (uint32_t)c ? -11.3f : 0;
        }
        memset(t->q, 0, t->q_size);
        tile_point(t);
        check_tile(t);
        tile_free(t);
    }
}

/* The values of a page under HEAD: zeros in channel 0 and, if blank, in all. */
static void set_zeros(struct test_page *page, bool blank)
{
    const struct kvc_page_layout *layout = &page->layout;
    const size_t n = blank ? layout->d8_v : 1;
    memset(page->data + layout->v_codes, layout->v_format == KVC_INT4 ? 0x88 : 128,
           n * layout->v_stride);
    if (blank)
        memcpy(page->data + layout->v_params, &(float){1e3f}, sizeof(float));
}

static void zeros_of_a_large_scale_cost_nothing(void **state)
{
    static float out[ROWS * MAX_D];
    float lse[ROWS];
    (void)state;
    for (int i = 0; i < 8; i++) {
        const int v = i % 2 ? KVC_INT4 : KVC_INT8, d = i / 2 % 2 ? 64 : 128;
        struct test_tile *t = tile_new(d, d, i / 4 ? 5 : 1, 4, 0);
        for (uint32_t p = 0; p < 4; p++)
            set_zeros(seal_whole(t, p, KVC_INT8, KVC_SCALE_TOKEN, v, KVC_SCALE_HEAD), p == 1);
        tile_point(t);
        check_tile(t);
        t->tile.exact = false;
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            attend(*k, t, out, lse);
            for (uint32_t row = 0; row < t->tile.n_rows; row++)
                assert_true(out[(size_t)row * MAX_D] == 0);
        }
        tile_free(t);
    }
}

/* The largest element of a query meets keys that are 0 there: the others decide alone. */
static void a_peak_in_a_query_costs_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        const int k = (const int[]){KVC_INT8, KVC_INT6, KVC_INT4}[i % 3], d = i / 3 % 2 ? 64 : 128;
        struct test_tile *t = tile_new(d, d, i / 6 ? 5 : 1, 3, 0);
        for (uint32_t p = 0; p < 3; p++) {
            struct test_page *page =
                seal_whole(t, p, k, KVC_SCALE_TOKEN, KVC_INT8, KVC_SCALE_TOKEN);
            for (uint32_t row = 0; row < 64; row++) {
                uint8_t *line = page->data + (size_t)row * page->layout.k_stride;
                line[0] = k == KVC_INT8 ? 128 : (uint8_t)((line[0] & 0xf0) | (k == KVC_INT4) << 3);
                if (k == KVC_INT6)
                    line[d / 2] = (uint8_t)((line[d / 2] & 0xfc) | 2);
            }
        }
        for (uint32_t row = 0; row < t->tile.n_rows; row++)
            t->q[(size_t)row * (size_t)d] = 3e5f;
        tile_point(t);
        check_tile(t);
        tile_free(t);
    }
}

/* Two pages of the same rows, one with a bias of ln 2: its rows weigh twice as much, and a softcap
 * that flattens all scores does not touch that. */
static void a_bias_comes_after_the_softcap(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct test_tile *t = tile_new(64, 32, 5, 2, (const float[]){0, 0.01f, 30}[i]);
        float out[5 * MAX_D], lse[5], mass[2][KVC_PAGE_ROWS];
        for (int p = 0; p < 2; p++) {
            edge_free(t->page[p].data, t->page[p].layout.n_bytes);
            seed = 40 + (uint64_t)i;
            t->page[p] = sealed_page(64, 32, KVC_INT8, KVC_SCALE_TOKEN, KVC_INT4, KVC_SCALE_TOKEN,
                                     50, ~UINT64_C(0));
            for (int r = 0; r < 5; r++)
                t->page[p].mask[r] = ~UINT64_C(0) >> r;
        }
        t->tile.exact = true;
        t->page[1].biased = true;
        for (int c = 0; c < KVC_PAGE_ROWS; c++)
            t->page[1].bias[c] = logf(2);
        tile_point(t);
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            attend(*k, t, out, lse);
            for (int r = 0; r < 5; r++) {
                const size_t at = (size_t)r * PAGES + t->attend[0].slot;
                const double plain =
                    (double)t->masses.l[at] * exp((double)t->masses.m[at] - (double)lse[r]);
                assert_true(fabs(plain - 1.0 / 3) <= 1e-5);
            }
            for (int of_parts = 0; of_parts < 2; of_parts++) {
                token_masses(*k, t, lse, of_parts, mass[0]);
                for (int c = 0; c < 50; c++)
                    assert_true(fabsf(mass[1][c] - 1 - 2 * (mass[0][c] - 1)) <= 1e-5f * mass[1][c]);
            }
        }
        tile_free(t);
    }
}

/* The second of two rows met NaN somewhere else: it adds nothing, here or in a second pass. */
static void rows_without_a_sum_add_no_mass(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct test_tile *t = tile_new(64, 64, 2, 4, 0);
        static float out[2 * MAX_D];
        float lse[2], mass[4 * KVC_PAGE_ROWS];
        struct truth truth;
        true_row(t, 0, &truth);
        t->tile.exact = true;
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            attend(*k, t, out, lse);
            lse[1] = i % 2 ? NAN : INFINITY;
            for (int of_parts = 0; of_parts < 2; of_parts++) {
                token_masses(*k, t, lse, of_parts, mass);
                for (int c = 0; c < 4 * KVC_PAGE_ROWS; c++)
                    assert_true(fabs((double)mass[c] - 1 -
                                     truth.weight[c / KVC_PAGE_ROWS][c % KVC_PAGE_ROWS]) <= 2e-5);
            }
        }
        tile_free(t);
    }
}

/* The row alone, as a tile of one: same bits. */
static void check_alone(const struct kvc_kernels *k, const struct test_tile *t, uint32_t row)
{
    const struct kvc_page_layout *layout = &t->page[0].layout;
    const size_t stride = kvc_attend_stride(layout->d_v);
    struct kvc_attend_page pages[PAGES];
    float m, l, page_m[PAGES], page_l[PAGES];
    const struct kvc_attend_masses masses = {.m = page_m, .l = page_l};
    struct kvc_attend_tile one = t->tile;
    for (uint32_t p = 0; p < one.n_pages; p++) {
        pages[p] = t->attend[p];
        pages[p].mask += row;
    }
    one.pages = pages;
    one.n_rows = 1;
    one.q += row * kvc_attend_stride(layout->d_k);
    one.shift = one.shift ? one.shift + row : NULL;
    one.m = &m;
    one.l = &l;
    one.masses = &masses;
    one.o = edge_new(stride * sizeof(float));
    k->attend_pages(NULL, &one);
    assert_memory_equal(&m, &t->tile.m[row], sizeof(m));
    assert_memory_equal(&l, &t->tile.l[row], sizeof(l));
    assert_memory_equal(one.o, t->tile.o + row * stride, layout->d_v * sizeof(float));
    assert_memory_equal(page_m, t->masses.m + (size_t)row * PAGES, sizeof(page_m));
    assert_memory_equal(page_l, t->masses.l + (size_t)row * PAGES, sizeof(page_l));
    edge_free(one.o, stride * sizeof(float));
}

static void rows_do_not_depend_on_each_other(void **state)
{
    static const int sizes[] = {8, 33, 64, 80, 128};
    (void)state;
    for (int i = 0; i < 40; i++) {
        const uint32_t n_rows = 2 + (uint32_t)rng_below(&seed, ROWS - 1);
        const int d_k = sizes[i % 5], d_v = sizes[i / 5 % 5];
        struct test_tile *t = tile_new(d_k, d_v, n_rows, 5, i % 2 ? 0.0f : 20.0f);
        /* The last query is NaN, and so is a token that only the last row sees. */
        t->q[(n_rows - 1) * kvc_attend_stride((size_t)d_k) + (size_t)d_k / 2] = NAN;
        struct test_page *page = &t->page[2];
        edge_free(page->data, page->layout.n_bytes);
        page->layout = kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, 64);
        page->n_rows = 64;
        page->data = open_page(&page->layout, 64, ~UINT64_C(1));
        for (uint32_t r = 0; r < n_rows; r++)
            page->mask[r] = r + 1 < n_rows ? page->mask[r] & ~UINT64_C(1) : 1;
        tile_point(t);
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            t->tile.exact = i % 4 / 2;
            (*k)->attend_pages(NULL, &t->tile);
            for (uint32_t r = 0; r < n_rows; r++) {
                if (r + 1 < n_rows)
                    check_alone(*k, t, r);
                assert_int_equal(isnan(t->tile.m[r]), r + 1 == n_rows);
                assert_int_equal(isnan(t->tile.l[r]), r + 1 == n_rows);
                assert_int_equal(isnan(t->tile.o[r * kvc_attend_stride((size_t)d_v)]),
                                 r + 1 == n_rows);
            }
        }
        tile_free(t);
    }
}

/* Scores of +-200 in either order: neither weights nor their rescaling may overflow. */
static void distant_scores_do_not_overflow(void **state)
{
    (void)state;
    for (int first = 0; first < 2; first++) {
        struct test_tile *t = tile_new(1, 1, 1, 2, 0);
        for (int p = 0; p < 2; p++) {
            edge_free(t->page[p].data, t->page[p].layout.n_bytes);
            t->page[p] = sealed_page(1, 1, KVC_F16, 0, KVC_F16, 0, 64, ~UINT64_C(0));
            t->page[p].mask[0] = ~UINT64_C(0);
            for (int i = 0; i < KVC_PAGE_ROWS; i++) {
                uint16_t *k = (uint16_t *)(void *)t->page[p].data + (size_t)i * 8;
                uint16_t *v = (uint16_t *)(void *)(t->page[p].data + t->page[p].layout.v_codes);
                k[0] = p == first ? 0x4000 : 0xc000; /* +-2 */
                v[i] = p == first ? 0x3c00 : 0xfbff; /* 1, -65504 */
            }
        }
        tile_point(t);
        t->q[0] = 100;
        t->tile.shift = NULL;
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            float out[MAX_D], lse;
            attend(*k, t, out, &lse);
            assert_true(out[0] == 1);
            assert_true(fabsf(lse - 200 - logf(64)) <= 1e-4f);
        }
        tile_free(t);
    }
}

/* 32768 tokens with nearly equal weights, merged from tiles: errors must not add up. */
static void long_contexts_stay_exact(void **state)
{
    enum { D = 128, N_TILES = 32 };
    static struct test_tile *tiles[N_TILES];
    static struct truth truth;
    (void)state;
    double out[D] = {0}, sum = 0;
    for (int i = 0; i < N_TILES; i++) {
        struct test_tile *t = tiles[i] = tile_new(D, D, 1, PAGES, 0);
        for (uint32_t p = 0; p < PAGES; p++) {
            edge_free(t->page[p].data, t->page[p].layout.n_bytes);
            t->page[p] = sealed_page(D, D, KVC_INT8, KVC_SCALE_TOKEN, i % 2 ? KVC_INT8 : KVC_INT4,
                                     KVC_SCALE_TOKEN, 64, ~UINT64_C(0));
            t->page[p].mask[0] = ~UINT64_C(0);
        }
        tile_point(t);
        for (int c = 0; c < D; c++)
            t->q[c] = 0.02f * (float)(c % 5);
        true_row(t, 0, &truth);
        sum += exp(truth.lse);
        for (int c = 0; c < D; c++)
            out[c] += truth.out[c] * exp(truth.lse);
    }
    for (int c = 0; c < D; c++)
        out[c] /= sum;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        struct kvc_attend_part all = {0};
        float got[D], lse;
        for (int i = 0; i < N_TILES; i++) {
            const struct kvc_attend_tile *tile = &tiles[i]->tile;
            const struct kvc_attend_part part = {.m = tile->m, .l = tile->l, .o = tile->o};
            (*k)->attend_pages(NULL, tile);
            if (i == 0)
                all = part;
            else
                assert_int_equal((*k)->merge_parts(NULL, &all, &part, 1, D), KVC_OK);
        }
        (*k)->finish_rows(NULL, &all, 1, D, got, KVC_DTYPE_F32, D, &lse);
        assert_true(fabs((double)lse - log(sum)) <= 1e-5);
        print_message("%s: 32768 tokens, error %.1e\n", (*k)->name, relative_error(got, out, D));
        assert_true(relative_error(got, out, D) <= 2e-5);
    }
    for (int i = 0; i < N_TILES; i++)
        tile_free(tiles[i]);
}

/* Channels of 64 and -64 with a spread of 2, as keys without a norm have them: what their minima
 * and scales are folded into must not lose what tells the tokens apart. */
static void channel_keys_far_from_zero_stay_exact(void **state)
{
    enum { D = 64 };
    static struct truth truth;
    static float out[ROWS * MAX_D];
    float lse[ROWS];
    (void)state;
    seed = 64; /* the bounds leave little room: always the same pages */
    for (int i = 0; i < 8; i++) {
        const uint32_t n_rows = (const uint32_t[]){1, 2, 4, ROWS}[i / 2];
        struct test_tile *t = tile_new(D, D, n_rows, 4, 0);
        for (uint32_t p = 0; p < 4; p++) {
            struct test_page *page = seal_whole(t, p, i % 2 ? KVC_INT8 : KVC_INT4,
                                                KVC_SCALE_CHANNEL, KVC_INT8, KVC_SCALE_TOKEN);
            uint16_t *minima = (uint16_t *)(void *)(page->data + page->layout.k_params) + D;
            for (int c = 0; c < D; c += 8)
                minima[c] = c % 16 ? 0x5400 : 0xd400; /* +-64 */
        }
        tile_point(t);
        t->tile.exact = true;
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            attend(*k, t, out, lse);
            for (uint32_t row = 0; row < n_rows; row++) {
                true_row(t, row, &truth);
                assert_true(relative_error(out + (size_t)row * MAX_D, truth.out, D) <= 2e-5);
                assert_true(fabs((double)lse[row] - truth.lse) <= 1e-5 * (1 + fabs(truth.lse)));
            }
        }
        tile_free(t);
    }
}

static double now(void)
{
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* What the pages of a measurement hold; V has token scales. */
struct bench_case {
    const char *name;
    int k_format, k_scale, v_format;
};

/* ns a page of K and V together, head size 128, pages in cache. */
static void bench(const struct kvc_kernels *k, const struct bench_case *c, uint32_t n_rows)
{
    struct test_tile *t = tile_new(128, 128, n_rows, PAGES, 0);
    double best = 1e30;
    for (uint32_t p = 0; p < PAGES; p++)
        seal_whole(t, p, c->k_format, c->k_scale, c->v_format, KVC_SCALE_TOKEN);
    tile_point(t);
    for (int i = 0; i < 300 && (i < 3 || k != &kvc_kernels_ref); i++) {
        const double start = now();
        k->attend_pages(NULL, &t->tile);
        best = fmin(best, now() - start);
    }
    printf("%-7s attend_pages %-12s rows %2u: %9.0f ns a page\n", k->name, c->name, n_rows,
           best / PAGES);
    tile_free(t);
}

static void bench_all(void)
{
    static const struct bench_case cases[] = {
        {"f16", KVC_F16, 0, KVC_F16},
        {"int8", KVC_INT8, KVC_SCALE_TOKEN, KVC_INT8},
        {"int8-channel", KVC_INT8, KVC_SCALE_CHANNEL, KVC_INT8},
        {"k8v4", KVC_INT8, KVC_SCALE_TOKEN, KVC_INT4},
        {"k6v4", KVC_INT6, KVC_SCALE_TOKEN, KVC_INT4},
        {"int4", KVC_INT4, KVC_SCALE_TOKEN, KVC_INT4},
        {"int4-raw", KVC_INT4, KVC_SCALE_CHANNEL, KVC_INT4},
    };
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (uint32_t n_rows = 1; n_rows <= ROWS; n_rows *= 2)
            for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
                bench(*k, &cases[i], n_rows);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_equals_float64),
        cmocka_unit_test(every_format_equals_float64),
        cmocka_unit_test(small_weights_beside_a_large_one_count),
        cmocka_unit_test(zeros_of_a_large_scale_cost_nothing),
        cmocka_unit_test(a_peak_in_a_query_costs_nothing),
        cmocka_unit_test(a_bias_comes_after_the_softcap),
        cmocka_unit_test(rows_without_a_sum_add_no_mass),
        cmocka_unit_test(rows_do_not_depend_on_each_other),
        cmocka_unit_test(distant_scores_do_not_overflow),
        cmocka_unit_test(long_contexts_stay_exact),
        cmocka_unit_test(channel_keys_far_from_zero_stay_exact),
    };
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        bench_all();
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
