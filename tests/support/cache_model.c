/* The model of cache_model.h: what each call does to plain arrays. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cache_model.h"
#include "half.h"

int pick(uint64_t *rng, int lo, int hi)
{
    return lo + (int)rng_below(rng, (size_t)(hi - lo + 1));
}

float normal(uint64_t *rng)
{
    return rng_unit(rng) + rng_unit(rng) + rng_unit(rng);
}

float half_round(float x)
{
    int exponent;
    double quantum;

    if (!isfinite(x))
        return x;
    if (fabsf(x) > 65504.0f)
        return copysignf(65504.0f, x);
    frexp((double)x, &exponent);
    quantum = ldexp(1.0, exponent > -13 ? exponent - 11 : -24);
    return (float)(rint((double)x / quantum) * quantum);
}

uint16_t half_from_float(float x)
{
    const unsigned sign = signbit(x) ? 0x8000 : 0;
    double magnitude;
    int exponent;

    if (isnan(x))
        return (uint16_t)(sign | 0x7e00);
    if (isinf(x))
        return (uint16_t)(sign | 0x7c00);
    magnitude = fabs((double)half_round(x));
    if (magnitude < 0x1p-14)
        return (uint16_t)(sign | (unsigned)(magnitude * 0x1p24));
    magnitude = frexp(magnitude, &exponent);
    return (uint16_t)(sign + ((unsigned)(exponent + 14) << 10) + (unsigned)(magnitude * 2048) -
                      1024);
}

size_t dtype_size(kvc_dtype dtype)
{
    return dtype == KVC_DTYPE_F32 ? 4 : 2;
}

float view_get(const kvc_view *view, size_t token, size_t head, size_t d)
{
    const size_t i = token * view->token_stride + head * view->head_stride + d;
    uint32_t bits;
    float x;

    if (view->dtype == KVC_DTYPE_F32)
        return ((const float *)view->data)[i];
    if (view->dtype == KVC_DTYPE_F16)
        return (float)half_value(((const uint16_t *)view->data)[i]);
    bits = (uint32_t)((const uint16_t *)view->data)[i] << 16;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

void view_set(const kvc_view *view, size_t token, size_t head, size_t d, float x)
{
    const size_t i = token * view->token_stride + head * view->head_stride + d;
    uint32_t bits;

    if (view->dtype == KVC_DTYPE_F32) {
        ((float *)view->data)[i] = x;
    } else if (view->dtype == KVC_DTYPE_F16) {
        ((uint16_t *)view->data)[i] = half_from_float(x);
    } else {
        memcpy(&bits, &x, sizeof(bits));
        ((uint16_t *)view->data)[i] = (uint16_t)(bits >> 16);
    }
}

void model_open(struct cache_model *m, kvc_ctx *ctx, const kvc_cache_params *params)
{
    const kvc_ctx_params ref = {.struct_size = sizeof(ref), .kernels = "ref"};

    memset(m, 0, sizeof(*m));
    m->ctx = ctx;
    m->params = *params;
    assert_true(params->n_layers <= MODEL_MAX_LAYERS);
    assert_true(params->n_kv_heads <= MODEL_MAX_KV_HEADS);
    assert_int_equal(kvc_ctx_create(&ref, &m->ref), KVC_OK);
    assert_int_equal(kvc_cache_create(ctx, params, &m->cache), KVC_OK);
    for (int layer = 0; layer < params->n_layers; layer++)
        for (int head = 0; head < params->n_kv_heads; head++)
            m->precision[layer][head] = params->precision;
    model_transform_open(m);
}

void model_set_precision(struct cache_model *m, int layer, int kv_head, kvc_precision precision)
{
    assert_int_equal(kvc_cache_set_precision(m->cache, layer, kv_head, &precision), KVC_OK);
    m->precision[layer][kv_head] = precision;
}

void model_close(struct cache_model *m)
{
    for (int i = 0; i < MODEL_MAX_SEQS; i++)
        model_seq_end(&m->seqs[i]);
    kvc_cache_destroy(m->cache);
    kvc_ctx_destroy(m->ref);
    free(m->mean);
    free(m->scale);
    m->cache = NULL;
    m->ref = NULL;
}

static size_t n_planes(const struct cache_model *m)
{
    return (size_t)m->params.n_layers * (size_t)m->params.n_kv_heads;
}

static size_t plane(const struct cache_model *m, int layer, int kv_head)
{
    return (size_t)layer * (size_t)m->params.n_kv_heads + (size_t)kv_head;
}

float *model_k(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head,
               int64_t ordinal)
{
    const size_t row = plane(m, layer, kv_head) * MODEL_MAX_TOKENS + (size_t)ordinal;

    return s->k + row * (size_t)m->params.head_dim_k;
}

float *model_v(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head,
               int64_t ordinal)
{
    const size_t row = plane(m, layer, kv_head) * MODEL_MAX_TOKENS + (size_t)ordinal;

    return s->v + row * (size_t)m->params.head_dim_v;
}

double *model_score(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head)
{
    return s->score + plane(m, layer, kv_head) * MODEL_MAX_TOKENS;
}

static size_t probe_size(const struct cache_model *m)
{
    return (size_t)m->params.n_heads * (size_t)m->params.head_dim_k;
}

static void *allocate(size_t n, size_t size)
{
    void *p = calloc(n + 1, size);

    assert_non_null(p);
    return p;
}

void model_seq_begin(const struct cache_model *m, struct model_seq *s, kvc_seq handle)
{
    const size_t rows = n_planes(m) * MODEL_MAX_TOKENS;

    memset(s, 0, sizeof(*s));
    s->handle = handle;
    s->hold = MODEL_NO_HOLD;
    s->k = allocate(rows * (size_t)m->params.head_dim_k, sizeof(float));
    s->v = allocate(rows * (size_t)m->params.head_dim_v, sizeof(float));
    s->score = allocate(rows, sizeof(double));
    for (int layer = 0; layer < m->params.n_layers; layer++)
        s->probe_q[layer] = allocate((size_t)m->params.probe_rows * probe_size(m), sizeof(float));
}

void model_seq_end(struct model_seq *s)
{
    free(s->k);
    free(s->v);
    free(s->score);
    for (int layer = 0; layer < MODEL_MAX_LAYERS; layer++)
        free(s->probe_q[layer]);
    memset(s, 0, sizeof(*s));
}

void model_fork(const struct cache_model *m, struct model_seq *dst, const struct model_seq *src,
                kvc_seq handle)
{
    const size_t n = (size_t)src->n_tokens;
    struct model_seq blank;

    model_seq_begin(m, dst, handle);
    blank = *dst;
    *dst = *src;
    dst->handle = handle;
    dst->k = blank.k;
    dst->v = blank.v;
    dst->score = blank.score;
    memcpy(dst->probe_q, blank.probe_q, sizeof(dst->probe_q));
    for (int layer = 0; layer < m->params.n_layers; layer++) {
        memcpy(dst->probe_q[layer], src->probe_q[layer],
               (size_t)src->n_probed[layer] * probe_size(m) * sizeof(float));
        for (int head = 0; head < m->params.n_kv_heads; head++) {
            memcpy(model_k(m, dst, layer, head, 0), model_k(m, src, layer, head, 0),
                   n * (size_t)m->params.head_dim_k * sizeof(float));
            memcpy(model_v(m, dst, layer, head, 0), model_v(m, src, layer, head, 0),
                   n * (size_t)m->params.head_dim_v * sizeof(float));
            memcpy(model_score(m, dst, layer, head), model_score(m, src, layer, head),
                   n * sizeof(double));
        }
    }
}

bool model_complete(const struct cache_model *m, const struct model_seq *s)
{
    for (int layer = 0; layer < m->params.n_layers; layer++)
        if (s->appended[layer] != s->n_tokens)
            return false;
    return true;
}

int64_t model_next_position(const struct model_seq *s)
{
    int64_t next = 0;

    for (int64_t i = 0; i < s->n_tokens; i++) {
        const kvc_token *token = &s->tokens[i];

        next = token->t >= next ? token->t + (int64_t)1 : next;
        next = token->y >= next ? token->y + (int64_t)1 : next;
        next = token->x >= next ? token->x + (int64_t)1 : next;
    }
    return next;
}

int64_t model_n_rows(const struct model_seq *s, int layer)
{
    int64_t n = 0;

    for (int64_t i = 0; i < s->appended[layer]; i++)
        n += !s->removed[i];
    return n;
}

static bool at_border(const struct cache_model *m, int64_t ordinal)
{
    return (ordinal - m->params.sink_tokens) % KVC_PAGE_TOKENS == 0;
}

static bool behind_recent(const struct cache_model *m, const struct model_seq *s,
                          const struct model_page *page)
{
    return page->end <= s->n_tokens - m->params.recent_tokens;
}

static bool settles(const struct cache_model *m, const struct model_seq *s,
                    const struct model_page *page)
{
    return (m->ready || model_freezes(m, s)) && !page->sealed && at_border(m, page->end) &&
           behind_recent(m, s, page) && page->end <= s->hold;
}

static bool is_empty(const struct model_seq *s, const struct model_page *page)
{
    for (int64_t i = page->first; i < page->end; i++)
        if (!s->removed[i])
            return false;
    return true;
}

int model_n_to_seal(const struct cache_model *m, const struct model_seq *s)
{
    int n = 0;

    for (int i = 0; i < s->n_pages; i++)
        n += settles(m, s, &s->pages[i]) && !is_empty(s, &s->pages[i]);
    return n;
}

/* All but one that tokens can still be added to. */
static void drop_empty_pages(const struct cache_model *m, struct model_seq *s)
{
    int kept = 0;

    for (int i = 0; i < s->n_pages; i++)
        if (!is_empty(s, &s->pages[i]) || !(s->pages[i].sealed || at_border(m, s->pages[i].end)))
            s->pages[kept++] = s->pages[i];
    s->n_pages = kept;
}

