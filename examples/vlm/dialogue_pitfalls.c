/* The pitfalls of the article, each made on purpose and avoided. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dialogue_parts.h"

enum { ITEMS_PER_DIALOGUE = 3, SCALES_IMAGES = 4, MAX_TOKENS = 1024, LATE_TURNS = 8 };

/* How the rows of a picture go. */
enum pitfall_way {
    WAY_COMPRESS, /* kvc_cache_compress() prunes before it seals */
    WAY_HOLES     /* everything is sealed, then the same rows are removed where they lie */
};

/* Each row of "pitfalls" about one picture, beside "whole". */
struct variant {
    const char *name;
    double pitfall;
    float visual_rate, row_rate;
    kvc_format format;
    int32_t block;
    enum pitfall_way way;
    bool counts_rows; /* positions of text follow the rows left */
    bool last_alone;  /* only the last word of the question comes after the compression: the others
                         can be pruned */
    bool unforced;    /* no token has to stay */
};

static const struct variant variants[] = {
    {"whole", 0, .format = KVC_F16, .block = 1},
    {"positions right", 1, .visual_rate = 0.5f, .format = KVC_F16, .block = 1},
    {"positions wrong", 1, .visual_rate = 0.5f, .format = KVC_F16, .block = 1, .counts_rows = true},
    {"positions counted", 1, .format = KVC_F16, .block = 1, .counts_rows = true},
    {"pages right", 3, .row_rate = 0.5f, .format = KVC_INT8, .block = 1},
    {"pages wrong", 3, .row_rate = 0.5f, .format = KVC_INT8, .block = 1, .way = WAY_HOLES},
    {"pages blocks of 16", 3, .row_rate = 0.5f, .format = KVC_INT8, .block = 16},
    {"forced right", 4, .row_rate = 0.9f, .format = KVC_F16, .block = 1, .last_alone = true},
    {"forced wrong", 4, .row_rate = 0.9f, .format = KVC_F16, .block = 1, .last_alone = true,
     .unforced = true},
};

enum { N_VARIANTS = sizeof(variants) / sizeof(*variants) };

struct outcome {
    bool right;
    double kl, rows, page_bytes;
};

struct pitfalls {
    struct dialogue_run *run;
    size_t n_items;
    struct outcome *outcomes; /* [n_items][N_VARIANTS] */
};

static bool open_talk(const struct variant *v, struct reader *reader, struct talk *out,
                      struct failure *failure)
{
    struct talk_params params;

    talk_params_default(&params);
    params.hold = true;
    params.max_tokens = MAX_TOKENS;
    params.precision.k = params.precision.v = v->format;
    if (v->unforced)
        params.sink_tokens = 0;
    if (!talk_open(reader, &params, out, failure))
        return false;
    return true;
}

static void make_policy(const struct variant *v, int n_last, kvc_policy *out)
{
    kvc_policy_default(out);
    out->set_precision = true;
    out->precision.k = out->precision.v = v->format;
    out->visual_rate = v->visual_rate;
    out->row_rate = v->row_rate;
    out->block = v->block;
    out->last_tokens = v->unforced ? 0 : n_last;
    out->keep_sentences = !v->unforced;
}

/* Removes the rows that a compression pruned according to its map. */
static bool remove_pruned(struct talk *talk, const kvc_map *map, struct failure *failure)
{
    kvc_token_fate *fates = malloc(MAX_TOKENS * sizeof(*fates));
    size_t n = 0;
    kvc_status status;

    if (!fates)
        return fail_with(failure, "out of memory");
    status = kvc_explain(map, 0, 0, MAX_TOKENS, fates, &n); /* all share one set */
    for (size_t i = 0; i < n && status == KVC_OK; i++)
        if (fates[i].new_row < 0)
            status = kvc_seq_remove(talk->cache, talk->seq, fates[i].ordinal, fates[i].ordinal + 1);
    free(fates);
    return status == KVC_OK || fail_with(failure, "cannot remove: %s", kvc_status_str(status));
}

