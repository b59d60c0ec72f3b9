/* Public API of cache.h: parameters, budget, and what happens when it is used up. */
#include <stdlib.h>
#include <string.h>

#include "support/cache_model.h"
#include "support/tables.h"

static struct cache_model m;

static void expect_create(kvc_ctx *ctx, const kvc_cache_params *p, kvc_status want)
{
    kvc_cache_params with_budget = *p;
    kvc_cache *cache = (kvc_cache *)&with_budget;
    size_t bytes = 0;

    assert_int_equal(kvc_cache_min_budget(p, &bytes), want);
    with_budget.budget_bytes = want == KVC_OK ? bytes : (size_t)1 << 24;
    assert_int_equal(kvc_cache_create(ctx, &with_budget, &cache), want);
    assert_true((cache != NULL) == (want == KVC_OK));
    kvc_cache_destroy(cache);
}

static void defaults_are_as_documented(void **state)
{
    kvc_cache_params p;

    (void)state;
    memset(&p, 0xff, sizeof(p));
    kvc_cache_params_default(&p);
    kvc_cache_params_default(NULL);
    assert_int_equal(p.struct_size, sizeof(p));
    assert_int_equal(p.n_layers, 0);
    assert_int_equal(p.n_heads, 0);
    assert_int_equal(p.n_kv_heads, 0);
    assert_int_equal(p.head_dim_k, 0);
    assert_int_equal(p.head_dim_v, 0);
    assert_int_equal(p.budget_bytes, 0);
    assert_int_equal(p.max_sequences, 1);
    assert_int_equal(p.max_tokens, 8192);
    assert_int_equal(p.max_append, 512);
    assert_int_equal(p.max_hold_tokens, 0);
    assert_int_equal(p.probe_rows, 16);
    assert_null(p.on_full);
    assert_int_equal(p.precision.k, KVC_INT8);
    assert_int_equal(p.precision.v, KVC_INT8);
    assert_int_equal(p.precision.k_scale, KVC_SCALE_TOKEN);
    assert_int_equal(p.precision.v_scale, KVC_SCALE_TOKEN);
    assert_int_equal(p.scale_window, 64);
    assert_int_equal(p.recent_tokens, 128);
    assert_int_equal(p.sink_tokens, 4);
    assert_int_equal(p.score_mode, KVC_SCORE_NONE);
    assert_false(p.strict);
}

