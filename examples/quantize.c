/* Quantize rows that the program owns, in each mode, and print size and error. */
#include <kvc/kvc.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 128, HEADS = 2, DIM = 64 };

/* Keys as models make them: noise, and a few channels that are much larger. */
static void fill(float *k)
{
    uint32_t state = 1;
    for (int i = 0; i < TOKENS * HEADS * DIM; i++) {
        state = state * 1664525u + 1013904223u;
        k[i] = (float)(int32_t)state * 0x1p-31f * (i % DIM == 7 ? 20.0f : 1.0f);
    }
}

/* Root of the mean square error of coding and decoding, or -1. */
static double error_of(kvc_ctx *ctx, const kvc_view *k, const kvc_quant_options *o, size_t *n_bytes)
{
    static float back[TOKENS * HEADS * DIM];
    const kvc_view dst = kvc_view_packed(back, KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    const float *x = k->data;
    size_t n_codes, n_params;
    double sum = 0.0;

    if (kvc_quant_size(TOKENS, HEADS, DIM, o, &n_codes, &n_params) != KVC_OK)
        return -1.0;
    void *codes = malloc(n_codes), *params = malloc(n_params);
    const bool ok = codes && params &&
                    kvc_quantize(ctx, k, o, codes, n_codes, params, n_params, NULL) == KVC_OK &&
                    kvc_dequantize(ctx, codes, n_codes, params, n_params, o, &dst) == KVC_OK;
    free(codes);
    free(params);
    *n_bytes = n_codes + n_params;
    for (int i = 0; i < TOKENS * HEADS * DIM; i++)
        sum += (double)(back[i] - x[i]) * (double)(back[i] - x[i]);
    return ok ? sqrt(sum / (TOKENS * HEADS * DIM)) : -1.0;
}

int main(void)
{
    static const char *const formats[] = {"f16", "int8", "int4"};
    static const char *const scales[] = {"head", "token", "channel", "layer"};
    static float data[TOKENS * HEADS * DIM];
    const kvc_view k = kvc_view_packed(data, KVC_DTYPE_F32, TOKENS, HEADS, DIM);
    kvc_quant_options o;
    kvc_ctx *ctx = NULL;
    int failed = kvc_ctx_create(NULL, &ctx) != KVC_OK;

    fill(data);
    kvc_quant_options_default(&o);
    printf("%-8s %-8s %8s %12s\n", "format", "scale", "bits", "rms error");
    for (int f = KVC_INT8; f <= KVC_INT4 && !failed; f++)
        for (int s = KVC_SCALE_HEAD; s <= KVC_SCALE_LAYER && !failed; s++) {
            size_t n_bytes = 0;
            o.format = (kvc_format)f;
            o.scale = (kvc_scale)s;
            const double error = error_of(ctx, &k, &o, &n_bytes);
            printf("%-8s %-8s %8.3f %12.6f\n", formats[f], scales[s],
                   8.0 * (double)n_bytes / (TOKENS * HEADS * DIM), error);
            failed = error < 0.0;
        }
    kvc_ctx_destroy(ctx);
    return failed;
}
