/* The kernel that transforms rows: its definition against a matrix in double, every table against
 * the reference bit by bit, and the shift of attention. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "kernels/half.h"
#include "kernels/kernels.h"
#include "support/edge.h"
#include "support/rng.h"

enum { MAX_D = KVC_MAX_HEAD_DIM };

static uint64_t seed = 1;

static void fill(float *x, size_t n, float from, float to)
{
    for (size_t i = 0; i < n; i++)
        x[i] = from + (to - from) * (rng_unit(&seed) + 1.0f) / 2.0f;
}

/* docs/formats.md, section 4. */
static void a_row_computed_by_hand_comes_out(void **state)
{
    const float x[4] = {1, 2, 3, 4}, mean[4] = {1, 1, 1, 1}, inverse[4] = {2, 2, 2, 2};
    const struct kvc_rows rows = {x, KVC_DTYPE_F32, 4, 1, 4};
    const struct kvc_row_transform h = {.block = 4};
    const struct kvc_row_transform all = {
        .sub = mean, .mul = inverse, .block = 2, .mul_after = mean, .add_after = mean};
    float out[4];

    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        assert_int_equal((*k)->transform_rows(NULL, &rows, &h, out, 4, 4), KVC_OK);
        assert_true(out[0] == 5 && out[1] == -1 && out[2] == -2 && out[3] == 0);
        /* (0, 2) (4, 6), pairs: (2, -2) (10, -2) times float(1 / sqrt 2), plus 1 */
        const float half = 0.70710678f;
        assert_int_equal((*k)->transform_rows(NULL, &rows, &all, out, 4, 4), KVC_OK);
        assert_true(out[0] == 2 * half + 1 && out[1] == -2 * half + 1);
        assert_true(out[2] == 10 * half + 1 && out[3] == -2 * half + 1);
    }
}

/* H[i][j] = (-1)^popcount(i & j) / sqrt(block), in double. */
static void the_definition_is_the_matrix(void **state)
{
    (void)state;
    for (uint32_t block = 1; block <= MAX_D; block *= 2)
        for (uint32_t d = block; d <= 3 * block && d <= MAX_D; d += block) {
            float x[MAX_D], sub[MAX_D], mul[MAX_D], after[MAX_D], add[MAX_D], out[MAX_D];
            fill(x, d, -4, 4);
            fill(sub, d, -1, 1);
            fill(mul, d, 0.1f, 3);
            fill(after, d, 0.1f, 3);
            fill(add, d, -1, 1);
            const struct kvc_rows rows = {x, KVC_DTYPE_F32, d, 1, d};
            const struct kvc_row_transform t = {sub, mul, block, after, add};
            assert_int_equal(kvc_transform_rows_ref(NULL, &rows, &t, out, d, d), KVC_OK);
            for (uint32_t i = 0; i < d; i++) {
                const uint32_t first = i / block * block;
                double want = 0.0, size = 0.0;
                for (uint32_t j = 0; j < block; j++) {
                    const double y =
                        ((double)x[first + j] - (double)sub[first + j]) * (double)mul[first + j];
                    want += __builtin_popcount((i - first) & j) % 2 ? -y : y;
                    size += fabs(y);
                }
                want = want / sqrt(block) * (double)after[i] + (double)add[i];
                assert_true(fabs((double)out[i] - want) <= 1e-6 * (size + 2.0));
            }
        }
}

/* A row with its own end of the page, so that a read or write beyond it is seen. */
struct row_case {
    kvc_dtype dtype;
    size_t d, stride, n_padded;
    uint32_t block;
    unsigned given; /* bit i: vector i of the transform */
};

