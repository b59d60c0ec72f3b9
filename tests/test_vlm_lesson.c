/* The lessons of the small vision-language model. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "lesson.h"
#include "question.h"

/* Three images and a block each, in memory that no byte may be written behind. */
struct lesson {
    struct lesson_params params;
    uint8_t *rgb, *labels, *ground;
    int32_t *tokens, *targets, *kinds;
};

enum { N_LESSONS = 60, N_IMAGES = 3, N_TOKENS = 70, GRID = 16, N_LESSON_CELLS = GRID * GRID };

static void draw_lesson(uint64_t seed, struct lesson *lesson)
{
    const size_t n_tokens = N_IMAGES * N_TOKENS;

    lesson->rgb = malloc(N_IMAGES * N_LESSON_CELLS * PATCH * PATCH * 3);
    lesson->labels = malloc(N_IMAGES * N_LABELS * N_LESSON_CELLS);
    lesson->tokens = malloc(n_tokens * sizeof(int32_t));
    lesson->targets = malloc(n_tokens * sizeof(int32_t));
    lesson->kinds = malloc(n_tokens * sizeof(int32_t));
    lesson->ground = malloc(n_tokens * N_IMAGES * N_LESSON_CELLS);
    lesson_draw(seed, &lesson->params, lesson->rgb, lesson->labels, lesson->tokens, lesson->targets,
                lesson->kinds, lesson->ground);
}

static void free_lesson(struct lesson *lesson)
{
    free(lesson->rgb);
    free(lesson->labels);
    free(lesson->tokens);
    free(lesson->targets);
    free(lesson->kinds);
    free(lesson->ground);
}

static bool is_screen(const struct lesson *lesson, int image)
{
    const uint8_t *labels = lesson->labels + image * N_LABELS * N_LESSON_CELLS;
    bool found = false;

    for (int cell = 0; cell < N_LESSON_CELLS; cell++)
        found = found || labels[LABEL_FIELD * N_LESSON_CELLS + cell] > 0;
    return found;
}

/* The images that a token looks at, a bit each. */
static unsigned images_seen(const struct lesson *lesson, int token)
{
    const uint8_t *ground = lesson->ground + token * N_IMAGES * N_LESSON_CELLS;
    unsigned images = 0;

    for (int i = 0; i < N_IMAGES * N_LESSON_CELLS; i++)
        images |= ground[i] != 0 ? 1u << i / N_LESSON_CELLS : 0;
    return images;
}

/* Questions up to their stop, then pads; returns those about the picture before. */
static int check_block(const struct lesson *lesson, int image)
{
    const int first = image * N_TOKENS, last = first + N_TOKENS;
    int n_back = 0, is_answer = 0, at = first;

    for (; at < last && lesson->tokens[at] != WORD_PAD; at++) {
        const int32_t token = lesson->tokens[at];
        const bool reads = lesson->kinds[at] == QUESTION_READ;
        const bool is_back = reads != is_screen(lesson, image);

        assert_in_range(lesson->kinds[at], 0, N_QUESTION_KINDS - 1);
        assert_in_range(token, WORD_STOP, N_WORDS - 1);
        is_answer = token == WORD_QUESTION || (is_answer && token != WORD_STOP);
        if (is_answer) {
            assert_true(at + 1 < last);
            assert_int_equal(lesson->targets[at], lesson->tokens[at + 1]);
            assert_int_equal(lesson->kinds[at], lesson->kinds[at + 1]);
        } else {
            assert_int_equal(lesson->targets[at], -100);
        }
        const unsigned seen = images_seen(lesson, at);
        assert_int_equal(seen & ~(1u << (image - is_back)), 0);
        n_back += is_back && token == WORD_STOP;
    }
    assert_true(at > first);
    assert_int_equal(lesson->tokens[at - 1], WORD_STOP);
    assert_true(last - at < MAX_QUESTION + MAX_ANSWER);
    for (; at < last; at++) {
        assert_int_equal(lesson->tokens[at], WORD_PAD);
        assert_int_equal(lesson->targets[at], -100);
        assert_int_equal(lesson->kinds[at], -1);
        assert_int_equal(images_seen(lesson, at), 0);
    }
    return n_back;
}

static const struct lesson_params usual = {.n_images = N_IMAGES,
                                           .n_tokens = N_TOKENS,
                                           .kinds = {-1, -1, -1, -1},
                                           .margin = 1.3f,
                                           .looks_back = 0.4f};

static void lessons_are_whole_questions(void **state)
{
    int n_back = 0, n_screens = 0;

    (void)state;
    for (uint64_t seed = 0; seed < N_LESSONS; seed++) {
        struct lesson lesson = {.params = usual};

        picture_params_default(GRID, &lesson.params.picture);
        draw_lesson(seed, &lesson);
        for (int image = 0; image < N_IMAGES; image++) {
            const bool differs =
                image > 0 && is_screen(&lesson, image) != is_screen(&lesson, image - 1);
            const int n = check_block(&lesson, image);

            assert_true(n == 0 || differs);
            n_back += n;
            n_screens += is_screen(&lesson, image);
        }
        free_lesson(&lesson);
    }
    assert_in_range(n_screens, N_LESSONS * N_IMAGES * 3 / 10, N_LESSONS * N_IMAGES * 6 / 10);
    assert_true(n_back > N_LESSONS);
}

static void lessons_keep_to_their_kinds(void **state)
{
    struct lesson lesson = {.params = usual}, again = {.params = usual};

    (void)state;
    lesson.params.kinds[0] = PICTURE_SCENE;
    lesson.params.kinds[1] = PICTURE_SCREEN;
    lesson.params.kinds[2] = PICTURE_SCENE;
    lesson.params.looks_back = 0.0f;
    picture_params_default(GRID, &lesson.params.picture);
    again.params = lesson.params;
    for (uint64_t seed = 0; seed < 10; seed++) {
        draw_lesson(seed, &lesson);
        for (int image = 0; image < N_IMAGES; image++) {
            assert_int_equal(is_screen(&lesson, image), image == 1);
            assert_int_equal(check_block(&lesson, image), 0);
        }
        draw_lesson(seed, &again);
        assert_memory_equal(lesson.tokens, again.tokens,
                            N_IMAGES * N_TOKENS * sizeof(*lesson.tokens));
        assert_memory_equal(lesson.rgb, again.rgb, N_IMAGES * N_LESSON_CELLS * PATCH * PATCH * 3);
        free_lesson(&again);

        /* What is left out changes nothing of the rest. */
        int32_t targets[N_IMAGES * N_TOKENS];
        lesson_draw(seed, &lesson.params, NULL, NULL, NULL, targets, NULL, NULL);
        assert_memory_equal(lesson.targets, targets, sizeof(targets));
        free_lesson(&lesson);
    }
}

static void sizes_are_told(void **state)
{
    int32_t sizes[4];

    (void)state;
    lesson_sizes(sizes);
    assert_int_equal(sizes[0], N_WORDS);
    assert_int_equal(sizes[1], N_LABELS);
    assert_int_equal(sizes[2], PATCH);
    assert_int_equal(sizes[3], MAX_GRID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lessons_are_whole_questions),
        cmocka_unit_test(lessons_keep_to_their_kinds),
        cmocka_unit_test(sizes_are_told),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
