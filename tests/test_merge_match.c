/* Which tokens merge: greedy and mutual matching, and what is never merged. */
#include <math.h>
#include <string.h>

#include "support/merging.h"

enum { MAX_TOKENS = 160 };

static size_t match(const float *similarity, float scale, const float *norms,
                    const kvc_merge_token *tokens, size_t n, const kvc_merge_options *o,
                    kvc_merge_pair *pairs)
{
    size_t size, n_pairs = SIZE_MAX;

    assert_int_equal(kvc_merge_match_workspace_size(n, &size), KVC_OK);
    void *ws = workspace(size);
    assert_int_equal(
        kvc_merge_match(similarity, scale, norms, tokens, n, o, pairs, &n_pairs, ws, size), KVC_OK);
    free(ws);
    return n_pairs;
}

static void assert_pairs(const kvc_merge_pair *pairs, size_t n, const int32_t (*expected)[2],
                         size_t n_expected)
{
    assert_int_equal(n, n_expected);
    for (size_t i = 0; i < n_expected; i++) {
        assert_int_equal(pairs[i].a, expected[i][0]);
        assert_int_equal(pairs[i].b, expected[i][1]);
    }
}

static void default_options_set_every_field(void **state)
{
    kvc_merge_options o;

    (void)state;
    memset(&o, 0xFF, sizeof(o));
    kvc_merge_options_default(&o);
    assert_int_equal(o.struct_size, sizeof(o));
    assert_true(o.tau == 0.85f && o.max_norm_ratio == 1.25f && o.max_share == 0.25f);
    assert_int_equal(o.window, 0);
    assert_int_equal(o.weights, KVC_MERGE_SIZE);
    assert_false(o.mutual || o.force_quarter || o.across_frames);
    kvc_merge_options_default(NULL);
    assert_int_equal(sizeof(kvc_merge_token), 32);
}

/* G8: eight keys in the plane by angle, all of length 1 but number 5. */
static void golden_pairs_are_met(void **state)
{
    static const double degrees[8] = {0, 4, 30, 33, 90, 91, 150, 60};
    const struct tables *t = *state;
    float keys[8][2];
    kvc_merge_token tokens[8];
    kvc_merge_pair pairs[4];
    kvc_merge_options o = merge_options(0.8f);

    for (size_t i = 0; i < 8; i++) {
        const double angle = degrees[i] * 3.14159265358979323846 / 180, r = i == 5 ? 2 : 1;
        keys[i][0] = (float)(r * cos(angle));
        keys[i][1] = (float)(r * sin(angle));
    }
    image_tokens(tokens, 8, 8);
    const kvc_view k = kvc_view_packed(keys, KVC_DTYPE_F32, 8, 1, 2);
    for (size_t i = 0; i < t->n; i++) {
        o.mutual = true;
        o.max_norm_ratio = 0.0f;
        size_t n = plan(t->ctx[i], &k, tokens, &o, pairs);
        assert_pairs(pairs, n, (const int32_t[][2]){{4, 5}, {2, 3}, {0, 1}}, 3);

        o.mutual = false;
        o.max_share = 0.25f;
        n = plan(t->ctx[i], &k, tokens, &o, pairs);
        assert_pairs(pairs, n, (const int32_t[][2]){{4, 5}, {2, 3}}, 2);
        assert_float_equal(pairs[0].similarity, 0.999848f, 1e-6);
        assert_float_equal(pairs[1].similarity, 0.998630f, 1e-6);

        o.max_share = 0.5f;
        n = plan(t->ctx[i], &k, tokens, &o, pairs);
        assert_pairs(pairs, n, (const int32_t[][2]){{4, 5}, {2, 3}, {0, 1}}, 3);
        assert_float_equal(pairs[2].similarity, 0.997564f, 1e-6);

        o.max_norm_ratio = 1.25f;
        n = plan(t->ctx[i], &k, tokens, &o, pairs);
        assert_pairs(pairs, n, (const int32_t[][2]){{2, 3}, {0, 1}, {4, 7}}, 3);
        assert_float_equal(pairs[2].similarity, 0.866025f, 1e-6);
    }
}

