/* Policies in the cache: where scores come from, and how rows are shared over layers and heads. */
#include "support/policy_pick.h"

static void select_by(const float *score, size_t n, size_t keep, bool *kept)
{
    bool candidate[MAX_TOKENS];
    double x[MAX_TOKENS];

    memset(kept, false, n);
    memset(kept, true, (size_t)d.p.sink_tokens);
    memset(candidate, true, n);
    for (size_t i = 0; i < n; i++)
        x[i] = (double)score[i];
    take_best(x, candidate, n, keep - (size_t)d.p.sink_tokens, kept);
}

static void heads_have_their_own_rows(void **state)
{
    bool kept[2][2][200];
    kvc_policy p = pd_policy();
    int n_same = 0;

    pd_open(&d, best(state), pd_params(), 1 << 20);
    hold();
    pd_feed_text(&d, 200);
    pd_look(&d, 16);
    for (int i = 0; i < 4; i++) {
        float score[200];
        size_t n;

        assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, i / 2, i % 2, 200, score, &n), KVC_OK);
        select_by(score, 200, 80, kept[i / 2][i % 2]);
        n_same += i > 0 && memcmp(kept[0][0], kept[i / 2][i % 2], 200) == 0;
    }
    assert_int_equal(n_same, 0);
    p.scope = KVC_SCOPE_HEAD;
    p.max_rows = 80;
    pd_compress(&d, &p);
    for (int i = 0; i < 4; i++)
        assert_kept_in(i / 2, i % 2, kept[i / 2][i % 2], 200);
    pd_check_attention(&d, d.seq, 20, NULL);
    pd_feed_text(&d, 70);
    pd_check_attention(&d, d.seq, 3, NULL);
    pd_close(&d);
}

static void layers_combine_the_scores_of_their_heads(void **state)
{
    for (int scope = KVC_SCOPE_SHARED; scope <= KVC_SCOPE_LAYER; scope++) {
        float score[4][200], combined[200];
        const float *list[4];
        bool kept[2][200];
        kvc_policy p = pd_policy();

        pd_open(&d, best(state), pd_params(), 1 << 20);
        hold();
        pd_feed_text(&d, 200);
        pd_look(&d, 16);
        for (int i = 0; i < 4; i++) {
            size_t n;

            list[i] = score[i];
            assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, i / 2, i % 2, 200, score[i], &n),
                             KVC_OK);
        }
        for (int layer = 0; layer < 2; layer++) {
            if (scope == KVC_SCOPE_SHARED)
                assert_int_equal(kvc_combine_scores(list, 4, 200, NULL, false, combined), KVC_OK);
            else
                assert_int_equal(
                    kvc_combine_scores(list + layer * 2, 2, 200, NULL, false, combined), KVC_OK);
            select_by(combined, 200, 80, kept[layer]);
        }
        p.scope = (kvc_scope)scope;
        p.max_rows = 80;
        pd_compress(&d, &p);
        for (int i = 0; i < 4; i++)
            assert_kept_in(i / 2, i % 2, kept[i / 2], 200);
        pd_check_attention(&d, d.seq, 5, NULL);
        pd_close(&d);
    }
}

static void shared_sets_look_at_the_layers_chosen(void **state)
{
    static const struct {
        kvc_layer_choice layers;
        int32_t last;
        int only;
    } cases[] = {{KVC_LAYERS_MIDDLE, 4, 1}, {KVC_LAYERS_LAST, 1, 2}};

    for (int i = 0; i < 2; i++) {
        kvc_cache_params params = pd_params();
        kvc_policy p = pd_policy();
        float score[150];
        bool kept[150];
        size_t n;

        params.n_layers = 3;
        params.n_kv_heads = 1;
        pd_open(&d, best(state), params, 1 << 20);
        hold();
        pd_feed_text(&d, 150);
        pd_look(&d, 16);
        assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, cases[i].only, 0, 150, score, &n),
                         KVC_OK);
        select_by(score, 150, 60, kept);
        p.layers = cases[i].layers;
        p.last_layers = cases[i].last;
        p.max_rows = 60;
        pd_compress(&d, &p);
        assert_kept(kept, 150);
        pd_close(&d);
    }
}

