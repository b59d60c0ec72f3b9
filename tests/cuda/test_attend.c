/* Attention on a device, and the masses it leaves: those of a reference in double precision. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "attend.h"
#include "device_cache.h"
#include "emu.h"
#include "queries.h"

enum {
    HEADS = 2,
    LAYERS = 2,
    LAYER = 1,
    PAIRS = LAYERS * HEADS,
    MAX_ITEMS = 3,
    SINKS = 4,
    N_KINDS_K = 8,
    N_KINDS_V = 5,
    N_SHAPES = 24,
    N_ROW_SCENES = 20,
    N_POISONED = 16,
    N_ALONE = 8,
    N_REPLAYS = 8,
    N_MASSES = 24
};

enum { EMPTY, UNSEALED, STRIP, SEALED, N_LAYOUTS = SEALED + 6 }; /* two families of 3 sealed */

enum size { NORMAL, SUBNORMAL, LARGE, ZERO, MIXED }; /* of parameters of pages */

struct kind {
    uint8_t format, scale;
};

static const struct kind kinds_k[N_KINDS_K] = {
    {KVC_F16, KVC_SCALE_TOKEN},    {KVC_INT8, KVC_SCALE_HEAD},  {KVC_INT8, KVC_SCALE_TOKEN},
    {KVC_INT8, KVC_SCALE_CHANNEL}, {KVC_INT4, KVC_SCALE_HEAD},  {KVC_INT4, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_SCALE_CHANNEL}, {KVC_INT6, KVC_SCALE_TOKEN},
};
static const struct kind kinds_v[N_KINDS_V] = {
    {KVC_F16, KVC_SCALE_TOKEN}, {KVC_INT8, KVC_SCALE_HEAD},  {KVC_INT8, KVC_SCALE_TOKEN},
    {KVC_INT4, KVC_SCALE_HEAD}, {KVC_INT4, KVC_SCALE_TOKEN},
};

static uint64_t seed = 23;

struct options {
    int d_k, d_v, group, n_q, n_items, row_entries;
    int k[2], v[2], n_sealed;        /* kinds; head h has sealed pages of kind h % n_sealed */
    float softcap, v_max, deviation; /* of logits */
    int64_t window;
    enum size k_size, v_size;
    bool turned_k, turned_v;
    bool plain;   /* outputs are F32 */
    bool nothing; /* head 0 has no rows */
};

struct scene {
    struct options o;
    struct device_cache *device;
    struct kvc_device_call call;
    struct kvc_device_transform transform;
    struct kvc_device_family families[3];
    struct kvc_device_masses masses;
    struct kvc_page_layout layouts[N_LAYOUTS];
    /* What the device has. */
    struct kvc_device_entry *entries;
    struct kvc_device_seq seqs[MAX_ITEMS + 1];
    uint8_t *memory;
    size_t cell, n_cells, n_seqs, n_heads;
    bool strip; /* the first entry is one */
    void *q[MAX_ITEMS];
    double sum_k, n_k;   /* squares of some elements of K */
    float *rows, *shift; /* device memory */
    void *kept[32];
    size_t n_kept;
};

/* Device memory of that many bytes. */
static void *bytes_of(struct scene *s, size_t n, int byte)
{
    void *bytes = malloc(n);
    memset(bytes, byte, n);
    s->kept[s->n_kept] = device_copy(bytes, n);
    free(bytes);
    return s->kept[s->n_kept++];
}

static size_t size_of(kvc_dtype dtype)
{
    return dtype == KVC_DTYPE_F32 ? sizeof(float) : sizeof(uint16_t);
}

static float parameter(enum size size)
{
    switch (size == MIXED ? (enum size)rng_below(&seed, MIXED) : size) {
    case SUBNORMAL: return (float)(1 + rng_below(&seed, 1023)) * 0x1p-24f;
    case LARGE: return 60000 - (float)rng_below(&seed, 30000);
    case ZERO: return 0;
    default: return 0.005f * (1.5f + rng_unit(&seed));
    }
}

static void fill_parameters(uint8_t *params, struct kind kind, uint32_t d8, enum size size)
{
    const float head = parameter(size);
    if (kind.format == KVC_F16)
        return;
    if (kind.scale == KVC_SCALE_HEAD) {
        memcpy(params, &head, sizeof(head));
        return;
    }
    for (uint32_t i = 0; i < kvc_params_size(kind.format, kind.scale, d8); i += 2) {
        const float x = parameter(size);
        const uint16_t half = kvc_half_from_float(rng_below(&seed, 2) ? x : -x);
        memcpy(params + i, &half, sizeof(half));
    }
}

