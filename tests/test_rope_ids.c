/* The ids of prompts: text, images and videos as 1-D, 2-D and M-RoPE positions. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvc/rope.h"
#include "support/rng.h"

enum { MAX_TOKENS = 4096, LAST = INT32_MAX - 1 };

static int32_t positions[MAX_TOKENS][3];

static kvc_rope_segment text(int32_t n)
{
    return (kvc_rope_segment){.n_text = n};
}

static kvc_rope_segment video(int32_t n_frames, int32_t n_rows, int32_t n_cols)
{
    return (kvc_rope_segment){.n_frames = n_frames, .n_rows = n_rows, .n_cols = n_cols};
}

static void check(const kvc_rope_segment *s, size_t n_segments, kvc_rope_ids ids, int64_t first,
                  const int32_t (*want)[3], size_t n_want, int64_t next_want)
{
    size_t n;
    int64_t next, delta;

    assert_int_equal(
        kvc_rope_positions(s, n_segments, ids, first, positions[0], n_want, &n, &next, &delta),
        KVC_OK);
    assert_int_equal(n, n_want);
    assert_memory_equal(positions, want, n_want * sizeof(*want));
    assert_int_equal(next, next_want);
    assert_int_equal(delta, next_want - first - (int64_t)n_want);
    n = 0;
    assert_int_equal(kvc_rope_positions(s, n_segments, ids, first, NULL, 0, &n, NULL, NULL),
                     KVC_OK);
    assert_int_equal(n, n_want);
}

/* G11 */
static void mrope_ids_are_those_of_the_printed_prompt(void **state)
{
    static const int32_t want[11][3] = {{0, 0, 0}, {1, 1, 1}, {2, 2, 2}, {3, 3, 3},
                                        {3, 3, 4}, {3, 3, 5}, {3, 4, 3}, {3, 4, 4},
                                        {3, 4, 5}, {6, 6, 6}, {7, 7, 7}};
    const kvc_rope_segment plain[] = {text(3), video(1, 2, 3), text(2)};
    kvc_rope_segment patches[] = {text(3), video(1, 4, 6), text(2)};

    (void)state;
    patches[1].merge = 2;
    patches[1].frame_step = 7.5f; /* one frame: of no matter */
    check(plain, 3, KVC_ROPE_IDS_MROPE, 0, want, 11, 8);
    check(patches, 3, KVC_ROPE_IDS_MROPE, 0, want, 11, 8);
    check(plain, 3, KVC_ROPE_IDS_2D, 0, want, 11, 8);
}

/* faults H5, C1: the next position is 8 = 5 + max(2, 3), with or without pruning; it is no count of
 * rows, before (11) or after (9). */
static void pruning_moves_neither_the_kept_nor_the_next_position(void **state)
{
    static const int32_t kept_want[4][3] = {{5, 5, 5}, {5, 5, 6}, {5, 6, 5}, {5, 6, 6}};
    const kvc_rope_segment prompt[] = {text(5), video(1, 2, 3)}, more = text(1);
    int32_t kept[4][3], after[3];
    size_t n, n_kept = 0;
    int64_t next, delta, one;

    (void)state;
    assert_int_equal(kvc_rope_positions(prompt, 2, KVC_ROPE_IDS_MROPE, 0, positions[0], MAX_TOKENS,
                                        &n, &next, &delta),
                     KVC_OK);
    for (size_t i = 5; i < n; i++) { /* drop all patches with x = 7 */
        if (positions[i][2] != 7) {
            memcpy(kept[n_kept++], positions[i], sizeof(kept[0]));
        }
    }
    assert_int_equal(n_kept, 4);
    assert_memory_equal(kept, kept_want, sizeof(kept));
    assert_int_equal(next, 8);
    assert_int_equal(delta, -3);
    assert_int_equal(
        kvc_rope_positions(&more, 1, KVC_ROPE_IDS_MROPE, next, after, 1, &n, &next, &one), KVC_OK);
    assert_true(after[0] == 8 && after[1] == 8 && after[2] == 8 && next == 9 && one == 0);
}

