/* The results of kvc-photos as a table, as JSON and as a picture. */
#include "photos_report.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const method_names[N_METHODS] = {"prune", "merge", "merge_bias"};

static bool same_photo(const struct photos_row *a, const struct photos_row *b)
{
    return strcmp(a->photo, b->photo) == 0;
}

static bool same_layer(const struct photos_row *a, const struct photos_row *b)
{
    return a->layer == b->layer;
}

static bool same_report(const struct photos_row *a, const struct photos_row *b)
{
    (void)a, (void)b;
    return true;
}

typedef bool same_fn(const struct photos_row *a, const struct photos_row *b);

/* Is row i the first of its group? */
static bool is_first(const struct photos_report *report, same_fn *same, size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (same(&report->rows[i], &report->rows[j]))
            return false;
    return true;
}

static size_t count_groups(const struct photos_report *report, same_fn *same)
{
    size_t n = 0;

    for (size_t i = 0; i < report->n_rows; i++)
        n += is_first(report, same, i);
    return n;
}

/* Means over the rows of the group that row i belongs to. */
static struct errors group_mean(const struct photos_report *report, same_fn *same, size_t i,
                                int round, int method)
{
    struct errors mean = {0};
    double n = 0.0;

    for (size_t j = 0; j < report->n_rows; j++) {
        const struct errors *e = &report->rows[j].outcome.rounds[round][method];
        if (!same(&report->rows[i], &report->rows[j]))
            continue;
        mean.same += e->same;
        mean.shifted += e->shifted;
        mean.reported += e->reported;
        n += 1.0;
    }
    mean.same /= n;
    mean.shifted /= n;
    mean.reported /= n;
    return mean;
}

/* Of how many comparisons does merging with the bias win? Both kinds of query count. */
static size_t count_wins(const struct photos_report *report)
{
    size_t n = 0;

    for (size_t i = 0; i < report->n_rows; i++)
        for (int round = 0; round < N_ROUNDS; round++) {
            const struct errors *e = report->rows[i].outcome.rounds[round];
            n += e[MERGE_BIAS].same < e[MERGE].same;
            n += e[MERGE_BIAS].shifted < e[MERGE].shifted;
        }
    return n;
}

/* In how many cases is the reported error within a factor of 2 of that of the held-out queries? */
static size_t count_within_2x(const struct photos_report *report, int method)
{
    size_t n = 0;

    for (size_t i = 0; i < report->n_rows; i++)
        for (int round = 0; round < N_ROUNDS; round++) {
            const struct errors *e = &report->rows[i].outcome.rounds[round][method];
            n += e->reported <= 2.0 * e->same && e->same <= 2.0 * e->reported;
        }
    return n;
}

static double share(const struct photos_report *report, int round)
{
    size_t kept[N_ROUNDS];

    experiment_kept(report->kvx, kept);
    return (double)kept[round] / (double)(report->kvx->n_tokens - report->kvx->n_prefix);
}

static void print_groups(const struct photos_report *report, same_fn *same, const char *kind)
{
    for (size_t i = 0; i < report->n_rows; i++) {
        char label[KVX_NAME_SIZE + 16] = "mean";
        if (!is_first(report, same, i))
            continue;
        if (same == same_photo)
            snprintf(label, sizeof(label), "%s", report->rows[i].photo);
        else if (same == same_layer)
            snprintf(label, sizeof(label), "%s %u", kind, report->rows[i].layer);
        for (int round = 0; round < N_ROUNDS; round++) {
            struct errors e[N_METHODS];
            for (int method = 0; method < N_METHODS; method++)
                e[method] = group_mean(report, same, i, round, method);
            printf("%-16s %4.0f %%  %8.4f %8.4f %8.4f   %8.4f %8.4f %8.4f   %8.4f %8.4f %8.4f\n",
                   label, 100.0 * share(report, round), e[PRUNE].same, e[MERGE].same,
                   e[MERGE_BIAS].same, e[PRUNE].shifted, e[MERGE].shifted, e[MERGE_BIAS].shifted,
                   e[PRUNE].reported, e[MERGE].reported, e[MERGE_BIAS].reported);
        }
    }
    printf("\n");
}

