/* Whole files in memory. Read, not mapped: a file cut short by others must not end the program. */
#include "file.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Regular files tell their size; for others (pipes) the buffer grows. */
static size_t first_capacity(FILE *file)
{
    struct stat st;

    if (fstat(fileno(file), &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= 0 &&
        (uintmax_t)st.st_size < SIZE_MAX / 2)
        return (size_t)st.st_size + 1;
    return (size_t)1 << 16;
}

static unsigned char *read_stream(FILE *file, size_t *size)
{
    size_t capacity = first_capacity(file);
    unsigned char *data = malloc(capacity);
    size_t n = 0;

    while (data) {
        n += fread(data + n, 1, capacity - n, file);
        if (n < capacity)
            break;
        unsigned char *larger = capacity > SIZE_MAX / 2 ? NULL : realloc(data, capacity * 2);
        if (!larger) {
            free(data);
            errno = ENOMEM;
            return NULL;
        }
        data = larger;
        capacity *= 2;
    }
    *size = n;
    return data;
}

bool file_read(const char *path, unsigned char **data, size_t *size, struct failure *failure)
{
    FILE *file = fopen(path, "rb");

    *data = NULL;
    *size = 0;
    if (!file)
        return fail_with(failure, "cannot open %s: %s", path, strerror(errno));
    errno = 0;
    *data = read_stream(file, size);
    if (!*data || ferror(file)) {
        const int reason = errno;
        free(*data);
        *data = NULL;
        fclose(file);
        return fail_with(failure, "cannot read %s: %s", path, strerror(reason ? reason : EIO));
    }
    fclose(file);
    return true;
}

static bool write_all(int file, const unsigned char *data, size_t size)
{
    while (size > 0) {
        const ssize_t n = write(file, data, size);
        if (n < 0 && errno != EINTR)
            return false;
        data += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
    return fsync(file) == 0;
}

bool file_write(const char *path, const unsigned char *data, size_t size, struct failure *failure)
{
    char part[512];

    if (snprintf(part, sizeof(part), "%s.XXXXXX", path) >= (int)sizeof(part))
        return fail_with(failure, "%.100s...: the path is too long", path);
    const int file = mkstemp(part);
    if (file < 0)
        return fail_with(failure, "cannot write %.100s: %s", path, strerror(errno));
    const mode_t mask = umask(0);
    umask(mask);
    bool ok = write_all(file, data, size) && fchmod(file, 0666 & ~mask) == 0;
    int why = errno;
    if (close(file) != 0 && ok) {
        ok = false;
        why = errno;
    }
    if (ok && rename(part, path) != 0) {
        ok = false;
        why = errno;
    }
    if (ok)
        return true;
    unlink(part);
    return fail_with(failure, "cannot write %.100s: %s", path, strerror(why));
}

/* Whether two names are those of one file. */
static bool is_same(const char *a, const char *b)
{
    struct stat x, y;

    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Of a file that is not there yet, its folder is asked. */
static bool can_write(const char *path)
{
    struct stat st;
    char folder[4096];
    const char *slash = strrchr(path, '/');

    if (stat(path, &st) == 0) {
        errno = EISDIR;
        return !S_ISDIR(st.st_mode) && access(path, W_OK) == 0;
    }
    const int n = slash == path ? 1 : slash ? (int)(slash - path) : 0;
    if (!slash)
        return access(".", W_OK | X_OK) == 0;
    if (snprintf(folder, sizeof(folder), "%.*s", n, path) >= (int)sizeof(folder)) {
        errno = ENAMETOOLONG;
        return false;
    }
    return access(folder, W_OK | X_OK) == 0;
}

bool file_check_output(const char *path, const char *const *inputs, size_t n_inputs,
                       struct failure *failure)
{
    for (size_t i = 0; i < n_inputs; i++)
        if (is_same(path, inputs[i]))
            return fail_with(failure, "%.120s is an input, which is never changed", path);
    return can_write(path) || fail_with(failure, "cannot write %.120s: %s", path, strerror(errno));
}
