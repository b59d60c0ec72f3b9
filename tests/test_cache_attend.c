/* Public API of cache.h: attention, scores and probe rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/cache_model.h"
#include "support/tables.h"

enum { MAX_ELEMENTS = 64 * 8 * 512 };

static struct cache_model m;
static float q_data[MAX_ELEMENTS], out_data[MAX_ELEMENTS], want_data[MAX_ELEMENTS];
static float lse_data[1024], want_lse[1024];

static const kvc_precision precisions[] = {
    {KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT4, KVC_SCALE_HEAD, KVC_SCALE_HEAD},
    {KVC_INT4, KVC_INT8, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_F16, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
    {KVC_F16, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_HEAD},
    {KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
};
static const size_t n_precisions = sizeof(precisions) / sizeof(*precisions);

/* Two layers, three precisions, n tokens of which all but the last 40 may be sealed. */
static struct model_seq *start_mixed(kvc_ctx *ctx, kvc_cache_params p, int n, uint64_t *rng)
{
    struct model_seq *s;

    p.recent_tokens = 40;
    p.max_append = 512;
    p.max_tokens = MODEL_MAX_TOKENS;
    drive_start(&m, ctx, p, 8 << 20);
    model_set_precision(&m, 0, 0, precisions[2]);
    model_set_precision(&m, 0, 1, precisions[4]);
    model_set_precision(&m, 1, 0, precisions[3]);
    s = drive_create(&m);
    for (; n > 512; n -= 512)
        drive_feed(&m, s, 512, rng, 1);
    drive_feed(&m, s, n, rng, 1);
    drive_settle(&m, s);
    return s;
}

static kvc_view queries(float *data, size_t n, uint64_t *rng)
{
    const kvc_view q = kvc_view_packed(data, KVC_DTYPE_F32, n, (size_t)m.params.n_heads,
                                       (size_t)m.params.head_dim_k);

    fill_view(&q, rng, 1);
    return q;
}

static kvc_view outputs(float *data, size_t n)
{
    return kvc_view_packed(data, KVC_DTYPE_F32, n, (size_t)m.params.n_heads,
                           (size_t)m.params.head_dim_v);
}

/* Attends and holds the outputs to the documented bound without any allowance: 2e-5 of the largest
 * output of the row if exact, else 2e-4. */
static void expect_bound(const struct model_seq *s, int layer, const kvc_view *q,
                         const kvc_view *out, bool exact, double *worst)
{
    static struct model_attention want;
    kvc_attend_options options;

    kvc_attend_options_default(m.cache, &options);
    options.exact = exact;
    assert_int_equal(kvc_attend(m.cache, s->handle, layer, q, &options, out, NULL), KVC_OK);
    for (size_t row = 0; row < q->n_tokens; row++)
        for (int head = 0; head < m.params.n_heads; head++) {
            double error = 0, largest = 0;

            model_attention(&m, s, layer, q, row, head, &options, &want);
            for (size_t d = 0; d < out->head_dim; d++) {
                const double got = (double)view_get(out, row, (size_t)head, d);

                error = fmax(error, fabs(got - want.out[d]));
                largest = fmax(largest, fabs(want.out[d]));
                assert_true(isfinite(got));
            }
            worst[exact] = fmax(worst[exact], error / largest);
        }
    assert_true(worst[exact] <= (exact ? 2e-5 : 2e-4));
}

