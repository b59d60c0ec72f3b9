/* attend_int8.cu - attention over pages whose K is INT8. */
#include "attend.cuh"

cudaError_t kvc_attend_int8(attend_args &args, cudaStream_t stream)
{
    return launch_by_values<KVC_INT8>(args, stream);
}
