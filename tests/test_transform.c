/* Public API of cache.h: transforms with vectors that are given. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/half.h"
#include "support/tables.h"
#include "support/transform_scene.h"

static struct scene scene;

enum {
    K = KVC_TRANSFORM_ROTATE_K,
    V = KVC_TRANSFORM_ROTATE_V,
    IN = KVC_TRANSFORM_K_ROTATED,
};

/* Each kind of transform, in head sizes with all sorts of blocks. */
struct kind {
    uint32_t flags;
    bool mean, scale;
    int d_k, d_v;
};

static const struct kind kinds[] = {
    {0, false, false, 64, 64},     {K, false, false, 64, 32},   {V, false, false, 32, 64},
    {K | V, false, false, 80, 96}, {0, true, false, 24, 40},    {0, false, true, 64, 8},
    {0, true, true, 72, 72},       {K, true, false, 64, 64},    {K, false, true, 16, 64},
    {K | V, true, true, 64, 64},   {K | V, true, true, 80, 24}, {K | V, true, true, 7, 1},
    {K | V, true, true, 96, 96},   {IN, false, false, 64, 64},  {IN | V, true, true, 64, 64},
    {IN, true, true, 48, 8},
};
static const size_t n_kinds = sizeof(kinds) / sizeof(*kinds);

static kvc_cache_params params_of(const struct kind *kind)
{
    kvc_cache_params p = scene_params(&scene, kind->flags);
    p.k_mean = kind->mean ? scene.mean : NULL;
    p.k_scale = kind->scale ? scene.scale : NULL;
    return p;
}

/* What an engine that rotates gives: H K and H Q, as halves. */
static void rotate_inputs(void)
{
    for (int t = 0; t < scene.n; t++) {
        for (int h = 0; h < SCENE_KV_HEADS; h++)
            scene_rotate(scene.k[t] + h * scene.d_k, scene.d_k);
        for (int h = 0; h < SCENE_HEADS; h++)
            scene_rotate(scene.q[t] + h * scene.d_k, scene.d_k);
        for (int i = 0; i < SCENE_KV_HEADS * scene.d_k; i++)
            scene.k[t][i] = half_round(scene.k[t][i]);
    }
}

/* K and V are rounded to halves of about 2^-11 of the row's largest element, in the rotated domain:
 * logits of |q| about 10 then move by 0.02 at most, outputs of weighted halves by 0.01. */
static void check_outputs(const kvc_attend_options *options)
{
    static double out[SCENE_D];
    for (int t = 0; t < scene.n; t += 7)
        for (int h = 0; h < SCENE_HEADS; h++) {
            const double lse = scene_attend(&scene, (const void *)scene.k, (const void *)scene.v, t,
                                            h, options, out);
            assert_true(fabs((double)scene.lse[t][h] - lse) < 0.02);
            for (int c = 0; c < scene.d_v; c++)
                assert_true(fabs((double)scene.out[t][h * scene.d_v + c] - out[c]) < 0.02);
        }
}

static void attention_is_that_of_the_rows_that_came(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 1;

    for (size_t i = 0; i < tables->n; i++)
        for (size_t k = 0; k < n_kinds; k++) {
            scene_make(&scene, kinds[k].d_k, kinds[k].d_v, 150, &rng);
            if (kinds[k].flags & IN)
                rotate_inputs();
            kvc_cache *cache = scene_open(tables->ctx[i], params_of(&kinds[k]));
            kvc_attend_options options;
            kvc_seq seq;
            kvc_attend_options_default(cache, &options);
            options.window = k % 3 == 1 ? 60 : 0;
            options.softcap = k % 2 ? 4.0f : 0.0f;
            assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
            scene_feed(&scene, cache, seq, 0, scene.n, 1 + (int)(k % 5) * 20, &options);
            check_outputs(&options);
            kvc_cache_destroy(cache);
        }
}

/* The row of a head as docs/formats.md makes it, in float. */
static void stored_row(const struct kind *kind, const float *x, const float *mean,
                       const float *scale, int d, bool is_k, uint16_t *out)
{
    const bool vectors = kind->mean || kind->scale;
    float y[SCENE_D];
    for (int c = 0; c < d; c++)
        y[c] = half_round(x[c]);
    if (is_k && kind->flags & IN && vectors)
        scene_rotate(y, d);
    for (int c = 0; is_k && vectors && c < d; c++) {
        y[c] = y[c] - (kind->mean ? mean[c] : 0.0f);
        y[c] = y[c] * (1.0f / (kind->scale ? scale[c] : 1.0f));
    }
    if (is_k ? kind->flags & K || (kind->flags & IN && vectors) : kind->flags & V)
        scene_rotate(y, d);
    for (int c = 0; c < d; c++)
        out[c] = half_from_float(y[c]);
}

