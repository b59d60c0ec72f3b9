/* The experiments of dialogue.h, each in a file of its own. */
#ifndef VLM_DIALOGUE_PARTS_H
#define VLM_DIALOGUE_PARTS_H

#include "dialogue.h"
#include "lanes.h"
#include "talk.h"

struct dialogue_run {
    const struct vlm *vlm;
    const struct dialogue_options *options;
    struct exam exam;
    struct row_table *table;
};

bool dialogue_pool(struct dialogue_run *run, struct failure *failure);
bool dialogue_gate(struct dialogue_run *run, struct failure *failure);
bool dialogue_turns(struct dialogue_run *run, struct failure *failure);
bool dialogue_pitfalls(struct dialogue_run *run, struct failure *failure);

/* Runs jobs with the threads and kernels of the options. */
bool dialogue_lanes(const struct dialogue_run *run, size_t n_jobs, lane_job *job, void *arg,
                    struct failure *failure);

/* Adds a row with its hits counted. by_group: the questions are of groups 0, 1, 2 in turn. NULL: no
 * memory. */
struct row *dialogue_add(struct dialogue_run *run, const char *experiment, const char *name,
                         double x, const uint8_t *hits, size_t n, bool by_group);

/* An item of the exam; its picture is encoded into reader->rows. NULL: no memory. Free it. */
struct exam_item *dialogue_draw(const struct dialogue_run *run, struct reader *reader, size_t i,
                                struct failure *failure);

double mean_of(const double *values, size_t n);

#endif
