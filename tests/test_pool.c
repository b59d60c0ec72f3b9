/* test_pool.c - the promises of kvc/pool.h. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "kvc/pool.h"

#include <cmocka.h>

enum { MAX_TASKS = 1000, MAX_POLLS = 1000000 };

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

/* A job that counts itself. */
struct job {
    atomic_int runs[MAX_TASKS];
    atomic_int *active;      /* tasks that run now, shared by all jobs of a pool */
    atomic_int *most_active; /* most that ever did */
    int plain[MAX_TASKS];    /* written without atomics: visible after the call */
};

static void count(void *arg, size_t i)
{
    struct job *job = arg;
    const int now = atomic_fetch_add(job->active, 1) + 1;
    int most = atomic_load(job->most_active);

    while (now > most && !atomic_compare_exchange_weak(job->most_active, &most, now)) {
    }
    atomic_fetch_add(&job->runs[i], 1);
    job->plain[i]++;
    sched_yield();
    atomic_fetch_sub(job->active, 1);
}

static void clear(struct job *job)
{
    memset(job->runs, 0, sizeof(job->runs));
    memset(job->plain, 0, sizeof(job->plain));
}

static void assert_each_ran(const struct job *job, size_t n_tasks, int times)
{
    for (size_t i = 0; i < MAX_TASKS; i++) {
        assert_int_equal(atomic_load(&job->runs[i]), i < n_tasks ? times : 0);
        assert_int_equal(job->plain[i], i < n_tasks ? times : 0);
    }
}

/* Threads of this process, and those of them that sleep; a spinning one never does. */
static void count_threads(size_t *n_all, size_t *n_asleep)
{
    DIR *dir = opendir("/proc/self/task");

    assert_non_null(dir);
    *n_all = *n_asleep = 0;
    for (const struct dirent *e; (e = readdir(dir)) != NULL;) {
        char path[64], state = 0;
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "/proc/self/task/%.20s/stat", e->d_name);
        FILE *f = fopen(path, "r");
        if (!f) /* ended in between */
            continue;
        if (fscanf(f, "%*d (%*[^)]) %c", &state) == 1) {
            *n_all += 1;
            *n_asleep += state == 'S';
        }
        fclose(f);
    }
    closedir(dir);
}

static size_t n_threads_now(void)
{
    size_t n_all, n_asleep;

    count_threads(&n_all, &n_asleep);
    return n_all;
}

/* Waits until the process is back at n threads: an ended thread stays listed for a moment. */
static void assert_threads_become(size_t n)
{
    for (int i = 0; i < MAX_POLLS && n_threads_now() != n; i++)
        sched_yield();
    assert_int_equal(n_threads_now(), n);
}

static void runs_every_index_once(void **state)
{
    static const size_t n_tasks[] = {0, 1, 2, 3, 7, 64, MAX_TASKS};
    static const size_t n_threads[] = {1, 2, 3, 8};
    static struct job job;
    atomic_int active = 0, most = 0;

    (void)state;
    job.active = &active;
    job.most_active = &most;
    for (size_t t = 0; t < sizeof(n_threads) / sizeof(*n_threads); t++) {
        kvc_pool *pool;
        assert_int_equal(kvc_pool_create(n_threads[t], &pool), KVC_OK);
        assert_int_equal(kvc_pool_n_threads(pool), n_threads[t]);
        for (size_t n = 0; n < sizeof(n_tasks) / sizeof(*n_tasks); n++) {
            clear(&job);
            kvc_pool_parallel_for(pool, n_tasks[n], count, &job);
            assert_each_ran(&job, n_tasks[n], 1);
        }
        kvc_pool_destroy(pool);
    }
}

static void runs_many_short_jobs(void **state)
{
    static struct job job;
    atomic_int active = 0, most = 0;
    kvc_pool *pool;

    (void)state;
    clear(&job);
    job.active = &active;
    job.most_active = &most;
    assert_int_equal(kvc_pool_create(3, &pool), KVC_OK);
    for (int i = 0; i < 2000; i++)
        kvc_pool_parallel_for(pool, 3, count, &job);
    assert_each_ran(&job, 3, 2000);
    kvc_pool_destroy(pool);
}

struct caller {
    pthread_t thread;
    kvc_pool *pool;
    struct job job;
};

static void *call_often(void *arg)
{
    struct caller *caller = arg;

    for (int i = 0; i < 50; i++)
        kvc_pool_parallel_for(caller->pool, 20, count, &caller->job);
    return NULL;
}

