/* Policies: defaults, presets, what is refused, and what reports and maps tell. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/policy_drive.h"
#include "support/tables.h"

static struct pd d;

static void the_default_policy_is_as_documented(void **state)
{
    kvc_policy p;
    kvc_merge_options merging;
    kvc_gate_params gating;

    (void)state;
    kvc_policy_default(NULL);
    memset(&p, 0xA5, sizeof(p));
    kvc_policy_default(&p);
    assert_int_equal(p.struct_size, sizeof(p));
    assert_int_equal(p.source, KVC_SOURCE_PROBES);
    assert_int_equal(p.scope, KVC_SCOPE_SHARED);
    assert_null(p.scores);
    assert_int_equal(p.n_scores, 0);
    assert_int_equal(p.layers, KVC_LAYERS_ALL);
    assert_int_equal(p.last_layers, 4);
    assert_true(p.visual_rate == 0.0f);
    assert_false(p.gate);
    assert_int_equal(p.keep_min, 64);
    assert_true(p.centre == 0.0f);
    assert_true(p.temperature == 0.7f);
    assert_int_equal(p.coverage, 0);
    assert_true(p.sink_factor == 10.0f);
    assert_int_equal(p.merge_rounds, 0);
    assert_false(p.recode);
    assert_true(p.row_rate == 0.0f);
    assert_int_equal(p.max_rows, 0);
    assert_int_equal(p.budget.mode, KVC_BUDGET_UNIFORM);
    assert_int_equal(p.block, 1);
    assert_int_equal(p.block_score, KVC_BLOCK_MEAN);
    assert_int_equal(p.last_tokens, 64);
    assert_true(p.keep_sentences);
    assert_false(p.set_precision);
    assert_int_equal(p.precision.k, KVC_INT8);
    assert_int_equal(p.precision.v, KVC_INT8);
    assert_int_equal(p.precision.k_scale, KVC_SCALE_TOKEN);
    assert_int_equal(p.precision.v_scale, KVC_SCALE_TOKEN);
    assert_true(p.heavy_share == 0.0f);
    assert_true(p.max_rel_err == 0.0f);
    kvc_merge_options_default(&merging);
    kvc_gate_params_default(&gating);
    assert_int_equal(p.merging.struct_size, sizeof(merging));
    assert_true(p.merging.tau == merging.tau && p.merging.max_share == merging.max_share &&
                p.merging.max_norm_ratio == merging.max_norm_ratio);
    assert_int_equal(p.gating.struct_size, sizeof(gating));
    assert_true(p.gating.max_rate == gating.max_rate && p.gating.min_rate == gating.min_rate &&
                p.gating.guard_low == gating.guard_low);
}

static void check_preset(const char *name, float rate, kvc_format format, float heavy, int rounds)
{
    kvc_policy p;

    assert_int_equal(kvc_policy_preset(name, &p), KVC_OK);
    assert_int_equal(p.struct_size, sizeof(p));
    assert_true(p.visual_rate == rate);
    assert_true(p.set_precision);
    assert_int_equal(p.precision.k, format);
    assert_int_equal(p.precision.v, format);
    assert_true(p.heavy_share == heavy);
    assert_int_equal(p.merge_rounds, rounds);
    assert_int_equal(p.scope, KVC_SCOPE_SHARED);
    assert_true(p.merging.tau == 0.85f);
    assert_int_equal(p.keep_min, 64);
    assert_int_equal(p.max_rows, 0);
}

static void presets_are_as_documented(void **state)
{
    kvc_policy p;

    (void)state;
    check_preset("light", 0.15f, KVC_F16, 0, 0);
    check_preset("balanced", 0.30f, KVC_INT8, 0, 1);
    check_preset("aggressive", 0.50f, KVC_INT4, 0.2f, 2);
    check_preset("extreme", 0.65f, KVC_INT4, 0.2f, 3);
    assert_int_equal(kvc_policy_preset(NULL, &p), KVC_E_ARG);
    assert_int_equal(kvc_policy_preset("light", NULL), KVC_E_ARG);
    assert_int_equal(kvc_policy_preset("Light", &p), KVC_E_ARG);
    assert_int_equal(kvc_policy_preset("", &p), KVC_E_ARG);
    assert_int_equal(kvc_policy_preset("lights", &p), KVC_E_ARG);
    assert_int_equal(kvc_policy_preset_init("light", &p, sizeof(size_t)), KVC_E_ARG);
}

static void structs_of_other_versions_are_told_apart(void **state)
{
    struct {
        kvc_policy known;
        uint64_t added;
    } p;
    kvc_report report = {.struct_size = sizeof(report)};

    pd_open(&d, best(state), pd_params(), 1 << 20);
    pd_feed_text(&d, 10);
    memset(&p, 0xA5, sizeof(p));
    kvc_policy_init(&p.known, sizeof(p.known));
    assert_true(p.added == UINT64_C(0xA5A5A5A5A5A5A5A5));
    kvc_policy_init(&p.known, sizeof(p));
    assert_int_equal(p.added, 0);
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p.known, NULL, NULL), KVC_OK);
    p.added = 1;
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p.known, NULL, NULL), KVC_E_UNSUPPORTED);
    p.known.struct_size = 8;
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p.known, NULL, NULL), KVC_E_ARG);
    report.struct_size = 8;
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, NULL, &report, NULL), KVC_E_ARG);
    pd_close(&d);
}

/* A prompt of both kinds that has attended: 10 of text, 8 x 8 patches, 30 of text. */
static void feed_prompt(void)
{
    assert_int_equal(kvc_seq_hold(d.cache, d.seq), KVC_OK);
    pd_feed_text(&d, 10);
    pd_feed_image(&d, 0, 8, 8);
    pd_feed_text(&d, 30);
    pd_look(&d, 8);
}

