/* Random calls, faulty ones too, on caches of random shapes, each compared with a plain model.
 * Arguments: number of operations, seed. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/random_input.h"
#include "support/tables.h"

enum {
    OPS_OF_A_CACHE = 400,
    MAX_APPEND = 150,
    MAX_TOKENS = 1024,
    MAX_QUERIES = 20,
    MAX_DIM = 40,
    /* Of one tensor: all tokens, 12 heads, pads. */
    MAX_ELEMENTS = MAX_APPEND * 3 * (MAX_DIM + 8) + MAX_QUERIES * 12 * (MAX_DIM + 8)
};

struct run {
    struct cache_model m;
    uint64_t rng;
    kvc_seq stale;
    long n_done, n_full, n_added;
};

static long wanted_ops = 100000;
static uint64_t wanted_seed = 1;

/* What a failure prints. */
static struct {
    uint64_t seed;
    long op;
    const char *name;
    bool running;
} where;

/* A call that failed left every byte of the budget where it was. */
static void expect_unchanged(const struct run *r, const kvc_stats *before)
{
    const kvc_stats after = drive_stats(&r->m);

    assert_memory_equal(&after, before, sizeof(after));
}

/* The same; where only room was missing, transforms may have been measured. */
static void expect_refused(struct run *r, const kvc_stats *before, kvc_status status)
{
    const bool waited = !r->m.ready;
    const kvc_stats after = drive_stats(&r->m);

    if (status == KVC_E_FULL)
        model_take_over(&r->m);
    if (!waited || !r->m.ready)
        expect_unchanged(r, before);
    assert_int_equal(after.used_bytes, before->used_bytes);
    r->n_full += status == KVC_E_FULL;
}

static struct model_seq *any_seq(struct run *r)
{
    struct model_seq *alive[MODEL_MAX_SEQS];
    int n = 0;

    for (int i = 0; i < MODEL_MAX_SEQS; i++)
        if (r->m.seqs[i].handle != 0)
            alive[n++] = &r->m.seqs[i];
    return n ? alive[pick(&r->rng, 0, n - 1)] : NULL;
}

static int n_alive(const struct run *r)
{
    int n = 0;

    for (int i = 0; i < MODEL_MAX_SEQS; i++)
        n += r->m.seqs[i].handle != 0;
    return n;
}

static int64_t n_tokens_of_all(const struct run *r)
{
    int64_t n = 0;

    for (int i = 0; i < MODEL_MAX_SEQS; i++)
        n += r->m.seqs[i].n_tokens;
    return n;
}

/* Many short pages may exhaust the page table; a usual sequence may not. */
static bool usual_pages(const struct model_seq *s)
{
    return s->n_pages <= s->n_tokens / KVC_PAGE_TOKENS + 2;
}

static bool all_usual(const struct run *r)
{
    for (int i = 0; i < MODEL_MAX_SEQS; i++)
        if (r->m.seqs[i].handle != 0 &&
            (!usual_pages(&r->m.seqs[i]) || r->m.seqs[i].hold != MODEL_NO_HOLD))
            return false;
    return true;
}

static void op_create(struct run *r)
{
    kvc_seq handle = 1;
    const kvc_status status = kvc_seq_create(r->m.cache, &handle);

    if (n_alive(r) == r->m.params.max_sequences) {
        assert_int_equal(status, KVC_E_FULL);
        assert_int_equal(handle, 0);
        return;
    }
    assert_int_equal(status, KVC_OK);
    assert_int_not_equal(handle, 0);
    model_seq_begin(&r->m, model_free_slot(&r->m), handle);
}

static void op_fork(struct run *r, struct model_seq *s)
{
    const kvc_stats before = drive_stats(&r->m);
    kvc_seq handle = 1;
    const kvc_status status = kvc_seq_fork(r->m.cache, s->handle, &handle);
    const bool must_fail = n_alive(r) == r->m.params.max_sequences ||
                           n_tokens_of_all(r) + s->n_tokens > r->m.params.max_tokens;

    if (!model_complete(&r->m, s))
        assert_int_equal(status, KVC_E_ARG);
    else if (must_fail)
        assert_int_equal(status, KVC_E_FULL);
    else if (all_usual(r))
        assert_int_equal(status, KVC_OK);
    if (status == KVC_OK) {
        assert_int_not_equal(handle, 0);
        model_fork(&r->m, model_free_slot(&r->m), s, handle);
    } else {
        assert_int_equal(handle, 0);
        expect_unchanged(r, &before);
    }
}

