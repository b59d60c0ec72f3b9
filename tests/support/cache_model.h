/* A plain model of kvc_cache, arrays of rows, and its comparison with the real one. */
#ifndef KVC_TESTS_CACHE_MODEL_H
#define KVC_TESTS_CACHE_MODEL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kvc/kvc.h"

#include "rng.h"

enum {
    MODEL_MAX_LAYERS = 3,
    MODEL_MAX_KV_HEADS = 3,
    MODEL_MAX_TOKENS = 4096, /* of one sequence */
    MODEL_MAX_PAGES = 1024,
    MODEL_MAX_SEQS = 5
};

#define MODEL_NO_HOLD INT64_MAX

/* A run of ordinals that is sealed as one. */
struct model_page {
    int64_t first, end;
    bool sealed;
    float absmax[MODEL_MAX_LAYERS][MODEL_MAX_KV_HEADS][2]; /* of K and V, when it was sealed */
};

struct model_seq {
    kvc_seq handle; /* 0: not in use */
    int64_t n_tokens, hold;
    int64_t appended[MODEL_MAX_LAYERS];
    bool compacted; /* rows may have moved: pages are no longer as listed below */
    kvc_token tokens[MODEL_MAX_TOKENS];
    bool removed[MODEL_MAX_TOKENS];
    float *k, *v;       /* [n_layers][n_kv_heads][MODEL_MAX_TOKENS][head_dim], as they are stored */
    double *score;      /* [n_layers][n_kv_heads][MODEL_MAX_TOKENS] */
    double score_error; /* relative, of fp32 logits as large as those seen */
    struct model_page pages[MODEL_MAX_PAGES];
    int n_pages;
    int64_t probed[MODEL_MAX_LAYERS][1024]; /* ordinals, ascending */
    float *probe_q[MODEL_MAX_LAYERS];       /* [probe_rows][n_heads][head_dim_k], as half */
    int n_probed[MODEL_MAX_LAYERS];
};

struct cache_model {
    kvc_ctx *ctx;
    kvc_ctx *ref; /* of the model's own quantizer */
    kvc_cache *cache;
    kvc_cache_params params;
    kvc_precision precision[MODEL_MAX_LAYERS][MODEL_MAX_KV_HEADS];
    uint64_t n_nonfinite, n_saturated;
    uint64_t n_saturated_shared; /* at most so many more, in rows that sequences may share */
    bool ready;                  /* transforms are in use */
    float *mean, *scale;         /* [n_layers][n_kv_heads][head_dim_k] */
    struct model_seq seqs[MODEL_MAX_SEQS];
};

/* One expected row of attention. */
struct model_attention {
    double out[KVC_MAX_HEAD_DIM];
    double lse;
    double mass[MODEL_MAX_TOKENS]; /* of each ordinal */
    double tolerance;              /* of out, absolute */
    double lse_tolerance;
    double mass_error; /* relative */
};

/* lo ... hi */
int pick(uint64_t *rng, int lo, int hi);
/* About normal, mean 0, deviation 1. */
float normal(uint64_t *rng);

/* Rounds to nearest even; beyond +-65504 saturates. */
uint16_t half_from_float(float x);
/* The value as a half, as a float. */
float half_round(float x);
float view_get(const kvc_view *view, size_t token, size_t head, size_t d);
void view_set(const kvc_view *view, size_t token, size_t head, size_t d, float x);
size_t dtype_size(kvc_dtype dtype);

/* Takes ctx; makes cache from params, every layer and head with params->precision. */
void model_open(struct cache_model *m, kvc_ctx *ctx, const kvc_cache_params *params);
void model_set_precision(struct cache_model *m, int layer, int kv_head, kvc_precision precision);
void model_close(struct cache_model *m);

/* What the calls of the same names do, for callers that have seen KVC_OK. */
void model_seq_begin(const struct cache_model *m, struct model_seq *s, kvc_seq handle);
void model_seq_end(struct model_seq *s);
void model_fork(const struct cache_model *m, struct model_seq *dst, const struct model_seq *src,
                kvc_seq handle);
void model_tokens_add(struct cache_model *m, struct model_seq *s, const kvc_token *tokens,
                      int64_t n);
void model_append(struct cache_model *m, struct model_seq *s, int layer, const kvc_view *k,
                  const kvc_view *v);
void model_truncate(struct cache_model *m, struct model_seq *s, int64_t n);
void model_remove(struct cache_model *m, struct model_seq *s, int64_t first, int64_t last);
void model_hold(struct model_seq *s);
void model_settle(struct cache_model *m, struct model_seq *s);
void model_compress(struct cache_model *m, struct model_seq *s);
/* Adds masses and keeps probe rows. */
void model_attended(struct cache_model *m, struct model_seq *s, int layer, const kvc_view *q,
                    const kvc_attend_options *options);