/* Random codes and halves, in pads and dead rows too. */
static void fill_page(struct scene *s, const struct kvc_device_entry *e, uint8_t *page)
{
    const struct kvc_page_layout *l = &s->layouts[e->layout];
    uint16_t *halves = (uint16_t *)(void *)page;
    const uint32_t step = 1 + 2 * (uint32_t)rng_below(&seed, 2) * 18; /* odd: a permutation */
    for (uint32_t i = 0; i < l->n_bytes; i++)
        page[i] = (uint8_t)rng_next(&seed);
    for (uint32_t i = 0; i < l->v_codes / 2 && l->k_format == KVC_F16; i++)
        halves[i] = kvc_half_from_float(2 * rng_unit(&seed));
    for (uint32_t i = l->v_codes / 2; i < l->k_params / 2 && l->v_format == KVC_F16; i++)
        halves[i] = kvc_half_from_float(s->o.v_max * rng_unit(&seed));
    fill_parameters(page + l->k_params, (struct kind){l->k_format, l->k_scale}, l->d8_k,
                    s->o.k_size);
    fill_parameters(page + l->v_params, (struct kind){l->v_format, l->v_scale}, l->d8_v,
                    s->o.v_size);
    for (uint32_t t = 0; t < KVC_PAGE_ROWS && l->ordinals; t++) {
        const int32_t there = e->first + 2 * (int32_t)(t * step % KVC_PAGE_ROWS);
        const int32_t ordinal = e->live >> t & 1 ? there : (int32_t)rng_below(&seed, 3) - 1;
        memcpy(page + l->ordinals + 4 * t, &ordinal, sizeof(ordinal));
    }
    for (uint32_t t = 0; t < KVC_PAGE_ROWS && l->groups; t++)
        memcpy(page + l->groups + 4 * t, &(float){2 * rng_unit(&seed)}, sizeof(float));
    for (uint32_t c = 0; c < l->d_k && (e->live & 1); c++) {
        const double k = kvc_page_k(l, page, 0, c);
        s->sum_k += k * k;
        s->n_k++;
    }
}

/* An entry and its page, at the end of a cell. */
static void fill_entry(struct scene *s, int head, int slot, size_t cell, struct kvc_device_entry *e)
{
    const uint8_t sealed = (uint8_t)(SEALED + head % s->o.n_sealed * 3 + (int)rng_below(&seed, 3));
    const size_t what = s->o.nothing && head == 0 ? rng_below(&seed, 2) : rng_below(&seed, 12);
    const uint64_t random = rng_next(&seed);
    memset(e, 0, sizeof(*e));
    e->layout = slot == 0 && s->strip ? STRIP : rng_below(&seed, 3) ? sealed : UNSEALED;
    e->page = UINT64_C(1) << 60; /* none */
    if (what == 0)
        return;
    e->page = (cell + 1) * s->cell - s->layouts[e->layout].n_bytes;
    e->first = slot == 0 ? 0 : (s->strip ? SINKS : KVC_PAGE_ROWS) + (slot - 1) * KVC_PAGE_ROWS;
    e->n_rows = e->layout == STRIP ? SINKS : KVC_PAGE_ROWS;
    if (e->layout == UNSEALED && rng_below(&seed, 2))
        e->n_rows = (uint8_t)(1 + rng_below(&seed, KVC_PAGE_ROWS));
    e->live = what == 1   ? 0
              : what < 6  ? ~UINT64_C(0)
              : what < 9  ? random | rng_next(&seed)
              : what < 11 ? random
                          : UINT64_C(1) << random % e->n_rows;
    e->live &= ~UINT64_C(0) >> (KVC_PAGE_ROWS - e->n_rows);
    e->absmax_k = e->absmax_v = 1;
    fill_page(s, e, s->memory + e->page);
}

static void fill_queries(struct scene *s, int32_t i)
{
    const struct kvc_device_item *item = &s->call.items[i];
    const size_t n = (size_t)s->o.n_q * item->q_token_stride;
    for (size_t e = 0; e < n; e++) {
        const float x = 2 * rng_unit(&seed);
        if (item->q_dtype == KVC_DTYPE_F32)
            ((float *)s->q[i])[e] = x;
        else
            ((uint16_t *)s->q[i])[e] =
                item->q_dtype == KVC_DTYPE_F16 ? kvc_half_from_float(x) : kvc_bf16_from_float(x);
    }
}

/* Everything a captured launch may find changed: what is not an entry or a page is garbage. */
static void fill(struct scene *s)
{
    size_t *cells = malloc(s->n_cells * sizeof(*cells)), next = 0;
    const size_t n_entries = s->n_seqs * PAIRS * (size_t)s->o.row_entries;
    for (size_t i = 0; i < s->n_cells; i++) {
        const size_t j = rng_below(&seed, i + 1);
        cells[i] = cells[j];
        cells[j] = i;
    }
    memset(s->entries, 0xa5, n_entries * sizeof(*s->entries));
    memset(s->memory, 0xff, s->cell * s->n_cells);
    for (int32_t i = 0; i < s->o.n_items; i++) {
        struct kvc_device_seq *seq = &s->seqs[s->call.items[i].seq];
        const size_t most = (size_t)s->o.row_entries;
        seq->n_slots = (int32_t)(rng_below(&seed, 2) ? most : 1 + rng_below(&seed, most));
        seq->n_tokens = seq->n_slots * KVC_PAGE_ROWS - (int32_t)rng_below(&seed, 100);
        if (seq->n_tokens < s->o.n_q)
            seq->n_tokens = s->o.n_q + (int32_t)rng_below(&seed, 10);
        seq->score_base = seq->n_tokens / 2;
        for (int head = 0; head < HEADS; head++)
            for (int slot = 0; slot < seq->n_slots; slot++) {
                const size_t row = (size_t)s->call.items[i].seq * PAIRS + LAYER * HEADS;
                fill_entry(s, head, slot, cells[next++],
                           &s->entries[(row + (size_t)head) * most + (size_t)slot]);
            }
        fill_queries(s, i);
    }
    free(cells);
}

static void to_device(const void *to, const void *from, size_t n)
{
    assert_int_equal(cudaMemcpy((void *)(uintptr_t)to, from, n, cudaMemcpyHostToDevice),
                     cudaSuccess);
}

