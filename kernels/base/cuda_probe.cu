#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_probe.h"

namespace moe::cuda {
namespace {

__global__ void __launch_bounds__(kWarpLanes) ProbeKernel() {}

}  // namespace

cudaError_t ProbeKernelImage() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&ProbeKernel));
}

}  // namespace moe::cuda
