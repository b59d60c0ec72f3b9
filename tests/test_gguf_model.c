/* Models from GGUF files made by hand: what is loaded and which absurdities are refused. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "model.h"
#include "support/gguf_file.h"

/* A model of one layer: 2 heads of 4, 1 KV head, 3 tokens; one field can be replaced. */
struct tiny {
    uint32_t layers, embd, ff, heads, kv_heads, rot, context, eos;
    float eps, base;
    const char *architecture, *left_out, *extra;
};

static const struct tiny good = {.layers = 1,
                                 .embd = 8,
                                 .ff = 12,
                                 .heads = 2,
                                 .kv_heads = 1,
                                 .rot = 4,
                                 .context = 64,
                                 .eos = 2,
                                 .eps = 1e-5f,
                                 .base = 10000.0f,
                                 .architecture = "llama"};

static bool load(const struct tiny *tiny, struct failure *failure)
{
    static const struct {
        const char *name;
        uint64_t dims[2];
    } tensors[] = {{"token_embd.weight", {8, 3}},     {"blk.0.attn_norm.weight", {8, 1}},
                   {"blk.0.attn_q.weight", {8, 8}},   {"blk.0.attn_k.weight", {8, 4}},
                   {"blk.0.attn_v.weight", {8, 4}},   {"blk.0.attn_output.weight", {8, 8}},
                   {"blk.0.ffn_norm.weight", {8, 1}}, {"blk.0.ffn_gate.weight", {8, 12}},
                   {"blk.0.ffn_up.weight", {8, 12}},  {"blk.0.ffn_down.weight", {12, 8}},
                   {"output_norm.weight", {8, 1}}};
    const size_t n = sizeof(tensors) / sizeof(*tensors);
    struct gguf_file f;
    struct gguf gguf;
    struct model model;
    uint64_t offset = 0;

    file_put_header(&f, 3, n - (tiny->left_out != NULL) + (tiny->extra != NULL), 11);
    file_put_string(&f, "general.architecture", tiny->architecture);
    file_put_u32(&f, "llama.block_count", tiny->layers);
    file_put_u32(&f, "llama.embedding_length", tiny->embd);
    file_put_u32(&f, "llama.feed_forward_length", tiny->ff);
    file_put_u32(&f, "llama.attention.head_count", tiny->heads);
    file_put_u32(&f, "llama.attention.head_count_kv", tiny->kv_heads);
    file_put_u32(&f, "llama.rope.dimension_count", tiny->rot);
    file_put_u32(&f, "llama.context_length", tiny->context);
    file_put_u32(&f, "tokenizer.ggml.eos_token_id", tiny->eos);
    file_put_f32(&f, "llama.attention.layer_norm_rms_epsilon", tiny->eps);
    file_put_f32(&f, "llama.rope.freq_base", tiny->base);
    for (size_t i = 0; i < n; i++) {
        if (tiny->left_out && strcmp(tensors[i].name, tiny->left_out) == 0)
            continue;
        file_put_tensor(&f, tensors[i].name, 2, tensors[i].dims, 0, offset);
        offset += (tensors[i].dims[0] * tensors[i].dims[1] * 4 + 31) / 32 * 32;
    }
    if (tiny->extra) {
        const uint64_t dims[] = {8, 3};
        file_put_tensor(&f, tiny->extra, 2, dims, 0, offset);
        offset += 96;
    }
    file_pad(&f, 32);
    while (offset-- > 0)
        file_put_int(&f, 0, 1);
    assert_true(gguf_parse(f.data, f.n, &gguf, failure));
    const bool ok = model_load(&gguf, &model, failure);
    if (ok)
        model_free(&model);
    gguf_free(&gguf);
    return ok;
}

static bool loads(const struct tiny *tiny)
{
    struct failure failure;

    return load(tiny, &failure);
}

static void loads_a_model_with_or_without_output(void **state)
{
    struct tiny tiny = good;

    (void)state;
    assert_true(loads(&tiny));
    tiny.extra = "output.weight";
    assert_true(loads(&tiny));
}

static void refuses_absurd_models(void **state)
{
    (void)state;
#define REFUSES(field, value)                                                                      \
    do {                                                                                           \
        struct tiny tiny = good;                                                                   \
        tiny.field = value;                                                                        \
        if (loads(&tiny))                                                                          \
            fail_msg("%s = %s was accepted", #field, #value);                                      \
    } while (0)
    REFUSES(layers, 0);
    REFUSES(layers, 2); /* its tensors are missing */
    REFUSES(layers, UINT32_MAX);
    REFUSES(embd, 0);
    REFUSES(embd, 16);
    REFUSES(embd, UINT32_MAX);
    REFUSES(ff, 0);
    REFUSES(ff, 11);
    REFUSES(ff, UINT32_MAX);
    REFUSES(heads, 0);
    REFUSES(heads, 3);
    REFUSES(heads, 16); /* heads of size 0 */
    REFUSES(heads, UINT32_MAX);
    REFUSES(kv_heads, 0);
    REFUSES(kv_heads, 2); /* K and V have another shape */
    REFUSES(kv_heads, 3);
    REFUSES(rot, 0);
    REFUSES(rot, 3);
    REFUSES(rot, 6);
    REFUSES(context, 0);
    REFUSES(context, UINT32_MAX);
    REFUSES(eos, 3);
    REFUSES(eps, 0.0f);
    REFUSES(eps, -1.0f);
    REFUSES(eps, NAN);
    REFUSES(base, 0.0f);
    REFUSES(base, INFINITY);
    REFUSES(base, NAN);
    REFUSES(architecture, "gemma2");
    REFUSES(left_out, "token_embd.weight");
    REFUSES(left_out, "blk.0.attn_v.weight");
    REFUSES(left_out, "output_norm.weight");
    REFUSES(extra, "blk.0.attn_q.bias");
    REFUSES(extra, "v.norm.weight"); /* only a vision model has a stem */
#undef REFUSES
}

/* The shape of a tensor alone would not tell what is wrong. */
static void says_what_is_wrong_with_the_heads(void **state)
{
    struct failure failure;
    struct tiny tiny = good;

    (void)state;
    tiny.kv_heads = 3;
    assert_false(load(&tiny, &failure));
    assert_string_equal(failure.text, "2 query heads are no multiple of 3 KV heads");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(loads_a_model_with_or_without_output),
        cmocka_unit_test(refuses_absurd_models),
        cmocka_unit_test(says_what_is_wrong_with_the_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
