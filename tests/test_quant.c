/* Quantize and dequantize: layouts, reference numbers, hand-computed vectors, what is written. */
#include <math.h>

#include "support/coded.h"
#include "support/half.h"
#include "support/rng.h"
#include "support/vector.h"

static void default_options_set_every_field(void **state)
{
    kvc_quant_options o;

    (void)state;
    memset(&o, 0xFF, sizeof(o));
    kvc_quant_options_default(&o);
    assert_int_equal(o.struct_size, sizeof(o));
    assert_int_equal(o.format, KVC_INT8);
    assert_int_equal(o.scale, KVC_SCALE_TOKEN);
    assert_int_equal(o.block_tokens, 64);
    assert_int_equal(o.window_tokens, 64);
    assert_false(o.strict);
    kvc_quant_options_default(NULL);
}

static void sizes_are_those_of_the_documented_layout(void **state)
{
    static const struct {
        kvc_format format;
        kvc_scale scale;
        size_t block, n_tokens, n_heads, head_dim, codes, params;
    } cases[] = {
        {KVC_INT8, KVC_SCALE_HEAD, 2, 5, 3, 7, 105, 36},
        {KVC_INT4, KVC_SCALE_HEAD, 2, 5, 3, 7, 60, 36},
        {KVC_INT8, KVC_SCALE_LAYER, 2, 5, 3, 7, 105, 12},
        {KVC_INT4, KVC_SCALE_LAYER, 5, 5, 3, 7, 60, 4},
        {KVC_INT8, KVC_SCALE_TOKEN, 2, 5, 3, 7, 105, 30},
        {KVC_INT4, KVC_SCALE_TOKEN, 2, 5, 3, 7, 60, 30},
        {KVC_INT8, KVC_SCALE_CHANNEL, 2, 5, 3, 7, 105, 252},
        {KVC_INT4, KVC_SCALE_CHANNEL, 9, 5, 3, 7, 60, 84},
        {KVC_INT4, KVC_SCALE_TOKEN, 64, 1, 1, KVC_MAX_HEAD_DIM, 256, 2},
        {KVC_INT8, KVC_SCALE_CHANNEL, 64, 0, 3, 7, 0, 0},
        /* The largest sizes: nothing may wrap on the way. */
        {KVC_INT8, KVC_SCALE_LAYER, SIZE_MAX, SIZE_MAX, 1, 1, SIZE_MAX, 4},
        {KVC_INT8, KVC_SCALE_HEAD, 64, SIZE_MAX, 1, 1, SIZE_MAX, SIZE_MAX / 64 * 4 + 4},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const size_t block = cases[i].block;
        const kvc_quant_options o = quant_options(cases[i].format, cases[i].scale, block, block);
        const size_t t = cases[i].n_tokens, h = cases[i].n_heads, d = cases[i].head_dim;
        size_t codes = 1, params = 1;

        assert_int_equal(kvc_quant_size(t, h, d, &o, &codes, &params), KVC_OK);
        assert_int_equal(codes, cases[i].codes);
        assert_int_equal(params, cases[i].params);
        assert_int_equal(kvc_quant_size(t, h, d, &o, NULL, NULL), KVC_OK);
    }
}

/* Printed reference numbers made with numpy; inputs from lcg_unit(). */

static const int8_t seal8_codes[64] = {
    -85, -13, -101, 78,  72,   -127, -98, -9,  8,   64,  66,  -127, 22,  96,   -12, -18,
    -39, -13, 39,   -7,  34,   14,   20,  -9,  -20, -28, -26, -29,  -35, -11,  2,   -14,
    -53, 23,  75,   -8,  -53,  94,   81,  106, 50,  95,  56,  112,  -62, -100, 116, 124,
    115, -81, 7,    112, -127, -124, 32,  -16, -45, 33,  45,  82,   -11, 119,  -90, 68};
static const float seal8_scales[8] = {0x1.956ad6p-6f, 0x1.8b0e1cp-9f, 0x1.956ad6p-6f,
                                      0x1.8b0e1cp-9f, 0x1.f58b16p-8f, 0x1.b8e5ccp-11f,
                                      0x1.ba952ap-8f, 0x1.013e7cp-10f};
static const uint8_t seal4_codes[32] = {251, 74,  148, 251, 64,  148, 81, 255, 254, 2,  18,
                                        241, 239, 239, 254, 240, 29,  4,  93,  100, 83, 99,
                                        173, 118, 198, 96,  153, 242, 46, 82,  127, 75};
