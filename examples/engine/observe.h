/* Reading a text to see the K and Q of a model. */
#ifndef ENGINE_OBSERVE_H
#define ENGINE_OBSERVE_H

#include "session.h"

/* An observation of the session's model that has seen nothing. */
bool observe_create(const struct session *session, kvc_observation **out, struct failure *failure);

/* Adds K and Q of @p n tokens, read in contexts of @p n_context; the first @p n_sinks tokens of
 * each are not counted: caches keep those exact, and they are unlike the rest. */
bool observe_text(const struct session *session, const int32_t *tokens, size_t n, size_t n_context,
                  size_t n_sinks, kvc_observation *observation, struct failure *failure);

#endif
