/* Public API of cache.h: what forks share must not show in either of them. */
#include "support/cache_model.h"
#include "support/tables.h"

static struct cache_model m;

static const kvc_precision precisions[] = {
    {KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT8, KVC_SCALE_HEAD, KVC_SCALE_HEAD},
    {KVC_INT8, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_HEAD},
    {KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_INT8, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
    {KVC_INT6, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
};

static void start(kvc_ctx *ctx, kvc_precision precision)
{
    kvc_cache_params p = drive_params();

    p.recent_tokens = 0;
    p.sink_tokens = 0;
    p.precision = precision;
    drive_start(&m, ctx, p, 1 << 20);
}

/* A sequence of one full page that is not sealed, and its fork. */
static void start_forks(kvc_ctx *ctx, kvc_precision precision, uint64_t *rng, struct model_seq **a,
                        struct model_seq **b)
{
    start(ctx, precision);
    *a = drive_create(&m);
    drive_feed(&m, *a, 64, rng, 1);
    *b = drive_fork(&m, *a);
}

/* One fork seals a shared page and leaves it; the other cuts it, gives it other rows, and seals it.
 */
static void a_page_that_gets_other_rows_is_sealed_anew(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < sizeof(precisions) / sizeof(*precisions); i++)
        for (size_t t = 0; t < tables->n; t++) {
            uint64_t rng = i;
            struct model_seq *a, *b;

            start_forks(tables->ctx[t], precisions[i], &rng, &a, &b);
            drive_settle(&m, a);
            drive_truncate(&m, b, 32);
            drive_feed(&m, b, 32, &rng, 1);
            drive_settle(&m, b);
            check_all(&m);
            assert_int_equal(drive_stats(&m).n_pages_sealed, 2 * 2 * 2);
            model_close(&m);
        }
}

/* The same while the other still shares the page: it is copied, and so is not the twin's. */
static void a_shared_page_is_copied_before_it_gets_other_rows(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < sizeof(precisions) / sizeof(*precisions); i++) {
        uint64_t rng = i;
        struct model_seq *a, *b;

        start_forks(tables->ctx[0], precisions[i], &rng, &a, &b);
        drive_truncate(&m, b, 63);
        drive_feed(&m, b, 1, &rng, 1);
        drive_settle(&m, a);
        drive_settle(&m, b);
        check_all(&m);
        assert_int_equal(drive_stats(&m).n_pages_sealed, 2 * 2 * 2);
        model_close(&m);
    }
}

/* Without other rows the sealed page is shared, however often a fork cuts and restores nothing. */
static void an_unchanged_page_is_sealed_once(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < sizeof(precisions) / sizeof(*precisions); i++) {
        uint64_t rng = i;
        struct model_seq *a, *b;

        start_forks(tables->ctx[0], precisions[i], &rng, &a, &b);
        drive_settle(&m, a);
        drive_truncate(&m, b, 64);
        drive_feed(&m, b, 10, &rng, 1);
        drive_settle(&m, b);
        check_all(&m);
        assert_int_equal(drive_stats(&m).n_pages_sealed, 2 * 2);
        model_close(&m);
    }
}

/* Pages of moved rows carry ordinals: one hole a page is not worth it, many are. */
static void moving_rows_never_takes_more_memory(void **state)
{
    const struct tables *tables = *state;

    for (int n_holes = 1; n_holes < 64; n_holes *= 2) {
        kvc_cache_params p = drive_params();
        uint64_t rng = 5;
        struct model_seq *s;
        kvc_report report;

        p.recent_tokens = p.sink_tokens = 0;
        p.max_tokens = 1024;
        p.precision = precisions[3];
        drive_start(&m, tables->ctx[0], p, 1 << 20);
        s = drive_create(&m);
        for (int i = 0; i < 16; i++)
            drive_feed(&m, s, 64, &rng, 1);
        drive_settle(&m, s);
        for (int i = 0; i < 16; i++)
            drive_remove(&m, s, i * 64, i * 64 + n_holes);
        report = drive_compress(&m, s);
        assert_true(report.bytes_after <= report.bytes_before);
        assert_int_equal(report.bytes_after < report.bytes_before, n_holes >= 16);
        check_all(&m);
        model_close(&m);
    }
}