/* Known fault D1. */
static void every_head_size_equals_float64(void **state)
{
    static const int dims[] = {1, 2, 7, 40, 64, 72, 80, 96, 100, 112, 128, 256, 511, 512};
    const struct tables *tables = *state;
    const size_t n_dims = sizeof(dims) / sizeof(*dims);
    double worst[2] = {0};

    for (size_t i = 0; i < n_dims * n_precisions * tables->n; i++) {
        kvc_cache_params p = drive_params();
        struct model_seq *s;
        uint64_t rng = i;
        kvc_view q, out;

        p.n_layers = 1;
        p.n_heads = 3;
        p.n_kv_heads = 1;
        p.head_dim_k = dims[i % n_dims];
        p.head_dim_v = dims[i % 5 == 0 ? (i + 3) % n_dims : i % n_dims];
        p.recent_tokens = 20;
        p.precision = precisions[i / n_dims % n_precisions];
        drive_start(&m, tables->ctx[i / n_dims / n_precisions], p, 2 << 20);
        s = drive_create(&m);
        drive_feed(&m, s, 3, &rng, 1);
        drive_attend(&m, s, 0, 3, NULL, &rng);
        drive_feed(&m, s, 110, &rng, 1);
        drive_settle(&m, s);
        check_all(&m);
        drive_attend(&m, s, 0, 7, NULL, &rng);
        q = queries(q_data, 2, &rng);
        out = outputs(out_data, 2);
        for (int exact = 0; exact < 2 && p.head_dim_v >= 40; exact++)
            expect_bound(s, 0, &q, &out, exact, worst);
        model_close(&m);
    }
    print_message("largest error %.2g of the largest output, exact %.2g\n", worst[0], worst[1]);
}

static void long_sequences_equal_float64(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_cache_params p = drive_params();
        uint64_t rng = 3;
        double worst[2] = {0};
        struct model_seq *s;
        kvc_view q, out;

        p.head_dim_k = p.head_dim_v = 64;
        s = start_mixed(tables->ctx[i], p, 4000, &rng);
        for (int layer = 0; layer < 2; layer++)
            for (size_t n_q = 1; n_q <= 19; n_q += 9) {
                q = queries(q_data, n_q, &rng);
                out = outputs(out_data, n_q);
                for (int exact = 0; exact < 2; exact++)
                    expect_bound(s, layer, &q, &out, exact, worst);
            }
        model_close(&m);
    }
}

static void options_equal_float64(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_attend_options o = {.struct_size = 0};
        uint64_t rng = 4;
        struct model_seq *s = start_mixed(tables->ctx[i], drive_params(), 200, &rng);

        kvc_attend_options_default(m.cache, &o);
        kvc_attend_options_default(m.cache, NULL);
        assert_int_equal(o.struct_size, sizeof(o));
        assert_true(o.scale == 0.25f && o.softcap == 0 && o.window == 0 && !o.accumulate);
        o.softcap = 2;
        drive_attend(&m, s, 0, 5, &o, &rng);
        o.scale = -3;
        drive_attend(&m, s, 1, 5, &o, &rng);
        o.softcap = 0;
        o.scale = 0;
        drive_attend(&m, s, 0, 5, &o, &rng);
        o.scale = 1;
        for (int64_t window = 1; window < 250; window += 1 + window / 4) {
            o.window = window;
            drive_attend(&m, s, 1, 9, &o, &rng);
        }
        o.window = INT64_MAX;
        drive_attend(&m, s, 1, 9, &o, &rng);
        model_close(&m);
    }
}

static void nothing_to_see_gives_zeros(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_attend_options o = {.struct_size = 0};
        uint64_t rng = 5;
        struct model_seq *s = start_mixed(tables->ctx[i], drive_params(), 150, &rng);
        kvc_view q, out;

        kvc_attend_options_default(m.cache, &o);
        o.window = 3;
        o.accumulate = true;
        drive_remove(&m, s, 140, 147);
        drive_attend(&m, s, 0, 8, &o, &rng); /* three of the queries see no row */
        drive_attend(&m, s, 0, 12, &o, &rng);
        drive_remove(&m, s, 0, 150);
        q = queries(q_data, 6, &rng);
        out = outputs(out_data, 6);
        memset(out_data, 0xff, sizeof(out_data));
        assert_int_equal(kvc_attend(m.cache, s->handle, 1, &q, NULL, &out, lse_data), KVC_OK);
        for (size_t e = 0; e < 6 * 4 * 8; e++)
            assert_true(out_data[e] == 0);
        for (size_t e = 0; e < 6 * 4; e++)
            assert_true(isinf(lse_data[e]) && lse_data[e] < 0);
        model_attended(&m, s, 1, &q, &o);
        check_all(&m);
        model_close(&m);
    }
}

/* Rows of a call of n queries, and of calls of fewer, are the same bits: up to 16 rows of a KV
 * head, two a query here, and from there on. */
