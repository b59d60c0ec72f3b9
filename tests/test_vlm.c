/* The vision-language model in C against the one in Python, and its place on a cache. The argument
 * is the model's file. */
#define _POSIX_C_SOURCE 200809L /* mkstemp() */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cblas.h>
#include <cmocka.h>

#include "file.h"
#include "lesson.h"
#include "vlm.h"

enum { N_TOKENS = 48, MAX_IMAGES = 2, MAX_ROWS = MAX_IMAGES * (1 + MAX_CELLS + N_TOKENS) + 1 };

static const struct reference {
    int grid, n_images;
    uint64_t lesson;
    int image, token;
    float logits[N_WORDS];
} references[] = {
#include "data/vlm_reference.inc"
};
enum { N_REFERENCES = sizeof(references) / sizeof(*references) };

static const char *model_path;

struct state {
    struct vlm vlm;
    struct reader reader;
    kvc_cache *cache;
    kvc_seq seq;
    uint8_t rgb[MAX_IMAGES][3 * MAX_PIXELS * MAX_PIXELS];
    int32_t tokens[MAX_IMAGES][N_TOKENS];
};

/* exact: a cache that holds keys and values to 22 bits, so that the arithmetic is all that differs.
 */
static void open_cache(struct state *s, bool exact)
{
    const struct model_shape *shape = &s->vlm.model.shape;
    const struct forward_params forward = {
        .model = &s->vlm.model, .ctx = s->reader.ctx, .max_rows = MAX_CELLS + 64, .exact = exact};
    struct failure failure = {""};
    kvc_cache_params p;

    forward_destroy(s->reader.forward);
    assert_true(forward_create(&forward, &s->reader.forward, &failure));
    kvc_cache_params_default(&p);
    p.n_layers = (int32_t)shape->n_layers;
    p.n_heads = (int32_t)shape->n_heads;
    p.n_kv_heads = (int32_t)shape->n_kv_heads;
    p.head_dim_k = p.head_dim_v = (int32_t)shape->head_dim * (exact ? 2 : 1);
    p.max_append = MAX_CELLS;
    p.recent_tokens = MAX_ROWS;
    p.max_tokens = MAX_ROWS;
    assert_int_equal(kvc_cache_full_budget(&p, &p.budget_bytes), KVC_OK);
    assert_int_equal(kvc_cache_create(s->reader.ctx, &p, &s->cache), KVC_OK);
    assert_int_equal(kvc_seq_create(s->cache, &s->seq), KVC_OK);
}

static int make(void **state)
{
    struct state *s = calloc(1, sizeof(*s));
    struct failure failure = {""};

    assert_true(vlm_open(model_path, &s->vlm, &failure));
    assert_true(reader_open(&s->vlm, NULL, &s->reader, &failure));
    *state = s;
    return 0;
}

static int clean(void **state)
{
    struct state *s = *state;

    kvc_cache_destroy(s->cache);
    reader_close(&s->reader);
    vlm_close(&s->vlm);
    free(s);
    return 0;
}

static void read_words(struct state *s, const int32_t *words, size_t n)
{
    struct failure failure = {""};

    assert_true(reader_read(&s->reader, s->cache, s->seq, words, n, &failure));
}

static void see(struct state *s, int32_t image, int grid)
{
    struct failure failure = {""};

    reader_encode(&s->reader, s->rgb[image], grid);
    assert_true(reader_see(&s->reader, s->cache, s->seq, image, grid, &failure));
}

static void draw(struct state *s, int grid, int n_images, uint64_t lesson)
{
    struct lesson_params p = {.n_images = n_images,
                              .n_tokens = N_TOKENS,
                              .kinds = {0, 1, 0, 1},
                              .margin = 1.3f,
                              .looks_back = 0.3f};
    const size_t size = 3 * (size_t)(grid * PATCH) * (size_t)(grid * PATCH);
    uint8_t *rgb = malloc((size_t)n_images * size);

    assert_non_null(rgb);
    picture_params_default(grid, &p.picture);
    lesson_draw(lesson, &p, rgb, NULL, s->tokens[0], NULL, NULL, NULL);
    for (int i = 0; i < n_images; i++)
        memcpy(s->rgb[i], rgb + (size_t)i * size, size);
    free(rgb);
}

/* Reads a lesson up to the token of a reference; its logits are then the reader's. */
static void read_lesson(struct state *s, const struct reference *r)
{
    static const int32_t bos = WORD_BOS;

    draw(s, r->grid, r->n_images, r->lesson);
    read_words(s, &bos, 1);
    for (int32_t image = 0; image <= r->image; image++) {
        size_t n = 0;
        see(s, image, r->grid);
        while (n < N_TOKENS && s->tokens[image][n] != WORD_PAD)
            n++;
        read_words(s, s->tokens[image], image < r->image ? n : (size_t)r->token + 1);
    }
}

static double distance(const float *a, const float *b)
{
    double most = 0.0;

    for (size_t i = 0; i < N_WORDS; i++)
        most = fmax(most, fabs((double)a[i] - (double)b[i]));
    return most;
}

static void logits_are_those_of_python(void **state)
{
    struct state *s = *state;

    for (size_t i = 0; i < N_REFERENCES; i++) {
        open_cache(s, true);
        read_lesson(s, &references[i]);
        assert_true(distance(s->reader.logits, references[i].logits) < 1e-3);
        kvc_cache_destroy(s->cache);
        s->cache = NULL;
    }
}

/* Halves hold 11 bits. */
static void f16_cache_changes_logits_little(void **state)
{
    struct state *s = *state;

    open_cache(s, false);
    read_lesson(s, &references[0]);
    assert_true(distance(s->reader.logits, references[0].logits) < 2e-2);
}

