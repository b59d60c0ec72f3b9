// selftest_programs.cc - kernels without mistakes: what they compute, with every seed.
#include "selftest.h"

#include <cublas_v2.h>

#include <algorithm>

namespace
{

typedef float row_64[64];
typedef int row_1024[1024];

// The block that comes last adds the sums of all.
__global__ void sum_blocks(const float *x, float *sums, unsigned *n_done, float *total)
{
    KVC_SHARED(row_64, part);
    KVC_SHARED(int, is_last);
    const unsigned t = threadIdx.x;

    part[t] = x[blockIdx.x * 64 + t];
    __syncthreads();
    for (unsigned n = 32; n > 0; n /= 2) {
        if (t < n)
            part[t] += part[t + n];
        __syncthreads();
    }
    if (t == 0) {
        sums[blockIdx.x] = part[0];
        __threadfence();
        is_last = atomicAdd(n_done, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last || t > 0)
        return;
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++)
        sum += sums[i];
    *total = sum;
}

void last_block_adds_up()
{
    std::vector<float> values(40 * 64);
    float sum = 0;
    for (size_t i = 0; i < values.size(); i++)
        sum += values[i] = float(i % 17);
    const device_array<float> x(values), sums(40), total(1);
    const device_array<unsigned> n_done(std::vector<unsigned>{0});
    CUDA(kvc_launch(sum_blocks, 40, 64, 0, nullptr, x.data, sums.data, n_done.data, total.data));
    CHECK(total.values()[0] == sum);
}

// Warp 0 fills a buffer, warp 1 empties it; each tells the other by a barrier of its own and does
// not wait there itself.
__global__ void hand_over(int *out, int n_rounds)
{
    enum { full = 1, empty = 2 };
    KVC_SHARED(row_64, buffer);
    const int lane = int(threadIdx.x) % 32;

    for (int i = 0; i < n_rounds; i++)
        if (threadIdx.x < 32) {
            if (i > 0)
                named_barrier_sync(empty, 64);
            buffer[lane] = float(100 * i + lane);
            named_barrier_arrive(full, 64);
        } else {
            named_barrier_sync(full, 64);
            out[(int(blockIdx.x) * n_rounds + i) * 32 + lane] = int(buffer[31 - lane]);
            if (i + 1 < n_rounds)
                named_barrier_arrive(empty, 64);
        }
}

void warps_hand_over()
{
    const device_array<int> out(3 * 9 * 32);
    CUDA(kvc_launch(hand_over, 3, 64, 0, nullptr, out.data, 9));
    const std::vector<int> values = out.values();
    for (int i = 0; i < 3 * 9 * 32; i++)
        CHECK(values[size_t(i)] == 100 * (i / 32 % 9) + 31 - i % 32);
}

// Warp 1 waits for a flag in a loop.
__global__ void wait_for_flag(unsigned *flag, int *out)
{
    if (threadIdx.x == 0) {
        out[0] = 5;
        __threadfence();
        atomicExch(flag, 1u);
    }
    if (threadIdx.x == 32) {
        while (atomicAdd(flag, 0) == 0)
            __nanosleep(100);
        __threadfence();
        out[1] = out[0] + 1;
    }
}

void flags_are_seen()
{
    const device_array<unsigned> flag(1);
    const device_array<int> out(2);
    for (int i = 0; i < 8; i++) { // whichever warp comes first
        CUDA(cudaMemset(flag.data, 0, 4));
        CUDA(kvc_launch(wait_for_flag, 1, 64, 0, nullptr, flag.data, out.data));
        CHECK(out.values()[1] == 6);
    }
}

__global__ void use_lanes(int *out)
{
    const int lane = int(threadIdx.x);
    const unsigned odd = 0xaaaaaaaa, mine = lane % 2 ? odd : ~odd;
    int *x = out + lane * 16;

    x[0] = __shfl_sync(~0u, lane, lane + 5);
    x[1] = __shfl_up_sync(~0u, lane, 3, 16);
    x[2] = __shfl_down_sync(~0u, lane, 3, 8);
    x[3] = __shfl_xor_sync(~0u, lane, 16);
    x[4] = __shfl_sync(mine, lane, lane ^ 6);
    x[5] = int(__shfl_xor_sync(~0u, 1.5 * lane, 1));
    x[6] = int(__ballot_sync(~0u, lane % 3 == 0));
    x[7] = __any_sync(~0u, lane == 9) + 2 * __all_sync(~0u, lane == 9);
    x[8] = __any_sync(mine, lane % 2) + 2 * __all_sync(mine, lane % 2);
    x[9] = __reduce_add_sync(~0u, lane - 20);
    x[10] = __reduce_min_sync(~0u, 5 - lane) * 100 + __reduce_max_sync(~0u, 5 - lane);
    x[11] = int(__reduce_max_sync(~0u, unsigned(5 - lane)));
    x[12] = int(__reduce_and_sync(~0u, unsigned(lane) | 64u) ^
                __reduce_or_sync(~0u, 1u << lane % 8) ^ __reduce_xor_sync(mine, 256u << lane % 8));
    x[13] = int(__match_any_sync(mine, lane / 8));
    x[14] = __shfl_sync(~0u, lane, 2, 4);
    x[15] = as_u32(__shfl_xor_sync(~0u, as_half2(uint32_t(lane) << 16 | 7), 1)) >> 16;
}

void lanes_work_together()
{
    const device_array<int> out(32 * 16);
    CUDA(kvc_launch(use_lanes, 1, 32, 0, nullptr, out.data));
    const std::vector<int> values = out.values();
    for (int lane = 0; lane < 32; lane++) {
        const int *x = &values[size_t(lane * 16)];
        CHECK(x[0] == (lane + 5) % 32 && x[1] == (lane % 16 < 3 ? lane : lane - 3));
        CHECK(x[2] == (lane % 8 < 5 ? lane + 3 : lane) && x[3] == (lane + 16) % 32);
        CHECK(x[4] == (lane ^ 6) && x[5] == int(1.5 * (lane ^ 1)) && x[6] == 0x49249249);
        CHECK(x[7] == 1 && x[8] == (lane % 2 ? 3 : 0) && x[9] == 31 * 16 - 640);
        CHECK(x[10] == -2600 + 5 && x[11] == -1);
        CHECK(x[12] == (64 ^ 255) && x[13] == int((lane % 2 ? 0xaau : 0x55u) << lane / 8 * 8));
        CHECK(x[14] == lane / 4 * 4 + 2 && x[15] == (lane ^ 1));
    }
}

__global__ void count_block(int *out)
{
    const int t = int(threadIdx.x);
    const int n = __syncthreads_count(t % 3 == 0);
    const int all = __syncthreads_and(t < 100), any = __syncthreads_or(t == 99);

    out[t] = n + 1000 * all + 10000 * any;
}

void blocks_count()
{
    const device_array<int> out(100); // the last warp has four lanes
    CUDA(kvc_launch(count_block, 1, 100, 0, nullptr, out.data));
    for (int x : out.values())
        CHECK(x == 34 + 11000);
}

__global__ void sum_partial_warp(int *out)
{
    int sum = int(threadIdx.x);

    for (int i = 8; i > 0; i /= 2)
        sum += __shfl_xor_sync(~0u, sum, i, 16);
    out[threadIdx.x] = sum;
}

void last_warps_may_be_partial()
{
    const device_array<int> out(48);
    CUDA(kvc_launch(sum_partial_warp, 1, 48, 0, nullptr, out.data));
    const std::vector<int> values = out.values();
    CHECK(values[0] == 120 && values[31] == 376 && values[47] == 632);
}

__global__ void reverse_block(const int *in, int *out)
{
    KVC_SHARED(row_1024, row);
    const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);

