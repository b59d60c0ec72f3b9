/* smooth_units.c - which attentions of a model are smoothed, and what speaks against it. */
#include <string.h>

#include "smooth.h"

enum { MODULE_SIZE = 256 }; /* of the name of a module, with its 0 */

/* The messages of a selection, and the worst of them. */
struct report {
    kvc_smooth_message *messages;
    size_t max, n;
    kvc_status status;
};

static void append(char *text, size_t size, const char *more)
{
    const size_t n = strlen(text);
    for (size_t i = 0; n + i + 1 < size && more[i]; i++)
        text[n + i] = more[i];
}

/* Adds a message of up to four pieces; the last is NULL. The first error decides the status. */
static void say(struct report *report, kvc_smooth_message_kind kind, kvc_status status,
                const char *const *pieces)
{
    if (report->status == KVC_OK)
        report->status = status;
    if (report->n < report->max && report->messages) {
        kvc_smooth_message *m = &report->messages[report->n];
        *m = (kvc_smooth_message){.kind = kind, .is_error = status != KVC_OK};
        for (; *pieces; pieces++)
            append(m->text, sizeof(m->text), *pieces);
    }
    report->n++;
}

#define SAY(report, kind, status, ...)                                                             \
    say(report, kind, status, (const char *const[]){__VA_ARGS__, NULL})

/* Whether the names of the modules of a unit fit. */
static bool names_fit(const kvc_smooth_unit *unit)
{
    const size_t n = strlen(unit->attention_name), q = strlen(unit->q_name);
    const size_t k = strlen(unit->k_name), longest = q > k ? q : k;
    return n < MODULE_SIZE && longest < MODULE_SIZE && n + 1 + longest < MODULE_SIZE;
}

/* Whether no unit before this one is of its layer. */
static bool layer_is_new(const kvc_smooth_adapter *adapter, size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (adapter->units[j].layer == adapter->units[i].layer)
            return false;
    return true;
}

static void check_units(const kvc_smooth_adapter *adapter, const kvc_observation *observation,
                        struct report *report)
{
    for (size_t i = 0; i < adapter->n_units; i++) {
        const kvc_smooth_unit *u = &adapter->units[i];
        const char *name = u->attention_name ? u->attention_name : "a unit";
        if (!u->attention_name || !u->q_name || !u->k_name || !u->attention_name[0] ||
            !u->q_name[0] || !u->k_name[0])
            SAY(report, KVC_SMOOTH_UNIT_INVALID, KVC_E_ARG, name, " lacks a name");
        else if (!names_fit(u))
            SAY(report, KVC_SMOOTH_UNIT_INVALID, KVC_E_ARG, name, " has too long names");
        else if ((unsigned)u->type > KVC_SMOOTH_ROPE_NORM)
            SAY(report, KVC_SMOOTH_UNIT_INVALID, KVC_E_ARG, name, " is of an unknown type");
        else if (u->layer < 0 || (observation && u->layer >= observation->shape.n_layers))
            SAY(report, KVC_SMOOTH_UNIT_INVALID, KVC_E_ARG, name, " names a layer out of range");
        else if (!layer_is_new(adapter, i))
            SAY(report, KVC_SMOOTH_UNIT_INVALID, KVC_E_ARG, name,
                " names the layer of another unit");
    }
}

static void check_geometry(const kvc_smooth_adapter *adapter, const kvc_observation *observation,
                           struct report *report)
{
    const struct {
        int32_t value;
        const char *name;
    } fields[] = {{adapter->head_dim, "head_dim"},
                  {adapter->n_kv_heads, "n_kv_heads"},
                  {adapter->n_kv_groups, "n_kv_groups"}};
    const kvc_status before = report->status;

    for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++)
        if (fields[i].value < 1)
            SAY(report, KVC_SMOOTH_MISSING_GEOMETRY, KVC_E_UNSUPPORTED,
                "the model does not tell its ", fields[i].name);
    if (!observation || report->status != before)
        return;
    const kvc_observed_shape *s = &observation->shape;
    if (s->head_dim != adapter->head_dim || s->n_kv_heads != adapter->n_kv_heads ||
        s->n_heads / s->n_kv_heads != adapter->n_kv_groups)
        SAY(report, KVC_SMOOTH_NOT_OBSERVED, KVC_E_MISMATCH,
            "the observation is of heads of another shape");
}

