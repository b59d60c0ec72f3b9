/* Runs the jobs of an experiment on several threads, each with a reader of its own. */
#ifndef VLM_LANES_H
#define VLM_LANES_H

#include "vlm.h"

/* Job @p i; what it writes must depend on i alone. */
typedef bool lane_job(void *arg, struct reader *reader, size_t i, struct failure *failure);

/* kernels as reader_open(); n_threads 0: the processors that this process may run on. */
bool lanes_run(const struct vlm *vlm, const char *kernels, size_t n_threads, size_t n_jobs,
               lane_job *job, void *arg, struct failure *failure);

#endif
