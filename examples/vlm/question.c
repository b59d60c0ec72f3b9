/* What can be asked about a picture, from its facts. */
#include "question.h"

#include <math.h>
#include <string.h>

#include "random.h"

enum {
    MAX_PAIRS = MAX_THINGS * (MAX_THINGS - 1),
    BOTH_HEADS = 3,
    SUBJECT_HEAD = 1,
    REFERENCE_HEAD = 2,
    ALL_OBJECTS = -1
};

/* How often each kind is asked where several may be: the harder more often. */
static const int shares[N_QUESTION_KINDS] = {
    [QUESTION_COLOUR] = 16,  [QUESTION_SHAPE] = 14, [QUESTION_COUNT] = 10,
    [QUESTION_SPATIAL] = 60, [QUESTION_READ] = 100,
};

/* What is still to be asked of one kind, the next one last: things, shapes, pairs or fields. */
struct stack {
    int n, items[MAX_PAIRS];
};

static void push(struct stack *stack, int item)
{
    stack->items[stack->n++] = item;
}

static int count_shape(const struct picture *picture, int shape)
{
    int n = 0;

    for (int i = 0; i < picture->n_things; i++)
        n += picture->things[i].shape == shape;
    return n;
}

static void stack_colours(const struct picture *picture, struct stack *out)
{
    for (int i = 0; i < picture->n_things; i++) {
        if (count_shape(picture, picture->things[i].shape) == 1)
            push(out, i);
    }
}

/* Of the shapes that are asked for, about three in ten are absent. */
static void stack_counts(struct draws *draws, const struct picture *picture, struct stack *out)
{
    int present[N_SHAPES], absent[N_SHAPES], n_present = 0, n_absent = 0;

    for (int shape = 0; shape < N_SHAPES; shape++) {
        if (count_shape(picture, shape) > 0)
            present[n_present++] = shape;
        else
            absent[n_absent++] = shape;
    }
    draw_order(draws, absent, n_absent);
    const int wanted = (int)((float)n_present * (3.0f / 7.0f) + draw_between(draws, 0.0f, 1.0f));
    for (int i = 0; i < n_present; i++)
        push(out, present[i]);
    for (int i = 0; i < n_absent && i < wanted; i++)
        push(out, absent[i]);
    draw_order(draws, out->items, out->n);

    /* The question about all is next with 0.6, else the one after it, ... */
    int place = out->n;
    while (place > 0 && draw_below(draws, 5) >= 3)
        place--;
    push(out, ALL_OBJECTS);
    out->items[out->n - 1] = out->items[place];
    out->items[place] = ALL_OBJECTS;
}

static void stack_pairs(const struct picture *picture, float margin, struct stack *out)
{
    for (int a = 0; a < picture->n_things; a++) {
        for (int b = 0; b < picture->n_things; b++) {
            const float x = fabsf(picture->things[a].x - picture->things[b].x);
            const float y = fabsf(picture->things[a].y - picture->things[b].y);

            if (a != b && (x > y ? x >= margin * y : y > x && y >= margin * x))
                push(out, a * MAX_THINGS + b);
        }
    }
}

static void stack_all(int n, struct stack *out)
{
    for (int i = 0; i < n; i++)
        push(out, i);
}

static void ground_thing(const struct picture *picture, int thing, uint8_t heads, uint8_t *ground)
{
    for (int cell = 0; cell < picture->grid * picture->grid; cell++) {
        if (picture->owner[cell] == 1 + thing)
            ground[cell] |= heads;
    }
}

static void set_words(struct question *out, int n, const int32_t *words, int32_t answer)
{
    out->n_words = n;
    memcpy(out->words, words, (size_t)n * sizeof(*words));
    out->n_answer = 2;
    out->answer[0] = answer;
    out->answer[1] = WORD_STOP;
}

static void ask_colour(const struct picture *picture, int item, struct question *out)
{
    const struct thing *thing = &picture->things[item];
    const int32_t words[] = {WORD_WHAT, WORD_COLOUR, WORD_OF_SHAPE + thing->shape, WORD_QUESTION};

    set_words(out, 4, words, WORD_OF_COLOUR + thing->colour);
    ground_thing(picture, item, BOTH_HEADS, out->ground[2]);
    ground_thing(picture, item, BOTH_HEADS, out->ground[3]);
}

static void ask_shape(const struct picture *picture, int item, struct question *out)
{
    const struct thing *thing = &picture->things[item];
    const int32_t words[] = {WORD_WHAT, WORD_SHAPE, WORD_OF_COLOUR + thing->colour, WORD_QUESTION};

    set_words(out, 4, words, WORD_OF_SHAPE + thing->shape);
    ground_thing(picture, item, BOTH_HEADS, out->ground[2]);
    ground_thing(picture, item, BOTH_HEADS, out->ground[3]);
}

static void ask_count(const struct picture *picture, int shape, struct question *out)
{
    const int is_all = shape == ALL_OBJECTS;
    const int n = is_all ? picture->n_things : count_shape(picture, shape);
    const int32_t words[] = {WORD_HOW, WORD_MANY, is_all ? WORD_OBJECTS : WORD_OF_SHAPE + shape,
                             WORD_QUESTION};

    set_words(out, 4, words, WORD_OF_NUMBER + n);
    for (int i = 0; i < picture->n_things; i++) {
        if (is_all || picture->things[i].shape == shape) {
            ground_thing(picture, i, BOTH_HEADS, out->ground[2]);
            ground_thing(picture, i, BOTH_HEADS, out->ground[3]);
        }
    }
}

