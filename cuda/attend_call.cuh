/* attend_call.cuh - what the kernels of attention share: rows of a call, pages that they see. */
#ifndef KVC_ATTEND_CALL_CUH
#define KVC_ATTEND_CALL_CUH

#include "attend.h"
#include "row.cuh"

/* A launch over one family. */
struct attend_args {
    kvc_device_call call;
    kvc_device_family family;
    kvc_device_masses masses;
    int32_t number, block_entries; /* of the family */
    uint32_t n_slices;             /* of V, of as many channels as the kernel has */
    uint32_t kd;                   /* channels of K in shared memory */
    float k_bias;                  /* of codes, as subnormal halves */
    uint32_t k_magic;              /* twice the half 1024 + bias of bytes */
    int32_t n_stages;
    uint32_t stages_at, stage_bytes;                              /* in shared memory */
    uint32_t v_at, params_at, params_bytes, ordinals_at, bias_at; /* in a stage */
};

/* One a format of K; args have the call, the family and the masses. */
cudaError_t kvc_attend_f16(attend_args &args, cudaStream_t stream);
cudaError_t kvc_attend_int8(attend_args &args, cudaStream_t stream);
cudaError_t kvc_attend_int6(attend_args &args, cudaStream_t stream);
cudaError_t kvc_attend_int4(attend_args &args, cudaStream_t stream);

namespace
{

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
constexpr float MOST_NEGATIVE = -1e30f;    /* instead of -inf, whose difference is NaN */
constexpr uint32_t BYTE_BIAS = 0x64806480; /* twice the half 1024 + 128 */

__device__ __forceinline__ float lanes_sum(float x)
{
#pragma unroll
    for (int h = 16; h > 0; h /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, h);
    return x;
}

/* Query row r of a KV head is token * group + g. */
__device__ __forceinline__ int32_t ordinal_of(const kvc_device_call &call,
                                              const kvc_device_item &item, int32_t r)
{
    return call.cache.seqs[item.seq].n_tokens - call.n_q + r / call.cache.group;
}

__device__ __forceinline__ int32_t first_seen(const kvc_device_call &call, int32_t at)
{
    return call.window > 0 && call.window <= at ? (int32_t)(at + 1 - call.window) : 0;
}

/* Its number among the rows of all items. */
__device__ __forceinline__ size_t row_index(const kvc_device_call &call, int32_t item, int32_t head,
                                            int32_t r)
{
    const int32_t group = call.cache.group;
    const size_t n_heads = (size_t)(call.cache.n_kv_heads * group);
    return ((size_t)item * (size_t)call.n_q + (size_t)(r / group)) * n_heads +
           (size_t)(head * group + r % group);
}

__device__ __forceinline__ size_t mass_entry(const kvc_device_call &call, int32_t item,
                                             int32_t head, int32_t entry)
{
    return ((size_t)item * (size_t)call.cache.n_kv_heads + (size_t)head) *
               (size_t)call.cache.row_entries +
           (size_t)entry;
}

__device__ __forceinline__ const kvc_device_entry *
entries_of(const kvc_device_call &call, const kvc_device_item &item, int32_t head)
{
    const kvc_device_cache &cache = call.cache;
    const size_t pair = (size_t)(call.layer * cache.n_kv_heads + head);
    return cache.entries +
           ((size_t)item.seq * (size_t)cache.n_pairs + pair) * (size_t)cache.row_entries;
}

/* Bits first ... last, as far as there are such. */
__device__ __forceinline__ uint64_t bits_between(int32_t first, int32_t last)
{
    first = max(first, 0);
    last = min(last, 63);
    return first > last ? 0 : ~UINT64_C(0) >> (63 - (last - first)) << first;
}

/* Live rows of a page with ordinals first ... last; where it has ordinals of its own, all. */
__device__ __forceinline__ uint64_t seen_of(const kvc_device_entry &e, bool has_ordinals,
                                            int32_t first, int32_t last)
{
    return has_ordinals ? e.live : e.live & bits_between(first - e.first, last - e.first);
}

/*
 * Goes through blocks of entries, and their pages of one family that some query row sees. Each warp
 * has its own, whose lanes hold an entry each; they do the same.
 */
struct page_cursor {
    struct {
        uint64_t offset, live, seen;
        int32_t first, entry;
        uint8_t layout; /* of the family */
    } page, mine;
    int32_t block = -1, entry = 0, end = 0; /* entries that are yet to be looked at */
    uint32_t left = 0;                      /* lanes whose pages are yet to be taken */
    bool found = false;

    /* Begins a block; false if there is none. */
    __device__ bool enter(int32_t number, int32_t block_entries, int32_t n_slots)
    {
        block = number;
        found = false;
        entry = min(number * block_entries, n_slots);
        end = min(entry + block_entries, n_slots);
        return entry < n_slots;
    }

    /* The next page of the block; false if it has no more. */
    __device__ bool take(const kvc_device_call &call, const kvc_device_family &family,
                         const kvc_device_item &item, int32_t head, int32_t first, int32_t last)
    {
        const int32_t lane = (int32_t)(threadIdx.x % 32);
        while (left == 0) {
            if (entry >= end)
                return false;
            bool is = false;
            if (entry + lane < end) {
                const kvc_device_entry e = entries_of(call, item, head)[entry + lane];
                for (uint32_t i = 0; i < family.n && e.n_rows > 0; i++)
                    if (family.index[i] == e.layout) {
                        mine.offset = e.page;
                        mine.live = e.live;
                        mine.first = e.first;
                        mine.entry = entry + lane;
                        mine.layout = (uint8_t)i;
                        mine.seen = seen_of(e, family.layout[i].ordinals != 0, first, last);
                        is = mine.seen != 0;
                    }
            }
            left = __ballot_sync(0xffffffffu, is);
            entry += 32;
        }
        const int from = __ffs((int)left) - 1;
        left &= left - 1;
        page.offset = __shfl_sync(0xffffffffu, mine.offset, from);
        page.live = __shfl_sync(0xffffffffu, mine.live, from);
        page.seen = __shfl_sync(0xffffffffu, mine.seen, from);
        page.first = __shfl_sync(0xffffffffu, mine.first, from);
        page.entry = __shfl_sync(0xffffffffu, mine.entry, from);
        page.layout = (uint8_t)__shfl_sync(0xffffffffu, (int)mine.layout, from);
        found = true;
        return true;
    }
};

} // namespace

#endif
