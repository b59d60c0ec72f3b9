/* Pictures in files: PNG and binary PPM. */
#ifndef VLM_IMAGE_FILE_H
#define VLM_IMAGE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "failure.h"

enum { MAX_IMAGE_SIDE = 16384 };

/* rgb is [height][width][3], to be freed. Transparent parts lie on white; 16 bits become 8. */
struct image {
    size_t width, height;
    uint8_t *rgb;
};

/* By what the file begins with, not by its name. */
bool image_read(const char *path, struct image *out, struct failure *failure);
void image_free(struct image *image);

bool image_write_png(const struct image *image, const char *path, struct failure *failure);

/* The largest square in the middle, as out [side][side][3]; each pixel is the mean of the area that
 * it covers. */
void image_fit(const struct image *image, int side, uint8_t *out);

#endif
