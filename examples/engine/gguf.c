/* Reader of GGUF files: one cursor that never passes the end. */
#include "gguf.h"

#include <stdlib.h>
#include <string.h>

#include "dequant.h"

/* No real file comes near; they keep hostile ones from costing minutes. */
enum { MAX_VALUES = 65536, MAX_TENSORS = 65536 };

struct cursor {
    const uint8_t *at;
    size_t left;
};

static uint64_t little_endian(const uint8_t *p, size_t n)
{
    uint64_t x = 0;

    for (size_t i = n; i-- > 0;)
        x = x << 8 | p[i];
    return x;
}

static bool take(struct cursor *c, uint64_t n, const uint8_t **bytes)
{
    if (n > c->left)
        return false;
    *bytes = c->at;
    c->at += n;
    c->left -= (size_t)n;
    return true;
}

static bool take_u32(struct cursor *c, uint32_t *out)
{
    const uint8_t *p;

    if (!take(c, 4, &p))
        return false;
    *out = (uint32_t)little_endian(p, 4);
    return true;
}

static bool take_u64(struct cursor *c, uint64_t *out)
{
    const uint8_t *p;

    if (!take(c, 8, &p))
        return false;
    *out = little_endian(p, 8);
    return true;
}

static bool take_text(struct cursor *c, struct gguf_text *out)
{
    const uint8_t *p;
    uint64_t size;

    if (!take_u64(c, &size) || !take(c, size, &p))
        return false;
    out->data = (const char *)p;
    out->size = (size_t)size;
    return true;
}

/* Bytes of a type of fixed size; 0 for strings, arrays and unknown types. */
static size_t size_of_type(uint32_t type)
{
    static const uint8_t sizes[] = {
        [GGUF_U8] = 1,  [GGUF_I8] = 1,  [GGUF_U16] = 2, [GGUF_I16] = 2,
        [GGUF_U32] = 4, [GGUF_I32] = 4, [GGUF_F32] = 4, [GGUF_BOOL] = 1,
        [GGUF_U64] = 8, [GGUF_I64] = 8, [GGUF_F64] = 8,
    };

    return type < sizeof(sizes) ? sizes[type] : 0;
}

/* Passes over the elements of a value. */
static bool take_elements(struct cursor *c, struct gguf_value *value)
{
    const size_t size = size_of_type(value->type);
    const uint8_t *start = c->at;
    const uint8_t *bytes;
    struct gguf_text text;

    if (size > 0) {
        if (value->n > c->left / size || !take(c, value->n * size, &bytes))
            return false;
    } else {
        /* Each string takes 8 bytes at least, so the file bounds this loop. */
        for (uint64_t i = 0; i < value->n; i++)
            if (!take_text(c, &text))
                return false;
    }
    value->data = start;
    value->n_bytes = (size_t)(c->at - start);
    return true;
}

static bool take_value(struct cursor *c, struct gguf_value *value, struct failure *failure)
{
    uint32_t type;

    if (!take_text(c, &value->key) || !take_u32(c, &type))
        return fail_with(failure, "the metadata is cut off");
    value->is_array = type == GGUF_ARRAY;
    value->n = 1;
    if (value->is_array && (!take_u32(c, &type) || !take_u64(c, &value->n)))
        return fail_with(failure, "the metadata is cut off");
    if (type != GGUF_STRING && size_of_type(type) == 0)
        return fail_with(failure, "metadata of type %u is not supported", (unsigned)type);
    value->type = (enum gguf_type)type;
    if (!take_elements(c, value))
        return fail_with(failure, "the metadata is cut off");
    return true;
}

static bool take_values(struct cursor *c, uint64_t n, struct gguf *out, struct failure *failure)
{
    /* A key's length, a type and one byte are the least that an entry takes. */
    if (n > MAX_VALUES || n > c->left / 13)
        return fail_with(failure, "%llu metadata entries are more than the file can hold",
                         (unsigned long long)n);
    out->values = calloc((size_t)n + 1, sizeof(*out->values));
    if (!out->values)
        return fail_with(failure, "out of memory");
    for (; out->n_values < n; out->n_values++)
        if (!take_value(c, &out->values[out->n_values], failure))
            return false;
    return true;
}

