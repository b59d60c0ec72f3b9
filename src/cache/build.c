/* build.c - new pages of the rows that a policy keeps: gathered, merged, sealed by format. */
#include <string.h>

#include "choose.h"

void kvc_build_carve(kvc_cache *cache, struct kvc_arena *arena)
{
    const size_t open = cache->layouts[KVC_LAYOUT_OPEN].n_bytes;
    const size_t s_k = kvc_attend_stride((size_t)cache->params.head_dim_k);
    const size_t s_v = kvc_attend_stride((size_t)cache->params.head_dim_v);
    struct kvc_build_lane *lanes = kvc_arena_take(arena, KVC_BUILD_LANES, sizeof(*lanes), 64);
    cache->build_lanes = lanes;
    for (int i = 0; i < KVC_BUILD_LANES; i++) {
        struct kvc_build_lane lane;
        lane.open[0] = kvc_arena_take(arena, open, 1, 128);
        lane.open[1] = kvc_arena_take(arena, open, 1, 128);
        lane.rows = kvc_arena_take(arena, 2 * (s_k + s_v), sizeof(float), 64);
        lane.outputs = kvc_arena_take(arena, 3 * s_v, KVC_TILE_ROWS * sizeof(float), 64);
        if (lanes)
            lanes[i] = lane;
    }
}

/* The last slot that begins at or before an ordinal, of those that ascend: the unsealed ones. */
static int32_t find_slot(const struct kvc_choice *c, int32_t ordinal)
{
    int32_t low = c->seq->first_unsealed, high = c->seq->n_slots;
    while (high - low > 1) {
        const int32_t mid = low + (high - low) / 2;
        if (kvc_slot(c->cache, c->seq, mid)->first <= ordinal)
            low = mid;
        else
            high = mid;
    }
    return low;
}

struct kvc_row_place kvc_find_row(const struct kvc_choice *c, int32_t pair, int32_t i)
{
    const int32_t ordinal = kvc_fact(c->cache, c->seq, i)->ordinal;
    for (int32_t slot = find_slot(c, ordinal); slot >= 0; slot--) {
        if (slot == c->seq->n_slots)
            continue; /* all slots are sealed */
        struct kvc_column *column = kvc_slot(c->cache, c->seq, slot);
        const struct kvc_entry *e = &column->entries[pair];
        if (e->page < 0 || ordinal < column->first || ordinal >= column->end)
            continue;
        const uint64_t bit =
            e->live & kvc_entry_range(c->cache, column, pair, ordinal, ordinal + INT64_C(1));
        if (bit)
            return (struct kvc_row_place){column, __builtin_ctzll(bit),
                                          slot < c->seq->first_unsealed};
    }
    return (struct kvc_row_place){kvc_slot(c->cache, c->seq, 0), 0,
                                  true}; /* not reached: callers ask for rows there are */
}

static void read_row(const struct kvc_choice *c, int32_t pair, int32_t i, float *k, float *v)
{
    const kvc_ctx *ctx = c->cache->ctx;
    const struct kvc_row_place at = kvc_find_row(c, pair, i);
    const int32_t page = at.column->entries[pair].page;
    ctx->k->read_page(&ctx->queue, kvc_page_layout_of(c->cache, page),
                      kvc_page_data(c->cache, page), (uint32_t)at.row, 1, k, 0, v, 0);
}

void kvc_load_row(const struct kvc_choice *c, int32_t pair, int32_t i, float *k, float *v,
                  float *rows)
{
    const kvc_ctx *ctx = c->cache->ctx;
    const size_t d_k = (size_t)c->cache->params.head_dim_k;
    const size_t d_v = (size_t)c->cache->params.head_dim_v;
    const size_t s_k = kvc_attend_stride(d_k);
    float w = c->weight[i];

    if (k)
        memset(k + d_k, 0, (s_k - d_k) * sizeof(*k));
    read_row(c, pair, i, k, v);
    for (int32_t m = c->next[i]; m >= 0; m = c->next[m]) {
        read_row(c, pair, m, k ? rows : NULL, v ? rows + s_k : NULL);
        if (k)
            ctx->k->mix_rows(&ctx->queue, k, w, rows, c->weight[m], d_k, k);
        if (v)
            ctx->k->mix_rows(&ctx->queue, v, w, rows + s_k, c->weight[m], d_v, v);
        w = 1.0f;
    }
}

