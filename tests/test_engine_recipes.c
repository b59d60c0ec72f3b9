/* Recipes by name, calibrations from files, and K and V through codes before a cache; no model is
 * needed. */
#define _POSIX_C_SOURCE 200809L /* mkdtemp() */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include <kvc/smooth.h>

#include "article.h"
#include "file.h"
#include "recode.h"
#include "support/rng.h"

enum {
    LAYERS = 2,
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 16,
    KV = KV_HEADS * DIM,
    VECTORS = LAYERS * KV,
    GROUP = HEADS / KV_HEADS, /* query heads of a KV head */
    Q = HEADS * DIM,
    SEEN = 5,    /* rows of an observation */
    TEXT = 600,  /* tokens for the article, more than its window */
    WINDOW = 512 /* of the article */
};

static const struct model_shape shape = {
    .n_layers = LAYERS, .n_heads = HEADS, .n_kv_heads = KV_HEADS, .head_dim = DIM};
static kvc_ctx *ctx;
static char folder[] = "/tmp/kvc-recipes-XXXXXX";

static int open_all(void **state)
{
    (void)state;
    return kvc_ctx_create(NULL, &ctx) != KVC_OK || !mkdtemp(folder);
}

static int close_all(void **state)
{
    (void)state;
    kvc_ctx_destroy(ctx);
    return rmdir(folder); /* each test takes its files away */
}

static struct recipe parse(const char *text)
{
    struct failure failure;
    struct recipe recipe;

    if (!recipe_parse(text, &recipe, &failure))
        fail_msg("%s", failure.text);
    return recipe;
}

/* ---- names ---- */

static void presets_are_what_the_library_says(void **state)
{
    enum { BOTH = KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_ROTATE_V, T = KVC_SCALE_TOKEN };
    static const struct {
        const char *name;
        kvc_format k, v;
        uint32_t transform;
        bool has_vectors;
    } presets[] = {
        {"f16", KVC_F16, KVC_F16, 0, false},        {"int8", KVC_INT8, KVC_INT8, BOTH, true},
        {"int4", KVC_INT4, KVC_INT4, BOTH, true},   {"k6v4", KVC_INT6, KVC_INT4, BOTH, true},
        {"k8v4", KVC_INT8, KVC_INT4, BOTH, true},   {"k4v8", KVC_INT4, KVC_INT8, BOTH, true},
        {"int4-raw", KVC_INT4, KVC_INT4, 0, false},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(presets) / sizeof(*presets); i++) {
        const struct recipe r = parse(presets[i].name);
        const bool is_raw = strcmp(r.name, "int4-raw") == 0;
        assert_string_equal(r.name, presets[i].name);
        assert_int_equal(r.precision.k, presets[i].k);
        assert_int_equal(r.precision.v, presets[i].v);
        if (presets[i].k != KVC_F16)
            assert_int_equal(r.precision.k_scale, is_raw ? KVC_SCALE_CHANNEL : KVC_SCALE_TOKEN);
        assert_int_equal(r.precision.v_scale, T);
        assert_int_equal(r.transform, presets[i].transform);
        assert_true(r.has_mean == presets[i].has_vectors);
        assert_true(r.has_scale == presets[i].has_vectors);
        assert_true(!r.imm && !r.online && r.article == ARTICLE_NONE);
        assert_true(r.recent == -1 && r.sinks == -1);
    }
}

static void each_step_is_dropped_alone(void **state)
{
    const struct recipe whole = parse("int4");
    static const char *const steps[] = {"int4:-mean", "int4:-scale", "int4:-hk", "int4:-hv"};

    (void)state;
    for (int i = 0; i < 4; i++) {
        const struct recipe r = parse(steps[i]);
        assert_true(r.has_mean == (i != 0));
        assert_true(r.has_scale == (i != 1));
        assert_true(!(r.transform & KVC_TRANSFORM_ROTATE_K) == (i == 2));
        assert_true(!(r.transform & KVC_TRANSFORM_ROTATE_V) == (i == 3));
        assert_memory_equal(&r.precision, &whole.precision, sizeof(r.precision));
    }
    const struct recipe none = parse("int4:-mean:-scale:-hk:-hv"), plain = parse("int4:plain");
    assert_true(!none.has_mean && !none.has_scale && none.transform == 0);
    assert_true(!plain.has_mean && !plain.has_scale && plain.transform == 0);
}

