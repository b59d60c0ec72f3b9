/* A model's file for a fold: what both formats share. */
#include "checkpoint.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "file.h"

/* No real model comes near; they keep hostile files from taking all memory. */
enum { MAX_LAYERS = 1024, MAX_HEADS = 1024 };

size_t checkpoint_width(const struct checkpoint *c)
{
    return c->n_kv_heads * c->head_dim;
}

bool checkpoint_allocate(struct checkpoint *c, struct failure *failure)
{
    if (c->n_layers < 1 || c->n_layers > MAX_LAYERS || c->n_heads < 1 || c->n_heads > MAX_HEADS ||
        c->n_kv_heads < 1 || c->n_heads % c->n_kv_heads != 0)
        return fail_with(failure, "%zu layers, %zu query heads and %zu KV heads make no model",
                         c->n_layers, c->n_heads, c->n_kv_heads);
    if (c->head_dim < 2 || c->head_dim > KVC_MAX_HEAD_DIM)
        return fail_with(failure, "a head size of %zu is not 2..%d", c->head_dim, KVC_MAX_HEAD_DIM);
    if (c->rope.n_dims < 2 || (size_t)c->rope.n_dims > c->head_dim || c->rope.n_dims % 2 != 0 ||
        !(c->rope.base > 1.0 && c->rope.base < 1e12))
        return fail_with(failure, "a rotation of %d channels with base %g is no good",
                         (int)c->rope.n_dims, c->rope.base);
    c->attentions = calloc(c->n_layers, sizeof(*c->attentions));
    c->record.folded = calloc(c->n_layers, sizeof(*c->record.folded));
    c->record.scales = calloc(c->n_layers * checkpoint_width(c), sizeof(*c->record.scales));
    return (c->attentions && c->record.folded && c->record.scales) ||
           fail_with(failure, "out of memory");
}

static bool is_scale(float x)
{
    return isfinite(x) && x > 0.0f;
}

bool checkpoint_check_record(const struct checkpoint *c, struct failure *failure)
{
    const size_t n = checkpoint_width(c);

    if (!is_scale(c->record.factor))
        return fail_with(failure, RECORD_PREFIX "factor is %g, which is no factor",
                         (double)c->record.factor);
    for (size_t i = 0; i < c->n_layers * n; i++)
        if (c->record.folded[i / n] && !is_scale(c->record.scales[i]))
            return fail_with(failure, RECORD_PREFIX "scale.%zu has a %g, which is no scale", i / n,
                             (double)c->record.scales[i]);
    return true;
}

/* GGUF files say themselves what they are. */
static bool refuse_config(const char *config_path, struct failure *failure)
{
    return !config_path || fail_with(failure, "--model-config is for safetensors files");
}

bool checkpoint_open(const char *path, const char *config_path, struct checkpoint *out,
                     struct failure *failure)
{
    struct failure why;

    *out = (struct checkpoint){0};
    if (!file_read(path, &out->bytes, &out->size, failure))
        return false;
    kvc_rope_default(&out->rope);
    out->is_gguf = out->size >= 4 && memcmp(out->bytes, "GGUF", 4) == 0;
    if (out->is_gguf ? refuse_config(config_path, &why) && checkpoint_read_gguf(out, &why)
                     : checkpoint_read_safetensors(path, config_path, out, &why))
        return true;
    checkpoint_close(out);
    return fail_with(failure, "%.100s: %.150s", path, why.text);
}

void checkpoint_close(struct checkpoint *c)
{
    gguf_free(&c->gguf);
    safetensors_free(&c->safetensors);
    free(c->attentions);
    free(c->record.folded);
    free(c->record.scales);
    free(c->bytes);
    *c = (struct checkpoint){0};
}

/* Leaves no pointer into bytes that have moved. */
bool checkpoint_write_record(struct checkpoint *c, struct failure *failure)
{
    static const struct weight none;
    const bool ok = (c->is_gguf ? checkpoint_write_gguf : checkpoint_write_safetensors)(c, failure);

    gguf_free(&c->gguf);
    safetensors_free(&c->safetensors);
    for (size_t i = 0; i < c->n_layers; i++) {
        struct attention *a = &c->attentions[i];
        a->q = a->q_bias = a->k = a->k_bias = a->q_norm = a->k_norm = none;
    }
    return ok;
}

bool checkpoint_replace_head(struct checkpoint *c, const void *head, size_t head_size, size_t tail,
                             struct failure *failure)
{
    const size_t n = c->size - tail;

    if (head_size > tail) {
        unsigned char *larger = realloc(c->bytes, head_size + n);
        if (!larger)
            return fail_with(failure, "out of memory");
        c->bytes = larger;
    }
    memmove(c->bytes + head_size, c->bytes + tail, n);
    memcpy(c->bytes, head, head_size);
    c->size = head_size + n;
    return true;
}

bool checkpoint_same_head(const struct checkpoint *a, const struct checkpoint *b,
                          struct failure *failure)
{
    return (a->is_gguf ? checkpoint_same_head_gguf : checkpoint_same_head_safetensors)(a, b,
                                                                                       failure);
}

bool checkpoint_tensor(const struct checkpoint *c, size_t i, struct gguf_text *name,
                       const uint8_t **data, size_t *n_bytes)
{
    if (i >= (c->is_gguf ? c->gguf.n_tensors : c->safetensors.n_tensors))
        return false;
    if (c->is_gguf) {
        *name = c->gguf.tensors[i].name;
        *data = c->gguf.tensors[i].data;
        *n_bytes = c->gguf.tensors[i].n_bytes;
        return true;
    }
    const struct safetensor *tensor = &c->safetensors.tensors[i];
    *name = (struct gguf_text){tensor->name, strlen(tensor->name)};
    *data = tensor->data;
    *n_bytes = tensor->n_bytes;
    return true;
}