static void results_do_not_depend_on_the_number_of_queries(void **state)
{
    static const size_t most[] = {8, 40};
    const struct tables *tables = *state;

    for (size_t i = 0; i < 2 * tables->n; i++) {
        const size_t n_q = most[i % 2];
        uint64_t rng = 6;
        struct model_seq *s = start_mixed(tables->ctx[i / 2], drive_params(), 3000, &rng);
        const kvc_view all_q = queries(q_data, n_q, &rng), all_out = outputs(want_data, n_q);

        assert_int_equal(kvc_attend(m.cache, s->handle, 0, &all_q, NULL, &all_out, want_lse),
                         KVC_OK);
        for (size_t n = n_q > 8 ? 9 : 1; n < n_q; n++) {
            kvc_view q = all_q;
            const kvc_view out = outputs(out_data, n);

            q.n_tokens = n;
            q.data = q_data + (n_q - n) * all_q.token_stride;
            assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, NULL, &out, lse_data), KVC_OK);
            assert_memory_equal(out_data, want_data + (n_q - n) * all_out.token_stride,
                                n * all_out.token_stride * sizeof(float));
            assert_memory_equal(lse_data, want_lse + (n_q - n) * 4, n * 4 * sizeof(float));
        }
        model_close(&m);
    }
}

/* Queries that come with their tokens, n at a time. */
static void attend_in_steps(struct model_seq *s, size_t n, const kvc_view *k, const kvc_view *v,
                            const kvc_view *q, const kvc_view *out)
{
    drive_truncate(&m, s, 0);
    for (size_t t = 0; t < q->n_tokens; t += n) {
        kvc_view step[4] = {*k, *v, *q, *out};

        for (int i = 0; i < 4; i++) {
            step[i].n_tokens = n < q->n_tokens - t ? n : q->n_tokens - t;
            step[i].data = (float *)step[i].data + t * step[i].token_stride;
        }
        drive_add(&m, s, NULL, (int)step[0].n_tokens);
        drive_append(&m, s, 0, &step[0], &step[1]);
        assert_int_equal(kvc_attend(m.cache, s->handle, 0, &step[2], NULL, &step[3], NULL), KVC_OK);
    }
}

/* They see the same in steps of up to 16 rows of a KV head, and in larger ones. */
static void results_do_not_depend_on_the_size_of_a_step(void **state)
{
    enum { N = 100 };
    static const size_t sizes[2][3] = {{1, 7, 8}, {N, 25, 10}};
    const struct tables *tables = *state;
    kvc_cache_params p = drive_params();
    static float rows[N * 2 * (16 + 8)];
    const kvc_view k = kvc_view_packed(rows, KVC_DTYPE_F32, N, 2, 16);
    const kvc_view v = kvc_view_packed(rows + N * 2 * 16, KVC_DTYPE_F32, N, 2, 8);
    uint64_t rng = 7;

    fill_view(&k, &rng, 1);
    fill_view(&v, &rng, 1);
    p.n_layers = 1;
    p.recent_tokens = N;
    for (size_t i = 0; i < 2 * tables->n; i++) {
        struct model_seq *s;
        kvc_view q, want, out;

        drive_start(&m, tables->ctx[i / 2], p, 1 << 20);
        s = drive_create(&m);
        q = queries(q_data, N, &rng);
        want = outputs(want_data, N);
        out = outputs(out_data, N);
        attend_in_steps(s, sizes[i % 2][0], &k, &v, &q, &want);
        for (int j = 1; j < 3; j++) {
            attend_in_steps(s, sizes[i % 2][j], &k, &v, &q, &out);
            assert_memory_equal(out_data, want_data, N * out.token_stride * sizeof(float));
        }
        model_close(&m);
    }
}

/* Runs the tasks last to first. */
static void backwards(void *user, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg)
{
    size_t *n_calls = user;

    ++*n_calls;
    while (n_tasks-- > 0)
        task(arg, n_tasks);
}

static void attend_all(struct model_seq *const *s, size_t n, float *out_at, float *lse_at,
                       uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        const kvc_view q = queries(q_data, i + 1, &seed);
        const kvc_view out = outputs(out_at + i * 1024, i + 1);

        assert_int_equal(kvc_attend(m.cache, s[i]->handle, 1, &q, NULL, &out, lse_at + i * 64),
                         KVC_OK);
    }
}

