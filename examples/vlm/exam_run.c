/* Runs experiments on a model. */
#include "exam_run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "clock.h"
#include "dialogue.h"
#include "experiments.h"
#include "learned.h"
#include "outliers.h"
#include "sitting.h"

/* One call of exam_run(). */
struct run {
    const struct vlm *vlm;
    const struct exam_options *options;
    struct plan *plan;
    struct row_table *table;
    size_t first_row; /* in the table, of the plan's rows */
};

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* HALL_LONG asks other questions than the rest. */
static size_t first_other(const struct run *run)
{
    return (run->options->n + N_GROUPS - 1) / N_GROUPS * N_GROUPS;
}

static size_t n_items(const struct run *run, enum hall hall)
{
    return hall == HALL_LONG ? LONG_FACTOR * run->options->n : run->options->n;
}

static bool add_rows(struct run *run, struct failure *failure)
{
    run->first_row = run->table->n;
    for (size_t r = 0; r < run->plan->n_rows; r++) {
        const struct planned_row *planned = &run->plan->rows[r];
        const size_t limit = run->plan->halls[planned->hall].settings[planned->setting].n_items;
        const size_t n = n_items(run, planned->hall);
        if (!rows_add(run->table, planned->experiment, planned->name, planned->x,
                      limit > 0 ? min_size(n, limit) : n))
            return fail_with(failure, "out of memory");
    }
    return true;
}

static void fill_row(struct row *row, const struct planned_row *planned,
                     const struct sitting *sitting, size_t n_cells)
{
    double rows = 0.0, cache = 0.0, pages = 0.0, error = 0.0, kl = 0.0;

    for (size_t i = 0; i < row->n; i++) {
        const struct outcome *o =
            &sitting->outcomes[i * (1 + sitting->n_settings) + 1 + planned->setting];
        row->hits[i] = o->right[planned->asked];
        kl += o->kl[planned->asked];
        rows += o->rows;
        cache += o->cache_bytes;
        pages += o->page_bytes;
        error += o->rel_err;
    }
    const double n = (double)row->n, n_tokens = n * (double)n_cells;
    row->rows = rows / n;
    row->cache_bytes_per_token = cache / n_tokens;
    row->page_bytes_per_token = pages / n_tokens;
    row->rel_err = error / n;
    row->kl = kl / n;
    rows_count(row);
}

static bool needs_scorer(const struct hall_plan *hall)
{
    for (size_t s = 0; s < hall->n_settings; s++)
        if (hall->settings[s].score == SCORE_LEARNED)
            return true;
    return false;
}

/* The names of the experiments with rows in a hall, for the line of progress. */
static void list_names(const struct plan *plan, enum hall hall, char *out, size_t size)
{
    const char *last = "";
    size_t n = 0;

    *out = '\0';
    for (size_t r = 0; r < plan->n_rows; r++) {
        const struct planned_row *row = &plan->rows[r];
        if (row->hall != hall || strcmp(row->experiment, last) == 0 || n >= size)
            continue;
        n += (size_t)snprintf(out + n, size - n, "%s%s", n > 0 ? "," : "", row->experiment);
        last = row->experiment;
    }
}

static bool sit(struct run *run, enum hall hall, const struct vlm *vlm, struct failure *failure)
{
    const struct exam_options *o = run->options;
    const struct hall_plan *plan = &run->plan->halls[hall];
    const int grid = hall == HALL_SMALL ? 16 : MAX_GRID;
    struct exam exam, tuning;
    void *scorer = NULL;
    char names[160];
    struct sitting sitting = {.room = {.vlm = vlm, .kernels = o->kernels, .exam = &exam},
                              .first = hall == HALL_LONG ? first_other(run) : 0,
                              .n = n_items(run, hall),
                              .settings = plan->settings,
                              .n_settings = plan->n_settings};
    const double start = seconds_now();

    exam_default(o->tune ? EXAM_TUNE : EXAM_REPORT, grid, &exam);
    exam_default(EXAM_TUNE, grid, &tuning);
    if (needs_scorer(plan) &&
        !learned_train(vlm, o->kernels, &tuning, &scorer, &sitting.room.n_scorer, failure))
        return false;
    sitting.room.scorer = scorer;
    const bool ok = sitting_run(&sitting, o->threads, failure);
    free(scorer);
    if (!ok)
        return false;
    for (size_t r = 0; r < run->plan->n_rows; r++)
        if (run->plan->rows[r].hall == hall)
            fill_row(&run->table->rows[run->first_row + r], &run->plan->rows[r], &sitting,
                     (size_t)grid * (size_t)grid);
    sitting_free(&sitting);
    list_names(run->plan, hall, names, sizeof(names));
    if (!o->quiet)
        fprintf(stderr, "%s: %zu questions, %zu settings, %.1f s\n", names, sitting.n,
                sitting.n_settings, seconds_now() - start);
    return true;
}

