/* balance.c - the scale that weighs the errors of keys by the queries that meet them. */
#include "balance.h"

#include <math.h>

static const double smallest_share = 1e-12;
static const double max_log = 100.0 * 0.69314718055994531;

static double largest(const double *x, size_t n)
{
    double most = 0.0;
    for (size_t i = 0; x && i < n; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

static double log_at_least(double x, double most)
{
    return log(fmax(x, most * smallest_share));
}

/* ln s_c, before it is normalised. */
static double log_scale(double k, double k_most, double q, double q_most)
{
    return (log_at_least(k, k_most) - (q_most > 0.0 ? log_at_least(q, q_most) : 0.0)) / 4.0;
}

void kvc_balance(const double *k_square, const double *q_square, size_t n, float *scale)
{
    const double k_most = largest(k_square, n), q_most = largest(q_square, n);
    double mean = 0.0;

    for (size_t i = 0; i < n && k_most > 0.0; i++)
        mean += log_scale(k_square[i], k_most, q_square ? q_square[i] : 0.0, q_most) / (double)n;
    for (size_t i = 0; i < n; i++) {
        double s = 0.0;
        if (k_most > 0.0)
            s = log_scale(k_square[i], k_most, q_square ? q_square[i] : 0.0, q_most) - mean;
        scale[i] = (float)exp(fmin(fmax(s, -max_log), max_log));
    }
}
