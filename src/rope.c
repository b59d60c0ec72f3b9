/* rope.c - rotary positions: frequencies and ids on the host, one kernel call a block of rows. */
#include "kvc/rope.h"

#include <math.h>

#include "arena.h"
#include "bits.h"
#include "check.h"
#include "ctx.h"

enum { BLOCK_ROWS = 16, MAX_PAIRS = KVC_MAX_HEAD_DIM / 2 };

static const double pi = 3.14159265358979323846;
static const int64_t max_position = INT32_MAX - 1;

static const kvc_rope defaults = {
    .struct_size = sizeof(defaults),
    .layout = KVC_ROPE_HALF_SPLIT,
    .base = 10000.0,
    .scaling = KVC_ROPE_NONE,
    .original_context = 4096,
    .factor = 1.0,
    .beta_fast = 32.0,
    .beta_slow = 1.0,
    .axes = KVC_ROPE_AXES_ONE,
};

void kvc_rope_init(kvc_rope *rope, size_t struct_size)
{
    kvc_struct_init(rope, struct_size, &defaults, sizeof(defaults));
}

static bool within(double x, double least)
{
    return isfinite(x) && x >= least;
}

static bool scaling_ok(const kvc_rope *r)
{
    switch (r->scaling) {
    case KVC_ROPE_NONE: return true;
    case KVC_ROPE_LINEAR: return within(r->factor, 1.0);
    case KVC_ROPE_NTK: return within(r->factor, 1.0) && r->n_dims >= 4;
    case KVC_ROPE_DYNAMIC_NTK:
        return within(r->factor, 1.0) && r->n_dims >= 4 && r->original_context >= 1 &&
               r->length >= 0;
    case KVC_ROPE_YARN:
        return within(r->factor, 1.0) && r->original_context >= 1 && isfinite(r->beta_fast) &&
               r->beta_slow > 0.0 && r->beta_slow <= r->beta_fast &&
               within(r->attention_factor, 0.0);
    }
    return false;
}

static bool axes_ok(const kvc_rope *r)
{
    const int32_t n_pairs = r->n_dims / 2, *s = r->sections;

    if (r->axes == KVC_ROPE_AXES_ONE)
        return true;
    if ((unsigned)r->axes > KVC_ROPE_AXES_INTERLEAVED || s[0] < 0 || s[1] < 0 || s[2] < 0 ||
        s[3] != 0 || (int64_t)s[0] + s[1] + s[2] != n_pairs)
        return false;
    /* The last pair of y is 3 sections[1] - 2, that of x is 3 sections[2] - 1. */
    return r->axes == KVC_ROPE_AXES_CONTIGUOUS ||
           (3 * s[1] - 2 < n_pairs && 3 * s[2] - 1 < n_pairs);
}

static double scaled_base(const kvc_rope *r)
{
    const double d = r->n_dims, n = r->original_context;
    double growth = 1.0;

    if (r->scaling == KVC_ROPE_NTK)
        growth = r->factor;
    else if (r->scaling == KVC_ROPE_DYNAMIC_NTK && r->length > r->original_context)
        growth = r->factor * (double)r->length / n - (r->factor - 1.0);
    return growth == 1.0 ? r->base : r->base * pow(growth, d / (d - 2.0));
}

/* The descriptor of a caller, checked. */
static kvc_status take_rope(const kvc_rope *rope, kvc_rope *out)
{
    KVC_CHECK(rope, KVC_E_ARG);
    *out = defaults;
    KVC_TRY(kvc_struct_read(out, sizeof(*out), rope, sizeof(*out)));
    KVC_CHECK(out->n_dims >= 2 && out->n_dims <= KVC_MAX_HEAD_DIM && out->n_dims % 2 == 0 &&
                  (unsigned)out->layout <= KVC_ROPE_INTERLEAVED && isfinite(out->base) &&
                  out->base > 1.0 && scaling_ok(out) && axes_ok(out) && isfinite(scaled_base(out)),
              KVC_E_ARG);
    return KVC_OK;
}

/* YaRN: the pair that makes beta turns over the original context. */
static double pair_of_turns(const kvc_rope *r, double beta)
{
    return r->n_dims * log(r->original_context / (2.0 * pi * beta)) / (2.0 * log(r->base));
}

