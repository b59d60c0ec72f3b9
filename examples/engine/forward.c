/* The transformer: rows of all items side by side, one pass over the weights for all. */
#include "forward.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "rotation.h"
#include "split.h"

/* How tokens are turned. */
struct angles {
    kvc_rope rope;          /* as trained */
    float *cosines, *sines; /* [max_rows][n_rot / 2] */
};

struct forward {
    struct forward_params p;
    struct angles angles, local_angles; /* local_angles: where the model has local layers */
    size_t n_qkv;                       /* floats of a row of qkv */
    float *x;                           /* [max_rows][n_embd] the residual stream */
    float *norm;                        /* [max_rows][n_embd] */
    float *qkv;                         /* [max_rows][n_qkv] Q, K, V side by side */
    float *attn;                        /* [max_rows][n_heads * head_dim] */
    float *gate_up;                     /* [max_rows][2 * n_ff] */
    float *hidden;                      /* [max_rows][n_ff] */
    float *split;                       /* Q, K, V and the output in halves, for exact */
    int32_t *positions;                 /* [max_rows][3] */
    void *rope_ws;
    size_t rope_ws_size;
    double attend_seconds;
};

static float *floats(size_t rows, size_t cols)
{
    return calloc(rows * cols + 1, sizeof(float));
}

static bool check(kvc_status status, const char *what, struct failure *failure)
{
    return status == KVC_OK || fail_with(failure, "%s: %s", what, kvc_status_str(status));
}

static bool make_angles(const struct forward *f, struct angles *out)
{
    const size_t n_pairs = f->p.model->shape.n_rot / 2;

    out->cosines = floats(f->p.max_rows, n_pairs);
    out->sines = floats(f->p.max_rows, n_pairs);
    return out->cosines && out->sines;
}

bool forward_create(const struct forward_params *params, struct forward **out,
                    struct failure *failure)
{
    const struct model_shape *s = &params->model->shape;
    const size_t rows = params->max_rows;
    struct forward *f = calloc(1, sizeof(*f));

    *out = NULL;
    if (!f)
        return fail_with(failure, "out of memory");
    f->p = *params;
    if (!rotation_init(s, "none", 1.0, &f->angles.rope, failure) ||
        !check(kvc_rope_workspace_size(&f->angles.rope, &f->rope_ws_size), "rotating", failure)) {
        free(f);
        return false;
    }
    f->local_angles.rope = f->angles.rope;
    f->local_angles.rope.base = s->local_rope_base;
    f->n_qkv = (s->n_heads + 2 * s->n_kv_heads) * s->head_dim;
    f->x = floats(rows, s->n_embd);
    f->norm = floats(rows, s->n_embd);
    f->qkv = floats(rows, f->n_qkv);
    f->attn = floats(rows, s->n_heads * s->head_dim);
    f->gate_up = floats(rows, 2 * s->n_ff);
    f->hidden = floats(rows, s->n_ff);
    f->positions = calloc(3 * rows + 1, sizeof(*f->positions));
    const bool has_angles =
        make_angles(f, &f->angles) && (s->window == 0 || make_angles(f, &f->local_angles));
    f->rope_ws = aligned_alloc(64, (f->rope_ws_size + 63) / 64 * 64 + 64);
    f->split = floats(params->exact ? rows : 0, 2 * (f->n_qkv + s->n_heads * s->head_dim));
    if (!f->x || !f->norm || !f->qkv || !f->attn || !f->gate_up || !f->hidden || !f->positions ||
        !has_angles || !f->rope_ws || !f->split) {
        forward_destroy(f);
        return fail_with(failure, "out of memory");
    }
    *out = f;
    return true;
}

void forward_destroy(struct forward *f)
{
    if (!f)
        return;
    free(f->x);
    free(f->norm);
    free(f->qkv);
    free(f->attn);
    free(f->gate_up);
    free(f->hidden);
    free(f->positions);
    free(f->angles.cosines);
    free(f->angles.sines);
    free(f->local_angles.cosines);
    free(f->local_angles.sines);
    free(f->rope_ws);
    free(f->split);
    free(f);
}

double forward_attend_seconds(const struct forward *f)
{
    return f->attend_seconds;
}

/* A loop over 0 ... n - 1, one range of it for each thread. */
struct loop {
    struct forward *f;
    void (*body)(const struct loop *loop, size_t first, size_t last);
    size_t n, n_tasks;
    const float *in, *weights;
    float *out;
    size_t n_rows, n_in, n_out; /* of products */
    bool add;                   /* to what out holds */
};

static void run_task(void *arg, size_t i)
{
    const struct loop *loop = arg;

    loop->body(loop, loop->n * i / loop->n_tasks, loop->n * (i + 1) / loop->n_tasks);
}

