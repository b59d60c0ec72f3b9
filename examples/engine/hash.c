/* Hash maps of the tokenizer: open addressing, sized once. */
#include "hash.h"

#include <stdlib.h>
#include <string.h>

/* At most half full. */
static size_t slots_for(size_t n)
{
    size_t slots = 16;

    while (slots < 2 * n)
        slots *= 2;
    return slots;
}

/* FNV-1a */
static size_t hash_text(const char *text, size_t size)
{
    uint64_t h = 0xcbf29ce484222325u;

    for (size_t i = 0; i < size; i++)
        h = (h ^ (unsigned char)text[i]) * 0x100000001b3u;
    return (size_t)(h ^ h >> 32);
}

static size_t hash_pair(int32_t left, int32_t right)
{
    const uint64_t h = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;

    return (size_t)(h ^ h >> 32);
}

/* The slot that holds the text, or the empty one where it belongs. */
static size_t text_slot(const struct text_map *map, const char *text, size_t size)
{
    size_t i = hash_text(text, size) & map->mask;

    while (map->slots[i] >= 0) {
        const struct gguf_text *have = &map->texts[map->slots[i]];
        if (have->size == size && memcmp(have->data, text, size) == 0)
            break;
        i = (i + 1) & map->mask;
    }
    return i;
}

bool text_map_init(struct text_map *map, const struct gguf_text *texts, size_t n_most)
{
    const size_t n_slots = slots_for(n_most);

    map->texts = texts;
    map->mask = n_slots - 1;
    map->slots = malloc(n_slots * sizeof(*map->slots));
    if (!map->slots)
        return false;
    for (size_t i = 0; i < n_slots; i++)
        map->slots[i] = -1;
    return true;
}

void text_map_free(struct text_map *map)
{
    free(map->slots);
    map->slots = NULL;
}

void text_map_insert(struct text_map *map, int32_t index)
{
    const struct gguf_text *text = &map->texts[index];
    const size_t slot = text_slot(map, text->data, text->size);

    if (map->slots[slot] < 0)
        map->slots[slot] = index;
}

int32_t text_map_find(const struct text_map *map, const char *text, size_t size)
{
    return map->slots[text_slot(map, text, size)];
}

bool merge_map_init(struct merge_map *map, size_t n)
{
    const size_t n_slots = slots_for(n);

    map->mask = n_slots - 1;
    map->slots = malloc(n_slots * sizeof(*map->slots));
    if (!map->slots)
        return false;
    for (size_t i = 0; i < n_slots; i++)
        map->slots[i].left = -1;
    return true;
}

void merge_map_free(struct merge_map *map)
{
    free(map->slots);
    map->slots = NULL;
}

static struct merge *merge_slot(const struct merge_map *map, int32_t left, int32_t right)
{
    size_t i = hash_pair(left, right) & map->mask;

    while (map->slots[i].left >= 0 && (map->slots[i].left != left || map->slots[i].right != right))
        i = (i + 1) & map->mask;
    return &map->slots[i];
}

void merge_map_insert(struct merge_map *map, const struct merge *merge)
{
    struct merge *slot = merge_slot(map, merge->left, merge->right);

    if (slot->left < 0)
        *slot = *merge;
}

const struct merge *merge_map_find(const struct merge_map *map, int32_t left, int32_t right)
{
    const struct merge *slot = merge_slot(map, left, right);

    return slot->left < 0 ? NULL : slot;
}
