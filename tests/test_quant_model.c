/* kvc_quantize() and kvc_dequantize() against the formulas of quant.h, for many shapes. */
#include <math.h>

#include "support/coded.h"
#include "support/half.h"
#include "support/rng.h"

enum { MAX_HEADS = 5 };

/* One rounding to binary32: the double result of one operation on floats is exact or rounds
 * innocently. */
static float f32(double x)
{
    return (float)x;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t pick(uint64_t *rng, const size_t *values, size_t n)
{
    return values[rng_below(rng, n)];
}

/* An input tensor: the caller's bytes and the numbers that they mean, packed. */
struct source {
    kvc_view view;
    float *x;
};

static float store(unsigned char *raw, size_t at, kvc_dtype dtype, float v)
{
    uint32_t bits = float_bits(v);
    uint16_t half;

    if (dtype == KVC_DTYPE_F32) {
        memcpy(raw + 4 * at, &bits, 4);
        return v;
    }
    if (dtype == KVC_DTYPE_BF16) {
        half = (uint16_t)(bits >> 16);
        memcpy(raw + 2 * at, &half, 2);
        bits &= 0xFFFF0000u;
        memcpy(&v, &bits, 4);
        return v;
    }
    half = isnan(v) ? HALF_INF + 1 : isinf(v) ? HALF_INF : half_ceil(fabs((double)v));
    half = (uint16_t)(half | (signbit(v) ? HALF_SIGN : 0));
    memcpy(raw + 2 * at, &half, 2);
    return f32(half_value(half));
}

/* How the random numbers look. */
struct style {
    int min_exp; /* each token and head has a magnitude of about 2^min_exp .. 2^max_exp */
    int max_exp;
    size_t bad_every; /* one element in so many is NaN or Inf; 0: none */
    int steps;        /* > 0: numbers halfway between the codes of -steps .. steps */
};

static float random_number(uint64_t *rng, const struct style *style, float magnitude)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};

    if (style->bad_every != 0 && rng_below(rng, style->bad_every) == 0) {
        return bad[rng_below(rng, 3)];
    }
    if (rng_below(rng, 16) == 0) {
        return rng_below(rng, 2) == 0 ? 0.0f : -0.0f;
    }
    if (style->steps > 0) {
        const int k = (int)rng_below(rng, 2 * (size_t)style->steps + 1) - style->steps;

        return k == style->steps ? magnitude
                                 : ((float)k + 0.5f) * (magnitude / (float)style->steps);
    }
    return rng_unit(rng) * magnitude;
}

/* Rows lie token by token or head by head, with gaps full of NaN that nobody may read as data. */
static struct source source_new(uint64_t *rng, kvc_dtype dtype, const size_t shape[3],
                                const struct style *style)
{
    const size_t n_tokens = shape[0], n_heads = shape[1], head_dim = shape[2];
    const size_t gap = rng_below(rng, 4), width = dtype == KVC_DTYPE_F32 ? 4 : 2;
    struct source s = {.view = kvc_view_packed(NULL, dtype, n_tokens, n_heads, head_dim)};
    size_t n;

    s.view.head_stride = head_dim + gap;
    s.view.token_stride = n_heads * s.view.head_stride + rng_below(rng, 3);
    if (rng_below(rng, 3) == 0) {
        s.view.token_stride = head_dim + gap;
        s.view.head_stride = n_tokens * s.view.token_stride + head_dim;
    }
    n = n_tokens == 0
            ? 1
            : (n_tokens - 1) * s.view.token_stride + (n_heads - 1) * s.view.head_stride + head_dim;
    s.view.data = malloc(n * width);
    s.x = malloc((n_tokens * n_heads * head_dim + 1) * sizeof(float));
    assert_non_null(s.view.data);
    assert_non_null(s.x);
    memset(s.view.data, 0xFF, n * width);
    for (size_t row = 0; row < n_tokens * n_heads; row++) {
        const size_t at = row / n_heads * s.view.token_stride + row % n_heads * s.view.head_stride;
        const size_t span = (size_t)(style->max_exp - style->min_exp + 1);
        const float magnitude =
            ldexpf(1.5f + 0.25f * rng_unit(rng), style->min_exp + (int)rng_below(rng, span));

        for (size_t d = 0; d < head_dim; d++) {
            s.x[row * head_dim + d] =
                store(s.view.data, at + d, dtype, random_number(rng, style, magnitude));
        }
    }
    return s;
}