static void run_loop(struct loop *loop)
{
    const struct forward_params *p = &loop->f->p;

    loop->n_tasks = p->parallel_for && p->n_threads > 1 ? p->n_threads : 1;
    if (loop->n_tasks == 1)
        run_task(loop, 0);
    else
        p->parallel_for(p->parallel_user, loop->n_tasks, run_task, loop);
}

/* Columns first ... last - 1 of out = in * weights^T. */
static void product_columns(const struct loop *l, size_t first, size_t last)
{
    const float *weights = l->weights + first * l->n_in;
    const int n = (int)(last - first), k = (int)l->n_in;
    const float beta = l->add ? 1.0f : 0.0f;

    if (n == 0)
        return;
    if (l->n_rows == 1)
        cblas_sgemv(CblasRowMajor, CblasNoTrans, n, k, 1.0f, weights, k, l->in, 1, beta,
                    l->out + first, 1);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)l->n_rows, n, k, 1.0f, l->in, k,
                    weights, k, beta, l->out + first, (int)l->n_out);
}

/* out [rows][n_out] = or += in [rows][n_in] * weights [n_out][n_in]^T */
static void product(struct forward *f, const float *in, const float *weights, size_t rows,
                    size_t n_in, size_t n_out, bool add, float *out)
{
    run_loop(&(struct loop){.f = f,
                            .body = product_columns,
                            .n = n_out,
                            .in = in,
                            .weights = weights,
                            .out = out,
                            .n_rows = rows,
                            .n_in = n_in,
                            .n_out = n_out,
                            .add = add});
}

/* What brings x to a mean square of 1. */
static float norm_factor(const float *x, size_t n, float eps)
{
    double sum = 0.0;

    for (size_t i = 0; i < n; i++)
        sum += (double)(x[i] * x[i]);
    return 1.0f / sqrtf((float)(sum / (double)n) + eps);
}

static void norm_rows(const struct loop *l, size_t first, size_t last)
{
    const size_t n = l->f->p.model->shape.n_embd;
    const float eps = l->f->p.model->shape.norm_eps;

    for (size_t r = first; r < last; r++) {
        const float *x = l->in + r * n;
        float *y = l->out + r * n;
        const float factor = norm_factor(x, n, eps);
        for (size_t i = 0; i < n; i++)
            y[i] = (l->add ? y[i] : 0.0f) + x[i] * factor * l->weights[i];
    }
}

/* out = or += norm of x */
static void norm(struct forward *f, const float *x, const float *weights, size_t rows, bool add,
                 float *out)
{
    run_loop(&(struct loop){
        .f = f, .body = norm_rows, .n = rows, .in = x, .weights = weights, .out = out, .add = add});
}

/* x += in * weights^T, or the norm of that product where the model has one */
static void add_product(struct forward *f, const float *in, const float *weights, size_t rows,
                        size_t n_in, const float *norm_weights)
{
    const size_t n_embd = f->p.model->shape.n_embd;

    product(f, in, weights, rows, n_in, n_embd, !norm_weights, norm_weights ? f->norm : f->x);
    if (norm_weights)
        norm(f, f->norm, norm_weights, rows, true, f->x);
}

/* Each head in place. */
static void norm_heads(const struct forward *f, const float *weights, float *heads, size_t n_heads)
{
    const size_t n = f->p.model->shape.head_dim;

    for (float *x = heads; x < heads + n_heads * n; x += n) {
        const float factor = norm_factor(x, n, f->p.model->shape.norm_eps);
        for (size_t i = 0; i < n; i++)
            x[i] *= factor * weights[i];
    }
}

/* Q and K of each row, where the model has norms there. */
static void norm_q_and_k(struct forward *f, const struct model_layer *w, size_t rows)
{
    const struct model_shape *s = &f->p.model->shape;

    for (size_t r = 0; w->q_norm && r < rows; r++) {
        float *q = f->qkv + r * f->n_qkv;
        norm_heads(f, w->q_norm, q, s->n_heads);
        norm_heads(f, w->k_norm, q + s->n_heads * s->head_dim, s->n_kv_heads);
    }
}

static float silu(float x)
{
    return x / (1.0f + expf(-x));
}

/* The approximation that models are trained with: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715
 * x^3))) */
