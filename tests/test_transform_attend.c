/* Attention over transformed rows: keys that come rotated, batches, threads, odd numbers, sizes and
 * presets. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/tables.h"
#include "support/transform_scene.h"

#include "kvc/pool.h"

enum {
    BOTH = KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_ROTATE_V,
    COMES = KVC_TRANSFORM_K_ROTATED | KVC_TRANSFORM_ROTATE_V,
    D = 64
};

static struct scene scene, other;

static kvc_cache_params params_of(uint32_t flags, bool vectors)
{
    kvc_cache_params p = scene_params(&scene, flags);

    p.k_mean = vectors ? scene.mean : NULL;
    p.k_scale = vectors ? scene.scale : NULL;
    return p;
}

static kvc_seq create(kvc_cache *cache)
{
    kvc_seq seq = 0;

    assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
    return seq;
}

static void measured(const kvc_cache *cache, float *mean, float *scale)
{
    bool ready = false;

    for (int i = 0; i < SCENE_LAYERS * SCENE_KV_HEADS; i++) {
        const size_t at = (size_t)i * (size_t)scene.d_k;

        assert_int_equal(kvc_cache_read_transform(cache, i / SCENE_KV_HEADS, i % SCENE_KV_HEADS,
                                                  mean + at, scale + at, &ready),
                         KVC_OK);
        assert_true(ready);
    }
}

static void assert_near_outputs(const struct scene *a, const struct scene *b, double tolerance)
{
    for (int t = 0; t < a->n; t++) {
        for (int i = 0; i < SCENE_HEADS * a->d_v; i++)
            assert_true(fabs((double)a->out[t][i] - (double)b->out[t][i]) <= tolerance);
        for (int h = 0; h < SCENE_HEADS; h++)
            assert_true(fabs((double)a->lse[t][h] - (double)b->lse[t][h]) <= tolerance);
    }
}

static void rotate_inputs(struct scene *s)
{
    for (int t = 0; t < s->n; t++)
        for (size_t h = 0; h < SCENE_HEADS; h++) {
            scene_rotate(s->q[t] + h * (size_t)s->d_k, s->d_k);
            if (h < SCENE_KV_HEADS)
                scene_rotate(s->k[t] + h * (size_t)s->d_k, s->d_k);
        }
}

/* Without vectors the stored halves are the same, bit for bit; with them H K was rounded to halves
 * once more, which moves logits of |q| |k| about 80 / 8 by 2^-11 of that. */
static void an_engine_may_rotate_keys_itself(void **state)
{
    static const int sizes[] = {64, 80, 96, 72, 8, 1};
    const struct tables *tables = *state;
    static uint8_t pages[2][1 << 16];
    uint64_t rng = 1;

    for (size_t i = 0; i < tables->n; i++)
        for (int k = 0; k < 12; k++) {
            kvc_page_info info = {.struct_size = sizeof(info)};
            kvc_attend_options options;

            scene_make(&scene, sizes[k / 2], 32, 150, &rng);
            for (int comes = 0; comes < 2; comes++) {
                kvc_cache_params p = params_of(comes ? COMES : BOTH, k % 2);
                kvc_cache *cache = scene_open(tables->ctx[i], p);
                const kvc_seq seq = create(cache);

                kvc_attend_options_default(cache, &options);
                options.softcap = 5.0f;
                if (comes) {
                    other = scene;
                    rotate_inputs(&scene);
                }
                scene_feed(&scene, cache, seq, 0, scene.n, 50, &options);
                assert_int_equal(kvc_seq_read_page(cache, seq, 1, 1, 0, &info, NULL, pages[comes],
                                                   sizeof(pages[comes])),
                                 KVC_OK);
                kvc_cache_destroy(cache);
            }
            if (k % 2 == 0)
                assert_memory_equal(pages[0], pages[1], info.n_bytes);
            assert_near_outputs(&scene, &other, k % 2 ? 0.02 : 1e-4);
        }
}

static void in_order(void *user, size_t n, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    for (size_t i = 0; i < n; i++)
        task(arg, i);
}

static void reversed(void *user, size_t n, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    for (size_t i = n; i-- > 0;)
        task(arg, i);
}