static void images_and_text_take_their_positions(void **state)
{
    struct state *s = *state;
    static const int32_t words[] = {WORD_BOS, WORD_READ, WORD_FIELD};
    static kvc_token facts[2 * (1 + 256) + 3];

    draw(s, 16, 2, 5);
    open_cache(s, false);
    read_words(s, words, 1);
    see(s, 0, 16);
    assert_int_equal(kvc_seq_next_position(s->cache, s->seq), 2 + 16);
    read_words(s, words + 1, 2);
    see(s, 1, 16);
    const size_t n = (size_t)kvc_seq_n_tokens(s->cache, s->seq);
    assert_int_equal(n, 2 * (1 + 256) + 3);
    assert_int_equal(kvc_seq_next_position(s->cache, s->seq), 21 + 16);
    assert_int_equal(kvc_seq_read_tokens(s->cache, s->seq, 0, n, facts), KVC_OK);
    for (int32_t i = 0; i < 256; i++) {
        const kvc_token *first = &facts[2 + i], *second = &facts[n - 256 + (size_t)i];
        assert_int_equal(first->t, 2);
        assert_int_equal(first->y, 2 + i / 16);
        assert_int_equal(first->x, 2 + i % 16);
        assert_int_equal(first->image, 0);
        assert_int_equal(second->t, 21);
        assert_int_equal(second->y, 21 + i / 16);
        assert_int_equal(second->image, 1);
        assert_int_equal(second->row, i / 16);
        assert_int_equal(second->kind, KVC_TOKEN_VISUAL);
    }
}

static void what_is_taken_back_and_read_again_is_the_same(void **state)
{
    struct state *s = *state;
    const struct reference *r = &references[0];
    float first[N_WORDS];

    open_cache(s, false);
    read_lesson(s, r);
    memcpy(first, s->reader.logits, sizeof(first));
    assert_int_equal(kvc_seq_truncate(s->cache, s->seq, 2 + r->grid * r->grid), KVC_OK);
    read_words(s, s->tokens[0], (size_t)r->token + 1);
    assert_memory_equal(s->reader.logits, first, sizeof(first));
}

static void attention_is_timed(void **state)
{
    struct state *s = *state;

    open_cache(s, false);
    assert_true(forward_attend_seconds(s->reader.forward) == 0.0);
    read_lesson(s, &references[0]);
    assert_true(forward_attend_seconds(s->reader.forward) > 0.0);
}

/* The file with bytes overwritten, from @p offset bytes behind the beginning of @p what on. */
static void expect_changed_refused(const char *what, size_t offset, const void *with, size_t n,
                                   const char *why)
{
    char path[] = "vlm_model_XXXXXX";
    struct failure failure = {""};
    unsigned char *bytes = NULL;
    size_t size = 0, at = 0;
    struct vlm vlm;

    assert_true(file_read(model_path, &bytes, &size, &failure));
    while (at + strlen(what) < size && memcmp(bytes + at, what, strlen(what)) != 0)
        at++;
    assert_true(at + strlen(what) < size);
    assert_true(at + offset + n <= size);
    memcpy(bytes + at + offset, with, n);
    const int file = mkstemp(path);
    assert_true(file >= 0);
    assert_int_equal(write(file, bytes, size), size);
    assert_int_equal(close(file), 0);
    free(bytes);
    const bool opened = vlm_open(path, &vlm, &failure);
    remove(path);
    assert_false(opened);
    assert_non_null(strstr(failure.text, why));
    assert_null(vlm.model.weights);
    assert_null(vlm.stem.weights);
}

static void expect_refused(const char *what, const char *with, const char *why)
{
    expect_changed_refused(what, 0, with, strlen(what), why);
}

/* The length of a row follows the name and the number of dimensions. One number less leaves the
 * next tensor where it is. */
static void expect_shorter_refused(const char *name, uint64_t length, const char *why)
{
    uint8_t bytes[8];

    for (size_t i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(length >> (8 * i));
    expect_changed_refused(name, strlen(name) + 4, bytes, sizeof(bytes), why);
}

static void other_files_are_refused(void **state)
{
    (void)state;
    expect_refused("v.norm.weight", "v.norm.weighs", "v.norm.weight is missing");
    expect_refused("v.blk.1.conv.bias", "v.blk.7.conv.bias", "v.blk.1.conv.bias is missing");
    expect_refused("blk.2.attn_q.weight", "blk.2.attn_x.weight", "blk.2.attn_q.weight is missing");
    expect_refused("vision.dilations", "vision.dilationz", "vision.dilations");
    expect_refused("rope.dimension_sections", "rope.dimension_sectionz", "dimension_sections");
    expect_refused("vision.patch_size", "vision.patch_sice", "vision.patch_size");
    expect_refused("tinyvlm", "tinyxlm", "architecture");
    expect_shorter_refused("v.norm.weight", 127, "v.norm.weight is not [1][128]");
    expect_shorter_refused("v.proj.bias", 127, "v.proj.bias is not [1][128]");
    expect_shorter_refused("output_norm.weight", 127, "output_norm.weight is not [1][128]");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(logits_are_those_of_python, make, clean),
        cmocka_unit_test_setup_teardown(f16_cache_changes_logits_little, make, clean),
        cmocka_unit_test_setup_teardown(images_and_text_take_their_positions, make, clean),
        cmocka_unit_test_setup_teardown(what_is_taken_back_and_read_again_is_the_same, make, clean),
        cmocka_unit_test_setup_teardown(attention_is_timed, make, clean),
        cmocka_unit_test(other_files_are_refused),
    };

    if (argc != 2)
        return 2;
    model_path = argv[1];
    openblas_set_num_threads(1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
