/*
 * score_queries.c - importance of keys from a few query rows.
 *
 * Row t * g + j of a KV head is query t, head j of its group. A first round over the KV heads keeps
 * the logits and finds each row's log-sum-exp, a second adds the masses up: nothing is written
 * before all logits are known to be numbers.
 */
#include "kvc/score.h"

#include <math.h>
#include <string.h>

#include "arena.h"
#include "bits.h"
#include "check.h"
#include "ctx.h"
#include "kernels/half.h"

enum { BLOCK = 64 };

struct probe {
    const kvc_ctx *ctx;
    const kvc_view *q, *k;
    kvc_probe_options options;
    float scale;
    size_t n_keys, n_blocks, n_kv_heads, group, n_rows, stride; /* n_rows of a KV head */
    double weight_sum;
    float *scores;
    /* The workspace, each with the KV head as its first axis. */
    float *q_rows;                /* [n_rows][stride] */
    float *k_rows;                /* [BLOCK][stride] */
    float *logits;                /* [n_blocks][n_rows][BLOCK] */
    float *m, *l, *lse, *weights; /* [n_rows] */
    uint64_t *mask;               /* [n_rows] */
    float *mass;                  /* [BLOCK] */
    kvc_status *status;           /* one */
};

static const kvc_probe_options defaults = {
    .struct_size = sizeof(defaults),
    .first_query = INT64_MAX,
};

void kvc_probe_options_init(kvc_probe_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &defaults, sizeof(defaults));
}

static kvc_status take_shape(struct probe *p, size_t n_queries, size_t n_heads, size_t n_keys,
                             size_t n_kv_heads, size_t head_dim)
{
    KVC_CHECK(n_queries > 0 && n_heads > 0 && n_kv_heads > 0 && head_dim > 0, KVC_E_ARG);
    KVC_CHECK(n_heads % n_kv_heads == 0 && n_keys <= PTRDIFF_MAX, KVC_E_ARG);
    KVC_CHECK(head_dim <= KVC_MAX_HEAD_DIM, KVC_E_UNSUPPORTED);
    p->n_keys = n_keys;
    p->n_blocks = n_keys / BLOCK + (n_keys % BLOCK != 0);
    p->n_kv_heads = n_kv_heads;
    p->group = n_heads / n_kv_heads;
    p->stride = kvc_attend_stride(head_dim);
    return __builtin_mul_overflow(n_queries, p->group, &p->n_rows) ? KVC_E_ARG : KVC_OK;
}

/* Bytes of the workspace, SIZE_MAX if they do not fit. */
static size_t carve(void *ws, struct probe *p)
{
    struct kvc_arena arena = {.base = ws};
    size_t all_rows, all_blocks;
    if (__builtin_mul_overflow(p->n_rows, p->n_kv_heads, &all_rows) ||
        __builtin_mul_overflow(p->n_blocks, all_rows, &all_blocks))
        return SIZE_MAX;
    const size_t row = p->stride * sizeof(float);
    p->q_rows = kvc_arena_take(&arena, all_rows, row, 64);
    p->k_rows = kvc_arena_take(&arena, p->n_kv_heads, BLOCK * row, 64);
    p->logits = kvc_arena_take(&arena, all_blocks, BLOCK * sizeof(float), 64);
    p->m = kvc_arena_take(&arena, all_rows, sizeof(float), 64);
    p->l = kvc_arena_take(&arena, all_rows, sizeof(float), 64);
    p->lse = kvc_arena_take(&arena, all_rows, sizeof(float), 64);
    p->weights = kvc_arena_take(&arena, all_rows, sizeof(float), 64);
    p->mask = kvc_arena_take(&arena, all_rows, sizeof(uint64_t), 64);
    p->mass = kvc_arena_take(&arena, p->n_kv_heads, BLOCK * sizeof(float), 64);
    p->status = kvc_arena_take(&arena, p->n_kv_heads, sizeof(kvc_status), 64);
    return arena.overflow ? SIZE_MAX : arena.used;
}

kvc_status kvc_score_queries_workspace_size(size_t n_queries, size_t n_heads, size_t n_keys,
                                            size_t n_kv_heads, size_t head_dim, size_t *size)
{
    struct probe p;

    KVC_CHECK(size, KVC_E_ARG);
    KVC_TRY(take_shape(&p, n_queries, n_heads, n_keys, n_kv_heads, head_dim));
    const size_t need = carve(NULL, &p);
    KVC_CHECK(need != SIZE_MAX, KVC_E_ARG);
    *size = need;
    return KVC_OK;
}

static float query_weight(const struct probe *p, size_t query)
{
    return p->options.query_weights ? p->options.query_weights[query] : 1.0f;
}

