/* Rotary positions: frequencies of each scaling, rotating, rebasing. */
#include <math.h>
#include <string.h>

#include "kvc/kvc.h"
#include "kvc/rope.h"
#include "support/half.h"
#include "support/rng.h"
#include "support/tables.h"

enum { WS_BYTES = 1 << 17, MAX_ROWS = 40, MAX_HEADS = 3, MAX_DIM = 40 };

static _Alignas(64) unsigned char ws[WS_BYTES];

static kvc_rope rope_of(int32_t n_dims, kvc_rope_scaling scaling, double factor)
{
    kvc_rope r;

    kvc_rope_default(&r);
    r.n_dims = n_dims;
    r.scaling = scaling;
    r.factor = factor;
    return r;
}

static void assert_digits(double got, double want, double unit)
{
    if (!(fabs(got - want) <= 0.5001 * unit)) {
        print_error("%.12g, not %.12g\n", got, want);
    }
    assert_true(fabs(got - want) <= 0.5001 * unit);
}

static void default_rope_sets_every_field(void **state)
{
    kvc_rope r;

    (void)state;
    memset(&r, 0xFF, sizeof(r));
    kvc_rope_default(&r);
    assert_int_equal(r.struct_size, sizeof(r));
    assert_int_equal(r.n_dims, 0);
    assert_int_equal(r.layout, KVC_ROPE_HALF_SPLIT);
    assert_true(r.base == 10000.0 && r.factor == 1.0 && r.beta_fast == 32.0 && r.beta_slow == 1.0);
    assert_true(r.attention_factor == 0.0);
    assert_int_equal(r.scaling, KVC_ROPE_NONE);
    assert_int_equal(r.original_context, 4096);
    assert_int_equal(r.length, 0);
    assert_int_equal(r.axes, KVC_ROPE_AXES_ONE);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(r.sections[i], 0);
    }
    kvc_rope_default(NULL);
}

/* Printed reference numbers (G10), head size 128, base 10000, factor 2. */

static void ntk_gives_the_printed_base_and_frequencies(void **state)
{
    const kvc_rope none = rope_of(128, KVC_ROPE_NONE, 2.0), ntk = rope_of(128, KVC_ROPE_NTK, 2.0);
    double base, plain[64], f[64], magnitude;

    (void)state;
    assert_int_equal(kvc_rope_frequencies(&none, &base, plain, &magnitude), KVC_OK);
    assert_true(base == 10000.0 && magnitude == 1.0);
    assert_digits(plain[20], 5.623413252e-02, 1e-11);
    assert_digits(plain[63], 1.154781985e-04, 1e-13);
    assert_int_equal(kvc_rope_frequencies(&ntk, &base, f, &magnitude), KVC_OK);
    assert_digits(base, 20221.261689738, 1e-9);
    assert_true(f[0] == 1.0 && magnitude == 1.0);
    assert_digits(f[20], 4.512683988e-02, 1e-11);
    assert_digits(f[30], 9.586330175e-03, 1e-12);
    assert_digits(f[40], 2.036431677e-03, 1e-12);
    assert_true(fabs(f[63] * 2.0 / plain[63] - 1.0) < 1e-14);
    assert_int_equal(kvc_rope_frequencies(&ntk, NULL, NULL, NULL), KVC_OK);
}

static void dynamic_ntk_grows_with_the_length_beyond_the_training(void **state)
{
    static const struct {
        int64_t length;
        double base;
    } cases[] = {{0, 10000.0}, {4096, 10000.0}, {6144, 20221.262}, {8192, 30527.737}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        kvc_rope r = rope_of(128, KVC_ROPE_DYNAMIC_NTK, 2.0);
        double base;

        r.length = cases[i].length;
        assert_int_equal(kvc_rope_frequencies(&r, &base, NULL, NULL), KVC_OK);
        assert_digits(base, cases[i].base, 1e-3);
    }
}