/* Known fault I5: pools that together run more threads than asked. */
static void never_runs_more_threads_than_asked(void **state)
{
    enum { N_CALLERS = 4, N_THREADS = 2 };
    static struct caller callers[N_CALLERS];
    atomic_int active = 0, most = 0;
    kvc_pool *pool;

    (void)state;
    assert_int_equal(kvc_pool_create(N_THREADS, &pool), KVC_OK);
    for (size_t i = 0; i < N_CALLERS; i++) {
        callers[i].pool = pool;
        callers[i].job.active = &active;
        callers[i].job.most_active = &most;
        assert_int_equal(pthread_create(&callers[i].thread, NULL, call_often, &callers[i]), 0);
    }
    for (size_t i = 0; i < N_CALLERS; i++)
        assert_int_equal(pthread_join(callers[i].thread, NULL), 0);
    for (size_t i = 0; i < N_CALLERS; i++)
        assert_each_ran(&callers[i].job, 20, 50);
    assert_in_range(atomic_load(&most), 1, N_THREADS);
    assert_int_equal(atomic_load(&active), 0);
    kvc_pool_destroy(pool);
}

/* Known fault I5: no spinning pool stays behind a call. */
static void workers_sleep_between_calls(void **state)
{
    static struct job job;
    atomic_int active = 0, most = 0;
    size_t n_all = 0, n_asleep = 0;
    kvc_pool *pool;

    (void)state;
    job.active = &active;
    job.most_active = &most;
    assert_int_equal(kvc_pool_create(4, &pool), KVC_OK);
    kvc_pool_parallel_for(pool, MAX_TASKS, count, &job);
    for (int i = 0; i < MAX_POLLS && n_asleep + 1 != n_all; i++) {
        sched_yield();
        count_threads(&n_all, &n_asleep);
    }
    assert_int_equal(n_asleep + 1, n_all);
    kvc_pool_destroy(pool);
}

static void create_and_destroy_leave_no_thread(void **state)
{
    const size_t before = n_threads_now();

    (void)state;
    for (size_t i = 0; i < 200; i++) {
        kvc_pool *pool;
        assert_int_equal(kvc_pool_create(1 + i % 5, &pool), KVC_OK);
        kvc_pool_destroy(pool);
    }
    assert_threads_become(before);
    kvc_pool_destroy(NULL);
}

static void zero_takes_the_processors_of_the_process(void **state)
{
    cpu_set_t all, one;
    kvc_pool *pool;
    size_t cpu = 0;

    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof(all), &all), 0);
    assert_int_equal(kvc_pool_create(0, &pool), KVC_OK);
    assert_int_equal(kvc_pool_n_threads(pool), CPU_COUNT(&all));
    kvc_pool_destroy(pool);

    while (!CPU_ISSET(cpu, &all))
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0);
    assert_int_equal(kvc_pool_create(0, &pool), KVC_OK);
    assert_int_equal(kvc_pool_n_threads(pool), 1);
    kvc_pool_destroy(pool);
    assert_int_equal(sched_setaffinity(0, sizeof(all), &all), 0);
}

static void rejects_bad_arguments(void **state)
{
    kvc_pool *pool = (kvc_pool *)&pool;

    (void)state;
    assert_int_equal(kvc_pool_create(1, NULL), KVC_E_ARG);
    assert_int_equal(kvc_pool_create(1025, &pool), KVC_E_ARG);
    assert_null(pool);
}

static void reports_a_refused_thread(void **state)
{
    const size_t before = n_threads_now();
    kvc_pool *pool = (kvc_pool *)&pool;
    struct rlimit old, little;

    (void)state;
#ifdef SANITIZED /* its shadow memory exceeds any limit */
    skip();
#endif
    assert_int_equal(getrlimit(RLIMIT_AS, &old), 0);
    little = old;
    little.rlim_cur = (rlim_t)256 << 20;
    assert_int_equal(setrlimit(RLIMIT_AS, &little), 0);
    const kvc_status status = kvc_pool_create(1024, &pool); /* stacks of 1 GiB and more */
    assert_int_equal(setrlimit(RLIMIT_AS, &old), 0);
    assert_int_equal(status, KVC_E_NOMEM);
    assert_null(pool);
    assert_threads_become(before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_every_index_once),
        cmocka_unit_test(runs_many_short_jobs),
        cmocka_unit_test(never_runs_more_threads_than_asked),
        cmocka_unit_test(workers_sleep_between_calls),
        cmocka_unit_test(create_and_destroy_leave_no_thread),
        cmocka_unit_test(zero_takes_the_processors_of_the_process),
        cmocka_unit_test(rejects_bad_arguments),
        cmocka_unit_test(reports_a_refused_thread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
