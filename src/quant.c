/* quant.c - quantization of the caller's rows: checks, groups, one kernel call a group. */
#include "kvc/quant.h"

#include "check.h"
#include "ctx.h"
#include "kernels/codes.h"

/* The range of one quantization: what all groups share. */
struct job {
    const kvc_ctx *ctx;
    const kvc_view *src;
    const kvc_quant_options *options;
    int bits;
    uint8_t *codes;
    size_t head_bytes, token_bytes; /* of codes */
    void *params;
    uint64_t n_saturated;
};

static const kvc_quant_options defaults = {
    .struct_size = sizeof(defaults),
    .format = KVC_INT8,
    .scale = KVC_SCALE_TOKEN,
    .block_tokens = KVC_PAGE_ROWS,
    .window_tokens = KVC_PAGE_ROWS,
};

void kvc_quant_options_init(kvc_quant_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &defaults, sizeof(defaults));
}

static bool options_ok(const kvc_quant_options *o)
{
    if ((o->format != KVC_INT8 && o->format != KVC_INT4) || (unsigned)o->scale > KVC_SCALE_LAYER)
        return false;
    if (o->scale == KVC_SCALE_TOKEN)
        return true;
    if (o->block_tokens == 0)
        return false;
    return o->scale == KVC_SCALE_CHANNEL ||
           (o->window_tokens >= o->block_tokens && o->window_tokens % o->block_tokens == 0);
}

/* The options of a caller, checked. */
static kvc_status take_options(const kvc_quant_options *options, kvc_quant_options *out)
{
    *out = defaults;
    if (options)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), options, sizeof(*out)));
    return options_ok(out) ? KVC_OK : KVC_E_ARG;
}

static size_t head_code_bytes(size_t head_dim, kvc_format format)
{
    return format == KVC_INT8 ? head_dim : (head_dim + 1) / 2;
}

static size_t block_count(size_t n_tokens, size_t block)
{
    return n_tokens / block + (n_tokens % block != 0);
}

