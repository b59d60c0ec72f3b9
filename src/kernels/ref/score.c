/* ref/score.c - the definition of the sums on which decisions hang, in plain C. */
#include "../exp.h"
#include "../kernels.h"

/* 16 sums by halves: l + 8, then 4, 2, 1. */
static float add_lanes(float *sums)
{
    for (int half = 8; half > 0; half /= 2)
        for (int l = 0; l < half; l++)
            sums[l] += sums[l + half];
    return sums[0];
}

static float dot(const float *a, const float *b, size_t d)
{
    float sums[16] = {0};
    for (size_t i = 0; i < d; i += 16)
        for (size_t l = 0; l < 16; l++)
            sums[l] += a[i + l] * b[i + l];
    return add_lanes(sums);
}

kvc_status kvc_dot_rows_ref(const struct kvc_queue *queue, const float *a, size_t n_a,
                            const float *b, size_t n_b, size_t d, float *dots, size_t stride)
{
    const size_t row = kvc_attend_stride(d);

    (void)queue;
    for (size_t i = 0; i < n_a; i++)
        for (size_t j = 0; j < n_b; j++)
            dots[i * stride + j] = dot(a + i * row, b + j * row, d);
    return KVC_OK;
}

kvc_status kvc_lse_block_ref(const struct kvc_queue *queue, const float *s, const uint64_t *mask,
                             size_t n_rows, float *m, float *l)
{
    (void)queue;
    for (size_t r = 0; r < n_rows; r++, s += 64) {
        float max = m[r], sums[16] = {0};
        for (int t = 0; t < 64; t++)
            if (mask[r] >> t & 1)
                max = s[t] > max ? s[t] : max;
        if (max == -INFINITY)
            continue;
        for (int t = 0; t < 64; t++)
            if (mask[r] >> t & 1)
                sums[t % 16] += kvc_exp(s[t] - max);
        l[r] = l[r] * kvc_exp(m[r] - max) + add_lanes(sums);
        m[r] = max;
    }
    return KVC_OK;
}

kvc_status kvc_mass_block_ref(const struct kvc_queue *queue, const float *s, const uint64_t *mask,
                              const float *lse, const float *weights, size_t n_rows, float *mass)
{
    (void)queue;
    for (size_t r = 0; r < n_rows; r++, s += 64)
        for (int t = 0; t < 64 && isfinite(lse[r]); t++)
            if (mask[r] >> t & 1)
                mass[t] += weights[r] * kvc_exp(s[t] - lse[r]);
    return KVC_OK;
}