static void upload(const struct scene *s)
{
    const size_t n_entries = s->n_seqs * PAIRS * (size_t)s->o.row_entries;
    device_write(s->device, 0, s->memory, s->cell * s->n_cells);
    to_device(s->device->cache.entries, s->entries, n_entries * sizeof(*s->entries));
    to_device(s->device->cache.seqs, s->seqs, s->n_seqs * sizeof(*s->seqs));
    for (int32_t i = 0; i < s->o.n_items; i++) {
        const struct kvc_device_item *item = &s->call.items[i];
        to_device(item->q, s->q[i],
                  (size_t)s->o.n_q * item->q_token_stride * size_of(item->q_dtype));
    }
}

static void make_families(struct scene *s)
{
    const int d_k = s->o.d_k, d_v = s->o.d_v, turn = (int)rng_below(&seed, 3);
    struct kvc_page_layout *l = s->layouts;
    l[UNSEALED] = kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, KVC_PAGE_ROWS);
    l[STRIP] = kvc_page_layout_make(d_k, d_v, KVC_F16, 0, KVC_F16, 0, true, SINKS);
    for (int f = 0; f < s->o.n_sealed; f++) {
        const struct kind k = kinds_k[s->o.k[f]], v = kinds_v[s->o.v[f]];
        struct kvc_page_layout *plain = &l[SEALED + 3 * f], *moved = plain + 1, *merged = plain + 2;
        *plain = kvc_page_layout_make(d_k, d_v, k.format, k.scale, v.format, v.scale, false,
                                      KVC_PAGE_ROWS);
        *moved = *merged = *plain;
        moved->ordinals = merged->ordinals = plain->n_bytes;
        merged->groups = moved->n_bytes = plain->n_bytes + KVC_PAGE_ROWS * 4;
        merged->n_bytes = merged->groups + 640;
    }
    s->call.n_families = 1 + s->o.n_sealed;
    for (int f = 0; f < s->call.n_families; f++) {
        struct kvc_device_family *to = &s->families[(f + turn) % s->call.n_families];
        const int first = f ? SEALED + 3 * (f - 1) : UNSEALED;
        to->n = f ? 3 : 2;
        for (int i = 0; i < to->n; i++) {
            to->index[i] = (uint8_t)(first + (i + turn) % to->n);
            to->layout[i] = l[to->index[i]];
        }
    }
    for (int i = 0; i < N_LAYOUTS; i++)
        s->cell = l[i].n_bytes > s->cell ? l[i].n_bytes : s->cell;
}

static void make_item(struct scene *s, int32_t i)
{
    struct kvc_device_item *item = &s->call.items[i];
    const size_t n_q = (size_t)s->o.n_q;
    item->seq = s->o.n_items - i;
    item->q_dtype = (kvc_dtype)rng_below(&seed, 3);
    item->out_dtype = s->o.plain ? KVC_DTYPE_F32 : (kvc_dtype)rng_below(&seed, 3);
    item->q_head_stride = (size_t)s->o.d_k + rng_below(&seed, 3);
    item->q_token_stride = s->n_heads * item->q_head_stride + rng_below(&seed, 3);
    item->out_head_stride = (size_t)s->o.d_v + rng_below(&seed, 3);
    item->out_token_stride = s->n_heads * item->out_head_stride + rng_below(&seed, 3);
    s->q[i] = malloc(n_q * item->q_token_stride * sizeof(float));
    item->q = bytes_of(s, n_q * item->q_token_stride * size_of(item->q_dtype), 0);
    item->out = bytes_of(s, n_q * item->out_token_stride * size_of(item->out_dtype), 0xa5);
    if (rng_below(&seed, 4))
        item->lse = bytes_of(s, n_q * s->n_heads * sizeof(float), 0xa5);
}

static void make_transform(struct scene *s)
{
    const size_t stride = kvc_attend_stride((size_t)s->o.d_k), n = PAIRS * stride;
    const uint32_t d_k = s->call.d_k, d_v = s->call.d_v;
    float *scale = calloc(n, sizeof(float)), *shift = calloc(n, sizeof(float));
    s->transform = (struct kvc_device_transform){.block_in = 1, .block_k = 1, .block_v = 1};
    for (size_t i = 0; i < n; i++) {
        scale[i] = i % stride < d_k ? 1.5f + rng_unit(&seed) : 0;
        shift[i] = i % stride < d_k ? rng_unit(&seed) : 0;
    }
    if (s->o.turned_k) {
        s->transform.changes_k = true;
        s->transform.block_k = d_k & (~d_k + 1);
        s->transform.scale = s->kept[s->n_kept++] = device_copy(scale, n * sizeof(float));
        s->transform.shift = s->kept[s->n_kept++] = device_copy(shift, n * sizeof(float));
    }
    if (s->o.turned_v) {
        s->transform.changes_v = true;
        s->transform.block_v = d_v & (~d_v + 1);
    }
    free(scale);
    free(shift);
}

