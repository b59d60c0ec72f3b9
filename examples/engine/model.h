/* A decoder of the llama or gemma3 architecture, or that of the small vision-language model: its
 * shape and its weights as floats. */
#ifndef ENGINE_MODEL_H
#define ENGINE_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include <kvc/cache.h>
#include <kvc/rope.h>

#include "failure.h"
#include "gguf.h"

/* The other architecture, and how the names of its tensors begin that model_load() leaves alone. */
#define MODEL_VISION         "tinyvlm"
#define MODEL_VISION_TENSORS "v."

/* Of the gate of the feed-forward network. */
enum model_activation { MODEL_SILU, MODEL_GELU };

struct model_shape {
    size_t n_layers, n_embd, n_ff, n_vocab;
    size_t n_heads, n_kv_heads; /* query heads a multiple of KV heads */
    size_t head_dim;            /* of K and V */
    size_t n_rot;               /* elements of a head that are rotated */
    size_t n_context;           /* what the model was trained for */
    float norm_eps;
    double rope_base;
    kvc_rope_layout rope_layout;
    kvc_rope_axes rope_axes;
    int32_t rope_sections[3]; /* of the axes, if there are several */
    size_t window;            /* newest tokens that local layers see; 0: there are none */
    size_t local_period;      /* every how many layers one is not local */
    double local_rope_base;   /* of local layers */
    enum model_activation activation;
    float embedding_scale; /* of the embeddings of tokens */
    bool more_norms;       /* of each head of Q and K, and of what a layer adds to its input */
};

/* Matrices are [outputs][inputs]. */
struct model_layer {
    float *attn_norm;                      /* [n_embd] */
    float *qkv;                            /* rows of Q, then K, then V */
    float *attn_out;                       /* [n_embd][n_heads * head_dim] */
    float *ffn_norm;                       /* [n_embd] */
    float *gate_up;                        /* rows of gate, then up */
    float *ffn_down;                       /* [n_embd][n_ff] */
    float *q_norm, *k_norm;                /* [head_dim], or NULL: there is no such norm */
    float *attn_post_norm, *ffn_post_norm; /* [n_embd], or NULL */
    bool is_local; /* sees the shape's window, rotated with its local base */
};

struct model {
    struct model_shape shape;
    float *weights; /* one block; the pointers below lie in it */
    struct model_layer *layers;
    float *embedding;   /* [n_vocab][n_embd] */
    float *output_norm; /* [n_embd] */
    float *output;      /* [n_vocab][n_embd]; the embedding where the file has none */
    int32_t eos;        /* token that ends a text, or -1 */
};

/* Copies the weights out of the file. A tensor that is missing, of another shape, or not understood
 * is refused. */
bool model_load(const struct gguf *gguf, struct model *model, struct failure *failure);
void model_free(struct model *model);

/* The defaults of a cache for the model: its layers and heads. */
void model_cache_params(const struct model_shape *shape, kvc_cache_params *out);

#endif
