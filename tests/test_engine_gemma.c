/* A small gemma3 model from a GGUF file made by hand, against its definition in double. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "forward.h"
#include "support/gguf_file.h"
#include "support/rng.h"

/* Six layers: the last one is global. Its attention and the local ones' differ from token 5 on. */
enum {
    LAYERS = 6,
    EMBD = 16,
    FF = 12,
    VOCAB = 20,
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 8,
    WINDOW = 5,
    TOKENS = 24,
    Q = HEADS * DIM, /* of all heads */
    KV = KV_HEADS * DIM,
    LARGEST = Q * EMBD, /* of the matrices */
    LOGITS = TOKENS * VOCAB
};

#define EPS        1e-6
#define BASE       1000000.0
#define LOCAL_BASE 10000.0
#define TOLERANCE  1e-4 /* K and V to 22 bits, the rest in float */

struct weights {
    char name[40];
    size_t n_out, n_in;
    float data[LARGEST];
};

/* Parts of a layer as files name them, in their order. */
static const struct part {
    const char *name;
    size_t n_out, n_in;
    float centre, spread;
} parts[] = {
    {"attn_norm", 1, EMBD, 1.0f, 0.5f},     {"attn_q", Q, EMBD, 0.0f, 0.5f},
    {"attn_k", KV, EMBD, 0.0f, 0.5f},       {"attn_v", KV, EMBD, 0.0f, 0.5f},
    {"attn_q_norm", 1, DIM, 1.5f, 0.5f},    {"attn_k_norm", 1, DIM, 1.5f, 0.5f},
    {"attn_output", EMBD, Q, 0.0f, 0.5f},   {"post_attention_norm", 1, EMBD, 1.5f, 0.5f},
    {"ffn_norm", 1, EMBD, 1.0f, 0.5f},      {"ffn_gate", FF, EMBD, 0.0f, 0.8f},
    {"ffn_up", FF, EMBD, 0.0f, 0.8f},       {"ffn_down", EMBD, FF, 0.0f, 0.8f},
    {"post_ffw_norm", 1, EMBD, 1.5f, 0.5f},
};
enum {
    PARTS = sizeof(parts) / sizeof(*parts),
    LAYER_TENSORS = LAYERS * PARTS,
    TENSORS = LAYER_TENSORS + 2
};

static struct weights tensors[TENSORS];
static struct gguf_file file;
static struct gguf gguf;
static struct model model;
static kvc_ctx *ctx;
static int32_t tokens[TOKENS];
static double expected[TOKENS][VOCAB];

static const float *weights_of(size_t layer, const char *part)
{
    for (size_t i = 0; i < PARTS; i++)
        if (strcmp(parts[i].name, part) == 0)
            return tensors[1 + layer * PARTS + i].data;
    fail_msg("no part %s", part);
    return NULL;
}

static void draw(uint64_t *rng, struct weights *w, const struct part *part)
{
    w->n_out = part->n_out;
    w->n_in = part->n_in;
    assert_true(w->n_out * w->n_in <= sizeof(w->data) / sizeof(*w->data));
    for (size_t i = 0; i < w->n_out * w->n_in; i++)
        w->data[i] = part->centre + part->spread * rng_unit(rng);
}

static void draw_model(void)
{
    static const struct part embedding = {"token_embd", VOCAB, EMBD, 0.0f, 1.0f};
    static const struct part output_norm = {"output_norm", 1, EMBD, 1.0f, 0.5f};
    uint64_t rng = 3;

    draw(&rng, &tensors[0], &embedding);
    snprintf(tensors[0].name, sizeof(tensors[0].name), "token_embd.weight");
    for (size_t i = 0; i < LAYER_TENSORS; i++) {
        struct weights *w = &tensors[1 + i];
        draw(&rng, w, &parts[i % PARTS]);
        snprintf(w->name, sizeof(w->name), "blk.%zu.%s.weight", i / PARTS, parts[i % PARTS].name);
    }
    draw(&rng, &tensors[TENSORS - 1], &output_norm);
    snprintf(tensors[TENSORS - 1].name, sizeof(tensors[0].name), "output_norm.weight");
    for (size_t t = 0; t < TOKENS; t++)
        tokens[t] = (int32_t)rng_below(&rng, VOCAB);
}

