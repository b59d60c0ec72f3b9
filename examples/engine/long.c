/* kvc-engine long: perplexity by position, beyond the context that a model was trained for, under
 * several scalings of its positions. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "report.h"
#include "trial.h"

enum { MAX_CONTEXTS = 16 };

struct long_options {
    const char *model, *file, *contexts, *rope, *kv, *calibration, *kernels;
    int64_t bucket, chunks, threads, recent, sinks;
    double rope_factor;
    bool json;
};

/* A shorter context is the start of a longer one, so that only the longest is read. */
struct long_run {
    const struct long_options *o;
    size_t contexts[MAX_CONTEXTS], n_contexts, longest;
    char names[SCORE_MAX_ROWS][8];
    struct recipe recipe;
    struct calibration calibration;
    struct session session;
    kvc_rope ropes[SCORE_MAX_ROWS];
    struct token_list text;
    struct trial trial;
    size_t n_chunks;
    struct failure failure;
};

static bool add_context(struct long_run *run, const char *text, struct failure *failure)
{
    char *end;
    const unsigned long n = strtoul(text, &end, 10);

    if (*end || n < 8 || n > 1 << 24 || n % (unsigned long)run->o->bucket != 0)
        return fail_with(failure, "--contexts takes multiples of --bucket (%lld), not \"%.20s\"",
                         (long long)run->o->bucket, text);
    if (run->n_contexts == MAX_CONTEXTS)
        return fail_with(failure, "more than %d contexts", MAX_CONTEXTS);
    run->contexts[run->n_contexts++] = n;
    run->longest = run->longest > n ? run->longest : n;
    return true;
}

static bool add_rope(struct long_run *run, const char *name, struct failure *failure)
{
    const size_t r = run->trial.n_rows;

    if (strcmp(name, "none") != 0 && strcmp(name, "ntk") != 0 && strcmp(name, "yarn") != 0)
        return fail_with(failure, "\"%.20s\" is no scaling; none, ntk and yarn are", name);
    if (r == SCORE_MAX_ROWS)
        return fail_with(failure, "more than %d scalings", SCORE_MAX_ROWS);
    memcpy(run->names[r], name, strlen(name) + 1);
    run->trial.rows[r].setting = (struct setting){.recipe = run->recipe, .rope = &run->ropes[r]};
    run->trial.n_rows++;
    return true;
}

static bool read_lists(struct long_run *run, struct failure *failure)
{
    char item[24];
    const char *contexts = run->o->contexts, *rope = run->o->rope;

    if (!recipe_parse(run->o->kv, &run->recipe, failure))
        return false;
    while (args_next_item(&rope, item, sizeof(item)))
        if (!add_rope(run, item, failure))
            return false;
    while (args_next_item(&contexts, item, sizeof(item)))
        if (!add_context(run, item, failure))
            return false;
    return (run->n_contexts > 0 && run->trial.n_rows > 0) ||
           fail_with(failure, "--contexts and --rope need at least one entry");
}

static bool open_run(struct long_run *run)
{
    const struct long_options *o = run->o;
    struct trial *t = &run->trial;
    const struct session_params params = {.model_path = o->model,
                                          .kernels = o->kernels,
                                          .n_threads = (size_t)o->threads,
                                          .max_rows = t->n_rows * KVC_PAGE_TOKENS};

    fprintf(stderr, "loading %s\n", o->model);
    if (!session_open(&params, &run->session, &run->failure) ||
        !calibration_open(o->calibration, o->model, run->session.ctx, &run->session.model.shape,
                          &run->calibration, &run->failure) ||
        !session_read_text(&run->session, o->file, run->longest, run->longest, &run->text,
                           &run->failure))
        return false;
    for (size_t r = 0; r < t->n_rows; r++)
        if (!rotation_init(&run->session.model.shape, run->names[r], o->rope_factor, &run->ropes[r],
                           &run->failure))
            return false;
    const size_t n = run->text.n / run->longest;
    run->n_chunks = n < (size_t)o->chunks ? n : (size_t)o->chunks;
    t->session = &run->session;
    t->calibration = &run->calibration;
    t->n_context = run->longest;
    t->bucket = (size_t)o->bucket;
    t->recent_tokens = (int32_t)o->recent;
    t->sink_tokens = (int32_t)o->sinks;
    return trial_open(t, &run->failure);
}

static void print_progress(const struct long_run *run, size_t bucket, size_t chunk, double start)
{
    const double share =
        ((double)chunk + (double)((bucket + 1) * run->trial.bucket) / (double)run->longest) /
        (double)run->n_chunks;
    const double spent = seconds_now() - start;

    fprintf(stderr, "chunk %zu of %zu to %zu:", chunk + 1, run->n_chunks,
            (bucket + 1) * run->trial.bucket);
    for (size_t r = 0; r < run->trial.n_rows; r++)
        fprintf(stderr, " %s %.3f", run->names[r],
                score_perplexity(&run->trial.rows[r].scores[bucket]));
    fprintf(stderr, "; %.0f s, %.0f %% of the tokens\n", spent, 100.0 * share);
}

static bool run_chunks(struct long_run *run)
{
    struct trial *t = &run->trial;
    const double start = seconds_now();

    for (size_t i = 0; i < run->n_chunks; i++) {
        const int32_t *chunk = run->text.ids + i * run->longest;
        if (!trial_start(t, &run->failure))
            return false;
        for (size_t b = 0; b < run->longest / t->bucket; b++) {
            if (!trial_read(t, chunk, b * t->bucket, (b + 1) * t->bucket, &run->failure))
                return false;
            print_progress(run, b, i, start);
        }
    }
    return true;
}

