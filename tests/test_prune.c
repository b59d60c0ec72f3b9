/* Which rows are kept: counts, forced rows, the selection, its known faults, random inputs. */
#include <math.h>
#include <string.h>

#include "support/half.h"
#include "support/rng.h"
#include "support/select.h"

enum { MAX_ROWS = 300, MAX_WORDS = (MAX_ROWS + 63) / 64 };

static size_t keep_count(size_t n, float rate, size_t keep_min)
{
    size_t keep = SIZE_MAX;

    assert_int_equal(kvc_keep_count(n, rate, keep_min, &keep), KVC_OK);
    return keep;
}

static void a_rate_becomes_the_count_that_its_decimal_means(void **state)
{
    (void)state;
    assert_int_equal(keep_count(576, 0.3f, 0), 404); /* 403.2 */
    assert_int_equal(keep_count(100, 0.3f, 0), 70);
    assert_int_equal(keep_count(100, 0.7f, 0), 30); /* 0.7f is below 0.7 */
    assert_int_equal(keep_count(576, 0.25f, 0), 432);
    assert_int_equal(keep_count(1000, 0.001f, 0), 999);
    for (int percent = 0; percent <= 100; percent++) {
        for (size_t n = 0; n <= 2000; n += 100) {
            const float rate = (float)percent / 100.0f;
            assert_int_equal(keep_count(n, rate, 0), n / 100 * (size_t)(100 - percent));
        }
        /* Never rounded down: one row more than a multiple of 100 needs another one. */
        assert_int_equal(keep_count(1001, (float)percent / 100.0f, 0),
                         10 * (100 - percent) + (percent < 100));
    }
}

static void the_minimum_is_kept_as_far_as_there_are_rows(void **state)
{
    (void)state;
    assert_int_equal(keep_count(100, 1.0f, 0), 0);
    assert_int_equal(keep_count(100, 1.0f, 64), 64);
    assert_int_equal(keep_count(100, 0.3f, 64), 70);
    assert_int_equal(keep_count(50, 0.3f, 64), 50);
    assert_int_equal(keep_count(0, 0.3f, 64), 0);
    assert_int_equal(keep_count(SIZE_MAX, 0.0f, 0), SIZE_MAX);
    assert_int_equal(keep_count(SIZE_MAX, 1.0f, 1), 1);
}

static void the_count_never_rises_with_the_rate(void **state)
{
    uint64_t rng = 1;

    (void)state;
    for (int draw = 0; draw < 100000; draw++) {
        const size_t n = rng_below(&rng, 100000);
        const float a = 0.5f + 0.5f * rng_unit(&rng), b = a + (1.0f - a) * 0.01f;
        const size_t keep = keep_count(n, a, 0);

        assert_true(keep >= keep_count(n, b, 0));
        assert_true((double)keep >= (double)n * (1.0 - (double)a) - 0.01);
        assert_true((double)keep < (double)n * (1.0 - (double)a) + 1.0);
    }
}

static void a_rate_outside_zero_to_one_is_refused(void **state)
{
    static const float bad[] = {-0.01f, 1.01f, NAN, INFINITY};
    size_t keep = 7;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(kvc_keep_count(10, bad[i], 0, &keep), KVC_E_ARG);
    }
    assert_int_equal(keep, 7);
    assert_int_equal(kvc_keep_count(10, 0.5f, 0, NULL), KVC_E_ARG);
}

/* fault C6: ties, NaN and too few valid scores. */
static void ties_go_to_the_lower_row_and_nan_never_wins(void **state)
{
    static const float ties[5] = {1, 2, 5, 4, 5};
    static const float nans[5] = {NAN, 3, -INFINITY, 2, NAN};
    static const float zeros[3] = {-0.0f, 0.0f, -0.0f};
    int32_t rows[5];

    (void)state;
    assert_rows(rows, select_rows(ties, 5, 1, NULL, 1, KVC_BLOCK_MEAN, rows), (int32_t[]){2}, 1);
    assert_rows(rows, select_rows(ties, 5, 2, NULL, 1, KVC_BLOCK_MEAN, rows), (int32_t[]){2, 4}, 2);
    assert_rows(rows, select_rows(ties, 5, 3, NULL, 1, KVC_BLOCK_MEAN, rows), (int32_t[]){2, 3, 4},
                3);
    assert_rows(rows, select_rows(nans, 5, 2, NULL, 1, KVC_BLOCK_MEAN, rows), (int32_t[]){1, 3}, 2);
    assert_rows(rows, select_rows(nans, 5, 3, NULL, 1, KVC_BLOCK_MEAN, rows), (int32_t[]){1, 3}, 2);
    assert_rows(rows, select_rows(zeros, 3, 1, NULL, 1, KVC_BLOCK_MAX, rows), (int32_t[]){0}, 1);
}

