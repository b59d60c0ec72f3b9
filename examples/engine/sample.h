/* Chooses the next token from logits. */
#ifndef ENGINE_SAMPLE_H
#define ENGINE_SAMPLE_H

#include <stddef.h>
#include <stdint.h>

#include "failure.h"

/* The largest logit, the lowest id among equals; 0 if all are NaN. */
int32_t sample_greedy(const float *logits, size_t n);

struct sampler;

/*
 * temperature 0 is greedy; else logits are divided by it, and the most probable tokens that
 * together reach top_p (0 < top_p <= 1) are drawn from. The same seed gives the same choices.
 */
bool sampler_create(size_t n_vocab, double temperature, double top_p, uint64_t seed,
                    struct sampler **out, struct failure *failure);
void sampler_destroy(struct sampler *sampler);
int32_t sampler_next(struct sampler *sampler, const float *logits);

#endif
