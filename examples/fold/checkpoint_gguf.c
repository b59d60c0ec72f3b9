/* GGUF files for a fold: four architectures, and the record among the metadata. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "dequant.h"

static const struct architecture {
    const char *name;
    kvc_rope_layout layout;
    kvc_smooth_type type;
} architectures[] = {
    {"llama", KVC_ROPE_INTERLEAVED, KVC_SMOOTH_ROPE_LINEAR},
    {"qwen2", KVC_ROPE_HALF_SPLIT, KVC_SMOOTH_ROPE_LINEAR},
    {"qwen3", KVC_ROPE_HALF_SPLIT, KVC_SMOOTH_ROPE_NORM},
    {"gemma3", KVC_ROPE_HALF_SPLIT, KVC_SMOOTH_ROPE_NORM}, /* these files keep the whole gain */
};

static bool read_architecture(struct checkpoint *c, struct failure *failure)
{
    struct gguf_text text;

    if (!gguf_to_text(gguf_find(&c->gguf, "general.architecture"), &text))
        return fail_with(failure, "general.architecture is missing");
    for (size_t i = 0; i < sizeof(architectures) / sizeof(*architectures); i++)
        if (gguf_text_is(text, architectures[i].name)) {
            snprintf(c->architecture, sizeof(c->architecture), "%s", architectures[i].name);
            c->rope.layout = architectures[i].layout;
            c->type = architectures[i].type;
            return true;
        }
    return fail_with(failure,
                     "the architecture \"%.*s\" cannot be folded: only llama, qwen2, qwen3 and "
                     "gemma3 can",
                     (int)(text.size < 40 ? text.size : 40), text.data);
}

static const struct gguf_value *find(const struct checkpoint *c, const char *key)
{
    char whole[96];

    snprintf(whole, sizeof(whole), "%s.%s", c->architecture, key);
    return gguf_find(&c->gguf, whole);
}

/* A number, or an array that says the same for every layer. */
static bool read_size(const struct checkpoint *c, const char *key, size_t *out,
                      struct failure *failure)
{
    const struct gguf_value *value = find(c, key);
    uint64_t n, other;

    if (!value)
        return *out > 0 || fail_with(failure, "%s.%s is missing", c->architecture, key);
    if (!gguf_element_u64(value, 0, &n) || n > INT32_MAX)
        return fail_with(failure, "%s.%s is no number that fits", c->architecture, key);
    for (uint64_t i = 1; i < value->n; i++)
        if (!gguf_element_u64(value, i, &other) || other != n)
            return fail_with(failure, "%s.%s differs between layers, which cannot be folded",
                             c->architecture, key);
    *out = (size_t)n;
    return true;
}

/* What stands between a projection and the cache, or a file that is only a part of its model. */
static bool refuse_breakers(const struct checkpoint *c, struct failure *failure)
{
    static const char *const keys[] = {"attention.clamp_kqv", "attention.kv_lora_rank",
                                       "attention.key_length_mla"};
    uint64_t n;
    double x;

    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
        const struct gguf_value *value = find(c, keys[i]);
        if (value && !(gguf_to_f64(value, &x) && x == 0.0) && !(gguf_to_u64(value, &n) && n == 0))
            return fail_with(failure, "%s.%s: such attention cannot be folded", c->architecture,
                             keys[i]);
    }
    if (gguf_to_u64(gguf_find(&c->gguf, "split.count"), &n) && n > 1)
        return fail_with(failure, "the model is in %llu files: join them first",
                         (unsigned long long)n);
    return true;
}

static bool read_shape(struct checkpoint *c, struct failure *failure)
{
    size_t n_embd = 0, n_rot;

    if (!read_size(c, "block_count", &c->n_layers, failure) ||
        !read_size(c, "embedding_length", &n_embd, failure) ||
        !read_size(c, "attention.head_count", &c->n_heads, failure))
        return false;
    c->n_kv_heads = c->n_heads;
    if (!read_size(c, "attention.head_count_kv", &c->n_kv_heads, failure))
        return false;
    c->head_dim = c->n_heads > 0 ? n_embd / c->n_heads : 0;
    if (find(c, "attention.key_length") &&
        !read_size(c, "attention.key_length", &c->head_dim, failure))
        return false;
    n_rot = c->head_dim;
    if (find(c, "rope.dimension_count") && !read_size(c, "rope.dimension_count", &n_rot, failure))
        return false;
    c->rope.n_dims = n_rot <= KVC_MAX_HEAD_DIM ? (int32_t)n_rot : 0;
    const struct gguf_value *base = find(c, "rope.freq_base");
    return !base || gguf_to_f64(base, &c->rope.base) ||
           fail_with(failure, "%s.rope.freq_base is no number", c->architecture);
}

enum { VECTOR = 1, MATRIX = 2 };