static void expect_as_ref(const struct kvc_kernels *k, const struct row_case *c)
{
    enum { N = 3 };
    const size_t element = c->dtype == KVC_DTYPE_F32 ? 4 : 2;
    const size_t size = ((N - 1) * c->stride + c->d) * element;
    const size_t out_size = ((N - 1) * (c->n_padded + 2) + c->n_padded) * sizeof(float);
    uint8_t *src = edge_new(size), *want = edge_new(out_size), *got = edge_new(out_size);
    static _Alignas(64) float vectors[4][MAX_D + 16];

    for (size_t i = 0; i < size / element; i++) {
        const float x = 8 * rng_unit(&seed);
        const uint16_t half = kvc_half_from_float(x), bf16 = (uint16_t)(kvc_float_bits(x) >> 16);
        if (c->dtype == KVC_DTYPE_F32)
            memcpy(src + i * element, &x, element);
        else
            memcpy(src + i * element, c->dtype == KVC_DTYPE_F16 ? &half : &bf16, element);
    }
    for (int i = 0; i < 4; i++)
        fill(vectors[i], MAX_D, 0.1f, 2);
    memset(want, 0xa5, out_size);
    memset(got, 0xa5, out_size);
    const struct kvc_rows rows = {src, c->dtype, c->stride, N, c->d};
    const struct kvc_row_transform t = {
        .sub = c->given & 1 ? vectors[0] : NULL,
        .mul = c->given & 2 ? vectors[1] : NULL,
        .block = c->block,
        .mul_after = c->given & 4 ? vectors[2] : NULL,
        .add_after = c->given & 8 ? vectors[3] : NULL,
    };
    kvc_transform_rows_ref(NULL, &rows, &t, (float *)(void *)want, c->n_padded + 2, c->n_padded);
    assert_int_equal(
        k->transform_rows(NULL, &rows, &t, (float *)(void *)got, c->n_padded + 2, c->n_padded),
        KVC_OK);
    assert_memory_equal(want, got, out_size);
    edge_free(src, size);
    edge_free(want, out_size);
    edge_free(got, out_size);
}

static void every_table_gives_the_bits_of_the_reference(void **state)
{
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t d = 1; d <= 300; d++) {
            const size_t largest = d & -d;
            for (size_t block = 1; block <= largest; block *= 2) {
                const struct row_case c = {.dtype = (kvc_dtype)rng_below(&seed, 3),
                                           .d = d,
                                           .stride = d + rng_below(&seed, 5),
                                           .n_padded = d + rng_below(&seed, 9),
                                           .block = (uint32_t)block,
                                           .given = (unsigned)rng_below(&seed, 16)};
                expect_as_ref(*k, &c);
            }
        }
}

/* K, Q and the rows read back: dst is src. */
static void rows_are_transformed_in_place(void **state)
{
    enum { D = 96, N = 5, STRIDE = 112 };
    float x[N * STRIDE], want[N * STRIDE];
    const struct kvc_row_transform h = {.block = 32};

    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        fill(x, sizeof(x) / sizeof(*x), -1, 1);
        memcpy(want, x, sizeof(x));
        const struct kvc_rows rows = {x, KVC_DTYPE_F32, STRIDE, N, D};
        const struct kvc_rows from = {want, KVC_DTYPE_F32, STRIDE, N, D};
        kvc_transform_rows_ref(NULL, &from, &h, want, STRIDE, D);
        assert_int_equal((*k)->transform_rows(NULL, &rows, &h, x, STRIDE, D), KVC_OK);
        assert_memory_equal(x, want, sizeof(x));
    }
}

static void a_second_rotation_undoes_the_first(void **state)
{
    enum { D = 256 };
    float x[D], y[D];
    const struct kvc_row_transform h = {.block = D};
    const struct kvc_rows rows = {y, KVC_DTYPE_F32, D, 1, D};

    (void)state;
    fill(x, D, -1, 1);
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        memcpy(y, x, sizeof(x));
        for (int i = 0; i < 2; i++)
            assert_int_equal((*k)->transform_rows(NULL, &rows, &h, y, D, D), KVC_OK);
        for (int i = 0; i < D; i++)
            assert_true(fabsf(y[i] - x[i]) <= 1e-6f);
    }
}

/* ---- the shift of attention ---- */

enum { ROWS = 5, D_K = 24, D_V = 16, KEYS = 40 };

/* A page of F16 rows and queries of a tile. */
struct scene {
    struct kvc_page_layout layout;
    uint8_t page[16384];
    float q[ROWS * 32], shift[ROWS], bias[KVC_PAGE_ROWS];
    uint64_t mask[ROWS];
};

