/* prune_budget.c - scores of heavy hitters, and how a total is split over layers or heads. */
#include "kvc/prune.h"

#include <math.h>

#include "arena.h"
#include "check.h"
#include "ctx.h"

enum { CHUNK = 64 };

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* A score or a mass that can be added up. */
static bool is_mass(float x)
{
    return x >= 0.0f && isfinite(x);
}

static bool all_masses(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!is_mass(x[i]))
            return false;
    return true;
}

/* Scores. */

static const kvc_heavy_options heavy_defaults = {
    .struct_size = sizeof(heavy_defaults),
    .decay = 0.98f,
    .recent_weight = 2.0f,
    .recent = 32,
};

void kvc_heavy_options_init(kvc_heavy_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &heavy_defaults, sizeof(heavy_defaults));
}

static kvc_status take_heavy_options(const kvc_heavy_options *options, kvc_heavy_options *out)
{
    *out = heavy_defaults;
    if (options)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), options, sizeof(*out)));
    KVC_CHECK(out->decay > 0.0f && out->decay <= 1.0f && out->recent_weight > 0.0f &&
                  isfinite(out->recent_weight) && out->recent >= 0,
              KVC_E_ARG);
    return KVC_OK;
}

/* Rows that query q sees. */
static size_t visible(size_t first_query, size_t q, size_t n)
{
    return first_query >= n || q >= n - first_query ? n : first_query + q + 1;
}

/* The attention of all queries, and what the score of a row needs of it. */
struct heavy {
    const float *attention;
    size_t n_queries, n, stride, first_query;
    kvc_heavy_options options;
};

/* Rows first ... last - 1, at most CHUNK; old queries decay as newer ones are added. */
static void heavy_chunk(const struct heavy *h, size_t first, size_t last, float *scores)
{
    double num[CHUNK] = {0}, den[CHUNK] = {0};
    const double decay = (double)h->options.decay;

    for (size_t q = 0; q < h->n_queries; q++) {
        const size_t v = visible(h->first_query, q, h->n), end = smaller(v, last);
        const bool recent = h->n_queries - q <= (size_t)h->options.recent;
        const double w = recent ? (double)h->options.recent_weight : 1.0;
        const float *a = h->attention + q * h->stride;
        for (size_t i = first; i < end; i++) {
            num[i - first] = decay * num[i - first] + w * ((double)v * (double)a[i]);
            den[i - first] = decay * den[i - first] + w;
        }
    }
    for (size_t i = first; i < last; i++)
        scores[i] = den[i - first] > 0.0 ? (float)(num[i - first] / den[i - first]) : 0.0f;
}

kvc_status kvc_heavy_scores(const float *attention, size_t n_queries, size_t n, size_t stride,
                            size_t first_query, const kvc_heavy_options *options, float *scores)
{
    struct heavy h = {.attention = attention,
                      .n_queries = n_queries,
                      .n = n,
                      .stride = stride,
                      .first_query = first_query};

    KVC_TRY(take_heavy_options(options, &h.options));
    KVC_CHECK(stride >= n && (scores || n == 0), KVC_E_ARG);
    KVC_CHECK(attention || n == 0 || n_queries == 0, KVC_E_ARG);
    for (size_t q = 0; q < n_queries && n > 0; q++)
        KVC_CHECK(all_masses(attention + q * stride, visible(first_query, q, n)), KVC_E_ARG);
    for (size_t i = 0; i < n; i += CHUNK)
        heavy_chunk(&h, i, smaller(n, i + CHUNK), scores);
    return KVC_OK;
}

kvc_status kvc_heavy_add(const float *attention, size_t n_visible, const kvc_heavy_options *options,
                         float *num, float *den)
{
    kvc_heavy_options o;

    KVC_TRY(take_heavy_options(options, &o));
    KVC_CHECK((attention && num && den) || n_visible == 0, KVC_E_ARG);
    KVC_CHECK(all_masses(attention, n_visible), KVC_E_ARG);
    for (size_t i = 0; i < n_visible; i++) {
        num[i] = o.decay * num[i] + (float)n_visible * attention[i];
        den[i] = o.decay * den[i] + 1.0f;
    }
    return KVC_OK;
}

