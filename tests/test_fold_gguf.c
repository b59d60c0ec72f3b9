/* Folds of GGUF files: every type of weights, every architecture, and what is refused. */
#define _POSIX_C_SOURCE 200809L /* getpid() */

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

#include <kvc/kvc.h>

#include "dequant.h"
#include "file.h"
#include "folding.h"
#include "support/gguf_file.h"
#include "support/half.h"
#include "support/observed.h"
#include "support/rng.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 4, Q_ROWS = HEADS * DIM, K_ROWS = KV_HEADS * DIM };

/* Two layers at most. */
struct tiny {
    const char *architecture;
    uint32_t type;
    uint64_t n_cols;
    int n_layers;
    double scale; /* of the numbers; 0 counts as 1 / 256 */
    bool has_bias, has_norm, lacks_k;
    const char *extra_key; /* one more entry, of the architecture if it begins with a dot */
    uint32_t extra_value;
    bool kv_heads_differ;
};

/* Where a block keeps the halves that all its elements are proportional to, from the formats. */
static const struct format {
    uint32_t type;
    size_t n_elements, n_bytes;
    int at[2]; /* -1: none */
} formats[] = {
    {2, 32, 18, {0, -1}},      {3, 32, 20, {0, 2}},    {6, 32, 22, {0, -1}},
    {7, 32, 24, {0, 2}},       {8, 32, 34, {0, -1}},   {10, 256, 84, {80, 82}},
    {11, 256, 110, {108, -1}}, {12, 256, 144, {0, 2}}, {13, 256, 176, {0, 2}},
    {14, 256, 210, {208, -1}},
};

static const float absmax[K_ROWS] = {1, 3, 10, 2, 5, 7, 0.5f, 40};

static kvc_ctx *ctx;
static char path[64];
static uint64_t seed;

static int set_up(void **state)
{
    (void)state;
    snprintf(path, sizeof(path), "/tmp/kvc-fold-test-%ld.gguf", (long)getpid());
    return kvc_ctx_create(NULL, &ctx) == KVC_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    kvc_ctx_destroy(ctx);
    return unlink(path) == 0 ? 0 : -1;
}

static const struct format *find_format(uint32_t type)
{
    for (size_t i = 0; i < sizeof(formats) / sizeof(*formats); i++)
        if (formats[i].type == type)
            return &formats[i];
    return NULL;
}

static void put_float(struct gguf_file *f, uint32_t type, double x)
{
    const float wide = (float)x;
    uint32_t bits;

    if (type == 0) {
        file_put(f, &wide, 4);
    } else if (type == 1) {
        file_put_int(f, (uint64_t)half_ceil(fabs(x)) | (x < 0 ? HALF_SIGN : 0u), 2);
    } else { /* the upper half of a float that has no more */
        memcpy(&bits, &wide, 4);
        file_put_int(f, bits >> 16, 2);
    }
}

/* Any codes, and scales around @p scale. */
static void put_numbers(struct gguf_file *f, uint32_t type, size_t n, double scale)
{
    const struct format *format = find_format(type);

    if (!format) {
        for (size_t i = 0; i < n; i++)
            put_float(f, type, scale * (double)rng_unit(&seed));
        return;
    }
    for (size_t b = 0; b < n / format->n_elements; b++) {
        const size_t start = f->n;
        for (size_t i = 0; i < format->n_bytes; i++)
            file_put_int(f, rng_below(&seed, 256), 1);
        for (int i = 0; i < 2 && format->at[i] >= 0; i++) {
            const uint16_t half =
                half_ceil(scale * (1.0 + fabs((double)rng_unit(&seed)))) | (i ? HALF_SIGN : 0u);
            memcpy(f->data + start + format->at[i], &half, 2);
        }
    }
}

static size_t bytes_of(uint32_t type, size_t n)
{
    const struct format *format = find_format(type);

    return format ? n / format->n_elements * format->n_bytes : n * (type == 0 ? 4 : 2);
}

static void put_architecture_u32(struct gguf_file *f, const struct tiny *t, const char *key,
                                 uint32_t x)
{
    char whole[96];

    snprintf(whole, sizeof(whole), "%s%s", *key == '.' ? t->architecture : "", key);
    file_put_u32(f, whole, x);
}

struct part {
    char name[64];
    uint32_t n_dims, type;
    uint64_t dims[2];
};

