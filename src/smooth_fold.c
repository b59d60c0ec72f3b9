/* smooth_fold.c - folding scales into projections and norms, and the check of a fold. */
#include <float.h>
#include <math.h>

#include "kernels/half.h"
#include "smooth.h"

/* What a fold does to elements of a type. */
struct fold {
    kvc_dtype dtype;
    bool divides;
    float offset; /* of a gain: what is stored is less by it */
    kvc_fold_counts counts;
};

static float load(const void *data, kvc_dtype dtype, size_t i)
{
    switch (dtype) {
    case KVC_DTYPE_F16: return kvc_half_to_float(((const uint16_t *)data)[i]);
    case KVC_DTYPE_BF16: return kvc_bf16_to_float(((const uint16_t *)data)[i]);
    default: return ((const float *)data)[i];
    }
}

static void store(void *data, kvc_dtype dtype, size_t i, float x)
{
    switch (dtype) {
    case KVC_DTYPE_F16: ((uint16_t *)data)[i] = kvc_half_from_float(x); break;
    case KVC_DTYPE_BF16: ((uint16_t *)data)[i] = kvc_bf16_from_float(x); break;
    default: ((float *)data)[i] = x;
    }
}

static float largest_of(kvc_dtype dtype)
{
    switch (dtype) {
    case KVC_DTYPE_F16: return KVC_HALF_MAX;
    case KVC_DTYPE_BF16: return kvc_bf16_to_float(0x7f7f);
    default: return FLT_MAX;
    }
}

/* The smallest normal number; BF16 has the exponents of F32. */
static float smallest_of(kvc_dtype dtype)
{
    return dtype == KVC_DTYPE_F16 ? 0x1p-14f : FLT_MIN;
}

static void fold_element(struct fold *f, void *data, size_t i, float scale)
{
    const float old = load(data, f->dtype, i);
    const double offset = (double)f->offset, x = (double)old + offset, s = (double)scale;
    if (!isfinite(old))
        return;
    /* A quotient or product of floats is rounded to a float as if it had not been one of doubles.
     */
    const double exact = f->divides ? x / s : x * s;
    store(data, f->dtype, i, (float)(exact - offset));
    if (!isfinite(load(data, f->dtype, i))) {
        f->counts.n_overflow++;
        store(data, f->dtype, i, (float)copysign((double)largest_of(f->dtype), x));
    }
    const double is = (double)load(data, f->dtype, i) + offset;
    const double smallest = (double)smallest_of(f->dtype);
    if (fabs(x) >= smallest && fabs(is) < smallest)
        f->counts.n_underflow++;
    else if (exact != 0.0 && fabs(is) >= smallest)
        f->counts.max_rel_error = fmax(f->counts.max_rel_error, fabs(is / exact - 1.0));
}

static bool scales_ok(const float *scales, int32_t n_kv_heads, int32_t head_dim)
{
    if (!scales || n_kv_heads < 1 || head_dim < 1)
        return false;
    for (size_t i = 0; i < (size_t)n_kv_heads * (size_t)head_dim; i++)
        if (!(scales[i] > 0.0f && isfinite(scales[i])))
            return false;
    return true;
}

static bool aligned(const void *data, kvc_dtype dtype)
{
    return (unsigned)dtype <= KVC_DTYPE_BF16 && (uintptr_t)data % kvc_dtype_size(dtype) == 0;
}

static bool side_ok(kvc_fold_side side, const kvc_fold_counts *counts)
{
    return (unsigned)side <= KVC_FOLD_Q && (!counts || kvc_struct_size(counts) >= sizeof(*counts));
}

/* Rows that one KV head serves: its own, or those of its query heads; 0: the shape is wrong. */
static size_t rows_of_head(size_t n_rows, kvc_fold_side side, int32_t n_kv_heads, int32_t head_dim)
{
    const size_t width = (size_t)n_kv_heads * (size_t)head_dim;
    if (n_rows == 0 || n_rows % width != 0 || (side == KVC_FOLD_K && n_rows != width))
        return 0;
    return n_rows / (size_t)n_kv_heads;
}

