/* How well logits predict a text, and how far they are from those of a base. */
#ifndef ENGINE_SCORE_H
#define ENGINE_SCORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SCORE_MAX_ROWS = 24 };

/* Sums over positions; zero it first. */
struct score {
    double nll;          /* -ln of the probability of the next token */
    double kl;           /* KL(base || this) over the whole vocabulary, nats */
    uint64_t n, n_agree; /* positions; those with the base's most probable token */
};

/* One position of a score. */
struct position_score {
    double nll, kl;
    bool agrees;
};

/*
 * Scores one position: rows[0] is the base, rows[r] its logits in another run; target is the token
 * that follows. Computed in double.
 */
void score_position(const float *const *rows, size_t n_rows, size_t n_vocab, int32_t target,
                    struct position_score *out);

/* Adds the positions of another. */
void score_join(struct score *score, const struct score *other);

void score_add(struct score *score, const struct position_score *position);

double score_perplexity(const struct score *score);

#endif