static void one_dimensional_ids_number_every_token(void **state)
{
    static const int32_t want[7][3] = {{9, 9, 9},    {10, 10, 10}, {11, 11, 11}, {12, 12, 12},
                                       {13, 13, 13}, {14, 14, 14}, {15, 15, 15}};
    const kvc_rope_segment s[] = {text(1), video(2, 1, 2), text(2)};

    (void)state;
    check(s, 3, KVC_ROPE_IDS_1D, 9, want, 7, 16);
}

/* Two frames of 2 x 1: one after the other in 2-D, side by side in time in M-RoPE. */
static void frames_follow_each_other_or_share_a_start(void **state)
{
    static const int32_t flat[5][3] = {{0, 0, 0}, {0, 1, 0}, {2, 2, 2}, {2, 3, 2}, {4, 4, 4}};
    static const int32_t deep[5][3] = {{0, 0, 0}, {0, 1, 0}, {1, 0, 0}, {1, 1, 0}, {2, 2, 2}};
    const kvc_rope_segment s[] = {video(2, 2, 1), text(1)};

    (void)state;
    check(s, 2, KVC_ROPE_IDS_2D, 0, flat, 5, 5);
    check(s, 2, KVC_ROPE_IDS_MROPE, 0, deep, 5, 3);
}

/* Qwen2.5-VL: 2 tokens a second, 0.75 seconds a frame: 0, 1.5, 3, 4.5, whole numbers below. */
static void frame_step_stretches_time(void **state)
{
    static const int32_t want[5][3] = {{0, 0, 0}, {1, 0, 0}, {3, 0, 0}, {4, 0, 0}, {5, 5, 5}};
    kvc_rope_segment s[] = {video(4, 1, 1), text(1)};

    (void)state;
    s[0].frame_step = 1.5f;
    check(s, 2, KVC_ROPE_IDS_MROPE, 0, want, 5, 6);
    s[0].frame_step = 0.0f; /* counts as 1 */
    {
        static const int32_t by1[5][3] = {{0, 0, 0}, {1, 0, 0}, {2, 0, 0}, {3, 0, 0}, {4, 4, 4}};
        check(s, 2, KVC_ROPE_IDS_MROPE, 0, by1, 5, 5);
    }
}

/* However a prompt is cut, its parts get the ids of the whole, and their deltas add up. */
static void parts_of_a_prompt_continue_each_other(void **state)
{
    static int32_t part[MAX_TOKENS][3];
    uint64_t rng = 1;

    (void)state;
    for (int round = 0; round < 500; round++) {
        const kvc_rope_ids ids = (kvc_rope_ids)rng_below(&rng, 3);
        const int64_t first = (int64_t)rng_below(&rng, 100000);
        kvc_rope_segment s[8];
        const size_t n_segments = rng_below(&rng, 9);
        size_t n, n_parts = 0, n_part;
        int64_t next, delta, p = first, sum = 0, step, greatest = first - 1;

        for (size_t i = 0; i < n_segments; i++) {
            s[i] = text(1 + (int32_t)rng_below(&rng, 20));
            if (rng_below(&rng, 2) == 0) {
                s[i] = video(1 + (int32_t)rng_below(&rng, 3), 1 + (int32_t)rng_below(&rng, 9),
                             1 + (int32_t)rng_below(&rng, 9));
                s[i].frame_step = (float)rng_below(&rng, 9) * 0.25f;
            }
        }
        assert_int_equal(kvc_rope_positions(s, n_segments, ids, first, positions[0], MAX_TOKENS, &n,
                                            &next, &delta),
                         KVC_OK);
        for (size_t i = 0; i < n_segments; i++) {
            assert_int_equal(kvc_rope_positions(&s[i], 1, ids, p, part[n_parts],
                                                MAX_TOKENS - n_parts, &n_part, &p, &step),
                             KVC_OK);
            n_parts += n_part;
            sum += step;
        }
        assert_true(n == n_parts && p == next && sum == delta);
        assert_memory_equal(part, positions, n * sizeof(*part));
        for (size_t i = 0; i < n; i++) {
            for (size_t a = 0; a < 3; a++) {
                greatest = positions[i][a] > greatest ? positions[i][a] : greatest;
            }
        }
        assert_int_equal(next, greatest + 1); /* the next is one beyond all */
    }
}

