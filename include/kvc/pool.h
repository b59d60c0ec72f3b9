/** @file kvc/pool.h
 * A small thread pool for programs that have none (target kvc::pool, library kvc_pool).
 */
#ifndef KVC_POOL_H
#define KVC_POOL_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Threads that sleep between calls. Opaque. */
typedef struct kvc_pool kvc_pool;

/**
 * Start a pool.
 *
 * @param n_threads  Threads that work at the same time, the calling one included: 1..1024; 0 takes
 *                   the processors that this process may run on.
 * @param[out] out   The pool; NULL after any failure.
 *
 * @retval KVC_OK       n_threads - 1 threads wait; none of them spins.
 * @retval KVC_E_ARG    @p out is NULL or @p n_threads is above 1024.
 * @retval KVC_E_NOMEM  No memory, or the system refused a thread; those already started were ended.
 */
KVC_API kvc_status kvc_pool_create(size_t n_threads, kvc_pool **out);

/** End the threads and free the pool. @param pool  May be NULL; no call may be running in it. */
KVC_API void kvc_pool_destroy(kvc_pool *pool);

/** Threads that work at the same time, the calling one included. @param pool  A pool. @return The
 * count. */
KVC_API size_t kvc_pool_n_threads(const kvc_pool *pool);

/**
 * Run @p n_tasks tasks on the pool: a kvc_parallel_for_fn, for kvc_ctx_params::parallel_for with
 * the pool as parallel_user. Calls from several threads queue up; a task may not call it on its own
 * pool.
 *
 * @param pool     The kvc_pool.
 * @param n_tasks  Tasks; 0 returns at once.
 * @param task     Called once for each index, on any of the threads.
 * @param arg      First argument of @p task.
 */
KVC_API void kvc_pool_parallel_for(void *pool, size_t n_tasks, void (*task)(void *arg, size_t i),
                                   void *arg);

#ifdef __cplusplus
}
#endif
#endif
