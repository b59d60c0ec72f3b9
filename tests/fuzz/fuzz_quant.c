/*
 * libFuzzer: any bytes as floats, halves or bf16, in any shape. Quantizing, dequantizing, storing,
 * loading and sealing must not trap and must give the bytes of the reference in every table.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/half.h"
#include "kernels/kernels.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What the first bytes of the input choose. */
struct choice {
    uint8_t dtype, cols, gap, bits, n_rows, k_side, v_side, d_v;
    float factor, absmax;
};

/* Two outputs of exact size with equal old bytes. */
struct pair {
    size_t size;
    uint8_t *want, *got;
};

static struct pair pair_new(size_t size)
{
    struct pair p = {.size = size, .want = malloc(size), .got = malloc(size)};
    if (!p.want || !p.got)
        abort();
    memset(p.want, 0xa5, size);
    memset(p.got, 0xa5, size);
    return p;
}

static void pair_check(struct pair *p)
{
    if (memcmp(p->want, p->got, p->size) != 0)
        abort();
    free(p->want);
    free(p->got);
}

/* Floats may differ in the payload of a NaN. */
static void floats_check(struct pair *p)
{
    for (size_t i = 0; i < p->size; i += sizeof(float)) {
        float want, got;
        memcpy(&want, p->want + i, sizeof(want));
        memcpy(&got, p->got + i, sizeof(got));
        if (isnan(want) && isnan(got))
            memcpy(p->got + i, &want, sizeof(want));
    }
    pair_check(p);
}

static uint16_t *halves(struct pair *p, int got)
{
    return (uint16_t *)(void *)(got ? p->got : p->want);
}

static float *floats(struct pair *p, int got)
{
    return (float *)(void *)(got ? p->got : p->want);
}

static void fuzz_codes(const struct kvc_kernels *k, const struct kvc_rows *src,
                       const struct choice *choice)
{
    const int bits = choice->bits % 2 ? 8 : 4, max = bits == 8 ? 127 : 7;
    const size_t n = bits == 8 ? src->n_cols : (src->n_cols + 1) / 2, stride = n + choice->gap % 3;
    const struct kvc_fixed_code code = {.bits = bits,
                                        .lo = -max - (choice->bits / 4 % 2),
                                        .hi = max,
                                        .factor = choice->factor,
                                        .divide = choice->bits / 2 % 2};
    struct pair p = pair_new(src->n_rows * stride), scales = pair_new(2 * src->n_rows);
    struct pair channels = pair_new(2 * src->n_cols), minima = pair_new(2 * src->n_cols);
    struct pair x = pair_new(src->n_rows * src->n_cols * sizeof(float));
    uint64_t want = 0, got = 0;

    kvc_quantize_fixed_ref(NULL, src, &code, p.want, stride);
    k->quantize_fixed(NULL, src, &code, p.got, stride);
    if (memcmp(p.want, p.got, p.size) != 0)
        abort();
    kvc_quantize_tokens_ref(NULL, src, bits, p.want, stride, halves(&scales, 0), 1, &want);
    k->quantize_tokens(NULL, src, bits, p.got, stride, halves(&scales, 1), 1, &got);
    if (want != got || memcmp(p.want, p.got, p.size) != 0)
        abort();
    const struct kvc_dequant by_row = {
        .bits = bits, .scales = halves(&scales, 0), .scale_stride = 1};
    kvc_dequantize_rows_ref(NULL, p.want, stride, &by_row, src->n_rows, src->n_cols, floats(&x, 0),
                            src->n_cols);
    k->dequantize_rows(NULL, p.want, stride, &by_row, src->n_rows, src->n_cols, floats(&x, 1),
                       src->n_cols);
    floats_check(&x);
    kvc_quantize_channels_ref(NULL, src, bits, p.want, stride, halves(&channels, 0),
                              halves(&minima, 0), &want);
    k->quantize_channels(NULL, src, bits, p.got, stride, halves(&channels, 1), halves(&minima, 1),
                         &got);
    if (want != got)
        abort();
    pair_check(&p);
    pair_check(&scales);
    pair_check(&channels);
    pair_check(&minima);
}

