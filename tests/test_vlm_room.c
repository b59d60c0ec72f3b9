/* Examination rooms, on a small model of random weights: whatever it answers, what changes nothing
 * must not change it. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "exam_run.h"
#include "experiments.h"
#include "learned.h"
#include "outliers.h"
#include "room_parts.h"
#include "support/random_vlm.h"

static struct exam_room *open_room(const struct vlm *vlm, const struct exam *exam, size_t item)
{
    const struct exam_room_params params = {.vlm = vlm, .exam = exam};
    struct exam_room *room;
    struct failure failure;

    if (!exam_room_open(&params, &room, &failure) || !exam_room_enter(room, item, &failure))
        fail_msg("%s", failure.text);
    return room;
}

static struct outcome try_one(struct exam_room *room, const struct setting *setting)
{
    struct outcome out;
    struct failure failure;

    if (!exam_room_try(room, &setting, 1, &out, &failure))
        fail_msg("%s", failure.text);
    return out;
}

static struct setting plain_setting(void)
{
    struct setting setting;

    setting_default(SCORE_ARTICLE, &setting);
    setting.ask_second = true;
    return setting;
}

/* What prunes, merges and codes nothing answers as the whole cache, however it is applied. */
static void nothing_changes_nothing(void **state)
{
    static const enum application applications[] = {APPLY_DROP, APPLY_AGAIN, APPLY_RENUMBERED,
                                                    APPLY_NO_BIAS, APPLY_SEAL};
    struct exam exam;
    exam_default(EXAM_TUNE, 24, &exam);
    struct exam_room *room = open_room(*state, &exam, 1);
    struct outcome whole;

    exam_room_reference(room, &whole);
    for (size_t a = 0; a < sizeof(applications) / sizeof(*applications); a++) {
        struct setting setting = plain_setting();
        setting.application = applications[a];
        setting.scale_window = 64;
        const struct outcome out = try_one(room, &setting);
        for (int asked = 0; asked < N_ASKED; asked++) {
            assert_true(fabs(out.kl[asked]) < 1e-6);
            assert_int_equal(out.right[asked], whole.right[asked]);
        }
        assert_true(fabs(out.rows - 576.0) < 1e-9);
        assert_true(fabs(out.cache_bytes - 576.0 * N_LAYERS * N_KV * HEAD * 4.0) < 1e-9);
        assert_true(out.page_bytes >= out.cache_bytes);
    }
    exam_room_close(room);
}

static void something_changes_something(void **state)
{
    struct exam exam;
    exam_default(EXAM_TUNE, 16, &exam);
    struct exam_room *room = open_room(*state, &exam, 2);
    struct setting setting = plain_setting();

    setting.policy.visual_rate = 0.5f;
    setting.measure_error = true;
    struct outcome out = try_one(room, &setting);
    assert_true(out.kl[0] > 1e-9 && out.kl[1] > 1e-9 && out.rel_err > 0.0);
    assert_true(fabs(out.rows - 128.0) < 1e-9);
    setting.application = APPLY_AGAIN;
    const struct outcome again = try_one(room, &setting);
    setting.application = APPLY_RENUMBERED;
    const struct outcome renumbered = try_one(room, &setting);
    assert_true(fabs(again.kl[0] - out.kl[0]) > 1e-12);
    assert_true(fabs(again.kl[0] - renumbered.kl[0]) > 1e-12);

    setting = plain_setting();
    setting.policy.precision.k = setting.policy.precision.v = KVC_INT4;
    setting.policy.precision.k_scale = setting.policy.precision.v_scale = KVC_SCALE_TOKEN;
    out = try_one(room, &setting);
    assert_true(fabs(out.rows - 256.0) < 1e-9);
    assert_true(fabs(out.cache_bytes - 256.0 * N_LAYERS * N_KV * 2.0 * (HEAD / 2.0 + 2.0)) < 1e-9);

    setting = plain_setting();
    setting.policy.merge_rounds = 2;
    setting.policy.merging.force_quarter = true;
    out = try_one(room, &setting);
    assert_true(fabs(out.rows - 144.0) < 1e-9);
    setting.application = APPLY_NO_BIAS;
    const struct outcome no_bias = try_one(room, &setting);
    assert_true(fabs(no_bias.kl[0] - out.kl[0]) > 1e-12);
    exam_room_close(room);
}

