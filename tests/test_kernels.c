/* Every table this machine can run must equal the reference, slot by slot: rows and pages. */
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

#include "kernels/half.h"
#include "kernels/kernels.h"
#include "kernels/page.h"
#include "support/edge.h"
#include "support/rng.h"

enum { ROWS = 7, FILL = 0xa5 };

static uint64_t seed = 1;

static void no_table_has_an_empty_slot(void **state)
{
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        void *slots[sizeof(**k) / sizeof(void *)];
        memcpy(slots, *k, sizeof(**k));
        for (size_t i = 0; i < sizeof(slots) / sizeof(*slots); i++)
            assert_non_null(slots[i]);
    }
}

/* A number of a kind: what one row, or one column, consists of. */
static float number(unsigned kind)
{
    static const float odd[] = {NAN, INFINITY, -INFINITY, -0.0f, 0x1p-149f, -0x1p-130f, 65520.0f};
    const float x = rng_unit(&seed);
    switch (kind % 11) {
    case 0: return 0.0f;
    case 1: return x * 0x1p-101f; /* around the tiny group */
    case 2: return x * 0x1p-140f;
    case 3: return x * 3e38f;
    case 4: return x * 1e7f; /* no half holds the INT8 scale */
    case 5: return odd[rng_below(&seed, 7)];
    case 6: return rng_below(&seed, 5) ? x : odd[rng_below(&seed, 7)];
    case 7: return rintf(x * 8) + 0.5f; /* ties */
    case 8: return kvc_float_from_bits((uint32_t)rng_next(&seed));
    case 9: return 1000 + x * 0.01f; /* far from zero, little spread */
    default: return x;
    }
}

/* A matrix that ends where its last row ends; its gaps hold NaN. */
struct matrix {
    struct kvc_rows rows;
    void *data;
    size_t size;
};

static struct matrix matrix_new(kvc_dtype dtype, size_t n_rows, size_t n_cols, size_t stride)
{
    const size_t n = (n_rows - 1) * stride + n_cols, element = dtype == KVC_DTYPE_F32 ? 4 : 2;
    struct matrix m = {.size = n * element, .data = edge_new(n * element)};
    const bool by_row = rng_below(&seed, 2);
    const unsigned kind = (unsigned)rng_below(&seed, 11);
    memset(m.data, 0xff, m.size);
    for (size_t i = 0; i < n; i++) {
        const size_t r = i / stride, c = i % stride;
        const float x = number(kind + (unsigned)(by_row ? r : c));
        if (c >= n_cols)
            continue;
        if (dtype == KVC_DTYPE_F32)
            ((float *)m.data)[i] = x;
        else
            ((uint16_t *)m.data)[i] =
                dtype == KVC_DTYPE_F16 ? kvc_half_from_float(x) : kvc_bf16_from_float(x);
    }
    m.rows = (struct kvc_rows){
        .data = m.data, .dtype = dtype, .stride = stride, .n_rows = n_rows, .n_cols = n_cols};
    return m;
}

/* Two outputs with the same old bytes, each ending at a fault. */
struct pair {
    size_t size;
    uint8_t *want, *got;
};

static struct pair pair_new(size_t size)
{
    struct pair p = {.size = size, .want = edge_new(size), .got = edge_new(size)};
    memset(p.want, FILL, size);
    memset(p.got, FILL, size);
    return p;
}

/* Equal everywhere: what is not promised keeps its old bytes. */
static void pair_check(struct pair *p, size_t stride, size_t n)
{
    assert_memory_equal(p->got, p->want, p->size);
    for (size_t i = 0; i < p->size; i++)
        assert_true(i % stride < n || p->got[i] == FILL);
    edge_free(p->want, p->size);
    edge_free(p->got, p->size);
}

static void floats_check(struct pair *p, size_t stride, size_t n)
{
    const float *want = (const float *)(const void *)p->want;
    float *got = (float *)(void *)p->got;
    for (size_t i = 0; i < p->size / sizeof(float); i++)
        if (isnan(want[i]) && isnan(got[i])) /* any NaN is as good as another */
            got[i] = want[i];
    pair_check(p, stride * sizeof(float), n * sizeof(float));
}

static size_t code_bytes(size_t n, int bits)
{
    return bits == 8 ? n : (n + 1) / 2;
}