static void budgets_add_up(void **state)
{
    static const kvc_budget_mode modes[] = {KVC_BUDGET_UNIFORM, KVC_BUDGET_PYRAMID,
                                            KVC_BUDGET_WEIGHTS, KVC_BUDGET_HYBRID};

    for (int i = 0; i < 8; i++) {
        kvc_cache_params params = pd_params();
        kvc_policy p = pd_policy();
        const int64_t n_heads = 3 * 2;
        int64_t sum = 0, got[6], most = 0;

        params.n_layers = 3;
        pd_open(&d, best(state), params, 1 << 20);
        d.q_scale = 3;
        hold();
        pd_feed_text(&d, 300);
        pd_look(&d, 16);
        p.scope = i < 4 ? KVC_SCOPE_LAYER : KVC_SCOPE_HEAD;
        kvc_budget_options_default(&p.budget);
        p.budget.mode = modes[i % 4];
        p.row_rate = 0.7f;
        pd_compress(&d, &p);
        for (int j = 0; j < 6; j++) {
            got[j] = kvc_seq_n_rows(d.cache, d.seq, j / 2, j % 2);
            sum += got[j];
            most = got[j] > most ? got[j] : most;
        }
        print_message("scope %d mode %d:", (int)p.scope, (int)p.budget.mode);
        for (int j = 0; j < 6; j++)
            print_message(" %d", (int)got[j]);
        print_message("\n");
        assert_int_equal(sum, 90 * n_heads);
        if (i % 4 == 0)
            assert_int_equal(most, 90);
        if (i == 1) {
            int32_t budgets[3];

            assert_int_equal(kvc_split_budget(NULL, 3, 270, &p.budget, budgets), KVC_OK);
            for (int j = 0; j < 6; j++)
                assert_int_equal(got[j], budgets[j / 2]);
        }
        pd_check_attention(&d, d.seq, 5, NULL);
        pd_close(&d);
    }
}

static void max_rows_is_the_mean_under_any_budget(void **state)
{
    static const kvc_budget_mode modes[] = {KVC_BUDGET_UNIFORM, KVC_BUDGET_PYRAMID,
                                            KVC_BUDGET_WEIGHTS, KVC_BUDGET_HYBRID};

    for (int i = 0; i < 8; i++) {
        kvc_policy p = pd_policy();
        int64_t sum = 0;

        pd_open(&d, best(state), pd_params(), 1 << 20);
        hold();
        pd_feed_text(&d, 300);
        pd_look(&d, 16);
        p.scope = i < 4 ? KVC_SCOPE_LAYER : KVC_SCOPE_HEAD;
        p.budget.mode = modes[i % 4];
        p.max_rows = 100;
        pd_compress(&d, &p);
        for (int j = 0; j < 4; j++) {
            const int64_t n = kvc_seq_n_rows(d.cache, d.seq, j / 2, j % 2);

            assert_true(i % 4 != 0 || n == 100);
            sum += n;
        }
        assert_int_equal(sum, 400);
        pd_close(&d);
    }
}

static void age_keeps_the_newest(void **state)
{
    kvc_policy p = pd_policy();
    bool kept[200];

    pd_open(&d, best(state), pd_params(), 1 << 20);
    pd_feed_text(&d, 120);
    pd_feed_text(&d, 80);
    for (int i = 0; i < 200; i++)
        kept[i] = i < 4 || i >= 200 - 46;
    p.source = KVC_SOURCE_AGE;
    p.max_rows = 50;
    pd_compress(&d, &p);
    assert_kept(kept, 200);
    pd_close(&d);
}

/* Each row's mass a query that could see it. */
static void sums_are_per_query(void **state)
{
    kvc_cache_params params = pd_params();
    kvc_policy p = pd_policy();
    kvc_attend_options o;
    bool kept[2][2][120];

    params.score_mode = KVC_SCORE_TOKEN;
    pd_open(&d, best(state), params, 1 << 20);
    hold();
    kvc_attend_options_default(d.cache, &o);
    o.accumulate = true;
    pd_feed_text(&d, 100);
    pd_check_attention(&d, d.seq, 100, &o); /* query i sees 0 ... i */
    for (int i = 0; i < 20; i++) {
        pd_feed_text(&d, 1);
        pd_check_attention(&d, d.seq, 1, &o);
    }
    for (int i = 0; i < 4; i++) {
        struct pd_rows rows = pd_read(&d, d.seq, i / 2, i % 2);
        float score[120];

        for (int t = 0; t < 120; t++)
            score[t] = rows.masses[t] / (float)(120 - t);
        select_by(score, 120, 50, kept[i / 2][i % 2]);
        pd_free(&rows);
    }
    p.source = KVC_SOURCE_SUMS;
    p.scope = KVC_SCOPE_HEAD;
    p.max_rows = 50;
    pd_compress(&d, &p);
    for (int i = 0; i < 4; i++)
        assert_kept_in(i / 2, i % 2, kept[i / 2][i % 2], 120);
    pd_close(&d);
}

