/* Known faults of other cache quantizers, D1 to D13 and I5 (D8, I3: test_quant_errors.c). */
#include <math.h>

#include "support/coded.h"
#include "support/half.h"
#include "support/rng.h"
#include "support/vector.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* Known fault D1. */
static void fault_D1_head_sizes_that_fit_no_vector_width(void **state)
{
    static const size_t dims[] = {1, 40, 64, 72, 80, 96, 100, 112, 128, 256};
    uint64_t rng = 1;

    for (size_t k = 0; k < sizeof(dims) / sizeof(dims[0]); k++) {
        const size_t head_dim = dims[k];
        const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_HEAD, 3, 3);
        float *x = malloc(3 * head_dim * sizeof(float)), absmax = 0;
        struct coded c;

        assert_non_null(x);
        for (size_t i = 0; i < 3 * head_dim; i++) {
            x[i] = rng_unit(&rng);
            absmax = fmaxf(absmax, fabsf(x[i]));
        }
        c = code_floats(*state, x, 3, 1, head_dim, &o);
        assert_true(*(const float *)c.params == absmax / 127.0f);
        for (size_t i = 0; i < 3 * head_dim; i++) {
            const double y = (double)x[i] * (double)(127.0f / absmax);

            assert_int_equal(code_at(c.codes, KVC_INT8, i), (int)nearbyint((double)(float)y));
        }
        coded_free(&c);
        free(x);
    }
}

/* Known fault D3. */
static void fault_D3_strides_come_from_the_view(void **state)
{
    enum { CAPACITY = 4096, ROW = 3000, DIM = 64 };
    const struct tables *t = *state;
    const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_TOKEN, 8, 8);
    float x[2 * DIM];
    uint64_t rng = 1;
    struct coded c;

    for (size_t i = 0; i < 2 * DIM; i++) {
        x[i] = rng_unit(&rng);
    }
    c = code_floats(t, x, 1, 2, DIM, &o);
    for (size_t i = 0; i < t->n; i++) {
        struct guard store = guard_new(3 * CAPACITY * DIM * sizeof(float), 0, 0xA5);
        float *head1 = (float *)(void *)store.data + (CAPACITY + ROW) * DIM;
        kvc_view dst = kvc_view_packed(head1, KVC_DTYPE_F32, 1, 2, DIM);

        dst.token_stride = DIM;
        dst.head_stride = CAPACITY * DIM;
        assert_int_equal(
            kvc_dequantize(t->ctx[i], c.codes, c.codes_bytes, c.params, c.params_bytes, &o, &dst),
            KVC_OK);
        for (size_t h = 0; h < 2; h++) {
            for (size_t d = 0; d < DIM; d++) {
                assert_true(fabsf(head1[h * CAPACITY * DIM + d] - x[h * DIM + d]) < 0.005f);
            }
            memset(head1 + h * CAPACITY * DIM, store.fill, DIM * sizeof(float));
        }
        assert_true(guard_untouched(&store));
        guard_free(&store);
    }
    coded_free(&c);
}

/* Flush-to-zero and denormals-are-zero, as hosts set them; returns the mode before. */
static unsigned set_flush(bool on)
{
#if defined(__SSE__)
    const unsigned before = _mm_getcsr();

    if (on) {
        _mm_setcsr(before | 0x8040u);
    }
    return before;
#else
    (void)on;
    return 0;
#endif
}

/* Fault I5 too: the mode must be the one that was set. */
static void restore_flush(unsigned before, bool on)
{
#if defined(__SSE__)
    const unsigned want = on ? before | 0x8040u : before, flags = 0x3F;
    const unsigned after = _mm_getcsr();

    _mm_setcsr(before);
    assert_int_equal(after & ~flags, want & ~flags);
#else
    (void)before;
    (void)on;
#endif
}

