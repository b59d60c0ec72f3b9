/* Draws the pictures: textured scenes of things, light screens of codes. */
#include "picture.h"

#include <math.h>
#include <string.h>

#include "glyphs.h"
#include "random.h"

enum {
    MAX_NODES = 23, /* of the background's random field, a side */
    GLYPH_HEIGHT = PATCH + 2,
    CODE_CELLS = 1 + CODE_LENGTH,
    MAX_PLACES = MAX_GRID * MAX_GRID / CODE_CELLS
};

typedef uint8_t rgb[3];

static const rgb colours[N_COLOURS] = {
    {220, 40, 40},  {40, 170, 60},  {40, 80, 220}, {240, 220, 40},
    {150, 50, 190}, {40, 200, 220}, {15, 15, 15},  {250, 250, 250},
};

void picture_params_default(int grid, struct picture_params *out)
{
    const int is_large = grid > 16;

    *out = (struct picture_params){
        .grid = grid,
        .min_things = 2,
        .max_things = is_large ? 7 : 5,
        .min_radius = 14.0f,
        .max_radius = 32.0f,
        .min_fields = is_large ? 4 : 3,
        .max_fields = is_large ? 10 : 6,
        .distractors = 0.4f,
        .noise = 1.0f,
    };
}

static uint8_t to_byte(float value)
{
    return value <= 0.0f ? 0 : value >= 255.0f ? 255 : (uint8_t)value;
}

static uint8_t *pixel_at(struct picture *picture, int x, int y)
{
    const size_t side = PATCH * (size_t)picture->grid;

    return picture->rgb + 3 * ((size_t)y * side + (size_t)x);
}

static void draw_colour(struct draws *draws, float low, float high, float *colour)
{
    for (int c = 0; c < 3; c++)
        colour[c] = draw_between(draws, low, high);
}

/* Catmull-Rom: the weights of four nodes at part @p t between the middle two. */
static void cubic_weights(float t, float weights[4])
{
    weights[0] = ((-0.5f * t + 1.0f) * t - 0.5f) * t;
    weights[1] = (1.5f * t - 2.5f) * t * t + 1.0f;
    weights[2] = ((-1.5f * t + 2.0f) * t + 0.5f) * t;
    weights[3] = (0.5f * t - 0.5f) * t * t;
}

/* A random field, smooth between n x n nodes, with a rim of two nodes that repeats the edge. */
struct field_of_nodes {
    int n;
    float nodes[MAX_NODES + 4][MAX_NODES + 4][3];
    int first[MAX_PIXELS]; /* of the four nodes that a pixel's row or column takes */
    float weights[MAX_PIXELS][4];
};

/* Returns the variance at the nodes. */
static float draw_nodes(struct draws *draws, struct field_of_nodes *field)
{
    float sum = 0.0f, squares = 0.0f;
    const int n = field->n;

    for (int y = 0; y < n; y++) {
        for (int x = 0; x < n; x++) {
            float *node = field->nodes[y + 2][x + 2], mean = 0.0f;

            for (int c = 0; c < 3; c++) {
                node[c] = draw_normal(draws);
                mean += node[c] / 3.0f;
            }
            for (int c = 0; c < 3; c++) {
                node[c] = 0.6f * node[c] + 0.8f * mean;
                sum += node[c];
                squares += node[c] * node[c];
            }
        }
    }
    for (int y = 2; y < n + 2; y++) {
        for (int side = 0; side < 2; side++) {
            memcpy(field->nodes[y][side], field->nodes[y][2], sizeof(field->nodes[y][2]));
            memcpy(field->nodes[y][n + 2 + side], field->nodes[y][n + 1],
                   sizeof(field->nodes[y][2]));
        }
    }
    for (int side = 0; side < 2; side++) {
        memcpy(field->nodes[side], field->nodes[2], sizeof(field->nodes[2]));
        memcpy(field->nodes[n + 2 + side], field->nodes[n + 1], sizeof(field->nodes[2]));
    }
    const float count = (float)(3 * n * n), mean = sum / count;
    return squares / count - mean * mean;
}

