/* machine.c - what the machine itself can do, for each number of threads, and how it is printed. */
#include <stdio.h>

#include "machine.h"

static void add_missing(struct bench_list *list, long item)
{
    for (size_t i = 0; i < list->n; i++)
        if (list->items[i] == item)
            return;
    list->items[list->n++] = item;
}

int machine_measure(const struct bench_list *threads, bool trial, struct machine *machine)
{
    kvc_pool *pool;
    kvc_status status = kvc_pool_create(0, &pool);
    if (status != KVC_OK)
        return bench_fail("kvc_pool_create", status);
    struct bench_list all = *threads;
    add_missing(&all, 1);
    add_missing(&all, (long)kvc_pool_n_threads(pool));
    kvc_pool_destroy(pool);

    fprintf(stderr, "measuring the machine\n");
    machine->n = all.n;
    int code = BENCH_GO;
    for (size_t i = 0; i < all.n && code == BENCH_GO; i++) {
        struct bench_threads on = {NULL};
        struct machine_peak *peak = &machine->peaks[i];
        *peak = (struct machine_peak){.n_threads = all.items[i]};
        status = bench_threads_set(&on, (size_t)all.items[i]);
        code = status == KVC_OK ? machine_memory(&on, trial, peak)
                                : bench_fail("kvc_pool_create", status);
        if (code == BENCH_GO)
            machine_arithmetic(&on, trial, peak);
        bench_threads_end(&on);
    }
    return code;
}

const struct machine_peak *machine_peak(const struct machine *machine, long n_threads)
{
    size_t i = 0;
    while (i + 1 < machine->n && machine->peaks[i].n_threads != n_threads)
        i++;
    return &machine->peaks[i];
}

double machine_read(const struct machine *machine)
{
    double best = 0;
    for (size_t i = 0; i < machine->n; i++)
        best = machine->peaks[i].read > best ? machine->peaks[i].read : best;
    return best;
}

void machine_print_json(const struct machine *machine)
{
    printf("\"machine\":[");
    for (size_t i = 0; i < machine->n; i++) {
        const struct machine_peak *p = &machine->peaks[i];
        printf("%s\n{\"threads\":%ld,\"read_gbps\":%.4g,\"read_small_gbps\":%.4g,"
               "\"read_huge_gbps\":%.4g,\"read_prefetch_gbps\":%.4g,\"copy_gbps\":%.4g,"
               "\"fma_gflops\":%.4g,\"vnni_gops\":%.4g}",
               i ? "," : "", p->n_threads, p->read, p->read_small, p->read_huge, p->read_prefetch,
               p->copy, p->fma, p->vnni);
    }
    printf("]");
}

void machine_print_table(const struct machine *machine)
{
    printf("%-8s %10s %12s %12s %12s %10s %12s %11s\n", "threads", "read GB/s", "small pages",
           "huge pages", "prefetched", "copy GB/s", "FMA GFLOP/s", "VNNI GOP/s");
    for (size_t i = 0; i < machine->n; i++) {
        const struct machine_peak *p = &machine->peaks[i];
        printf("%-8ld %10.2f %12.2f %12.2f %12.2f %10.2f %12.0f %11.0f\n", p->n_threads, p->read,
               p->read_small, p->read_huge, p->read_prefetch, p->copy, p->fma, p->vnni);
    }
    printf("\n");
}
