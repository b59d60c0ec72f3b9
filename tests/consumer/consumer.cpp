// consumer.cpp - a C++ program that uses libkvc without the pool.
#include <cstdio>
#include <vector>

#include <kvc/kvc.h>

int main()
{
    std::vector<float> x(2 * 4 * 8, 1.0f), y(x.size());
    std::vector<signed char> codes(x.size());
    std::vector<float> params(4);
    const kvc_view src = kvc_view_packed(x.data(), KVC_DTYPE_F32, 2, 4, 8);
    const kvc_view dst = kvc_view_packed(y.data(), KVC_DTYPE_F32, 2, 4, 8);
    kvc_cache_params how;
    kvc_ctx *ctx = nullptr;
    kvc_cache *cache = nullptr;

    kvc_cache_params_default(&how);
    how.n_layers = how.n_heads = how.n_kv_heads = 1;
    how.head_dim_k = how.head_dim_v = 8;
    const bool ok = kvc_ctx_create(nullptr, &ctx) == KVC_OK &&
                    kvc_cache_min_budget(&how, &how.budget_bytes) == KVC_OK &&
                    kvc_cache_create(ctx, &how, &cache) == KVC_OK &&
                    kvc_quantize(ctx, &src, nullptr, codes.data(), codes.size(), params.data(), 16,
                                 nullptr) == KVC_OK &&
                    kvc_dequantize(ctx, codes.data(), codes.size(), params.data(), 16, nullptr,
                                   &dst) == KVC_OK &&
                    y[0] > 0.99f && y[0] < 1.01f;
    std::printf("libkvc in C++: %s\n", ok ? "ok" : "failed");
    kvc_cache_destroy(cache);
    kvc_ctx_destroy(ctx);
    return !ok;
}
