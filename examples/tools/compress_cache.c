/* compress_cache.c - the steps of 'kvc-bench compress' that a cache does itself. */
#include "compress.h"

static kvc_cache_params params_of(const struct compress_bench *b)
{
    const struct compress_options *o = b->options;
    kvc_cache_params params;
    kvc_cache_params_default(&params);
    params.n_layers = (int32_t)o->n_layers;
    params.n_heads = (int32_t)o->n_heads;
    params.n_kv_heads = (int32_t)o->n_kv_heads;
    params.head_dim_k = params.head_dim_v = (int32_t)o->head_dim;
    params.max_tokens = params.max_append = params.max_hold_tokens = (int32_t)b->n_all;
    params.max_merge_tokens = (int32_t)b->n_tokens;
    params.probe_rows = params.recent_tokens = COMPRESS_PROBES;
    params.sink_tokens = COMPRESS_SINKS;
    return params;
}

/* Text, the patches of the image, text. */
static void fill_tokens(struct compress_bench *b)
{
    const int32_t n_cols = b->grid.n_cols, n_rows = b->grid.n_rows;
    const int32_t longest = n_rows > n_cols ? n_rows : n_cols, n = (int32_t)b->n_tokens;
    for (int32_t i = 0; i < (int32_t)b->n_all; i++) {
        const int32_t cell = i - COMPRESS_SINKS;
        kvc_token *token = &b->tokens[i];
        if (cell >= 0 && cell < n) {
            const int32_t row = cell / n_cols, col = cell % n_cols;
            *token = (kvc_token){.t = COMPRESS_SINKS,
                                 .y = COMPRESS_SINKS + row,
                                 .x = COMPRESS_SINKS + col,
                                 .row = row,
                                 .col = col,
                                 .kind = KVC_TOKEN_VISUAL};
            continue;
        }
        const int32_t at = cell < 0 ? i : i - n + longest;
        *token = (kvc_token){.t = at, .y = at, .x = at, .image = -1, .row = -1, .col = -1};
    }
}

kvc_status compress_cache_open(struct compress_bench *b)
{
    kvc_cache_params params = params_of(b);
    kvc_status status = kvc_cache_full_budget(&params, &params.budget_bytes);
    if (status != KVC_OK)
        return status;
    params.budget_bytes += params.budget_bytes / 4; /* merged pages take slabs of their own */
    fill_tokens(b);
    return kvc_cache_create(b->ctx, &params, &b->cache);
}

static kvc_status fill_layer(struct compress_bench *b, size_t layer)
{
    const struct compress_options *o = b->options;
    const size_t n_heads = (size_t)o->n_heads, dim = (size_t)o->head_dim;
    const kvc_view k = compress_view(b, b->k, layer, false);
    const kvc_view v = compress_view(b, b->v, layer, false);
    const kvc_view q = kvc_view_packed(b->q, KVC_DTYPE_F32, COMPRESS_PROBES, n_heads, dim);
    const kvc_view out = kvc_view_packed(b->out, KVC_DTYPE_F32, COMPRESS_PROBES, n_heads, dim);
    const kvc_status status = kvc_append(b->cache, b->seq, (int32_t)layer, &k, &v);
    if (status != KVC_OK)
        return status;
    return kvc_attend(b->cache, b->seq, (int32_t)layer, &q, NULL, &out, NULL);
}

/* A sequence as it is after a prefill, in the place of the last one. */
kvc_status compress_cache_fill(struct compress_bench *b)
{
    kvc_status status = b->seq ? kvc_seq_destroy(b->cache, b->seq) : KVC_OK;
    b->seq = 0;
    if (status == KVC_OK)
        status = kvc_seq_create(b->cache, &b->seq);
    if (status == KVC_OK)
        status = kvc_seq_hold(b->cache, b->seq);
    if (status == KVC_OK)
        status = kvc_tokens_add(b->cache, b->seq, b->tokens, b->n_all);
    for (size_t layer = 0; status == KVC_OK && layer < (size_t)b->options->n_layers; layer++)
        status = fill_layer(b, layer);
    return status;
}

kvc_status compress_cache_run(struct compress_bench *b, const struct compress_step *step,
                              struct compress_laps *laps)
{
    kvc_policy policy;
    kvc_status status = kvc_policy_preset("balanced", &policy);
    if (status != KVC_OK)
        return status;
    policy.last_tokens = COMPRESS_PROBES;
    policy.keep_min = 0;
    policy.merge_rounds = step->rounds;
    policy.merging.force_quarter = true;
    if (!step->probes) {
        policy.source = KVC_SOURCE_CALLER;
        policy.scores = b->given;
        policy.n_scores = b->n_all;
    }
    kvc_report report = {.struct_size = sizeof report,
                         .layers = b->layers,
                         .n_layers = (int32_t)b->options->n_layers};
    compress_lap(laps, NULL);
    status = kvc_cache_compress(b->cache, b->seq, step->seal_only ? NULL : &policy,
                                step->report ? &report : NULL, NULL);
    compress_lap(laps, "kvc_cache_compress");
    b->n_left = (size_t)kvc_seq_n_rows(b->cache, b->seq, 0, 0) - COMPRESS_SINKS - COMPRESS_PROBES;
    return status;
}