static void yarn_keeps_fast_pairs_and_divides_slow_ones(void **state)
{
    const kvc_rope none = rope_of(128, KVC_ROPE_NONE, 1.0);
    kvc_rope yarn = rope_of(128, KVC_ROPE_YARN, 2.0);
    double plain[64], f[64], magnitude;

    (void)state;
    assert_int_equal(kvc_rope_frequencies(&none, NULL, plain, NULL), KVC_OK);
    assert_int_equal(kvc_rope_frequencies(&yarn, NULL, f, &magnitude), KVC_OK);
    assert_digits(f[30], 1.077075003e-02, 1e-11);
    assert_digits(f[40], 1.946017022e-03, 1e-12);
    assert_digits(magnitude, 1.069314718, 1e-9);
    /* The ramp runs from pair 20 to pair 46. */
    for (size_t j = 0; j < 64; j++) {
        if (j <= 20) {
            assert_true(f[j] == plain[j]);
        } else if (j >= 46) {
            assert_true(f[j] == plain[j] / 2.0);
        } else {
            assert_true(f[j] < plain[j] && f[j] > plain[j] / 2.0);
        }
    }
    yarn.attention_factor = 1.25;
    assert_int_equal(kvc_rope_frequencies(&yarn, NULL, NULL, &magnitude), KVC_OK);
    assert_true(magnitude == 1.25);
    yarn.original_context = 64; /* the ramp would run from -8 to 17 and is cut at 0 */
    assert_int_equal(kvc_rope_frequencies(&yarn, NULL, f, NULL), KVC_OK);
    assert_true(fabs(f[8] / plain[8] - (9.0 + 8.0 / 2.0) / 17.0) < 1e-14);
    yarn.original_context = 1; /* both ends are below 0: all pairs but the first are slow */
    assert_int_equal(kvc_rope_frequencies(&yarn, NULL, f, NULL), KVC_OK);
    assert_true(f[0] == 1.0 && f[1] == plain[1] / 2.0 && f[63] == plain[63] / 2.0);
}

static void linear_divides_every_frequency(void **state)
{
    const kvc_rope none = rope_of(64, KVC_ROPE_NONE, 1.0), by4 = rope_of(64, KVC_ROPE_LINEAR, 4.0);
    double plain[32], f[32];

    (void)state;
    assert_int_equal(kvc_rope_frequencies(&none, NULL, plain, NULL), KVC_OK);
    assert_int_equal(kvc_rope_frequencies(&by4, NULL, f, NULL), KVC_OK);
    for (size_t j = 0; j < 32; j++) {
        assert_true(f[j] == plain[j] / 4.0);
    }
}

static const int32_t at5[3] = {5, 5, 5};

/* G10: [1, 2, 3, 4] at position 5, from base 10000 to NTK by 2. */
static void rebased_keys_are_those_of_the_new_base(void **state)
{
    static const double old_key[4] = {3.160435, 1.797584, -0.107938, 4.094959};
    static const double new_key[4] = {3.160435, 1.899385, -0.107938, 4.048745};
    const struct tables *t = *state;
    const kvc_rope from = rope_of(4, KVC_ROPE_NONE, 1.0), to = rope_of(4, KVC_ROPE_NTK, 2.0);

    for (size_t i = 0; i < t->n; i++) {
        float x[4] = {1, 2, 3, 4}, direct[4] = {1, 2, 3, 4};
        const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 1, 1, 4);
        const kvc_view d = kvc_view_packed(direct, KVC_DTYPE_F32, 1, 1, 4);

        assert_int_equal(kvc_rope_apply(t->ctx[i], &from, at5, &k, ws, WS_BYTES), KVC_OK);
        for (size_t c = 0; c < 4; c++) {
            assert_digits((double)x[c], old_key[c], 3e-6);
        }
        assert_int_equal(kvc_rope_rebase(t->ctx[i], &from, &to, at5, NULL, &k, ws, WS_BYTES),
                         KVC_OK);
        assert_int_equal(kvc_rope_apply(t->ctx[i], &to, at5, &d, ws, WS_BYTES), KVC_OK);
        for (size_t c = 0; c < 4; c++) {
            assert_digits((double)x[c], new_key[c], 3e-6);
            assert_digits((double)direct[c], new_key[c], 3e-6);
        }
    }
}

