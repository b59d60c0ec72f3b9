/* Which modules are smoothed: wildcards, the choice of units and its messages. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvc/smooth.h"
#include "support/rng.h"

enum { UNITS = 4, MAX_MESSAGES = 8 };

static void patterns_match_as_documented(void **state)
{
    static const struct {
        const char *pattern, *name;
        bool matches;
    } cases[] = {
        {"*", "model.layers.0.self_attn", true},
        {"*", "", true},
        {"", "", true},
        {"", "a", false},
        {"model.layers.*.self_attn", "model.layers.11.self_attn", true},
        {"model.layers.*.self_attn", "model.layers.11.mlp", false},
        {"model.*attn", "model.layers.0.self_attn", true}, /* dots too */
        {"model.layers.0.self_attn", "model.layers.0.self_attn", true},
        {"model.layers.0.self_attn", "model.layers.0.self_attn2", false},
        {"model.layers.0", "model_layers_0", false},
        {"model.layers.?.self_attn", "model.layers.1.self_attn", true},
        {"model.layers.?.self_attn", "model.layers.11.self_attn", false},
        {"layers.[0-3].attn", "layers.3.attn", true},
        {"layers.[0-3].attn", "layers.4.attn", false},
        {"layers.[!0-3].attn", "layers.4.attn", true},
        {"layers.[!0-3].attn", "layers.3.attn", false},
        {"layers.[135].attn", "layers.3.attn", true},
        {"layers.[135].attn", "layers.2.attn", false},
        {"[a-]", "-", true},
        {"[]]", "]", true},
        {"[!]]", "]", false},
        {"[\\]", "\\", true},
        {"[\xc3-\xc5]", "\xc4", true}, /* bytes are not negative */
        {"[a-\xc4]", "z", true},
        {"[a-\xff]", "\xc4", true},
        {"layers.{0,11}.attn", "layers.11.attn", true},
        {"layers.{0,11}.attn", "layers.1.attn", false},
        {"{q,k}_proj", "k_proj", true},
        {"{q,k}_proj", "v_proj", false},
        {"{a{b,c},d}e", "ace", true},
        {"{a{b,c},d}e", "de", true},
        {"{a{b,c},d}e", "ade", false},
        {"{a,}b", "b", true},
        {"{,a}b", "ab", true},
        {"{a}", "a", true},
        {"{}", "", true},
        {"{*.0,*.1}.x", "layers.1.x", true},
        {"{[,],b}", ",", true},
        {"a,b", "a,b", true},
        {"\\*", "*", true},
        {"\\*", "a", false},
        {"{\\,,b}", ",", true},
        {"a\\{b", "a{b", true},
        {"*a*a*a*a*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", false},
        {"Model", "model", false},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        if (kvc_smooth_match(cases[i].pattern, cases[i].name) != cases[i].matches)
            fail_msg("%s and %s", cases[i].pattern, cases[i].name);
}

static void broken_patterns_match_only_themselves(void **state)
{
    static const char *const broken[] = {"[a", "[", "[!", "[]", "{a", "a}", "{a,{b}", "a\\", "*{"};
    char longest[1025];

    (void)state;
    for (size_t i = 0; i < sizeof(broken) / sizeof(*broken); i++) {
        assert_true(kvc_smooth_match(broken[i], broken[i]));
        assert_false(kvc_smooth_match(broken[i], "a"));
        assert_false(kvc_smooth_match(broken[i], "b"));
        assert_false(kvc_smooth_match(broken[i], ""));
    }
    memset(longest, '*', sizeof(longest));
    longest[1024] = 0; /* no wildcard any more */
    assert_true(kvc_smooth_match(longest, longest));
    assert_false(kvc_smooth_match(longest, "a"));
    longest[1023] = 0;
    assert_true(kvc_smooth_match(longest, "a"));
}

/* Plain wildcards, by trying everything: only *, ? and letters. */
static bool plain_match(const char *p, const char *name)
{
    if (*p == 0)
        return *name == 0;
    if (*p == '*')
        return plain_match(p + 1, name) || (*name && plain_match(p, name + 1));
    return *name && (*p == '?' || *p == *name) && plain_match(p + 1, name + 1);
}

