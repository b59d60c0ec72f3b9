/* The examination: items, tables of results, and rooms in which caches are compressed. */
#define _POSIX_C_SOURCE 200809L /* mkstemp() */

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <setjmp.h>

#include <cmocka.h>

#include "exam.h"
#include "rows.h"

static void mcnemar_is_exact(void **state)
{
    (void)state;
    /* 5 of 20: 2 (1 + 20 + 190 + 1140 + 4845 + 15504) / 2^20 = 43400 / 1048576 */
    assert_true(fabs(mcnemar(5, 15) - 43400.0 / 1048576.0) < 1e-12);
    assert_true(fabs(mcnemar(15, 5) - 43400.0 / 1048576.0) < 1e-12);
    assert_true(fabs(mcnemar(0, 0) - 1.0) < 1e-12);
    assert_true(fabs(mcnemar(7, 7) - 1.0) < 1e-12);
    assert_true(fabs(mcnemar(0, 1) - 1.0) < 1e-12);
    assert_true(fabs(mcnemar(0, 6) - 2.0 / 64.0) < 1e-12);
    /* 1900 of 4000: the normal approximation with continuity, z = (2000 - 1900 - 0.5) / 31.62 */
    assert_true(fabs(mcnemar(1900, 2100) - erfc(99.5 / sqrt(2000.0))) < 1e-5);
}

static void pairs_count_the_same_questions(void **state)
{
    static const uint8_t reference[] = {1, 1, 1, 0, 0, 1, 1};
    static const uint8_t hits[] = {1, 0, 1, 1, 0, 0};
    struct row_table table = {0};
    (void)state;

    assert_non_null(rows_add(&table, "e", "reference", 0.0, sizeof(reference)));
    assert_non_null(rows_add(&table, "e", "other", 1.0, sizeof(hits)));
    struct row *a = rows_find(&table, "e", "reference", 0.0),
               *b = rows_find(&table, "e", "other", 1.0);
    assert_null(rows_find(&table, "e", "other", 2.0));
    assert_null(rows_find(&table, "f", "other", 1.0));
    memcpy(a->hits, reference, sizeof(reference));
    memcpy(b->hits, hits, sizeof(hits));
    rows_count(b);
    rows_pair(b, a);
    assert_true(fabs(b->accuracy - 0.5) < 1e-12);
    assert_true(fabs(b->groups[0] - 1.0) < 1e-12);
    assert_true(fabs(b->groups[1] - 0.0) < 1e-12);
    assert_true(fabs(b->groups[2] - 0.5) < 1e-12);
    assert_int_equal(b->n_lost, 2);
    assert_int_equal(b->n_gained, 1);
    assert_true(fabs(b->kept - 3.0 / 4.0) < 1e-12);
    assert_true(fabs(b->p - 1.0) < 1e-12);
    rows_free(&table);
}

static char *temporary_file(const char *content)
{
    char *path = strdup("/tmp/kvc_rows_XXXXXX");
    const int fd = mkstemp(path);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, content, strlen(content)), (ssize_t)strlen(content));
    close(fd);
    return path;
}

static bool same_number(double a, double b)
{
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof(a)) == 0;
}

static void csv_gives_back_what_it_took(void **state)
{
    struct row_table table = {0}, back = {0};
    struct failure failure;
    char *path = temporary_file("");
    (void)state;

    struct row *row = rows_add(&table, "first", "a \"b\", c/30 %,", 1.0 / 3.0, 3);
    row->accuracy = 2.0 / 3.0;
    row->kl = 1e-300;
    row->rows = -0.0;
    row->n_lost = 12345678;
    rows_add(&table, "", "", -7.0, 0);
    assert_true(rows_write_csv(&table, path, &failure));
    assert_true(rows_read_csv(&back, path, &failure));
    assert_int_equal(back.n, 2);
    for (size_t i = 0; i < 2; i++) {
        const struct row *a = &table.rows[i], *b = &back.rows[i];
        assert_string_equal(a->experiment, b->experiment);
        assert_string_equal(a->name, b->name);
        assert_true(same_number(a->x, b->x));
        assert_int_equal(a->n, b->n);
        assert_int_equal(a->n_lost, b->n_lost);
        assert_int_equal(a->n_gained, b->n_gained);
        assert_true(same_number(a->accuracy, b->accuracy));
        assert_true(same_number(a->kl, b->kl));
        assert_true(same_number(a->rows, b->rows));
        assert_true(same_number(a->step_ms, b->step_ms));
        assert_null(b->hits);
    }
    rows_free(&table);
    rows_free(&back);
    unlink(path);
    free(path);
}

static void bad_csv_is_refused(void **state)
{
    static const char *const contents[] = {"", "header\na,b,1,2\n",
                                           "header\na,b,1,-2,0,0,,,,,,,,,,,,,,,\n",
                                           "header\na,b,x,2,0,0,,,,,,,,,,,,,,,\n"};
    (void)state;

    for (size_t i = 0; i < sizeof(contents) / sizeof(*contents); i++) {
        struct row_table table = {0};
        struct failure failure;
        char *path = temporary_file(contents[i]);
        assert_false(rows_read_csv(&table, path, &failure));
        rows_free(&table);
        unlink(path);
        free(path);
    }
}

