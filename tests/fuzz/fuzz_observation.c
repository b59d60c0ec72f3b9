/* libFuzzer: any bytes as the file of an observation, as they are and with the right checksum; what
 * the reader accepts is saved as it was and makes finite scales. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvc/smooth.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { CHECKSUM = 4 };

static void require(int held)
{
    if (!held)
        abort();
}

static void seal(uint8_t *file, size_t size)
{
    uint32_t crc = UINT32_MAX;

    for (size_t i = 0; i < size - CHECKSUM; i++) {
        crc ^= file[i];
        for (int b = 0; b < 8; b++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0u);
    }
    for (size_t i = 0; i < CHECKSUM; i++)
        file[size - CHECKSUM + i] = (uint8_t)(~crc >> 8 * i);
}

static void require_scales(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        require(isnormal(x[i]) && x[i] > 0.0f);
}

static void make_scales(const kvc_observation *o, const kvc_observed_shape *shape)
{
    const size_t width = (size_t)shape->n_kv_heads * (size_t)shape->head_dim;
    const size_t n = width * (size_t)shape->n_layers;
    float *mean = malloc(n * sizeof(*mean)), *scale = malloc(n * sizeof(*scale));

    require(mean && scale);
    for (int32_t i = 0; i < 8 * shape->n_layers; i++) {
        kvc_smooth_options options;
        kvc_smooth_options_default(&options);
        options.rule = (kvc_smooth_rule)(i & 1);
        options.pairs = i & 2 && shape->head_dim % 2 == 0;
        options.norm = i & 4 ? KVC_SMOOTH_PLAIN : KVC_SMOOTH_MIDRANGE;
        if (kvc_smooth_scales(o, i / 8, &options, scale) == KVC_OK)
            require_scales(scale, width);
    }
    if (kvc_observation_calibrate(o, mean, scale) == KVC_OK) {
        require_scales(scale, n);
        for (size_t i = 0; i < n; i++)
            require(isfinite(mean[i]));
    }
    free(mean);
    free(scale);
}

static void read_file(kvc_ctx *ctx, const uint8_t *file, size_t size)
{
    kvc_observed_shape shape = {.struct_size = sizeof(shape)};
    kvc_observation *o, *twice;
    const kvc_status status = kvc_observation_load(ctx, file, size, &o);

    if (status != KVC_OK) {
        require((status == KVC_E_FORMAT || status == KVC_E_UNSUPPORTED) && !o);
        return;
    }
    require(size > 0);
    uint8_t *again = malloc(size);
    require(again && kvc_observation_size(o) == size);
    require(kvc_observation_save(o, again, size) == KVC_OK && memcmp(again, file, size) == 0);
    require(kvc_observation_shape(o, &shape) == KVC_OK);
    make_scales(o, &shape);
    require(kvc_observation_load(ctx, again, size, &twice) == KVC_OK);
    require(kvc_observation_merge(twice, o) == KVC_OK);
    make_scales(twice, &shape);
    kvc_observation_destroy(twice);
    kvc_observation_destroy(o);
    free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *file = malloc(size > 0 ? size : 1);
    kvc_ctx *ctx = NULL;

    require(file && kvc_ctx_create(NULL, &ctx) == KVC_OK);
    if (size > 0)
        memcpy(file, data, size);
    read_file(ctx, file, size);
    if (size >= CHECKSUM) {
        seal(file, size);
        read_file(ctx, file, size);
    }
    kvc_ctx_destroy(ctx);
    free(file);
    return 0;
}
