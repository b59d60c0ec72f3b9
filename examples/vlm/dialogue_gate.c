/* Image after image in a fixed budget: the gate lets all of them in, and what that costs. */
#include <math.h>
#include <stdlib.h>

#include "dialogue_parts.h"

enum {
    MAX_TEXT = 2 * (MAX_QUESTION + MAX_ANSWER + 1), /* a question and its answer, with room */
    TEXT_BEFORE_COMPRESSION = MAX_QUESTION + 1
};

/* Attention that is spread over an image (an entropy of 0.95) takes little more than half of the
 * base: the rate goes from 0.35 to 0.67 as the cache fills, where the bounds of the gate are 0.2
 * and 0.7. */
static const float BASE_RATE = 1.0f;

/* Where the level jumps: below the default, since a compression needs room for its new pages beside
 * the old ones and the F16 pages that every sequence is sure of: above 0.8 it is too late. */
static const float HIGH_PRESSURE = 0.6f, LOW_PRESSURE = 0.4f;

enum gate_way {
    WITH_GATE,
    WHOLE,
    AMPLE, /* whole, in a cache that is large enough: what the model itself can do */
    N_WAYS
};

/* What happened at one image. */
struct gate_step {
    bool fits;     /* the image and its questions */
    bool has_back; /* a picture of the other kind came before */
    bool right, right_back;
    double pressure, rate, used_bytes, rows;
};

struct gate_trial {
    struct dialogue_run *run;
    kvc_policy policies[N_WAYS];
    struct gate_step *steps; /* [n_dialogues][GATE_IMAGES][N_WAYS] */
};

static struct gate_step *step_of(const struct gate_trial *trial, size_t d, size_t image, size_t way)
{
    return &trial->steps[(d * GATE_IMAGES + image) * N_WAYS + way];
}

/* The newest picture of the other kind, or NULL. */
static const struct exam_item *look_back(struct exam_item *const *items, size_t image)
{
    for (size_t i = image; i-- > 0;)
        if (items[i]->picture.kind != items[image]->picture.kind)
            return items[i];
    return NULL;
}

static bool take_step(struct talk *talk, const kvc_policy *policy, struct exam_item *const *items,
                      size_t image, struct gate_step *step, struct failure *failure)
{
    const struct exam_item *item = items[image], *back = look_back(items, image);
    const size_t n_cells = (size_t)item->picture.grid * (size_t)item->picture.grid;
    const int64_t first = kvc_seq_n_tokens(talk->cache, talk->seq) + 1;
    kvc_report report = {.struct_size = sizeof(report)};

    if (!talk_has_room(talk, n_cells + TEXT_BEFORE_COMPRESSION))
        return true;
    if (!talk_see(talk, item->picture.grid, failure))
        return false;
    if (!talk_compress_for(talk, &item->first, policy, &report, failure))
        return talk->is_full; /* then it does not fit, which is no failure */
    step->pressure = talk->pressure;
    step->rate = (double)report.visual_rate;
    if (!talk_has_room(talk, MAX_TEXT))
        return true;
    if (!talk_count_rows(talk, first, first + (int64_t)n_cells, &step->rows, failure) ||
        !talk_ask(talk, &item->first, &step->right, failure))
        return false;
    step->has_back = back != NULL;
    if (back && !talk_ask(talk, &back->second, &step->right_back, failure))
        return false;
    step->used_bytes = (double)talk_used_bytes(talk);
    step->fits = true;
    return true;
}

static bool take_steps(const struct gate_trial *trial, struct reader *reader, size_t d,
                       struct talk talks[N_WAYS], struct exam_item **items, struct failure *failure)
{
    bool goes_on[N_WAYS] = {true, true, true};

    for (size_t i = 0; i < GATE_IMAGES; i++) {
        /* each dialogue begins with another kind, so that no image number has kinds of its own */
        items[i] =
            dialogue_draw(trial->run, reader, d * GATE_IMAGES + (i + d) % GATE_IMAGES, failure);
        if (!items[i])
            return false;
        for (size_t w = 0; w < N_WAYS; w++) {
            struct gate_step *step = step_of(trial, d, i, w);
            if (goes_on[w] && !take_step(&talks[w], &trial->policies[w], items, i, step, failure))
                return false;
            goes_on[w] = step->fits;
        }
    }
    return true;
}