/* Smaller pictures show a part of a field that is as coarse as a large one's. */
static void place_nodes(struct field_of_nodes *field, int n_pixels, int offset)
{
    for (int i = 0; i < n_pixels; i++) {
        const float at = ((float)(i + offset) + 0.5f) * (float)field->n / (float)MAX_PIXELS + 0.5f;
        const int cell = (int)at;

        field->first[i] = cell;
        cubic_weights(at - (float)cell, field->weights[i]);
    }
}

static void draw_background(struct draws *draws, float noise, struct picture *out)
{
    const int side = PATCH * out->grid;
    struct field_of_nodes columns, rows;
    float base[3], line[MAX_NODES + 4][3];

    columns.n = draw_from(draws, 3, MAX_NODES);
    const float variance = draw_nodes(draws, &columns);
    place_nodes(&columns, side, draw_below(draws, MAX_PIXELS - side + 1));
    rows = columns;
    place_nodes(&rows, side, draw_below(draws, MAX_PIXELS - side + 1));

    const float grey = draw_between(draws, 95.0f, 180.0f);
    draw_colour(draws, grey - 18.0f, grey + 18.0f, base);
    /* Between nodes the variance is less: 0.55 of theirs on average. */
    const float scale = draw_between(draws, 4.0f, 22.0f) / sqrtf(0.55f * variance + 0.25f * 0.25f);
    const float grain = 0.25f * noise * scale;

    for (int y = 0; y < side; y++) {
        const float *w = rows.weights[y];
        uint8_t *pixel = pixel_at(out, 0, y);

        for (int x = 0; x < columns.n + 4; x++) {
            for (int c = 0; c < 3; c++) {
                const int first = rows.first[y];

                line[x][c] = base[c] + scale * (w[0] * rows.nodes[first][x][c] +
                                                w[1] * rows.nodes[first + 1][x][c] +
                                                w[2] * rows.nodes[first + 2][x][c] +
                                                w[3] * rows.nodes[first + 3][x][c]);
            }
        }
        for (int x = 0; x < side; x++, pixel += 3) {
            const float(*four)[3] = (const float(*)[3])line + columns.first[x];
            const float *v = columns.weights[x], grain_here = grain * draw_normal(draws);

            for (int c = 0; c < 3; c++) {
                pixel[c] = to_byte(v[0] * four[0][c] + v[1] * four[1][c] + v[2] * four[2][c] +
                                   v[3] * four[3][c] + grain_here);
            }
        }
    }
}

/* dx and dy in radii. */
static int shape_covers(int shape, float dx, float dy)
{
    const float ax = fabsf(dx), ay = fabsf(dy), square = dx * dx + dy * dy;

    switch (shape) {
    case 0: return square <= 1.0f;
    case 1: return ax <= 0.85f && ay <= 0.85f;
    case 2: return dy <= 0.75f && ax <= (dy + 1.0f) * 0.55f;
    case 3: return ax + ay <= 1.0f;
    case 4: return (ax <= 0.32f && ay <= 0.95f) || (ay <= 0.32f && ax <= 0.95f);
    default: return square <= 1.0f && square >= 0.3f;
    }
}

static void paint_thing(struct draws *draws, const struct thing *thing, float noise,
                        struct picture *out)
{
    const int side = PATCH * out->grid, reach = (int)thing->radius + 2;
    const int x0 = (int)thing->x - reach, y0 = (int)thing->y - reach;
    rgb paint;

    for (int c = 0; c < 3; c++)
        paint[c] =
            to_byte((float)colours[thing->colour][c] + noise * draw_between(draws, -14.0f, 14.0f));
    for (int y = y0 < 0 ? 0 : y0; y < side && y <= y0 + 2 * reach; y++) {
        for (int x = x0 < 0 ? 0 : x0; x < side && x <= x0 + 2 * reach; x++) {
            const float dx = ((float)x - thing->x) / thing->radius;
            const float dy = ((float)y - thing->y) / thing->radius;

            if (shape_covers(thing->shape, dx, dy))
                memcpy(pixel_at(out, x, y), paint, sizeof(paint));
        }
    }
}

