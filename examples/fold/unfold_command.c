/* kvc-fold unfold: a copy of a folded model as it was. */
#include <stdio.h>
#include <stdlib.h>

#include <kvc/kvc.h>

#include "args.h"
#include "file.h"
#include "fold.h"

struct options {
    const char *model, *output, *model_config;
    bool allow_rounding, force, dry_run, json;
};

static void print_result(const struct options *o, const struct checkpoint *checkpoint,
                         const struct folded_layer *layers)
{
    const struct fold_result result = {.command = "unfold",
                                       .input = o->model,
                                       .output = o->dry_run ? NULL : o->output,
                                       .checkpoint = checkpoint,
                                       .layers = layers,
                                       .factor = (double)checkpoint->record.factor,
                                       .power_of_two = folding_is_power_of_two(checkpoint),
                                       .dry_run = o->dry_run};

    fold_print(&result, o->json);
}

static int unfold(const struct options *o)
{
    struct checkpoint checkpoint = {0};
    struct folded_layer *layers = NULL;
    struct failure failure = {""};
    kvc_ctx *ctx = NULL;

    bool ok = (o->dry_run || fold_may_write(o->model, o->output, o->force, &failure)) &&
              checkpoint_open(o->model, o->model_config, &checkpoint, &failure);
    if (ok) {
        layers = calloc(checkpoint.n_layers, sizeof(*layers));
        ok = layers && kvc_ctx_create(NULL, &ctx) == KVC_OK;
        if (!ok)
            fail_with(&failure, "out of memory");
    }
    ok = ok && folding_undo(ctx, o->allow_rounding, &checkpoint, layers, &failure);
    if (ok && !o->dry_run)
        ok = checkpoint_write_record(&checkpoint, &failure) &&
             file_write(o->output, checkpoint.bytes, checkpoint.size, &failure);
    if (ok)
        print_result(o, &checkpoint, layers);
    else
        fprintf(stderr, "kvc-fold unfold: %s\n", failure.text);
    checkpoint_close(&checkpoint);
    kvc_ctx_destroy(ctx);
    free(layers);
    return ok ? FOLD_DONE : FOLD_FAILED;
}

int unfold_command(int argc, char **argv)
{
    struct options o = {0};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "folded by this program (required)", 0, 0},
        {"output", ARG_TEXT, &o.output, "FILE", "the model as it was (required without --dry-run)",
         0, 0},
        {"allow-rounding", ARG_FLAG, &o.allow_rounding, "", "if the fold was made with it", 0, 0},
        {"model-config", ARG_TEXT, &o.model_config, "JSON",
         "config.json of safetensors (beside the model)", 0, 0},
        {"dry-run", ARG_FLAG, &o.dry_run, "", "write nothing", 0, 0},
        {"force", ARG_FLAG, &o.force, "", "overwrite the output", 0, 0},
        {"json", ARG_FLAG, &o.json, "", "print JSON", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-fold unfold --model FILE --output FILE [OPTIONS]\n"
               "Take out what was folded in: the same file as before where scales are powers of "
               "two, within one rounding elsewhere.\n\n");
        args_print_help(args, n_args);
        return FOLD_DONE;
    }
    if (ok && (!o.model || !(o.output || o.dry_run)))
        ok = fail_with(&failure, "--model and --output are required");
    return ok ? unfold(&o) : fold_usage_error("unfold", &failure);
}