/* Neither the pattern of the layers nor their local base is in the file, as in real ones. */
static void write_file(void)
{
    uint64_t offset = 0;

    file_put_header(&file, 3, TENSORS, 11);
    file_put_string(&file, "general.architecture", "gemma3");
    file_put_u32(&file, "gemma3.block_count", LAYERS);
    file_put_u32(&file, "gemma3.embedding_length", EMBD);
    file_put_u32(&file, "gemma3.feed_forward_length", FF);
    file_put_u32(&file, "gemma3.attention.head_count", HEADS);
    file_put_u32(&file, "gemma3.attention.head_count_kv", KV_HEADS);
    file_put_u32(&file, "gemma3.attention.key_length", DIM);
    file_put_u32(&file, "gemma3.context_length", 64);
    file_put_u32(&file, "gemma3.attention.sliding_window", WINDOW);
    file_put_f32(&file, "gemma3.attention.layer_norm_rms_epsilon", (float)EPS);
    file_put_f32(&file, "gemma3.rope.freq_base", (float)BASE);
    for (size_t i = 0; i < TENSORS; i++) {
        const uint64_t dims[] = {tensors[i].n_in, tensors[i].n_out};
        file_put_tensor(&file, tensors[i].name, 2, dims, 0, offset);
        offset += (dims[0] * dims[1] * sizeof(float) + 31) / 32 * 32;
    }
    for (size_t i = 0; i < TENSORS; i++) {
        file_pad(&file, 32);
        file_put(&file, tensors[i].data, tensors[i].n_out * tensors[i].n_in * sizeof(float));
    }
}

/* out [n_out] = weights * in */
static void multiply(const float *weights, const double *in, size_t n_out, size_t n_in, double *out)
{
    for (size_t o = 0; o < n_out; o++) {
        out[o] = 0.0;
        for (size_t i = 0; i < n_in; i++)
            out[o] += (double)weights[o * n_in + i] * in[i];
    }
}

static void normalize(const double *x, const float *gain, size_t n, double *out)
{
    double sum = 0.0;

    for (size_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    const double root = sqrt(sum / (double)n + EPS);
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] / root * (double)gain[i];
}

/* Pairs i and i + DIM / 2. */
static void turn(double *x, size_t position, double base)
{
    for (size_t i = 0; i < DIM / 2; i++) {
        const double angle = (double)position * pow(base, -2.0 * (double)i / DIM);
        const double a = x[i], b = x[i + DIM / 2];
        x[i] = a * cos(angle) - b * sin(angle);
        x[i + DIM / 2] = b * cos(angle) + a * sin(angle);
    }
}

static double gelu(double x)
{
    const double pi = 3.14159265358979323846;

    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / pi) * (x + 0.044715 * x * x * x)));
}

/* One head over the keys first ... t, each of all KV heads. */
static void attend(const double *q, const double (*k)[KV], const double (*v)[KV], size_t head,
                   size_t first, size_t t, double *out)
{
    const size_t at = head / (HEADS / KV_HEADS) * DIM;
    double sum = 0.0;

    memset(out, 0, DIM * sizeof(*out));
    for (size_t j = first; j <= t; j++) {
        double score = 0.0;
        for (size_t i = 0; i < DIM; i++)
            score += q[i] * k[j][at + i];
        const double p = exp(score / sqrt(DIM));
        sum += p;
        for (size_t i = 0; i < DIM; i++)
            out[i] += p * v[j][at + i];
    }
    for (size_t i = 0; i < DIM; i++)
        out[i] /= sum;
}

static void add_attention(size_t layer, double (*x)[EMBD])
{
    static double k[TOKENS][KV], v[TOKENS][KV];
    const bool is_global = layer == 5;
    const double base = is_global ? BASE : LOCAL_BASE;
    double h[EMBD], q[Q], attention[Q], out[EMBD];

    for (size_t t = 0; t < TOKENS; t++) {
        normalize(x[t], weights_of(layer, "attn_norm"), EMBD, h);
        multiply(weights_of(layer, "attn_q"), h, Q, EMBD, q);
        multiply(weights_of(layer, "attn_k"), h, KV, EMBD, k[t]);
        multiply(weights_of(layer, "attn_v"), h, KV, EMBD, v[t]);
        for (size_t head = 0; head < KV_HEADS; head++) {
            double *key = k[t] + head * DIM;
            normalize(key, weights_of(layer, "attn_k_norm"), DIM, key);
            turn(key, t, base);
        }
        for (size_t head = 0; head < HEADS; head++) {
            const size_t first = is_global || t < WINDOW ? 0 : t - WINDOW + 1;
            double *query = q + head * DIM;
            normalize(query, weights_of(layer, "attn_q_norm"), DIM, query);
            turn(query, t, base);
            attend(query, (const double(*)[KV])k, (const double(*)[KV])v, head, first, t,
                   attention + head * DIM);
        }
        multiply(weights_of(layer, "attn_output"), attention, EMBD, Q, out);
        normalize(out, weights_of(layer, "post_attention_norm"), EMBD, out);
        for (size_t i = 0; i < EMBD; i++)
            x[t][i] += out[i];
    }
}