static void infinity_is_the_best_score_and_a_forced_row_needs_none(void **state)
{
    static const float scores[6] = {NAN, 3, INFINITY, 2, -INFINITY, 4};
    const uint64_t forced = 1 | 1 << 4;
    int32_t rows[6];

    (void)state;
    assert_rows(rows, select_rows(scores, 6, 3, &forced, 1, KVC_BLOCK_MEAN, rows),
                (int32_t[]){0, 2, 4}, 3);
    assert_rows(rows, select_rows(scores, 6, 6, &forced, 1, KVC_BLOCK_MEAN, rows),
                (int32_t[]){0, 1, 2, 3, 4, 5}, 6);
    assert_rows(rows, select_rows(scores, 6, 2, NULL, 1, KVC_BLOCK_MEAN, rows), (int32_t[]){2, 5},
                2);
}

/* fault C5: scores that share a coarse bucket, and a flood of equal ones. */
static void no_winner_is_lost_among_many_candidates(void **state)
{
    enum { SMALL = 8192, LARGE = 262144, KEEP = 2048, TOP = 10, LAST_TOP = 20000 * TOP };
    float *scores = malloc(LARGE * sizeof(*scores));
    int32_t *rows = malloc(KEEP * sizeof(*rows));

    (void)state;
    assert_non_null(scores);
    assert_non_null(rows);
    for (size_t i = 0; i < SMALL; i++) {
        scores[i] = 1.0f + (float)i * 0x1p-20f;
    }
    for (int run = 0; run < 2; run++) {
        assert_int_equal(select_rows(scores, SMALL, KEEP, NULL, 1, KVC_BLOCK_MEAN, rows), KEEP);
        for (int32_t i = 0; i < KEEP; i++) {
            assert_int_equal(rows[i], SMALL - KEEP + i);
        }
    }
    for (size_t i = 0; i < LARGE; i++) {
        scores[i] = i % 20000 == 19999 && i < LAST_TOP ? 1.5f : 1.25f;
    }
    assert_int_equal(select_rows(scores, LARGE, KEEP, NULL, 1, KVC_BLOCK_MEAN, rows), KEEP);
    for (int32_t i = 0; i < KEEP; i++) {
        const int32_t top = i - (KEEP - TOP);
        assert_int_equal(rows[i], top < 0 ? i : 20000 * (top + 1) - 1);
    }
    free(rows);
    free(scores);
}

/* fault C2, case (a): a new row with no score is not dropped at birth. */
static void a_new_row_survives_as_a_recent_one(void **state)
{
    static const float scores[5] = {10, 6, 5, 4, 0};
    kvc_force_options options;
    uint64_t forced;
    size_t n_forced;
    int32_t rows[4];

    (void)state;
    kvc_force_options_default(&options);
    options.recent = 1;
    options.sinks = 0;
    assert_int_equal(kvc_force_rows(5, &options, 4, &forced, &n_forced, NULL), KVC_OK);
    assert_rows(rows, select_rows(scores, 5, 4, &forced, 1, KVC_BLOCK_MEAN, rows),
                (int32_t[]){0, 1, 2, 4}, 4);
    assert_rows(rows, select_rows(scores, 5, 4, NULL, 1, KVC_BLOCK_MEAN, rows),
                (int32_t[]){0, 1, 2, 3}, 4);
}

/* fault C7: padding with the top score is marked -inf and takes no part. */
static void masked_rows_change_nothing_but_indices(void **state)
{
    static const float padded[5] = {-INFINITY, NAN, 0.5f, 2.0f, 1.0f};
    int32_t rows[5], alone[5];

    (void)state;
    assert_int_equal(select_rows(padded, 5, 2, NULL, 1, KVC_BLOCK_MEAN, rows), 2);
    assert_int_equal(select_rows(padded + 2, 3, 2, NULL, 1, KVC_BLOCK_MEAN, alone), 2);
    assert_true(rows[0] == alone[0] + 2 && rows[1] == alone[1] + 2);
}

/* The half nearest to a sum of a mask and a score, as code that adds masks to scores has it. */
static double added_in_half(double mask, double score)
{
    const double sum = mask + score;
    const double above = -half_value(half_down(-sum)), below = -half_value(half_ceil(-sum));

    return above - sum < sum - below ? above : below;
}

