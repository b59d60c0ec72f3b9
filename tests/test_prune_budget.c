/* Budgets over layers and heads: reference numbers, exact sums, sparsity, common mass. */
#include <math.h>
#include <string.h>

#include "support/rng.h"
#include "support/select.h"

enum { MAX_LAYERS = 24 };

static kvc_budget_options budget_options(kvc_budget_mode mode, size_t min, size_t max)
{
    kvc_budget_options o;

    kvc_budget_options_default(&o);
    o.mode = mode;
    o.min = min;
    o.max = max;
    return o;
}

static void check_split(const float *weights, size_t n, size_t total, const kvc_budget_options *o,
                        const int32_t *want)
{
    int32_t budgets[MAX_LAYERS];

    assert_int_equal(kvc_split_budget(weights, n, total, o, budgets), KVC_OK);
    assert_rows(budgets, n, want, n);
}

static void default_budget_options_set_every_field(void **state)
{
    kvc_budget_options o;

    (void)state;
    memset(&o, 0xFF, sizeof(o));
    kvc_budget_options_default(&o);
    assert_int_equal(o.struct_size, sizeof(o));
    assert_int_equal(o.mode, KVC_BUDGET_HYBRID);
    assert_true(o.uniform_share == 0.8f && o.pyramid == 3.0f);
    assert_true(o.min == 0 && o.max == INT32_MAX);
    kvc_budget_options_default(NULL);
}

/* Reference G6: 40 rows over four layers, 4 to 20 each. */
static void budgets_are_those_of_the_reference(void **state)
{
    static const float weights[4] = {0.5f, 0.1f, 0.05f, 0.35f};
    kvc_budget_options o = budget_options(KVC_BUDGET_WEIGHTS, 4, 20);

    (void)state;
    check_split(weights, 4, 40, &o, (int32_t[]){19, 4, 4, 13});
    o.mode = KVC_BUDGET_HYBRID;
    check_split(weights, 4, 40, &o, (int32_t[]){12, 9, 8, 11});
    o.mode = KVC_BUDGET_PYRAMID;
    check_split(NULL, 4, 40, &o, (int32_t[]){15, 12, 8, 5});
    o.mode = KVC_BUDGET_UNIFORM;
    check_split(NULL, 4, 40, &o, (int32_t[]){10, 10, 10, 10});
}

static void rounding_and_bounds_follow_the_documented_rule(void **state)
{
    static const float spike[3] = {1, 0, 0}, zeros[3] = {0, 0, 0}, two[2] = {3, 1};
    kvc_budget_options o = budget_options(KVC_BUDGET_UNIFORM, 0, 10);

    (void)state;
    check_split(NULL, 3, 10, &o, (int32_t[]){4, 3, 3});
    check_split(NULL, 3, 11, &o, (int32_t[]){4, 4, 3});
    check_split(NULL, 3, 100, &o, (int32_t[]){10, 10, 10}); /* beyond n max */
    check_split(NULL, 1, 7, &o, (int32_t[]){7});
    o.min = 2;
    check_split(NULL, 3, 0, &o, (int32_t[]){2, 2, 2}); /* below n min */
    o = budget_options(KVC_BUDGET_WEIGHTS, 0, 4);
    check_split(spike, 3, 10, &o, (int32_t[]){4, 3, 3});
    check_split(zeros, 3, 7, &o, (int32_t[]){3, 2, 2});
    o = budget_options(KVC_BUDGET_PYRAMID, 0, 100);
    check_split(NULL, 1, 7, &o, (int32_t[]){7});
    o.pyramid = 1.0f / 3.0f;
    check_split(NULL, 4, 40, &o, (int32_t[]){5, 8, 12, 15});
    o = budget_options(KVC_BUDGET_HYBRID, 0, 100);
    o.uniform_share = 0.0f;
    check_split(two, 2, 40, &o, (int32_t[]){30, 10});
    o.uniform_share = 1.0f;
    check_split(two, 2, 40, &o, (int32_t[]){20, 20});
    assert_int_equal(kvc_split_budget(NULL, 0, 10, NULL, NULL), KVC_OK);
}

static size_t reachable(size_t n, const kvc_budget_options *o, size_t total)
{
    total = total < n * o->max ? total : n * o->max;
    return total > n * o->min ? total : n * o->min;
}

