/* ref/attend.c - the definition of attention over pages, in plain C. */
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "../page.h"

static bool sees(const struct kvc_attend_page *page, uint32_t row, uint32_t token)
{
    return page->mask[row] >> token & 1;
}

static float logit(const struct kvc_attend_tile *tile, const struct kvc_attend_page *page,
                   uint32_t row, uint32_t token)
{
    const float *q = tile->q + row * kvc_attend_stride(page->layout->d_k);
    float dot = 0.0f;
    for (uint32_t c = 0; c < page->layout->d_k; c++)
        dot += q[c] * kvc_page_k(page->layout, page->data, token, c);
    float s = dot * tile->scale + (tile->shift ? tile->shift[row] : 0.0f);
    if (tile->softcap > 0.0f)
        s = tile->softcap * tanhf(s / tile->softcap);
    return page->bias ? s + page->bias[token] : s;
}

/* One page for one query row, by the online softmax: s is room for 64 logits. */
static void attend_page(const struct kvc_attend_tile *tile, const struct kvc_attend_page *page,
                        uint32_t row, float *s)
{
    const struct kvc_attend_masses *masses = tile->masses;
    const size_t place = (size_t)page->slot * tile->n_rows + row;
    float *weights = masses && masses->weights ? masses->weights + place * KVC_PAGE_ROWS : NULL;
    const uint32_t d_v = page->layout->d_v;
    float *o = tile->o + row * kvc_attend_stride(d_v);
    float m = tile->m[row];

    for (uint32_t t = 0; t < page->n_rows; t++)
        if (sees(page, row, t)) {
            s[t] = logit(tile, page, row, t);
            m = s[t] > m || isnan(s[t]) ? s[t] : m;
        }
    const float shrink = tile->m[row] == -INFINITY ? 0.0f : expf(tile->m[row] - m);
    float l = 0.0f;
    if (weights)
        memset(weights, 0, KVC_PAGE_ROWS * sizeof(float));
    for (uint32_t c = 0; c < d_v; c++)
        o[c] *= shrink;
    for (uint32_t t = 0; t < page->n_rows; t++)
        if (sees(page, row, t)) {
            const float weight = expf(s[t] - m);
            l += weight;
            if (weights)
                weights[t] = weight;
            for (uint32_t c = 0; c < d_v; c++)
                o[c] += weight * kvc_page_v(page->layout, page->data, t, c);
        }
    tile->l[row] = tile->l[row] * shrink + l;
    tile->m[row] = m;
    if (masses) {
        masses->m[row * KVC_TILE_PAGES + page->slot] = m;
        masses->l[row * KVC_TILE_PAGES + page->slot] = l;
    }
}

static void attend(const struct kvc_attend_tile *tile)
{
    for (uint32_t i = 0; tile->masses && i < KVC_TILE_PAGES * tile->n_rows; i++) {
        tile->masses->m[i] = -INFINITY;
        tile->masses->l[i] = 0.0f;
    }
    for (uint32_t row = 0; row < tile->n_rows; row++) {
        const size_t stride = kvc_attend_stride(tile->pages[0].layout->d_v);
        tile->m[row] = -INFINITY;
        tile->l[row] = 0.0f;
        memset(tile->o + row * stride, 0, stride * sizeof(float));
        for (uint32_t p = 0; p < tile->n_pages; p++)
            if (tile->pages[p].mask[row])
                attend_page(tile, &tile->pages[p], row, tile->work);
    }
}

kvc_status kvc_attend_pages_ref(const struct kvc_queue *queue, const struct kvc_attend_tile *tile)
{
    (void)queue;
    attend(tile);
    return KVC_OK;
}

kvc_status kvc_attend_block_ref(const struct kvc_queue *queue, const struct kvc_attend_tile *tile)
{
    (void)queue;
    attend(tile);
    return KVC_OK;
}

kvc_status kvc_mass_pages_ref(const struct kvc_queue *queue, const struct kvc_attend_tile *tile,
                              const float *lse, float *mass)
{
    (void)queue;
    for (uint32_t p = 0; p < tile->n_pages; p++)
        for (uint32_t row = 0; row < tile->n_rows; row++)
            for (uint32_t t = 0; t < tile->pages[p].n_rows && isfinite(lse[row]); t++)
                if (sees(&tile->pages[p], row, t))
                    mass[p * KVC_PAGE_ROWS + t] +=
                        expf(logit(tile, &tile->pages[p], row, t) - lse[row]);
    return KVC_OK;
}

kvc_status kvc_merge_parts_ref(const struct kvc_queue *queue, struct kvc_attend_part *into,
                               const struct kvc_attend_part *part, size_t n_rows, size_t d_v)
{
    const size_t stride = kvc_attend_stride(d_v);

    (void)queue;
    for (size_t r = 0; r < n_rows; r++) {
        if (part->m[r] == -INFINITY)
            continue;
        const float m = isnan(part->m[r]) || part->m[r] > into->m[r] ? part->m[r] : into->m[r];
        const float a = into->m[r] == -INFINITY ? 0.0f : expf(into->m[r] - m);
        const float b = expf(part->m[r] - m);
        for (size_t c = 0; c < d_v; c++)
            into->o[r * stride + c] = into->o[r * stride + c] * a + part->o[r * stride + c] * b;
        into->l[r] = into->l[r] * a + part->l[r] * b;
        into->m[r] = m;
    }
    return KVC_OK;
}

kvc_status kvc_mass_parts_ref(const struct kvc_queue *queue, const struct kvc_attend_masses *from,
                              size_t n_rows, const float *lse, float *const *mass)
{
    (void)queue;
    for (size_t slot = 0; slot < KVC_TILE_PAGES; slot++)
        for (size_t r = 0; r < n_rows && mass[slot]; r++) {
            const float l = from->l[r * KVC_TILE_PAGES + slot];
            if (l == 0.0f || !isfinite(lse[r]))
                continue;
            const float by = expf(from->m[r * KVC_TILE_PAGES + slot] - lse[r]);
            if (!from->weights)
                mass[slot][0] += l * by;
            for (size_t t = 0; t < KVC_PAGE_ROWS && from->weights; t++)
                mass[slot][t] += from->weights[(slot * n_rows + r) * KVC_PAGE_ROWS + t] * by;
        }
    return KVC_OK;
}

kvc_status kvc_finish_rows_ref(const struct kvc_queue *queue, const struct kvc_attend_part *part,
                               size_t n_rows, size_t d_v, void *dst, kvc_dtype dtype,
                               size_t dst_stride, float *lse)
{
    (void)queue;
    for (size_t r = 0; r < n_rows; r++) {
        const float *o = part->o + r * kvc_attend_stride(d_v);
        const float inverse = part->l[r] == 0.0f ? 0.0f : 1.0f / part->l[r];
        for (size_t c = 0; c < d_v; c++) {
            const float x = o[c] * inverse;
            const size_t i = r * dst_stride + c;
            if (dtype == KVC_DTYPE_F32)
                ((float *)dst)[i] = x;
            else
                ((uint16_t *)dst)[i] =
                    dtype == KVC_DTYPE_F16 ? kvc_half_from_float(x) : kvc_bf16_from_float(x);
        }
        lse[r] = part->l[r] == 0.0f ? -INFINITY : part->m[r] + logf(part->l[r]);
    }
    return KVC_OK;
}
