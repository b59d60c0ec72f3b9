/* A trial: a text read with several settings side by side, in one pass over the weights, and how
 * well each predicts it. */
#include "trial.h"

#include <stdlib.h>

#include "sample.h"

static size_t n_buckets(const struct trial *t)
{
    return (t->n_context + t->bucket - 1) / t->bucket;
}

static bool open_row(struct trial *t, struct trial_row *row, struct failure *failure)
{
    const struct recipe *recipe = &row->setting.recipe;
    const struct model_shape *shape = &t->session->model.shape;
    struct cache_options options = {.recipe = *recipe,
                                    .calibration = t->calibration,
                                    .recent_tokens = t->recent_tokens,
                                    .sink_tokens = t->sink_tokens,
                                    .max_tokens = (int32_t)(t->n_context + t->n_decode),
                                    .max_append = KVC_PAGE_TOKENS,
                                    .policy = &row->setting.policy};

    row->scores = calloc(n_buckets(t), sizeof(*row->scores));
    if (!row->scores)
        return fail_with(failure, "out of memory");
    if (recipe->imm &&
        !recoder_create(t->session->ctx, shape, recipe, t->calibration, &row->recoder, failure))
        return false;
    if (recipe->article != ARTICLE_NONE &&
        !article_create(t->session->ctx, shape, recipe, t->n_context + t->n_decode, &row->article,
                        failure))
        return false;
    return session_create_cache(t->session, &options, &row->cache, failure);
}

bool trial_open(struct trial *t, struct failure *failure)
{
    for (size_t r = 0; r < t->n_rows; r++)
        if (!open_row(t, &t->rows[r], failure))
            return false;
    const size_t n = t->n_rows * KVC_PAGE_TOKENS * t->session->model.shape.n_vocab;
    t->logits = malloc((n + 1) * sizeof(float));
    return t->logits || fail_with(failure, "out of memory");
}

void trial_close(struct trial *t)
{
    for (size_t r = 0; r < t->n_rows; r++) {
        kvc_cache_destroy(t->rows[r].cache);
        recoder_destroy(t->rows[r].recoder);
        article_destroy(t->rows[r].article);
        free(t->rows[r].scores);
    }
    free(t->logits);
}

bool trial_start(struct trial *t, struct failure *failure)
{
    for (size_t r = 0; r < t->n_rows; r++) {
        struct trial_row *row = &t->rows[r];
        if (row->seq && kvc_seq_destroy(row->cache, row->seq) != KVC_OK)
            return fail_with(failure, "cannot destroy a sequence");
        if (kvc_seq_create(row->cache, &row->seq) != KVC_OK)
            return fail_with(failure, "cannot create a sequence");
        if (row->article)
            article_restart(row->article);
    }
    return true;
}

/* Tokens from position @p at on that are sinks of the row. */
static size_t sinks_from(const struct trial *t, const struct trial_row *row, size_t at)
{
    const int32_t own = row->setting.recipe.sinks;
    const size_t sinks = (size_t)(own >= 0 ? own : t->sink_tokens);

    return at < sinks ? sinks - at : 0;
}

/* The tokens from position @p at on. */
static struct forward_item item_of(const struct trial *t, const struct trial_row *row,
                                   const int32_t *tokens, size_t at, size_t n, size_t n_skip)
{
    struct forward_hook hook = {0};

    if (row->recoder)
        hook = recoder_hook(row->recoder, sinks_from(t, row, at));
    if (row->article)
        hook = article_hook(row->article);
    return (struct forward_item){.cache = row->cache,
                                 .seq = row->seq,
                                 .tokens = tokens,
                                 .n = n,
                                 .n_skip = n_skip,
                                 .rope = row->setting.rope,
                                 .hook = hook};
}

/* The logits of one call: the wanted positions of all rows. */
struct call {
    const struct trial *t;
    size_t n_wanted;
    const int32_t *targets; /* the tokens that follow the wanted positions */
    struct position_score scores[KVC_PAGE_TOKENS][SCORE_MAX_ROWS];
};

static const float *logits_of(const struct call *call, size_t row, size_t i)
{
    return call->t->logits + (row * call->n_wanted + i) * call->t->session->model.shape.n_vocab;
}

