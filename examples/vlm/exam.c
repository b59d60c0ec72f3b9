/* Examination questions: each follows from the seed of its set and its number. */
#include "exam.h"

#include "random.h"

/* Bits of kinds that each group asks, and that its pictures can be asked at all. */
static const struct {
    enum picture_kind picture;
    unsigned first, others;
} groups[N_GROUPS] = {
    {PICTURE_SCENE, 1u << QUESTION_COLOUR | 1u << QUESTION_SHAPE | 1u << QUESTION_COUNT,
     1u << QUESTION_SPATIAL},
    {PICTURE_SCENE, 1u << QUESTION_SPATIAL,
     1u << QUESTION_COLOUR | 1u << QUESTION_SHAPE | 1u << QUESTION_COUNT},
    {PICTURE_SCREEN, 1u << QUESTION_READ, 0},
};

/* Most questions that a picture is searched for. */
enum { MAX_ASKED = 24 };

/* Purposes of the seed of an item. */
enum { FOR_ITEM = 1000, FOR_FIRST, FOR_SECOND };

/*
 * How hard the examination is: the numbers to change, and nowhere else. The full cache should
 * answer about nine of ten: with nothing left to lose, or nothing to lose, no setting differs.
 */
void exam_default(enum exam_set set, int grid, struct exam *out)
{
    out->set = set;
    out->margin = 1.5f;
    picture_params_default(grid, &out->scene);
    picture_params_default(grid, &out->screen);
}

/* The first question that has a second one apart from it; false if none has. */
static bool choose_pair(const struct question *firsts, int n_firsts, const struct question *seconds,
                        int n_seconds, int grid, struct exam_item *out)
{
    for (int a = 0; a < n_firsts; a++)
        for (int b = 0; b < n_seconds; b++)
            if (questions_apart(&firsts[a], &seconds[b], grid)) {
                out->first = firsts[a];
                out->second = seconds[b];
                return true;
            }
    return false;
}

static bool ask_item(uint64_t seed, const struct exam *exam, struct exam_item *out)
{
    struct question firsts[MAX_ASKED], seconds[MAX_ASKED];
    struct draws first = draws_of(seed, FOR_FIRST), second = draws_of(seed, FOR_SECOND);
    const int grid = out->picture.grid;

    const int n = questions_ask(draw_bits(&first), &out->picture, groups[out->group].first,
                                exam->margin, firsts, MAX_ASKED);
    if (choose_pair(firsts, n, firsts, n, grid, out))
        return true;
    if (groups[out->group].others == 0)
        return false;
    const int n_others = questions_ask(draw_bits(&second), &out->picture, groups[out->group].others,
                                       exam->margin, seconds, MAX_ASKED);
    return choose_pair(firsts, n, seconds, n_others, grid, out);
}

/* Items take streams of their own, so that passing over a picture moves no other item; the two top
 * bits of the seed of a picture tell its set. */
void exam_item(const struct exam *exam, size_t i, struct exam_item *out)
{
    const uint64_t seed = ((uint64_t)exam->set + 1) << 48 | (uint64_t)i;
    struct draws draws = draws_of(seed, FOR_ITEM);

    out->group = (int)(i % N_GROUPS);
    const enum picture_kind kind = groups[out->group].picture;
    const struct picture_params *params = kind == PICTURE_SCENE ? &exam->scene : &exam->screen;
    uint64_t picture_seed;
    do {
        picture_seed = draw_bits(&draws) >> 2 | ((uint64_t)exam->set + 1) << 62;
        picture_draw(picture_seed, kind, params, &out->picture);
    } while (!ask_item(picture_seed, exam, out));
}
