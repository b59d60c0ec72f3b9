/* The patch stem: from the pixels of an image to a row of the decoder for each patch. */
#ifndef VLM_STEM_H
#define VLM_STEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "failure.h"
#include "gguf.h"

enum { MAX_STEM_BLOCKS = 8 };

/*
 * With x = pixel / 64 - 2, m the mean colour of a patch:
 *
 *     h = C m + c + P gelu(E (x - m) + e) + p
 *     h += D_b gelu(conv3x3_b(rms_norm(h)) + ...) + d_b     for each block, over the grid of
 * patches row = O rms_norm(h) + o
 *
 * Matrices are [outputs][inputs]; the pixels of a patch are [14][14][3]; convolutions pad with
 * zeros, are dilated, and their inputs are ordered [3 rows][3 columns][channels].
 */
struct stem_block {
    float *norm, *conv, *conv_bias, *point, *point_bias;
    int dilation;
};

struct stem {
    size_t n_hidden, n_width, n_out; /* of E, of h, of a row */
    size_t n_blocks;
    float *weights; /* one block of memory; the pointers lie in it */
    float *patch, *patch_bias, *mix, *mix_bias, *colour, *colour_bias;
    struct stem_block blocks[MAX_STEM_BLOCKS];
    float *norm, *out, *out_bias;
};

bool stem_load(const struct gguf *gguf, struct stem *stem, struct failure *failure);
void stem_free(struct stem *stem);

/* Room for one image at a time. NULL: no memory. */
struct stem_room;
struct stem_room *stem_room_create(const struct stem *stem);
void stem_room_destroy(struct stem_room *room);

/* rgb [14 grid][14 grid][3], grid up to 24; rows [grid * grid][n_out]. */
void stem_run(const struct stem *stem, struct stem_room *room, const uint8_t *rgb, int grid,
              float *rows);

#endif