/* YaRN: how much of pair j keeps its frequency. */
static double kept_share(const kvc_rope *r, int32_t j)
{
    const double low = fmax(0.0, floor(pair_of_turns(r, r->beta_fast)));
    const double high = fmin(r->n_dims - 1.0, ceil(pair_of_turns(r, r->beta_slow)));

    return 1.0 - fmin(fmax((j - low) / fmax(0.001, high - low), 0.0), 1.0);
}

static double frequency_of(const kvc_rope *r, double base, int32_t j)
{
    const double f = pow(base, -2.0 * j / r->n_dims);

    if (r->scaling == KVC_ROPE_LINEAR)
        return f / r->factor;
    if (r->scaling != KVC_ROPE_YARN)
        return f;
    const double kept = kept_share(r, j);
    return f / r->factor * (1.0 - kept) + f * kept;
}

static double magnitude_of(const kvc_rope *r)
{
    if (r->scaling != KVC_ROPE_YARN)
        return 1.0;
    return r->attention_factor > 0.0 ? r->attention_factor : 0.1 * log(r->factor) + 1.0;
}

kvc_status kvc_rope_frequencies(const kvc_rope *rope, double *base, double *frequency,
                                double *magnitude)
{
    kvc_rope r;

    KVC_TRY(take_rope(rope, &r));
    const double b = scaled_base(&r);
    if (base)
        *base = b;
    for (int32_t j = 0; frequency && j < r.n_dims / 2; j++)
        frequency[j] = frequency_of(&r, b, j);
    if (magnitude)
        *magnitude = magnitude_of(&r);
    return KVC_OK;
}

/* A rotation by an angle that grows with the position. */
struct turn {
    size_t n_pairs;
    double rate[MAX_PAIRS]; /* radians a position */
    uint8_t axis[MAX_PAIRS];
    double magnitude;
};

static uint8_t axis_of(const kvc_rope *r, int32_t j)
{
    const int32_t *s = r->sections;

    switch (r->axes) {
    case KVC_ROPE_AXES_ONE: return 0;
    case KVC_ROPE_AXES_CONTIGUOUS: return (uint8_t)((j >= s[0]) + (j >= s[0] + s[1]));
    case KVC_ROPE_AXES_INTERLEAVED: break;
    }
    return (uint8_t)(j % 3 > 0 && j < 3 * s[j % 3] ? j % 3 : 0);
}

static void make_turn(const kvc_rope *r, struct turn *turn)
{
    const double base = scaled_base(r);

    *turn = (struct turn){.n_pairs = (size_t)r->n_dims / 2, .magnitude = magnitude_of(r)};
    for (int32_t j = 0; j < r->n_dims / 2; j++) {
        turn->rate[j] = frequency_of(r, base, j);
        turn->axis[j] = axis_of(r, j);
    }
}

static void write_angles(const struct turn *turn, const int32_t *positions, size_t n,
                         float *cosines, float *sines)
{
    for (size_t i = 0; i < n; i++, positions += 3)
        for (size_t j = 0; j < turn->n_pairs; j++) {
            const double angle = positions[turn->axis[j]] * turn->rate[j];
            *cosines++ = (float)(turn->magnitude * cos(angle));
            *sines++ = (float)(turn->magnitude * sin(angle));
        }
}

kvc_status kvc_rope_angles(const kvc_rope *rope, const int32_t *positions, size_t n, float *cosines,
                           float *sines)
{
    kvc_rope r;
    struct turn turn;

    KVC_TRY(take_rope(rope, &r));
    KVC_CHECK(positions && cosines && sines, KVC_E_ARG);
    make_turn(&r, &turn);
    write_angles(&turn, positions, n, cosines, sines);
    return KVC_OK;
}

static bool same_pairs(const kvc_rope *a, const kvc_rope *b)
{
    return a->n_dims == b->n_dims && a->layout == b->layout && a->axes == b->axes &&
           (a->axes == KVC_ROPE_AXES_ONE ||
            memcmp(a->sections, b->sections, sizeof(a->sections)) == 0);
}

static bool any_bit(const uint64_t *bits, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (kvc_bit(bits, i))
            return true;
    return false;
}

