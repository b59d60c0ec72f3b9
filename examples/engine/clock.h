/* The time. */
#ifndef ENGINE_CLOCK_H
#define ENGINE_CLOCK_H

/* Seconds that never run backwards. */
double seconds_now(void);

#endif