float *model_k(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head,
               int64_t ordinal);
float *model_v(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head,
               int64_t ordinal);
double *model_score(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head);
bool model_complete(const struct cache_model *m, const struct model_seq *s);
int model_n_to_seal(const struct cache_model *m, const struct model_seq *s);
int64_t model_next_position(const struct model_seq *s);
int64_t model_n_rows(const struct model_seq *s, int layer);
void model_attention(const struct cache_model *m, const struct model_seq *s, int layer,
                     const kvc_view *q, size_t row, int head, const kvc_attend_options *options,
                     struct model_attention *want);

/* Transforms; which: 0 for K, 1 for V. Rows turn from halves that came into what is stored: the
 * number of elements that saturate. */
void model_transform_open(struct cache_model *m);
bool model_has_vectors(const struct cache_model *m);
bool model_transforms(const struct cache_model *m, int which);
int model_transform_row(const struct cache_model *m, int layer, int kv_head, int which, float *row);
/* What a stored row is to the caller, and how exactly fp32 tells. */
void model_row(const struct cache_model *m, int layer, int kv_head, int which, const float *stored,
               double *row, double *error);
/* Q' in place; returns Q mean^T. */
double model_query(const struct cache_model *m, int layer, int kv_head, double *q);
/* The output that came from stored V. */
void model_output(const struct cache_model *m, double *out);
/* H in double. */
void model_rotate(double *x, size_t d);
/* Whether the next settling of a sequence measures the transforms. */
bool model_freezes(const struct cache_model *m, const struct model_seq *s);
/* After that, or a compression: takes over what the cache measured. */
void model_freeze(struct cache_model *m, const struct model_seq *s, bool compress);
/* The same, if it has measured. */
void model_take_over(struct cache_model *m);

/* Comparisons; each fails the running test. */
void check_counts(const struct cache_model *m, const struct model_seq *s);
void check_tokens(const struct cache_model *m, const struct model_seq *s, int64_t first, int64_t n);
void check_rows(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head);
void check_pages(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head);
/* That of the cache is ready when the model's is, and the same. */
void check_transform(const struct cache_model *m);
void check_probes(const struct cache_model *m, const struct model_seq *s, int layer);
void check_attention(const struct cache_model *m, const struct model_seq *s, int layer,
                     const kvc_view *q, size_t row, const kvc_attend_options *options,
                     const kvc_view *out, const float *lse);
void check_seq(const struct cache_model *m, const struct model_seq *s);
kvc_stats check_stats(const struct cache_model *m);
/* Everything, and that the pages of all sequences add up to the statistics. */
void check_all(const struct cache_model *m);

/* Two layers, four query heads on two KV heads of K size 16 and V size 8. */
kvc_cache_params drive_params(void);
kvc_stats drive_stats(const struct cache_model *m);
/* Calls of the cache that must succeed, followed by the model's; extra_bytes beyond the minimum. */
void drive_start(struct cache_model *m, kvc_ctx *ctx, kvc_cache_params params, size_t extra_bytes);
struct model_seq *drive_create(struct cache_model *m);
struct model_seq *drive_fork(struct cache_model *m, const struct model_seq *src);
void drive_destroy(struct cache_model *m, struct model_seq *s);
void drive_add(struct cache_model *m, struct model_seq *s, const kvc_token *tokens, int n);
void drive_append(struct cache_model *m, struct model_seq *s, int layer, const kvc_view *k,
                  const kvc_view *v);
/* Normal random K and V times scale for all rows that are missing. */
void drive_rows(struct cache_model *m, struct model_seq *s, uint64_t *rng, float scale);
/* Announces n tokens of text and appends their rows. */
void drive_feed(struct cache_model *m, struct model_seq *s, int n, uint64_t *rng, float scale);
void drive_truncate(struct cache_model *m, struct model_seq *s, int64_t n);
void drive_remove(struct cache_model *m, struct model_seq *s, int64_t first, int64_t last);
void drive_settle(struct cache_model *m, struct model_seq *s);
kvc_report drive_compress(struct cache_model *m, struct model_seq *s);
/* Attends with packed random F32 queries and checks every row; NULL: default options. */
void drive_attend(struct cache_model *m, struct model_seq *s, int layer, int n_q,
                  const kvc_attend_options *options, uint64_t *rng);

void fill_view(const kvc_view *view, uint64_t *rng, float scale);
struct model_seq *model_free_slot(struct cache_model *m);

#endif
