/* kvc-engine compare: score formats and policies of the cache on a text, all of them in one pass
 * over the weights. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "report.h"
#include "trial.h"

/* Tokens of the greedy decode that is timed after the last chunk. */
enum { DECODE_TOKENS = 32 };

/* Percent of the rows that --tune prunes. */
enum { TUNE_FIRST = 20, TUNE_STEP = 10, TUNE_LAST = 80 };

struct compare_options {
    const char *model, *file, *kv, *policy, *scale, *rope, *kernels;
    int64_t context, chunks, threads, recent, sinks;
    double rope_factor, tune_limit;
    bool imm, tune, json;
};

struct comparison {
    const struct compare_options *o;
    struct session session;
    kvc_rope rope;
    struct token_list text;
    struct trial trial;
    struct named_row {
        char kv[16];
        struct trial_bytes bytes;
        double decode_tok_s;
    } rows[SCORE_MAX_ROWS];
    size_t n_chunks;
    struct failure failure;
};

static const char *format_name(kvc_format format)
{
    return format == KVC_F16 ? "f16" : format == KVC_INT8 ? "int8" : "int4";
}

/* A row that is there already is not added again. */
static bool add_row(struct comparison *c, const char *format, bool imm, const char *policy,
                    struct failure *failure)
{
    const size_t r = c->trial.n_rows;
    struct setting *setting = &c->trial.rows[r].setting;
    char *kv = c->rows[r].kv;

    if (r == SCORE_MAX_ROWS)
        return fail_with(failure, "more than %d rows", SCORE_MAX_ROWS);
    if (!precision_parse(format, imm ? "token" : c->o->scale, &setting->precision, failure) ||
        !policy_parse(policy, (size_t)c->o->context, &setting->policy, failure))
        return false;
    if (setting->policy.policy.set_precision)
        setting->precision = setting->policy.policy.precision;
    setting->imm = imm;
    setting->rope = &c->rope;
    snprintf(kv, sizeof(c->rows[r].kv), "%s%s", format_name(setting->precision.k),
             imm ? "-imm" : "");
    for (size_t i = 0; i < r; i++)
        if (strcmp(c->rows[i].kv, kv) == 0 &&
            strcmp(c->trial.rows[i].setting.policy.name, setting->policy.name) == 0)
            return true;
    c->trial.n_rows++;
    return true;
}

/* A row for each format of the list "a,b,c". */
static bool add_formats(struct comparison *c, const char *policy, struct failure *failure)
{
    const bool is_plain = !c->o->policy && !c->o->tune;
    const char *list = c->o->kv ? c->o->kv : is_plain ? "f16,int8,int4" : "f16";
    char format[16];

    while (args_next_item(&list, format, sizeof(format)))
        if (!add_row(c, format, false, policy, failure))
            return false;
    return true;
}

static bool add_policies(struct comparison *c, struct failure *failure)
{
    const char *list = c->o->policy ? c->o->policy : "none";
    char policy[48];

    while (args_next_item(&list, policy, sizeof(policy)))
        if (!add_formats(c, policy, failure))
            return false;
    return true;
}

/* Article 000, section 6.3: from a fifth on, a tenth more at each step. */
static bool add_tuning(struct comparison *c, struct failure *failure)
{
    char policy[24];

    for (int percent = TUNE_FIRST; percent <= TUNE_LAST; percent += TUNE_STEP) {
        snprintf(policy, sizeof(policy), "heavy:0.%02d", 100 - percent);
        if (!add_formats(c, policy, failure))
            return false;
    }
    return true;
}

/* Everything kept, as F16, is the base. */
static bool add_rows(struct comparison *c, struct failure *failure)
{
    bool ok = add_row(c, "f16", false, "none", failure);

    if (ok && c->o->tune)
        return add_tuning(c, failure);
    ok = ok && add_policies(c, failure);
    if (ok && c->o->imm)
        ok = add_row(c, "int8", true, "none", failure) && add_row(c, "int4", true, "none", failure);
    return ok;
}

