/* bench.h - what the commands of kvc-bench share: options, clock, threads, bandwidth. */
#ifndef KVC_TOOLS_BENCH_H
#define KVC_TOOLS_BENCH_H

#include <stdbool.h>

#include "kvc/kvc.h"
#include "kvc/pool.h"

/* Exit statuses; BENCH_GO is none: the command goes on. */
enum { BENCH_GO = -1, BENCH_DONE = 0, BENCH_FAILED = 1, BENCH_USAGE = 2 };

enum { BENCH_MAX_ITEMS = 16, BENCH_MAX_THREADS = 1024 };

/* A list that the user gave: numbers, or indices of names. */
struct bench_list {
    size_t n;
    long items[BENCH_MAX_ITEMS + 2]; /* room for two that a command adds */
};

/* One option of a command. */
struct bench_option {
    const char *name;     /* "--threads" */
    const char *argument; /* "LIST"; NULL: a flag */
    const char *help;
    bool (*set)(void *options, const char *value); /* false: a bad value */
};

/* Parse argv[0] ... argv[argc - 1]; --help is known to every command. BENCH_GO or an exit status.
 */
int bench_parse(const char *command, const struct bench_option *table, size_t n_table,
                void *options, int argc, char **argv);
bool bench_parse_long(const char *text, long low, long high, long *out);
bool bench_parse_longs(const char *text, long low, long high, struct bench_list *out);
bool bench_parse_names(const char *text, const char *const *names, size_t n_names,
                       struct bench_list *out);
/* Copy the text up to a comma into item and step over it; false at the end or if it is too long. */
bool bench_next_item(const char **text, char *item, size_t size);

/* Print "kvc-bench: what: status" and return BENCH_FAILED. */
int bench_fail(const char *what, kvc_status status);

double bench_seconds(void);
/* Median; sorts the samples. */
double bench_median(double *samples, size_t n);

/* A kvc_parallel_for_fn over a struct bench_threads, so that one cache runs on several thread
 * counts. */
struct bench_threads {
    kvc_pool *pool; /* NULL: the calling thread */
};
void bench_parallel_for(void *user, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg);
kvc_status bench_threads_set(struct bench_threads *threads, size_t n_threads);
void bench_threads_end(struct bench_threads *threads);

/* Memory of a cache or a peer: huge pages, if the system has any. */
struct bench_memory {
    bool small_pages; /* do not ask for them */
    bool touched;     /* written at once, so that its pages are there */
};
void *bench_memory_get(struct bench_memory *memory, size_t n_bytes);
kvc_allocator bench_allocator(struct bench_memory *memory);

/* The commands: arguments after the command's name. */
int bench_attend(int argc, char **argv);
int bench_prefill(int argc, char **argv);
int bench_append(int argc, char **argv);
int bench_attend_rows(int argc, char **argv);
int bench_compress(int argc, char **argv);
int bench_peer(int argc, char **argv);

#endif
