/* Attention over the cache of an engine: keys in Q8_0 and values in Q4_0, token after token, as
 * llama.cpp keeps them. The same numbers as halves give the same output. */
#include <kvc/kvc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 300, HEADS = 8, KV_HEADS = 2, DIM = 64, ROWS = TOKENS * KV_HEADS };
enum { K_ROW = DIM / 32 * 34, V_ROW = DIM / 32 * 18 };

static uint32_t noise(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 16;
}

/* Blocks of random codes with the scale 2^-6 for K and 2^-2 for V, and the same rows as halves:
 * small integers times a power of two, of which each is a half. */
static void fill(unsigned char *blocks, size_t block_bytes, uint16_t *halves)
{
    const uint16_t scale = block_bytes == 34 ? 0x2400 : 0x3400;
    uint32_t state = (uint32_t)block_bytes;
    for (size_t b = 0; b < ROWS * DIM / 32; b++, blocks += block_bytes, halves += 32) {
        memcpy(blocks, &scale, 2);
        for (int i = 0; i < 32; i++) {
            const int code = (int)(noise(&state) % 16) - 8;
            unsigned char *byte = blocks + 2 + (block_bytes == 34 ? i : i % 16);
            const int exponent = abs(code) >= 8 ? 3 : abs(code) >= 4 ? 2 : abs(code) >= 2;
            if (block_bytes == 34)
                *byte = (unsigned char)code;
            else
                *byte = (unsigned char)(i < 16 ? code + 8 : *byte | (code + 8) << 4);
            halves[i] = (uint16_t)((code < 0 ? 0x8000 : 0) | (scale + (exponent << 10)) |
                                   (abs(code) << (10 - exponent) & 0x3ff));
            if (code == 0)
                halves[i] = 0;
        }
    }
}

static kvc_status attend(kvc_ctx *ctx, const kvc_view *q, const kvc_row_view *k,
                         const kvc_row_view *v, float *out)
{
    const kvc_view to = kvc_view_packed(out, KVC_DTYPE_F32, 1, HEADS, DIM);
    size_t size = 0;
    kvc_status e = kvc_attend_rows_workspace_size(1, HEADS, k->n_tokens, KV_HEADS, DIM, DIM, &size);
    void *ws = e ? NULL : aligned_alloc(64, (size + 63) / 64 * 64);
    e = e ? e : kvc_attend_rows(ctx, q, k, v, NULL, &to, NULL, ws, size);
    free(ws);
    return e;
}

int main(void)
{
    static unsigned char k8[ROWS * K_ROW], v4[ROWS * V_ROW];
    static uint16_t k16[ROWS * DIM], v16[ROWS * DIM];
    static float q[HEADS * DIM], out[2][HEADS * DIM];
    const kvc_view qv = kvc_view_packed(q, KVC_DTYPE_F32, 1, HEADS, DIM);
    const kvc_row_view k[2] = {kvc_row_view_packed(k8, KVC_ROWS_Q8_0, TOKENS, KV_HEADS, DIM),
                               kvc_row_view_packed(k16, KVC_ROWS_F16, TOKENS, KV_HEADS, DIM)};
    const kvc_row_view v[2] = {kvc_row_view_packed(v4, KVC_ROWS_Q4_0, TOKENS, KV_HEADS, DIM),
                               kvc_row_view_packed(v16, KVC_ROWS_F16, TOKENS, KV_HEADS, DIM)};
    kvc_ctx *ctx = NULL;
    uint32_t state = 1;
    float largest = 0.0f, error = 0.0f;

    fill(k8, 34, k16);
    fill(v4, 18, v16);
    for (int i = 0; i < HEADS * DIM; i++)
        q[i] = (float)noise(&state) / 16384.0f - 2.0f;
    kvc_status e = kvc_ctx_create(NULL, &ctx);
    for (int i = 0; i < 2; i++)
        e = e ? e : attend(ctx, &qv, &k[i], &v[i], out[i]);
    for (int i = 0; i < HEADS * DIM; i++) {
        largest = fmaxf(largest, fabsf(out[1][i]));
        error = fmaxf(error, fabsf(out[0][i] - out[1][i]));
    }
    printf("%s: %zu bytes of blocks, %zu of halves; they differ by %.1e of the largest output\n",
           kvc_status_str(e), sizeof(k8) + sizeof(v4), sizeof(k16) + sizeof(v16),
           (double)(error / largest));
    kvc_ctx_destroy(ctx);
    return e != KVC_OK || !(largest > 0.0f) || !(error <= 2e-4f * largest);
}
