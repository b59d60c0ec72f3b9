/* The GGUF reader: what it reads, what it refuses, and each dequantizer by hand. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dequant.h"
#include "gguf.h"
#include "support/gguf_file.h"

/* Parses exactly the first n bytes, so that the sanitizer sees a step beyond. */
static bool parses(const struct gguf_file *f, size_t n)
{
    uint8_t *copy = malloc(n ? n : 1);
    struct failure failure;
    struct gguf gguf;

    assert_non_null(copy);
    memcpy(copy, f->data, n);
    const bool ok = gguf_parse(copy, n, &gguf, &failure);
    if (!ok) {
        assert_null(gguf.values);
        assert_null(gguf.tensors);
    }
    gguf_free(&gguf);
    free(copy);
    return ok;
}

/* Two tensors and every kind of metadata. */
static void put_example(struct gguf_file *f)
{
    const uint64_t dims[] = {3, 2};
    const double wide = -0.125;

    file_put_header(f, 3, 2, 14);
    file_put_key(f, "u8", GGUF_U8), file_put_int(f, 200, 1);
    file_put_key(f, "i8", GGUF_I8), file_put_int(f, (uint8_t)-7, 1);
    file_put_key(f, "u16", GGUF_U16), file_put_int(f, 60000, 2);
    file_put_key(f, "i16", GGUF_I16), file_put_int(f, 300, 2);
    file_put_u32(f, "u32", 4000000000u);
    file_put_key(f, "i32", GGUF_I32), file_put_int(f, 70000, 4);
    file_put_f32(f, "f32", 1.5f);
    file_put_key(f, "bool", GGUF_BOOL), file_put_int(f, 1, 1);
    file_put_string(f, "string", "text");
    file_put_key(f, "u64", GGUF_U64), file_put_int(f, UINT64_MAX, 8);
    file_put_key(f, "i64", GGUF_I64), file_put_int(f, 5, 8);
    file_put_key(f, "f64", GGUF_F64), file_put(f, &wide, 8);
    file_put_key(f, "strings", GGUF_ARRAY), file_put_int(f, GGUF_STRING, 4), file_put_int(f, 3, 8);
    file_put_text(f, "a"), file_put_text(f, ""), file_put_text(f, "bcd");
    file_put_key(f, "ints", GGUF_ARRAY), file_put_int(f, GGUF_I16, 4), file_put_int(f, 2, 8);
    file_put_int(f, 9, 2), file_put_int(f, (uint16_t)-9, 2);
    file_put_tensor(f, "first", 2, dims, 0, 0);
    file_put_tensor(f, "second", 1, dims, 0, 32);
    file_pad(f, 32);
    for (int i = 0; i < 6; i++) {
        const float x = (float)i;
        file_put(f, &x, 4);
    }
    file_pad(f, 32);
    for (int i = 0; i < 3; i++) {
        const float x = 10.0f + (float)i;
        file_put(f, &x, 4);
    }
}

