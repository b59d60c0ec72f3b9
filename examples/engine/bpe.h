/* Byte pair encoding of one piece of text. */
#ifndef ENGINE_BPE_H
#define ENGINE_BPE_H

#include "hash.h"

struct bpe_candidate {
    int32_t rank, result;
    size_t left, right;        /* positions */
    int32_t left_id, right_id; /* what stood there when it was found */
};

/* Scratch that grows with the longest piece; zero it first. */
struct bpe {
    struct bpe_candidate *heap;
    size_t n_heap;
    size_t *next, *prev;
    size_t capacity;
};

/*
 * Joins pairs of ids[0 ... n - 1] in place, lowest rank first and leftmost among equals, until none
 * can be joined. Returns how many ids are left, or SIZE_MAX without memory. Cost n log n.
 */
size_t bpe_merge(struct bpe *bpe, const struct merge_map *merges, int32_t *ids, size_t n);
void bpe_free(struct bpe *bpe);

#endif
