/* bandwidth.c - the machine's own read bandwidth: the sum of a buffer far larger than any cache. */
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"

enum { N_TASKS = 64, N_RUNS = 5 };

static const size_t buffer_bytes = (size_t)512 << 20;

struct buffer {
    uint64_t *words;
    size_t words_per_task;
    uint64_t sums[N_TASKS];
};

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
    const uint64_t *part = buffer->words + i * buffer->words_per_task;
    /* Several chains: one would be bound by the latency of the addition, not by memory. */
    uint64_t sums[8] = {0};
    for (size_t j = 0; j < buffer->words_per_task; j += 8)
        for (size_t k = 0; k < 8; k++)
            sums[k] += part[j + k];
    buffer->sums[i] = sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

static double best_gbps(struct bench_threads *threads, struct buffer *buffer, uint64_t *total)
{
    double best = 0;
    for (int run = 0; run < N_RUNS; run++) {
        double start = bench_seconds();
        bench_parallel_for(threads, N_TASKS, sum_part, buffer);
        double gbps = 1e-9 * (double)buffer_bytes / (bench_seconds() - start);
        best = gbps > best ? gbps : best;
    }
    *total = 0;
    for (size_t i = 0; i < N_TASKS; i++)
        *total += buffer->sums[i];
    return best;
}

int bench_read_bandwidth(const struct bench_list *threads, double *gbps)
{
    struct bench_threads pool = {NULL};
    struct buffer buffer = {.words = malloc(buffer_bytes),
                            .words_per_task = buffer_bytes / sizeof(uint64_t) / N_TASKS};
    if (!buffer.words) {
        fprintf(stderr, "kvc-bench: no memory for the bandwidth buffer (512 MiB)\n");
        return BENCH_FAILED;
    }
    bench_parallel_for(&pool, N_TASKS, fill_part, &buffer);
    kvc_status status = KVC_OK;
    uint64_t first = 0, total = 0;
    for (size_t i = 0; i < threads->n && status == KVC_OK && total == first; i++) {
        status = bench_threads_set(&pool, (size_t)threads->items[i]);
        if (status == KVC_OK)
            gbps[i] = best_gbps(&pool, &buffer, &total);
        first = i == 0 ? total : first;
    }
    bench_threads_end(&pool);
    free(buffer.words);
    if (status != KVC_OK)
        return bench_fail("kvc_pool_create", status);
    if (total != first) {
        fprintf(stderr, "kvc-bench: the bandwidth loop read different sums\n");
        return BENCH_FAILED;
    }
    return BENCH_GO;
}
