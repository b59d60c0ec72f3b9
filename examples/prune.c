/* Keep a quarter of a prompt: score its rows by attention, force some, select, move K and V. */
#include <kvc/kvc.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 256, DIM = 8, QUERIES = 32, KEEP = 64, FACT = 100 };

/* Attention of the last queries: even, but all look hard at one fact far back. */
static void attend(float attention[QUERIES][N])
{
    for (int q = 0; q < QUERIES; q++) {
        const int seen = N - QUERIES + q + 1;
        for (int i = 0; i < N; i++)
            attention[q][i] = i >= seen ? 0.0f : i == FACT ? 0.5f : 0.5f / (float)(seen - 1);
    }
}

/* The rows to keep, ascending. */
static kvc_status choose(const float *scores, int32_t *rows, size_t *n_rows)
{
    uint64_t forced[N / 64], sentences[N / 64] = {UINT64_C(1) << 20}; /* one starts at row 20 */
    kvc_force_options options;
    size_t n_forced, size;

    kvc_force_options_default(&options);
    options.recent = 16;
    options.sentence_first = sentences;
    kvc_status status = kvc_force_rows(N, &options, KEEP, forced, &n_forced, NULL);
    if (status == KVC_OK)
        status = kvc_select_rows_workspace_size(N, 1, &size);
    if (status != KVC_OK)
        return status;
    void *ws = aligned_alloc(64, (size + 63) / 64 * 64);
    status = kvc_select_rows(scores, N, KEEP, forced, 1, KVC_BLOCK_MEAN, rows, n_rows, ws, size);
    free(ws);
    return status;
}

int main(void)
{
    static float attention[QUERIES][N], k[N][DIM], v[N][DIM];
    float scores[N], positions[N];
    int32_t rows[KEEP], map[N];
    kvc_segment image = {90, 40}, left;
    kvc_ctx *ctx = NULL;
    size_t n_rows = 0;

    for (int i = 0; i < N; i++) {
        positions[i] = (float)i;
        for (int d = 0; d < DIM; d++)
            k[i][d] = v[i][d] = (float)i;
    }
    attend(attention);
    /* The first of these queries sits at row N - QUERIES and sees all rows up to its own. */
    if (kvc_ctx_create(NULL, &ctx) != KVC_OK ||
        kvc_heavy_scores(attention[0], QUERIES, N, N, N - QUERIES, NULL, scores) != KVC_OK ||
        choose(scores, rows, &n_rows) != KVC_OK)
        return 1;

    /* One list moves everything that has a row a token. */
    const kvc_view views[] = {kvc_view_packed(k, KVC_DTYPE_F32, N, 1, DIM),
                              kvc_view_packed(v, KVC_DTYPE_F32, N, 1, DIM),
                              kvc_view_packed(positions, KVC_DTYPE_F32, N, 1, 1)};
    for (int i = 0; i < 3; i++)
        if (kvc_prune_rows(ctx, &views[i], rows, n_rows) != KVC_OK)
            return 1;
    if (kvc_prune_map(rows, n_rows, N, map) != KVC_OK ||
        kvc_segment_map(&image, 1, rows, n_rows, N, &left) != KVC_OK)
        return 1;
    kvc_ctx_destroy(ctx);

    printf("%zu of %d rows left\n", n_rows, N);
    printf("the fact of row %d scores %.1f (even attention: 1) and is now row %d\n", FACT,
           (double)scores[FACT], (int)map[FACT]);
    printf("the image had rows 90 to 129; %d of them are left, from row %d\n", (int)left.count,
           (int)left.first);
    int right = n_rows == KEEP && map[FACT] >= 0 && map[20] >= 0 && map[0] == 0 &&
                map[N - 1] == KEEP - 1 && map[FACT] >= left.first &&
                map[FACT] < left.first + left.count;
    for (int i = 0; i < N; i++)
        right =
            right && (map[i] < 0 || (k[map[i]][0] == (float)i && v[map[i]][DIM - 1] == (float)i &&
                                     positions[map[i]] == (float)i));
    return right ? 0 : 1;
}
