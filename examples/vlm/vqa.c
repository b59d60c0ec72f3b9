/* kvc-engine vqa: a question about a picture, answered on a compressed cache. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "image_file.h"
#include "overlay.h"
#include "question.h"
#include "vlm.h"

enum { MAX_ROWS = N_PREFIX + MAX_CELLS + 64, N_DRAWN = 8 };

struct vqa_options {
    const char *model, *ask[2], *profile, *kind, *overlay, *kernels;
    int64_t grid, picture, rate; /* rate: per cent of the patches, or -1: the profile */
    bool json;
};

/* One picture in one cache. */
struct vqa {
    const struct vqa_options *o;
    struct vlm vlm;
    struct reader reader;
    kvc_cache *cache;
    kvc_seq picture; /* BOS, IMAGE and the patches */
    kvc_map *map;
    uint8_t *rgb;
};

struct answer {
    int32_t words[MAX_ANSWER];
    size_t n;
    double likelihood;                /* of all its words and the stop behind them */
    size_t bytes_before, bytes_after; /* of its pages, all layers and heads */
    int64_t rows_before, rows_after;  /* of the picture in a layer and head */
};

static bool check(kvc_status status, const char *what, struct failure *failure)
{
    return status == KVC_OK || fail_with(failure, "%s: %s", what, kvc_status_str(status));
}

static bool create_cache(struct vqa *v, struct failure *failure)
{
    kvc_cache_params p;

    model_cache_params(&v->vlm.model.shape, &p);
    p.precision.k = p.precision.v = KVC_F16;
    p.max_sequences = 2;
    p.max_tokens = 4 * MAX_ROWS;
    p.max_append = p.max_hold_tokens = MAX_ROWS;
    p.probe_rows = PROBE_ROWS;
    p.recent_tokens = 0;
    p.sink_tokens = N_PREFIX;
    p.max_merge_tokens = MAX_CELLS;
    return check(kvc_cache_full_budget(&p, &p.budget_bytes), "cache", failure) &&
           check(kvc_cache_create(v->reader.ctx, &p, &v->cache), "cache", failure) &&
           check(kvc_map_create(v->cache, MAX_ROWS, &v->map), "cache", failure);
}

static bool see(struct vqa *v, struct failure *failure)
{
    static const int32_t bos = WORD_BOS;
    const int grid = (int)v->o->grid;

    reader_encode(&v->reader, v->rgb, grid);
    return check(kvc_seq_create(v->cache, &v->picture), "sequence", failure) &&
           check(kvc_seq_hold(v->cache, v->picture), "sequence", failure) &&
           reader_read(&v->reader, v->cache, v->picture, &bos, 1, failure) &&
           reader_see(&v->reader, v->cache, v->picture, 0, grid, failure);
}

/* What the pages of a sequence take; others may share them. */
static bool count_bytes(const struct vqa *v, kvc_seq seq, size_t *bytes, struct failure *failure)
{
    const struct model_shape *s = &v->vlm.model.shape;

    *bytes = 0;
    for (size_t i = 0; i < s->n_layers * s->n_kv_heads; i++) {
        const int32_t layer = (int32_t)(i / s->n_kv_heads), head = (int32_t)(i % s->n_kv_heads);
        for (int64_t page = 0; page < kvc_seq_n_pages(v->cache, seq, layer, head); page++) {
            kvc_page_info info = {.struct_size = sizeof(info)};
            if (!check(kvc_seq_read_page(v->cache, seq, layer, head, page, &info, NULL, NULL, 0),
                       "reading pages", failure))
                return false;
            *bytes += info.n_bytes;
        }
    }
    return true;
}

static bool compresses(const struct vqa *v)
{
    return v->o->rate >= 0 || strcmp(v->o->profile, "none") != 0;
}

