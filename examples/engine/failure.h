/* Why something failed: one sentence for the user. */
#ifndef ENGINE_FAILURE_H
#define ENGINE_FAILURE_H

#include <stdbool.h>

struct failure {
    char text[256];
};

/* Writes the sentence (printf rules) and returns false, so that callers can return its result. */
bool fail_with(struct failure *failure, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
