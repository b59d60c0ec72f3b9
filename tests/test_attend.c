/* Attention over rows of an engine, against float64 over elements that the test decodes itself. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "kvc/attend.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kvc/pool.h"
#include "support/edge.h"
#include "support/guard.h"
#include "support/rng.h"
#include "support/stored_rows.h"
#include "support/tables.h"

enum { MAX_DIM = KVC_MAX_HEAD_DIM };

static const double exact_bound = 2e-5, fast_bound = 2e-4;

/* K and V with everything that is asked of them; K, V and the workspace end at a fault. */
struct scene {
    size_t n_q, n_heads, n_keys, n_kv, d_k, d_v;
    float *q, *out, *lse, *mask;
    size_t k_size, v_size, ws_size;
    unsigned char *k_data, *v_data;
    void *ws;
    kvc_view q_view, out_view;
    kvc_row_view k, v;
    kvc_attend_rows_options options;
};

struct scene_shape {
    size_t n_q, n_heads, n_keys, n_kv, d_k, d_v;
    kvc_row_format k, v;
};

static void *filled(size_t n, uint64_t *rng, float scale)
{
    float *x = calloc(n + 1, sizeof(*x));

    assert_non_null(x);
    for (size_t i = 0; i < n; i++) {
        x[i] = scale * rng_unit(rng);
    }
    return x;
}

static const unsigned char *row_of(const kvc_row_view *view, size_t t, size_t h)
{
    return (const unsigned char *)view->data + t * view->token_stride_bytes +
           h * view->head_stride_bytes;
}

static unsigned char *random_rows(kvc_row_view *view, kvc_row_format format, size_t n, size_t heads,
                                  size_t dim, size_t *size, uint64_t *rng)
{
    unsigned char *data;

    *size = n * heads * stored_bytes(format, dim);
    data = edge_new(*size > 0 ? *size : 2);
    *view = kvc_row_view_packed(data, format, n, heads, dim);
    for (size_t i = 0; i < n * heads; i++) {
        stored_random(format, data + i * stored_bytes(format, dim), dim, rng);
    }
    return data;
}

static struct scene scene_new(const struct scene_shape *o, uint64_t *rng)
{
    struct scene s = {.n_q = o->n_q,
                      .n_heads = o->n_heads,
                      .n_keys = o->n_keys,
                      .n_kv = o->n_kv,
                      .d_k = o->d_k,
                      .d_v = o->d_v};

    s.q = filled(o->n_q * o->n_heads * o->d_k, rng, 3.0f);
    s.out = filled(o->n_q * o->n_heads * o->d_v, rng, 1.0f);
    s.lse = filled(o->n_q * o->n_heads, rng, 1.0f);
    s.mask = filled(o->n_q * o->n_keys, rng, 1.0f);
    for (size_t i = 0; i < o->n_q * o->n_keys; i++) {
        s.mask[i] = rng_below(rng, 3) == 0 ? -INFINITY : s.mask[i];
    }
    s.q_view = kvc_view_packed(s.q, KVC_DTYPE_F32, o->n_q, o->n_heads, o->d_k);
    s.out_view = kvc_view_packed(s.out, KVC_DTYPE_F32, o->n_q, o->n_heads, o->d_v);
    s.k_data = random_rows(&s.k, o->k, o->n_keys, o->n_kv, o->d_k, &s.k_size, rng);
    s.v_data = random_rows(&s.v, o->v, o->n_keys, o->n_kv, o->d_v, &s.v_size, rng);
    assert_int_equal(kvc_attend_rows_workspace_size(o->n_q, o->n_heads, o->n_keys, o->n_kv, o->d_k,
                                                    o->d_v, &s.ws_size),
                     KVC_OK);
    s.ws_size = (s.ws_size + 63) / 64 * 64;
    s.ws = edge_new(s.ws_size);
    memset(s.ws, 0xff, s.ws_size);
    kvc_attend_rows_options_default(&s.options);
    return s;
}

static void scene_free(struct scene *s)
{
    free(s->q);
    free(s->out);
    free(s->lse);
    free(s->mask);
    edge_free(s->k_data, s->k_size > 0 ? s->k_size : 2);
    edge_free(s->v_data, s->v_size > 0 ? s->v_size : 2);
    edge_free(s->ws, s->ws_size);
}

static void use_mask(struct scene *s)
{
    s->options.mask = s->mask;
    s->options.mask_stride = s->n_keys;
}

static bool is_seen(const struct scene *s, size_t query, size_t key)
{
    const int64_t at = s->options.first_query;

    return (at == INT64_MAX || (int64_t)key <= at + (int64_t)query) &&
           (s->options.mask == NULL || s->mask[query * s->n_keys + key] > -INFINITY);
}

