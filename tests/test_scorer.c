/* Learned scorers: reference numbers, the file, what its reader refuses, a trained scorer. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kvc/score.h"
#include "support/edge.h"
#include "support/guard.h"
#include "support/rng.h"
#include "support/tables.h"

enum { WS = 1 << 20, HEADER = 64 };

static _Alignas(64) unsigned char ws[WS];
static const char *trained_file;

/* The input of the printed reference numbers (G3). */
static float g3_x[4][2] = {{.5f, -1}, {1, 0}, {0, 2}, {-1, 1}};
static const float g3_taps[3][2] = {{.1f, 0}, {.8f, -.4f}, {0, .2f}};

static kvc_scorer_desc linear_desc(void)
{
    return (kvc_scorer_desc){.struct_size = sizeof(kvc_scorer_desc),
                             .kind = KVC_SCORER_LINEAR,
                             .activation = KVC_ACTIVATION_SIGMOID,
                             .n_in = 2,
                             .kernel = 1,
                             .tag = "test",
                             .weights = g3_taps[1],
                             .bias = .1f};
}

static kvc_scorer_desc conv_desc(void)
{
    kvc_scorer_desc d = linear_desc();

    d.kind = KVC_SCORER_CONV1D;
    d.kernel = 3;
    d.weights = g3_taps[0];
    return d;
}

static kvc_scorer *scorer_of(kvc_ctx *ctx, const kvc_scorer_desc *desc)
{
    static unsigned char file[8192];
    kvc_scorer *scorer;
    size_t n;

    assert_int_equal(kvc_scorer_encode(desc, file, sizeof(file), &n), KVC_OK);
    assert_int_equal(kvc_scorer_create(ctx, file, n, &scorer), KVC_OK);
    return scorer;
}

/* The scores of a scorer; the same bits on every table. */
static void apply(const struct tables *t, const kvc_scorer_desc *desc, float *x,
                  const kvc_grid *grid, float *scores)
{
    size_t n, size;

    assert_int_equal(kvc_grid_tokens(grid, &n), KVC_OK);
    const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, n, 1, (size_t)desc->n_in);
    for (size_t i = 0; i < t->n; i++) {
        kvc_scorer *scorer = scorer_of(t->ctx[i], desc);
        float got[1024];

        assert_true(n <= 1024);
        assert_int_equal(kvc_scorer_apply_workspace_size(scorer, grid, &size), KVC_OK);
        memset(ws, 0xA5, sizeof(ws));
        assert_int_equal(kvc_scorer_apply(t->ctx[i], scorer, &view, grid, got, ws, size), KVC_OK);
        assert_true(guard_all_fill(ws + size, WS - size, 0xA5));
        if (i == 0) {
            memcpy(scores, got, n * sizeof(float));
        }
        assert_memory_equal(got, scores, n * sizeof(float));
        kvc_scorer_destroy(scorer);
    }
}

static void assert_near(const float *got, const float *want, size_t n, double tolerance)
{
    for (size_t i = 0; i < n; i++) {
        assert_true(fabs((double)got[i] - (double)want[i]) <= tolerance);
    }
}

static void reference_numbers_are_met(void **state)
{
    static const float linear[4] = {.710950f, .710950f, .331812f, .249740f};
    static const float conv[4] = {.710950f, .794130f, .401312f, .249740f};
    const kvc_grid grid = kvc_grid_image(2, 2);
    kvc_scorer_desc d = linear_desc();
    float scores[4];

    apply(*state, &d, g3_x[0], &grid, scores);
    assert_near(scores, linear, 4, 1e-6);
    d = conv_desc();
    apply(*state, &d, g3_x[0], &grid, scores);
    assert_near(scores, conv, 4, 1e-6);
}