static void probe_scores_are_a_softmax_and_the_same_on_every_table(void **state)
{
    const struct tables *t = *state;
    static const kvc_format formats[] = {KVC_F16, KVC_INT8, KVC_INT4};

    for (int f = 0; f < 3; f++) {
        static float first[2][2][300];

        for (size_t table = 0; table < t->n; table++) {
            kvc_cache_params params = pd_params();

            params.precision.k = params.precision.v = formats[f];
            pd_open(&d, t->ctx[table], params, 1 << 20);
            for (int i = 0; i < 6; i++)
                pd_feed_text(&d, 50);
            pd_look(&d, 16);
            assert_int_equal(kvc_seq_remove(d.cache, d.seq, 100, 117), KVC_OK);
            for (int i = 0; i < 4; i++) {
                float score[300];
                double want[300], sum = 0;
                size_t n;

                assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, i / 2, i % 2, 300, score, &n),
                                 KVC_OK);
                assert_int_equal(n, 283);
                pd_probe_scores(&d, d.seq, i / 2, i % 2, want);
                for (size_t r = 0; r < n; r++) {
                    if (!(fabs((double)score[r] - want[r]) <= 1e-5 * fmax(want[r], 0.01)))
                        fail_msg("format %d row %zu: %.9g, not %.9g", f, r, (double)score[r],
                                 want[r]);
                    sum += (double)score[r];
                }
                assert_true(fabs(sum - 1) < 1e-5);
                if (table == 0)
                    memcpy(first[i / 2][i % 2], score, n * sizeof(*score));
                assert_memory_equal(first[i / 2][i % 2], score, n * sizeof(*score));
            }
            pd_close(&d);
        }
    }
}

static void without_query_rows_scores_are_zero(void **state)
{
    float score[70];
    size_t n;

    pd_open(&d, best(state), pd_params(), 1 << 20);
    pd_feed_text(&d, 70);
    assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 0, 0, 70, score, &n), KVC_OK);
    assert_int_equal(n, 70);
    for (int i = 0; i < 70; i++)
        assert_true(score[i] == 0.0f);
    pd_close(&d);
}

/* Known fault A4: query head h belongs to KV head h / (heads / KV heads). */
static void query_heads_are_mapped_to_kv_heads_in_blocks(void **state)
{
    kvc_cache_params params = pd_params();
    float k[8 * 2 * 16] = {0}, q[4 * 16] = {0}, out[4 * 8];
    const kvc_view vq = kvc_view_packed(q, KVC_DTYPE_F32, 1, 4, 16);
    const kvc_view vo = kvc_view_packed(out, KVC_DTYPE_F32, 1, 4, 8);
    kvc_policy p = pd_policy();
    float score[8];
    size_t n;

    params.n_layers = 1;
    params.sink_tokens = 0;
    pd_open(&d, best(state), params, 1 << 20);
    for (int t = 0; t < 8; t++)
        for (int h = 0; h < 2; h++)
            k[(t * 2 + h) * 16 + t] = 8;
    pd_feed(&d, NULL, 8, k, NULL);
    for (int h = 0; h < 4; h++)
        q[h * 16 + (h < 2 ? 3 : 5)] = 8;
    assert_int_equal(kvc_attend(d.cache, d.seq, 0, &vq, NULL, &vo, NULL), KVC_OK);
    for (int head = 0; head < 2; head++) {
        assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 0, head, 8, score, &n), KVC_OK);
        for (int t = 0; t < 8; t++)
            assert_int_equal(score[t] > 0.5f, t == (head == 0 ? 3 : 5));
    }
    p.scope = KVC_SCOPE_HEAD;
    p.max_rows = 1;
    pd_compress(&d, &p);
    for (int head = 0; head < 2; head++) {
        struct pd_rows rows = pd_read(&d, d.seq, 0, head);

        assert_int_equal(rows.n, 1);
        assert_int_equal(rows.ordinals[0], head == 0 ? 3 : 5);
        pd_free(&rows);
    }
    pd_close(&d);
}

/* Codes of rows that are sealed already are moved, never made again. */

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_have_their_own_rows),
        cmocka_unit_test(layers_combine_the_scores_of_their_heads),
        cmocka_unit_test(shared_sets_look_at_the_layers_chosen),
        cmocka_unit_test(budgets_add_up),
        cmocka_unit_test(max_rows_is_the_mean_under_any_budget),
        cmocka_unit_test(age_keeps_the_newest),
        cmocka_unit_test(sums_are_per_query),
        cmocka_unit_test(probe_scores_are_a_softmax_and_the_same_on_every_table),
        cmocka_unit_test(without_query_rows_scores_are_zero),
        cmocka_unit_test(query_heads_are_mapped_to_kv_heads_in_blocks),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
