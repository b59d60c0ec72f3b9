/* kvc-engine generate: continue a prompt. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "report.h"
#include "sample.h"
#include "session.h"
#include "utf8.h"

/* Tokens of the prompt that one run takes. */
enum { PREFILL_TOKENS = 256 };

struct generate_options {
    const char *model, *prompt, *kv, *calibration, *rope, *kernels;
    struct recipe recipe;
    int64_t tokens, threads, recent, sinks, seed;
    double temp, top_p, rope_factor;
    bool chat, json;
};

struct generation {
    const struct generate_options *o;
    struct session session;
    struct calibration calibration;
    kvc_rope rope;
    kvc_cache *cache;
    kvc_seq seq;
    struct sampler *sampler;
    struct token_list prompt;
    float *logits;
    char pending[4]; /* start of a character that is not complete yet */
    size_t n_pending;
    char *text; /* with --json: all of it */
    size_t n_text, text_size;
    size_t n_tokens; /* generated */
    double prompt_s, decode_s;
    struct failure failure;
};

static bool encode(struct generation *g, const char *text, bool parse_special)
{
    return tokenizer_encode(g->session.tokenizer, text, strlen(text), parse_special, &g->prompt,
                            &g->failure);
}

/* What every text of the model begins with, if anything. */
static bool encode_start(struct generation *g)
{
    const struct tokenizer *t = g->session.tokenizer;
    const struct gguf_text start = tokenizer_text(t, tokenizer_bos(t));

    return tokenizer_encode(g->session.tokenizer, start.data, start.size, true, &g->prompt,
                            &g->failure);
}

/* How models are asked; the first template whose mark is a token is the model's. */
static const struct chat_template {
    const char *mark, *before, *after;
} templates[] = {
    {"<|im_start|>",
     "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
     "Face<|im_end|>\n<|im_start|>",
     "<|im_end|>\n<|im_start|>assistant\n"},
    {"<start_of_turn>", "<start_of_turn>", "<end_of_turn>\n<start_of_turn>model\n"},
};

static const struct chat_template *find_template(const struct tokenizer *t)
{
    for (size_t i = 0; i < sizeof(templates) / sizeof(*templates); i++)
        if (tokenizer_special(t, templates[i].mark) >= 0)
            return &templates[i];
    return NULL;
}

/* What the user wrote cannot smuggle special tokens in. */
static bool encode_chat(struct generation *g)
{
    static const char head[] = "user\n";
    const struct chat_template *template = find_template(g->session.tokenizer);
    const size_t size = sizeof(head) + strlen(g->o->prompt);
    char *turn = malloc(size);

    if (!turn)
        return fail_with(&g->failure, "out of memory");
    snprintf(turn, size, "%s%s", head, g->o->prompt);
    const bool ok = template ? encode(g, template->before, true) && encode(g, turn, false) &&
                                   encode(g, template->after, true)
                             : fail_with(&g->failure, "--chat: the model has no template");
    free(turn);
    return ok;
}

static bool open_generation(struct generation *g)
{
    const struct generate_options *o = g->o;
    const struct session_params params = {.model_path = o->model,
                                          .kernels = o->kernels,
                                          .n_threads = (size_t)o->threads,
                                          .max_rows = PREFILL_TOKENS};
    struct cache_options cache = {.recipe = o->recipe,
                                  .calibration = &g->calibration,
                                  .recent_tokens = (int32_t)o->recent,
                                  .sink_tokens = (int32_t)o->sinks,
                                  .max_append = PREFILL_TOKENS};

    if (!session_open(&params, &g->session, &g->failure) ||
        !calibration_open(o->calibration, o->model, g->session.ctx, &g->session.model.shape,
                          &g->calibration, &g->failure) ||
        !encode_start(g) || !(o->chat ? encode_chat(g) : encode(g, o->prompt, true)))
        return false;
    const struct model_shape *s = &g->session.model.shape;
    if (g->prompt.n == 0)
        return fail_with(&g->failure, "the prompt is empty");
    if (!rotation_init(s, o->rope, o->rope_factor, &g->rope, &g->failure) ||
        !rotation_check_context(s, &g->rope, g->prompt.n + (size_t)o->tokens, &g->failure))
        return false;
    cache.max_tokens = (int32_t)(g->prompt.n + (size_t)o->tokens);
    g->logits = malloc(s->n_vocab * sizeof(float));
    if (!g->logits)
        return fail_with(&g->failure, "out of memory");
    return sampler_create(s->n_vocab, o->temp, o->top_p, (uint64_t)o->seed, &g->sampler,
                          &g->failure) &&
           session_create_cache(&g->session, &cache, &g->cache, &g->failure) &&
           (kvc_seq_create(g->cache, &g->seq) == KVC_OK ||
            fail_with(&g->failure, "cannot create a sequence"));
}