static bool open_comparison(struct comparison *c)
{
    const struct compare_options *o = c->o;
    const struct model_shape *shape = &c->session.model.shape;
    const struct session_params params = {.model_path = o->model,
                                          .kernels = o->kernels,
                                          .n_threads = (size_t)o->threads,
                                          .max_rows = c->trial.n_rows * KVC_PAGE_TOKENS};

    fprintf(stderr, "loading %s\n", o->model);
    if (!session_open(&params, &c->session, &c->failure) ||
        !rotation_init(shape, o->rope, o->rope_factor, &c->rope, &c->failure) ||
        !rotation_check_context(shape, &c->rope, (size_t)o->context, &c->failure) ||
        !session_read_text(&c->session, o->file, (size_t)o->context, &c->text, &c->failure))
        return false;
    const size_t n = c->text.n / (size_t)o->context;
    c->n_chunks = n < (size_t)o->chunks ? n : (size_t)o->chunks;
    if (n < (size_t)o->chunks)
        fprintf(stderr, "%s has only %zu chunks\n", o->file, n);
    c->trial.session = &c->session;
    c->trial.n_context = c->trial.bucket = (size_t)o->context;
    c->trial.n_decode = DECODE_TOKENS;
    c->trial.first_scored = (size_t)o->context / 2;
    c->trial.recent_tokens = (int32_t)o->recent;
    c->trial.sink_tokens = (int32_t)o->sinks;
    return trial_open(&c->trial, &c->failure);
}

static void print_progress(const struct comparison *c, size_t done, double start)
{
    const double spent = seconds_now() - start;

    fprintf(stderr, "chunk %zu of %zu:", done, c->n_chunks);
    for (size_t r = 0; r < c->trial.n_rows; r++)
        fprintf(stderr, " %s %s %.3f", c->rows[r].kv, c->trial.rows[r].setting.policy.name,
                score_perplexity(c->trial.rows[r].scores));
    fprintf(stderr, "; about %.0f s left\n", spent / (double)done * (double)(c->n_chunks - done));
}

static bool run_chunks(struct comparison *c)
{
    const double start = seconds_now();
    const size_t n = c->trial.n_context;

    for (size_t i = 0; i < c->n_chunks; i++) {
        if (!trial_start(&c->trial, &c->failure) ||
            !trial_read(&c->trial, c->text.ids + i * n, 0, n, &c->failure))
            return false;
        print_progress(c, i + 1, start);
    }
    for (size_t r = 0; r < c->trial.n_rows; r++)
        if (!trial_measure_bytes(&c->trial, r, &c->rows[r].bytes, &c->failure))
            return false;
    return true;
}

static bool time_decodes(struct comparison *c)
{
    fprintf(stderr, "timing the decode of %d tokens a row\n", DECODE_TOKENS);
    for (size_t r = 0; r < c->trial.n_rows; r++)
        if (!trial_measure_decode(&c->trial, r, &c->rows[r].decode_tok_s, &c->failure))
            return false;
    return true;
}

static size_t code_bytes(size_t head_dim, kvc_format format, kvc_scale scale)
{
    kvc_quant_options options;
    size_t codes = 0, params = 0;

    if (format == KVC_F16)
        return KVC_PAGE_TOKENS * head_dim * 2;
    kvc_quant_options_default(&options);
    options.format = format;
    options.scale = scale;
    kvc_quant_size(KVC_PAGE_TOKENS, 1, head_dim, &options, &codes, &params);
    return codes + params;
}

/* Codes and parameters of a full page, without what rounds its size up. */
static double bits_per_element(size_t head_dim, const struct setting *setting)
{
    const kvc_precision *p = &setting->precision;
    const size_t bytes =
        code_bytes(head_dim, p->k, p->k_scale) + code_bytes(head_dim, p->v, p->v_scale);
    const double heavy = (double)setting->policy.policy.heavy_share; /* stays F16 */

    return heavy * 16.0 +
           (1.0 - heavy) * 8.0 * (double)bytes / (double)(head_dim * 2 * KVC_PAGE_TOKENS);
}

static void print_report(const struct comparison *c)
{
    const struct trial *t = &c->trial;
    struct report_row rows[SCORE_MAX_ROWS];
    const struct report report = {.model = report_name(c->o->model),
                                  .context = t->n_context,
                                  .tokens = c->n_chunks * t->n_context,
                                  .rows = rows,
                                  .n_rows = t->n_rows};

    for (size_t r = 0; r < t->n_rows; r++) {
        const struct score *score = t->rows[r].scores;
        const double n = (double)score->n, ppl = score_perplexity(score);
        rows[r] = (struct report_row){
            .kv = c->rows[r].kv,
            .policy = t->rows[r].setting.policy.name,
            .rate = r ? (TUNE_FIRST + TUNE_STEP * (double)(r - 1)) / 100.0 : 0.0,
            .ppl = ppl,
            .ppl_change_pct = 100.0 * (ppl / score_perplexity(t->rows[0].scores) - 1.0),
            .kl = score->kl / n,
            .top1 = (double)score->n_agree / n,
            .bits_per_element =
                bits_per_element(c->session.model.shape.head_dim, &t->rows[r].setting),
            .bytes_per_token = c->rows[r].bytes.per_token,
            .fixed_bytes = c->rows[r].bytes.fixed,
            .decode_tok_s = c->rows[r].decode_tok_s};
    }
    if (c->o->tune)
        (c->o->json ? report_print_tuning_json : report_print_tuning)(&report, c->o->tune_limit);
    else
        (c->o->json ? report_print_json : report_print_table)(&report);
}

