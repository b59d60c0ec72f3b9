/* A sitting: the items of an exam under many settings, in rooms of several threads. */
#ifndef VLM_SITTING_H
#define VLM_SITTING_H

#include "exam_room.h"

struct sitting {
    struct exam_room_params room;
    size_t first, n; /* items first ... first + n - 1; first a multiple of N_GROUPS */
    const struct setting *settings;
    size_t n_settings;
    struct outcome *outcomes; /* [n][1 + n_settings]: the whole cache, then the settings */
};

/* Each item is the work of one thread, whose room holds no trace of others: the outcomes do not
 * depend on the number of threads (0: the processors that this process may run on). */
bool sitting_run(struct sitting *sitting, size_t n_threads, struct failure *failure);
void sitting_free(struct sitting *sitting);

#endif
