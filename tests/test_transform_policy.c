/* Policies and transforms: what is kept, merged and dropped is decided on the rows that came. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/policy_drive.h"
#include "support/tables.h"

enum {
    LAYERS = 2,
    KV = 2,
    DK = 16,
    DV = 8,
    MAX_N = 512,
    BOTH = KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_ROTATE_V
};

/* What came: [layer][token][kv head][channel]. */
static float k_rows[LAYERS * MAX_N * KV * DK], v_rows[LAYERS * MAX_N * KV * DV];
static float mean[LAYERS * KV * DK], scale[LAYERS * KV * DK];
/* The same calls, without transforms and with them. */
static struct pd plain, turned;

static void make_vectors(uint64_t *rng)
{
    for (int i = 0; i < LAYERS * KV * DK; i++) {
        mean[i] = i % DK == 3 ? 6.0f : 0.3f * rng_unit(rng);
        scale[i] = i % DK == 5 ? 4.0f : 0.7f + 0.3f * rng_unit(rng);
    }
}

/* K around the means, V around 0. */
static void make_rows(int n, uint64_t *rng)
{
    for (int i = 0; i < LAYERS * n * KV * DK; i++) {
        const int at = (i / (n * KV * DK) * KV + i / DK % KV) * DK + i % DK;

        k_rows[i] = mean[at] + scale[at] * rng_unit(rng);
    }
    for (int i = 0; i < LAYERS * n * KV * DV; i++)
        v_rows[i] = rng_unit(rng);
}

static kvc_cache_params with_vectors(kvc_cache_params p)
{
    p.transform = BOTH;
    p.k_mean = mean;
    p.k_scale = scale;
    return p;
}

static kvc_cache_params with_pages(kvc_cache_params p, int32_t pages)
{
    p.transform = BOTH;
    p.online_pages = pages;
    return p;
}

static void open_both(kvc_ctx *ctx, kvc_cache_params p)
{
    pd_open(&plain, ctx, p, 1 << 21);
    pd_open(&turned, ctx, with_vectors(p), 1 << 21);
}

static void feed_both(const kvc_token *tokens, int n)
{
    pd_feed(&plain, tokens, n, k_rows, v_rows);
    pd_feed(&turned, tokens, n, k_rows, v_rows);
}

static void look_both(int n_q)
{
    pd_look(&plain, n_q);
    pd_look(&turned, n_q);
}

static void close_both(void)
{
    pd_close(&plain);
    pd_close(&turned);
}

static void assert_near(const float *got, const float *want, size_t n, double tolerance,
                        const char *what, int64_t ordinal)
{
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - (double)want[i]) <= tolerance))
            fail_msg("%s of ordinal %lld [%zu] is %.9g, not %.9g", what, (long long)ordinal, i,
                     (double)got[i], (double)want[i]);
}

/* The same rows of the same tokens, with the same biases. Halves of K' of norm about 6 and of K of
 * up to 8 are at most 2^-8 apart, times scales of up to 4. */
static void assert_same_rows(double tolerance)
{
    for (int j = 0; j < LAYERS * KV; j++) {
        struct pd_rows a = pd_read(&plain, plain.seq, j / KV, j % KV);
        struct pd_rows b = pd_read(&turned, turned.seq, j / KV, j % KV);

        assert_int_equal(a.n, b.n);
        for (size_t i = 0; i < a.n; i++) {
            assert_int_equal(a.ordinals[i], b.ordinals[i]);
            assert_int_equal(a.sizes[i], b.sizes[i]);
            assert_near(&b.biases[i], &a.biases[i], 1, 1e-6, "bias", a.ordinals[i]);
            assert_near(b.k + i * DK, a.k + i * DK, DK, tolerance, "K", a.ordinals[i]);
            assert_near(b.v + i * DV, a.v + i * DV, DV, tolerance, "V", a.ordinals[i]);
        }
        pd_free(&a);
        pd_free(&b);
    }
}

