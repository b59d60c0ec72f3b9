/* choose.h - one application of a policy, private to src/cache. */
#ifndef KVC_CHOOSE_H
#define KVC_CHOOSE_H

#include "arena.h"
#include "bits.h"
#include "kvc/policy.h"
#include "state.h"

enum { KVC_BUILD_LANES = 16 /* layers and heads that are built at a time */ };

/* Kept query rows: all, or one half. */
enum kvc_probe_part { KVC_PROBES_ALL, KVC_PROBES_OLDER, KVC_PROBES_NEWER };

/*
 * What a policy decides. Index i is a place in the token table of the sequence; bitmaps have
 * `words` words a layer and head. The arrays are the cache's scratch; those of merging belong to
 * the group of layers and heads that is at work.
 */
struct kvc_choice {
    kvc_cache *cache;
    struct kvc_sequence *seq;
    const kvc_policy *policy;
    kvc_map *map;               /* or NULL */
    enum kvc_probe_part probes; /* query rows that score */
    float strength;             /* part of the policy's rates that is applied */
    int32_t max_rows;           /* 0: no limit */
    int32_t n_coming;           /* tokens about to be announced: they are the newest */
    int32_t block;              /* rows that stay or go together */
    bool estimate;              /* measure what changes for the kept query rows */
    bool only_rows;             /* no visual pruning, no row_rate: only max_rows counts */
    int32_t n;                  /* tokens in the table */
    int32_t end;                /* slots first_unsealed ... end - 1 are built anew and sealed */
    size_t words;
    uint64_t *live;    /* rows there are, without sinks */
    uint64_t *keep;    /* those that stay, by themselves or as the row of a group */
    uint64_t *heavy;   /* those that are sealed as F16 */
    float visual_rate; /* sum over images and groups */
    kvc_gate gate;     /* after this call */
    int32_t n_images, n_forced_dropped;

    float *scores, *mass; /* [n] of a group, [n_kv_heads][n] of a layer */
    float *shared;    /* [3][n] of all layers, for each part of the query rows; bit p of ranked */
    uint32_t ranked;  /* says that part p is there */
    float *part;      /* [n] scores of members */
    int32_t *members; /* [n] candidates of one selection */
    int32_t *rows;    /* [n] what it chose of them */
    uint64_t *group;  /* [words] rows of a group */
    uint64_t *forced, *sentences, *places, *done; /* [words] */
    uint8_t *fates;                               /* [n] */
    float *weights;                               /* [n_pairs] of the groups */
    int32_t *budgets;                             /* [n_pairs] */
    void *ws;
    size_t ws_size;

    /* merging: the row that holds a token, the next token in it, its weight */
    int32_t *head, *next;
    float *weight, *bias;
    uint64_t *built;   /* [n_pairs][words] rows of the new pages */
    int32_t *n_merged; /* [n_pairs] rows that went into others */

    int32_t *columns; /* new columns, in ascending ordinals */
    int32_t n_columns;
    uint64_t n_recoded;
    /* [n_pairs][2], sums of |out' - out|^2 and |out|^2: of all that is done; of pruning alone, for
     * the query rows that scored; the same for query rows that did not. */
    double *errors, *seen_errors, *unseen_errors;
};

/* Carves the arrays of a choice and of merging. */
void kvc_choice_carve(kvc_cache *cache, struct kvc_arena *arena);

/* A choice that keeps everything; map may be NULL. */
void kvc_choice_start(struct kvc_choice *c, kvc_cache *cache, struct kvc_sequence *seq,
                      const kvc_policy *policy, kvc_map *map);

/* Decides what stays and what is sealed as F16. */
void kvc_choose(struct kvc_choice *c);

/* Groups of layers and heads that share a set of tokens, and the pairs of one: first ... last - 1.
 */
int32_t kvc_n_groups(const struct kvc_choice *c);
void kvc_group_pairs(const struct kvc_choice *c, int32_t group, int32_t *first, int32_t *last);

static inline uint64_t *kvc_choice_bits(const struct kvc_choice *c, uint64_t *bits, int32_t pair)
{
    return bits + (size_t)pair * c->words;
}

/* Where a token is: -1 in the table if it was forgotten. */
int32_t kvc_token_at(const struct kvc_choice *c, int64_t ordinal);

