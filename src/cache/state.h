/*
 * state.h - the parts of a cache, private to src/cache.
 *
 * A sequence is a list of slots: ranges of at most 64 tokens that never cross a page border (at
 * sink_tokens + 64 k). A slot lives in a column: its range, and one entry for each layer and head.
 * An entry points to a page; pages are shared by sequences, entries never. Slots before
 * first_unsealed are sealed, the others hold F16 pages. A sealed page whose rows are not
 * consecutive tokens (compaction) carries their ordinals itself.
 */
#ifndef KVC_STATE_H
#define KVC_STATE_H

#include "arena.h"
#include "bits.h"
#include "ctx.h"
#include "kvc/policy.h"

enum {
    KVC_N_TAGS = 40,     /* precisions: 8 of K times 5 of V; the layouts of whole pages */
    KVC_MOVED = 40,      /* added to a tag: a page of moved rows, with their ordinals */
    KVC_MERGED = 2 * 40, /* the same with groups of merged tokens */
    KVC_LAYOUT_OPEN = 120,
    KVC_LAYOUT_STRIP = 121,
    KVC_N_LAYOUTS = 122,
    KVC_N_CLASSES = 121, /* sizes of pages; class 0 is the open page's alone */
    KVC_SLAB_OPEN_PAGES = 16,
    KVC_LANES = 64 /* tasks at a time: each has its own scratch */
};

/* State of one page. Ids are slab * max_per_slab + index. */
struct kvc_page {
    int32_t owners;
    int32_t twin;             /* sealed copy that other owners of this F16 page may take, or -1 */
    int32_t twin_of;          /* the F16 page that names this one as its twin, or -1 */
    int32_t next_free;        /* in its slab */
    float absmax_k, absmax_v; /* sealed: what mode HEAD took for its scales */
    uint8_t layout;
    uint8_t raw_rows; /* rows that are yet to be transformed, while all pages are */
};

struct kvc_slab {
    int32_t page_class; /* -1: free */
    int32_t n_used;
    int32_t free_page; /* head of the list of free pages */
    int32_t next;      /* in the list of its class with free pages, or of free slabs */
    int32_t prev;
};

struct kvc_page_class {
    uint32_t n_bytes, per_slab;
    int32_t slabs;  /* head of the list of slabs with free pages */
    int32_t n_free; /* free pages in them */
    int32_t n_used;
};

struct kvc_entry {
    uint64_t live;            /* bit r: row r is there */
    int32_t page;             /* -1: none */
    int32_t sealed;           /* the page that will take its place, while slots are sealed */
    float absmax_k, absmax_v; /* mode HEAD: of the page when it was sealed */
    uint8_t n_rows;
};

/* What a page knows of rows that stand for several tokens; rows of one token have bias 0, size 1.
 * Part of the page: immutable, and shared by forks. */
struct kvc_groups {
    float bias[KVC_PAGE_ROWS];
    uint16_t before[KVC_PAGE_ROWS]; /* ordinal of the row less that of its first member */
    uint16_t after[KVC_PAGE_ROWS];  /* ordinal of its last member less that of the row */
    uint8_t size[KVC_PAGE_ROWS];    /* tokens; saturates */
};

/* The facts of a token that a sequence still knows. */
struct kvc_fact {
    int32_t t, y, x, image, row, col;
    int32_t ordinal;
    int32_t next;          /* position after it and the forgotten tokens behind it */
    uint16_t image_tokens; /* tokens of its image when that was first judged, or 0 */
    uint8_t kind, flags;
};

struct kvc_column {
    int32_t first; /* ordinal, not above any in its pages */
    int32_t n;     /* tokens announced */
    int32_t end;   /* no entry holds this ordinal or a later one */
    struct kvc_entry entries[];
};

struct kvc_sequence {
    uint32_t generation;
    bool alive;
    int32_t n_tokens;
    int32_t n_slots, first_unsealed;
    int32_t n_facts;    /* tokens in its table, ascending */
    int32_t first_next; /* position after the tokens that were forgotten before the first fact */
    int32_t merged_end; /* no group of merged tokens has a member from this ordinal on */
    int64_t next_position;
    int64_t hold_from;  /* -1: no hold */
    int32_t score_base; /* ordinal whose masses count by 1 in the scores, which decay */
    kvc_gate gate;
    uint64_t strip_live; /* sinks not removed */
    uint64_t in_call;    /* number of the last call of attention that named it */
    int32_t *slots;      /* [max_slots] columns */
    int32_t *facts;      /* [max_fact_pages] */
    int32_t *appended;   /* [n_layers] tokens whose K and V are there */
};