static double logit(const struct scene *s, size_t query, size_t head, size_t key)
{
    const unsigned char *k = row_of(&s->k, key, head / (s->n_heads / s->n_kv));
    const float *q = s->q + (query * s->n_heads + head) * s->d_k;
    const double cap = (double)s->options.softcap;
    double z = 0.0;

    for (size_t c = 0; c < s->d_k; c++) {
        z += (double)q[c] * stored_element(s->k.format, k, c);
    }
    z *= s->options.scale != 0.0f ? (double)s->options.scale : 1.0 / sqrt((double)s->d_k);
    z = cap > 0.0 ? cap * tanh(z / cap) : z;
    return s->options.mask != NULL ? z + (double)s->mask[query * s->n_keys + key] : z;
}

/* The output of one head in double; its log-sum-exp is returned. */
static double solve(const struct scene *s, size_t query, size_t head, double *want)
{
    double sum = 0.0, max = (double)-INFINITY;
    double *z = calloc(s->n_keys + 1, sizeof(*z));

    memset(want, 0, s->d_v * sizeof(*want));
    for (size_t t = 0; t < s->n_keys; t++) {
        z[t] = is_seen(s, query, t) ? logit(s, query, head, t) : (double)-INFINITY;
        max = z[t] > max ? z[t] : max;
    }
    for (size_t t = 0; t < s->n_keys; t++) {
        const unsigned char *v = row_of(&s->v, t, head / (s->n_heads / s->n_kv));
        const double w = is_seen(s, query, t) ? exp(z[t] - max) : 0.0;

        sum += w;
        for (size_t c = 0; c < s->d_v && w > 0.0; c++) {
            want[c] += w * stored_element(s->v.format, v, c);
        }
    }
    for (size_t c = 0; c < s->d_v && sum > 0.0; c++) {
        want[c] /= sum;
    }
    free(z);
    return sum > 0.0 ? max + log(sum) : (double)-INFINITY;
}

static kvc_status attend(kvc_ctx *ctx, const struct scene *s)
{
    return kvc_attend_rows(ctx, &s->q_view, &s->k, &s->v, &s->options, &s->out_view, s->lse, s->ws,
                           s->ws_size);
}

/* Largest |got - want| over the largest |want|. */
static double relative_error(const float *got, const double *want, size_t n)
{
    double error = 0.0, largest = 1e-30;

    for (size_t c = 0; c < n; c++) {
        const double e = fabs((double)got[c] - want[c]);

        error = e <= error ? error : e;
        largest = fmax(largest, fabs(want[c]));
    }
    return error / largest;
}

static double worst[2]; /* fast, exact */

static void check_head(const struct scene *s, const double *want, double lse, size_t i)
{
    const double bound = s->options.exact ? exact_bound : fast_bound;
    const double error = relative_error(s->out + i * s->d_v, want, s->d_v);

    if (lse == (double)-INFINITY) {
        assert_true(s->lse[i] == -INFINITY);
        for (size_t c = 0; c < s->d_v; c++) {
            assert_true(s->out[i * s->d_v + c] == 0.0f);
        }
        return;
    }
    if (!(error <= bound)) {
        print_error("error %g: d %zu %zu, formats %d %d, keys %zu\n", error, s->d_k, s->d_v,
                    (int)s->k.format, (int)s->v.format, s->n_keys);
    }
    assert_true(error <= bound);
    assert_true(fabs((double)s->lse[i] - lse) <= bound * (1.0 + fabs(lse)));
    worst[s->options.exact] = fmax(worst[s->options.exact], error);
}

/* Every table, exact and not, over all heads of all queries. */
static void check_scene(void **state, struct scene *s)
{
    const struct tables *t = *state;
    const size_t n = s->n_q * s->n_heads;
    double *want = calloc(n * s->d_v, sizeof(*want)), *lse = calloc(n, sizeof(*lse));

    for (size_t i = 0; i < n; i++) {
        lse[i] = solve(s, i / s->n_heads, i % s->n_heads, want + i * s->d_v);
    }
    for (size_t k = 0; k < t->n; k++) {
        for (int exact = 0; exact < 2; exact++) {
            s->options.exact = exact != 0;
            assert_int_equal(attend(t->ctx[k], s), KVC_OK);
            for (size_t i = 0; i < n; i++) {
                check_head(s, want + i * s->d_v, lse[i], i);
            }
        }
    }
    free(want);
    free(lse);
}

static void default_options_set_every_field(void **state)
{
    kvc_attend_rows_options o;

    (void)state;
    memset(&o, 0xff, sizeof(o));
    kvc_attend_rows_options_default(&o);
    assert_int_equal(o.struct_size, sizeof(o));
    assert_true(o.scale == 0.0f && o.softcap == 0.0f && !o.exact && o.mask == NULL);
    assert_true(o.first_query == INT64_MAX && o.mask_dtype == KVC_DTYPE_F32 && o.mask_stride == 0);
    kvc_attend_rows_options_init(NULL, sizeof(o));
}

