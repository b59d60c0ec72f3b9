/* How a model rotates Q and K, as trained or scaled for longer contexts. */
#include "rotation.h"

#include <string.h>

bool rotation_init(const struct model_shape *shape, const char *scaling, double factor,
                   kvc_rope *out, struct failure *failure)
{
    static const char *const names[] = {"none", "ntk", "yarn"};
    static const kvc_rope_scaling scalings[] = {KVC_ROPE_NONE, KVC_ROPE_NTK, KVC_ROPE_YARN};
    size_t i = 0;

    while (i < 3 && strcmp(scaling, names[i]) != 0)
        i++;
    if (i == 3)
        return fail_with(failure, "\"%.40s\" is no scaling; none, ntk and yarn are", scaling);
    kvc_rope_default(out);
    out->n_dims = (int32_t)shape->n_rot;
    out->layout = shape->rope_layout;
    out->axes = shape->rope_axes;
    for (size_t axis = 0; axis < 3; axis++)
        out->sections[axis] = shape->rope_sections[axis];
    out->base = shape->rope_base;
    out->scaling = scalings[i];
    out->original_context = (int32_t)shape->n_context;
    out->factor = out->scaling == KVC_ROPE_NONE ? 1.0 : factor;
    const kvc_status status = kvc_rope_frequencies(out, NULL, NULL, NULL);
    return status == KVC_OK || fail_with(failure, "cannot scale the positions by %g: %s", factor,
                                         kvc_status_str(status));
}

bool rotation_check_context(const struct model_shape *shape, const kvc_rope *rope, size_t n_tokens,
                            struct failure *failure)
{
    const double most = (double)shape->n_context * rope->factor;

    return (double)n_tokens <= most ||
           fail_with(failure, "%zu tokens pass the model's context of %zu; --rope stretches it",
                     n_tokens, (size_t)most);
}
