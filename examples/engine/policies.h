/* Policies of the cache by name. */
#ifndef ENGINE_POLICIES_H
#define ENGINE_POLICIES_H

#include <kvc/policy.h>

#include "failure.h"

struct named_policy {
    char name[24];
    bool is_used; /* false: "none" */
    kvc_policy policy;
    float score_decay; /* for the cache, where the policy reads sums */
};

/*
 * "none"; a preset of the library; or, with "name:share" (0.5 if it is not given), policies that
 * keep that share of a context as rows of each layer and head: "window", the first and newest
 * tokens; "heavy", the first and newest and those with the most attention.
 */
bool policy_parse(const char *text, size_t n_context, struct named_policy *out,
                  struct failure *failure);

#endif
