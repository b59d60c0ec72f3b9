/* What policy_drive.h declares. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy_drive.h"

kvc_cache_params pd_params(void)
{
    kvc_cache_params p;

    kvc_cache_params_default(&p);
    p.n_layers = 2;
    p.n_heads = 4;
    p.n_kv_heads = 2;
    p.head_dim_k = 16;
    p.head_dim_v = 8;
    p.max_sequences = 2;
    p.max_tokens = 4096;
    p.max_append = 1024;
    p.recent_tokens = 0;
    p.max_hold_tokens = 1024;
    p.precision = (kvc_precision){KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN};
    return p;
}

void pd_open(struct pd *d, kvc_ctx *ctx, kvc_cache_params p, size_t extra_bytes)
{
    memset(d, 0, sizeof(*d));
    assert_int_equal(kvc_cache_min_budget(&p, &p.budget_bytes), KVC_OK);
    p.budget_bytes += extra_bytes;
    d->ctx = ctx;
    d->p = p;
    d->rng = 1;
    d->q_scale = 1;
    assert_int_equal(kvc_cache_create(ctx, &p, &d->cache), KVC_OK);
    assert_int_equal(kvc_seq_create(d->cache, &d->seq), KVC_OK);
}

void pd_close(struct pd *d)
{
    kvc_cache_destroy(d->cache);
    memset(d, 0, sizeof(*d));
}

kvc_token pd_text(int64_t position)
{
    const int32_t t = (int32_t)position;

    return (kvc_token){.t = t, .y = t, .x = t, .image = -1, .row = -1, .col = -1};
}

kvc_token pd_patch(int32_t image, int32_t row, int32_t col, int64_t position)
{
    const int32_t t = (int32_t)position;

    return (kvc_token){.t = t,
                       .y = t + row,
                       .x = t + col,
                       .image = image,
                       .row = row,
                       .col = col,
                       .kind = KVC_TOKEN_VISUAL};
}

static void *allocate(size_t n, size_t size)
{
    void *p = calloc(n + 1, size);

    assert_non_null(p);
    return p;
}

static float normal(uint64_t *rng)
{
    return rng_unit(rng) + rng_unit(rng) + rng_unit(rng);
}

static float *random_or(const float *given, size_t n, uint64_t *rng)
{
    float *x = allocate(n, sizeof(*x));

    for (size_t i = 0; i < n; i++)
        x[i] = given ? given[i] : normal(rng);
    return x;
}

void pd_feed(struct pd *d, const kvc_token *tokens, int n, const float *k, const float *v)
{
    const size_t count = (size_t)n, heads = (size_t)d->p.n_kv_heads;
    const size_t dk = (size_t)d->p.head_dim_k, dv = (size_t)d->p.head_dim_v;

    assert_int_equal(kvc_tokens_add(d->cache, d->seq, tokens, count), KVC_OK);
    for (int layer = 0; layer < d->p.n_layers; layer++) {
        const size_t at = (size_t)layer * count * heads;
        float *xk = random_or(k ? k + at * dk : NULL, count * heads * dk, &d->rng);
        float *xv = random_or(v ? v + at * dv : NULL, count * heads * dv, &d->rng);
        const kvc_view vk = kvc_view_packed(xk, KVC_DTYPE_F32, count, heads, dk);
        const kvc_view vv = kvc_view_packed(xv, KVC_DTYPE_F32, count, heads, dv);

        assert_int_equal(kvc_append(d->cache, d->seq, layer, &vk, &vv), KVC_OK);
        free(xk);
        free(xv);
    }
}

void pd_feed_text(struct pd *d, int n)
{
    pd_feed(d, NULL, n, NULL, NULL);
}

int64_t pd_feed_image(struct pd *d, int32_t image, int rows, int cols)
{
    const int64_t first = kvc_seq_n_tokens(d->cache, d->seq);
    const int64_t position = kvc_seq_next_position(d->cache, d->seq);
    kvc_token *tokens = allocate((size_t)(rows * cols), sizeof(*tokens));

    for (int i = 0; i < rows * cols; i++)
        tokens[i] = pd_patch(image, i / cols, i % cols, position);
    pd_feed(d, tokens, rows * cols, NULL, NULL);
    free(tokens);
    return first;
}

static float *random_queries(struct pd *d, size_t n)
{
    float *q = random_or(NULL, n, &d->rng);

    for (size_t i = 0; i < n; i++)
        q[i] *= d->q_scale;
    return q;
}

static void attend(struct pd *d, kvc_seq seq, int n_q, const kvc_attend_options *options,
                   bool check)
{
    const size_t n = (size_t)n_q, heads = (size_t)d->p.n_heads;
    const size_t dk = (size_t)d->p.head_dim_k, dv = (size_t)d->p.head_dim_v;
    const int g = d->p.n_heads / d->p.n_kv_heads;
    kvc_attend_options o;

    kvc_attend_options_default(d->cache, &o);
    if (options)
        o = *options;
    for (int layer = 0; layer < d->p.n_layers; layer++) {
        float *q = random_queries(d, n * heads * dk);
        float *out = allocate(n * heads * dv, sizeof(*out));
        float *lse = allocate(n * heads, sizeof(*lse));
        const kvc_view vq = kvc_view_packed(q, KVC_DTYPE_F32, n, heads, dk);
        const kvc_view vo = kvc_view_packed(out, KVC_DTYPE_F32, n, heads, dv);

        assert_int_equal(kvc_attend(d->cache, seq, layer, &vq, &o, &vo, lse), KVC_OK);
        for (int kv = 0; check && kv < d->p.n_kv_heads; kv++) {
            struct pd_rows rows = pd_read(d, seq, layer, kv);

            for (size_t i = 0; i < n * heads; i++) {
                const int64_t ordinal =
                    kvc_seq_n_tokens(d->cache, seq) - n_q + (int64_t)(i / heads);
                double want[KVC_MAX_HEAD_DIM], want_lse, tolerance;

                if ((int)(i % heads) / g != kv)
                    continue;
                pd_attention(d, &rows, q + i * dk, ordinal, &o, want, &want_lse, &tolerance);
                for (size_t e = 0; e < dv; e++)
                    if (!(fabs((double)out[i * dv + e] - want[e]) <= tolerance))
                        fail_msg("layer %d head %d ordinal %lld [%zu]: %.9g, not %.9g +- %.2g",
                                 layer, (int)(i % heads), (long long)ordinal, e,
                                 (double)out[i * dv + e], want[e], tolerance);
                if (!(fabs((double)lse[i] - want_lse) <=
                      (o.exact ? 2e-5 : 1e-4) * fmax(1, fabs(want_lse)) + tolerance))
                    fail_msg("layer %d head %d ordinal %lld: lse %.9g, not %.9g", layer,
                             (int)(i % heads), (long long)ordinal, (double)lse[i], want_lse);
            }
            pd_free(&rows);
        }
        free(q);
        free(out);
        free(lse);
    }
}

void pd_look(struct pd *d, int n_q)
{
    attend(d, d->seq, n_q, NULL, false);
}

void pd_check_attention(struct pd *d, kvc_seq seq, int n_q, const kvc_attend_options *options)
{
    attend(d, seq, n_q, options, true);
}

kvc_policy pd_policy(void)
{
    kvc_policy policy;

    kvc_policy_default(&policy);
    policy.keep_min = 0;
    policy.last_tokens = 0;
    policy.keep_sentences = false;
    policy.sink_factor = 0;
    return policy;
}

kvc_report pd_compress(struct pd *d, const kvc_policy *policy)
{
    kvc_report report = {.struct_size = sizeof(report)};

    assert_int_equal(kvc_cache_compress(d->cache, d->seq, policy, &report, NULL), KVC_OK);
    return report;
}

kvc_stats pd_stats(const struct pd *d)
{
    kvc_stats stats;

    memset(&stats, 0, sizeof(stats));
    stats.struct_size = sizeof(stats);
    assert_int_equal(kvc_cache_stats(d->cache, &stats), KVC_OK);
    assert_int_equal(stats.used_bytes + stats.fixed_bytes, stats.budget_bytes);
    assert_int_equal(stats.f16_page_bytes + stats.sealed_page_bytes + stats.strip_bytes +
                         stats.entry_bytes + stats.token_bytes,
                     stats.used_bytes);
    return stats;
}

struct pd_rows pd_read(const struct pd *d, kvc_seq seq, int layer, int head)
{
    const size_t room = (size_t)kvc_seq_n_rows(d->cache, seq, layer, head);
    struct pd_rows r = {0};
    size_t n;
    bool ready;

    r.ordinals = allocate(room, sizeof(*r.ordinals));
    r.k = allocate(room * (size_t)d->p.head_dim_k, sizeof(float));
    r.v = allocate(room * (size_t)d->p.head_dim_v, sizeof(float));
    r.masses = allocate(room, sizeof(float));
    r.scores = allocate(room, sizeof(float));
    r.biases = allocate(room, sizeof(float));
    r.sizes = allocate(room, sizeof(*r.sizes));
    assert_int_equal(
        kvc_seq_read_rows(d->cache, seq, layer, head, room, r.ordinals, r.k, r.v, r.masses, &r.n),
        KVC_OK);
    assert_int_equal(kvc_seq_read_groups(d->cache, seq, layer, head, room, r.biases, r.sizes, &n),
                     KVC_OK);
    assert_int_equal(n, r.n);
    r.mean = allocate((size_t)d->p.head_dim_k, sizeof(float));
    r.scale = allocate((size_t)d->p.head_dim_k, sizeof(float));
    assert_int_equal(kvc_cache_read_transform(d->cache, layer, head, r.mean, r.scale, &ready),
                     KVC_OK);
    for (size_t i = 0; i < r.n; i++) {
        assert_true(r.ordinals[i] >= 0 && r.ordinals[i] < kvc_seq_n_tokens(d->cache, seq));
        assert_true(i == 0 || r.ordinals[i - 1] < r.ordinals[i]);
    }
    return r;
}

void pd_free(struct pd_rows *r)
{
    free(r->ordinals);
    free(r->k);
    free(r->v);
    free(r->masses);
    free(r->scores);
    free(r->biases);
    free(r->mean);
    free(r->scale);
    free(r->sizes);
    memset(r, 0, sizeof(*r));
}

int pd_find(const struct pd_rows *rows, int64_t ordinal)
{
    for (size_t i = 0; i < rows->n; i++)
        if (rows->ordinals[i] == ordinal)
            return (int)i;
    return -1;
}

/* Of the products that a logit is the sum of, as they are stored: rotation mixes all channels. */
static double magnitude_of(const struct pd *d, const struct pd_rows *rows, const float *q,
                           const float *k)
{
    double plain = 0, shift = 0, q_square = 0, k_square = 0;

    for (int i = 0; i < d->p.head_dim_k; i++) {
        const double scale = (double)rows->scale[i], mean = (double)rows->mean[i];
        const double q_stored = (double)q[i] * scale, k_stored = ((double)k[i] - mean) / scale;

        plain += fabs((double)q[i] * (double)k[i]);
        shift += fabs((double)q[i] * mean);
        q_square += q_stored * q_stored;
        k_square += k_stored * k_stored;
    }
    return fmax(plain, d->p.transform ? sqrt(q_square * k_square) + shift : shift);
}

