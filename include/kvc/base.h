/** @file kvc/base.h
 * Status codes, tensor views, the context; included by every other header.
 *
 * Structs that cross the API begin with struct_size, so that later versions can append fields. A
 * struct of a newer header is accepted as long as the fields that this library does not know are 0,
 * else the answer is KVC_E_UNSUPPORTED; one that is smaller than in the first version is KVC_E_ARG.
 */
#ifndef KVC_BASE_H
#define KVC_BASE_H

#include <stddef.h>
#include <stdint.h>

#define KVC_VERSION_MAJOR 0 /**< changes when programs must change */
#define KVC_VERSION_MINOR 1 /**< changes when something was added */
#define KVC_VERSION_PATCH 0 /**< changes when something was mended */

#if defined(__GNUC__)
#define KVC_API __attribute__((visibility("default")))
#else
#define KVC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** Largest head size that any function accepts. */
#define KVC_MAX_HEAD_DIM 512

/** Result of every fallible call. Values never change; new ones are appended. */
typedef enum kvc_status {
    KVC_OK = 0,
    KVC_E_ARG = 1, /**< the caller's mistake: NULL, shape, stride, range; nothing was written */
    KVC_E_UNSUPPORTED = 2, /**< a valid request that this build, CPU or device cannot serve */
    KVC_E_NOMEM = 3,       /**< the caller's allocator returned NULL */
    KVC_E_WORKSPACE = 4,   /**< workspace missing, too small or misaligned */
    KVC_E_FULL = 5,        /**< the cache's budget or a table is exhausted; nothing changed */
    KVC_E_NONFINITE = 6,   /**< strict mode met NaN or Inf; nothing was written */
    KVC_E_FORMAT = 7,      /**< a file or saved cache is damaged, truncated or of another version */
    KVC_E_MISMATCH = 8,    /**< well-formed, but for another geometry or configuration */
    KVC_E_DEVICE = 9       /**< a CUDA call failed */
} kvc_status;

/**
 * Describe a status.
 *
 * @param status  Any value.
 * @return Static English text without a full stop; never NULL.
 *
 * Threads: any. Cost: constant.
 */
KVC_API const char *kvc_status_str(kvc_status status);

/**
 * The version of the library that is linked, which may differ from the header's.
 *
 * @return KVC_VERSION_MAJOR * 10000 + KVC_VERSION_MINOR * 100 + KVC_VERSION_PATCH of the build.
 */
KVC_API int kvc_version(void);

/** Element types of the caller's tensors. */
typedef enum kvc_dtype {
    KVC_DTYPE_F32 = 0, /**< IEEE 754 binary32 */
    KVC_DTYPE_F16 = 1, /**< IEEE 754 binary16 */
    KVC_DTYPE_BF16 = 2 /**< the upper half of a binary32 */
} kvc_dtype;

/** How numbers are stored. */
typedef enum kvc_format {
    KVC_F16 = 0,  /**< IEEE half precision */
    KVC_INT8 = 1, /**< 8-bit codes and parameters */
    KVC_INT4 = 2, /**< 4-bit codes and parameters */
    KVC_INT6 = 3  /**< 6-bit codes and parameters: K of a cache, TOKEN only */
} kvc_format;

/** What shares one scale. docs/formats.md has the bytes. */
typedef enum kvc_scale {
    KVC_SCALE_HEAD =
        0, /**< one float a block of tokens and head, from a window of tokens; symmetric */
    KVC_SCALE_TOKEN = 1,   /**< one half a token and head; INT8 symmetric, INT4 and INT6
                              signed-extreme. In a cache INT4 and INT6 have one for each 64
                              channels of a head of 128 and more: 4.25 and 6.25 bits */
    KVC_SCALE_CHANNEL = 2, /**< a half scale and a half minimum a block, head and channel */
    KVC_SCALE_LAYER = 3    /**< as HEAD, one float for all heads of a block; kvc_quantize() only */
} kvc_scale;

/** How an engine stores rows of K or V. Blocks are 32 elements, need no alignment beyond 2 bytes, and
 * are those of ggml: d is a half. docs/attend.md has the bytes. */
typedef enum kvc_row_format {
    KVC_ROWS_F16 = 0,  /**< halves */
    KVC_ROWS_Q8_0 = 1, /**< d, then 32 int8: 34 bytes; element i is d * code i */
    KVC_ROWS_Q4_0 = 2  /**< d, then 16 bytes: 18 bytes; element i is d * (low nibble of byte i - 8),
                          element 16 + i that of the high nibble */
} kvc_row_format;

