/* Moving rows, the map from old rows to new ones, and segments of a pruned prompt. */
#include <math.h>
#include <string.h>

#include "kvc/prune.h"

#include "support/rng.h"
#include "support/select.h"
#include "support/tables.h"

enum { MAX_TOKENS = 40, MAX_ELEMENTS = 8192 };

/* Bytes of element (t, h, d) lie here in units of elements. */
static size_t element(const kvc_view *v, size_t t, size_t h, size_t d)
{
    return t * v->token_stride + h * v->head_stride + d;
}

static size_t element_size(const kvc_view *v)
{
    return v->dtype == KVC_DTYPE_F32 ? 4 : 2;
}

/* Tokens outside, heads outside, or heads inside with gaps. */
static kvc_view random_layout(uint64_t *rng, void *data)
{
    kvc_view v = kvc_view_packed(data, (kvc_dtype)rng_below(rng, 3), rng_below(rng, MAX_TOKENS + 1),
                                 1 + rng_below(rng, 3), 1 + rng_below(rng, 40));
    const size_t layout = rng_below(rng, 3);

    if (layout == 1) {
        v.token_stride = v.head_dim + rng_below(rng, 3);
        v.head_stride = (MAX_TOKENS + 1) * v.token_stride;
    } else if (layout == 2) {
        v.head_stride = v.head_dim + rng_below(rng, 3);
        v.token_stride = v.n_heads * v.head_stride + rng_below(rng, 3);
    }
    return v;
}

/* Ascending rows, each kept with an even chance. */
static size_t random_rows(uint64_t *rng, size_t n, int32_t *rows)
{
    size_t n_rows = 0;

    for (size_t i = 0; i < n; i++) {
        if (rng_below(rng, 2)) {
            rows[n_rows++] = (int32_t)i;
        }
    }
    return n_rows;
}

/* Every kept row is at its new place; what belongs to no row of the view is as it was. */
static void check_pruned(const kvc_view *v, const unsigned char *before, const int32_t *rows,
                         size_t n_rows)
{
    const unsigned char *after = v->data;
    const size_t size = element_size(v);
    bool owned[MAX_ELEMENTS] = {false};

    for (size_t t = 0; t < v->n_tokens; t++) {
        for (size_t h = 0; h < v->n_heads; h++) {
            for (size_t d = 0; d < v->head_dim; d++) {
                owned[element(v, t, h, d)] = true;
                if (t < n_rows) {
                    const size_t from = element(v, (size_t)rows[t], h, d);
                    assert_memory_equal(after + element(v, t, h, d) * size, before + from * size,
                                        size);
                }
            }
        }
    }
    for (size_t i = 0; i < MAX_ELEMENTS; i++) {
        assert_true(owned[i] || memcmp(after + i * size, before + i * size, size) == 0);
    }
}

static void kept_rows_move_byte_for_byte_in_every_layout(void **state)
{
    static uint32_t data[MAX_ELEMENTS], before[MAX_ELEMENTS];
    const struct tables *tables = *state;
    uint64_t rng = 1;

    for (int draw = 0; draw < 600; draw++) {
        const kvc_view v = random_layout(&rng, data);
        int32_t rows[MAX_TOKENS];
        const size_t n_rows = random_rows(&rng, v.n_tokens, rows);

        for (size_t i = 0; i < MAX_ELEMENTS; i++) {
            before[i] = (uint32_t)rng_next(&rng);
        }
        for (size_t t = 0; t < tables->n; t++) {
            memcpy(data, before, sizeof(data));
            assert_int_equal(kvc_prune_rows(tables->ctx[t], &v, rows, n_rows), KVC_OK);
            check_pruned(&v, (const unsigned char *)before, rows, n_rows);
        }
    }
}

