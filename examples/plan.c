/* What fits a machine of 16 GiB beside 7e9 weights of 4 bits, under each profile. */
#include <kvc/kvc.h>
#include <kvc/plan.h>
#include <stdio.h>

int main(void)
{
    static const char *const names[] = {"f16",      "int8",       "int4",   "light",
                                        "balanced", "aggressive", "extreme"};
    const uint64_t gib = (uint64_t)1 << 30;
    const kvc_plan_model model = {
        .struct_size = sizeof(model),
        .n_layers = 32,
        .n_heads = 32,
        .n_kv_heads = 8,
        .head_dim_k = 128,
        .head_dim_v = 128,
    };
    uint64_t budget = 0;

    if (kvc_plan_budget(16 * gib, 7e9, 4.0, gib, &budget) != KVC_OK)
        return 1;
    printf("%.2f GiB for K and V; 60 %% of the tokens are visual\n\n%-12s %14s %10s\n",
           (double)budget / (double)gib, "profile", "bytes a token", "tokens");
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        kvc_plan_profile profile;
        double bytes = 0.0;
        int64_t tokens = 0;

        kvc_plan_profile_default(&profile);
        if (kvc_plan_profile_preset(names[i], &profile) != KVC_OK)
            return 1;
        profile.visual_share = 0.6;
        if (kvc_plan_bytes(&model, &profile, &bytes) != KVC_OK ||
            kvc_plan_tokens(&model, &profile, budget, &tokens) != KVC_OK)
            return 1;
        printf("%-12s %14.1f %10lld\n", profile.name, bytes, (long long)tokens);
    }
    return 0;
}
