/* The result of a comparison, as a table or as JSON. */
#include "report.h"

#include <stdio.h>
#include <string.h>

#include "utf8.h"

static void print_heading(const struct report *report)
{
    printf(
        "%s on %s: %zu tokens in chunks of %zu, scored from position %zu on; calibration: %s\n\n",
        report->model, report->text, report->tokens, report->context, report->first_scored,
        *report->calibration ? report->calibration : "none");
}

static size_t first_bucket(const struct report *report)
{
    return (report->first_scored + 1) / report->bucket;
}

static size_t n_buckets(const struct report *report)
{
    return (report->context + report->bucket - 1) / report->bucket;
}

/* Mean KL by position, if there are several buckets. */
static void print_buckets(const struct report *report)
{
    if (n_buckets(report) - first_bucket(report) < 2)
        return;
    printf("\nMean KL up to position:\n%-14s", "KV");
    for (size_t b = first_bucket(report); b < n_buckets(report); b++)
        printf(" %9zu", (b + 1) * report->bucket);
    printf("\n");
    for (size_t i = 1; i < report->n_rows; i++) {
        const struct report_row *r = &report->rows[i];
        printf("%-14s", r->kv);
        for (size_t b = first_bucket(report); b < n_buckets(report); b++)
            printf(" %9.2e", r->buckets[b].kl / (double)r->buckets[b].n);
        printf("\n");
    }
}

/* A row that looks as if it lost nothing. */
static void print_uncoded(const struct report *report)
{
    for (size_t i = 0; i < report->n_rows; i++)
        if (!report->rows[i].coded && strcmp(report->rows[i].kv, "f16") != 0)
            printf("%s: nothing is coded in so short a context: the newest tokens stay F16, and "
                   "without a calibration all, until mean and scale are measured.\n",
                   report->rows[i].kv);
}

void report_print_table(const struct report *report)
{
    print_heading(report);
    printf("%-14s %-11s %10s %9s %11s %8s %7s %12s %9s %13s\n", "KV", "policy", "perplexity",
           "change %", "mean KL", "top-1 %", "bits", "bytes/token", "fixed KB", "decode tok/s");
    for (size_t i = 0; i < report->n_rows; i++) {
        const struct report_row *r = &report->rows[i];
        printf("%-14s %-11s %10.4f %+9.3f %11.3e %8.2f %7.3f %12.0f %9.0f %13.1f\n", r->kv,
               r->policy, r->ppl, r->ppl_change_pct, r->kl, 100.0 * r->top1, r->bits_per_element,
               r->bytes_per_token, r->fixed_bytes / 1024.0, r->decode_tok_s);
    }
    printf("\nKL in nats to the first row, on the same tokens. bits: codes with parameters, an "
           "element. "
           "bytes/token: all in use at the end of a context. decode tok/s: the whole engine, most "
           "of it weights.\n");
    print_uncoded(report);
    print_buckets(report);
}

const char *report_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

void report_print_string(const char *text, size_t size)
{
    putchar('"');
    for (size_t i = 0, n; i < size; i += n) {
        uint32_t c = 0;
        n = utf8_decode(text + i, size - i, &c);
        if (n == 0) {
            fputs("\\ufffd", stdout);
            n = 1;
        } else if (c == '"' || c == '\\') {
            printf("\\%c", (char)c);
        } else if (c < 0x20) {
            printf("\\u%04x", (unsigned)c);
        } else {
            fwrite(text + i, 1, n, stdout);
        }
    }
    putchar('"');
}

static void print_json_buckets(const struct report *report, const struct report_row *r)
{
    const char *comma = "";

    printf(",\"buckets\":[");
    for (size_t b = first_bucket(report); b < n_buckets(report); b++, comma = ",")
        printf("%s{\"to\":%zu,\"n\":%llu,\"kl\":%.9g}", comma, (b + 1) * report->bucket,
               (unsigned long long)r->buckets[b].n, r->buckets[b].kl / (double)r->buckets[b].n);
    printf("]}");
}

void report_print_json(const struct report *report)
{
    printf("{\"model\":");
    report_print_string(report->model, strlen(report->model));
    printf(",\"text\":");
    report_print_string(report->text, strlen(report->text));
    printf(",\"calibration\":");
    if (*report->calibration)
        report_print_string(report->calibration, strlen(report->calibration));
    else
        printf("\"none\"");
    printf(",\"context\":%zu,\"tokens\":%zu,\"rows\":[", report->context, report->tokens);
    for (size_t i = 0; i < report->n_rows; i++) {
        const struct report_row *r = &report->rows[i];
        printf("%s\n{\"kv\":\"%s\",\"policy\":\"%s\",\"vectors\":\"%s\",\"ppl\":%.9g,\"ppl_change_"
               "pct\":%.9g,\"kl\":%."
               "9g,\"top1\":%.9g,"
               "\"bits_per_element\":%.9g,\"coded\":%s,\"bytes_per_token\":%.9g,"
               "\"fixed_bytes\":%.0f,\"decode_tok_s\":%.9g",
               i ? "," : "", r->kv, r->policy, r->vectors, r->ppl, r->ppl_change_pct, r->kl,
               r->top1, r->bits_per_element, r->coded ? "true" : "false", r->bytes_per_token,
               r->fixed_bytes, r->decode_tok_s);
        print_json_buckets(report, r);
    }
    printf("\n]}\n");
}