static void source_free(struct source *s)
{
    free(s->view.data);
    free(s->x);
}

/* Tokens, heads and channels that share parameters, and their finite extremes. */
struct group {
    size_t token, token_end;
    size_t head, head_end;
    size_t channel, channel_end;
    float min, max; /* 0 without a finite element */
};

/* The group that sets the parameters of one element. */
static struct group group_of(const struct source *s, const kvc_quant_options *o, size_t t, size_t h,
                             size_t d)
{
    const size_t head_dim = s->view.head_dim;
    const size_t block = t / o->block_tokens * o->block_tokens;
    const size_t block_end = min_size(block + o->block_tokens, s->view.n_tokens);
    struct group g = {t, t + 1, h, h + 1, 0, head_dim, INFINITY, -INFINITY};

    if (o->scale != KVC_SCALE_TOKEN) {
        g.token = block;
        g.token_end = block_end;
    }
    if (o->scale == KVC_SCALE_HEAD || o->scale == KVC_SCALE_LAYER) {
        g.token = block - min_size(block, o->window_tokens - o->block_tokens);
    }
    if (o->scale == KVC_SCALE_LAYER) {
        g.head = 0;
        g.head_end = s->view.n_heads;
    }
    if (o->scale == KVC_SCALE_CHANNEL) {
        g.channel = d;
        g.channel_end = d + 1;
    }
    for (size_t tt = g.token; tt < g.token_end; tt++) {
        for (size_t hh = g.head; hh < g.head_end; hh++) {
            for (size_t dd = g.channel; dd < g.channel_end; dd++) {
                const float x = s->x[(tt * s->view.n_heads + hh) * head_dim + dd];

                if (isfinite(x)) {
                    g.min = fminf(g.min, x);
                    g.max = fmaxf(g.max, x);
                }
            }
        }
    }
    if (g.min > g.max) {
        g.min = g.max = 0;
    }
    return g;
}

/* How the elements of a group are coded. */
struct rule {
    uint16_t scale_half, minimum_half; /* as stored */
    float scale;                       /* as stored; 0: every code is zero_code */
    float inverse;
    float minimum;
    int lo, hi, offset, zero_code;
    bool clips; /* no half holds the scale or the minimum */
};

static void set_half_scale(struct rule *r, float wanted)
{
    r->scale_half = half_away((double)wanted);
    r->scale = f32(half_value(r->scale_half));
    r->inverse = f32(1.0 / (double)r->scale);
    r->clips = r->clips || fabsf(wanted) > 65504.0f;
}

static struct rule symmetric_rule(const struct group *g, const kvc_quant_options *o)
{
    const int q = o->format == KVC_INT8 ? 127 : 7;
    const float absmax = fmaxf(-g->min, g->max);
    struct rule r = {.lo = -q, .hi = q};

    if (absmax < 0x1p-100f) {
        return r;
    }
    if (o->scale != KVC_SCALE_TOKEN) {
        r.scale = f32((double)absmax / q);
        r.inverse = f32(q / (double)absmax);
    } else if (o->format == KVC_INT8) {
        set_half_scale(&r, f32((double)absmax / 127));
    } else {
        r.lo = -8;
        set_half_scale(&r, f32((double)(g->max >= -g->min ? g->max : g->min) / -8));
    }
    return r;
}

