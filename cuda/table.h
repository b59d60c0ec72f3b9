/*
 * table.h - what kernels of a cache find in device memory, and what their launchers are given.
 *
 * The host decides, and keeps the tables of a cache (src/cache); a copy of what kernels read lies
 * in device memory, so that a captured launch sees the tokens and pages of the moment it runs. For
 * each sequence and pair (layer, KV head) there is a row of entries: the strip of sinks first, if
 * there are sinks, then the slots.
 */
#ifndef KVC_CUDA_TABLE_H
#define KVC_CUDA_TABLE_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A page of one sequence, layer and KV head; n_rows 0: none. */
struct kvc_device_entry {
    uint64_t page;            /* offset in the memory of the cache, in bytes */
    uint64_t live;            /* bit r: row r is there */
    int32_t first;            /* ordinal of row 0 where rows are consecutive */
    uint8_t n_rows, layout;   /* layout: index of the layouts of the cache */
    uint8_t reserved[2];      /* 0 */
    float absmax_k, absmax_v; /* mode HEAD: of the page when it was sealed */
};

/* One sequence. */
struct kvc_device_seq {
    int32_t n_tokens;   /* announced */
    int32_t n_slots;    /* entries of a row, the strip included */
    int32_t score_base; /* ordinal whose masses count by 1 */
    int32_t reserved;   /* 0 */
};

/* A cache in device memory. Pairs are numbered layer * n_kv_heads + head. */
struct kvc_device_cache {
    uint8_t *memory; /* pages and strips */
    const struct kvc_page_layout *layouts;
    struct kvc_device_entry *entries; /* [max_sequences][n_pairs][row_entries] */
    struct kvc_device_seq *seqs;      /* [max_sequences] */
    int32_t n_pairs, n_kv_heads, group, row_entries;
};

/* How rows are turned before they are stored, and queries and outputs with them
 * (cache/transform.c); all off: they are not. Vectors are [n_pairs][kvc_attend_stride(d_k)], or
 * NULL. */
struct kvc_device_transform {
    const float *mean, *inverse, *scale, *shift;
    uint32_t block_in;         /* channels that H of K mixes before the vectors; 1: none */
    uint32_t block_k, block_v; /* of K after them, and of V */
    bool changes_k, changes_v;
};

/* Pages of a block: attention gives each block a partial result, and adds them in ascending order,
 * so that no bit depends on how blocks are spread over the device. */
#define KVC_DEVICE_BLOCK_PAGES 8

/* Layouts that share formats and modes: pages as sealed, with ordinals, and with groups; or
 * unsealed pages and strips, whose V is row-major. A kernel attends the pages of one family. */
struct kvc_device_family {
    struct kvc_page_layout layout[3];
    uint8_t index[3]; /* of the layouts of the cache */
    uint8_t n;
};

/* Query rows of one sequence and where their output goes; strides in elements. */
struct kvc_device_item {
    int32_t seq;
    kvc_dtype q_dtype, out_dtype;
    const void *q; /* [n_q][n_heads][d_k] */
    void *out;     /* [n_q][n_heads][d_v] */
    float *lse;    /* [n_q][n_heads], or NULL */
    size_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
};

/* What several launches of one call share. */
#define KVC_DEVICE_ITEMS 24

struct kvc_device_call {
    struct kvc_device_cache cache;
    struct kvc_device_item items[KVC_DEVICE_ITEMS];
    int32_t n_items, layer, n_q;
    uint32_t d_k, d_v;
    float scale, softcap;
    int64_t window; /* 0: all */
    /* Query rows as floats, transformed: [n_items][n_q][n_heads][kvc_attend_stride(d_k)], and what
     * is added to their logits, or NULL. */
    const float *q_rows;
    const float *shift; /* [n_items][n_q][n_heads] */
    /* Partial results: of block b, family f, row r (token * n_heads + head) of item i a reference
     * m, the sum of weights 2^(s log2(e) - m), and that of weights times V. */
    float *parts; /* [n_items][n_blocks][n_families][n_q * n_heads][2 + kvc_attend_stride(d_v)] */
    int32_t n_blocks, n_families;
    float *lse; /* [n_items][n_q][n_heads], natural logarithm; or NULL */
};

#ifdef __cplusplus
}
#endif
#endif
