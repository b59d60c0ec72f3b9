/* score_learned.c - learned scorers: the file KVCS, and what it computes. */
#include "kvc/score.h"

#include <math.h>
#include <string.h>

#include "arena.h"
#include "bytes.h"
#include "check.h"
#include "ctx.h"
#include "kernels/half.h"

enum {
    HEADER = 64, /* bytes before the payload */
    VERSION = 1,
    FLAG_NORM = 1, /* mean and inv_std */
    FLAG_ROWS = 2, /* padding for each row */
    MAX_KERNEL = 9,
    MAX_WEIGHTS = 1 << 24,
    TAG_AT = 24,
    TAG_SIZE = 32,
    BLOCK = 64 /* tokens that are loaded at once */
};

struct kvc_scorer {
    kvc_allocator mem;
    kvc_scorer_desc desc; /* without pointers */
    size_t n_in, kernel, stride;
    double taps[MAX_KERNEL];      /* what each adds beside x: - sum of weights * mean */
    _Alignas(64) float weights[]; /* [kernel][stride], times inv_std */
};

static const uint8_t magic[4] = {'K', 'V', 'C', 'S'};

/* The fields that say how large a scorer is and what it does. */
static bool fields_ok(const kvc_scorer_desc *d)
{
    if ((unsigned)d->kind > KVC_SCORER_CONV1D || (unsigned)d->activation > KVC_ACTIVATION_SIGMOID ||
        (unsigned)d->dtype > KVC_DTYPE_F16 || d->n_in < 1 || d->kernel < 1 ||
        d->kernel > MAX_KERNEL || d->kernel % 2 == 0)
        return false;
    if (d->kind == KVC_SCORER_LINEAR && (d->kernel != 1 || d->row_padding))
        return false;
    return d->n_in <= MAX_WEIGHTS / d->kernel;
}

static size_t weight_count(const kvc_scorer_desc *d)
{
    return (size_t)d->n_in * (size_t)d->kernel;
}

static size_t payload_size(const kvc_scorer_desc *d, bool norm)
{
    const size_t weight = d->dtype == KVC_DTYPE_F16 ? 2 : 4;
    return (norm ? 8 * (size_t)d->n_in : 0) + weight_count(d) * weight + 4;
}

static kvc_status check_numbers(const float *x, size_t n, float most)
{
    for (size_t i = 0; i < n; i++) {
        KVC_CHECK(isfinite(x[i]), KVC_E_NONFINITE);
        KVC_CHECK(fabsf(x[i]) < most, KVC_E_ARG);
    }
    return KVC_OK;
}

static uint8_t *put_floats(uint8_t *at, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++, at += 4)
        kvc_put(at, kvc_float_bits(x[i]), 4);
    return at;
}

static uint8_t *put_halves(uint8_t *at, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++, at += 2)
        kvc_put(at, kvc_half_from_float(x[i]), 2);
    return at;
}

static void put_payload(const kvc_scorer_desc *d, uint8_t *at)
{
    if (d->mean) {
        at = put_floats(at, d->mean, (size_t)d->n_in);
        at = put_floats(at, d->inv_std, (size_t)d->n_in);
    }
    if (d->dtype == KVC_DTYPE_F16)
        at = put_halves(at, d->weights, weight_count(d));
    else
        at = put_floats(at, d->weights, weight_count(d));
    put_floats(at, &d->bias, 1);
}

static void put_header(const kvc_scorer_desc *d, size_t n_payload, uint8_t *at)
{
    memset(at, 0, HEADER);
    memcpy(at, magic, sizeof(magic));
    kvc_put(at + 4, VERSION, 2);
    kvc_put(at + 6, (uint32_t)d->kind, 2);
    kvc_put(at + 8, (uint32_t)d->n_in, 4);
    kvc_put(at + 12, (uint32_t)d->kernel, 2);
    at[14] = d->dtype == KVC_DTYPE_F16;
    at[15] = (uint8_t)d->activation;
    kvc_put(at + 16, (d->mean ? FLAG_NORM : 0u) | (d->row_padding ? FLAG_ROWS : 0u), 4);
    kvc_put(at + 20, (uint32_t)n_payload, 4);
    memcpy(at + TAG_AT, d->tag, TAG_SIZE);
    kvc_put(at + 56, kvc_crc32(at + HEADER, n_payload), 4);
}

kvc_status kvc_scorer_encode(const kvc_scorer_desc *desc, void *bytes, size_t size, size_t *n)
{
    kvc_scorer_desc d;

    KVC_CHECK(desc && n, KVC_E_ARG);
    KVC_TRY(kvc_struct_read(&d, sizeof(d), desc, sizeof(d)));
    KVC_CHECK(fields_ok(&d) && d.weights && !d.mean == !d.inv_std, KVC_E_ARG);
    const float most = d.dtype == KVC_DTYPE_F16 ? 65520.0f : INFINITY;
    KVC_TRY(check_numbers(d.weights, weight_count(&d), most));
    KVC_TRY(check_numbers(&d.bias, 1, INFINITY));
    KVC_TRY(check_numbers(d.mean, d.mean ? (size_t)d.n_in : 0, INFINITY));
    KVC_TRY(check_numbers(d.inv_std, d.mean ? (size_t)d.n_in : 0, INFINITY));
    const size_t payload = payload_size(&d, d.mean);
    KVC_CHECK(!bytes || size >= HEADER + payload, KVC_E_ARG);
    if (bytes) {
        put_payload(&d, (uint8_t *)bytes + HEADER);
        put_header(&d, payload, bytes);
    }
    *n = HEADER + payload;
    return KVC_OK;
}

