/* Dialogues on a small model of random weights: bytes, positions and the gate's way, whatever it
 * answers. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dialogue.h"
#include "support/random_vlm.h"
#include "talk.h"

enum {
    GRID = 16,
    CELLS = GRID * GRID,
    HALF = CELLS / 2,
    ROW_BYTES = N_LAYERS * N_KV * HEAD * 2 * 2,
    CODE_BYTES = ROW_BYTES / 2
};

static struct exam_item *draw(struct reader *reader, size_t i)
{
    struct exam_item *item = malloc(sizeof(*item));
    struct exam exam;

    assert_non_null(item);
    exam_default(EXAM_TUNE, GRID, &exam);
    exam_item(&exam, i, item);
    reader_encode(reader, item->picture.rgb, GRID);
    return item;
}

static void open_reader(void **state, struct reader *reader)
{
    struct failure failure;

    if (!reader_open(*state, NULL, reader, &failure))
        fail_msg("%s", failure.text);
}

static void f16_policy(kvc_policy *out)
{
    kvc_policy_default(out);
    out->set_precision = true;
    out->precision.k = out->precision.v = KVC_F16;
}

static struct row_table run(const struct vlm *vlm, unsigned experiments, size_t n, size_t threads)
{
    struct dialogue_options options;
    struct row_table table = {0};
    struct failure failure;

    dialogue_options_default(&options);
    options.experiments = experiments;
    options.set = EXAM_TUNE;
    options.grid = GRID;
    options.n_dialogues = n;
    options.n_threads = threads;
    options.quiet = true;
    if (!dialogue_run(vlm, &options, &table, &failure))
        fail_msg("%s", failure.text);
    return table;
}

/* The bytes in use are the lines of kvc_cache_stats(), the pages among them those that can be read,
 * and none is lost between images. */
static void every_byte_is_counted(void **state)
{
    struct talk_params params;
    struct reader reader;
    struct talk talk;
    struct failure failure;
    kvc_policy policy;
    bool right;

    open_reader(state, &reader);
    talk_params_default(&params);
    params.hold = true;
    assert_true(talk_open(&reader, &params, &talk, &failure));
    f16_policy(&policy);
    for (size_t i = 0; i < 4; i++) {
        struct exam_item *item = draw(&reader, i);
        const size_t before = talk_used_bytes(&talk);
        assert_true(talk_see(&talk, GRID, &failure));
        assert_true(talk_used_bytes(&talk) >= before + (size_t)(CELLS - 64) * ROW_BYTES);
        assert_true(talk_compress_for(&talk, &item->first, &policy, NULL, &failure));
        assert_true(talk_ask(&talk, &item->first, &right, &failure));
        kvc_stats s = {.struct_size = sizeof(s)};
        assert_int_equal(kvc_cache_stats(talk.cache, &s), KVC_OK);
        assert_int_equal(talk_used_bytes(&talk), s.used_bytes);
        assert_int_equal(s.used_bytes, s.f16_page_bytes + s.sealed_page_bytes + s.strip_bytes +
                                           s.entry_bytes + s.token_bytes);
        assert_int_equal(talk_page_bytes(&talk), s.f16_page_bytes + s.sealed_page_bytes);
        const int64_t n = kvc_seq_n_tokens(talk.cache, talk.seq);
        assert_true(s.used_bytes >= (size_t)(n - N_PREFIX) * ROW_BYTES);
        assert_true(talk.peak_bytes >= s.used_bytes);
        free(item);
    }
    talk_close(&talk);
    reader_close(&reader);
}

static void end_is_no_more_than_peak(void **state)
{
    struct row_table table = run(*state, 1u << DIALOGUE_POOL, 2, 1);
    const struct row *f16 = rows_find(&table, "dialogue", "f16", 1.0);

    assert_int_equal(table.n, 16); /* eight settings, two questions */
    assert_non_null(f16);
    assert_true(f16->pool_bytes_per_token >= ROW_BYTES);
    for (size_t r = 0; r < table.n; r++) {
        const struct row *row = &table.rows[r];
        assert_int_equal(row->n, 8);
        assert_true(row->peak_cache_bytes >= 4.0 * CELLS * row->pool_bytes_per_token);
        assert_true(row->pool_bytes_per_token <= f16->pool_bytes_per_token);
        assert_true(row->attention_us > 0.0 && row->step_ms * 1e3 > row->attention_us);
    }
    rows_free(&table);
}

