/* balance.h - scales of keys that a rotation follows: larger where errors of queries weigh less. */
#ifndef KVC_BALANCE_H
#define KVC_BALANCE_H

#include <math.h>
#include <stddef.h>

/* ln of the smallest and largest scale is +- this: 2^-100 ... 2^100, normal as are their inverses.
 */
#define KVC_MAX_LOG_SCALE 69.314718055994531

static inline double kvc_largest(const double *x, size_t n)
{
    double most = 0.0;
    for (size_t i = 0; i < n; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

/* ln x, where x counts as at least a share of the largest value, which is > 0. */
static inline double kvc_log_floored(double x, double most, double share)
{
    return log(fmax(x, most * share));
}

static inline float kvc_scale_of_log(double x)
{
    return (float)exp(fmin(fmax(x, -KVC_MAX_LOG_SCALE), KVC_MAX_LOG_SCALE));
}

/*
 * s_c = (k_square[c] / q_square[c])^(1/4) of one head, divided by its geometric mean: with H after
 * it, the smallest error of scores (docs/smooth.md). Squares are means over rows, finite and not
 * negative; q_square NULL: ones. A square counts as at least 1e-12 times the largest of the head;
 * keys of nothing but zeros give ones, queries of nothing but zeros count as NULL.
 */
void kvc_balance(const double *k_square, const double *q_square, size_t n, float *scale);

#endif
