/* Observations of K and Q: sums, merging, calibration, the file, memory, errors. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kvc/smooth.h"
#include "support/rng.h"
#include "support/tables.h"

enum { LAYERS = 2, HEADS = 4, KV_HEADS = 2, DIM = 5, WIDTH = KV_HEADS * DIM };

static kvc_observed_shape shape_of(int32_t n_layers, int32_t n_heads, int32_t n_kv_heads,
                                   int32_t head_dim)
{
    const kvc_observed_shape shape = {sizeof(shape), n_layers, n_heads, n_kv_heads, head_dim};
    return shape;
}

static kvc_observation *create(kvc_ctx *ctx, kvc_observed_shape shape)
{
    kvc_observation *o;

    assert_int_equal(kvc_observation_create(ctx, &shape, &o), KVC_OK);
    return o;
}

static kvc_observed_layer layer_of(const kvc_observation *o, int32_t layer)
{
    kvc_observed_layer l = {.struct_size = sizeof(l)};

    assert_int_equal(kvc_observation_read(o, layer, &l), KVC_OK);
    return l;
}

static void fill(float *x, size_t n, uint64_t *rng)
{
    for (size_t i = 0; i < n; i++)
        x[i] = rng_unit(rng) * 8.0f;
}

static void see(kvc_observation *o, int32_t layer, float *k, float *q, size_t n)
{
    const kvc_view k_view = kvc_view_packed(k, KVC_DTYPE_F32, n, KV_HEADS, DIM);
    const kvc_view q_view = kvc_view_packed(q, KVC_DTYPE_F32, n, HEADS, DIM);

    assert_int_equal(kvc_observe_keys(o, layer, &k_view), KVC_OK);
    assert_int_equal(kvc_observe_queries(o, layer, &q_view), KVC_OK);
}

/* An observation of random rows in both layers; the caller destroys it. */
static kvc_observation *random_observation(kvc_ctx *ctx, uint64_t seed, size_t n)
{
    kvc_observation *o = create(ctx, shape_of(LAYERS, HEADS, KV_HEADS, DIM));
    float *k = malloc(n * WIDTH * sizeof(*k)), *q = malloc(n * HEADS * DIM * sizeof(*q));

    assert_true(k && q);
    for (int32_t l = 0; l < LAYERS; l++) {
        fill(k, n * WIDTH, &seed);
        fill(q, n * HEADS * DIM, &seed);
        see(o, l, k, q, n);
    }
    free(k);
    free(q);
    return o;
}

static unsigned char *file_of(const kvc_observation *o, size_t *size)
{
    *size = kvc_observation_size(o);
    unsigned char *file = malloc(*size);

    assert_non_null(file);
    assert_int_equal(kvc_observation_save(o, file, *size), KVC_OK);
    return file;
}

static void assert_same(const kvc_observation *a, const kvc_observation *b)
{
    size_t n_a, n_b;
    unsigned char *file_a = file_of(a, &n_a), *file_b = file_of(b, &n_b);

    assert_int_equal(n_a, n_b);
    assert_memory_equal(file_a, file_b, n_a);
    free(file_a);
    free(file_b);
}

static void sums_are_those_of_the_rows(void **state)
{
    kvc_observation *o = create(best(state), shape_of(2, 2, 1, 2));
    float k[6] = {1, -2, -3, 0.5f, 2, 1}, q[8] = {1, 2, 3, 4, -1, 0, 0.5f, 2};
    const kvc_view k_view = kvc_view_packed(k, KVC_DTYPE_F32, 3, 1, 2);
    const kvc_view q_view = kvc_view_packed(q, KVC_DTYPE_F32, 2, 2, 2);

    assert_int_equal(kvc_observe_keys(o, 1, &k_view), KVC_OK);
    assert_int_equal(kvc_observe_queries(o, 1, &q_view), KVC_OK);
    const kvc_observed_layer l = layer_of(o, 1), other = layer_of(o, 0);
    assert_int_equal(l.n_keys, 3);
    assert_int_equal(l.n_queries, 2);
    assert_int_equal(l.n_nonfinite, 0);
    assert_true(l.k_absmax[0] == 3.0 && l.k_absmax[1] == 2.0);
    assert_true(l.k_sum[0] == 0.0 && l.k_sum[1] == -0.5);
    assert_true(l.k_square[0] == 14.0 && l.k_square[1] == 5.25);
    assert_true(l.q_square[0] == 11.25 && l.q_square[1] == 24.0);
    assert_int_equal(other.n_keys, 0);
    assert_int_equal(other.n_queries, 0);
    assert_true(other.k_absmax[0] == 0.0 && other.q_square[1] == 0.0);
    kvc_observation_destroy(o);
}

