/* Reader of GGUF files (versions 2 and 3, little endian) that trusts nothing in them. */
#ifndef ENGINE_GGUF_H
#define ENGINE_GGUF_H

#include <stddef.h>
#include <stdint.h>

#include "failure.h"

/* Bytes inside the file; not terminated. */
struct gguf_text {
    const char *data;
    size_t size;
};

enum gguf_type {
    GGUF_U8 = 0,
    GGUF_I8 = 1,
    GGUF_U16 = 2,
    GGUF_I16 = 3,
    GGUF_U32 = 4,
    GGUF_I32 = 5,
    GGUF_F32 = 6,
    GGUF_BOOL = 7,
    GGUF_STRING = 8,
    GGUF_ARRAY = 9,
    GGUF_U64 = 10,
    GGUF_I64 = 11,
    GGUF_F64 = 12
};

/* One metadata entry. A scalar has is_array false and n 1. */
struct gguf_value {
    struct gguf_text key;
    enum gguf_type type; /* of the value, or of each element of the array */
    bool is_array;
    uint64_t n;
    const uint8_t *data; /* the elements as they are in the file, checked to lie inside it */
    size_t n_bytes;
};

struct gguf_tensor {
    struct gguf_text name;
    uint32_t n_dims;
    uint64_t dims[4]; /* dims[0] varies fastest: the length of a row; absent ones are 1 */
    uint32_t type;    /* ggml's number; gguf_parse() accepts those that tensor_rows() reads */
    const uint8_t *data;
    size_t n_bytes;
};

/* Everything points into the bytes given to gguf_parse(), which must stay. */
struct gguf {
    struct gguf_value *values;
    size_t n_values;
    struct gguf_tensor *tensors;
    size_t n_tensors;
};

/*
 * Parse a file. Nested arrays, tensors out of order and tensor types without a dequantizer are
 * refused. Allocates a few times the size of the file's own header at most. After a failure *out is
 * empty.
 */
bool gguf_parse(const uint8_t *data, size_t size, struct gguf *out, struct failure *failure);
void gguf_free(struct gguf *gguf);

/* The first entry or tensor of that name, or NULL. */
const struct gguf_value *gguf_find(const struct gguf *gguf, const char *key);
const struct gguf_tensor *gguf_find_tensor(const struct gguf *gguf, const char *name);

/* A scalar as another type; false where it is NULL, an array, of another kind or (u64) negative. */
bool gguf_to_u64(const struct gguf_value *value, uint64_t *out);
bool gguf_to_f64(const struct gguf_value *value, double *out);
bool gguf_to_text(const struct gguf_value *value, struct gguf_text *out);

/* Element i of an array of integers, as gguf_to_u64(), or of floats; false beyond the end. */
bool gguf_element_u64(const struct gguf_value *value, uint64_t i, uint64_t *out);
bool gguf_element_f32(const struct gguf_value *value, uint64_t i, float *out);

/* Walks an array of strings: *at starts at 0. False at the end, or if it is no such array. */
bool gguf_next_text(const struct gguf_value *value, size_t *at, struct gguf_text *out);

bool gguf_text_is(struct gguf_text text, const char *literal);

#endif
