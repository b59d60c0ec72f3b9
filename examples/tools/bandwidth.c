/* bandwidth.c - the machine's own memory: the sum of a buffer far larger than any cache, and a
 * copy. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

enum { N_TASKS = 64, N_RUNS = 5 };

/* Words of a cache line; sums that run side by side: one would be bound by the latency of the
 * addition, not by memory; and how far ahead a prefetch is, found by trying 256 to 16384 bytes. */
enum { LINE = 8, SUMS = 32, AHEAD = 64 };

static const size_t buffer_bytes = (size_t)512 << 20, trial_bytes = (size_t)32 << 20;

typedef uint64_t sum_fn(const uint64_t *words, size_t n);

struct buffer {
    int n_runs;
    size_t n_bytes;
    uint64_t *words; /* and AHEAD more */
    size_t words_per_task;
    sum_fn *sum;
    uint64_t sums[N_TASKS];
};

static inline uint64_t add_up(const uint64_t sums[SUMS])
{
    uint64_t total = 0;
    for (size_t k = 0; k < SUMS; k++)
        total += sums[k];
    return total;
}

/* The loops, for the compiler to make vectors of in the functions below. */
#define SUM_LOOP(prefetch)                                                                         \
    uint64_t sums[SUMS] = {0};                                                                     \
    for (size_t j = 0; j < n; j += SUMS) {                                                         \
        for (size_t k = 0; (prefetch) && k < SUMS; k += LINE)                                      \
            __builtin_prefetch(words + j + AHEAD + k);                                             \
        for (size_t k = 0; k < SUMS; k++)                                                          \
            sums[k] += words[j + k];                                                               \
    }                                                                                              \
    return add_up(sums)

static uint64_t sum_any(const uint64_t *words, size_t n)
{
    SUM_LOOP(false);
}

static uint64_t sum_any_prefetch(const uint64_t *words, size_t n)
{
    SUM_LOOP(true);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static uint64_t sum_avx512(const uint64_t *words, size_t n)
{
    SUM_LOOP(false);
}

__attribute__((target("avx512f"))) static uint64_t sum_avx512_prefetch(const uint64_t *words,
                                                                       size_t n)
{
    SUM_LOOP(true);
}

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") != 0;
}
#else
static uint64_t sum_avx512(const uint64_t *words, size_t n)
{
    return sum_any(words, n);
}

static uint64_t sum_avx512_prefetch(const uint64_t *words, size_t n)
{
    return sum_any_prefetch(words, n);
}

static bool has_avx512(void)
{
    return false;
}
#endif

static void fill_part(void *arg, size_t i)
{
    struct buffer *buffer = arg;
    uint64_t *part = buffer->words + i * buffer->words_per_task;
    for (size_t j = 0; j < buffer->words_per_task; j++)
        part[j] = i + j;
}

static void sum_part(void *arg, size_t i)
{
    struct buffer *buffer = arg;
    buffer->sums[i] =
        buffer->sum(buffer->words + i * buffer->words_per_task, buffer->words_per_task);
}

/* The second half of its part to the first. */
static void copy_part(void *arg, size_t i)
{
    struct buffer *buffer = arg;
    uint64_t *part = buffer->words + i * buffer->words_per_task;
    size_t half = buffer->words_per_task / 2;
    memcpy(part, part + half, half * sizeof *part);
}

static double best_gbps(struct bench_threads *threads, struct buffer *buffer,
                        void (*task)(void *arg, size_t i))
{
    double best = 0;
    for (int run = 0; run < buffer->n_runs; run++) {
        double start = bench_seconds();
        bench_parallel_for(threads, N_TASKS, task, buffer);
        double gbps = 1e-9 * (double)buffer->n_bytes / (bench_seconds() - start);
        best = gbps > best ? gbps : best;
    }
    return best;
}

/* The better of two loops; they must agree. */
static int read_gbps(struct bench_threads *threads, struct buffer *buffer, sum_fn *const loops[2],
                     double *gbps)
{
    uint64_t totals[2] = {0};
    *gbps = 0;
    for (int i = 0; i < 2; i++) {
        buffer->sum = loops[i];
        double one = best_gbps(threads, buffer, sum_part);
        *gbps = one > *gbps ? one : *gbps;
        for (size_t t = 0; t < N_TASKS; t++)
            totals[i] += buffer->sums[t];
    }
    if (totals[0] == totals[1])
        return BENCH_GO;
    fprintf(stderr, "kvc-bench: the bandwidth loops read different sums\n");
    return BENCH_FAILED;
}

static int open_buffer(struct bench_threads *threads, bool trial, bool small_pages,
                       struct buffer *buffer)
{
    struct bench_memory memory = {.small_pages = small_pages};
    size_t n_bytes = trial ? trial_bytes : buffer_bytes;
    *buffer =
        (struct buffer){.n_runs = trial ? 1 : N_RUNS,
                        .n_bytes = n_bytes,
                        .words = bench_memory_get(&memory, n_bytes + AHEAD * sizeof(uint64_t)),
                        .words_per_task = n_bytes / sizeof(uint64_t) / N_TASKS};
    if (!buffer->words) {
        fprintf(stderr, "kvc-bench: no memory for the bandwidth buffer (%zu MiB)\n", n_bytes >> 20);
        return BENCH_FAILED;
    }
    bench_parallel_for(threads, N_TASKS, fill_part, buffer);
    return BENCH_GO;
}

int machine_memory(struct bench_threads *threads, bool trial, struct machine_peak *peak)
{
    bool wide = has_avx512();
    sum_fn *const plain[2] = {sum_any, wide ? sum_avx512 : sum_any};
    sum_fn *const ahead[2] = {sum_any_prefetch, wide ? sum_avx512_prefetch : sum_any_prefetch};
    struct buffer buffer;
    int code = open_buffer(threads, trial, true, &buffer);
    if (code == BENCH_GO)
        code = read_gbps(threads, &buffer, plain, &peak->read_small);
    free(buffer.words);
    if (code != BENCH_GO)
        return code;
    code = open_buffer(threads, trial, false, &buffer);
    if (code == BENCH_GO)
        code = read_gbps(threads, &buffer, plain, &peak->read_huge);
    if (code == BENCH_GO)
        code = read_gbps(threads, &buffer, ahead, &peak->read_prefetch);
    if (code == BENCH_GO)
        peak->copy = best_gbps(threads, &buffer, copy_part);
    free(buffer.words);
    peak->read = peak->read_small > peak->read_huge ? peak->read_small : peak->read_huge;
    peak->read = peak->read > peak->read_prefetch ? peak->read : peak->read_prefetch;
    return code;
}
