/* The same model with other keys: channels scaled up in K and down in Q, which no product sees. */
#include "outliers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_SMOOTHING = 20, MAX_ROWS = MAX_CELLS + 2 };

static const float outlier = 8.0f;
static const int outlier_pairs[] = {3, 14, 27}; /* one of each third of the frequencies */
static const double strength = 0.5;             /* 0 leaves the pairs alone, 1 makes them equal */

static size_t qkv_size(const struct model_shape *s)
{
    return (s->n_heads + 2 * s->n_kv_heads) * s->head_dim * s->n_embd;
}

/* A model whose layers are its own, with matrices of Q, K and V behind them; the rest is shared. */
static bool copy_model(const struct vlm *vlm, struct vlm *out, struct failure *failure)
{
    const struct model_shape *s = &vlm->model.shape;
    struct model_layer *layers = malloc(s->n_layers * sizeof(*layers));
    float *qkv = malloc(s->n_layers * qkv_size(s) * sizeof(*qkv));

    if (!layers || !qkv) {
        free(layers);
        free(qkv);
        return fail_with(failure, "out of memory");
    }
    *out = *vlm;
    out->model.layers = layers;
    for (size_t l = 0; l < s->n_layers; l++) {
        layers[l] = vlm->model.layers[l];
        layers[l].qkv = qkv + l * qkv_size(s);
        memcpy(layers[l].qkv, vlm->model.layers[l].qkv, qkv_size(s) * sizeof(*qkv));
    }
    return true;
}

void outliers_free(struct vlm *vlm)
{
    if (vlm->model.layers) {
        free(vlm->model.layers[0].qkv);
        free(vlm->model.layers);
    }
    memset(vlm, 0, sizeof(*vlm));
}

static void scale_row(const struct vlm *vlm, size_t layer, size_t row, float factor)
{
    const size_t n = vlm->model.shape.n_embd;
    float *weights = vlm->model.layers[layer].qkv + row * n;

    for (size_t i = 0; i < n; i++)
        weights[i] *= factor;
}

static void scale_pair(const struct vlm *vlm, size_t layer, size_t kv_head, size_t pair,
                       float factor)
{
    const struct model_shape *s = &vlm->model.shape;
    const size_t group = s->n_heads / s->n_kv_heads, half = s->head_dim / 2;

    for (size_t channel = pair; channel < s->head_dim; channel += half) {
        scale_row(vlm, layer, (s->n_heads + kv_head) * s->head_dim + channel, factor);
        for (size_t head = kv_head * group; head < (kv_head + 1) * group; head++)
            scale_row(vlm, layer, head * s->head_dim + channel, 1.0f / factor);
    }
}

bool outliers_inject(const struct vlm *vlm, struct vlm *out, struct failure *failure)
{
    const struct model_shape *s = &vlm->model.shape;

    if (!copy_model(vlm, out, failure))
        return false;
    for (size_t l = 0; l < s->n_layers; l++)
        for (size_t h = 0; h < s->n_kv_heads; h++)
            for (size_t i = 0; i < sizeof(outlier_pairs) / sizeof(*outlier_pairs); i++)
                scale_pair(out, l, h, (size_t)outlier_pairs[i] % (s->head_dim / 2), outlier);
    return true;
}

/* Largest magnitude of each pair of a head in the keys of the patches. */
static bool measure_head(kvc_cache *cache, kvc_seq seq, int32_t layer, int32_t head, size_t dim,
                         float *keys, float *largest, struct failure *failure)
{
    size_t n;

    if (kvc_seq_read_rows(cache, seq, layer, head, MAX_ROWS, NULL, keys, NULL, NULL, &n) != KVC_OK)
        return fail_with(failure, "cannot read keys");
    for (size_t i = 0; i < n * dim; i++) {
        float *pair = &largest[i % dim % (dim / 2)];
        *pair = fmaxf(*pair, fabsf(keys[i]));
    }
    return true;
}