static void results_do_not_depend_on_parallel_for(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        size_t n_calls = 0;
        const kvc_ctx_params params = {.struct_size = sizeof(params),
                                       .parallel_for = backwards,
                                       .parallel_user = &n_calls,
                                       .kernels = kvc_ctx_kernels(tables->ctx[i])};
        kvc_ctx *ctx;
        struct model_seq *s;
        uint64_t rng = 8;

        s = start_mixed(tables->ctx[i], drive_params(), 3000, &rng);
        attend_all(&s, 1, want_data, want_lse, 2);
        model_close(&m);
        assert_int_equal(kvc_ctx_create(&params, &ctx), KVC_OK);
        rng = 8;
        s = start_mixed(ctx, drive_params(), 3000, &rng);
        check_all(&m);
        attend_all(&s, 1, out_data, lse_data, 2);
        assert_memory_equal(out_data, want_data, 4 * 8 * sizeof(float));
        assert_memory_equal(lse_data, want_lse, 4 * sizeof(float));
        assert_true(n_calls > 0);
        model_close(&m);
        kvc_ctx_destroy(ctx);
    }
}

static void a_batch_gives_the_results_of_single_calls(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_attend_item items[3];
        kvc_view q[3], out[3];
        struct model_seq *s[3];
        uint64_t rng = 9, seed = 3;

        s[0] = start_mixed(tables->ctx[i], drive_params(), 1900, &rng);
        s[1] = drive_fork(&m, s[0]);
        drive_feed(&m, s[1], 100, &rng, 1);
        s[2] = drive_create(&m);
        drive_feed(&m, s[2], 9, &rng, 1);
        attend_all(s, 3, want_data, want_lse, seed);
        for (size_t j = 0; j < 3; j++) {
            q[j] = queries(q_data + j * 1024, j + 1, &seed);
            out[j] = outputs(out_data + j * 1024, j + 1);
            items[j] = (kvc_attend_item){.struct_size = sizeof(items[j]),
                                         .seq = s[j]->handle,
                                         .q = &q[j],
                                         .out = &out[j],
                                         .lse = lse_data + j * 64};
        }
        assert_int_equal(kvc_attend_batch(m.cache, 1, items, 3, NULL), KVC_OK);
        for (size_t j = 0; j < 3; j++) {
            assert_memory_equal(out_data + j * 1024, want_data + j * 1024,
                                (j + 1) * 4 * 8 * sizeof(float));
            assert_memory_equal(lse_data + j * 64, want_lse + j * 64, (j + 1) * 4 * sizeof(float));
        }
        items[2].seq = items[0].seq;
        assert_int_equal(kvc_attend_batch(m.cache, 1, items, 3, NULL), KVC_E_ARG);
        assert_int_equal(kvc_attend_batch(m.cache, 1, items, 0, NULL), KVC_OK);
        assert_int_equal(kvc_attend_batch(m.cache, 2, items, 1, NULL), KVC_E_ARG);
        assert_int_equal(kvc_attend_batch(m.cache, 1, NULL, 1, NULL), KVC_E_ARG);
        model_close(&m);
    }
}

static void nonfinite_queries_reach_their_own_row_only(void **state)
{
    const struct tables *tables = *state;
    static const float bad[] = {NAN, INFINITY, -INFINITY};

    for (size_t i = 0; i < tables->n * 3; i++) {
        enum { N_Q = 18, ROW = 7, HEAD = 2 };
        uint64_t rng = 10;
        struct model_seq *s = start_mixed(tables->ctx[i / 3], drive_params(), 200, &rng);
        const kvc_view q = queries(q_data, N_Q, &rng);
        const kvc_view want = outputs(want_data, N_Q), out = outputs(out_data, N_Q);

        assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, NULL, &want, want_lse), KVC_OK);
        view_set(&q, ROW, HEAD, 5, bad[i % 3]);
        assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, NULL, &out, lse_data), KVC_OK);
        for (size_t e = 0; e < N_Q * 4 * 8; e++)
            if (e / 8 != ROW * 4 + HEAD)
                assert_true(out_data[e] == want_data[e]);
        for (size_t e = 0; e < (size_t)N_Q * 4; e++)
            if (e != ROW * 4 + HEAD)
                assert_true(lse_data[e] == want_lse[e]);
        model_close(&m);
    }
}