static double logit(const struct pd *d, const struct pd_rows *rows, size_t row, const float *q,
                    const kvc_attend_options *options, double *magnitude)
{
    const float *k = rows->k + row * (size_t)d->p.head_dim_k;
    const double size = magnitude_of(d, rows, q, k);
    double z = 0;

    for (int i = 0; i < d->p.head_dim_k; i++)
        z += (double)q[i] * (double)k[i];
    z *= (double)options->scale;
    *magnitude = fmax(*magnitude, size * fabs((double)options->scale));
    if (options->softcap > 0)
        z = (double)options->softcap * tanh(z / (double)options->softcap);
    return z + (double)rows->biases[row];
}

void pd_attention(const struct pd *d, const struct pd_rows *rows, const float *q, int64_t ordinal,
                  const kvc_attend_options *options, double *out, double *lse, double *tolerance)
{
    double *z = allocate(rows->n, sizeof(*z));
    double max = -INFINITY, sum = 0, magnitude = 0, largest = 0, spread = 0;

    for (size_t i = 0; i < rows->n; i++) {
        const int64_t age = ordinal - rows->ordinals[i];

        z[i] = -INFINITY;
        if (age < 0 || (options->window > 0 && age >= options->window))
            continue;
        z[i] = logit(d, rows, i, q, options, &magnitude);
        max = fmax(max, z[i]);
    }
    for (size_t i = 0; i < rows->n; i++)
        sum += isinf(z[i]) ? 0 : exp(z[i] - max);
    *lse = max + log(sum);
    for (int e = 0; e < d->p.head_dim_v; e++) {
        double size = 0;

        out[e] = 0;
        for (size_t i = 0; i < rows->n; i++) {
            const double v = (double)rows->v[i * (size_t)d->p.head_dim_v + (size_t)e];

            out[e] += isinf(z[i]) ? 0 : exp(z[i] - *lse) * v;
            size += isinf(z[i]) ? 0 : exp(z[i] - *lse) * fabs(v);
        }
        largest = fmax(largest, fabs(out[e]));
        spread = fmax(spread, size);
    }
    *tolerance = (options->exact ? 2e-5 : 2e-4) * fmax(largest, 0.05 * spread) +
                 (options->exact ? 0x1p-21 : 0x1p-15) * magnitude * spread + 0x1p-126;
    free(z);
}

