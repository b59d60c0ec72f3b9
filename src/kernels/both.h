/* both.h - KVC_BOTH marks functions that a CPU and a CUDA device run alike. */
#ifndef KVC_BOTH_H
#define KVC_BOTH_H

#ifdef __CUDACC__
#define KVC_BOTH __host__ __device__
#else
#define KVC_BOTH
#endif

#endif
