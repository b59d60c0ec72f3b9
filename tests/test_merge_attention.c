/* Attention after merging against attention before, in double precision. */
#include <math.h>
#include <string.h>

#include "support/merging.h"

enum { SIDE = 12, IMAGE = SIDE * SIDE, TEXT = 20, ROWS = IMAGE + TEXT, D = 32, QUERIES = 40 };

/* A smooth field of keys and values behind some text, and queries of unit scale. */
struct scene {
    float k[ROWS][D], v[ROWS][D];
    double q[QUERIES][D];
    kvc_merge_token tokens[ROWS];
};

static double gauss(uint64_t *rng)
{
    double sum = 0;

    for (int i = 0; i < 12; i++) {
        sum += (double)rng_unit(rng);
    }
    return sum / 2;
}

static void fill_scene(struct scene *s, uint64_t seed, double noise)
{
    double wave[2][D][3];

    for (size_t i = 0; i < (size_t)2 * D * 3; i++) {
        wave[i / D / 3][i / 3 % D][i % 3] = gauss(&seed) * 0.35;
    }
    memset(s->tokens, 0, sizeof(s->tokens));
    for (size_t i = 0; i < ROWS; i++) {
        const size_t row = i / SIDE, col = i % SIDE;
        for (size_t c = 0; c < D; c++) {
            double field[2];
            for (int j = 0; j < 2; j++) {
                const double *w = wave[j][c];
                field[j] = i < IMAGE ? sin(w[0] * (double)row + w[1] * (double)col + 9 * w[2])
                                     : gauss(&seed);
            }
            s->k[i][c] = (float)(field[0] + noise * gauss(&seed));
            s->v[i][c] = (float)(field[1] + noise * gauss(&seed));
        }
        s->tokens[i] = (kvc_merge_token){.image = i < IMAGE ? 0 : -1,
                                         .row = (int32_t)i / SIDE,
                                         .col = (int32_t)i % SIDE,
                                         .size = 1,
                                         .mass = i < IMAGE ? fabsf(rng_unit(&seed)) : 0};
    }
    for (size_t i = 0; i < QUERIES; i++) {
        for (size_t c = 0; c < D; c++) {
            s->q[i][c] = gauss(&seed);
        }
    }
}

static double logit(const double *q, const float *k)
{
    double z = 0;

    for (size_t c = 0; c < D; c++) {
        z += q[c] * (double)k[c];
    }
    return z / sqrt(D);
}

/* Softmax attention over n rows; with_bias false: as an engine does that forgets the bias. */
static void attend(const double *q, const float (*k)[D], const float (*v)[D],
                   const kvc_merge_token *tokens, size_t n, bool with_bias, double *p, double *o)
{
    double sum = 0;

    memset(o, 0, D * sizeof(*o));
    for (size_t i = 0; i < n; i++) {
        p[i] = exp(logit(q, k[i]) + (with_bias ? (double)tokens[i].bias : 0));
        sum += p[i];
    }
    for (size_t i = 0; i < n; i++) {
        p[i] /= sum;
        for (size_t c = 0; c < D; c++) {
            o[c] += p[i] * (double)v[i][c];
        }
    }
}

static double distance(const double *a, const double *b)
{
    double sum = 0;

    for (size_t c = 0; c < D; c++) {
        sum += (a[c] - b[c]) * (a[c] - b[c]);
    }
    return sqrt(sum);
}

static size_t merge(kvc_ctx *ctx, struct scene *s, const kvc_merge_options *o, int32_t n_rounds,
                    int32_t *map)
{
    const kvc_view k = kvc_view_packed(s->k, KVC_DTYPE_F32, ROWS, 1, D),
                   v = kvc_view_packed(s->v, KVC_DTYPE_F32, ROWS, 1, D);
    int32_t rows[ROWS];
    size_t size, n_rows;

    assert_int_equal(kvc_merge_rounds_workspace_size(&k, 1, &size), KVC_OK);
    void *ws = workspace(size);
    assert_int_equal(
        kvc_merge_rounds(ctx, &k, &v, 1, o, n_rounds, s->tokens, map, rows, &n_rows, ws, size),
        KVC_OK);
    free(ws);
    return n_rows;
}

