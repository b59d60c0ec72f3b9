/* The result of a comparison, as a table or as JSON. */
#include "report.h"

#include <stdio.h>
#include <string.h>

#include "utf8.h"

void report_print_table(const struct report *report)
{
    printf("%s: %zu tokens in chunks of %zu, second halves scored\n\n", report->model,
           report->tokens, report->context);
    printf("%-9s %10s %9s %11s %8s %7s %12s %9s %13s\n", "KV", "perplexity", "change %", "mean KL",
           "top-1 %", "bits", "bytes/token", "fixed KB", "decode tok/s");
    for (size_t i = 0; i < report->n_rows; i++) {
        const struct report_row *r = &report->rows[i];
        printf("%-9s %10.4f %+9.3f %11.3e %8.2f %7.3f %12.0f %9.0f %13.1f\n", r->kv, r->ppl,
               r->ppl_change_pct, r->kl, 100.0 * r->top1, r->bits_per_element, r->bytes_per_token,
               r->fixed_bytes / 1024.0, r->decode_tok_s);
    }
    printf("\nKL in nats to the first row, on the same tokens. bits: codes with parameters, an "
           "element. "
           "bytes/token: all in use at the end of a context. decode tok/s: the whole engine, most "
           "of it weights.\n");
    if (report->n_rows && strstr(report->rows[report->n_rows - 1].kv, "-imm"))
        printf("-imm: K and V coded and decoded at once; their cache holds the result as F16.\n");
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

void report_print_json(const struct report *report)
{
    printf("{\"model\":");
    report_print_string(report->model, strlen(report->model));
    printf(",\"context\":%zu,\"tokens\":%zu,\"rows\":[", report->context, report->tokens);
    for (size_t i = 0; i < report->n_rows; i++) {
        const struct report_row *r = &report->rows[i];
        printf("%s\n{\"kv\":\"%s\",\"ppl\":%.9g,\"ppl_change_pct\":%.9g,\"kl\":%.9g,\"top1\":%.9g,"
               "\"bits_per_element\":%.9g,\"bytes_per_token\":%.9g,\"fixed_bytes\":%.0f,"
               "\"decode_tok_s\":%.9g}",
               i ? "," : "", r->kv, r->ppl, r->ppl_change_pct, r->kl, r->top1, r->bits_per_element,
               r->bytes_per_token, r->fixed_bytes, r->decode_tok_s);
    }
    printf("\n]}\n");
}