static void scene_open(struct scene *s, const struct options *o)
{
    memset(s, 0, sizeof(*s));
    s->o = *o;
    s->n_heads = (size_t)(HEADS * o->group);
    s->strip = rng_below(&seed, 4);
    s->n_seqs = (size_t)o->n_items + 1;
    s->n_cells = (size_t)(o->n_items * HEADS * o->row_entries);
    struct kvc_device_call *call = &s->call;
    *call = (struct kvc_device_call){.n_items = o->n_items,
                                     .layer = LAYER,
                                     .n_q = o->n_q,
                                     .d_k = (uint32_t)o->d_k,
                                     .d_v = (uint32_t)o->d_v,
                                     .softcap = o->softcap,
                                     .window = o->window};
    make_families(s);
    make_transform(s);
    for (int32_t i = 0; i < o->n_items; i++)
        make_item(s, i);
    const size_t n_entries = s->n_seqs * PAIRS * (size_t)o->row_entries;
    s->entries = malloc(n_entries * sizeof(*s->entries));
    s->memory = malloc(s->cell * s->n_cells);
    fill(s);
    s->device = device_cache_new(s->layouts, N_LAYOUTS, s->cell * s->n_cells);
    struct kvc_device_cache *cache = &s->device->cache;
    cache->n_pairs = PAIRS;
    cache->n_kv_heads = HEADS;
    cache->group = o->group;
    cache->row_entries = o->row_entries;
    cache->entries = device_copy(s->entries, n_entries * sizeof(*s->entries));
    cache->seqs = device_copy(s->seqs, s->n_seqs * sizeof(*s->seqs));
    call->cache = *cache;
    call->n_blocks = kvc_device_blocks(cache, o->n_q);
    const size_t rows = (size_t)o->n_q * s->n_heads, n = (size_t)o->n_items * rows;
    const size_t n_parts = n * (size_t)(call->n_blocks * call->n_families);
    call->parts = bytes_of(s, n_parts * (2 + kvc_attend_stride(call->d_v)) * sizeof(float), 0xff);
    call->q_rows = s->rows = bytes_of(s, n * kvc_attend_stride(call->d_k) * sizeof(float), 0xff);
    if (o->turned_k || rng_below(&seed, 2))
        call->shift = s->shift = bytes_of(s, n * sizeof(float), 0xff);
    if (rng_below(&seed, 2))
        call->lse = bytes_of(s, n * sizeof(float), 0xff);
    /* 4 / 3 is the mean square of an element of a query. */
    const double size = sqrt(s->sum_k / (s->n_k + 1) * o->d_k * 4 / 3);
    call->scale = size > 0 ? (float)(o->deviation / size) : 1;
    upload(s);
}

static void scene_close(struct scene *s)
{
    for (size_t i = 0; i < s->n_kept; i++)
        device_free(s->kept[i]);
    device_cache_free(s->device);
    for (int i = 0; i < s->o.n_items; i++)
        free(s->q[i]);
    free(s->entries);
    free(s->memory);
}

static void attend(const struct scene *s)
{
    const struct kvc_queue *queue = &s->device->queue;
    assert_int_equal(kvc_cuda_load_queries(queue, &s->call, &s->transform, s->rows, s->shift),
                     KVC_OK);
    assert_int_equal(kvc_cuda_attend(queue, &s->call, s->families, &s->transform, &s->masses),
                     KVC_OK);
}

static const struct kvc_device_entry *entry_of(const struct scene *s, int32_t seq, int head,
                                               int slot)
{
    return &s->entries[((size_t)(seq * PAIRS + LAYER * HEADS + head)) * (size_t)s->o.row_entries +
                       (size_t)slot];
}

/* Of row t, or -1 if there is none. */
static int64_t ordinal_of(const struct scene *s, const struct kvc_device_entry *e, uint32_t t)
{
    const struct kvc_page_layout *l = &s->layouts[e->layout];
    int32_t ordinal = e->first + (int32_t)t;
    if (!(e->live >> t & 1))
        return -1;
    if (l->ordinals)
        memcpy(&ordinal, s->memory + e->page + l->ordinals + 4 * (size_t)t, sizeof(ordinal));
    return ordinal;
}

/* What an item finds for a KV head; rows that are not there have ordinal -1. */
struct view {
    size_t n;
    double *k, *v, *bias; /* [n][d_k], [n][d_v], [n] */
    int64_t *ordinal;
};

static struct view view_open(const struct scene *s, int32_t seq, int head)
{
    const size_t n = (size_t)s->seqs[seq].n_slots * KVC_PAGE_ROWS;
    const size_t d_k = s->call.d_k, d_v = s->call.d_v;
    struct view w = {n, calloc(n * d_k, sizeof(double)), calloc(n * d_v, sizeof(double)),
                     calloc(n, sizeof(double)), malloc(n * sizeof(int64_t))};
    for (size_t i = 0; i < n; i++) {
        const struct kvc_device_entry *e = entry_of(s, seq, head, (int)(i / KVC_PAGE_ROWS));
        const struct kvc_page_layout *l = &s->layouts[e->layout];
        const uint8_t *page = s->memory + e->page;
        const uint32_t t = i % KVC_PAGE_ROWS;
        float bias = 0;
        w.ordinal[i] = ordinal_of(s, e, t);
        if (w.ordinal[i] < 0)
            continue;
        for (uint32_t c = 0; c < d_k; c++)
            w.k[i * d_k + c] = kvc_page_k(l, page, t, c);
        for (uint32_t c = 0; c < d_v; c++)
            w.v[i * d_v + c] = kvc_page_v(l, page, t, c);
        if (l->groups)
            memcpy(&bias, page + l->groups + 4 * (size_t)t, sizeof(bias));
        w.bias[i] = bias;
    }
    return w;
}