static kvc_rope random_rope(uint64_t *rng, int32_t n_dims)
{
    kvc_rope r = rope_of(n_dims, (kvc_rope_scaling)rng_below(rng, 5), 1.0);

    r.factor = 1.0 + (double)rng_below(rng, 30) / 4.0;
    r.base = 1e3 * (double)(1 + rng_below(rng, 1000));
    r.length = (int64_t)rng_below(rng, 20000);
    r.original_context = (int32_t)(1024 << rng_below(rng, 4));
    return r;
}

static void set_axes(uint64_t *rng, kvc_rope *r)
{
    const int32_t n = r->n_dims / 2, y = (int32_t)rng_below(rng, (size_t)n / 3 + 1);

    r->axes = (kvc_rope_axes)rng_below(rng, 3);
    r->sections[0] = n - 2 * y;
    r->sections[1] = r->sections[2] = y;
    r->sections[3] = 0;
}

/* The axis of each pair of Qwen3-VL's and Qwen2-VL's heads of 128. */
static size_t axis_of(const kvc_rope *r, size_t j)
{
    const size_t s0 = (size_t)r->sections[0], s1 = (size_t)r->sections[1];

    if (r->axes == KVC_ROPE_AXES_CONTIGUOUS) {
        return j < s0 ? 0 : j < s0 + s1 ? 1 : 2;
    }
    if (r->axes == KVC_ROPE_AXES_INTERLEAVED && j < 3 * s1) {
        return j % 3; /* s1 = s2 in these tests */
    }
    return 0;
}

/* Rotates one head in double, from the formulas of the header. */
static void rotate_head(const kvc_rope *r, const int32_t *position, const double *f, double m,
                        double *x)
{
    const size_t n = (size_t)r->n_dims / 2;

    for (size_t j = 0; j < n; j++) {
        const bool interleaved = r->layout == KVC_ROPE_INTERLEAVED;
        const size_t a = interleaved ? 2 * j : j, b = interleaved ? a + 1 : j + n;
        const double angle = position[axis_of(r, j)] * f[j];
        const double xa = x[a], xb = x[b];

        x[a] = m * (xa * cos(angle) - xb * sin(angle));
        x[b] = m * (xa * sin(angle) + xb * cos(angle));
    }
}

/* A tensor with gaps, and the same numbers in double. */
struct tensor {
    float data[MAX_ROWS * MAX_HEADS * (MAX_DIM + 3)];
    float before[MAX_ROWS * MAX_HEADS * (MAX_DIM + 3)];
    int32_t positions[MAX_ROWS][3];
    kvc_view view;
};

static void fill(uint64_t *rng, struct tensor *t, size_t n, size_t n_heads, size_t d)
{
    t->view = kvc_view_packed(t->data, KVC_DTYPE_F32, n, n_heads, d);
    t->view.head_stride = d + rng_below(rng, 4);
    t->view.token_stride = n_heads * t->view.head_stride;
    if (rng_below(rng, 2) == 0) { /* heads before tokens */
        t->view.token_stride = t->view.head_stride;
        t->view.head_stride *= n > 0 ? n : 1;
    }
    for (size_t i = 0; i < sizeof(t->data) / sizeof(*t->data); i++) {
        t->data[i] = rng_unit(rng);
    }
    memcpy(t->before, t->data, sizeof(t->data));
    for (size_t i = 0; i < MAX_ROWS; i++) {
        for (size_t a = 0; a < 3; a++) {
            t->positions[i][a] = (int32_t)rng_below(rng, 9000);
        }
    }
}

static bool inside(const kvc_view *v, size_t element, size_t n_dims)
{
    for (size_t t = 0; t < v->n_tokens; t++) {
        for (size_t h = 0; h < v->n_heads; h++) {
            const size_t first = t * v->token_stride + h * v->head_stride;

            if (element >= first && element < first + n_dims) {
                return true;
            }
        }
    }
    return false;
}

