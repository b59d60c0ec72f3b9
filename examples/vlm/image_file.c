/* libpng reads and writes; PPM is read here. */
#include "image_file.h"

#include <png.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"

static bool check_size(size_t width, size_t height, struct failure *failure)
{
    if (width >= 1 && height >= 1 && width <= MAX_IMAGE_SIDE && height <= MAX_IMAGE_SIDE)
        return true;
    fail_with(failure, "%zu x %zu pixels: a side must be 1..%d", width, height, MAX_IMAGE_SIDE);
    return false;
}

static bool read_png(const uint8_t *bytes, size_t size, struct image *out, struct failure *failure)
{
    static const png_color white = {255, 255, 255};
    png_image png = {.version = PNG_IMAGE_VERSION};

    if (!png_image_begin_read_from_memory(&png, bytes, size))
        return fail_with(failure, "PNG: %s", png.message);
    png.format = PNG_FORMAT_RGB;
    png.flags |= PNG_IMAGE_FLAG_16BIT_sRGB; /* else 16 bits without a gamma count as linear */
    out->width = png.width;
    out->height = png.height;
    bool ok = check_size(out->width, out->height, failure);
    if (ok) {
        out->rgb = malloc(PNG_IMAGE_SIZE(png));
        ok = out->rgb || fail_with(failure, "out of memory");
    }
    if (ok && !png_image_finish_read(&png, &white, out->rgb, 0, NULL))
        ok = fail_with(failure, "PNG: %s", png.message);
    png_image_free(&png);
    return ok;
}

/* The next number of a PPM header, behind blanks and comments; false if there is none. */
static bool next_number(const uint8_t *bytes, size_t size, size_t *at, size_t *out)
{
    while (*at < size && (strchr(" \t\r\n", bytes[*at]) || bytes[*at] == '#')) {
        if (bytes[*at] == '#')
            while (*at < size && bytes[*at] != '\n')
                (*at)++;
        else if (bytes[*at] == '\0')
            return false;
        else
            (*at)++;
    }
    const size_t start = *at;
    for (*out = 0; *at < size && bytes[*at] >= '0' && bytes[*at] <= '9' && *at - start < 6; (*at)++)
        *out = *out * 10 + (size_t)(bytes[*at] - '0');
    return *at > start;
}

static bool read_ppm(const uint8_t *bytes, size_t size, struct image *out, struct failure *failure)
{
    size_t at = 2, largest;

    if (!next_number(bytes, size, &at, &out->width) ||
        !next_number(bytes, size, &at, &out->height) || !next_number(bytes, size, &at, &largest))
        return fail_with(failure, "PPM: the header is broken");
    const size_t n = 3 * out->width * out->height;
    if (!check_size(out->width, out->height, failure))
        return false;
    if (largest != 255)
        return fail_with(failure, "PPM: the largest value is %zu; only 255 is read", largest);
    if (at >= size || size - at - 1 < n)
        return fail_with(failure, "PPM: the file ends before its last pixel");
    out->rgb = malloc(n);
    if (!out->rgb)
        return fail_with(failure, "out of memory");
    memcpy(out->rgb, bytes + at + 1, n);
    return true;
}

bool image_read(const char *path, struct image *out, struct failure *failure)
{
    static const uint8_t png[4] = {0x89, 'P', 'N', 'G'};
    uint8_t *bytes = NULL;
    size_t size = 0;
    bool ok;

    memset(out, 0, sizeof(*out));
    if (!file_read(path, &bytes, &size, failure))
        return false;
    if (size >= 4 && memcmp(bytes, png, 4) == 0)
        ok = read_png(bytes, size, out, failure);
    else if (size >= 2 && bytes[0] == 'P' && bytes[1] == '6')
        ok = read_ppm(bytes, size, out, failure);
    else
        ok = fail_with(failure, "%.120s is neither PNG nor binary PPM (P6)", path);
    free(bytes);
    if (!ok)
        image_free(out);
    return ok;
}

void image_free(struct image *image)
{
    free(image->rgb);
    memset(image, 0, sizeof(*image));
}

bool image_write_png(const struct image *image, const char *path, struct failure *failure)
{
    png_image png = {.version = PNG_IMAGE_VERSION,
                     .width = (png_uint_32)image->width,
                     .height = (png_uint_32)image->height,
                     .format = PNG_FORMAT_RGB};

    return png_image_write_to_file(&png, path, 0, image->rgb, 0, NULL) ||
           fail_with(failure, "cannot write %.120s: %s", path, png.message);
}

/* Part of the pixel [at, at + 1) that lies in [from, to). */
static double overlap(size_t at, double from, double to)
{
    const double first = (double)at > from ? (double)at : from;
    const double last = (double)at + 1.0 < to ? (double)at + 1.0 : to;

    return last > first ? last - first : 0.0;
}

static void mean_of_area(const struct image *image, double top, double left, double length,
                         uint8_t *out)
{
    double sums[3] = {0.0, 0.0, 0.0}, area = 0.0;

    for (size_t y = (size_t)top; y < image->height && (double)y < top + length; y++)
        for (size_t x = (size_t)left; x < image->width && (double)x < left + length; x++) {
            const double part = overlap(y, top, top + length) * overlap(x, left, left + length);
            const uint8_t *pixel = image->rgb + 3 * (y * image->width + x);
            area += part;
            for (size_t c = 0; c < 3; c++)
                sums[c] += part * (double)pixel[c];
        }
    for (size_t c = 0; c < 3; c++)
        out[c] = (uint8_t)(sums[c] / area + 0.5);
}

void image_fit(const struct image *image, int side, uint8_t *out)
{
    const size_t square = image->width < image->height ? image->width : image->height;
    const double left = (double)(image->width - square) / 2.0;
    const double top = (double)(image->height - square) / 2.0;
    const double length = (double)square / (double)side;

    for (int y = 0; y < side; y++)
        for (int x = 0; x < side; x++, out += 3)
            mean_of_area(image, top + y * length, left + x * length, length, out);
}
