/* Public API of cache.h: sequences, tokens, positions, rows, and what is refused. */
#include <math.h>
#include <string.h>

#include "support/cache_model.h"
#include "support/tables.h"

static struct cache_model m;

static void sequences_are_limited_and_never_given_out_twice(void **state)
{
    kvc_seq seen[64], seq = 1;
    float x[64] = {0};
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 1, 2, 16);
    const kvc_view q = kvc_view_packed(x, KVC_DTYPE_F32, 1, 4, 16);
    kvc_page_info info = {.struct_size = sizeof(info)};
    int64_t ordinal;
    size_t n;

    drive_start(&m, best(state), drive_params(), 0);
    assert_int_equal(kvc_seq_create(NULL, &seq), KVC_E_ARG);
    assert_int_equal(kvc_seq_create(m.cache, NULL), KVC_E_ARG);
    for (int i = 0; i < 64; i++) {
        assert_int_equal(kvc_seq_create(m.cache, &seen[i]), KVC_OK);
        assert_int_not_equal(seen[i], 0);
        for (int j = 0; j < i; j++)
            assert_int_not_equal(seen[i], seen[j]);
        assert_int_equal(kvc_seq_destroy(m.cache, seen[i]), KVC_OK);
        assert_int_equal(kvc_seq_destroy(m.cache, seen[i]), KVC_E_ARG);
    }
    for (int i = 0; i < 3; i++)
        drive_create(&m);
    assert_int_equal(kvc_seq_create(m.cache, &seq), KVC_E_FULL);
    assert_int_equal(seq, 0);
    assert_int_equal(kvc_seq_n_tokens(m.cache, seen[0]), -1);
    assert_int_equal(kvc_append(m.cache, seen[0], 0, &k, &k), KVC_E_ARG);
    assert_int_equal(kvc_attend(m.cache, seen[0], 0, &q, NULL, &q, NULL), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_page(m.cache, seen[0], 0, 0, 0, &info, NULL, NULL, 0), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_probes(m.cache, seen[0], 0, &ordinal, NULL, &n), KVC_E_ARG);
    check_all(&m);
    model_close(&m);
}

/* Known fault H5: token count, row count and next position are three numbers. */
static void positions_follow_the_tokens_not_the_rows(void **state)
{
    kvc_token image[6];
    uint64_t rng = 1;
    struct model_seq *s;

    drive_start(&m, best(state), drive_params(), 1 << 20);
    s = drive_create(&m);
    assert_int_equal(kvc_seq_next_position(m.cache, s->handle), 0);
    drive_feed(&m, s, 5, &rng, 1);
    assert_int_equal(kvc_seq_next_position(m.cache, s->handle), 5);
    memset(image, 0, sizeof(image));
    for (int i = 0; i < 6; i++)
        image[i] = (kvc_token){.t = 5,
                               .y = 5 + i / 3,
                               .x = 5 + i % 3,
                               .image = 0,
                               .row = i / 3,
                               .col = i % 3,
                               .kind = KVC_TOKEN_VISUAL,
                               .flags = (uint8_t)i};
    drive_add(&m, s, image, 6);
    assert_int_equal(kvc_seq_next_position(m.cache, s->handle), 8);
    assert_int_equal(kvc_seq_n_rows(m.cache, s->handle, 0, 0), 5);
    drive_truncate(&m, s, 5);
    assert_int_equal(kvc_seq_next_position(m.cache, s->handle), 5);
    drive_add(&m, s, image, 6);
    for (int layer = 1; layer >= 0; layer--) {
        float x[6 * 2 * 16] = {0};
        const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 6, 2, 16);
        const kvc_view v = kvc_view_packed(x, KVC_DTYPE_F32, 6, 2, 8);

        drive_append(&m, s, layer, &k, &v);
    }
    drive_remove(&m, s, 7, 8);
    drive_remove(&m, s, 10, 11);
    assert_int_equal(kvc_seq_next_position(m.cache, s->handle), 8);
    drive_feed(&m, s, 1, &rng, 1);
    assert_int_equal(s->tokens[11].t, 8);
    assert_int_equal(kvc_seq_n_tokens(m.cache, s->handle), 12);
    assert_int_equal(kvc_seq_n_rows(m.cache, s->handle, 1, 1), 10);
    check_all(&m);
    drive_truncate(&m, s, 9);
    assert_int_equal(kvc_seq_next_position(m.cache, s->handle), 8);
    drive_truncate(&m, s, 0);
    assert_int_equal(kvc_seq_next_position(m.cache, s->handle), 0);
    check_all(&m);
    model_close(&m);
}

