/* The engine: logits and greedy tokens of a real model, batches, scores, sampling and arguments. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "args.h"
#include "commands.h"
#include "recode.h"
#include "sample.h"
#include "score.h"
#include "session.h"

enum { MAX_TOKENS = 64, TOP = 8, STRIDE = 16, N_EVERY = 3072, N_GREEDY = 64, MAX_ROWS = 256 };

struct expected {
    int32_t id;
    float value;
};

/* What numpy computed: data/engine/README.md tells how. */
struct reference {
    size_t n_tokens;
    int32_t tokens[MAX_TOKENS];
    struct expected top[MAX_TOKENS][TOP]; /* logits of the best tokens at each position */
    float every[N_EVERY];                 /* every 16th logit at the last position */
    struct expected greedy[N_GREEDY];     /* tokens, and how far the second best logit was */
};

static const struct reference references[] = {
#include "data/engine/reference.inc"
};
enum { N_REFERENCES = sizeof(references) / sizeof(*references) };

#define F16_TOLERANCE 0.03f

static const char *model_path;
static struct session session;
static struct forward *exact; /* over the same model */
static float *logits;         /* [MAX_ROWS][n_vocab] */

static bool open_exact(struct failure *failure)
{
    const struct forward_params params = {.model = &session.model,
                                          .ctx = session.ctx,
                                          .max_rows = MAX_ROWS,
                                          .n_threads = 1,
                                          .exact = true};

    return forward_create(&params, &exact, failure);
}

/* A missing or damaged model is a failure of the whole group. */
static int open_model(void **state)
{
    const struct session_params params = {
        .model_path = model_path, .n_threads = 2, .max_rows = MAX_ROWS};
    struct failure failure;

    (void)state;
    if (!session_open(&params, &session, &failure) || !open_exact(&failure)) {
        print_error("%s\n", failure.text);
        return -1;
    }
    logits = malloc(MAX_ROWS * session.model.shape.n_vocab * sizeof(float));
    return logits ? 0 : -1;
}

static int close_model(void **state)
{
    (void)state;
    free(logits);
    forward_destroy(exact);
    session_close(&session);
    return 0;
}

static kvc_cache *make_cache(bool is_exact)
{
    const struct cache_options options = {.recipe = {.name = "f16", .recent = -1, .sinks = -1},
                                          .recent_tokens = 128,
                                          .sink_tokens = 4,
                                          .max_tokens = 512,
                                          .max_append = 64,
                                          .exact = is_exact};
    struct failure failure;
    kvc_cache *cache = NULL;

    assert_true(session_create_cache(&session, &options, &cache, &failure));
    return cache;
}

static kvc_seq make_seq(kvc_cache *cache)
{
    kvc_seq seq;

    assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
    return seq;
}

static void run_on(struct forward *forward, const struct forward_item *items, size_t n_items)
{
    struct failure failure;

    if (!forward_run(forward, items, n_items, logits, &failure))
        fail_msg("%s", failure.text);
}

static void run(const struct forward_item *items, size_t n_items)
{
    run_on(session.forward, items, n_items);
}

static const float *logits_at(size_t row)
{
    return logits + row * session.model.shape.n_vocab;
}

static float largest_difference(const float *a, const float *b, size_t n)
{
    float largest = 0.0f;

    for (size_t i = 0; i < n; i++)
        if (!(fabsf(a[i] - b[i]) <= largest))
            largest = fabsf(a[i] - b[i]);
    return largest;
}

static float difference(const struct reference *ref)
{
    float largest = 0.0f;

    for (size_t t = 0; t < ref->n_tokens; t++)
        for (size_t i = 0; i < TOP; i++)
            largest = fmaxf(largest, fabsf(logits_at(t)[ref->top[t][i].id] - ref->top[t][i].value));
    for (size_t i = 0; i < N_EVERY; i++)
        largest = fmaxf(largest, fabsf(logits_at(ref->n_tokens - 1)[i * STRIDE] - ref->every[i]));
    return largest;
}

static const struct forward_hook nothing;

static float run_reference(const struct reference *ref, struct forward *forward,
                           struct forward_hook hook)
{
    kvc_cache *cache = make_cache(forward == exact);
    const struct forward_item item = {.cache = cache,
                                      .seq = make_seq(cache),
                                      .tokens = ref->tokens,
                                      .n = ref->n_tokens,
                                      .hook = hook};

