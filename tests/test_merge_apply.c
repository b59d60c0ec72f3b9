/* Merging rows of all layers that share a set of tokens: one round and several. */
#include <math.h>
#include <string.h>

#include "support/half.h"
#include "support/merging.h"

#include "kvc/pool.h"

static const kvc_merge_options by_attention = {.struct_size = sizeof(by_attention),
                                               .weights = KVC_MERGE_ATTENTION};

/* fault E3: positions 10 ... 13; 12 merges into 11; 10 is protected and equal to 11 */
static void rows_keep_their_order_and_protected_ones_their_bits(void **state)
{
    const struct tables *t = *state;

    for (size_t i = 0; i < t->n; i++) {
        float k[4][2] = {{1, 0}, {1, 0}, {0.9f, 0.1f}, {0, 1}};
        float v[4][2] = {{1, 2}, {3, 4}, {5, 6}, {7, 8}};
        const kvc_view kv = kvc_view_packed(k, KVC_DTYPE_F32, 4, 1, 2),
                       vv = kvc_view_packed(v, KVC_DTYPE_F32, 4, 1, 2);
        const kvc_merge_options o = merge_options(0.85f);
        int32_t position[4] = {10, 11, 12, 13}, map[4], rows[4];
        kvc_merge_token tokens[4];
        kvc_merge_pair pairs[2];
        size_t n_rows;

        image_tokens(tokens, 4, 4);
        tokens[0].fixed = true;
        assert_int_equal(plan(t->ctx[i], &kv, tokens, &o, pairs), 1);
        assert_int_equal(
            kvc_merge_apply(t->ctx[i], pairs, 1, &kv, &vv, 1, NULL, &o, tokens, map, rows, &n_rows),
            KVC_OK);
        assert_int_equal(n_rows, 3);
        assert_memory_equal(map, ((const int32_t[]){0, 1, 1, 2}), sizeof(map));
        assert_memory_equal(rows, ((const int32_t[]){0, 1, 3}), 3 * sizeof(rows[0]));
        assert_int_equal(position[rows[1]], 11);
        assert_int_equal(position[rows[2]], 13);
        assert_true(tokens[0].size == 1 && tokens[1].size == 2 && tokens[2].size == 1);
        assert_true(tokens[0].fixed && !tokens[1].fixed);
        assert_memory_equal(k[0], ((const float[]){1, 0}), sizeof(k[0]));
        assert_memory_equal(v[0], ((const float[]){1, 2}), sizeof(v[0]));
        assert_memory_equal(v[1], ((const float[]){4, 5}), sizeof(v[1]));
        assert_memory_equal(v[2], ((const float[]){7, 8}), sizeof(v[2]));
        assert_float_equal(k[1][0], 0.95f, 1e-6f);
    }
}

enum { LAYERS = 2, N = 60, HEADS = 2, DK = 20, DV = 33, GAP = 3 };

/* K and V of two layers in one memory: rows with gaps, in one of the types. */
struct layers {
    kvc_dtype dtype;
    size_t bytes;
    unsigned char *data;
    kvc_view k[LAYERS], v[LAYERS];
};

static kvc_view layer_view(void *data, kvc_dtype dtype, size_t d)
{
    kvc_view view = kvc_view_packed(data, dtype, N, HEADS, d);

    view.head_stride = d + GAP;
    view.token_stride = HEADS * (d + GAP) + GAP;
    return view;
}

static void set(const kvc_view *view, size_t i, float x)
{
    if (view->dtype == KVC_DTYPE_F32) {
        ((float *)view->data)[i] = x;
    } else if (view->dtype == KVC_DTYPE_F16) {
        ((uint16_t *)view->data)[i] =
            (uint16_t)(half_away((double)fabsf(x)) | (x < 0 ? HALF_SIGN : 0));
    } else {
        uint32_t bits;
        memcpy(&bits, &x, sizeof(bits));
        ((uint16_t *)view->data)[i] = (uint16_t)(bits >> 16);
    }
}

