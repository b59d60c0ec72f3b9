/* Public API of cache.h: mean and scale that a cache measures itself. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/half.h"
#include "support/tables.h"
#include "support/transform_scene.h"

enum { D = 64, PAGES = 2, SINKS = 4, READY = SINKS + PAGES * 64, FLAGS = 3 };

static struct scene scene;

static kvc_cache_params params_of(void)
{
    kvc_cache_params p = scene_params(&scene, FLAGS);
    p.online_pages = PAGES;
    p.recent_tokens = 0;
    p.precision = (kvc_precision){KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN};
    return p;
}

static kvc_seq create(kvc_cache *cache)
{
    kvc_seq seq;
    assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
    return seq;
}

static bool is_ready(const kvc_cache *cache)
{
    bool ready = false;
    assert_int_equal(kvc_cache_read_transform(cache, 0, 0, NULL, NULL, &ready), KVC_OK);
    return ready;
}

static int64_t n_sealed(const kvc_cache *cache)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};
    assert_int_equal(kvc_cache_stats(cache, &stats), KVC_OK);
    return stats.n_pages_sealed;
}

static void nothing_is_sealed_before_its_time(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 1;

    scene_make(&scene, D, D, 300, &rng);
    kvc_cache *cache = scene_open(tables->ctx[0], params_of());
    const kvc_seq seq = create(cache);
    scene_feed(&scene, cache, seq, 0, READY - 1, 50, NULL);
    assert_int_equal(kvc_seq_settle(cache, seq), KVC_OK);
    assert_false(is_ready(cache));
    assert_int_equal(n_sealed(cache), 0);
    scene_feed(&scene, cache, seq, READY - 1, READY, 1, NULL);
    assert_false(is_ready(cache)); /* the pages are full, but nothing was settled */
    assert_int_equal(kvc_seq_settle(cache, seq), KVC_OK);
    assert_true(is_ready(cache));
    assert_int_equal(n_sealed(cache), SCENE_LAYERS * SCENE_KV_HEADS * PAGES);
    kvc_cache_destroy(cache);
}

/* Rows that arrived raw give the output of raw rows, and afterwards that of transformed ones. */
static void attention_is_right_before_and_after(void **state)
{
    const struct tables *tables = *state;
    static double out[SCENE_D];
    uint64_t rng = 2;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_attend_options options;
        scene_make(&scene, D, D, 300, &rng);
        kvc_cache_params p = params_of();
        p.precision.k = p.precision.v = KVC_F16;
        kvc_cache *cache = scene_open(tables->ctx[i], p);
        kvc_attend_options_default(cache, &options);
        options.softcap = 6.0f;
        scene_feed(&scene, cache, create(cache), 0, scene.n, 37, &options);
        assert_true(is_ready(cache));
        for (int t = 0; t < scene.n; t += 11)
            for (int h = 0; h < SCENE_HEADS; h++) {
                const double lse = scene_attend(&scene, (const void *)scene.k,
                                                (const void *)scene.v, t, h, &options, out);
                assert_true(fabs((double)scene.lse[t][h] - lse) < 0.02);
                for (int c = 0; c < D; c++)
                    assert_true(fabs((double)scene.out[t][h * D + c] - out[c]) < 0.02);
            }
        kvc_cache_destroy(cache);
    }
}

/* mean k, and (E (k - mean)^2 / E q^2)^(1/4) over its geometric mean, of tokens SINKS ... end - 1.
 */
static void want_vectors(int kv_head, int end, bool queries, double *mean, double *scale)
{
    const int group = SCENE_HEADS / SCENE_KV_HEADS, n = end - SINKS;
    double product = 0.0;

    for (int c = 0; c < D; c++) {
        double variance = 0.0, square = 0.0;
        mean[c] = 0.0;
        for (int t = SINKS; t < end; t++)
            mean[c] += (double)scene.k[t][kv_head * D + c] / n;
        for (int t = SINKS; t < end; t++) {
            variance += pow((double)scene.k[t][kv_head * D + c] - mean[c], 2) / n;
            for (int g = 0; g < group; g++)
                square += pow((double)scene.q[t][(kv_head * group + g) * D + c], 2) / (n * group);
        }
        scale[c] = pow(variance / (queries ? square : 1.0), 0.25);
        product += log(scale[c]) / D;
    }
    for (int c = 0; c < D; c++)
        scale[c] /= exp(product);
}

