/* Structs that cross the API: programs that were built with an older or a newer header. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "kvc/kvc.h"

/* A struct as a later header has it, and the guard that must stay. */
#define NEWER(type)                                                                                \
    struct {                                                                                       \
        type known;                                                                                \
        uint64_t added;                                                                            \
    }

static kvc_cache_params geometry(kvc_cache_params p)
{
    p.n_layers = p.n_heads = p.n_kv_heads = 1;
    p.head_dim_k = p.head_dim_v = 8;
    return p;
}

static void a_newer_struct_is_read_if_its_new_fields_are_zero(void **state)
{
    NEWER(kvc_cache_params) p;
    NEWER(kvc_ctx_params) c = {.known = {.struct_size = sizeof(c)}};
    NEWER(kvc_quant_options) o;
    kvc_ctx *ctx;
    size_t bytes;

    (void)state;
    kvc_cache_params_init(&p.known, sizeof(p));
    assert_int_equal(p.known.struct_size, sizeof(p));
    assert_int_equal(p.added, 0);
    p.known = geometry(p.known);
    assert_int_equal(kvc_cache_min_budget(&p.known, &bytes), KVC_OK);
    p.added = 1;
    assert_int_equal(kvc_cache_min_budget(&p.known, &bytes), KVC_E_UNSUPPORTED);
    p.known.struct_size = SIZE_MAX;
    assert_int_equal(kvc_cache_min_budget(&p.known, &bytes), KVC_E_ARG);

    assert_int_equal(kvc_ctx_create(&c.known, &ctx), KVC_OK);
    kvc_ctx_destroy(ctx);
    c.added = 1;
    assert_int_equal(kvc_ctx_create(&c.known, &ctx), KVC_E_UNSUPPORTED);
    assert_null(ctx);

    kvc_quant_options_init(&o.known, sizeof(o));
    assert_int_equal(kvc_quant_size(1, 1, 1, &o.known, NULL, NULL), KVC_OK);
    o.added = 1;
    assert_int_equal(kvc_quant_size(1, 1, 1, &o.known, NULL, NULL), KVC_E_UNSUPPORTED);
}

/* The defaults and the outputs never reach beyond the size that the caller gave. */
static void nothing_is_written_beyond_the_callers_struct(void **state)
{
    struct {
        kvc_cache_params p;
        uint64_t guard;
    } params = {.guard = 7};
    struct {
        kvc_attend_options o;
        uint64_t guard;
    } options = {.guard = 7};
    const size_t cut = offsetof(kvc_cache_params, sink_tokens);

    (void)state;
    memset(&params.p, 0xee, sizeof(params.p));
    kvc_cache_params_init(&params.p, cut);
    assert_int_equal(params.p.struct_size, cut);
    assert_int_equal(params.p.recent_tokens, 128);
    assert_int_equal((uint32_t)params.p.sink_tokens, 0xeeeeeeeeu);
    kvc_cache_params_default(&params.p);
    assert_int_equal(params.p.sink_tokens, 4);
    assert_int_equal(params.guard, 7);
    kvc_attend_options_default(NULL, &options.o);
    assert_int_equal(options.o.struct_size, sizeof(options.o));
    assert_int_equal(options.guard, 7);
    kvc_cache_params_init(NULL, 100);
    kvc_quant_options_init(NULL, 100);
    kvc_attend_options_init(NULL, NULL, 100);
}

/* Outputs of a newer program: the fields that this library knows are filled, the others stay. */
static void a_newer_output_is_filled_as_far_as_it_is_known(void **state)
{
    NEWER(kvc_stats) stats = {.known = {.struct_size = sizeof(stats)}, .added = 7};
    kvc_cache_params p;
    kvc_cache *cache;
    kvc_ctx *ctx;

    (void)state;
    kvc_cache_params_default(&p);
    p = geometry(p);
    assert_int_equal(kvc_cache_min_budget(&p, &p.budget_bytes), KVC_OK);
    assert_int_equal(kvc_ctx_create(NULL, &ctx), KVC_OK);
    assert_int_equal(kvc_cache_create(ctx, &p, &cache), KVC_OK);
    assert_int_equal(kvc_cache_stats(cache, &stats.known), KVC_OK);
    assert_int_equal(stats.known.struct_size, sizeof(stats));
    assert_int_equal(stats.known.budget_bytes, p.budget_bytes);
    assert_int_equal(stats.added, 7);
    kvc_cache_destroy(cache);
    kvc_ctx_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_newer_struct_is_read_if_its_new_fields_are_zero),
        cmocka_unit_test(nothing_is_written_beyond_the_callers_struct),
        cmocka_unit_test(a_newer_output_is_filled_as_far_as_it_is_known),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