/* z of each token by the formula of the header, in double. */
static void solve(const kvc_scorer_desc *d, const float *x, const kvc_grid *grid, double *z)
{
    const int n_cols = grid->n_cols, frame = n_cols * grid->n_rows, n = frame * grid->n_frames;
    const int line = d->row_padding ? n_cols : frame;

    for (int i = 0; i < n; i++) {
        z[i] = (double)d->bias;
        for (int j = 0; j < d->kernel; j++) {
            const int at = i + j - (d->kernel - 1) / 2;

            if (at < 0 || at >= n || at / line != i / line) {
                continue;
            }
            for (int c = 0; c < d->n_in; c++) {
                double xh = (double)x[at * d->n_in + c];

                if (d->mean != NULL) {
                    xh = (xh - (double)d->mean[c]) * (double)d->inv_std[c];
                }
                z[i] += (double)d->weights[j * d->n_in + c] * xh;
            }
        }
    }
}

static void random_scorers_agree_with_the_formula(void **state)
{
    enum { MAX_IN = 40, MAX = 400 };
    static float x[MAX * MAX_IN], w[9 * MAX_IN], mean[MAX_IN], inv_std[MAX_IN], scores[MAX];
    static double z[MAX];
    uint64_t rng = 11;

    for (size_t round = 0; round < 200; round++) {
        kvc_grid grid =
            kvc_grid_image(1 + (int32_t)rng_below(&rng, 12), 1 + (int32_t)rng_below(&rng, 12));
        kvc_scorer_desc d = conv_desc();

        grid.n_frames = 1 + (int32_t)rng_below(&rng, 2);
        d.n_in = 1 + (int32_t)rng_below(&rng, MAX_IN);
        d.kernel = 1 + 2 * (int32_t)rng_below(&rng, 5);
        d.row_padding = rng_below(&rng, 2) != 0;
        d.activation = (kvc_activation)rng_below(&rng, 2);
        d.weights = w;
        for (size_t i = 0; i < sizeof(x) / sizeof(float); i++) {
            x[i] = rng_unit(&rng);
        }
        for (size_t i = 0; i < sizeof(w) / sizeof(float); i++) {
            w[i] = 0.3f * rng_unit(&rng);
        }
        for (size_t i = 0; i < MAX_IN; i++) {
            mean[i] = 0.5f * rng_unit(&rng);
            inv_std[i] = 1.5f + rng_unit(&rng);
        }
        if (rng_below(&rng, 2)) {
            d.mean = mean;
            d.inv_std = inv_std;
        }
        apply(*state, &d, x, &grid, scores);
        solve(&d, x, &grid, z);
        for (int i = 0; i < grid.n_frames * grid.n_rows * grid.n_cols; i++) {
            const double want =
                d.activation == KVC_ACTIVATION_SIGMOID ? 1.0 / (1.0 + exp(-z[i])) : z[i];

            assert_true(fabs((double)scores[i] - want) <= 1e-5);
        }
    }
}

static void rows_and_frames_are_padded_on_their_own(void **state)
{
    static const float taps[3] = {1, 10, 100};
    const float frames[8] = {210, 321, 432, 43, 650, 765, 876, 87};
    const float rows[8] = {210, 21, 430, 43, 650, 65, 870, 87};
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, scores[8];
    kvc_grid grid = kvc_grid_image(2, 2);
    kvc_scorer_desc d = conv_desc();

    grid.n_frames = 2;
    d.n_in = 1;
    d.weights = taps;
    d.bias = 0.0f;
    d.activation = KVC_ACTIVATION_NONE;
    apply(*state, &d, x, &grid, scores);
    assert_near(scores, frames, 8, 0.0);
    d.row_padding = true;
    apply(*state, &d, x, &grid, scores);
    assert_near(scores, rows, 8, 0.0);
}

