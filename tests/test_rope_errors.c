/* Rotary positions: what is refused, and the workspace. */
#include <math.h>
#include <string.h>

#include "kvc/rope.h"
#include "support/tables.h"

enum { WS_BYTES = 1 << 17 };

static _Alignas(64) unsigned char ws[WS_BYTES];
static const int32_t at5[3] = {5, 5, 5};

static kvc_rope rope_of(int32_t n_dims, kvc_rope_scaling scaling, double factor)
{
    kvc_rope r;

    kvc_rope_default(&r);
    r.n_dims = n_dims;
    r.scaling = scaling;
    r.factor = factor;
    return r;
}

static kvc_status rebase_angles(const kvc_rope *from, const kvc_rope *to, const uint64_t *merged)
{
    static const int32_t positions[66][3];
    static float cosines[66 * 8], sines[66 * 8];
    float x[66 * 18] = {0};
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 66, 1, 18);
    kvc_ctx *ctx;
    kvc_status status;

    assert_int_equal(kvc_ctx_create(NULL, &ctx), KVC_OK);
    status = kvc_rope_rebase(ctx, from, to, positions[0], merged, &k, ws, WS_BYTES);
    kvc_ctx_destroy(ctx);
    assert_int_equal(kvc_rope_rebase_angles(from, to, positions[0], merged, 66, cosines, sines),
                     status);
    return status;
}

static void rebasing_refuses_what_cannot_be_exact(void **state)
{
    const kvc_rope from = rope_of(16, KVC_ROPE_NONE, 1.0), ntk = rope_of(16, KVC_ROPE_NTK, 2.0);
    const uint64_t none[2] = {0, ~UINT64_C(3)}, last[2] = {0, 2};
    kvc_rope to = ntk;

    (void)state;
    assert_int_equal(rebase_angles(&from, &to, NULL), KVC_OK);
    assert_int_equal(rebase_angles(&from, &to, none), KVC_OK); /* bits beyond the rows */
    assert_int_equal(rebase_angles(&from, &to, last), KVC_E_UNSUPPORTED);
    assert_int_equal(rebase_angles(&from, &from, last), KVC_OK); /* nothing turns */
    to.layout = KVC_ROPE_INTERLEAVED;
    assert_int_equal(rebase_angles(&from, &to, NULL), KVC_E_UNSUPPORTED);
    to = ntk;
    to.n_dims = 14;
    assert_int_equal(rebase_angles(&from, &to, NULL), KVC_E_UNSUPPORTED);
    to = ntk;
    to.axes = KVC_ROPE_AXES_CONTIGUOUS;
    to.sections[0] = 8;
    assert_int_equal(rebase_angles(&from, &to, NULL), KVC_E_UNSUPPORTED);
    kvc_rope other = to;
    other.sections[0] = 4, other.sections[1] = 4;
    assert_int_equal(rebase_angles(&to, &to, NULL), KVC_OK);
    assert_int_equal(rebase_angles(&other, &to, NULL), KVC_E_UNSUPPORTED);
}

/* A descriptor that no call accepts. Returns what is wrong, NULL past the end. */
static const char *spoil_rope(kvc_rope *r, size_t which)
{
    switch (which) {
    case 0: r->struct_size = 8; return "struct_size too small";
    case 1: r->n_dims = 0; return "n_dims 0";
    case 2: r->n_dims = 7; return "n_dims odd";
    case 3: r->n_dims = KVC_MAX_HEAD_DIM + 2; return "n_dims too large";
    case 4: r->n_dims = -2; return "n_dims negative";
    case 5: r->layout = (kvc_rope_layout)2; return "layout 2";
    case 6: r->base = 1.0; return "base 1";
    case 7: r->base = (double)NAN; return "base NaN";
    case 8: r->base = (double)INFINITY; return "base Inf";
    case 9: r->scaling = (kvc_rope_scaling)5; return "scaling 5";
    case 10: r->factor = 0.5; return "factor below 1";
    case 11: r->factor = (double)NAN; return "factor NaN";
    case 12: r->factor = (double)INFINITY; return "factor Inf";
    case 13: r->original_context = 0; return "original_context 0";
    case 14: r->beta_slow = 0.0; return "beta_slow 0";
    case 15: r->beta_slow = 33.0; return "beta_slow above beta_fast";
    case 16: r->beta_fast = (double)INFINITY; return "beta_fast Inf";
    case 17: r->attention_factor = -1.0; return "attention_factor -1";
    case 18: r->attention_factor = (double)NAN; return "attention_factor NaN";
    case 19: r->scaling = KVC_ROPE_DYNAMIC_NTK, r->length = -1; return "length -1";
    case 20:
        r->scaling = KVC_ROPE_DYNAMIC_NTK, r->original_context = 0;
        return "dynamic, context 0";
    case 21: r->scaling = KVC_ROPE_NTK, r->n_dims = 2, r->sections[0] = 1; return "NTK, n_dims 2";
    case 22: r->scaling = KVC_ROPE_NTK, r->base = 1e308, r->factor = 10; return "base overflows";
    case 23: r->axes = (kvc_rope_axes)3; return "axes 3";
    case 24: r->sections[0] = 3; return "sections do not add up";
    case 25: r->sections[0] = 5, r->sections[1] = -1; return "section negative";
    case 26: r->sections[3] = 1; return "a fourth axis";
    case 27:
        r->axes = KVC_ROPE_AXES_INTERLEAVED;
        r->sections[0] = 1, r->sections[1] = 1, r->sections[2] = 2;
        return "interleaved: pair 5 of x does not exist";
    case 28:
        r->axes = KVC_ROPE_AXES_INTERLEAVED;
        r->sections[0] = 1, r->sections[1] = 3;
        return "interleaved: pair 7 of y does not exist";
    case 29: r->scaling = KVC_ROPE_LINEAR, r->factor = 0.0; return "linear, factor 0";
    default: return NULL;
    }
}