static void view_close(struct view *w)
{
    free(w->k);
    free(w->v);
    free(w->bias);
    free(w->ordinal);
}

/* Logits of a query row, -INFINITY where it sees nothing, and ln sum exp of them. */
static double logits(const struct scene *s, const struct view *w, const float *q, double shift,
                     int64_t at, double *z)
{
    const size_t d = s->call.d_k;
    double most = -INFINITY, sum = 0;
    for (size_t i = 0; i < w->n; i++) {
        double dot = 0;
        z[i] = -INFINITY;
        if (w->ordinal[i] < 0 || w->ordinal[i] > at ||
            (s->o.window > 0 && w->ordinal[i] <= at - s->o.window))
            continue;
        for (size_t c = 0; c < d; c++)
            dot += (double)q[c] * w->k[i * d + c];
        dot = s->call.scale * dot + shift;
        if (s->o.softcap > 0)
            dot = s->o.softcap * tanh(dot / s->o.softcap);
        z[i] = dot + w->bias[i];
        most = z[i] > most ? z[i] : most;
    }
    for (size_t i = 0; i < w->n && most > -INFINITY; i++)
        sum += exp(z[i] - most);
    return most > -INFINITY ? most + log(sum) : most;
}

static void assert_near(double got, double want, double tolerance)
{
    if (got == want || fabs(got - want) <= tolerance)
        return;
    print_error("%.9g instead of %.9g, allowed %.3g\n", got, want, tolerance);
    fail();
}

static void assert_lse(float got, double want)
{
    assert_near(got, want, isfinite(want) ? 1e-5 * fmax(1, fabs(want)) : 0);
}

/* H of blocks of a row. */
static void rotate(double *x, size_t d, size_t block)
{
    for (size_t h = 1; h < block; h *= 2)
        for (size_t c = 0; c < d; c++)
            if (!(c & h)) {
                const double a = x[c], b = x[c + h];
                x[c] = a + b;
                x[c + h] = a - b;
            }
    for (size_t c = 0; c < d; c++)
        x[c] /= sqrt((double)block);
}

/* The output of a row. */
static void check_output(const struct scene *s, const struct view *w, const double *z, double lse,
                         kvc_dtype dtype, const uint8_t *out)
{
    double want[KVC_MAX_HEAD_DIM] = {0}, most = 0, most_v = 0, most_weight = 0;
    const size_t d = s->call.d_v;
    for (size_t i = 0; i < w->n; i++) {
        const double weight = z[i] > -INFINITY ? exp(z[i] - lse) : 0;
        most_weight = fmax(most_weight, weight);
        for (size_t c = 0; c < d && weight > 0; c++) {
            want[c] += weight * w->v[i * d + c];
            most_v = fmax(most_v, fabs(w->v[i * d + c]));
        }
    }
    if (s->o.turned_v)
        rotate(want, d, s->transform.block_v);
    for (size_t c = 0; c < d; c++)
        most = fmax(most, fabs(want[c]));
    /* A float that is a large logit moves weights between rows, if there is more than one. */
    const double moved = s->o.deviation > 100 ? 0x1p-19 * s->o.deviation * (1 - most_weight) : 0;
    for (size_t c = 0; c < d; c++) {
        uint16_t half;
        float got;
        double rounding = 0;
        memcpy(&got, out + c * size_of(dtype), size_of(dtype));
        memcpy(&half, out + c * size_of(dtype), sizeof(half));
        if (dtype != KVC_DTYPE_F32) {
            got = dtype == KVC_DTYPE_F16 ? kvc_half_to_float(half) : kvc_bf16_to_float(half);
            rounding = dtype == KVC_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
            rounding = rounding * (fabs(want[c]) + 2e-5 * most) + 0x1p-25;
        }
        assert_near(got, want[c], 2e-5 * most + moved * most_v + rounding);
    }
}

/* Whether gaps between rows of an output still have the pattern. */
static void check_gaps(const struct scene *s, const struct kvc_device_item *item, uint8_t *out)
{
    const size_t size = size_of(item->out_dtype), n = (size_t)s->o.n_q * item->out_token_stride;
    for (size_t t = 0; t < (size_t)s->o.n_q; t++)
        for (size_t h = 0; h < s->n_heads; h++)
            memset(out + (t * item->out_token_stride + h * item->out_head_stride) * size, 0xa5,
                   s->call.d_v * size);
    assert_true(device_untouched(out, n * size));
}

/* Outputs and lse of an item. */
static uint8_t *outputs_of(const struct scene *s, int32_t i, size_t *n)
{
    const struct kvc_device_item *item = &s->call.items[i];
    const size_t n_out = (size_t)s->o.n_q * item->out_token_stride * size_of(item->out_dtype);
    const size_t n_lse = item->lse ? (size_t)s->o.n_q * s->n_heads * sizeof(float) : 0;
    uint8_t *bytes = malloc(n_out + n_lse);
    device_read(s->device, item->out, bytes, n_out);
    if (item->lse)
        device_read(s->device, item->lse, bytes + n_out, n_lse);
    *n = n_out + n_lse;
    return bytes;
}

/* What the queries of a call became, as floats. */
static float *rows_of(const struct scene *s, float **shift)
{
    const size_t n = (size_t)(s->o.n_items * s->o.n_q) * s->n_heads;
    const size_t stride = kvc_attend_stride(s->call.d_k);
    float *q = malloc(n * stride * sizeof(float));
    *shift = calloc(n, sizeof(float));
    device_read(s->device, s->rows, q, n * stride * sizeof(float));
    if (s->shift)
        device_read(s->device, s->shift, *shift, n * sizeof(float));
    return q;
}

