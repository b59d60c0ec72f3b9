/* Quantize and dequantize: every call that is refused, and that it writes nothing. */
#include "support/coded.h"
#include "support/quant_mistakes.h"

enum { TOKENS = 4, HEADS = 2, DIM = 8, ELEMENTS = TOKENS * HEADS * DIM };

/* The arguments of one call; kvc_dequantize() takes the view as its output. */
struct call {
    kvc_ctx *ctx;
    kvc_view view;
    const kvc_view *p_view;
    kvc_quant_options options;
    const kvc_quant_options *p_options;
    unsigned char *codes, *params;
    size_t codes_bytes, params_bytes;
    kvc_quant_counts counts;
};

/* Options that no call accepts. Returns what is wrong, NULL past the end. */
static const char *spoil_options(kvc_quant_options *o, size_t which)
{
    switch (which) {
    case 0: o->struct_size = 0; return "struct_size 0";
    case 1: o->struct_size = sizeof(size_t); return "struct_size too small";
    case 2: o->format = KVC_F16; return "format F16";
    case 3: o->format = (kvc_format)3; return "format 3";
    case 4: o->scale = (kvc_scale)4; return "scale 4";
    case 5: o->block_tokens = 0; return "HEAD, block 0";
    case 6:
        o->scale = KVC_SCALE_LAYER;
        o->block_tokens = 0;
        return "LAYER, block 0";
    case 7:
        o->scale = KVC_SCALE_CHANNEL;
        o->block_tokens = 0;
        return "CHANNEL, block 0";
    case 8: o->window_tokens = 0; return "HEAD, window 0";
    case 9: o->window_tokens = 3; return "HEAD, window no multiple of the block";
    case 10: o->block_tokens = 8; return "HEAD, window below the block";
    case 11:
        o->scale = KVC_SCALE_LAYER;
        o->window_tokens = 0;
        return "LAYER, window 0";
    case 12:
        o->scale = KVC_SCALE_LAYER;
        o->window_tokens = 5;
        return "LAYER, window 5, block 2";
    default: return NULL;
    }
}

/* faults D3, D8, D12: missing parameters and sizes that do not match are errors. */
static const char *spoil_call(struct call *c, size_t which)
{
    switch (which) {
    case 0: c->ctx = NULL; return "ctx NULL";
    case 1: c->p_view = NULL; return "view NULL";
    case 2: c->codes = NULL; return "codes NULL";
    case 3: c->params = NULL; return "params NULL";
    case 4: c->params += 1; return "params at an odd address";
    case 5: c->params += 2; return "params aligned to 2";
    case 6: c->codes_bytes -= 1; return "one byte of codes too few";
    case 7: c->codes_bytes += 1; return "one byte of codes too many";
    case 8: c->codes_bytes = 0; return "no codes";
    case 9: c->params_bytes -= sizeof(float); return "one scale too few";
    case 10: c->params_bytes += sizeof(float); return "one scale too many";
    case 11: c->params_bytes -= 1; return "one byte of parameters too few";
    case 12: c->params_bytes = 0; return "no parameters";
    case 13: c->params_bytes = sizeof(float); return "the parameters of a LAYER of one block";
    default: return NULL;
    }
}

/* The which-th of all mistakes. */
static const char *spoil(struct call *c, size_t which)
{
    if (which < 32) {
        return spoil_call(c, which);
    }
    return which < 64 ? spoil_view(&c->view, which - 32) : spoil_options(&c->options, which - 64);
}

