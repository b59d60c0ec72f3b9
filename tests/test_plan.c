/* Capacity: bytes a token, tokens in a budget, budgets of machines, and the article's figures. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvc/plan.h"
#include "support/rng.h"

#define GIB (UINT64_C(1) << 30)
#define MIB 1048576.0

/* The article's model of 7e9 weights. */
static const kvc_plan_model article = {.struct_size = sizeof(article),
                                       .n_layers = 32,
                                       .n_heads = 32,
                                       .n_kv_heads = 32,
                                       .head_dim_k = 128,
                                       .head_dim_v = 128};

static kvc_plan_profile preset(const char *name)
{
    kvc_plan_profile p = {.struct_size = sizeof(p)};

    assert_int_equal(kvc_plan_profile_preset(name, &p), KVC_OK);
    return p;
}

static double bytes_of(const kvc_plan_model *model, const kvc_plan_profile *profile)
{
    double bytes = -1.0;

    assert_int_equal(kvc_plan_bytes(model, profile, &bytes), KVC_OK);
    return bytes;
}

static int64_t tokens_of(const kvc_plan_model *model, const kvc_plan_profile *profile,
                         uint64_t budget)
{
    int64_t tokens = -1;

    assert_int_equal(kvc_plan_tokens(model, profile, budget, &tokens), KVC_OK);
    return tokens;
}

static void the_default_compresses_nothing(void **state)
{
    kvc_plan_profile p;

    (void)state;
    memset(&p, 0xFF, sizeof(p));
    kvc_plan_profile_default(&p);
    assert_int_equal(p.struct_size, sizeof(p));
    assert_string_equal(p.name, "f16");
    assert_true(p.visual_share == 1.0 && p.prune_rate == 0.0 && p.heavy_share == 0.0);
    assert_int_equal(p.merge_rounds, 0);
    assert_true(p.k == KVC_F16 && p.v == KVC_F16);
    assert_true(p.k_scale == KVC_SCALE_TOKEN && p.v_scale == KVC_SCALE_TOKEN);
    assert_true(bytes_of(&article, &p) == bytes_of(&article, NULL));
    kvc_plan_profile_default(NULL);
}

