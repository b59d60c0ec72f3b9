/* Observations that say what a test wants. */
#ifndef TEST_OBSERVED_H
#define TEST_OBSERVED_H

#include <kvc/smooth.h>

/* One row of K and one of Q in every layer: |k| is absmax [n_kv_heads][head_dim], q is 1. */
kvc_observation *observed_absmax(kvc_ctx *ctx, int32_t n_layers, int32_t n_heads,
                                 int32_t n_kv_heads, int32_t head_dim, const float *absmax);

/* The article's scales by their formula in double: the larger of each pair, to the power factor,
 * divided by the middle of the smallest and the largest logarithm of the head. */
void observed_scales(const float *absmax, int32_t n_kv_heads, int32_t head_dim, bool neighbours,
                     bool shared, double factor, double *scales);

#endif
