/* An examination room: a reader with a cache in which one picture is compressed in many ways and
 * questions about it are answered. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvc/score.h>

#include "room_parts.h"
#include "sample.h"

enum {
    MAX_SUBJECTS = 16, /* settings of a batch; their rows must stay in the processor's cache */
    MAX_READING = MAX_QUESTION + MAX_ANSWER,
    POOL_SLACK = 32 << 20 /* slabs of the kinds of pages that policies make, see kvc/cache.h */
};

/* A compressed picture that waits for its questions. */
struct subject {
    const struct setting *setting;
    struct outcome *outcome;
    kvc_cache *cache;      /* the room's, or its own */
    kvc_seq seqs[N_ASKED]; /* 0: not asked */
    int32_t position;      /* of the first word of a question */
};

static bool create_cache(struct exam_room *room, struct failure *failure)
{
    kvc_cache_params *p = &room->cache_params;
    const int32_t sequences = 2 + 2 * MAX_SUBJECTS + 2;

    model_cache_params(&room->p.vlm->model.shape, p);
    p->precision.k = p->precision.v = KVC_F16;
    p->max_sequences = sequences;
    p->max_tokens = sequences * MAX_ROWS;
    p->max_append = p->max_hold_tokens = p->max_sequence_tokens = MAX_ROWS;
    p->probe_rows = PROBE_ROWS;
    p->sink_tokens = N_PREFIX;
    p->recent_tokens = 0;
    p->max_merge_tokens = MAX_CELLS;
    if (!room_check(kvc_cache_full_budget(p, &p->budget_bytes), "sizing the cache", failure))
        return false;
    p->budget_bytes += POOL_SLACK;
    return room_check(kvc_cache_create(room->reader.ctx, p, &room->cache), "creating the cache",
                      failure);
}

/* The workspace serves the brightness of a picture and the learned scorer. */
static bool create_scorer(struct exam_room *room, struct failure *failure)
{
    const kvc_grid grid = kvc_grid_image(MAX_GRID, MAX_GRID);

    room->ws_size = (size_t)MAX_PIXELS * MAX_PIXELS;
    if (room->p.scorer) {
        size_t size;
        if (!room_check(kvc_scorer_create(room->reader.ctx, room->p.scorer, room->p.n_scorer,
                                          &room->scorer),
                        "the learned scorer", failure) ||
            !room_check(kvc_scorer_apply_workspace_size(room->scorer, &grid, &size),
                        "the learned scorer", failure))
            return false;
        room->ws_size = size > room->ws_size ? size : room->ws_size;
    }
    room->ws = aligned_alloc(64, (room->ws_size + 63) / 64 * 64);
    return room->ws || fail_with(failure, "out of memory");
}

bool exam_room_open(const struct exam_room_params *params, struct exam_room **out,
                    struct failure *failure)
{
    const struct model_shape *s = &params->vlm->model.shape;
    const size_t n_rows = (size_t)MAX_ROWS * s->n_kv_heads * s->head_dim;
    struct exam_room *room = calloc(1, sizeof(*room));

    *out = NULL;
    if (!room)
        return fail_with(failure, "out of memory");
    room->p = *params;
    room->item = malloc(sizeof(*room->item));
    room->layers = calloc(s->n_layers, sizeof(*room->layers));
    room->keys = malloc(n_rows * sizeof(float));
    room->values = malloc(n_rows * sizeof(float));
    room->picked = malloc(MAX_CELLS * s->n_embd * sizeof(float));
    room->logits = malloc((size_t)N_ASKED * MAX_SUBJECTS * MAX_ANSWER * s->n_vocab * sizeof(float));
    room->whole_logits = malloc(N_ASKED * s->n_vocab * sizeof(float));
    bool ok = room->item && room->layers && room->keys && room->values && room->picked &&
              room->logits && room->whole_logits;
    if (!ok)
        fail_with(failure, "out of memory");
    ok = ok && reader_open(params->vlm, params->kernels, &room->reader, failure) &&
         create_cache(room, failure) && create_scorer(room, failure);
    if (!ok) {
        exam_room_close(room);
        return false;
    }
    *out = room;
    return true;
}