static struct rule channel_rule(const struct group *g, const kvc_quant_options *o)
{
    const int c = o->format == KVC_INT8 ? 255 : 15;
    const float min = fabsf(g->min) < 0x1p-100f ? 0.0f : g->min;
    const float max = fabsf(g->max) < 0x1p-100f ? 0.0f : g->max;
    struct rule r = {.hi = c, .offset = (c + 1) / 2, .zero_code = -(c + 1) / 2};
    float range;

    r.minimum_half = half_down((double)min);
    r.minimum = f32(half_value(r.minimum_half));
    r.clips = g->min < -65504.0f;
    range = f32((double)max - (double)r.minimum);
    if (range > 0) {
        set_half_scale(&r, f32((double)range / c));
    }
    return r;
}

/* The code of one element, before the offset is taken off; counts what the scale could not hold. */
static int model_code(const struct rule *r, float x, kvc_quant_counts *counts)
{
    double y;

    counts->n_nonfinite += isfinite(x) ? 0 : 1;
    if (r->scale == 0) {
        return r->zero_code;
    }
    y = isnan(x) ? 0.0 : (double)x;
    y = nearbyint((double)f32((double)f32(y - (double)r->minimum) * (double)r->inverse));
    if (r->clips && isfinite(x) && (y < r->lo || y > r->hi)) {
        counts->n_saturated++;
    }
    return (int)fmin(fmax(y, r->lo), r->hi) - r->offset;
}

/* The parameters of element (t, h, d) are those of its rule. */
static void check_params(const struct coded *c, const kvc_quant_options *o, const struct source *s,
                         const struct rule *r, size_t t, size_t h, size_t d)
{
    const size_t n_heads = s->view.n_heads, head_dim = s->view.head_dim;
    const size_t block = t / o->block_tokens;
    const float *floats = c->params;
    const uint16_t *halves = c->params;

    switch (o->scale) {
    case KVC_SCALE_HEAD:
        assert_int_equal(float_bits(floats[block * n_heads + h]), float_bits(r->scale));
        break;
    case KVC_SCALE_LAYER: assert_int_equal(float_bits(floats[block]), float_bits(r->scale)); break;
    case KVC_SCALE_TOKEN: assert_int_equal(halves[t * n_heads + h], r->scale_half); break;
    case KVC_SCALE_CHANNEL:
        halves += (block * n_heads + h) * 2 * head_dim;
        assert_int_equal(halves[d], r->scale_half);
        /* The sign of a zero minimum is not specified. */
        assert_true(half_value(halves[head_dim + d]) == half_value(r->minimum_half));
        break;
    }
}

/*
 * The printed formula, and half a step from the source unless the element was clipped.
 * Signed-extreme codes reach -8 on one side only: the other side may lose a whole step.
 */
static void check_value(const struct rule *r, int code, float x, float decoded)
{
    const float product = f32((double)(code + r->offset) * (double)r->scale);
    const float value = f32((double)product + (double)r->minimum);
    const double step = fabs((double)r->scale);
    const double limit = r->lo == -8 && code == 7 ? step : 0.5 * step;
    const double slack = 1e-4 * step + 0x1p-21 * fabs((double)x) + 0x1p-100;

    assert_true(value == decoded);
    if (isfinite(x) && !r->clips) {
        assert_true(fabs((double)x - (double)decoded) <= limit + slack);
    }
}

/*
 * One row of one head, whose rules (CHANNEL: one a channel) change where a group begins. Counts
 * what the codes cannot show.
 */
