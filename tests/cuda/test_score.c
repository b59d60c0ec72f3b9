/* Scores of rows by kept queries, on a device: bit for bit those of the reference. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device_cache.h"
#include "score.h"

enum { HEADS = 2, LAYERS = 2, PAIRS = HEADS * LAYERS, ROW_ENTRIES = 6, MAX_ROWS = 40, LAYER = 1 };

static uint64_t seed = 17;

struct scene {
    struct kvc_page_layout layouts[4]; /* the strip, unsealed, sealed, merged rows */
    struct kvc_device_entry entries[PAIRS][ROW_ENTRIES];
    struct device_cache *device;
    struct kvc_device_probes probes;
    uint8_t *memory; /* what the device has */
    size_t n_bytes;
    int32_t n_slots;
    float *q, *shift; /* [HEADS][n_rows] rows */
    int64_t ordinals[MAX_ROWS];
    void *kept[8];
    size_t n_kept;
};

static void *keep(struct scene *s, void *memory)
{
    return s->kept[s->n_kept++] = memory;
}

/* A page of random codes: parameters are halves that make sense, scales of both signs. */
static void fill_page(const struct kvc_page_layout *layout, int32_t first, uint8_t *page)
{
    uint16_t *halves = (uint16_t *)(void *)page;
    for (uint32_t i = 0; i < layout->n_bytes; i++)
        page[i] = (uint8_t)rng_below(&seed, 256);
    if (layout->k_format == KVC_F16)
        for (uint32_t i = 0; i < layout->v_codes / 2; i++)
            halves[i] = kvc_half_from_float(2 * rng_unit(&seed));
    for (uint32_t i = layout->k_params / 2; i < layout->v_params / 2; i++)
        halves[i] = kvc_half_from_float(0.03f * rng_unit(&seed));
    if (layout->k_format != KVC_F16 && layout->k_scale == KVC_SCALE_HEAD)
        memcpy(page + layout->k_params, &(float){0.01f}, sizeof(float));
    int32_t ordinal = first;
    for (uint32_t r = 0; r < KVC_PAGE_ROWS && layout->ordinals; r++) {
        memcpy(page + layout->ordinals + 4 * r, &ordinal, sizeof(ordinal));
        ordinal += 1 + (int32_t)rng_below(&seed, 3);
    }
    for (uint32_t r = 0; r < KVC_PAGE_ROWS && layout->groups; r++)
        memcpy(page + layout->groups + 4 * r, &(float){rng_unit(&seed)}, sizeof(float));
}

