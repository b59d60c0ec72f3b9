/* Pages in device memory: every byte as the reference makes it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device_cache.h"
#include "emu.h"

static const int sizes[] = {1, 7, 8, 40, 64, 72, 80, 96, 112, 128, 200, 256, 512};

enum { N_SIZES = sizeof(sizes) / sizeof(*sizes) };

static uint64_t seed = 11;

/* A precision that pages may have. */
static struct kvc_page_layout random_layout(int d_k, int d_v, bool movable)
{
    static const uint8_t formats[] = {KVC_F16, KVC_INT8, KVC_INT4, KVC_INT6};
    static const uint8_t scales[] = {KVC_SCALE_TOKEN, KVC_SCALE_HEAD, KVC_SCALE_CHANNEL};
    const uint8_t k = formats[rng_below(&seed, 4)], v = formats[rng_below(&seed, 3)];
    uint8_t k_scale = scales[movable || k == KVC_INT6 ? 0 : rng_below(&seed, 3)];
    uint8_t v_scale = scales[movable ? 0 : rng_below(&seed, 2)];
    return kvc_page_layout_make(d_k, d_v, k, k_scale, v, v_scale, false, KVC_PAGE_ROWS);
}

/* Halves of all sizes, zeros of both signs among them. */
static void random_halves(uint16_t *to, size_t n)
{
    const int scale = (int)rng_below(&seed, 30) - 15;
    for (size_t i = 0; i < n; i++) {
        const float x = ldexpf(4 * rng_unit(&seed) * rng_unit(&seed), scale);
        to[i] = rng_below(&seed, 20) == 0 ? (uint16_t)(rng_below(&seed, 2) << 15)
                                          : kvc_half_from_float(fminf(fmaxf(x, -65504), 65504));
    }
}

static void pages_are_sealed_as_the_reference_seals_them(void **state)
{
    (void)state;
    for (int i = 0; i < 80; i++) {
        const int d_k = sizes[rng_below(&seed, N_SIZES)], d_v = sizes[rng_below(&seed, N_SIZES)];
        struct kvc_page_layout layouts[2] = {
            random_layout(d_k, d_v, false),
            kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS)};
        const struct kvc_page_layout *to = &layouts[0], *open = &layouts[1];
        const uint32_t n_rows = i % 5 == 0 ? KVC_PAGE_ROWS : 1 + (uint32_t)rng_below(&seed, 64);
        struct device_cache *c = device_cache_new(layouts, 2, open->n_bytes + 2 * to->n_bytes);
        uint8_t *page = calloc(1, open->n_bytes), *want = malloc(to->n_bytes);
        uint8_t *got = malloc(2 * (size_t)to->n_bytes);
        random_halves((uint16_t *)(void *)page, (size_t)n_rows * open->d8_k);
        random_halves((uint16_t *)(void *)(page + open->v_codes), (size_t)n_rows * open->d8_v);
        struct kvc_device_seal job = {
            .from = 0, .to = open->n_bytes, .n_rows = n_rows, .layout = 0};

        device_write(c, 0, page, open->n_bytes);
        struct kvc_device_seal *jobs = device_copy(&job, sizeof(job));
        assert_int_equal(kvc_cuda_absmax(&c->queue, &c->cache, open, jobs, 1), KVC_OK);
        assert_int_equal(kvc_cuda_seal(&c->queue, &c->cache, open, jobs, 1), KVC_OK);
        device_read(c, jobs, &job, sizeof(job));
        device_read(c, c->cache.memory + open->n_bytes, got, 2 * (size_t)to->n_bytes);

        struct kvc_range k, v;
        const struct kvc_rows rows_k = {page, KVC_DTYPE_F16, open->d8_k, n_rows, (size_t)d_k};
        const struct kvc_rows rows_v = {page + open->v_codes, KVC_DTYPE_F16, open->d8_v, n_rows,
                                        (size_t)d_v};
        kvc_range_rows_ref(NULL, &rows_k, &k);
        kvc_range_rows_ref(NULL, &rows_v, &v);
        assert_true(job.absmax_k == fmaxf(k.max, -k.min) && job.absmax_v == fmaxf(v.max, -v.min));
        const struct kvc_seal_job same = {.from = open,
                                          .to = to,
                                          .src = page,
                                          .dst = want,
                                          .n_rows = n_rows,
                                          .absmax_k = job.absmax_k,
                                          .absmax_v = job.absmax_v};
        kvc_seal_page_ref(NULL, &same);
        assert_memory_equal(got, want, to->n_bytes);
        assert_true(device_untouched(got + to->n_bytes, to->n_bytes));
        device_free(jobs);
        device_cache_free(c);
        free(page);
        free(want);
        free(got);
    }
}