kvc_status kvc_heavy_ratio(const float *num, const float *den, size_t n, float *scores)
{
    KVC_CHECK((num && den && scores) || n == 0, KVC_E_ARG);
    for (size_t i = 0; i < n; i++)
        scores[i] = den[i] > 0.0f ? num[i] / den[i] : 0.0f;
    return KVC_OK;
}

static double weight_or_one(const float *weights, size_t i)
{
    return weights ? (double)weights[i] : 1.0;
}

/* What makes the mean of the finite scores 1; 0 if they are all 0. */
static double mean_one_factor(const float *scores, size_t n)
{
    double sum = 0.0;
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        if (isfinite(scores[i])) {
            sum += (double)scores[i];
            count++;
        }
    return sum > 0.0 ? (double)count / sum : 0.0;
}

/* Joins one layer, scaled, to the rows that it has a finite score for. */
static void combine_layer(const float *scores, size_t n, double factor, bool max, float *out)
{
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(scores[i]))
            continue;
        const float y = (float)((double)scores[i] * factor);
        if (isnan(out[i]) || (max && y > out[i]))
            out[i] = y;
        else if (!max)
            out[i] += y;
    }
}

kvc_status kvc_combine_scores(const float *const *scores, size_t n_layers, size_t n,
                              const float *weights, bool max, float *out)
{
    double sum = 0.0;

    KVC_CHECK(scores && n_layers > 0 && (out || n == 0), KVC_E_ARG);
    for (size_t l = 0; l < n_layers; l++) {
        const double w = weight_or_one(weights, l);
        KVC_CHECK(w >= 0.0 && isfinite(w), KVC_E_ARG);
        sum += w;
        for (size_t i = 0; i < n && w > 0.0; i++)
            KVC_CHECK(scores[l] && !(scores[l][i] < 0.0f && isfinite(scores[l][i])), KVC_E_ARG);
    }
    KVC_CHECK(sum > 0.0, KVC_E_ARG);
    for (size_t i = 0; i < n; i++)
        out[i] = NAN;
    for (size_t l = 0; l < n_layers; l++) {
        const double w = weight_or_one(weights, l);
        if (w > 0.0)
            combine_layer(scores[l], n, mean_one_factor(scores[l], n) * (max ? 1.0 : w / sum), max,
                          out);
    }
    return KVC_OK;
}

/* Budgets. */

static const kvc_budget_options budget_defaults = {
    .struct_size = sizeof(budget_defaults),
    .mode = KVC_BUDGET_HYBRID,
    .uniform_share = 0.8f,
    .pyramid = 3.0f,
    .min = 0,
    .max = INT32_MAX,
};

void kvc_budget_options_init(kvc_budget_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &budget_defaults, sizeof(budget_defaults));
}

static kvc_status take_budget_options(const kvc_budget_options *options, kvc_budget_options *out)
{
    *out = budget_defaults;
    if (options)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), options, sizeof(*out)));
    KVC_CHECK((unsigned)out->mode <= KVC_BUDGET_MASS && out->uniform_share >= 0.0f &&
                  out->uniform_share <= 1.0f && out->pyramid > 0.0f && isfinite(out->pyramid) &&
                  out->min <= out->max && out->max <= INT32_MAX,
              KVC_E_ARG);
    return KVC_OK;
}

/* total, or what n budgets of min ... max can reach of it; false if that does not fit size_t. */
static bool reachable_total(size_t n, size_t min, size_t max, size_t *total)
{
    size_t least, most;
    if (__builtin_mul_overflow(n, min, &least))
        return false;
    if (!__builtin_mul_overflow(n, max, &most))
        *total = smaller(*total, most);
    *total = *total > least ? *total : least;
    return true;
}

