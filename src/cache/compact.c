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

static int32_t ordinal_of(const kvc_cache *cache, const struct kvc_column *column, int32_t pair,
                          int32_t row)
{
    const int32_t *ordinals = kvc_page_ordinals(cache, column->entries[pair].page);
    return ordinals ? ordinals[row] : column->first + row;
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
        if (ordinal_of(cache, column, pair, 0) <= span.last_ordinal) /* rows must ascend */
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
        span.last_ordinal = ordinal_of(cache, column, pair, e->n_rows - 1);
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
 * Moves the rows of a span into new pages. Rows only move to earlier slots: when page i of the span
 * is full, its first i + 1 pages are gone. Without room it stops between two pages, with every row
 * in one place. Returns the pages that became free.
 */
static int64_t compact_span(kvc_cache *cache, struct kvc_sequence *seq, int32_t pair, int32_t tag,
                            const struct span *span)
{
    int32_t source = span->first, place = span->first, n_emptied = 0, n_made = 0;
    struct target to;

    while (n_emptied < span->n_pages && open_target(cache, tag, span->groups, &to)) {
        while (n_emptied < span->n_pages && to.n_rows < KVC_PAGE_ROWS) {
            struct kvc_column *column = kvc_slot(cache, seq, source);
            struct kvc_entry *e = &column->entries[pair];
            if (e->page < 0 || kvc_page_tag(cache, e->page) != tag) {
                source++;
                continue;
            }
            move_rows(cache, column, pair, &to);
            if (e->live)
                continue;
            n_emptied++;
            kvc_entry_clear(cache, e);
            source++;
        }
        place = place_target(cache, seq, place, pair, &to);
        n_made++;
    }
    return n_emptied - n_made;
}

/* Bit t: some sealed page of the pair has tag t. */
static uint64_t tags_of(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t pair)
{
    uint64_t tags = 0;
    for (int32_t slot = 0; slot < seq->first_unsealed; slot++) {
        const int32_t page = kvc_slot(cache, seq, slot)->entries[pair].page;
        if (page >= 0)
            tags |= UINT64_C(1) << kvc_page_tag(cache, page);
    }
    return tags;
}

int64_t kvc_compact(kvc_cache *cache, struct kvc_sequence *seq)
{
    int64_t n_freed = 0;
    for (int32_t pair = 0; pair < cache->n_pairs; pair++)
        for (uint64_t tags = tags_of(cache, seq, pair); tags; tags &= tags - 1) {
            const int32_t tag = __builtin_ctzll(tags);
            for (int32_t slot = 0; kvc_rows_move(cache, tag) && slot < seq->first_unsealed;) {
                const struct span span = find_span(cache, seq, pair, tag, slot);
                if (span.n_pages > 0)
                    n_freed += compact_span(cache, seq, pair, tag, &span);
                slot = span.last;
            }
        }
    kvc_seq_drop_empty_slots(cache, seq);
    return n_freed;
}