/* Known fault D4. */
static void fault_D4_zero_and_denormal_groups(void **state)
{
    enum { N = 32 };
    static const float absmax[] = {0, 1e-40f, 1e-38f};
    float x[N][3][N] = {{{0}}};

    for (size_t i = 0; i < N * N; i++) {
        x[i / N][1][i % N] = i % 3 == 0 ? -1e-40f : 1e-40f;
    }
    x[7][2][9] = 1e-38f;
    for (int mode = 0; mode < QUANT_MODES; mode++) {
        const kvc_quant_options o = quant_mode(mode, N, N);
        struct coded c[2];

        for (int flush = 0; flush < 2; flush++) {
            const unsigned before = set_flush(flush == 1);
            float *y;

            c[flush] = code_floats(*state, &x[0][0][0], N, 3, N, &o);
            y = decode_all(*state, &c[flush], &o, N, 3, N);
            restore_flush(before, flush == 1);
            assert_int_equal(c[flush].counts.n_nonfinite, 0);
            assert_int_equal(c[flush].counts.n_saturated, 0);
            for (size_t i = 0; i < N * 3 * N; i++) {
                const size_t head = i / N % 3;
                const float error = y[i] - x[i / N / 3][head][i % N];

                assert_true(isfinite(y[i]));
                assert_true(fabsf(error) <= absmax[head]);
            }
            free(y);
        }
        assert_same_coded(&c[0], &c[1]);
        coded_free(&c[0]);
        coded_free(&c[1]);
    }
}

static void fault_D4_denormal_halves_survive_flush_to_zero(void **state)
{
    enum { N = 40 };
    uint16_t x[N];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F16, 1, 1, N);

    for (size_t i = 0; i < N; i++) {
        x[i] = (uint16_t)(i % 2 == 0 ? i : HALF_SIGN | i);
    }
    for (int flush = 0; flush < 2; flush++) {
        const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_TOKEN, 1, 1);
        const unsigned before = set_flush(flush == 1);
        struct coded c = code_all(*state, &src, &o);
        float *y = decode_all(*state, &c, &o, 1, 1, N);

        restore_flush(before, flush == 1);
        /* 39 * 2^-24 / 127 rounds up to the smallest half, 2^-24, so that every number is a code.
         */
        assert_int_equal(*(const uint16_t *)c.params, 1);
        for (size_t i = 0; i < N; i++) {
            assert_true((double)y[i] == half_value(x[i]));
        }
        free(y);
        coded_free(&c);
    }
}

static void fault_D4_denormal_numbers_of_any_dtype_are_harmless(void **state)
{
    enum { N = 48 };
    uint16_t x[3 * N];
    uint64_t rng = 1;

    for (size_t i = 0; i < 3 * N; i++) {
        x[i] = (uint16_t)(rng_below(&rng, 0x80) | (rng_below(&rng, 2) != 0 ? HALF_SIGN : 0));
    }
    for (int mode = 0; mode < 2 * QUANT_MODES; mode++) {
        const kvc_dtype dtype = mode < QUANT_MODES ? KVC_DTYPE_F16 : KVC_DTYPE_BF16;
        const kvc_view src = kvc_view_packed(x, dtype, 3, 1, N);
        const kvc_quant_options o = quant_mode(mode % QUANT_MODES, 2, 2);
        struct coded c[2];

        for (int flush = 0; flush < 2; flush++) {
            const unsigned before = set_flush(flush == 1);
            float *y;

            c[flush] = code_all(*state, &src, &o);
            y = decode_all(*state, &c[flush], &o, 3, 1, N);
            restore_flush(before, flush == 1);
            for (size_t i = 0; i < 3 * N; i++) {
                assert_true(fabsf(y[i]) <= 0x80 * 0x1p-24f);
            }
            free(y);
        }
        assert_same_coded(&c[0], &c[1]);
        coded_free(&c[0]);
        coded_free(&c[1]);
    }
}

