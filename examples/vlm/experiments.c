/* The experiments: which rows they have, and what each row does to the cache. */
#include "experiments.h"

#include <stdio.h>
#include <string.h>

#include "args.h"
#include "dialogue.h"

/* A row as it is written down. */
struct line {
    const char *name;
    double x;
    enum hall hall;
    struct treatment treatment;
};

#define INT8_TOKEN .format = KVC_INT8, .scale = KVC_SCALE_TOKEN
#define INT4_TOKEN .format = KVC_INT4, .scale = KVC_SCALE_TOKEN
#define INT8_HEAD  .format = KVC_INT8, .scale = KVC_SCALE_HEAD
#define INT4_HEAD  .format = KVC_INT4, .scale = KVC_SCALE_HEAD

static const struct line first_lines[] = {
    {"f16", 0, HALL_MAIN, {0}},
    {"prune30", 0, HALL_MAIN, {.rate = 0.3f}},
    {"prune30+int8", 0, HALL_MAIN, {.rate = 0.3f, INT8_TOKEN}},
    {"prune30+int8+merge", 0, HALL_MAIN, {.rate = 0.3f, INT8_TOKEN, .rounds = 2}},
};

/* The last profile merges a quarter in each round; at a cosine of 0.85 its rounds find few pairs.
 */
static const struct line second_lines[] = {
    {"f16", 0, HALL_MAIN, {0}},
    {"light", 0, HALL_MAIN, {.preset = "light"}},
    {"balanced", 0, HALL_MAIN, {.preset = "balanced"}},
    {"aggressive", 0, HALL_MAIN, {.preset = "aggressive"}},
    {"extreme", 0, HALL_MAIN, {.preset = "extreme", .full_quarters = true}},
};

/* How far it goes: all rows INT4, which takes no pages of a second kind. */
static const struct line beyond_lines[] = {
    {"f16", 0, HALL_MAIN, {0}},
    {"prune30+int4", 0, HALL_MAIN, {.rate = 0.3f, INT4_TOKEN}},
    {"prune30+int4+merge", 2, HALL_MAIN, {.rate = 0.3f, INT4_TOKEN, .rounds = 2}},
    {"prune50+int4+merge", 2, HALL_MAIN, {.rate = 0.5f, INT4_TOKEN, .rounds = 2}},
    {"prune65+int4+merge", 2, HALL_MAIN, {.rate = 0.65f, INT4_TOKEN, .rounds = 2}},
    {"prune65+int4+merge", 3, HALL_MAIN, {.rate = 0.65f, INT4_TOKEN, .rounds = 3}},
};

static const struct line precision_lines[] = {
    {"f16", 0, HALL_MAIN, {0}},
    {"int8 token", 0, HALL_MAIN, {INT8_TOKEN}},
    {"int8 head", 64, HALL_MAIN, {INT8_HEAD, .application = APPLY_SEAL, .window = 64}},
    {"int8 head", 256, HALL_MAIN, {INT8_HEAD, .application = APPLY_SEAL, .window = 256}},
    {"int8 head", 512, HALL_MAIN, {INT8_HEAD, .application = APPLY_SEAL, .window = 512}},
    {"int4 token", 0, HALL_MAIN, {INT4_TOKEN}},
    {"int4 head", 64, HALL_MAIN, {INT4_HEAD, .application = APPLY_SEAL, .window = 64}},
    {"int4 head", 256, HALL_MAIN, {INT4_HEAD, .application = APPLY_SEAL, .window = 256}},
    {"int4 head", 512, HALL_MAIN, {INT4_HEAD, .application = APPLY_SEAL, .window = 512}},
    {"int4 heavy", 0.0, HALL_MAIN, {INT4_TOKEN}},
    {"int4 heavy", 0.1, HALL_MAIN, {INT4_TOKEN, .heavy = 0.1f}},
    {"int4 heavy", 0.2, HALL_MAIN, {INT4_TOKEN, .heavy = 0.2f}},
    {"int4 heavy", 0.4, HALL_MAIN, {INT4_TOKEN, .heavy = 0.4f}},
};

static const struct line outlier_lines[] = {
    {"f16", 0, HALL_MAIN, {0}},
    {"int4 token", 0, HALL_MAIN, {INT4_TOKEN}},
    {"int4 head", 0, HALL_MAIN, {INT4_HEAD}},
    {"outliers f16", 0, HALL_OUTLIERS, {0}},
    {"outliers int4 token", 0, HALL_OUTLIERS, {INT4_TOKEN}},
    {"outliers int4 head", 0, HALL_OUTLIERS, {INT4_HEAD}},
    {"smoothed f16", 0, HALL_SMOOTHED, {0}},
    {"smoothed int4 token", 0, HALL_SMOOTHED, {INT4_TOKEN}},
    {"smoothed int4 head", 0, HALL_SMOOTHED, {INT4_HEAD}},
};

