#include <kvc/kvc.h>
#include <stdio.h>

int main(void)
{
    static float k[200][2][64], v[200][2][64], q[8][64], out[8][64]; /* from and to the model */
    const kvc_view kv = kvc_view_packed(k, KVC_DTYPE_F32, 200, 2, 64);
    const kvc_view vv = kvc_view_packed(v, KVC_DTYPE_F32, 200, 2, 64);
    const kvc_view qv = kvc_view_packed(q, KVC_DTYPE_F32, 1, 8, 64);
    const kvc_view ov = kvc_view_packed(out, KVC_DTYPE_F32, 1, 8, 64);
    kvc_ctx *ctx = NULL;
    kvc_cache *cache = NULL;
    kvc_cache_params p;
    kvc_seq s;

    kvc_cache_params_default(&p); /* INT8; the first 4 and the newest 128 tokens stay F16 */
    p.n_layers = 1, p.n_heads = 8, p.n_kv_heads = 2, p.head_dim_k = p.head_dim_v = 64;
    p.budget_bytes = 4 << 20; /* allocated once, by kvc_cache_create() */
    int bad = kvc_ctx_create(NULL, &ctx) || kvc_cache_create(ctx, &p, &cache) ||
              kvc_seq_create(cache, &s) || kvc_tokens_add(cache, s, NULL, 200) ||
              kvc_append(cache, s, 0, &kv, &vv) || kvc_attend(cache, s, 0, &qv, NULL, &ov, NULL);
    puts(bad ? "failed" : "one token has attended to 200");
    kvc_cache_destroy(cache), kvc_ctx_destroy(ctx);
    return bad;
}
