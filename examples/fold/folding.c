/* Folding scales into the attentions of a model's file, and taking them out again. */
#include "folding.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

/* ---- one attention ---- */

static struct head_scales scales_of(const struct checkpoint *c, size_t layer)
{
    return (struct head_scales){.values = c->record.scales + layer * checkpoint_width(c),
                                .n_kv_heads = c->n_kv_heads,
                                .head_dim = c->head_dim};
}

static bool fold_attention(kvc_ctx *ctx, const struct checkpoint *c, size_t layer, bool undo,
                           struct rounding *rounding, struct failure *failure)
{
    const struct attention *a = &c->attentions[layer];
    const struct head_scales scales = scales_of(c, layer);
    const struct fold_way q = {KVC_FOLD_Q, undo}, k = {KVC_FOLD_K, undo};

    if (c->type == KVC_SMOOTH_ROPE_NORM)
        return weight_fold_gain(&a->q_norm, c->gain_offset, q, &scales, rounding, failure) &&
               weight_fold_gain(&a->k_norm, c->gain_offset, k, &scales, rounding, failure);
    return weight_fold(ctx, &a->q, q, &scales, rounding, failure) &&
           weight_fold(ctx, &a->q_bias, q, &scales, rounding, failure) &&
           weight_fold(ctx, &a->k, k, &scales, rounding, failure) &&
           weight_fold(ctx, &a->k_bias, k, &scales, rounding, failure);
}

/* The weights that a fold changes. */
static size_t folded_weights(const struct checkpoint *c, struct attention *a, struct weight *out[4])
{
    if (c->type == KVC_SMOOTH_ROPE_NORM) {
        out[0] = &a->q_norm;
        out[1] = &a->k_norm;
        return 2;
    }
    out[0] = &a->q;
    out[1] = &a->q_bias;
    out[2] = &a->k;
    out[3] = &a->k_bias;
    return 4;
}

static void free_copy(const struct checkpoint *c, struct attention *copy)
{
    struct weight *weights[4];
    const size_t n = folded_weights(c, copy, weights);

    for (size_t i = 0; i < n; i++)
        free(weights[i]->data);
}

/* Owns the weights that a fold changes; the others are the checkpoint's. */
static bool copy_attention(const struct checkpoint *c, size_t layer, struct attention *copy,
                           struct failure *failure)
{
    struct weight *weights[4];
    bool ok = true;

    *copy = c->attentions[layer];
    const size_t n = folded_weights(c, copy, weights);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *from = weights[i]->data;
        if (!from)
            continue;
        const size_t size = weight_n_bytes(weights[i]);
        weights[i]->data = malloc(size);
        if (weights[i]->data)
            memcpy(weights[i]->data, from, size);
        ok = ok && weights[i]->data;
    }
    if (ok)
        return true;
    free_copy(c, copy);
    return fail_with(failure, "out of memory");
}

static void note_scales(const struct checkpoint *c, size_t layer, struct folded_layer *result)
{
    const struct head_scales scales = scales_of(c, layer);

    result->is_folded = true;
    result->min_scale = result->max_scale = scales.values[0];
    for (size_t i = 1; i < checkpoint_width(c); i++) {
        result->min_scale = fminf(result->min_scale, scales.values[i]);
        result->max_scale = fmaxf(result->max_scale, scales.values[i]);
    }
}

double folding_change_limit(const struct rounding *rounding)
{
    return fmax(FOLDING_MAX_CHANGE, 4.0 * rounding->max_error);
}

bool folding_check_limits(const struct folding_limits *limits, const char *name,
                          const struct folded_layer *result, struct failure *failure)
{
    const struct rounding *r = &result->rounding;
    const double max_change =
        limits->max_change >= 0.0 ? limits->max_change : folding_change_limit(r);

    if (!isfinite(r->max_error))
        return fail_with(failure, "%s: numbers are lost: infinite, or none", name);
    if (!limits->allow_rounding && limits->is_exact && r->n_inexact > 0)
        return fail_with(failure,
                         "%s: %llu numbers are rounded, where powers of two promise that none is: "
                         "%s",
                         name, (unsigned long long)r->n_inexact, limits->advice);
    if (!limits->allow_rounding && (r->n_overflow > 0 || r->max_error > FOLDING_MAX_ERROR))
        return fail_with(failure,
                         "%s: numbers are rounded by up to %.3g (%llu of them overflow), more than "
                         "%g: %s",
                         name, r->max_error, (unsigned long long)r->n_overflow, FOLDING_MAX_ERROR,
                         limits->advice);
    if (!(result->change <= max_change))
        return fail_with(failure, "%s: scores change by %.3g, more than %.3g", name, result->change,
                         max_change);
    return true;
}