    run_on(forward, &item, 1);
    kvc_cache_destroy(cache);
    return difference(ref);
}

static void logits_equal_the_reference(void **state)
{
    (void)state;
    assert_int_equal(session.model.shape.n_vocab, N_EVERY * STRIDE);
    for (size_t r = 0; r < N_REFERENCES; r++) {
        const float largest = run_reference(&references[r], exact, nothing);
        print_message("prompt %zu: largest difference %.2e\n", r, (double)largest);
        assert_true(largest <= 2e-3f);
    }
}

/* numpy itself moves by as much when it rounds K and V to halves: 0.013 on these prompts. */
static void half_precision_costs_little(void **state)
{
    (void)state;
    for (size_t r = 0; r < N_REFERENCES; r++) {
        const float largest = run_reference(&references[r], session.forward, nothing);
        print_message("prompt %zu: largest difference %.2e\n", r, (double)largest);
        assert_true(largest > 0.0f && largest <= F16_TOLERANCE);
    }
}

static void greedy_tokens_equal_the_reference(void **state)
{
    (void)state;
    for (size_t r = 0; r < N_REFERENCES; r++) {
        const struct reference *ref = &references[r];
        kvc_cache *cache = make_cache(false);
        struct forward_item item = {.cache = cache,
                                    .seq = make_seq(cache),
                                    .tokens = ref->tokens,
                                    .n = ref->n_tokens,
                                    .n_skip = ref->n_tokens - 1};
        int32_t token;
        run(&item, 1);
        for (size_t i = 0; i < N_GREEDY; i++) {
            token = sample_greedy(logits, session.model.shape.n_vocab);
            if (token != ref->greedy[i].id && ref->greedy[i].value < 0.01f)
                token = ref->greedy[i].id;
            assert_int_equal(token, ref->greedy[i].id);
            item.tokens = &token;
            item.n = 1;
            item.n_skip = 0;
            run(&item, 1);
        }
        kvc_cache_destroy(cache);
    }
}

static void tokens_one_by_one_give_the_same_logits(void **state)
{
    const struct reference *ref = &references[0];
    kvc_cache *cache = make_cache(false);
    struct forward_item item = {.cache = cache, .seq = make_seq(cache), .n = 1};
    struct failure failure;

    (void)state;
    for (size_t t = 0; t < ref->n_tokens; t++) {
        item.tokens = ref->tokens + t;
        assert_true(forward_run(session.forward, &item, 1, logits + t * session.model.shape.n_vocab,
                                &failure));
    }
    assert_true(difference(ref) <= F16_TOLERANCE);
    kvc_cache_destroy(cache);
}

static void a_batch_gives_what_each_item_gives_alone(void **state)
{
    const size_t n_vocab = session.model.shape.n_vocab;
    struct forward_item items[N_REFERENCES];
    float *alone = malloc(MAX_ROWS * n_vocab * sizeof(float));
    size_t n = 0;

    (void)state;
    assert_non_null(alone);
    for (size_t r = 0; r < N_REFERENCES; r++) {
        kvc_cache *cache = make_cache(false);
        items[r] = (struct forward_item){.cache = cache,
                                         .seq = make_seq(cache),
                                         .tokens = references[r].tokens,
                                         .n = references[r].n_tokens,
                                         .n_skip = references[r].n_tokens - 3 * r};
        run(&items[r], 1);
        memcpy(alone + n * n_vocab, logits, 3 * r * n_vocab * sizeof(float));
        n += 3 * r;
        assert_int_equal(kvc_seq_destroy(cache, items[r].seq), KVC_OK);
        items[r].seq = make_seq(cache);
    }
    run(items, N_REFERENCES);
    assert_true(largest_difference(alone, logits, n * n_vocab) <= F16_TOLERANCE);
    for (size_t r = 0; r < N_REFERENCES; r++)
        kvc_cache_destroy(items[r].cache);
    free(alone);
}

