/* Tensors of a model's file, of any type that the engine reads, and folds on them. */
#ifndef FOLD_WEIGHTS_H
#define FOLD_WEIGHTS_H

#include <kvc/smooth.h>

#include "failure.h"

/* Rows are outputs; a bias or a gain has rows of one. */
struct weight {
    uint8_t *data; /* in the file, not aligned; NULL: the model has none */
    uint32_t type; /* as GGUF numbers them */
    size_t n_rows, n_cols;
};

/* What a fold did to the numbers that it multiplied: elements, or the scales of blocks. */
struct rounding {
    uint64_t n_inexact;   /* that are not what multiplication gives, of these: */
    uint64_t n_overflow;  /* that became the largest number of their type */
    uint64_t n_underflow; /* that became subnormal or 0 */
    /* |stored - exact| / |exact|; infinite where a number is none any more; of numbers smaller than
     * a sixteenth of their row's root mean square, in relation to that, because nothing hangs on
     * them. */
    double max_error;
};

/* One layer's scales, [n_kv_heads][head_dim]. */
struct head_scales {
    const float *values;
    size_t n_kv_heads, head_dim;
};

/* What is done: to K or to Q, forth or back. */
struct fold_way {
    kvc_fold_side side;
    bool undo;
};

size_t weight_n_bytes(const struct weight *weight);

/* Row by row as floats: @p out has room for n_cols. */
void weight_row(const struct weight *weight, size_t row, float *out);

/* Multiplies rows, as kvc_fold_linear(): elements of floats, the scales of quantized blocks, whose
 * codes stay as they are. A weight without data is left alone. Adds to *rounding. */
bool weight_fold(kvc_ctx *ctx, const struct weight *weight, struct fold_way way,
                 const struct head_scales *scales, struct rounding *rounding,
                 struct failure *failure);

/* The same for the gain of a norm, as kvc_fold_norm(). */
bool weight_fold_gain(const struct weight *gain, float offset, struct fold_way way,
                      const struct head_scales *scales, struct rounding *rounding,
                      struct failure *failure);

/* Compares the numbers of a weight, or (with @p offset) of a gain, before and after a fold with
 * what the fold should have made of them. Both are of one shape and type. */
bool weight_compare(const struct weight *before, const struct weight *after, float offset,
                    struct fold_way way, const struct head_scales *scales,
                    struct rounding *rounding, struct failure *failure);

#endif
