/* A sitting: the items of an exam under many settings, in rooms of several threads. */
#include "sitting.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include <kvc/pool.h>

/* What the threads share. Items are handed out one by one: some take longer. */
struct hall {
    struct sitting *sitting;
    atomic_size_t next;
    atomic_bool failed;
    struct failure *failures; /* one a task */
};

static bool sit_item(const struct sitting *sitting, struct exam_room *room, size_t i,
                     const struct setting **tried, struct outcome *tries, struct failure *failure)
{
    struct outcome *out = sitting->outcomes + i * (1 + sitting->n_settings);
    size_t n = 0;

    for (size_t s = 0; s < sitting->n_settings; s++)
        if (sitting->settings[s].n_items == 0 || i < sitting->settings[s].n_items)
            tried[n++] = &sitting->settings[s];
    if (!exam_room_enter(room, sitting->first + i, failure) ||
        !exam_room_try(room, tried, n, tries, failure))
        return false;
    exam_room_reference(room, &out[0]);
    for (size_t t = 0; t < n; t++)
        out[1 + (size_t)(tried[t] - sitting->settings)] = tries[t];
    return true;
}

static bool sit_items(struct hall *hall, struct failure *failure)
{
    const struct sitting *sitting = hall->sitting;
    const struct setting **tried = malloc((sitting->n_settings + 1) * sizeof(const void *));
    struct outcome *tries = malloc((sitting->n_settings + 1) * sizeof(*tries));
    struct exam_room *room = NULL;
    size_t i;

    bool ok = tried && tries;

    if (!ok)
        fail_with(failure, "out of memory");
    ok = ok && exam_room_open(&sitting->room, &room, failure);
    while (ok && !atomic_load(&hall->failed) &&
           (i = atomic_fetch_add(&hall->next, 1)) < sitting->n) {
        struct failure why;
        ok = sit_item(sitting, room, i, tried, tries, &why) ||
             fail_with(failure, "item %zu: %.200s", i, why.text);
    }
    exam_room_close(room);
    free(tried);
    free(tries);
    return ok;
}

static void sit_task(void *arg, size_t task)
{
    struct hall *hall = arg;

    hall->failures[task].text[0] = '\0';
    if (!sit_items(hall, &hall->failures[task]))
        atomic_store(&hall->failed, true);
}

bool sitting_run(struct sitting *sitting, size_t n_threads, struct failure *failure)
{
    struct hall hall = {.sitting = sitting};
    kvc_pool *pool;
    const kvc_status status = kvc_pool_create(n_threads, &pool);

    if (status != KVC_OK)
        return fail_with(failure, "cannot start threads: %s", kvc_status_str(status));
    const size_t n_tasks = kvc_pool_n_threads(pool);
    sitting->outcomes = calloc(sitting->n * (1 + sitting->n_settings), sizeof(*sitting->outcomes));
    hall.failures = calloc(n_tasks, sizeof(*hall.failures));
    bool ok = sitting->outcomes && hall.failures;

    if (!ok)
        fail_with(failure, "out of memory");
    if (ok)
        kvc_pool_parallel_for(pool, n_tasks, sit_task, &hall);
    for (size_t t = 0; ok && t < n_tasks; t++)
        if (hall.failures[t].text[0])
            ok = fail_with(failure, "%s", hall.failures[t].text);
    free(hall.failures);
    kvc_pool_destroy(pool);
    if (!ok)
        sitting_free(sitting);
    return ok;
}

void sitting_free(struct sitting *sitting)
{
    free(sitting->outcomes);
    sitting->outcomes = NULL;
}