/* Known fault D5. */
static void fault_D5_half_scales_of_small_and_large_groups(void **state)
{
    static const struct {
        kvc_format format;
        float absmax;
        uint16_t scale;
        int code;
        uint64_t n_saturated;
    } cases[] = {
        {KVC_INT8, 1e-6f, 0x0001, 17, 0},  /* 7.9e-9 is below the smallest half */
        {KVC_INT8, 1e-5f, 0x0002, 84, 0},  /* 7.9e-8 -> 2 * 2^-24 */
        {KVC_INT8, 1e-4f, 0x000E, 120, 0}, /* 7.9e-7 = 13.2 * 2^-24 */
        {KVC_INT8, 1e-9f, 0x0001, 0, 0},
        {KVC_INT8, 10027008.0f, HALF_MAX, 127, 1}, /* 1e7 as bf16; 78953 is above 65504 */
        {KVC_INT4, 1e-7f, 0x8001, -2, 0},
        {KVC_INT4, 1e6f, HALF_SIGN | HALF_MAX, -8, 1},
        {KVC_INT4, -1e6f, HALF_MAX, -8, 1},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const kvc_quant_options o = quant_options(cases[i].format, KVC_SCALE_TOKEN, 1, 1);
        float x[3] = {cases[i].absmax, 0, cases[i].absmax * 0.25f};
        struct coded c = code_floats(*state, x, 1, 1, 3, &o);
        float *y = decode_all(*state, &c, &o, 1, 1, 3);
        const double step = half_value(cases[i].scale & HALF_MAX);

        assert_int_equal(*(const uint16_t *)c.params, cases[i].scale);
        assert_int_equal(code_at(c.codes, o.format, 0), cases[i].code);
        assert_int_equal(c.counts.n_saturated, cases[i].n_saturated);
        assert_true(y[1] == 0);
        for (size_t d = 0; d < 3; d++) {
            assert_true(isfinite(y[d]));
            if (d != 0 || cases[i].n_saturated == 0) {
                assert_true(fabs((double)y[d] - (double)x[d]) <= 0.5001 * step);
            }
        }
        free(y);
        coded_free(&c);
    }
}

static void fault_D5_channel_parameters_beyond_halves_saturate_and_are_counted(void **state)
{
    const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_CHANNEL, 3, 3);
    /* A minimum below -65504, a scale above 65504, a channel that fits. */
    float x[3][3] = {{-1e6f, 0, -1}, {-65504, 3e7f, 0}, {0, 1e7f, 1}};
    struct coded c = code_floats(*state, &x[0][0], 3, 1, 3, &o);
    const uint16_t *params = c.params;
    float *y = decode_all(*state, &c, &o, 3, 1, 3);

    assert_int_equal(c.counts.n_saturated, 2);
    assert_int_equal(params[1], HALF_MAX);
    assert_int_equal(params[3], HALF_SIGN | HALF_MAX);
    assert_int_equal(code_at(c.codes, KVC_INT8, 0), -128);
    assert_int_equal(code_at(c.codes, KVC_INT8, 4), 127);
    assert_true(y[0] == -65504 && y[3] == -65504);
    assert_true(fabsf(y[7] - 1e7f) <= 32752.0f);
    free(y);
    coded_free(&c);
}

/* Known fault D6. */
static void fault_D6_ties_go_to_even_and_codes_stay_in_range(void **state)
{
    static const struct vector vectors[] = {
        {"scale 1",
         {KVC_INT8, KVC_SCALE_HEAD, 1, 1},
         {1, 1, 9},
         {127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 126.5f, -127},
         {127, 0, 2, 2, 0, 0xFE, 0xFE, 126, 0x81},
         .floats = {1}},
        {"the largest half scale: 127.6, 300 and -300 steps",
         {KVC_INT8, KVC_SCALE_TOKEN, 1, 1},
         {1, 1, 4},
         {127.6f * 65504, 300.0f * 65504, -300.0f * 65504, 65504},
         {127, 127, 0x81, 1},
         .halves = {HALF_MAX},
         .n_saturated = 3},
    };
    const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_TOKEN, 1, 1);
    uint16_t x[2] = {half_ceil(12.6953125), half_ceil(0.0500183)};
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F16, 1, 1, 2);
    struct coded c = code_all(*state, &src, &o);

    check_vectors(*state, vectors, sizeof(vectors) / sizeof(vectors[0]));
    /* 0.0500183 / 0.0999756 = 0.50031; taken in half precision it would be 0.5 and give 0. */
    assert_int_equal(*(const uint16_t *)c.params, 0x2E66);
    assert_int_equal(code_at(c.codes, KVC_INT8, 1), 1);
    coded_free(&c);
}

