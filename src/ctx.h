/* ctx.h - what a context is, and the checks of arguments that all modules share. */
#ifndef KVC_CTX_H
#define KVC_CTX_H

#include <stdbool.h>

#include "kernels/kernels.h"

struct kvc_ctx {
    const struct kvc_kernels *k;
    struct kvc_queue queue;
    kvc_allocator mem;
    kvc_parallel_for_fn *parallel_for;
    void *parallel_user;
};

/* Runs the tasks through the engine's parallel_for, or here. */
static inline void kvc_ctx_parallel(const kvc_ctx *ctx, size_t n_tasks,
                                    void (*task)(void *arg, size_t i), void *arg)
{
    if (ctx->parallel_for && n_tasks > 1) {
        ctx->parallel_for(ctx->parallel_user, n_tasks, task, arg);
        return;
    }
    for (size_t i = 0; i < n_tasks; i++)
        task(arg, i);
}

static inline size_t kvc_dtype_size(kvc_dtype dtype)
{
    return dtype == KVC_DTYPE_F32 ? 4 : 2;
}

/* A view whose fields make sense and whose last byte is inside the address space. */
static inline bool kvc_view_ok(const kvc_view *view)
{
    if (!view || view->struct_size < sizeof(*view) || (unsigned)view->dtype > KVC_DTYPE_BF16 ||
        view->n_heads == 0 || view->head_dim == 0 || view->head_stride < view->head_dim)
        return false;
    if (view->n_tokens == 0)
        return true;
    const size_t size = kvc_dtype_size(view->dtype);
    size_t heads, tokens, last;
    if (!view->data || (uintptr_t)view->data % size != 0)
        return false;
    if (__builtin_mul_overflow(view->n_heads - 1, view->head_stride, &heads) ||
        __builtin_mul_overflow(view->n_tokens - 1, view->token_stride, &tokens) ||
        __builtin_add_overflow(heads, tokens, &last) ||
        __builtin_add_overflow(last, view->head_dim, &last))
        return false;
    return last <= PTRDIFF_MAX / size;
}

/* An output view must not let two elements overlap: heads inside a token, or tokens inside a head.
 */
static inline bool kvc_view_distinct(const kvc_view *view)
{
    if (view->n_tokens <= 1 ||
        view->token_stride >= (view->n_heads - 1) * view->head_stride + view->head_dim)
        return true;
    return view->token_stride >= view->head_dim &&
           (view->n_heads == 1 ||
            view->head_stride >= (view->n_tokens - 1) * view->token_stride + view->head_dim);
}

/* The first element of a head of a token. */
static inline void *kvc_view_at(const kvc_view *view, size_t token, size_t head)
{
    const size_t at = token * view->token_stride + head * view->head_stride;
    return (char *)view->data + at * kvc_dtype_size(view->dtype);
}

/* The rows of tokens t ... t + n - 1 of one head of a view. */
static inline struct kvc_rows kvc_view_rows(const kvc_view *view, size_t t, size_t n, size_t head)
{
    return (struct kvc_rows){.data = kvc_view_at(view, t, head),
                             .dtype = view->dtype,
                             .stride = view->token_stride,
                             .n_rows = n,
                             .n_cols = view->head_dim};
}

#endif