/* Seals all rows, then removes those that a compression of a copy prunes. */
static bool make_holes(struct talk *talk, const kvc_policy *policy, struct failure *failure)
{
    kvc_map *map = NULL;
    kvc_seq fork = 0;

    kvc_status status = kvc_map_create(talk->cache, MAX_TOKENS, &map);
    if (status == KVC_OK)
        status = kvc_seq_fork(talk->cache, talk->seq, &fork);
    if (status == KVC_OK)
        status = kvc_cache_compress(talk->cache, fork, policy, NULL, map);
    if (status == KVC_OK)
        status = kvc_seq_destroy(talk->cache, fork);
    const bool ok = status == KVC_OK ||
                    fail_with(failure, "cannot compress a copy: %s", kvc_status_str(status));
    const bool done =
        ok && talk_compress(talk, NULL, NULL, NULL, failure) && remove_pruned(talk, map, failure);
    kvc_map_destroy(map);
    return done;
}

/* Reads the question, compresses, and takes the part of the question back that comes again. */
static bool compress(const struct variant *v, struct talk *talk, const struct question *question,
                     struct failure *failure)
{
    const int n_read = question->n_words - v->last_alone;
    const int64_t before = kvc_seq_n_tokens(talk->cache, talk->seq);
    kvc_policy policy;

    make_policy(v, n_read, &policy);
    if (!talk_read(talk, question->words, (size_t)n_read, failure))
        return false;
    const bool ok = v->way == WAY_HOLES ? make_holes(talk, &policy, failure)
                                        : talk_compress(talk, &policy, NULL, NULL, failure);
    talk->counts_rows =
        v->counts_rows; /* from here on: the same rows are left as where it is right */
    return ok && (v->last_alone || talk_take_back(talk, before, failure));
}

/* The question as it comes after the compression. */
static void rest_of(const struct variant *v, const struct question *question, struct question *out)
{
    *out = *question;
    if (!v->last_alone)
        return;
    out->n_words = 1;
    out->words[0] = question->words[question->n_words - 1];
}

static bool try_variant(const struct variant *v, struct talk *talk, const struct exam_item *item,
                        float *logits, struct outcome *out, struct failure *failure)
{
    const int64_t n_cells = (int64_t)item->picture.grid * item->picture.grid;
    const int64_t first = kvc_seq_n_tokens(talk->cache, talk->seq) + 1;
    struct question *rest = malloc(sizeof(*rest));

    if (!rest)
        return fail_with(failure, "out of memory");
    rest_of(v, &item->first, rest);
    const bool ok = talk_see(talk, item->picture.grid, failure) &&
                    compress(v, talk, &item->first, failure) &&
                    talk_count_rows(talk, first, first + n_cells, &out->rows, failure);
    if (ok)
        out->page_bytes = (double)talk_page_bytes(talk);
    const bool done = ok && talk_teach(talk, rest, &out->right, logits, failure);
    free(rest);
    return done;
}

static bool pitfalls_job(void *arg, struct reader *reader, size_t i, struct failure *failure)
{
    const struct pitfalls *p = arg;
    struct exam_item *item = dialogue_draw(p->run, reader, i, failure);
    float whole[N_WORDS], logits[N_WORDS];
    bool ok = item != NULL;

    for (size_t v = 0; v < N_VARIANTS && ok; v++) {
        struct outcome *out = &p->outcomes[i * N_VARIANTS + v];
        struct talk talk;
        ok = open_talk(&variants[v], reader, &talk, failure) &&
             try_variant(&variants[v], &talk, item, logits, out, failure);
        talk_close(&talk);
        if (v == 0)
            memcpy(whole, logits, sizeof(whole));
        out->kl = ok ? logits_kl(whole, logits, N_WORDS) : NAN;
    }
    free(item);
    return ok;
}

/* The first picture once more, for the time of attention. */
static bool time_variants(const struct pitfalls *p, struct talk_time *times,
                          struct failure *failure)
{
    struct talk talks[N_VARIANTS] = {{0}};
    float logits[N_WORDS];
    struct outcome outcome;
    struct reader reader;

