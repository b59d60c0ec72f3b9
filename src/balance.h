/* balance.h - the scale that weighs the errors of keys by the queries that meet them. */
#ifndef KVC_BALANCE_H
#define KVC_BALANCE_H

#include <stddef.h>

/*
 * s_c = (k_square[c] / q_square[c])^(1/4) of one head, divided by its geometric mean: with H after
 * it, the smallest error of scores (docs/smooth.md). Squares are means over rows, finite and not
 * negative; q_square NULL: ones. A square counts as at least 1e-12 times the largest of the head;
 * keys of nothing but zeros give ones, queries of nothing but zeros count as NULL. Every scale lies
 * in 2^-100 ... 2^100.
 */
void kvc_balance(const double *k_square, const double *q_square, size_t n, float *scale);

#endif