static double get(const kvc_view *view, size_t token, size_t head, size_t c)
{
    const size_t i = token * view->token_stride + head * view->head_stride + c;
    float x;

    if (view->dtype == KVC_DTYPE_F32) {
        return (double)((const float *)view->data)[i];
    }
    if (view->dtype == KVC_DTYPE_F16) {
        return half_value(((const uint16_t *)view->data)[i]);
    }
    const uint32_t bits = (uint32_t)((const uint16_t *)view->data)[i] << 16;
    memcpy(&x, &bits, sizeof(x));
    return (double)x;
}

static struct layers layers_new(kvc_dtype dtype, uint64_t seed)
{
    const size_t size = dtype == KVC_DTYPE_F32 ? 4 : 2;
    const size_t k_bytes = (size_t)(HEADS * (DK + GAP) + GAP) * N * size;
    const size_t v_bytes = (size_t)(HEADS * (DV + GAP) + GAP) * N * size;
    struct layers l = {.dtype = dtype, .bytes = LAYERS * (k_bytes + v_bytes)};

    l.data = malloc(l.bytes);
    assert_non_null(l.data);
    for (size_t i = 0; i < LAYERS; i++) {
        l.k[i] = layer_view(l.data + i * (k_bytes + v_bytes), dtype, DK);
        l.v[i] = layer_view(l.data + i * (k_bytes + v_bytes) + k_bytes, dtype, DV);
        for (size_t j = 0; j < k_bytes / size; j++) {
            set(&l.k[i], j, rng_unit(&seed));
        }
        for (size_t j = 0; j < v_bytes / size; j++) {
            set(&l.v[i], j, rng_unit(&seed));
        }
    }
    return l;
}

static size_t random_pairs(uint64_t *rng, kvc_merge_token *tokens, kvc_merge_pair *pairs)
{
    bool used[N] = {false};
    size_t n_pairs = 0;

    for (size_t i = 0; i < N; i++) {
        tokens[i] = (kvc_merge_token){.row = (int32_t)i,
                                      .size = (float)(1 + rng_below(rng, 3)),
                                      .mass = fabsf(rng_unit(rng))};
        tokens[i].bias = (float)log((double)tokens[i].size);
    }
    for (int draws = 0; draws < 40; draws++) {
        const size_t a = rng_below(rng, N), b = rng_below(rng, N);
        if (a < b && !used[a] && !used[b]) {
            used[a] = used[b] = true;
            pairs[n_pairs++] = (kvc_merge_pair){.a = (int32_t)a, .b = (int32_t)b};
        }
    }
    return n_pairs;
}