/* Codes from -most to most - 1 under the scale of their extreme, as docs/formats.md has them. */
static void recode_extreme(float *x, size_t n, float most)
{
    float min = 0, max = 0;
    for (size_t c = 0; c < n; c++) {
        min = fminf(min, x[c]);
        max = fmaxf(max, x[c]);
    }
    const float extreme = max >= -min ? max : min;
    const float scale = (float)half_value(half_away((double)(extreme / -most)));
    const float inverse = scale != 0 ? 1.0f / scale : 0;
    for (size_t c = 0; c < n; c++)
        x[c] = fminf(fmaxf(rintf(x[c] * inverse), -most), most - 1) * scale;
}

/* INT4 and INT6 TOKEN: no operator has their groups of 64 channels, the last of which takes the
 * rest of the row. */
static void recode_groups(float *rows, size_t n, size_t dim, kvc_format format)
{
    const size_t d8 = (dim + 7) / 8 * 8, n_groups = d8 < 128 ? 1 : d8 / 64;
    for (size_t r = 0; r < n; r++, rows += dim)
        for (size_t g = 0; g < n_groups; g++)
            recode_extreme(rows + 64 * g, g + 1 < n_groups ? 64 : dim - 64 * g,
                           format == KVC_INT4 ? 8 : 32);
}

