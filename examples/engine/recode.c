/* K and V through the codes of a recipe before the cache. Each layer has a cache of its own that
 * seals what it is given at once, is read back and forgets. */
#include "recode.h"

#include <stdlib.h>
#include <string.h>

struct recoder {
    size_t n_layers;
    size_t n_exact; /* first tokens of an item that are left alone */
    float *rows;    /* of one head, K then V */
    kvc_cache *caches[];
};

static bool check(kvc_status status, struct failure *failure)
{
    return status == KVC_OK || fail_with(failure, "coding K and V: %s", kvc_status_str(status));
}

static bool open_layer(kvc_ctx *ctx, const struct model_shape *shape, const struct recipe *recipe,
                       const struct calibration *calibration, size_t layer, kvc_cache **out,
                       struct failure *failure)
{
    const size_t at = layer * shape->n_kv_heads * shape->head_dim;
    struct recipe codes = *recipe;
    kvc_cache_params p;

    model_cache_params(shape, &p);
    codes.imm = false;
    if (!recipe_apply(&codes, calibration, &p, failure))
        return false;
    p.k_mean = p.k_mean ? p.k_mean + at : NULL;
    p.k_scale = p.k_scale ? p.k_scale + at : NULL;
    p.n_layers = 1;
    p.max_tokens = p.max_append = KVC_PAGE_TOKENS;
    p.recent_tokens = p.sink_tokens = p.probe_rows = p.online_pages = 0;
    return check(kvc_cache_full_budget(&p, &p.budget_bytes), failure) &&
           check(kvc_cache_create(ctx, &p, out), failure);
}

bool recoder_create(kvc_ctx *ctx, const struct model_shape *shape, const struct recipe *recipe,
                    const struct calibration *calibration, struct recoder **out,
                    struct failure *failure)
{
    struct recoder *r = calloc(1, sizeof(*r) + shape->n_layers * sizeof(kvc_cache *));

    *out = NULL;
    if (!r)
        return fail_with(failure, "out of memory");
    r->n_layers = shape->n_layers;
    r->rows = malloc((size_t)2 * KVC_PAGE_TOKENS * shape->head_dim * sizeof(float));
    bool ok = r->rows || fail_with(failure, "out of memory");
    for (size_t l = 0; l < r->n_layers && ok; l++)
        ok = open_layer(ctx, shape, recipe, calibration, l, &r->caches[l], failure);
    if (!ok) {
        recoder_destroy(r);
        return false;
    }
    *out = r;
    return true;
}

void recoder_destroy(struct recoder *r)
{
    if (!r)
        return;
    for (size_t l = 0; l < r->n_layers; l++)
        kvc_cache_destroy(r->caches[l]);
    free(r->rows);
    free(r);
}

static kvc_view slice(const kvc_view *view, size_t first, size_t n)
{
    kvc_view part = *view;

    part.data = (float *)view->data + first * view->token_stride;
    part.n_tokens = n;
    return part;
}

static void put_rows(const float *rows, const kvc_view *to, size_t head)
{
    for (size_t t = 0; t < to->n_tokens; t++)
        memcpy((float *)to->data + t * to->token_stride + head * to->head_stride,
               rows + t * to->head_dim, to->head_dim * sizeof(float));
}

/* At most a page. */
static bool recode_page(struct recoder *r, kvc_cache *cache, const kvc_view *k, const kvc_view *v,
                        struct failure *failure)
{
    float *v_rows = r->rows + KVC_PAGE_TOKENS * k->head_dim;
    kvc_seq seq;
    size_t n;
    bool ok = check(kvc_seq_create(cache, &seq), failure) &&
              check(kvc_tokens_add(cache, seq, NULL, k->n_tokens), failure) &&
              check(kvc_append(cache, seq, 0, k, v), failure) &&
              check(kvc_cache_compress(cache, seq, NULL, NULL, NULL), failure);

    for (size_t h = 0; h < k->n_heads && ok; h++) {
        ok = check(kvc_seq_read_rows(cache, seq, 0, (int32_t)h, KVC_PAGE_TOKENS, NULL, r->rows,
                                     v_rows, NULL, &n),
                   failure);
        if (ok) {
            put_rows(r->rows, k, h);
            put_rows(v_rows, v, h);
        }
    }
    return ok && check(kvc_seq_destroy(cache, seq), failure);
}

static bool recode(void *user, int32_t layer, const kvc_view *q, const kvc_view *k,
                   const kvc_view *v, struct failure *failure)
{
    struct recoder *r = user;

    (void)q;
    for (size_t t = r->n_exact, n; t < k->n_tokens; t += n) {
        n = k->n_tokens - t < KVC_PAGE_TOKENS ? k->n_tokens - t : KVC_PAGE_TOKENS;
        const kvc_view k_part = slice(k, t, n), v_part = slice(v, t, n);
        if (!recode_page(r, r->caches[layer], &k_part, &v_part, failure))
            return false;
    }
    return true;
}

struct forward_hook recoder_hook(struct recoder *recoder, size_t n_exact)
{
    recoder->n_exact = n_exact;
    return (struct forward_hook){.touch = recode, .user = recoder};
}
