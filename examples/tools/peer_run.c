/* peer_run.c - 'kvc-bench peer': both sides in turn. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "peer.h"
#include "sealed.h"

static const double settle_seconds = 0.02;

enum { MIN_PAIRS = 5, MAX_PAIRS = 512 };

/* Outputs may differ by so much. K and V are stored without loss, or almost; what differs is the
 * rounding of queries. ggml adds F16 values up in F16: with tens of thousands of tokens it loses
 * more. */
static const double max_difference[PEER_N_FORMATS] = {0.25, 0.05, 0.05};

struct bench {
    const struct peer_options *options;
    struct sealed ours;
    struct peer *ggml;
    size_t step; /* runs so far: layers take turns */
    double ours_us[MAX_PAIRS], ggml_us[MAX_PAIRS], ratios[MAX_PAIRS];
};

static int attend_ours(struct bench *b, size_t layer)
{
    return sealed_attend(&b->ours, (int32_t)layer, NULL);
}

static int attend_ggml(struct bench *b, size_t layer)
{
    return peer_attend(b->ggml, layer);
}

/* One run of a side, the last of some: the first ones wake its threads, until the other side's have
 * gone to sleep. OpenMP's spin for milliseconds before they do. */
static int time_side(struct bench *b, int (*attend)(struct bench *b, size_t layer), double *us)
{
    size_t n_layers = (size_t)b->ours.n_layers;
    double begin = bench_seconds(), start;
    do {
        int code = attend(b, b->step++ % n_layers);
        if (code != BENCH_GO)
            return code;
        start = bench_seconds();
    } while (start - begin < settle_seconds);
    int code = attend(b, b->step++ % n_layers);
    *us = 1e6 * (bench_seconds() - start);
    return code;
}

static double largest_difference(const struct bench *b)
{
    const struct bench_shape *shape = &b->ours.params.shape;
    size_t dim = (size_t)shape->head_dim;
    double worst = 0;
    for (size_t h = 0; h < (size_t)shape->n_heads; h++) {
        const float *ours = b->ours.out + h * dim, *ggml = peer_out(b->ggml) + h * dim;
        double largest = 0, difference = 0;
        for (size_t i = 0; i < dim; i++) {
            if (!isfinite(ours[i]) || !isfinite(ggml[i]))
                return NAN;
            largest = fmax(largest, fabs((double)ours[i]));
            difference = fmax(difference, fabs((double)ours[i] - (double)ggml[i]));
        }
        worst = fmax(worst, difference / largest);
    }
    return worst;
}

static int measure_pairs(struct bench *b, struct peer_row *row)
{
    size_t n = 0;
    double end = bench_seconds() + b->options->grid.seconds;
    while (n < MIN_PAIRS || (n < MAX_PAIRS && bench_seconds() < end)) {
        int code = time_side(b, attend_ours, &b->ours_us[n]);
        if (code == BENCH_GO)
            code = time_side(b, attend_ggml, &b->ggml_us[n]);
        if (code != BENCH_GO)
            return code;
        b->ratios[n] = b->ggml_us[n] / b->ours_us[n];
        n++;
    }
    row->n_pairs = n;
    row->ours_us = bench_median(b->ours_us, n);
    row->ggml_us = bench_median(b->ggml_us, n);
    row->ratio = bench_median(b->ratios, n);
    row->ratio_low = b->ratios[n / 4];
    row->ratio_high = b->ratios[n - 1 - n / 4];
    row->difference = largest_difference(b);
    fprintf(stderr, "  %s, %ld thread%s: %.0f us, ggml %.0f us; largest difference %.5f\n",
            peer_layouts[row->layout], row->n_threads, row->n_threads == 1 ? "" : "s", row->ours_us,
            row->ggml_us, row->difference);
    double allowed = max_difference[row->shape.format];
    if (row->difference <= allowed)
        return BENCH_GO;
    fprintf(stderr, "kvc-bench peer: the outputs differ by more than %.2f\n", allowed);
    return BENCH_FAILED;
}

static int measure_layout(struct bench *b, long layout, struct peer_row *rows)
{
    const struct bench_list *threads = &b->options->grid.threads;
    struct peer_row row = {
        .shape = b->ours.params.shape, .table = b->ours.params.table, .layout = layout};
    int code = peer_open(&row.shape, layout, (size_t)b->ours.n_layers, &b->ours.memory, b->ours.q,
                         &b->ggml);
    for (size_t i = 0; i < threads->n && code == BENCH_GO; i++) {
        row.n_threads = threads->items[i];
        kvc_status status = bench_threads_set(&b->ours.threads, (size_t)row.n_threads);
        code = status == KVC_OK ? peer_set_threads(b->ggml, (int)row.n_threads)
                                : bench_fail("kvc_pool_create", status);
        if (code == BENCH_GO)
            code = measure_pairs(b, &row);
        rows[i] = row;
    }
    peer_close(b->ggml);
    return code;
}

/* rows[0] ...: layouts, and thread counts in each. */
static int measure_shape(struct bench *b, const struct bench_shape *shape, const char *table,
                         struct peer_row *rows)
{
    const struct peer_options *o = b->options;
    struct sealed_params params = {.shape = *shape,
                                   .table = table,
                                   .n_layers = bench_is_trial(&o->grid) ? 2 : 0,
                                   .n_threads = bench_most(&o->grid.threads),
                                   .small_pages = o->grid.small_pages};
    int code = sealed_open(&b->ours, &params);
    for (size_t i = 0; i < o->layouts.n && code == BENCH_GO; i++)
        code = measure_layout(b, o->layouts.items[i], rows + i * o->grid.threads.n);
    sealed_close(&b->ours);
    return code;
}

static int measure_all(const struct peer_options *o, const struct bench_shape *shapes,
                       size_t n_shapes, struct peer_row *rows)
{
    struct bench *b = malloc(sizeof *b);
    if (!b)
        return bench_fail("samples", KVC_E_NOMEM);
    b->options = o;
    b->step = 0;
    size_t n_tables = o->grid.tables.n, n = 0;
    int code = BENCH_GO;
    for (size_t i = 0; i < n_shapes * n_tables && code == BENCH_GO; i++) {
        const struct bench_shape *shape = &shapes[i / n_tables];
        const char *table = bench_tables[o->grid.tables.items[i % n_tables]];
        fprintf(stderr, "[%zu/%zu] %ld/%ld heads, %ld tokens, %s, %s\n", i + 1, n_shapes * n_tables,
                shape->n_heads, shape->n_kv_heads, shape->n_kv, bench_formats[shape->format],
                table);
        code = measure_shape(b, shape, table, rows + n);
        n += o->layouts.n * o->grid.threads.n;
    }
    free(b);
    return code;
}

int peer_run(const struct peer_options *options)
{
    struct peer_options o = *options;
    struct bench_shape *shapes = NULL;
    size_t n_shapes;
    int code = bench_grid_shapes(&o.grid, "peer", &shapes, &n_shapes);
    if (code == BENCH_GO)
        code = bench_grid_check_tables(&o.grid);
    size_t n_rows = n_shapes * o.grid.tables.n * o.layouts.n * o.grid.threads.n;
    struct peer_row *rows = code == BENCH_GO ? calloc(n_rows, sizeof *rows) : NULL;
    if (code == BENCH_GO)
        code = rows ? measure_all(&o, shapes, n_shapes, rows)
                    : bench_fail("list of results", KVC_E_NOMEM);
    if (code == BENCH_GO) {
        (o.grid.json ? peer_print_json : peer_print_table)(rows, n_rows);
        code = BENCH_DONE;
    }
    free(rows);
    free(shapes);
    return code;
}
