/* measure.c - clock, median and threads of kvc-bench. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench.h"

int bench_fail(const char *what, kvc_status status)
{
    fprintf(stderr, "kvc-bench: %s: %s\n", what, kvc_status_str(status));
    return BENCH_FAILED;
}

double bench_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *samples, size_t n)
{
    qsort(samples, n, sizeof *samples, compare);
    return n % 2 ? samples[n / 2] : 0.5 * (samples[n / 2 - 1] + samples[n / 2]);
}

void bench_parallel_for(void *user, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg)
{
    struct bench_threads *threads = user;
    if (threads->pool) {
        kvc_pool_parallel_for(threads->pool, n_tasks, task, arg);
        return;
    }
    for (size_t i = 0; i < n_tasks; i++)
        task(arg, i);
}

void bench_threads_end(struct bench_threads *threads)
{
    kvc_pool_destroy(threads->pool);
    threads->pool = NULL;
}

kvc_status bench_threads_set(struct bench_threads *threads, size_t n_threads)
{
    bench_threads_end(threads);
    return n_threads > 1 ? kvc_pool_create(n_threads, &threads->pool) : KVC_OK;
}
