/* The tokenizer: ids of a real vocabulary, round trips, special tokens, bytes that are no text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "file.h"
#include "gguf.h"
#include "tokenizer.h"
#include "utf8.h"

/* What the Python package tokenizers answers: data/engine/README.md. */
struct golden {
    const char *text;
    size_t n;
    int32_t ids[128];
};

static const struct golden goldens[] = {
#include "data/engine/tokens.inc"
};
enum { N_GOLDENS = sizeof(goldens) / sizeof(*goldens) };

static const char *model_path;
static struct tokenizer *tokenizer;

static int open_tokenizer(void **state)
{
    struct failure failure;
    struct gguf gguf;
    unsigned char *data;
    size_t size;

    (void)state;
    bool ok = file_read(model_path, &data, &size, &failure);
    if (ok) {
        ok = gguf_parse(data, size, &gguf, &failure) &&
             tokenizer_from_gguf(&gguf, &tokenizer, &failure);
        gguf_free(&gguf);
        free(data);
    }
    if (!ok)
        print_error("%s\n", failure.text);
    return ok ? 0 : -1;
}

static int close_tokenizer(void **state)
{
    (void)state;
    tokenizer_destroy(tokenizer);
    return 0;
}

/* The bytes of a list of tokens must be the text. */
static void assert_decodes_to(const struct tokenizer *t, const struct token_list *list,
                              const char *text, size_t size)
{
    size_t at = 0;

    for (size_t i = 0; i < list->n; i++) {
        const struct gguf_text part = tokenizer_text(t, list->ids[i]);
        assert_true(part.size <= size - at);
        assert_memory_equal(part.data, text + at, part.size);
        at += part.size;
    }
    assert_int_equal(at, size);
}

static void ids_equal_the_golden_ones(void **state)
{
    struct failure failure;

    (void)state;
    for (size_t g = 0; g < N_GOLDENS; g++) {
        const struct golden *golden = &goldens[g];
        struct token_list list = {0};
        if (!tokenizer_encode(tokenizer, golden->text, strlen(golden->text), true, &list, &failure))
            fail_msg("%s: %s", golden->text, failure.text);
        if (list.n != golden->n || memcmp(list.ids, golden->ids, list.n * sizeof(*list.ids)) != 0)
            fail_msg("other ids for \"%s\"", golden->text);
        assert_decodes_to(tokenizer, &list, golden->text, strlen(golden->text));
        free(list.ids);
    }
}

static void special_tokens_are_found_only_where_asked_for(void **state)
{
    static const char text[] = "a<|im_end|>b";
    struct token_list parsed = {0}, plain = {0};
    struct failure failure;

    (void)state;
    assert_int_equal(tokenizer_special(tokenizer, "<|im_end|>"), 2);
    assert_int_equal(tokenizer_special(tokenizer, "a"), -1);
    assert_true(tokenizer_encode(tokenizer, text, strlen(text), true, &parsed, &failure));
    assert_true(tokenizer_encode(tokenizer, text, strlen(text), false, &plain, &failure));
    assert_int_equal(parsed.n, 3);
    assert_int_equal(parsed.ids[1], 2);
    for (size_t i = 0; i < plain.n; i++)
        assert_true(plain.ids[i] != 2);
    assert_decodes_to(tokenizer, &plain, text, strlen(text));
    free(parsed.ids);
    free(plain.ids);
}

static void invalid_utf8_goes_byte_by_byte(void **state)
{
    static const char text[] = "ok \x80\xbf\xe6\x9d \xed\xa0\x80 \xe2\x82";
    struct token_list list = {0};
    struct failure failure;

    (void)state;
    assert_true(tokenizer_encode(tokenizer, text, strlen(text), false, &list, &failure));
    assert_decodes_to(tokenizer, &list, text, strlen(text));
    free(list.ids);
}

static void a_byte_without_token_is_an_error(void **state)
{
    struct token_list list = {0};
    struct failure failure;

    (void)state;
    assert_false(tokenizer_encode(tokenizer, "abc\xff", 4, false, &list, &failure));
    assert_string_equal(failure.text, "the vocabulary has no token for byte 0xff at offset 3");
    free(list.ids);
}

static void long_pieces_take_no_quadratic_time(void **state)
{
    enum { SIZE = 1 << 20 };
    char *text = malloc(SIZE);
    struct token_list list = {0};
    struct failure failure;

    (void)state;
    assert_non_null(text);
    memset(text, 'a', SIZE);
    assert_true(tokenizer_encode(tokenizer, text, SIZE, false, &list, &failure));
    assert_decodes_to(tokenizer, &list, text, SIZE);
    list.n = 0;
    memset(text, ' ', SIZE);
    assert_true(tokenizer_encode(tokenizer, text, SIZE, false, &list, &failure));
    assert_decodes_to(tokenizer, &list, text, SIZE);
    free(list.ids);
    free(text);
}

