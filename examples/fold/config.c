/* The settings of a fold as a YAML file of article 003: spec.process[] with a kv_smooth. */
#include "config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

/* No real config comes near. */
enum { MAX_BYTES = 1 << 20, MAX_PATTERNS = 4096 };

struct reader {
    yaml_document_t *document;
    struct fold_config *config;
    struct failure *failure;
};

static const char *text_of(const yaml_node_t *node)
{
    return node && node->type == YAML_SCALAR_NODE &&
                   strlen((const char *)node->data.scalar.value) == node->data.scalar.length
               ? (const char *)node->data.scalar.value
               : NULL;
}

/* What the entry of a mapping is for; false after a failure. */
typedef bool entry_fn(struct reader *r, const char *key, yaml_node_t *value);

/* Goes through a mapping whose keys are different texts. */
static bool each_entry(struct reader *r, yaml_node_t *node, const char *what, entry_fn *entry)
{
    if (!node || node->type != YAML_MAPPING_NODE)
        return fail_with(r->failure, "%s is no mapping", what);
    yaml_node_pair_t *const pairs = node->data.mapping.pairs.start;
    const size_t n = (size_t)(node->data.mapping.pairs.top - pairs);
    for (size_t i = 0; i < n; i++) {
        const char *key = text_of(yaml_document_get_node(r->document, pairs[i].key));
        if (!key)
            return fail_with(r->failure, "%s has a key that is no text", what);
        for (size_t j = 0; j < i; j++)
            if (strcmp(key, text_of(yaml_document_get_node(r->document, pairs[j].key))) == 0)
                return fail_with(r->failure, "%s has the key \"%.60s\" twice", what, key);
        if (!entry(r, key, yaml_document_get_node(r->document, pairs[i].value)))
            return false;
    }
    return true;
}

static bool ignore(struct reader *r, const char *place, const char *key)
{
    char *at = r->config->ignored;
    const size_t n = strlen(at);

    snprintf(at + n, sizeof(r->config->ignored) - n, "%s%s%.40s", n ? ", " : "", place, key);
    return true;
}

static bool read_factor(struct reader *r, const yaml_node_t *value)
{
    const char *text = text_of(value);
    char *end = NULL;
    const double factor = text ? strtod(text, &end) : NAN;

    if (!text || end == text || *end || !(factor > 0.0 && isfinite(factor)))
        return fail_with(r->failure, "smooth_factor must be a number greater than 0, not \"%.60s\"",
                         text ? text : "");
    r->config->factor = factor;
    return true;
}

static bool read_patterns(struct reader *r, const char *key, const yaml_node_t *value, char ***out,
                          size_t *n_out)
{
    if (!value || value->type != YAML_SEQUENCE_NODE)
        return fail_with(r->failure, "%s must be a list of patterns", key);
    const yaml_node_item_t *items = value->data.sequence.items.start;
    const size_t n = (size_t)(value->data.sequence.items.top - items);
    if (n > MAX_PATTERNS || (n == 0 && out == &r->config->include))
        return fail_with(r->failure, "%s has %zu patterns", key, n);
    *out = calloc(n + 1, sizeof(**out));
    if (!*out)
        return fail_with(r->failure, "out of memory");
    for (size_t i = 0; i < n; i++) {
        const char *text = text_of(yaml_document_get_node(r->document, items[i]));
        if (!text || !*text)
            return fail_with(r->failure, "%s has a pattern that is no text", key);
        (*out)[i] = strdup(text);
        if (!(*out)[i])
            return fail_with(r->failure, "out of memory");
        *n_out = i + 1;
    }
    return true;
}

static bool process_entry(struct reader *r, const char *key, yaml_node_t *value)
{
    struct fold_config *c = r->config;
    const char *text = text_of(value);

    if (strcmp(key, "type") == 0)
        return (text && strcmp(text, "kv_smooth") == 0) ||
               fail_with(r->failure, "a process of type \"%.60s\": only kv_smooth is known",
                         text ? text : "");
    if (strcmp(key, "smooth_factor") == 0)
        return read_factor(r, value);
    if (strcmp(key, "include") == 0)
        return read_patterns(r, key, value, &c->include, &c->n_include);
    if (strcmp(key, "exclude") == 0)
        return read_patterns(r, key, value, &c->exclude, &c->n_exclude);
    return fail_with(r->failure,
                     "unknown key \"%.60s\": a kv_smooth has type, smooth_factor, include and "
                     "exclude",
                     key);
}

static bool spec_entry(struct reader *r, const char *key, yaml_node_t *value)
{
    if (strcmp(key, "process") != 0)
        return ignore(r, "spec.", key);
    if (!value || value->type != YAML_SEQUENCE_NODE ||
        value->data.sequence.items.top - value->data.sequence.items.start != 1)
        return fail_with(r->failure, "spec.process must be a list with one process");
    return each_entry(r, yaml_document_get_node(r->document, *value->data.sequence.items.start),
                      "the process", process_entry);
}

/* Whether a mapping, already gone through, has a key. */
static bool has_key(struct reader *r, const yaml_node_t *node, const char *key)
{
    const yaml_node_pair_t *pair = node->data.mapping.pairs.start;

    for (; pair < node->data.mapping.pairs.top; pair++)
        if (strcmp(text_of(yaml_document_get_node(r->document, pair->key)), key) == 0)
            return true;
    return false;
}

static bool root_entry(struct reader *r, const char *key, yaml_node_t *value)
{
    const char *text = text_of(value);

    if (strcmp(key, "apiversion") == 0)
        return (text && strcmp(text, "modelslim_v1") == 0) ||
               fail_with(r->failure, "apiversion \"%.60s\": only modelslim_v1 is known",
                         text ? text : "");
    if (strcmp(key, "spec") != 0)
        return ignore(r, "", key);
    return each_entry(r, value, "spec", spec_entry) &&
           (has_key(r, value, "process") || fail_with(r->failure, "spec.process is missing"));
}

static bool read_document(struct reader *r)
{
    yaml_node_t *root = yaml_document_get_root_node(r->document);

    if (!root)
        return fail_with(r->failure, "the file is empty");
    return each_entry(r, root, "the file", root_entry) &&
           (has_key(r, root, "spec") || fail_with(r->failure, "spec is missing"));
}

bool fold_config_parse(const unsigned char *text, size_t size, struct fold_config *out,
                       struct failure *failure)
{
    yaml_parser_t parser;
    yaml_document_t document;
    struct reader r = {.document = &document, .config = out, .failure = failure};

    *out = (struct fold_config){.factor = 1.0};
    if (size > MAX_BYTES)
        return fail_with(failure, "the file is larger than %d bytes", MAX_BYTES);
    if (!yaml_parser_initialize(&parser))
        return fail_with(failure, "out of memory");
    yaml_parser_set_input_string(&parser, text, size);
    bool ok = yaml_parser_load(&parser, &document);
    if (ok) {
        ok = read_document(&r);
        yaml_document_delete(&document);
    } else {
        fail_with(failure, "line %zu: %.150s", parser.problem_mark.line + 1,
                  parser.problem ? parser.problem : "no YAML");
    }
    yaml_parser_delete(&parser);
    if (!ok)
        fold_config_free(out);
    return ok;
}

static void free_patterns(char **patterns, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(patterns[i]);
    free((void *)patterns);
}

void fold_config_free(struct fold_config *config)
{
    free_patterns(config->include, config->n_include);
    free_patterns(config->exclude, config->n_exclude);
    *config = (struct fold_config){0};
}