/* Query heads 0, 1 count for KV head 0 and 2, 3 for KV head 1. */
static void query_heads_count_for_the_kv_head_they_read(void **state)
{
    kvc_observation *o = create(best(state), shape_of(1, 4, 2, 1));
    float q[4] = {1, 2, 4, 8};
    const kvc_view view = kvc_view_packed(q, KVC_DTYPE_F32, 1, 4, 1);

    assert_int_equal(kvc_observe_queries(o, 0, &view), KVC_OK);
    const kvc_observed_layer l = layer_of(o, 0);
    assert_true(l.q_square[0] == 5.0 && l.q_square[1] == 80.0);
    kvc_observation_destroy(o);
}

/* 1, -2 and 0.5 as halves and as upper halves of floats; two tokens, rows with gaps. */
static void halves_and_strides_are_read(void **state)
{
    const uint16_t half[10] = {0x3c00, 0xc000, 9, 9, 9, 0x3800, 0x3800, 9, 9, 9};
    const uint16_t bf16[10] = {0x3f80, 0xc000, 9, 9, 9, 0x3f00, 0x3f00, 9, 9, 9};

    for (int i = 0; i < 2; i++) {
        kvc_observation *o = create(best(state), shape_of(1, 1, 1, 2));
        kvc_view view =
            kvc_view_packed((void *)(i ? bf16 : half), i ? KVC_DTYPE_BF16 : KVC_DTYPE_F16, 2, 1, 2);

        view.token_stride = 5;
        view.head_stride = 4;
        assert_int_equal(kvc_observe_keys(o, 0, &view), KVC_OK);
        assert_int_equal(kvc_observe_queries(o, 0, &view), KVC_OK);
        const kvc_observed_layer l = layer_of(o, 0);
        assert_true(l.k_sum[0] == 1.5 && l.k_sum[1] == -1.5);
        assert_true(l.k_square[0] == 1.25 && l.k_square[1] == 4.25);
        assert_true(l.q_square[0] == 1.25 && l.q_square[1] == 4.25);
        assert_true(l.k_absmax[0] == 1.0 && l.k_absmax[1] == 2.0);
        kvc_observation_destroy(o);
    }
}

static void what_is_not_finite_is_counted_and_left_out(void **state)
{
    kvc_observation *o = create(best(state), shape_of(1, 1, 1, 2));
    float x[6] = {NAN, 1, 2, -INFINITY, INFINITY, 4};
    const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, 3, 1, 2);

    assert_int_equal(kvc_observe_keys(o, 0, &view), KVC_OK);
    assert_int_equal(layer_of(o, 0).n_nonfinite, 3);
    assert_int_equal(kvc_observe_queries(o, 0, &view), KVC_OK);
    const kvc_observed_layer l = layer_of(o, 0);
    assert_int_equal(l.n_nonfinite, 6);
    assert_int_equal(l.n_keys, 3);
    assert_true(l.k_absmax[0] == 2.0 && l.k_absmax[1] == 4.0);
    assert_true(l.k_sum[0] == 2.0 && l.k_sum[1] == 5.0);
    assert_true(l.q_square[0] == 4.0 && l.q_square[1] == 17.0);
    kvc_observation_destroy(o);
}

