/* compress.h - steps of 'kvc-bench compress': what they work on, their times, how they are printed.
 */
#ifndef KVC_TOOLS_COMPRESS_H
#define KVC_TOOLS_COMPRESS_H

#include "bench.h"

/* A prompt: text that the cache keeps as sinks, one image, a question whose rows are the probes. */
enum { COMPRESS_SINKS = 4, COMPRESS_PROBES = 16, COMPRESS_MAX_PARTS = 6 };

struct compress_options {
    long n_layers;
    long n_heads;
    long n_kv_heads;
    long head_dim;
    long n_tokens; /* visual */
    long window;   /* of the grid, for merging */
    long repeat;
    char kernels[16]; /* "": the best table */
    bool json;
};

/* Milliseconds over the repeats. */
struct compress_time {
    double min, median, max;
};

/* The times of one run of a step, part by part. */
struct compress_laps {
    double last; /* when the running part began */
    size_t n;
    const char *parts[COMPRESS_MAX_PARTS];
    double ms[COMPRESS_MAX_PARTS];
};

/* Ends a part; the next one begins. */
void compress_lap(struct compress_laps *laps, const char *part);

/* One step, measured. */
struct compress_row {
    const char *step;
    size_t n_left; /* visual tokens afterwards */
    struct compress_time time;
    struct compress_time cpu; /* processor time: does not count what other programs took */
    size_t n_parts;
    const char *parts[COMPRESS_MAX_PARTS];
    struct compress_time part_times[COMPRESS_MAX_PARTS];
};

/* Keys and values of all tokens and layers, and what the steps need beside them. */
struct compress_bench {
    const struct compress_options *options;
    kvc_ctx *ctx;
    kvc_grid grid;
    size_t n_tokens, n_all; /* visual tokens, and with the text around them */
    size_t width;           /* elements of a row: n_kv_heads * head_dim */
    uint16_t *k, *v;        /* F16 [n_layers][n_all][width] */
    float *q, *out;         /* [COMPRESS_PROBES][n_heads][head_dim] */
    float *given;           /* [n_all] scores */
    /* What the steps change. */
    uint16_t *work_k, *work_v; /* F16 [n_layers][n_tokens][width] */
    kvc_view *view_k, *view_v; /* [n_layers] of the tokens that are left */
    float *scores;             /* [n_tokens] */
    float *head_scores;        /* [n_layers][n_kv_heads][n_tokens] */
    const float **head_at;     /* [n_layers * n_kv_heads] */
    float *similarity, *norms;
    kvc_merge_token *merge_tokens; /* [n_tokens] */
    kvc_merge_pair *pairs;         /* [n_tokens / 2] */
    int32_t *kept, *map, *rows;    /* [n_tokens] */
    void *ws;
    size_t ws_size;
    size_t n_left;
    kvc_cache *cache;
    kvc_seq seq;
    kvc_token *tokens;        /* [n_all] */
    kvc_layer_report *layers; /* [n_layers] */
};

/* Rows of one layer, all or visual ones only, as they were. */
kvc_view compress_view(const struct compress_bench *b, uint16_t *x, size_t layer, bool visual);

/* A step; prepare is not timed, and may be NULL. */
struct compress_step {
    const char *name;
    kvc_status (*prepare)(struct compress_bench *b);
    kvc_status (*run)(struct compress_bench *b, const struct compress_step *step,
                      struct compress_laps *laps);
    bool window; /* merge only within the window */
    /* Of the cache's own path: */
    bool seal_only; /* no policy */
    bool probes;    /* scores from the query rows, else given */
    bool report;    /* with the estimated error of each layer */
    int32_t rounds; /* of merging */
};

/* The cache's own path: a cache, a new sequence as after a prefill, and compressing it. */
kvc_status compress_cache_open(struct compress_bench *b);
kvc_status compress_cache_fill(struct compress_bench *b);
kvc_status compress_cache_run(struct compress_bench *b, const struct compress_step *step,
                              struct compress_laps *laps);

void compress_print_json(const struct compress_bench *b, const struct compress_row *rows,
                         size_t n_rows);
void compress_print_table(const struct compress_bench *b, const struct compress_row *rows,
                          size_t n_rows);

#endif