static void stored_halves_are_those_of_the_formula(void **state)
{
    const struct tables *tables = *state;
    static uint16_t page[64 * 2 * SCENE_D + 64];
    uint64_t rng = 2;

    for (size_t i = 0; i < tables->n; i++)
        for (size_t k = 0; k < n_kinds; k++) {
            scene_make(&scene, kinds[k].d_k, kinds[k].d_v, 4 + 64, &rng);
            kvc_cache *cache = scene_open(tables->ctx[i], params_of(&kinds[k]));
            const int d8 = (scene.d_k + 7) / 8 * 8, v8 = (scene.d_v + 7) / 8 * 8;
            kvc_page_info info = {.struct_size = sizeof(info)};
            kvc_seq seq;
            assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
            scene_feed(&scene, cache, seq, 0, scene.n, 30, NULL);
            for (int l = 0; l < SCENE_LAYERS; l++)
                for (int h = 0; h < SCENE_KV_HEADS; h++) {
                    const size_t at = (size_t)(l * SCENE_KV_HEADS + h) * (size_t)scene.d_k;
                    uint16_t want[SCENE_D];
                    assert_int_equal(
                        kvc_seq_read_page(cache, seq, l, h, 0, &info, NULL, page, sizeof(page)),
                        KVC_OK);
                    for (int r = 0; r < 64; r++) {
                        stored_row(&kinds[k], scene.k[4 + r] + h * scene.d_k, scene.mean + at,
                                   scene.scale + at, scene.d_k, true, want);
                        assert_memory_equal(page + r * d8, want, 2 * (size_t)scene.d_k);
                        stored_row(&kinds[k], scene.v[4 + r] + h * scene.d_v, NULL, NULL, scene.d_v,
                                   false, want);
                        assert_memory_equal(page + 64 * d8 + r * v8, want, 2 * (size_t)scene.d_v);
                    }
                }
            kvc_cache_destroy(cache);
        }
}

/* To a few roundings of a half, of the largest element that the row has on its way. */
static void rows_are_read_back_as_they_came(void **state)
{
    const struct tables *tables = *state;
    static float k_rows[SCENE_TOKENS * SCENE_D], v_rows[SCENE_TOKENS * SCENE_D];
    uint64_t rng = 3;

    for (size_t k = 0; k < n_kinds; k++) {
        scene_make(&scene, kinds[k].d_k, kinds[k].d_v, 100, &rng);
        if (kinds[k].flags & IN)
            rotate_inputs();
        kvc_cache *cache = scene_open(tables->ctx[k % tables->n], params_of(&kinds[k]));
        kvc_seq seq;
        size_t n;
        assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
        scene_feed(&scene, cache, seq, 0, scene.n, 33, NULL);
        for (int h = 0; h < SCENE_KV_HEADS; h++) {
            assert_int_equal(
                kvc_seq_read_rows(cache, seq, 1, h, SCENE_TOKENS, NULL, k_rows, v_rows, NULL, &n),
                KVC_OK);
            assert_int_equal(n, scene.n);
            for (int t = 0; t < scene.n; t++) {
                for (int c = 0; c < scene.d_k; c++)
                    assert_true(fabsf(k_rows[t * scene.d_k + c] - scene.k[t][h * scene.d_k + c]) <
                                0.03f);
                for (int c = 0; c < scene.d_v; c++)
                    assert_true(fabsf(v_rows[t * scene.d_v + c] - scene.v[t][h * scene.d_v + c]) <
                                0.005f);
            }
        }
        kvc_cache_destroy(cache);
    }
}

