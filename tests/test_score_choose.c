/* Which tokens are chosen, and the texture of an image. */
#include <math.h>
#include <string.h>

#include "kvc/score.h"
#include "support/guard.h"
#include "support/rng.h"
#include "support/tables.h"

enum { WS = 1 << 20 };

static _Alignas(64) unsigned char ws[WS];

/* The input of the printed reference numbers (G2); cells of two tokens. */
static const float g2_scores[6] = {1, .95f, .60f, .55f, .50f, .10f};
static float g2_features[6][2] = {{1, 0}, {.99f, .14f}, {0, 1}, {.1f, .99f}, {.7f, .7f}, {-1, 0}};

static kvc_choose_options choose_options(float diversity, int32_t cell_min)
{
    kvc_choose_options o;

    kvc_choose_options_default(&o);
    o.diversity = diversity;
    o.cell_min = cell_min;
    return o;
}

static void check_g2(kvc_ctx *ctx, size_t keep, float diversity, int32_t cell_min,
                     const int32_t *want)
{
    const kvc_view features = kvc_view_packed(g2_features, KVC_DTYPE_F32, 6, 1, 2);
    const kvc_grid grid = kvc_grid_image(3, 2);
    kvc_choose_options o = choose_options(diversity, cell_min);
    int32_t tokens[6], order[6];
    size_t n = 0;

    o.cell_rows = 3;
    o.cell_cols = 1;
    assert_int_equal(kvc_choose_tokens(ctx, g2_scores, &features, &grid, NULL, keep, &o, tokens, &n,
                                       order, ws, WS),
                     KVC_OK);
    assert_int_equal(n, keep);
    assert_memory_equal(order, want, keep * sizeof(*want));
}

static void default_options_set_every_field(void **state)
{
    kvc_choose_options o;

    (void)state;
    memset(&o, 0xFF, sizeof(o));
    kvc_choose_options_default(&o);
    assert_int_equal(o.struct_size, sizeof(o));
    assert_true(o.diversity == 0.5f && o.cell_rows == 4 && o.cell_cols == 4 && o.cell_min == 1);
    assert_true(!o.excluded);
    kvc_choose_options_default(NULL);
}

static void reference_numbers_are_met(void **state)
{
    const struct tables *t = *state;

    for (size_t i = 0; i < t->n; i++) {
        check_g2(t->ctx[i], 3, 0.0f, 0, (const int32_t[]){0, 1, 2});
        check_g2(t->ctx[i], 3, 0.5f, 0, (const int32_t[]){0, 2, 1});
        check_g2(t->ctx[i], 4, 0.5f, 0, (const int32_t[]){0, 2, 1, 4});
        check_g2(t->ctx[i], 3, 1.0f, 0, (const int32_t[]){0, 2, 4});
        check_g2(t->ctx[i], 4, 0.5f, 1, (const int32_t[]){0, 2, 4, 1});
        check_g2(t->ctx[i], 4, 0.0f, 0, (const int32_t[]){0, 1, 2, 3});
    }
}