static void write_csv_text(FILE *file, const char *text)
{
    const bool quoted = strpbrk(text, ",\"\r\n") != NULL;

    for (fputs(quoted ? "\"" : "", file); *text; text++)
        fputs(*text == '"' ? "\"\"" : (const char[]){*text, '\0'}, file);
    fputs(quoted ? "\"," : ",", file);
}

static void write_csv_line(FILE *file, const struct report *report, const struct report_row *r,
                           size_t from, size_t to, const struct score *s)
{
    const double n = (double)s->n;

    write_csv_text(file, report->model);
    write_csv_text(file, report->text);
    fprintf(file, "%s,%s,%s,%.6g,%.8g,%zu,%zu,%llu,%.9g,%.9g,%.9g\n", r->kv, r->policy, r->vectors,
            r->bits_per_element, r->bytes_per_token, from, to, (unsigned long long)s->n,
            score_perplexity(s), s->kl / n, (double)s->n_agree / n);
}

bool report_write_csv(const struct report *report, const char *path, struct failure *failure)
{
    FILE *file = fopen(path, "w");

    if (!file)
        return fail_with(failure, "cannot write %.100s", path);
    fprintf(file, "model,text,kv,policy,vectors,bits,bytes_per_token,from,to,n,ppl,kl,top1\n");
    for (size_t i = 0; i < report->n_rows; i++) {
        const struct report_row *r = &report->rows[i];
        struct score all = {0};
        for (size_t b = first_bucket(report); b < n_buckets(report); b++) {
            const size_t from = b * report->bucket, to = from + report->bucket;
            score_join(&all, &r->buckets[b]);
            if (n_buckets(report) - first_bucket(report) > 1)
                write_csv_line(file, report, r, from, to, &r->buckets[b]);
        }
        write_csv_line(file, report, r, report->first_scored, report->context, &all);
    }
    const bool ok = !ferror(file);
    return (fclose(file) == 0 && ok) || fail_with(failure, "cannot write %.100s", path);
}

/* Rows up to the first beyond the limit, or all; *rate is that of the last within it. */
static size_t rows_to_limit(const struct report *report, double limit, double *rate)
{
    size_t n = 0;

    *rate = 0.0;
    while (n < report->n_rows && report->rows[n].kl <= limit)
        *rate = report->rows[n++].rate;
    return n < report->n_rows ? n + 1 : n;
}

void report_print_tuning(const struct report *report, double limit)
{
    double rate;
    const size_t n = rows_to_limit(report, limit, &rate);

    print_heading(report);
    printf("%8s %-6s %10s %9s %11s %8s %12s\n", "pruned %", "KV", "perplexity", "change %",
           "mean KL", "top-1 %", "bytes/token");
    for (size_t i = 0; i < n; i++) {
        const struct report_row *r = &report->rows[i];
        printf("%8.0f %-6s %10.4f %+9.3f %11.3e %8.2f %12.0f\n", 100.0 * r->rate, r->kv, r->ppl,
               r->ppl_change_pct, r->kl, 100.0 * r->top1, r->bytes_per_token);
    }
    printf("\nUp to %.0f %% the mean KL stays within %g nats.\n", 100.0 * rate, limit);
}

void report_print_tuning_json(const struct report *report, double limit)
{
    double rate;
    const size_t n = rows_to_limit(report, limit, &rate);

    printf("{\"model\":");
    report_print_string(report->model, strlen(report->model));
    printf(",\"context\":%zu,\"tokens\":%zu,\"limit\":%.9g,\"rate\":%.9g,\"rows\":[",
           report->context, report->tokens, limit, rate);
    for (size_t i = 0; i < n; i++) {
        const struct report_row *r = &report->rows[i];
        printf("%s\n{\"rate\":%.9g,\"kv\":\"%s\",\"ppl\":%.9g,\"ppl_change_pct\":%.9g,"
               "\"kl\":%.9g,\"top1\":%.9g,\"bytes_per_token\":%.9g}",
               i ? "," : "", r->rate, r->kv, r->ppl, r->ppl_change_pct, r->kl, r->top1,
               r->bytes_per_token);
    }
    printf("\n]}\n");
}
