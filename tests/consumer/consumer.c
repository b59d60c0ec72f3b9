/* consumer.c - a C program that uses libkvc and its pool. */
#include <stdio.h>

#include <kvc/kvc.h>
#include <kvc/pool.h>

int main(void)
{
    kvc_ctx_params how = {.struct_size = sizeof(how), .parallel_for = kvc_pool_parallel_for};
    kvc_cache_params params;
    kvc_pool *pool = NULL;
    kvc_ctx *ctx = NULL;
    kvc_cache *cache = NULL;
    kvc_seq seq = 0;
    int ok = kvc_pool_create(2, &pool) == KVC_OK;

    how.parallel_user = pool;
    kvc_cache_params_default(&params);
    params.n_layers = 2;
    params.n_heads = params.n_kv_heads = 2;
    params.head_dim_k = params.head_dim_v = 32;
    ok = ok && kvc_ctx_create(&how, &ctx) == KVC_OK;
    ok = ok && kvc_cache_min_budget(&params, &params.budget_bytes) == KVC_OK;
    ok = ok && kvc_cache_create(ctx, &params, &cache) == KVC_OK;
    ok = ok && kvc_seq_create(cache, &seq) == KVC_OK;
    ok = ok && kvc_tokens_add(cache, seq, NULL, 3) == KVC_OK;
    ok = ok && kvc_seq_n_tokens(cache, seq) == 3;
    printf("libkvc %d, %s kernels: %s\n", kvc_version(), kvc_ctx_kernels(ctx),
           ok ? "ok" : "failed");
    kvc_cache_destroy(cache);
    kvc_ctx_destroy(ctx);
    kvc_pool_destroy(pool);
    return !ok;
}
