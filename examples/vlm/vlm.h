/* The small vision-language model: its weights, and a reader that runs it on caches of libkvc. */
#ifndef VLM_VLM_H
#define VLM_VLM_H

#include <kvc/kvc.h>

#include "failure.h"
#include "forward.h"
#include "model.h"
#include "picture.h"
#include "stem.h"

enum {
    N_PREFIX = 2,  /* BOS and IMAGE before the first picture: sinks of the caches */
    PROBE_ROWS = 4 /* newest words of a question: those that look at the picture */
};

/* Read-only once it is open: readers of several threads share it. */
struct vlm {
    struct model model; /* the decoder */
    struct stem stem;   /* patches to rows of the decoder */
};

bool vlm_open(const char *path, struct vlm *out, struct failure *failure);
void vlm_close(struct vlm *vlm);

/* Runs the model; one thread at a time. Fills caches of the model's shape made from its context. */
struct reader {
    const struct vlm *vlm;
    kvc_ctx *ctx;
    struct forward *forward;
    struct stem_room *room;
    float *rows;   /* [MAX_CELLS][n_embd], for encoded pictures */
    float *logits; /* [n_vocab] of the last token */
};

/* kernels: NULL is the best table of this CPU. */
bool reader_open(const struct vlm *vlm, const char *kernels, struct reader *out,
                 struct failure *failure);
void reader_close(struct reader *reader);

/* The facts of the patches of an image that begins at @p position: t = position,
 * y = position + row, x = position + column. Returns the position behind it. */
int32_t image_facts(int32_t position, int32_t image, int grid, kvc_token *facts);

/* Words; reader->logits becomes what follows the last one. The first words of a sequence are
 * WORD_BOS. */
bool reader_read(struct reader *reader, kvc_cache *cache, kvc_seq seq, const int32_t *words,
                 size_t n, struct failure *failure);

/* WORD_IMAGE, then the patches of a picture that is encoded in reader->rows. image: its number in
 * the sequence, from 0. */
bool reader_see(struct reader *reader, kvc_cache *cache, kvc_seq seq, int32_t image, int grid,
                struct failure *failure);

/* Rows with facts of the caller's, as a second prefill of some patches needs. */
bool reader_feed(struct reader *reader, kvc_cache *cache, kvc_seq seq, const float *rows,
                 const kvc_token *facts, size_t n, struct failure *failure);

/* Encodes [14 grid][14 grid][3] into reader->rows. */
void reader_encode(struct reader *reader, const uint8_t *rgb, int grid);

/* Goes on from reader->logits: the likeliest words up to WORD_STOP, which is fed but not counted,
 * or @p max words. */
bool reader_answer(struct reader *reader, kvc_cache *cache, kvc_seq seq, int32_t *answer,
                   size_t max, size_t *n, struct failure *failure);

#endif