/* The rows of an entry that stay where they are. */
uint64_t kvc_rows_staying(const struct kvc_choice *c, const struct kvc_column *column,
                          int32_t pair);

/* Bits of places in the token table. */
static inline bool kvc_marked(const uint64_t *bits, int32_t i)
{
    return kvc_bit(bits, (size_t)i);
}

static inline void kvc_mark(uint64_t *bits, int32_t i)
{
    kvc_bit_set(bits, (size_t)i);
}

static inline void kvc_unmark(uint64_t *bits, int32_t i)
{
    kvc_bit_clear(bits, (size_t)i);
}

/* ---- rank.c ---- */

/* The scores of a group, in c->scores. Groups that are heads: in ascending order. */
void kvc_rank(struct kvc_choice *c, int32_t group);

/* ---- policy.c ---- */

/* Checks a policy against a cache; one that evicts always needs scores. */
kvc_status kvc_policy_check(const kvc_cache *cache, const kvc_policy *policy, bool evicts,
                            kvc_policy *out);

/* ---- probe.c ---- */

/* Attention mass of kept query rows on the tokens of one pair, added to mass[i]. */
void kvc_probe_mass(const kvc_cache *cache, const struct kvc_sequence *seq, int32_t pair,
                    enum kvc_probe_part part, size_t lane, float *mass);

/* Adds |out' - out|^2 and |out|^2 of kept query rows: out' is over the rows that stay and the new
 * pages. */
void kvc_probe_error(const struct kvc_choice *c, int32_t pair, enum kvc_probe_part part,
                     size_t lane, double *error);

/* ---- fuse.c ---- */

/* Carves what merging needs. */
void kvc_fuse_carve(kvc_cache *cache, struct kvc_arena *arena);

/* Decides what merges in the pairs of a group and which rows its new pages have. */
void kvc_fuse(struct kvc_choice *c, int32_t group, int32_t rounds);

/* ---- build.c ---- */

/* A row of a pair, where it is now. */
struct kvc_row_place {
    struct kvc_column *column;
    int32_t row;
    bool sealed;
};

struct kvc_row_place kvc_find_row(const struct kvc_choice *c, int32_t pair, int32_t i);

/* The row that token i heads, members mixed in; k or v may be NULL; rows is room for K and V. */
void kvc_load_row(const struct kvc_choice *c, int32_t pair, int32_t i, float *k, float *v,
                  float *rows);

/* Carves the lanes. */
void kvc_build_carve(kvc_cache *cache, struct kvc_arena *arena);

/* Whether the pages and columns that building takes are there, at most. */
bool kvc_build_fits(struct kvc_choice *c);

/* Makes the pages of a group and puts them into the new columns. */
void kvc_build(struct kvc_choice *c, int32_t group);

/* Gives the new columns back, or puts them in the place of the old ones. */
void kvc_build_undo(struct kvc_choice *c);
void kvc_build_commit(struct kvc_choice *c);

/* ---- evict.c ---- */

/* Before n_coming tokens are announced, drops rows until a layer and head has at most max_rows;
 * false: nothing could go. */
bool kvc_evict(kvc_cache *cache, struct kvc_sequence *seq, const kvc_policy *policy,
               int32_t max_rows, int32_t n_coming);

/* The most rows that a layer and head has. */
int32_t kvc_most_rows(const kvc_cache *cache, const struct kvc_sequence *seq);

/* Takes rows that a choice drops out of pages that stay. */
void kvc_drop_rows(struct kvc_choice *c);

/* Forgets tokens that have no row left; places in the token table change. */
void kvc_forget_tokens(struct kvc_choice *c);

/* ---- map.c ---- */

/* Notes the rows there are; then what became of the rows of a pair; then where they are now. */
void kvc_map_begin(kvc_map *map, const struct kvc_choice *c);
void kvc_map_fates(kvc_map *map, const struct kvc_choice *c, int32_t pair);
void kvc_map_merges(kvc_map *map, const struct kvc_choice *c, int32_t pair);
void kvc_map_end(kvc_map *map, const kvc_cache *cache);

/* Whether a map has room for the rows of a sequence. */
bool kvc_map_holds(const kvc_map *map, const kvc_cache *cache, const struct kvc_sequence *seq);

#endif