void exam_room_close(struct exam_room *room)
{
    if (!room)
        return;
    kvc_scorer_destroy(room->scorer);
    kvc_cache_destroy(room->cache);
    if (room->reader.vlm)
        reader_close(&room->reader);
    free(room->item);
    free(room->layers);
    free(room->keys);
    free(room->values);
    free(room->picked);
    free(room->logits);
    free(room->whole_logits);
    free(room->ws);
    free(room);
}

const struct exam_item *exam_room_item(const struct exam_room *room)
{
    return room->item;
}

void exam_room_reference(const struct exam_room *room, struct outcome *out)
{
    *out = room->whole;
}

static const struct question *question_of(const struct exam_room *room, int asked)
{
    return asked == 0 ? &room->item->first : &room->item->second;
}

/* Facts of text, whatever the sequence holds: where patches are missing, the words after a picture
 * stand where they stood. */
static void text_facts(int32_t position, size_t n, kvc_token *facts)
{
    for (size_t i = 0; i < n; i++) {
        const int32_t at = position + (int32_t)i;
        facts[i] = (kvc_token){.t = at, .y = at, .x = at, .image = -1, .row = -1, .col = -1};
    }
}

/* KL of the distributions of two rows of logits. */
static double divergence(const float *from, const float *to, size_t n)
{
    const double top_p = (double)from[sample_greedy(from, n)];
    const double top_q = (double)to[sample_greedy(to, n)];
    double sum_p = 0.0, sum_q = 0.0, gap = 0.0;

    for (size_t i = 0; i < n; i++) {
        const double p = exp((double)from[i] - top_p);
        sum_p += p;
        sum_q += exp((double)to[i] - top_q);
        gap += p * ((double)from[i] - (double)to[i]);
    }
    return gap / sum_p - top_p - log(sum_p) + top_q + log(sum_q);
}

/* One question to one sequence. */
struct reading {
    kvc_cache *cache;
    kvc_seq seq;
    int32_t position;
    int asked;
    struct outcome *outcome;
    int32_t words[MAX_READING];
    kvc_token facts[MAX_READING];
};

static struct forward_item start_reading(const struct exam_room *room, struct reading *reading)
{
    const struct question *q = question_of(room, reading->asked);
    const size_t n_words = (size_t)q->n_words, n = n_words + (size_t)q->n_answer - 1;

    memcpy(reading->words, q->words, n_words * sizeof(*q->words));
    memcpy(reading->words + n_words, q->answer, (n - n_words) * sizeof(*q->answer));
    text_facts(reading->position, n, reading->facts);
    return (struct forward_item){.cache = reading->cache,
                                 .seq = reading->seq,
                                 .tokens = reading->words,
                                 .facts = reading->facts,
                                 .n = n,
                                 .n_skip = n_words - 1};
}

/* Marks what was read together. The whole cache, without a reference yet, leaves its logits. */
static bool read_together(struct exam_room *room, struct reading *readings, size_t n,
                          struct failure *failure)
{
    const size_t n_vocab = room->p.vlm->model.shape.n_vocab;
    struct forward_item items[N_ASKED * MAX_SUBJECTS] = {0};
    const float *logits = room->logits;

    for (size_t r = 0; r < n; r++)
        items[r] = start_reading(room, &readings[r]);
    if (!forward_run(room->reader.forward, items, n, room->logits, failure))
        return false;
    for (size_t r = 0; r < n; r++) {
        const int asked = readings[r].asked;
        const struct question *q = question_of(room, asked);
        struct outcome *out = readings[r].outcome;
        float *whole = room->whole_logits + (size_t)asked * n_vocab;
        if (out == &room->whole)
            memcpy(whole, logits, n_vocab * sizeof(*whole));
        out->kl[asked] = divergence(whole, logits, n_vocab);
        out->right[asked] = true;
        for (int i = 0; i < q->n_answer; i++, logits += n_vocab)
            out->right[asked] = out->right[asked] && sample_greedy(logits, n_vocab) == q->answer[i];
    }
    return true;
}

