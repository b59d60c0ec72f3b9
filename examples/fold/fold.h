/* The commands of kvc-fold, and what they share. */
#ifndef FOLD_FOLD_H
#define FOLD_FOLD_H

#include "folding.h"

enum { FOLD_DONE = 0, FOLD_FAILED = 1, FOLD_USAGE = 2 };

/* Each parses its arguments, does its work and returns the exit status. */
int fold_command(int argc, char **argv);
int unfold_command(int argc, char **argv);
int check_command(int argc, char **argv);

/* What a command has to tell. */
struct fold_result {
    const char *command, *input, *output; /* output: NULL if nothing is written */
    const struct checkpoint *checkpoint;
    const struct folded_layer *layers; /* [n_layers] */
    double factor;
    bool power_of_two;
    bool dry_run;
};

/* As JSON or as a table; tells on standard error that a dry run has written nothing. */
void fold_print(const struct fold_result *result, bool json);

/* Whether a file may be written: it is not the input, and not there unless @p force. */
bool fold_may_write(const char *input, const char *output, bool force, struct failure *failure);

/* Tells what is wrong on standard error, and returns the exit status. */
int fold_usage_error(const char *command, const struct failure *failure);

#endif