static void refuses_wrong_tokens(void **state)
{
    const kvc_token good = {.image = -1, .row = -1, .col = -1, .t = INT32_MAX - 1};
    kvc_token bad[8];
    struct model_seq *s;

    drive_start(&m, best(state), drive_params(), 0);
    s = drive_create(&m);
    for (int i = 0; i < 8; i++)
        bad[i] = good;
    bad[0].t = -1;
    bad[1].y = -5;
    bad[2].x = INT32_MIN;
    bad[3].t = INT32_MAX;
    bad[4].x = INT32_MAX;
    bad[5].kind = 3;
    bad[6].reserved[0] = 1;
    bad[7].reserved[5] = 255;
    for (int i = 0; i < 8; i++) {
        const kvc_token pair[2] = {good, bad[i]};

        assert_int_equal(kvc_tokens_add(m.cache, s->handle, pair, 2), KVC_E_ARG);
        check_all(&m);
    }
    assert_int_equal(kvc_tokens_add(m.cache, s->handle, NULL, 201), KVC_E_ARG);
    assert_int_equal(kvc_tokens_add(m.cache, s->handle, NULL, SIZE_MAX), KVC_E_ARG);
    assert_int_equal(kvc_tokens_add(NULL, s->handle, NULL, 1), KVC_E_ARG);
    drive_add(&m, s, &good, 1);
    assert_int_equal(kvc_seq_next_position(m.cache, s->handle), INT32_MAX);
    model_close(&m);
}

/* No text position is left after the largest one. */
static void refuses_text_beyond_the_last_position(void **state)
{
    const kvc_token last = {.t = INT32_MAX - 2, .image = -1, .row = -1, .col = -1};
    float x[2 * 16] = {0};
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 1, 2, 16);
    const kvc_view v = kvc_view_packed(x, KVC_DTYPE_F32, 1, 2, 8);
    struct model_seq *s;

    drive_start(&m, best(state), drive_params(), 0);
    s = drive_create(&m);
    drive_add(&m, s, &last, 1);
    drive_append(&m, s, 0, &k, &v);
    drive_append(&m, s, 1, &k, &v);
    assert_int_equal(kvc_tokens_add(m.cache, s->handle, NULL, 2), KVC_E_ARG);
    drive_add(&m, s, NULL, 1);
    check_all(&m);
    model_close(&m);
}