/* Known fault D7. */
static void fault_D7_nibbles_are_low_first_and_two_s_complement(void **state)
{
    static const struct vector vectors[] = {
        {"scale 1 from the first token; then -6 2 3 -2",
         {KVC_INT4, KVC_SCALE_HEAD, 2, 2},
         {2, 1, 4},
         {7, 0, 0, 0, -6, 2, 3, -2},
         {0x07, 0x00, 0x2A, 0xE3},
         .floats = {1}},
        {"an odd row ends with a zero nibble",
         {KVC_INT4, KVC_SCALE_HEAD, 1, 1},
         {2, 1, 5},
         {7, -7, 1, -1, -3, 7, 1, 1, 1, 1},
         {0x97, 0xF1, 0x0D, 0x17, 0x11, 0x01},
         .floats = {1, 1}},
    };
    static unsigned char all[8] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE};
    static unsigned char pad[6] = {0x10, 0x32, 0xF4, 0x98, 0xBA, 0x7C};
    static float one[2] = {1, 1};
    const struct coded all_codes = {
        .codes = all, .codes_bytes = 8, .params = one, .params_bytes = 4};
    const struct coded pad_codes = {
        .codes = pad, .codes_bytes = 6, .params = one, .params_bytes = 8};
    const kvc_quant_options o = quant_options(KVC_INT4, KVC_SCALE_HEAD, 1, 1);
    float *x;

    check_vectors(*state, vectors, sizeof(vectors) / sizeof(vectors[0]));
    x = decode_all(*state, &all_codes, &o, 1, 1, 16);
    for (int i = 0; i < 16; i++) {
        assert_true(x[i] == (float)(i < 8 ? i : i - 16));
    }
    free(x);
    x = decode_all(*state, &pad_codes, &o, 2, 1, 5); /* the pads F and 7 are not returned */
    for (int i = 0; i < 5; i++) {
        assert_true(x[i] == (float)i);
        assert_true(x[5 + i] == (float)(i - 8));
    }
    free(x);
}

/* Known fault D9. */
static void fault_D9_a_quiet_start_does_not_freeze_the_scale(void **state)
{
    enum { N = 48, DIM = 4 };
    float x[N][DIM];

    for (int zero = 0; zero < 2; zero++) {
        for (size_t blocks = 1; blocks <= 2; blocks++) {
            const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_HEAD, 16, 16 * blocks);
            uint64_t rng = 1;
            struct coded c;
            float *y;

            for (size_t i = 0; i < N * DIM; i++) {
                const float size = i >= 16 * DIM ? 12.7f : zero == 1 ? 0.0f : 0.1f;

                x[i / DIM][i % DIM] = rng_unit(&rng) * size;
            }
            c = code_floats(*state, &x[0][0], N, 1, DIM, &o);
            y = decode_all(*state, &c, &o, N, 1, DIM);
            for (size_t i = 0; i < N * DIM; i++) {
                const float limit = i < 16 * DIM ? 0.1f / 254 : 12.7f / 254;

                assert_true(fabsf(y[i] - x[i / DIM][i % DIM]) <= limit * 1.001f);
            }
            free(y);
            coded_free(&c);
        }
    }
}

static void fault_D9_a_quiet_window_does_not_clip_what_came_before(void **state)
{
    enum { LOUD = 10, N = LOUD + 512, DIM = 4 };
    const struct tables *t = *state;
    const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_HEAD, 64, 512);
    float *x = malloc(N * DIM * sizeof(float)), *y;
    kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, N, 1, DIM);
    uint64_t rng = 1;
    struct coded c;

    assert_non_null(x);
    for (size_t i = 0; i < N * DIM; i++) {
        x[i] = i < LOUD * DIM ? 10.0f * (i % 2 == 0 ? 1.0f : -1.0f) : rng_unit(&rng);
    }
    c = code_all(t, &src, &o);
    y = decode_all(t, &c, &o, N, 1, DIM);
    for (size_t i = 0; i < N * DIM; i++) {
        assert_true(fabsf(y[i] - x[i]) <= 10.0f / 254 * 1.001f);
    }
    free(y);
    coded_free(&c);
    free(x);
}

