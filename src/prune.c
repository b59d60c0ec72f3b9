/* prune.c - how many rows are kept and which, and moving them. */
#include "kvc/prune.h"

#include <math.h>

#include "arena.h"
#include "bits.h"
#include "check.h"
#include "ctx.h"

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

kvc_status kvc_keep_count(size_t n, float rate, size_t keep_min, size_t *keep)
{
    KVC_CHECK(keep && rate >= 0.0f && rate <= 1.0f, KVC_E_ARG);
    /* A number rounded to a float is at most 2^-24 of itself away from it; the rest is for the
     * roundings here. */
    const double dropped = (double)n * (double)rate * (1.0 + 0x1p-24 + 0x1p-50);
    const size_t kept = dropped >= (double)n ? 0 : n - smaller(n, (size_t)dropped);
    *keep = smaller(n, kept > keep_min ? kept : keep_min);
    return KVC_OK;
}

/* Selection. */

static const kvc_force_options force_defaults = {
    .struct_size = sizeof(force_defaults),
    .recent = 64,
    .sinks = 4,
    .sentences = true,
};

void kvc_force_options_init(kvc_force_options *options, size_t struct_size)
{
    kvc_struct_init(options, struct_size, &force_defaults, sizeof(force_defaults));
}

/* Rows marked so far, and how many may be. */
struct forcing {
    uint64_t *bits;
    size_t n, keep;
    bool truncated;
};

static void force_row(struct forcing *f, size_t row)
{
    if (kvc_bit(f->bits, row))
        return;
    if (f->n == f->keep) {
        f->truncated = true;
        return;
    }
    kvc_bit_set(f->bits, row);
    f->n++;
}

kvc_status kvc_force_rows(size_t n, const kvc_force_options *options, size_t keep, uint64_t *forced,
                          size_t *n_forced, bool *truncated)
{
    kvc_force_options o = force_defaults;
    struct forcing f = {.bits = forced, .keep = keep};

    if (options)
        KVC_TRY(kvc_struct_read(&o, sizeof(o), options, sizeof(o)));
    KVC_CHECK((forced || n == 0) && n_forced && o.recent >= 0 && o.sinks >= 0, KVC_E_ARG);
    KVC_CHECK(n == 0 || (forced != o.caller && forced != o.sentence_first), KVC_E_ARG);
    for (size_t w = 0; w < kvc_bit_words(n); w++)
        forced[w] = 0;
    for (size_t i = 0; i < smaller(n, (size_t)o.recent); i++)
        force_row(&f, n - 1 - i);
    for (size_t i = 0; i < smaller(n, (size_t)o.sinks); i++)
        force_row(&f, i);
    for (size_t i = 0; i < n && o.sentences; i++)
        if (kvc_bit(o.sentence_first, i))
            force_row(&f, i);
    for (size_t i = 0; i < n; i++)
        if (kvc_bit(o.caller, i))
            force_row(&f, i);
    *n_forced = f.n;
    if (truncated)
        *truncated = f.truncated;
    return KVC_OK;
}

/* Rows that stay or go together. */
struct unit {
    uint32_t rank; /* the better the score, the lower */
    int32_t index;
};

/* One selection. */
struct selection {
    const float *scores;
    const uint64_t *forced;
    size_t n, block;
    kvc_block_score how;
    struct unit *units, *sorted; /* units that compete, and room to sort them */
    size_t n_units;
    uint64_t *taken; /* bitmap of units */
};

static size_t unit_count(const struct selection *s)
{
    return s->n / s->block + (s->n % s->block != 0);
}

static bool carve_selection(struct kvc_arena *arena, struct selection *s)
{
    const size_t units = unit_count(s);
    s->units = kvc_arena_take(arena, units, sizeof(*s->units), KVC_WS_ALIGN);
    s->sorted = kvc_arena_take(arena, units, sizeof(*s->sorted), KVC_WS_ALIGN);
    s->taken = kvc_arena_take(arena, kvc_bit_words(units), sizeof(*s->taken), KVC_WS_ALIGN);
    return !arena->overflow;
}