/* Bytes of a tensor from its shape; false if the shape is no good. */
static bool tensor_size(struct gguf_tensor *tensor, size_t limit)
{
    const struct tensor_type *type = tensor_type_find(tensor->type);
    uint64_t n = 1;

    for (int i = 0; i < 4; i++) {
        if (tensor->dims[i] == 0 || tensor->dims[i] > UINT64_MAX / n)
            return false;
        n *= tensor->dims[i];
    }
    if (tensor->dims[0] % type->block_size != 0 || n / type->block_size > limit / type->block_bytes)
        return false;
    tensor->n_bytes = (size_t)(n / type->block_size * type->block_bytes);
    return true;
}

/* Name, shape and type; the offset is returned as it stands in the file. */
static bool take_tensor(struct cursor *c, struct gguf_tensor *tensor, uint64_t *offset,
                        struct failure *failure)
{
    if (!take_text(c, &tensor->name) || !take_u32(c, &tensor->n_dims))
        return fail_with(failure, "the list of tensors is cut off");
    if (tensor->n_dims < 1 || tensor->n_dims > 4)
        return fail_with(failure, "a tensor has %u dimensions", (unsigned)tensor->n_dims);
    for (uint32_t i = 0; i < 4; i++) {
        tensor->dims[i] = 1;
        if (i < tensor->n_dims && !take_u64(c, &tensor->dims[i]))
            return fail_with(failure, "the list of tensors is cut off");
    }
    if (!take_u32(c, &tensor->type) || !take_u64(c, offset))
        return fail_with(failure, "the list of tensors is cut off");
    if (!tensor_type_find(tensor->type))
        return fail_with(failure, "tensor type %u is not supported", (unsigned)tensor->type);
    return true;
}

static bool read_alignment(const struct gguf *gguf, uint64_t *alignment, struct failure *failure)
{
    const struct gguf_value *value = gguf_find(gguf, "general.alignment");

    *alignment = 32;
    if (value && (!gguf_to_u64(value, alignment) || *alignment == 0 || *alignment > 1 << 20 ||
                  (*alignment & (*alignment - 1)) != 0))
        return fail_with(failure, "general.alignment is no power of two up to 2^20");
    return true;
}

static uint64_t align_up(uint64_t n, uint64_t alignment)
{
    return (n + alignment - 1) & ~(alignment - 1);
}

/*
 * The tensors must follow each other in the order of the list, each at the next aligned offset, as
 * writers lay them out: so none can overlap another.
 */
static bool place_tensors(struct cursor *c, uint64_t alignment, const uint64_t *offsets,
                          struct gguf *out, struct failure *failure)
{
    uint64_t expected = 0;

    for (size_t i = 0; i < out->n_tensors; i++) {
        struct gguf_tensor *tensor = &out->tensors[i];
        if (offsets[i] != expected)
            return fail_with(failure, "tensor %zu does not follow the one before it", i);
        if (expected > c->left || !tensor_size(tensor, c->left - (size_t)expected))
            return fail_with(failure, "tensor %zu has a bad shape or passes the end of the file",
                             i);
        tensor->data = c->at + expected;
        expected = align_up(expected + tensor->n_bytes, alignment);
    }
    return true;
}

static bool take_tensors(struct cursor *c, const uint8_t *start, uint64_t n, struct gguf *out,
                         struct failure *failure)
{
    uint64_t alignment;
    const uint8_t *pad;

    /* Name length, one dimension, its size, type and offset are the least that a tensor takes. */
    if (n > MAX_TENSORS || n > c->left / 32)
        return fail_with(failure, "%llu tensors are more than the file can hold",
                         (unsigned long long)n);
    uint64_t *offsets = calloc((size_t)n + 1, sizeof(*offsets));
    out->tensors = calloc((size_t)n + 1, sizeof(*out->tensors));
    bool ok = offsets && out->tensors;
    if (!ok)
        fail_with(failure, "out of memory");
    for (; ok && out->n_tensors < n; out->n_tensors += ok)
        ok = take_tensor(c, &out->tensors[out->n_tensors], &offsets[out->n_tensors], failure);
    ok = ok && read_alignment(out, &alignment, failure);
    if (ok && n > 0) {
        const uint64_t used = (uint64_t)(c->at - start);
        if (!take(c, align_up(used, alignment) - used, &pad))
            ok = fail_with(failure, "the tensors are cut off");
        else
            ok = place_tensors(c, alignment, offsets, out, failure);
    }
    free(offsets);
    return ok;
}