/* ---- which page a row goes to ---- */

/* A page of a pair that rows are collected for: kind 0 becomes F16, kind 1 is coded. */
struct filling {
    int32_t column; /* place among the new columns, or -1 */
    int32_t n_rows;
    bool groups; /* some row stands for several tokens */
};

/* Rows of a pair in ascending ordinals, and the pages they fill: a page takes the next column when
 * its first row comes, so that columns ascend. */
struct walk {
    struct filling pages[2];
    int32_t n_columns;
};

static struct walk walk_start(void)
{
    return (struct walk){.pages = {{.column = -1}, {.column = -1}}};
}

/* The tag of what a pair seals: kind 0 or 1. */
static uint8_t tag_of(const struct kvc_choice *c, int32_t pair, int kind)
{
    if (kind == 0)
        return 0;
    return c->policy->set_precision ? kvc_precision_tag(&c->policy->precision)
                                    : c->cache->tags[pair];
}

static uint8_t layout_of(const struct kvc_choice *c, int32_t pair, int kind, bool groups)
{
    return (uint8_t)(tag_of(c, pair, kind) + (groups ? KVC_MERGED : KVC_MOVED));
}

/* The kind of the page of a row; its page is opened. */
static int walk_row(struct walk *walk, bool heavy, bool group)
{
    const int kind = heavy ? 0 : 1;
    struct filling *page = &walk->pages[kind];
    if (page->column < 0)
        *page = (struct filling){.column = walk->n_columns++};
    page->n_rows++;
    page->groups = page->groups || group;
    return kind;
}

/* ---- room ---- */

/* Pages of both kinds that the fresh rows of a pair take before anything merges. */
static void count_pages(const struct kvc_choice *c, int32_t pair, int32_t *n_pages)
{
    const uint64_t *heavy = kvc_choice_bits(c, c->heavy, pair);
    int32_t n_rows[2] = {0};
    for (int32_t slot = c->seq->first_unsealed; slot < c->end; slot++) {
        const struct kvc_column *column = kvc_slot(c->cache, c->seq, slot);
        for (uint64_t left = column->entries[pair].live; left; left &= left - 1) {
            const int32_t i = kvc_token_at(c, column->first + __builtin_ctzll(left));
            if (kvc_marked(kvc_choice_bits(c, c->keep, pair), i))
                n_rows[kvc_marked(heavy, i) ? 0 : 1]++;
        }
    }
    if (c->policy->recode && c->policy->merge_rounds > 0) /* visual rows of older pages may come */
        for (int32_t i = 0; i < c->n; i++)
            n_rows[1] += kvc_fact(c->cache, c->seq, i)->kind == KVC_TOKEN_VISUAL &&
                         kvc_marked(kvc_choice_bits(c, c->keep, pair), i);
    for (int kind = 0; kind < 2; kind++)
        n_pages[kind] = (n_rows[kind] + KVC_PAGE_ROWS - 1) / KVC_PAGE_ROWS;
}

bool kvc_build_fits(struct kvc_choice *c)
{
    kvc_cache *cache = c->cache;
    const bool groups = c->policy->merge_rounds > 0;
    int32_t need[KVC_N_CLASSES] = {0}, n_columns = 0;

    for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
        int32_t n_pages[2];
        count_pages(c, pair, n_pages);
        for (int kind = 0; kind < 2; kind++) {
            const int32_t plain = kvc_page_class(cache, layout_of(c, pair, kind, false));
            const int32_t merged =
                groups && kind == 1 ? kvc_page_class(cache, layout_of(c, pair, 1, true)) : plain;
            need[plain] += n_pages[kind];
            if (merged != plain) /* either may be needed */
                need[merged] += n_pages[kind];
        }
        n_columns = n_pages[0] + n_pages[1] > n_columns ? n_pages[0] + n_pages[1] : n_columns;
    }
    c->n_columns = 0;
    return kvc_pages_fit(cache, need) && n_columns <= cache->n_free_columns &&
           c->seq->n_slots + n_columns <= cache->max_slots;
}