/* Where the first group ends, and what an alternative of it makes of the pattern. */
static bool expanded_match(const char *p, const char *name)
{
    const char *open = strchr(p, '{');
    char text[64];

    if (!open)
        return plain_match(p, name);
    const char *close = open, *from = open + 1;
    for (int depth = 0;; close++) {
        depth += *close == '{';
        depth -= *close == '}';
        if (depth == 0)
            break;
    }
    int depth = 0;
    for (const char *at = from; at <= close; at++) {
        if ((*at == ',' && depth == 0) || at == close) {
            const size_t head = (size_t)(open - p), middle = (size_t)(at - from);
            memcpy(text, p, head);
            memcpy(text + head, from, middle);
            memcpy(text + head + middle, close + 1, strlen(close + 1) + 1);
            if (expanded_match(text, name))
                return true;
            from = at + 1;
        }
        depth += *at == '{';
        depth -= *at == '}';
    }
    return false;
}

/* A random pattern whose braces are balanced; commas only in them. */
static void draw_pattern(uint64_t *rng, char *p)
{
    size_t n = 0, depth = 0;

    for (size_t left = 1 + rng_below(rng, 10); left > 0; left--) {
        char c = "aabb*?{},,"[rng_below(rng, 10)];
        if ((c == '}' || c == ',') && depth == 0)
            c = 'a';
        depth += c == '{';
        depth -= c == '}';
        p[n++] = c;
    }
    while (depth-- > 0)
        p[n++] = '}';
    p[n] = 0;
}

static void random_patterns_match_what_their_expansions_match(void **state)
{
    uint64_t rng = 1;
    size_t n_matches = 0;

    (void)state;
    for (int i = 0; i < 200000; i++) {
        char pattern[32], name[8];
        const size_t n = rng_below(&rng, 6);
        draw_pattern(&rng, pattern);
        for (size_t c = 0; c < n; c++)
            name[c] = "ab"[rng_below(&rng, 2)];
        name[n] = 0;
        const bool want = expanded_match(pattern, name);
        if (kvc_smooth_match(pattern, name) != want)
            fail_msg("%s and %s", pattern, name);
        n_matches += want;
    }
    assert_true(n_matches > 10000 && n_matches < 190000);
}

/* ---- units ---- */

static const kvc_smooth_unit units[UNITS] = {
    {"model.layers.0.self_attn", "q_proj", "k_proj", 0, KVC_SMOOTH_ROPE_LINEAR},
    {"model.layers.1.self_attn", "q_norm", "k_norm", 1, KVC_SMOOTH_ROPE_NORM},
    {"model.layers.2.self_attn", "q_proj", "k_proj", 2, KVC_SMOOTH_ROPE_LINEAR},
    {"model.layers.3.self_attn", "q_proj", "k_proj", 3, KVC_SMOOTH_ROPE_LINEAR}};

struct chosen {
    bool selected[UNITS];
    kvc_smooth_message messages[MAX_MESSAGES];
    size_t n;
};

static kvc_smooth_adapter adapter_of(void)
{
    const kvc_smooth_adapter a = {.struct_size = sizeof(a),
                                  .units = units,
                                  .n_units = UNITS,
                                  .head_dim = 2,
                                  .n_kv_heads = 1,
                                  .n_kv_groups = 2};
    return a;
}

static kvc_status choose(const kvc_smooth_adapter *adapter, const kvc_smooth_filter *filter,
                         const kvc_observation *observation, struct chosen *out)
{
    memset(out, 0xee, sizeof(*out));
    return kvc_smooth_select(adapter, filter, observation, NULL, out->selected, out->messages,
                             MAX_MESSAGES, &out->n);
}

static void assert_selected(const struct chosen *c, const bool *want)
{
    for (size_t i = 0; i < UNITS; i++)
        assert_int_equal(c->selected[i], want[i]);
}

static void assert_message(const struct chosen *c, size_t i, kvc_smooth_message_kind kind,
                           bool is_error, const char *part)
{
    assert_true(i < c->n);
    assert_int_equal(c->messages[i].kind, kind);
    assert_int_equal(c->messages[i].is_error, is_error);
    assert_non_null(strstr(c->messages[i].text, part));
}