    row[t] = in[b * 1024 + t];
    __syncthreads();
    out[b * 1024 + t] = row[1023 - t];
}

void grids_have_three_dimensions()
{
    std::vector<int> values(12 * 1024);
    for (size_t i = 0; i < values.size(); i++)
        values[i] = int(i);
    const device_array<int> in(values), out(values.size());
    CUDA(kvc_launch(reverse_block, dim3(2, 3, 2), dim3(16, 8, 8), 0, nullptr, in.data, out.data));
    const std::vector<int> result = out.values();
    for (int i = 0; i < 12 * 1024; i++)
        CHECK(result[size_t(i)] == i / 1024 * 1024 + 1023 - i % 1024);
}

struct counters {
    int sum, low, high;
    unsigned bits_and, bits_or, bits_xor, wrapped, down, swapped;
    unsigned long long wide;
    float real;
    unsigned lock;
    int guarded;
};

__global__ void count_all(counters *c)
{
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);

    atomicAdd(&c->sum, i);
    atomicSub(&c->sum, 1);
    atomicMin(&c->low, -i);
    atomicMax(&c->high, i);
    atomicAnd(&c->bits_and, ~(1u << i % 8));
    atomicOr(&c->bits_or, 1u << i % 8);
    atomicXor(&c->bits_xor, unsigned(i));
    atomicInc(&c->wrapped, 9);
    atomicDec(&c->down, 9);
    atomicExch(&c->swapped, unsigned(i));
    atomicAdd(&c->wide, 1ull << 33);
    atomicAdd(&c->real, 0.5f);
    if (threadIdx.x % 32 == 0) {
        while (atomicCAS(&c->lock, 0u, 1u) != 0)
            __nanosleep(10);
        __threadfence();
        c->guarded++;
        __threadfence();
        atomicExch(&c->lock, 0u);
    }
}

