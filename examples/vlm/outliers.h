/* The same model with other keys: channels scaled up in K and down in Q, which no product sees. */
#ifndef VLM_OUTLIERS_H
#define VLM_OUTLIERS_H

#include "exam.h"
#include "vlm.h"

/*
 * Channels j and j + head_dim / 2 are one pair of the rotation and share a factor, so that the
 * factors pass through it: (f k) . (q / f) = k . q.
 */

/* Three pairs of each layer and KV head times 8: outliers as larger models have them. out shares
 * all other weights with @p vlm; outliers_free() frees what it does not. */
bool outliers_inject(const struct vlm *vlm, struct vlm *out, struct failure *failure);

/* Evens the pairs out by their largest keys on the first pictures of an exam. */
bool outliers_smooth(const struct vlm *vlm, const char *kernels, const struct exam *exam,
                     struct vlm *out, struct failure *failure);

void outliers_free(struct vlm *vlm);

#endif
