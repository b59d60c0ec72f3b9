/* Draws the pictures that the small vision-language model is trained and examined on. All of a
 * picture follows from its seed. */
#ifndef VLM_PICTURE_H
#define VLM_PICTURE_H

#include <stdint.h>

#include "words.h"

enum {
    PATCH = 14,    /* pixels */
    MAX_GRID = 24, /* patches a side: 24 are 336 pixels, 16 are 224 */
    MAX_CELLS = MAX_GRID * MAX_GRID,
    MAX_PIXELS = PATCH * MAX_GRID,
    MAX_THINGS = 10,
    CODE_LENGTH = 4
};

enum picture_kind { PICTURE_SCENE, PICTURE_SCREEN };

/* How hard. picture_params_default() fills what the model was trained on. */
struct picture_params {
    int grid;                     /* 24 or 16 */
    int min_things, max_things;   /* of a scene: 2 ... MAX_THINGS, as many as find room */
    float min_radius, max_radius; /* pixels */
    int min_fields, max_fields;   /* of a screen: 1 ... N_FIELDS, as many as find room */
    float distractors; /* share of the free places of a screen that may hold other codes */
    float noise;       /* factor of all noise; 1 is usual */
};

struct thing {
    int shape, colour; /* the colours of a picture differ */
    float x, y, radius;
};

struct field {
    int name;
    int code[CODE_LENGTH]; /* glyphs */
    int row, col;          /* cell of the name; the code is in the four cells to its right */
};

/* Classes of each patch, 0 where there is none: for training. */
enum picture_label {
    LABEL_SHAPE,  /* 1 + shape */
    LABEL_COLOUR, /* 1 + colour */
    LABEL_GLYPH,  /* 1 + glyph, or 1 + N_GLYPHS + field name */
    LABEL_FIELD,  /* 1 + name of the field that the patch belongs to */
    LABEL_PLACE,  /* 1 ... 4: place in the code of a field or of a distractor */
    N_LABELS
};

struct picture {
    enum picture_kind kind;
    int grid;
    int n_things, n_fields;
    struct thing things[MAX_THINGS];
    struct field fields[N_FIELDS];
    uint8_t owner[MAX_CELLS]; /* 1 + thing that covers the middle of the patch, or 0 */
    uint8_t labels[N_LABELS][MAX_CELLS];
    uint8_t rgb[MAX_PIXELS * MAX_PIXELS * 3]; /* [14 grid][14 grid][3] */
};

void picture_params_default(int grid, struct picture_params *out);
void picture_draw(uint64_t seed, enum picture_kind kind, const struct picture_params *params,
                  struct picture *out);

#endif
