/* choose.c - which rows a policy keeps, and which of them as F16. */
#include <math.h>
#include <string.h>

#include "choose.h"

/* Tokens of the longest table. */
static size_t max_facts(const kvc_cache *cache)
{
    return (size_t)cache->max_fact_pages * KVC_PAGE_TOKENS;
}

static size_t selection_size(size_t n)
{
    const kvc_grid line = kvc_grid_image(1, (int32_t)n);
    size_t rows, tokens;
    kvc_select_rows_workspace_size(n, 1, &rows);
    kvc_choose_tokens_workspace_size(&line, 0, &tokens);
    return rows > tokens ? rows : tokens;
}

void kvc_choice_carve(kvc_cache *cache, struct kvc_arena *arena)
{
    const size_t n = max_facts(cache), words = n / 64, n_pairs = (size_t)cache->n_pairs;
    struct kvc_choice *c = kvc_arena_take(arena, 1, sizeof(*c), 64);
    struct kvc_choice dummy;
    cache->choice = c;
    c = c ? c : &dummy;
    *c = (struct kvc_choice){.ws_size = selection_size(n)};
    c->live = kvc_arena_take(arena, n_pairs * words, sizeof(uint64_t), 64);
    c->keep = kvc_arena_take(arena, n_pairs * words, sizeof(uint64_t), 64);
    c->heavy = kvc_arena_take(arena, n_pairs * words, sizeof(uint64_t), 64);
    c->built = kvc_arena_take(arena, n_pairs * words, sizeof(uint64_t), 64);
    c->scores = kvc_arena_take(arena, n, sizeof(float), 64);
    c->shared = kvc_arena_take(arena, 3 * n, sizeof(float), 64);
    c->mass = kvc_arena_take(arena, n * (size_t)cache->params.n_kv_heads, sizeof(float), 64);
    c->part = kvc_arena_take(arena, n, sizeof(float), 64);
    c->members = kvc_arena_take(arena, n, sizeof(int32_t), 64);
    c->rows = kvc_arena_take(arena, n, sizeof(int32_t), 64);
    c->group = kvc_arena_take(arena, words, sizeof(uint64_t), 64);
    c->forced = kvc_arena_take(arena, words, sizeof(uint64_t), 64);
    c->sentences = kvc_arena_take(arena, words, sizeof(uint64_t), 64);
    c->places = kvc_arena_take(arena, words, sizeof(uint64_t), 64);
    c->done = kvc_arena_take(arena, words, sizeof(uint64_t), 64);
    c->fates = kvc_arena_take(arena, n, 1, 64);
    c->weights = kvc_arena_take(arena, n_pairs, sizeof(float), 64);
    c->budgets = kvc_arena_take(arena, n_pairs, sizeof(int32_t), 64);
    c->errors = kvc_arena_take(arena, n_pairs, 2 * sizeof(double), 64);
    c->seen_errors = kvc_arena_take(arena, n_pairs, 2 * sizeof(double), 64);
    c->unseen_errors = kvc_arena_take(arena, n_pairs, 2 * sizeof(double), 64);
    c->ws = kvc_arena_take(arena, c->ws_size, 1, 64);
    c->head = kvc_arena_take(arena, n, sizeof(int32_t), 64);
    c->next = kvc_arena_take(arena, n, sizeof(int32_t), 64);
    c->weight = kvc_arena_take(arena, n, sizeof(float), 64);
    c->bias = kvc_arena_take(arena, n, sizeof(float), 64);
    c->n_merged = kvc_arena_take(arena, n_pairs, sizeof(int32_t), 64);
    c->columns = kvc_arena_take(arena, (size_t)cache->max_slots, sizeof(int32_t), 64);
}

int32_t kvc_token_at(const struct kvc_choice *c, int64_t ordinal)
{
    const int32_t i = kvc_facts_find(c->cache, c->seq, ordinal);
    return i < c->n && kvc_fact(c->cache, c->seq, i)->ordinal == ordinal ? i : -1;
}

int32_t kvc_n_groups(const struct kvc_choice *c)
{
    switch (c->policy->scope) {
    case KVC_SCOPE_SHARED: return 1;
    case KVC_SCOPE_LAYER: return c->cache->params.n_layers;
    default: return c->cache->n_pairs;
    }
}

void kvc_group_pairs(const struct kvc_choice *c, int32_t group, int32_t *first, int32_t *last)
{
    const int32_t n = c->cache->n_pairs / kvc_n_groups(c);
    *first = group * n;
    *last = *first + n;
}

