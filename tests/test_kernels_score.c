/* The kernels on which decisions hang, and the reading of pages: every table gives the bits of the
 * reference, and the reference what float64 gives. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/exp.h"
#include "kernels/half.h"
#include "kernels/kernels.h"
#include "support/edge.h"
#include "support/rng.h"

enum { FILL = 0xa5, KINDS = 8 };

static uint64_t seed = 1;

/* Numbers of a kind; 0 is the plain one, for the comparison with float64. */
static float number(unsigned kind)
{
    static const float odd[] = {NAN, INFINITY, -INFINITY, -0.0f, 0.0f, 0x1p-149f, -3e38f};
    const float x = rng_unit(&seed);
    switch (kind) {
    case 1: return x * 0x1p-75f; /* products are subnormal */
    case 2: return x * 3e38f;    /* sums overflow */
    case 3: return rng_below(&seed, 20) ? x : odd[rng_below(&seed, 7)];
    case 4: return odd[rng_below(&seed, 7)];
    case 5: return rng_below(&seed, 2) ? 0.0f : -0.0f;
    case 6: return x * 90; /* exponentials from zero to the largest */
    case 7: return kvc_float_from_bits((uint32_t)rng_next(&seed));
    default: return x;
    }
}

/* n numbers that end at a fault. */
static float *numbers(size_t n, unsigned kind)
{
    float *x = edge_new(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        x[i] = number(kind);
    return x;
}

static void numbers_free(float *x, size_t n)
{
    edge_free(x, n * sizeof(float));
}

/* Two buffers with the same bytes: what the reference works on, and what the table does. */
struct pair {
    size_t n;
    float *want, *got;
};

static struct pair pair_of(float *want, size_t n)
{
    struct pair p = {.n = n, .want = want, .got = edge_new(n * sizeof(float))};
    memcpy(p.got, want, n * sizeof(float));
    return p;
}

static struct pair pair_filled(size_t n)
{
    float *x = edge_new(n * sizeof(float));
    memset(x, FILL, n * sizeof(float));
    return pair_of(x, n);
}

static bool same(float a, float b)
{
    return kvc_float_bits(a) == kvc_float_bits(b) || (isnan(a) && isnan(b));
}

static void pair_equal(const struct pair *p)
{
    for (size_t i = 0; i < p->n; i++)
        assert_true(same(p->want[i], p->got[i]));
}

static void pair_free(struct pair *p)
{
    numbers_free(p->want, p->n);
    numbers_free(p->got, p->n);
}

/* Elements beyond the first n of each stride keep their old bytes. */
static void gaps_untouched(const struct pair *p, size_t stride, size_t n)
{
    uint32_t fill;
    memset(&fill, FILL, sizeof(fill));
    for (size_t i = 0; i < p->n; i++)
        assert_true(i % stride < n || kvc_float_bits(p->got[i]) == fill);
}

static uint64_t random_mask(void)
{
    const uint64_t bits = rng_next(&seed);
    switch (rng_below(&seed, 5)) {
    case 0: return 0;
    case 1: return ~UINT64_C(0);
    case 2: return ~UINT64_C(0) >> bits % 64;
    case 3: return UINT64_C(1) << bits % 64;
    default: return bits;
    }
}

static void exponential_is_close_to_float64(void **state)
{
    double worst = 0;
    (void)state;
    for (int i = 0; i < 200000; i++) {
        const float x = i < 100000 ? -87 + 175 * ((float)i / 100000) : 88 * rng_unit(&seed);
        if (x >= -87)
            worst = fmax(worst, fabs((double)kvc_exp(x) / exp((double)x) - 1));
    }
    print_message("kvc_exp: relative error %.2e\n", worst);
    assert_true(worst <= 1e-7);
    assert_true(kvc_exp(0) == 1 && kvc_exp(-0.0f) == 1 && kvc_exp(0x1p-149f) == 1);
    assert_true(kvc_exp(-87.4f) == 0 && kvc_exp(-INFINITY) == 0 && kvc_exp(-3e38f) == 0);
    assert_true(kvc_exp(INFINITY) == kvc_exp(88.3f) && isnan(kvc_exp(NAN)));
}

/* Rows of d numbers with zeros behind them. */
static float *padded_rows(size_t n_rows, size_t d, unsigned kind)
{
    const size_t size = kvc_attend_stride(d);
    float *x = numbers(n_rows * size, kind);
    for (size_t i = 0; i < n_rows * size; i++)
        x[i] = i % size < d ? x[i] : 0;
    return x;
}

static void dots_close_to_float64(const float *a, const float *b, size_t n_b, size_t d,
                                  const float *dots)
{
    for (size_t j = 0; j < n_b; j++) {
        double sum = 0;
        for (size_t c = 0; c < d; c++)
            sum += (double)a[c] * (double)b[j * kvc_attend_stride(d) + c];
        assert_true(fabs((double)dots[j] - sum) <= 1e-7 * (1 + (double)d));
    }
}

static void check_dots(const struct kvc_kernels *k, size_t n_a, size_t n_b, size_t d, unsigned kind)
{
    const size_t size = kvc_attend_stride(d), stride = n_b + rng_below(&seed, 3);
    float *a = padded_rows(n_a, d, kind), *b = padded_rows(n_b, d, kind);
    struct pair dots = pair_filled((n_a - 1) * stride + n_b);
    kvc_dot_rows_ref(NULL, a, n_a, b, n_b, d, dots.want, stride);
    assert_int_equal(k->dot_rows(NULL, a, n_a, b, n_b, d, dots.got, stride), KVC_OK);
    pair_equal(&dots);
    gaps_untouched(&dots, stride, n_b);
    if (kind == 0)
        dots_close_to_float64(a, b, n_b, d, dots.want);
    pair_free(&dots);
    numbers_free(a, n_a * size);
    numbers_free(b, n_b * size);
}

static void dots_have_the_bits_of_ref(void **state)
{
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t i = 1; i <= 300; i++) {
            const unsigned kind = i % 2 ? 0 : (unsigned)rng_below(&seed, KINDS);
            check_dots(*k, 1 + rng_below(&seed, 9), 1 + rng_below(&seed, 9), i, kind);
            check_dots(*k, 1 + i % 3, i, 1 + rng_below(&seed, 40), kind);
            check_dots(*k, i, 1 + i % 5, 1 + rng_below(&seed, 20), kind);
        }
}

