/* A gate over the life of a dialogue: how much of each image may go, and why. */
#include <kvc/kvc.h>
#include <math.h>
#include <stdio.h>

enum { N = 576 };

/* What happens: memory in use (percent of the budget) and the image that has just come. */
struct turn {
    const char *what;
    unsigned used;
    float spread; /* attention falls by exp(-1 / spread) from one patch to the next */
    float texture;
    size_t n_tokens;
};

static const struct turn turns[] = {
    {"photo, memory free", 10, 60.0f, 0.2f, N},
    {"photo, memory nearly full", 90, 60.0f, 0.2f, N},
    {"the same, a little freed", 70, 60.0f, 0.2f, N},
    {"the same, half freed", 50, 60.0f, 0.2f, N},
    {"small icon, nearly full", 90, 60.0f, 0.2f, 196},
    {"page of text, nearly full", 90, 3000.0f, 0.8f, N},
};

enum { TURNS = sizeof(turns) / sizeof(turns[0]) };

/* Entropy of such an attention over the visual tokens. */
static int entropy_of(const struct turn *t, float *entropy)
{
    float attention[N];
    for (size_t i = 0; i < t->n_tokens; i++)
        attention[i] = expf(-(float)i / t->spread);
    return kvc_entropy(attention, t->n_tokens, NULL, entropy) == KVC_OK;
}

int main(void)
{
    float rates[TURNS], levels[TURNS];
    kvc_gate gate;

    kvc_gate_reset(&gate);
    printf("%-26s %5s %6s %8s %6s %6s %6s %5s\n", "", "used", "level", "entropy", "guard", "dense",
           "rate", "keep");
    for (int i = 0; i < TURNS; i++) {
        kvc_gate_input input = {.struct_size = sizeof(input),
                                .used_bytes = turns[i].used,
                                .budget_bytes = 100,
                                .texture = turns[i].texture,
                                .n_tokens = turns[i].n_tokens};
        kvc_gate_terms t = {.struct_size = sizeof(t)};
        size_t keep;

        if (!entropy_of(&turns[i], &input.entropy) ||
            kvc_gate_update(&gate, NULL, &input, &t, &rates[i]) != KVC_OK ||
            kvc_keep_count(turns[i].n_tokens, rates[i], 64, &keep) != KVC_OK)
            return 1;
        levels[i] = t.level;
        printf("%-26s %4u%% %6.3f %8.3f %6.2f %6.2f %6.3f %5zu\n", turns[i].what, turns[i].used,
               (double)t.level, (double)t.entropy, (double)t.guard, (double)t.dense, (double)t.rate,
               keep);
    }

    /* Pressure raises the rate; inside the band the level stays, below it falls slowly; small
     * images stay whole, and dense text loses less than a photo. */
    const int right = rates[1] > rates[0] && levels[2] == levels[1] && levels[3] < levels[2] &&
                      levels[3] > 0.8f && rates[4] == 0.0f && rates[5] < rates[1];
    return right ? 0 : 1;
}
