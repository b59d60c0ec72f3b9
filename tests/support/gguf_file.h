/* GGUF files made byte by byte in memory. */
#ifndef TEST_GGUF_FILE_H
#define TEST_GGUF_FILE_H

#include <stddef.h>
#include <stdint.h>

struct gguf_file {
    uint8_t data[65536];
    size_t n;
};

void file_put(struct gguf_file *f, const void *bytes, size_t n);
void file_put_int(struct gguf_file *f, uint64_t x, size_t n);
void file_put_text(struct gguf_file *f, const char *text);
void file_put_header(struct gguf_file *f, uint32_t version, uint64_t n_tensors, uint64_t n_values);
void file_put_key(struct gguf_file *f, const char *key, uint32_t type);
void file_put_u32(struct gguf_file *f, const char *key, uint32_t x);
void file_put_f32(struct gguf_file *f, const char *key, float x);
void file_put_string(struct gguf_file *f, const char *key, const char *text);
void file_put_tensor(struct gguf_file *f, const char *name, uint32_t n_dims, const uint64_t *dims,
                     uint32_t type, uint64_t offset);
void file_pad(struct gguf_file *f, size_t alignment);

#endif