void atomics_lose_nothing()
{
    const int n = 4 * 96;
    const device_array<counters> c(
        std::vector<counters>{{0, 0, 0, ~0u, 0, 0, 0, 0, 999, 0, 0, 0, 0}});
    CUDA(kvc_launch(count_all, 4, 96, 0, nullptr, c.data));
    const counters r = c.values()[0];
    CHECK(r.sum == n * (n - 1) / 2 - n && r.low == -(n - 1) && r.high == n - 1);
    CHECK(r.bits_and == ~255u && r.bits_or == 255 && r.bits_xor == 0);
    CHECK(r.wrapped == n % 10 && r.down == (10 - n % 10) % 10 && r.swapped < unsigned(n));
    CHECK(r.wide == 384ull << 33 && r.real == 192 && r.guarded == 12 && r.lock == 0);
}

// Sums rows of 32 floats that come through a ring of stages.
template <int STAGES>
__global__ void sum_ring(const float *rows, int n_rows, int n_valid, float *out)
{
    KVC_DYN_SHARED(float, ring);
    const int t = int(threadIdx.x);
    const auto load = [&](int r) {
        const uint32_t dst = smem_u32(ring + r % STAGES * 32 + 4 * t);
        if (t < 8 && r < n_rows)
            cp_async_16_zfill(dst, rows + 32 * r + 4 * t, r < n_valid ? 16 : 4);
        cp_async_commit();
    };
    float sum = 0;

    for (int r = 0; r < STAGES - 1; r++)
        load(r);
    for (int r = 0; r < n_rows; r++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load(r + STAGES - 1);
        sum += ring[r % STAGES * 32 + 31 - t];
    }
    cp_async_wait_all();
    out[t] = sum;
}

void rings_of_copies_turn()
{
    const int n = 11;
    std::vector<float> rows(32 * n);
    for (size_t i = 0; i < rows.size(); i++)
        rows[i] = float(i % 71);
    const device_array<float> in(rows), out(32);
    CUDA(kvc_launch(sum_ring<3>, 1, 32, 3 * 128, nullptr, in.data, n, n - 1, out.data));
    const std::vector<float> result = out.values();
    for (int t = 0; t < 32; t++) {
        float sum = 0;
        for (int r = 0; r < n; r++)
            if (r < n - 1 || (31 - t) % 4 == 0)
                sum += rows[size_t(32 * r + 31 - t)];
        CHECK(result[size_t(t)] == sum);
    }
}

