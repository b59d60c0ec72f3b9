/* The experiments: which rows they have, and what each row does to the cache. */
#ifndef VLM_EXPERIMENTS_H
#define VLM_EXPERIMENTS_H

#include "failure.h"
#include "setting.h"

/* Where items are prepared once for all settings. */
enum hall {
    HALL_MAIN,  /* 24 x 24 patches */
    HALL_LONG,  /* the same with LONG_FACTOR times as many other questions, for small differences */
    HALL_SMALL, /* 16 x 16 patches */
    HALL_OUTLIERS, /* as the main one, with outliers injected into the keys */
    HALL_SMOOTHED, /* the same, smoothed */
    N_HALLS
};

enum { LONG_FACTOR = 5, MAX_SETTINGS = 160, MAX_PLANNED = 256 };

/* What is done to a cache. Zeros: nothing, as F16. */
struct treatment {
    enum score_kind score;
    enum application application;
    const char *preset; /* a profile of the library, with the scores of SCORE_ARTICLE; or NULL */
    int32_t layers;     /* of SCORE_ARTICLE; 0: as many as usual */
    struct soft_weights soft; /* of SCORE_SOFT; a temperature of 0: the usual ones */
    float rate;               /* of visual tokens */
    kvc_format format;        /* of K and V */
    kvc_scale scale;
    int32_t window;     /* APPLY_SEAL */
    float heavy;        /* share of the rows that stay F16 */
    int32_t rounds;     /* of merging */
    float tau;          /* least cosine of a pair; 0: the library's */
    bool full_quarters; /* each round merges a quarter of the tokens, however unlike */
    bool gate;          /* with its guard of small images */
    bool no_sinks;      /* no patch is spared for its score: rows are as many as rates say */
    size_t n_items;     /* asked of the first items only; 0: of all */
};

struct planned_row {
    char name[48];
    const char *experiment;
    double x;
    const char *reference; /* the row it is paired with: of the same x, or of x = 0 */
    enum hall hall;
    size_t setting; /* of the hall */
    int asked;      /* 0 or 1 */
};

struct hall_plan {
    struct setting settings[MAX_SETTINGS];
    struct treatment treatments[MAX_SETTINGS];
    size_t n_settings;
};

struct plan {
    struct planned_row rows[MAX_PLANNED];
    size_t n_rows;
    struct hall_plan halls[N_HALLS];
};

/* Plans the experiments of a list "first,sweep" or "all"; equal treatments of a hall are one
 * setting. Experiments over dialogues have no rows in a plan. */
bool plan_make(const char *experiments, struct plan *out, struct failure *failure);

/* Whether plan_make() knows all names of a list. */
bool experiments_known(const char *list, struct failure *failure);

/* The names of all experiments, with commas. */
const char *experiment_names(void);

#endif
