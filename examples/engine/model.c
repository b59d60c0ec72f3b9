/* Weights of a decoder from a GGUF file, checked against the shape that its metadata tells. */
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvc/kvc.h>

#include "loader.h"

/* What the metadata do not tell. */
struct architecture {
    const char *name;
    kvc_rope_layout rope_layout;
    kvc_rope_axes rope_axes;
    enum model_activation activation;
    bool scales_embedding; /* by the root of its length */
    bool more_norms, has_local_layers;
};

static const struct architecture architectures[] = {
    {.name = "llama", .rope_layout = KVC_ROPE_INTERLEAVED},
    {.name = "gemma3",
     .rope_layout = KVC_ROPE_HALF_SPLIT,
     .activation = MODEL_GELU,
     .scales_embedding = true,
     .more_norms = true,
     .has_local_layers = true},
    {.name = MODEL_VISION,
     .rope_layout = KVC_ROPE_HALF_SPLIT,
     .rope_axes = KVC_ROPE_AXES_INTERLEAVED},
};

/* The metadata of an architecture: its keys begin with its name. */
struct metadata {
    const struct gguf *gguf;
    const struct architecture *architecture;
};

static const struct gguf_value *find(const struct metadata *m, const char *key)
{
    char whole[96];

    snprintf(whole, sizeof(whole), "%s.%s", m->architecture->name, key);
    return gguf_find(m->gguf, whole);
}

static bool read_size(const struct metadata *m, const char *key, uint64_t max, size_t *out,
                      struct failure *failure)
{
    uint64_t n;

    if (!gguf_to_u64(find(m, key), &n))
        return fail_with(failure, "%s.%s is missing or no number", m->architecture->name, key);
    if (n < 1 || n > max)
        return fail_with(failure, "%s.%s is %llu, not 1..%llu", m->architecture->name, key,
                         (unsigned long long)n, (unsigned long long)max);
    *out = (size_t)n;
    return true;
}

/* Leaves *out as it is where the file does not say. */
static bool read_optional(const struct metadata *m, const char *key, uint64_t max, size_t *out,
                          struct failure *failure)
{
    return !find(m, key) || read_size(m, key, max, out, failure);
}

static bool read_real(const struct metadata *m, const char *key, double min, double max,
                      double *out, struct failure *failure)
{
    const struct gguf_value *value = find(m, key);

    if (value && !gguf_to_f64(value, out))
        return fail_with(failure, "%s.%s is no number", m->architecture->name, key);
    if (!(*out > min && *out < max))
        return fail_with(failure, "%s.%s is %g, not between %g and %g", m->architecture->name, key,
                         *out, min, max);
    return true;
}

static const struct architecture *find_architecture(struct gguf_text name)
{
    for (size_t i = 0; i < sizeof(architectures) / sizeof(*architectures); i++)
        if (gguf_text_is(name, architectures[i].name))
            return &architectures[i];
    return NULL;
}

static bool read_architecture(const struct gguf *gguf, const struct architecture **out,
                              struct failure *failure)
{
    struct gguf_text text;

    if (!gguf_to_text(gguf_find(gguf, "general.architecture"), &text))
        return fail_with(failure, "general.architecture is missing");
    *out = find_architecture(text);
    return *out ||
           fail_with(failure, "the architecture is not \"llama\", \"gemma3\" or \"" MODEL_VISION
                              "\", the only ones supported");
}

/* Scaled ones, for longer contexts, are refused. */
static bool check_scaling(const struct metadata *m, struct failure *failure)
{
    const struct gguf_value *scaling = find(m, "rope.scaling.type");
    struct gguf_text text;

    if (scaling && !(gguf_to_text(scaling, &text) && gguf_text_is(text, "none")))
        return fail_with(failure, "%s.rope.scaling.type: scaled rotations are not supported",
                         m->architecture->name);
    return true;
}

/* How the pairs of a head lie and which coordinate turns them. */
static bool read_rotation(const struct metadata *m, struct model_shape *s, struct failure *failure)
{
    const struct gguf_value *sections = find(m, "rope.dimension_sections");

    s->rope_layout = m->architecture->rope_layout;
    s->rope_axes = m->architecture->rope_axes;
    if (s->rope_axes == KVC_ROPE_AXES_ONE)
        return true;
    for (uint64_t i = 0; i < 3; i++) {
        uint64_t n;
        if (!sections || !gguf_element_u64(sections, i, &n) || n > KVC_MAX_HEAD_DIM)
            return fail_with(failure, "%s.rope.dimension_sections is not three numbers",
                             m->architecture->name);
        s->rope_sections[i] = (int32_t)n;
    }
    return true;
}

/* Local layers are as those of the first models, where the file does not say. */
static bool read_local_layers(const struct metadata *m, struct model_shape *s,
                              struct failure *failure)
{
    s->local_period = 6;
    s->local_rope_base = 10000.0;
    return !m->architecture->has_local_layers ||
           (read_size(m, "attention.sliding_window", 1 << 26, &s->window, failure) &&
            read_optional(m, "attention.sliding_window_pattern", 1024, &s->local_period, failure) &&
            read_real(m, "rope.freq_base_swa", 1.0, 1e12, &s->local_rope_base, failure));
}

