/* What lies around attention on a device: queries that come, outputs that go, queries that are
 * kept. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device_cache.h"
#include "queries.h"

enum { KV_HEADS = 2, LAYERS = 2, PAIRS = KV_HEADS * LAYERS, MAX_D = 512 };

static uint64_t seed = 3;

struct scene {
    struct device_cache *device;
    struct kvc_device_call call;
    struct kvc_device_transform transform;
    float *scale, *shift; /* [PAIRS][stride], or NULL */
    size_t n_rows, n_heads, d_k, d_v;
    float *q; /* as floats, [n_rows][d_k] */
    void *memory[16];
    size_t n_memory;
};

static void *keep(struct scene *s, void *memory)
{
    return s->memory[s->n_memory++] = memory;
}

static float element(kvc_dtype dtype, const void *data, size_t i)
{
    return dtype == KVC_DTYPE_F32   ? ((const float *)data)[i]
           : dtype == KVC_DTYPE_F16 ? kvc_half_to_float(((const uint16_t *)data)[i])
                                    : kvc_bf16_to_float(((const uint16_t *)data)[i]);
}

/* Query rows of an item with gaps between tokens and heads. */
static void add_item(struct scene *s, int32_t i)
{
    struct kvc_device_item *item = &s->call.items[i];
    const size_t n_q = (size_t)s->call.n_q;
    item->seq = 0;
    item->q_dtype = (kvc_dtype)rng_below(&seed, 3);
    item->out_dtype = (kvc_dtype)rng_below(&seed, 3);
    item->q_head_stride = s->d_k + rng_below(&seed, 3);
    item->q_token_stride = s->n_heads * item->q_head_stride + rng_below(&seed, 3);
    item->out_head_stride = s->d_v + rng_below(&seed, 3);
    item->out_token_stride = s->n_heads * item->out_head_stride;
    const size_t n = n_q * item->q_token_stride, n_out = n_q * item->out_token_stride;
    float *floats = malloc(n * sizeof(float));
    uint16_t *halves = malloc(n * sizeof(uint16_t));
    for (size_t e = 0; e < n; e++) {
        floats[e] = 4 * rng_unit(&seed);
        halves[e] = item->q_dtype == KVC_DTYPE_F16 ? kvc_half_from_float(floats[e])
                                                   : kvc_bf16_from_float(floats[e]);
    }
    const void *rows = item->q_dtype == KVC_DTYPE_F32 ? (const void *)floats : halves;
    for (size_t t = 0; t < n_q; t++)
        for (size_t h = 0; h < s->n_heads; h++)
            for (size_t c = 0; c < s->d_k; c++)
                s->q[(((size_t)i * n_q + t) * s->n_heads + h) * s->d_k + c] = element(
                    item->q_dtype, rows, t * item->q_token_stride + h * item->q_head_stride + c);
    item->q = keep(s, device_copy(rows, n * (item->q_dtype == KVC_DTYPE_F32 ? 4 : 2)));
    memset(floats, 0xa5, n * sizeof(float));
    floats = realloc(floats, n_out * sizeof(float));
    memset(floats, 0xa5, n_out * sizeof(float));
    item->out = keep(s, device_copy(floats, n_out * (item->out_dtype == KVC_DTYPE_F32 ? 4 : 2)));
    free(floats);
    free(halves);
}

