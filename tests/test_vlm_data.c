/* The words, pictures and questions of the small vision-language model. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "picture.h"
#include "question.h"
#include "words.h"

enum { N_PICTURES = 60, MAX_ASKED = 128, ALL_KINDS = (1 << N_QUESTION_KINDS) - 1 };

/* Too large for a stack that a sanitizer widens. */
static struct picture picture, other;
static struct question questions[MAX_ASKED];

static uint64_t checksum(uint64_t sum, const void *data, size_t n)
{
    const uint8_t *bytes = data;

    for (size_t i = 0; i < n; i++)
        sum = (sum ^ bytes[i]) * UINT64_C(0x100000001B3);
    return sum;
}

/* FNV-1a of the pixels and the labels in use. */
static uint64_t checksum_of(const struct picture *p)
{
    const size_t n_cells = (size_t)(p->grid * p->grid);
    uint64_t sum = checksum(UINT64_C(0xCBF29CE484222325), p->rgb, n_cells * PATCH * PATCH * 3);

    for (int i = 0; i < N_LABELS; i++)
        sum = checksum(sum, p->labels[i], n_cells);
    return checksum(sum, p->owner, n_cells);
}

static void draw(uint64_t seed, enum picture_kind kind, int grid, struct picture *out)
{
    struct picture_params params;

    picture_params_default(grid, &params);
    picture_draw(seed, kind, &params, out);
}

/* Picture @p i of a mix of kinds and sizes. */
static void draw_mixed(int i, struct picture *out)
{
    draw((uint64_t)i, i % 2 ? PICTURE_SCREEN : PICTURE_SCENE, i % 4 < 2 ? 24 : 16, out);
}

/* Whoever changes these numbers trains the model again. */
static void pictures_are_the_golden_ones(void **state)
{
    (void)state;
    draw(1, PICTURE_SCENE, 24, &picture);
    assert_int_equal(checksum_of(&picture), UINT64_C(0x5783d5de1e157a23));
    draw(1, PICTURE_SCREEN, 24, &picture);
    assert_int_equal(checksum_of(&picture), UINT64_C(0xf5d7e5575a75adcf));
    draw(1, PICTURE_SCREEN, 16, &picture);
    assert_int_equal(checksum_of(&picture), UINT64_C(0xb40aa0f9fff6cb22));
}

static void a_picture_follows_from_its_seed(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        memset(&picture, 0, sizeof(picture));
        memset(&other, 0xff, sizeof(other));
        draw_mixed(i, &picture);
        draw_mixed(i, &other);
        assert_int_equal(checksum_of(&picture), checksum_of(&other));
        assert_memory_equal(picture.things, other.things, sizeof(picture.things));
        assert_memory_equal(picture.fields, other.fields, sizeof(picture.fields));
        draw_mixed(i + 4, &other);
        assert_int_not_equal(checksum_of(&picture), checksum_of(&other));
    }
}

static int nearest_colour(const uint8_t *pixel)
{
    static const int colours[N_COLOURS][3] = {{220, 40, 40},  {40, 170, 60},  {40, 80, 220},
                                              {240, 220, 40}, {150, 50, 190}, {40, 200, 220},
                                              {15, 15, 15},   {250, 250, 250}};
    int nearest = 0, least = 1 << 30;

    for (int i = 0; i < N_COLOURS; i++) {
        int distance = 0;

        for (int c = 0; c < 3; c++)
            distance += (pixel[c] - colours[i][c]) * (pixel[c] - colours[i][c]);
        if (distance < least) {
            least = distance;
            nearest = i;
        }
    }
    return nearest;
}

static void things_lie_apart_in_colours_of_their_own(void **state)
{
    enum { RING = 5 };
    struct picture_params params;

    (void)state;
    picture_params_default(24, &params);
    for (uint64_t seed = 0; seed < N_PICTURES; seed++) {
        draw(seed, PICTURE_SCENE, 24, &picture);
        assert_in_range(picture.n_things, params.min_things, params.max_things);
        assert_int_equal(picture.n_fields, 0);
        for (int i = 0; i < picture.n_things; i++) {
            const struct thing *a = &picture.things[i];
            const int pixel = (int)a->y * PATCH * 24 + (int)a->x;

            assert_true(a->radius >= params.min_radius && a->radius <= params.max_radius);
            assert_true(a->x > a->radius && a->x < (float)(24 * PATCH) - a->radius);
            assert_true(a->y > a->radius && a->y < (float)(24 * PATCH) - a->radius);
            if (a->shape != RING)
                assert_int_equal(nearest_colour(picture.rgb + 3 * pixel), a->colour);
            for (int j = 0; j < i; j++) {
                const struct thing *b = &picture.things[j];

                assert_int_not_equal(a->colour, b->colour);
                assert_true(hypotf(a->x - b->x, a->y - b->y) > a->radius + b->radius);
            }
        }
    }
}

