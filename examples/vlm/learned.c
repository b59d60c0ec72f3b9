/* A scorer that sees only the patch: logistic regression on the rows of the stem. */
#include "learned.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvc/score.h>

#include "random.h"

enum {
    N_PICTURES = 96,
    N_EPOCHS = 12,
    MAX_ASKED = 128,
    ALL_KINDS = (1 << N_QUESTION_KINDS) - 1,
    FOR_LABELS = 3000,
    FOR_ORDER
};

static const float first_rate = 0.05f; /* of a step; falls to 0 along a line */
static const float decay = 1e-4f;

struct lesson_set {
    size_t n, dim, n_positive;
    float *x;                        /* [n][dim], standardized */
    uint8_t *labels;                 /* [n] */
    float *mean, *inv_std, *weights; /* [dim] */
    float bias;
};

/* Which patches any question looks at. Count questions look at all things, so of scenes these are
 * the things, of screens the fields. */
static void label_cells(uint64_t seed, const struct exam *exam, const struct picture *picture,
                        struct question *questions, uint8_t *labels)
{
    const int n_cells = picture->grid * picture->grid;
    const int n =
        questions_ask(seed, picture, (unsigned)ALL_KINDS, exam->margin, questions, MAX_ASKED);

    memset(labels, 0, (size_t)n_cells);
    for (int q = 0; q < n; q++)
        for (int i = 0; i < questions[q].n_words + questions[q].n_answer; i++)
            for (int cell = 0; cell < n_cells; cell++)
                labels[cell] |= questions[q].ground[i][cell] != 0;
}

static bool collect(const struct vlm *vlm, const char *kernels, const struct exam *exam,
                    struct lesson_set *set, struct failure *failure)
{
    struct exam_item *item = malloc(sizeof(*item));
    struct question *questions = malloc(MAX_ASKED * sizeof(*questions));
    struct draws draws = draws_of((uint64_t)exam->set, FOR_LABELS);
    struct reader reader;

    bool ok = item && questions;

    if (!ok)
        fail_with(failure, "out of memory");
    if (!ok || !reader_open(vlm, kernels, &reader, failure)) {
        free(item);
        free(questions);
        return false;
    }
    for (size_t i = 0; i < N_PICTURES; i++) {
        exam_item(exam, i, item);
        const int grid = item->picture.grid;
        const size_t n_cells = (size_t)grid * (size_t)grid;
        reader_encode(&reader, item->picture.rgb, grid);
        memcpy(set->x + set->n * set->dim, reader.rows, n_cells * set->dim * sizeof(float));
        label_cells(draw_bits(&draws), exam, &item->picture, questions, set->labels + set->n);
        for (size_t cell = 0; cell < n_cells; cell++)
            set->n_positive += set->labels[set->n + cell];
        set->n += n_cells;
    }
    reader_close(&reader);
    free(item);
    free(questions);
    return ok;
}

static void standardize(struct lesson_set *set)
{
    for (size_t c = 0; c < set->dim; c++) {
        double sum = 0.0, squares = 0.0;
        for (size_t i = 0; i < set->n; i++) {
            const double x = (double)set->x[i * set->dim + c];
            sum += x;
            squares += x * x;
        }
        const double mean = sum / (double)set->n;
        const double variance = squares / (double)set->n - mean * mean;
        set->mean[c] = (float)mean;
        set->inv_std[c] = (float)(1.0 / sqrt(variance > 1e-8 ? variance : 1e-8));
        for (size_t i = 0; i < set->n; i++)
            set->x[i * set->dim + c] = (set->x[i * set->dim + c] - set->mean[c]) * set->inv_std[c];
    }
}

/* Steps down the logistic loss, a patch at a time; patches that count are few and weigh more, so
 * that both classes weigh the same. */
static void descend(struct lesson_set *set)
{
    struct draws draws = draws_of(0, FOR_ORDER);
    const size_t n_steps = N_EPOCHS * set->n;
    const float n = (float)set->n, n_positive = (float)set->n_positive;
    const float weight[2] = {0.5f * n / (n - n_positive + 1.0f), 0.5f * n / (n_positive + 1.0f)};

    for (size_t step = 0; step < n_steps; step++) {
        const size_t i = (size_t)draw_below(&draws, (int)set->n);
        const float *x = set->x + i * set->dim;
        float z = set->bias;
        for (size_t c = 0; c < set->dim; c++)
            z += set->weights[c] * x[c];
        const float gap = 1.0f / (1.0f + expf(-z)) - (float)set->labels[i];
        const float rate = first_rate / (float)set->dim * (1.0f - (float)step / (float)n_steps);
        const float pull = rate * weight[set->labels[i]] * gap;
        for (size_t c = 0; c < set->dim; c++)
            set->weights[c] -= pull * x[c] + rate * decay * set->weights[c];
        set->bias -= pull;
    }
}

static bool encode(const struct lesson_set *set, void **bytes, size_t *n_bytes,
                   struct failure *failure)
{
    const kvc_scorer_desc desc = {.struct_size = sizeof(desc),
                                  .kind = KVC_SCORER_LINEAR,
                                  .activation = KVC_ACTIVATION_SIGMOID,
                                  .dtype = KVC_DTYPE_F32,
                                  .n_in = (int32_t)set->dim,
                                  .kernel = 1,
                                  .tag = "rows of the patch stem",
                                  .mean = set->mean,
                                  .inv_std = set->inv_std,
                                  .weights = set->weights,
                                  .bias = set->bias};
    kvc_status status = kvc_scorer_encode(&desc, NULL, 0, n_bytes);

    *bytes = status == KVC_OK ? malloc(*n_bytes) : NULL;
    if (status == KVC_OK && !*bytes)
        status = KVC_E_NOMEM;
    if (status == KVC_OK)
        status = kvc_scorer_encode(&desc, *bytes, *n_bytes, n_bytes);
    return status == KVC_OK ||
           fail_with(failure, "writing the learned scorer: %s", kvc_status_str(status));
}

bool learned_train(const struct vlm *vlm, const char *kernels, const struct exam *exam,
                   void **bytes, size_t *n_bytes, struct failure *failure)
{
    const size_t dim = vlm->model.shape.n_embd, n = (size_t)N_PICTURES * MAX_CELLS;
    struct lesson_set set = {.dim = dim,
                             .x = malloc(n * dim * sizeof(float)),
                             .labels = malloc(n),
                             .mean = malloc(3 * dim * sizeof(float))};

    *bytes = NULL;
    bool ok = set.x && set.labels && set.mean;

    if (!ok)
        fail_with(failure, "out of memory");
    if (ok) {
        set.inv_std = set.mean + dim;
        set.weights = set.inv_std + dim;
        memset(set.weights, 0, dim * sizeof(float));
        ok = collect(vlm, kernels, exam, &set, failure);
    }
    if (ok) {
        standardize(&set);
        descend(&set);
        ok = encode(&set, bytes, n_bytes, failure);
    }
    free(set.x);
    free(set.labels);
    free(set.mean);
    return ok;
}