static bool measure_picture(struct reader *reader, kvc_cache *cache, float *keys, float *largest,
                            int grid, struct failure *failure)
{
    const struct model_shape *s = &reader->vlm->model.shape;
    static const int32_t bos = WORD_BOS;
    kvc_seq seq;

    if (kvc_seq_create(cache, &seq) != KVC_OK || kvc_seq_hold(cache, seq) != KVC_OK)
        return fail_with(failure, "cannot create a sequence");
    bool ok = reader_read(reader, cache, seq, &bos, 1, failure) &&
              reader_see(reader, cache, seq, 0, grid, failure);
    for (size_t l = 0; ok && l < s->n_layers; l++)
        for (size_t h = 0; ok && h < s->n_kv_heads; h++)
            ok = measure_head(cache, seq, (int32_t)l, (int32_t)h, s->head_dim, keys,
                              largest + (l * s->n_kv_heads + h) * s->head_dim / 2, failure);
    kvc_seq_destroy(cache, seq);
    return ok;
}

static bool create_cache(const struct reader *reader, kvc_cache **out, struct failure *failure)
{
    kvc_cache_params p;

    model_cache_params(&reader->vlm->model.shape, &p);
    p.max_tokens = p.max_append = p.max_hold_tokens = MAX_ROWS;
    p.precision.k = p.precision.v = KVC_F16;
    return (kvc_cache_full_budget(&p, &p.budget_bytes) == KVC_OK &&
            kvc_cache_create(reader->ctx, &p, out) == KVC_OK) ||
           fail_with(failure, "cannot create a cache");
}

static bool measure(const struct vlm *vlm, const char *kernels, const struct exam *exam,
                    float *largest, struct failure *failure)
{
    struct exam_item *item = malloc(sizeof(*item));
    float *keys = malloc(MAX_ROWS * vlm->model.shape.head_dim * sizeof(*keys));
    kvc_cache *cache = NULL;
    struct reader reader;

    bool ok = item && keys;

    if (!ok)
        fail_with(failure, "out of memory");
    if (!ok || !reader_open(vlm, kernels, &reader, failure)) {
        free(item);
        free(keys);
        return false;
    }
    ok = create_cache(&reader, &cache, failure);
    for (size_t i = 0; ok && i < N_SMOOTHING; i++) {
        exam_item(exam, i, item);
        reader_encode(&reader, item->picture.rgb, item->picture.grid);
        ok = measure_picture(&reader, cache, keys, largest, item->picture.grid, failure);
    }
    kvc_cache_destroy(cache);
    reader_close(&reader);
    free(item);
    free(keys);
    return ok;
}

/* Of one head: a pair is divided by (largest / geometric mean)^strength. */
static void smooth_head(const struct vlm *vlm, size_t layer, size_t head, const float *largest)
{
    const size_t n = vlm->model.shape.head_dim / 2;
    double sum = 0.0;

    for (size_t i = 0; i < n; i++)
        sum += log(fmax((double)largest[i], 1e-6));
    for (size_t i = 0; i < n; i++) {
        const double above = log(fmax((double)largest[i], 1e-6)) - sum / (double)n;
        scale_pair(vlm, layer, head, i, (float)exp(-strength * above));
    }
}

bool outliers_smooth(const struct vlm *vlm, const char *kernels, const struct exam *exam,
                     struct vlm *out, struct failure *failure)
{
    const struct model_shape *s = &vlm->model.shape;
    float *largest = calloc(s->n_layers * s->n_kv_heads * s->head_dim / 2, sizeof(*largest));

    if (!largest)
        return fail_with(failure, "out of memory");
    bool ok = measure(vlm, kernels, exam, largest, failure) && copy_model(vlm, out, failure);
    for (size_t l = 0; ok && l < s->n_layers; l++)
        for (size_t h = 0; h < s->n_kv_heads; h++)
            smooth_head(out, l, h, largest + (l * s->n_kv_heads + h) * s->head_dim / 2);
    free(largest);
    return ok;
}
