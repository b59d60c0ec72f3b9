/* Whole files in memory. */
#ifndef ENGINE_FILE_H
#define ENGINE_FILE_H

#include <stddef.h>

#include "failure.h"

/* Reads all of a file; the caller frees *data. An empty file gives a pointer that is not NULL. */
bool file_read(const char *path, unsigned char **data, size_t *size, struct failure *failure);

/* Writes all of a file: beside it first, so that it is whole or as it was. */
bool file_write(const char *path, const unsigned char *data, size_t size, struct failure *failure);

/* Asked before long work: whether a file can be written, and is none of the inputs. */
bool file_check_output(const char *path, const char *const *inputs, size_t n_inputs,
                       struct failure *failure);

#endif
