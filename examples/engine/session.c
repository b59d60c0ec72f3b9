/* What the commands need: model, tokenizer, threads, and caches of the model's shape. */
#include "session.h"

#include <stdlib.h>
#include <string.h>

#include "file.h"

static bool load_model(const char *path, struct session *s, struct failure *failure)
{
    unsigned char *data;
    size_t size;
    struct gguf gguf;
    struct failure why;

    if (!file_read(path, &data, &size, failure))
        return false;
    bool ok = gguf_parse(data, size, &gguf, &why);
    if (ok) {
        ok = model_load(&gguf, &s->model, &why) && tokenizer_from_gguf(&gguf, &s->tokenizer, &why);
        gguf_free(&gguf);
    }
    free(data);
    if (!ok)
        return fail_with(failure, "%.100s: %.140s", path, why.text);
    if (tokenizer_n_tokens(s->tokenizer) != s->model.shape.n_vocab)
        return fail_with(failure, "%.100s: %zu tokens for %zu embeddings", path,
                         tokenizer_n_tokens(s->tokenizer), s->model.shape.n_vocab);
    return true;
}

static bool start_threads(const struct session_params *params, struct session *s,
                          struct failure *failure)
{
    kvc_ctx_params p = {.struct_size = sizeof(p),
                        .parallel_for = kvc_pool_parallel_for,
                        .kernels = params->kernels};
    kvc_status status = kvc_pool_create(params->n_threads, &s->pool);

    if (status != KVC_OK)
        return fail_with(failure, "cannot start threads: %s", kvc_status_str(status));
    p.parallel_user = s->pool;
    status = kvc_ctx_create(&p, &s->ctx);
    if (status != KVC_OK)
        return fail_with(failure, "cannot use the kernels \"%.40s\": %s",
                         params->kernels ? params->kernels : "", kvc_status_str(status));
    return true;
}

bool session_open(const struct session_params *params, struct session *out, struct failure *failure)
{
    struct forward_params f = {.max_rows = params->max_rows, .parallel_for = kvc_pool_parallel_for};

    memset(out, 0, sizeof(*out));
    bool ok = start_threads(params, out, failure) && load_model(params->model_path, out, failure);
    if (ok) {
        f.model = &out->model;
        f.ctx = out->ctx;
        f.n_threads = kvc_pool_n_threads(out->pool);
        f.parallel_user = out->pool;
        ok = forward_create(&f, &out->forward, failure);
    }
    if (!ok)
        session_close(out);
    return ok;
}

void session_close(struct session *s)
{
    forward_destroy(s->forward);
    kvc_ctx_destroy(s->ctx);
    kvc_pool_destroy(s->pool);
    tokenizer_destroy(s->tokenizer);
    model_free(&s->model);
    memset(s, 0, sizeof(*s));
}

bool session_read_text(const struct session *session, const char *path, size_t min_tokens,
                       size_t n_context, struct token_list *out, struct failure *failure)
{
    const int32_t bos = tokenizer_bos(session->tokenizer);
    unsigned char *text;
    size_t size;

    if (!file_read(path, &text, &size, failure))
        return false;
    const bool ok =
        tokenizer_encode(session->tokenizer, (const char *)text, size, false, out, failure);
    free(text);
    if (ok && out->n < min_tokens)
        return fail_with(failure, "%.100s has %zu tokens, fewer than %zu", path, out->n,
                         min_tokens);
    for (size_t i = 0; ok && bos >= 0 && i < out->n; i += n_context)
        out->ids[i] = bos;
    return ok;
}

/* What a policy needs of a cache. */
static void allow_policy(const struct named_policy *policy, kvc_cache_params *p)
{
    if (policy->policy.source == KVC_SOURCE_SUMS)
        p->score_mode = KVC_SCORE_TOKEN;
    p->score_decay = policy->score_decay;
    if (policy->policy.merge_rounds > 0)
        p->max_merge_tokens = KVC_PAGE_TOKENS;
}

/* Room for everything as F16 too, and for pages of other sizes while rows move between them. */
static kvc_status more_room(kvc_cache_params *p)
{
    kvc_cache_params f16 = *p;
    size_t bytes;

    f16.precision.k = f16.precision.v = KVC_F16;
    const kvc_status status = kvc_cache_full_budget(&f16, &bytes);
    p->budget_bytes = bytes + p->budget_bytes / 2;
    return status;
}

bool session_create_cache(const struct session *session, const struct cache_options *options,
                          kvc_cache **out, struct failure *failure)
{
    kvc_cache_params p;

    model_cache_params(&session->model.shape, &p);
    p.head_dim_k = p.head_dim_v = p.head_dim_k * (options->exact ? 2 : 1);
    p.max_tokens = options->max_tokens;
    p.max_append = options->max_append;
    p.recent_tokens = options->recent_tokens;
    p.sink_tokens = options->sink_tokens;
    if (!recipe_apply(&options->recipe, options->calibration, &p, failure))
        return false;
    if (options->policy && options->policy->policy.set_precision)
        p.precision = options->policy->policy.precision;
    if (options->policy && options->policy->is_used)
        allow_policy(options->policy, &p);
    kvc_status status = kvc_cache_full_budget(&p, &p.budget_bytes);
    if (status == KVC_OK && options->policy && options->policy->is_used)
        status = more_room(&p);
    if (status == KVC_OK)
        status = kvc_cache_create(session->ctx, &p, out);
    return status == KVC_OK ||
           fail_with(failure, "cannot create the cache: %s", kvc_status_str(status));
}
