/* Weights of the llama architecture from a GGUF file, checked against the shape that its metadata
 * tells. */
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvc/kvc.h>

#include "dequant.h"

static bool read_size(const struct gguf *gguf, const char *key, uint64_t max, size_t *out,
                      struct failure *failure)
{
    uint64_t n;

    if (!gguf_to_u64(gguf_find(gguf, key), &n))
        return fail_with(failure, "%s is missing or no number", key);
    if (n < 1 || n > max)
        return fail_with(failure, "%s is %llu, not 1..%llu", key, (unsigned long long)n,
                         (unsigned long long)max);
    *out = (size_t)n;
    return true;
}

/* Leaves *out as it is where the file does not say. */
static bool read_optional(const struct gguf *gguf, const char *key, uint64_t max, size_t *out,
                          struct failure *failure)
{
    return !gguf_find(gguf, key) || read_size(gguf, key, max, out, failure);
}

static bool read_real(const struct gguf *gguf, const char *key, double min, double max, double *out,
                      struct failure *failure)
{
    const struct gguf_value *value = gguf_find(gguf, key);

    if (value && !gguf_to_f64(value, out))
        return fail_with(failure, "%s is no number", key);
    if (!(*out > min && *out < max))
        return fail_with(failure, "%s is %g, not between %g and %g", key, *out, min, max);
    return true;
}

static bool check_architecture(const struct gguf *gguf, struct failure *failure)
{
    struct gguf_text text;
    const struct gguf_value *scaling = gguf_find(gguf, "llama.rope.scaling.type");

    if (!gguf_to_text(gguf_find(gguf, "general.architecture"), &text))
        return fail_with(failure, "general.architecture is missing");
    if (!gguf_text_is(text, "llama"))
        return fail_with(failure, "the architecture is not \"llama\", the only one supported");
    if (scaling && !(gguf_to_text(scaling, &text) && gguf_text_is(text, "none")))
        return fail_with(failure, "llama.rope.scaling.type: scaled rotations are not supported");
    return true;
}

static bool read_heads(const struct gguf *gguf, struct model_shape *s, struct failure *failure)
{
    size_t head_dim_v;

    if (!read_size(gguf, "llama.attention.head_count", 1024, &s->n_heads, failure))
        return false;
    s->n_kv_heads = s->n_heads;
    if (!read_optional(gguf, "llama.attention.head_count_kv", 1024, &s->n_kv_heads, failure))
        return false;
    if (s->n_heads % s->n_kv_heads != 0)
        return fail_with(failure, "%zu query heads are no multiple of %zu KV heads", s->n_heads,
                         s->n_kv_heads);
    s->head_dim = s->n_embd / s->n_heads;
    if (!read_optional(gguf, "llama.attention.key_length", KVC_MAX_HEAD_DIM, &s->head_dim, failure))
        return false;
    if (s->head_dim < 1 || s->head_dim > KVC_MAX_HEAD_DIM)
        return fail_with(failure, "a head size of %zu is not 1..%d", s->head_dim, KVC_MAX_HEAD_DIM);
    s->n_rot = s->head_dim;
    head_dim_v = s->head_dim;
    if (!read_optional(gguf, "llama.attention.value_length", KVC_MAX_HEAD_DIM, &head_dim_v,
                       failure) ||
        !read_optional(gguf, "llama.rope.dimension_count", s->head_dim, &s->n_rot, failure))
        return false;
    if (head_dim_v != s->head_dim || s->n_rot % 2 != 0)
        return fail_with(failure, "heads of different sizes or odd rotations are not supported");
    return true;
}

static bool read_shape(const struct gguf *gguf, struct model_shape *s, struct failure *failure)
{
    double eps = NAN;

    s->rope_base = 10000.0;
    if (!check_architecture(gguf, failure) ||
        !read_size(gguf, "llama.block_count", 1024, &s->n_layers, failure) ||
        !read_size(gguf, "llama.embedding_length", 1 << 16, &s->n_embd, failure) ||
        !read_size(gguf, "llama.feed_forward_length", 1 << 18, &s->n_ff, failure) ||
        !read_size(gguf, "llama.context_length", 1 << 26, &s->n_context, failure) ||
        !read_heads(gguf, s, failure) ||
        !read_real(gguf, "llama.attention.layer_norm_rms_epsilon", 0.0, 1.0, &eps, failure) ||
        !read_real(gguf, "llama.rope.freq_base", 1.0, 1e12, &s->rope_base, failure))
        return false;
    s->norm_eps = (float)eps;
    return true;
}

/* Takes tensors one by one; the floats go to the block if there is one, else they are only counted.
 */
struct loader {
    const struct gguf *gguf;
    float *block;
    size_t n_floats, n_tensors;
    struct failure *failure;
};