/* The order of the sums by hand: 2^24 swallows a one that comes alone, not two together. */
static void dots_add_in_the_stated_order(void **state)
{
    float a[32], b[32] = {0}, dot;
    (void)state;
    for (int i = 0; i < 32; i++)
        a[i] = 1;
    b[0] = 0x1p24f;
    b[16] = 1; /* into the same sum: lost */
    b[4] = 1;
    b[12] = 1; /* together first: kept */
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        (*k)->dot_rows(NULL, a, 1, b, 1, 32, &dot, 1);
        assert_true(dot == 0x1p24f + 2);
    }
}

/* x x = 1 + 2^-11 + 2^-24 is rounded to 1 + 2^-11 before anything is added to it. */
static void nothing_is_fused(void **state)
{
    const float x = 1 + 0x1p-12f, square = 1 + 0x1p-11f, one = 1, minus_one = -1;
    float a[32] = {-square}, b[32] = {1}, dot, mixed[2];
    a[16] = b[16] = x;
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        float pairs[2][2] = {{x, square}, {-square, x}};
        (*k)->dot_rows(NULL, a, 1, b, 1, 32, &dot, 1);
        (*k)->mix_rows(NULL, &x, x, &square, -1, 1, &mixed[0]);
        (*k)->mix_rows(NULL, &square, -1, &x, x, 1, &mixed[1]);
        assert_true(dot == 0 && mixed[0] == 0 && mixed[1] == 0);
        (*k)->rotate_rows(NULL, pairs[0], 1, 2, &x, &one, 1, false); /* x x - square 1 */
        (*k)->rotate_rows(NULL, pairs[1], 1, 2, &x, &one, 1, true);  /* -square 1 + x x */
        assert_true(pairs[0][0] == 0 && pairs[1][1] == 0);
        pairs[0][0] = square, pairs[0][1] = x;
        (*k)->rotate_rows(NULL, pairs[0], 1, 2, &minus_one, &x, 1, true); /* -square - x x */
        assert_true(pairs[0][0] == -2 * square);
    }
}

/* The running maxima and sums of both sides, and the logits and masks of one block. */
struct block {
    size_t n_rows;
    float *s;
    uint64_t *mask;
};

static struct block block_new(size_t n_rows, unsigned kind)
{
    struct block b = {n_rows, numbers(n_rows * 64, kind), edge_new(n_rows * sizeof(uint64_t))};
    for (size_t r = 0; r < n_rows; r++)
        b.mask[r] = random_mask();
    return b;
}

static void block_free(struct block *b)
{
    numbers_free(b->s, b->n_rows * 64);
    edge_free(b->mask, b->n_rows * sizeof(uint64_t));
}

