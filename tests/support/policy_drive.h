/* A cache with one sequence for the tests of policies, and float64 answers over what it stores. */
#ifndef KVC_TESTS_POLICY_DRIVE_H
#define KVC_TESTS_POLICY_DRIVE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kvc/kvc.h"

#include "rng.h"

struct pd {
    kvc_ctx *ctx; /* the caller's */
    kvc_cache *cache;
    kvc_cache_params p;
    kvc_seq seq;
    uint64_t rng;
    float q_scale; /* of random queries, 1 */
};

/* Rows of one layer and head as the cache tells them. */
struct pd_rows {
    size_t n;
    int64_t *ordinals;
    float *k, *v, *masses, *scores, *biases;
    float *mean, *scale; /* what the cache takes off K and divides it by */
    int32_t *sizes;
};

/* Two layers, four query heads on two KV heads, K of 16, V of 8, no recent window, F16. */
kvc_cache_params pd_params(void);
/* Budget: the minimum and extra_bytes; one sequence. */
void pd_open(struct pd *d, kvc_ctx *ctx, kvc_cache_params p, size_t extra_bytes);
void pd_close(struct pd *d);

kvc_token pd_text(int64_t position);
kvc_token pd_patch(int32_t image, int32_t row, int32_t col, int64_t position);
/* Announces and appends n tokens: k [n_layers][n][n_kv_heads][head_dim_k], v alike; NULL: random.
 */
void pd_feed(struct pd *d, const kvc_token *tokens, int n, const float *k, const float *v);
void pd_feed_text(struct pd *d, int n);
/* Rows times cols patches at the next position; returns the first ordinal. */
int64_t pd_feed_image(struct pd *d, int32_t image, int rows, int cols);
/* Attends with n_q random queries in every layer. */
void pd_look(struct pd *d, int n_q);
/* The same, and compares each output with float64 over the rows and biases that are read back. */
void pd_check_attention(struct pd *d, kvc_seq seq, int n_q, const kvc_attend_options *options);

kvc_policy pd_policy(void); /* the default, without rules that keep tokens */
kvc_report pd_compress(struct pd *d, const kvc_policy *policy);
kvc_stats pd_stats(const struct pd *d);

struct pd_rows pd_read(const struct pd *d, kvc_seq seq, int layer, int head);
void pd_free(struct pd_rows *rows);
/* The row of an ordinal, or -1. */
int pd_find(const struct pd_rows *rows, int64_t ordinal);
/* kvc_seq_score_rows() in float64, from rows and probes read back. */
void pd_probe_scores(const struct pd *d, kvc_seq seq, int layer, int head, double *scores);
/* Output of a query row over rows, in float64. */
void pd_attention(const struct pd *d, const struct pd_rows *rows, const float *q, int64_t ordinal,
                  const kvc_attend_options *options, double *out, double *lse, double *tolerance);

/* Of all that can be read of a sequence: counts, tokens, rows, groups, sealed pages, probes. */
uint64_t pd_digest(const struct pd *d, kvc_seq seq);
/* Fails unless status is want and neither the sequence nor the statistics have changed. */
struct pd_state {
    uint64_t digest;
    kvc_stats stats;
};
struct pd_state pd_save(const struct pd *d);
void pd_assert_same(const struct pd *d, const struct pd_state *state);

#endif