/* ---- building ---- */

/* The groups of pages being filled by one pair. */
struct building {
    const struct kvc_choice *c;
    int32_t pair;
    const struct kvc_build_lane *lane;
    int32_t ordinals[2][KVC_PAGE_ROWS];
    struct kvc_groups groups[2];
    float scores[2][KVC_PAGE_ROWS];
};

/* Adds token m, where it is now, to the group of a row. */
static void add_member(struct building *b, int kind, int32_t row, int32_t m)
{
    const struct kvc_choice *c = b->c;
    const struct kvc_row_place at = kvc_find_row(c, b->pair, m);
    const struct kvc_groups *from = kvc_page_groups(c->cache, at.column->entries[b->pair].page);
    struct kvc_groups *to = &b->groups[kind];
    const int32_t ordinal = kvc_fact(c->cache, c->seq, m)->ordinal;
    const int32_t first = ordinal - (from ? from->before[at.row] : 0);
    const int32_t last = ordinal + (from ? from->after[at.row] : 0);
    const int32_t own = b->ordinals[kind][row];
    const int32_t size = to->size[row] + (from ? from->size[at.row] : 1);

    if (own - first > to->before[row])
        to->before[row] = (uint16_t)kvc_min32(own - first, UINT16_MAX);
    if (last - own > to->after[row])
        to->after[row] = (uint16_t)kvc_min32(last - own, UINT16_MAX);
    to->size[row] = (uint8_t)kvc_min32(size, UINT8_MAX);
    if (m == c->head[m])
        to->bias[row] = c->next[m] >= 0 ? c->bias[m] : from ? from->bias[at.row] : 0.0f;
    b->scores[kind][row] += kvc_row_score(c->cache, at.column, b->pair, (uint32_t)at.row);
}

/* Copies a row into the open page of its kind. */
static void put_row(struct building *b, int kind, int32_t row, int32_t i)
{
    const struct kvc_choice *c = b->c;
    const kvc_ctx *ctx = c->cache->ctx;
    const struct kvc_page_layout *open = &c->cache->layouts[KVC_LAYOUT_OPEN];
    const size_t s_k = kvc_attend_stride(open->d_k);
    float *k = b->lane->rows, *v = k + s_k;
    struct kvc_store_counts ignored = {0};

    b->ordinals[kind][row] = kvc_fact(c->cache, c->seq, i)->ordinal;
    b->groups[kind].bias[row] = b->scores[kind][row] = 0.0f;
    b->groups[kind].before[row] = b->groups[kind].after[row] = 0;
    b->groups[kind].size[row] = 0;
    for (int32_t m = i; m >= 0; m = c->next[m])
        add_member(b, kind, row, m);
    const struct kvc_row_place at = kvc_find_row(c, b->pair, i);
    if (c->next[i] < 0 && !at.sealed) {
        const uint8_t from = (uint8_t)at.row;
        ctx->k->move_rows(&ctx->queue, open,
                          kvc_page_data(c->cache, at.column->entries[b->pair].page), &from, 1,
                          b->lane->open[kind], (uint32_t)row);
        return;
    }
    kvc_load_row(c, b->pair, i, k, v, v + kvc_attend_stride(open->d_v));
    const struct kvc_rows k_rows = {k, KVC_DTYPE_F32, open->d_k, 1, open->d_k};
    const struct kvc_rows v_rows = {v, KVC_DTYPE_F32, open->d_v, 1, open->d_v};
    uint8_t *to = b->lane->open[kind];
    uint8_t *to_k = to + (size_t)row * open->k_stride;
    uint8_t *to_v = to + open->v_codes + (size_t)row * open->v_stride;
    ctx->k->store_rows(&ctx->queue, &k_rows, (uint16_t *)(void *)to_k, open->d8_k, open->d8_k,
                       &ignored);
    ctx->k->store_rows(&ctx->queue, &v_rows, (uint16_t *)(void *)to_v, open->d8_v, open->d8_v,
                       &ignored);
}