static void labels_of_scenes_tell_their_things(void **state)
{
    (void)state;
    for (int seed = 0; seed < N_PICTURES; seed += 2) {
        int cells_of[MAX_THINGS + 1] = {0};

        draw_mixed(seed, &picture);
        for (int cell = 0; cell < picture.grid * picture.grid; cell++) {
            const int owner = picture.owner[cell];

            assert_in_range(owner, 0, picture.n_things);
            cells_of[owner]++;
            const struct thing *thing = owner > 0 ? &picture.things[owner - 1] : NULL;
            assert_int_equal(picture.labels[LABEL_SHAPE][cell], thing ? 1 + thing->shape : 0);
            assert_int_equal(picture.labels[LABEL_COLOUR][cell], thing ? 1 + thing->colour : 0);
            assert_int_equal(picture.labels[LABEL_GLYPH][cell], 0);
            assert_int_equal(picture.labels[LABEL_FIELD][cell], 0);
            assert_int_equal(picture.labels[LABEL_PLACE][cell], 0);
        }
        for (int i = 0; i < picture.n_things; i++) {
            const int middle =
                (int)picture.things[i].y / PATCH * picture.grid + (int)picture.things[i].x / PATCH;

            assert_int_equal(picture.owner[middle], 1 + i);
        }
    }
}

static int count_label(enum picture_label label, int first, int last)
{
    int n = 0;

    for (int cell = 0; cell < picture.grid * picture.grid; cell++)
        n += picture.labels[label][cell] >= first && picture.labels[label][cell] <= last;
    return n;
}

static void labels_of_screens_tell_their_fields(void **state)
{
    int n_distractors = 0;

    (void)state;
    for (int seed = 1; seed < N_PICTURES; seed += 2) {
        unsigned names = 0;

        draw_mixed(seed, &picture);
        assert_int_equal(picture.n_things, 0);
        assert_in_range(picture.n_fields, picture.grid == 24 ? 4 : 3, picture.grid == 24 ? 10 : 6);
        for (int i = 0; i < picture.n_fields; i++) {
            const struct field *field = &picture.fields[i];
            const int cell = field->row * picture.grid + field->col;

            assert_in_range(field->name, 0, N_FIELDS - 1);
            assert_false(names >> field->name & 1);
            names |= 1u << field->name;
            assert_in_range(field->row, 0, picture.grid - 1);
            assert_in_range(field->col, 0, picture.grid - 1 - CODE_LENGTH);
            assert_int_equal(picture.labels[LABEL_GLYPH][cell], 1 + N_GLYPHS + field->name);
            assert_int_equal(picture.labels[LABEL_FIELD][cell], 1 + field->name);
            assert_int_equal(picture.labels[LABEL_PLACE][cell], 0);
            for (int k = 0; k < CODE_LENGTH; k++) {
                assert_int_equal(picture.labels[LABEL_GLYPH][cell + 1 + k], 1 + field->code[k]);
                assert_int_equal(picture.labels[LABEL_FIELD][cell + 1 + k], 1 + field->name);
                assert_int_equal(picture.labels[LABEL_PLACE][cell + 1 + k], 1 + k);
            }
        }
        const int n_codes = count_label(LABEL_PLACE, 1, 1);
        assert_int_equal(count_label(LABEL_FIELD, 1, N_FIELDS), 5 * picture.n_fields);
        assert_int_equal(count_label(LABEL_PLACE, 1, CODE_LENGTH), CODE_LENGTH * n_codes);
        assert_int_equal(count_label(LABEL_GLYPH, 1, N_GLYPHS), CODE_LENGTH * n_codes);
        assert_int_equal(count_label(LABEL_SHAPE, 1, N_SHAPES), 0);
        assert_int_equal(count_label(LABEL_COLOUR, 1, N_COLOURS), 0);
        n_distractors += n_codes - picture.n_fields;
    }
    assert_true(n_distractors > N_PICTURES);
}

