/* kvc-engine compare: score formats of the cache on a text, all of them in one pass over the
 * weights. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "file.h"
#include "report.h"
#include "sample.h"
#include "score.h"
#include "session.h"

/* Tokens of the greedy decode that is timed after the last chunk. */
enum { DECODE_TOKENS = 32 };

struct compare_options {
    const char *model, *file, *kv, *scale, *kernels;
    int64_t context, chunks, threads, recent, sinks;
    bool imm, json;
};

/* One way to keep the cache; the first is F16, the base of all comparisons. */
struct row {
    char name[16];
    kvc_precision precision; /* of the cache, or with imm of the codes before it */
    bool imm;
    kvc_cache *cache;
    kvc_seq seq;
    struct score score;
    int32_t next; /* most probable token after the chunk */
    double bytes_per_token, fixed_bytes, decode_tok_s;
};

struct comparison {
    const struct compare_options *o;
    struct session session;
    struct token_list text;
    struct row rows[SCORE_MAX_ROWS];
    size_t n_rows, n_chunks;
    float *logits; /* [n_rows][wanted tokens of a call][n_vocab] */
    struct failure failure;
};

static bool add_row(struct comparison *c, const char *format, bool imm, struct failure *failure)
{
    struct row *row = &c->rows[c->n_rows];

    if (c->n_rows == SCORE_MAX_ROWS)
        return fail_with(failure, "more than %d rows", SCORE_MAX_ROWS);
    if (!precision_parse(format, imm ? "token" : c->o->scale, &row->precision, failure))
        return false;
    row->imm = imm;
    snprintf(row->name, sizeof(row->name), "%s%s", format, imm ? "-imm" : "");
    for (size_t i = 0; i < c->n_rows; i++)
        if (strcmp(c->rows[i].name, row->name) == 0)
            return true;
    c->n_rows++;
    return true;
}

/* F16 first, then those of the list "a,b,c", then imm. */
static bool add_rows(struct comparison *c, struct failure *failure)
{
    char format[16];
    bool ok = add_row(c, "f16", false, failure);

    for (const char *at = c->o->kv; ok && at; at = strchr(at, ',')) {
        at += *at == ',';
        snprintf(format, sizeof(format), "%.*s", (int)strcspn(at, ","), at);
        ok = add_row(c, format, false, failure);
    }
    if (ok && c->o->imm)
        ok = add_row(c, "int8", true, failure) && add_row(c, "int4", true, failure);
    return ok;
}

static bool read_text(struct comparison *c)
{
    unsigned char *text;
    size_t size;

    if (!file_read(c->o->file, &text, &size, &c->failure))
        return false;
    const bool ok = tokenizer_encode(c->session.tokenizer, (const char *)text, size, false,
                                     &c->text, &c->failure);
    free(text);
    if (!ok)
        return false;
    const size_t n = c->text.n / (size_t)c->o->context;
    c->n_chunks = n < (size_t)c->o->chunks ? n : (size_t)c->o->chunks;
    if (n == 0)
        return fail_with(&c->failure, "%.100s has %zu tokens, fewer than one chunk of %lld",
                         c->o->file, c->text.n, (long long)c->o->context);
    if (n < (size_t)c->o->chunks)
        fprintf(stderr, "%s has only %zu chunks\n", c->o->file, n);
    return true;
}

static bool create_caches(struct comparison *c)
{
    struct cache_options options = {.recent_tokens = (int32_t)c->o->recent,
                                    .sink_tokens = (int32_t)c->o->sinks,
                                    .max_tokens = (int32_t)c->o->context + DECODE_TOKENS,
                                    .max_append = KVC_PAGE_TOKENS};

    for (size_t r = 0; r < c->n_rows; r++) {
        options.precision = c->rows[c->rows[r].imm ? 0 : r].precision;
        if (!session_create_cache(&c->session, &options, &c->rows[r].cache, &c->failure))
            return false;
    }
    return true;
}

static bool open_comparison(struct comparison *c)
{
    const struct session_params params = {.model_path = c->o->model,
                                          .kernels = c->o->kernels,
                                          .n_threads = (size_t)c->o->threads,
                                          .max_rows = c->n_rows * KVC_PAGE_TOKENS};

    fprintf(stderr, "loading %s\n", c->o->model);
    if (!session_open(&params, &c->session, &c->failure))
        return false;
    const struct model_shape *s = &c->session.model.shape;
    if ((size_t)c->o->context > s->n_context)
        return fail_with(&c->failure, "the model was made for contexts of up to %zu tokens",
                         s->n_context);
    c->logits = malloc(params.max_rows * s->n_vocab * sizeof(float));
    if (!c->logits)
        return fail_with(&c->failure, "out of memory");
    return read_text(c) && create_caches(c);
}

/* The logits of one call: the wanted positions of all rows. */
struct call {
    const struct comparison *c;
    size_t n_wanted;
    const int32_t *targets; /* the tokens that follow the wanted positions */
    struct position_score scores[KVC_PAGE_TOKENS][SCORE_MAX_ROWS];
};

