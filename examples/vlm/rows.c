/* Rows of results: one a setting and experiment, as CSV, as a table and as JSON. */
#include "rows.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The figures of a row, in the order of the columns. Counts are stored apart: they are never NaN.
 */
static const struct column {
    const char *name;  /* in files */
    const char *title; /* in tables */
    size_t offset;     /* of a double in struct row */
    double factor;     /* in tables */
    int digits;        /* in tables */
} columns[] = {
    {"accuracy", "acc %", offsetof(struct row, accuracy), 100.0, 2},
    {"description", "descr", offsetof(struct row, groups[0]), 100.0, 1},
    {"spatial", "spatial", offsetof(struct row, groups[1]), 100.0, 1},
    {"text", "text", offsetof(struct row, groups[2]), 100.0, 1},
    {"kept", "kept %", offsetof(struct row, kept), 100.0, 1},
    {"p", "p", offsetof(struct row, p), 1.0, 4},
    {"rows", "rows", offsetof(struct row, rows), 1.0, 1},
    {"cache_bytes_per_token", "bytes/tok", offsetof(struct row, cache_bytes_per_token), 1.0, 1},
    {"page_bytes_per_token", "pages/tok", offsetof(struct row, page_bytes_per_token), 1.0, 1},
    {"pool_bytes_per_token", "pool/tok", offsetof(struct row, pool_bytes_per_token), 1.0, 1},
    {"peak_cache_bytes", "peak", offsetof(struct row, peak_cache_bytes), 1.0, 0},
    {"attention_us", "attn us", offsetof(struct row, attention_us), 1.0, 1},
    {"step_ms", "step ms", offsetof(struct row, step_ms), 1.0, 3},
    {"rel_err", "rel err", offsetof(struct row, rel_err), 1.0, 4},
    {"kl", "KL", offsetof(struct row, kl), 1.0, 5},
};

enum {
    N_COLUMNS = sizeof(columns) / sizeof(*columns),
    N_FIXED = 6, /* experiment, name, x, n, n_lost, n_gained */
    MAX_LINE = 2048
};

static double *figure_of(struct row *row, size_t column)
{
    return (double *)((char *)row + columns[column].offset);
}

static double figure(const struct row *row, size_t column)
{
    return *(const double *)((const char *)row + columns[column].offset);
}

struct row *rows_add(struct row_table *table, const char *experiment, const char *name, double x,
                     size_t n_hits)
{
    struct row row = {.x = x};

    if (table->n == table->capacity) {
        const size_t capacity = 2 * table->capacity + 16;
        struct row *rows = realloc(table->rows, capacity * sizeof(*rows));
        if (!rows)
            return NULL;
        table->rows = rows;
        table->capacity = capacity;
    }
    if (n_hits > 0 && !(row.hits = calloc(n_hits, 1)))
        return NULL;
    row.n = n_hits;
    snprintf(row.experiment, sizeof(row.experiment), "%s", experiment);
    snprintf(row.name, sizeof(row.name), "%s", name);
    for (size_t c = 0; c < N_COLUMNS; c++)
        *figure_of(&row, c) = NAN;
    table->rows[table->n] = row;
    return &table->rows[table->n++];
}

struct row *rows_find(const struct row_table *table, const char *experiment, const char *name,
                      double x)
{
    for (size_t i = 0; i < table->n; i++) {
        struct row *row = &table->rows[i];
        if (strcmp(row->experiment, experiment) == 0 && strcmp(row->name, name) == 0 &&
            fabs(row->x - x) < 1e-9)
            return row;
    }
    return NULL;
}

void rows_free(struct row_table *table)
{
    for (size_t i = 0; i < table->n; i++)
        free(table->rows[i].hits);
    free(table->rows);
    *table = (struct row_table){0};
}

void rows_count(struct row *row)
{
    size_t right[N_GROUPS] = {0}, asked[N_GROUPS] = {0}, all = 0;

    for (size_t i = 0; row->hits && i < row->n; i++) {
        right[i % N_GROUPS] += row->hits[i];
        asked[i % N_GROUPS]++;
        all += row->hits[i];
    }
    row->accuracy = row->hits && row->n > 0 ? (double)all / (double)row->n : NAN;
    for (int g = 0; g < N_GROUPS; g++)
        row->groups[g] = asked[g] > 0 ? (double)right[g] / (double)asked[g] : NAN;
}