static kvc_status count(const kvc_rope_segment *s, size_t n_segments, kvc_rope_ids ids,
                        int64_t first, size_t *n, int64_t *next, int64_t *delta)
{
    return kvc_rope_positions(s, n_segments, ids, first, NULL, 0, n, next, delta);
}

/* fault G1: nothing wraps at 32 or 64 bits. */
static void counts_beyond_32_bits_are_right(void **state)
{
    const kvc_rope_segment big = video(70000, 70000, 2), huge = video(LAST, LAST, LAST);
    const kvc_rope_segment twice[] = {video(1 << 20, 1 << 21, 1 << 21),
                                      video(1 << 20, 1 << 21, 1 << 21)};
    size_t n = 7;
    int64_t next = 7, delta = 7;

    (void)state;
    assert_int_equal(count(&big, 1, KVC_ROPE_IDS_MROPE, 0, &n, &next, &delta), KVC_OK);
    assert_true(n == (size_t)9800000000 && next == 70000 && delta == 70000 - INT64_C(9800000000));
    n = 7, next = 7, delta = 7;
    assert_int_equal(count(&big, 1, KVC_ROPE_IDS_1D, 0, &n, &next, &delta), KVC_E_ARG);
    assert_int_equal(count(&big, 1, KVC_ROPE_IDS_2D, 0, &n, &next, &delta), KVC_E_ARG);
    assert_int_equal(count(&huge, 1, KVC_ROPE_IDS_MROPE, 0, &n, &next, &delta), KVC_E_ARG);
    assert_int_equal(count(twice, 2, KVC_ROPE_IDS_MROPE, 0, &n, &next, &delta), KVC_E_ARG);
    assert_true(n == 7 && next == 7 && delta == 7);
}

static void positions_end_at_2_to_the_31_less_2(void **state)
{
    const kvc_rope_segment one = text(1), two = text(2), image = video(1, 2, 2);
    kvc_rope_segment film = video(3, 1, 1);
    size_t n;
    int64_t next;

    (void)state;
    assert_int_equal(
        kvc_rope_positions(&one, 1, KVC_ROPE_IDS_1D, LAST, positions[0], 1, &n, &next, NULL),
        KVC_OK);
    assert_true(positions[0][0] == LAST && next == (int64_t)LAST + 1);
    assert_int_equal(count(&two, 1, KVC_ROPE_IDS_1D, LAST, &n, &next, NULL), KVC_E_ARG);
    assert_int_equal(count(&image, 1, KVC_ROPE_IDS_MROPE, LAST - 1, &n, &next, NULL), KVC_OK);
    assert_int_equal(count(&image, 1, KVC_ROPE_IDS_MROPE, LAST, &n, &next, NULL), KVC_E_ARG);
    film.frame_step = 1e9f;
    assert_int_equal(count(&film, 1, KVC_ROPE_IDS_MROPE, 0, &n, &next, NULL), KVC_OK);
    assert_int_equal(next, INT64_C(2000000001));
    film.frame_step = 1e30f;
    assert_int_equal(count(&film, 1, KVC_ROPE_IDS_MROPE, 0, &n, &next, NULL), KVC_E_ARG);
    assert_int_equal(count(&one, 1, KVC_ROPE_IDS_1D, (int64_t)LAST + 1, &n, &next, NULL),
                     KVC_E_ARG);
    assert_int_equal(count(&one, 1, KVC_ROPE_IDS_1D, -1, &n, &next, NULL), KVC_E_ARG);
}

