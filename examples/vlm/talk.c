/* A dialogue on one cache: images, questions, answers, and the bytes in use on the way. */
#include "talk.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "sample.h"

enum {
    IMAGE_TOKENS = 1 + MAX_CELLS,
    /* An image with the questions that may come before it is compressed. */
    HOLD_TOKENS = IMAGE_TOKENS + 6 * (MAX_QUESTION + MAX_ANSWER + 1),
    MAX_READ = 64, /* words of a call */
    N_TIMED = 32,  /* steps of a repeat */
    N_REPEATS = 15 /* odd: the median is one of them */
};

void talk_params_default(struct talk_params *out)
{
    *out = (struct talk_params){.precision = {KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN},
                                .sink_tokens = N_PREFIX,
                                .max_tokens = 4096};
}

/* Room for everything as F16, for a compression's new pages beside the old ones, and for slabs of
 * several sizes of pages. */
static kvc_status ample_budget(const kvc_cache_params *params, size_t *bytes)
{
    kvc_cache_params p = *params;

    p.precision.k = p.precision.v = KVC_F16;
    const kvc_status status = kvc_cache_full_budget(&p, bytes);
    *bytes += *bytes / 2 + ((size_t)4 << 20);
    return status;
}

static kvc_status create_cache(const struct reader *reader, const struct talk_params *params,
                               kvc_cache **out)
{
    kvc_cache_params p;

    model_cache_params(&reader->vlm->model.shape, &p);
    p.max_sequences = params->spare_bytes ? 1 : 2; /* the second one is for measuring time */
    p.max_tokens = p.max_sequences * params->max_tokens;
    p.max_append = HOLD_TOKENS;
    p.max_hold_tokens = params->hold ? HOLD_TOKENS : 0;
    p.probe_rows = PROBE_ROWS;
    p.precision = params->precision;
    p.recent_tokens = params->recent_tokens;
    p.sink_tokens = params->sink_tokens;
    p.max_merge_tokens = params->merges ? MAX_CELLS : 0;
    kvc_status status = params->spare_bytes ? kvc_cache_min_budget(&p, &p.budget_bytes)
                                            : ample_budget(&p, &p.budget_bytes);
    p.budget_bytes += params->spare_bytes;
    if (status == KVC_OK)
        status = kvc_cache_create(reader->ctx, &p, out);
    return status;
}

bool talk_open(struct reader *reader, const struct talk_params *params, struct talk *out,
               struct failure *failure)
{
    static const int32_t begin[] = {WORD_BOS};

    memset(out, 0, sizeof(*out));
    out->reader = reader;
    out->hold = params->hold;
    kvc_status status = create_cache(reader, params, &out->cache);
    if (status == KVC_OK)
        status = kvc_seq_create(out->cache, &out->seq);
    if (status == KVC_OK && out->hold)
        status = kvc_seq_hold(out->cache, out->seq);
    const bool ok = status == KVC_OK
                        ? talk_read(out, begin, 1, failure)
                        : fail_with(failure, "cannot create a cache: %s", kvc_status_str(status));
    if (!ok)
        talk_close(out);
    return ok;
}

void talk_close(struct talk *talk)
{
    kvc_cache_destroy(talk->cache);
    talk->cache = NULL;
}

size_t talk_used_bytes(const struct talk *talk)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};

    return kvc_cache_stats(talk->cache, &stats) == KVC_OK ? stats.used_bytes : 0;
}

static int32_t n_layers(const struct talk *talk)
{
    return (int32_t)talk->reader->vlm->model.shape.n_layers;
}

static int32_t n_kv_heads(const struct talk *talk)
{
    return (int32_t)talk->reader->vlm->model.shape.n_kv_heads;
}

size_t talk_page_bytes(const struct talk *talk)
{
    kvc_page_info info = {.struct_size = sizeof(info)};
    size_t bytes = 0;

    for (int32_t l = 0; l < n_layers(talk); l++)
        for (int32_t h = 0; h < n_kv_heads(talk); h++)
            for (int64_t p = 0; p < kvc_seq_n_pages(talk->cache, talk->seq, l, h); p++)
                if (kvc_seq_read_page(talk->cache, talk->seq, l, h, p, &info, NULL, NULL, 0) ==
                    KVC_OK)
                    bytes += info.n_bytes;
    return bytes;
}

bool talk_count_rows(const struct talk *talk, int64_t first, int64_t last, double *out,
                     struct failure *failure)
{
    const size_t max = (size_t)kvc_seq_n_tokens(talk->cache, talk->seq);
    int64_t *ordinals = malloc((max + 1) * sizeof(*ordinals));
    size_t sum = 0, n = 0;

