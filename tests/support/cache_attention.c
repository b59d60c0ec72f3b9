/* Attention of cache_model.h, in double, and what it leaves behind: masses and query rows. */
#include <math.h>
#include <string.h>

#include "cache_model.h"

/* A query as the cache multiplies it. */
struct query {
    double q[KVC_MAX_HEAD_DIM], shift, norm;
};

static void make_query(const struct cache_model *m, const kvc_view *q, size_t row, int layer,
                       int head, struct query *made)
{
    const size_t dim = q->head_dim;

    for (size_t d = 0; d < dim; d++)
        made->q[d] = (double)view_get(q, row, (size_t)head, d);
    made->shift = model_query(m, layer, head / (m->params.n_heads / m->params.n_kv_heads), made->q);
    made->norm = 0;
    for (size_t d = 0; d < dim; d++)
        made->norm += made->q[d] * made->q[d];
    made->norm = sqrt(made->norm);
}

static double logit(const struct cache_model *m, const float *k, const struct query *q,
                    const kvc_attend_options *options, double *magnitude)
{
    double dot = 0, size = 0, norm = 0, peak = 0;

    for (int d = 0; d < m->params.head_dim_k && !options->exact; d++)
        peak = fmax(peak, fabs(q->q[d]));
    for (int d = 0; d < m->params.head_dim_k; d++) {
        const double product = q->q[d] * (double)k[d];

        dot += product;
        size += options->exact ? fabs(product) : peak * fabs((double)k[d]);
        norm += (double)k[d] * (double)k[d];
    }
    if (model_transforms(m, 0)) /* what rotation and shift round to is relative to more */
        size = q->norm * sqrt(norm) + fabs(q->shift);
    dot = (dot + q->shift) * (double)options->scale;
    size *= fabs((double)options->scale);
    *magnitude = fmax(*magnitude, size);
    if (options->softcap > 0)
        dot = (double)options->softcap * tanh(dot / (double)options->softcap);
    return dot;
}

/* Kernels may take the parameters of CHANNEL keys into the query: what cancels then is as large as
 * the largest key of the page, seen or not. */
static double channel_magnitude(const struct cache_model *m, const struct model_seq *s, int layer,
                                int kv_head, int64_t ordinal, const struct query *q)
{
    const kvc_precision *p = &m->precision[layer][kv_head];
    double sum = 0;

    if (p->k == KVC_F16 || p->k_scale != KVC_SCALE_CHANNEL)
        return 0;
    for (int i = 0; i < s->n_pages; i++)
        if (s->pages[i].sealed && s->pages[i].first <= ordinal && ordinal < s->pages[i].end)
            for (int d = 0; d < m->params.head_dim_k; d++)
                sum += fabs(q->q[d]) * (double)s->pages[i].absmax[layer][kv_head][0];
    return sum;
}

void model_attention(const struct cache_model *m, const struct model_seq *s, int layer,
                     const kvc_view *q, size_t row, int head, const kvc_attend_options *options,
                     struct model_attention *want)
{
    const int kv_head = head / (m->params.n_heads / m->params.n_kv_heads);
    const int64_t query = s->n_tokens - (int64_t)q->n_tokens + (int64_t)row;
    const int64_t first =
        options->window > 0 && query >= options->window ? query - options->window + 1 : 0;
    double max = -INFINITY, sum = 0, magnitude = 0, largest = 0, spread = 0, norm = 0, farthest = 0;
    struct query made;

