/* Attention as article 002 has it: all of K and V coded again before each call, with one scale of a
 * layer, of a head, or of a head's newest 512 tokens. */
#ifndef ENGINE_ARTICLE_H
#define ENGINE_ARTICLE_H

#include "forward.h"
#include "recipes.h"

struct article;

/* @p max_tokens of one sequence. */
bool article_create(kvc_ctx *ctx, const struct model_shape *shape, const struct recipe *recipe,
                    size_t max_tokens, struct article **out, struct failure *failure);
void article_destroy(struct article *article);

/* Forgets the sequence. */
void article_restart(struct article *article);

struct forward_hook article_hook(struct article *article);

#endif