static void changes_join(void **state)
{
    const struct recipe r = parse("k6v4:online:r128:s0:-hv:imm"), head = parse("int8:head");
    const struct recipe channel = parse("int8:channel"), window = parse("int4:window:s64");

    (void)state;
    assert_true(r.online && r.imm && r.recent == 128 && r.sinks == 0);
    assert_int_equal(r.transform, KVC_TRANSFORM_ROTATE_K);
    assert_true(head.precision.k_scale == KVC_SCALE_HEAD && head.transform == 0);
    assert_true(head.precision.v_scale == KVC_SCALE_HEAD && !head.has_mean && !head.has_scale);
    assert_true(channel.precision.k_scale == KVC_SCALE_CHANNEL);
    assert_true(channel.precision.v_scale == KVC_SCALE_TOKEN);
    assert_true(window.article == ARTICLE_WINDOW && window.sinks == 64 && window.transform == 0);
}

static void refuses_what_is_no_recipe(void **state)
{
    static const char *const wrong[] = {
        "",
        "int5",
        "INT4",
        "int4 ",
        "int4:",
        "int4::r0",
        "int4:nothing",
        "int4:r",
        "int4:r-1",
        "int4:r1x",
        "int4:s+1",
        "int4:r1000001",
        "f16:window",
        "k6v4:global",
        "int4-raw:-hv",
        "f16:-mean",
        "int4:-",
        "int4:--mean",
        "int4:plain:-hk",
        "int4:-mean:-mean",
        "int4:head:-scale",
        "int8:global:imm",
        "int8:imm:window",
        "int4:r99999999999999999999",
        "int4:-mean:-scale:-hk:-hv:online:imm:r1000", /* longer than a name */
    };
    struct failure failure;
    struct recipe recipe;

    (void)state;
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        failure.text[0] = '\0';
        if (recipe_parse(wrong[i], &recipe, &failure))
            fail_msg("\"%s\" passed", wrong[i]);
        assert_true(failure.text[0] != '\0');
    }
}

/* ---- caches ---- */

static float mean[VECTORS], scale[VECTORS], whole_scale[VECTORS];

static const struct calibration calibrated = {
    .path = "here", .mean = mean, .scale = scale, .whole_scale = whole_scale};

static kvc_cache_params apply(const char *text, const struct calibration *calibration)
{
    const struct recipe recipe = parse(text);
    struct failure failure;
    kvc_cache_params p;

    kvc_cache_params_default(&p);
    p.recent_tokens = 7;
    p.sink_tokens = 3;
    if (!recipe_apply(&recipe, calibration, &p, &failure))
        fail_msg("%s", failure.text);
    return p;
}

static void vectors_come_from_the_calibration(void **state)
{
    const kvc_cache_params whole = apply("int4", &calibrated);
    const kvc_cache_params no_mean = apply("int4:-mean", &calibrated);
    const kvc_cache_params no_scale = apply("int4:-scale", &calibrated);
    const kvc_cache_params plain = apply("int4:plain", &calibrated);

    (void)state;
    assert_true(whole.k_mean == mean && whole.k_scale == scale && whole.online_pages == 0);
    /* what is not centred has another balance */
    assert_true(no_mean.k_mean == NULL && no_mean.k_scale == whole_scale);
    assert_true(no_scale.k_mean == mean && no_scale.k_scale == NULL);
    assert_true(plain.k_mean == NULL && plain.k_scale == NULL && plain.online_pages == 0);
    assert_int_equal(whole.transform, KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_ROTATE_V);
}

static void vectors_are_measured_where_there_is_no_calibration(void **state)
{
    static const struct calibration none;
    const struct calibration *const calibrations[] = {NULL, &none, &calibrated};
    static const char *const texts[] = {"int4", "int4", "int4:online"};

    (void)state;
    for (int i = 0; i < 3; i++) {
        const kvc_cache_params p = apply(texts[i], calibrations[i]);
        assert_true(p.k_mean == NULL && p.k_scale == NULL && p.online_pages == 4);
    }
    assert_int_equal(apply("int4:-mean:-scale", NULL).online_pages, 0);
    assert_int_equal(apply("int4:plain:online", NULL).online_pages, 0);
}

