/* The words of the small vision-language model: a token each. */
#ifndef VLM_WORDS_H
#define VLM_WORDS_H

#include <stddef.h>
#include <stdint.h>

enum {
    N_SHAPES = 6,
    N_COLOURS = 8,
    N_NUMBERS = 10,
    N_SIDES = 4,
    N_GLYPHS = 32, /* letters and digits of codes, without 0, O, 1 and I */
    N_FIELDS = 12, /* names of fields: A ... M without I */
};

/* Fixed tokens; the groups of words follow each other. */
enum {
    WORD_PAD,
    WORD_BOS,
    WORD_IMAGE, /* stands before the patches of an image */
    WORD_STOP,  /* ends an answer */
    WORD_QUESTION,
    WORD_WHAT,
    WORD_COLOUR,
    WORD_SHAPE,
    WORD_HOW,
    WORD_MANY,
    WORD_OBJECTS,
    WORD_READ,
    WORD_FIELD,
    WORD_WHERE,
    WORD_FROM,
    WORD_OF_COLOUR,                             /* red, green, ... */
    WORD_OF_SHAPE = WORD_OF_COLOUR + N_COLOURS, /* circle, square, ... */
    WORD_OF_NUMBER = WORD_OF_SHAPE + N_SHAPES,  /* n0 ... n9 */
    WORD_OF_SIDE = WORD_OF_NUMBER + N_NUMBERS,  /* left, right, above, below */
    WORD_OF_GLYPH = WORD_OF_SIDE + N_SIDES,     /* A, B, ... 9 as read in a picture */
    WORD_OF_FIELD = WORD_OF_GLYPH + N_GLYPHS,   /* the name of a field */
    N_WORDS = WORD_OF_FIELD + N_FIELDS
};

/* How a token is written; numbers as digits. Never NULL. */
const char *word_text(int32_t word);

/*
 * The tokens of a question as people write it ("what color is the circle?", "read field K"): words
 * in any case, "color" or "colour"; articles and "is" are left out; the letter after "field" is a
 * name. Returns their number, the last one WORD_QUESTION, or 0 if a word is unknown, or more than
 * @p max; *unknown then points at the word in @p text.
 */
size_t words_of(const char *text, int32_t *words, size_t max, const char **unknown);

#endif
