/* Policies in the cache: which rows go, which stay, and what stays with them. */
#include "support/policy_pick.h"

static void each_image_is_pruned_to_its_rate_by_score(void **state)
{
    static const float rates[] = {0, 0.1f, 0.3f, 0.5f, 0.7f, 0.99f, 1};
    static const int32_t least[] = {0, 10, 64};
    const size_t first[] = {7, 7 + 64 + 5}, count[] = {64, 33};
    uint64_t rng = 3;

    for (size_t i = 0; i < 7 * 3; i++)
        for (int held = 0; held < 2; held++) {
            bool kept[7 + 64 + 5 + 33 + 20], candidate[sizeof(kept)];
            double score[sizeof(kept)];
            kvc_report report;
            kvc_policy p = caller_policy(&rng, 8);

            pd_open(&d, best(state), pd_params(), 1 << 20);
            if (held)
                hold();
            pd_feed_text(&d, 7);
            pd_feed_image(&d, 4, 8, 8);
            pd_feed_text(&d, 5);
            feed_ragged(9, 5, 7, 5);
            pd_feed_text(&d, 20);
            p.visual_rate = rates[i % 7];
            p.keep_min = least[i / 7];
            memset(kept, true, sizeof(kept));
            for (size_t t = 0; t < sizeof(kept); t++)
                score[t] = (double)scores[t];
            for (int image = 0; image < 2; image++) {
                size_t keep;

                assert_int_equal(
                    kvc_keep_count(count[image], p.visual_rate, (size_t)p.keep_min, &keep), KVC_OK);
                memset(candidate, false, sizeof(candidate));
                memset(candidate + first[image], true, count[image]);
                memset(kept + first[image], false, count[image]);
                take_best(score, candidate, sizeof(kept), keep, kept);
            }
            report = pd_compress(&d, &p);
            assert_true(report.visual_rate == p.visual_rate);
            assert_kept(kept, sizeof(kept));
            pd_check_attention(&d, d.seq, 5, NULL);
            /* The rate is of the image, not of what is left of it. */
            pd_compress(&d, &p);
            assert_kept(kept, sizeof(kept));
            pd_close(&d);
        }
}

/* Known fault H5: positions are the tokens', the next position is stored. */
static void positions_stay_when_patches_go(void **state)
{
    kvc_policy p = pd_policy();
    kvc_token before[11], after;
    bool kept[12];

    pd_open(&d, best(state), pd_params(), 1 << 20);
    hold();
    pd_feed_text(&d, 5);
    pd_feed_image(&d, 0, 2, 3);
    assert_int_equal(kvc_seq_next_position(d.cache, d.seq), 8);
    assert_int_equal(kvc_seq_read_tokens(d.cache, d.seq, 0, 11, before), KVC_OK);
    for (int i = 0; i < 12; i++) {
        scores[i] = i == 7 || i == 10 ? 0.0f : 1.0f; /* x = 7 */
        kept[i] = scores[i] > 0;
    }
    p.source = KVC_SOURCE_CALLER;
    p.scores = scores;
    p.n_scores = 11;
    p.visual_rate = 1.0f / 3;
    pd_compress(&d, &p);
    assert_kept(kept, 11);
    assert_int_equal(kvc_seq_n_tokens(d.cache, d.seq), 11);
    assert_int_equal(kvc_seq_next_position(d.cache, d.seq), 8);
    for (int i = 0; i < 11; i++) {
        assert_int_equal(kvc_seq_read_tokens(d.cache, d.seq, i, 1, &after),
                         kept[i] ? KVC_OK : KVC_E_ARG);
        if (kept[i])
            assert_memory_equal(&after, &before[i], sizeof(after));
    }
    pd_feed_text(&d, 1);
    assert_int_equal(kvc_seq_read_tokens(d.cache, d.seq, 11, 1, &after), KVC_OK);
    assert_int_equal(after.t, 8);
    assert_int_equal(kvc_seq_next_position(d.cache, d.seq), 9);
    pd_check_attention(&d, d.seq, 1, NULL);
    pd_close(&d);
}