/* fault E1 */
static void a_zero_key_is_like_nothing_and_stays(void **state)
{
    const struct tables *t = *state;
    float keys[4][2] = {{0, 0}, {1, 0}, {0.9f, 0.1f}, {0, 0}};
    kvc_merge_token tokens[4];
    kvc_merge_pair pairs[2];
    kvc_merge_options o = merge_options(0.85f);

    image_tokens(tokens, 4, 4);
    for (size_t i = 0; i < t->n; i++) {
        kvc_view k = kvc_view_packed(keys, KVC_DTYPE_F32, 4, 1, 2);
        float s[6] = {0}, norms[4] = {0};
        similarity_of(t->ctx[i], &k, tokens, &o, s, norms);
        for (size_t j = 1; j < 4; j++) {
            assert_true(s[at(4, 0, j)] == 0.0f);
        }
        assert_true(norms[0] == 0.0f && norms[1] == 1.0f);
        assert_pairs(pairs, plan(t->ctx[i], &k, tokens, &o, pairs), (const int32_t[][2]){{1, 2}},
                     1);
    }
}

/* fault E2 */
static void more_pairs_than_half_the_tokens_are_never_given(void **state)
{
    kvc_merge_token tokens[5];
    kvc_merge_pair pairs[2];
    kvc_merge_options o = merge_options(-1.0f);
    float s[10];

    (void)state;
    o.max_share = 1.0f;
    image_tokens(tokens, 5, 5);
    for (size_t i = 0; i < 10; i++) {
        s[i] = 0.5f;
    }
    for (int force = 0; force < 2; force++) {
        o.force_quarter = force != 0;
        assert_int_equal(match(s, 1.0f, NULL, tokens, 5, &o, pairs), 2);
        assert_int_equal(match(s, 1.0f, NULL, tokens, 2, &o, pairs), 1);
        assert_int_equal(match(s, 1.0f, NULL, tokens, 1, &o, pairs), 0);
        assert_int_equal(match(NULL, 1.0f, NULL, NULL, 0, &o, NULL), 0);
    }
    o.max_share = 0.0f;
    assert_int_equal(match(s, 1.0f, NULL, tokens, 5, &o, pairs), 0);
    tokens[4].fixed = true; /* four are left that may merge */
    o.max_share = 0.25f;
    assert_int_equal(match(s, 1.0f, NULL, tokens, 5, &o, pairs), 1);
}

/* fault E2: similarities 0.95 and 0.2, tau 0.9, two pairs asked */
static void a_share_never_merges_unlike_tokens_unless_forced(void **state)
{
    kvc_merge_token tokens[4];
    kvc_merge_pair pairs[2];
    kvc_merge_options o = merge_options(0.9f);
    const float s[6] = {0.95f, 0, 0, 0, 0, 0.2f};

    (void)state;
    image_tokens(tokens, 4, 4);
    size_t n = match(s, 1.0f, NULL, tokens, 4, &o, pairs);
    assert_pairs(pairs, n, (const int32_t[][2]){{0, 1}}, 1);
    o.force_quarter = true;
    n = match(s, 1.0f, NULL, tokens, 4, &o, pairs);
    assert_pairs(pairs, n, (const int32_t[][2]){{0, 1}, {2, 3}}, 2);
    assert_true(pairs[1].similarity == 0.2f);
}

/* fault E4: one key (1, 0), rotated by 0 and by pi */
static void opposite_rotations_do_not_merge(void **state)
{
    float keys[2][2] = {{1, 0}, {-1, 0}};
    kvc_merge_token tokens[2];
    kvc_merge_pair pairs[1];
    kvc_merge_options o = merge_options(0.85f);
    const kvc_view k = kvc_view_packed(keys, KVC_DTYPE_F32, 2, 1, 2);

    image_tokens(tokens, 2, 2);
    assert_int_equal(plan(best(state), &k, tokens, &o, pairs), 0);
    o.tau = -1.0f;
    assert_int_equal(plan(best(state), &k, tokens, &o, pairs), 1);
    assert_true(pairs[0].similarity == -1.0f);
}

