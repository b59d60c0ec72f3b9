/* Special tokens first; what is between them is merged. Byte-level BPE cuts it into pieces before:
 * valid UTF-8, then digits, then words. */
#include "tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "bpe.h"
#include "spm.h"
#include "utf8.h"

/* White_Space of Unicode; PCRE's own \s would add U+180E. */
#define SPACE "\\x09-\\x0d\\x{85}\\p{Z}"

struct tokenizer {
    struct gguf_text *texts; /* bytes of each token */
    size_t n_tokens;
    char *bytes;    /* what texts point to */
    uint8_t *kinds; /* of enum token_kind */
    int32_t bos;    /* or -1 */
    struct text_map specials;
    size_t longest_special[256]; /* of those that start with a byte */
    int32_t byte_ids[256];       /* token of each byte, or -1 */
    struct merge_map merges;
    struct bpe bpe;
    bool is_spm;
    struct text_map mergeable; /* SentencePiece */
    pcre2_code *digit, *word;  /* GPT-2 */
    pcre2_match_data *match;   /* GPT-2 */
};

static bool is_special(const struct tokenizer *t, size_t id)
{
    return t->kinds[id] == TOKEN_CONTROL || t->kinds[id] == TOKEN_DEFINED;
}

/* GPT-2 writes the bytes that are not printable in Latin-1 as the characters from U+0100 on. */
static bool is_printable(unsigned byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

static void character_table(uint32_t of_byte[256])
{
    uint32_t n = 0;

    for (unsigned b = 0; b < 256; b++)
        of_byte[b] = is_printable(b) ? b : 0x100 + n++;
}

/* The byte that a character stands for, or -1. */
static int byte_of(const uint32_t of_byte[256], uint32_t character)
{
    if (character < 256)
        return is_printable(character) ? (int)character : -1;
    for (int b = 0; b < 256; b++)
        if (of_byte[b] == character)
            return b;
    return -1;
}

/* The bytes behind a token's text; a text with other characters stands for itself. */
static size_t token_bytes(const uint32_t of_byte[256], struct gguf_text text, char *out)
{
    size_t n = 0;

    for (size_t at = 0; at < text.size;) {
        uint32_t character;
        const size_t used = utf8_decode(text.data + at, text.size - at, &character);
        const int byte = used > 0 ? byte_of(of_byte, character) : -1;
        if (byte < 0) {
            if (text.size > 0)
                memcpy(out, text.data, text.size);
            return text.size;
        }
        out[n++] = (char)(unsigned char)byte;
        at += used;
    }
    return n;
}

/* The bytes that a token stands for. */
static size_t bytes_of(const struct tokenizer *t, size_t id, const uint32_t of_byte[256],
                       struct gguf_text text, char *out)
{
    const int byte = t->kinds[id] == TOKEN_BYTE ? spm_byte_of(text) : -1;

    if (byte >= 0) {
        out[0] = (char)(unsigned char)byte;
        return 1;
    }
    if (t->kinds[id] == TOKEN_CONTROL || (t->kinds[id] == TOKEN_DEFINED && !t->is_spm)) {
        if (text.size > 0)
            memcpy(out, text.data, text.size);
        return text.size;
    }
    return t->is_spm ? spm_bytes(text, out) : token_bytes(of_byte, text, out);
}

static bool copy_tokens(struct tokenizer *t, const struct vocabulary *v,
                        const uint32_t of_byte[256])
{
    size_t size = 1, n = 0;

    for (size_t i = 0; i < v->n_tokens; i++)
        size += v->tokens[i].size;
    t->bytes = malloc(size);
    t->texts = malloc((v->n_tokens + 1) * sizeof(*t->texts));
    t->kinds = calloc(v->n_tokens + 1, 1);
    if (!t->bytes || !t->texts || !t->kinds)
        return false;
    t->n_tokens = v->n_tokens;
    if (v->kinds && v->n_tokens > 0)
        memcpy(t->kinds, v->kinds, v->n_tokens);
    for (size_t i = 0; i < v->n_tokens; i++) {
        t->texts[i].data = t->bytes + n;
        t->texts[i].size = bytes_of(t, i, of_byte, v->tokens[i], t->bytes + n);
        n += t->texts[i].size;
    }
    return true;
}

static bool map_specials(struct tokenizer *t)
{
    size_t n = 0;

    for (size_t i = 0; i < t->n_tokens; i++)
        n += is_special(t, i);
    if (!text_map_init(&t->specials, t->texts, n))
        return false;
    for (size_t i = 0; i < t->n_tokens; i++) {
        const struct gguf_text text = t->texts[i];
        if (!is_special(t, i) || text.size == 0)
            continue;
        text_map_insert(&t->specials, (int32_t)i);
        size_t *longest = &t->longest_special[(unsigned char)text.data[0]];
        *longest = text.size > *longest ? text.size : *longest;
    }
    return true;
}

static void find_byte_tokens(struct tokenizer *t, const struct text_map *ids,
                             const uint32_t of_byte[256])
{
    for (int b = 0; b < 256; b++) {
        const uint32_t c = of_byte[b];
        const char text[2] = {(char)(c < 0x80 ? c : 0xc0 | c >> 6), (char)(0x80 | (c & 0x3f))};
        t->byte_ids[b] = text_map_find(ids, text, c < 0x80 ? 1 : 2);
    }
}

/* "left right" to the tokens left, right and leftright; false if one of them is missing. */
static bool resolve_merge(const struct text_map *ids, struct gguf_text text, char *joined,
                          struct merge *out)
{
    const char *space = text.size > 1 ? memchr(text.data + 1, ' ', text.size - 1) : NULL;

    if (!space)
        return false;
    const size_t n_left = (size_t)(space - text.data), n_right = text.size - n_left - 1;
    memcpy(joined, text.data, n_left);
    memcpy(joined + n_left, space + 1, n_right);
    out->left = text_map_find(ids, text.data, n_left);
    out->right = text_map_find(ids, space + 1, n_right);
    out->result = text_map_find(ids, joined, n_left + n_right);
    return out->left >= 0 && out->right >= 0 && out->result >= 0;
}

static bool copy_merges(struct tokenizer *t, const struct vocabulary *v, const struct text_map *ids,
                        struct failure *failure)
{
    size_t longest = 1;
    bool ok = true;

    for (size_t i = 0; i < v->n_merges; i++)
        longest = v->merges[i].size > longest ? v->merges[i].size : longest;
    char *joined = malloc(longest);
    if (!joined || !merge_map_init(&t->merges, v->n_merges)) {
        free(joined);
        return fail_with(failure, "out of memory");
    }
    for (size_t i = 0; ok && i < v->n_merges; i++) {
        struct merge merge = {.rank = (int32_t)i};
        ok = resolve_merge(ids, v->merges[i], joined, &merge);
        if (ok)
            merge_map_insert(&t->merges, &merge);
        else
            fail_with(failure, "merge %zu of the vocabulary names a token that is not in it", i);
    }
    free(joined);
    return ok;
}

static pcre2_code *compile(const char *pattern)
{
    int error;
    PCRE2_SIZE offset;
    pcre2_code *code =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF, &error, &offset, NULL);

    if (code)
        pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); /* without it, matching is only slower */
    return code;
}

