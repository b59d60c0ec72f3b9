/* Merge the tokens of an image, and see what the bias does to the error of attention. */
#include <kvc/merge.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIDE = 24, IMAGE = SIDE * SIDE, TEXT = 64, ROWS = IMAGE + TEXT, DIM = 64, QUERIES = 32 };

static struct rows {
    float k[ROWS][DIM], v[ROWS][DIM];
    kvc_merge_token tokens[ROWS];
} before, after;

static float queries[QUERIES][DIM];

static float noise(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state * (1.7f * 0x1p-31f);
}

/* Patches next to each other look alike; text does not. */
static void fill(void)
{
    for (int c = 0; c < 2 * DIM; c++) {
        const float down = noise() * 0.25f, right = noise() * 0.25f, phase = noise() * 9.0f;
        for (int i = 0; i < ROWS; i++) {
            const int row = i / SIDE, col = i % SIDE;
            const float wave = sinf(down * (float)row + right * (float)col + phase);
            const float x = i < IMAGE ? 1.4f * wave + 0.2f * noise() : noise();
            *(c < DIM ? &before.k[i][c] : &before.v[i][c - DIM]) = x;
        }
    }
    for (int i = 0; i < ROWS; i++)
        before.tokens[i] = (kvc_merge_token){
            .image = i < IMAGE ? 0 : -1, .row = i / SIDE, .col = i % SIDE, .size = 1.0f};
    for (int i = 0; i < QUERIES * DIM; i++)
        queries[i / DIM][i % DIM] = noise();
}

static void attend(const struct rows *rows, size_t n, const float *q, float bias, float *o)
{
    float sum = 0.0f;
    memset(o, 0, DIM * sizeof(*o));
    for (size_t i = 0; i < n; i++) {
        float z = bias * rows->tokens[i].bias;
        for (int c = 0; c < DIM; c++)
            z += q[c] * rows->k[i][c] / sqrtf(DIM);
        sum += expf(z);
        for (int c = 0; c < DIM; c++)
            o[c] += expf(z) * rows->v[i][c];
    }
    for (int c = 0; c < DIM; c++)
        o[c] /= sum;
}

/* Mean error of the output. */
static float error_of(size_t n, float bias)
{
    float error = 0.0f, exact[DIM], o[DIM];
    for (int q = 0; q < QUERIES; q++) {
        float square = 0.0f;
        attend(&before, ROWS, queries[q], 0.0f, exact);
        attend(&after, n, queries[q], bias, o);
        for (int c = 0; c < DIM; c++)
            square += (o[c] - exact[c]) * (o[c] - exact[c]);
        error += sqrtf(square) / QUERIES;
    }
    return error;
}

int main(void)
{
    const kvc_view k = kvc_view_packed(after.k, KVC_DTYPE_F32, ROWS, 1, DIM);
    const kvc_view v = kvc_view_packed(after.v, KVC_DTYPE_F32, ROWS, 1, DIM);
    static int32_t map[ROWS], from[ROWS];
    size_t size, n = 0;
    kvc_ctx *ctx = NULL;
    if (kvc_ctx_create(NULL, &ctx) || kvc_merge_rounds_workspace_size(&k, 1, &size))
        return 1;
    void *ws = aligned_alloc(64, (size + 63) / 64 * 64);
    bool ok = ws != NULL;

    fill();
    printf("rounds  patches  error without bias  with bias\n");
    for (int r = 1; r <= 3 && ok; r++) {
        after = before;
        ok = !kvc_merge_rounds(ctx, &k, &v, 1, NULL, r, after.tokens, map, from, &n, ws, size);
        const float without = error_of(n, 0.0f), with = error_of(n, 1.0f);
        printf("%6d  %7zu  %18.4f  %9.4f\n", r, n - TEXT, (double)without, (double)with);
        ok = ok && with < without;
    }
    free(ws);
    kvc_ctx_destroy(ctx);
    return !ok;
}