static const struct line small_lines[] = {
    {"f16", 0, HALL_SMALL, {0}},
    {"prune", 30, HALL_SMALL, {.rate = 0.3f}},
    {"guarded", 30, HALL_SMALL, {.rate = 0.3f, .gate = true}},
    {"prune", 50, HALL_SMALL, {.rate = 0.5f}},
    {"guarded", 50, HALL_SMALL, {.rate = 0.5f, .gate = true}},
};

/* A second prefill costs as much as ten compressions: fewer questions. */
enum { N_AGAIN = 300 };

#define AGAIN(how) .application = (how), .n_items = N_AGAIN

static const struct line position_lines[] = {
    {"again", 30, HALL_MAIN, {.rate = 0.3f, AGAIN(APPLY_AGAIN)}},
    {"renumbered", 30, HALL_MAIN, {.rate = 0.3f, AGAIN(APPLY_RENUMBERED)}},
    {"again", 50, HALL_MAIN, {.rate = 0.5f, AGAIN(APPLY_AGAIN)}},
    {"renumbered", 50, HALL_MAIN, {.rate = 0.5f, AGAIN(APPLY_RENUMBERED)}},
    {"again", 65, HALL_MAIN, {.rate = 0.65f, AGAIN(APPLY_AGAIN)}},
    {"renumbered", 65, HALL_MAIN, {.rate = 0.65f, AGAIN(APPLY_RENUMBERED)}},
};

/* Prunes leave as many rows as rounds of full quarters do: 432, 324, 243 of 576. Sinks would not
 * merge, and quarters of the rest would be less. */
#define QUARTERS(n) .rounds = (n), .full_quarters = true, .no_sinks = true

static const struct line merge_lines[] = {
    {"bias", 0, HALL_MAIN, {0}},
    {"bias", 1, HALL_MAIN, {QUARTERS(1)}},
    {"bias", 2, HALL_MAIN, {QUARTERS(2)}},
    {"bias", 3, HALL_MAIN, {QUARTERS(3)}},
    {"no bias", 0, HALL_MAIN, {0}},
    {"no bias", 1, HALL_MAIN, {QUARTERS(1), .application = APPLY_NO_BIAS}},
    {"no bias", 2, HALL_MAIN, {QUARTERS(2), .application = APPLY_NO_BIAS}},
    {"no bias", 3, HALL_MAIN, {QUARTERS(3), .application = APPLY_NO_BIAS}},
    {"prune", 0, HALL_MAIN, {0}},
    {"prune", 1, HALL_MAIN, {.rate = 0.25f}},
    {"prune", 2, HALL_MAIN, {.rate = 0.4375f}},
    {"prune", 3, HALL_MAIN, {.rate = 0.578125f}},
};

static const struct line paired_lines[] = {
    {"f16", 2, HALL_LONG, {0}},
    {"prune", 2, HALL_LONG, {.rate = 0.4375f}},
    {"merge", 2, HALL_LONG, {QUARTERS(2)}},
};

/* What defaults are chosen by, on the tuning set: rows that lose something, so that choices differ.
 */
#define SOFT(t, c, x)                                                                              \
    .score = SCORE_SOFT, .rate = 0.6f, .soft = {.temperature = (t), .centre = (c), .texture = (x)}
#define TAU(t) .rate = 0.3f, INT8_TOKEN, .rounds = 3, .tau = (t)

