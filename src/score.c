/* score.c - importance of visual tokens: layers and heads, refinement, mixing. */
#include "kvc/score.h"

#include <math.h>
#include <string.h>

#include "arena.h"
#include "bits.h"
#include "check.h"
#include "ctx.h"

static const kvc_score_options defaults = {
    .struct_size = sizeof(defaults),
    .layers = KVC_LAYERS_MIDDLE,
    .last_layers = 4,
};

static const kvc_refine_options refine_defaults = {
    .struct_size = sizeof(refine_defaults),
    .temperature = 0.7f,
    .centre = 0.02f,
    .sigma = 0.5f,
    .texture = 0.05f,
    .debias_clamp = true,
    .sink_factor = 10.0f,
    .max_sinks = 8,
};

void kvc_score_options_init(kvc_score_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &defaults, sizeof(defaults));
}

void kvc_refine_options_init(kvc_refine_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &refine_defaults, sizeof(refine_defaults));
}

/* A number that may be a score or a weight. */
static kvc_status check_value(float x)
{
    KVC_CHECK(isfinite(x), KVC_E_NONFINITE);
    return x >= 0.0f ? KVC_OK : KVC_E_ARG;
}

kvc_status kvc_grid_tokens(const kvc_grid *grid, size_t *count)
{
    KVC_CHECK(grid && count && grid->struct_size >= sizeof(*grid), KVC_E_ARG);
    KVC_CHECK(grid->n_frames >= 0 && grid->n_rows >= 0 && grid->n_cols >= 0, KVC_E_ARG);
    size_t n;
    KVC_CHECK(!__builtin_mul_overflow((size_t)grid->n_rows, (size_t)grid->n_cols, &n) &&
                  !__builtin_mul_overflow(n, (size_t)grid->n_frames, &n) && n <= INT32_MAX,
              KVC_E_ARG);
    *count = n;
    return KVC_OK;
}

/* The options of a caller, checked. */
static kvc_status take_options(const kvc_score_options *options, kvc_score_options *out)
{
    *out = defaults;
    if (options)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), options, sizeof(*out)));
    KVC_CHECK((unsigned)out->layers <= KVC_LAYERS_WEIGHTED, KVC_E_ARG);
    KVC_CHECK(out->layers != KVC_LAYERS_LAST || out->last_layers >= 1, KVC_E_ARG);
    return out->layers != KVC_LAYERS_WEIGHTED || out->layer_weights ? KVC_OK : KVC_E_ARG;
}

/* Of options that were taken. */
static float layer_weight(const kvc_score_options *o, size_t layer, size_t n_layers)
{
    const size_t first = n_layers / 3, third = 2 * n_layers / 3;
    const size_t end = third > first ? third : first + 1;
    switch (o->layers) {
    case KVC_LAYERS_MIDDLE: return layer >= first && layer < end ? 1.0f : 0.0f;
    case KVC_LAYERS_LAST: return n_layers - layer <= (size_t)o->last_layers ? 1.0f : 0.0f;
    case KVC_LAYERS_ALL: return 1.0f;
    case KVC_LAYERS_WEIGHTED: return o->layer_weights[layer];
    }
    return 0.0f;
}