static void forced_rounds_take_exactly_their_share(void **state)
{
    static float s[MAX_TOKENS * (MAX_TOKENS - 1) / 2], norms[MAX_TOKENS];
    static kvc_merge_token tokens[MAX_TOKENS];
    static kvc_merge_pair pairs[MAX_TOKENS / 2];
    kvc_merge_options o;
    uint64_t rng = 11;

    (void)state;
    kvc_merge_options_default(&o);
    o.force_quarter = true;
    image_tokens(tokens, MAX_TOKENS, 16);
    for (size_t n = 0; n <= MAX_TOKENS; n += 1 + n / 9) {
        for (size_t i = 0; i < kvc_merge_triangle(n); i++) {
            s[i] = rng_unit(&rng);
        }
        for (size_t i = 0; i < n; i++) {
            norms[i] = 1.0f + 100.0f * fabsf(rng_unit(&rng)); /* no guard when forced */
        }
        assert_int_equal(match(s, 1.0f, norms, tokens, n, &o, pairs), n / 4);
    }
}

/* floor(n share) where the float below a fraction would lose a pair. */
static void a_share_counts_as_the_fraction_that_it_was_written_as(void **state)
{
    static float s[100 * 99 / 2];
    static kvc_merge_token tokens[100];
    static kvc_merge_pair pairs[50];
    kvc_merge_options o = merge_options(-1.0f);

    (void)state;
    image_tokens(tokens, 100, 10);
    for (size_t n = 1; n <= 100; n++) {
        for (size_t p = 0; p <= n / 2; p++) {
            o.max_share = (float)p / (float)n;
            assert_int_equal(match(s, 1.0f, NULL, tokens, n, &o, pairs), p);
        }
    }
}

static void ties_go_to_the_lower_index(void **state)
{
    kvc_merge_token tokens[6];
    kvc_merge_pair pairs[3];
    kvc_merge_options o = merge_options(0.5f);
    float s[15];

    (void)state;
    image_tokens(tokens, 6, 6);
    for (size_t i = 0; i < 15; i++) {
        s[i] = 1.0f;
    }
    size_t n = match(s, 1.0f, NULL, tokens, 6, &o, pairs);
    assert_pairs(pairs, n, (const int32_t[][2]){{0, 1}, {2, 3}, {4, 5}}, 3);
    o.mutual = true; /* the nearest of all others is 0, and its nearest is 1 */
    n = match(s, 1.0f, NULL, tokens, 6, &o, pairs);
    assert_pairs(pairs, n, (const int32_t[][2]){{0, 1}}, 1);
}

static void nan_never_merges(void **state)
{
    const struct tables *t = *state;
    float keys[4][2] = {{NAN, 1}, {1, 0}, {INFINITY, 0}, {1, 0.1f}};
    kvc_merge_token tokens[4];
    kvc_merge_pair pairs[2];
    kvc_merge_options o = merge_options(-1.0f);
    const kvc_view k = kvc_view_packed(keys, KVC_DTYPE_F32, 4, 1, 2);

    image_tokens(tokens, 4, 4);
    for (int mode = 0; mode < 4; mode++) {
        o.mutual = mode % 2 != 0;
        o.force_quarter = mode / 2 != 0;
        for (size_t i = 0; i < t->n; i++) {
            assert_pairs(pairs, plan(t->ctx[i], &k, tokens, &o, pairs),
                         (const int32_t[][2]){{1, 3}}, 1);
        }
    }
}

static bool allowed(const kvc_merge_token *a, const kvc_merge_token *b, const kvc_merge_options *o)
{
    return a->image >= 0 && a->image == b->image && !a->fixed && !b->fixed &&
           (o->across_frames || a->frame == b->frame) &&
           (o->window == 0 ||
            (abs(a->row - b->row) <= o->window && abs(a->col - b->col) <= o->window));
}

static kvc_merge_options random_options(uint64_t *rng)
{
    kvc_merge_options o = merge_options(rng_unit(rng));

    o.window = (int32_t)rng_below(rng, 4);
    o.across_frames = rng_below(rng, 2) == 0;
    o.max_norm_ratio = rng_below(rng, 2) == 0 ? 0.0f : 1.5f;
    return o;
}

/* The best pair that is still possible, again and again. */
static size_t slow_greedy(const float *s, const float *norms, const kvc_merge_token *tokens,
                          size_t n, const kvc_merge_options *o, size_t most, int32_t (*out)[2])
{
    bool used[MAX_TOKENS] = {false};
    size_t count = 0;

    while (count < most) {
        size_t a = n, b = n;
        float top = -2.0f;

        for (size_t i = 0; i < n; i++) {
            for (size_t j = i + 1; j < n; j++) {
                const float hi = fmaxf(norms[i], norms[j]), lo = fminf(norms[i], norms[j]);
                if (!used[i] && !used[j] && allowed(&tokens[i], &tokens[j], o) &&
                    s[at(n, i, j)] > top && s[at(n, i, j)] >= o->tau &&
                    (o->max_norm_ratio == 0.0f || hi <= o->max_norm_ratio * lo)) {
                    top = s[at(n, i, j)];
                    a = i;
                    b = j;
                }
            }
        }
        if (a == n) {
            break;
        }
        used[a] = used[b] = true;
        out[count][0] = (int32_t)a;
        out[count++][1] = (int32_t)b;
    }
    return count;
}