static void check_vectors(const kvc_cache *cache, int end, bool queries)
{
    for (int l = 0; l < SCENE_LAYERS; l++)
        for (int h = 0; h < SCENE_KV_HEADS; h++) {
            double want_mean[D], want_scale[D];
            float mean[D], scale[D];
            bool ready;
            want_vectors(h, end, queries, want_mean, want_scale);
            assert_int_equal(kvc_cache_read_transform(cache, l, h, mean, scale, &ready), KVC_OK);
            assert_true(ready);
            for (int c = 0; c < D; c++) {
                assert_true(fabs((double)mean[c] - want_mean[c]) <=
                            1e-6 * (1.0 + fabs(want_mean[c])));
                assert_true(fabs((double)scale[c] / want_scale[c] - 1.0) <= 1e-6);
            }
        }
}

static void measured_is_what_the_first_pages_held(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 3;

    for (size_t i = 0; i < tables->n; i++) {
        scene_make(&scene, D, D, 300, &rng);
        kvc_cache *cache = scene_open(tables->ctx[i], params_of());
        scene_feed(&scene, cache, create(cache), 0, scene.n, 41, NULL);
        check_vectors(cache, READY, true);
        kvc_cache_destroy(cache);
    }
}

/* An engine that restores a prompt attends nothing. */
static void without_queries_keys_alone_count(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 4;

    scene_make(&scene, D, D, READY, &rng);
    kvc_cache *cache = scene_open(tables->ctx[0], params_of());
    const kvc_seq seq = create(cache);
    kvc_view k = kvc_view_packed(scene.k, KVC_DTYPE_F32, READY, SCENE_KV_HEADS, D);
    kvc_view v = kvc_view_packed(scene.v, KVC_DTYPE_F32, READY, SCENE_KV_HEADS, D);
    k.token_stride = v.token_stride = SCENE_KV_HEADS * SCENE_D;
    assert_int_equal(kvc_tokens_add(cache, seq, NULL, READY), KVC_OK);
    for (int l = 0; l < SCENE_LAYERS; l++)
        assert_int_equal(kvc_append(cache, seq, l, &k, &v), KVC_OK);
    assert_int_equal(kvc_seq_settle(cache, seq), KVC_OK);
    check_vectors(cache, READY, false);
    kvc_cache_destroy(cache);
}

/* An engine that rotates: the vectors are still those of K. */
static void rotated_rows_are_measured_unrotated(void **state)
{
    const struct tables *tables = *state;
    static struct scene raw;
    uint64_t rng = 5;

    scene_make(&scene, D, D, READY, &rng);
    raw = scene;
    for (int t = 0; t < scene.n; t++)
        for (int h = 0; h < SCENE_HEADS; h++) {
            scene_rotate(scene.q[t] + h * D, D);
            if (h < SCENE_KV_HEADS)
                scene_rotate(scene.k[t] + h * D, D);
        }
    kvc_cache_params p = params_of();
    p.transform = KVC_TRANSFORM_K_ROTATED;
    kvc_cache *cache = scene_open(tables->ctx[0], p);
    const kvc_seq seq = create(cache);
    scene_feed(&scene, cache, seq, 0, scene.n, 64, NULL);
    assert_int_equal(kvc_seq_settle(cache, seq), KVC_OK);
    for (int h = 0; h < SCENE_KV_HEADS; h++) {
        double want_mean[D], want_scale[D];
        float mean[D], scale[D];
        bool ready;
        scene = raw;
        want_vectors(h, READY, true, want_mean, want_scale);
        assert_int_equal(kvc_cache_read_transform(cache, 0, h, mean, scale, &ready), KVC_OK);
        for (int c = 0; c < D; c++) {
            assert_true(fabs((double)mean[c] - want_mean[c]) < 0.01); /* H K came as halves */
            assert_true(fabs((double)scale[c] / want_scale[c] - 1.0) < 0.01);
        }
    }
    kvc_cache_destroy(cache);
}

/* Bytes of all sealed and open pages of a sequence. */
static size_t read_pages(const kvc_cache *cache, kvc_seq seq, uint8_t *bytes)
{
    size_t at = 0;
    for (int l = 0; l < SCENE_LAYERS; l++)
        for (int h = 0; h < SCENE_KV_HEADS; h++)
            for (int64_t i = 0; i < kvc_seq_n_pages(cache, seq, l, h); i++) {
                kvc_page_info info = {.struct_size = sizeof(info)};
                assert_int_equal(kvc_seq_read_page(cache, seq, l, h, i, &info, NULL, bytes + at,
                                                   (size_t)1 << 15),
                                 KVC_OK);
                /* An open page may hold anything behind its rows. */
                at += info.sealed ? info.n_bytes : (size_t)info.n_rows * D * 2;
            }
    return at;
}