/* How the kept query rows of a layer were last used. */
struct kvc_probe_use {
    float scale, softcap;
    int64_t window;
};

/* Between the values that come and those that are stored; see transform.c. */
struct kvc_transform {
    bool ready; /* in use; false while mean and scale wait to be measured */
    bool changes_k, changes_v;
    bool comes_rotated;                    /* K and queries come as H K and H Q; vectors are of K */
    uint32_t block_k;                      /* channels that H of K mixes; 1: no H */
    float *mean, *scale, *inverse, *shift; /* [n_pairs][stride of K], or NULL: no vectors. inverse
                                              is 1 / scale, shift is H(mean / scale) */
    double *q_square;                      /* [n_pairs][head_dim_k] sums over queries, or NULL */
    int64_t *n_queries;                    /* [n_layers] tokens that they are of */
};

/* Scratch for the pages of one layer and head that are being built. */
struct kvc_build_lane {
    uint8_t *open[2]; /* open pages: rows that become F16, rows that are coded */
    float *rows;      /* K and V of a row, twice */
    float *outputs;   /* three tiles of outputs */
};

/* One sequence of a call of attention; see attend.c. */
struct kvc_attend_info {
    struct kvc_sequence *seq;
    const kvc_attend_item *item;
    int32_t n_q, n_pages, n_blocks; /* the strip counts as a page */
    int32_t n_tiles, tile_rows;     /* of the query rows of one KV head */
    bool split;                     /* one task a block, else one a tile or KV head */
    size_t first_unit, first_part;
};

struct kvc_cache {
    kvc_ctx *ctx;
    kvc_cache_params params;
    int32_t n_pairs;  /* layers x KV heads */
    int32_t group;    /* query heads a KV head */
    int64_t n_tokens; /* over all sequences */
    int64_t n_facts;  /* the same of those in the token tables */
    struct kvc_page_layout layouts[KVC_N_LAYOUTS];
    uint8_t *tags;     /* [n_pairs] precision of each layer and head */
    uint8_t *class_of; /* [KVC_N_LAYOUTS] */
    struct kvc_transform transform;

    /* pages */
    char *pool;
    size_t slab_bytes, n_slabs;
    uint32_t max_per_slab;
    struct kvc_slab *slabs;
    struct kvc_page *pages;
    struct kvc_page_class classes[KVC_N_CLASSES];
    int32_t n_classes, free_slabs, n_free_slabs;

    /* tables */
    char *columns;
    size_t column_bytes, score_bytes; /* score_bytes of an entry: 0, 4 or 256 */
    int32_t n_columns, n_free_columns, *free_columns;
    int32_t max_slots, max_fact_pages; /* of one sequence */
    struct kvc_fact *facts;
    int32_t n_fact_pages, n_free_facts, *free_facts;
    struct kvc_sequence *sequences;
    char *strips;
    uint16_t *probes;                 /* [sequence][layer][probe_rows][n_heads][head_dim_k] */
    int64_t *probe_ordinals;          /* [sequence][layer][probe_rows], -1: none */
    struct kvc_probe_use *probe_uses; /* [layer] */

    /* policies */
    kvc_policy on_full; /* if has_on_full */
    bool has_on_full;
    int32_t n_kept_slabs;               /* free ones that sealing leaves for compaction */
    struct kvc_compaction *compactions; /* [n_pairs] */
    struct kvc_choice *choice;          /* its arrays are the scratch */
    struct kvc_build_lane *build_lanes;
    struct kvc_fuse_room *fuse_room;

    /* scratch of attention */
    float *lanes;
    size_t lane_floats;
    float *parts;                  /* partial results, by block */
    struct kvc_attend_info *infos; /* [max_sequences] */
    size_t n_parts;

    size_t probe_bytes, scratch_bytes, strip_bytes; /* strip_bytes of one sequence */
    uint64_t n_calls, n_sealed_total, n_nonfinite, n_saturated;
};

/* ---- cache.c ---- */

kvc_status kvc_precision_check(const kvc_precision *precision);
uint8_t kvc_precision_tag(const kvc_precision *precision);

/* Bytes that grow with tokens, and those that could. */
size_t kvc_used_bytes(const kvc_cache *cache);
size_t kvc_usable_bytes(const kvc_cache *cache);

