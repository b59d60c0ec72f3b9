/* The results of kvc-photos as a table, as JSON and as a picture. */
#ifndef VISION_PHOTOS_REPORT_H
#define VISION_PHOTOS_REPORT_H

#include "experiment.h"

enum { ALL_HEADS = -1 };

/* A photo seen by a layer: one head of it, or the mean of all. */
struct photos_row {
    char photo[KVX_NAME_SIZE];
    unsigned layer;
    int head; /* or ALL_HEADS */
    struct outcome outcome;
};

struct photos_report {
    const struct kvx *kvx;
    bool shared; /* the heads of a layer share a choice */
    size_t n_rows;
    const struct photos_row *rows;
};

void photos_print_table(const struct photos_report *report);
void photos_print_json(const struct photos_report *report);

/* A gnuplot script that writes SVG to its standard output. */
bool photos_write_plot(const struct photos_report *report, const char *path,
                       struct failure *failure);

#endif
