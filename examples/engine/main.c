/* kvc-engine: a small inference engine whose KV cache is libkvc. */
#include <stdio.h>
#include <string.h>

#include <cblas.h>

#include "commands.h"

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"generate", generate_command, "continue a prompt"},
    {"calibrate", calibrate_command, "observe the keys of a model, for its cache"},
    {"compare", compare_command, "score recipes of the cache on a text, side by side"},
    {"sensitivity", sensitivity_command, "what each layer and head costs in four bits"},
    {"tokens", tokens_command, "print the tokens of a text"},
    {"long", long_command, "perplexity by position, beyond the trained context"},
    {"vqa", vqa_command, "ask a vision-language model about a picture"},
    {"exam", exam_command, "ask a vision-language model with its cache compressed in many ways"},
};

static const size_t n_commands = sizeof(commands) / sizeof(*commands);

static void print_help(void)
{
    printf("Usage: kvc-engine COMMAND OPTIONS\n"
           "Run GGUF language models on a compressed KV cache.\n\n");
    for (size_t i = 0; i < n_commands; i++)
        printf("  %-13s%s\n", commands[i].name, commands[i].help);
    printf("\nkvc-engine COMMAND --help lists the options.\n"
           "Exit status: 0 done, 1 failed, 2 wrong usage.\n");
}

static int run(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";

    for (size_t i = 0; i < n_commands; i++)
        if (strcmp(name, commands[i].name) == 0)
            return commands[i].run(argc - 2, argv + 2);
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        print_help();
        return EXIT_DONE;
    }
    fprintf(stderr, "kvc-engine: %s%.60s\nTry 'kvc-engine --help'.\n",
            *name ? "unknown command: " : "a command is missing", name);
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    openblas_set_num_threads(1); /* the pool splits the products; two sets of threads would fight */
    const int status = run(argc, argv);

    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "kvc-engine: cannot write to standard output\n");
        return status == EXIT_DONE ? EXIT_FAILED : status;
    }
    return status;
}