/* ---- pages.c ---- */

/* All slabs free but those that class 0 keeps for reserved_pages. */
void kvc_pages_init(kvc_cache *cache, size_t reserved_pages);

/* The class of a layout's pages, which share a size. */
int32_t kvc_page_class(kvc_cache *cache, int32_t layout);

/* Whether need[class] more pages of every sealed class fit, all together. */
bool kvc_pages_fit(const kvc_cache *cache, const int32_t *need);

/* A page with one owner, or -1. */
int32_t kvc_page_alloc(kvc_cache *cache, uint8_t layout);

void kvc_page_share(kvc_cache *cache, int32_t page);
void kvc_page_release(kvc_cache *cache, int32_t page);

/* Parts an F16 page and its sealed copy: one of them is freed, or gets other rows. */
void kvc_page_forget_twin(kvc_cache *cache, int32_t page);

static inline uint8_t *kvc_page_data(const kvc_cache *cache, int32_t page)
{
    const size_t slab = (size_t)page / cache->max_per_slab, i = (size_t)page % cache->max_per_slab;
    const size_t size = cache->classes[cache->slabs[slab].page_class].n_bytes;
    return (uint8_t *)cache->pool + slab * cache->slab_bytes + i * size;
}

static inline const struct kvc_page_layout *kvc_page_layout_of(const kvc_cache *cache, int32_t page)
{
    return &cache->layouts[cache->pages[page].layout];
}

/* ---- sequence.c ---- */

/* The sequence behind a handle, or NULL. */
struct kvc_sequence *kvc_seq_find(const kvc_cache *cache, kvc_seq seq);

/* Whether every announced token has its K and V in every layer. */
bool kvc_seq_complete(const kvc_cache *cache, const struct kvc_sequence *seq);

/* The last slot, if it is not among the first n_sealed and tokens can still be added to it; or
 * NULL. */
struct kvc_column *kvc_seq_open_slot(const kvc_cache *cache, const struct kvc_sequence *seq,
                                     int32_t n_sealed);

/* A new F16 page with the rows of another. */
int32_t kvc_page_copy(kvc_cache *cache, int32_t page, uint32_t n_rows);

/* Releases the page of an entry and empties it. */
void kvc_entry_clear(kvc_cache *cache, struct kvc_entry *e);

/* Takes the slots out that have no rows, but one that tokens can still be added to. */
void kvc_seq_drop_empty_slots(kvc_cache *cache, struct kvc_sequence *seq);

static inline struct kvc_column *kvc_column_at(const kvc_cache *cache, int32_t column)
{
    return (struct kvc_column *)(void *)(cache->columns + (size_t)column * cache->column_bytes);
}

static inline struct kvc_column *kvc_slot(const kvc_cache *cache, const struct kvc_sequence *seq,
                                          int32_t slot)
{
    return kvc_column_at(cache, seq->slots[slot]);
}

/* Scores of an entry: one float, or one a row. */
static inline float *kvc_slot_scores(const kvc_cache *cache, struct kvc_column *column,
                                     int32_t pair)
{
    char *scores = (char *)&column->entries[cache->n_pairs];
    return (float *)(void *)(scores + (size_t)pair * cache->score_bytes);
}

static inline int32_t kvc_pair(const kvc_cache *cache, int32_t layer, int32_t kv_head)
{
    return layer * cache->params.n_kv_heads + kv_head;
}

static inline int32_t kvc_seq_index(const kvc_cache *cache, const struct kvc_sequence *seq)
{
    return (int32_t)(seq - cache->sequences);
}

/* First ordinal after the page border range that holds an ordinal (not a sink). */
static inline int32_t kvc_next_border(const kvc_cache *cache, int32_t ordinal)
{
    const int32_t sinks = cache->params.sink_tokens;
    return sinks + ((ordinal - sinks) / KVC_PAGE_TOKENS + 1) * KVC_PAGE_TOKENS;
}

static inline bool kvc_slot_full(const kvc_cache *cache, const struct kvc_column *column)
{
    return column->first + column->n == kvc_next_border(cache, column->first);
}

static inline bool kvc_is_sink(const struct kvc_sequence *seq, int32_t ordinal)
{
    return ordinal < 64 && seq->strip_live >> ordinal & 1;
}