/* The reference may have been asked more: the first questions are the same. */
void rows_pair(struct row *row, const struct row *reference)
{
    const size_t n = row->n < reference->n ? row->n : reference->n;
    size_t n_right = 0, n_reference = 0;

    row->n_lost = row->n_gained = 0;
    if (!row->hits || !reference->hits)
        return;
    for (size_t i = 0; i < n; i++) {
        n_right += row->hits[i];
        n_reference += reference->hits[i];
        row->n_lost += !row->hits[i] && reference->hits[i];
        row->n_gained += row->hits[i] && !reference->hits[i];
    }
    row->kept = n_reference > 0 ? (double)n_right / (double)n_reference : NAN;
    row->p = mcnemar(row->n_lost, row->n_gained);
}

/* Twice the smaller tail of a binomial of probability 1/2. The terms are added from the middle
 * outwards, in logarithms: thousands of questions would underflow. */
double mcnemar(size_t n_lost, size_t n_gained)
{
    const size_t n = n_lost + n_gained, few = n_lost < n_gained ? n_lost : n_gained;
    double tail = 0.0;

    for (size_t k = few + 1; k-- > 0;)
        tail += exp(lgamma((double)n + 1.0) - lgamma((double)k + 1.0) -
                    lgamma((double)(n - k) + 1.0) - (double)n * log(2.0));
    return 2.0 * tail < 1.0 ? 2.0 * tail : 1.0;
}

/* A text with quotes around it, those inside doubled; line breaks become spaces. */
static void write_text(const char *text, FILE *out)
{
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"')
            fputc('"', out);
        fputc(*text == '\n' || *text == '\r' ? ' ' : *text, out);
    }
    fputc('"', out);
}

static void write_row(const struct row *row, FILE *out)
{
    write_text(row->experiment, out);
    fputc(',', out);
    write_text(row->name, out);
    fprintf(out, ",%.17g,%zu,%zu,%zu", row->x, row->n, row->n_lost, row->n_gained);
    for (size_t c = 0; c < N_COLUMNS; c++) {
        fputc(',', out);
        if (!isnan(figure(row, c)))
            fprintf(out, "%.17g", figure(row, c));
    }
    fputc('\n', out);
}

bool rows_write_csv(const struct row_table *table, const char *path, struct failure *failure)
{
    FILE *file = fopen(path, "w");

    if (!file)
        return fail_with(failure, "%.100s: %.100s", path, strerror(errno));
    fprintf(file, "experiment,name,x,n,n_lost,n_gained");
    for (size_t c = 0; c < N_COLUMNS; c++)
        fprintf(file, ",%s", columns[c].name);
    fputc('\n', file);
    for (size_t i = 0; i < table->n; i++)
        write_row(&table->rows[i], file);
    const bool bad = ferror(file) != 0;
    return (fclose(file) == 0 && !bad) || fail_with(failure, "%.100s: cannot write", path);
}

/* Takes a field off the line, without its quotes; NULL at the end. */
static char *next_field(char **line)
{
    char *field = *line, *from = field, *to = field;

    if (!field)
        return NULL;
    bool quoted = false;
    for (; *from && (quoted || *from != ','); from++) {
        if (*from == '"' && quoted && from[1] == '"')
            *to++ = *++from;
        else if (*from == '"')
            quoted = !quoted;
        else
            *to++ = *from;
    }
    *line = *from ? from + 1 : NULL;
    *to = '\0';
    return field;
}

static bool read_size(const char *text, size_t *out)
{
    char *end;

    errno = 0;
    const unsigned long long n = strtoull(text, &end, 10);
    *out = (size_t)n;
    return end != text && !*end && errno == 0 && *text != '-';
}

static bool read_figure(const char *text, double *out)
{
    char *end;

    *out = *text ? strtod(text, &end) : NAN;
    return !*text || (end != text && !*end);
}

static bool read_row(struct row_table *table, char *line, bool *no_memory)
{
    char *fields[N_FIXED + N_COLUMNS];
    double x;

    for (size_t f = 0; f < N_FIXED + N_COLUMNS; f++)
        if (!(fields[f] = next_field(&line)))
            return false;
    if (line || !read_figure(fields[2], &x))
        return false;
    struct row *row = rows_add(table, fields[0], fields[1], x, 0);
    *no_memory = !row;
    if (!row || !read_size(fields[3], &row->n) || !read_size(fields[4], &row->n_lost) ||
        !read_size(fields[5], &row->n_gained))
        return false;
    for (size_t c = 0; c < N_COLUMNS; c++)
        if (!read_figure(fields[N_FIXED + c], figure_of(row, c)))
            return false;
    return true;
}

