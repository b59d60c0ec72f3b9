/* Threads: contexts side by side, a parallel_for of real threads, and a process left as it was. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fenv.h>
#include <locale.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cmocka.h>

#include "kvc/kvc.h"
#include "support/rng.h"

enum { LAYERS = 2, HEADS = 4, KV_HEADS = 2, DIM = 64, STEP = 50, N_STEPS = 6, N_THREADS = 4 };

/* What one run of the workload gave; nothing is asserted off the main thread. */
struct result {
    kvc_ctx_params ctx_params;
    void (*after_call)(void);
    uint64_t seed;
    kvc_status status; /* the first that was not KVC_OK */
    float out[N_STEPS * LAYERS * STEP * HEADS * DIM];
};

static void note(struct result *r, kvc_status status)
{
    if (r->status == KVC_OK)
        r->status = status;
    if (r->after_call)
        r->after_call();
}

static kvc_view random_view(float *data, size_t heads, uint64_t *rng)
{
    for (size_t i = 0; i < STEP * heads * DIM; i++)
        data[i] = rng_unit(rng);
    return kvc_view_packed(data, KVC_DTYPE_F32, STEP, heads, DIM);
}

static void run_step(struct result *r, kvc_cache *cache, kvc_seq seq, int step, uint64_t *rng)
{
    float k_data[STEP * KV_HEADS * DIM], v_data[STEP * KV_HEADS * DIM], q_data[STEP * HEADS * DIM];

    note(r, kvc_tokens_add(cache, seq, NULL, STEP));
    for (int layer = 0; layer < LAYERS; layer++) {
        const kvc_view k = random_view(k_data, KV_HEADS, rng);
        const kvc_view v = random_view(v_data, KV_HEADS, rng);
        const kvc_view q = random_view(q_data, HEADS, rng);
        float *at = r->out + (size_t)(step * LAYERS + layer) * STEP * HEADS * DIM;
        const kvc_view out = kvc_view_packed(at, KVC_DTYPE_F32, STEP, HEADS, DIM);

        note(r, kvc_append(cache, seq, layer, &k, &v));
        note(r, kvc_attend(cache, seq, layer, &q, NULL, &out, NULL));
    }
}

static void run_sequences(struct result *r, kvc_cache *cache)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};
    kvc_seq seq, fork;
    uint64_t rng = r->seed;

    note(r, kvc_seq_create(cache, &seq));
    for (int step = 0; step < N_STEPS - 1; step++)
        run_step(r, cache, seq, step, &rng);
    note(r, kvc_seq_settle(cache, seq));
    note(r, kvc_seq_fork(cache, seq, &fork));
    note(r, kvc_seq_truncate(cache, fork, 130));
    note(r, kvc_seq_remove(cache, fork, 10, 100));
    note(r, kvc_cache_compress(cache, fork, NULL, NULL, NULL));
    run_step(r, cache, fork, N_STEPS - 1, &rng);
    note(r, kvc_cache_stats(cache, &stats));
    note(r, kvc_seq_destroy(cache, seq));
}

static void *run(void *user)
{
    struct result *r = user;
    kvc_cache_params p;
    kvc_cache *cache = NULL;
    kvc_ctx *ctx = NULL;

    r->status = KVC_OK;
    kvc_cache_params_default(&p);
    p.n_layers = LAYERS;
    p.n_heads = HEADS;
    p.n_kv_heads = KV_HEADS;
    p.head_dim_k = p.head_dim_v = DIM;
    p.max_sequences = 2;
    p.recent_tokens = 40;
    note(r, kvc_ctx_create(&r->ctx_params, &ctx));
    note(r, kvc_cache_min_budget(&p, &p.budget_bytes));
    p.budget_bytes += 1 << 20;
    note(r, kvc_cache_create(ctx, &p, &cache));
    if (r->status == KVC_OK)
        run_sequences(r, cache);
    kvc_cache_destroy(cache);
    kvc_ctx_destroy(ctx);
    if (r->after_call)
        r->after_call();
    return NULL;
}

static struct result *new_result(const char *kernels, uint64_t seed)
{
    struct result *r = calloc(1, sizeof(*r));

