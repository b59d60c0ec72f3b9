/* Command lines of the form "--name value". */
#ifndef ENGINE_ARGS_H
#define ENGINE_ARGS_H

#include <stddef.h>
#include <stdint.h>

#include "failure.h"

enum arg_kind { ARG_FLAG, ARG_TEXT, ARG_PAIR, ARG_LIST, ARG_CHOICE, ARG_INTEGER, ARG_REAL };

enum { ARG_LIST_MAX = 32 };

/* All values of an option that may be repeated, in order. */
struct arg_list {
    const char *items[ARG_LIST_MAX];
    size_t n;
};

struct arg {
    const char *name; /* without dashes */
    enum arg_kind kind;
    void *value; /* bool, const char *, two of them, struct arg_list, int64_t or double; keeps its
                    default if not given */
    const char *meta; /* what the help calls the value; of a choice, what is allowed: "a|b" */
    const char *help;
    double min, max; /* of numbers, inclusive */
};

/* "--name value" or "--name=value" (of a pair, the first value), the last one wins but for lists,
 * which take all; *help is set by --help. */
bool args_parse(const struct arg *args, size_t n_args, int argc, char **argv, bool *help,
                struct failure *failure);

/* One line an option, on standard output. */
void args_print_help(const struct arg *args, size_t n_args);

/* Takes the next item of a list "a,b,c" and moves on behind it; false at the end. Longer items are
 * cut off. */
bool args_next_item(const char **list, char *item, size_t size);

#endif
