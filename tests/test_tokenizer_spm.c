/* SentencePiece's tokens: a vocabulary made by hand, from memory and from a GGUF file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gguf.h"
#include "support/gguf_file.h"
#include "tokenizer.h"

#define SPACE "\xe2\x96\x81"

enum { BOS, A, B, C, S, AB, BC, SA, AA, N1, N2, TAG, TAG_A, BYTE_C3, BYTE_A9, CC, N_TOKENS };

/* type as GGUF files count them */
static const struct {
    const char *text;
    float score;
    uint32_t type;
} words[N_TOKENS] = {
    [BOS] = {"<bos>", 0.0f, 3},  [A] = {"a", -10.0f, 1},          [B] = {"b", -11.0f, 1},
    [C] = {"c", -12.0f, 1},      [S] = {SPACE, -13.0f, 1},        [AB] = {"ab", 0.5f, 1},
    [BC] = {"bc", 1.0f, 1},      [SA] = {SPACE "a", -3.0f, 1},    [AA] = {"aa", -4.0f, 1},
    [N1] = {"\n", 0.0f, 4},      [N2] = {"\n\n", 0.0f, 4},        [TAG] = {"<" SPACE ">", 0.0f, 4},
    [TAG_A] = {"< >a", 0.0f, 3}, [BYTE_C3] = {"<0xC3>", 0.0f, 6}, [BYTE_A9] = {"<0xA9>", 0.0f, 6},
    [CC] = {"cc", 0.0f, 5},
};

static struct tokenizer *tokenizer;

/* What of the file can be spoiled. */
struct spoiled {
    const char *model;
    uint32_t score_type, n_scores, add_prefix, bos;
};

static const struct spoiled good = {"llama", 6, N_TOKENS, 0, BOS};

static void put_array(struct gguf_file *f, const char *key, uint32_t type, uint64_t n)
{
    file_put_key(f, key, 9);
    file_put_int(f, type, 4);
    file_put_int(f, n, 8);
}

static bool load(const struct spoiled *spoiled, struct tokenizer **out, struct failure *failure)
{
    struct gguf_file f;
    struct gguf gguf;

    file_put_header(&f, 3, 0, 7);
    file_put_string(&f, "tokenizer.ggml.model", spoiled->model);
    file_put_u32(&f, "tokenizer.ggml.add_space_prefix", spoiled->add_prefix);
    file_put_u32(&f, "tokenizer.ggml.add_bos_token", 1);
    file_put_u32(&f, "tokenizer.ggml.bos_token_id", spoiled->bos);
    put_array(&f, "tokenizer.ggml.tokens", 8, N_TOKENS);
    for (size_t i = 0; i < N_TOKENS; i++)
        file_put_text(&f, words[i].text);
    put_array(&f, "tokenizer.ggml.scores", spoiled->score_type, spoiled->n_scores);
    for (size_t i = 0; i < spoiled->n_scores; i++)
        file_put(&f, &words[i].score, 4);
    put_array(&f, "tokenizer.ggml.token_type", 5, N_TOKENS);
    for (size_t i = 0; i < N_TOKENS; i++)
        file_put_int(&f, words[i].type, 4);
    assert_true(gguf_parse(f.data, f.n, &gguf, failure));
    const bool ok = tokenizer_from_gguf(&gguf, out, failure);
    gguf_free(&gguf);
    return ok;
}

static int open_tokenizer(void **state)
{
    struct failure failure;

    (void)state;
    return load(&good, &tokenizer, &failure) ? 0 : -1;
}

static int close_tokenizer(void **state)
{
    (void)state;
    tokenizer_destroy(tokenizer);
    return 0;
}

static void check(const char *text, bool parse_special, const int32_t *want, size_t n)
{
    struct token_list list = {0};
    struct failure failure;
    size_t at = 0;

    if (!tokenizer_encode(tokenizer, text, strlen(text), parse_special, &list, &failure))
        fail_msg("\"%s\": %s", text, failure.text);
    if (list.n != n || memcmp(list.ids, want, n * sizeof(*want)) != 0)
        fail_msg("other ids for \"%s\"", text);
    for (size_t i = 0; i < list.n; i++) {
        const struct gguf_text part = tokenizer_text(tokenizer, list.ids[i]);
        assert_memory_equal(part.data, text + at, part.size);
        at += part.size;
    }
    assert_int_equal(at, strlen(text));
    free(list.ids);
}

