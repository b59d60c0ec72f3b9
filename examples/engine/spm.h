/* Vocabularies of SentencePiece ("llama"): two tokens that together are a third are joined, the
 * best score first. */
#ifndef ENGINE_SPM_H
#define ENGINE_SPM_H

#include "hash.h"
#include "tokenizer.h"

/* Writes the bytes of a token's text, no more than it has: U+2581 stands for a space. */
size_t spm_bytes(struct gguf_text text, char *out);

/* The byte of a text "<0xNN>", or -1. */
int spm_byte_of(struct gguf_text text);

/*
 * The pairs of the tokens in the map that make another one, ranked by its score. A token with a
 * character that is no token itself is never made.
 */
bool spm_find_merges(const struct text_map *tokens, size_t n_tokens, const float *scores,
                     struct merge_map *out);

/*
 * A token for each character of a text, and where there is none, for each of its bytes. Returns
 * their number, at most size; a byte without a token ends the text: *used is then less than size.
 */
size_t spm_characters(const struct text_map *tokens, const int32_t byte_ids[256], const char *text,
                      size_t size, int32_t *ids, size_t *used);

#endif