/* Known fault D10. */
static void fault_D10_another_view_or_context_leaves_scales_alone(void **state)
{
    enum { N = 20, DIM = 24 };
    const struct tables *t = *state;
    float x[N][2][DIM], y[N * DIM];
    uint64_t rng = 1;

    for (size_t i = 0; i < N * 2 * DIM; i++) {
        x[i / 2 / DIM][i / DIM % 2][i % DIM] = rng_unit(&rng) * 200;
    }
    for (int mode = 0; mode < QUANT_MODES; mode++) {
        const kvc_quant_options o = quant_mode(mode, 8, 16);
        kvc_view a = kvc_view_packed(x, KVC_DTYPE_F32, N, 1, DIM), b;
        const kvc_view dst = kvc_view_packed(y, KVC_DTYPE_F32, N, 1, DIM);
        struct coded c;
        void *params;

        a.token_stride = 2 * DIM;
        b = a;
        b.head_stride = 7 * DIM; /* of one head: the same elements, described otherwise */
        c = code_all(t, &a, &o);
        params = coded_copy(c.params, c.params_bytes);
        for (size_t i = 0; i < t->n; i++) {
            const kvc_ctx_params defaults = {.struct_size = sizeof(defaults)};
            kvc_ctx *fresh;

            assert_int_equal(kvc_ctx_create(&defaults, &fresh), KVC_OK);
            assert_int_equal(
                kvc_dequantize(fresh, c.codes, c.codes_bytes, c.params, c.params_bytes, &o, &dst),
                KVC_OK);
            assert_memory_equal(c.params, params, c.params_bytes);
            assert_int_equal(kvc_quantize(t->ctx[i], &b, &o, c.codes, c.codes_bytes, c.params,
                                          c.params_bytes, NULL),
                             KVC_OK);
            assert_memory_equal(c.params, params, c.params_bytes);
            kvc_ctx_destroy(fresh);
        }
        free(params);
        coded_free(&c);
    }
}

/* Known fault D11. */
static void fault_D11_keys_and_values_have_their_own_scales(void **state)
{
    enum { N = 64, DIM = 16 };
    const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_HEAD, N, N);
    float k[N][DIM], v[N][DIM], *y;
    uint64_t rng = 1;
    struct coded ck, cv;

    for (size_t i = 0; i < N * DIM; i++) {
        k[i / DIM][i % DIM] = rng_unit(&rng) * 100;
        v[i / DIM][i % DIM] = rng_unit(&rng) * 0.5f;
    }
    k[0][0] = 100;
    v[0][0] = 0.5f;
    ck = code_floats(*state, &k[0][0], N, 1, DIM, &o);
    cv = code_floats(*state, &v[0][0], N, 1, DIM, &o);
    assert_true(*(const float *)ck.params == 100.0f / 127.0f);
    assert_true(*(const float *)cv.params == 0.5f / 127.0f);
    y = decode_all(*state, &cv, &o, N, 1, DIM);
    for (size_t i = 0; i < N * DIM; i++) {
        assert_true(fabsf(y[i] - v[i / DIM][i % DIM]) <= 0.00197f);
    }
    free(y);
    coded_free(&ck);
    coded_free(&cv);
}

/* Known fault D12. */
static void fault_D12_a_shard_of_heads_has_the_scales_of_those_heads(void **state)
{
    enum { N = 6, DIM = 20 };
    const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_HEAD, 3, 3);
    float x[N][8][DIM];
    kvc_view rank1 = kvc_view_packed(x[0][4], KVC_DTYPE_F32, N, 4, DIM);
    struct coded all, part;
    uint64_t rng = 1;

    for (size_t i = 0; i < N * 8 * DIM; i++) {
        const size_t head = i / DIM % 8;

        x[i / 8 / DIM][head][i % DIM] = rng_unit(&rng) * (float)(head + 1) * 127;
    }
    for (size_t i = 0; i < N * 8; i++) {
        x[i / 8][i % 8][0] = (float)(i % 8 + 1) * -127;
    }
    all = code_floats(*state, &x[0][0][0], N, 8, DIM, &o);
    rank1.token_stride = 8 * DIM;
    part = code_all(*state, &rank1, &o);
    for (size_t k = 0; k < 8; k++) { /* two blocks of four heads: 5, 6, 7, 8 */
        assert_true(((const float *)part.params)[k] == (float)(k % 4 + 5));
        assert_true(((const float *)all.params)[k] == (float)(k + 1));
    }
    for (size_t token = 0; token < N; token++) {
        assert_memory_equal(part.codes + token * 4 * DIM, all.codes + (token * 8 + 4) * DIM,
                            4 * DIM);
    }
    coded_free(&all);
    coded_free(&part);
}