static void ids_out_of_range_have_no_text(void **state)
{
    (void)state;
    assert_int_equal(tokenizer_text(tokenizer, -1).size, 0);
    assert_int_equal(tokenizer_text(tokenizer, (int32_t)tokenizer_n_tokens(tokenizer)).size, 0);
}

#define TEXT(literal)                                                                              \
    {                                                                                              \
        literal, sizeof(literal) - 1                                                               \
    }

/* Merges rank over position: "ab" before "bc" only where it ranks first. */
static void merges_go_by_rank_then_from_the_left(void **state)
{
    static const struct gguf_text tokens[] = {TEXT("a"),  TEXT("b"),  TEXT("c"),
                                              TEXT("bc"), TEXT("ab"), TEXT("aa")};
    static const struct gguf_text merges[] = {TEXT("b c"), TEXT("a b"), TEXT("a a")};
    static const struct vocabulary v = {
        .tokens = tokens, .n_tokens = 6, .merges = merges, .n_merges = 3};
    static const int32_t want[] = {0, 3, 4, 5, 5, 0};
    struct token_list list = {0};
    struct failure failure;
    struct tokenizer *t;

    (void)state;
    assert_true(tokenizer_create(&v, &t, &failure));
    /* abc -> a bc, ab -> ab, aaaaa -> aa aa a; parted by bytes that cannot join */
    assert_true(tokenizer_encode(t, "abc", 3, false, &list, &failure));
    assert_true(tokenizer_encode(t, "ab", 2, false, &list, &failure));
    assert_true(tokenizer_encode(t, "aaaaa", 5, false, &list, &failure));
    assert_int_equal(list.n, 6);
    assert_memory_equal(list.ids, want, sizeof(want));
    free(list.ids);
    tokenizer_destroy(t);
}

static void refuses_merges_of_unknown_tokens(void **state)
{
    static const struct gguf_text tokens[] = {TEXT("a"), TEXT("b"), TEXT("ab")};
    static const struct gguf_text bad[] = {TEXT("a c"), TEXT("b a"), TEXT("ab"), TEXT(" "),
                                           TEXT(""),    TEXT("a "),  TEXT(" b")};
    struct failure failure;
    struct tokenizer *t;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        const struct vocabulary v = {
            .tokens = tokens, .n_tokens = 3, .merges = &bad[i], .n_merges = 1};
        assert_false(tokenizer_create(&v, &t, &failure));
        assert_null(t);
    }
}

static void utf8_holds_back_what_is_not_complete(void **state)
{
    static const struct {
        const char *text;
        size_t complete;
    } cases[] = {
        {"", 0},
        {"a", 1},
        {"\xc3", 0},
        {"\xc3\xa9", 2},
        {"a\xe2\x82", 1},
        {"\xe2\x82\xac", 3},
        {"\xf0\x9f\x98", 0},
        {"\xf0\x9f\x98\x80", 4},
        {"\x80", 1},
        {"\x80\x80\x80\x80", 4},
        {"\xff", 1},
        {"\xe2 ", 2},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        assert_int_equal(utf8_complete(cases[i].text, strlen(cases[i].text)), cases[i].complete);
}

static void utf8_refuses_what_is_not_shortest(void **state)
{
    static const char *const bad[] = {
        "\xc0\x80",         "\xc1\xbf",         "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\x80",         "\xe2\x82"};
    uint32_t c;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        assert_int_equal(utf8_decode(bad[i], strlen(bad[i]), &c), 0);
    assert_int_equal(utf8_decode("\xf4\x8f\xbf\xbf", 4, &c), 4);
    assert_int_equal(c, 0x10ffff);
    assert_int_equal(utf8_decode("\xe2\x82\xac", 3, &c), 3);
    assert_int_equal(c, 0x20ac);
    assert_int_equal(utf8_decode("", 0, &c), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest without_model[] = {
        cmocka_unit_test(merges_go_by_rank_then_from_the_left),
        cmocka_unit_test(refuses_merges_of_unknown_tokens),
        cmocka_unit_test(utf8_holds_back_what_is_not_complete),
        cmocka_unit_test(utf8_refuses_what_is_not_shortest),
    };
    const struct CMUnitTest with_model[] = {
        cmocka_unit_test(ids_equal_the_golden_ones),
        cmocka_unit_test(special_tokens_are_found_only_where_asked_for),
        cmocka_unit_test(invalid_utf8_goes_byte_by_byte),
        cmocka_unit_test(a_byte_without_token_is_an_error),
        cmocka_unit_test(long_pieces_take_no_quadratic_time),
        cmocka_unit_test(ids_out_of_range_have_no_text),
    };

    if (argc != 2) {
        fprintf(stderr, "usage: test_tokenizer MODEL.gguf\n");
        return 2;
    }
    model_path = argv[1];
    const int failed = cmocka_run_group_tests(without_model, NULL, NULL);
    return failed + cmocka_run_group_tests(with_model, open_tokenizer, close_tokenizer);
}
