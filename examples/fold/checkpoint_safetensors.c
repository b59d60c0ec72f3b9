/* Safetensors files for a fold: the shape from config.json, the record in __metadata__. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint.h"
#include "file.h"

/* Where the header as it was is kept, so that unfolding gives the same file. */
#define RECORD_HEADER RECORD_PREFIX "header"

/* Pairs are half-split in all of them. */
static const struct architecture {
    const char *name; /* model_type */
    kvc_smooth_type type;
    float gain_offset;
} architectures[] = {
    {"llama", KVC_SMOOTH_ROPE_LINEAR, 0.0f},     {"mistral", KVC_SMOOTH_ROPE_LINEAR, 0.0f},
    {"qwen2", KVC_SMOOTH_ROPE_LINEAR, 0.0f},     {"qwen3", KVC_SMOOTH_ROPE_NORM, 0.0f},
    {"gemma3_text", KVC_SMOOTH_ROPE_NORM, 1.0f},
};

/* ---- config.json ---- */

static bool read_architecture(const json_t *config, struct checkpoint *c, struct failure *failure)
{
    const char *name = json_string_value(json_object_get(config, "model_type"));

    if (!name)
        return fail_with(failure, "config.json has no model_type");
    for (size_t i = 0; i < sizeof(architectures) / sizeof(*architectures); i++)
        if (strcmp(architectures[i].name, name) == 0) {
            snprintf(c->architecture, sizeof(c->architecture), "%s", name);
            c->type = architectures[i].type;
            c->gain_offset = architectures[i].gain_offset;
            return true;
        }
    return fail_with(failure,
                     "the model_type \"%.40s\" cannot be folded: only llama, mistral, qwen2, qwen3 "
                     "and gemma3 can",
                     name);
}

/* Leaves *out where the key is missing or null; 0 is what is required. */
static bool read_size(const json_t *config, const char *key, size_t *out, struct failure *failure)
{
    const json_t *value = json_object_get(config, key);

    if (!value || json_is_null(value))
        return *out > 0 || fail_with(failure, "config.json has no %s", key);
    if (!json_is_integer(value) || json_integer_value(value) < 1 ||
        json_integer_value(value) > INT32_MAX)
        return fail_with(failure, "%s in config.json is no number that fits", key);
    *out = (size_t)json_integer_value(value);
    return true;
}

static double read_real(const json_t *config, const char *key, double otherwise)
{
    const json_t *value = json_object_get(config, key);

    return json_is_number(value) ? json_number_value(value) : otherwise;
}

static bool refuse_breakers(const json_t *config, struct failure *failure)
{
    static const char *const keys[] = {"clip_qkv", "kv_lora_rank", "quantization_config"};

    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
        const json_t *value = json_object_get(config, keys[i]);
        if (value && !json_is_null(value))
            return fail_with(failure, "%s in config.json: such a model cannot be folded", keys[i]);
    }
    return true;
}

static bool read_config(const json_t *config, struct checkpoint *c, struct failure *failure)
{
    size_t hidden = 0;

    if (!read_architecture(config, c, failure) || !refuse_breakers(config, failure) ||
        !read_size(config, "num_hidden_layers", &c->n_layers, failure) ||
        !read_size(config, "hidden_size", &hidden, failure) ||
        !read_size(config, "num_attention_heads", &c->n_heads, failure))
        return false;
    c->n_kv_heads = c->n_heads;
    c->head_dim = hidden / c->n_heads;
    if (!read_size(config, "num_key_value_heads", &c->n_kv_heads, failure) ||
        (json_object_get(config, "head_dim") &&
         !read_size(config, "head_dim", &c->head_dim, failure)))
        return false;
    const double n_rot = read_real(config, "partial_rotary_factor", 1.0) * (double)c->head_dim;
    c->rope.n_dims = n_rot >= 0.0 && n_rot <= KVC_MAX_HEAD_DIM ? (int32_t)n_rot : 0;
    c->rope.base = read_real(config, "rope_theta", c->rope.base);
    return checkpoint_allocate(c, failure);
}