kvc_status kvc_select_rows_workspace_size(size_t n, size_t block, size_t *size)
{
    struct kvc_arena arena = {0};
    struct selection s = {.n = n, .block = block};

    KVC_CHECK(size && n <= INT32_MAX && block >= 1 && block <= 64, KVC_E_ARG);
    KVC_CHECK(carve_selection(&arena, &s), KVC_E_ARG);
    *size = arena.used;
    return KVC_OK;
}

static bool is_candidate(const struct selection *s, size_t row)
{
    return s->scores[row] > -INFINITY; /* false for NaN */
}

static bool is_valid(const struct selection *s, size_t row)
{
    return is_candidate(s, row) || kvc_bit(s->forced, row);
}

/* What one unit brings with it. */
struct contents {
    size_t n_valid;
    bool forced;
    float score; /* NaN: no row competes */
};

static struct contents look_into(const struct selection *s, size_t unit)
{
    struct contents c = {.score = NAN};
    double sum = 0.0;
    size_t count = 0;

    for (size_t i = unit * s->block; i < smaller(s->n, (unit + 1) * s->block); i++) {
        c.n_valid += is_valid(s, i);
        c.forced |= kvc_bit(s->forced, i);
        if (!is_candidate(s, i))
            continue;
        sum += (double)s->scores[i];
        count++;
        if (count == 1 || s->scores[i] > c.score)
            c.score = s->scores[i];
    }
    if (s->how == KVC_BLOCK_MEAN && count > 0)
        c.score = (float)(sum / (double)count);
    return c;
}

/* Bits of a float as a number that falls as the float rises; both zeros are the same. */
static uint32_t rank_of(float score)
{
    const float x = score + 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
}

/* By rank, digit by digit from the lowest; equal ranks keep their order, the lower index first. */
static void sort_units(struct selection *s)
{
    for (int shift = 0; shift < 32; shift += 8) {
        struct unit *sorted = s->sorted;
        size_t at[257] = {0};
        for (size_t i = 0; i < s->n_units; i++)
            at[(s->units[i].rank >> shift & 0xFF) + 1]++;
        for (size_t digit = 0; digit < 256; digit++)
            at[digit + 1] += at[digit];
        for (size_t i = 0; i < s->n_units; i++)
            sorted[at[s->units[i].rank >> shift & 0xFF]++] = s->units[i];
        s->sorted = s->units;
        s->units = sorted;
    }
}

/* Takes the forced units and sorts the others. Returns the rows taken. */
static size_t take_forced(struct selection *s)
{
    const size_t units = unit_count(s);
    size_t n_taken = 0;

    for (size_t w = 0; w < kvc_bit_words(units); w++)
        s->taken[w] = 0;
    for (size_t u = 0; u < units; u++) {
        const struct contents c = look_into(s, u);
        if (c.forced) {
            kvc_bit_set(s->taken, u);
            n_taken += c.n_valid;
        } else if (!isnan(c.score)) {
            s->units[s->n_units++] = (struct unit){rank_of(c.score), (int32_t)u};
        }
    }
    sort_units(s);
    return n_taken;
}

/* Takes the best units that fit into what is left of keep. */
static void take_best(struct selection *s, size_t n_taken, size_t keep)
{
    for (size_t i = 0; i < s->n_units && n_taken < keep; i++) {
        const size_t u = (size_t)s->units[i].index, size = look_into(s, u).n_valid;
        if (size > keep - n_taken)
            continue;
        kvc_bit_set(s->taken, u);
        n_taken += size;
    }
}

static size_t count_bits(const uint64_t *bits, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += kvc_bit(bits, i);
    return count;
}

