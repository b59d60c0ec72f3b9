/* How a cache stores K and V, by name: the presets of the library, and what can be changed of them.
 */
#ifndef ENGINE_RECIPES_H
#define ENGINE_RECIPES_H

#include <kvc/cache.h>

#include "calibration.h"
#include "failure.h"

struct recipe {
    char name[40]; /* as it was written */
    kvc_precision precision;
    uint32_t transform;
    bool has_mean, has_scale; /* of K, subtracted and divided by */
    bool online;              /* measured by the cache, even where there is a calibration */
    int32_t recent, sinks;    /* -1: those of the command */
    bool imm; /* K and V pass through the codes before the cache, which then is F16 */
    enum recipe_article {
        ARTICLE_NONE,
        ARTICLE_GLOBAL, /* one scale for K and one for V of a layer */
        ARTICLE_HEAD,   /* one a head, from all tokens */
        ARTICLE_WINDOW  /* one a head, from the newest 512: the function of article 002 */
    } article;
};

/* What a recipe may be, for people. */
extern const char recipe_help[];

bool recipe_parse(const char *text, struct recipe *out, struct failure *failure);

/* Sets the fields of a cache; mean and scale are of the calibration, which may have none. Then the
 * cache measures both or neither, so that a recipe with one of them alone is refused. */
bool recipe_apply(const struct recipe *recipe, const struct calibration *calibration,
                  kvc_cache_params *params, struct failure *failure);

#endif