/* The file as docs/score.md has it, byte by byte. */
static void the_file_is_the_documented_one(void **state)
{
    static const char want[] = "KVCS"
                               "\1\0\0\0\2\0\0\0"         /* version, linear, n_in */
                               "\1\0\0\1"                 /* kernel, F32, sigmoid */
                               "\1\0\0\0\34\0\0\0"        /* flags: mean; payload */
                               "test\0\0\0\0\0\0\0\0"     /* tag */
                               "\0\0\0\0\0\0\0\0\0\0\0\0" /* tag */
                               "\0\0\0\0\0\0\0\0"         /* tag */
                               "\xCC\x4B\xCF\xB2\0\0\0\0" /* checksum, reserved */
                               "\0\0\x80\x3F\0\0\0\xC0"   /* mean 1, -2 */
                               "\0\0\0\x40\0\0\0\x3F"     /* inv_std 2, .5 */
                               "\0\0\0\x3E\0\0\x40\x40"   /* weights .125, 3 */
                               "\0\0\x80\xBF";            /* bias -1 */
    static const float mean[2] = {1, -2}, inv_std[2] = {2, .5f}, w[2] = {.125f, 3};
    kvc_scorer_desc d = linear_desc();
    unsigned char file[128];
    size_t n;

    (void)state;
    d.mean = mean;
    d.inv_std = inv_std;
    d.weights = w;
    d.bias = -1.0f;
    assert_int_equal(kvc_scorer_encode(&d, NULL, 0, &n), KVC_OK);
    assert_int_equal(n, sizeof(want) - 1);
    assert_int_equal(kvc_scorer_encode(&d, file, 91, &n), KVC_E_ARG);
    assert_int_equal(kvc_scorer_encode(&d, file, 92, &n), KVC_OK);
    assert_memory_equal(file, want, n);
}

static void what_was_written_is_read_again(void **state)
{
    static const float taps[6] = {.5f, -.25f, 65504, 6e-8f, 1, 2};
    kvc_scorer_desc d = conv_desc(), got = {.struct_size = sizeof(got)};
    kvc_scorer *scorer;

    d.dtype = KVC_DTYPE_F16;
    d.row_padding = true;
    d.activation = KVC_ACTIVATION_NONE;
    d.weights = taps;
    memset(d.tag, 0xEE, sizeof(d.tag));
    scorer = scorer_of(best(state), &d);
    got.weights = taps;
    assert_int_equal(kvc_scorer_info(scorer, &got), KVC_OK);
    assert_true(got.kind == d.kind && got.activation == d.activation && got.dtype == d.dtype);
    assert_true(got.n_in == 2 && got.kernel == 3 && got.row_padding && got.bias == .1f);
    assert_memory_equal(got.tag, d.tag, sizeof(d.tag));
    assert_true(!got.mean && !got.inv_std && !got.weights);
    got.struct_size = 8;
    assert_int_equal(kvc_scorer_info(scorer, &got), KVC_E_ARG);
    assert_int_equal(kvc_scorer_info(NULL, &got), KVC_E_ARG);
    kvc_scorer_destroy(scorer);
    kvc_scorer_destroy(NULL);
}

static void halves_score_as_the_floats_they_hold(void **state)
{
    static const float taps[6] = {.5f, -.25f, 2, .125f, 1, -3};
    const kvc_grid grid = kvc_grid_image(2, 2);
    kvc_scorer_desc d = conv_desc();
    float floats[4], halves[4];

    d.weights = taps;
    apply(*state, &d, g3_x[0], &grid, floats);
    d.dtype = KVC_DTYPE_F16;
    apply(*state, &d, g3_x[0], &grid, halves);
    assert_memory_equal(floats, halves, sizeof(floats));
}