static void what_must_stay_stays(void **state)
{
    for (int how = 0; how < 2; how++) {
        kvc_token tokens[200];
        bool forced[200];
        kvc_policy p = pd_policy();

        memset(forced, false, sizeof(forced));
        for (int i = 0; i < 200; i++) {
            tokens[i] = i >= 50 && i < 150 ? pd_patch(0, (i - 50) / 10, (i - 50) % 10, 50)
                                           : pd_text(i < 50 ? i : i - 90);
            scores[i] = 1.0f;
        }
        for (int i = 0; i < 200; i++) {
            if (i % 37 == 11) /* of both kinds */
                tokens[i].flags = KVC_TOKEN_KEEP | 0x80;
            if (i == 49 || i == 150)
                tokens[i].kind = KVC_TOKEN_SEPARATOR;
            if (i % 23 == 20 && tokens[i].kind == KVC_TOKEN_TEXT)
                tokens[i].flags |= KVC_TOKEN_SENTENCE;
            forced[i] =
                i < 4 || tokens[i].flags != 0 || tokens[i].kind == KVC_TOKEN_SEPARATOR || i >= 190;
            scores[i] = forced[i] ? 0.0f : 1.0f;
        }
        pd_open(&d, best(state), pd_params(), 1 << 20);
        hold();
        pd_feed(&d, tokens, 200, NULL, NULL);
        p.source = KVC_SOURCE_CALLER;
        p.scores = scores;
        p.n_scores = 200;
        p.keep_sentences = true;
        p.last_tokens = 10;
        if (how == 0)
            p.visual_rate = 1;
        p.max_rows = how == 0 ? 0 : 60;
        p.row_rate = 0;
        assert_int_equal(pd_compress(&d, &p).n_forced_dropped, 0);
        for (int layer = 0; layer < 2; layer++) {
            struct pd_rows rows = pd_read(&d, d.seq, layer, 1);

            for (int i = 0; i < 200; i++)
                if (forced[i] && pd_find(&rows, i) < 0)
                    fail_msg("how %d: ordinal %d is gone", how, i);
            if (how == 1)
                assert_int_equal(rows.n, 60);
            for (int i = 50; i < 150 && how == 0; i++)
                assert_int_equal(pd_find(&rows, i) >= 0, forced[i]);
            pd_free(&rows);
        }
        pd_close(&d);
    }
}

static void sentences_stay_while_there_is_room(void **state)
{
    kvc_token tokens[100];
    bool kept[100];
    kvc_policy p = pd_policy();

    memset(kept, false, sizeof(kept));
    for (int i = 0; i < 100; i++) {
        tokens[i] = pd_text(i);
        tokens[i].flags = i % 10 == 5 ? KVC_TOKEN_SENTENCE : i % 25 == 8 ? KVC_TOKEN_KEEP : 0;
        scores[i] = tokens[i].flags ? 0.0f : 1.0f;
        kept[i] = i < 4 || i % 25 == 8 || i >= 94;
    }
    /* 4 sinks, 4 to keep, 6 newest of which one begins a sentence: room for 6 of 9 others */
    for (int i = 5; i < 60; i += 10)
        kept[i] = true;
    pd_open(&d, best(state), pd_params(), 1 << 20);
    hold();
    pd_feed(&d, tokens, 100, NULL, NULL);
    p.source = KVC_SOURCE_CALLER;
    p.scores = scores;
    p.n_scores = 100;
    p.keep_sentences = true;
    p.last_tokens = 6;
    p.max_rows = 20;
    assert_int_equal(pd_compress(&d, &p).n_forced_dropped, 3);
    assert_kept(kept, 100);
    pd_close(&d);
}

static void counts_of_rows_are_exact(void **state)
{
    static const struct {
        float row_rate;
        int32_t max_rows;
        size_t n;
    } cases[] = {{0, 150, 150},    {0, 1, 4},        {0, 199, 199},    {0, 200, 200},
                 {0, 900, 200},    {0.3f, 0, 140},   {0.7f, 0, 60},    {1, 0, 4},
                 {0.5f, 100, 100}, {0.5f, 150, 100}, {0.5f, 60, 60},   {0.001f, 0, 200},
                 {0.005f, 0, 199}, {0.006f, 0, 199}, {0.2501f, 0, 150}};
    uint64_t rng = 5;

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        for (int held = 0; held < 2; held++) {
            kvc_policy p = caller_policy(&rng, 1000);
            bool kept[200], candidate[200];
            double score[200];

            pd_open(&d, best(state), pd_params(), 1 << 20);
            if (held)
                hold();
            for (int j = 0; j < 4; j++)
                pd_feed_text(&d, 50);
            p.row_rate = cases[i].row_rate;
            p.max_rows = cases[i].max_rows;
            pd_compress(&d, &p);
            memset(kept, false, sizeof(kept));
            memset(kept, true, 4); /* sinks */
            memset(candidate, true, sizeof(candidate));
            for (int t = 0; t < 200; t++)
                score[t] = (double)scores[t];
            take_best(score, candidate, 200, cases[i].n - 4, kept);
            for (int head = 0; head < 4; head++)
                if (kvc_seq_n_rows(d.cache, d.seq, head / 2, head % 2) != (int64_t)cases[i].n)
                    fail_msg("case %zu: %d rows", i,
                             (int)kvc_seq_n_rows(d.cache, d.seq, head / 2, head % 2));
            assert_kept(kept, 200);
            pd_check_attention(&d, d.seq, 9, NULL);
            pd_close(&d);
        }
}

