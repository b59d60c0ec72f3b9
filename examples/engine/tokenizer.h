/* Byte-level BPE ("gpt2") with the "smollm" split, or SentencePiece's BPE ("llama"): text to token
 * ids and back. */
#ifndef ENGINE_TOKENIZER_H
#define ENGINE_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "failure.h"
#include "gguf.h"

enum token_kind {
    TOKEN_TEXT,    /* made by merging */
    TOKEN_CONTROL, /* found only where asked for */
    TOKEN_DEFINED, /* found as a whole: GPT-2's where asked for, SentencePiece's always */
    TOKEN_BYTE,    /* SentencePiece: "<0xNN>", of characters without a token */
    TOKEN_UNUSED   /* never made */
};

/* A vocabulary as GGUF files hold it: GPT-2 writes bytes as printable characters, SentencePiece a
 * space as U+2581. */
struct vocabulary {
    const struct gguf_text *tokens;
    size_t n_tokens;
    const struct gguf_text *merges; /* GPT-2: "left right", best first */
    size_t n_merges;
    const uint8_t *kinds; /* [n_tokens] of enum token_kind; NULL: all are text */
    const float *scores;  /* [n_tokens] SentencePiece; NULL: GPT-2 */
    bool has_bos;
    int32_t bos; /* every text begins with it */
};

struct tokenizer;

/* The vocabulary is copied. */
bool tokenizer_create(const struct vocabulary *vocabulary, struct tokenizer **out,
                      struct failure *failure);
bool tokenizer_from_gguf(const struct gguf *gguf, struct tokenizer **out, struct failure *failure);
void tokenizer_destroy(struct tokenizer *tokenizer);

size_t tokenizer_n_tokens(const struct tokenizer *tokenizer);

/* Token ids that grow by appending; zero it first, free(ids) at the end. */
struct token_list {
    int32_t *ids;
    size_t n, capacity;
};

/* The token that every text begins with, which tokenizer_encode() leaves to its caller; or -1. */
int32_t tokenizer_bos(const struct tokenizer *tokenizer);

/*
 * Appends the tokens of a text. Any bytes are taken: those that are no UTF-8 stand alone. With
 * parse_special, the texts of control and defined tokens become those tokens. Fails if the
 * vocabulary lacks a byte of the text; the list then holds what came before.
 */
bool tokenizer_encode(struct tokenizer *tokenizer, const char *text, size_t size,
                      bool parse_special, struct token_list *list, struct failure *failure);

/* The bytes of a token, perhaps only part of a character; empty for an id out of range. */
struct gguf_text tokenizer_text(const struct tokenizer *tokenizer, int32_t id);

/* The control or defined token of that text, or -1. */
int32_t tokenizer_special(const struct tokenizer *tokenizer, const char *text);

#endif
