/* compress.c - compression between a prefill and decoding, and between decode steps. */
#include "check.h"
#include "state.h"

static size_t used_bytes(const kvc_cache *cache)
{
    kvc_stats stats = {.struct_size = sizeof(stats)};
    kvc_cache_stats(cache, &stats);
    return stats.used_bytes;
}

kvc_status kvc_cache_compress(kvc_cache *cache, kvc_seq seq, const kvc_policy *policy,
                              kvc_report *report, kvc_map *map)
{
    struct kvc_sequence *s = kvc_seq_find(cache, seq);
    KVC_CHECK(s && kvc_seq_complete(cache, s), KVC_E_ARG);
    KVC_CHECK(!report || report->struct_size >= sizeof(*report), KVC_E_ARG);
    KVC_CHECK(!policy && !map, KVC_E_UNSUPPORTED);

    const size_t before = used_bytes(cache);
    const uint64_t sealed = cache->n_sealed_total;
    const int64_t hold_from = s->hold_from;
    s->hold_from = -1;
    const kvc_status status = kvc_seal_slots(cache, s, kvc_seal_end(cache, s, true));
    if (status != KVC_OK) {
        s->hold_from = hold_from;
        return status;
    }
    const int64_t n_freed = kvc_compact(cache, s);
    if (report) {
        const kvc_report r = {
            .n_pages_sealed = (int64_t)(cache->n_sealed_total - sealed),
            .n_pages_compacted = n_freed,
            .bytes_before = before,
            .bytes_after = used_bytes(cache),
        };
        kvc_struct_write(report, &r, sizeof(r));
    }
    return KVC_OK;
}