/* Article 000, section 6.1; G12. */
static void presets_are_those_of_the_table_of_profiles(void **state)
{
    static const struct {
        const char *name;
        double prune_rate, heavy_share;
        double bytes; /* 32 layers of 32 heads of 128 */
        int32_t merge_rounds;
        kvc_format k, v;
        kvc_scale k_scale;
    } want[] = {
        {"f16", 0.0, 0.0, 524288, 0, KVC_F16, KVC_F16, KVC_SCALE_TOKEN},
        {"int8", 0.0, 0.0, 266240, 0, KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN},
        {"int4", 0.0, 0.0, 139264, 0, KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN},
        {"k6v4", 0.0, 0.0, 172032, 0, KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN},
        {"int4-raw", 0.0, 0.0, 143360, 0, KVC_INT4, KVC_INT4, KVC_SCALE_CHANNEL},
        {"light", 0.15, 0.0, 445644.8, 0, KVC_F16, KVC_F16, KVC_SCALE_TOKEN},
        {"balanced", 0.30, 0.0, 139776, 1, KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN},
        {"aggressive", 0.50, 0.2, 60825.6, 2, KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN},
        {"extreme", 0.65, 0.2, 31933.44, 3, KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(want) / sizeof(*want); i++) {
        const kvc_plan_profile p = preset(want[i].name);

        assert_string_equal(p.name, want[i].name);
        assert_true(p.visual_share == 1.0 && p.prune_rate == want[i].prune_rate &&
                    p.heavy_share == want[i].heavy_share);
        assert_int_equal(p.merge_rounds, want[i].merge_rounds);
        assert_true(p.k == want[i].k && p.v == want[i].v);
        assert_true(p.k_scale == want[i].k_scale && p.v_scale == KVC_SCALE_TOKEN);
        assert_true(fabs(bytes_of(&article, &p) - want[i].bytes) < 1e-6);
    }
}

/* Article 000, section 4.4, whose figures are rounded, beside what they are exactly. The article
 * calls all tokens visual and counts no scales. */
static void the_checklist_of_the_article_holds(void **state)
{
    static const struct {
        const char *what;
        double prune_rate, heavy_share;
        int32_t merge_rounds;
        kvc_format format;
        double mib, article_mb;         /* exact, rounded */
        int64_t tokens, article_tokens; /* of 6 GiB; 0: it does not say */
    } want[] = {
        {"fp16", 0.0, 0.0, 0, KVC_F16, 0.5, 0.50, 12288, 12000},
        {"int8", 0.0, 0.0, 0, KVC_INT8, 0.25390625, 0.25, 24197, 0},
        {"pruned 30 %", 0.3, 0.0, 0, KVC_F16, 0.35, 0.35, 17554, 0},
        {"pruned, int8", 0.3, 0.0, 0, KVC_INT8, 0.177734375, 0.17, 34568, 35000},
        {"pruned, mixed precision", 0.3, 0.2, 0, KVC_INT4, 0.144375, 0.15, 42555, 0},
        {"pruned, int8, one round", 0.3, 0.0, 1, KVC_INT8, 0.13330078125, 0.11, 46091, 50000},
        {"pruned, int8, two rounds", 0.3, 0.0, 2, KVC_INT8, 0.0999755859375, 0.10, 61455, 60000},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(want) / sizeof(*want); i++) {
        kvc_plan_profile p = preset("f16");
        double mib;
        int64_t tokens;

        p.prune_rate = want[i].prune_rate;
        p.merge_rounds = want[i].merge_rounds;
        p.heavy_share = want[i].heavy_share;
        p.k = p.v = want[i].format;
        mib = bytes_of(&article, &p) / MIB;
        tokens = tokens_of(&article, &p, 6 * GIB);
        print_message("%-26s %.4f MiB (%.2f)  %6lld tokens (%lld)\n", want[i].what, mib,
                      want[i].article_mb, (long long)tokens, (long long)want[i].article_tokens);
        assert_true(fabs(mib - want[i].mib) < 1e-12);
        assert_int_equal(tokens, want[i].tokens);
        /* "0.11" and "50k" lie between one round and two. */
        assert_true(fabs(mib - want[i].article_mb) < 0.024);
        assert_true(want[i].article_tokens == 0 ||
                    fabs((double)tokens / (double)want[i].article_tokens - 1.0) < 0.08);
    }
}

/* The article's own quotients: 6 GiB at 0.5, 0.17, 0.11 MiB. */
static void tokens_are_the_whole_quotient(void **state)
{
    const kvc_plan_profile f16 = preset("f16");

    (void)state;
    assert_int_equal(tokens_of(&article, &f16, 6 * GIB), 12288);
    assert_int_equal(tokens_of(&article, &f16, 6 * GIB - 1), 12287);
    assert_int_equal(tokens_of(&article, &f16, 524287), 0);
    assert_int_equal(tokens_of(&article, &f16, 0), 0);
    assert_int_equal((int64_t)floor(6144 / 0.17), 36141);
    assert_int_equal((int64_t)floor(6144 / 0.11), 55854);
}

/* fault B3: 34 bytes hold 32 elements, not one. 16 heads of 32 for K and for V are 8 x 128
 * elements.
 */
static void bytes_of_a_block_are_not_bytes_of_an_element(void **state)
{
    kvc_plan_model m = article;
    const kvc_plan_profile f16 = preset("f16"), int8 = preset("int8");

    (void)state;
    m.n_layers = 1, m.n_heads = m.n_kv_heads = 16, m.head_dim_k = m.head_dim_v = 32;
    assert_true(bytes_of(&m, &int8) * 4096 == 4456448);
    assert_true(bytes_of(&m, &f16) * 4096 == 8388608);
    assert_int_equal(tokens_of(&m, &int8, 4456448), 4096);
    assert_int_equal(tokens_of(&m, &f16, 8388608), 4096);
}

/* fault G1: 8 heads of 128 over 2097152 tokens are 2^31 elements; blocks of 1039680 bytes pass 2^31
 * at the 2066th. */
static void sizes_beyond_32_bits_do_not_wrap(void **state)
{
    kvc_plan_model m = article;
    const kvc_plan_profile f16 = preset("f16");

    (void)state;
    m.n_layers = 1, m.n_heads = m.n_kv_heads = 8, m.head_dim_k = m.head_dim_v = 64;
    assert_int_equal(tokens_of(&m, &f16, UINT64_C(1) << 32), 2097152);
    assert_int_equal(tokens_of(&m, &f16, UINT64_C(2066) * 1039680), 1048817);
    assert_int_equal(tokens_of(&m, &f16, UINT64_C(1) << 63), INT64_C(1) << 52);
    m.n_layers = m.n_heads = m.n_kv_heads = 65536;
    m.head_dim_k = m.head_dim_v = 512;
    assert_true(bytes_of(&m, &f16) == 0x1p43);
    m = (kvc_plan_model){sizeof(m), 1, 1, 1, 1, 1};
    kvc_plan_profile least = f16;
    least.prune_rate = 0.99999999, least.merge_rounds = 16;
    assert_int_equal(tokens_of(&m, &least, UINT64_MAX), INT64_MAX);
}

/* One head of 100 and 7 for each format and scale. */
static void parameters_cost_what_the_formats_say(void **state)
{
    static const struct {
        kvc_format k, v;
        kvc_scale k_scale, v_scale;
        double bytes;
    } cases[] = {
        {KVC_F16, KVC_F16, KVC_SCALE_LAYER, KVC_SCALE_CHANNEL, 214}, /* scales are ignored */
        {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN, 102 + 9},
        {KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN, 52 + 6},
        {KVC_INT8, KVC_INT4, KVC_SCALE_HEAD, KVC_SCALE_HEAD, 100.0625 + 4.0625},
        {KVC_INT4, KVC_F16, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN, 50 + 6.25 + 14},
    };
    kvc_plan_model m = article;

    (void)state;
    m.n_layers = 1, m.n_heads = 4, m.n_kv_heads = 1, m.head_dim_k = 100, m.head_dim_v = 7;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        kvc_plan_profile p = preset("f16");

        p.k = cases[i].k, p.v = cases[i].v;
        p.k_scale = cases[i].k_scale, p.v_scale = cases[i].v_scale;
        assert_true(bytes_of(&m, &p) == cases[i].bytes);
    }
}