static bool make_policy(const struct vqa *v, kvc_policy *policy, struct failure *failure)
{
    if (v->o->rate < 0)
        return check(kvc_policy_preset(v->o->profile, policy), "profile", failure);
    kvc_policy_default(policy);
    policy->visual_rate = (float)v->o->rate / 100.0f;
    policy->set_precision = true;
    policy->precision.k = policy->precision.v = KVC_F16;
    return true;
}

/* Compresses by the words of the question, takes them back, and reads them again. */
static bool compress(struct vqa *v, kvc_seq seq, const int32_t *words, size_t n,
                     struct answer *answer, struct failure *failure)
{
    kvc_policy policy;

    if (!compresses(v))
        return true;
    if (!make_policy(v, &policy, failure))
        return false;
    policy.last_tokens = (int32_t)n;
    if (!check(kvc_cache_compress(v->cache, seq, &policy, NULL, v->map), "compressing", failure) ||
        !check(kvc_seq_truncate(v->cache, seq, N_PREFIX + v->o->grid * v->o->grid), "taking back",
               failure))
        return false;
    answer->rows_after = kvc_seq_n_rows(v->cache, seq, 0, 0) - N_PREFIX;
    return count_bytes(v, seq, &answer->bytes_after, failure) &&
           reader_read(&v->reader, v->cache, seq, words, n, failure);
}

static double likelihood(const float *logits, int32_t word)
{
    double sum = 0.0;

    for (int i = 0; i < N_WORDS; i++)
        sum += exp((double)logits[i] - (double)logits[word]);
    return 1.0 / sum;
}

/* Word by word, so that the logits before each are at hand. */
static bool answer_question(struct vqa *v, kvc_seq seq, struct answer *answer,
                            struct failure *failure)
{
    size_t n = 1;

    answer->likelihood = 1.0;
    for (answer->n = 0; n == 1 && answer->n < MAX_ANSWER; answer->n += n) {
        int32_t *word = &answer->words[answer->n];
        float logits[N_WORDS];
        memcpy(logits, v->reader.logits, sizeof(logits));
        if (!reader_answer(&v->reader, v->cache, seq, word, 1, &n, failure))
            return false;
        answer->likelihood *= likelihood(logits, n == 1 ? *word : WORD_STOP);
    }
    return true;
}

/* Each question on a copy of the picture as it was read. */
static bool ask(struct vqa *v, const int32_t *words, size_t n, struct answer *answer,
                struct failure *failure)
{
    kvc_seq seq;

    if (!count_bytes(v, v->picture, &answer->bytes_before, failure) ||
        !check(kvc_seq_fork(v->cache, v->picture, &seq), "copying", failure))
        return false;
    answer->bytes_after = answer->bytes_before;
    answer->rows_before = answer->rows_after = v->o->grid * v->o->grid;
    const bool ok = reader_read(&v->reader, v->cache, seq, words, n, failure) &&
                    compress(v, seq, words, n, answer, failure) &&
                    answer_question(v, seq, answer, failure);
    kvc_seq_destroy(v->cache, seq);
    return ok;
}

/* Letters of a code stand together. */
static void text_of(const int32_t *words, size_t n, char *text, size_t size)
{
    size_t used = 0;

    text[0] = '\0';
    for (size_t i = 0; i < n && used < size; i++) {
        const bool joins = i > 0 && words[i] >= WORD_OF_GLYPH && words[i - 1] >= WORD_OF_GLYPH;
        used += (size_t)snprintf(text + used, size - used, "%s%s", i == 0 || joins ? "" : " ",
                                 word_text(words[i]));
    }
}