/* Folds, or undoes it, and looks what became of numbers and scores. */
static bool fold_layer(kvc_ctx *ctx, struct checkpoint *c, size_t layer, bool undo,
                       const struct folding_limits *limits, struct folded_layer *result,
                       struct failure *failure)
{
    struct attention before;

    if (!copy_attention(c, layer, &before, failure))
        return false;
    note_scales(c, layer, result);
    const bool ok =
        fold_attention(ctx, c, layer, undo, &result->rounding, failure) &&
        probe_change(ctx, c, &before, &c->attentions[layer], &result->change, failure) &&
        folding_check_limits(limits, before.name, result, failure);
    free_copy(c, &before);
    return ok;
}

/* ---- which attentions ---- */

static bool has_weight(void *user, const char *module)
{
    const struct checkpoint *c = user;

    for (size_t layer = 0; layer < c->n_layers; layer++) {
        const struct attention *a = &c->attentions[layer];
        const size_t n = strlen(a->name);
        if (strncmp(a->name, module, n) != 0 || module[n] != '.')
            continue;
        const struct {
            const char *name;
            const struct weight *weight;
        } parts[] = {
            {"q_proj", &a->q}, {"k_proj", &a->k}, {"q_norm", &a->q_norm}, {"k_norm", &a->k_norm}};
        for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++)
            if (strcmp(parts[i].name, module + n + 1) == 0)
                return parts[i].weight->data != NULL;
    }
    return false;
}

static bool say_messages(kvc_status status, const kvc_smooth_message *messages, size_t n,
                         struct failure *failure)
{
    const kvc_smooth_message *error = NULL;

    for (size_t i = 0; i < n; i++) {
        if (!messages[i].is_error)
            fprintf(stderr, "warning: %s\n", messages[i].text);
        else if (!error)
            error = &messages[i];
    }
    if (status == KVC_OK)
        return true;
    return fail_with(failure, "%s", error ? error->text : kvc_status_str(status));
}

static bool select_with(const struct checkpoint *c, const struct folding_settings *s,
                        const kvc_observation *observation, kvc_smooth_unit *units, bool *selected,
                        struct failure *failure)
{
    enum { MAX_MESSAGES = 64 };
    const bool is_norm = c->type == KVC_SMOOTH_ROPE_NORM;
    const kvc_smooth_adapter adapter = {.struct_size = sizeof(adapter),
                                        .units = units,
                                        .n_units = c->n_layers,
                                        .head_dim = (int32_t)c->head_dim,
                                        .n_kv_heads = (int32_t)c->n_kv_heads,
                                        .n_kv_groups = (int32_t)(c->n_heads / c->n_kv_heads),
                                        .has_weight = has_weight,
                                        .user = (void *)c};
    kvc_smooth_message messages[MAX_MESSAGES];
    kvc_smooth_options options;
    size_t n = 0;

    kvc_smooth_options_default(&options);
    options.factor = s->factor;
    for (size_t i = 0; i < c->n_layers; i++)
        units[i] = (kvc_smooth_unit){.attention_name = c->attentions[i].name,
                                     .layer = (int32_t)i,
                                     .q_name = is_norm ? "q_norm" : "q_proj",
                                     .k_name = is_norm ? "k_norm" : "k_proj",
                                     .type = c->type};
    const kvc_status status = kvc_smooth_select(&adapter, &s->filter, observation, &options,
                                                selected, messages, MAX_MESSAGES, &n);
    return say_messages(status, messages, n < MAX_MESSAGES ? n : MAX_MESSAGES, failure);
}

static bool select_layers(const struct checkpoint *c, const struct folding_settings *s,
                          const kvc_observation *observation, bool *selected,
                          struct failure *failure)
{
    kvc_observed_shape shape = {.struct_size = sizeof(shape)};
    kvc_smooth_unit *units = calloc(c->n_layers, sizeof(*units));

    if (!units)
        return fail_with(failure, "out of memory");
    bool ok = kvc_observation_shape(observation, &shape) == KVC_OK;
    if (!ok || (size_t)shape.n_layers != c->n_layers)
        ok = fail_with(failure, "the observation is of %d layers, the model has %zu",
                       (int)shape.n_layers, c->n_layers);
    ok = ok && select_with(c, s, observation, units, selected, failure);
    free(units);
    return ok;
}

/* ---- scales ---- */

/* From the order of GGUF files, where pairs are neighbours, to that where they are half-split. */
static void part_pairs(float *scales, size_t n_heads, size_t head_dim)
{
    float head[KVC_MAX_HEAD_DIM];

    for (size_t h = 0; h < n_heads; h++, scales += head_dim) {
        memcpy(head, scales, head_dim * sizeof(*head));
        for (size_t i = 0; i < head_dim / 2; i++) {
            scales[i] = head[2 * i];
            scales[head_dim / 2 + i] = head[2 * i + 1];
        }
    }
}