/* A cache measures both or neither: the row would have what its name says it lacks. */
static void one_vector_alone_is_not_measured(void **state)
{
    static const char *const texts[] = {"int4:-mean", "int8:-scale", "int4:-mean:imm"};
    const struct recipe online = parse("int4:online:-mean");
    struct failure failure;
    kvc_cache_params p;

    (void)state;
    for (int i = 0; i < 3; i++) {
        const struct recipe recipe = parse(texts[i]);
        struct recoder *recoder;
        kvc_cache_params_default(&p);
        if (recipe.imm)
            assert_false(recoder_create(ctx, &shape, &recipe, NULL, &recoder, &failure));
        else
            assert_false(recipe_apply(&recipe, NULL, &p, &failure));
        assert_non_null(strstr(failure.text, "calibration"));
    }
    assert_false(recipe_apply(&online, &calibrated, &p, &failure));
}

static void what_a_recipe_does_not_say_stays(void **state)
{
    const kvc_cache_params as_is = apply("int4", &calibrated);
    const kvc_cache_params own = apply("int4:r0:s64", &calibrated);
    const kvc_cache_params imm = apply("int4:imm", &calibrated);

    (void)state;
    assert_true(as_is.recent_tokens == 7 && as_is.sink_tokens == 3);
    assert_true(own.recent_tokens == 0 && own.sink_tokens == 64);
    /* coded before: the cache must not code again */
    assert_true(imm.precision.k == KVC_F16 && imm.precision.v == KVC_F16);
    assert_true(imm.transform == 0 && imm.k_mean == NULL && imm.online_pages == 0);
}

/* ---- calibrations ---- */

static void a_calibration_lies_beside_its_model(void **state)
{
    static const char *const paths[][2] = {
        {"m.gguf", "m.kvcal"},
        {"a.b/m.Q4_1.gguf", "a.b/m.Q4_1.kvcal"},
        {"a.b/model", "a.b/model.kvcal"},
        {"m", "m.kvcal"},
    };
    char path[32], exact[8];
    struct failure failure;

    (void)state;
    for (size_t i = 0; i < sizeof(paths) / sizeof(*paths); i++) {
        assert_true(calibration_path(paths[i][0], path, sizeof(path), &failure));
        assert_string_equal(path, paths[i][1]);
    }
    assert_true(calibration_path("m.gguf", exact, sizeof(exact), &failure));
    assert_false(calibration_path("mm.gguf", exact, sizeof(exact), &failure));
}

static float keys[LAYERS][SEEN][KV], queries[LAYERS][SEEN][Q];

/* Channels of very different size, and a mean that is not zero. */
static void draw_rows(void)
{
    uint64_t rng = 5;

    for (size_t l = 0; l < LAYERS; l++)
        for (size_t t = 0; t < SEEN; t++) {
            for (size_t i = 0; i < KV; i++)
                keys[l][t][i] = (float)(1 + i % 7) * (0.5f + rng_unit(&rng));
            for (size_t i = 0; i < Q; i++)
                queries[l][t][i] = (float)(1 + i % 5) * rng_unit(&rng);
        }
}

static void save_observation(const char *path, int32_t n_layers)
{
    const kvc_observed_shape seen = {sizeof(seen), n_layers, HEADS, KV_HEADS, DIM};
    kvc_observation *observation;
    unsigned char bytes[16384];
    struct failure failure;

    assert_int_equal(kvc_observation_create(ctx, &seen, &observation), KVC_OK);
    for (int32_t l = 0; l < n_layers; l++) {
        const kvc_view k = kvc_view_packed(keys[l], KVC_DTYPE_F32, SEEN, KV_HEADS, DIM);
        const kvc_view q = kvc_view_packed(queries[l], KVC_DTYPE_F32, SEEN, HEADS, DIM);
        assert_int_equal(kvc_observe_keys(observation, l, &k), KVC_OK);
        assert_int_equal(kvc_observe_queries(observation, l, &q), KVC_OK);
    }
    const size_t size = kvc_observation_size(observation);
    assert_true(size <= sizeof(bytes));
    assert_int_equal(kvc_observation_save(observation, bytes, size), KVC_OK);
    assert_true(file_write(path, bytes, size, &failure));
    kvc_observation_destroy(observation);
}