static void make_layouts(struct scene *s, int d)
{
    static const struct {
        uint8_t format, scale;
    } kinds[] = {{KVC_INT8, KVC_SCALE_TOKEN},   {KVC_INT8, KVC_SCALE_HEAD},
                 {KVC_INT8, KVC_SCALE_CHANNEL}, {KVC_INT4, KVC_SCALE_TOKEN},
                 {KVC_INT4, KVC_SCALE_CHANNEL}, {KVC_INT6, KVC_SCALE_TOKEN},
                 {KVC_F16, KVC_SCALE_TOKEN}};
    const size_t i = rng_below(&seed, sizeof(kinds) / sizeof(*kinds));
    s->layouts[0] = kvc_page_layout_make(d, 8, KVC_F16, 0, KVC_F16, 0, true, 4);
    s->layouts[1] = kvc_page_layout_make(d, 8, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
    s->layouts[2] = kvc_page_layout_make(d, 8, kinds[i].format, kinds[i].scale, KVC_INT8,
                                         KVC_SCALE_TOKEN, false, KVC_PAGE_ROWS);
    s->layouts[3] = s->layouts[2];
    s->layouts[3].ordinals = s->layouts[2].n_bytes;
    s->layouts[3].groups = s->layouts[3].ordinals + KVC_PAGE_ROWS * 4;
    s->layouts[3].n_bytes = s->layouts[3].groups + 640;
}

static void scene_open(struct scene *s, int d, float softcap, int64_t window)
{
    memset(s, 0, sizeof(*s));
    make_layouts(s, d);
    s->n_slots = 1 + (int32_t)rng_below(&seed, ROW_ENTRIES);
    const int32_t n_tokens = 4 + KVC_PAGE_ROWS * (s->n_slots - 1);
    for (int pair = 0; pair < PAIRS; pair++)
        for (int slot = 0; slot < s->n_slots; slot++) {
            struct kvc_device_entry *e = &s->entries[pair][slot];
            e->layout = slot == 0 ? 0 : (uint8_t)(1 + rng_below(&seed, 3));
            e->page = s->n_bytes;
            e->first = slot ? 4 + (slot - 1) * KVC_PAGE_ROWS : 0;
            e->n_rows = slot ? KVC_PAGE_ROWS : 4;
            e->live = slot == 0                  ? 15
                      : rng_below(&seed, 6) == 0 ? 0
                                                 : rng_next(&seed) | rng_next(&seed);
            s->n_bytes += s->layouts[e->layout].n_bytes;
        }
    s->memory = malloc(s->n_bytes);
    for (int pair = 0; pair < PAIRS; pair++)
        for (int slot = 0; slot < s->n_slots; slot++)
            fill_page(&s->layouts[s->entries[pair][slot].layout], s->entries[pair][slot].first,
                      s->memory + s->entries[pair][slot].page);
    s->device = device_cache_new(s->layouts, 4, s->n_bytes);
    device_write(s->device, 0, s->memory, s->n_bytes);
    device_cache_entries(s->device, s->entries[0], PAIRS, HEADS, ROW_ENTRIES, n_tokens, s->n_slots);
    struct kvc_device_probes *p = &s->probes;
    *p = (struct kvc_device_probes){.cache = s->device->cache,
                                    .layer = LAYER,
                                    .n_rows = 1 + (uint32_t)rng_below(&seed, MAX_ROWS),
                                    .d_k = (uint32_t)d,
                                    .scale = 0.3f,
                                    .softcap = softcap,
                                    .window = window};
    const size_t stride = kvc_attend_stride((size_t)d), n = (size_t)HEADS * p->n_rows;
    s->q = calloc(n * stride, sizeof(float));
    s->shift = rng_below(&seed, 2) ? malloc(n * sizeof(float)) : NULL;
    for (size_t r = 0; r < n; r++) {
        for (size_t c = 0; c < (size_t)d; c++)
            s->q[r * stride + c] = 3 * rng_unit(&seed);
        if (s->shift)
            s->shift[r] = rng_unit(&seed);
    }
    for (uint32_t r = 0; r < p->n_rows; r++)
        s->ordinals[r] = (int64_t)rng_below(&seed, (size_t)n_tokens);
    p->q = keep(s, device_copy(s->q, n * stride * sizeof(float)));
    p->shift = s->shift ? keep(s, device_copy(s->shift, n * sizeof(float))) : NULL;
    p->ordinals = keep(s, device_copy(s->ordinals, sizeof(s->ordinals)));
}

static void scene_close(struct scene *s)
{
    for (size_t i = 0; i < s->n_kept; i++)
        device_free(s->kept[i]);
    device_cache_free(s->device);
    free(s->memory);
    free(s->q);
    free(s->shift);
}

/* What the rows first ... first + n - 1 of a head see of an entry, and their logits, [n][64]. */
static bool logits(const struct scene *s, int head, int slot, uint32_t first, uint32_t n,
                   uint64_t *masks, float *z)
{
    const struct kvc_device_probes *p = &s->probes;
    const struct kvc_device_entry *e = &s->entries[LAYER * HEADS + head][slot];
    const struct kvc_page_layout *layout = &s->layouts[e->layout];
    const uint8_t *page = s->memory + e->page;
    const size_t d = p->d_k, stride = kvc_attend_stride(d);
    float keys[KVC_MAX_HEAD_DIM] = {0};
    uint64_t any = 0;
    for (uint32_t r = 0; r < n; r++) {
        const int64_t at = s->ordinals[first + r];
        masks[r] = 0;
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t++) {
            int32_t ordinal = e->first + (int32_t)t;
            if (layout->ordinals)
                memcpy(&ordinal, page + layout->ordinals + 4 * t, sizeof(ordinal));
            if (ordinal <= at && (p->window == 0 || ordinal > at - p->window))
                masks[r] |= e->live & UINT64_C(1) << t;
        }
        any |= masks[r];
    }
    for (uint32_t t = 0; t < KVC_PAGE_ROWS && any; t++) {
        if (!(any >> t & 1))
            continue;
        kvc_read_page_ref(NULL, layout, page, t, 1, keys, stride, NULL, 0);
        for (uint32_t r = 0; r < n; r++) {
            const size_t row = (size_t)head * p->n_rows + first + r;
            float bias = 0, dot;
            kvc_dot_rows_ref(NULL, s->q + row * stride, 1, keys, 1, d, &dot, 1);
            dot = dot * p->scale + (s->shift ? s->shift[row] : 0.0f);
            if (p->softcap > 0)
                dot = p->softcap * tanhf(dot / p->softcap);
            if (layout->groups)
                memcpy(&bias, page + layout->groups + 4 * t, sizeof(bias));
            z[r * KVC_PAGE_ROWS + t] = layout->groups ? dot + bias : dot;
        }
    }
    return any != 0;
}

