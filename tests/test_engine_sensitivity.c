/* What the command that measures layers and heads tells, on a small model of random weights of
 * which some heads are silent. */
#define _POSIX_C_SOURCE 200809L /* mkdtemp(), dup() */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "commands.h"
#include "file.h"
#include "support/gguf_file.h"
#include "support/rng.h"

enum {
    LAYERS = 2,
    EMBD = 16,
    FF = 12,
    VOCAB = 26, /* the letters */
    BOS = 25,
    HEADS = 4,
    KV_HEADS = 2,
    DIM = 8,
    Q = HEADS * DIM, /* of all heads */
    KV = KV_HEADS * DIM,
    UNITS = 2 * LAYERS * KV_HEADS,
    TEXT = 600
};

/* Heads whose V, or K, is zero. */
enum { SILENT_V_LAYER = 0, SILENT_V_HEAD = 1, SILENT_K_LAYER = 1, SILENT_K_HEAD = 0 };

/* Parts of a layer as files name them. */
static const struct part {
    const char *name;
    uint64_t n_out, n_in;
    float centre, spread;
} parts[] = {
    {"attn_norm", 1, EMBD, 1.0f, 0.5f},   {"attn_q", Q, EMBD, 0.0f, 0.5f},
    {"attn_k", KV, EMBD, 0.0f, 0.5f},     {"attn_v", KV, EMBD, 0.0f, 0.5f},
    {"attn_output", EMBD, Q, 0.0f, 0.5f}, {"ffn_norm", 1, EMBD, 1.0f, 0.5f},
    {"ffn_gate", FF, EMBD, 0.0f, 0.8f},   {"ffn_up", FF, EMBD, 0.0f, 0.8f},
    {"ffn_down", EMBD, FF, 0.0f, 0.8f},
};
static const struct part embedding = {"token_embd", VOCAB, EMBD, 0.0f, 1.0f};
static const struct part output_norm = {"output_norm", 1, EMBD, 1.0f, 0.5f};
enum { PARTS = sizeof(parts) / sizeof(*parts), TENSORS = LAYERS * PARTS + 2 };

static char folder[] = "/tmp/kvc-sensitivity-XXXXXX";
static char model[64], calibration[64], text[64], csv[64], json[64];

static const struct part *part_of(size_t tensor)
{
    return tensor == 0             ? &embedding
           : tensor == TENSORS - 1 ? &output_norm
                                   : &parts[(tensor - 1) % PARTS];
}

static bool is_silent(size_t tensor, uint64_t row)
{
    const size_t layer = (tensor - 1) / PARTS;
    const char *name = part_of(tensor)->name;

    return (strcmp(name, "attn_v") == 0 && layer == SILENT_V_LAYER && row / DIM == SILENT_V_HEAD) ||
           (strcmp(name, "attn_k") == 0 && layer == SILENT_K_LAYER && row / DIM == SILENT_K_HEAD);
}

static void put_shape(struct gguf_file *f)
{
    file_put_header(f, 3, TENSORS, 17);
    file_put_string(f, "general.architecture", "llama");
    file_put_u32(f, "llama.block_count", LAYERS);
    file_put_u32(f, "llama.embedding_length", EMBD);
    file_put_u32(f, "llama.feed_forward_length", FF);
    file_put_u32(f, "llama.attention.head_count", HEADS);
    file_put_u32(f, "llama.attention.head_count_kv", KV_HEADS);
    file_put_u32(f, "llama.attention.key_length", DIM);
    file_put_u32(f, "llama.attention.value_length", DIM);
    file_put_u32(f, "llama.context_length", TEXT);
    file_put_f32(f, "llama.attention.layer_norm_rms_epsilon", 1e-6f);
    file_put_f32(f, "llama.rope.freq_base", 10000.0f);
}

static void put_array(struct gguf_file *f, const char *key, uint32_t type)
{
    file_put_key(f, key, 9);
    file_put_int(f, type, 4);
    file_put_int(f, VOCAB, 8);
}

static void put_letters(struct gguf_file *f)
{
    const float score = 0.0f;

    file_put_string(f, "tokenizer.ggml.model", "llama");
    file_put_u32(f, "tokenizer.ggml.add_space_prefix", 0);
    file_put_u32(f, "tokenizer.ggml.add_bos_token", 1);
    file_put_u32(f, "tokenizer.ggml.bos_token_id", BOS);
    put_array(f, "tokenizer.ggml.tokens", 8);
    for (int i = 0; i < VOCAB; i++)
        file_put_text(f, (const char[]){(char)('a' + i), '\0'});
    put_array(f, "tokenizer.ggml.scores", 6);
    for (int i = 0; i < VOCAB; i++)
        file_put(f, &score, 4);
}

