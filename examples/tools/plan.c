/* plan.c - kvc-plan: what a token costs under each profile, and how many fit. */
#include <kvc/plan.h>
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "plan_fill.h"
#include "plan_model.h"

enum { DONE = 0, FAILED = 1, USAGE = 2 };

static const char *const names[] = {"f16",   "int8",     "int4",       "k6v4",   "int4-raw",
                                    "light", "balanced", "aggressive", "extreme"};

enum { N_PROFILES = sizeof(names) / sizeof(*names) };

/* As given; 0 and NULL: not given. */
struct options {
    const char *model, *budget_text, *memory_text, *overhead_text;
    uint64_t budget, memory, overhead; /* what the texts say */
    int64_t n_layers, n_heads, n_kv_heads, head_dim, head_dim_v, at;
    double n_params, weight_bits, visual_share;
    bool fill, json;
};

struct row {
    kvc_plan_profile profile;
    double bytes_per_token;
    int64_t tokens;
    uint64_t cache_bytes; /* of a cache filled with the tokens asked for */
};

struct plan {
    kvc_plan_model model;
    uint64_t weight_bytes; /* of the file; 0: there is none */
    uint64_t budget;
    struct row rows[N_PROFILES];
};

/* Bytes of a unit; 0 for what is none. */
static uint64_t unit_size(const char *unit)
{
    static const char letters[] = "KMGT";
    uint64_t size = 1;

    if (*unit == '\0' || strcmp(unit, "B") == 0)
        return 1;
    const char *letter = strchr(letters, *unit);
    const bool binary = unit[1] == 'i';
    if (!letter || strcmp(unit + 1 + binary, "B") != 0)
        return 0;
    for (const char *l = letters; l <= letter; l++)
        size *= binary ? 1024 : 1000;
    return size;
}

/* "6GiB", "1.5GB", "1000": digits, with a unit a fraction too; whole bytes. */
static bool parse_size(const char *text, uint64_t *out)
{
    uint64_t whole = 0;
    double fraction = 0.0, place = 1.0;
    const char *at = text;

    for (; *at >= '0' && *at <= '9'; at++)
        if (__builtin_mul_overflow(whole, UINT64_C(10), &whole) ||
            __builtin_add_overflow(whole, (uint64_t)(*at - '0'), &whole))
            return false;
    const bool has_whole = at > text, has_point = *at == '.';
    if (has_point)
        for (at++; *at >= '0' && *at <= '9'; at++)
            fraction += (*at - '0') * (place /= 10.0);
    const uint64_t unit = unit_size(at);
    if (!has_whole || unit == 0 || (has_point && (place == 1.0 || unit == 1)))
        return false;
    return !__builtin_mul_overflow(whole, unit, out) &&
           !__builtin_add_overflow(*out, (uint64_t)(fraction * (double)unit), out);
}

/* Keeps *out where the text is NULL. */
static bool read_size(const char *name, const char *text, uint64_t *out, struct failure *failure)
{
    return !text || parse_size(text, out) ||
           fail_with(failure, "--%s takes bytes or a size like 6GiB or 500MB, not \"%.60s\"", name,
                     text);
}

static bool read_sizes(struct options *o, struct failure *failure)
{
    return read_size("budget", o->budget_text, &o->budget, failure) &&
           read_size("memory", o->memory_text, &o->memory, failure) &&
           read_size("overhead", o->overhead_text, &o->overhead, failure);
}

/* "3.26 GiB"; returns text. */
static const char *size_text(double bytes, char text[32])
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    double size = bytes / 1024.0;
    size_t unit = 0;

    for (; size >= 1024.0 && unit + 1 < sizeof(units) / sizeof(*units); unit++)
        size /= 1024.0;
    snprintf(text, 32, "%.4g %s", size, units[unit]);
    return text;
}

/* What the options must and must not say together. */
static bool check_options(const struct options *o, struct failure *failure)
{
    const bool shape = o->n_layers || o->n_heads || o->n_kv_heads || o->head_dim || o->head_dim_v;
    const bool params = o->n_params > 0.0, bits = o->weight_bits > 0.0;

    if (o->model && shape)
        return fail_with(failure, "--model tells the shape; give one or the other");
    if (!o->model && !(o->n_layers && o->n_kv_heads && o->head_dim))
        return fail_with(failure, "--layers, --kv-heads and --head-dim are needed, or --model");
    if (shape && o->n_heads % o->n_kv_heads != 0)
        return fail_with(failure, "--heads is no multiple of --kv-heads");
    if (!o->budget_text == !o->memory_text)
        return fail_with(failure, "give either --budget or --memory");
    if (o->budget_text && (params || bits || o->overhead_text))
        return fail_with(failure, "--params, --weight-bits and --overhead go with --memory");
    if (params != bits || (o->memory_text && !o->model && !params))
        return fail_with(failure, "--memory needs --params and --weight-bits, or --model");
    if (o->fill && o->at == 0)
        return fail_with(failure, "--fill goes with --at");
    return true;
}