static void print_header(const struct photos_report *report)
{
    const struct kvx *kvx = report->kvx;
    char prefix[48] = "";

    if (kvx->n_prefix == 1)
        snprintf(prefix, sizeof(prefix), " and a class token");
    else if (kvx->n_prefix > 1)
        snprintf(prefix, sizeof(prefix), " and %zu tokens before them", kvx->n_prefix);
    printf("%zu photos, %zu layers, %zu heads; %zu x %zu patches%s; %s\n",
           count_groups(report, same_photo), count_groups(report, same_layer), kvx->n_heads,
           kvx->grid_rows, kvx->grid_cols, prefix,
           report->shared ? "the heads of a layer share a choice" : "each head has its own choice");
    printf("Mean relative error of the attention output. + bias: ln(size) on merged rows.\n"
           "Reported: the error foretold from the %zu scoring queries alone.\n\n",
           kvx->n_scoring);
    printf("%24s  %-26s   %-26s   %s\n", "", "queries of the same kind", "shifted queries",
           "reported");
    printf("%24s  %8s %8s %8s   %8s %8s %8s   %8s %8s %8s\n", "kept ", "prune", "merge", "+ bias",
           "prune", "merge", "+ bias", "prune", "merge", "+ bias");
}

void photos_print_table(const struct photos_report *report)
{
    const size_t n = report->n_rows * N_ROUNDS;

    print_header(report);
    print_groups(report, same_report, "");
    print_groups(report, same_layer, "layer");
    print_groups(report, same_photo, "photo");
    printf("merging with bias has the smaller error in %zu of %zu comparisons\n",
           count_wins(report), 2 * n);
    printf(
        "reported within a factor of 2 of the same kind: prune %zu, merge %zu, + bias %zu of %zu\n",
        count_within_2x(report, PRUNE), count_within_2x(report, MERGE),
        count_within_2x(report, MERGE_BIAS), n);
}

static void print_json_row(const struct photos_report *report, const struct photos_row *row,
                           int round)
{
    size_t kept[N_ROUNDS];

    experiment_kept(report->kvx, kept);
    printf("{\"photo\":\"%s\",\"layer\":%u", row->photo, row->layer);
    if (row->head != ALL_HEADS)
        printf(",\"head\":%d", row->head);
    printf(",\"kept\":%zu,\"share\":%.9g", kept[round], share(report, round));
    for (int method = 0; method < N_METHODS; method++) {
        const struct errors *e = &row->outcome.rounds[round][method];
        printf(",\"%s\":{\"same\":%.9g,\"shifted\":%.9g,\"reported\":%.9g}", method_names[method],
               e->same, e->shifted, e->reported);
    }
    printf("}");
}

void photos_print_json(const struct photos_report *report)
{
    const char *comma = "";

    printf("{\"shared\":%s,\"heads\":%zu,\"comparisons\":%zu,\"bias_wins\":%zu,\"cases\":%zu,"
           "\"within_2x\":{",
           report->shared ? "true" : "false", report->kvx->n_heads, report->n_rows * N_ROUNDS * 2,
           count_wins(report), report->n_rows * N_ROUNDS);
    for (int method = 0; method < N_METHODS; method++)
        printf("%s\"%s\":%zu", method ? "," : "", method_names[method],
               count_within_2x(report, method));
    printf("},\"rows\":[");
    for (size_t i = 0; i < report->n_rows; i++)
        for (int round = 0; round < N_ROUNDS; round++) {
            printf("%s\n", comma);
            print_json_row(report, &report->rows[i], round);
            comma = ",";
        }
    printf("\n]}\n");
}