static void print_answer(const struct vqa *v, const char *question, const struct answer *a,
                         const char *right)
{
    char text[64];

    text_of(a->words, a->n, text, sizeof(text));
    if (v->o->json)
        printf("{\"question\":\"%s\",\"answer\":\"%s\",\"likelihood\":%.4f,\"profile\":\"%s\","
               "\"rate\":%.2f,\"rows_before\":%lld,\"rows_after\":%lld,\"bytes_before\":%zu,"
               "\"bytes_after\":%zu",
               question, text, a->likelihood, v->o->rate < 0 ? v->o->profile : "rate",
               v->o->rate < 0 ? 0.0 : (double)v->o->rate / 100.0, (long long)a->rows_before,
               (long long)a->rows_after, a->bytes_before, a->bytes_after);
    else
        printf("%s  %s  (likelihood %.2f; %lld of %lld patches as rows", question, text,
               a->likelihood, (long long)a->rows_after, (long long)a->rows_before);
    if (!v->o->json && a->bytes_after != a->bytes_before)
        printf(", %zu of %zu bytes", a->bytes_after, a->bytes_before);
    if (right)
        printf(v->o->json ? ",\"right\":\"%s\"" : "; right: %s", right);
    printf(v->o->json ? "}" : ")\n");
}

static bool write_overlay(struct vqa *v, struct failure *failure)
{
    const struct image image = {.width = (size_t)(v->o->grid * PATCH),
                                .height = (size_t)(v->o->grid * PATCH),
                                .rgb = v->rgb};
    kvc_token_fate fates[MAX_ROWS];
    size_t n = 0;

    if (compresses(v)) {
        if (!check(kvc_explain(v->map, 0, 0, MAX_ROWS, fates, &n), "explaining", failure))
            return false;
        overlay_draw(fates, n, N_PREFIX, (int)v->o->grid, v->rgb);
    }
    return image_write_png(&image, v->o->overlay, failure);
}

static bool ask_user(struct vqa *v, struct failure *failure)
{
    int32_t words[MAX_QUESTION + 2];
    const char *unknown = NULL;
    struct answer answer;
    const size_t n = words_of(v->o->ask[1], words, sizeof(words) / sizeof(*words), &unknown);
    char text[128];

    if (n == 0)
        return fail_with(failure,
                         "the model does not know these words: \"%.60s\"; it was taught "
                         "\"what color is the circle?\", \"what shape is red?\", \"how "
                         "many objects?\", \"where is red from blue?\", \"read field K?\"",
                         unknown);
    if (!ask(v, words, n, &answer, failure))
        return false;
    text_of(words, n, text, sizeof(text)); /* as the model reads it: nothing to escape */
    print_answer(v, text, &answer, NULL);
    if (v->o->json)
        printf("\n");
    return true;
}

/* Questions of our own about a drawn picture, with the right answers beside. */
static bool ask_drawn(struct vqa *v, const struct picture *picture, struct failure *failure)
{
    struct question *questions = calloc(N_DRAWN, sizeof(*questions));
    bool ok = true;

    if (!questions)
        return fail_with(failure, "out of memory");
    const int n = questions_ask((uint64_t)v->o->picture, picture, ~0U, 1.3f, questions, N_DRAWN);

    if (v->o->json)
        printf("{\"answers\":[");
    for (int i = 0; ok && i < n; i++) {
        struct answer answer;
        char text[128], right[64];
        ok = ask(v, questions[i].words, (size_t)questions[i].n_words, &answer, failure);
        if (!ok)
            break;
        text_of(questions[i].words, (size_t)questions[i].n_words, text, sizeof(text));
        text_of(questions[i].answer, (size_t)questions[i].n_answer - 1, right, sizeof(right));
        if (v->o->json && i > 0)
            printf(",");
        print_answer(v, text, &answer, right);
    }
    if (v->o->json)
        printf("]}\n");
    free(questions);
    return ok;
}

/* The user's picture, or one of ours in *drawn. */
static bool get_picture(struct vqa *v, struct picture *drawn, struct failure *failure)
{
    struct picture_params params;
    struct image image;

    if (!v->o->ask[0]) {
        picture_params_default((int)v->o->grid, &params);
        picture_draw((uint64_t)v->o->picture,
                     strcmp(v->o->kind, "scene") == 0 ? PICTURE_SCENE : PICTURE_SCREEN, &params,
                     drawn);
        memcpy(v->rgb, drawn->rgb, 3 * (size_t)(v->o->grid * v->o->grid) * PATCH * PATCH);
        return true;
    }
    if (!image_read(v->o->ask[0], &image, failure))
        return false;
    image_fit(&image, (int)v->o->grid * PATCH, v->rgb);
    image_free(&image);
    return true;
}

