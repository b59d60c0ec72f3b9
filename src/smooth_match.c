/*
 * smooth_match.c - wildcards in the names of modules.
 *
 * A pattern is a machine whose states are its places: a set of places is carried through the name,
 * one character at a time. All moves without a character lead forward, so one pass completes a set.
 */
#include <string.h>

#include "bits.h"
#include "smooth.h"

enum { MAX_PATTERN = 1024 };

struct pattern {
    const char *text;
    size_t n;
};

/* Characters that the part at a place takes of the pattern; 0: it is broken. */
static size_t part_length(const struct pattern *p, size_t at)
{
    if (p->text[at] == '\\')
        return at + 1 < p->n ? 2 : 0;
    if (p->text[at] != '[')
        return 1;
    size_t end = at + 1;
    end += end < p->n && p->text[end] == '!';
    end += end < p->n && p->text[end] == ']'; /* a first one stands for itself */
    while (end < p->n && p->text[end] != ']')
        end++;
    return end < p->n ? end + 1 - at : 0;
}

/* Whether all brackets are closed. */
static bool is_whole(const struct pattern *p)
{
    size_t depth = 0, length;
    if (p->n >= MAX_PATTERN)
        return false;
    for (size_t at = 0; at < p->n; at += length) {
        length = part_length(p, at);
        if (length == 0 || (p->text[at] == '}' && depth == 0))
            return false;
        depth += p->text[at] == '{';
        depth -= p->text[at] == '}';
    }
    return depth == 0;
}

/* The place after the group that is open at a place; marks the alternatives on the way, if any. */
static size_t group_end(const struct pattern *p, size_t at, uint64_t *alternatives)
{
    for (size_t depth = 0; at < p->n; at += part_length(p, at)) {
        if (p->text[at] == '}' && depth-- == 0)
            return at + 1;
        depth += p->text[at] == '{';
        if (p->text[at] == ',' && depth == 0 && alternatives)
            kvc_bit_set(alternatives, at + 1);
    }
    return p->n; /* not reached: the pattern is whole */
}

/* Adds the places that are reached without a character. */
static void complete(const struct pattern *p, uint64_t *places)
{
    size_t depth = 0;
    for (size_t at = 0; at < p->n; at += part_length(p, at)) {
        const char c = p->text[at];
        const bool here = kvc_bit(places, at);
        if (here && (c == '*' || c == '}' || c == '{'))
            kvc_bit_set(places, at + 1);
        if (here && c == '{')
            group_end(p, at + 1, places);
        if (here && c == ',' && depth > 0)
            kvc_bit_set(places, group_end(p, at, NULL));
        depth += c == '{';
        depth -= c == '}';
    }
}

/* Whether a class, from its bracket on, has a character. */
static bool in_class(const char *text, size_t length, char c)
{
    const unsigned char u = (unsigned char)c;
    const bool inverse = text[1] == '!';
    bool found = false;
    for (size_t i = inverse ? 2 : 1; i < length - 1; i++) {
        if (i + 2 < length - 1 && text[i + 1] == '-') {
            found = found || ((unsigned char)text[i] <= u && u <= (unsigned char)text[i + 2]);
            i += 2;
        } else {
            found = found || text[i] == c;
        }
    }
    return found != inverse;
}

/* The places after a character. */
static void advance(const struct pattern *p, const uint64_t *from, char c, uint64_t *to)
{
    size_t depth = 0, length;
    memset(to, 0, MAX_PATTERN / 8);
    for (size_t at = 0; at < p->n; at += length) {
        const char part = p->text[at];
        length = part_length(p, at);
        const bool here = kvc_bit(from, at);
        const bool structure = part == '{' || part == '}' || (part == ',' && depth > 0);
        depth += part == '{';
        depth -= part == '}';
        if (!here || structure)
            continue;
        if (part == '*')
            kvc_bit_set(to, at);
        else if (part == '?' || (part == '[' && in_class(p->text + at, length, c)) ||
                 (part == '\\' && p->text[at + 1] == c) ||
                 (part != '[' && part != '\\' && part == c))
            kvc_bit_set(to, at + length);
    }
}

bool kvc_smooth_match(const char *pattern, const char *name)
{
    const struct pattern p = {pattern, strlen(pattern)};
    uint64_t sets[2][MAX_PATTERN / 64] = {{1}};
    size_t now = 0;

    if (!is_whole(&p))
        return strcmp(pattern, name) == 0;
    complete(&p, sets[now]);
    for (; *name; name++, now = 1 - now) {
        advance(&p, sets[now], *name, sets[1 - now]);
        complete(&p, sets[1 - now]);
    }
    return kvc_bit(sets[now], p.n);
}
