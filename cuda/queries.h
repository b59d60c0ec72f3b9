/* queries.h - launchers of the kernels around attention: query rows in, outputs out. */
#ifndef KVC_CUDA_QUERIES_H
#define KVC_CUDA_QUERIES_H

#include "table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills rows [n_items][n_q][n_heads][kvc_attend_stride(d_k)], pads 0, with the queries of a call,
 * turned if keys are, and shift [n_items][n_q][n_heads], unless it is NULL, with what is added to
 * their logits. */
kvc_status kvc_cuda_load_queries(const struct kvc_queue *queue, const struct kvc_device_call *call,
                                 const struct kvc_device_transform *transform, float *rows,
                                 float *shift);

/* Outputs as floats [n_items][n_q][n_heads][kvc_attend_stride(d_v)] go where the items want them,
 * turned back. */
kvc_status kvc_cuda_store_outputs(const struct kvc_queue *queue, const struct kvc_device_call *call,
                                  const struct kvc_device_transform *transform, const float *rows);

/* The queries of the last tokens as halves: probes is [max_sequences][n_layers][n_rows][n_heads]
 * [d_k], and the row of an ordinal is ordinal % n_rows. */
kvc_status kvc_cuda_keep_probes(const struct kvc_queue *queue, const struct kvc_device_call *call,
                                uint16_t *probes, int32_t n_layers, int32_t n_rows);

#ifdef __cplusplus
}
#endif
#endif
