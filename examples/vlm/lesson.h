/* Training samples for train.py, which calls this as a shared library. */
#ifndef VLM_LESSON_H
#define VLM_LESSON_H

#include <stdint.h>

#include "picture.h"

/* A dialogue of images, each followed by @p n_tokens tokens of questions and answers: about it, or
 * in part about the one before if that is of the other kind (the newest picture of a kind is
 * meant). */
struct lesson_params {
    struct picture_params picture;
    int32_t n_images; /* 1 ... 4 */
    int32_t n_tokens; /* of each block */
    int32_t kinds[4]; /* a picture_kind each, or -1: drawn */
    float margin;     /* as questions_ask() */
    float looks_back; /* share of the questions about the picture before, where possible */
};

/*
 * Fills, with n = n_images, g = grid * grid cells, t = n_tokens:
 *   rgb      [n][14 grid][14 grid][3]
 *   labels   [n][N_LABELS][g]
 *   tokens   [n][t]     questions with answers and stops; WORD_PAD behind the last whole one
 *   targets  [n][t]     the token that follows where an answer or its stop does, else -100
 *   kinds    [n][t]     question_kind, -1 at pads
 *   ground   [n][t][n][g] of the tokens to the images, as question.h
 * Any of them may be NULL.
 */
void lesson_draw(uint64_t seed, const struct lesson_params *params, uint8_t *rgb, uint8_t *labels,
                 int32_t *tokens, int32_t *targets, int32_t *kinds, uint8_t *ground);

/* Sizes, for the other side: N_WORDS, N_LABELS, PATCH, MAX_GRID in this order. */
void lesson_sizes(int32_t sizes[4]);

#endif