static void reads_metadata_of_every_type(void **state)
{
    static const struct {
        const char *key;
        uint64_t value;
    } ints[] = {{"u8", 200},    {"u16", 60000}, {"i16", 300}, {"u32", 4000000000u},
                {"i32", 70000}, {"bool", 1},    {"i64", 5},   {"u64", UINT64_MAX}};
    struct gguf_file f;
    struct failure failure;
    struct gguf gguf;
    struct gguf_text text;
    uint64_t n;
    double x;
    size_t at = 0;

    (void)state;
    put_example(&f);
    assert_true(gguf_parse(f.data, f.n, &gguf, &failure));
    for (size_t i = 0; i < sizeof(ints) / sizeof(*ints); i++) {
        assert_true(gguf_to_u64(gguf_find(&gguf, ints[i].key), &n));
        assert_true(n == ints[i].value);
    }
    assert_false(gguf_to_u64(gguf_find(&gguf, "i8"), &n)); /* negative */
    assert_false(gguf_to_u64(gguf_find(&gguf, "f32"), &n));
    assert_false(gguf_to_u64(gguf_find(&gguf, "ints"), &n));
    assert_false(gguf_to_u64(gguf_find(&gguf, "nothing"), &n));
    assert_true(gguf_to_f64(gguf_find(&gguf, "f32"), &x) && x == 1.5);
    assert_true(gguf_to_f64(gguf_find(&gguf, "f64"), &x) && x == -0.125);
    assert_false(gguf_to_f64(gguf_find(&gguf, "u32"), &x));
    assert_true(gguf_to_text(gguf_find(&gguf, "string"), &text) && gguf_text_is(text, "text"));
    assert_false(gguf_to_text(gguf_find(&gguf, "strings"), &text));
    assert_true(gguf_element_u64(gguf_find(&gguf, "ints"), 0, &n) && n == 9);
    assert_false(gguf_element_u64(gguf_find(&gguf, "ints"), 1, &n)); /* negative */
    assert_false(gguf_element_u64(gguf_find(&gguf, "ints"), 2, &n));
    const struct gguf_value *strings = gguf_find(&gguf, "strings");
    assert_true(gguf_next_text(strings, &at, &text) && gguf_text_is(text, "a"));
    assert_true(gguf_next_text(strings, &at, &text) && gguf_text_is(text, ""));
    assert_true(gguf_next_text(strings, &at, &text) && gguf_text_is(text, "bcd"));
    assert_false(gguf_next_text(strings, &at, &text));
    gguf_free(&gguf);
}

static void reads_tensors(void **state)
{
    struct gguf_file f;
    struct failure failure;
    struct gguf gguf;
    float row[3];

    (void)state;
    put_example(&f);
    assert_true(gguf_parse(f.data, f.n, &gguf, &failure));
    const struct gguf_tensor *first = gguf_find_tensor(&gguf, "first");
    assert_non_null(first);
    assert_int_equal(first->n_bytes, 24);
    assert_true(first->dims[0] == 3 && first->dims[1] == 2 && first->dims[2] == 1);
    tensor_rows(first, 1, 1, row);
    assert_true(row[0] == 3.0f && row[1] == 4.0f && row[2] == 5.0f);
    tensor_rows(gguf_find_tensor(&gguf, "second"), 0, 1, row);
    assert_true(row[0] == 10.0f && row[2] == 12.0f);
    assert_null(gguf_find_tensor(&gguf, "third"));
    gguf_free(&gguf);
}

static void refuses_a_file_cut_off_anywhere(void **state)
{
    struct gguf_file f;

    (void)state;
    put_example(&f);
    assert_true(parses(&f, f.n));
    for (size_t n = 0; n < f.n; n++)
        assert_false(parses(&f, n));
}

/* Each byte of the example set to each of a few values: no crash, whatever the answer. */
static void survives_any_wrong_byte(void **state)
{
    static const uint8_t values[] = {0, 1, 4, 8, 9, 0x7f, 0x80, 0xff};
    struct gguf_file f;

    (void)state;
    put_example(&f);
    for (size_t i = 0; i < f.n; i++)
        for (size_t v = 0; v < sizeof(values); v++) {
            const uint8_t was = f.data[i];
            f.data[i] = values[v];
            parses(&f, f.n);
            f.data[i] = was;
        }
}

static void refuses_other_magic_and_versions(void **state)
{
    static const uint32_t versions[] = {0, 1, 4, 0x03000000, UINT32_MAX};
    struct gguf_file f;

    (void)state;
    for (size_t i = 0; i < sizeof(versions) / sizeof(*versions); i++) {
        file_put_header(&f, versions[i], 0, 0);
        assert_false(parses(&f, f.n));
    }
    file_put_header(&f, 2, 0, 0);
    assert_true(parses(&f, f.n));
    f.data[3] = 'f';
    assert_false(parses(&f, f.n));
}

