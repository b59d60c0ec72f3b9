/* rank.c - the scores of tokens, for the layers and heads that share a set of them. */
#include <math.h>
#include <string.h>

#include "choose.h"

/* The masses of the heads of one layer. */
struct layer_scores {
    const struct kvc_choice *c;
    int32_t layer;
    size_t n_lanes;
};

static void score_lane(void *arg, size_t lane)
{
    const struct layer_scores *s = arg;
    const int32_t n_heads = s->c->cache->params.n_kv_heads;
    for (int32_t h = (int32_t)lane; h < n_heads; h += (int32_t)s->n_lanes)
        kvc_probe_mass(s->c->cache, s->c->seq, s->layer * n_heads + h, s->c->probes, lane,
                       s->c->mass + (size_t)h * (size_t)s->c->n);
}

/* What attention added up for the rows of a pair, for each query that could see them. */
static void sum_scores(const struct kvc_choice *c, int32_t pair, float *mass)
{
    const kvc_cache *cache = c->cache;
    const float decay = cache->params.score_decay, factor = kvc_score_factor(cache, c->seq);
    for (int32_t slot = 0; slot < c->seq->n_slots; slot++) {
        struct kvc_column *column = kvc_slot(cache, c->seq, slot);
        const struct kvc_entry *e = &column->entries[pair];
        for (uint64_t left = e->page >= 0 ? e->live : 0; left; left &= left - 1) {
            const int r = __builtin_ctzll(left);
            const int32_t ordinal = kvc_row_ordinal(cache, column, pair, r);
            const float n = (float)(c->seq->n_tokens - ordinal);
            const float seen = decay < 1.0f ? (1.0f - powf(decay, n)) / (1.0f - decay) : n;
            mass[kvc_facts_find(cache, c->seq, ordinal)] =
                factor * kvc_row_score(cache, column, pair, (uint32_t)r) / seen;
        }
    }
}

/* The masses of the heads of a layer, in c->mass. */
static void score_layer(const struct kvc_choice *c, int32_t layer)
{
    const kvc_cache *cache = c->cache;
    const size_t n_heads = (size_t)cache->params.n_kv_heads;
    struct layer_scores s = {
        .c = c, .layer = layer, .n_lanes = n_heads < KVC_LANES ? n_heads : KVC_LANES};

    memset(c->mass, 0, n_heads * (size_t)c->n * sizeof(*c->mass));
    if (c->policy->source == KVC_SOURCE_PROBES) {
        kvc_ctx_parallel(cache->ctx, s.n_lanes, score_lane, &s);
        return;
    }
    for (size_t h = 0; h < n_heads; h++)
        sum_scores(c, layer * (int32_t)n_heads + (int32_t)h, c->mass + h * (size_t)c->n);
}

/* Adds the mean of the heads of a layer, scaled to a mean of 1 over the rows of the group. */
static void add_layer(const struct kvc_choice *c, float weight, bool normalize)
{
    const int32_t n_heads = c->cache->params.n_kv_heads;
    float sum = 0.0f;
    int32_t count = 0;

    for (int32_t i = 0; i < c->n; i++) {
        float score = 0.0f;
        for (int32_t h = 0; h < n_heads; h++)
            score += c->mass[(size_t)h * (size_t)c->n + (size_t)i];
        c->part[i] = score / (float)n_heads;
        if (kvc_marked(c->group, i)) {
            sum += c->part[i];
            count++;
        }
    }
    const float scale = !normalize ? 1.0f : sum > 0.0f ? (float)count / sum : 0.0f;
    for (int32_t i = 0; i < c->n; i++)
        c->scores[i] += c->part[i] * scale * weight;
}

static void model_scores(const struct kvc_choice *c)
{
    kvc_score_options options;
    const int32_t n_layers = c->cache->params.n_layers;
    kvc_score_options_default(&options);
    options.layers = c->policy->layers;
    options.last_layers = c->policy->last_layers;
    for (int32_t layer = 0; layer < n_layers; layer++) {
        float weight = 0.0f;
        kvc_layer_weight(&options, layer, n_layers, &weight);
        if (weight == 0.0f)
            continue;
        score_layer(c, layer);
        add_layer(c, weight, true);
    }
}

void kvc_rank(struct kvc_choice *c, int32_t group)
{
    const int32_t n_heads = c->cache->params.n_kv_heads;
    memset(c->scores, 0, (size_t)c->n * sizeof(*c->scores));
    if (c->policy->source == KVC_SOURCE_AGE) {
        for (int32_t i = 0; i < c->n; i++)
            c->scores[i] = (float)i;
    } else if (c->policy->source == KVC_SOURCE_CALLER) {
        for (int32_t i = 0; i < c->n; i++) {
            const size_t ordinal = (size_t)kvc_fact(c->cache, c->seq, i)->ordinal;
            c->scores[i] = ordinal < c->policy->n_scores ? c->policy->scores[ordinal] : 0.0f;
        }
    } else if (c->policy->scope == KVC_SCOPE_SHARED) {
        float *known = c->shared + (size_t)c->probes * (size_t)c->n;
        if (!(c->ranked >> c->probes & 1)) {
            model_scores(c);
            memcpy(known, c->scores, (size_t)c->n * sizeof(*known));
            c->ranked |= 1u << c->probes;
        }
        memcpy(c->scores, known, (size_t)c->n * sizeof(*known));
    } else if (c->policy->scope == KVC_SCOPE_LAYER) {
        score_layer(c, group);
        add_layer(c, 1.0f, false);
    } else { /* the heads of a layer follow each other: one pass serves them */
        if (group % n_heads == 0)
            score_layer(c, group / n_heads);
        memcpy(c->scores, c->mass + (size_t)(group % n_heads) * (size_t)c->n,
               (size_t)c->n * sizeof(*c->scores));
    }
}