/* A tensor that is not there leaves *out empty. */
static bool take(const struct checkpoint *c, size_t layer, const char *part, int n_dims,
                 size_t n_rows, struct weight *out, struct failure *failure)
{
    char name[64];

    snprintf(name, sizeof(name), "blk.%zu.%s", layer, part);
    const struct gguf_tensor *t = gguf_find_tensor(&c->gguf, name);
    if (!t)
        return true;
    const uint64_t *behind = t->dims + n_dims;
    if (t->dims[n_dims - 1] != n_rows || behind[0] != 1 || (n_dims == VECTOR && behind[1] != 1) ||
        t->dims[3] != 1)
        return fail_with(failure, "%s has not %zu rows", name, n_rows);
    if (n_dims == VECTOR && tensor_type_find(t->type)->block_size != 1)
        return fail_with(failure, "%s is quantized", name);
    *out = (struct weight){.data = c->bytes + (t->data - c->bytes),
                           .type = t->type,
                           .n_rows = n_rows,
                           .n_cols = n_dims == VECTOR ? 1 : (size_t)t->dims[0]};
    return true;
}

static bool take_attention(const struct checkpoint *c, size_t layer, struct attention *a,
                           struct failure *failure)
{
    const size_t n_q = c->n_heads * c->head_dim, n_k = checkpoint_width(c);

    snprintf(a->name, sizeof(a->name), "model.layers.%zu.self_attn", layer);
    if (!take(c, layer, "attn_q.weight", MATRIX, n_q, &a->q, failure) ||
        !take(c, layer, "attn_q.bias", VECTOR, n_q, &a->q_bias, failure) ||
        !take(c, layer, "attn_k.weight", MATRIX, n_k, &a->k, failure) ||
        !take(c, layer, "attn_k.bias", VECTOR, n_k, &a->k_bias, failure) ||
        !take(c, layer, "attn_q_norm.weight", VECTOR, c->head_dim, &a->q_norm, failure) ||
        !take(c, layer, "attn_k_norm.weight", VECTOR, c->head_dim, &a->k_norm, failure))
        return false;
    if (c->type == KVC_SMOOTH_ROPE_LINEAR && (a->q_norm.data || a->k_norm.data))
        return fail_with(failure, "blk.%zu: a norm behind the projections takes their scale away",
                         layer);
    return true;
}

static bool read_scales(struct checkpoint *c, size_t layer, struct failure *failure)
{
    char key[64];
    const size_t n = checkpoint_width(c);
    float *scales = c->record.scales + layer * n;

    snprintf(key, sizeof(key), RECORD_PREFIX "scale.%zu", layer);
    const struct gguf_value *value = gguf_find(&c->gguf, key);
    if (!value)
        return true;
    if (!value->is_array || value->type != GGUF_F32 || value->n != n)
        return fail_with(failure, "%s is not %zu numbers", key, n);
    memcpy(scales, value->data, n * sizeof(*scales));
    c->record.folded[layer] = true;
    return true;
}

static bool read_record(struct checkpoint *c, struct failure *failure)
{
    const struct gguf_value *version = gguf_find(&c->gguf, RECORD_PREFIX "version");
    double factor = 0.0;

    c->record.is_there = version != NULL;
    if (!version)
        return true;
    if (!gguf_to_u64(version, &c->record.version) ||
        !gguf_to_f64(gguf_find(&c->gguf, RECORD_PREFIX "factor"), &factor))
        return fail_with(failure, "the record of a fold is damaged");
    c->record.factor = (float)factor;
    for (size_t layer = 0; layer < c->n_layers; layer++)
        if (!read_scales(c, layer, failure))
            return false;
    return checkpoint_check_record(c, failure);
}

bool checkpoint_read_gguf(struct checkpoint *c, struct failure *failure)
{
    if (!gguf_parse(c->bytes, c->size, &c->gguf, failure) || !read_architecture(c, failure) ||
        !refuse_breakers(c, failure) || !read_shape(c, failure) || !checkpoint_allocate(c, failure))
        return false;
    if (c->gguf.n_tensors == 0)
        return fail_with(failure, "the file has no tensors");
    for (size_t layer = 0; layer < c->n_layers; layer++)
        if (!take_attention(c, layer, &c->attentions[layer], failure))
            return false;
    return read_record(c, failure);
}

/* ---- writing ---- */

static void put_int(FILE *out, uint64_t x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        putc((int)(x >> (8 * i) & 255), out);
}

static void put_key(FILE *out, const char *key, uint32_t type)
{
    put_int(out, strlen(key), 8);
    fputs(key, out);
    put_int(out, type, 4);
}

static void put_record(const struct checkpoint *c, FILE *out)
{
    const size_t n = checkpoint_width(c);
    char key[64];

    put_key(out, RECORD_PREFIX "version", GGUF_U32);
    put_int(out, c->record.version, 4);
    put_key(out, RECORD_PREFIX "factor", GGUF_F32);
    fwrite(&c->record.factor, sizeof(c->record.factor), 1, out);
    for (size_t layer = 0; layer < c->n_layers; layer++) {
        if (!c->record.folded[layer])
            continue;
        snprintf(key, sizeof(key), RECORD_PREFIX "scale.%zu", layer);
        put_key(out, key, GGUF_ARRAY);
        put_int(out, GGUF_F32, 4);
        put_int(out, n, 8);
        fwrite(c->record.scales + layer * n, sizeof(float), n, out);
    }
}