/* A split under way. Budgets that are bound to min or max are final, free ones are stored as their
 * complement, which is negative. */
struct split {
    const float *weights; /* NULL: equal */
    size_t n, total;
    kvc_budget_options options;
    double weight_sum; /* of weights */
    size_t rest, n_free;
    double free_sum; /* of weight_of() */
    int32_t *budgets;
};

static double weight_of(const struct split *s, size_t i)
{
    const double even = 1.0 / (double)s->n, pyramid = (double)s->options.pyramid;
    const double own = s->weights ? (double)s->weights[i] / s->weight_sum : even;
    const double uniform = (double)s->options.uniform_share;

    switch (s->options.mode) {
    case KVC_BUDGET_PYRAMID:
        return s->n == 1 ? 1.0 : pyramid + (1.0 - pyramid) * (double)i / (double)(s->n - 1);
    case KVC_BUDGET_WEIGHTS: return own;
    case KVC_BUDGET_HYBRID: return uniform * even + (1.0 - uniform) * own;
    case KVC_BUDGET_UNIFORM:
    case KVC_BUDGET_MASS: break;
    }
    return even;
}

/* What a free budget has a right to of the rest. */
static double share_of(const struct split *s, size_t i)
{
    const double rest = (double)s->rest;
    return s->free_sum > 0.0 ? rest * (weight_of(s, i) / s->free_sum) : rest / (double)s->n_free;
}

static void sum_free(struct split *s)
{
    s->rest = s->total;
    s->n_free = 0;
    s->free_sum = 0.0;
    for (size_t i = 0; i < s->n; i++) {
        if (s->budgets[i] >= 0) {
            s->rest -= (size_t)s->budgets[i];
            continue;
        }
        s->n_free++;
        s->free_sum += weight_of(s, i);
    }
}

/* Binds free budgets whose share is beyond a bound: those below min if they lack more than the
 * others have too much, else those above max. False when none is beyond. */
static bool bind_shares(struct split *s)
{
    const double min = (double)s->options.min, max = (double)s->options.max;
    double lack = 0.0, excess = 0.0;

    for (size_t i = 0; i < s->n; i++) {
        const double share = s->budgets[i] < 0 ? share_of(s, i) : min;
        lack += share < min ? min - share : 0.0;
        excess += share > max ? share - max : 0.0;
    }
    if (lack <= 0.0 && excess <= 0.0)
        return false;
    for (size_t i = 0; i < s->n; i++) {
        if (s->budgets[i] >= 0)
            continue;
        const double share = share_of(s, i);
        if (lack >= excess && share < min)
            s->budgets[i] = (int32_t)s->options.min;
        else if (lack < excess && share > max)
            s->budgets[i] = (int32_t)s->options.max;
    }
    return true;
}

/* The budget below max whose share is farthest above it; there is one while total is not reached.
 */
static size_t most_wanting(const struct split *s)
{
    size_t best = s->n;
    double most = 0.0;
    for (size_t i = 0; i < s->n; i++) {
        const bool is_free = s->budgets[i] < 0;
        const int32_t whole = is_free ? ~s->budgets[i] : s->budgets[i];
        const double want = is_free ? share_of(s, i) - (double)whole : 0.0;
        if ((size_t)whole < s->options.max && (best == s->n || want > most)) {
            best = i;
            most = want;
        }
    }
    return best;
}