static void rejects_parameters_out_of_range(void **state)
{
    static const struct {
        size_t offset; /* of an int32_t */
        int32_t value;
        kvc_status want;
    } cases[] = {
        {offsetof(kvc_cache_params, n_layers), 0, KVC_E_ARG},
        {offsetof(kvc_cache_params, n_layers), -1, KVC_E_ARG},
        {offsetof(kvc_cache_params, n_layers), 65537, KVC_E_ARG},
        {offsetof(kvc_cache_params, n_heads), 0, KVC_E_ARG},
        {offsetof(kvc_cache_params, n_heads), 3, KVC_E_ARG},
        {offsetof(kvc_cache_params, n_heads), 65538, KVC_E_ARG},
        {offsetof(kvc_cache_params, n_heads), INT32_MAX - 1, KVC_E_ARG},
        {offsetof(kvc_cache_params, n_kv_heads), 0, KVC_E_ARG},
        {offsetof(kvc_cache_params, n_kv_heads), -2, KVC_E_ARG},
        {offsetof(kvc_cache_params, n_kv_heads), 8, KVC_E_ARG},
        {offsetof(kvc_cache_params, head_dim_k), 0, KVC_E_ARG},
        {offsetof(kvc_cache_params, head_dim_k), KVC_MAX_HEAD_DIM, KVC_OK},
        {offsetof(kvc_cache_params, head_dim_k), KVC_MAX_HEAD_DIM + 1, KVC_E_UNSUPPORTED},
        {offsetof(kvc_cache_params, head_dim_v), -1, KVC_E_ARG},
        {offsetof(kvc_cache_params, head_dim_v), KVC_MAX_HEAD_DIM, KVC_OK},
        {offsetof(kvc_cache_params, head_dim_v), KVC_MAX_HEAD_DIM + 1, KVC_E_UNSUPPORTED},
        {offsetof(kvc_cache_params, max_sequences), 0, KVC_E_ARG},
        {offsetof(kvc_cache_params, max_sequences), 65537, KVC_E_ARG},
        {offsetof(kvc_cache_params, max_tokens), -1, KVC_E_ARG},
        {offsetof(kvc_cache_params, max_append), 0, KVC_E_ARG},
        {offsetof(kvc_cache_params, max_append), 1, KVC_OK},
        {offsetof(kvc_cache_params, max_hold_tokens), -1, KVC_E_ARG},
        {offsetof(kvc_cache_params, probe_rows), -1, KVC_E_ARG},
        {offsetof(kvc_cache_params, probe_rows), 1024, KVC_OK},
        {offsetof(kvc_cache_params, probe_rows), 1025, KVC_E_ARG},
        {offsetof(kvc_cache_params, scale_window), -64, KVC_E_ARG},
        {offsetof(kvc_cache_params, scale_window), 32, KVC_E_ARG},
        {offsetof(kvc_cache_params, scale_window), 96, KVC_E_ARG},
        {offsetof(kvc_cache_params, scale_window), 1024, KVC_OK},
        {offsetof(kvc_cache_params, recent_tokens), -1, KVC_E_ARG},
        {offsetof(kvc_cache_params, recent_tokens), 0, KVC_OK},
        {offsetof(kvc_cache_params, sink_tokens), -1, KVC_E_ARG},
        {offsetof(kvc_cache_params, sink_tokens), 64, KVC_OK},
        {offsetof(kvc_cache_params, sink_tokens), 65, KVC_E_ARG},
        {offsetof(kvc_cache_params, score_mode), 3, KVC_E_ARG},
        {offsetof(kvc_cache_params, precision.k), 4, KVC_E_ARG},
        {offsetof(kvc_cache_params, precision.k), KVC_INT6, KVC_OK},
        {offsetof(kvc_cache_params, precision.v), KVC_INT6, KVC_E_UNSUPPORTED},
        {offsetof(kvc_cache_params, precision.v), 7, KVC_E_ARG},
        {offsetof(kvc_cache_params, precision.k_scale), 4, KVC_E_ARG},
        {offsetof(kvc_cache_params, precision.k_scale), KVC_SCALE_CHANNEL, KVC_OK},
        {offsetof(kvc_cache_params, precision.k_scale), KVC_SCALE_LAYER, KVC_E_UNSUPPORTED},
        {offsetof(kvc_cache_params, precision.v_scale), KVC_SCALE_LAYER, KVC_E_UNSUPPORTED},
        {offsetof(kvc_cache_params, precision.v_scale), KVC_SCALE_CHANNEL, KVC_E_UNSUPPORTED},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        kvc_cache_params p = drive_params();

        memcpy((char *)&p + cases[i].offset, &cases[i].value, sizeof(int32_t));
        expect_create(best(state), &p, cases[i].want);
    }
}

static void rejects_null_and_short_structures(void **state)
{
    kvc_ctx *ctx = best(state);
    kvc_cache_params p = drive_params();
    kvc_cache *cache = (kvc_cache *)&p;
    kvc_stats stats = {.struct_size = sizeof(size_t)};
    size_t bytes;

    assert_int_equal(kvc_cache_min_budget(NULL, &bytes), KVC_E_ARG);
    assert_int_equal(kvc_cache_min_budget(&p, NULL), KVC_E_ARG);
    assert_int_equal(kvc_cache_min_budget(&p, &p.budget_bytes), KVC_OK);
    assert_int_equal(kvc_cache_create(NULL, &p, &cache), KVC_E_ARG);
    assert_null(cache);
    assert_int_equal(kvc_cache_create(ctx, NULL, &cache), KVC_E_ARG);
    assert_int_equal(kvc_cache_create(ctx, &p, NULL), KVC_E_ARG);
    p.struct_size = sizeof(size_t);
    expect_create(ctx, &p, KVC_E_ARG);

    drive_start(&m, ctx, drive_params(), 0);
    assert_int_equal(kvc_cache_stats(m.cache, NULL), KVC_E_ARG);
    assert_int_equal(kvc_cache_stats(NULL, &stats), KVC_E_ARG);
    assert_int_equal(kvc_cache_stats(m.cache, &stats), KVC_E_ARG);
    model_close(&m);
    kvc_cache_destroy(NULL);
}

