/* Experiments over dialogues: what they share, and the one under every setting. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "dialogue_parts.h"
#include "experiments.h"

enum { POOL_IMAGES = 4, POOL_ASKED = 2, POOL_TOKENS = 4096, MAX_POOL = 16 };

const char *dialogue_name(enum dialogue_experiment experiment)
{
    static const char *const names[N_DIALOGUES] = {"dialogue", "gate", "turns", "pitfalls"};

    return names[experiment];
}

void dialogue_options_default(struct dialogue_options *out)
{
    *out = (struct dialogue_options){.set = EXAM_REPORT, .grid = MAX_GRID, .n_dialogues = 40};
}

bool dialogue_lanes(const struct dialogue_run *run, size_t n_jobs, lane_job *job, void *arg,
                    struct failure *failure)
{
    return lanes_run(run->vlm, run->options->kernels, run->options->n_threads, n_jobs, job, arg,
                     failure);
}

struct row *dialogue_add(struct dialogue_run *run, const char *experiment, const char *name,
                         double x, const uint8_t *hits, size_t n, bool by_group)
{
    struct row *row = rows_add(run->table, experiment, name, x, n);

    if (!row || n == 0)
        return row;
    memcpy(row->hits, hits, n);
    rows_count(row);
    for (int g = 0; g < N_GROUPS && !by_group; g++)
        row->groups[g] = NAN;
    return row;
}

struct exam_item *dialogue_draw(const struct dialogue_run *run, struct reader *reader, size_t i,
                                struct failure *failure)
{
    struct exam_item *item = malloc(sizeof(*item));

    if (!item) {
        fail_with(failure, "out of memory");
        return NULL;
    }
    exam_item(&run->exam, i, item);
    reader_encode(reader, item->picture.rgb, item->picture.grid);
    return item;
}

double mean_of(const double *values, size_t n)
{
    double sum = 0.0;

    for (size_t i = 0; i < n; i++)
        sum += values[i];
    return n > 0 ? sum / (double)n : NAN;
}

/* One setting in one dialogue. */
struct pool_cell {
    uint8_t hits[POOL_ASKED][POOL_IMAGES];
    size_t end_bytes, peak_bytes, n_tokens;
};

struct pool {
    struct dialogue_run *run;
    const struct setting *settings[MAX_POOL];
    const char *names[MAX_POOL];
    size_t n_settings;
    struct pool_cell *cells; /* [n_dialogues][n_settings] */
};

/* What is behind the newest image is scored by its last words: as the policies of an examination,
 * but each image in its turn. */
static bool open_talks(const struct pool *pool, struct reader *reader, struct talk *talks,
                       struct failure *failure)
{
    for (size_t s = 0; s < pool->n_settings; s++) {
        const kvc_policy *policy = &pool->settings[s]->policy;
        struct talk_params params;
        talk_params_default(&params);
        params.hold = true;
        params.max_tokens = POOL_TOKENS;
        params.merges = policy->merge_rounds > 0;
        if (policy->set_precision)
            params.precision = policy->precision;
        if (!talk_open(reader, &params, &talks[s], failure))
            return false;
    }
    return true;
}

static bool ask_pair(struct talk *talk, const struct setting *setting, const struct exam_item *item,
                     size_t image, struct pool_cell *cell, struct failure *failure)
{
    bool first, second;

    if (!talk_compress_for(talk, &item->first, &setting->policy, NULL, failure) ||
        !talk_ask(talk, &item->first, &first, failure) ||
        !talk_ask(talk, &item->second, &second, failure))
        return false;
    cell->hits[0][image] = first;
    cell->hits[1][image] = second;
    return true;
}

/* Dialogue @p d with all settings. */
static bool hold_dialogue(const struct pool *pool, struct reader *reader, size_t d,
                          struct talk *talks, struct pool_cell *cells, struct failure *failure)
{
    bool ok = true;

    for (size_t i = 0; i < POOL_IMAGES && ok; i++) {
        struct exam_item *item = dialogue_draw(pool->run, reader, d * POOL_IMAGES + i, failure);
        ok = item != NULL;
        for (size_t s = 0; s < pool->n_settings && ok; s++)
            ok = talk_see(&talks[s], item->picture.grid, failure) &&
                 ask_pair(&talks[s], pool->settings[s], item, i, &cells[s], failure);
        free(item);
    }
    for (size_t s = 0; s < pool->n_settings && ok; s++) {
        cells[s].end_bytes = talk_used_bytes(&talks[s]);
        cells[s].peak_bytes = talks[s].peak_bytes;
        cells[s].n_tokens = (size_t)kvc_seq_n_tokens(talks[s].cache, talks[s].seq);
    }
    return ok;
}

static void close_talks(const struct pool *pool, struct talk *talks)
{
    for (size_t s = 0; s < pool->n_settings; s++)
        talk_close(&talks[s]);
}

static bool pool_job(void *arg, struct reader *reader, size_t d, struct failure *failure)
{
    const struct pool *pool = arg;
    struct talk talks[MAX_POOL] = {{0}};

    const bool ok =
        open_talks(pool, reader, talks, failure) &&
        hold_dialogue(pool, reader, d, talks, pool->cells + d * pool->n_settings, failure);
    close_talks(pool, talks);
    return ok;
}

