/* The YAML settings of a fold: the article's keys, its defaults, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "config.h"

static bool parse(const char *text, struct fold_config *out, struct failure *failure)
{
    return fold_config_parse((const unsigned char *)text, strlen(text), out, failure);
}

static void reads_the_example_of_the_article(void **state)
{
    static const char text[] = "apiversion: modelslim_v1\n"
                               "spec:\n"
                               "  process:\n"
                               "    - type: \"kv_smooth\"\n"
                               "      smooth_factor: 0.75  # more or less\n"
                               "      include: [\"*\"]\n"
                               "      exclude: [\"model.layers.0.self_attn\", 'x.{1,2}']\n";
    struct fold_config c;
    struct failure failure;

    (void)state;
    assert_true(parse(text, &c, &failure));
    assert_true(c.factor == 0.75);
    assert_int_equal(c.n_include, 1);
    assert_string_equal(c.include[0], "*");
    assert_int_equal(c.n_exclude, 2);
    assert_string_equal(c.exclude[0], "model.layers.0.self_attn");
    assert_string_equal(c.exclude[1], "x.{1,2}");
    assert_string_equal(c.ignored, "");
    fold_config_free(&c);
}

static void fills_the_defaults_of_the_article(void **state)
{
    struct fold_config c;
    struct failure failure;

    (void)state;
    assert_true(parse("spec: {process: [{}]}", &c, &failure));
    assert_true(c.factor == 1.0 && c.n_include == 0 && c.n_exclude == 0);
    fold_config_free(&c);
}

static void tells_what_it_ignores(void **state)
{
    struct fold_config c;
    struct failure failure;

    (void)state;
    assert_true(parse("metadata: {a: 1}\nspec:\n  process: [{type: kv_smooth}]\n  save: []\n", &c,
                      &failure));
    assert_string_equal(c.ignored, "metadata, spec.save");
    fold_config_free(&c);
}

static void refuses_what_it_does_not_know(void **state)
{
    static const struct {
        const char *text, *word;
    } cases[] = {
        {"", "empty"},
        {"spec: [1", "line"},
        {"[1, 2]", "no mapping"},
        {"a: 1", "spec is missing"},
        {"spec: {a: 1}", "spec.process is missing"},
        {"spec: {process: []}", "one process"},
        {"spec: {process: {type: kv_smooth}}", "one process"},
        {"spec: {process: [{}, {}]}", "one process"},
        {"spec: {process: [kv_smooth]}", "no mapping"},
        {"spec: {process: [{type: iter_smooth}]}", "iter_smooth"},
        {"spec: {process: [{type: [kv_smooth]}]}", "only kv_smooth"},
        {"apiversion: v2\nspec: {process: [{}]}", "modelslim_v1"},
        {"spec: {process: [{smooth_faktor: 1}]}", "smooth_faktor"},
        {"spec: {process: [{smooth_factor: 0}]}", "greater than 0"},
        {"spec: {process: [{smooth_factor: -1}]}", "greater than 0"},
        {"spec: {process: [{smooth_factor: .nan}]}", "greater than 0"},
        {"spec: {process: [{smooth_factor: nan}]}", "greater than 0"},
        {"spec: {process: [{smooth_factor: inf}]}", "greater than 0"},
        {"spec: {process: [{smooth_factor: 1x}]}", "1x"},
        {"spec: {process: [{smooth_factor: }]}", "greater than 0"},
        {"spec: {process: [{smooth_factor: [1]}]}", "greater than 0"},
        {"spec: {process: [{smooth_factor: 1, smooth_factor: 2}]}", "twice"},
        {"spec: {process: [{include: a}]}", "list"},
        {"spec: {process: [{include: []}]}", "0 patterns"},
        {"spec: {process: [{include: [a, []]}]}", "no text"},
        {"spec: {process: [{include: ['']}]}", "no text"},
        {"spec: {process: [{include: [a], exclude: {b: c}}]}", "list"},
        {"spec: {process: [{exclude: [a], include: [*]}]}", "line"},
        {"spec: {process: [{[a]: 1}]}", "no text"},
        {"spec: {process: [&a {exclude: [*a]}]}", "no text"},
        {"spec: {process: [{include: [\"a\\0b\"]}]}", "no text"},
    };
    struct fold_config c;
    struct failure failure;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        failure.text[0] = '\0';
        assert_false(parse(cases[i].text, &c, &failure));
        if (!strstr(failure.text, cases[i].word))
            fail_msg("%s: \"%s\" does not say \"%s\"", cases[i].text, failure.text, cases[i].word);
        assert_null(c.include);
        assert_null(c.exclude);
    }
}

/* Every beginning of a file, and any byte in it changed: an answer, and nothing else. */
static void survives_damaged_files(void **state)
{
    static const char text[] =
        "apiversion: modelslim_v1\nspec:\n  process:\n  - type: kv_smooth\n"
        "    smooth_factor: 1.0\n    include: ['*']\n    exclude: [&a b, *a]\n";
    static const unsigned char values[] = {0, '\n', ' ', '*', '&', ':', '[', '}', '\'', 0x80, 0xff};
    struct fold_config c;
    struct failure failure;

    (void)state;
    for (size_t i = 0; i < sizeof(text); i++) {
        unsigned char *copy = malloc(i ? i : 1);
        assert_non_null(copy);
        memcpy(copy, text, i);
        if (fold_config_parse(copy, i, &c, &failure))
            fold_config_free(&c);
        for (size_t v = 0; i > 0 && v < sizeof(values); v++) {
            copy[i / 2] = values[v];
            if (fold_config_parse(copy, i, &c, &failure))
                fold_config_free(&c);
        }
        free(copy);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_the_example_of_the_article),
        cmocka_unit_test(fills_the_defaults_of_the_article),
        cmocka_unit_test(tells_what_it_ignores),
        cmocka_unit_test(refuses_what_it_does_not_know),
        cmocka_unit_test(survives_damaged_files),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