/* Half of the patches gone: text goes on behind the grid, or, wrong, behind the rows left. */
static void text_goes_on_behind_the_grid(void **state)
{
    struct failure failure;
    struct reader reader;

    open_reader(state, &reader);
    struct exam_item *item = draw(&reader, 0);
    for (int wrong = 0; wrong < 2; wrong++) {
        struct talk_params params;
        struct talk talk;
        kvc_policy policy;
        kvc_token facts[MAX_QUESTION];
        double left;
        f16_policy(&policy);
        policy.visual_rate = 0.5f;
        talk_params_default(&params);
        params.hold = true;
        assert_true(talk_open(&reader, &params, &talk, &failure));
        assert_true(talk_see(&talk, GRID, &failure));
        talk.counts_rows = wrong == 1;
        assert_true(talk_compress_for(&talk, &item->first, &policy, NULL, &failure));
        assert_true(talk_count_rows(&talk, N_PREFIX, N_PREFIX + CELLS, &left, &failure));
        assert_true(fabs(left - HALF) < 1e-9);
        const int64_t first = kvc_seq_n_tokens(talk.cache, talk.seq);
        assert_int_equal(first, N_PREFIX + CELLS);
        assert_true(talk_read(&talk, item->first.words, (size_t)item->first.n_words, &failure));
        assert_int_equal(
            kvc_seq_read_tokens(talk.cache, talk.seq, first, (size_t)item->first.n_words, facts),
            KVC_OK);
        for (int w = 0; w < item->first.n_words; w++) {
            assert_int_equal(facts[w].t, w + N_PREFIX + (wrong ? HALF : GRID));
            assert_int_equal(facts[w].y, facts[w].t);
            assert_int_equal(facts[w].x, facts[w].t);
        }
        talk_close(&talk);
    }
    free(item);
    reader_close(&reader);
}

/* More bytes at a compression, no less pressure; and the gate lets more images in. */
static void pressure_follows_the_bytes(void **state)
{
    struct row_table table = run(*state, 1u << DIALOGUE_GATE, 1, 1);
    int n_gate = 0, n_f16 = 0;

    for (int i = 1; i <= GATE_IMAGES; i++) {
        const struct row *now = rows_find(&table, "gate", "gate", i);
        n_gate += now != NULL;
        n_f16 += rows_find(&table, "gate", "f16", i) != NULL;
        if (i == 1 || !now)
            continue;
        const struct row *before = rows_find(&table, "gate", "gate", i - 1);
        const struct row *p = rows_find(&table, "gate", "pressure", i);
        const struct row *q = rows_find(&table, "gate", "pressure", i - 1);
        assert_non_null(before);
        assert_non_null(p);
        assert_non_null(q);
        assert_true(p->accuracy <= 1.0);
        /* the pressure at an image is that of what was left of those before it, and the image */
        if (i > 2 &&
            before->peak_cache_bytes > rows_find(&table, "gate", "gate", i - 2)->peak_cache_bytes)
            assert_true(p->accuracy >= q->accuracy);
    }
    assert_true(n_f16 >= 2 && n_f16 < GATE_IMAGES);
    assert_true(n_gate >= n_f16);
    rows_free(&table);
}

/* Of a question and of a setting nothing but the time may differ. */
static void threads_do_not_matter(void **state)
{
    const unsigned all = (1u << N_DIALOGUES) - 1u;
    struct row_table tables[] = {run(*state, all, 2, 1), run(*state, all, 2, 2)};

    assert_int_equal(tables[0].n, tables[1].n);
    for (size_t r = 0; r < tables[0].n; r++) {
        struct row a = tables[0].rows[r], b = tables[1].rows[r];
        assert_int_equal(a.n, b.n);
        if (a.hits)
            assert_memory_equal(a.hits, b.hits, a.n);
        a.hits = b.hits = NULL;
        a.attention_us = b.attention_us = a.step_ms = b.step_ms = 0.0;
        assert_memory_equal(&a, &b, sizeof(a));
    }
    rows_free(&tables[0]);
    rows_free(&tables[1]);
}

static struct row find(const struct row_table *table, const char *name, double x)
{
    const struct row *row = rows_find(table, "pitfalls", name, x);

    if (!row)
        fail_msg("no row %s", name);
    return row ? *row : (struct row){0};
}

/* Coded scales are bytes too, and removed rows do not give theirs back. */
static void pitfalls_show_what_they_cost(void **state)
{
    struct row_table table = run(*state, 1u << DIALOGUE_PITFALLS, 1, 1);
    const struct row whole = find(&table, "whole", 0.0);
    const struct row full = find(&table, "pages right", 3.0);
    const struct row holes = find(&table, "pages wrong", 3.0);
    const struct row codes = find(&table, "scales int8 wrong", 2.0);
    const struct row scales = find(&table, "scales int8 right", 2.0);

    assert_true(fabs(whole.rows - CELLS) < 1e-9 && whole.kl <= 0.0);
    assert_true(fabs(full.rows - holes.rows) < 1e-9);
    assert_memory_equal(full.hits, holes.hits, full.n);
    /* nearly twice: hardly a page loses all its rows */
    assert_true(holes.page_bytes_per_token > 1.5 * full.page_bytes_per_token);
    assert_true(fabs(codes.cache_bytes_per_token - CODE_BYTES) < 1e-9);
    assert_true(fabs(scales.cache_bytes_per_token - CODE_BYTES - 4.0 * N_LAYERS * N_KV) < 1e-9);
    assert_true(scales.pool_bytes_per_token > scales.cache_bytes_per_token);
    rows_free(&table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_byte_is_counted),
        cmocka_unit_test(end_is_no_more_than_peak),
        cmocka_unit_test(text_goes_on_behind_the_grid),
        cmocka_unit_test(pressure_follows_the_bytes),
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(pitfalls_show_what_they_cost),
    };

    return cmocka_run_group_tests(tests, open_model, close_model);
}