/* Codes a filled page into the page that its entry has. */
static void seal(const struct building *b, int kind, const struct filling *page)
{
    const struct kvc_choice *c = b->c;
    kvc_cache *cache = c->cache;
    struct kvc_column *column = kvc_column_at(cache, c->columns[page->column]);
    struct kvc_entry *e = &column->entries[b->pair];
    const struct kvc_page_layout *to = kvc_page_layout_of(cache, e->page);
    uint8_t *data = kvc_page_data(cache, e->page);
    struct kvc_seal_job job = {
        .from = &cache->layouts[KVC_LAYOUT_OPEN],
        .to = to,
        .src = b->lane->open[kind],
        .dst = data,
        .n_rows = (uint32_t)page->n_rows,
    };
    kvc_open_absmax(cache, job.src, job.n_rows, &job.absmax_k, &job.absmax_v);
    cache->ctx->k->seal_page(&cache->ctx->queue, &job);
    memcpy(data + to->ordinals, b->ordinals[kind], (size_t)page->n_rows * sizeof(int32_t));
    if (to->groups)
        memcpy(data + to->groups, &b->groups[kind], sizeof(b->groups[kind]));
    cache->pages[e->page].absmax_k = e->absmax_k = job.absmax_k;
    cache->pages[e->page].absmax_v = e->absmax_v = job.absmax_v;
    e->n_rows = (uint8_t)page->n_rows;
    e->live = kvc_bits(0, page->n_rows);
    float *scores = kvc_slot_scores(cache, column, b->pair);
    for (int32_t r = 0; r < page->n_rows && cache->params.score_mode != KVC_SCORE_NONE; r++)
        scores[cache->params.score_mode == KVC_SCORE_TOKEN ? r : 0] += b->scores[kind][r];
}

/* One pair of a group: its rows go to pages that are there already. */
static void build_pair(const struct kvc_choice *c, int32_t pair, size_t lane)
{
    const uint64_t *built = kvc_choice_bits(c, c->built, pair);
    const uint64_t *heavy = kvc_choice_bits(c, c->heavy, pair);
    struct building b = {.c = c, .pair = pair, .lane = &c->cache->build_lanes[lane]};
    struct walk walk = walk_start();

    for (int32_t i = 0; i < c->n; i++) {
        if (!kvc_marked(built, i))
            continue;
        const int kind = walk_row(&walk, kvc_marked(heavy, i), false);
        struct filling *page = &walk.pages[kind];
        put_row(&b, kind, page->n_rows - 1, i);
        if (page->n_rows == KVC_PAGE_ROWS) {
            seal(&b, kind, page);
            page->column = -1;
        }
    }
    for (int kind = 0; kind < 2; kind++)
        if (walk.pages[kind].column >= 0)
            seal(&b, kind, &walk.pages[kind]);
    if (c->estimate)
        kvc_probe_error(c, pair, KVC_PROBES_ALL, lane, c->errors + 2 * (size_t)pair);
}

/* Takes a page into a new column; columns appear as pages need them. */
static void take_page(struct kvc_choice *c, int32_t pair, int kind, const struct filling *page,
                      int32_t first)
{
    kvc_cache *cache = c->cache;
    while (c->n_columns <= page->column) {
        const int32_t id = cache->free_columns[--cache->n_free_columns];
        struct kvc_column *column = kvc_column_at(cache, id);
        memset(column, 0, cache->column_bytes);
        column->first = INT32_MAX;
        for (int32_t p = 0; p < cache->n_pairs; p++)
            column->entries[p].page = -1;
        c->columns[c->n_columns++] = id;
    }
    struct kvc_column *column = kvc_column_at(cache, c->columns[page->column]);
    column->entries[pair].page = kvc_page_alloc(cache, layout_of(c, pair, kind, page->groups));
    column->first = first < column->first ? first : column->first;
}

