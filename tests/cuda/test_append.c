/* Rows that come to a cache in device memory: halves and counts as the CPU tables make them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device_cache.h"

enum { HEADS = 2, LAYERS = 2, PAIRS = HEADS * LAYERS, SINKS = 4, SLOTS = 4, MAX_ROWS = 150 };

static uint64_t seed = 5;

/* What is stored, and where: the strip, then three pages, of each pair. */
struct scene {
    int d_k, d_v;
    struct kvc_page_layout layouts[2]; /* unsealed pages, strips */
    struct kvc_device_entry entries[PAIRS][SLOTS];
    struct device_cache *device;
    uint8_t *want; /* the memory that the device should have */
    size_t n_bytes;
    struct kvc_device_append append;
    float *mean, *inverse; /* [PAIRS][stride], or NULL */
    struct kvc_store_counts counts;
};

static float random_value(void)
{
    static const float rare[] = {NAN, INFINITY, -INFINITY, 1e6f, -7e4f, 0.0f, -0.0f, 1e-9f};
    if (rng_below(&seed, 40) == 0)
        return rare[rng_below(&seed, sizeof(rare) / sizeof(*rare))];
    return rng_unit(&seed) * ldexpf(1.0f, (int)rng_below(&seed, 12) - 4);
}

static void *random_rows(kvc_dtype dtype, size_t n)
{
    float *floats = malloc(n * sizeof(float));
    uint16_t *halves = malloc(n * sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) {
        floats[i] = random_value();
        halves[i] = dtype == KVC_DTYPE_F16 ? kvc_half_from_float(floats[i])
                                           : kvc_bf16_from_float(floats[i]);
    }
    free(dtype == KVC_DTYPE_F32 ? (void *)halves : (void *)floats);
    return dtype == KVC_DTYPE_F32 ? (void *)floats : (void *)halves;
}

static void scene_open(struct scene *s, int d_k, int d_v, bool turned, int32_t n_tokens)
{
    const size_t stride = kvc_attend_stride((size_t)d_k);
    struct kvc_device_transform t = {.block_in = 1, .block_k = 1, .block_v = 1};
    memset(s, 0, sizeof(*s));
    s->d_k = d_k;
    s->d_v = d_v;
    s->layouts[0] = kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
    s->layouts[1] = kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, SINKS);
    for (int pair = 0; pair < PAIRS; pair++)
        for (int slot = 0; slot < SLOTS; slot++) {
            s->entries[pair][slot] = (struct kvc_device_entry){
                .page = s->n_bytes,
                .first = slot ? SINKS + (slot - 1) * KVC_PAGE_ROWS : 0,
                .layout = slot == 0,
            };
            s->n_bytes += s->layouts[slot == 0].n_bytes;
        }
    s->device = device_cache_new(s->layouts, 2, s->n_bytes);
    device_cache_entries(s->device, s->entries[0], PAIRS, HEADS, SLOTS, n_tokens, SLOTS);
    s->want = malloc(s->n_bytes);
    device_read(s->device, s->device->cache.memory, s->want, s->n_bytes);
    if (turned) {
        const bool comes_rotated = rng_below(&seed, 2);
        t = (struct kvc_device_transform){.block_in = comes_rotated ? (uint32_t)(d_k & -d_k) : 1,
                                          .block_k = (uint32_t)(d_k & -d_k),
                                          .block_v = (uint32_t)(d_v & -d_v),
                                          .changes_k = true,
                                          .changes_v = rng_below(&seed, 2)};
        s->mean = calloc(PAIRS * stride, sizeof(float));
        s->inverse = calloc(PAIRS * stride, sizeof(float));
        for (size_t i = 0; i < PAIRS * stride; i++) {
            s->mean[i] = rng_unit(&seed);
            s->inverse[i] = 1.5f + rng_unit(&seed);
        }
        t.mean = device_copy(s->mean, PAIRS * stride * sizeof(float));
        t.inverse = device_copy(s->inverse, PAIRS * stride * sizeof(float));
    }
    const struct kvc_device_counts none = {0};
    s->append = (struct kvc_device_append){.cache = s->device->cache,
                                           .transform = t,
                                           .counts = device_copy(&none, sizeof(none)),
                                           .open = s->layouts[0],
                                           .strip = s->layouts[1],
                                           .sinks = SINKS};
}