static bool read_heads(const struct metadata *m, struct model_shape *s, struct failure *failure)
{
    size_t head_dim_v;

    if (!read_size(m, "attention.head_count", 1024, &s->n_heads, failure))
        return false;
    s->n_kv_heads = s->n_heads;
    if (!read_optional(m, "attention.head_count_kv", 1024, &s->n_kv_heads, failure))
        return false;
    if (s->n_heads % s->n_kv_heads != 0)
        return fail_with(failure, "%zu query heads are no multiple of %zu KV heads", s->n_heads,
                         s->n_kv_heads);
    s->head_dim = s->n_embd / s->n_heads;
    if (!read_optional(m, "attention.key_length", KVC_MAX_HEAD_DIM, &s->head_dim, failure))
        return false;
    if (s->head_dim < 1 || s->head_dim > KVC_MAX_HEAD_DIM)
        return fail_with(failure, "a head size of %zu is not 1..%d", s->head_dim, KVC_MAX_HEAD_DIM);
    s->n_rot = s->head_dim;
    head_dim_v = s->head_dim;
    if (!read_optional(m, "attention.value_length", KVC_MAX_HEAD_DIM, &head_dim_v, failure) ||
        !read_optional(m, "rope.dimension_count", s->head_dim, &s->n_rot, failure))
        return false;
    if (head_dim_v != s->head_dim || s->n_rot % 2 != 0)
        return fail_with(failure, "heads of different sizes or odd rotations are not supported");
    return true;
}

static bool read_shape(const struct gguf *gguf, struct model_shape *s, struct failure *failure)
{
    struct metadata metadata = {.gguf = gguf}, *m = &metadata;
    double eps = NAN;

    if (!read_architecture(gguf, &m->architecture, failure) || !m->architecture)
        return false;
    s->rope_base = 10000.0;
    if (!check_scaling(m, failure) || !read_size(m, "block_count", 1024, &s->n_layers, failure) ||
        !read_size(m, "embedding_length", 1 << 16, &s->n_embd, failure) ||
        !read_size(m, "feed_forward_length", 1 << 18, &s->n_ff, failure) ||
        !read_size(m, "context_length", 1 << 26, &s->n_context, failure) ||
        !read_heads(m, s, failure) ||
        !read_real(m, "attention.layer_norm_rms_epsilon", 0.0, 1.0, &eps, failure) ||
        !read_real(m, "rope.freq_base", 1.0, 1e12, &s->rope_base, failure) ||
        !read_rotation(m, s, failure) || !read_local_layers(m, s, failure))
        return false;
    s->norm_eps = (float)eps;
    s->activation = m->architecture->activation;
    s->embedding_scale = m->architecture->scales_embedding ? sqrtf((float)s->n_embd) : 1.0f;
    s->more_norms = m->architecture->more_norms;
    return true;
}

static float *take_of_layer(struct loader *l, size_t layer, const char *part, size_t n_out,
                            size_t n_in)
{
    char name[64];

    snprintf(name, sizeof(name), "blk.%zu.%s.weight", layer, part);
    return loader_take(l, name, n_out, n_in);
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
    out->is_local = s->window > 0 && (i + 1) % s->local_period != 0;
    if (!s->more_norms)
        return;
    out->q_norm = take_of_layer(l, i, "attn_q_norm", 1, s->head_dim);
    out->k_norm = take_of_layer(l, i, "attn_k_norm", 1, s->head_dim);
    out->attn_post_norm = take_of_layer(l, i, "post_attention_norm", 1, s->n_embd);
    out->ffn_post_norm = take_of_layer(l, i, "post_ffw_norm", 1, s->n_embd);
}

/* Without those that belong to the other half of a vision-language model. */
static size_t count_tensors(const struct gguf *gguf)
{
    const struct gguf_value *architecture = gguf_find(gguf, "general.architecture");
    struct gguf_text text;
    size_t n = 0;

    if (!gguf_to_text(architecture, &text) || !gguf_text_is(text, MODEL_VISION))
        return gguf->n_tensors;
    for (size_t i = 0; i < gguf->n_tensors; i++) {
        const struct gguf_text name = gguf->tensors[i].name;
        n += !(name.size > 2 && memcmp(name.data, MODEL_VISION_TENSORS, 2) == 0);
    }
    return n;
}

static bool take_all(struct loader *l, struct model *m)
{
    const struct model_shape *s = &m->shape;

    l->n_floats = l->n_tensors = 0;
    l->failure->text[0] = '\0';
    m->embedding = loader_take(l, "token_embd.weight", s->n_vocab, s->n_embd);
    for (size_t i = 0; loader_has_all(l) && i < s->n_layers; i++)
        take_layer(l, s, i, &m->layers[i]);
    m->output_norm = loader_take(l, "output_norm.weight", 1, s->n_embd);
    m->output = m->embedding;
    if (loader_has_all(l) && gguf_find_tensor(l->gguf, "output.weight"))
        m->output = loader_take(l, "output.weight", s->n_vocab, s->n_embd);
    const size_t n_tensors = count_tensors(l->gguf);
    if (loader_has_all(l) && l->n_tensors != n_tensors)
        fail_with(l->failure, "the file has %zu tensors, but this architecture uses %zu", n_tensors,
                  l->n_tensors);
    return loader_has_all(l);
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

void model_cache_params(const struct model_shape *shape, kvc_cache_params *out)
{
    kvc_cache_params_default(out);
    out->n_layers = (int32_t)shape->n_layers;
    out->n_heads = (int32_t)shape->n_heads;
    out->n_kv_heads = (int32_t)shape->n_kv_heads;
    out->head_dim_k = out->head_dim_v = (int32_t)shape->head_dim;
}