/* The first prompt with K and V through the codes of a recipe. */
static float run_recoded(const char *text)
{
    struct recoder *recoder;
    struct recipe recipe;
    struct failure failure;

    assert_true(recipe_parse(text, &recipe, &failure));
    assert_true(
        recoder_create(session.ctx, &session.model.shape, &recipe, NULL, &recoder, &failure));
    const float largest = run_reference(&references[0], session.forward, recoder_hook(recoder, 0));
    recoder_destroy(recoder);
    return largest;
}

/* Fewer bits, larger differences. */
static void codes_before_the_cache_change_the_logits(void **state)
{
    const float f16 = run_reference(&references[0], session.forward, nothing);
    const float int8 = run_recoded("int8:plain:imm");
    const float int4 = run_recoded("int4:plain:imm");

    (void)state;
    assert_true(int8 > 3.0f * f16 && int8 < 1.0f);
    assert_true(int4 > 3.0f * int8 && int4 < 20.0f);
}

static float run_rotated(const char *scaling, double factor)
{
    const struct reference *ref = &references[0];
    kvc_cache *cache = make_cache(false);
    struct failure failure;
    kvc_rope rope;

    assert_true(rotation_init(&session.model.shape, scaling, factor, &rope, &failure));
    const struct forward_item item = {.cache = cache,
                                      .seq = make_seq(cache),
                                      .tokens = ref->tokens,
                                      .n = ref->n_tokens,
                                      .rope = &rope};
    run(&item, 1);
    kvc_cache_destroy(cache);
    return difference(ref);
}

static void scaled_rotations_change_the_logits(void **state)
{
    const float trained = run_reference(&references[0], session.forward, nothing);

    (void)state;
    assert_true(run_rotated("none", 2.0) == trained);
    assert_true(run_rotated("ntk", 1.0) == trained);
    assert_true(run_rotated("yarn", 1.0) == trained);
    assert_true(run_rotated("ntk", 2.0) > 2.0f * trained);
    assert_true(run_rotated("yarn", 2.0) > 2.0f * trained);
}

/* Each item has its own rotation, whatever runs beside it. */
static void rotations_of_a_batch_do_not_mix(void **state)
{
    const struct reference *ref = &references[0];
    const size_t n_vocab = session.model.shape.n_vocab;
    struct forward_item items[2];
    kvc_rope ropes[2];
    struct failure failure;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        kvc_cache *cache = make_cache(false);
        assert_true(
            rotation_init(&session.model.shape, i ? "yarn" : "none", 2.0, &ropes[i], &failure));
        items[i] = (struct forward_item){.cache = cache,
                                         .seq = make_seq(cache),
                                         .tokens = ref->tokens,
                                         .n = ref->n_tokens,
                                         .n_skip = ref->n_tokens - 1,
                                         .rope = &ropes[i]};
    }
    run(items, 2);
    assert_true(largest_difference(logits, logits + n_vocab, n_vocab) > 0.1f);
    for (size_t i = 0; i < N_EVERY; i++)
        assert_true(fabsf(logits[i * STRIDE] - ref->every[i]) <= F16_TOLERANCE);
    for (size_t i = 0; i < 2; i++)
        kvc_cache_destroy(items[i].cache);
}

static void refuses_what_is_no_token_or_too_much(void **state)
{
    kvc_cache *cache = make_cache(false);
    const int32_t beyond = (int32_t)session.model.shape.n_vocab, negative = -1;
    struct forward_item item = {.cache = cache, .seq = make_seq(cache), .tokens = &beyond, .n = 1};
    struct failure failure;

    (void)state;
    assert_false(forward_run(session.forward, &item, 1, logits, &failure));
    item.tokens = &negative;
    assert_false(forward_run(session.forward, &item, 1, logits, &failure));
    item.tokens = references[0].tokens;
    item.n = MAX_ROWS + 1;
    assert_false(forward_run(session.forward, &item, 1, logits, &failure));
    item.n = 1;
    item.n_skip = 2;
    assert_false(forward_run(session.forward, &item, 1, logits, &failure));
    assert_int_equal(kvc_seq_n_tokens(cache, item.seq), 0);
    kvc_cache_destroy(cache);
}

