/* rows.h - the row formats of engines: bytes of rows, and single elements for the reference. */
#ifndef KVC_ROWS_H
#define KVC_ROWS_H

#include "half.h"
#include "kvc/base.h"

/* Elements of a block, and those that share a run of bytes in the kernels. */
#define KVC_BLOCK 32

/* Bytes of KVC_BLOCK elements. */
static inline size_t kvc_block_bytes(kvc_row_format format)
{
    return format == KVC_ROWS_Q8_0 ? 34 : format == KVC_ROWS_Q4_0 ? 18 : 2 * KVC_BLOCK;
}

static inline float kvc_half_at(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof(h));
    return kvc_half_to_float(h);
}

/* Element i of a row. */
static inline float kvc_row_element(kvc_row_format format, const uint8_t *row, size_t i)
{
    const uint8_t *block = row + i / KVC_BLOCK * kvc_block_bytes(format), *codes = block + 2;
    const size_t j = i % KVC_BLOCK;
    switch (format) {
    case KVC_ROWS_Q8_0: return kvc_half_at(block) * (float)(int8_t)codes[j];
    case KVC_ROWS_Q4_0: return kvc_half_at(block) * (float)((codes[j % 16] >> j / 16 * 4 & 15) - 8);
    default: return kvc_half_at(block + 2 * j);
    }
}

#endif