/* The first dialogue once more, on an idle machine. */
static bool time_first(const struct pool *pool, struct talk_time *times, struct failure *failure)
{
    struct talk talks[MAX_POOL] = {{0}};
    struct pool_cell cells[MAX_POOL];
    struct reader reader;

    if (!reader_open(pool->run->vlm, pool->run->options->kernels, &reader, failure))
        return false;
    const bool ok = open_talks(pool, &reader, talks, failure) &&
                    hold_dialogue(pool, &reader, 0, talks, cells, failure) &&
                    talks_measure_time(talks, pool->n_settings, times, failure);
    close_talks(pool, talks);
    reader_close(&reader);
    return ok;
}

static void fill_figures(const struct pool *pool, size_t s, const struct talk_time *time,
                         struct row *row)
{
    const size_t n = pool->run->options->n_dialogues;
    double end = 0.0, peak = 0.0;

    for (size_t d = 0; d < n; d++) {
        const struct pool_cell *cell = &pool->cells[d * pool->n_settings + s];
        end += (double)cell->end_bytes / (double)cell->n_tokens;
        peak += (double)cell->peak_bytes;
    }
    row->pool_bytes_per_token = end / (double)n;
    row->peak_cache_bytes = peak / (double)n;
    row->attention_us = time->attention_us;
    row->step_ms = time->step_ms;
}

static bool add_asked(const struct pool *pool, size_t s, size_t asked, const struct talk_time *time,
                      uint8_t *hits, struct failure *failure)
{
    const size_t n = pool->run->options->n_dialogues;

    for (size_t d = 0; d < n; d++)
        memcpy(hits + d * POOL_IMAGES, pool->cells[d * pool->n_settings + s].hits[asked],
               POOL_IMAGES);
    const double x = (double)asked + 1.0;
    struct row *row =
        dialogue_add(pool->run, "dialogue", pool->names[s], x, hits, n * POOL_IMAGES, true);
    if (!row)
        return fail_with(failure, "out of memory");
    fill_figures(pool, s, time, row);
    const struct row *reference = rows_find(pool->run->table, "dialogue", pool->names[0], x);
    if (s > 0 && reference)
        rows_pair(row, reference);
    return true;
}

static bool add_rows(const struct pool *pool, const struct talk_time *times,
                     struct failure *failure)
{
    static const char *const singles[] = {"first", "second"};
    uint8_t *hits = malloc(pool->run->options->n_dialogues * POOL_IMAGES + 1);
    bool ok = hits != NULL;

    if (!ok)
        fail_with(failure, "out of memory");

    for (size_t s = 0; s < pool->n_settings && ok; s++)
        for (size_t asked = 0; asked < POOL_ASKED && ok; asked++)
            ok = add_asked(pool, s, asked, &times[s], hits, failure);
    for (size_t s = 0; s < pool->n_settings && ok; s++)
        for (size_t e = 0; e < 2; e++) {
            struct row *row = rows_find(pool->run->table, singles[e], pool->names[s], 0.0);
            if (row)
                fill_figures(pool, s, &times[s], row);
        }
    free(hits);
    return ok;
}

/* Each setting of the tables once: some are in both. */
static bool take_settings(struct pool *pool, const struct plan *plan, struct failure *failure)
{
    for (size_t r = 0; r < plan->n_rows; r++) {
        const struct planned_row *row = &plan->rows[r];
        bool known = false;
        for (size_t s = 0; s < pool->n_settings; s++)
            known = known || strcmp(pool->names[s], row->name) == 0;
        if (known)
            continue;
        if (pool->n_settings == MAX_POOL)
            return fail_with(failure, "too many settings");
        pool->names[pool->n_settings] = row->name;
        pool->settings[pool->n_settings++] = &plan->halls[row->hall].settings[row->setting];
    }
    return true;
}

bool dialogue_pool(struct dialogue_run *run, struct failure *failure)
{
    struct talk_time times[MAX_POOL];
    struct pool pool = {.run = run};
    struct plan *plan = malloc(sizeof(*plan));

    if (!plan)
        return fail_with(failure, "out of memory");
    bool ok = plan_make("first,second", plan, failure) && take_settings(&pool, plan, failure);
    pool.cells = calloc(run->options->n_dialogues * MAX_POOL + 1, sizeof(*pool.cells));
    ok = ok && (pool.cells || fail_with(failure, "out of memory")) &&
         dialogue_lanes(run, run->options->n_dialogues, pool_job, &pool, failure) &&
         time_first(&pool, times, failure) && add_rows(&pool, times, failure);
    free(pool.cells);
    free(plan);
    return ok;
}

bool dialogue_run(const struct vlm *vlm, const struct dialogue_options *options,
                  struct row_table *out, struct failure *failure)
{
    static bool (*const parts[N_DIALOGUES])(struct dialogue_run *, struct failure *) = {
        dialogue_pool, dialogue_gate, dialogue_turns, dialogue_pitfalls};
    struct dialogue_run run = {.vlm = vlm, .options = options, .table = out};

    if (options->n_dialogues == 0)
        return fail_with(failure, "there are no dialogues");
    exam_default(options->set, options->grid, &run.exam);
    for (int e = 0; e < N_DIALOGUES; e++) {
        const double start = seconds_now();
        if (!(options->experiments & 1u << e))
            continue;
        if (!parts[e](&run, failure))
            return false;
        if (!options->quiet)
            fprintf(stderr, "%s: %zu dialogues, %.1f s\n",
                    dialogue_name((enum dialogue_experiment)e), options->n_dialogues,
                    seconds_now() - start);
    }
    return true;
}