/* The turn from one rotation to another; n rows, of which some may be merged. */
static kvc_status make_rebase(const kvc_rope *from, const kvc_rope *to, const uint64_t *merged,
                              size_t n, struct turn *turn)
{
    kvc_rope a, b;
    bool turns = false;

    KVC_TRY(take_rope(from, &a));
    KVC_TRY(take_rope(to, &b));
    KVC_CHECK(same_pairs(&a, &b), KVC_E_UNSUPPORTED);
    make_turn(&b, turn);
    turn->magnitude /= magnitude_of(&a);
    const double base = scaled_base(&a);
    for (int32_t j = 0; j < a.n_dims / 2; j++) {
        turn->rate[j] -= frequency_of(&a, base, j);
        turns = turns || turn->rate[j] != 0.0;
    }
    KVC_CHECK(!turns || !any_bit(merged, n), KVC_E_UNSUPPORTED);
    return KVC_OK;
}

kvc_status kvc_rope_rebase_angles(const kvc_rope *from, const kvc_rope *to,
                                  const int32_t *positions, const uint64_t *merged, size_t n,
                                  float *cosines, float *sines)
{
    struct turn turn;

    KVC_CHECK(positions && cosines && sines, KVC_E_ARG);
    KVC_TRY(make_rebase(from, to, merged, n, &turn));
    write_angles(&turn, positions, n, cosines, sines);
    return KVC_OK;
}

/* Scratch of one block: angles, rows, and the part of attention as which they are stored. */
struct space {
    float *cosines, *sines; /* [BLOCK_ROWS][n_pairs] */
    float *rows;            /* [BLOCK_ROWS][kvc_attend_stride(n_dims)] */
    float *m, *l, *lse;     /* [BLOCK_ROWS] */
};

static struct space carve(struct kvc_arena *arena, const kvc_rope *r)
{
    const size_t n_dims = (size_t)r->n_dims;
    struct space s;

    s.cosines = kvc_arena_take(arena, BLOCK_ROWS * n_dims / 2, sizeof(float), KVC_WS_ALIGN);
    s.sines = kvc_arena_take(arena, BLOCK_ROWS * n_dims / 2, sizeof(float), KVC_WS_ALIGN);
    s.rows =
        kvc_arena_take(arena, BLOCK_ROWS * kvc_attend_stride(n_dims), sizeof(float), KVC_WS_ALIGN);
    s.m = kvc_arena_take(arena, BLOCK_ROWS, sizeof(float), KVC_WS_ALIGN);
    s.l = kvc_arena_take(arena, BLOCK_ROWS, sizeof(float), KVC_WS_ALIGN);
    s.lse = kvc_arena_take(arena, BLOCK_ROWS, sizeof(float), KVC_WS_ALIGN);
    return s;
}

kvc_status kvc_rope_workspace_size(const kvc_rope *rope, size_t *size)
{
    struct kvc_arena arena = {0};
    kvc_rope r;

    KVC_TRY(take_rope(rope, &r));
    KVC_CHECK(size, KVC_E_ARG);
    carve(&arena, &r);
    *size = arena.used;
    return KVC_OK;
}

/* One rotation: what all blocks share. */
struct job {
    const kvc_ctx *ctx;
    kvc_rope rope;
    const kvc_view *x;
    struct space space;
};

static kvc_status start(struct job *job, kvc_ctx *ctx, const kvc_rope *rope, const kvc_view *x,
                        void *ws, size_t ws_size)
{
    struct kvc_arena arena = {.base = ws};

    KVC_CHECK(ctx, KVC_E_ARG);
    KVC_TRY(take_rope(rope, &job->rope));
    KVC_CHECK(kvc_view_ok(x) && kvc_view_distinct(x) && x->head_dim >= (size_t)job->rope.n_dims,
              KVC_E_ARG);
    KVC_CHECK(x->head_dim <= KVC_MAX_HEAD_DIM, KVC_E_UNSUPPORTED);
    job->space = carve(&arena, &job->rope);
    KVC_CHECK(ws && !arena.overflow && kvc_workspace_ok(ws, ws_size, arena.used), KVC_E_WORKSPACE);
    job->ctx = ctx;
    job->x = x;
    for (size_t i = 0; i < BLOCK_ROWS; i++) {
        job->space.m[i] = 0.0f;
        job->space.l[i] = 1.0f; /* o / 1: finish_rows only converts */
    }
    return KVC_OK;
}