/* Takes the pages of a pair. */
static void take_pages(struct kvc_choice *c, int32_t pair)
{
    const uint64_t *built = kvc_choice_bits(c, c->built, pair);
    const uint64_t *heavy = kvc_choice_bits(c, c->heavy, pair);
    struct walk walk = walk_start();
    int32_t first[2] = {0};

    for (int32_t i = 0; i < c->n; i++) {
        if (!kvc_marked(built, i))
            continue;
        const int kind = walk_row(&walk, kvc_marked(heavy, i), c->next[i] >= 0);
        struct filling *page = &walk.pages[kind];
        const int32_t ordinal = kvc_fact(c->cache, c->seq, i)->ordinal;
        first[kind] = page->n_rows == 1 ? ordinal : first[kind];
        if (page->n_rows == KVC_PAGE_ROWS) {
            take_page(c, pair, kind, page, first[kind]);
            page->column = -1;
        }
    }
    for (int kind = 0; kind < 2; kind++)
        if (walk.pages[kind].column >= 0)
            take_page(c, pair, kind, &walk.pages[kind], first[kind]);
}

/* The pairs of a group, some at a time. */
struct job {
    const struct kvc_choice *c;
    int32_t first, last;
    size_t n_lanes;
};

static void build_lane(void *arg, size_t lane)
{
    const struct job *job = arg;
    for (int32_t pair = job->first + (int32_t)lane; pair < job->last; pair += (int32_t)job->n_lanes)
        build_pair(job->c, pair, lane);
}

void kvc_build(struct kvc_choice *c, int32_t group)
{
    struct job job = {.c = c};
    kvc_group_pairs(c, group, &job.first, &job.last);
    for (int32_t pair = job.first; pair < job.last; pair++)
        take_pages(c, pair);
    const size_t n = (size_t)(job.last - job.first);
    job.n_lanes = n < KVC_BUILD_LANES ? n : KVC_BUILD_LANES;
    kvc_ctx_parallel(c->cache->ctx, job.n_lanes, build_lane, &job);
}

static void free_column(kvc_cache *cache, int32_t id)
{
    struct kvc_column *column = kvc_column_at(cache, id);
    for (int32_t pair = 0; pair < cache->n_pairs; pair++)
        kvc_entry_clear(cache, &column->entries[pair]);
    cache->free_columns[cache->n_free_columns++] = id;
}

void kvc_build_undo(struct kvc_choice *c)
{
    for (int32_t i = 0; i < c->n_columns; i++)
        free_column(c->cache, c->columns[i]);
    c->n_columns = 0;
}

/* Counts the pages of a new column, and finds one more than its largest ordinal and than the last
 * member of its groups. */
static void count_column(kvc_cache *cache, struct kvc_column *column, int32_t *merged_end)
{
    column->end = 0;
    for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
        const struct kvc_entry *e = &column->entries[pair];
        if (e->page < 0)
            continue;
        cache->n_sealed_total++;
        const int32_t *ordinals = kvc_page_ordinals(cache, e->page);
        const struct kvc_groups *groups = kvc_page_groups(cache, e->page);
        const int32_t end = ordinals[e->n_rows - 1] + 1;
        column->end = end > column->end ? end : column->end;
        for (int32_t r = 0; r < e->n_rows && groups; r++)
            if (groups->size[r] > 1 && ordinals[r] + 1 + groups->after[r] > *merged_end)
                *merged_end = ordinals[r] + 1 + groups->after[r];
    }
    column->n = column->end - column->first;
}

void kvc_build_commit(struct kvc_choice *c)
{
    kvc_cache *cache = c->cache;
    struct kvc_sequence *seq = c->seq;
    const int32_t from = seq->first_unsealed, n_behind = seq->n_slots - c->end;

    for (int32_t slot = from; slot < c->end; slot++)
        free_column(cache, seq->slots[slot]);
    memmove(seq->slots + from + c->n_columns, seq->slots + c->end,
            (size_t)n_behind * sizeof(*seq->slots));
    memcpy(seq->slots + from, c->columns, (size_t)c->n_columns * sizeof(*seq->slots));
    for (int32_t i = 0; i < c->n_columns; i++)
        count_column(cache, kvc_column_at(cache, c->columns[i]), &seq->merged_end);
    seq->n_slots = from + c->n_columns + n_behind;
    seq->first_unsealed = from + c->n_columns;
    c->end = seq->first_unsealed;
}
