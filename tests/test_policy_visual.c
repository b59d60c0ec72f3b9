/* Policies in the cache: the gate, coverage, sinks and priors of images. */
#include "support/policy_pick.h"

static void the_gate_sets_the_rate(void **state)
{
    static const size_t extra[] = {1 << 19, 1 << 20, 1 << 22};
    uint64_t rng = 13;

    for (int i = 0; i < 9; i++) {
        kvc_cache_params params = pd_params();
        kvc_policy p = caller_policy(&rng, 1000);
        kvc_gate_input input = {.struct_size = sizeof(input)};
        kvc_gate_params gating;
        kvc_report report;
        size_t keep;
        kvc_gate gate;
        float rate;

        params.max_append = 800;
        if (i / 3 == 1)
            for (int t = 20; t < 596; t++)
                scores[t] = scores[t] * scores[t] * scores[t];
        if (i / 3 == 2)
            for (int t = 20; t < 596; t++)
                scores[t] = t == 300 ? 1000 : scores[t];
        pd_open(&d, best(state), params, extra[i % 3]);
        hold();
        pd_feed_text(&d, 20);
        pd_feed_image(&d, 0, 24, 24);
        pd_feed_text(&d, 10);
        p.gate = true;
        p.visual_rate = 0.8f;
        p.gating.base = 0.9f; /* not read */
        p.gating.min_rate = 0;
        const kvc_stats stats = pd_stats(&d);
        report = pd_compress(&d, &p);
        kvc_gate_reset(&gate);
        kvc_gate_params_default(&gating);
        gating.base = 0.8f;
        gating.min_rate = 0;
        input.used_bytes = report.bytes_before;
        input.budget_bytes = d.p.budget_bytes - stats.probe_bytes - stats.scratch_bytes -
                             stats.overhead_bytes; /* what tokens can use */
        input.n_tokens = 576;
        assert_int_equal(kvc_entropy(scores + 20, 576, NULL, &input.entropy), KVC_OK);
        assert_int_equal(kvc_gate_update(&gate, &gating, &input, NULL, &rate), KVC_OK);
        assert_true(report.visual_rate == rate);
        assert_int_equal(kvc_keep_count(576, rate, 0, &keep), KVC_OK);
        assert_int_equal(kvc_seq_n_rows(d.cache, d.seq, 0, 0), 30 + keep);
        pd_close(&d);
    }
}

static void small_images_pass_the_gate_whole(void **state)
{
    uint64_t rng = 17;
    kvc_policy p = caller_policy(&rng, 1000);

    pd_open(&d, best(state), pd_params(), 1 << 20);
    hold();
    pd_feed_text(&d, 20);
    pd_feed_image(&d, 0, 16, 16);
    p.gate = true;
    p.visual_rate = 0.5f;
    assert_true(pd_compress(&d, &p).visual_rate == 0.0f);
    assert_int_equal(kvc_seq_n_rows(d.cache, d.seq, 0, 0), 276);
    pd_close(&d);
}

static void every_cell_keeps_a_token(void **state)
{
    for (int coverage = 1; coverage <= 8; coverage++) {
        kvc_policy p = pd_policy();
        struct pd_rows rows;
        int n[8][8] = {{0}};

        pd_open(&d, best(state), pd_params(), 1 << 20);
        hold();
        pd_feed_text(&d, 10);
        pd_feed_image(&d, 0, 12, 16);
        for (int i = 0; i < 10 + 192; i++)
            scores[i] = i < 10 + 64 ? 1.0f : 0.001f * (float)(i % 7); /* the upper third */
        p.source = KVC_SOURCE_CALLER;
        p.scores = scores;
        p.n_scores = 202;
        p.visual_rate = 2.0f / 3;
        p.coverage = coverage;
        pd_compress(&d, &p);
        rows = pd_read(&d, d.seq, 1, 1);
        assert_int_equal(rows.n, 10 + 64);
        for (size_t i = 10; i < rows.n; i++) {
            const int cell = (int)rows.ordinals[i] - 10;

            n[cell / 16 * coverage / 12][cell % 16 * coverage / 16]++;
        }
        for (int i = 0; i < coverage * coverage; i++)
            assert_true(n[i / coverage][i % coverage] > 0);
        pd_free(&rows);
        pd_close(&d);
    }
}