/* GGUF files of these have their channels in another order than safetensors files. */
static bool is_reordered(const struct checkpoint *c, const struct folding_settings *s)
{
    return !c->is_gguf && !s->file_order &&
           (strcmp(c->architecture, "llama") == 0 || strcmp(c->architecture, "mistral") == 0);
}

static bool compute_scales(const struct checkpoint *c, const struct folding_settings *s,
                           const kvc_observation *observation, size_t layer,
                           struct failure *failure)
{
    float *scales = c->record.scales + layer * checkpoint_width(c);
    const bool reordered = is_reordered(c, s);
    kvc_smooth_options options;

    kvc_smooth_options_default(&options);
    options.rule = s->rule;
    options.norm = KVC_SMOOTH_MIDRANGE;
    options.factor = s->factor;
    options.power_of_two = s->power_of_two;
    options.shared = c->type == KVC_SMOOTH_ROPE_NORM;
    options.layout = reordered ? KVC_ROPE_INTERLEAVED : c->rope.layout;
    options.n_rot = c->rope.n_dims;
    if (reordered && (size_t)c->rope.n_dims != c->head_dim)
        return fail_with(failure, "an observation of a GGUF file cannot be used where a part of a "
                                  "head is rotated");
    const kvc_status status = kvc_smooth_scales(observation, (int32_t)layer, &options, scales);
    if (status != KVC_OK)
        return fail_with(failure, "%s has no scales: %s", c->attentions[layer].name,
                         kvc_status_str(status));
    if (reordered)
        part_pairs(scales, c->n_kv_heads, c->head_dim);
    return true;
}

/* ---- all layers ---- */

bool folding_run(kvc_ctx *ctx, const struct folding_settings *s, const kvc_observation *observation,
                 struct checkpoint *c, struct folded_layer *results, struct failure *failure)
{
    if (c->record.is_there)
        return fail_with(failure,
                         "the model is folded already (" RECORD_PREFIX "version): unfold it first");
    const struct folding_limits limits = {.allow_rounding = s->allow_rounding,
                                          .is_exact = s->power_of_two,
                                          .max_change = -1.0,
                                          .advice = "--allow-rounding, or exclude it"};
    bool ok = select_layers(c, s, observation, c->record.folded, failure);
    for (size_t layer = 0; layer < c->n_layers && ok; layer++) {
        results[layer] = (struct folded_layer){0};
        if (!c->record.folded[layer])
            continue;
        fprintf(stderr, "folding layer %zu of %zu\n", layer + 1, c->n_layers);
        ok = compute_scales(c, s, observation, layer, failure) &&
             fold_layer(ctx, c, layer, false, &limits, &results[layer], failure);
    }
    if (ok && !folding_total(results, c->n_layers).is_folded)
        return fail_with(failure, "no attention is selected");
    c->record.is_there = ok;
    c->record.version = RECORD_VERSION;
    c->record.factor = s->factor;
    return ok;
}

/* Whether the tensors are there that scales go into. */
static bool has_place(const struct checkpoint *c, size_t layer)
{
    const struct attention *a = &c->attentions[layer];

    if (c->type == KVC_SMOOTH_ROPE_NORM)
        return a->q_norm.data && a->k_norm.data;
    return a->q.data && a->k.data;
}

static bool check_record(const struct checkpoint *c, struct failure *failure)
{
    if (!c->record.is_there)
        return fail_with(failure, "the model is not folded");
    if (c->record.version != RECORD_VERSION)
        return fail_with(failure, "the model was folded by another version of this program");
    for (size_t layer = 0; layer < c->n_layers; layer++)
        if (c->record.folded[layer] && !has_place(c, layer))
            return fail_with(failure, "%s was folded but has no weights",
                             c->attentions[layer].name);
    return true;
}

bool folding_layer_is_power_of_two(const struct checkpoint *c, size_t layer)
{
    const struct head_scales scales = scales_of(c, layer);
    int exponent;

    for (size_t i = 0; i < checkpoint_width(c); i++)
        if (frexpf(scales.values[i], &exponent) != 0.5f)
            return false;
    return true;
}

bool folding_is_power_of_two(const struct checkpoint *c)
{
    for (size_t layer = 0; layer < c->n_layers; layer++)
        if (c->record.folded[layer] && !folding_layer_is_power_of_two(c, layer))
            return false;
    return true;
}

bool folding_undo(kvc_ctx *ctx, bool allow_rounding, struct checkpoint *c,
                  struct folded_layer *results, struct failure *failure)
{
    struct folding_limits limits = {.allow_rounding = allow_rounding,
                                    .max_change = -1.0,
                                    .advice = "--allow-rounding, if the fold was made with it"};
    bool ok = check_record(c, failure);

