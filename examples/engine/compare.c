/* kvc-engine compare: score recipes and policies of the cache on a text, all of them in one pass
 * over the weights. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "file.h"
#include "report.h"
#include "trial.h"

/* Tokens of the greedy decode that is timed after the last chunk. */
enum { DECODE_TOKENS = 32 };

/* Percent of the rows that --tune prunes. */
enum { TUNE_FIRST = 20, TUNE_STEP = 10, TUNE_LAST = 80 };

struct compare_options {
    const char *model, *file, *kv, *policy, *calibration, *rope, *kernels, *csv;
    int64_t context, chunks, skip, threads, recent, sinks, bucket, score_from;
    double rope_factor, tune_limit;
    bool tune, json;
};

struct comparison {
    const struct compare_options *o;
    struct session session;
    struct calibration calibration;
    kvc_rope rope;
    struct token_list text;
    struct trial trial;
    struct trial_bytes bytes[SCORE_MAX_ROWS];
    double decode_tok_s[SCORE_MAX_ROWS];
    struct score totals[SCORE_MAX_ROWS];
    size_t n_chunks;
    struct failure failure;
};

/* A policy may say how the cache stores what it compresses: without transforms. */
static void take_precision(const kvc_precision *precision, struct recipe *recipe)
{
    static const char *const names[] = {"f16", "int8:plain", "int4:plain", "int6:plain"};

    *recipe = (struct recipe){.precision = *precision, .recent = -1, .sinks = -1};
    snprintf(recipe->name, sizeof(recipe->name), "%s", names[precision->k]);
}

/* A row that is there already is not added again. */
static bool add_row(struct comparison *c, const char *recipe, const char *policy,
                    struct failure *failure)
{
    const size_t r = c->trial.n_rows;
    struct setting setting = {.rope = &c->rope};

    if (!recipe_parse(recipe, &setting.recipe, failure) ||
        !policy_parse(policy, (size_t)c->o->context, &setting.policy, failure))
        return false;
    if (setting.policy.policy.set_precision)
        take_precision(&setting.policy.policy.precision, &setting.recipe);
    for (size_t i = 0; i < r; i++)
        if (strcmp(c->trial.rows[i].setting.recipe.name, setting.recipe.name) == 0 &&
            strcmp(c->trial.rows[i].setting.policy.name, setting.policy.name) == 0)
            return true;
    if (r == SCORE_MAX_ROWS)
        return fail_with(failure, "more than %d rows", SCORE_MAX_ROWS);
    c->trial.rows[r].setting = setting;
    c->trial.n_rows++;
    return true;
}

/* A row for each recipe of the list "a,b,c". */
static bool add_recipes(struct comparison *c, const char *policy, struct failure *failure)
{
    const bool is_plain = !c->o->policy && !c->o->tune;
    const char *list = c->o->kv ? c->o->kv : is_plain ? "f16,int8,k6v4,int4,int4-raw" : "f16";
    char recipe[64];

    while (args_next_item(&list, recipe, sizeof(recipe)))
        if (!add_row(c, recipe, policy, failure))
            return false;
    return true;
}

static bool add_policies(struct comparison *c, struct failure *failure)
{
    const char *list = c->o->policy ? c->o->policy : "none";
    char policy[48];

    while (args_next_item(&list, policy, sizeof(policy)))
        if (!add_recipes(c, policy, failure))
            return false;
    return true;
}

/* Article 000, section 6.3: from a fifth on, a tenth more at each step. */
static bool add_tuning(struct comparison *c, struct failure *failure)
{
    char policy[24];

    for (int percent = TUNE_FIRST; percent <= TUNE_LAST; percent += TUNE_STEP) {
        snprintf(policy, sizeof(policy), "heavy:0.%02d", 100 - percent);
        if (!add_recipes(c, policy, failure))
            return false;
    }
    return true;
}

/* Everything kept, as F16, is the base. */
static bool add_rows(struct comparison *c, struct failure *failure)
{
    return add_row(c, "f16", "none", failure) &&
           (c->o->tune ? add_tuning(c, failure) : add_policies(c, failure));
}