    if (!ordinals)
        return fail_with(failure, "out of memory");
    for (int32_t l = 0; l < n_layers(talk); l++)
        for (int32_t h = 0; h < n_kv_heads(talk); h++) {
            if (kvc_seq_read_rows(talk->cache, talk->seq, l, h, max, ordinals, NULL, NULL, NULL,
                                  &n) != KVC_OK)
                n = 0;
            for (size_t i = 0; i < n; i++)
                sum += ordinals[i] >= first && ordinals[i] < last;
        }
    free(ordinals);
    *out = (double)sum / (double)(n_layers(talk) * n_kv_heads(talk));
    return true;
}

static void watch_peak(struct talk *talk)
{
    const size_t used = talk_used_bytes(talk);

    if (used > talk->peak_bytes)
        talk->peak_bytes = used;
}

bool talk_has_room(struct talk *talk, size_t n)
{
    const int64_t before = kvc_seq_n_tokens(talk->cache, talk->seq);

    return kvc_tokens_add(talk->cache, talk->seq, NULL, n) == KVC_OK &&
           kvc_seq_truncate(talk->cache, talk->seq, before) == KVC_OK;
}

bool talk_see(struct talk *talk, int grid, struct failure *failure)
{
    const bool ok = reader_see(talk->reader, talk->cache, talk->seq, talk->n_images, grid, failure);

    talk->n_images++;
    watch_peak(talk);
    return ok;
}

static bool read_counting_rows(struct talk *talk, const int32_t *words, size_t n,
                               struct failure *failure)
{
    struct reader *r = talk->reader;
    const int32_t at = (int32_t)kvc_seq_n_rows(talk->cache, talk->seq, 0, 0);
    kvc_token facts[MAX_READ];
    const struct forward_item item = {.cache = talk->cache,
                                      .seq = talk->seq,
                                      .tokens = words,
                                      .facts = facts,
                                      .n = n,
                                      .n_skip = n - 1};

    for (int32_t i = 0; i < (int32_t)n; i++)
        facts[i] = (kvc_token){.t = at + i,
                               .y = at + i,
                               .x = at + i,
                               .image = -1,
                               .row = -1,
                               .col = -1,
                               .kind = KVC_TOKEN_TEXT};
    return forward_run(r->forward, &item, 1, r->logits, failure);
}

bool talk_read(struct talk *talk, const int32_t *words, size_t n, struct failure *failure)
{
    if (n == 0 || n > MAX_READ)
        return fail_with(failure, "%zu words at a time are not 1 to %d", n, MAX_READ);
    const bool ok = talk->counts_rows
                        ? read_counting_rows(talk, words, n, failure)
                        : reader_read(talk->reader, talk->cache, talk->seq, words, n, failure);
    watch_peak(talk);
    return ok;
}

/* As the gate sees it. */
static double pressure_of(const struct talk *talk)
{
    kvc_stats s = {.struct_size = sizeof(s)};

    if (kvc_cache_stats(talk->cache, &s) != KVC_OK)
        return NAN;
    const size_t usable = s.budget_bytes - s.probe_bytes - s.scratch_bytes - s.overhead_bytes;
    return (double)s.used_bytes / (double)usable;
}

bool talk_compress(struct talk *talk, const kvc_policy *policy, kvc_report *report, kvc_map *map,
                   struct failure *failure)
{
    talk->pressure = pressure_of(talk);
    kvc_status status = kvc_cache_compress(talk->cache, talk->seq, policy, report, map);
    talk->is_full = status == KVC_E_FULL;
    watch_peak(talk);
    if (status == KVC_OK && talk->hold)
        status = kvc_seq_hold(talk->cache, talk->seq);
    return status == KVC_OK || fail_with(failure, "cannot compress: %s", kvc_status_str(status));
}

bool talk_take_back(struct talk *talk, int64_t n_tokens, struct failure *failure)
{
    const kvc_status status = kvc_seq_truncate(talk->cache, talk->seq, n_tokens);

    return status == KVC_OK || fail_with(failure, "cannot truncate: %s", kvc_status_str(status));
}

bool talk_compress_for(struct talk *talk, const struct question *question, const kvc_policy *policy,
                       kvc_report *report, struct failure *failure)
{
    const int64_t before = kvc_seq_n_tokens(talk->cache, talk->seq);
    kvc_policy p = *policy;

    p.last_tokens = question->n_words;
    if (!talk_read(talk, question->words, (size_t)question->n_words, failure) ||
        !talk_compress(talk, &p, report, NULL, failure))
        return false;
    return talk_take_back(talk, before, failure);
}

