/* Scores of an attention on random rows before and after a fold. */
#ifndef FOLD_PROBE_H
#define FOLD_PROBE_H

#include "checkpoint.h"

/* max |s' - s| / max |s| over the scores of a few positions, as kvc_smooth_check(). */
bool probe_change(kvc_ctx *ctx, const struct checkpoint *shape, const struct attention *before,
                  const struct attention *after, double *change, struct failure *failure);

#endif