static void scene_close(struct scene *s)
{
    if (s->mean) {
        device_free((void *)(uintptr_t)s->append.transform.mean);
        device_free((void *)(uintptr_t)s->append.transform.inverse);
    }
    device_free(s->append.counts);
    device_cache_free(s->device);
    free(s->want);
    free(s->mean);
    free(s->inverse);
}

/* One side of one row as the CPU stores it. */
static void store_side(struct scene *s, int32_t pair, bool is_v, const void *data, kvc_dtype dtype,
                       uint16_t *to)
{
    const struct kvc_device_transform *t = &s->append.transform;
    const size_t d = (size_t)(is_v ? s->d_v : s->d_k), stride = kvc_attend_stride(d);
    const size_t padded = (d + 7) & ~(size_t)7;
    const struct kvc_rows rows = {data, dtype, d, 1, d};
    const struct kvc_row_transform first = {.block = t->block_in};
    const struct kvc_row_transform then = {
        .sub = is_v || !s->mean ? NULL : s->mean + (size_t)pair * stride,
        .mul = is_v || !s->mean ? NULL : s->inverse + (size_t)pair * stride,
        .block = is_v ? t->block_v : t->block_k};
    float x[KVC_MAX_HEAD_DIM];
    struct kvc_store_counts counts = {0};
    kvc_store_rows_ref(NULL, &rows, to, padded, padded, &s->counts);
    if (!(is_v ? t->changes_v : t->changes_k))
        return;
    const struct kvc_rows halves = {to, KVC_DTYPE_F16, padded, 1, d};
    const struct kvc_rows floats = {x, KVC_DTYPE_F32, stride, 1, d};
    kvc_load_rows_ref(NULL, &halves, x, stride, stride);
    if (!is_v && t->block_in > 1)
        kvc_transform_rows_ref(NULL, &floats, &first, x, stride, d);
    kvc_transform_rows_ref(NULL, &floats, &then, x, stride, d);
    kvc_store_rows_ref(NULL, &floats, to, padded, padded, &counts);
    s->counts.n_saturated += counts.n_nonfinite + counts.n_saturated;
}

static void check(struct scene *s)
{
    struct kvc_device_counts counts;
    uint8_t *got = malloc(s->n_bytes);
    device_read(s->device, s->device->cache.memory, got, s->n_bytes);
    device_read(s->device, s->append.counts, &counts, sizeof(counts));
    assert_memory_equal(got, s->want, s->n_bytes);
    assert_int_equal(counts.n_nonfinite, s->counts.n_nonfinite);
    assert_int_equal(counts.n_saturated, s->counts.n_saturated);
    free(got);
}