/* The sum, the bounds, and no order of two budgets against that of their weights. */
static void check_budgets(const float *weights, size_t n, size_t total, const kvc_budget_options *o,
                          const int32_t *budgets)
{
    size_t sum = 0;

    for (size_t i = 0; i < n; i++) {
        assert_true(budgets[i] >= 0);
        assert_in_range((size_t)budgets[i], o->min, o->max);
        sum += (size_t)budgets[i];
        for (size_t j = 0; j < i && weights; j++) {
            assert_true(weights[i] <= weights[j] || budgets[i] >= budgets[j]);
            assert_true(weights[i] != weights[j] || budgets[i] <= budgets[j]);
        }
    }
    assert_int_equal(sum, reachable(n, o, total));
}

static void the_sum_is_exact_on_random_inputs(void **state)
{
    uint64_t rng = 1;

    (void)state;
    for (int draw = 0; draw < 50000; draw++) {
        const size_t n = 1 + rng_below(&rng, MAX_LAYERS);
        kvc_budget_options o = budget_options((kvc_budget_mode)rng_below(&rng, 4), 0, 0);
        const size_t scale = draw % 10 == 0 ? INT32_MAX / 2 : 200;
        float weights[MAX_LAYERS];
        int32_t budgets[MAX_LAYERS];

        o.uniform_share = 0.5f + 0.5f * rng_unit(&rng);
        o.pyramid = ldexpf(1.0f, (int)rng_below(&rng, 9) - 4);
        o.min = rng_below(&rng, scale);
        o.max = o.min + rng_below(&rng, scale);
        for (size_t i = 0; i < n; i++) {
            const size_t kind = rng_below(&rng, 8);
            weights[i] = kind == 0  ? 0.0f
                         : kind < 4 ? (float)rng_below(&rng, 4)
                                    : ldexpf(1.0f + rng_unit(&rng), (int)rng_below(&rng, 40) - 20);
        }
        const size_t total = rng_below(&rng, n * scale + n * o.max);
        assert_int_equal(kvc_split_budget(weights, n, total, &o, budgets), KVC_OK);
        const bool ordered = o.mode == KVC_BUDGET_WEIGHTS;
        check_budgets(ordered ? weights : NULL, n, total, &o, budgets);
    }
}

static void no_budget_is_a_row_away_from_its_share(void **state)
{
    uint64_t rng = 2;

    (void)state;
    for (int draw = 0; draw < 5000; draw++) {
        const size_t n = 1 + rng_below(&rng, MAX_LAYERS), total = rng_below(&rng, 100000);
        const kvc_budget_options o = budget_options(KVC_BUDGET_WEIGHTS, 0, INT32_MAX);
        float weights[MAX_LAYERS];
        int32_t budgets[MAX_LAYERS];
        double sum = 0.0;

        for (size_t i = 0; i < n; i++) {
            weights[i] = 1.5f + rng_unit(&rng);
            sum += (double)weights[i];
        }
        assert_int_equal(kvc_split_budget(weights, n, total, &o, budgets), KVC_OK);
        for (size_t i = 0; i < n; i++) {
            const double share = (double)total * (double)weights[i] / sum;
            assert_true(fabs((double)budgets[i] - share) < 1.0 + 1e-6);
        }
    }
}

static void splitting_refuses_bad_arguments(void **state)
{
    static const float weights[2] = {1, 2}, bad[][2] = {{-1, 2}, {NAN, 1}, {1, INFINITY}};
    kvc_budget_options o;
    int32_t budgets[2] = {7, 7};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(kvc_split_budget(bad[i], 2, 10, NULL, budgets), KVC_E_ARG);
    }
    assert_int_equal(kvc_split_budget(NULL, 2, 10, NULL, budgets), KVC_E_ARG);
    assert_int_equal(kvc_split_budget(weights, 2, 10, NULL, NULL), KVC_E_ARG);
    for (int i = 0; i < 10; i++) {
        kvc_budget_options_default(&o);
        switch (i) {
        case 0: o.mode = KVC_BUDGET_MASS; break;
        case 1: o.mode = (kvc_budget_mode)5; break;
        case 2: o.uniform_share = 1.1f; break;
        case 3: o.uniform_share = NAN; break;
        case 4: o.pyramid = 0.0f; break;
        case 5: o.pyramid = INFINITY; break;
        case 6: o.min = 5, o.max = 4; break;
        case 7: o.max = (size_t)INT32_MAX + 1; break;
        case 8: o.struct_size = 8; break;
        default: o.pyramid = NAN; break;
        }
        assert_int_equal(kvc_split_budget(weights, 2, 10, &o, budgets), KVC_E_ARG);
    }
    assert_true(budgets[0] == 7 && budgets[1] == 7);
}

