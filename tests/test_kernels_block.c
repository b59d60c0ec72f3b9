/* Attention of many query rows: every table, ref included, against float64 over the rows that are
 * stored. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/truth.h"

/* A tile of many rows, with the memory that attend_block asks for. */
static struct test_tile *block_new(int d_k, int d_v, uint32_t n_rows, uint32_t n_pages,
                                   float softcap)
{
    struct test_tile *t = tile_new(d_k, d_v, n_rows, n_pages, softcap);
    edge_free(t->tile.o, t->o_size);
    edge_free(t->tile.work, t->w_size);
    t->o_size = kvc_attend_stride(n_rows) * kvc_attend_stride((size_t)d_v) * sizeof(*t->tile.o);
    t->w_size = kvc_block_work_size((size_t)d_k, (size_t)d_v, n_rows) * sizeof(*t->tile.work);
    t->tile.o = edge_new(t->o_size);
    t->tile.work = edge_new(t->w_size);
    memset(t->tile.work, 0xff, t->w_size);
    return t;
}

/* Another page in the place of one, with its masks. */
static void replace(struct test_tile *t, uint32_t p, struct test_page page)
{
    edge_free(t->page[p].data, t->page[p].layout.n_bytes);
    memcpy(page.mask, t->page[p].mask, sizeof(page.mask));
    t->page[p] = page;
}

static uint64_t seen_by_any(const struct test_tile *t, uint32_t p)
{
    uint64_t seen = 0;
    for (uint32_t r = 0; r < t->tile.n_rows; r++)
        seen |= t->page[p].mask[r];
    return seen;
}

static void attend(const struct kvc_kernels *k, const struct test_tile *t, float *out, float *lse)
{
    const struct kvc_attend_part part = {.m = t->tile.m, .l = t->tile.l, .o = t->tile.o};
    assert_int_equal(k->attend_block(NULL, &t->tile), KVC_OK);
    assert_int_equal(k->finish_rows(NULL, &part, t->tile.n_rows, t->page[0].layout.d_v, out,
                                    KVC_DTYPE_F32, MAX_D, lse),
                     KVC_OK);
}

static void check_row(const struct test_tile *t, uint32_t row, const struct truth *truth,
                      const float *out, float lse, double *worst)
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
    /* The largest of a few outputs may be what is left of values that cancel. */
    const double error = relative_error(out, truth->out, d_v) * (d_v < 8 ? 0.1 : 1);
    *worst = fmax(*worst, error);
    assert_true(error <= 2e-5);
    assert_true(fabs((double)lse - truth->lse) <= 1e-5 * (1 + fabs(truth->lse)));
}

static void check_block(const struct test_tile *t, double *worst)
{
    static struct truth truth[MAX_ROWS];
    static float out[MAX_ROWS * MAX_D];
    float lse[MAX_ROWS];
    for (uint32_t row = 0; row < t->tile.n_rows; row++)
        true_row(t, row, &truth[row]);
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        attend(*k, t, out, lse);
        for (uint32_t row = 0; row < t->tile.n_rows; row++)
            check_row(t, row, &truth[row], out + (size_t)row * MAX_D, lse[row], worst);
    }
}

/* Random pages and masks: holes, pages that some rows or none see, strips, open pages; what nobody
 * sees is NaN. Every number of rows. */
static void blocks_equal_float64(void **state)
{
    static const int sizes[] = {64, 80, 96, 112, 128, 256, 512};
    double worst = 0;
    (void)state;
    for (int i = 0; i < 160; i++) {
        const bool big = i >= 120;
        const int d_k = big ? sizes[rng_below(&seed, 7)] : 1 + i % 100;
        const int d_v = big ? sizes[rng_below(&seed, 7)] : 1 + (int)rng_below(&seed, 80);
        const uint32_t n_rows = 1 + (uint32_t)(i * 7 % MAX_ROWS);
        const uint32_t n_pages = 1 + (uint32_t)rng_below(&seed, big ? 3 : 6);
        struct test_tile *t =
            block_new(d_k, d_v, n_rows, n_pages, (const float[]){0, 2, 30}[i % 3]);
        check_block(t, &worst);
        tile_free(t);
    }
    print_message("largest error %.2g of the largest output\n", worst);
}

