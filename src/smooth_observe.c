/* smooth_observe.c - observations: what was seen of K and Q, and the file of it. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "arena.h"
#include "balance.h"
#include "bytes.h"
#include "smooth.h"

/* The file: docs/formats.md, section 5. */
enum { HEADER = 24, COUNTS = 24, CHECKSUM = 4, VERSION = 1 };

#define MAX_ROWS (UINT64_C(1) << 48) /* of a layer in a file; merging some does not overflow */

static const uint8_t magic[4] = {'K', 'V', 'C', 'O'};

static kvc_status take_shape(const kvc_observed_shape *shape, kvc_observed_shape *out)
{
    KVC_TRY(kvc_struct_read(out, sizeof(*out), shape, sizeof(*out)));
    KVC_CHECK(out->n_layers >= 1 && out->n_layers <= 65536 && out->n_kv_heads >= 1 &&
                  out->n_heads >= out->n_kv_heads && out->n_heads <= 65536 &&
                  out->n_heads % out->n_kv_heads == 0 && out->head_dim >= 1,
              KVC_E_ARG);
    return out->head_dim <= KVC_MAX_HEAD_DIM ? KVC_OK : KVC_E_UNSUPPORTED;
}

/* Everything in one allocation, this structure at its start. */
static kvc_observation *carve(const kvc_observed_shape *shape, struct kvc_arena *arena)
{
    const size_t n_layers = (size_t)shape->n_layers;
    const size_t width = (size_t)shape->n_kv_heads * (size_t)shape->head_dim;
    kvc_observation *o = kvc_arena_take(arena, 1, sizeof(*o), 64);
    struct kvc_observed_counts *counts = kvc_arena_take(arena, n_layers, sizeof(*counts), 64);
    double *sums = kvc_arena_take(arena, n_layers * KVC_N_SUMS, width * sizeof(double), 64);
    if (o)
        *o = (kvc_observation){.shape = *shape, .counts = counts, .sums = sums};
    return o;
}

kvc_status kvc_observation_create(kvc_ctx *ctx, const kvc_observed_shape *shape,
                                  kvc_observation **out)
{
    struct kvc_arena arena = {0};
    kvc_observed_shape s;

    KVC_CHECK(out, KVC_E_ARG);
    *out = NULL;
    KVC_CHECK(ctx && shape, KVC_E_ARG);
    KVC_TRY(take_shape(shape, &s));
    carve(&s, &arena);
    KVC_CHECK(!arena.overflow && arena.used <= PTRDIFF_MAX, KVC_E_NOMEM);
    arena = (struct kvc_arena){.base = ctx->mem.alloc(ctx->mem.user, arena.used, 64)};
    KVC_CHECK(arena.base, KVC_E_NOMEM);
    kvc_observation *o = carve(&s, &arena);
    o->ctx = ctx;
    kvc_observation_reset(o);
    *out = o;
    return KVC_OK;
}

void kvc_observation_destroy(kvc_observation *observation)
{
    if (observation)
        observation->ctx->mem.free(observation->ctx->mem.user, observation);
}

static size_t sum_count(const kvc_observation *o)
{
    return (size_t)o->shape.n_layers * KVC_N_SUMS * kvc_observed_width(o);
}

void kvc_observation_reset(kvc_observation *observation)
{
    if (!observation)
        return;
    memset(observation->counts, 0,
           (size_t)observation->shape.n_layers * sizeof(*observation->counts));
    memset(observation->sums, 0, sum_count(observation) * sizeof(*observation->sums));
}

/* ---- adding ---- */

/* Adds a row to the sums of its head; returns the elements that are left out. */
static uint64_t add_key(const float *x, size_t d, double *absmax, double *sum, double *square)
{
    uint64_t n_nonfinite = 0;
    for (size_t c = 0; c < d; c++) {
        const double k = (double)x[c];
        if (!isfinite(k)) {
            n_nonfinite++;
            continue;
        }
        absmax[c] = fabs(k) > absmax[c] ? fabs(k) : absmax[c];
        sum[c] += k;
        square[c] += k * k;
    }
    return n_nonfinite;
}

static uint64_t add_query(const float *x, size_t d, double *square)
{
    uint64_t n_nonfinite = 0;
    for (size_t c = 0; c < d; c++) {
        if (isfinite(x[c]))
            square[c] += (double)x[c] * (double)x[c];
        else
            n_nonfinite++;
    }
    return n_nonfinite;
}