static void query_rows_are_read_back_as_they_came(void **state)
{
    const struct tables *tables = *state;
    static float q[16 * SCENE_HEADS * SCENE_D];
    int64_t ordinals[16];
    uint64_t rng = 4;
    kvc_seq seq;
    size_t n;

    scene_make(&scene, 64, 64, 40, &rng);
    const struct kind kind = {K | V, true, true, 64, 64};
    kvc_cache *cache = scene_open(tables->ctx[0], params_of(&kind));
    assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
    scene_feed(&scene, cache, seq, 0, scene.n, 33, NULL);
    assert_int_equal(kvc_seq_read_probes(cache, seq, 0, ordinals, q, &n), KVC_OK);
    assert_int_equal(n, 16);
    for (size_t i = 0; i < n; i++)
        assert_memory_equal(q + i * SCENE_HEADS * 64, scene.q[ordinals[i]],
                            SCENE_HEADS * 64 * sizeof(float));
    kvc_cache_destroy(cache);
}

/* The masses of attention, and those of the kept query rows, are what they were. */
static void scores_are_those_of_the_rows_that_came(void **state)
{
    const struct tables *tables = *state;
    static float scores[2][2][SCENE_TOKENS];
    uint64_t rng = 5;
    size_t n = 0;

    scene_make(&scene, 64, 64, 200, &rng);
    for (size_t i = 0; i < tables->n; i++) {
        for (int which = 0; which < 2; which++) {
            const struct kind kind = {which ? K | V : 0, which, which, 64, 64};
            kvc_cache_params p = params_of(&kind);
            kvc_attend_options options;
            kvc_seq seq;
            p.score_mode = KVC_SCORE_TOKEN;
            kvc_cache *cache = scene_open(tables->ctx[i], p);
            kvc_attend_options_default(cache, &options);
            options.accumulate = true;
            options.softcap = 5.0f;
            assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
            scene_feed(&scene, cache, seq, 0, scene.n, 50, &options);
            assert_int_equal(kvc_seq_read_rows(cache, seq, 1, 1, SCENE_TOKENS, NULL, NULL, NULL,
                                               scores[which][0], &n),
                             KVC_OK);
            assert_int_equal(
                kvc_seq_score_rows(cache, seq, 1, 1, SCENE_TOKENS, scores[which][1], &n), KVC_OK);
            kvc_cache_destroy(cache);
        }
        assert_int_equal(n, scene.n);
        for (size_t t = 0; t < n; t++)
            for (int kind = 0; kind < 2; kind++)
                assert_true(fabsf(scores[0][kind][t] - scores[1][kind][t]) <
                            0.01f * (0.1f + scores[0][kind][t]));
    }
}

static void codes_follow_from_the_transformed_halves(void **state)
{
    static const kvc_format formats[3] = {KVC_INT8, KVC_INT4, KVC_INT6};
    const struct tables *tables = *state;
    static uint8_t pages[2][16384];
    uint64_t rng = 6;

    for (size_t i = 0; i < tables->n; i++)
        for (int f = 0; f < 3; f++) {
            scene_make(&scene, 64, 64, 4 + 64 + 70, &rng);
            for (int which = 0; which < 2; which++) {
                const struct kind kind = {which ? 0 : K | V, !which, !which, 64, 64};
                kvc_cache_params p = params_of(&kind);
                kvc_page_info info = {.struct_size = sizeof(info)};
                kvc_seq seq;
                p.recent_tokens = 0;
                p.precision.k = formats[f];
                p.precision.v = f == 2 ? KVC_INT4 : formats[f];
                kvc_cache *cache = scene_open(tables->ctx[i], p);
                assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
                if (which) /* the same rows, transformed here */
                    for (int t = 0; t < scene.n; t++)
                        for (int h = 0; h < SCENE_KV_HEADS; h++) {
                            const struct kind all = {K | V, true, true, 64, 64};
                            const size_t at = (size_t)(SCENE_KV_HEADS + h) * 64;
                            uint16_t half[64];
                            stored_row(&all, scene.k[t] + h * 64, scene.mean + at, scene.scale + at,
                                       64, true, half);
                            for (int c = 0; c < 64; c++)
                                scene.k[t][h * 64 + c] = (float)half_value(half[c]);
                            stored_row(&all, scene.v[t] + h * 64, NULL, NULL, 64, false, half);
                            for (int c = 0; c < 64; c++)
                                scene.v[t][h * 64 + c] = (float)half_value(half[c]);
                        }
                scene_feed(&scene, cache, seq, 0, scene.n, 64, NULL);
                assert_int_equal(kvc_seq_settle(cache, seq), KVC_OK);
                memset(pages[which], 0, sizeof(pages[which]));
                assert_int_equal(kvc_seq_read_page(cache, seq, 1, 1, 0, &info, NULL, pages[which],
                                                   sizeof(pages[which])),
                                 KVC_OK);
                assert_true(info.sealed && info.precision.k == formats[f]);
                kvc_cache_destroy(cache);
            }
            assert_memory_equal(pages[0], pages[1], sizeof(pages[0]));
        }
}