/* Keys of n_layers layers of the geometry; the caller destroys both. */
static kvc_observation *observed(kvc_ctx *ctx, int32_t n_heads, int32_t n_seen)
{
    const kvc_observed_shape shape = {sizeof(shape), UNITS, n_heads, 1, 2};
    float k[2] = {1, 2};
    const kvc_view view = kvc_view_packed(k, KVC_DTYPE_F32, 1, 1, 2);
    kvc_observation *o;

    assert_int_equal(kvc_observation_create(ctx, &shape, &o), KVC_OK);
    for (int32_t l = 0; l < n_seen; l++)
        assert_int_equal(kvc_observe_keys(o, l, &view), KVC_OK);
    return o;
}

static void everything_is_chosen_without_a_filter(void **state)
{
    const kvc_smooth_adapter a = adapter_of();
    const kvc_smooth_filter none = {.struct_size = sizeof(none)};
    const bool all[UNITS] = {true, true, true, true};
    struct chosen c;

    (void)state;
    assert_int_equal(choose(&a, NULL, NULL, &c), KVC_OK);
    assert_selected(&c, all);
    assert_int_equal(c.n, 0);
    assert_int_equal(choose(&a, &none, NULL, &c), KVC_OK);
    assert_selected(&c, all);
    assert_int_equal(kvc_smooth_select(&a, NULL, NULL, NULL, c.selected, NULL, MAX_MESSAGES, NULL),
                     KVC_OK);
}

static void exclude_wins_over_include(void **state)
{
    const char *const include[] = {"*.[0-2].*", "*.0.self_attn"}, *const exclude[] = {"*.{1,3}.*"};
    const kvc_smooth_adapter a = adapter_of();
    const kvc_smooth_filter f = {sizeof(f), include, 2, exclude, 1};
    const kvc_smooth_filter only = {sizeof(only), NULL, 0, exclude, 1};
    const bool want[UNITS] = {true, false, true, false};
    struct chosen c;

    (void)state;
    assert_int_equal(choose(&a, &f, NULL, &c), KVC_OK);
    assert_selected(&c, want);
    assert_int_equal(c.n, 0); /* a pattern that overlaps another has matched as well */
    assert_int_equal(choose(&a, &only, NULL, &c), KVC_OK);
    assert_selected(&c, want);
}

static void patterns_without_a_unit_are_warned_of(void **state)
{
    const char *const include[] = {"*", "*.7.*"}, *const exclude[] = {"*", "model.layer.0.attn"};
    const kvc_smooth_adapter a = adapter_of();
    const kvc_smooth_filter f = {sizeof(f), include, 2, exclude, 2};
    const bool none[UNITS] = {false};
    struct chosen c;

    (void)state;
    assert_int_equal(choose(&a, &f, NULL, &c), KVC_OK);
    assert_selected(&c, none);
    assert_int_equal(c.n, 2);
    assert_message(&c, 0, KVC_SMOOTH_UNMATCHED, false, "*.7.*");
    assert_message(&c, 1, KVC_SMOOTH_UNMATCHED, false, "model.layer.0.attn");
}

static void missing_geometry_is_an_error_that_names_the_field(void **state)
{
    const bool none[UNITS] = {false};
    kvc_smooth_adapter a = adapter_of();
    struct chosen c;

    (void)state;
    a.head_dim = 0;
    a.n_kv_groups = 0;
    assert_int_equal(choose(&a, NULL, NULL, &c), KVC_E_UNSUPPORTED);
    assert_selected(&c, none);
    assert_int_equal(c.n, 2);
    assert_message(&c, 0, KVC_SMOOTH_MISSING_GEOMETRY, true, "head_dim");
    assert_message(&c, 1, KVC_SMOOTH_MISSING_GEOMETRY, true, "n_kv_groups");
    a = adapter_of();
    a.n_kv_heads = 0;
    assert_int_equal(choose(&a, NULL, NULL, &c), KVC_E_UNSUPPORTED);
    assert_message(&c, 0, KVC_SMOOTH_MISSING_GEOMETRY, true, "n_kv_heads");
}

/* A model without this module. */
static bool has_other_weights(void *user, const char *module)
{
    return strcmp(module, user) != 0;
}

