/* Question after question about one image: whether the errors of coded K and V grow. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dialogue_parts.h"

enum turns_way { TURNS_F16, TURNS_INT4, TURNS_RECENT, N_WAYS };

/* The article's window. */
enum { RECENT_TOKENS = 256, MAX_TEXT = MAX_QUESTION + MAX_ANSWER };

struct turns_step {
    bool asked, right;
    double kl; /* of the first word of the answer to that on the F16 cache */
};

struct turns_trial {
    struct dialogue_run *run;
    struct turns_step *steps; /* [n_dialogues][N_TURNS][N_WAYS] */
};

static struct turns_step *step_of(const struct turns_trial *trial, size_t d, size_t turn,
                                  size_t way)
{
    return &trial->steps[(d * N_TURNS + turn) * N_WAYS + way];
}

static bool open_talks(struct reader *reader, struct talk *talks, struct failure *failure)
{
    for (size_t w = 0; w < N_WAYS; w++) {
        struct talk_params params;
        talk_params_default(&params);
        params.max_tokens = 2 + MAX_CELLS + N_TURNS * MAX_TEXT;
        if (w != TURNS_F16)
            params.precision.k = params.precision.v = KVC_INT4;
        if (w == TURNS_RECENT)
            params.recent_tokens = RECENT_TOKENS;
        if (!talk_open(reader, &params, &talks[w], failure))
            return false;
    }
    return true;
}

/* All talks read the right answers, however they would have answered: they differ in nothing but
 * their caches. */
static bool take_turns(const struct turns_trial *trial, struct reader *reader, size_t d,
                       struct talk *talks, const struct question *questions, size_t n_questions,
                       struct failure *failure)
{
    float whole[N_WORDS], logits[N_WORDS];

    for (size_t t = 0; t < n_questions;
         t++) /* no more: a question that comes again is answered above */
        for (size_t w = 0; w < N_WAYS; w++) {
            struct turns_step *step = step_of(trial, d, t, w);
            step->asked = true;
            if (!talk_teach(&talks[w], &questions[t], &step->right, logits, failure))
                return false;
            if (w == TURNS_F16)
                memcpy(whole, logits, sizeof(whole));
            step->kl = logits_kl(whole, logits, reader->vlm->model.shape.n_vocab);
        }
    return true;
}

static bool turns_job(void *arg, struct reader *reader, size_t d, struct failure *failure)
{
    const struct turns_trial *trial = arg;
    struct question *questions = malloc(N_TURNS * sizeof(*questions));
    struct exam_item *item = dialogue_draw(trial->run, reader, d, failure);
    struct talk talks[N_WAYS] = {{0}};

    if (!questions || !item) {
        free(questions);
        free(item);
        return fail_with(failure, "out of memory");
    }
    const int n = questions_ask(d, &item->picture, (1u << N_QUESTION_KINDS) - 1u,
                                trial->run->exam.margin, questions, N_TURNS);
    bool ok = n > 0 || fail_with(failure, "a picture without questions");
    ok = ok && open_talks(reader, talks, failure);
    for (size_t w = 0; w < N_WAYS && ok; w++)
        ok = talk_see(&talks[w], item->picture.grid, failure);
    ok = ok && take_turns(trial, reader, d, talks, questions, (size_t)n, failure);
    for (size_t w = 0; w < N_WAYS; w++)
        talk_close(&talks[w]);
    free(questions);
    free(item);
    return ok;
}

static bool add_turn(const struct turns_trial *trial, const char *name, size_t turn, size_t way,
                     uint8_t *hits, double *kl)
{
    size_t n = 0;

    for (size_t d = 0; d < trial->run->options->n_dialogues; d++) {
        const struct turns_step *step = step_of(trial, d, turn, way);
        if (!step->asked)
            continue;
        hits[n] = step->right;
        kl[n++] = step->kl;
    }
    if (n == 0)
        return true;
    struct row *row = dialogue_add(trial->run, "turns", name, (double)turn + 1.0, hits, n, false);
    if (!row)
        return false;
    row->kl = mean_of(kl, n);
    const struct row *reference = rows_find(trial->run->table, "turns", "f16", row->x);
    if (way != TURNS_F16 && reference)
        rows_pair(row, reference);
    return true;
}

static bool add_rows(const struct turns_trial *trial, struct failure *failure)
{
    static const char *const names[N_WAYS] = {"f16", "int4 recent 0", "int4 recent 256"};
    const size_t n = trial->run->options->n_dialogues;
    uint8_t *hits = malloc(n);
    double *kl = malloc(n * sizeof(*kl));
    bool ok = hits && kl;

    for (size_t w = 0; w < N_WAYS; w++)
        for (size_t t = 0; t < N_TURNS && ok; t++)
            ok = add_turn(trial, names[w], t, w, hits, kl);
    free(hits);
    free(kl);
    return ok || fail_with(failure, "out of memory");
}

bool dialogue_turns(struct dialogue_run *run, struct failure *failure)
{
    struct turns_trial trial = {.run = run};

    trial.steps = calloc(run->options->n_dialogues * N_TURNS * N_WAYS, sizeof(*trial.steps));
    bool ok = trial.steps != NULL || fail_with(failure, "out of memory");
    ok = ok && dialogue_lanes(run, run->options->n_dialogues, turns_job, &trial, failure) &&
         add_rows(&trial, failure);
    free(trial.steps);
    return ok;
}
