/* Transforms of cache_model.h: how rows are stored, and what they are to the caller. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cache_model.h"

static size_t vector_at(const struct cache_model *m, int layer, int kv_head)
{
    return ((size_t)layer * (size_t)m->params.n_kv_heads + (size_t)kv_head) *
           (size_t)m->params.head_dim_k;
}

static bool has(const struct cache_model *m, uint32_t flag)
{
    return m->ready && (m->params.transform & flag) != 0;
}

bool model_has_vectors(const struct cache_model *m)
{
    return m->ready && (m->params.k_mean || m->params.k_scale || m->params.online_pages > 0);
}

static bool stores_rotated(const struct cache_model *m, int which)
{
    return which ? has(m, KVC_TRANSFORM_ROTATE_V)
                 : has(m, KVC_TRANSFORM_ROTATE_K) ||
                       (has(m, KVC_TRANSFORM_K_ROTATED) && model_has_vectors(m));
}

bool model_transforms(const struct cache_model *m, int which)
{
    return stores_rotated(m, which) || (!which && model_has_vectors(m));
}

void model_transform_open(struct cache_model *m)
{
    const size_t n = vector_at(m, m->params.n_layers, 0);

    m->ready = m->params.online_pages == 0 || m->params.k_mean || m->params.k_scale;
    m->mean = calloc(n, sizeof(*m->mean));
    m->scale = calloc(n, sizeof(*m->scale));
    if (!m->mean || !m->scale)
        abort();
    for (size_t i = 0; i < n; i++) {
        m->mean[i] = m->params.k_mean ? m->params.k_mean[i] : 0.0f;
        m->scale[i] = m->params.k_scale ? m->params.k_scale[i] : 1.0f;
    }
}

/* In float, each step rounded once: docs/formats.md, section 4. */
static void rotate(float *x, size_t d)
{
    const size_t block = d & (~d + 1);
    const float norm = (float)(1.0 / sqrt((double)block));

    for (size_t b = 0; b < d && block > 1; b += block) {
        for (size_t h = 1; h < block; h *= 2)
            for (size_t i = b; i < b + block; i++)
                if (((i - b) & h) == 0) {
                    const float sum = x[i] + x[i + h];

                    x[i + h] = x[i] - x[i + h];
                    x[i] = sum;
                }
        for (size_t i = b; i < b + block; i++)
            x[i] *= norm;
    }
}

void model_rotate(double *x, size_t d)
{
    const size_t block = d & (~d + 1);

    for (size_t b = 0; b < d; b += block)
        for (size_t h = 1; h < block; h *= 2)
            for (size_t i = b; i < b + block; i++)
                if (((i - b) & h) == 0) {
                    const double sum = x[i] + x[i + h];

                    x[i + h] = (x[i] - x[i + h]) * sqrt(0.5);
                    x[i] = sum * sqrt(0.5);
                }
}

int model_transform_row(const struct cache_model *m, int layer, int kv_head, int which, float *row)
{
    const size_t d = (size_t)(which ? m->params.head_dim_v : m->params.head_dim_k);
    const size_t at = vector_at(m, layer, kv_head);
    int n_saturated = 0;

    if (!model_transforms(m, which))
        return 0;
    if (!which && has(m, KVC_TRANSFORM_K_ROTATED))
        rotate(row, d);
    for (size_t c = 0; c < d && !which && model_has_vectors(m); c++) {
        const float inverse = 1.0f / m->scale[at + c];

        row[c] -= m->mean[at + c];
        row[c] *= inverse;
    }
    if (stores_rotated(m, which))
        rotate(row, d);
    for (size_t c = 0; c < d; c++) {
        n_saturated += fabsf(row[c]) > 65504.0f;
        row[c] = half_round(row[c]);
    }
    return n_saturated;
}

void model_row(const struct cache_model *m, int layer, int kv_head, int which, const float *stored,
               double *row, double *error)
{
    const size_t d = (size_t)(which ? m->params.head_dim_v : m->params.head_dim_k);
    const size_t at = vector_at(m, layer, kv_head);
    double norm = 0;

    for (size_t c = 0; c < d; c++) {
        row[c] = (double)stored[c];
        norm += row[c] * row[c];
    }
    *error = 0;
    if (!model_transforms(m, which))
        return;
    *error = 0x1p-20 * sqrt(norm);
    if (stores_rotated(m, which))
        model_rotate(row, d);
    if (which || !model_has_vectors(m))
        return;
    double largest = 0;
    for (size_t c = 0; c < d; c++) {
        row[c] = row[c] * (double)m->scale[at + c] + (double)m->mean[at + c];
        largest = fmax(largest, sqrt(norm) * (double)m->scale[at + c] +
                                    (double)d * fabs((double)m->mean[at + c]));
    }
    *error = 0x1p-20 * largest;
    if (has(m, KVC_TRANSFORM_K_ROTATED))
        model_rotate(row, d);
}