static void greedy_takes_the_best_pair_that_is_left_each_time(void **state)
{
    static float s[40 * 39 / 2], norms[40];
    kvc_merge_token tokens[40];
    kvc_merge_pair pairs[20];
    int32_t expected[20][2];
    uint64_t rng = 5;

    (void)state;
    for (int round = 0; round < 400; round++) {
        const size_t n = rng_below(&rng, 41);
        kvc_merge_options o = random_options(&rng);

        random_tokens(&rng, tokens, n);
        for (size_t i = 0; i < kvc_merge_triangle(n); i++) { /* many ties in every other round */
            s[i] = round % 2 == 0 ? rng_unit(&rng) : (float)rng_below(&rng, 5) * 0.25f;
        }
        size_t n_free = 0;
        for (size_t i = 0; i < n; i++) {
            norms[i] = 1.0f + fabsf(rng_unit(&rng));
            n_free += tokens[i].image >= 0 && !tokens[i].fixed;
        }
        o.max_share = rng_below(&rng, 2) == 0 ? 0.25f : 0.5f;
        const size_t most = o.max_share == 0.25f ? n_free / 4 : n_free / 2;
        const size_t n_expected = slow_greedy(s, norms, tokens, n, &o, most, expected);
        assert_pairs(pairs, match(s, 1.0f, norms, tokens, n, &o, pairs),
                     (const int32_t(*)[2])expected, n_expected);
    }
}

/* A star that every token would like best, with a common order of the rest: the worst case. */
static void greedy_is_right_where_all_want_the_same_partner(void **state)
{
    static float s[40 * 39 / 2], norms[40];
    kvc_merge_token tokens[40];
    kvc_merge_pair pairs[20];
    int32_t expected[20][2];
    const kvc_merge_options o = merge_options(0.0f);

    (void)state;
    image_tokens(tokens, 40, 8);
    for (size_t i = 0; i < 40; i++) {
        norms[i] = 1.0f;
        for (size_t j = i + 1; j < 40; j++) {
            s[at(40, i, j)] = (float)j / 64.0f;
        }
    }
    const size_t n_expected = slow_greedy(s, norms, tokens, 40, &o, 20, expected);
    assert_pairs(pairs, match(s, 1.0f, norms, tokens, 40, &o, pairs), (const int32_t(*)[2])expected,
                 n_expected);
}

static void every_mutual_pair_is_greedy_and_each_others_nearest(void **state)
{
    static float s[40 * 39 / 2];
    kvc_merge_token tokens[40];
    kvc_merge_pair greedy[20], mutual[20];
    uint64_t rng = 8;

    (void)state;
    for (int round = 0; round < 300; round++) {
        const size_t n = 2 + rng_below(&rng, 39);
        kvc_merge_options o = random_options(&rng);

        random_tokens(&rng, tokens, n);
        for (size_t i = 0; i < kvc_merge_triangle(n); i++) {
            s[i] = round % 2 == 0 ? rng_unit(&rng) : (float)rng_below(&rng, 5) * 0.25f;
        }
        const size_t n_greedy = match(s, 1.0f, NULL, tokens, n, &o, greedy);
        o.mutual = true;
        const size_t n_mutual = match(s, 1.0f, NULL, tokens, n, &o, mutual);
        assert_true(n_mutual <= n_greedy);
        for (size_t p = 0; p < n_mutual; p++) {
            const size_t a = (size_t)mutual[p].a, b = (size_t)mutual[p].b;
            bool found = false;
            for (size_t q = 0; q < n_greedy; q++) {
                found = found || (mutual[p].a == greedy[q].a && mutual[p].b == greedy[q].b);
            }
            assert_true(found);
            for (size_t x = 0; x < n; x++) { /* nobody nearer on either side */
                const size_t ends[2] = {a, b};
                for (int e = 0; e < 2; e++) {
                    if (x != a && x != b && allowed(&tokens[x], &tokens[ends[e]], &o)) {
                        const size_t i = x < ends[e] ? x : ends[e], j = x < ends[e] ? ends[e] : x;
                        assert_true(s[at(n, i, j)] <= mutual[p].similarity);
                    }
                }
            }
        }
    }
}