    for (size_t layer = 0; layer < c->n_layers && ok; layer++) {
        results[layer] = (struct folded_layer){0};
        if (!c->record.folded[layer])
            continue;
        limits.is_exact = folding_layer_is_power_of_two(c, layer);
        ok = fold_layer(ctx, c, layer, true, &limits, &results[layer], failure);
    }
    c->record.is_there = false;
    return ok;
}

struct folded_layer folding_total(const struct folded_layer *results, size_t n_layers)
{
    struct folded_layer total = {0};

    for (size_t i = 0; i < n_layers; i++) {
        const struct folded_layer *r = &results[i];
        if (!r->is_folded)
            continue;
        total.min_scale = total.is_folded ? fminf(total.min_scale, r->min_scale) : r->min_scale;
        total.max_scale = fmaxf(total.max_scale, r->max_scale);
        total.is_folded = true;
        total.rounding.n_inexact += r->rounding.n_inexact;
        total.rounding.n_overflow += r->rounding.n_overflow;
        total.rounding.n_underflow += r->rounding.n_underflow;
        total.rounding.max_error = fmax(total.rounding.max_error, r->rounding.max_error);
        total.change = isnan(r->change) ? NAN : fmax(total.change, r->change);
    }
    return total;
}

/* ---- two files ---- */

static bool same_weight(const struct weight *a, const struct weight *b)
{
    return !a->data == !b->data && a->type == b->type && a->n_rows == b->n_rows &&
           a->n_cols == b->n_cols;
}

/* Whether data is that of a weight that was folded. */
static bool is_folded_data(const struct checkpoint *folded, const uint8_t *data)
{
    struct weight *weights[4];

    for (size_t layer = 0; layer < folded->n_layers; layer++) {
        const size_t n = folded_weights(folded, &folded->attentions[layer], weights);
        for (size_t i = 0; i < n && folded->record.folded[layer]; i++)
            if (weights[i]->data == data)
                return true;
    }
    return false;
}

/* Of files with the same head: all tensors are equal that no fold changed. */
static bool check_rest(const struct checkpoint *original, const struct checkpoint *folded,
                       struct failure *failure)
{
    struct gguf_text name;
    const uint8_t *was, *is;
    size_t n_was, n_is;

    for (size_t i = 0; checkpoint_tensor(original, i, &name, &was, &n_was) &&
                       checkpoint_tensor(folded, i, &name, &is, &n_is);
         i++)
        if (!is_folded_data(folded, is) && (n_was != n_is || memcmp(was, is, n_is) != 0))
            return fail_with(failure, "tensor %.*s differs, and no fold changes it",
                             (int)(name.size < 100 ? name.size : 100), name.data);
    return true;
}

static bool compare_attention(kvc_ctx *ctx, const struct checkpoint *original,
                              const struct checkpoint *folded, size_t layer,
                              struct folded_layer *result, struct failure *failure)
{
    struct weight *before[4], *after[4];
    const struct head_scales scales = scales_of(folded, layer);
    const bool is_norm = folded->type == KVC_SMOOTH_ROPE_NORM;
    const size_t n = folded_weights(original, &original->attentions[layer], before);

    folded_weights(folded, &folded->attentions[layer], after);
    note_scales(folded, layer, result);
    for (size_t i = 0; i < n; i++) {
        const bool is_q = is_norm ? i == 0 : i < 2;
        const struct fold_way way = {is_q ? KVC_FOLD_Q : KVC_FOLD_K, false};
        if (!same_weight(before[i], after[i]))
            return fail_with(failure, "%s is of another shape or type",
                             folded->attentions[layer].name);
        if (!weight_compare(before[i], after[i], folded->gain_offset, way, &scales,
                            &result->rounding, failure))
            return false;
    }
    return probe_change(ctx, original, &original->attentions[layer], &folded->attentions[layer],
                        &result->change, failure);
}

bool folding_compare(kvc_ctx *ctx, const struct checkpoint *original,
                     const struct checkpoint *folded, struct folded_layer *results,
                     struct failure *failure)
{
    if (original->record.is_there)
        return fail_with(failure, "the original is folded itself");
    if (!check_record(folded, failure))
        return false;
    if (original->is_gguf != folded->is_gguf ||
        strcmp(original->architecture, folded->architecture) != 0 ||
        original->n_layers != folded->n_layers || original->n_heads != folded->n_heads ||
        original->n_kv_heads != folded->n_kv_heads || original->head_dim != folded->head_dim)
        return fail_with(failure, "the files are of different models");
    if (!checkpoint_same_head(original, folded, failure) || !check_rest(original, folded, failure))
        return false;
    for (size_t layer = 0; layer < folded->n_layers; layer++) {
        results[layer] = (struct folded_layer){0};
        if (folded->record.folded[layer] &&
            !compare_attention(ctx, original, folded, layer, &results[layer], failure))
            return false;
    }
    return true;
}
