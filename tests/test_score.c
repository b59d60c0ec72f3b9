/* Scores from attention: layers, heads and queries. */
#include <math.h>
#include <string.h>

#include "kvc/score.h"
#include "support/guard.h"
#include "support/rng.h"
#include "support/tables.h"

enum { N = 6, WS = 65536 };

static _Alignas(64) unsigned char ws[WS];

/* The attention of the printed reference numbers (G1): 2 layers, 2 heads, 2 queries. */
static const float g1[2][2][2][N] = {
    {{{.10f, .05f, .20f, .05f, .05f, .05f}, {.12f, .06f, .18f, .04f, .06f, .04f}},
     {{.02f, .02f, .40f, .02f, .02f, .02f}, {.03f, .03f, .30f, .03f, .03f, .03f}}},
    {{{.05f, .25f, .05f, .05f, .05f, .05f}, {.05f, .20f, .10f, .05f, .05f, .05f}},
     {{.04f, .04f, .04f, .30f, .04f, .04f}, {.04f, .04f, .04f, .24f, .04f, .10f}}}};
static const float g1_raw[N] = {.056250f, .086250f, .163750f, .097500f, .042500f, .047500f};

static kvc_attention_shape shape_of(size_t n_layers, size_t n_heads, size_t n_queries, size_t n)
{
    return (kvc_attention_shape){.struct_size = sizeof(kvc_attention_shape),
                                 .n_layers = n_layers,
                                 .n_heads = n_heads,
                                 .n_queries = n_queries,
                                 .n_tokens = n};
}

static kvc_score_options all_layers(void)
{
    kvc_score_options o;

    kvc_score_options_default(&o);
    o.layers = KVC_LAYERS_ALL;
    return o;
}

static void assert_near(const float *got, const float *want, size_t n, double tolerance)
{
    for (size_t i = 0; i < n; i++) {
        if (!(fabs((double)got[i] - (double)want[i]) <= tolerance)) {
            print_error("[%zu]: %.9g, not %.9g\n", i, (double)got[i], (double)want[i]);
        }
        assert_true(fabs((double)got[i] - (double)want[i]) <= tolerance);
    }
}

static void default_options_set_every_field(void **state)
{
    kvc_score_options s;

    (void)state;
    memset(&s, 0xFF, sizeof(s));
    kvc_score_options_default(&s);
    assert_int_equal(s.struct_size, sizeof(s));
    assert_int_equal(s.layers, KVC_LAYERS_MIDDLE);
    assert_int_equal(s.last_layers, 4);
    assert_true(!s.layer_weights && !s.head_weights && !s.query_weights && !s.masked);
    assert_false(s.normalize_rows || s.max_heads || s.best_heads);
    kvc_score_options_default(NULL);
}

static void a_grid_counts_its_tokens(void **state)
{
    kvc_grid grid = kvc_grid_image(27, 27); /* fault A2: no class token where there is none */
    size_t n = 0;

    (void)state;
    assert_int_equal(kvc_grid_tokens(&grid, &n), KVC_OK);
    assert_int_equal(n, 729);
    grid.n_frames = 3;
    assert_int_equal(kvc_grid_tokens(&grid, &n), KVC_OK);
    assert_int_equal(n, 2187);
    grid.n_cols = 0;
    assert_int_equal(kvc_grid_tokens(&grid, &n), KVC_OK);
    assert_int_equal(n, 0);
    grid = (kvc_grid){sizeof(grid), INT32_MAX, INT32_MAX, INT32_MAX};
    assert_int_equal(kvc_grid_tokens(&grid, &n), KVC_E_ARG);
    grid = kvc_grid_image(INT32_MAX, 2);
    assert_int_equal(kvc_grid_tokens(&grid, &n), KVC_E_ARG);
    grid = kvc_grid_image(-1, -1);
    assert_int_equal(kvc_grid_tokens(&grid, &n), KVC_E_ARG);
    grid = kvc_grid_image(1, 1);
    grid.struct_size--;
    assert_int_equal(kvc_grid_tokens(&grid, &n), KVC_E_ARG);
    assert_int_equal(kvc_grid_tokens(NULL, &n), KVC_E_ARG);
    assert_int_equal(n, 0);
}