static void check_outputs(const struct scene *s)
{
    const size_t rows = (size_t)s->o.n_q * s->n_heads, stride = kvc_attend_stride(s->call.d_k);
    double *z = malloc((size_t)s->o.row_entries * KVC_PAGE_ROWS * sizeof(*z));
    float *shift, *q = rows_of(s, &shift), *call_lse = malloc(MAX_ITEMS * rows * sizeof(float));
    if (s->call.lse)
        device_read(s->device, s->call.lse, call_lse, (size_t)s->o.n_items * rows * sizeof(float));
    for (int32_t i = 0; i < s->o.n_items; i++) {
        const struct kvc_device_item *item = &s->call.items[i];
        const size_t size = size_of(item->out_dtype), n_q = (size_t)s->o.n_q;
        size_t n;
        uint8_t *out = outputs_of(s, i, &n);
        const uint8_t *lse = out + n_q * item->out_token_stride * size;
        for (int head = 0; head < HEADS; head++) {
            struct view w = view_open(s, item->seq, head);
            for (size_t r = 0; r < n_q * (size_t)s->o.group; r++) {
                const size_t t = r / (size_t)s->o.group;
                const size_t h = (size_t)(head * s->o.group) + r % (size_t)s->o.group;
                const size_t row = t * s->n_heads + h, at = (size_t)i * rows + row;
                const int64_t ordinal = s->seqs[item->seq].n_tokens - s->o.n_q + (int64_t)t;
                const double want = logits(s, &w, q + at * stride, shift[at], ordinal, z);
                float got;
                memcpy(&got, lse + row * sizeof(got), item->lse ? sizeof(got) : 0);
                if (item->lse)
                    assert_lse(got, want);
                if (s->call.lse)
                    assert_lse(call_lse[at], want);
                check_output(s, &w, z, want, item->out_dtype,
                             out + (t * item->out_token_stride + h * item->out_head_stride) * size);
            }
            view_close(&w);
        }
        check_gaps(s, item, out);
        free(out);
    }
    free(z);
    free(q);
    free(shift);
    free(call_lse);
}

static void check_scene(const struct options *o)
{
    struct scene s;
    scene_open(&s, o);
    attend(&s);
    check_outputs(&s);
    scene_close(&s);
}

static struct options any(int d_k, int d_v)
{
    static const int64_t windows[] = {0, 0, 3, 70, 150};
    struct options o = {.d_k = d_k,
                        .d_v = d_v,
                        .group = 1 + (int)rng_below(&seed, 4),
                        .n_q = 1 + (int)rng_below(&seed, 3),
                        .n_items = 1,
                        .row_entries = 2 + (int)rng_below(&seed, 3),
                        .n_sealed = 1,
                        .softcap = rng_below(&seed, 3) ? 0 : 4,
                        .v_max = 1,
                        .deviation = 3,
                        .window = windows[rng_below(&seed, 5)],
                        .turned_k = rng_below(&seed, 2)};
    for (int f = 0; f < 2; f++) {
        o.k[f] = (int)rng_below(&seed, N_KINDS_K);
        o.v[f] = (int)rng_below(&seed, N_KINDS_V);
    }
    return o;
}

static void pages_of_every_precision_are_attended(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * N_KINDS_K * N_KINDS_V; i++) {
        struct options o = any(i % 2 ? 64 : 128, i % 2 ? 64 : 128);
        o.k[0] = i / 2 % N_KINDS_K;
        o.v[0] = i / 2 / N_KINDS_K;
        o.plain = true;
        check_scene(&o);
    }
}

static void heads_have_any_size(void **state)
{
    static const int sizes[] = {1, 8, 24, 40, 64, 80, 96, 112, 128, 200, 256, 512};
    (void)state;
    for (int i = 0; i < N_SHAPES; i++) {
        const struct options o = any(sizes[i % 12], sizes[i < 12 ? i : (i * 5 + 3) % 12]);
        check_scene(&o);
    }
}

static void any_number_of_rows_is_attended(void **state)
{
    (void)state;
    for (int i = 0; i < N_ROW_SCENES; i++) {
        struct options o = any(40, 24);
        o.group = 1 + i % 16;
        o.n_q = i < 16 ? 1 : 1 + 36 / o.group;
        check_scene(&o);
        o.n_q = 1 + (int)rng_below(&seed, 40);
        check_scene(&o);
    }
}

static void sequences_and_heads_differ(void **state)
{
    static const int n_entries[] = {3, 8, 9, 24, 70};
    (void)state;
    for (int i = 0; i < 10; i++) {
        struct options o = any(24, 16);
        o.n_items = 1 + i % MAX_ITEMS;
        o.row_entries = n_entries[i % 5];
        o.n_sealed = 2;
        o.nothing = i % 3 == 1;
        o.n_q = i == 4 ? 20 : o.n_q; /* many rows of many pages */
        check_scene(&o);
    }
}

static void values_are_turned_back(void **state)
{
    static const int sizes[] = {1, 24, 64, 80, 128, 512};
    (void)state;
    for (int i = 0; i < 6; i++) {
        struct options o = any(32, sizes[i]);
        o.turned_v = true;
        check_scene(&o);
    }
}