/* A matrix of n_out rows of n_in numbers, or with n_out 1 a vector. */
static float *take(struct loader *l, const char *name, size_t n_out, size_t n_in)
{
    const struct gguf_tensor *tensor = gguf_find_tensor(l->gguf, name);
    float *floats = l->block ? l->block + l->n_floats : NULL;

    if (!tensor) {
        fail_with(l->failure, "tensor %s is missing", name);
        return NULL;
    }
    if (tensor->dims[0] != n_in || tensor->dims[1] != n_out || tensor->dims[2] != 1 ||
        tensor->dims[3] != 1) {
        fail_with(l->failure, "tensor %s is not [%zu][%zu]", name, n_out, n_in);
        return NULL;
    }
    if (floats)
        tensor_rows(tensor, 0, n_out, floats);
    l->n_floats += n_out * n_in;
    l->n_tensors++;
    return floats;
}

static bool has_all(const struct loader *l)
{
    return l->failure->text[0] == '\0';
}

static float *take_of_layer(struct loader *l, size_t layer, const char *part, size_t n_out,
                            size_t n_in)
{
    char name[64];

    if (!has_all(l))
        return NULL;
    snprintf(name, sizeof(name), "blk.%zu.%s.weight", layer, part);
    return take(l, name, n_out, n_in);
}

static void take_layer(struct loader *l, const struct model_shape *s, size_t i,
                       struct model_layer *out)
{
    const size_t n_q = s->n_heads * s->head_dim, n_kv = s->n_kv_heads * s->head_dim;

    out->attn_norm = take_of_layer(l, i, "attn_norm", 1, s->n_embd);
    out->qkv = take_of_layer(l, i, "attn_q", n_q, s->n_embd);
    take_of_layer(l, i, "attn_k", n_kv, s->n_embd);
    take_of_layer(l, i, "attn_v", n_kv, s->n_embd);
    out->attn_out = take_of_layer(l, i, "attn_output", s->n_embd, n_q);
    out->ffn_norm = take_of_layer(l, i, "ffn_norm", 1, s->n_embd);
    out->gate_up = take_of_layer(l, i, "ffn_gate", s->n_ff, s->n_embd);
    take_of_layer(l, i, "ffn_up", s->n_ff, s->n_embd);
    out->ffn_down = take_of_layer(l, i, "ffn_down", s->n_embd, s->n_ff);
}

static bool take_all(struct loader *l, struct model *m)
{
    const struct model_shape *s = &m->shape;

    l->n_floats = l->n_tensors = 0;
    l->failure->text[0] = '\0';
    m->embedding = take(l, "token_embd.weight", s->n_vocab, s->n_embd);
    for (size_t i = 0; has_all(l) && i < s->n_layers; i++)
        take_layer(l, s, i, &m->layers[i]);
    if (has_all(l))
        m->output_norm = take(l, "output_norm.weight", 1, s->n_embd);
    m->output = m->embedding;
    if (has_all(l) && gguf_find_tensor(l->gguf, "output.weight"))
        m->output = take(l, "output.weight", s->n_vocab, s->n_embd);
    if (has_all(l) && l->n_tensors != l->gguf->n_tensors)
        fail_with(l->failure, "the file has %zu tensors, but this architecture uses %zu",
                  l->gguf->n_tensors, l->n_tensors);
    return has_all(l);
}

static bool read_vocabulary(const struct gguf *gguf, struct model *m, struct failure *failure)
{
    const struct gguf_tensor *embedding = gguf_find_tensor(gguf, "token_embd.weight");
    uint64_t eos;

    if (!embedding || embedding->dims[1] > 1 << 24)
        return fail_with(failure, "token_embd.weight is missing or too large");
    m->shape.n_vocab = (size_t)embedding->dims[1];
    m->eos = -1;
    if (gguf_to_u64(gguf_find(gguf, "tokenizer.ggml.eos_token_id"), &eos)) {
        if (eos >= m->shape.n_vocab)
            return fail_with(failure, "tokenizer.ggml.eos_token_id is no token");
        m->eos = (int32_t)eos;
    }
    return true;
}

bool model_load(const struct gguf *gguf, struct model *model, struct failure *failure)
{
    struct loader loader = {.gguf = gguf, .failure = failure};

    memset(model, 0, sizeof(*model));
    if (!read_shape(gguf, &model->shape, failure) || !read_vocabulary(gguf, model, failure))
        return false;
    model->layers = calloc(model->shape.n_layers, sizeof(*model->layers));
    if (!model->layers)
        return fail_with(failure, "out of memory");
    bool ok = take_all(&loader, model);
    if (ok) {
        model->weights = malloc(loader.n_floats * sizeof(float));
        loader.block = model->weights;
        ok = model->weights ? take_all(&loader, model) : fail_with(failure, "out of memory");
    }
    if (!ok)
        model_free(model);
    return ok;
}

void model_free(struct model *model)
{
    free(model->weights);
    free(model->layers);
    memset(model, 0, sizeof(*model));
}