/* In every kernel table the sums of a text are the same bits, however it is cut. */
static void cutting_a_text_differently_changes_no_bit(void **state)
{
    const struct tables *t = *state;
    static float k[64 * WIDTH], q[64 * HEADS * DIM];
    uint64_t rng = 3;

    fill(k, sizeof(k) / sizeof(*k), &rng);
    fill(q, sizeof(q) / sizeof(*q), &rng);
    kvc_observation *whole = create(t->ctx[0], shape_of(LAYERS, HEADS, KV_HEADS, DIM));
    see(whole, 1, k, q, 64);
    for (size_t i = 0; i < 30; i++) {
        kvc_observation *o = create(t->ctx[i % t->n], shape_of(LAYERS, HEADS, KV_HEADS, DIM));

        for (size_t at = 0, n; at < 64; at += n) {
            n = rng_below(&rng, 64 - at + 1);
            see(o, 1, k + at * WIDTH, q + at * HEADS * DIM, n);
        }
        assert_same(whole, o);
        kvc_observation_destroy(o);
    }
    kvc_observation_destroy(whole);
}

static void merging_adds_all_that_was_seen(void **state)
{
    kvc_observation *a = random_observation(best(state), 1, 9);
    kvc_observation *b = random_observation(best(state), 2, 4);
    kvc_observation *sum = random_observation(best(state), 1, 9);

    assert_int_equal(kvc_observation_merge(sum, b), KVC_OK);
    for (int32_t i = 0; i < LAYERS; i++) {
        const kvc_observed_layer x = layer_of(a, i), y = layer_of(b, i), s = layer_of(sum, i);
        assert_int_equal(s.n_keys, 13);
        assert_int_equal(s.n_queries, 13);
        for (size_t c = 0; c < WIDTH; c++) {
            assert_true(s.k_absmax[c] == fmax(x.k_absmax[c], y.k_absmax[c]));
            assert_true(s.k_sum[c] == x.k_sum[c] + y.k_sum[c]);
            assert_true(s.k_square[c] == x.k_square[c] + y.k_square[c]);
            assert_true(s.q_square[c] == x.q_square[c] + y.q_square[c]);
        }
    }
    /* Addition is commutative. */
    assert_int_equal(kvc_observation_merge(b, a), KVC_OK);
    assert_same(sum, b);
    assert_int_equal(kvc_observation_merge(sum, sum), KVC_E_ARG);
    assert_int_equal(kvc_observation_merge(NULL, a), KVC_E_ARG);
    assert_int_equal(kvc_observation_merge(a, NULL), KVC_E_ARG);
    assert_same(sum, b);
    kvc_observation_destroy(a);
    kvc_observation_destroy(b);
    kvc_observation_destroy(sum);
}

static void merging_refuses_another_shape(void **state)
{
    const kvc_observed_shape others[] = {
        shape_of(LAYERS + 1, HEADS, KV_HEADS, DIM), shape_of(LAYERS, HEADS * 2, KV_HEADS, DIM),
        shape_of(LAYERS, HEADS, 1, DIM), shape_of(LAYERS, HEADS, KV_HEADS, DIM + 1)};
    kvc_observation *a = random_observation(best(state), 1, 3);
    kvc_observation *before = random_observation(best(state), 1, 3);

    for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++) {
        kvc_observation *b = create(best(state), others[i]);
        assert_int_equal(kvc_observation_merge(a, b), KVC_E_MISMATCH);
        assert_same(a, before);
        kvc_observation_destroy(b);
    }
    kvc_observation_destroy(a);
    kvc_observation_destroy(before);
}

static void reset_forgets_everything(void **state)
{
    kvc_observation *o = random_observation(best(state), 5, 3);
    kvc_observation *fresh = create(best(state), shape_of(LAYERS, HEADS, KV_HEADS, DIM));

    kvc_observation_reset(o);
    assert_same(o, fresh);
    kvc_observation_reset(NULL);
    kvc_observation_destroy(o);
    kvc_observation_destroy(fresh);
    kvc_observation_destroy(NULL);
}