/* The header of a file of n bytes, all of it checked but the numbers. */
static kvc_status read_header(const uint8_t *at, size_t n, kvc_scorer_desc *d, bool *norm)
{
    KVC_CHECK(n >= HEADER && memcmp(at, magic, sizeof(magic)) == 0 && kvc_get(at + 4, 2) == VERSION,
              KVC_E_FORMAT);
    const uint32_t flags = kvc_get32(at + 16), n_in = kvc_get32(at + 8);
    KVC_CHECK(flags <= (FLAG_NORM | FLAG_ROWS) && n_in <= MAX_WEIGHTS && kvc_get32(at + 60) == 0 &&
                  at[14] <= 1,
              KVC_E_FORMAT);
    *d = (kvc_scorer_desc){
        .struct_size = sizeof(*d),
        .kind = (kvc_scorer_kind)kvc_get(at + 6, 2),
        .activation = (kvc_activation)at[15],
        .dtype = at[14] ? KVC_DTYPE_F16 : KVC_DTYPE_F32,
        .n_in = (int32_t)n_in,
        .kernel = (int32_t)kvc_get(at + 12, 2),
        .row_padding = flags & FLAG_ROWS,
    };
    memcpy(d->tag, at + TAG_AT, TAG_SIZE);
    *norm = flags & FLAG_NORM;
    KVC_CHECK(fields_ok(d), KVC_E_FORMAT);
    const size_t payload = payload_size(d, *norm);
    KVC_CHECK(kvc_get32(at + 20) == payload && n == HEADER + payload, KVC_E_FORMAT);
    return kvc_get32(at + 56) == kvc_crc32(at + HEADER, payload) ? KVC_OK : KVC_E_FORMAT;
}

static float float_at(const uint8_t *at, size_t i)
{
    return kvc_float_from_bits(kvc_get32(at + 4 * i));
}

static float weight_at(const kvc_scorer_desc *d, const uint8_t *at, size_t i)
{
    return d->dtype == KVC_DTYPE_F16 ? kvc_half_to_float((uint16_t)kvc_get(at + 2 * i, 2))
                                     : float_at(at, i);
}

/* One tap: its weights take in inv_std, and what they make of the mean. */
static kvc_status read_tap(kvc_scorer *s, size_t tap, const uint8_t *weights, const uint8_t *norm)
{
    double sum = 0.0;
    for (size_t c = 0; c < s->n_in; c++) {
        const float w = weight_at(&s->desc, weights, tap * s->n_in + c);
        const float mean = norm ? float_at(norm, c) : 0.0f;
        const float folded = norm ? w * float_at(norm, s->n_in + c) : w;
        /* no product with an infinite factor is finite */
        KVC_CHECK(isfinite(mean) && isfinite(folded), KVC_E_FORMAT);
        s->weights[tap * s->stride + c] = folded;
        sum -= (double)folded * (double)mean;
    }
    for (size_t c = s->n_in; c < s->stride; c++)
        s->weights[tap * s->stride + c] = 0.0f;
    s->taps[tap] = sum;
    return KVC_OK;
}

static kvc_status read_payload(kvc_scorer *s, const uint8_t *at, bool norm)
{
    const uint8_t *weights = at + (norm ? 8 * s->n_in : 0);
    const size_t weight_size = s->desc.dtype == KVC_DTYPE_F16 ? 2 : 4;

    for (size_t j = 0; j < s->kernel; j++)
        KVC_TRY(read_tap(s, j, weights, norm ? at : NULL));
    s->desc.bias = float_at(weights + s->kernel * s->n_in * weight_size, 0);
    return isfinite(s->desc.bias) ? KVC_OK : KVC_E_FORMAT;
}

kvc_status kvc_scorer_create(kvc_ctx *ctx, const void *bytes, size_t n, kvc_scorer **out)
{
    kvc_scorer_desc desc;
    bool norm;

    KVC_CHECK(out, KVC_E_ARG);
    *out = NULL;
    KVC_CHECK(ctx && bytes, KVC_E_ARG);
    KVC_TRY(read_header(bytes, n, &desc, &norm));
    const size_t kernel = (size_t)desc.kernel, stride = kvc_attend_stride((size_t)desc.n_in);
    const size_t size = sizeof(kvc_scorer) + kernel * stride * sizeof(float);
    kvc_scorer *s = ctx->mem.alloc(ctx->mem.user, size, 64);
    KVC_CHECK(s, KVC_E_NOMEM);
    *s = (kvc_scorer){
        .mem = ctx->mem,
        .desc = desc,
        .n_in = (size_t)desc.n_in,
        .kernel = kernel,
        .stride = stride,
    };
    const kvc_status status = read_payload(s, (const uint8_t *)bytes + HEADER, norm);
    if (status != KVC_OK) {
        kvc_scorer_destroy(s);
        return status;
    }
    *out = s;
    return KVC_OK;
}

