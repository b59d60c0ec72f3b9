/* The stem and the decoder put together. */
#include "vlm.h"

#include <stdlib.h>
#include <string.h>

#include "file.h"

enum { MORE_ROWS = 64 }; /* of a run, beside those of an image */

bool vlm_open(const char *path, struct vlm *out, struct failure *failure)
{
    uint8_t *bytes = NULL;
    size_t size = 0;
    struct gguf gguf;

    memset(out, 0, sizeof(*out));
    if (!file_read(path, &bytes, &size, failure))
        return false;
    bool ok = gguf_parse(bytes, size, &gguf, failure);
    if (ok) {
        ok = model_load(&gguf, &out->model, failure) && stem_load(&gguf, &out->stem, failure);
        gguf_free(&gguf);
    }
    free(bytes);
    if (ok && out->model.shape.n_vocab != N_WORDS)
        ok = fail_with(failure, "%zu words, not %d", out->model.shape.n_vocab, N_WORDS);
    if (!ok)
        vlm_close(out);
    return ok;
}

void vlm_close(struct vlm *vlm)
{
    model_free(&vlm->model);
    stem_free(&vlm->stem);
}

bool reader_open(const struct vlm *vlm, const char *kernels, struct reader *out,
                 struct failure *failure)
{
    const kvc_ctx_params ctx_params = {.struct_size = sizeof(ctx_params), .kernels = kernels};
    struct forward_params params = {.model = &vlm->model, .max_rows = MAX_CELLS + MORE_ROWS};

    memset(out, 0, sizeof(*out));
    out->vlm = vlm;
    const kvc_status status = kvc_ctx_create(&ctx_params, &out->ctx);
    if (status != KVC_OK)
        return fail_with(failure, "kernels %s: %s", kernels ? kernels : "of this CPU",
                         kvc_status_str(status));
    params.ctx = out->ctx;
    out->room = stem_room_create(&vlm->stem);
    out->rows = malloc(sizeof(float) * MAX_CELLS * vlm->model.shape.n_embd);
    out->logits = malloc(sizeof(float) * vlm->model.shape.n_vocab);
    bool ok = out->room && out->rows && out->logits;
    ok = ok ? forward_create(&params, &out->forward, failure) : fail_with(failure, "out of memory");
    if (!ok)
        reader_close(out);
    return ok;
}

void reader_close(struct reader *reader)
{
    forward_destroy(reader->forward);
    stem_room_destroy(reader->room);
    free(reader->rows);
    free(reader->logits);
    kvc_ctx_destroy(reader->ctx);
    memset(reader, 0, sizeof(*reader));
}

int32_t image_facts(int32_t position, int32_t image, int grid, kvc_token *facts)
{
    for (int32_t i = 0; i < grid * grid; i++)
        facts[i] = (kvc_token){.t = position,
                               .y = position + i / grid,
                               .x = position + i % grid,
                               .image = image,
                               .row = i / grid,
                               .col = i % grid,
                               .kind = KVC_TOKEN_VISUAL};
    return position + grid;
}

bool reader_read(struct reader *reader, kvc_cache *cache, kvc_seq seq, const int32_t *words,
                 size_t n, struct failure *failure)
{
    const struct forward_item item = {
        .cache = cache, .seq = seq, .tokens = words, .n = n, .n_skip = n - 1};

    return n == 0 || forward_run(reader->forward, &item, 1, reader->logits, failure);
}

bool reader_feed(struct reader *reader, kvc_cache *cache, kvc_seq seq, const float *rows,
                 const kvc_token *facts, size_t n, struct failure *failure)
{
    const struct forward_item item = {
        .cache = cache, .seq = seq, .rows = rows, .facts = facts, .n = n, .n_skip = n};

    return forward_run(reader->forward, &item, 1, NULL, failure);
}

bool reader_see(struct reader *reader, kvc_cache *cache, kvc_seq seq, int32_t image, int grid,
                struct failure *failure)
{
    static const int32_t word = WORD_IMAGE;
    const struct forward_item item = {
        .cache = cache, .seq = seq, .tokens = &word, .n = 1, .n_skip = 1};
    kvc_token facts[MAX_CELLS];

    if (!forward_run(reader->forward, &item, 1, NULL, failure))
        return false;
    image_facts((int32_t)kvc_seq_next_position(cache, seq), image, grid, facts);
    return reader_feed(reader, cache, seq, reader->rows, facts, (size_t)grid * (size_t)grid,
                       failure);
}

void reader_encode(struct reader *reader, const uint8_t *rgb, int grid)
{
    stem_run(&reader->vlm->stem, reader->room, rgb, grid, reader->rows);
}

static int32_t likeliest(const float *logits, size_t n)
{
    size_t best = 0;

    for (size_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return (int32_t)best;
}

bool reader_answer(struct reader *reader, kvc_cache *cache, kvc_seq seq, int32_t *answer,
                   size_t max, size_t *n, struct failure *failure)
{
    for (*n = 0; *n < max;) {
        const int32_t word = likeliest(reader->logits, N_WORDS);
        if (!reader_read(reader, cache, seq, &word, 1, failure))
            return false;
        if (word == WORD_STOP)
            break;
        answer[(*n)++] = word;
    }
    return true;
}
