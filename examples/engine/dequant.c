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

/* 16 bytes: scale and minimum of 16 elements in low and high nibble; 64 bytes of codes, each with
 * elements i, i + 32, i + 64 and i + 96 of a half; d, m */
static void q2_k(const uint8_t *src, float *dst)
{
    const float d = load_half(src + 80), m = load_half(src + 82);

    for (int e = 0; e < 256; e++) {
        const int half = e / 128, quarter = e % 128 / 32, i = e % 32;
        const int code = src[16 + half * 32 + i] >> (quarter * 2) & 3;
        const int scales = src[e / 16];
        dst[e] = d * (float)(scales & 15) * (float)code - m * (float)(scales >> 4);
    }
}

/* Scale of 16 elements: 8 bytes of low nibbles, those of 0..7 first, then 4 of upper bit pairs. */
static int q3_scale(const uint8_t *s, int group)
{
    const int low = s[group % 8] >> (group / 8 * 4) & 15;
    const int high = s[8 + group % 4] >> (group / 4 * 2) & 3;

    return (low | high << 4) - 32;
}

/* 32 bytes of third bits, one bit a byte for each 32 elements; codes as q2_k; 12 bytes of scales;
 * d; code 4 is zero */
static void q3_k(const uint8_t *src, float *dst)
{
    const float d = load_half(src + 108);

    for (int e = 0; e < 256; e++) {
        const int half = e / 128, quarter = e % 128 / 32, i = e % 32;
        const int low = src[32 + half * 32 + i] >> (quarter * 2) & 3;
        const int high = src[i] >> (e / 32) & 1;
        dst[e] = d * (float)q3_scale(src + 96, e / 16) * (float)((low | high << 2) - 4);
    }
}

/*
 * 12 bytes of 6-bit scales and minima of 8 groups of 32. Groups 4..7 keep their two upper bits in
 * the upper bits of the bytes of groups 0..3.
 */
static int group_scale(const uint8_t *s, int group)
{
    return group < 4 ? s[group] & 63 : (s[group + 4] & 15) | (s[group - 4] >> 6) << 4;
}

static int group_min(const uint8_t *s, int group)
{
    return group < 4 ? s[group + 4] & 63 : (s[group + 4] >> 4) | (s[group] >> 6) << 4;
}

/* d, m, 12 bytes of scales and minima, nibbles: each 32 bytes hold two groups */
static void q4_k(const uint8_t *src, float *dst)
{
    const float d = load_half(src), m = load_half(src + 2);

    for (int e = 0; e < 256; e++) {
        const int g = e / 32, i = e % 32;
        const int code = src[16 + g / 2 * 32 + i] >> (g % 2 * 4) & 15;
        dst[e] =
            d * (float)group_scale(src + 4, g) * (float)code - m * (float)group_min(src + 4, g);
    }
}

/* d, m, scales and minima as q4_k, 32 bytes of fifth bits, one bit a byte for each group, nibbles
 */
static void q5_k(const uint8_t *src, float *dst)
{
    const float d = load_half(src), m = load_half(src + 2);

    for (int e = 0; e < 256; e++) {
        const int g = e / 32, i = e % 32;
        const int low = src[48 + g / 2 * 32 + i] >> (g % 2 * 4) & 15;
        const int code = low | (src[16 + i] >> g & 1) << 4;
        dst[e] =
            d * (float)group_scale(src + 4, g) * (float)code - m * (float)group_min(src + 4, g);
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
        {0, 1, 4, f32},       {1, 1, 2, f16},       {2, 32, 18, q4_0},    {3, 32, 20, q4_1},
        {6, 32, 22, q5_0},    {7, 32, 24, q5_1},    {8, 32, 34, q8_0},    {10, 256, 84, q2_k},
        {11, 256, 110, q3_k}, {12, 256, 144, q4_k}, {13, 256, 176, q5_k}, {14, 256, 210, q6_k},
        {30, 1, 2, bf16},
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
