/* Train scorers that find an object's patches and rank with them; [FILE] receives the last one. */
#include <kvc/kvc.h>
#include <math.h>
#include <stdio.h>

enum { SIDE = 12, TOKENS = SIDE * SIDE, DIM = 8, TAPS = 3, IMAGES = 40, STEPS = 150 };

struct image {
    float x[TOKENS][DIM]; /* embeddings of patches */
    int object[TOKENS];   /* 1: the patch belongs to the object */
};

static uint32_t next(uint32_t *state)
{
    return (*state = *state * 1664525u + 1013904223u) >> 8;
}

/* Noise, and a rectangle somewhere whose patches lean a little in one direction. */
static void make_image(uint32_t *state, struct image *image)
{
    const int top = (int)(next(state) % 8), left = (int)(next(state) % 8);
    for (int i = 0; i < TOKENS; i++) {
        const int y = i / SIDE - top, x = i % SIDE - left;
        image->object[i] = y >= 0 && y < 4 && x >= 0 && x < 5;
        for (int c = 0; c < DIM; c++)
            image->x[i][c] = (float)next(state) * 0x1p-23f - 1.0f +
                             (image->object[i] ? 0.4f - 0.08f * (float)c : 0.0f);
    }
}

/* One step of gradient descent on the cross entropy of one image; the last weight is the bias. */
static void train(const struct image *image, int taps, float *w)
{
    const int n = taps * DIM;
    float grad[TAPS * DIM + 1] = {0};
    for (int i = 0; i < TOKENS; i++) {
        float seen[TAPS * DIM + 1], z = w[n]; /* by the taps: zeros beyond the row */
        for (int j = 0; j < n; j++) {
            const int x = i % SIDE + j / DIM - taps / 2;
            seen[j] = x >= 0 && x < SIDE ? image->x[i - i % SIDE + x][j % DIM] : 0.0f;
            z += w[j] * seen[j];
        }
        seen[n] = 1.0f;
        for (int j = 0; j <= n; j++)
            grad[j] += (1.0f / (1.0f + expf(-z)) - (float)image->object[i]) * seen[j] / TOKENS;
    }
    for (int j = 0; j <= n; j++)
        w[j] -= 0.5f * grad[j];
}

/* The share of pairs of an object's patch and another that are in order; -1: failure. */
static double rank(kvc_ctx *ctx, const void *file, size_t n, struct image *image)
{
    static _Alignas(64) unsigned char ws[16384];
    const kvc_view x = kvc_view_packed(image->x, KVC_DTYPE_F32, TOKENS, 1, DIM);
    const kvc_grid grid = kvc_grid_image(SIDE, SIDE);
    kvc_scorer *scorer = NULL;
    float scores[TOKENS];
    int right = 0, pairs = 0;
    const int ok = kvc_scorer_create(ctx, file, n, &scorer) == KVC_OK &&
                   kvc_scorer_apply(ctx, scorer, &x, &grid, scores, ws, sizeof(ws)) == KVC_OK;
    for (int i = 0; i < TOKENS * TOKENS && ok; i++) {
        const int a = i / TOKENS, b = i % TOKENS, pair = image->object[a] && !image->object[b];
        right += pair && scores[a] > scores[b], pairs += pair;
    }
    kvc_scorer_destroy(scorer);
    return ok ? (double)right / pairs : -1.0;
}

int main(int argc, char **argv)
{
    static struct image images[IMAGES + 1]; /* the last is not seen in training */
    unsigned char file[512];
    uint32_t state = 1;
    size_t n = 0;
    kvc_ctx *ctx = NULL;
    int failed = kvc_ctx_create(NULL, &ctx) != KVC_OK;

    for (int i = 0; i <= IMAGES; i++)
        make_image(&state, &images[i]);
    for (int taps = 1; taps <= TAPS && !failed; taps += 2) {
        float w[TAPS * DIM + 1] = {0};
        for (int s = 0; s < STEPS * IMAGES; s++)
            train(&images[s % IMAGES], taps, w);
        kvc_scorer_desc desc = {sizeof(desc), .n_in = DIM, .kernel = taps, .weights = w};
        desc.kind = taps > 1 ? KVC_SCORER_CONV1D : KVC_SCORER_LINEAR;
        desc.activation = KVC_ACTIVATION_SIGMOID;
        desc.row_padding = taps > 1;
        desc.bias = w[(size_t)taps * DIM];
        failed = kvc_scorer_encode(&desc, file, sizeof(file), &n) != KVC_OK;
        const double share = failed ? -1.0 : rank(ctx, file, n, &images[IMAGES]);
        printf("%d of a row: %zu bytes, %.1f %% of the pairs in order\n", taps, n, 100.0 * share);
        failed = share < 0.5;
    }
    FILE *f = argc > 1 ? fopen(argv[1], "wb") : NULL;
    failed |= argc > 1 && (!f || fwrite(file, 1, n, f) != n || fclose(f) != 0);
    kvc_ctx_destroy(ctx);
    return failed;
}
