/* plan_fill.c - fills caches to tell what they take. */
#include "plan_fill.h"

#include <stdlib.h>
#include <string.h>

/* Rows of K and V that are handed over at a time. */
enum { CHUNK = 512 };

static bool check(kvc_status status, const char *what, struct failure *failure)
{
    return status == KVC_OK || fail_with(failure, "%s: %s", what, kvc_status_str(status));
}

static kvc_cache_params params_of(const kvc_plan_model *model, const kvc_plan_profile *profile,
                                  int64_t n_tokens)
{
    kvc_cache_params p;
    kvc_cache_params_default(&p);
    p.n_layers = model->n_layers;
    p.n_heads = p.n_kv_heads = model->n_kv_heads; /* query heads take no room in the cache */
    p.head_dim_k = model->head_dim_k;
    p.head_dim_v = model->head_dim_v;
    p.max_tokens = p.max_hold_tokens = (int32_t)n_tokens;
    p.max_append = CHUNK;
    p.probe_rows = 0;
    p.max_merge_tokens = profile->merge_rounds > 0 ? PLAN_IMAGE_TOKENS : 0;
    p.precision = (kvc_precision){profile->k, profile->v, profile->k_scale, profile->v_scale};
    return p;
}

static kvc_policy policy_of(const kvc_plan_profile *profile)
{
    kvc_policy policy;
    kvc_policy_default(&policy);
    policy.source = KVC_SOURCE_CALLER; /* all alike: only the number of rows matters */
    policy.visual_rate = (float)profile->prune_rate;
    policy.heavy_share = (float)profile->heavy_share;
    policy.merge_rounds = profile->merge_rounds;
    policy.merging.force_quarter = true;
    policy.keep_min = 0;
    return policy;
}

/* Tokens first ... first + n - 1 of a prompt that begins with n_visual visual ones. */
static void make_tokens(kvc_token *tokens, int64_t first, int64_t n, int64_t n_visual)
{
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = first + i;
        const int32_t position = (int32_t)at, cell = (int32_t)(at % PLAN_IMAGE_TOKENS);
        const bool visual = at < n_visual;
        tokens[i] = (kvc_token){
            .t = position,
            .y = position,
            .x = position,
            .image = visual ? (int32_t)(at / PLAN_IMAGE_TOKENS) : -1,
            .row = visual ? cell / 24 : -1,
            .col = visual ? cell % 24 : -1,
            .kind = visual ? KVC_TOKEN_VISUAL : KVC_TOKEN_TEXT,
        };
    }
}

/* Reads the tokens of a prompt into a sequence; K and V are rows of ones. */
static kvc_status feed(kvc_cache *cache, kvc_seq seq, const kvc_cache_params *p, int64_t n_visual,
                       float *rows)
{
    kvc_token tokens[CHUNK];
    kvc_status status = kvc_seq_hold(cache, seq);

    for (int64_t at = 0; at < p->max_tokens && status == KVC_OK; at += CHUNK) {
        const int64_t left = p->max_tokens - at, n = left < CHUNK ? left : CHUNK;
        const size_t heads = (size_t)p->n_kv_heads;
        const kvc_view k =
            kvc_view_packed(rows, KVC_DTYPE_F32, (size_t)n, heads, (size_t)p->head_dim_k);
        const kvc_view v =
            kvc_view_packed(rows, KVC_DTYPE_F32, (size_t)n, heads, (size_t)p->head_dim_v);
        make_tokens(tokens, at, n, n_visual);
        status = kvc_tokens_add(cache, seq, tokens, (size_t)n);
        for (int32_t l = 0; l < p->n_layers && status == KVC_OK; l++)
            status = kvc_append(cache, seq, l, &k, &v);
    }
    return status;
}