static kvc_status check_weights(struct probe *p)
{
    for (size_t t = 0; t < p->q->n_tokens; t++) {
        const float w = query_weight(p, t);
        KVC_CHECK(isfinite(w), KVC_E_NONFINITE);
        KVC_CHECK(w >= 0.0f, KVC_E_ARG);
        p->weight_sum += (double)w;
    }
    return p->weight_sum > 0.0 ? KVC_OK : KVC_E_ARG;
}

/* The log-sum-exps of the rows that count, and the biases of the keys that are seen. */
static kvc_status check_arrays(const struct probe *p)
{
    const kvc_probe_options *o = &p->options;
    for (size_t t = 0; o->lse && t < p->q->n_tokens; t++)
        for (size_t h = 0; h < p->q->n_heads && query_weight(p, t) > 0.0f; h++) {
            const float lse = o->lse[t * p->q->n_heads + h];
            KVC_CHECK(!isnan(lse) && lse < INFINITY, KVC_E_NONFINITE);
        }
    for (size_t i = 0; o->bias && i < p->n_keys; i++)
        KVC_CHECK(isfinite(o->bias[i]) || kvc_bit(o->masked, i), KVC_E_NONFINITE);
    return KVC_OK;
}

static kvc_status take_options(struct probe *p, const kvc_probe_options *options)
{
    p->options = defaults;
    if (options)
        KVC_TRY(kvc_struct_read(&p->options, sizeof(p->options), options, sizeof(*options)));
    KVC_CHECK(isfinite(p->options.scale) && isfinite(p->options.softcap), KVC_E_NONFINITE);
    KVC_CHECK(p->options.softcap >= 0.0f, KVC_E_ARG);
    p->scale = p->options.scale;
    if (p->scale == 0.0f)
        p->scale = (float)(1.0 / sqrt((double)p->q->head_dim));
    KVC_TRY(check_weights(p));
    return check_arrays(p);
}

/* The keys of a block that a row sees. */
static uint64_t seen(const struct probe *p, size_t row, size_t block)
{
    const size_t query = row / p->group, first = block * BLOCK;
    const int64_t n_keys = (int64_t)p->n_keys, at = p->options.first_query;
    int64_t end = n_keys;
    if (at < n_keys && at + (int64_t)query + 1 < n_keys)
        end = at + (int64_t)query + 1;
    if (end <= (int64_t)first || !(query_weight(p, query) > 0.0f))
        return 0;
    const size_t n = (size_t)end - first;
    const uint64_t there = n < BLOCK ? (UINT64_C(1) << n) - 1 : UINT64_MAX;
    return p->options.masked ? there & ~p->options.masked[block] : there;
}

/* Where block b of a KV head keeps its logits, [n_rows][BLOCK]. */
static float *logits_at(const struct probe *p, size_t head, size_t block)
{
    return p->logits + (head * p->n_blocks + block) * p->n_rows * BLOCK;
}

static kvc_status load_queries(const struct probe *p, size_t head)
{
    float *at = p->q_rows + head * p->n_rows * p->stride;
    for (size_t t = 0; t < p->q->n_tokens; t++, at += p->group * p->stride) {
        struct kvc_rows rows = kvc_view_rows(p->q, t, p->group, head * p->group);
        rows.stride = p->q->head_stride;
        KVC_TRY(p->ctx->k->load_rows(&p->ctx->queue, &rows, at, p->stride, p->stride));
    }
    return KVC_OK;
}

/* Products of all rows with a block of keys; beyond the last key with zeros. */
static kvc_status multiply(const struct probe *p, size_t head, size_t block)
{
    const size_t first = block * BLOCK;
    const size_t n = p->n_keys - first < BLOCK ? p->n_keys - first : BLOCK;
    const struct kvc_rows rows = kvc_view_rows(p->k, first, n, head);
    float *keys = p->k_rows + head * BLOCK * p->stride;
    memset(keys + n * p->stride, 0, (BLOCK - n) * p->stride * sizeof(*keys));
    KVC_TRY(p->ctx->k->load_rows(&p->ctx->queue, &rows, keys, p->stride, p->stride));
    return p->ctx->k->dot_rows(&p->ctx->queue, p->q_rows + head * p->n_rows * p->stride, p->n_rows,
                               keys, BLOCK, p->k->head_dim, logits_at(p, head, block), BLOCK);
}

/* Bit i: z[i] is NaN or infinite. Mostly none is, and that is seen fast. */
static uint64_t find_nonfinite(const float *z)
{
    const uint32_t exponent = 0x7f800000u;
    uint32_t any = 0;
    uint64_t bits = 0;
    for (size_t i = 0; i < BLOCK; i++)
        any |= (kvc_float_bits(z[i]) & exponent) == exponent;
    for (size_t i = 0; i < BLOCK && any; i++)
        bits |= (uint64_t)!isfinite(z[i]) << i;
    return bits;
}

