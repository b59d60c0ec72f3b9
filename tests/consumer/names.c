/* names.c - known fault I1: helper names that other libraries define too must not clash. */
#define HELPER(name)                                                                               \
    int name(void);                                                                                \
    int name(void)                                                                                 \
    {                                                                                              \
        return 1;                                                                                  \
    }

HELPER(fp16_to_fp32)
HELPER(fp32_to_fp16)
HELPER(half_to_float)
HELPER(float_to_half)
HELPER(quantize)
HELPER(dequantize)
HELPER(quantize_rows)
HELPER(quantize_row_q4_0)
HELPER(quantize_row_q8_0)
HELPER(dequantize_row_q4_0)
HELPER(absmax)
HELPER(softmax)
HELPER(attend)
HELPER(cache_create)
HELPER(ctx_create)
HELPER(parallel_for)
HELPER(pool_create)
HELPER(cuda_check)
HELPER(kernels_available)