static void as_many_find_room_as_there_is(void **state)
{
    struct picture_params params;

    (void)state;
    picture_params_default(16, &params);
    params.min_things = params.max_things = MAX_THINGS;
    params.min_radius = params.max_radius = 60.0f;
    picture_draw(5, PICTURE_SCENE, &params, &picture);
    assert_in_range(picture.n_things, 1, 4);
    params.min_radius = params.max_radius = 8.0f;
    picture_draw(5, PICTURE_SCENE, &params, &picture);
    assert_int_equal(picture.n_things, N_COLOURS);
    params.min_fields = params.max_fields = N_FIELDS;
    params.distractors = 0.0f;
    picture_draw(5, PICTURE_SCREEN, &params, &picture);
    assert_int_equal(picture.n_fields, N_FIELDS);
    assert_int_equal(count_label(LABEL_PLACE, 1, 1), N_FIELDS);
    params.distractors = 1.0f;
    picture_draw(5, PICTURE_SCREEN, &params, &picture);
    assert_true(count_label(LABEL_PLACE, 1, 1) > N_FIELDS);
}

static const struct thing *thing_of_colour(int32_t word)
{
    for (int i = 0; i < picture.n_things; i++) {
        if (WORD_OF_COLOUR + picture.things[i].colour == word)
            return &picture.things[i];
    }
    fail();
    return NULL;
}

/* The answer from the facts, apart from reading. */
static int32_t answer_to(const struct question *q, float margin)
{
    int n = 0, found = 0;

    switch (q->kind) {
    case QUESTION_SHAPE:
        assert_int_equal(q->words[1], WORD_SHAPE);
        return WORD_OF_SHAPE + thing_of_colour(q->words[2])->shape;
    case QUESTION_SPATIAL: {
        const struct thing *a = thing_of_colour(q->words[1]), *b = thing_of_colour(q->words[3]);
        const float dx = a->x - b->x, dy = a->y - b->y;
        const int is_wide = fabsf(dx) > fabsf(dy);

        assert_ptr_not_equal(a, b);
        assert_true(is_wide ? fabsf(dx) >= margin * fabsf(dy) : fabsf(dy) >= margin * fabsf(dx));
        return WORD_OF_SIDE + (is_wide ? (dx < 0.0f ? 0 : 1) : (dy < 0.0f ? 2 : 3));
    }
    default:
        for (int i = 0; i < picture.n_things; i++) {
            if (WORD_OF_SHAPE + picture.things[i].shape == q->words[2]) {
                n++;
                found = picture.things[i].colour;
            }
        }
        if (q->kind == QUESTION_COUNT)
            return WORD_OF_NUMBER + (q->words[2] == WORD_OBJECTS ? picture.n_things : n);
        assert_int_equal(n, 1);
        return WORD_OF_COLOUR + found;
    }
}

static void check_reading(const struct question *q)
{
    const struct field *field = NULL;

    for (int i = 0; i < picture.n_fields; i++) {
        if (WORD_OF_FIELD + picture.fields[i].name == q->words[2])
            field = &picture.fields[i];
    }
    assert_non_null(field);
    assert_int_equal(q->n_answer, CODE_LENGTH + 1);
    for (int k = 0; k < CODE_LENGTH; k++) {
        const int seen = field->row * picture.grid + field->col + 1 + k;

        assert_int_equal(q->answer[k], WORD_OF_GLYPH + field->code[k]);
        for (int cell = 0; cell < MAX_CELLS; cell++)
            assert_int_equal(q->ground[3 + k][cell], cell == seen ? 3 : 0);
    }
}

static void answers_follow_from_the_facts(void **state)
{
    const float margin = 1.3f;
    int asked[N_QUESTION_KINDS] = {0};

    (void)state;
    for (int seed = 0; seed < N_PICTURES; seed++) {
        draw_mixed(seed, &picture);
        const int n = questions_ask(9, &picture, ALL_KINDS, margin, questions, MAX_ASKED);
        assert_in_range(n, 1, MAX_ASKED - 1);
        for (int i = 0; i < n; i++) {
            const struct question *q = &questions[i];

            asked[q->kind]++;
            assert_int_equal(q->words[q->n_words - 1], WORD_QUESTION);
            assert_int_equal(q->answer[q->n_answer - 1], WORD_STOP);
            if (q->kind == QUESTION_READ) {
                check_reading(q);
            } else {
                assert_int_equal(q->n_answer, 2);
                assert_int_equal(q->answer[0], answer_to(q, margin));
            }
        }
    }
    for (int kind = 0; kind < N_QUESTION_KINDS; kind++)
        assert_true(asked[kind] > 0);
}