static const float *logits_of(const struct call *call, size_t row, size_t i)
{
    return call->c->logits + (row * call->n_wanted + i) * call->c->session.model.shape.n_vocab;
}

static void score_task(void *arg, size_t i)
{
    struct call *call = arg;
    const float *rows[SCORE_MAX_ROWS] = {NULL};

    for (size_t r = 0; r < call->c->n_rows; r++)
        rows[r] = logits_of(call, r, i);
    score_position(rows, call->c->n_rows, call->c->session.model.shape.n_vocab, call->targets[i],
                   call->scores[i]);
}

/* Tokens at ... at + n - 1 of a chunk; is_last: nothing in the chunk follows the last of them. */
static bool run_call(struct comparison *c, const int32_t *chunk, size_t at, size_t n, bool is_last)
{
    const size_t first_scored = (size_t)c->o->context / 2;
    const size_t skip = at >= first_scored ? 0 : first_scored - at < n ? first_scored - at : n;
    struct forward_item items[SCORE_MAX_ROWS];
    struct call call = {.c = c, .n_wanted = n - skip, .targets = chunk + at + skip + 1};

    for (size_t r = 0; r < c->n_rows; r++)
        items[r] = (struct forward_item){.cache = c->rows[r].cache,
                                         .seq = c->rows[r].seq,
                                         .tokens = chunk + at,
                                         .n = n,
                                         .n_skip = skip,
                                         .imm = c->rows[r].imm ? c->rows[r].precision.k : KVC_F16};
    if (!forward_run(c->session.forward, items, c->n_rows, c->logits, &c->failure))
        return false;
    const size_t n_scored = call.n_wanted - is_last;
    kvc_pool_parallel_for(c->session.pool, n_scored, score_task, &call);
    for (size_t r = 0; r < c->n_rows; r++) {
        for (size_t i = 0; i < n_scored; i++)
            score_add(&c->rows[r].score, &call.scores[i][r]);
        if (is_last)
            c->rows[r].next =
                sample_greedy(logits_of(&call, r, n_scored), c->session.model.shape.n_vocab);
    }
    return true;
}

/* Calls end at the borders of pages, which count from the sinks. */
static bool run_chunk(struct comparison *c, const int32_t *chunk)
{
    const size_t n_context = (size_t)c->o->context, sinks = (size_t)c->o->sinks;

    for (size_t r = 0; r < c->n_rows; r++)
        if (kvc_seq_create(c->rows[r].cache, &c->rows[r].seq) != KVC_OK)
            return fail_with(&c->failure, "cannot create a sequence");
    for (size_t at = 0, n; at < n_context; at += n) {
        n = at < sinks ? sinks - at : KVC_PAGE_TOKENS;
        n = n < n_context - at ? n : n_context - at;
        if (!run_call(c, chunk, at, n, at + n == n_context))
            return false;
    }
    return true;
}

static bool end_chunk(struct comparison *c)
{
    for (size_t r = 0; r < c->n_rows; r++)
        if (kvc_seq_destroy(c->rows[r].cache, c->rows[r].seq) != KVC_OK)
            return fail_with(&c->failure, "cannot destroy a sequence");
    return true;
}

/* Bytes after the last chunk. Settled first: then they do not depend on how the tokens came. */
static bool measure_bytes(struct comparison *c, struct row *row)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};

    if (kvc_seq_settle(row->cache, row->seq) != KVC_OK ||
        kvc_cache_stats(row->cache, &stats) != KVC_OK)
        return fail_with(&c->failure, "cannot read the statistics of the cache");
    row->bytes_per_token = (double)stats.used_bytes / (double)c->o->context;
    row->fixed_bytes = (double)(stats.fixed_bytes - stats.free_page_bytes);
    return true;
}

