/* selftest_c.c - the headers as C11 sees them, and a program in it. */
#include <stdlib.h>
#include <string.h>

#include "cublas_v2.h"
#include "cuda_runtime_api.h"
#include "emu.h"

/* True if everything went as it should. */
int selftest_in_c(void);

int selftest_in_c(void)
{
    const float one = 1, values[2] = {3, 4};
    float out[2] = {0, 0};
    void *x = NULL, *y = NULL;
    cudaStream_t stream;
    cublasHandle_t blas;
    struct emu_stats stats;
    int ok;

    emu_set_seed(5);
    ok = cudaMalloc(&x, sizeof(values)) == cudaSuccess &&
         cudaMalloc(&y, sizeof(values)) == cudaSuccess &&
         cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
         cublasCreate(&blas) == CUBLAS_STATUS_SUCCESS &&
         cublasSetStream(blas, stream) == CUBLAS_STATUS_SUCCESS;
    if (!ok)
        return 0;
    ok =
        cudaMemcpyAsync(x, values, sizeof(values), cudaMemcpyHostToDevice, stream) == cudaSuccess &&
        cudaMemcpyAsync(y, values, sizeof(values), cudaMemcpyHostToDevice, stream) == cudaSuccess &&
        cublasSgemmStridedBatched(blas, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, x, 1, 1, x, 1, 1,
                                  &one, y, 1, 1, 2) == CUBLAS_STATUS_SUCCESS &&
        cudaMemcpyAsync(out, y, sizeof(out), cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
        cudaStreamSynchronize(stream) == cudaSuccess;
    emu_get_stats(&stats);
    ok = ok && out[0] == 12 && out[1] == 20 && stats.gemms == 1 &&
         stats.gemms_without_workspace == 1 && stats.copies_to_device == 2 &&
         stats.copies_to_host == 1 && stats.mallocs == 2 && stats.syncs == 1 &&
         strcmp(cudaGetErrorName(cudaErrorNoDevice), "cudaErrorNoDevice") == 0;
    cublasDestroy(blas);
    cudaStreamDestroy(stream);
    cudaFree(x);
    cudaFree(y);
    return ok;
}