/* Known fault D13. */
static void fault_D13_permuted_rows_decode_to_the_permuted_numbers(void **state)
{
    enum { N = 40, HEADS = 2, DIM = 15 };
    float x[N * HEADS * DIM];
    uint64_t rng = 1;

    for (size_t i = 0; i < N * HEADS * DIM; i++) {
        x[i] = rng_unit(&rng) * (float)(1 + i / 100);
    }
    for (int mode = 0; mode < 2; mode++) {
        const kvc_quant_options o =
            quant_options(mode == 0 ? KVC_INT8 : KVC_INT4, KVC_SCALE_TOKEN, 1, 1);
        struct coded c = code_floats(*state, x, N, HEADS, DIM, &o), moved = c;
        const size_t row = HEADS * row_bytes(o.format, DIM);
        float *before = decode_all(*state, &c, &o, N, HEADS, DIM), *after;

        moved.codes = coded_copy(c.codes, c.codes_bytes);
        moved.params = coded_copy(c.params, c.params_bytes);
        for (size_t i = 0; i < N; i++) { /* 7 has no factor in common with 40 */
            const size_t from = i * 7 % N;

            memcpy(moved.codes + i * row, c.codes + from * row, row);
            memcpy((uint16_t *)moved.params + i * HEADS, (uint16_t *)c.params + from * HEADS,
                   HEADS * sizeof(uint16_t));
        }
        after = decode_all(*state, &moved, &o, N, HEADS, DIM);
        for (size_t i = 0; i < N; i++) {
            assert_memory_equal(after + i * HEADS * DIM, before + i * 7 % N * HEADS * DIM,
                                HEADS * DIM * sizeof(float));
        }
        free(before);
        free(after);
        coded_free(&c);
        coded_free(&moved);
    }
}

static void fault_D13_cropped_codes_decode_to_the_first_numbers(void **state)
{
    enum { N = 40, HEADS = 2, DIM = 15 };
    static const size_t crops[] = {35, 32, 20, 1};
    float x[N * HEADS * DIM];
    uint64_t rng = 1;

    for (size_t i = 0; i < N * HEADS * DIM; i++) {
        x[i] = rng_unit(&rng) * (float)(1 + i / 100);
    }
    for (int mode = 0; mode < 4 * QUANT_MODES; mode++) {
        const size_t n = crops[mode / QUANT_MODES];
        const kvc_quant_options o = quant_mode(mode % QUANT_MODES, 8, 16);
        struct coded c = code_floats(*state, x, N, HEADS, DIM, &o), crop = c;
        float *before = decode_all(*state, &c, &o, N, HEADS, DIM), *after;

        assert_int_equal(kvc_quant_size(n, HEADS, DIM, &o, &crop.codes_bytes, &crop.params_bytes),
                         KVC_OK);
        after = decode_all(*state, &crop, &o, n, HEADS, DIM);
        assert_memory_equal(after, before, n * HEADS * DIM * sizeof(float));
        free(before);
        free(after);
        coded_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fault_D1_head_sizes_that_fit_no_vector_width),
        cmocka_unit_test(fault_D3_strides_come_from_the_view),
        cmocka_unit_test(fault_D4_zero_and_denormal_groups),
        cmocka_unit_test(fault_D4_denormal_halves_survive_flush_to_zero),
        cmocka_unit_test(fault_D4_denormal_numbers_of_any_dtype_are_harmless),
        cmocka_unit_test(fault_D5_half_scales_of_small_and_large_groups),
        cmocka_unit_test(fault_D5_channel_parameters_beyond_halves_saturate_and_are_counted),
        cmocka_unit_test(fault_D6_ties_go_to_even_and_codes_stay_in_range),
        cmocka_unit_test(fault_D7_nibbles_are_low_first_and_two_s_complement),
        cmocka_unit_test(fault_D9_a_quiet_start_does_not_freeze_the_scale),
        cmocka_unit_test(fault_D9_a_quiet_window_does_not_clip_what_came_before),
        cmocka_unit_test(fault_D10_another_view_or_context_leaves_scales_alone),
        cmocka_unit_test(fault_D11_keys_and_values_have_their_own_scales),
        cmocka_unit_test(fault_D12_a_shard_of_heads_has_the_scales_of_those_heads),
        cmocka_unit_test(fault_D13_permuted_rows_decode_to_the_permuted_numbers),
        cmocka_unit_test(fault_D13_cropped_codes_decode_to_the_first_numbers),
    };
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
