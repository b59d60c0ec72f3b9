/* arithmetic.c - the machine's own peaks of arithmetic: chains of multiplications and additions
 * that need no memory. The loops are compiled for CPUs that have the instructions and run only
 * there. */
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "machine.h"

/* Chains side by side: two units of four or five cycles each want ten. */
enum { CHAINS = 12, STEPS = 1 << 15, N_RUNS = 5, TASKS_PER_THREAD = 8 };

/* Operations of one task, a multiplication and an addition being two. */
struct loop {
    void (*task)(void *arg, size_t i);
    double n_ops;
};

/* Task i leaves a result in results[i], so that it has to be computed. */
static void mul_add(void *arg, size_t i)
{
    enum { LANES = 4 * CHAINS };
    float sums[LANES] = {0};
    volatile float factor = 0.5f;
    float x = factor + (float)(i & 1);
    float *results = arg;
    for (int step = 0; step < STEPS; step++)
        for (int k = 0; k < LANES; k++)
            sums[k] = sums[k] * 0.5f + x;
    float total = 0;
    for (int k = 0; k < LANES; k++)
        total += sums[k];
    results[i] = total;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void fma_avx2(void *arg, size_t i)
{
    __m256 sums[CHAINS], x = _mm256_set1_ps((float)i), half = _mm256_set1_ps(0.5f);
    float *results = arg;
    for (int k = 0; k < CHAINS; k++)
        sums[k] = x;
    for (int step = 0; step < STEPS; step++)
        for (int k = 0; k < CHAINS; k++)
            sums[k] = _mm256_fmadd_ps(sums[k], half, x);
    for (int k = 1; k < CHAINS; k++)
        sums[0] = _mm256_add_ps(sums[0], sums[k]);
    results[i] = _mm256_cvtss_f32(sums[0]);
}

__attribute__((target("avx512f"))) static void fma_avx512(void *arg, size_t i)
{
    __m512 sums[CHAINS], x = _mm512_set1_ps((float)i), half = _mm512_set1_ps(0.5f);
    float *results = arg;
    for (int k = 0; k < CHAINS; k++)
        sums[k] = x;
    for (int step = 0; step < STEPS; step++)
        for (int k = 0; k < CHAINS; k++)
            sums[k] = _mm512_fmadd_ps(sums[k], half, x);
    for (int k = 1; k < CHAINS; k++)
        sums[0] = _mm512_add_ps(sums[0], sums[k]);
    results[i] = _mm512_cvtss_f32(sums[0]);
}

__attribute__((target("avx512f,avx512vnni"))) static void vnni_avx512(void *arg, size_t i)
{
    __m512i sums[CHAINS], x = _mm512_set1_epi8((char)i);
    float *results = arg;
    for (int k = 0; k < CHAINS; k++)
        sums[k] = _mm512_set1_epi32(k);
    for (int step = 0; step < STEPS; step++)
        for (int k = 0; k < CHAINS; k++)
            sums[k] = _mm512_dpbusd_epi32(sums[k], x, x);
    for (int k = 1; k < CHAINS; k++)
        sums[0] = _mm512_add_epi32(sums[0], sums[k]);
    results[i] = _mm512_cvtss_f32(_mm512_castsi512_ps(sums[0]));
}

static struct loop fma_loop(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return (struct loop){fma_avx512, 2.0 * 16 * CHAINS * STEPS};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return (struct loop){fma_avx2, 2.0 * 8 * CHAINS * STEPS};
    return (struct loop){mul_add, 2.0 * 4 * CHAINS * STEPS};
}

static struct loop vnni_loop(void)
{
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni"))
        return (struct loop){vnni_avx512, 2.0 * 64 * CHAINS * STEPS};
    return (struct loop){0};
}
#else
static struct loop fma_loop(void)
{
    return (struct loop){mul_add, 2.0 * 4 * CHAINS * STEPS};
}

static struct loop vnni_loop(void)
{
    return (struct loop){0};
}
#endif

/* In 10^9 operations a second. */
static double best(struct bench_threads *threads, long n_threads, int n_runs, struct loop loop)
{
    size_t n_tasks = TASKS_PER_THREAD * (size_t)n_threads;
    static float results[TASKS_PER_THREAD * BENCH_MAX_THREADS];
    double most = 0;
    for (int run = 0; loop.task && run < n_runs; run++) {
        double start = bench_seconds();
        bench_parallel_for(threads, n_tasks, loop.task, results);
        double speed = 1e-9 * loop.n_ops * (double)n_tasks / (bench_seconds() - start);
        most = speed > most ? speed : most;
    }
    return most;
}

void machine_arithmetic(struct bench_threads *threads, bool trial, struct machine_peak *peak)
{
    int n_runs = trial ? 1 : N_RUNS;
    peak->fma = best(threads, peak->n_threads, n_runs, fma_loop());
    peak->vnni = best(threads, peak->n_threads, n_runs, vnni_loop());
}