static void rows_move_bit_for_bit(void **state)
{
    (void)state;
    for (int i = 0; i < 80; i++) {
        const int d_k = sizes[rng_below(&seed, N_SIZES)], d_v = sizes[rng_below(&seed, N_SIZES)];
        struct kvc_page_layout layout = random_layout(d_k, d_v, true);
        if (i % 7 == 0)
            layout = kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
        const size_t n_bytes = layout.n_bytes;
        const bool in_place = i % 2;
        struct device_cache *c = device_cache_new(&layout, 1, 2 * n_bytes);
        uint8_t *pages = malloc(2 * n_bytes), *got = malloc(2 * n_bytes);
        struct kvc_device_move job = {.from = 0, .to = in_place ? 0 : n_bytes, .layout = 0};
        for (size_t at = 0; at < 2 * n_bytes; at++)
            pages[at] = (uint8_t)rng_below(&seed, 256);
        for (uint32_t row = 0; row < KVC_PAGE_ROWS; row++)
            if (rng_below(&seed, 2))
                job.rows[job.n++] = (uint8_t)row;
        job.dst_row = (uint16_t)(in_place ? job.n ? job.rows[0] : 0
                                          : rng_below(&seed, KVC_PAGE_ROWS + 1u - job.n));
        device_write(c, 0, pages, 2 * n_bytes);
        struct kvc_device_move *jobs = device_copy(&job, sizeof(job));
        assert_int_equal(kvc_cuda_move(&c->queue, &c->cache, jobs, 1), KVC_OK);
        device_read(c, c->cache.memory, got, 2 * n_bytes);
        kvc_move_rows_ref(NULL, &layout, pages, job.rows, job.n, pages + job.to, job.dst_row);
        assert_memory_equal(got, pages, 2 * n_bytes);
        device_free(jobs);
        device_cache_free(c);
        free(pages);
        free(got);
    }
}

static void pages_are_cleared_as_the_reference_clears_them(void **state)
{
    (void)state;
    for (int i = 0; i < 60; i++) {
        const int d_k = sizes[rng_below(&seed, N_SIZES)], d_v = sizes[rng_below(&seed, N_SIZES)];
        const struct kvc_page_layout layout = random_layout(d_k, d_v, false);
        struct device_cache *c = device_cache_new(&layout, 1, 2 * (size_t)layout.n_bytes);
        const struct kvc_device_move job = {.to = 0, .layout = 0};
        uint8_t *want = malloc(layout.n_bytes), *got = malloc(2 * (size_t)layout.n_bytes);
        struct kvc_device_move *jobs = device_copy(&job, sizeof(job));
        assert_int_equal(kvc_cuda_clear(&c->queue, &c->cache, jobs, 1), KVC_OK);
        device_read(c, c->cache.memory, got, 2 * (size_t)layout.n_bytes);
        kvc_clear_page_ref(NULL, &layout, want);
        assert_memory_equal(got, want, layout.n_bytes);
        assert_true(device_untouched(got + layout.n_bytes, layout.n_bytes));
        device_free(jobs);
        device_cache_free(c);
        free(want);
        free(got);
    }
}

/* Fault I4: a device that has no image of the kernel; and an error that stays behind would fail
 * somebody else's call. */
static void a_launch_that_fails_says_so_once(void **state)
{
    const struct kvc_page_layout layout = kvc_page_layout_make(
        64, 64, KVC_INT8, KVC_SCALE_TOKEN, KVC_INT8, KVC_SCALE_TOKEN, false, KVC_PAGE_ROWS);
    struct device_cache *c = device_cache_new(&layout, 1, layout.n_bytes);
    const struct kvc_device_move job = {.to = 0, .layout = 0};
    struct kvc_device_move *jobs = device_copy(&job, sizeof(job));
    (void)state;
    emu_fail(EMU_FAIL_LAUNCH_IMAGE, 1);
    assert_int_equal(kvc_cuda_clear(&c->queue, &c->cache, jobs, 1), KVC_E_DEVICE);
    assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
    assert_int_equal(kvc_cuda_clear(&c->queue, &c->cache, jobs, 1), KVC_OK);
    device_free(jobs);
    device_cache_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_are_sealed_as_the_reference_seals_them),
        cmocka_unit_test(rows_move_bit_for_bit),
        cmocka_unit_test(pages_are_cleared_as_the_reference_clears_them),
        cmocka_unit_test(a_launch_that_fails_says_so_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