struct words {
    uint32_t x[12];
};

__global__ void compute_words(const uint4 *in, words *out)
{
    KVC_SHARED(row_64, row);
    const uint4 v = ldg_nc_16(in);

    cp_async_4(smem_u32(row), in);
    cp_async_commit();
    cp_async_wait<0>();
    *out = {{v.x, v.w, as_u32(row[0]), lop3<0xea>(v.x, 0x00f000f0, 0x64006400),
             prmt(0x33221100, 0x776655c4, 0xc246), as_u32(ex2_approx(-3.0f)),
             as_u32(ex2_approx(-140.0f)), uint32_t(__dp4a(int(v.y), 0x01ff02fe, -5)),
             __dp4a(0x010203ffu, 0xff000002u, 1u), __funnelshift_r(v.x, v.y, 8),
             __brev(0x80000001u) + uint32_t(__clz(1) + __popc(255)),
             __umulhi(0x80000000u, 6) + uint32_t(__mulhi(-8, 1 << 30))}};
}

void words_are_computed()
{
    const device_array<uint4> in(std::vector<uint4>{{0x12345678, 0x7f80ff01, 0, 4}});
    const device_array<words> out(1);
    CUDA(kvc_launch(compute_words, 1, 1, 0, nullptr, in.data, out.data));
    const words r = out.values()[0];
    CHECK(r.x[0] == 0x12345678 && r.x[1] == 4 && r.x[2] == 0x12345678);
    CHECK(r.x[3] == 0x64306470 && r.x[4] == 0xff22c466);
    CHECK(r.x[5] == as_u32(0.125f) && r.x[6] == 0);
    CHECK(int(r.x[7]) == 127 * 1 + -128 * -1 + -1 * 2 + 1 * -2 - 5);
    CHECK(r.x[8] == 255 + 255 * 2 + 1 && r.x[9] == 0x01123456);
    CHECK(r.x[10] == 0x80000001u + 31 + 8 && r.x[11] == 3u - 2);
}

void events_order_streams()
{
    std::vector<float> values(40 * 64);
    const device_array<float> x(values.size()), sums(40), total(1);
    const device_array<unsigned> n_done(1);
    cudaStream_t first, second;
    cudaEvent_t ready;
    float sum = 0;

    CUDA(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    for (int i = 1; i < 8; i++) {
        std::fill(values.begin(), values.end(), 0.5f * float(i));
        CUDA(cudaMemcpyAsync(x.data, values.data(), values.size() * 4, cudaMemcpyHostToDevice,
                             first));
        CUDA(cudaMemsetAsync(n_done.data, 0, 4, first));
        CUDA(cudaEventRecord(ready, first));
        CUDA(cudaStreamWaitEvent(second, ready));
        CUDA(kvc_launch(sum_blocks, 40, 64, 0, second, x.data, sums.data, n_done.data, total.data));
        CUDA(cudaMemcpyAsync(&sum, total.data, 4, cudaMemcpyDeviceToHost, second));
        CUDA(cudaEventRecord(ready, second));
        while (cudaEventQuery(ready) == cudaErrorNotReady)
            CHECK(cudaGetLastError() == cudaErrorNotReady);
        CHECK(sum == 1280 * float(i));
    }
    CUDA(cudaEventDestroy(ready));
    CUDA(cudaStreamDestroy(first));
    CUDA(cudaStreamDestroy(second));
}

void legacy_stream_takes_turns()
{
    const device_array<int> x(64);
    cudaStream_t stream;
    int values[64];

    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaMemsetAsync(x.data, 1, 256, stream));
    CUDA(cudaMemsetAsync(x.data, 2, 128, nullptr));
    CUDA(cudaMemsetAsync(x.data, 3, 64, stream));
    CUDA(cudaMemcpy(values, x.data, 128, cudaMemcpyDeviceToHost)); // waits for both
    CHECK(values[0] == 0x03030303 && values[31] == 0x02020202);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(values, x.data, 256, cudaMemcpyDeviceToHost));
    CHECK(values[63] == 0x01010101);
    CUDA(cudaStreamDestroy(stream));
}