static void refuses_counts_that_the_file_cannot_hold(void **state)
{
    static const uint64_t counts[] = {2,          1000,       1u << 31,   (uint64_t)1 << 32,
                                      1ull << 60, 1ull << 61, 1ull << 63, UINT64_MAX};
    static const uint32_t types[] = {GGUF_U8, GGUF_U64, GGUF_STRING};
    struct gguf_file f;

    (void)state;
    for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++) {
        file_put_header(&f, 3, counts[i], 0);
        assert_false(parses(&f, f.n));
        file_put_header(&f, 3, 0, counts[i]);
        file_put_u32(&f, "a", 1);
        assert_false(parses(&f, f.n));
        for (int t = 0; t < 3; t++) {
            file_put_header(&f, 3, 0, 1);
            file_put_key(&f, "a", GGUF_ARRAY), file_put_int(&f, types[t], 4),
                file_put_int(&f, counts[i], 8);
            file_put_int(&f, 0, 1);
            assert_false(parses(&f, f.n));
        }
        file_put_header(&f, 3, 0, 1);
        file_put_key(&f, "a", GGUF_STRING), file_put_int(&f, counts[i], 8),
            file_put_int(&f, 'x', 1);
        assert_false(parses(&f, f.n));
        file_put_header(&f, 3, 0, 1);
        file_put_int(&f, counts[i], 8), file_put_int(&f, 'k', 1);
        assert_false(parses(&f, f.n));
    }
}

static void refuses_metadata_that_it_does_not_know(void **state)
{
    static const uint32_t types[] = {13, 14, 255, UINT32_MAX};
    struct gguf_file f;

    (void)state;
    for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++) {
        file_put_header(&f, 3, 0, 1);
        file_put_key(&f, "a", types[i]), file_put_int(&f, 0, 8);
        assert_false(parses(&f, f.n));
    }
    file_put_header(&f, 3, 0, 1); /* an array of arrays */
    file_put_key(&f, "a", GGUF_ARRAY), file_put_int(&f, GGUF_ARRAY, 4), file_put_int(&f, 0, 8);
    assert_false(parses(&f, f.n));
}

/* A file with one or two tensors and 64 bytes of data. */
static bool tensors_parse(uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset,
                          uint64_t second_offset)
{
    const uint64_t four = 4;
    struct gguf_file f;

    file_put_header(&f, 3, second_offset ? 2 : 1, 0);
    file_put_tensor(&f, "a", n_dims, dims, type, offset);
    if (second_offset)
        file_put_tensor(&f, "b", 1, &four, 0, second_offset);
    file_pad(&f, 32);
    for (int i = 0; i < 8; i++)
        file_put_int(&f, 0, 8);
    return parses(&f, f.n);
}

static void refuses_bad_tensors(void **state)
{
    static const uint64_t huge = (uint64_t)1 << 32, ok[] = {4, 1, 1, 1, 1};
    static const uint64_t zero[] = {4, 0}, product[] = {huge, huge, 4}, bytes[] = {1ull << 62},
                          fits_not[] = {17}, all[] = {16}, blocks[] = {32}, half_block[] = {16, 2};

    (void)state;
    assert_true(tensors_parse(1, ok, 0, 0, 0));
    assert_true(tensors_parse(4, ok, 0, 0, 32));
    assert_true(tensors_parse(1, all, 0, 0, 0));
    assert_true(tensors_parse(1, blocks, 8, 0, 0));
    assert_false(tensors_parse(0, ok, 0, 0, 0));
    assert_false(tensors_parse(5, ok, 0, 0, 0));
    assert_false(tensors_parse(2, zero, 0, 0, 0));
    assert_false(tensors_parse(3, product, 0, 0, 0));
    assert_false(tensors_parse(1, bytes, 0, 0, 0));
    assert_false(tensors_parse(1, fits_not, 0, 0, 0));
    assert_false(tensors_parse(2, half_block, 8, 0, 0)); /* a row of half a block */
    assert_false(tensors_parse(1, ok, 4, 0, 0));         /* types without a reader */
    assert_false(tensors_parse(1, ok, UINT32_MAX, 0, 0));
    assert_false(tensors_parse(1, ok, 0, 4, 0));
    assert_false(tensors_parse(1, ok, 0, 32, 0));
    assert_false(tensors_parse(1, ok, 0, UINT64_MAX - 31, 0));
    assert_false(tensors_parse(1, all, 0, 0, 32)); /* the second inside the first */
    assert_false(tensors_parse(1, all, 0, 0, 64)); /* the second behind the end */
    assert_false(tensors_parse(1, ok, 0, 0, 16));  /* not aligned */
}