static void without_features_the_highest_scores_win_and_ties_go_to_the_lower_index(void **state)
{
    static const float scores[5] = {1, 2, 5, 4, 5};
    const kvc_grid grid = kvc_grid_image(1, 5);
    const kvc_choose_options o = choose_options(0.5f, 0);
    int32_t tokens[5] = {9, 9, 9, 9, 9}, order[5];
    size_t n = 0;

    assert_int_equal(
        kvc_choose_tokens(best(state), scores, NULL, &grid, NULL, 1, &o, tokens, &n, NULL, ws, WS),
        KVC_OK);
    assert_true(n == 1 && tokens[0] == 2 && tokens[1] == 9);
    assert_int_equal(
        kvc_choose_tokens(best(state), scores, NULL, &grid, NULL, 3, &o, tokens, &n, order, ws, WS),
        KVC_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(tokens, ((const int32_t[]){2, 3, 4}), 3 * sizeof(int32_t));
    assert_memory_equal(order, ((const int32_t[]){2, 4, 3}), 3 * sizeof(int32_t));
}

static void nan_and_excluded_tokens_are_never_chosen(void **state)
{
    static const float scores[6] = {NAN, 3, 0, 2, NAN, 9};
    static const uint64_t excluded = 1u << 5, forced = 1u << 4, both = 1u << 5 | 1u << 4;
    float x[6][2] = {{NAN, 1}, {1, 0}, {0, 0}, {0, 1}, {1, 1}, {INFINITY, 0}};
    const kvc_view features = kvc_view_packed(x, KVC_DTYPE_F32, 6, 1, 2);
    const kvc_grid grid = kvc_grid_image(2, 3);
    kvc_choose_options o = choose_options(0.5f, 1);
    int32_t tokens[6];
    size_t n = 0;

    o.excluded = &excluded;
    assert_int_equal(kvc_choose_tokens(best(state), scores, &features, &grid, NULL, 6, &o, tokens,
                                       &n, NULL, ws, WS),
                     KVC_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(tokens, ((const int32_t[]){1, 2, 3}), 3 * sizeof(int32_t));
    assert_int_equal(kvc_choose_tokens(best(state), scores, &features, &grid, &forced, 2, &o,
                                       tokens, &n, NULL, ws, WS),
                     KVC_OK);
    assert_int_equal(n, 2); /* 4 covers the left cell, 2 is what the right one has */
    assert_memory_equal(tokens, ((const int32_t[]){2, 4}), 2 * sizeof(int32_t));
    assert_int_equal(kvc_choose_tokens(best(state), scores, &features, &grid, &both, 6, &o, tokens,
                                       &n, NULL, ws, WS),
                     KVC_E_ARG);
}

/* fault A2: five tiles of 576 tokens, 640 wanted of each: 576, and separators are not in the grid.
 */
static void more_tokens_than_there_are_is_all_of_them(void **state)
{
    const kvc_grid tile = kvc_grid_image(24, 24);
    float scores[576];
    int32_t tokens[576];
    size_t n = 0;

    for (size_t i = 0; i < 576; i++) {
        scores[i] = (float)(i % 7);
    }
    assert_int_equal(kvc_choose_tokens(best(state), scores, NULL, &tile, NULL, 640, NULL, tokens,
                                       &n, NULL, ws, WS),
                     KVC_OK);
    assert_int_equal(n, 576);
    for (int32_t i = 0; i < 576; i++) {
        assert_int_equal(tokens[i], i);
    }
}

static size_t count_bits(const uint64_t *bits, size_t n)
{
    size_t count = 0;

    for (size_t i = 0; i < n; i++) {
        count += bits[i / 64] >> i % 64 & 1;
    }
    return count;
}

/* Tokens of each cell, and the chosen ones of them. */
static void count_cells(const kvc_grid *grid, size_t cy, size_t cx, const int32_t *tokens, size_t n,
                        size_t *cells)
{
    const size_t w = (size_t)grid->n_cols, h = (size_t)grid->n_rows;

    memset(cells, 0, (size_t)grid->n_frames * cy * cx * sizeof(*cells));
    for (size_t i = 0; i < n; i++) {
        const size_t t = (size_t)tokens[i], x = t % w, y = t / w % h, f = t / w / h;

        cells[(f * cy + y * cy / h) * cx + x * cx / w]++;
    }
}

static void the_size_is_exact_the_forced_are_kept_and_every_cell_is_covered(void **state)
{
    enum { SIDE = 12, MAX = SIDE * SIDE * 2, DIM = 5 };
    static float scores[MAX], x[MAX][DIM];
    const struct tables *t = *state;
    uint64_t rng = 9;

    for (size_t round = 0; round < 300; round++) {
        kvc_grid grid =
            kvc_grid_image(1 + (int32_t)rng_below(&rng, SIDE), 1 + (int32_t)rng_below(&rng, SIDE));
        uint64_t forced[MAX / 64 + 1] = {0};
        int32_t tokens[MAX_TABLES][MAX], order[MAX_TABLES][MAX];
        size_t n_all = 0, n = 0, cells[MAX];

        grid.n_frames = 1 + (int32_t)rng_below(&rng, 2);
        assert_int_equal(kvc_grid_tokens(&grid, &n_all), KVC_OK);
        for (size_t i = 0; i < n_all; i++) {
            scores[i] = (float)rng_below(&rng, 5) / 4.0f;
            for (size_t c = 0; c < DIM; c++) {
                x[i][c] = rng_below(&rng, 8) == 0 ? 0.0f : rng_unit(&rng);
            }
            forced[i / 64] |= (uint64_t)(rng_below(&rng, 16) == 0) << i % 64;
        }
        const size_t n_forced = count_bits(forced, n_all);
        const size_t keep = n_forced + rng_below(&rng, n_all - n_forced + 1);
        const kvc_view features = kvc_view_packed(x, KVC_DTYPE_F32, n_all, 1, DIM);
        const bool use = rng_below(&rng, 4) != 0;

        for (size_t i = 0; i < t->n; i++) {
            n = SIZE_MAX;
            assert_int_equal(kvc_choose_tokens(t->ctx[i], scores, use ? &features : NULL, &grid,
                                               forced, keep, NULL, tokens[i], &n, order[i], ws, WS),
                             KVC_OK);
            assert_int_equal(n, keep);
            assert_memory_equal(order[i], order[0], n * sizeof(int32_t));
            assert_memory_equal(tokens[i], tokens[0], n * sizeof(int32_t));
        }
        for (size_t i = 0; i < n; i++) {
            assert_true(i == 0 || tokens[0][i - 1] < tokens[0][i]);
            forced[tokens[0][i] / 64] &= ~(UINT64_C(1) << tokens[0][i] % 64);
        }
        assert_int_equal(count_bits(forced, n_all), 0);
        size_t cy = grid.n_rows < 4 ? (size_t)grid.n_rows : 4;
        size_t cx = grid.n_cols < 4 ? (size_t)grid.n_cols : 4;
        /* the least that is promised: forced tokens cover nothing */
        while ((size_t)grid.n_frames * cy * cx + n_forced > keep && cy * cx > 1) {
            cy = (cy + 1) / 2;
            cx = (cx + 1) / 2;
        }
        count_cells(&grid, cy, cx, tokens[0], n, cells);
        for (size_t i = 0; i < (size_t)grid.n_frames * cy * cx; i++) {
            assert_true(cells[i] >= 1 || (size_t)grid.n_frames + n_forced > keep);
        }
    }
}

/* Each corner of 4 x 4 tokens has scores of its own; all of the best lie in one of them. */
static void the_cells_are_halved_until_the_floor_fits(void **state)
{
    static const struct {
        size_t keep;
        size_t corners[4]; /* of 2 x 2 cells */
    } cases[] = {{4, {1, 1, 1, 1}}, {3, {3, 0, 0, 0}}, {5, {2, 1, 1, 1}}};
    const kvc_grid grid = kvc_grid_image(4, 4);
    float scores[16];
    int32_t tokens[16];
    size_t n = 0, cells[4];

    for (size_t i = 0; i < 16; i++) {
        scores[i] = i % 4 < 2 && i < 8 ? 1.0f : 0.01f;
    }
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(kvc_choose_tokens(best(state), scores, NULL, &grid, NULL, cases[i].keep,
                                           NULL, tokens, &n, NULL, ws, WS),
                         KVC_OK);
        count_cells(&grid, 2, 2, tokens, n, cells);
        assert_memory_equal(cells, cases[i].corners, sizeof(cells));
        if (i == 0) { /* the first of equal ones in each */
            assert_memory_equal(tokens, ((const int32_t[]){0, 2, 8, 10}), 4 * sizeof(int32_t));
        }
    }
    const uint64_t forced = 1u << 0 | 1u << 1 | 1u << 4; /* three in one cell count as its floor */
    assert_int_equal(kvc_choose_tokens(best(state), scores, NULL, &grid, &forced, 6, NULL, tokens,
                                       &n, NULL, ws, WS),
                     KVC_OK);
    count_cells(&grid, 2, 2, tokens, n, cells);
    assert_memory_equal(cells, ((const size_t[]){3, 1, 1, 1}), sizeof(cells));
}

static void wrong_arguments_of_the_choice_are_refused(void **state)
{
    float scores[6], x[12] = {1};
    const kvc_view good = kvc_view_packed(x, KVC_DTYPE_F32, 6, 1, 2);
    kvc_view bad = good;
    const kvc_grid grid = kvc_grid_image(3, 2), none = kvc_grid_image(0, 5);
    const uint64_t forced = 7;
    kvc_choose_options o = choose_options(0.5f, 1);
    kvc_ctx *ctx = best(state);
    int32_t tokens[6] = {9};
    size_t n = 9, size;

    memcpy(scores, g2_scores, sizeof(scores));
#define CHOOSE(scores, features, grid, forced, keep, options, tokens, n, ws, size)                 \
    kvc_choose_tokens(ctx, scores, features, grid, forced, keep, options, tokens, n, NULL, ws, size)
    assert_int_equal(kvc_choose_tokens_workspace_size(&grid, 2, &size), KVC_OK);
    assert_int_equal(kvc_choose_tokens_workspace_size(&grid, SIZE_MAX, &size), KVC_E_ARG);
    assert_int_equal(kvc_choose_tokens_workspace_size(NULL, 2, &size), KVC_E_ARG);
    assert_int_equal(CHOOSE(NULL, &good, &grid, NULL, 3, &o, tokens, &n, ws, WS), KVC_E_ARG);
    assert_int_equal(CHOOSE(scores, &good, NULL, NULL, 3, &o, tokens, &n, ws, WS), KVC_E_ARG);
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, &o, NULL, &n, ws, WS), KVC_E_ARG);
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, &o, tokens, NULL, ws, WS), KVC_E_ARG);
    assert_int_equal(CHOOSE(scores, &good, &grid, &forced, 2, &o, tokens, &n, ws, WS), KVC_E_ARG);
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, &o, tokens, &n, NULL, WS),
                     KVC_E_WORKSPACE);
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, &o, tokens, &n, ws, size - 1),
                     KVC_E_WORKSPACE);
    bad.n_tokens = 5;
    assert_int_equal(CHOOSE(scores, &bad, &grid, NULL, 3, &o, tokens, &n, ws, WS), KVC_E_ARG);
    o.diversity = 1.5f;
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, &o, tokens, &n, ws, WS), KVC_E_ARG);
    o.diversity = NAN;
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, &o, tokens, &n, ws, WS), KVC_E_ARG);
    o = choose_options(0.5f, 1);
    o.cell_rows = 0;
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, &o, tokens, &n, ws, WS), KVC_E_ARG);
    o = choose_options(0.5f, -1);
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, &o, tokens, &n, ws, WS), KVC_E_ARG);
    scores[5] = INFINITY;
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, NULL, tokens, &n, ws, WS),
                     KVC_E_NONFINITE);
    scores[5] = -1.0f;
    assert_int_equal(CHOOSE(scores, &good, &grid, NULL, 3, NULL, tokens, &n, ws, WS), KVC_E_ARG);
    x[11] = NAN;
    assert_int_equal(CHOOSE(g2_scores, &good, &grid, NULL, 3, NULL, tokens, &n, ws, WS),
                     KVC_E_NONFINITE);
    assert_true(n == 9 && tokens[0] == 9);
    assert_int_equal(CHOOSE(g2_scores, NULL, &grid, NULL, 0, NULL, NULL, &n, ws, WS), KVC_OK);
    assert_int_equal(n, 0);
    n = 9;
    assert_int_equal(CHOOSE(NULL, NULL, &none, NULL, 3, NULL, NULL, &n, NULL, 0), KVC_OK);
    assert_int_equal(n, 0);
