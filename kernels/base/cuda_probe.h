// Whether this build's kernels run on a device at all.
#ifndef MOE_KERNELS_BASE_CUDA_PROBE_H_
#define MOE_KERNELS_BASE_CUDA_PROBE_H_

#include "kernels/base/cuda_types.h"

namespace moe::cuda {

// cudaErrorNoKernelImageForDevice or similar if this build has no code for the current device's
// architecture. Loads the module: the first call on a device takes a while.
cudaError_t ProbeKernelImage();

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_PROBE_H_