/* fault A3: one of three layers is compacted in place, then once more with the same list. */
static void pruning_twice_changes_nothing(void **state)
{
    enum { LAYERS = 3, ROWS = 10, KEPT = 6, DIM = 4 };
    static const int32_t rows[KEPT] = {0, 2, 3, 5, 8, 9}, identity[KEPT] = {0, 1, 2, 3, 4, 5};
    float layers[LAYERS][ROWS][DIM], once[LAYERS][ROWS][DIM];
    kvc_view v = kvc_view_packed(layers[1], KVC_DTYPE_F32, ROWS, 1, DIM);

    for (int i = 0; i < LAYERS * ROWS * DIM; i++) {
        layers[i / (ROWS * DIM)][i / DIM % ROWS][i % DIM] = (float)i;
    }
    assert_int_equal(kvc_prune_rows(best(state), &v, rows, KEPT), KVC_OK);
    v.n_tokens = KEPT;
    for (int i = 0; i < KEPT; i++) {
        assert_true(layers[1][i][0] == (float)(ROWS * DIM + rows[i] * DIM));
    }
    for (int i = 0; i < ROWS * DIM; i++) {
        assert_true(layers[0][i / DIM][i % DIM] == (float)i);
        assert_true(layers[2][i / DIM][i % DIM] == (float)(2 * ROWS * DIM + i));
    }
    memcpy(once, layers, sizeof(once));
    assert_int_equal(kvc_prune_rows(best(state), &v, rows, KEPT), KVC_E_ARG);
    assert_memory_equal(layers, once, sizeof(once));
    assert_int_equal(kvc_prune_rows(best(state), &v, identity, KEPT), KVC_OK);
    assert_memory_equal(layers, once, sizeof(once));
}

/* fault C8: rows a b c d e f g h j lose c and d, then g by its new row. */
static void a_second_removal_uses_the_map_of_the_first(void **state)
{
    static const int32_t first[7] = {0, 1, 4, 5, 6, 7, 8};
    float names[9] = {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'j'};
    float positions[9] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    kvc_view v = kvc_view_packed(names, KVC_DTYPE_F32, 9, 1, 1);
    kvc_view p = kvc_view_packed(positions, KVC_DTYPE_F32, 9, 1, 1);
    int32_t map[9], map2[7], second[6];
    size_t n = 0;

    assert_int_equal(kvc_prune_map(first, 7, 9, map), KVC_OK);
    assert_int_equal(kvc_prune_rows(best(state), &v, first, 7), KVC_OK);
    assert_int_equal(kvc_prune_rows(best(state), &p, first, 7), KVC_OK);
    v.n_tokens = p.n_tokens = 7;
    assert_int_equal(map[6], 4); /* g */
    for (int32_t i = 0; i < 7; i++) {
        if (i != map[6]) {
            second[n++] = i;
        }
    }
    assert_int_equal(kvc_prune_map(second, n, 7, map2), KVC_OK);
    assert_int_equal(kvc_prune_rows(best(state), &v, second, n), KVC_OK);
    assert_int_equal(kvc_prune_rows(best(state), &p, second, n), KVC_OK);
    for (size_t i = 0; i < 6; i++) {
        assert_true(names[i] == (float)"abefhj"[i]);
        assert_true(positions[i] == (float)((const int[]){0, 1, 4, 5, 7, 8})[i]);
    }
    /* Both maps in their order tell where every old row is. */
    for (size_t i = 0; i < 9; i++) {
        const int32_t row = map[i] < 0 ? -1 : map2[map[i]];
        const bool lost = i == 2 || i == 3 || i == 6;

        assert_true(lost ? row == -1 : positions[row] == (float)i);
    }
}

static void the_map_is_the_inverse_of_the_rows(void **state)
{
    uint64_t rng = 2;

    (void)state;
    for (int draw = 0; draw < 500; draw++) {
        const size_t n = rng_below(&rng, MAX_TOKENS + 1);
        int32_t rows[MAX_TOKENS], map[MAX_TOKENS];
        const size_t n_rows = random_rows(&rng, n, rows);
        size_t next = 0;

        assert_int_equal(kvc_prune_map(rows, n_rows, n, map), KVC_OK);
        for (size_t i = 0; i < n; i++) {
            if (map[i] >= 0) {
                assert_int_equal(map[i], next);
                assert_int_equal(rows[next++], i);
            }
        }
        assert_int_equal(next, n_rows);
    }
}