/* Everything that needs all rows is refused while one layer lacks one. */
static void missing_rows_are_refused(void **state)
{
    float x[10 * 4 * 16] = {0};
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 9, 2, 16);
    const kvc_view v = kvc_view_packed(x, KVC_DTYPE_F32, 9, 2, 8);
    const kvc_view one_k = kvc_view_packed(x, KVC_DTYPE_F32, 1, 2, 16);
    const kvc_view one_v = kvc_view_packed(x, KVC_DTYPE_F32, 1, 2, 8);
    const kvc_view q = kvc_view_packed(x, KVC_DTYPE_F32, 1, 4, 16);
    float y[4 * 8];
    const kvc_view out = kvc_view_packed(y, KVC_DTYPE_F32, 1, 4, 8);
    kvc_seq fork = 1;
    struct model_seq *s;

    drive_start(&m, best(state), drive_params(), 1 << 20);
    s = drive_create(&m);
    drive_add(&m, s, NULL, 10);
    drive_append(&m, s, 1, &k, &v);
    drive_append(&m, s, 1, &one_k, &one_v);
    drive_append(&m, s, 0, &k, &v);
    check_all(&m);
    assert_int_equal(kvc_append(m.cache, s->handle, 1, &one_k, &one_v), KVC_E_ARG);
    assert_int_equal(kvc_append(m.cache, s->handle, 0, &k, &v), KVC_E_ARG);
    assert_int_equal(kvc_tokens_add(m.cache, s->handle, NULL, 0), KVC_E_ARG);
    assert_int_equal(kvc_seq_fork(m.cache, s->handle, &fork), KVC_E_ARG);
    assert_int_equal(fork, 0);
    assert_int_equal(kvc_seq_remove(m.cache, s->handle, 0, 0), KVC_E_ARG);
    assert_int_equal(kvc_seq_settle(m.cache, s->handle), KVC_E_ARG);
    assert_int_equal(kvc_cache_compress(m.cache, s->handle, NULL, NULL, NULL), KVC_E_ARG);
    assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, NULL, &out, NULL), KVC_E_ARG);
    assert_int_equal(kvc_attend(m.cache, s->handle, 1, &q, NULL, &out, NULL), KVC_OK);
    drive_truncate(&m, s, 9);
    assert_int_equal(kvc_attend(m.cache, s->handle, 0, &q, NULL, &out, NULL), KVC_OK);
    drive_remove(&m, s, 8, 9);
    assert_int_equal(kvc_seq_n_rows(m.cache, s->handle, 0, 0), 8);
    model_close(&m);
}

/* NaN, Inf and halves that overflow change their own element alone. */
static void replaces_what_no_half_holds(void **state)
{
    const struct tables *tables = *state;
    float x[3 * 2 * 16], y[3 * 2 * 8];
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 3, 2, 16);
    const kvc_view v = kvc_view_packed(y, KVC_DTYPE_F32, 3, 2, 8);
    float got[3 * 16];
    size_t n;

    for (size_t i = 0; i < tables->n; i++) {
        uint64_t rng = 4;
        struct model_seq *s;

        fill_view(&k, &rng, 1);
        fill_view(&v, &rng, 1);
        view_set(&k, 0, 0, 3, NAN);
        view_set(&k, 1, 0, 0, INFINITY);
        view_set(&k, 1, 0, 1, -INFINITY);
        view_set(&k, 1, 0, 2, -77.0f);
        view_set(&k, 1, 1, 5, 65519.0f);
        view_set(&k, 2, 0, 6, -1e9f);
        view_set(&k, 2, 0, 7, INFINITY);
        for (size_t d = 0; d < 8; d++)
            view_set(&v, 2, 1, d, -INFINITY);
        drive_start(&m, tables->ctx[i], drive_params(), 0);
        s = drive_create(&m);
        drive_add(&m, s, NULL, 3);
        drive_append(&m, s, 0, &k, &v);
        drive_append(&m, s, 1, &k, &v);
        check_all(&m);
        assert_int_equal(drive_stats(&m).n_nonfinite, 2 * (4 + 8));
        assert_int_equal(drive_stats(&m).n_saturated, 2 * 2);
        assert_int_equal(kvc_seq_read_rows(m.cache, s->handle, 1, 0, 3, NULL, got, NULL, NULL, &n),
                         KVC_OK);
        assert_true(got[3] == 0);
        assert_true(got[16] == 77 && got[17] == -77);
        assert_true(got[2 * 16 + 6] == -65504 && got[2 * 16 + 7] == 65504);
        assert_int_equal(kvc_seq_read_rows(m.cache, s->handle, 1, 1, 3, NULL, NULL, got, NULL, &n),
                         KVC_OK);
        assert_true(got[2 * 8] == 0); /* no finite magnitude to take */
        model_close(&m);
    }
}

