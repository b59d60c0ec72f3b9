/* attend_int4.cu - attention over pages whose K is INT4. */
#include "attend.cuh"

cudaError_t kvc_attend_int4(attend_args &args, cudaStream_t stream)
{
    return launch_by_values<KVC_INT4>(args, stream);
}