static void vectors_are_told(void **state)
{
    const struct tables *tables = *state;
    float mean[64], scale[64];
    uint64_t rng = 7;
    bool ready = false;

    scene_make(&scene, 64, 64, 8, &rng);
    for (int which = 0; which < 4; which++) {
        const struct kind kind = {K, which & 1, which & 2, 64, 64};
        float given_mean[SCENE_LAYERS * SCENE_KV_HEADS * 64];
        float given_scale[SCENE_LAYERS * SCENE_KV_HEADS * 64];
        kvc_cache_params p = params_of(&kind);
        memcpy(given_mean, scene.mean, sizeof(given_mean));
        memcpy(given_scale, scene.scale, sizeof(given_scale));
        p.k_mean = kind.mean ? given_mean : NULL;
        p.k_scale = kind.scale ? given_scale : NULL;
        p.online_pages = which ? 4 : 0; /* what is given wins */
        kvc_cache *cache = scene_open(tables->ctx[0], p);
        memset(given_mean, 0xff, sizeof(given_mean)); /* they were copied */
        memset(given_scale, 0xff, sizeof(given_scale));
        assert_int_equal(kvc_cache_read_transform(cache, 1, 1, mean, scale, &ready), KVC_OK);
        assert_true(ready);
        for (int c = 0; c < 64; c++) {
            assert_true(mean[c] == (kind.mean ? scene.mean[3 * 64 + c] : 0.0f));
            assert_true(scale[c] == (kind.scale ? scene.scale[3 * 64 + c] : 1.0f));
        }
        assert_int_equal(kvc_cache_read_transform(cache, 0, 0, NULL, NULL, &ready), KVC_OK);
        assert_int_equal(kvc_cache_read_transform(cache, 2, 0, NULL, NULL, &ready), KVC_E_ARG);
        assert_int_equal(kvc_cache_read_transform(cache, 0, 2, NULL, NULL, &ready), KVC_E_ARG);
        assert_int_equal(kvc_cache_read_transform(cache, 0, 0, NULL, NULL, NULL), KVC_E_ARG);
        assert_int_equal(kvc_cache_read_transform(NULL, 0, 0, NULL, NULL, &ready), KVC_E_ARG);
        kvc_cache_destroy(cache);
    }
}

static void wrong_transforms_are_refused(void **state)
{
    static const float bad[] = {0.0f, -1.0f, 1e-45f};
    const struct tables *tables = *state;
    uint64_t rng = 8;

    scene_make(&scene, 64, 64, 8, &rng);
    for (int i = 0; i < 13; i++) {
        const struct kind kind = {K | V, true, true, 64, 64};
        kvc_cache_params p = params_of(&kind);
        kvc_cache *cache = (kvc_cache *)&p;
        const float mean = scene.mean[77], scale = scene.scale[77];
        size_t bytes = 0;
        switch (i) {
        case 0: p.transform = 8; break;
        case 1: p.transform = 1u << 31; break;
        case 2: p.transform = K | IN; break;
        case 3: p.online_pages = -1; break;
        case 4: p.online_pages = 65; break;
        case 5: scene.mean[77] = NAN; break;
        case 6: scene.mean[77] = INFINITY; break;
        case 7: scene.scale[77] = NAN; break;
        case 11: scene.mean[77] = -65536; break; /* no half */
        case 12: scene.mean[77] = 1, scene.scale[77] = 9e-31f; break;
        default: scene.scale[77] = bad[i - 8];
        }
        assert_int_equal(kvc_cache_min_budget(&p, &bytes), KVC_E_ARG);
        p.budget_bytes = 1 << 26;
        assert_int_equal(kvc_cache_create(tables->ctx[0], &p, &cache), KVC_E_ARG);
        assert_null(cache);
        scene.mean[77] = mean;
        scene.scale[77] = scale;
    }
}

