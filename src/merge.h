/* merge.h - what the files of this module share: checks of tokens, options and views. */
#ifndef KVC_SRC_MERGE_H
#define KVC_SRC_MERGE_H

#include "kvc/merge.h"

#include <float.h>
#include <math.h>

#include "check.h"
#include "ctx.h"

/* The options of a caller, checked. */
static inline kvc_status take_options(const kvc_merge_options *options, kvc_merge_options *out)
{
    kvc_merge_options_default(out);
    if (options)
        KVC_TRY(kvc_struct_read(out, sizeof(*out), options, sizeof(*out)));
    KVC_CHECK(out->tau >= -1.0f && out->tau <= 1.0f &&
                  (out->max_norm_ratio == 0.0f || out->max_norm_ratio >= 1.0f) &&
                  out->max_share >= 0.0f && out->max_share <= 1.0f && out->window >= 0 &&
                  (unsigned)out->weights <= KVC_MERGE_ATTENTION,
              KVC_E_ARG);
    return KVC_OK;
}

/* Finite and not negative. */
static inline bool is_amount(float x)
{
    return x >= 0.0f && x <= FLT_MAX;
}

static inline bool tokens_ok(const kvc_merge_token *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const kvc_merge_token *t = &tokens[i];
        if (!(t->size >= 1.0f) || !is_amount(t->size) || !is_amount(t->mass) ||
            !isfinite(t->bias) || (t->reserved[0] | t->reserved[1] | t->reserved[2]) != 0)
            return false;
    }
    return true;
}

/* Whether a token may merge at all. */
static inline bool is_free(const kvc_merge_token *t)
{
    return t->image >= 0 && !t->fixed;
}

static inline bool same_image(const kvc_merge_token *a, const kvc_merge_token *b,
                              const kvc_merge_options *o)
{
    return is_free(a) && is_free(b) && a->image == b->image &&
           (o->across_frames || a->frame == b->frame);
}

static inline bool view_fits(const kvc_view *view)
{
    return kvc_view_ok(view) && view->n_tokens <= INT32_MAX;
}

/* Element i of an array of views, whose elements have the caller's size. */
static inline const kvc_view *view_at(const kvc_view *views, size_t i)
{
    return (const kvc_view *)(const void *)((const char *)views + i * views->struct_size);
}

/* Views of n tokens; distinct: to be written. */
static inline kvc_status check_views(const kvc_view *views, size_t n_layers, size_t n,
                                     bool distinct)
{
    for (size_t l = 0; l < n_layers; l++) {
        const kvc_view *view = view_at(views, l);
        KVC_CHECK(view_fits(view) && view->struct_size == views->struct_size &&
                      view->n_tokens == n && (!distinct || kvc_view_distinct(view)),
                  KVC_E_ARG);
    }
    for (size_t l = 0; l < n_layers; l++)
        KVC_CHECK(view_at(views, l)->head_dim <= KVC_MAX_HEAD_DIM, KVC_E_UNSUPPORTED);
    return KVC_OK;
}

#endif