double model_query(const struct cache_model *m, int layer, int kv_head, double *q)
{
    const size_t d = (size_t)m->params.head_dim_k, at = vector_at(m, layer, kv_head);
    double shift = 0;

    if (!model_transforms(m, 0))
        return 0;
    if (has(m, KVC_TRANSFORM_K_ROTATED))
        model_rotate(q, d);
    for (size_t c = 0; c < d; c++) {
        shift += q[c] * (double)m->mean[at + c];
        q[c] *= (double)m->scale[at + c];
    }
    if (stores_rotated(m, 0))
        model_rotate(q, d);
    return shift;
}

void model_output(const struct cache_model *m, double *out)
{
    if (stores_rotated(m, 1))
        model_rotate(out, (size_t)m->params.head_dim_v);
}

static void rewrite(struct cache_model *m, struct model_seq *s)
{
    for (int layer = 0; layer < m->params.n_layers; layer++)
        for (int head = 0; head < m->params.n_kv_heads; head++)
            for (int64_t t = 0; t < s->appended[layer]; t++)
                m->n_saturated_shared +=
                    (uint64_t)(model_transform_row(m, layer, head, 0,
                                                   model_k(m, s, layer, head, t)) +
                               model_transform_row(m, layer, head, 1,
                                                   model_v(m, s, layer, head, t)));
}

static void read_vectors(const struct cache_model *m, float *mean, float *scale, bool *ready)
{
    for (int layer = 0; layer < m->params.n_layers; layer++)
        for (int head = 0; head < m->params.n_kv_heads; head++) {
            const size_t at = vector_at(m, layer, head);

            assert_int_equal(
                kvc_cache_read_transform(m->cache, layer, head, mean + at, scale + at, ready),
                KVC_OK);
        }
}

bool model_freezes(const struct cache_model *m, const struct model_seq *s)
{
    return !m->ready && s->n_tokens >= m->params.sink_tokens + 64 * m->params.online_pages;
}

/* What is measured has tests of its own; here it is only asked for. */
void model_take_over(struct cache_model *m)
{
    if (m->ready)
        return;
    read_vectors(m, m->mean, m->scale, &m->ready);
    for (int i = 0; i < MODEL_MAX_SEQS && m->ready; i++)
        if (m->seqs[i].handle != 0)
            rewrite(m, &m->seqs[i]);
}

void model_freeze(struct cache_model *m, const struct model_seq *s, bool compress)
{
    const bool must = model_freezes(m, s) || (compress && s->n_tokens > m->params.sink_tokens);
    bool whole = s->hold == MODEL_NO_HOLD;

    if (m->ready)
        return;
    model_take_over(m);
    for (int64_t i = 0; i < s->n_tokens; i++)
        whole = whole && !s->removed[i];
    if (m->ready != must && (whole || m->ready))
        fail_msg("after %lld tokens of a sequence the transforms %s", (long long)s->n_tokens,
                 m->ready ? "are ready too early" : "still wait");
}

void check_transform(const struct cache_model *m)
{
    const size_t n = vector_at(m, m->params.n_layers, 0);
    float *mean = calloc(n, sizeof(*mean)), *scale = calloc(n, sizeof(*scale));
    bool ready = false;

    if (!mean || !scale)
        abort();
    read_vectors(m, mean, scale, &ready);
    assert_int_equal(ready, m->ready);
    for (size_t i = 0; i < n; i++)
        if (!(mean[i] == m->mean[i] && scale[i] == m->scale[i] && scale[i] > 0 &&
              isfinite(scale[i])))
            fail_msg("transform [%zu] is %.9g, %.9g, not %.9g, %.9g", i, (double)mean[i],
                     (double)scale[i], (double)m->mean[i], (double)m->scale[i]);
    free(mean);
    free(scale);
}