/* Every score chooses as many, and each its own; but of three layers the last four are all, and
 * what is soft keeps nearly its order. */
static void scores_differ(void **state)
{
    struct exam exam;
    exam_default(EXAM_TUNE, 16, &exam);
    const struct exam_room_params params = {.vlm = *state, .exam = &exam};
    struct exam_room_params with_scorer = params;
    struct exam_room *room;
    struct failure failure;
    double kl[N_SCORES];
    void *scorer;

    assert_true(learned_train(*state, NULL, &exam, &scorer, &with_scorer.n_scorer, &failure));
    with_scorer.scorer = scorer;
    assert_true(exam_room_open(&with_scorer, &room, &failure));
    assert_true(exam_room_enter(room, 0, &failure));
    for (int score = 0; score < N_SCORES; score++) {
        struct setting setting;
        setting_default((enum score_kind)score, &setting);
        setting.policy.visual_rate = 0.5f;
        const struct outcome out = try_one(room, &setting);
        assert_true(fabs(out.rows - 128.0) < 1e-9);
        assert_true(isnan(out.kl[1]));
        kl[score] = out.kl[0];
        for (int other = 0; other < score; other++)
            assert_true(fabs(kl[score] - kl[other]) > 1e-12 || score == SCORE_ALL ||
                        score == SCORE_SOFT);
    }
    exam_room_close(room);
    free(scorer);
}

/* A greedy answer is right in a batch, and no longer when a word of it is another. */
static void batches_agree_with_greedy_answers(void **state)
{
    struct exam exam;
    exam_default(EXAM_TUNE, 16, &exam);

    for (size_t item = 0; item < 3; item++) {
        struct exam_room *room = open_room(*state, &exam, item);
        struct setting settings[2] = {plain_setting(), plain_setting()};
        struct question *question = &room->item->first;
        int32_t answer[MAX_ANSWER];
        struct failure failure;
        size_t n;
        settings[1].policy.precision.k = settings[1].policy.precision.v = KVC_INT8;
        for (int s = 0; s < 2; s++) {
            assert_true(exam_room_answer(room, &settings[s], answer, MAX_ANSWER, &n, &failure));
            if (n == 0)
                continue;
            memcpy(question->answer, answer, n * sizeof(*answer));
            question->n_answer = (int)n;
            assert_true(try_one(room, &settings[s]).right[0]);
            question->answer[n - 1] = (answer[n - 1] + 1) % N_WORDS;
            assert_false(try_one(room, &settings[s]).right[0]);
        }
        exam_room_close(room);
    }
}

static void settings_leave_no_trace(void **state)
{
    struct exam exam;
    exam_default(EXAM_TUNE, 16, &exam);
    struct exam_room *room = open_room(*state, &exam, 4);
    struct setting none = plain_setting(), settings[24];
    const struct setting *all[24];
    struct outcome outs[24];
    int32_t before[MAX_ANSWER], after[MAX_ANSWER];
    size_t n_before, n_after;
    struct failure failure;
    kvc_stats stats = {.struct_size = sizeof(stats)};

    for (int i = 0; i < 24; i++) { /* more than a batch */
        settings[i] = plain_setting();
        settings[i].policy.visual_rate = 0.03f * (float)i;
        settings[i].policy.precision.k = i % 3 == 0 ? KVC_INT8 : KVC_F16;
        settings[i].policy.merge_rounds = i % 2;
        all[i] = &settings[i];
    }
    assert_true(exam_room_answer(room, &none, before, MAX_ANSWER, &n_before, &failure));
    assert_int_equal(kvc_cache_stats(room->cache, &stats), KVC_OK);
    const size_t used = stats.used_bytes;
    const double kl = try_one(room, &settings[20]).kl[0];
    assert_true(exam_room_try(room, all, 24, outs, &failure));
    assert_true(fabs(outs[20].kl[0] - kl) < 1e-6 + 1e-4 * kl); /* products round as they come */
    assert_true(exam_room_answer(room, &none, after, MAX_ANSWER, &n_after, &failure));
    assert_int_equal(kvc_cache_stats(room->cache, &stats), KVC_OK);
    assert_int_equal(stats.used_bytes, used);
    assert_int_equal(stats.n_sequences, 2);
    assert_int_equal(n_before, n_after);
    assert_memory_equal(before, after, n_before * sizeof(*before));
    exam_room_close(room);
}