static void put_weights(struct gguf_file *f)
{
    uint64_t offset = 0, rng = 3;
    char name[40];

    for (size_t i = 0; i < TENSORS; i++) {
        const struct part *p = part_of(i);
        const uint64_t dims[] = {p->n_in, p->n_out};
        snprintf(name, sizeof(name), i % (TENSORS - 1) == 0 ? "%.0d%s.weight" : "blk.%d.%s.weight",
                 i % (TENSORS - 1) == 0 ? 0 : (int)((i - 1) / PARTS), p->name);
        file_put_tensor(f, name, 2, dims, 0, offset);
        offset += (dims[0] * dims[1] * sizeof(float) + 31) / 32 * 32;
    }
    for (size_t i = 0; i < TENSORS; i++) {
        const struct part *p = part_of(i);
        file_pad(f, 32);
        for (uint64_t w = 0; w < p->n_out * p->n_in; w++) {
            const float x = p->centre + p->spread * rng_unit(&rng);
            const float weight = i > 0 && is_silent(i, w / p->n_in) ? 0.0f : x;
            file_put(f, &weight, sizeof(weight));
        }
    }
}

static int open_all(void **state)
{
    static struct gguf_file f;
    unsigned char letters[TEXT];
    struct failure failure;
    uint64_t rng = 9;

    (void)state;
    if (!mkdtemp(folder))
        return -1;
    snprintf(model, sizeof(model), "%s/m.gguf", folder);
    snprintf(calibration, sizeof(calibration), "%s/m.kvcal", folder);
    snprintf(text, sizeof(text), "%s/text", folder);
    snprintf(csv, sizeof(csv), "%s/csv", folder);
    snprintf(json, sizeof(json), "%s/json", folder);
    put_shape(&f);
    put_letters(&f);
    put_weights(&f);
    for (size_t i = 0; i < TEXT; i++)
        letters[i] = (unsigned char)('a' + (char)rng_below(&rng, VOCAB));
    return !file_write(model, f.data, f.n, &failure) || !file_write(text, letters, TEXT, &failure);
}

static int close_all(void **state)
{
    (void)state;
    remove(model);
    remove(calibration);
    remove(text);
    remove(csv);
    remove(json);
    return rmdir(folder);
}

/* Runs a command with standard output in the file json. */
static int run(int (*command)(int, char **), int argc, char **argv)
{
    fflush(stdout);
    const int screen = dup(STDOUT_FILENO);

    assert_true(screen >= 0);
    assert_non_null(freopen(json, "w", stdout));
    const int status = command(argc, argv);
    fflush(stdout);
    assert_true(dup2(screen, STDOUT_FILENO) >= 0);
    close(screen);
    return status;
}

static struct unit {
    int layer, kv_head, bits;
    char side;
    double kl;
} units[UNITS];

static void read_csv(void)
{
    FILE *file = fopen(csv, "r");
    char line[128];

    assert_non_null(file);
    assert_non_null(fgets(line, sizeof(line), file));
    assert_string_equal(line, "layer,kv_head,side,kl,bits\n");
    for (int i = 0; i < UNITS; i++) {
        struct unit *u = &units[i];
        assert_int_equal(
            fscanf(file, "%d,%d,%c,%lf,%d\n", &u->layer, &u->kv_head, &u->side, &u->kl, &u->bits),
            5);
    }
    assert_null(fgets(line, sizeof(line), file));
    fclose(file);
}

static const char *field(const char *object, const char *name)
{
    const char *at = strstr(object, name);

    assert_non_null(at);
    return at + strlen(name);
}

static double number(const char *object, const char *name)
{
    return strtod(field(object, name), NULL);
}

static void read_json(char *object, size_t room)
{
    struct failure failure;
    unsigned char *data;
    size_t size;

    assert_true(file_read(json, &data, &size, &failure));
    assert_true(size < room);
    memcpy(object, data, size);
    object[size] = '\0';
    free(data);
}

/* The error of a code of so many bits against that of four, by the number of its steps. */
static double share(int bits)
{
    return pow(15.0 / (pow(2.0, bits) - 1.0), 2.0);
}

static void measure(void)
{
    char *calibrate[] = {"--model", model, "--file", text, "--threads", "1"};
    char *argv[] = {"--model",  model, "--file", text, "--tokens",  "128", "--context", "128",
                    "--chunks", "2",   "--csv",  csv,  "--threads", "1",   "--json"};

    assert_int_equal(run(calibrate_command, 6, calibrate), EXIT_DONE);
    assert_int_equal(run(sensitivity_command, 15, argv), EXIT_DONE);
    read_csv();
}

static void heads_without_keys_or_values_cost_nothing(void **state)
{
    /* The same numbers at other addresses give a BLAS other last bits. */
    const double rounding = 1e-12;
    (void)state;
    measure();
    for (int i = 0; i < UNITS; i++) {
        const struct unit *u = &units[i];
        const bool no_v = u->layer == SILENT_V_LAYER && u->kv_head == SILENT_V_HEAD;
        const bool no_k = u->layer == SILENT_K_LAYER && u->kv_head == SILENT_K_HEAD;
        const bool silent = no_v || (no_k && u->side == 'k'); /* keys to nothing do not matter */
        print_message("%d %d %c: %.2e, %d bits\n", u->layer, u->kv_head, u->side, u->kl, u->bits);
        assert_int_equal(u->layer, i / 4);
        assert_int_equal(u->kv_head, i / 2 % 2);
        assert_int_equal(u->side, i % 2 ? 'v' : 'k');
        if (silent) {
            assert_true(fabs(u->kl) < rounding);
            assert_int_equal(u->bits, 4);
        } else {
            assert_true(u->kl > 1e-8);
        }
    }
}