kvc_status kvc_layer_weight(const kvc_score_options *options, int32_t layer, int32_t n_layers,
                            float *weight)
{
    kvc_score_options o;

    KVC_CHECK(weight && layer >= 0 && layer < n_layers, KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    const float w = layer_weight(&o, (size_t)layer, (size_t)n_layers);
    KVC_TRY(check_value(w));
    *weight = w;
    return KVC_OK;
}

/* Attention, what of it counts, and the workspace. */
struct job {
    const float *data;
    kvc_attention_shape shape; /* with all strides */
    kvc_score_options options;
    double layer_sum, query_sum; /* of weights */
    float *head, *layer;         /* [n_tokens] */
    double *mass;                /* [n_heads] */
    bool *chosen;                /* [n_heads] */
};

/* Sets *stride to count * inner where it is 0, and *extent to the end of an axis of that stride
 * whose items end at *extent. */
static bool settle_axis(size_t *stride, size_t inner_count, size_t inner_stride, size_t count,
                        size_t *extent)
{
    size_t reach;
    if (*stride == 0 && __builtin_mul_overflow(inner_count, inner_stride, stride))
        return false;
    return !__builtin_mul_overflow(count - 1, *stride, &reach) &&
           !__builtin_add_overflow(*extent, reach, extent);
}

static kvc_status take_shape(const kvc_attention_shape *shape, kvc_attention_shape *out)
{
    KVC_CHECK(shape && shape->struct_size >= sizeof(*shape), KVC_E_ARG);
    *out = *shape;
    KVC_CHECK(out->n_layers > 0 && out->n_layers <= INT32_MAX, KVC_E_ARG);
    KVC_CHECK(out->n_heads > 0 && out->n_queries > 0, KVC_E_ARG);
    if (out->token_stride == 0)
        out->token_stride = 1;
    size_t extent = 1;
    const size_t n_tokens = out->n_tokens > 0 ? out->n_tokens : 1;
    KVC_CHECK(
        settle_axis(&out->token_stride, 0, 0, n_tokens, &extent) &&
            settle_axis(&out->query_stride, out->n_tokens, out->token_stride, out->n_queries,
                        &extent) &&
            settle_axis(&out->head_stride, out->n_queries, out->query_stride, out->n_heads,
                        &extent) &&
            settle_axis(&out->layer_stride, out->n_heads, out->head_stride, out->n_layers, &extent),
        KVC_E_ARG);
    return extent <= PTRDIFF_MAX / sizeof(float) ? KVC_OK : KVC_E_ARG;
}

static size_t carve(void *ws, struct job *job)
{
    struct kvc_arena arena = {.base = ws};
    job->head = kvc_arena_take(&arena, job->shape.n_tokens, sizeof(float), 64);
    job->layer = kvc_arena_take(&arena, job->shape.n_tokens, sizeof(float), 64);
    job->mass = kvc_arena_take(&arena, job->shape.n_heads, sizeof(double), 64);
    job->chosen = kvc_arena_take(&arena, job->shape.n_heads, sizeof(bool), 64);
    return arena.overflow ? SIZE_MAX : arena.used;
}

kvc_status kvc_score_attention_workspace_size(const kvc_attention_shape *shape, size_t *size)
{
    struct job job;

    KVC_CHECK(size, KVC_E_ARG);
    KVC_TRY(take_shape(shape, &job.shape));
    const size_t need = carve(NULL, &job);
    KVC_CHECK(need != SIZE_MAX, KVC_E_ARG);
    *size = need;
    return KVC_OK;
}

static float weight_at(const float *weights, size_t i)
{
    return weights ? weights[i] : 1.0f;
}

/* Checks the weights of an axis and adds them up. */
static kvc_status sum_weights(const float *weights, size_t n, double *sum)
{
    *sum = 0.0;
    for (size_t i = 0; i < n; i++) {
        KVC_TRY(check_value(weight_at(weights, i)));
        *sum += (double)weight_at(weights, i);
    }
    return *sum > 0.0 ? KVC_OK : KVC_E_ARG;
}

static kvc_status sum_layers(const kvc_score_options *o, size_t n_layers, double *sum)
{
    *sum = 0.0;
    for (size_t l = 0; l < n_layers; l++) {
        const float w = layer_weight(o, l, n_layers);
        KVC_TRY(check_value(w));
        *sum += (double)w;
    }
    return *sum > 0.0 ? KVC_OK : KVC_E_ARG;
}

static const float *row_at(const struct job *job, size_t l, size_t h, size_t q)
{
    const kvc_attention_shape *s = &job->shape;
    return job->data + l * s->layer_stride + h * s->head_stride + q * s->query_stride;
}

static kvc_status check_row(const struct job *job, const float *row)
{
    for (size_t i = 0; i < job->shape.n_tokens; i++)
        if (!kvc_bit(job->options.masked, i))
            KVC_TRY(check_value(row[i * job->shape.token_stride]));
    return KVC_OK;
}

static kvc_status check_rows(const struct job *job)
{
    const kvc_attention_shape *s = &job->shape;
    for (size_t l = 0; l < s->n_layers; l++)
        for (size_t h = 0; h < s->n_heads && layer_weight(&job->options, l, s->n_layers) > 0.0f;
             h++)
            for (size_t q = 0; q < s->n_queries && weight_at(job->options.head_weights, h) > 0.0f;
                 q++)
                if (weight_at(job->options.query_weights, q) > 0.0f)
                    KVC_TRY(check_row(job, row_at(job, l, h, q)));
    return KVC_OK;
}

static double row_sum(const struct job *job, const float *row)
{
    double sum = 0.0;
    for (size_t i = 0; i < job->shape.n_tokens; i++)
        if (!kvc_bit(job->options.masked, i))
            sum += (double)row[i * job->shape.token_stride];
    return sum;
}

/* Of a query, as a share of all. */
static double query_share(const struct job *job, size_t q)
{
    return (double)weight_at(job->options.query_weights, q) / job->query_sum;
}

/* head = weighted mean of the rows of a head. */
static void average_queries(const struct job *job, size_t l, size_t h)
{
    memset(job->head, 0, job->shape.n_tokens * sizeof(float));
    for (size_t q = 0; q < job->shape.n_queries; q++) {
        double w = query_share(job, q);
        if (!(w > 0.0))
            continue;
        const float *row = row_at(job, l, h, q);
        if (job->options.normalize_rows)
            w /= fmax(row_sum(job, row), 1e-12);
        const float factor = (float)w;
        for (size_t i = 0; i < job->shape.n_tokens; i++)
            if (!kvc_bit(job->options.masked, i))
                job->head[i] += factor * row[i * job->shape.token_stride];
    }
}

static double head_mass(const struct job *job, size_t l, size_t h)
{
    double mass = 0.0;
    for (size_t q = 0; q < job->shape.n_queries; q++)
        if (query_share(job, q) > 0.0)
            mass += query_share(job, q) * row_sum(job, row_at(job, l, h, q));
    return mass;
}

/* Heads that count and look more at the tokens than head h does; of equals the lower ones. */
static size_t heads_before(const struct job *job, size_t h)
{
    size_t n = 0;
    for (size_t i = 0; i < job->shape.n_heads; i++)
        n += job->mass[i] > job->mass[h] || (job->mass[i] == job->mass[h] && i < h);
    return n;
}

static void choose_heads(const struct job *job, size_t l)
{
    size_t n_used = 0;
    for (size_t h = 0; h < job->shape.n_heads; h++) {
        job->chosen[h] = weight_at(job->options.head_weights, h) > 0.0f;
        n_used += job->chosen[h];
    }
    if (!job->options.best_heads)
        return;
    for (size_t h = 0; h < job->shape.n_heads; h++)
        job->mass[h] = job->chosen[h] ? head_mass(job, l, h) : -1.0;
    for (size_t h = 0; h < job->shape.n_heads; h++)
        job->chosen[h] = job->chosen[h] && heads_before(job, h) < n_used - n_used / 2;
}

/* layer = the weighted mean, or the maximum, of its chosen heads. */
static void join_heads(const struct job *job, size_t l)
{
    double sum = 0.0;

    choose_heads(job, l);
    for (size_t h = 0; h < job->shape.n_heads; h++)
        sum += job->chosen[h] ? (double)weight_at(job->options.head_weights, h) : 0.0;
    memset(job->layer, 0, job->shape.n_tokens * sizeof(float));
    for (size_t h = 0; h < job->shape.n_heads; h++) {
        if (!job->chosen[h])
            continue;
        average_queries(job, l, h);
        const float w = (float)((double)weight_at(job->options.head_weights, h) / sum);
        for (size_t i = 0; i < job->shape.n_tokens; i++)
            if (!job->options.max_heads)
                job->layer[i] += w * job->head[i];
            else if (job->head[i] > job->layer[i])
                job->layer[i] = job->head[i];
    }
}

kvc_status kvc_score_attention(const float *attention, const kvc_attention_shape *shape,
                               const kvc_score_options *options, float *scores, void *ws,
                               size_t ws_size)
{
    struct job job = {.data = attention};
    double head_sum;

    KVC_TRY(take_shape(shape, &job.shape));
    KVC_TRY(take_options(options, &job.options));
    const size_t n = job.shape.n_tokens, n_layers = job.shape.n_layers;
    KVC_TRY(sum_layers(&job.options, n_layers, &job.layer_sum));
    KVC_TRY(sum_weights(job.options.head_weights, job.shape.n_heads, &head_sum));
    KVC_TRY(sum_weights(job.options.query_weights, job.shape.n_queries, &job.query_sum));
    if (n == 0)
        return KVC_OK;
    KVC_CHECK(attention && scores, KVC_E_ARG);
    const size_t need = carve(ws, &job);
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
    KVC_TRY(check_rows(&job));

    memset(scores, 0, n * sizeof(*scores));
    for (size_t l = 0; l < n_layers; l++) {
        const double weight = (double)layer_weight(&job.options, l, n_layers);
        if (!(weight > 0.0))
            continue;
        join_heads(&job, l);
        const float w = (float)(weight / job.layer_sum);
        for (size_t i = 0; i < n; i++)
            scores[i] += w * job.layer[i];
    }
    return KVC_OK;
}

/* What refines one image. */
struct refine {
    const float *raw, *texture;
    const kvc_grid *grid;
    kvc_refine_options options;
    size_t n;
    size_t sinks[KVC_MAX_SINKS]; /* the largest first */
    size_t n_sinks;
    double middle, slope, max; /* of the trend; of the scores without it */
};

static kvc_status take_refine_options(const kvc_refine_options *options, kvc_refine_options *out)
{
    *out = refine_defaults;
    if (options)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), options, sizeof(*out)));
    KVC_TRY(check_value(out->temperature));
    KVC_TRY(check_value(out->centre));
    KVC_TRY(check_value(out->sigma));
    KVC_TRY(check_value(out->texture));
    KVC_TRY(check_value(out->sink_factor));
    KVC_CHECK(out->temperature > 0.0f && out->sigma > 0.0f, KVC_E_ARG);
    KVC_CHECK(out->sink_factor == 0.0f || out->sink_factor >= 1.0f, KVC_E_ARG);
    return out->max_sinks >= 0 && out->max_sinks <= KVC_MAX_SINKS ? KVC_OK : KVC_E_ARG;
}

