/* The comparisons of cache_model.h: what the cache answers against the model's arrays. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cache_model.h"

void check_counts(const struct cache_model *m, const struct model_seq *s)
{
    assert_int_equal(kvc_seq_n_tokens(m->cache, s->handle), s->n_tokens);
    assert_int_equal(kvc_seq_next_position(m->cache, s->handle), model_next_position(s));
    for (int layer = 0; layer < m->params.n_layers; layer++)
        for (int head = 0; head < m->params.n_kv_heads; head++)
            assert_int_equal(kvc_seq_n_rows(m->cache, s->handle, layer, head),
                             model_n_rows(s, layer));
}

void check_tokens(const struct cache_model *m, const struct model_seq *s, int64_t first, int64_t n)
{
    static kvc_token tokens[MODEL_MAX_TOKENS];

    assert_int_equal(kvc_seq_read_tokens(m->cache, s->handle, first, (size_t)n, tokens), KVC_OK);
    assert_memory_equal(tokens, s->tokens + first, (size_t)n * sizeof(*tokens));
}

/* Rows without transforms are read back bit for bit, others as fp32 rounds. */
static void compare_row(const struct cache_model *m, int which, const float *got,
                        const float *stored, const struct model_seq *s, int layer, int kv_head,
                        int64_t ordinal)
{
    const int dim = which ? m->params.head_dim_v : m->params.head_dim_k;
    double want[KVC_MAX_HEAD_DIM], error;

    model_row(m, layer, kv_head, which, stored, want, &error);
    for (int d = 0; d < dim; d++)
        if (!(fabs((double)got[d] - want[d]) <= error))
            fail_msg("%c of layer %d head %d ordinal %lld [%d] is %.9g, not %.9g (%lld tokens)",
                     which ? 'V' : 'K', layer, kv_head, (long long)ordinal, d, (double)got[d],
                     want[d], (long long)s->n_tokens);
}

static void compare_score(const struct cache_model *m, const struct model_seq *s, float got,
                          double want, int64_t ordinal)
{
    bool right = got >= 0 && isfinite(got);

    if (m->params.score_mode == KVC_SCORE_NONE)
        right = got == 0.0f;
    else if (m->params.score_mode == KVC_SCORE_TOKEN)
        right = fabs((double)got - want) <= (1e-4 + s->score_error) * (want + 0.01);
    if (!right)
        fail_msg("score of ordinal %lld is %.9g, not %.9g", (long long)ordinal, (double)got, want);
}

void check_rows(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head)
{
    const size_t n_rows = (size_t)model_n_rows(s, layer);
    const size_t dk = (size_t)m->params.head_dim_k, dv = (size_t)m->params.head_dim_v;
    static int64_t ordinals[MODEL_MAX_TOKENS + 1];
    static float scores[MODEL_MAX_TOKENS + 1];
    float *k = malloc((n_rows + 1) * dk * sizeof(float));
    float *v = malloc((n_rows + 1) * dv * sizeof(float));
    size_t got, row = 0;

    assert_int_equal(kvc_seq_read_rows(m->cache, s->handle, layer, kv_head, n_rows, ordinals, k, v,
                                       scores, &got),
                     KVC_OK);
    assert_int_equal(got, n_rows);
    for (int64_t t = 0; t < s->appended[layer]; t++) {
        if (s->removed[t])
            continue;
        assert_int_equal(ordinals[row], t);
        compare_row(m, 0, k + row * dk, model_k(m, s, layer, kv_head, t), s, layer, kv_head, t);
        compare_row(m, 1, v + row * dv, model_v(m, s, layer, kv_head, t), s, layer, kv_head, t);
        compare_score(m, s, scores[row],
                      t < m->params.sink_tokens ? 0 : model_score(m, s, layer, kv_head)[t], t);
        row++;
    }
    free(k);
    free(v);
}

static bool same_precision(const kvc_precision *got, const kvc_precision *want)
{
    return got->k == want->k && got->v == want->v &&
           (want->k == KVC_F16 || got->k_scale == want->k_scale) &&
           (want->v == KVC_F16 || got->v_scale == want->v_scale);
}