static void scene_open(struct scene *s, size_t d_k, size_t d_v, bool turned)
{
    const struct kvc_page_layout none = {0};
    const struct kvc_device_entry entry = {0};
    const size_t stride = kvc_attend_stride(d_k);
    memset(s, 0, sizeof(*s));
    s->device = device_cache_new(&none, 1, 128);
    device_cache_entries(s->device, &entry, 1, KV_HEADS, 1, 40, 1);
    s->d_k = d_k;
    s->d_v = d_v;
    s->transform = (struct kvc_device_transform){.block_in = 1, .block_k = 1, .block_v = 1};
    s->call = (struct kvc_device_call){.cache = s->device->cache,
                                       .n_items = 2,
                                       .layer = 1,
                                       .n_q = 1 + (int32_t)rng_below(&seed, 6),
                                       .d_k = (uint32_t)d_k,
                                       .d_v = (uint32_t)d_v,
                                       .scale = 0.125f};
    s->call.cache.group = 1 + (int32_t)rng_below(&seed, 4);
    s->call.cache.n_pairs = PAIRS;
    s->n_heads = (size_t)(KV_HEADS * s->call.cache.group);
    s->n_rows = 2 * (size_t)s->call.n_q * s->n_heads;
    s->q = malloc(s->n_rows * d_k * sizeof(float));
    for (int32_t i = 0; i < 2; i++)
        add_item(s, i);
    if (!turned)
        return;
    s->transform.changes_k = true;
    s->transform.changes_v = rng_below(&seed, 2);
    s->transform.block_in = rng_below(&seed, 2) ? (uint32_t)(d_k & (~d_k + 1)) : 1;
    s->transform.block_k = (uint32_t)(d_k & (~d_k + 1));
    s->transform.block_v = (uint32_t)(d_v & (~d_v + 1));
    if (rng_below(&seed, 3) == 0)
        return;
    s->scale = calloc(PAIRS * stride, sizeof(float));
    s->shift = calloc(PAIRS * stride, sizeof(float));
    for (size_t i = 0; i < PAIRS * stride; i++) {
        s->scale[i] = 1.5f + rng_unit(&seed);
        s->shift[i] = rng_unit(&seed);
    }
    s->transform.scale = keep(s, device_copy(s->scale, PAIRS * stride * sizeof(float)));
    s->transform.shift = keep(s, device_copy(s->shift, PAIRS * stride * sizeof(float)));
}

static void scene_close(struct scene *s)
{
    for (size_t i = 0; i < s->n_memory; i++)
        device_free(s->memory[i]);
    device_cache_free(s->device);
    free(s->q);
    free(s->scale);
    free(s->shift);
}

/* H of a row. */
static void rotate(float *x, size_t d, uint32_t block)
{
    const struct kvc_rows row = {x, KVC_DTYPE_F32, d, 1, d};
    const struct kvc_row_transform h = {.block = block};
    if (block > 1)
        kvc_transform_rows_ref(NULL, &row, &h, x, d, d);
}

static void queries_come_turned_as_keys_are(void **state)
{
    static const size_t sizes[] = {1, 8, 33, 64, 80, 128, 256, 512};
    (void)state;
    for (int i = 0; i < 24; i++) {
        struct scene s;
        scene_open(&s, sizes[i % 8], sizes[(i + 3) % 8], i % 3 != 0);
        const size_t stride = kvc_attend_stride(s.d_k);
        float *rows = malloc(s.n_rows * stride * sizeof(float));
        float *shift = malloc(s.n_rows * sizeof(float)), want[MAX_D];
        float *on_device = keep(&s, device_copy(rows, s.n_rows * stride * sizeof(float)));
        float *device_shift = keep(&s, device_copy(shift, s.n_rows * sizeof(float)));
        assert_int_equal(
            kvc_cuda_load_queries(&s.device->queue, &s.call, &s.transform, on_device, device_shift),
            KVC_OK);
        device_read(s.device, on_device, rows, s.n_rows * stride * sizeof(float));
        device_read(s.device, device_shift, shift, s.n_rows * sizeof(float));
        for (size_t r = 0; r < s.n_rows; r++) {
            const size_t head = r % s.n_heads / (size_t)s.call.cache.group;
            const size_t at = (KV_HEADS + head) * stride;
            float dot = 0;
            memcpy(want, s.q + r * s.d_k, s.d_k * sizeof(float));
            rotate(want, s.d_k, s.transform.block_in);
            for (size_t c = 0; c < s.d_k && s.scale; c++)
                want[c] *= s.scale[at + c];
            rotate(want, s.d_k, s.transform.block_k);
            memset(want + s.d_k, 0, (stride - s.d_k) * sizeof(float));
            if (s.shift) {
                memset(s.shift + at + s.d_k, 0, (stride - s.d_k) * sizeof(float));
                kvc_dot_rows_ref(NULL, want, 1, s.shift + at, 1, s.d_k, &dot, 1);
            }
            assert_memory_equal(rows + r * stride, want, s.d_k * sizeof(float));
            for (size_t c = s.d_k; c < stride; c++)
                assert_true(rows[r * stride + c] == 0);
            assert_true(shift[r] == 0.125f * dot);
        }
        free(rows);
        free(shift);
        scene_close(&s);
    }
}

