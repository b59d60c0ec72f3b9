/* Observations that say what a test wants. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "observed.h"

kvc_observation *observed_absmax(kvc_ctx *ctx, int32_t n_layers, int32_t n_heads,
                                 int32_t n_kv_heads, int32_t head_dim, const float *absmax)
{
    const kvc_observed_shape shape = {.struct_size = sizeof(shape),
                                      .n_layers = n_layers,
                                      .n_heads = n_heads,
                                      .n_kv_heads = n_kv_heads,
                                      .head_dim = head_dim};
    const size_t heads = (size_t)n_heads, kv_heads = (size_t)n_kv_heads, d = (size_t)head_dim;
    kvc_observation *observation;
    float ones[4096];

    assert_true(heads * d <= sizeof(ones) / sizeof(*ones));
    for (size_t i = 0; i < heads * d; i++)
        ones[i] = 1.0f;
    const kvc_view q = kvc_view_packed(ones, KVC_DTYPE_F32, 1, heads, d);
    const kvc_view k = kvc_view_packed((float *)absmax, KVC_DTYPE_F32, 1, kv_heads, d);
    assert_int_equal(kvc_observation_create(ctx, &shape, &observation), KVC_OK);
    for (int32_t layer = 0; layer < n_layers; layer++) {
        assert_int_equal(kvc_observe_keys(observation, layer, &k), KVC_OK);
        assert_int_equal(kvc_observe_queries(observation, layer, &q), KVC_OK);
    }
    return observation;
}

void observed_scales(const float *absmax, int32_t n_kv_heads, int32_t head_dim, bool neighbours,
                     bool shared, double factor, double *scales)
{
    for (int32_t h = 0; h < n_kv_heads; h++) {
        double least = INFINITY, most = -INFINITY;
        for (int32_t c = 0; c < head_dim; c++) {
            const int32_t partner = neighbours ? c ^ 1 : (c + head_dim / 2) % head_dim;
            double largest = 0.0;
            for (int32_t g = 0; g < n_kv_heads; g++)
                if (shared || g == h)
                    largest = fmax(largest, fmax((double)absmax[g * head_dim + c],
                                                 (double)absmax[g * head_dim + partner]));
            scales[h * head_dim + c] = factor * log(largest);
            least = fmin(least, scales[h * head_dim + c]);
            most = fmax(most, scales[h * head_dim + c]);
        }
        for (int32_t c = 0; c < head_dim; c++)
            scales[h * head_dim + c] = exp(scales[h * head_dim + c] - (least + most) / 2.0);
    }
}
