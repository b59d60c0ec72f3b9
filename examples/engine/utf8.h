/* UTF-8, byte by byte. */
#ifndef ENGINE_UTF8_H
#define ENGINE_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Decodes the character at the start of text; returns its bytes, or 0 if they are no valid UTF-8.
 */
size_t utf8_decode(const char *text, size_t size, uint32_t *code_point);

/* Bytes of the longest start of text that does not end inside a character. */
size_t utf8_complete(const char *text, size_t size);

#endif
