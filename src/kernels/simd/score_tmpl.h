/*
 * score_tmpl.h - template of the SIMD kernels on which decisions hang: the bits of ref/score.c.
 * Parameters: KVC_FN (name suffix), VLEN, the words of vec_avx2.h, and those of lines_tmpl.h.
 *
 * The 16 sums of a row are one vector, or two that are added first; v_hadd_all() then adds the
 * lanes i and i + 4, 2 and 1, as specified. No word here is fused.
 */
#include <math.h>

#include "../exp.h"
#include "../kernels.h"

/* Adds products to those of BLOCK_ROWS rows of a with 4 of b: sum 4 r + j. */
V_INLINE void add_block(const float *const *a, const float *const *b, size_t c, vf *sums)
{
    vf y[4];
    V_UNROLL
    for (int j = 0; j < 4; j++)
        y[j] = v_load(b[j] + c);
    V_UNROLL
    for (int r = 0; r < BLOCK_ROWS; r++) {
        const vf x = v_load(a[r] + c);
        V_UNROLL
        for (int j = 0; j < 4; j++)
            sums[4 * r + j] = v_add(sums[4 * r + j], v_mul(x, y[j]));
    }
}

/* One row of a with VLEN of b. */
V_INLINE void add_row(const float *a, const float *const *b, size_t c, vf *sums)
{
    const vf x = v_load(a + c);
    V_UNROLL
    for (int j = 0; j < VLEN; j++)
        sums[j] = v_add(sums[j], v_mul(x, v_load(b[j] + c)));
}

/* The dots of a block, or of one row, one a lane. */
V_INLINE vf dot_block(bool one, const float *const *a, const float *const *b, size_t size)
{
    vf sums[VLEN];
    V_UNROLL
    for (size_t half = 0; half < 16; half += VLEN) {
        vf part[VLEN];
        V_UNROLL
        for (int i = 0; i < VLEN; i++)
            part[i] = v_zero();
        for (size_t c = half; c < size; c += 16)
            if (one)
                add_row(a[0], b, c, part);
            else
                add_block(a, b, c, part);
        V_UNROLL
        for (int i = 0; i < VLEN; i++)
            sums[i] = half == 0 ? part[i] : v_add(sums[i], part[i]);
    }
    return v_hadd_all(sums);
}

/* n rows from row first on; the last one stands for those that are missing. */
V_INLINE void point_rows(const float *x, size_t first, size_t n_rows, size_t size, size_t n,
                         const float **rows)
{
    for (size_t i = 0; i < n; i++)
        rows[i] = x + (first + i < n_rows ? first + i : n_rows - 1) * size;
}

V_INLINE void dot_blocks(bool one, const float *a, size_t n_a, const float *b, size_t n_b,
                         size_t size, float *dots, size_t stride)
{
    const size_t n = one ? 1 : BLOCK_ROWS, width = VLEN / n;
    for (size_t i = 0; i < n_a; i += n) {
        const float *x[BLOCK_ROWS];
        point_rows(a, i, n_a, size, n, x);
        for (size_t j = 0; j < n_b; j += width) {
            const float *y[VLEN];
            float block[VLEN];
            point_rows(b, j, n_b, size, width, y);
            const vf products = dot_block(one, x, y, size);
            if (!one && i + n <= n_a && j + width <= n_b) {
                v_store_quads(dots + i * stride + j, stride, products);
                continue;
            }
            v_store(block, products);
            for (size_t r = i; r < n_a && r < i + n; r++)
                memcpy(dots + r * stride + j, block + (r - i) * width,
                       (n_b - j < width ? n_b - j : width) * sizeof(float));
        }
    }
}

kvc_status KVC_FN(kvc_dot_rows)(const struct kvc_queue *queue, const float *a, size_t n_a,
                                const float *b, size_t n_b, size_t d, float *dots, size_t stride)
{
    const size_t size = kvc_attend_stride(d);

    (void)queue;
    if (n_a == 1)
        dot_blocks(true, a, n_a, b, n_b, size, dots, stride);
    else
        dot_blocks(false, a, n_a, b, n_b, size, dots, stride);
    return KVC_OK;
}

