/* A picture with what became of its patches. */
#ifndef VLM_OVERLAY_H
#define VLM_OVERLAY_H

#include <stdint.h>

#include <kvc/policy.h>

/*
 * Draws over rgb [14 grid][14 grid][3]: pruned patches go dark, those that went into another are
 * tinted blue, those that hold others get an orange frame, kept ones stay as they are. Tokens of
 * the picture begin at ordinal @p first.
 */
void overlay_draw(const kvc_token_fate *fates, size_t n_fates, int64_t first, int grid,
                  uint8_t *rgb);

#endif
