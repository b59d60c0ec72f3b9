/* Folds of real models: what the engine computes with the folded file. */
#define _POSIX_C_SOURCE 200809L /* getpid() */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "file.h"
#include "folding.h"
#include "observe.h"
#include "score.h"
#include "session.h"

enum { N_TOKENS = 64 };

static const char text[] =
    "The keeper of the lighthouse wrote one line a day: wind, sea, ships. On the ninth of March he "
    "wrote three, because a ship that he had not seen before had anchored where none can anchor, "
    "lowered a boat, and taken it in again without anybody having gone ashore. He counted 14 men, "
    "one dog; then fog came.";

static const char *const *models;
static size_t n_models;
static char folded_path[64];

/* What a model says after each token of the text. */
struct answers {
    size_t n_vocab;
    int32_t tokens[N_TOKENS];
    float *plain; /* [N_TOKENS][n_vocab] with the cache's F16 pages */
    float *exact; /* the same, K and V never stored in fewer bits than floats have */
};

static float dot(const float *a, const float *b, size_t n)
{
    float sum = 0.0f;

    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static float *row_of(const kvc_view *view, size_t token, size_t head)
{
    return (float *)view->data + token * view->token_stride + head * view->head_stride;
}

/* Attention in floats over the K and V of the call, which is the whole text. */
static bool attend(void *user, int32_t layer, const kvc_attend_options *options, const kvc_view *q,
                   const kvc_view *k, const kvc_view *v, const kvc_view *out,
                   struct failure *failure)
{
    const size_t group = q->n_heads / k->n_heads, d = q->head_dim;
    float p[N_TOKENS];

    (void)user, (void)layer, (void)failure;
    for (size_t t = 0; t < q->n_tokens; t++)
        for (size_t h = 0; h < q->n_heads; h++) {
            float *o = row_of(out, t, h), most = -INFINITY, sum = 0.0f;
            for (size_t j = 0; j <= t; j++) {
                p[j] = options->scale * dot(row_of(q, t, h), row_of(k, j, h / group), d);
                most = fmaxf(most, p[j]);
            }
            memset(o, 0, d * sizeof(*o));
            for (size_t j = 0; j <= t; j++)
                sum += p[j] = expf(p[j] - most);
            for (size_t j = 0; j <= t; j++)
                for (size_t c = 0; c < d; c++)
                    o[c] += p[j] / sum * row_of(v, j, h / group)[c];
        }
    return true;
}

static void run(const struct session *session, const int32_t *tokens, bool exact, float *logits)
{
    const struct cache_options options = {.recipe = {.name = "f16", .recent = -1, .sinks = -1},
                                          .max_tokens = N_TOKENS,
                                          .max_append = N_TOKENS};
    struct failure failure = {""};
    kvc_cache *cache;
    kvc_seq seq;

    assert_true(session_create_cache(session, &options, &cache, &failure));
    assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
    const struct forward_item item = {.cache = cache,
                                      .seq = seq,
                                      .tokens = tokens,
                                      .n = N_TOKENS,
                                      .hook = {.attend = exact ? attend : NULL}};
    if (!forward_run(session->forward, &item, 1, logits, &failure))
        fail_msg("%s", failure.text);
    kvc_cache_destroy(cache);
}

static void open_session(const char *path, struct session *session)
{
    const struct session_params params = {.model_path = path, .n_threads = 2, .max_rows = N_TOKENS};
    struct failure failure = {""};

    if (!session_open(&params, session, &failure))
        fail_msg("%s", failure.text);
}

static void tokenize(const struct session *session, int32_t *tokens)
{
    struct token_list list = {0};
    struct failure failure = {""};

    assert_true(
        tokenizer_encode(session->tokenizer, text, sizeof(text) - 1, false, &list, &failure));
    assert_true(list.n >= N_TOKENS);
    memcpy(tokens, list.ids, N_TOKENS * sizeof(*tokens));
    if (tokenizer_bos(session->tokenizer) >= 0)
        tokens[0] = tokenizer_bos(session->tokenizer);
    free(list.ids);
}

static void ask(const struct session *session, struct answers *out)
{
    tokenize(session, out->tokens);
    out->n_vocab = session->model.shape.n_vocab;
    out->plain = malloc(N_TOKENS * out->n_vocab * sizeof(float));
    out->exact = malloc(N_TOKENS * out->n_vocab * sizeof(float));
    assert_true(out->plain && out->exact);
    run(session, out->tokens, false, out->plain);
    run(session, out->tokens, true, out->exact);
}

static void free_answers(struct answers *a)
{
    free(a->plain);
    free(a->exact);
}

/* Observes the model on its own text, folds it, and writes it to folded_path. */
static void fold(const char *path, const struct session *session, const int32_t *tokens,
                 bool power_of_two)
{
    const struct folding_settings settings = {.factor = 1.0f,
                                              .power_of_two = power_of_two,
                                              .filter = {.struct_size = sizeof(kvc_smooth_filter)}};
    kvc_observation *observation;
    struct checkpoint c;
    struct failure failure = {""};

    assert_true(observe_create(session, &observation, &failure));
    assert_true(observe_text(session, tokens, N_TOKENS, N_TOKENS, 4, observation, &failure));
    assert_true(checkpoint_open(path, NULL, &c, &failure));
    struct folded_layer *layers = calloc(c.n_layers, sizeof(*layers));
    assert_non_null(layers);
    if (!folding_run(session->ctx, &settings, observation, &c, layers, &failure) ||
        !checkpoint_write_record(&c, &failure) ||
        !file_write(folded_path, c.bytes, c.size, &failure))
        fail_msg("%s", failure.text);
    const struct folded_layer total = folding_total(layers, c.n_layers);
    print_message("%s: %zu attentions of %s, scales %g ... %g, scores on random rows %.3g\n", path,
                  c.n_layers, c.architecture, (double)total.min_scale, (double)total.max_scale,
                  total.change);
    assert_true(total.min_scale < total.max_scale);
    free(layers);
    kvc_observation_destroy(observation);
    checkpoint_close(&c);
}

static void answer_before_and_after(const char *path, bool power_of_two, struct answers *before,
                                    struct answers *after)
{
    struct session session;

    open_session(path, &session);
    ask(&session, before);
    fold(path, &session, before->tokens, power_of_two);
    session_close(&session);
    open_session(folded_path, &session);
    ask(&session, after);
    session_close(&session);
}

/* Mean KL over the positions, nats. */
static double divergence(const float *base, const float *other, size_t n_vocab)
{
    double kl = 0.0;

    for (size_t t = 0; t < N_TOKENS; t++) {
        const float *const rows[] = {base + t * n_vocab, other + t * n_vocab};
        struct position_score scores[2];
        score_position(rows, 2, n_vocab, 0, scores);
        kl += scores[1].kl / N_TOKENS;
    }
    return kl;
}

/* In floats every product of a channel of Q and K is the same, so every sum is. */
static void answers_with_the_same_bits_where_scales_are_powers_of_two(void **state)
{
    (void)state;
    for (size_t i = 0; i < n_models; i++) {
        struct answers before, after;
        answer_before_and_after(models[i], true, &before, &after);
        const size_t size = N_TOKENS * before.n_vocab * sizeof(float);
        const double kl = divergence(before.plain, after.plain, before.n_vocab);
        const bool same = memcmp(before.exact, after.exact, size) == 0;
        print_message("powers of two: logits in floats %s; KL with F16 pages %.3g\n",
                      same ? "identical" : "differ", kl);
        assert_true(same);
        assert_true(kl <= 1e-6);
        free_answers(&before);
        free_answers(&after);
    }
}

/* Block scales are rounded to 11 bits: the model is as far from itself as that, and not identical,
 * which shows that the test above can tell. */
static void answers_nearly_the_same_where_scales_are_free(void **state)
{
    struct answers before, after;

    (void)state;
    answer_before_and_after(models[0], false, &before, &after);
    const double kl = divergence(before.exact, after.exact, before.n_vocab);
    print_message("free scales: KL in floats %.3g, with F16 pages %.3g\n", kl,
                  divergence(before.plain, after.plain, before.n_vocab));
    assert_true(kl > 0.0 && kl < 1e-4);
    free_answers(&before);
    free_answers(&after);
}

static int tear_down(void **state)
{
    (void)state;
    return unlink(folded_path) == 0 ? 0 : -1;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_with_the_same_bits_where_scales_are_powers_of_two),
        cmocka_unit_test(answers_nearly_the_same_where_scales_are_free),
    };

    models = (const char *const *)argv + 1;
    n_models = (size_t)argc - 1;
    snprintf(folded_path, sizeof(folded_path), "fold_model_%ld.gguf", (long)getpid());
    if (n_models == 0) {
        print_error("Usage: test_fold_model MODEL...\n");
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, tear_down);
}
