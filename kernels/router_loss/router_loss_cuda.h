// The CUDA path of router_loss.h. Internal: plain C++ between router_loss.cc (Abseil) and
// router_loss_cuda.cu (nvcc, no Abseil).
#ifndef MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_CUDA_H_
#define MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_CUDA_H_

#include "kernels/base/cuda_types.h"
#include "kernels/router_loss/loss_terms.h"

namespace moe::router_loss {

// Load balance: a block counts the slots of its experts in shared memory.
constexpr int kMaxExperts = 1024;

// Enqueue on `stream` and return; the error of a launch alone. All pointers are device memory. The
// bits of router_loss_cpu.cc, but for what an exponential or a logarithm decides.
cudaError_t Run(const Balance& balance, cudaStream_t stream);
cudaError_t Run(const ZLoss& z, cudaStream_t stream);
cudaError_t Run(const Entropy& entropy, cudaStream_t stream);

}  // namespace moe::router_loss

#endif  // MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_CUDA_H_
