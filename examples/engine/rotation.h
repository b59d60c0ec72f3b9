/* How a model rotates Q and K, as trained or scaled for longer contexts. */
#ifndef ENGINE_ROTATION_H
#define ENGINE_ROTATION_H

#include <kvc/kvc.h>
#include <kvc/rope.h>

#include "model.h"

/* scaling: "none", "ntk" or "yarn"; the others stretch the model's context by factor. */
bool rotation_init(const struct model_shape *shape, const char *scaling, double factor,
                   kvc_rope *out, struct failure *failure);

/* Refuses more tokens than the rotation is made for. */
bool rotation_check_context(const struct model_shape *shape, const kvc_rope *rope, size_t n_tokens,
                            struct failure *failure);

#endif
