/* Takes the tensors of a model out of a GGUF file, one by one, into one block of floats. */
#ifndef ENGINE_LOADER_H
#define ENGINE_LOADER_H

#include "failure.h"
#include "gguf.h"

/* Run it twice: without a block it only checks and counts. */
struct loader {
    const struct gguf *gguf;
    float *block;
    size_t n_floats, n_tensors; /* taken so far; 0 at first */
    struct failure *failure;    /* empty at first */
};

/* A matrix of n_out rows of n_in numbers, or with n_out 1 a vector. NULL without a block, and after
 * a failure, which later calls keep. */
float *loader_take(struct loader *l, const char *name, size_t n_out, size_t n_in);

bool loader_has_all(const struct loader *l);

#endif