static bool view_fits(const kvc_observation *o, int32_t layer, const kvc_view *view, int32_t heads)
{
    return layer >= 0 && layer < o->shape.n_layers && kvc_view_ok(view) &&
           view->n_heads == (size_t)heads && view->head_dim == (size_t)o->shape.head_dim;
}

static void load(const kvc_observation *o, const kvc_view *view, size_t token, size_t head,
                 float *x)
{
    const struct kvc_rows row = kvc_view_rows(view, token, 1, head);
    o->ctx->k->load_rows(&o->ctx->queue, &row, x, view->head_dim, view->head_dim);
}

kvc_status kvc_observe_keys(kvc_observation *observation, int32_t layer, const kvc_view *k)
{
    float x[KVC_MAX_HEAD_DIM];

    KVC_CHECK(observation && view_fits(observation, layer, k, observation->shape.n_kv_heads),
              KVC_E_ARG);
    double *absmax = kvc_observed_sums(observation, layer, KVC_K_ABSMAX);
    double *sum = kvc_observed_sums(observation, layer, KVC_K_SUM);
    double *square = kvc_observed_sums(observation, layer, KVC_K_SQUARE);
    for (size_t t = 0; t < k->n_tokens; t++)
        for (size_t h = 0; h < k->n_heads; h++) {
            const size_t at = h * k->head_dim;
            load(observation, k, t, h, x);
            observation->counts[layer].n_nonfinite +=
                add_key(x, k->head_dim, absmax + at, sum + at, square + at);
        }
    observation->counts[layer].n_keys += k->n_tokens;
    return KVC_OK;
}

kvc_status kvc_observe_queries(kvc_observation *observation, int32_t layer, const kvc_view *q)
{
    float x[KVC_MAX_HEAD_DIM];

    KVC_CHECK(observation && view_fits(observation, layer, q, observation->shape.n_heads),
              KVC_E_ARG);
    const size_t group = (size_t)observation->shape.n_heads / (size_t)observation->shape.n_kv_heads;
    double *square = kvc_observed_sums(observation, layer, KVC_Q_SQUARE);
    for (size_t t = 0; t < q->n_tokens; t++)
        for (size_t h = 0; h < q->n_heads; h++) {
            load(observation, q, t, h, x);
            observation->counts[layer].n_nonfinite +=
                add_query(x, q->head_dim, square + h / group * q->head_dim);
        }
    observation->counts[layer].n_queries += q->n_tokens;
    return KVC_OK;
}

static bool same_shape(const kvc_observed_shape *a, const kvc_observed_shape *b)
{
    return a->n_layers == b->n_layers && a->n_heads == b->n_heads &&
           a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim;
}

kvc_status kvc_observation_merge(kvc_observation *into, const kvc_observation *from)
{
    KVC_CHECK(into && from && into != from, KVC_E_ARG);
    KVC_CHECK(same_shape(&into->shape, &from->shape), KVC_E_MISMATCH);
    for (int32_t l = 0; l < into->shape.n_layers; l++) {
        into->counts[l].n_keys += from->counts[l].n_keys;
        into->counts[l].n_queries += from->counts[l].n_queries;
        into->counts[l].n_nonfinite += from->counts[l].n_nonfinite;
        for (enum kvc_sum s = KVC_K_ABSMAX; s < KVC_N_SUMS; s++) {
            double *to = kvc_observed_sums(into, l, s);
            const double *add = kvc_observed_sums(from, l, s);
            for (size_t i = 0; i < kvc_observed_width(into); i++)
                to[i] = s == KVC_K_ABSMAX ? fmax(to[i], add[i]) : to[i] + add[i];
        }
    }
    return KVC_OK;
}

/* ---- reading ---- */

kvc_status kvc_observation_shape(const kvc_observation *observation, kvc_observed_shape *shape)
{
    KVC_CHECK(observation && shape && kvc_struct_size(shape) >= sizeof(*shape), KVC_E_ARG);
    kvc_struct_write(shape, &observation->shape, sizeof(observation->shape));
    return KVC_OK;
}

