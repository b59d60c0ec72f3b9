/* A cache in device memory for the tests of its kernels, filled and read by the host. */
#ifndef KVC_TESTS_DEVICE_CACHE_H
#define KVC_TESTS_DEVICE_CACHE_H

#include <cuda_runtime_api.h>

#include "kernels/codes.h"
#include "kernels/page.h"
#include "page.h"
#include "support/rng.h"

struct device_cache {
    struct kvc_queue queue;
    struct kvc_device_cache cache;
    size_t n_bytes;
};

/* n_bytes of memory, filled with a pattern, and no entries. */
struct device_cache *device_cache_new(const struct kvc_page_layout *layouts, size_t n_layouts,
                                      size_t n_bytes);
/* Rows of entries for that many pairs of one sequence. */
void device_cache_entries(struct device_cache *cache, const struct kvc_device_entry *entries,
                          int32_t n_pairs, int32_t n_kv_heads, int32_t row_entries,
                          int32_t n_tokens, int32_t n_slots);
void device_cache_free(struct device_cache *cache);

void device_write(const struct device_cache *cache, size_t at, const void *from, size_t n);
/* Waits. */
void device_read(const struct device_cache *cache, const void *from, void *to, size_t n);
void *device_copy(const void *from, size_t n);
void device_free(void *memory);

/* Whether bytes still have the pattern. */
bool device_untouched(const uint8_t *bytes, size_t n);

#endif