static bool fail_full(const struct options *o, double weight_bytes, struct failure *failure)
{
    char weights[32], overhead[64] = "", memory[32], size[32];

    if (o->overhead > 0)
        snprintf(overhead, sizeof(overhead), " and the overhead %s",
                 size_text((double)o->overhead, size));
    return fail_with(failure, "the weights take %s%s of %s; nothing is left",
                     size_text(weight_bytes, weights), overhead,
                     size_text((double)o->memory, memory));
}

static bool find_budget(const struct options *o, struct plan *plan, struct failure *failure)
{
    plan->budget = o->budget;
    if (o->budget_text)
        return true;
    const bool told = o->n_params > 0.0;
    const double n_weights = told ? o->n_params : (double)plan->weight_bytes;
    const double bits = told ? o->weight_bits : 8.0;
    const kvc_status status =
        kvc_plan_budget(o->memory, n_weights, bits, o->overhead, &plan->budget);
    if (status != KVC_OK)
        return fail_with(failure, "the budget: %s", kvc_status_str(status));
    return plan->budget > 0 || fail_full(o, n_weights * bits / 8.0, failure);
}

static bool find_model(const struct options *o, struct plan *plan, struct failure *failure)
{
    if (o->model)
        return plan_model_read(o->model, &plan->model, &plan->weight_bytes, failure);
    plan->model = (kvc_plan_model){
        .struct_size = sizeof(plan->model),
        .n_layers = (int32_t)o->n_layers,
        .n_heads = (int32_t)(o->n_heads ? o->n_heads : o->n_kv_heads),
        .n_kv_heads = (int32_t)o->n_kv_heads,
        .head_dim_k = (int32_t)o->head_dim,
        .head_dim_v = (int32_t)(o->head_dim_v ? o->head_dim_v : o->head_dim),
    };
    return true;
}

static bool fill_rows(const struct options *o, struct plan *plan, struct failure *failure)
{
    kvc_status status = KVC_OK;

    for (size_t i = 0; i < N_PROFILES && status == KVC_OK; i++) {
        struct row *row = &plan->rows[i];
        kvc_plan_profile_default(&row->profile);
        status = kvc_plan_profile_preset(names[i], &row->profile);
        row->profile.visual_share = o->visual_share;
        if (status == KVC_OK)
            status = kvc_plan_bytes(&plan->model, &row->profile, &row->bytes_per_token);
        if (status == KVC_OK)
            status = kvc_plan_tokens(&plan->model, &row->profile, plan->budget, &row->tokens);
    }
    return status == KVC_OK || fail_with(failure, "the model's shape: %s", kvc_status_str(status));
}

static bool fill_caches(const struct options *o, struct plan *plan, struct failure *failure)
{
    for (size_t i = 0; i < N_PROFILES && o->at > 0; i++)
        if (!plan_fill(&plan->model, &plan->rows[i].profile, o->at, o->fill,
                       &plan->rows[i].cache_bytes, failure))
            return false;
    return true;
}

static void print_json(const struct options *o, const struct plan *plan)
{
    printf("{\"budget_bytes\":%llu,\"rows\":[", (unsigned long long)plan->budget);
    for (size_t i = 0; i < N_PROFILES; i++) {
        const struct row *row = &plan->rows[i];
        printf("%s\n{\"profile\":\"%s\",\"bytes_per_token\":%.15g,\"tokens\":%lld,"
               "\"cache_bytes\":",
               i ? "," : "", row->profile.name, row->bytes_per_token, (long long)row->tokens);
        if (o->at > 0)
            printf("%llu}", (unsigned long long)row->cache_bytes);
        else
            printf("null}");
    }
    printf("\n]}\n");
}

static void print_notes(const struct options *o, const struct plan *plan)
{
    bool above = false;

    printf("\nRows only, on average: codes and parameters. Heavy: rows that stay F16.\n"
           "Rest: format of the other rows of K.%s\n",
           o->visual_share == 1.0 ? " Text is not pruned: see --visual-share." : "");
    if (o->at == 0)
        return;
    printf("Cache bytes: everything in use after %lld tokens, exact recent rows and tables "
           "included.\n",
           (long long)o->at);
    for (size_t i = 0; i < N_PROFILES; i++)
        above = above || plan->rows[i].cache_bytes > plan->budget;
    if (above)
        printf("*: more than the budget.\n");
}

