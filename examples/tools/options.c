/* options.c - command lines of kvc-bench: a table of options, lists of numbers and names. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

static void print_options(const char *command, const struct bench_option *table, size_t n)
{
    printf("Usage: kvc-bench %s [OPTION]...\n\nOptions:\n", command);
    for (size_t i = 0; i < n; i++)
        printf("  %-13s %-6s %s\n", table[i].name, table[i].argument ? table[i].argument : "",
               table[i].help);
    printf("  %-13s %-6s %s\n", "--help", "", "this text");
}

static const struct bench_option *find_option(const struct bench_option *table, size_t n,
                                              const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(table[i].name, name) == 0)
            return &table[i];
    return NULL;
}

int bench_parse(const char *command, const struct bench_option *table, size_t n_table,
                void *options, int argc, char **argv)
{
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            print_options(command, table, n_table);
            return BENCH_DONE;
        }
        const struct bench_option *option = find_option(table, n_table, argv[i]);
        if (!option) {
            fprintf(stderr, "kvc-bench %s: unknown option '%s'; see --help\n", command, argv[i]);
            return BENCH_USAGE;
        }
        if (option->argument && i + 1 == argc) {
            fprintf(stderr, "kvc-bench %s: %s needs a value\n", command, option->name);
            return BENCH_USAGE;
        }
        const char *value = option->argument ? argv[++i] : "";
        if (!option->set(options, value)) {
            fprintf(stderr, "kvc-bench %s: bad value '%s' for %s (%s)\n", command, value,
                    option->name, option->help);
            return BENCH_USAGE;
        }
    }
    return BENCH_GO;
}

bool bench_parse_long(const char *text, long low, long high, long *out)
{
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < low || value > high)
        return false;
    *out = value;
    return true;
}

bool bench_next_item(const char **text, char *item, size_t size)
{
    size_t n = strcspn(*text, ",");
    if (n == 0 || n >= size)
        return false;
    memcpy(item, *text, n);
    item[n] = '\0';
    *text += n;
    /* A comma at the end leaves an empty item, which the next call refuses. */
    if (**text == ',' && (*text)[1] != '\0')
        ++*text;
    return true;
}

bool bench_parse_longs(const char *text, long low, long high, struct bench_list *out)
{
    char item[32];
    out->n = 0;
    do {
        if (out->n == BENCH_MAX_ITEMS || !bench_next_item(&text, item, sizeof item) ||
            !bench_parse_long(item, low, high, &out->items[out->n]))
            return false;
        out->n++;
    } while (*text != '\0');
    return true;
}

bool bench_parse_names(const char *text, const char *const *names, size_t n_names,
                       struct bench_list *out)
{
    char item[32];
    out->n = 0;
    do {
        if (out->n == BENCH_MAX_ITEMS || !bench_next_item(&text, item, sizeof item))
            return false;
        size_t i = 0;
        while (i < n_names && strcmp(names[i], item) != 0)
            i++;
        if (i == n_names)
            return false;
        out->items[out->n++] = (long)i;
    } while (*text != '\0');
    return true;
}
