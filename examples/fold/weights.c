/* Folds on tensors: the numbers that a fold multiplies are taken out, folded, and put back. */
#include "weights.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dequant.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "files and memory have one byte order");

/* The numbers of a block that its elements are proportional to, all together. */
struct fields {
    uint32_t type; /* of the tensor, as GGUF numbers it */
    kvc_dtype dtype;
    size_t n;
    size_t offsets[2]; /* from the start of the block */
};

static const struct fields *find_fields(uint32_t type)
{
    static const struct fields all[] = {
        {0, KVC_DTYPE_F32, 1, {0}},       /* F32 */
        {1, KVC_DTYPE_F16, 1, {0}},       /* F16 */
        {2, KVC_DTYPE_F16, 1, {0}},       /* Q4_0 */
        {3, KVC_DTYPE_F16, 2, {0, 2}},    /* Q4_1: scale and minimum */
        {6, KVC_DTYPE_F16, 1, {0}},       /* Q5_0 */
        {7, KVC_DTYPE_F16, 2, {0, 2}},    /* Q5_1 */
        {8, KVC_DTYPE_F16, 1, {0}},       /* Q8_0 */
        {10, KVC_DTYPE_F16, 2, {80, 82}}, /* Q2_K: of scales and of minima */
        {11, KVC_DTYPE_F16, 1, {108}},    /* Q3_K */
        {12, KVC_DTYPE_F16, 2, {0, 2}},   /* Q4_K */
        {13, KVC_DTYPE_F16, 2, {0, 2}},   /* Q5_K */
        {14, KVC_DTYPE_F16, 1, {208}},    /* Q6_K */
        {30, KVC_DTYPE_BF16, 1, {0}},     /* BF16 */
    };

    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        if (all[i].type == type)
            return &all[i];
    return NULL;
}

static size_t size_of(kvc_dtype dtype)
{
    return dtype == KVC_DTYPE_F32 ? 4 : 2;
}

/* All fields of a weight, aligned, [n_rows][n_cols]. */
struct numbers {
    kvc_dtype dtype;
    size_t n_rows, n_cols;
    unsigned char *data;
};

static size_t n_blocks(const struct weight *w)
{
    return w->n_rows * (w->n_cols / tensor_type_find(w->type)->block_size);
}

size_t weight_n_bytes(const struct weight *w)
{
    return w->data ? n_blocks(w) * tensor_type_find(w->type)->block_bytes : 0;
}

void weight_row(const struct weight *w, size_t row, float *out)
{
    const struct tensor_type *type = tensor_type_find(w->type);
    const size_t n = w->n_cols / type->block_size;
    const uint8_t *src = w->data + row * n * type->block_bytes;

    for (size_t i = 0; i < n; i++)
        type->dequantize(src + i * type->block_bytes, out + i * type->block_size);
}

static bool take_numbers(const struct weight *w, struct numbers *out, struct failure *failure)
{
    const struct fields *fields = find_fields(w->type);

    if (!fields)
        return fail_with(failure, "weights of type %u cannot be folded", (unsigned)w->type);
    const size_t block = tensor_type_find(w->type)->block_bytes;
    const size_t size = size_of(fields->dtype), n = n_blocks(w);
    *out = (struct numbers){.dtype = fields->dtype,
                            .n_rows = w->n_rows,
                            .n_cols = n / w->n_rows * fields->n,
                            .data = malloc(n * fields->n * size)};
    if (!out->data)
        return fail_with(failure, "out of memory");
    for (size_t i = 0; i < n; i++)
        for (size_t f = 0; f < fields->n; f++)
            memcpy(out->data + (i * fields->n + f) * size, w->data + i * block + fields->offsets[f],
                   size);
    return true;
}

static void put_numbers(const struct weight *w, const struct numbers *from)
{
    const struct fields *fields = find_fields(w->type);
    const size_t block = tensor_type_find(w->type)->block_bytes;
    const size_t size = size_of(fields->dtype), n = n_blocks(w);

    for (size_t i = 0; i < n; i++)
        for (size_t f = 0; f < fields->n; f++)
            memcpy(w->data + i * block + fields->offsets[f],
                   from->data + (i * fields->n + f) * size, size);
}

static double number_at(const struct numbers *numbers, size_t i)
{
    static const uint32_t types[] = {
        [KVC_DTYPE_F32] = 0, [KVC_DTYPE_F16] = 1, [KVC_DTYPE_BF16] = 30};
    float x;

    tensor_type_find(types[numbers->dtype])
        ->dequantize(numbers->data + i * size_of(numbers->dtype), &x);
    return (double)x;
}

/* What a row is to be multiplied with; one gain for all heads has the scales of the first. */
static double factor_of(const struct head_scales *scales, struct fold_way way, size_t row,
                        size_t n_rows)
{
    const size_t d = scales->head_dim;
    const size_t rows = n_rows == d ? d : n_rows / scales->n_kv_heads;
    const double s = (double)scales->values[row / rows * d + row % d];

    return (way.side == KVC_FOLD_K) == way.undo ? s : 1.0 / s;
}