static void sparsity_is_the_share_below_one_percent_of_the_row(void **state)
{
    static const float p[3][6] = {
        {0.5f, 0.005f, 0.0049f, 0.0f, 0.25f, NAN},
        {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, NAN},
        {1e-6f, 1e-6f, 1e-6f, 0.0f, 1e-6f, NAN},
    };
    static const float bad[][2] = {{-0.1f, 1}, {NAN, 1}, {INFINITY, 1}};
    float s = 7.0f;

    (void)state;
    assert_int_equal(kvc_score_sparsity(p[0], 3, 5, 6, &s), KVC_OK);
    assert_near(s, 0.3f, 1e-6f); /* two of five, none counted, one of five */
    assert_int_equal(kvc_score_sparsity(p[1], 1, 5, 6, &s), KVC_OK);
    assert_true(s == 0.0f);
    assert_int_equal(kvc_score_sparsity(NULL, 0, 5, 6, &s), KVC_OK);
    assert_true(s == 0.0f);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(kvc_score_sparsity(bad[i], 1, 2, 2, &s), KVC_E_ARG);
    }
    assert_int_equal(kvc_score_sparsity(p[0], 3, 7, 6, &s), KVC_E_ARG);
    assert_int_equal(kvc_score_sparsity(NULL, 3, 5, 6, &s), KVC_E_ARG);
    assert_int_equal(kvc_score_sparsity(p[0], 3, 5, 6, NULL), KVC_E_ARG);
    assert_true(s == 0.0f);
}

static void split_mass(const float *scores, size_t n, size_t n_tokens, size_t total,
                       const kvc_budget_options *o, int32_t *budgets)
{
    size_t size;

    assert_int_equal(kvc_budget_mass_workspace_size(n, n_tokens, &size), KVC_OK);
    struct guard ws = workspace_new(size, 0xA5);
    assert_int_equal(kvc_budget_mass(scores, n, n_tokens, total, o, budgets, ws.data, size),
                     KVC_OK);
    assert_true(workspace_intact(&ws));
    guard_free(&ws);
}

static void concentrated_layers_get_fewer_rows(void **state)
{
    static const float scores[3][8] = {
        {1, 1, 1, 1, 1, 1, 1, 1}, {-0.0f, 8, 0, 0, 0, 0, 0, 0}, {0, 0, 40, 0, 0, 40, 0, 0}};
    kvc_budget_options o = budget_options(KVC_BUDGET_MASS, 0, 100);
    int32_t budgets[3];

    (void)state;
    split_mass(scores[0], 3, 8, 10, &o, budgets);
    assert_rows(budgets, 3, (int32_t[]){7, 1, 2}, 3);
    o.min = 2;
    split_mass(scores[0], 3, 8, 10, &o, budgets);
    assert_rows(budgets, 3, (int32_t[]){6, 2, 2}, 3);
    o.max = 5;
    split_mass(scores[0], 3, 8, 10, &o, budgets);
    assert_rows(budgets, 3, (int32_t[]){5, 3, 2}, 3);
    split_mass(scores[0], 3, 8, 1000, &o, budgets);
    assert_rows(budgets, 3, (int32_t[]){5, 5, 5}, 3);
    split_mass(scores[0], 3, 8, 0, &o, budgets);
    assert_rows(budgets, 3, (int32_t[]){2, 2, 2}, 3);
}

static void zeros_are_shared_evenly(void **state)
{
    static const float spikes[4][6] = {{1}, {[5] = 1}, {1}, {[2] = 3}}, zeros[4][6] = {{0}};
    static const float uneven[2][6] = {{1, 1, 1, 1}, {1}};
    const kvc_budget_options o = budget_options(KVC_BUDGET_MASS, 0, 100);
    int32_t budgets[4];

    (void)state;
    split_mass(spikes[0], 4, 6, 10, &o, budgets);
    assert_rows(budgets, 4, (int32_t[]){3, 3, 2, 2}, 4);
    split_mass(zeros[0], 4, 6, 10, &o, budgets);
    assert_rows(budgets, 4, (int32_t[]){3, 3, 2, 2}, 4);
    split_mass(uneven[0], 2, 6, 8, &o, budgets);
    assert_rows(budgets, 2, (int32_t[]){4, 4}, 2);
    split_mass(zeros[0], 4, 0, 10, &o, budgets);
    assert_rows(budgets, 4, (int32_t[]){0, 0, 0, 0}, 4);
    assert_int_equal(kvc_budget_mass(NULL, 0, 6, 10, &o, NULL, NULL, 0), KVC_OK);
}