static size_t block_rows(const kvc_view *x, size_t first)
{
    return x->n_tokens - first < BLOCK_ROWS ? x->n_tokens - first : BLOCK_ROWS;
}

static kvc_status rotate_block(const struct job *job, size_t first, const float *cosines,
                               const float *sines)
{
    const struct kvc_kernels *k = job->ctx->k;
    const struct kvc_queue *queue = &job->ctx->queue;
    const size_t n_dims = (size_t)job->rope.n_dims, stride = kvc_attend_stride(n_dims);
    const size_t n = block_rows(job->x, first);
    const bool interleaved = job->rope.layout == KVC_ROPE_INTERLEAVED;
    const struct space *s = &job->space;
    const struct kvc_attend_part part = {.m = s->m, .l = s->l, .o = s->rows};

    for (size_t h = 0; h < job->x->n_heads; h++) {
        struct kvc_rows rows = kvc_view_rows(job->x, first, n, h);
        rows.n_cols = n_dims;
        KVC_TRY(k->load_rows(queue, &rows, s->rows, stride, stride));
        KVC_TRY(k->rotate_rows(queue, s->rows, n, stride, cosines, sines, n_dims / 2, interleaved));
        KVC_TRY(k->finish_rows(queue, &part, n, n_dims, kvc_view_at(job->x, first, h),
                               job->x->dtype, job->x->token_stride, s->lse));
    }
    return KVC_OK;
}

kvc_status kvc_rope_rotate(kvc_ctx *ctx, const kvc_rope *rope, const float *cosines,
                           const float *sines, const kvc_view *x, void *ws, size_t ws_size)
{
    struct job job;

    KVC_CHECK(cosines && sines, KVC_E_ARG);
    KVC_TRY(start(&job, ctx, rope, x, ws, ws_size));
    const size_t n_pairs = (size_t)job.rope.n_dims / 2;
    for (size_t first = 0; first < x->n_tokens; first += BLOCK_ROWS)
        KVC_TRY(rotate_block(&job, first, cosines + first * n_pairs, sines + first * n_pairs));
    return KVC_OK;
}

static kvc_status turn_all(const struct job *job, const struct turn *turn, const int32_t *positions)
{
    const struct space *s = &job->space;

    for (size_t first = 0; first < job->x->n_tokens; first += BLOCK_ROWS) {
        write_angles(turn, positions + 3 * first, block_rows(job->x, first), s->cosines, s->sines);
        KVC_TRY(rotate_block(job, first, s->cosines, s->sines));
    }
    return KVC_OK;
}

kvc_status kvc_rope_apply(kvc_ctx *ctx, const kvc_rope *rope, const int32_t *positions,
                          const kvc_view *x, void *ws, size_t ws_size)
{
    struct job job;
    struct turn turn;

    KVC_CHECK(positions, KVC_E_ARG);
    KVC_TRY(start(&job, ctx, rope, x, ws, ws_size));
    make_turn(&job.rope, &turn);
    return turn_all(&job, &turn, positions);
}

kvc_status kvc_rope_rebase(kvc_ctx *ctx, const kvc_rope *from, const kvc_rope *to,
                           const int32_t *positions, const uint64_t *merged, const kvc_view *k,
                           void *ws, size_t ws_size)
{
    struct job job;
    struct turn turn;

    KVC_CHECK(positions, KVC_E_ARG);
    KVC_TRY(start(&job, ctx, to, k, ws, ws_size));
    KVC_TRY(make_rebase(from, to, merged, k->n_tokens, &turn));
    return turn_all(&job, &turn, positions);
}

/* A segment in tokens: a frame of rows x cols of them. */
struct extent {
    int64_t n_frames, n_rows, n_cols;
    double step;
    int64_t n_tokens;
    int64_t n_positions; /* by which the next position grows */
};

static bool is_text(const kvc_rope_segment *s)
{
    return s->n_text > 0 && s->n_frames == 0 && s->n_rows == 0 && s->n_cols == 0 && s->merge == 0 &&
           s->frame_step == 0.0f;
}

