/* The tokenizer of a GGUF file. */
#include <stdlib.h>

#include "tokenizer.h"

/* Values of tokenizer.ggml.token_type whose texts are not made by merging. */
enum { TOKEN_CONTROL = 3, TOKEN_USER_DEFINED = 4 };

static bool check_kind(const struct gguf *gguf, const char *key, const char *wanted,
                       struct failure *failure)
{
    struct gguf_text text;

    if (!gguf_to_text(gguf_find(gguf, key), &text))
        return fail_with(failure, "%s is missing", key);
    if (!gguf_text_is(text, wanted))
        return fail_with(failure, "%s is not \"%s\", the only one supported", key, wanted);
    return true;
}

static bool read_texts(const struct gguf *gguf, const char *key, struct gguf_text **texts,
                       size_t *n, struct failure *failure)
{
    const struct gguf_value *value = gguf_find(gguf, key);
    size_t at = 0;

    if (!value || !value->is_array || value->type != GGUF_STRING)
        return fail_with(failure, "%s is no array of strings", key);
    *texts = malloc(((size_t)value->n + 1) * sizeof(**texts));
    if (!*texts)
        return fail_with(failure, "out of memory");
    for (*n = 0; gguf_next_text(value, &at, &(*texts)[*n]);)
        ++*n;
    return true;
}

static bool read_special(const struct gguf *gguf, size_t n_tokens, uint8_t **is_special,
                         struct failure *failure)
{
    const struct gguf_value *types = gguf_find(gguf, "tokenizer.ggml.token_type");

    *is_special = calloc(n_tokens + 1, 1);
    if (!*is_special)
        return fail_with(failure, "out of memory");
    if (!types)
        return true;
    if (!types->is_array || types->n != n_tokens)
        return fail_with(failure, "tokenizer.ggml.token_type does not fit the tokens");
    for (size_t i = 0; i < n_tokens; i++) {
        uint64_t type;
        (*is_special)[i] = gguf_element_u64(types, i, &type) &&
                           (type == TOKEN_CONTROL || type == TOKEN_USER_DEFINED);
    }
    return true;
}

bool tokenizer_from_gguf(const struct gguf *gguf, struct tokenizer **out, struct failure *failure)
{
    struct gguf_text *tokens = NULL, *merges = NULL;
    struct vocabulary v = {0};
    uint8_t *is_special = NULL;

    *out = NULL;
    bool ok = check_kind(gguf, "tokenizer.ggml.model", "gpt2", failure) &&
              check_kind(gguf, "tokenizer.ggml.pre", "smollm", failure) &&
              read_texts(gguf, "tokenizer.ggml.tokens", &tokens, &v.n_tokens, failure) &&
              read_texts(gguf, "tokenizer.ggml.merges", &merges, &v.n_merges, failure) &&
              read_special(gguf, v.n_tokens, &is_special, failure);
    if (ok) {
        v.tokens = tokens;
        v.merges = merges;
        v.is_special = is_special;
        ok = tokenizer_create(&v, out, failure);
    }
    free(is_special);
    free(merges);
    free(tokens);
    return ok;
}
