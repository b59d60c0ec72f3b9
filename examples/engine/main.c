/* kvc-engine: a small inference engine whose KV cache is libkvc. */
#include <stdio.h>
#include <string.h>

#include <cblas.h>

#include "commands.h"

static void print_help(void)
{
    printf("Usage: kvc-engine COMMAND OPTIONS\n"
           "Run GGUF language models (llama architecture, \"smollm\" tokenizer) on a compressed KV "
           "cache.\n\n"
           "  generate   continue a prompt\n"
           "  compare    score formats of the cache on a text, side by side\n"
           "  long       perplexity by position, beyond the trained context\n"
           "  vqa        ask a vision-language model about a picture\n"
           "  exam       ask a vision-language model with its cache compressed in many ways\n\n"
           "kvc-engine COMMAND --help lists the options.\n"
           "Exit status: 0 done, 1 failed, 2 wrong usage.\n");
}

static int run(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";

    if (strcmp(command, "generate") == 0)
        return generate_command(argc - 2, argv + 2);
    if (strcmp(command, "compare") == 0)
        return compare_command(argc - 2, argv + 2);
    if (strcmp(command, "long") == 0)
        return long_command(argc - 2, argv + 2);
    if (strcmp(command, "vqa") == 0)
        return vqa_command(argc - 2, argv + 2);
    if (strcmp(command, "exam") == 0)
        return exam_command(argc - 2, argv + 2);
    if (strcmp(command, "--help") == 0 || strcmp(command, "-h") == 0) {
        print_help();
        return EXIT_DONE;
    }
    fprintf(stderr, "kvc-engine: %s%.60s\nTry 'kvc-engine --help'.\n",
            *command ? "unknown command: " : "a command is missing", command);
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
