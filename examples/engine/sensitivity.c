/* kvc-engine sensitivity: what each layer and KV head costs when it alone is coded in four bits,
 * and whether bits that are shared out by that are better than bits for all alike (article 002). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "file.h"
#include "report.h"
#include "trial.h"

/* Mean bits of K and V of a head under which both ways are compared. */
enum { BUDGET_BITS = 6 + 4, N_SHOWN = 10 };

/* Without a calibration the cache codes nothing before it has measured its first pages. */
enum { LEAST_UNCALIBRATED = 512 };

struct sensitivity_options {
    const char *model, *file, *calibration, *csv, *kernels;
    int64_t tokens, context, chunks, threads;
    bool json;
};

/* K or V of one layer and KV head. */
struct unit {
    int32_t layer, kv_head;
    bool is_v;
    double kl;    /* when it alone has four bits */
    int32_t bits; /* that it is given */
};

struct study {
    const struct sensitivity_options *o;
    struct session session;
    struct calibration calibration;
    struct token_list text;
    struct unit *units; /* V of a head follows its K */
    size_t n_units;
    struct score uniform, shared; /* of the comparison */
    struct failure failure;
};

static const kvc_precision whole = {KVC_F16, KVC_F16, KVC_SCALE_TOKEN, KVC_SCALE_TOKEN};

static kvc_format format_of(int32_t bits)
{
    return bits == 4 ? KVC_INT4 : bits == 6 ? KVC_INT6 : KVC_INT8;
}

/* A row with the transforms of a recipe, all of it F16 until it is told otherwise. */
static void start_row(struct trial *t, const char *recipe)
{
    struct trial_row *row = &t->rows[t->n_rows++];
    struct failure ignored;

    *row = (struct trial_row){0};
    recipe_parse(recipe, &row->setting.recipe, &ignored);
    row->setting.recipe.precision = whole;
}

static struct trial trial_of(struct study *s, size_t n_context)
{
    return (struct trial){.session = &s->session,
                          .calibration = &s->calibration,
                          .n_context = n_context,
                          .bucket = n_context,
                          .first_scored = n_context / 2,
                          .sink_tokens = 4};
}

static bool set_bits(struct study *s, kvc_cache *cache, const struct unit *k, int32_t k_bits,
                     int32_t v_bits)
{
    kvc_precision precision = whole;

    if (k_bits < 16)
        precision.k = format_of(k_bits);
    if (v_bits < 16)
        precision.v = format_of(v_bits);
    const kvc_status status = kvc_cache_set_precision(cache, k->layer, k->kv_head, &precision);
    return status == KVC_OK ||
           fail_with(&s->failure, "cannot set a precision: %s", kvc_status_str(status));
}

/* Units first ... last - 1, a row each. */
static bool measure_batch(struct study *s, size_t first, size_t last)
{
    struct trial t = trial_of(s, (size_t)s->o->tokens);

    for (size_t i = first; i <= last; i++) /* and the base, which rounds transformed rows too */
        start_row(&t, "int4");
    bool ok = trial_open(&t, &s->failure);
    for (size_t i = first; i < last && ok; i++)
        ok = set_bits(s, t.rows[1 + i - first].cache, &s->units[i], s->units[i].is_v ? 16 : 4,
                      s->units[i].is_v ? 4 : 16);
    ok = ok && trial_start(&t, &s->failure) &&
         trial_read(&t, s->text.ids, 0, t.n_context, &s->failure);
    for (size_t i = first; i < last && ok; i++) {
        const struct score *score = t.rows[1 + i - first].scores;
        s->units[i].kl = score->kl / (double)score->n;
    }
    trial_close(&t);
    return ok;
}

static bool measure_units(struct study *s)
{
    const size_t step = SCORE_MAX_ROWS - 1;

    for (size_t i = 0; i < s->n_units; i += step) {
        const size_t end = i + step < s->n_units ? i + step : s->n_units;
        fprintf(stderr, "layer and head %zu of %zu\n", i / 2, s->n_units / 2);
        if (!measure_batch(s, i, end))
            return false;
    }
    return true;
}

/* Square of the step of a code, against that of four bits. */
static double error_of(int32_t bits)
{
    const double steps = (double)((1 << bits) - 1);

    return 225.0 / (steps * steps);
}

static int32_t next_bits(const struct unit *unit)
{
    return unit->bits == 4 && !unit->is_v ? 6 : 8;
}

/* Gives bits to the unit that gains most for each, until the budget is used up. */
static void share_bits(struct study *s)
{
    int64_t left = (int64_t)(s->n_units / 2) * (BUDGET_BITS - 8);

    for (size_t i = 0; i < s->n_units; i++)
        s->units[i].bits = 4;
    for (;;) {
        struct unit *best = NULL;
        double most = 0.0;
        for (size_t i = 0; i < s->n_units; i++) {
            struct unit *u = &s->units[i];
            const int32_t next = next_bits(u), cost = next - u->bits;
            const double gain = fmax(u->kl, 0.0) * (error_of(u->bits) - error_of(next)) / cost;
            if (u->bits < 8 && cost <= left && gain > most) {
                best = u;
                most = gain;
            }
        }
        if (!best)
            return;
        left -= next_bits(best) - best->bits;
        best->bits = next_bits(best);
    }
}

