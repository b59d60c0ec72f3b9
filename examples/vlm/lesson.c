/* Puts pictures and questions together to training samples. */
#include "lesson.h"

#include <string.h>

#include "question.h"
#include "random.h"

enum { DECK = 24, NO_TARGET = -100, ALL_KINDS = (1 << N_QUESTION_KINDS) - 1 };

/* Purposes of the seed of a lesson, beside the numbers of its pictures. */
enum { FOR_KINDS = 100, FOR_QUESTIONS = 200 };

/* The questions about a picture, dealt one by one; then again in a new order. */
struct deck {
    const struct picture *picture;
    float margin;
    int n, next;
    struct question questions[DECK];
};

static const struct question *deal(struct deck *deck, struct draws *draws)
{
    if (deck->next == deck->n) {
        deck->n = questions_ask(draw_bits(draws), deck->picture, ALL_KINDS, deck->margin,
                                deck->questions, DECK);
        deck->next = 0;
    }
    return deck->n > 0 ? &deck->questions[deck->next++] : NULL;
}

/* Where a block of tokens is written; n_images and image say which cells of ground are meant. */
struct block {
    int32_t *tokens, *targets, *kinds;
    uint8_t *ground; /* [n_tokens][n_images][n_cells] */
    size_t n_images, n_cells;
    int n_tokens, n; /* n: written */
};

static void write_question(const struct question *question, int image, struct block *block)
{
    const int n_words = question->n_words, n = n_words + question->n_answer;

    for (int i = 0; i < n; i++) {
        const int at = block->n + i;
        const int next = i + 1 - n_words;

        if (block->tokens != NULL)
            block->tokens[at] = i < n_words ? question->words[i] : question->answer[i - n_words];
        if (block->targets != NULL && next >= 0 && next < question->n_answer)
            block->targets[at] = question->answer[next];
        if (block->kinds != NULL)
            block->kinds[at] = (int32_t)question->kind;
        if (block->ground != NULL)
            memcpy(block->ground + ((size_t)at * block->n_images + (size_t)image) * block->n_cells,
                   question->ground[i], block->n_cells);
    }
    block->n += n;
}

static void clear_block(struct block *block)
{
    for (int i = 0; i < block->n_tokens; i++) {
        if (block->tokens != NULL)
            block->tokens[i] = WORD_PAD;
        if (block->targets != NULL)
            block->targets[i] = NO_TARGET;
        if (block->kinds != NULL)
            block->kinds[i] = -1;
    }
    if (block->ground != NULL)
        memset(block->ground, 0, (size_t)block->n_tokens * block->n_images * block->n_cells);
}

/* before: NULL if nothing can be asked about it. */
static void fill_block(struct draws *draws, int image, struct deck *now, struct deck *before,
                       float looks_back, struct block *block)
{
    clear_block(block);
    for (;;) {
        const int is_back = before != NULL && draw_between(draws, 0.0f, 1.0f) < looks_back;
        const struct question *question = deal(is_back ? before : now, draws);

        if (question == NULL || question->n_words + question->n_answer > block->n_tokens - block->n)
            return;
        write_question(question, image - is_back, block);
    }
}

void lesson_draw(uint64_t seed, const struct lesson_params *params, uint8_t *rgb, uint8_t *labels,
                 int32_t *tokens, int32_t *targets, int32_t *kinds, uint8_t *ground)
{
    const int n = params->n_images;
    const size_t grid = (size_t)params->picture.grid, n_cells = grid * grid;
    const size_t n_pixels = n_cells * PATCH * PATCH;
    struct draws kind_draws = draws_of(seed, FOR_KINDS);
    struct draws draws = draws_of(seed, FOR_QUESTIONS);
    struct picture pictures[2];
    struct deck decks[2];

    for (int i = 0; i < n; i++) {
        const size_t at = (size_t)i * (size_t)params->n_tokens;
        const int drawn = draw_below(&kind_draws, 100) < 45 ? PICTURE_SCREEN : PICTURE_SCENE;
        const int kind = params->kinds[i] < 0 ? drawn : params->kinds[i];
        struct picture *picture = &pictures[i % 2];
        struct deck *now = &decks[i % 2], *before = &decks[(i + 1) % 2];
        struct draws picture_seed = draws_of(seed, (uint64_t)i);

        picture_draw(draw_bits(&picture_seed), (enum picture_kind)kind, &params->picture, picture);
        now->picture = picture;
        now->margin = params->margin;
        now->n = now->next = 0;
        if (i == 0 || before->picture->kind == picture->kind)
            before = NULL;
        if (rgb != NULL)
            memcpy(rgb + (size_t)i * n_pixels * 3, picture->rgb, n_pixels * 3);
        for (size_t k = 0; labels != NULL && k < N_LABELS; k++)
            memcpy(labels + ((size_t)i * N_LABELS + k) * n_cells, picture->labels[k], n_cells);

        struct block block = {
            .tokens = tokens == NULL ? NULL : tokens + at,
            .targets = targets == NULL ? NULL : targets + at,
            .kinds = kinds == NULL ? NULL : kinds + at,
            .ground = ground == NULL ? NULL : ground + at * (size_t)n * n_cells,
            .n_tokens = params->n_tokens,
            .n_images = (size_t)n,
            .n_cells = n_cells,
        };
        fill_block(&draws, i, now, before, params->looks_back, &block);
    }
}

void lesson_sizes(int32_t sizes[4])
{
    sizes[0] = N_WORDS;
    sizes[1] = N_LABELS;
    sizes[2] = PATCH;
    sizes[3] = MAX_GRID;
}