/* A small thing may miss the middles of all patches: the one that its own middle is in counts. */
static void label_thing(int index, struct picture *out)
{
    const struct thing *thing = &out->things[index];
    const float radius = 0.9f * thing->radius;
    const int middle = (int)thing->y / PATCH * out->grid + (int)thing->x / PATCH;

    for (int cell = 0; cell < out->grid * out->grid; cell++) {
        const int row = cell / out->grid, col = cell % out->grid;
        const float dx = ((float)col + 0.5f) * (float)PATCH - thing->x;
        const float dy = ((float)row + 0.5f) * (float)PATCH - thing->y;

        if (dx * dx + dy * dy <= radius * radius || cell == middle) {
            out->owner[cell] = (uint8_t)(1 + index);
            out->labels[LABEL_SHAPE][cell] = (uint8_t)(1 + thing->shape);
            out->labels[LABEL_COLOUR][cell] = (uint8_t)(1 + thing->colour);
        }
    }
}

/* Whether it found room, 5 pixels away from the others. */
static int place_thing(struct draws *draws, const struct picture_params *params,
                       const struct picture *picture, struct thing *thing)
{
    const float side = (float)(PATCH * picture->grid);

    for (int attempt = 0; attempt < 40; attempt++) {
        int is_free = 1;

        thing->radius = draw_between(draws, params->min_radius, params->max_radius);
        thing->x = draw_between(draws, thing->radius + 2.0f, side - thing->radius - 2.0f);
        thing->y = draw_between(draws, thing->radius + 2.0f, side - thing->radius - 2.0f);
        for (int i = 0; i < picture->n_things; i++) {
            const struct thing *other = &picture->things[i];
            const float dx = thing->x - other->x, dy = thing->y - other->y;
            const float reach = thing->radius + other->radius + 5.0f;

            is_free = is_free && dx * dx + dy * dy > reach * reach;
        }
        if (is_free)
            return 1;
    }
    return 0;
}

static void draw_scene(struct draws *draws, const struct picture_params *params,
                       struct picture *out)
{
    int order[N_COLOURS];

    draw_background(draws, params->noise, out);
    for (int i = 0; i < N_COLOURS; i++)
        order[i] = i;
    draw_order(draws, order, N_COLOURS);
    int n = draw_from(draws, params->min_things, params->max_things);
    n = n < N_COLOURS ? n : N_COLOURS;
    for (int i = 0; i < n; i++) {
        struct thing thing = {.shape = draw_below(draws, N_SHAPES), .colour = order[i]};

        if (!place_thing(draws, params, out, &thing))
            continue;
        out->things[out->n_things] = thing;
        paint_thing(draws, &thing, params->noise, out);
        label_thing(out->n_things++, out);
    }
}

/* The glyphs of a picture: how much of each pixel is ink, 0 ... 256. */
struct font {
    int16_t ink[N_GLYPHS][GLYPH_HEIGHT][PATCH];
};

/* The length that pixel @p i has in common with part @p k of @p n parts of a span. */
static float overlap(int i, int k, int n, float start, float length, float extra)
{
    const float part = length / (float)n;
    const float first = start + part * (float)k, last = first + part + extra;
    const float low = first > (float)i ? first : (float)i;
    const float high = last < (float)i + 1.0f ? last : (float)i + 1.0f;

    return high > low ? high - low : 0.0f;
}

static void soften(int16_t ink[GLYPH_HEIGHT][PATCH])
{
    for (int y = 0; y < GLYPH_HEIGHT; y++) {
        int before = 0;

        for (int x = 0; x < PATCH; x++) {
            const int here = ink[y][x], after = x + 1 < PATCH ? ink[y][x + 1] : 0;

            ink[y][x] = (int16_t)((before + 2 * here + after) / 4);
            before = here;
        }
    }
}

