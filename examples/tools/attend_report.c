/* attend_report.c - results of 'kvc-bench attend' as a table or as JSON. */
#include <stdio.h>
#include <string.h>

#include "attend.h"

void attend_print_json(const struct attend_row *rows, size_t n_rows,
                       const struct bench_list *threads, const double *read_gbps)
{
    double best = 0;
    for (size_t i = 0; i < threads->n; i++)
        best = read_gbps[i] > best ? read_gbps[i] : best;
    printf("{\"read_gbps\":%.2f,\"rows\":[", best);
    for (size_t i = 0; i < n_rows; i++) {
        const struct attend_row *row = &rows[i];
        printf(
            "%s\n{\"table\":\"%s\",\"format\":\"%s\",\"n_kv\":%ld,\"heads\":%ld,\"kv_heads\":%ld,"
            "\"head_dim\":%ld,\"threads\":%ld,\"us\":%.2f,\"gbps\":%.3f,\"append_us\":%.3f}",
            i ? "," : "", row->table, attend_formats[row->shape.format], row->shape.n_kv,
            row->shape.n_heads, row->shape.n_kv_heads, row->shape.head_dim, row->n_threads, row->us,
            row->gbps, row->append_us);
    }
    printf("\n]}\n");
}

static bool same_shape(const struct attend_shape *a, const struct attend_shape *b)
{
    return a->format == b->format && a->n_kv == b->n_kv && a->n_heads == b->n_heads &&
           a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim;
}

static const struct attend_row *find_ref(const struct attend_row *rows, size_t n_rows,
                                         const struct attend_row *like)
{
    for (size_t i = 0; i < n_rows; i++)
        if (strcmp(rows[i].table, "ref") == 0 && rows[i].n_threads == like->n_threads &&
            same_shape(&rows[i].shape, &like->shape))
            return &rows[i];
    return NULL;
}

static double read_of(const struct bench_list *threads, const double *read_gbps, long n_threads)
{
    size_t i = 0;
    while (i + 1 < threads->n && threads->items[i] != n_threads)
        i++;
    return read_gbps[i];
}

void attend_print_table(const struct attend_row *rows, size_t n_rows,
                        const struct bench_list *threads, const double *read_gbps)
{
    printf("Memory reads at");
    for (size_t i = 0; i < threads->n; i++)
        printf("%s %.2f GB/s with %ld thread%s", i ? "," : "", read_gbps[i], threads->items[i],
               threads->items[i] == 1 ? "" : "s");
    printf(".\n\n%-9s %4s %8s %-8s %7s %-7s %12s %9s %8s %8s %8s\n", "heads", "dim", "n_kv",
           "format", "threads", "table", "us", "GB/s", "of read", "append", "vs ref");
    for (size_t i = 0; i < n_rows; i++) {
        const struct attend_row *row = &rows[i];
        const struct attend_row *ref = find_ref(rows, n_rows, row);
        char heads[32], ratio[32] = "-";
        snprintf(heads, sizeof heads, "%ld/%ld", row->shape.n_heads, row->shape.n_kv_heads);
        if (ref)
            snprintf(ratio, sizeof ratio, "%.1fx", ref->us / row->us);
        printf("%-9s %4ld %8ld %-8s %7ld %-7s %12.1f %9.2f %7.0f%% %7.2f%% %8s\n", heads,
               row->shape.head_dim, row->shape.n_kv, attend_formats[row->shape.format],
               row->n_threads, row->table, row->us, row->gbps,
               100 * row->gbps / read_of(threads, read_gbps, row->n_threads),
               100 * row->append_us / row->us, ratio);
    }
    printf("\nOf a token and layer. append: K and V of a token and its share of sealing a page, of "
           "the "
           "time of attention.\n");
}