/* (E (k - centre)^2 / E q^2)^(1/4), over the geometric mean of the head. */
static void check_balance(size_t l, size_t head, const double *centre, const float *got)
{
    double s[DIM], logs = 0.0;

    for (size_t c = 0; c < DIM; c++) {
        double k2 = 0.0, q2 = 0.0;
        for (size_t t = 0; t < SEEN; t++) {
            const double k = (double)keys[l][t][head * DIM + c] - centre[c];
            k2 += k * k / SEEN;
            for (size_t g = 0; g < GROUP; g++) {
                const double q = (double)queries[l][t][(head * GROUP + g) * DIM + c];
                q2 += q * q / ((double)SEEN * GROUP);
            }
        }
        s[c] = pow(k2 / q2, 0.25);
        logs += log(s[c]) / DIM;
    }
    for (size_t c = 0; c < DIM; c++)
        assert_true(fabs((double)got[c] / (s[c] / exp(logs)) - 1.0) < 1e-6);
}

static void a_calibration_comes_back_from_its_file(void **state)
{
    static const double zeros[DIM];
    char model[64], path[64];
    struct calibration c;
    struct failure failure;

    (void)state;
    snprintf(model, sizeof(model), "%s/m.gguf", folder);
    snprintf(path, sizeof(path), "%s/m.kvcal", folder);
    draw_rows();
    save_observation(path, LAYERS);
    assert_true(calibration_open(NULL, model, ctx, &shape, &c, &failure));
    assert_string_equal(c.path, path);
    for (size_t l = 0; l < LAYERS; l++)
        for (size_t h = 0; h < KV_HEADS; h++) {
            const size_t at = l * KV + h * DIM;
            double centre[DIM] = {0.0};
            for (size_t i = 0; i < DIM; i++) {
                for (size_t t = 0; t < SEEN; t++)
                    centre[i] += (double)keys[l][t][h * DIM + i] / SEEN;
                assert_true(fabs((double)c.mean[at + i] - centre[i]) < 1e-6);
            }
            check_balance(l, h, centre, c.scale + at);
            check_balance(l, h, zeros, c.whole_scale + at);
        }
    calibration_close(&c);
    assert_int_equal(remove(path), 0);
}

static void without_a_file_there_is_no_calibration(void **state)
{
    char model[64], path[64];
    struct calibration c;
    struct failure failure;

    (void)state;
    snprintf(model, sizeof(model), "%s/m.gguf", folder);
    snprintf(path, sizeof(path), "%s/m.kvcal", folder);
    assert_true(calibration_open(NULL, model, ctx, &shape, &c, &failure));
    assert_true(c.mean == NULL && c.path[0] == '\0');
    assert_false(calibration_open(path, model, ctx, &shape, &c, &failure)); /* asked for */
    draw_rows();
    save_observation(path, LAYERS);
    assert_true(calibration_open("none", model, ctx, &shape, &c, &failure)); /* not wanted */
    assert_true(c.mean == NULL && c.path[0] == '\0');
    assert_int_equal(remove(path), 0);
}

static void refuses_a_calibration_of_another_model(void **state)
{
    static const unsigned char junk[] = "no observation";
    char path[64], longer[CALIBRATION_PATH + 1];
    struct calibration c;
    struct failure failure;

    (void)state;
    snprintf(path, sizeof(path), "%s/x", folder);
    draw_rows();
    save_observation(path, LAYERS - 1);
    assert_false(calibration_open(path, "m", ctx, &shape, &c, &failure));
    assert_non_null(strstr(failure.text, "another model"));
    assert_null(c.mean);
    assert_true(file_write(path, junk, sizeof(junk), &failure));
    assert_false(calibration_open(path, "m", ctx, &shape, &c, &failure));
    assert_non_null(strstr(failure.text, "no calibration"));
    assert_int_equal(remove(path), 0);
    memset(longer, 'a', CALIBRATION_PATH);
    longer[CALIBRATION_PATH] = '\0';
    assert_false(calibration_open(longer, "m", ctx, &shape, &c, &failure));
}

