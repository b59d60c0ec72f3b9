/* Questions about pictures, with their answers and the patches that hold them. */
#ifndef VLM_QUESTION_H
#define VLM_QUESTION_H

#include <stdbool.h>

#include "picture.h"

enum question_kind {
    QUESTION_COLOUR,  /* what color circle ? */
    QUESTION_SHAPE,   /* what shape red ? */
    QUESTION_COUNT,   /* how many objects ? how many circle ? */
    QUESTION_SPATIAL, /* where red from blue ? */
    QUESTION_READ,    /* read field K ? */
    N_QUESTION_KINDS
};

enum { MAX_QUESTION = 6, MAX_ANSWER = CODE_LENGTH + 1 };

struct question {
    enum question_kind kind;
    int n_words, n_answer;
    int32_t words[MAX_QUESTION]; /* the last is WORD_QUESTION */
    int32_t answer[MAX_ANSWER];  /* the last is WORD_STOP */
    /*
     * The patches that a token should look at: [i] of words[i], then of answer[i - n_words] for the
     * tokens that predict; bit 0 and bit 1 are the KV heads that should. All 0: nothing in
     * particular. Of spatial questions, the last word looks at the one thing with head 0, at the
     * other with head 1.
     */
    uint8_t ground[MAX_QUESTION + MAX_ANSWER][MAX_CELLS];
};

/*
 * Asks up to @p max questions, none twice, in an order that follows from the seed; their number is
 * returned. kinds: a bit (1 << kind) for each that may be asked. Colours are asked of shapes that a
 * picture has once; the axis of a spatial question is @p margin times as long as the other.
 */
int questions_ask(uint64_t seed, const struct picture *picture, unsigned kinds, float margin,
                  struct question *out, int max);

/* Whether no patch is looked at by both, with two cells between them. */
bool questions_apart(const struct question *a, const struct question *b, int grid);

#endif
