/* Scores from query rows and keys, against a softmax in double and on every table. */
#include <math.h>
#include <string.h>

#include "kvc/pool.h"
#include "kvc/score.h"
#include "support/guard.h"
#include "support/rng.h"
#include "support/tables.h"

enum { MAX_W = 5, MAX_HEADS = 6, MAX_KEYS = 200, MAX_DIM = 70, WS = 1 << 20 };

static _Alignas(64) unsigned char ws[WS];

/* Arguments, all random, and the result in double. */
struct input {
    size_t w, n_heads, n_kv_heads, n_keys, dim;
    float q[MAX_W * MAX_HEADS * MAX_DIM], k[MAX_KEYS * MAX_HEADS * MAX_DIM];
    float bias[MAX_KEYS], weights[MAX_W], lse[MAX_W * MAX_HEADS];
    uint64_t masked[(MAX_KEYS + 63) / 64];
    kvc_view q_view, k_view;
    kvc_probe_options options;
    double want[MAX_HEADS * MAX_KEYS];
};

static bool is_seen(const struct input *in, size_t query, size_t key)
{
    const kvc_probe_options *o = &in->options;

    if (o->masked != NULL && (o->masked[key / 64] >> key % 64 & 1) != 0) {
        return false;
    }
    return o->first_query == INT64_MAX || (int64_t)key <= o->first_query + (int64_t)query;
}

static double logit(const struct input *in, size_t query, size_t head, size_t key)
{
    const size_t kv = head / (in->n_heads / in->n_kv_heads);
    const float *q = in->q + (query * in->n_heads + head) * in->dim;
    const float *k = in->k + (key * in->n_kv_heads + kv) * in->dim;
    const kvc_probe_options *o = &in->options;
    double z = 0.0;

    for (size_t c = 0; c < in->dim; c++) {
        z += (double)q[c] * (double)k[c];
    }
    z *= o->scale != 0.0f ? (double)o->scale : 1.0 / sqrt((double)in->dim);
    if (o->softcap > 0.0f) {
        z = (double)o->softcap * tanh(z / (double)o->softcap);
    }
    return o->bias != NULL ? z + (double)o->bias[key] : z;
}

/* Log-sum-exp over the keys that a row sees; -Inf if none. */
static double lse_of(const struct input *in, size_t query, size_t head)
{
    double sum = 0.0;

    for (size_t i = 0; i < in->n_keys; i++) {
        sum += is_seen(in, query, i) ? exp(logit(in, query, head, i)) : 0.0;
    }
    return sum > 0.0 ? log(sum) : (double)-INFINITY;
}

static void solve(struct input *in)
{
    const size_t group = in->n_heads / in->n_kv_heads;
    double sum = 0.0;

    memset(in->want, 0, sizeof(in->want));
    for (size_t t = 0; t < in->w; t++) {
        sum += in->options.query_weights != NULL ? (double)in->weights[t] : 1.0;
    }
    for (size_t t = 0; t < in->w; t++) {
        const double w = in->options.query_weights != NULL ? (double)in->weights[t] : 1.0;

        for (size_t h = 0; h < in->n_heads; h++) {
            const double lse =
                in->options.lse != NULL ? (double)in->lse[t * in->n_heads + h] : lse_of(in, t, h);

            for (size_t i = 0; i < in->n_keys; i++) {
                if (is_seen(in, t, i) && isfinite(lse) && w > 0.0) {
                    in->want[h / group * in->n_keys + i] +=
                        w * exp(logit(in, t, h, i) - lse) / (sum * (double)group);
                }
            }
        }
    }
}

static void make_views(struct input *in)
{
    in->q_view = kvc_view_packed(in->q, KVC_DTYPE_F32, in->w, in->n_heads, in->dim);
    in->k_view = kvc_view_packed(in->k, KVC_DTYPE_F32, in->n_keys, in->n_kv_heads, in->dim);
}

