/* The stem as matrix products: convolutions gather their inputs first. */
#include "stem.h"

#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loader.h"
#include "picture.h"

enum { LINE_VALUES = 3 * PATCH, PATCH_VALUES = LINE_VALUES * PATCH };

struct stem_room {
    float *pixels; /* [cells][PATCH_VALUES] without the mean */
    float *means;  /* [cells][3] */
    float *hidden; /* [cells][n_hidden] */
    float *h;      /* [cells][n_width] */
    float *norm;   /* [cells][n_width] */
    float *wide;   /* [cells][9 * n_width] what a convolution sees */
    float *conv;   /* [cells][n_width] */
};

static const float norm_eps = 1e-5f;

static bool read_number(const struct gguf *gguf, const char *key, uint64_t max, size_t *out,
                        struct failure *failure)
{
    uint64_t n;

    if (!gguf_to_u64(gguf_find(gguf, key), &n) || n < 1 || n > max)
        return fail_with(failure, "%s is missing or not 1..%llu", key, (unsigned long long)max);
    *out = (size_t)n;
    return true;
}

static bool read_dilations(const struct gguf *gguf, struct stem *s, struct failure *failure)
{
    const char *key = "tinyvlm.vision.dilations";
    const struct gguf_value *dilations = gguf_find(gguf, key);

    for (size_t i = 0; i < s->n_blocks; i++) {
        uint64_t n;
        if (!dilations || !gguf_element_u64(dilations, i, &n) || n < 1 || n > MAX_GRID)
            return fail_with(failure, "%s has no number for block %zu", key, i);
        s->blocks[i].dilation = (int)n;
    }
    return true;
}

static bool read_shape(const struct gguf *gguf, struct stem *s, struct failure *failure)
{
    size_t patch = 0;

    if (!read_number(gguf, "tinyvlm.vision.patch_size", 1024, &patch, failure) ||
        !read_number(gguf, "tinyvlm.vision.feed_forward_length", 1 << 16, &s->n_hidden, failure) ||
        !read_number(gguf, "tinyvlm.vision.embedding_length", 1 << 16, &s->n_width, failure) ||
        !read_number(gguf, "tinyvlm.vision.block_count", MAX_STEM_BLOCKS, &s->n_blocks, failure) ||
        !read_number(gguf, "tinyvlm.embedding_length", 1 << 16, &s->n_out, failure) ||
        !read_dilations(gguf, s, failure))
        return false;
    return patch == PATCH || fail_with(failure, "patches of %zu pixels, not %d", patch, PATCH);
}

static float *take_of_block(struct loader *l, size_t block, const char *part, size_t n_out,
                            size_t n_in)
{
    char name[64];

    snprintf(name, sizeof(name), "v.blk.%zu.%s", block, part);
    return loader_take(l, name, n_out, n_in);
}

static bool take_all(struct loader *l, struct stem *s)
{
    const size_t width = s->n_width;

    l->n_floats = l->n_tensors = 0;
    l->failure->text[0] = '\0';
    s->patch = loader_take(l, "v.patch_embd.weight", s->n_hidden, PATCH_VALUES);
    s->patch_bias = loader_take(l, "v.patch_embd.bias", 1, s->n_hidden);
    s->mix = loader_take(l, "v.patch_mix.weight", width, s->n_hidden);
    s->mix_bias = loader_take(l, "v.patch_mix.bias", 1, width);
    s->colour = loader_take(l, "v.colour_embd.weight", width, 3);
    s->colour_bias = loader_take(l, "v.colour_embd.bias", 1, width);
    for (size_t i = 0; i < s->n_blocks; i++) {
        struct stem_block *b = &s->blocks[i];
        b->norm = take_of_block(l, i, "norm.weight", 1, width);
        b->conv = take_of_block(l, i, "conv.weight", width, 9 * width);
        b->conv_bias = take_of_block(l, i, "conv.bias", 1, width);
        b->point = take_of_block(l, i, "point.weight", width, width);
        b->point_bias = take_of_block(l, i, "point.bias", 1, width);
    }
    s->norm = loader_take(l, "v.norm.weight", 1, width);
    s->out = loader_take(l, "v.proj.weight", s->n_out, width);
    s->out_bias = loader_take(l, "v.proj.bias", 1, s->n_out);
    return loader_has_all(l);
}

bool stem_load(const struct gguf *gguf, struct stem *stem, struct failure *failure)
{
    struct loader loader = {.gguf = gguf, .failure = failure};

    memset(stem, 0, sizeof(*stem));
    if (!read_shape(gguf, stem, failure) || !take_all(&loader, stem))
        return false;
    stem->weights = malloc(loader.n_floats * sizeof(float));
    if (!stem->weights)
        return fail_with(failure, "out of memory");
    loader.block = stem->weights;
    return take_all(&loader, stem);
}

void stem_free(struct stem *stem)
{
    free(stem->weights);
    memset(stem, 0, sizeof(*stem));
}

struct stem_room *stem_room_create(const struct stem *stem)
{
    struct stem_room *room = calloc(1, sizeof(*room));

