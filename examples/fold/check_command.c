/* kvc-fold check: whether a folded model is what its record says, and gives the same scores. */
#include <stdio.h>
#include <stdlib.h>

#include <kvc/kvc.h>

#include "args.h"
#include "fold.h"

struct options {
    const char *original, *model, *model_config;
    double max_change; /* negative: not given */
    bool json;
};

/* Limits that are not asked for follow from how much the fold has rounded. */
static bool check_limits(const struct options *o, const struct checkpoint *folded,
                         const struct folded_layer *layers, struct failure *failure)
{
    for (size_t i = 0; i < folded->n_layers; i++) {
        const struct folded_layer *l = &layers[i];
        const double limit =
            o->max_change >= 0.0 ? o->max_change : folding_change_limit(&l->rounding);
        if (!l->is_folded)
            continue;
        if (o->max_change < 0.0 && !(l->rounding.max_error <= FOLDING_MAX_ERROR))
            return fail_with(failure, "%s: numbers are up to %.3g off, more than %g",
                             folded->attentions[i].name, l->rounding.max_error, FOLDING_MAX_ERROR);
        if (!(l->change <= limit))
            return fail_with(failure, "%s: scores change by %.3g, more than %.3g",
                             folded->attentions[i].name, l->change, limit);
    }
    return true;
}

static void print_result(const struct options *o, const struct checkpoint *folded,
                         const struct folded_layer *layers)
{
    const struct fold_result result = {.command = "check",
                                       .input = o->model,
                                       .checkpoint = folded,
                                       .layers = layers,
                                       .factor = (double)folded->record.factor,
                                       .power_of_two = fold_is_power_of_two(folded),
                                       .with_change = true};

    (o->json ? fold_print_json : fold_print_table)(&result);
}

static int check(const struct options *o)
{
    struct checkpoint original = {0}, folded = {0};
    struct folded_layer *layers = NULL;
    struct failure failure = {""};
    kvc_ctx *ctx = NULL;

    bool ok = checkpoint_open(o->original, o->model_config, &original, &failure) &&
              checkpoint_open(o->model, o->model_config, &folded, &failure);
    if (ok) {
        layers = calloc(folded.n_layers, sizeof(*layers));
        ok = layers && kvc_ctx_create(NULL, &ctx) == KVC_OK;
        if (!ok)
            fail_with(&failure, "out of memory");
    }
    ok = ok && folding_compare(ctx, &original, &folded, layers, &failure) &&
         check_limits(o, &folded, layers, &failure);
    if (ok)
        print_result(o, &folded, layers);
    else
        fprintf(stderr, "kvc-fold check: %s\n", failure.text);
    checkpoint_close(&original);
    checkpoint_close(&folded);
    kvc_ctx_destroy(ctx);
    free(layers);
    return ok ? FOLD_DONE : FOLD_FAILED;
}

int check_command(int argc, char **argv)
{
    struct options o = {.max_change = -1.0};
    const struct arg args[] = {
        {"original", ARG_TEXT, &o.original, "FILE", "as it was (required)", 0, 0},
        {"model", ARG_TEXT, &o.model, "FILE", "folded (required)", 0, 0},
        {"model-config", ARG_TEXT, &o.model_config, "JSON",
         "config.json of safetensors (beside each model)", 0, 0},
        {"max-change", ARG_REAL, &o.max_change, "X",
         "of scores (1e-5, or 4 times the largest rounding)", 0, 1},
        {"json", ARG_FLAG, &o.json, "", "print JSON", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-fold check --original FILE --model FILE [OPTIONS]\n"
               "Compare a folded model with the original: every tensor, and scores on random "
               "rows.\n\n");
        args_print_help(args, n_args);
        return FOLD_DONE;
    }
    if (ok && (!o.original || !o.model))
        ok = fail_with(&failure, "--original and --model are required");
    return ok ? check(&o) : fold_usage_error("check", &failure);
}