bool gguf_parse(const uint8_t *data, size_t size, struct gguf *out, struct failure *failure)
{
    struct cursor c = {data, size};
    const uint8_t *magic;
    uint32_t version;
    uint64_t n_tensors, n_values;

    *out = (struct gguf){0};
    if (!take(&c, 4, &magic) || memcmp(magic, "GGUF", 4) != 0)
        return fail_with(failure, "not a GGUF file");
    if (!take_u32(&c, &version))
        return fail_with(failure, "the header is cut off");
    if (version != 2 && version != 3)
        return fail_with(failure, "GGUF version %u is not supported (2 and 3 are)",
                         (unsigned)version);
    if (!take_u64(&c, &n_tensors) || !take_u64(&c, &n_values))
        return fail_with(failure, "the header is cut off");
    if (!take_values(&c, n_values, out, failure) ||
        !take_tensors(&c, data, n_tensors, out, failure)) {
        gguf_free(out);
        return false;
    }
    return true;
}

void gguf_free(struct gguf *gguf)
{
    free(gguf->values);
    free(gguf->tensors);
    *gguf = (struct gguf){0};
}

bool gguf_text_is(struct gguf_text text, const char *literal)
{
    return text.size == strlen(literal) && memcmp(text.data, literal, text.size) == 0;
}

const struct gguf_value *gguf_find(const struct gguf *gguf, const char *key)
{
    for (size_t i = 0; i < gguf->n_values; i++)
        if (gguf_text_is(gguf->values[i].key, key))
            return &gguf->values[i];
    return NULL;
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *gguf, const char *name)
{
    for (size_t i = 0; i < gguf->n_tensors; i++)
        if (gguf_text_is(gguf->tensors[i].name, name))
            return &gguf->tensors[i];
    return NULL;
}

bool gguf_element_u64(const struct gguf_value *value, uint64_t i, uint64_t *out)
{
    const bool is_signed = value->type == GGUF_I8 || value->type == GGUF_I16 ||
                           value->type == GGUF_I32 || value->type == GGUF_I64;
    const bool is_unsigned = value->type == GGUF_U8 || value->type == GGUF_U16 ||
                             value->type == GGUF_U32 || value->type == GGUF_U64 ||
                             value->type == GGUF_BOOL;
    const size_t size = size_of_type(value->type);

    if (!(is_signed || is_unsigned) || i >= value->n)
        return false;
    *out = little_endian(value->data + i * size, size);
    return is_unsigned || *out >> (8 * size - 1) == 0;
}

bool gguf_element_f32(const struct gguf_value *value, uint64_t i, float *out)
{
    if (value->type != GGUF_F32 || i >= value->n)
        return false;
    const uint32_t bits = (uint32_t)little_endian(value->data + i * 4, 4);
    memcpy(out, &bits, sizeof(*out));
    return true;
}

bool gguf_to_u64(const struct gguf_value *value, uint64_t *out)
{
    return value && !value->is_array && gguf_element_u64(value, 0, out);
}

bool gguf_to_f64(const struct gguf_value *value, double *out)
{
    uint64_t bits;
    float narrow;

    if (!value || value->is_array)
        return false;
    if (gguf_element_f32(value, 0, &narrow)) {
        *out = (double)narrow;
        return true;
    }
    if (value->type != GGUF_F64)
        return false;
    bits = little_endian(value->data, 8);
    memcpy(out, &bits, sizeof(*out));
    return true;
}

bool gguf_to_text(const struct gguf_value *value, struct gguf_text *out)
{
    if (!value || value->is_array || value->type != GGUF_STRING)
        return false;
    struct cursor c = {value->data, value->n_bytes};
    return take_text(&c, out);
}

bool gguf_next_text(const struct gguf_value *value, size_t *at, struct gguf_text *out)
{
    if (!value->is_array || value->type != GGUF_STRING || *at >= value->n_bytes)
        return false;
    struct cursor c = {value->data + *at, value->n_bytes - *at};
    if (!take_text(&c, out))
        return false;
    *at = value->n_bytes - c.left;
    return true;
}