/* Makes the free shares whole: all rounded down, what is left to the largest remainders. */
static void round_shares(struct split *s)
{
    /* A share that is whole but for rounding counts as whole, else a lower index could lose a tie.
     */
    const double slack = 1e-12;
    size_t left = s->rest;

    for (size_t i = 0; i < s->n; i++) {
        if (s->budgets[i] >= 0)
            continue;
        const size_t whole = smaller((size_t)(share_of(s, i) + slack), left);
        left -= whole;
        s->budgets[i] = ~(int32_t)whole;
    }
    for (; left > 0; left--) {
        int32_t *budget = &s->budgets[most_wanting(s)];
        *budget += *budget < 0 ? -1 : 1;
    }
    for (size_t i = 0; i < s->n; i++)
        if (s->budgets[i] < 0)
            s->budgets[i] = ~s->budgets[i];
}

static bool mode_weighs(kvc_budget_mode mode)
{
    return mode == KVC_BUDGET_WEIGHTS || mode == KVC_BUDGET_HYBRID;
}

kvc_status kvc_split_budget(const float *weights, size_t n, size_t total,
                            const kvc_budget_options *options, int32_t *budgets)
{
    struct split s = {.n = n, .total = total, .budgets = budgets};

    KVC_TRY(take_budget_options(options, &s.options));
    KVC_CHECK((budgets || n == 0) && s.options.mode != KVC_BUDGET_MASS, KVC_E_ARG);
    if (mode_weighs(s.options.mode)) {
        KVC_CHECK((weights || n == 0) && all_masses(weights, n), KVC_E_ARG);
        for (size_t i = 0; i < n; i++)
            s.weight_sum += (double)weights[i];
        s.weights = s.weight_sum > 0.0 ? weights : NULL;
    }
    KVC_CHECK(reachable_total(n, s.options.min, s.options.max, &s.total), KVC_E_ARG);
    for (size_t i = 0; i < n; i++)
        budgets[i] = ~0;
    do
        sum_free(&s);
    while (bind_shares(&s));
    round_shares(&s);
    return KVC_OK;
}

kvc_status kvc_score_sparsity(const float *probabilities, size_t n_rows, size_t n_cols,
                              size_t stride, float *sparsity)
{
    size_t n_small = 0, n_seen = 0;

    KVC_CHECK(sparsity && stride >= n_cols && (probabilities || n_rows == 0 || n_cols == 0),
              KVC_E_ARG);
    for (size_t r = 0; r < n_rows && n_cols > 0; r++) {
        const float *p = probabilities + r * stride;
        float max = 0.0f;
        KVC_CHECK(all_masses(p, n_cols), KVC_E_ARG);
        for (size_t c = 0; c < n_cols; c++)
            max = p[c] > max ? p[c] : max;
        for (size_t c = 0; c < n_cols; c++)
            n_small += p[c] < 0.01f * max;
        n_seen += max > 0.0f ? n_cols : 0;
    }
    *sparsity = n_seen > 0 ? (float)((double)n_small / (double)n_seen) : 0.0f;
    return KVC_OK;
}

/* Score masses of all layers: of each, in falling order, the mass before every score. */
struct masses {
    double *before; /* [n][n_tokens] */
    uint32_t *bits; /* [2][n_tokens], of the layer that is being sorted */
    size_t n, n_tokens, min, max;
};

static bool carve_masses(struct kvc_arena *arena, size_t n, size_t n_tokens, struct masses *m)
{
    size_t count;
    if (__builtin_mul_overflow(n, n_tokens, &count) || n_tokens > INT32_MAX)
        return false;
    m->before = kvc_arena_take(arena, count, sizeof(*m->before), KVC_WS_ALIGN);
    m->bits = kvc_arena_take(arena, n > 0 ? 2 * n_tokens : 0, sizeof(*m->bits), KVC_WS_ALIGN);
    return !arena->overflow;
}

kvc_status kvc_budget_mass_workspace_size(size_t n, size_t n_tokens, size_t *size)
{
    struct kvc_arena arena = {0};
    struct masses m;

    KVC_CHECK(size && carve_masses(&arena, n, n_tokens, &m), KVC_E_ARG);
    *size = arena.used;
    return KVC_OK;
}