    if (!reader_open(p->run->vlm, p->run->options->kernels, &reader, failure))
        return false;
    struct exam_item *item = dialogue_draw(p->run, &reader, 0, failure);
    bool ok = item != NULL;
    for (size_t v = 0; v < N_VARIANTS && ok; v++)
        ok = open_talk(&variants[v], &reader, &talks[v], failure) &&
             try_variant(&variants[v], &talks[v], item, logits, &outcome, failure);
    for (size_t v = 0; v < N_VARIANTS; v++)
        talks[v].counts_rows = false;
    ok = ok && talks_measure_time(talks, N_VARIANTS, times, failure);
    for (size_t v = 0; v < N_VARIANTS; v++)
        talk_close(&talks[v]);
    free(item);
    reader_close(&reader);
    return ok;
}

static bool add_variant(const struct pitfalls *p, size_t v, const struct talk_time *time,
                        uint8_t *hits)
{
    const double n_cells = (double)p->run->options->grid * (double)p->run->options->grid;
    double kl = 0.0, rows = 0.0, pages = 0.0;

    for (size_t i = 0; i < p->n_items; i++) {
        const struct outcome *o = &p->outcomes[i * N_VARIANTS + v];
        hits[i] = o->right;
        kl += o->kl;
        rows += o->rows;
        pages += o->page_bytes;
    }
    const double n = (double)p->n_items;
    struct row *row = dialogue_add(p->run, "pitfalls", variants[v].name, variants[v].pitfall, hits,
                                   p->n_items, true);
    if (!row)
        return false;
    row->kl = kl / n;
    row->rows = rows / n;
    row->page_bytes_per_token = pages / n / n_cells;
    row->attention_us = time->attention_us;
    row->step_ms = time->step_ms;
    const struct row *whole = rows_find(p->run->table, "pitfalls", variants[0].name, 0.0);
    if (v > 0 && whole)
        rows_pair(row, whole);
    return true;
}

/* Pitfalls 1, 3 and 4: variants of what is done to one picture. */
static bool run_variants(struct dialogue_run *run, struct failure *failure)
{
    struct pitfalls p = {.run = run, .n_items = ITEMS_PER_DIALOGUE * run->options->n_dialogues};
    struct talk_time times[N_VARIANTS];
    uint8_t *hits = malloc(p.n_items);

    p.outcomes = calloc(p.n_items * N_VARIANTS, sizeof(*p.outcomes));
    bool ok = p.outcomes && hits;

    if (!ok)
        fail_with(failure, "out of memory");
    ok = ok && dialogue_lanes(run, p.n_items, pitfalls_job, &p, failure) &&
         time_variants(&p, times, failure);
    for (size_t v = 0; v < N_VARIANTS && ok; v++)
        ok = add_variant(&p, v, &times[v], hits) || fail_with(failure, "out of memory");
    free(p.outcomes);
    free(hits);
    return ok;
}

/* Bytes of a token by the formula: codes alone, or with the parameters that decode them. */
static double planned_bytes(const struct dialogue_run *run, kvc_format format, bool codes_alone)
{
    const struct model_shape *s = &run->vlm->model.shape;
    const kvc_plan_model model = {.struct_size = sizeof(model),
                                  .n_layers = (int32_t)s->n_layers,
                                  .n_heads = (int32_t)s->n_heads,
                                  .n_kv_heads = (int32_t)s->n_kv_heads,
                                  .head_dim_k = (int32_t)s->head_dim,
                                  .head_dim_v = (int32_t)s->head_dim};
    kvc_plan_profile profile;
    double bytes = NAN;

    kvc_plan_profile_default(&profile);
    profile.k = profile.v = codes_alone ? KVC_F16 : format;
    if (kvc_plan_bytes(&model, &profile, &bytes) != KVC_OK)
        return NAN;
    if (codes_alone)
        bytes /= format == KVC_INT8 ? 2.0 : format == KVC_INT4 ? 4.0 : 1.0;
    return bytes;
}

