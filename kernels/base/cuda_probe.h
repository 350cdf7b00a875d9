// Whether this build's kernels run on a device at all.
#ifndef MOE_KERNELS_BASE_CUDA_PROBE_H_
#define MOE_KERNELS_BASE_CUDA_PROBE_H_

#include "kernels/base/cuda_types.h"

namespace moe::cuda {

// cudaErrorNoKernelImageForDevice and the like where the current device's architecture is none that
// this build was compiled for. Loads the module: the first call on a device takes a while.
cudaError_t ProbeKernelImage();

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_PROBE_H_