/* Tokens first ... first + n - 1 of a sequence of n_tokens, with heads and tokens apart. */
static void append(struct scene *s, int32_t layer, int32_t first, int32_t n, int32_t n_tokens)
{
    struct kvc_device_append *a = &s->append;
    const kvc_dtype dtypes[2] = {(kvc_dtype)rng_below(&seed, 3), (kvc_dtype)rng_below(&seed, 3)};
    const size_t d[2] = {(size_t)s->d_k, (size_t)s->d_v};
    void *rows[2], *device[2];
    size_t head[2], token[2];
    for (int side = 0; side < 2; side++) {
        head[side] = d[side] + rng_below(&seed, 3);
        token[side] = HEADS * head[side] + rng_below(&seed, 3);
        const size_t n_elements = (size_t)n * token[side];
        rows[side] = random_rows(dtypes[side], n_elements);
        device[side] =
            device_copy(rows[side], n_elements * (dtypes[side] == KVC_DTYPE_F32 ? 4 : 2));
    }
    a->layer = layer;
    a->n = n;
    a->from_end = n_tokens - first;
    a->k_dtype = dtypes[0];
    a->v_dtype = dtypes[1];
    a->k = device[0];
    a->v = device[1];
    a->k_token_stride = token[0];
    a->v_token_stride = token[1];
    a->k_head_stride = head[0];
    a->v_head_stride = head[1];
    assert_int_equal(kvc_cuda_append(&s->device->queue, a), KVC_OK);
    for (int32_t t = 0; t < n; t++)
        for (int32_t h = 0; h < HEADS; h++)
            for (int side = 0; side < 2; side++) {
                const int32_t pair = layer * HEADS + h, ordinal = first + t;
                const int slot = ordinal < SINKS ? 0 : 1 + (ordinal - SINKS) / KVC_PAGE_ROWS;
                const struct kvc_page_layout *layout = &s->layouts[slot == 0];
                const size_t row = (size_t)(ordinal - s->entries[pair][slot].first);
                uint8_t *page = s->want + s->entries[pair][slot].page;
                page += side ? layout->v_codes + row * layout->v_stride : row * layout->k_stride;
                const size_t at = (size_t)t * token[side] + (size_t)h * head[side];
                const char *from = rows[side];
                from += at * (dtypes[side] == KVC_DTYPE_F32 ? 4 : 2);
                store_side(s, pair, side == 1, from, dtypes[side], (uint16_t *)(void *)page);
            }
    check(s);
    for (int side = 0; side < 2; side++) {
        device_free(device[side]);
        free(rows[side]);
    }
}

static void rows_are_stored_as_the_cpu_stores_them(void **state)
{
    static const int sizes[] = {1, 8, 33, 64, 80, 96, 128, 256, 512};
    (void)state;
    for (int i = 0; i < 18; i++) {
        struct scene s;
        const int32_t n_tokens = 1 + (int32_t)rng_below(&seed, MAX_ROWS);
        const int32_t half = (int32_t)rng_below(&seed, (size_t)n_tokens);
        scene_open(&s, sizes[i % 9], sizes[(i * 5 + 3) % 9], i >= 9, n_tokens);
        for (int32_t layer = 0; layer < LAYERS; layer++) {
            if (half > 0)
                append(&s, layer, 0, half, n_tokens);
            append(&s, layer, half, n_tokens - half, n_tokens);
        }
        scene_close(&s);
    }
}

static void stored_rows_are_turned_later_as_at_once(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        struct scene now, later;
        const uint64_t start = seed;
        scene_open(&now, 64, 80, true, 70);
        append(&now, 1, 0, 70, 70);
        seed = start;
        scene_open(&later, 64, 80, true, 70);
        const struct kvc_device_transform t = later.append.transform;
        later.append.transform =
            (struct kvc_device_transform){.block_in = 1, .block_k = 1, .block_v = 1};
        append(&later, 1, 0, 70, 70);
        later.append.transform = t;
        struct kvc_device_rewrite jobs[3 * HEADS];
        for (int j = 0; j < 3 * HEADS; j++) {
            const int32_t pair = HEADS + j / 3;
            jobs[j] = (struct kvc_device_rewrite){.page = later.entries[pair][j % 3].page,
                                                  .pair = pair,
                                                  .n = j % 3 == 0   ? SINKS
                                                       : j % 3 == 1 ? 64
                                                                    : 2,
                                                  .is_strip = j % 3 == 0};
        }
        struct kvc_device_rewrite *on_device = device_copy(jobs, sizeof(jobs));
        assert_int_equal(
            kvc_cuda_rewrite(&later.device->queue, &later.append, on_device, 3 * HEADS), KVC_OK);
        memcpy(later.want, now.want, now.n_bytes);
        later.counts = now.counts;
        check(&later);
        device_free(on_device);
        scene_close(&now);
        scene_close(&later);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_stored_as_the_cpu_stores_them),
        cmocka_unit_test(stored_rows_are_turned_later_as_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
