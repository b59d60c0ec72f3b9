/* plan.c - what a token costs and how many fit: arithmetic in double, no tensor in sight. */
#include "kvc/plan.h"

#include <math.h>

#include "check.h"
#include "ctx.h"

static const kvc_plan_profile defaults = {
    .struct_size = sizeof(defaults),
    .name = "f16",
    .visual_share = 1.0,
    .k = KVC_F16,
    .v = KVC_F16,
    .k_scale = KVC_SCALE_TOKEN,
    .v_scale = KVC_SCALE_TOKEN,
};

/* What the presets change. */
static const struct preset {
    const char *name;
    double prune_rate, heavy_share;
    int32_t merge_rounds;
    kvc_format k, v;
    kvc_scale k_scale;
} presets[] = {
    {"f16", 0.0, 0.0, 0, KVC_F16, KVC_F16, KVC_SCALE_TOKEN},
    {"int8", 0.0, 0.0, 0, KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN},
    {"int4", 0.0, 0.0, 0, KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN},
    {"k6v4", 0.0, 0.0, 0, KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN},
    {"int4-raw", 0.0, 0.0, 0, KVC_INT4, KVC_INT4, KVC_SCALE_CHANNEL},
    {"light", 0.15, 0.0, 0, KVC_F16, KVC_F16, KVC_SCALE_TOKEN},
    {"balanced", 0.3, 0.0, 1, KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN},
    {"aggressive", 0.5, 0.2, 2, KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN},
    {"extreme", 0.65, 0.2, 3, KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN},
};

void kvc_plan_profile_init(kvc_plan_profile *profile, size_t struct_size)
{
    kvc_struct_init(profile, struct_size, &defaults, sizeof(defaults));
}

kvc_status kvc_plan_profile_preset(const char *name, kvc_plan_profile *profile)
{
    KVC_CHECK(name && profile && profile->struct_size >= sizeof(*profile), KVC_E_ARG);
    for (size_t i = 0; i < sizeof(presets) / sizeof(*presets); i++) {
        const struct preset *p = &presets[i];
        if (strcmp(p->name, name) != 0)
            continue;
        kvc_plan_profile out = defaults;
        out.name = p->name;
        out.prune_rate = p->prune_rate;
        out.merge_rounds = p->merge_rounds;
        out.heavy_share = p->heavy_share;
        out.k = p->k;
        out.v = p->v;
        out.k_scale = p->k_scale;
        kvc_struct_write(profile, &out, sizeof(out));
        return KVC_OK;
    }
    return KVC_E_ARG;
}

static bool in_unit(double x)
{
    return x >= 0.0 && x <= 1.0;
}

static kvc_status take_model(const kvc_plan_model *model, kvc_plan_model *out)
{
    KVC_CHECK(model, KVC_E_ARG);
    KVC_TRY(kvc_struct_read(out, sizeof(*out), model, sizeof(*out)));
    KVC_CHECK(out->n_layers >= 1 && out->n_layers <= 65536 && out->n_kv_heads >= 1 &&
                  out->n_heads >= 1 && out->n_heads <= 65536 &&
                  out->n_heads % out->n_kv_heads == 0 && out->head_dim_k >= 1 &&
                  out->head_dim_v >= 1,
              KVC_E_ARG);
    KVC_CHECK(out->head_dim_k <= KVC_MAX_HEAD_DIM && out->head_dim_v <= KVC_MAX_HEAD_DIM,
              KVC_E_UNSUPPORTED);
    return KVC_OK;
}