/* Sets the bits of the rows of a pair. */
static void find_rows(const struct kvc_choice *c, int32_t pair, uint64_t *bits)
{
    memset(bits, 0, c->words * sizeof(*bits));
    for (int32_t slot = 0; slot < c->seq->n_slots; slot++) {
        const struct kvc_column *column = kvc_slot(c->cache, c->seq, slot);
        const struct kvc_entry *e = &column->entries[pair];
        const int32_t *ordinals = e->page >= 0 ? kvc_page_ordinals(c->cache, e->page) : NULL;
        for (uint64_t left = e->page >= 0 ? e->live : 0; left; left &= left - 1) {
            const int r = __builtin_ctzll(left);
            kvc_mark(bits,
                     kvc_facts_find(c->cache, c->seq, ordinals ? ordinals[r] : column->first + r));
        }
    }
}

void kvc_choice_start(struct kvc_choice *c, kvc_cache *cache, struct kvc_sequence *seq,
                      const kvc_policy *policy, kvc_map *map)
{
    *c = *cache->choice;
    c->cache = cache;
    c->seq = seq;
    c->policy = policy;
    c->map = map;
    c->strength = 1.0f;
    c->max_rows = policy->max_rows;
    c->block = policy->block;
    c->n = seq->n_facts;
    c->words = ((size_t)c->n + 63) / 64;
    c->end = seq->first_unsealed;
    for (int32_t pair = 0; pair < cache->n_pairs; pair++)
        find_rows(c, pair, kvc_choice_bits(c, c->live, pair));
    memcpy(c->keep, c->live, (size_t)cache->n_pairs * c->words * sizeof(*c->live));
    memset(c->heavy, 0, (size_t)cache->n_pairs * c->words * sizeof(*c->heavy));
    memset(c->built, 0, (size_t)cache->n_pairs * c->words * sizeof(*c->built));
}

uint64_t kvc_rows_staying(const struct kvc_choice *c, const struct kvc_column *column, int32_t pair)
{
    const struct kvc_entry *e = &column->entries[pair];
    const uint64_t *keep = kvc_choice_bits(c, c->keep, pair);
    const uint64_t *built = kvc_choice_bits(c, c->built, pair);
    uint64_t stay = 0;
    for (uint64_t left = e->page >= 0 ? e->live : 0; left; left &= left - 1) {
        const int r = __builtin_ctzll(left);
        const int32_t i = kvc_token_at(c, kvc_row_ordinal(c->cache, column, pair, r));
        if (kvc_marked(keep, i) && !kvc_marked(built, i))
            stay |= UINT64_C(1) << r;
    }
    return stay;
}

/* ---- visual tokens ---- */

/* The visual tokens of one image, in c->members. */
struct image {
    int32_t n;        /* tokens there are, without sinks */
    int32_t n_sinks;  /* its tokens among the first of the sequence: they stay */
    int32_t original; /* tokens there were when the image was first judged */
    int32_t n_rows, n_cols;
    bool grid; /* each token has a cell of its own, and the grid fits the scratch */
};

static bool is_visual(const struct kvc_fact *fact)
{
    return fact->kind == KVC_TOKEN_VISUAL && fact->image >= 0;
}

static int32_t cell_of(const struct image *image, const struct kvc_fact *fact)
{
    return fact->row * image->n_cols + fact->col;
}

/* Whether no two tokens share a cell; leaves the cells in c->forced. */
static bool cells_are_single(const struct kvc_choice *c, const struct image *image)
{
    memset(c->forced, 0, c->words * sizeof(*c->forced));
    for (int32_t m = 0; m < image->n; m++) {
        const int32_t cell = cell_of(image, kvc_fact(c->cache, c->seq, c->members[m]));
        if (kvc_marked(c->forced, cell))
            return false;
        kvc_mark(c->forced, cell);
    }
    return true;
}

