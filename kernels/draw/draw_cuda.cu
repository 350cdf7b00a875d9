#include "kernels/base/cuda_thrust.h"
#include "kernels/draw/draw_op.h"

namespace moe::draw {

template <typename T>
cudaError_t Run(const Uniform<T>& uniform, cudaStream_t stream) {
  return cuda::Tabulate(uniform.values, uniform.count, uniform, stream);
}

template <typename T>
cudaError_t Run(const Normal<T>& normal, cudaStream_t stream) {
  return cuda::Tabulate(normal.values, normal.count, normal, stream);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Uniform, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Normal, cudaStream_t)

}  // namespace moe::draw