static const float seal4_scales[8] = {0x1.cbb6dcp-2f, 0x1.bff6dcp-5f, 0x1.cbb6dcp-2f,
                                      0x1.bff6dcp-5f, 0x1.1c5b6ep-3f, 0x1.f3f24ap-7f,
                                      0x1.f5db6ep-4f, 0x1.23b24ap-6f};

static void reference_numbers_of_the_window_of_blocks_are_met(void **state)
{
    const kvc_quant_options o8 = quant_options(KVC_INT8, KVC_SCALE_HEAD, 2, 4);
    const kvc_quant_options o4 = quant_options(KVC_INT4, KVC_SCALE_HEAD, 2, 4);
    float x[64];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, 8, 2, 4);
    uint32_t lcg = 2;
    struct coded c;

    for (size_t i = 0; i < 64; i++) {
        x[i] = lcg_unit(&lcg) * (i < 16 ? 4.0f : 1.0f) * (i / 4 % 2 == 1 ? 0.125f : 1.0f);
    }
    c = code_all(*state, &src, &o8);
    assert_memory_equal(c.codes, seal8_codes, sizeof(seal8_codes));
    assert_memory_equal(c.params, seal8_scales, sizeof(seal8_scales));
    coded_free(&c);
    c = code_all(*state, &src, &o4);
    assert_memory_equal(c.codes, seal4_codes, sizeof(seal4_codes));
    assert_memory_equal(c.params, seal4_scales, sizeof(seal4_scales));
    coded_free(&c);
}

static void reference_numbers_of_the_edge_cases_are_met(void **state)
{
    static const struct vector vectors[] = {
        {"ties8",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 8},
         {127, .5f, 1.5f, 2.5f, -.5f, -1.5f, -127, 126.5f},
         {127, 0, 2, 2, 0, 0xFE, 0x81, 126},
         .floats = {1}},
        {"ties4: 7 0 2 2 0 -2 -7 6",
         {KVC_INT4, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 8},
         {7, .5f, 1.5f, 2.5f, -.5f, -1.5f, -7, 6.5f},
         {0x07, 0x22, 0xE0, 0x69},
         .floats = {1}},
        {"zero",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 4},
         {0, 0, 0, 0},
         {0, 0, 0, 0},
         .floats = {0}},
        {"negzero",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 4},
         {-0.0f, 0, -0.0f, 0},
         {0, 0, 0, 0},
         .floats = {0}},
        {"denormal",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 4},
         {1e-40f, -1e-40f, 0, 5e-41f},
         {0, 0, 0, 0},
         .floats = {0}},
        {"tiny",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 4},
         {1e-30f, -1e-30f, 0, 5e-31f},
         {127, 0x81, 0, 64},
         .floats = {0x1.4712e6p-107f}},
        {"nan",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 4},
         {1, NAN, -.5f, .25f},
         {127, 0, 0xC0, 32},
         .floats = {0x1.020408p-7f},
         .n_nonfinite = 1},
        {"inf",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 4},
         {1, INFINITY, -INFINITY, .25f},
         {127, 127, 0x81, 32},
         .floats = {0x1.020408p-7f},
         .n_nonfinite = 2},
        {"allbad",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 4},
         {NAN, INFINITY, -INFINITY, NAN},
         {0, 0, 0, 0},
         .floats = {0},
         .n_nonfinite = 4},
        {"big",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 4},
         {3.4e38f, -3.4e38f, 1e38f, 0},
         {127, 0x81, 37, 0},
         .floats = {0x1.01cd38p+121f}},
    };

    check_vectors(*state, vectors, sizeof(vectors) / sizeof(vectors[0]));
}

