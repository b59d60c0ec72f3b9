/* Folding scales into the attentions of a model's file, and taking them out again. */
#ifndef FOLD_FOLDING_H
#define FOLD_FOLDING_H

#include <kvc/smooth.h>

#include "checkpoint.h"

/* Most that a number may be rounded by (struct rounding), and most that scores may change in a fold
 * that rounds nothing. */
#define FOLDING_MAX_ERROR  1e-2
#define FOLDING_MAX_CHANGE 1e-5

struct folding_settings {
    kvc_smooth_rule rule;
    float factor;
    bool power_of_two;
    bool file_order; /* the observation has the channels in the order of the file */
    bool allow_rounding;
    kvc_smooth_filter filter;
};

/* What became of a layer. */
struct folded_layer {
    bool is_folded;
    float min_scale, max_scale;
    struct rounding rounding;
    double change; /* of scores on random rows, as kvc_smooth_check() */
};

/* What a caller accepts. */
struct folding_limits {
    bool allow_rounding;
    bool is_exact;      /* powers of two, which round nothing */
    double max_change;  /* negative: what follows from rounding */
    const char *advice; /* what to do about too much rounding */
};

/*
 * Folds into the bytes of a checkpoint and fills its record, which is not written yet. Progress and
 * warnings go to standard error. Rounding or a change of scores above the limits is a failure.
 * results: [n_layers].
 */
bool folding_run(kvc_ctx *ctx, const struct folding_settings *settings,
                 const kvc_observation *observation, struct checkpoint *checkpoint,
                 struct folded_layer *results, struct failure *failure);

/* Undoes what the record tells, within the same limits, and clears it. A scale that is damaged
 * inside a pair changes scores and is refused; that of a whole pair cannot be told from another
 * fold. */
bool folding_undo(kvc_ctx *ctx, bool allow_rounding, struct checkpoint *checkpoint,
                  struct folded_layer *results, struct failure *failure);

/* Compares a model with its fold: numbers against the record, scores on random rows; and that
 * nothing else differs, in tensors, their types and shapes, and metadata. Fills results; the limits
 * are the caller's. */
bool folding_compare(kvc_ctx *ctx, const struct checkpoint *original,
                     const struct checkpoint *folded, struct folded_layer *results,
                     struct failure *failure);

/* Most that scores may change where numbers are rounded by this. */
double folding_change_limit(const struct rounding *rounding);

/* Whether what became of the attention of that name is within limits. */
bool folding_check_limits(const struct folding_limits *limits, const char *name,
                          const struct folded_layer *result, struct failure *failure);

/* Whether all scales that the record has of a layer, or of all, are powers of two. */
bool folding_layer_is_power_of_two(const struct checkpoint *checkpoint, size_t layer);
bool folding_is_power_of_two(const struct checkpoint *checkpoint);

/* Sums and maxima of all layers. */
struct folded_layer folding_total(const struct folded_layer *results, size_t n_layers);

#endif