/* Visual sinks stay, although the call asks for other tokens: those are forced by their mass. */
static void visual_sinks_stay_and_do_not_count_in_the_entropy(void **state)
{
    kvc_cache_params params = pd_params();
    uint64_t rng = 19;
    kvc_policy p = caller_policy(&rng, 2);
    kvc_gate_input input = {.struct_size = sizeof(input), .n_tokens = 600};
    uint64_t excluded[10] = {0};
    kvc_gate_params gating;
    kvc_token_fate fates[640];
    kvc_report report = {.struct_size = sizeof(report)};
    kvc_map *map;
    kvc_gate gate;
    size_t n;
    float rate;

    pd_open(&d, best(state), params, 1 << 22);
    hold();
    pd_feed_text(&d, 20);
    pd_feed_image(&d, 0, 20, 30);
    pd_feed_text(&d, 20);
    for (int i = 0; i < 640; i++)
        scores[i] = 1;
    for (int i = 600; i < 604; i++) /* four among 600: above 10 means */
        scores[i] = 50;
    for (int i = 580; i < 584; i++)
        excluded[i / 64] |= UINT64_C(1) << (i % 64);
    p.n_scores = 640;
    p.sink_factor = 10;
    p.gate = true;
    p.visual_rate = 0.5f;
    assert_int_equal(kvc_map_create(d.cache, 640, &map), KVC_OK);
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, &report, map), KVC_OK);
    kvc_gate_reset(&gate);
    kvc_gate_params_default(&gating);
    input.used_bytes = report.bytes_before;
    input.budget_bytes = d.p.budget_bytes;
    assert_int_equal(kvc_entropy(scores + 20, 600, excluded, &input.entropy), KVC_OK);
    assert_true(input.entropy > 0.9999f);
    assert_int_equal(kvc_gate_update(&gate, &gating, &input, NULL, &rate), KVC_OK);
    assert_true(report.visual_rate == rate);
    assert_int_equal(kvc_explain(map, 0, 0, 640, fates, &n), KVC_OK);
    for (int i = 600; i < 604; i++)
        assert_int_equal(fates[i].fate, KVC_FATE_SINK);
    assert_int_equal(fates[0].fate, KVC_FATE_SINK);
    kvc_map_destroy(map);
    pd_close(&d);
}

/* The centre prior can only lift what is near the middle. */
static void the_centre_prior_counts(void **state)
{
    kvc_policy p = pd_policy();
    struct pd_rows rows;

    pd_open(&d, best(state), pd_params(), 1 << 20);
    hold();
    pd_feed_text(&d, 5);
    pd_feed_image(&d, 0, 9, 9);
    for (int i = 0; i < 86; i++)
        scores[i] = 1;
    p.source = KVC_SOURCE_CALLER;
    p.scores = scores;
    p.n_scores = 86;
    p.visual_rate = 72.0f / 81;
    p.centre = 0.5f;
    pd_compress(&d, &p);
    rows = pd_read(&d, d.seq, 0, 1);
    assert_int_equal(rows.n, 5 + 9);
    for (size_t i = 5; i < rows.n; i++) {
        const int row = ((int)rows.ordinals[i] - 5) / 9, col = ((int)rows.ordinals[i] - 5) % 9;

        assert_true(row >= 3 && row <= 5 && col >= 3 && col <= 5);
    }
    pd_free(&rows);
    pd_close(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_gate_sets_the_rate),
        cmocka_unit_test(small_images_pass_the_gate_whole),
        cmocka_unit_test(every_cell_keeps_a_token),
        cmocka_unit_test(visual_sinks_stay_and_do_not_count_in_the_entropy),
        cmocka_unit_test(the_centre_prior_counts),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