static void ignores_the_scale_of_f16(void **state)
{
    kvc_cache_params p = drive_params();

    p.precision = (kvc_precision){KVC_F16, KVC_F16, KVC_SCALE_LAYER, KVC_SCALE_CHANNEL};
    expect_create(best(state), &p, KVC_OK);
}

static void sets_precision_only_without_sequences(void **state)
{
    const kvc_precision f16 = {.k = KVC_F16, .v = KVC_F16};
    const kvc_precision layer = {KVC_INT8, KVC_INT8, KVC_SCALE_LAYER, KVC_SCALE_TOKEN};
    const kvc_precision channel = {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_CHANNEL};

    drive_start(&m, best(state), drive_params(), 0);
    assert_int_equal(kvc_cache_set_precision(m.cache, -1, 1, &f16), KVC_OK);
    assert_int_equal(kvc_cache_set_precision(m.cache, 1, -1, &f16), KVC_OK);
    assert_int_equal(kvc_cache_set_precision(m.cache, 2, 0, &f16), KVC_E_ARG);
    assert_int_equal(kvc_cache_set_precision(m.cache, -2, 0, &f16), KVC_E_ARG);
    assert_int_equal(kvc_cache_set_precision(m.cache, 0, 2, &f16), KVC_E_ARG);
    assert_int_equal(kvc_cache_set_precision(m.cache, 0, 0, NULL), KVC_E_ARG);
    assert_int_equal(kvc_cache_set_precision(NULL, 0, 0, &f16), KVC_E_ARG);
    assert_int_equal(kvc_cache_set_precision(m.cache, 0, 0, &layer), KVC_E_UNSUPPORTED);
    assert_int_equal(kvc_cache_set_precision(m.cache, 0, 0, &channel), KVC_E_UNSUPPORTED);
    drive_create(&m);
    assert_int_equal(kvc_cache_set_precision(m.cache, 0, 0, &f16), KVC_E_ARG);
    model_close(&m);
}

/* Known fault B3: a budget is checked against the true number of bytes. */
static void refuses_a_budget_below_the_minimum(void **state)
{
    kvc_cache_params p = drive_params();
    const size_t page = KVC_PAGE_TOKENS * (16 + 8) * 2;
    const size_t n_pages = (128 + 200 + 63 + 63) / 64 + 1; /* of a sequence, layer and head */
    kvc_cache *cache = NULL;
    size_t min, larger;

    assert_int_equal(kvc_cache_min_budget(&p, &min), KVC_OK);
    assert_true(min >= 3 * 2 * 2 * n_pages * page);
    p.budget_bytes = min;
    assert_int_equal(kvc_cache_create(best(state), &p, &cache), KVC_OK);
    kvc_cache_destroy(cache);
    for (size_t budget = min - 1; budget > 0; budget /= 2) {
        p.budget_bytes = budget;
        assert_int_equal(kvc_cache_create(best(state), &p, &cache), KVC_E_ARG);
        assert_null(cache);
    }
    p.budget_bytes = 0;
    assert_int_equal(kvc_cache_create(best(state), &p, &cache), KVC_E_ARG);
    p.max_tokens = 1 << 20;
    assert_int_equal(kvc_cache_min_budget(&p, &min), KVC_OK);
    p.max_hold_tokens = 100; /* fits what an append may need anyway */
    assert_int_equal(kvc_cache_min_budget(&p, &larger), KVC_OK);
    assert_int_equal(larger, min);
    p.max_hold_tokens = 1000;
    assert_int_equal(kvc_cache_min_budget(&p, &larger), KVC_OK);
    assert_true(larger >= min + 3 * 2 * 2 * ((1000 + 63 + 63) / 64 + 1 - n_pages) * page);
}

static void refuses_a_minimum_beyond_size_t(void **state)
{
    kvc_cache_params p = drive_params();

    p.n_layers = p.n_heads = p.n_kv_heads = p.max_sequences = 65536;
    p.head_dim_k = p.head_dim_v = KVC_MAX_HEAD_DIM;
    p.max_tokens = p.max_append = p.max_hold_tokens = p.recent_tokens = INT32_MAX;
    expect_create(best(state), &p, KVC_E_ARG);
}