/* The layers that count, as bits. */
static unsigned layers_of(const kvc_score_options *o, int32_t n_layers)
{
    unsigned bits = 0;

    for (int32_t l = 0; l < n_layers; l++) {
        float w = -1.0f;

        assert_int_equal(kvc_layer_weight(o, l, n_layers, &w), KVC_OK);
        assert_true(w == 0.0f || w == 1.0f);
        bits |= (unsigned)w << l;
    }
    return bits;
}

static void layers_are_the_middle_third_the_last_all_or_weighted(void **state)
{
    static const float weights[3] = {0.0f, 2.5f, NAN};
    kvc_score_options o;
    float w = 7.0f;

    (void)state;
    assert_int_equal(layers_of(NULL, 1), 1);
    assert_int_equal(layers_of(NULL, 2), 1);
    assert_int_equal(layers_of(NULL, 3), 2);
    assert_int_equal(layers_of(NULL, 8), 4 + 8 + 16);  /* 2 ... 4 */
    assert_int_equal(layers_of(NULL, 9), 8 + 16 + 32); /* 3 ... 5 */
    kvc_score_options_default(&o);
    o.layers = KVC_LAYERS_LAST;
    assert_int_equal(layers_of(&o, 6), 4 + 8 + 16 + 32);
    assert_int_equal(layers_of(&o, 2), 3);
    o.last_layers = 1;
    assert_int_equal(layers_of(&o, 6), 32);
    o.layers = KVC_LAYERS_ALL;
    assert_int_equal(layers_of(&o, 6), 63);
    o.layers = KVC_LAYERS_WEIGHTED;
    assert_int_equal(kvc_layer_weight(&o, 0, 3, &w), KVC_E_ARG);
    o.layer_weights = weights;
    assert_int_equal(kvc_layer_weight(&o, 1, 3, &w), KVC_OK);
    assert_true(w == 2.5f);
    assert_int_equal(kvc_layer_weight(&o, 2, 3, &w), KVC_E_NONFINITE);
    assert_int_equal(kvc_layer_weight(&o, 3, 3, &w), KVC_E_ARG);
    assert_int_equal(kvc_layer_weight(&o, -1, 3, &w), KVC_E_ARG);
    o.layers = KVC_LAYERS_LAST;
    o.last_layers = 0;
    assert_int_equal(kvc_layer_weight(&o, 0, 3, &w), KVC_E_ARG);
    o.layers = (kvc_layer_choice)4;
    assert_int_equal(kvc_layer_weight(&o, 0, 3, &w), KVC_E_ARG);
    assert_true(w == 2.5f);
}

static void reference_numbers_of_attention_are_met(void **state)
{
    static const float last_want[N] = {.0600f, .0825f, .1550f, .0900f, .0450f, .0550f};
    static const float norm_want[N] = {.113333f, .173333f, .335833f, .195833f, .085833f, .095833f};
    static const float last[2] = {0.0f, 1.0f};
    const kvc_attention_shape shape = shape_of(2, 2, 2, N);
    kvc_score_options o = all_layers();
    float scores[N];

    (void)state;
    assert_int_equal(kvc_score_attention(g1[0][0][0], &shape, &o, scores, ws, WS), KVC_OK);
    assert_near(scores, g1_raw, N, 1e-6);
    o.query_weights = last;
    assert_int_equal(kvc_score_attention(g1[0][0][0], &shape, &o, scores, ws, WS), KVC_OK);
    assert_near(scores, last_want, N, 1e-6);
    o.query_weights = NULL;
    o.normalize_rows = true;
    assert_int_equal(kvc_score_attention(g1[0][0][0], &shape, &o, scores, ws, WS), KVC_OK);
    assert_near(scores, norm_want, N, 1e-6);
}