static void outputs_go_back_to_where_items_want_them(void **state)
{
    static const size_t sizes[] = {1, 8, 33, 64, 80, 128, 256, 512};
    (void)state;
    for (int i = 0; i < 24; i++) {
        struct scene s;
        scene_open(&s, sizes[(i + 3) % 8], sizes[i % 8], i % 3 != 0);
        const size_t stride = kvc_attend_stride(s.d_v), n_q = (size_t)s.call.n_q;
        float *rows = calloc(s.n_rows * stride, sizeof(float)), want[MAX_D];
        for (size_t e = 0; e < s.n_rows * stride; e++)
            rows[e] = rng_unit(&seed);
        float *on_device = keep(&s, device_copy(rows, s.n_rows * stride * sizeof(float)));
        assert_int_equal(kvc_cuda_store_outputs(&s.device->queue, &s.call, &s.transform, on_device),
                         KVC_OK);
        for (size_t item = 0; item < 2; item++) {
            const struct kvc_device_item *to = &s.call.items[item];
            const size_t size = to->out_dtype == KVC_DTYPE_F32 ? 4 : 2;
            const size_t n = n_q * to->out_token_stride;
            uint8_t *got = malloc(n * size);
            device_read(s.device, to->out, got, n * size);
            for (size_t r = 0; r < n_q * s.n_heads; r++) {
                const size_t at =
                    r / s.n_heads * to->out_token_stride + r % s.n_heads * to->out_head_stride;
                memcpy(want, rows + (item * n_q * s.n_heads + r) * stride, s.d_v * sizeof(float));
                if (s.transform.changes_v)
                    rotate(want, s.d_v, s.transform.block_v);
                for (size_t c = 0; c < s.d_v; c++) {
                    const uint16_t half = to->out_dtype == KVC_DTYPE_F16
                                              ? kvc_half_from_float(want[c])
                                              : kvc_bf16_from_float(want[c]);
                    assert_memory_equal(got + (at + c) * size,
                                        size == 4 ? (const void *)&want[c] : &half, size);
                }
                assert_true(device_untouched(got + (at + s.d_v) * size,
                                             (to->out_head_stride - s.d_v) * size));
            }
            free(got);
        }
        free(rows);
        scene_close(&s);
    }
}

static void the_last_queries_are_kept_by_their_ordinals(void **state)
{
    enum { KEPT = 4 };
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct scene s;
        scene_open(&s, 40, 8, i % 2);
        const size_t row = s.n_heads * s.d_k, n = LAYERS * KEPT * row;
        uint16_t *probes = malloc(n * sizeof(uint16_t));
        memset(probes, 0xa5, n * sizeof(uint16_t));
        uint16_t *on_device = keep(&s, device_copy(probes, n * sizeof(uint16_t)));
        s.call.n_items = 1;
        assert_int_equal(kvc_cuda_keep_probes(&s.device->queue, &s.call, on_device, LAYERS, KEPT),
                         KVC_OK);
        for (int32_t t = 0; t < s.call.n_q; t++)
            for (size_t e = 0; e < row && t >= s.call.n_q - KEPT; e++)
                probes[(KEPT + (size_t)(40 - s.call.n_q + t) % KEPT) * row + e] =
                    kvc_half_from_float(s.q[(size_t)t * row + e]);
        uint16_t *got = malloc(n * sizeof(uint16_t));
        device_read(s.device, on_device, got, n * sizeof(uint16_t));
        assert_memory_equal(got, probes, n * sizeof(uint16_t));
        free(got);
        free(probes);
        scene_close(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queries_come_turned_as_keys_are),
        cmocka_unit_test(outputs_go_back_to_where_items_want_them),
        cmocka_unit_test(the_last_queries_are_kept_by_their_ordinals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
