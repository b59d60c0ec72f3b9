/* libFuzzer: any bytes as a GGUF file; what the reader accepts must be readable to the last
 * element. */
#include <stdlib.h>
#include <string.h>

#include "dequant.h"
#include "gguf.h"
#include "model.h"
#include "tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_tensor(const struct gguf_tensor *tensor)
{
    const uint64_t n_rows = tensor->dims[1] * tensor->dims[2] * tensor->dims[3];
    const size_t row = (size_t)tensor->dims[0];
    float *floats = malloc(row * sizeof(*floats));

    if (!floats)
        return;
    for (uint64_t r = 0; r < n_rows; r++)
        tensor_rows(tensor, r, 1, floats);
    free(floats);
}

static void read_value(const struct gguf_value *value)
{
    struct gguf_text text;
    size_t at = 0;
    uint64_t n;
    double x;

    gguf_to_u64(value, &n);
    gguf_to_f64(value, &x);
    gguf_to_text(value, &text);
    gguf_element_u64(value, value->n - 1, &n);
    while (gguf_next_text(value, &at, &text))
        continue;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct failure failure;
    struct gguf gguf;
    struct model model;
    struct tokenizer *tokenizer;

    if (!gguf_parse(data, size, &gguf, &failure))
        return 0;
    for (size_t i = 0; i < gguf.n_values; i++)
        read_value(&gguf.values[i]);
    for (size_t i = 0; i < gguf.n_tensors; i++)
        read_tensor(&gguf.tensors[i]);
    if (model_load(&gguf, &model, &failure))
        model_free(&model);
    if (tokenizer_from_gguf(&gguf, &tokenizer, &failure))
        tokenizer_destroy(tokenizer);
    gguf_free(&gguf);
    return 0;
}
