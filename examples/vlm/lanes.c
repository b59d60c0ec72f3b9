/* Runs the jobs of an experiment on several threads, each with a reader of its own. */
#include "lanes.h"

#include <stdlib.h>

#include <kvc/pool.h>

struct lanes {
    const struct vlm *vlm;
    const char *kernels;
    size_t n_lanes, n_jobs;
    lane_job *job;
    void *arg;
    struct lane {
        bool ok;
        struct failure failure;
    } * lanes;
};

static bool run_lane(struct lanes *l, size_t lane, struct failure *failure)
{
    struct reader reader;

    if (!reader_open(l->vlm, l->kernels, &reader, failure))
        return false;
    bool ok = true;
    for (size_t i = lane; i < l->n_jobs && ok; i += l->n_lanes)
        ok = l->job(l->arg, &reader, i, failure);
    reader_close(&reader);
    return ok;
}

static void lane_task(void *arg, size_t i)
{
    struct lanes *l = arg;

    l->lanes[i].ok = run_lane(l, i, &l->lanes[i].failure);
}

bool lanes_run(const struct vlm *vlm, const char *kernels, size_t n_threads, size_t n_jobs,
               lane_job *job, void *arg, struct failure *failure)
{
    struct lanes l = {.vlm = vlm, .kernels = kernels, .n_jobs = n_jobs, .job = job, .arg = arg};
    kvc_pool *pool;

    if (kvc_pool_create(n_threads, &pool) != KVC_OK)
        return fail_with(failure, "cannot start threads");
    l.n_lanes = kvc_pool_n_threads(pool);
    l.lanes = calloc(l.n_lanes, sizeof(*l.lanes));
    bool ok = l.lanes != NULL || fail_with(failure, "out of memory");
    if (ok)
        kvc_pool_parallel_for(pool, l.n_lanes, lane_task, &l);
    for (size_t i = 0; ok && i < l.n_lanes; i++)
        if (!l.lanes[i].ok) {
            *failure = l.lanes[i].failure;
            ok = false;
        }
    free(l.lanes);
    kvc_pool_destroy(pool);
    return ok;
}
