/* Policies of the cache by name. */
#include "policies.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Chosen on the text of examples/fetch_models.sh: sets of their own for each head, and more newest
 * tokens than heavy hitters, lose least. */
static const double heavy_recent_share = 0.7; /* of the rows, whatever their scores */
static const float heavy_decay = 0.999f;      /* half in 693 queries */

static bool parse_share(const char *text, double *share)
{
    char *end;

    if (!text)
        return true;
    *share = strtod(text + 1, &end);
    return end != text + 1 && !*end && *share > 0.0 && *share <= 1.0;
}

bool policy_parse(const char *text, size_t n_context, struct named_policy *out,
                  struct failure *failure)
{
    const char *colon = strchr(text, ':');
    char name[16];
    double share = 0.5;

    snprintf(name, sizeof(name), "%.*s", (int)strcspn(text, ":"), text);
    snprintf(out->name, sizeof(out->name), "%s", text);
    out->is_used = strcmp(text, "none") != 0;
    out->score_decay = 1.0f;
    kvc_policy_default(&out->policy);
    if (!out->is_used || kvc_policy_preset(text, &out->policy) == KVC_OK)
        return true;
    const bool is_heavy = strcmp(name, "heavy") == 0;
    if (!is_heavy && strcmp(name, "window") != 0)
        return fail_with(failure,
                         "\"%.40s\" is no policy; none, window, heavy, light, balanced, "
                         "aggressive and extreme are",
                         text);
    if (!parse_share(colon, &share) || share * (double)n_context < 1.0)
        return fail_with(failure, "\"%.40s\": the share of the rows must be above 0, at most 1",
                         text);
    out->policy.max_rows = (int32_t)(share * (double)n_context);
    out->policy.source = KVC_SOURCE_AGE;
    if (is_heavy) {
        out->policy.source = KVC_SOURCE_SUMS;
        out->policy.scope = KVC_SCOPE_HEAD;
        out->policy.last_tokens = (int32_t)(heavy_recent_share * out->policy.max_rows);
        out->score_decay = heavy_decay;
    }
    return true;
}