struct wrong {
    const char *name;
    size_t offset;
    char type;
    double value;
};

#define F(field, value)                                                                            \
    {                                                                                              \
#field, offsetof(kvc_policy, field), 'f', value                                            \
    }
#define I(field, value)                                                                            \
    {                                                                                              \
#field, offsetof(kvc_policy, field), 'i', value                                            \
    }

static void fields_out_of_range_are_refused_and_change_nothing(void **state)
{
    static const struct wrong wrong[] = {
        I(source, -1),
        I(source, 4),
        I(scope, -1),
        I(scope, 3),
        I(layers, -1),
        I(layers, 4),
        F(visual_rate, -0.01),
        F(visual_rate, 1.01),
        F(visual_rate, NAN),
        F(visual_rate, INFINITY),
        I(keep_min, -1),
        F(centre, -0.1),
        F(centre, NAN),
        F(centre, INFINITY),
        F(temperature, 0),
        F(temperature, -1),
        F(temperature, NAN),
        F(temperature, INFINITY),
        I(coverage, -1),
        F(sink_factor, -1),
        F(sink_factor, NAN),
        F(sink_factor, INFINITY),
        I(merge_rounds, -1),
        I(merge_rounds, 4),
        F(merging.tau, 1.5),
        F(merging.tau, NAN),
        F(merging.max_share, 2),
        F(merging.max_norm_ratio, 0.5),
        I(merging.window, -1),
        I(merging.weights, 2),
        F(row_rate, -0.01),
        F(row_rate, 1.01),
        F(row_rate, NAN),
        I(max_rows, -1),
        I(budget.mode, 5),
        F(budget.uniform_share, 2),
        F(budget.pyramid, 0),
        F(budget.pyramid, NAN),
        I(block, 0),
        I(block, 65),
        I(block, -1),
        I(block_score, 2),
        I(block_score, -1),
        I(last_tokens, -1),
        I(precision.k, 4),
        I(precision.v, -1),
        I(precision.k_scale, 4),
        F(heavy_share, -0.01),
        F(heavy_share, 1.01),
        F(heavy_share, NAN),
        F(max_rel_err, -1),
        F(max_rel_err, NAN),
        F(max_rel_err, INFINITY),
        F(gating.min_rate, -1),
        F(gating.max_rate, 2),
        F(gating.high, 2),
        I(gating.guard_low, -1),
        F(gating.dense_factor, 2),
    };
    kvc_cache_params params = pd_params();

    params.max_merge_tokens = 64;
    pd_open(&d, best(state), params, 1 << 20);
    feed_prompt();
    const struct pd_state before = pd_save(&d);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        kvc_policy p = pd_policy();
        kvc_status status;

        p.visual_rate = 0.5f;
        p.gate = true;
        p.merge_rounds = 1;
        p.set_precision = true;
        p.scope = KVC_SCOPE_LAYER;
        p.max_rows = 50;
        p.budget.mode = strstr(wrong[i].name, "pyramid") ? KVC_BUDGET_PYRAMID : KVC_BUDGET_HYBRID;
        if (wrong[i].type == 'f')
            *(float *)(void *)((char *)&p + wrong[i].offset) = (float)wrong[i].value;
        else
            *(int32_t *)(void *)((char *)&p + wrong[i].offset) = (int32_t)wrong[i].value;
        status = kvc_cache_compress(d.cache, d.seq, &p, NULL, NULL);
        if (status != KVC_E_ARG)
            fail_msg("%s = %g: status %d", wrong[i].name, wrong[i].value, (int)status);
        pd_assert_same(&d, &before);
    }
    pd_close(&d);
}

