/* plan_fill.h - the bytes of a cache that was filled under a profile. */
#ifndef KVC_TOOLS_PLAN_FILL_H
#define KVC_TOOLS_PLAN_FILL_H

#include <kvc/kvc.h>

#include "failure.h"

/*
 * All bytes in use (kvc_stats::used_bytes) once n_tokens tokens were read in one hold and
 * compressed under the profile, merges forced; cache parameters are the defaults. The first tokens
 * are visual, in images of PLAN_IMAGE_TOKENS. Layers and heads share one set of tokens, so one head
 * is filled and multiplied; whole: all of them are filled.
 */
enum { PLAN_IMAGE_TOKENS = 576 };

bool plan_fill(const kvc_plan_model *model, const kvc_plan_profile *profile, int64_t n_tokens,
               bool whole, uint64_t *bytes, struct failure *failure);

#endif
