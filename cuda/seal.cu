/* seal.cu - pages of halves become pages of codes, byte for byte what the CPU makes of them. */
#include "page.cuh"

namespace
{

enum { THREADS = 256, LANES = 32, WARPS = THREADS / LANES };

/* One side of a page while it is sealed. The tile of its halves has rows of d8 + 2, so that eight
 * tokens of a channel lie in different banks. */
struct side {
    uint16_t *tile;
    float *factor, *offset; /* TOKEN: [groups][64]; CHANNEL: [d8] both; HEAD: one */
    uint32_t d, d8, n_rows, stride;
    uint8_t format, scale;
    bool by_channel;
    int bias;
    uint8_t *codes, *params;
};

__device__ __forceinline__ uint32_t tile_stride(uint32_t d8)
{
    return d8 + 2;
}

__device__ __forceinline__ void load_tile(const side &s, const uint8_t *from)
{
    const uint32_t words = s.d8 / 2, n = s.n_rows * words;
    const uint32_t *source = reinterpret_cast<const uint32_t *>(from);
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        *reinterpret_cast<uint32_t *>(s.tile + (size_t)(i / words) * tile_stride(s.d8) +
                                      i % words * 2) = source[i];
}

__device__ __forceinline__ float tile_value(const side &s, uint32_t token, uint32_t channel)
{
    return half_value(s.tile[(size_t)token * tile_stride(s.d8) + channel]);
}

/* A warp a token and group: the scale, and the factor that follows from it. */
__device__ __forceinline__ void scale_tokens(const side &s)
{
    const uint32_t n_groups = kvc_scale_groups(s.format, s.scale, s.d8), lane = threadIdx.x % LANES;
    for (uint32_t i = threadIdx.x / LANES; i < n_groups * KVC_PAGE_ROWS; i += WARPS) {
        const uint32_t t = i % KVC_PAGE_ROWS, begin = i / KVC_PAGE_ROWS * KVC_GROUP_CHANNELS;
        const uint32_t end = i / KVC_PAGE_ROWS + 1 < n_groups ? begin + KVC_GROUP_CHANNELS : s.d;
        uint16_t scale = 0;
        kvc_coder coder = {};
        if (t < s.n_rows) {
            float max = -INFINITY, less = -INFINITY;
            for (uint32_t c = begin + lane; c < end; c += LANES) {
                max = fmaxf(max, tile_value(s, t, c));
                less = fmaxf(less, -tile_value(s, t, c));
            }
            max = warp_max(max);
            less = warp_max(less);
            coder = kvc_token_coder(-less, max, (int)kvc_code_bits(s.format), &scale);
        }
        if (lane == 0) {
            s.factor[i] = coder.factor;
            reinterpret_cast<uint16_t *>(s.params)[i] = scale;
        }
    }
}

/* A thread a channel. */
__device__ __forceinline__ void scale_channels(const side &s)
{
    uint16_t *scales = reinterpret_cast<uint16_t *>(s.params), *minima = scales + s.d8;
    for (uint32_t c = threadIdx.x; c < s.d8; c += THREADS) {
        uint16_t scale = 0, minimum = 0;
        kvc_coder coder = {};
        if (c < s.d && s.n_rows > 0) {
            float min = tile_value(s, 0, c), max = min;
            for (uint32_t t = 1; t < s.n_rows; t++) {
                min = fminf(min, tile_value(s, t, c));
                max = fmaxf(max, tile_value(s, t, c));
            }
            coder = kvc_channel_coder(min, max, (int)kvc_code_bits(s.format), &scale, &minimum);
        }
        s.factor[c] = coder.factor;
        s.offset[c] = coder.offset;
        scales[c] = scale;
        minima[c] = minimum;
    }
}

__device__ __forceinline__ void scale_head(const side &s, float absmax)
{
    const int bits = (int)kvc_code_bits(s.format);
    if (threadIdx.x != 0)
        return;
    s.factor[0] = kvc_fixed_factor(absmax, bits);
    *reinterpret_cast<float *>(s.params) = kvc_fixed_scale(absmax, bits);
}

/* What is stored for an element that is there. */
template <uint8_t FORMAT, uint8_t SCALE>
__device__ __forceinline__ uint32_t stored(const side &s, uint32_t token, uint32_t channel,
                                           uint32_t n_groups)
{
    constexpr int bits = FORMAT == KVC_INT8 ? 8 : FORMAT == KVC_INT6 ? 6 : 4;
    if (FORMAT == KVC_F16)
        return s.tile[(size_t)token * tile_stride(s.d8) + channel];
    kvc_coder coder = {};
    if (SCALE == KVC_SCALE_TOKEN) {
        coder.factor = s.factor[kvc_group_of(channel, n_groups) * KVC_PAGE_ROWS + token];
        coder.lo = kvc_token_code_min(bits);
        coder.hi = kvc_code_max(bits);
    } else if (SCALE == KVC_SCALE_CHANNEL) {
        coder.factor = s.factor[channel];
        coder.offset = s.offset[channel];
        coder.hi = bits == 8 ? 255 : 15;
    } else {
        coder.factor = s.factor[0];
        coder.hi = kvc_code_max(bits);
        coder.lo = -coder.hi;
    }
    return (uint32_t)(kvc_code(&coder, tile_value(s, token, channel)) + s.bias);
}

/* What is not there is the code of 0, or the half. */
template <uint8_t FORMAT, uint8_t SCALE> __device__ void write_lines(const side &s)
{
    const uint32_t octets = (s.by_channel ? KVC_PAGE_ROWS : s.d8) / 8;
    const uint32_t n = (s.by_channel ? s.d8 : KVC_PAGE_ROWS) * octets;
    const uint32_t n_groups = kvc_scale_groups(FORMAT, SCALE, s.d8);
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        const uint32_t line = i / octets, o = i % octets;
        uint32_t u[8];
#pragma unroll
        for (uint32_t e = 0; e < 8; e++) {
            const uint32_t token = s.by_channel ? 8 * o + e : line;
            const uint32_t channel = s.by_channel ? line : 8 * o + e;
            u[e] = token < s.n_rows && channel < s.d
                       ? stored<FORMAT, SCALE>(s, token, channel, n_groups)
                       : (uint32_t)s.bias;
        }
        put_octet(FORMAT, s.codes + (size_t)line * s.stride, o, s.d8, u);
    }
}