static size_t list_parts(const struct tiny *t, struct part *parts)
{
    size_t n = 0;

    for (int layer = 0; layer < t->n_layers; layer++) {
        const struct {
            const char *name;
            bool is_there;
            struct part part;
        } all[] = {
            {"attn_q.weight", true, {"", 2, t->type, {t->n_cols, Q_ROWS}}},
            {"attn_k.weight", !t->lacks_k, {"", 2, t->type, {t->n_cols, K_ROWS}}},
            {"attn_q.bias", t->has_bias, {"", 1, 0, {Q_ROWS, 1}}},
            {"attn_k.bias", t->has_bias, {"", 1, 0, {K_ROWS, 1}}},
            {"attn_q_norm.weight", t->has_norm, {"", 1, 0, {DIM, 1}}},
            {"attn_k_norm.weight", t->has_norm, {"", 1, 0, {DIM, 1}}},
            {"attn_v.weight", true, {"", 2, t->type, {t->n_cols, 1}}},
        };
        for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
            if (!all[i].is_there)
                continue;
            parts[n] = all[i].part;
            snprintf(parts[n++].name, sizeof(parts->name), "blk.%d.%s", layer, all[i].name);
        }
    }
    return n;
}

static void write_model(const struct tiny *t)
{
    struct gguf_file f;
    struct failure failure;
    struct part parts[16];
    const size_t n = list_parts(t, parts);
    uint64_t offset = 0;

    seed = 7;
    file_put_header(&f, 3, n, 6 + (t->extra_key != NULL));
    file_put_string(&f, "general.architecture", t->architecture);
    put_architecture_u32(&f, t, ".block_count", (uint32_t)t->n_layers);
    put_architecture_u32(&f, t, ".embedding_length", 128);
    put_architecture_u32(&f, t, ".attention.head_count", HEADS);
    if (t->kv_heads_differ) {
        char key[64];
        snprintf(key, sizeof(key), "%s.attention.head_count_kv", t->architecture);
        file_put_key(&f, key, GGUF_ARRAY), file_put_int(&f, GGUF_U32, 4), file_put_int(&f, 2, 8);
        file_put_int(&f, KV_HEADS, 4), file_put_int(&f, 1, 4);
    } else {
        put_architecture_u32(&f, t, ".attention.head_count_kv", KV_HEADS);
    }
    put_architecture_u32(&f, t, ".attention.key_length", DIM);
    if (t->extra_key)
        put_architecture_u32(&f, t, t->extra_key, t->extra_value);
    for (size_t i = 0; i < n; i++) {
        file_put_tensor(&f, parts[i].name, parts[i].n_dims, parts[i].dims, parts[i].type, offset);
        offset +=
            (bytes_of(parts[i].type, (size_t)(parts[i].dims[0] * parts[i].dims[1])) + 31) / 32 * 32;
    }
    for (size_t i = 0; i < n; i++) {
        file_pad(&f, 32);
        put_numbers(&f, parts[i].type, (size_t)(parts[i].dims[0] * parts[i].dims[1]),
                    t->scale > 0.0 ? t->scale : 1.0 / 256);
    }
    assert_true(file_write(path, f.data, f.n, &failure));
}

static struct checkpoint open_model(void)
{
    struct checkpoint c;
    struct failure failure = {""};

    if (!checkpoint_open(path, NULL, &c, &failure))
        fail_msg("%s", failure.text);
    return c;
}

static void assert_refused(const struct tiny *t, const char *word)
{
    struct checkpoint c;
    struct failure failure = {""};

    write_model(t);
    assert_false(checkpoint_open(path, NULL, &c, &failure));
    assert_null(c.bytes);
    if (!strstr(failure.text, word))
        fail_msg("\"%s\" does not say \"%s\"", failure.text, word);
}

static const struct folding_settings plain = {.factor = 1.0f,
                                              .filter = {.struct_size = sizeof(kvc_smooth_filter)}};

static bool fold(struct checkpoint *c, const struct folding_settings *settings,
                 struct folded_layer *layers, struct failure *failure)
{
    kvc_observation *observation =
        observed_absmax(ctx, (int32_t)c->n_layers, HEADS, KV_HEADS, DIM, absmax);
    const bool ok = folding_run(ctx, settings, observation, c, layers, failure);

    kvc_observation_destroy(observation);
    return ok;
}

static void must_fold(struct checkpoint *c, const struct folding_settings *settings)
{
    struct folded_layer layers[2];
    struct failure failure = {""};

    if (!fold(c, settings, layers, &failure))
        fail_msg("%s", failure.text);
}

