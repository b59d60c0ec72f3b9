/* The settings of a fold as a YAML file of article 003. */
#ifndef FOLD_CONFIG_H
#define FOLD_CONFIG_H

#include <stddef.h>

#include "failure.h"

/* Patterns are the config's own. */
struct fold_config {
    double factor;
    char **include, **exclude;
    size_t n_include, n_exclude;
    char ignored[128]; /* keys that say nothing about smoothing, "a, b"; empty: none */
};

/*
 * Reads a document with one process of type kv_smooth. Keys of the process that are not known are
 * an error; keys around it are ignored and told. What is not given is as in the article: factor 1,
 * include all. After a failure *out is empty.
 */
bool fold_config_parse(const unsigned char *text, size_t size, struct fold_config *out,
                       struct failure *failure);
void fold_config_free(struct fold_config *config);

#endif