static uint8_t pages[2][1 << 20];

static void how_a_prompt_is_cut_changes_no_byte(void **state)
{
    static const int chunks[] = {300, 1, 64, 130, 7};
    const struct tables *tables = *state;
    uint64_t rng = 6;

    scene_make(&scene, D, D, 300, &rng);
    for (size_t i = 0; i < tables->n; i++)
        for (size_t k = 0; k < sizeof(chunks) / sizeof(*chunks); k++) {
            kvc_cache *cache = scene_open(tables->ctx[i], params_of());
            const kvc_seq seq = create(cache);
            scene_feed(&scene, cache, seq, 0, scene.n, chunks[k], NULL);
            assert_int_equal(kvc_seq_settle(cache, seq), KVC_OK);
            const size_t n = read_pages(cache, seq, pages[i + k > 0]);
            assert_true(n > 10000);
            if (i + k > 0)
                assert_memory_equal(pages[0], pages[1], n);
            kvc_cache_destroy(cache);
        }
}

/* A cache that was given what another has measured. */
static void the_same_vectors_give_the_same_bytes(void **state)
{
    const struct tables *tables = *state;
    static float mean[SCENE_LAYERS * SCENE_KV_HEADS * D], scale[SCENE_LAYERS * SCENE_KV_HEADS * D];
    uint64_t rng = 7;

    scene_make(&scene, D, D, 300, &rng);
    for (int which = 0; which < 2; which++) {
        kvc_cache_params p = params_of();
        p.k_mean = which ? mean : NULL;
        p.k_scale = which ? scale : NULL;
        kvc_cache *cache = scene_open(tables->ctx[0], p);
        const kvc_seq seq = create(cache);
        bool ready;
        scene_feed(&scene, cache, seq, 0, scene.n, 50, NULL);
        assert_int_equal(kvc_seq_settle(cache, seq), KVC_OK);
        for (int i = 0; i < SCENE_LAYERS * SCENE_KV_HEADS && !which; i++)
            assert_int_equal(kvc_cache_read_transform(cache, i / SCENE_KV_HEADS, i % SCENE_KV_HEADS,
                                                      mean + i * D, scale + i * D, &ready),
                             KVC_OK);
        const size_t n = read_pages(cache, seq, pages[which]);
        if (which)
            assert_memory_equal(pages[0], pages[1], n);
        kvc_cache_destroy(cache);
    }
}

/* Rows of one head of a sequence, read back, are those that came. */
static void expect_rows(const kvc_cache *cache, kvc_seq seq, int n_tokens, float tolerance)
{
    static float k[SCENE_TOKENS * D], v[SCENE_TOKENS * D];
    for (int h = 0; h < SCENE_KV_HEADS; h++) {
        size_t n;
        assert_int_equal(kvc_seq_read_rows(cache, seq, 1, h, SCENE_TOKENS, NULL, k, v, NULL, &n),
                         KVC_OK);
        assert_int_equal(n, n_tokens);
        for (int t = 0; t < n_tokens; t++)
            for (int c = 0; c < D; c++) {
                assert_true(fabsf(k[t * D + c] - scene.k[t][h * D + c]) < tolerance);
                assert_true(fabsf(v[t * D + c] - scene.v[t][h * D + c]) < tolerance);
            }
    }
}

/* Shared pages, open pages and strips of all sequences are rewritten, each once; one that is in the
 * middle of a token too. */
