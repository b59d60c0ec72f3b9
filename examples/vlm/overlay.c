/* Colours that stay apart for colour-blind eyes: black, blue, orange. */
#include "overlay.h"

#include "picture.h"

static const uint8_t dark[3] = {12, 12, 16}, blue[3] = {0, 90, 200}, orange[3] = {255, 140, 0};

/* Part of 256 of a colour over the pixels of a cell, of its frame only or all of it. */
static void paint(uint8_t *rgb, int grid, int cell, const uint8_t colour[3], int part, bool frame)
{
    const size_t line = PATCH * (size_t)grid;
    uint8_t *corner = rgb + ((size_t)(cell / grid) * line + (size_t)(cell % grid)) * PATCH * 3;

    for (int i = 0; i < PATCH * PATCH; i++) {
        const size_t y = (size_t)(i / PATCH), x = (size_t)(i % PATCH);
        const bool inside = y > 0 && y < PATCH - 1 && x > 0 && x < PATCH - 1;
        if (frame && inside)
            continue;
        uint8_t *pixel = corner + 3 * (y * line + x);
        for (int c = 0; c < 3; c++)
            pixel[c] = (uint8_t)((pixel[c] * (256 - part) + colour[c] * part) / 256);
    }
}

void overlay_draw(const kvc_token_fate *fates, size_t n_fates, int64_t first, int grid,
                  uint8_t *rgb)
{
    for (size_t i = 0; i < n_fates; i++) {
        const int64_t cell = fates[i].ordinal - first;
        if (cell < 0 || cell >= (int64_t)grid * grid)
            continue;
        if (fates[i].fate == KVC_FATE_PRUNED || fates[i].fate == KVC_FATE_EVICTED)
            paint(rgb, grid, (int)cell, dark, 205, false);
        else if (fates[i].fate == KVC_FATE_MERGED)
            paint(rgb, grid, (int)cell, blue, 120, false);
        else if (fates[i].fate == KVC_FATE_ABSORBED)
            paint(rgb, grid, (int)cell, orange, 256, true);
    }
}