static void wrong_descriptions_are_refused(void **state)
{
    static const float w[18] = {0}, nan[2] = {1, NAN}, large[2] = {65520, 0};
    kvc_scorer_desc bad[14];
    unsigned char file[256];
    size_t n = 7;

    (void)state;
    for (size_t i = 0; i < 14; i++) {
        bad[i] = i < 7 ? linear_desc() : conv_desc();
        bad[i].weights = w;
    }
    bad[0].kernel = 3;
    bad[1].row_padding = true;
    bad[2].n_in = 0;
    bad[3].weights = NULL;
    bad[4].mean = w;
    bad[5].kind = (kvc_scorer_kind)2;
    bad[6].n_in = (1 << 24) + 1;
    bad[7].kernel = 2;
    bad[8].kernel = 11;
    bad[9].kernel = -1;
    bad[10].activation = (kvc_activation)2;
    bad[11].dtype = KVC_DTYPE_BF16;
    bad[12].struct_size = 0;
    bad[13].n_in = (1 << 24) / 3 + 1;
    for (size_t i = 0; i < 14; i++) {
        assert_int_equal(kvc_scorer_encode(&bad[i], file, sizeof(file), &n), KVC_E_ARG);
    }
    bad[0] = linear_desc();
    bad[0].weights = nan;
    assert_int_equal(kvc_scorer_encode(&bad[0], file, sizeof(file), &n), KVC_E_NONFINITE);
    bad[0].weights = w;
    bad[0].bias = INFINITY;
    assert_int_equal(kvc_scorer_encode(&bad[0], file, sizeof(file), &n), KVC_E_NONFINITE);
    bad[0].bias = 0.0f;
    bad[0].mean = w;
    bad[0].inv_std = nan;
    assert_int_equal(kvc_scorer_encode(&bad[0], file, sizeof(file), &n), KVC_E_NONFINITE);
    bad[0] = linear_desc();
    bad[0].weights = large;
    bad[0].dtype = KVC_DTYPE_F16;
    assert_int_equal(kvc_scorer_encode(&bad[0], file, sizeof(file), &n), KVC_E_ARG);
    assert_int_equal(kvc_scorer_encode(NULL, file, sizeof(file), &n), KVC_E_ARG);
    assert_int_equal(kvc_scorer_encode(&bad[0], file, sizeof(file), NULL), KVC_E_ARG);
    assert_int_equal(n, 7);
}

/* Writes the right checksum of a payload, the slow way. */
static void seal(unsigned char *file, size_t n)
{
    uint32_t crc = UINT32_MAX;

    for (size_t i = HEADER; i < n; i++) {
        crc ^= file[i];
        for (int b = 0; b < 8; b++) {
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0u);
        }
    }
    for (size_t i = 0; i < 4; i++) {
        file[56 + i] = (unsigned char)(~crc >> 8 * i);
    }
}

static kvc_status read_file(kvc_ctx *ctx, const unsigned char *file, size_t n)
{
    unsigned char *copy = edge_new(n); /* one byte too far faults */
    kvc_scorer *scorer = (kvc_scorer *)(void *)ws;

    memcpy(copy, file, n);
    const kvc_status status = kvc_scorer_create(ctx, copy, n, &scorer);
    assert_true(status == KVC_OK || scorer == NULL);
    edge_free(copy, n);
    kvc_scorer_destroy(scorer);
    return status;
}

