/* ctx.h - what a context is, and the checks of arguments that all modules share. */
#ifndef KVC_CTX_H
#define KVC_CTX_H

#include <stdbool.h>
#include <string.h>

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

/*
 * Structs of the caller begin with their size, so that fields can be appended. oldest is the size
 * in the first version: write it as a number when a field is appended.
 */
static inline size_t kvc_struct_size(const void *s)
{
    size_t size;
    memcpy(&size, s, sizeof(size));
    return size;
}

/* Lays a struct of the caller over the defaults in dst. Fields that are new to this library must be
 * 0. */
static inline kvc_status kvc_struct_read(void *dst, size_t dst_size, const void *src, size_t oldest)
{
    const size_t size = kvc_struct_size(src), most = 4096; /* more is no size */
    if (size < oldest || size > most)
        return KVC_E_ARG;
    for (size_t i = dst_size; i < size; i++)
        if (((const char *)src)[i] != 0)
            return KVC_E_UNSUPPORTED;
    memcpy(dst, src, size < dst_size ? size : dst_size);
    memcpy(dst, &dst_size, sizeof(dst_size));
    return KVC_OK;
}

/* Fills as much of a struct of the caller, whose size is set, as it has room for. */
static inline void kvc_struct_write(void *dst, const void *src, size_t src_size)
{
    const size_t size = kvc_struct_size(dst), first = sizeof(size);
    const size_t n = size < src_size ? size : src_size;
    memcpy((char *)dst + first, (const char *)src + first, n - first);
}

/* The defaults for a caller whose struct has that size. */
static inline void kvc_struct_init(void *dst, size_t size, const void *defaults,
                                   size_t defaults_size)
{
    if (!dst || size < sizeof(size))
        return;
    memset(dst, 0, size);
    memcpy(dst, &size, sizeof(size));
    kvc_struct_write(dst, defaults, defaults_size);
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