    make_query(m, q, row, layer, head, &made);
    for (int64_t t = 0; t < s->n_tokens; t++) {
        want->mass[t] = -INFINITY;
        if (t < first || t > query || s->removed[t])
            continue;
        want->mass[t] = logit(m, model_k(m, s, layer, kv_head, t), &made, options, &magnitude);
        max = fmax(max, want->mass[t]);
        magnitude = fmax(magnitude, channel_magnitude(m, s, layer, kv_head, t, &made) *
                                        fabs((double)options->scale));
    }
    for (int64_t t = 0; t < s->n_tokens; t++) {
        want->mass[t] = isinf(max) ? 0.0 : exp(want->mass[t] - max);
        sum += want->mass[t];
    }
    for (int64_t t = 0; t < s->n_tokens && sum > 0; t++)
        want->mass[t] /= sum;
    want->lse = sum > 0 ? max + log(sum) : (double)-INFINITY;
    for (int d = 0; d < m->params.head_dim_v; d++) {
        double out = 0, size = 0;

        for (int64_t t = first; t <= query; t++) {
            const double v = (double)model_v(m, s, layer, kv_head, t)[d];

            if (want->mass[t] > 0) {
                out += want->mass[t] * v;
                size += want->mass[t] * fabs(v);
                farthest = fmax(farthest, fabs(v));
            }
        }
        want->out[d] = out;
        largest = fmax(largest, fabs(out));
        spread = fmax(spread, size);
        norm += size * size;
    }
    if (model_transforms(m, 1)) {
        model_output(m, want->out);
        spread = sqrt(norm);
        for (int d = 0; d < m->params.head_dim_v; d++)
            largest = fmax(largest, fabs(want->out[d]));
    }
    /* Where values or products cancel, fp32 is held to a few ulp of what cancels, and products of
     * 16-bit integers to one of theirs: of the largest element of a query, and of values whose
     * weights are small beside those of tokens that have none. */
    const bool exact = options->exact;
    const double ulps = (exact ? 0x1p-21 : 0x1p-16) * magnitude;
    want->tolerance = (exact ? 2e-5 : 2e-4) * fmax(largest, 0.05 * spread) + ulps * spread +
                      0x1p-126 + (exact ? 0 : 0x1p-18) * farthest;
    want->mass_error = 2 * ulps;
    want->lse_tolerance = 1e-5 * fmax(1, fabs(want->lse)) + ulps;
}

static void keep_probe(const struct cache_model *m, struct model_seq *s, int layer,
                       const kvc_view *q, size_t row)
{
    const int64_t ordinal = s->n_tokens - (int64_t)q->n_tokens + (int64_t)row;
    const size_t size = (size_t)m->params.n_heads * (size_t)m->params.head_dim_k;
    int64_t *probed = s->probed[layer];
    float *rows = s->probe_q[layer];
    int n = s->n_probed[layer], at = 0;

    while (at < n && probed[at] < ordinal)
        at++;
    if (at == n || probed[at] != ordinal) {
        if (n == m->params.probe_rows) {
            if (at == 0)
                return;
            memmove(probed, probed + 1, (size_t)(at - 1) * sizeof(*probed));
            memmove(rows, rows + size, (size_t)(at - 1) * size * sizeof(*rows));
            at--;
        } else {
            memmove(probed + at + 1, probed + at, (size_t)(n - at) * sizeof(*probed));
            memmove(rows + size * (size_t)(at + 1), rows + size * (size_t)at,
                    (size_t)(n - at) * size * sizeof(*rows));
            s->n_probed[layer]++;
        }
        probed[at] = ordinal;
    }
    for (size_t i = 0; i < size; i++)
        rows[size * (size_t)at + i] =
            half_round(view_get(q, row, i / q->head_dim, i % q->head_dim));
}

static void add_masses(const struct cache_model *m, struct model_seq *s, int layer,
                       const kvc_view *q, size_t row, const kvc_attend_options *options)
{
    static struct model_attention want;

    for (int head = 0; head < m->params.n_heads; head++) {
        const int kv_head = head / (m->params.n_heads / m->params.n_kv_heads);

        model_attention(m, s, layer, q, row, head, options, &want);
        s->score_error = fmax(s->score_error, want.mass_error);
        for (int64_t t = m->params.sink_tokens; t < s->n_tokens; t++)
            model_score(m, s, layer, kv_head)[t] += want.mass[t];
    }
}

void model_attended(struct cache_model *m, struct model_seq *s, int layer, const kvc_view *q,
                    const kvc_attend_options *options)
{
    for (size_t row = 0; row < q->n_tokens; row++) {
        if (m->params.probe_rows > 0)
            keep_probe(m, s, layer, q, row);
        if (options->accumulate && m->params.score_mode != KVC_SCORE_NONE)
            add_masses(m, s, layer, q, row, options);
    }
}
