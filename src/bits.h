/* bits.h - bitmaps of the API and of the cache: bit i of word i / 64. */
#ifndef KVC_BITS_H
#define KVC_BITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* NULL: no bit is set. */
static inline bool kvc_bit(const uint64_t *bits, size_t i)
{
    return bits && (bits[i / 64] >> (i % 64) & 1);
}

static inline void kvc_bit_set(uint64_t *bits, size_t i)
{
    bits[i / 64] |= UINT64_C(1) << (i % 64);
}

static inline void kvc_bit_clear(uint64_t *bits, size_t i)
{
    bits[i / 64] &= ~(UINT64_C(1) << (i % 64));
}

static inline size_t kvc_bit_words(size_t n_bits)
{
    return n_bits / 64 + (n_bits % 64 != 0);
}

#endif