static void json_has_the_main_rows_first(void **state)
{
    static const char expected[] =
        "{\"rows\":["
        "{\"name\":\"f16\",\"n\":2,\"accuracy\":0.5,\"cache_bytes_per_token\":null,"
        "\"pool_bytes_per_token\":null,\"peak_cache_bytes\":null,\"attention_us\":null,"
        "\"step_ms\":null},"
        "{\"name\":\"light\",\"n\":2,\"accuracy\":null,\"cache_bytes_per_token\":12.5,"
        "\"pool_bytes_per_token\":null,\"peak_cache_bytes\":null,\"attention_us\":null,"
        "\"step_ms\":null},"
        "{\"name\":\"sweep/a\\\"b/30\",\"n\":1,\"accuracy\":null,\"cache_bytes_per_token\":null,"
        "\"pool_bytes_per_token\":null,\"peak_cache_bytes\":null,\"attention_us\":null,"
        "\"step_ms\":0.25}]}\n";
    struct row_table table = {0};
    char text[2048];
    (void)state;

    rows_add(&table, "sweep", "a\"b", 30.0, 1)->step_ms = 0.25;
    rows_add(&table, "first", "f16", 0.0, 2)->accuracy = 0.5;
    rows_add(&table, "second", "f16", 0.0, 2);
    rows_add(&table, "second", "light", 0.0, 2)->cache_bytes_per_token = 12.5;
    FILE *file = tmpfile();
    rows_print_json(&table, file);
    rewind(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    assert_string_equal(text, expected);
    rows_free(&table);
}

static bool same_question(const struct question *a, const struct question *b)
{
    return a->kind == b->kind && a->n_words == b->n_words && a->n_answer == b->n_answer &&
           memcmp(a->words, b->words, (size_t)a->n_words * sizeof(*a->words)) == 0 &&
           memcmp(a->answer, b->answer, (size_t)a->n_answer * sizeof(*a->answer)) == 0;
}

static uint64_t hash_of(const struct picture *picture)
{
    const size_t side = (size_t)(PATCH * picture->grid);
    uint64_t hash = UINT64_C(14695981039346656037);

    for (size_t i = 0; i < side * side * 3; i++)
        hash = (hash ^ picture->rgb[i]) * UINT64_C(1099511628211);
    return hash;
}

static void items_follow_from_their_numbers(void **state)
{
    enum { N = 30 };
    struct exam_item *item = malloc(sizeof(*item)), *same = malloc(sizeof(*same));
    struct exam exam;
    (void)state;

    for (int grid = 16; grid <= 24; grid += 8) {
        exam_default(EXAM_REPORT, grid, &exam);
        for (size_t i = 0; i < N; i++) {
            exam_item(&exam, i, item);
            exam_item(&exam, i, same);
            assert_int_equal(item->group, i % N_GROUPS);
            assert_int_equal(item->picture.grid, grid);
            assert_true(hash_of(&item->picture) == hash_of(&same->picture));
            assert_true(same_question(&item->first, &same->first));
            assert_true(same_question(&item->second, &same->second));
            assert_true(questions_apart(&item->first, &item->second, grid));
            assert_int_equal(item->picture.kind, item->group == 2 ? PICTURE_SCREEN : PICTURE_SCENE);
            assert_int_equal(item->first.kind == QUESTION_READ, item->group == 2);
            assert_int_equal(item->first.kind == QUESTION_SPATIAL, item->group == 1);
        }
    }
    free(item);
    free(same);
}

static int compare_hashes(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void no_two_items_share_a_picture(void **state)
{
    enum { N = 60 };
    struct exam_item *item = malloc(sizeof(*item));
    uint64_t hashes[2 * N];
    struct exam exam;
    (void)state;

    for (int set = 0; set < 2; set++) {
        exam_default(set == 0 ? EXAM_TUNE : EXAM_REPORT, 16, &exam);
        for (size_t i = 0; i < N; i++) {
            exam_item(&exam, i, item);
            hashes[(size_t)set * N + i] = hash_of(&item->picture);
        }
    }
    qsort(hashes, 2 * N, sizeof(*hashes), compare_hashes);
    for (size_t i = 1; i < 2 * N; i++)
        assert_true(hashes[i] != hashes[i - 1]);
    free(item);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mcnemar_is_exact),
        cmocka_unit_test(pairs_count_the_same_questions),
        cmocka_unit_test(csv_gives_back_what_it_took),
        cmocka_unit_test(bad_csv_is_refused),
        cmocka_unit_test(json_has_the_main_rows_first),
        cmocka_unit_test(items_follow_from_their_numbers),
        cmocka_unit_test(no_two_items_share_a_picture),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