static kvc_rope spoilable(void)
{
    kvc_rope r = rope_of(8, KVC_ROPE_YARN, 2.0);

    r.axes = KVC_ROPE_AXES_CONTIGUOUS;
    r.sections[0] = 4;
    return r;
}

static void a_wrong_descriptor_is_refused_by_every_call(void **state)
{
    const kvc_rope good = spoilable();
    double base = -1.0, f[4] = {-1.0}, m = -1.0;
    float c[4] = {-1}, s[4] = {-1}, x[8] = {-1};
    const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, 1, 1, 8);
    size_t size = 7;
    kvc_rope bad = good;

    assert_int_equal(kvc_rope_frequencies(&bad, &base, f, &m), KVC_OK);
    base = f[0] = m = -1.0;
    for (size_t i = 0;; i++) {
        bad = good;
        if (spoil_rope(&bad, i) == NULL) {
            break;
        }
        assert_int_equal(kvc_rope_frequencies(&bad, &base, f, &m), KVC_E_ARG);
        assert_int_equal(kvc_rope_angles(&bad, at5, 1, c, s), KVC_E_ARG);
        assert_int_equal(kvc_rope_rebase_angles(&bad, &good, at5, NULL, 1, c, s), KVC_E_ARG);
        assert_int_equal(kvc_rope_rebase_angles(&good, &bad, at5, NULL, 1, c, s), KVC_E_ARG);
        assert_int_equal(kvc_rope_workspace_size(&bad, &size), KVC_E_ARG);
        assert_int_equal(kvc_rope_apply(best(state), &bad, at5, &view, ws, WS_BYTES), KVC_E_ARG);
        assert_int_equal(kvc_rope_rotate(best(state), &bad, c, s, &view, ws, WS_BYTES), KVC_E_ARG);
        assert_int_equal(kvc_rope_rebase(best(state), &bad, &good, at5, NULL, &view, ws, WS_BYTES),
                         KVC_E_ARG);
    }
    assert_true(base == -1.0 && f[0] == -1.0 && m == -1.0 && c[0] == -1 && s[0] == -1 &&
                x[0] == -1 && size == 7);
}