/* Row r of Q times s of its query head's KV head; of K by s. Query heads 0 and 1 are of KV head 0,
 * known fault F3. */
static void check_rows(const struct weight *was, const struct weight *is, bool is_q,
                       const double *scales, double tolerance)
{
    float before[256], after[256];

    for (size_t r = 0; r < was->n_rows; r++) {
        const size_t head = r / DIM / (is_q ? HEADS / KV_HEADS : 1);
        const double s = scales[head * DIM + r % DIM], factor = is_q ? s : 1.0 / s;
        double most = 0.0;
        weight_row(was, r, before);
        weight_row(is, r, after);
        for (size_t i = 0; i < was->n_cols; i++)
            most = fmax(most, fabs((double)before[i] * factor));
        assert_true(most > 0.0);
        for (size_t i = 0; i < was->n_cols; i++)
            assert_true(fabs((double)after[i] - (double)before[i] * factor) <= tolerance * most);
    }
}

static void check_attention(const struct checkpoint *was, const struct checkpoint *is, size_t layer,
                            const double *scales, double tolerance)
{
    const struct attention *a = &was->attentions[layer], *b = &is->attentions[layer];

    check_rows(&a->q, &b->q, true, scales, tolerance);
    check_rows(&a->k, &b->k, false, scales, tolerance);
    if (a->q_bias.data) {
        check_rows(&a->q_bias, &b->q_bias, true, scales, tolerance);
        check_rows(&a->k_bias, &b->k_bias, false, scales, tolerance);
    }
}

/* The codes of all blocks are what they were. */
static void check_codes(const struct weight *was, const struct weight *is)
{
    const struct format *f = find_format(was->type);

    for (size_t i = 0; f && i < weight_n_bytes(was); i++) {
        const int at = (int)(i % f->n_bytes);
        const bool is_scale = at / 2 * 2 == f->at[0] || (f->at[1] >= 0 && at / 2 * 2 == f->at[1]);
        if (!is_scale)
            assert_int_equal(was->data[i], is->data[i]);
    }
}

static void multiplies_what_each_type_stands_for(void **state)
{
    static const uint32_t types[] = {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30};
    double scales[K_ROWS];

    (void)state;
    observed_scales(absmax, KV_HEADS, DIM, true, false, 1.0, scales);
    for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++) {
        const struct format *format = find_format(types[i]);
        const struct tiny t = {.architecture = "llama",
                               .type = types[i],
                               .n_cols = format ? format->n_elements : 32,
                               .n_layers = 1};
        /* The step of a number's type; a block adds two numbers of one step. */
        const double tolerance = types[i] == 0 ? 1e-6 : types[i] == 30 ? 1.0 / 256 : 2.0 / 2048;
        write_model(&t);
        struct checkpoint was = open_model(), is = open_model();
        must_fold(&is, &plain);
        check_attention(&was, &is, 0, scales, tolerance);
        check_codes(&was.attentions[0].q, &is.attentions[0].q);
        check_codes(&was.attentions[0].k, &is.attentions[0].k);
        checkpoint_close(&was);
        checkpoint_close(&is);
    }
}

static void rounds_nothing_with_powers_of_two_and_unfolds_to_the_same_bytes(void **state)
{
    static const uint32_t types[] = {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30};
    struct folding_settings settings = plain;

    (void)state;
    settings.power_of_two = true;
    for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++) {
        const struct format *format = find_format(types[i]);
        const struct tiny t = {.architecture = "llama",
                               .type = types[i],
                               .n_cols = format ? format->n_elements : 32,
                               .n_layers = 1,
                               .scale = 1.0};
        struct folded_layer layers[1];
        struct failure failure;
        double scales[K_ROWS];
        write_model(&t);
        struct checkpoint was = open_model(), is = open_model();
        assert_true(fold(&is, &settings, layers, &failure));
        assert_int_equal(layers[0].rounding.n_inexact, 0);
        assert_true(layers[0].change == 0.0);
        for (size_t c = 0; c < K_ROWS; c++) {
            scales[c] = (double)is.record.scales[c];
            assert_true(exp2(rint(log2(scales[c]))) == scales[c]);
        }
        check_attention(&was, &is, 0, scales, 0.0);
        assert_true(checkpoint_write_record(&is, &failure));
        assert_true(is.size > was.size);
        assert_true(file_write(path, is.bytes, is.size, &failure));
        checkpoint_close(&is);
        is = open_model();
        assert_true(is.record.is_there && is.record.factor == 1.0f && is.record.folded[0]);
        assert_true(folding_undo(ctx, false, &is, layers, &failure));
        assert_true(checkpoint_write_record(&is, &failure));
        assert_int_equal(is.size, was.size);
        assert_memory_equal(is.bytes, was.bytes, was.size);
        checkpoint_close(&was);
        checkpoint_close(&is);
    }
}