static void image_of(kvc_token *tokens, int n, int n_text)
{
    for (int i = 0; i < n; i++)
        tokens[i] =
            i < n_text ? pd_text(i) : pd_patch(0, (i - n_text) / 8, (i - n_text) % 8, n_text);
}

/* Scores of the caller choose; everything else about the rows stays. */
static void pruning_leaves_the_same_rows(void **state)
{
    const struct tables *tables = *state;
    static float scores[MAX_N];
    uint64_t rng = 1;

    make_vectors(&rng);
    make_rows(200, &rng);
    for (int i = 0; i < 200; i++)
        scores[i] = (float)rng_below(&rng, 1000);
    for (size_t t = 0; t < tables->n; t++)
        for (int scope = KVC_SCOPE_SHARED; scope <= KVC_SCOPE_HEAD; scope++) {
            kvc_policy policy = pd_policy();
            kvc_token tokens[200];
            kvc_report a, b;

            policy.source = KVC_SOURCE_CALLER;
            policy.scope = (kvc_scope)scope;
            policy.scores = scores;
            policy.n_scores = 200;
            policy.visual_rate = 0.4f;
            policy.row_rate = 0.3f;
            open_both(tables->ctx[t], pd_params());
            image_of(tokens, 200, 100);
            feed_both(tokens, 200);
            look_both(16);
            a = pd_compress(&plain, &policy);
            b = pd_compress(&turned, &policy);
            assert_true(kvc_seq_n_rows(plain.cache, plain.seq, 0, 0) < 150);
            assert_same_rows(0.02);
            assert_int_equal(a.n_pages_sealed, b.n_pages_sealed);
            pd_check_attention(&turned, turned.seq, 5, NULL);
            close_both();
        }
}

/* Attention masses of the kept queries, in float64 from what is read back. A softcap sees whole
 * logits, so that in attention a shift that is forgotten or comes late shows. */
static void probes_score_the_rows_that_came(void **state)
{
    const struct tables *tables = *state;
    static const float softcaps[] = {0.0f, 2.0f};
    uint64_t rng = 2;

    make_vectors(&rng);
    make_rows(150, &rng);
    for (size_t t = 0; t < tables->n; t++)
        for (int online = 0; online < 3; online++) {
            kvc_cache_params p = pd_params();

            pd_open(&turned, tables->ctx[t], online ? with_pages(p, 3 - online) : with_vectors(p),
                    1 << 21);
            pd_feed(&turned, NULL, 150, k_rows, v_rows);
            pd_look(&turned, 16);
            assert_int_equal(kvc_seq_settle(turned.cache, turned.seq), KVC_OK);
            for (int j = 0; j < LAYERS * KV; j++) {
                static double want[MAX_N];
                static float got[MAX_N];
                size_t n;

                pd_probe_scores(&turned, turned.seq, j / KV, j % KV, want);
                assert_int_equal(
                    kvc_seq_score_rows(turned.cache, turned.seq, j / KV, j % KV, MAX_N, got, &n),
                    KVC_OK);
                assert_int_equal(n, 150);
                for (size_t i = 0; i < n; i++)
                    assert_true(fabs((double)got[i] - want[i]) <= 1e-4 * want[i] + 1e-7);
            }
            for (int c = 0; c < 2; c++) {
                kvc_attend_options o;

                kvc_attend_options_default(turned.cache, &o);
                o.softcap = softcaps[c];
                pd_check_attention(&turned, turned.seq, 16, &o);
            }
            pd_close(&turned);
        }
}

