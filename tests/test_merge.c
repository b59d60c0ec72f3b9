/* What a merged token is: weights, bias, mass, place. */
#include <math.h>

#include "support/merging.h"

static const kvc_merge_options by_attention = {.struct_size = sizeof(by_attention),
                                               .weights = KVC_MERGE_ATTENTION};

/* One merge without smoothing and second-order term. */
static kvc_merge_token combine(const kvc_merge_token *a, const kvc_merge_token *b,
                               const kvc_merge_options *o, float *w_a)
{
    kvc_merge_token out;
    float w_b;
    bool heavier;

    assert_int_equal(kvc_merge_combine(a, b, 0.0f, 0.0f, o, w_a, &w_b, &out, &heavier), KVC_OK);
    assert_true(*w_a + w_b == 1.0f);
    return out;
}

/* G8: tokens 0 and 1 at 0 and 4 degrees, values (1, 0) and (0, 1), masses .3 and .1. */
static void golden_merges_are_met(void **state)
{
    static const struct {
        kvc_merge_weights weights;
        float k[2], v[2], bias;
    } cases[] = {
        {KVC_MERGE_SIZE, {0.998782f, 0.034878f}, {0.5f, 0.5f}, 0.693147181f},
        {KVC_MERGE_ATTENTION, {0.999391f, 0.017439f}, {0.75f, 0.25f}, 0.562335145f},
    };
    const struct tables *t = *state;
    const kvc_merge_token a = {.col = 35, .size = 1, .mass = 0.3f},
                          b = {.col = 36, .size = 1, .mass = 0.1f};

    for (size_t c = 0; c < 2; c++) {
        kvc_merge_options o = {.struct_size = sizeof(o), .weights = cases[c].weights};
        kvc_merge_token out;
        float w_a, w_b;
        bool heavier;

        assert_int_equal(kvc_merge_combine(&a, &b, 0, 0, &o, &w_a, &w_b, &out, &heavier), KVC_OK);
        assert_float_equal(w_a, cases[c].v[0], 1e-7f);
        assert_float_equal(w_b, cases[c].v[1], 1e-7f);
        assert_float_equal(out.bias, cases[c].bias, 1e-7f);
        assert_true(out.size == 2.0f && heavier);
        assert_float_equal(out.mass, 0.4f, 1e-7f);
        assert_int_equal(out.col, 35);
        for (size_t i = 0; i < t->n && cases[c].weights == KVC_MERGE_SIZE; i++) {
            const double angle = 4 * 3.14159265358979323846 / 180;
            float k[2][2] = {{1, 0}, {(float)cos(angle), (float)sin(angle)}};
            float v[2][2] = {{1, 0}, {0, 1}};
            const kvc_view kv = kvc_view_packed(k, KVC_DTYPE_F32, 2, 1, 2),
                           vv = kvc_view_packed(v, KVC_DTYPE_F32, 2, 1, 2);
            const kvc_merge_pair pair = {.a = 0, .b = 1};
            kvc_merge_token tokens[2] = {a, b};
            int32_t map[2], rows[2];
            size_t n_rows;
            assert_int_equal(kvc_merge_apply(t->ctx[i], &pair, 1, &kv, &vv, 1, NULL, &o, tokens,
                                             map, rows, &n_rows),
                             KVC_OK);
            for (size_t j = 0; j < 2; j++) {
                assert_float_equal(k[0][j], cases[c].k[j], 1e-6f);
                assert_float_equal(v[0][j], cases[c].v[j], 1e-6f);
            }
            assert_memory_equal(&tokens[0], &out, sizeof(out));
        }
        assert_float_equal(w_a + w_b * 0.9975640502598242f, cases[c].k[0], 1e-6f);
        assert_float_equal(w_b * 0.0697564737441253f, cases[c].k[1], 1e-6f);
    }
}

/* G8: H(2/3, 1/3) + 2/3 ln 2 = ln 3. */
static void sizes_chain_to_the_logarithm_of_their_sum(void **state)
{
    uint64_t rng = 2;

    (void)state;
    for (int round = 0; round < 200; round++) {
        kvc_merge_token all = {.size = 1};
        float w_a;

        for (int step = 1; step < 20; step++) {
            kvc_merge_token other = {.size = 1};
            for (size_t n = rng_below(&rng, 4); n > 0; n--) {
                const kvc_merge_token one = {.size = 1};
                other = combine(&other, &one, NULL, &w_a);
            }
            all = rng_below(&rng, 2) == 0 ? combine(&all, &other, NULL, &w_a)
                                          : combine(&other, &all, NULL, &w_a);
            assert_true(all.bias == (float)log((double)all.size));
        }
    }
    const kvc_merge_token one = {.size = 1};
    kvc_merge_token three = combine(&one, &one, NULL, &(float){0});
    three = combine(&three, &one, NULL, &(float){0});
    assert_float_equal(three.bias, 1.098612289f, 1e-7f);
}

