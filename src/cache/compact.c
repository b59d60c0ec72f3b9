/* compact.c - moving the rows of pages with holes together, bit for bit. */
#include <string.h>

#include "state.h"

/* Slots whose pages of one pair and tag fit fewer bytes. */
struct span {
    int32_t first, last; /* last not included */
    int32_t n_pages, n_rows;
    size_t n_bytes;
    int32_t last_ordinal;
    bool groups; /* some rows stand for several tokens */
};

static int32_t pages_for(int32_t n_rows)
{
    return (n_rows + KVC_PAGE_ROWS - 1) / KVC_PAGE_ROWS;
}

static uint8_t target_layout(int32_t tag, bool groups)
{
    return (uint8_t)(tag + (groups ? KVC_MERGED : KVC_MOVED));
}

/* The shortest span from a slot on that moving makes smaller, filled up; or one slot, to be left
 * alone. Pages of moved rows are larger: they carry ordinals. Pages of other tags stay. */
static struct span find_span(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t pair,
                             int32_t tag, int32_t first)
{
    const struct span alone = {.first = first, .last = first + 1};
    struct span span = {.first = first, .last = first, .last_ordinal = -1};
    for (; span.last < seq->first_unsealed; span.last++) {
        const struct kvc_column *column = kvc_slot(cache, seq, span.last);
        const struct kvc_entry *e = &column->entries[pair];
        if (e->page < 0 || kvc_page_tag(cache, e->page) != tag)
            continue;
        if (kvc_row_ordinal(cache, column, pair, 0) <= span.last_ordinal) /* rows must ascend */
            break;
        const int32_t n_rows = __builtin_popcountll(e->live), pages = pages_for(span.n_rows);
        const size_t moved = cache->layouts[target_layout(tag, span.groups)].n_bytes;
        if (cache->pages[e->page].owners > 1) /* moving would free nothing */
            break;
        if (span.n_pages == 0 && n_rows == KVC_PAGE_ROWS)
            return alone;
        if ((size_t)pages * moved < span.n_bytes && n_rows > pages * KVC_PAGE_ROWS - span.n_rows)
            break;
        span.n_pages++;
        span.last_ordinal = kvc_row_ordinal(cache, column, pair, e->n_rows - 1);
        span.n_rows += n_rows;
        span.n_bytes += kvc_page_layout_of(cache, e->page)->n_bytes;
        span.groups = span.groups || kvc_page_groups(cache, e->page);
    }
    const size_t moved = cache->layouts[target_layout(tag, span.groups)].n_bytes;
    return (size_t)pages_for(span.n_rows) * moved < span.n_bytes ? span : alone;
}

/* A page that is being filled. */
struct target {
    int32_t page, n_rows;
    int32_t *ordinals;
    struct kvc_groups *groups;
    float scores[KVC_PAGE_ROWS]; /* one, or one a row */
};

static bool open_target(kvc_cache *cache, int32_t tag, bool groups, struct target *to)
{
    *to = (struct target){.page = kvc_page_alloc(cache, target_layout(tag, groups))};
    if (to->page < 0)
        return false;
    uint8_t *data = kvc_page_data(cache, to->page);
    const struct kvc_page_layout *layout = kvc_page_layout_of(cache, to->page);
    cache->ctx->k->clear_page(&cache->ctx->queue, layout, data);
    to->ordinals = (int32_t *)(void *)(data + layout->ordinals);
    memset(to->ordinals, 0, KVC_PAGE_ROWS * sizeof(int32_t));
    to->groups = kvc_page_groups(cache, to->page);
    if (to->groups)
        memset(to->groups, 0, sizeof(*to->groups));
    return true;
}

/* The group of row r of a page becomes that of the next row of the target. */
static void move_group(const struct kvc_groups *from, int32_t r, struct kvc_groups *to, int32_t row)
{
    to->bias[row] = from ? from->bias[r] : 0.0f;
    to->before[row] = from ? from->before[r] : 0;
    to->after[row] = from ? from->after[r] : 0;
    to->size[row] = from ? from->size[r] : 1;
}

/* Moves live rows of an entry behind those of the target, as many as fit. */
static void move_rows(const kvc_cache *cache, struct kvc_column *column, int32_t pair,
                      struct target *to)
{
    struct kvc_entry *e = &column->entries[pair];
    const int32_t *ordinals = kvc_page_ordinals(cache, e->page);
    const struct kvc_groups *groups = kvc_page_groups(cache, e->page);
    const float n_live = (float)__builtin_popcountll(e->live);
    float *scores = kvc_slot_scores(cache, column, pair);
    uint8_t rows[KVC_PAGE_ROWS];
    int32_t n = 0;

