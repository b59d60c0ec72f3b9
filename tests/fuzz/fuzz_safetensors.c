/* libFuzzer: any bytes as a safetensors file; what the reader accepts lies inside them, each byte
 * in one tensor. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool held)
{
    if (!held)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct safetensors file;
    struct failure failure;

    if (!safetensors_parse(data, size, &file, &failure)) {
        require(!file.header && !file.tensors && file.n_tensors == 0);
        require(memchr(failure.text, '\0', sizeof(failure.text)) != NULL);
        return 0;
    }
    require(file.data_at <= size);
    const uint8_t *at = data + file.data_at;
    for (size_t i = 0; i < file.n_tensors; i++) {
        const struct safetensor *t = &file.tensors[i];
        require(t->data == at && t->n_bytes <= (size_t)(data + size - at));
        at += t->n_bytes;
        require(t->n_dims <= SAFETENSORS_MAX_DIMS);
        require(safetensors_find(&file, t->name) == t);
    }
    require(at == data + size);
    (void)safetensors_metadata(&file, "kvc.kvsmooth.version");
    safetensors_free(&file);
    return 0;
}
