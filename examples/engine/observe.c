/* Reading a text to see the K and Q of a model. */
#include "observe.h"

#include <stdio.h>

bool observe_create(const struct session *session, kvc_observation **out, struct failure *failure)
{
    const struct model_shape *s = &session->model.shape;
    const kvc_observed_shape shape = {.struct_size = sizeof(shape),
                                      .n_layers = (int32_t)s->n_layers,
                                      .n_heads = (int32_t)s->n_heads,
                                      .n_kv_heads = (int32_t)s->n_kv_heads,
                                      .head_dim = (int32_t)s->head_dim};
    const kvc_status status = kvc_observation_create(session->ctx, &shape, out);

    return status == KVC_OK ||
           fail_with(failure, "cannot observe the model: %s", kvc_status_str(status));
}

/* One call, and how many of its first tokens are not counted. */
struct watch {
    kvc_observation *observation;
    size_t n_skip;
};

static kvc_view after(const kvc_view *view, size_t first)
{
    kvc_view rest = *view;

    rest.data = (float *)view->data + first * view->token_stride;
    rest.n_tokens -= first;
    return rest;
}

static bool watch(void *user, int32_t layer, const kvc_view *q, const kvc_view *k,
                  const kvc_view *v, struct failure *failure)
{
    const struct watch *w = user;
    const kvc_view q_seen = after(q, w->n_skip), k_seen = after(k, w->n_skip);

    (void)v;
    return (kvc_observe_keys(w->observation, layer, &k_seen) == KVC_OK &&
            kvc_observe_queries(w->observation, layer, &q_seen) == KVC_OK) ||
           fail_with(failure, "cannot observe layer %d", (int)layer);
}

static bool observe_context(const struct session *session, kvc_cache *cache, const int32_t *tokens,
                            size_t n, size_t n_sinks, kvc_observation *observation,
                            struct failure *failure)
{
    struct watch w = {.observation = observation};
    kvc_seq seq;

    if (kvc_seq_create(cache, &seq) != KVC_OK)
        return fail_with(failure, "cannot create a sequence");
    for (size_t at = 0, part; at < n; at += part) {
        part = n - at < KVC_PAGE_TOKENS ? n - at : KVC_PAGE_TOKENS;
        w.n_skip = at >= n_sinks ? 0 : n_sinks - at < part ? n_sinks - at : part;
        const struct forward_item item = {.cache = cache,
                                          .seq = seq,
                                          .tokens = tokens + at,
                                          .n = part,
                                          .n_skip = part,
                                          .hook = {.touch = watch, .user = &w}};
        if (!forward_run(session->forward, &item, 1, NULL, failure))
            return false;
    }
    return kvc_seq_destroy(cache, seq) == KVC_OK || fail_with(failure, "cannot destroy a sequence");
}

bool observe_text(const struct session *session, const int32_t *tokens, size_t n, size_t n_context,
                  size_t n_sinks, kvc_observation *observation, struct failure *failure)
{
    const struct cache_options options = {.recipe = {.name = "f16", .recent = -1, .sinks = -1},
                                          .max_tokens = (int32_t)n_context,
                                          .max_append = KVC_PAGE_TOKENS};
    kvc_cache *cache;
    bool ok = session_create_cache(session, &options, &cache, failure);

    for (size_t at = 0, part; at < n && ok; at += part) {
        part = n - at < n_context ? n - at : n_context;
        fprintf(stderr, "observing token %zu of %zu\n", at, n);
        ok = observe_context(session, cache, tokens + at, part, n_sinks, observation, failure);
    }
    kvc_cache_destroy(cache);
    return ok;
}