/* Largest first, digit by digit from the lowest: the bits of floats >= 0 rise with them. Even many
 * passes leave the result where it was. */
static void sort_descending(uint32_t *bits, uint32_t *other, size_t n)
{
    for (int shift = 0; shift < 32; shift += 8) {
        uint32_t *const from = bits;
        size_t at[257] = {0};
        for (size_t i = 0; i < n; i++)
            at[(~from[i] >> shift & 0xFF) + 1]++;
        for (size_t digit = 0; digit < 256; digit++)
            at[digit + 1] += at[digit];
        for (size_t i = 0; i < n; i++)
            other[at[~from[i] >> shift & 0xFF]++] = from[i];
        bits = other;
        other = from;
    }
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static void order_masses(const struct masses *m, const float *scores, double *before)
{
    const size_t n = m->n_tokens;
    double sum = 0.0, running = 0.0;

    for (size_t i = 0; i < n; i++) {
        const float x = scores[i] + 0.0f; /* -0 becomes 0 */
        memcpy(&m->bits[i], &x, sizeof(x));
        sum += (double)x;
    }
    sort_descending(m->bits, m->bits + n, n);
    for (size_t i = 0; i < n; i++) {
        const double even = (double)i / (double)n;
        before[i] = (sum > 0.0 ? running / sum : even) + 0x1p-20 * even;
        running += (double)float_of(m->bits[i]);
    }
}

/* The budget of layer i at threshold t. */
static size_t budget_at(const struct masses *m, size_t i, double t)
{
    const double *before = m->before + i * m->n_tokens;
    size_t lo = m->min, hi = m->max;
    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if (before[mid] < t)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static size_t total_at(const struct masses *m, double t)
{
    size_t total = 0;
    for (size_t i = 0; i < m->n; i++)
        total += budget_at(m, i, t);
    return total;
}

/* Fills budgets with the sum total, which min and max can reach. */
static void split_masses(const struct masses *m, size_t total, int32_t *budgets)
{
    double lo = 0.0, hi = 2.0; /* gives all min at most total; gives all max at least total */
    size_t left = total;

    for (int i = 0; i < 60; i++) {
        const double mid = lo + (hi - lo) / 2;
        if (total_at(m, mid) <= total)
            lo = mid;
        else
            hi = mid;
    }
    for (size_t i = 0; i < m->n; i++) {
        budgets[i] = (int32_t)budget_at(m, i, lo);
        left -= (size_t)budgets[i];
    }
    for (size_t i = 0; left > 0; i = (i + 1) % m->n)
        if ((size_t)budgets[i] < budget_at(m, i, hi)) {
            budgets[i]++;
            left--;
        }
}

kvc_status kvc_budget_mass(const float *scores, size_t n, size_t n_tokens, size_t total,
                           const kvc_budget_options *options, int32_t *budgets, void *ws,
                           size_t ws_size)
{
    struct kvc_arena arena = {.base = ws};
    struct masses m = {.n = n, .n_tokens = n_tokens};
    kvc_budget_options o;
    size_t need;

    KVC_TRY(take_budget_options(options, &o));
    KVC_TRY(kvc_budget_mass_workspace_size(n, n_tokens, &need));
    KVC_CHECK((budgets || n == 0) && (scores || n == 0 || n_tokens == 0), KVC_E_ARG);
    KVC_CHECK(all_masses(scores, n * n_tokens), KVC_E_ARG);
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
    m.min = smaller(o.min, n_tokens);
    m.max = smaller(o.max, n_tokens);
    KVC_CHECK(reachable_total(n, m.min, m.max, &total), KVC_E_ARG);
    carve_masses(&arena, n, n_tokens, &m);
    for (size_t i = 0; i < n && n_tokens > 0 && m.bits; i++)
        order_masses(&m, scores + i * n_tokens, m.before + i * n_tokens);
    split_masses(&m, total, budgets);
    return KVC_OK;
}
