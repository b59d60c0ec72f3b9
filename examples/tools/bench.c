/* bench.c - kvc-bench: measures libkvc. This file finds the command. */
#include <stdio.h>
#include <string.h>

#include "bench.h"

static const struct command {
    const char *name;
    const char *help;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"attend", "decode attention over a sealed cache, beside the read bandwidth", bench_attend},
    {"prefill", "attention of many tokens at once, beside the peak of multiplications",
     bench_prefill},
    {"append", "storing a token and sealing pages, beside a copy and attention", bench_append},
    {"rows", "decode attention over rows in place, as engines keep them", bench_attend_rows},
    {"compress", "scoring, pruning and merging of visual tokens after a prefill", bench_compress},
    {"peer", "decode attention beside that of ggml, in turn", bench_peer},
};

static const size_t n_commands = sizeof commands / sizeof *commands;

static void print_help(FILE *to)
{
    fprintf(to, "Usage: kvc-bench COMMAND [OPTION]...\n\nCommands:\n");
    for (size_t i = 0; i < n_commands; i++)
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].help);
    fprintf(to, "\n'kvc-bench COMMAND --help' describes the options.\n"
                "Exit status: 0 done, 1 failed, 2 wrong usage.\n");
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stderr);
        return BENCH_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_help(stdout);
        return BENCH_DONE;
    }
    for (size_t i = 0; i < n_commands; i++) {
        if (strcmp(argv[1], commands[i].name) != 0)
            continue;
        int status = commands[i].run(argc - 2, argv + 2);
        if (status == BENCH_DONE && (fflush(stdout) != 0 || ferror(stdout))) {
            fprintf(stderr, "kvc-bench: cannot write the result\n");
            return BENCH_FAILED;
        }
        return status;
    }
    fprintf(stderr, "kvc-bench: unknown command '%s'; see kvc-bench --help\n", argv[1]);
    return BENCH_USAGE;
}
