/* Command lines of the form "--name value". */
#include "args.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The option that argument names; *value is what follows "=", or NULL. */
static const struct arg *find(const struct arg *args, size_t n_args, const char *argument,
                              const char **value)
{
    if (strncmp(argument, "--", 2) != 0)
        return NULL;
    const char *name = argument + 2, *equals = strchr(name, '=');
    const size_t size = equals ? (size_t)(equals - name) : strlen(name);
    *value = equals ? equals + 1 : NULL;
    for (size_t i = 0; i < n_args; i++)
        if (strlen(args[i].name) == size && memcmp(args[i].name, name, size) == 0)
            return &args[i];
    return NULL;
}

static bool out_of_range(const struct arg *arg, const char *text, struct failure *failure)
{
    return fail_with(failure, "--%s takes %s from %.10g to %.10g, not \"%.60s\"", arg->name,
                     arg->kind == ARG_INTEGER ? "a whole number" : "a number", arg->min, arg->max,
                     text);
}

static bool set_number(const struct arg *arg, const char *text, struct failure *failure)
{
    char *end;

    errno = 0;
    if (arg->kind == ARG_INTEGER) {
        const long long n = strtoll(text, &end, 10);
        if (end == text || *end || errno || (double)n < arg->min || (double)n > arg->max)
            return out_of_range(arg, text, failure);
        *(int64_t *)arg->value = n;
    } else {
        const double x = strtod(text, &end);
        if (end == text || *end || !(x >= arg->min && x <= arg->max))
            return out_of_range(arg, text, failure);
        *(double *)arg->value = x;
    }
    return true;
}

/* Is text one of the words in "a|b|c"? */
static bool is_choice(const char *words, const char *text)
{
    const size_t size = strlen(text);

    for (const char *word = words; word; word = strchr(word, '|')) {
        word += *word == '|';
        if (size > 0 && strcspn(word, "|") == size && memcmp(word, text, size) == 0)
            return true;
    }
    return false;
}

static bool set_text(const struct arg *arg, const char *text, struct failure *failure)
{
    if (arg->kind == ARG_CHOICE && !is_choice(arg->meta, text))
        return fail_with(failure, "--%s takes %s, not \"%.60s\"", arg->name, arg->meta, text);
    *(const char **)arg->value = text;
    return true;
}

static bool add_item(const struct arg *arg, const char *text, struct failure *failure)
{
    struct arg_list *list = arg->value;

    if (list->n == ARG_LIST_MAX)
        return fail_with(failure, "--%s is given more than %d times", arg->name, ARG_LIST_MAX);
    list->items[list->n++] = text;
    return true;
}

static bool set_value(const struct arg *arg, const char *text, struct failure *failure)
{
    switch (arg->kind) {
    case ARG_LIST: return add_item(arg, text, failure);
    case ARG_INTEGER:
    case ARG_REAL: return set_number(arg, text, failure);
    default: return set_text(arg, text, failure);
    }
}

bool args_parse(const struct arg *args, size_t n_args, int argc, char **argv, bool *help,
                struct failure *failure)
{
    *help = false;
    for (int i = 0; i < argc; i++) {
        const char *value = NULL;
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            *help = true;
            return true;
        }
        const struct arg *arg = find(args, n_args, argv[i], &value);
        if (!arg)
            return fail_with(failure, "unknown argument \"%.60s\"", argv[i]);
        if (arg->kind == ARG_FLAG) {
            if (value)
                return fail_with(failure, "--%s takes no value", arg->name);
            *(bool *)arg->value = true;
            continue;
        }
        if (!value && i + 1 == argc)
            return fail_with(failure, "--%s needs a value", arg->name);
        value = value ? value : argv[++i];
        if (arg->kind == ARG_PAIR) {
            if (i + 1 == argc)
                return fail_with(failure, "--%s needs two values: %s", arg->name, arg->meta);
            ((const char **)arg->value)[0] = value;
            ((const char **)arg->value)[1] = argv[++i];
            continue;
        }
        if (!set_value(arg, value, failure))
            return false;
    }
    return true;
}

bool args_next_item(const char **list, char *item, size_t size)
{
    if (!*list)
        return false;
    const int n = (int)strcspn(*list, ",");
    snprintf(item, size, "%.*s", n, *list);
    *list = (*list)[n] ? *list + n + 1 : NULL;
    return true;
}

void args_print_help(const struct arg *args, size_t n_args)
{
    char left[64];

    for (size_t i = 0; i < n_args; i++) {
        snprintf(left, sizeof(left), "--%s %s", args[i].name,
                 args[i].kind == ARG_FLAG ? "" : args[i].meta);
        printf("  %-28s %s\n", left, args[i].help);
    }
}