/* A row's numbers, as they were with what they are multiplied with, and as they are. */
struct row_change {
    const struct numbers *before, *after;
    size_t row;
    double offset, factor;
};

static double exact_at(const struct row_change *c, size_t col)
{
    return (number_at(c->before, c->row * c->before->n_cols + col) + c->offset) * c->factor;
}

/* Root mean square of what the numbers of a row should be; what was no number does not count. */
static double row_level(const struct row_change *c)
{
    const size_t n = c->before->n_cols;
    double squares = 0.0;

    for (size_t i = 0; i < n; i++) {
        const double exact = exact_at(c, i);
        squares += isfinite(exact) ? exact * exact : 0.0;
    }
    return sqrt(squares / (double)n);
}

static void measure_row(const struct row_change *c, struct rounding *rounding)
{
    const bool is_half = c->before->dtype == KVC_DTYPE_F16;
    const double smallest = is_half ? 0x1p-14 : (double)FLT_MIN;
    const double largest = is_half ? 65504.0 : (double)FLT_MAX;
    const size_t n = c->before->n_cols;
    const double floor = row_level(c) / 16.0;

    for (size_t i = 0; i < n; i++) {
        const double was = number_at(c->before, c->row * n + i), exact = exact_at(c, i),
                     is = number_at(c->after, c->row * n + i) + c->offset;
        if (is == exact || !isfinite(was))
            continue;
        const bool is_lost = !isfinite(exact) || !isfinite(is);
        rounding->n_inexact++;
        rounding->n_overflow += is_lost || fabs(exact) > largest;
        rounding->n_underflow += fabs(exact) >= smallest * c->factor && fabs(is) < smallest;
        rounding->max_error =
            is_lost ? INFINITY
                    : fmax(rounding->max_error, fabs(is - exact) / fmax(fabs(exact), floor));
    }
}

static void measure(const struct numbers *before, const struct numbers *after, double offset,
                    struct fold_way way, const struct head_scales *scales,
                    struct rounding *rounding)
{
    for (size_t row = 0; row < before->n_rows; row++) {
        const struct row_change change = {.before = before,
                                          .after = after,
                                          .row = row,
                                          .offset = offset,
                                          .factor = factor_of(scales, way, row, before->n_rows)};
        measure_row(&change, rounding);
    }
}

/* The fold itself, on numbers in order. */
struct fold {
    kvc_ctx *ctx;
    struct fold_way way;
    const struct head_scales *scales;
    bool is_gain;
    float offset;
};

static kvc_status fold_numbers(const struct fold *f, const struct numbers *numbers)
{
    const int32_t n_kv_heads = (int32_t)f->scales->n_kv_heads;
    const int32_t head_dim = (int32_t)f->scales->head_dim;
    const kvc_weight weight = {.struct_size = sizeof(weight),
                               .data = numbers->data,
                               .dtype = numbers->dtype,
                               .n_rows = numbers->n_rows,
                               .n_cols = numbers->n_cols,
                               .stride = numbers->n_cols};

    if (f->is_gain)
        return kvc_fold_norm(numbers->data, numbers->dtype, numbers->n_rows, f->offset, f->way.side,
                             f->way.undo, f->scales->values, n_kv_heads, head_dim, NULL);
    return kvc_fold_linear(f->ctx, &weight, f->way.side, f->way.undo, f->scales->values, n_kv_heads,
                           head_dim, NULL);
}

static bool fold(const struct fold *f, const struct weight *w, struct rounding *rounding,
                 struct failure *failure)
{
    struct numbers before = {0}, after = {0};

    if (!w->data)
        return true;
    bool ok = take_numbers(w, &before, failure) && take_numbers(w, &after, failure);
    if (ok) {
        const kvc_status status = fold_numbers(f, &after);
        ok = status == KVC_OK ||
             fail_with(failure, "a weight cannot be folded: %s", kvc_status_str(status));
    }
    if (ok) {
        measure(&before, &after, (double)f->offset, f->way, f->scales, rounding);
        put_numbers(w, &after);
    }
    free(before.data);
    free(after.data);
    return ok;
}

bool weight_fold(kvc_ctx *ctx, const struct weight *weight, struct fold_way way,
                 const struct head_scales *scales, struct rounding *rounding,
                 struct failure *failure)
{
    const struct fold f = {.ctx = ctx, .way = way, .scales = scales};

    return fold(&f, weight, rounding, failure);
}

bool weight_fold_gain(const struct weight *gain, float offset, struct fold_way way,
                      const struct head_scales *scales, struct rounding *rounding,
                      struct failure *failure)
{
    const struct fold f = {.way = way, .scales = scales, .is_gain = true, .offset = offset};

    return fold(&f, gain, rounding, failure);
}

bool weight_compare(const struct weight *before, const struct weight *after, float offset,
                    struct fold_way way, const struct head_scales *scales,
                    struct rounding *rounding, struct failure *failure)
{
    struct numbers was = {0}, is = {0};

    if (!before->data)
        return true;
    const bool ok = take_numbers(before, &was, failure) && take_numbers(after, &is, failure);
    if (ok)
        measure(&was, &is, (double)offset, way, scales, rounding);
    free(was.data);
    free(is.data);
    return ok;
}
