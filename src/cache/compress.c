/* compress.c - compression between a prefill and decoding, and between decode steps. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "choose.h"

/* What a compression reports, as it is collected. */
struct summary {
    size_t bytes_before;
    uint64_t sealed_before;
    int64_t n_pages_compacted;
};

static int64_t layer_bytes(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t layer)
{
    int64_t bytes = 0;
    for (int32_t slot = 0; slot < seq->n_slots; slot++)
        for (int32_t h = 0; h < cache->params.n_kv_heads; h++) {
            const int32_t page =
                kvc_slot(cache, seq, slot)->entries[kvc_pair(cache, layer, h)].page;
            bytes += page >= 0 ? kvc_page_layout_of(cache, page)->n_bytes : 0;
        }
    return bytes;
}

static int64_t layer_rows(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t layer)
{
    int64_t n = (int64_t)cache->params.n_kv_heads * __builtin_popcountll(seq->strip_live);
    for (int32_t slot = 0; slot < seq->n_slots; slot++)
        for (int32_t h = 0; h < cache->params.n_kv_heads; h++)
            n += __builtin_popcountll(
                kvc_slot(cache, seq, slot)->entries[kvc_pair(cache, layer, h)].live);
    return n;
}

static void report_before(const kvc_cache *cache, const struct kvc_sequence *seq,
                          const kvc_report *report)
{
    for (int32_t l = 0; report && report->layers && l < cache->params.n_layers; l++)
        report->layers[l] = (kvc_layer_report){
            .n_kept = layer_rows(cache, seq, l),
            .bytes_before = layer_bytes(cache, seq, l),
            .rel_err = NAN,
        };
}

/* Relative square error of a layer, from the sums over its heads. */
static double square_error(const kvc_cache *cache, const double *errors, int32_t layer)
{
    double change = 0.0, size = 0.0;
    for (int32_t h = 0; h < cache->params.n_kv_heads; h++) {
        const double *error = errors + 2 * (size_t)kvc_pair(cache, layer, h);
        change += error[0];
        size += error[1];
    }
    return size > 0.0 ? change / size : NAN;
}

/*
 * Estimated relative error of a layer for coming queries; NaN without query rows. Rows that scored
 * think too well of what they kept: pruning is worse, by as much as it was in two trials in which
 * half of the rows scored and the others looked.
 */
static double layer_error(const struct kvc_choice *c, int32_t layer)
{
    const double done = square_error(c->cache, c->errors, layer);
    const double bias = square_error(c->cache, c->unseen_errors, layer) -
                        square_error(c->cache, c->seen_errors, layer);
    return sqrt(done + (bias > 0.0 ? bias : 0.0)); /* NaN is not: nothing was tried */
}

static void report_after(const kvc_cache *cache, const struct kvc_sequence *seq,
                         const struct kvc_choice *c, const struct summary *summary,
                         kvc_report *report)
{
    if (!report)
        return;
    for (int32_t l = 0; report->layers && l < cache->params.n_layers; l++) {
        kvc_layer_report *layer = &report->layers[l];
        const int64_t before = layer->n_kept;
        layer->n_kept = layer_rows(cache, seq, l);
        layer->bytes_after = layer_bytes(cache, seq, l);
        for (int32_t h = 0; c && h < cache->params.n_kv_heads; h++)
            layer->n_merged += c->n_merged[kvc_pair(cache, l, h)];
        layer->n_pruned = before - layer->n_kept - layer->n_merged;
        layer->rel_err = c ? layer_error(c, l) : NAN;
    }
    kvc_report r = *report;
    r.n_pages_sealed = (int64_t)(cache->n_sealed_total - summary->sealed_before);
    r.n_pages_compacted = summary->n_pages_compacted;
    r.bytes_before = summary->bytes_before;
    r.bytes_after = kvc_used_bytes(cache);
    r.n_recoded = c ? (int64_t)c->n_recoded : 0;
    r.visual_rate = c && c->n_images > 0 ? c->visual_rate / (float)c->n_images : 0.0f;
    r.strength = c ? c->strength : 1.0f;
    r.n_forced_dropped = c ? c->n_forced_dropped : 0;
    kvc_struct_write(report, &r, sizeof(r));
}

/* The error of pruning alone for a part of the query rows. */
struct trial {
    struct kvc_choice c;
    enum kvc_probe_part part;
    double *errors;
    size_t n_lanes;
};

static void trial_lane(void *arg, size_t lane)
{
    const struct trial *t = arg;
    for (int32_t pair = (int32_t)lane; pair < t->c.cache->n_pairs; pair += (int32_t)t->n_lanes)
        kvc_probe_error(&t->c, pair, t->part, lane, t->errors + 2 * (size_t)pair);
}

static void add_error(const struct kvc_choice *c, enum kvc_probe_part part, double *errors)
{
    const size_t n = (size_t)c->cache->n_pairs;
    struct trial t = {.c = *c,
                      .part = part,
                      .errors = errors,
                      .n_lanes = n < KVC_BUILD_LANES ? n : KVC_BUILD_LANES};
    t.c.end = c->seq->first_unsealed; /* nothing is built */
    kvc_ctx_parallel(c->cache->ctx, t.n_lanes, trial_lane, &t);
}