/* Known faults F2 and F5: the bias follows its rows; undoing divides again. */
static void takes_the_bias_along_and_back(void **state)
{
    const struct tiny t = {
        .architecture = "qwen2", .type = 0, .n_cols = 32, .n_layers = 1, .has_bias = true};
    double scales[K_ROWS];
    struct folded_layer layers[1];
    struct failure failure;

    (void)state;
    observed_scales(absmax, KV_HEADS, DIM, false, false, 1.0, scales);
    write_model(&t);
    struct checkpoint was = open_model(), is = open_model();
    must_fold(&is, &plain);
    check_attention(&was, &is, 0, scales, 1e-6);
    assert_true(folding_undo(ctx, false, &is, layers, &failure));
    for (size_t c = 0; c < K_ROWS; c++)
        scales[c] = 1.0;
    check_attention(&was, &is, 0, scales, 1.2e-7);
    checkpoint_close(&was);
    checkpoint_close(&is);
}

/* Known fault F4. */
static void keeps_the_pairs_of_each_architecture_equal(void **state)
{
    static const struct {
        const char *architecture;
        size_t partner; /* of channel 0 */
    } all[] = {{"llama", 1}, {"qwen2", 2}};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        const struct tiny t = {
            .architecture = all[i].architecture, .type = 0, .n_cols = 32, .n_layers = 1};
        write_model(&t);
        struct checkpoint c = open_model();
        must_fold(&c, &plain);
        for (size_t h = 0; h < KV_HEADS; h++) {
            const float *s = c.record.scales + h * DIM;
            assert_true(s[0] == s[all[i].partner] && s[0] != s[3 - all[i].partner]);
            assert_true(s[3] == s[3 - all[i].partner]);
        }
        checkpoint_close(&c);
    }
}

static void folds_norms_with_one_scale_for_all_heads(void **state)
{
    static const char *const names[] = {"qwen3", "gemma3"};
    double scales[K_ROWS];

    (void)state;
    observed_scales(absmax, KV_HEADS, DIM, false, true, 1.0, scales);
    for (size_t i = 0; i < 2; i++) {
        const struct tiny t = {
            .architecture = names[i], .type = 8, .n_cols = 32, .n_layers = 1, .has_norm = true};
        write_model(&t);
        struct checkpoint was = open_model(), is = open_model();
        must_fold(&is, &plain);
        const struct attention *a = &was.attentions[0], *b = &is.attentions[0];
        for (size_t c = 0; c < DIM; c++) {
            float x, y;
            weight_row(&a->q_norm, c, &x);
            weight_row(&b->q_norm, c, &y);
            assert_true(fabs((double)y / (double)x - scales[c]) <= 1e-6 * scales[c]);
            weight_row(&a->k_norm, c, &x);
            weight_row(&b->k_norm, c, &y);
            assert_true(fabs((double)x / (double)y - scales[c]) <= 1e-6 * scales[c]);
        }
        assert_memory_equal(a->q.data, b->q.data, weight_n_bytes(&a->q));
        assert_memory_equal(a->k.data, b->k.data, weight_n_bytes(&a->k));
        checkpoint_close(&was);
        checkpoint_close(&is);
    }
}

/* Known fault F1. */
static void gives_a_dead_channel_a_finite_scale(void **state)
{
    static const float dead[K_ROWS] = {0, 0, 4, 2, 0, 0, 0, 0};
    const struct tiny t = {.architecture = "llama", .type = 0, .n_cols = 32, .n_layers = 1};
    struct folded_layer layers[1];
    struct failure failure;

    (void)state;
    write_model(&t);
    struct checkpoint c = open_model();
    kvc_observation *observation = observed_absmax(ctx, 1, HEADS, KV_HEADS, DIM, dead);
    assert_true(folding_run(ctx, &plain, observation, &c, layers, &failure));
    for (size_t i = 0; i < K_ROWS; i++)
        assert_true(c.record.scales[i] > 0.0f && isfinite(c.record.scales[i]));
    for (size_t i = DIM; i < K_ROWS; i++)
        assert_true(c.record.scales[i] == 1.0f);
    assert_true(layers[0].change <= 1e-5);
    kvc_observation_destroy(observation);
    checkpoint_close(&c);
}