static bool is_media(const kvc_rope_segment *s, int32_t merge)
{
    return s->n_text == 0 && s->n_frames > 0 && s->n_rows > 0 && s->n_cols > 0 && merge > 0 &&
           s->n_rows % merge == 0 && s->n_cols % merge == 0 && within(s->frame_step, 0.0);
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* False if the segment is wrong, or larger than any position. */
static bool measure(const kvc_rope_segment *s, kvc_rope_ids ids, struct extent *e)
{
    const int32_t merge = s->merge == 0 ? 1 : s->merge;

    if (s->reserved[0] != 0 || s->reserved[1] != 0)
        return false;
    *e = (struct extent){.n_frames = 1, .n_rows = 1, .n_cols = s->n_text};
    e->n_tokens = e->n_positions = s->n_text;
    if (is_text(s))
        return true;
    if (!is_media(s, merge))
        return false;
    e->n_frames = s->n_frames;
    e->n_rows = s->n_rows / merge;
    e->n_cols = s->n_cols / merge;
    e->step = s->frame_step == 0.0f ? 1.0 : (double)s->frame_step;
    if (__builtin_mul_overflow(e->n_rows * e->n_cols, e->n_frames, &e->n_tokens))
        return false;
    const int64_t side = larger(e->n_rows, e->n_cols);
    const double last = floor((double)(e->n_frames - 1) * e->step);
    if (ids == KVC_ROPE_IDS_1D)
        e->n_positions = e->n_tokens;
    else if (ids == KVC_ROPE_IDS_2D)
        e->n_positions = e->n_frames * side;
    else if (last <= (double)max_position)
        e->n_positions = larger((int64_t)last + 1, side);
    else
        return false;
    return true;
}

static int32_t *put(int32_t *at, int64_t t, int64_t y, int64_t x)
{
    at[0] = (int32_t)t;
    at[1] = (int32_t)y;
    at[2] = (int32_t)x;
    return at + 3;
}

/* Positions of a segment that starts at p; returns where the next one writes. */
static int32_t *write_segment(const struct extent *e, kvc_rope_ids ids, bool text, int64_t p,
                              int32_t *at)
{
    if (text || ids == KVC_ROPE_IDS_1D) {
        for (int64_t i = 0; i < e->n_tokens; i++)
            at = put(at, p + i, p + i, p + i);
        return at;
    }
    for (int64_t f = 0; f < e->n_frames; f++) {
        const bool joined = ids == KVC_ROPE_IDS_MROPE;
        const int64_t t =
            joined ? p + (int64_t)floor((double)f * e->step) : p + f * larger(e->n_rows, e->n_cols);
        const int64_t corner = joined ? p : t;
        for (int64_t y = 0; y < e->n_rows; y++)
            for (int64_t x = 0; x < e->n_cols; x++)
                at = put(at, t, corner + y, corner + x);
    }
    return at;
}

kvc_status kvc_rope_positions(const kvc_rope_segment *segments, size_t n_segments, kvc_rope_ids ids,
                              int64_t first, int32_t *positions, size_t max_tokens,
                              size_t *n_tokens, int64_t *next, int64_t *delta)
{
    struct extent e;
    int64_t n = 0, p = first;

    KVC_CHECK((segments || n_segments == 0) && (unsigned)ids <= KVC_ROPE_IDS_MROPE && first >= 0 &&
                  first <= max_position && n_tokens,
              KVC_E_ARG);
    for (size_t i = 0; i < n_segments; i++) {
        KVC_CHECK(measure(&segments[i], ids, &e) && e.n_positions <= max_position + 1 - p &&
                      !__builtin_add_overflow(n, e.n_tokens, &n),
                  KVC_E_ARG);
        p += e.n_positions;
    }
    KVC_CHECK((uint64_t)n <= SIZE_MAX && (!positions || (uint64_t)n <= max_tokens), KVC_E_ARG);

    *n_tokens = (size_t)n;
    if (next)
        *next = p;
    if (delta)
        *delta = p - first - n;
    p = first;
    for (size_t i = 0; positions && i < n_segments; i++) {
        measure(&segments[i], ids, &e);
        positions = write_segment(&e, ids, segments[i].n_text > 0, p, positions);
        p += e.n_positions;
    }
    return KVC_OK;
}
