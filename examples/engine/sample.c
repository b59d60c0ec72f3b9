/* Chooses the next token from logits. */
#include "sample.h"

#include <math.h>
#include <stdlib.h>

struct choice {
    double weight;
    int32_t id;
};

struct sampler {
    size_t n;
    double temperature, top_p;
    uint64_t state;
    struct choice *choices; /* [n] */
};

int32_t sample_greedy(const float *logits, size_t n)
{
    size_t best = 0;

    for (size_t i = 1; i < n; i++)
        if (logits[i] > logits[best] || isnan(logits[best]))
            best = i;
    return isnan(logits[best]) ? 0 : (int32_t)best;
}

bool sampler_create(size_t n_vocab, double temperature, double top_p, uint64_t seed,
                    struct sampler **out, struct failure *failure)
{
    struct sampler *s = calloc(1, sizeof(*s));

    *out = NULL;
    if (s)
        s->choices = malloc(n_vocab * sizeof(*s->choices));
    if (!s || !s->choices) {
        sampler_destroy(s);
        return fail_with(failure, "out of memory");
    }
    s->n = n_vocab;
    s->temperature = temperature;
    s->top_p = top_p;
    s->state = seed;
    *out = s;
    return true;
}

void sampler_destroy(struct sampler *s)
{
    if (!s)
        return;
    free(s->choices);
    free(s);
}

/* splitmix64, as a number in [0, 1) */
static double uniform(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* Heaviest first; ids part equals, so that the order does not depend on qsort. */
static int compare_choices(const void *a, const void *b)
{
    const struct choice *x = a, *y = b;

    if (x->weight != y->weight)
        return x->weight > y->weight ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Weights relative to the best token; tokens that cannot be drawn are left out. */
static size_t weigh(struct sampler *s, const float *logits, double *sum)
{
    const double best = (double)logits[sample_greedy(logits, s->n)];
    size_t n = 0;

    *sum = 0.0;
    for (size_t i = 0; i < s->n; i++) {
        const double weight = exp(((double)logits[i] - best) / s->temperature);
        if (!(weight > 1e-12))
            continue;
        s->choices[n++] = (struct choice){weight, (int32_t)i};
        *sum += weight;
    }
    return n;
}

int32_t sampler_next(struct sampler *s, const float *logits)
{
    double sum, kept = 0.0;
    size_t n_kept = 0;

    if (!(s->temperature > 0.0))
        return sample_greedy(logits, s->n);
    const size_t n = weigh(s, logits, &sum);
    if (n == 0)
        return sample_greedy(logits, s->n);
    qsort(s->choices, n, sizeof(*s->choices), compare_choices);
    while (n_kept < n && (n_kept == 0 || kept < s->top_p * sum))
        kept += s->choices[n_kept++].weight;
    double left = uniform(&s->state) * kept;
    for (size_t i = 0; i + 1 < n_kept; i++) {
        left -= s->choices[i].weight;
        if (left < 0.0)
            return s->choices[i].id;
    }
    return s->choices[n_kept - 1].id;
}