/* Payload of a page, and that it is stored in whole units of 128 bytes. */
static void expect_page_bytes(const kvc_cache *cache, kvc_seq seq, int head, int64_t index,
                              size_t payload)
{
    kvc_page_info info = {.struct_size = sizeof(info)};

    assert_int_equal(kvc_seq_read_page(cache, seq, 0, head, index, &info, NULL, NULL, 0), KVC_OK);
    assert_true(info.sealed);
    assert_int_equal(info.n_rows, KVC_PAGE_TOKENS);
    assert_int_equal(info.n_bytes, (payload + 127) / 128 * 128);
}

/* Known fault B3: 4096 tokens of 8 heads x 128 take what the layout says. */
static void pages_take_the_bytes_of_their_layout(void **state)
{
    static const struct {
        kvc_precision precision;
        size_t payload; /* of a page of 64 tokens, K and V of size 128 */
    } cases[] = {
        {{KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN}, 2 * 64 * 256},
        {{KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN}, 2 * (64 * 128 + 64 * 2)},
        {{KVC_INT8, KVC_INT8, KVC_SCALE_HEAD, KVC_SCALE_HEAD}, 2 * (64 * 128 + 4)},
        {{KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN}, 2 * (64 * 64 + 64 * 4)},
        {{KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN}, 64 * (96 + 4) + 64 * (64 + 4)},
        {{KVC_INT8, KVC_INT4, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
         64 * 128 + 128 * 4 + 64 * 64 + 64 * 4},
        {{KVC_F16, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN}, 64 * 256 + 64 * 128 + 64 * 2},
    };
    const size_t elements = (size_t)512 * 8 * 128;
    float *x = malloc(elements * sizeof(*x));
    const kvc_view view = kvc_view_packed(x, KVC_DTYPE_F32, 512, 8, 128);
    uint64_t rng = 1;

    fill_view(&view, &rng, 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        kvc_cache_params p = drive_params();
        kvc_stats stats = {.struct_size = sizeof(stats)};
        kvc_cache *cache;
        kvc_seq seq;

        p.n_layers = 1;
        p.n_heads = p.n_kv_heads = 8;
        p.head_dim_k = p.head_dim_v = 128;
        p.max_sequences = 1;
        p.max_tokens = 4096;
        p.max_append = 512;
        p.recent_tokens = p.sink_tokens = 0;
        p.precision = cases[i].precision;
        assert_int_equal(kvc_cache_min_budget(&p, &p.budget_bytes), KVC_OK);
        p.budget_bytes += (size_t)24 << 20;
        assert_int_equal(kvc_cache_create(best(state), &p, &cache), KVC_OK);
        assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
        for (int n = 0; n < 4096; n += 512) {
            assert_int_equal(kvc_tokens_add(cache, seq, NULL, 512), KVC_OK);
            assert_int_equal(kvc_append(cache, seq, 0, &view, &view), KVC_OK);
        }
        assert_int_equal(kvc_seq_settle(cache, seq), KVC_OK);
        assert_int_equal(kvc_cache_stats(cache, &stats), KVC_OK);
        assert_int_equal(stats.n_pages_sealed, 64 * 8);
        assert_int_equal(stats.n_pages_f16, 0);
        assert_int_equal(stats.f16_page_bytes, 0);
        assert_int_equal(stats.sealed_page_bytes, 64 * 8 * ((cases[i].payload + 127) / 128 * 128));
        expect_page_bytes(cache, seq, 7, 63, cases[i].payload);
        kvc_cache_destroy(cache);
    }
    free(x);
}

/* Feeds 32 tokens a time until the cache is full; nothing but an error may come of that. */
static void feed_until_full(struct model_seq *s, uint64_t *rng)
{
    for (int i = 0; i < 32; i++) {
        const kvc_stats before = drive_stats(&m);
        const kvc_status status = kvc_tokens_add(m.cache, s->handle, NULL, 32);

        if (status == KVC_E_FULL) {
            const kvc_stats after = drive_stats(&m);

            assert_memory_equal(&after, &before, sizeof(after));
            check_all(&m);
            return;
        }
        assert_int_equal(status, KVC_OK);
        model_tokens_add(&m, s, NULL, 32);
        drive_rows(&m, s, rng, 1);
    }
    fail_msg("the cache never became full");
}

static void full_changes_nothing_and_goes_on_after_a_release(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_cache_params p = drive_params();
        uint64_t rng = i;
        struct model_seq *s, *other;
        int64_t n;

        p.head_dim_k = p.head_dim_v = 64;
        p.recent_tokens = 0;
        p.max_append = 64;
        p.precision = (kvc_precision){KVC_F16, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_HEAD};
        drive_start(&m, tables->ctx[i], p, 200000);
        other = drive_create(&m);
        drive_feed(&m, other, 64, &rng, 1);
        drive_feed(&m, other, 64, &rng, 1);
        drive_settle(&m, other);
        s = drive_create(&m);
        feed_until_full(s, &rng);
        n = s->n_tokens;
        drive_attend(&m, s, 1, 3, NULL, &rng);
        drive_truncate(&m, s, n - 200);
        drive_feed(&m, s, 32, &rng, 1);
        feed_until_full(s, &rng);
        drive_destroy(&m, other);
        check_all(&m);
        drive_feed(&m, s, 32, &rng, 1);
        check_all(&m);
        model_close(&m);
    }
}

