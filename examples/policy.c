/* policy.c - a prompt with an image: prune and merge its tokens, seal, and see what it cost. */
#include <kvc/kvc.h>
#include <math.h>
#include <stdio.h>

enum { IMAGE = 576, TEXT = 200, N = IMAGE + TEXT, LAYERS = 2, HEADS = 4, KV_HEADS = 2, D = 64 };

static float k[N][KV_HEADS][D], v[N][KV_HEADS][D], q[N][HEADS][D], out[N][HEADS][D];
static kvc_token tokens[N];

/* An image of 24 x 24 patches that change slowly, then text. Stands for a model. */
static void make_prompt(void)
{
    for (int t = 0; t < N; t++) {
        const int row = t / 24, col = t % 24;
        tokens[t] = (kvc_token){.t = t, .y = t, .x = t, .image = -1, .row = -1, .col = -1};
        if (t < IMAGE) {
            tokens[t].kind = KVC_TOKEN_VISUAL;
            tokens[t].image = 0;
            tokens[t].row = row;
            tokens[t].col = col;
        }
        for (int c = 0; c < KV_HEADS * D; c++) {
            const float wave = sinf(0.11f * (float)(row * (c % 7))) +
                               cosf(0.07f * (float)(col * (c % 11)) + (float)c);
            k[t][c / D][c % D] = t < IMAGE ? wave : sinf((float)(t * c));
            v[t][c / D][c % D] = t < IMAGE ? cosf(wave + (float)c) : cosf((float)(t + c));
        }
        for (int c = 0; c < HEADS * D; c++)
            q[t][c / D][c % D] = 0.5f * sinf(0.3f * (float)t + 1.7f * (float)c);
    }
}

static kvc_status prefill(kvc_cache *cache, kvc_seq seq)
{
    const kvc_view kv = kvc_view_packed(k, KVC_DTYPE_F32, N, KV_HEADS, D);
    const kvc_view vv = kvc_view_packed(v, KVC_DTYPE_F32, N, KV_HEADS, D);
    const kvc_view qv = kvc_view_packed(q, KVC_DTYPE_F32, N, HEADS, D);
    const kvc_view ov = kvc_view_packed(out, KVC_DTYPE_F32, N, HEADS, D);
    kvc_status e = kvc_seq_hold(cache, seq); /* merging wants exact rows */
    e = e ? e : kvc_tokens_add(cache, seq, tokens, N);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        e = e ? e : kvc_append(cache, seq, layer, &kv, &vv);
        e = e ? e : kvc_attend(cache, seq, layer, &qv, NULL, &ov, NULL); /* keeps query rows */
    }
    return e;
}

int main(void)
{
    kvc_ctx *ctx = NULL;
    kvc_cache *cache = NULL;
    kvc_cache_params p;
    kvc_policy policy;
    kvc_seq seq;
    kvc_layer_report layers[LAYERS];
    kvc_report report = {.struct_size = sizeof(report), .layers = layers, .n_layers = LAYERS};

    make_prompt();
    kvc_cache_params_default(&p);
    p.n_layers = LAYERS, p.n_heads = HEADS, p.n_kv_heads = KV_HEADS;
    p.head_dim_k = p.head_dim_v = D;
    p.max_append = p.max_hold_tokens = N;
    p.max_merge_tokens = IMAGE;
    kvc_status e = kvc_cache_full_budget(&p, &p.budget_bytes);
    e = e ? e : kvc_ctx_create(NULL, &ctx);
    e = e ? e : kvc_cache_create(ctx, &p, &cache);
    e = e ? e : kvc_seq_create(cache, &seq);
    e = e ? e : prefill(cache, seq);
    e = e ? e
          : kvc_policy_preset("balanced", &policy); /* 30 % pruned, INT8, one round of merging */
    e = e ? e : kvc_cache_compress(cache, seq, &policy, &report, NULL);
    if (e != KVC_OK) {
        fprintf(stderr, "policy: %s\n", kvc_status_str(e));
        return 1;
    }
    printf("%zu bytes in use before, %zu after\n", report.bytes_before, report.bytes_after);
    for (int32_t l = 0; l < LAYERS; l++)
        printf("layer %d: %lld rows kept, %lld pruned, %lld merged; output changes by %.1f %%\n", l,
               (long long)layers[l].n_kept, (long long)layers[l].n_pruned,
               (long long)layers[l].n_merged, 100.0 * layers[l].rel_err);
    printf("next position %lld, as before\n", (long long)kvc_seq_next_position(cache, seq));
    const int right = kvc_seq_next_position(cache, seq) == N &&
                      layers[0].n_pruned == (int64_t)KV_HEADS * (IMAGE - 404) &&
                      layers[0].n_merged > 0;
    kvc_cache_destroy(cache);
    kvc_ctx_destroy(ctx);
    return right ? 0 : 1;
}
