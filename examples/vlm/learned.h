/* A scorer that sees only the patch: logistic regression on the rows of the stem. */
#ifndef VLM_LEARNED_H
#define VLM_LEARNED_H

#include "exam.h"
#include "vlm.h"

/*
 * Trains on the pictures of the first items of an exam: a patch counts if any question that can be
 * asked about its picture looks at it. *bytes becomes a file KVCS, to be freed.
 */
bool learned_train(const struct vlm *vlm, const char *kernels, const struct exam *exam,
                   void **bytes, size_t *n_bytes, struct failure *failure);

#endif