/* ---- K and V through codes ---- */

enum { CODED = 130, STRIDE = 3 * KV + 5, OTHERS = 2 * KV }; /* more than two pages, in wider rows */

static float wide[CODED][STRIDE], before[CODED][STRIDE];

/* Halves, so that the cache rounds nothing. */
static void draw_wide(void)
{
    uint64_t rng = 11;

    for (size_t t = 0; t < CODED; t++)
        for (size_t i = 0; i < STRIDE; i++)
            wide[t][i] = (float)(int)(64.0f * rng_unit(&rng)) * (t == 70 ? 1.0f : 0.0625f);
    memcpy(before, wide, sizeof(wide));
}

static kvc_view wide_view(size_t first_channel, size_t n_heads)
{
    kvc_view view = kvc_view_packed(&wide[0][first_channel], KVC_DTYPE_F32, CODED, n_heads, DIM);

    view.token_stride = STRIDE;
    return view;
}

/* A token and head of K or V against what its code may be: within half a step of a scale of the
 * head's own, which a half rounds by up to 2^-11. */
static void check_coded(size_t t, size_t first, double steps, bool *changed)
{
    double largest = 0.0;

    for (size_t c = 0; c < DIM; c++)
        largest = fmax(largest, fabs((double)before[t][first + c]));
    const double step = largest / steps;
    for (size_t c = 0; c < DIM; c++) {
        const double x = (double)before[t][first + c], y = (double)wide[t][first + c];
        /* INT4 has -8 but no 8: a value as large as the scale's, of the other sign, loses a step */
        const double allowed = steps == 8.0 && fabs(x) > 7.5 * step ? 1.01 * step : 0.51 * step;
        assert_true(fabs(x - y) <= allowed + largest * 0x1p-10);
        *changed |= x != y;
    }
}

static void codes_have_a_scale_a_token_and_head(void **state)
{
    static const char *const names[] = {"int8:plain:imm", "int4:plain:imm"};
    static const double steps[] = {127.0, 8.0};
    struct failure failure;
    struct recoder *recoder;

    (void)state;
    for (int i = 0; i < 2; i++) {
        const struct recipe recipe = parse(names[i]);
        bool changed = false;
        draw_wide();
        const kvc_view k = wide_view(0, KV_HEADS), v = wide_view(KV, KV_HEADS);
        const kvc_view q = wide_view(OTHERS, KV_HEADS);
        assert_true(recoder_create(ctx, &shape, &recipe, NULL, &recoder, &failure));
        const struct forward_hook hook = recoder_hook(recoder, 0);
        assert_true(hook.touch(hook.user, 1, &q, &k, &v, &failure));
        for (size_t t = 0; t < CODED; t++) {
            for (size_t h = 0; h < OTHERS / DIM; h++)
                check_coded(t, h * DIM, steps[i], &changed);
            assert_memory_equal(&wide[t][OTHERS], &before[t][OTHERS],
                                (STRIDE - OTHERS) *
                                    sizeof(float)); /* queries, and what is no row */
        }
        assert_true(changed);
        recoder_destroy(recoder);
    }
}

/* Sinks that reach into a call; the tokens behind them are coded. */
static void exact_tokens_stay_as_they_are(void **state)
{
    static const size_t n_exact[] = {1, KVC_PAGE_TOKENS - 1, CODED - 1, CODED, CODED + 9};
    const struct recipe recipe = parse("int4:plain:imm");
    struct failure failure;
    struct recoder *recoder;

    (void)state;
    assert_true(recoder_create(ctx, &shape, &recipe, NULL, &recoder, &failure));
    for (size_t i = 0; i < sizeof(n_exact) / sizeof(*n_exact); i++) {
        const size_t n = n_exact[i] < CODED ? n_exact[i] : CODED;
        draw_wide();
        const kvc_view k = wide_view(0, KV_HEADS), v = wide_view(KV, KV_HEADS);
        const struct forward_hook hook = recoder_hook(recoder, n_exact[i]);
        assert_true(hook.touch(hook.user, 1, &k, &k, &v, &failure));
        assert_memory_equal(wide, before, n * sizeof(*wide));
        for (size_t t = n; t < CODED; t++)
            assert_memory_not_equal(wide[t], before[t], OTHERS * sizeof(float));
    }
    recoder_destroy(recoder);
}

