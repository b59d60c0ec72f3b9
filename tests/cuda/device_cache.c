/* A cache in device memory for the tests of its kernels. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "device_cache.h"

static const int pattern = 0xa5;

static void *device_memory(size_t n)
{
    void *memory = NULL;
    assert_int_equal(cudaMalloc(&memory, n), cudaSuccess);
    return memory;
}

void *device_copy(const void *from, size_t n)
{
    void *memory = device_memory(n);
    assert_int_equal(cudaMemcpy(memory, from, n, cudaMemcpyHostToDevice), cudaSuccess);
    return memory;
}

void device_free(void *memory)
{
    assert_int_equal(cudaFree(memory), cudaSuccess);
}

struct device_cache *device_cache_new(const struct kvc_page_layout *layouts, size_t n_layouts,
                                      size_t n_bytes)
{
    struct device_cache *c = calloc(1, sizeof(*c));
    cudaStream_t stream;
    assert_non_null(c);
    assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    c->queue.stream = stream;
    c->n_bytes = n_bytes;
    c->cache.memory = device_memory(n_bytes);
    assert_int_equal(cudaMemset(c->cache.memory, pattern, n_bytes), cudaSuccess);
    c->cache.layouts = device_copy(layouts, n_layouts * sizeof(*layouts));
    return c;
}

void device_cache_entries(struct device_cache *c, const struct kvc_device_entry *entries,
                          int32_t n_pairs, int32_t n_kv_heads, int32_t row_entries,
                          int32_t n_tokens, int32_t n_slots)
{
    const struct kvc_device_seq seq = {.n_tokens = n_tokens, .n_slots = n_slots};
    c->cache.n_pairs = n_pairs;
    c->cache.n_kv_heads = n_kv_heads;
    c->cache.row_entries = row_entries;
    c->cache.entries =
        device_copy(entries, (size_t)n_pairs * (size_t)row_entries * sizeof(*entries));
    c->cache.seqs = device_copy(&seq, sizeof(seq));
}

void device_cache_free(struct device_cache *c)
{
    device_free(c->cache.memory);
    device_free((void *)(uintptr_t)c->cache.layouts);
    if (c->cache.entries)
        device_free(c->cache.entries);
    if (c->cache.seqs)
        device_free(c->cache.seqs);
    assert_int_equal(cudaStreamDestroy(c->queue.stream), cudaSuccess);
    free(c);
}

void device_write(const struct device_cache *c, size_t at, const void *from, size_t n)
{
    assert_true(at + n <= c->n_bytes);
    assert_int_equal(cudaMemcpy(c->cache.memory + at, from, n, cudaMemcpyHostToDevice),
                     cudaSuccess);
}

void device_read(const struct device_cache *c, const void *from, void *to, size_t n)
{
    assert_int_equal(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToHost, c->queue.stream),
                     cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(c->queue.stream), cudaSuccess);
}

bool device_untouched(const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != pattern)
            return false;
    return true;
}