/* HEAD scales of two blocks; c must stay where it is. */
static void prepare(struct call *c, kvc_ctx *ctx, void *data, struct guard *codes,
                    struct guard *params)
{
    c->ctx = ctx;
    c->view = kvc_view_packed(data, KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    c->p_view = &c->view;
    c->options = quant_options(KVC_INT8, KVC_SCALE_HEAD, 2, 4);
    c->p_options = &c->options;
    c->codes = codes->data;
    c->codes_bytes = codes->size;
    c->params = params->data;
    c->params_bytes = params->size;
    c->counts = (kvc_quant_counts){sizeof(kvc_quant_counts), 99, 99};
}

static kvc_status quantize(struct call *c)
{
    return kvc_quantize(c->ctx, c->p_view, c->p_options, c->codes, c->codes_bytes, c->params,
                        c->params_bytes, &c->counts);
}

static kvc_status dequantize(struct call *c)
{
    return kvc_dequantize(c->ctx, c->codes, c->codes_bytes, c->params, c->params_bytes,
                          c->p_options, c->p_view);
}

static void quantize_refuses_bad_arguments_and_writes_nothing(void **state)
{
    const struct tables *t = *state;
    float x[ELEMENTS] = {1, 2, 3};
    struct call c;

    for (size_t i = 0; i < t->n; i++) {
        struct guard codes = guard_new(ELEMENTS, 0, 0xA5), params = guard_new(16, 0, 0xA5);

        for (size_t which = 0; which < 96; which++) {
            const char *what;

            prepare(&c, t->ctx[i], x, &codes, &params);
            what = spoil(&c, which);
            if (what != NULL && quantize(&c) != KVC_E_ARG) {
                fail_msg("quantize accepts: %s", what);
            }
            assert_true(guard_untouched(&codes));
            assert_true(guard_untouched(&params));
            assert_int_equal(c.counts.n_nonfinite, 99);
            assert_int_equal(c.counts.n_saturated, 99);
        }
        prepare(&c, t->ctx[i], x, &codes, &params);
        c.counts.struct_size = 0;
        assert_int_equal(quantize(&c), KVC_E_ARG);
        assert_int_equal(c.counts.n_nonfinite, 99);
        assert_true(guard_untouched(&codes));
        prepare(&c, t->ctx[i], x, &codes, &params);
        assert_int_equal(quantize(&c), KVC_OK);
        guard_free(&codes);
        guard_free(&params);
    }
}

static void dequantize_refuses_bad_arguments_and_writes_nothing(void **state)
{
    const struct tables *t = *state;
    struct call c;

    for (size_t i = 0; i < t->n; i++) {
        struct guard codes = guard_new(ELEMENTS, 0, 0), params = guard_new(16, 0, 0);
        struct guard x = guard_new(ELEMENTS * sizeof(float), 0, 0xA5);

        for (size_t which = 0; which < 96; which++) {
            const char *what;

            prepare(&c, t->ctx[i], x.data, &codes, &params);
            what = spoil(&c, which);
            if (what != NULL && dequantize(&c) != KVC_E_ARG) {
                fail_msg("dequantize accepts: %s", what);
            }
            assert_true(guard_untouched(&x));
        }
        for (int dtype = KVC_DTYPE_F16; dtype <= KVC_DTYPE_BF16; dtype++) {
            prepare(&c, t->ctx[i], x.data, &codes, &params);
            c.view.dtype = (kvc_dtype)dtype;
            assert_int_equal(dequantize(&c), KVC_E_ARG);
        }
        assert_true(guard_untouched(&x));
        prepare(&c, t->ctx[i], x.data, &codes, &params);
        assert_int_equal(dequantize(&c), KVC_OK);
        guard_free(&codes);
        guard_free(&params);
        guard_free(&x);
    }
}

static void dequantize_refuses_strides_that_make_elements_overlap(void **state)
{
    static const size_t strides[][2] = {
        {0, DIM},           /* all tokens in one place */
        {DIM - 1, 8 * DIM}, /* the last element of a row is the first of the next token's */
        {DIM, DIM},         /* head 1 of a token is head 0 of the next */
        {2 * DIM - 1, DIM},
    };
    const struct tables *t = *state;

    for (size_t i = 0; i < t->n; i++) {
        struct guard codes = guard_new(ELEMENTS, 0, 0), params = guard_new(16, 0, 0);
        struct guard x = guard_new(4 * ELEMENTS * sizeof(float), 0, 0xA5);

        for (size_t k = 0; k < sizeof(strides) / sizeof(strides[0]); k++) {
            struct call c;

            prepare(&c, t->ctx[i], x.data, &codes, &params);
            c.view.token_stride = strides[k][0];
            c.view.head_stride = strides[k][1];
            assert_int_equal(dequantize(&c), KVC_E_ARG);
            assert_true(guard_untouched(&x));
        }
        guard_free(&codes);
        guard_free(&params);
        guard_free(&x);
    }
}

static void size_refuses_what_has_no_size(void **state)
{
    static const struct {
        kvc_format format;
        kvc_scale scale;
        size_t n_tokens, n_heads, head_dim;
    } cases[] = {
        {KVC_INT8, KVC_SCALE_TOKEN, 1, 0, 1},
        {KVC_INT8, KVC_SCALE_TOKEN, 1, 1, 0},
        {KVC_INT8, KVC_SCALE_TOKEN, 0, 0, 1},
        {KVC_INT8, KVC_SCALE_LAYER, SIZE_MAX, 2, 1},
        {KVC_INT8, KVC_SCALE_LAYER, SIZE_MAX / 16 + 1, 4, 4},
        {KVC_INT4, KVC_SCALE_LAYER, SIZE_MAX / 2, 2, 3},
        /* The codes fit, the parameters do not. */
        {KVC_INT8, KVC_SCALE_TOKEN, SIZE_MAX / 2, 2, 1},
        {KVC_INT8, KVC_SCALE_HEAD, SIZE_MAX / 2, 2, 1},
        {KVC_INT4, KVC_SCALE_CHANNEL, SIZE_MAX / 256, 1, 512},
    };
    size_t codes, params;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const kvc_quant_options o = quant_options(cases[i].format, cases[i].scale, 1, 1);

        assert_int_equal(kvc_quant_size(cases[i].n_tokens, cases[i].n_heads, cases[i].head_dim, &o,
                                        &codes, &params),
                         KVC_E_ARG);
    }
    for (size_t which = 0; which < 32; which++) {
        kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_HEAD, 2, 4);
        const char *what = spoil_options(&o, which);

