/* balance.c - scales of keys that a rotation follows: larger where errors of queries weigh less. */
#include "balance.h"

static const double smallest_share = 1e-12;

/* The squares of a head and the largest of them; none of queries: 0. */
struct squares {
    const double *k, *q;
    double k_most, q_most;
};

static double log_scale(const struct squares *s, size_t i)
{
    const double k = kvc_log_floored(s->k[i], s->k_most, smallest_share);
    const double q =
        s->q && s->q_most > 0.0 ? kvc_log_floored(s->q[i], s->q_most, smallest_share) : 0.0;
    return (k - q) / 4.0;
}

void kvc_balance(const double *k_square, const double *q_square, size_t n, float *scale)
{
    const struct squares s = {
        .k = k_square,
        .q = q_square,
        .k_most = kvc_largest(k_square, n),
        .q_most = q_square ? kvc_largest(q_square, n) : 0.0,
    };
    double mean = 0.0;

    for (size_t i = 0; i < n && s.k_most > 0.0; i++)
        mean += log_scale(&s, i) / (double)n;
    for (size_t i = 0; i < n; i++)
        scale[i] = s.k_most > 0.0 ? kvc_scale_of_log(log_scale(&s, i) - mean) : 1.0f;
}