static void blocks_stay_or_go_together(void **state)
{
    uint64_t rng = 7;

    for (int block = 2; block <= 64; block += block < 8 ? 1 : 28)
        for (int how = KVC_BLOCK_MEAN; how <= KVC_BLOCK_MAX; how++) {
            kvc_cache_params params = pd_params();
            kvc_policy p = caller_policy(&rng, 1000);
            struct pd_rows rows;
            int n_part = 0;

            params.sink_tokens = 0;
            pd_open(&d, best(state), params, 1 << 20);
            hold();
            pd_feed_text(&d, 300);
            p.block = block;
            p.block_score = (kvc_block_score)how;
            p.max_rows = 150;
            pd_compress(&d, &p);
            rows = pd_read(&d, d.seq, 1, 0);
            assert_true(rows.n <= 150 && rows.n > (size_t)(150 - block));
            for (int b = 0; b < 300; b += block) {
                const int end = b + block < 300 ? b + block : 300;
                int n = 0;

                for (int i = b; i < end; i++)
                    n += pd_find(&rows, i) >= 0;
                n_part += n != 0 && n != end - b;
            }
            if (n_part > 0)
                fail_msg("block %d: %d blocks are kept in part", block, n_part);
            pd_free(&rows);
            pd_close(&d);
        }
}

/* What kvc_select_rows() keeps of the rows of one head, sinks forced. */

static void sealed_rows_keep_their_codes(void **state)
{
    static const kvc_format formats[] = {KVC_F16, KVC_INT8, KVC_INT4};
    static const kvc_scale scales[] = {KVC_SCALE_TOKEN, KVC_SCALE_HEAD, KVC_SCALE_CHANNEL};
    uint64_t rng = 9;

    for (int i = 0; i < 9; i++) {
        kvc_cache_params params = pd_params();
        kvc_policy p = caller_policy(&rng, 1000);
        struct pd_rows before[4];

        params.precision.k = params.precision.v = formats[i / 3];
        params.precision.k_scale = scales[i % 3];
        params.precision.v_scale = i % 3 == 2 ? KVC_SCALE_TOKEN : scales[i % 3];
        params.recent_tokens = 40;
        pd_open(&d, best(state), params, 1 << 21);
        for (int j = 0; j < 10; j++)
            pd_feed_text(&d, 60);
        pd_feed_text(&d, 1);
        for (int j = 0; j < 4; j++)
            before[j] = pd_read(&d, d.seq, j / 2, j % 2);
        p.set_precision = true; /* of what is sealed by this call, not before it */
        p.precision.k = p.precision.v = KVC_INT4;
        for (int round = 0; round < 4; round++) {
            p.max_rows = 500 - 100 * round;
            assert_int_equal(pd_compress(&d, &p).n_recoded, 0);
            for (int j = 0; j < 4; j++) {
                struct pd_rows after = pd_read(&d, d.seq, j / 2, j % 2);

                assert_int_equal(after.n, p.max_rows);
                for (size_t r = 0; r < after.n; r++) {
                    const size_t old = (size_t)pd_find(&before[j], after.ordinals[r]);

                    if (after.ordinals[r] >= 4 + 512) /* pages that were not full then */
                        continue;
                    assert_memory_equal(after.k + r * 16, before[j].k + old * 16, 16 * 4);
                    assert_memory_equal(after.v + r * 8, before[j].v + old * 8, 8 * 4);
                }
                pd_free(&after);
            }
            pd_check_attention(&d, d.seq, 2, NULL);
        }
        for (int j = 0; j < 4; j++)
            pd_free(&before[j]);
        pd_close(&d);
    }
}

