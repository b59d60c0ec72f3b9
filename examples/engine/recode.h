/* K and V through the codes of a recipe before the cache: what a cache without an exact page sees.
 */
#ifndef ENGINE_RECODE_H
#define ENGINE_RECODE_H

#include "forward.h"
#include "recipes.h"

struct recoder;

bool recoder_create(kvc_ctx *ctx, const struct model_shape *shape, const struct recipe *recipe,
                    const struct calibration *calibration, struct recoder **out,
                    struct failure *failure);
void recoder_destroy(struct recoder *recoder);

/* Codes K and V of an item but for its first @p n_exact tokens; of one item at a time. */
struct forward_hook recoder_hook(struct recoder *recoder, size_t n_exact);

#endif