/* The strip of sinks of one sequence, layer and head: a page of layout KVC_LAYOUT_STRIP. */
static inline uint8_t *kvc_strip(const kvc_cache *cache, const struct kvc_sequence *seq,
                                 int32_t pair)
{
    return (uint8_t *)cache->strips + (size_t)kvc_seq_index(cache, seq) * cache->strip_bytes +
           (size_t)pair * cache->layouts[KVC_LAYOUT_STRIP].n_bytes;
}

static inline int32_t kvc_min32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* The groups of a page, or NULL where each row is one token. */
static inline struct kvc_groups *kvc_page_groups(const kvc_cache *cache, int32_t page)
{
    const struct kvc_page_layout *layout = kvc_page_layout_of(cache, page);
    if (!layout->groups)
        return NULL;
    return (struct kvc_groups *)(void *)(kvc_page_data(cache, page) + layout->groups);
}

/* The ordinals of the rows of a page, or NULL where they are consecutive. */
static inline const int32_t *kvc_page_ordinals(const kvc_cache *cache, int32_t page)
{
    const struct kvc_page_layout *layout = kvc_page_layout_of(cache, page);
    if (!layout->ordinals)
        return NULL;
    return (const int32_t *)(const void *)(kvc_page_data(cache, page) + layout->ordinals);
}

/* Bits first ... last - 1 of 64. */
static inline uint64_t kvc_bits(int64_t first, int64_t last)
{
    first = first < 0 ? 0 : first > 64 ? 64 : first;
    last = last < 0 ? 0 : last > 64 ? 64 : last;
    if (first >= last)
        return 0;
    return (last == 64 ? 0 : UINT64_C(1) << last) - (UINT64_C(1) << first);
}

/* Bits of the first n_rows rows of a page whose ordinals lie in first ... last - 1; they begin at
 * `start` where ordinals is NULL. */
uint64_t kvc_rows_range(const int32_t *ordinals, int32_t start, int32_t n_rows, int64_t first,
                        int64_t last);

/* Bits of the rows of an entry whose ordinals lie in first ... last - 1, live or not. */
uint64_t kvc_entry_range(const kvc_cache *cache, const struct kvc_column *column, int32_t pair,
                         int64_t first, int64_t last);

/* ---- facts.c ---- */

/* Pages of the token table that n tokens take. */
static inline int32_t kvc_fact_pages(int32_t n_facts)
{
    return (n_facts + KVC_PAGE_TOKENS - 1) / KVC_PAGE_TOKENS;
}

static inline struct kvc_fact *kvc_fact(const kvc_cache *cache, const struct kvc_sequence *seq,
                                        int32_t i)
{
    return cache->facts + (size_t)seq->facts[i / KVC_PAGE_TOKENS] * KVC_PAGE_TOKENS +
           i % KVC_PAGE_TOKENS;
}

/* Whether n more tokens fit the tables. */
bool kvc_facts_fit(const kvc_cache *cache, const struct kvc_sequence *seq, int64_t n);

/* Adds the facts of the next token and moves the next position on. */
void kvc_facts_put(kvc_cache *cache, struct kvc_sequence *seq, int32_t ordinal,
                   const kvc_token *token);

/* The place of the first fact whose ordinal is not below this one. */
int32_t kvc_facts_find(const kvc_cache *cache, const struct kvc_sequence *seq, int64_t ordinal);

/* Forgets the tokens from an ordinal on, and sets the next position. */
void kvc_facts_cut(kvc_cache *cache, struct kvc_sequence *seq, int64_t n_tokens);

/* Copies the table; the caller knows that it fits. */
void kvc_facts_copy(kvc_cache *cache, const struct kvc_sequence *src, struct kvc_sequence *dst);

/* Forgets the tokens whose bit is not set; the position after them stays known. */
void kvc_facts_keep(kvc_cache *cache, struct kvc_sequence *seq, const uint64_t *keep);

/* ---- seal.c ---- */

/* Slots that settling would seal now: from first_unsealed up to the one returned. short_pages:
 * those that are not full, too; then mean and scale are measured early. */
int32_t kvc_seal_end(const kvc_cache *cache, const struct kvc_sequence *seq, bool short_pages);

/* Seals slots first_unsealed ... end - 1, which kvc_seal_end() told, and measures mean and scale
 * before if that is due; or KVC_E_FULL with nothing changed. */
kvc_status kvc_seal_slots(kvc_cache *cache, struct kvc_sequence *seq, int32_t end,
                          bool short_pages);

