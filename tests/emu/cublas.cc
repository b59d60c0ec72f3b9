// cublas.cc - the products of cuBLAS, summed in double and rounded once; matrices lie by columns.
#include "cublas_v2.h"

#include "cuda_fp16.h"
#include "machine.h"

struct cublasContext {
    cudaStream_t stream;
    bool has_workspace;
};

namespace emu
{
namespace
{

constexpr uintptr_t workspace_align = 256;

size_t n_live_handles;

struct operand {
    const char *name;
    void *data;
    cudaDataType type;
    int rows, columns, ld; // as stored
    long long stride;      // between the matrices of the batch
};

struct product {
    operand a, b, c;
    bool transposed_a, transposed_b;
    int k, n_batch;
    float alpha, beta;
};

long long size_of(cudaDataType type)
{
    return type == CUDA_R_16F ? 2 : 4;
}

double read(const operand &x, long long i)
{
    if (x.type == CUDA_R_16F)
        return double(half_to_float(static_cast<const uint16_t *>(x.data)[i]));
    return double(static_cast<const float *>(x.data)[i]);
}

void write(const operand &x, long long i, double value)
{
    if (x.type == CUDA_R_16F)
        static_cast<uint16_t *>(x.data)[i] = float_to_half(float(value));
    else
        static_cast<float *>(x.data)[i] = float(value);
}

void check_operand(const operand &x, int n_batch)
{
    const long long n_elements = (n_batch - 1) * x.stride + (x.columns - 1LL) * x.ld + x.rows;

    if (x.rows > 0 && x.columns > 0 && !is_allocated(x.data, size_t(n_elements * size_of(x.type))))
        fail(nowhere, "cuBLAS: matrix %s leaves its device allocation", x.name);
}

// Row r of the operand in the order of k: lines are the rows of op(A), the columns of op(B).
std::vector<double> lines(const operand &x, int batch, bool along_columns)
{
    const int n_lines = along_columns ? x.columns : x.rows;
    const int length = along_columns ? x.rows : x.columns;
    std::vector<double> out;

    out.reserve(size_t(n_lines) * size_t(length));
    for (int i = 0; i < n_lines; i++)
        for (int j = 0; j < length; j++)
            out.push_back(read(x, batch * x.stride + (along_columns ? i : j) * (long long)x.ld +
                                      (along_columns ? j : i)));
    return out;
}

void run(const product &p)
{
    check_operand(p.a, p.n_batch);
    check_operand(p.b, p.n_batch);
    check_operand(p.c, p.n_batch);
    open_device();
    for (int batch = 0; batch < p.n_batch; batch++) {
        const std::vector<double> a = lines(p.a, batch, p.transposed_a);
        const std::vector<double> b = lines(p.b, batch, !p.transposed_b);
        for (int column = 0; column < p.c.columns; column++)
            for (int row = 0; row < p.c.rows; row++) {
                const double *x = a.data() + size_t(row) * size_t(p.k);
                const double *y = b.data() + size_t(column) * size_t(p.k);
                const long long at = batch * p.c.stride + column * (long long)p.c.ld + row;
                double sum = 0;
                for (int i = 0; i < p.k; i++)
                    sum += x[i] * y[i];
                sum *= double(p.alpha);
                if (p.beta != 0) // C is not read otherwise
                    sum += double(p.beta) * read(p.c, at);
                write(p.c, at, sum);
            }
    }
}

bool is_supported(cudaDataType a, cudaDataType b, cudaDataType c, cublasComputeType_t compute)
{
    return a == b && (a == c || (a == CUDA_R_16F && c == CUDA_R_32F)) &&
           (compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC);
}

bool is_valid(const operand &x)
{
    return x.rows >= 0 && x.columns >= 0 && x.ld >= std::max(1, x.rows);
}

cublasStatus_t multiply(cublasHandle_t handle, const product &p)
{
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (device_error() || fails_now(EMU_FAIL_CUBLAS))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!is_valid(p.a) || !is_valid(p.b) || !is_valid(p.c) || p.k < 0 || p.n_batch < 0)
        return CUBLAS_STATUS_INVALID_VALUE;
    stats.gemms++;
    stats.gemms_without_workspace += !handle->has_workspace;
    return push(handle->stream, [p] { run(p); }) ? CUBLAS_STATUS_EXECUTION_FAILED
                                                 : CUBLAS_STATUS_SUCCESS;
}

} // namespace

size_t n_handles()
{
    return n_live_handles;
}

} // namespace emu

using namespace emu;

cublasStatus_t cublasCreate(cublasHandle_t *handle)
{
    const runtime_lock lock;
    *handle = nullptr;
    if (device_error())
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (fails_now(EMU_FAIL_CUBLAS))
        return CUBLAS_STATUS_ALLOC_FAILED;
    *handle = new cublasContext{nullptr, false};
    n_live_handles++;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle)
{
    const runtime_lock lock;
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    delete handle;
    n_live_handles--;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream)
{
    const runtime_lock lock;
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (fails_now(EMU_FAIL_CUBLAS))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    *handle = {stream, false};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t size)
{
    const runtime_lock lock;
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (fails_now(EMU_FAIL_CUBLAS))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (reinterpret_cast<uintptr_t>(workspace) % workspace_align)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (size > 0 && !is_allocated(workspace, size))
        fail(nowhere, "cublasSetWorkspace: %zu bytes at %p are not within a device allocation",
             size, workspace);
    handle->has_workspace = size > 0;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t)
{
    const runtime_lock lock;
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    return fails_now(EMU_FAIL_CUBLAS) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a,
                                          cublasOperation_t op_b, int m, int n, int k,
                                          const void *alpha, const void *a, cudaDataType a_type,
                                          int lda, long long a_stride, const void *b,
                                          cudaDataType b_type, int ldb, long long b_stride,
                                          const void *beta, void *c, cudaDataType c_type, int ldc,
                                          long long c_stride, int n_batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t)
{
    const runtime_lock lock;
    const bool ta = op_a != CUBLAS_OP_N, tb = op_b != CUBLAS_OP_N;
    if (!alpha || !beta)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!is_supported(a_type, b_type, c_type, compute))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const product p = {{"A", const_cast<void *>(a), a_type, ta ? k : m, ta ? m : k, lda, a_stride},
                       {"B", const_cast<void *>(b), b_type, tb ? n : k, tb ? k : n, ldb, b_stride},
                       {"C", c, c_type, m, n, ldc, c_stride},
                       ta,
                       tb,
                       k,
                       n_batch,
                       *static_cast<const float *>(alpha),
                       *static_cast<const float *>(beta)};
    return multiply(handle, p);
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t op_a,
                                         cublasOperation_t op_b, int m, int n, int k,
                                         const float *alpha, const float *a, int lda,
                                         long long a_stride, const float *b, int ldb,
                                         long long b_stride, const float *beta, float *c, int ldc,
                                         long long c_stride, int n_batch)
{
    return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, CUDA_R_32F, lda,
                                      a_stride, b, CUDA_R_32F, ldb, b_stride, beta, c, CUDA_R_32F,
                                      ldc, c_stride, n_batch, CUBLAS_COMPUTE_32F,
                                      CUBLAS_GEMM_DEFAULT);
}
