/* Attention as article 002 has it. The values of all tokens are kept; a call codes them anew, from
 * its newest token's point of view, into a cache of one layer that holds them as F16. So the tokens
 * of a call share one scale, which in the article changes with every token. */
#include "article.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WINDOW = 512 };

struct article {
    kvc_ctx *ctx;
    struct recipe recipe;
    size_t n_layers, width, max_tokens; /* width: elements of K or V of a token */
    size_t n_heads, head_dim;           /* of K and V */
    size_t *n;                          /* [n_layers] tokens */
    float *rows;                        /* [n_layers][K, V][max_tokens][width] */
    float *coded;                       /* [K, V][max_tokens][width] */
    uint8_t *codes;
    float *scales;
    kvc_cache *cache;
};

static bool check(kvc_status status, struct failure *failure)
{
    return status == KVC_OK ||
           fail_with(failure, "the article's quantization: %s", kvc_status_str(status));
}

static bool open_cache(struct article *a, const struct model_shape *shape, struct failure *failure)
{
    kvc_cache_params p;

    model_cache_params(shape, &p);
    p.n_layers = 1;
    p.max_tokens = p.max_append = (int32_t)a->max_tokens;
    p.probe_rows = p.sink_tokens = 0;
    p.precision.k = p.precision.v = KVC_F16;
    return check(kvc_cache_full_budget(&p, &p.budget_bytes), failure) &&
           check(kvc_cache_create(a->ctx, &p, &a->cache), failure);
}

bool article_create(kvc_ctx *ctx, const struct model_shape *shape, const struct recipe *recipe,
                    size_t max_tokens, struct article **out, struct failure *failure)
{
    struct article *a = calloc(1, sizeof(*a));

    *out = NULL;
    if (!a)
        return fail_with(failure, "out of memory");
    *a = (struct article){.ctx = ctx,
                          .recipe = *recipe,
                          .n_layers = shape->n_layers,
                          .width = shape->n_kv_heads * shape->head_dim,
                          .max_tokens = max_tokens,
                          .n_heads = shape->n_kv_heads,
                          .head_dim = shape->head_dim};
    const size_t side = max_tokens * a->width;
    a->n = calloc(a->n_layers, sizeof(*a->n));
    a->rows = malloc(2 * a->n_layers * side * sizeof(float));
    a->coded = malloc(2 * side * sizeof(float));
    a->codes = malloc(side);
    a->scales = malloc(a->n_heads * sizeof(float));
    bool ok = (a->n && a->rows && a->coded && a->codes && a->scales) ||
              fail_with(failure, "out of memory");
    ok = ok && open_cache(a, shape, failure);
    if (!ok) {
        article_destroy(a);
        return false;
    }
    *out = a;
    return true;
}

void article_destroy(struct article *a)
{
    if (!a)
        return;
    kvc_cache_destroy(a->cache);
    free(a->n);
    free(a->rows);
    free(a->coded);
    free(a->codes);
    free(a->scales);
    free(a);
}

void article_restart(struct article *a)
{
    memset(a->n, 0, a->n_layers * sizeof(*a->n));
}

static void keep_rows(const kvc_view *view, float *to)
{
    for (size_t t = 0; t < view->n_tokens; t++)
        for (size_t h = 0; h < view->n_heads; h++, to += view->head_dim)
            memcpy(to, (const float *)view->data + t * view->token_stride + h * view->head_stride,
                   view->head_dim * sizeof(float));
}

/* n tokens of one side to codes and back. */
static kvc_status code(struct article *a, float *rows, size_t n, float *out)
{
    const kvc_format format = a->recipe.precision.k;
    const kvc_view src = kvc_view_packed(rows, KVC_DTYPE_F32, n, a->n_heads, a->head_dim);
    const kvc_view dst = kvc_view_packed(out, KVC_DTYPE_F32, n, a->n_heads, a->head_dim);
    kvc_quant_options options;
    size_t n_codes, n_params;

    kvc_quant_options_default(&options);
    options.format = format;
    options.scale = a->recipe.article == ARTICLE_GLOBAL ? KVC_SCALE_LAYER : KVC_SCALE_HEAD;
    options.block_tokens = options.window_tokens = n;
    kvc_status status = kvc_quant_size(n, a->n_heads, a->head_dim, &options, &n_codes, &n_params);
    if (status != KVC_OK)
        return status;
    if (a->recipe.article == ARTICLE_WINDOW)
        status = kvc_quantize_window(a->ctx, &src, 1, format, WINDOW, a->codes, n_codes, a->scales);
    else
        status = kvc_quantize(a->ctx, &src, &options, a->codes, n_codes, a->scales, n_params, NULL);
    return status != KVC_OK
               ? status
               : kvc_dequantize(a->ctx, a->codes, n_codes, a->scales, n_params, &options, &dst);
}

static bool attend(void *user, int32_t layer, const kvc_attend_options *options, const kvc_view *q,
                   const kvc_view *k, const kvc_view *v, const kvc_view *out,
                   struct failure *failure)
{
    struct article *a = user;
    const size_t side = a->max_tokens * a->width, n = a->n[layer] + k->n_tokens;
    float *k_rows = a->rows + 2 * (size_t)layer * side, *v_rows = k_rows + side;
    const kvc_view k_coded = kvc_view_packed(a->coded, KVC_DTYPE_F32, n, a->n_heads, a->head_dim);
    const kvc_view v_coded =
        kvc_view_packed(a->coded + side, KVC_DTYPE_F32, n, a->n_heads, a->head_dim);
    kvc_seq seq;

    if (n > a->max_tokens)
        return fail_with(failure, "more tokens than the article's rows hold");
    keep_rows(k, k_rows + a->n[layer] * a->width);
    keep_rows(v, v_rows + a->n[layer] * a->width);
    a->n[layer] = n;
    return check(code(a, k_rows, n, a->coded), failure) &&
           check(code(a, v_rows, n, a->coded + side), failure) &&
           check(kvc_seq_create(a->cache, &seq), failure) &&
           check(kvc_tokens_add(a->cache, seq, NULL, n), failure) &&
           check(kvc_append(a->cache, seq, 0, &k_coded, &v_coded), failure) &&
           check(kvc_attend(a->cache, seq, 0, q, options, out, NULL), failure) &&
           check(kvc_seq_destroy(a->cache, seq), failure);
}

struct forward_hook article_hook(struct article *article)
{
    return (struct forward_hook){.attend = attend, .user = article};
}