static void outputs_equal_float64_on_every_table(void **state)
{
    static const size_t dims[] = {32, 64, 96, 128, 160, 256, 512};
    uint64_t rng = 1;

    for (size_t i = 0; i < 63; i++) {
        const size_t n_kv = 1 + rng_below(&rng, 3);
        const struct scene_shape shape = {
            .n_q = i % 4 ? 1 : 1 + rng_below(&rng, 12),
            .n_heads = n_kv * (1 + rng_below(&rng, 4)),
            .n_keys = 1 + rng_below(&rng, i % 5 ? 200 : 1200),
            .n_kv = n_kv,
            .d_k = dims[i % 7],
            .d_v = dims[rng_below(&rng, i % 5 ? 7 : 4)],
            .k = (kvc_row_format)(i / 7 % 3),
            .v = (kvc_row_format)(i / 21),
        };
        struct scene s = scene_new(&shape, &rng);

        s.options.scale = i % 3 ? 0.0f : 0.2f;
        s.options.softcap = i % 6 < 4 ? 0.0f : 3.0f;
        if (i % 2) {
            use_mask(&s);
        }
        if (i % 3 == 1) {
            s.options.first_query = (int64_t)rng_below(&rng, s.n_keys + 4) - 3;
        }
        check_scene(state, &s);
        scene_free(&s);
    }
    print_message("largest errors: %.1e exact, %.1e not\n", worst[1], worst[0]);
}

/* Halves of any length, also of no whole vector. */
static void halves_of_every_length_are_read(void **state)
{
    uint64_t rng = 2;

    for (size_t d = 1; d <= 150; d++) {
        const struct scene_shape shape = {1 + d % 2, 1 + d % 5,        1 + d % 70,   1,
                                          d,         1 + d * 37 % 150, KVC_ROWS_F16, KVC_ROWS_F16};
        struct scene s = scene_new(&shape, &rng);

        check_scene(state, &s);
        scene_free(&s);
    }
}

static void query_heads_share_kv_heads(void **state)
{
    uint64_t rng = 3;

    for (size_t group = 1; group <= 17; group++) {
        const struct scene_shape shape = {1 + group % 3,
                                          2 * group,
                                          90,
                                          2,
                                          64,
                                          96,
                                          (kvc_row_format)(group % 3),
                                          (kvc_row_format)(group / 3 % 3)};
        struct scene s = scene_new(&shape, &rng);

        s.options.first_query = 60;
        check_scene(state, &s);
        scene_free(&s);
    }
}

/* Peaks and long flat tails: weights that 16-bit integers might lose. */
static void long_and_peaky_contexts_stay_accurate(void **state)
{
    uint64_t rng = 4;

    for (size_t i = 0; i < 12; i++) {
        const struct scene_shape shape = {
            1, 2, 5000, 1, 64, 64, (kvc_row_format)(i % 3), (kvc_row_format)(i / 3 % 3)};
        struct scene s = scene_new(&shape, &rng);

        s.options.scale = i % 2 ? 1e-3f : 0.6f;
        use_mask(&s);
        for (size_t t = 0; t < 5000; t++) {
            s.mask[t] = t == 7 ? 9.0f : 0.0f;
        }
        for (size_t t = 0; t < 5000; t++) { /* all values of one sign: losses would add up */
            for (size_t b = 0; b < 2 && s.v.format != KVC_ROWS_F16; b++) {
                unsigned char *block =
                    s.v_data + (t * 2 + b) * (s.v.format == KVC_ROWS_Q8_0 ? 34 : 18);
                for (size_t c = 2; c < (s.v.format == KVC_ROWS_Q8_0 ? 34 : 18); c++) {
                    block[c] = s.v.format == KVC_ROWS_Q8_0 ? 127 : 0xff;
                }
                store_half(block, 0.5 / 127);
            }
        }
        check_scene(state, &s);
        scene_free(&s);
    }
}

/* The error of a logit grows with it. */
static void large_logits_stay_accurate(void **state)
{
    uint64_t rng = 5;

    for (size_t i = 0; i < 12; i++) {
        const struct scene_shape shape = {1,
                                          i % 3 ? 4 : 1,
                                          700,
                                          1,
                                          i % 4 < 2 ? 64 : 128,
                                          64,
                                          i % 2 ? KVC_ROWS_Q8_0 : KVC_ROWS_Q4_0,
                                          KVC_ROWS_F16};
        struct scene s = scene_new(&shape, &rng);
        double out[64];

        s.options.scale = 1.0f;
        s.options.scale = (float)(30 / solve(&s, 0, 0, out)); /* about the largest logit */
        check_scene(state, &s);
        scene_free(&s);
    }
}