static void missing_modules_are_errors_where_they_are_chosen(void **state)
{
    const char *const exclude[] = {"*.1.*"};
    const kvc_smooth_filter f = {sizeof(f), NULL, 0, exclude, 1};
    const bool none[UNITS] = {false}, others[UNITS] = {true, false, true, true};
    kvc_smooth_adapter a = adapter_of();
    struct chosen c;

    (void)state;
    a.has_weight = has_other_weights;
    a.user = (void *)"model.layers.1.self_attn.k_norm";
    assert_int_equal(choose(&a, NULL, NULL, &c), KVC_E_UNSUPPORTED);
    assert_selected(&c, none);
    assert_int_equal(c.n, 1);
    assert_message(&c, 0, KVC_SMOOTH_MISSING_MODULE, true, "model.layers.1.self_attn.k_norm");
    a.user = (void *)"model.layers.1.self_attn.q_norm";
    assert_int_equal(choose(&a, NULL, NULL, &c), KVC_E_UNSUPPORTED);
    assert_int_equal(choose(&a, &f, NULL, &c), KVC_OK);
    assert_selected(&c, others);
}

static void layers_that_were_not_observed_are_errors_where_they_are_chosen(void **state)
{
    const char *const exclude[] = {"*.3.*"};
    const kvc_smooth_filter f = {sizeof(f), NULL, 0, exclude, 1};
    const kvc_smooth_adapter a = adapter_of();
    const bool none[UNITS] = {false}, first[UNITS] = {true, true, true, false};
    struct chosen c;
    kvc_ctx *ctx;

    (void)state;
    assert_int_equal(kvc_ctx_create(NULL, &ctx), KVC_OK);
    kvc_observation *o = observed(ctx, 2, 3), *other = observed(ctx, 3, 4);
    assert_int_equal(choose(&a, NULL, o, &c), KVC_E_MISMATCH);
    assert_selected(&c, none);
    assert_int_equal(c.n, 1);
    assert_message(&c, 0, KVC_SMOOTH_NOT_OBSERVED, true, "model.layers.3.self_attn");
    assert_int_equal(choose(&a, &f, o, &c), KVC_OK);
    assert_selected(&c, first);
    assert_int_equal(choose(&a, NULL, other, &c), KVC_E_MISMATCH); /* three query heads a KV head */
    assert_selected(&c, none);
    kvc_observation_destroy(o);
    kvc_observation_destroy(other);
    kvc_ctx_destroy(ctx);
}

static void invalid_units_are_errors(void **state)
{
    static char longest[256];
    const bool none[UNITS] = {false};
    kvc_smooth_unit bad[UNITS];
    kvc_smooth_adapter a = adapter_of();
    struct chosen c;
    kvc_ctx *ctx;

    (void)state;
    assert_int_equal(kvc_ctx_create(NULL, &ctx), KVC_OK);
    kvc_observation *o = observed(ctx, 2, 4);
    memset(longest, 'x', 255 - strlen(".q_proj"));
    a.units = bad;
    for (int i = 0; i < 11; i++) {
        memcpy(bad, units, sizeof(bad));
        switch (i) {
        case 0: bad[2].attention_name = NULL; break;
        case 1: bad[2].attention_name = ""; break;
        case 2: bad[2].q_name = NULL; break;
        case 3: bad[2].k_name = NULL; break;
        case 4: bad[2].k_name = ""; break;
        case 5: bad[2].type = (kvc_smooth_type)2; break;
        case 6: bad[2].layer = -1; break;
        case 7: bad[2].layer = 4; break;
        case 8: bad[2].layer = 1; break;
        case 9: bad[2].attention_name = longest, bad[2].k_name = "k_proj2"; break;
        default: bad[2].attention_name = longest; break;
        }
        const kvc_status status = choose(&a, NULL, o, &c);
        if (i < 10) {
            assert_int_equal(status, KVC_E_ARG);
            assert_selected(&c, none);
            assert_int_equal(c.n, 1);
            assert_message(&c, 0, KVC_SMOOTH_UNIT_INVALID, true, "");
        } else {
            assert_int_equal(status, KVC_OK); /* 255 characters fit */
        }
    }
    const char *const everything[] = {"*"};
    const kvc_smooth_filter f = {sizeof(f), everything, 1, NULL, 0};
    bad[0].attention_name = NULL;
    a.n_units = 1;
    assert_int_equal(choose(&a, &f, o, &c), KVC_E_ARG);
    assert_int_equal(c.n, 1); /* it is never said that nothing matches "*" */
    kvc_observation_destroy(o);
    kvc_ctx_destroy(ctx);
}