/* Every pair of codes of K and V, with a vector of rows, one that is not full, and all. */
static void every_format_equals_float64(void **state)
{
    static const uint8_t codes[8][2] = {{KVC_F16, 0},  {KVC_INT8, 0}, {KVC_INT8, 1}, {KVC_INT8, 2},
                                        {KVC_INT4, 0}, {KVC_INT4, 1}, {KVC_INT4, 2}, {KVC_INT6, 1}};
    static const int sizes[3][2] = {{40, 72}, {200, 136}, {128, 256}};
    double worst = 0;
    (void)state;
    for (int i = 0; i < 56 * 3; i++) {
        const uint8_t *k = codes[i % 8], *v = codes[i / 8 % 7];
        const int d_k = sizes[i / 56][0], d_v = sizes[i / 56][1];
        const uint32_t n_rows = (const uint32_t[]){16, 21, 39, MAX_ROWS}[(i + i / 8) % 4];
        struct test_tile *t = block_new(d_k, d_v, n_rows, 1, 0);
        const uint64_t seen = seen_by_any(t, 0);
        replace(t, 0, sealed_page(d_k, d_v, k[0], k[1], v[0], v[1], t->page[0].n_rows, seen));
        random_bias(&t->page[0], seen);
        tile_point(t);
        check_block(t, &worst);
        tile_free(t);
    }
    print_message("largest error %.2g of the largest output\n", worst);
}

/* Rows of one head that come token by token, four heads a token: each sees one token more. */
static void causal_blocks_equal_float64(void **state)
{
    double worst = 0;
    (void)state;
    for (uint32_t first = 1; first < 3 * KVC_PAGE_ROWS; first += 9) {
        struct test_tile *t = block_new(64, 64, MAX_ROWS, 4, 0);
        for (uint32_t p = 0; p < 4; p++) {
            for (uint32_t r = 0; r < MAX_ROWS; r++) {
                const uint32_t end = first + r / 4, from = p * KVC_PAGE_ROWS;
                t->page[p].mask[r] = end <= from ? 0
                                     : end >= from + KVC_PAGE_ROWS
                                         ? ~UINT64_C(0)
                                         : (UINT64_C(1) << (end - from)) - 1;
            }
            replace(t, p,
                    sealed_page(64, 64, KVC_INT8, KVC_SCALE_TOKEN, KVC_F16, 0, KVC_PAGE_ROWS,
                                seen_by_any(t, p)));
        }
        tile_point(t);
        check_block(t, &worst);
        tile_free(t);
    }
    print_message("largest error %.2g of the largest output\n", worst);
}

/* Rows first ... first + n - 1 as a block of their own: same bits. */
static void check_part(const struct kvc_kernels *k, const struct test_tile *t, uint32_t first,
                       uint32_t n)
{
    const struct kvc_page_layout *layout = &t->page[0].layout;
    const size_t stride = kvc_attend_stride(layout->d_v);
    const size_t size = kvc_attend_stride(n) * stride * sizeof(float);
    struct kvc_attend_page pages[PAGES];
    float m[MAX_ROWS], l[MAX_ROWS];
    struct kvc_attend_tile part = t->tile;
    for (uint32_t p = 0; p < part.n_pages; p++) {
        pages[p] = t->attend[p];
        pages[p].mask += first;
    }
    part.pages = pages;
    part.n_rows = n;
    part.q += first * kvc_attend_stride(layout->d_k);
    part.shift = part.shift ? part.shift + first : NULL;
    part.m = m;
    part.l = l;
    part.o = edge_new(size);
    k->attend_block(NULL, &part);
    assert_memory_equal(m, t->tile.m + first, n * sizeof(float));
    assert_memory_equal(l, t->tile.l + first, n * sizeof(float));
    for (uint32_t r = 0; r < n; r++)
        assert_memory_equal(part.o + r * stride, t->tile.o + (first + r) * stride,
                            layout->d_v * sizeof(float));
    edge_free(part.o, size);
}

