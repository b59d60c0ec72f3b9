/* Hand-computed vectors: a few numbers, their codes and parameters. */
#ifndef KVC_TESTS_VECTOR_H
#define KVC_TESTS_VECTOR_H

#include "coded.h"

enum { VECTOR_MAX = 12 };

struct vector {
    const char *what;
    struct {
        kvc_format format;
        kvc_scale scale;
        size_t block, window;
    } how;
    size_t shape[3]; /* tokens, heads, head_dim */
    float x[VECTOR_MAX];
    unsigned char codes[VECTOR_MAX];
    uint16_t halves[VECTOR_MAX]; /* TOKEN and CHANNEL */
    float floats[VECTOR_MAX];    /* HEAD and LAYER */
    uint64_t n_nonfinite, n_saturated;
};

static inline void check_vector(const struct tables *t, const struct vector *v)
{
    const kvc_scale scale = v->how.scale;
    const kvc_quant_options o = quant_options(v->how.format, scale, v->how.block, v->how.window);
    const bool halves = scale == KVC_SCALE_TOKEN || scale == KVC_SCALE_CHANNEL;
    const void *params = halves ? (const void *)v->halves : v->floats;
    float x[VECTOR_MAX];
    struct coded c;

    memcpy(x, v->x, sizeof(x));
    c = code_floats(t, x, v->shape[0], v->shape[1], v->shape[2], &o);
    if (memcmp(c.codes, v->codes, c.codes_bytes) != 0 ||
        memcmp(c.params, params, c.params_bytes) != 0) {
        print_error("vector: %s\n", v->what);
    }
    assert_memory_equal(c.codes, v->codes, c.codes_bytes);
    assert_memory_equal(c.params, params, c.params_bytes);
    assert_int_equal(c.counts.n_nonfinite, v->n_nonfinite);
    assert_int_equal(c.counts.n_saturated, v->n_saturated);
    coded_free(&c);
}

static inline void check_vectors(const struct tables *t, const struct vector *vectors, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        check_vector(t, &vectors[i]);
    }
}

#endif
