/* Rows of results: one a setting and experiment, as CSV, as a table and as JSON. */
#ifndef VLM_ROWS_H
#define VLM_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "exam.h"
#include "failure.h"

/* Figures that were not measured are NaN, texts are empty, hits NULL. */
struct row {
    char experiment[24];     /* rows of one picture or table: "first", "second", "sweep", ... */
    char name[48];           /* of the setting, unique in its experiment together with x */
    double x;                /* what the experiment varies: a rate, rounds, turns, ... */
    size_t n;                /* questions */
    uint8_t *hits;           /* [n] 1: answered right; owned by the table */
    double accuracy;         /* of all, 0 ... 1 */
    double groups[N_GROUPS]; /* of description, spatial, text */
    /* Paired with the reference row of the experiment: */
    double kept;             /* accuracy over the reference's */
    size_t n_lost, n_gained; /* right only there, right only here */
    double p;                /* McNemar, exact, two-sided */
    /* Of the visual tokens of a picture, over all of them (576), a layer's average: */
    double rows;                  /* left */
    double cache_bytes_per_token; /* codes and parameters of the rows, all layers and heads */
    double page_bytes_per_token;  /* whole pages that hold them */
    /* Of a dialogue of four pictures: */
    double pool_bytes_per_token; /* kvc_stats::used_bytes at the end over its tokens */
    double peak_cache_bytes;     /* most used_bytes on the way */
    double attention_us;         /* of a decoded token, all layers */
    double step_ms;              /* a decode step, everything */
    double rel_err;              /* kvc_layer_report, mean over layers */
    double kl;                   /* mean KL of the first answer token to that on the whole cache */
};

struct row_table {
    struct row *rows;
    size_t n, capacity;
};

/* A row with nothing measured; hits has room for @p n_hits (0: none). The pointer holds until the
 * next row is added. NULL: no memory. */
struct row *rows_add(struct row_table *table, const char *experiment, const char *name, double x,
                     size_t n_hits);
/* NULL if there is none. */
struct row *rows_find(const struct row_table *table, const char *experiment, const char *name,
                      double x);
void rows_free(struct row_table *table);

/* Accuracies from the hits; questions are of groups 0, 1, 2, 0, ... */
void rows_count(struct row *row);

/* Fills what is paired; both have hits of the same questions. */
void rows_pair(struct row *row, const struct row *reference);

/* Two-sided exact McNemar test. */
double mcnemar(size_t n_lost, size_t n_gained);

bool rows_write_csv(const struct row_table *table, const char *path, struct failure *failure);
bool rows_read_csv(struct row_table *table, const char *path, struct failure *failure);

/* {"rows":[{"name","n","accuracy","cache_bytes_per_token","pool_bytes_per_token",
 * "peak_cache_bytes","attention_us","step_ms"}]}, what is NaN as null. */
void rows_print_json(const struct row_table *table, FILE *out);

/* The rows of an experiment, aligned; columns without figures are left out. */
void rows_print_table(const struct row_table *table, const char *experiment, FILE *out);

#endif