static void folds_what_is_included_and_not_excluded(void **state)
{
    static const char *const excluded[] = {"model.layers.0.self_attn"}, *const none[] = {"layers"};
    const struct tiny t = {.architecture = "llama", .type = 8, .n_cols = 32, .n_layers = 2};
    struct folding_settings settings = plain;
    struct folded_layer layers[2];
    struct failure failure;
    double scales[K_ROWS];

    (void)state;
    write_model(&t);
    observed_scales(absmax, KV_HEADS, DIM, true, false, 1.0, scales);
    struct checkpoint was = open_model(), is = open_model();
    settings.filter.exclude = excluded;
    settings.filter.n_exclude = 1;
    assert_true(fold(&is, &settings, layers, &failure));
    assert_true(!layers[0].is_folded && layers[1].is_folded);
    assert_true(!is.record.folded[0] && is.record.folded[1]);
    const struct weight *q = &was.attentions[0].q;
    assert_memory_equal(q->data, is.attentions[0].q.data, weight_n_bytes(q));
    check_attention(&was, &is, 1, scales, 2.0 / 2048);
    checkpoint_close(&is);
    is = open_model();
    settings.filter.include = none;
    settings.filter.n_include = 1;
    assert_false(fold(&is, &settings, layers, &failure));
    assert_non_null(strstr(failure.text, "no attention"));
    checkpoint_close(&was);
    checkpoint_close(&is);
}

static void refuses_to_fold_twice_or_to_unfold_what_is_not_folded(void **state)
{
    const struct tiny t = {.architecture = "llama", .type = 8, .n_cols = 32, .n_layers = 1};
    struct folded_layer layers[1];
    struct failure failure;

    (void)state;
    write_model(&t);
    struct checkpoint c = open_model();
    assert_false(folding_undo(ctx, false, &c, layers, &failure));
    assert_non_null(strstr(failure.text, "not folded"));
    must_fold(&c, &plain);
    assert_true(checkpoint_write_record(&c, &failure));
    assert_true(file_write(path, c.bytes, c.size, &failure));
    checkpoint_close(&c);
    c = open_model();
    assert_false(fold(&c, &plain, layers, &failure));
    assert_non_null(strstr(failure.text, "folded already"));
    checkpoint_close(&c);
}

/* Folds the tiny model, sets one scale of the record, and writes it. */
static void write_with_scale(const struct tiny *t, size_t channel, float scale)
{
    struct failure failure;

    write_model(t);
    struct checkpoint c = open_model();
    must_fold(&c, &plain);
    c.record.scales[channel] = scale;
    assert_true(checkpoint_write_record(&c, &failure));
    assert_true(file_write(path, c.bytes, c.size, &failure));
    checkpoint_close(&c);
}

static void refuses_records_of_scales_that_are_none(void **state)
{
    static const float none[] = {NAN, INFINITY, -INFINITY, 0.0f, -1.0f};
    const struct tiny t = {.architecture = "llama", .type = 8, .n_cols = 32, .n_layers = 1};
    struct checkpoint c;
    struct failure failure = {""};

    (void)state;
    for (size_t i = 0; i < sizeof(none) / sizeof(*none); i++) {
        write_with_scale(&t, 5, none[i]);
        assert_false(checkpoint_open(path, NULL, &c, &failure));
        assert_non_null(strstr(failure.text, "scale.0"));
    }
}

/* Of a pair of channels one scale is damaged: the rows would be rounded by nothing. */
static void refuses_to_unfold_what_changes_scores(void **state)
{
    const struct tiny t = {.architecture = "llama", .type = 0, .n_cols = 32, .n_layers = 1};
    struct folded_layer layers[1];
    struct failure failure = {""};

    (void)state;
    write_model(&t);
    struct checkpoint c = open_model();
    must_fold(&c, &plain);
    const float scale = c.record.scales[2];
    checkpoint_close(&c);
    write_with_scale(&t, 2, scale);
    c = open_model();
    assert_true(folding_undo(ctx, false, &c, layers, &failure));
    assert_true(layers[0].change <= 1e-5);
    checkpoint_close(&c);
    write_with_scale(&t, 2, 8.0f * scale);
    c = open_model();
    assert_false(folding_undo(ctx, true, &c, layers, &failure));
    assert_non_null(strstr(failure.text, "scores"));
    checkpoint_close(&c);
}

