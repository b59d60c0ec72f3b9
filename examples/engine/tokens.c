/* kvc-engine tokens: the numbers of the tokens of a text, for programs that read the same. */
#include <stdio.h>
#include <stdlib.h>

#include "args.h"
#include "commands.h"
#include "session.h"

struct tokens_options {
    const char *model, *file;
    int64_t limit, context;
    bool json;
};

static int print_tokens(const struct tokens_options *o)
{
    const struct session_params params = {.model_path = o->model, .n_threads = 1, .max_rows = 1};
    struct session session = {0};
    struct token_list text = {0};
    struct failure failure;

    const bool ok = session_open(&params, &session, &failure) &&
                    session_read_text(&session, o->file, 0, (size_t)o->context, &text, &failure);
    const size_t n = o->limit && (size_t)o->limit < text.n ? (size_t)o->limit : text.n;
    if (ok && o->json)
        printf("{\"tokens\":[");
    for (size_t i = 0; i < n && ok; i++)
        printf(o->json ? "%s%d" : "%s%d\n", o->json && i ? "," : "", (int)text.ids[i]);
    if (ok && o->json)
        printf("]}\n");
    if (!ok)
        fprintf(stderr, "kvc-engine tokens: %s\n", failure.text);
    free(text.ids);
    session_close(&session);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

int tokens_command(int argc, char **argv)
{
    struct tokens_options o = {.context = 2048};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file (required)", 0, 0},
        {"file", ARG_TEXT, &o.file, "TXT", "text (required)", 0, 0},
        {"limit", ARG_INTEGER, &o.limit, "N", "most tokens to print (all)", 1, 1e9},
        {"context", ARG_INTEGER, &o.context, "N",
         "tokens of a context, which begins as the model wants it (2048)", 1, 1 << 24},
        {"json", ARG_FLAG, &o.json, "", "print JSON instead of lines", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-engine tokens --model FILE --file TXT [OPTIONS]\n"
               "Print the numbers of the tokens of a text.\n\n");
        args_print_help(args, n_args);
        return EXIT_DONE;
    }
    if (ok && (!o.model || !o.file))
        ok = fail_with(&failure, "--model and --file are required");
    if (!ok) {
        fprintf(stderr, "kvc-engine tokens: %s\nTry 'kvc-engine tokens --help'.\n", failure.text);
        return EXIT_USAGE;
    }
    return print_tokens(&o);
}