/* The last query is NaN, and so is a token that only the last row sees. */
static void rows_do_not_depend_on_each_other(void **state)
{
    static const int sizes[] = {8, 33, 64, 80, 128};
    (void)state;
    for (int i = 0; i < 50; i++) {
        const uint32_t n_rows = 2 + (uint32_t)rng_below(&seed, MAX_ROWS - 1);
        const int d_k = sizes[i % 5], d_v = sizes[i / 5 % 5];
        struct test_tile *t = block_new(d_k, d_v, n_rows, 5, i % 2 ? 0.0f : 20.0f);
        struct test_page page = {.n_rows = 64};
        t->q[(n_rows - 1) * kvc_attend_stride((size_t)d_k) + (size_t)d_k / 2] = NAN;
        page.layout = kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, 64);
        page.data = open_page(&page.layout, 64, ~UINT64_C(1));
        replace(t, 2, page);
        for (uint32_t r = 0; r < n_rows; r++)
            t->page[2].mask[r] =
                r + 1 < n_rows ? t->page[2].mask[r] & ~UINT64_C(1) : UINT64_C(1) | 1 << r % 8;
        tile_point(t);
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            (*k)->attend_block(NULL, &t->tile);
            for (uint32_t r = 0; r < n_rows; r++) {
                assert_int_equal(isnan(t->tile.m[r]), r + 1 == n_rows);
                assert_int_equal(isnan(t->tile.l[r]), r + 1 == n_rows);
                for (size_t c = 0; c < (size_t)d_v; c++)
                    assert_int_equal(isnan(t->tile.o[r * kvc_attend_stride((size_t)d_v) + c]),
                                     r + 1 == n_rows);
            }
            for (int j = 0; j < 8; j++) {
                const uint32_t first = (uint32_t)rng_below(&seed, n_rows - 1);
                check_part(*k, t, first, 1 + (uint32_t)rng_below(&seed, n_rows - 1 - first));
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
        struct test_tile *t = block_new(1, 1, 33, 2, 0);
        for (uint32_t p = 0; p < 2; p++) {
            memset(t->page[p].mask, 0xff, sizeof(t->page[p].mask));
            replace(t, p, sealed_page(1, 1, KVC_F16, 0, KVC_F16, 0, 64, ~UINT64_C(0)));
            for (size_t i = 0; i < KVC_PAGE_ROWS; i++) {
                uint16_t *k = (uint16_t *)(void *)t->page[p].data + i * 8;
                uint16_t *v = (uint16_t *)(void *)(t->page[p].data + t->page[p].layout.v_codes);
                k[0] = (int)p == first ? 0x4000 : 0xc000; /* +-2 */
                v[i] = (int)p == first ? 0x3c00 : 0xfbff; /* 1, -65504 */
            }
        }
        tile_point(t);
        for (size_t r = 0; r < 33; r++)
            t->q[r * 16] = 100;
        t->tile.shift = NULL;
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            static float out[33 * MAX_D];
            float lse[33];
            attend(*k, t, out, lse);
            for (size_t r = 0; r < 33; r++) {
                assert_true(out[r * MAX_D] == 1);
                assert_true(fabsf(lse[r] - 200 - logf(64)) <= 1e-4f);
            }
        }
        tile_free(t);
    }
}

/* Channels of 32 and -32 with a spread of 2: what their minima are folded into must not lose what
 * tells the tokens apart. */
static void channel_keys_far_from_zero_stay_exact(void **state)
{
    enum { D = 64, N = 20 };
    double worst = 0;
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct test_tile *t = block_new(D, D, N, 4, 0);
        for (uint32_t p = 0; p < 4; p++) {
            memset(t->page[p].mask, 0xff, sizeof(t->page[p].mask));
            replace(t, p,
                    sealed_page(D, D, i % 2 ? KVC_INT8 : KVC_INT4, KVC_SCALE_CHANNEL, KVC_INT8,
                                KVC_SCALE_TOKEN, 64, ~UINT64_C(0)));
            uint16_t *minima =
                (uint16_t *)(void *)(t->page[p].data + t->page[p].layout.k_params) + D;
            for (size_t c = 0; c < D; c += 8)
                minima[c] = c % 16 ? 0x5000 : 0xd000; /* +-32 */
        }
        tile_point(t);
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            static float out[N * MAX_D];
            static struct truth truth;
            float lse[N];
            attend(*k, t, out, lse);
            for (uint32_t row = 0; row < N; row++) {
                true_row(t, row, &truth);
                worst = fmax(worst, relative_error(out + (size_t)row * MAX_D, truth.out, D));
                assert_true(relative_error(out + (size_t)row * MAX_D, truth.out, D) <= 2e-5);
                assert_true(fabs((double)lse[row] - truth.lse) <= 1e-5 * (1 + fabs(truth.lse)));
            }
        }
        tile_free(t);
    }
    print_message("largest error %.2g of the largest output\n", worst);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_equal_float64),
        cmocka_unit_test(every_format_equals_float64),
        cmocka_unit_test(causal_blocks_equal_float64),
        cmocka_unit_test(rows_do_not_depend_on_each_other),
        cmocka_unit_test(distant_scores_do_not_overflow),
        cmocka_unit_test(channel_keys_far_from_zero_stay_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
