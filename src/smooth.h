/* smooth.h - what the files of this module share: the parts of an observation. */
#ifndef KVC_SRC_SMOOTH_H
#define KVC_SRC_SMOOTH_H

#include "kvc/smooth.h"

#include "check.h"
#include "ctx.h"

/* The sums of a layer, in this order: what kvc_observed_layer names. */
enum kvc_sum { KVC_K_ABSMAX, KVC_K_SUM, KVC_K_SQUARE, KVC_Q_SQUARE, KVC_N_SUMS };

struct kvc_observed_counts {
    uint64_t n_keys, n_queries, n_nonfinite;
};

struct kvc_observation {
    kvc_ctx *ctx;
    kvc_observed_shape shape;
    struct kvc_observed_counts *counts; /* [n_layers] */
    double *sums;                       /* [n_layers][KVC_N_SUMS][n_kv_heads][head_dim] */
};

/* KV heads times channels. */
static inline size_t kvc_observed_width(const kvc_observation *o)
{
    return (size_t)o->shape.n_kv_heads * (size_t)o->shape.head_dim;
}

static inline double *kvc_observed_sums(const kvc_observation *o, int32_t layer, enum kvc_sum sum)
{
    return o->sums + ((size_t)layer * KVC_N_SUMS + (size_t)sum) * kvc_observed_width(o);
}

/* Rows of queries that one sum of q^2 adds up. */
static inline double kvc_observed_queries(const kvc_observation *o, int32_t layer)
{
    const int32_t group = o->shape.n_heads / o->shape.n_kv_heads;
    return (double)o->counts[layer].n_queries * (double)group;
}

#endif
