/* Tensor types of GGUF files: q is a code, d a scale, m a minimum, all little endian. */
#include "dequant.h"

#include <string.h>

#include "gguf.h"

static uint32_t load_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint32_t load_u16(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static float float_of_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

static float load_half(const uint8_t *p)
{
    const uint32_t h = load_u16(p);
    const uint32_t sign = (h & 0x8000u) << 16;
    const uint32_t rest = h & 0x7fffu;

    if (rest >= 0x7c00u)
        return float_of_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest < 0x400u) {
        const float subnormal = (float)rest * 0x1p-24f;
        return sign ? -subnormal : subnormal;
    }
    return float_of_bits(sign | ((rest << 13) + 0x38000000u));
}

static void f32(const uint8_t *src, float *dst)
{
    dst[0] = float_of_bits(load_u32(src));
}

static void f16(const uint8_t *src, float *dst)
{
    dst[0] = load_half(src);
}

static void bf16(const uint8_t *src, float *dst)
{
    dst[0] = float_of_bits(load_u16(src) << 16);
}

/* d, 32 signed bytes */
static void q8_0(const uint8_t *src, float *dst)
{
    const float d = load_half(src);

    for (int i = 0; i < 32; i++)
        dst[i] = d * (float)(int8_t)src[2 + i];
}

/* d, 16 bytes: low nibbles are elements 0..15, high nibbles 16..31; code 8 is zero */
static void q4_0(const uint8_t *src, float *dst)
{
    const float d = load_half(src);

    for (int i = 0; i < 16; i++) {
        dst[i] = d * (float)((src[2 + i] & 15) - 8);
        dst[i + 16] = d * (float)((src[2 + i] >> 4) - 8);
    }
}

/* d, m, nibbles as q4_0 */
static void q4_1(const uint8_t *src, float *dst)
{
    const float d = load_half(src), m = load_half(src + 2);

    for (int i = 0; i < 16; i++) {
        dst[i] = d * (float)(src[4 + i] & 15) + m;
        dst[i + 16] = d * (float)(src[4 + i] >> 4) + m;
    }
}

/* Code of element i of 32: nibbles as q4_0, bit i of high as fifth bit. */
static uint32_t five_bits(const uint8_t *nibbles, uint32_t high, unsigned i)
{
    const uint32_t low = i < 16 ? nibbles[i] & 15u : nibbles[i - 16] >> 4;

    return low | (high >> i & 1u) << 4;
}

/* d, 32 fifth bits, nibbles; code 16 is zero */
static void q5_0(const uint8_t *src, float *dst)
{
    const float d = load_half(src);
    const uint32_t high = load_u32(src + 2);

    for (unsigned i = 0; i < 32; i++)
        dst[i] = d * ((float)five_bits(src + 6, high, i) - 16.0f);
}

/* d, m, 32 fifth bits, nibbles */
static void q5_1(const uint8_t *src, float *dst)
{
    const float d = load_half(src), m = load_half(src + 2);
    const uint32_t high = load_u32(src + 4);

    for (unsigned i = 0; i < 32; i++)
        dst[i] = d * (float)five_bits(src + 8, high, i) + m;
}

/*
 * d, m, 12 bytes of 6-bit scales and minima of 8 groups of 32, nibbles: each 32 bytes hold two
 * groups. Groups 4..7 keep their two upper bits in the upper bits of the bytes of groups 0..3.
 */
static void q4_k(const uint8_t *src, float *dst)
{
    const float d = load_half(src), m = load_half(src + 2);
    const uint8_t *s = src + 4, *nibbles = src + 16;

    for (int g = 0; g < 8; g++) {
        const int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
        const int min = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) | (s[g] >> 6) << 4;
        const uint8_t *q = nibbles + (ptrdiff_t)(g / 2) * 32;
        for (int i = 0; i < 32; i++) {
            const int code = g % 2 ? q[i] >> 4 : q[i] & 15;
            dst[g * 32 + i] = d * (float)scale * (float)code - m * (float)min;
        }
    }
}

/* 128 bytes of nibbles, 64 of upper bit pairs, 16 signed scales of 16 elements each, d; code 32 is
 * zero */
static void q6_k(const uint8_t *src, float *dst)
{
    const float d = load_half(src + 208);

    for (int e = 0; e < 256; e++) {
        const int half = e / 128, quarter = e % 128 / 32, i = e % 32;
        const int low = src[half * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4) & 15;
        const int high = src[128 + half * 32 + i] >> (quarter * 2) & 3;
        const float scale = (float)(int8_t)src[192 + e / 16];
        dst[e] = d * scale * (float)((low | high << 4) - 32);
    }
}

const struct tensor_type *tensor_type_find(uint32_t id)
{
    static const struct tensor_type types[] = {
        {0, 1, 4, f32},       {1, 1, 2, f16},    {2, 32, 18, q4_0}, {3, 32, 20, q4_1},
        {6, 32, 22, q5_0},    {7, 32, 24, q5_1}, {8, 32, 34, q8_0}, {12, 256, 144, q4_k},
        {14, 256, 210, q6_k}, {30, 1, 2, bf16},
    };

    for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++)
        if (types[i].id == id)
            return &types[i];
    return NULL;
}

void tensor_rows(const struct gguf_tensor *tensor, uint64_t first, uint64_t n, float *out)
{
    const struct tensor_type *type = tensor_type_find(tensor->type);
    const uint64_t row_blocks = tensor->dims[0] / type->block_size;
    const uint8_t *src = tensor->data + first * row_blocks * type->block_bytes;

    for (uint64_t i = 0; i < n * row_blocks; i++)
        type->dequantize(src + i * type->block_bytes, out + i * type->block_size);
}
