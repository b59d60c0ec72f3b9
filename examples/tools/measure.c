/* measure.c - clock, median, threads and memory of kvc-bench. */
#define _DEFAULT_SOURCE

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

void *bench_memory_get(struct bench_memory *memory, size_t n_bytes)
{
    static const size_t page = (size_t)2 << 20;
    if (n_bytes > SIZE_MAX - page)
        return NULL;
    size_t whole = (n_bytes + page - 1) / page * page;
    void *bytes = aligned_alloc(page, whole);
#ifdef MADV_HUGEPAGE
    /* Where it is refused the pages are small: no error. */
    if (bytes)
        (void)madvise(bytes, whole, memory->small_pages ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
#endif
    if (bytes && memory->touched)
        memset(bytes, 0, whole);
    return bytes;
}

static void *get(void *user, size_t size, size_t align)
{
    (void)align; /* at most 128 */
    return bench_memory_get(user, size);
}

static void put(void *user, void *bytes)
{
    (void)user;
    free(bytes);
}

kvc_allocator bench_allocator(struct bench_memory *memory)
{
    return (kvc_allocator){.alloc = get, .free = put, .user = memory};
}