static const struct line tune_lines[] = {
    {"f16", 0, HALL_MAIN, {0}},
    {"layers", 1, HALL_MAIN, {.rate = 0.6f, .layers = 1}},
    {"layers", 2, HALL_MAIN, {.rate = 0.6f, .layers = 2}},
    {"layers", 3, HALL_MAIN, {.rate = 0.6f, .layers = 3}},
    {"layers", 4, HALL_MAIN, {.rate = 0.6f, .layers = 4}},
    {"layers", 5, HALL_MAIN, {.rate = 0.6f, .layers = 5}},
    {"middle", 0, HALL_MAIN, {.rate = 0.6f, .score = SCORE_MIDDLE}},
    {"centre", 0.0, HALL_MAIN, {SOFT(0.7f, 0.0f, 0.0f)}},
    {"centre", 0.02, HALL_MAIN, {SOFT(0.7f, 0.02f, 0.0f)}},
    {"centre", 0.1, HALL_MAIN, {SOFT(0.7f, 0.1f, 0.0f)}},
    {"centre", 0.3, HALL_MAIN, {SOFT(0.7f, 0.3f, 0.0f)}},
    {"texture", 0.02, HALL_MAIN, {SOFT(0.7f, 0.0f, 0.02f)}},
    {"texture", 0.05, HALL_MAIN, {SOFT(0.7f, 0.0f, 0.05f)}},
    {"texture", 0.2, HALL_MAIN, {SOFT(0.7f, 0.0f, 0.2f)}},
    {"texture", 1.0, HALL_MAIN, {SOFT(0.7f, 0.0f, 1.0f)}},
    {"temperature, texture 0.2", 0.5, HALL_MAIN, {SOFT(0.5f, 0.0f, 0.2f)}},
    {"temperature, texture 0.2", 1, HALL_MAIN, {SOFT(1.0f, 0.0f, 0.2f)}},
    {"temperature, texture 0.2", 2, HALL_MAIN, {SOFT(2.0f, 0.0f, 0.2f)}},
    {"tau", 0.7, HALL_MAIN, {TAU(0.7f)}},
    {"tau", 0.8, HALL_MAIN, {TAU(0.8f)}},
    {"tau", 0.85, HALL_MAIN, {TAU(0.85f)}},
    {"tau", 0.9, HALL_MAIN, {TAU(0.9f)}},
    {"tau", 0.95, HALL_MAIN, {TAU(0.95f)}},
    {"heavy", 0.0, HALL_MAIN, {.rate = 0.65f, INT4_TOKEN, .rounds = 2}},
    {"heavy", 0.1, HALL_MAIN, {.rate = 0.65f, INT4_TOKEN, .rounds = 2, .heavy = 0.1f}},
    {"heavy", 0.2, HALL_MAIN, {.rate = 0.65f, INT4_TOKEN, .rounds = 2, .heavy = 0.2f}},
};

/* The sweep has too many rows to write down. */
static const int sweep_percents[] = {0, 10, 20, 30, 40, 50, 60, 70};

#define LINES(lines) (lines), sizeof(lines) / sizeof(*(lines))

/* An experiment of several names, as "merge" with a row for each question, stands here for each. */
static const struct experiment {
    const char *name, *of; /* of the rows; of the experiment that is asked for */
    const struct line *lines;
    size_t n_lines;
    const char *reference;
    int asked;
    bool measure_error;
} experiments[] = {
    {"first", "first", LINES(first_lines), "f16", 0, true},
    {"second", "second", LINES(second_lines), "f16", 0, true},
    {"beyond", "beyond", LINES(beyond_lines), "f16", 0, true},
    {"sweep", "sweep", NULL, 0, "f16", 0, false},
    {"merge1", "merge", LINES(merge_lines), "prune", 0, true},
    {"merge2", "merge", LINES(merge_lines), "prune", 1, true},
    {"paired", "paired", LINES(paired_lines), "prune", 1, false},
    {"precision", "precision", LINES(precision_lines), "f16", 0, true},
    {"outliers", "outliers", LINES(outlier_lines), "f16", 0, true},
    {"small", "small", LINES(small_lines), "f16", 0, false},
    {"positions", "positions", LINES(position_lines), "again", 0, false},
    {"tune", "tune", LINES(tune_lines), "f16", 0, true},
};

enum { N_EXPERIMENTS = sizeof(experiments) / sizeof(*experiments) };

const char *experiment_names(void)
{
    return "first,second,beyond,sweep,merge,paired,precision,outliers,small,positions,dialogue,"
           "gate,turns,pitfalls,tune";
}

static bool same_treatment(const struct treatment *a, const struct treatment *b)
{
    const char *p = a->preset ? a->preset : "", *q = b->preset ? b->preset : "";

    return a->score == b->score && a->application == b->application && strcmp(p, q) == 0 &&
           !(a->rate < b->rate) && !(a->rate > b->rate) && a->format == b->format &&
           a->layers == b->layers && !(a->tau < b->tau) && !(a->tau > b->tau) &&
           soft_equal(&a->soft, &b->soft) && a->scale == b->scale && a->window == b->window &&
           !(a->heavy < b->heavy) && !(a->heavy > b->heavy) && a->rounds == b->rounds &&
           a->full_quarters == b->full_quarters && a->gate == b->gate &&
           a->no_sinks == b->no_sinks && a->n_items == b->n_items;
}

