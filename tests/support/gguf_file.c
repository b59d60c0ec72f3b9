/* GGUF files made byte by byte in memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "gguf_file.h"

/* Types of metadata. */
enum { U32 = 4, F32 = 6, STRING = 8 };

void file_put(struct gguf_file *f, const void *bytes, size_t n)
{
    assert_true(n <= sizeof(f->data) - f->n);
    memcpy(f->data + f->n, bytes, n);
    f->n += n;
}

void file_put_int(struct gguf_file *f, uint64_t x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint8_t byte = (uint8_t)(x >> (8 * i));
        file_put(f, &byte, 1);
    }
}

void file_put_text(struct gguf_file *f, const char *text)
{
    file_put_int(f, strlen(text), 8);
    file_put(f, text, strlen(text));
}

void file_put_header(struct gguf_file *f, uint32_t version, uint64_t n_tensors, uint64_t n_values)
{
    f->n = 0;
    file_put(f, "GGUF", 4);
    file_put_int(f, version, 4);
    file_put_int(f, n_tensors, 8);
    file_put_int(f, n_values, 8);
}

void file_put_key(struct gguf_file *f, const char *key, uint32_t type)
{
    file_put_text(f, key);
    file_put_int(f, type, 4);
}

void file_put_u32(struct gguf_file *f, const char *key, uint32_t x)
{
    file_put_key(f, key, U32);
    file_put_int(f, x, 4);
}

void file_put_f32(struct gguf_file *f, const char *key, float x)
{
    file_put_key(f, key, F32);
    file_put(f, &x, 4);
}

void file_put_string(struct gguf_file *f, const char *key, const char *text)
{
    file_put_key(f, key, STRING);
    file_put_text(f, text);
}

void file_put_tensor(struct gguf_file *f, const char *name, uint32_t n_dims, const uint64_t *dims,
                     uint32_t type, uint64_t offset)
{
    file_put_text(f, name);
    file_put_int(f, n_dims, 4);
    for (uint32_t i = 0; i < n_dims; i++)
        file_put_int(f, dims[i], 8);
    file_put_int(f, type, 4);
    file_put_int(f, offset, 8);
}

void file_pad(struct gguf_file *f, size_t alignment)
{
    while (f->n % alignment)
        file_put_int(f, 0, 1);
}
