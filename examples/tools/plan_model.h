/* plan_model.h - the shape of the K and V of a model in a GGUF file. */
#ifndef KVC_TOOLS_PLAN_MODEL_H
#define KVC_TOOLS_PLAN_MODEL_H

#include <kvc/plan.h>

#include "failure.h"

/* Any architecture whose layers all have the same heads. weight_bytes: of all tensors. */
bool plan_model_read(const char *path, kvc_plan_model *model, uint64_t *weight_bytes,
                     struct failure *failure);

#endif
