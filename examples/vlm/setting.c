/* Settings: ways to compress the picture in a cache before a question about it is read. */
#include "setting.h"

/* Small: text lies anywhere. */
static const struct soft_weights soft_default = {
    .temperature = 0.7f, .centre = 0.02f, .texture = 0.05f};

const char *score_name(enum score_kind kind)
{
    static const char *const names[N_SCORES] = {
        [SCORE_ARTICLE] = "article", [SCORE_SOFT] = "soft",     [SCORE_LAST] = "last",
        [SCORE_MIDDLE] = "middle",   [SCORE_ALL] = "all",       [SCORE_LEARNED] = "learned",
        [SCORE_TEXTURE] = "texture", [SCORE_CENTRE] = "centre", [SCORE_RANDOM] = "random"};

    return names[kind];
}

bool soft_equal(const struct soft_weights *a, const struct soft_weights *b)
{
    const float differences[] = {a->temperature - b->temperature, a->centre - b->centre,
                                 a->texture - b->texture};

    for (int i = 0; i < 3; i++)
        if (differences[i] < 0.0f || differences[i] > 0.0f)
            return false;
    return true;
}

void setting_default(enum score_kind score, struct setting *out)
{
    *out = (struct setting){
        .name = score_name(score), .score = score, .soft = soft_default, .ask_first = true};
    kvc_policy_default(&out->policy);
    out->policy.set_precision = true;
    out->policy.precision.k = out->policy.precision.v = KVC_F16;
    out->policy.source = KVC_SOURCE_PROBES;
    switch (score) {
    case SCORE_ARTICLE:
        out->policy.layers = KVC_LAYERS_LAST;
        out->policy.last_layers = ARTICLE_LAYERS;
        break;
    case SCORE_LAST:
        out->policy.layers = KVC_LAYERS_LAST;
        out->policy.last_layers = 1;
        break;
    case SCORE_MIDDLE: out->policy.layers = KVC_LAYERS_MIDDLE; break;
    case SCORE_ALL: out->policy.layers = KVC_LAYERS_ALL; break;
    default: out->policy.source = KVC_SOURCE_CALLER; break;
    }
}