/* Every head is the rotated one; gaps and elements beyond n_dims are as before. */
static void check_rotated(const struct tensor *t, const kvc_rope *r, const float *got)
{
    const size_t n_dims = (size_t)r->n_dims;
    double f[MAX_DIM / 2], m, want[MAX_DIM] = {0};

    assert_int_equal(kvc_rope_frequencies(r, NULL, f, &m), KVC_OK);
    for (size_t i = 0; i < t->view.n_tokens; i++) {
        for (size_t h = 0; h < t->view.n_heads; h++) {
            const size_t at = i * t->view.token_stride + h * t->view.head_stride;

            for (size_t c = 0; c < n_dims; c++) {
                want[c] = (double)t->before[at + c];
            }
            rotate_head(r, t->positions[i], f, m, want);
            for (size_t c = 0; c < n_dims; c++) {
                assert_true(fabs((double)got[at + c] - want[c]) < 2e-6);
            }
        }
    }
    for (size_t i = 0; i < sizeof(t->data) / sizeof(*t->data); i++) {
        if (!inside(&t->view, i, n_dims)) {
            assert_true(got[i] == t->before[i]);
        }
    }
}

static void rotation_is_that_of_the_formula_for_every_shape(void **state)
{
    static struct tensor x;
    static float first[sizeof(x.data) / sizeof(float)];
    const struct tables *t = *state;
    uint64_t rng = 1;

    for (int round = 0; round < 400; round++) {
        const int32_t n_dims = 4 + 2 * (int32_t)rng_below(&rng, 17);
        kvc_rope r = random_rope(&rng, n_dims);

        r.layout = (kvc_rope_layout)rng_below(&rng, 2);
        set_axes(&rng, &r);
        fill(&rng, &x, rng_below(&rng, MAX_ROWS + 1), 1 + rng_below(&rng, MAX_HEADS),
             (size_t)n_dims + rng_below(&rng, (size_t)(MAX_DIM - n_dims) + 1));
        for (size_t i = 0; i < t->n; i++) {
            memcpy(x.data, x.before, sizeof(x.data));
            assert_int_equal(kvc_rope_apply(t->ctx[i], &r, x.positions[0], &x.view, ws, WS_BYTES),
                             KVC_OK);
            if (i == 0) {
                check_rotated(&x, &r, x.data);
                memcpy(first, x.data, sizeof(first));
            }
            assert_memory_equal(x.data, first, sizeof(first)); /* the same bits on every table */
        }
    }
}

static void rebasing_equals_rotating_anew_for_all_scalings(void **state)
{
    static struct tensor x;
    uint64_t rng = 2;

    for (int round = 0; round < 300; round++) {
        const int32_t n_dims = 4 + 2 * (int32_t)rng_below(&rng, 17);
        kvc_rope from = random_rope(&rng, n_dims), to;

        from.layout = (kvc_rope_layout)rng_below(&rng, 2);
        set_axes(&rng, &from);
        to = random_rope(&rng, n_dims);
        to.layout = from.layout;
        to.axes = from.axes;
        memcpy(to.sections, from.sections, sizeof(to.sections));
        fill(&rng, &x, rng_below(&rng, MAX_ROWS + 1), 2, (size_t)n_dims);
        assert_int_equal(kvc_rope_apply(best(state), &from, x.positions[0], &x.view, ws, WS_BYTES),
                         KVC_OK);
        assert_int_equal(
            kvc_rope_rebase(best(state), &from, &to, x.positions[0], NULL, &x.view, ws, WS_BYTES),
            KVC_OK);
        check_rotated(&x, &to, x.data);
    }
}

/* One set of angles for the tensors of all layers gives the bits of the calls that make their own.
 */
