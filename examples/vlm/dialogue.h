/* Experiments over dialogues: several images or many questions on one cache, the bytes that they
 * take, and what goes wrong in them. */
#ifndef VLM_DIALOGUE_H
#define VLM_DIALOGUE_H

#include "rows.h"
#include "vlm.h"

/*
 * "dialogue": four images with two questions each, under every setting of the experiments "first"
 * and "second", in rows of the setting's name; x is the question after an image, 1 (the one whose
 * words score the patches) or 2 (about another part). pool_bytes_per_token at the end and
 * peak_cache_bytes on the way: means of the dialogues; attention_us and step_ms: behind the first
 * one.
 *
 * "gate": twelve images in a cache that has, beside the room for the one that is looked at, the
 * bytes of GATE_SPARE_IMAGES of them as F16; x is the number of the image. "gate" and "f16":
 * accuracy of questions about the newest image, rows those left of it, peak_cache_bytes the bytes
 * in use. "gate before" and "f16 before": of questions about the newest picture of the other kind.
 * "pressure" and "rate": bytes in use over those usable at the compression, and the share of the
 * visual tokens that was to go, as accuracy. "f16" ends with the last image that there is room for;
 * "f16 ample" and "f16 ample before" have a larger cache: what the model itself can do.
 *
 * "turns": one image and 12 questions in turn, about as many as the model was trained on, or as
 * there are different ones: n falls; x is the turn. "f16", "int4 recent 0" and "int4 recent 256":
 * accuracy, and KL to f16 of the first word of the answer.
 *
 * "pitfalls": mistakes, each against what is right; x is the number of the pitfall in article 000,
 * section 6.2. The rows are described in dialogue_pitfalls.c.
 */
enum dialogue_experiment {
    DIALOGUE_POOL,
    DIALOGUE_GATE,
    DIALOGUE_TURNS,
    DIALOGUE_PITFALLS,
    N_DIALOGUES
};

enum { GATE_IMAGES = 12, GATE_SPARE_IMAGES = 5, N_TURNS = 12 };

/* "dialogue", "gate", ... */
const char *dialogue_name(enum dialogue_experiment experiment);

struct dialogue_options {
    unsigned experiments; /* bits 1 << dialogue_experiment */
    enum exam_set set;
    int grid; /* 24 or 16 */
    size_t
        n_dialogues;  /* of dialogue, gate and turns; pitfalls asks three times as many questions */
    size_t n_threads; /* 0: the processors that this process may run on; no result depends on it */
    const char *kernels; /* NULL: the best table of this CPU */
    bool quiet;          /* no progress on standard error */
};

/* 40 dialogues of EXAM_REPORT at 24 x 24, no experiment. */
void dialogue_options_default(struct dialogue_options *out);

/* Adds rows. Rows of "first" and "second" that are there get bytes and times of their setting. */
bool dialogue_run(const struct vlm *vlm, const struct dialogue_options *options,
                  struct row_table *out, struct failure *failure);

#endif
