/* What pruning and merging do to the attention of one layer of a vision transformer.
 *
 * The error reported comes from the scoring queries alone. Merging does not look at queries, so the
 * mean error of the scoring queries is a fair sample. Pruning does: it keeps what these very
 * queries attend to, and their own error would flatter it. So each half of them scores for the
 * other half, whose error counts.
 */
#include "experiment.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kvc/merge.h"
#include "kvc/prune.h"
#include "kvc/score.h"

struct experiment {
    struct kvx kvx;
    kvc_ctx *ctx;
    struct kvx_block block;
    size_t first_head, n_heads; /* those that share a choice */
    float *k, *v;               /* [n_tokens][n_heads][head_dim], changed in place */
    float *scores;              /* [n_heads][n_tokens], then their means in the first row */
    double *exact, *output;     /* [n_queries][all heads][head_dim]; [head_dim] */
    double *weights;            /* [n_tokens] */
    float *bias;                /* [n_tokens] */
    kvc_merge_token *tokens;    /* [n_tokens] */
    int32_t *map, *rows;        /* [n_tokens] */
    uint64_t *forced;           /* the tokens before the patches */
    void *ws;
    size_t ws_size;
};

/* Some of the queries. */
struct sample {
    size_t first, n, step;
};

static kvc_view view_rows(const struct experiment *x, float *data, size_t n)
{
    return kvc_view_packed(data, KVC_DTYPE_F32, n, x->n_heads, x->kvx.head_dim);
}

/* The largest workspace, which the choice of all heads together needs. */
static kvc_status workspace_size(struct experiment *x, size_t *size)
{
    const size_t n = x->kvx.n_tokens;
    size_t score = 0, select = 0, merge = 0;

    x->n_heads = x->kvx.n_heads;
    const kvc_view k = view_rows(x, x->k, n);
    kvc_status status = kvc_score_queries_workspace_size(x->kvx.n_scoring, x->n_heads, n,
                                                         x->n_heads, x->kvx.head_dim, &score);
    if (status == KVC_OK)
        status = kvc_select_rows_workspace_size(n, 1, &select);
    if (status == KVC_OK)
        status = kvc_merge_rounds_workspace_size(&k, 1, &merge);
    *size = score > select ? score : select;
    *size = merge > *size ? merge : *size;
    return status;
}

static bool allocate(struct experiment *x)
{
    const size_t n = x->kvx.n_tokens, row = x->kvx.n_heads * x->kvx.head_dim;

    x->block.q = malloc(x->kvx.n_queries * row * sizeof(float));
    x->block.k = malloc(n * row * sizeof(float));
    x->block.v = malloc(n * row * sizeof(float));
    x->k = malloc(n * row * sizeof(float));
    x->v = malloc(n * row * sizeof(float));
    x->scores = malloc(n * x->kvx.n_heads * sizeof(float));
    x->exact = malloc(x->kvx.n_queries * row * sizeof(double));
    x->output = malloc(x->kvx.head_dim * sizeof(double));
    x->weights = malloc(n * sizeof(double));
    x->bias = malloc(n * sizeof(float));
    x->tokens = malloc(n * sizeof(kvc_merge_token));
    x->map = malloc(n * sizeof(int32_t));
    x->rows = malloc(n * sizeof(int32_t));
    x->forced = calloc((n + 63) / 64, sizeof(uint64_t));
    if (!x->block.q || !x->block.k || !x->block.v || !x->k || !x->v || !x->scores || !x->exact ||
        !x->output || !x->weights || !x->bias || !x->tokens || !x->map || !x->rows || !x->forced)
        return false;
    if (kvc_ctx_create(NULL, &x->ctx) != KVC_OK || workspace_size(x, &x->ws_size) != KVC_OK)
        return false;
    x->ws_size = (x->ws_size + 63) / 64 * 64;
    x->ws = aligned_alloc(64, x->ws_size);
    return x->ws != NULL;
}

struct experiment *experiment_create(const struct kvx *kvx)
{
    struct experiment *x = calloc(1, sizeof(*x));

    if (!x)
        return NULL;
    x->kvx = *kvx;
    if (!allocate(x)) {
        experiment_destroy(x);
        return NULL;
    }
    for (size_t i = 0; i < kvx->n_prefix; i++)
        x->forced[i / 64] |= (uint64_t)1 << i % 64;
    return x;
}

void experiment_destroy(struct experiment *x)
{
    if (!x)
        return;
    void *const memory[] = {x->ws,   x->block.q, x->block.k, x->block.v, x->k,
                            x->v,    x->scores,  x->exact,   x->output,  x->weights,
                            x->bias, x->tokens,  x->map,     x->rows,    x->forced};
    for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); i++)
        free(memory[i]);
    kvc_ctx_destroy(x->ctx);
    free(x);
}