/* fault A1: the segments of a pruned prompt advance by what was kept. */
static void segments_follow_the_kept_rows(void **state)
{
    static const kvc_segment old[2] = {{2, 8}, {11, 4}}; /* a video of 2x2x2, an image of 2x2 */
    static const int32_t rows[12] = {0, 1, 2, 4, 7, 9, 10, 11, 12, 13, 14, 15};
    kvc_segment now[2];

    (void)state;
    assert_int_equal(kvc_segment_map(old, 2, rows, 12, 16, now), KVC_OK);
    assert_true(now[0].first == 2 && now[0].count == 4);
    assert_true(now[1].first == 7 && now[1].count == 4);
    assert_int_equal(rows[now[1].first], 11);
    /* In place, with nothing left of the video. */
    memcpy(now, old, sizeof(now));
    assert_int_equal(kvc_segment_map(now, 2, rows + 6, 6, 16, now), KVC_OK);
    assert_true(now[0].first == 0 && now[0].count == 0);
    assert_true(now[1].first == 1 && now[1].count == 4);
}

static void segments_hold_exactly_their_rows_on_random_inputs(void **state)
{
    uint64_t rng = 3;

    (void)state;
    for (int draw = 0; draw < 2000; draw++) {
        const size_t n = rng_below(&rng, MAX_TOKENS + 1);
        int32_t rows[MAX_TOKENS];
        const size_t n_rows = random_rows(&rng, n, rows);
        const int32_t first = (int32_t)rng_below(&rng, n + 1);
        const kvc_segment old = {first, (int32_t)rng_below(&rng, n - (size_t)first + 1)};
        kvc_segment now;

        assert_int_equal(kvc_segment_map(&old, 1, rows, n_rows, n, &now), KVC_OK);
        for (int32_t i = 0; i < (int32_t)n_rows; i++) {
            assert_true((rows[i] >= old.first && rows[i] < old.first + old.count) ==
                        (i >= now.first && i < now.first + now.count));
        }
        assert_true(now.count >= 0 && (size_t)(now.first + now.count) <= n_rows);
    }
}

/* fault A2, case (b): five tiles of 576 with a separator behind each, 640 asked of every tile. */
static void a_budget_above_a_tile_keeps_the_tile_and_the_separators(void **state)
{
    enum {
        TILES = 5,
        TILE = 576,
        N = TILES * (TILE + 1),
        HALF = TILES * (TILE / 2 + 1),
        ASKED = 640
    };
    static float scores[N];
    static int32_t rows[N];
    kvc_segment tiles[TILES], now[TILES];
    uint64_t separators[(N + 63) / 64] = {0};
    size_t n_rows = 0;

    (void)state;
    for (int32_t t = 0; t < TILES; t++) {
        tiles[t] = (kvc_segment){t * (TILE + 1), TILE};
    }
    for (size_t i = 0; i < N; i++) {
        scores[i] = (float)(i % 97);
        if (i % (TILE + 1) == TILE) {
            mark_bit(separators, i);
            scores[i] = -INFINITY; /* not prunable: no score, but forced */
        }
    }
    for (int32_t t = 0; t < TILES; t++) {
        const size_t n =
            select_rows(scores + tiles[t].first, TILE, ASKED, NULL, 1, KVC_BLOCK_MEAN, rows);
        assert_int_equal(n, TILE);
    }
    /* All at once, with half of every tile and its separator. */
    n_rows = select_rows(scores, N, HALF, separators, 1, KVC_BLOCK_MEAN, rows);
    assert_int_equal(n_rows, HALF);
    assert_int_equal(kvc_segment_map(tiles, TILES, rows, n_rows, N, now), KVC_OK);
    for (int t = 0; t < TILES; t++) {
        assert_int_equal(rows[now[t].first + now[t].count], tiles[t].first + TILE);
    }
}