static void scores_are_those_of_the_reference(void **state)
{
    static const int sizes[] = {1, 8, 40, 64, 80, 128, 256};
    (void)state;
    for (int i = 0; i < 40; i++) {
        struct scene s;
        scene_open(&s, sizes[i % 7], i % 3 == 1 ? 5.0f : 0, i % 4 == 2 ? 70 : 0);
        const size_t n = (size_t)HEADS * s.probes.n_rows;
        const size_t n_mass = (size_t)HEADS * ROW_ENTRIES * KVC_PAGE_ROWS;
        const float weight = 1.0f / (float)s.probes.n_rows;
        float *lse = malloc(n * sizeof(float)), *mass = malloc(n_mass * sizeof(float));
        float *device_lse = keep(&s, device_copy(lse, n * sizeof(float)));
        float *device_mass = keep(&s, device_copy(mass, n_mass * sizeof(float)));
        const struct kvc_queue *queue = &s.device->queue;
        assert_int_equal(kvc_cuda_probe_lse(queue, &s.probes, device_lse), KVC_OK);
        assert_int_equal(kvc_cuda_probe_mass(queue, &s.probes, device_lse, weight, device_mass),
                         KVC_OK);
        device_read(s.device, device_lse, lse, n * sizeof(float));
        device_read(s.device, device_mass, mass, n_mass * sizeof(float));
        for (int head = 0; head < HEADS; head++) {
            float want[ROW_ENTRIES * KVC_PAGE_ROWS] = {0}, z[KVC_TILE_ROWS * KVC_PAGE_ROWS];
            for (uint32_t first = 0; first < s.probes.n_rows; first += KVC_TILE_ROWS) {
                const uint32_t left = s.probes.n_rows - first;
                const uint32_t rows = left < KVC_TILE_ROWS ? left : KVC_TILE_ROWS;
                float m[KVC_TILE_ROWS], l[KVC_TILE_ROWS] = {0}, row_lse[KVC_TILE_ROWS];
                float weights[KVC_TILE_ROWS];
                uint64_t masks[KVC_TILE_ROWS];
                for (uint32_t r = 0; r < KVC_TILE_ROWS; r++) {
                    m[r] = -INFINITY;
                    weights[r] = weight;
                }
                for (int slot = 0; slot < s.n_slots; slot++)
                    if (logits(&s, head, slot, first, rows, masks, z))
                        kvc_lse_block_ref(NULL, z, masks, rows, m, l);
                for (uint32_t r = 0; r < rows; r++) {
                    row_lse[r] = m[r] + logf(l[r]);
                    assert_memory_equal(&lse[(size_t)head * s.probes.n_rows + first + r],
                                        &row_lse[r], sizeof(float));
                }
                for (int slot = 0; slot < s.n_slots; slot++) {
                    float block[KVC_PAGE_ROWS] = {0};
                    if (!logits(&s, head, slot, first, rows, masks, z))
                        continue;
                    kvc_mass_block_ref(NULL, z, masks, row_lse, weights, rows, block);
                    for (int t = 0; t < KVC_PAGE_ROWS; t++)
                        want[slot * KVC_PAGE_ROWS + t] += block[t];
                }
            }
            assert_memory_equal(mass + (size_t)head * ROW_ENTRIES * KVC_PAGE_ROWS, want,
                                (size_t)s.n_slots * KVC_PAGE_ROWS * sizeof(float));
        }
        free(lse);
        free(mass);
        scene_close(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(scores_are_those_of_the_reference)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
