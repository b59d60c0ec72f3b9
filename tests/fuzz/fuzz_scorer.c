/* libFuzzer: any bytes as a learned scorer, as they are and with the right size and checksum; what
 * the reader accepts must score. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvc/score.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { HEADER = 64 };

static void put32(uint8_t *at, uint32_t x)
{
    for (size_t i = 0; i < 4; i++)
        at[i] = (uint8_t)(x >> 8 * i);
}

static void seal(uint8_t *file, size_t size)
{
    uint32_t crc = UINT32_MAX;

    for (size_t i = HEADER; i < size; i++) {
        crc ^= file[i];
        for (int b = 0; b < 8; b++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0u);
    }
    put32(file + 20, (uint32_t)(size - HEADER));
    put32(file + 56, ~crc);
}

static void apply(kvc_ctx *ctx, const kvc_scorer *scorer)
{
    const kvc_grid grid = {sizeof(grid), 2, 3, 5};
    kvc_scorer_desc desc = {.struct_size = sizeof(desc)};
    float scores[30];
    size_t size;

    if (kvc_scorer_info(scorer, &desc) != KVC_OK ||
        kvc_scorer_apply_workspace_size(scorer, &grid, &size) != KVC_OK)
        abort();
    const size_t n_in = (size_t)desc.n_in;
    float *x = malloc(30 * n_in * sizeof(*x));
    void *ws = aligned_alloc(64, (size + 63) / 64 * 64);
    if (!x || !ws)
        abort();
    for (size_t i = 0; i < 30 * n_in; i++)
        x[i] = (float)(i % 7) - 3.0f;
    const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, 30, 1, n_in);
    const kvc_status status = kvc_scorer_apply(ctx, scorer, &view, &grid, scores, ws, size);
    if (status != KVC_OK && status != KVC_E_NONFINITE)
        abort();
    free(ws);
    free(x);
}

static void read_file(kvc_ctx *ctx, const uint8_t *file, size_t size)
{
    kvc_scorer *scorer;
    const kvc_status status = kvc_scorer_create(ctx, file, size, &scorer);

    if (status == KVC_OK)
        apply(ctx, scorer);
    else if (status != KVC_E_FORMAT || scorer)
        abort();
    kvc_scorer_destroy(scorer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *file = malloc(size > 0 ? size : 1);
    kvc_ctx *ctx;

    if (!file || kvc_ctx_create(NULL, &ctx) != KVC_OK)
        abort();
    if (size > 0)
        memcpy(file, data, size);
    read_file(ctx, file, size);
    if (size >= HEADER) {
        seal(file, size);
        read_file(ctx, file, size);
    }
    kvc_ctx_destroy(ctx);
    free(file);
    return 0;
}