/* kvc_exp() of each lane. The sign of a zero n does not reach the result. */
V_INLINE vf exp_lanes(vf x)
{
    const vf a = v_min(v_set1(KVC_EXP_HIGH), x);
    const vi i = i_round(v_mul(a, v_set1(KVC_LOG2E)));
    const vf n = v_from_i(i);
    const vf r = v_sub(v_sub(a, v_mul(n, v_set1(KVC_LN2_HIGH))), v_mul(n, v_set1(KVC_LN2_LOW)));
    vf p = v_set1(1.0f / 5040);
    p = v_add(v_mul(p, r), v_set1(1.0f / 720));
    p = v_add(v_mul(p, r), v_set1(1.0f / 120));
    p = v_add(v_mul(p, r), v_set1(1.0f / 24));
    p = v_add(v_mul(p, r), v_set1(1.0f / 6));
    p = v_add(v_mul(p, r), v_set1(0.5f));
    p = v_add(v_mul(p, r), v_set1(1.0f));
    p = v_add(v_mul(p, r), v_set1(1.0f));
    return v_select(v_lt(x, v_set1(KVC_EXP_LOW)), v_zero(), v_exp2_scale(p, i));
}

/* The larger of m and the logits that count; of equal zeros, which may differ in sign, the first.
 */
static inline float max_logit(const float *s, uint64_t mask, float m)
{
    vf max = v_set1(-INFINITY);
    V_UNROLL
    for (int t = 0; t < 64; t += VLEN)
        max = v_max(v_select(m_bits(mask >> t), v_load(s + t), v_set1(-INFINITY)), max);
    const float block_max = v_hmax(max), largest = block_max > m ? block_max : m;
    if (largest != 0.0f)
        return largest;
    for (int t = 0; t < 64; t++)
        if (mask >> t & 1)
            m = s[t] > m ? s[t] : m;
    return m;
}

/* The sums of the exponentials, folded to one vector. */
V_INLINE vf sum_weights(const float *s, uint64_t mask, float max)
{
    vf sums[16 / VLEN];
    V_UNROLL
    for (int i = 0; i < 16 / VLEN; i++)
        sums[i] = v_zero();
    V_UNROLL
    for (int t = 0; t < 64; t += VLEN) {
        const vf weight = exp_lanes(v_sub(v_load(s + t), v_set1(max)));
        vf *sum = &sums[t / VLEN % (16 / VLEN)];
        *sum = v_add(*sum, v_select(m_bits(mask >> t), weight, v_zero()));
    }
    return VLEN == 16 ? sums[0] : v_add(sums[0], sums[16 / VLEN - 1]);
}

kvc_status KVC_FN(kvc_lse_block)(const struct kvc_queue *queue, const float *s,
                                 const uint64_t *mask, size_t n_rows, float *m, float *l)
{
    (void)queue;
    for (size_t first = 0; first < n_rows; first += VLEN) {
        const size_t n = lanes_left(first, n_rows);
        float max[VLEN] = {0};
        vf sums[VLEN];
        for (size_t r = 0; r < VLEN; r++) {
            sums[r] = v_zero();
            if (r >= n)
                continue;
            const float *row = s + (first + r) * 64;
            max[r] = max_logit(row, mask[first + r], m[first + r]);
            sums[r] = sum_weights(row, mask[first + r], max[r]);
        }
        const vf old_m = v_load_n(m + first, n), old_l = v_load_n(l + first, n);
        const vf new_m = v_load(max);
        const vf new_l = v_add(v_mul(old_l, exp_lanes(v_sub(old_m, new_m))), v_hadd_all(sums));
        const vm empty = v_lt(new_m, v_set1(-FLT_MAX));
        v_store_n(m + first, new_m, n);
        v_store_n(l + first, v_select(empty, old_l, new_l), n);
    }
    return KVC_OK;
}

kvc_status KVC_FN(kvc_mass_block)(const struct kvc_queue *queue, const float *s,
                                  const uint64_t *mask, const float *lse, const float *weights,
                                  size_t n_rows, float *mass)
{
    (void)queue;
    for (size_t r = 0; r < n_rows; r++, s += 64) {
        if (!isfinite(lse[r]))
            continue;
        V_UNROLL
        for (int t = 0; t < 64; t += VLEN) {
            const vf old = v_load(mass + t);
            const vf share = exp_lanes(v_sub(v_load(s + t), v_set1(lse[r])));
            const vf sum = v_add(old, v_mul(v_set1(weights[r]), share));
            v_store(mass + t, v_select(m_bits(mask[r] >> t), sum, old));
        }
    }
    return KVC_OK;
}