/* Replaces n packed rows by what kvc_quantize() and kvc_dequantize() make of them. A HEAD group
 * gets its scale from a last row that holds the absmax of the whole window. */
static void recode(const struct cache_model *m, float *rows, size_t n, size_t dim,
                   kvc_format format, kvc_scale scale, float absmax)
{
    static uint8_t codes[(KVC_PAGE_TOKENS + 1) * KVC_MAX_HEAD_DIM];
    static float params[KVC_PAGE_TOKENS * 16];
    const size_t n_rows = n + (scale == KVC_SCALE_HEAD);
    const kvc_view view = kvc_view_packed(rows, KVC_DTYPE_F32, n_rows, 1, dim);
    kvc_quant_options options;
    size_t codes_bytes, params_bytes;

    if (format == KVC_F16)
        return;
    if (format == KVC_INT6 || (format == KVC_INT4 && scale == KVC_SCALE_TOKEN)) {
        recode_groups(rows, n, dim, format);
        return;
    }
    kvc_quant_options_default(&options);
    options.format = format;
    options.scale = scale;
    options.block_tokens = options.window_tokens = n_rows;
    if (scale == KVC_SCALE_HEAD) {
        memset(rows + n * dim, 0, dim * sizeof(*rows));
        rows[n * dim] = absmax;
    }
    assert_int_equal(kvc_quant_size(n_rows, 1, dim, &options, &codes_bytes, &params_bytes), KVC_OK);
    assert_true(codes_bytes <= sizeof(codes) && params_bytes <= sizeof(params));
    assert_int_equal(
        kvc_quantize(m->ref, &view, &options, codes, codes_bytes, params, params_bytes, NULL),
        KVC_OK);
    assert_int_equal(
        kvc_dequantize(m->ref, codes, codes_bytes, params, params_bytes, &options, &view), KVC_OK);
}

