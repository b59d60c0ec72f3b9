/* Why something failed: one sentence for the user. */
#include "failure.h"

#include <stdarg.h>
#include <stdio.h>

bool fail_with(struct failure *failure, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(failure->text, sizeof(failure->text), format, args);
    va_end(args);
    return false;
}
