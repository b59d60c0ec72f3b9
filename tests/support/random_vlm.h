/* A small vision-language model of random weights. Include it after cmocka.h. */
#ifndef SUPPORT_RANDOM_VLM_H
#define SUPPORT_RANDOM_VLM_H

#include <math.h>
#include <stdlib.h>

#include <cblas.h>

#include "random.h"
#include "vlm.h"

enum { N_WEIGHTS = 1 << 20, HEAD = 32, N_LAYERS = 3, N_KV = 2, EMBD = 64, WIDTH = 32, HIDDEN = 32 };

/* Takes a matrix of random numbers, of a spread that keeps the size of what it multiplies. */
static inline float *take(struct draws *draws, float **at, size_t n_out, size_t n_in, float gain)
{
    float *out = *at;
    const float spread = gain / sqrtf((float)n_in);

    for (size_t i = 0; i < n_out * n_in; i++)
        out[i] = spread * draw_normal(draws);
    *at += n_out * n_in;
    return out;
}

static inline float *take_ones(float **at, size_t n)
{
    float *out = *at;

    for (size_t i = 0; i < n; i++)
        out[i] = 1.0f;
    *at += n;
    return out;
}

static inline void make_decoder(struct draws *draws, struct model *m)
{
    const struct model_shape shape = {.n_layers = N_LAYERS,
                                      .n_embd = EMBD,
                                      .n_ff = 96,
                                      .n_vocab = N_WORDS,
                                      .n_heads = 4,
                                      .n_kv_heads = N_KV,
                                      .head_dim = HEAD,
                                      .n_rot = HEAD,
                                      .n_context = 4096,
                                      .norm_eps = 1e-5f,
                                      .rope_base = 100.0,
                                      .embedding_scale = 1.0f,
                                      .rope_layout = KVC_ROPE_HALF_SPLIT,
                                      .rope_axes = KVC_ROPE_AXES_INTERLEAVED,
                                      .rope_sections = {6, 5, 5}};
    float *at = m->weights = malloc(N_WEIGHTS * sizeof(float));

    assert_non_null(at);
    m->shape = shape;
    m->layers = calloc(N_LAYERS, sizeof(*m->layers));
    m->embedding = take(draws, &at, N_WORDS, EMBD, 8.0f);
    m->output = take(draws, &at, N_WORDS, EMBD, 2.0f);
    m->output_norm = take_ones(&at, EMBD);
    for (size_t l = 0; l < N_LAYERS; l++) {
        struct model_layer *layer = &m->layers[l];
        layer->attn_norm = take_ones(&at, EMBD);
        layer->ffn_norm = take_ones(&at, EMBD);
        layer->qkv = take(draws, &at, (4 + 2 * N_KV) * HEAD, EMBD, 1.5f);
        layer->attn_out = take(draws, &at, EMBD, 4 * HEAD, 1.0f);
        layer->gate_up = take(draws, &at, 2 * 96, EMBD, 1.0f);
        layer->ffn_down = take(draws, &at, EMBD, 96, 1.0f);
    }
    m->eos = -1;
    assert_true(at <= m->weights + N_WEIGHTS);
}

static inline void make_stem(struct draws *draws, struct stem *s)
{
    float *at = s->weights = malloc(N_WEIGHTS * sizeof(float));

    assert_non_null(at);
    s->n_hidden = HIDDEN;
    s->n_width = WIDTH;
    s->n_out = EMBD;
    s->n_blocks = 1;
    s->patch = take(draws, &at, HIDDEN, 3 * PATCH * PATCH, 2.0f);
    s->patch_bias = take(draws, &at, 1, HIDDEN, 0.1f);
    s->mix = take(draws, &at, WIDTH, HIDDEN, 2.0f);
    s->mix_bias = take(draws, &at, 1, WIDTH, 0.1f);
    s->colour = take(draws, &at, WIDTH, 3, 1.0f);
    s->colour_bias = take(draws, &at, 1, WIDTH, 0.1f);
    s->blocks[0].dilation = 1;
    s->blocks[0].norm = take_ones(&at, WIDTH);
    s->blocks[0].conv = take(draws, &at, WIDTH, 9 * WIDTH, 1.0f);
    s->blocks[0].conv_bias = take(draws, &at, 1, WIDTH, 0.1f);
    s->blocks[0].point = take(draws, &at, WIDTH, WIDTH, 1.0f);
    s->blocks[0].point_bias = take(draws, &at, 1, WIDTH, 0.1f);
    s->norm = take_ones(&at, WIDTH);
    s->out = take(draws, &at, EMBD, WIDTH, 1.0f);
    s->out_bias = take(draws, &at, 1, EMBD, 0.1f);
    assert_true(at <= s->weights + N_WEIGHTS);
}

/* For cmocka: *state becomes the model. */
static inline int open_model(void **state)
{
    struct draws draws = draws_of(7, 0);
    struct vlm *vlm = calloc(1, sizeof(*vlm));

    openblas_set_num_threads(1);
    make_decoder(&draws, &vlm->model);
    make_stem(&draws, &vlm->stem);
    *state = vlm;
    return 0;
}

static inline int close_model(void **state)
{
    vlm_close(*state);
    free(*state);
    return 0;
}

#endif
