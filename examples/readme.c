#include <kvc/kvc.h>
#include <stdio.h>

int main(void)
{
    static float kv[200][2][64], q[8][64], out[8][64];                   /* from and to the model */
    const kvc_view kvv = kvc_view_packed(kv, KVC_DTYPE_F32, 200, 2, 64); /* here K and V are one */
    const kvc_view qv = kvc_view_packed(q, KVC_DTYPE_F32, 1, 8, 64);
    const kvc_view ov = kvc_view_packed(out, KVC_DTYPE_F32, 1, 8, 64);
    kvc_ctx *ctx = NULL;
    kvc_cache *cache = NULL;
    kvc_cache_params p;
    kvc_seq s;
    kvc_cache_params_default(&p); /* INT8; the first 4 and the newest 128 tokens stay F16 */
    p.n_layers = 1, p.n_heads = 8, p.n_kv_heads = 2, p.head_dim_k = p.head_dim_v = 64;
    kvc_status e = kvc_cache_full_budget(&p, &p.budget_bytes); /* allocated once, at create */
    e = e ? e : kvc_ctx_create(NULL, &ctx);
    e = e ? e : kvc_cache_create(ctx, &p, &cache);
    e = e ? e : kvc_seq_create(cache, &s);
    e = e ? e : kvc_tokens_add(cache, s, NULL, 200);
    e = e ? e : kvc_append(cache, s, 0, &kvv, &kvv);
    e = e ? e : kvc_attend(cache, s, 0, &qv, NULL, &ov, NULL);
    puts(kvc_status_str(e)), kvc_cache_destroy(cache), kvc_ctx_destroy(ctx);
    return e != KVC_OK;
}