/* Returns what is wrong, NULL past the end. */
static const char *spoil(kvc_rope_segment *s, size_t which)
{
    *s = video(2, 4, 6);
    s->merge = 2;
    switch (which) {
    case 0: *s = text(0); return "no tokens";
    case 1: *s = text(-1); return "negative text";
    case 2: s->n_text = 1; return "text and frames";
    case 3: s->n_frames = 0; return "no frames";
    case 4: s->n_frames = -1; return "negative frames";
    case 5: s->n_rows = 0; return "no rows";
    case 6: s->n_cols = -2; return "negative columns";
    case 7: s->n_rows = 5; return "merge does not divide the rows";
    case 8: s->n_cols = 7; return "merge does not divide the columns";
    case 9: s->merge = -1; return "merge negative";
    case 10: s->frame_step = NAN; return "step NaN";
    case 11: s->frame_step = INFINITY; return "step Inf";
    case 12: s->frame_step = -1.0f; return "step negative";
    case 13: s->reserved[0] = 1; return "reserved[0]";
    case 14: s->reserved[1] = 1; return "reserved[1]";
    case 15: *s = text(1), s->merge = 2; return "text with merge";
    case 16: *s = text(1), s->frame_step = 1.0f; return "text with a step";
    case 17: *s = text(1), s->n_rows = 1; return "text with rows";
    default: return NULL;
    }
}

static void wrong_prompts_are_refused_and_nothing_is_written(void **state)
{
    kvc_rope_segment s[2] = {text(2), text(2)};
    int32_t out[32][3] = {{-5}};
    size_t n = 77;
    int64_t next = 78, delta = 79;

    (void)state;
    for (size_t i = 0; spoil(&s[1], i) != NULL; i++) {
        for (int ids = KVC_ROPE_IDS_1D; ids <= KVC_ROPE_IDS_MROPE; ids++) {
            assert_int_equal(
                kvc_rope_positions(s, 2, (kvc_rope_ids)ids, 0, out[0], 32, &n, &next, &delta),
                KVC_E_ARG);
        }
    }
    s[1] = text(2);
    assert_int_equal(kvc_rope_positions(s, 2, (kvc_rope_ids)3, 0, out[0], 32, &n, &next, &delta),
                     KVC_E_ARG);
    assert_int_equal(kvc_rope_positions(s, 2, KVC_ROPE_IDS_1D, 0, out[0], 3, &n, &next, &delta),
                     KVC_E_ARG);
    assert_int_equal(kvc_rope_positions(NULL, 2, KVC_ROPE_IDS_1D, 0, out[0], 9, &n, &next, &delta),
                     KVC_E_ARG);
    assert_int_equal(kvc_rope_positions(s, 2, KVC_ROPE_IDS_1D, 0, out[0], 9, NULL, &next, &delta),
                     KVC_E_ARG);
    assert_true(out[0][0] == -5 && n == 77 && next == 78 && delta == 79);
    assert_int_equal(kvc_rope_positions(NULL, 0, KVC_ROPE_IDS_1D, 6, out[0], 0, &n, &next, &delta),
                     KVC_OK);
    assert_true(out[0][0] == -5 && n == 0 && next == 6 && delta == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mrope_ids_are_those_of_the_printed_prompt),
        cmocka_unit_test(pruning_moves_neither_the_kept_nor_the_next_position),
        cmocka_unit_test(one_dimensional_ids_number_every_token),
        cmocka_unit_test(frames_follow_each_other_or_share_a_start),
        cmocka_unit_test(frame_step_stretches_time),
        cmocka_unit_test(parts_of_a_prompt_continue_each_other),
        cmocka_unit_test(counts_beyond_32_bits_are_right),
        cmocka_unit_test(positions_end_at_2_to_the_31_less_2),
        cmocka_unit_test(wrong_prompts_are_refused_and_nothing_is_written),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