/* Tokens that are looked at much more than others stay under both. */
static void probes_keep_the_same_tokens(void **state)
{
    static double masses[LAYERS * KV][MAX_N];
    kvc_policy policy = pd_policy();
    uint64_t rng = 3;

    make_vectors(&rng);
    make_rows(200, &rng);
    policy.scope = KVC_SCOPE_HEAD;
    policy.row_rate = 0.5f;
    open_both(best(state), pd_params());
    plain.q_scale = turned.q_scale = 3;
    feed_both(NULL, 200);
    look_both(16);
    for (int j = 0; j < LAYERS * KV; j++)
        pd_probe_scores(&plain, plain.seq, j / KV, j % KV, masses[j]);
    pd_compress(&plain, &policy);
    pd_compress(&turned, &policy);
    for (int j = 0; j < LAYERS * KV; j++) {
        struct pd_rows a = pd_read(&plain, plain.seq, j / KV, j % KV);
        struct pd_rows b = pd_read(&turned, turned.seq, j / KV, j % KV);
        double least = INFINITY;
        int same = 0;

        assert_int_equal(a.n, b.n);
        for (size_t i = 4; i < a.n; i++)
            least = fmin(least, masses[j][a.ordinals[i]]);
        for (size_t i = 0; i < a.n; i++) {
            if (pd_find(&b, a.ordinals[i]) >= 0)
                same++;
            else /* only near the border: halves round otherwise */
                assert_true(masses[j][a.ordinals[i]] < least * 1.05);
        }
        assert_true(same >= (int)a.n - 3);
        pd_free(&a);
        pd_free(&b);
    }
    close_both();
}

/* An offset that all keys share makes them alike; without it they are not. */
static void tokens_merge_by_the_keys_that_came(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 4;

    make_vectors(&rng);
    make_rows(100, &rng);
    for (size_t t = 0; t < tables->n; t++)
        for (int share = 0; share < 2; share++) {
            kvc_cache_params p = pd_params();
            kvc_policy policy = pd_policy();
            kvc_token tokens[100];
            kvc_report a = {.struct_size = sizeof(a)}, b = a;
            kvc_layer_report layers[2][LAYERS];
            kvc_attend_options o;

            p.max_merge_tokens = 100;
            policy.scope = (kvc_scope)(share ? KVC_SCOPE_SHARED : KVC_SCOPE_HEAD);
            policy.merge_rounds = 2;
            policy.merging.tau = 0.9f;
            policy.merging.max_share = 0.5f;
            a.layers = layers[0];
            b.layers = layers[1];
            a.n_layers = b.n_layers = LAYERS;
            open_both(tables->ctx[t], p);
            image_of(tokens, 100, 20);
            feed_both(tokens, 100);
            look_both(16);
            assert_int_equal(kvc_cache_compress(plain.cache, plain.seq, &policy, &a, NULL), KVC_OK);
            assert_int_equal(kvc_cache_compress(turned.cache, turned.seq, &policy, &b, NULL),
                             KVC_OK);
            for (int l = 0; l < LAYERS; l++) {
                assert_true(layers[0][l].n_merged > 20);
                assert_int_equal(layers[0][l].n_merged, layers[1][l].n_merged);
                assert_true(fabs(layers[0][l].rel_err - layers[1][l].rel_err) <
                            0.02 * layers[0][l].rel_err + 1e-3);
            }
            assert_same_rows(0.02);
            kvc_attend_options_default(turned.cache, &o);
            pd_feed_text(&turned, 20);
            for (int c = 0; c < 2; c++, o.softcap = 2.0f) /* the bias comes after it */
                pd_check_attention(&turned, turned.seq, 10, &o);
            o.window = 25;
            pd_check_attention(&turned, turned.seq, 10, &o);
            close_both();
        }
}