static float absmax_of(const float *x, size_t n)
{
    float absmax = 0;

    for (size_t i = 0; i < n; i++)
        absmax = fmaxf(absmax, fabsf(x[i]));
    return absmax;
}

/* Seals K (which 0) or V (which 1) of one head, removed rows too. */
static void seal_rows(const struct cache_model *m, struct model_seq *s, int index, int layer,
                      int kv_head, int which)
{
    static float rows[(KVC_PAGE_TOKENS + 1) * KVC_MAX_HEAD_DIM];
    const kvc_precision *p = &m->precision[layer][kv_head];
    struct model_page *page = &s->pages[index];
    const size_t n = (size_t)(page->end - page->first);
    const size_t dim = (size_t)(which ? m->params.head_dim_v : m->params.head_dim_k);
    float *from = which ? model_v(m, s, layer, kv_head, page->first)
                        : model_k(m, s, layer, kv_head, page->first);
    float absmax = absmax_of(from, n * dim);

    page->absmax[layer][kv_head][which] = absmax;
    for (int i = 0; i < index; i++)
        if (s->pages[i].first >= page->end - m->params.scale_window)
            absmax = fmaxf(absmax, s->pages[i].absmax[layer][kv_head][which]);
    memcpy(rows, from, n * dim * sizeof(*rows));
    recode(m, rows, n, dim, which ? p->v : p->k, which ? p->v_scale : p->k_scale, absmax);
    memcpy(from, rows, n * dim * sizeof(*rows));
}

static void seal(const struct cache_model *m, struct model_seq *s, int index)
{
    s->pages[index].sealed = true;
    if (is_empty(s, &s->pages[index]))
        return;
    for (int layer = 0; layer < m->params.n_layers; layer++)
        for (int head = 0; head < m->params.n_kv_heads; head++) {
            seal_rows(m, s, index, layer, head, 0);
            seal_rows(m, s, index, layer, head, 1);
        }
}

void model_settle(struct cache_model *m, struct model_seq *s)
{
    model_freeze(m, s, false);
    for (int i = 0; i < s->n_pages; i++)
        if (settles(m, s, &s->pages[i]))
            seal(m, s, i);
    drop_empty_pages(m, s);
}

void model_compress(struct cache_model *m, struct model_seq *s)
{
    model_freeze(m, s, true);
    s->hold = MODEL_NO_HOLD;
    for (int i = 0; i < s->n_pages; i++)
        if (m->ready && !s->pages[i].sealed && behind_recent(m, s, &s->pages[i]))
            seal(m, s, i);
    drop_empty_pages(m, s);
    for (int i = 0; i < s->n_pages; i++)
        if (s->pages[i].end - s->pages[i].first < KVC_PAGE_TOKENS)
            s->compacted = true;
    for (int64_t i = 0; i < s->n_tokens; i++)
        s->compacted = s->compacted || s->removed[i];
}