    for (uint8_t r = 0; r < e->n_rows && to->n_rows + n < KVC_PAGE_ROWS; r++) {
        if (!(e->live >> r & 1))
            continue;
        e->live &= ~(UINT64_C(1) << r);
        to->ordinals[to->n_rows + n] = ordinals ? ordinals[r] : column->first + r;
        if (to->groups)
            move_group(groups, r, to->groups, to->n_rows + n);
        if (cache->params.score_mode == KVC_SCORE_TOKEN)
            to->scores[to->n_rows + n] = scores[r];
        rows[n++] = r;
    }
    if (cache->params.score_mode == KVC_SCORE_PAGE) {
        const float share = scores[0] * ((float)n / n_live);
        to->scores[0] += share;
        scores[0] -= share;
    }
    cache->ctx->k->move_rows(&cache->ctx->queue, kvc_page_layout_of(cache, to->page),
                             kvc_page_data(cache, e->page), rows, (uint32_t)n,
                             kvc_page_data(cache, to->page), (uint32_t)to->n_rows);
    to->n_rows += n;
}

/* Puts a filled page into the first empty entry from a slot on whose column begins early enough;
 * returns the slot after it. */
static int32_t place_target(kvc_cache *cache, struct kvc_sequence *seq, int32_t slot, int32_t pair,
                            const struct target *to)
{
    while (kvc_slot(cache, seq, slot)->entries[pair].page >= 0 ||
           kvc_slot(cache, seq, slot)->first > to->ordinals[0])
        slot++;
    struct kvc_column *column = kvc_slot(cache, seq, slot);
    const int32_t end = to->ordinals[to->n_rows - 1] + 1;
    column->entries[pair] = (struct kvc_entry){
        .live = kvc_bits(0, to->n_rows), .page = to->page, .n_rows = (uint8_t)to->n_rows};
    column->end = end > column->end ? end : column->end;
    memcpy(kvc_slot_scores(cache, column, pair), to->scores, cache->score_bytes);
    return slot + 1;
}

/*
 * One pair whose pages of one tag are being moved together, span by span. Rows only move to earlier
 * slots: when page i of a span is full, its first i + 1 pages are gone.
 */
struct kvc_compaction {
    struct span span;
    int32_t source, place, n_emptied;
    bool busy; /* inside a span */
};

/* Fills one page of a span; false without room, with every row in one place. */
static bool fill_page(kvc_cache *cache, struct kvc_sequence *seq, int32_t pair, int32_t tag,
                      struct kvc_compaction *at)
{
    struct target to;
    if (!open_target(cache, tag, at->span.groups, &to))
        return false;
    while (at->n_emptied < at->span.n_pages && to.n_rows < KVC_PAGE_ROWS) {
        struct kvc_column *column = kvc_slot(cache, seq, at->source);
        struct kvc_entry *e = &column->entries[pair];
        if (e->page < 0 || kvc_page_tag(cache, e->page) != tag) {
            at->source++;
            continue;
        }
        move_rows(cache, column, pair, &to);
        if (e->live)
            continue;
        at->n_emptied++;
        kvc_entry_clear(cache, e);
        at->source++;
    }
    at->place = place_target(cache, seq, at->place, pair, &to);
    return true;
}

/* Goes on with a pair up to one filled page; false: there is no more to do. */
static bool advance(kvc_cache *cache, struct kvc_sequence *seq, int32_t pair, int32_t tag,
                    struct kvc_compaction *at)
{
    while (!at->busy && at->span.last < seq->first_unsealed) {
        at->span = find_span(cache, seq, pair, tag, at->span.last);
        at->busy = at->span.n_pages > 0;
        at->source = at->place = at->span.first;
        at->n_emptied = 0;
    }
    if (!at->busy)
        return false;
    const bool filled = fill_page(cache, seq, pair, tag, at);
    at->busy = filled && at->n_emptied < at->span.n_pages;
    return true;
}

/* Bit t: some sealed page has tag t. */
static uint64_t find_tags(const kvc_cache *cache, const struct kvc_sequence *seq)
{
    uint64_t tags = 0;
    for (int32_t slot = 0; slot < seq->first_unsealed; slot++)
        for (int32_t pair = 0; pair < cache->n_pairs; pair++) {
            const int32_t page = kvc_slot(cache, seq, slot)->entries[pair].page;
            if (page >= 0)
                tags |= UINT64_C(1) << kvc_page_tag(cache, page);
        }
    return tags;
}

static int32_t n_pages(const kvc_cache *cache)
{
    int32_t n = 0;
    for (int32_t i = 1; i < cache->n_classes; i++)
        n += cache->classes[i].n_used;
    return n;
}

/* The pairs go on together, a page at a time: the pages of a column lie in the same slabs, which
 * become free only when all of them have moved. */
int64_t kvc_compact(kvc_cache *cache, struct kvc_sequence *seq)
{
    const int32_t before = n_pages(cache);
    for (uint64_t tags = find_tags(cache, seq); tags; tags &= tags - 1) {
        const int32_t tag = __builtin_ctzll(tags);
        bool more = kvc_rows_move(cache, tag);
        memset(cache->compactions, 0, (size_t)cache->n_pairs * sizeof(*cache->compactions));
        while (more) {
            more = false;
            for (int32_t pair = 0; pair < cache->n_pairs; pair++)
                more = advance(cache, seq, pair, tag, &cache->compactions[pair]) || more;
        }
    }
    kvc_seq_drop_empty_slots(cache, seq);
    return before - n_pages(cache);
}

size_t kvc_compaction_bytes(void)
{
    return sizeof(struct kvc_compaction);
}
