/* Tensors by name, checked against the shape that the model expects. */
#include "loader.h"

#include "dequant.h"

float *loader_take(struct loader *l, const char *name, size_t n_out, size_t n_in)
{
    const struct gguf_tensor *tensor = gguf_find_tensor(l->gguf, name);
    float *floats = l->block ? l->block + l->n_floats : NULL;

    if (!loader_has_all(l))
        return NULL;
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

bool loader_has_all(const struct loader *l)
{
    return l->failure->text[0] == '\0';
}