static void op_destroy(struct run *r, struct model_seq *s)
{
    assert_int_equal(kvc_seq_destroy(r->m.cache, s->handle), KVC_OK);
    r->stale = s->handle;
    model_seq_end(s);
}

static void op_add(struct run *r, struct model_seq *s)
{
    static kvc_token facts[MAX_APPEND + 1];
    const kvc_stats before = drive_stats(&r->m);
    const int max = r->m.params.max_append;
    const int to_border = KVC_PAGE_TOKENS - (int)((s->n_tokens - r->m.params.sink_tokens) & 63);
    size_t n = (size_t)(chance(&r->rng, 3) ? 1 : pick(&r->rng, 0, max));
    bool wrong = !model_complete(&r->m, s);
    const kvc_token *tokens = NULL;
    bool must_fail;
    kvc_status status;

    if (to_border <= max && chance(&r->rng, 3))
        n = (size_t)to_border; /* full pages are where pages are shared and sealed */
    if (chance(&r->rng, 30)) {
        n = (size_t)max + 1;
        wrong = true;
    }
    if (n > 0 && chance(&r->rng, 3)) {
        tokens = facts;
        random_tokens(&r->rng, model_next_position(s), facts, n);
        if (chance(&r->rng, 10)) {
            spoil_token(&r->rng, &facts[rng_below(&r->rng, n)]);
            wrong = true;
        }
    }
    must_fail = n_tokens_of_all(r) + (int64_t)n > r->m.params.max_tokens ||
                (s->hold != MODEL_NO_HOLD &&
                 s->n_tokens + (int64_t)n - s->hold > r->m.params.max_hold_tokens);
    status = kvc_tokens_add(r->m.cache, s->handle, tokens, n);
    if (wrong)
        assert_int_equal(status, KVC_E_ARG);
    else if (must_fail)
        assert_int_equal(status, KVC_E_FULL);
    else if (model_n_to_seal(&r->m, s) == 0 && all_usual(r))
        assert_int_equal(status, KVC_OK);
    else
        assert_true(status == KVC_OK || status == KVC_E_FULL);
    if (status == KVC_OK) {
        model_tokens_add(&r->m, s, tokens, (int64_t)n);
        r->n_added++;
    } else {
        expect_refused(r, &before, status);
    }
}

static void op_append(struct run *r, struct model_seq *s)
{
    static uint32_t k_data[MAX_ELEMENTS], v_data[MAX_ELEMENTS];
    const kvc_cache_params *p = &r->m.params;
    const int layer = pick(&r->rng, 0, p->n_layers - 1);
    const int64_t missing = s->n_tokens - s->appended[layer];
    const size_t n = (size_t)(chance(&r->rng, 2) ? missing : pick(&r->rng, 1, (int)missing + 1));
    const kvc_view k = random_view(&r->rng, k_data, n, p->n_kv_heads, p->head_dim_k);
    const kvc_view v = random_view(&r->rng, v_data, n, p->n_kv_heads, p->head_dim_v);
    bool nonfinite = false;
    kvc_status status;

    if (n == 0 || n > MAX_APPEND)
        return;
    fill_view(&k, &r->rng, random_scale(&r->rng));
    fill_view(&v, &r->rng, random_scale(&r->rng));
    if (chance(&r->rng, 12))
        nonfinite = spoil_view(&r->rng, chance(&r->rng, 2) ? &k : &v);
    status = kvc_append(r->m.cache, s->handle, layer, &k, &v);
    if ((int64_t)n > missing)
        assert_int_equal(status, KVC_E_ARG);
    else if (nonfinite && p->strict)
        assert_int_equal(status, KVC_E_NONFINITE);
    else
        assert_int_equal(status, KVC_OK);
    if (status == KVC_OK)
        model_append(&r->m, s, layer, &k, &v);
}

static kvc_attend_options random_options(struct run *r)
{
    kvc_attend_options options = {.struct_size = 0};

    kvc_attend_options_default(r->m.cache, &options);
    assert_true(fabsf(options.scale - 1 / sqrtf((float)r->m.params.head_dim_k)) < 1e-6f);
    if (chance(&r->rng, 3))
        options.scale *= chance(&r->rng, 4) ? -1.0f : 0.5f;
    if (chance(&r->rng, 4))
        options.softcap = (float)pick(&r->rng, 1, 30);
    if (chance(&r->rng, 4))
        options.window = pick(&r->rng, 1, 200);
    options.accumulate = chance(&r->rng, 2);
    return options;
}