kvc_status kvc_select_rows(const float *scores, size_t n, size_t keep, const uint64_t *forced,
                           size_t block, kvc_block_score how, int32_t *rows, size_t *n_rows,
                           void *ws, size_t ws_size)
{
    struct kvc_arena arena = {.base = ws};
    struct selection s = {.scores = scores, .forced = forced, .n = n, .block = block, .how = how};
    size_t need, count = 0;

    KVC_TRY(kvc_select_rows_workspace_size(n, block, &need));
    KVC_CHECK((scores || n == 0) && (rows || n == 0 || keep == 0) && n_rows &&
                  (unsigned)how <= KVC_BLOCK_MAX && count_bits(forced, n) <= keep,
              KVC_E_ARG);
    KVC_CHECK(kvc_workspace_ok(ws, ws_size, need), KVC_E_WORKSPACE);
    carve_selection(&arena, &s);
    take_best(&s, take_forced(&s), keep);
    for (size_t i = 0; i < n; i++)
        if (kvc_bit(s.taken, i / block) && is_valid(&s, i))
            rows[count++] = (int32_t)i;
    *n_rows = count;
    return KVC_OK;
}

/* Moving rows and what refers to them. */

static bool rows_ascend(const int32_t *rows, size_t n_rows, size_t n_old)
{
    if (n_old > INT32_MAX || (!rows && n_rows > 0))
        return false;
    for (size_t i = 0; i < n_rows; i++)
        if (rows[i] < 0 || (size_t)rows[i] >= n_old || (i > 0 && rows[i] <= rows[i - 1]))
            return false;
    return true;
}

kvc_status kvc_prune_rows(kvc_ctx *ctx, const kvc_view *view, const int32_t *rows, size_t n_rows)
{
    KVC_CHECK(ctx && kvc_view_ok(view) && kvc_view_distinct(view), KVC_E_ARG);
    KVC_CHECK(rows_ascend(rows, n_rows, view->n_tokens), KVC_E_ARG);
    if (n_rows == 0)
        return KVC_OK;
    /* Heads that touch move as one run: they lie inside their token, or the view overlaps. */
    const size_t n_runs = view->head_stride == view->head_dim ? 1 : view->n_heads;
    const size_t size = kvc_dtype_size(view->dtype);
    const size_t run = view->n_heads / n_runs * view->head_dim;
    for (size_t h = 0; h < n_runs; h++)
        KVC_TRY(ctx->k->gather_rows(&ctx->queue, kvc_view_at(view, 0, h), run * size,
                                    view->token_stride * size, rows, n_rows));
    return KVC_OK;
}

kvc_status kvc_prune_map(const int32_t *rows, size_t n_rows, size_t n_old, int32_t *map)
{
    KVC_CHECK(rows_ascend(rows, n_rows, n_old) && (map || n_old == 0), KVC_E_ARG);
    for (size_t i = 0; i < n_old; i++)
        map[i] = -1;
    for (size_t i = 0; i < n_rows; i++)
        map[rows[i]] = (int32_t)i;
    return KVC_OK;
}

/* How many rows are below a row. */
static size_t rows_below(const int32_t *rows, size_t n_rows, size_t row)
{
    size_t lo = 0, hi = n_rows;
    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if ((size_t)rows[mid] < row)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

kvc_status kvc_segment_map(const kvc_segment *segments, size_t n_segments, const int32_t *rows,
                           size_t n_rows, size_t n_old, kvc_segment *out)
{
    KVC_CHECK(rows_ascend(rows, n_rows, n_old) && ((segments && out) || n_segments == 0),
              KVC_E_ARG);
    for (size_t i = 0; i < n_segments; i++)
        KVC_CHECK(segments[i].first >= 0 && segments[i].count >= 0 &&
                      (size_t)segments[i].first + (size_t)segments[i].count <= n_old,
                  KVC_E_ARG);
    for (size_t i = 0; i < n_segments; i++) {
        const size_t first = (size_t)segments[i].first, end = first + (size_t)segments[i].count;
        const size_t below = rows_below(rows, n_rows, first);
        out[i].first = (int32_t)below;
        out[i].count = (int32_t)(rows_below(rows, n_rows, end) - below);
    }
    return KVC_OK;
}
