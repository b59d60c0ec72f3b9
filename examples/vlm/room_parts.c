/* Parts of an examination room: the scores of patches, and the bytes and rows of a cache. */
#include "room_parts.h"

#include <math.h>
#include <string.h>

#include <kvc/score.h>

#include "random.h"

enum { FOR_RANDOM_SCORES = 2000 };

bool room_check(kvc_status status, const char *what, struct failure *failure)
{
    return status == KVC_OK || fail_with(failure, "%s: %s", what, kvc_status_str(status));
}

static kvc_grid grid_of(const struct exam_room *room)
{
    return kvc_grid_image(room->item->picture.grid, room->item->picture.grid);
}

static bool score_texture(struct exam_room *room, float *out, struct failure *failure)
{
    static const int of_red = 77, of_green = 150, of_blue = 29; /* Rec. 601, of 256 */
    const struct picture *picture = &room->item->picture;
    const size_t side = PATCH * (size_t)picture->grid;
    const kvc_grid grid = grid_of(room);
    uint8_t *luma = room->ws;

    for (size_t i = 0; i < side * side; i++) {
        const uint8_t *rgb = picture->rgb + 3 * i;
        luma[i] = (uint8_t)((of_red * rgb[0] + of_green * rgb[1] + of_blue * rgb[2]) / 256);
    }
    return room_check(kvc_score_texture(luma, side, side, side, &grid, out), "texture", failure);
}

/* As KVC_SCOPE_SHARED does: each layer counts alike, whatever its heads give the text. */
static bool score_article(struct exam_room *room, float *out, struct failure *failure)
{
    const struct model_shape *s = &room->p.vlm->model.shape;
    const size_t n = (size_t)room->n_cells;
    const size_t first = s->n_layers > ARTICLE_LAYERS ? s->n_layers - ARTICLE_LAYERS : 0;
    float scores[MAX_ROWS];
    double sums[MAX_CELLS];

    memset(out, 0, n * sizeof(*out));
    for (size_t layer = first; layer < s->n_layers; layer++) {
        double sum = 0.0;
        memset(sums, 0, n * sizeof(*sums));
        for (size_t head = 0; head < s->n_kv_heads; head++) {
            size_t n_rows;
            if (!room_check(kvc_seq_score_rows(room->cache, room->asked, (int32_t)layer,
                                               (int32_t)head, MAX_ROWS, scores, &n_rows),
                            "scoring", failure))
                return false;
            for (size_t i = 0; i < n; i++) {
                sums[i] += (double)scores[N_PREFIX + i];
                sum += (double)scores[N_PREFIX + i];
            }
        }
        for (size_t i = 0; i < n && sum > 0.0; i++)
            out[i] += (float)(sums[i] * (double)n / sum);
    }
    return true;
}

static bool score_soft(struct exam_room *room, float *out, struct failure *failure)
{
    const kvc_grid grid = grid_of(room);
    kvc_refine_options options;

    kvc_refine_options_default(&options);
    options.temperature = room->soft.temperature;
    options.centre = room->soft.centre;
    options.texture = room->soft.texture;
    return room_score(room, SCORE_TEXTURE, failure) && score_article(room, out, failure) &&
           room_check(kvc_score_refine(out, &grid, room->scores[SCORE_TEXTURE] + N_PREFIX, &options,
                                       out, NULL),
                      "refining scores", failure);
}

static bool score_learned(struct exam_room *room, float *out, struct failure *failure)
{
    const kvc_grid grid = grid_of(room);
    const kvc_view x = kvc_view_packed(room->reader.rows, KVC_DTYPE_F32, (size_t)room->n_cells, 1,
                                       room->p.vlm->model.shape.n_embd);

    if (!room->scorer)
        return fail_with(failure, "there is no learned scorer");
    return room_check(
        kvc_scorer_apply(room->reader.ctx, room->scorer, &x, &grid, out, room->ws, room->ws_size),
        "the learned scorer", failure);
}

static void score_centre(const struct exam_room *room, float *out)
{
    const int grid = room->item->picture.grid;
    const float middle = 0.5f * (float)(grid - 1), scale = 2.0f / (float)grid;

    for (int cell = 0; cell < room->n_cells; cell++) {
        const int row = cell / grid, column = cell % grid;
        const float dy = scale * ((float)row - middle), dx = scale * ((float)column - middle);
        out[cell] = expf(-(dx * dx + dy * dy));
    }
}

static void score_random(const struct exam_room *room, float *out)
{
    struct draws draws = draws_of(room->number, FOR_RANDOM_SCORES);

    for (int cell = 0; cell < room->n_cells; cell++)
        out[cell] = draw_between(&draws, 0.0f, 1.0f);
}

bool room_score(struct exam_room *room, enum score_kind kind, struct failure *failure)
{
    float *out = room->scores[kind] + N_PREFIX;
    bool ok = true;

    if (room->has_scores[kind])
        return true;
    room->scores[kind][0] = room->scores[kind][1] = 0.0f;
    switch (kind) {
    case SCORE_SOFT: ok = score_soft(room, out, failure); break;
    case SCORE_LEARNED: ok = score_learned(room, out, failure); break;
    case SCORE_TEXTURE: ok = score_texture(room, out, failure); break;
    case SCORE_CENTRE: score_centre(room, out); break;
    case SCORE_RANDOM: score_random(room, out); break;
    default: return fail_with(failure, "%s: the cache scores itself", score_name(kind));
    }
    room->has_scores[kind] = ok;
    return ok;
}

