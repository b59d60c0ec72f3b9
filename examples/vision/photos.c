/* kvc-photos: what pruning and merging do to the attention of a vision transformer on real photos.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "file.h"
#include "photos_report.h"

enum { STATUS_FAILED = 1, STATUS_USAGE = 2 };

struct options {
    const char *extract, *plot;
    bool shared, per_head, json;
};

static struct outcome mean_outcome(const struct outcome *heads, size_t n)
{
    struct outcome mean = {0};

    for (int i = 0; i < N_ROUNDS * N_METHODS; i++) {
        struct errors *sum = &mean.rounds[i / N_METHODS][i % N_METHODS];
        for (size_t h = 0; h < n; h++) {
            const struct errors *e = &heads[h].rounds[i / N_METHODS][i % N_METHODS];
            sum->same += e->same / (double)n;
            sum->shifted += e->shifted / (double)n;
            sum->reported += e->reported / (double)n;
        }
    }
    return mean;
}

/* Puts the extract's name before what is wrong with it. */
static bool fail_in_extract(const struct options *options, struct failure *failure)
{
    const struct failure inner = *failure;

    return fail_with(failure, "%.120s: %.120s", options->extract, inner.text);
}

/* The rows of one block; returns how many. */
static size_t add_rows(const struct kvx_block *block, const struct outcome *heads, size_t n_heads,
                       bool per_head, struct photos_row *rows)
{
    const size_t n = per_head ? n_heads : 1;

    for (size_t i = 0; i < n; i++) {
        memcpy(rows[i].photo, block->photo, sizeof(rows[i].photo));
        rows[i].layer = block->layer;
        rows[i].head = per_head ? (int)i : ALL_HEADS;
        rows[i].outcome = per_head ? heads[i] : mean_outcome(heads, n_heads);
    }
    return n;
}

/* Runs every block; rows has room for all. */
static bool run_blocks(const struct options *options, const struct kvx *kvx,
                       struct experiment *experiment, struct outcome *heads,
                       struct photos_row *rows, size_t *n_rows, struct failure *failure)
{
    struct kvx_block *block = experiment_block(experiment);

    *n_rows = 0;
    for (size_t i = 0; i < kvx->n_blocks; i++) {
        if (!kvx_read(kvx, i, block, failure))
            return fail_in_extract(options, failure);
        const kvc_status status = experiment_run(experiment, options->shared, heads);
        if (status != KVC_OK)
            return fail_with(failure, "%.120s: %s, layer %u: %s", options->extract, block->photo,
                             block->layer, kvc_status_str(status));
        *n_rows += add_rows(block, heads, kvx->n_heads, options->per_head, rows + *n_rows);
    }
    return true;
}

static bool show(const struct options *options, const struct photos_report *report,
                 struct failure *failure)
{
    if (options->plot && !photos_write_plot(report, options->plot, failure))
        return false;
    if (options->json)
        photos_print_json(report);
    else
        photos_print_table(report);
    return true;
}

static bool run_extract(const struct options *options, const struct kvx *kvx,
                        struct failure *failure)
{
    const size_t rows_of_block = options->per_head ? kvx->n_heads : 1;
    struct experiment *experiment = experiment_create(kvx);
    struct outcome *heads = calloc(kvx->n_heads, sizeof(*heads));
    struct photos_row *rows = calloc(kvx->n_blocks * rows_of_block, sizeof(*rows));
    struct photos_report report = {.kvx = kvx, .shared = options->shared, .rows = rows};
    bool ok = experiment && heads && rows;

    if (!ok)
        fail_with(failure, "no memory");
    ok = ok && run_blocks(options, kvx, experiment, heads, rows, &report.n_rows, failure) &&
         show(options, &report, failure);
    free(rows);
    free(heads);
    experiment_destroy(experiment);
    return ok;
}

static bool run_file(const struct options *options, struct failure *failure)
{
    unsigned char *bytes = NULL;
    size_t size = 0;
    struct kvx kvx;

    if (!file_read(options->extract, &bytes, &size, failure))
        return false;
    const bool ok = kvx_open(bytes, size, &kvx, failure) ? run_extract(options, &kvx, failure)
                                                         : fail_in_extract(options, failure);
    free(bytes);
    return ok;
}

int main(int argc, char **argv)
{
    struct options options = {0};
    const struct arg args[] = {
        {"extract", ARG_TEXT, &options.extract, "FILE", "what extract.py wrote", 0, 0},
        {"shared", ARG_FLAG, &options.shared, "", "the heads of a layer share a choice", 0, 0},
        {"per-head", ARG_FLAG, &options.per_head, "", "a row for each head, not for a layer", 0, 0},
        {"plot", ARG_TEXT, &options.plot, "FILE", "write a gnuplot script that draws SVG", 0, 0},
        {"json", ARG_FLAG, &options.json, "", "print JSON", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(args[0]);
    struct failure failure = {""};
    bool help = false;

    if (!args_parse(args, n_args, argc - 1, argv + 1, &help, &failure)) {
        fprintf(stderr, "kvc-photos: %s\n", failure.text);
        return STATUS_USAGE;
    }
    if (help) {
        printf("Usage: kvc-photos --extract FILE [OPTION]...\n\n"
               "Prunes and merges the visual tokens of a vision transformer that looks at photos,\n"
               "and compares the attention output of queries that had no say in it.\n\nOptions:\n");
        args_print_help(args, n_args);
        printf("\nExit status: 0 done, 1 failed, 2 wrong usage.\n");
        return 0;
    }
    if (!options.extract) {
        fprintf(stderr, "kvc-photos: --extract FILE is missing; see --help\n");
        return STATUS_USAGE;
    }
    if (!run_file(&options, &failure)) {
        fprintf(stderr, "kvc-photos: %s\n", failure.text);
        return STATUS_FAILED;
    }
    return 0;
}