static void expect_at(kvc_status want, const kvc_policy *p, kvc_report *report, kvc_map *map,
                      int line)
{
    const struct pd_state before = pd_save(&d);
    const kvc_status status = kvc_cache_compress(d.cache, d.seq, p, report, map);

    if (status != want)
        fail_msg("line %d: status %d, not %d", line, (int)status, (int)want);
    pd_assert_same(&d, &before);
}

#define expect(want, p, report, map) expect_at(want, p, report, map, __LINE__)

static void what_a_policy_needs_is_asked_for_before_anything_changes(void **state)
{
    static const float scores[] = {1, 2, -1, NAN, INFINITY};
    kvc_cache_params params = pd_params();
    kvc_report report = {.struct_size = sizeof(report)};
    kvc_layer_report layers[2];
    kvc_policy p = pd_policy();

    pd_open(&d, best(state), params, 1 << 20);
    feed_prompt();
    p.visual_rate = 0.5f;
    p.source = KVC_SOURCE_SUMS; /* without score_mode */
    expect(KVC_E_ARG, &p, NULL, NULL);
    p.source = KVC_SOURCE_CALLER;
    p.n_scores = 1;
    expect(KVC_E_ARG, &p, NULL, NULL);
    p.scores = scores;
    for (p.n_scores = 3; p.n_scores <= 5; p.n_scores++) {
        expect(KVC_E_ARG, &p, NULL, NULL);
        p.scores++;
    }
    p = pd_policy();
    p.layers = KVC_LAYERS_LAST;
    p.last_layers = 0;
    p.visual_rate = 0.5f;
    expect(KVC_E_ARG, &p, NULL, NULL);
    p = pd_policy();
    p.merge_rounds = 1; /* without max_merge_tokens */
    expect(KVC_E_UNSUPPORTED, &p, NULL, NULL);
    p = pd_policy();
    p.scope = KVC_SCOPE_LAYER;
    p.max_rows = 40;
    p.budget.mode = KVC_BUDGET_MASS;
    expect(KVC_E_UNSUPPORTED, &p, NULL, NULL);
    p = pd_policy();
    p.set_precision = true;
    p.precision.k_scale = KVC_SCALE_LAYER;
    expect(KVC_E_UNSUPPORTED, &p, NULL, NULL);
    p.precision.k_scale = KVC_SCALE_TOKEN;
    p.precision.v_scale = KVC_SCALE_CHANNEL;
    expect(KVC_E_UNSUPPORTED, &p, NULL, NULL);
    p = pd_policy();
    p.visual_rate = 0.5f;
    report.layers = layers;
    report.n_layers = 1;
    expect(KVC_E_ARG, &p, &report, NULL);
    assert_int_equal(kvc_cache_compress(NULL, d.seq, &p, NULL, NULL), KVC_E_ARG);
    assert_int_equal(kvc_cache_compress(d.cache, 0, &p, NULL, NULL), KVC_E_ARG);
    assert_int_equal(kvc_tokens_add(d.cache, d.seq, NULL, 1), KVC_OK); /* no rows yet */
    expect(KVC_E_ARG, &p, NULL, NULL);
    pd_close(&d);

    params.probe_rows = 0;
    pd_open(&d, best(state), params, 1 << 20);
    feed_prompt();
    p = pd_policy();
    p.visual_rate = 0.5f;
    expect(KVC_E_ARG, &p, NULL, NULL);
    p.source = KVC_SOURCE_AGE;
    p.max_rel_err = 0.1f;
    expect(KVC_E_ARG, &p, NULL, NULL);
    p.max_rel_err = 0;
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, NULL, NULL), KVC_OK);
    pd_close(&d);
}