static void follows_the_alignment(void **state)
{
    static const uint32_t bad[] = {0, 3, 24, 1u << 21, 1u << 31};
    const uint64_t one = 1;
    struct gguf_file f;

    (void)state;
    file_put_header(&f, 3, 1, 1);
    file_put_u32(&f, "general.alignment", 256);
    file_put_tensor(&f, "a", 1, &one, 0, 0);
    file_pad(&f, 256);
    assert_false(parses(&f, f.n));
    file_put_int(&f, 0, 4);
    assert_true(parses(&f, f.n));
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        file_put_header(&f, 3, 0, 1);
        file_put_u32(&f, "general.alignment", bad[i]);
        assert_false(parses(&f, f.n));
    }
    file_put_header(&f, 3, 0, 1);
    file_put_string(&f, "general.alignment", "32");
    assert_false(parses(&f, f.n));
}

static void check_block(uint32_t type, const uint8_t *block, size_t n_bytes, const float *want,
                        size_t n)
{
    const struct tensor_type *t = tensor_type_find(type);
    float got[256];

    assert_non_null(t);
    assert_int_equal(t->block_bytes, n_bytes);
    assert_int_equal(t->block_size, n);
    t->dequantize(block, got);
    assert_memory_equal(got, want, n * sizeof(float));
}

static void dequantizes_plain_numbers(void **state)
{
    static const struct {
        uint8_t bytes[2];
        float value;
    } halves[] = {{{0x00, 0x3c}, 1.0f},      {{0x00, 0xc0}, -2.0f},
                  {{0x01, 0x00}, 0x1p-24f},  {{0xff, 0x83}, -0x3ffp-24f},
                  {{0x00, 0x04}, 0x1p-14f},  {{0xff, 0x7b}, 65504.0f},
                  {{0x00, 0xfc}, -INFINITY}, {{0x55, 0x35}, 0x1.554p-2f},
                  {{0x00, 0x00}, 0.0f}},
      brains[] = {{{0x80, 0x3f}, 1.0f}, {{0x40, 0xc0}, -3.0f}, {{0x80, 0x7f}, INFINITY}};
    const uint8_t single[] = {0x00, 0x00, 0xc0, 0xbf};
    const float want = -1.5f;

    (void)state;
    for (size_t i = 0; i < sizeof(halves) / sizeof(*halves); i++)
        check_block(1, halves[i].bytes, 2, &halves[i].value, 1);
    for (size_t i = 0; i < sizeof(brains) / sizeof(*brains); i++)
        check_block(30, brains[i].bytes, 2, &brains[i].value, 1);
    check_block(0, single, 4, &want, 1);
}

static void dequantizes_8_bits(void **state)
{
    uint8_t block[34] = {0x00, 0x38}; /* d = 0.5 */
    float want[32];

    (void)state;
    for (int i = 0; i < 32; i++) {
        const int code = i == 0 ? -128 : i - 16;
        block[2 + i] = (uint8_t)code;
        want[i] = 0.5f * (float)code;
    }
    check_block(8, block, 34, want, 32);
}

/* Byte i holds i in its low nibble (element i) and 15 - i in the high one (element i + 16). */
static void put_nibbles(uint8_t *bytes)
{
    for (int i = 0; i < 16; i++)
        bytes[i] = (uint8_t)(i | (15 - i) << 4);
}

static void dequantizes_4_bits(void **state)
{
    uint8_t symmetric[18] = {0x00, 0x40};                /* d = 2 */
    uint8_t with_minimum[20] = {0x00, 0x34, 0x00, 0xbc}; /* d = 0.25, m = -1 */
    float want[32];

    (void)state;
    put_nibbles(symmetric + 2);
    for (int i = 0; i < 16; i++) {
        want[i] = 2.0f * (float)(i - 8);
        want[i + 16] = 2.0f * (float)(7 - i);
    }
    check_block(2, symmetric, 18, want, 32);
    put_nibbles(with_minimum + 4);
    for (int i = 0; i < 16; i++) {
        want[i] = 0.25f * (float)i - 1.0f;
        want[i + 16] = 0.25f * (float)(15 - i) - 1.0f;
    }
    check_block(3, with_minimum, 20, want, 32);
}