kvc_status kvc_observation_read(const kvc_observation *observation, int32_t layer,
                                kvc_observed_layer *out)
{
    KVC_CHECK(observation && layer >= 0 && layer < observation->shape.n_layers && out &&
                  kvc_struct_size(out) >= sizeof(*out),
              KVC_E_ARG);
    const struct kvc_observed_counts *counts = &observation->counts[layer];
    const kvc_observed_layer l = {
        .n_keys = counts->n_keys,
        .n_queries = counts->n_queries,
        .n_nonfinite = counts->n_nonfinite,
        .k_absmax = kvc_observed_sums(observation, layer, KVC_K_ABSMAX),
        .k_sum = kvc_observed_sums(observation, layer, KVC_K_SUM),
        .k_square = kvc_observed_sums(observation, layer, KVC_K_SQUARE),
        .q_square = kvc_observed_sums(observation, layer, KVC_Q_SQUARE),
    };
    kvc_struct_write(out, &l, sizeof(l));
    return KVC_OK;
}

/* One head of one layer. */
static void calibrate_head(const kvc_observation *o, int32_t layer, size_t at, float *mean,
                           float *scale)
{
    const size_t d = (size_t)o->shape.head_dim;
    const double n = (double)o->counts[layer].n_keys, n_queries = kvc_observed_queries(o, layer);
    const double *sum = kvc_observed_sums(o, layer, KVC_K_SUM) + at;
    const double *k_sum_square = kvc_observed_sums(o, layer, KVC_K_SQUARE) + at;
    const double *q_sum_square = kvc_observed_sums(o, layer, KVC_Q_SQUARE) + at;
    double k_square[KVC_MAX_HEAD_DIM], q_square[KVC_MAX_HEAD_DIM];

    for (size_t c = 0; c < d; c++) {
        const double m = sum[c] / n;
        if (mean)
            mean[c] = (float)m;
        k_square[c] = fmax(k_sum_square[c] / n - m * m, 0.0);
        q_square[c] = n_queries > 0.0 ? q_sum_square[c] / n_queries : 0.0;
    }
    if (scale)
        kvc_balance(k_square, q_square, d, scale);
}

kvc_status kvc_observation_calibrate(const kvc_observation *observation, float *mean, float *scale)
{
    KVC_CHECK(observation, KVC_E_ARG);
    const size_t width = kvc_observed_width(observation);
    const size_t d = (size_t)observation->shape.head_dim;
    for (int32_t l = 0; l < observation->shape.n_layers; l++)
        KVC_CHECK(observation->counts[l].n_keys > 0, KVC_E_ARG);
    for (int32_t l = 0; l < observation->shape.n_layers; l++)
        for (size_t at = 0; at < width; at += d) {
            const size_t to = (size_t)l * width + at;
            calibrate_head(observation, l, at, mean ? mean + to : NULL, scale ? scale + to : NULL);
        }
    return KVC_OK;
}

/* ---- the file ---- */

/* Bytes of a layer; all of it fits size_t where an observation does. */
static size_t layer_size(const kvc_observed_shape *s)
{
    return COUNTS + KVC_N_SUMS * sizeof(double) * (size_t)s->n_kv_heads * (size_t)s->head_dim;
}

static size_t file_size(const kvc_observed_shape *s)
{
    return HEADER + (size_t)s->n_layers * layer_size(s) + CHECKSUM;
}

size_t kvc_observation_size(const kvc_observation *observation)
{
    return observation ? file_size(&observation->shape) : 0;
}

static uint8_t *put_layer(const kvc_observation *o, int32_t layer, uint8_t *at)
{
    const double *sums = kvc_observed_sums(o, layer, KVC_K_ABSMAX);

    kvc_put(at, o->counts[layer].n_keys, 8);
    kvc_put(at + 8, o->counts[layer].n_queries, 8);
    kvc_put(at + 16, o->counts[layer].n_nonfinite, 8);
    at += COUNTS;
    for (size_t i = 0; i < KVC_N_SUMS * kvc_observed_width(o); i++, at += 8) {
        uint64_t bits;
        memcpy(&bits, &sums[i], sizeof(bits));
        kvc_put(at, bits, 8);
    }
    return at;
}

kvc_status kvc_observation_save(const kvc_observation *observation, void *bytes, size_t n_bytes)
{
    KVC_CHECK(observation && bytes && n_bytes == kvc_observation_size(observation), KVC_E_ARG);
    uint8_t *at = bytes;
    memcpy(at, magic, sizeof(magic));
    kvc_put(at + 4, VERSION, 4);
    kvc_put(at + 8, (uint32_t)observation->shape.n_layers, 4);
    kvc_put(at + 12, (uint32_t)observation->shape.n_heads, 4);
    kvc_put(at + 16, (uint32_t)observation->shape.n_kv_heads, 4);
    kvc_put(at + 20, (uint32_t)observation->shape.head_dim, 4);
    at += HEADER;
    for (int32_t l = 0; l < observation->shape.n_layers; l++)
        at = put_layer(observation, l, at);
    kvc_put(at, kvc_crc32(bytes, n_bytes - CHECKSUM), 4);
    return KVC_OK;
}