static bool matches_any(const char *const *patterns, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (kvc_smooth_match(patterns[i], name))
            return true;
    return false;
}

static bool is_selected(const kvc_smooth_filter *filter, const char *name)
{
    return (filter->n_include == 0 || matches_any(filter->include, filter->n_include, name)) &&
           !matches_any(filter->exclude, filter->n_exclude, name);
}

static void check_patterns(const kvc_smooth_adapter *adapter, const char *const *patterns, size_t n,
                           struct report *report)
{
    for (size_t i = 0; i < n; i++) {
        bool used = strcmp(patterns[i], "*") == 0;
        for (size_t u = 0; u < adapter->n_units && !used; u++)
            used = adapter->units[u].attention_name &&
                   kvc_smooth_match(patterns[i], adapter->units[u].attention_name);
        if (!used)
            SAY(report, KVC_SMOOTH_UNMATCHED, KVC_OK, "no unit matches the pattern ", patterns[i]);
    }
}

static void check_module(const kvc_smooth_adapter *adapter, const kvc_smooth_unit *unit,
                         const char *child, struct report *report)
{
    char module[MODULE_SIZE] = "";
    append(module, sizeof(module), unit->attention_name);
    append(module, sizeof(module), ".");
    append(module, sizeof(module), child);
    if (adapter->has_weight && !adapter->has_weight(adapter->user, module))
        SAY(report, KVC_SMOOTH_MISSING_MODULE, KVC_E_UNSUPPORTED, module,
            " does not exist or has no weight");
}

static bool filter_ok(const kvc_smooth_filter *f)
{
    if (f->struct_size < sizeof(*f) || (!f->include && f->n_include > 0) ||
        (!f->exclude && f->n_exclude > 0))
        return false;
    for (size_t i = 0; i < f->n_include; i++)
        if (!f->include[i])
            return false;
    for (size_t i = 0; i < f->n_exclude; i++)
        if (!f->exclude[i])
            return false;
    return true;
}

kvc_status kvc_smooth_select(const kvc_smooth_adapter *adapter, const kvc_smooth_filter *filter,
                             const kvc_observation *observation, const kvc_smooth_options *options,
                             bool *selected, kvc_smooth_message *messages, size_t max_messages,
                             size_t *n_messages)
{
    static const kvc_smooth_filter all = {.struct_size = sizeof(all)};
    struct report report = {.messages = messages, .max = max_messages};

    filter = filter ? filter : &all;
    KVC_CHECK(adapter && adapter->struct_size >= sizeof(*adapter) && adapter->units &&
                  adapter->n_units >= 1 && selected && filter_ok(filter),
              KVC_E_ARG);
    memset(selected, 0, adapter->n_units * sizeof(*selected));
    check_units(adapter, observation, &report);
    check_geometry(adapter, observation, &report);
    check_patterns(adapter, filter->include, filter->n_include, &report);
    check_patterns(adapter, filter->exclude, filter->n_exclude, &report);
    for (size_t i = 0; i < adapter->n_units && report.status != KVC_E_ARG; i++) {
        const kvc_smooth_unit *unit = &adapter->units[i];
        if (!is_selected(filter, unit->attention_name))
            continue;
        selected[i] = true;
        check_module(adapter, unit, unit->q_name, &report);
        check_module(adapter, unit, unit->k_name, &report);
        if (observation && observation->counts[unit->layer].n_keys == 0)
            SAY(&report, KVC_SMOOTH_NOT_OBSERVED, KVC_E_MISMATCH, "no key was observed of ",
                unit->attention_name);
    }
    if (options && options->struct_size >= sizeof(*options) && options->factor > 1.0f)
        SAY(&report, KVC_SMOOTH_LARGE_FACTOR, KVC_OK, "a factor above 1 rarely helps");
    if (report.status != KVC_OK)
        memset(selected, 0, adapter->n_units * sizeof(*selected));
    if (n_messages)
        *n_messages = report.n;
    return report.status;
}