/* G9: a mask that is added in half precision eats the scores; masks here select. */
static void masks_select_and_leave_scores_their_order(void **state)
{
    static const float scores[] = {15.0f, 0.01f, 3.7f, 17.0f};
    static const double sums[] = {-65504.0, -65504.0, -65504.0, -65472.0};
    float masked[4];
    int32_t rows[2];

    (void)state;
    assert_true(-half_value(half_ceil(65516.0)) == -65504.0);
    for (int i = 0; i < 4; i++) {
        assert_true(added_in_half(-65504.0, (double)scores[i]) == sums[i]);
        masked[i] = scores[i];
    }
    assert_int_equal(select_rows(scores, 4, 2, NULL, 1, KVC_BLOCK_MEAN, rows), 2);
    assert_int_equal(rows[0], 0); /* among the sums row 1 would tie with it and with row 2 */
    assert_int_equal(rows[1], 3);
    masked[3] = -INFINITY;
    assert_int_equal(select_rows(masked, 4, 2, NULL, 1, KVC_BLOCK_MEAN, rows), 2);
    assert_int_equal(rows[0], 0);
    assert_int_equal(rows[1], 2);
}

static void default_force_options_set_every_field(void **state)
{
    kvc_force_options o;

    (void)state;
    memset(&o, 0xFF, sizeof(o));
    kvc_force_options_default(&o);
    assert_int_equal(o.struct_size, sizeof(o));
    assert_true(o.recent == 64 && o.sinks == 4 && o.sentences);
    assert_null(o.caller);
    assert_null(o.sentence_first);
    kvc_force_options_default(NULL);
}

/* Bit i of the result: row i is forced. */
static uint64_t forced_rows(size_t n, const kvc_force_options *options, size_t keep,
                            bool want_truncated)
{
    uint64_t forced = UINT64_MAX;
    size_t n_forced = SIZE_MAX, count = 0;
    bool truncated = !want_truncated;

    assert_int_equal(kvc_force_rows(n, options, keep, &forced, &n_forced, &truncated), KVC_OK);
    for (size_t i = 0; i < 64; i++) {
        count += bit_of(&forced, i);
    }
    assert_int_equal(n_forced, count);
    assert_true(truncated == want_truncated);
    return forced;
}

static void forced_rows_give_way_in_the_order_of_their_rank(void **state)
{
    const uint64_t sentences = 1 << 1 | 1 << 6 | 1 << 7 | UINT64_C(1) << 63;
    const uint64_t caller = 1 << 4 | 1 << 5;
    const kvc_force_options o = {.struct_size = sizeof(o),
                                 .recent = 3,
                                 .sinks = 2,
                                 .sentences = true,
                                 .caller = &caller,
                                 .sentence_first = &sentences};
    kvc_force_options no_sentences = o;

    (void)state;
    /* Of 10 rows: recent 7 8 9, sinks 0 1, sentences 1 6 7, caller 4 5. */
    assert_int_equal(forced_rows(10, &o, 10, false), 0x3F3);
    assert_int_equal(forced_rows(10, &o, 8, false), 0x3F3);
    assert_int_equal(forced_rows(10, &o, 7, true), 0x3D3);
    assert_int_equal(forced_rows(10, &o, 6, true), 0x3C3);
    assert_int_equal(forced_rows(10, &o, 5, true), 0x383);
    assert_int_equal(forced_rows(10, &o, 4, true), 0x381);
    assert_int_equal(forced_rows(10, &o, 2, true), 0x300);
    assert_int_equal(forced_rows(10, &o, 0, true), 0);
    no_sentences.sentences = false;
    assert_int_equal(forced_rows(10, &no_sentences, 10, false), 0x3B3);
    assert_int_equal(forced_rows(2, &o, 2, false), 3);
    assert_int_equal(forced_rows(10, NULL, 10, false), 0x3FF);
}