static void presets_set_how_rows_are_stored(void **state)
{
    static const struct {
        const char *name;
        kvc_format k, v;
        kvc_scale k_scale;
        bool transforms;
    } want[] = {
        {"f16", KVC_F16, KVC_F16, KVC_SCALE_TOKEN, false},
        {"int8", KVC_INT8, KVC_INT8, KVC_SCALE_TOKEN, true},
        {"int4", KVC_INT4, KVC_INT4, KVC_SCALE_TOKEN, true},
        {"k6v4", KVC_INT6, KVC_INT4, KVC_SCALE_TOKEN, true},
        {"int4-raw", KVC_INT4, KVC_INT4, KVC_SCALE_CHANNEL, false},
    };
    kvc_cache_params p, q;

    (void)state;
    for (size_t i = 0; i < sizeof(want) / sizeof(*want); i++) {
        kvc_cache_params_default(&p);
        p.transform = 5, p.online_pages = 7, p.n_layers = 3, p.recent_tokens = 1;
        assert_int_equal(kvc_cache_params_preset(&p, want[i].name), KVC_OK);
        assert_true(p.precision.k == want[i].k && p.precision.v == want[i].v);
        assert_true(p.precision.k_scale == want[i].k_scale &&
                    p.precision.v_scale == KVC_SCALE_TOKEN);
        assert_int_equal(p.transform, want[i].transforms ? (unsigned)(K | V) : 0u);
        assert_int_equal(p.online_pages, want[i].transforms ? 4 : 0);
        assert_true(p.n_layers == 3 && p.recent_tokens == 1 && !p.k_mean && !p.k_scale);
    }
    q = p;
    assert_int_equal(kvc_cache_params_preset(&p, "int3"), KVC_E_ARG);
    assert_int_equal(kvc_cache_params_preset(&p, NULL), KVC_E_ARG);
    assert_int_equal(kvc_cache_params_preset(NULL, "int4"), KVC_E_ARG);
    p.struct_size = q.struct_size = offsetof(kvc_cache_params, online_pages);
    assert_int_equal(kvc_cache_params_preset(&p, "int4"), KVC_E_ARG);
    assert_memory_equal(&p, &q, sizeof(p));
}

/* NaN and Inf are replaced before: they cannot spread over a row. */
static void a_bad_element_stays_alone(void **state)
{
    const struct tables *tables = *state;
    static float k_rows[SCENE_TOKENS * 64];
    uint64_t rng = 9;

    for (size_t i = 0; i < tables->n; i++) {
        const struct kind kind = {K | V, true, true, 64, 64};
        kvc_stats stats = {.struct_size = sizeof(stats)};
        kvc_seq seq;
        size_t n;
        scene_make(&scene, 64, 64, 30, &rng);
        scene.k[10][5] = NAN;
        scene.v[12][6] = INFINITY;
        kvc_cache *cache = scene_open(tables->ctx[i], params_of(&kind));
        assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
        scene_feed(&scene, cache, seq, 0, scene.n, 8, NULL);
        assert_int_equal(kvc_cache_stats(cache, &stats), KVC_OK);
        assert_int_equal(stats.n_nonfinite, 2 * SCENE_LAYERS);
        assert_int_equal(stats.n_saturated, 0);
        assert_int_equal(
            kvc_seq_read_rows(cache, seq, 0, 0, SCENE_TOKENS, NULL, k_rows, NULL, NULL, &n),
            KVC_OK);
        for (int c = 0; c < 64; c++)
            assert_true(fabsf(k_rows[10 * 64 + c] - (c == 5 ? 0.0f : scene.k[10][c])) < 0.03f);
        for (int t = 0; t < scene.n; t++)
            for (int c = 0; c < SCENE_HEADS * 64; c++)
                assert_true(isfinite(scene.out[t][c]));
        kvc_cache_destroy(cache);
    }
}

/* What H makes larger than a half is saturated and counted. */
static void what_no_half_holds_saturates(void **state)
{
    const struct tables *tables = *state;
    uint64_t rng = 10;
    kvc_stats stats = {.struct_size = sizeof(stats)};
    kvc_seq seq;

    scene_make(&scene, 64, 64, 10, &rng);
    for (int c = 0; c < 64; c++)
        scene.k[5][c] = 60000.0f; /* H: 8 times that in one element */
    const struct kind kind = {K, false, false, 64, 64};
    kvc_cache *cache = scene_open(tables->ctx[0], params_of(&kind));
    assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
    scene_feed(&scene, cache, seq, 0, scene.n, 8, NULL);
    assert_int_equal(kvc_cache_stats(cache, &stats), KVC_OK);
    assert_int_equal(stats.n_saturated, SCENE_LAYERS);
    kvc_cache_destroy(cache);
}