/* One head of two channels: k = 5 +- 4 and 1 +- 1, E q^2 = 1 and 4. */
static void calibration_is_the_mean_and_the_balance_about_it(void **state)
{
    kvc_observation *o = create(best(state), shape_of(1, 1, 1, 2));
    float k[4] = {9, 2, 1, 0}, q[2] = {1, 2}, mean[2], scale[2], alone[2];
    const kvc_view k_view = kvc_view_packed(k, KVC_DTYPE_F32, 2, 1, 2);
    const kvc_view q_view = kvc_view_packed(q, KVC_DTYPE_F32, 1, 1, 2);

    assert_int_equal(kvc_observe_keys(o, 0, &k_view), KVC_OK);
    assert_int_equal(kvc_observation_calibrate(o, mean, scale), KVC_OK);
    assert_true(mean[0] == 5.0f && mean[1] == 1.0f);
    /* (16, 1)^(1/4) = (2, 1), geometric mean sqrt 2 */
    assert_true(fabs((double)scale[0] - sqrt(2.0)) < 1e-6);
    assert_true(fabs((double)scale[1] - sqrt(0.5)) < 1e-6);
    assert_int_equal(kvc_observe_queries(o, 0, &q_view), KVC_OK);
    assert_int_equal(kvc_observation_calibrate(o, NULL, scale), KVC_OK);
    /* (16 / 1, 1 / 4)^(1/4) = (2, 1 / sqrt 2), geometric mean 2^(1/4) */
    assert_true(fabs((double)scale[0] - pow(2.0, 0.75)) < 1e-6);
    assert_true(fabs((double)scale[1] - pow(2.0, -0.75)) < 1e-6);
    assert_int_equal(kvc_observation_calibrate(o, alone, NULL), KVC_OK);
    assert_memory_equal(alone, mean, sizeof(mean));
    assert_int_equal(kvc_observation_calibrate(o, NULL, NULL), KVC_OK);
    kvc_observation_destroy(o);
}

static void calibration_survives_constant_channels(void **state)
{
    kvc_observation *o = create(best(state), shape_of(1, 2, 2, 2));
    float k[8] = {3, 1, 0.1f, 7, 3, 2, 0.1f, 7}, mean[4], scale[4];
    const kvc_view view = kvc_view_packed(k, KVC_DTYPE_F32, 2, 2, 2);

    assert_int_equal(kvc_observe_keys(o, 0, &view), KVC_OK);
    assert_int_equal(kvc_observation_calibrate(o, mean, scale), KVC_OK);
    /* variance 0 counts as 1e-12 of 1/4: the ratio is 1000 */
    assert_true(fabs((double)scale[1] / (double)scale[0] / 1000.0 - 1.0) < 1e-6);
    for (size_t c = 0; c < 4; c++)
        assert_true(isnormal(scale[c]) && scale[c] > 0.0f);
    assert_true(mean[2] == 0.1f && mean[3] == 7.0f);
    kvc_observation_destroy(o);
}

static void calibration_needs_keys_of_every_layer(void **state)
{
    kvc_observation *o = create(best(state), shape_of(2, 1, 1, 1));
    float k[1] = {2}, mean[2] = {7, 7}, scale[2] = {7, 7};
    const kvc_view view = kvc_view_packed(k, KVC_DTYPE_F32, 1, 1, 1);

    assert_int_equal(kvc_observe_keys(o, 0, &view), KVC_OK);
    assert_int_equal(kvc_observe_queries(o, 1, &view), KVC_OK);
    assert_int_equal(kvc_observation_calibrate(o, mean, scale), KVC_E_ARG);
    assert_int_equal(kvc_observation_calibrate(NULL, mean, scale), KVC_E_ARG);
    assert_true(mean[0] == 7.0f && scale[1] == 7.0f);
    kvc_observation_destroy(o);
}