static kvc_status check_scores(const struct refine *r)
{
    for (size_t i = 0; i < r->n; i++) {
        if (kvc_bit(r->options.excluded, i))
            continue;
        KVC_TRY(check_value(r->raw[i]));
        if (r->texture) {
            KVC_TRY(check_value(r->texture[i]));
            KVC_CHECK(r->texture[i] <= 1.0f, KVC_E_ARG);
        }
    }
    return KVC_OK;
}

static bool is_sink(const struct refine *r, size_t i)
{
    for (size_t s = 0; s < r->n_sinks; s++)
        if (r->sinks[s] == i)
            return true;
    return false;
}

/* Neither excluded nor a sink. */
static bool counts(const struct refine *r, size_t i)
{
    return !kvc_bit(r->options.excluded, i) && !is_sink(r, i);
}

static void find_sinks(struct refine *r)
{
    const size_t most = r->options.sink_factor > 0.0f ? (size_t)r->options.max_sinks : 0;
    double sum = 0.0;
    size_t n = 0;

    for (size_t i = 0; i < r->n; i++)
        if (!kvc_bit(r->options.excluded, i)) {
            sum += (double)r->raw[i];
            n++;
        }
    for (size_t i = 0; i < r->n && most > 0; i++) {
        if (kvc_bit(r->options.excluded, i) ||
            !((double)r->raw[i] * (double)n > (double)r->options.sink_factor * sum))
            continue;
        size_t at = r->n_sinks;
        while (at > 0 && r->raw[r->sinks[at - 1]] < r->raw[i])
            at--;
        if (at == most)
            continue;
        r->n_sinks += r->n_sinks < most;
        for (size_t s = r->n_sinks - 1; s > at; s--)
            r->sinks[s] = r->sinks[s - 1];
        r->sinks[at] = i;
    }
}