/* Sizes and weights differ; what is left of the cell keeps neighbours apart. */
static void draw_font(struct draws *draws, struct font *font)
{
    const float width = (float)draw_from(draws, 8, 10), height = (float)draw_from(draws, 10, 12);
    const float bold = draw_below(draws, 3) == 0 ? 0.7f : 0.0f;
    const int is_soft = draw_below(draws, 3) == 0;
    const float left = ((float)PATCH - width - bold) / 2.0f;
    const float top = ((float)GLYPH_HEIGHT - height) / 2.0f;
    float across[PATCH][GLYPH_COLUMNS], down[GLYPH_HEIGHT][GLYPH_ROWS];

    for (int x = 0; x < PATCH; x++) {
        for (int k = 0; k < GLYPH_COLUMNS; k++)
            across[x][k] = overlap(x, k, GLYPH_COLUMNS, left, width, bold);
    }
    for (int y = 0; y < GLYPH_HEIGHT; y++) {
        for (int k = 0; k < GLYPH_ROWS; k++)
            down[y][k] = overlap(y, k, GLYPH_ROWS, top, height, 0.0f);
    }
    for (int glyph = 0; glyph < N_GLYPHS; glyph++) {
        const int column = glyph % GLYPHS_A_BAND * (GLYPH_COLUMNS + 1);

        for (int y = 0; y < GLYPH_HEIGHT; y++) {
            for (int x = 0; x < PATCH; x++) {
                float ink = 0.0f;

                for (int r = 0; r < GLYPH_ROWS; r++) {
                    const char *dots = &glyph_bands[glyph / GLYPHS_A_BAND][r][column];

                    if (down[y][r] == 0.0f)
                        continue;
                    for (int k = 0; k < GLYPH_COLUMNS; k++) {
                        if (dots[k] == '#')
                            ink += down[y][r] * across[x][k];
                    }
                }
                font->ink[glyph][y][x] = (int16_t)(256.0f * (ink < 1.0f ? ink : 1.0f));
            }
        }
        if (is_soft)
            soften(font->ink[glyph]);
    }
}

static void fill(struct picture *out, int x0, int y0, int width, int height, const float *colour)
{
    const int side = PATCH * out->grid;

    for (int y = y0; y < y0 + height && y < side; y++) {
        for (int x = x0; x < x0 + width && x < side; x++) {
            for (int c = 0; c < 3; c++)
                pixel_at(out, x, y)[c] = to_byte(colour[c]);
        }
    }
}

static void put_glyph(struct picture *out, int x0, int y0, const int16_t ink[GLYPH_HEIGHT][PATCH],
                      const float *colour)
{
    for (int y = 0; y < GLYPH_HEIGHT; y++) {
        for (int x = 0; x < PATCH; x++) {
            uint8_t *pixel = pixel_at(out, x0 + x, y0 + y);

            for (int c = 0; c < 3; c++)
                pixel[c] =
                    (uint8_t)((pixel[c] * (256 - ink[y][x]) + to_byte(colour[c]) * ink[y][x]) /
                              256);
        }
    }
}

static void draw_page(struct draws *draws, struct picture *out)
{
    const int side = PATCH * out->grid;
    const float page = draw_between(draws, 225.0f, 255.0f);
    float colour[3];

    draw_colour(draws, page - 8.0f, page + 4.0f, colour);
    fill(out, 0, 0, side, side, colour);
    for (int n = draw_below(draws, 4); n > 0; n--) {
        const int x = draw_below(draws, side - 40), y = draw_below(draws, side - 40);
        const int width = draw_from(draws, 30, side / 2), height = draw_from(draws, 30, side / 2);
        const float grey = draw_between(draws, 205.0f, 255.0f);

        draw_colour(draws, grey - 10.0f, grey + 10.0f, colour);
        fill(out, x, y, width, height, colour);
    }
}

static void add_noise(struct draws *draws, float deviation, struct picture *out)
{
    const int side = PATCH * out->grid;

    for (int i = 0; i < side * side; i++) {
        const float noise = deviation * draw_normal(draws) + 0.5f;

        for (int c = 0; c < 3; c++)
            out->rgb[3 * i + c] = to_byte((float)out->rgb[3 * i + c] + noise);
    }
}

/* Where the glyphs of a screen are. */
struct layout {
    int dx, dy;                /* of all, off the patches; pixels */
    int n, places[MAX_PLACES]; /* free cells with four to their right, as row * grid + column */
};