static bool open_comparison(struct comparison *c)
{
    const struct compare_options *o = c->o;
    const struct model_shape *shape = &c->session.model.shape;
    const struct session_params params = {.model_path = o->model,
                                          .kernels = o->kernels,
                                          .n_threads = (size_t)o->threads,
                                          .max_rows = c->trial.n_rows * KVC_PAGE_TOKENS};
    const char *const inputs[2] = {o->model, o->file};

    if (o->csv && !file_check_output(o->csv, inputs, 2, &c->failure))
        return false;
    fprintf(stderr, "loading %s\n", o->model);
    if (!session_open(&params, &c->session, &c->failure) ||
        !calibration_open(o->calibration, o->model, c->session.ctx, shape, &c->calibration,
                          &c->failure) ||
        !rotation_init(shape, o->rope, o->rope_factor, &c->rope, &c->failure) ||
        !rotation_check_context(shape, &c->rope, (size_t)o->context, &c->failure) ||
        !session_read_text(&c->session, o->file, (size_t)o->context, (size_t)o->context, &c->text,
                           &c->failure))
        return false;
    const size_t all = c->text.n / (size_t)o->context, skipped = (size_t)o->skip;
    const size_t n = all > skipped ? all - skipped : 0;
    if (n == 0)
        return fail_with(&c->failure, "%.100s has only %zu chunks", o->file, all);
    c->n_chunks = n < (size_t)o->chunks ? n : (size_t)o->chunks;
    if (n < (size_t)o->chunks)
        fprintf(stderr, "%s has only %zu chunks\n", o->file, n);
    c->trial.session = &c->session;
    c->trial.calibration = &c->calibration;
    c->trial.n_context = (size_t)o->context;
    c->trial.bucket = (size_t)(o->bucket ? o->bucket : o->context);
    c->trial.n_decode = DECODE_TOKENS;
    c->trial.first_scored = (size_t)(o->score_from >= 0 ? o->score_from : o->context / 2);
    c->trial.recent_tokens = (int32_t)o->recent;
    c->trial.sink_tokens = (int32_t)o->sinks;
    return trial_open(&c->trial, &c->failure);
}

/* The score of all buckets of a row. */
static struct score score_total(const struct trial *t, size_t row)
{
    struct score total = {0};

    for (size_t i = 0; i < t->n_context; i += t->bucket)
        score_join(&total, &t->rows[row].scores[i / t->bucket]);
    return total;
}

static void print_progress(const struct comparison *c, size_t done, double start)
{
    const double spent = seconds_now() - start;

    fprintf(stderr, "chunk %zu of %zu:", done, c->n_chunks);
    for (size_t r = 0; r < c->trial.n_rows; r++)
        fprintf(stderr, " %s %.4g", c->trial.rows[r].setting.recipe.name,
                score_total(&c->trial, r).kl / (double)score_total(&c->trial, r).n);
    fprintf(stderr, "; about %.0f s left\n", spent / (double)done * (double)(c->n_chunks - done));
}

static bool run_chunks(struct comparison *c)
{
    const double start = seconds_now();
    const size_t n = c->trial.n_context;

    for (size_t i = 0; i < c->n_chunks; i++) {
        if (!trial_start(&c->trial, &c->failure) ||
            !trial_read(&c->trial, c->text.ids + ((size_t)c->o->skip + i) * n, 0, n, &c->failure))
            return false;
        print_progress(c, i + 1, start);
    }
    for (size_t r = 0; r < c->trial.n_rows; r++)
        if (!trial_measure_bytes(&c->trial, r, &c->bytes[r], &c->failure))
            return false;
    return true;
}

static bool time_decodes(struct comparison *c)
{
    fprintf(stderr, "timing the decode of %d tokens a row\n", DECODE_TOKENS);
    for (size_t r = 0; r < c->trial.n_rows; r++)
        if (!trial_measure_decode(&c->trial, r, &c->decode_tok_s[r], &c->failure))
            return false;
    return true;
}