static void null_pointers_and_wrong_views_are_refused(void **state)
{
    const kvc_rope r = rope_of(8, KVC_ROPE_NONE, 1.0);
    float c[8] = {1, 1, 1, 1, 1, 1, 1, 1}, x[16] = {3};
    const kvc_view good = kvc_view_packed(x, KVC_DTYPE_F32, 2, 1, 8);
    const int32_t p[6] = {1, 1, 1, 2, 2, 2};
    kvc_ctx *ctx = best(state);
    kvc_view view = good;
    size_t size;

    assert_int_equal(kvc_rope_frequencies(NULL, NULL, NULL, NULL), KVC_E_ARG);
    assert_int_equal(kvc_rope_workspace_size(NULL, &size), KVC_E_ARG);
    assert_int_equal(kvc_rope_workspace_size(&r, NULL), KVC_E_ARG);
    assert_int_equal(kvc_rope_angles(NULL, p, 1, c, c), KVC_E_ARG);
    assert_int_equal(kvc_rope_angles(&r, NULL, 1, c, c), KVC_E_ARG);
    assert_int_equal(kvc_rope_angles(&r, p, 1, NULL, c), KVC_E_ARG);
    assert_int_equal(kvc_rope_angles(&r, p, 1, c, NULL), KVC_E_ARG);
    assert_int_equal(kvc_rope_rebase_angles(NULL, &r, p, NULL, 1, c, c), KVC_E_ARG);
    assert_int_equal(kvc_rope_rebase_angles(&r, NULL, p, NULL, 1, c, c), KVC_E_ARG);
    assert_int_equal(kvc_rope_rebase_angles(&r, &r, NULL, NULL, 1, c, c), KVC_E_ARG);
    assert_int_equal(kvc_rope_rebase_angles(&r, &r, p, NULL, 1, NULL, c), KVC_E_ARG);
    assert_int_equal(kvc_rope_rebase_angles(&r, &r, p, NULL, 1, c, NULL), KVC_E_ARG);
    assert_int_equal(kvc_rope_rotate(NULL, &r, c, c, &good, ws, WS_BYTES), KVC_E_ARG);
    assert_int_equal(kvc_rope_rotate(ctx, &r, NULL, c, &good, ws, WS_BYTES), KVC_E_ARG);
    assert_int_equal(kvc_rope_rotate(ctx, &r, c, NULL, &good, ws, WS_BYTES), KVC_E_ARG);
    assert_int_equal(kvc_rope_apply(ctx, &r, NULL, &good, ws, WS_BYTES), KVC_E_ARG);
    assert_int_equal(kvc_rope_apply(ctx, &r, p, NULL, ws, WS_BYTES), KVC_E_ARG);
    assert_int_equal(kvc_rope_rebase(ctx, &r, &r, NULL, NULL, &good, ws, WS_BYTES), KVC_E_ARG);
    view.token_stride = 7; /* tokens overlap */
    assert_int_equal(kvc_rope_apply(ctx, &r, p, &view, ws, WS_BYTES), KVC_E_ARG);
    view = good;
    view.head_dim = 6; /* shorter than n_dims */
    assert_int_equal(kvc_rope_apply(ctx, &r, p, &view, ws, WS_BYTES), KVC_E_ARG);
    view.head_dim = view.head_stride = view.token_stride = KVC_MAX_HEAD_DIM + 1;
    assert_int_equal(kvc_rope_apply(ctx, &r, p, &view, ws, WS_BYTES), KVC_E_UNSUPPORTED);
    view = good;
    view.n_tokens = 0;
    view.data = NULL;
    assert_int_equal(kvc_rope_apply(ctx, &r, p, &view, ws, WS_BYTES), KVC_OK);
    assert_true(x[0] == 3);
}

static void the_workspace_is_as_large_as_said_and_no_larger(void **state)
{
    static const int32_t p[17 * 3];
    kvc_ctx *ctx = best(state);

    for (int32_t n_dims = 2; n_dims <= 40; n_dims += 2) {
        const kvc_rope r = rope_of(n_dims, KVC_ROPE_NONE, 1.0);
        float x[17 * 40] = {1};
        const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, 17, 1, (size_t)n_dims);
        unsigned char *room;
        size_t size;

        assert_int_equal(kvc_rope_workspace_size(&r, &size), KVC_OK);
        room = aligned_alloc(64, (size + 63) / 64 * 64 + 64);
        assert_non_null(room);
        memset(room + size, 0xA5, 64);
        memset(room, 0xFF, size); /* NaN */
        assert_int_equal(kvc_rope_apply(ctx, &r, p, &view, room, size - 1), KVC_E_WORKSPACE);
        assert_int_equal(kvc_rope_apply(ctx, &r, p, &view, room + 32, size), KVC_E_WORKSPACE);
        assert_int_equal(kvc_rope_apply(ctx, &r, p, &view, NULL, size), KVC_E_WORKSPACE);
        assert_int_equal(kvc_rope_apply(ctx, &r, p, &view, room, size), KVC_OK);
        assert_true(x[0] == 1); /* position 0: nothing turned */
        for (size_t i = 0; i < 64; i++) {
            assert_int_equal(room[size + i], 0xA5);
        }
        free(room);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rebasing_refuses_what_cannot_be_exact),
        cmocka_unit_test(a_wrong_descriptor_is_refused_by_every_call),
        cmocka_unit_test(null_pointers_and_wrong_views_are_refused),
        cmocka_unit_test(the_workspace_is_as_large_as_said_and_no_larger),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