static void dequantizes_5_bits(void **state)
{
    uint8_t symmetric[22] = {0x00, 0x3c, 0x00, 0x00, 0xff, 0xff}; /* d = 1, fifth bits of 16..31 */
    uint8_t with_minimum[24] = {0x00, 0x3c, 0x00,
                                0x38, 0xff, 0xff}; /* m = 0.5, fifth bits of 0..15 */
    float want[32];

    (void)state;
    put_nibbles(symmetric + 6);
    for (int i = 0; i < 16; i++) {
        want[i] = (float)(i - 16);
        want[i + 16] = (float)(15 - i);
    }
    check_block(6, symmetric, 22, want, 32);
    put_nibbles(with_minimum + 8);
    for (int i = 0; i < 16; i++) {
        want[i] = (float)(i + 16) + 0.5f;
        want[i + 16] = (float)(15 - i) + 0.5f;
    }
    check_block(7, with_minimum, 24, want, 32);
}

/* Scales 1 2 3 4 52 53 54 55, minima 0 2 4 6 36 37 38 39: the last four have upper bits 3 and 2. */
static void dequantizes_4_bits_in_groups(void **state)
{
    uint8_t block[144] = {0x00, 0x3c, 0x00, 0x38}; /* d = 1, m = 0.5 */
    float want[256];

    (void)state;
    for (int g = 0; g < 4; g++) {
        block[4 + g] = (uint8_t)((g + 1) | 3 << 6);
        block[8 + g] = (uint8_t)(2 * g | 2 << 6);
        block[12 + g] = (uint8_t)((4 + g) | (4 + g) << 4);
    }
    memset(block + 16, 0x3a, 128); /* 10 in even groups, 3 in odd ones */
    for (int e = 0; e < 256; e++) {
        const int g = e / 32;
        const float scale = (float)(g < 4 ? g + 1 : 48 + g), min = (float)(g < 4 ? 2 * g : 32 + g);
        want[e] = scale * (g % 2 ? 3.0f : 10.0f) - 0.5f * min;
    }
    check_block(12, block, 144, want, 256);
}

/* Codes 3 2 1 0 in the quarters of each half. */
static void dequantizes_2_bits_in_groups(void **state)
{
    uint8_t block[84];
    float want[256];

    (void)state;
    for (int s = 0; s < 16; s++)
        block[s] = (uint8_t)(s | (15 - s) << 4);
    memset(block + 16, 0x1b, 64);
    block[16 + 32 + 5] = 0x72; /* codes 2 0 3 1 of element 5 of the second half's quarters */
    memcpy(block + 80, "\x00\x38\x00\x3c", 4); /* d = 0.5, m = 1 */
    for (int e = 0; e < 256; e++)
        want[e] = 0.5f * (float)(e / 16) * (float)(3 - e % 128 / 32) - (float)(15 - e / 16);
    want[128 + 5] = 0.5f * 8.0f * 2.0f - 7.0f;
    want[160 + 5] = 0.5f * 10.0f * 0.0f - 5.0f;
    want[192 + 5] = 0.5f * 12.0f * 3.0f - 3.0f;
    want[224 + 5] = 0.5f * 14.0f * 1.0f - 1.0f;
    check_block(10, block, 84, want, 256);
}

/* Scale s is s + 16 * (s / 4) - 32: low nibble s, upper pairs 0 1 2 3. */
static void dequantizes_3_bits_in_groups(void **state)
{
    uint8_t block[110];
    float want[256];

    (void)state;
    memset(block, 0xa5, 32);      /* third bits 1 0 1 0 and 0 1 0 1 of the quarters */
    memset(block + 32, 0xe4, 64); /* codes 0 1 2 3 */
    block[32 + 32 + 9] = 0x1b;    /* the other way round for element 9 of the second half */
    for (int s = 0; s < 8; s++)
        block[96 + s] = (uint8_t)(s | (s + 8) << 4);
    memset(block + 104, 0xe4, 4);
    memcpy(block + 108, "\x00\x3c", 2); /* d = 1 */
    for (int e = 0; e < 256; e++) {
        const int s = e / 16, quarter = e % 128 / 32;
        const int third = (e / 128 + quarter) % 2 == 0;
        const int code = e >= 128 && e % 32 == 9 ? 3 - quarter : quarter;
        want[e] = (float)(s + 16 * (s / 4) - 32) * (float)(code + 4 * third - 4);
    }
    check_block(11, block, 110, want, 256);
}

