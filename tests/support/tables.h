/* One context for each kernel table that this CPU can run; a cmocka group setup. */
#ifndef KVC_TESTS_TABLES_H
#define KVC_TESTS_TABLES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "kvc/base.h"

enum { MAX_TABLES = 4 };

struct tables {
    size_t n;
    kvc_ctx *ctx[MAX_TABLES]; /* "ref" first */
};

static inline int tables_setup(void **state)
{
    static const char *const names[MAX_TABLES] = {"ref", "avx2", "avx512", "vnni"};
    struct tables *t = calloc(1, sizeof(*t));

    if (t == NULL) {
        return -1;
    }
    for (size_t i = 0; i < MAX_TABLES; i++) {
        const kvc_ctx_params params = {.struct_size = sizeof(params), .kernels = names[i]};
        const kvc_status status = kvc_ctx_create(&params, &t->ctx[t->n]);

        if (status == KVC_OK) {
            print_message("kernel table %s\n", kvc_ctx_kernels(t->ctx[t->n]));
            t->n++;
        } else if (status != KVC_E_UNSUPPORTED || i == 0) {
            return -1;
        }
    }
    *state = t;
    return 0;
}

static inline int tables_teardown(void **state)
{
    struct tables *t = *state;

    for (size_t i = 0; i < t->n; i++) {
        kvc_ctx_destroy(t->ctx[i]);
    }
    free(t);
    return 0;
}

/* The context of the best table, for tests of what no table changes. */
static inline kvc_ctx *best(void **state)
{
    const struct tables *t = *state;

    return t->ctx[t->n - 1];
}

#endif