static bool gate_job(void *arg, struct reader *reader, size_t d, struct failure *failure)
{
    const struct gate_trial *trial = arg;
    const struct model_shape *s = &reader->vlm->model.shape;
    const size_t n_cells = (size_t)trial->run->options->grid * (size_t)trial->run->options->grid;
    const size_t spare =
        GATE_SPARE_IMAGES * n_cells * s->n_layers * s->n_kv_heads * s->head_dim * 2 * 2;
    struct exam_item *items[GATE_IMAGES] = {NULL};
    struct talk talks[N_WAYS] = {{0}};
    struct talk_params params;
    bool ok = true;

    talk_params_default(&params);
    params.hold = true;
    params.max_tokens = GATE_IMAGES * (1 + MAX_CELLS + 2 * MAX_TEXT);
    for (size_t w = 0; w < N_WAYS && ok; w++) {
        params.spare_bytes = w == AMPLE ? 0 : spare;
        ok = talk_open(reader, &params, &talks[w], failure);
    }
    ok = ok && take_steps(trial, reader, d, talks, items, failure);
    for (size_t w = 0; w < N_WAYS; w++)
        talk_close(&talks[w]);
    for (size_t i = 0; i < GATE_IMAGES; i++)
        free(items[i]);
    return ok;
}

/* Means over the dialogues in which an image fits. */
struct gate_figures {
    size_t n, n_back;
    uint8_t *hits, *hits_back;
    double pressure, rate, used_bytes, rows;
};

static void gather(const struct gate_trial *trial, size_t image, size_t way,
                   struct gate_figures *out)
{
    out->n = out->n_back = 0;
    out->pressure = out->rate = out->used_bytes = out->rows = 0.0;
    for (size_t d = 0; d < trial->run->options->n_dialogues; d++) {
        const struct gate_step *step = step_of(trial, d, image, way);
        if (!step->fits)
            continue;
        out->hits[out->n++] = step->right;
        if (step->has_back)
            out->hits_back[out->n_back++] = step->right_back;
        out->pressure += step->pressure;
        out->rate += step->rate;
        out->used_bytes += step->used_bytes;
        out->rows += step->rows;
    }
    const double n = (double)out->n;
    out->pressure /= n;
    out->rate /= n;
    out->used_bytes /= n;
    out->rows /= n;
}

static bool add_figure(struct dialogue_run *run, const char *name, double x, double value, size_t n)
{
    struct row *row = dialogue_add(run, "gate", name, x, NULL, 0, false);

    if (!row)
        return false;
    row->accuracy = value;
    row->n = n;
    return true;
}

static bool add_image(const struct gate_trial *trial, size_t image, size_t way,
                      struct gate_figures *f)
{
    static const char *const names[N_WAYS] = {"gate", "f16", "f16 ample"};
    static const char *const before[N_WAYS] = {"gate before", "f16 before", "f16 ample before"};
    struct dialogue_run *run = trial->run;
    const double x = (double)image + 1.0;

    gather(trial, image, way, f);
    if (f->n == 0)
        return true;
    struct row *row = dialogue_add(run, "gate", names[way], x, f->hits, f->n, false);
    if (!row)
        return false;
    row->rows = f->rows;
    row->peak_cache_bytes = f->used_bytes;
    if (f->n_back > 0 && !dialogue_add(run, "gate", before[way], x, f->hits_back, f->n_back, false))
        return false;
    return way != WITH_GATE || (add_figure(run, "pressure", x, f->pressure, f->n) &&
                                add_figure(run, "rate", x, f->rate, f->n));
}

static bool add_rows(const struct gate_trial *trial, struct failure *failure)
{
    const size_t n = trial->run->options->n_dialogues;
    struct gate_figures figures = {.hits = malloc(n), .hits_back = malloc(n)};
    bool ok = figures.hits && figures.hits_back;

    for (size_t w = 0; w < N_WAYS; w++)
        for (size_t i = 0; i < GATE_IMAGES && ok; i++)
            ok = add_image(trial, i, w, &figures);
    free(figures.hits);
    free(figures.hits_back);
    return ok || fail_with(failure, "out of memory");
}

bool dialogue_gate(struct dialogue_run *run, struct failure *failure)
{
    struct gate_trial trial = {.run = run};

    for (size_t w = 0; w < N_WAYS; w++) {
        kvc_policy_default(&trial.policies[w]);
        trial.policies[w].set_precision = true; /* F16: what is saved is saved by the gate */
        trial.policies[w].precision.k = trial.policies[w].precision.v = KVC_F16;
    }
    trial.policies[WITH_GATE].gate = true;
    trial.policies[WITH_GATE].visual_rate = BASE_RATE;
    trial.policies[WITH_GATE].gating.high = HIGH_PRESSURE;
    trial.policies[WITH_GATE].gating.low = LOW_PRESSURE;
    trial.steps = calloc(run->options->n_dialogues * GATE_IMAGES * N_WAYS, sizeof(*trial.steps));
    bool ok = trial.steps != NULL || fail_with(failure, "out of memory");
    ok = ok && dialogue_lanes(run, run->options->n_dialogues, gate_job, &trial, failure) &&
         add_rows(&trial, failure);
    free(trial.steps);
    return ok;
}