/* All alike against shared out, on the chunks after the one that was measured: chunks of compare,
 * which begin as the model wants it. */
static bool compare_ways(struct study *s)
{
    struct trial t = trial_of(s, (size_t)s->o->context);

    for (int i = 0; i < 3; i++)
        start_row(&t, i == 0 ? "f16" : "int4");
    bool ok = trial_open(&t, &s->failure);
    for (size_t i = 0; i < s->n_units && ok; i += 2)
        ok = set_bits(s, t.rows[1].cache, &s->units[i], 6, 4) &&
             set_bits(s, t.rows[2].cache, &s->units[i], s->units[i].bits, s->units[i + 1].bits);
    for (int64_t chunk = 0; chunk < s->o->chunks && ok; chunk++) {
        const size_t at = (size_t)((1 + chunk) * s->o->context);
        fprintf(stderr, "comparing on chunk %d of %d\n", (int)chunk + 1, (int)s->o->chunks);
        ok = trial_start(&t, &s->failure) &&
             trial_read(&t, s->text.ids + at, 0, t.n_context, &s->failure);
    }
    if (ok) {
        s->uniform = t.rows[1].scores[0];
        s->shared = t.rows[2].scores[0];
    }
    trial_close(&t);
    return ok;
}

static bool open_study(struct study *s)
{
    const struct sensitivity_options *o = s->o;
    const struct session_params params = {.model_path = o->model,
                                          .kernels = o->kernels,
                                          .n_threads = (size_t)o->threads,
                                          .max_rows = (size_t)SCORE_MAX_ROWS * KVC_PAGE_TOKENS};
    const struct model_shape *shape = &s->session.model.shape;
    const char *const inputs[2] = {o->model, o->file};

    if ((o->csv && !file_check_output(o->csv, inputs, 2, &s->failure)) ||
        !session_open(&params, &s->session, &s->failure) ||
        !calibration_open(o->calibration, o->model, s->session.ctx, shape, &s->calibration,
                          &s->failure) ||
        !session_read_text(&s->session, o->file, (size_t)((1 + o->chunks) * o->context),
                           (size_t)o->context, &s->text, &s->failure))
        return false;
    if (!s->calibration.mean && (o->tokens < LEAST_UNCALIBRATED || o->context < LEAST_UNCALIBRATED))
        return fail_with(&s->failure,
                         "without a calibration, --tokens and --context must be at least %d",
                         LEAST_UNCALIBRATED);
    s->n_units = 2 * shape->n_layers * shape->n_kv_heads;
    s->units = calloc(s->n_units, sizeof(*s->units));
    if (!s->units)
        return fail_with(&s->failure, "out of memory");
    for (size_t i = 0; i < s->n_units; i++)
        s->units[i] = (struct unit){.layer = (int32_t)(i / 2 / shape->n_kv_heads),
                                    .kv_head = (int32_t)(i / 2 % shape->n_kv_heads),
                                    .is_v = i % 2};
    return true;
}

static bool write_csv(struct study *s)
{
    FILE *file = fopen(s->o->csv, "w");

    if (!file)
        return fail_with(&s->failure, "cannot write %.100s", s->o->csv);
    fprintf(file, "layer,kv_head,side,kl,bits\n");
    for (size_t i = 0; i < s->n_units; i++)
        fprintf(file, "%d,%d,%s,%.9g,%d\n", (int)s->units[i].layer, (int)s->units[i].kv_head,
                s->units[i].is_v ? "v" : "k", s->units[i].kl, (int)s->units[i].bits);
    const bool ok = !ferror(file);
    return (fclose(file) == 0 && ok) || fail_with(&s->failure, "cannot write %.100s", s->o->csv);
}

/* Sums of K and V, and what was predicted for both ways. */
struct sums {
    double k, v, uniform, shared;
};

static struct sums sum_units(const struct study *s)
{
    struct sums sums = {0};

    for (size_t i = 0; i < s->n_units; i++) {
        const struct unit *u = &s->units[i];
        *(u->is_v ? &sums.v : &sums.k) += u->kl;
        sums.uniform += u->kl * error_of(u->is_v ? 4 : 6);
        sums.shared += u->kl * error_of(u->bits);
    }
    return sums;
}