static void draw_layout(struct draws *draws, int grid, struct layout *layout)
{
    const int pitch = draw_from(draws, 1, 2), first = draw_below(draws, 2);
    const int step = CODE_CELLS + 1 + (grid >= MAX_GRID ? draw_below(draws, 2) : 0);
    int last = first;

    layout->n = 0;
    for (int row = 1; row < grid - 1; row += pitch) {
        for (int col = first; col + CODE_LENGTH < grid; col += step) {
            layout->places[layout->n++] = row * grid + col;
            last = col + CODE_LENGTH;
        }
    }
    draw_order(draws, layout->places, layout->n);
    /* Columns at an edge of the picture do not move over it. */
    layout->dx = draw_from(draws, first == 0 ? 0 : -3, last == grid - 1 ? 0 : 3);
    layout->dy = draw_from(draws, -3, 3);
}

static void corner(const struct layout *layout, int grid, int cell, int *x, int *y)
{
    *x = PATCH * (cell % grid) + layout->dx;
    *y = PATCH * (cell / grid) - 1 + layout->dy;
}

/* name < 0: a code without one. */
static void put_code(struct draws *draws, const struct font *font, const struct layout *layout,
                     int name, int cell, const float *ink, struct picture *out)
{
    static const float white[3] = {255.0f, 255.0f, 255.0f};
    struct field field = {.name = name, .row = cell / out->grid, .col = cell % out->grid};
    int x, y;

    if (name >= 0) {
        float box[3];

        draw_colour(draws, 20.0f, 110.0f, box);
        corner(layout, out->grid, cell, &x, &y);
        fill(out, x, y, PATCH, GLYPH_HEIGHT, box);
        put_glyph(out, x, y, font->ink[name], white);
        out->labels[LABEL_GLYPH][cell] = (uint8_t)(1 + N_GLYPHS + name);
        out->labels[LABEL_FIELD][cell] = (uint8_t)(1 + name);
    }
    for (int i = 0; i < CODE_LENGTH; i++) {
        const int glyph = draw_below(draws, N_GLYPHS), at = cell + 1 + i;

        field.code[i] = glyph;
        corner(layout, out->grid, at, &x, &y);
        put_glyph(out, x, y, font->ink[glyph], ink);
        out->labels[LABEL_GLYPH][at] = (uint8_t)(1 + glyph);
        out->labels[LABEL_FIELD][at] = (uint8_t)(1 + name);
        out->labels[LABEL_PLACE][at] = (uint8_t)(1 + i);
    }
    if (name >= 0)
        out->fields[out->n_fields++] = field;
}

static void draw_screen(struct draws *draws, const struct picture_params *params,
                        struct picture *out)
{
    struct font font;
    struct layout layout;
    int names[N_FIELDS];
    float ink[3];

    draw_page(draws, out);
    draw_font(draws, &font);
    draw_layout(draws, out->grid, &layout);
    for (int i = 0; i < N_FIELDS; i++)
        names[i] = i;
    draw_order(draws, names, N_FIELDS);
    int n = draw_from(draws, params->min_fields, params->max_fields);
    n = n < N_FIELDS ? n : N_FIELDS;
    n = n < layout.n ? n : layout.n;
    const int n_others = draw_below(draws, (int)((float)(layout.n - n) * params->distractors) + 1);
    draw_colour(draws, 0.0f, 70.0f, ink);
    for (int i = 0; i < n + n_others; i++)
        put_code(draws, &font, &layout, i < n ? names[i] : -1, layout.places[i], ink, out);
    add_noise(draws, params->noise * draw_between(draws, 0.0f, 5.0f), out);
}

void picture_draw(uint64_t seed, enum picture_kind kind, const struct picture_params *params,
                  struct picture *out)
{
    struct draws draws = draws_of(seed, (uint64_t)kind);

    out->kind = kind;
    out->grid = params->grid;
    out->n_things = 0;
    out->n_fields = 0;
    memset(out->things, 0, sizeof(out->things));
    memset(out->fields, 0, sizeof(out->fields));
    memset(out->owner, 0, sizeof(out->owner));
    memset(out->labels, 0, sizeof(out->labels));
    if (kind == PICTURE_SCENE)
        draw_scene(&draws, params, out);
    else
        draw_screen(&draws, params, out);
}