static void score_task(void *arg, size_t i)
{
    struct call *call = arg;
    const float *rows[SCORE_MAX_ROWS] = {NULL};

    for (size_t r = 0; r < call->t->n_rows; r++)
        rows[r] = logits_of(call, r, i);
    score_position(rows, call->t->n_rows, call->t->session->model.shape.n_vocab, call->targets[i],
                   call->scores[i]);
}

static bool read_call(struct trial *t, const int32_t *chunk, size_t at, size_t n,
                      struct failure *failure)
{
    const bool is_last = at + n == t->n_context; /* nothing follows, to be scored */
    const size_t skip = at >= t->first_scored      ? 0
                        : t->first_scored - at < n ? t->first_scored - at
                                                   : n;
    struct forward_item items[SCORE_MAX_ROWS];
    struct call call = {.t = t, .n_wanted = n - skip, .targets = chunk + at + skip + 1};

    for (size_t r = 0; r < t->n_rows; r++)
        items[r] = item_of(t, &t->rows[r], chunk + at, at, n, skip);
    if (!forward_run(t->session->forward, items, t->n_rows, t->logits, failure))
        return false;
    const size_t n_scored = call.n_wanted - is_last;
    kvc_pool_parallel_for(t->session->pool, n_scored, score_task, &call);
    for (size_t r = 0; r < t->n_rows; r++) {
        for (size_t i = 0; i < n_scored; i++)
            score_add(&t->rows[r].scores[(at + skip + i + 1) / t->bucket], &call.scores[i][r]);
        if (is_last)
            t->rows[r].next =
                sample_greedy(logits_of(&call, r, n_scored), t->session->model.shape.n_vocab);
    }
    return true;
}

static bool compress(const struct trial_row *row, struct failure *failure)
{
    if (!row->setting.policy.is_used)
        return true;
    const kvc_status status =
        kvc_cache_compress(row->cache, row->seq, &row->setting.policy.policy, NULL, NULL);
    return status == KVC_OK || fail_with(failure, "applying the policy %s: %s",
                                         row->setting.policy.name, kvc_status_str(status));
}

/* Calls end at the borders of pages, which count from the sinks. */
bool trial_read(struct trial *t, const int32_t *chunk, size_t first, size_t last,
                struct failure *failure)
{
    const size_t sinks = (size_t)t->sink_tokens;

    for (size_t at = first, n; at < last; at += n) {
        n = at < sinks ? sinks - at : KVC_PAGE_TOKENS - (at - sinks) % KVC_PAGE_TOKENS;
        n = n < last - at ? n : last - at;
        if (!read_call(t, chunk, at, n, failure))
            return false;
        for (size_t r = 0; r < t->n_rows; r++)
            if (!compress(&t->rows[r], failure))
                return false;
    }
    return true;
}

bool trial_measure_bytes(struct trial *t, size_t row, struct trial_bytes *out,
                         struct failure *failure)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};

    if (kvc_seq_settle(t->rows[row].cache, t->rows[row].seq) != KVC_OK ||
        kvc_cache_stats(t->rows[row].cache, &stats) != KVC_OK)
        return fail_with(failure, "cannot read the statistics of the cache");
    out->per_token = (double)stats.used_bytes / (double)t->n_context;
    out->fixed = (double)(stats.fixed_bytes - stats.free_page_bytes);
    out->coded = stats.n_pages_sealed > 0 || t->rows[row].recoder || t->rows[row].article;
    return true;
}

static int compare_seconds(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

bool trial_measure_decode(struct trial *t, size_t r, double *tokens_a_second,
                          struct failure *failure)
{
    struct trial_row *row = &t->rows[r];
    double *seconds = malloc(t->n_decode * sizeof(*seconds));

    if (!seconds)
        return fail_with(failure, "out of memory");
    for (size_t i = 0; i < t->n_decode; i++) {
        const double start = seconds_now();
        const struct forward_item item = item_of(t, row, &row->next, t->n_context + i, 1, 0);
        if (!forward_run(t->session->forward, &item, 1, t->logits, failure)) {
            free(seconds);
            return false;
        }
        row->next = sample_greedy(t->logits, t->session->model.shape.n_vocab);
        seconds[i] = seconds_now() - start;
    }
    qsort(seconds, t->n_decode, sizeof(*seconds), compare_seconds);
    *tokens_a_second = 1.0 / seconds[t->n_decode / 2]; /* others use the machine too */
    free(seconds);
    return true;
}