static void print_json(const struct study *s)
{
    const struct sums sums = sum_units(s);

    printf("{\"model\":");
    report_print_string(report_name(s->o->model), strlen(report_name(s->o->model)));
    printf(",\"k_sum\":%.9g,\"v_sum\":%.9g,\"bits\":%g,\"predicted\":{\"uniform\":%.9g,\"shared\":"
           "%.9g},\"measured\":{\"uniform\":%.9g,\"shared\":%.9g},\"units\":[",
           sums.k, sums.v, BUDGET_BITS / 2.0, sums.uniform, sums.shared,
           s->uniform.kl / (double)s->uniform.n, s->shared.kl / (double)s->shared.n);
    for (size_t i = 0; i < s->n_units; i++)
        printf("%s\n{\"layer\":%d,\"kv_head\":%d,\"side\":\"%s\",\"kl\":%.9g,\"bits\":%d}",
               i ? "," : "", (int)s->units[i].layer, (int)s->units[i].kv_head,
               s->units[i].is_v ? "v" : "k", s->units[i].kl, (int)s->units[i].bits);
    printf("\n]}\n");
}

static int by_kl(const void *a, const void *b)
{
    const double x = ((const struct unit *)a)->kl, y = ((const struct unit *)b)->kl;

    return (x < y) - (x > y);
}

static void print_table(struct study *s)
{
    const struct sums sums = sum_units(s);

    qsort(s->units, s->n_units, sizeof(*s->units), by_kl);
    printf("%s: mean KL when one layer and KV head alone has four bits\n\n",
           report_name(s->o->model));
    printf("%6s %8s %5s %11s %11s\n", "layer", "KV head", "side", "KL", "given bits");
    for (size_t i = 0; i < s->n_units && i < N_SHOWN; i++)
        printf("%6d %8d %5s %11.3e %11d\n", (int)s->units[i].layer, (int)s->units[i].kv_head,
               s->units[i].is_v ? "V" : "K", s->units[i].kl, (int)s->units[i].bits);
    printf("\nAll %zu: K %.3e, V %.3e; the median is %.1e.\n", s->n_units, sums.k, sums.v,
           s->units[s->n_units / 2].kl);
    printf("%g bits an element, by the KL of the heads: predicted %.3e, measured %.3e;\n"
           "K in six and V in four bits for all alike:  predicted %.3e, measured %.3e.\n",
           BUDGET_BITS / 2.0, sums.shared, s->shared.kl / (double)s->shared.n, sums.uniform,
           s->uniform.kl / (double)s->uniform.n);
}

static int study(struct study *s)
{
    bool ok = open_study(s) && measure_units(s);

    if (ok)
        share_bits(s);
    ok = ok && compare_ways(s);
    const bool is_written = ok && (!s->o->csv || write_csv(s)); /* in the order of layers */
    if (ok && s->o->json)
        print_json(s);
    else if (ok)
        print_table(s);
    if (!is_written)
        fprintf(stderr, "kvc-engine sensitivity: %s\n", s->failure.text);
    free(s->units);
    free(s->text.ids);
    calibration_close(&s->calibration);
    session_close(&s->session);
    return is_written ? EXIT_DONE : EXIT_FAILED;
}

int sensitivity_command(int argc, char **argv)
{
    struct sensitivity_options o = {.tokens = 512, .context = 2048, .chunks = 2};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file (required)", 0, 0},
        {"file", ARG_TEXT, &o.file, "TXT", "text to predict (required)", 0, 0},
        {"calibration", ARG_TEXT, &o.calibration, "F|none",
         "of calibrate (the model's own, if there is one; none: measured on the first pages)", 0,
         0},
        {"tokens", ARG_INTEGER, &o.tokens, "N",
         "tokens of the first chunk that the heads are measured on, at most --context (512)", 128,
         1 << 20},
        {"context", ARG_INTEGER, &o.context, "N", "tokens of a chunk of the comparison (2048)", 128,
         1 << 20},
        {"chunks", ARG_INTEGER, &o.chunks, "N", "chunks of the comparison, which follow (2)", 1,
         1000},
        {"csv", ARG_TEXT, &o.csv, "FILE", "write all heads there", 0, 0},
        {"json", ARG_FLAG, &o.json, "", "print JSON instead of a table", 0, 0},
        {"threads", ARG_INTEGER, &o.threads, "N", "0: as many as there are processors (0)", 0,
         1024},
        {"kernels", ARG_CHOICE, &o.kernels, "ref|avx2|avx512|vnni", "of libkvc (the best)", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct study s = {.o = &o};
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf(
            "Usage: kvc-engine sensitivity --model FILE --file TXT [OPTIONS]\n"
            "What each layer and KV head costs when it alone has four bits, and whether 5 bits an "
            "element gain if they are given by that.\n\n");
        args_print_help(args, n_args);
        return EXIT_DONE;
    }
    if (ok && (!o.model || !o.file))
        ok = fail_with(&failure, "--model and --file are required");
    if (ok && o.tokens > o.context)
        ok = fail_with(&failure, "--tokens lie in one chunk: they must not exceed --context");
    if (!ok) {
        fprintf(stderr, "kvc-engine sensitivity: %s\nTry 'kvc-engine sensitivity --help'.\n",
                failure.text);
        return EXIT_USAGE;
    }
    return study(&s);
}
