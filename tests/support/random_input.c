/* Random arguments for the calls of a cache, right and wrong ones. */
#include <math.h>
#include <string.h>

#include "random_input.h"

bool chance(uint64_t *rng, int one_in)
{
    return pick(rng, 1, one_in) == 1;
}

kvc_view random_view(uint64_t *rng, void *data, size_t n, int heads, int dim)
{
    kvc_view view =
        kvc_view_packed(data, (kvc_dtype)pick(rng, 0, 2), n, (size_t)heads, (size_t)dim);

    if (chance(rng, 3)) {
        view.head_stride += (size_t)pick(rng, 0, 3);
        view.token_stride = view.head_stride * view.n_heads + (size_t)pick(rng, 0, 3);
    } else if (chance(rng, 4)) {
        view.token_stride = view.head_dim;
        view.head_stride = view.head_dim * n;
    }
    return view;
}

float random_scale(uint64_t *rng)
{
    static const float scales[] = {0, 1e-6f, 0.01f, 0.3f, 1, 1, 1, 3};

    return scales[pick(rng, 0, 7)];
}

/* NaN, Inf or huge elements; true if one of them is not finite. */
bool spoil_view(uint64_t *rng, const kvc_view *view)
{
    static const float finite[] = {65504, -65520, 1e30f, 65510, 3e-8f};
    static const uint16_t half_bits[] = {0x7c00, 0xfc00, 0x7e01, 0xffff};
    static const float values[] = {INFINITY, -INFINITY, NAN, -NAN};
    bool nonfinite = false;

    for (int i = pick(rng, 1, 4); i > 0; i--) {
        const size_t t = rng_below(rng, view->n_tokens);
        const size_t h = rng_below(rng, view->n_heads);
        const size_t d = rng_below(rng, view->head_dim);
        const int value = pick(rng, 0, 3);

        if (chance(rng, 3)) {
            view_set(view, t, h, d, finite[pick(rng, 0, 4)]);
            continue;
        }
        nonfinite = true;
        view_set(view, t, h, d, values[value]);
        if (view->dtype == KVC_DTYPE_F16)
            ((uint16_t *)view->data)[t * view->token_stride + h * view->head_stride + d] =
                half_bits[value];
    }
    /* A later element may have replaced it. */
    for (size_t t = 0; nonfinite && t < view->n_tokens; t++)
        for (size_t h = 0; h < view->n_heads; h++)
            for (size_t d = 0; d < view->head_dim; d++)
                if (!isfinite(view_get(view, t, h, d)))
                    return true;
    return false;
}

/* A few tokens of text, then patches of an image that share t. */
void random_tokens(uint64_t *rng, int64_t position, kvc_token *tokens, size_t n)
{
    const int32_t next = (int32_t)position;
    const size_t n_text = rng_below(rng, n + 1);
    const int32_t width = pick(rng, 1, 5);

    memset(tokens, 0, n * sizeof(*tokens));
    for (size_t i = 0; i < n; i++) {
        const int32_t cell = (int32_t)(i - n_text);
        const int32_t base = next + (int32_t)n_text;

        tokens[i].flags = (uint8_t)rng_below(rng, 256);
        tokens[i].t = tokens[i].y = tokens[i].x = next + (int32_t)i;
        tokens[i].image = tokens[i].row = tokens[i].col = -1;
        if (i < n_text)
            continue;
        tokens[i].kind = KVC_TOKEN_VISUAL;
        tokens[i].t = base;
        tokens[i].y = base + cell / width;
        tokens[i].x = base + cell % width;
        tokens[i].image = 3;
        tokens[i].row = cell / width;
        tokens[i].col = cell % width;
    }
}

void spoil_token(uint64_t *rng, kvc_token *token)
{
    const int fault = pick(rng, 0, 4);

    if (fault == 0)
        token->t = -1;
    else if (fault == 1)
        token->y = INT32_MAX;
    else if (fault == 2)
        token->kind = 3;
    else if (fault == 3)
        token->reserved[pick(rng, 0, 5)] = 1;
    else
        token->x = INT32_MIN;
}

kvc_precision random_precision(uint64_t *rng)
{
    kvc_precision precision = {
        .k = (kvc_format)pick(rng, 0, 2),
        .v = (kvc_format)pick(rng, 0, 2),
        .k_scale = (kvc_scale)pick(rng, 0, 2),
        .v_scale = (kvc_scale)pick(rng, 0, 1),
    };

    if (chance(rng, 6)) {
        precision.k = KVC_INT6;
        precision.k_scale = KVC_SCALE_TOKEN;
    }
    return precision;
}

void random_transform(uint64_t *rng, kvc_cache_params *p, float *mean, float *scale)
{
    static const uint32_t k_flags[] = {0, KVC_TRANSFORM_ROTATE_K, KVC_TRANSFORM_K_ROTATED};
    const size_t n = (size_t)p->n_layers * (size_t)p->n_kv_heads * (size_t)p->head_dim_k;

    p->transform = k_flags[pick(rng, 0, 2)] | (chance(rng, 2) ? KVC_TRANSFORM_ROTATE_V : 0);
    for (size_t i = 0; i < n; i++) {
        mean[i] = normal(rng) * (chance(rng, 8) ? 30.0f : 1.0f);
        scale[i] = ldexpf(1.0f + fabsf(normal(rng)), pick(rng, -3, 2));
    }
    p->k_mean = chance(rng, 2) ? mean : NULL;
    p->k_scale = chance(rng, 2) ? scale : NULL;
    p->online_pages = chance(rng, 2) ? pick(rng, 1, 3) : 0;
}