/* Every layer, K and V, against the formula, for all types; gaps keep their bytes. */
static void all_layers_are_mixed_with_the_same_weights_and_compacted(void **state)
{
    const struct tables *t = *state;
    uint64_t rng = 31;

    for (int round = 0; round < 24; round++) {
        const kvc_dtype dtype = (kvc_dtype)(round % 3);
        const double unit = dtype == KVC_DTYPE_F32 ? 2e-7 : dtype == KVC_DTYPE_F16 ? 5e-4 : 4e-3;
        kvc_merge_options o = by_attention;
        struct layers before = layers_new(dtype, (uint64_t)round),
                      after = layers_new(dtype, (uint64_t)round);
        kvc_merge_token old[N], tokens[N], merged;
        kvc_merge_pair pairs[N / 2];
        int32_t map[N], rows[N];
        size_t n_rows, partner[N];
        float mean;

        o.weights = round % 2 == 0 ? KVC_MERGE_SIZE : KVC_MERGE_ATTENTION;
        const size_t n_pairs = random_pairs(&rng, old, pairs);
        memcpy(tokens, old, sizeof(old));
        assert_int_equal(kvc_merge_apply(t->ctx[(size_t)round % t->n], pairs, n_pairs, after.k,
                                         after.v, LAYERS, NULL, &o, tokens, map, rows, &n_rows),
                         KVC_OK);
        assert_int_equal(n_rows, N - n_pairs);
        assert_int_equal(kvc_merge_mean_mass(old, N, &mean), KVC_OK);
        for (size_t i = 0; i < N; i++) {
            partner[i] = i;
            assert_true(map[i] >= 0 && (size_t)map[i] < n_rows);
        }
        for (size_t p = 0; p < n_pairs; p++) {
            partner[pairs[p].a] = (size_t)pairs[p].b;
            partner[pairs[p].b] = (size_t)pairs[p].a;
            assert_int_equal(map[pairs[p].a], map[pairs[p].b]);
        }
        for (size_t r = 0; r < n_rows; r++) {
            const size_t i = (size_t)rows[r], j = partner[i], a = i < j ? i : j, b = i < j ? j : i;
            float w_a = 1.0f, w_b = 0.0f;
            bool heavier = true;
            assert_true(r == 0 || rows[r] > rows[r - 1]);
            assert_int_equal(map[i], r);
            if (a != b) {
                assert_int_equal(
                    kvc_merge_combine(&old[a], &old[b], mean, 0, &o, &w_a, &w_b, &merged, &heavier),
                    KVC_OK);
                assert_memory_equal(&tokens[r], &merged, sizeof(merged));
                assert_int_equal(i, heavier ? a : b);
            } else {
                assert_memory_equal(&tokens[r], &old[i], sizeof(old[i]));
            }
            for (size_t l = 0; l < (size_t)2 * LAYERS; l++) {
                const kvc_view *x = l % 2 == 0 ? &before.k[l / 2] : &before.v[l / 2];
                const kvc_view *y = l % 2 == 0 ? &after.k[l / 2] : &after.v[l / 2];
                for (size_t h = 0; h < HEADS; h++) {
                    for (size_t c = 0; c < x->head_dim; c++) {
                        const double is = get(y, r, h, c), was = (double)w_a * get(x, a, h, c) +
                                                                 (double)w_b * get(x, b, h, c);
                        assert_true(a != b ? fabs(is - was) <= unit : is == was);
                    }
                }
            }
        }
        for (size_t l = 0; l < LAYERS; l++) { /* the gap behind each head of the first rows */
            for (size_t h = 0; h < HEADS; h++) {
                for (size_t c = DK; c < DK + GAP; c++) {
                    assert_true(get(&after.k[l], 0, h, c) == get(&before.k[l], 0, h, c));
                    assert_true(get(&after.k[l], n_rows - 1, h, c) ==
                                get(&before.k[l], n_rows - 1, h, c));
                }
            }
        }
        free(before.data);
        free(after.data);
    }
}

static void backwards(void *user, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    while (n_tasks-- > 0) {
        task(arg, n_tasks);
    }
}

static void merges_are_the_same_bits_on_every_table_and_split(void **state)
{
    const struct tables *t = *state;
    kvc_pool *pool;

    assert_int_equal(kvc_pool_create(3, &pool), KVC_OK);
    for (int dtype = 0; dtype < 3; dtype++) {
        struct layers first = {0};
        kvc_merge_token first_tokens[N];
        for (size_t i = 0; i < 3 * t->n; i++) {
            const kvc_ctx_params params = {
                .struct_size = sizeof(params),
                .kernels = kvc_ctx_kernels(t->ctx[i / 3]),
                .parallel_for = i % 3 == 0   ? NULL
                                : i % 3 == 1 ? backwards
                                             : kvc_pool_parallel_for,
                .parallel_user = pool,
            };
            struct layers l = layers_new((kvc_dtype)dtype, 77);
            kvc_merge_token tokens[N];
            kvc_merge_pair pairs[N / 2];
            int32_t map[N], rows[N];
            size_t n_rows;
            uint64_t rng = 5;
            kvc_ctx *ctx;

            assert_int_equal(kvc_ctx_create(&params, &ctx), KVC_OK);
            const size_t n_pairs = random_pairs(&rng, tokens, pairs);
            assert_int_equal(kvc_merge_apply(ctx, pairs, n_pairs, l.k, l.v, LAYERS, NULL,
                                             &by_attention, tokens, map, rows, &n_rows),
                             KVC_OK);
            kvc_ctx_destroy(ctx);
            if (i == 0) {
                first = l;
                memcpy(first_tokens, tokens, sizeof(tokens));
                continue;
            }
            assert_memory_equal(l.data, first.data, l.bytes);
            assert_memory_equal(tokens, first_tokens, n_rows * sizeof(tokens[0]));
            free(l.data);
        }
        free(first.data);
    }
    kvc_pool_destroy(pool);
}