static void make_input(uint64_t *rng, struct input *in)
{
    const size_t group = 1 + rng_below(rng, 3);

    in->n_kv_heads = 1 + rng_below(rng, 2);
    in->n_heads = group * in->n_kv_heads;
    in->w = 1 + rng_below(rng, MAX_W);
    in->n_keys = 1 + rng_below(rng, MAX_KEYS);
    in->dim = 1 + rng_below(rng, MAX_DIM);
    make_views(in);
    for (size_t i = 0; i < sizeof(in->q) / sizeof(float); i++) {
        in->q[i] = 2.0f * rng_unit(rng);
    }
    for (size_t i = 0; i < sizeof(in->k) / sizeof(float); i++) {
        in->k[i] = 2.0f * rng_unit(rng);
    }
    for (size_t i = 0; i < MAX_KEYS; i++) {
        in->bias[i] = 0.5f + 0.5f * rng_unit(rng);
    }
    for (size_t i = 0; i < MAX_W; i++) {
        in->weights[i] = i == 0 ? 1.0f : (float)rng_below(rng, 3);
    }
    for (size_t i = 0; i < sizeof(in->masked) / sizeof(in->masked[0]); i++) {
        in->masked[i] = rng_next(rng) & rng_next(rng);
    }
    kvc_probe_options_default(&in->options);
    in->options.scale = rng_below(rng, 2) ? 0.3f : 0.0f;
    in->options.softcap = rng_below(rng, 3) ? 0.0f : 3.0f;
    in->options.bias = rng_below(rng, 2) ? in->bias : NULL;
    in->options.query_weights = rng_below(rng, 2) ? in->weights : NULL;
    in->options.masked = rng_below(rng, 2) ? in->masked : NULL;
    if (rng_below(rng, 2)) {
        in->options.first_query = (int64_t)rng_below(rng, in->n_keys + 10) - 5;
    }
    if (rng_below(rng, 2)) {
        for (size_t i = 0; i < in->w * in->n_heads; i++) {
            in->lse[i] = (float)lse_of(in, i / in->n_heads, i % in->n_heads) + 0.5f;
        }
        in->options.lse = in->lse;
    }
}

static kvc_status score(kvc_ctx *ctx, const struct input *in, float *scores)
{
    size_t size;

    assert_int_equal(kvc_score_queries_workspace_size(in->w, in->n_heads, in->n_keys,
                                                      in->n_kv_heads, in->dim, &size),
                     KVC_OK);
    assert_true(size < WS);
    memset(ws, 0xA5, sizeof(ws));
    const kvc_status status =
        kvc_score_queries(ctx, &in->q_view, &in->k_view, &in->options, scores, ws, size);
    assert_true(guard_all_fill(ws + size, WS - size, 0xA5));
    return status;
}

static void default_options_set_every_field(void **state)
{
    kvc_probe_options o;

    (void)state;
    memset(&o, 0xFF, sizeof(o));
    kvc_probe_options_default(&o);
    assert_int_equal(o.struct_size, sizeof(o));
    assert_true(o.scale == 0.0f && o.softcap == 0.0f && o.first_query == INT64_MAX);
    assert_true(!o.lse && !o.query_weights && !o.bias && !o.masked);
    kvc_probe_options_default(NULL);
}

static void scores_equal_a_full_softmax_in_double_on_every_table(void **state)
{
    const struct tables *tables = *state;
    static struct input in;
    float first[MAX_HEADS * MAX_KEYS], scores[MAX_HEADS * MAX_KEYS];
    uint64_t rng = 3;

    for (size_t round = 0; round < 200; round++) {
        make_input(&rng, &in);
        solve(&in);
        for (size_t i = 0; i < tables->n; i++) {
            assert_int_equal(score(tables->ctx[i], &in, scores), KVC_OK);
            if (i == 0) {
                memcpy(first, scores, sizeof(first));
            }
            assert_memory_equal(scores, first, in.n_kv_heads * in.n_keys * sizeof(float));
        }
        for (size_t i = 0; i < in.n_kv_heads * in.n_keys; i++) {
            assert_true(fabs((double)scores[i] - in.want[i]) <= 1e-5);
        }
    }
}

/* Runs the tasks from the last to the first. */
static void backwards(void *user, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    while (n_tasks-- > 0) {
        task(arg, n_tasks);
    }
}

static void no_split_over_threads_changes_a_bit(void **state)
{
    static struct input in;
    float want[MAX_HEADS * MAX_KEYS], scores[MAX_HEADS * MAX_KEYS];
    kvc_ctx_params params = {.struct_size = sizeof(params), .parallel_for = backwards};
    kvc_pool *pool;
    kvc_ctx *back, *threads;
    uint64_t rng = 4;

    assert_int_equal(kvc_ctx_create(&params, &back), KVC_OK);
    assert_int_equal(kvc_pool_create(3, &pool), KVC_OK);
    params.parallel_for = kvc_pool_parallel_for;
    params.parallel_user = pool;
    assert_int_equal(kvc_ctx_create(&params, &threads), KVC_OK);
    for (size_t round = 0; round < 50; round++) {
        make_input(&rng, &in);
        const size_t bytes = in.n_kv_heads * in.n_keys * sizeof(float);
        assert_int_equal(score(best(state), &in, want), KVC_OK);
        assert_int_equal(score(back, &in, scores), KVC_OK);
        assert_memory_equal(scores, want, bytes);
        assert_int_equal(score(threads, &in, scores), KVC_OK);
        assert_memory_equal(scores, want, bytes);
    }
    kvc_ctx_destroy(threads);
    kvc_ctx_destroy(back);
    kvc_pool_destroy(pool);
}

