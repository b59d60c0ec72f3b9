/* Settings: ways to compress the picture in a cache before a question about it is read. */
#ifndef VLM_SETTING_H
#define VLM_SETTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvc/kvc.h>
#include <kvc/policy.h>

/* What scores the patches; the questions are those whose last words look at the picture. */
enum score_kind {
    SCORE_ARTICLE, /* mean over the last ARTICLE_LAYERS layers and all heads */
    SCORE_SOFT,    /* the same with temperature and a little of centre and texture */
    SCORE_LAST,    /* the last layer */
    SCORE_MIDDLE,  /* the middle third of the layers */
    SCORE_ALL,     /* all layers */
    SCORE_LEARNED, /* the patch alone, by a scorer trained for it */
    SCORE_TEXTURE, /* the pixels alone */
    SCORE_CENTRE,  /* the place alone */
    SCORE_RANDOM,
    N_SCORES
};

enum { ARTICLE_LAYERS = 4 };

/* Of SCORE_SOFT, as kvc_refine_options. */
struct soft_weights {
    float temperature, centre, texture;
};

/* "article", "soft", ... */
const char *score_name(enum score_kind kind);

enum application {
    APPLY_DROP,       /* the cache is compressed in place: gaps in the positions stay */
    APPLY_AGAIN,      /* a second prefill of the patches that are kept, at their places */
    APPLY_RENUMBERED, /* a second prefill as if they were all there is: a dense grid */
    /* What is left is put into a new sequence as plain rows: it lacks the biases that merging gave
     * to rows of several tokens. Only for policies that seal as F16, which keeps rows exact. */
    APPLY_NO_BIAS,
    APPLY_SEAL /* nothing is pruned; a cache with scale_window seals as the policy's precision */
};

struct setting {
    const char *name;
    enum score_kind score;
    struct soft_weights soft; /* SCORE_SOFT */
    enum application application;
    int32_t scale_window; /* APPLY_SEAL */
    bool measure_error;   /* ask for rel_err, which costs as much as all else of a compression */
    bool ask_first, ask_second;
    size_t n_items;    /* asked of the first items only; 0: of all */
    kvc_policy policy; /* source, scores and last_tokens are set when it is applied */
};

bool soft_equal(const struct soft_weights *a, const struct soft_weights *b);

/* Nothing pruned or merged, F16, scored as @p score says. The first question is asked. */
void setting_default(enum score_kind score, struct setting *out);

#endif