static void the_largest_head_and_the_better_half_of_the_heads_can_count(void **state)
{
    static const float a[1][3][1][2] = {{{{.1f, .2f}}, {{.0f, .5f}}, {{.4f, .0f}}}};
    static const float weights[3] = {1.0f, 3.0f, 0.0f};
    const kvc_attention_shape shape = shape_of(1, 3, 1, 2);
    kvc_score_options o = all_layers();
    float scores[2];

    (void)state;
    o.max_heads = true;
    assert_int_equal(kvc_score_attention(a[0][0][0], &shape, &o, scores, ws, WS), KVC_OK);
    assert_near(scores, (const float[]){.4f, .5f}, 2, 0.0);
    o.head_weights = weights; /* the third is left out, the others count alike */
    assert_int_equal(kvc_score_attention(a[0][0][0], &shape, &o, scores, ws, WS), KVC_OK);
    assert_near(scores, (const float[]){.1f, .5f}, 2, 0.0);
    o.max_heads = false;
    assert_int_equal(kvc_score_attention(a[0][0][0], &shape, &o, scores, ws, WS), KVC_OK);
    assert_near(scores, (const float[]){.025f, .425f}, 2, 1e-7);
    o.best_heads = true; /* one of the two that are left: the second */
    assert_int_equal(kvc_score_attention(a[0][0][0], &shape, &o, scores, ws, WS), KVC_OK);
    assert_near(scores, (const float[]){.0f, .5f}, 2, 0.0);
    o.head_weights = NULL; /* two of three: the second and the third */
    assert_int_equal(kvc_score_attention(a[0][0][0], &shape, &o, scores, ws, WS), KVC_OK);
    assert_near(scores, (const float[]){.2f, .25f}, 2, 1e-7);
}

/* The article: attn[:, :, :, text_last, visual].mean(dim=(0, 1, 2)) of [L][B][H][S][S]. */
static void the_articles_function_is_one_setting(void **state)
{
    enum { L = 3, B = 2, H = 4, S = 20, FIRST = 5, VISUAL = 9, LAST = 17 };
    static float a[L][B][H][S][S];
    float *flat = (float *)(void *)a;
    const kvc_score_options o = all_layers();
    kvc_attention_shape shape = shape_of(L, (size_t)B * H, 1, VISUAL);
    float scores[VISUAL], want[VISUAL];
    uint64_t rng = 1;

    (void)state;
    for (size_t i = 0; i < sizeof(a) / sizeof(float); i++) {
        flat[i] = 0.5f + 0.5f * rng_unit(&rng);
    }
    for (size_t i = 0; i < VISUAL; i++) {
        double sum = 0.0;

        for (size_t r = 0; r < (size_t)L * B * H; r++) {
            sum += (double)a[r / H / B][r / H % B][r % H][LAST][FIRST + i];
        }
        want[i] = (float)(sum / (L * B * H));
    }
    shape.head_stride = (size_t)S * S;
    assert_int_equal(kvc_score_attention(&a[0][0][0][LAST][FIRST], &shape, &o, scores, ws, WS),
                     KVC_OK);
    assert_near(scores, want, VISUAL, 1e-6);
}

