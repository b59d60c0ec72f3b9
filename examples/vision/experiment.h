/* What pruning and merging do to the attention of one layer of a vision transformer. */
#ifndef VISION_EXPERIMENT_H
#define VISION_EXPERIMENT_H

#include "kvc/base.h"
#include "kvx.h"

enum { N_ROUNDS = 3 }; /* of merging; each leaves 3/4 of the patches */
enum method { PRUNE, MERGE, MERGE_BIAS, N_METHODS }; /* MERGE leaves the bias out */

/* Mean of |o' - o| / |o| over queries, o and o' attention outputs before and after. */
struct errors {
    double same;     /* held-out queries like those that score */
    double shifted;  /* queries that look at the other half of the photo */
    double reported; /* what the scoring queries alone tell; see experiment.c */
};

/* Of one head. */
struct outcome {
    struct errors rounds[N_ROUNDS][N_METHODS];
};

struct experiment; /* room for one block */

/* NULL: no memory. */
struct experiment *experiment_create(const struct kvx *kvx);
void experiment_destroy(struct experiment *x);

/* The block to be filled by kvx_read(). */
struct kvx_block *experiment_block(struct experiment *x);

/* Patches left after each round: the same for every block. */
void experiment_kept(const struct kvx *kvx, size_t kept[N_ROUNDS]);

/* Measures the block. Each head chooses its own tokens, or all heads share one choice. */
kvc_status experiment_run(struct experiment *x, bool shared, struct outcome *heads);

#endif