void model_hold(struct model_seq *s)
{
    if (s->hold == MODEL_NO_HOLD)
        s->hold = s->n_tokens;
}

static kvc_token text_at(int64_t position)
{
    const int32_t t = (int32_t)position;
    const kvc_token token = {.t = t, .y = t, .x = t, .image = -1, .row = -1, .col = -1};

    return token;
}

void model_tokens_add(struct cache_model *m, struct model_seq *s, const kvc_token *tokens,
                      int64_t n)
{
    const int64_t next = model_next_position(s);

    model_settle(m, s);
    assert_true(s->n_tokens + n <= MODEL_MAX_TOKENS);
    for (int64_t i = 0; i < n; i++) {
        const int64_t ordinal = s->n_tokens++;
        struct model_page *last = s->n_pages ? &s->pages[s->n_pages - 1] : NULL;

        s->tokens[ordinal] = tokens ? tokens[i] : text_at(next + i);
        s->removed[ordinal] = false;
        for (size_t p = 0; p < n_planes(m); p++)
            s->score[p * MODEL_MAX_TOKENS + (size_t)ordinal] = 0;
        if (ordinal < m->params.sink_tokens)
            continue;
        if (last && !last->sealed && last->end == ordinal && !at_border(m, ordinal)) {
            last->end++;
        } else {
            assert_true(s->n_pages < MODEL_MAX_PAGES);
            last = &s->pages[s->n_pages++];
            memset(last, 0, sizeof(*last));
            last->first = ordinal;
            last->end = ordinal + 1;
        }
    }
}

/* One row as the cache stores it before sealing. */
static void store_row(struct cache_model *m, const kvc_view *view, size_t token, size_t head,
                      float *row)
{
    float largest = 0;

    for (size_t d = 0; d < view->head_dim; d++) {
        const float x = view_get(view, token, head, d);

        if (isfinite(x))
            largest = fmaxf(largest, fabsf(x));
    }
    for (size_t d = 0; d < view->head_dim; d++) {
        const float x = view_get(view, token, head, d);

        if (!isfinite(x))
            m->n_nonfinite++;
        else if (fabsf(x) > 65504.0f)
            m->n_saturated++;
        row[d] = isnan(x) ? 0 : half_round(isinf(x) ? copysignf(largest, x) : x);
    }
}

void model_append(struct cache_model *m, struct model_seq *s, int layer, const kvc_view *k,
                  const kvc_view *v)
{
    for (size_t t = 0; t < k->n_tokens; t++) {
        const int64_t ordinal = s->appended[layer]++;

        for (int head = 0; head < m->params.n_kv_heads; head++) {
            float *row_k = model_k(m, s, layer, head, ordinal);
            float *row_v = model_v(m, s, layer, head, ordinal);

            store_row(m, k, t, (size_t)head, row_k);
            store_row(m, v, t, (size_t)head, row_v);
            m->n_saturated += (uint64_t)(model_transform_row(m, layer, head, 0, row_k) +
                                         model_transform_row(m, layer, head, 1, row_v));
        }
    }
}

void model_truncate(struct cache_model *m, struct model_seq *s, int64_t n)
{
    s->n_tokens = n;
    if (s->hold != MODEL_NO_HOLD && s->hold > n)
        s->hold = n;
    for (int layer = 0; layer < m->params.n_layers; layer++) {
        if (s->appended[layer] > n)
            s->appended[layer] = n;
        while (s->n_probed[layer] > 0 && s->probed[layer][s->n_probed[layer] - 1] >= n)
            s->n_probed[layer]--;
    }
    while (s->n_pages > 0 && s->pages[s->n_pages - 1].first >= n)
        s->n_pages--;
    if (s->n_pages > 0 && s->pages[s->n_pages - 1].end > n)
        s->pages[s->n_pages - 1].end = n;
    drop_empty_pages(m, s);
}

void model_remove(struct cache_model *m, struct model_seq *s, int64_t first, int64_t last)
{
    for (int64_t i = first; i < last; i++)
        s->removed[i] = true;
    drop_empty_pages(m, s);
}