/* Codes and parameters of an element of a full page, without what rounds its size up. */
static double bits_per_element(int32_t head_dim, const struct setting *setting)
{
    const kvc_precision *p = &setting->recipe.precision;
    const kvc_plan_model model = {.struct_size = sizeof(model),
                                  .n_layers = 1,
                                  .n_heads = 1,
                                  .n_kv_heads = 1,
                                  .head_dim_k = head_dim,
                                  .head_dim_v = head_dim};
    kvc_plan_profile profile;
    double bytes = 0.0;

    kvc_plan_profile_default(&profile);
    profile.heavy_share = (double)setting->policy.policy.heavy_share; /* stays F16 */
    profile.k = p->k;
    profile.v = p->v;
    profile.k_scale = p->k_scale;
    profile.v_scale = p->v_scale;
    kvc_plan_bytes(&model, &profile, &bytes);
    return bytes * 8.0 / (2.0 * head_dim);
}

/* Where mean and scale of a row come from. */
static const char *vectors_of(const struct comparison *c, const struct recipe *recipe)
{
    if (recipe->article != ARTICLE_NONE || (!recipe->has_mean && !recipe->has_scale))
        return "none";
    if (c->calibration.mean && !recipe->online)
        return "file";
    return recipe->imm ? "none" : "online";
}

static void fill_row(const struct comparison *c, size_t r, struct report_row *out)
{
    const struct setting *setting = &c->trial.rows[r].setting;
    const struct score *score = &c->totals[r];
    const double n = (double)score->n, ppl = score_perplexity(score);

    *out = (struct report_row){
        .kv = setting->recipe.name,
        .policy = setting->policy.name,
        .vectors = vectors_of(c, &setting->recipe),
        .rate = r ? (TUNE_FIRST + TUNE_STEP * (double)(r - 1)) / 100.0 : 0.0,
        .ppl = ppl,
        .ppl_change_pct = 100.0 * (ppl / score_perplexity(&c->totals[0]) - 1.0),
        .kl = score->kl / n,
        .top1 = (double)score->n_agree / n,
        .bits_per_element = bits_per_element((int32_t)c->session.model.shape.head_dim, setting),
        .bytes_per_token = c->bytes[r].per_token,
        .fixed_bytes = c->bytes[r].fixed,
        .coded = c->bytes[r].coded,
        .decode_tok_s = c->decode_tok_s[r],
        .buckets = c->trial.rows[r].scores};
}

static bool print_report(struct comparison *c)
{
    const struct trial *t = &c->trial;
    struct report_row rows[SCORE_MAX_ROWS];
    const struct report report = {.model = report_name(c->o->model),
                                  .text = report_name(c->o->file),
                                  .calibration = report_name(c->calibration.path),
                                  .context = t->n_context,
                                  .bucket = t->bucket,
                                  .first_scored = t->first_scored,
                                  .tokens = c->n_chunks * t->n_context,
                                  .rows = rows,
                                  .n_rows = t->n_rows};

    for (size_t r = 0; r < t->n_rows; r++)
        c->totals[r] = score_total(t, r);
    for (size_t r = 0; r < t->n_rows; r++)
        fill_row(c, r, &rows[r]);
    if (c->o->tune)
        (c->o->json ? report_print_tuning_json : report_print_tuning)(&report, c->o->tune_limit);
    else
        (c->o->json ? report_print_json : report_print_table)(&report);
    return !c->o->csv || report_write_csv(&report, c->o->csv, &c->failure);
}

