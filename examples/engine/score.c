/* How well logits predict a text: with p = softmax(a) and q = softmax(b), KL(p || q) = sum p (a -
 * b) - ln Za + ln Zb. */
#include "score.h"

#include <math.h>

#include "sample.h"

void score_position(const float *const *rows, size_t n_rows, size_t n_vocab, int32_t target,
                    struct position_score *out)
{
    int32_t best[SCORE_MAX_ROWS];
    double top[SCORE_MAX_ROWS] = {0.0}; /* the largest logit, so that exp() cannot overflow */
    double sum[SCORE_MAX_ROWS] = {0.0}; /* of exp(b - top) */
    double gap[SCORE_MAX_ROWS] = {0.0}; /* of exp(a - top of a) * (a - b) */

    for (size_t r = 0; r < n_rows; r++) {
        best[r] = sample_greedy(rows[r], n_vocab);
        top[r] = (double)rows[r][best[r]];
    }
    for (size_t i = 0; i < n_vocab; i++) {
        const double a = (double)rows[0][i];
        const double p = exp(a - top[0]);
        sum[0] += p;
        for (size_t r = 1; r < n_rows; r++) {
            const double b = (double)rows[r][i];
            sum[r] += exp(b - top[r]);
            gap[r] += p * (a - b);
        }
    }
    const double base = top[0] + log(sum[0]);
    for (size_t r = 0; r < n_rows; r++) {
        const double log_sum = top[r] + log(sum[r]);
        out[r].nll = log_sum - (double)rows[r][target];
        out[r].kl = gap[r] / sum[0] - base + log_sum;
        out[r].agrees = best[r] == best[0];
    }
}

void score_add(struct score *score, const struct position_score *position)
{
    score->nll += position->nll;
    score->kl += position->kl;
    score->n++;
    score->n_agree += position->agrees;
}

void score_join(struct score *score, const struct score *other)
{
    score->nll += other->nll;
    score->kl += other->kl;
    score->n += other->n;
    score->n_agree += other->n_agree;
}

double score_perplexity(const struct score *score)
{
    return exp(score->nll / (double)score->n);
}