static void scores_are_the_softmax_masses(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_cache_params p = drive_params();
        kvc_attend_options o = {.struct_size = 0};
        struct model_seq *s, *fork;
        uint64_t rng = 11;

        p.score_mode = KVC_SCORE_TOKEN;
        s = start_mixed(tables->ctx[i], p, 200, &rng);
        drive_attend(&m, s, 0, 9, NULL, &rng); /* accumulate is false */
        check_all(&m);
        kvc_attend_options_default(m.cache, &o);
        o.accumulate = true;
        drive_attend(&m, s, 0, 20, &o, &rng);
        check_all(&m);
        o.window = 70;
        o.softcap = 3;
        drive_attend(&m, s, 0, 20, &o, &rng);
        drive_attend(&m, s, 1, 1, &o, &rng);
        check_all(&m);
        fork = drive_fork(&m, s);
        drive_attend(&m, fork, 0, 2, &o, &rng);
        drive_remove(&m, s, 10, 20);
        drive_compress(&m, s);
        drive_feed(&m, s, 10, &rng, 1);
        drive_attend(&m, s, 0, 12, &o, &rng);
        drive_truncate(&m, s, 150);
        drive_feed(&m, s, 10, &rng, 1); /* new tokens begin at 0 */
        check_all(&m);
        model_close(&m);
    }
}

/* Single tokens and several, over more than a block, with holes. */
static void scores_of_long_sequences_are_the_softmax_masses(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_cache_params p = drive_params();
        kvc_attend_options o = {.struct_size = 0};
        uint64_t rng = 14;
        struct model_seq *s;

        p.score_mode = KVC_SCORE_TOKEN;
        s = start_mixed(tables->ctx[i], p, 1500, &rng);
        drive_remove(&m, s, 300, 420);
        kvc_attend_options_default(m.cache, &o);
        o.accumulate = true;
        for (int step = 0; step < 3; step++) {
            o.window = step == 1 ? 700 : 0;
            o.softcap = step == 2 ? 3 : 0;
            drive_attend(&m, s, 0, 1, &o, &rng);
            drive_attend(&m, s, 1, 1, &o, &rng);
            drive_feed(&m, s, 1, &rng, 1);
        }
        drive_attend(&m, s, 1, 3, &o, &rng);
        check_all(&m);
        model_close(&m);
    }
}

/* Of several sequences at once, some with one query token: the scores of single calls. */
static void a_batch_gives_the_scores_of_single_calls(void **state)
{
    const struct tables *tables = *state;
    static float want[200], scores[200];

    for (size_t i = 0; i < tables->n; i++)
        for (kvc_score_mode mode = KVC_SCORE_PAGE; mode <= KVC_SCORE_TOKEN; mode++) {
            kvc_cache_params p = drive_params();
            kvc_attend_options o = {.struct_size = 0};
            kvc_attend_item items[2];
            kvc_view q[2], out[2];
            struct model_seq *s[4];
            uint64_t rng = 15;
            size_t n;

            p.score_mode = mode;
            p.max_sequences = 4;
            s[0] = start_mixed(tables->ctx[i], p, 200, &rng);
            for (int j = 1; j < 4; j++)
                s[j] = drive_fork(&m, s[0]);
            kvc_attend_options_default(m.cache, &o);
            o.accumulate = true;
            for (size_t j = 0; j < 2; j++) {
                q[j] = queries(q_data + j * 1024, j * 20 + 1, &rng);
                out[j] = outputs(out_data + j * 1024, j * 20 + 1);
                items[j] = (kvc_attend_item){.struct_size = sizeof(items[j]),
                                             .seq = s[2 + j]->handle,
                                             .q = &q[j],
                                             .out = &out[j]};
                assert_int_equal(kvc_attend(m.cache, s[j]->handle, 1, &q[j], &o, &out[j], NULL),
                                 KVC_OK);
            }
            assert_int_equal(kvc_attend_batch(m.cache, 1, items, 2, &o), KVC_OK);
            for (int j = 0; j < 2; j++) {
                assert_int_equal(
                    kvc_seq_read_rows(m.cache, s[j]->handle, 1, 1, 200, NULL, NULL, NULL, want, &n),
                    KVC_OK);
                assert_int_equal(kvc_seq_read_rows(m.cache, s[2 + j]->handle, 1, 1, 200, NULL, NULL,
                                                   NULL, scores, &n),
                                 KVC_OK);
                assert_true(want[100] > 0);
                assert_memory_equal(scores, want, sizeof(want));
            }
            model_close(&m);
        }
}

