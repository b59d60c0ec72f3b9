/* Pictures in files: what is read is what was written, and broken files are refused. */
#define _POSIX_C_SOURCE 200809L /* mkstemp() */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "image_file.h"

enum { WIDTH = 7, HEIGHT = 5 };

struct state {
    char path[32];
    uint8_t rgb[3 * WIDTH * HEIGHT];
};

static int make(void **state)
{
    struct state *s = calloc(1, sizeof(*s));

    strcpy(s->path, "vlm_image_XXXXXX");
    const int file = mkstemp(s->path);
    for (size_t i = 0; i < sizeof(s->rgb); i++)
        s->rgb[i] = (uint8_t)(37 * i + 11);
    *state = s;
    return file < 0 || close(file);
}

static int clean(void **state)
{
    struct state *s = *state;

    remove(s->path);
    free(s);
    return 0;
}

static void write_file(const struct state *s, const void *bytes, size_t n)
{
    FILE *file = fopen(s->path, "wb");

    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static size_t read_back(const struct state *s, uint8_t *bytes, size_t size)
{
    FILE *file = fopen(s->path, "rb");

    assert_non_null(file);
    const size_t n = fread(bytes, 1, size, file);
    assert_int_equal(fclose(file), 0);
    return n;
}

static void expect_rgb(const struct state *s, const uint8_t *rgb)
{
    struct failure failure = {""};
    struct image image;

    assert_true(image_read(s->path, &image, &failure));
    assert_int_equal(image.width, WIDTH);
    assert_int_equal(image.height, HEIGHT);
    assert_memory_equal(image.rgb, rgb, sizeof(s->rgb));
    image_free(&image);
}

static void expect_refused(const struct state *s, const char *why)
{
    struct failure failure = {""};
    struct image image;

    assert_false(image_read(s->path, &image, &failure));
    assert_non_null(strstr(failure.text, why));
    assert_null(image.rgb);
}

static void png_comes_back(void **state)
{
    struct state *s = *state;
    const struct image image = {.width = WIDTH, .height = HEIGHT, .rgb = s->rgb};
    struct failure failure = {""};

    assert_true(image_write_png(&image, s->path, &failure));
    expect_rgb(s, s->rgb);
}

static void cut_and_damaged_png_is_refused(void **state)
{
    struct state *s = *state;
    const struct image image = {.width = WIDTH, .height = HEIGHT, .rgb = s->rgb};
    struct failure failure = {""};
    uint8_t bytes[1024];

    assert_true(image_write_png(&image, s->path, &failure));
    const size_t n = read_back(s, bytes, sizeof(bytes));
    for (size_t cut = 4; cut < n - 12; cut += 9) { /* without IEND nothing is missing */
        write_file(s, bytes, cut);
        expect_refused(s, "PNG");
    }
    bytes[18] ^= 0xff; /* the width, whose checksum is then wrong */
    write_file(s, bytes, n);
    expect_refused(s, "PNG");
}

/* A PNG file of one row of pixels, made byte by byte. */
struct png_bytes {
    uint8_t data[256];
    size_t n;
};

static void put(struct png_bytes *png, const void *bytes, size_t n)
{
    assert_true(n <= sizeof(png->data) - png->n);
    memcpy(png->data + png->n, bytes, n);
    png->n += n;
}

static void put_u32(struct png_bytes *png, uint32_t x)
{
    const uint8_t bytes[4] = {(uint8_t)(x >> 24), (uint8_t)(x >> 16), (uint8_t)(x >> 8),
                              (uint8_t)x};

    put(png, bytes, 4);
}

static void put_chunk(struct png_bytes *png, const char *type, const void *bytes, size_t n)
{
    uint32_t crc = UINT32_MAX;

    put_u32(png, (uint32_t)n);
    const size_t start = png->n;
    put(png, type, 4);
    put(png, bytes, n);
    for (size_t i = start; i < png->n; i++) {
        crc ^= png->data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? UINT32_C(0xEDB88320) : 0);
    }
    put_u32(png, ~crc);
}

/* The row as one stored block of zlib. */
static void put_row(struct png_bytes *png, const uint8_t *row, size_t n)
{
    const uint8_t size = (uint8_t)(n + 1), head[] = {0x78, 1, 1, size, 0, (uint8_t)~size, 255, 0};
    struct png_bytes idat = {.n = 0};
    uint32_t a = 1, b = 1; /* the filter's 0 is counted already */

    put(&idat, head, sizeof(head));
    put(&idat, row, n);
    for (size_t i = 0; i < n; i++) {
        a = (a + row[i]) % 65521;
        b = (b + a) % 65521;
    }
    put_u32(&idat, b << 16 | a);
    put_chunk(png, "IDAT", idat.data, idat.n);
}

static void write_pixel(const struct state *s, uint8_t depth, uint8_t colour, const uint8_t *row,
                        size_t n)
{
    static const uint8_t signature[8] = {0x89, 'P', 'N', 'G', '\r', '\n', 26, '\n'};
    static const uint8_t palette[6] = {9, 9, 9, 64, 128, 192};
    const uint8_t ihdr[13] = {0, 0, 0, 1, 0, 0, 0, 1, depth, colour};
    struct png_bytes png = {.n = 0};

    put(&png, signature, sizeof(signature));
    put_chunk(&png, "IHDR", ihdr, sizeof(ihdr));
    if (colour == 3)
        put_chunk(&png, "PLTE", palette, sizeof(palette));
    put_row(&png, row, n);
    put_chunk(&png, "IEND", "", 0);
    write_file(s, png.data, png.n);
}

