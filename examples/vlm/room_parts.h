/* Parts of an examination room: its state, the scores of patches, and the bytes of a cache. */
#ifndef VLM_ROOM_PARTS_H
#define VLM_ROOM_PARTS_H

#include "exam_room.h"

enum { MAX_ROWS = N_PREFIX + MAX_CELLS + MAX_QUESTION + MAX_ANSWER };

struct exam_room {
    struct exam_room_params p;
    struct reader reader;
    kvc_scorer *scorer;
    kvc_cache *cache;
    kvc_cache_params cache_params;

    /* of the current item */
    struct exam_item *item;
    size_t number;
    int n_cells;
    kvc_seq base, asked; /* the picture; with the first question behind it */
    int32_t position;    /* behind the picture */
    struct outcome whole;

    kvc_token facts[MAX_ROWS];
    float scores[N_SCORES][N_PREFIX + MAX_CELLS]; /* by ordinal, of the sources of the caller */
    bool has_scores[N_SCORES];
    struct soft_weights soft; /* of scores[SCORE_SOFT] */
    kvc_layer_report *layers; /* [n_layers] */
    float *keys, *values;     /* [n_kv_heads][MAX_ROWS][head_dim] */
    float *picked;            /* [MAX_CELLS][n_embd] rows for a second prefill */
    float *logits;            /* of a batch */
    float *whole_logits;      /* [N_ASKED][n_vocab] of the first word of the answer */
    void *ws;                 /* of the scorer */
    size_t ws_size;
};

/* Fills room->scores[kind] for the current item, unless it is filled. */
bool room_score(struct exam_room *room, enum score_kind kind, struct failure *failure);

/* What the rows of the picture take in a sequence that holds nothing else behind the sinks. */
bool room_measure(struct exam_room *room, kvc_cache *cache, kvc_seq seq, struct outcome *out,
                  struct failure *failure);

/* Appends the rows of @p from as plain ones to a new sequence of @p cache. */
bool room_copy_rows(struct exam_room *room, kvc_seq from, kvc_cache *cache, kvc_seq *out,
                    struct failure *failure);

bool room_check(kvc_status status, const char *what, struct failure *failure);

#endif
