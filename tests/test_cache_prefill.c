/* Public API of cache.h: attention of many queries at once. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/cache_model.h"
#include "support/tables.h"

#include "kvc/pool.h"

enum { MAX_Q = 512, HEADS = 8, MAX_DIM = 256 };

static struct cache_model m;
static float q_data[MAX_Q * HEADS * MAX_DIM], lse_data[MAX_Q * HEADS], want_lse[MAX_Q * HEADS];
static float out_data[MAX_Q * HEADS * MAX_DIM], want_data[MAX_Q * HEADS * MAX_DIM];

static const kvc_precision precisions[] = {
    {KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT4, KVC_SCALE_HEAD, KVC_SCALE_HEAD},
    {KVC_INT4, KVC_INT8, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_F16, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
};
static const size_t n_precisions = sizeof(precisions) / sizeof(*precisions);

static kvc_view queries(size_t n, uint64_t *rng)
{
    const kvc_view q = kvc_view_packed(q_data, KVC_DTYPE_F32, n, (size_t)m.params.n_heads,
                                       (size_t)m.params.head_dim_k);

    fill_view(&q, rng, 1);
    return q;
}

static kvc_view outputs(float *data, size_t n)
{
    return kvc_view_packed(data, KVC_DTYPE_F32, n, (size_t)m.params.n_heads,
                           (size_t)m.params.head_dim_v);
}

/* One layer; of the n tokens all but the last 200 or so are sealed. */
static struct model_seq *start(kvc_ctx *ctx, kvc_cache_params p, int n, uint64_t *rng)
{
    struct model_seq *s;

    p.n_layers = 1;
    p.recent_tokens = 200;
    p.max_append = MAX_Q;
    drive_start(&m, ctx, p, 8 << 20);
    s = drive_create(&m);
    for (; n > MAX_Q; n -= MAX_Q)
        drive_feed(&m, s, MAX_Q, rng, 1);
    drive_feed(&m, s, n, rng, 1);
    drive_settle(&m, s);
    return s;
}

/* 2e-5 of the largest output of the row, without any allowance; every 13th query. */
static double worst_error(const struct model_seq *s, const kvc_view *q, const kvc_view *out)
{
    static struct model_attention want;
    kvc_attend_options options;
    double worst = 0;

    kvc_attend_options_default(m.cache, &options);
    for (size_t row = 0; row < q->n_tokens; row += 13)
        for (int head = 0; head < m.params.n_heads; head++) {
            double error = 0, largest = 0;

            model_attention(&m, s, 0, q, row, head, &options, &want);
            for (size_t d = 0; d < out->head_dim; d++) {
                const double got = (double)view_get(out, row, (size_t)head, d);

                assert_true(isfinite(got));
                error = fmax(error, fabs(got - want.out[d]));
                largest = fmax(largest, fabs(want.out[d]));
            }
            worst = fmax(worst, error / largest);
        }
    return worst;
}

static void prefill_equals_float64(void **state)
{
    static const int dims[] = {64, 128, 80, 256, 100, 128, 40};
    const struct tables *tables = *state;

    for (size_t t = 0; t < tables->n; t++) {
        double worst = 0;

        for (size_t i = 0; i < n_precisions; i++) {
            kvc_cache_params p = drive_params();
            struct model_seq *s;
            uint64_t rng = i + 1;
            kvc_view q, out;

            p.n_heads = i % 2 ? HEADS : 2;
            p.n_kv_heads = 2;
            p.head_dim_k = dims[i];
            p.head_dim_v = dims[(i + i % 2) % n_precisions];
            p.precision = precisions[i];
            s = start(tables->ctx[t], p, 500, &rng);
            q = queries(70, &rng);
            out = outputs(out_data, 70);
            assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, NULL, &out, NULL), KVC_OK);
            worst = fmax(worst, worst_error(s, &q, &out));
            q = queries(301, &rng); /* reaches into the sealed pages */
            out = outputs(out_data, 301);
            assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, NULL, &out, NULL), KVC_OK);
            worst = fmax(worst, worst_error(s, &q, &out));
            model_close(&m);
        }
        print_message("%s: largest error %.2g of the largest output\n",
                      kvc_ctx_kernels(tables->ctx[t]), worst);
        assert_true(worst <= 2e-5);
    }
}