/* fault E2: nothing to merge leaves every bit */
static void no_pair_changes_nothing(void **state)
{
    struct layers before = layers_new(KVC_DTYPE_F16, 1), after = layers_new(KVC_DTYPE_F16, 1);
    kvc_merge_token tokens[N], old[N];
    kvc_merge_pair pairs[N / 2];
    int32_t map[N], rows[N];
    size_t n_rows = 0;
    uint64_t rng = 5;

    (void)random_pairs(&rng, old, pairs);
    memcpy(tokens, old, sizeof(old));
    assert_int_equal(kvc_merge_apply(best(state), NULL, 0, after.k, after.v, LAYERS, NULL, NULL,
                                     tokens, map, rows, &n_rows),
                     KVC_OK);
    assert_int_equal(n_rows, N);
    assert_memory_equal(before.data, after.data, before.bytes);
    assert_memory_equal(tokens, old, sizeof(old));
    for (int32_t i = 0; i < N; i++) {
        assert_true(map[i] == i && rows[i] == i);
    }
    free(before.data);
    free(after.data);
}

static void wrong_pairs_are_refused_before_rows_are_written(void **state)
{
    kvc_ctx *ctx = best(state);
    struct layers before = layers_new(KVC_DTYPE_F32, 1), l = layers_new(KVC_DTYPE_F32, 1);
    kvc_merge_token old[N], tokens[N];
    kvc_merge_pair unused[N / 2];
    int32_t map[N], rows[N];
    size_t n_rows = 99;
    uint64_t rng = 5;
    const kvc_merge_pair good = {.a = 0, .b = 1};
    const kvc_merge_pair bad[][2] = {
        {{.a = 2, .b = 2}, good},
        {{.a = 3, .b = 2}, good},
        {{.a = -1, .b = 2}, good},
        {{.a = 2, .b = N}, good},
        {{.a = 1, .b = 2}, good},
        {{.a = 0, .b = 2}, good},
        {{.a = 2, .b = 5}, good} /* text */,
        {{.a = 6, .b = 7}, good} /* fixed */,
        {{.a = 2, .b = 8}, good} /* other image */,
        {{.a = 2, .b = 9}, good} /* other frame */,
    };
    const float spreads[] = {-1, NAN, INFINITY};

    (void)random_pairs(&rng, old, unused);
    old[5].image = -1;
    old[6].fixed = true;
    old[8].image = 1;
    old[9].frame = 1;
    memcpy(tokens, old, sizeof(old));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(kvc_merge_apply(ctx, bad[i], 2, l.k, l.v, LAYERS, NULL, NULL, tokens, map,
                                         rows, &n_rows),
                         KVC_E_ARG);
    }
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(kvc_merge_apply(ctx, &good, 1, l.k, l.v, LAYERS, &spreads[i], NULL, tokens,
                                         map, rows, &n_rows),
                         KVC_E_ARG);
    }
    assert_int_equal(
        kvc_merge_apply(NULL, &good, 1, l.k, l.v, LAYERS, NULL, NULL, tokens, map, rows, &n_rows),
        KVC_E_ARG);
    assert_int_equal(
        kvc_merge_apply(ctx, NULL, 1, l.k, l.v, LAYERS, NULL, NULL, tokens, map, rows, &n_rows),
        KVC_E_ARG);
    assert_int_equal(
        kvc_merge_apply(ctx, &good, 1, NULL, l.v, LAYERS, NULL, NULL, tokens, map, rows, &n_rows),
        KVC_E_ARG);
    assert_int_equal(
        kvc_merge_apply(ctx, &good, 1, l.k, l.v, 0, NULL, NULL, tokens, map, rows, &n_rows),
        KVC_E_ARG);
    assert_int_equal(
        kvc_merge_apply(ctx, &good, 1, l.k, l.v, LAYERS, NULL, NULL, NULL, map, rows, &n_rows),
        KVC_E_ARG);
    assert_int_equal(
        kvc_merge_apply(ctx, &good, 1, l.k, l.v, LAYERS, NULL, NULL, tokens, map, rows, NULL),
        KVC_E_ARG);
    l.v[1].n_tokens--; /* views of different lengths */
    assert_int_equal(
        kvc_merge_apply(ctx, &good, 1, l.k, l.v, LAYERS, NULL, NULL, tokens, map, rows, &n_rows),
        KVC_E_ARG);
    l.v[1].n_tokens++;
    l.v[1].token_stride = 1; /* elements that overlap */
    assert_int_equal(
        kvc_merge_apply(ctx, &good, 1, l.k, l.v, LAYERS, NULL, NULL, tokens, map, rows, &n_rows),
        KVC_E_ARG);
    tokens[N - 1].size = tokens[N - 2].size = 3e38f; /* no float holds the sum */
    assert_int_equal(
        kvc_merge_apply(ctx, &good, 1, l.k, l.v, 1, NULL, NULL, tokens, map, rows, &n_rows),
        KVC_E_ARG);
    tokens[N - 1].size = INFINITY;
    assert_int_equal(
        kvc_merge_apply(ctx, &good, 1, l.k, l.v, 1, NULL, NULL, tokens, map, rows, &n_rows),
        KVC_E_ARG);
    assert_memory_equal(before.data, l.data, l.bytes);
    assert_memory_equal(tokens, old, (N - 2) * sizeof(old[0]));
    assert_int_equal(n_rows, 99);
    free(before.data);
    free(l.data);
}

