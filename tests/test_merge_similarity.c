/* Cosines of keys against double precision, the same bits however they are computed; errors. */
#include <math.h>
#include <string.h>

#include "support/guard.h"
#include "support/half.h"
#include "support/merging.h"

#include "kvc/pool.h"

static double cosine(const float *a, const float *b, size_t d, double *norm_a)
{
    double ab = 0, aa = 0, bb = 0;

    for (size_t i = 0; i < d; i++) {
        ab += (double)a[i] * (double)b[i];
        aa += (double)a[i] * (double)a[i];
        bb += (double)b[i] * (double)b[i];
    }
    *norm_a = sqrt(aa);
    return aa > 0 && bb > 0 ? ab / sqrt(aa * bb) : 0;
}

/* All head sizes around whole vectors, strides with gaps, halves, sums over layers. */
static void similarity_adds_the_cosines_of_heads_and_layers(void **state)
{
    enum { N = 83, HEADS = 3, GAP = 5, MAX_D = 70 };
    const struct tables *t = *state;
    static float x[N * (HEADS * (MAX_D + GAP) + GAP)];
    static uint16_t half[N * (HEADS * (MAX_D + GAP) + GAP)];
    static float s[N * (N - 1) / 2];
    float norms[N];
    uint64_t rng = 21;

    for (size_t d = 1; d <= MAX_D; d += 1 + d / 3) {
        for (size_t i = 0; i < sizeof(x) / sizeof(x[0]); i++) {                /* exact halves */
            const uint16_t bits = (uint16_t)(0x3000 + rng_below(&rng, 0xC00)); /* 0.125 .. 1 */
            half[i] = rng_below(&rng, 2) == 0 ? bits : (uint16_t)(bits | HALF_SIGN);
            x[i] = (float)half_value(half[i]);
        }
        kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, N, HEADS, d);
        k.head_stride = d + GAP;
        k.token_stride = HEADS * (d + GAP) + GAP;
        kvc_view k16 = k;
        k16.data = half;
        k16.dtype = KVC_DTYPE_F16;
        for (size_t i = 0; i < t->n; i++) {
            memset(s, 0, sizeof(s));
            memset(norms, 0, sizeof(norms));
            similarity_of(t->ctx[i], &k, NULL, NULL, s, norms);
            similarity_of(t->ctx[i], &k16, NULL, NULL, s, norms); /* the same as a second layer */
            for (size_t a = 0; a < N; a++) {
                double norm = 0, one;
                for (size_t b = a + 1; b < N; b++) {
                    double sum = 0;
                    for (size_t h = 0; h < HEADS; h++) {
                        sum += cosine(x + a * k.token_stride + h * k.head_stride,
                                      x + b * k.token_stride + h * k.head_stride, d, &one);
                    }
                    assert_true(fabs((double)s[at(N, a, b)] - 2 * sum) < 4e-6);
                }
                for (size_t h = 0; h < HEADS; h++) {
                    const float *row = x + a * k.token_stride + h * k.head_stride;
                    (void)cosine(row, row, d, &one);
                    norm += one;
                }
                assert_true(fabs((double)norms[a] - 2 * norm) < 1e-4);
            }
        }
    }
}

/* A window leaves out what is far, and nothing that is near. */
static void a_window_keeps_the_similarity_of_what_may_merge(void **state)
{
    enum { N = 150, D = 8 };
    static float x[N * D], all[N * (N - 1) / 2], some[N * (N - 1) / 2];
    float norms[N] = {0};
    kvc_merge_token tokens[N];
    kvc_merge_options o = merge_options(0.0f);
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, N, 1, D);
    uint64_t rng = 4;
    size_t n_left_out = 0;

    for (size_t i = 0; i < (size_t)N * D; i++) {
        x[i] = rng_unit(&rng);
    }
    image_tokens(tokens, N, 6);
    o.window = 2;
    memset(all, 0, sizeof(all));
    memset(some, 0, sizeof(some));
    similarity_of(best(state), &k, NULL, &o, all, norms);
    similarity_of(best(state), &k, tokens, &o, some, norms);
    for (size_t i = 0; i < N; i++) {
        for (size_t j = i + 1; j < N; j++) {
            const bool near = abs(tokens[i].row - tokens[j].row) <= 2;
            assert_true(some[at(N, i, j)] == all[at(N, i, j)] ||
                        (!near && some[at(N, i, j)] == 0.0f));
            n_left_out += some[at(N, i, j)] == 0.0f;
        }
    }
    assert_true(n_left_out > N * (N - 1) / 8);
}

/* Tasks run backwards. */
static void backwards(void *user, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    while (n_tasks-- > 0) {
        task(arg, n_tasks);
    }
}