/* The record says more than halves can hold. */
static void refuses_to_unfold_with_overflow(void **state)
{
    const struct tiny t = {.architecture = "llama", .type = 8, .n_cols = 32, .n_layers = 1};
    struct folded_layer layers[1];
    struct failure failure = {""};

    (void)state;
    write_with_scale(&t, 0, 1e8f);
    struct checkpoint c = open_model();
    assert_false(folding_undo(ctx, false, &c, layers, &failure));
    assert_non_null(strstr(failure.text, "overflow"));
    checkpoint_close(&c);
}

/* Block scales near the smallest halves lose their bits. */
static void refuses_more_rounding_than_allowed(void **state)
{
    const struct tiny t = {
        .architecture = "llama", .type = 8, .n_cols = 32, .n_layers = 1, .scale = 20 * 0x1p-24};
    struct folding_settings settings = plain;
    struct folded_layer layers[1];
    struct failure failure;

    (void)state;
    for (int i = 0; i < 2; i++) {
        settings.power_of_two = i == 1;
        settings.allow_rounding = false;
        write_model(&t);
        struct checkpoint c = open_model();
        assert_false(fold(&c, &settings, layers, &failure));
        assert_non_null(strstr(failure.text, "rounded"));
        checkpoint_close(&c);
        c = open_model();
        settings.allow_rounding = true;
        must_fold(&c, &settings);
        checkpoint_close(&c);
    }
}

static void refuses_models_that_a_fold_would_break(void **state)
{
    static const char *const others[] = {"llama4", "deepseek2", "command-r", "dbrx", "gemma2"};
    struct tiny t = {.architecture = "llama", .type = 8, .n_cols = 32, .n_layers = 2};

    (void)state;
    for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++) {
        t.architecture = others[i];
        assert_refused(&t, others[i]);
    }
    t.architecture = "llama";
    t.extra_value = 8;
    t.extra_key = ".attention.clamp_kqv";
    assert_refused(&t, "clamp_kqv");
    t.extra_key = ".attention.kv_lora_rank";
    assert_refused(&t, "kv_lora_rank");
    t.extra_key = "split.count";
    assert_refused(&t, "8 files");
    t.extra_key = ".rope.dimension_count";
    assert_refused(&t, "rotation");
    t.extra_key = NULL;
    t.kv_heads_differ = true;
    assert_refused(&t, "differs between layers");
    t.kv_heads_differ = false;
    t.has_norm = true;
    assert_refused(&t, "norm");
}

static void names_a_weight_that_is_missing(void **state)
{
    const struct tiny t = {
        .architecture = "llama", .type = 8, .n_cols = 32, .n_layers = 1, .lacks_k = true};
    struct folded_layer layers[1];
    struct failure failure;

    (void)state;
    write_model(&t);
    struct checkpoint c = open_model();
    assert_false(fold(&c, &plain, layers, &failure));
    assert_non_null(strstr(failure.text, "model.layers.0.self_attn.k_proj"));
    checkpoint_close(&c);
}

static void refuses_an_observation_of_another_shape(void **state)
{
    static const float wide[2 * K_ROWS] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7};
    const struct tiny t = {.architecture = "llama", .type = 8, .n_cols = 32, .n_layers = 1};
    const struct {
        int32_t n_layers, n_kv_heads, head_dim;
    } shapes[] = {{2, KV_HEADS, DIM}, {1, KV_HEADS, 2 * DIM}, {1, 4, DIM}};
    struct folded_layer layers[1];
    struct failure failure;

    (void)state;
    write_model(&t);
    for (size_t i = 0; i < 3; i++) {
        struct checkpoint c = open_model();
        kvc_observation *observation = observed_absmax(
            ctx, shapes[i].n_layers, HEADS, shapes[i].n_kv_heads, shapes[i].head_dim, wide);
        assert_false(folding_run(ctx, &plain, observation, &c, layers, &failure));
        assert_non_null(strstr(failure.text, "observation"));
        kvc_observation_destroy(observation);
        checkpoint_close(&c);
    }
}

/* A model, and the same folded. */
static void open_both(const struct tiny *t, struct checkpoint *was, struct checkpoint *is)
{
    write_model(t);
    *was = open_model();
    *is = open_model();
    must_fold(is, &plain);
}