/* K = mean has nothing left to be coded; V does not know of it. */
static void codes_are_those_of_a_calibrated_cache(void **state)
{
    const struct recipe recipe = parse("int4:imm");
    struct failure failure;
    struct recoder *recoder;
    bool v_changed = false;

    (void)state;
    draw_wide();
    for (size_t i = 0; i < VECTORS; i++) {
        mean[i] = (float)(1 + i % 9);
        scale[i] = i % 2 ? 2.0f : 0.5f;
    }
    for (size_t t = 0; t < CODED; t++)
        memcpy(wide[t], mean + KV, KV * sizeof(float)); /* of the second layer */
    memcpy(before, wide, sizeof(wide));
    const kvc_view k = wide_view(0, KV_HEADS), v = wide_view(KV, KV_HEADS);
    assert_true(recoder_create(ctx, &shape, &recipe, &calibrated, &recoder, &failure));
    const struct forward_hook hook = recoder_hook(recoder, 0);
    assert_true(hook.touch(hook.user, 1, &k, &k, &v, &failure));
    for (size_t t = 0; t < CODED; t++)
        for (size_t i = 0; i < OTHERS; i++)
            if (i < KV)
                assert_true(fabsf(wide[t][i] - before[t][i]) <= 1e-5f);
            else
                v_changed |= wide[t][i] != before[t][i];
    assert_true(v_changed);
    recoder_destroy(recoder);
}

/* ---- article 002 ---- */

static float text_k[TEXT][KV], text_v[TEXT][KV], text_q[TEXT][Q];

/* The second head is a quarter of the first; tokens before the last window are four times louder.
 * The first token of each part has its largest element, @p q steps of a power of two, so that
 * halves hold what is coded. */
static void draw_text(double q)
{
    const float loudest = (float)(q > 100.0 ? q / 32.0 : q / 2.0);
    uint64_t rng = 17;

    for (size_t t = 0; t < TEXT; t++) {
        for (size_t i = 0; i < KV; i++) {
            const bool is_first = i % DIM == 0 && (t == 0 || t == TEXT - WINDOW);
            const float size =
                loudest * (i < DIM ? 1.0f : 0.25f) * (t < TEXT - WINDOW ? 1.0f : 0.25f);
            text_k[t][i] = size * (is_first ? 1.0f : rng_unit(&rng));
            text_v[t][i] = size * (is_first ? -1.0f : rng_unit(&rng));
        }
        for (size_t i = 0; i < Q; i++)
            text_q[t][i] = rng_unit(&rng);
    }
}

/* What the article divides by, seen from the last token. */
static double step_of(float rows[][KV], size_t head, enum recipe_article article, double q)
{
    const bool is_global = article == ARTICLE_GLOBAL;
    double largest = 0.0;

    for (size_t t = article == ARTICLE_WINDOW ? TEXT - WINDOW : 0; t < TEXT; t++)
        for (size_t i = 0; i < KV; i++)
            if (is_global || i / DIM == head)
                largest = fmax(largest, fabs((double)rows[t][i]));
    return largest / q;
}

static double coded(float x, double step, double q)
{
    return step * fmax(-q - 1.0, fmin(q, rint((double)x / step)));
}

/* The last token's attention of one query head, by its definition; the logits are not divided. */
static void attend_as_article(size_t q_head, enum recipe_article article, double q, double *out)
{
    const size_t at = q_head / GROUP * DIM;
    const double k_step = step_of(text_k, at / DIM, article, q);
    const double v_step = step_of(text_v, at / DIM, article, q);
    double sum = 0.0;

    memset(out, 0, DIM * sizeof(*out));
    for (size_t t = 0; t < TEXT; t++) {
        double score = 0.0;
        for (size_t c = 0; c < DIM; c++)
            score +=
                (double)text_q[TEXT - 1][q_head * DIM + c] * coded(text_k[t][at + c], k_step, q);
        sum += exp(score);
        for (size_t c = 0; c < DIM; c++)
            out[c] += exp(score) * coded(text_v[t][at + c], v_step, q);
    }
    for (size_t c = 0; c < DIM; c++)
        out[c] /= sum;
}