    if (!room)
        return NULL;
    room->pixels = malloc(sizeof(float) * MAX_CELLS * PATCH_VALUES);
    room->means = malloc(sizeof(float) * MAX_CELLS * 3);
    room->hidden = malloc(sizeof(float) * MAX_CELLS * stem->n_hidden);
    room->h = malloc(sizeof(float) * MAX_CELLS * stem->n_width);
    room->norm = malloc(sizeof(float) * MAX_CELLS * stem->n_width);
    room->wide = malloc(sizeof(float) * MAX_CELLS * 9 * stem->n_width);
    room->conv = malloc(sizeof(float) * MAX_CELLS * stem->n_width);
    if (!room->pixels || !room->means || !room->hidden || !room->h || !room->norm || !room->wide ||
        !room->conv) {
        stem_room_destroy(room);
        return NULL;
    }
    return room;
}

void stem_room_destroy(struct stem_room *room)
{
    if (!room)
        return;
    free(room->pixels);
    free(room->means);
    free(room->hidden);
    free(room->h);
    free(room->norm);
    free(room->wide);
    free(room->conv);
    free(room);
}

/* Each patch as a row, its mean colour apart: else brightness swamps the strokes on it. */
static void cut(struct stem_room *room, const uint8_t *rgb, int grid)
{
    const size_t line = LINE_VALUES * (size_t)grid;

    for (int cell = 0; cell < grid * grid; cell++) {
        const uint8_t *corner =
            rgb + (size_t)(cell / grid) * PATCH * line + (size_t)(cell % grid) * LINE_VALUES;
        float *pixels = room->pixels + (size_t)cell * PATCH_VALUES;
        float *mean = room->means + 3 * (size_t)cell;
        mean[0] = mean[1] = mean[2] = 0.0f;
        for (size_t i = 0; i < PATCH_VALUES; i++) {
            const size_t row = i / LINE_VALUES;
            pixels[i] = (float)corner[row * line + i % LINE_VALUES] / 64.0f - 2.0f;
            mean[i % 3] += pixels[i];
        }
        for (size_t c = 0; c < 3; c++)
            mean[c] /= (float)(PATCH * PATCH);
        for (size_t i = 0; i < PATCH_VALUES; i++)
            pixels[i] -= mean[i % 3];
    }
}

/* out [n][n_out] = or += in [n][n_in] * weights [n_out][n_in]^T + bias */
static void product(const float *in, size_t n, size_t n_in, const float *weights, const float *bias,
                    size_t n_out, bool add, float *out)
{
    for (size_t i = 0; i < n * n_out; i++)
        out[i] = (add ? out[i] : 0.0f) + bias[i % n_out];
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n, (int)n_out, (int)n_in, 1.0f, in,
                (int)n_in, weights, (int)n_in, 1.0f, out, (int)n_out);
}

static void gelu(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.707106781f));
}

static void norm_rows(const float *x, size_t n, size_t width, const float *weights, float *out)
{
    for (size_t r = 0; r < n; r++) {
        float sum = 0.0f;
        for (size_t i = 0; i < width; i++)
            sum += x[r * width + i] * x[r * width + i];
        const float factor = 1.0f / sqrtf(sum / (float)width + norm_eps);
        for (size_t i = 0; i < width; i++)
            out[r * width + i] = x[r * width + i] * factor * weights[i];
    }
}

/* The nine neighbours of each cell side by side, zeros beyond the border. */
static void gather(const float *x, int grid, int dilation, size_t width, float *wide)
{
    for (int cell = 0; cell < grid * grid; cell++)
        for (int i = 0; i < 9; i++) {
            const int y = cell / grid + (i / 3 - 1) * dilation;
            const int column = cell % grid + (i % 3 - 1) * dilation;
            float *dst = wide + ((size_t)cell * 9 + (size_t)i) * width;
            if (y < 0 || y >= grid || column < 0 || column >= grid)
                memset(dst, 0, width * sizeof(float));
            else
                memcpy(dst, x + (size_t)(y * grid + column) * width, width * sizeof(float));
        }
}

void stem_run(const struct stem *s, struct stem_room *room, const uint8_t *rgb, int grid,
              float *rows)
{
    const size_t n = (size_t)grid * (size_t)grid, width = s->n_width;

    cut(room, rgb, grid);
    product(room->means, n, 3, s->colour, s->colour_bias, width, false, room->h);
    product(room->pixels, n, PATCH_VALUES, s->patch, s->patch_bias, s->n_hidden, false,
            room->hidden);
    gelu(room->hidden, n * s->n_hidden);
    product(room->hidden, n, s->n_hidden, s->mix, s->mix_bias, width, true, room->h);
    for (size_t i = 0; i < s->n_blocks; i++) {
        const struct stem_block *b = &s->blocks[i];
        norm_rows(room->h, n, width, b->norm, room->norm);
        gather(room->norm, grid, b->dilation, width, room->wide);
        product(room->wide, n, 9 * width, b->conv, b->conv_bias, width, false, room->conv);
        gelu(room->conv, n * width);
        product(room->conv, n, width, b->point, b->point_bias, width, true, room->h);
    }
    norm_rows(room->h, n, width, s->norm, room->norm);
    product(room->norm, n, width, s->out, s->out_bias, s->n_out, false, rows);
}
