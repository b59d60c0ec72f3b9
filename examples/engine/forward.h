/* Runs a model over tokens. Its K and V live in libkvc caches and nowhere else. */
#ifndef ENGINE_FORWARD_H
#define ENGINE_FORWARD_H

#include <kvc/kvc.h>
#include <kvc/rope.h>

#include "model.h"

struct forward;

struct forward_params {
    const struct model *model; /* must outlive the forward */
    kvc_ctx *ctx;
    size_t max_rows; /* most tokens of one run, over all items */
    size_t n_threads;
    kvc_parallel_for_fn *parallel_for; /* NULL: everything runs in the calling thread */
    void *parallel_user;
    bool exact; /* caches of twice the head size hold K and V to 22 bits instead of 11: see split.h
                 */
};

/* Something between a model and its cache, in every layer, after the rotation. */
struct forward_hook {
    /* Sees, and may change, what comes; NULL: nothing is there. */
    bool (*touch)(void *user, int32_t layer, const kvc_view *q, const kvc_view *k,
                  const kvc_view *v, struct failure *failure);
    /* Attends instead of the cache, which has K and V already; NULL: the cache does. */
    bool (*attend)(void *user, int32_t layer, const kvc_attend_options *options, const kvc_view *q,
                   const kvc_view *k, const kvc_view *v, const kvc_view *out,
                   struct failure *failure);
    void *user;
};

/* The next tokens of one sequence. */
struct forward_item {
    kvc_cache *cache;
    kvc_seq seq;
    const int32_t *tokens;
    const float *rows; /* [n][n_embd] to start from instead of the embeddings of tokens; or NULL */
    const kvc_token *facts; /* [n] what the cache is told and where the tokens are; NULL: text that
                               goes on */
    size_t n;
    size_t n_skip;        /* tokens at the start whose logits are not wanted; n: none are */
    const kvc_rope *rope; /* how to rotate, see rotation.h; NULL: as trained */
    struct forward_hook hook;
};

bool forward_create(const struct forward_params *params, struct forward **out,
                    struct failure *failure);
void forward_destroy(struct forward *forward);

/* Time in kvc_attend() since it was created. */
double forward_attend_seconds(const struct forward *forward);

/*
 * All items pass through each matrix together. logits: [wanted rows of all items, in
 * order][n_vocab], or NULL if none are wanted. After a failure the sequences hold an unknown part
 * of the tokens.
 */
bool forward_run(struct forward *forward, const struct forward_item *items, size_t n_items,
                 float *logits, struct failure *failure);

#endif