static void halves_and_strides_are_read(void **state)
{
    enum { KEYS = 5, DIM = 4 };
    uint16_t q[2 * DIM], k[KEYS * 2 * DIM];
    float q32[2 * DIM], k32[KEYS * DIM], want[KEYS], scores[KEYS];
    kvc_view q_view = kvc_view_packed(q, KVC_DTYPE_BF16, 1, 2, DIM);
    kvc_view k_view = kvc_view_packed(k, KVC_DTYPE_BF16, KEYS, 1, DIM);
    kvc_view q_floats = kvc_view_packed(q32, KVC_DTYPE_F32, 1, 2, DIM);
    kvc_view k_floats = kvc_view_packed(k32, KVC_DTYPE_F32, KEYS, 1, DIM);

    for (size_t i = 0; i < 2 * DIM; i++) {
        q[i] = (uint16_t)(0x3F80 + i); /* 1 and above */
        q32[i] = 1.0f + (float)i / 128.0f;
    }
    k_view.token_stride = 2 * DIM;
    memset(k, 0xFF, sizeof(k)); /* NaN between the rows */
    for (size_t i = 0; i < (size_t)KEYS * DIM; i++) {
        k[i / DIM * 2 * DIM + i % DIM] = (uint16_t)(0xBF80 + 3 * i);
        k32[i] = -1.0f - (float)(3 * i) / 128.0f;
    }
    assert_int_equal(kvc_score_queries(best(state), &q_floats, &k_floats, NULL, want, ws, WS),
                     KVC_OK);
    assert_int_equal(kvc_score_queries(best(state), &q_view, &k_view, NULL, scores, ws, WS),
                     KVC_OK);
    assert_memory_equal(scores, want, sizeof(want));
}

/* fault A4: query head h reads KV head h / (n_heads / n_kv_heads), not h % n_kv_heads. */
static void query_heads_share_kv_heads_in_blocks(void **state)
{
    enum { KEYS = 8, HEADS = 4, KV = 2 };
    float q[HEADS] = {1, 1, 1, 1}, k[KEYS][KV] = {{0}}, scores[KV][KEYS];
    kvc_view q_view = kvc_view_packed(q, KVC_DTYPE_F32, 1, HEADS, 1);
    kvc_view k_view = kvc_view_packed(k, KVC_DTYPE_F32, KEYS, KV, 1);

    q[2] = q[3] = -1.0f;
    k[3][0] = k[3][1] = 20.0f;  /* heads 0 and 1 look at 3 */
    k[5][0] = k[5][1] = -20.0f; /* heads 2 and 3 look at 5 */
    assert_int_equal(kvc_score_queries(best(state), &q_view, &k_view, NULL, scores[0], ws, WS),
                     KVC_OK);
    assert_true(scores[0][3] > 0.999f && scores[0][5] < 0.001f);
    assert_true(scores[1][5] > 0.999f && scores[1][3] < 0.001f);
}

/* fault C7: two rows of padding before a sequence of three change nothing but the index. */
static void padding_is_never_scored(void **state)
{
    enum { KEYS = 5, PADS = 2, DIM = 3 };
    static const uint64_t masked = 3;
    float q[2 * DIM], k[KEYS][DIM], scores[KEYS], want[KEYS - PADS];
    kvc_view q_view = kvc_view_packed(q, KVC_DTYPE_F32, 2, 1, DIM);
    kvc_view k_view = kvc_view_packed(k, KVC_DTYPE_F32, KEYS, 1, DIM);
    kvc_view short_view = kvc_view_packed(k[PADS], KVC_DTYPE_F32, KEYS - PADS, 1, DIM);
    kvc_probe_options o;
    uint64_t rng = 5;

    for (size_t i = 0; i < 2 * DIM; i++) {
        q[i] = rng_unit(&rng);
    }
    for (size_t i = 0; i < (size_t)KEYS * DIM; i++) {
        k[i / DIM][i % DIM] = i < (size_t)PADS * DIM ? 1e4f : rng_unit(&rng);
    }
    kvc_probe_options_default(&o);
    o.first_query = 1;
    assert_int_equal(kvc_score_queries(best(state), &q_view, &short_view, &o, want, ws, WS),
                     KVC_OK);
    o.first_query = 1 + PADS;
    o.masked = &masked;
    for (int round = 0; round < 2; round++) {
        assert_int_equal(kvc_score_queries(best(state), &q_view, &k_view, &o, scores, ws, WS),
                         KVC_OK);
        assert_true(scores[0] == 0.0f && scores[1] == 0.0f);
        for (size_t i = PADS; i < KEYS; i++) {
            assert_true(fabsf(scores[i] - want[i - PADS]) <= 1e-6f);
        }
        for (size_t i = 0; i < DIM; i++) { /* fault G4: and may hold anything */
            k[0][i] = NAN;
            k[1][i] = -INFINITY;
        }
    }
}

