/* Tensor types of GGUF files, and their numbers as floats. */
#ifndef ENGINE_DEQUANT_H
#define ENGINE_DEQUANT_H

#include <stddef.h>
#include <stdint.h>

struct gguf_tensor;

/* Elements and bytes of a block; NULL for a type that cannot be read. */
struct tensor_type {
    uint32_t id; /* ggml's number */
    uint32_t block_size;
    uint32_t block_bytes;
    void (*dequantize)(const uint8_t *src, float *dst); /* one block */
};
const struct tensor_type *tensor_type_find(uint32_t id);

/* Rows first ... first + n - 1 of a parsed tensor, packed; they must exist. */
void tensor_rows(const struct gguf_tensor *tensor, uint64_t first, uint64_t n, float *out);

#endif