static void add_feed_forward(size_t layer, double *x)
{
    double h[EMBD], gate[FF], up[FF], out[EMBD];

    normalize(x, weights_of(layer, "ffn_norm"), EMBD, h);
    multiply(weights_of(layer, "ffn_gate"), h, FF, EMBD, gate);
    multiply(weights_of(layer, "ffn_up"), h, FF, EMBD, up);
    for (size_t i = 0; i < FF; i++)
        gate[i] = gelu(gate[i]) * up[i];
    multiply(weights_of(layer, "ffn_down"), gate, EMBD, FF, out);
    normalize(out, weights_of(layer, "post_ffw_norm"), EMBD, out);
    for (size_t i = 0; i < EMBD; i++)
        x[i] += out[i];
}

static void compute_expected(void)
{
    static double x[TOKENS][EMBD];
    double h[EMBD];

    for (size_t t = 0; t < TOKENS; t++)
        for (size_t i = 0; i < EMBD; i++)
            x[t][i] = sqrt(EMBD) * (double)tensors[0].data[(size_t)tokens[t] * EMBD + i];
    for (size_t layer = 0; layer < LAYERS; layer++) {
        add_attention(layer, x);
        for (size_t t = 0; t < TOKENS; t++)
            add_feed_forward(layer, x[t]);
    }
    for (size_t t = 0; t < TOKENS; t++) {
        normalize(x[t], tensors[TENSORS - 1].data, EMBD, h);
        multiply(tensors[0].data, h, VOCAB, EMBD, expected[t]);
    }
}

static int open_all(void **state)
{
    struct failure failure = {""};

    (void)state;
    draw_model();
    write_file();
    compute_expected();
    if (!gguf_parse(file.data, file.n, &gguf, &failure) || !model_load(&gguf, &model, &failure))
        print_error("%s\n", failure.text);
    return failure.text[0] || kvc_ctx_create(NULL, &ctx) != KVC_OK;
}

static int close_all(void **state)
{
    (void)state;
    kvc_ctx_destroy(ctx);
    model_free(&model);
    gguf_free(&gguf);
    return 0;
}

/* The largest difference when each call takes up to @p n tokens. */
static double difference(size_t n, bool exact)
{
    const struct forward_params params = {
        .model = &model, .ctx = ctx, .max_rows = TOKENS, .n_threads = 1, .exact = exact};
    static float logits[LOGITS];
    struct failure failure;
    struct forward *forward;
    kvc_cache_params p;
    kvc_cache *cache;
    kvc_seq seq;
    double largest = 0.0;

    model_cache_params(&model.shape, &p);
    p.head_dim_k = p.head_dim_v = p.head_dim_k * (exact ? 2 : 1);
    p.max_tokens = TOKENS;
    p.precision.k = p.precision.v = KVC_F16;
    assert_int_equal(kvc_cache_full_budget(&p, &p.budget_bytes), KVC_OK);
    assert_int_equal(kvc_cache_create(ctx, &p, &cache), KVC_OK);
    assert_int_equal(kvc_seq_create(cache, &seq), KVC_OK);
    assert_true(forward_create(&params, &forward, &failure));
    for (size_t at = 0; at < TOKENS; at += n) {
        const struct forward_item item = {.cache = cache,
                                          .seq = seq,
                                          .tokens = tokens + at,
                                          .n = n < TOKENS - at ? n : TOKENS - at};
        assert_true(forward_run(forward, &item, 1, logits + at * VOCAB, &failure));
    }
    for (size_t i = 0; i < LOGITS; i++)
        largest = fmax(largest, fabs((double)logits[i] - expected[i / VOCAB][i % VOCAB]));
    forward_destroy(forward);
    kvc_cache_destroy(cache);
    print_message("calls of %zu, %s: largest difference %.2e\n", n, exact ? "exact" : "F16",
                  largest);
    return largest;
}

static void logits_equal_the_definition(void **state)
{
    (void)state;
    assert_true(difference(TOKENS, true) <= TOLERANCE);
}

static void calls_of_any_length_give_the_same_logits(void **state)
{
    (void)state;
    assert_true(difference(1, true) <= TOLERANCE);
    assert_true(difference(7, true) <= TOLERANCE);
}

static void half_precision_costs_little(void **state)
{
    const double halves = difference(TOKENS, false);

    (void)state;

    assert_true(halves > TOLERANCE && halves <= 0.02);
}

/* What the definition above takes for granted. */
static void the_last_of_six_layers_is_global(void **state)
{
    (void)state;
    assert_int_equal(model.shape.window, WINDOW);
    for (size_t layer = 0; layer < LAYERS; layer++)
        assert_true(model.layers[layer].is_local == (layer != 5));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_equal_the_definition),
        cmocka_unit_test(calls_of_any_length_give_the_same_logits),
        cmocka_unit_test(half_precision_costs_little),
        cmocka_unit_test(the_last_of_six_layers_is_global),
    };

    return cmocka_run_group_tests(tests, open_all, close_all);
}
