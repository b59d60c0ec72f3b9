/* score.h - launchers of the kernels that score the rows of a cache by kept query rows. */
#ifndef KVC_CUDA_SCORE_H
#define KVC_CUDA_SCORE_H

#include "table.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Query rows of one layer, all KV heads: [n_kv_heads][n_rows] with an ordinal each, as the CPU
 * takes them, in tiles of KVC_TILE_ROWS. In device memory.
 */
struct kvc_device_probes {
    struct kvc_device_cache cache;
    int32_t seq, layer;
    uint32_t n_rows, d_k;
    float scale, softcap;
    int64_t window;          /* 0: all */
    const float *q;          /* [n_kv_heads][n_rows][kvc_attend_stride(d_k)], as stored keys are */
    const float *shift;      /* [n_kv_heads][n_rows], or NULL */
    const int64_t *ordinals; /* [n_rows] */
};

/* m and l of each row over all that it sees, block by block as kvc_lse_block_fn has it, and
 * lse = m + ln l. lse is [n_kv_heads][n_rows]. */
kvc_status kvc_cuda_probe_lse(const struct kvc_queue *queue, const struct kvc_device_probes *probes,
                              float *lse);

/* mass [n_kv_heads][row_entries][64]: of each live row that a query row sees, the sum over tiles of
 * the sums over their rows of weight * exp(s - lse), as kvc_mass_block_fn; 0 elsewhere, up to the
 * entries that there are. */
kvc_status kvc_cuda_probe_mass(const struct kvc_queue *queue,
                               const struct kvc_device_probes *probes, const float *lse,
                               float weight, float *mass);

#ifdef __cplusplus
}
#endif
#endif
