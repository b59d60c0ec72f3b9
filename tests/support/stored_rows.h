/* Rows of K or V in the formats of engines: random ones, and their elements in double. */
#ifndef KVC_TESTS_STORED_ROWS_H
#define KVC_TESTS_STORED_ROWS_H

#include <string.h>

#include "half.h"
#include "kvc/base.h"
#include "rng.h"

static inline size_t stored_bytes(kvc_row_format format, size_t dim)
{
    return format == KVC_ROWS_F16 ? 2 * dim : dim / 32 * (format == KVC_ROWS_Q8_0 ? 34 : 18);
}

static inline void store_half(unsigned char *p, double x)
{
    const uint16_t h = half_away(x);

    p[0] = (unsigned char)(h & 0xff); /* as engines store it: little-endian */
    p[1] = (unsigned char)(h >> 8);
}

static inline double stored_half(const unsigned char *p)
{
    return half_value((uint16_t)(p[0] | p[1] << 8));
}

/* Any codes; scales of either sign, so that elements lie within about +-1. */
static inline void stored_random(kvc_row_format format, unsigned char *row, size_t dim,
                                 uint64_t *rng)
{
    const size_t block = format == KVC_ROWS_Q8_0 ? 34 : 18;

    for (size_t i = 0; i < dim && format == KVC_ROWS_F16; i++) {
        store_half(row + 2 * i, (double)rng_unit(rng));
    }
    for (size_t b = 0; b < dim / 32 && format != KVC_ROWS_F16; b++) {
        store_half(row + b * block,
                   (double)rng_unit(rng) / (format == KVC_ROWS_Q8_0 ? 128.0 : 8.0));
        for (size_t i = 2; i < block; i++) {
            row[b * block + i] = (unsigned char)rng_next(rng);
        }
    }
}

static inline double stored_element(kvc_row_format format, const unsigned char *row, size_t i)
{
    const unsigned char *block;
    int code;

    if (format == KVC_ROWS_F16) {
        return stored_half(row + 2 * i);
    }
    block = row + i / 32 * (format == KVC_ROWS_Q8_0 ? 34 : 18);
    i %= 32;
    if (format == KVC_ROWS_Q8_0) {
        code = block[2 + i] < 128 ? block[2 + i] : block[2 + i] - 256;
    } else {
        code = (i < 16 ? block[2 + i] % 16 : block[2 + i - 16] / 16) - 8;
    }
    return stored_half(block) * code;
}

#endif