static void check_row(const struct source *s, const kvc_quant_options *o, const struct coded *c,
                      const float *decoded, size_t row, struct rule *rules,
                      kvc_quant_counts *counts)
{
    const size_t head_dim = s->view.head_dim;
    const size_t token = row / s->view.n_heads, head = row % s->view.n_heads;
    const unsigned char *codes = c->codes + row * row_bytes(o->format, head_dim);
    const bool channels = o->scale == KVC_SCALE_CHANNEL;
    const bool first_row = o->scale == KVC_SCALE_TOKEN || token % o->block_tokens == 0;

    for (size_t d = 0; d < head_dim; d++) {
        const float x = s->x[row * head_dim + d];
        const int code = code_at(codes, o->format, d);
        struct rule *rule = &rules[channels ? d : 0];

        if (first_row && (channels || d == 0)) {
            const struct group g = group_of(s, o, token, head, d);

            *rule = channels ? channel_rule(&g, o) : symmetric_rule(&g, o);
            check_params(c, o, s, rule, token, head, d);
        }
        assert_int_equal(code, model_code(rule, x, counts));
        check_value(rule, code, x, decoded[row * head_dim + d]);
    }
    if (o->format == KVC_INT4 && head_dim % 2 == 1) {
        assert_int_equal(code_at(codes, KVC_INT4, head_dim), 0);
    }
}

static void check_source(const struct tables *t, const struct source *s, const kvc_quant_options *o)
{
    const size_t n_tokens = s->view.n_tokens, n_heads = s->view.n_heads;
    struct coded c = code_all(t, &s->view, o);
    float *decoded = decode_all(t, &c, o, n_tokens, n_heads, s->view.head_dim);
    kvc_quant_counts counts = {.struct_size = sizeof(counts)};
    static struct rule rules[MAX_HEADS][KVC_MAX_HEAD_DIM];

    for (size_t row = 0; row < n_tokens * n_heads; row++) {
        check_row(s, o, &c, decoded, row, rules[row % n_heads], &counts);
    }
    assert_int_equal(c.counts.n_nonfinite, counts.n_nonfinite);
    assert_int_equal(c.counts.n_saturated, counts.n_saturated);
    free(decoded);
    coded_free(&c);
}

/* Every format and scale with one input. */
static void check_all(const struct tables *t, uint64_t *rng, kvc_dtype dtype, const size_t shape[3],
                      size_t block, const struct style *style)
{
    struct source s = source_new(rng, dtype, shape, style);

    for (int mode = 0; mode < QUANT_MODES; mode++) {
        const size_t window = block * (1 + rng_below(rng, 4));
        const kvc_quant_options o = quant_mode(mode, block, window);

        check_source(t, &s, &o);
    }
    source_free(&s);
}

static const struct style plain = {-3, 3, 0, 0};

static void every_head_dim_gives_the_bytes_of_the_formula(void **state)
{
    uint64_t rng = 1;

    for (size_t head_dim = 1; head_dim <= 300; head_dim++) {
        const size_t shape[3] = {3, 1 + head_dim % 2, head_dim};

        check_all(*state, &rng, (kvc_dtype)(head_dim % 3), shape, 2, &plain);
    }
    for (size_t head_dim = 505; head_dim <= KVC_MAX_HEAD_DIM; head_dim++) {
        const size_t shape[3] = {3, 2, head_dim};

        check_all(*state, &rng, (kvc_dtype)(head_dim % 3), shape, 2, &plain);
    }
}

static void many_shapes(const struct tables *t, uint64_t seed, const struct style *style)
{
    static const size_t dims[] = {1, 2, 5, 8, 16, 31, 33, 40, 64, 72, 80, 96, 100, 112, 128};
    static const size_t blocks[] = {1, 2, 3, 16, 64, 65, 1000};
    uint64_t rng = seed;

    for (int i = 0; i < 24; i++) {
        const size_t head_dim = pick(&rng, dims, sizeof(dims) / sizeof(dims[0]));
        const size_t block = pick(&rng, blocks, sizeof(blocks) / sizeof(blocks[0]));
        const size_t most = head_dim > 64 ? 70 : 201;
        const size_t shape[3] = {rng_below(&rng, most), 1 + rng_below(&rng, MAX_HEADS), head_dim};

        for (int dtype = KVC_DTYPE_F32; dtype <= KVC_DTYPE_BF16; dtype++) {
            check_all(t, &rng, (kvc_dtype)dtype, shape, block, style);
        }
    }
}

