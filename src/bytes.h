/* bytes.h - numbers of files, least significant byte first, and their checksum. */
#ifndef KVC_BYTES_H
#define KVC_BYTES_H

#include <stddef.h>
#include <stdint.h>

static inline uint64_t kvc_get(const uint8_t *at, size_t n)
{
    uint64_t x = 0;
    for (size_t i = n; i-- > 0;)
        x = x << 8 | at[i];
    return x;
}

static inline uint32_t kvc_get32(const uint8_t *at)
{
    return (uint32_t)kvc_get(at, 4);
}

static inline void kvc_put(uint8_t *at, uint64_t x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        at[i] = (uint8_t)(x >> 8 * i);
}

/* CRC-32 (polynomial 0xedb88320, as in zip), four bits at a time. */
static inline uint32_t kvc_crc32(const uint8_t *bytes, size_t n)
{
    static const uint32_t table[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac,
                                       0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
                                       0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                       0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < n; i++) {
        crc ^= bytes[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}

#endif
