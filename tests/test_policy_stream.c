/* Policies over time: streams without end, what a full cache drops, and that decisions depend
 * neither on the kernel table nor on the order of tasks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/policy_drive.h"
#include "support/random_input.h"
#include "support/tables.h"

#include "kvc/pool.h"

static struct pd d;

static kvc_cache_params stream_params(const kvc_policy *policy)
{
    kvc_cache_params p = pd_params();

    p.max_sequences = 1;
    p.max_tokens = 512;
    p.max_append = 64;
    p.max_hold_tokens = 0;
    p.recent_tokens = 32;
    p.precision.k = p.precision.v = KVC_INT8;
    p.on_full = policy;
    return p;
}

/* Adds tokens; false if the cache is full. */
static bool feed_some(const kvc_token *tokens, int n)
{
    float x[64 * 2 * 16];

    if (kvc_tokens_add(d.cache, d.seq, tokens, (size_t)n) != KVC_OK)
        return false;
    for (int layer = 0; layer < d.p.n_layers; layer++) {
        const size_t heads = (size_t)d.p.n_kv_heads;
        const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, (size_t)n, heads, 16);
        const kvc_view v = kvc_view_packed(x, KVC_DTYPE_F32, (size_t)n, heads, 8);

        for (size_t i = 0; i < (size_t)n * heads * 16; i++)
            x[i] = 2 * rng_unit(&d.rng);
        assert_int_equal(kvc_append(d.cache, d.seq, layer, &k, &v), KVC_OK);
    }
    return true;
}

static int64_t most_rows(void)
{
    int64_t most = 0;

    for (int j = 0; j < d.p.n_layers * d.p.n_kv_heads; j++) {
        const int64_t n = kvc_seq_n_rows(d.cache, d.seq, j / d.p.n_kv_heads, j % d.p.n_kv_heads);

        most = n > most ? n : most;
    }
    return most;
}