/* config.json in the folder of the model's file. */
static bool beside(const char *path, const char *name, char *out, size_t size)
{
    const char *slash = strrchr(path, '/');
    const int n = slash ? (int)(slash - path + 1) : 0;

    return snprintf(out, size, "%.*s%s", n, path, name) < (int)size;
}

/* The text model of a larger one is what attends. */
static const json_t *text_config(const json_t *config)
{
    const char *type = json_string_value(json_object_get(config, "model_type"));

    return type && strcmp(type, "gemma3") == 0 ? json_object_get(config, "text_config") : config;
}

static bool open_config(const char *path, const char *config_path, struct checkpoint *c,
                        struct failure *failure)
{
    char found[4096];
    unsigned char *text;
    size_t size;

    if (!config_path && !beside(path, "config.json", found, sizeof(found)))
        return fail_with(failure, "the path is too long");
    if (!file_read(config_path ? config_path : found, &text, &size, failure))
        return false;
    json_t *config = json_loadb((const char *)text, size, JSON_REJECT_DUPLICATES, NULL);
    free(text);
    const bool ok = json_is_object(config) ? read_config(text_config(config), c, failure)
                                           : fail_with(failure, "config.json is no JSON object");
    json_decref(config);
    return ok;
}

/* ---- tensors ---- */

static bool type_of(const struct safetensor *t, uint32_t *type)
{
    static const struct {
        const char *dtype;
        uint32_t type;
    } all[] = {{"F32", 0}, {"F16", 1}, {"BF16", 30}};

    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        if (strcmp(all[i].dtype, t->dtype) == 0) {
            *type = all[i].type;
            return true;
        }
    return false;
}

enum { VECTOR = 1, MATRIX = 2 };

/* A tensor that is not there leaves *out empty. */
static bool take(const struct checkpoint *c, const char *attention, const char *part, size_t n_dims,
                 size_t n_rows, struct weight *out, struct failure *failure)
{
    /* Models whose text part is one of several keep it under other names. */
    static const char *const prefixes[] = {"", "language_model.", "model.language_"};
    const struct safetensor *t = NULL;
    char name[192];

    for (size_t i = 0; i < sizeof(prefixes) / sizeof(*prefixes) && !t; i++) {
        snprintf(name, sizeof(name), "%s%s.%s", prefixes[i], attention, part);
        t = safetensors_find(&c->safetensors, name);
    }
    if (!t)
        return true;
    if (t->n_dims != n_dims || t->dims[0] != n_rows || t->n_bytes == 0)
        return fail_with(failure, "%s has not %zu rows", name, n_rows);
    *out = (struct weight){.data = c->bytes + (t->data - c->bytes),
                           .n_rows = n_rows,
                           .n_cols = n_dims == MATRIX ? (size_t)t->dims[1] : 1};
    return type_of(t, &out->type) ||
           fail_with(failure, "%s is of type %s, which cannot be folded", name, t->dtype);
}

static bool take_attention(const struct checkpoint *c, size_t layer, struct attention *a,
                           struct failure *failure)
{
    const size_t n_q = c->n_heads * c->head_dim, n_k = checkpoint_width(c);

    snprintf(a->name, sizeof(a->name), "model.layers.%zu.self_attn", layer);
    if (!take(c, a->name, "q_proj.weight", MATRIX, n_q, &a->q, failure) ||
        !take(c, a->name, "q_proj.bias", VECTOR, n_q, &a->q_bias, failure) ||
        !take(c, a->name, "k_proj.weight", MATRIX, n_k, &a->k, failure) ||
        !take(c, a->name, "k_proj.bias", VECTOR, n_k, &a->k_bias, failure) ||
        !take(c, a->name, "q_norm.weight", VECTOR, c->head_dim, &a->q_norm, failure) ||
        !take(c, a->name, "k_norm.weight", VECTOR, c->head_dim, &a->k_norm, failure))
        return false;
    if (c->type == KVC_SMOOTH_ROPE_LINEAR && (a->q_norm.data || a->k_norm.data))
        return fail_with(failure, "%s: a norm behind the projections takes their scale away",
                         a->name);
    return true;
}

