/* libFuzzer: any bytes become tokens of a small vocabulary, and the tokens give the bytes back. */
#include <stdlib.h>
#include <string.h>

#include "tokenizer.h"
#include "utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define TEXT(literal)                                                                              \
    {                                                                                              \
        literal, sizeof(literal) - 1                                                               \
    }

/* Behind the 256 bytes: some merges of letters, spaces (written U+0120) and halves of characters.
 */
static const struct gguf_text joined[] = {
    TEXT("ab"),
    TEXT("abab"),
    TEXT("\xc4\xa0\xc4\xa0"),
    TEXT("\xc4\xa0"
         "a"),
    TEXT("bc"),
    TEXT("aa"),
    TEXT("aaaa"),
    TEXT("\xc3\x83\xc2\xa9"),
    TEXT("<|end|>"),
    TEXT("<|end|>>"),
};
static const struct gguf_text merges[] = {
    TEXT("b c"),        TEXT("a b"), TEXT("ab ab"), TEXT("\xc4\xa0 \xc4\xa0"),
    TEXT("\xc4\xa0 a"), TEXT("a a"), TEXT("aa aa"), TEXT("\xc3\x83 \xc2\xa9"),
};
enum { N_JOINED = sizeof(joined) / sizeof(*joined), N_TOKENS = 256 + N_JOINED, N_SPECIALS = 2 };

static bool is_printable(unsigned b)
{
    return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
}

static struct tokenizer *create(void)
{
    static char characters[256][2];
    struct gguf_text tokens[N_TOKENS];
    uint8_t kinds[N_TOKENS] = {0};
    struct failure failure;
    struct tokenizer *tokenizer;
    unsigned n = 0;

    for (unsigned b = 0; b < 256; b++) {
        const unsigned c = is_printable(b) ? b : 0x100 + n++;
        characters[b][0] = (char)(c < 0x80 ? c : 0xc0 | c >> 6);
        characters[b][1] = (char)(0x80 | (c & 0x3f));
        tokens[b] = (struct gguf_text){characters[b], c < 0x80 ? 1 : 2};
    }
    memcpy(tokens + 256, joined, sizeof(joined));
    memset(kinds + N_TOKENS - N_SPECIALS, TOKEN_CONTROL, N_SPECIALS);
    const struct vocabulary v = {.tokens = tokens,
                                 .n_tokens = N_TOKENS,
                                 .merges = merges,
                                 .n_merges = sizeof(merges) / sizeof(*merges),
                                 .kinds = kinds};
    if (!tokenizer_create(&v, &tokenizer, &failure))
        abort();
    return tokenizer;
}

static void check(struct tokenizer *tokenizer, const char *text, size_t size, bool parse_special)
{
    struct token_list list = {0};
    struct failure failure;
    size_t at = 0;

    if (!tokenizer_encode(tokenizer, text, size, parse_special, &list, &failure))
        abort();
    for (size_t i = 0; i < list.n; i++) {
        const struct gguf_text part = tokenizer_text(tokenizer, list.ids[i]);
        if (part.size == 0 || part.size > size - at || memcmp(part.data, text + at, part.size) != 0)
            abort();
        if (!parse_special && list.ids[i] >= N_TOKENS - N_SPECIALS)
            abort();
        at += part.size;
    }
    if (at != size)
        abort();
    free(list.ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct tokenizer *tokenizer;
    const size_t complete = utf8_complete((const char *)data, size);

    if (!tokenizer)
        tokenizer = create();
    check(tokenizer, (const char *)data, size, false);
    check(tokenizer, (const char *)data, size, true);
    if (complete > size || size - complete > 3)
        abort();
    return 0;
}
