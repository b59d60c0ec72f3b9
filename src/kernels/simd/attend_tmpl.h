/*
 * attend_tmpl.h - template of the SIMD kernels of attention over pages.
 * Parameters: KVC_FN (name suffix), VLEN, the words of vec_avx2.h, and those of scores_tmpl.h and
 * values_tmpl.h.
 */
#include <math.h>
#include <string.h>

#include "../kernels.h"
#include "../page.h"

/* The running maximum and sum of one row, taken over one chunk further. */
struct row_state {
    float m, shrink, l;
};

/* Turns the scores of a row into weights, and adds up those of each page; what is not seen gets 0
 * by selection. */
static inline struct row_state chunk_softmax(const struct kvc_attend_tile *tile,
                                             const struct chunk *chunk, uint32_t i, float *page_l)
{
    const float m = tile->m[chunk->row[i]];
    struct row_state next = {.m = m};
    uint64_t mask[CHUNK_PAGES];
    vf max = v_set1(-INFINITY);
    for (uint32_t p = 0; p < chunk->n_pages; p++) {
        const float *from = chunk_weights(tile, chunk, p, i);
        mask[p] = chunk->pages[p].mask[chunk->row[i]] & held_rows(&chunk->pages[p]);
        for (uint32_t t = 0; t < KVC_PAGE_ROWS && mask[p]; t += VLEN)
            max = v_max(v_select(m_bits(mask[p] >> t), v_load(from + t), v_set1(-INFINITY)), max);
    }
    const float chunk_max = v_hmax(max);
    next.m = chunk_max > m ? chunk_max : m;
    next.shrink = m == next.m ? 1.0f : m == -INFINITY ? 0.0f : expf(m - next.m);
    for (uint32_t p = 0; p < chunk->n_pages; p++) {
        float *s = chunk_weights(tile, chunk, p, i);
        vf sum = v_zero();
        page_l[p] = 0.0f;
        if (!mask[p]) {
            fill(s, 0.0f);
            continue;
        }
        for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN) {
            const vf weight = v_exp(v_sub(v_load(s + t), v_set1(next.m)));
            const vf seen = v_select(m_bits(mask[p] >> t), weight, v_zero());
            sum = v_add(sum, seen);
            v_store(s + t, seen);
        }
        page_l[p] = v_hadd(sum);
        next.l += page_l[p];
    }
    if (isnan(next.l)) /* a score is NaN or Inf: the row says so */
        next.m = next.l;
    return next;
}

static inline void scale_row(float *o, size_t n, float by)
{
    for (size_t c = 0; c < n; c += VLEN)
        v_store(o + c, v_mul(v_load(o + c), v_set1(by)));
}

static inline void add_stream(struct ahead *ahead, uint32_t i, const uint8_t *at, size_t size)
{
    for (; i < CHUNK_PAGES; i++) /* those that are missing are the last one */
        ahead->at[i] = at;
    ahead->size = size > ahead->size ? size : ahead->size;
}

/* The values of a chunk are read after its keys, and the keys of the next one after them. */
static inline struct ahead values_of(const struct chunk *chunk)
{
    struct ahead ahead = {.size = 0};
    for (uint32_t p = 0; p < chunk->n_pages; p++) {
        const struct kvc_page_layout *layout = chunk->pages[p].layout;
        add_stream(&ahead, p, chunk->pages[p].data + layout->v_codes,
                   layout->n_bytes - layout->v_codes);
    }
    return ahead;
}

static inline struct ahead keys_of(const struct kvc_attend_tile *tile, uint32_t first, uint32_t n)
{
    struct ahead ahead = {.size = 0};
    for (uint32_t i = 0; i < n && first + i < tile->n_pages + tile->n_after; i++) {
        const struct kvc_attend_page *page = first + i < tile->n_pages
                                                 ? &tile->pages[first + i]
                                                 : &tile->after[first + i - tile->n_pages];
        add_stream(&ahead, i, page->data, page->layout->v_codes);
    }
    return ahead;
}