static void hand_computed_vectors_are_met(void **state)
{
    static const struct vector vectors[] = {
        {"1/127 = 0.0078740 lies between the halves 0x2008 and 0x2009: up; 0.5 * 126.884 = 63.44",
         {KVC_INT8, KVC_SCALE_TOKEN, 64, 64},
         {1, 1, 3},
         {1, -1, 0.5f},
         {127, 0x81, 63},
         .halves = {0x2009}},
        {"a row and head each has its own scale: 127/127 = 1 and 254/127 = 2; 3 / 2 = 1.5 -> 2",
         {KVC_INT8, KVC_SCALE_TOKEN, 64, 64},
         {1, 2, 2},
         {127, 3, -254, 3},
         {127, 3, 0x81, 2},
         .halves = {0x3C00, 0x4000}},
        {"negative extreme: s = -4 / -8 = 0.5; codes -8 2 4 and 7.8 -> 8 -> 7",
         {KVC_INT4, KVC_SCALE_TOKEN, 64, 64},
         {1, 1, 4},
         {-4, 1, 2, 3.9f},
         {0x28, 0x74},
         .halves = {0x3800}},
        {"equal extremes: the positive one, s = -0.5; codes -8 7 -4 1",
         {KVC_INT4, KVC_SCALE_TOKEN, 64, 64},
         {1, 1, 4},
         {4, -4, 2, -0.5f},
         {0x78, 0x1C},
         .halves = {0xB800}},
        {"block scales: 100 / 127 and 2 / 127 with windows of one token",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {2, 1, 2},
         {100, 50, 2, -2},
         {127, 64, 127, 0x81},
         .floats = {100.0f / 127.0f, 2.0f / 127.0f}},
        {"the window of a short last block is that of a whole one: 8, not 50",
         {KVC_INT8, KVC_SCALE_HEAD, 2, 4},
         {5, 1, 1},
         {100, 50, 8, 4, 1},
         {127, 64, 10, 5, 16},
         .floats = {100.0f / 127.0f, 100.0f / 127.0f, 8.0f / 127.0f}},
        {"all heads share: absmax 7, scale 1; codes 7 -7 and 1 -3.5 -> -4",
         {KVC_INT4, KVC_SCALE_LAYER, 1, 1},
         {1, 2, 2},
         {7, -7, 1, -3.5f},
         {0x97, 0xC1},
         .floats = {1}},
        {"channel 0 is 0..255 in steps of 1, channel 1 has no spread: scale 0, the code of 0",
         {KVC_INT8, KVC_SCALE_CHANNEL, 2, 2},
         {2, 1, 2},
         {0, -1, 255, -1},
         {0x80, 0x80, 0x7F, 0x80},
         .halves = {0x3C00, 0x0000, 0x0000, 0xBC00}},
        {"steps 1, 0.5 and 2 / 15 = 1092.3 * 2^-13 -> 1093 * 2^-13; low codes -8, high codes 7",
         {KVC_INT4, KVC_SCALE_CHANNEL, 2, 2},
         {2, 1, 3},
         {-1, 0, 3, 14, 7.5f, 5},
         {0x88, 0x08, 0x77, 0x07},
         .halves = {0x3C00, 0x3800, 0x3045, 0xBC00, 0x0000, 0x4200}},
    };

    check_vectors(*state, vectors, sizeof(vectors) / sizeof(vectors[0]));
}

/* A tensor of [20][2][33] numbers that F16 and BF16 hold exactly. */
enum { TOKENS = 20, HEADS = 2, DIM = 33, ELEMENTS = TOKENS * HEADS * DIM };

static void fill_exact(float *x)
{
    uint64_t rng = 1;

    for (size_t i = 0; i < ELEMENTS; i++) {
        x[i] = ((float)rng_below(&rng, 255) - 127.0f) * 0.125f;
    }
}

static void equal_numbers_of_any_dtype_give_equal_bytes(void **state)
{
    float x[ELEMENTS];
    uint16_t f16[ELEMENTS], bf16[ELEMENTS];

    fill_exact(x);
    for (size_t i = 0; i < ELEMENTS; i++) {
        f16[i] = half_away((double)x[i]);
        bf16[i] = (uint16_t)(float_bits(x[i]) >> 16);
    }
    for (int mode = 0; mode < QUANT_MODES; mode++) {
        const kvc_quant_options o = quant_mode(mode, 8, 16);
        void *const data[] = {x, f16, bf16};
        struct coded c[3];

        for (int dtype = KVC_DTYPE_F32; dtype <= KVC_DTYPE_BF16; dtype++) {
            const kvc_view src = kvc_view_packed(data[dtype], (kvc_dtype)dtype, TOKENS, HEADS, DIM);

            c[dtype] = code_all(*state, &src, &o);
            assert_same_coded(&c[dtype], &c[0]);
        }
        for (int i = 0; i < 3; i++) {
            coded_free(&c[i]);
        }
    }
}