/* Rows of one page: they are live, ascending, and every one of them is sealed or none. */
static void check_page(const struct cache_model *m, const struct model_seq *s, int layer,
                       int kv_head, int64_t index, int64_t *next)
{
    kvc_page_info info = {.struct_size = sizeof(info)};
    int64_t ordinals[KVC_PAGE_TOKENS];

    assert_int_equal(
        kvc_seq_read_page(m->cache, s->handle, layer, kv_head, index, &info, ordinals, NULL, 0),
        KVC_OK);
    assert_in_range(info.n_rows, 1, KVC_PAGE_TOKENS);
    assert_int_equal(info.n_bytes % 128, 0);
    assert_true(info.n_owners >= 1 && info.n_owners <= m->params.max_sequences);
    if (info.sealed)
        assert_true(same_precision(&info.precision, &m->precision[layer][kv_head]));
    else
        assert_true(info.precision.k == KVC_F16 && info.precision.v == KVC_F16);
    for (int r = 0; r < info.n_rows; r++) {
        const struct model_page *page = s->pages;

        if (!(info.live >> r & 1))
            continue;
        while (*next < s->n_tokens && s->removed[*next])
            ++*next;
        assert_int_equal(ordinals[r], *next);
        while (page->end <= *next)
            page++;
        assert_int_equal(info.sealed, page->sealed);
        ++*next;
    }
}

void check_pages(const struct cache_model *m, const struct model_seq *s, int layer, int kv_head)
{
    const int64_t n = kvc_seq_n_pages(m->cache, s->handle, layer, kv_head);
    int64_t next = m->params.sink_tokens;

    if (s->compacted)
        assert_true(n <= s->n_pages);
    else
        assert_int_equal(n, s->n_pages);
    for (int64_t i = 0; i < n; i++)
        check_page(m, s, layer, kv_head, i, &next);
    while (next < s->n_tokens && s->removed[next])
        next++;
    assert_true(next >= s->n_tokens);
}

void check_probes(const struct cache_model *m, const struct model_seq *s, int layer)
{
    const size_t size = (size_t)m->params.n_heads * (size_t)m->params.head_dim_k;
    static int64_t ordinals[1024];
    float *q = malloc((size_t)m->params.probe_rows * size * sizeof(*q) + 1);
    size_t n;

    assert_int_equal(kvc_seq_read_probes(m->cache, s->handle, layer, ordinals, q, &n), KVC_OK);
    assert_int_equal(n, s->n_probed[layer]);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(ordinals[i], s->probed[layer][i]);
    for (size_t i = 0; i < n * size; i++)
        assert_true(q[i] == s->probe_q[layer][i]);
    free(q);
}

static double dtype_error(kvc_dtype dtype, double x)
{
    if (dtype == KVC_DTYPE_F16)
        return fabs(x) * 0x1p-11 + 0x1p-25;
    return dtype == KVC_DTYPE_BF16 ? fabs(x) * 0x1p-8 : 0;
}

void check_attention(const struct cache_model *m, const struct model_seq *s, int layer,
                     const kvc_view *q, size_t row, const kvc_attend_options *options,
                     const kvc_view *out, const float *lse)
{
    static struct model_attention want;

    for (int head = 0; head < m->params.n_heads; head++) {
        const double got_lse =
            lse ? (double)lse[row * (size_t)m->params.n_heads + (size_t)head] : 0;

        model_attention(m, s, layer, q, row, head, options, &want);
        for (size_t d = 0; d < out->head_dim; d++) {
            const double got = (double)view_get(out, row, (size_t)head, d);

            if (!(fabs(got - want.out[d]) <= want.tolerance + dtype_error(out->dtype, want.out[d])))
                fail_msg("attention of layer %d query %zu head %d [%zu] is %.9g, not %.9g +- %.3g",
                         layer, row, head, d, got, want.out[d], want.tolerance);
        }
        if (lse && isinf(want.lse))
            assert_true(isinf(got_lse) && got_lse < 0);
        else if (lse && !(fabs(got_lse - want.lse) <= want.lse_tolerance))
            fail_msg("lse of layer %d query %zu head %d is %.9g, not %.9g", layer, row, head,
                     got_lse, want.lse);
    }
}