static void scores_equal_the_formulas(void **state)
{
    /* p = 1/2, 1/4, 1/4 and q = 1/4, 1/4, 1/2, shifted by constants that must not matter */
    const float a[] = {100.0f + logf(2.0f), 100.0f, 100.0f};
    const float b[] = {-7.0f, -7.0f, -7.0f + logf(2.0f)};
    const float *rows[] = {a, b, a};
    struct position_score scores[3];
    struct score sum = {0};

    (void)state;
    score_position(rows, 3, 3, 0, scores);
    assert_true(fabs(scores[0].nll - log(2.0)) < 1e-5);
    assert_true(fabs(scores[1].nll - log(4.0)) < 1e-5);
    assert_true(scores[0].kl == 0.0 && scores[2].kl == 0.0);
    assert_true(fabs(scores[1].kl - 0.25 * log(2.0)) < 1e-5);
    assert_true(scores[0].agrees && !scores[1].agrees && scores[2].agrees);
    score_add(&sum, &scores[1]);
    score_add(&sum, &scores[0]);
    assert_int_equal(sum.n, 2);
    assert_int_equal(sum.n_agree, 1);
    assert_true(fabs(sum.nll - log(8.0)) < 1e-5);
}

static void sampling_follows_the_distribution(void **state)
{
    const float x[] = {0.0f, logf(6.0f), logf(3.0f), -INFINITY};
    int counts[4] = {0};
    struct failure failure;
    struct sampler *s, *twin;

    (void)state;
    assert_true(sampler_create(4, 1.0, 1.0, 7, &s, &failure));
    assert_true(sampler_create(4, 1.0, 1.0, 7, &twin, &failure));
    for (int i = 0; i < 10000; i++) {
        const int32_t id = sampler_next(s, x);
        assert_int_equal(id, sampler_next(twin, x));
        counts[id]++;
    }
    assert_true(abs(counts[0] - 1000) < 150 && abs(counts[1] - 6000) < 250);
    assert_true(abs(counts[2] - 3000) < 250 && counts[3] == 0);
    sampler_destroy(s);
    sampler_destroy(twin);
}

static void top_p_keeps_only_the_best(void **state)
{
    const float x[] = {0.0f, logf(6.0f), logf(3.0f)};
    struct failure failure;
    struct sampler *narrow, *wide;
    int counts[3] = {0};

    (void)state;
    assert_true(sampler_create(3, 1.0, 0.59, 1, &narrow, &failure));
    assert_true(sampler_create(3, 1.0, 0.61, 1, &wide, &failure));
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(sampler_next(narrow, x), 1);
        counts[sampler_next(wide, x)]++;
    }
    assert_int_equal(counts[0], 0);
    assert_true(counts[2] > 200);
    sampler_destroy(narrow);
    sampler_destroy(wide);
}

static void greedy_takes_the_lowest_of_equals(void **state)
{
    const float equal[] = {1.0f, 3.0f, 3.0f}, nan_first[] = {NAN, 1.0f, 2.0f}, nans[] = {NAN, NAN};

    (void)state;
    assert_int_equal(sample_greedy(equal, 3), 1);
    assert_int_equal(sample_greedy(nan_first, 3), 2);
    assert_int_equal(sample_greedy(nans, 2), 0);
}

static void arguments_are_checked(void **state)
{
    const char *text = "default", *choice = "a";
    int64_t n = 5;
    double x = 0.5;
    bool flag = false, help, is_ok;
    const struct arg args[] = {{"text", ARG_TEXT, &text, "T", "", 0, 0},
                               {"choice", ARG_CHOICE, &choice, "a|bc", "", 0, 0},
                               {"n", ARG_INTEGER, &n, "N", "", 0, 9},
                               {"x", ARG_REAL, &x, "X", "", 0, 1},
                               {"flag", ARG_FLAG, &flag, "", "", 0, 0}};
    static const struct {
        const char *argv[2];
        int argc;
        bool ok;
    } cases[] = {
        {{"--n", "9"}, 2, true},
        {{"--n=9"}, 1, true},
        {{"--n", "10"}, 2, false},
        {{"--n", "-1"}, 2, false},
        {{"--n", "3x"}, 2, false},
        {{"--n", ""}, 2, false},
        {{"--n"}, 1, false},
        {{"--x", "nan"}, 2, false},
        {{"--x=1.5"}, 1, false},
        {{"--x", "0.25"}, 2, true},
        {{"--choice", "b"}, 2, false},
        {{"--choice=bc"}, 1, true},
        {{"--choice", ""}, 2, false},
        {{"--flag=1"}, 1, false},
        {{"--flag"}, 1, true},
        {{"--text", "--n"}, 2, true},
        {{"text"}, 1, false},
        {{"--tex", "x"}, 2, false},
        {{"--n", "99999999999999999999"}, 2, false},
    };
    struct failure failure;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char *argv[2] = {(char *)cases[i].argv[0], (char *)cases[i].argv[1]};
        is_ok = args_parse(args, 5, cases[i].argc, argv, &help, &failure);
        if (is_ok != cases[i].ok)
            fail_msg("%s %s", argv[0], argv[1] ? argv[1] : "");
    }
    assert_int_equal(n, 9);
    assert_true(x == 0.25 && flag);
    assert_string_equal(choice, "bc");
    assert_string_equal(text, "--n");
}