static void bad_rows_are_refused_and_nothing_moves(void **state)
{
    static const int32_t bad[][2] = {{-1, 1}, {1, 4}, {2, 2}, {2, 1}, {INT32_MIN, INT32_MAX}};
    const kvc_segment segment = {0, 4};
    const kvc_segment wrong[] = {{-1, 2}, {0, -1}, {0, 5}, {4, 1}, {INT32_MAX, INT32_MAX}};
    float data[4] = {1, 2, 3, 4};
    const float same[4] = {1, 2, 3, 4};
    const int32_t good[2] = {1, 3};
    kvc_view v = kvc_view_packed(data, KVC_DTYPE_F32, 4, 1, 1);
    kvc_segment out = {7, 7};
    int32_t map[4] = {7, 7, 7, 7};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(kvc_prune_rows(best(state), &v, bad[i], 2), KVC_E_ARG);
        assert_int_equal(kvc_prune_map(bad[i], 2, 4, map), KVC_E_ARG);
        assert_int_equal(kvc_segment_map(&segment, 1, bad[i], 2, 4, &out), KVC_E_ARG);
    }
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_int_equal(kvc_segment_map(&wrong[i], 1, good, 2, 4, &out), KVC_E_ARG);
    }
    assert_int_equal(kvc_segment_map(NULL, 1, good, 2, 4, &out), KVC_E_ARG);
    assert_int_equal(kvc_segment_map(&segment, 1, good, 2, 4, NULL), KVC_E_ARG);
    assert_int_equal(kvc_segment_map(&segment, 1, NULL, 2, 4, &out), KVC_E_ARG);
    assert_int_equal(kvc_prune_map(NULL, 2, 4, map), KVC_E_ARG);
    assert_int_equal(kvc_prune_map(good, 2, 4, NULL), KVC_E_ARG);
    assert_int_equal(kvc_prune_map(NULL, 0, (size_t)INT32_MAX + 1, map), KVC_E_ARG);
    assert_int_equal(kvc_prune_rows(NULL, &v, good, 2), KVC_E_ARG);
    assert_int_equal(kvc_prune_rows(best(state), NULL, good, 2), KVC_E_ARG);
    assert_int_equal(kvc_prune_rows(best(state), &v, NULL, 2), KVC_E_ARG);
    v.token_stride = 0; /* all tokens at one place */
    assert_int_equal(kvc_prune_rows(best(state), &v, good, 2), KVC_E_ARG);
    assert_memory_equal(data, same, sizeof(same));
    assert_true(out.first == 7 && out.count == 7 && map[0] == 7 && map[3] == 7);
}

static void nothing_to_do_is_no_error(void **state)
{
    float data[4] = {1, 2, 3, 4};
    kvc_view v = kvc_view_packed(data, KVC_DTYPE_F32, 4, 1, 1);
    int32_t map[4];

    assert_int_equal(kvc_prune_rows(best(state), &v, NULL, 0), KVC_OK);
    assert_true(data[0] == 1 && data[3] == 4);
    v.n_tokens = 0;
    assert_int_equal(kvc_prune_rows(best(state), &v, NULL, 0), KVC_OK);
    assert_int_equal(kvc_prune_map(NULL, 0, 4, map), KVC_OK);
    assert_true(map[0] == -1 && map[3] == -1);
    assert_int_equal(kvc_prune_map(NULL, 0, 0, NULL), KVC_OK);
    assert_int_equal(kvc_segment_map(NULL, 0, NULL, 0, 0, NULL), KVC_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kept_rows_move_byte_for_byte_in_every_layout),
        cmocka_unit_test(pruning_twice_changes_nothing),
        cmocka_unit_test(a_second_removal_uses_the_map_of_the_first),
        cmocka_unit_test(the_map_is_the_inverse_of_the_rows),
        cmocka_unit_test(segments_follow_the_kept_rows),
        cmocka_unit_test(segments_hold_exactly_their_rows_on_random_inputs),
        cmocka_unit_test(a_budget_above_a_tile_keeps_the_tile_and_the_separators),
        cmocka_unit_test(bad_rows_are_refused_and_nothing_moves),
        cmocka_unit_test(nothing_to_do_is_no_error),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