static void null_options_are_the_defaults(void **state)
{
    const struct tables *t = *state;
    float x[ELEMENTS], y[ELEMENTS];
    unsigned char codes[ELEMENTS];
    uint16_t scales[TOKENS * HEADS];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    const kvc_view dst = kvc_view_packed(y, KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    kvc_quant_options o;
    struct coded c;
    float *want;

    fill_exact(x);
    kvc_quant_options_default(&o);
    c = code_all(t, &src, &o);
    want = decode_all(t, &c, &o, TOKENS, HEADS, DIM);
    for (size_t i = 0; i < t->n; i++) {
        assert_int_equal(
            kvc_quantize(t->ctx[i], &src, NULL, codes, sizeof(codes), scales, sizeof(scales), NULL),
            KVC_OK);
        assert_memory_equal(codes, c.codes, c.codes_bytes);
        assert_memory_equal(scales, c.params, c.params_bytes);
        assert_int_equal(
            kvc_dequantize(t->ctx[i], codes, sizeof(codes), scales, sizeof(scales), NULL, &dst),
            KVC_OK);
        assert_memory_equal(y, want, sizeof(y));
    }
    free(want);
    coded_free(&c);
}

static void the_token_scale_needs_no_block_or_window(void **state)
{
    const kvc_quant_options zeros = quant_options(KVC_INT8, KVC_SCALE_TOKEN, 0, 0);
    const kvc_quant_options set = quant_options(KVC_INT8, KVC_SCALE_TOKEN, 16, 32);
    float x[ELEMENTS];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    struct coded a, b;

    fill_exact(x);
    a = code_all(*state, &src, &zeros);
    b = code_all(*state, &src, &set);
    assert_same_coded(&a, &b);
    coded_free(&a);
    coded_free(&b);
}

static void blocks_and_windows_longer_than_the_tensor_are_one_group(void **state)
{
    static const size_t sizes[][2] = {{1, SIZE_MAX}, {TOKENS, TOKENS}, {SIZE_MAX, SIZE_MAX}};
    float x[ELEMENTS];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, TOKENS, HEADS, DIM);

    fill_exact(x);
    x[5] = 100;        /* the first token sets all scales of head 0 */
    x[DIM + 5] = -200; /* and of head 1 */
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        const kvc_quant_options o =
            quant_options(KVC_INT8, KVC_SCALE_HEAD, sizes[i][0], sizes[i][1]);
        struct coded c = code_all(*state, &src, &o);
        const float *scales = c.params;

        for (size_t k = 0; k < c.params_bytes / sizeof(float); k += HEADS) {
            assert_true(scales[k] == 100.0f / 127.0f);
            assert_true(scales[k + 1] == 200.0f / 127.0f);
        }
        coded_free(&c);
    }
}

static void no_tokens_write_nothing_but_counts(void **state)
{
    const struct tables *t = *state;
    float x[1] = {0};
    const kvc_view none = kvc_view_packed(x, KVC_DTYPE_F32, 0, HEADS, DIM);

    for (size_t i = 0; i < t->n; i++) {
        struct guard codes = guard_new(8, 1, 0xA5), params = guard_new(8, 4, 0xA5);
        kvc_quant_counts counts = {sizeof(counts), 9, 9};

        for (int mode = 0; mode < QUANT_MODES; mode++) {
            const kvc_quant_options o = quant_mode(mode, 8, 16);

            counts.n_nonfinite = counts.n_saturated = 9;
            assert_int_equal(
                kvc_quantize(t->ctx[i], &none, &o, codes.data, 0, params.data, 0, &counts), KVC_OK);
            assert_int_equal(counts.struct_size, sizeof(counts));
            assert_int_equal(counts.n_nonfinite, 0);
            assert_int_equal(counts.n_saturated, 0);
            assert_int_equal(kvc_dequantize(t->ctx[i], codes.data, 0, params.data, 0, &o, &none),
                             KVC_OK);
        }
        assert_true(guard_untouched(&codes));
        assert_true(guard_untouched(&params));
        assert_true(x[0] == 0);
        guard_free(&codes);
        guard_free(&params);
    }
}