static int compare(struct comparison *c)
{
    bool ok = open_comparison(c) && run_chunks(c) && (c->o->tune || time_decodes(c));

    if (ok)
        print_report(c);
    if (ok && (fflush(stdout) != 0 || ferror(stdout)))
        ok = fail_with(&c->failure, "cannot write");
    if (!ok)
        fprintf(stderr, "kvc-engine compare: %s\n", c->failure.text);
    trial_close(&c->trial);
    free(c->text.ids);
    session_close(&c->session);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

int compare_command(int argc, char **argv)
{
    struct compare_options o = {.tune_limit = 0.05,
                                .scale = "token",
                                .rope = "none",
                                .rope_factor = 2.0,
                                .context = 2048,
                                .chunks = 10,
                                .recent = 128,
                                .sinks = 4};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file (required)", 0, 0},
        {"file", ARG_TEXT, &o.file, "TXT", "text to predict (required)", 0, 0},
        {"kv", ARG_TEXT, &o.kv, "LIST", "of f16, int8, int4 (all; with policies f16)", 0, 0},
        {"policy", ARG_TEXT, &o.policy, "LIST",
         "of none, window:S, heavy:S (a share S of the rows), light, balanced, "
         "aggressive, extreme",
         0, 0},
        {"tune", ARG_FLAG, &o.tune, "", "prune 20 %, 30 % ... by attention, up to the limit", 0, 0},
        {"tune-limit", ARG_REAL, &o.tune_limit, "KL", "to the base, where --tune ends (0.05)", 0,
         100},
        {"scale", ARG_CHOICE, &o.scale, "token|head|channel",
         "what shares a scale (token); channel: K only", 0, 0},
        {"imm", ARG_FLAG, &o.imm, "", "add rows that code K and V at once, before any use", 0, 0},
        {"context", ARG_INTEGER, &o.context, "N", "tokens of a chunk (2048)", 8, 1 << 24},
        {"chunks", ARG_INTEGER, &o.chunks, "N", "most chunks to run (10)", 1, 1e6},
        {"recent", ARG_INTEGER, &o.recent, "N", "newest tokens kept exact (128)", 0, 1e6},
        {"sinks", ARG_INTEGER, &o.sinks, "N", "first tokens kept exact (4)", 0, 64},
        {"rope", ARG_CHOICE, &o.rope, "none|ntk|yarn",
         "scaling of positions, for long contexts (none)", 0, 0},
        {"rope-factor", ARG_REAL, &o.rope_factor, "F", "of the scaling (2)", 1, 1024},
        {"json", ARG_FLAG, &o.json, "", "print JSON instead of a table", 0, 0},
        {"threads", ARG_INTEGER, &o.threads, "N", "0: as many as there are processors (0)", 0,
         1024},
        {"kernels", ARG_CHOICE, &o.kernels, "ref|avx2|avx512", "of libkvc (the best)", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct comparison c = {.o = &o};
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-engine compare --model FILE --file TXT [OPTIONS]\n"
               "Perplexity on a text and distance to a whole F16 cache, for several formats and "
               "policies at once.\n\n");
        args_print_help(args, n_args);
        return EXIT_DONE;
    }
    if (ok && (!o.model || !o.file))
        ok = fail_with(&failure, "--model and --file are required");
    if (ok && o.tune && (o.policy || o.imm || (o.kv && strchr(o.kv, ','))))
        ok = fail_with(&failure, "--tune takes one format, and neither --policy nor --imm");
    if (!ok || !add_rows(&c, &failure)) {
        fprintf(stderr, "kvc-engine compare: %s\nTry 'kvc-engine compare --help'.\n", failure.text);
        return EXIT_USAGE;
    }
    return compare(&c);
}