__global__ void add_one(int *x, int n)
{
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n)
        x[i]++;
}

void graphs_replay()
{
    const int n = 100;
    const std::vector<int> start(n, 7);
    const device_array<int> x(n), y(n);
    cudaStream_t stream, other;
    cudaEvent_t event;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    enum cudaStreamCaptureStatus status;
    std::vector<int> out(n);

    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CUDA(cudaEventCreate(&event));
    CUDA(cudaMemsetAsync(y.data, 0, n * 4, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CUDA(cudaStreamIsCapturing(stream, &status));
    CHECK(status == cudaStreamCaptureStatusActive);
    CUDA(cudaMemcpyAsync(x.data, start.data(), n * 4, cudaMemcpyHostToDevice, stream));
    CUDA(kvc_launch(add_one, 4, 32, 0, stream, x.data, n));
    CUDA(cudaEventRecord(event, stream));
    CUDA(cudaStreamWaitEvent(stream, event));
    CUDA(cudaMemsetAsync(x.data, 0, 40, stream));
    CUDA(cudaMemcpy2DAsync(y.data, 8, x.data, 4, 4, n / 2, cudaMemcpyDeviceToDevice, stream));
    CUDA(cudaMemcpyAsync(out.data(), y.data, n * 4, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamSynchronize(stream)); // nothing ran so far
    for (int i = 0; i < 3; i++) {
        std::fill(out.begin(), out.end(), -1);
        CUDA(cudaGraphLaunch(exec, other));
        CUDA(cudaStreamSynchronize(other));
        for (int j = 0; j < n; j++)
            CHECK(out[size_t(j)] == (j % 2 || j < 20 ? 0 : 8));
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaEventDestroy(event));
    CUDA(cudaStreamDestroy(stream));
    CUDA(cudaStreamDestroy(other));
}

// C = 1/2 op(A) op(B) + 2 C with room between columns and matrices, in and out of the given types.
template <class IN, class OUT>
void multiply(cublasHandle_t blas, bool ta, bool tb, cudaDataType in_type, cudaDataType out_type)
{
    const int m = 5, n = 7, k = 9, n_batch = 3;
    const int lda = (ta ? k : m) + 1, ldb = (tb ? n : k) + 2, ldc = m + 3;
    const int a_stride = lda * (ta ? m : k) + 3, b_stride = ldb * (tb ? k : n), c_stride = ldc * n;
    const float alpha = 0.5f, beta = 2;
    std::vector<IN> a(size_t(a_stride * n_batch)), b(size_t(b_stride * n_batch));
    std::vector<OUT> c(size_t(c_stride * n_batch));
    generator random{9};

    for (IN &x : a)
        x = IN(float(random.between(-8, 8)));
    for (IN &x : b)
        x = IN(float(random.between(-8, 8)));
    for (OUT &x : c)
        x = OUT(float(random.between(-8, 8)));
    const device_array<IN> da(a), db(b);
    const device_array<OUT> dc(c);
    CHECK(cublasGemmStridedBatchedEx(blas, ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                                     tb ? CUBLAS_OP_T : CUBLAS_OP_N, m, n, k, &alpha, da.data,
                                     in_type, lda, a_stride, db.data, in_type, ldb, b_stride, &beta,
                                     dc.data, out_type, ldc, c_stride, n_batch, CUBLAS_COMPUTE_32F,
                                     CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
    CUDA(cudaDeviceSynchronize());
    const std::vector<OUT> result = dc.values();
    for (int batch = 0; batch < n_batch; batch++)
        for (int col = 0; col < n; col++)
            for (int row = 0; row < ldc; row++) {
                const size_t at = size_t(batch * c_stride + col * ldc + row);
                float sum = 0;
                for (int i = 0; i < k && row < m; i++)
                    sum +=
                        float(a[size_t(batch * a_stride + (ta ? row * lda + i : i * lda + row))]) *
                        float(b[size_t(batch * b_stride + (tb ? i * ldb + col : col * ldb + i))]);
                CHECK(float(result[at]) ==
                      (row < m ? 0.5f * sum + 2 * float(c[at]) : float(c[at])));
            }
}

void products_transpose()
{
    const device_array<uint8_t> workspace(4096);
    cublasHandle_t blas;
    cudaStream_t stream;
    struct emu_stats stats;

    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cublasCreate(&blas) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSetStream(blas, stream) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSetWorkspace(blas, workspace.data, 4096) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSetMathMode(blas, CUBLAS_PEDANTIC_MATH) == CUBLAS_STATUS_SUCCESS);
    for (int i = 0; i < 4; i++) {
        multiply<float, float>(blas, i & 1, i & 2, CUDA_R_32F, CUDA_R_32F);
        multiply<__half, float>(blas, i & 1, i & 2, CUDA_R_16F, CUDA_R_32F);
        multiply<__half, __half>(blas, i & 1, i & 2, CUDA_R_16F, CUDA_R_16F);
    }
    emu_get_stats(&stats);
    CHECK(stats.gemms == 12 && stats.gemms_without_workspace == 0);
    CHECK(cublasDestroy(blas) == CUBLAS_STATUS_SUCCESS);
    CUDA(cudaStreamDestroy(stream));
}

void products_can_be_captured()
{
    const float one = 1, zero = 0;
    const device_array<float> a(std::vector<float>{1, 2, 3, 4}), c(4);
    cublasHandle_t blas;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cublasCreate(&blas) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSetStream(blas, stream) == CUBLAS_STATUS_SUCCESS);
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cublasSgemmStridedBatched(blas, CUBLAS_OP_N, CUBLAS_OP_T, 2, 2, 2, &one, a.data, 2, 0,
                                    a.data, 2, 0, &zero, c.data, 2, 0, 1) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSgemmStridedBatched(blas, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, a.data, 1, 0,
                                    a.data, 2, 0, &zero, c.data, 2, 0,
                                    1) == CUBLAS_STATUS_INVALID_VALUE);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    const std::vector<float> result = c.values(); // A A^T by columns
    CHECK(result[0] == 10 && result[1] == 14 && result[2] == 14 && result[3] == 20);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CHECK(cublasDestroy(blas) == CUBLAS_STATUS_SUCCESS);
    CUDA(cudaStreamDestroy(stream));
}

} // namespace

const test_group program_cases = {
    {"last_block_adds_up", last_block_adds_up, nullptr, every_build},
    {"warps_hand_over", warps_hand_over, nullptr, every_build},
    {"flags_are_seen", flags_are_seen, nullptr, every_build},
    {"lanes_work_together", lanes_work_together, nullptr, every_build},
    {"blocks_count", blocks_count, nullptr, every_build},
    {"last_warps_may_be_partial", last_warps_may_be_partial, nullptr, every_build},
    {"grids_have_three_dimensions", grids_have_three_dimensions, nullptr, every_build},
    {"atomics_lose_nothing", atomics_lose_nothing, nullptr, every_build},
    {"rings_of_copies_turn", rings_of_copies_turn, nullptr, every_build},
    {"words_are_computed", words_are_computed, nullptr, every_build},
    {"events_order_streams", events_order_streams, nullptr, every_build},
    {"legacy_stream_takes_turns", legacy_stream_takes_turns, nullptr, every_build},
    {"graphs_replay", graphs_replay, nullptr, every_build},
    {"products_transpose", products_transpose, nullptr, every_build},
    {"products_can_be_captured", products_can_be_captured, nullptr, every_build},
};