/* Bytes of one side of one row, and those that a page has once whatever its rows. */
static void side_bytes(kvc_format format, kvc_scale scale, size_t dim, double *row, double *page)
{
    enum { HALF = 2, FLOAT = 4 };

    *page = 0.0;
    switch (format) {
    case KVC_INT8: *row = (double)dim; break;
    case KVC_INT4: *row = (double)dim / 2.0; break;
    default: *row = HALF * (double)dim; return;
    }
    switch (scale) {
    case KVC_SCALE_TOKEN: *row += HALF; break;
    case KVC_SCALE_CHANNEL: *page = 2.0 * HALF * (double)dim; break;
    default: *page = FLOAT; break;
    }
}

static bool measure_pages(struct exam_room *room, kvc_cache *cache, kvc_seq seq, int32_t layer,
                          int32_t head, struct outcome *out, struct failure *failure)
{
    const size_t dim = room->p.vlm->model.shape.head_dim;
    const int64_t n_pages = kvc_seq_n_pages(cache, seq, layer, head);

    for (int64_t page = 0; page < n_pages; page++) {
        kvc_page_info info = {.struct_size = sizeof(info)};
        double k_row, k_page, v_row, v_page;
        if (!room_check(kvc_seq_read_page(cache, seq, layer, head, page, &info, NULL, NULL, 0),
                        "reading a page", failure))
            return false;
        const double n = (double)__builtin_popcountll(info.live);
        side_bytes(info.precision.k, info.precision.k_scale, dim, &k_row, &k_page);
        side_bytes(info.precision.v, info.precision.v_scale, dim, &v_row, &v_page);
        out->rows += n;
        out->cache_bytes += n * (k_row + v_row) + k_page + v_page;
        out->page_bytes += (double)info.n_bytes;
    }
    return true;
}

bool room_measure(struct exam_room *room, kvc_cache *cache, kvc_seq seq, struct outcome *out,
                  struct failure *failure)
{
    const struct model_shape *s = &room->p.vlm->model.shape;
    int32_t sizes[MAX_ROWS];
    size_t n;

    out->rows = out->cache_bytes = out->page_bytes = 0.0;
    for (int32_t layer = 0; layer < (int32_t)s->n_layers; layer++)
        for (int32_t head = 0; head < (int32_t)s->n_kv_heads; head++) {
            if (!measure_pages(room, cache, seq, layer, head, out, failure) ||
                !room_check(kvc_seq_read_groups(cache, seq, layer, head, MAX_ROWS, NULL, sizes, &n),
                            "reading merged rows", failure))
                return false;
            for (size_t i = 0; i < n; i++)
                out->cache_bytes += sizes[i] > 1 ? (double)sizeof(float) : 0.0; /* its bias */
        }
    out->rows /= (double)(s->n_layers * s->n_kv_heads);
    return true;
}

/* The rows of a layer in the caller's memory, a head behind the other. */
static bool copy_layer(struct exam_room *room, kvc_seq from, int32_t layer, size_t n,
                       kvc_cache *cache, kvc_seq to, struct failure *failure)
{
    const struct model_shape *s = &room->p.vlm->model.shape;
    const size_t stride = MAX_ROWS * s->head_dim;

    for (size_t head = 0; head < s->n_kv_heads; head++) {
        size_t n_rows;
        if (!room_check(kvc_seq_read_rows(room->cache, from, layer, (int32_t)head, MAX_ROWS, NULL,
                                          room->keys + head * stride, room->values + head * stride,
                                          NULL, &n_rows),
                        "reading rows", failure))
            return false;
        if (n_rows != n)
            return fail_with(failure, "heads have %zu and %zu rows: they should share", n_rows, n);
    }
    kvc_view k = kvc_view_packed(room->keys, KVC_DTYPE_F32, n, s->n_kv_heads, s->head_dim);
    kvc_view v = kvc_view_packed(room->values, KVC_DTYPE_F32, n, s->n_kv_heads, s->head_dim);
    k.token_stride = v.token_stride = s->head_dim;
    k.head_stride = v.head_stride = stride;
    return room_check(kvc_append(cache, to, layer, &k, &v), "appending rows", failure);
}

bool room_copy_rows(struct exam_room *room, kvc_seq from, kvc_cache *cache, kvc_seq *out,
                    struct failure *failure)
{
    const size_t n_layers = room->p.vlm->model.shape.n_layers;
    const size_t n = (size_t)kvc_seq_n_rows(room->cache, from, 0, 0);
    int64_t ordinals[MAX_ROWS];
    kvc_token facts[MAX_ROWS];
    size_t n_rows;

    if (!room_check(kvc_seq_read_rows(room->cache, from, 0, 0, MAX_ROWS, ordinals, NULL, NULL, NULL,
                                      &n_rows),
                    "reading rows", failure) ||
        !room_check(kvc_seq_create(cache, out), "creating a sequence", failure))
        return false;
    for (size_t i = 0; i < n_rows; i++)
        facts[i] = room->facts[ordinals[i]];
    if (!room_check(kvc_seq_hold(cache, *out), "holding", failure) ||
        !room_check(kvc_tokens_add(cache, *out, facts, n), "announcing rows", failure))
        return false;
    for (size_t layer = 0; layer < n_layers; layer++)
        if (!copy_layer(room, from, (int32_t)layer, n, cache, *out, failure))
            return false;
    return true;
}