/* Collects the tokens of the image of token `first` that the group has. */
static struct image find_image(const struct kvc_choice *c, int32_t first)
{
    struct image image = {.grid = true};
    const int32_t number = kvc_fact(c->cache, c->seq, first)->image;
    for (int32_t i = first; i < c->n; i++) {
        const struct kvc_fact *fact = kvc_fact(c->cache, c->seq, i);
        if (!is_visual(fact) || fact->image != number)
            continue;
        kvc_mark(c->done, i);
        image.n_sinks += kvc_is_sink(c->seq, fact->ordinal);
        if (!kvc_marked(c->group, i))
            continue;
        c->members[image.n++] = i;
        image.original = fact->image_tokens > image.original ? fact->image_tokens : image.original;
        if (fact->row >= c->n || fact->col >= c->n) { /* no grid that fits */
            image.grid = false;
            continue;
        }
        image.grid = image.grid && fact->row >= 0 && fact->col >= 0;
        image.n_rows = fact->row >= image.n_rows ? fact->row + 1 : image.n_rows;
        image.n_cols = fact->col >= image.n_cols ? fact->col + 1 : image.n_cols;
    }
    const int32_t n_now = image.n + image.n_sinks;
    image.original = n_now > image.original ? n_now : image.original;
    image.grid =
        image.grid && (int64_t)image.n_rows * image.n_cols <= c->n && cells_are_single(c, &image);
    return image;
}

/* Where member m of an image lies in the arrays that the modules see. */
static int32_t place_of(const struct kvc_choice *c, const struct image *image, int32_t m)
{
    return image->grid ? cell_of(image, kvc_fact(c->cache, c->seq, c->members[m])) : m;
}

static kvc_grid grid_of(const struct image *image)
{
    return image->grid ? kvc_grid_image(image->n_rows, image->n_cols) : kvc_grid_image(1, image->n);
}

/* Refined scores of an image in c->part, its sinks in c->sentences, cells without a token in
 * c->forced; entropy of the rest. */
static float refine(const struct kvc_choice *c, const struct image *image)
{
    const kvc_grid grid = grid_of(image);
    const int32_t n = grid.n_rows * grid.n_cols;
    const size_t words = ((size_t)n + 63) / 64;
    kvc_refine_options options;
    float entropy = 1.0f;

    kvc_refine_options_default(&options);
    options.temperature = c->policy->temperature;
    options.centre = image->grid ? c->policy->centre : 0.0f;
    options.texture = 0.0f;
    options.sink_factor = c->policy->sink_factor;
    options.excluded = c->forced;
    memset(c->forced, 0xff, words * sizeof(*c->forced));
    memset(c->part, 0, (size_t)n * sizeof(*c->part));
    for (int32_t m = 0; m < image->n; m++) {
        const int32_t at = place_of(c, image, m);
        kvc_unmark(c->forced, at);
        c->part[at] = c->scores[c->members[m]];
    }
    memset(c->sentences, 0, words * sizeof(*c->sentences));
    kvc_score_refine(c->part, &grid, NULL, &options, c->part, c->sentences);
    for (size_t w = 0; w < words; w++)
        c->forced[w] |= c->sentences[w];
    for (int32_t m = 0; m < image->n; m++) /* entropy is of the raw scores */
        c->weight[place_of(c, image, m)] = c->scores[c->members[m]];
    for (int32_t i = 0; i < n; i++)
        if (kvc_marked(c->forced, i))
            c->weight[i] = 0.0f;
    kvc_entropy(c->weight, (size_t)n, c->forced, &entropy);
    for (int32_t i = 0; i < n; i++) /* what is left of forced: cells without a token */
        if (kvc_marked(c->sentences, i))
            kvc_unmark(c->forced, i);
    return entropy;
}

/* The rate of an image. */
static float rate_of(const struct kvc_choice *c, const struct image *image, float entropy,
                     kvc_gate *gate)
{
    float rate = c->policy->visual_rate;
    if (c->policy->gate) {
        kvc_gate_params params = c->policy->gating;
        const kvc_gate_input input = {
            .struct_size = sizeof(input),
            .used_bytes = kvc_used_bytes(c->cache),
            .budget_bytes = kvc_usable_bytes(c->cache),
            .entropy = entropy,
            .n_tokens = (size_t)image->original,
        };
        *gate = c->seq->gate;
        params.base = rate;
        kvc_gate_update(gate, &params, &input, NULL, &rate);
    }
    return rate * c->strength;
}

static bool is_recent(const struct kvc_choice *c, int32_t i)
{
    const int64_t end = (int64_t)c->seq->n_tokens + c->n_coming;
    return kvc_fact(c->cache, c->seq, i)->ordinal >= end - c->policy->last_tokens;
}

