/* The tokenizer of a GGUF file. */
#include <stdlib.h>

#include "tokenizer.h"

/* What is read for struct vocabulary, to be freed. */
struct arrays {
    struct gguf_text *tokens, *merges;
    uint8_t *kinds;
    float *scores;
};

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

/* A value of tokenizer.ggml.token_type. */
static enum token_kind kind_of(uint64_t type)
{
    static const enum token_kind kinds[] = {
        [1] = TOKEN_TEXT,    [2] = TOKEN_CONTROL, /* unknown */
        [3] = TOKEN_CONTROL, [4] = TOKEN_DEFINED, [5] = TOKEN_UNUSED, [6] = TOKEN_BYTE};

    return type < sizeof(kinds) / sizeof(*kinds) ? kinds[type] : TOKEN_TEXT;
}

static bool read_kinds(const struct gguf *gguf, size_t n_tokens, uint8_t **kinds,
                       struct failure *failure)
{
    const struct gguf_value *types = gguf_find(gguf, "tokenizer.ggml.token_type");
    uint64_t type;

    *kinds = calloc(n_tokens + 1, 1);
    if (!*kinds)
        return fail_with(failure, "out of memory");
    if (!types)
        return true;
    if (!types->is_array || types->n != n_tokens)
        return fail_with(failure, "tokenizer.ggml.token_type does not fit the tokens");
    for (size_t i = 0; i < n_tokens; i++)
        (*kinds)[i] = gguf_element_u64(types, i, &type) ? (uint8_t)kind_of(type) : TOKEN_TEXT;
    return true;
}

static bool read_scores(const struct gguf *gguf, size_t n_tokens, float **scores,
                        struct failure *failure)
{
    const struct gguf_value *value = gguf_find(gguf, "tokenizer.ggml.scores");

    *scores = malloc((n_tokens + 1) * sizeof(**scores));
    if (!*scores)
        return fail_with(failure, "out of memory");
    if (!value || value->n != n_tokens)
        return fail_with(failure, "tokenizer.ggml.scores does not fit the tokens");
    for (size_t i = 0; i < n_tokens; i++)
        if (!gguf_element_f32(value, i, &(*scores)[i]))
            return fail_with(failure, "tokenizer.ggml.scores is no array of floats");
    return true;
}

static bool read_bos(const struct gguf *gguf, struct vocabulary *v, struct failure *failure)
{
    uint64_t add, bos;

    if (!gguf_to_u64(gguf_find(gguf, "tokenizer.ggml.add_bos_token"), &add) || add == 0)
        return true;
    if (!gguf_to_u64(gguf_find(gguf, "tokenizer.ggml.bos_token_id"), &bos) || bos > INT32_MAX)
        return fail_with(failure, "tokenizer.ggml.bos_token_id is no token");
    v->has_bos = true;
    v->bos = (int32_t)bos;
    return true;
}

static bool read_gpt2(const struct gguf *gguf, struct arrays *a, struct vocabulary *v,
                      struct failure *failure)
{
    return check_kind(gguf, "tokenizer.ggml.pre", "smollm", failure) &&
           read_texts(gguf, "tokenizer.ggml.merges", &a->merges, &v->n_merges, failure);
}

/* Only texts that do not begin with a space of their own. */
static bool read_spm(const struct gguf *gguf, struct arrays *a, struct vocabulary *v,
                     struct failure *failure)
{
    uint64_t add;

    if (!gguf_to_u64(gguf_find(gguf, "tokenizer.ggml.add_space_prefix"), &add) || add != 0)
        return fail_with(failure, "tokenizer.ggml.add_space_prefix is not false, the only value "
                                  "supported");
    return read_scores(gguf, v->n_tokens, &a->scores, failure);
}

static bool read_all(const struct gguf *gguf, struct arrays *a, struct vocabulary *v,
                     struct failure *failure)
{
    struct gguf_text model;

    if (!gguf_to_text(gguf_find(gguf, "tokenizer.ggml.model"), &model))
        return fail_with(failure, "tokenizer.ggml.model is missing");
    const bool is_spm = gguf_text_is(model, "llama");
    if (!is_spm && !gguf_text_is(model, "gpt2"))
        return fail_with(failure,
                         "tokenizer.ggml.model is not \"gpt2\" or \"llama\", the only ones "
                         "supported");
    if (!read_texts(gguf, "tokenizer.ggml.tokens", &a->tokens, &v->n_tokens, failure) ||
        !read_kinds(gguf, v->n_tokens, &a->kinds, failure) ||
        !(is_spm ? read_spm : read_gpt2)(gguf, a, v, failure) || !read_bos(gguf, v, failure))
        return false;
    v->tokens = a->tokens;
    v->merges = a->merges;
    v->kinds = a->kinds;
    v->scores = a->scores;
    return true;
}

bool tokenizer_from_gguf(const struct gguf *gguf, struct tokenizer **out, struct failure *failure)
{
    struct arrays arrays = {0};
    struct vocabulary v = {0};

    *out = NULL;
    const bool ok = read_all(gguf, &arrays, &v, failure) && tokenizer_create(&v, out, failure);
    free(arrays.scores);
    free(arrays.kinds);
    free(arrays.merges);
    free(arrays.tokens);
    return ok;
}
