/* attend_f16.cu - attention over pages whose K is F16. */
#include "attend.cuh"

cudaError_t kvc_attend_f16(attend_args &args, cudaStream_t stream)
{
    if (args.family.layout[0].v_row_major)
        return launch_by_size<KVC_F16, KVC_F16, true>(args, stream);
    return launch_by_values<KVC_F16>(args, stream);
}