static void a_full_token_table_is_reported(void **state)
{
    kvc_cache_params p = drive_params();
    uint64_t rng = 1;
    struct model_seq *a, *b;
    kvc_seq fork = 1;

    p.max_tokens = 300;
    drive_start(&m, best(state), p, 1 << 20);
    a = drive_create(&m);
    b = drive_create(&m);
    drive_feed(&m, a, 200, &rng, 1);
    assert_int_equal(kvc_tokens_add(m.cache, b->handle, NULL, 101), KVC_E_FULL);
    assert_int_equal(kvc_seq_fork(m.cache, a->handle, &fork), KVC_E_FULL);
    assert_int_equal(fork, 0);
    drive_feed(&m, b, 100, &rng, 1);
    assert_int_equal(kvc_tokens_add(m.cache, a->handle, NULL, 1), KVC_E_FULL);
    drive_truncate(&m, a, 199);
    drive_feed(&m, b, 1, &rng, 1);
    check_all(&m);
    model_close(&m);
}

/* The F16 pages that the minimum counts are there for every sequence, whatever the others do. */
static void the_minimum_serves_every_sequence(void **state)
{
    kvc_cache_params p = drive_params();
    uint64_t rng = 7;
    struct model_seq *s[4];

    p.max_sequences = 4;
    p.recent_tokens = 100;
    p.max_append = 90;
    p.max_hold_tokens = 130;
    drive_start(&m, best(state), p, 0);
    for (int i = 0; i < 4; i++) {
        s[i] = drive_create(&m);
        drive_feed(&m, s[i], 90, &rng, 1);
    }
    for (int i = 0; i < 4; i++) {
        drive_feed(&m, s[i], 77, &rng, 1);
        assert_int_equal(kvc_seq_hold(m.cache, s[i]->handle), KVC_OK);
        model_hold(s[i]);
        drive_attend(&m, s[i], 0, 2, NULL, &rng);
    }
    for (int i = 3; i >= 0; i--) {
        drive_feed(&m, s[i], 1, &rng, 1);
        check_all(&m);
    }
    model_close(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_as_documented),
        cmocka_unit_test(rejects_parameters_out_of_range),
        cmocka_unit_test(rejects_null_and_short_structures),
        cmocka_unit_test(ignores_the_scale_of_f16),
        cmocka_unit_test(sets_precision_only_without_sequences),
        cmocka_unit_test(refuses_a_budget_below_the_minimum),
        cmocka_unit_test(refuses_a_minimum_beyond_size_t),
        cmocka_unit_test(pages_take_the_bytes_of_their_layout),
        cmocka_unit_test(full_changes_nothing_and_goes_on_after_a_release),
        cmocka_unit_test(a_full_token_table_is_reported),
        cmocka_unit_test(the_minimum_serves_every_sequence),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