static void maps_are_checked(void **state)
{
    kvc_cache_params params = pd_params();
    kvc_policy p = pd_policy();
    kvc_token_fate fates[104];
    kvc_map *map, *other;
    struct pd small;
    size_t n;

    p.visual_rate = 0.5f;
    pd_open(&d, best(state), params, 1 << 20);
    feed_prompt();
    assert_int_equal(kvc_map_create(NULL, 10, &map), KVC_E_ARG);
    assert_int_equal(kvc_map_create(d.cache, 10, NULL), KVC_E_ARG);
    map = (kvc_map *)(void *)&params;
    assert_int_equal(kvc_map_create(d.cache, 0, &map), KVC_E_ARG);
    assert_null(map);
    assert_int_equal(kvc_map_create(d.cache, -1, &map), KVC_E_ARG);
    kvc_map_destroy(NULL);
    assert_int_equal(kvc_map_create(d.cache, 103, &map), KVC_OK); /* one too small */
    expect(KVC_E_ARG, &p, NULL, map);
    kvc_map_destroy(map);
    assert_int_equal(kvc_map_create(d.cache, 104, &map), KVC_OK);
    expect(KVC_E_ARG, NULL, NULL, map); /* a map needs a policy */
    params.n_layers = 1;
    pd_open(&small, best(state), params, 1 << 20);
    assert_int_equal(kvc_map_create(small.cache, 104, &other), KVC_OK);
    expect(KVC_E_ARG, &p, NULL, other);
    kvc_map_destroy(other);
    pd_close(&small);
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, NULL, map), KVC_OK);
    assert_int_equal(kvc_explain(map, 0, 0, 0, NULL, &n), KVC_OK);
    assert_int_equal(n, 104);
    assert_int_equal(kvc_explain(map, 0, 0, 103, fates, &n), KVC_E_ARG);
    assert_int_equal(kvc_explain(map, 0, 0, 104, fates, NULL), KVC_E_ARG);
    assert_int_equal(kvc_explain(NULL, 0, 0, 104, fates, &n), KVC_E_ARG);
    assert_int_equal(kvc_explain(map, 2, 0, 104, fates, &n), KVC_E_ARG);
    assert_int_equal(kvc_explain(map, 0, -1, 104, fates, &n), KVC_E_ARG);
    assert_int_equal(kvc_explain(map, 0, 2, 104, fates, &n), KVC_E_ARG);
    assert_int_equal(kvc_explain(map, 1, 1, 104, fates, &n), KVC_OK);
    kvc_map_destroy(map);
    pd_close(&d);
}

