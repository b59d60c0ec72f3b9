/* kvc-fold fold: scales from an observation into a copy of a model. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvc/kvc.h>

#include "args.h"
#include "config.h"
#include "file.h"
#include "fold.h"

struct options {
    const char *model, *observation, *output, *config, *model_config;
    const char *rule, *order;
    struct arg_list include, exclude;
    double factor; /* 0: not given */
    bool power_of_two, allow_rounding, force, dry_run, json;
};

struct job {
    const struct options *o;
    kvc_ctx *ctx;
    kvc_observation *observation;
    struct fold_config config;
    struct folding_settings settings;
    struct checkpoint checkpoint;
    struct folded_layer *layers;
};

static bool read_config(struct job *job, struct failure *failure)
{
    const char *path = job->o->config;
    unsigned char *text;
    size_t size;
    struct failure why;

    job->config.factor = 1.0;
    if (!path)
        return true;
    if (!file_read(path, &text, &size, failure))
        return false;
    const bool ok = fold_config_parse(text, size, &job->config, &why);
    free(text);
    if (!ok)
        return fail_with(failure, "%.80s: %.160s", path, why.text);
    if (job->config.ignored[0])
        fprintf(stderr, "warning: %s: ignored: %s\n", path, job->config.ignored);
    return true;
}

/* Options win over the config. */
static void settle(struct job *job)
{
    const struct options *o = job->o;
    struct folding_settings *s = &job->settings;

    *s = (struct folding_settings){
        .rule = o->rule && strcmp(o->rule, "balance") == 0 ? KVC_SMOOTH_BALANCE : KVC_SMOOTH_ABSMAX,
        .factor = (float)(o->factor > 0.0 ? o->factor : job->config.factor),
        .power_of_two = o->power_of_two,
        .file_order = o->order && strcmp(o->order, "file") == 0,
        .allow_rounding = o->allow_rounding,
        .filter = {.struct_size = sizeof(s->filter),
                   .include = (const char *const *)job->config.include,
                   .n_include = job->config.n_include,
                   .exclude = (const char *const *)job->config.exclude,
                   .n_exclude = job->config.n_exclude}};
    if (o->include.n > 0) {
        s->filter.include = o->include.items;
        s->filter.n_include = o->include.n;
    }
    if (o->exclude.n > 0) {
        s->filter.exclude = o->exclude.items;
        s->filter.n_exclude = o->exclude.n;
    }
}

static bool read_observation(struct job *job, struct failure *failure)
{
    const char *path = job->o->observation;
    unsigned char *bytes;
    size_t size;

    if (!file_read(path, &bytes, &size, failure))
        return false;
    const kvc_status status = kvc_observation_load(job->ctx, bytes, size, &job->observation);
    free(bytes);
    return status == KVC_OK ||
           fail_with(failure, "%.100s is no observation: %s", path, kvc_status_str(status));
}

static bool open_model(struct job *job, struct failure *failure)
{
    fprintf(stderr, "reading %s\n", job->o->model);
    if (!checkpoint_open(job->o->model, job->o->model_config, &job->checkpoint, failure))
        return false;
    if (job->o->order && job->checkpoint.is_gguf)
        return fail_with(failure, "--observed-order is for safetensors files");
    job->layers = calloc(job->checkpoint.n_layers, sizeof(*job->layers));
    return job->layers || fail_with(failure, "out of memory");
}

static void print_result(const struct job *job)
{
    const struct fold_result result = {.command = "fold",
                                       .input = job->o->model,
                                       .output = job->o->dry_run ? NULL : job->o->output,
                                       .checkpoint = &job->checkpoint,
                                       .layers = job->layers,
                                       .factor = (double)job->settings.factor,
                                       .power_of_two = job->settings.power_of_two,
                                       .dry_run = job->o->dry_run};

    fold_print(&result, job->o->json);
}

static bool write_model(struct job *job, struct failure *failure)
{
    fprintf(stderr, "writing %s\n", job->o->output);
    return checkpoint_write_record(&job->checkpoint, failure) &&
           file_write(job->o->output, job->checkpoint.bytes, job->checkpoint.size, failure);
}

static int fold(const struct options *o)
{
    struct job job = {.o = o};
    struct failure failure = {""};

    bool ok = (o->dry_run || fold_may_write(o->model, o->output, o->force, &failure)) &&
              read_config(&job, &failure);
    if (ok && kvc_ctx_create(NULL, &job.ctx) != KVC_OK)
        ok = fail_with(&failure, "out of memory");
    settle(&job);
    ok =
        ok && read_observation(&job, &failure) && open_model(&job, &failure) &&
        folding_run(job.ctx, &job.settings, job.observation, &job.checkpoint, job.layers, &failure);
    ok = ok && (o->dry_run || write_model(&job, &failure));
    if (ok)
        print_result(&job);
    else
        fprintf(stderr, "kvc-fold fold: %s\n", failure.text);
    checkpoint_close(&job.checkpoint);
    kvc_observation_destroy(job.observation);
    kvc_ctx_destroy(job.ctx);
    fold_config_free(&job.config);
    free(job.layers);
    return ok ? FOLD_DONE : FOLD_FAILED;
}

int fold_command(int argc, char **argv)
{
    struct options o = {0};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF or safetensors (required)", 0, 0},
        {"observation", ARG_TEXT, &o.observation, "FILE", "of kvc-fold observe (required)", 0, 0},
        {"output", ARG_TEXT, &o.output, "FILE", "the folded model (required without --dry-run)", 0,
         0},
        {"config", ARG_TEXT, &o.config, "YAML", "settings as in article 003; options win", 0, 0},
        {"factor", ARG_REAL, &o.factor, "X", "smooth_factor (1)", 1e-6, 1e6},
        {"include", ARG_LIST, &o.include, "PATTERN", "attentions to fold; may be repeated (*)", 0,
         0},
        {"exclude", ARG_LIST, &o.exclude, "PATTERN", "attentions to leave alone; may be repeated",
         0, 0},
        {"rule", ARG_CHOICE, &o.rule, "absmax|balance", "how scales follow (absmax)", 0, 0},
        {"power-of-two", ARG_FLAG, &o.power_of_two, "", "scales that round nothing", 0, 0},
        {"allow-rounding", ARG_FLAG, &o.allow_rounding, "", "however much is rounded", 0, 0},
        {"observed-order", ARG_CHOICE, &o.order, "gguf|file",
         "of the observation's channels, for safetensors (gguf)", 0, 0},
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
        printf("Usage: kvc-fold fold --model FILE --observation FILE --output FILE [OPTIONS]\n"
               "Fold scales into the projections or norms of Q and K of a copy of the model.\n\n");
        args_print_help(args, n_args);
        return FOLD_DONE;
    }
    if (ok && (!o.model || !o.observation || !(o.output || o.dry_run)))
        ok = fail_with(&failure, "--model, --observation and --output are required");
    return ok ? fold(&o) : fold_usage_error("fold", &failure);
}
