/* kvc-fold: fold scales that smooth the keys of a model into its file. */
#include "fold.h"

#include <cblas.h>
#include <stdio.h>
#include <string.h>

#include "commands.h"

static int observe_command(int argc, char **argv)
{
    openblas_set_num_threads(1); /* the pool splits the products; two sets of threads would fight */
    return observe_as("kvc-fold observe", argc, argv);
}

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"observe", observe_command, "read a text with a model and note its keys and queries"},
    {"fold", fold_command, "fold scales that follow from it into a copy of the model"},
    {"check", check_command, "compare a folded model with the original"},
    {"unfold", unfold_command, "take the scales out again"},
};

static const size_t n_commands = sizeof(commands) / sizeof(*commands);

static void print_help(void)
{
    printf(
        "Usage: kvc-fold COMMAND OPTIONS\n"
        "Smooth the keys of GGUF and safetensors models: K / s and Q s in front of the rotation.\n"
        "\n");
    for (size_t i = 0; i < n_commands; i++)
        printf("  %-9s%s\n", commands[i].name, commands[i].help);
    printf("\nkvc-fold COMMAND --help lists the options.\n"
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
        return FOLD_DONE;
    }
    fprintf(stderr, "kvc-fold: %s%.60s\nTry 'kvc-fold --help'.\n",
            *name ? "unknown command: " : "a command is missing", name);
    return FOLD_USAGE;
}

int main(int argc, char **argv)
{
    const int status = run(argc, argv);

    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "kvc-fold: cannot write to standard output\n");
        return status == FOLD_DONE ? FOLD_FAILED : status;
    }
    return status;
}