static double factor_of(const struct long_run *run, size_t row)
{
    return strcmp(run->names[row], "none") == 0 ? 1.0 : run->o->rope_factor;
}

static void print_json(const struct long_run *run)
{
    const char *separator = "";

    printf("{\"model\":");
    report_print_string(report_name(run->o->model), strlen(report_name(run->o->model)));
    printf(",\"kv\":\"%s\",\"tokens\":%zu,\"rows\":[", run->o->kv, run->n_chunks * run->longest);
    for (size_t c = 0; c < run->n_contexts; c++)
        for (size_t r = 0; r < run->trial.n_rows; r++)
            for (size_t at = 0; at < run->contexts[c]; at += run->trial.bucket) {
                printf("%s\n{\"rope\":\"%s\",\"factor\":%.9g,\"context\":%zu,\"bucket_start\":%zu,"
                       "\"bucket_end\":%zu,\"ppl\":%.9g}",
                       separator, run->names[r], factor_of(run, r), run->contexts[c], at,
                       at + run->trial.bucket,
                       score_perplexity(&run->trial.rows[r].scores[at / run->trial.bucket]));
                separator = ",";
            }
    printf("\n]}\n");
}

static double perplexity_up_to(const struct trial_row *row, size_t n_buckets)
{
    struct score sum = {0};

    for (size_t b = 0; b < n_buckets; b++) {
        sum.nll += row->scores[b].nll;
        sum.n += row->scores[b].n;
    }
    return score_perplexity(&sum);
}

static void print_table(const struct long_run *run)
{
    const struct trial *t = &run->trial;

    printf("%s, KV %s: perplexity by position, %zu x %zu tokens; trained for %zu\n\n%-15s",
           report_name(run->o->model), run->o->kv, run->n_chunks, run->longest,
           run->session.model.shape.n_context, "position");
    for (size_t r = 0; r < t->n_rows; r++)
        printf(" %6s x%-4g", run->names[r], factor_of(run, r));
    for (size_t b = 0; b < run->longest / t->bucket; b++) {
        printf("\n%6zu - %-6zu", b * t->bucket, (b + 1) * t->bucket - 1);
        for (size_t r = 0; r < t->n_rows; r++)
            printf(" %12.4f", score_perplexity(&t->rows[r].scores[b]));
    }
    printf("\n");
    for (size_t c = 0; c < run->n_contexts; c++) {
        printf("\nfirst %-9zu", run->contexts[c]);
        for (size_t r = 0; r < t->n_rows; r++)
            printf(" %12.4f", perplexity_up_to(&t->rows[r], run->contexts[c] / t->bucket));
    }
    printf("\n");
}

static int long_contexts(struct long_run *run)
{
    bool ok = open_run(run) && run_chunks(run);

    if (ok)
        (run->o->json ? print_json : print_table)(run);
    if (ok && (fflush(stdout) != 0 || ferror(stdout)))
        ok = fail_with(&run->failure, "cannot write");
    if (!ok)
        fprintf(stderr, "kvc-engine long: %s\n", run->failure.text);
    trial_close(&run->trial);
    free(run->text.ids);
    calibration_close(&run->calibration);
    session_close(&run->session);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

int long_command(int argc, char **argv)
{
    struct long_options o = {.contexts = "8192,12288,16384",
                             .rope = "none,ntk,yarn",
                             .rope_factor = 2.0,
                             .bucket = 2048,
                             .kv = "f16",
                             .chunks = 1,
                             .recent = 128,
                             .sinks = 4};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file (required)", 0, 0},
        {"file", ARG_TEXT, &o.file, "TXT", "text to predict (required)", 0, 0},
        {"contexts", ARG_TEXT, &o.contexts, "LIST",
         "in tokens, multiples of --bucket (8192,12288,16384)", 0, 0},
        {"rope", ARG_TEXT, &o.rope, "LIST", "scalings, of none, ntk, yarn (all)", 0, 0},
        {"rope-factor", ARG_REAL, &o.rope_factor, "F", "of the scalings (2)", 1, 1024},
        {"bucket", ARG_INTEGER, &o.bucket, "N", "positions that share a number (2048)", 2, 1 << 24},
        {"kv", ARG_TEXT, &o.kv, "RECIPE", "f16, int8, k6v4, int4 ..., see compare (f16)", 0, 0},
        {"calibration", ARG_TEXT, &o.calibration, "F|none",
         "of calibrate (the model's own, if there is one; none: measured on the first pages)", 0,
         0},
        {"chunks", ARG_INTEGER, &o.chunks, "N", "most parts of the text to run (1)", 1, 1e6},
        {"recent", ARG_INTEGER, &o.recent, "N", "newest tokens kept exact (128)", 0, 1e6},
        {"sinks", ARG_INTEGER, &o.sinks, "N", "first tokens kept exact (4)", 0, 64},
        {"json", ARG_FLAG, &o.json, "", "print JSON instead of a table", 0, 0},
        {"threads", ARG_INTEGER, &o.threads, "N", "0: as many as there are processors (0)", 0,
         1024},
        {"kernels", ARG_CHOICE, &o.kernels, "ref|avx2|avx512|vnni", "of libkvc (the best)", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct long_run run = {.o = &o};
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-engine long --model FILE --file TXT [OPTIONS]\n"
               "Perplexity by position, beyond the context that the model was trained for.\n\n");
        args_print_help(args, n_args);
        return EXIT_DONE;
    }
    if (ok && (!o.model || !o.file))
        ok = fail_with(&failure, "--model and --file are required");
    if (!ok || !read_lists(&run, &failure)) {
        fprintf(stderr, "kvc-engine long: %s\nTry 'kvc-engine long --help'.\n", failure.text);
        return EXIT_USAGE;
    }
    return long_contexts(&run);
}