/* Any number of rounds, either weights: z + b of a merged row never exceeds what its members had,
 * and is as much when they agree. */
static void merged_rows_are_never_over_weighted(void **state)
{
    const struct tables *t = *state;
    static struct scene before, after;

    for (int round = 0; round < 24; round++) {
        kvc_merge_options o = merge_options(round % 2 == 0 ? 0.6f : -1.0f);
        int32_t map[ROWS];

        o.weights = round / 2 % 2 == 0 ? KVC_MERGE_SIZE : KVC_MERGE_ATTENTION;
        o.force_quarter = round % 3 == 0;
        fill_scene(&before, (uint64_t)round, 0.3);
        after = before;
        const size_t n = merge(t->ctx[(size_t)round % t->n], &after, &o, 1 + round % 3, map);
        assert_true(n < ROWS);
        for (size_t q = 0; q < QUERIES; q++) {
            double sum[ROWS] = {0};
            for (size_t i = 0; i < ROWS; i++) {
                sum[map[i]] += exp(logit(before.q[q], before.k[i]));
            }
            for (size_t r = 0; r < n; r++) {
                const double z = logit(before.q[q], after.k[r]) + (double)after.tokens[r].bias;
                assert_true(z <= log(sum[r]) + 2e-6);
                assert_true(after.tokens[r].size > 1 || z >= log(sum[r]) - 2e-6);
            }
        }
    }
}

/* What a merged row of size weights lacks is the divergence of equal weights from the softmax of
 * all its members, after any number of rounds. */
static void the_missing_mass_is_the_divergence(void **state)
{
    static struct scene before, after;
    const kvc_merge_options o = merge_options(0.3f);
    int32_t map[ROWS];

    for (int32_t rounds = 1; rounds <= 3; rounds++) {
        fill_scene(&before, 40 + (uint64_t)rounds, 0.3);
        after = before;
        const size_t n = merge(best(state), &after, &o, rounds, map);
        for (size_t q = 0; q < QUERIES; q++) {
            double lse[ROWS] = {0}, divergence[ROWS] = {0};
            for (size_t i = 0; i < ROWS; i++) {
                lse[map[i]] += exp(logit(before.q[q], before.k[i]));
            }
            for (size_t r = 0; r < n; r++) {
                lse[r] = log(lse[r]);
            }
            for (size_t i = 0; i < ROWS; i++) {
                const double w = 1 / (double)after.tokens[map[i]].size;
                divergence[map[i]] +=
                    w * (log(w) - (logit(before.q[q], before.k[i]) - lse[map[i]]));
            }
            for (size_t r = 0; r < n; r++) {
                const double z = logit(before.q[q], after.k[r]) + (double)after.tokens[r].bias;
                assert_true(fabs(lse[r] - z - divergence[r]) < 4e-6);
            }
        }
    }
}

/* Mean relative output error, and the share of the attention that the image keeps. */
static double error_of(const struct scene *before, const struct scene *after, size_t n,
                       bool with_bias, double *share)
{
    double error = 0, image = 0, image_before = 0, p[ROWS], o[D], exact[D];
    const double zero[D] = {0};

    for (size_t q = 0; q < QUERIES; q++) {
        attend(before->q[q], before->k, before->v, before->tokens, ROWS, true, p, exact);
        for (size_t i = 0; i < IMAGE; i++) {
            image_before += p[i];
        }
        attend(before->q[q], after->k, after->v, after->tokens, n, with_bias, p, o);
        for (size_t i = 0; i < n; i++) {
            image += after->tokens[i].image == 0 ? p[i] : 0;
        }
        error += distance(o, exact) / distance(exact, zero) / QUERIES;
    }
    *share = image / image_before;
    return error;
}

static void the_bias_keeps_the_output_and_the_share_of_the_image(void **state)
{
    static const size_t left[] = {108, 81, 61};
    static struct scene before, after;
    kvc_merge_options o = merge_options(0.0f);
    int32_t map[ROWS];

    o.max_share = 0.25f;
    for (uint64_t seed = 0; seed < 6; seed++) {
        for (int32_t rounds = 1; rounds <= 3; rounds++) {
            double with, without;
            fill_scene(&before, 90 + seed, 0.2);
            after = before;
            const size_t n = merge(best(state), &after, &o, rounds, map);
            assert_int_equal(n - TEXT, left[rounds - 1]);
            const double error = error_of(&before, &after, n, true, &with);
            assert_true(error < 0.6 * error_of(&before, &after, n, false, &without));
            assert_true(with <= 1 + 1e-6 && with > 0.9 && without < with);
        }
    }
}