static void forcing_refuses_bad_arguments(void **state)
{
    uint64_t forced = 7;
    size_t n_forced = 7;
    kvc_force_options o;

    (void)state;
    kvc_force_options_default(&o);
    assert_int_equal(kvc_force_rows(10, &o, 5, NULL, &n_forced, NULL), KVC_E_ARG);
    assert_int_equal(kvc_force_rows(10, &o, 5, &forced, NULL, NULL), KVC_E_ARG);
    o.caller = &forced;
    assert_int_equal(kvc_force_rows(10, &o, 5, &forced, &n_forced, NULL), KVC_E_ARG);
    kvc_force_options_default(&o);
    o.recent = -1;
    assert_int_equal(kvc_force_rows(10, &o, 5, &forced, &n_forced, NULL), KVC_E_ARG);
    kvc_force_options_default(&o);
    o.sinks = -1;
    assert_int_equal(kvc_force_rows(10, &o, 5, &forced, &n_forced, NULL), KVC_E_ARG);
    kvc_force_options_default(&o);
    o.struct_size = 8;
    assert_int_equal(kvc_force_rows(10, &o, 5, &forced, &n_forced, NULL), KVC_E_ARG);
    assert_true(forced == 7 && n_forced == 7);
    assert_int_equal(kvc_force_rows(0, NULL, 5, NULL, &n_forced, NULL), KVC_OK);
    assert_int_equal(n_forced, 0);
}

static void selection_refuses_bad_arguments(void **state)
{
    static const float scores[4] = {1, 2, 3, 4};
    const uint64_t forced = 7;
    size_t n_rows = 7, size;
    int32_t rows[4] = {7, 7, 7, 7};
    _Alignas(64) unsigned char ws[256];
    const kvc_block_score mean = KVC_BLOCK_MEAN;

    (void)state;
    assert_int_equal(kvc_select_rows_workspace_size(4, 1, &size), KVC_OK);
    assert_true(size > 0 && size <= sizeof(ws));
    assert_int_equal(kvc_select_rows(NULL, 4, 2, NULL, 1, mean, rows, &n_rows, ws, size),
                     KVC_E_ARG);
    assert_int_equal(kvc_select_rows(scores, 4, 2, NULL, 1, mean, NULL, &n_rows, ws, size),
                     KVC_E_ARG);
    assert_int_equal(kvc_select_rows(scores, 4, 2, NULL, 1, mean, rows, NULL, ws, size), KVC_E_ARG);
    assert_int_equal(kvc_select_rows(scores, 4, 2, NULL, 0, mean, rows, &n_rows, ws, size),
                     KVC_E_ARG);
    assert_int_equal(kvc_select_rows(scores, 4, 2, NULL, 65, mean, rows, &n_rows, ws, size),
                     KVC_E_ARG);
    assert_int_equal(
        kvc_select_rows(scores, 4, 2, NULL, 1, (kvc_block_score)2, rows, &n_rows, ws, size),
        KVC_E_ARG);
    assert_int_equal(kvc_select_rows(scores, 4, 2, &forced, 1, mean, rows, &n_rows, ws, size),
                     KVC_E_ARG);
    assert_int_equal(
        kvc_select_rows(scores, (size_t)INT32_MAX + 1, 2, NULL, 1, mean, rows, &n_rows, ws, size),
        KVC_E_ARG);
    assert_int_equal(kvc_select_rows_workspace_size(4, 0, &size), KVC_E_ARG);
    assert_int_equal(kvc_select_rows_workspace_size(4, 1, NULL), KVC_E_ARG);
    assert_int_equal(kvc_select_rows(scores, 4, 2, NULL, 1, mean, rows, &n_rows, NULL, size),
                     KVC_E_WORKSPACE);
    assert_int_equal(kvc_select_rows(scores, 4, 2, NULL, 1, mean, rows, &n_rows, ws, size - 1),
                     KVC_E_WORKSPACE);
    assert_int_equal(kvc_select_rows(scores, 4, 2, NULL, 1, mean, rows, &n_rows, ws + 32, size),
                     KVC_E_WORKSPACE);
    assert_true(n_rows == 7 && rows[0] == 7 && rows[3] == 7);
    assert_int_equal(kvc_select_rows(scores, 4, 0, NULL, 1, mean, NULL, &n_rows, ws, size), KVC_OK);
    assert_int_equal(n_rows, 0);
    assert_int_equal(kvc_select_rows(NULL, 0, 3, NULL, 1, mean, NULL, &n_rows, NULL, 0), KVC_OK);
    assert_int_equal(n_rows, 0);
}

/* A random selection: many ties, some NaN and infinities, some rows forced. */
struct random_case {
    size_t n, keep, n_forced;
    float scores[MAX_ROWS];
    uint64_t forced[MAX_WORDS];
};

static struct random_case random_case(uint64_t *rng)
{
    struct random_case c = {.n = rng_below(rng, MAX_ROWS + 1)};