/* Windows, a softcap, holes in sealed pages and in exact ones, sinks, and all at once. */
static void options_and_holes_equal_float64(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < 2 * tables->n; i++) {
        kvc_attend_options o = {.struct_size = 0};
        kvc_cache_params p = drive_params();
        struct model_seq *s;
        uint64_t rng = 4;

        p.sink_tokens = i % 2 ? 5 : 0;
        p.precision = precisions[1 + i % 2];
        s = start(tables->ctx[i / 2], p, 500, &rng);
        kvc_attend_options_default(m.cache, &o);
        for (int64_t window = 3; window < 500; window += 5 + window) {
            o.window = window;
            drive_attend(&m, s, 0, 150, &o, &rng);
        }
        drive_remove(&m, s, 70, 150); /* a page without rows */
        drive_remove(&m, s, 3, 20);
        drive_remove(&m, s, 333, 340);
        drive_remove(&m, s, 450, 480); /* some queries see nothing in a window */
        for (int64_t window = 0; window < 400; window += 5 + window) {
            o.window = window;
            o.softcap = window % 2 ? 0.0f : 3.0f;
            drive_attend(&m, s, 0, 60, &o, &rng);
        }
        model_close(&m);
    }
}

/* Runs the tasks last to first. */
static void backwards(void *user, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    while (n_tasks-- > 0)
        task(arg, n_tasks);
}

static void attend_once(kvc_ctx *ctx, float *data, float *lse)
{
    kvc_cache_params p = drive_params();
    struct model_seq *s;
    uint64_t rng = 8;
    kvc_view q, out;

    p.precision = precisions[3];
    s = start(ctx, p, 1500, &rng);
    q = queries(200, &rng);
    out = outputs(data, 200);
    assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, NULL, &out, lse), KVC_OK);
    model_close(&m);
}

static void threads_change_no_bit(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        attend_once(tables->ctx[i], want_data, want_lse);
        for (size_t threads = 0; threads < 5; threads++) {
            kvc_ctx_params params = {.struct_size = sizeof(params),
                                     .parallel_for = backwards,
                                     .kernels = kvc_ctx_kernels(tables->ctx[i])};
            kvc_pool *pool = NULL;
            kvc_ctx *ctx;

            if (threads > 0) {
                assert_int_equal(kvc_pool_create(threads, &pool), KVC_OK);
                params.parallel_for = kvc_pool_parallel_for;
                params.parallel_user = pool;
            }
            assert_int_equal(kvc_ctx_create(&params, &ctx), KVC_OK);
            memset(out_data, 0xff, sizeof(out_data));
            attend_once(ctx, out_data, lse_data);
            assert_memory_equal(out_data, want_data, (size_t)200 * 4 * 8 * sizeof(float));
            assert_memory_equal(lse_data, want_lse, (size_t)200 * 4 * sizeof(float));
            kvc_ctx_destroy(ctx);
            kvc_pool_destroy(pool);
        }
    }
}

/* Scores that are added in a second pass do not change the results of the first. */
static void scores_change_no_result(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_attend_options o = {.struct_size = 0};
        kvc_cache_params p = drive_params();
        struct model_seq *s;
        uint64_t rng = 9;
        kvc_view q, out, want;

        p.score_mode = KVC_SCORE_TOKEN;
        s = start(tables->ctx[i], p, 400, &rng);
        kvc_attend_options_default(m.cache, &o);
        q = queries(83, &rng);
        want = outputs(want_data, 83);
        out = outputs(out_data, 83);
        assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, &o, &want, want_lse), KVC_OK);
        o.accumulate = true;
        assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, &o, &out, lse_data), KVC_OK);
        assert_memory_equal(out_data, want_data, (size_t)83 * 4 * 8 * sizeof(float));
        assert_memory_equal(lse_data, want_lse, (size_t)83 * 4 * sizeof(float));
        model_attended(&m, s, 0, &q, &o);
        check_all(&m);
        model_close(&m);
    }
}

/* Where appends are small, so is the scratch, and queries may be many all the same. */
static void small_appends_need_no_room_for_many_queries(void **state)
{
    kvc_cache_params p = drive_params();
    size_t small, large;
    struct model_seq *s;
    uint64_t rng = 10;

    p.n_layers = 1;
    p.max_append = 9; /* 18 rows of a KV head */
    assert_int_equal(kvc_cache_min_budget(&p, &large), KVC_OK);
    p.max_append = 8;
    assert_int_equal(kvc_cache_min_budget(&p, &small), KVC_OK);
    assert_true(large > small + (1 << 17));
    drive_start(&m, best(state), p, 1 << 20);
    s = drive_create(&m);
    for (int i = 0; i < 15; i++)
        drive_feed(&m, s, 8, &rng, 1);
    drive_attend(&m, s, 0, 50, NULL, &rng);
    check_all(&m);
    model_close(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prefill_equals_float64),
        cmocka_unit_test(options_and_holes_equal_float64),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(scores_change_no_result),
        cmocka_unit_test(small_appends_need_no_room_for_many_queries),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
