/* Mean and scale of the keys of a model, from a file beside it. */
#include "calibration.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "file.h"

/* A path that is cut off would be that of another file. */
static bool copy_path(const char *text, size_t n, const char *suffix, char *path, size_t size,
                      struct failure *failure)
{
    if (n + strlen(suffix) >= size)
        return fail_with(failure, "the path of the calibration is too long: %.100s...", text);
    snprintf(path, size, "%.*s%s", (int)n, text, suffix);
    return true;
}

bool calibration_path(const char *model_path, char *path, size_t size, struct failure *failure)
{
    const char *dot = strrchr(model_path, '.'), *slash = strrchr(model_path, '/');
    const size_t n = strlen(model_path);
    const size_t stem = dot && (!slash || dot > slash) ? (size_t)(dot - model_path) : n;

    return copy_path(model_path, stem, ".kvcal", path, size, failure);
}

static bool fits(const kvc_observation *observation, const struct model_shape *shape)
{
    kvc_observed_shape seen = {.struct_size = sizeof(seen)};

    return kvc_observation_shape(observation, &seen) == KVC_OK &&
           seen.n_layers == (int32_t)shape->n_layers && seen.n_heads == (int32_t)shape->n_heads &&
           seen.n_kv_heads == (int32_t)shape->n_kv_heads &&
           seen.head_dim == (int32_t)shape->head_dim;
}

static bool take_vectors(const kvc_observation *observation, const struct model_shape *shape,
                         struct calibration *out, struct failure *failure)
{
    const size_t width = shape->n_kv_heads * shape->head_dim;
    const size_t size = (shape->n_layers * width + 1) * sizeof(float);
    kvc_smooth_options whole;

    kvc_smooth_options_default(&whole);
    whole.rule = KVC_SMOOTH_BALANCE;
    whole.pairs = false;
    out->mean = malloc(size);
    out->scale = malloc(size);
    out->whole_scale = malloc(size);
    if (!out->mean || !out->scale || !out->whole_scale)
        return fail_with(failure, "out of memory");
    kvc_status status = kvc_observation_calibrate(observation, out->mean, out->scale);
    for (size_t l = 0; l < shape->n_layers && status == KVC_OK; l++)
        status = kvc_smooth_scales(observation, (int32_t)l, &whole, out->whole_scale + l * width);
    return status == KVC_OK ||
           fail_with(failure, "%.100s has seen too little: %s", out->path, kvc_status_str(status));
}

bool calibration_open(const char *asked, const char *model_path, kvc_ctx *ctx,
                      const struct model_shape *shape, struct calibration *out,
                      struct failure *failure)
{
    kvc_observation *observation;
    unsigned char *data;
    size_t size;

    memset(out, 0, sizeof(*out));
    if (asked && strcmp(asked, "none") == 0)
        return true;
    if (!(asked ? copy_path(asked, strlen(asked), "", out->path, sizeof(out->path), failure)
                : calibration_path(model_path, out->path, sizeof(out->path), failure)))
        return false;
    if (!asked && access(out->path, F_OK) != 0) {
        out->path[0] = '\0';
        return true;
    }
    if (!file_read(out->path, &data, &size, failure))
        return false;
    const kvc_status status = kvc_observation_load(ctx, data, size, &observation);
    free(data);
    if (status != KVC_OK)
        return fail_with(failure, "%.100s is no calibration: %s", out->path,
                         kvc_status_str(status));
    bool ok = fits(observation, shape) ||
              fail_with(failure, "%.100s was made for another model", out->path);
    ok = ok && take_vectors(observation, shape, out, failure);
    kvc_observation_destroy(observation);
    if (!ok)
        calibration_close(out);
    return ok;
}

void calibration_close(struct calibration *calibration)
{
    free(calibration->mean);
    free(calibration->scale);
    free(calibration->whole_scale);
    memset(calibration, 0, sizeof(*calibration));
}
