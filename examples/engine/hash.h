/* Hash maps of the tokenizer: open addressing, sized once. */
#ifndef ENGINE_HASH_H
#define ENGINE_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gguf.h"

/* Texts to their index in an array of the caller's. */
struct text_map {
    const struct gguf_text *texts;
    int32_t *slots; /* index or -1 */
    size_t mask;
};

bool text_map_init(struct text_map *map, const struct gguf_text *texts, size_t n_most);
void text_map_free(struct text_map *map);
void text_map_insert(struct text_map *map, int32_t index); /* the first of equals stays */
int32_t text_map_find(const struct text_map *map, const char *text, size_t size); /* or -1 */

/* Pairs of tokens to the rank of their merge and the token it makes. */
struct merge {
    int32_t left, right; /* left -1: the slot is empty */
    int32_t rank, result;
};

struct merge_map {
    struct merge *slots;
    size_t mask;
};

bool merge_map_init(struct merge_map *map, size_t n);
void merge_map_free(struct merge_map *map);
void merge_map_insert(struct merge_map *map,
                      const struct merge *merge); /* the first of a pair stays */
const struct merge *merge_map_find(const struct merge_map *map, int32_t left, int32_t right);

#endif
