/* score_texture.c - where an image has high frequencies, from its pixels or its embeddings. */
#include "kvc/score.h"

#include <math.h>
#include <stdlib.h>

#include "arena.h"
#include "check.h"
#include "ctx.h"

/* One frame. */
struct image {
    const uint8_t *luma;
    size_t width, height, stride;
};

static int pixel(const struct image *image, size_t y, size_t x)
{
    return image->luma[y * image->stride + x];
}

/* |Laplacian|, with the nearest pixel for one beyond the image. */
static uint64_t contrast(const struct image *image, size_t y, size_t x)
{
    const size_t up = y > 0 ? y - 1 : y, down = y + 1 < image->height ? y + 1 : y;
    const size_t left = x > 0 ? x - 1 : x, right = x + 1 < image->width ? x + 1 : x;
    return (uint64_t)abs(4 * pixel(image, y, x) - pixel(image, up, x) - pixel(image, down, x) -
                         pixel(image, y, left) - pixel(image, y, right));
}

/* The mean contrast of pixels y0 ... y1 - 1, x0 ... x1 - 1. */
static float mean_contrast(const struct image *image, size_t y0, size_t y1, size_t x0, size_t x1)
{
    uint64_t sum = 0;
    for (size_t y = y0; y < y1; y++)
        for (size_t x = x0; x < x1; x++)
            sum += contrast(image, y, x);
    return (float)((double)sum / ((double)(y1 - y0) * (double)(x1 - x0)));
}

/* Divides by the largest; zeros stay. */
static void scale_to_one(float *x, size_t n)
{
    float max = 0.0f;
    for (size_t i = 0; i < n; i++)
        max = x[i] > max ? x[i] : max;
    for (size_t i = 0; i < n && max > 0.0f; i++)
        x[i] /= max;
}

kvc_status kvc_score_texture(const uint8_t *luma, size_t width, size_t height, size_t stride,
                             const kvc_grid *grid, float *texture)
{
    size_t n, row_products, all;

    KVC_TRY(kvc_grid_tokens(grid, &n));
    if (n == 0)
        return KVC_OK;
    const size_t n_rows = (size_t)grid->n_rows, n_cols = (size_t)grid->n_cols;
    const size_t n_frames = (size_t)grid->n_frames;
    KVC_CHECK(luma && texture && height >= n_rows && width >= n_cols && stride >= width, KVC_E_ARG);
    KVC_CHECK(!__builtin_mul_overflow(height, stride, &all) &&
                  !__builtin_mul_overflow(all, n_frames, &all) && all <= PTRDIFF_MAX &&
                  !__builtin_mul_overflow(height, n_rows, &row_products) &&
                  !__builtin_mul_overflow(width, n_cols, &row_products),
              KVC_E_ARG);

    float *out = texture;
    for (size_t f = 0; f < n_frames; f++) {
        const struct image image = {luma + f * height * stride, width, height, stride};
        for (size_t y = 0; y < n_rows; y++)
            for (size_t x = 0; x < n_cols; x++)
                *out++ = mean_contrast(&image, y * height / n_rows, (y + 1) * height / n_rows,
                                       x * width / n_cols, (x + 1) * width / n_cols);
    }
    scale_to_one(texture, n);
    return KVC_OK;
}

/* Rows of one embedding as floats, and a result a token. */
struct job {
    const kvc_ctx *ctx;
    const kvc_view *x;
    size_t stride;
    float *token, *other, *sum; /* [stride] */
    float *distance;            /* one a token */
};

static size_t carve(void *ws, struct job *job, size_t n, size_t dim)
{
    struct kvc_arena arena = {.base = ws};
    if (dim > PTRDIFF_MAX / sizeof(float))
        return SIZE_MAX;
    job->stride = kvc_attend_stride(dim);
    job->token = kvc_arena_take(&arena, job->stride, sizeof(float), 64);
    job->other = kvc_arena_take(&arena, job->stride, sizeof(float), 64);
    job->sum = kvc_arena_take(&arena, job->stride, sizeof(float), 64);
    job->distance = kvc_arena_take(&arena, n, sizeof(float), 64);
    return arena.overflow ? SIZE_MAX : arena.used;
}

kvc_status kvc_score_texture_embeddings_workspace_size(const kvc_grid *grid, size_t dim,
                                                       size_t *size)
{
    struct job job;
    size_t n;

    KVC_CHECK(size && dim > 0, KVC_E_ARG);
    KVC_TRY(kvc_grid_tokens(grid, &n));
    const size_t need = carve(NULL, &job, n, dim);
    KVC_CHECK(need != SIZE_MAX, KVC_E_ARG);
    *size = need;
    return KVC_OK;
}

static kvc_status load(const struct job *job, size_t token, float *to)
{
    const struct kvc_rows row = kvc_view_rows(job->x, token, 1, 0);
    return job->ctx->k->load_rows(&job->ctx->queue, &row, to, job->stride, job->stride);
}

static kvc_status mix(const struct job *job, const float *a, const float *b, float w_b, float *out)
{
    return job->ctx->k->mix_rows(&job->ctx->queue, a, 1.0f, b, w_b, job->stride, out);
}

/* sum += token - other. Differences of equal rows are exactly 0, which a mean would not give. */
static kvc_status add_difference(const struct job *job, size_t other)
{
    KVC_TRY(load(job, other, job->other));
    KVC_TRY(mix(job, job->token, job->other, -1.0f, job->other));
    return mix(job, job->sum, job->other, 1.0f, job->sum);
}

static kvc_status measure(const struct job *job, const kvc_grid *grid, size_t i)
{
    const size_t n_cols = (size_t)grid->n_cols, n_rows = (size_t)grid->n_rows;
    const size_t x = i % n_cols, y = i / n_cols % n_rows;
    const bool there[] = {y > 0, x > 0, x + 1 < n_cols, y + 1 < n_rows};
    const size_t others[] = {i - n_cols, i - 1, i + 1, i + n_cols};
    size_t n = 0;
    float square;

    KVC_TRY(load(job, i, job->token));
    KVC_TRY(mix(job, job->token, job->token, -1.0f, job->sum));
    for (size_t j = 0; j < 4; j++)
        if (there[j]) {
            KVC_TRY(add_difference(job, others[j]));
            n++;
        }
    KVC_TRY(job->ctx->k->dot_rows(&job->ctx->queue, job->sum, 1, job->sum, 1, job->x->head_dim,
                                  &square, 1));
    job->distance[i] = sqrtf(square) / (float)(n > 0 ? n : 1);
    return isfinite(square) ? KVC_OK : KVC_E_NONFINITE;
}

kvc_status kvc_score_texture_embeddings(kvc_ctx *ctx, const kvc_view *x, const kvc_grid *grid,
                                        float *texture, void *ws, size_t ws_size)
{
    struct job job = {.ctx = ctx, .x = x};
    size_t n;

    KVC_TRY(kvc_grid_tokens(grid, &n));
    KVC_CHECK(ctx && kvc_view_ok(x) && x->n_heads == 1 && x->n_tokens == n, KVC_E_ARG);
    if (n == 0)
        return KVC_OK;
    KVC_CHECK(texture, KVC_E_ARG);
    const size_t need = carve(ws, &job, n, x->head_dim);
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
    for (size_t i = 0; i < n; i++)
        KVC_TRY(measure(&job, grid, i));
    scale_to_one(job.distance, n);
    for (size_t i = 0; i < n; i++)
        texture[i] = job.distance[i];
    return KVC_OK;
}