static bool compile_patterns(struct tokenizer *t)
{
    t->digit = compile("\\p{N}");
    t->word = compile("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" SPACE "\\p{L}\\p{N}]+"
                      "|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+");
    t->match = t->word ? pcre2_match_data_create_from_pattern(t->word, NULL) : NULL;
    return t->digit && t->match;
}

static bool fill_gpt2(struct tokenizer *t, const struct vocabulary *v, const uint32_t of_byte[256],
                      struct failure *failure)
{
    struct text_map ids;

    if (!compile_patterns(t) || !text_map_init(&ids, v->tokens, v->n_tokens))
        return fail_with(failure, "out of memory");
    for (size_t i = 0; i < v->n_tokens; i++)
        text_map_insert(&ids, (int32_t)i);
    find_byte_tokens(t, &ids, of_byte);
    const bool ok = copy_merges(t, v, &ids, failure);
    text_map_free(&ids);
    return ok;
}

static bool fill_spm(struct tokenizer *t, const struct vocabulary *v, struct failure *failure)
{
    if (!text_map_init(&t->mergeable, t->texts, t->n_tokens))
        return fail_with(failure, "out of memory");
    for (int b = 0; b < 256; b++)
        t->byte_ids[b] = -1;
    for (size_t i = t->n_tokens; i-- > 0;)
        if (t->kinds[i] == TOKEN_BYTE && t->texts[i].size == 1)
            t->byte_ids[(unsigned char)t->texts[i].data[0]] = (int32_t)i;
    for (size_t i = 0; i < t->n_tokens; i++)
        if (t->kinds[i] == TOKEN_TEXT)
            text_map_insert(&t->mergeable, (int32_t)i);
    return spm_find_merges(&t->mergeable, t->n_tokens, v->scores, &t->merges) ||
           fail_with(failure, "out of memory");
}

