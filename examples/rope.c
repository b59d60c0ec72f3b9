/* Positions of a prompt with an image, and cached keys moved to a scaling for longer contexts. */
#include <kvc/kvc.h>
#include <kvc/rope.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { HEADS = 2, DIM = 64, MAX_TOKENS = 64 };

/* Text, an image of 8 x 12 patches of which 2 x 2 make a token, a question. Returns the tokens. */
static size_t make_positions(int32_t positions[][3], int64_t *next)
{
    const kvc_rope_segment prompt[] = {
        {.n_text = 3},
        {.n_frames = 1, .n_rows = 8, .n_cols = 12, .merge = 2},
        {.n_text = 4},
    };
    size_t n = 0;
    int64_t delta = 0;

    if (kvc_rope_positions(prompt, 3, KVC_ROPE_IDS_MROPE, 0, positions[0], MAX_TOKENS, &n, next,
                           &delta) != KVC_OK)
        return 0;
    printf("%zu tokens; the next one is at %lld, %lld less than their number\n", n,
           (long long)*next, (long long)-delta);
    printf("last patch at (%d, %d, %d), question at (%d, %d, %d)\n", positions[26][0],
           positions[26][1], positions[26][2], positions[27][0], positions[27][1],
           positions[27][2]);
    return n;
}

static float largest_difference(const float *a, const float *b, size_t n)
{
    float most = 0.0f;
    for (size_t i = 0; i < n; i++)
        most = fmaxf(most, fabsf(a[i] - b[i]));
    return most;
}

int main(void)
{
    static float keys[MAX_TOKENS * HEADS * DIM], direct[MAX_TOKENS * HEADS * DIM];
    static _Alignas(64) unsigned char ws[1 << 15];
    int32_t positions[MAX_TOKENS][3];
    int64_t next = 0;
    size_t ws_size = 0;
    kvc_rope trained, longer;
    kvc_ctx *ctx = NULL;

    const size_t n = make_positions(positions, &next);
    if (n != 31 || next != 13)
        return 1;

    kvc_rope_default(&trained);
    trained.n_dims = DIM;
    trained.axes = KVC_ROPE_AXES_CONTIGUOUS;
    trained.sections[0] = 8, trained.sections[1] = trained.sections[2] = 12;
    longer = trained;
    longer.scaling = KVC_ROPE_NTK;
    longer.factor = 2.0;

    for (size_t i = 0; i < n * HEADS * DIM; i++)
        keys[i] = (float)(i * 31 % 97) / 48.0f - 1.0f;
    memcpy(direct, keys, sizeof(keys));
    const kvc_view k = kvc_view_packed(keys, KVC_DTYPE_F32, n, HEADS, DIM);
    const kvc_view d = kvc_view_packed(direct, KVC_DTYPE_F32, n, HEADS, DIM);
    const int32_t *p = positions[0];

    kvc_status status = kvc_ctx_create(NULL, &ctx);
    if (status == KVC_OK)
        status = kvc_rope_workspace_size(&longer, &ws_size);
    if (status == KVC_OK && ws_size > sizeof(ws))
        status = KVC_E_WORKSPACE;
    if (status == KVC_OK) /* what an engine has put into its cache */
        status = kvc_rope_apply(ctx, &trained, p, &k, ws, sizeof(ws));
    if (status == KVC_OK) /* the prompt becomes too long: turn the keys, do not run it again */
        status = kvc_rope_rebase(ctx, &trained, &longer, p, NULL, &k, ws, sizeof(ws));
    if (status == KVC_OK) /* as if the model had known from the start */
        status = kvc_rope_apply(ctx, &longer, p, &d, ws, sizeof(ws));
    kvc_ctx_destroy(ctx);
    if (status != KVC_OK) {
        fprintf(stderr, "%s\n", kvc_status_str(status));
        return 1;
    }
    const float most = largest_difference(keys, direct, n * HEADS * DIM);
    printf("rebased keys differ from those rotated anew by at most %.2g\n", (double)most);
    return most > 1e-6f;
}