/* Whether the last byte of a weight is inside the address space. */
static bool weight_ok(const kvc_weight *w)
{
    size_t last;
    return w->struct_size >= sizeof(*w) && w->data && aligned(w->data, w->dtype) &&
           w->n_cols >= 1 && w->stride >= w->n_cols &&
           (!w->bias || aligned(w->bias, w->bias_dtype)) &&
           !__builtin_mul_overflow(w->n_rows, w->stride, &last) &&
           last <= PTRDIFF_MAX / kvc_dtype_size(w->dtype);
}

kvc_status kvc_fold_linear(kvc_ctx *ctx, const kvc_weight *weight, kvc_fold_side side, bool undo,
                           const float *scales, int32_t n_kv_heads, int32_t head_dim,
                           kvc_fold_counts *counts)
{
    KVC_CHECK(ctx && weight && weight_ok(weight) && side_ok(side, counts) &&
                  scales_ok(scales, n_kv_heads, head_dim),
              KVC_E_ARG);
    const size_t rows = rows_of_head(weight->n_rows, side, n_kv_heads, head_dim);
    KVC_CHECK(rows > 0, KVC_E_ARG);

    const size_t d = (size_t)head_dim;
    struct fold f = {.divides = (side == KVC_FOLD_K) != undo};
    for (size_t r = 0; r < weight->n_rows; r++) {
        const float scale = scales[r / rows * d + r % d];
        f.dtype = weight->dtype;
        for (size_t c = 0; c < weight->n_cols; c++)
            fold_element(&f, weight->data, r * weight->stride + c, scale);
        f.dtype = weight->bias_dtype;
        if (weight->bias)
            fold_element(&f, weight->bias, r, scale);
    }
    if (counts)
        kvc_struct_write(counts, &f.counts, sizeof(f.counts));
    return KVC_OK;
}

/* Whether all heads have the scales of the first. */
static bool all_alike(const float *scales, int32_t n_kv_heads, int32_t head_dim)
{
    const size_t d = (size_t)head_dim;
    for (size_t i = d; i < (size_t)n_kv_heads * d; i++)
        if (scales[i] != scales[i % d])
            return false;
    return true;
}

kvc_status kvc_fold_norm(void *gain, kvc_dtype dtype, size_t n_gains, float offset,
                         kvc_fold_side side, bool undo, const float *scales, int32_t n_kv_heads,
                         int32_t head_dim, kvc_fold_counts *counts)
{
    KVC_CHECK(gain && aligned(gain, dtype) && (offset == 0.0f || offset == 1.0f) &&
                  side_ok(side, counts) && scales_ok(scales, n_kv_heads, head_dim),
              KVC_E_ARG);
    const size_t d = (size_t)head_dim;
    size_t rows = d;
    if (n_gains == d)
        KVC_CHECK(all_alike(scales, n_kv_heads, head_dim), KVC_E_ARG);
    else
        rows = rows_of_head(n_gains, side, n_kv_heads, head_dim);
    KVC_CHECK(rows > 0, KVC_E_ARG);

    struct fold f = {.dtype = dtype, .divides = (side == KVC_FOLD_K) != undo, .offset = offset};
    for (size_t i = 0; i < n_gains; i++)
        fold_element(&f, gain, i, scales[i / rows * d + i % d]);
    if (counts)
        kvc_struct_write(counts, &f.counts, sizeof(f.counts));
    return KVC_OK;
}

/* ---- the check ---- */

/* Turns pair j of a row by an angle, magnitude m. */
static void turn(double *x, const kvc_rope *rope, size_t j, double angle, double m)
{
    const bool neighbours = rope->layout == KVC_ROPE_INTERLEAVED;
    double *a = x + (neighbours ? 2 * j : j);
    double *b = neighbours ? a + 1 : a + rope->n_dims / 2;
    const double c = m * cos(angle), s = m * sin(angle), turned = *a * c - *b * s;
    *b = *a * s + *b * c;
    *a = turned;
}

