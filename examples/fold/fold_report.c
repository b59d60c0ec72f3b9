/* What the commands print, and the manners they share. */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "file.h"
#include "fold.h"
#include "report.h"

static void print_table(const struct fold_result *r)
{
    const size_t n = r->checkpoint->n_layers;
    const struct folded_layer total = folding_total(r->layers, n);

    printf("%-32s %10s %10s %9s %9s %9s\n", "attention", "least s", "most s", "rounded", "error",
           "change");
    for (size_t i = 0; i <= n; i++) {
        const struct folded_layer *l = i < n ? &r->layers[i] : &total;
        if (!l->is_folded)
            continue;
        printf("%-32s %10.4g %10.4g %9llu %9.3g %9.3g\n",
               i < n ? r->checkpoint->attentions[i].name : "all", (double)l->min_scale,
               (double)l->max_scale, (unsigned long long)l->rounding.n_inexact,
               l->rounding.max_error, l->change);
    }
    printf("s: the scales; rounded: numbers that are not exact; error: the largest of theirs; "
           "change: of scores\n");
    if (r->output)
        printf("%s is written\n", r->output);
}

/* JSON has no other numbers. */
static void print_real(const char *key, double x)
{
    if (isfinite(x))
        printf(",\"%s\":%.9g", key, x);
    else
        printf(",\"%s\":null", key);
}

static void print_layer(const struct folded_layer *l)
{
    printf("\"min_scale\":%.9g,\"max_scale\":%.9g,\"rounded\":%llu,\"overflow\":%llu,"
           "\"underflow\":%llu",
           (double)l->min_scale, (double)l->max_scale, (unsigned long long)l->rounding.n_inexact,
           (unsigned long long)l->rounding.n_overflow, (unsigned long long)l->rounding.n_underflow);
    print_real("max_error", l->rounding.max_error);
    print_real("change", l->change);
}

static void print_text(const char *key, const char *text)
{
    printf("\"%s\":", key);
    report_print_string(text, strlen(text));
    putchar(',');
}

static void print_json(const struct fold_result *r)
{
    const size_t n = r->checkpoint->n_layers;
    const struct folded_layer total = folding_total(r->layers, n);
    const char *separator = "";

    putchar('{');
    print_text("command", r->command);
    print_text("model", report_name(r->input));
    print_text("format", r->checkpoint->is_gguf ? "gguf" : "safetensors");
    print_text("architecture", r->checkpoint->architecture);
    print_text("type", r->checkpoint->type == KVC_SMOOTH_ROPE_NORM ? "state-rope-norm"
                                                                   : "state-rope-linear");
    if (r->output)
        print_text("output", r->output);
    if (r->output || r->dry_run) /* a command that writes */
        printf("\"dry_run\":%s,", r->dry_run ? "true" : "false");
    printf("\"factor\":%.9g,\"power_of_two\":%s,", r->factor, r->power_of_two ? "true" : "false");
    print_layer(&total);
    printf(",\"attentions\":[");
    for (size_t i = 0; i < n; i++) {
        if (!r->layers[i].is_folded)
            continue;
        printf("%s{", separator);
        print_text("name", r->checkpoint->attentions[i].name);
        print_layer(&r->layers[i]);
        putchar('}');
        separator = ",";
    }
    printf("]}\n");
}

void fold_print(const struct fold_result *r, bool json)
{
    (json ? print_json : print_table)(r);
    if (r->dry_run)
        fprintf(stderr, "a dry run: nothing was written\n");
}

bool fold_may_write(const char *input, const char *output, bool force, struct failure *failure)
{
    struct stat out;

    if (!file_check_output(output, &input, 1, failure))
        return false;
    if (stat(output, &out) != 0)
        return true;
    if (!force)
        return fail_with(failure, "%.120s is there already: --force overwrites it", output);
    return S_ISREG(out.st_mode) || fail_with(failure, "%.120s is no regular file", output);
}

int fold_usage_error(const char *command, const struct failure *failure)
{
    fprintf(stderr, "kvc-fold %s: %s\nTry 'kvc-fold %s --help'.\n", command, failure->text,
            command);
    return FOLD_USAGE;
}