static void check_range(const struct kvc_kernels *k, const struct matrix *m)
{
    struct kvc_range want, got;
    kvc_range_rows_ref(NULL, &m->rows, &want);
    assert_int_equal(k->range_rows(NULL, &m->rows, &got), KVC_OK);
    assert_true(got.min == want.min && got.max == want.max);
    assert_int_equal(got.n_nonfinite, want.n_nonfinite);
}

static void check_fixed(const struct kvc_kernels *k, const struct matrix *m, int bits)
{
    const struct kvc_fixed_code codes[] = {
        {.bits = bits, .lo = -7, .hi = 7, .factor = 9.7f},
        {.bits = bits,
         .lo = bits == 8 ? -128 : -8,
         .hi = bits == 8 ? 127 : 7,
         .factor = 0.03f,
         .divide = true},
        {.bits = bits, .lo = -7, .hi = 7, .factor = 0},
    };
    const size_t n = code_bytes(m->rows.n_cols, bits), stride = n + 3;
    for (size_t i = 0; i < sizeof(codes) / sizeof(*codes); i++) {
        struct pair p = pair_new((m->rows.n_rows - 1) * stride + n);
        kvc_quantize_fixed_ref(NULL, &m->rows, &codes[i], p.want, stride);
        assert_int_equal(k->quantize_fixed(NULL, &m->rows, &codes[i], p.got, stride), KVC_OK);
        pair_check(&p, stride, n);
    }
}

static void check_tokens(const struct kvc_kernels *k, const struct matrix *m, int bits)
{
    const size_t n = code_bytes(m->rows.n_cols, bits), stride = n + 5;
    struct pair codes = pair_new((m->rows.n_rows - 1) * stride + n);
    struct pair scales = pair_new((m->rows.n_rows - 1) * 6 + 2);
    uint64_t want = 3, got = 3;
    kvc_quantize_tokens_ref(NULL, &m->rows, bits, codes.want, stride,
                            (uint16_t *)(void *)scales.want, 3, &want);
    assert_int_equal(k->quantize_tokens(NULL, &m->rows, bits, codes.got, stride,
                                        (uint16_t *)(void *)scales.got, 3, &got),
                     KVC_OK);
    assert_int_equal(got, want);
    pair_check(&codes, stride, n);
    pair_check(&scales, 6, 2);
}

static void check_channels(const struct kvc_kernels *k, const struct matrix *m, int bits)
{
    const size_t n = code_bytes(m->rows.n_cols, bits), stride = n + 1;
    struct pair codes = pair_new((m->rows.n_rows - 1) * stride + n);
    struct pair scales = pair_new(m->rows.n_cols * 2), minima = pair_new(m->rows.n_cols * 2);
    uint64_t want = 0, got = 0;
    kvc_quantize_channels_ref(NULL, &m->rows, bits, codes.want, stride,
                              (uint16_t *)(void *)scales.want, (uint16_t *)(void *)minima.want,
                              &want);
    assert_int_equal(k->quantize_channels(NULL, &m->rows, bits, codes.got, stride,
                                          (uint16_t *)(void *)scales.got,
                                          (uint16_t *)(void *)minima.got, &got),
                     KVC_OK);
    assert_int_equal(got, want);
    pair_check(&codes, stride, n);
    pair_check(&scales, 2, 2);
    pair_check(&minima, 2, 2);
}

static void check_store_and_load(const struct kvc_kernels *k, const struct matrix *m)
{
    const size_t n = m->rows.n_cols + 5, stride = n + 2, last = (m->rows.n_rows - 1) * stride;
    struct kvc_store_counts want = {1, 2}, got = {1, 2};
    struct pair halves = pair_new((last + n) * 2), floats = pair_new((last + n) * 4);
    kvc_store_rows_ref(NULL, &m->rows, (uint16_t *)(void *)halves.want, stride, n, &want);
    assert_int_equal(k->store_rows(NULL, &m->rows, (uint16_t *)(void *)halves.got, stride, n, &got),
                     KVC_OK);
    assert_memory_equal(&got, &want, sizeof(want));
    pair_check(&halves, stride * 2, n * 2);
    kvc_load_rows_ref(NULL, &m->rows, (float *)(void *)floats.want, stride, n);
    assert_int_equal(k->load_rows(NULL, &m->rows, (float *)(void *)floats.got, stride, n), KVC_OK);
    floats_check(&floats, stride, n);
}