static void close_both(struct checkpoint *was, struct checkpoint *is)
{
    checkpoint_close(was);
    checkpoint_close(is);
}

/* Neither a number that was none before hides it, nor does a limit allow it. */
static void finds_numbers_that_are_none_any_more(void **state)
{
    const struct tiny t = {.architecture = "llama", .type = 0, .n_cols = 32, .n_layers = 1};
    const struct folding_limits all = {.allow_rounding = true, .max_change = 1.0};
    const float lost[] = {NAN, INFINITY};
    const float before = INFINITY;
    struct folded_layer layers[1];
    struct checkpoint was, is;
    struct failure failure;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        open_both(&t, &was, &is);
        memcpy(was.attentions[0].k.data, &before, sizeof(before));
        memcpy(is.attentions[0].k.data + sizeof(float), &lost[i], sizeof(float));
        assert_true(folding_compare(ctx, &was, &is, layers, &failure));
        assert_true(isinf(layers[0].rounding.max_error));
        assert_false(folding_check_limits(&all, "x", &layers[0], &failure));
        assert_non_null(strstr(failure.text, "lost"));
        close_both(&was, &is);
    }
}

/* What the record makes of a number must be one. */
static void finds_scales_that_make_no_number(void **state)
{
    const struct tiny t = {.architecture = "llama", .type = 0, .n_cols = 32, .n_layers = 1};
    struct folded_layer layers[1];
    struct checkpoint was, is;
    struct failure failure;

    (void)state;
    open_both(&t, &was, &is);
    is.record.scales[0] = NAN;
    assert_true(folding_compare(ctx, &was, &is, layers, &failure));
    assert_true(isinf(layers[0].rounding.max_error));
    close_both(&was, &is);
}

/* A row's level is that of its numbers, so that others are not hidden. */
static void one_infinite_number_hides_no_other(void **state)
{
    const struct tiny t = {.architecture = "llama", .type = 0, .n_cols = 32, .n_layers = 1};
    const float before = INFINITY, other = 1.0f;
    struct folded_layer layers[1];
    struct checkpoint was, is;
    struct failure failure;

    (void)state;
    open_both(&t, &was, &is);
    memcpy(was.attentions[0].k.data, &before, sizeof(before));
    memcpy(is.attentions[0].k.data + sizeof(float), &other, sizeof(float));
    assert_true(folding_compare(ctx, &was, &is, layers, &failure));
    assert_true(layers[0].rounding.max_error > 1.0);
    close_both(&was, &is);
}

/* Another limit of scores is none of numbers. */
static void limits_numbers_whatever_scores_may_do(void **state)
{
    struct folded_layer layer = {.is_folded = true, .change = 0.5};
    struct folding_limits limits = {.max_change = 1.0, .advice = ""};
    struct failure failure;

    (void)state;
    layer.rounding.n_inexact = 1;
    layer.rounding.max_error = 0.02;
    assert_false(folding_check_limits(&limits, "x", &layer, &failure));
    assert_non_null(strstr(failure.text, "rounded"));
    limits.allow_rounding = true;
    assert_true(folding_check_limits(&limits, "x", &layer, &failure));
    limits.max_change = -1.0;
    assert_false(folding_check_limits(&limits, "x", &layer, &failure));
    assert_non_null(strstr(failure.text, "scores"));
    layer.change = 0.05; /* 4 times 0.02 are allowed */
    assert_true(folding_check_limits(&limits, "x", &layer, &failure));
}

static void finds_what_differs_from_a_fold(void **state)
{
    const struct tiny t = {.architecture = "llama", .type = 1, .n_cols = 32, .n_layers = 2};
    struct folded_layer layers[2];
    struct failure failure;

    (void)state;
    write_model(&t);
    struct checkpoint was = open_model(), is = open_model();
    assert_true(fold(&is, &plain, layers, &failure));
    assert_true(folding_compare(ctx, &was, &is, layers, &failure));
    assert_true(layers[0].change <= folding_change_limit(&layers[0].rounding));
    assert_true(layers[0].rounding.max_error <= 1.0 / 2048);
    const struct weight *k = &is.attentions[1].k;
    k->data[k->n_cols * 2 + 1] ^= 0x04; /* one number of K is twice or half of what it was */
    assert_true(folding_compare(ctx, &was, &is, layers, &failure));
    assert_true(layers[1].rounding.max_error >= 0.4);
    assert_true(layers[1].change > 1e-3);
    k->data[k->n_cols * 2 + 1] ^= 0x04;
    const struct gguf_tensor *v = gguf_find_tensor(&is.gguf, "blk.0.attn_v.weight");
    is.bytes[v->data - is.bytes] ^= 1;
    assert_false(folding_compare(ctx, &was, &is, layers, &failure));
    assert_non_null(strstr(failure.text, "blk.0.attn_v.weight"));
    close_both(&was, &is);
}