bool talk_answer(struct talk *talk, const struct question *question, bool *right,
                 struct failure *failure)
{
    const size_t n_vocab = talk->reader->vlm->model.shape.n_vocab;
    int32_t word = WORD_PAD;

    *right = true;
    for (int i = 0; word != WORD_STOP; i++) {
        /* a model that does not stop is stopped */
        word = i == MAX_ANSWER ? WORD_STOP : sample_greedy(talk->reader->logits, n_vocab);
        *right = *right && i < question->n_answer && word == question->answer[i];
        if (!talk_read(talk, &word, 1, failure))
            return false;
    }
    return true;
}

bool talk_ask(struct talk *talk, const struct question *question, bool *right,
              struct failure *failure)
{
    return talk_read(talk, question->words, (size_t)question->n_words, failure) &&
           talk_answer(talk, question, right, failure);
}

bool talk_teach(struct talk *talk, const struct question *question, bool *right, float *logits,
                struct failure *failure)
{
    const size_t n_vocab = talk->reader->vlm->model.shape.n_vocab;

    if (!talk_read(talk, question->words, (size_t)question->n_words, failure))
        return false;
    if (logits)
        memcpy(logits, talk->reader->logits, n_vocab * sizeof(*logits));
    *right = true;
    for (int i = 0; i < question->n_answer; i++) {
        *right = *right && sample_greedy(talk->reader->logits, n_vocab) == question->answer[i];
        if (!talk_read(talk, &question->answer[i], 1, failure))
            return false;
    }
    return true;
}

static bool time_steps(struct talk *talk, struct talk_time *out, struct failure *failure)
{
    static const int32_t words[] = {WORD_HOW, WORD_MANY, WORD_OBJECTS, WORD_QUESTION};
    struct reader *r = talk->reader;
    kvc_seq fork;

    if (kvc_seq_fork(talk->cache, talk->seq, &fork) != KVC_OK)
        return fail_with(failure, "cannot fork a sequence");
    bool ok = true;
    const double attention = forward_attend_seconds(r->forward), start = seconds_now();
    for (size_t i = 0; i < N_TIMED && ok; i++)
        ok = reader_read(r, talk->cache, fork, &words[i % 4], 1, failure);
    out->step_ms = (seconds_now() - start) * 1e3 / N_TIMED;
    out->attention_us = (forward_attend_seconds(r->forward) - attention) * 1e6 / N_TIMED;
    kvc_seq_destroy(talk->cache, fork);
    return ok;
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double values[N_REPEATS])
{
    qsort(values, N_REPEATS, sizeof(*values), compare_doubles);
    return values[N_REPEATS / 2];
}

bool talks_measure_time(struct talk *talks, size_t n_talks, struct talk_time *out,
                        struct failure *failure)
{
    struct times {
        double attention[N_REPEATS], step[N_REPEATS];
    } *times = calloc(n_talks, sizeof(*times));
    bool ok = times != NULL;

    if (!ok)
        fail_with(failure, "out of memory");

    for (size_t i = 0; i < N_REPEATS && ok; i++)
        for (size_t t = 0; t < n_talks && ok; t++) {
            struct talk_time one = {0};
            ok = time_steps(&talks[t], &one, failure);
            times[t].attention[i] = one.attention_us;
            times[t].step[i] = one.step_ms;
        }
    for (size_t t = 0; t < n_talks && ok; t++)
        out[t] = (struct talk_time){.attention_us = median(times[t].attention),
                                    .step_ms = median(times[t].step)};
    free(times);
    return ok;
}

static double log_sum_exp(const float *logits, size_t n)
{
    double largest = (double)logits[0], sum = 0.0;

    for (size_t i = 1; i < n; i++)
        largest = fmax(largest, (double)logits[i]);
    for (size_t i = 0; i < n; i++)
        sum += exp((double)logits[i] - largest);
    return largest + log(sum);
}

double logits_kl(const float *reference, const float *logits, size_t n)
{
    const double a = log_sum_exp(reference, n), b = log_sum_exp(logits, n);
    double kl = 0.0;

    for (size_t i = 0; i < n; i++) {
        const double p = (double)reference[i] - a, q = (double)logits[i] - b;
        kl += exp(p) * (p - q);
    }
    return fmax(kl, 0.0); /* rounding may leave -1e-17 */
}