/* Any bytes are codes and scales. */
static void check_dequantize(const struct kvc_kernels *k, size_t n_cols, int bits)
{
    const size_t n = code_bytes(n_cols, bits), src_stride = n + 1, stride = n_cols + 3;
    const size_t size = (ROWS - 1) * src_stride + n, params_size = (n_cols + (size_t)3 * ROWS) * 2;
    uint8_t *codes = edge_new(size);
    uint16_t *scales = edge_new(params_size), *minima = edge_new(n_cols * 2);
    for (size_t i = 0; i < size; i++)
        codes[i] = (uint8_t)rng_next(&seed);
    for (size_t i = 0; i < params_size / 2; i++)
        scales[i] = (uint16_t)rng_next(&seed);
    for (size_t i = 0; i < n_cols; i++)
        minima[i] = (uint16_t)rng_next(&seed);
    const struct kvc_dequant params[] = {
        {.bits = bits, .scale = 0.37f},
        {.bits = bits, .scales = scales, .scale_stride = 3},
        {.bits = bits, .scales = scales + (size_t)3 * ROWS, .minima = minima},
    };
    for (size_t i = 0; i < 3; i++) {
        struct pair p = pair_new(((ROWS - 1) * stride + n_cols) * sizeof(float));
        kvc_dequantize_rows_ref(NULL, codes, src_stride, &params[i], ROWS, n_cols,
                                (float *)(void *)p.want, stride);
        assert_int_equal(k->dequantize_rows(NULL, codes, src_stride, &params[i], ROWS, n_cols,
                                            (float *)(void *)p.got, stride),
                         KVC_OK);
        floats_check(&p, stride, n_cols);
    }
    edge_free(codes, size);
    edge_free(scales, params_size);
    edge_free(minima, n_cols * 2);
}

static void rows_equal_ref(void **state)
{
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t n = 1; n <= 301; n++)
            for (int dtype = KVC_DTYPE_F32; dtype <= KVC_DTYPE_BF16; dtype++) {
                const size_t cols = n <= 300 ? n : 512;
                struct matrix m = matrix_new((kvc_dtype)dtype, 1 + rng_below(&seed, ROWS), cols,
                                             cols + rng_below(&seed, 4));
                const int bits = (n + (size_t)dtype) % 2 ? 8 : 4;
                check_range(*k, &m);
                check_fixed(*k, &m, bits);
                check_tokens(*k, &m, bits);
                check_channels(*k, &m, bits);
                check_store_and_load(*k, &m);
                check_dequantize(*k, cols, bits);
                edge_free(m.data, m.size);
            }
}

/* Formats and scales of one side of a page; the last is of K only. */
static const uint8_t sides[8][2] = {{KVC_F16, KVC_SCALE_HEAD},     {KVC_INT8, KVC_SCALE_HEAD},
                                    {KVC_INT8, KVC_SCALE_TOKEN},   {KVC_INT8, KVC_SCALE_CHANNEL},
                                    {KVC_INT4, KVC_SCALE_HEAD},    {KVC_INT4, KVC_SCALE_TOKEN},
                                    {KVC_INT4, KVC_SCALE_CHANNEL}, {KVC_INT6, KVC_SCALE_TOKEN}};

static struct kvc_page_layout sealed_layout(int d_k, int d_v, size_t k, size_t v)
{
    return kvc_page_layout_make(d_k, d_v, sides[k][0], sides[k][1], sides[v][0], sides[v][1], false,
                                KVC_PAGE_ROWS);
}

/* Finite halves in the rows, NaN in the pads and beyond. */
static uint8_t *unsealed_page(const struct kvc_page_layout *layout, uint32_t n_rows)
{
    uint8_t *page = edge_new(layout->n_bytes);
    uint16_t *half = (uint16_t *)(void *)page;
    const bool by_row = rng_below(&seed, 2);
    memset(page, 0xff, layout->n_bytes);
    for (uint32_t t = 0; t < n_rows; t++)
        for (uint32_t c = 0; c < (uint32_t)layout->d_k + layout->d_v; c++) {
            const uint32_t i = c < layout->d_k
                                   ? t * layout->d8_k + c
                                   : layout->v_codes / 2 + t * layout->d8_v + c - layout->d_k;
            half[i] = kvc_half_from_float(number(by_row ? t : c));
            if ((half[i] & 0x7c00) == 0x7c00) /* what is stored is finite */
                half[i] ^= 0x4000;
        }
    return page;
}

