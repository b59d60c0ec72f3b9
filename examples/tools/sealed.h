/* sealed.h - a sealed cache of one shape, and the rows it is filled with. */
#ifndef KVC_TOOLS_SEALED_H
#define KVC_TOOLS_SEALED_H

#include "grid.h"

/* Tokens that are announced at a time while a cache is filled. */
enum { SEALED_BLOCK = 128 };

/* Rows of tokens first ... first + n - 1, [n][n_heads][dim]; the same for the same arguments. In
 * each 32 channels the values are whole multiples -8 ... 7 of one unit, the first of them -8: what
 * four bits with a scale for 32 or 64 channels hold exactly. side: 0 for K, 1 for V. */
void bench_rows(float *rows, int side, long first, size_t n, size_t n_heads, size_t dim);
/* Query rows, large enough for attention to prefer some tokens to others. */
void bench_queries(float *q, size_t n);

/* How a cache is made. */
struct sealed_params {
    struct bench_shape shape;
    const char *table; /* NULL: the best */
    long n_threads;    /* while it is filled */
    long n_more;       /* tokens that will be appended to n_kv */
    long n_queries;    /* rows of q and out; 0: 1 */
    long n_layers;     /* 0: so many that no cache of the processor holds them all */
    kvc_score_mode scores;
    bool transforms;
    bool small_pages;
    bool compacts; /* rows will be moved together */
};

struct sealed {
    struct sealed_params params;
    struct bench_threads threads;
    struct bench_memory memory;
    kvc_ctx *ctx;
    kvc_cache *cache;
    kvc_seq seq;
    int32_t n_layers;
    size_t layer_bytes; /* pages that attention of one layer reads */
    float *k, *v;       /* [SEALED_BLOCK][n_kv_heads][head_dim] */
    float *q, *out;     /* [n_queries][n_heads][head_dim] */
    float *vector;      /* [n_layers][n_kv_heads][head_dim], ones: mean and scale */
    double *samples;    /* of sealed_time() */
};

/* Layers of a shape, so that together they are larger than the caches of processors. */
int32_t sealed_layers(const struct bench_shape *shape);

/* Make the cache and fill it. BENCH_GO, or an exit status; sealed_close() in either case. */
int sealed_open(struct sealed *sealed, const struct sealed_params *params);
void sealed_close(struct sealed *sealed);

/* Append n <= SEALED_BLOCK tokens to all layers. */
int sealed_append(struct sealed *sealed, size_t n);
/* Seal everything, and move rows together. */
int sealed_compress(struct sealed *sealed);
/* See that everything is sealed, and set layer_bytes. */
int sealed_count(struct sealed *sealed);
/* Attention of the last n_queries tokens in one layer. */
int sealed_attend(struct sealed *sealed, int32_t layer, const kvc_attend_options *options);
/* Its time, a median: layers take turns, so that each run finds its pages in memory and not in a
 * cache. */
int sealed_time(struct sealed *sealed, const kvc_attend_options *options, double seconds,
                double *us);

#endif
