/* What the tests of merging share: options, tokens of an image, workspaces. */
#ifndef KVC_TESTS_MERGING_H
#define KVC_TESTS_MERGING_H

#include <string.h>

#include "rng.h"
#include "tables.h"

#include "kvc/merge.h"

static inline kvc_merge_options merge_options(float tau)
{
    kvc_merge_options o;

    kvc_merge_options_default(&o);
    o.tau = tau;
    o.max_share = 0.5f;
    return o;
}

/* Unmerged tokens of one image on a grid. */
static inline void image_tokens(kvc_merge_token *tokens, size_t n, int32_t n_cols)
{
    for (size_t i = 0; i < n; i++) {
        tokens[i] =
            (kvc_merge_token){.row = (int32_t)i / n_cols, .col = (int32_t)i % n_cols, .size = 1.0f};
    }
}

static inline size_t at(size_t n, size_t i, size_t j)
{
    return i * (2 * n - i - 1) / 2 + (j - i - 1);
}

/* A workspace of just the size that is asked for. */
static inline void *workspace(size_t size)
{
    void *ws = aligned_alloc(64, (size / 64 + 1) * 64);

    if (ws == NULL) {
        abort();
    }
    memset(ws, 0xFF, size); /* NaN */
    return ws;
}

/* Random tokens of several images and frames, some of them text or fixed. */
static inline void random_tokens(uint64_t *rng, kvc_merge_token *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        tokens[i] = (kvc_merge_token){.image = (int32_t)rng_below(rng, 4) - 1,
                                      .frame = (int32_t)rng_below(rng, 2),
                                      .row = (int32_t)rng_below(rng, 6),
                                      .col = (int32_t)rng_below(rng, 6),
                                      .size = 1.0f,
                                      .fixed = rng_below(rng, 8) == 0};
    }
}

static inline void similarity_of(kvc_ctx *ctx, const kvc_view *k, const kvc_merge_token *tokens,
                                 const kvc_merge_options *o, float *similarity, float *norms)
{
    size_t size;

    assert_int_equal(kvc_merge_similarity_workspace_size(k, &size), KVC_OK);
    void *ws = workspace(size);
    assert_int_equal(kvc_merge_similarity(ctx, k, tokens, o, similarity, norms, ws, size), KVC_OK);
    free(ws);
}

static inline size_t plan(kvc_ctx *ctx, const kvc_view *k, const kvc_merge_token *tokens,
                          const kvc_merge_options *o, kvc_merge_pair *pairs)
{
    size_t size, n_pairs = SIZE_MAX;

    assert_int_equal(kvc_merge_plan_workspace_size(k, 1, &size), KVC_OK);
    void *ws = workspace(size);
    assert_int_equal(kvc_merge_plan(ctx, k, 1, tokens, o, pairs, &n_pairs, ws, size), KVC_OK);
    free(ws);
    return n_pairs;
}

#endif