static void a_factor_above_one_is_warned_of(void **state)
{
    const kvc_smooth_adapter a = adapter_of();
    kvc_smooth_options o;
    struct chosen c;

    (void)state;
    kvc_smooth_options_default(&o);
    assert_int_equal(
        kvc_smooth_select(&a, NULL, NULL, &o, c.selected, c.messages, MAX_MESSAGES, &c.n), KVC_OK);
    assert_int_equal(c.n, 0);
    o.factor = 1.5f;
    assert_int_equal(
        kvc_smooth_select(&a, NULL, NULL, &o, c.selected, c.messages, MAX_MESSAGES, &c.n), KVC_OK);
    assert_true(c.selected[0] && c.selected[3]);
    assert_message(&c, 0, KVC_SMOOTH_LARGE_FACTOR, false, "factor");
}

static void messages_that_do_not_fit_are_counted_and_cut(void **state)
{
    static char longest[1000];
    const char *const include[] = {longest, "b", "c"};
    const kvc_smooth_filter f = {sizeof(f), include, 3, NULL, 0};
    const kvc_smooth_adapter a = adapter_of();
    kvc_smooth_message messages[2];
    bool selected[UNITS];
    size_t n = 0;

    (void)state;
    memset(longest, 'x', sizeof(longest) - 1);
    memset(messages, 0xee, sizeof(messages));
    assert_int_equal(kvc_smooth_select(&a, &f, NULL, NULL, selected, messages, 1, &n), KVC_OK);
    assert_int_equal(n, 3);
    assert_int_equal(strlen(messages[0].text), sizeof(messages[0].text) - 1);
    assert_int_equal((unsigned char)messages[1].text[0], 0xee);
}

static void missing_pointers_are_refused(void **state)
{
    static const char *const patterns[2] = {"*", NULL};
    const kvc_smooth_filter filters[] = {{8, NULL, 0, NULL, 0},
                                         {sizeof(*filters), NULL, 1, NULL, 0},
                                         {sizeof(*filters), NULL, 0, NULL, 1},
                                         {sizeof(*filters), patterns, 2, NULL, 0},
                                         {sizeof(*filters), NULL, 0, patterns, 2}};
    kvc_smooth_adapter a = adapter_of();
    bool selected[UNITS];

    (void)state;
    for (size_t i = 0; i < sizeof(filters) / sizeof(*filters); i++)
        assert_int_equal(kvc_smooth_select(&a, &filters[i], NULL, NULL, selected, NULL, 0, NULL),
                         KVC_E_ARG);
    assert_int_equal(kvc_smooth_select(&a, NULL, NULL, NULL, NULL, NULL, 0, NULL), KVC_E_ARG);
    assert_int_equal(kvc_smooth_select(NULL, NULL, NULL, NULL, selected, NULL, 0, NULL), KVC_E_ARG);
    a.n_units = 0;
    assert_int_equal(kvc_smooth_select(&a, NULL, NULL, NULL, selected, NULL, 0, NULL), KVC_E_ARG);
    a = adapter_of();
    a.units = NULL;
    assert_int_equal(kvc_smooth_select(&a, NULL, NULL, NULL, selected, NULL, 0, NULL), KVC_E_ARG);
    a = adapter_of();
    a.struct_size = 8;
    assert_int_equal(kvc_smooth_select(&a, NULL, NULL, NULL, selected, NULL, 0, NULL), KVC_E_ARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(patterns_match_as_documented),
        cmocka_unit_test(broken_patterns_match_only_themselves),
        cmocka_unit_test(random_patterns_match_what_their_expansions_match),
        cmocka_unit_test(everything_is_chosen_without_a_filter),
        cmocka_unit_test(exclude_wins_over_include),
        cmocka_unit_test(patterns_without_a_unit_are_warned_of),
        cmocka_unit_test(missing_geometry_is_an_error_that_names_the_field),
        cmocka_unit_test(missing_modules_are_errors_where_they_are_chosen),
        cmocka_unit_test(layers_that_were_not_observed_are_errors_where_they_are_chosen),
        cmocka_unit_test(invalid_units_are_errors),
        cmocka_unit_test(a_factor_above_one_is_warned_of),
        cmocka_unit_test(messages_that_do_not_fit_are_counted_and_cut),
        cmocka_unit_test(missing_pointers_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