static void damaged_files_are_refused(void **state)
{
    static const struct {
        size_t at;
        unsigned char byte;
    } damage[] = {
        {0, 'k'},              /* magic */
        {4, 0},      {4, 2},   /* version */
        {6, 2},      {7, 1},   /* kind */
        {8, 0},      {11, 1},  /* n_in */
        {12, 2},     {12, 11}, /* kernel */
        {14, 2},     {15, 2},  /* dtype, activation */
        {16, 4},     {19, 1},  /* flags */
        {20, 1},     {23, 1},  /* payload */
        {56, 0},               /* checksum */
        {60, 1},               /* reserved */
        {HEADER, 1},           /* payload, checksum stays */
    };
    const kvc_scorer_desc d = conv_desc();
    kvc_ctx *ctx = best(state);
    kvc_scorer *scorer;
    unsigned char file[256], bad[257] = {0};
    size_t n;

    assert_int_equal(kvc_scorer_encode(&d, file, sizeof(file), &n), KVC_OK);
    assert_int_equal(read_file(ctx, file, n), KVC_OK);
    for (size_t i = 0; i < sizeof(damage) / sizeof(damage[0]); i++) {
        memcpy(bad, file, n);
        bad[damage[i].at] = damage[i].byte;
        assert_int_equal(read_file(ctx, bad, n), KVC_E_FORMAT);
    }
    memcpy(bad, file, n);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(read_file(ctx, file, i), KVC_E_FORMAT);
    }
    assert_int_equal(read_file(ctx, bad, n + 1), KVC_E_FORMAT);
    for (size_t at = HEADER; at < n; at += 4) { /* Inf and NaN with a right checksum */
        memcpy(bad, file, n);
        memcpy(bad + at, "\0\0\x80\x7F", 4);
        seal(bad, n);
        assert_int_equal(read_file(ctx, bad, n), KVC_E_FORMAT);
        bad[at] = 1;
        seal(bad, n);
        assert_int_equal(read_file(ctx, bad, n), KVC_E_FORMAT);
    }
    assert_int_equal(kvc_scorer_create(ctx, NULL, n, &scorer), KVC_E_ARG);
    assert_int_equal(kvc_scorer_create(NULL, file, n, &scorer), KVC_E_ARG);
    assert_int_equal(kvc_scorer_create(ctx, file, n, NULL), KVC_E_ARG);
}

static void a_product_beyond_the_range_is_refused(void **state)
{
    static const float mean[2] = {0}, inv_std[2] = {1, 1e30f}, w[2] = {1, 1e30f};
    kvc_scorer_desc d = linear_desc();
    unsigned char file[256];
    size_t n;

    d.mean = mean;
    d.inv_std = inv_std;
    d.weights = w;
    assert_int_equal(kvc_scorer_encode(&d, file, sizeof(file), &n), KVC_OK);
    assert_int_equal(read_file(best(state), file, n), KVC_E_FORMAT);
}

static void *no_memory(void *user, size_t size, size_t align)
{
    void **left = user;
    void *given = *left;

    (void)size;
    (void)align;
    *left = NULL;
    return given;
}

static void nothing_freed(void *user, void *ptr)
{
    (void)user;
    (void)ptr;
}

static void a_failed_allocation_is_reported(void **state)
{
    void *left = ws; /* for the context */
    const kvc_ctx_params params = {.struct_size = sizeof(params),
                                   .allocator = {no_memory, nothing_freed, &left}};
    const kvc_scorer_desc d = linear_desc();
    unsigned char file[256];
    kvc_ctx *ctx;
    size_t n;

    (void)state;
    assert_int_equal(kvc_ctx_create(&params, &ctx), KVC_OK);
    assert_int_equal(kvc_scorer_encode(&d, file, sizeof(file), &n), KVC_OK);
    kvc_scorer *scorer = (kvc_scorer *)(void *)file;
    assert_int_equal(kvc_scorer_create(ctx, file, n, &scorer), KVC_E_NOMEM);
    assert_null(scorer);
    kvc_ctx_destroy(ctx);
}