struct attend_call {
    kvc_view q, out;
    float lse[MAX_QUERIES * 12];
    uint32_t q_data[MAX_ELEMENTS], out_data[MAX_ELEMENTS];
};

static void prepare_attend(struct run *r, const struct model_seq *s, struct attend_call *call)
{
    const kvc_cache_params *p = &r->m.params;
    int n_q = chance(&r->rng, 2) ? 1 : pick(&r->rng, 1, chance(&r->rng, 4) ? MAX_QUERIES : 4);

    if (n_q > s->n_tokens && s->n_tokens > 0)
        n_q = (int)s->n_tokens;
    memset(call->out_data, 0x5a, sizeof(call->out_data));
    call->q = random_view(&r->rng, call->q_data, (size_t)n_q, p->n_heads, p->head_dim_k);
    call->out = random_view(&r->rng, call->out_data, (size_t)n_q, p->n_heads, p->head_dim_v);
    fill_view(&call->q, &r->rng, chance(&r->rng, 4) ? 3 : 1);
}

/* Overwrites the elements of the view: then all bytes must be as before the call. */
static void expect_pads_untouched(struct attend_call *call)
{
    const size_t size = dtype_size(call->out.dtype);
    unsigned char *bytes = (unsigned char *)call->out_data;

    for (size_t t = 0; t < call->out.n_tokens; t++)
        for (size_t h = 0; h < call->out.n_heads; h++)
            memset(bytes + (t * call->out.token_stride + h * call->out.head_stride) * size, 0x5a,
                   call->out.head_dim * size);
    for (size_t i = 0; i < sizeof(call->out_data); i++)
        if (bytes[i] != 0x5a)
            fail_msg("a byte between the rows of out was written");
}

static void check_attended(struct run *r, struct model_seq *s, int layer,
                           const kvc_attend_options *options, struct attend_call *call,
                           bool has_lse)
{
    const size_t row = rng_below(&r->rng, call->q.n_tokens);

    check_attention(&r->m, s, layer, &call->q, row, options, &call->out,
                    has_lse ? call->lse : NULL);
    model_attended(&r->m, s, layer, &call->q, options);
    expect_pads_untouched(call);
}

static void op_attend(struct run *r, struct model_seq *s)
{
    static struct attend_call call;
    const int layer = pick(&r->rng, 0, r->m.params.n_layers - 1);
    const kvc_attend_options options = random_options(r);
    const bool has_lse = chance(&r->rng, 2);
    kvc_status status;

    prepare_attend(r, s, &call);
    status = kvc_attend(r->m.cache, s->handle, layer, &call.q, &options, &call.out,
                        has_lse ? call.lse : NULL);
    if (s->n_tokens == 0 || s->appended[layer] != s->n_tokens) {
        assert_int_equal(status, KVC_E_ARG);
        memset(&call.out, 0, sizeof(call.out));
        expect_pads_untouched(&call);
        return;
    }
    assert_int_equal(status, KVC_OK);
    check_attended(r, s, layer, &options, &call, has_lse);
}

static void op_attend_batch(struct run *r)
{
    static struct attend_call calls[MODEL_MAX_SEQS];
    kvc_attend_item items[MODEL_MAX_SEQS];
    struct model_seq *seqs[MODEL_MAX_SEQS];
    const int layer = pick(&r->rng, 0, r->m.params.n_layers - 1);
    const kvc_attend_options options = random_options(r);
    bool wrong = false;
    size_t n = 0;
    kvc_status status;

    for (int i = 0; i < MODEL_MAX_SEQS; i++) {
        struct model_seq *s = &r->m.seqs[i];

        if (s->handle == 0 || chance(&r->rng, 3))
            continue;
        wrong = wrong || s->n_tokens == 0 || s->appended[layer] != s->n_tokens;
        prepare_attend(r, s, &calls[n]);
        seqs[n] = s;
        items[n] = (kvc_attend_item){.struct_size = sizeof(items[n]),
                                     .seq = s->handle,
                                     .q = &calls[n].q,
                                     .out = &calls[n].out,
                                     .lse = calls[n].lse};
        n++;
    }
    if (n > 1 && chance(&r->rng, 20)) {
        items[0].seq = items[n - 1].seq;
        wrong = true;
    }
    status = kvc_attend_batch(r->m.cache, layer, items, n, &options);
    assert_int_equal(status, wrong ? KVC_E_ARG : KVC_OK);
    for (size_t i = 0; i < n && !wrong; i++)
        check_attended(r, seqs[i], layer, &options, &calls[i], true);
}