/* A part of a model would be folded in part. */
static bool refuse_parts(const char *path, struct failure *failure)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char index[4096];

    if (strstr(name, ".index.json") || strstr(name, "-of-"))
        return fail_with(failure, "the model is in several files: join them first");
    if (strcmp(name, "model.safetensors") != 0 &&
        beside(path, "model.safetensors.index.json", index, sizeof(index)) &&
        access(index, F_OK) == 0)
        return fail_with(failure, "beside it is model.safetensors.index.json, so the model is in "
                                  "several files: join them first");
    return true;
}

/* ---- the record ---- */

static bool read_numbers(const char *text, float *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char *end;
        out[i] = strtof(text, &end);
        if (end == text)
            return false;
        text = end;
    }
    return *text == '\0';
}

static bool read_record(struct checkpoint *c, struct failure *failure)
{
    const struct safetensors *s = &c->safetensors;
    const char *version = safetensors_metadata(s, RECORD_PREFIX "version");
    const char *factor = safetensors_metadata(s, RECORD_PREFIX "factor");
    const size_t n = checkpoint_width(c);
    char key[64];

    c->record.is_there = version != NULL;
    if (!version)
        return true;
    if (!factor || !read_numbers(factor, &c->record.factor, 1))
        return fail_with(failure, "the record of a fold is damaged");
    c->record.version = strcmp(version, "1") == 0 ? 1 : 0;
    for (size_t layer = 0; layer < c->n_layers; layer++) {
        snprintf(key, sizeof(key), RECORD_PREFIX "scale.%zu", layer);
        const char *text = safetensors_metadata(s, key);
        c->record.folded[layer] = text != NULL;
        if (text && !read_numbers(text, c->record.scales + layer * n, n))
            return fail_with(failure, "%s is not %zu numbers", key, n);
    }
    return checkpoint_check_record(c, failure);
}

bool checkpoint_read_safetensors(const char *path, const char *config_path, struct checkpoint *c,
                                 struct failure *failure)
{
    if (!refuse_parts(path, failure) ||
        !safetensors_parse(c->bytes, c->size, &c->safetensors, failure) ||
        !open_config(path, config_path, c, failure))
        return false;
    for (size_t layer = 0; layer < c->n_layers; layer++)
        if (!take_attention(c, layer, &c->attentions[layer], failure))
            return false;
    return read_record(c, failure);
}

/* Numbers as text that reads back as they were. */
static json_t *numbers_text(const float *x, size_t n)
{
    char *text = malloc(n * 16 + 1);
    size_t at = 0;

    for (size_t i = 0; text && i < n; i++)
        at += (size_t)snprintf(text + at, 17, i == 0 ? "%.9g" : " %.9g", (double)x[i]);
    json_t *value = text ? json_string(text) : NULL;
    free(text);
    return value;
}

/* Adds the record to the metadata of a header. */
static bool add_record(const struct checkpoint *c, json_t *header)
{
    const size_t n = checkpoint_width(c);
    json_t *metadata = json_object_get(header, "__metadata__");
    char key[64];

    if (!metadata) {
        metadata = json_object();
        if (json_object_set_new(header, "__metadata__", metadata) != 0)
            return false;
    }
    bool ok =
        json_object_set_new(metadata, RECORD_PREFIX "version", json_string("1")) == 0 &&
        json_object_set_new(metadata, RECORD_PREFIX "factor", numbers_text(&c->record.factor, 1)) ==
            0 &&
        json_object_set_new(metadata, RECORD_HEADER,
                            json_stringn((const char *)c->bytes + 8, c->safetensors.data_at - 8)) ==
            0;
    for (size_t layer = 0; layer < c->n_layers && ok; layer++) {
        snprintf(key, sizeof(key), RECORD_PREFIX "scale.%zu", layer);
        if (c->record.folded[layer])
            ok = json_object_set_new(metadata, key,
                                     numbers_text(c->record.scales + layer * n, n)) == 0;
    }
    return ok;
}