static void readers_check_their_arguments(void **state)
{
    float scores[104], biases[104];
    int32_t sizes[104];
    size_t n;

    pd_open(&d, best(state), pd_params(), 1 << 20);
    feed_prompt();
    assert_int_equal(kvc_seq_score_rows(NULL, d.seq, 0, 0, 104, scores, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_score_rows(d.cache, 0, 0, 0, 104, scores, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 2, 0, 104, scores, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 0, 2, 104, scores, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 0, 0, 103, scores, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 0, 0, 104, NULL, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 0, 0, 104, scores, NULL), KVC_E_ARG);
    assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 0, 0, 104, scores, &n), KVC_OK);
    assert_int_equal(n, 104);
    assert_int_equal(kvc_seq_read_groups(NULL, d.seq, 0, 0, 104, biases, sizes, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_groups(d.cache, 0, 0, 0, 104, biases, sizes, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_groups(d.cache, d.seq, -1, 0, 104, biases, sizes, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_groups(d.cache, d.seq, 0, 2, 104, biases, sizes, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_groups(d.cache, d.seq, 0, 0, 103, biases, sizes, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_groups(d.cache, d.seq, 0, 0, 104, biases, sizes, NULL),
                     KVC_E_ARG);
    assert_int_equal(kvc_seq_read_groups(d.cache, d.seq, 0, 0, 104, NULL, NULL, &n), KVC_OK);
    assert_int_equal(n, 104);
    assert_int_equal(kvc_seq_read_groups(d.cache, d.seq, 1, 1, 104, biases, sizes, &n), KVC_OK);
    for (int i = 0; i < 104; i++)
        assert_true(biases[i] == 0.0f && sizes[i] == 1);
    assert_int_equal(kvc_tokens_add(d.cache, d.seq, NULL, 1), KVC_OK); /* rows are missing */
    assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 0, 0, 104, scores, &n), KVC_E_ARG);
    pd_close(&d);
}

static void on_full_is_checked_at_create(void **state)
{
    kvc_cache_params params = pd_params();
    kvc_policy p = pd_policy();
    kvc_cache *cache = NULL;

    assert_int_equal(kvc_cache_full_budget(&params, &params.budget_bytes), KVC_OK);
    params.on_full = &p;
    p.max_rows = 100;
    assert_int_equal(kvc_cache_create(best(state), &params, &cache), KVC_OK);
    kvc_cache_destroy(cache);
    p.block = 0;
    assert_int_equal(kvc_cache_create(best(state), &params, &cache), KVC_E_ARG);
    assert_null(cache);
    p.block = 1;
    p.source = KVC_SOURCE_SUMS;
    assert_int_equal(kvc_cache_create(best(state), &params, &cache), KVC_E_ARG);
    p.source = KVC_SOURCE_PROBES;
    p.scope = KVC_SCOPE_HEAD;
    p.budget.mode = KVC_BUDGET_MASS;
    assert_int_equal(kvc_cache_create(best(state), &params, &cache), KVC_E_UNSUPPORTED);
    assert_null(cache);
}

static void the_default_policy_does_what_none_does(void **state)
{
    struct pd_rows rows[2];
    kvc_policy p;

    kvc_policy_default(&p);
    for (int i = 0; i < 2; i++) {
        kvc_cache_params params = pd_params();
        kvc_report report;

        params.precision.k = params.precision.v = KVC_INT8;
        params.recent_tokens = 20;
        pd_open(&d, best(state), params, 1 << 20);
        feed_prompt();
        report = pd_compress(&d, i ? &p : NULL);
        assert_true(i == 0 || report.visual_rate == 0.0f);
        assert_int_equal(report.n_forced_dropped, 0);
        rows[i] = pd_read(&d, d.seq, 1, 1);
        pd_close(&d);
    }
    assert_int_equal(rows[0].n, 104);
    assert_int_equal(rows[1].n, 104);
    assert_memory_equal(rows[0].k, rows[1].k, 104 * 16 * sizeof(float));
    assert_memory_equal(rows[0].v, rows[1].v, 104 * 8 * sizeof(float));
    pd_free(&rows[0]);
    pd_free(&rows[1]);
}

/* Each page size takes slabs of its own: with little budget the call must fail as a whole. */
static void without_room_nothing_changes(void **state)
{
    kvc_policy p = pd_policy();
    int n_full = 0, n_done = 0;

    p.visual_rate = 0.3f;
    p.row_rate = 0.1f;
    p.set_precision = true;
    p.precision.k = p.precision.v = KVC_INT4;
    p.heavy_share = 0.2f;
    p.merge_rounds = 1;
    p.merging.force_quarter = true;
    for (size_t extra = 0; extra < 1 << 20; extra += 8192) {
        kvc_cache_params params = pd_params();
        kvc_status status;

        params.max_append = 400;
        params.max_sequences = 1;
        params.max_merge_tokens = 256;
        pd_open(&d, best(state), params, extra);
        assert_int_equal(kvc_seq_hold(d.cache, d.seq), KVC_OK);
        pd_feed_text(&d, 50);
        pd_feed_image(&d, 0, 16, 16);
        pd_feed_text(&d, 90);
        pd_look(&d, 16);
        const struct pd_state before = pd_save(&d);
        status = kvc_cache_compress(d.cache, d.seq, &p, NULL, NULL);
        assert_true(status == KVC_OK || status == KVC_E_FULL);
        if (status == KVC_E_FULL)
            pd_assert_same(&d, &before);
        n_full += status == KVC_E_FULL;
        n_done += status == KVC_OK;
        pd_check_attention(&d, d.seq, 1, NULL);
        if (status == KVC_OK) {
            pd_feed_text(&d, 1);
            pd_check_attention(&d, d.seq, 1, NULL);
        }
        pd_close(&d);
        if (n_done == 3)
            break;
    }
    print_message("%d budgets were too small\n", n_full);
    assert_true(n_done > 0);
}

static int64_t page_bytes(int layer)
{
    int64_t sum = 0;

    for (int head = 0; head < d.p.n_kv_heads; head++)
        for (int64_t i = 0; i < kvc_seq_n_pages(d.cache, d.seq, layer, head); i++) {
            kvc_page_info info = {.struct_size = sizeof(info)};

            assert_int_equal(
                kvc_seq_read_page(d.cache, d.seq, layer, head, i, &info, NULL, NULL, 0), KVC_OK);
            sum += (int64_t)info.n_bytes;
        }
    return sum;
}

static void check_fates(const kvc_map *map, int layer, int head, const struct pd_rows *before,
                        kvc_layer_report *sums)
{
    struct pd_rows after = pd_read(&d, d.seq, layer, head);
    kvc_token_fate *fates = calloc(before->n, sizeof(*fates));
    size_t n;
    int32_t next = 0;

    assert_int_equal(kvc_explain(map, layer, head, before->n, fates, &n), KVC_OK);
    assert_int_equal(n, before->n);
    for (size_t i = 0; i < n; i++) {
        const kvc_token_fate *f = &fates[i];

        assert_int_equal(f->ordinal, before->ordinals[i]);
        assert_int_equal(f->old_row, i);
        for (int b = 0; b < 10; b++)
            assert_int_equal(f->reserved[b], 0);
        assert_true(f->heavy <= 1);
        switch (f->fate) {
        case KVC_FATE_PRUNED:
        case KVC_FATE_EVICTED:
            assert_int_equal(f->new_row, -1);
            assert_int_equal(f->partner, -1);
            sums->n_pruned++;
            break;
        case KVC_FATE_MERGED:
            assert_true(f->new_row >= 0 && (size_t)f->new_row < after.n);
            assert_int_equal(after.ordinals[f->new_row], f->partner);
            assert_true(after.sizes[f->new_row] > 1);
            sums->n_merged++;
            break;
        default:
            assert_true(f->fate != KVC_FATE_NONE && f->fate <= KVC_FATE_ABSORBED);
            assert_int_equal(f->new_row, next++);
            assert_int_equal(after.ordinals[f->new_row], f->ordinal);
            assert_int_equal(after.sizes[f->new_row] > 1, f->fate == KVC_FATE_ABSORBED);
            assert_true((f->partner >= 0) == (f->fate == KVC_FATE_ABSORBED));
        }
    }
    assert_int_equal(next, after.n);
    sums->n_kept += next;
    free(fates);
    pd_free(&after);
}

static void reports_and_maps_tell_what_happened(void **state)
{
    for (int scope = KVC_SCOPE_SHARED; scope <= KVC_SCOPE_HEAD; scope++)
        for (int rounds = 0; rounds <= 2; rounds += 2) {
            kvc_cache_params params = pd_params();
            kvc_layer_report layers[2] = {{0}};
            kvc_report report = {.struct_size = sizeof(report), .layers = layers, .n_layers = 2};
            struct pd_rows before[2][2];
            kvc_policy p = pd_policy();
            kvc_map *map;
            size_t used;

            params.max_merge_tokens = 64;
            pd_open(&d, best(state), params, 1 << 20);
            feed_prompt();
            p.scope = (kvc_scope)scope;
            p.visual_rate = 0.25f;
            p.max_rows = 60;
            p.merge_rounds = rounds;
            p.merging.force_quarter = true;
            p.set_precision = true;
            assert_int_equal(kvc_map_create(d.cache, 104, &map), KVC_OK);
            for (int i = 0; i < 4; i++)
                before[i / 2][i % 2] = pd_read(&d, d.seq, i / 2, i % 2);
            used = pd_stats(&d).used_bytes;
            const int64_t bytes[2] = {page_bytes(0), page_bytes(1)};
            assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, &report, map), KVC_OK);
            assert_int_equal(report.bytes_before, used);
            assert_int_equal(report.bytes_after, pd_stats(&d).used_bytes);
            assert_true(report.visual_rate == 0.25f);
            assert_true(report.strength == 1.0f);
            assert_int_equal(report.n_forced_dropped, 0);
            assert_int_equal(report.n_recoded, 0);
            for (int layer = 0; layer < 2; layer++) {
                kvc_layer_report sums = {0};

                for (int head = 0; head < 2; head++) {
                    check_fates(map, layer, head, &before[layer][head], &sums);
                    pd_free(&before[layer][head]);
                }
                assert_int_equal(layers[layer].n_kept, sums.n_kept);
                assert_int_equal(layers[layer].n_pruned, sums.n_pruned);
                assert_int_equal(layers[layer].n_merged, sums.n_merged);
                assert_int_equal(sums.n_kept + sums.n_pruned + sums.n_merged, 2 * 104);
                if (rounds > 0 && sums.n_merged == 0)
                    fail_msg("scope %d: nothing merged", scope);
                assert_int_equal(layers[layer].bytes_before, bytes[layer]);
                assert_int_equal(layers[layer].bytes_after, page_bytes(layer));
                assert_true(layers[layer].reserved == 0.0);
            }
            kvc_map_destroy(map);
            pd_close(&d);
        }
}