/* Tokens of an image whose keys are all alike, in three layers with heads of their own. */
enum { IMAGE = 576, SIDE = 24, D = 16, R_LAYERS = 3 };
static float image_k[R_LAYERS][IMAGE][2][D], image_v[R_LAYERS][IMAGE][2][D];
static float old_k[R_LAYERS][IMAGE][2][D];

static void fill_image(kvc_view *k, kvc_view *v)
{
    uint64_t rng = 9;

    for (size_t l = 0; l < R_LAYERS; l++) {
        for (size_t i = 0; i < IMAGE; i++) {
            for (size_t c = 0; c < (size_t)2 * D; c++) {
                image_k[l][i][c / D][c % D] = 1.0f + 0.2f * rng_unit(&rng);
                image_v[l][i][c / D][c % D] = rng_unit(&rng);
            }
        }
        k[l] = kvc_view_packed(image_k[l], KVC_DTYPE_F32, IMAGE, 2, D);
        v[l] = kvc_view_packed(image_v[l], KVC_DTYPE_F32, IMAGE, 2, D);
    }
    memcpy(old_k, image_k, sizeof(old_k));
}

/* 576 -> 432 -> 324 -> 243; each row is the mean of the tokens that it stands for. */
static void rounds_leave_three_quarters_each_and_means_of_all_members(void **state)
{
    static const size_t left[] = {432, 324, 243};
    const struct tables *t = *state;

    for (int32_t n_rounds = 1; n_rounds <= 3; n_rounds++) {
        kvc_merge_token tokens[IMAGE];
        int32_t map[IMAGE], rows[IMAGE];
        kvc_view k[R_LAYERS], v[R_LAYERS];
        size_t n_rows, size;
        double sum = 0;

        fill_image(k, v);
        image_tokens(tokens, IMAGE, SIDE);
        assert_int_equal(kvc_merge_rounds_workspace_size(k, R_LAYERS, &size), KVC_OK);
        void *ws = workspace(size);
        assert_int_equal(kvc_merge_rounds(t->ctx[(size_t)n_rounds % t->n], k, v, R_LAYERS, NULL,
                                          n_rounds, tokens, map, rows, &n_rows, ws, size),
                         KVC_OK);
        free(ws);
        assert_int_equal(n_rows, left[n_rounds - 1]);
        for (size_t r = 0; r < n_rows; r++) {
            assert_true(r == 0 || rows[r] > rows[r - 1]);
            assert_int_equal(map[rows[r]], r);
            assert_int_equal(tokens[r].row, rows[r] / SIDE);
            assert_int_equal(tokens[r].col, rows[r] % SIDE);
            assert_true(tokens[r].bias == (float)log((double)tokens[r].size));
            sum += (double)tokens[r].size;
        }
        assert_true(sum == IMAGE);
        for (size_t r = 0; r < n_rows; r++) {
            double mean[D] = {0};
            size_t members = 0;
            for (size_t i = 0; i < IMAGE; i++) {
                members += (size_t)map[i] == r;
                for (size_t c = 0; c < D && (size_t)map[i] == r; c++) {
                    mean[c] += (double)old_k[1][i][1][c];
                }
            }
            assert_true((double)members == (double)tokens[r].size);
            for (size_t c = 0; c < D; c++) {
                assert_true(fabs(mean[c] / (double)members - (double)image_k[1][r][1][c]) < 1e-6);
            }
        }
    }
}