void pd_probe_scores(const struct pd *d, kvc_seq seq, int layer, int head, double *scores)
{
    const size_t heads = (size_t)d->p.n_heads, dk = (size_t)d->p.head_dim_k;
    const size_t g = heads / (size_t)d->p.n_kv_heads;
    int64_t *ordinals = allocate((size_t)d->p.probe_rows, sizeof(*ordinals));
    float *q = allocate((size_t)d->p.probe_rows * heads * dk, sizeof(*q));
    struct pd_rows rows = pd_read(d, seq, layer, head);
    kvc_attend_options o;
    size_t n;

    kvc_attend_options_default(d->cache, &o);
    assert_int_equal(kvc_seq_read_probes(d->cache, seq, layer, ordinals, q, &n), KVC_OK);
    memset(scores, 0, rows.n * sizeof(*scores));
    for (size_t r = 0; r < n * g; r++) {
        const float *x = q + ((r / g) * heads + (size_t)head * g + r % g) * dk;
        double out[KVC_MAX_HEAD_DIM], lse, magnitude = 0;

        pd_attention(d, &rows, x, ordinals[r / g], &o, out, &lse, &magnitude);
        for (size_t i = 0; i < rows.n; i++)
            if (rows.ordinals[i] <= ordinals[r / g])
                scores[i] += exp(logit(d, &rows, i, x, &o, &magnitude) - lse) / (double)(n * g);
    }
    pd_free(&rows);
    free(ordinals);
    free(q);
}