struct kvx_block *experiment_block(struct experiment *x)
{
    return &x->block;
}

void experiment_kept(const struct kvx *kvx, size_t kept[N_ROUNDS])
{
    size_t n = kvx->grid_rows * kvx->grid_cols;

    for (int round = 0; round < N_ROUNDS; round++)
        kept[round] = n -= n / 4;
}

/* Attention of one query over n rows [n][n_heads][head_dim] of K and V, plainly. */
static void attend(const struct experiment *x, const float *q, const float *k, const float *v,
                   size_t n, size_t stride, const float *bias, double *output)
{
    const size_t d = x->kvx.head_dim;
    double top = -INFINITY, sum = 0.0;

    for (size_t i = 0; i < n; i++) {
        double z = 0.0;
        for (size_t c = 0; c < d; c++)
            z += (double)q[c] * (double)k[i * stride + c];
        x->weights[i] = z / sqrt((double)d) + (bias ? (double)bias[i] : 0.0);
        top = fmax(top, x->weights[i]);
    }
    memset(output, 0, d * sizeof(*output));
    for (size_t i = 0; i < n; i++) {
        const double w = exp(x->weights[i] - top);
        sum += w;
        for (size_t c = 0; c < d; c++)
            output[c] += w * (double)v[i * stride + c];
    }
    for (size_t c = 0; c < d; c++)
        output[c] /= sum;
}

static void attend_exactly(struct experiment *x)
{
    const size_t d = x->kvx.head_dim, row = x->kvx.n_heads * d;

    for (size_t q = 0; q < x->kvx.n_queries; q++)
        for (size_t h = 0; h < x->kvx.n_heads; h++)
            attend(x, x->block.q + q * row + h * d, x->block.k + h * d, x->block.v + h * d,
                   x->kvx.n_tokens, row, NULL, x->exact + q * row + h * d);
}

static double distance(const double *a, const double *b, size_t n)
{
    double sum = 0.0;

    for (size_t i = 0; i < n; i++)
        sum += (a[i] - (b ? b[i] : 0.0)) * (a[i] - (b ? b[i] : 0.0));
    return sqrt(sum);
}

/* Mean relative error of head h of the choice, if n rows of K and V are left. */
static double mean_error(const struct experiment *x, struct sample sample, size_t h, size_t n,
                         const float *bias)
{
    const size_t d = x->kvx.head_dim, row = x->kvx.n_heads * d;
    double sum = 0.0;

    for (size_t i = 0; i < sample.n; i++) {
        const size_t at = (sample.first + i * sample.step) * row + (x->first_head + h) * d;
        attend(x, x->block.q + at, x->k + h * d, x->v + h * d, n, x->n_heads * d, bias, x->output);
        const double length = distance(x->exact + at, NULL, d);
        if (length > 0.0)
            sum += distance(x->exact + at, x->output, d) / length;
    }
    return sum / (double)sample.n;
}

/* Copies of K and V of the heads of the choice. */
static void restore(struct experiment *x)
{
    const size_t part = x->n_heads * x->kvx.head_dim, row = x->kvx.n_heads * x->kvx.head_dim;
    const size_t offset = x->first_head * x->kvx.head_dim;

    for (size_t i = 0; i < x->kvx.n_tokens; i++) {
        memcpy(x->k + i * part, x->block.k + i * row + offset, part * sizeof(float));
        memcpy(x->v + i * part, x->block.v + i * row + offset, part * sizeof(float));
    }
}

static struct sample held_out(const struct experiment *x)
{
    return (struct sample){x->kvx.n_scoring, x->kvx.n_same, 1};
}

static struct sample shifted(const struct experiment *x)
{
    return (struct sample){x->kvx.n_scoring + x->kvx.n_same, x->kvx.n_shifted, 1};
}

static void reset_tokens(struct experiment *x)
{
    for (size_t i = 0; i < x->kvx.n_tokens; i++) {
        kvc_merge_token token = {.image = -1, .size = 1.0F};
        if (i >= x->kvx.n_prefix) {
            token.image = 0;
            token.row = (int32_t)((i - x->kvx.n_prefix) / x->kvx.grid_cols);
            token.col = (int32_t)((i - x->kvx.n_prefix) % x->kvx.grid_cols);
        }
        x->tokens[i] = token;
    }
}