/* Measuring, too. */
static void threads_change_no_bit(void **state)
{
    static kvc_parallel_for_fn *const fns[] = {NULL, in_order, reversed, kvc_pool_parallel_for};
    static float vectors[2][2][SCENE_LAYERS * SCENE_KV_HEADS * D];
    uint64_t rng = 2;
    kvc_pool *pool;

    (void)state;
    assert_int_equal(kvc_pool_create(3, &pool), KVC_OK);
    scene_make(&scene, D, D, 300, &rng);
    for (int i = 0; i < 4; i++) {
        const kvc_ctx_params ctx_params = {
            .struct_size = sizeof(ctx_params), .parallel_for = fns[i], .parallel_user = pool};
        kvc_cache_params p = params_of(BOTH, false);
        kvc_ctx *ctx;
        kvc_cache *cache;

        p.online_pages = 2;
        p.precision = (kvc_precision){KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN};
        p.recent_tokens = 0;
        assert_int_equal(kvc_ctx_create(&ctx_params, &ctx), KVC_OK);
        cache = scene_open(ctx, p);
        scene_feed(&scene, cache, create(cache), 0, scene.n, 43, NULL);
        measured(cache, vectors[i > 0][0], vectors[i > 0][1]);
        if (i == 0)
            other = scene;
        assert_memory_equal(vectors[0], vectors[1], i ? sizeof(vectors[0]) : 0);
        assert_memory_equal(scene.out, other.out, sizeof(scene.out));
        assert_memory_equal(scene.lse, other.lse, sizeof(scene.lse));
        kvc_cache_destroy(cache);
        kvc_ctx_destroy(ctx);
    }
    kvc_pool_destroy(pool);
}

/* The last row of each of three sequences, alone and at once, before and after the measuring. */
static void batches_change_no_bit(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 3;

    scene_make(&scene, D, D, 300, &rng);
    for (size_t i = 0; i < tables->n; i++) {
        kvc_cache_params p = params_of(BOTH, false);
        kvc_attend_item items[3];
        kvc_view q[3], out[3];
        static float alone[3][SCENE_HEADS * D], batched[3][SCENE_HEADS * D];
        float lse[2][3][SCENE_HEADS];

        p.online_pages = 2;
        p.precision.k = p.precision.v = KVC_INT8;
        p.recent_tokens = 0;
        kvc_cache *cache = scene_open(tables->ctx[i], p);
        const kvc_seq seqs[] = {create(cache), create(cache), create(cache)};
        for (int round = 0; round < 2; round++) {
            for (int s = 0; s < 3; s++) {
                const int last = round ? 200 : 50 + 20 * s;

                scene_feed(&scene, cache, seqs[s], round ? 50 + 20 * s : 0, last, 50, NULL);
                q[s] = kvc_view_packed(scene.q[last - 1], KVC_DTYPE_F32, 1, SCENE_HEADS, D);
                out[s] = kvc_view_packed(alone[s], KVC_DTYPE_F32, 1, SCENE_HEADS, D);
                items[s] = (kvc_attend_item){sizeof(items[s]), seqs[s], &q[s], &out[s], lse[1][s]};
            }
            for (int s = 0; s < 3; s++)
                assert_int_equal(kvc_attend(cache, seqs[s], 1, &q[s], NULL, &out[s], lse[0][s]),
                                 KVC_OK);
            for (int s = 0; s < 3; s++)
                out[s].data = batched[s];
            assert_int_equal(kvc_attend_batch(cache, 1, items, 3, NULL), KVC_OK);
            assert_memory_equal(batched, alone, sizeof(alone));
            assert_memory_equal(lse[0], lse[1], sizeof(lse[0]));
        }
        kvc_cache_destroy(cache);
    }
}