/* A parallel_for that runs the tasks backwards. */
static void run_backwards(void *user, size_t n, void (*task)(void *arg, size_t i), void *arg)
{
    (void)user;
    while (n-- > 0) {
        task(arg, n);
    }
}

static void check_same_bits(const struct scene *s, kvc_ctx *ctx, const float *out, const float *lse)
{
    assert_int_equal(attend(ctx, s), KVC_OK);
    assert_memory_equal(s->out, out, s->n_q * s->n_heads * s->d_v * sizeof(*out));
    assert_memory_equal(s->lse, lse, s->n_q * s->n_heads * sizeof(*lse));
}

static void no_split_over_threads_changes_a_bit(void **state)
{
    const struct tables *t = *state;
    uint64_t rng = 5;
    kvc_pool *pool = NULL;

    assert_int_equal(kvc_pool_create(3, &pool), KVC_OK);
    for (size_t i = 0; i < 9 * t->n; i++) {
        const struct scene_shape shape = {i % 2 ? 1 : 20,
                                          16,
                                          1700,
                                          4,
                                          64,
                                          64,
                                          (kvc_row_format)(i % 3),
                                          (kvc_row_format)(i / 3 % 3)};
        struct scene s = scene_new(&shape, &rng);
        const size_t n = s.n_q * s.n_heads;
        const char *name = kvc_ctx_kernels(t->ctx[i / 9]);
        const kvc_ctx_params backwards = {
            .struct_size = sizeof(backwards), .parallel_for = run_backwards, .kernels = name};
        const kvc_ctx_params pooled = {.struct_size = sizeof(pooled),
                                       .parallel_for = kvc_pool_parallel_for,
                                       .parallel_user = pool,
                                       .kernels = name};
        float *out = calloc(n * s.d_v, sizeof(*out)), *lse = calloc(n, sizeof(*lse));
        kvc_ctx *ctx;

        s.options.first_query = 1650;
        assert_int_equal(attend(t->ctx[i / 9], &s), KVC_OK);
        memcpy(out, s.out, n * s.d_v * sizeof(*out));
        memcpy(lse, s.lse, n * sizeof(*lse));
        assert_int_equal(kvc_ctx_create(&backwards, &ctx), KVC_OK);
        check_same_bits(&s, ctx, out, lse);
        kvc_ctx_destroy(ctx);
        assert_int_equal(kvc_ctx_create(&pooled, &ctx), KVC_OK);
        check_same_bits(&s, ctx, out, lse);
        kvc_ctx_destroy(ctx);
        free(out);
        free(lse);
        scene_free(&s);
    }
    kvc_pool_destroy(pool);
}

/* Twenty queries of 16 heads are not split over the keys, each of them alone is. */
static void a_query_alone_gets_the_same_bits(void **state)
{
    const struct tables *t = *state;
    uint64_t rng = 6;

    for (size_t i = 0; i < 9 * t->n; i++) {
        const struct scene_shape shape = {
            20, 16, 1300, 4, 64, 96, (kvc_row_format)(i % 3), (kvc_row_format)(i / 3 % 3)};
        struct scene s = scene_new(&shape, &rng), one = s;
        float out[16 * 96], lse[16];

        use_mask(&s);
        assert_int_equal(attend(t->ctx[i / 9], &s), KVC_OK);
        for (size_t query = 0; query < 20; query += 6) {
            one = s;
            one.n_q = 1;
            one.q_view = kvc_view_packed(s.q + query * 16 * 64, KVC_DTYPE_F32, 1, 16, 64);
            one.out_view = kvc_view_packed(out, KVC_DTYPE_F32, 1, 16, 96);
            one.lse = lse;
            one.options.mask = s.mask + query * s.n_keys;
            one.options.mask_stride = 0;
            assert_int_equal(attend(t->ctx[i / 9], &one), KVC_OK);
            assert_memory_equal(out, s.out + query * 16 * 96, sizeof(out));
            assert_memory_equal(lse, s.lse + query * 16, sizeof(lse));
        }
        scene_free(&s);
    }
}

/* Copies the rows of a view to where the strides of another say, in room. */
static void copy_rows(const kvc_row_view *from, const kvc_row_view *to, unsigned char *room)
{
    for (size_t t = 0; t < from->n_tokens; t++) {
        for (size_t h = 0; h < from->n_heads; h++) {
            memcpy(room + (row_of(to, t, h) - room), row_of(from, t, h),
                   stored_bytes(from->format, from->head_dim));
        }
    }
}

