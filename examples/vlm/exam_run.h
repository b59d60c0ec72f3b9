/* Runs experiments on a model. */
#ifndef VLM_EXAM_RUN_H
#define VLM_EXAM_RUN_H

#include "rows.h"
#include "vlm.h"

struct exam_options {
    const char *experiments; /* names with commas, or "all" */
    size_t n;                /* questions; "paired" asks LONG_FACTOR times as many */
    bool tune;               /* of EXAM_TUNE, else of EXAM_REPORT */
    size_t threads;          /* 0: the processors that this process may run on */
    const char *kernels;     /* of libkvc; NULL: the best */
    bool quiet;              /* no progress on standard error */
};

/* Adds the rows of the experiments, in their order. */
bool exam_run(const struct vlm *vlm, const struct exam_options *options, struct row_table *out,
              struct failure *failure);

#endif