/* Turns products into logits, and sees that those which count are numbers. */
static kvc_status finish_row(const struct probe *p, size_t block, uint64_t mask, float *z)
{
    const float cap = p->options.softcap, *bias = p->options.bias;
    uint64_t nonfinite;

    for (size_t i = 0; i < BLOCK; i++)
        z[i] *= p->scale;
    nonfinite = find_nonfinite(z);
    for (size_t i = 0; i < BLOCK && cap > 0.0f; i++)
        z[i] = cap * (float)tanh((double)(z[i] / cap));
    for (size_t i = 0; i < BLOCK && bias && mask >> i; i++)
        if (mask >> i & 1)
            z[i] += bias[block * BLOCK + i];
    if (bias)
        nonfinite |= find_nonfinite(z);
    return nonfinite & mask ? KVC_E_NONFINITE : KVC_OK;
}

static kvc_status look_at_block(const struct probe *p, size_t head, size_t block)
{
    const size_t rows = head * p->n_rows;
    float *z = logits_at(p, head, block);

    KVC_TRY(multiply(p, head, block));
    for (size_t r = 0; r < p->n_rows; r++) {
        p->mask[rows + r] = seen(p, r, block);
        KVC_TRY(finish_row(p, block, p->mask[rows + r], z + r * BLOCK));
    }
    if (p->options.lse)
        return KVC_OK;
    return p->ctx->k->lse_block(&p->ctx->queue, z, p->mask + rows, p->n_rows, p->m + rows,
                                p->l + rows);
}

/* The weight of each row, and its log-sum-exp: -Inf where it adds nothing. */
static void finish_rows(const struct probe *p, size_t head)
{
    for (size_t r = 0; r < p->n_rows; r++) {
        const size_t query = r / p->group, q_head = head * p->group + r % p->group;
        const size_t row = head * p->n_rows + r;
        const double w = (double)query_weight(p, query);
        p->weights[row] = (float)(w / (p->weight_sum * (double)p->group));
        p->lse[row] = -INFINITY;
        if (w > 0.0 && p->options.lse)
            p->lse[row] = p->options.lse[query * p->q->n_heads + q_head];
        else if (p->l[row] > 0.0f)
            p->lse[row] = p->m[row] + (float)log((double)p->l[row]);
    }
}

static kvc_status look(const struct probe *p, size_t head)
{
    const size_t rows = head * p->n_rows;

    KVC_TRY(load_queries(p, head));
    for (size_t r = 0; r < p->n_rows; r++) {
        p->m[rows + r] = -INFINITY;
        p->l[rows + r] = 0.0f;
    }
    for (size_t b = 0; b < p->n_blocks; b++)
        KVC_TRY(look_at_block(p, head, b));
    finish_rows(p, head);
    return KVC_OK;
}

static kvc_status add_up(const struct probe *p, size_t head)
{
    const size_t rows = head * p->n_rows;
    float *mass = p->mass + head * BLOCK;

    for (size_t b = 0; b < p->n_blocks; b++) {
        const size_t first = b * BLOCK, left = p->n_keys - first;
        for (size_t r = 0; r < p->n_rows; r++)
            p->mask[rows + r] = seen(p, r, b);
        memset(mass, 0, BLOCK * sizeof(*mass));
        KVC_TRY(p->ctx->k->mass_block(&p->ctx->queue, logits_at(p, head, b), p->mask + rows,
                                      p->lse + rows, p->weights + rows, p->n_rows, mass));
        memcpy(p->scores + head * p->n_keys + first, mass,
               (left < BLOCK ? left : BLOCK) * sizeof(*mass));
    }
    return KVC_OK;
}

static void look_task(void *arg, size_t head)
{
    const struct probe *p = arg;
    p->status[head] = look(p, head);
}

static void add_up_task(void *arg, size_t head)
{
    const struct probe *p = arg;
    p->status[head] = add_up(p, head);
}

/* Runs a task for each KV head; the first failure in their order. */
static kvc_status run(struct probe *p, void (*task)(void *arg, size_t head))
{
    kvc_ctx_parallel(p->ctx, p->n_kv_heads, task, p);
    for (size_t h = 0; h < p->n_kv_heads; h++)
        KVC_TRY(p->status[h]);
    return KVC_OK;
}

kvc_status kvc_score_queries(kvc_ctx *ctx, const kvc_view *q, const kvc_view *k,
                             const kvc_probe_options *options, float *scores, void *ws,
                             size_t ws_size)
{
    struct probe p = {.ctx = ctx, .q = q, .k = k, .scores = scores};

    KVC_CHECK(ctx && kvc_view_ok(q) && kvc_view_ok(k) && q->head_dim == k->head_dim, KVC_E_ARG);
    KVC_TRY(take_shape(&p, q->n_tokens, q->n_heads, k->n_tokens, k->n_heads, k->head_dim));
    KVC_TRY(take_options(&p, options));
    if (p.n_keys == 0)
        return KVC_OK;
    KVC_CHECK(scores, KVC_E_ARG);
    const size_t need = carve(ws, &p);
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
    KVC_TRY(run(&p, look_task));
    return run(&p, add_up_task);
}