static bool make_setting(const struct treatment *t, struct setting *out, struct failure *failure)
{
    kvc_policy *policy = &out->policy;

    setting_default(t->score, out);
    out->application = t->application;
    out->scale_window = t->window;
    out->n_items = t->n_items;
    out->ask_first = false;
    if (t->preset) {
        const kvc_policy article = *policy;
        if (kvc_policy_preset(t->preset, policy) != KVC_OK)
            return fail_with(failure, "the library has no profile \"%.40s\"", t->preset);
        policy->source = article.source;
        policy->layers = article.layers;
        policy->last_layers = article.last_layers;
    } else {
        policy->visual_rate = t->rate;
        policy->precision = (kvc_precision){
            .k = t->format, .v = t->format, .k_scale = t->scale, .v_scale = t->scale};
        policy->heavy_share = t->heavy;
        policy->merge_rounds = t->rounds;
        policy->gate = t->gate;
        if (t->layers > 0)
            policy->last_layers = t->layers;
        if (t->tau > 0.0f)
            policy->merging.tau = t->tau;
        if (t->soft.temperature > 0.0f)
            out->soft = t->soft;
    }
    policy->merging.force_quarter = t->full_quarters;
    if (t->no_sinks)
        policy->sink_factor = 0.0f;
    return true;
}

static bool add_row(struct plan *plan, const struct experiment *e, const struct line *line,
                    struct failure *failure)
{
    struct hall_plan *hall = &plan->halls[line->hall];
    size_t s = 0;

    while (s < hall->n_settings && !same_treatment(&hall->treatments[s], &line->treatment))
        s++;
    if (plan->n_rows == MAX_PLANNED || s == MAX_SETTINGS)
        return fail_with(failure, "too many rows");
    if (s == hall->n_settings) {
        if (!make_setting(&line->treatment, &hall->settings[s], failure))
            return false;
        hall->treatments[s] = line->treatment;
        hall->n_settings++;
    }
    struct setting *setting = &hall->settings[s];
    setting->measure_error = setting->measure_error || e->measure_error;
    setting->ask_first = setting->ask_first || e->asked == 0;
    setting->ask_second = setting->ask_second || e->asked == 1;
    struct planned_row *row = &plan->rows[plan->n_rows++];
    *row = (struct planned_row){.experiment = e->name,
                                .x = line->x,
                                .reference = e->reference,
                                .hall = line->hall,
                                .setting = s,
                                .asked = e->asked};
    snprintf(row->name, sizeof(row->name), "%s", line->name);
    return true;
}

/* Each score, and the second prefill by the article's, at each rate; at 0 all are the same. */
static bool add_sweep(struct plan *plan, const struct experiment *e, struct failure *failure)
{
    const struct line whole = {.name = "f16"};

    if (!add_row(plan, e, &whole, failure))
        return false;
    for (int kind = 0; kind <= N_SCORES; kind++)
        for (size_t i = 0; i < sizeof(sweep_percents) / sizeof(*sweep_percents); i++) {
            const bool again = kind == N_SCORES;
            struct line line = {.name = again ? "again" : score_name((enum score_kind)kind),
                                .x = sweep_percents[i],
                                .hall = HALL_MAIN};
            if (sweep_percents[i] > 0) {
                line.treatment.rate = (float)sweep_percents[i] / 100.0f;
                line.treatment.score = again ? SCORE_ARTICLE : (enum score_kind)kind;
                line.treatment.application = again ? APPLY_AGAIN : APPLY_DROP;
                line.treatment.n_items = again ? N_AGAIN : 0;
            }
            if (!add_row(plan, e, &line, failure))
                return false;
        }
    return true;
}

bool experiments_known(const char *list, struct failure *failure)
{
    char name[32];

    while (args_next_item(&list, name, sizeof(name))) {
        bool known = strcmp(name, "all") == 0;
        for (size_t i = 0; i < N_EXPERIMENTS; i++)
            known = known || strcmp(experiments[i].of, name) == 0;
        for (int d = 0; d < N_DIALOGUES; d++)
            known = known || strcmp(dialogue_name((enum dialogue_experiment)d), name) == 0;
        if (!known)
            return fail_with(failure, "\"%.40s\" is no experiment; all, %s are", name,
                             experiment_names());
    }
    return true;
}

static bool add_experiment(struct plan *plan, const char *name, struct failure *failure)
{
    const bool all = strcmp(name, "all") == 0;

    for (size_t i = 0; i < N_EXPERIMENTS; i++) {
        const struct experiment *e = &experiments[i];
        if (strcmp(e->of, name) != 0 && (!all || strcmp(e->of, "tune") == 0))
            continue; /* tuning is no result */
        if (!e->lines && !add_sweep(plan, e, failure))
            return false;
        for (size_t l = 0; l < e->n_lines; l++)
            if (!add_row(plan, e, &e->lines[l], failure))
                return false;
    }
    return true;
}

bool plan_make(const char *list, struct plan *out, struct failure *failure)
{
    char name[32];

    memset(out, 0, sizeof(*out));
    if (!list || !*list)
        return fail_with(failure, "no experiments are given");
    if (!experiments_known(list, failure))
        return false;
    while (args_next_item(&list, name, sizeof(name)))
        if (!add_experiment(out, name, failure))
            return false;
    return true;
}