/* A line of a data block: x, then same and shifted of each method. Returns the largest of these. */
static double write_point(FILE *out, const struct photos_report *report, same_fn *same, size_t i,
                          int round, double x)
{
    double top = 0.0;

    fprintf(out, "%.4g", x);
    for (int method = 0; method < N_METHODS; method++) {
        const struct errors e = group_mean(report, same, i, round, method);
        fprintf(out, " %.5f %.5f", e.same, e.shifted);
        top = fmax(top, fmax(e.same, e.shifted));
    }
    fprintf(out, "\n");
    return top;
}

/* Column 2: same, 3: shifted. Only one panel names the lines, for all. */
static void write_panel(FILE *out, const char *data, const char *by, int column, bool names)
{
    static const char *const lines[N_METHODS] = {"prune", "merge, no bias", "merge, bias ln(size)"};

    fprintf(out, "set title '%s, by %s'\n%s\nplot",
            column == 2 ? "queries of the same kind" : "shifted queries", by,
            names ? "set key at screen 0.53,0.99 center top maxrows 1 width -2 reverse Left"
                  : "set key off");
    for (int method = 0; method < N_METHODS; method++)
        fprintf(out, "%s $%s using 1:%d with linespoints ls %d title '%s'", method ? "," : "", data,
                column + 2 * method, method + 1, lines[method]);
    fprintf(out, "\n");
}

static void write_plot(FILE *out, const struct photos_report *report)
{
    enum { BY_LAYER_ROUND = 1 };
    double top = 0.0;

    fprintf(out, "$by_share << EOD\n");
    for (int round = 0; round < N_ROUNDS; round++)
        top = fmax(top,
                   write_point(out, report, same_report, 0, round, 100.0 * share(report, round)));
    fprintf(out, "EOD\n$by_layer << EOD\n");
    for (size_t i = 0; i < report->n_rows; i++)
        if (is_first(report, same_layer, i))
            top = fmax(top, write_point(out, report, same_layer, i, BY_LAYER_ROUND,
                                        report->rows[i].layer));
    fprintf(out,
            "EOD\n"
            "set terminal svg size 900,680 font 'sans-serif,13' background 'white' "
            "name 'pruning_and_merging'\n"
            "set style line 1 lc rgb '#d55e00' lw 2 pt 7 ps 0.6\n"
            "set style line 2 lc rgb '#777777' lw 2 pt 5 ps 0.6\n"
            "set style line 3 lc rgb '#0072b2' lw 2 pt 9 ps 0.8\n"
            "set multiplot layout 2,2 margins 0.08,0.98,0.09,0.90 spacing 0.09,0.17\n"
            "set grid y\nset yrange [0:%.4g]\nset ylabel 'relative error' offset 1,0\n"
            "set xlabel 'patches kept, %% (fewer to the right)'\nset xrange [80:38]\nset xtics "
            "(75, 56, 42)\n",
            1.05 * top);
    write_panel(out, "by_share", "patches kept", 2, true);
    write_panel(out, "by_share", "patches kept", 3, false);
    fprintf(out,
            "set xlabel 'layer (%.0f %% kept)'\nset xrange [*:*] noextend\n"
            "set offsets 0.5, 0.5, 0, 0\nset xtics auto\n",
            100.0 * share(report, BY_LAYER_ROUND));
    write_panel(out, "by_layer", "layer", 2, false);
    write_panel(out, "by_layer", "layer", 3, false);
    fprintf(out, "unset multiplot\n");
}

bool photos_write_plot(const struct photos_report *report, const char *path,
                       struct failure *failure)
{
    FILE *out = fopen(path, "w");

    if (!out)
        return fail_with(failure, "cannot write %s: %s", path, strerror(errno));
    write_plot(out, report);
    const bool failed = ferror(out) != 0;
    if (fclose(out) != 0 || failed)
        return fail_with(failure, "cannot write %s", path);
    return true;
}