static void commands_tell_wrong_usage_from_failure(void **state)
{
    char *none[] = {NULL};
    char *bad_list[] = {"--model", "m", "--file", "f", "--kv", "f16,int5"};
    char *no_file[] = {"--model", "/nonexistent", "--file", "f"};
    char *no_model[] = {"--model", "/nonexistent", "--prompt", "p"};
    char *bad_contexts[] = {"--model", "m", "--file", "f", "--contexts", "8192,1000"};
    char *bad_rope[] = {"--model", "m", "--file", "f", "--rope", "none,linear"};
    char *bad_policy[] = {"--model", "m", "--file", "f", "--policy", "heavy:0"};
    char *two_tuned[] = {"--model", "m", "--file", "f", "--tune", "--kv", "f16,int8"};
    char *bad_seed[] = {"--model", "m", "--prompt", "p", "--top-p", "0"};

    (void)state;
    assert_int_equal(generate_command(0, none), EXIT_USAGE);
    assert_int_equal(compare_command(0, none), EXIT_USAGE);
    assert_int_equal(compare_command(6, bad_list), EXIT_USAGE);
    assert_int_equal(compare_command(6, bad_policy), EXIT_USAGE);
    assert_int_equal(compare_command(7, two_tuned), EXIT_USAGE);
    assert_int_equal(long_command(0, none), EXIT_USAGE);
    assert_int_equal(long_command(6, bad_contexts), EXIT_USAGE);
    assert_int_equal(long_command(6, bad_rope), EXIT_USAGE);
    assert_int_equal(long_command(4, no_file), EXIT_FAILED);
    assert_int_equal(generate_command(6, bad_seed), EXIT_USAGE);
    assert_int_equal(compare_command(4, no_file), EXIT_FAILED);
    assert_int_equal(generate_command(4, no_model), EXIT_FAILED);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest without_model[] = {
        cmocka_unit_test(scores_equal_the_formulas),
        cmocka_unit_test(sampling_follows_the_distribution),
        cmocka_unit_test(top_p_keeps_only_the_best),
        cmocka_unit_test(greedy_takes_the_lowest_of_equals),
        cmocka_unit_test(arguments_are_checked),
        cmocka_unit_test(commands_tell_wrong_usage_from_failure),
    };
    const struct CMUnitTest with_model[] = {
        cmocka_unit_test(logits_equal_the_reference),
        cmocka_unit_test(half_precision_costs_little),
        cmocka_unit_test(greedy_tokens_equal_the_reference),
        cmocka_unit_test(tokens_one_by_one_give_the_same_logits),
        cmocka_unit_test(a_batch_gives_what_each_item_gives_alone),
        cmocka_unit_test(codes_before_the_cache_change_the_logits),
        cmocka_unit_test(scaled_rotations_change_the_logits),
        cmocka_unit_test(rotations_of_a_batch_do_not_mix),
        cmocka_unit_test(refuses_what_is_no_token_or_too_much),
    };

    if (argc != 2) {
        fprintf(stderr, "usage: test_engine MODEL.gguf\n");
        return 2;
    }
    model_path = argv[1];
    const int failed = cmocka_run_group_tests(without_model, NULL, NULL);
    return failed + cmocka_run_group_tests(with_model, open_model, close_model);
}