template <uint8_t FORMAT> __device__ __forceinline__ void write_format(const side &s)
{
    if (s.scale == KVC_SCALE_TOKEN)
        write_lines<FORMAT, KVC_SCALE_TOKEN>(s);
    else if (s.scale == KVC_SCALE_CHANNEL)
        write_lines<FORMAT, KVC_SCALE_CHANNEL>(s);
    else
        write_lines<FORMAT, KVC_SCALE_HEAD>(s);
}

__device__ __forceinline__ void write_codes(const side &s)
{
    switch (s.format) {
    case KVC_F16: write_lines<KVC_F16, KVC_SCALE_TOKEN>(s); break;
    case KVC_INT8: write_format<KVC_INT8>(s); break;
    case KVC_INT6: write_lines<KVC_INT6, KVC_SCALE_TOKEN>(s); break;
    default: write_format<KVC_INT4>(s);
    }
}

__device__ __forceinline__ void seal_side(const side &s, const uint8_t *from, float absmax)
{
    load_tile(s, from);
    __syncthreads();
    if (s.format != KVC_F16) {
        if (s.scale == KVC_SCALE_TOKEN)
            scale_tokens(s);
        else if (s.scale == KVC_SCALE_CHANNEL)
            scale_channels(s);
        else
            scale_head(s, absmax);
    }
    __syncthreads();
    write_codes(s);
    __syncthreads();
}

/* Zeros behind the parameters. */
__device__ __forceinline__ void clear_rest(const kvc_page_layout &layout, uint8_t *page)
{
    const uint32_t end =
        layout.v_params + kvc_params_size(layout.v_format, layout.v_scale, layout.d8_v);
    for (uint32_t i = end + threadIdx.x; i < layout.n_bytes; i += THREADS)
        page[i] = 0;
}

