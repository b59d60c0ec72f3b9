/* kvc_quantize_window(): the printed function, its edges and refusals. */
#include <math.h>

#include "support/coded.h"
#include "support/quant_mistakes.h"
#include "support/rng.h"

/* Printed reference numbers made with numpy; inputs from lcg_unit(). */
static const int8_t article_codes[2][6][4] = {
    {{-128, -128, 18, 127},
     {-119, -34, 73, 15},
     {-128, 37, -66, -21},
     {24, 89, -70, 127},
     {95, -46, 48, 8},
     {-75, -104, -113, -48}},
    {{-95, 53, 21, -31},
     {-61, 64, 111, -83},
     {-43, 124, -29, 12},
     {-9, 127, 96, 54},
     {118, 122, -89, -33},
     {48, -86, -2, -84}},
};
static const float article_scales[2] = {0x1.f04082p-8f, 0x1.fe3060p-5f};

static void reference_numbers_of_the_article_are_met(void **state)
{
    const struct tables *t = *state;
    float k[2][6][4]; /* head by head */
    kvc_view src = kvc_view_packed(k, KVC_DTYPE_F32, 6, 2, 4);
    uint32_t lcg = 1;

    for (size_t i = 0; i < 48; i++) {
        const float factor = i >= 24 ? 8.0f : i < 4 ? 16.0f : 1.0f;

        k[i / 24][i / 4 % 6][i % 4] = lcg_unit(&lcg) * factor;
    }
    src.token_stride = 4;
    src.head_stride = 24;
    for (size_t i = 0; i < t->n; i++) {
        int8_t codes[6][2][4];
        float scales[2];

        assert_int_equal(
            kvc_quantize_window(t->ctx[i], &src, 1, KVC_INT8, 3, codes, sizeof(codes), scales),
            KVC_OK);
        assert_memory_equal(scales, article_scales, sizeof(scales));
        for (size_t token = 0; token < 6; token++) {
            assert_memory_equal(codes[token][0], article_codes[0][token], 4);
            assert_memory_equal(codes[token][1], article_codes[1][token], 4);
        }
    }
}

static void the_article_scale_is_shared_by_the_batch_and_never_below_1e_5(void **state)
{
    const struct tables *t = *state;
    /* Two sequences of 3 tokens and 2 heads; window 2; head 1 is nearly zero in the window. */
    float a[3][2][3] = {{{99, -99, NAN}, {1, -1, 0}},
                        {{7, 1, -3.5f}, {0, 1e-7f, 0}},
                        {{0, 0.5f, 1.5f}, {0, 0, 4e-5f}}};
    float b[3][2][3] = {{{INFINITY, -INFINITY, 2}, {0, 0, 0}},
                        {{-6, NAN, INFINITY}, {0, 0, 0}},
                        {{2.5f, -0.5f, -2}, {0, 0, -6e-5f}}};
    static const unsigned char want[2][3][4] = {
        {{0x87, 0x00, 0x87, 0x00}, {0x17, 0x0C, 0x00, 0x00}, {0x00, 0x02, 0x00, 0x04}},
        {{0x87, 0x02, 0x00, 0x00}, {0x0A, 0x07, 0x00, 0x00}, {0x02, 0x0E, 0x00, 0x0A}}};
    const kvc_view src[2] = {kvc_view_packed(a, KVC_DTYPE_F32, 3, 2, 3),
                             kvc_view_packed(b, KVC_DTYPE_F32, 3, 2, 3)};

    for (size_t i = 0; i < t->n; i++) {
        struct guard codes = guard_new(sizeof(want), 1, 0xA5);
        float scales[2];

        assert_int_equal(
            kvc_quantize_window(t->ctx[i], src, 2, KVC_INT4, 2, codes.data, codes.size, scales),
            KVC_OK);
        assert_true(guard_intact(&codes));
        assert_true(scales[0] == 1 && scales[1] == 1e-5f);
        assert_memory_equal(codes.data, want, sizeof(want));
        guard_free(&codes);
    }
}

/* x * (1 / scale) or x * (127 / absmax) would go to the other side of some of these ties. */
static void codes_come_from_a_division_rounded_once(void **state)
{
    enum { DIM = 512, ROUNDS = 100 };
    const struct tables *t = *state;
    float x[DIM];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, 1, 1, DIM);
    uint64_t rng = 1;

    for (size_t round = 0; round < ROUNDS; round++) {
        const float absmax = 1.5f + 0.5f * rng_unit(&rng), step = (float)((double)absmax / 127);

        for (size_t d = 0; d < DIM; d++) {
            x[d] = ((float)rng_below(&rng, 253) - 126.5f) * step;
        }
        x[0] = absmax;
        for (size_t i = 0; i < t->n; i++) {
            int8_t codes[DIM];
            float scale;

            assert_int_equal(
                kvc_quantize_window(t->ctx[i], &src, 1, KVC_INT8, 1, codes, sizeof(codes), &scale),
                KVC_OK);
            assert_true(scale == step);
            for (size_t d = 0; d < DIM; d++) {
                const float quotient = (float)((double)x[d] / (double)step);

                assert_int_equal(codes[d], (int)nearbyint((double)quotient));
            }
        }
    }
}