bool rows_read_csv(struct row_table *table, const char *path, struct failure *failure)
{
    FILE *file = fopen(path, "r");
    char line[MAX_LINE];
    size_t n_lines = 0;
    bool ok = true, no_memory = false;

    if (!file)
        return fail_with(failure, "%.100s: %.100s", path, strerror(errno));
    while (ok && fgets(line, sizeof(line), file)) {
        line[strcspn(line, "\r\n")] = '\0';
        if (n_lines++ > 0) /* behind the header */
            ok = read_row(table, line, &no_memory);
    }
    ok = ok && !ferror(file) && n_lines > 0;
    fclose(file);
    return ok || fail_with(failure,
                           no_memory ? "%.100s: out of memory in line %zu"
                                     : "%.100s: line %zu is no row of results",
                           path, n_lines);
}

static void print_number(const char *key, double x, FILE *out)
{
    if (isfinite(x))
        fprintf(out, ",\"%s\":%.9g", key, x);
    else
        fprintf(out, ",\"%s\":null", key);
}

static void print_json_row(const struct row *row, const char *name, FILE *out)
{
    fprintf(out, "{\"name\":\"");
    for (; *name; name++) {
        if (*name == '"' || *name == '\\')
            fputc('\\', out);
        if ((unsigned char)*name >= ' ')
            fputc(*name, out);
    }
    fprintf(out, "\",\"n\":%zu", row->n);
    print_number("accuracy", row->accuracy, out);
    print_number("cache_bytes_per_token", row->cache_bytes_per_token, out);
    print_number("pool_bytes_per_token", row->pool_bytes_per_token, out);
    print_number("peak_cache_bytes", row->peak_cache_bytes, out);
    print_number("attention_us", row->attention_us, out);
    print_number("step_ms", row->step_ms, out);
    fputc('}', out);
}

/* Rows of the first two experiments stand under their own names. */
static bool is_main(const struct row *row)
{
    return strcmp(row->experiment, "first") == 0 || strcmp(row->experiment, "second") == 0;
}

static bool name_came_before(const struct row_table *table, size_t i)
{
    for (size_t j = 0; j < i; j++)
        if (is_main(&table->rows[j]) && strcmp(table->rows[j].name, table->rows[i].name) == 0)
            return true;
    return false;
}

void rows_print_json(const struct row_table *table, FILE *out)
{
    char name[sizeof(table->rows->experiment) + sizeof(table->rows->name) + 32];
    const char *gap = "";

    fprintf(out, "{\"rows\":[");
    for (int others = 0; others < 2; others++) {
        for (size_t i = 0; i < table->n; i++) {
            const struct row *row = &table->rows[i];
            if (is_main(row) == (others == 1) || (others == 0 && name_came_before(table, i)))
                continue;
            if (others == 0)
                snprintf(name, sizeof(name), "%s", row->name);
            else
                snprintf(name, sizeof(name), "%s/%s/%.6g", row->experiment, row->name, row->x);
            fprintf(out, "%s", gap);
            print_json_row(row, name, out);
            gap = ",";
        }
    }
    fprintf(out, "]}\n");
}

void rows_print_table(const struct row_table *table, const char *experiment, FILE *out)
{
    bool used[N_COLUMNS] = {false}, paired = false;
    int width = 4;

    for (size_t i = 0; i < table->n; i++) {
        const struct row *row = &table->rows[i];
        if (strcmp(row->experiment, experiment) != 0)
            continue;
        for (size_t c = 0; c < N_COLUMNS; c++)
            used[c] = used[c] || !isnan(figure(row, c));
        paired = paired || !isnan(row->p);
        width = (int)strlen(row->name) > width ? (int)strlen(row->name) : width;
    }
    fprintf(out, "%-*s %7s %6s", width, experiment, "x", "n");
    for (size_t c = 0; c < N_COLUMNS; c++)
        if (used[c])
            fprintf(out, " %9s", columns[c].title);
    fprintf(out, "%s\n", paired ? "  lost gained" : "");
    for (size_t i = 0; i < table->n; i++) {
        const struct row *row = &table->rows[i];
        if (strcmp(row->experiment, experiment) != 0)
            continue;
        fprintf(out, "%-*s %7.4g %6zu", width, row->name, row->x, row->n);
        for (size_t c = 0; c < N_COLUMNS; c++) {
            if (used[c] && isnan(figure(row, c)))
                fprintf(out, " %9s", "-");
            else if (used[c])
                fprintf(out, " %9.*f", columns[c].digits, columns[c].factor * figure(row, c));
        }
        if (paired && !isnan(row->p))
            fprintf(out, " %5zu %6zu", row->n_lost, row->n_gained);
        fputc('\n', out);
    }
    fputc('\n', out);
}
