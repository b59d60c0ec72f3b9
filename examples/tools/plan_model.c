/* plan_model.c - the shape of the K and V of a model in a GGUF file. */
#include "plan_model.h"

#include <stdio.h>
#include <stdlib.h>

#include "file.h"
#include "gguf.h"

/* A number of the architecture, "llama.block_count"; missing: keeps *out, unless that is 0. */
static bool read_number(const struct gguf *gguf, const char *name, int32_t *out,
                        struct failure *failure)
{
    struct gguf_text architecture;
    char key[128];
    uint64_t n;

    if (!gguf_to_text(gguf_find(gguf, "general.architecture"), &architecture) ||
        architecture.size > 64)
        return fail_with(failure, "general.architecture is missing or no name");
    snprintf(key, sizeof(key), "%.*s.%s", (int)architecture.size, architecture.data, name);
    const struct gguf_value *value = gguf_find(gguf, key);
    if (!value && *out > 0)
        return true;
    if (!gguf_to_u64(value, &n))
        return fail_with(failure, "%s is missing or not one number", key);
    if (n < 1 || n > INT32_MAX)
        return fail_with(failure, "%s is %llu", key, (unsigned long long)n);
    *out = (int32_t)n;
    return true;
}

static bool read_shape(const struct gguf *gguf, kvc_plan_model *m, struct failure *failure)
{
    int32_t n_embd = 0;

    *m = (kvc_plan_model){.struct_size = sizeof(*m)};
    if (!read_number(gguf, "block_count", &m->n_layers, failure) ||
        !read_number(gguf, "embedding_length", &n_embd, failure) ||
        !read_number(gguf, "attention.head_count", &m->n_heads, failure))
        return false;
    m->n_kv_heads = m->n_heads;
    m->head_dim_k = m->head_dim_v = n_embd / m->n_heads;
    return read_number(gguf, "attention.head_count_kv", &m->n_kv_heads, failure) &&
           read_number(gguf, "attention.key_length", &m->head_dim_k, failure) &&
           read_number(gguf, "attention.value_length", &m->head_dim_v, failure);
}

bool plan_model_read(const char *path, kvc_plan_model *model, uint64_t *weight_bytes,
                     struct failure *failure)
{
    struct gguf gguf;
    unsigned char *data;
    size_t size;

    if (!file_read(path, &data, &size, failure))
        return false;
    bool ok = gguf_parse(data, size, &gguf, failure);
    if (ok) {
        ok = read_shape(&gguf, model, failure);
        *weight_bytes = 0;
        for (size_t i = 0; i < gguf.n_tensors; i++)
            *weight_bytes += gguf.tensors[i].n_bytes;
        gguf_free(&gguf);
    }
    free(data);
    return ok;
}