static void strict_refuses_nonfinite_values(void **state)
{
    kvc_cache_params p = drive_params();
    uint16_t x[2 * 2 * 16] = {0};
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F16, 2, 2, 16);
    const kvc_view v = kvc_view_packed(x, KVC_DTYPE_F16, 2, 2, 8);
    struct model_seq *s;

    p.strict = true;
    drive_start(&m, best(state), p, 0);
    s = drive_create(&m);
    drive_add(&m, s, NULL, 2);
    x[2 * 2 * 16 - 1] = 0x7c01; /* NaN in K only */
    assert_int_equal(kvc_append(m.cache, s->handle, 0, &k, &v), KVC_E_NONFINITE);
    check_all(&m);
    x[2 * 2 * 16 - 1] = 0;
    x[0] = 0xfc00; /* -Inf in both */
    assert_int_equal(kvc_append(m.cache, s->handle, 0, &k, &v), KVC_E_NONFINITE);
    check_all(&m);
    x[0] = 0x7bff;
    drive_append(&m, s, 0, &k, &v);
    check_all(&m);
    assert_int_equal(drive_stats(&m).n_nonfinite, 0);
    model_close(&m);
}

static void reads_refuse_wrong_arguments(void **state)
{
    kvc_page_info info = {.struct_size = sizeof(info)};
    uint64_t rng = 1;
    kvc_token tokens[4];
    unsigned char bytes[8192];
    struct model_seq *s;
    int64_t ordinals[16];
    float k[200 * 16];
    kvc_seq h;
    size_t n;

    drive_start(&m, best(state), drive_params(), 1 << 20);
    s = drive_create(&m);
    h = s->handle;
    drive_feed(&m, s, 100, &rng, 1);
    assert_int_equal(kvc_seq_read_rows(m.cache, h, 0, 0, 99, NULL, k, NULL, NULL, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_rows(m.cache, h, 0, 0, 100, NULL, k, NULL, NULL, NULL),
                     KVC_E_ARG);
    assert_int_equal(kvc_seq_read_rows(m.cache, h, 2, 0, 100, NULL, k, NULL, NULL, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_rows(m.cache, h, 0, -1, 100, NULL, k, NULL, NULL, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_rows(NULL, h, 0, 0, 100, NULL, k, NULL, NULL, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_rows(m.cache, h, 0, 0, 100, NULL, k, NULL, NULL, &n), KVC_OK);
    assert_int_equal(kvc_seq_read_tokens(m.cache, h, 97, 4, tokens), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_tokens(m.cache, h, -1, 2, tokens), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_tokens(m.cache, h, INT64_MAX, 2, tokens), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_tokens(m.cache, h, 0, 1, NULL), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_tokens(m.cache, h, 96, 4, tokens), KVC_OK);
    assert_int_equal(kvc_seq_read_page(m.cache, h, 0, 0, 2, &info, NULL, NULL, 0), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_page(m.cache, h, 0, 0, -1, &info, NULL, NULL, 0), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_page(m.cache, h, 0, 0, 0, NULL, NULL, NULL, 0), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_page(m.cache, h, 0, 0, 1, &info, NULL, NULL, 0), KVC_OK);
    assert_int_equal(info.n_rows, 32);
    assert_true(info.n_bytes <= sizeof(bytes));
    assert_int_equal(kvc_seq_read_page(m.cache, h, 0, 0, 1, &info, NULL, bytes, info.n_bytes - 1),
                     KVC_E_ARG);
    assert_int_equal(kvc_seq_read_page(m.cache, h, 0, 0, 1, &info, NULL, bytes, info.n_bytes),
                     KVC_OK);
    assert_int_equal(kvc_seq_read_probes(m.cache, h, 2, ordinals, NULL, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_probes(m.cache, h, 0, NULL, NULL, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_probes(m.cache, h, 0, ordinals, NULL, NULL), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_probes(m.cache, h, 0, ordinals, NULL, &n), KVC_OK);
    assert_int_equal(n, 0);
    model_close(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sequences_are_limited_and_never_given_out_twice),
        cmocka_unit_test(positions_follow_the_tokens_not_the_rows),
        cmocka_unit_test(refuses_wrong_tokens),
        cmocka_unit_test(refuses_text_beyond_the_last_position),
        cmocka_unit_test(missing_rows_are_refused),
        cmocka_unit_test(replaces_what_no_half_holds),
        cmocka_unit_test(strict_refuses_nonfinite_values),
        cmocka_unit_test(reads_refuse_wrong_arguments),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