static bool fill(struct tokenizer *t, const struct vocabulary *v, struct failure *failure)
{
    uint32_t of_byte[256];

    character_table(of_byte);
    t->is_spm = v->scores;
    t->bos = v->has_bos ? v->bos : -1;
    if (v->has_bos && (v->bos < 0 || (size_t)v->bos >= v->n_tokens))
        return fail_with(failure, "the token that begins a text is not in the vocabulary");
    if (!copy_tokens(t, v, of_byte) || !map_specials(t))
        return fail_with(failure, "out of memory");
    return t->is_spm ? fill_spm(t, v, failure) : fill_gpt2(t, v, of_byte, failure);
}

bool tokenizer_create(const struct vocabulary *vocabulary, struct tokenizer **out,
                      struct failure *failure)
{
    *out = NULL;
    if (vocabulary->n_tokens > INT32_MAX / 4 || vocabulary->n_merges > INT32_MAX / 4)
        return fail_with(failure, "the vocabulary is too large");
    struct tokenizer *t = calloc(1, sizeof(*t));
    if (!t)
        return fail_with(failure, "out of memory");
    if (!fill(t, vocabulary, failure)) {
        tokenizer_destroy(t);
        return false;
    }
    *out = t;
    return true;
}

void tokenizer_destroy(struct tokenizer *t)
{
    if (!t)
        return;
    bpe_free(&t->bpe);
    pcre2_match_data_free(t->match);
    pcre2_code_free(t->word);
    pcre2_code_free(t->digit);
    merge_map_free(&t->merges);
    text_map_free(&t->mergeable);
    text_map_free(&t->specials);
    free(t->kinds);
    free(t->texts);
    free(t->bytes);
    free(t);
}

size_t tokenizer_n_tokens(const struct tokenizer *t)
{
    return t->n_tokens;
}

struct gguf_text tokenizer_text(const struct tokenizer *t, int32_t id)
{
    return id < 0 || (size_t)id >= t->n_tokens ? (struct gguf_text){"", 0} : t->texts[id];
}

int32_t tokenizer_special(const struct tokenizer *t, const char *text)
{
    return text_map_find(&t->specials, text, strlen(text));
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
    return t->bos;
}

/* One call of tokenizer_encode(). */
struct encoding {
    struct tokenizer *t;
    const char *text; /* its start: offsets in messages count from here */
    struct token_list *list;
    struct failure *failure;
};

static bool make_room(const struct encoding *e, size_t n)
{
    struct token_list *list = e->list;

    if (n <= list->capacity - list->n)
        return true;
    size_t capacity = list->capacity ? list->capacity : 256;
    while (capacity - list->n < n)
        capacity *= 2;
    int32_t *ids = realloc(list->ids, capacity * sizeof(*ids));
    if (!ids)
        return fail_with(e->failure, "out of memory");
    list->ids = ids;
    list->capacity = capacity;
    return true;
}

/* A token for each byte, as spm_characters(). */
static size_t byte_tokens(const struct tokenizer *t, const char *text, size_t size, int32_t *ids,
                          size_t *used)
{
    for (*used = 0; *used < size; ++*used) {
        ids[*used] = t->byte_ids[(unsigned char)text[*used]];
        if (ids[*used] < 0)
            break;
    }
    return *used;
}