static bool read_picture(struct exam_room *room, struct failure *failure)
{
    static const int32_t bos = WORD_BOS;
    const int grid = room->item->picture.grid;

    reader_encode(&room->reader, room->item->picture.rgb, grid);
    if (!room_check(kvc_seq_create(room->cache, &room->base), "creating a sequence", failure) ||
        !room_check(kvc_seq_hold(room->cache, room->base), "holding", failure) ||
        !reader_read(&room->reader, room->cache, room->base, &bos, 1, failure) ||
        !reader_see(&room->reader, room->cache, room->base, 0, grid, failure))
        return false;
    room->position = (int32_t)kvc_seq_next_position(room->cache, room->base);
    return room_check(kvc_seq_read_tokens(room->cache, room->base, 0,
                                          N_PREFIX + (size_t)room->n_cells, room->facts),
                      "reading facts", failure);
}

static bool ask_whole(struct exam_room *room, struct failure *failure)
{
    struct reading readings[N_ASKED];

    for (int asked = 0; asked < N_ASKED; asked++) {
        readings[asked] = (struct reading){.cache = room->cache,
                                           .position = room->position,
                                           .asked = asked,
                                           .outcome = &room->whole};
        if (!room_check(kvc_seq_fork(room->cache, room->base, &readings[asked].seq), "forking",
                        failure))
            return false;
    }
    const bool ok = read_together(room, readings, N_ASKED, failure);
    for (int asked = 0; asked < N_ASKED; asked++)
        kvc_seq_destroy(room->cache, readings[asked].seq);
    return ok;
}

static void leave(struct exam_room *room)
{
    if (room->asked)
        kvc_seq_destroy(room->cache, room->asked);
    if (room->base)
        kvc_seq_destroy(room->cache, room->base);
    room->asked = room->base = 0;
}

bool exam_room_enter(struct exam_room *room, size_t i, struct failure *failure)
{
    const struct question *first = &room->item->first;

    leave(room);
    exam_item(room->p.exam, i, room->item);
    room->number = i;
    room->n_cells = room->item->picture.grid * room->item->picture.grid;
    memset(room->has_scores, 0, sizeof(room->has_scores));
    if (!read_picture(room, failure) || !ask_whole(room, failure) ||
        !room_measure(room, room->cache, room->base, &room->whole, failure) ||
        !room_check(kvc_seq_fork(room->cache, room->base, &room->asked), "forking", failure))
        return false;
    room->whole.rel_err = NAN;
    return reader_read(&room->reader, room->cache, room->asked, first->words,
                       (size_t)first->n_words, failure);
}

/* Compresses a copy of what was asked, and takes the question back. */
static bool compress(struct exam_room *room, struct subject *subject, struct failure *failure)
{
    const struct setting *setting = subject->setting;
    const size_t n_layers = room->p.vlm->model.shape.n_layers;
    kvc_policy policy = setting->policy;
    kvc_report report = {
        .struct_size = sizeof(report), .layers = room->layers, .n_layers = (int32_t)n_layers};

    policy.last_tokens = room->item->first.n_words;
    if (policy.source == KVC_SOURCE_CALLER) {
        if (setting->score == SCORE_SOFT && !soft_equal(&room->soft, &setting->soft)) {
            room->soft = setting->soft;
            room->has_scores[SCORE_SOFT] = false;
        }
        if (!room_score(room, setting->score, failure))
            return false;
        policy.scores = room->scores[setting->score];
        policy.n_scores = N_PREFIX + (size_t)room->n_cells;
    }
    kvc_seq *seq = &subject->seqs[0];
    if (!room_check(kvc_seq_fork(room->cache, room->asked, seq), "forking", failure) ||
        !room_check(kvc_cache_compress(room->cache, *seq, &policy,
                                       setting->measure_error ? &report : NULL, NULL),
                    "compressing", failure) ||
        !room_check(kvc_seq_truncate(room->cache, *seq, N_PREFIX + room->n_cells),
                    "taking the question back", failure))
        return false;
    subject->outcome->rel_err = setting->measure_error ? 0.0 : NAN;
    for (size_t layer = 0; layer < n_layers && setting->measure_error; layer++)
        subject->outcome->rel_err += room->layers[layer].rel_err / (double)n_layers;
    return true;
}

