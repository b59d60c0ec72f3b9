/* Partial results of attention: merging and finishing them is the same arithmetic in all tables. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/half.h"
#include "kernels/kernels.h"
#include "support/edge.h"
#include "support/rng.h"

static uint64_t seed = 1;

/* Parts with nothing seen, NaN, and large differences; the arithmetic is the same in all tables. */
static void parts_merge_as_ref(void **state)
{
    enum { D = 37, N = 6 };
    const size_t stride = kvc_attend_stride(D);
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++) {
        float m[4][N] = {{-INFINITY, 1, 2, -INFINITY, 5, 0},
                         {3, -INFINITY, 200, -INFINITY, 4.5f, 0}};
        float l[4][N] = {{0, 2, 3, 0, 1, 1}, {1, 0, 1, 0, 7, 2}};
        static float o[4][N * 48];
        for (size_t i = 0; i < N * stride; i++) {
            o[0][i] = l[0][i / stride] * rng_unit(&seed);
            o[1][i] = l[1][i / stride] * rng_unit(&seed);
        }
        memcpy(m[2], m[0], sizeof(m[0]));
        memcpy(l[2], l[0], sizeof(l[0]));
        memcpy(o[2], o[0], sizeof(o[0]));
        const struct kvc_attend_part part = {m[1], l[1], o[1]};
        struct kvc_attend_part want = {m[0], l[0], o[0]}, got = {m[2], l[2], o[2]};
        kvc_merge_parts_ref(NULL, &want, &part, N, D);
        assert_int_equal((*k)->merge_parts(NULL, &got, &part, N, D), KVC_OK);
        for (size_t r = 0; r < N; r++) {
            assert_true(m[0][r] == m[2][r] && l[0][r] == l[2][r]);
            assert_memory_equal(o[0] + r * stride, o[2] + r * stride, D * sizeof(float));
        }
    }
}

static void finished_rows_equal_ref(void **state)
{
    enum { N = 4 };
    (void)state;
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        for (size_t d = 1; d <= 80; d++)
            for (int dtype = KVC_DTYPE_F32; dtype <= KVC_DTYPE_BF16; dtype++) {
                const size_t element = dtype == KVC_DTYPE_F32 ? 4 : 2, stride = d + 3;
                const size_t size = ((N - 1) * stride + d) * element;
                float m[N] = {1, -INFINITY, 3, NAN}, l[N] = {0.5f, 0, 1e-6f, 1};
                float o[N * 80], want_lse[N], got_lse[N];
                uint8_t *want = edge_new(size), *got = edge_new(size);
                memset(want, 0xa5, size);
                memset(got, 0xa5, size);
                for (size_t i = 0; i < (size_t)N * 80; i++)
                    o[i] = i % 17 == 5    ? 1e-7f * rng_unit(&seed)
                           : i % 17 == 11 ? kvc_float_from_bits(0x7fffffff)
                                          : rng_unit(&seed);
                const struct kvc_attend_part part = {m, l, o};
                kvc_finish_rows_ref(NULL, &part, N, d, want, (kvc_dtype)dtype, stride, want_lse);
                assert_int_equal(
                    (*k)->finish_rows(NULL, &part, N, d, got, (kvc_dtype)dtype, stride, got_lse),
                    KVC_OK);
                assert_memory_equal(got, want, size);
                assert_memory_equal(got_lse, want_lse, 3 * sizeof(float));
                edge_free(want, size);
                edge_free(got, size);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_merge_as_ref),
        cmocka_unit_test(finished_rows_equal_ref),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
