/* Vocabularies of SentencePiece: scores become ranks of merges, so that bpe.h can do the rest. */
#include "spm.h"

#include <string.h>

#include "utf8.h"

size_t spm_bytes(struct gguf_text text, char *out)
{
    static const char space[] = "\xe2\x96\x81";
    const size_t n_space = sizeof(space) - 1;
    size_t n = 0;

    for (size_t at = 0; at < text.size; n++) {
        if (text.size - at >= n_space && memcmp(text.data + at, space, n_space) == 0) {
            out[n] = ' ';
            at += n_space;
        } else {
            out[n] = text.data[at++];
        }
    }
    return n;
}

static int hex_digit(char c)
{
    static const char digits[] = "0123456789ABCDEF";
    const char *digit = c ? strchr(digits, c) : NULL;

    return digit ? (int)(digit - digits) : -1;
}

int spm_byte_of(struct gguf_text text)
{
    if (text.size != 6 || memcmp(text.data, "<0x", 3) != 0 || text.data[5] != '>')
        return -1;
    const int high = hex_digit(text.data[3]), low = hex_digit(text.data[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

/* Higher scores have lower ranks: the bits of a float, as a signed integer, are in its order once
 * those of negative ones are turned round. */
static int32_t rank_of(float score)
{
    const float x = 0.0f - score;
    int32_t bits;

    memcpy(&bits, &x, sizeof(bits));
    return bits < 0 ? bits ^ INT32_MAX : bits;
}

/* Adds the pairs that make a token to the map, if there is one; returns their number. */
static size_t split_token(const struct text_map *tokens, int32_t id, float score,
                          struct merge_map *out)
{
    const struct gguf_text text = tokens->texts[id];
    size_t n = 0;

    for (size_t at = 1; at < text.size; at++) {
        const int32_t left = text_map_find(tokens, text.data, at);
        const int32_t right = left < 0 ? -1 : text_map_find(tokens, text.data + at, text.size - at);
        if (right < 0)
            continue;
        n++;
        if (out)
            merge_map_insert(out, &(struct merge){left, right, rank_of(score), id});
    }
    return n;
}

static size_t split_tokens(const struct text_map *tokens, size_t n_tokens, const float *scores,
                           struct merge_map *out)
{
    size_t n = 0;

    for (size_t i = 0; i < n_tokens; i++) {
        const struct gguf_text text = tokens->texts[i];
        if (text_map_find(tokens, text.data, text.size) == (int32_t)i)
            n += split_token(tokens, (int32_t)i, scores[i], out);
    }
    return n;
}

bool spm_find_merges(const struct text_map *tokens, size_t n_tokens, const float *scores,
                     struct merge_map *out)
{
    if (!merge_map_init(out, split_tokens(tokens, n_tokens, scores, NULL)))
        return false;
    split_tokens(tokens, n_tokens, scores, out);
    return true;
}

size_t spm_characters(const struct text_map *tokens, const int32_t byte_ids[256], const char *text,
                      size_t size, int32_t *ids, size_t *used)
{
    size_t n = 0;

    for (*used = 0; *used < size;) {
        uint32_t character;
        const size_t length = utf8_decode(text + *used, size - *used, &character);
        const int32_t id = length > 0 ? text_map_find(tokens, text + *used, length) : -1;
        ids[n] = id >= 0 ? id : byte_ids[(unsigned char)text[*used]];
        if (ids[n] < 0)
            break;
        *used += id >= 0 ? length : 1;
        n++;
    }
    return n;
}