/* Takes it out again, and the metadata if nothing else was in it. */
static void drop_record(json_t *header)
{
    json_t *metadata = json_object_get(header, "__metadata__"), *value;
    const char *key;
    void *next;

    json_object_foreach_safe(metadata, next, key,
                             value) if (strncmp(key, RECORD_PREFIX, strlen(RECORD_PREFIX)) == 0)
        json_object_del(metadata, key);
    if (json_object_size(metadata) == 0)
        json_object_del(header, "__metadata__");
}

/* The header that was before the fold, where it says the same as this one; the caller frees it. */
static char *header_before(const struct checkpoint *c, const json_t *header)
{
    const char *text = safetensors_metadata(&c->safetensors, RECORD_HEADER);
    json_t *before = text ? json_loads(text, JSON_REJECT_DUPLICATES, NULL) : NULL;
    const bool same = before && json_equal(before, header);

    json_decref(before);
    return same ? strdup(text) : NULL;
}

/* A header as JSON; of a fold that is undone the one that was before, byte for byte. */
static char *header_text(const struct checkpoint *c, size_t *n_padding)
{
    json_t *header = json_deep_copy(c->safetensors.header);
    char *text = NULL;
    bool ok = header != NULL;

    *n_padding = 0;
    if (ok && c->record.is_there) {
        ok = add_record(c, header);
    } else if (ok) {
        drop_record(header);
        text = header_before(c, header);
    }
    if (ok && !text) {
        text = json_dumps(header, JSON_COMPACT);
        *n_padding = text ? (8 - strlen(text) % 8) % 8 : 0; /* elements of 8 bytes stay aligned */
    }
    json_decref(header);
    return text;
}

bool checkpoint_write_safetensors(struct checkpoint *c, struct failure *failure)
{
    size_t n_padding, size = 0;
    char *head = NULL, *text = header_text(c, &n_padding);
    FILE *out = text ? open_memstream(&head, &size) : NULL;
    bool ok = out != NULL;

    if (ok) {
        const size_t n = strlen(text);
        for (size_t i = 0; i < 8; i++)
            putc((int)((uint64_t)(n + n_padding) >> (8 * i) & 255), out);
        fwrite(text, 1, n, out);
        for (size_t i = 0; i < n_padding; i++)
            putc(' ', out);
        ok = !ferror(out);
        ok = fclose(out) == 0 && ok;
    }
    free(text);
    if (ok)
        ok = checkpoint_replace_head(c, head, size, c->safetensors.data_at, failure);
    else
        fail_with(failure, "out of memory");
    free(head);
    return ok;
}

/* ---- two files ---- */

/* A header without what belongs to a record; the caller frees it. */
static json_t *kept_header(const struct checkpoint *c)
{
    json_t *header = json_deep_copy(c->safetensors.header);

    drop_record(header);
    return header;
}

static bool same_headers(const json_t *a, const json_t *b, struct failure *failure)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)a, key, value)
    {
        if (json_equal(value, json_object_get(b, key)))
            continue;
        if (strcmp(key, "__metadata__") == 0)
            return fail_with(failure, "the metadata differ");
        return fail_with(failure, "tensor %.80s is missing, elsewhere, or of another type or shape",
                         key);
    }
    return json_object_size(a) == json_object_size(b) ||
           fail_with(failure, "the files have different tensors or metadata");
}

bool checkpoint_same_head_safetensors(const struct checkpoint *a, const struct checkpoint *b,
                                      struct failure *failure)
{
    json_t *x = kept_header(a), *y = kept_header(b);
    const bool ok = x && y ? same_headers(x, y, failure) : fail_with(failure, "out of memory");

    json_decref(x);
    json_decref(y);
    return ok;
}