#define CHECK(text, parse_special, ...)                                                            \
    check(text, parse_special, (const int32_t[]){__VA_ARGS__},                                     \
          sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void pairs_join_by_score_then_from_the_left(void **state)
{
    (void)state;
    CHECK("abc", false, A, BC);
    CHECK("aab", false, A, AB);
    CHECK("aaa", false, AA, A);
    CHECK("aaaa", false, AA, AA);
    CHECK("cb", false, C, B);
}

static void spaces_are_written_as_a_character_of_their_own(void **state)
{
    (void)state;
    CHECK(" aa", false, SA, A);
    CHECK("a  a", false, A, S, SA);
    CHECK(" ", false, S);
}

static void characters_without_a_token_go_byte_by_byte(void **state)
{
    (void)state;
    CHECK("a\xc3\xa9"
          "ab",
          false, A, BYTE_C3, BYTE_A9, AB);
    CHECK("\xa9"
          "a\xc3",
          false, BYTE_A9, A, BYTE_C3); /* no UTF-8 */
}

static void a_byte_without_a_token_is_an_error(void **state)
{
    struct token_list list = {0};
    struct failure failure;

    (void)state;
    assert_false(tokenizer_encode(tokenizer, "ab\nb\xc3\xa8", 6, false, &list, &failure));
    assert_string_equal(failure.text, "the vocabulary has no token for byte 0xa8 at offset 5");
    assert_int_equal(list.n, 2); /* what came before the piece */
    free(list.ids);
}

static void defined_tokens_are_always_found_and_the_longest_first(void **state)
{
    (void)state;
    CHECK("a\n\n\nb", false, A, N2, N1, B);
    CHECK("a< >b", false, A, TAG, B);
    CHECK("a< >b", true, A, TAG, B);
    assert_int_equal(tokenizer_special(tokenizer, "< >"), TAG);
}

static void control_tokens_are_found_only_where_asked_for(void **state)
{
    (void)state;
    CHECK("< >a", true, TAG_A);
    CHECK("< >a", false, TAG, A);
    CHECK("< >ab", true, TAG_A, B);
    assert_int_equal(tokenizer_special(tokenizer, "<bos>"), BOS);
    assert_int_equal(tokenizer_special(tokenizer, "a"), -1);
    assert_int_equal(tokenizer_special(tokenizer, ""), -1);
}

static void unused_tokens_are_never_made(void **state)
{
    (void)state;
    CHECK("cc", false, C, C);
}

static void the_file_tells_what_texts_begin_with(void **state)
{
    (void)state;
    assert_int_equal(tokenizer_bos(tokenizer), BOS);
}

static void long_texts_take_no_quadratic_time(void **state)
{
    enum { SIZE = 1 << 20 };
    char *text = malloc(SIZE);
    struct token_list list = {0};
    struct failure failure;

    (void)state;
    assert_non_null(text);
    memset(text, 'a', SIZE);
    assert_true(tokenizer_encode(tokenizer, text, SIZE, false, &list, &failure));
    assert_int_equal(list.n, SIZE / 2);
    free(list.ids);
    free(text);
}

static void refuses_what_it_cannot_read_right(void **state)
{
    struct failure failure;
    struct tokenizer *t;

    (void)state;
#define REFUSES(field, value)                                                                      \
    do {                                                                                           \
        struct spoiled spoiled = good;                                                             \
        spoiled.field = value;                                                                     \
        if (load(&spoiled, &t, &failure))                                                          \
            fail_msg("%s = %s was accepted", #field, #value);                                      \
        assert_null(t);                                                                            \
    } while (0)
    REFUSES(model, "bert");
    REFUSES(model, "gpt2"); /* it has no merges */
    REFUSES(score_type, 5);
    REFUSES(n_scores, N_TOKENS - 1);
    REFUSES(n_scores, 0);
    REFUSES(add_prefix, 1);
    REFUSES(bos, N_TOKENS);
    REFUSES(bos, UINT32_MAX);
#undef REFUSES
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pairs_join_by_score_then_from_the_left),
        cmocka_unit_test(spaces_are_written_as_a_character_of_their_own),
        cmocka_unit_test(characters_without_a_token_go_byte_by_byte),
        cmocka_unit_test(a_byte_without_a_token_is_an_error),
        cmocka_unit_test(defined_tokens_are_always_found_and_the_longest_first),
        cmocka_unit_test(control_tokens_are_found_only_where_asked_for),
        cmocka_unit_test(unused_tokens_are_never_made),
        cmocka_unit_test(the_file_tells_what_texts_begin_with),
        cmocka_unit_test(long_texts_take_no_quadratic_time),
        cmocka_unit_test(refuses_what_it_cannot_read_right),
    };

    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