static void random_attention_agrees_with_a_double_sum(void **state)
{
    enum { MAX = 5 * 6 * 4 * 40 };
    static float a[2 * MAX];
    uint64_t rng = 2;

    (void)state;
    for (size_t round = 0; round < 300; round++) {
        const size_t L = 1 + rng_below(&rng, 5), H = 1 + rng_below(&rng, 6);
        const size_t Q = 1 + rng_below(&rng, 4), n = 1 + rng_below(&rng, 40);
        kvc_attention_shape shape = shape_of(L, H, Q, n);
        kvc_score_options o = all_layers();
        float lw[5], hw[6], qw[4], scores[40], want[40] = {0};
        double sum = 0.0;

        shape.token_stride = 1 + rng_below(&rng, 2);
        for (size_t i = 0; i < 2 * MAX; i++) {
            a[i] = 0.5f + 0.5f * rng_unit(&rng);
        }
        lw[0] = hw[0] = qw[0] = 1.0f;
        for (size_t i = 1; i < L; i++) {
            lw[i] = (float)rng_below(&rng, 3);
        }
        for (size_t i = 1; i < H; i++) {
            hw[i] = (float)rng_below(&rng, 3);
        }
        for (size_t i = 1; i < Q; i++) {
            qw[i] = (float)rng_below(&rng, 3);
        }
        o.layers = KVC_LAYERS_WEIGHTED;
        o.layer_weights = lw;
        o.head_weights = hw;
        o.query_weights = qw;
        for (size_t row = 0; row < L * H * Q; row++) {
            sum += (double)(lw[row / Q / H] * hw[row / Q % H] * qw[row % Q]);
        }
        for (size_t i = 0; i < n; i++) {
            double x = 0.0;

            for (size_t row = 0; row < L * H * Q; row++) {
                x += (double)(lw[row / Q / H] * hw[row / Q % H] * qw[row % Q] *
                              a[(row * n + i) * shape.token_stride]);
            }
            want[i] = (float)(x / sum);
        }
        assert_int_equal(kvc_score_attention(a, &shape, &o, scores, ws, WS), KVC_OK);
        assert_near(scores, want, n, 1e-6);
    }
}

/* fault G4 and the padding of fault C7: what does not count may hold anything. */
static void unused_rows_and_masked_tokens_are_not_read(void **state)
{
    static float a[2][2][2][N];
    static const float weights[2] = {0.0f, 3.0f};
    static const uint64_t masked = 1u << 2 | 1u << 5;
    const kvc_attention_shape shape = shape_of(2, 2, 2, N);
    kvc_score_options o = all_layers();
    float scores[N], want[N];

    (void)state;
    memcpy(a, g1, sizeof(a));
    o.query_weights = o.head_weights = weights;
    o.layers = KVC_LAYERS_LAST;
    o.last_layers = 1;
    o.masked = &masked;
    o.normalize_rows = true;
    a[1][1][1][2] = a[1][1][1][5] = 0.0f;
    assert_int_equal(kvc_score_attention(a[0][0][0], &shape, &o, want, ws, WS), KVC_OK);
    for (size_t i = 0; i < sizeof(a) / sizeof(float) - N; i++) {
        ((float *)(void *)a)[i] = i % 2 ? NAN : -INFINITY;
    }
    a[1][1][1][2] = 9.0f;
    a[1][1][1][5] = NAN;
    assert_int_equal(kvc_score_attention(a[0][0][0], &shape, &o, scores, ws, WS), KVC_OK);
    assert_memory_equal(scores, want, sizeof(want));
    assert_true(scores[2] == 0.0f && scores[5] == 0.0f);
    assert_near(scores, (const float[]){.111111f, .111111f, 0, .666667f, .111111f, 0}, N, 1e-6);
}

static void values_that_are_no_probabilities_are_refused(void **state)
{
    const kvc_attention_shape shape = shape_of(2, 2, 2, N);
    const kvc_score_options o = all_layers();
    static const float bad[] = {NAN, INFINITY, -INFINITY, -1e-30f};
    static float a[2][2][2][N];
    float scores[N] = {7};

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        memcpy(a, g1, sizeof(a));
        a[1][1][1][5] = bad[i];
        assert_int_equal(kvc_score_attention(a[0][0][0], &shape, &o, scores, ws, WS),
                         i < 3 ? KVC_E_NONFINITE : KVC_E_ARG);
        assert_true(scores[0] == 7.0f);
    }
}