static kvc_status take_profile(const kvc_plan_profile *profile, kvc_plan_profile *out)
{
    *out = defaults;
    if (profile)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), profile, sizeof(*out)));
    KVC_CHECK(in_unit(out->visual_share) && in_unit(out->prune_rate) && out->prune_rate < 1.0 &&
                  out->merge_rounds >= 0 && out->merge_rounds <= 16 && in_unit(out->heavy_share) &&
                  (unsigned)out->k <= KVC_INT6 && (unsigned)out->v <= KVC_INT6 &&
                  (unsigned)out->k_scale <= KVC_SCALE_LAYER &&
                  (unsigned)out->v_scale <= KVC_SCALE_LAYER,
              KVC_E_ARG);
    KVC_CHECK((out->k == KVC_F16 || out->k_scale != KVC_SCALE_LAYER) &&
                  (out->v == KVC_F16 || out->v_scale < KVC_SCALE_CHANNEL) &&
                  (out->k != KVC_INT6 || out->k_scale == KVC_SCALE_TOKEN) && out->v != KVC_INT6,
              KVC_E_UNSUPPORTED);
    return KVC_OK;
}

static int32_t code_bits(kvc_format format)
{
    return format == KVC_INT8 ? 8 : format == KVC_INT6 ? 6 : 4;
}

/* Bytes of a row of one head. */
static double row_bytes(int32_t d, kvc_format format, kvc_scale scale)
{
    const int32_t codes = (d * code_bits(format) + 7) / 8;
    const int32_t groups = (int32_t)kvc_scale_groups((uint8_t)format, KVC_SCALE_TOKEN, (uint32_t)d);

    if (format == KVC_F16)
        return 2.0 * d;
    switch (scale) {
    case KVC_SCALE_TOKEN: return codes + 2.0 * groups;
    case KVC_SCALE_CHANNEL: return codes + 4.0 * d / KVC_PAGE_ROWS;
    default: return codes + 4.0 / KVC_PAGE_ROWS;
    }
}

kvc_status kvc_plan_bytes(const kvc_plan_model *model, const kvc_plan_profile *profile,
                          double *bytes_per_token)
{
    kvc_plan_model m;
    kvc_plan_profile p;

    KVC_TRY(take_model(model, &m));
    KVC_TRY(take_profile(profile, &p));
    KVC_CHECK(bytes_per_token, KVC_E_ARG);
    const double merged = pow(0.75, p.merge_rounds);
    const double rows = p.visual_share * (1.0 - p.prune_rate) * merged + (1.0 - p.visual_share);
    const double heavy = 2.0 * m.head_dim_k + 2.0 * m.head_dim_v;
    const double light =
        row_bytes(m.head_dim_k, p.k, p.k_scale) + row_bytes(m.head_dim_v, p.v, p.v_scale);
    const double row = p.heavy_share * heavy + (1.0 - p.heavy_share) * light;
    *bytes_per_token = (double)m.n_layers * m.n_kv_heads * row * rows;
    return KVC_OK;
}

kvc_status kvc_plan_tokens(const kvc_plan_model *model, const kvc_plan_profile *profile,
                           uint64_t budget_bytes, int64_t *tokens)
{
    double bytes;

    KVC_CHECK(tokens, KVC_E_ARG);
    KVC_TRY(kvc_plan_bytes(model, profile, &bytes));
    const double n = floor((double)budget_bytes / bytes);
    *tokens = n < 0x1p63 ? (int64_t)n : INT64_MAX;
    return KVC_OK;
}

kvc_status kvc_plan_budget(uint64_t memory_bytes, double n_params, double weight_bits,
                           uint64_t overhead_bytes, uint64_t *budget_bytes)
{
    KVC_CHECK(budget_bytes && isfinite(n_params) && n_params >= 0.0 && isfinite(weight_bits) &&
                  weight_bits >= 0.0,
              KVC_E_ARG);
    const double weights = ceil(n_params * weight_bits / 8.0);
    uint64_t left = weights < 0x1p64 ? (uint64_t)weights : UINT64_MAX;
    left = memory_bytes > left ? memory_bytes - left : 0;
    *budget_bytes = left > overhead_bytes ? left - overhead_bytes : 0;
    return KVC_OK;
}