/* Decides with one half of the query rows at a time, and lets the other half look at it. */
static void cross_check(struct kvc_choice *c)
{
    kvc_map *map = c->map;
    c->map = NULL;
    c->probes = KVC_PROBES_OLDER;
    kvc_choose(c);
    add_error(c, KVC_PROBES_NEWER, c->unseen_errors);
    c->probes = KVC_PROBES_NEWER;
    kvc_choose(c);
    add_error(c, KVC_PROBES_OLDER, c->unseen_errors);
    c->probes = KVC_PROBES_ALL;
    c->map = map;
}

/* Whether anything but sealing will be done to rows by their scores. */
static bool prunes(const struct kvc_choice *c)
{
    return c->policy->visual_rate > 0.0f || c->policy->row_rate > 0.0f || c->policy->max_rows > 0;
}

/* Decides, builds the new pages and measures what changes; KVC_E_FULL leaves nothing behind. */
static kvc_status attempt(struct kvc_choice *c)
{
    const kvc_policy *policy = c->policy;
    const int32_t rounds = (int32_t)ceilf((float)policy->merge_rounds * c->strength);
    const size_t error_bytes = 2 * (size_t)c->cache->n_pairs * sizeof(double);
    const bool check = c->estimate && policy->source == KVC_SOURCE_PROBES && prunes(c);

    c->n_columns = 0;
    c->n_recoded = 0;
    memset(c->built, 0, (size_t)c->cache->n_pairs * c->words * sizeof(*c->built));
    memset(c->errors, 0, error_bytes);
    memset(c->seen_errors, 0, error_bytes);
    memset(c->unseen_errors, 0, error_bytes);
    if (check)
        cross_check(c);
    kvc_choose(c);
    KVC_CHECK(kvc_build_fits(c), KVC_E_FULL);
    if (kvc_transform_due(c->cache, c->seq, true))
        kvc_transform_freeze(c->cache, c->seq);
    if (check)
        add_error(c, KVC_PROBES_ALL, c->seen_errors);
    for (int32_t g = 0; g < kvc_n_groups(c); g++) {
        kvc_fuse(c, g, rounds);
        kvc_build(c, g);
    }
    return KVC_OK;
}

static bool too_wrong(const struct kvc_choice *c)
{
    for (int32_t l = 0; l < c->cache->params.n_layers && c->policy->max_rel_err > 0.0f; l++)
        if (layer_error(c, l) > (double)c->policy->max_rel_err)
            return true;
    return false;
}

/* Tries the policy in full, then with less of its rates until no layer changes too much. Without
 * any pruning and merging, what quantization changes is accepted. */
static kvc_status carry_out(struct kvc_choice *c)
{
    static const float strengths[] = {1.0f, 0.75f, 0.5f, 0.25f, 0.125f, 0.0f};
    for (size_t i = 0; i < sizeof(strengths) / sizeof(*strengths); i++) {
        c->strength = strengths[i];
        if (c->map)
            kvc_map_begin(c->map, c);
        KVC_TRY(attempt(c));
        if (c->strength == 0.0f || !too_wrong(c))
            break;
        kvc_build_undo(c);
    }
    kvc_drop_rows(c);
    kvc_build_commit(c);
    kvc_forget_tokens(c);
    c->seq->gate = c->gate;
    if (c->map)
        kvc_map_end(c->map, c->cache);
    return KVC_OK;
}

kvc_status kvc_cache_compress(kvc_cache *cache, kvc_seq seq, const kvc_policy *policy,
                              kvc_report *report, kvc_map *map)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    kvc_policy checked;
    struct kvc_choice c;

    KVC_CHECK(s && kvc_seq_complete(cache, s), KVC_E_ARG);
    KVC_CHECK(!report || report->struct_size >= sizeof(*report), KVC_E_ARG);
    KVC_CHECK(!report || !report->layers || report->n_layers >= cache->params.n_layers, KVC_E_ARG);
    KVC_CHECK(!map || (policy && kvc_map_holds(map, cache, s)), KVC_E_ARG);
    if (policy)
        KVC_TRY(kvc_policy_check(cache, policy, false, &checked));

    struct summary summary = {.bytes_before = kvc_used_bytes(cache),
                              .sealed_before = cache->n_sealed_total};
    const int64_t hold_from = s->hold_from;
    kvc_status status;
    report_before(cache, s, report);
    s->hold_from = -1;
    if (policy) {
        kvc_choice_start(&c, cache, s, &checked, map);
        c.end = kvc_seal_end(cache, s, true);
        c.estimate = cache->params.probe_rows > 0 &&
                     ((report && report->layers) || checked.max_rel_err > 0.0f);
        status = carry_out(&c);
    } else {
        status = kvc_seal_slots(cache, s, kvc_seal_end(cache, s, true), true);
    }
    if (status != KVC_OK) {
        s->hold_from = hold_from;
        return status;
    }
    summary.n_pages_compacted = kvc_compact(cache, s);
    report_after(cache, s, policy ? &c : NULL, &summary, report);
    return KVC_OK;
}