static void strong_rows_stay_exact(void **state)
{
    static const float shares[] = {0, 0.2f, 0.5f, 1};

    for (int s = 0; s < 4; s++)
        for (int scope = KVC_SCOPE_SHARED; scope <= KVC_SCOPE_HEAD; scope++) {
            kvc_policy p = pd_policy();
            struct pd_rows before[4];
            kvc_map *map;

            pd_open(&d, best(state), pd_params(), 1 << 21);
            hold();
            pd_feed_text(&d, 300);
            pd_look(&d, 16);
            for (int j = 0; j < 4; j++)
                before[j] = pd_read(&d, d.seq, j / 2, j % 2);
            p.scope = (kvc_scope)scope;
            p.max_rows = 204;
            p.set_precision = true;
            p.precision.k = p.precision.v = KVC_INT4;
            p.heavy_share = shares[s];
            assert_int_equal(kvc_map_create(d.cache, 300, &map), KVC_OK);
            assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, NULL, map), KVC_OK);
            for (int j = 0; j < 4; j++) {
                struct pd_rows after = pd_read(&d, d.seq, j / 2, j % 2);
                kvc_token_fate fates[300];
                float least = INFINITY, most = 0;
                int n_heavy = 0, n_coded = 0;
                size_t n;

                assert_int_equal(after.n, 204);
                assert_int_equal(kvc_explain(map, j / 2, j % 2, 300, fates, &n), KVC_OK);
                for (int i = 4; i < 300; i++) {
                    const size_t row = (size_t)fates[i].new_row;
                    bool exact;

                    if (fates[i].new_row < 0)
                        continue;
                    exact = memcmp(after.k + row * 16, before[j].k + i * 16, 16 * 4) == 0 &&
                            memcmp(after.v + row * 8, before[j].v + i * 8, 8 * 4) == 0;
                    if (exact != (fates[i].heavy == 1))
                        fail_msg("share %g ordinal %d: heavy %d, exact %d", (double)shares[s], i,
                                 fates[i].heavy, exact);
                    n_heavy += exact;
                    n_coded += !exact;
                    if (exact)
                        least = fminf(least, fates[i].score);
                    else
                        most = fmaxf(most, fates[i].score);
                }
                assert_true(least >= most || n_heavy == 0 || n_coded == 0);
                if (!(fabs(n_heavy - (double)shares[s] * 200) <= 1))
                    fail_msg("share %g: %d of 200 rows are F16", (double)shares[s], n_heavy);
                pd_free(&after);
                pd_free(&before[j]);
            }
            pd_check_attention(&d, d.seq, 4, NULL);
            kvc_map_destroy(map);
            pd_close(&d);
        }
}

static void forks_and_their_pages_are_left_alone(void **state)
{
    uint64_t rng = 23;
    kvc_policy p = caller_policy(&rng, 1000);
    struct pd_rows before[4];
    kvc_seq fork;

    pd_open(&d, best(state), pd_params(), 1 << 21);
    for (int i = 0; i < 5; i++)
        pd_feed_text(&d, 60);
    assert_int_equal(kvc_seq_fork(d.cache, d.seq, &fork), KVC_OK);
    for (int j = 0; j < 4; j++)
        before[j] = pd_read(&d, fork, j / 2, j % 2);
    p.max_rows = 100;
    pd_compress(&d, &p);
    for (int j = 0; j < 4; j++) {
        struct pd_rows after = pd_read(&d, fork, j / 2, j % 2);

        assert_int_equal(after.n, 300);
        assert_memory_equal(after.k, before[j].k, 300 * 16 * sizeof(float));
        assert_memory_equal(after.v, before[j].v, 300 * 8 * sizeof(float));
        assert_int_equal(kvc_seq_n_rows(d.cache, d.seq, j / 2, j % 2), 100);
        pd_free(&after);
        pd_free(&before[j]);
    }
    pd_check_attention(&d, fork, 3, NULL);
    pd_check_attention(&d, d.seq, 3, NULL);
    assert_int_equal(kvc_seq_destroy(d.cache, d.seq), KVC_OK);
    pd_check_attention(&d, fork, 3, NULL);
    pd_close(&d);
}