/* Text is neither pruned nor merged. */
static void only_the_visual_share_is_pruned_and_merged(void **state)
{
    kvc_plan_profile p = preset("balanced");

    (void)state;
    p.visual_share = 0.0;
    assert_true(bytes_of(&article, &p) == 266240);
    p.visual_share = 0.6; /* 0.6 * 0.7 * 0.75 + 0.4 = 0.715 rows */
    assert_true(fabs(bytes_of(&article, &p) - 0.715 * 266240) < 1e-6);
    p.heavy_share = 0.1; /* of all rows that are left */
    assert_true(fabs(bytes_of(&article, &p) - 0.715 * (0.1 * 524288 + 0.9 * 266240)) < 1e-6);
    p.heavy_share = 1.0;
    assert_true(fabs(bytes_of(&article, &p) - 0.715 * 524288) < 1e-6);
}

static void more_compression_never_costs_more(void **state)
{
    uint64_t rng = 1;

    (void)state;
    for (int round = 0; round < 10000; round++) {
        kvc_plan_model m = article;
        kvc_plan_profile p = preset("f16");
        double before;

        m.n_layers = 1 + (int32_t)rng_below(&rng, 100);
        m.head_dim_k = 8 + (int32_t)rng_below(&rng, 500);
        m.head_dim_v = 8 + (int32_t)rng_below(&rng, 500);
        p.k = (kvc_format)rng_below(&rng, 3), p.v = (kvc_format)rng_below(&rng, 3);
        p.visual_share = (double)rng_below(&rng, 101) / 100.0;
        p.prune_rate = (double)rng_below(&rng, 90) / 100.0;
        p.merge_rounds = (int32_t)rng_below(&rng, 4);
        p.heavy_share = (double)rng_below(&rng, 90) / 100.0;
        before = bytes_of(&m, &p);
        switch (rng_below(&rng, 5)) {
        case 0: p.visual_share += (1.0 - p.visual_share) / 2.0; break;
        case 1: p.prune_rate += 0.05; break;
        case 2: p.merge_rounds++; break;
        case 3: p.heavy_share /= 2.0; break;
        default: p.k = p.v = KVC_INT4; break;
        }
        assert_true(bytes_of(&m, &p) <= before * (1.0 + 1e-15));
    }
}

