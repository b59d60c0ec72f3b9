/* An examination room: a reader with a cache in which one picture is compressed in many ways and
 * questions about it are answered. One thread at a time. */
#ifndef VLM_EXAM_ROOM_H
#define VLM_EXAM_ROOM_H

#include "exam.h"
#include "setting.h"
#include "vlm.h"

struct exam_room_params {
    const struct vlm *vlm;
    const char *kernels; /* NULL: the best table of this CPU */
    const struct exam *exam;
    const void *scorer; /* a file KVCS for SCORE_LEARNED, or NULL: no setting asks for it */
    size_t n_scorer;    /* its bytes */
};

enum { N_ASKED = 2 }; /* the first and the second question of an item */

/* What became of an item under a setting. */
struct outcome {
    bool right[N_ASKED];
    double kl[N_ASKED]; /* of the first word of the answer to that on the whole cache */
    double rows;        /* of the picture, mean over layers and heads */
    double cache_bytes; /* codes and parameters of these rows, all layers and heads */
    double page_bytes;  /* whole pages that hold them */
    double rel_err;     /* mean over layers; NaN if not measured */
};

struct exam_room;

bool exam_room_open(const struct exam_room_params *params, struct exam_room **out,
                    struct failure *failure);
void exam_room_close(struct exam_room *room);

/* Draws item @p i, reads the picture, and reads the first question behind it, by which settings
 * score the patches. */
bool exam_room_enter(struct exam_room *room, size_t i, struct failure *failure);
const struct exam_item *exam_room_item(const struct exam_room *room);

/* The same questions to the whole cache. */
void exam_room_reference(const struct exam_room *room, struct outcome *out);

/*
 * Tries settings on copies of the picture's cache. An answer is right if each of its words and the
 * stop is the likeliest after the right words before it, which is what a greedy answer comes to; so
 * question and answer of many settings pass through the model together.
 */
bool exam_room_try(struct exam_room *room, const struct setting *const *settings, size_t n,
                   struct outcome *out, struct failure *failure);

/* The greedy answer to the first question, word by word, for tests: it must agree with the above.
 */
bool exam_room_answer(struct exam_room *room, const struct setting *setting, int32_t *answer,
                      size_t max, size_t *n, struct failure *failure);

#endif