static void sealed_pages_equal_ref(void **state)
{
    static const int more[] = {96, 112, 128, 256, 512};
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t i = 0; i < (size_t)85 * 56; i++) {
            const int d = i / 56 < 80 ? (int)(i / 56) + 1 : more[i / 56 - 80];
            const int other = 1 + (int)rng_below(&seed, 80);
            const int d_k = i % 2 ? d : other, d_v = i % 2 ? other : d;
            const struct kvc_page_layout to = sealed_layout(d_k, d_v, i % 8, i / 8 % 7);
            const struct kvc_page_layout from =
                kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
            struct pair page = pair_new(to.n_bytes);
            struct kvc_seal_job job = {.from = &from,
                                       .to = &to,
                                       .n_rows = 1 + (uint32_t)(i % 64),
                                       .absmax_k = i % 5 ? 2.5f : 0,
                                       .absmax_v = i % 3 ? 65504.0f : 1e-31f};
            uint8_t *src = unsealed_page(&from, job.n_rows);
            job.src = src;
            job.dst = page.want;
            kvc_seal_page_ref(NULL, &job);
            memset(page.got, ~page.want[0], page.size); /* every byte is written */
            job.dst = page.got;
            assert_int_equal((*k)->seal_page(NULL, &job), KVC_OK);
            pair_check(&page, to.n_bytes, to.n_bytes);
            edge_free(src, from.n_bytes);
        }
}

/* One token and one channel of 4-bit codes, byte by byte. */
static void pages_read_as_the_format_says(void **state)
{
    const struct kvc_page_layout layout =
        kvc_page_layout_make(8, 8, KVC_INT4, KVC_SCALE_TOKEN, KVC_INT4, KVC_SCALE_TOKEN, false, 64);
    static const uint8_t ascending[4] = {0x20, 0x64, 0x31, 0x75}; /* codes -8 ... -1 */
    static const uint8_t half[2] = {0x00, 0x38}, minus_two[2] = {0x00, 0xc0};
    uint8_t page[768];
    float k[8], v[8];

    (void)state;
    assert_int_equal(layout.v_codes, 64 * 4);
    assert_int_equal(layout.k_params, 64 * 4 + 8 * 32);
    assert_int_equal(layout.v_params, 64 * 4 + 8 * 32 + 128);
    assert_int_equal(layout.n_bytes, 768);
    for (uint32_t e = 0; e < 8; e++)
        assert_int_equal(kvc_nibble_element[kvc_nibble_byte(e) * 2 + kvc_nibble_shift(e) / 4], e);
    memset(page, 0x88, 512); /* code 0 */
    memset(page + 512, 0, 256);
    memcpy(&page[20], ascending, 4); /* K of token 5, scale 0.5 */
    memcpy(&page[512 + 5 * 2], half, 2);
    page[256 + 3 * 32 + 4] = 0xf8;             /* V of channel 3, token 10 (second nibble): 7 */
    memcpy(&page[640 + 10 * 2], minus_two, 2); /* times -2 */
    for (const struct kvc_kernels *const *table = kvc_kernels_available(); *table; table++) {
        assert_int_equal(
            (*table)->read_page(NULL, &layout, page, 5, 1, k, layout.d_k, v, layout.d_v), KVC_OK);
        for (int c = 0; c < 8; c++)
            assert_true(k[c] == 0.5f * (float)(c - 8) && v[c] == 0);
        (*table)->read_page(NULL, &layout, page, 10, 1, k, layout.d_k, v, layout.d_v);
        for (int c = 0; c < 8; c++)
            assert_true(k[c] == 0 && v[c] == (c == 3 ? -14 : 0));
    }
}

/* Eight 6-bit codes of K, byte by byte, as docs/formats.md has them; and how a row becomes codes.
 */