static void make_scene(struct scene *s)
{
    s->layout = kvc_page_layout_make(D_K, D_V, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
    memset(s->q, 0, sizeof(s->q));
    for (size_t i = 0; i < sizeof(s->page) / 2; i++) {
        const uint16_t half = kvc_half_from_float(rng_unit(&seed));
        memcpy(s->page + 2 * i, &half, sizeof(half));
    }
    for (size_t r = 0; r < ROWS; r++) {
        fill(s->q + r * 32, D_K, -3, 3);
        s->mask[r] = rng_next(&seed) & ((UINT64_C(1) << KEYS) - 1);
    }
    fill(s->shift, ROWS, -6, 6);
    fill(s->bias, KVC_PAGE_ROWS, -1, 1);
}

/* The logit of a key for a query row, in double. */
static double logit(const struct scene *s, size_t r, uint32_t t, float scale, float softcap)
{
    double dot = 0.0;
    for (size_t c = 0; c < D_K; c++) {
        uint16_t half;
        memcpy(&half, s->page + (size_t)t * s->layout.k_stride + 2 * c, sizeof(half));
        dot += (double)s->q[r * 32 + c] * (double)kvc_half_to_float(half);
    }
    double x = dot * (double)scale + (double)s->shift[r];
    if (softcap > 0.0f)
        x = (double)softcap * tanh(x / (double)softcap);
    return x + (double)s->bias[t];
}

static void the_shift_is_added_before_the_softcap(void **state)
{
    static struct scene s;
    static float work[1 << 14], o[ROWS * 16];

    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (int capped = 0; capped < 2; capped++) {
            float m[ROWS], l[ROWS], mass[KVC_PAGE_ROWS] = {0}, lse[ROWS];
            double want_mass[KVC_PAGE_ROWS] = {0};
            make_scene(&s);
            const struct kvc_attend_page page = {.data = s.page,
                                                 .layout = &s.layout,
                                                 .n_rows = KEYS,
                                                 .mask = s.mask,
                                                 .bias = s.bias};
            const struct kvc_attend_tile tile = {.pages = &page,
                                                 .n_pages = 1,
                                                 .n_rows = ROWS,
                                                 .q = s.q,
                                                 .scale = 0.3f,
                                                 .softcap = capped ? 5.0f : 0.0f,
                                                 .shift = s.shift,
                                                 .m = m,
                                                 .l = l,
                                                 .o = o,
                                                 .work = work};
            assert_int_equal((*k)->attend_pages(NULL, &tile), KVC_OK);
            for (size_t r = 0; r < ROWS; r++) {
                double sum = 0.0;
                for (uint32_t t = 0; t < KEYS; t++)
                    if (s.mask[r] >> t & 1)
                        sum += exp(logit(&s, r, t, tile.scale, tile.softcap));
                lse[r] = (float)log(sum);
                assert_true(fabs((double)m[r] + log((double)l[r]) - log(sum)) < 1e-5);
                for (uint32_t t = 0; t < KEYS; t++)
                    if (s.mask[r] >> t & 1)
                        want_mass[t] += exp(logit(&s, r, t, tile.scale, tile.softcap)) / sum;
            }
            assert_int_equal((*k)->mass_pages(NULL, &tile, lse, mass), KVC_OK);
            for (uint32_t t = 0; t < KEYS; t++)
                assert_true(fabs((double)mass[t] - want_mass[t]) < 1e-5);
        }
}

static double now(void)
{
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* ns a row of K on its way into a cache: less the mean, over the scale, rotated. */
static void bench(const struct kvc_kernels *k, size_t d)
{
    enum { N = 64 };
    static float x[N * MAX_D], out[N * MAX_D], mean[MAX_D], inverse[MAX_D];
    const struct kvc_rows rows = {x, KVC_DTYPE_F32, d, N, d};
    const struct kvc_row_transform t = {.sub = mean, .mul = inverse, .block = (uint32_t)(d & -d)};
    double best = 1e30;
    fill(x, N * d, -1, 1);
    fill(mean, d, -1, 1);
    fill(inverse, d, 0.1f, 3);
    for (int i = 0; i < 2000; i++) {
        const double start = now();
        k->transform_rows(NULL, &rows, &t, out, d, d);
        best = fmin(best, now() - start);
    }
    printf("%-7s transform_rows d %3zu: %6.1f ns a row\n", k->name, d, best / N);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_row_computed_by_hand_comes_out),
        cmocka_unit_test(the_definition_is_the_matrix),
        cmocka_unit_test(every_table_gives_the_bits_of_the_reference),
        cmocka_unit_test(rows_are_transformed_in_place),
        cmocka_unit_test(a_second_rotation_undoes_the_first),
        cmocka_unit_test(the_shift_is_added_before_the_softcap),
    };
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
            for (size_t d = 64; d <= 256; d *= 2)
                bench(*k, d);
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