/* A sequence may be limited below the whole cache; then its tables are smaller. */
static void a_sequence_keeps_to_its_own_limit(void **state)
{
    const struct tables *tables = *state;
    kvc_cache_params p = drive_params();
    size_t limited, unlimited;
    uint64_t rng = 6;
    struct model_seq *s;

    p.max_sequences = 64;
    p.max_tokens = 1 << 16;
    assert_int_equal(kvc_cache_min_budget(&p, &unlimited), KVC_OK);
    p.max_sequence_tokens = 1024;
    assert_int_equal(kvc_cache_min_budget(&p, &limited), KVC_OK);
    assert_true(unlimited - limited > 64 * ((1 << 16) - 1024) / 64 * sizeof(int32_t));
    p.max_sequences = 3;
    p.max_tokens = 2000;
    p.max_sequence_tokens = 100;
    drive_start(&m, tables->ctx[0], p, 1 << 20);
    s = drive_create(&m);
    drive_feed(&m, s, 60, &rng, 1);
    assert_int_equal(kvc_tokens_add(m.cache, s->handle, NULL, 41), KVC_E_FULL);
    check_all(&m);
    drive_feed(&m, s, 40, &rng, 1);
    check_all(&m);
    model_close(&m);
    p.max_sequence_tokens = 0;
    assert_int_equal(kvc_cache_min_budget(&p, &limited), KVC_E_ARG);
}

/* Under the full budget max_tokens tokens fit, however they are spread over sequences. */
static void the_full_budget_holds_all_tokens(void **state)
{
    const struct tables *tables = *state;

    for (size_t i = 0; i < sizeof(precisions) / sizeof(*precisions); i++)
        for (int n_seqs = 1; n_seqs <= 3; n_seqs++) {
            kvc_cache_params p = drive_params();
            struct model_seq *seqs[3];
            uint64_t rng = 7;

            p.recent_tokens = 70;
            p.max_tokens = 1500;
            p.max_sequences = n_seqs;
            p.precision = precisions[i];
            assert_int_equal(kvc_cache_full_budget(&p, &p.budget_bytes), KVC_OK);
            model_open(&m, tables->ctx[0], &p);
            for (int s = 0; s < n_seqs; s++)
                seqs[s] = drive_create(&m);
            for (int n = 0; n < 1500 / n_seqs; n += 50)
                for (int s = 0; s < n_seqs; s++)
                    drive_feed(&m, seqs[s], 1500 / n_seqs - n < 50 ? 1500 / n_seqs - n : 50, &rng,
                               1);
            for (int s = 0; s < n_seqs; s++)
                drive_settle(&m, seqs[s]);
            check_all(&m);
            model_close(&m);
        }
}

/* The F16 pages that are kept ready are no more than all tokens can fill. */
static void the_reserve_does_not_exceed_all_tokens(void **state)
{
    kvc_cache_params p = drive_params();
    const size_t page = (size_t)KVC_PAGE_TOKENS * (16 + 8) * 2;
    size_t few, many;

    (void)state;
    p.max_tokens = 4096;
    p.max_append = 512;
    p.recent_tokens = 512;
    p.max_sequences = 1;
    assert_int_equal(kvc_cache_min_budget(&p, &few), KVC_OK);
    p.max_sequences = 101;
    assert_int_equal(kvc_cache_min_budget(&p, &many), KVC_OK);
    assert_true(many - few < 2 * 2 * page * (4096 / 64 + 3 * 101) + 101 * (size_t)30000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_page_that_gets_other_rows_is_sealed_anew),
        cmocka_unit_test(a_shared_page_is_copied_before_it_gets_other_rows),
        cmocka_unit_test(an_unchanged_page_is_sealed_once),
        cmocka_unit_test(moving_rows_never_takes_more_memory),
        cmocka_unit_test(a_sequence_keeps_to_its_own_limit),
        cmocka_unit_test(the_full_budget_holds_all_tokens),
        cmocka_unit_test(the_reserve_does_not_exceed_all_tokens),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