static void angles_made_once_rotate_every_layer(void **state)
{
    static struct tensor x, y;
    static float cosines[MAX_ROWS * 8], sines[MAX_ROWS * 8];
    const kvc_rope from = rope_of(16, KVC_ROPE_NONE, 1.0), to = rope_of(16, KVC_ROPE_YARN, 4.0);
    uint64_t rng = 3;

    fill(&rng, &x, MAX_ROWS, 2, 20);
    y = x;
    y.view.data = y.data;
    assert_int_equal(kvc_rope_angles(&from, x.positions[0], MAX_ROWS, cosines, sines), KVC_OK);
    assert_int_equal(kvc_rope_rotate(best(state), &from, cosines, sines, &x.view, ws, WS_BYTES),
                     KVC_OK);
    assert_int_equal(kvc_rope_apply(best(state), &from, x.positions[0], &y.view, ws, WS_BYTES),
                     KVC_OK);
    assert_memory_equal(x.data, y.data, sizeof(x.data));
    assert_int_equal(
        kvc_rope_rebase_angles(&from, &to, x.positions[0], NULL, MAX_ROWS, cosines, sines), KVC_OK);
    assert_int_equal(kvc_rope_rotate(best(state), &to, cosines, sines, &x.view, ws, WS_BYTES),
                     KVC_OK);
    assert_int_equal(
        kvc_rope_rebase(best(state), &from, &to, x.positions[0], NULL, &y.view, ws, WS_BYTES),
        KVC_OK);
    assert_memory_equal(x.data, y.data, sizeof(x.data));
}

static float float_of(kvc_dtype dtype, uint16_t bits)
{
    const uint32_t u = (uint32_t)bits << 16;
    float x;

    if (dtype == KVC_DTYPE_F16) {
        return (float)half_value(bits);
    }
    memcpy(&x, &u, sizeof(x));
    return x;
}

/* Halves are rotated in binary32 and rounded once. */
static void halves_are_rounded_once_to_their_own_type(void **state)
{
    const kvc_rope r = rope_of(8, KVC_ROPE_YARN, 2.0);
    const int32_t positions[3][3] = {{7, 7, 7}, {100, 100, 100}, {3000, 3000, 3000}};
    uint64_t rng = 4;

    for (int round = 0; round < 200; round++) {
        const kvc_dtype dtype = round % 2 == 0 ? KVC_DTYPE_F16 : KVC_DTYPE_BF16;
        const double unit = dtype == KVC_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
        uint16_t bits[3 * 10];
        float exact[3 * 10];
        const kvc_view narrow = kvc_view_packed(bits, dtype, 3, 1, 10);
        const kvc_view wide = kvc_view_packed(exact, KVC_DTYPE_F32, 3, 1, 10);

        for (size_t i = 0; i < 30; i++) { /* 2^-3 to 2^4 */
            bits[i] = (uint16_t)(dtype == KVC_DTYPE_F16 ? 0x3000 + rng_below(&rng, 0x1C00)
                                                        : 0x3E00 + rng_below(&rng, 0x0380));
            exact[i] = float_of(dtype, bits[i]);
        }
        assert_int_equal(kvc_rope_apply(best(state), &r, positions[0], &narrow, ws, WS_BYTES),
                         KVC_OK);
        assert_int_equal(kvc_rope_apply(best(state), &r, positions[0], &wide, ws, WS_BYTES),
                         KVC_OK);
        for (size_t i = 0; i < 30; i++) {
            const double x = (double)exact[i];
            assert_true(fabs((double)float_of(dtype, bits[i]) - x) <= unit * fabs(x) + 0x1p-25);
        }
    }
}

static void a_half_that_grows_too_large_becomes_infinite(void **state)
{
    const kvc_rope r = rope_of(2, KVC_ROPE_NONE, 1.0);
    const int32_t p[3] = {-1, 0, 0}; /* cos 1 + sin 1 = 1.38 */
    uint16_t x[2] = {HALF_MAX, HALF_MAX};
    const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F16, 1, 1, 2);

    assert_int_equal(kvc_rope_apply(best(state), &r, p, &view, ws, WS_BYTES), KVC_OK);
    assert_int_equal(x[0], HALF_INF);
    assert_true(half_value(x[1]) < 0.0 && half_value(x[1]) > -20000.0);
}

static void nan_stays_in_its_pair(void **state)
{
    const kvc_rope r = rope_of(8, KVC_ROPE_NONE, 1.0);
    const struct tables *t = *state;

    for (size_t i = 0; i < t->n; i++) {
        float x[8] = {1, NAN, 1, INFINITY, 1, 1, 1, 1};
        const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, 1, 1, 8);

        assert_int_equal(kvc_rope_apply(t->ctx[i], &r, at5, &view, ws, WS_BYTES), KVC_OK);
        for (size_t c = 0; c < 8; c++) {
            assert_int_equal(isfinite(x[c]) != 0, c % 2 == 0);
        }
    }
}