/* A block a page; its dynamic shared memory is tile_bytes(). */
__global__ void __launch_bounds__(THREADS)
    seal_pages(uint8_t *memory, const kvc_page_layout *layouts, kvc_page_layout open,
               const kvc_device_seal *jobs)
{
    KVC_DYN_SHARED(uint8_t, shared);
    const kvc_device_seal job = jobs[blockIdx.x];
    const kvc_page_layout to = layouts[job.layout];
    uint8_t *page = memory + job.to;
    const uint32_t d8 = open.d8_k > open.d8_v ? open.d8_k : open.d8_v;
    const uint32_t n_factors =
        d8 > KVC_PAGE_ROWS * KVC_MAX_GROUPS ? d8 : KVC_PAGE_ROWS * KVC_MAX_GROUPS;
    side s = {};
    s.factor = reinterpret_cast<float *>(shared);
    s.offset = s.factor + n_factors;
    s.tile = reinterpret_cast<uint16_t *>(s.offset + d8);
    s.n_rows = job.n_rows;
    s.d = to.d_k;
    s.d8 = to.d8_k;
    s.stride = to.k_stride;
    s.format = to.k_format;
    s.scale = to.k_scale;
    s.bias = kvc_page_bias(to.k_format, to.k_scale, KVC_BIAS8_K);
    s.codes = page;
    s.params = page + to.k_params;
    seal_side(s, memory + job.from, job.absmax_k);
    s.d = to.d_v;
    s.d8 = to.d8_v;
    s.stride = to.v_stride;
    s.format = to.v_format;
    s.scale = to.v_scale;
    s.bias = kvc_page_bias(to.v_format, to.v_scale, KVC_BIAS8_V);
    s.by_channel = true;
    s.codes = page + to.v_codes;
    s.params = page + to.v_params;
    seal_side(s, memory + job.from + open.v_codes, job.absmax_v);
    clear_rest(to, page);
}

/* Largest magnitude of n_rows rows of halves, in all threads. */
__device__ __forceinline__ float rows_absmax(const uint8_t *rows, uint32_t d, uint32_t d8,
                                             uint32_t n_rows, float *room)
{
    float absmax = 0.0f;
    for (uint32_t i = threadIdx.x; i < n_rows * d8; i += THREADS)
        if (i % d8 < d)
            absmax = fmaxf(absmax, fabsf(half_value(reinterpret_cast<const uint16_t *>(rows)[i])));
    absmax = warp_max(absmax);
    __syncthreads();
    if (threadIdx.x % LANES == 0)
        room[threadIdx.x / LANES] = absmax;
    __syncthreads();
    for (uint32_t w = 0; w < WARPS; w++)
        absmax = fmaxf(absmax, room[w]);
    return absmax;
}

typedef float warp_floats[WARPS];

__global__ void __launch_bounds__(THREADS)
    measure_pages(const uint8_t *memory, kvc_page_layout open, kvc_device_seal *jobs)
{
    KVC_SHARED(warp_floats, room);
    kvc_device_seal &job = jobs[blockIdx.x];
    const uint8_t *page = memory + job.from;
    const float k = rows_absmax(page, open.d_k, open.d8_k, job.n_rows, room);
    const float v = rows_absmax(page + open.v_codes, open.d_v, open.d8_v, job.n_rows, room);
    if (threadIdx.x == 0) {
        job.absmax_k = k;
        job.absmax_v = v;
    }
}

size_t tile_bytes(const kvc_page_layout *open)
{
    const size_t d8 = open->d8_k > open->d8_v ? open->d8_k : open->d8_v;
    const size_t n_factors =
        d8 > (size_t)KVC_PAGE_ROWS * KVC_MAX_GROUPS ? d8 : (size_t)KVC_PAGE_ROWS * KVC_MAX_GROUPS;
    return (n_factors + d8) * sizeof(float) + KVC_PAGE_ROWS * (d8 + 2) * sizeof(uint16_t);
}

} // namespace

kvc_status kvc_cuda_seal(const struct kvc_queue *queue, const struct kvc_device_cache *cache,
                         const struct kvc_page_layout *open, const struct kvc_device_seal *jobs,
                         uint32_t n_jobs)
{
    const size_t bytes = tile_bytes(open);
    cudaError_t e =
        cudaFuncSetAttribute(seal_pages, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e == cudaSuccess)
        e = kvc_launch(seal_pages, dim3(n_jobs), THREADS, bytes, (cudaStream_t)queue->stream,
                       cache->memory, cache->layouts, *open, jobs);
    return status_of(e);
}

kvc_status kvc_cuda_absmax(const struct kvc_queue *queue, const struct kvc_device_cache *cache,
                           const struct kvc_page_layout *open, struct kvc_device_seal *jobs,
                           uint32_t n_jobs)
{
    const cudaError_t e = kvc_launch(measure_pages, dim3(n_jobs), THREADS, 0,
                                     (cudaStream_t)queue->stream, cache->memory, *open, jobs);
    return status_of(e);
}