static float gelu(float x)
{
    return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

/* hidden = activation(gate) * up */
static void gate_rows(const struct loop *l, size_t first, size_t last)
{
    const struct model_shape *s = &l->f->p.model->shape;
    float (*const activation)(float) = s->activation == MODEL_GELU ? gelu : silu;
    const size_t n = s->n_ff;

    for (size_t r = first; r < last; r++) {
        const float *gate = l->in + r * 2 * n, *up = gate + n;
        float *hidden = l->out + r * n;
        for (size_t i = 0; i < n; i++)
            hidden[i] = activation(gate[i]) * up[i];
    }
}

static kvc_status set_angles(const struct forward *f, const struct angles *angles,
                             const kvc_rope *rope, size_t row, size_t n)
{
    const size_t n_pairs = f->p.model->shape.n_rot / 2;

    return kvc_rope_angles(rope, f->positions + 3 * row, n, angles->cosines + row * n_pairs,
                           angles->sines + row * n_pairs);
}

/* Announces the tokens and puts their embeddings and angles into rows from @p row on. */
static bool start_item(struct forward *f, const struct forward_item *item, size_t row,
                       struct failure *failure)
{
    const struct model *m = f->p.model;
    const size_t n_embd = m->shape.n_embd;
    const int64_t position = kvc_seq_next_position(item->cache, item->seq);

    for (size_t i = 0; i < item->n; i++) {
        float *x = f->x + (row + i) * n_embd;
        int32_t *where = f->positions + 3 * (row + i);
        const int32_t token = item->rows ? 0 : item->tokens[i];
        if ((size_t)token >= m->shape.n_vocab) /* negative ones are too */
            return fail_with(failure, "token %d is not in the vocabulary", (int)token);
        const float *from =
            item->rows ? item->rows + i * n_embd : m->embedding + (size_t)token * n_embd;
        const float scale = item->rows ? 1.0f : m->shape.embedding_scale;
        for (size_t j = 0; j < n_embd; j++)
            x[j] = from[j] * scale;
        where[0] = where[1] = where[2] = (int32_t)position + (int32_t)i;
        if (item->facts) {
            where[0] = item->facts[i].t;
            where[1] = item->facts[i].y;
            where[2] = item->facts[i].x;
        }
    }
    const kvc_rope *rope = item->rope ? item->rope : &f->angles.rope;
    kvc_status status = set_angles(f, &f->angles, rope, row, item->n);
    if (status == KVC_OK && m->shape.window > 0)
        status = set_angles(f, &f->local_angles, &f->local_angles.rope, row, item->n);
    return check(status, "rotating", failure) &&
           check(kvc_tokens_add(item->cache, item->seq, item->facts, item->n), "announcing tokens",
                 failure);
}

/* Part of qkv: heads of @p n_heads from element @p offset of each row on. */
static kvc_view view_of(const struct forward *f, size_t row, size_t n, size_t offset,
                        size_t n_heads)
{
    kvc_view view = kvc_view_packed(f->qkv + row * f->n_qkv + offset, KVC_DTYPE_F32, n, n_heads,
                                    f->p.model->shape.head_dim);

    view.token_stride = f->n_qkv;
    return view;
}

static bool append_and_attend(struct forward *f, const struct forward_item *item, int32_t layer,
                              const kvc_view *q, const kvc_view *k, const kvc_view *v,
                              const kvc_view *out, struct failure *failure)
{
    const struct model_shape *s = &f->p.model->shape;
    kvc_attend_options options;

    kvc_attend_options_default(item->cache, &options);
    options.accumulate = true; /* where the cache keeps scores */
    options.scale = 1.0f / sqrtf((float)s->head_dim);
    options.window = f->p.model->layers[layer].is_local ? (int64_t)s->window : 0;
    if (!check(kvc_append(item->cache, item->seq, layer, k, v), "appending K and V", failure))
        return false;
    if (item->hook.attend)
        return item->hook.attend(item->hook.user, layer, &options, q, k, v, out, failure);
    const double start = seconds_now();
    const kvc_status status = kvc_attend(item->cache, item->seq, layer, q, &options, out, NULL);
    f->attend_seconds += seconds_now() - start;
    return check(status, "attention", failure);
}

/* The same with heads split in two. */
static bool attend_exactly(struct forward *f, const struct forward_item *item, int32_t layer,
                           const kvc_view *q, const kvc_view *k, const kvc_view *v,
                           const kvc_view *out, struct failure *failure)
{
    const size_t n = item->n, d = 2 * q->head_dim;
    float *q_data = f->split, *k_data = q_data + n * q->n_heads * d;
    float *v_data = k_data + n * k->n_heads * d, *out_data = v_data + n * v->n_heads * d;
    const kvc_view q2 = kvc_view_packed(q_data, KVC_DTYPE_F32, n, q->n_heads, d);
    const kvc_view k2 = kvc_view_packed(k_data, KVC_DTYPE_F32, n, k->n_heads, d);
    const kvc_view v2 = kvc_view_packed(v_data, KVC_DTYPE_F32, n, v->n_heads, d);
    const kvc_view out2 = kvc_view_packed(out_data, KVC_DTYPE_F32, n, q->n_heads, d);

    split_queries(q, q_data);
    split_keys(k, k_data);
    split_keys(v, v_data);
    if (!append_and_attend(f, item, layer, &q2, &k2, &v2, &out2, failure))
        return false;
    split_join(out_data, out);
    return true;
}

static bool attend_item(struct forward *f, const struct forward_item *item, size_t row,
                        int32_t layer, struct failure *failure)
{
    const struct model_shape *s = &f->p.model->shape;
    const size_t n_q = s->n_heads * s->head_dim, n_kv = s->n_kv_heads * s->head_dim;
    const kvc_view q = view_of(f, row, item->n, 0, s->n_heads);
    const kvc_view k = view_of(f, row, item->n, n_q, s->n_kv_heads);
    const kvc_view v = view_of(f, row, item->n, n_q + n_kv, s->n_kv_heads);
    const kvc_view out =
        kvc_view_packed(f->attn + row * n_q, KVC_DTYPE_F32, item->n, s->n_heads, s->head_dim);

    if (item->hook.touch && !item->hook.touch(item->hook.user, layer, &q, &k, &v, failure))
        return false;
    return (f->p.exact ? attend_exactly : append_and_attend)(f, item, layer, &q, &k, &v, &out,
                                                             failure);
}

static bool run_layer(struct forward *f, size_t layer, const struct forward_item *items,
                      size_t n_items, size_t rows, struct failure *failure)
{
    const struct model_shape *s = &f->p.model->shape;
    const struct model_layer *w = &f->p.model->layers[layer];
    const struct angles *angles = w->is_local ? &f->local_angles : &f->angles;
    const kvc_view heads = view_of(f, 0, rows, 0, s->n_heads + s->n_kv_heads); /* of Q and K */
    size_t row = 0;

    norm(f, f->x, w->attn_norm, rows, false, f->norm);
    product(f, f->norm, w->qkv, rows, s->n_embd, f->n_qkv, false, f->qkv);
    norm_q_and_k(f, w, rows);
    if (!check(kvc_rope_rotate(f->p.ctx, &angles->rope, angles->cosines, angles->sines, &heads,
                               f->rope_ws, f->rope_ws_size),
               "rotating", failure))
        return false;
    for (size_t i = 0; i < n_items; row += items[i].n, i++)
        if (!attend_item(f, &items[i], row, (int32_t)layer, failure))
            return false;
    add_product(f, f->attn, w->attn_out, rows, s->n_heads * s->head_dim, w->attn_post_norm);
    norm(f, f->x, w->ffn_norm, rows, false, f->norm);
    product(f, f->norm, w->gate_up, rows, s->n_embd, 2 * s->n_ff, false, f->gate_up);
    run_loop(
        &(struct loop){.f = f, .body = gate_rows, .n = rows, .in = f->gate_up, .out = f->hidden});
    add_product(f, f->hidden, w->ffn_down, rows, s->n_ff, w->ffn_post_norm);
    return true;
}

/* Moves the rows whose logits are wanted to the front of norm; returns their number. */
static size_t gather_wanted(struct forward *f, const struct forward_item *items, size_t n_items)
{
    const size_t n_embd = f->p.model->shape.n_embd;
    size_t row = 0, n = 0;

    for (size_t i = 0; i < n_items; row += items[i].n, i++) {
        const size_t wanted = items[i].n - items[i].n_skip;
        memcpy(f->norm + n * n_embd, f->x + (row + items[i].n_skip) * n_embd,
               wanted * n_embd * sizeof(float));
        n += wanted;
    }
    return n;
}

bool forward_run(struct forward *f, const struct forward_item *items, size_t n_items, float *logits,
                 struct failure *failure)
{
    const struct model *m = f->p.model;
    size_t rows = 0;

    for (size_t i = 0; i < n_items; i++) {
        if (items[i].n > f->p.max_rows - rows || items[i].n_skip > items[i].n)
            return fail_with(failure, "more tokens than the workspace holds");
        rows += items[i].n;
    }
    rows = 0;
    for (size_t i = 0; i < n_items; rows += items[i].n, i++)
        if (!start_item(f, &items[i], rows, failure))
            return false;
    if (rows == 0)
        return true;
    for (size_t layer = 0; layer < m->shape.n_layers; layer++)
        if (!run_layer(f, layer, items, n_items, rows, failure))
            return false;
    const size_t wanted = gather_wanted(f, items, n_items);
    if (wanted == 0)
        return true;
    norm(f, f->norm, m->output_norm, wanted, false, f->norm);
    product(f, f->norm, m->output, wanted, m->shape.n_embd, m->shape.n_vocab, false, logits);
    return true;
}