/* fault D14: one channel of 100 among 127 of at most 0.5 takes the scale of its group of 64, whose
 * other channels vanish, and no other's; with its mean taken off, nothing is lost. Queries up to 30
 * give no NaN, and the error is told. */
static void an_outlier_channel_silences_no_others(void **state)
{
    enum { SIZE = 128, N = 4 + 64 + 8 };
    const struct tables *tables = *state;
    static float k[N][SIZE], v[N][SIZE], q[N][SIZE], out[N][SIZE], rows[N * SIZE], mean[SIZE];
    uint64_t rng = 11;

    for (int t = 0; t < N; t++)
        for (int c = 0; c < SIZE; c++) {
            k[t][c] = c == 0 ? 100.0f : rng_unit(&rng) / 2;
            v[t][c] = rng_unit(&rng);
            q[t][c] = 30 * rng_unit(&rng);
        }
    mean[0] = 100.0f;
    for (size_t i = 0; i < 2 * tables->n; i++) {
        const bool centred = i % 2;
        kvc_layer_report layer;
        kvc_report report = {.struct_size = sizeof(report), .layers = &layer, .n_layers = 1};
        kvc_policy policy;
        kvc_cache_params p;
        kvc_seq seq;
        size_t n;
        kvc_cache_params_default(&p);
        p.n_layers = p.n_heads = p.n_kv_heads = 1;
        p.head_dim_k = p.head_dim_v = SIZE;
        p.recent_tokens = 0;
        p.precision.k = KVC_INT4;
        p.k_mean = centred ? mean : NULL;
        kvc_cache *cache = scene_open(tables->ctx[i / 2], p);
        const kvc_view kv = kvc_view_packed(k, KVC_DTYPE_F32, N, 1, SIZE);
        const kvc_view vv = kvc_view_packed(v, KVC_DTYPE_F32, N, 1, SIZE);
        const kvc_view qv = kvc_view_packed(q, KVC_DTYPE_F32, N, 1, SIZE);
        const kvc_view ov = kvc_view_packed(out, KVC_DTYPE_F32, N, 1, SIZE);
        assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
        assert_int_equal(kvc_tokens_add(cache, seq, NULL, N), KVC_OK);
        assert_int_equal(kvc_append(cache, seq, 0, &kv, &vv), KVC_OK);
        assert_int_equal(kvc_attend(cache, seq, 0, &qv, NULL, &ov, NULL), KVC_OK);
        kvc_policy_default(&policy);
        assert_int_equal(kvc_cache_compress(cache, seq, &policy, &report, NULL), KVC_OK);
        assert_true(layer.rel_err > 0.0 && isfinite(layer.rel_err));
        assert_int_equal(kvc_attend(cache, seq, 0, &qv, NULL, &ov, NULL), KVC_OK);
        assert_int_equal(kvc_seq_read_rows(cache, seq, 0, 0, N, NULL, rows, NULL, NULL, &n),
                         KVC_OK);
        for (int t = 4; t < 4 + 64; t++)
            for (int c = 0; c < SIZE; c++) {
                const float is = rows[t * SIZE + c], error = fabsf(is - k[t][c]);
                if (c == 0)
                    assert_true(error < 0.1f);
                else if (c < 64 && !centred)
                    assert_true(is == 0.0f);
                else
                    assert_true(error <= 0.0626f); /* half a step, or one at the other end */
                assert_true(isfinite(out[t][c]));
            }
        kvc_cache_destroy(cache);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_is_that_of_the_rows_that_came),
        cmocka_unit_test(stored_halves_are_those_of_the_formula),
        cmocka_unit_test(rows_are_read_back_as_they_came),
        cmocka_unit_test(query_rows_are_read_back_as_they_came),
        cmocka_unit_test(scores_are_those_of_the_rows_that_came),
        cmocka_unit_test(codes_follow_from_the_transformed_halves),
        cmocka_unit_test(vectors_are_told),
        cmocka_unit_test(wrong_transforms_are_refused),
        cmocka_unit_test(presets_set_how_rows_are_stored),
        cmocka_unit_test(a_bad_element_stays_alone),
        cmocka_unit_test(what_no_half_holds_saturates),
        cmocka_unit_test(an_outlier_channel_silences_no_others),
    };
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