static bool keep_bytes(struct generation *g, struct gguf_text text)
{
    if (text.size > g->text_size - g->n_text) {
        const size_t size = 2 * (g->text_size + text.size);
        char *larger = realloc(g->text, size);
        if (!larger)
            return fail_with(&g->failure, "out of memory");
        g->text = larger;
        g->text_size = size;
    }
    memcpy(g->text + g->n_text, text.data, text.size);
    g->n_text += text.size;
    return true;
}

/* Writes what is complete; a character may be spread over several tokens. */
static void print_bytes(struct generation *g, struct gguf_text text)
{
    for (size_t i = 0; i < text.size; i++) {
        g->pending[g->n_pending++] = text.data[i];
        if (g->n_pending == sizeof(g->pending) ||
            utf8_complete(g->pending, g->n_pending) == g->n_pending) {
            fwrite(g->pending, 1, g->n_pending, stdout);
            g->n_pending = 0;
        }
    }
    fflush(stdout);
}

static bool run_tokens(struct generation *g, const int32_t *tokens, size_t n, bool want_logits)
{
    const struct forward_item item = {.cache = g->cache,
                                      .seq = g->seq,
                                      .tokens = tokens,
                                      .n = n,
                                      .n_skip = want_logits ? n - 1 : n,
                                      .rope = &g->rope};

    return forward_run(g->session.forward, &item, 1, g->logits, &g->failure);
}

static bool read_prompt(struct generation *g)
{
    const double start = seconds_now();

    for (size_t at = 0; at < g->prompt.n; at += PREFILL_TOKENS) {
        const size_t left = g->prompt.n - at;
        const size_t n = left < PREFILL_TOKENS ? left : PREFILL_TOKENS;
        if (!run_tokens(g, g->prompt.ids + at, n, n == left))
            return false;
    }
    g->prompt_s = seconds_now() - start;
    return true;
}

static bool continue_prompt(struct generation *g)
{
    const double start = seconds_now();

    while (g->n_tokens < (size_t)g->o->tokens && !ferror(stdout)) {
        const int32_t token = sampler_next(g->sampler, g->logits);
        if (token == g->session.model.eos)
            break;
        const struct gguf_text text = tokenizer_text(g->session.tokenizer, token);
        if (!g->o->json)
            print_bytes(g, text);
        else if (!keep_bytes(g, text))
            return false;
        g->n_tokens++;
        if (!run_tokens(g, &token, 1, true))
            return false;
    }
    g->decode_s = seconds_now() - start;
    if (!g->o->json) {
        fwrite(g->pending, 1, g->n_pending, stdout);
        putchar('\n');
        fflush(stdout);
    }
    return true;
}

static void print_json(const struct generation *g, double bytes_per_token)
{
    printf("{\"kv\":\"%s\",\"prompt_tokens\":%zu,\"tokens\":%zu,\"text\":", g->o->kv, g->prompt.n,
           g->n_tokens);
    report_print_string(g->text, g->n_text);
    printf(",\"prompt_tok_s\":%.9g,\"decode_tok_s\":%.9g,\"bytes_per_token\":%.9g}\n",
           (double)g->prompt.n / g->prompt_s, g->n_tokens ? (double)g->n_tokens / g->decode_s : 0.0,
           bytes_per_token);
}