/* Marks the tokens of an image that stay in any case; c->done is not touched. */
static int32_t force_visual(const struct kvc_choice *c, const struct image *image, uint64_t *bits)
{
    const kvc_grid grid = grid_of(image);
    int32_t n = 0;
    memset(bits, 0, ((size_t)(grid.n_rows * grid.n_cols) + 63) / 64 * sizeof(*bits));
    for (int32_t m = 0; m < image->n; m++) {
        const int32_t i = c->members[m], at = place_of(c, image, m);
        const bool keep = kvc_fact(c->cache, c->seq, i)->flags & KVC_TOKEN_KEEP;
        if (!kvc_marked(c->sentences, at) && !is_recent(c, i) && !keep)
            continue;
        c->fates[i] = kvc_marked(c->sentences, at) ? KVC_FATE_SINK
                      : keep                       ? KVC_FATE_CALLER
                                                   : KVC_FATE_RECENT;
        kvc_mark(bits, at);
        n++;
    }
    return n;
}

/* The places of an image that stay, in c->rows. */
static size_t select_visual(const struct kvc_choice *c, const struct image *image, size_t keep,
                            const uint64_t *forced)
{
    const kvc_grid grid = grid_of(image);
    const size_t n = (size_t)grid.n_rows * (size_t)grid.n_cols;
    size_t size, n_rows = 0;

    for (int32_t i = 0; i < (int32_t)n; i++)
        if (kvc_marked(c->forced, i))
            c->part[i] = NAN; /* no token there */
    if (c->policy->coverage > 0 && image->grid &&
        kvc_choose_tokens_workspace_size(&grid, 0, &size) == KVC_OK && size <= c->ws_size) {
        kvc_choose_options options;
        kvc_choose_options_default(&options);
        options.diversity = 0.0f;
        options.cell_rows = options.cell_cols = c->policy->coverage;
        options.excluded = c->forced;
        if (kvc_choose_tokens(c->cache->ctx, c->part, NULL, &grid, forced, keep, &options, c->rows,
                              &n_rows, NULL, c->ws, c->ws_size) == KVC_OK)
            return n_rows;
    }
    kvc_select_rows(c->part, n, keep, forced, (size_t)c->block, c->policy->block_score, c->rows,
                    &n_rows, c->ws, c->ws_size);
    return n_rows;
}

/* Prunes one image in a group. */
static void prune_image(struct kvc_choice *c, int32_t first, kvc_gate *gate)
{
    const struct image image = find_image(c, first);
    size_t keep;

    if (image.n == 0)
        return;
    const float entropy = refine(c, &image);
    const float rate = rate_of(c, &image, entropy, gate);
    c->visual_rate += rate;
    c->n_images++;
    for (int32_t m = 0; m < image.n; m++)
        kvc_fact(c->cache, c->seq, c->members[m])->image_tokens =
            (uint16_t)kvc_min32(image.original, UINT16_MAX);
    kvc_keep_count((size_t)image.original, rate, (size_t)c->policy->keep_min, &keep);
    const size_t n_forced = (size_t)force_visual(c, &image, c->places);
    keep = keep > (size_t)image.n_sinks ? keep - (size_t)image.n_sinks : 0;
    keep = keep < n_forced ? n_forced : keep;
    if (rate == 0.0f || keep >= (size_t)image.n)
        return;
    const size_t n = select_visual(c, &image, keep, c->places);
    memset(c->places, 0, c->words * sizeof(*c->places));
    for (size_t r = 0; r < n; r++)
        kvc_mark(c->places, c->rows[r]);
    for (int32_t m = 0; m < image.n; m++) {
        const int32_t i = c->members[m];
        const bool stays = kvc_marked(c->places, place_of(c, &image, m));
        if (!stays)
            kvc_unmark(c->group, i);
        if (!stays || c->fates[i] == KVC_FATE_KEPT)
            c->fates[i] = stays ? KVC_FATE_SCORE : KVC_FATE_PRUNED;
    }
}

static void prune_images(struct kvc_choice *c, kvc_gate *gate)
{
    memset(c->done, 0, c->words * sizeof(*c->done));
    for (int32_t i = 0; i < c->n; i++)
        if (is_visual(kvc_fact(c->cache, c->seq, i)) && !kvc_marked(c->done, i))
            prune_image(c, i, gate);
}

/* ---- all tokens ---- */

/* Sinks that are left: they count among the rows and stay. */
static int32_t n_sinks(const struct kvc_choice *c)
{
    return __builtin_popcountll(c->seq->strip_live);
}

/* The rows of a group, in c->members, their scores in c->part. */
static int32_t find_members(const struct kvc_choice *c)
{
    int32_t n = 0;
    for (int32_t i = 0; i < c->n; i++)
        if (kvc_marked(c->group, i)) {
            c->part[n] = c->scores[i];
            c->members[n++] = i;
        }
    return n;
}

