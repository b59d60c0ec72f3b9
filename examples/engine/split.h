/* Floats as pairs of halves: an F16 cache with heads of twice the size then keeps them almost
 * exact. */
#ifndef ENGINE_SPLIT_H
#define ENGINE_SPLIT_H

#include <kvc/base.h>

/*
 * With x = hi + lo and hi the 11 upper bits, a head of K or V becomes (hi, 2048 lo) and one of Q
 * (q, q / 2048), so that the products stay what they were. src is a view of [n][n_heads][d]; dst is
 * packed [n][n_heads][2 d].
 */
void split_keys(const kvc_view *src, float *dst);
void split_queries(const kvc_view *src, float *dst);

/* The other way for the output of attention: src is packed [n][n_heads][2 d], dst a view. */
void split_join(const float *src, const kvc_view *dst);

#endif