/* A query that is not finite adds no mass; the others add theirs, whatever the path. */
static void nonfinite_queries_leave_scores_alone(void **state)
{
    const struct tables *tables = *state;
    static float scores[2][200];

    for (size_t i = 0; i < tables->n; i++)
        for (kvc_score_mode mode = KVC_SCORE_PAGE; mode <= KVC_SCORE_TOKEN; mode++)
            for (size_t n_q = 1; n_q <= 2; n_q++) {
                kvc_cache_params p = drive_params();
                kvc_attend_options o = {.struct_size = 0};
                uint64_t rng = 13;
                struct model_seq *s;
                kvc_view q, out;
                size_t n;

                p.score_mode = mode;
                s = start_mixed(tables->ctx[i], p, 200, &rng);
                q = queries(q_data, n_q, &rng);
                out = outputs(out_data, n_q);
                kvc_attend_options_default(m.cache, &o);
                o.accumulate = true;
                view_set(&q, 0, 1, 3, NAN); /* head 1 reads KV head 0 */
                assert_int_equal(kvc_attend(m.cache, s->handle, 1, &q, &o, &out, NULL), KVC_OK);
                for (int head = 0; head < 2; head++) {
                    double sum = 0;

                    assert_int_equal(kvc_seq_read_rows(m.cache, s->handle, 1, head, 200, NULL, NULL,
                                                       NULL, scores[head], &n),
                                     KVC_OK);
                    for (int t = 0; t < 200; t++)
                        sum += (double)scores[head][t];
                    /* Two heads a KV head, less the one, less what the sinks got. */
                    assert_true(sum > 0.5 && sum <= (double)n_q * 2 - (head == 0) + 1e-4);
                }
                model_close(&m);
            }
}

static void page_scores_are_given_to_the_rows_in_equal_parts(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_cache_params p = drive_params();
        kvc_attend_options o = {.struct_size = 0};
        static float scores[200];
        const double *want;
        struct model_seq *s;
        uint64_t rng = 12;
        size_t n;

        p.score_mode = KVC_SCORE_PAGE;
        s = start_mixed(tables->ctx[i], p, 200, &rng);
        kvc_attend_options_default(m.cache, &o);
        o.accumulate = true;
        drive_attend(&m, s, 1, 20, &o, &rng);
        drive_attend(&m, s, 1, 1, &o, &rng);
        assert_int_equal(
            kvc_seq_read_rows(m.cache, s->handle, 1, 0, 200, NULL, NULL, NULL, scores, &n), KVC_OK);
        want = model_score(&m, s, 1, 0);
        for (int t = 0; t < 4; t++)
            assert_true(scores[t] == 0);
        for (int page = 4; page < 200; page += 64) {
            const int end = page + 64 < 200 ? page + 64 : 200;
            double sum = 0;

            for (int t = page; t < end; t++)
                sum += want[t];
            for (int t = page; t < end; t++)
                assert_true(fabs((double)scores[t] * (end - page) - sum) <= 1e-4 * sum);
        }
        model_close(&m);
    }
}

