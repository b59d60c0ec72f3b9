/* score_choose.c - which tokens to keep: forced ones, a floor for each part of the image, variety.
 */
#include "kvc/score.h"

#include <math.h>
#include <string.h>

#include "arena.h"
#include "bits.h"
#include "check.h"
#include "ctx.h"

struct choice {
    const kvc_ctx *ctx;
    const float *scores;
    const kvc_view *features; /* NULL: scores alone decide */
    const kvc_grid *grid;
    const uint64_t *forced;
    kvc_choose_options options;
    size_t n, keep, n_chosen;
    size_t cell_rows, cell_cols; /* of a frame, after halving; 0: no floor */
    /* The workspace, an entry a token. */
    int32_t *order;
    bool *chosen;
    int32_t *lacking; /* of the cell with that index: tokens below its floor */
    float *nearest;   /* largest cosine to a chosen token, >= 0 */
    float *rows;      /* [stride], features as floats */
    float *norms, *dots;
    size_t stride;
};

static const kvc_choose_options defaults = {
    .struct_size = sizeof(defaults),
    .diversity = 0.5f,
    .cell_rows = 4,
    .cell_cols = 4,
    .cell_min = 1,
};

void kvc_choose_options_init(kvc_choose_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &defaults, sizeof(defaults));
}

static kvc_status take_options(const kvc_choose_options *options, kvc_choose_options *out)
{
    *out = defaults;
    if (options)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), options, sizeof(*out)));
    KVC_CHECK(out->diversity >= 0.0f && out->diversity <= 1.0f, KVC_E_ARG);
    return out->cell_rows >= 1 && out->cell_cols >= 1 && out->cell_min >= 0 ? KVC_OK : KVC_E_ARG;
}

/* Bytes of the workspace, SIZE_MAX if they do not fit; dim 0: no features. */
static size_t carve(void *ws, struct choice *c, size_t dim)
{
    struct kvc_arena arena = {.base = ws};
    const size_t n = c->n;
    if (dim > PTRDIFF_MAX / sizeof(float))
        return SIZE_MAX;
    c->stride = kvc_attend_stride(dim);
    c->order = kvc_arena_take(&arena, n, sizeof(int32_t), 64);
    c->lacking = kvc_arena_take(&arena, n, sizeof(int32_t), 64);
    c->chosen = kvc_arena_take(&arena, n, sizeof(bool), 64);
    c->nearest = kvc_arena_take(&arena, n, sizeof(float), 64);
    if (dim > 0) {
        c->norms = kvc_arena_take(&arena, n, sizeof(float), 64);
        c->dots = kvc_arena_take(&arena, n, sizeof(float), 64);
        c->rows = kvc_arena_take(&arena, n, c->stride * sizeof(float), 64);
    }
    return arena.overflow ? SIZE_MAX : arena.used;
}

kvc_status kvc_choose_tokens_workspace_size(const kvc_grid *grid, size_t dim, size_t *size)
{
    struct choice c;

    KVC_CHECK(size, KVC_E_ARG);
    KVC_TRY(kvc_grid_tokens(grid, &c.n));
    const size_t need = carve(NULL, &c, dim);
    KVC_CHECK(need != SIZE_MAX, KVC_E_ARG);
    *size = need;
    return KVC_OK;
}

/* May it be chosen at all? */
static bool eligible(const struct choice *c, size_t i)
{
    return !kvc_bit(c->options.excluded, i) && (kvc_bit(c->forced, i) || !isnan(c->scores[i]));
}

static bool left(const struct choice *c, size_t i)
{
    return eligible(c, i) && !c->chosen[i];
}

