/* Reads extracts. Any bytes are safe: counts are limited first, then the size must fit exactly. */
#include "kvx.h"

#include <math.h>
#include <string.h>

enum {
    VERSION = 1,
    HEADER_SIZE = 44,
    BLOCK_HEADER_SIZE = KVX_NAME_SIZE + 4,
    MAX_BLOCKS = 65536,
    MAX_HEADS = 256,
    MAX_HEAD_DIM = 512,
    MAX_GRID = 64, /* rows or columns */
    MAX_PREFIX = 64,
    MAX_QUERIES = 4096,
    MAX_LAYER = 65535
};

static uint32_t read_u32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static bool read_counts(const unsigned char *bytes, struct kvx *kvx, struct failure *failure)
{
    const struct {
        const char *name;
        size_t *count;
        uint32_t min, max;
    } fields[] = {
        {"blocks", &kvx->n_blocks, 1, MAX_BLOCKS},
        {"heads", &kvx->n_heads, 1, MAX_HEADS},
        {"elements of a head", &kvx->head_dim, 1, MAX_HEAD_DIM},
        {"tokens before the patches", &kvx->n_prefix, 0, MAX_PREFIX},
        {"rows of patches", &kvx->grid_rows, 1, MAX_GRID},
        {"columns of patches", &kvx->grid_cols, 1, MAX_GRID},
        {"scoring queries", &kvx->n_scoring, 2, MAX_QUERIES},
        {"held-out queries", &kvx->n_same, 1, MAX_QUERIES},
        {"shifted queries", &kvx->n_shifted, 1, MAX_QUERIES},
    };

    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        const uint32_t n = read_u32(bytes + 8 + 4 * i);
        if (n < fields[i].min || n > fields[i].max)
            return fail_with(failure, "an extract of %lu %s, not %lu to %lu", (unsigned long)n,
                             fields[i].name, (unsigned long)fields[i].min,
                             (unsigned long)fields[i].max);
        *fields[i].count = n;
    }
    return true;
}

bool kvx_open(const unsigned char *bytes, size_t size, struct kvx *kvx, struct failure *failure)
{
    if (size < HEADER_SIZE || memcmp(bytes, "KVCX", 4) != 0)
        return fail_with(failure, "not an extract");
    if (read_u32(bytes + 4) != VERSION)
        return fail_with(failure, "an extract of version %lu, not %d",
                         (unsigned long)read_u32(bytes + 4), VERSION);
    if (!read_counts(bytes, kvx, failure))
        return false;
    kvx->n_tokens = kvx->n_prefix + kvx->grid_rows * kvx->grid_cols;
    kvx->n_queries = kvx->n_scoring + kvx->n_same + kvx->n_shifted;
    const uint64_t rows = kvx->n_queries + 2 * (uint64_t)kvx->n_tokens;
    const uint64_t block_size = BLOCK_HEADER_SIZE + 2 * rows * kvx->n_heads * kvx->head_dim;
    const uint64_t needed = HEADER_SIZE + block_size * kvx->n_blocks;
    if (size != needed)
        return fail_with(failure, "an extract of %llu bytes, not %llu", (unsigned long long)size,
                         (unsigned long long)needed);
    kvx->blocks = bytes + HEADER_SIZE;
    kvx->block_size = (size_t)block_size;
    return true;
}

static float read_f16(const unsigned char *p)
{
    const unsigned bits = p[0] | (unsigned)p[1] << 8;
    const int exponent = (int)(bits >> 10 & 31), fraction = (int)(bits & 1023);
    const double magnitude = exponent == 0    ? ldexp(fraction, -24)
                             : exponent == 31 ? (double)INFINITY
                                              : ldexp(1024 + fraction, exponent - 25);

    return (float)(bits >> 15 ? -magnitude : magnitude);
}

static bool read_tensor(const unsigned char **bytes, size_t n, float *out)
{
    bool finite = true;

    for (size_t i = 0; i < n; i++) {
        out[i] = read_f16(*bytes + 2 * i);
        finite = finite && isfinite(out[i]);
    }
    *bytes += 2 * n;
    return finite;
}

static bool read_name(const unsigned char *bytes, char *name)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";

    memcpy(name, bytes, KVX_NAME_SIZE);
    if (memchr(name, '\0', KVX_NAME_SIZE) == NULL)
        return false;
    return name[0] != '\0' && name[strspn(name, allowed)] == '\0';
}

bool kvx_read(const struct kvx *kvx, size_t i, struct kvx_block *block, struct failure *failure)
{
    const unsigned char *bytes = kvx->blocks + i * kvx->block_size;
    const size_t row = kvx->n_heads * kvx->head_dim;
    const uint32_t layer = read_u32(bytes + KVX_NAME_SIZE);

    if (!read_name(bytes, block->photo) || layer > MAX_LAYER)
        return fail_with(failure, "block %zu of the extract has no valid photo and layer", i);
    block->layer = layer;
    bytes += BLOCK_HEADER_SIZE;
    if (!read_tensor(&bytes, kvx->n_queries * row, block->q) ||
        !read_tensor(&bytes, kvx->n_tokens * row, block->k) ||
        !read_tensor(&bytes, kvx->n_tokens * row, block->v))
        return fail_with(failure, "a number of block %zu of the extract is not finite", i);
    return true;
}