static uint64_t mix(uint64_t hash, const void *data, size_t n)
{
    const unsigned char *p = data;

    for (size_t i = 0; i < n; i++)
        hash = (hash ^ p[i]) * UINT64_C(0x100000001B3);
    return hash;
}

static uint64_t digest_pages(const struct pd *d, kvc_seq seq, int layer, int head, uint64_t hash)
{
    const int64_t n = kvc_seq_n_pages(d->cache, seq, layer, head);

    for (int64_t i = 0; i < n; i++) {
        kvc_page_info info = {.struct_size = sizeof(info)};
        int64_t ordinals[KVC_PAGE_TOKENS];
        unsigned char *bytes;

        assert_int_equal(kvc_seq_read_page(d->cache, seq, layer, head, i, &info, NULL, NULL, 0),
                         KVC_OK);
        bytes = allocate(info.n_bytes, 1);
        assert_int_equal(
            kvc_seq_read_page(d->cache, seq, layer, head, i, &info, ordinals, bytes, info.n_bytes),
            KVC_OK);
        hash = mix(hash, ordinals, (size_t)info.n_rows * sizeof(*ordinals));
        hash = mix(hash, &info.live, sizeof(info.live));
        hash = mix(hash, &info.sealed, sizeof(info.sealed));
        hash = mix(hash, &info.n_owners, sizeof(info.n_owners));
        if (info.sealed)
            hash = mix(hash, bytes, info.n_bytes);
        free(bytes);
    }
    return hash;
}