        if (what != NULL && kvc_quant_size(1, 1, 1, &o, &codes, &params) != KVC_E_ARG) {
            fail_msg("size accepts: %s", what);
        }
    }
    assert_int_equal(kvc_quant_size(1, 1, 1, NULL, &codes, &params), KVC_E_ARG);
}

static void a_head_dim_above_the_limit_is_unsupported(void **state)
{
    enum { TOO_WIDE = KVC_MAX_HEAD_DIM + 1 };
    const struct tables *t = *state;
    const kvc_quant_options o = quant_options(KVC_INT8, KVC_SCALE_HEAD, 1, 1);
    float x[TOO_WIDE] = {0}, scale[1];
    const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, 1, 1, TOO_WIDE);
    size_t codes_bytes, params_bytes;

    assert_int_equal(kvc_quant_size(1, 1, TOO_WIDE, &o, &codes_bytes, &params_bytes),
                     KVC_E_UNSUPPORTED);
    for (size_t i = 0; i < t->n; i++) {
        struct guard codes = guard_new(TOO_WIDE, 0, 0xA5), params = guard_new(4, 0, 0xA5);
        kvc_quant_counts counts = {sizeof(counts), 99, 99};

        assert_int_equal(
            kvc_quantize(t->ctx[i], &view, &o, codes.data, TOO_WIDE, params.data, 4, &counts),
            KVC_E_UNSUPPORTED);
        assert_int_equal(kvc_dequantize(t->ctx[i], codes.data, TOO_WIDE, params.data, 4, &o, &view),
                         KVC_E_UNSUPPORTED);
        assert_int_equal(
            kvc_quantize_window(t->ctx[i], &view, 1, KVC_INT8, 1, codes.data, TOO_WIDE, scale),
            KVC_E_UNSUPPORTED);
        assert_int_equal(counts.n_nonfinite, 99);
        assert_true(guard_untouched(&codes));
        assert_true(guard_untouched(&params));
        assert_true(x[0] == 0);
        guard_free(&codes);
        guard_free(&params);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(size_refuses_what_has_no_size),
        cmocka_unit_test(quantize_refuses_bad_arguments_and_writes_nothing),
        cmocka_unit_test(dequantize_refuses_bad_arguments_and_writes_nothing),
        cmocka_unit_test(dequantize_refuses_strides_that_make_elements_overlap),
        cmocka_unit_test(a_head_dim_above_the_limit_is_unsupported),
    };
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