/* Text rows are the same bits, in their order. */
static void text_never_changes(void **state)
{
    static struct scene before, after;
    kvc_merge_options o = merge_options(-1.0f);
    int32_t map[ROWS];

    fill_scene(&before, 3, 0.2);
    after = before;
    const size_t n = merge(best(state), &after, &o, 3, map);
    for (size_t i = 0; i < TEXT; i++) {
        assert_int_equal(map[IMAGE + i], n - TEXT + i);
        assert_memory_equal(after.k[n - TEXT + i], before.k[IMAGE + i], sizeof(before.k[0]));
        assert_memory_equal(after.v[n - TEXT + i], before.v[IMAGE + i], sizeof(before.v[0]));
    }
}

/* G7: logits 1.2 and .4, values (1, 0) and (0, 2); the rest .9 and -.3, (.5, .5) and (-1, 1). */
static const float z[4] = {1.2f, 0.4f, 0.9f, -0.3f};
static const double v[4][2] = {{1, 0}, {0, 2}, {0.5, 0.5}, {-1, 1}};

static kvc_merge_loss loss_of(const kvc_merge_query *query)
{
    kvc_merge_loss loss = {.struct_size = sizeof(loss)};

    assert_int_equal(kvc_merge_error(query, &loss), KVC_OK);
    return loss;
}

static kvc_merge_query golden_query(void)
{
    double e[4], sum = 0, rest[2], merged[2] = {0.5, 1.0};

    for (size_t i = 0; i < 4; i++) {
        e[i] = exp((double)z[i]);
        sum += e[i];
    }
    for (size_t c = 0; c < 2; c++) {
        rest[c] = (e[2] * v[2][c] + e[3] * v[3][c]) / (e[2] + e[3]);
    }
    return (kvc_merge_query){
        .struct_size = sizeof(kvc_merge_query),
        .mass = (float)((e[0] + e[1]) / sum),
        .difference = z[0] - z[1],
        .w_a = 0.5f,
        .bias = (float)log(2),
        .value_distance = (float)sqrt(5),
        .rest_distance = (float)hypot(merged[0] - rest[0], merged[1] - rest[1]),
    };
}

static void golden_deficits_are_met(void **state)
{
    kvc_merge_query q = golden_query();
    kvc_merge_loss loss = loss_of(&q);

    (void)state;
    assert_float_equal(q.mass, 0.600565f, 5e-7f);
    assert_float_equal(loss.merged_mass, 0.581726f, 5e-7f);
    assert_float_equal(loss.deficit, 0.077953485f, 1e-7f); /* = ln cosh .4 <= .08 */
    assert_float_equal(loss.deficit, (float)log(cosh(0.4)), 1e-7f);
    assert_true(loss.deficit <= 0.08f);
    assert_float_equal(loss.share_a, (float)(1 / (1 + exp(-0.8))), 1e-7f);
    q.bias = 0; /* without it */
    assert_float_equal(loss_of(&q).merged_mass, 0.410165f, 5e-7f);
    q.w_a = 0.69f; /* near the softmax */
    q.bias = (float)(-0.69 * log(0.69) - 0.31 * log(0.31));
    assert_float_equal(loss_of(&q).deficit, 2e-9f, 1e-7f);
    q.w_a = loss.share_a; /* the softmax */
    const double w = (double)q.w_a;
    q.bias = (float)(-w * log(w) - (1 - w) * log(1 - w));
    loss = loss_of(&q);
    assert_float_equal(loss.deficit, 0.0f, 1e-7f);
    assert_float_equal(loss.error, 0.0f, 1e-7f);
}

