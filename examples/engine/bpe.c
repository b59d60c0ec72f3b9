/* Byte pair encoding: a linked list of tokens and a heap of the pairs that can be joined. */
#include "bpe.h"

#include <stdlib.h>

static bool before(const struct bpe_candidate *a, const struct bpe_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->left < b->left;
}

static void push(struct bpe *bpe, const struct bpe_candidate *candidate)
{
    size_t i = bpe->n_heap++;

    while (i > 0 && before(candidate, &bpe->heap[(i - 1) / 2])) {
        bpe->heap[i] = bpe->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    bpe->heap[i] = *candidate;
}

static struct bpe_candidate pop(struct bpe *bpe)
{
    const struct bpe_candidate top = bpe->heap[0];
    const struct bpe_candidate last = bpe->heap[--bpe->n_heap];
    size_t i = 0;

    for (size_t child = 1; child < bpe->n_heap; child = 2 * i + 1) {
        if (child + 1 < bpe->n_heap && before(&bpe->heap[child + 1], &bpe->heap[child]))
            child++;
        if (!before(&bpe->heap[child], &last))
            break;
        bpe->heap[i] = bpe->heap[child];
        i = child;
    }
    bpe->heap[i] = last;
    return top;
}

static void push_pair(struct bpe *bpe, const struct merge_map *merges, const int32_t *ids,
                      size_t left, size_t right)
{
    const struct merge *merge = merge_map_find(merges, ids[left], ids[right]);

    if (merge)
        push(bpe, &(struct bpe_candidate){merge->rank, merge->result, left, right, ids[left],
                                          ids[right]});
}

static bool reserve(struct bpe *bpe, size_t n)
{
    if (n <= bpe->capacity)
        return true;
    bpe_free(bpe);
    if (n > SIZE_MAX / 4 / sizeof(*bpe->heap))
        return false;
    /* n - 1 pairs at first, and each of at most n - 1 joins adds two and takes one away. */
    bpe->heap = malloc(2 * n * sizeof(*bpe->heap));
    bpe->next = malloc(n * sizeof(*bpe->next));
    bpe->prev = malloc(n * sizeof(*bpe->prev));
    if (!bpe->heap || !bpe->next || !bpe->prev) {
        bpe_free(bpe);
        return false;
    }
    bpe->capacity = n;
    return true;
}

size_t bpe_merge(struct bpe *bpe, const struct merge_map *merges, int32_t *ids, size_t n)
{
    size_t n_left = 0;

    if (n < 2)
        return n;
    if (!reserve(bpe, n))
        return SIZE_MAX;
    bpe->n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        bpe->prev[i] = i - 1; /* SIZE_MAX before the first */
        bpe->next[i] = i + 1;
        if (i + 1 < n)
            push_pair(bpe, merges, ids, i, i + 1);
    }
    while (bpe->n_heap > 0) {
        const struct bpe_candidate top = pop(bpe);
        if (ids[top.left] != top.left_id || ids[top.right] != top.right_id ||
            bpe->next[top.left] != top.right)
            continue;
        ids[top.left] = top.result;
        ids[top.right] = -1;
        const size_t next = bpe->next[top.right], prev = bpe->prev[top.left];
        bpe->next[top.left] = next;
        if (next < n) {
            bpe->prev[next] = top.left;
            push_pair(bpe, merges, ids, top.left, next);
        }
        if (prev < n)
            push_pair(bpe, merges, ids, prev, top.left);
    }
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= 0)
            ids[n_left++] = ids[i];
    return n_left;
}

void bpe_free(struct bpe *bpe)
{
    free(bpe->heap);
    free(bpe->next);
    free(bpe->prev);
    *bpe = (struct bpe){0};
}