/**
 * A tensor of the caller, [n_tokens][n_heads][head_dim]: element (t, h, d) lies at
 * data[t * token_stride + h * head_stride + d]. Strides count elements, not bytes; neither may make
 * two elements overlap in an output. Fill it with kvc_view_packed() or by hand.
 */
typedef struct kvc_view {
    size_t struct_size;  /**< sizeof(kvc_view) */
    void *data;          /**< aligned to its element type; read only where the view is an input */
    kvc_dtype dtype;     /**< of the elements */
    size_t n_tokens;     /**< rows; 0 is allowed */
    size_t n_heads;      /**< heads of a token, >= 1 */
    size_t head_dim;     /**< elements of a head, >= 1 */
    size_t token_stride; /**< elements from one token to the next */
    size_t head_stride;  /**< elements from one head to the next; >= head_dim */
} kvc_view;

/**
 * A view of a packed tensor [n_tokens][n_heads][head_dim].
 *
 * @param data      First element; inputs may point to constant memory (cast the qualifier away).
 * @param dtype     Element type.
 * @param n_tokens  Tokens (rows).
 * @param n_heads   Heads of each token.
 * @param head_dim  Elements of each head.
 * @return The view; nothing is checked here.
 */
static inline kvc_view kvc_view_packed(void *data, kvc_dtype dtype, size_t n_tokens, size_t n_heads,
                                       size_t head_dim)
{
    kvc_view view;
    view.struct_size = sizeof(kvc_view);
    view.data = data;
    view.dtype = dtype;
    view.n_tokens = n_tokens;
    view.n_heads = n_heads;
    view.head_dim = head_dim;
    view.token_stride = n_heads * head_dim;
    view.head_stride = head_dim;
    return view;
}

/** Memory source. Both functions or neither; called only inside *_create and *_destroy. */
typedef struct kvc_allocator {
    /** @p size bytes aligned to @p align (a power of two), or NULL. */
    void *(*alloc)(void *user, size_t size, size_t align);
    /** Releases what alloc gave; never called with NULL. */
    void (*free)(void *user, void *ptr);
    void *user; /**< passed through */
} kvc_allocator;

/**
 * Runs task(arg, 0) ... task(arg, n_tasks - 1), in any order and on any threads, and returns when
 * all have returned. Tasks do not wait for each other. kvc::pool has one.
 */
typedef void kvc_parallel_for_fn(void *user, size_t n_tasks, void (*task)(void *arg, size_t i),
                                 void *arg);

/** How a context works. Zero it, set struct_size, then what differs from the default. */
typedef struct kvc_ctx_params {
    size_t struct_size;                /**< sizeof(kvc_ctx_params) of the caller's header */
    kvc_allocator allocator;           /**< zeros: malloc and free */
    kvc_parallel_for_fn *parallel_for; /**< NULL: everything runs in the calling thread */
    void *parallel_user;               /**< passed to parallel_for */
    const char
        *kernels; /**< NULL: the best table of this CPU; or "ref", "avx2", "avx512", "vnni" */
} kvc_ctx_params;

/** A kernel table, an allocator and a way to use threads. Opaque. */
typedef struct kvc_ctx kvc_ctx;

/**
 * Create a context.
 *
 * @param params    NULL: all defaults.
 * @param[out] out  The context; NULL after any failure. Destroy it after every cache made from it.
 *
 * @retval KVC_OK             Done.
 * @retval KVC_E_ARG          @p out is NULL, struct_size is too small, the allocator has only one
 *                            of its two functions, or kernels is no known name.
 * @retval KVC_E_UNSUPPORTED  The table named is known but this CPU or build cannot run it.
 * @retval KVC_E_NOMEM        The allocator returned NULL.
 *
 * Memory: one allocation of less than 256 bytes. Threads: any; a context and all that is made from
 * it is used by one thread at a time, different contexts run in parallel. No process-wide state is
 * read but the CPU's features, and none is changed.
 */
KVC_API kvc_status kvc_ctx_create(const kvc_ctx_params *params, kvc_ctx **out);

/** Destroy a context. @param ctx  May be NULL. No cache made from it may be left. */
KVC_API void kvc_ctx_destroy(kvc_ctx *ctx);

/**
 * The kernel table in use.
 *
 * @param ctx  A context; NULL gives "".
 * @return "ref", "avx2", "avx512" or "vnni"; static text.
 */
KVC_API const char *kvc_ctx_kernels(const kvc_ctx *ctx);

#ifdef __cplusplus
}
#endif
#endif