/* G7: o' - o = (-.120633, .220945), from the terms; its length is within the error. */
static void golden_output_errors_are_met(void **state)
{
    static const double exact[2] = {0.475403, 0.618328};
    const double merged[2][2] = {{0.295202, 0.773349}, {0.354770, 0.839273}};
    kvc_merge_query q = golden_query();
    float error;

    (void)state;
    for (int bias = 0; bias < 2; bias++) {
        q.bias = bias ? (float)log(2) : 0.0f;
        const kvc_merge_loss loss = loss_of(&q);
        double e2 = exp((double)z[2]), e3 = exp((double)z[3]), length = 0;
        for (size_t c = 0; c < 2; c++) {
            const double rest = (e2 * v[2][c] + e3 * v[3][c]) / (e2 + e3);
            const double change =
                (double)(loss.merged_mass - q.mass) * ((v[0][c] + v[1][c]) / 2 - rest) +
                (double)q.mass * (0.5 - (double)loss.share_a) * (v[0][c] - v[1][c]);
            assert_true(fabs(change - (merged[bias][c] - exact[c])) < 1.5e-6);
            length += change * change;
        }
        assert_true(sqrt(length) <= (double)loss.error);
        assert_true((double)loss.error < 1.5 * sqrt(length));
    }
    const double mass = exp((double)z[1]) / (exp((double)z[0]) + exp((double)z[1]) +
                                             exp((double)z[2]) + exp((double)z[3]));
    const double to_v = hypot(exact[0] - v[1][0], exact[1] - v[1][1]);
    assert_int_equal(kvc_drop_error((float)mass, (float)to_v, &error), KVC_OK);
    assert_float_equal(error, 0.334299587f, 1e-6f);
}

/* Random pairs with sizes and biases among random rows: the true change of the output is never more
 * than the error, neither for the exact difference nor for a limit of it; and close to it at times.
 */
static void the_true_change_is_within_the_error(void **state)
{
    uint64_t rng = 1;
    double closest = 0;

    (void)state;
    for (int round = 0; round < 4000; round++) {
        enum { N = 6, C = 3 };
        double y[N], value[N][C], p[N], o[C] = {0}, after[C] = {0}, rest[C] = {0}, mixed[C];
        double sum = 0, change = 0, rest_distance = 0, value_distance = 0;
        kvc_merge_token a = {.size = 1}, b = {.size = 1}, out;
        kvc_merge_options options = merge_options(0);
        float w_a, w_b;
        bool heavier;

        options.weights = round % 2 == 0 ? KVC_MERGE_SIZE : KVC_MERGE_ATTENTION;
        a.mass = fabsf(rng_unit(&rng));
        b.mass = fabsf(rng_unit(&rng));
        a.size = (float)(1 + rng_below(&rng, 4));
        b.bias = rng_unit(&rng);
        assert_int_equal(kvc_merge_combine(&a, &b, 0, 0, &options, &w_a, &w_b, &out, &heavier),
                         KVC_OK);
        const double za = 2 * gauss(&rng), zb = za + (double)rng_unit(&rng);
        for (size_t i = 0; i < N; i++) {
            y[i] = i == 0 ? za + (double)a.bias : i == 1 ? zb + (double)b.bias : gauss(&rng);
            sum += exp(y[i]);
            for (size_t c = 0; c < C; c++) {
                value[i][c] = gauss(&rng);
            }
        }
        const double both = (exp(y[0]) + exp(y[1])) / sum;
        const double z_merged = (double)w_a * za + (double)w_b * zb + (double)out.bias;
        const double new_sum = sum - exp(y[0]) - exp(y[1]) + exp(z_merged);
        for (size_t c = 0; c < C; c++) {
            mixed[c] = (double)w_a * value[0][c] + (double)w_b * value[1][c];
            for (size_t i = 0; i < N; i++) {
                p[i] = exp(y[i]) / sum;
                o[c] += p[i] * value[i][c];
                if (i >= 2) {
                    rest[c] += p[i] / (1 - both) * value[i][c];
                    after[c] += exp(y[i]) / new_sum * value[i][c];
                }
            }
            after[c] += exp(z_merged) / new_sum * mixed[c];
            change += (after[c] - o[c]) * (after[c] - o[c]);
            rest_distance += (mixed[c] - rest[c]) * (mixed[c] - rest[c]);
            value_distance += (value[0][c] - value[1][c]) * (value[0][c] - value[1][c]);
        }
        kvc_merge_query q = {.struct_size = sizeof(q),
                             .mass = (float)both,
                             .difference = (float)(za - zb),
                             .w_a = w_a,
                             .bias_a = a.bias,
                             .bias_b = b.bias,
                             .bias = out.bias,
                             .value_distance = (float)sqrt(value_distance),
                             .rest_distance = (float)sqrt(rest_distance)};
        kvc_merge_loss loss = loss_of(&q);
        assert_float_equal(loss.merged_mass, (float)(exp(z_merged) / new_sum), 2e-6f);
        assert_true(loss.deficit >= -1e-6f);
        assert_true(sqrt(change) <= (double)loss.error * (1 + 1e-4) + 1e-6);
        closest = fmax(closest, loss.error > 1e-3f ? sqrt(change) / (double)loss.error : 0);
        q.within = true;
        q.difference = fabsf(q.difference) * (1 + fabsf(rng_unit(&rng)));
        const kvc_merge_loss limit = loss_of(&q);
        assert_true(limit.error >= loss.error * (1 - 1e-6f));
    }
    assert_true(closest > 0.99);
}