static void views_of_another_shape_are_refused_and_nothing_changes(void **state)
{
    static float x[3 * HEADS * (DIM + 1)];
    kvc_observation *o = random_observation(best(state), 1, 3);
    kvc_observation *before = random_observation(best(state), 1, 3);
    kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 3, KV_HEADS, DIM);
    kvc_view q = kvc_view_packed(x, KVC_DTYPE_F32, 3, HEADS, DIM);

    assert_int_equal(kvc_observe_keys(NULL, 0, &k), KVC_E_ARG);
    assert_int_equal(kvc_observe_queries(NULL, 0, &q), KVC_E_ARG);
    assert_int_equal(kvc_observe_keys(o, 0, NULL), KVC_E_ARG);
    assert_int_equal(kvc_observe_queries(o, 0, NULL), KVC_E_ARG);
    assert_int_equal(kvc_observe_keys(o, -1, &k), KVC_E_ARG);
    assert_int_equal(kvc_observe_keys(o, LAYERS, &k), KVC_E_ARG);
    assert_int_equal(kvc_observe_queries(o, -1, &q), KVC_E_ARG);
    assert_int_equal(kvc_observe_queries(o, LAYERS, &q), KVC_E_ARG);
    assert_int_equal(kvc_observe_keys(o, 0, &q), KVC_E_ARG);
    assert_int_equal(kvc_observe_queries(o, 0, &k), KVC_E_ARG);
    k.head_dim = q.head_dim = k.head_stride = q.head_stride = DIM + 1;
    assert_int_equal(kvc_observe_keys(o, 0, &k), KVC_E_ARG);
    assert_int_equal(kvc_observe_queries(o, 0, &q), KVC_E_ARG);
    k = kvc_view_packed(NULL, KVC_DTYPE_F32, 3, KV_HEADS, DIM);
    assert_int_equal(kvc_observe_keys(o, 0, &k), KVC_E_ARG);
    k.n_tokens = 0; /* nothing to add */
    assert_int_equal(kvc_observe_keys(o, 0, &k), KVC_OK);
    assert_same(o, before);
    kvc_observation_destroy(o);
    kvc_observation_destroy(before);
}

static void shapes_out_of_range_are_refused(void **state)
{
    const struct {
        kvc_observed_shape shape;
        kvc_status status;
    } cases[] = {
        {shape_of(0, 4, 2, 8), KVC_E_ARG},           {shape_of(65537, 4, 2, 8), KVC_E_ARG},
        {shape_of(-1, 4, 2, 8), KVC_E_ARG},          {shape_of(1, 0, 2, 8), KVC_E_ARG},
        {shape_of(1, 65538, 2, 8), KVC_E_ARG},       {shape_of(1, 4, 0, 8), KVC_E_ARG},
        {shape_of(1, 4, 3, 8), KVC_E_ARG},           {shape_of(1, 2, 4, 8), KVC_E_ARG},
        {shape_of(1, 4, 2, 0), KVC_E_ARG},           {shape_of(1, 4, 2, -8), KVC_E_ARG},
        {shape_of(1, 4, 2, 513), KVC_E_UNSUPPORTED}, {shape_of(1, 4, 2, 512), KVC_OK},
    };
    kvc_observed_shape shape = cases[11].shape;
    kvc_observation *o;

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        o = (kvc_observation *)&shape;
        assert_int_equal(kvc_observation_create(best(state), &cases[i].shape, &o), cases[i].status);
        assert_true((o != NULL) == (cases[i].status == KVC_OK));
        kvc_observation_destroy(o);
    }
    shape.struct_size = 8;
    assert_int_equal(kvc_observation_create(best(state), &shape, &o), KVC_E_ARG);
    assert_null(o);
    assert_int_equal(kvc_observation_create(NULL, &cases[11].shape, &o), KVC_E_ARG);
    assert_int_equal(kvc_observation_create(best(state), NULL, &o), KVC_E_ARG);
    assert_int_equal(kvc_observation_create(best(state), &cases[11].shape, NULL), KVC_E_ARG);
}

static void the_shape_is_told(void **state)
{
    kvc_observation *o = create(best(state), shape_of(3, 6, 2, 8));
    kvc_observed_shape shape = {.struct_size = sizeof(shape)};
    kvc_observed_layer layer = {.struct_size = sizeof(layer) - 1};

    assert_int_equal(kvc_observation_shape(o, &shape), KVC_OK);
    assert_int_equal(shape.n_layers, 3);
    assert_int_equal(shape.n_heads, 6);
    assert_int_equal(shape.n_kv_heads, 2);
    assert_int_equal(shape.head_dim, 8);
    assert_int_equal(kvc_observation_shape(NULL, &shape), KVC_E_ARG);
    assert_int_equal(kvc_observation_shape(o, NULL), KVC_E_ARG);
    shape.struct_size--;
    assert_int_equal(kvc_observation_shape(o, &shape), KVC_E_ARG);
    assert_int_equal(kvc_observation_read(o, 0, &layer), KVC_E_ARG);
    layer.struct_size++;
    assert_int_equal(kvc_observation_read(o, 3, &layer), KVC_E_ARG);
    assert_int_equal(kvc_observation_read(o, -1, &layer), KVC_E_ARG);
    assert_int_equal(kvc_observation_read(o, 0, NULL), KVC_E_ARG);
    assert_int_equal(kvc_observation_read(NULL, 0, &layer), KVC_E_ARG);
    kvc_observation_destroy(o);
}