static kvc_status fill(kvc_ctx *ctx, const kvc_cache_params *p, const kvc_policy *policy,
                       int64_t n_visual, float *rows, kvc_stats *stats)
{
    kvc_cache *cache = NULL;
    kvc_seq seq;
    kvc_status status = kvc_cache_create(ctx, p, &cache);

    if (status == KVC_OK)
        status = kvc_seq_create(cache, &seq);
    if (status == KVC_OK)
        status = feed(cache, seq, p, n_visual, rows);
    if (status == KVC_OK)
        status = kvc_cache_compress(cache, seq, policy, NULL, NULL);
    stats->struct_size = sizeof(*stats);
    if (status == KVC_OK)
        status = kvc_cache_stats(cache, stats);
    kvc_cache_destroy(cache);
    return status;
}

/* A cache of that shape, filled. */
static bool fill_shape(const kvc_plan_model *model, const kvc_plan_profile *profile,
                       int64_t n_tokens, kvc_stats *stats, struct failure *failure)
{
    kvc_cache_params p = params_of(model, profile, n_tokens);
    const kvc_policy policy = policy_of(profile);
    const bool plain =
        profile->prune_rate == 0.0 && profile->merge_rounds == 0 && profile->heavy_share == 0.0;
    const int64_t n_visual = (int64_t)((double)n_tokens * profile->visual_share + 0.5);
    const size_t d = (size_t)(p.head_dim_k > p.head_dim_v ? p.head_dim_k : p.head_dim_v);
    const size_t n = (size_t)CHUNK * (size_t)p.n_kv_heads * d;
    kvc_ctx *ctx = NULL;

    kvc_status status = kvc_cache_full_budget(&p, &p.budget_bytes);
    if (status == KVC_OK) /* pages of several sizes take slabs of their own */
        status = __builtin_add_overflow(p.budget_bytes, p.budget_bytes / 4 + (size_t)(64 << 20),
                                        &p.budget_bytes)
                     ? KVC_E_NOMEM
                     : kvc_ctx_create(NULL, &ctx);
    float *rows = malloc(n * sizeof(*rows));
    for (size_t i = 0; rows && i < n; i++)
        rows[i] = 1.0f;
    if (status == KVC_OK)
        status = rows ? fill(ctx, &p, plain ? NULL : &policy, n_visual, rows, stats) : KVC_E_NOMEM;
    free(rows);
    kvc_ctx_destroy(ctx);
    return check(status, "filling a cache", failure);
}

/* Bytes of one line of the page table: those of a cache that has just one. */
static bool line_bytes(const kvc_plan_model *model, uint64_t *bytes, struct failure *failure)
{
    kvc_plan_model flat = *model;
    kvc_plan_profile plain;
    kvc_stats stats = {0};

    flat.head_dim_k = flat.head_dim_v = 1;
    kvc_plan_profile_default(&plain);
    plain.visual_share = 0.0;
    if (!fill_shape(&flat, &plain, 5, &stats, failure)) /* four sinks and a token */
        return false;
    *bytes = stats.entry_bytes;
    return true;
}

bool plan_fill(const kvc_plan_model *model, const kvc_plan_profile *profile, int64_t n_tokens,
               bool whole, uint64_t *bytes, struct failure *failure)
{
    kvc_plan_model one = *model;
    kvc_stats stats = {0};
    uint64_t line, one_line;

    if (!whole)
        one.n_layers = one.n_heads = one.n_kv_heads = 1;
    if (!fill_shape(&one, profile, n_tokens, &stats, failure))
        return false;
    *bytes = stats.used_bytes;
    if (whole)
        return true;
    if (!line_bytes(model, &line, failure) || !line_bytes(&one, &one_line, failure))
        return false;
    const uint64_t n_pairs = (uint64_t)model->n_layers * (uint64_t)model->n_kv_heads;
    *bytes = n_pairs * (stats.f16_page_bytes + stats.sealed_page_bytes + stats.strip_bytes) +
             stats.token_bytes + stats.entry_bytes / one_line * line;
    return true;
}