static void all_sequences_change_together(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 8;

    for (size_t i = 0; i < tables->n; i++) {
        kvc_cache_params p = params_of();
        kvc_seq fork;
        scene_make(&scene, D, D, 200, &rng);
        p.precision.k = p.precision.v = KVC_F16;
        kvc_cache *cache = scene_open(tables->ctx[i], p);
        const kvc_seq a = create(cache), other = create(cache);
        scene_feed(&scene, cache, other, 0, 30, 30, NULL);
        scene_feed(&scene, cache, a, 0, 100, 50, NULL);
        assert_int_equal(kvc_seq_fork(cache, a, &fork), KVC_OK);
        assert_int_equal(kvc_seq_truncate(cache, fork, 40), KVC_OK); /* of a page that is shared */
        kvc_view k = kvc_view_packed(scene.k[30], KVC_DTYPE_F32, 1, SCENE_KV_HEADS, D);
        kvc_view v = kvc_view_packed(scene.v[30], KVC_DTYPE_F32, 1, SCENE_KV_HEADS, D);
        assert_int_equal(kvc_tokens_add(cache, other, NULL, 1), KVC_OK);
        assert_int_equal(kvc_append(cache, other, 1, &k, &v), KVC_OK);
        scene_feed(&scene, cache, a, 100, 200, 50, NULL);
        assert_true(is_ready(cache));
        expect_rows(cache, a, 200, 0.03f);
        expect_rows(cache, fork, 40, 0.03f);
        expect_rows(cache, other, 31, 0.03f);
        assert_int_equal(kvc_append(cache, other, 0, &k, &v), KVC_OK);
        scene_feed(&scene, cache, other, 31, 60, 10, NULL);
        scene_feed(&scene, cache, fork, 40, 90, 10, NULL);
        expect_rows(cache, other, 60, 0.03f);
        expect_rows(cache, fork, 90, 0.03f);
        expect_rows(cache, a, 200, 0.03f);
        kvc_cache_destroy(cache);
    }
}

static void compression_does_not_wait(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 9;

    scene_make(&scene, D, D, 300, &rng);
    kvc_cache *cache = scene_open(tables->ctx[0], params_of());
    const kvc_seq seq = create(cache);
    assert_int_equal(kvc_cache_compress(cache, seq, NULL, NULL, NULL), KVC_OK);
    assert_false(is_ready(cache)); /* there is nothing to measure */
    scene_feed(&scene, cache, seq, 0, 50, 50, NULL);
    assert_int_equal(kvc_cache_compress(cache, seq, NULL, NULL, NULL), KVC_OK);
    check_vectors(cache, 50, true);
    assert_int_equal(n_sealed(cache), SCENE_LAYERS * SCENE_KV_HEADS);
    scene_feed(&scene, cache, seq, 50, 300, 50, NULL);
    check_vectors(cache, 50, true); /* once */
    kvc_cache_destroy(cache);
}

static void waiting_rows_have_room(void **state)
{
    const struct tables *tables = *state;
    kvc_cache_params p;
    size_t without, with, large;
    uint64_t rng = 10;

    scene_make(&scene, D, D, 300, &rng);
    p = params_of();
    p.online_pages = 0;
    assert_int_equal(kvc_cache_min_budget(&p, &without), KVC_OK);
    p.online_pages = 4;
    assert_int_equal(kvc_cache_min_budget(&p, &with), KVC_OK);
    /* four open pages more in each layer, head and sequence */
    const size_t open = (size_t)64 * 2 * D * 2;
    assert_true(with >= without + 3 * 4 * SCENE_LAYERS * SCENE_KV_HEADS * open);
    p.recent_tokens = 256;
    assert_int_equal(kvc_cache_min_budget(&p, &large), KVC_OK);
    assert_int_equal(with, large); /* recent_tokens counts at least 64 online_pages */

    p.recent_tokens = 0;
    p.budget_bytes = with;
    kvc_cache *cache;
    assert_int_equal(kvc_cache_create(tables->ctx[0], &p, &cache), KVC_OK);
    for (int i = 0; i < 3; i++) { /* no sequence is refused a token before one is ready */
        const kvc_seq seq = create(cache);
        scene_feed(&scene, cache, seq, 0, 4 * 64 + SINKS - 1, 100, NULL);
    }
    assert_false(is_ready(cache));
    kvc_cache_destroy(cache);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_sealed_before_its_time),
        cmocka_unit_test(attention_is_right_before_and_after),
        cmocka_unit_test(measured_is_what_the_first_pages_held),
        cmocka_unit_test(without_queries_keys_alone_count),
        cmocka_unit_test(rotated_rows_are_measured_unrotated),
        cmocka_unit_test(how_a_prompt_is_cut_changes_no_byte),
        cmocka_unit_test(the_same_vectors_give_the_same_bytes),
        cmocka_unit_test(all_sequences_change_together),
        cmocka_unit_test(compression_does_not_wait),
        cmocka_unit_test(waiting_rows_have_room),
    };
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