/* Reads the patches that a compressed sequence has kept once more, into a sequence of their own. */
static bool read_again(struct exam_room *room, struct subject *subject, struct failure *failure)
{
    static const int32_t prefix[N_PREFIX] = {WORD_BOS, WORD_IMAGE};
    const bool renumber = subject->setting->application == APPLY_RENUMBERED;
    const size_t n_embd = room->p.vlm->model.shape.n_embd;
    const int grid = room->item->picture.grid;
    int64_t ordinals[MAX_ROWS];
    kvc_token facts[MAX_CELLS];
    size_t n_rows;

    if (!room_check(kvc_seq_read_rows(room->cache, subject->seqs[0], 0, 0, MAX_ROWS, ordinals, NULL,
                                      NULL, NULL, &n_rows),
                    "reading rows", failure))
        return false;
    const size_t n = n_rows - N_PREFIX;
    for (size_t i = 0; i < n; i++) {
        const size_t ordinal = (size_t)ordinals[N_PREFIX + i];
        memcpy(room->picked + i * n_embd, room->reader.rows + (ordinal - N_PREFIX) * n_embd,
               n_embd * sizeof(float));
        facts[i] = room->facts[ordinal];
        if (renumber) {
            facts[i].row = (int32_t)i / grid;
            facts[i].col = (int32_t)i % grid;
            facts[i].y = facts[i].t + facts[i].row;
            facts[i].x = facts[i].t + facts[i].col;
        }
    }
    kvc_seq_destroy(room->cache, subject->seqs[0]);
    subject->seqs[0] = 0;
    if (!room_check(kvc_seq_create(room->cache, &subject->seqs[0]), "creating a sequence",
                    failure) ||
        !room_check(kvc_seq_hold(room->cache, subject->seqs[0]), "holding", failure) ||
        !reader_read(&room->reader, room->cache, subject->seqs[0], prefix, N_PREFIX, failure) ||
        !reader_feed(&room->reader, room->cache, subject->seqs[0], room->picked, facts, n, failure))
        return false;
    if (renumber)
        subject->position = (int32_t)kvc_seq_next_position(room->cache, subject->seqs[0]);
    return true;
}

/* Puts the rows that are left into a new sequence, which knows nothing of what they stood for. */
static bool lose_bias(struct exam_room *room, struct subject *subject, struct failure *failure)
{
    const kvc_seq from = subject->seqs[0];

    const bool ok = room_copy_rows(room, from, room->cache, &subject->seqs[0], failure);
    kvc_seq_destroy(room->cache, from);
    subject->outcome->rel_err = NAN; /* of what the policy did, bias and all */
    return ok;
}

/* A cache of its own: scale windows belong to the cache, and pages that a policy makes have none.
 */
static bool seal(struct exam_room *room, struct subject *subject, struct failure *failure)
{
    kvc_cache_params p = room->cache_params;

    p.precision = subject->setting->policy.precision;
    p.scale_window = subject->setting->scale_window;
    p.max_sequences = 1 + N_ASKED;
    p.max_tokens = p.max_sequences * MAX_ROWS;
    subject->outcome->rel_err = NAN;
    if (!room_check(kvc_cache_full_budget(&p, &p.budget_bytes), "sizing a cache", failure))
        return false;
    p.budget_bytes += POOL_SLACK / 8;
    return room_check(kvc_cache_create(room->reader.ctx, &p, &subject->cache), "creating a cache",
                      failure) &&
           room_copy_rows(room, room->base, subject->cache, &subject->seqs[0], failure) &&
           room_check(kvc_cache_compress(subject->cache, subject->seqs[0], NULL, NULL, NULL),
                      "sealing", failure);
}