void check_seq(const struct cache_model *m, const struct model_seq *s)
{
    check_counts(m, s);
    check_tokens(m, s, 0, s->n_tokens);
    for (int layer = 0; layer < m->params.n_layers; layer++) {
        check_probes(m, s, layer);
        for (int head = 0; head < m->params.n_kv_heads; head++) {
            check_rows(m, s, layer, head);
            if (model_complete(m, s))
                check_pages(m, s, layer, head);
        }
    }
}

kvc_stats check_stats(const struct cache_model *m)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};
    int64_t n_sequences = 0, n_tokens = 0;

    for (int i = 0; i < MODEL_MAX_SEQS; i++) {
        n_sequences += m->seqs[i].handle != 0;
        n_tokens += m->seqs[i].n_tokens;
    }
    assert_int_equal(kvc_cache_stats(m->cache, &stats), KVC_OK);
    assert_int_equal(stats.budget_bytes, m->params.budget_bytes);
    assert_int_equal(stats.used_bytes + stats.fixed_bytes, stats.budget_bytes);
    assert_int_equal(stats.f16_page_bytes + stats.sealed_page_bytes + stats.strip_bytes +
                         stats.entry_bytes + stats.token_bytes,
                     stats.used_bytes);
    assert_int_equal(stats.probe_bytes + stats.scratch_bytes + stats.reserve_bytes +
                         stats.free_page_bytes + stats.free_table_bytes + stats.overhead_bytes,
                     stats.fixed_bytes);
    assert_int_equal(stats.n_sequences, n_sequences);
    assert_int_equal(stats.n_tokens, n_tokens);
    assert_int_equal(stats.n_nonfinite, m->n_nonfinite);
    assert_in_range(stats.n_saturated, m->n_saturated, m->n_saturated + m->n_saturated_shared);
    check_transform(m);
    assert_true(stats.n_sealed_total >= (uint64_t)stats.n_pages_sealed);
    return stats;
}

/* Pages and bytes of a sequence, each page divided by its owners. */
struct page_sums {
    double n[2], bytes[2]; /* unsealed, sealed */
};

static void add_pages(const struct cache_model *m, const struct model_seq *s, int layer,
                      int kv_head, struct page_sums *sums)
{
    const int64_t n = kvc_seq_n_pages(m->cache, s->handle, layer, kv_head);

    for (int64_t i = 0; i < n; i++) {
        kvc_page_info info = {.struct_size = sizeof(info)};

        assert_int_equal(
            kvc_seq_read_page(m->cache, s->handle, layer, kv_head, i, &info, NULL, NULL, 0),
            KVC_OK);
        sums->n[info.sealed] += 1.0 / info.n_owners;
        sums->bytes[info.sealed] += (double)info.n_bytes / info.n_owners;
    }
}

void check_all(const struct cache_model *m)
{
    const kvc_stats stats = check_stats(m);
    struct page_sums sums = {{0}, {0}};
    bool complete = true;

    for (int i = 0; i < MODEL_MAX_SEQS; i++) {
        if (m->seqs[i].handle == 0)
            continue;
        check_seq(m, &m->seqs[i]);
        complete = complete && model_complete(m, &m->seqs[i]);
        for (int layer = 0; layer < m->params.n_layers; layer++)
            for (int head = 0; head < m->params.n_kv_heads; head++)
                add_pages(m, &m->seqs[i], layer, head, &sums);
    }
    if (!complete)
        return;
    assert_int_equal(stats.n_pages_f16, llround(sums.n[0]));
    assert_int_equal(stats.n_pages_sealed, llround(sums.n[1]));
    assert_int_equal(stats.f16_page_bytes, llround(sums.bytes[0]));
    assert_int_equal(stats.sealed_page_bytes, llround(sums.bytes[1]));
}