#undef CHOOSE
}

static void texture_of_pixels_is_the_mean_laplacian(void **state)
{
    /* Two frames of 4 x 6 pixels in rows of 7, tokens of 2 x 2 pixels; d: a pixel above the rest.
     * Inside, it has 4 d and each of its four neighbours d; two of these are in its own token. In a
     * corner two neighbours are itself: 2 d, and d in two neighbours of its own token. */
    static const float want[12] = {1, 40 / 240.f, 0, 40 / 240.f, 0, 0, 0, 0, 0, 0, 0, 120 / 240.f};
    uint8_t luma[2][4][7];
    kvc_grid grid = kvc_grid_image(2, 3);
    float texture[12];

    (void)state;
    memset(luma, 10, sizeof(luma));
    luma[0][1][1] = 50;
    luma[1][3][5] = 40;
    grid.n_frames = 2;
    assert_int_equal(kvc_score_texture(luma[0][0], 6, 4, 7, &grid, texture), KVC_OK);
    for (size_t i = 0; i < 12; i++) {
        assert_true(fabsf(texture[i] - want[i]) <= 1e-6f);
    }
    memset(luma, 255, sizeof(luma));
    assert_int_equal(kvc_score_texture(luma[0][0], 6, 4, 7, &grid, texture), KVC_OK);
    for (size_t i = 0; i < 12; i++) {
        assert_true(texture[i] == 0.0f);
    }
}