static void every_kind_of_png_becomes_rgb(void **state)
{
    static const struct {
        uint8_t depth, colour;
        size_t n;
        uint8_t row[8], rgb[3];
    } cases[] = {
        {1, 0, 1, {0x80}, {255, 255, 255}},
        {8, 0, 1, {64}, {64, 64, 64}},
        {16, 0, 2, {64, 64}, {64, 64, 64}}, /* no gamma is told: as 8 bits */
        {16, 2, 6, {64, 64, 128, 128, 192, 192}, {64, 128, 192}},
        {8, 3, 1, {1}, {64, 128, 192}},
        {8, 4, 2, {64, 255}, {64, 64, 64}},
        {8, 6, 4, {64, 128, 192, 255}, {64, 128, 192}},
        {8, 6, 4, {64, 128, 192, 0}, {255, 255, 255}}, /* lies on white */
        {16, 6, 8, {64, 64, 128, 128, 192, 192, 255, 255}, {64, 128, 192}},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct failure failure = {""};
        struct image image;
        write_pixel(*state, cases[i].depth, cases[i].colour, cases[i].row, cases[i].n);
        if (!image_read(((struct state *)*state)->path, &image, &failure))
            fail_msg("case %zu: %s", i, failure.text);
        assert_int_equal(image.width, 1);
        assert_int_equal(image.height, 1);
        if (memcmp(image.rgb, cases[i].rgb, 3) != 0)
            fail_msg("case %zu: %d %d %d", i, image.rgb[0], image.rgb[1], image.rgb[2]);
        image_free(&image);
    }
}

static void ppm_with_comments_is_read(void **state)
{
    struct state *s = *state;
    static const char header[] = "P6\n# a comment\n7 5 # and one more\n255\n";
    uint8_t bytes[sizeof(header) - 1 + sizeof(s->rgb)];

    memcpy(bytes, header, sizeof(header) - 1);
    memcpy(bytes + sizeof(header) - 1, s->rgb, sizeof(s->rgb));
    write_file(s, bytes, sizeof(bytes));
    expect_rgb(s, s->rgb);
    write_file(s, bytes, sizeof(bytes) - 1);
    expect_refused(s, "before its last pixel");
}

static void broken_headers_are_refused(void **state)
{
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"", "neither"},
        {"GIF89a", "neither"},
        {"P5 7 5 255\n", "neither"},
        {"P6", "header"},
        {"P6 7", "header"},
        {"P6 x 5 255\n", "header"},
        {"P6 7 5", "header"},
        {"P6 0 5 255\n", "a side must be"},
        {"P6 7 99999 255\n", "a side must be"},
        {"P6 999999999999999999999 5 255\n", "a side must be"},
        {"P6 7 5 65535\n", "65535"},
        {"P6 16384 16384 255\nabc", "before its last pixel"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        write_file(*state, cases[i].text, strlen(cases[i].text));
        expect_refused(*state, cases[i].why);
    }
}

static void missing_file_is_refused(void **state)
{
    struct failure failure = {""};
    struct image image;

    (void)state;
    assert_false(image_read("no_such_picture.png", &image, &failure));
    assert_true(failure.text[0] != '\0');
}

/* A wide picture of columns 0 1 2 3 4 5 x 10: the middle square of four, by halves. */
static void fit_takes_the_mean_of_the_middle(void **state)
{
    uint8_t rgb[3 * 6 * 4], out[3 * 2 * 2];
    const struct image image = {.width = 6, .height = 4, .rgb = rgb};

    (void)state;
    for (int i = 0; i < 6 * 4; i++)
        memset(rgb + 3 * i, 10 * (i % 6), 3);
    image_fit(&image, 2, out);
    for (int i = 0; i < 4; i++)
        assert_int_equal(out[3 * i], i % 2 ? 35 : 15);
}

static void fit_of_its_own_size_changes_nothing(void **state)
{
    const struct state *s = *state;
    uint8_t out[3 * HEIGHT * HEIGHT];
    const struct image image = {
        .width = HEIGHT, .height = HEIGHT, .rgb = (uint8_t *)(uintptr_t)s->rgb};

    image_fit(&image, HEIGHT, out);
    assert_memory_equal(out, s->rgb, sizeof(out));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(png_comes_back, make, clean),
        cmocka_unit_test_setup_teardown(cut_and_damaged_png_is_refused, make, clean),
        cmocka_unit_test_setup_teardown(every_kind_of_png_becomes_rgb, make, clean),
        cmocka_unit_test_setup_teardown(ppm_with_comments_is_read, make, clean),
        cmocka_unit_test_setup_teardown(broken_headers_are_refused, make, clean),
        cmocka_unit_test(missing_file_is_refused),
        cmocka_unit_test(fit_takes_the_mean_of_the_middle),
        cmocka_unit_test_setup_teardown(fit_of_its_own_size_changes_nothing, make, clean),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
