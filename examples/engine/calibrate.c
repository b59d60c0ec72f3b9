/* kvc-engine calibrate, and kvc-fold observe: observe K and Q on a text and write what a cache, or
 * a fold, wants to know. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "calibration.h"
#include "commands.h"
#include "file.h"
#include "observe.h"
#include "report.h"

struct calibrate_options {
    const char *program; /* as which it runs */
    const char *model, *file, *output, *kernels;
    int64_t tokens, context, sinks, threads;
    bool json;
};

static bool write_observation(const kvc_observation *observation, const char *path,
                              struct failure *failure)
{
    const size_t size = kvc_observation_size(observation);
    unsigned char *bytes = malloc(size);

    if (!bytes)
        return fail_with(failure, "out of memory");
    const bool ok = kvc_observation_save(observation, bytes, size) == KVC_OK &&
                    file_write(path, bytes, size, failure);
    free(bytes);
    return ok;
}

static void print_result(const struct calibrate_options *o, const char *path, size_t n_tokens)
{
    if (!o->json) {
        printf("%s: %zu tokens of %s\n", path, n_tokens, report_name(o->file));
        return;
    }
    printf("{\"model\":");
    report_print_string(report_name(o->model), strlen(report_name(o->model)));
    printf(",\"text\":");
    report_print_string(report_name(o->file), strlen(report_name(o->file)));
    printf(",\"tokens\":%zu,\"output\":", n_tokens);
    report_print_string(path, strlen(path));
    printf("}\n");
}

static int calibrate(const struct calibrate_options *o)
{
    const struct session_params params = {.model_path = o->model,
                                          .kernels = o->kernels,
                                          .n_threads = (size_t)o->threads,
                                          .max_rows = KVC_PAGE_TOKENS};
    kvc_observation *observation = NULL;
    struct session session = {0};
    struct token_list text = {0};
    struct failure failure;
    char beside[CALIBRATION_PATH];
    const char *path = o->output ? o->output : beside;
    const char *const inputs[2] = {o->model, o->file};

    bool ok = (o->output || calibration_path(o->model, beside, sizeof(beside), &failure)) &&
              file_check_output(path, inputs, 2, &failure) &&
              session_open(&params, &session, &failure) &&
              session_read_text(&session, o->file, (size_t)o->sinks + 1, (size_t)o->context, &text,
                                &failure) &&
              observe_create(&session, &observation, &failure);
    const size_t n = text.n < (size_t)o->tokens ? text.n : (size_t)o->tokens;
    ok = ok &&
         observe_text(&session, text.ids, n, (size_t)o->context, (size_t)o->sinks, observation,
                      &failure) &&
         write_observation(observation, path, &failure);
    if (ok)
        print_result(o, path, n);
    else
        fprintf(stderr, "%s: %s\n", o->program, failure.text);
    kvc_observation_destroy(observation);
    free(text.ids);
    session_close(&session);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

int observe_as(const char *program, int argc, char **argv)
{
    struct calibrate_options o = {.program = program, .tokens = 8192, .context = 2048, .sinks = 4};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file (required)", 0, 0},
        {"file", ARG_TEXT, &o.file, "TXT",
         "text to read, of all kinds that the model will read (required)", 0, 0},
        {"output", ARG_TEXT, &o.output, "FILE", "(the model's name with .kvcal)", 0, 0},
        {"tokens", ARG_INTEGER, &o.tokens, "N", "most tokens to read (8192)", 1, 1e9},
        {"context", ARG_INTEGER, &o.context, "N", "tokens that are read in one piece (2048)", 8,
         1 << 24},
        {"sinks", ARG_INTEGER, &o.sinks, "N", "first tokens of each that are not counted (4)", 0,
         64},
        {"json", ARG_FLAG, &o.json, "", "print JSON", 0, 0},
        {"threads", ARG_INTEGER, &o.threads, "N", "0: as many as there are processors (0)", 0,
         1024},
        {"kernels", ARG_CHOICE, &o.kernels, "ref|avx2|avx512|vnni", "of libkvc (the best)", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: %s --model FILE --file TXT [OPTIONS]\n"
               "Observe K and Q of a model on a text: mean and scale for the cache, absmax for "
               "kvc-fold.\n\n",
               program);
        args_print_help(args, n_args);
        return EXIT_DONE;
    }
    if (ok && (!o.model || !o.file))
        ok = fail_with(&failure, "--model and --file are required");
    if (ok && (o.tokens <= o.sinks || o.context <= o.sinks))
        ok = fail_with(&failure, "nothing is counted: --tokens and --context must exceed --sinks");
    if (!ok) {
        fprintf(stderr, "%s: %s\nTry '%s --help'.\n", program, failure.text, program);
        return EXIT_USAGE;
    }
    return calibrate(&o);
}

int calibrate_command(int argc, char **argv)
{
    return observe_as("kvc-engine calibrate", argc, argv);
}