/* What decisions rest on: the same bits on every table, with vectors that it measured itself. */
static void tables_agree_on_scores(void **state)
{
    const struct tables *tables = *state;
    static float scores[2][SCENE_TOKENS], vectors[2][2][SCENE_LAYERS * SCENE_KV_HEADS * D];
    uint64_t rng = 4;

    scene_make(&scene, D, D, 300, &rng);
    for (size_t i = 0; i < tables->n; i++) {
        kvc_cache_params p = params_of(BOTH, false);
        kvc_attend_options options;
        size_t n;

        p.online_pages = 1;
        p.precision.k = p.precision.v = KVC_INT4;
        p.recent_tokens = 30;
        kvc_cache *cache = scene_open(tables->ctx[i], p);
        const kvc_seq seq = create(cache);
        kvc_attend_options_default(cache, &options);
        options.softcap = 3.0f;
        scene_feed(&scene, cache, seq, 0, scene.n, 43, &options);
        measured(cache, vectors[i > 0][0], vectors[i > 0][1]);
        assert_int_equal(kvc_seq_score_rows(cache, seq, 1, 1, SCENE_TOKENS, scores[i > 0], &n),
                         KVC_OK);
        assert_int_equal(n, scene.n);
        if (i > 0) {
            assert_memory_equal(vectors[0], vectors[1], sizeof(vectors[0]));
            assert_memory_equal(scores[0], scores[1], n * sizeof(float));
        }
        kvc_cache_destroy(cache);
    }
}

/* NaN and Inf in a query reach only its own row of the output, and not what is measured. */
static void a_bad_query_spoils_only_its_row(void **state)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    const struct tables *tables = *state;
    static float vectors[2][SCENE_LAYERS * SCENE_KV_HEADS * D];
    uint64_t rng = 5;

    scene_make(&scene, D, D, 200, &rng);
    for (size_t i = 0; i < tables->n; i++)
        for (int online = 0; online < 2; online++)
            for (int b = 0; b < 3; b++) {
                kvc_cache_params p = params_of(BOTH, !online);
                const float good = scene.q[30][D + 7];

                p.online_pages = online;
                for (int spoilt = 0; spoilt < 2; spoilt++) {
                    kvc_cache *cache = scene_open(tables->ctx[i], p);

                    other = scene;
                    scene.q[30][D + 7] = spoilt ? bad[b] : good;
                    scene_feed(&scene, cache, create(cache), 0, scene.n, 40, NULL);
                    measured(cache, vectors[0], vectors[1]);
                    for (int c = 0; c < SCENE_LAYERS * SCENE_KV_HEADS * D; c++)
                        assert_true(isfinite(vectors[0][c]) && isfinite(vectors[1][c]) &&
                                    vectors[1][c] > 0);
                    kvc_cache_destroy(cache);
                }
                scene.q[30][D + 7] = good;
                for (int t = 0; t < scene.n; t++)
                    for (int c = 0; c < SCENE_HEADS * D; c++) {
                        const double error =
                            fabs((double)scene.out[t][c] - (double)other.out[t][c]);

                        if (t == 30 && c / D == 1)
                            continue;
                        /* Without measuring, bit for bit; the vectors differ by one query. */
                        assert_true(error <= (online ? 0.01 : 0.0));
                    }
            }
}