/* fault G2: any strides, and addresses that are even and no more. */
static void rows_lie_where_strides_say(void **state)
{
    enum { N = 150, HEADS = 3 };
    uint64_t rng = 7;

    for (size_t i = 0; i < 36; i++) {
        const struct scene_shape shape = {
            2, 6, N, HEADS, 64, 32, (kvc_row_format)(i % 3), (kvc_row_format)(i / 3 % 3)};
        struct scene s = scene_new(&shape, &rng);
        const size_t k_row = stored_bytes(s.k.format, 64), v_row = stored_bytes(s.v.format, 32);
        unsigned char *room = calloc(1, (size_t)4 * N * HEADS * (k_row + v_row + 64));
        kvc_row_view k = s.k, v = s.v;
        float want[2 * 6 * 32];

        assert_int_equal(attend(best(state), &s), KVC_OK);
        memcpy(want, s.out, sizeof(want));
        k.data = room + 2 + 4 * (i % 8);
        switch (i / 9) {
        case 0: /* [head][token] */
            k.token_stride_bytes = k_row;
            k.head_stride_bytes = N * k_row + 2;
            v.data = (const char *)k.data + HEADS * (N * k_row + 2);
            v.token_stride_bytes = v_row;
            v.head_stride_bytes = N * v_row + 6;
            break;
        case 1: /* K and V of a head side by side */
            k.head_stride_bytes = v.head_stride_bytes = k_row + v_row;
            k.token_stride_bytes = v.token_stride_bytes = HEADS * (k_row + v_row);
            v.data = (const char *)k.data + k_row;
            break;
        case 2: /* gaps */
            k.head_stride_bytes = k_row + 10;
            k.token_stride_bytes = HEADS * (k_row + 10) + 22;
            v.data = (const char *)k.data + N * k.token_stride_bytes;
            v.head_stride_bytes = v_row + 2;
            v.token_stride_bytes = HEADS * (v_row + 2) + 34;
            break;
        default: /* K by token, V by head */
            v.data = (const char *)k.data + N * k.token_stride_bytes;
            v.token_stride_bytes = v_row + 2;
            v.head_stride_bytes = N * (v_row + 2);
        }
        copy_rows(&s.k, &k, room);
        copy_rows(&s.v, &v, room);
        s.k = k;
        s.v = v;
        memset(s.out, 0, sizeof(want));
        assert_int_equal(attend(best(state), &s), KVC_OK);
        assert_memory_equal(s.out, want, sizeof(want));
        free(room);
        scene_free(&s);
    }
}

/* fault G4: what a query does not see may hold anything; what another sees there stays its own. */
static void nan_in_unseen_rows_changes_nothing(void **state)
{
    const struct tables *t = *state;
    uint64_t rng = 8;

    for (size_t i = 0; i < 18 * t->n; i++) {
        const struct scene_shape shape = {
            3, 4, 200, 2, 64, 64, (kvc_row_format)(i % 3), (kvc_row_format)(i / 3 % 3)};
        struct scene s = scene_new(&shape, &rng);
        float want[3 * 4 * 64], lse[3 * 4];

        use_mask(&s);
        s.options.exact = i / 9 % 2;
        s.options.first_query = 180;
        for (size_t query = 0; query < 3; query++) {
            s.mask[query * 200 + 50] = query == 1 ? 0.5f : -INFINITY;
            s.mask[query * 200 + 51] = s.mask[query * 200 + 120] = -INFINITY;
        }
        assert_int_equal(attend(t->ctx[i / 18], &s), KVC_OK);
        memcpy(want, s.out, sizeof(want));
        memcpy(lse, s.lse, sizeof(lse));
        for (size_t key = 50; key < 200; key++) {
            if (key > 182 || key == 51 || key == 120 || key == 50) {
                memset(s.k_data + key * s.k.token_stride_bytes, 0xff, s.k.token_stride_bytes);
                memset(s.v_data + key * s.v.token_stride_bytes, 0xff, s.v.token_stride_bytes);
            }
        }
        assert_int_equal(attend(t->ctx[i / 18], &s), KVC_OK);
        for (size_t r = 0; r < 12; r++) {
            if (r / 4 == 1) { /* the only query that sees key 50 */
                assert_true(isnan(s.out[r * 64]) && isnan(s.lse[r]));
                continue;
            }
            assert_memory_equal(s.out + r * 64, want + r * 64, 64 * sizeof(float));
            assert_true(s.lse[r] == lse[r]);
        }
        scene_free(&s);
    }
}

/* The last block of keys, of which only one is seen, and that is no number. */
static void nan_is_not_lost_between_blocks(void **state)
{
    const struct tables *t = *state;
    uint64_t rng = 16;

    for (size_t i = 0; i < t->n; i++) {
        const struct scene_shape shape = {1, 2, 1300, 1, 64, 64, KVC_ROWS_Q8_0, KVC_ROWS_F16};
        struct scene s = scene_new(&shape, &rng);

        use_mask(&s);
        for (size_t key = 1024; key < 1300; key++) {
            s.mask[key] = key == 1200 ? 0.0f : -INFINITY;
        }
        memset(s.k_data + 1200 * s.k.token_stride_bytes, 0xff, s.k.token_stride_bytes);
        assert_int_equal(attend(t->ctx[i], &s), KVC_OK);
        assert_true(isnan(s.out[0]) && isnan(s.out[64]) && isnan(s.lse[0]) && isnan(s.lse[1]));
        scene_free(&s);
    }
}

