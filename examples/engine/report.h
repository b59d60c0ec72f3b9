/* The result of a comparison, as a table or as JSON. */
#ifndef ENGINE_REPORT_H
#define ENGINE_REPORT_H

#include <stdbool.h>
#include <stddef.h>

#include "failure.h"
#include "score.h"

struct report_row {
    const char *kv, *policy;
    const char *vectors;        /* where mean and scale of K come from: "file", "online", "none" */
    double rate;                /* share of the rows that is pruned; of a tuning */
    double ppl, ppl_change_pct; /* against the first row */
    double kl;                  /* mean, nats a position */
    double top1;                /* agreement with the first row, 0..1 */
    double bits_per_element;    /* of codes with their parameters */
    double bytes_per_token;     /* in use at the end of a context */
    double fixed_bytes;         /* that do not grow with tokens */
    bool coded;                 /* something is, at the end of a context */
    double decode_tok_s;
    const struct score *buckets; /* by position */
};

struct report {
    const char *model, *text, *calibration; /* names of files; empty: none */
    size_t context, tokens;                 /* of a chunk; of all chunks */
    size_t bucket, first_scored;            /* positions */
    const struct report_row *rows;
    size_t n_rows;
};

void report_print_table(const struct report *report);
void report_print_json(const struct report *report);

/* A line for each row and each of its buckets, and one for all of them together. */
bool report_write_csv(const struct report *report, const char *path, struct failure *failure);

/* Rates of pruning up to the first whose KL is above the limit. */
void report_print_tuning(const struct report *report, double limit);
void report_print_tuning_json(const struct report *report, double limit);

/* The name of a file without its folder. */
const char *report_name(const char *path);

/* A JSON string; bytes that are no UTF-8 become U+FFFD. */
void report_print_string(const char *text, size_t size);

#endif