/* The most that a sum can be: of floats, so that what is made of sums is finite. */
static double limit_of(const kvc_observation *o, int32_t layer, enum kvc_sum sum)
{
    const double most = (double)FLT_MAX, n_keys = (double)o->counts[layer].n_keys;
    switch (sum) {
    case KVC_K_ABSMAX: return n_keys > 0.0 ? most : 0.0;
    case KVC_K_SUM: return n_keys * most;
    case KVC_K_SQUARE: return n_keys * most * most;
    default: return kvc_observed_queries(o, layer) * most * most;
    }
}

static kvc_status get_sums(kvc_observation *o, int32_t layer, enum kvc_sum sum, const uint8_t *at)
{
    const double most = limit_of(o, layer, sum), least = sum == KVC_K_SUM ? -most : 0.0;
    double *x = kvc_observed_sums(o, layer, sum);

    for (size_t i = 0; i < kvc_observed_width(o); i++) {
        const uint64_t bits = kvc_get(at + 8 * i, 8);
        memcpy(&x[i], &bits, sizeof(bits));
        KVC_CHECK(x[i] >= least && x[i] <= most, KVC_E_FORMAT);
    }
    return KVC_OK;
}

static kvc_status get_layer(kvc_observation *o, int32_t layer, const uint8_t *at)
{
    struct kvc_observed_counts *counts = &o->counts[layer];

    *counts = (struct kvc_observed_counts){kvc_get(at, 8), kvc_get(at + 8, 8), kvc_get(at + 16, 8)};
    KVC_CHECK(counts->n_keys <= MAX_ROWS && counts->n_queries <= MAX_ROWS, KVC_E_FORMAT);
    at += COUNTS;
    for (enum kvc_sum s = KVC_K_ABSMAX; s < KVC_N_SUMS; s++, at += 8 * kvc_observed_width(o))
        KVC_TRY(get_sums(o, layer, s, at));
    return KVC_OK;
}

/* The shape in a header; the rest of the file must be as long as it says. */
static kvc_status get_header(const uint8_t *at, size_t n_bytes, kvc_observed_shape *shape)
{
    KVC_CHECK(n_bytes >= HEADER + CHECKSUM && memcmp(at, magic, sizeof(magic)) == 0 &&
                  kvc_get32(at + 4) == VERSION,
              KVC_E_FORMAT);
    for (size_t i = 8; i < HEADER; i += 4)
        KVC_CHECK(kvc_get32(at + i) <= INT32_MAX, KVC_E_FORMAT);
    const kvc_observed_shape stored = {
        .struct_size = sizeof(stored),
        .n_layers = (int32_t)kvc_get32(at + 8),
        .n_heads = (int32_t)kvc_get32(at + 12),
        .n_kv_heads = (int32_t)kvc_get32(at + 16),
        .head_dim = (int32_t)kvc_get32(at + 20),
    };
    const kvc_status status = take_shape(&stored, shape);
    KVC_CHECK(status != KVC_E_ARG, KVC_E_FORMAT);
    KVC_TRY(status);
    KVC_CHECK(n_bytes == file_size(shape) &&
                  kvc_get32(at + n_bytes - CHECKSUM) == kvc_crc32(at, n_bytes - CHECKSUM),
              KVC_E_FORMAT);
    return KVC_OK;
}

kvc_status kvc_observation_load(kvc_ctx *ctx, const void *bytes, size_t n_bytes,
                                kvc_observation **out)
{
    kvc_observed_shape shape;
    kvc_observation *o;

    KVC_CHECK(out, KVC_E_ARG);
    *out = NULL;
    KVC_CHECK(ctx && bytes, KVC_E_ARG);
    KVC_TRY(get_header(bytes, n_bytes, &shape));
    KVC_TRY(kvc_observation_create(ctx, &shape, &o));
    for (int32_t l = 0; l < shape.n_layers; l++) {
        const kvc_status status =
            get_layer(o, l, (const uint8_t *)bytes + HEADER + (size_t)l * layer_size(&shape));
        if (status != KVC_OK) {
            kvc_observation_destroy(o);
            return status;
        }
    }
    *out = o;
    return KVC_OK;
}
