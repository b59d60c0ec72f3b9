/* peer.h - 'kvc-bench peer': decode attention beside that of ggml, on the same shapes, in turn. */
#ifndef KVC_TOOLS_PEER_H
#define KVC_TOOLS_PEER_H

#include "grid.h"

/* Those of bench_formats that ggml has something like. */
enum { PEER_N_FORMATS = 3 };

/* How ggml's K and V lie in memory. */
enum { PEER_TOKEN_MAJOR, PEER_HEAD_MAJOR, PEER_N_LAYOUTS };
extern const char *const peer_layouts[PEER_N_LAYOUTS];

struct peer_options {
    struct bench_grid grid; /* one item in n_heads for each in n_kv_heads */
    struct bench_list layouts;
};

/* One measurement: medians over pairs of runs, one of each side. */
struct peer_row {
    struct bench_shape shape;
    const char *table;
    long layout;
    long n_threads;
    size_t n_pairs;
    double ours_us;
    double ggml_us;
    double ratio;                 /* ggml's time by ours */
    double ratio_low, ratio_high; /* of the middle half of the pairs */
    double difference;            /* largest of an output, by the largest output of its head */
};

/* Measure and print; without ggml say how to get it and fail. */
int peer_run(const struct peer_options *options);

void peer_print_json(const struct peer_row *rows, size_t n_rows);
void peer_print_table(const struct peer_row *rows, size_t n_rows);

/* ggml's side: K and V of some layers in one layout. */
struct peer;
/* *out is NULL after a failure. n_layers layers, all alike; q: [n_heads][head_dim]. */
int peer_open(const struct bench_shape *shape, long layout, size_t n_layers,
              struct bench_memory *memory, const float *q, struct peer **out);
void peer_close(struct peer *peer);
int peer_set_threads(struct peer *peer, int n_threads);
/* Attention in one layer; the output is in peer_out(), [n_heads][head_dim]. */
int peer_attend(struct peer *peer, size_t layer);
const float *peer_out(const struct peer *peer);

#endif