/* Checks scores and forced tokens; keep becomes the number that will be chosen. */
static kvc_status check_tokens(struct choice *c)
{
    size_t n_eligible = 0, n_forced = 0;
    for (size_t i = 0; i < c->n; i++) {
        const bool forced = kvc_bit(c->forced, i);
        KVC_CHECK(!forced || !kvc_bit(c->options.excluded, i), KVC_E_ARG);
        n_forced += forced;
        if (!eligible(c, i))
            continue;
        n_eligible++;
        KVC_CHECK(forced || !isinf(c->scores[i]), KVC_E_NONFINITE);
        KVC_CHECK(forced || c->scores[i] >= 0.0f, KVC_E_ARG);
    }
    KVC_CHECK(n_forced <= c->keep, KVC_E_ARG);
    c->keep = c->keep < n_eligible ? c->keep : n_eligible;
    return KVC_OK;
}

/* Features as floats, and their lengths. */
static kvc_status load_features(const struct choice *c)
{
    const struct kvc_rows rows = kvc_view_rows(c->features, 0, c->n, 0);

    KVC_TRY(c->ctx->k->load_rows(&c->ctx->queue, &rows, c->rows, c->stride, c->stride));
    for (size_t i = 0; i < c->n; i++) {
        const float *row = c->rows + i * c->stride;
        KVC_TRY(c->ctx->k->dot_rows(&c->ctx->queue, row, 1, row, 1, c->features->head_dim,
                                    &c->norms[i], 1));
        KVC_CHECK(isfinite(c->norms[i]) || !eligible(c, i), KVC_E_NONFINITE);
        c->norms[i] = sqrtf(c->norms[i]);
    }
    return KVC_OK;
}

/* Chooses a token; the others learn how near they are to it. */
static kvc_status choose(struct choice *c, size_t token)
{
    c->chosen[token] = true;
    c->order[c->n_chosen++] = (int32_t)token;
    if (!c->features || !(c->norms[token] > 0.0f))
        return KVC_OK;
    KVC_TRY(c->ctx->k->dot_rows(&c->ctx->queue, c->rows + token * c->stride, 1, c->rows, c->n,
                                c->features->head_dim, c->dots, c->n));
    for (size_t i = 0; i < c->n; i++) {
        if (!(c->norms[i] > 0.0f))
            continue;
        const float cosine =
            (float)((double)c->dots[i] / ((double)c->norms[i] * (double)c->norms[token]));
        if (cosine > c->nearest[i])
            c->nearest[i] = cosine < 1.0f ? cosine : 1.0f;
    }
    return KVC_OK;
}

static size_t cell_of(const struct choice *c, size_t i)
{
    const size_t n_rows = (size_t)c->grid->n_rows, n_cols = (size_t)c->grid->n_cols;
    const size_t x = i % n_cols, y = i / n_cols % n_rows, frame = i / n_cols / n_rows;
    return (frame * c->cell_rows + y * c->cell_rows / n_rows) * c->cell_cols +
           x * c->cell_cols / n_cols;
}

/* Fills in what each cell lacks, and tells what all lack together beyond the forced tokens. */
static size_t count_lacking(struct choice *c)
{
    size_t all = 0;

    memset(c->lacking, 0, c->n * sizeof(*c->lacking));
    for (size_t i = 0; i < c->n; i++) {
        int32_t *lacking = &c->lacking[cell_of(c, i)];
        if (eligible(c, i) && *lacking < c->options.cell_min)
            ++*lacking;
    }
    for (size_t i = 0; i < c->n; i++) {
        int32_t *lacking = &c->lacking[cell_of(c, i)];
        if (kvc_bit(c->forced, i) && *lacking > 0)
            --*lacking;
    }
    for (size_t i = 0; i < c->n; i++)
        all += (size_t)c->lacking[i];
    return all;
}