/* The pages from first on that form a chunk; their scores. */
static inline struct chunk next_chunk(const struct kvc_attend_tile *tile, uint32_t first,
                                      struct int_keys *keys)
{
    struct chunk chunk = {.pages = tile->pages + first};
    const uint32_t number = chunk.pages->slot / CHUNK_PAGES;
    bool seen_by[KVC_TILE_ROWS] = {false};
    while (first + chunk.n_pages < tile->n_pages &&
           chunk.pages[chunk.n_pages].slot / CHUNK_PAGES == number)
        chunk.n_pages++;
    struct ahead ahead = values_of(&chunk);
    for (uint32_t p = 0; p < chunk.n_pages; p++) {
        const struct seen seen = seen_rows(&chunk.pages[p], tile->n_rows);
        for (uint32_t i = 0; i < seen.n; i++)
            seen_by[seen.row[i]] = true;
        if (seen.n)
            page_scores(tile, &chunk.pages[p], &seen, keys, &ahead,
                        page_weights(tile, &chunk.pages[p]));
    }
    for (uint32_t row = 0; row < tile->n_rows; row++)
        if (seen_by[row])
            chunk.row[chunk.n_rows++] = (uint8_t)row;
    return chunk;
}

static inline void attend_chunk(const struct kvc_attend_tile *tile, uint32_t first,
                                struct chunk *chunk)
{
    struct ahead ahead = keys_of(tile, first + chunk->n_pages, CHUNK_PAGES);
    for (uint32_t i = 0; i < chunk->n_rows; i++) {
        const uint32_t row = chunk->row[i];
        const struct row_state next = chunk_softmax(tile, chunk, i, chunk->l[i]);
        if (next.shrink != 1.0f)
            scale_row(output_row(tile, chunk, i), kvc_attend_stride(tile->pages[0].layout->d_v),
                      next.shrink);
        tile->m[row] = next.m;
        tile->l[row] = tile->l[row] * next.shrink + next.l;
        for (uint32_t p = 0; tile->masses && p < chunk->n_pages; p++) {
            if (!(chunk->pages[p].mask[row] & held_rows(&chunk->pages[p])))
                continue;
            tile->masses->m[row * KVC_TILE_PAGES + chunk->pages[p].slot] = next.m;
            tile->masses->l[row * KVC_TILE_PAGES + chunk->pages[p].slot] = chunk->l[i][p];
        }
    }
    add_values(tile, chunk, &ahead);
}

kvc_status KVC_FN(kvc_attend_pages)(const struct kvc_queue *queue,
                                    const struct kvc_attend_tile *tile)
{
    const size_t stride = kvc_attend_stride(tile->pages[0].layout->d_v);
    struct int_keys keys = {.layout = NULL};

    (void)queue;
    for (uint32_t row = 0; row < tile->n_rows; row++) {
        tile->m[row] = -INFINITY;
        tile->l[row] = 0.0f;
    }
    memset(tile->o, 0, tile->n_rows * stride * sizeof(float));
    for (uint32_t i = 0; tile->masses && i < KVC_TILE_PAGES * tile->n_rows; i++) {
        tile->masses->m[i] = -INFINITY;
        tile->masses->l[i] = 0.0f;
    }
    for (uint32_t p = 0; p < tile->n_pages;) {
        struct chunk chunk = next_chunk(tile, p, &keys);
        if (chunk.n_rows)
            attend_chunk(tile, p, &chunk);
        p += chunk.n_pages;
    }
    return KVC_OK;
}

kvc_status KVC_FN(kvc_mass_pages)(const struct kvc_queue *queue, const struct kvc_attend_tile *tile,
                                  const float *lse, float *mass)
{
    float *scores = rooms_of(tile).scores;
    struct int_keys keys = {.layout = NULL};

    (void)queue;
    for (uint32_t p = 0; p < tile->n_pages; p++, mass += KVC_PAGE_ROWS) {
        const struct seen seen = seen_rows(&tile->pages[p], tile->n_rows);
        struct ahead ahead = keys_of(tile, p + CHUNK_PAGES, 1);
        if (!seen.any)
            continue;
        page_scores(tile, &tile->pages[p], &seen, &keys, &ahead, scores);
        for (uint32_t i = 0; i < seen.n; i++) {
            const float *s = scores + (size_t)seen.row[i] * KVC_PAGE_ROWS;
            if (!isfinite(lse[seen.row[i]]))
                continue;
            for (uint32_t t = 0; t < KVC_PAGE_ROWS; t += VLEN) {
                const vf weight = v_exp(v_sub(v_load(s + t), v_set1(lse[seen.row[i]])));
                const vf seen_weight = v_select(m_bits(seen.mask[i] >> t), weight, v_zero());
                v_store(mass + t, v_add(v_load(mass + t), seen_weight));
            }
        }
    }
    return KVC_OK;
}
