/* policy_pick.h - which tokens tests expect a policy to keep, in a drive that each test file has.
 */
#ifndef KVC_TESTS_POLICY_PICK_H
#define KVC_TESTS_POLICY_PICK_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy_drive.h"
#include "tables.h"

enum { MAX_TOKENS = 1024 };

static struct pd d;
static float scores[MAX_TOKENS];

static inline void hold(void)
{
    assert_int_equal(kvc_seq_hold(d.cache, d.seq), KVC_OK);
}

/* Scores of few values, so that ties are common. */
static inline kvc_policy caller_policy(uint64_t *rng, int levels)
{
    kvc_policy p = pd_policy();

    for (int i = 0; i < MAX_TOKENS; i++)
        scores[i] = (float)rng_below(rng, (size_t)levels) / 8.0f;
    p.source = KVC_SOURCE_CALLER;
    p.scores = scores;
    p.n_scores = MAX_TOKENS;
    return p;
}

/* Marks the keep best of the n candidates by score, lower index first on a tie. */
static inline void take_best(const double *score, const bool *candidate, size_t n, size_t keep,
                             bool *kept)
{
    for (size_t k = 0; k < keep; k++) {
        size_t best_at = n;

        for (size_t i = 0; i < n; i++)
            if (candidate[i] && !kept[i] && (best_at == n || score[i] > score[best_at]))
                best_at = i;
        if (best_at == n)
            return;
        kept[best_at] = true;
    }
}

static inline void assert_kept_in(int layer, int head, const bool *kept, size_t n)
{
    struct pd_rows rows = pd_read(&d, d.seq, layer, head);
    size_t row = 0;

    for (size_t i = 0; i < n; i++) {
        const bool there = row < rows.n && rows.ordinals[row] == (int64_t)i;

        if (there != kept[i])
            fail_msg("layer %d head %d: ordinal %zu is %s", layer, head, i,
                     there ? "kept" : "gone");
        row += there;
    }
    assert_int_equal(row, rows.n);
    pd_free(&rows);
}

static inline void assert_kept(const bool *kept, size_t n)
{
    for (int layer = 0; layer < d.p.n_layers; layer++)
        for (int head = 0; head < d.p.n_kv_heads; head++)
            assert_kept_in(layer, head, kept, n);
}

/* A grid whose last row is short. */
static inline void feed_ragged(int32_t image, int rows, int cols, int last)
{
    kvc_token tokens[MAX_TOKENS];
    const int n = (rows - 1) * cols + last;
    const int64_t position = kvc_seq_next_position(d.cache, d.seq);

    for (int i = 0; i < n; i++)
        tokens[i] = pd_patch(image, i / cols, i % cols, position);
    pd_feed(&d, tokens, n, NULL, NULL);
}

#endif
