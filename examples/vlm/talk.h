/* A dialogue on one cache: images, questions, answers, and the bytes in use on the way. */
#ifndef VLM_TALK_H
#define VLM_TALK_H

#include "question.h"
#include "vlm.h"

struct talk_params {
    kvc_precision precision; /* of what is sealed without a policy */
    int32_t recent_tokens, sink_tokens;
    int32_t max_tokens; /* of the dialogue */
    bool hold;          /* nothing is sealed before talk_compress() */
    bool merges;        /* policies may merge */
    size_t spare_bytes; /* beyond the smallest budget; 0: more than is needed */
};

/* Every token fits, F16, nothing is held. */
void talk_params_default(struct talk_params *out);

struct talk {
    struct reader *reader; /* may serve other talks in between */
    kvc_cache *cache;
    kvc_seq seq;
    bool hold;
    bool counts_rows; /* text takes the positions that the rows left would have: wrong after pruning
                       */
    int32_t n_images;
    size_t peak_bytes; /* most bytes in use after any of the calls below */
    double pressure;   /* bytes in use over those usable, before the last compression */
    bool is_full;      /* a compression failed for want of room */
};

/* The sequence begins with WORD_BOS. */
bool talk_open(struct reader *reader, const struct talk_params *params, struct talk *out,
               struct failure *failure);
void talk_close(struct talk *talk);

size_t talk_used_bytes(const struct talk *talk);

/* Whole pages of all layers and heads. */
size_t talk_page_bytes(const struct talk *talk);

/* Rows of the tokens @p first ... @p last - 1, mean over layers and heads. */
bool talk_count_rows(const struct talk *talk, int64_t first, int64_t last, double *out,
                     struct failure *failure);

/* Whether so many tokens would fit now. */
bool talk_has_room(struct talk *talk, size_t n);

/* The image that reader->rows holds. */
bool talk_see(struct talk *talk, int grid, struct failure *failure);

/* 1 to 64 words; reader->logits is what follows. */
bool talk_read(struct talk *talk, const int32_t *words, size_t n, struct failure *failure);

/* Applies a policy (NULL: seals) and holds what follows, if the talk holds. report as
 * kvc_cache_compress(); map may be NULL. */
bool talk_compress(struct talk *talk, const kvc_policy *policy, kvc_report *report, kvc_map *map,
                   struct failure *failure);

/* The policy looks through the eyes of a question: reads it, compresses with it as the newest
 * tokens, and takes it back. */
bool talk_compress_for(struct talk *talk, const struct question *question, const kvc_policy *policy,
                       kvc_report *report, struct failure *failure);

/* Takes back what was read from token @p n_tokens on. */
bool talk_take_back(struct talk *talk, int64_t n_tokens, struct failure *failure);

/* Reads the question, then its likeliest answer, which is ended with WORD_STOP. */
bool talk_ask(struct talk *talk, const struct question *question, bool *right,
              struct failure *failure);

/* The likeliest answer to what was read. */
bool talk_answer(struct talk *talk, const struct question *question, bool *right,
                 struct failure *failure);

/* Reads the question and its right answer; right: at each word of it that was the likeliest.
 * logits: [n_vocab] of the first word, or NULL. */
bool talk_teach(struct talk *talk, const struct question *question, bool *right, float *logits,
                struct failure *failure);

/* Time of steps over fixed words behind the end of a talk, which stays as it is. Repeated turn by
 * turn over the talks, so that noise hits all alike; medians. Talks of one reader. */
struct talk_time {
    double attention_us, step_ms; /* of a step */
};
bool talks_measure_time(struct talk *talks, size_t n_talks, struct talk_time *out,
                        struct failure *failure);

/* KL of the softmax of @p logits from that of @p reference, nats. */
double logits_kl(const float *reference, const float *logits, size_t n);

#endif