/* The bytes themselves as codes and parameters. */
static void fuzz_dequantize(const struct kvc_kernels *k, const uint8_t *data, size_t size,
                            const struct choice *choice)
{
    const int bits = choice->bits % 2 ? 8 : 4;
    const size_t n_cols = 1 + choice->cols % 100, n = bits == 8 ? n_cols : (n_cols + 1) / 2;
    if (size < 4 * n_cols + n)
        return;
    const size_t n_rows = (size - 4 * n_cols) / n;
    uint16_t *params = malloc(4 * n_cols);
    uint8_t *codes = malloc(n_rows * n);
    if (!params || !codes)
        abort();
    memcpy(params, data, 4 * n_cols);
    memcpy(codes, data + 4 * n_cols, n_rows * n);
    const struct kvc_dequant kinds[] = {
        {.bits = bits, .scale = choice->factor},
        {.bits = bits, .scales = params, .minima = params + n_cols}};
    for (int i = 0; i < 2; i++) {
        struct pair x = pair_new(n_rows * n_cols * sizeof(float));
        kvc_dequantize_rows_ref(NULL, codes, n, &kinds[i], n_rows, n_cols, floats(&x, 0), n_cols);
        k->dequantize_rows(NULL, codes, n, &kinds[i], n_rows, n_cols, floats(&x, 1), n_cols);
        floats_check(&x);
    }
    free(params);
    free(codes);
}

static void fuzz_rows(const struct kvc_kernels *k, const struct kvc_rows *src,
                      const struct choice *choice)
{
    const size_t n = src->n_cols + choice->gap % 9;
    struct pair half = pair_new(src->n_rows * n * 2), x = pair_new(src->n_rows * n * 4);
    struct kvc_store_counts want = {0}, got = {0};
    struct kvc_range want_range, got_range;

    kvc_range_rows_ref(NULL, src, &want_range);
    k->range_rows(NULL, src, &got_range);
    if (want_range.min != got_range.min || want_range.max != got_range.max ||
        want_range.n_nonfinite != got_range.n_nonfinite)
        abort();
    kvc_store_rows_ref(NULL, src, halves(&half, 0), n, n, &want);
    k->store_rows(NULL, src, halves(&half, 1), n, n, &got);
    if (want.n_nonfinite != got.n_nonfinite || want.n_saturated != got.n_saturated)
        abort();
    pair_check(&half);
    kvc_load_rows_ref(NULL, src, floats(&x, 0), n, n);
    k->load_rows(NULL, src, floats(&x, 1), n, n);
    floats_check(&x);
}

/* The bytes as the finite halves of an open page. */
static void fuzz_seal(const struct kvc_kernels *k, const uint8_t *data, size_t size,
                      const struct choice *choice)
{
    const int d_k = 1 + choice->cols % 80, d_v = 1 + choice->d_v % 80;
    const struct kvc_page_layout from =
        kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
    const struct kvc_page_layout to =
        kvc_page_layout_make(d_k, d_v, choice->k_side % 3, choice->k_side / 3 % 3,
                             choice->v_side % 3, choice->v_side / 3 % 3, false, KVC_PAGE_ROWS);
    uint16_t *src = calloc(from.n_bytes, 1);
    if (!src)
        abort();
    memcpy(src, data, size < from.n_bytes ? size : from.n_bytes);
    for (size_t i = 0; i < from.n_bytes / 2; i++)
        if ((src[i] & 0x7c00) == 0x7c00)
            src[i] &= 0xbfff;
    struct pair p = pair_new(to.n_bytes);
    struct kvc_seal_job job = {.from = &from,
                               .to = &to,
                               .src = (const uint8_t *)src,
                               .dst = p.want,
                               .n_rows = 1 + choice->n_rows % KVC_PAGE_ROWS,
                               .absmax_k = choice->absmax,
                               .absmax_v = choice->absmax};
    kvc_seal_page_ref(NULL, &job);
    job.dst = p.got;
    k->seal_page(NULL, &job);
    pair_check(&p);
    free(src);
}

static void fuzz_table(const struct kvc_kernels *k, const uint8_t *data, size_t size,
                       const struct choice *choice)
{
    const kvc_dtype dtype = (kvc_dtype)(choice->dtype % 3);
    const size_t element = dtype == KVC_DTYPE_F32 ? 4 : 2, n = size / element;
    const size_t n_cols = 1 + choice->cols, stride = n_cols + choice->gap % 5;

    fuzz_dequantize(k, data, size, choice);
    fuzz_seal(k, data, size, choice);
    if (n < n_cols)
        return;
    const size_t n_rows = (n - n_cols) / stride + 1;
    const size_t bytes = ((n_rows - 1) * stride + n_cols) * element;
    void *copy = malloc(bytes);
    if (!copy)
        abort();
    memcpy(copy, data, bytes);
    const struct kvc_rows src = {
        .data = copy, .dtype = dtype, .stride = stride, .n_rows = n_rows, .n_cols = n_cols};
    fuzz_codes(k, &src, choice);
    fuzz_rows(k, &src, choice);
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct choice choice;
    if (size < sizeof(choice))
        return 0;
    memcpy(&choice, data, sizeof(choice));
    choice.absmax = isfinite(choice.absmax) ? fabsf(choice.absmax) : 0.0f;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k != &kvc_kernels_ref; k++)
        fuzz_table(*k, data + sizeof(choice), size - sizeof(choice), &choice);
    return 0;
}