static void add_weights(const struct block *b, double *sums)
{
    for (size_t r = 0; r < b->n_rows; r++)
        for (int t = 0; t < 64; t++)
            if (b->mask[r] >> t & 1)
                sums[r] += exp((double)b->s[r * 64 + (size_t)t]);
}

static void lse_close_to_float64(const double *sums, size_t n_rows, const float *m, const float *l)
{
    for (size_t r = 0; r < n_rows; r++) {
        const double lse = (double)m[r] + log((double)l[r]);
        assert_true(sums[r] > 0 ? fabs(lse - log(sums[r])) <= 1e-6
                                : m[r] == -INFINITY && l[r] == 0);
    }
}

/* Three blocks one after the other, from nothing seen or from anything. */
static void check_lse(const struct kvc_kernels *k, size_t n_rows, unsigned kind)
{
    struct pair m = pair_filled(n_rows), l = pair_filled(n_rows);
    double *sums = calloc(n_rows, sizeof(double));
    assert_non_null(sums);
    for (size_t r = 0; r < n_rows; r++) {
        m.want[r] = m.got[r] = kind == 7 ? number(4) : -INFINITY;
        l.want[r] = l.got[r] = kind == 7 ? number(3) : 0;
    }
    for (int i = 0; i < 3; i++) {
        struct block b = block_new(n_rows, kind);
        kvc_lse_block_ref(NULL, b.s, b.mask, n_rows, m.want, l.want);
        assert_int_equal(k->lse_block(NULL, b.s, b.mask, n_rows, m.got, l.got), KVC_OK);
        pair_equal(&m);
        pair_equal(&l);
        add_weights(&b, sums);
        block_free(&b);
    }
    if (kind == 0)
        lse_close_to_float64(sums, n_rows, m.want, l.want);
    free(sums);
    pair_free(&m);
    pair_free(&l);
}

static void running_sums_have_the_bits_of_ref(void **state)
{
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t n = 1; n <= 40; n++)
            for (unsigned kind = 0; kind < KINDS; kind++)
                check_lse(*k, n, kind);
}

static void empty_blocks_leave_running_sums_alone(void **state)
{
    static float s[3 * 64];
    static const uint64_t mask[3] = {~UINT64_C(0), 0, 1};
    (void)state;
    for (int i = 0; i < 64; i++)
        s[i] = i % 2 ? -INFINITY : NAN;
    s[128] = NAN;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        float m[3] = {-INFINITY, -INFINITY, 2}, l[3] = {0, 0, 3};
        (*k)->lse_block(NULL, s, mask, 3, m, l);
        assert_true(m[0] == -INFINITY && l[0] == 0);
        assert_true(m[1] == -INFINITY && l[1] == 0);
        assert_true(m[2] == 2 && isnan(l[2])); /* a NaN that counts is not lost */
    }
}

static void masses_close_to_float64(const struct block *b, const float *lse, const float *weights,
                                    const float *mass)
{
    for (int t = 0; t < 64; t++) {
        double sum = 0.5;
        for (size_t r = 0; r < b->n_rows; r++)
            if (isfinite(lse[r]) && b->mask[r] >> t & 1)
                sum += (double)weights[r] * exp((double)b->s[r * 64 + (size_t)t] - (double)lse[r]);
        assert_true(fabs((double)mass[t] - sum) <= 1e-5);
    }
}

static void check_mass(const struct kvc_kernels *k, size_t n_rows, unsigned kind)
{
    struct block b = block_new(n_rows, kind);
    float *lse = numbers(n_rows, kind == 7 ? 6 : 0), *weights = numbers(n_rows, 0);
    struct pair mass;
    for (size_t r = 0; r < n_rows; r++)
        if (rng_below(&seed, 6) == 0)
            lse[r] = (const float[]){NAN, INFINITY, -INFINITY}[rng_below(&seed, 3)];
    mass = pair_of(numbers(64, kind == 7 ? 5 : 0), 64); /* -0 stays where nothing counts */
    for (int t = 0; kind == 0 && t < 64; t++)
        mass.want[t] = mass.got[t] = 0.5f;
    kvc_mass_block_ref(NULL, b.s, b.mask, lse, weights, n_rows, mass.want);
    assert_int_equal(k->mass_block(NULL, b.s, b.mask, lse, weights, n_rows, mass.got), KVC_OK);
    pair_equal(&mass);
    if (kind == 0)
        masses_close_to_float64(&b, lse, weights, mass.want);
    pair_free(&mass);
    numbers_free(lse, n_rows);
    numbers_free(weights, n_rows);
    block_free(&b);
}