static bool prepare(struct exam_room *room, struct subject *subject, struct failure *failure)
{
    const enum application application = subject->setting->application;

    subject->cache = room->cache;
    subject->position = room->position;
    if (application == APPLY_SEAL ? !seal(room, subject, failure)
                                  : !compress(room, subject, failure))
        return false;
    if (!room_measure(room, subject->cache, subject->seqs[0], subject->outcome, failure))
        return false;
    switch (application) {
    case APPLY_NO_BIAS: return lose_bias(room, subject, failure);
    case APPLY_AGAIN:
    case APPLY_RENUMBERED: return read_again(room, subject, failure);
    default: return true;
    }
}

static void release(const struct exam_room *room, struct subject *subject)
{
    for (int asked = 0; asked < N_ASKED; asked++)
        if (subject->seqs[asked])
            kvc_seq_destroy(subject->cache, subject->seqs[asked]);
    if (subject->cache != room->cache)
        kvc_cache_destroy(subject->cache);
}

/* Each question gets a sequence: the compressed one, or a copy of it. */
static bool ask_subjects(struct exam_room *room, struct subject *subjects, size_t n,
                         struct failure *failure)
{
    struct reading readings[N_ASKED * MAX_SUBJECTS] = {0};
    size_t n_readings = 0;

    for (size_t i = 0; i < n; i++) {
        struct subject *s = &subjects[i];
        if (s->setting->ask_first && s->setting->ask_second &&
            !room_check(kvc_seq_fork(s->cache, s->seqs[0], &s->seqs[1]), "forking", failure))
            return false;
        for (int asked = 0; asked < N_ASKED; asked++)
            if (asked == 0 ? s->setting->ask_first : s->setting->ask_second)
                readings[n_readings++] =
                    (struct reading){.cache = s->cache,
                                     .seq = asked && s->seqs[1] ? s->seqs[1] : s->seqs[0],
                                     .position = s->position,
                                     .asked = asked,
                                     .outcome = s->outcome};
    }
    return n_readings == 0 || read_together(room, readings, n_readings, failure);
}

static bool try_batch(struct exam_room *room, const struct setting *const *settings, size_t n,
                      struct outcome *out, struct failure *failure)
{
    struct subject subjects[MAX_SUBJECTS] = {0};
    bool ok = true;

    for (size_t i = 0; i < n; i++) {
        out[i] = (struct outcome){.kl = {NAN, NAN}};
        subjects[i].setting = settings[i];
        subjects[i].outcome = &out[i];
        ok = ok && prepare(room, &subjects[i], failure);
    }
    ok = ok && ask_subjects(room, subjects, n, failure);
    for (size_t i = 0; i < n; i++)
        release(room, &subjects[i]);
    return ok;
}

bool exam_room_try(struct exam_room *room, const struct setting *const *settings, size_t n,
                   struct outcome *out, struct failure *failure)
{
    for (size_t at = 0; at < n; at += MAX_SUBJECTS) {
        const size_t left = n - at;
        if (!try_batch(room, settings + at, left < MAX_SUBJECTS ? left : MAX_SUBJECTS, out + at,
                       failure))
            return false;
    }
    return true;
}

bool exam_room_answer(struct exam_room *room, const struct setting *setting, int32_t *answer,
                      size_t max, size_t *n, struct failure *failure)
{
    const struct question *q = &room->item->first;
    struct outcome outcome;
    struct subject subject = {.setting = setting, .outcome = &outcome};
    bool ok = prepare(room, &subject, failure) &&
              reader_read(&room->reader, subject.cache, subject.seqs[0], q->words,
                          (size_t)q->n_words, failure) &&
              reader_answer(&room->reader, subject.cache, subject.seqs[0], answer, max, n, failure);

    release(room, &subject);
    return ok;
}
