/* Score the patches of one image from a few query rows and the keys, refine the scores, choose a
 * quarter of them. */
#include <kvc/kvc.h>
#include <stdio.h>
#include <stdlib.h>

enum { SIDE = 12, TOKENS = SIDE * SIDE, QUERIES = 4, HEADS = 4, KV_HEADS = 2, DIM = 32 };

static float noise(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(int32_t)*state * 0x1p-31f;
}

/* Keys of an image with an object in rows 3 ... 6, columns 6 ... 9, at which the queries look. */
static void fill(float *q, float *k)
{
    uint32_t state = 1;
    for (int i = 0; i < QUERIES * HEADS * DIM; i++)
        q[i] = noise(&state) + (i % DIM < 4 ? 2.0f : 0.0f);
    for (int i = 0; i < TOKENS * KV_HEADS * DIM; i++) {
        const int token = i / (KV_HEADS * DIM), y = token / SIDE, x = token % SIDE;
        const int object = y >= 3 && y <= 6 && x >= 6 && x <= 9;
        k[i] = noise(&state) + (object && i % DIM < 4 ? 1.5f : 0.0f);
    }
}

/* Room for the largest of the calls, or NULL. */
static void *make_workspace(const kvc_grid *grid, size_t *size)
{
    size_t a, b;
    if (kvc_score_queries_workspace_size(QUERIES, HEADS, TOKENS, KV_HEADS, DIM, &a) != KVC_OK ||
        kvc_choose_tokens_workspace_size(grid, DIM, &b) != KVC_OK)
        return NULL;
    *size = ((a > b ? a : b) + 63) / 64 * 64;
    return aligned_alloc(64, *size);
}

static void print_chosen(const int32_t *tokens, size_t n)
{
    for (int32_t i = 0, at = 0; i < TOKENS; i++) {
        const int chosen = (size_t)at < n && tokens[at] == i;
        at += chosen;
        printf("%c%s", chosen ? '#' : '.', i % SIDE == SIDE - 1 ? "\n" : " ");
    }
}

int main(void)
{
    static float q[QUERIES * HEADS * DIM], k[TOKENS * KV_HEADS * DIM];
    static float mass[KV_HEADS][TOKENS], raw[TOKENS], scores[TOKENS];
    const kvc_view q_view = kvc_view_packed(q, KVC_DTYPE_F32, QUERIES, HEADS, DIM);
    const kvc_view k_view = kvc_view_packed(k, KVC_DTYPE_F32, TOKENS, KV_HEADS, DIM);
    const kvc_grid grid = kvc_grid_image(SIDE, SIDE);
    kvc_view features = k_view; /* the first head's keys say which patches look alike */
    uint64_t sinks[(TOKENS + 63) / 64];
    int32_t tokens[TOKENS];
    size_t ws_size = 0, n = 0;
    void *ws = make_workspace(&grid, &ws_size);
    kvc_ctx *ctx = NULL;

    fill(q, k);
    features.n_heads = 1;
    int ok = ws && kvc_ctx_create(NULL, &ctx) == KVC_OK;
    ok = ok && kvc_score_queries(ctx, &q_view, &k_view, NULL, mass[0], ws, ws_size) == KVC_OK;
    for (int i = 0; i < TOKENS; i++)
        for (int h = 0; h < KV_HEADS; h++)
            raw[i] += mass[h][i] / KV_HEADS;
    ok = ok && kvc_score_refine(raw, &grid, NULL, NULL, scores, sinks) == KVC_OK;
    ok = ok && kvc_choose_tokens(ctx, scores, &features, &grid, sinks, TOKENS / 4, NULL, tokens, &n,
                                 NULL, ws, ws_size) == KVC_OK;
    if (ok) {
        printf("%zu of %d patches:\n", n, TOKENS);
        print_chosen(tokens, n);
    }
    kvc_ctx_destroy(ctx);
    free(ws);
    return !ok;
}