static void decisions_are_the_same_bits_on_every_table_and_split(void **state)
{
    enum { N = 150, HEADS = 2, D = 40 };
    const struct tables *t = *state;
    static float x[N * HEADS * D], first[N * (N - 1) / 2], s[N * (N - 1) / 2];
    float first_norms[N], norms[N];
    kvc_merge_token tokens[N];
    kvc_merge_pair first_pairs[N / 2], pairs[N / 2];
    kvc_merge_options o = merge_options(0.1f);
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, N, HEADS, D);
    uint64_t rng = 17;
    size_t n_first = 0;
    kvc_pool *pool;

    assert_int_equal(kvc_pool_create(3, &pool), KVC_OK);
    for (int round = 0; round < 6; round++) {
        for (size_t i = 0; i < (size_t)N * HEADS * D; i++) {
            x[i] = rng_unit(&rng) * (i % 7 == 0 ? 20.0f : 1.0f);
        }
        random_tokens(&rng, tokens, N);
        o.window = round % 2 * 3;
        for (size_t i = 0; i < t->n; i++) {
            for (int split = 0; split < 3; split++) {
                const kvc_ctx_params params = {
                    .struct_size = sizeof(params),
                    .kernels = kvc_ctx_kernels(t->ctx[i]),
                    .parallel_for = split == 0   ? NULL
                                    : split == 1 ? backwards
                                                 : kvc_pool_parallel_for,
                    .parallel_user = pool,
                };
                kvc_ctx *ctx;
                assert_int_equal(kvc_ctx_create(&params, &ctx), KVC_OK);
                memset(s, 0, sizeof(s));
                memset(norms, 0, sizeof(norms));
                similarity_of(ctx, &k, tokens, &o, s, norms);
                const size_t n = plan(ctx, &k, tokens, &o, pairs);
                kvc_ctx_destroy(ctx);
                if (i == 0 && split == 0) {
                    assert_true(n > 5);
                    n_first = n;
                    memcpy(first, s, sizeof(s));
                    memcpy(first_norms, norms, sizeof(norms));
                    memcpy(first_pairs, pairs, sizeof(pairs));
                }
                assert_int_equal(n, n_first);
                assert_memory_equal(s, first, sizeof(s));
                assert_memory_equal(norms, first_norms, sizeof(norms));
                assert_memory_equal(pairs, first_pairs, n * sizeof(pairs[0]));
            }
        }
    }
    kvc_pool_destroy(pool);
}

