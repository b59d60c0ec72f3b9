/* Reader of safetensors files: 8 bytes with the size of a JSON header, the header, the data. */
#include "safetensors.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* As other readers limit it. */
enum { MAX_HEADER = 100000000 };

#define METADATA "__metadata__"

/* Bytes of an element; 0: not known. */
static size_t size_of_dtype(const char *dtype)
{
    static const struct {
        const char *name;
        size_t size;
    } all[] = {{"F64", 8},     {"F32", 4},     {"F16", 2},     {"BF16", 2}, {"I64", 8}, {"I32", 4},
               {"I16", 2},     {"I8", 1},      {"U64", 8},     {"U32", 4},  {"U16", 2}, {"U8", 1},
               {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"BOOL", 1}, {"C64", 8}};

    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        if (strcmp(all[i].name, dtype) == 0)
            return all[i].size;
    return 0;
}

static bool to_u64(const json_t *value, uint64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *out = (uint64_t)json_integer_value(value);
    return true;
}

/* Shape and type; *n_bytes is what they take. */
static bool read_shape(const json_t *entry, struct safetensor *tensor, uint64_t *n_bytes)
{
    const json_t *shape = json_object_get(entry, "shape");

    tensor->dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!tensor->dtype || !json_is_array(shape) || json_array_size(shape) > SAFETENSORS_MAX_DIMS)
        return false;
    tensor->n_dims = json_array_size(shape);
    *n_bytes = size_of_dtype(tensor->dtype);
    for (size_t i = 0; i < tensor->n_dims; i++)
        if (!to_u64(json_array_get(shape, i), &tensor->dims[i]) ||
            __builtin_mul_overflow(*n_bytes, tensor->dims[i], n_bytes))
            return false;
    return size_of_dtype(tensor->dtype) > 0;
}

static bool read_tensor(const char *name, const json_t *entry, const uint8_t *data, size_t size,
                        struct safetensor *tensor, struct failure *failure)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    uint64_t from, to, n_bytes;

    tensor->name = name;
    if (json_object_size(entry) != 3 || !read_shape(entry, tensor, &n_bytes))
        return fail_with(failure, "tensor %.80s has a bad type or shape", name);
    if (json_array_size(offsets) != 2 || !to_u64(json_array_get(offsets, 0), &from) ||
        !to_u64(json_array_get(offsets, 1), &to) || from > to || to > size || to - from != n_bytes)
        return fail_with(failure, "tensor %.80s has bad offsets", name);
    tensor->data = data + from;
    tensor->n_bytes = (size_t)n_bytes;
    return true;
}

static bool read_metadata(const json_t *metadata, struct failure *failure)
{
    const char *key;
    json_t *value;

    if (!json_is_object(metadata))
        return fail_with(failure, METADATA " is no object");
    json_object_foreach(
        (json_t *)metadata, key,
        value) if (!json_is_string(value)) return fail_with(failure, METADATA
                                                            " has a value that is no text");
    return true;
}

static int compare_places(const void *a, const void *b)
{
    const struct safetensor *x = a, *y = b;

    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return x->n_bytes < y->n_bytes ? -1 : x->n_bytes > y->n_bytes;
}

/* Each begins where the one before ends. */
static bool check_cover(const struct safetensors *s, const uint8_t *data, size_t size,
                        struct failure *failure)
{
    const uint8_t *at = data;

    for (size_t i = 0; i < s->n_tensors; i++) {
        if (s->tensors[i].data != at)
            return fail_with(failure, "tensor %.80s overlaps another, or a hole is before it",
                             s->tensors[i].name);
        at += s->tensors[i].n_bytes;
    }
    return at == data + size || fail_with(failure, "there is data behind the last tensor");
}

static bool read_tensors(struct safetensors *s, const uint8_t *data, size_t size,
                         struct failure *failure)
{
    const char *key;
    json_t *value;

    s->tensors = calloc(json_object_size(s->header) + 1, sizeof(*s->tensors));
    if (!s->tensors)
        return fail_with(failure, "out of memory");
    json_object_foreach(s->header, key, value)
    {
        const bool is_metadata = strcmp(key, METADATA) == 0;
        const bool ok =
            is_metadata ? read_metadata(value, failure)
                        : read_tensor(key, value, data, size, &s->tensors[s->n_tensors], failure);
        if (!ok)
            return false;
        s->n_tensors += !is_metadata;
    }
    qsort(s->tensors, s->n_tensors, sizeof(*s->tensors), compare_places);
    return check_cover(s, data, size, failure);
}

bool safetensors_parse(const uint8_t *data, size_t size, struct safetensors *out,
                       struct failure *failure)
{
    uint64_t n = 0;
    json_error_t error;

    *out = (struct safetensors){0};
    for (size_t i = 8; size > 8 && i-- > 0;)
        n = n << 8 | data[i];
    if (n == 0 || n > MAX_HEADER || data[8] != '{')
        return fail_with(failure, "neither a GGUF nor a safetensors file, or cut off");
    if (n > size - 8)
        return fail_with(failure, "the header is cut off");
    out->header = json_loadb((const char *)data + 8, (size_t)n, JSON_REJECT_DUPLICATES, &error);
    if (!out->header)
        return fail_with(failure, "the header is no JSON: %.150s", error.text);
    out->data_at = 8 + (size_t)n;
    if (!read_tensors(out, data + out->data_at, size - out->data_at, failure)) {
        safetensors_free(out);
        return false;
    }
    return true;
}

void safetensors_free(struct safetensors *s)
{
    free(s->tensors);
    json_decref(s->header);
    *s = (struct safetensors){0};
}

const struct safetensor *safetensors_find(const struct safetensors *s, const char *name)
{
    for (size_t i = 0; i < s->n_tensors; i++)
        if (strcmp(s->tensors[i].name, name) == 0)
            return &s->tensors[i];
    return NULL;
}

const char *safetensors_metadata(const struct safetensors *s, const char *key)
{
    return json_string_value(json_object_get(json_object_get(s->header, METADATA), key));
}