    for (size_t i = 0; i < c.n; i++) {
        const size_t kind = rng_below(rng, 20);
        c.scores[i] = kind == 0   ? NAN
                      : kind == 1 ? -INFINITY
                      : kind == 2 ? INFINITY
                      : kind < 12 ? (float)rng_below(rng, 4)
                                  : rng_unit(rng);
    }
    for (size_t i = 0; i < c.n; i++) {
        if (rng_below(rng, 10) == 0) {
            mark_bit(c.forced, i);
            c.n_forced++;
        }
    }
    c.keep = c.n_forced + rng_below(rng, c.n + 2);
    return c;
}

static bool valid(const struct random_case *c, size_t row)
{
    return bit_of(c->forced, row) || c->scores[row] > -INFINITY;
}

/* A row that was left out is worse than every one that was chosen freely. */
static void check_chosen(const struct random_case *c, const bool *taken)
{
    for (size_t out = 0; out < c->n; out++) {
        if (taken[out] || !valid(c, out)) {
            continue;
        }
        for (size_t in = 0; in < c->n; in++) {
            if (taken[in] && !bit_of(c->forced, in)) {
                assert_true(c->scores[in] > c->scores[out] ||
                            (c->scores[in] == c->scores[out] && in < out));
            }
        }
    }
}

static void the_selection_is_exact_on_random_inputs(void **state)
{
    uint64_t rng = 2;
    int32_t rows[MAX_ROWS], again[MAX_ROWS];

    (void)state;
    for (int draw = 0; draw < 2000; draw++) {
        const struct random_case c = random_case(&rng);
        const size_t n =
            select_rows(c.scores, c.n, c.keep, c.forced, 1, (kvc_block_score)(draw % 2), rows);
        bool taken[MAX_ROWS] = {false};
        size_t n_valid = 0;

        for (size_t i = 0; i < c.n; i++) {
            n_valid += valid(&c, i);
        }
        assert_int_equal(n, c.keep < n_valid ? c.keep : n_valid);
        for (size_t i = 0; i < n; i++) {
            assert_true(i == 0 || rows[i] > rows[i - 1]);
            assert_true(rows[i] >= 0 && (size_t)rows[i] < c.n && valid(&c, (size_t)rows[i]));
            taken[rows[i]] = true;
        }
        for (size_t i = 0; i < c.n; i++) {
            assert_true(taken[i] || !bit_of(c.forced, i));
        }
        check_chosen(&c, taken);
        assert_rows(again, select_rows(c.scores, c.n, c.keep, c.forced, 1, KVC_BLOCK_MEAN, again),
                    rows, n);
    }
}

static void blocks_stay_or_go_as_a_whole(void **state)
{
    static const float scores[7] = {1, 9, 4, 4, 0, 0, 5};
    const uint64_t forced = 1 << 5;
    int32_t rows[7];

    (void)state;
    /* Means 5 4 0 5, maxima 9 4 0 5; the last block has one row. */
    assert_rows(rows, select_rows(scores, 7, 2, NULL, 2, KVC_BLOCK_MEAN, rows), (int32_t[]){0, 1},
                2);
    assert_rows(rows, select_rows(scores, 7, 3, NULL, 2, KVC_BLOCK_MEAN, rows),
                (int32_t[]){0, 1, 6}, 3);
    assert_rows(rows, select_rows(scores, 7, 4, NULL, 2, KVC_BLOCK_MEAN, rows),
                (int32_t[]){0, 1, 6}, 3);
    assert_rows(rows, select_rows(scores, 7, 1, NULL, 2, KVC_BLOCK_MAX, rows), (int32_t[]){6}, 1);
    /* The forced block comes first, and alone may exceed the count. */
    assert_rows(rows, select_rows(scores, 7, 4, &forced, 2, KVC_BLOCK_MAX, rows),
                (int32_t[]){0, 1, 4, 5}, 4);
    assert_rows(rows, select_rows(scores, 7, 1, &forced, 2, KVC_BLOCK_MAX, rows), (int32_t[]){4, 5},
                2);
}

static void a_lone_peak_counts_more_as_maximum_than_as_mean(void **state)
{
    static const float scores[4] = {0, 9, 5, 5};
    int32_t rows[4];

    (void)state;
    assert_rows(rows, select_rows(scores, 4, 2, NULL, 2, KVC_BLOCK_MEAN, rows), (int32_t[]){2, 3},
                2);
    assert_rows(rows, select_rows(scores, 4, 2, NULL, 2, KVC_BLOCK_MAX, rows), (int32_t[]){0, 1},
                2);
}

