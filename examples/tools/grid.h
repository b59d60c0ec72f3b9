/* grid.h - shapes, kernel tables and options that attend, prefill, append and peer share. */
#ifndef KVC_TOOLS_GRID_H
#define KVC_TOOLS_GRID_H

#include "bench.h"

/* What one cache holds. */
struct bench_shape {
    long format; /* index of bench_formats */
    long n_kv;
    long n_heads;
    long n_kv_heads;
    long head_dim;
};

/* K and V under the names of presets, and INT8 keys with INT4 values. */
enum { BENCH_N_FORMATS = 6 };
extern const char *const bench_formats[BENCH_N_FORMATS];
extern const kvc_precision bench_precisions[BENCH_N_FORMATS];

/* The kernel tables that there may be, slowest first. */
enum { BENCH_N_TABLES = 4 };
extern const char *const bench_tables[BENCH_N_TABLES];
#define BENCH_TABLE_NAMES "ref,avx2,avx512,vnni"

struct bench_grid {
    struct bench_list formats; /* indices of bench_formats */
    struct bench_list tables;  /* indices of bench_tables */
    struct bench_list n_kv;
    struct bench_list n_heads; /* with n_kv_heads: pairs */
    struct bench_list n_kv_heads;
    struct bench_list threads;
    long head_dim;
    double seconds;
    bool tables_given; /* one that is not there is an error */
    bool best_table;   /* if none is given: only the best */
    bool transforms;
    bool small_pages;
    bool json;
};

/* Functions of bench_option for options that begin with a struct bench_grid. */
bool grid_set_formats(void *options, const char *value);
bool grid_set_tables(void *options, const char *value);
bool grid_set_n_kv(void *options, const char *value);
bool grid_set_heads(void *options, const char *value);
bool grid_set_threads(void *options, const char *value);
bool grid_set_head_dim(void *options, const char *value);
bool grid_set_seconds(void *options, const char *value);
bool grid_set_transforms(void *options, const char *value);
bool grid_set_small_pages(void *options, const char *value);
bool grid_set_json(void *options, const char *value);

/* All tables, 32/8 and 32/32 heads of 128, one and two threads. */
struct bench_grid bench_grid_default(void);

/* Leave out the tables that this library or CPU lacks, or fail if the user named one of them. */
int bench_grid_check_tables(struct bench_grid *grid);

/* All shapes, in the order of the report: heads, tokens, formats. A layer that is too large is
 * refused. The caller frees *shapes. */
int bench_grid_shapes(const struct bench_grid *grid, const char *command,
                      struct bench_shape **shapes, size_t *n_shapes);

/* Pages of one layer, K and V, in bytes. */
size_t bench_layer_bytes(const struct bench_shape *shape);

/* --seconds 0: everything runs, on less memory, and the figures are of little worth. */
bool bench_is_trial(const struct bench_grid *grid);

long bench_most(const struct bench_list *list);

#endif
