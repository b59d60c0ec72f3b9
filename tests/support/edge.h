/* Buffers whose last byte is followed by memory that faults. */
#ifndef KVC_TESTS_EDGE_H
#define KVC_TESTS_EDGE_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static inline size_t edge_pages(size_t size)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (size + page - 1) / page * page;
}

/* The start is as aligned as the size is. */
static inline void *edge_new(size_t size)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = edge_pages(size);
    uint8_t *base =
        mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + room, page, PROT_NONE) != 0)
        abort();
    return base + room - size;
}

static inline void edge_free(void *data, size_t size)
{
    const size_t room = edge_pages(size);
    munmap((uint8_t *)data + size - room, room + (size_t)sysconf(_SC_PAGESIZE));
}

#endif