static void op_truncate(struct run *r, struct model_seq *s)
{
    const int64_t keep =
        chance(&r->rng, 2)
            ? pick(&r->rng, 0, (int)s->n_tokens)
            : s->n_tokens - pick(&r->rng, 0, (int)(s->n_tokens < 9 ? s->n_tokens : 9));

    assert_int_equal(kvc_seq_truncate(r->m.cache, s->handle, s->n_tokens + 1), KVC_E_ARG);
    assert_int_equal(kvc_seq_truncate(r->m.cache, s->handle, keep), KVC_OK);
    model_truncate(&r->m, s, keep);
}

static void op_remove(struct run *r, struct model_seq *s)
{
    const int64_t first = pick(&r->rng, 0, (int)s->n_tokens);
    const int64_t last = chance(&r->rng, 4) ? pick(&r->rng, (int)first, (int)s->n_tokens)
                                            : (first + 9 < s->n_tokens ? first + 9 : s->n_tokens);
    const kvc_stats before = drive_stats(&r->m);
    const kvc_status status = kvc_seq_remove(r->m.cache, s->handle, first, last);

    if (!model_complete(&r->m, s)) {
        assert_int_equal(status, KVC_E_ARG);
        expect_unchanged(r, &before);
        return;
    }
    assert_int_equal(status, KVC_OK);
    model_remove(&r->m, s, first, last);
}

static void op_hold(struct run *r, struct model_seq *s)
{
    const kvc_status status = kvc_seq_hold(r->m.cache, s->handle);

    assert_int_equal(status, r->m.params.max_hold_tokens > 0 ? KVC_OK : KVC_E_ARG);
    if (status == KVC_OK)
        model_hold(s);
}

static void op_settle(struct run *r, struct model_seq *s)
{
    const kvc_stats before = drive_stats(&r->m);
    const kvc_status status = kvc_seq_settle(r->m.cache, s->handle);

    if (!model_complete(&r->m, s))
        assert_int_equal(status, KVC_E_ARG);
    else if (model_n_to_seal(&r->m, s) == 0)
        assert_int_equal(status, KVC_OK);
    if (status == KVC_OK) {
        model_settle(&r->m, s);
    } else {
        expect_refused(r, &before, status);
    }
}

static void op_compress(struct run *r, struct model_seq *s)
{
    const kvc_stats before = drive_stats(&r->m);
    kvc_report report = {.struct_size = sizeof(report)};
    const kvc_status status =
        kvc_cache_compress(r->m.cache, s->handle, NULL, chance(&r->rng, 4) ? NULL : &report, NULL);
    const kvc_stats after = drive_stats(&r->m);

    if (!model_complete(&r->m, s))
        assert_int_equal(status, KVC_E_ARG);
    else
        assert_true(status == KVC_OK || status == KVC_E_FULL);
    if (status != KVC_OK) {
        expect_refused(r, &before, status);
        return;
    }
    model_compress(&r->m, s);
    if (report.bytes_before != 0) {
        assert_int_equal(report.bytes_before, before.used_bytes);
        assert_int_equal(report.bytes_after, after.used_bytes);
        assert_true(report.n_pages_compacted >= 0 && report.n_pages_sealed >= 0);
    }
}