static void keeps_the_last_query_rows(void **state)
{
    kvc_cache_params p = drive_params();
    struct model_seq *s, *fork;
    uint64_t rng = 13;

    p.probe_rows = 5;
    drive_start(&m, best(state), p, 1 << 20);
    s = drive_create(&m);
    check_probes(&m, s, 0);
    drive_feed(&m, s, 20, &rng, 1);
    drive_attend(&m, s, 0, 3, NULL, &rng);
    check_all(&m);
    assert_int_equal(s->n_probed[0], 3);
    drive_attend(&m, s, 1, 9, NULL, &rng);
    drive_attend(&m, s, 1, 2, NULL, &rng); /* the same tokens once more */
    check_all(&m);
    drive_feed(&m, s, 1, &rng, 1);
    drive_attend(&m, s, 1, 1, NULL, &rng);
    check_all(&m);
    fork = drive_fork(&m, s);
    drive_truncate(&m, s, 19);
    check_all(&m);
    drive_feed(&m, s, 30, &rng, 1);
    drive_attend(&m, s, 1, 1, NULL, &rng); /* beside older tokens, with a gap */
    check_all(&m);
    drive_destroy(&m, s);
    drive_feed(&m, fork, 7, &rng, 1);
    drive_attend(&m, fork, 1, 7, NULL, &rng);
    check_all(&m);
    model_close(&m);
}

static void refuses_wrong_arguments(void **state)
{
    uint64_t rng = 14;
    struct model_seq *s = start_mixed(best(state), drive_params(), 20, &rng);
    const kvc_view good_q = queries(q_data, 2, &rng), good_out = outputs(out_data, 2);
    kvc_attend_options o = {.struct_size = 0};

    memset(out_data, 0x5a, 4096);
    for (int i = 0; i < 16; i++) {
        kvc_view q = good_q, out = good_out;
        int layer = 0;

        kvc_attend_options_default(m.cache, &o);
        switch (i) {
        case 0: q.data = NULL; break;
        case 1: q.n_heads = 2; break;
        case 2: q.head_dim = 8; break;
        case 3: q.n_tokens = 21; break;
        case 4: q.head_stride = 15; break;
        case 5: q.dtype = (kvc_dtype)9; break;
        case 6: q.struct_size = 0; break;
        case 7: out.data = NULL; break;
        case 8: out.n_tokens = 1; break;
        case 9: out.head_dim = 16; break;
        case 10: o.scale = NAN; break;
        case 11: o.scale = INFINITY; break;
        case 12: o.softcap = -1; break;
        case 13: o.window = -1; break;
        case 14: o.struct_size = 0; break;
        default: layer = 2; break;
        }
        assert_int_equal(kvc_attend(m.cache, s->handle, layer, &q, &o, &out, lse_data), KVC_E_ARG);
    }
    kvc_attend_options_default(m.cache, &o);
    assert_int_equal(kvc_attend(NULL, s->handle, 0, &good_q, &o, &good_out, NULL), KVC_E_ARG);
    assert_int_equal(kvc_attend(m.cache, s->handle, 0, NULL, &o, &good_out, NULL), KVC_E_ARG);
    assert_int_equal(kvc_attend(m.cache, s->handle, 0, &good_q, &o, NULL, NULL), KVC_E_ARG);
    for (size_t i = 0; i < 4096; i++)
        assert_int_equal(((unsigned char *)out_data)[i], 0x5a);
    check_all(&m);
    model_close(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_size_equals_float64),
        cmocka_unit_test(long_sequences_equal_float64),
        cmocka_unit_test(options_equal_float64),
        cmocka_unit_test(nothing_to_see_gives_zeros),
        cmocka_unit_test(results_do_not_depend_on_the_number_of_queries),
        cmocka_unit_test(results_do_not_depend_on_the_size_of_a_step),
        cmocka_unit_test(results_do_not_depend_on_parallel_for),
        cmocka_unit_test(a_batch_gives_the_results_of_single_calls),
        cmocka_unit_test(nonfinite_queries_reach_their_own_row_only),
        cmocka_unit_test(scores_are_the_softmax_masses),
        cmocka_unit_test(scores_of_long_sequences_are_the_softmax_masses),
        cmocka_unit_test(a_batch_gives_the_scores_of_single_calls),
        cmocka_unit_test(nonfinite_queries_leave_scores_alone),
        cmocka_unit_test(page_scores_are_given_to_the_rows_in_equal_parts),
        cmocka_unit_test(keeps_the_last_query_rows),
        cmocka_unit_test(refuses_wrong_arguments),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