static double log_score(const struct refine *r, size_t i)
{
    return log(fmax((double)r->raw[i], 1e-12));
}

/* The line through ln raw over the index, by least squares. */
static void fit_trend(struct refine *r)
{
    double n = 0.0, sum_x = 0.0, sum_y = 0.0, xx = 0.0, xy = 0.0;

    if (!r->options.debias)
        return;
    for (size_t i = 0; i < r->n; i++)
        if (counts(r, i)) {
            n += 1.0;
            sum_x += (double)i;
            sum_y += log_score(r, i);
        }
    if (n < 2.0)
        return;
    r->middle = sum_x / n;
    for (size_t i = 0; i < r->n; i++)
        if (counts(r, i)) {
            const double x = (double)i - r->middle;
            xx += x * x;
            xy += x * (log_score(r, i) - sum_y / n);
        }
    r->slope = r->options.debias_clamp ? fmax(xy / xx, 0.0) : xy / xx;
}

/* A score without the trend. */
static double level(const struct refine *r, size_t i)
{
    const double raw = (double)r->raw[i];
    return r->slope == 0.0 ? raw : raw * exp(-r->slope * ((double)i - r->middle));
}

static void find_max(struct refine *r)
{
    for (size_t i = 0; i < r->n; i++)
        if (counts(r, i))
            r->max = fmax(r->max, level(r, i));
}

