/* What the commands need: model, tokenizer, threads, and caches of the model's shape. */
#ifndef ENGINE_SESSION_H
#define ENGINE_SESSION_H

#include <kvc/kvc.h>
#include <kvc/pool.h>

#include "clock.h"
#include "failure.h"
#include "forward.h"
#include "model.h"
#include "policies.h"
#include "recipes.h"
#include "rotation.h"
#include "tokenizer.h"

struct session_params {
    const char *model_path;
    const char *kernels; /* NULL: the best table of this CPU */
    size_t n_threads;    /* 0: the processors that this process may run on */
    size_t max_rows;     /* most tokens of one forward run */
};

struct session {
    struct model model;
    struct tokenizer *tokenizer;
    kvc_pool *pool;
    kvc_ctx *ctx;
    struct forward *forward;
};

/* Products run on the session's threads: call openblas_set_num_threads(1) before. */
bool session_open(const struct session_params *params, struct session *out,
                  struct failure *failure);
void session_close(struct session *session);

/* Appends the tokens of a file; fewer than @p min_tokens are a failure. Where texts of the model
 * begin with a token of their own, it takes the place of the first of each @p n_context tokens. */
bool session_read_text(const struct session *session, const char *path, size_t min_tokens,
                       size_t n_context, struct token_list *out, struct failure *failure);

/* A cache for one sequence of the session's model. */
struct cache_options {
    struct recipe recipe;
    const struct calibration *calibration; /* NULL: none */
    int32_t recent_tokens, sink_tokens;    /* where the recipe does not say */
    int32_t max_tokens, max_append;
    bool exact;                        /* for a forward with exact set */
    const struct named_policy *policy; /* NULL, or what will be applied */
};
bool session_create_cache(const struct session *session, const struct cache_options *options,
                          kvc_cache **out, struct failure *failure);

#endif