/* Makes the cells large enough for the floor to fit into what the forced tokens leave. */
static void settle_cells(struct choice *c)
{
    const size_t n_rows = (size_t)c->grid->n_rows, n_cols = (size_t)c->grid->n_cols;
    const size_t room = c->keep - c->n_chosen;

    if (c->options.cell_min == 0)
        return;
    c->cell_rows = (size_t)c->options.cell_rows < n_rows ? (size_t)c->options.cell_rows : n_rows;
    c->cell_cols = (size_t)c->options.cell_cols < n_cols ? (size_t)c->options.cell_cols : n_cols;
    while (count_lacking(c) > room) {
        if (c->cell_rows == 1 && c->cell_cols == 1) {
            c->cell_rows = c->cell_cols = 0;
            return;
        }
        c->cell_rows = (c->cell_rows + 1) / 2;
        c->cell_cols = (c->cell_cols + 1) / 2;
    }
}

/* The best token of a cell by its score alone; one is left. */
static size_t best_of_cell(const struct choice *c, size_t cell)
{
    size_t best = c->n;
    for (size_t i = 0; i < c->n; i++)
        if (left(c, i) && cell_of(c, i) == cell && (best == c->n || c->scores[i] > c->scores[best]))
            best = i;
    return best;
}

static kvc_status cover_cells(struct choice *c)
{
    const size_t n_cells = (size_t)c->grid->n_frames * c->cell_rows * c->cell_cols;
    for (size_t cell = 0; cell < n_cells; cell++)
        for (; c->lacking[cell] > 0; c->lacking[cell]--)
            KVC_TRY(choose(c, best_of_cell(c, cell)));
    return KVC_OK;
}

/* The best token by score and distance to those chosen; one is left. */
static size_t best_of_all(const struct choice *c)
{
    size_t best = c->n;
    float most = 0.0f;
    for (size_t i = 0; i < c->n; i++) {
        if (!left(c, i))
            continue;
        const float value = c->scores[i] * (1.0f - c->options.diversity * c->nearest[i]);
        if (best == c->n || value > most) {
            best = i;
            most = value;
        }
    }
    return best;
}

static kvc_status choose_all(struct choice *c)
{
    memset(c->chosen, 0, c->n * sizeof(*c->chosen));
    memset(c->nearest, 0, c->n * sizeof(*c->nearest));
    if (c->features)
        KVC_TRY(load_features(c));
    for (size_t i = 0; i < c->n; i++)
        if (kvc_bit(c->forced, i))
            KVC_TRY(choose(c, i));
    settle_cells(c);
    KVC_TRY(cover_cells(c));
    while (c->n_chosen < c->keep)
        KVC_TRY(choose(c, best_of_all(c)));
    return KVC_OK;
}

kvc_status kvc_choose_tokens(kvc_ctx *ctx, const float *scores, const kvc_view *features,
                             const kvc_grid *grid, const uint64_t *forced, size_t keep,
                             const kvc_choose_options *options, int32_t *tokens, size_t *n,
                             int32_t *order, void *ws, size_t ws_size)
{
    struct choice c = {.ctx = ctx, .scores = scores, .grid = grid, .forced = forced, .keep = keep};

    KVC_TRY(kvc_grid_tokens(grid, &c.n));
    KVC_TRY(take_options(options, &c.options));
    KVC_CHECK(ctx && n, KVC_E_ARG);
    KVC_CHECK(!features ||
                  (kvc_view_ok(features) && features->n_heads == 1 && features->n_tokens == c.n),
              KVC_E_ARG);
    if (c.n > 0) {
        KVC_CHECK(scores && (tokens || keep == 0), KVC_E_ARG);
        KVC_TRY(check_tokens(&c));
        if (features && c.options.diversity > 0.0f)
            c.features = features;
        const size_t need = carve(ws, &c, c.features ? features->head_dim : 0);
        KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
        KVC_TRY(choose_all(&c));
    }
    *n = 0;
    for (size_t i = 0; i < c.n; i++)
        if (c.chosen[i])
            tokens[(*n)++] = (int32_t)i;
    for (size_t i = 0; i < *n && order; i++)
        order[i] = c.order[i];
    return KVC_OK;
}
