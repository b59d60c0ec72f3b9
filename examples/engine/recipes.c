/* How a cache stores K and V, by name. */
#include "recipes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ONLINE_PAGES = 4 };

const char recipe_help[] =
    "A recipe is f16, int8, k6v4, int4, int4-raw (the presets of the library), k8v4 or k4v8,\n"
    "then any of\n"
    "  :plain                    no transforms\n"
    "  :-mean :-scale :-hk :-hv  without the mean, the scale, the rotation of K, that of V\n"
    "  :online                   mean and scale from the first pages, not from the calibration\n"
    "  :head :channel            what shares a scale, without transforms\n"
    "  :rN :sN                   N recent tokens and N sinks are exact\n"
    "  :imm                      all but the sinks is coded before any use, the newest tokens too\n"
    "  :global :perhead :window  one scale a layer, a head, a head's newest 512 tokens;\n"
    "                            everything is coded again for each call\n"
    "The last two lines are computed in an F16 cache: bytes a token and speed are those of it.\n";

/* What the library has no preset for. */
static bool other_widths(const char *name, kvc_precision *out)
{
    const bool k8v4 = strcmp(name, "k8v4") == 0;

    if (!k8v4 && strcmp(name, "k4v8") != 0)
        return false;
    *out = (kvc_precision){k8v4 ? KVC_INT8 : KVC_INT4, k8v4 ? KVC_INT4 : KVC_INT8, KVC_SCALE_TOKEN,
                           KVC_SCALE_TOKEN};
    return true;
}

static bool parse_name(const char *name, struct recipe *out)
{
    kvc_cache_params p;

    kvc_cache_params_default(&p);
    if (other_widths(name, &p.precision)) {
        p.transform = KVC_TRANSFORM_ROTATE_K | KVC_TRANSFORM_ROTATE_V;
        p.online_pages = ONLINE_PAGES;
    } else if (kvc_cache_params_preset(&p, name) != KVC_OK) {
        return false;
    }
    out->precision = p.precision;
    out->transform = p.transform;
    out->has_mean = out->has_scale = p.online_pages > 0;
    return true;
}

static void drop_transforms(struct recipe *recipe)
{
    recipe->transform = 0;
    recipe->has_mean = recipe->has_scale = false;
}

static bool parse_count(const char *text, int32_t *out)
{
    char *end;
    const long n = strtol(text, &end, 10);

    if (*text < '0' || *text > '9' || *end || n > 1000000)
        return false;
    *out = (int32_t)n;
    return true;
}

/* One way to store, whatever the preset was. */
static bool set_article(struct recipe *recipe, enum recipe_article article)
{
    kvc_precision *p = &recipe->precision;

    drop_transforms(recipe);
    recipe->article = article;
    p->k_scale = p->v_scale = KVC_SCALE_HEAD;
    return p->k == p->v && (p->k == KVC_INT8 || p->k == KVC_INT4);
}

/* Only what is there: a row must not claim to lack what it never had. */
static bool drop_step(const char *step, struct recipe *recipe)
{
    bool *const vector = strcmp(step, "mean") == 0    ? &recipe->has_mean
                         : strcmp(step, "scale") == 0 ? &recipe->has_scale
                                                      : NULL;
    const uint32_t rotation = strcmp(step, "hk") == 0   ? KVC_TRANSFORM_ROTATE_K
                              : strcmp(step, "hv") == 0 ? KVC_TRANSFORM_ROTATE_V
                                                        : 0;
    const bool is_there = vector ? *vector : (recipe->transform & rotation) != 0;

    if (vector)
        *vector = false;
    recipe->transform &= ~rotation;
    return is_there;
}

static bool parse_change(const char *text, struct recipe *recipe)
{
    static const char *const articles[] = {"", "global", "perhead", "window"};

    for (int i = 1; i < 4; i++)
        if (strcmp(text, articles[i]) == 0)
            return set_article(recipe, (enum recipe_article)i);
    if (strcmp(text, "plain") == 0)
        drop_transforms(recipe);
    else if (text[0] == '-')
        return drop_step(text + 1, recipe);
    else if (strcmp(text, "online") == 0)
        recipe->online = true;
    else if (strcmp(text, "imm") == 0)
        recipe->imm = true;
    else if (strcmp(text, "head") == 0 || strcmp(text, "channel") == 0) {
        drop_transforms(recipe);
        recipe->precision.k_scale = text[0] == 'h' ? KVC_SCALE_HEAD : KVC_SCALE_CHANNEL;
        recipe->precision.v_scale = text[0] == 'h' ? KVC_SCALE_HEAD : KVC_SCALE_TOKEN;
    } else {
        return (text[0] == 'r' && parse_count(text + 1, &recipe->recent)) ||
               (text[0] == 's' && parse_count(text + 1, &recipe->sinks));
    }
    return true;
}

bool recipe_parse(const char *text, struct recipe *out, struct failure *failure)
{
    char rest[sizeof(out->name)], *part = rest, *next;

    *out = (struct recipe){.recent = -1, .sinks = -1};
    if (strlen(text) >= sizeof(rest))
        return fail_with(failure, "\"%.40s...\" is too long for a recipe", text);
    memcpy(rest, text, strlen(text) + 1);
    memcpy(out->name, rest, sizeof(rest));
    next = strchr(rest, ':');
    if (next)
        *next++ = '\0';
    if (!parse_name(part, out))
        return fail_with(failure,
                         "\"%.40s\" is no format; f16, int8, int4, k6v4, int4-raw, k8v4 and k4v8 "
                         "are",
                         part);
    while ((part = next)) {
        next = strchr(part, ':');
        if (next)
            *next++ = '\0';
        if (!parse_change(part, out))
            return fail_with(failure, "\":%.20s\" does not fit %.40s", part, text);
    }
    if (out->imm && out->article != ARTICLE_NONE)
        return fail_with(failure, "%.40s codes everything already, without :imm", text);
    return true;
}

bool recipe_apply(const struct recipe *recipe, const struct calibration *calibration,
                  kvc_cache_params *params, struct failure *failure)
{
    const bool coded_before = recipe->imm || recipe->article != ARTICLE_NONE;
    const bool vectors = recipe->has_mean || recipe->has_scale;
    const bool calibrated = calibration && calibration->mean && !recipe->online;

    if (recipe->recent >= 0)
        params->recent_tokens = recipe->recent;
    if (recipe->sinks >= 0)
        params->sink_tokens = recipe->sinks;
    params->precision = recipe->precision;
    if (coded_before) {
        params->precision.k = params->precision.v = KVC_F16;
        return true;
    }
    if (!calibrated && recipe->has_mean != recipe->has_scale)
        return fail_with(failure, "%s: without a calibration, mean and scale are measured together",
                         recipe->name);
    params->transform = recipe->transform;
    if (calibrated && recipe->has_mean)
        params->k_mean = calibration->mean;
    if (calibrated && recipe->has_scale)
        params->k_scale = recipe->has_mean ? calibration->scale : calibration->whole_scale;
    params->online_pages = vectors && !calibrated ? ONLINE_PAGES : 0;
    return true;
}
