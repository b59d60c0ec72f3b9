/* The engine's settings by name: lists, scalings of positions and policies; no model is needed. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "args.h"
#include "policies.h"
#include "rotation.h"

static void lists_end_where_their_items_do(void **state)
{
    const char *list = "f16,,int8-long", *none = NULL;
    char item[5];

    (void)state;
    assert_true(args_next_item(&list, item, sizeof(item)));
    assert_string_equal(item, "f16");
    assert_true(args_next_item(&list, item, sizeof(item)));
    assert_string_equal(item, "");
    assert_true(args_next_item(&list, item, sizeof(item)));
    assert_string_equal(item, "int8");
    assert_false(args_next_item(&list, item, sizeof(item)));
    assert_false(args_next_item(&none, item, sizeof(item)));
}

static void pairs_take_two_values(void **state)
{
    const char *ask[2] = {NULL, NULL};
    bool flag = false, help;
    const struct arg args[] = {{"ask", ARG_PAIR, ask, "IMAGE QUESTION", "", 0, 0},
                               {"flag", ARG_FLAG, &flag, "", "", 0, 0}};
    char *whole[] = {"--ask", "a.png", "how many?", "--flag"};
    char *joined[] = {"--ask=b.png", "--flag"}; /* dashes do not end a pair */
    struct failure failure;

    (void)state;
    assert_false(args_parse(args, 2, 1, whole, &help, &failure));
    assert_false(args_parse(args, 2, 2, whole, &help, &failure));
    assert_null(ask[0]);
    assert_true(args_parse(args, 2, 4, whole, &help, &failure));
    assert_string_equal(ask[0], "a.png");
    assert_string_equal(ask[1], "how many?");
    assert_true(flag);
    assert_true(args_parse(args, 2, 2, joined, &help, &failure));
    assert_string_equal(ask[0], "b.png");
    assert_string_equal(ask[1], "--flag");
}

static void repeated_options_add_to_their_list(void **state)
{
    struct arg_list list = {.n = 0};
    bool help;
    const struct arg args[] = {{"include", ARG_LIST, &list, "PATTERN", "", 0, 0}};
    char *two[] = {"--include", "a", "--include=b"}, *many[2 * ARG_LIST_MAX];
    struct failure failure;

    (void)state;
    assert_true(args_parse(args, 1, 3, two, &help, &failure));
    assert_int_equal(list.n, 2);
    assert_string_equal(list.items[0], "a");
    assert_string_equal(list.items[1], "b");
    assert_false(args_parse(args, 1, 1, two, &help, &failure)); /* no value */
    for (int i = 0; i < ARG_LIST_MAX; i++) {
        many[2 * i] = two[0];
        many[2 * i + 1] = two[1];
    }
    list.n = 0;
    assert_true(args_parse(args, 1, 2 * ARG_LIST_MAX, many, &help, &failure));
    assert_int_equal(list.n, ARG_LIST_MAX);
    assert_false(args_parse(args, 1, 2, two, &help, &failure));
    assert_non_null(strstr(failure.text, "--include"));
}

/* The fastest pair stays, the slowest turns by the factor less. */
static void scalings_stretch_the_context(void **state)
{
    const struct model_shape shape = {.n_rot = 64, .n_context = 8192, .rope_base = 100000.0};
    static const char *const names[] = {"ntk", "yarn"};
    double trained[32], scaled[32], magnitude;
    struct failure failure;
    kvc_rope rope;

    (void)state;
    assert_true(rotation_init(&shape, "none", 2.0, &rope, &failure));
    assert_int_equal(kvc_rope_frequencies(&rope, NULL, trained, NULL), KVC_OK);
    assert_true(rotation_check_context(&shape, &rope, 8192, &failure));
    assert_false(rotation_check_context(&shape, &rope, 8193, &failure));
    for (size_t i = 0; i < 2; i++) {
        assert_true(rotation_init(&shape, names[i], 2.0, &rope, &failure));
        assert_int_equal(kvc_rope_frequencies(&rope, NULL, scaled, &magnitude), KVC_OK);
        assert_true(scaled[0] == trained[0]);
        assert_true(fabs(scaled[31] / trained[31] - 0.5) < 1e-12);
        assert_true(fabs(magnitude - (i ? 1.0 + 0.1 * log(2.0) : 1.0)) < 1e-12);
        assert_true(rotation_check_context(&shape, &rope, 16384, &failure));
        assert_false(rotation_check_context(&shape, &rope, 16385, &failure));
    }
    assert_false(rotation_init(&shape, "linear", 2.0, &rope, &failure));
    assert_false(rotation_init(&shape, "ntk", 0.5, &rope, &failure));
}

static void policies_keep_their_share_of_the_rows(void **state)
{
    struct named_policy p;
    struct failure failure;

    (void)state;
    assert_true(policy_parse("window", 1000, &p, &failure));
    assert_true(p.is_used && p.policy.max_rows == 500 && p.policy.source == KVC_SOURCE_AGE);
    assert_true(p.score_decay == 1.0f);
    assert_true(policy_parse("window:0.251", 1000, &p, &failure));
    assert_int_equal(p.policy.max_rows, 251);
    assert_string_equal(p.name, "window:0.251");
    assert_true(policy_parse("heavy:0.25", 1000, &p, &failure));
    assert_true(p.policy.max_rows == 250 && p.policy.source == KVC_SOURCE_SUMS);
    assert_true(p.policy.scope == KVC_SCOPE_HEAD && p.policy.last_tokens == 175);
    assert_true(p.score_decay > 0.9f && p.score_decay < 1.0f);
    assert_true(policy_parse("heavy:1", 1000, &p, &failure));
    assert_int_equal(p.policy.max_rows, 1000);
}

static void profiles_are_those_of_the_library(void **state)
{
    static const char *const names[] = {"light", "balanced", "aggressive", "extreme"};
    struct named_policy p;
    kvc_policy preset;
    struct failure failure;

    (void)state;
    for (size_t i = 0; i < 4; i++) {
        assert_true(policy_parse(names[i], 1000, &p, &failure));
        assert_int_equal(kvc_policy_preset(names[i], &preset), KVC_OK);
        assert_true(p.is_used && p.policy.visual_rate == preset.visual_rate);
        assert_true(p.policy.set_precision && p.policy.precision.k == preset.precision.k);
    }
    assert_true(policy_parse("none", 1000, &p, &failure));
    assert_false(p.is_used);
}

static void refuses_what_is_no_policy(void **state)
{
    static const char *const wrong[] = {"",         "heav",      "heavy:",       "heavy:0",
                                        "heavy:-1", "window:2",  "window:0.5x",  "window:nan",
                                        "none:0.5", "light:0.5", "window:0.0001"};
    struct named_policy p;
    struct failure failure;

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++)
        if (policy_parse(wrong[i], 1000, &p, &failure))
            fail_msg("%s", wrong[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_end_where_their_items_do),
        cmocka_unit_test(pairs_take_two_values),
        cmocka_unit_test(repeated_options_add_to_their_list),
        cmocka_unit_test(scalings_stretch_the_context),
        cmocka_unit_test(policies_keep_their_share_of_the_rows),
        cmocka_unit_test(profiles_are_those_of_the_library),
        cmocka_unit_test(refuses_what_is_no_policy),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
