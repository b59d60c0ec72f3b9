/* A model's file for a fold: where its attentions keep what scales go into, and what an earlier
 * fold has recorded. */
#ifndef FOLD_CHECKPOINT_H
#define FOLD_CHECKPOINT_H

#include <kvc/rope.h>
#include <kvc/smooth.h>

#include "gguf.h"
#include "safetensors.h"
#include "weights.h"

/* Version of the records that a fold leaves in a file, and how their names begin. */
enum { RECORD_VERSION = 1 };
#define RECORD_PREFIX "kvc.kvsmooth."

struct attention {
    char name[96]; /* as the article's: "model.layers.0.self_attn" */
    struct weight q, q_bias, k, k_bias, q_norm, k_norm;
};

/* What was folded. */
struct record {
    bool is_there;
    uint64_t version;
    float factor;
    bool *folded;  /* [n_layers] */
    float *scales; /* [n_layers][n_kv_heads][head_dim] */
};

struct checkpoint {
    unsigned char *bytes; /* of the whole file */
    size_t size;
    bool is_gguf;
    struct gguf gguf;               /* the one ... */
    struct safetensors safetensors; /* ... or the other, into bytes */
    char architecture[32];
    size_t n_layers, n_heads, n_kv_heads, head_dim;
    kvc_rope rope; /* scaling left out: only the pairs matter */
    kvc_smooth_type type;
    float gain_offset;            /* of the norms of Q and K: 1 where files keep gain - 1 */
    struct attention *attentions; /* [n_layers] */
    struct record record;
};

/* Opens a GGUF file, or one of safetensors with the model's config.json (NULL: beside the file).
 * What cannot be folded is refused. After a failure *out is empty. */
bool checkpoint_open(const char *path, const char *config_path, struct checkpoint *out,
                     struct failure *failure);
void checkpoint_close(struct checkpoint *checkpoint);

/* Writes the record into the bytes of the file, or takes it out where is_there is false. Weights
 * and tensors are gone after that, names and the record stay. */
bool checkpoint_write_record(struct checkpoint *checkpoint, struct failure *failure);

/* Whether two files of one format say the same of what they hold: metadata but for records, and
 * names, types, shapes and order of tensors. */
bool checkpoint_same_head(const struct checkpoint *a, const struct checkpoint *b,
                          struct failure *failure);

/* Tensor @p i of the file; false beyond the last. */
bool checkpoint_tensor(const struct checkpoint *checkpoint, size_t i, struct gguf_text *name,
                       const uint8_t **data, size_t *n_bytes);

/* What the formats do for these. */
bool checkpoint_read_gguf(struct checkpoint *checkpoint, struct failure *failure);
bool checkpoint_read_safetensors(const char *path, const char *config_path,
                                 struct checkpoint *checkpoint, struct failure *failure);
bool checkpoint_write_gguf(struct checkpoint *checkpoint, struct failure *failure);
bool checkpoint_write_safetensors(struct checkpoint *checkpoint, struct failure *failure);
bool checkpoint_same_head_gguf(const struct checkpoint *a, const struct checkpoint *b,
                               struct failure *failure);
bool checkpoint_same_head_safetensors(const struct checkpoint *a, const struct checkpoint *b,
                                      struct failure *failure);

/* For both: room for the attentions and their record, once the shape is known and sane. */
bool checkpoint_allocate(struct checkpoint *checkpoint, struct failure *failure);

/* For both: puts the first @p head_size bytes of a new file in front of what begins at @p tail. */
bool checkpoint_replace_head(struct checkpoint *checkpoint, const void *head, size_t head_size,
                             size_t tail, struct failure *failure);

/* For both: whether a record that was read has numbers that a fold can have used. */
bool checkpoint_check_record(const struct checkpoint *checkpoint, struct failure *failure);

/* Floats of one layer, in record and in observations. */
size_t checkpoint_width(const struct checkpoint *checkpoint);

#endif