/* Valid rows of a block, and whether one of them is forced. */
static size_t block_rows(const struct random_case *c, size_t first, size_t block, bool *forced)
{
    size_t n = 0;

    *forced = false;
    for (size_t i = first; i < first + block && i < c->n; i++) {
        n += valid(c, i);
        *forced |= bit_of(c->forced, i);
    }
    return n;
}

static void blocks_of_every_size_are_exact_on_random_inputs(void **state)
{
    uint64_t rng = 3;
    int32_t rows[MAX_ROWS];

    (void)state;
    for (int draw = 0; draw < 6400; draw++) {
        const size_t block = 1 + (size_t)draw % 64;
        const struct random_case c = random_case(&rng);
        const size_t n = select_rows(c.scores, c.n, c.keep, c.forced, block,
                                     (kvc_block_score)(draw / 64 % 2), rows);
        bool taken[MAX_ROWS] = {false};
        size_t n_valid = 0, n_must = 0;

        for (size_t i = 0; i < n; i++) {
            assert_true(i == 0 || rows[i] > rows[i - 1]);
            taken[rows[i]] = true;
        }
        for (size_t first = 0; first < c.n; first += block) {
            bool forced;
            const size_t size = block_rows(&c, first, block, &forced);
            size_t n_taken = 0;

            for (size_t i = first; i < first + block && i < c.n; i++) {
                n_taken += taken[i];
                assert_true(valid(&c, i) || !taken[i]);
            }
            assert_true(n_taken == size || (n_taken == 0 && !forced));
            n_valid += size;
            n_must += forced ? size : 0;
        }
        assert_true(n <= (n_must > c.keep ? n_must : c.keep));
        assert_true(n == n_valid || n + block > c.keep);
    }
}

static void fields_of_a_later_version_must_be_zero(void **state)
{
    struct {
        kvc_force_options known;
        uint64_t added;
    } force = {.added = 0};
    struct {
        kvc_heavy_options known;
        uint64_t added;
    } heavy = {.added = 0};
    struct {
        kvc_budget_options known;
        uint64_t added;
    } budget = {.added = 0};
    const float one[1] = {1};
    uint64_t forced;
    size_t n_forced;
    float score;
    int32_t rows;

    (void)state;
    kvc_force_options_init(&force.known, sizeof(force));
    kvc_heavy_options_init(&heavy.known, sizeof(heavy));
    kvc_budget_options_init(&budget.known, sizeof(budget));
    for (int added = 0; added < 2; added++) {
        const kvc_status want = added ? KVC_E_UNSUPPORTED : KVC_OK;

        force.added = heavy.added = budget.added = (uint64_t)added;
        assert_int_equal(kvc_force_rows(1, &force.known, 1, &forced, &n_forced, NULL), want);
        assert_int_equal(kvc_heavy_scores(one, 1, 1, 1, 0, &heavy.known, &score), want);
        assert_int_equal(kvc_split_budget(one, 1, 1, &budget.known, &rows), want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rate_becomes_the_count_that_its_decimal_means),
        cmocka_unit_test(the_minimum_is_kept_as_far_as_there_are_rows),
        cmocka_unit_test(the_count_never_rises_with_the_rate),
        cmocka_unit_test(a_rate_outside_zero_to_one_is_refused),
        cmocka_unit_test(ties_go_to_the_lower_row_and_nan_never_wins),
        cmocka_unit_test(infinity_is_the_best_score_and_a_forced_row_needs_none),
        cmocka_unit_test(no_winner_is_lost_among_many_candidates),
        cmocka_unit_test(a_new_row_survives_as_a_recent_one),
        cmocka_unit_test(masked_rows_change_nothing_but_indices),
        cmocka_unit_test(masks_select_and_leave_scores_their_order),
        cmocka_unit_test(default_force_options_set_every_field),
        cmocka_unit_test(forced_rows_give_way_in_the_order_of_their_rank),
        cmocka_unit_test(forcing_refuses_bad_arguments),
        cmocka_unit_test(fields_of_a_later_version_must_be_zero),
        cmocka_unit_test(selection_refuses_bad_arguments),
        cmocka_unit_test(the_selection_is_exact_on_random_inputs),
        cmocka_unit_test(blocks_stay_or_go_as_a_whole),
        cmocka_unit_test(a_lone_peak_counts_more_as_maximum_than_as_mean),
        cmocka_unit_test(blocks_of_every_size_are_exact_on_random_inputs),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