/* Outliers, and with @p smooth what evens them out again. */
static bool sit_with_outliers(struct run *run, enum hall hall, bool smooth, struct failure *failure)
{
    struct vlm outliers = {0}, smoothed = {0};
    struct exam tuning;

    exam_default(EXAM_TUNE, MAX_GRID, &tuning);
    bool ok = outliers_inject(run->vlm, &outliers, failure);
    if (ok && smooth)
        ok = outliers_smooth(&outliers, run->options->kernels, &tuning, &smoothed, failure);
    ok = ok && sit(run, hall, smooth ? &smoothed : &outliers, failure);
    outliers_free(&smoothed);
    outliers_free(&outliers);
    return ok;
}

static bool sit_halls(struct run *run, struct failure *failure)
{
    for (int h = 0; h < N_HALLS; h++) {
        const enum hall hall = (enum hall)h;
        bool ok = true;
        if (run->plan->halls[hall].n_settings == 0)
            continue;
        switch (hall) {
        case HALL_OUTLIERS: ok = sit_with_outliers(run, hall, false, failure); break;
        case HALL_SMOOTHED: ok = sit_with_outliers(run, hall, true, failure); break;
        default: ok = sit(run, hall, run->vlm, failure); break;
        }
        if (!ok)
            return false;
    }
    return true;
}

static void pair_rows(const struct run *run)
{
    for (size_t r = 0; r < run->plan->n_rows; r++) {
        const struct planned_row *planned = &run->plan->rows[r];
        const struct row *reference =
            rows_find(run->table, planned->experiment, planned->reference, planned->x);
        if (!reference)
            reference = rows_find(run->table, planned->experiment, planned->reference, 0.0);
        struct row *row = &run->table->rows[run->first_row + r];
        if (reference && reference != row)
            rows_pair(row, reference);
    }
}

enum { QUESTIONS_PER_DIALOGUE = 25 }; /* a dialogue costs as much as so many questions */

/* The bits of the experiments over dialogues in a list. */
static unsigned dialogues_in(const char *list)
{
    unsigned bits = 0;
    char name[32];

    while (args_next_item(&list, name, sizeof(name)))
        for (int d = 0; d < N_DIALOGUES; d++)
            if (strcmp(name, "all") == 0 ||
                strcmp(name, dialogue_name((enum dialogue_experiment)d)) == 0)
                bits |= 1u << d;
    return bits;
}

static bool hold_dialogues(struct run *run, struct failure *failure)
{
    const struct exam_options *o = run->options;
    struct dialogue_options d;

    dialogue_options_default(&d);
    d.experiments = dialogues_in(o->experiments);
    d.set = o->tune ? EXAM_TUNE : EXAM_REPORT;
    d.n_dialogues = o->n < QUESTIONS_PER_DIALOGUE ? 1 : o->n / QUESTIONS_PER_DIALOGUE;
    d.n_threads = o->threads;
    d.kernels = o->kernels;
    d.quiet = o->quiet;
    return dialogue_run(run->vlm, &d, run->table, failure);
}

bool exam_run(const struct vlm *vlm, const struct exam_options *options, struct row_table *out,
              struct failure *failure)
{
    struct run run = {
        .vlm = vlm, .options = options, .plan = malloc(sizeof(*run.plan)), .table = out};

    if (!run.plan)
        return fail_with(failure, "out of memory");
    bool ok = plan_make(options->experiments, run.plan, failure) && add_rows(&run, failure) &&
              sit_halls(&run, failure);
    if (ok) {
        pair_rows(&run);
        ok = hold_dialogues(&run, failure);
    }
    free(run.plan);
    return ok;
}
