/* The words: how they are written and found. */
#include "words.h"

#include <stdbool.h>
#include <string.h>

static const char *const texts[WORD_OF_GLYPH] = {
    "<pad>",  "<bos>",   "<image>", "<stop>", "?",     "what",   "color",  "shape",    "how",
    "many",   "objects", "read",    "field",  "where", "from",   "red",    "green",    "blue",
    "yellow", "purple",  "cyan",    "black",  "white", "circle", "square", "triangle", "diamond",
    "plus",   "ring",    "0",       "1",      "2",     "3",      "4",      "5",        "6",
    "7",      "8",       "9",       "left",   "right", "above",  "below",
};

static const char glyph_texts[N_GLYPHS][2] = {
    "A", "B", "C", "D", "E", "F", "G", "H", "J", "K", "L", "M", "N", "P", "Q", "R",
    "S", "T", "U", "V", "W", "X", "Y", "Z", "2", "3", "4", "5", "6", "7", "8", "9",
};

const char *word_text(int32_t word)
{
    if (word < 0 || word >= N_WORDS)
        return "";
    if (word >= WORD_OF_FIELD)
        return glyph_texts[word - WORD_OF_FIELD];
    return word >= WORD_OF_GLYPH ? glyph_texts[word - WORD_OF_GLYPH] : texts[word];
}

static int lower(int c)
{
    return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c;
}

static bool is_gap(char c)
{
    return c != '\0' && strchr(" \t\r\n?.,!", c) != NULL;
}

static bool equals(const char *text, size_t n, const char *word)
{
    if (strlen(word) != n)
        return false;
    for (size_t i = 0; i < n; i++) {
        if (lower(text[i]) != word[i])
            return false;
    }
    return true;
}

static bool is_left_out(const char *text, size_t n)
{
    static const char *const left_out[] = {"a", "an", "the", "is", "are", "there"};

    for (size_t i = 0; i < sizeof(left_out) / sizeof(*left_out); i++) {
        if (equals(text, n, left_out[i]))
            return true;
    }
    return false;
}

/* -1: unknown. What only pictures and answers hold is not asked with. */
static int32_t find_word(const char *text, size_t n)
{
    if (equals(text, n, "colour"))
        return WORD_COLOUR;
    for (int32_t word = WORD_WHAT; word < WORD_OF_NUMBER; word++) {
        if (equals(text, n, texts[word]))
            return word;
    }
    /* circles, rings, ... */
    if (n > 1 && lower(text[n - 1]) == 's') {
        for (int32_t word = WORD_OF_SHAPE; word < WORD_OF_NUMBER; word++) {
            if (equals(text, n - 1, texts[word]))
                return word;
        }
    }
    return -1;
}

static int32_t find_field(const char *text, size_t n)
{
    for (int32_t field = 0; n == 1 && field < N_FIELDS; field++) {
        if (lower(*text) == lower(*glyph_texts[field]))
            return WORD_OF_FIELD + field;
    }
    return -1;
}

size_t words_of(const char *text, int32_t *words, size_t max, const char **unknown)
{
    size_t count = 0;

    while (is_gap(*text))
        text++;
    while (*text != '\0') {
        size_t n = 0;

        while (text[n] != '\0' && !is_gap(text[n]))
            n++;
        const bool is_name = count > 0 && words[count - 1] == WORD_FIELD;
        if (is_name || !is_left_out(text, n)) {
            const int32_t word = is_name ? find_field(text, n) : find_word(text, n);

            if (word < 0 || count == max) {
                *unknown = text;
                return 0;
            }
            words[count++] = word;
        }
        text += n;
        while (is_gap(*text))
            text++;
    }
    if (count == 0 || count == max) {
        *unknown = text;
        return 0;
    }
    words[count++] = WORD_QUESTION;
    return count;
}
