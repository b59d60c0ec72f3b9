/* kvc-engine exam: questions about drawn pictures, with caches compressed in many ways. */
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "exam_run.h"
#include "experiments.h"

struct exam_command_options {
    const char *model, *experiments, *set, *csv, *read, *kernels;
    int64_t questions, threads;
    bool json;
};

/* Each experiment once: its rows follow each other. */
static void print_tables(const struct row_table *table)
{
    for (size_t i = 0; i < table->n; i++)
        if (i == 0 || strcmp(table->rows[i].experiment, table->rows[i - 1].experiment) != 0)
            rows_print_table(table, table->rows[i].experiment, stdout);
}

static bool print_rows(const struct row_table *table, const struct exam_command_options *o,
                       struct failure *failure)
{
    if (o->json)
        rows_print_json(table, stdout);
    else
        print_tables(table);
    return !o->csv || rows_write_csv(table, o->csv, failure);
}

/* The rows of an earlier examination. */
static int print_file(const struct exam_command_options *o)
{
    struct row_table table = {0};
    struct failure failure;

    const bool ok = rows_read_csv(&table, o->read, &failure) && print_rows(&table, o, &failure);
    if (!ok)
        fprintf(stderr, "kvc-engine exam: %s\n", failure.text);
    rows_free(&table);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

static int examine(const struct exam_command_options *o)
{
    const struct exam_options options = {.experiments = o->experiments,
                                         .n = (size_t)o->questions,
                                         .tune = strcmp(o->set, "tune") == 0,
                                         .threads = (size_t)o->threads,
                                         .kernels = o->kernels};
    struct row_table table = {0};
    struct failure failure;
    struct vlm vlm;

    bool ok = vlm_open(o->model, &vlm, &failure);
    if (ok) {
        ok = exam_run(&vlm, &options, &table, &failure) && print_rows(&table, o, &failure);
        vlm_close(&vlm);
    }
    if (!ok)
        fprintf(stderr, "kvc-engine exam: %s\n", failure.text);
    rows_free(&table);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

int exam_command(int argc, char **argv)
{
    struct exam_command_options o = {
        .experiments = "first,second", .set = "report", .questions = 1000};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file of the vision-language model", 0, 0},
        {"experiments", ARG_TEXT, &o.experiments, "LIST",
         "of the names below, with commas, or all (first,second)", 0, 0},
        {"questions", ARG_INTEGER, &o.questions, "N",
         "of each experiment; paired asks five times as many (1000)", 1, 1e6},
        {"set", ARG_CHOICE, &o.set, "tune|report", "which pictures (report)", 0, 0},
        {"csv", ARG_TEXT, &o.csv, "FILE", "write all figures there", 0, 0},
        {"read", ARG_TEXT, &o.read, "FILE", "print what --csv wrote, instead of examining a model",
         0, 0},
        {"json", ARG_FLAG, &o.json, "", "print one JSON object instead of tables", 0, 0},
        {"threads", ARG_INTEGER, &o.threads, "N", "0: as many as there are processors (0)", 0,
         1024},
        {"kernels", ARG_CHOICE, &o.kernels, "ref|avx2|avx512|vnni", "of libkvc (the best)", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-engine exam --model FILE [OPTIONS]\n"
               "Ask a vision-language model about drawn pictures whose caches are compressed.\n\n");
        args_print_help(args, n_args);
        printf("\nExperiments: %s\n", experiment_names());
        return EXIT_DONE;
    }
    if (ok && !o.model == !o.read)
        ok = fail_with(&failure, "either --model or --read is required");
    ok = ok && experiments_known(o.experiments, &failure);
    if (!ok) {
        fprintf(stderr, "kvc-engine exam: %s\nTry 'kvc-engine exam --help'.\n", failure.text);
        return EXIT_USAGE;
    }
    return o.read ? print_file(&o) : examine(&o);
}
