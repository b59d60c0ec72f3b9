/* Reads extracts: Q, K and V of a vision transformer. extract.py writes them and has the format. */
#ifndef VISION_KVX_H
#define VISION_KVX_H

#include <stddef.h>
#include <stdint.h>

#include "failure.h"

enum { KVX_NAME_SIZE = 24 };

/* An extract; the bytes stay the caller's. */
struct kvx {
    size_t n_blocks, n_heads, head_dim;
    size_t n_prefix; /* tokens before the patches */
    size_t grid_rows, grid_cols;
    size_t n_scoring, n_same, n_shifted; /* queries, stored in this order */
    size_t n_tokens, n_queries;          /* sums of the above */
    const unsigned char *blocks;
    size_t block_size;
};

/* A photo seen by a layer; the tensors are [rows][n_heads][head_dim]. */
struct kvx_block {
    char photo[KVX_NAME_SIZE]; /* letters, digits, '_', '-' and '.' */
    unsigned layer;
    float *q, *k, *v; /* the caller's room for n_queries, n_tokens and n_tokens rows */
};

/* Checks everything but the numbers of the tensors. */
bool kvx_open(const unsigned char *bytes, size_t size, struct kvx *kvx, struct failure *failure);

/* Decodes block i; refuses NaN and infinity. */
bool kvx_read(const struct kvx *kvx, size_t i, struct kvx_block *block, struct failure *failure);

#endif
