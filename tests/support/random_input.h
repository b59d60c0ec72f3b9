/* Random arguments for the calls of a cache, right and wrong ones. */
#ifndef KVC_TESTS_RANDOM_INPUT_H
#define KVC_TESTS_RANDOM_INPUT_H

#include "cache_model.h"

bool chance(uint64_t *rng, int one_in);
/* A view of n tokens over data, of any element type, with gaps or heads before tokens at times. */
kvc_view random_view(uint64_t *rng, void *data, size_t n, int heads, int dim);
float random_scale(uint64_t *rng);
/* NaN, Inf or huge elements; true if one of them is not finite. */
bool spoil_view(uint64_t *rng, const kvc_view *view);
/* A few tokens of text, then patches of an image that share t. */
void random_tokens(uint64_t *rng, int64_t position, kvc_token *tokens, size_t n);
/* Something that kvc_tokens_add() refuses. */
void spoil_token(uint64_t *rng, kvc_token *token);
kvc_precision random_precision(uint64_t *rng);
/* Vectors of all layers and heads, or none, or some that the cache measures. */
void random_transform(uint64_t *rng, kvc_cache_params *p, float *mean, float *scale);

#endif