static void print_table(const struct options *o, const struct plan *plan)
{
    static const char *const formats[] = {"F16", "INT8", "INT4", "INT6"};
    const kvc_plan_model *m = &plan->model;
    char size[32];

    printf("%d layers, %d KV heads, %d elements of K and %d of V; %.10g %% of the tokens are "
           "visual.\n",
           m->n_layers, m->n_kv_heads, m->head_dim_k, m->head_dim_v, 100.0 * o->visual_share);
    printf("Budget: %llu bytes (%s).\n\n", (unsigned long long)plan->budget,
           size_text((double)plan->budget, size));
    printf("%-10s %7s %7s %6s %6s %14s %8s %12s", "profile", "pruned", "rounds", "heavy", "rest",
           "bytes a token", "of F16", "tokens");
    printf(o->at > 0 ? " %16s\n" : "\n", "cache bytes");
    for (size_t i = 0; i < N_PROFILES; i++) {
        const struct row *row = &plan->rows[i];
        const kvc_plan_profile *p = &row->profile;
        printf("%-10s %5.0f %% %7d %4.0f %% %6s %14.1f %6.1f %% %12lld", p->name,
               100.0 * p->prune_rate, p->merge_rounds, 100.0 * p->heavy_share, formats[p->k],
               row->bytes_per_token, 100.0 * row->bytes_per_token / plan->rows[0].bytes_per_token,
               (long long)row->tokens);
        if (o->at > 0)
            printf(" %16llu%s", (unsigned long long)row->cache_bytes,
                   row->cache_bytes > plan->budget ? "*" : "");
        printf("\n");
    }
    print_notes(o, plan);
}

static int run(const struct options *o)
{
    struct plan plan = {0};
    struct failure failure;

    if (!find_model(o, &plan, &failure) || !find_budget(o, &plan, &failure) ||
        !fill_rows(o, &plan, &failure) || !fill_caches(o, &plan, &failure)) {
        fprintf(stderr, "kvc-plan: %s\n", failure.text);
        return FAILED;
    }
    if (o->json)
        print_json(o, &plan);
    else
        print_table(o, &plan);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "kvc-plan: cannot write to standard output\n");
        return FAILED;
    }
    return DONE;
}

int main(int argc, char **argv)
{
    struct options o = {.visual_share = 1.0};
    const struct arg args[] = {
        {"layers", ARG_INTEGER, &o.n_layers, "N", "layers of the model", 1, 65536},
        {"kv-heads", ARG_INTEGER, &o.n_kv_heads, "N", "heads of K and V", 1, 65536},
        {"heads", ARG_INTEGER, &o.n_heads, "N", "query heads (as --kv-heads)", 1, 65536},
        {"head-dim", ARG_INTEGER, &o.head_dim, "N", "elements of a head of K", 1, KVC_MAX_HEAD_DIM},
        {"head-dim-v", ARG_INTEGER, &o.head_dim_v, "N", "of V (as --head-dim)", 1,
         KVC_MAX_HEAD_DIM},
        {"model", ARG_TEXT, &o.model, "FILE", "all of these, and the weights, from a GGUF file", 0,
         0},
        {"budget", ARG_TEXT, &o.budget_text, "SIZE", "memory for K and V: bytes, 6GiB, 500MB", 0,
         0},
        {"memory", ARG_TEXT, &o.memory_text, "SIZE",
         "or: of the machine, less weights and overhead", 0, 0},
        {"params", ARG_REAL, &o.n_params, "N", "weights: 7e9 (those of --model)", 1, 1e15},
        {"weight-bits", ARG_REAL, &o.weight_bits, "B", "bits of a weight", 0.1, 64},
        {"overhead", ARG_TEXT, &o.overhead_text, "SIZE", "activations, buffers, driver (0)", 0, 0},
        {"visual-share", ARG_REAL, &o.visual_share, "V", "visual tokens of all tokens (1)", 0, 1},
        {"at", ARG_INTEGER, &o.at, "N", "all bytes of a cache filled with so many tokens", 1,
         1 << 24},
        {"fill", ARG_FLAG, &o.fill, "", "with --at: fill all layers and heads, not one of them", 0,
         0},
        {"json", ARG_FLAG, &o.json, "", "print JSON", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct failure failure;
    bool help;

    if (!args_parse(args, n_args, argc - 1, argv + 1, &help, &failure) ||
        (!help && !(read_sizes(&o, &failure) && check_options(&o, &failure)))) {
        fprintf(stderr, "kvc-plan: %s\nTry 'kvc-plan --help'.\n", failure.text);
        return USAGE;
    }
    if (help) {
        printf("Usage: kvc-plan OPTIONS\n"
               "What a token of K and V costs under each profile, and how many fit a budget.\n\n");
        args_print_help(args, n_args);
        printf("\nExit status: 0 done, 1 failed, 2 wrong usage.\n");
        return DONE;
    }
    return run(&o);
}