/* Text, fixed tokens, other images, frames and cells outside the window, with all keys equal. */
static void only_like_tokens_of_one_image_and_window_ever_merge(void **state)
{
    const struct tables *t = *state;
    static float keys[MAX_TOKENS][2][4];
    static kvc_merge_token tokens[MAX_TOKENS];
    static kvc_merge_pair pairs[MAX_TOKENS / 2];
    uint64_t rng = 3;

    for (size_t i = 0; i < MAX_TOKENS; i++) {
        keys[i][0][0] = keys[i][1][1] = 1.0f;
    }
    for (int round = 0; round < 64; round++) {
        const size_t n = rng_below(&rng, MAX_TOKENS + 1);
        const kvc_view k = kvc_view_packed(keys, KVC_DTYPE_F32, n, 2, 4);
        kvc_merge_options o = random_options(&rng);
        bool used[MAX_TOKENS] = {false};

        o.force_quarter = round % 3 == 0;
        o.mutual = round % 2 == 0;
        random_tokens(&rng, tokens, n);
        const size_t n_pairs = plan(t->ctx[(size_t)round % t->n], &k, tokens, &o, pairs);
        assert_true(n_pairs <= n / 2);
        for (size_t p = 0; p < n_pairs; p++) {
            const int32_t a = pairs[p].a, b = pairs[p].b;
            assert_true(a >= 0 && a < b && (size_t)b < n);
            assert_true(allowed(&tokens[a], &tokens[b], &o));
            assert_false(used[a] || used[b]);
            assert_float_equal(pairs[p].similarity, 1.0f, 1e-6f);
            used[a] = used[b] = true;
        }
        for (size_t i = 0; i < n && !o.mutual; i++) { /* and nothing was left that could */
            for (size_t j = i + 1; j < n; j++) {
                assert_false(!used[i] && !used[j] && allowed(&tokens[i], &tokens[j], &o));
            }
        }
    }
}

static void extreme_cells_do_not_overflow_the_window(void **state)
{
    kvc_merge_token tokens[2] = {{.row = INT32_MIN, .size = 1}, {.row = INT32_MAX, .size = 1}};
    kvc_merge_pair pairs[1];
    kvc_merge_options o = merge_options(0.0f);
    const float s[1] = {1.0f};

    (void)state;
    o.window = INT32_MAX;
    assert_int_equal(match(s, 1.0f, NULL, tokens, 2, &o, pairs), 0);
    tokens[0] = (kvc_merge_token){.col = INT32_MAX, .size = 1};
    tokens[1] = (kvc_merge_token){.col = INT32_MIN, .size = 1};
    assert_int_equal(match(s, 1.0f, NULL, tokens, 2, &o, pairs), 0);
    o.window = 0;
    assert_int_equal(match(s, 1.0f, NULL, tokens, 2, &o, pairs), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_options_set_every_field),
        cmocka_unit_test(golden_pairs_are_met),
        cmocka_unit_test(a_zero_key_is_like_nothing_and_stays),
        cmocka_unit_test(more_pairs_than_half_the_tokens_are_never_given),
        cmocka_unit_test(a_share_never_merges_unlike_tokens_unless_forced),
        cmocka_unit_test(opposite_rotations_do_not_merge),
        cmocka_unit_test(forced_rounds_take_exactly_their_share),
        cmocka_unit_test(a_share_counts_as_the_fraction_that_it_was_written_as),
        cmocka_unit_test(ties_go_to_the_lower_index),
        cmocka_unit_test(nan_never_merges),
        cmocka_unit_test(greedy_takes_the_best_pair_that_is_left_each_time),
        cmocka_unit_test(greedy_is_right_where_all_want_the_same_partner),
        cmocka_unit_test(every_mutual_pair_is_greedy_and_each_others_nearest),
        cmocka_unit_test(only_like_tokens_of_one_image_and_window_ever_merge),
        cmocka_unit_test(extreme_cells_do_not_overflow_the_window),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