/* Rows that a group may keep, sinks included. */
static size_t row_target(const struct kvc_choice *c, int32_t n)
{
    const float rate = c->only_rows ? 0.0f : c->policy->row_rate * c->strength;
    size_t target;
    kvc_keep_count((size_t)n + (size_t)n_sinks(c), rate, 0, &target);
    if (c->max_rows > 0 && target > (size_t)c->max_rows)
        target = (size_t)c->max_rows;
    return target;
}

/* Marks the members that stay in any case, as many as fit; the bitmap is c->forced. */
static void force_members(struct kvc_choice *c, int32_t n, size_t keep)
{
    kvc_force_options options;
    const size_t words = ((size_t)n + 63) / 64;
    int32_t recent = 0;
    size_t n_forced;
    bool truncated;

    memset(c->sentences, 0, words * sizeof(*c->sentences));
    memset(c->places, 0, words * sizeof(*c->places));
    for (int32_t m = 0; m < n; m++) {
        const struct kvc_fact *fact = kvc_fact(c->cache, c->seq, c->members[m]);
        recent += is_recent(c, c->members[m]);
        if (fact->flags & KVC_TOKEN_SENTENCE && c->policy->keep_sentences)
            kvc_mark(c->sentences, m);
        if (fact->flags & KVC_TOKEN_KEEP || fact->kind == KVC_TOKEN_SEPARATOR)
            kvc_mark(c->places, m);
    }
    kvc_force_options_default(&options);
    options.recent = recent;
    options.sinks = 0;
    options.sentence_first = c->places; /* what must stay comes before what may */
    options.caller = c->sentences;
    kvc_force_rows((size_t)n, &options, keep, c->forced, &n_forced, &truncated);
    for (int32_t m = 0; m < n; m++) {
        const bool rule =
            kvc_marked(c->sentences, m) || kvc_marked(c->places, m) || m >= n - recent;
        const int32_t i = c->members[m];
        if (rule && !kvc_marked(c->forced, m))
            c->n_forced_dropped++;
        if (kvc_marked(c->forced, m))
            c->fates[i] = m >= n - recent            ? KVC_FATE_RECENT
                          : kvc_marked(c->places, m) ? KVC_FATE_CALLER
                                                     : KVC_FATE_SENTENCE;
    }
}

/* Whether a token must stay whatever its score is; a sentence only may. */
static bool must_stay(const struct kvc_choice *c, int32_t i)
{
    const struct kvc_fact *fact = kvc_fact(c->cache, c->seq, i);
    return fact->flags & KVC_TOKEN_KEEP || fact->kind == KVC_TOKEN_SEPARATOR || is_recent(c, i);
}

/* Takes a group down to a number of rows, sinks included. What must stay is not dropped to make
 * room. */
static void prune_rows(struct kvc_choice *c, size_t target)
{
    const int32_t n = find_members(c);
    const size_t sinks = (size_t)n_sinks(c);
    size_t keep = target > sinks ? target - sinks : 0, n_must = 0, n_kept;

    for (int32_t m = 0; m < n && c->only_rows; m++)
        n_must += must_stay(c, c->members[m]);
    keep = keep < n_must ? n_must : keep;
    if (keep >= (size_t)n)
        return;
    force_members(c, n, keep);
    kvc_select_rows(c->part, (size_t)n, keep, c->forced, (size_t)c->block, c->policy->block_score,
                    c->rows, &n_kept, c->ws, c->ws_size);
    if (n_kept > keep) /* the blocks of forced rows are too many */
        kvc_select_rows(c->part, (size_t)n, keep, c->forced, 1, KVC_BLOCK_MEAN, c->rows, &n_kept,
                        c->ws, c->ws_size);
    for (int32_t m = 0, r = 0; m < n; m++) {
        const int32_t i = c->members[m];
        if ((size_t)r < n_kept && c->rows[r] == m) {
            r++;
            if (!kvc_marked(c->forced, m))
                c->fates[i] = KVC_FATE_SCORE;
            continue;
        }
        kvc_unmark(c->group, i);
        c->fates[i] = KVC_FATE_EVICTED;
    }
}

