/* attend_report.c - results of 'kvc-bench attend' as a table or as JSON. */
#include <stdio.h>
#include <string.h>

#include "attend.h"

void attend_print_json(const struct attend_row *rows, size_t n_rows, const struct machine *machine)
{
    printf("{\"read_gbps\":%.4g,", machine_read(machine));
    machine_print_json(machine);
    printf(",\"rows\":[");
    for (size_t i = 0; i < n_rows; i++) {
        const struct attend_row *row = &rows[i];
        const struct machine_peak *peak = machine_peak(machine, row->n_threads);
        printf(
            "%s\n{\"table\":\"%s\",\"format\":\"%s\",\"n_kv\":%ld,\"heads\":%ld,\"kv_heads\":%ld,"
            "\"head_dim\":%ld,\"threads\":%ld,\"exact\":%s,\"scores\":\"%s\",\"state\":\"%s\","
            "\"keep\":%g,"
            "\"block\":%ld,\"us\":%.2f,\"bytes\":%zu,\"gbps\":%.4g,\"read_share\":%.4g,"
            "\"gflops\":%.4g,\"fma_share\":%.4g,",
            i ? "," : "", row->table, bench_formats[row->shape.format], row->shape.n_kv,
            row->shape.n_heads, row->shape.n_kv_heads, row->shape.head_dim, row->n_threads,
            row->exact ? "true" : "false", attend_scores[row->scores], attend_states[row->state],
            row->keep, row->block, row->us, row->bytes, row->gbps, row->gbps / peak->read,
            row->gflops, row->gflops / peak->fma);
        if (peak->vnni > 0)
            printf("\"vnni_share\":%.4g,", row->gflops / peak->vnni);
        else
            printf("\"vnni_share\":null,");
        if (row->append_us > 0)
            printf("\"append_us\":%.3f,\"append_share\":%.4g}", row->append_us,
                   row->append_us / row->us);
        else
            printf("\"append_us\":null,\"append_share\":null}");
    }
    printf("\n]}\n");
}

static bool same_shape(const struct bench_shape *a, const struct bench_shape *b)
{
    return a->format == b->format && a->n_kv == b->n_kv && a->n_heads == b->n_heads &&
           a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim;
}

static bool same_work(const struct attend_row *a, const struct attend_row *b)
{
    return same_shape(&a->shape, &b->shape) && a->n_threads == b->n_threads &&
           a->scores == b->scores && a->state == b->state && a->block == b->block;
}

/* The same with the table ref, or NULL. */
static const struct attend_row *find_ref(const struct attend_row *rows, size_t n_rows,
                                         const struct attend_row *like)
{
    for (size_t i = 0; i < n_rows; i++)
        if (strcmp(rows[i].table, "ref") == 0 && same_work(&rows[i], like))
            return &rows[i];
    return NULL;
}

/* The same with the whole cache and no scores, or NULL. */
static const struct attend_row *find_plain(const struct attend_row *rows, size_t n_rows,
                                           const struct attend_row *like)
{
    for (size_t i = 0; i < n_rows; i++) {
        struct attend_row plain = *like;
        plain.scores = KVC_SCORE_NONE;
        plain.state = ATTEND_WHOLE;
        plain.block = 0;
        if (strcmp(rows[i].table, like->table) == 0 && same_work(&rows[i], &plain))
            return &rows[i];
    }
    return NULL;
}

/* "1.3x", or "-" without the other row. */
static const char *ratio(char text[32], const struct attend_row *other, double us, bool of_other)
{
    if (!other)
        return "-";
    snprintf(text, 32, "%.2fx", of_other ? us / other->us : other->us / us);
    return text;
}

static void print_row(const struct attend_row *row, const struct machine_peak *peak,
                      const struct attend_row *ref, const struct attend_row *plain)
{
    char heads[32], state[48], append[32] = "-", vnni[32] = "-", faster[32], cost[32];
    snprintf(heads, sizeof heads, "%ld/%ld", row->shape.n_heads, row->shape.n_kv_heads);
    if (row->block == 0)
        snprintf(state, sizeof state, "%s", attend_states[row->state]);
    else
        snprintf(state, sizeof state, "%s %ld", attend_states[row->state], row->block);
    if (row->append_us > 0)
        snprintf(append, sizeof append, "%.2f%%", 100 * row->append_us / row->us);
    if (peak->vnni > 0)
        snprintf(vnni, sizeof vnni, "%.1f%%", 100 * row->gflops / peak->vnni);
    printf("%-7s %4ld %7ld %-8s %7ld %-6s %-6s %-12s %10.1f %8.2f %7.2f %6.0f%% %6.1f%% %7s %7s "
           "%7s %8s\n",
           heads, row->shape.head_dim, row->shape.n_kv, bench_formats[row->shape.format],
           row->n_threads, row->table, attend_scores[row->scores], state, row->us,
           1e-6 * (double)row->bytes, row->gbps, 100 * row->gbps / peak->read,
           100 * row->gflops / peak->fma, vnni, append, ratio(cost, plain, row->us, true),
           ratio(faster, ref, row->us, false));
}

void attend_print_table(const struct attend_row *rows, size_t n_rows, const struct machine *machine)
{
    machine_print_table(machine);
    printf("%-7s %4s %7s %-8s %7s %-6s %-6s %-12s %10s %8s %7s %7s %7s %7s %7s %7s %8s\n", "heads",
           "dim", "n_kv", "format", "threads", "table", "scores", "rows", "us", "MB", "GB/s",
           "of read", "of FMA", "of VNNI", "append", "of plain", "vs ref");
    for (size_t i = 0; i < n_rows; i++)
        print_row(&rows[i], machine_peak(machine, rows[i].n_threads),
                  find_ref(rows, n_rows, &rows[i]), find_plain(rows, n_rows, &rows[i]));
    printf(
        "\nOf a token and layer. of read, FMA, VNNI: of the machine's peak with as many threads.\n"
        "append: K and V of a token and its share of sealing a page, of the time of attention.\n"
        "of plain: by the time over all rows and without scores. vs ref: how much faster.\n"
        "Products: %s.\n",
        n_rows > 0 && rows[0].exact ? "of floats (--exact)"
                                    : "with codes, of 16-bit integers where a table has them");
}
