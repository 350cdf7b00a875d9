// cudaStream_t and cudaError_t for the launchers' declarations: CUDA's own, or, without CUDA's
// headers, stand-ins that let the declarations compile in a build that never calls them.
#ifndef MOE_KERNELS_BASE_CUDA_TYPES_H_
#define MOE_KERNELS_BASE_CUDA_TYPES_H_

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#else
using cudaStream_t = struct CUstream_st*;
enum cudaError_t : int {};
#endif

#endif  // MOE_KERNELS_BASE_CUDA_TYPES_H_
