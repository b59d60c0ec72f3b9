/* Deterministic numbers for the tests. */
#ifndef KVC_TESTS_RNG_H
#define KVC_TESTS_RNG_H

#include <stddef.h>
#include <stdint.h>

/* splitmix64; any seed, 0 too. */
static inline uint64_t rng_next(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));

    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* 0 .. n - 1, n >= 1. */
static inline size_t rng_below(uint64_t *state, size_t n)
{
    return (size_t)(rng_next(state) % n);
}

/* In [-1, 1), a multiple of 2^-23. */
static inline float rng_unit(uint64_t *state)
{
    return (float)(rng_next(state) >> 40) * 0x1p-23f - 1.0f;
}

/* The generator of the printed reference numbers: in [-1, 1), a multiple of 2^-15. */
static inline float lcg_unit(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 16) * 0x1p-15f - 1.0f;
}

#endif