/* Merges one piece at the end of the list. */
static bool add_piece(const struct encoding *e, const char *piece, size_t size)
{
    const struct tokenizer *t = e->t;
    size_t used;

    if (!make_room(e, size))
        return false;
    int32_t *ids = e->list->ids + e->list->n;
    const size_t n_ids = t->is_spm
                             ? spm_characters(&t->mergeable, t->byte_ids, piece, size, ids, &used)
                             : byte_tokens(t, piece, size, ids, &used);
    if (used < size)
        return fail_with(e->failure, "the vocabulary has no token for byte 0x%02x at offset %zu",
                         (unsigned char)piece[used], (size_t)(piece - e->text) + used);
    const size_t n = bpe_merge(&e->t->bpe, &t->merges, ids, n_ids);
    if (n == SIZE_MAX)
        return fail_with(e->failure, "out of memory");
    e->list->n += n;
    return true;
}

/* First match at or after @p from; its range is the end of the text if there is none. */
static bool next_match(const struct encoding *e, const pcre2_code *code, const char *text,
                       size_t size, size_t from, size_t *first, size_t *last)
{
    const int n =
        pcre2_match(code, (PCRE2_SPTR)text, size, from, PCRE2_NO_UTF_CHECK, e->t->match, NULL);
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(e->t->match);

    *first = n < 0 ? size : range[0];
    *last = n < 0 ? size : range[1];
    if (n < 0 && n != PCRE2_ERROR_NOMATCH)
        return fail_with(e->failure, "the text cannot be split into words (PCRE2 error %d)", n);
    return true;
}

/* Text without digits. The pattern leaves no gap: a character is a letter, a space or neither. */
static bool add_words(const struct encoding *e, const char *text, size_t size)
{
    size_t first, last;

    for (size_t at = 0; at < size; at = last)
        if (!next_match(e, e->t->word, text, size, at, &first, &last) ||
            !add_piece(e, text + at, last - at))
            return false;
    return true;
}

/* Valid UTF-8: each digit is a piece. */
static bool add_valid(const struct encoding *e, const char *text, size_t size)
{
    size_t first, last;

    for (size_t at = 0; at < size; at = last)
        if (!next_match(e, e->t->digit, text, size, at, &first, &last) ||
            !add_words(e, text + at, first - at) || !add_piece(e, text + first, last - first))
            return false;
    return true;
}

/* Any bytes, without special tokens. */
static bool add_bytes(const struct encoding *e, const char *text, size_t size)
{
    uint32_t character;

    if (e->t->is_spm)
        return add_piece(e, text, size);
    for (size_t at = 0; at < size;) {
        size_t end = at, used;
        while ((used = utf8_decode(text + end, size - end, &character)) > 0)
            end += used;
        if (!add_valid(e, text + at, end - at))
            return false;
        if (end < size && !add_piece(e, text + end, 1))
            return false;
        at = end + 1;
    }
    return true;
}

/* The longest special token at the start of the text, or -1. */
static int32_t special_at(const struct tokenizer *t, const char *text, size_t size,
                          bool parse_special)
{
    const size_t longest = t->longest_special[(unsigned char)text[0]];

    for (size_t n = longest < size ? longest : size; n > 0; n--) {
        const int32_t id = text_map_find(&t->specials, text, n);
        if (id >= 0 && (parse_special || (t->is_spm && t->kinds[id] == TOKEN_DEFINED)))
            return id;
    }
    return -1;
}

bool tokenizer_encode(struct tokenizer *t, const char *text, size_t size, bool parse_special,
                      struct token_list *list, struct failure *failure)
{
    const struct encoding e = {t, text, list, failure};
    size_t start = 0;

    for (size_t at = 0; (parse_special || t->is_spm) && at < size;) {
        const int32_t special = special_at(t, text + at, size - at, parse_special);
        if (special < 0) {
            at++;
            continue;
        }
        if (!add_bytes(&e, text + start, at - start) || !make_room(&e, 1))
            return false;
        list->ids[list->n++] = special;
        at += t->texts[special].size;
        start = at;
    }
    return add_bytes(&e, text + start, size - start);
}