/* A row of d elements of a view in double, rotated. */
static void rotated_row(const kvc_view *view, size_t token, size_t head, size_t d,
                        const kvc_smooth_probe *probe, const double *frequency, double magnitude,
                        double *x)
{
    const void *row = kvc_view_at(view, token, head);
    for (size_t c = 0; c < d; c++)
        x[c] = (double)load(row, view->dtype, c);
    for (size_t j = 0; probe->rope && j < (size_t)probe->rope->n_dims / 2; j++)
        turn(x, probe->rope, j, (double)probe->positions[token] * frequency[j], magnitude);
}

static double dot(const double *a, const double *b, size_t n)
{
    double sum = 0.0;
    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static bool same_rows(const kvc_view *a, const kvc_view *b)
{
    return a->n_tokens == b->n_tokens && a->n_heads == b->n_heads && a->head_dim == b->head_dim;
}

static bool probe_ok(const kvc_smooth_probe *p)
{
    if (!kvc_view_ok(p->q) || !kvc_view_ok(p->k) || !kvc_view_ok(p->q_folded) ||
        !kvc_view_ok(p->k_folded))
        return false;
    if (!same_rows(p->q, p->q_folded) || !same_rows(p->k, p->k_folded) ||
        p->q->n_tokens != p->k->n_tokens || p->q->head_dim != p->k->head_dim ||
        p->q->head_dim > KVC_MAX_HEAD_DIM || p->q->n_heads % p->k->n_heads != 0)
        return false;
    if (!p->positions && p->q->n_tokens > 0)
        return false;
    for (size_t i = 0; i < p->q->n_tokens; i++)
        if (p->positions[i] < 0)
            return false;
    return true;
}

kvc_status kvc_smooth_check(kvc_ctx *ctx, const kvc_smooth_probe *probe, double *max_rel_change)
{
    double frequency[KVC_MAX_HEAD_DIM / 2], magnitude = 1.0;
    double q[2][KVC_MAX_HEAD_DIM] = {{0.0}}, k[2][KVC_MAX_HEAD_DIM] = {{0.0}};
    double change = 0.0, most = 0.0;

    KVC_CHECK(ctx && probe && max_rel_change && probe->struct_size >= sizeof(*probe) &&
                  probe_ok(probe),
              KVC_E_ARG);
    if (probe->rope) {
        KVC_CHECK(probe->rope->n_dims <= (int32_t)probe->q->head_dim, KVC_E_ARG);
        KVC_TRY(kvc_rope_frequencies(probe->rope, NULL, frequency, &magnitude));
    }
    const size_t n = probe->q->n_tokens, d = probe->q->head_dim;
    const size_t group = probe->q->n_heads / probe->k->n_heads;
    bool finite = true;
    for (size_t i = 0; i < n; i++)
        for (size_t h = 0; h < probe->q->n_heads; h++) {
            rotated_row(probe->q, i, h, d, probe, frequency, magnitude, q[0]);
            rotated_row(probe->q_folded, i, h, d, probe, frequency, magnitude, q[1]);
            for (size_t j = 0; j < n; j++) {
                rotated_row(probe->k, j, h / group, d, probe, frequency, magnitude, k[0]);
                rotated_row(probe->k_folded, j, h / group, d, probe, frequency, magnitude, k[1]);
                const double was = dot(q[0], k[0], d), is = dot(q[1], k[1], d);
                finite = finite && isfinite(was) && isfinite(is);
                change = fmax(change, fabs(is - was));
                most = fmax(most, fabs(was));
            }
        }
    *max_rel_change = !finite ? NAN : change == 0.0 ? 0.0 : change / most;
    return KVC_OK;
}