static void wrong_arguments_are_refused_before_anything_is_written(void **state)
{
    kvc_ctx *ctx = best(state);
    float x[3][2] = {{1, 0}, {1, 0}, {1, 0}}, s[3] = {0}, norms[3] = {0};
    kvc_merge_token tokens[3];
    kvc_merge_pair pairs[1];
    size_t size, n_pairs = 77;
    kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 3, 1, 2);
    struct guard out = guard_new(sizeof(pairs), 0, 0x5A);
    char *ws = workspace(4096);

    image_tokens(tokens, 3, 3);
    kvc_merge_options bad[12];
    for (size_t i = 0; i < 12; i++) {
        bad[i] = merge_options(0.5f);
    }
    bad[0].tau = NAN;
    bad[1].tau = 1.5f;
    bad[2].max_norm_ratio = 0.5f;
    bad[3].max_norm_ratio = NAN;
    bad[4].max_share = -0.1f;
    bad[5].max_share = 1.1f;
    bad[6].max_share = NAN;
    bad[7].window = -1;
    bad[8].weights = (kvc_merge_weights)2;
    bad[9].struct_size = sizeof(size_t);
    bad[10].struct_size = 0;
    bad[11].tau = -1.01f;
    for (size_t i = 0; i < 12; i++) {
        assert_int_equal(kvc_merge_similarity(ctx, &k, tokens, &bad[i], s, norms, ws, 4096),
                         KVC_E_ARG);
        assert_int_equal(
            kvc_merge_match(s, 1, NULL, tokens, 3, &bad[i], (void *)out.data, &n_pairs, ws, 4096),
            KVC_E_ARG);
        assert_int_equal(
            kvc_merge_plan(ctx, &k, 1, tokens, &bad[i], (void *)out.data, &n_pairs, ws, 4096),
            KVC_E_ARG);
    }

    kvc_merge_token wrong[8][3];
    for (size_t i = 0; i < 8; i++) {
        memcpy(wrong[i], tokens, sizeof(tokens));
    }
    wrong[0][2].size = 0;
    wrong[1][2].size = NAN;
    wrong[2][2].size = INFINITY;
    wrong[3][2].bias = NAN;
    wrong[4][2].mass = -1;
    wrong[5][2].mass = INFINITY;
    wrong[6][2].mass = NAN;
    wrong[7][2].reserved[2] = 1;
    for (size_t i = 0; i < 8; i++) {
        assert_int_equal(kvc_merge_similarity(ctx, &k, wrong[i], NULL, s, norms, ws, 4096),
                         KVC_E_ARG);
        assert_int_equal(
            kvc_merge_match(s, 1, NULL, wrong[i], 3, NULL, (void *)out.data, &n_pairs, ws, 4096),
            KVC_E_ARG);
        assert_int_equal(
            kvc_merge_plan(ctx, &k, 1, wrong[i], NULL, (void *)out.data, &n_pairs, ws, 4096),
            KVC_E_ARG);
    }

    assert_int_equal(kvc_merge_similarity(NULL, &k, tokens, NULL, s, norms, ws, 4096), KVC_E_ARG);
    assert_int_equal(kvc_merge_similarity(ctx, NULL, tokens, NULL, s, norms, ws, 4096), KVC_E_ARG);
    assert_int_equal(kvc_merge_similarity(ctx, &k, tokens, NULL, NULL, norms, ws, 4096), KVC_E_ARG);
    assert_int_equal(kvc_merge_similarity(ctx, &k, tokens, NULL, s, NULL, ws, 4096), KVC_E_ARG);
    assert_int_equal(kvc_merge_similarity_workspace_size(&k, NULL), KVC_E_ARG);
    assert_int_equal(kvc_merge_similarity_workspace_size(&k, &size), KVC_OK);
    assert_int_equal(kvc_merge_similarity(ctx, &k, tokens, NULL, s, norms, NULL, size),
                     KVC_E_WORKSPACE);
    assert_int_equal(kvc_merge_similarity(ctx, &k, tokens, NULL, s, norms, ws, size - 1),
                     KVC_E_WORKSPACE);
    assert_int_equal(kvc_merge_similarity(ctx, &k, tokens, NULL, s, norms, ws + 4, size),
                     KVC_E_WORKSPACE);
    k.head_dim = k.head_stride = k.token_stride = KVC_MAX_HEAD_DIM + 1;
    assert_int_equal(kvc_merge_similarity(ctx, &k, tokens, NULL, s, norms, ws, 4096),
                     KVC_E_UNSUPPORTED);
    assert_int_equal(kvc_merge_plan_workspace_size(&k, 1, &size), KVC_E_UNSUPPORTED);
    assert_int_equal(kvc_merge_plan_workspace_size(&k, 0, &size), KVC_E_ARG);
    assert_true(s[0] == 0.0f && s[1] == 0.0f && norms[0] == 0.0f);

    const float scales[] = {0.0f, -1.0f, NAN, INFINITY};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(kvc_merge_match(s, scales[i], NULL, tokens, 3, NULL, (void *)out.data,
                                         &n_pairs, ws, 4096),
                         KVC_E_ARG);
    }
    assert_int_equal(kvc_merge_match(NULL, 1, NULL, tokens, 3, NULL, pairs, &n_pairs, ws, 4096),
                     KVC_E_ARG);
    assert_int_equal(kvc_merge_match(s, 1, NULL, NULL, 3, NULL, pairs, &n_pairs, ws, 4096),
                     KVC_E_ARG);
    assert_int_equal(kvc_merge_match(s, 1, NULL, tokens, 3, NULL, NULL, &n_pairs, ws, 4096),
                     KVC_E_ARG);
    assert_int_equal(kvc_merge_match(s, 1, NULL, tokens, 3, NULL, pairs, NULL, ws, 4096),
                     KVC_E_ARG);
    assert_int_equal(
        kvc_merge_match(s, 1, NULL, tokens, (size_t)INT32_MAX + 1, NULL, pairs, &n_pairs, ws, 4096),
        KVC_E_ARG);
    assert_int_equal(kvc_merge_match_workspace_size((size_t)INT32_MAX + 1, &size), KVC_E_ARG);
    assert_int_equal(kvc_merge_match_workspace_size(3, &size), KVC_OK);
    assert_int_equal(
        kvc_merge_match(s, 1, NULL, tokens, 3, NULL, (void *)out.data, &n_pairs, ws, size - 1),
        KVC_E_WORKSPACE);
    assert_int_equal(n_pairs, 77);
    assert_true(guard_untouched(&out));
    guard_free(&out);
    free(ws);
}

static void the_triangle_holds_each_pair_once(void **state)
{
    (void)state;
    for (size_t n = 0; n < 40; n++) {
        size_t next = 0;
        for (size_t i = 0; i < n; i++) {
            for (size_t j = i + 1; j < n; j++) {
                assert_int_equal(at(n, i, j), next++);
            }
        }
        assert_int_equal(kvc_merge_triangle(n), next);
    }
    assert_int_equal(kvc_merge_triangle(INT32_MAX), (size_t)INT32_MAX / 2 * INT32_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(similarity_adds_the_cosines_of_heads_and_layers),
        cmocka_unit_test(a_window_keeps_the_similarity_of_what_may_merge),
        cmocka_unit_test(decisions_are_the_same_bits_on_every_table_and_split),
        cmocka_unit_test(wrong_arguments_are_refused_before_anything_is_written),
        cmocka_unit_test(the_triangle_holds_each_pair_once),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