static kvc_status measure_merging(struct experiment *x, struct outcome *heads)
{
    const struct sample scoring = {0, x->kvx.n_scoring, 1};
    kvc_merge_options options;
    size_t n = x->kvx.n_tokens;

    kvc_merge_options_default(&options);
    options.force_quarter = true;
    restore(x);
    reset_tokens(x);
    for (int round = 0; round < N_ROUNDS; round++) {
        const kvc_view k = view_rows(x, x->k, n), v = view_rows(x, x->v, n);
        const kvc_status status = kvc_merge_rounds(x->ctx, &k, &v, 1, &options, 1, x->tokens,
                                                   x->map, x->rows, &n, x->ws, x->ws_size);
        if (status != KVC_OK)
            return status;
        for (size_t i = 0; i < n; i++)
            x->bias[i] = x->tokens[i].bias;
        for (size_t h = 0; h < x->n_heads; h++)
            for (enum method method = MERGE; method <= MERGE_BIAS; method++) {
                struct errors *errors = &heads[h].rounds[round][method];
                const float *bias = method == MERGE_BIAS ? x->bias : NULL;
                errors->same = mean_error(x, held_out(x), h, n, bias);
                errors->shifted = mean_error(x, shifted(x), h, n, bias);
                errors->reported = mean_error(x, scoring, h, n, bias);
            }
    }
    return KVC_OK;
}

/* Scores of all tokens, mean over the heads of the choice, from some of the scoring queries. */
static kvc_status score(struct experiment *x, struct sample sample)
{
    const size_t d = x->kvx.head_dim, row = x->kvx.n_heads * d, n = x->kvx.n_tokens;
    kvc_view q = view_rows(x, x->block.q + sample.first * row + x->first_head * d, sample.n);
    kvc_view k = view_rows(x, x->block.k + x->first_head * d, n);

    q.token_stride = sample.step * row;
    k.token_stride = row;
    const kvc_status status = kvc_score_queries(x->ctx, &q, &k, NULL, x->scores, x->ws, x->ws_size);
    if (status != KVC_OK)
        return status;
    for (size_t i = 0; i < n; i++) {
        for (size_t h = 1; h < x->n_heads; h++)
            x->scores[i] += x->scores[h * n + i];
        x->scores[i] /= (float)x->n_heads;
    }
    return KVC_OK;
}

/* Leaves the best rows of K and V, as many as the round of merging leaves. */
static kvc_status prune(struct experiment *x, int round, size_t *n)
{
    size_t kept[N_ROUNDS];

    experiment_kept(&x->kvx, kept);
    restore(x);
    kvc_status status =
        kvc_select_rows(x->scores, x->kvx.n_tokens, x->kvx.n_prefix + kept[round], x->forced, 1,
                        KVC_BLOCK_MEAN, x->rows, n, x->ws, x->ws_size);
    float *const tensors[] = {x->k, x->v};
    for (int i = 0; i < 2 && status == KVC_OK; i++) {
        const kvc_view view = view_rows(x, tensors[i], x->kvx.n_tokens);
        status = kvc_prune_rows(x->ctx, &view, x->rows, *n);
    }
    return status;
}

static kvc_status measure_pruning(struct experiment *x, struct outcome *heads)
{
    const struct sample scoring = {0, x->kvx.n_scoring, 1};
    kvc_status status = score(x, scoring);

    for (int round = 0; round < N_ROUNDS && status == KVC_OK; round++) {
        size_t n = 0;
        status = prune(x, round, &n);
        for (size_t h = 0; h < x->n_heads && status == KVC_OK; h++) {
            struct errors *errors = &heads[h].rounds[round][PRUNE];
            errors->same = mean_error(x, held_out(x), h, n, NULL);
            errors->shifted = mean_error(x, shifted(x), h, n, NULL);
            errors->reported = 0.0;
        }
    }
    return status;
}

/* Half of the scoring queries choose, the error of the other half counts; then the reverse. */
static kvc_status report_pruning(struct experiment *x, struct outcome *heads)
{
    const size_t n_all = x->kvx.n_scoring;
    const struct sample halves[2] = {{0, (n_all + 1) / 2, 2}, {1, n_all / 2, 2}};

    for (int half = 0; half < 2; half++) {
        const struct sample others = halves[1 - half];
        kvc_status status = score(x, halves[half]);
        for (int round = 0; round < N_ROUNDS && status == KVC_OK; round++) {
            size_t n = 0;
            status = prune(x, round, &n);
            for (size_t h = 0; h < x->n_heads && status == KVC_OK; h++)
                heads[h].rounds[round][PRUNE].reported +=
                    mean_error(x, others, h, n, NULL) * (double)others.n / (double)n_all;
        }
        if (status != KVC_OK)
            return status;
    }
    return KVC_OK;
}

kvc_status experiment_run(struct experiment *x, bool shared, struct outcome *heads)
{
    kvc_status status = KVC_OK;

    attend_exactly(x);
    x->n_heads = shared ? x->kvx.n_heads : 1;
    for (size_t h = 0; h < x->kvx.n_heads && status == KVC_OK; h += x->n_heads) {
        x->first_head = h;
        status = measure_pruning(x, heads + h);
        if (status == KVC_OK)
            status = report_pruning(x, heads + h);
        if (status == KVC_OK)
            status = measure_merging(x, heads + h);
    }
    return status;
}