/* Absmax of the first n_rows rows of an open page. */
void kvc_open_absmax(const kvc_cache *cache, const uint8_t *page, uint32_t n_rows, float *k,
                     float *v);

/* ---- transform.c ---- */

kvc_status kvc_transform_check(const kvc_cache_params *params);

/* Tokens after the sinks that a sequence holds raw until mean and scale are measured. */
int32_t kvc_transform_waiting_tokens(const kvc_cache_params *params);

void kvc_transform_carve(kvc_cache *cache, struct kvc_arena *arena);

/* Copies the vectors of cache->params and forgets where they came from. */
void kvc_transform_start(kvc_cache *cache);

/* Turns rows row ... row + n_rows - 1 of a row-major F16 page, which are as they came, into what is
 * stored; floats is room for a tile of rows. Returns the values that saturate. */
uint64_t kvc_transform_page(const kvc_cache *cache, int32_t pair,
                            const struct kvc_page_layout *layout, uint8_t *page, int32_t row,
                            int32_t n_rows, float *floats);

/* Turns query rows, kvc_attend_stride() apart, into what stored keys are multiplied with. Returns
 * what is added to the logits of each row: shift, or NULL for nothing. */
const float *kvc_transform_queries(const kvc_cache *cache, int32_t pair, float *q, size_t n_rows,
                                   float scale, float *shift);

/* Turns outputs of attention, kvc_attend_stride() apart, back. */
void kvc_restore_outputs(const kvc_cache *cache, float *o, size_t n_rows);

/* Turns rows that were read back into what came; k or v may be NULL. */
void kvc_restore_rows(const kvc_cache *cache, int32_t pair, float *k, size_t k_stride, float *v,
                      size_t v_stride, size_t n_rows);

/* Adds the queries of the last tokens to the sums, as long as mean and scale are not measured. */
void kvc_transform_watch(kvc_cache *cache, int32_t layer, const struct kvc_sequence *seq,
                         const kvc_view *q);

/* Whether mean and scale wait to be measured and this sequence has the pages, or with early any. */
bool kvc_transform_due(const kvc_cache *cache, const struct kvc_sequence *seq, bool early);

/* Measures them on what the sequence has of the pages, and transforms all rows of all sequences. */
void kvc_transform_freeze(kvc_cache *cache, const struct kvc_sequence *seq);

/* ---- compact.c ---- */

/* Moves rows together in every layer and head; returns the pages that became free. */
int64_t kvc_compact(kvc_cache *cache, struct kvc_sequence *seq);

/* Bytes of the state of one pair that is being compacted. */
size_t kvc_compaction_bytes(void);

/* The ordinal of a row of an entry that has a page. */
static inline int32_t kvc_row_ordinal(const kvc_cache *cache, const struct kvc_column *column,
                                      int32_t pair, int32_t row)
{
    const int32_t *ordinals = kvc_page_ordinals(cache, column->entries[pair].page);
    return ordinals ? ordinals[row] : column->first + row;
}

/* Whether rows of pages of a tag can move alone: their parameters are a row's own. */
static inline bool kvc_rows_move(const kvc_cache *cache, int32_t tag)
{
    const struct kvc_page_layout *layout = &cache->layouts[tag];
    return (layout->k_format == KVC_F16 || layout->k_scale == KVC_SCALE_TOKEN) &&
           (layout->v_format == KVC_F16 || layout->v_scale == KVC_SCALE_TOKEN);
}

/* The precision of a sealed page. */
static inline int32_t kvc_page_tag(const kvc_cache *cache, int32_t page)
{
    return cache->pages[page].layout % KVC_N_TAGS;
}

/* ---- read.c ---- */

/* The score of a row as it is stored; a page's sum is spread over its live rows. */
float kvc_row_score(const kvc_cache *cache, struct kvc_column *column, int32_t pair, uint32_t row);

/* What stored scores are multiplied by: they decay from score_base on. */
float kvc_score_factor(const kvc_cache *cache, const struct kvc_sequence *seq);

/* ---- attend.c ---- */

/* Moves the base of decaying scores to an ordinal. */
void kvc_scores_rebase(const kvc_cache *cache, struct kvc_sequence *seq, int32_t base);

/* Floats of one lane and of the partial results of one block. */
size_t kvc_attend_lane_floats(const kvc_cache_params *params);
size_t kvc_attend_part_floats(const kvc_cache_params *params);

#endif