/* Marks the strongest rows of those that this call seals. */
static void choose_heavy(const struct kvc_choice *c, uint64_t *heavy)
{
    const int32_t n = find_members(c);
    int32_t n_fresh = 0;
    size_t light, n_heavy;

    memset(heavy, 0, c->words * sizeof(*heavy));
    if (c->policy->heavy_share == 0.0f || c->end == c->seq->first_unsealed)
        return;
    const int32_t begin = kvc_slot(c->cache, c->seq, c->seq->first_unsealed)->first;
    const struct kvc_column *last = kvc_slot(c->cache, c->seq, c->end - 1);
    for (int32_t m = 0; m < n; m++) {
        const int32_t ordinal = kvc_fact(c->cache, c->seq, c->members[m])->ordinal;
        if (ordinal < begin || ordinal >= last->first + last->n)
            continue;
        c->part[n_fresh] = c->scores[c->members[m]];
        c->members[n_fresh++] = c->members[m];
    }
    kvc_keep_count((size_t)n_fresh, c->policy->heavy_share, 0, &light);
    kvc_select_rows(c->part, (size_t)n_fresh, (size_t)n_fresh - light, NULL, 1, KVC_BLOCK_MEAN,
                    c->rows, &n_heavy, c->ws, c->ws_size);
    for (size_t r = 0; r < n_heavy; r++)
        kvc_mark(heavy, c->members[c->rows[r]]);
}

/* The rows of a group: those of any of its pairs. */
static void find_group(const struct kvc_choice *c, int32_t group)
{
    int32_t first, last;
    kvc_group_pairs(c, group, &first, &last);
    memcpy(c->group, kvc_choice_bits(c, c->live, first), c->words * sizeof(*c->group));
    for (int32_t pair = first + 1; pair < last; pair++)
        for (size_t w = 0; w < c->words; w++)
            c->group[w] |= kvc_choice_bits(c, c->live, pair)[w];
}

/* Shares the rows of all groups out over them: a group whose mass is spread gets more. */
static void split_rows(struct kvc_choice *c)
{
    const int32_t n_groups = kvc_n_groups(c);
    kvc_budget_options options = c->policy->budget;
    size_t total = 0;

    const bool weighs = options.mode != KVC_BUDGET_PYRAMID;
    for (int32_t g = 0; g < n_groups; g++) {
        int32_t n_spread = 0;
        float max = 0.0f;
        find_group(c, g);
        if (weighs)
            kvc_rank(c, g);
        const int32_t n = find_members(c);
        for (int32_t m = 0; m < n && weighs; m++)
            max = c->part[m] > max ? c->part[m] : max;
        for (int32_t m = 0; m < n && weighs; m++)
            n_spread += c->part[m] >= 0.01f * max;
        c->weights[g] = n > 0 ? (float)n_spread / (float)n : 0.0f;
        total += row_target(c, n);
    }
    options.min = 0;
    options.max = INT32_MAX;
    kvc_split_budget(c->weights, (size_t)n_groups, total, &options, c->budgets);
}

void kvc_choose(struct kvc_choice *c)
{
    const bool limited = c->max_rows > 0 || c->policy->row_rate > 0.0f;
    const bool split =
        limited && kvc_n_groups(c) > 1 && c->policy->budget.mode != KVC_BUDGET_UNIFORM;
    kvc_gate gate = c->seq->gate;

    c->visual_rate = 0.0f;
    c->n_images = c->n_forced_dropped = 0;
    if (split)
        split_rows(c);
    for (int32_t g = 0; g < kvc_n_groups(c); g++) {
        int32_t first, last;
        find_group(c, g);
        kvc_rank(c, g);
        memset(c->fates, KVC_FATE_KEPT, (size_t)c->n);
        const size_t target = split ? (size_t)c->budgets[g] : row_target(c, find_members(c));
        if (!c->only_rows)
            prune_images(c, &gate);
        if (limited)
            prune_rows(c, target);
        kvc_group_pairs(c, g, &first, &last);
        for (int32_t pair = first; pair < last; pair++) {
            const uint64_t *live = kvc_choice_bits(c, c->live, pair);
            for (size_t w = 0; w < c->words; w++)
                kvc_choice_bits(c, c->keep, pair)[w] = live[w] & c->group[w];
        }
        choose_heavy(c, kvc_choice_bits(c, c->heavy, first));
        for (int32_t pair = first + 1; pair < last; pair++)
            memcpy(kvc_choice_bits(c, c->heavy, pair), kvc_choice_bits(c, c->heavy, first),
                   c->words * sizeof(*c->heavy));
        for (int32_t pair = first; pair < last && c->map; pair++)
            kvc_map_fates(c->map, c, pair);
    }
    c->gate = gate;
}
