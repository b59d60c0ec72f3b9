/* pool.c - a thread pool: sleeping workers, one job at a time, callers queue up. */
#define _GNU_SOURCE
#include "kvc/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_THREADS = 1024 };

struct kvc_pool {
    pthread_mutex_t lock;
    pthread_cond_t work; /* a job has tasks left, or the pool ends */
    pthread_cond_t left; /* the last worker left the job */
    pthread_cond_t idle; /* the next caller may start its job */
    bool busy;           /* a caller owns the job below */
    bool stop;
    void (*task)(void *arg, size_t i);
    void *arg;
    size_t n_tasks;
    atomic_size_t next; /* first task that nobody has taken */
    size_t n_inside;    /* workers that run tasks of the job */
    size_t n_threads;
    size_t n_workers; /* threads started */
    pthread_t workers[];
};

static void run_tasks(struct kvc_pool *pool)
{
    size_t i;

    while ((i = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed)) < pool->n_tasks)
        pool->task(pool->arg, i);
}

static bool tasks_left(struct kvc_pool *pool)
{
    return atomic_load_explicit(&pool->next, memory_order_relaxed) < pool->n_tasks;
}

static void *worker(void *arg)
{
    struct kvc_pool *pool = arg;

    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stop && !tasks_left(pool))
            pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stop)
            break;
        pool->n_inside++;
        pthread_mutex_unlock(&pool->lock);
        run_tasks(pool);
        pthread_mutex_lock(&pool->lock);
        if (--pool->n_inside == 0)
            pthread_cond_signal(&pool->left);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static size_t n_processors(void)
{
    cpu_set_t set;
    long n;

    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        n = CPU_COUNT(&set);
    else /* more processors than the set can name */
        n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (size_t)n;
}

/* The program's signal handlers stay with the program's own threads. */
static bool start_workers(struct kvc_pool *pool)
{
    sigset_t all, old;
    bool ok = true;

    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &old) != 0)
        return false;
    while (ok && pool->n_workers + 1 < pool->n_threads) {
        ok = pthread_create(&pool->workers[pool->n_workers], NULL, worker, pool) == 0;
        pool->n_workers += ok;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return ok;
}

kvc_status kvc_pool_create(size_t n_threads, kvc_pool **out)
{
    if (!out)
        return KVC_E_ARG;
    *out = NULL;
    if (n_threads > MAX_THREADS)
        return KVC_E_ARG;
    if (n_threads == 0)
        n_threads = n_processors();

    struct kvc_pool *pool = calloc(1, sizeof(*pool) + (n_threads - 1) * sizeof(pthread_t));
    if (!pool)
        return KVC_E_NOMEM;
    pool->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool->work = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool->left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool->idle = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool->n_threads = n_threads;
    if (!start_workers(pool)) {
        kvc_pool_destroy(pool);
        return KVC_E_NOMEM;
    }
    *out = pool;
    return KVC_OK;
}

void kvc_pool_destroy(kvc_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (size_t i = 0; i < pool->n_workers; i++)
        pthread_join(pool->workers[i], NULL);
    pthread_cond_destroy(&pool->idle);
    pthread_cond_destroy(&pool->left);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

size_t kvc_pool_n_threads(const kvc_pool *pool)
{
    return pool->n_threads;
}

void kvc_pool_parallel_for(void *pool, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg)
{
    struct kvc_pool *p = pool;

    if (n_tasks == 0)
        return;
    pthread_mutex_lock(&p->lock);
    while (p->busy)
        pthread_cond_wait(&p->idle, &p->lock);
    p->busy = true;
    p->task = task;
    p->arg = arg;
    p->n_tasks = n_tasks;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    for (size_t i = 0; i < p->n_workers && i + 1 < n_tasks; i++)
        pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->lock);

    run_tasks(p);

    /* All tasks are taken, so no worker enters any more; those inside finish theirs. */
    pthread_mutex_lock(&p->lock);
    while (p->n_inside > 0)
        pthread_cond_wait(&p->left, &p->lock);
    p->busy = false;
    pthread_cond_signal(&p->idle);
    pthread_mutex_unlock(&p->lock);
}
