/* libFuzzer: any bytes as a safetensors file of one of three small models; what the reader accepts
 * is read to the last byte, folded, written and unfolded. */
#define _POSIX_C_SOURCE 200809L /* mkstemp() */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <kvc/kvc.h>

#include "folding.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { HEADS = 2, KV_HEADS = 1, DIM = 4 };

static const char *const types[] = {"llama", "qwen3", "gemma3_text"};
static char configs[3][64];
static kvc_ctx *ctx;
static kvc_observation *observation;

static void remove_configs(void)
{
    for (size_t i = 0; i < 3; i++)
        unlink(configs[i]);
    kvc_observation_destroy(observation);
    kvc_ctx_destroy(ctx);
}

static void write_config(size_t i)
{
    snprintf(configs[i], sizeof(configs[i]), "/tmp/fuzz-safetensors-XXXXXX");
    const int fd = mkstemp(configs[i]);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    if (!file)
        abort();
    fprintf(file,
            "{\"model_type\":\"%s\",\"num_hidden_layers\":1,\"hidden_size\":8,"
            "\"num_attention_heads\":%d,\"num_key_value_heads\":%d,\"head_dim\":%d}",
            types[i], HEADS, KV_HEADS, DIM);
    fclose(file);
}

static void start(void)
{
    static float row[HEADS * DIM] = {1, 2, 3, 4, 5, 6, 7, 8};
    const kvc_observed_shape shape = {.struct_size = sizeof(shape),
                                      .n_layers = 1,
                                      .n_heads = HEADS,
                                      .n_kv_heads = KV_HEADS,
                                      .head_dim = DIM};
    const kvc_view k = kvc_view_packed(row, KVC_DTYPE_F32, 1, KV_HEADS, DIM);

    for (size_t i = 0; i < 3; i++)
        write_config(i);
    if (kvc_ctx_create(NULL, &ctx) != KVC_OK ||
        kvc_observation_create(ctx, &shape, &observation) != KVC_OK ||
        kvc_observe_keys(observation, 0, &k) != KVC_OK)
        abort();
    atexit(remove_configs);
}

/* A copy, because a fold writes into it. */
static bool open_copy(const uint8_t *data, size_t size, size_t config, struct checkpoint *c)
{
    struct failure failure;

    *c = (struct checkpoint){.bytes = malloc(size ? size : 1), .size = size};
    if (!c->bytes)
        return false;
    memcpy(c->bytes, data, size);
    kvc_rope_default(&c->rope);
    if (checkpoint_read_safetensors("fuzz", configs[config], c, &failure))
        return true;
    checkpoint_close(c);
    return false;
}

static void fold(const uint8_t *data, size_t size, size_t config)
{
    const struct folding_settings settings = {.factor = 1.0f,
                                              .allow_rounding = true,
                                              .filter = {.struct_size = sizeof(kvc_smooth_filter)}};
    struct checkpoint c, again;
    struct folded_layer layer;
    struct failure failure;

    if (!open_copy(data, size, config, &c))
        return;
    const bool folded = c.record.is_there
                            ? folding_undo(ctx, true, &c, &layer, &failure)
                            : folding_run(ctx, &settings, observation, &c, &layer, &failure);
    if (folded && checkpoint_write_record(&c, &failure)) {
        if (!open_copy(c.bytes, c.size, config, &again))
            abort(); /* what it writes it must read */
        checkpoint_close(&again);
    }
    checkpoint_close(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct safetensors s;
    struct failure failure;
    volatile uint8_t last = 0;

    if (!ctx)
        start();
    if (!safetensors_parse(data, size, &s, &failure))
        return 0;
    for (size_t i = 0; i < s.n_tensors; i++)
        for (size_t b = 0; b < s.tensors[i].n_bytes; b++)
            last = (uint8_t)(last ^ s.tensors[i].data[b]);
    safetensors_free(&s);
    for (size_t i = 0; i < 3; i++)
        fold(data, size, i);
    return 0;
}