static void masses_have_the_bits_of_ref(void **state)
{
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t n = 1; n <= 40; n++)
            for (unsigned kind = 0; kind < KINDS; kind++)
                check_mass(*k, n, kind);
}

static void check_mix(const struct kvc_kernels *k, size_t n, unsigned kind, int in_place)
{
    float *a = numbers(n, kind), *b = numbers(n, kind);
    const float w_a = number(kind), w_b = number(kind);
    struct pair out = pair_of(numbers(n, kind), n);
    const float *want_a = in_place == 1 ? out.want : a, *got_a = in_place == 1 ? out.got : a;
    const float *want_b = in_place == 2 ? out.want : b, *got_b = in_place == 2 ? out.got : b;
    kvc_mix_rows_ref(NULL, want_a, w_a, want_b, w_b, n, out.want);
    assert_int_equal(k->mix_rows(NULL, got_a, w_a, got_b, w_b, n, out.got), KVC_OK);
    pair_equal(&out);
    for (size_t i = 0; kind == 0 && in_place == 0 && i < n; i++)
        assert_true(fabs((double)out.want[i] -
                         ((double)a[i] * (double)w_a + (double)b[i] * (double)w_b)) <= 2e-7);
    pair_free(&out);
    numbers_free(a, n);
    numbers_free(b, n);
}

static void mixtures_have_the_bits_of_ref(void **state)
{
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t n = 1; n <= 300; n++)
            for (int in_place = 0; in_place < 3; in_place++)
                check_mix(*k, n, n % 2 ? 0 : (unsigned)rng_below(&seed, KINDS), in_place);
}

/* x + i y times c + i s. */
static void turn_is_close_to_float64(const float *old, const float *x, const float *c,
                                     const float *s, size_t n_pairs, bool interleaved)
{
    for (size_t j = 0; j < n_pairs; j++) {
        const size_t a = interleaved ? 2 * j : j, b = interleaved ? 2 * j + 1 : j + n_pairs;
        const double u = (double)old[a], v = (double)old[b];
        assert_true(fabs((double)x[a] - (u * (double)c[j] - v * (double)s[j])) <= 2e-7);
        assert_true(fabs((double)x[b] - (u * (double)s[j] + v * (double)c[j])) <= 2e-7);
    }
}

static void check_turn(const struct kvc_kernels *k, size_t n_rows, size_t n_pairs, unsigned kind,
                       bool interleaved)
{
    const size_t stride = 2 * n_pairs + rng_below(&seed, 4),
                 n = (n_rows - 1) * stride + 2 * n_pairs;
    float *c = numbers(n_rows * n_pairs, kind), *s = numbers(n_rows * n_pairs, kind);
    struct pair x = pair_of(numbers(n, kind), n), old = pair_of(x.want, n);
    kvc_rotate_rows_ref(NULL, x.want, n_rows, stride, c, s, n_pairs, interleaved);
    assert_int_equal(k->rotate_rows(NULL, x.got, n_rows, stride, c, s, n_pairs, interleaved),
                     KVC_OK);
    pair_equal(&x);
    for (size_t i = 0; i < n; i++) /* beyond the pairs */
        assert_true(i % stride < 2 * n_pairs || same(x.got[i], old.got[i]));
    if (kind == 0)
        turn_is_close_to_float64(old.got, x.want, c, s, n_pairs, interleaved);
    numbers_free(old.got, n);
    pair_free(&x);
    numbers_free(c, n_rows * n_pairs);
    numbers_free(s, n_rows * n_pairs);
}

static void turned_rows_have_the_bits_of_ref(void **state)
{
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t n = 1; n <= 150; n++)
            for (int i = 0; i < 4; i++)
                check_turn(*k, 1 + rng_below(&seed, 5), n,
                           i < 2 ? 0 : (unsigned)rng_below(&seed, KINDS), i % 2);
}

static void gathered_rows_keep_their_bytes(void **state)
{
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t size = 1; size <= 40; size++) {
            const size_t stride = size + rng_below(&seed, 4), n = 29 * stride + size;
            uint8_t *data = edge_new(n), old[30 * 44];
            int32_t rows[30];
            size_t n_rows = 0;
            for (size_t i = 0; i < n; i++)
                data[i] = old[i] = (uint8_t)rng_next(&seed);
            for (int32_t r = 0; r < 30; r++)
                if (rng_below(&seed, 3))
                    rows[n_rows++] = r;
            assert_int_equal((*k)->gather_rows(NULL, data, size, stride, rows, n_rows), KVC_OK);
            for (size_t i = 0; i < n; i++) {
                const size_t r = i / stride, at = i % stride;
                const size_t from = r < n_rows && at < size ? (size_t)rows[r] * stride + at : i;
                assert_int_equal(data[i], old[from]);
            }
            edge_free(data, n);
        }
}