static void no_question_is_asked_twice(void **state)
{
    (void)state;
    for (int seed = 0; seed < N_PICTURES; seed++) {
        draw_mixed(seed, &picture);
        const int n = questions_ask(3, &picture, ALL_KINDS, 1.0f, questions, MAX_ASKED);
        for (int i = 0; i < n; i++) {
            for (int j = 0; j < i; j++)
                assert_memory_not_equal(questions[i].words, questions[j].words,
                                        sizeof(questions[i].words));
        }
    }
}

static void only_what_may_be_asked_is_asked(void **state)
{
    static struct question again[MAX_ASKED];

    (void)state;
    draw(4, PICTURE_SCENE, 24, &picture);
    for (int kind = 0; kind < N_QUESTION_KINDS; kind++) {
        const int n = questions_ask(7, &picture, 1u << kind, 1.0f, questions, MAX_ASKED);

        assert_int_equal(n > 0, kind != QUESTION_READ);
        for (int i = 0; i < n; i++)
            assert_int_equal(questions[i].kind, kind);
    }
    assert_int_equal(questions_ask(7, &picture, 0, 1.0f, questions, MAX_ASKED), 0);

    /* The order follows from the seed, and fewer are the first of more. */
    const int n = questions_ask(7, &picture, ALL_KINDS, 1.0f, questions, MAX_ASKED);
    assert_true(n > 5);
    assert_int_equal(questions_ask(7, &picture, ALL_KINDS, 1.0f, again, 5), 5);
    assert_memory_equal(questions, again, 5 * sizeof(*again));
    assert_int_equal(questions_ask(8, &picture, ALL_KINDS, 1.0f, again, 5), 5);
    assert_memory_not_equal(questions, again, 5 * sizeof(*again));
}

static unsigned heads_at(const uint8_t *ground)
{
    unsigned heads = 0;

    for (int cell = 0; cell < MAX_CELLS; cell++)
        heads |= ground[cell];
    return heads;
}

static void check_ground_of_thing(const uint8_t *ground, unsigned head, const struct thing *thing)
{
    for (int cell = 0; cell < picture.grid * picture.grid; cell++) {
        const int is_its = picture.owner[cell] == 1 + thing - picture.things;

        assert_int_equal((ground[cell] & head) != 0, is_its);
    }
}

static void what_predicts_looks_at_what_it_needs(void **state)
{
    (void)state;
    for (int seed = 0; seed < N_PICTURES; seed += 2) {
        draw_mixed(seed, &picture);
        const int n = questions_ask(1, &picture, ALL_KINDS, 1.3f, questions, MAX_ASKED);
        for (int i = 0; i < n; i++) {
            const struct question *q = &questions[i];
            const uint8_t *last = q->ground[q->n_words - 1];
            const bool sees_none = q->kind == QUESTION_COUNT && q->answer[0] == WORD_OF_NUMBER;

            assert_int_equal(heads_at(last), sees_none ? 0 : 3);
            assert_int_equal(heads_at(q->ground[0]), 0);
            assert_int_equal(heads_at(q->ground[q->n_words]), 0);
            if (q->kind == QUESTION_SPATIAL) {
                const struct thing *a = thing_of_colour(q->words[1]);
                const struct thing *b = thing_of_colour(q->words[3]);

                check_ground_of_thing(q->ground[1], 3, a);
                check_ground_of_thing(q->ground[3], 3, b);
                check_ground_of_thing(last, 1, a);
                check_ground_of_thing(last, 2, b);
            } else if (q->kind == QUESTION_SHAPE) {
                check_ground_of_thing(q->ground[2], 3, thing_of_colour(q->words[2]));
                check_ground_of_thing(last, 3, thing_of_colour(q->words[2]));
            } else if (q->kind == QUESTION_COLOUR) {
                check_ground_of_thing(last, 3, thing_of_colour(q->answer[0]));
            }
        }
    }
}