/* More tiles of queries, and more parts of few queries, than there are tasks at a time. */
static void no_part_of_much_work_is_left_out(void **state)
{
    uint64_t rng = 17;

    for (size_t i = 0; i < 2; i++) {
        const struct scene_shape shape = {i ? 80 : 9, i ? 16 : 28, i ? 40 : 17000, i ? 4 : 1,
                                          32,         32,          KVC_ROWS_Q8_0,  KVC_ROWS_Q8_0};
        struct scene s = scene_new(&shape, &rng);
        double want[32];

        assert_int_equal(attend(best(state), &s), KVC_OK);
        for (size_t r = 0; r < s.n_q * s.n_heads; r += i ? 1 : 17) {
            const double lse = solve(&s, r / s.n_heads, r % s.n_heads, want);

            check_head(&s, want, lse, r);
        }
        scene_free(&s);
    }
}

static void a_query_that_sees_nothing_gets_zeros(void **state)
{
    static const size_t n_keys[] = {0, 1, 130, 1100};
    uint64_t rng = 9;

    for (size_t i = 0; i < 8; i++) {
        const struct scene_shape shape = {3,  4,  n_keys[i % 4], 2,
                                          32, 64, KVC_ROWS_Q8_0, KVC_ROWS_Q4_0};
        struct scene s = scene_new(&shape, &rng);

        if (i < 4) {
            use_mask(&s);
            for (size_t t = 0; t < 3 * s.n_keys; t++) {
                s.mask[t] = -INFINITY;
            }
        } else {
            s.options.first_query = i % 2 ? -3 : INT64_MIN;
        }
        check_scene(state, &s);
        scene_free(&s);
    }
}

static void masks_are_added_after_the_softcap(void **state)
{
    uint64_t rng = 10;
    const struct scene_shape shape = {4, 4, 333, 2, 64, 64, KVC_ROWS_Q4_0, KVC_ROWS_F16};
    struct scene s = scene_new(&shape, &rng);
    uint16_t *halves = calloc((size_t)4 * 333, sizeof(*halves));
    float want[4 * 4 * 64];

    use_mask(&s);
    s.options.softcap = 0.01f; /* flattens all logits, but not the mask */
    for (size_t i = 0; i < (size_t)4 * 333; i++) {
        if (s.mask[i] > -INFINITY) {
            halves[i] = half_away((double)s.mask[i]);
            s.mask[i] = (float)half_value(halves[i]);
        } else {
            halves[i] = HALF_SIGN | HALF_INF;
        }
    }
    check_scene(state, &s);
    s.options.exact = false;
    assert_int_equal(attend(best(state), &s), KVC_OK);
    memcpy(want, s.out, sizeof(want));
    s.options.mask = halves;
    s.options.mask_dtype = KVC_DTYPE_F16;
    assert_int_equal(attend(best(state), &s), KVC_OK);
    assert_memory_equal(s.out, want, sizeof(want));
    free(halves);
    scene_free(&s);
}

static void first_query_is_a_causal_mask(void **state)
{
    uint64_t rng = 11;
    const struct scene_shape shape = {30, 8, 600, 2, 64, 64, KVC_ROWS_Q8_0, KVC_ROWS_Q8_0};
    struct scene s = scene_new(&shape, &rng);
    float *want = calloc((size_t)30 * 8 * 64, sizeof(*want));

    s.options.first_query = 555;
    assert_int_equal(attend(best(state), &s), KVC_OK);
    memcpy(want, s.out, (size_t)30 * 8 * 64 * sizeof(*want));
    for (size_t i = 0; i < (size_t)30 * 600; i++) {
        s.mask[i] = i % 600 <= 555 + i / 600 ? 0.0f : -INFINITY;
    }
    s.options.first_query = INT64_MAX;
    use_mask(&s);
    assert_int_equal(attend(best(state), &s), KVC_OK);
    assert_memory_equal(s.out, want, (size_t)30 * 8 * 64 * sizeof(*want));
    free(want);
    scene_free(&s);
}

