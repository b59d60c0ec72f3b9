/* Mean and scale of the keys of a model, from a file beside it. */
#ifndef ENGINE_CALIBRATION_H
#define ENGINE_CALIBRATION_H

#include <kvc/kvc.h>

#include "failure.h"
#include "model.h"

enum { CALIBRATION_PATH = 4096 }; /* what systems allow */

/* Vectors are [n_layers][n_kv_heads][head_dim]; all NULL: there is no calibration. */
struct calibration {
    char path[CALIBRATION_PATH]; /* of the file; empty: none */
    float *mean;
    float *scale;       /* balance of what is left of K without the mean */
    float *whole_scale; /* balance of K itself */
};

/* The file of a model: its own name with .kvcal instead of .gguf. */
bool calibration_path(const char *model_path, char *path, size_t size, struct failure *failure);

/*
 * Reads the file that is asked for: "none" is none; NULL is that of the model, if there is one. The
 * observation must be of the model's shape.
 */
bool calibration_open(const char *asked, const char *model_path, kvc_ctx *ctx,
                      const struct model_shape *shape, struct calibration *out,
                      struct failure *failure);
void calibration_close(struct calibration *calibration);

#endif
