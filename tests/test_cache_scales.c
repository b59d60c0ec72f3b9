/* Public API of cache.h: which rows have a part in which scale. */
#include <math.h>
#include <string.h>

#include "support/cache_model.h"
#include "support/tables.h"

enum { N = 300, LAYERS = 2, HEADS = 2, DIM_K = 16, DIM_V = 8 };

static struct cache_model m;

static const kvc_precision precisions[] = {
    {KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_INT8, KVC_SCALE_HEAD, KVC_SCALE_HEAD},
    {KVC_INT4, KVC_INT4, KVC_SCALE_HEAD, KVC_SCALE_HEAD},
    {KVC_INT8, KVC_INT4, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
};
static const size_t n_precisions = sizeof(precisions) / sizeof(*precisions);

static const kvc_precision int8_head = {KVC_INT8, KVC_INT8, KVC_SCALE_HEAD, KVC_SCALE_HEAD};

static void start(kvc_ctx *ctx, kvc_precision precision, int window, int recent)
{
    kvc_cache_params p = drive_params();

    p.precision = precision;
    p.scale_window = window;
    p.recent_tokens = recent;
    p.sink_tokens = 0;
    drive_start(&m, ctx, p, 1 << 20);
}

/* All rows of a layer are one value, +- alternating by channel. */
static void give_constant(struct model_seq *s, int n, float k_value, float v_value)
{
    static float k_data[N * HEADS * DIM_K], v_data[N * HEADS * DIM_V];
    const kvc_view k = kvc_view_packed(k_data, KVC_DTYPE_F32, (size_t)n, HEADS, DIM_K);
    const kvc_view v = kvc_view_packed(v_data, KVC_DTYPE_F32, (size_t)n, HEADS, DIM_V);

    for (int i = 0; i < n * HEADS * DIM_K; i++)
        k_data[i] = i % 2 ? -k_value : k_value * 0.61f;
    for (int i = 0; i < n * HEADS * DIM_V; i++)
        v_data[i] = i % 2 ? -v_value : v_value * 0.61f;
    drive_add(&m, s, NULL, n);
    for (int layer = 0; layer < LAYERS; layer++)
        drive_append(&m, s, layer, &k, &v);
}

/* Row i of K is within bound of what give_constant() wrote. */
static void expect_constant(const struct model_seq *s, int64_t first, int64_t last, float value,
                            float bound)
{
    for (int64_t t = first; t < last; t++)
        for (int d = 0; d < DIM_K; d++) {
            const float want = half_round(d % 2 ? -value : value * 0.61f);

            assert_true(fabsf(model_k(&m, s, 1, 1, t)[d] - want) <= bound * 1.001f);
        }
}

/* Known fault D9: no first and no last window freezes a scale. */
static void scales_follow_the_rows_that_they_serve(void **state)
{
    struct model_seq *s;

    start(best(state), int8_head, 64, 0);
    s = drive_create(&m);
    give_constant(s, 16, 0.1f, 0);
    give_constant(s, 48, 12.7f, 0);
    give_constant(s, 64, 0, 0);
    give_constant(s, 64, 12.7f, 1);
    drive_settle(&m, s);
    check_all(&m); /* so the rows below, of the model, are those of the cache */
    expect_constant(s, 16, 64, 12.7f, 0.05f);
    expect_constant(s, 64, 128, 0, 0);
    expect_constant(s, 128, 192, 12.7f, 0.05f);
    model_close(&m);

    start(best(state), int8_head, 512, 0);
    s = drive_create(&m);
    give_constant(s, 10, 10, 1);
    for (int i = 0; i < 6; i++)
        give_constant(s, 100, 1, 1);
    drive_settle(&m, s);
    check_all(&m);
    expect_constant(s, 0, 10, 10, 10.0f / 254);
    expect_constant(s, 10, 512, 1, 10.0f / 254);
    expect_constant(s, 512, 576, 1, 1.0f / 254);
    model_close(&m);
}

/* Known fault D11. */
static void k_and_v_have_scales_of_their_own(void **state)
{
    for (size_t i = 0; i < n_precisions; i++) {
        const float codes = precisions[i].v == KVC_INT4 ? 14 : 254;
        struct model_seq *s;

        start(best(state), precisions[i], 64, 0);
        s = drive_create(&m);
        give_constant(s, 64, 100, 0.5f);
        drive_settle(&m, s);
        check_all(&m);
        for (int d = 0; d < DIM_V; d++) {
            const float want = half_round(d % 2 ? -0.5f : 0.5f * 0.61f);

            assert_true(fabsf(model_v(&m, s, 0, 0, 7)[d] - want) <= 0.505f / codes);
        }
        model_close(&m);
    }
}

/* A page that is freed unsealed is gone, whether the next one is sealed in the same call or not. */
static void freed_pages_have_no_part_in_later_scales(void **state)
{
    for (int in_steps = 0; in_steps < 2; in_steps++) {
        uint64_t rng = 1;
        struct model_seq *s;

        start(best(state), int8_head, 128, 128);
        s = drive_create(&m);
        give_constant(s, 64, 1, 1);
        give_constant(s, 64, 70, 70);
        drive_feed(&m, s, 64, &rng, 1);
        drive_remove(&m, s, 64, 128);
        drive_feed(&m, s, in_steps ? 64 : 128, &rng, 1);
        if (in_steps) {
            drive_settle(&m, s);
            drive_feed(&m, s, 64, &rng, 1);
        }
        drive_settle(&m, s);
        check_all(&m);
        model_close(&m);
    }
}

/* A row that is removed before its page is sealed keeps its part, one that comes later has none. */
static void removed_rows_keep_their_part_in_scales(void **state)
{
    struct model_seq *s;

    start(best(state), int8_head, 128, 0);
    s = drive_create(&m);
    give_constant(s, 64, 1, 1);
    drive_settle(&m, s);
    give_constant(s, 4, 50, 50);
    give_constant(s, 60, 1, 1);
    drive_remove(&m, s, 64, 68);
    drive_settle(&m, s);
    check_all(&m);
    expect_constant(s, 0, 64, 1, 1.0f / 254);
    assert_true(fabsf(model_k(&m, s, 0, 0, 70)[1] + 1) > 0.05f);
    model_close(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scales_follow_the_rows_that_they_serve),
        cmocka_unit_test(k_and_v_have_scales_of_their_own),
        cmocka_unit_test(freed_pages_have_no_part_in_later_scales),
        cmocka_unit_test(removed_rows_keep_their_part_in_scales),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