static void finds_metadata_that_differ(void **state)
{
    struct tiny t = {.architecture = "llama",
                     .type = 1,
                     .n_cols = 32,
                     .n_layers = 1,
                     .extra_key = "general.quantization_version",
                     .extra_value = 2};
    struct folded_layer layers[1];
    struct checkpoint was, is;
    struct failure failure;

    (void)state;
    open_both(&t, &was, &is);
    assert_true(folding_compare(ctx, &was, &is, layers, &failure));
    for (int i = 0; i < 2; i++) { /* another value; one less */
        t.extra_value = 3;
        t.extra_key = i ? NULL : t.extra_key;
        write_model(&t);
        struct checkpoint other = open_model();
        assert_false(folding_compare(ctx, &other, &is, layers, &failure));
        assert_non_null(strstr(failure.text, "general.quantization_version"));
        checkpoint_close(&other);
    }
    close_both(&was, &is);
}

static void finds_tensors_of_another_type_or_shape(void **state)
{
    const struct tiny t = {.architecture = "llama", .type = 1, .n_cols = 32, .n_layers = 1};
    struct folded_layer layers[1];
    struct checkpoint was, is;
    struct failure failure;

    (void)state;
    open_both(&t, &was, &is);
    struct gguf_tensor *v = &is.gguf.tensors[2];
    assert_true(gguf_text_is(v->name, "blk.0.attn_v.weight"));
    v->type = 30; /* of as many bytes */
    assert_false(folding_compare(ctx, &was, &is, layers, &failure));
    assert_non_null(strstr(failure.text, "blk.0.attn_v.weight is of another type"));
    v->type = 1;
    v->dims[0] = 16;
    v->dims[1] = 2;
    assert_false(folding_compare(ctx, &was, &is, layers, &failure));
    assert_non_null(strstr(failure.text, "blk.0.attn_v.weight is of another type"));
    close_both(&was, &is);
}

static void takes_no_config(void **state)
{
    const struct tiny t = {.architecture = "llama", .type = 8, .n_cols = 32, .n_layers = 1};
    struct checkpoint c;
    struct failure failure = {""};

    (void)state;
    write_model(&t);
    assert_false(checkpoint_open(path, "config.json", &c, &failure));
    assert_non_null(strstr(failure.text, "--model-config is for safetensors files"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(multiplies_what_each_type_stands_for),
        cmocka_unit_test(rounds_nothing_with_powers_of_two_and_unfolds_to_the_same_bytes),
        cmocka_unit_test(takes_the_bias_along_and_back),
        cmocka_unit_test(keeps_the_pairs_of_each_architecture_equal),
        cmocka_unit_test(folds_norms_with_one_scale_for_all_heads),
        cmocka_unit_test(gives_a_dead_channel_a_finite_scale),
        cmocka_unit_test(folds_what_is_included_and_not_excluded),
        cmocka_unit_test(refuses_to_fold_twice_or_to_unfold_what_is_not_folded),
        cmocka_unit_test(refuses_records_of_scales_that_are_none),
        cmocka_unit_test(refuses_to_unfold_what_changes_scores),
        cmocka_unit_test(refuses_to_unfold_with_overflow),
        cmocka_unit_test(refuses_more_rounding_than_allowed),
        cmocka_unit_test(refuses_models_that_a_fold_would_break),
        cmocka_unit_test(names_a_weight_that_is_missing),
        cmocka_unit_test(refuses_an_observation_of_another_shape),
        cmocka_unit_test(finds_numbers_that_are_none_any_more),
        cmocka_unit_test(finds_scales_that_make_no_number),
        cmocka_unit_test(one_infinite_number_hides_no_other),
        cmocka_unit_test(limits_numbers_whatever_scores_may_do),
        cmocka_unit_test(finds_what_differs_from_a_fold),
        cmocka_unit_test(finds_metadata_that_differ),
        cmocka_unit_test(finds_tensors_of_another_type_or_shape),
        cmocka_unit_test(takes_no_config),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
