/* ctx.c - contexts, statuses, the version. */
#include "ctx.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

const char *kvc_status_str(kvc_status status)
{
    switch (status) {
    case KVC_OK: return "ok";
    case KVC_E_ARG: return "invalid argument";
    case KVC_E_UNSUPPORTED: return "not supported by this build, CPU or device";
    case KVC_E_NOMEM: return "out of memory";
    case KVC_E_WORKSPACE: return "workspace missing, too small or misaligned";
    case KVC_E_FULL: return "the cache is full";
    case KVC_E_NONFINITE: return "NaN or infinity in strict mode";
    case KVC_E_FORMAT: return "damaged, truncated or of another version";
    case KVC_E_MISMATCH: return "made for another geometry or configuration";
    case KVC_E_DEVICE: return "device error";
    }
    return "unknown status";
}

int kvc_version(void)
{
    return KVC_VERSION_MAJOR * 10000 + KVC_VERSION_MINOR * 100 + KVC_VERSION_PATCH;
}

static void *default_alloc(void *user, size_t size, size_t align)
{
    (void)user;
    if (size > SIZE_MAX - align)
        return NULL;
    return aligned_alloc(align, (size + align - 1) / align * align);
}

static void default_free(void *user, void *ptr)
{
    (void)user;
    free(ptr);
}

/* The table of that name, the best one for NULL; NULL if this machine cannot run it. */
static const struct kvc_kernels *find_table(const char *name)
{
    for (const struct kvc_kernels *const *k = kvc_kernels_available(); *k; k++)
        if (!name || strcmp((*k)->name, name) == 0)
            return *k;
    return NULL;
}

static bool is_table_name(const char *name)
{
    return strcmp(name, "ref") == 0 || strcmp(name, "avx2") == 0 || strcmp(name, "avx512") == 0 ||
           strcmp(name, "vnni") == 0;
}

kvc_status kvc_ctx_create(const kvc_ctx_params *params, kvc_ctx **out)
{
    kvc_ctx_params p = {.struct_size = sizeof(p)};

    KVC_CHECK(out, KVC_E_ARG);
    *out = NULL;
    if (params)
        KVC_TRY(kvc_struct_read(&p, sizeof(p), params, sizeof(p)));
    KVC_CHECK(!p.allocator.alloc == !p.allocator.free, KVC_E_ARG);
    KVC_CHECK(!p.kernels || is_table_name(p.kernels), KVC_E_ARG);
    const struct kvc_kernels *k = find_table(p.kernels);
    KVC_CHECK(k, KVC_E_UNSUPPORTED);

    const kvc_allocator heap = {default_alloc, default_free, NULL};
    const kvc_allocator mem = p.allocator.alloc ? p.allocator : heap;
    kvc_ctx *ctx = mem.alloc(mem.user, sizeof(*ctx), _Alignof(max_align_t));
    KVC_CHECK(ctx, KVC_E_NOMEM);
    *ctx = (kvc_ctx){
        .k = k,
        .queue = {.device = -1},
        .mem = mem,
        .parallel_for = p.parallel_for,
        .parallel_user = p.parallel_user,
    };
    *out = ctx;
    return KVC_OK;
}

void kvc_ctx_destroy(kvc_ctx *ctx)
{
    if (ctx)
        ctx->mem.free(ctx->mem.user, ctx);
}

const char *kvc_ctx_kernels(const kvc_ctx *ctx)
{
    return ctx ? ctx->k->name : "";
}
