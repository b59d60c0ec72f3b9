/* attend.h - rows of 'kvc-bench attend' and how they are printed. */
#ifndef KVC_TOOLS_ATTEND_H
#define KVC_TOOLS_ATTEND_H

#include "bench.h"

/* What one cache holds. */
struct attend_shape {
    long format; /* index of attend_formats */
    long n_kv;
    long n_heads;
    long n_kv_heads;
    long head_dim;
};

/* One measurement. */
struct attend_row {
    struct attend_shape shape;
    const char *table;
    long n_threads;
    double us;
    double gbps;
    double append_us; /* of a token, its share of sealing included */
};

enum { ATTEND_N_FORMATS = 6 };

extern const char *const attend_formats[ATTEND_N_FORMATS];

/* read_gbps: of the machine, for each of threads. */
void attend_print_json(const struct attend_row *rows, size_t n_rows,
                       const struct bench_list *threads, const double *read_gbps);
void attend_print_table(const struct attend_row *rows, size_t n_rows,
                        const struct bench_list *threads, const double *read_gbps);

#endif