static void dequantize_reads_what_the_article_function_writes(void **state)
{
    enum { N = 10, DIM = 33 };
    const struct tables *t = *state;
    float x[N * DIM];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, N, 1, DIM);
    uint64_t rng = 1;

    for (size_t i = 0; i < N * DIM; i++) {
        x[i] = rng_unit(&rng);
    }
    for (int format = KVC_INT8; format <= KVC_INT4; format++) {
        const kvc_quant_options o = quant_options((kvc_format)format, KVC_SCALE_HEAD, N, N);
        struct coded c = code_all(t, &src, &o);

        for (size_t i = 0; i < t->n; i++) {
            float *y;

            /* A window of any length beyond the tensor is the tensor. */
            assert_int_equal(kvc_quantize_window(t->ctx[i], &src, 1, (kvc_format)format, SIZE_MAX,
                                                 c.codes, c.codes_bytes, c.params),
                             KVC_OK);
            y = decode_all(t, &c, &o, N, 1, DIM);
            for (size_t k = 0; k < N * DIM; k++) {
                assert_true(fabsf(y[k] - x[k]) <= *(const float *)c.params * 0.5001f);
            }
            free(y);
        }
        coded_free(&c);
    }
}

static void an_older_larger_token_is_clipped_to_the_asymmetric_range(void **state)
{
    enum { LOUD = 10, N = LOUD + 512, DIM = 4 };
    const struct tables *t = *state;
    float x[N * DIM];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, N, 1, DIM);
    uint64_t rng = 1;

    for (size_t i = 0; i < N * DIM; i++) {
        x[i] = i < LOUD * DIM ? 10.0f * (i % 2 == 0 ? 1.0f : -1.0f) : rng_unit(&rng);
    }
    for (size_t i = 0; i < t->n; i++) {
        int8_t codes[N * DIM];
        float scale;

        assert_int_equal(
            kvc_quantize_window(t->ctx[i], &src, 1, KVC_INT8, 512, codes, sizeof(codes), &scale),
            KVC_OK);
        assert_true(scale <= 1.0f / 127);
        assert_int_equal(codes[0], 127);
        assert_int_equal(codes[1], -128);
    }
}

/* The arguments of kvc_quantize_window() for two sequences. */
struct article_call {
    kvc_ctx *ctx;
    kvc_view *views; /* [2] */
    const kvc_view *src;
    size_t n_batch, window, codes_bytes;
    kvc_format format;
    unsigned char *codes;
    float *scales;
};

static const char *spoil_article(struct article_call *c, size_t which)
{
    switch (which) {
    case 0: c->ctx = NULL; return "ctx NULL";
    case 1: c->src = NULL; return "src NULL";
    case 2: c->codes = NULL; return "codes NULL";
    case 3: c->scales = NULL; return "scales NULL";
    case 4: c->n_batch = 0; return "no sequence";
    case 5: c->window = 0; return "window 0";
    case 6: c->format = KVC_F16; return "format F16";
    case 7: c->format = (kvc_format)3; return "format 3";
    case 8: c->codes_bytes -= 1; return "one byte too few";
    case 9: c->codes_bytes += 1; return "one byte too many";
    case 10: c->codes_bytes /= 2; return "the size of one sequence";
    case 11: c->views[1].n_tokens -= 1; return "another number of tokens";
    case 12: c->views[1].n_heads -= 1; return "another number of heads";
    case 13: c->views[1].head_dim -= 1; return "another head_dim";
    case 14: c->n_batch = SIZE_MAX / 2; return "more sequences than codes";
    default: return NULL;
    }
}

static void the_article_function_refuses_bad_arguments_and_writes_nothing(void **state)
{
    enum { TOKENS = 4, HEADS = 2, DIM = 8, ELEMENTS = TOKENS * HEADS * DIM };
    const struct tables *t = *state;
    float x[ELEMENTS] = {1, 2, 3};

    for (size_t i = 0; i < t->n; i++) {
        struct guard codes = guard_new(2 * ELEMENTS, 0, 0xA5);
        struct guard scales = guard_new(HEADS * sizeof(float), 0, 0xA5);

        for (size_t which = 0; which < 96; which++) {
            const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, TOKENS, HEADS, DIM);
            struct article_call c = {.ctx = t->ctx[i],
                                     .views = malloc(2 * sizeof(view)),
                                     .n_batch = 2,
                                     .window = 3,
                                     .codes_bytes = codes.size,
                                     .format = KVC_INT8,
                                     .codes = codes.data,
                                     .scales = (float *)(void *)scales.data};
            const char *what;

            assert_non_null(c.views);
            c.views[0] = c.views[1] = view;
            c.src = c.views;
            what = which < 32   ? spoil_article(&c, which)
                   : which < 64 ? spoil_view(&c.views[0], which - 32)
                                : spoil_view(&c.views[1], which - 64);
            if (what != NULL &&
                kvc_quantize_window(c.ctx, c.src, c.n_batch, c.format, c.window, c.codes,
                                    c.codes_bytes, c.scales) != KVC_E_ARG) {
                fail_msg("quantize_article accepts: %s", what);
            }
            assert_true(guard_untouched(&codes));
            assert_true(guard_untouched(&scales));
            free(c.views);
        }
        guard_free(&codes);
        guard_free(&scales);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_numbers_of_the_article_are_met),
        cmocka_unit_test(the_article_scale_is_shared_by_the_batch_and_never_below_1e_5),
        cmocka_unit_test(codes_come_from_a_division_rounded_once),
        cmocka_unit_test(dequantize_reads_what_the_article_function_writes),
        cmocka_unit_test(an_older_larger_token_is_clipped_to_the_asymmetric_range),
        cmocka_unit_test(the_article_function_refuses_bad_arguments_and_writes_nothing),
    };
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