static uint64_t budget_of(uint64_t memory, double n_params, double bits, uint64_t overhead)
{
    uint64_t budget = 77;

    assert_int_equal(kvc_plan_budget(memory, n_params, bits, overhead, &budget), KVC_OK);
    return budget;
}

/* Article 000, sections 4.1 and 4.4: 7e9 weights in 16 GB, of which 4 bits leave most and 16 hardly
 * any. */
static void budgets_are_what_weights_and_overhead_leave(void **state)
{
    const uint64_t gb = 1000000000;

    (void)state;
    assert_int_equal(budget_of(16 * gb, 7e9, 16, gb), gb);
    assert_int_equal(budget_of(16 * gb, 7e9, 4, gb), 11500000000);
    assert_int_equal(budget_of(16 * GIB, 7e9, 4.5, GIB), 12168627360); /* q4_0: 18 bytes for 32 */
    assert_int_equal(budget_of(8 * gb, 7e9, 16, gb), 0);
    assert_int_equal(budget_of(14 * gb, 7e9, 16, gb), 0);
    assert_int_equal(budget_of(100, 3, 3, 0), 98); /* 9 bits are 2 bytes */
    assert_int_equal(budget_of(UINT64_MAX, 0, 0, 0), UINT64_MAX);
    assert_int_equal(budget_of(UINT64_MAX, 1e300, 16, 1), 0);
    assert_int_equal(budget_of(UINT64_MAX, 1e300, 1e300, UINT64_MAX), 0);
}

static kvc_status refused(const kvc_plan_model *model, const kvc_plan_profile *profile)
{
    double bytes = -1.0;
    int64_t tokens = -1;
    const kvc_status status = kvc_plan_bytes(model, profile, &bytes);

    assert_int_equal(kvc_plan_tokens(model, profile, GIB, &tokens), status);
    assert_true(status == KVC_OK || (bytes == -1.0 && tokens == -1));
    return status;
}

/* Returns what is wrong, NULL past the end. */
static const char *spoil(kvc_plan_model *m, kvc_plan_profile *p, size_t which)
{
    switch (which) {
    case 0: m->struct_size = 8; return "struct_size of the model";
    case 1: m->n_layers = 0; return "no layers";
    case 2: m->n_layers = 65537; return "too many layers";
    case 3: m->n_heads = 0; return "no heads";
    case 4: m->n_heads = m->n_kv_heads = 65537; return "too many heads";
    case 5: m->n_kv_heads = 0; return "no KV heads";
    case 6: m->n_kv_heads = 5; return "heads are no multiple of KV heads";
    case 7: m->n_kv_heads = -32; return "negative KV heads";
    case 8: m->head_dim_k = 0; return "no K";
    case 9: m->head_dim_v = -1; return "no V";
    case 10: p->struct_size = 8; return "struct_size of the profile";
    case 11: p->visual_share = -0.1; return "negative share";
    case 12: p->visual_share = 1.5; return "share above 1";
    case 13: p->visual_share = (double)NAN; return "share NaN";
    case 14: p->prune_rate = 1.0; return "everything pruned";
    case 15: p->prune_rate = -1.0; return "negative rate";
    case 16: p->prune_rate = (double)NAN; return "rate NaN";
    case 17: p->merge_rounds = -1; return "negative rounds";
    case 18: p->merge_rounds = 17; return "too many rounds";
    case 19: p->heavy_share = 1.1; return "heavy share above 1";
    case 20: p->heavy_share = (double)NAN; return "heavy share NaN";
    case 21: p->k = (kvc_format)4; return "format of K";
    case 22: p->v = (kvc_format)4; return "format of V";
    case 23: p->k_scale = (kvc_scale)4; return "scale of K";
    case 24: p->v_scale = (kvc_scale)4; return "scale of V";
    default: return NULL;
    }
}