/* Mass of the largest count scores of a layer, of its sum. */
static double top_mass(const float *scores, size_t n, size_t count)
{
    double mass = 0.0, sum = 0.0;

    for (size_t i = 0; i < n; i++) {
        size_t before = 0;
        for (size_t j = 0; j < n; j++) {
            before += scores[j] > scores[i] || (scores[j] == scores[i] && j < i);
        }
        mass += before < count ? (double)scores[i] : 0.0;
        sum += (double)scores[i];
    }
    return mass / sum;
}

static void all_layers_lose_about_the_same_mass(void **state)
{
    enum { LAYERS = 5, TOKENS = 60 };
    const kvc_budget_options o = budget_options(KVC_BUDGET_MASS, 0, 1000);
    float scores[LAYERS][TOKENS];
    int32_t budgets[LAYERS];
    uint64_t rng = 3;

    (void)state;
    for (int draw = 0; draw < 200; draw++) {
        const size_t total = rng_below(&rng, LAYERS * TOKENS + 1);
        double least = 2.0, most = 0.0;
        size_t sum = 0;

        for (size_t l = 0; l < LAYERS; l++) {
            for (size_t i = 0; i < TOKENS; i++) {
                scores[l][i] = powf(0.5f + 0.5f * rng_unit(&rng), (float)(1 + 3 * l));
            }
        }
        split_mass(scores[0], LAYERS, TOKENS, total, &o, budgets);
        for (size_t l = 0; l < LAYERS; l++) {
            const size_t b = (size_t)budgets[l];
            sum += b;
            least = fmin(least, top_mass(scores[l], TOKENS, b));
            most = fmax(most, b == 0 ? 0.0 : top_mass(scores[l], TOKENS, b - 1));
        }
        assert_int_equal(sum, total);
        /* One threshold lies between what all have and what all would have with a row less. */
        assert_true(most <= least + 1e-5);
    }
}

static void sharing_mass_refuses_bad_arguments(void **state)
{
    static const float good[4] = {1, 2, 3, 4}, bad[][4] = {{-1}, {NAN}, {INFINITY}};
    _Alignas(64) unsigned char ws[256];
    int32_t budgets[2] = {7, 7};
    kvc_budget_options o;
    size_t size, need;

    (void)state;
    assert_int_equal(kvc_budget_mass_workspace_size(2, 2, &size), KVC_OK);
    assert_true(size >= 48 && size <= sizeof(ws));
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(kvc_budget_mass(bad[i], 2, 2, 3, NULL, budgets, ws, size), KVC_E_ARG);
    }
    kvc_budget_options_default(&o);
    o.min = 2, o.max = 1;
    assert_int_equal(kvc_budget_mass(good, 2, 2, 3, &o, budgets, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_budget_mass(NULL, 2, 2, 3, NULL, budgets, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_budget_mass(good, 2, 2, 3, NULL, NULL, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_budget_mass(good, SIZE_MAX / 8, 2, 3, NULL, budgets, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_budget_mass_workspace_size(2, 2, NULL), KVC_E_ARG);
    assert_int_equal(kvc_budget_mass_workspace_size(SIZE_MAX, 2, &need), KVC_E_ARG);
    assert_int_equal(kvc_budget_mass_workspace_size(1, (size_t)INT32_MAX + 1, &need), KVC_E_ARG);
    assert_int_equal(kvc_budget_mass(good, 2, 2, 3, NULL, budgets, NULL, size), KVC_E_WORKSPACE);
    assert_int_equal(kvc_budget_mass(good, 2, 2, 3, NULL, budgets, ws, size - 1), KVC_E_WORKSPACE);
    assert_int_equal(kvc_budget_mass(good, 2, 2, 3, NULL, budgets, ws + 8, size), KVC_E_WORKSPACE);
    assert_true(budgets[0] == 7 && budgets[1] == 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_budget_options_set_every_field),
        cmocka_unit_test(budgets_are_those_of_the_reference),
        cmocka_unit_test(rounding_and_bounds_follow_the_documented_rule),
        cmocka_unit_test(the_sum_is_exact_on_random_inputs),
        cmocka_unit_test(no_budget_is_a_row_away_from_its_share),
        cmocka_unit_test(splitting_refuses_bad_arguments),
        cmocka_unit_test(sparsity_is_the_share_below_one_percent_of_the_row),
        cmocka_unit_test(concentrated_layers_get_fewer_rows),
        cmocka_unit_test(zeros_are_shared_evenly),
        cmocka_unit_test(all_layers_lose_about_the_same_mass),
        cmocka_unit_test(sharing_mass_refuses_bad_arguments),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
