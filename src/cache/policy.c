/* policy.c - policies: defaults, the profiles, and their checks. */
#include <math.h>

#include "check.h"
#include "choose.h"

static kvc_policy defaults(void)
{
    kvc_policy p = {
        .struct_size = sizeof(p),
        .layers = KVC_LAYERS_ALL,
        .last_layers = 4,
        .keep_min = 64,
        .temperature = 0.7f,
        .sink_factor = 10.0f,
        .block = 1,
        .last_tokens = 64,
        .keep_sentences = true,
        .precision = {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    };
    kvc_gate_params_default(&p.gating);
    kvc_merge_options_default(&p.merging);
    kvc_budget_options_default(&p.budget);
    p.budget.mode = KVC_BUDGET_UNIFORM;
    return p;
}

void kvc_policy_init(kvc_policy *policy, size_t struct_size)
{
    const kvc_policy p = defaults();
    kvc_struct_init(policy, struct_size, &p, sizeof(p));
}

/* What a profile sets. */
struct profile {
    const char *name;
    float visual_rate, heavy_share;
    kvc_format format;
    int32_t merge_rounds;
};

static const struct profile profiles[] = {
    {"light", 0.15f, 0.0f, KVC_F16, 0},
    {"balanced", 0.30f, 0.0f, KVC_INT8, 1},
    {"aggressive", 0.50f, 0.2f, KVC_INT4, 2},
    {"extreme", 0.65f, 0.2f, KVC_INT4, 3},
};

kvc_status kvc_policy_preset_init(const char *name, kvc_policy *policy, size_t struct_size)
{
    KVC_CHECK(name && policy && struct_size >= sizeof(*policy), KVC_E_ARG);
    for (size_t i = 0; i < sizeof(profiles) / sizeof(*profiles); i++) {
        const struct profile *from = &profiles[i];
        if (strcmp(from->name, name) != 0)
            continue;
        kvc_policy p = defaults();
        p.visual_rate = from->visual_rate;
        p.heavy_share = from->heavy_share;
        p.merge_rounds = from->merge_rounds;
        p.set_precision = true;
        p.precision.k = p.precision.v = from->format;
        kvc_struct_init(policy, struct_size, &p, sizeof(p));
        return KVC_OK;
    }
    return KVC_E_ARG;
}

static bool share_ok(float x)
{
    return x >= 0.0f && x <= 1.0f;
}

static bool scores_ok(const kvc_policy *p)
{
    if (p->source != KVC_SOURCE_CALLER)
        return true;
    if (!p->scores && p->n_scores > 0)
        return false;
    for (size_t i = 0; i < p->n_scores; i++)
        if (!(p->scores[i] >= 0.0f && p->scores[i] <= 3.4e38f))
            return false;
    return true;
}

static bool ranges_ok(const kvc_policy *p)
{
    return (unsigned)p->source <= KVC_SOURCE_AGE && (unsigned)p->scope <= KVC_SCOPE_HEAD &&
           (unsigned)p->layers <= KVC_LAYERS_ALL && p->last_layers >= 1 &&
           share_ok(p->visual_rate) && p->keep_min >= 0 && p->centre >= 0.0f &&
           isfinite(p->centre) && p->temperature > 0.0f && isfinite(p->temperature) &&
           p->coverage >= 0 && (p->sink_factor == 0.0f || p->sink_factor >= 1.0f) &&
           isfinite(p->sink_factor) && p->merge_rounds >= 0 && p->merge_rounds <= 3 &&
           share_ok(p->row_rate) && p->max_rows >= 0 && p->block >= 1 && p->block <= 64 &&
           (unsigned)p->block_score <= KVC_BLOCK_MAX && p->last_tokens >= 0 &&
           share_ok(p->heavy_share) && p->max_rel_err >= 0.0f && isfinite(p->max_rel_err);
}

/* The options of the modules, asked by calls that do nothing else. */
static kvc_status options_check(const kvc_policy *p)
{
    const kvc_gate_input input = {.struct_size = sizeof(input), .budget_bytes = 1, .entropy = 1.0f};
    kvc_gate_params gating = p->gating;
    kvc_gate gate;
    kvc_budget_options budget = p->budget;
    float rate;
    size_t n_pairs;
    int32_t rows;
    const float one = 1.0f;

    kvc_gate_init(&gate, sizeof(gate));
    gating.base = p->visual_rate;
    KVC_TRY(kvc_gate_update(&gate, &gating, &input, NULL, &rate));
    KVC_CHECK(budget.mode != KVC_BUDGET_MASS, KVC_E_UNSUPPORTED);
    budget.min = 0;
    budget.max = INT32_MAX;
    KVC_TRY(kvc_split_budget(&one, 1, 1, &budget, &rows));
    size_t size;
    KVC_TRY(kvc_merge_match_workspace_size(0, &size));
    _Alignas(64) char ws[64];
    KVC_CHECK(size <= sizeof(ws), KVC_E_ARG);
    kvc_merge_pair pair;
    kvc_merge_token none;
    return kvc_merge_match(NULL, 1.0f, NULL, &none, 0, &p->merging, &pair, &n_pairs, ws,
                           sizeof(ws));
}

/* Whether scores decide anything. */
static bool needs_scores(const kvc_policy *p)
{
    return p->visual_rate > 0.0f || p->row_rate > 0.0f || p->max_rows > 0 || p->heavy_share > 0.0f;
}

kvc_status kvc_policy_check(const kvc_cache *cache, const kvc_policy *policy, bool evicts,
                            kvc_policy *out)
{
    *out = defaults();
    KVC_TRY(kvc_struct_read(out, sizeof(*out), policy, sizeof(*out)));
    KVC_CHECK(ranges_ok(out) && scores_ok(out), KVC_E_ARG);
    KVC_TRY(kvc_precision_check(&out->precision));
    KVC_TRY(options_check(out));
    KVC_CHECK(out->source != KVC_SOURCE_SUMS || cache->params.score_mode != KVC_SCORE_NONE,
              KVC_E_ARG);
    const bool probes = out->source == KVC_SOURCE_PROBES && (evicts || needs_scores(out));
    KVC_CHECK(cache->params.probe_rows > 0 || (!probes && out->max_rel_err == 0.0f), KVC_E_ARG);
    KVC_CHECK(out->merge_rounds == 0 || cache->params.max_merge_tokens > 0, KVC_E_UNSUPPORTED);
    return KVC_OK;
}