/* A handle that is not alive, in each call. */
static void op_stale(struct run *r)
{
    const kvc_seq bad[] = {r->stale, 0, UINT64_MAX};
    const kvc_seq seq = bad[pick(&r->rng, 0, 2)];
    kvc_cache *cache = r->m.cache;
    static float x[MAX_DIM * 12];
    const kvc_view k = kvc_view_packed(x, KVC_DTYPE_F32, 1, (size_t)r->m.params.n_kv_heads,
                                       (size_t)r->m.params.head_dim_k);
    const kvc_view v = kvc_view_packed(x, KVC_DTYPE_F32, 1, (size_t)r->m.params.n_kv_heads,
                                       (size_t)r->m.params.head_dim_v);
    kvc_seq out = 1;
    size_t n;

    assert_int_equal(kvc_seq_fork(cache, seq, &out), KVC_E_ARG);
    assert_int_equal(out, 0);
    assert_int_equal(kvc_seq_destroy(cache, seq), KVC_E_ARG);
    assert_int_equal(kvc_seq_truncate(cache, seq, 0), KVC_E_ARG);
    assert_int_equal(kvc_seq_remove(cache, seq, 0, 0), KVC_E_ARG);
    assert_int_equal(kvc_seq_hold(cache, seq), KVC_E_ARG);
    assert_int_equal(kvc_seq_settle(cache, seq), KVC_E_ARG);
    assert_int_equal(kvc_tokens_add(cache, seq, NULL, 0), KVC_E_ARG);
    assert_int_equal(kvc_append(cache, seq, 0, &k, &v), KVC_E_ARG);
    assert_int_equal(kvc_cache_compress(cache, seq, NULL, NULL, NULL), KVC_E_ARG);
    assert_int_equal(kvc_seq_read_rows(cache, seq, 0, 0, 0, NULL, NULL, NULL, NULL, &n), KVC_E_ARG);
    assert_int_equal(kvc_seq_n_tokens(cache, seq), -1);
    assert_int_equal(kvc_seq_next_position(cache, seq), -1);
    assert_int_equal(kvc_seq_n_rows(cache, seq, 0, 0), -1);
    assert_int_equal(kvc_seq_n_pages(cache, seq, 0, 0), -1);
}

/* Views and indices that are wrong. */
static void op_wrong(struct run *r, struct model_seq *s)
{
    static uint32_t data[MAX_ELEMENTS];
    const kvc_cache_params *p = &r->m.params;
    kvc_view k = random_view(&r->rng, data, 1, p->n_kv_heads, p->head_dim_k);
    kvc_view v = random_view(&r->rng, data, 1, p->n_kv_heads, p->head_dim_v);
    kvc_view *spoilt = chance(&r->rng, 2) ? &k : &v;
    int layer = 0;

    switch (pick(&r->rng, 0, 8)) {
    case 0: spoilt->struct_size = 8; break;
    case 1: spoilt->data = NULL; break;
    case 2: spoilt->dtype = (kvc_dtype)3; break;
    case 3: spoilt->n_tokens++; break;
    case 4: spoilt->n_heads++; break;
    case 5: spoilt->head_dim++; break;
    case 6: spoilt->head_stride = spoilt->head_dim - 1; break;
    case 7: layer = p->n_layers; break;
    default: layer = -1; break;
    }
    assert_int_equal(kvc_append(r->m.cache, s->handle, layer, &k, &v), KVC_E_ARG);
    assert_int_equal(kvc_seq_remove(r->m.cache, s->handle, 0, s->n_tokens + 1), KVC_E_ARG);
    assert_int_equal(kvc_seq_truncate(r->m.cache, s->handle, -1), KVC_E_ARG);
    assert_int_equal(kvc_cache_set_precision(r->m.cache, -1, -1, &p->precision), KVC_E_ARG);
    assert_int_equal(kvc_seq_n_rows(r->m.cache, s->handle, p->n_layers, 0), -1);
    assert_int_equal(kvc_seq_n_pages(r->m.cache, s->handle, 0, p->n_kv_heads), -1);
}

static int random_dim(struct run *r)
{
    return pick(&r->rng, 1, chance(&r->rng, 4) ? MAX_DIM : 12);
}

static void open_random(struct run *r, kvc_ctx *ctx)
{
    static float mean[3 * 3 * MAX_DIM], scale[3 * 3 * MAX_DIM];
    kvc_cache_params p;
    size_t page;

    kvc_cache_params_default(&p);
    p.n_layers = pick(&r->rng, 1, 3);
    p.n_kv_heads = pick(&r->rng, 1, 3);
    p.n_heads = p.n_kv_heads * pick(&r->rng, 1, 4);
    p.head_dim_k = random_dim(r);
    p.head_dim_v = random_dim(r);
    p.max_sequences = pick(&r->rng, 1, MODEL_MAX_SEQS - 1);
    p.max_tokens = pick(&r->rng, 100, MAX_TOKENS);
    p.max_append = pick(&r->rng, 1, MAX_APPEND);
    p.max_hold_tokens = chance(&r->rng, 2) ? 0 : pick(&r->rng, 1, 200);
    p.probe_rows = chance(&r->rng, 3) ? 0 : pick(&r->rng, 1, 20);
    p.precision = random_precision(&r->rng);
    p.scale_window = 64 * pick(&r->rng, 1, 2);
    p.recent_tokens = chance(&r->rng, 2) ? 0 : pick(&r->rng, 0, 200);
    p.sink_tokens = pick(&r->rng, 0, 5);
    p.score_mode = (kvc_score_mode)pick(&r->rng, 0, 2);
    p.strict = chance(&r->rng, 6);
    if (chance(&r->rng, 2))
        random_transform(&r->rng, &p, mean, scale);
    assert_int_equal(kvc_cache_min_budget(&p, &p.budget_bytes), KVC_OK);
    page = (size_t)(KVC_PAGE_TOKENS * 2 * (p.head_dim_k + p.head_dim_v + 16));
    p.budget_bytes +=
        rng_below(&r->rng, page * (size_t)(p.n_layers * p.n_kv_heads * pick(&r->rng, 1, 10)));
    r->stale = 0;
    model_open(&r->m, ctx, &p);
    for (int layer = 0; layer < p.n_layers; layer++)
        for (int head = 0; head < p.n_kv_heads && chance(&r->rng, 2); head++)
            model_set_precision(&r->m, layer, head, random_precision(&r->rng));
}

