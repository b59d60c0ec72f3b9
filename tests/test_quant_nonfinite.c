/* NaN and Inf: counted and replaced, or refused in strict mode. */
#include <math.h>

#include "support/coded.h"
#include "support/rng.h"

/* Every token, block and channel reaches from -1 to 1 without the tokens 2, 6, 10, ... */
static void fill_spread(float *x, size_t n_tokens, size_t row)
{
    uint64_t rng = 1;

    for (size_t i = 0; i < n_tokens * row; i++) {
        const size_t token = i / row;

        x[i] = token % 4 == 0 ? 1.0f : token % 4 == 1 ? -1.0f : rng_unit(&rng) * 0.9f;
    }
}

static void a_nonfinite_element_changes_no_code_but_its_own(void **state)
{
    enum { N = 20, HEADS = 2, DIM = 35, ROW = HEADS * DIM };
    static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    float x[N * ROW];

    fill_spread(x, N, ROW);
    for (int mode = 0; mode < QUANT_MODES; mode++) {
        const kvc_quant_options o = quant_mode(mode, 8, 8);

        for (size_t k = 0; k < 4 * ROW; k++) {
            const size_t at = (2 + k % 4 * 4) * ROW + k % ROW, d = at % DIM;
            const float kept = x[at];
            struct coded zero, c;
            size_t byte;

            x[at] = 0;
            zero = code_floats(*state, x, N, HEADS, DIM, &o);
            x[at] = bad[k / ROW];
            c = code_floats(*state, x, N, HEADS, DIM, &o);
            x[at] = kept;
            assert_int_equal(c.counts.n_nonfinite, 1);
            assert_int_equal(c.counts.n_saturated, 0);
            byte = at / DIM * row_bytes(o.format, DIM) + (o.format == KVC_INT8 ? d : d / 2);
            if (isinf(bad[k / ROW])) {
                float *y = decode_all(*state, &c, &o, N, HEADS, DIM);

                /* The largest code of its sign stands for the extreme of its group. */
                assert_true(bad[k / ROW] > 0 ? y[at] > 0.3f : y[at] < -0.3f);
                assert_true(abs(code_at(c.codes + at / DIM * row_bytes(o.format, DIM), o.format,
                                        d)) >= (o.format == KVC_INT8 ? 127 : 7));
                c.codes[byte] = zero.codes[byte];
                free(y);
            }
            assert_same_coded(&c, &zero);
            coded_free(&zero);
            coded_free(&c);
        }
    }
}

static void groups_without_a_finite_element_decode_to_zero(void **state)
{
    enum { N = 4, DIM = 19 };
    float x[N * DIM];

    for (size_t i = 0; i < N * DIM; i++) {
        x[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY;
    }
    for (int mode = 0; mode < QUANT_MODES; mode++) {
        const kvc_quant_options o = quant_mode(mode, 2, 2);
        struct coded c = code_floats(*state, x, N, 1, DIM, &o);
        float *y = decode_all(*state, &c, &o, N, 1, DIM);

        assert_int_equal(c.counts.n_nonfinite, N * DIM);
        assert_int_equal(c.counts.n_saturated, 0);
        for (size_t i = 0; i < N * DIM; i++) {
            assert_true(y[i] == 0);
        }
        free(y);
        coded_free(&c);
    }
}

static void strict_mode_refuses_and_counts_nonfinite_elements(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    const struct tables *t = *state;
    enum { TOKENS = 20, HEADS = 2, DIM = 33, ELEMENTS = TOKENS * HEADS * DIM };
    float x[ELEMENTS];
    const kvc_view src = kvc_view_packed(x, KVC_DTYPE_F32, TOKENS, HEADS, DIM);

    for (int mode = 0; mode < QUANT_MODES; mode++) {
        kvc_quant_options o = quant_mode(mode, 8, 16);
        struct coded lax, strict;

        fill_spread(x, TOKENS, HEADS * DIM);
        lax = code_all(t, &src, &o);
        o.strict = true;
        strict = code_all(t, &src, &o);
        assert_same_coded(&lax, &strict);
        for (size_t k = 0; k < 3; k++) {
            x[k == 2 ? ELEMENTS - 1 : 100 * k + 32] = bad[k];
            for (size_t i = 0; i < t->n; i++) {
                struct guard codes = guard_new(lax.codes_bytes, 1, 0xA5);
                struct guard params = guard_new(lax.params_bytes, 4, 0xA5);
                kvc_quant_counts counts = {sizeof(counts), 99, 99};

                assert_int_equal(kvc_quantize(t->ctx[i], &src, &o, codes.data, codes.size,
                                              params.data, params.size, &counts),
                                 KVC_E_NONFINITE);
                assert_int_equal(counts.n_nonfinite, k + 1);
                assert_int_equal(counts.n_saturated, 99);
                assert_int_equal(kvc_quantize(t->ctx[i], &src, &o, codes.data, codes.size,
                                              params.data, params.size, NULL),
                                 KVC_E_NONFINITE);
                assert_true(guard_untouched(&codes));
                assert_true(guard_untouched(&params));
                guard_free(&codes);
                guard_free(&params);
            }
        }
        coded_free(&lax);
        coded_free(&strict);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_nonfinite_element_changes_no_code_but_its_own),
        cmocka_unit_test(groups_without_a_finite_element_decode_to_zero),
        cmocka_unit_test(strict_mode_refuses_and_counts_nonfinite_elements),
    };
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