static void large_and_small_numbers_are_attended(void **state)
{
    (void)state;
    for (int i = 0; i < N_KINDS_K * N_KINDS_V; i++)
        for (int what = 0; what < 6; what++) {
            struct options o = any(40, 24);
            o.k[0] = i % N_KINDS_K;
            o.v[0] = i / N_KINDS_K;
            o.plain = true;
            o.turned_k = false; /* what it adds to logits is not as small or large as they are */
            if (what < 4)
                o.k_size = o.v_size = SUBNORMAL + (enum size)what;
            else if (what == 4)
                o.deviation = 1e4f; /* 3 of them are not rare */
            else
                o.v_max = KVC_HALF_MAX;
            if (what == 4)
                o.softcap = 0;
            check_scene(&o);
        }
}

/* Rows of unsealed pages that no query row sees become NaN and infinities. */
static void poison(struct scene *s)
{
    static const uint16_t halves[] = {0x7e00, 0xfe00, 0x7c00, 0xfc00, 0x7c01};
    for (int32_t i = 0; i < s->o.n_items; i++) {
        const int32_t seq = s->call.items[i].seq;
        const int64_t end = s->seqs[seq].n_tokens, at = end - s->o.n_q;
        for (int j = 0; j < HEADS * s->seqs[seq].n_slots; j++) {
            const struct kvc_device_entry *e = entry_of(s, seq, j % HEADS, j / HEADS);
            const struct kvc_page_layout *l = &s->layouts[e->layout];
            for (uint32_t t = 0; e->n_rows && l->v_row_major && t < l->v_codes / l->k_stride; t++) {
                const int64_t ordinal = ordinal_of(s, e, t);
                uint8_t *k = s->memory + e->page + (size_t)t * l->k_stride;
                uint8_t *v = s->memory + e->page + l->v_codes + (size_t)t * l->v_stride;
                if (ordinal >= 0 && ordinal < end &&
                    (s->o.window == 0 || ordinal > at - s->o.window))
                    continue;
                for (uint32_t c = 0; c < l->k_stride; c += 2)
                    memcpy(k + c, &halves[rng_below(&seed, 5)], 2);
                for (uint32_t c = 0; c < l->v_stride; c += 2)
                    memcpy(v + c, &halves[rng_below(&seed, 5)], 2);
            }
        }
    }
}

static void rows_that_are_not_seen_change_no_bit(void **state)
{
    static const int sizes[] = {8, 24, 64, 80};
    (void)state;
    for (int i = 0; i < N_POISONED; i++) {
        struct scene s;
        struct options o = any(sizes[i % 4], sizes[i / 4 % 4]);
        uint8_t *before[MAX_ITEMS];
        size_t n;
        o.n_items = 2;
        scene_open(&s, &o);
        attend(&s);
        for (int32_t item = 0; item < 2; item++)
            before[item] = outputs_of(&s, item, &n);
        poison(&s);
        upload(&s);
        attend(&s);
        check_outputs(&s);
        for (int32_t item = 0; item < 2; item++) {
            uint8_t *after = outputs_of(&s, item, &n);
            assert_memory_equal(after, before[item], n);
            free(after);
            free(before[item]);
        }
        scene_close(&s);
    }
}

static void bits_of_a_row_do_not_depend_on_other_sequences(void **state)
{
    (void)state;
    for (int i = 0; i < N_ALONE; i++) {
        struct scene s;
        struct options o = any(64, 40);
        uint8_t *together[MAX_ITEMS];
        size_t n;
        o.n_items = MAX_ITEMS;
        o.row_entries = 10;
        scene_open(&s, &o);
        const struct kvc_device_call call = s.call;
        attend(&s);
        for (int32_t item = 0; item < MAX_ITEMS; item++)
            together[item] = outputs_of(&s, item, &n);
        for (int32_t item = 0; item < MAX_ITEMS; item++) {
            s.call.n_items = 1;
            s.call.items[0] = call.items[item];
            s.call.items[0].out = bytes_of(
                &s, (size_t)o.n_q * call.items[item].out_token_stride * sizeof(float), 0xa5);
            attend(&s);
            uint8_t *alone = outputs_of(&s, 0, &n);
            assert_memory_equal(alone, together[item], n);
            free(alone);
            free(together[item]);
        }
        scene_close(&s);
    }
}

static void a_replay_sees_what_the_device_has_then(void **state)
{
    (void)state;
    for (int i = 0; i < N_REPLAYS; i++) {
        struct scene s;
        struct options o = any(64, 64);
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        o.n_items = 1 + i % MAX_ITEMS;
        o.n_q = i == 3 ? 17 : o.n_q;
        o.row_entries = 10;
        o.turned_v = i % 2;
        scene_open(&s, &o);
        cudaStream_t stream = s.device->queue.stream;
        assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                         cudaSuccess);
        attend(&s);
        assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        assert_int_equal(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (int replay = 0; replay < 2; replay++) {
            fill(&s);
            upload(&s);
            assert_int_equal(cudaGraphLaunch(exec, stream), cudaSuccess);
            check_outputs(&s);
        }
        assert_int_equal(cudaGraphExecDestroy(exec), cudaSuccess);
        assert_int_equal(cudaGraphDestroy(graph), cudaSuccess);
        scene_close(&s);
    }
}