static void random_op(struct run *r)
{
    struct model_seq *s = any_seq(r);
    const int op = pick(&r->rng, 0, 99);

    if (!s || op < 2) {
        where.name = "create";
        op_create(r);
        return;
    }
    /* Rows that are missing forbid most other calls. */
    if (!model_complete(&r->m, s) && op < 85) {
        where.name = "append";
        op_append(r, s);
    } else if (op < 45) {
        where.name = "add";
        op_add(r, s);
    } else if (op < 70) {
        where.name = "attend";
        op_attend(r, s);
    } else if (op < 74) {
        where.name = "attend_batch";
        op_attend_batch(r);
    } else if (op < 79) {
        where.name = "truncate";
        op_truncate(r, s);
    } else if (op < 84) {
        where.name = "remove";
        op_remove(r, s);
    } else if (op < 86) {
        where.name = "hold";
        op_hold(r, s);
    } else if (op < 88) {
        where.name = "settle";
        op_settle(r, s);
    } else if (op < 92) {
        where.name = "compress";
        op_compress(r, s);
    } else if (op < 94) {
        where.name = "fork";
        op_fork(r, s);
    } else if (op < 96) {
        where.name = "destroy";
        op_destroy(r, s);
    } else if (op < 98) {
        where.name = "stale handle";
        op_stale(r);
    } else {
        where.name = "wrong argument";
        op_wrong(r, s);
    }
}

/* The sequences in turn, one head each, so that a call that spoils another sequence is seen soon.
 */
static void check_something(struct run *r)
{
    struct model_seq *s = any_seq(r);
    const int layer = pick(&r->rng, 0, r->m.params.n_layers - 1);
    const int head = pick(&r->rng, 0, r->m.params.n_kv_heads - 1);

    check_stats(&r->m);
    if (!s)
        return;
    check_counts(&r->m, s);
    check_rows(&r->m, s, layer, head);
    if (model_complete(&r->m, s))
        check_pages(&r->m, s, layer, head);
}

static void random_calls_match_the_model(void **state)
{
    const struct tables *tables = *state;
    static struct run run;

    run.n_done = run.n_full = run.n_added = 0;
    for (uint64_t i = 0; run.n_done < wanted_ops; i++) {
        run.rng = where.seed = wanted_seed + i;
        where.running = true;
        open_random(&run, tables->ctx[where.seed % tables->n]);
        for (where.op = 0; where.op < OPS_OF_A_CACHE; where.op++, run.n_done++) {
            random_op(&run);
            check_something(&run);
            if (where.op % 100 == 99)
                check_all(&run.m);
        }
        model_close(&run.m);
        where.running = false;
    }
    print_message("%ld operations, %ld times tokens added, %ld times full\n", run.n_done,
                  run.n_added, run.n_full);
    /* Otherwise the comparison would prove little. */
    assert_true(run.n_added > run.n_done / 20);
    assert_true(wanted_ops < 10000 || run.n_full > run.n_done / 200);
}

static int report_seed(void **state)
{
    (void)state;
    if (where.running)
        print_message("failed after %s, operation %ld; repeat with: test_cache_random %d %" PRIu64
                      "\n",
                      where.name, where.op, OPS_OF_A_CACHE, where.seed);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(random_calls_match_the_model, report_seed),
    };

    if (argc > 1)
        wanted_ops = strtol(argv[1], NULL, 10);
    if (argc > 2)
        wanted_seed = strtoull(argv[2], NULL, 10);
    return cmocka_run_group_tests(tests, tables_setup, tables_teardown);
}