/* fault G4: what no row sees and rows of weight 0 cannot spoil the rest. */
static void nan_in_unused_rows_changes_nothing(void **state)
{
    static struct input in, clean;
    float scores[MAX_HEADS * MAX_KEYS], want[MAX_HEADS * MAX_KEYS];
    static const float weights[2] = {0.0f, 1.0f};
    uint64_t rng = 6;

    make_input(&rng, &in);
    in.w = 2, in.n_heads = 4, in.n_kv_heads = 2, in.n_keys = 100, in.dim = 24;
    make_views(&in);
    kvc_probe_options_default(&in.options);
    in.options.first_query = 70; /* row 1 sees 0 ... 71 */
    in.options.query_weights = weights;
    clean = in;
    make_views(&clean);
    for (size_t i = 0; i < 4 * 24; i++) {
        in.q[i] = NAN;
    }
    for (size_t i = (size_t)72 * 2 * 24; i < (size_t)100 * 2 * 24; i++) {
        in.k[i] = i % 2 ? NAN : INFINITY;
    }
    assert_int_equal(score(best(state), &in, scores), KVC_OK);
    assert_int_equal(score(best(state), &clean, want), KVC_OK);
    assert_memory_equal(scores, want, 200 * sizeof(float));
    assert_true(scores[71] > 0.0f && scores[72] == 0.0f);
}

static void numbers_that_are_none_are_reported_and_nothing_is_written(void **state)
{
    static struct input in;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    float scores[MAX_HEADS * MAX_KEYS] = {7}, old;
    uint64_t rng = 7;

    make_input(&rng, &in);
    in.w = 2, in.n_heads = 2, in.n_kv_heads = 2, in.n_keys = 70, in.dim = 3;
    make_views(&in);
    kvc_probe_options_default(&in.options);
    for (size_t i = 0; i < 3; i++) {
        float *const places[] = {&in.q[11], &in.k[69 * 6 + 5], &in.bias[69], &in.lse[3]};

        in.options.bias = in.bias;
        for (size_t p = 0; p < 4; p++) {
            in.options.lse = NULL;
            if (p == 3) {
                in.options.lse = in.lse;
                in.lse[0] = in.lse[1] = in.lse[2] = 1.0f;
            }
            old = *places[p];
            *places[p] = bad[i];
            /* -Inf as log-sum-exp: the row sees nothing */
            assert_int_equal(score(best(state), &in, scores),
                             p == 3 && i == 2 ? KVC_OK : KVC_E_NONFINITE);
            *places[p] = old;
            if (p < 3 || i < 2) {
                assert_true(scores[0] == 7.0f);
            }
        }
        scores[0] = 7.0f;
    }
    in.options.lse = NULL;
    in.options.scale = NAN;
    assert_int_equal(score(best(state), &in, scores), KVC_E_NONFINITE);
    in.options.scale = 3e38f; /* logits beyond the range of floats */
    assert_int_equal(score(best(state), &in, scores), KVC_E_NONFINITE);
    assert_true(scores[0] == 7.0f);
}

static void a_row_that_sees_nothing_adds_nothing(void **state)
{
    static struct input in;
    float scores[MAX_HEADS * MAX_KEYS];
    uint64_t rng = 8;

    make_input(&rng, &in);
    kvc_probe_options_default(&in.options);
    in.options.first_query = INT64_MIN;
    assert_int_equal(score(best(state), &in, scores), KVC_OK);
    for (size_t i = 0; i < in.n_kv_heads * in.n_keys; i++) {
        assert_true(scores[i] == 0.0f);
    }
}