static bool is_of_record(const struct gguf_value *value)
{
    const size_t n = strlen(RECORD_PREFIX);

    return value->key.size >= n && memcmp(value->key.data, RECORD_PREFIX, n) == 0;
}

static size_t count_entries(const struct checkpoint *c)
{
    size_t n = c->record.is_there ? 2 : 0;

    for (size_t i = 0; i < c->gguf.n_values; i++)
        n += !is_of_record(&c->gguf.values[i]);
    for (size_t layer = 0; layer < c->n_layers; layer++)
        n += c->record.is_there && c->record.folded[layer];
    return n;
}

/* All entries but those of a record. */
static void put_kept(const struct checkpoint *c, FILE *out)
{
    for (size_t i = 0; i < c->gguf.n_values; i++) {
        const struct gguf_value *value = &c->gguf.values[i];
        const uint8_t *start = (const uint8_t *)value->key.data - 8;
        if (!is_of_record(value))
            fwrite(start, 1, (size_t)(value->data + value->n_bytes - start), out);
    }
}

/* The list of tensors as it is, and what brings the data to its alignment. */
static void put_tensors(const struct checkpoint *c, FILE *out)
{
    const struct gguf_tensor *tensors = c->gguf.tensors, *last = &tensors[c->gguf.n_tensors - 1];
    const uint8_t *start = (const uint8_t *)tensors->name.data - 8;
    const uint8_t *end =
        (const uint8_t *)last->name.data + last->name.size + 4 + 8 * (size_t)last->n_dims + 4 + 8;
    uint64_t alignment = 32;

    gguf_to_u64(gguf_find(&c->gguf, "general.alignment"), &alignment); /* was checked */
    fwrite(start, 1, (size_t)(end - start), out);
    for (uint64_t at = (uint64_t)ftell(out); at % alignment != 0; at++)
        putc(0, out);
}

bool checkpoint_write_gguf(struct checkpoint *c, struct failure *failure)
{
    char *head = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&head, &size);

    if (!out)
        return fail_with(failure, "out of memory");
    fwrite(c->bytes, 1, 8, out); /* magic and version */
    put_int(out, c->gguf.n_tensors, 8);
    put_int(out, count_entries(c), 8);
    put_kept(c, out);
    if (c->record.is_there)
        put_record(c, out);
    put_tensors(c, out);
    bool ok = !ferror(out);
    ok = fclose(out) == 0 && ok;
    const size_t tail = (size_t)(c->gguf.tensors[0].data - c->bytes);
    ok = ok ? checkpoint_replace_head(c, head, size, tail, failure)
            : fail_with(failure, "out of memory");
    free(head);
    return ok;
}

/* ---- two files ---- */

static int shown(struct gguf_text text)
{
    return (int)(text.size < 100 ? text.size : 100);
}

static bool same_text(struct gguf_text a, struct gguf_text b)
{
    return a.size == b.size && memcmp(a.data, b.data, a.size) == 0;
}

static bool same_value(const struct gguf_value *a, const struct gguf_value *b)
{
    return same_text(a->key, b->key) && a->type == b->type && a->is_array == b->is_array &&
           a->n == b->n && a->n_bytes == b->n_bytes && memcmp(a->data, b->data, a->n_bytes) == 0;
}

/* The next entry from *at on that is of no record, or NULL. */
static const struct gguf_value *next_kept(const struct gguf *gguf, size_t *at)
{
    while (*at < gguf->n_values && is_of_record(&gguf->values[*at]))
        ++*at;
    return *at < gguf->n_values ? &gguf->values[(*at)++] : NULL;
}

static bool same_values(const struct gguf *a, const struct gguf *b, struct failure *failure)
{
    size_t at_a = 0, at_b = 0;

    for (;;) {
        const struct gguf_value *x = next_kept(a, &at_a), *y = next_kept(b, &at_b);
        if (!x && !y)
            return true;
        if (x && y && same_value(x, y))
            continue;
        const struct gguf_text key = x ? x->key : y->key;
        return fail_with(failure, "the metadata differ, from %.*s on", shown(key), key.data);
    }
}

static bool same_kind(const struct gguf_tensor *a, const struct gguf_tensor *b)
{
    return a->type == b->type && a->n_dims == b->n_dims &&
           memcmp(a->dims, b->dims, sizeof(a->dims)) == 0;
}

bool checkpoint_same_head_gguf(const struct checkpoint *a, const struct checkpoint *b,
                               struct failure *failure)
{
    if (!same_values(&a->gguf, &b->gguf, failure))
        return false;
    if (a->gguf.n_tensors != b->gguf.n_tensors)
        return fail_with(failure, "the files have different tensors");
    for (size_t i = 0; i < a->gguf.n_tensors; i++) {
        const struct gguf_tensor *x = &a->gguf.tensors[i], *y = &b->gguf.tensors[i];
        if (!same_text(x->name, y->name))
            return fail_with(failure, "the files have different tensors");
        if (!same_kind(x, y))
            return fail_with(failure, "tensor %.*s is of another type or shape", shown(x->name),
                             x->name.data);
    }
    return true;
}