/* Which coordinate turns which pair, with frequencies that make cosines tell. */
static void check_axes(const kvc_rope *r, const char *want)
{
    const int32_t position[3] = {1, 2, 3};
    float cosines[64], sines[64];
    double f[64];

    assert_int_equal(kvc_rope_frequencies(r, NULL, f, NULL), KVC_OK);
    assert_int_equal(kvc_rope_angles(r, position, 1, cosines, sines), KVC_OK);
    for (size_t j = 0; j < (size_t)r->n_dims / 2; j++) {
        const double p = want[j] == 't' ? 1.0 : want[j] == 'y' ? 2.0 : 3.0;
        assert_true(cosines[j] == (float)cos(p * f[j]) && sines[j] == (float)sin(p * f[j]));
    }
}

static void sections_say_which_coordinate_turns_a_pair(void **state)
{
    kvc_rope r = rope_of(128, KVC_ROPE_NONE, 1.0);
    char want[65] = "";

    (void)state;
    r.base = 1.0001; /* all pairs fast: no two coordinates look alike */
    memset(want, 't', 64);
    check_axes(&r, want);
    r.axes = KVC_ROPE_AXES_CONTIGUOUS; /* Qwen2-VL */
    r.sections[0] = 16, r.sections[1] = 24, r.sections[2] = 24;
    memset(want + 16, 'y', 24);
    memset(want + 40, 'x', 24);
    check_axes(&r, want);
    r.axes = KVC_ROPE_AXES_INTERLEAVED; /* Qwen3-VL: t y x up to pair 59, then t */
    r.sections[0] = 24, r.sections[1] = 20, r.sections[2] = 20;
    for (size_t j = 0; j < 64; j++) {
        memcpy(want + j, &"tyx"[j >= 60 ? 0 : j % 3], 1);
    }
    check_axes(&r, want);
    r.n_dims = 8; /* y needs one pair more than x: pair 3 is t again */
    r.sections[0] = 2, r.sections[1] = 1, r.sections[2] = 1;
    check_axes(&r, "tyxt");
}

static void text_positions_turn_alike_whatever_the_sections(void **state)
{
    kvc_rope one = rope_of(32, KVC_ROPE_NONE, 1.0), three = one;
    float c[2][16], s[2][16];

    (void)state;
    three.axes = KVC_ROPE_AXES_CONTIGUOUS;
    three.sections[0] = 4, three.sections[1] = three.sections[2] = 6;
    assert_int_equal(kvc_rope_angles(&one, at5, 1, c[0], s[0]), KVC_OK);
    assert_int_equal(kvc_rope_angles(&three, at5, 1, c[1], s[1]), KVC_OK);
    assert_memory_equal(c[0], c[1], sizeof(c[0]));
    assert_memory_equal(s[0], s[1], sizeof(s[0]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_rope_sets_every_field),
        cmocka_unit_test(ntk_gives_the_printed_base_and_frequencies),
        cmocka_unit_test(dynamic_ntk_grows_with_the_length_beyond_the_training),
        cmocka_unit_test(yarn_keeps_fast_pairs_and_divides_slow_ones),
        cmocka_unit_test(linear_divides_every_frequency),
        cmocka_unit_test(rebased_keys_are_those_of_the_new_base),
        cmocka_unit_test(rotation_is_that_of_the_formula_for_every_shape),
        cmocka_unit_test(rebasing_equals_rotating_anew_for_all_scalings),
        cmocka_unit_test(angles_made_once_rotate_every_layer),
        cmocka_unit_test(halves_are_rounded_once_to_their_own_type),
        cmocka_unit_test(a_half_that_grows_too_large_becomes_infinite),
        cmocka_unit_test(nan_stays_in_its_pair),
        cmocka_unit_test(sections_say_which_coordinate_turns_a_pair),
        cmocka_unit_test(text_positions_turn_alike_whatever_the_sections),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