static void ask_spatial(const struct picture *picture, int item, struct question *out)
{
    enum { LEFT, RIGHT, ABOVE, BELOW };
    const int a = item / MAX_THINGS, b = item % MAX_THINGS;
    const struct thing *subject = &picture->things[a], *reference = &picture->things[b];
    const float dx = subject->x - reference->x, dy = subject->y - reference->y;
    const int side = fabsf(dx) > fabsf(dy) ? (dx < 0.0f ? LEFT : RIGHT) : dy < 0.0f ? ABOVE : BELOW;
    const int32_t words[] = {WORD_WHERE, WORD_OF_COLOUR + subject->colour, WORD_FROM,
                             WORD_OF_COLOUR + reference->colour, WORD_QUESTION};

    set_words(out, 5, words, WORD_OF_SIDE + side);
    ground_thing(picture, a, BOTH_HEADS, out->ground[1]);
    ground_thing(picture, b, BOTH_HEADS, out->ground[3]);
    ground_thing(picture, a, SUBJECT_HEAD, out->ground[4]);
    ground_thing(picture, b, REFERENCE_HEAD, out->ground[4]);
}

static void ask_read(const struct picture *picture, int item, struct question *out)
{
    const struct field *field = &picture->fields[item];
    const int32_t words[] = {WORD_READ, WORD_FIELD, WORD_OF_FIELD + field->name, WORD_QUESTION};

    set_words(out, 4, words, WORD_STOP);
    out->n_answer = CODE_LENGTH + 1;
    for (int i = 0; i < CODE_LENGTH; i++) {
        out->answer[i] = WORD_OF_GLYPH + field->code[i];
        out->ground[3 + i][field->row * picture->grid + field->col + 1 + i] = BOTH_HEADS;
    }
    out->answer[CODE_LENGTH] = WORD_STOP;
}

static void ask(const struct picture *picture, enum question_kind kind, int item,
                struct question *out)
{
    memset(out, 0, sizeof(*out));
    out->kind = kind;
    switch (kind) {
    case QUESTION_COLOUR: ask_colour(picture, item, out); break;
    case QUESTION_SHAPE: ask_shape(picture, item, out); break;
    case QUESTION_COUNT: ask_count(picture, item, out); break;
    case QUESTION_SPATIAL: ask_spatial(picture, item, out); break;
    default: ask_read(picture, item, out); break;
    }
}

static void stack_kind(struct draws *draws, const struct picture *picture, int kind, float margin,
                       struct stack *out)
{
    const int is_scene = picture->kind == PICTURE_SCENE;

    out->n = 0;
    if (is_scene != (kind != QUESTION_READ))
        return;
    switch (kind) {
    case QUESTION_COLOUR: stack_colours(picture, out); break;
    case QUESTION_SHAPE: stack_all(picture->n_things, out); break;
    case QUESTION_COUNT: stack_counts(draws, picture, out); return;
    case QUESTION_SPATIAL: stack_pairs(picture, margin, out); break;
    default: stack_all(picture->n_fields, out); break;
    }
    draw_order(draws, out->items, out->n);
}

int questions_ask(uint64_t seed, const struct picture *picture, unsigned kinds, float margin,
                  struct question *out, int max)
{
    struct draws draws = draws_of(seed, N_QUESTION_KINDS);
    struct stack stacks[N_QUESTION_KINDS];

    for (int kind = 0; kind < N_QUESTION_KINDS; kind++) {
        stacks[kind].n = 0;
        if (kinds >> kind & 1)
            stack_kind(&draws, picture, kind, margin, &stacks[kind]);
    }
    for (int n = 0; n < max; n++) {
        int total = 0, kind = 0;

        for (int i = 0; i < N_QUESTION_KINDS; i++)
            total += stacks[i].n > 0 ? shares[i] : 0;
        if (total == 0)
            return n;
        for (int left = draw_below(&draws, total);; kind++) {
            const int share = stacks[kind].n > 0 ? shares[kind] : 0;

            if (left < share)
                break;
            left -= share;
        }
        struct stack *stack = &stacks[kind];
        ask(picture, (enum question_kind)kind, stack->items[--stack->n], &out[n]);
    }
    return max;
}

static void cells_of(const struct question *question, int n_cells, uint8_t *cells)
{
    memset(cells, 0, (size_t)n_cells);
    for (int i = 0; i < question->n_words + question->n_answer; i++) {
        for (int cell = 0; cell < n_cells; cell++)
            cells[cell] |= question->ground[i][cell];
    }
}

bool questions_apart(const struct question *a, const struct question *b, int grid)
{
    enum { APART = 2 };
    uint8_t first[MAX_CELLS], second[MAX_CELLS];

    cells_of(a, grid * grid, first);
    cells_of(b, grid * grid, second);
    for (int cell = 0; cell < grid * grid; cell++) {
        const int row = cell / grid, col = cell % grid;

        if (first[cell] == 0)
            continue;
        for (int y = row - APART; y <= row + APART; y++) {
            for (int x = col - APART; x <= col + APART; x++) {
                if (y >= 0 && y < grid && x >= 0 && x < grid && second[y * grid + x] != 0)
                    return false;
            }
        }
    }
    return true;
}
