/* move.cu - rows of codes move from page to page, bit for bit. */
#include "page.cuh"

namespace
{

enum { THREADS = 128 };

/* Each thread moves one column of all rows, in ascending order: so a page can be its own target. */
__device__ __forceinline__ void move_lines(const kvc_device_move &job, const uint8_t *from,
                                           uint8_t *to, uint32_t stride)
{
    for (uint32_t at = threadIdx.x; at < stride / 2; at += THREADS)
        for (uint32_t i = 0; i < job.n; i++)
            reinterpret_cast<uint16_t *>(to + (size_t)(job.dst_row + i) * stride)[at] =
                reinterpret_cast<const uint16_t *>(from + (size_t)job.rows[i] * stride)[at];
}

/* Halves of a line in which each row has one. */
__device__ __forceinline__ void move_halves(const kvc_device_move &job, const uint8_t *from,
                                            uint8_t *to)
{
    for (uint32_t i = 0; i < job.n; i++)
        reinterpret_cast<uint16_t *>(to)[job.dst_row + i] =
            reinterpret_cast<const uint16_t *>(from)[job.rows[i]];
}

__device__ __forceinline__ void move_element(uint8_t format, const uint8_t *from, uint32_t src,
                                             uint8_t *to, uint32_t dst)
{
    if (format == KVC_INT8) {
        to[dst] = from[src];
        return;
    }
    const uint32_t shift = kvc_nibble_shift(dst);
    uint8_t *byte = to + kvc_nibble_byte(dst);
    *byte = (uint8_t)((*byte & ~(15u << shift)) | (uint32_t)kvc_line_nibble(from, src) << shift);
}

__global__ void __launch_bounds__(THREADS)
    move_rows(uint8_t *memory, const kvc_page_layout *layouts, const kvc_device_move *jobs)
{
    const kvc_device_move &job = jobs[blockIdx.x];
    const kvc_page_layout layout = layouts[job.layout];
    const uint8_t *from = memory + job.from;
    uint8_t *to = memory + job.to;
    const uint32_t scales_k = (layout.v_params - layout.k_params) / (KVC_PAGE_ROWS * 2);
    const uint32_t scales =
        scales_k +
        kvc_params_size(layout.v_format, layout.v_scale, layout.d8_v) / (KVC_PAGE_ROWS * 2);
    move_lines(job, from, to, layout.k_stride);
    /* Scales of V follow those of K. */
    for (uint32_t g = threadIdx.x; g < scales; g += THREADS)
        move_halves(job, from + layout.k_params + (size_t)g * KVC_PAGE_ROWS * 2,
                    to + layout.k_params + (size_t)g * KVC_PAGE_ROWS * 2);
    from += layout.v_codes;
    to += layout.v_codes;
    if (layout.v_row_major) {
        move_lines(job, from, to, layout.v_stride);
        return;
    }
    for (uint32_t c = threadIdx.x; c < layout.d8_v; c += THREADS) {
        const size_t line = (size_t)c * layout.v_stride;
        if (layout.v_format == KVC_F16) {
            move_halves(job, from + line, to + line);
            continue;
        }
        for (uint32_t i = 0; i < job.n; i++)
            move_element(layout.v_format, from + line, job.rows[i], to + line, job.dst_row + i);
    }
}

__global__ void __launch_bounds__(THREADS)
    clear_pages(uint8_t *memory, const kvc_page_layout *layouts, const kvc_device_move *jobs)
{
    const kvc_page_layout layout = layouts[jobs[blockIdx.x].layout];
    uint32_t *page = reinterpret_cast<uint32_t *>(memory + jobs[blockIdx.x].to);
    const uint32_t k = (uint32_t)kvc_page_bias(layout.k_format, layout.k_scale, KVC_BIAS8_K);
    const uint32_t v = (uint32_t)kvc_page_bias(layout.v_format, layout.v_scale, KVC_BIAS8_V);
    const uint32_t k_byte = layout.k_format == KVC_INT4 ? k * 17 : k;
    const uint32_t v_byte = layout.v_format == KVC_INT4 ? v * 17 : v;
    for (uint32_t i = threadIdx.x; i < layout.n_bytes / 4; i += THREADS) {
        const uint32_t at = 4 * i;
        uint32_t byte = at < layout.v_codes ? k_byte : at < layout.k_params ? v_byte : 0;
        if (layout.k_format != KVC_INT6 || at >= layout.v_codes) {
            page[i] = byte * 0x01010101u;
            continue;
        }
        /* 32: nibbles 0, then pairs 2; planes begin at any multiple of 2. */
        uint32_t word = 0;
        for (uint32_t b = 0; b < 4; b++)
            word |= ((at + b) % layout.k_stride < layout.d8_k / 2u ? 0u : 0xaau) << (8 * b);
        page[i] = word;
    }
}

} // namespace

kvc_status kvc_cuda_move(const struct kvc_queue *queue, const struct kvc_device_cache *cache,
                         const struct kvc_device_move *jobs, uint32_t n_jobs)
{
    const cudaError_t e =
        kvc_launch(move_rows, dim3(n_jobs), THREADS, 0, (cudaStream_t)queue->stream, cache->memory,
                   cache->layouts, jobs);
    return status_of(e);
}

kvc_status kvc_cuda_clear(const struct kvc_queue *queue, const struct kvc_device_cache *cache,
                          const struct kvc_device_move *jobs, uint32_t n_jobs)
{
    const cudaError_t e =
        kvc_launch(clear_pages, dim3(n_jobs), THREADS, 0, (cudaStream_t)queue->stream,
                   cache->memory, cache->layouts, jobs);
    return status_of(e);
}