struct source {
    size_t n_allocs, n_frees, size;
    bool fails, locked;
};

static void *source_alloc(void *user, size_t size, size_t align)
{
    struct source *source = user;

    assert_false(source->locked);
    source->n_allocs++;
    source->size = size;
    return source->fails ? NULL : aligned_alloc(align, (size + align - 1) / align * align);
}

static void source_free(void *user, void *ptr)
{
    struct source *source = user;

    assert_false(source->locked);
    source->n_frees++;
    free(ptr);
}

/* Every call but create, load and destroy. */
static void work(kvc_observation *o, const kvc_observation *other)
{
    static float x[HEADS * DIM] = {1, 2, 3};
    static unsigned char file[2000];
    float mean[LAYERS * WIDTH], scale[LAYERS * WIDTH];
    kvc_smooth_options options;

    for (int32_t l = 0; l < LAYERS; l++)
        see(o, l, x, x, 1);
    assert_int_equal(kvc_observation_merge(o, other), KVC_OK);
    assert_int_equal(kvc_observation_calibrate(o, mean, scale), KVC_OK);
    kvc_smooth_options_default(&options);
    options.n_rot = DIM - 1;
    assert_int_equal(kvc_smooth_scales(o, 0, &options, scale), KVC_OK);
    assert_int_equal(kvc_observation_save(o, file, kvc_observation_size(o)), KVC_OK);
    kvc_observation_reset(o);
}

/* Known fault I3: only create and load allocate, once each, and undo what failed. */
static void one_allocation_holds_everything(void **state)
{
    struct source source = {0};
    const kvc_ctx_params params = {.struct_size = sizeof(params),
                                   .allocator = {source_alloc, source_free, &source}};
    const kvc_observed_shape shape = shape_of(LAYERS, HEADS, KV_HEADS, DIM);
    kvc_observation *o, *loaded = NULL;
    unsigned char *file;
    kvc_ctx *ctx;
    size_t size;

    (void)state;
    assert_int_equal(kvc_ctx_create(&params, &ctx), KVC_OK);
    assert_int_equal(kvc_observation_create(ctx, &shape, &o), KVC_OK);
    assert_int_equal(source.n_allocs, 2);
    assert_true(source.size <= 32 * LAYERS * WIDTH + 24 * LAYERS + 256);
    file = file_of(o, &size);
    assert_int_equal(kvc_observation_load(ctx, file, size, &loaded), KVC_OK);
    assert_int_equal(source.n_allocs, 3);
    source.locked = true;
    work(o, loaded);
    source.locked = false;
    kvc_observation_destroy(loaded);
    kvc_observation_destroy(o);
    source.fails = true;
    assert_int_equal(kvc_observation_create(ctx, &shape, &o), KVC_E_NOMEM);
    assert_null(o);
    assert_int_equal(kvc_observation_load(ctx, file, size, &o), KVC_E_NOMEM);
    assert_null(o);
    kvc_ctx_destroy(ctx);
    assert_int_equal(source.n_frees, 3);
    free(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_those_of_the_rows),
        cmocka_unit_test(query_heads_count_for_the_kv_head_they_read),
        cmocka_unit_test(halves_and_strides_are_read),
        cmocka_unit_test(what_is_not_finite_is_counted_and_left_out),
        cmocka_unit_test(cutting_a_text_differently_changes_no_bit),
        cmocka_unit_test(merging_adds_all_that_was_seen),
        cmocka_unit_test(merging_refuses_another_shape),
        cmocka_unit_test(reset_forgets_everything),
        cmocka_unit_test(calibration_is_the_mean_and_the_balance_about_it),
        cmocka_unit_test(calibration_survives_constant_channels),
        cmocka_unit_test(calibration_needs_keys_of_every_layer),
        cmocka_unit_test(views_of_another_shape_are_refused_and_nothing_changes),
        cmocka_unit_test(shapes_out_of_range_are_refused),
        cmocka_unit_test(the_shape_is_told),
        cmocka_unit_test(one_allocation_holds_everything),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
