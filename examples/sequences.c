/* Fork a prompt, let two answers grow, take one back, and look at the memory. */
#include <kvc/kvc.h>
#include <stdio.h>

enum { LAYERS = 2, HEADS = 8, KV_HEADS = 2, DIM = 64, PROMPT = 512 };

static float rows[PROMPT * KV_HEADS * DIM]; /* a model's K and V would be here */

/* Announces n tokens and hands their K and V to every layer. */
static kvc_status feed(kvc_cache *cache, kvc_seq seq, size_t n)
{
    const kvc_view view = kvc_view_packed(rows, KVC_DTYPE_F32, n, KV_HEADS, DIM);
    kvc_status status = kvc_tokens_add(cache, seq, NULL, n);
    for (int32_t layer = 0; layer < LAYERS && status == KVC_OK; layer++)
        status = kvc_append(cache, seq, layer, &view, &view);
    return status;
}

static void report(const kvc_cache *cache, const char *what)
{
    kvc_stats s = {.struct_size = sizeof(s)};
    if (kvc_cache_stats(cache, &s) == KVC_OK)
        printf("%-32s %4lld tokens, %4lld sealed and %3lld open pages, %7zu bytes\n", what,
               (long long)s.n_tokens, (long long)s.n_pages_sealed, (long long)s.n_pages_f16,
               s.used_bytes);
}

static kvc_status run(kvc_cache *cache)
{
    kvc_seq prompt, answer;
    kvc_status status = kvc_seq_create(cache, &prompt);

    if (status == KVC_OK)
        status = feed(cache, prompt, PROMPT);
    report(cache, "prompt");
    if (status == KVC_OK)
        status = kvc_seq_fork(cache, prompt, &answer);
    report(cache, "fork: full pages are shared");
    for (int i = 0; i < 200 && status == KVC_OK; i++) {
        status = feed(cache, prompt, 1);
        if (status == KVC_OK)
            status = feed(cache, answer, 1);
    }
    report(cache, "both have grown by 200");
    if (status == KVC_OK)
        status = kvc_seq_truncate(cache, answer, PROMPT);
    report(cache, "one answer taken back");
    if (status == KVC_OK)
        status = kvc_seq_destroy(cache, answer);
    report(cache, "and its sequence destroyed");
    return status;
}

int main(void)
{
    kvc_cache_params p;
    kvc_ctx *ctx = NULL;
    kvc_cache *cache = NULL;

    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        rows[i] = (float)(i * 7 % 101) / 50.0f - 1.0f;
    kvc_cache_params_default(&p);
    p.n_layers = LAYERS;
    p.n_heads = HEADS;
    p.n_kv_heads = KV_HEADS;
    p.head_dim_k = p.head_dim_v = DIM;
    p.max_sequences = 2;
    kvc_status status = kvc_cache_min_budget(&p, &p.budget_bytes);
    p.budget_bytes += (size_t)2 << 20; /* room for sealed pages */
    if (status == KVC_OK)
        status = kvc_ctx_create(NULL, &ctx);
    if (status == KVC_OK)
        status = kvc_cache_create(ctx, &p, &cache);
    if (status == KVC_OK)
        status = run(cache);
    if (status != KVC_OK)
        fprintf(stderr, "%s\n", kvc_status_str(status));
    kvc_cache_destroy(cache);
    kvc_ctx_destroy(ctx);
    return status != KVC_OK;
}