static uint64_t digest_head(const struct pd *d, kvc_seq seq, int layer, int head, uint64_t hash)
{
    struct pd_rows r = pd_read(d, seq, layer, head);

    hash = mix(hash, r.ordinals, r.n * sizeof(*r.ordinals));
    hash = mix(hash, r.k, r.n * (size_t)d->p.head_dim_k * sizeof(float));
    hash = mix(hash, r.v, r.n * (size_t)d->p.head_dim_v * sizeof(float));
    hash = mix(hash, r.masses, r.n * sizeof(float));
    hash = mix(hash, r.biases, r.n * sizeof(float));
    hash = mix(hash, r.sizes, r.n * sizeof(*r.sizes));
    pd_free(&r);
    return digest_pages(d, seq, layer, head, hash);
}

static uint64_t digest_probes(const struct pd *d, kvc_seq seq, int layer, uint64_t hash)
{
    const size_t size = (size_t)(d->p.n_heads * d->p.head_dim_k);
    int64_t *ordinals = allocate((size_t)d->p.probe_rows, sizeof(*ordinals));
    float *q = allocate((size_t)d->p.probe_rows * size, sizeof(*q));
    size_t n;

    assert_int_equal(kvc_seq_read_probes(d->cache, seq, layer, ordinals, q, &n), KVC_OK);
    hash = mix(hash, ordinals, n * sizeof(*ordinals));
    hash = mix(hash, q, n * size * sizeof(*q));
    free(ordinals);
    free(q);
    return hash;
}

uint64_t pd_digest(const struct pd *d, kvc_seq seq)
{
    const int64_t counts[] = {kvc_seq_n_tokens(d->cache, seq),
                              kvc_seq_next_position(d->cache, seq)};
    uint64_t hash = mix(UINT64_C(0xCBF29CE484222325), counts, sizeof(counts));

    for (int64_t i = 0; i < counts[0]; i++) {
        kvc_token token = {0};
        const kvc_status status = kvc_seq_read_tokens(d->cache, seq, i, 1, &token);

        hash = mix(hash, &status, sizeof(status));
        hash = mix(hash, &token, sizeof(token));
    }
    for (int layer = 0; layer < d->p.n_layers; layer++) {
        hash = digest_probes(d, seq, layer, hash);
        for (int head = 0; head < d->p.n_kv_heads; head++)
            hash = digest_head(d, seq, layer, head, hash);
    }
    return hash;
}

struct pd_state pd_save(const struct pd *d)
{
    return (struct pd_state){pd_digest(d, d->seq), pd_stats(d)};
}

void pd_assert_same(const struct pd *d, const struct pd_state *state)
{
    const kvc_stats stats = pd_stats(d);

    assert_true(pd_digest(d, d->seq) == state->digest);
    assert_memory_equal(&stats, &state->stats, sizeof(stats));
}
