/* machine.h - what the machine itself can do: memory and arithmetic, beside which kernels are put.
 */
#ifndef KVC_TOOLS_MACHINE_H
#define KVC_TOOLS_MACHINE_H

#include "bench.h"

/* With one number of threads. */
struct machine_peak {
    long n_threads;
    /* GB/s of a loop that only reads: from small pages, from huge pages, from these with prefetches
     * in the loop; and the best of the three, the machine's figure. */
    double read_small, read_huge, read_prefetch, read;
    double copy; /* GB/s read and written by memcpy, huge pages */
    double fma;  /* GFLOP/s of fp32 multiplications and additions */
    double vnni; /* GOP/s of int8 multiplications and additions in dpbusd; 0: the CPU has none */
};

struct machine {
    size_t n;
    struct machine_peak peaks[BENCH_MAX_ITEMS + 2];
};

/* With one thread, with all, and with each of a list. A second or two for each; with trial a
 * moment, and the figures are of little worth. */
int machine_measure(const struct bench_list *threads, bool trial, struct machine *machine);
const struct machine_peak *machine_peak(const struct machine *machine, long n_threads);
/* The best read bandwidth of all. */
double machine_read(const struct machine *machine);

/* "machine":[{...}, ...] */
void machine_print_json(const struct machine *machine);
void machine_print_table(const struct machine *machine);

/* The parts, on these threads. */
int machine_memory(struct bench_threads *threads, bool trial, struct machine_peak *peak);
void machine_arithmetic(struct bench_threads *threads, bool trial, struct machine_peak *peak);

#endif
