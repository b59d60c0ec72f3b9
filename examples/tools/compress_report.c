/* compress_report.c - results of 'kvc-bench compress' as a table or as JSON. */
#include <stdio.h>

#include "compress.h"

static void print_time(const struct compress_time *time)
{
    printf("\"ms\":%.3f,\"min_ms\":%.3f,\"max_ms\":%.3f", time->median, time->min, time->max);
}

void compress_print_json(const struct compress_bench *b, const struct compress_row *rows,
                         size_t n_rows)
{
    const struct compress_options *o = b->options;
    printf("{\"kernels\":\"%s\",\"layers\":%ld,\"heads\":%ld,\"kv_heads\":%ld,\"head_dim\":%ld,"
           "\"tokens\":%ld,\"window\":%ld,\"repeat\":%ld,\"rows\":[",
           kvc_ctx_kernels(b->ctx), o->n_layers, o->n_heads, o->n_kv_heads, o->head_dim,
           o->n_tokens, o->window, o->repeat);
    for (size_t i = 0; i < n_rows; i++) {
        const struct compress_row *row = &rows[i];
        printf("%s\n{\"step\":\"%s\",\"tokens_left\":%zu,", i ? "," : "", row->step, row->n_left);
        print_time(&row->time);
        printf(",\"cpu_ms\":%.3f,\"parts\":[", row->cpu.median);
        for (size_t p = 0; p < row->n_parts; p++) {
            printf("%s{\"part\":\"%s\",", p ? "," : "", row->parts[p]);
            print_time(&row->part_times[p]);
            printf("}");
        }
        printf("]}");
    }
    printf("\n]}\n");
}

static void print_line(const char *indent, const char *name, const struct compress_time *time)
{
    printf("%s%-*s %9.2f %9.2f %9.2f", indent, 32 - (*indent ? 2 : 0), name, time->median,
           time->min, time->max);
}

static const char *plural(long n)
{
    return n == 1 ? "" : "s";
}

void compress_print_table(const struct compress_bench *b, const struct compress_row *rows,
                          size_t n_rows)
{
    const struct compress_options *o = b->options;
    printf("%ld visual tokens, %ld layer%s, %ld/%ld heads of %ld, %s; milliseconds over %ld run%s\n"
           "\n%-32s %9s %9s %9s %9s %7s\n",
           o->n_tokens, o->n_layers, plural(o->n_layers), o->n_heads, o->n_kv_heads, o->head_dim,
           kvc_ctx_kernels(b->ctx), o->repeat, plural(o->repeat), "step", "median", "min", "max",
           "cpu", "tokens");
    for (size_t i = 0; i < n_rows; i++) {
        print_line("", rows[i].step, &rows[i].time);
        printf(" %9.2f %7zu\n", rows[i].cpu.median, rows[i].n_left);
        for (size_t p = 0; p < rows[i].n_parts && rows[i].n_parts > 1; p++) {
            print_line("  ", rows[i].parts[p], &rows[i].part_times[p]);
            printf("\n");
        }
    }
    printf("\ncpu: processor time of the step. tokens: visual tokens left.\n"
           "Indented: parts of the step, each a median of its own, so they need not add up.\n");
}