/* Codes that are decoded to be merged are turned back first. */
static void coded_tokens_merge_too(void **state)
{
    static const kvc_precision precisions[] = {
        {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
        {KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
        {KVC_INT8, KVC_INT8, KVC_SCALE_HEAD, KVC_SCALE_HEAD},
        {KVC_INT8, KVC_INT8, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
    };
    /* Steps of the codes: of K' about 5 / 127, 5 / 32, times a scale of 4 in one channel. */
    static const double tolerances[] = {0.2, 1.0, 0.25, 0.2};
    uint64_t rng = 5;

    make_vectors(&rng);
    make_rows(100, &rng);
    for (int f = 0; f < 4; f++) {
        kvc_cache_params p = pd_params();
        kvc_policy policy = pd_policy();
        kvc_token tokens[100];
        kvc_report report;

        p.max_merge_tokens = 100;
        p.precision = precisions[f];
        policy.source = KVC_SOURCE_AGE;
        policy.merge_rounds = 1;
        policy.merging.tau = 0.9f;
        policy.merging.max_share = 0.5f;
        policy.recode = true;
        pd_open(&turned, best(state), with_vectors(p), 1 << 21);
        p.precision = (kvc_precision){KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN};
        pd_open(&plain, best(state), p, 1 << 21);
        image_of(tokens, 100, 20);
        feed_both(tokens, 100);
        look_both(16);
        pd_compress(&turned, NULL);
        report = pd_compress(&turned, &policy);
        assert_true(report.n_recoded > 0);
        for (int j = 0; j < LAYERS * KV; j++) {
            struct pd_rows b = pd_read(&turned, turned.seq, j / KV, j % KV);
            struct pd_rows a = pd_read(&plain, plain.seq, j / KV, j % KV);

            assert_true(b.n < 100);
            for (size_t i = 0; i < b.n; i++)
                if (b.sizes[i] == 1)
                    assert_near(b.k + i * DK, a.k + b.ordinals[i] * DK, DK, tolerances[f], "K",
                                b.ordinals[i]);
            pd_free(&a);
            pd_free(&b);
        }
        pd_feed_text(&turned, 20);
        pd_check_attention(&turned, turned.seq, 10, NULL);
        close_both();
    }
}

/* Rows of a sequence against those that came, by ordinal. */
static void assert_came(const struct pd *d, int n_fed, double tolerance)
{
    for (int j = 0; j < LAYERS * KV; j++) {
        struct pd_rows r = pd_read(d, d->seq, j / KV, j % KV);

        for (size_t i = 0; i < r.n; i++) {
            const int64_t at = ((int64_t)(j / KV) * n_fed + r.ordinals[i]) * KV + j % KV;

            assert_near(r.k + i * DK, k_rows + at * DK, DK, tolerance, "K", r.ordinals[i]);
            assert_near(r.v + i * DV, v_rows + at * DV, DV, tolerance, "V", r.ordinals[i]);
        }
        pd_free(&r);
    }
}

/* One token of those that were made. */
static bool feed_one(struct pd *d, int t, int n_all)
{
    if (kvc_tokens_add(d->cache, d->seq, NULL, 1) != KVC_OK)
        return false;
    for (int l = 0; l < LAYERS; l++) {
        const size_t at = (size_t)l * (size_t)n_all + (size_t)t;
        const kvc_view k = kvc_view_packed(k_rows + at * KV * DK, KVC_DTYPE_F32, 1, KV, DK);
        const kvc_view v = kvc_view_packed(v_rows + at * KV * DV, KVC_DTYPE_F32, 1, KV, DV);

        assert_int_equal(kvc_append(d->cache, d->seq, l, &k, &v), KVC_OK);
    }
    return true;
}

static bool is_ready(const struct pd *d)
{
    bool ready = false;

    assert_int_equal(kvc_cache_read_transform(d->cache, 0, 0, NULL, NULL, &ready), KVC_OK);
    return ready;
}

/* A cache that drops rows at each token, while it waits for its pages, afterwards, and when they
 * never fill: what stays is what came. */
static void a_full_cache_drops_rows_while_it_waits(void **state)
{
    static const int32_t max_rows[] = {0, 40, 90, 200};
    uint64_t rng = 6;

    make_vectors(&rng);
    make_rows(MAX_N, &rng);
    for (int i = 0; i < 4; i++)
        for (int source = KVC_SOURCE_PROBES; source <= KVC_SOURCE_AGE; source += 3)
            for (int pages = 1; pages <= 4; pages += 3) {
                kvc_policy policy = pd_policy();
                kvc_cache_params p = with_pages(pd_params(), pages);

                policy.max_rows = max_rows[i];
                policy.source = (kvc_score_source)source;
                p.max_sequences = 1;
                p.max_hold_tokens = 0;
                p.max_append = 8;
                p.max_tokens = max_rows[i] ? MAX_N : 300;
                p.on_full = &policy;
                pd_open(&turned, best(state), p, 0);
                for (int t = 0; t < MAX_N; t++) {
                    if (!feed_one(&turned, t, MAX_N))
                        fail_msg("max_rows %d, %d pages: full at token %d", max_rows[i], pages, t);
                    if (t % 8 == 7)
                        pd_look(&turned, 8);
                    if (t % 37 == 0)
                        assert_came(&turned, MAX_N, 0.02);
                }
                assert_came(&turned, MAX_N, 0.02);
                pd_check_attention(&turned, turned.seq, 1, NULL);
                pd_close(&turned);
            }
}

static void take_vectors(const struct pd *d)
{
    for (size_t j = 0; j < (size_t)LAYERS * KV; j++) {
        bool ready = false;

        assert_int_equal(kvc_cache_read_transform(d->cache, (int32_t)j / KV, (int32_t)j % KV,
                                                  mean + j * DK, scale + j * DK, &ready),
                         KVC_OK);
        assert_true(ready);
    }
}

/* The pages that a compression makes, of a cache that measured and of one that was told. */
static void measured_and_given_vectors_give_the_same_pages(void **state)
{
    const struct tables *tables = *state;
    static const char *const presets[] = {"light", "balanced", "aggressive", "extreme"};
    uint64_t rng = 7;

    make_vectors(&rng);
    make_rows(200, &rng);
    for (size_t t = 0; t < tables->n; t++)
        for (int i = 0; i < 4; i++) {
            kvc_cache_params p = pd_params();
            kvc_policy policy;
            kvc_token tokens[200];
            uint64_t digest = 0;

            p.max_merge_tokens = 128;
            p.precision = (kvc_precision){KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN};
            assert_int_equal(kvc_policy_preset(presets[i], &policy), KVC_OK);
            policy.keep_min = 10;
            image_of(tokens, 200, 100);
            make_vectors(&rng);
            for (int given = 0; given < 2; given++) {
                pd_open(&turned, tables->ctx[t], given ? with_vectors(p) : with_pages(p, 64),
                        1 << 21);
                pd_feed(&turned, tokens, 200, k_rows, v_rows);
                pd_look(&turned, 16);
                pd_compress(&turned, &policy);
                assert_true(is_ready(&turned));
                if (!given)
                    take_vectors(&turned);
                if (given)
                    assert_true(pd_digest(&turned, turned.seq) == digest);
                digest = pd_digest(&turned, turned.seq);
                pd_close(&turned);
            }
        }
}

/* Nothing is sealed and no byte is taken; rows are those that came. Each head seals pages of its
 * own size, and the smallest budget has no slab for each of them. */
static void a_full_cache_loses_nothing(void **state)
{
    static const kvc_format formats[4][2] = {
        {KVC_INT8, KVC_INT8}, {KVC_INT4, KVC_INT4}, {KVC_INT8, KVC_INT4}, {KVC_F16, KVC_INT4}};
    uint64_t rng = 8;

    make_vectors(&rng);
    make_rows(300, &rng);
    for (int call = 0; call < 3; call++) {
        kvc_cache_params p = with_pages(pd_params(), 2);
        kvc_stats before, after;
        kvc_status status;

        p.max_sequences = 1;
        p.max_append = 8;
        p.max_hold_tokens = 0;
        pd_open(&turned, best(state), p, 0);
        assert_int_equal(kvc_seq_destroy(turned.cache, turned.seq), KVC_OK);
        for (int j = 0; j < LAYERS * KV; j++) {
            const kvc_precision precision = {formats[j][0], formats[j][1], KVC_SCALE_TOKEN,
                                             KVC_SCALE_TOKEN};

            assert_int_equal(kvc_cache_set_precision(turned.cache, j / KV, j % KV, &precision),
                             KVC_OK);
        }
        assert_int_equal(kvc_seq_create(turned.cache, &turned.seq), KVC_OK);
        for (int t = 0; t < 4 + 128; t++)
            assert_true(feed_one(&turned, t, 300));
        before = pd_stats(&turned);
        assert_false(is_ready(&turned));
        if (call == 0)
            status = kvc_tokens_add(turned.cache, turned.seq, NULL, 1);
        else if (call == 1)
            status = kvc_seq_settle(turned.cache, turned.seq);
        else
            status = kvc_cache_compress(turned.cache, turned.seq, NULL, NULL, NULL);
        assert_int_equal(status, KVC_E_FULL);
        after = pd_stats(&turned);
        assert_memory_equal(&after, &before, sizeof(after));
        assert_came(&turned, 300, 0.02);
        pd_check_attention(&turned, turned.seq, 3, NULL);
        pd_close(&turned);
    }
}

/* Forks, removals and truncations around the measuring; rows of all are those that came. */
static void shared_pages_are_turned_once(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 9;

    make_vectors(&rng);
    make_rows(300, &rng);
    for (size_t t = 0; t < tables->n; t++)
        for (int after = 0; after < 2; after++) {
            kvc_cache_params p = with_pages(pd_params(), 2);
            struct pd forks[2];

            p.max_sequences = 3;
            pd_open(&turned, tables->ctx[t], p, 1 << 21);
            for (int i = 0; i < 4 + 127; i++)
                assert_true(feed_one(&turned, i, 300));
            for (int i = 0; i < 2; i++) {
                forks[i] = turned;
                assert_int_equal(kvc_seq_fork(turned.cache, turned.seq, &forks[i].seq), KVC_OK);
            }
            assert_int_equal(kvc_seq_remove(turned.cache, forks[0].seq, 2, 90), KVC_OK);
            assert_int_equal(kvc_seq_truncate(turned.cache, forks[1].seq, 70), KVC_OK);
            assert_true(feed_one(&turned, 131, 300));
            if (after)
                assert_int_equal(kvc_seq_destroy(turned.cache, forks[0].seq), KVC_OK);
            assert_false(is_ready(&turned));
            assert_int_equal(kvc_seq_settle(turned.cache, turned.seq), KVC_OK);
            assert_true(is_ready(&turned));
            for (int i = after; i < 2; i++) {
                assert_came(&forks[i], 300, 0.02);
                pd_check_attention(&forks[i], forks[i].seq, 3, NULL);
                for (int j = (int)kvc_seq_n_tokens(turned.cache, forks[i].seq); j < 200; j++)
                    assert_true(feed_one(&forks[i], j, 300));
                pd_compress(&forks[i], NULL);
                assert_came(&forks[i], 300, 0.02);
            }
            assert_came(&turned, 300, 0.02);
            pd_close(&turned);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pruning_leaves_the_same_rows),
        cmocka_unit_test(probes_score_the_rows_that_came),
        cmocka_unit_test(probes_keep_the_same_tokens),
        cmocka_unit_test(tokens_merge_by_the_keys_that_came),
        cmocka_unit_test(coded_tokens_merge_too),
        cmocka_unit_test(a_full_cache_drops_rows_while_it_waits),
        cmocka_unit_test(measured_and_given_vectors_give_the_same_pages),
        cmocka_unit_test(a_full_cache_loses_nothing),
        cmocka_unit_test(shared_pages_are_turned_once),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