/* Masks of finite numbers, as some engines have them, weigh nothing. */
static void large_negative_masks_hide_keys(void **state)
{
    uint64_t rng = 12;
    const struct scene_shape shape = {1, 4, 300, 2, 64, 64, KVC_ROWS_Q8_0, KVC_ROWS_Q8_0};
    struct scene s = scene_new(&shape, &rng);
    float want[4 * 64];

    use_mask(&s);
    s.options.exact = true;
    assert_int_equal(attend(best(state), &s), KVC_OK);
    memcpy(want, s.out, sizeof(want));
    for (size_t i = 0; i < 300; i++) {
        s.mask[i] = s.mask[i] > -INFINITY ? s.mask[i] : -1e30f;
    }
    assert_int_equal(attend(best(state), &s), KVC_OK);
    assert_memory_equal(s.out, want, sizeof(want));
    for (size_t i = 0; i < 300; i++) { /* but where there is nothing else, they are all there is */
        s.mask[i] = -1e30f;
    }
    assert_int_equal(attend(best(state), &s), KVC_OK);
    assert_true(s.lse[0] == -1e30f && s.out[0] != 0.0f);
    scene_free(&s);
}

static void halves_go_in_and_out(void **state)
{
    uint64_t rng = 13;
    const struct scene_shape shape = {2, 4, 100, 2, 96, 80, KVC_ROWS_Q8_0, KVC_ROWS_F16};
    struct scene s = scene_new(&shape, &rng);
    uint16_t q[2 * 4 * 96], out[2 * 4 * 80];

    for (size_t i = 0; i < sizeof(q) / sizeof(*q); i++) {
        q[i] = half_away((double)s.q[i]);
        s.q[i] = (float)half_value(q[i]);
    }
    assert_int_equal(attend(best(state), &s), KVC_OK);
    s.q_view = kvc_view_packed(q, KVC_DTYPE_F16, 2, 4, 96);
    s.out_view = kvc_view_packed(out, KVC_DTYPE_F16, 2, 4, 80);
    assert_int_equal(attend(best(state), &s), KVC_OK);
    for (size_t i = 0; i < sizeof(out) / sizeof(*out); i++) {
        assert_true(fabs(half_value(out[i]) - (double)s.out[i]) <= 6e-4 * fabs((double)s.out[i]));
    }
    /* [head][token][dim], as engines permute queries; no log-sum-exp is wanted. */
    s.q_view = (kvc_view){sizeof(kvc_view), q, KVC_DTYPE_F16, 2, 4, 96, 96, 192};
    s.out_view = kvc_view_packed(out, KVC_DTYPE_BF16, 2, 4, 80);
    assert_int_equal(kvc_attend_rows(best(state), &s.q_view, &s.k, &s.v, NULL, &s.out_view, NULL,
                                     s.ws, s.ws_size),
                     KVC_OK);
    scene_free(&s);
}

static void a_workspace_for_more_is_enough(void **state)
{
    size_t last = 0, size;

    (void)state;
    for (size_t n_q = 0; n_q < 400; n_q++) {
        assert_int_equal(kvc_attend_rows_workspace_size(n_q, 8, 9000, 2, 128, 128, &size), KVC_OK);
        assert_true(size >= last);
        last = size;
    }
    last = 0;
    for (size_t n_keys = 0; n_keys < 60000; n_keys += 300) {
        assert_int_equal(kvc_attend_rows_workspace_size(3, 32, n_keys, 8, 128, 64, &size), KVC_OK);
        assert_true(size >= last);
        last = size;
    }
}

static void rejects(const struct scene *s, kvc_ctx *ctx, kvc_status want)
{
    assert_int_equal(attend(ctx, s), want);
    assert_true(s->out[0] == 7.0f && s->lse[0] == 7.0f);
}

static void wrong_rows_are_refused(void **state)
{
    uint64_t rng = 14;
    const struct scene_shape shape = {2, 4, 100, 2, 64, 96, KVC_ROWS_Q8_0, KVC_ROWS_Q4_0};
    struct scene s = scene_new(&shape, &rng);
    const struct scene good = s;
    kvc_row_view *const views[] = {&s.k, &s.v};

    s.out[0] = s.lse[0] = 7.0f;
    for (size_t i = 0; i < 2; i++) {
        views[i]->struct_size = 8, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->data = NULL, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->data = s.k_data + 1, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->format = (kvc_row_format)3, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->n_tokens = 99, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->n_heads = 1, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->n_heads = 0, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->head_dim = 48, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->token_stride_bytes++, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->token_stride_bytes = 34, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->token_stride_bytes = SIZE_MAX / 8 - 1, rejects(&s, best(state), KVC_E_ARG),
        s = good;
        views[i]->head_stride_bytes++, rejects(&s, best(state), KVC_E_ARG), s = good;
        views[i]->head_stride_bytes = 34, rejects(&s, best(state), KVC_E_ARG), s = good;
    }
    s.k.head_dim = s.q_view.head_dim = 1024; /* strides of bytes and all are too small */
    rejects(&s, best(state), KVC_E_ARG), s = good;
    s.k.head_dim = s.q_view.head_dim = 544, s.q_view.head_stride = 544;
    s.k.token_stride_bytes = s.k.head_stride_bytes = 2048;
    rejects(&s, best(state), KVC_E_UNSUPPORTED), s = good;
    scene_free(&s);
}