/* Adds what attention gave the rows of an item to scores [n_seqs][PAIRS][row_entries][width]. */
static void add_masses(const struct scene *s, int32_t i, int head, double log_decay, size_t width,
                       double *scores)
{
    const int32_t seq = s->call.items[i].seq;
    const size_t stride = kvc_attend_stride(s->call.d_k);
    const int group = s->o.group;
    float *shift, *q = rows_of(s, &shift);
    struct view w = view_open(s, seq, head);
    double *z = malloc(w.n * sizeof(*z));
    for (int r = 0; r < s->o.n_q * group; r++) {
        const size_t at =
            (size_t)(i * s->o.n_q + r / group) * s->n_heads + (size_t)(head * group + r % group);
        const int64_t ordinal = s->seqs[seq].n_tokens - s->o.n_q + r / group;
        const double lse = logits(s, &w, q + at * stride, shift[at], ordinal, z);
        for (size_t t = 0; t < w.n; t++) {
            const int slot = (int)(t / KVC_PAGE_ROWS);
            const struct kvc_device_entry *e = entry_of(s, seq, head, slot);
            if (z[t] > -INFINITY && e->layout != STRIP)
                scores[(size_t)(e - s->entries) * width + t % KVC_PAGE_ROWS % width] +=
                    exp(z[t] - lse + (double)(ordinal - s->seqs[seq].score_base) * log_decay);
        }
    }
    free(z);
    free(q);
    free(shift);
    view_close(&w);
}

static void masses_are_added_to_scores(void **state)
{
    (void)state;
    for (int i = 0; i < N_MASSES; i++) {
        struct scene s;
        struct options o = any(i % 2 ? 64 : 24, 16);
        const bool of_rows = i % 3 == 0;
        const float log_decay = i % 4 < 2 ? 0 : 0.01f;
        o.n_items = 1 + i % 2;
        o.n_q = 1 + (int)rng_below(&seed, (size_t)(KVC_DEVICE_SPLIT_ROWS / o.group));
        o.row_entries = i % 4 ? o.row_entries : 10;
        o.n_sealed = 1 + i % 2;
        o.nothing = i % 5 == 1;
        scene_open(&s, &o);
        const size_t width = of_rows ? KVC_PAGE_ROWS : 1, rows = (size_t)(o.n_q * o.group);
        const size_t n_halves = (size_t)(o.n_items * HEADS * o.row_entries) * rows;
        const size_t n = s.n_seqs * PAIRS * (size_t)o.row_entries * width;
        s.masses.pages = bytes_of(&s, n_halves * 4 * sizeof(float), 0xff);
        if (of_rows)
            s.masses.tokens = bytes_of(&s, n_halves * KVC_PAGE_ROWS * sizeof(float), 0xff);
        s.call.lse = bytes_of(&s, (size_t)o.n_items * (size_t)o.n_q * s.n_heads * sizeof(float), 0);
        float *before = malloc(n * sizeof(float)), *after = malloc(n * sizeof(float));
        double *want = malloc(n * sizeof(double));
        for (size_t e = 0; e < n; e++)
            want[e] = before[e] = 1 + rng_unit(&seed);
        float *scores = s.kept[s.n_kept++] = device_copy(before, n * sizeof(float));
        attend(&s);
        assert_int_equal(kvc_cuda_add_masses(&s.device->queue, &s.call, &s.masses, log_decay,
                                             s.strip, of_rows, scores),
                         KVC_OK);
        check_outputs(&s);
        device_read(s.device, scores, after, n * sizeof(float));
        for (int32_t item = 0; item < o.n_items; item++)
            for (int head = 0; head < HEADS; head++)
                add_masses(&s, item, head, log_decay, width, want);
        /* What is given nothing keeps its bits. */
        for (size_t e = 0; e < n; e++)
            assert_near(after[e], want[e], want[e] == before[e] ? 0 : 1e-4 * fmax(1, want[e]));
        free(before);
        free(after);
        free(want);
        scene_close(&s);
    }
}

static void matrices_are_read_without_conflicts(void **state)
{
    static const int sizes[] = {64, 128, 256};
    (void)state;
    for (int i = 0; i < 3 * (N_KINDS_K - 1) * N_KINDS_V; i++) {
        struct scene s;
        struct options o = any(sizes[i % 3], sizes[i % 3]);
        struct emu_stats stats;
        o.k[0] = i / 3 % (N_KINDS_K - 1); /* the last is INT6 */
        o.v[0] = i / 3 / (N_KINDS_K - 1);
        o.row_entries = 2;
        scene_open(&s, &o);
        emu_reset_stats();
        attend(&s);
        assert_int_equal(cudaStreamSynchronize(s.device->queue.stream), cudaSuccess);
        emu_get_stats(&stats);
        assert_int_equal(stats.ldmatrix_conflict, 0);
        scene_close(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_of_every_precision_are_attended),
        cmocka_unit_test(heads_have_any_size),
        cmocka_unit_test(any_number_of_rows_is_attended),
        cmocka_unit_test(sequences_and_heads_differ),
        cmocka_unit_test(values_are_turned_back),
        cmocka_unit_test(large_and_small_numbers_are_attended),
        cmocka_unit_test(rows_that_are_not_seen_change_no_bit),
        cmocka_unit_test(bits_of_a_row_do_not_depend_on_other_sequences),
        cmocka_unit_test(a_replay_sees_what_the_device_has_then),
        cmocka_unit_test(masses_are_added_to_scores),
        cmocka_unit_test(matrices_are_read_without_conflicts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