static void wrong_arguments_are_refused(void **state)
{
    static const float zeros[2] = {0}, negative[2] = {1, -1}, nan[2] = {1, NAN};
    float x[64] = {0}, scores[8] = {7};
    const kvc_view q = kvc_view_packed(x, KVC_DTYPE_F32, 2, 4, 2);
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 4, 2, 2);
    kvc_view other;
    kvc_probe_options o;
    kvc_ctx *ctx = best(state);
    size_t size, s;

    assert_int_equal(kvc_score_queries_workspace_size(2, 4, 4, 2, 2, &size), KVC_OK);
    assert_int_equal(kvc_score_queries_workspace_size(0, 4, 4, 2, 2, &s), KVC_E_ARG);
    assert_int_equal(kvc_score_queries_workspace_size(2, 4, 4, 3, 2, &s), KVC_E_ARG);
    assert_int_equal(kvc_score_queries_workspace_size(2, 4, 4, 2, 0, &s), KVC_E_ARG);
    assert_int_equal(kvc_score_queries_workspace_size(2, 4, 4, 2, 513, &s), KVC_E_UNSUPPORTED);
    assert_int_equal(kvc_score_queries_workspace_size(2, 4, SIZE_MAX, 2, 2, &s), KVC_E_ARG);
    assert_int_equal(kvc_score_queries_workspace_size(SIZE_MAX, 4, 4, 2, 2, &s), KVC_E_ARG);
    assert_int_equal(kvc_score_queries_workspace_size(2, 4, 4, 2, 2, NULL), KVC_E_ARG);

    assert_int_equal(kvc_score_queries(NULL, &q, &k, NULL, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_score_queries(ctx, NULL, &k, NULL, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_score_queries(ctx, &q, NULL, NULL, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_score_queries(ctx, &q, &k, NULL, NULL, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_score_queries(ctx, &q, &k, NULL, scores, NULL, size), KVC_E_WORKSPACE);
    assert_int_equal(kvc_score_queries(ctx, &q, &k, NULL, scores, ws, size - 1), KVC_E_WORKSPACE);
    assert_int_equal(kvc_score_queries(ctx, &q, &k, NULL, scores, ws + 8, size), KVC_E_WORKSPACE);
    other = kvc_view_packed(x, KVC_DTYPE_F32, 4, 2, 1);
    assert_int_equal(kvc_score_queries(ctx, &q, &other, NULL, scores, ws, size), KVC_E_ARG);
    other = kvc_view_packed(x, KVC_DTYPE_F32, 0, 4, 2);
    assert_int_equal(kvc_score_queries(ctx, &other, &k, NULL, scores, ws, size), KVC_E_ARG);
    kvc_probe_options_default(&o);
    o.softcap = -1.0f;
    assert_int_equal(kvc_score_queries(ctx, &q, &k, &o, scores, ws, size), KVC_E_ARG);
    kvc_probe_options_default(&o);
    o.query_weights = zeros;
    assert_int_equal(kvc_score_queries(ctx, &q, &k, &o, scores, ws, size), KVC_E_ARG);
    o.query_weights = negative;
    assert_int_equal(kvc_score_queries(ctx, &q, &k, &o, scores, ws, size), KVC_E_ARG);
    o.query_weights = nan;
    assert_int_equal(kvc_score_queries(ctx, &q, &k, &o, scores, ws, size), KVC_E_NONFINITE);
    o.struct_size = 8;
    assert_int_equal(kvc_score_queries(ctx, &q, &k, &o, scores, ws, size), KVC_E_ARG);
    assert_true(scores[0] == 7.0f);
    other = kvc_view_packed(NULL, KVC_DTYPE_F32, 0, 2, 2);
    assert_int_equal(kvc_score_queries(ctx, &q, &other, NULL, NULL, NULL, 0), KVC_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_options_set_every_field),
        cmocka_unit_test(scores_equal_a_full_softmax_in_double_on_every_table),
        cmocka_unit_test(no_split_over_threads_changes_a_bit),
        cmocka_unit_test(halves_and_strides_are_read),
        cmocka_unit_test(query_heads_share_kv_heads_in_blocks),
        cmocka_unit_test(padding_is_never_scored),
        cmocka_unit_test(nan_in_unused_rows_changes_nothing),
        cmocka_unit_test(numbers_that_are_none_are_reported_and_nothing_is_written),
        cmocka_unit_test(a_row_that_sees_nothing_adds_nothing),
        cmocka_unit_test(wrong_arguments_are_refused),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
