/* Quantize and dequantize with every kernel table, and require the same bytes of all. */
#ifndef KVC_TESTS_CODED_H
#define KVC_TESTS_CODED_H

#include <string.h>

#include "guard.h"
#include "kvc/quant.h"
#include "tables.h"

/* What kvc_quantize() wrote. */
struct coded {
    size_t codes_bytes;
    size_t params_bytes;
    unsigned char *codes;
    void *params;
    kvc_quant_counts counts;
};

static inline kvc_quant_options quant_options(kvc_format format, kvc_scale scale, size_t block,
                                              size_t window)
{
    kvc_quant_options options;

    kvc_quant_options_default(&options);
    options.format = format;
    options.scale = scale;
    options.block_tokens = block;
    options.window_tokens = window;
    return options;
}

enum { QUANT_MODES = 8 };

/* Every pair of format and scale: mode 0 .. QUANT_MODES - 1. */
static inline kvc_quant_options quant_mode(int mode, size_t block, size_t window)
{
    return quant_options(mode % 2 == 0 ? KVC_INT8 : KVC_INT4, (kvc_scale)(mode / 2), block, window);
}

static inline void *coded_copy(const void *src, size_t size)
{
    void *copy = malloc(size + 1);

    assert_non_null(copy);
    memcpy(copy, src, size);
    return copy;
}

/*
 * Codes go to an odd address and parameters to one that is aligned to 4 only. Each table finds
 * other old bytes, so a byte that is not written shows up as a difference.
 */
static inline struct coded code_all(const struct tables *t, const kvc_view *src,
                                    const kvc_quant_options *options)
{
    struct coded out = {.codes = NULL};

    assert_int_equal(kvc_quant_size(src->n_tokens, src->n_heads, src->head_dim, options,
                                    &out.codes_bytes, &out.params_bytes),
                     KVC_OK);
    for (size_t i = 0; i < t->n; i++) {
        const unsigned char fill = (unsigned char)(0xA5 + i);
        struct guard codes = guard_new(out.codes_bytes, 1, fill);
        struct guard params = guard_new(out.params_bytes, 4, fill);
        kvc_quant_counts counts = {
            .struct_size = sizeof(counts), .n_nonfinite = 9, .n_saturated = 9};

        assert_int_equal(kvc_quantize(t->ctx[i], src, options, codes.data, codes.size, params.data,
                                      params.size, &counts),
                         KVC_OK);
        assert_true(guard_intact(&codes));
        assert_true(guard_intact(&params));
        if (i == 0) {
            out.codes = coded_copy(codes.data, codes.size);
            out.params = coded_copy(params.data, params.size);
            out.counts = counts;
        }
        assert_memory_equal(codes.data, out.codes, out.codes_bytes);
        assert_memory_equal(params.data, out.params, out.params_bytes);
        assert_memory_equal(&counts, &out.counts, sizeof(counts));
        guard_free(&codes);
        guard_free(&params);
    }
    return out;
}

/* Quantize a packed tensor of floats. */
static inline struct coded code_floats(const struct tables *t, float *x, size_t n_tokens,
                                       size_t n_heads, size_t head_dim, const kvc_quant_options *o)
{
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, n_tokens, n_heads, head_dim);

    return code_all(t, &src, o);
}

static inline void assert_same_coded(const struct coded *a, const struct coded *b)
{
    assert_memory_equal(a->codes, b->codes, a->codes_bytes);
    assert_memory_equal(a->params, b->params, a->params_bytes);
}

static inline void coded_free(struct coded *c)
{
    free(c->codes);
    free(c->params);
}

static inline uint32_t float_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline bool same_floats(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const bool both_nan = a[i] != a[i] && b[i] != b[i];

        if (float_bits(a[i]) != float_bits(b[i]) && !both_nan) {
            return false;
        }
    }
    return true;
}

/* A packed tensor of [n_tokens][n_heads][head_dim] numbers; the caller frees it. */
static inline float *decode_all(const struct tables *t, const struct coded *c,
                                const kvc_quant_options *options, size_t n_tokens, size_t n_heads,
                                size_t head_dim)
{
    const size_t n = n_tokens * n_heads * head_dim;
    float *first = malloc((n + 1) * sizeof(float));

    assert_non_null(first);
    for (size_t i = 0; i < t->n; i++) {
        struct guard x = guard_new(n * sizeof(float), 4, (unsigned char)(0xA5 + i));
        const kvc_view dst = kvc_view_packed(x.data, KVC_DTYPE_F32, n_tokens, n_heads, head_dim);

        assert_int_equal(kvc_dequantize(t->ctx[i], c->codes, c->codes_bytes, c->params,
                                        c->params_bytes, options, &dst),
                         KVC_OK);
        assert_true(guard_intact(&x));
        if (i == 0) {
            memcpy(first, x.data, n * sizeof(float));
        }
        assert_true(same_floats((const float *)(const void *)x.data, first, n));
        guard_free(&x);
    }
    return first;
}

/* The code of element d in a row of head_dim codes. */
static inline int code_at(const unsigned char *row, kvc_format format, size_t d)
{
    int nibble;

    if (format == KVC_INT8) {
        return row[d] < 128 ? row[d] : row[d] - 256;
    }
    nibble = row[d / 2] >> (d % 2 * 4) & 15;
    return nibble < 8 ? nibble : nibble - 16;
}

static inline size_t row_bytes(kvc_format format, size_t head_dim)
{
    return format == KVC_INT8 ? head_dim : (head_dim + 1) / 2;
}

#endif