static void assert_ordinals(int layer, int head, const int64_t *want, size_t n)
{
    struct pd_rows rows = pd_read(&d, d.seq, layer, head);

    assert_int_equal(rows.n, n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(rows.ordinals[i], want[i]);
    pd_free(&rows);
}

/* Tokens of the long stream; fewer under sanitizers. */
static int n_steps = 20000;

static void streams_have_no_end(void **state)
{
    static const kvc_format formats[] = {KVC_INT8, KVC_F16, KVC_INT4};

    for (int scope = KVC_SCOPE_SHARED; scope <= KVC_SCOPE_HEAD; scope++) {
        const kvc_format format = formats[scope];
        kvc_policy policy = pd_policy();
        kvc_cache_params params;

        policy.scope = (kvc_scope)scope;
        policy.max_rows = 128;
        policy.last_tokens = 16;
        params = stream_params(&policy);
        params.precision.k = params.precision.v = format;
        pd_open(&d, best(state), params, 1 << 18);
        for (int i = 1; i <= n_steps; i++) {
            const bool fed = feed_some(NULL, 1);

            if (!fed)
                fail_msg("scope %d format %d: full at token %d, %d rows", scope, (int)format, i,
                         (int)most_rows());
            assert_true(most_rows() <= 128);
            assert_true(i < 128 || most_rows() > 128 - 128 / 16 - 1);
            assert_int_equal(kvc_seq_n_tokens(d.cache, d.seq), i);
            assert_int_equal(kvc_seq_next_position(d.cache, d.seq), i);
            if (i % 500 == 0) {
                pd_check_attention(&d, d.seq, 1, NULL);
                pd_stats(&d);
            } else if (i % 5 == 0) {
                pd_look(&d, 1);
            }
        }
        for (int j = 0; j < 4; j++) {
            struct pd_rows rows = pd_read(&d, d.seq, j / 2, j % 2);

            for (int64_t s = 0; s < 4; s++)
                assert_int_equal(rows.ordinals[s], s);
            for (size_t i = 0; i < 16; i++)
                assert_int_equal(rows.ordinals[rows.n - 1 - i], n_steps - 1 - (int)i);
            pd_free(&rows);
        }
        pd_close(&d);
    }
}

/* Pages of F16 wait where a window, or what is measured, is longer than what a policy leaves. */
static const struct waiting {
    int max_tokens, recent, online_pages, n_sequences, max_rows;
} waiting[] = {
    {128, 4096, 0, 1, 0}, {128, 16, 8, 1, 0},   {16, 16, 4, 1, 0},
    {1024, 512, 0, 6, 8}, {1024, 128, 4, 6, 8}, {512, 4096, 0, 2, 48},
};

static kvc_cache_params waiting_params(const struct waiting *w)
{
    kvc_cache_params p = stream_params(NULL);

    p.max_tokens = w->max_tokens;
    p.max_append = 4;
    p.recent_tokens = w->recent;
    p.online_pages = w->online_pages;
    p.max_sequences = w->n_sequences;
    p.transform = KVC_TRANSFORM_ROTATE_K;
    return p;
}

/* Tokens that a policy forgot no longer count in max_tokens: their pages must not outlive them. */
static void forgotten_tokens_leave_no_pages_that_wait(void **state)
{
    for (size_t i = 0; i < 2 * sizeof(waiting) / sizeof(*waiting); i++) {
        const struct waiting *w = &waiting[i / 2];
        const bool on_full = i % 2;
        kvc_policy policy = pd_policy();
        kvc_cache_params params = waiting_params(w);
        kvc_seq seqs[8];

        policy.source = KVC_SOURCE_AGE;
        policy.last_tokens = 4;
        policy.max_rows = on_full ? w->max_rows : w->max_rows + 8;
        params.on_full = on_full ? &policy : NULL;
        pd_open(&d, best(state), params, 1 << 20);
        seqs[0] = d.seq;
        for (int s = 1; s < w->n_sequences; s++)
            assert_int_equal(kvc_seq_create(d.cache, &seqs[s]), KVC_OK);
        for (int step = 0; step < 500 * w->n_sequences; step++) {
            d.seq = seqs[step % w->n_sequences];
            if (!feed_some(NULL, 4))
                fail_msg("case %zu is full at call %d", i, step);
            if (!on_full)
                assert_int_equal(kvc_cache_compress(d.cache, d.seq, &policy, NULL, NULL), KVC_OK);
        }
        d.seq = seqs[0];
        pd_check_attention(&d, d.seq, 1, NULL);
        pd_close(&d);
    }
}

/* Where the rows that stay lie in many pages that wait, these can use up their reserve: that is a
 * status, and rows that are removed make room. */
static void rows_in_many_pages_that_wait_fill_the_cache(void **state)
{
    static const struct waiting far = {512, 1 << 20, 0, 1, 0};
    static float scores[8192];
    kvc_policy policy = pd_policy();
    bool is_full = false;
    kvc_stats stats;

    for (size_t i = 0; i < sizeof(scores) / sizeof(*scores); i++)
        scores[i] = i % KVC_PAGE_TOKENS == 8;
    policy.source = KVC_SOURCE_CALLER;
    policy.scores = scores;
    policy.n_scores = sizeof(scores) / sizeof(*scores);
    policy.max_rows = 40;
    policy.last_tokens = 4;
    pd_open(&d, best(state), waiting_params(&far), 1 << 20);
    for (int step = 0; step < 1000 && !is_full; step++) {
        is_full = !feed_some(NULL, 4);
        if (!is_full)
            assert_int_equal(kvc_cache_compress(d.cache, d.seq, &policy, NULL, NULL), KVC_OK);
    }
    assert_true(is_full);
    stats = pd_stats(&d);
    assert_true(stats.n_pages_f16 > 0 && stats.n_pages_sealed == 0);
    assert_int_equal(kvc_tokens_add(d.cache, d.seq, NULL, 4), KVC_E_FULL);
    pd_check_attention(&d, d.seq, 1, NULL);
    assert_int_equal(kvc_seq_remove(d.cache, d.seq, 0, 256), KVC_OK);
    assert_true(pd_stats(&d).n_pages_f16 < stats.n_pages_f16);
    assert_true(feed_some(NULL, 4));
    pd_check_attention(&d, d.seq, 1, NULL);
    pd_close(&d);
}

static void chunks_of_any_size_stream(void **state)
{
    kvc_policy policy = pd_policy();
    uint64_t rng = 5;
    int64_t n = 0;

    policy.max_rows = 100;
    policy.last_tokens = 8;
    pd_open(&d, best(state), stream_params(&policy), 1 << 18);
    for (int i = 0; i < 600; i++) {
        const int add = (int)rng_below(&rng, 65);

        n += add;
        assert_true(feed_some(NULL, add));
        assert_true(most_rows() <= 100);
        assert_int_equal(kvc_seq_next_position(d.cache, d.seq), n);
        if (add > 0)
            pd_check_attention(&d, d.seq, add < 5 ? add : 5, NULL);
    }
    pd_close(&d);
}

/* Without max_rows rows go only when nothing else fits. */
static void rows_go_only_when_the_cache_is_full(void **state)
{
    static const size_t extra[] = {0, 1 << 13, 1 << 15, 1 << 17, 1 << 19};

    for (int i = 0; i < 5; i++)
        for (int scope = KVC_SCOPE_SHARED; scope <= KVC_SCOPE_HEAD; scope += 2) {
            kvc_policy policy = pd_policy();
            int64_t fits = 0;

            policy.scope = (kvc_scope)scope;
            policy.last_tokens = 16;
            pd_open(&d, best(state), stream_params(NULL), extra[i]);
            while (feed_some(NULL, 1)) {
                pd_look(&d, 1);
                fits++;
            }
            pd_close(&d);
            pd_open(&d, best(state), stream_params(&policy), extra[i]);
            for (int64_t n = 1; n <= fits + 500; n++) {
                if (!feed_some(NULL, 1))
                    fail_msg("extra %zu scope %d: full at token %lld with %d rows, %lld fit",
                             extra[i], scope, (long long)n, (int)most_rows(), (long long)fits);
                pd_look(&d, 1);
                if (n <= fits && most_rows() != n)
                    fail_msg("%d rows at token %lld, %lld fit", (int)most_rows(), (long long)n,
                             (long long)fits);
                assert_true(n <= fits || most_rows() < n);
                if (n % 100 == 0)
                    pd_check_attention(&d, d.seq, 1, NULL);
            }
            print_message("%lld tokens fit, %d rows at last\n", (long long)fits, (int)most_rows());
            pd_close(&d);
        }
}

/* Rows that are spread over all pages can still be moved together when no page is free. Pages of
 * moved rows are a seventh larger at these head sizes, so at least that many must go. */
static void a_full_cache_drops_little_at_a_time(void **state)
{
    for (int source = KVC_SOURCE_PROBES; source <= KVC_SOURCE_AGE; source += 3) {
        kvc_policy policy = pd_policy();
        kvc_cache_params params;
        int64_t before = 0, most = 0, least = INT64_MAX;

        policy.source = (kvc_score_source)source;
        params = stream_params(&policy);
        params.max_tokens = 4096;
        params.max_append = 8;
        pd_open(&d, best(state), params, 1 << 17);
        for (int i = 0; i < 500; i++) {
            assert_true(feed_some(NULL, 8));
            pd_look(&d, 8);
            const int64_t rows = most_rows();
            if (rows < before + 8 && rows < least)
                least = rows;
            most = rows > most ? rows : most;
            before = rows;
        }
        assert_true(least < INT64_MAX); /* rows did go */
        if (least * 10 < most * 4)
            fail_msg("source %d: %lld rows of %lld are left", source, (long long)least,
                     (long long)most);
        pd_close(&d);
    }
}

/* fault C1: the next position is not the number of rows. */
static void the_next_position_survives_eviction(void **state)
{
    kvc_policy policy = pd_policy();
    struct pd_rows rows;

    policy.max_rows = 32;
    policy.last_tokens = 8;
    pd_open(&d, best(state), stream_params(&policy), 1 << 18);
    assert_true(feed_some(NULL, 64));
    assert_int_equal(kvc_seq_next_position(d.cache, d.seq), 64);
    pd_look(&d, 16);
    pd_compress(&d, &policy);
    assert_int_equal(most_rows(), 32);
    assert_int_equal(kvc_seq_next_position(d.cache, d.seq), 64);
    for (int i = 0; i < 200; i++) {
        kvc_token token;

        assert_true(feed_some(NULL, 1));
        assert_int_equal(kvc_seq_next_position(d.cache, d.seq), 65 + i);
        assert_int_equal(kvc_seq_read_tokens(d.cache, d.seq, 64 + i, 1, &token), KVC_OK);
        assert_int_equal(token.t, 64 + i);
        pd_look(&d, 1);
        assert_true(most_rows() <= 32);
    }
    rows = pd_read(&d, d.seq, 1, 1); /* ascending: pd_read() */
    for (size_t i = 0; i < rows.n; i++) {
        kvc_token token;

        assert_int_equal(kvc_seq_read_tokens(d.cache, d.seq, rows.ordinals[i], 1, &token), KVC_OK);
        assert_int_equal(token.t, rows.ordinals[i]);
    }
    pd_free(&rows);
    pd_close(&d);
}

/* fault C2 (a): a new token is not evicted at birth. (c): the budget holds in decoding too. */
static void new_tokens_stay_and_the_budget_holds(void **state)
{
    static const float scores[] = {10, 6, 5, 4};
    static const int64_t want[] = {0, 1, 2, 4}, then[] = {0, 1, 2, 5};
    kvc_policy policy = pd_policy();
    kvc_cache_params params;

    policy.source = KVC_SOURCE_CALLER;
    policy.scores = scores;
    policy.n_scores = 4;
    policy.max_rows = 4;
    policy.last_tokens = 1;
    params = stream_params(&policy);
    params.sink_tokens = 0;
    pd_open(&d, best(state), params, 1 << 18);
    assert_true(feed_some(NULL, 4));
    assert_true(feed_some(NULL, 1));
    assert_ordinals(0, 0, want, 4);
    assert_true(feed_some(NULL, 1));
    assert_ordinals(1, 1, then, 4);
    pd_close(&d);

    policy = pd_policy();
    policy.max_rows = 32;
    policy.last_tokens = 1;
    pd_open(&d, best(state), stream_params(&policy), 1 << 18);
    for (int i = 0; i < 100; i++) {
        assert_true(feed_some(NULL, 1));
        pd_look(&d, 1);
        assert_true(most_rows() <= 32);
    }
    pd_close(&d);
}

/* fault C2 (b): with decay, a mass of long ago counts less than a newer one. */
static void old_masses_decay(void **state)
{
    for (int decays = 0; decays < 2; decays++) {
        kvc_cache_params params = stream_params(NULL);
        const int64_t want = decays ? 1 : 0;
        float k[2 * 16] = {0}, zero[16] = {0}, out[8];
        const kvc_view vo = kvc_view_packed(out, KVC_DTYPE_F32, 1, 1, 8);
        kvc_policy policy = pd_policy();
        struct pd_rows rows;
        kvc_attend_options o;
        double mass[2] = {0};

        params.n_layers = params.n_heads = params.n_kv_heads = 1;
        params.sink_tokens = 0;
        params.score_mode = KVC_SCORE_TOKEN;
        params.score_decay = decays ? 0.5f : 1.0f;
        pd_open(&d, best(state), params, 1 << 18);
        k[0] = k[16 + 1] = 20;
        pd_feed(&d, NULL, 2, k, NULL);
        kvc_attend_options_default(d.cache, &o);
        o.accumulate = true;
        for (int i = 0; i < 9; i++) { /* six looks at token 0, then three at token 1 */
            float q[16] = {0};
            const kvc_view vq = kvc_view_packed(q, KVC_DTYPE_F32, 1, 1, 16);

            pd_feed(&d, NULL, 1, zero, NULL);
            q[i < 6 ? 0 : 1] = 20;
            assert_int_equal(kvc_attend(d.cache, d.seq, 0, &vq, &o, &vo, NULL), KVC_OK);
            for (int t = 0; t < 2; t++)
                mass[t] = mass[t] * (double)params.score_decay + ((i < 6) == (t == 0));
        }
        rows = pd_read(&d, d.seq, 0, 0);
        for (int t = 0; t < 2; t++)
            if (!(fabs((double)rows.masses[t] - mass[t]) < 1e-4))
                fail_msg("decay %g: mass of token %d is %g, not %g", (double)params.score_decay, t,
                         (double)rows.masses[t], mass[t]);
        pd_free(&rows);
        policy.source = KVC_SOURCE_SUMS;
        policy.max_rows = 1;
        pd_compress(&d, &policy);
        assert_ordinals(0, 0, &want, 1);
        pd_close(&d);
    }
}

/* fault C3: after rows went, the mask compares ordinals, not places. */
static void causality_is_by_ordinals(void **state)
{
    static const float scores[] = {1, 1, 0, 0, 0, 1, 0, 1};
    static const int64_t want[] = {0, 1, 5, 7};
    kvc_cache_params params = stream_params(NULL);
    kvc_policy policy = pd_policy();

    params.sink_tokens = 0;
    pd_open(&d, best(state), params, 1 << 18);
    assert_true(feed_some(NULL, 8));
    policy.source = KVC_SOURCE_CALLER;
    policy.scores = scores;
    policy.n_scores = 8;
    policy.max_rows = 4;
    pd_compress(&d, &policy);
    assert_ordinals(0, 1, want, 4);
    pd_check_attention(&d, d.seq, 8, NULL);
    pd_close(&d);
}

/* fault C4: by age, a cache holds exactly the newest tokens and the sinks, however they came. */
static void by_age_the_window_is_exact(void **state)
{
    static const int chunks[] = {64, 64, 64, 64, 44, 1, 1, 1, 1, 1, 7, 63, 1, 64, 64, 2};

    for (int sinks = 0; sinks <= 4; sinks += 4)
        for (int recent = 0; recent <= 64; recent += 32) {
            kvc_policy policy = pd_policy();
            kvc_cache_params params;
            int64_t n = 0;

            policy.source = KVC_SOURCE_AGE;
            policy.max_rows = 128;
            params = stream_params(&policy);
            params.sink_tokens = sinks;
            params.recent_tokens = recent;
            pd_open(&d, best(state), params, 1 << 18);
            for (size_t c = 0; c < sizeof(chunks) / sizeof(*chunks); c++) {
                int64_t want[128];
                int64_t rows;

                assert_true(feed_some(NULL, chunks[c]));
                n += chunks[c];
                rows = n < 128 ? n : 128;
                for (int64_t i = 0; i < rows; i++)
                    want[i] = n <= 128 || i < sinks ? i : n - 128 + i;
                for (int j = 0; j < 4; j++)
                    assert_ordinals(j / 2, j % 2, want, (size_t)rows);
                pd_check_attention(&d, d.seq, chunks[c], NULL);
            }
            pd_close(&d);
        }
}

/* fault C7, without padding: a neighbour changes no decision. */
static void sequences_do_not_influence_each_other(void **state)
{
    uint64_t alone = 0;

    for (int both = 0; both < 2; both++) {
        kvc_policy policy = pd_policy();
        kvc_cache_params params;
        struct pd other;

        policy.max_rows = 60;
        policy.last_tokens = 4;
        params = stream_params(&policy);
        params.max_sequences = 2;
        params.max_tokens = 1024;
        pd_open(&d, best(state), params, 1 << 20);
        other = d;
        other.rng = 77;
        if (both)
            assert_int_equal(kvc_seq_create(d.cache, &other.seq), KVC_OK);
        for (int i = 0; i < 300; i++) {
            if (both) {
                pd_feed_text(&other, 2);
                pd_look(&other, 2);
            }
            assert_true(feed_some(NULL, 1));
            pd_look(&d, 1);
        }
        if (both)
            assert_true(pd_digest(&d, d.seq) == alone);
        alone = pd_digest(&d, d.seq);
        pd_close(&d);
    }
}

/* fault A4: each KV head keeps what its own query heads look at. */
static void grouped_heads_keep_their_own_tokens(void **state)
{
    kvc_policy policy = pd_policy();
    kvc_cache_params params;
    float k[12 * 2 * 16] = {0}, q[4 * 16] = {0}, out[4 * 8];
    const kvc_view vq = kvc_view_packed(q, KVC_DTYPE_F32, 1, 4, 16);
    const kvc_view vo = kvc_view_packed(out, KVC_DTYPE_F32, 1, 4, 8);

    policy.scope = KVC_SCOPE_HEAD;
    policy.max_rows = 4;
    policy.last_tokens = 2;
    params = stream_params(&policy);
    params.n_layers = 1;
    params.sink_tokens = 0;
    pd_open(&d, best(state), params, 1 << 18);
    for (int t = 0; t < 12; t++)
        for (int h = 0; h < 2; h++)
            k[(t * 2 + h) * 16 + t] = 8;
    for (int h = 0; h < 4; h++)
        q[h * 16 + (h < 2 ? 1 : 2)] = 8;
    pd_feed(&d, NULL, 4, k, NULL);
    for (int t = 4; t < 12; t++) {
        assert_int_equal(kvc_attend(d.cache, d.seq, 0, &vq, NULL, &vo, NULL), KVC_OK);
        pd_feed(&d, NULL, 1, k + t * 32, NULL);
        for (int h = 0; h < 2; h++) {
            struct pd_rows rows = pd_read(&d, d.seq, 0, h);

            assert_int_equal(rows.n, 4);
            assert_true(pd_find(&rows, h == 0 ? 1 : 2) >= 0);
            pd_free(&rows);
        }
    }
    pd_close(&d);
}

static void text_is_never_pruned_as_an_image(void **state)
{
    kvc_cache_params params = stream_params(NULL);
    kvc_report report;
    kvc_policy p;

    params.max_merge_tokens = 64;
    pd_open(&d, best(state), params, 1 << 20);
    for (int i = 0; i < 5; i++)
        assert_true(feed_some(NULL, 60));
    pd_look(&d, 16);
    assert_int_equal(kvc_policy_preset("extreme", &p), KVC_OK);
    report = pd_compress(&d, &p);
    assert_true(report.visual_rate == 0.0f || report.visual_rate == 0.65f);
    for (int j = 0; j < 4; j++)
        assert_int_equal(kvc_seq_n_rows(d.cache, d.seq, j / 2, j % 2), 300);
    pd_check_attention(&d, d.seq, 5, NULL);
    pd_close(&d);
}

/* What must stay is not dropped to make room. */
static void kept_tokens_fill_the_cache(void **state)
{
    kvc_policy policy = pd_policy();
    int n = 0;

    pd_open(&d, best(state), stream_params(&policy), 0);
    for (;;) {
        kvc_token token = pd_text(n);
        struct pd_state before = pd_save(&d);

        token.flags = KVC_TOKEN_KEEP;
        if (!feed_some(&token, 1)) {
            pd_assert_same(&d, &before); /* no row could go */
            break;
        }
        assert_int_equal(most_rows(), ++n);
        assert_true(n <= 512);
    }
    assert_true(n > 100);
    pd_check_attention(&d, d.seq, 1, NULL);
    pd_close(&d);
}

static kvc_policy random_policy(uint64_t *rng)
{
    static float scores[4096];
    kvc_policy p = pd_policy();

    for (int i = 0; i < 4096; i++)
        scores[i] = (float)rng_below(rng, 50);
    p.scores = scores;
    p.n_scores = rng_below(rng, 4097);
    p.source = rng_below(rng, 2) ? KVC_SOURCE_CALLER : KVC_SOURCE_PROBES;
    if (rng_below(rng, 4) == 0)
        p.source = KVC_SOURCE_SUMS;
    p.scope = (kvc_scope)rng_below(rng, 3);
    p.visual_rate = (float)rng_below(rng, 5) / 5;
    p.gate = rng_below(rng, 4) == 0;
    p.keep_min = (int32_t)rng_below(rng, 10);
    p.coverage = (int32_t)rng_below(rng, 4);
    p.sink_factor = rng_below(rng, 2) ? 3 : 0;
    p.merge_rounds = (int32_t)rng_below(rng, 4);
    p.merging.force_quarter = rng_below(rng, 2) == 0;
    p.merging.weights = (kvc_merge_weights)rng_below(rng, 2);
    p.recode = rng_below(rng, 2) == 0;
    p.row_rate = rng_below(rng, 3) == 0 ? 0.2f : 0;
    p.max_rows = rng_below(rng, 3) == 0 ? 40 + (int32_t)rng_below(rng, 200) : 0;
    p.budget.mode = (kvc_budget_mode)rng_below(rng, 4);
    p.block = 1 + (int32_t)rng_below(rng, 3) * 7;
    p.last_tokens = (int32_t)rng_below(rng, 20);
    p.set_precision = rng_below(rng, 2) == 0;
    p.precision.k = (kvc_format)rng_below(rng, 3);
    p.precision.v = (kvc_format)rng_below(rng, 3);
    p.precision.k_scale = (kvc_scale)rng_below(rng, 3);
    p.precision.v_scale = (kvc_scale)rng_below(rng, 2);
    p.heavy_share = rng_below(rng, 2) ? 0.3f : 0;
    p.max_rel_err = rng_below(rng, 5) == 0 ? 0.4f : 0;
    return p;
}

/* Rows of every head: sizes add up to no more than the tokens, attention is that of the rows. */
static void check_sequence(struct pd *s)
{
    for (int j = 0; j < 4; j++) {
        struct pd_rows rows = pd_read(s, s->seq, j / 2, j % 2);
        int64_t sum = 0;

        for (size_t i = 0; i < rows.n; i++)
            sum += rows.sizes[i];
        assert_true(sum <= kvc_seq_n_tokens(s->cache, s->seq));
        pd_free(&rows);
    }
    pd_stats(s);
}

static void random_calls(kvc_ctx *ctx, uint64_t seed)
{
    static const kvc_scale scales[] = {KVC_SCALE_TOKEN, KVC_SCALE_HEAD, KVC_SCALE_CHANNEL};
    static float mean[2 * 2 * 16], scale[2 * 2 * 16];
    uint64_t rng = seed;
    kvc_policy full = random_policy(&rng);
    kvc_cache_params params;
    struct pd s[2];
    bool alive[2] = {true, false};

    full.max_rows = rng_below(&rng, 2) ? 150 : 0;
    params = stream_params(rng_below(&rng, 2) ? &full : NULL);
    params.max_sequences = 2;
    params.max_tokens = 2048;
    params.max_hold_tokens = 200;
    params.max_merge_tokens = 60;
    params.score_mode = KVC_SCORE_TOKEN;
    params.recent_tokens = (int32_t)rng_below(&rng, 3) * 20;
    params.precision.k = (kvc_format)rng_below(&rng, 3);
    params.precision.v = (kvc_format)rng_below(&rng, 3);
    params.precision.k_scale = scales[rng_below(&rng, 3)];
    if (rng_below(&rng, 2))
        random_transform(&rng, &params, mean, scale);
    pd_open(&s[0], ctx, params, rng_below(&rng, 2) ? 1 << 18 : 1 << 21);
    s[0].rng = seed;
    s[1] = s[0];
    for (int step = 0; step < 150; step++) {
        const int which = alive[1] && rng_below(&rng, 2) ? 1 : 0;
        int64_t n = kvc_seq_n_tokens(s[which].cache, s[which].seq);
        const size_t op = rng_below(&rng, 12);

        d = s[which];
        if (op < 4) {
            kvc_token tokens[48];
            const int n_new = 1 + (int)rng_below(&rng, 48);

            for (int i = 0; i < n_new; i++)
                tokens[i] =
                    pd_patch((int32_t)n, i / 8, i % 8, kvc_seq_next_position(d.cache, d.seq));
            feed_some(op == 0 ? tokens : NULL, n_new);
        } else if (op < 7) {
            const kvc_policy p = random_policy(&rng);
            const kvc_status status = kvc_cache_compress(d.cache, d.seq, &p, NULL, NULL);

            assert_true(status == KVC_OK || status == KVC_E_FULL);
        } else if (op == 7) {
            kvc_seq_truncate(d.cache, d.seq, n - (int64_t)rng_below(&rng, (size_t)n / 4 + 1));
        } else if (op == 8 && n > 0) {
            const int64_t first = (int64_t)rng_below(&rng, (size_t)n);

            kvc_seq_remove(d.cache, d.seq, first,
                           first + (int64_t)rng_below(&rng, (size_t)(n - first + 1)));
        } else if (op == 9) {
            assert_int_equal(kvc_seq_hold(d.cache, d.seq), KVC_OK);
        } else if (op == 10) {
            if (alive[1])
                assert_int_equal(kvc_seq_destroy(s[1].cache, s[1].seq), KVC_OK);
            alive[1] = kvc_seq_fork(d.cache, s[0].seq, &s[1].seq) == KVC_OK;
        } else {
            feed_some(NULL, 1);
        }
        s[which].rng = d.rng;
        n = kvc_seq_n_tokens(d.cache, d.seq);
        for (int i = 0; i < 2; i++)
            if (alive[i])
                check_sequence(&s[i]);
        if (feed_some(NULL, 2)) {
            kvc_attend_options o;

            kvc_attend_options_default(d.cache, &o);
            o.accumulate = true;
            pd_check_attention(&d, d.seq, 2, &o);
        }
        s[which].rng = d.rng;
    }
    d = s[0];
    pd_close(&d);
}

static void any_order_of_calls_is_right(void **state)
{
    for (uint64_t seed = 1; seed <= (uint64_t)n_steps / 500; seed++)
        random_calls(best(state), seed);
}

static void in_order(void *user, size_t n, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    for (size_t i = 0; i < n; i++)
        task(arg, i);
}

static void reversed(void *user, size_t n, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    for (size_t i = n; i-- > 0;)
        task(arg, i);
}

/* Images and text, compressions and a full cache; what is left of it. */
static uint64_t everything(kvc_ctx *ctx, int scope)
{
    kvc_policy policy = pd_policy(), p = pd_policy();
    kvc_cache_params params;
    uint64_t digest;

    policy.max_rows = 150;
    policy.scope = (kvc_scope)scope;
    params = stream_params(&policy);
    params.max_merge_tokens = 128;
    params.max_hold_tokens = 400;
    params.max_append = 400;
    params.max_tokens = 1024;
    pd_open(&d, ctx, params, 1 << 20);
    d.q_scale = 2;
    p.scope = (kvc_scope)scope;
    p.visual_rate = 0.3f;
    p.coverage = 3;
    p.centre = 0.1f;
    p.sink_factor = 3;
    p.merge_rounds = 2;
    p.merging.force_quarter = true;
    p.merging.weights = KVC_MERGE_ATTENTION;
    p.set_precision = true;
    p.precision.k = p.precision.v = KVC_INT4;
    p.heavy_share = 0.2f;
    p.max_rel_err = 0.5f;
    for (int turn = 0; turn < 3; turn++) {
        kvc_token tokens[96];

        assert_int_equal(kvc_seq_hold(d.cache, d.seq), KVC_OK);
        for (int i = 0; i < 96; i++)
            tokens[i] = pd_patch(turn, i / 12, i % 12, kvc_seq_next_position(d.cache, d.seq));
        assert_true(feed_some(NULL, 20));
        assert_true(feed_some(tokens, 50));
        assert_true(feed_some(tokens + 50, 46));
        assert_true(feed_some(NULL, 25));
        pd_look(&d, 16);
        pd_compress(&d, &p);
        for (int i = 0; i < 60; i++) {
            assert_true(feed_some(NULL, 1));
            pd_look(&d, 1);
        }
        pd_check_attention(&d, d.seq, 3, NULL);
    }
    digest = pd_digest(&d, d.seq);
    pd_close(&d);
    return digest;
}

static void decisions_depend_on_neither_table_nor_order(void **state)
{
    const struct tables *t = *state;
    kvc_pool *pool;

    assert_int_equal(kvc_pool_create(3, &pool), KVC_OK);
    for (int scope = KVC_SCOPE_SHARED; scope <= KVC_SCOPE_HEAD; scope++) {
        const uint64_t first = everything(t->ctx[0], scope);

        for (size_t i = 1; i < t->n; i++)
            assert_true(everything(t->ctx[i], scope) == first);
        for (int order = 0; order < 3; order++) {
            static kvc_parallel_for_fn *const fns[] = {in_order, reversed, kvc_pool_parallel_for};
            const kvc_ctx_params params = {
                .struct_size = sizeof(params), .parallel_for = fns[order], .parallel_user = pool};
            kvc_ctx *ctx;

            assert_int_equal(kvc_ctx_create(&params, &ctx), KVC_OK);
            assert_true(everything(ctx, scope) == first);
            kvc_ctx_destroy(ctx);
        }
    }
    kvc_pool_destroy(pool);
}

struct source {
    bool locked;
};

static void *source_alloc(void *user, size_t size, size_t align)
{
    const struct source *source = user;

    assert_false(source->locked);
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void source_free(void *user, void *ptr)
{
    const struct source *source = user;

    assert_false(source->locked);
    free(ptr);
}

static void nothing_is_allocated_after_create(void **state)
{
    struct source source = {false};
    const kvc_ctx_params ctx_params = {.struct_size = sizeof(ctx_params),
                                       .allocator = {source_alloc, source_free, &source}};
    kvc_policy policy = pd_policy(), p;
    kvc_cache_params params;
    float scores[512];
    kvc_ctx *ctx;
    kvc_map *map;
    size_t n;

    (void)state;
    policy.max_rows = 100;
    params = stream_params(&policy);
    params.max_merge_tokens = 64;
    assert_int_equal(kvc_ctx_create(&ctx_params, &ctx), KVC_OK);
    pd_open(&d, ctx, params, 1 << 20);
    assert_int_equal(kvc_map_create(d.cache, 512, &map), KVC_OK);
    source.locked = true;
    pd_feed_image(&d, 0, 8, 8);
    assert_true(feed_some(NULL, 30));
    pd_look(&d, 16);
    assert_int_equal(kvc_policy_preset("extreme", &p), KVC_OK);
    p.gate = true;
    p.max_rel_err = 0.2f;
    p.recode = true;
    p.keep_min = 0;
    assert_int_equal(kvc_cache_compress(d.cache, d.seq, &p, NULL, map), KVC_OK);
    for (int i = 0; i < 100; i++) {
        assert_true(feed_some(NULL, 1));
        pd_look(&d, 1);
    }
    assert_int_equal(kvc_seq_score_rows(d.cache, d.seq, 0, 0, 512, scores, &n), KVC_OK);
    source.locked = false;
    kvc_map_destroy(map);
    pd_close(&d);
    kvc_ctx_destroy(ctx);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_next_position_survives_eviction),
        cmocka_unit_test(new_tokens_stay_and_the_budget_holds),
        cmocka_unit_test(old_masses_decay),
        cmocka_unit_test(causality_is_by_ordinals),
        cmocka_unit_test(by_age_the_window_is_exact),
        cmocka_unit_test(sequences_do_not_influence_each_other),
        cmocka_unit_test(grouped_heads_keep_their_own_tokens),
        cmocka_unit_test(text_is_never_pruned_as_an_image),
        cmocka_unit_test(forgotten_tokens_leave_no_pages_that_wait),
        cmocka_unit_test(rows_in_many_pages_that_wait_fill_the_cache),
        cmocka_unit_test(chunks_of_any_size_stream),
        cmocka_unit_test(rows_go_only_when_the_cache_is_full),
        cmocka_unit_test(a_full_cache_drops_little_at_a_time),
        cmocka_unit_test(kept_tokens_fill_the_cache),
        cmocka_unit_test(any_order_of_calls_is_right),
        cmocka_unit_test(streams_have_no_end),
        cmocka_unit_test(decisions_depend_on_neither_table_nor_order),
        cmocka_unit_test(nothing_is_allocated_after_create),
    };

    if (argc > 1)
        n_steps = atoi(argv[1]);
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
