/* Attention over rows of engines: every table against the reference, and rows against themselves.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"
#include "support/edge.h"
#include "support/rng.h"
#include "support/stored_rows.h"

enum { MAX_ROWS = 3 * KVC_TILE_ROWS };

static uint64_t seed = 1;

/* A tile; each block of memory ends at a fault. */
struct job {
    struct kvc_rows_tile tile;
    uint8_t *k, *v;
    float *q, *mask;
    uint32_t n_seen[KVC_TILE_ROWS];
    const void *masks[KVC_TILE_ROWS];
    size_t k_size, v_size, q_size, mask_size, r_size, o_size, w_size;
};

static uint8_t *new_rows(struct kvc_stored_rows *rows, uint32_t n_heads, uint32_t n, size_t *size)
{
    const size_t bytes = stored_bytes(rows->format, rows->d);
    const bool by_head = rng_below(&seed, 2);
    *size = bytes * n_heads * n;
    uint8_t *data = edge_new(*size);
    rows->data = data;
    rows->token_stride = by_head ? bytes : bytes * n_heads;
    rows->head_stride = by_head ? bytes * n : bytes;
    for (size_t i = 0; i < (size_t)n_heads * n; i++)
        stored_random(rows->format, data + i * bytes, rows->d, &seed);
    return data;
}

static void new_masks(struct job *job)
{
    struct kvc_rows_tile *tile = &job->tile;
    job->mask_size = (size_t)tile->n_rows * tile->n_keys * sizeof(float);
    job->mask = edge_new(job->mask_size);
    for (size_t i = 0; i < (size_t)tile->n_rows * tile->n_keys; i++)
        job->mask[i] = rng_below(&seed, 3) ? rng_unit(&seed) : -INFINITY;
    for (uint32_t r = 0; r < tile->n_rows; r++) {
        job->masks[r] = job->mask + (size_t)r * tile->n_keys;
        job->n_seen[r] =
            rng_below(&seed, 3) ? tile->n_keys : (uint32_t)rng_below(&seed, tile->n_keys + 1);
    }
    tile->n_seen = job->n_seen;
    tile->mask = rng_below(&seed, 2) ? job->masks : NULL;
}

static struct job *job_new(kvc_row_format k, kvc_row_format v, uint32_t d_k, uint32_t d_v,
                           uint32_t n_heads, uint32_t n_rows, uint32_t n_keys)
{
    struct job *job = calloc(1, sizeof(*job));
    assert_non_null(job);
    struct kvc_rows_tile *tile = &job->tile;
    *tile = (struct kvc_rows_tile){.k = {.format = k, .d = d_k},
                                   .v = {.format = v, .d = d_v},
                                   .n_heads = n_heads,
                                   .n_rows = n_rows,
                                   .n_keys = n_keys,
                                   .scale = 1 / sqrtf((float)d_k),
                                   .softcap = rng_below(&seed, 3) ? 0.0f : 2.0f};
    const size_t n = (size_t)n_heads * n_rows, stride = kvc_attend_stride(d_k);
    job->k = new_rows(&tile->k, n_heads, n_keys, &job->k_size);
    job->v = new_rows(&tile->v, n_heads, n_keys, &job->v_size);
    job->q_size = n * stride * sizeof(float);
    job->q = edge_new(job->q_size);
    for (size_t i = 0; i < n * stride; i++)
        job->q[i] = i % stride < d_k ? 3 * rng_unit(&seed) : 0;
    tile->q = job->q;
    job->r_size = n * sizeof(float);
    job->o_size = n * kvc_attend_stride(d_v) * sizeof(float);
    job->w_size = (kvc_rows_work_size(n, d_k, d_v) + 15) / 16 * 64;
    tile->m = edge_new(job->r_size);
    tile->l = edge_new(job->r_size);
    tile->o = edge_new(job->o_size);
    tile->work = edge_new(job->w_size);
    memset(tile->work, 0xff, job->w_size);
    new_masks(job);
    return job;
}

static void job_free(struct job *job)
{
    edge_free(job->k, job->k_size);
    edge_free(job->v, job->v_size);
    edge_free(job->q, job->q_size);
    edge_free(job->mask, job->mask_size);
    edge_free(job->tile.m, job->r_size);
    edge_free(job->tile.l, job->r_size);
    edge_free(job->tile.o, job->o_size);
    edge_free(job->tile.work, job->w_size);
    free(job);
}

/* What a tile gave: outputs relative to their sums. */
struct result {
    float m[MAX_ROWS], l[MAX_ROWS], *o;
};

static void run(const struct kvc_kernels *k, const struct job *job, struct result *result)
{
    assert_int_equal(k->attend_rows(NULL, &job->tile), KVC_OK);
    memcpy(result->m, job->tile.m, job->r_size);
    memcpy(result->l, job->tile.l, job->r_size);
    result->o = malloc(job->o_size);
    assert_non_null(result->o);
    memcpy(result->o, job->tile.o, job->o_size);
}