static int compare(struct comparison *c)
{
    bool ok = open_comparison(c) && run_chunks(c) && (c->o->tune || time_decodes(c));

    ok = ok && print_report(c);
    if (ok && (fflush(stdout) != 0 || ferror(stdout)))
        ok = fail_with(&c->failure, "cannot write");
    if (!ok)
        fprintf(stderr, "kvc-engine compare: %s\n", c->failure.text);
    trial_close(&c->trial);
    free(c->text.ids);
    calibration_close(&c->calibration);
    session_close(&c->session);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

int compare_command(int argc, char **argv)
{
    struct compare_options o = {.tune_limit = 0.05,
                                .rope = "none",
                                .rope_factor = 2.0,
                                .context = 2048,
                                .score_from = -1,
                                .chunks = 10,
                                .recent = 128,
                                .sinks = 4};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file (required)", 0, 0},
        {"file", ARG_TEXT, &o.file, "TXT", "text to predict (required)", 0, 0},
        {"kv", ARG_TEXT, &o.kv, "LIST",
         "of recipes, see below (f16,int8,k6v4,int4,int4-raw; with policies f16)", 0, 0},
        {"calibration", ARG_TEXT, &o.calibration, "F|none",
         "of calibrate (the model's own, if there is one; none: measured on the first pages)", 0,
         0},
        {"policy", ARG_TEXT, &o.policy, "LIST",
         "of none, window:S, heavy:S (a share S of the rows), light, balanced, "
         "aggressive, extreme",
         0, 0},
        {"tune", ARG_FLAG, &o.tune, "", "prune 20 %, 30 % ... by attention, up to the limit", 0, 0},
        {"tune-limit", ARG_REAL, &o.tune_limit, "KL", "to the base, where --tune ends (0.05)", 0,
         100},
        {"context", ARG_INTEGER, &o.context, "N", "tokens of a chunk (2048)", 8, 1 << 24},
        {"chunks", ARG_INTEGER, &o.chunks, "N", "most chunks to run (10)", 1, 1e6},
        {"skip", ARG_INTEGER, &o.skip, "N", "chunks to leave out at the start (0)", 0, 1e6},
        {"score-from", ARG_INTEGER, &o.score_from, "N",
         "first position of a chunk that is scored (half of it)", 0, 1 << 24},
        {"bucket", ARG_INTEGER, &o.bucket, "N", "positions that share a number (all)", 1, 1 << 24},
        {"csv", ARG_TEXT, &o.csv, "FILE", "write the rows there too, and their buckets", 0, 0},
        {"recent", ARG_INTEGER, &o.recent, "N", "newest tokens kept exact (128)", 0, 1e6},
        {"sinks", ARG_INTEGER, &o.sinks, "N", "first tokens kept exact (4)", 0, 64},
        {"rope", ARG_CHOICE, &o.rope, "none|ntk|yarn",
         "scaling of positions, for long contexts (none)", 0, 0},
        {"rope-factor", ARG_REAL, &o.rope_factor, "F", "of the scaling (2)", 1, 1024},
        {"json", ARG_FLAG, &o.json, "", "print JSON instead of a table", 0, 0},
        {"threads", ARG_INTEGER, &o.threads, "N", "0: as many as there are processors (0)", 0,
         1024},
        {"kernels", ARG_CHOICE, &o.kernels, "ref|avx2|avx512|vnni", "of libkvc (the best)", 0, 0},
    };
    const size_t n_args = sizeof(args) / sizeof(*args);
    struct comparison c = {.o = &o};
    struct failure failure;
    bool help;

    bool ok = args_parse(args, n_args, argc, argv, &help, &failure);
    if (ok && help) {
        printf("Usage: kvc-engine compare --model FILE --file TXT [OPTIONS]\n"
               "Perplexity on a text and distance to a whole F16 cache, for several recipes and "
               "policies at once.\n\n");
        args_print_help(args, n_args);
        printf("\n%s", recipe_help);
        return EXIT_DONE;
    }
    if (ok && (!o.model || !o.file))
        ok = fail_with(&failure, "--model and --file are required");
    if (ok && o.tune && (o.policy || (o.kv && strchr(o.kv, ','))))
        ok = fail_with(&failure, "--tune takes one recipe, and no --policy");
    if (ok && o.score_from >= o.context - 1)
        ok = fail_with(&failure, "nothing is scored from --score-from on");
    if (!ok || !add_rows(&c, &failure)) {
        fprintf(stderr, "kvc-engine compare: %s\nTry 'kvc-engine compare --help'.\n", failure.text);
        return EXIT_USAGE;
    }
    return compare(&c);
}