static void wrong_arguments_are_refused(void **state)
{
    const kvc_plan_profile int8 = preset("int8");
    kvc_plan_model m = article;
    kvc_plan_profile p = int8;

    (void)state;
    for (size_t i = 0; spoil(&m, &p, i) != NULL; i++, m = article, p = int8) {
        assert_int_equal(refused(&m, &p), KVC_E_ARG);
    }
    assert_int_equal(refused(NULL, &int8), KVC_E_ARG);
    assert_int_equal(kvc_plan_bytes(&article, &int8, NULL), KVC_E_ARG);
    assert_int_equal(kvc_plan_tokens(&article, &int8, 1, NULL), KVC_E_ARG);
    m.head_dim_k = KVC_MAX_HEAD_DIM + 1;
    assert_int_equal(refused(&m, &int8), KVC_E_UNSUPPORTED);
    m = article;
    m.head_dim_v = KVC_MAX_HEAD_DIM + 1;
    assert_int_equal(refused(&m, &int8), KVC_E_UNSUPPORTED);
    p = int8, p.k_scale = KVC_SCALE_LAYER;
    assert_int_equal(refused(&article, &p), KVC_E_UNSUPPORTED);
    p = int8, p.v_scale = KVC_SCALE_LAYER;
    assert_int_equal(refused(&article, &p), KVC_E_UNSUPPORTED);
    p = int8, p.v_scale = KVC_SCALE_CHANNEL;
    assert_int_equal(refused(&article, &p), KVC_E_UNSUPPORTED);
    p = int8, p.v = KVC_INT6;
    assert_int_equal(refused(&article, &p), KVC_E_UNSUPPORTED);
    p = int8, p.k = KVC_INT6, p.k_scale = KVC_SCALE_CHANNEL;
    assert_int_equal(refused(&article, &p), KVC_E_UNSUPPORTED);
}

/* fault B3: invalid budgets and fractions give a status, never Inf or NaN. */
static void wrong_names_and_budgets_are_refused(void **state)
{
    kvc_plan_profile p = {.struct_size = sizeof(p), .merge_rounds = 9};
    uint64_t budget = 77;

    (void)state;
    assert_int_equal(kvc_plan_profile_preset("F16", &p), KVC_E_ARG);
    assert_int_equal(kvc_plan_profile_preset("", &p), KVC_E_ARG);
    assert_int_equal(kvc_plan_profile_preset(NULL, &p), KVC_E_ARG);
    assert_int_equal(kvc_plan_profile_preset("f16", NULL), KVC_E_ARG);
    p.struct_size = sizeof(p) - 1;
    assert_int_equal(kvc_plan_profile_preset("f16", &p), KVC_E_ARG);
    assert_int_equal(p.merge_rounds, 9);
    assert_int_equal(kvc_plan_budget(1, -1.0, 4, 0, &budget), KVC_E_ARG);
    assert_int_equal(kvc_plan_budget(1, 1.0, -4, 0, &budget), KVC_E_ARG);
    assert_int_equal(kvc_plan_budget(1, (double)NAN, 4, 0, &budget), KVC_E_ARG);
    assert_int_equal(kvc_plan_budget(1, 1.0, (double)NAN, 0, &budget), KVC_E_ARG);
    assert_int_equal(kvc_plan_budget(1, (double)INFINITY, 4, 0, &budget), KVC_E_ARG);
    assert_int_equal(kvc_plan_budget(1, 0.0, (double)INFINITY, 0, &budget), KVC_E_ARG);
    assert_int_equal(kvc_plan_budget(1, 1.0, 4, 0, NULL), KVC_E_ARG);
    assert_int_equal(budget, 77);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_default_compresses_nothing),
        cmocka_unit_test(presets_are_those_of_the_table_of_profiles),
        cmocka_unit_test(the_checklist_of_the_article_holds),
        cmocka_unit_test(tokens_are_the_whole_quotient),
        cmocka_unit_test(bytes_of_a_block_are_not_bytes_of_an_element),
        cmocka_unit_test(sizes_beyond_32_bits_do_not_wrap),
        cmocka_unit_test(parameters_cost_what_the_formats_say),
        cmocka_unit_test(only_the_visual_share_is_pruned_and_merged),
        cmocka_unit_test(more_compression_never_costs_more),
        cmocka_unit_test(budgets_are_what_weights_and_overhead_leave),
        cmocka_unit_test(wrong_arguments_are_refused),
        cmocka_unit_test(wrong_names_and_budgets_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