/* As the block of 4 bits above, with fifth bits in groups 1, 4 and 7. */
static void dequantizes_5_bits_in_groups(void **state)
{
    uint8_t block[176] = {0x00, 0x3c, 0x00, 0x38}; /* d = 1, m = 0.5 */
    float want[256];

    (void)state;
    for (int g = 0; g < 4; g++) {
        block[4 + g] = (uint8_t)((g + 1) | 3 << 6);
        block[8 + g] = (uint8_t)(2 * g | 2 << 6);
        block[12 + g] = (uint8_t)((4 + g) | (4 + g) << 4);
    }
    memset(block + 16, 0x92, 32);
    memset(block + 48, 0x3a, 128);
    block[48 + 64 + 3] = 0x70; /* groups 4 and 5: element 3 is 0 and 7 */
    for (int e = 0; e < 256; e++) {
        const int g = e / 32;
        const float scale = (float)(g < 4 ? g + 1 : 48 + g), min = (float)(g < 4 ? 2 * g : 32 + g);
        const int nibble = g == 4 && e % 32 == 3 ? 0 : g == 5 && e % 32 == 3 ? 7 : g % 2 ? 3 : 10;
        const int fifth = g == 1 || g == 4 || g == 7;
        want[e] = scale * (float)(nibble + 16 * fifth) - 0.5f * min;
    }
    check_block(13, block, 176, want, 256);
}

static void dequantizes_6_bits(void **state)
{
    /* In each half of 128, quarters of 32: low nibbles 1 1 2 2, upper pairs 0 1 2 3, less 32. */
    static const float codes[] = {-31.0f, -15.0f, 2.0f, 18.0f};
    uint8_t block[210];
    float want[256];

    (void)state;
    memset(block, 0x21, 128);
    memset(block + 128, 0xe4, 64);
    for (int s = 0; s < 16; s++)
        block[192 + s] = (uint8_t)(s - 8);
    block[208] = 0x00, block[209] = 0x38; /* d = 0.5 */
    block[64 + 37] = 0x0f; /* second half: element 37 of its first 64, and 64 further */
    for (int e = 0; e < 256; e++) {
        const int scale = e / 16 - 8;
        want[e] = 0.5f * (float)scale * codes[e % 128 / 32];
    }
    want[128 + 37] = 0.5f * 2.0f * (15.0f + 16.0f - 32.0f); /* scales 10 - 8 and 14 - 8 */
    want[128 + 101] = 0.5f * 6.0f * (0.0f + 48.0f - 32.0f);
    check_block(14, block, 210, want, 256);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_metadata_of_every_type),
        cmocka_unit_test(reads_tensors),
        cmocka_unit_test(refuses_a_file_cut_off_anywhere),
        cmocka_unit_test(survives_any_wrong_byte),
        cmocka_unit_test(refuses_other_magic_and_versions),
        cmocka_unit_test(refuses_counts_that_the_file_cannot_hold),
        cmocka_unit_test(refuses_metadata_that_it_does_not_know),
        cmocka_unit_test(refuses_bad_tensors),
        cmocka_unit_test(follows_the_alignment),
        cmocka_unit_test(dequantizes_plain_numbers),
        cmocka_unit_test(dequantizes_8_bits),
        cmocka_unit_test(dequantizes_4_bits),
        cmocka_unit_test(dequantizes_5_bits),
        cmocka_unit_test(dequantizes_4_bits_in_groups),
        cmocka_unit_test(dequantizes_2_bits_in_groups),
        cmocka_unit_test(dequantizes_3_bits_in_groups),
        cmocka_unit_test(dequantizes_5_bits_in_groups),
        cmocka_unit_test(dequantizes_6_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