/* fault E4: keys (1, 0) and (-1, 0), values (2, 0) and (4, 0), merged anyway: the average key is
 * what the logits average to, and the error says how far the output may be off. */
static void merging_opposite_keys_is_reported(void **state)
{
    float k[2][2] = {{1, 0}, {-1, 0}}, values[2][2] = {{2, 0}, {4, 0}};
    const kvc_view kv = kvc_view_packed(k, KVC_DTYPE_F32, 2, 1, 2),
                   vv = kvc_view_packed(values, KVC_DTYPE_F32, 2, 1, 2);
    const kvc_merge_options o = merge_options(-1.0f);
    kvc_merge_token tokens[2];
    kvc_merge_pair pair;
    int32_t map[2], rows[2];
    size_t n_rows;

    image_tokens(tokens, 2, 2);
    assert_int_equal(plan(best(state), &kv, tokens, &o, &pair), 1);
    assert_int_equal(
        kvc_merge_apply(best(state), &pair, 1, &kv, &vv, 1, NULL, &o, tokens, map, rows, &n_rows),
        KVC_OK);
    assert_true(k[0][0] == 0 && k[0][1] == 0 && values[0][0] == 3 && n_rows == 1);
    /* A query (5, 0) of scale 1: logits 5 and -5, all attention on the pair; it had 2.0001. */
    const kvc_merge_query q = {.struct_size = sizeof(q),
                               .mass = 1,
                               .difference = 10,
                               .within = true, /* |q| |k_a - k_b| */
                               .w_a = 0.5f,
                               .bias = tokens[0].bias,
                               .value_distance = 2};
    const kvc_merge_loss loss = loss_of(&q);
    const double had = (2 * exp(5) + 4 * exp(-5)) / (exp(5) + exp(-5));
    assert_true((double)loss.error >= 3 - had - 1e-6 && loss.error > 0.99f);
    assert_true(loss.deficit > 4); /* it keeps e^-4.3 of its mass */
}

/* E[(z_a - z_b)^2] makes up for the mass that is missing on average. */
static void the_second_order_term_brings_mass_back(void **state)
{
    uint64_t rng = 6;

    (void)state;
    for (int round = 0; round < 20; round++) {
        const double sigma = 0.2 + 0.03 * round;
        double spread = 0, had = 0, plain = 0, second = 0, d[500];
        const kvc_merge_token a = {.size = 1}, b = {.size = (float)(1 + round % 3)};
        kvc_merge_token out[2];
        float w_a, w_b;
        bool heavier;

        for (size_t i = 0; i < 500; i++) {
            d[i] = sigma * gauss(&rng);
            spread += d[i] * d[i] / 500;
        }
        kvc_merge_token sized = b;
        sized.bias = (float)log((double)b.size);
        for (int s = 0; s < 2; s++) {
            assert_int_equal(kvc_merge_combine(&a, &sized, 0, s ? (float)spread : 0, NULL, &w_a,
                                               &w_b, &out[s], &heavier),
                             KVC_OK);
        }
        for (size_t i = 0; i < 500; i++) {
            had += exp(d[i]) + (double)b.size;
            plain += exp((double)w_a * d[i] + (double)out[0].bias);
            second += exp((double)w_a * d[i] + (double)out[1].bias);
        }
        assert_true(plain < had && fabs(had - second) < 0.2 * (had - plain));
    }
}

