/* Views that every call on a tensor of [4][2][8] refuses. */
#ifndef KVC_TESTS_QUANT_MISTAKES_H
#define KVC_TESTS_QUANT_MISTAKES_H

#include "kvc/base.h"

/* Make the which-th mistake. Returns what is wrong, NULL past the end. */
static inline const char *spoil_view(kvc_view *v, size_t which)
{
    switch (which) {
    case 0: v->struct_size = 0; return "view of struct_size 0";
    case 1: v->data = NULL; return "data NULL";
    case 2: v->dtype = (kvc_dtype)3; return "dtype 3";
    case 3: v->head_dim = 0; return "head_dim 0";
    case 4: v->n_heads = 0; return "n_heads 0";
    case 5: v->head_stride -= 1; return "head_stride below head_dim";
    case 6: v->head_stride = 0; return "head_stride 0";
    case 7: v->n_tokens += 1; return "one token more than codes";
    case 8: v->n_tokens -= 1; return "one token less than codes";
    case 9: v->head_dim -= 1; return "another head_dim than the codes";
    /* fault I3: absurd counts; products and offsets that wrap */
    case 10: v->n_heads = (size_t)1 << 31; return "2^31 heads";
    case 11: v->n_heads = SIZE_MAX; return "SIZE_MAX heads";
    case 12: v->n_tokens = SIZE_MAX; return "SIZE_MAX tokens";
    case 13: v->n_tokens = SIZE_MAX / 16 + 5; return "tokens * heads * head_dim wraps";
    case 14: v->token_stride = SIZE_MAX; return "token_stride SIZE_MAX";
    case 15: v->token_stride = SIZE_MAX / 2; return "token_stride SIZE_MAX / 2";
    case 16: v->head_stride = SIZE_MAX; return "head_stride SIZE_MAX";
    default: return NULL;
    }
}

#endif
