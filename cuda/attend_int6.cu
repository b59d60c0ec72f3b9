/* attend_int6.cu - attention over pages whose K is INT6. */
#include "attend.cuh"

cudaError_t kvc_attend_int6(attend_args &args, cudaStream_t stream)
{
    return launch_by_values<KVC_INT6>(args, stream);
}