static void dequantize_leaves_gaps_between_rows(void **state)
{
    const struct tables *t = *state;
    float x[ELEMENTS];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    /* Token by token with gaps, and head by head with gaps. */
    static const size_t strides[][2] = {{2 * (DIM + 3) + 5, DIM + 3},
                                        {DIM + 1, TOKENS * (DIM + 1)}};

    fill_exact(x);
    for (int mode = 0; mode < 2 * QUANT_MODES; mode++) {
        const kvc_quant_options o = quant_mode(mode % QUANT_MODES, 8, 16);
        struct coded c = code_all(t, &src, &o);
        float *want = decode_all(t, &c, &o, TOKENS, HEADS, DIM);

        for (size_t i = 0; i < t->n; i++) {
            const size_t n = TOKENS * (2 * (DIM + 3) + 5);
            struct guard out = guard_new(n * sizeof(float), 4, 0xA5);
            kvc_view dst = kvc_view_packed(out.data, KVC_DTYPE_F32, TOKENS, HEADS, DIM);

            dst.token_stride = strides[mode / QUANT_MODES][0];
            dst.head_stride = strides[mode / QUANT_MODES][1];
            assert_int_equal(kvc_dequantize(t->ctx[i], c.codes, c.codes_bytes, c.params,
                                            c.params_bytes, &o, &dst),
                             KVC_OK);
            for (size_t row = 0; row < TOKENS * HEADS; row++) {
                unsigned char *at =
                    out.data + (row / HEADS * dst.token_stride + row % HEADS * dst.head_stride) *
                                   sizeof(float);

                assert_memory_equal(at, want + row * DIM, DIM * sizeof(float));
                memset(at, out.fill, DIM * sizeof(float));
            }
            assert_true(guard_untouched(&out));
            guard_free(&out);
        }
        free(want);
        coded_free(&c);
    }
}

struct memory {
    size_t n_alloc, n_free, bytes;
};

static void *count_alloc(void *user, size_t size, size_t align)
{
    struct memory *m = user;

    m->n_alloc++;
    m->bytes += size;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void count_free(void *user, void *ptr)
{
    struct memory *m = user;

    m->n_free++;
    free(ptr);
}

static void no_threads(void *user, size_t n_tasks, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    (void)n_tasks;
    (void)task;
    (void)arg;
    fail_msg("the operators run in the calling thread");
}

static void only_the_context_allocates_and_no_thread_is_used(void **state)
{
    const struct tables *t = *state;
    float x[ELEMENTS], y[ELEMENTS];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    const kvc_view dst = kvc_view_packed(y, KVC_DTYPE_F32, TOKENS, HEADS, DIM);

    fill_exact(x);
    for (size_t i = 0; i < t->n; i++) {
        struct memory memory = {0};
        const kvc_ctx_params params = {.struct_size = sizeof(params),
                                       .allocator = {count_alloc, count_free, &memory},
                                       .parallel_for = no_threads,
                                       .kernels = kvc_ctx_kernels(t->ctx[i])};
        kvc_ctx *ctx;

        assert_int_equal(kvc_ctx_create(&params, &ctx), KVC_OK);
        for (int mode = 0; mode < QUANT_MODES; mode++) {
            const kvc_quant_options o = quant_mode(mode, 8, 16);
            struct coded c = code_all(t, &src, &o);

            assert_int_equal(
                kvc_quantize(ctx, &src, &o, c.codes, c.codes_bytes, c.params, c.params_bytes, NULL),
                KVC_OK);
            assert_int_equal(
                kvc_dequantize(ctx, c.codes, c.codes_bytes, c.params, c.params_bytes, &o, &dst),
                KVC_OK);
            coded_free(&c);
        }
        kvc_ctx_destroy(ctx);
        assert_int_equal(memory.n_alloc, 1);
        assert_int_equal(memory.n_free, 1);
        assert_true(memory.bytes < 256);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_options_set_every_field),
        cmocka_unit_test(sizes_are_those_of_the_documented_layout),
        cmocka_unit_test(reference_numbers_of_the_window_of_blocks_are_met),
        cmocka_unit_test(reference_numbers_of_the_edge_cases_are_met),
        cmocka_unit_test(hand_computed_vectors_are_met),
        cmocka_unit_test(equal_numbers_of_any_dtype_give_equal_bytes),
        cmocka_unit_test(null_options_are_the_defaults),
        cmocka_unit_test(the_token_scale_needs_no_block_or_window),
        cmocka_unit_test(blocks_and_windows_longer_than_the_tensor_are_one_group),
        cmocka_unit_test(no_tokens_write_nothing_but_counts),
        cmocka_unit_test(dequantize_leaves_gaps_between_rows),
        cmocka_unit_test(only_the_context_allocates_and_no_thread_is_used),
    };
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