/* More tokens that must stay than rows: they are counted, and the limit is kept. */
static void forced_tokens_beyond_the_rows_are_counted(void **state)
{
    kvc_token tokens[100];
    kvc_policy p = pd_policy();
    kvc_report report;

    for (int i = 0; i < 100; i++) {
        tokens[i] = pd_text(i);
        tokens[i].flags = i >= 20 && i < 60 ? KVC_TOKEN_KEEP : 0;
    }
    pd_open(&d, best(state), pd_params(), 1 << 20);
    hold();
    pd_feed(&d, tokens, 100, NULL, NULL);
    p.source = KVC_SOURCE_AGE;
    p.last_tokens = 10;
    p.max_rows = 30;
    report = pd_compress(&d, &p);
    print_message("54 forced tokens, 30 rows: %d rows, %d dropped\n",
                  (int)kvc_seq_n_rows(d.cache, d.seq, 0, 0), report.n_forced_dropped);
    assert_int_equal(kvc_seq_n_rows(d.cache, d.seq, 0, 0), 30);
    assert_int_equal(report.n_forced_dropped, 24);
    pd_close(&d);
}

/* Tokens without rows anywhere leave the table: a long prompt fits again. */
static void forgotten_tokens_make_room_in_the_token_table(void **state)
{
    kvc_cache_params params = pd_params();
    uint64_t rng = 29;
    kvc_policy p = caller_policy(&rng, 1000);

    params.max_tokens = 256;
    params.max_append = 128;
    params.max_sequences = 1;
    params.max_hold_tokens = 0;
    pd_open(&d, best(state), params, 1 << 21);
    p.max_rows = 64;
    for (int i = 0; i < 20; i++) {
        pd_feed_text(&d, 128);
        pd_compress(&d, &p);
        assert_int_equal(kvc_seq_n_rows(d.cache, d.seq, 0, 0), 64);
        assert_int_equal(kvc_seq_n_tokens(d.cache, d.seq), 128 * (i + 1));
        assert_int_equal(kvc_seq_next_position(d.cache, d.seq), 128 * (i + 1));
        pd_check_attention(&d, d.seq, 2, NULL);
    }
    pd_close(&d);
}

/* Truncation behind forgotten tokens: the next position never becomes less than theirs. */
static void truncation_after_pruning_is_right(void **state)
{
    for (int at = 0; at <= 130; at += 10) {
        uint64_t rng = 31;
        kvc_policy p = caller_policy(&rng, 1000);
        struct pd_rows before, after;
        int64_t last = -1;

        pd_open(&d, best(state), pd_params(), 1 << 21);
        hold();
        pd_feed_text(&d, 130);
        p.max_rows = 50;
        pd_compress(&d, &p);
        before = pd_read(&d, d.seq, 0, 0);
        assert_int_equal(kvc_seq_truncate(d.cache, d.seq, at), KVC_OK);
        assert_int_equal(kvc_seq_n_tokens(d.cache, d.seq), at);
        after = pd_read(&d, d.seq, 0, 0);
        for (size_t i = 0; i < before.n; i++)
            if (before.ordinals[i] < at)
                last = (int64_t)i;
        assert_int_equal(after.n, last + 1);
        assert_memory_equal(after.k, before.k, after.n * 16 * sizeof(float));
        assert_true(kvc_seq_next_position(d.cache, d.seq) >=
                    (last >= 0 ? before.ordinals[last] + 1 : 0));
        assert_true(kvc_seq_next_position(d.cache, d.seq) <= 130);
        pd_free(&before);
        pd_free(&after);
        pd_feed_text(&d, 70);
        pd_check_attention(&d, d.seq, 70, NULL);
        pd_close(&d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_image_is_pruned_to_its_rate_by_score),
        cmocka_unit_test(positions_stay_when_patches_go),
        cmocka_unit_test(what_must_stay_stays),
        cmocka_unit_test(sentences_stay_while_there_is_room),
        cmocka_unit_test(counts_of_rows_are_exact),
        cmocka_unit_test(blocks_stay_or_go_together),
        cmocka_unit_test(sealed_rows_keep_their_codes),
        cmocka_unit_test(strong_rows_stay_exact),
        cmocka_unit_test(forks_and_their_pages_are_left_alone),
        cmocka_unit_test(forced_tokens_beyond_the_rows_are_counted),
        cmocka_unit_test(forgotten_tokens_make_room_in_the_token_table),
        cmocka_unit_test(truncation_after_pruning_is_right),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