/* The whole text in two calls, of which the second holds the last token alone. */
static void run_article(const char *name, float *out)
{
    const struct recipe recipe = parse(name);
    static float ignored[TEXT][Q];
    kvc_attend_options options;
    struct article *article;
    struct failure failure;

    kvc_attend_options_default(NULL, &options);
    assert_true(article_create(ctx, &shape, &recipe, TEXT, &article, &failure));
    const struct forward_hook hook = article_hook(article);
    for (int again = 0; again < 2; again++) { /* a second sequence knows nothing of the first */
        article_restart(article);
        for (size_t at = 0, n = TEXT - 1; at < TEXT; at += n, n = 1) {
            const kvc_view k = kvc_view_packed(text_k[at], KVC_DTYPE_F32, n, KV_HEADS, DIM);
            const kvc_view v = kvc_view_packed(text_v[at], KVC_DTYPE_F32, n, KV_HEADS, DIM);
            const kvc_view q = kvc_view_packed(text_q[at], KVC_DTYPE_F32, n, HEADS, DIM);
            const kvc_view to =
                kvc_view_packed(at ? out : ignored[0], KVC_DTYPE_F32, n, HEADS, DIM);
            if (!hook.attend(hook.user, 1, &options, &q, &k, &v, &to, &failure))
                fail_msg("%s", failure.text);
        }
    }
    const kvc_view one = kvc_view_packed(text_k[0], KVC_DTYPE_F32, 1, KV_HEADS, DIM);
    const kvc_view q = kvc_view_packed(text_q[0], KVC_DTYPE_F32, 1, HEADS, DIM);
    const kvc_view to = kvc_view_packed(ignored[0], KVC_DTYPE_F32, 1, HEADS, DIM);
    assert_false(hook.attend(hook.user, 1, &options, &q, &one, &one, &to, &failure)); /* full */
    article_destroy(article);
}

/* The largest difference to one way of the article. */
static double difference(const float *out, enum recipe_article article, double q)
{
    double largest = 0.0, want[DIM];

    for (size_t h = 0; h < HEADS; h++) {
        attend_as_article(h, article, q, want);
        for (size_t c = 0; c < DIM; c++)
            largest = fmax(largest, fabs(want[c] - (double)out[h * DIM + c]));
    }
    return largest;
}

static void attention_is_the_articles_and_no_other(void **state)
{
    static const char *const names[] = {"int8:global", "int8:perhead", "int8:window",
                                        "int4:global", "int4:perhead", "int4:window"};
    float out[Q];

    (void)state;
    for (int i = 0; i < 6; i++) {
        const double q = i < 3 ? 127.0 : 7.0;
        draw_text(q);
        run_article(names[i], out);
        for (int other = 0; other < 3; other++) {
            const double d = difference(out, (enum recipe_article)(ARTICLE_GLOBAL + other), q);
            print_message("%s, way %d: largest difference %.2e\n", names[i], other, d);
            if (other == i % 3)
                assert_true(d <= 2e-5);
            else
                assert_true(d > 5e-4);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(presets_are_what_the_library_says),
        cmocka_unit_test(each_step_is_dropped_alone),
        cmocka_unit_test(changes_join),
        cmocka_unit_test(refuses_what_is_no_recipe),
        cmocka_unit_test(vectors_come_from_the_calibration),
        cmocka_unit_test(vectors_are_measured_where_there_is_no_calibration),
        cmocka_unit_test(one_vector_alone_is_not_measured),
        cmocka_unit_test(what_a_recipe_does_not_say_stays),
        cmocka_unit_test(a_calibration_lies_beside_its_model),
        cmocka_unit_test(a_calibration_comes_back_from_its_file),
        cmocka_unit_test(without_a_file_there_is_no_calibration),
        cmocka_unit_test(refuses_a_calibration_of_another_model),
        cmocka_unit_test(codes_have_a_scale_a_token_and_head),
        cmocka_unit_test(exact_tokens_stay_as_they_are),
        cmocka_unit_test(codes_are_those_of_a_calibrated_cache),
        cmocka_unit_test(attention_is_the_articles_and_no_other),
    };

    return cmocka_run_group_tests(tests, open_all, close_all);
}