/* The least error of all ways that keep to the budget, by trying them. */
static double least_error(int unit, int bits_left, double so_far)
{
    double least = INFINITY;

    if (unit == UNITS)
        return so_far;
    for (int bits = 4; bits <= 8; bits += units[unit].side == 'k' ? 2 : 4)
        if (bits <= bits_left)
            least = fmin(least, least_error(unit + 1, bits_left - bits,
                                            so_far + units[unit].kl * share(bits)));
    return least;
}

static void bits_are_shared_out_within_the_budget(void **state)
{
    const int budget = (6 + 4) * UNITS / 2;
    int spent = 0;
    double error = 0.0;

    (void)state;
    for (int i = 0; i < UNITS; i++) {
        const struct unit *u = &units[i];
        const bool is_k = u->side == 'k';
        assert_true(u->bits == 4 || u->bits == 8 || (is_k && u->bits == 6));
        spent += u->bits;
        error += u->kl * share(u->bits);
    }
    assert_true(spent <= budget);
    const double least = least_error(0, budget, 0.0);
    print_message("error %.3e, least %.3e\n", error, least);
    assert_true(error >= least * (1.0 - 1e-9) && error <= 1.1 * least);
}

static void sums_and_predictions_follow_from_the_units(void **state)
{
    double k = 0.0, v = 0.0, uniform = 0.0, shared = 0.0;
    char object[4096];

    (void)state;
    for (int i = 0; i < UNITS; i++) {
        const struct unit *u = &units[i];
        *(u->side == 'v' ? &v : &k) += u->kl;
        uniform += u->kl * share(u->side == 'v' ? 4 : 6);
        shared += u->kl * share(u->bits);
    }
    measure();
    read_json(object, sizeof(object));
    assert_true(fabs(number(object, "\"k_sum\":") / k - 1.0) < 1e-6);
    assert_true(fabs(number(object, "\"v_sum\":") / v - 1.0) < 1e-6);
    assert_true(number(object, "\"bits\":") == 5.0);
    const char *predicted = field(object, "\"predicted\":");
    const char *measured = field(object, "\"measured\":");
    assert_true(fabs(number(predicted, "\"uniform\":") / uniform - 1.0) < 1e-6);
    assert_true(fabs(number(predicted, "\"shared\":") / shared - 1.0) < 1e-6);
    assert_true(number(measured, "\"uniform\":") > 0.0 && number(measured, "\"shared\":") > 0.0);
}

/* The same chunks, each with the token that texts of the model begin with. */
static void bits_for_all_alike_cost_what_compare_says(void **state)
{
    char *argv[] = {"--model", model,  "--file",   text,        "--context", "128",
                    "--skip",  "1",    "--chunks", "2",         "--recent",  "0",
                    "--kv",    "k6v4", "--json",   "--threads", "1"};
    char object[4096];

    (void)state;
    measure();
    read_json(object, sizeof(object));
    const double measured = number(field(object, "\"measured\":"), "\"uniform\":");
    assert_int_equal(run(compare_command, 17, argv), EXIT_DONE);
    read_json(object, sizeof(object));
    const double compared = number(field(object, "\"kv\":\"k6v4\""), "\"kl\":");
    print_message("measured %.6e, compared %.6e\n", measured, compared);
    assert_true(compared > 0.0 && fabs(measured / compared - 1.0) < 1e-6);
}

static void refuses_what_it_cannot_measure(void **state)
{
    char *none[] = {NULL};
    char *two_chunks[] = {"--model", model, "--file", text, "--tokens", "256", "--context", "128"};
    char *short_text[] = {"--model", model, "--file", text, "--tokens", "512"};
    char *uncalibrated[] = {"--model",   model, "--file",        text,   "--tokens", "128",
                            "--context", "128", "--calibration", "none", "--chunks", "1"};

    (void)state;
    assert_int_equal(run(sensitivity_command, 0, none), EXIT_USAGE);
    assert_int_equal(run(sensitivity_command, 8, two_chunks), EXIT_USAGE);
    assert_int_equal(run(sensitivity_command, 6, short_text), EXIT_FAILED);
    /* nothing would be coded, and every head would seem to cost nothing */
    assert_int_equal(run(sensitivity_command, 12, uncalibrated), EXIT_FAILED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_without_keys_or_values_cost_nothing),
        cmocka_unit_test(bits_are_shared_out_within_the_budget),
        cmocka_unit_test(sums_and_predictions_follow_from_the_units),
        cmocka_unit_test(bits_for_all_alike_cost_what_compare_says),
        cmocka_unit_test(refuses_what_it_cannot_measure),
    };

    return cmocka_run_group_tests(tests, open_all, close_all);
}
