/* Reader of safetensors files that trusts nothing in them. */
#ifndef FOLD_SAFETENSORS_H
#define FOLD_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "failure.h"

enum { SAFETENSORS_MAX_DIMS = 8 };

struct json_t;

struct safetensor {
    const char *name;
    const char *dtype; /* as in the file: "BF16" */
    size_t n_dims;
    uint64_t dims[SAFETENSORS_MAX_DIMS]; /* the last one varies fastest */
    const uint8_t *data;
    size_t n_bytes;
};

/* Tensors are in the order of their data, which points into the bytes given to safetensors_parse().
 */
struct safetensors {
    struct json_t *header; /* an object */
    size_t data_at;        /* where the data begins in the file */
    struct safetensor *tensors;
    size_t n_tensors;
};

/*
 * Parse a file. Tensors must cover the data without holes and overlaps; of other keys than
 * __metadata__, whose values are texts, the header has none. After a failure *out is empty.
 */
bool safetensors_parse(const uint8_t *data, size_t size, struct safetensors *out,
                       struct failure *failure);
void safetensors_free(struct safetensors *safetensors);

/* NULL: there is none. */
const struct safetensor *safetensors_find(const struct safetensors *safetensors, const char *name);
const char *safetensors_metadata(const struct safetensors *safetensors, const char *key);

#endif
