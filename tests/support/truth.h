/* Attention over the pages of a tile in float64. */
#ifndef KVC_TESTS_TRUTH_H
#define KVC_TESTS_TRUTH_H

#include "tile.h"

/* One row of attention in float64. */
struct truth {
    double lse, out[MAX_D], weight[PAGES][KVC_PAGE_ROWS], page[PAGES];
};

static inline double true_score(const struct kvc_attend_tile *tile, uint32_t row, const float *k,
                                uint32_t d_k)
{
    const float *q = tile->q + row * kvc_attend_stride(d_k);
    double dot = 0;
    for (uint32_t c = 0; c < d_k; c++)
        dot += (double)q[c] * (double)k[c];
    dot = dot * (double)tile->scale + (tile->shift ? (double)tile->shift[row] : 0);
    return tile->softcap > 0 ? (double)tile->softcap * tanh(dot / (double)tile->softcap) : dot;
}

/* Weights relative to a fixed point that the scores of these tests do not leave far behind. */
static inline void true_row(const struct test_tile *t, uint32_t row, struct truth *truth)
{
    static float k[KVC_PAGE_ROWS * MAX_D], v[KVC_PAGE_ROWS * MAX_D];
    const uint32_t d_k = t->page[0].layout.d_k, d_v = t->page[0].layout.d_v;
    double sum = 0;
    memset(truth, 0, sizeof(*truth));
    for (uint32_t p = 0; p < t->tile.n_pages; p++) {
        const struct test_page *page = &t->page[p];
        kvc_read_page_ref(NULL, &page->layout, page->data, 0, page->n_rows, k, page->layout.d_k, v,
                          page->layout.d_v);
        for (uint32_t i = 0; i < page->n_rows; i++) {
            if (!bit(page->mask[row], i))
                continue;
            const double w = exp(true_score(&t->tile, row, k + (size_t)i * d_k, d_k) +
                                 (page->biased ? (double)page->bias[i] : 0));
            truth->weight[p][i] = w;
            truth->page[p] += w;
            for (uint32_t c = 0; c < d_v; c++)
                truth->out[c] += w * (double)v[(size_t)i * d_v + c];
        }
        sum += truth->page[p];
    }
    truth->lse = log(sum);
    for (uint32_t c = 0; c < d_v && sum > 0; c++)
        truth->out[c] /= sum;
    for (uint32_t p = 0; p < t->tile.n_pages && sum > 0; p++) {
        truth->page[p] /= sum;
        for (uint32_t i = 0; i < KVC_PAGE_ROWS; i++)
            truth->weight[p][i] /= sum;
    }
}

/* Largest |got - want| over the largest |want|. */
static inline double relative_error(const float *got, const double *want, uint32_t n)
{
    double error = 0, largest = 1e-30;
    for (uint32_t c = 0; c < n; c++) {
        const double e = fabs((double)got[c] - want[c]);
        if (!(e <= error))
            error = e;
        largest = fmax(largest, fabs(want[c]));
    }
    return error / largest;
}

#endif