/* A dialogue whose pictures are sealed whole. */
static bool fill_pool(struct dialogue_run *run, struct reader *reader, kvc_format format,
                      double *per_token, double *peak, struct failure *failure)
{
    struct talk_params params;
    struct talk talk;
    bool right, ok = true;

    talk_params_default(&params);
    params.hold = true;
    params.precision.k = params.precision.v = format;
    if (!talk_open(reader, &params, &talk, failure))
        return false;
    for (size_t i = 0; i < SCALES_IMAGES && ok; i++) {
        struct exam_item *item = dialogue_draw(run, reader, i, failure);
        ok = item && talk_see(&talk, item->picture.grid, failure) &&
             talk_compress(&talk, NULL, NULL, NULL, failure) &&
             talk_ask(&talk, &item->first, &right, failure);
        free(item);
    }
    *per_token = (double)talk_used_bytes(&talk) / (double)kvc_seq_n_tokens(talk.cache, talk.seq);
    *peak = (double)talk.peak_bytes;
    talk_close(&talk);
    return ok;
}

/* Pitfall 2. cache_bytes_per_token is what a formula says: "wrong" of the codes alone, "right" of
 * codes and scales; pool_bytes_per_token and peak_cache_bytes are what the cache uses. */
static bool run_scales(struct dialogue_run *run, struct failure *failure)
{
    static const char *const names[][2] = {{"scales f16", NULL},
                                           {"scales int8 right", "scales int8 wrong"},
                                           {"scales int4 right", "scales int4 wrong"}};
    static const kvc_format formats[] = {KVC_F16, KVC_INT8, KVC_INT4};
    struct reader reader;
    bool ok = true;

    if (!reader_open(run->vlm, run->options->kernels, &reader, failure))
        return false;
    for (size_t f = 0; f < 3 && ok; f++) {
        double per_token = NAN, peak = NAN;
        ok = fill_pool(run, &reader, formats[f], &per_token, &peak, failure);
        for (int wrong = 0; wrong < 2 && ok && names[f][wrong]; wrong++) {
            struct row *row = dialogue_add(run, "pitfalls", names[f][wrong], 2.0, NULL, 0, false);
            if (!row) {
                ok = fail_with(failure, "out of memory");
                break;
            }
            row->cache_bytes_per_token = planned_bytes(run, formats[f], wrong == 1);
            row->pool_bytes_per_token = per_token;
            row->peak_cache_bytes = peak;
        }
    }
    reader_close(&reader);
    return ok;
}

/* Pitfall 5 from the late turns of "turns": means of their rows. */
static bool add_late(struct dialogue_run *run, const char *turns, const char *name)
{
    double accuracy = 0.0, kl = 0.0;
    size_t n = 0;

    for (int t = N_TURNS - LATE_TURNS + 1; t <= N_TURNS; t++) {
        const struct row *row = rows_find(run->table, "turns", turns, t);
        if (!row)
            return true;
        accuracy += row->accuracy / LATE_TURNS;
        kl += row->kl / LATE_TURNS;
        n += row->n;
    }
    struct row *row = dialogue_add(run, "pitfalls", name, 5.0, NULL, 0, false);
    if (!row)
        return false;
    row->n = n;
    row->accuracy = accuracy;
    row->kl = kl;
    return true;
}

static bool run_late(struct dialogue_run *run, struct failure *failure)
{
    return (add_late(run, "f16", "recent f16") &&
            add_late(run, "int4 recent 256", "recent right") &&
            add_late(run, "int4 recent 0", "recent wrong")) ||
           fail_with(failure, "out of memory");
}

bool dialogue_pitfalls(struct dialogue_run *run, struct failure *failure)
{
    /* first: the rows of an experiment follow each other */
    if (!rows_find(run->table, "turns", "f16", 1.0) && !dialogue_turns(run, failure))
        return false;
    return run_variants(run, failure) && run_scales(run, failure) && run_late(run, failure);
}
