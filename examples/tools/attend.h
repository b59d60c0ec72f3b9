/* attend.h - rows of 'kvc-bench attend' and how they are printed. */
#ifndef KVC_TOOLS_ATTEND_H
#define KVC_TOOLS_ATTEND_H

#include "grid.h"
#include "machine.h"

/* What became of the rows of the cache. */
enum attend_state { ATTEND_WHOLE, ATTEND_HOLES, ATTEND_COMPACTED, ATTEND_N_STATES };
extern const char *const attend_states[ATTEND_N_STATES];

/* Names of kvc_score_mode. */
enum { ATTEND_N_SCORES = 3 };
extern const char *const attend_scores[ATTEND_N_SCORES];

/* One measurement. */
struct attend_row {
    struct bench_shape shape;
    const char *table;
    bool exact; /* kvc_attend_options::exact */
    long n_threads;
    long scores; /* what attention adds up: index of attend_scores */
    enum attend_state state;
    double keep; /* share of the rows; 1 if whole */
    long block;  /* tokens that went or stayed together; 0 if whole */
    double us;
    size_t bytes; /* of the pages that it reads */
    double gbps;
    double gflops;    /* 4 head_dim operations a row and query head */
    double append_us; /* of a token, its share of sealing included; 0: not measured */
};

void attend_print_json(const struct attend_row *rows, size_t n_rows, const struct machine *machine);
void attend_print_table(const struct attend_row *rows, size_t n_rows,
                        const struct machine *machine);

#endif