void kvc_scorer_destroy(kvc_scorer *scorer)
{
    if (scorer)
        scorer->mem.free(scorer->mem.user, scorer);
}

kvc_status kvc_scorer_info(const kvc_scorer *scorer, kvc_scorer_desc *out)
{
    KVC_CHECK(scorer && out && kvc_struct_size(out) >= sizeof(*out), KVC_E_ARG);
    kvc_struct_write(out, &scorer->desc, sizeof(scorer->desc));
    return KVC_OK;
}

/* One application. */
struct run {
    const kvc_scorer *scorer;
    size_t n;
    float *rows; /* [BLOCK][stride] */
    float *dots; /* [n][kernel]: each token with each tap */
    float *out;  /* [n] */
};

static size_t carve(void *ws, struct run *run)
{
    struct kvc_arena arena = {.base = ws};
    run->rows = kvc_arena_take(&arena, BLOCK * run->scorer->stride, sizeof(float), 64);
    run->dots = kvc_arena_take(&arena, run->n, run->scorer->kernel * sizeof(float), 64);
    run->out = kvc_arena_take(&arena, run->n, sizeof(float), 64);
    return arena.overflow ? SIZE_MAX : arena.used;
}

kvc_status kvc_scorer_apply_workspace_size(const kvc_scorer *scorer, const kvc_grid *grid,
                                           size_t *size)
{
    struct run run = {.scorer = scorer};

    KVC_CHECK(scorer && size, KVC_E_ARG);
    KVC_TRY(kvc_grid_tokens(grid, &run.n));
    const size_t need = carve(NULL, &run);
    KVC_CHECK(need != SIZE_MAX, KVC_E_ARG);
    *size = need;
    return KVC_OK;
}

static kvc_status multiply(const struct run *run, const kvc_ctx *ctx, const kvc_view *x)
{
    const kvc_scorer *s = run->scorer;
    for (size_t first = 0; first < run->n; first += BLOCK) {
        const size_t n = run->n - first < BLOCK ? run->n - first : BLOCK;
        const struct kvc_rows rows = kvc_view_rows(x, first, n, 0);
        KVC_TRY(ctx->k->load_rows(&ctx->queue, &rows, run->rows, s->stride, s->stride));
        KVC_TRY(ctx->k->dot_rows(&ctx->queue, run->rows, n, s->weights, s->kernel, s->n_in,
                                 run->dots + first * s->kernel, s->kernel));
    }
    return KVC_OK;
}

/* The sum of the taps on one token; line: tokens between borders, which the taps do not cross. */
static double sum_taps(const struct run *run, size_t i, size_t line)
{
    const kvc_scorer *s = run->scorer;
    const size_t half = s->kernel / 2, begin = i / line * line, end = begin + line;
    double z = (double)s->desc.bias;

    for (size_t j = 0; j < s->kernel; j++) {
        const size_t at = i + j; /* half further than the token of tap j */
        if (at >= begin + half && at < end + half)
            z += (double)run->dots[(at - half) * s->kernel + j] + s->taps[j];
    }
    return z;
}

kvc_status kvc_scorer_apply(kvc_ctx *ctx, const kvc_scorer *scorer, const kvc_view *x,
                            const kvc_grid *grid, float *scores, void *ws, size_t ws_size)
{
    struct run run = {.scorer = scorer};

    KVC_CHECK(ctx && scorer && kvc_view_ok(x), KVC_E_ARG);
    KVC_TRY(kvc_grid_tokens(grid, &run.n));
    KVC_CHECK(x->n_heads == 1 && x->n_tokens == run.n, KVC_E_ARG);
    KVC_CHECK(x->head_dim == scorer->n_in, KVC_E_MISMATCH);
    if (run.n == 0)
        return KVC_OK;
    KVC_CHECK(scores, KVC_E_ARG);
    const size_t need = carve(ws, &run);
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);

    KVC_TRY(multiply(&run, ctx, x));
    const size_t n_cols = (size_t)grid->n_cols;
    const size_t line = scorer->desc.row_padding ? n_cols : n_cols * (size_t)grid->n_rows;
    for (size_t i = 0; i < run.n; i++) {
        const double z = sum_taps(&run, i, line);
        run.out[i] = (float)z;
        KVC_CHECK(isfinite(run.out[i]), KVC_E_NONFINITE);
        if (scorer->desc.activation == KVC_ACTIVATION_SIGMOID)
            run.out[i] = (float)(1.0 / (1.0 + exp(-z)));
    }
    memcpy(scores, run.out, run.n * sizeof(*scores));
    return KVC_OK;
}