static bool answer_all(struct vqa *v, struct failure *failure)
{
    struct picture *drawn = calloc(1, sizeof(*drawn));

    v->rgb = malloc(sizeof(drawn->rgb));
    bool ok = drawn && v->rgb;
    if (!ok)
        fail_with(failure, "out of memory");
    ok = ok && get_picture(v, drawn, failure) && create_cache(v, failure) && see(v, failure) &&
         (v->o->ask[0] ? ask_user(v, failure) : ask_drawn(v, drawn, failure)) &&
         (!v->o->overlay || write_overlay(v, failure));
    kvc_map_destroy(v->map);
    kvc_cache_destroy(v->cache);
    free(v->rgb);
    free(drawn);
    return ok;
}

static int run(const struct vqa_options *o)
{
    struct failure failure = {""};
    struct vqa v = {.o = o};

    bool ok = vlm_open(o->model, &v.vlm, &failure);
    if (ok) {
        ok = reader_open(&v.vlm, o->kernels, &v.reader, &failure);
        if (ok) {
            ok = answer_all(&v, &failure);
            reader_close(&v.reader);
        }
        vlm_close(&v.vlm);
    }
    if (!ok)
        fprintf(stderr, "kvc-engine vqa: %s\n", failure.text);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

int vqa_command(int argc, char **argv)
{
    struct vqa_options o = {
        .profile = "none", .kind = "scene", .grid = 24, .picture = -1, .rate = -1};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file of the model (required)", 0, 0},
        {"ask", ARG_PAIR, &o.ask, "IMAGE QUESTION", "a PNG or PPM file and what to ask about it", 0,
         0},
        {"picture", ARG_INTEGER, &o.picture, "SEED", "draw a picture, and ask what is known of it",
         0, 1e15},
        {"kind", ARG_CHOICE, &o.kind, "scene|screen", "what --picture draws (scene)", 0, 0},
        {"grid", ARG_INTEGER, &o.grid, "N", "patches a side: 24, 336 pixels, or 16, 224 (24)", 8,
         MAX_GRID},
        {"profile", ARG_CHOICE, &o.profile, "none|light|balanced|aggressive|extreme",
         "how the cache is compressed before the answer (none)", 0, 0},
        {"rate", ARG_INTEGER, &o.rate, "PERCENT",
         "instead of a profile: prune so many of the patches, nothing else", 0, 100},
        {"overlay", ARG_TEXT, &o.overlay, "FILE",
         "write a PNG: pruned patches dark, merged blue, those that hold others framed", 0, 0},
        {"json", ARG_FLAG, &o.json, "", "print one JSON object", 0, 0},
        {"kernels", ARG_CHOICE, &o.kernels, "ref|avx2|avx512|vnni", "of libkvc (the best)", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-engine vqa --model FILE (--ask IMAGE QUESTION | --picture SEED) "
               "[OPTIONS]\n"
               "Ask a small vision-language model about a picture, with its KV cache "
               "compressed.\n\n");
        args_print_help(args, n_args);
        return EXIT_DONE;
    }
    if (ok && !o.model)
        ok = fail_with(&failure, "--model is required");
    if (ok && o.rate >= 0 && strcmp(o.profile, "none") != 0)
        ok = fail_with(&failure, "--rate and --profile exclude each other");
    if (ok && (o.ask[0] != NULL) == (o.picture >= 0))
        ok = fail_with(&failure, "either --ask or --picture is required");
    if (!ok) {
        fprintf(stderr, "kvc-engine vqa: %s\nTry 'kvc-engine vqa --help'.\n", failure.text);
        return EXIT_USAGE;
    }
    return run(&o);
}