static void every_shape_block_and_window_gives_the_bytes_of_the_formula(void **state)
{
    many_shapes(*state, 2, &plain);
}

static void nonfinite_elements_give_the_bytes_of_the_formula(void **state)
{
    static const struct style style = {-3, 3, 20, 0};

    many_shapes(*state, 3, &style);
}

static void numbers_halfway_between_codes_give_the_bytes_of_the_formula(void **state)
{
    static const struct style ties8 = {0, 0, 0, 127}, ties4 = {0, 0, 0, 7};

    many_shapes(*state, 9, &ties8);
    many_shapes(*state, 10, &ties4);
}

static void tiny_and_huge_groups_give_the_bytes_of_the_formula(void **state)
{
    static const struct style small = {-40, -8, 0, 0}, large = {8, 40, 50, 0},
                              extreme = {-126, 126, 50, 0};

    many_shapes(*state, 4, &small);
    many_shapes(*state, 5, &large);
    many_shapes(*state, 6, &extreme);
}

static void the_largest_shapes_give_the_bytes_of_the_formula(void **state)
{
    static const size_t shapes[][3] = {{200, 5, 64}, {66, 2, 256}, {66, 1, 512}};
    uint64_t rng = 7;

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        check_all(*state, &rng, (kvc_dtype)(i % 3), shapes[i], 64, &plain);
    }
}

static void any_code_bytes_are_decoded_by_the_formula(void **state)
{
    const struct tables *t = *state;
    uint64_t rng = 8;

    for (int mode = 0; mode < QUANT_MODES; mode++) {
        for (size_t head_dim = 1; head_dim <= 70; head_dim++) {
            const size_t n_tokens = 5, n_heads = 2;
            const kvc_quant_options o = quant_mode(mode, 2, 2);
            struct coded c = {.codes = NULL};
            float *x;

            assert_int_equal(
                kvc_quant_size(n_tokens, n_heads, head_dim, &o, &c.codes_bytes, &c.params_bytes),
                KVC_OK);
            c.codes = malloc(c.codes_bytes);
            c.params = malloc(c.params_bytes);
            assert_non_null(c.codes);
            assert_non_null(c.params);
            for (size_t i = 0; i < c.codes_bytes; i++) {
                c.codes[i] = (unsigned char)rng_next(&rng);
            }
            /* Any parameters too, NaN and Inf among them: the tables agree, whatever they mean. */
            for (size_t i = 0; i < c.params_bytes; i++) {
                ((unsigned char *)c.params)[i] = (unsigned char)rng_next(&rng);
            }
            x = decode_all(t, &c, &o, n_tokens, n_heads, head_dim);
            for (size_t row = 0; o.scale == KVC_SCALE_TOKEN && row < n_tokens * n_heads; row++) {
                const double scale = half_value(((const uint16_t *)c.params)[row]);
                const unsigned char *codes = c.codes + row * row_bytes(o.format, head_dim);

                for (size_t d = 0; d < head_dim; d++) {
                    const float want = f32(code_at(codes, o.format, d) * scale);

                    assert_true(same_floats(&want, &x[row * head_dim + d], 1));
                }
            }
            free(x);
            coded_free(&c);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_dim_gives_the_bytes_of_the_formula),
        cmocka_unit_test(every_shape_block_and_window_gives_the_bytes_of_the_formula),
        cmocka_unit_test(nonfinite_elements_give_the_bytes_of_the_formula),
        cmocka_unit_test(numbers_halfway_between_codes_give_the_bytes_of_the_formula),
        cmocka_unit_test(tiny_and_huge_groups_give_the_bytes_of_the_formula),
        cmocka_unit_test(the_largest_shapes_give_the_bytes_of_the_formula),
        cmocka_unit_test(any_code_bytes_are_decoded_by_the_formula),
    };
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