/* Channels that never change, queries that are zero, keys that are zero. */
static void dull_channels_are_measured_too(void **state)
{
    const struct tables *tables = *state;
    static float vectors[2][SCENE_LAYERS * SCENE_KV_HEADS * D];
    static double out[SCENE_D];
    uint64_t rng = 6;

    for (size_t i = 0; i < tables->n; i++)
        for (int kind = 0; kind < 4; kind++) {
            kvc_attend_options options;

            scene_make(&scene, D, D, 200, &rng);
            kvc_cache_params p = params_of(BOTH, false);
            for (int t = 0; t < scene.n; t++) {
                for (int c = 0; c < SCENE_KV_HEADS * D; c++)
                    if (kind == 3 || c % 8 == 1)
                        scene.k[t][c] = kind == 0 ? 5.0f : kind == 1 ? 1e-7f : 0.0f;
                for (int c = 0; c < SCENE_HEADS * D; c++)
                    if (kind == 2 || c % 8 == 3)
                        scene.q[t][c] = 0.0f;
            }
            p.online_pages = 2;
            kvc_cache *cache = scene_open(tables->ctx[i], p);
            kvc_attend_options_default(cache, &options);
            scene_feed(&scene, cache, create(cache), 0, scene.n, 40, &options);
            measured(cache, vectors[0], vectors[1]);
            for (int c = 0; c < SCENE_LAYERS * SCENE_KV_HEADS * D; c++)
                assert_true(isfinite(vectors[0][c]) && isfinite(vectors[1][c]) &&
                            isfinite(1.0f / vectors[1][c]) && vectors[1][c] > 0);
            for (int t = 140; t < scene.n; t += 7)
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

/* Vectors that no half survives: rows are wrong, numbers stay numbers. */
static void extreme_vectors_make_no_nan(void **state)
{
    const struct tables *tables = *state;
    static const float means[] = {65504, -65504, 4e4f}, scales[] = {1e-29f, 1e38f, 1e-20f};
    static float k[SCENE_TOKENS * D];
    uint64_t rng = 7;

    for (size_t i = 0; i < tables->n; i++)
        for (int kind = 0; kind < 6; kind++) {
            kvc_stats stats = {.struct_size = sizeof(stats)};
            size_t n;

            scene_make(&scene, D, D, 80, &rng);
            for (int c = 0; c < SCENE_LAYERS * SCENE_KV_HEADS * D; c += 5) {
                if (kind < 3)
                    scene.mean[c] = means[kind];
                else
                    scene.scale[c] = scales[kind - 3];
            }
            kvc_cache *cache = scene_open(tables->ctx[i], params_of(BOTH, true));
            const kvc_seq seq = create(cache);
            scene_feed(&scene, cache, seq, 0, scene.n, 40, NULL);
            assert_int_equal(
                kvc_seq_read_rows(cache, seq, 1, 1, SCENE_TOKENS, NULL, k, NULL, NULL, &n), KVC_OK);
            for (size_t c = 0; c < n * D; c++)
                assert_true(!isnan(k[c]));
            assert_int_equal(kvc_cache_stats(cache, &stats), KVC_OK);
            assert_int_equal(stats.n_nonfinite, 0); /* of what came */
            kvc_cache_destroy(cache);
        }
}

static void strict_refuses_what_came(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 8;

    scene_make(&scene, D, D, 20, &rng);
    for (int online = 0; online < 2; online++) {
        kvc_cache_params p = params_of(BOTH, !online);
        p.strict = true;
        p.online_pages = online;
        kvc_cache *cache = scene_open(tables->ctx[0], p);
        const kvc_seq seq = create(cache);
        const kvc_view k = kvc_view_packed(scene.k[10], KVC_DTYPE_F32, 1, SCENE_KV_HEADS, D);
        const kvc_view v = kvc_view_packed(scene.v[10], KVC_DTYPE_F32, 1, SCENE_KV_HEADS, D);

        scene_feed(&scene, cache, seq, 0, 10, 10, NULL);
        scene.k[10][D + 3] = INFINITY;
        assert_int_equal(kvc_tokens_add(cache, seq, NULL, 1), KVC_OK);
        assert_int_equal(kvc_append(cache, seq, 0, &k, &v), KVC_E_NONFINITE);
        assert_int_equal(kvc_seq_n_rows(cache, seq, 0, 1), 10);
        scene.k[10][D + 3] = 1.0f;
        assert_int_equal(kvc_append(cache, seq, 0, &k, &v), KVC_OK);
        kvc_cache_destroy(cache);
    }
}

static void six_bits_are_for_keys_by_token(void **state)
{
    static const kvc_precision bad[] = {
        {KVC_INT8, KVC_INT6, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
        {KVC_INT6, KVC_INT6, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
        {KVC_INT6, KVC_INT4, KVC_SCALE_HEAD, KVC_SCALE_TOKEN},
        {KVC_INT6, KVC_INT4, KVC_SCALE_CHANNEL, KVC_SCALE_TOKEN},
    };
    const struct tables *tables = *state;
    uint64_t rng = 9;

    scene_make(&scene, D, D, 8, &rng);
    kvc_cache_params p = params_of(BOTH, false);
    kvc_cache *cache = scene_open(tables->ctx[0], p);
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        kvc_cache *refused = cache;
        size_t bytes;

        assert_int_equal(kvc_cache_set_precision(cache, 0, 0, &bad[i]), KVC_E_UNSUPPORTED);
        p.precision = bad[i];
        assert_int_equal(kvc_cache_min_budget(&p, &bytes), KVC_E_UNSUPPORTED);
        p.budget_bytes = 1 << 26;
        assert_int_equal(kvc_cache_create(tables->ctx[0], &p, &refused), KVC_E_UNSUPPORTED);
        assert_null(refused);
    }
    kvc_cache_destroy(cache);
}

/* Runs of up to 512 channels, against float64 on what is stored. */
static void all_head_sizes_are_attended(void **state)
{
    static const int sizes[][2] = {{512, 320}, {320, 512}, {256, 1}, {1, 256}, {129, 130}};
    static float mean[2 * KVC_MAX_HEAD_DIM], scale[2 * KVC_MAX_HEAD_DIM];
    static struct cache_model m;
    const struct tables *tables = *state;
    uint64_t rng = 10;

    for (int c = 0; c < 2 * KVC_MAX_HEAD_DIM; c++) {
        mean[c] = normal(&rng);
        scale[c] = 0.5f + fabsf(normal(&rng));
    }
    for (size_t i = 0; i < tables->n; i++)
        for (size_t k = 0; k < sizeof(sizes) / sizeof(*sizes); k++)
            for (int f = 0; f < 2; f++) {
                kvc_cache_params p = drive_params();
                kvc_attend_options options;

                p.n_layers = 1;
                p.head_dim_k = sizes[k][0];
                p.head_dim_v = sizes[k][1];
                p.recent_tokens = 0;
                p.transform = BOTH;
                p.k_mean = mean;
                p.k_scale = scale;
                if (f)
                    p.precision =
                        (kvc_precision){KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN};
                drive_start(&m, tables->ctx[i], p, 1 << 21);
                struct model_seq *s = drive_create(&m);
                drive_feed(&m, s, 100, &rng, 1);
                drive_settle(&m, s);
                kvc_attend_options_default(m.cache, &options);
                drive_attend(&m, s, 0, 20, &options, &rng);
                options.softcap = 5.0f;
                options.window = 50;
                drive_attend(&m, s, 0, 1, &options, &rng);
                check_all(&m);
                model_close(&m);
            }
}

/* Root mean square error of the outputs after the first pages, over that of the outputs. */
static double error_of(kvc_ctx *ctx, const kvc_cache_params *p)
{
    static double out[SCENE_D];
    kvc_cache *cache = scene_open(ctx, *p);
    kvc_attend_options options;
    double error = 0, size = 0;

    kvc_attend_options_default(cache, &options);
    scene_feed(&scene, cache, create(cache), 0, scene.n, 64, &options);
    for (int t = 330; t < scene.n; t++)
        for (int h = 0; h < SCENE_HEADS; h++) {
            scene_attend(&scene, (const void *)scene.k, (const void *)scene.v, t, h, &options, out);
            for (int c = 0; c < D; c++) {
                error += pow((double)scene.out[t][h * D + c] - out[c], 2);
                size += out[c] * out[c];
            }
        }
    kvc_cache_destroy(cache);
    return sqrt(error / size);
}

/* On keys with offsets and loud channels: each preset is better than the one with fewer bits, and
 * its transforms are worth having. */
static void presets_keep_their_order(void **state)
{
    static const char *const names[] = {"f16", "int8", "k6v4", "int4"};
    const struct tables *tables = *state;
    uint64_t rng = 11;

    scene_make(&scene, D, D, 400, &rng);
    for (size_t i = 0; i < tables->n; i++) {
        double before = 0;

        for (int k = 0; k < 4; k++) {
            kvc_cache_params p = params_of(0, false);
            p.recent_tokens = 0;
            assert_int_equal(kvc_cache_params_preset(&p, names[k]), KVC_OK);
            const double error = error_of(tables->ctx[i], &p);
            p.transform = 0;
            p.online_pages = 0;
            const double raw = error_of(tables->ctx[i], &p);
            print_message("%s: %.5f, without transforms %.5f\n", names[k], error, raw);
            assert_true(error > before && error < 0.5);
            /* k6v4: most of it is the error of V in four bits */
            assert_true(k == 0 ? error < 1e-3 : error < (k == 2 ? 1.0 : 0.7) * raw);
            before = error;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_engine_may_rotate_keys_itself),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(batches_change_no_bit),
        cmocka_unit_test(tables_agree_on_scores),
        cmocka_unit_test(a_bad_query_spoils_only_its_row),
        cmocka_unit_test(dull_channels_are_measured_too),
        cmocka_unit_test(extreme_vectors_make_no_nan),
        cmocka_unit_test(strict_refuses_what_came),
        cmocka_unit_test(six_bits_are_for_keys_by_token),
        cmocka_unit_test(all_head_sizes_are_attended),
        cmocka_unit_test(presets_keep_their_order),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