static void attention_weights_are_smoothed_by_the_mean_mass(void **state)
{
    const kvc_merge_token tokens[5] = {{.size = 1, .mass = 0.3f},
                                       {.size = 3, .mass = 0.1f, .bias = 0.9f},
                                       {.image = -1, .size = 1, .mass = 50},
                                       {.size = 1, .mass = 70, .fixed = true},
                                       {.size = 4, .mass = 0}};
    kvc_merge_token out;
    float mean, w_a, w_b;
    bool heavier;

    (void)state;
    assert_int_equal(kvc_merge_mean_mass(tokens, 5, &mean), KVC_OK);
    assert_float_equal(mean, 0.05f, 1e-8f); /* .4 of 8 tokens: no text, nothing fixed */
    assert_int_equal(kvc_merge_mean_mass(tokens + 2, 2, &mean), KVC_OK);
    assert_true(mean == 0.0f);
    assert_int_equal(kvc_merge_mean_mass(NULL, 0, &mean), KVC_OK);
    assert_int_equal(kvc_merge_combine(&tokens[0], &tokens[1], 0.05f, 0, &by_attention, &w_a, &w_b,
                                       &out, &heavier),
                     KVC_OK);
    const double w = 0.35 / 0.6, h = -w * log(w) - (1 - w) * log(1 - w);
    assert_float_equal(w_a, (float)w, 1e-6f);
    assert_float_equal(out.bias, (float)(h + (1 - w) * 0.9), 1e-6f);
    /* Nothing known: by size. */
    const kvc_merge_token a = {.size = 1}, b = {.size = 3, .bias = 1.0986123f};
    out = combine(&a, &b, &by_attention, &w_a);
    assert_true(w_a == 0.25f && out.bias == (float)log(4));
    /* One is known: the other has no weight and adds nothing. */
    out = combine(&tokens[0], &tokens[4], &by_attention, &w_a);
    assert_true(w_a == 1.0f && out.bias == 0.0f && out.size == 5.0f);
}

static void the_second_order_term_is_added_to_the_bias(void **state)
{
    const kvc_merge_token a = {.size = 1}, b = {.size = 3, .bias = 1.0986123f};
    kvc_merge_token out;
    float w_a, w_b;
    bool heavier;

    (void)state;
    assert_int_equal(kvc_merge_combine(&a, &b, 0, 0.64f, NULL, &w_a, &w_b, &out, &heavier), KVC_OK);
    assert_float_equal(out.bias, (float)(log(4) + 0.5 * 0.25 * 0.75 * 0.64), 1e-6f);
    /* And it stays with the next merge, by its weight. */
    const kvc_merge_token next = combine(&out, &b, NULL, &w_a);
    assert_float_equal(next.bias, (float)(log(7) + 4.0 / 7 * 0.5 * 0.25 * 0.75 * 0.64), 1e-6f);
}

static void the_place_is_that_of_the_heavier_member(void **state)
{
    static const struct {
        float mass_a, size_a, mass_b, size_b;
        bool a;
    } cases[] = {{.2f, 1, .1f, 9, true},
                 {.1f, 9, .2f, 1, false},
                 {.1f, 1, .1f, 2, false},
                 {.1f, 2, .1f, 1, true},
                 {0, 1, 0, 1, true}};

    (void)state;
    for (size_t i = 0; i < 5; i++) {
        const kvc_merge_token a = {.frame = 1,
                                   .row = 2,
                                   .col = 3,
                                   .size = cases[i].size_a,
                                   .mass = cases[i].mass_a,
                                   .fixed = i % 2 == 0},
                              b = {.frame = 4,
                                   .row = 5,
                                   .col = 6,
                                   .size = cases[i].size_b,
                                   .mass = cases[i].mass_b,
                                   .fixed = i % 2 != 0};
        kvc_merge_token out;
        float w_a, w_b;
        bool heavier;
        assert_int_equal(kvc_merge_combine(&a, &b, 0, 0, NULL, &w_a, &w_b, &out, &heavier), KVC_OK);
        assert_int_equal(heavier, cases[i].a);
        assert_true(out.fixed);
        assert_int_equal(out.frame, heavier ? 1 : 4);
        assert_int_equal(out.row, heavier ? 2 : 5);
        assert_int_equal(out.col, heavier ? 3 : 6);
    }
}

static void combine_refuses_what_it_cannot_weigh(void **state)
{
    const kvc_merge_token good = {.size = 1}, none = {0}, huge = {.size = 3e38f};
    const float wrong[] = {-1, NAN, INFINITY};
    kvc_merge_token out = {.col = 7};
    float w_a = 7, w_b = 7;
    bool heavier;

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(
            kvc_merge_combine(&good, &good, wrong[i], 0, NULL, &w_a, &w_b, &out, &heavier),
            KVC_E_ARG);
        assert_int_equal(
            kvc_merge_combine(&good, &good, 0, wrong[i], NULL, &w_a, &w_b, &out, &heavier),
            KVC_E_ARG);
    }
    assert_int_equal(kvc_merge_combine(&none, &good, 0, 0, NULL, &w_a, &w_b, &out, &heavier),
                     KVC_E_ARG);
    assert_int_equal(kvc_merge_combine(&huge, &huge, 0, 0, NULL, &w_a, &w_b, &out, &heavier),
                     KVC_E_ARG);
    assert_int_equal(kvc_merge_combine(NULL, &good, 0, 0, NULL, &w_a, &w_b, &out, &heavier),
                     KVC_E_ARG);
    assert_int_equal(kvc_merge_combine(&good, &good, 0, 0, NULL, &w_a, &w_b, NULL, &heavier),
                     KVC_E_ARG);
    assert_true(w_a == 7 && w_b == 7 && out.col == 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_merges_are_met),
        cmocka_unit_test(sizes_chain_to_the_logarithm_of_their_sum),
        cmocka_unit_test(attention_weights_are_smoothed_by_the_mean_mass),
        cmocka_unit_test(the_second_order_term_is_added_to_the_bias),
        cmocka_unit_test(the_place_is_that_of_the_heavier_member),
        cmocka_unit_test(combine_refuses_what_it_cannot_weigh),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