/* Factors of K and Q that cancel: the logits stay within what rounding to F16 does. */
static void outliers_cancel(void **state)
{
    const struct vlm *vlm = *state;
    struct vlm outliers, smoothed;
    struct exam exam;
    struct failure failure;
    exam_default(EXAM_TUNE, 16, &exam);

    assert_true(outliers_inject(vlm, &outliers, &failure));
    assert_true(outliers_smooth(&outliers, NULL, &exam, &smoothed, &failure));
    struct exam_room *rooms[] = {open_room(vlm, &exam, 0), open_room(&outliers, &exam, 0),
                                 open_room(&smoothed, &exam, 0)};
    float largest[3] = {0.0f};
    for (int i = 0; i < 3; i++) {
        float keys[MAX_ROWS * HEAD];
        size_t n;
        assert_int_equal(kvc_seq_read_rows(rooms[i]->cache, rooms[i]->base, 1, 1, MAX_ROWS, NULL,
                                           keys, NULL, NULL, &n),
                         KVC_OK);
        for (size_t k = 0; k < n * HEAD; k++)
            largest[i] = fmaxf(largest[i], fabsf(keys[k]));
        for (size_t w = 0; w < N_WORDS; w++)
            assert_true(fabsf(rooms[i]->whole_logits[w] - rooms[0]->whole_logits[w]) < 0.05f);
    }
    assert_true(largest[1] > 4.0f * largest[0]);
    assert_true(largest[2] < 0.5f * largest[1]);
    for (int i = 0; i < 3; i++)
        exam_room_close(rooms[i]);
    outliers_free(&smoothed);
    outliers_free(&outliers);
}

static void threads_do_not_matter(void **state)
{
    struct row_table tables[2] = {{0}};
    struct failure failure;

    for (size_t t = 0; t < 2; t++) {
        const struct exam_options options = {
            .experiments = "first,small", .n = 5, .tune = true, .threads = 1 + t, .quiet = true};
        if (!exam_run(*state, &options, &tables[t], &failure))
            fail_msg("%s", failure.text);
    }
    assert_int_equal(tables[0].n, 9);
    assert_int_equal(tables[1].n, 9);
    for (size_t r = 0; r < 9; r++) {
        const struct row *a = &tables[0].rows[r], *b = &tables[1].rows[r];
        assert_int_equal(a->n, 5);
        assert_memory_equal(a->hits, b->hits, a->n);
        assert_true(fabs(a->kl - b->kl) <= 0.0);
        assert_true(fabs(a->cache_bytes_per_token - b->cache_bytes_per_token) <= 0.0);
        assert_true(fabs(a->accuracy - b->accuracy) <= 0.0);
    }
    rows_free(&tables[0]);
    rows_free(&tables[1]);
}

static void plans_are_made_of_known_names(void **state)
{
    struct plan *plan = malloc(sizeof(*plan));
    struct failure failure;
    (void)state;

    assert_true(plan_make("all", plan, &failure));
    for (size_t r = 0; r < plan->n_rows; r++) {
        const struct planned_row *row = &plan->rows[r];
        bool has_reference = false;
        for (size_t o = 0; o < plan->n_rows; o++) {
            const struct planned_row *other = &plan->rows[o];
            const bool same = strcmp(row->experiment, other->experiment) == 0 &&
                              strcmp(row->name, other->name) == 0 && fabs(row->x - other->x) < 1e-9;
            assert_int_equal(same, r == o);
            has_reference = has_reference || (strcmp(row->experiment, other->experiment) == 0 &&
                                              strcmp(row->reference, other->name) == 0);
        }
        assert_true(has_reference);
        assert_true(row->setting < plan->halls[row->hall].n_settings);
    }
    assert_true(plan_make("merge", plan, &failure));
    assert_int_equal(plan->n_rows, 24);
    assert_false(plan_make("first,nothing", plan, &failure));
    assert_false(plan_make("", plan, &failure));
    free(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_changes_nothing),
        cmocka_unit_test(something_changes_something),
        cmocka_unit_test(scores_differ),
        cmocka_unit_test(batches_agree_with_greedy_answers),
        cmocka_unit_test(settings_leave_no_trace),
        cmocka_unit_test(outliers_cancel),
        cmocka_unit_test(threads_do_not_matter),
        cmocka_unit_test(plans_are_made_of_known_names),
    };

    return cmocka_run_group_tests(tests, open_model, close_model);
}
