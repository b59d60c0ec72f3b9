/* Numbers that follow from a seed, the same on every machine: integers and exact float steps only.
 */
#ifndef VLM_RANDOM_H
#define VLM_RANDOM_H

#include <stdint.h>

struct draws {
    uint64_t state;
};

/* splitmix64 */
static inline uint64_t draw_bits(struct draws *draws)
{
    uint64_t z = (draws->state += UINT64_C(0x9E3779B97F4A7C15));

    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* Streams of neighbouring seeds and of other purposes have nothing in common. */
static inline struct draws draws_of(uint64_t seed, uint64_t purpose)
{
    struct draws first = {seed}, second = {draw_bits(&first) + purpose};

    return (struct draws){draw_bits(&second)};
}

/* 0 ... n - 1 */
static inline int draw_below(struct draws *draws, int n)
{
    return (int)(((draw_bits(draws) >> 32) * (uint64_t)n) >> 32);
}

/* first ... last */
static inline int draw_from(struct draws *draws, int first, int last)
{
    return first + draw_below(draws, last - first + 1);
}

/* [low, high) */
static inline float draw_between(struct draws *draws, float low, float high)
{
    return low + (high - low) * ((float)(draw_bits(draws) >> 40) * 0x1p-24f);
}

/* Mean 0, variance 1: the sum of four uniforms, near enough and without a logarithm. */
static inline float draw_normal(struct draws *draws)
{
    const uint64_t z = draw_bits(draws);
    const uint64_t sum = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);

    return ((float)sum * 0x1p-16f - 2.0f) * 1.7320508f;
}

static inline void draw_order(struct draws *draws, int *items, int n)
{
    for (int i = n - 1; i > 0; i--) {
        const int j = draw_below(draws, i + 1), item = items[i];

        items[i] = items[j];
        items[j] = item;
    }
}

#endif