static void costs_order_pairs_by_expected_error(void **state)
{
    const kvc_merge_token a = {.size = 1, .mass = 0.02f}, b = {.size = 2, .mass = 0.01f};
    float cost;

    (void)state;
    assert_int_equal(kvc_merge_cost(&a, &b, 0, 0.01f, 0.64f, 2, 3, &cost), KVC_OK);
    assert_float_equal(cost, 0.03f * (0.08f * 2 + 0.2f * 3), 1e-7f);
    assert_int_equal(kvc_merge_cost(&a, &b, 2, 0.01f, 0.64f, 2, 3, &cost), KVC_OK);
    assert_float_equal(cost, 0.09f * (0.08f * 2 + 0.2f * 3), 1e-7f);
    assert_int_equal(kvc_merge_cost(&a, &b, 2, 0.01f, 0, 2, 3, &cost), KVC_OK);
    assert_true(cost == 0.0f);
    assert_int_equal(kvc_merge_cost(&a, NULL, 2, 0.01f, 0, 2, 3, &cost), KVC_E_ARG);
    assert_int_equal(kvc_merge_cost(&a, &b, -1, 0.01f, 0, 2, 3, &cost), KVC_E_ARG);
    assert_int_equal(kvc_merge_cost(&a, &b, 1, 0.01f, NAN, 2, 3, &cost), KVC_E_ARG);
}

static void errors_of_impossible_numbers_are_refused(void **state)
{
    kvc_merge_query bad[10];
    kvc_merge_loss loss = {.struct_size = sizeof(loss), .error = 7};
    const float wrong[][2] = {{-0.1f, 1}, {1.0f, 1}, {NAN, 1}, {0.5f, -1}, {0.5f, INFINITY}};
    float error = 7;

    (void)state;
    for (size_t i = 0; i < 10; i++) {
        bad[i] = golden_query();
    }
    bad[0].mass = 1.1f;
    bad[1].mass = -0.1f;
    bad[2].mass = NAN;
    bad[3].difference = INFINITY;
    bad[4].w_a = 1.5f;
    bad[5].bias = NAN;
    bad[6].value_distance = -1;
    bad[7].rest_distance = NAN;
    bad[8].difference = -1;
    bad[8].within = true;
    bad[9].struct_size = 8;
    for (size_t i = 0; i < 10; i++) {
        assert_int_equal(kvc_merge_error(&bad[i], &loss), KVC_E_ARG);
    }
    assert_int_equal(kvc_merge_error(NULL, &loss), KVC_E_ARG);
    assert_int_equal(kvc_merge_error(&bad[0], NULL), KVC_E_ARG);
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(kvc_drop_error(wrong[i][0], wrong[i][1], &error), KVC_E_ARG);
    }
    assert_true(loss.error == 7 && error == 7);
    /* All or nothing is possible. */
    kvc_merge_query edge = golden_query();
    edge.difference = 500;
    edge.mass = 1;
    assert_true(loss_of(&edge).merged_mass == 1);
    edge.mass = 0;
    assert_true(loss_of(&edge).merged_mass == 0 && loss_of(&edge).error == 0);
    edge.mass = 0.5f;
    assert_true(loss_of(&edge).merged_mass < 1e-30f && isfinite(loss_of(&edge).error));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merged_rows_are_never_over_weighted),
        cmocka_unit_test(the_missing_mass_is_the_divergence),
        cmocka_unit_test(the_bias_keeps_the_output_and_the_share_of_the_image),
        cmocka_unit_test(text_never_changes),
        cmocka_unit_test(golden_deficits_are_met),
        cmocka_unit_test(golden_output_errors_are_met),
        cmocka_unit_test(the_true_change_is_within_the_error),
        cmocka_unit_test(merging_opposite_keys_is_reported),
        cmocka_unit_test(the_second_order_term_brings_mass_back),
        cmocka_unit_test(costs_order_pairs_by_expected_error),
        cmocka_unit_test(errors_of_impossible_numbers_are_refused),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