static void wrong_images_are_refused(void **state)
{
    const kvc_grid grid = kvc_grid_image(2, 3);
    kvc_grid many = grid;
    uint8_t luma[24] = {0};
    float texture[6] = {7};

    (void)state;
    many.n_frames = INT32_MAX / 6;
    assert_int_equal(kvc_score_texture(luma, 6, 4, SIZE_MAX / 1024, &many, texture), KVC_E_ARG);
    assert_int_equal(kvc_score_texture(luma, 2, 4, 6, &grid, texture), KVC_E_ARG);
    assert_int_equal(kvc_score_texture(luma, 6, 1, 6, &grid, texture), KVC_E_ARG);
    assert_int_equal(kvc_score_texture(luma, 6, 4, 5, &grid, texture), KVC_E_ARG);
    assert_int_equal(kvc_score_texture(NULL, 6, 4, 6, &grid, texture), KVC_E_ARG);
    assert_int_equal(kvc_score_texture(luma, 6, 4, 6, NULL, texture), KVC_E_ARG);
    assert_int_equal(kvc_score_texture(luma, 6, 4, 6, &grid, NULL), KVC_E_ARG);
    assert_true(texture[0] == 7.0f);
}

static void texture_of_embeddings_is_the_distance_to_the_neighbours(void **state)
{
    enum { ROWS = 3, COLS = 4, N = 2 * ROWS * COLS, DIM = 19 };
    const struct tables *t = *state;
    static float x[N][DIM];
    float first[N], texture[N];
    double want[N], max = 0.0;
    const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, N, 1, DIM);
    kvc_grid grid = kvc_grid_image(ROWS, COLS);
    uint64_t rng = 10;
    size_t size;

    grid.n_frames = 2;
    for (size_t i = 0; i < N; i++) {
        for (size_t c = 0; c < DIM; c++) {
            x[i][c] = rng_unit(&rng);
        }
    }
    for (int i = 0; i < N; i++) {
        const int col = i % COLS, row = i / COLS % ROWS;
        double square = 0.0;

        for (int c = 0; c < DIM; c++) {
            double sum = 0.0, n = 0.0;

            for (int d = 0; d < 4; d++) {
                const int dy = d == 0 ? -1 : d == 1, dx = d == 2 ? -1 : d == 3;

                if (row + dy >= 0 && row + dy < ROWS && col + dx >= 0 && col + dx < COLS) {
                    sum += (double)x[i + dy * COLS + dx][c];
                    n += 1.0;
                }
            }
            square += pow((double)x[i][c] - sum / n, 2.0);
        }
        want[i] = sqrt(square);
        max = fmax(max, want[i]);
    }
    assert_int_equal(kvc_score_texture_embeddings_workspace_size(&grid, DIM, &size), KVC_OK);
    for (size_t k = 0; k < t->n; k++) {
        assert_int_equal(kvc_score_texture_embeddings(t->ctx[k], &view, &grid, texture, ws, size),
                         KVC_OK);
        for (size_t i = 0; i < N; i++) {
            assert_true(fabs((double)texture[i] - want[i] / max) <= 1e-5);
        }
        if (k == 0) {
            memcpy(first, texture, sizeof(first));
        }
        assert_memory_equal(texture, first, sizeof(first));
    }
    for (size_t i = 0; i < N; i++) {
        memcpy(x[i], x[0], sizeof(x[0]));
    }
    assert_int_equal(kvc_score_texture_embeddings(best(state), &view, &grid, texture, ws, size),
                     KVC_OK);
    for (size_t i = 0; i < N; i++) {
        assert_true(texture[i] == 0.0f);
    }
    texture[0] = 7.0f;
    x[N - 1][DIM - 1] = NAN;
    assert_int_equal(kvc_score_texture_embeddings(best(state), &view, &grid, texture, ws, size),
                     KVC_E_NONFINITE);
    assert_int_equal(kvc_score_texture_embeddings(best(state), &view, &grid, texture, ws, size - 1),
                     KVC_E_WORKSPACE);
    grid.n_frames = 1;
    assert_int_equal(kvc_score_texture_embeddings(best(state), &view, &grid, texture, ws, size),
                     KVC_E_ARG);
    assert_true(texture[0] == 7.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_options_set_every_field),
        cmocka_unit_test(reference_numbers_are_met),
        cmocka_unit_test(without_features_the_highest_scores_win_and_ties_go_to_the_lower_index),
        cmocka_unit_test(nan_and_excluded_tokens_are_never_chosen),
        cmocka_unit_test(more_tokens_than_there_are_is_all_of_them),
        cmocka_unit_test(the_size_is_exact_the_forced_are_kept_and_every_cell_is_covered),
        cmocka_unit_test(the_cells_are_halved_until_the_floor_fits),
        cmocka_unit_test(wrong_arguments_of_the_choice_are_refused),
        cmocka_unit_test(texture_of_pixels_is_the_mean_laplacian),
        cmocka_unit_test(wrong_images_are_refused),
        cmocka_unit_test(texture_of_embeddings_is_the_distance_to_the_neighbours),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