/* rel_err of the header, from the rows before and after. */
static double true_rel_err(struct pd_rows before[2], int layer)
{
    const size_t dk = (size_t)d.p.head_dim_k;
    int64_t ordinals[16];
    float q[16 * 4 * 16];
    double change = 0, size = 0;
    kvc_attend_options o;
    size_t n;

    kvc_attend_options_default(d.cache, &o);
    assert_int_equal(kvc_seq_read_probes(d.cache, d.seq, layer, ordinals, q, &n), KVC_OK);
    for (int head = 0; head < 2; head++) {
        struct pd_rows after = pd_read(&d, d.seq, layer, head);

        for (size_t i = 0; i < n * 2; i++) {
            const float *x = q + (i / 2 * 4 + (size_t)head * 2 + i % 2) * dk;
            double a[8], b[8], lse, tolerance;

            pd_attention(&d, &before[head], x, ordinals[i / 2], &o, a, &lse, &tolerance);
            pd_attention(&d, &after, x, ordinals[i / 2], &o, b, &lse, &tolerance);
            for (int e = 0; e < 8; e++) {
                change += (b[e] - a[e]) * (b[e] - a[e]);
                size += a[e] * a[e];
            }
        }
        pd_free(&after);
    }
    return sqrt(change / size);
}

static void the_error_estimate_is_that_of_the_probe_rows(void **state)
{
    for (int kind = 0; kind < 4; kind++) {
        kvc_cache_params params = pd_params();
        kvc_layer_report layers[2];
        kvc_report report = {.struct_size = sizeof(report), .layers = layers, .n_layers = 2};
        struct pd_rows before[2][2];
        kvc_policy p = pd_policy();

        params.max_merge_tokens = 64;
        pd_open(&d, best(state), params, 1 << 20);
        feed_prompt();
        /* scores that the query rows had no part in: the estimate is the error itself */
        p.source = KVC_SOURCE_CALLER;
        p.visual_rate = kind == 0 || kind == 3 ? 0.5f : 0;
        p.merge_rounds = kind == 1 || kind == 3 ? 1 : 0;
        p.merging.force_quarter = true;
        p.set_precision = kind >= 2;
        p.precision.k = p.precision.v = KVC_INT4;
        for (int i = 0; i < 4; i++)
            before[i / 2][i % 2] = pd_read(&d, d.seq, i / 2, i % 2);
        assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, &report, NULL), KVC_OK);
        for (int layer = 0; layer < 2; layer++) {
            const double want = true_rel_err(before[layer], layer);

            if (!(fabs(layers[layer].rel_err - want) <= 0.01 * want))
                fail_msg("kind %d layer %d: rel_err %.6g, not %.6g", kind, layer,
                         layers[layer].rel_err, want);
            pd_free(&before[layer][0]);
            pd_free(&before[layer][1]);
        }
        pd_close(&d);
    }
}