static void questions_apart_have_two_cells_between_them(void **state)
{
    static struct question a, b;

    (void)state;
    memset(&a, 0, sizeof(a));
    memset(&b, 0, sizeof(b));
    a.n_words = b.n_words = 4;
    a.n_answer = b.n_answer = 2;
    assert_true(questions_apart(&a, &b, 16));
    a.ground[3][5 * 16 + 15] = 1;
    b.ground[1][6 * 16 + 0] = 2; /* the next cell in memory, on the other side of the picture */
    assert_true(questions_apart(&a, &b, 16));
    b.ground[1][5 * 16 + 12] = 2;
    assert_true(questions_apart(&a, &b, 16));
    b.ground[1][7 * 16 + 13] = 2;
    assert_false(questions_apart(&a, &b, 16));
    assert_false(questions_apart(&b, &a, 16));
    assert_false(questions_apart(&a, &a, 16));
}

static void check_words(const char *text, const char *expected)
{
    int32_t words[16];
    char written[128] = "";
    const char *unknown = NULL;
    const size_t n = words_of(text, words, 16, &unknown);

    assert_null(unknown);
    for (size_t i = 0; i < n; i++) {
        strcat(written, i > 0 ? " " : "");
        strcat(written, word_text(words[i]));
    }
    assert_string_equal(written, expected);
}

static void questions_are_read_as_people_write_them(void **state)
{
    int32_t words[16];
    const char *unknown;

    (void)state;
    check_words("What color is the circle?", "what color circle ?");
    check_words("  WHAT Colour is a\tsquare ? ", "what color square ?");
    check_words("what shape is red", "what shape red ?");
    check_words("How many objects are there?", "how many objects ?");
    check_words("How many circles?", "how many circle ?");
    check_words("Where is red from blue?", "where red from blue ?");
    check_words("read the field K", "read field K ?");
    assert_int_equal(words_of("Read field a.", words, 16, &unknown), 4);
    assert_int_equal(words[2], WORD_OF_FIELD);
    assert_int_equal(words[3], WORD_QUESTION);
}

static void check_unknown(const char *text, size_t max, size_t at)
{
    int32_t words[16];
    const char *unknown = NULL;

    assert_int_equal(words_of(text, words, max, &unknown), 0);
    assert_ptr_equal(unknown, text + at);
}

static void unknown_words_are_pointed_at(void **state)
{
    (void)state;
    check_unknown("what color is the elephant?", 16, 18);
    check_unknown("read field I", 16, 11);
    check_unknown("read field KK", 16, 11);
    check_unknown("read field the K", 16, 11);
    check_unknown("read K", 16, 5);
    check_unknown("<stop>", 16, 0);
    check_unknown("what s", 16, 5);
    check_unknown("what color circle", 2, 11);
    check_unknown("what color circle?", 3, 18);
    check_unknown("?", 16, 1);
    check_unknown("", 16, 0);
}

static void every_word_has_a_text(void **state)
{
    (void)state;
    for (int32_t word = 0; word < N_WORDS; word++)
        assert_true(strlen(word_text(word)) > 0);
    assert_string_equal(word_text(-1), "");
    assert_string_equal(word_text(N_WORDS), "");
    assert_string_equal(word_text(WORD_OF_COLOUR + 7), "white");
    assert_string_equal(word_text(WORD_OF_SHAPE + 5), "ring");
    assert_string_equal(word_text(WORD_OF_NUMBER + 9), "9");
    assert_string_equal(word_text(WORD_OF_SIDE + 3), "below");
    assert_string_equal(word_text(WORD_OF_GLYPH + 31), "9");
    assert_string_equal(word_text(WORD_OF_FIELD + 11), "M");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pictures_are_the_golden_ones),
        cmocka_unit_test(a_picture_follows_from_its_seed),
        cmocka_unit_test(things_lie_apart_in_colours_of_their_own),
        cmocka_unit_test(labels_of_scenes_tell_their_things),
        cmocka_unit_test(labels_of_screens_tell_their_fields),
        cmocka_unit_test(as_many_find_room_as_there_is),
        cmocka_unit_test(answers_follow_from_the_facts),
        cmocka_unit_test(no_question_is_asked_twice),
        cmocka_unit_test(only_what_may_be_asked_is_asked),
        cmocka_unit_test(what_predicts_looks_at_what_it_needs),
        cmocka_unit_test(questions_apart_have_two_cells_between_them),
        cmocka_unit_test(questions_are_read_as_people_write_them),
        cmocka_unit_test(unknown_words_are_pointed_at),
        cmocka_unit_test(every_word_has_a_text),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