static struct kvc_page_layout random_layout(int d_k, int d_v, int i)
{
    static const uint8_t sides[8][2] = {
        {KVC_F16, KVC_SCALE_HEAD},     {KVC_INT8, KVC_SCALE_HEAD}, {KVC_INT8, KVC_SCALE_TOKEN},
        {KVC_INT8, KVC_SCALE_CHANNEL}, {KVC_INT4, KVC_SCALE_HEAD}, {KVC_INT4, KVC_SCALE_TOKEN},
        {KVC_INT4, KVC_SCALE_CHANNEL}, {KVC_INT6, KVC_SCALE_TOKEN}};
    const uint8_t *k = sides[i % 8], *v = sides[i / 8 % 7];
    if (i % 10 == 9) /* an open page, or the strip of sinks */
        return kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true,
                                    i % 20 == 9 ? KVC_PAGE_ROWS : 5);
    return kvc_page_layout_make(d_k, d_v, k[0], k[1], v[0], v[1], false, KVC_PAGE_ROWS);
}

static void check_read(const struct kvc_kernels *k, const struct kvc_page_layout *layout,
                       uint32_t first, uint32_t n_rows)
{
    const size_t k_stride = layout->d_k + rng_below(&seed, 3);
    const size_t v_stride = layout->d_v + rng_below(&seed, 3);
    struct pair keys = pair_filled((n_rows - 1) * k_stride + layout->d_k);
    struct pair values = pair_filled((n_rows - 1) * v_stride + layout->d_v);
    uint8_t *page = edge_new(layout->n_bytes);
    const size_t which = rng_below(&seed, 6); /* 0: K alone, 1: V alone */
    for (uint32_t i = 0; i < layout->n_bytes; i++)
        page[i] = (uint8_t)rng_next(&seed);
    kvc_read_page_ref(NULL, layout, page, first, n_rows, which == 1 ? NULL : keys.want, k_stride,
                      which == 0 ? NULL : values.want, v_stride);
    assert_int_equal(k->read_page(NULL, layout, page, first, n_rows, which == 1 ? NULL : keys.got,
                                  k_stride, which == 0 ? NULL : values.got, v_stride),
                     KVC_OK);
    pair_equal(&keys);
    pair_equal(&values);
    gaps_untouched(&keys, k_stride, layout->d_k);
    gaps_untouched(&values, v_stride, layout->d_v);
    pair_free(&keys);
    pair_free(&values);
    edge_free(page, layout->n_bytes);
}

/* Any bytes are a page: codes, halves and scales. */
static void pages_read_with_the_bits_of_ref(void **state)
{
    static const int more[] = {96, 112, 128, 256, 512};
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (int i = 0; i < 85 * 7; i++) {
            const int d = i / 7 < 80 ? i / 7 + 1 : more[i / 7 - 80];
            const int other = 1 + (int)rng_below(&seed, 80);
            const struct kvc_page_layout layout =
                random_layout(i % 2 ? d : other, i % 2 ? other : d, (int)rng_below(&seed, 490));
            const uint32_t held =
                layout.v_row_major ? layout.v_codes / layout.k_stride : KVC_PAGE_ROWS;
            const uint32_t first = i % 3 ? (uint32_t)rng_below(&seed, held) : 0;
            check_read(*k, &layout, first,
                       i % 3 == 1 ? 1 : 1 + (uint32_t)rng_below(&seed, held - first));
            check_read(*k, &layout, 0, held);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exponential_is_close_to_float64),
        cmocka_unit_test(dots_have_the_bits_of_ref),
        cmocka_unit_test(dots_add_in_the_stated_order),
        cmocka_unit_test(nothing_is_fused),
        cmocka_unit_test(running_sums_have_the_bits_of_ref),
        cmocka_unit_test(empty_blocks_leave_running_sums_alone),
        cmocka_unit_test(masses_have_the_bits_of_ref),
        cmocka_unit_test(mixtures_have_the_bits_of_ref),
        cmocka_unit_test(turned_rows_have_the_bits_of_ref),
        cmocka_unit_test(gathered_rows_keep_their_bytes),
        cmocka_unit_test(pages_read_with_the_bits_of_ref),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