/* Rows that scored think too well of what they kept: the estimate is never below what they see. */
static void the_error_estimate_does_not_trust_the_rows_that_scored(void **state)
{
    kvc_layer_report layers[2];
    kvc_report report = {.struct_size = sizeof(report), .layers = layers, .n_layers = 2};
    struct pd_rows before[2][2];
    kvc_policy p = pd_policy();

    pd_open(&d, best(state), pd_params(), 1 << 20);
    feed_prompt();
    p.visual_rate = 0.5f;
    for (int i = 0; i < 4; i++)
        before[i / 2][i % 2] = pd_read(&d, d.seq, i / 2, i % 2);
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, &report, NULL), KVC_OK);
    for (int layer = 0; layer < 2; layer++) {
        const double seen = true_rel_err(before[layer], layer);

        assert_true(layers[layer].rel_err >= 0.99 * seen && layers[layer].rel_err < 2 * seen);
        pd_free(&before[layer][0]);
        pd_free(&before[layer][1]);
    }
    pd_close(&d);
}

static void without_policy_or_query_rows_there_is_no_error_estimate(void **state)
{
    kvc_layer_report layers[2];
    kvc_report report = {.struct_size = sizeof(report), .layers = layers, .n_layers = 2};
    kvc_policy p = pd_policy();

    pd_open(&d, best(state), pd_params(), 1 << 20);
    pd_feed_text(&d, 100);
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, NULL, &report, NULL), KVC_OK);
    assert_true(isnan(layers[0].rel_err) && isnan(layers[1].rel_err));
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, &report, NULL), KVC_OK);
    assert_true(isnan(layers[0].rel_err) && isnan(layers[1].rel_err));
    pd_close(&d);
}