static int compare_seconds(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static bool measure_decode(struct comparison *c, struct row *row)
{
    double seconds[DECODE_TOKENS];

    for (int i = 0; i < DECODE_TOKENS; i++) {
        const double start = seconds_now();
        const struct forward_item item = {.cache = row->cache,
                                          .seq = row->seq,
                                          .tokens = &row->next,
                                          .n = 1,
                                          .imm = row->imm ? row->precision.k : KVC_F16};
        if (!forward_run(c->session.forward, &item, 1, c->logits, &c->failure))
            return false;
        row->next = sample_greedy(c->logits, c->session.model.shape.n_vocab);
        seconds[i] = seconds_now() - start;
    }
    qsort(seconds, DECODE_TOKENS, sizeof(*seconds), compare_seconds);
    row->decode_tok_s =
        1.0 / seconds[DECODE_TOKENS / 2]; /* the median: others use the machine too */
    return true;
}

static double perplexity(const struct row *row)
{
    return exp(row->score.nll / (double)row->score.n);
}

static void print_progress(const struct comparison *c, size_t done, double start)
{
    const double spent = seconds_now() - start;

    fprintf(stderr, "chunk %zu of %zu:", done, c->n_chunks);
    for (size_t r = 0; r < c->n_rows; r++)
        fprintf(stderr, " %s %.3f", c->rows[r].name, perplexity(&c->rows[r]));
    fprintf(stderr, "; about %.0f s left\n", spent / (double)done * (double)(c->n_chunks - done));
}

static bool run_chunks(struct comparison *c)
{
    const double start = seconds_now();

    for (size_t i = 0; i < c->n_chunks; i++) {
        if (!run_chunk(c, c->text.ids + i * (size_t)c->o->context))
            return false;
        print_progress(c, i + 1, start);
        if (i + 1 < c->n_chunks && !end_chunk(c))
            return false;
    }
    fprintf(stderr, "timing the decode of %d tokens a row\n", DECODE_TOKENS);
    for (size_t r = 0; r < c->n_rows; r++)
        if (!measure_bytes(c, &c->rows[r]) || !measure_decode(c, &c->rows[r]))
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
static double bits_per_element(size_t head_dim, const kvc_precision *p)
{
    const size_t bytes =
        code_bytes(head_dim, p->k, p->k_scale) + code_bytes(head_dim, p->v, p->v_scale);

    return 8.0 * (double)bytes / (double)(head_dim * 2 * KVC_PAGE_TOKENS);
}

static void print_report(const struct comparison *c)
{
    struct report_row rows[SCORE_MAX_ROWS];
    const char *slash = strrchr(c->o->model, '/');
    const struct report report = {.model = slash ? slash + 1 : c->o->model,
                                  .context = (size_t)c->o->context,
                                  .tokens = c->n_chunks * (size_t)c->o->context,
                                  .rows = rows,
                                  .n_rows = c->n_rows};

    for (size_t r = 0; r < c->n_rows; r++) {
        const struct row *row = &c->rows[r];
        const double n = (double)row->score.n, ppl = perplexity(row);
        rows[r] = (struct report_row){
            .kv = row->name,
            .ppl = ppl,
            .ppl_change_pct = 100.0 * (ppl / perplexity(&c->rows[0]) - 1.0),
            .kl = row->score.kl / n,
            .top1 = (double)row->score.n_agree / n,
            .bits_per_element = bits_per_element(c->session.model.shape.head_dim, &row->precision),
            .bytes_per_token = row->bytes_per_token,
            .fixed_bytes = row->fixed_bytes,
            .decode_tok_s = row->decode_tok_s};
    }
    (c->o->json ? report_print_json : report_print_table)(&report);
}

static int compare(struct comparison *c)
{
    bool ok = open_comparison(c) && run_chunks(c);

    if (ok)
        print_report(c);
    if (ok && (fflush(stdout) != 0 || ferror(stdout)))
        ok = fail_with(&c->failure, "cannot write");
    if (!ok)
        fprintf(stderr, "kvc-engine compare: %s\n", c->failure.text);
    for (size_t r = 0; r < c->n_rows; r++)
        kvc_cache_destroy(c->rows[r].cache);
    free(c->text.ids);
    free(c->logits);
    session_close(&c->session);
    return ok ? EXIT_DONE : EXIT_FAILED;
}

int compare_command(int argc, char **argv)
{
    struct compare_options o = {.kv = "f16,int8,int4",
                                .scale = "token",
                                .context = 2048,
                                .chunks = 10,
                                .recent = 128,
                                .sinks = 4};
    const struct arg args[] = {
        {"model", ARG_TEXT, &o.model, "FILE", "GGUF file (required)", 0, 0},
        {"file", ARG_TEXT, &o.file, "TXT", "text to predict (required)", 0, 0},
        {"kv", ARG_TEXT, &o.kv, "LIST", "of f16, int8, int4 (all); f16 is the base", 0, 0},
        {"scale", ARG_CHOICE, &o.scale, "token|head|channel",
         "what shares a scale (token); channel: K only", 0, 0},
        {"imm", ARG_FLAG, &o.imm, "", "add rows that code K and V at once, before any use", 0, 0},
        {"context", ARG_INTEGER, &o.context, "N", "tokens of a chunk (2048)", 8, 1 << 24},
        {"chunks", ARG_INTEGER, &o.chunks, "N", "most chunks to run (10)", 1, 1e6},
        {"recent", ARG_INTEGER, &o.recent, "N", "newest tokens kept exact (128)", 0, 1e6},
        {"sinks", ARG_INTEGER, &o.sinks, "N", "first tokens kept exact (4)", 0, 64},
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
        printf(
            "Usage: kvc-engine compare --model FILE --file TXT [OPTIONS]\n"
            "Perplexity on a text and distance to an F16 cache, for several formats at once.\n\n");
        args_print_help(args, n_args);
        return EXIT_DONE;
    }
    if (ok && (!o.model || !o.file))
        ok = fail_with(&failure, "--model and --file are required");
    if (!ok || !add_rows(&c, &failure)) {
        fprintf(stderr, "kvc-engine compare: %s\nTry 'kvc-engine compare --help'.\n", failure.text);
        return EXIT_USAGE;
    }
    return compare(&c);
}