    assert_non_null(r);
    r->ctx_params.struct_size = sizeof(r->ctx_params);
    r->ctx_params.kernels = kernels;
    r->seed = seed;
    return r;
}

static void expect_same(const struct result *got, const struct result *want)
{
    assert_int_equal(got->status, KVC_OK);
    assert_int_equal(want->status, KVC_OK);
    assert_memory_equal(got->out, want->out, sizeof(got->out));
}

static void contexts_run_in_parallel(void **state)
{
    struct result *want[2], *got[2];
    pthread_t threads[2];

    (void)state;
    for (int i = 0; i < 2; i++) {
        want[i] = new_result(i ? "ref" : NULL, (uint64_t)i);
        got[i] = new_result(i ? "ref" : NULL, (uint64_t)i);
        run(want[i]);
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run, got[i]), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < 2; i++) {
        expect_same(got[i], want[i]);
        free(got[i]);
        free(want[i]);
    }
}

struct job {
    void (*task)(void *arg, size_t i);
    void *arg;
    size_t n_tasks;
    atomic_size_t next;
};

static void *work(void *user)
{
    struct job *job = user;

    for (;;) {
        const size_t i = atomic_fetch_add(&job->next, 1);

        if (i >= job->n_tasks)
            return NULL;
        job->task(job->arg, i);
    }
}

/* Starts threads for each call; user counts the calls that had several tasks. */
static void thread_each(void *user, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg)
{
    struct job job = {.task = task, .arg = arg, .n_tasks = n_tasks};
    int *n_parallel = user;
    pthread_t threads[N_THREADS];

    *n_parallel += n_tasks > 1;
    for (int i = 0; i < N_THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, &job) != 0)
            abort();
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
}

static void one_cache_may_use_many_threads(void **state)
{
    static const char *const names[] = {"ref", "avx2", "avx512", "vnni"};

    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        struct result *want = new_result(names[i], 3), *got = new_result(names[i], 3);
        int n_parallel = 0;

        got->ctx_params.parallel_for = thread_each;
        got->ctx_params.parallel_user = &n_parallel;
        run(want);
        run(got);
        if (want->status != KVC_E_UNSUPPORTED || i == 0) {
            expect_same(got, want);
            assert_true(n_parallel > 0);
        }
        free(want);
        free(got);
    }
}

/* What a library must leave as it is. */
struct process {
    int rounding;
    unsigned control; /* rounding, masks, flush to zero */
    char locale[256];
    cpu_set_t cpus;
    int n_threads;
};

static struct process before; /* any call of the library */

static int count_threads(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int n = 0;

    if (!tasks)
        return -1;
    for (const struct dirent *entry = readdir(tasks); entry; entry = readdir(tasks))
        n += entry->d_name[0] != '.';
    closedir(tasks);
    return n;
}

static struct process look(void)
{
    struct process now;

    memset(&now, 0, sizeof(now));
    now.rounding = fegetround();
#if defined(__x86_64__)
    now.control = _mm_getcsr() & ~0x3fu;
#endif
    strncpy(now.locale, setlocale(LC_ALL, NULL), sizeof(now.locale) - 1);
    assert_int_equal(sched_getaffinity(0, sizeof(now.cpus), &now.cpus), 0);
    now.n_threads = count_threads();
    return now;
}

static void expect_unchanged(void)
{
    const struct process now = look();

    assert_memory_equal(&now, &before, sizeof(now));
}

/* Known fault I5. */
static void the_process_is_left_as_it_was(void **state)
{
    struct result *r;

    (void)state;
    expect_unchanged();
    for (int i = 0; i < 2; i++) {
        r = new_result(i ? "ref" : NULL, 4);
        r->after_call = expect_unchanged;
        run(r);
        assert_int_equal(r->status, KVC_OK);
        free(r);
    }
}

static int look_first(void **state)
{
    (void)state;
    before = look();
    return before.n_threads == 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* First: a thread that ended stays in /proc for a while. */
        cmocka_unit_test(the_process_is_left_as_it_was),
        cmocka_unit_test(contexts_run_in_parallel),
        cmocka_unit_test(one_cache_may_use_many_threads),
    };

    return cmocka_run_group_tests(tests, look_first, NULL);
}
