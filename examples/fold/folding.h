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

/*
 * Folds into the bytes of a checkpoint and fills its record, which is not written yet. Progress and
 * warnings go to standard error. Rounding or a change of scores above the limits is a failure.
 * results: [n_layers].
 */
bool folding_run(kvc_ctx *ctx, const struct folding_settings *settings,
                 const kvc_observation *observation, struct checkpoint *checkpoint,
                 struct folded_layer *results, struct failure *failure);

/* Undoes what the record tells, and clears it. */
bool folding_undo(kvc_ctx *ctx, struct checkpoint *checkpoint, struct folded_layer *results,
                  struct failure *failure);

/* Compares a model with its fold: numbers against the record, scores on random rows; and that
 * nothing else differs. Fills results; the limits are the caller's. */
bool folding_compare(kvc_ctx *ctx, const struct checkpoint *original,
                     const struct checkpoint *folded, struct folded_layer *results,
                     struct failure *failure);

/* Most that scores may change where numbers are rounded by this. */
double folding_change_limit(const struct rounding *rounding);

/* Sums and maxima of all layers. */
struct folded_layer folding_total(const struct folded_layer *results, size_t n_layers);

#endif