static double centre_prior(const struct refine *r, size_t i)
{
    const size_t n_cols = (size_t)r->grid->n_cols, n_rows = (size_t)r->grid->n_rows;
    const double x = (double)(i % n_cols), y = (double)(i / n_cols % n_rows);
    const double dx = 2.0 * ((x + 0.5) / (double)n_cols - 0.5);
    const double dy = 2.0 * ((y + 0.5) / (double)n_rows - 0.5);
    const double sigma = (double)r->options.sigma;
    return exp(-(dx * dx + dy * dy) / (4.0 * sigma * sigma));
}

static float refined(const struct refine *r, size_t i)
{
    const double centre = (double)r->options.centre, texture = (double)r->options.texture;

    if (kvc_bit(r->options.excluded, i))
        return 0.0f;
    if (is_sink(r, i))
        return (float)(1.0 + centre + texture);
    double prior = 1.0, soft = 1.0;
    if (centre > 0.0)
        prior += centre * centre_prior(r, i);
    if (r->texture)
        prior += texture * (double)r->texture[i];
    if (r->max > 0.0)
        soft = pow(level(r, i) / r->max, 1.0 / (double)r->options.temperature);
    return (float)(soft * prior);
}

kvc_status kvc_score_refine(const float *raw, const kvc_grid *grid, const float *texture,
                            const kvc_refine_options *options, float *scores, uint64_t *sinks)
{
    struct refine r = {.raw = raw, .texture = texture, .grid = grid};

    KVC_TRY(kvc_grid_tokens(grid, &r.n));
    KVC_TRY(take_refine_options(options, &r.options));
    if (r.n == 0)
        return KVC_OK;
    KVC_CHECK(raw && scores, KVC_E_ARG);
    KVC_TRY(check_scores(&r));

    find_sinks(&r);
    fit_trend(&r);
    find_max(&r);
    for (size_t i = 0; i < r.n; i++)
        scores[i] = refined(&r, i);
    if (sinks) {
        memset(sinks, 0, (r.n + 63) / 64 * sizeof(*sinks));
        for (size_t s = 0; s < r.n_sinks; s++)
            kvc_bit_set(sinks, r.sinks[s]);
    }
    return KVC_OK;
}

kvc_status kvc_score_blend(const float *raw, const float *learned, size_t n, float mu, float *out)
{
    KVC_TRY(check_value(mu));
    KVC_CHECK(mu <= 1.0f && (n == 0 || (raw && learned && out)), KVC_E_ARG);
    for (size_t i = 0; i < n; i++) {
        KVC_TRY(check_value(raw[i]));
        KVC_TRY(check_value(learned[i]));
    }
    for (size_t i = 0; i < n; i++) {
        const double a = (double)raw[i], b = (double)learned[i], w = (double)mu;
        out[i] = mu == 0.0f   ? raw[i]
                 : mu == 1.0f ? learned[i]
                              : (float)(pow(a, 1.0 - w) * pow(b, w));
    }
    return KVC_OK;
}
