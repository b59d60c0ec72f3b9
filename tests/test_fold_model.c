/* A fold of a real model: with powers of two and exact K, no bit of its logits changes; with an F16
 * cache next to nothing does. */
#define _POSIX_C_SOURCE 200809L /* mkstemp */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
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

enum { N_TOKENS = 96, N_OBSERVED = 64 };

static const char *model_path;
static char folded_path[] = "/tmp/kvc-folded-XXXXXX";
static struct session original, folded;
static int32_t tokens[N_TOKENS];

static void expect(bool ok, const struct failure *failure)
{
    if (!ok)
        fail_msg("%s", failure->text);
}

static void open_session(const char *path, struct session *out)
{
    const struct session_params params = {.model_path = path, .n_threads = 2, .max_rows = N_TOKENS};
    struct failure failure;

    expect(session_open(&params, out, &failure), &failure);
}

/* Folds what a short text shows, in powers of two. */
static void write_folded(void)
{
    const struct folding_settings settings = {.rule = KVC_SMOOTH_ABSMAX,
                                              .factor = 1.0f,
                                              .power_of_two = true,
                                              .filter = {.struct_size = sizeof(settings.filter)}};
    struct checkpoint checkpoint;
    struct failure failure;
    kvc_observation *observation;

    expect(observe_create(&original, &observation, &failure), &failure);
    expect(observe_text(&original, tokens, N_OBSERVED, N_OBSERVED, 4, observation, &failure),
           &failure);
    expect(checkpoint_open(model_path, NULL, &checkpoint, &failure), &failure);
    struct folded_layer *layers = calloc(checkpoint.n_layers, sizeof(*layers));
    assert_non_null(layers);
    expect(folding_run(original.ctx, &settings, observation, &checkpoint, layers, &failure),
           &failure);
    for (size_t l = 0; l < checkpoint.n_layers; l++) {
        assert_true(layers[l].is_folded && layers[l].rounding.n_inexact == 0);
        assert_true(layers[l].min_scale < layers[l].max_scale); /* it is a fold */
    }
    expect(checkpoint_write_record(&checkpoint, &failure), &failure);
    expect(file_write(folded_path, checkpoint.bytes, checkpoint.size, &failure), &failure);
    free(layers);
    checkpoint_close(&checkpoint);
    kvc_observation_destroy(observation);
}

static int open_models(void **state)
{
    (void)state;
    const int file = mkstemp(folded_path);
    if (file < 0 || close(file) != 0)
        return -1;
    open_session(model_path, &original);
    for (size_t i = 0; i < N_TOKENS; i++)
        tokens[i] = (int32_t)((i * 7919 + 1234) % original.model.shape.n_vocab);
    write_folded();
    open_session(folded_path, &folded);
    return 0;
}

static int close_models(void **state)
{
    (void)state;
    session_close(&original);
    session_close(&folded);
    return unlink(folded_path);
}

/* Attention in floats, K and V as they come: all tokens in one call. */
static bool attend_in_floats(void *user, int32_t layer, const kvc_attend_options *options,
                             const kvc_view *q, const kvc_view *k, const kvc_view *v,
                             const kvc_view *out, struct failure *failure)
{
    const size_t group = q->n_heads / k->n_heads;

    (void)user, (void)layer, (void)failure;
    for (size_t t = 0; t < q->n_tokens; t++)
        for (size_t h = 0; h < q->n_heads; h++) {
            const float *query = (const float *)q->data + t * q->token_stride + h * q->head_stride;
            float *sum = (float *)out->data + t * out->token_stride + h * out->head_stride;
            float weights[N_TOKENS], most = -INFINITY, total = 0.0f;
            for (size_t i = 0; i <= t; i++) {
                const float *key =
                    (const float *)k->data + i * k->token_stride + h / group * k->head_stride;
                weights[i] = 0.0f;
                for (size_t c = 0; c < q->head_dim; c++)
                    weights[i] += query[c] * key[c];
                weights[i] *= options->scale;
                most = fmaxf(most, weights[i]);
            }
            memset(sum, 0, v->head_dim * sizeof(*sum));
            for (size_t i = 0; i <= t; i++) {
                const float *value =
                    (const float *)v->data + i * v->token_stride + h / group * v->head_stride;
                weights[i] = expf(weights[i] - most);
                total += weights[i];
                for (size_t c = 0; c < v->head_dim; c++)
                    sum[c] += weights[i] * value[c];
            }
            for (size_t c = 0; c < v->head_dim; c++)
                sum[c] /= total;
        }
    return true;
}

/* Logits of all tokens. */
static float *logits_of(const struct session *session, struct forward_hook hook)
{
    const struct cache_options options = {.recipe = {.recent = -1, .sinks = -1},
                                          .recent_tokens = 128,
                                          .sink_tokens = 4,
                                          .max_tokens = N_TOKENS,
                                          .max_append = N_TOKENS};
    float *logits = malloc(N_TOKENS * session->model.shape.n_vocab * sizeof(float));
    struct failure failure;
    kvc_cache *cache;
    kvc_seq seq;

    assert_non_null(logits);
    expect(session_create_cache(session, &options, &cache, &failure), &failure);
    assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
    const struct forward_item item = {
        .cache = cache, .seq = seq, .tokens = tokens, .n = N_TOKENS, .hook = hook};
    expect(forward_run(session->forward, &item, 1, logits, &failure), &failure);
    kvc_cache_destroy(cache);
    return logits;
}

static void powers_of_two_change_no_bit_of_the_logits(void **state)
{
    const size_t n = N_TOKENS * original.model.shape.n_vocab;
    const struct forward_hook floats = {.attend = attend_in_floats};
    float *was = logits_of(&original, floats), *is = logits_of(&folded, floats);
    size_t n_different = 0;

    (void)state;
    for (size_t i = 0; i < n; i++)
        n_different += was[i] != is[i];
    print_message("%zu of %zu logits differ\n", n_different, n);
    assert_int_equal(n_different, 0);
    free(was);
    free(is);
}

/* Keys that a half holds as a subnormal round otherwise once they are scaled. */
static void halves_change_next_to_nothing(void **state)
{
    const size_t n_vocab = original.model.shape.n_vocab;
    const struct forward_hook nothing = {0};
    float *was = logits_of(&original, nothing), *is = logits_of(&folded, nothing);
    struct score score = {0};

    (void)state;
    for (size_t t = 0; t + 1 < N_TOKENS; t++) {
        const float *rows[2] = {was + t * n_vocab, is + t * n_vocab};
        struct position_score at[2];
        score_position(rows, 2, n_vocab, tokens[t + 1], at);
        score_add(&score, &at[1]);
    }
    print_message("KL %.2e\n", score.kl / (double)score.n);
    assert_true(score.kl / (double)score.n <= 1e-6);
    free(was);
    free(is);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(powers_of_two_change_no_bit_of_the_logits),
        cmocka_unit_test(halves_change_next_to_nothing),
    };

    if (argc != 2) {
        fprintf(stderr, "Usage: %s MODEL\n", argv[0]);
        return 2;
    }
    model_path = argv[1];
    return cmocka_run_group_tests(tests, open_models, close_models);
}