static void wrong_arguments_are_refused(void **state)
{
    uint64_t rng = 15;
    const struct scene_shape shape = {2, 4, 100, 2, 64, 96, KVC_ROWS_Q8_0, KVC_ROWS_Q4_0};
    struct scene s = scene_new(&shape, &rng);
    const struct scene good = s;
    kvc_ctx *ctx = best(state);
    size_t size;

    s.out[0] = s.lse[0] = 7.0f;
    rejects(&s, NULL, KVC_E_ARG);
    s.q_view.n_heads = 3, rejects(&s, ctx, KVC_E_ARG), s = good;
    s.q_view.n_heads = s.out_view.n_heads = 3, rejects(&s, ctx, KVC_E_ARG), s = good;
    s.q_view.head_dim = 32, rejects(&s, ctx, KVC_E_ARG), s = good;
    s.out_view.head_dim = 64, rejects(&s, ctx, KVC_E_ARG), s = good;
    s.out_view.n_tokens = 1, rejects(&s, ctx, KVC_E_ARG), s = good;
    s.out_view.token_stride = 96, rejects(&s, ctx, KVC_E_ARG), s = good;
    s.options.struct_size = 8, rejects(&s, ctx, KVC_E_ARG), s = good;
    s.options.scale = NAN, rejects(&s, ctx, KVC_E_ARG), s = good;
    s.options.softcap = -1.0f, rejects(&s, ctx, KVC_E_ARG), s = good;
    use_mask(&s), s.options.mask_dtype = KVC_DTYPE_BF16, rejects(&s, ctx, KVC_E_ARG), s = good;
    use_mask(&s), s.options.mask_stride = 99, rejects(&s, ctx, KVC_E_ARG), s = good;
    use_mask(&s), s.options.mask = (const char *)s.mask + 2, rejects(&s, ctx, KVC_E_ARG), s = good;
    s.ws = NULL, rejects(&s, ctx, KVC_E_WORKSPACE), s = good;
    s.ws = (char *)s.ws + 8, rejects(&s, ctx, KVC_E_WORKSPACE), s = good;
    s.ws_size = 64, rejects(&s, ctx, KVC_E_WORKSPACE), s = good;
    s.q_view.n_tokens = s.out_view.n_tokens = 0, rejects(&s, ctx, KVC_OK), s = good;

    assert_int_equal(kvc_attend_rows_workspace_size(1, 4, 9, 2, 64, 64, NULL), KVC_E_ARG);
    assert_int_equal(kvc_attend_rows_workspace_size(1, 4, 9, 3, 64, 64, &size), KVC_E_ARG);
    assert_int_equal(kvc_attend_rows_workspace_size(1, 4, 9, 0, 64, 64, &size), KVC_E_ARG);
    assert_int_equal(kvc_attend_rows_workspace_size(1, 4, 9, 2, 0, 64, &size), KVC_E_ARG);
    assert_int_equal(kvc_attend_rows_workspace_size(1, 4, SIZE_MAX, 2, 64, 64, &size), KVC_E_ARG);
    assert_int_equal(kvc_attend_rows_workspace_size(SIZE_MAX, 4, 9, 2, 64, 64, &size), KVC_E_ARG);
    assert_int_equal(kvc_attend_rows_workspace_size(1, 4, 9, 2, 64, 513, &size), KVC_E_UNSUPPORTED);
    scene_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(default_options_set_every_field),
        cmocka_unit_test(outputs_equal_float64_on_every_table),
        cmocka_unit_test(halves_of_every_length_are_read),
        cmocka_unit_test(query_heads_share_kv_heads),
        cmocka_unit_test(long_and_peaky_contexts_stay_accurate),
        cmocka_unit_test(large_logits_stay_accurate),
        cmocka_unit_test(no_split_over_threads_changes_a_bit),
        cmocka_unit_test(a_query_alone_gets_the_same_bits),
        cmocka_unit_test(rows_lie_where_strides_say),
        cmocka_unit_test(nan_in_unseen_rows_changes_nothing),
        cmocka_unit_test(nan_is_not_lost_between_blocks),
        cmocka_unit_test(no_part_of_much_work_is_left_out),
        cmocka_unit_test(a_query_that_sees_nothing_gets_zeros),
        cmocka_unit_test(masks_are_added_after_the_softcap),
        cmocka_unit_test(first_query_is_a_causal_mask),
        cmocka_unit_test(large_negative_masks_hide_keys),
        cmocka_unit_test(halves_go_in_and_out),
        cmocka_unit_test(a_workspace_for_more_is_enough),
        cmocka_unit_test(wrong_rows_are_refused),
        cmocka_unit_test(wrong_arguments_are_refused),
    };

    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