static void an_error_limit_weakens_the_policy(void **state)
{
    static const float limits[] = {0.5f, 0.2f, 0.1f, 0.03f};
    float strength = 1;

    for (size_t i = 0; i < 4; i++) {
        kvc_layer_report layers[2];
        kvc_report report = {.struct_size = sizeof(report), .layers = layers, .n_layers = 2};
        kvc_policy p = pd_policy();

        pd_open(&d, best(state), pd_params(), 1 << 20);
        feed_prompt();
        p.visual_rate = 0.9f;
        p.max_rel_err = limits[i];
        assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, &report, NULL), KVC_OK);
        assert_true(report.strength >= 0 && report.strength <= strength);
        strength = report.strength;
        for (int layer = 0; layer < 2; layer++)
            if (!(layers[layer].rel_err <= (double)limits[i] * 1.0001))
                fail_msg("limit %g: rel_err %g", (double)limits[i], layers[layer].rel_err);
        print_message("limit %.2f: strength %.3f, rate %.3f, rel_err %.4f %.4f\n",
                      (double)limits[i], (double)report.strength, (double)report.visual_rate,
                      layers[0].rel_err, layers[1].rel_err);
        assert_true(report.visual_rate <= 0.9f * report.strength + 1e-6f);
        pd_close(&d);
    }
    assert_true(strength < 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_default_policy_is_as_documented),
        cmocka_unit_test(presets_are_as_documented),
        cmocka_unit_test(structs_of_other_versions_are_told_apart),
        cmocka_unit_test(fields_out_of_range_are_refused_and_change_nothing),
        cmocka_unit_test(what_a_policy_needs_is_asked_for_before_anything_changes),
        cmocka_unit_test(maps_are_checked),
        cmocka_unit_test(readers_check_their_arguments),
        cmocka_unit_test(on_full_is_checked_at_create),
        cmocka_unit_test(the_default_policy_does_what_none_does),
        cmocka_unit_test(without_room_nothing_changes),
        cmocka_unit_test(reports_and_maps_tell_what_happened),
        cmocka_unit_test(the_error_estimate_is_that_of_the_probe_rows),
        cmocka_unit_test(the_error_estimate_does_not_trust_the_rows_that_scored),
        cmocka_unit_test(without_policy_or_query_rows_there_is_no_error_estimate),
        cmocka_unit_test(an_error_limit_weakens_the_policy),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