static void wrong_arguments_of_attention_are_refused(void **state)
{
    static const float zeros[2] = {0}, negative[2] = {-1, 2}, infinite[2] = {1, INFINITY};
    const kvc_attention_shape good = shape_of(2, 2, 2, N);
    kvc_attention_shape bad[8];
    kvc_score_options o = all_layers();
    const float *a = g1[0][0][0];
    float scores[N] = {7};
    size_t size;

    (void)state;
    for (size_t i = 0; i < 8; i++) {
        bad[i] = good;
    }
    bad[0].n_layers = 0;
    bad[1].n_heads = 0;
    bad[2].n_queries = 0;
    bad[3].struct_size = 0;
    bad[4].n_tokens = SIZE_MAX / 4;
    bad[5].query_stride = SIZE_MAX / 2;
    bad[6].n_heads = SIZE_MAX;
    bad[7].layer_stride = PTRDIFF_MAX / 4;
    for (size_t i = 0; i < 8; i++) {
        assert_int_equal(kvc_score_attention(a, &bad[i], &o, scores, ws, WS), KVC_E_ARG);
        assert_int_equal(kvc_score_attention_workspace_size(&bad[i], &size), KVC_E_ARG);
    }
    assert_int_equal(kvc_score_attention_workspace_size(&good, &size), KVC_OK);
    assert_int_equal(kvc_score_attention(a, &good, &o, scores, ws, size - 1), KVC_E_WORKSPACE);
    assert_int_equal(kvc_score_attention(a, &good, &o, scores, NULL, size), KVC_E_WORKSPACE);
    assert_int_equal(kvc_score_attention(a, &good, &o, scores, ws + 4, size), KVC_E_WORKSPACE);
    assert_int_equal(kvc_score_attention(NULL, &good, &o, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_score_attention(a, NULL, &o, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_score_attention(a, &good, &o, NULL, ws, size), KVC_E_ARG);
    o.head_weights = zeros;
    assert_int_equal(kvc_score_attention(a, &good, &o, scores, ws, size), KVC_E_ARG);
    o.head_weights = negative;
    assert_int_equal(kvc_score_attention(a, &good, &o, scores, ws, size), KVC_E_ARG);
    o.head_weights = infinite;
    assert_int_equal(kvc_score_attention(a, &good, &o, scores, ws, size), KVC_E_NONFINITE);
    o.head_weights = NULL;
    o.layers = KVC_LAYERS_WEIGHTED;
    o.layer_weights = zeros;
    assert_int_equal(kvc_score_attention(a, &good, &o, scores, ws, size), KVC_E_ARG);
    assert_true(scores[0] == 7.0f);
    bad[0] = shape_of(1, 1, 1, 0);
    assert_int_equal(kvc_score_attention(NULL, &bad[0], NULL, NULL, NULL, 0), KVC_OK);
}

static void attention_writes_inside_its_workspace_and_scores(void **state)
{
    const kvc_attention_shape shape = shape_of(2, 2, 2, N);
    kvc_score_options o = all_layers();
    struct guard scores = guard_new(N * sizeof(float), 4, 0xA5);
    size_t size;

    (void)state;
    o.best_heads = true;
    assert_int_equal(kvc_score_attention_workspace_size(&shape, &size), KVC_OK);
    memset(ws, 0x5A, sizeof(ws));
    assert_int_equal(
        kvc_score_attention(g1[0][0][0], &shape, &o, (float *)(void *)scores.data, ws, size),
        KVC_OK);
    assert_true(guard_intact(&scores));
    assert_true(guard_all_fill(ws + size, WS - size, 0x5A));
    guard_free(&scores);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_options_set_every_field),
        cmocka_unit_test(a_grid_counts_its_tokens),
        cmocka_unit_test(layers_are_the_middle_third_the_last_all_or_weighted),
        cmocka_unit_test(reference_numbers_of_attention_are_met),
        cmocka_unit_test(the_largest_head_and_the_better_half_of_the_heads_can_count),
        cmocka_unit_test(the_articles_function_is_one_setting),
        cmocka_unit_test(random_attention_agrees_with_a_double_sum),
        cmocka_unit_test(unused_rows_and_masked_tokens_are_not_read),
        cmocka_unit_test(values_that_are_no_probabilities_are_refused),
        cmocka_unit_test(wrong_arguments_of_attention_are_refused),
        cmocka_unit_test(attention_writes_inside_its_workspace_and_scores),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
