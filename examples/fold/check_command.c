/* kvc-fold check: whether a folded model is what its record says, and gives the same scores. */
#include <stdio.h>
#include <stdlib.h>

#include <kvc/kvc.h>

#include "args.h"
#include "fold.h"

struct options {
    const char *original, *model, *model_config;
    double max_change; /* negative: not given */
    bool allow_rounding, json;
};

/* Tells of each attention that is beyond the limits. */
static bool check_limits(const struct options *o, const struct checkpoint *folded,
                         const struct folded_layer *layers)
{
    struct folding_limits limits = {.allow_rounding = o->allow_rounding,
                                    .max_change = o->max_change,
                                    .advice = "--allow-rounding, if the fold was made with it"};
    struct failure failure;
    bool ok = true;

    for (size_t i = 0; i < folded->n_layers; i++) {
        if (!layers[i].is_folded)
            continue;
        limits.is_exact = folding_layer_is_power_of_two(folded, i);
        if (folding_check_limits(&limits, folded->attentions[i].name, &layers[i], &failure))
            continue;
        fprintf(stderr, "kvc-fold check: %s\n", failure.text);
        ok = false;
    }
    return ok;
}

static void print_result(const struct options *o, const struct checkpoint *folded,
                         const struct folded_layer *layers)
{
    const struct fold_result result = {.command = "check",
                                       .input = o->model,
                                       .checkpoint = folded,
                                       .layers = layers,
                                       .factor = (double)folded->record.factor,
                                       .power_of_two = folding_is_power_of_two(folded)};

    fold_print(&result, o->json);
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
    ok = ok && folding_compare(ctx, &original, &folded, layers, &failure);
    if (ok) {
        print_result(o, &folded, layers);
        ok = check_limits(o, &folded, layers);
    } else {
        fprintf(stderr, "kvc-fold check: %s\n", failure.text);
    }
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
        {"allow-rounding", ARG_FLAG, &o.allow_rounding, "", "if the fold was made with it", 0, 0},
        {"json", ARG_FLAG, &o.json, "", "print JSON", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-fold check --original FILE --model FILE [OPTIONS]\n"
               "Compare a folded model with the original: metadata, every tensor, and scores on "
               "random rows.\n\n");
        args_print_help(args, n_args);
        return FOLD_DONE;
    }
    if (ok && (!o.original || !o.model))
        ok = fail_with(&failure, "--original and --model are required");
    return ok ? check(&o) : fold_usage_error("check", &failure);
}