static void six_bits_lie_in_two_planes(void **state)
{
    const struct kvc_page_layout layout =
        kvc_page_layout_make(8, 8, KVC_INT6, KVC_SCALE_TOKEN, KVC_F16, 0, false, 64);
    const struct kvc_page_layout open =
        kvc_page_layout_make(8, 8, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
    /* stored 0x00 0x11 0x22 0x33 0x04 0x15 0x26 0x3f */
    static const uint8_t line[6] = {0x20, 0x64, 0x31, 0xf5, 0x88, 0xdd};
    static const float codes[8] = {-32, -15, 2, 19, -28, -11, 6, 31};
    static uint8_t page[2048], src[2048], dst[2048];
    float k[8];

    (void)state;
    assert_int_equal(layout.k_stride, 6);
    assert_int_equal(layout.v_codes, 64 * 6);
    memcpy(page + (size_t)5 * 6, line, sizeof(line));
    memcpy(page + layout.k_params + (size_t)2 * 5, (const uint8_t[]){0x00, 0xb8}, 2); /* -0.5 */
    for (size_t c = 0; c < 8; c++) {
        const uint16_t half = kvc_half_from_float(codes[c] * -0.5f);
        memcpy(src + 2 * c, &half, sizeof(half));
    }
    for (const struct kvc_kernels *const *table = kvc_kernels_available(); *table; table++) {
        (*table)->read_page(NULL, &layout, page, 5, 1, k, 8, NULL, 0);
        for (int c = 0; c < 8; c++)
            assert_true(k[c] == -0.5f * codes[c]);
        /* The extreme is 16: its code is -32 and the scale 16 / -32. */
        const struct kvc_seal_job job = {&open, &layout, src, NULL, dst, 1, 0, 0};
        (*table)->seal_page(NULL, &job);
        assert_memory_equal(dst, line, sizeof(line));
        assert_memory_equal(dst + layout.k_params, ((const uint8_t[]){0x00, 0xb8}), 2);
        assert_memory_equal(dst + 6, ((const uint8_t[]){0, 0, 0, 0, 0xaa, 0xaa}), 6); /* code 0 */
    }
}

/* K in channels of unsigned bytes, V in bytes + 128 under one scale. */
static void bytes_read_as_the_format_says(void **state)
{
    const struct kvc_page_layout layout = kvc_page_layout_make(3, 2, KVC_INT8, KVC_SCALE_CHANNEL,
                                                               KVC_INT8, KVC_SCALE_HEAD, false, 64);
    static uint8_t page[1152];
    const float scale = 0.25f;
    float k[3], v[2];

    (void)state;
    assert_int_equal(layout.n_bytes, 1152);
    assert_int_equal(layout.v_params, 512 + 512 + 32);
    page[63 * 8 + 1] = 200;                                    /* K of token 63, channel 1 */
    memcpy(page + 1024 + 2, (const uint8_t[]){0x00, 0x40}, 2); /* its scale 2 */
    memcpy(page + 1040 + 2, (const uint8_t[]){0x00, 0xbc}, 2); /* its minimum -1 */
    page[512 + 64 + 63] = 100;                                 /* V of channel 1: -28 */
    memcpy(page + 1056, &scale, 4);
    for (const struct kvc_kernels *const *table = kvc_kernels_available(); *table; table++) {
        (*table)->read_page(NULL, &layout, page, 63, 1, k, layout.d_k, v, layout.d_v);
        assert_true(k[0] == 0 && k[1] == 399 && k[2] == 0);
        assert_true(v[0] == -32 && v[1] == -7);
    }
}

/* Rows that move keep their bits, the others stay: compared by reading before and after. */
static void check_move(const struct kvc_kernels *k, const struct kvc_page_layout *layout,
                       const uint8_t *rows, uint32_t n, uint32_t dst_row, bool in_place)
{
    enum { MAX = 64 * 80 };
    static float want_k[MAX], want_v[MAX], got_k[MAX], got_v[MAX], old_k[MAX], old_v[MAX];
    uint8_t *src = edge_new(layout->n_bytes), *other = edge_new(layout->n_bytes);
    uint8_t *dst = in_place ? src : other;
    for (uint32_t i = 0; i < layout->n_bytes; i++) { /* no NaN: parameters and halves below 2 */
        src[i] = (uint8_t)(rng_next(&seed) & (i % 2 ? 0x3f : 0xff));
        other[i] = (uint8_t)(rng_next(&seed) & (i % 2 ? 0x3f : 0xff));
    }
    kvc_read_page_ref(NULL, layout, src, 0, 64, old_k, layout->d_k, old_v, layout->d_v);
    kvc_read_page_ref(NULL, layout, dst, 0, 64, want_k, layout->d_k, want_v, layout->d_v);
    for (uint32_t i = 0; i < n; i++) {
        memcpy(want_k + (size_t)(dst_row + i) * layout->d_k, old_k + (size_t)rows[i] * layout->d_k,
               layout->d_k * sizeof(float));
        memcpy(want_v + (size_t)(dst_row + i) * layout->d_v, old_v + (size_t)rows[i] * layout->d_v,
               layout->d_v * sizeof(float));
    }
    assert_int_equal(k->move_rows(NULL, layout, src, rows, n, dst, dst_row), KVC_OK);
    kvc_read_page_ref(NULL, layout, dst, 0, 64, got_k, layout->d_k, got_v, layout->d_v);
    assert_memory_equal(got_k, want_k, sizeof(float) * 64 * layout->d_k);
    assert_memory_equal(got_v, want_v, sizeof(float) * 64 * layout->d_v);
    edge_free(src, layout->n_bytes);
    edge_free(other, layout->n_bytes);
}

static void moved_rows_keep_their_bits(void **state)
{
    static const size_t movable[4] = {0, 2, 5, 7};
    uint8_t odd[32], shifted[63];
    (void)state;
    for (uint8_t i = 0; i < 32; i++)
        odd[i] = (uint8_t)(2 * i + 1);
    for (uint8_t i = 0; i < 63; i++)
        shifted[i] = (uint8_t)(i + 1);
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (int i = 0; i < 9 * 10; i++) {
            const struct kvc_page_layout layout =
                sealed_layout(1 + (int)rng_below(&seed, 80), 1 + (int)rng_below(&seed, 80),
                              movable[i % 4], movable[i / 4 % 3]);
            check_move(*k, &layout, odd, 32, 0, true);
            check_move(*k, &layout, shifted, 63, 0, true);
            check_move(*k, &layout, odd + 8, 7, (uint32_t)rng_below(&seed, 58), false);
        }
}

static double now(void)
{
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void bench_rows(const struct kvc_kernels *k)
{
    enum { N = 64, D = 128 };
    static uint8_t codes[N * D];
    static uint16_t scales[N], halves[N * D];
    struct matrix m = matrix_new(KVC_DTYPE_F32, N, D, D);
    struct kvc_store_counts counts = {0};
    uint64_t n_saturated = 0;
    double best[3] = {1e30, 1e30, 1e30};
    for (size_t i = 0; i < m.size / sizeof(float); i++)
        ((float *)m.data)[i] = rng_unit(&seed);
    for (int i = 0; i < 200; i++) {
        double start = now();
        k->store_rows(NULL, &m.rows, halves, D, D, &counts);
        best[0] = fmin(best[0], now() - start);
        for (int bits = 4; bits <= 8; bits += 4) {
            start = now();
            k->quantize_tokens(NULL, &m.rows, bits, codes, D, scales, 1, &n_saturated);
            best[bits / 4] = fmin(best[bits / 4], now() - start);
        }
    }
    printf("%-7s 64 rows of 128: store_rows %8.0f ns, quantize_tokens int8 %8.0f, int4 %8.0f\n",
           k->name, best[0], best[2], best[1]);
    edge_free(m.data, m.size);
}

static void bench_seal(const struct kvc_kernels *k)
{
    const struct kvc_page_layout from =
        kvc_page_layout_make(128, 128, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
    uint8_t *src = unsealed_page(&from, 64);
    for (size_t i = 0; i < 8; i++) {
        const struct kvc_page_layout to = sealed_layout(128, 128, i,
                                                        i == 7             ? 5
                                                        : i == 3 || i == 6 ? i - 1
                                                                           : i);
        uint8_t *dst = edge_new(to.n_bytes);
        const struct kvc_seal_job job = {&from, &to, src, NULL, dst, 64, 2.0f, 2.0f};
        double best = 1e30;
        for (int n = 0; n < 200; n++) {
            const double start = now();
            k->seal_page(NULL, &job);
            best = fmin(best, now() - start);
        }
        printf("%-7s seal_page %s %s: %8.0f ns\n", k->name,
               (const char *[]){"f16 ", "int8", "int4", "int6"}[to.k_format],
               (const char *[]){"head   ", "token  ", "channel"}[to.k_scale], best);
        edge_free(dst, to.n_bytes);
    }
    edge_free(src, from.n_bytes);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_table_has_an_empty_slot),
        cmocka_unit_test(rows_equal_ref),
        cmocka_unit_test(sealed_pages_equal_ref),
        cmocka_unit_test(pages_read_as_the_format_says),
        cmocka_unit_test(six_bits_lie_in_two_planes),
        cmocka_unit_test(bytes_read_as_the_format_says),
        cmocka_unit_test(moved_rows_keep_their_bits),
    };
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            bench_rows(*k);
            bench_seal(*k);
        }
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
