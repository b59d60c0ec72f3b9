/* Examination questions: each follows from the seed of its set and its number. */
#ifndef VLM_EXAM_H
#define VLM_EXAM_H

#include "picture.h"
#include "question.h"

/* A picture with two questions about parts of it that lie apart. */
struct exam_item {
    struct picture picture;
    struct question first, second;
    int group; /* 0 description, 1 spatial, 2 text: in turn */
};

enum { N_GROUPS = 3 };

/* Sets that share no picture: one to choose settings on, one to report. */
enum exam_set { EXAM_TUNE, EXAM_REPORT };

struct exam {
    enum exam_set set;
    struct picture_params scene, screen; /* how hard */
    float margin;
};

/* What the reported figures are about; grid 24 or 16. */
void exam_default(enum exam_set set, int grid, struct exam *out);

/* Item @p i. Pictures on which no two such questions can be asked are passed over. */
void exam_item(const struct exam *exam, size_t i, struct exam_item *out);

#endif