kvc_status kvc_quant_size(size_t n_tokens, size_t n_heads, size_t head_dim,
                          const kvc_quant_options *options, size_t *codes_bytes,
                          size_t *params_bytes)
{
    kvc_quant_options o;
    size_t codes, params;

    KVC_CHECK(options && n_heads > 0 && head_dim > 0, KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    KVC_CHECK(head_dim <= KVC_MAX_HEAD_DIM, KVC_E_UNSUPPORTED);
    const size_t code = head_code_bytes(head_dim, o.format);
    size_t groups = n_heads, group_bytes = 0;
    switch (o.scale) {
    case KVC_SCALE_TOKEN: group_bytes = 2; break;
    case KVC_SCALE_CHANNEL: group_bytes = 4 * head_dim; break;
    case KVC_SCALE_LAYER: groups = 1; /* fall through */
    case KVC_SCALE_HEAD: group_bytes = 4; break;
    }
    const size_t n = o.scale == KVC_SCALE_TOKEN ? n_tokens : block_count(n_tokens, o.block_tokens);
    KVC_CHECK(!__builtin_mul_overflow(n_tokens, n_heads, &codes) &&
                  !__builtin_mul_overflow(codes, code, &codes) &&
                  !__builtin_mul_overflow(n, groups, &params) &&
                  !__builtin_mul_overflow(params, group_bytes, &params),
              KVC_E_ARG);
    if (codes_bytes)
        *codes_bytes = codes;
    if (params_bytes)
        *params_bytes = params;
    return KVC_OK;
}

/* Checks a tensor with its codes and parameters; fits the sizes exactly, so that parameters of
 * another geometry are refused. */
static kvc_status check_sizes(const kvc_view *view, const kvc_quant_options *options,
                              const void *codes, size_t codes_bytes, const void *params,
                              size_t params_bytes)
{
    size_t need_codes, need_params;

    KVC_CHECK(kvc_view_ok(view) && codes && params && (uintptr_t)params % 4 == 0, KVC_E_ARG);
    KVC_TRY(kvc_quant_size(view->n_tokens, view->n_heads, view->head_dim, options, &need_codes,
                           &need_params));
    KVC_CHECK(codes_bytes == need_codes && params_bytes == need_params, KVC_E_ARG);
    return KVC_OK;
}

/* Range of tokens first ... last - 1 over heads begin ... end - 1, joined to *all. */
static kvc_status join_range(const kvc_ctx *ctx, const kvc_view *src, size_t first, size_t last,
                             size_t begin, size_t end, struct kvc_range *all)
{
    for (size_t h = begin; h < end && first < last; h++) {
        const struct kvc_rows rows = kvc_view_rows(src, first, last - first, h);
        struct kvc_range one;
        KVC_TRY(ctx->k->range_rows(&ctx->queue, &rows, &one));
        all->min = one.min < all->min ? one.min : all->min;
        all->max = one.max > all->max ? one.max : all->max;
        all->n_nonfinite += one.n_nonfinite;
    }
    return KVC_OK;
}

static float absmax_of(struct kvc_range range)
{
    return range.max > -range.min ? range.max : -range.min;
}

static uint8_t *codes_at(const struct job *job, size_t token, size_t head)
{
    return job->codes + token * job->token_bytes + head * job->head_bytes;
}

/* HEAD and LAYER: tokens first ... last - 1 of one block, heads begin ... end - 1. */
static kvc_status quantize_block(const struct job *job, size_t first, size_t last, size_t begin,
                                 size_t end, float *scale)
{
    const size_t window = job->options->window_tokens;
    const size_t block = first / job->options->block_tokens;
    const size_t blocks = window / job->options->block_tokens;
    const size_t start = block + 1 > blocks ? (block + 1 - blocks) * job->options->block_tokens : 0;
    struct kvc_range range = {0};
    KVC_TRY(join_range(job->ctx, job->src, start, last, begin, end, &range));
    const float absmax = absmax_of(range);
    const struct kvc_fixed_code code = {
        .bits = job->bits,
        .lo = -kvc_code_max(job->bits),
        .hi = kvc_code_max(job->bits),
        .factor = kvc_fixed_factor(absmax, job->bits),
    };
    for (size_t h = begin; h < end; h++) {
        const struct kvc_rows rows = kvc_view_rows(job->src, first, last - first, h);
        KVC_TRY(job->ctx->k->quantize_fixed(&job->ctx->queue, &rows, &code, codes_at(job, first, h),
                                            job->token_bytes));
    }
    *scale = kvc_fixed_scale(absmax, job->bits);
    return KVC_OK;
}

static kvc_status quantize_channels(struct job *job, size_t first, size_t last, size_t head,
                                    uint16_t *params)
{
    const struct kvc_rows rows = kvc_view_rows(job->src, first, last - first, head);
    return job->ctx->k->quantize_channels(&job->ctx->queue, &rows, job->bits,
                                          codes_at(job, first, head), job->token_bytes, params,
                                          params + job->src->head_dim, &job->n_saturated);
}

static kvc_status quantize_blocks(struct job *job)
{
    const size_t block = job->options->block_tokens, n_heads = job->src->n_heads;
    const size_t d = job->src->head_dim, n_tokens = job->src->n_tokens;

    for (size_t b = 0, first = 0; first < n_tokens; b++, first += block) {
        const size_t last = n_tokens - first < block ? n_tokens : first + block;
        if (job->options->scale == KVC_SCALE_LAYER)
            KVC_TRY(quantize_block(job, first, last, 0, n_heads, (float *)job->params + b));
        for (size_t h = 0; h < n_heads; h++) {
            const size_t group = b * n_heads + h;
            if (job->options->scale == KVC_SCALE_HEAD)
                KVC_TRY(quantize_block(job, first, last, h, h + 1, (float *)job->params + group));
            if (job->options->scale == KVC_SCALE_CHANNEL)
                KVC_TRY(quantize_channels(job, first, last, h,
                                          (uint16_t *)job->params + group * 2 * d));
        }
    }
    return KVC_OK;
}

static kvc_status quantize_tokens(struct job *job)
{
    const size_t n_heads = job->src->n_heads;
    for (size_t h = 0; h < n_heads; h++) {
        const struct kvc_rows rows = kvc_view_rows(job->src, 0, job->src->n_tokens, h);
        KVC_TRY(job->ctx->k->quantize_tokens(
            &job->ctx->queue, &rows, job->bits, codes_at(job, 0, h), job->token_bytes,
            (uint16_t *)job->params + h, n_heads, &job->n_saturated));
    }
    return KVC_OK;
}

kvc_status kvc_quantize(kvc_ctx *ctx, const kvc_view *src, const kvc_quant_options *options,
                        void *codes, size_t codes_bytes, void *params, size_t params_bytes,
                        kvc_quant_counts *counts)
{
    kvc_quant_options o;

    KVC_CHECK(ctx && (!counts || counts->struct_size >= sizeof(*counts)), KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    KVC_TRY(check_sizes(src, &o, codes, codes_bytes, params, params_bytes));

    struct kvc_range range = {0};
    KVC_TRY(join_range(ctx, src, 0, src->n_tokens, 0, src->n_heads, &range));
    if (counts)
        counts->n_nonfinite = range.n_nonfinite;
    KVC_CHECK(!o.strict || range.n_nonfinite == 0, KVC_E_NONFINITE);

    struct job job = {
        .ctx = ctx,
        .src = src,
        .options = &o,
        .bits = o.format == KVC_INT8 ? 8 : 4,
        .codes = codes,
        .head_bytes = head_code_bytes(src->head_dim, o.format),
        .params = params,
    };
    job.token_bytes = job.head_bytes * src->n_heads;
    if (src->n_tokens > 0 && o.scale == KVC_SCALE_TOKEN)
        KVC_TRY(quantize_tokens(&job));
    else if (src->n_tokens > 0)
        KVC_TRY(quantize_blocks(&job));
    if (counts)
        counts->n_saturated = job.n_saturated;
    return KVC_OK;
}

kvc_status kvc_dequantize(kvc_ctx *ctx, const void *codes, size_t codes_bytes, const void *params,
                          size_t params_bytes, const kvc_quant_options *options,
                          const kvc_view *dst)
{
    kvc_quant_options o;

    KVC_CHECK(ctx, KVC_E_ARG);
    KVC_TRY(take_options(options, &o));
    KVC_TRY(check_sizes(dst, &o, codes, codes_bytes, params, params_bytes));
    KVC_CHECK(dst->dtype == KVC_DTYPE_F32 && kvc_view_distinct(dst), KVC_E_ARG);

    const size_t d = dst->head_dim, n_heads = dst->n_heads, n_tokens = dst->n_tokens;
    const size_t head_bytes = head_code_bytes(d, o.format);
    const bool by_token = o.scale == KVC_SCALE_TOKEN;
    const size_t block = by_token ? n_tokens : o.block_tokens;
    for (size_t b = 0, first = 0; first < n_tokens; b++, first += block) {
        const size_t n = n_tokens - first < block ? n_tokens - first : block;
        for (size_t h = 0; h < n_heads; h++) {
            struct kvc_dequant p = {.bits = o.format == KVC_INT8 ? 8 : 4};
            if (by_token) {
                p.scales = (const uint16_t *)params + h;
                p.scale_stride = n_heads;
            } else if (o.scale == KVC_SCALE_CHANNEL) {
                p.scales = (const uint16_t *)params + (b * n_heads + h) * 2 * d;
                p.minima = p.scales + d;
            } else {
                const size_t i = o.scale == KVC_SCALE_LAYER ? b : b * n_heads + h;
                p.scale = ((const float *)params)[i];
            }
            const uint8_t *from = (const uint8_t *)codes + (first * n_heads + h) * head_bytes;
            KVC_TRY(ctx->k->dequantize_rows(&ctx->queue, from, n_heads * head_bytes, &p, n, d,
                                            kvc_view_at(dst, first, h), dst->token_stride));
        }
        if (n_tokens - first <= block)
            break;
    }
    return KVC_OK;
}

/* Element b of an array of views, whose elements have the caller's size. */
static const kvc_view *view_at(const kvc_view *views, size_t b)
{
    return (const kvc_view *)(const void *)((const char *)views + b * views->struct_size);
}

kvc_status kvc_quantize_window(kvc_ctx *ctx, const kvc_view *src, size_t n_batch, kvc_format format,
                               size_t window_tokens, void *codes, size_t codes_bytes, float *scales)
{
    kvc_quant_options options = defaults;
    size_t batch_bytes, all_bytes;

    KVC_CHECK(ctx && src && n_batch > 0 && window_tokens > 0 && codes && scales, KVC_E_ARG);
    options.format = format;
    KVC_CHECK(kvc_view_ok(src), KVC_E_ARG);
    KVC_TRY(
        kvc_quant_size(src->n_tokens, src->n_heads, src->head_dim, &options, &batch_bytes, NULL));
    KVC_CHECK(!__builtin_mul_overflow(batch_bytes, n_batch, &all_bytes) && codes_bytes == all_bytes,
              KVC_E_ARG);
    for (size_t b = 1; b < n_batch; b++) {
        const kvc_view *view = view_at(src, b);
        KVC_CHECK(kvc_view_ok(view) && view->struct_size == src->struct_size &&
                      view->n_tokens == src->n_tokens && view->n_heads == src->n_heads &&
                      view->head_dim == src->head_dim,
                  KVC_E_ARG);
    }

    const int bits = format == KVC_INT8 ? 8 : 4;
    const size_t n_tokens = src->n_tokens, n_heads = src->n_heads;
    const size_t head_bytes = head_code_bytes(src->head_dim, format);
    const size_t first = n_tokens > window_tokens ? n_tokens - window_tokens : 0;
    for (size_t h = 0; h < n_heads; h++) {
        struct kvc_range range = {0};
        for (size_t b = 0; b < n_batch; b++)
            KVC_TRY(join_range(ctx, view_at(src, b), first, n_tokens, h, h + 1, &range));
        const float scale = absmax_of(range) / (float)kvc_code_max(bits);
        scales[h] = scale > 1e-5f ? scale : 1e-5f;
        const struct kvc_fixed_code code = {
            .bits = bits,
            .lo = -kvc_code_max(bits) - 1,
            .hi = kvc_code_max(bits),
            .factor = scales[h],
            .divide = true,
        };
        for (size_t b = 0; b < n_batch && n_tokens > 0; b++) {
            const struct kvc_rows rows = kvc_view_rows(view_at(src, b), 0, n_tokens, h);
            uint8_t *to = (uint8_t *)codes + b * batch_bytes + h * head_bytes;
            KVC_TRY(ctx->k->quantize_fixed(&ctx->queue, &rows, &code, to, n_heads * head_bytes));
        }
    }
    return KVC_OK;
}
