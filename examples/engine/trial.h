/* A trial: a text read with several settings side by side, in one pass over the weights, and how
 * well each predicts it. */
#ifndef ENGINE_TRIAL_H
#define ENGINE_TRIAL_H

#include "article.h"
#include "recode.h"
#include "score.h"
#include "session.h"

/* One way to read the text. */
struct setting {
    struct recipe recipe;
    struct named_policy policy; /* applied after each call; "none" or zero: none is */
    const kvc_rope *rope;       /* NULL: the model's own */
};

struct trial_row {
    struct setting setting;
    kvc_cache *cache;
    kvc_seq seq;
    struct recoder *recoder; /* of a recipe that codes before the cache, or NULL */
    struct article *article; /* of one of article 002, or NULL */
    struct score *scores;    /* [n_buckets] */
    int32_t next;            /* most probable token after the last that was read */
};

/* The caller sets the fields up to n_rows and each row's setting; the rest is zero. */
struct trial {
    const struct calibration *calibration; /* NULL: none */
    struct session *session;               /* whose forward takes n_rows * KVC_PAGE_TOKENS rows */
    size_t n_context;                      /* tokens of a chunk */
    size_t n_decode;                       /* tokens that may follow a chunk */
    size_t first_scored; /* position of the first token whose successor is scored */
    size_t bucket;       /* tokens that share a score, by their position */
    int32_t recent_tokens, sink_tokens;
    struct trial_row rows[SCORE_MAX_ROWS]; /* the first is the base of all distances */
    size_t n_rows;
    float *logits; /* [n_rows][wanted tokens of a call][n_vocab] */
};

/* Creates the caches. After a failure, too, trial_close() is due. */
bool trial_open(struct trial *trial, struct failure *failure);
void trial_close(struct trial *trial);

/* Starts a chunk; the rows of the one before are forgotten. */
bool trial_start(struct trial *trial, struct failure *failure);

/* Reads the tokens @p first ... @p last - 1 of a chunk of n_context tokens, in order. */
bool trial_read(struct trial *trial, const int32_t *chunk, size_t first, size_t last,
                struct failure *failure);

/* Bytes of a row's cache after a chunk. Settled first: then they do not depend on how the tokens
 * came. */
struct trial_bytes {
    double per_token, fixed;
    bool coded; /* some page is, or all rows were before the cache */
};
bool trial_measure_bytes(struct trial *trial, size_t row, struct trial_bytes *out,
                         struct failure *failure);

/* Greedy tokens that follow the chunk; the speed is that of the median token. */
bool trial_measure_decode(struct trial *trial, size_t row, double *tokens_a_second,
                          struct failure *failure);

#endif