static void rounds_check_everything_first(void **state)
{
    kvc_ctx *ctx = best(state);
    static kvc_merge_token tokens[IMAGE];
    static int32_t map[IMAGE], rows[IMAGE];
    kvc_view k[R_LAYERS], v[R_LAYERS];
    size_t n_rows = 5, size;

    fill_image(k, v);
    image_tokens(tokens, IMAGE, SIDE);
    assert_int_equal(kvc_merge_rounds_workspace_size(k, 0, &size), KVC_E_ARG);
    assert_int_equal(kvc_merge_rounds_workspace_size(k, R_LAYERS, NULL), KVC_E_ARG);
    assert_int_equal(kvc_merge_rounds_workspace_size(k, R_LAYERS, &size), KVC_OK);
    char *ws = workspace(size + 64);
    for (int32_t n = -1; n <= 4; n += 5) {
        assert_int_equal(
            kvc_merge_rounds(ctx, k, v, R_LAYERS, NULL, n, tokens, map, rows, &n_rows, ws, size),
            KVC_E_ARG);
    }
    assert_int_equal(
        kvc_merge_rounds(ctx, k, v, R_LAYERS, NULL, 0, tokens, map, rows, &n_rows, ws, size),
        KVC_E_ARG);
    assert_int_equal(
        kvc_merge_rounds(ctx, k, v, R_LAYERS, NULL, 1, tokens, map, rows, &n_rows, ws, size - 1),
        KVC_E_WORKSPACE);
    assert_int_equal(
        kvc_merge_rounds(ctx, k, v, R_LAYERS, NULL, 1, tokens, map, rows, &n_rows, ws + 8, size),
        KVC_E_WORKSPACE);
    v[2].n_tokens--;
    assert_int_equal(
        kvc_merge_rounds(ctx, k, v, R_LAYERS, NULL, 1, tokens, map, rows, &n_rows, ws, size),
        KVC_E_ARG);
    v[2].n_tokens++;
    tokens[3].mass = 3e38f;
    tokens[4].mass = 3e38f;
    assert_int_equal(
        kvc_merge_rounds(ctx, k, v, R_LAYERS, NULL, 1, tokens, map, rows, &n_rows, ws, size),
        KVC_E_ARG);
    assert_int_equal(n_rows, 5);
    assert_memory_equal(image_k, old_k, sizeof(old_k));
    for (size_t l = 0; l < R_LAYERS; l++) {
        k[l].n_tokens = v[l].n_tokens = 0;
    }
    assert_int_equal(
        kvc_merge_rounds(ctx, k, v, R_LAYERS, NULL, 3, NULL, NULL, NULL, &n_rows, ws, size),
        KVC_OK);
    assert_int_equal(n_rows, 0);
    free(ws);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_keep_their_order_and_protected_ones_their_bits),
        cmocka_unit_test(all_layers_are_mixed_with_the_same_weights_and_compacted),
        cmocka_unit_test(merges_are_the_same_bits_on_every_table_and_split),
        cmocka_unit_test(no_pair_changes_nothing),
        cmocka_unit_test(wrong_pairs_are_refused_before_rows_are_written),
        cmocka_unit_test(rounds_leave_three_quarters_each_and_means_of_all_members),
        cmocka_unit_test(rounds_check_everything_first),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