static void compare(const struct job *job, const struct result *got, const struct result *want)
{
    const size_t stride = kvc_attend_stride(job->tile.v.d);
    const double bound = job->tile.exact ? 2e-5 : 2e-4;
    for (size_t i = 0; i < (size_t)job->tile.n_heads * job->tile.n_rows; i++) {
        const float *a = got->o + i * stride, *b = want->o + i * stride;
        double error = 0, largest = 1e-30;
        assert_int_equal(isinf(got->m[i]), isinf(want->m[i]));
        if (isinf(want->m[i])) {
            assert_true(got->m[i] < 0 && got->l[i] == 0);
            for (size_t c = 0; c < stride; c++)
                assert_true(a[c] == 0);
            continue;
        }
        assert_true(fabs((double)got->m[i] - (double)want->m[i]) <= bound);
        for (size_t c = 0; c < stride; c++) {
            const double x = (double)a[c] / (double)got->l[i],
                         y = (double)b[c] / (double)want->l[i];
            error = fabs(x - y) <= error ? error : fabs(x - y);
            largest = fmax(largest, fabs(y));
        }
        assert_true(error <= bound * largest);
    }
}

static void check_tables(struct job *job)
{
    for (int exact = 0; exact < 2; exact++) {
        struct result want, got;
        job->tile.exact = exact != 0;
        run(&kvc_kernels_ref, job, &want);
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            run(*k, job, &got);
            compare(job, &got, &want);
            free(got.o);
        }
        free(want.o);
    }
}

static void every_table_equals_the_reference(void **state)
{
    static const uint32_t sizes[] = {32, 64, 96, 128, 160, 192, 224, 256, 288, 512};
    (void)state;
    for (uint32_t i = 0; i < 180; i++) {
        const uint32_t n_keys = i % 6 ? 1 + (uint32_t)rng_below(&seed, 100)
                                      : 1 + (uint32_t)rng_below(&seed, KVC_ROWS_KEYS);
        struct job *job =
            job_new((kvc_row_format)(i % 3), (kvc_row_format)(i / 3 % 3), sizes[i % 10],
                    sizes[rng_below(&seed, 10)], 1 + i % 3, 1 + i % KVC_TILE_ROWS, n_keys);
        check_tables(job);
        job_free(job);
    }
}

static void halves_may_have_any_length(void **state)
{
    (void)state;
    for (uint32_t d = 1; d <= 140; d++) {
        struct job *job = job_new(KVC_ROWS_F16, KVC_ROWS_F16, d, 141 - d, 1 + d % 2, 1 + d % 6,
                                  1 + (uint32_t)rng_below(&seed, 80));
        check_tables(job);
        job_free(job);
    }
}

/* Row r of head h by itself: the same bits. */
static void check_alone(const struct kvc_kernels *k, const struct job *job,
                        const struct result *all, uint32_t head, uint32_t r)
{
    const size_t i = (size_t)head * job->tile.n_rows + r, stride = kvc_attend_stride(job->tile.v.d);
    struct kvc_rows_tile one = job->tile;
    float m, l, *o = calloc(stride, sizeof(*o));
    one.k.data += head * one.k.head_stride;
    one.v.data += head * one.v.head_stride;
    one.n_heads = one.n_rows = 1;
    one.q += i * kvc_attend_stride(one.k.d);
    one.n_seen += r;
    one.mask = one.mask ? one.mask + r : NULL;
    one.m = &m;
    one.l = &l;
    one.o = o;
    assert_int_equal(k->attend_rows(NULL, &one), KVC_OK);
    assert_memory_equal(&m, &all->m[i], sizeof(m));
    assert_memory_equal(&l, &all->l[i], sizeof(l));
    assert_memory_equal(o, all->o + i * stride, job->tile.v.d * sizeof(*o));
    free(o);
}

/* Some rows have a peak, for which integers do not do. */
static void rows_and_heads_do_not_depend_on_each_other(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 54; i++) {
        struct job *job =
            job_new((kvc_row_format)(i % 3), (kvc_row_format)(i / 3 % 3), 32 * (1 + i % 5),
                    32 * (1 + i % 4), 1 + i % 3, 1 + i * 5 % KVC_TILE_ROWS, 130);
        for (size_t r = 0; r < job->tile.n_rows; r += 3)
            job->q[r * kvc_attend_stride(job->tile.k.d) + 5] = 100;
        job->tile.exact = i / 9 % 2;
        for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
            struct result all;
            run(*k, job, &all);
            for (uint32_t head = 0; head < job->tile.n_heads; head++)
                for (uint32_t r = 0; r < job->tile.n_rows; r++)
                    check_alone(*k, job, &all, head, r);
            free(all.o);
        }
        job_free(job);
    }
}

/* A query that is mostly one channel: in units of it the others are small, but they decide, as all
 * keys have the same number there. */
static void peaks_of_a_query_do_not_hide_the_rest(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 12; i++) {
        struct job *job =
            job_new(i % 2 ? KVC_ROWS_Q4_0 : KVC_ROWS_Q8_0, KVC_ROWS_F16, 64, 32, 1, 1 + i % 5, 200);
        job->tile.softcap = 0;
        job->tile.mask = NULL;
        for (size_t r = 0; r < job->tile.n_rows; r++)
            job->q[r * 64 + 3] = 200;
        for (size_t t = 0; t < 200; t++) {
            uint8_t *block = job->k + t * job->tile.k.token_stride;
            block[2 + 3] = i % 2 ? (uint8_t)((block[2 + 3] & 0xf0) | 8) : 0;
        }
        check_tables(job);
        job_free(job);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_table_equals_the_reference),
        cmocka_unit_test(halves_may_have_any_length),
        cmocka_unit_test(rows_and_heads_do_not_depend_on_each_other),
        cmocka_unit_test(peaks_of_a_query_do_not_hide_the_rest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