static void wrong_arguments_of_an_application_are_refused(void **state)
{
    const kvc_scorer_desc d = linear_desc();
    kvc_ctx *ctx = best(state);
    kvc_scorer *scorer = scorer_of(ctx, &d);
    const kvc_grid grid = kvc_grid_image(2, 2), other = kvc_grid_image(3, 2);
    const kvc_view view = kvc_view_packed(g3_x, KVC_DTYPE_F32, 4, 1, 2);
    kvc_view bad = kvc_view_packed(g3_x, KVC_DTYPE_F32, 4, 1, 1);
    float x[8] = {0}, scores[4] = {7};
    size_t size;

    assert_int_equal(kvc_scorer_apply_workspace_size(scorer, &grid, &size), KVC_OK);
    assert_int_equal(kvc_scorer_apply_workspace_size(NULL, &grid, &size), KVC_E_ARG);
    assert_int_equal(kvc_scorer_apply_workspace_size(scorer, NULL, &size), KVC_E_ARG);
    assert_int_equal(kvc_scorer_apply(NULL, scorer, &view, &grid, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_scorer_apply(ctx, NULL, &view, &grid, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_scorer_apply(ctx, scorer, NULL, &grid, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_scorer_apply(ctx, scorer, &view, NULL, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_scorer_apply(ctx, scorer, &view, &grid, NULL, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_scorer_apply(ctx, scorer, &view, &other, scores, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_scorer_apply(ctx, scorer, &bad, &grid, scores, ws, size), KVC_E_MISMATCH);
    assert_int_equal(kvc_scorer_apply(ctx, scorer, &view, &grid, scores, ws, size - 1),
                     KVC_E_WORKSPACE);
    assert_int_equal(kvc_scorer_apply(ctx, scorer, &view, &grid, scores, ws + 8, size),
                     KVC_E_WORKSPACE);
    x[7] = INFINITY;
    bad = kvc_view_packed(x, KVC_DTYPE_F32, 4, 1, 2);
    assert_int_equal(kvc_scorer_apply(ctx, scorer, &bad, &grid, scores, ws, size), KVC_E_NONFINITE);
    assert_true(scores[0] == 7.0f);
    kvc_scorer_destroy(scorer);
}

/* Images as examples/train_scorer.c makes them, from numbers that it has not seen. */
static void make_image(uint64_t *rng, float *x, bool *object)
{
    const int top = (int)rng_below(rng, 8), left = (int)rng_below(rng, 8);

    for (int i = 0; i < 144; i++) {
        const int row = i / 12 - top, col = i % 12 - left;

        object[i] = row >= 0 && row < 4 && col >= 0 && col < 5;
        for (int c = 0; c < 8; c++) {
            x[i * 8 + c] = rng_unit(rng) + (object[i] ? 0.4f - 0.08f * (float)c : 0.0f);
        }
    }
}

static void a_scorer_that_was_trained_finds_the_object(void **state)
{
    const kvc_grid grid = kvc_grid_image(12, 12);
    float x[144 * 8], scores[144];
    bool object[144];
    const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, 144, 1, 8);
    unsigned char file[1024];
    kvc_scorer *scorer;
    size_t right = 0, pairs = 0;
    uint64_t rng = 12;
    FILE *f = trained_file != NULL ? fopen(trained_file, "rb") : NULL;

    assert_non_null(f);
    const size_t n = fread(file, 1, sizeof(file), f);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(kvc_scorer_create(best(state), file, n, &scorer), KVC_OK);
    for (size_t image = 0; image < 20; image++) {
        make_image(&rng, x, object);
        assert_int_equal(kvc_scorer_apply(best(state), scorer, &view, &grid, scores, ws, WS),
                         KVC_OK);
        for (size_t i = 0; i < 144 * 144; i++) {
            if (object[i / 144] && !object[i % 144]) {
                right += scores[i / 144] > scores[i % 144];
                pairs++;
            }
        }
    }
    print_message("%.1f %% of the pairs in order\n", 100.0 * (double)right / (double)pairs);
    assert_true((double)right > 0.83 * (double)pairs);
    kvc_scorer_destroy(scorer);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_numbers_are_met),
        cmocka_unit_test(random_scorers_agree_with_the_formula),
        cmocka_unit_test(rows_and_frames_are_padded_on_their_own),
        cmocka_unit_test(the_file_is_the_documented_one),
        cmocka_unit_test(what_was_written_is_read_again),
        cmocka_unit_test(halves_score_as_the_floats_they_hold),
        cmocka_unit_test(wrong_descriptions_are_refused),
        cmocka_unit_test(damaged_files_are_refused),
        cmocka_unit_test(a_product_beyond_the_range_is_refused),
        cmocka_unit_test(a_failed_allocation_is_reported),
        cmocka_unit_test(wrong_arguments_of_an_application_are_refused),
        cmocka_unit_test(a_scorer_that_was_trained_finds_the_object),
    };

    trained_file = argc > 1 ? argv[1] : NULL;
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