static bool print_statistics(struct generation *g)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};

    if (kvc_cache_stats(g->cache, &stats) != KVC_OK)
        return fail_with(&g->failure, "cannot read the statistics of the cache");
    const double n = (double)(g->prompt.n + g->n_tokens);
    const struct model_shape *s = &g->session.model.shape;
    const int64_t n_coded =
        stats.n_pages_sealed * KVC_PAGE_TOKENS / (int64_t)(s->n_layers * s->n_kv_heads);
    fprintf(stderr, "prompt: %zu tokens, %.1f tokens/s; decode: %zu tokens, %.1f tokens/s\n",
            g->prompt.n, (double)g->prompt.n / g->prompt_s, g->n_tokens,
            g->n_tokens ? (double)g->n_tokens / g->decode_s : 0.0);
    fprintf(stderr,
            "KV cache: %.0f bytes a token, in pages of %d; %lld of %.0f tokens are %s, the newest "
            "and first F16\n",
            (double)stats.used_bytes / n, KVC_PAGE_TOKENS, (long long)n_coded, n, g->o->kv);
    if (g->o->json)
        print_json(g, (double)stats.used_bytes / n);
    return (fflush(stdout) == 0 && !ferror(stdout)) || fail_with(&g->failure, "cannot write");
}

static int generate(const struct generate_options *o)
{
    struct generation g = {.o = o};

    const bool ok =
        open_generation(&g) && read_prompt(&g) && continue_prompt(&g) && print_statistics(&g);
    if (!ok)
        fprintf(stderr, "kvc-engine generate: %s\n", g.failure.text);
    kvc_cache_destroy(g.cache);
    sampler_destroy(g.sampler);
    free(g.prompt.ids);
    free(g.logits);
    free(g.text);
    calibration_close(&g.calibration);
    session_close(&g.session);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

int generate_command(int argc, char **argv)
{
    struct generate_options o = {.kv = "int8",
                                 .rope = "none",
                                 .rope_factor = 2.0,
                                 .tokens = 128,
                                 .recent = 128,
                                 .sinks = 4,
                                 .top_p = 1.0};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file (required)", 0, 0},
        {"prompt", ARG_TEXT, &o.prompt, "TEXT", "text to continue (required)", 0, 0},
        {"chat", ARG_FLAG, &o.chat, "", "ask the prompt as a question, in the model's template", 0,
         0},
        {"tokens", ARG_INTEGER, &o.tokens, "N", "most tokens to generate (128)", 0, 1e6},
        {"kv", ARG_TEXT, &o.kv, "RECIPE", "f16, int8, k6v4, int4 ..., see compare (int8)", 0, 0},
        {"calibration", ARG_TEXT, &o.calibration, "F|none",
         "of calibrate (the model's own, if there is one; none: measured on the first pages)", 0,
         0},
        {"recent", ARG_INTEGER, &o.recent, "N", "newest tokens kept exact (128)", 0, 1e6},
        {"sinks", ARG_INTEGER, &o.sinks, "N", "first tokens kept exact (4)", 0, 64},
        {"rope", ARG_CHOICE, &o.rope, "none|ntk|yarn",
         "scaling of positions, for long contexts (none)", 0, 0},
        {"rope-factor", ARG_REAL, &o.rope_factor, "F", "of the scaling (2)", 1, 1024},
        {"temp", ARG_REAL, &o.temp, "T", "temperature; 0 is greedy (0)", 0, 100},
        {"top-p", ARG_REAL, &o.top_p, "P", "draw from the most probable tokens up to P (1)", 1e-6,
         1},
        {"seed", ARG_INTEGER, &o.seed, "N", "of the random numbers (0)", 0, 9e15},
        {"json", ARG_FLAG, &o.json, "", "print one JSON object at the end instead of the text", 0,
         0},
        {"threads", ARG_INTEGER, &o.threads, "N", "0: as many as there are processors (0)", 0,
         1024},
        {"kernels", ARG_CHOICE, &o.kernels, "ref|avx2|avx512|vnni", "of libkvc (the best)", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-engine generate --model FILE --prompt TEXT [OPTIONS]\n"
               "Continue a prompt; the text goes to standard output.\n\n");
        args_print_help(args, n_args);
        return EXIT_DONE;
    }
    if (ok && (!o.model || !o.prompt))
        ok = fail_with(&failure, "--model and --prompt are required");
    ok = ok && recipe_parse(o.kv, &o.recipe, &failure);
    if (ok && (o.recipe.imm || o.recipe.article != ARTICLE_NONE))
        ok = fail_with(&failure, "%.40s is for compare: a cache keeps no such codes", o.kv);
    if (!ok) {
        fprintf(stderr, "kvc-engine generate: %s\nTry 'kvc-engine generate --help'.\n",
                failure.text);
        return EXIT_USAGE;
    }
    return generate(&o);
}
