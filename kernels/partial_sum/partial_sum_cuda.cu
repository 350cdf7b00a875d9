#include "kernels/base/cuda_elements.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/partial_sum/partial_sum_cuda.h"

namespace moe::partial_sum {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A thread owns elements.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    AddPartialKernel(const T* partial, T* acc, int64_t n) {
  ForElements<T>(
      n,
      [&](int64_t i, auto width) {
        constexpr int kWidth = decltype(width)::value;
        const auto received = Load<kWidth>(partial + i);
        auto sum = Load<kWidth>(acc + i);
        for (int j = 0; j < kWidth; ++j) sum.at[j] = received.at[j] + sum.at[j];
        Store(sum, acc + i);
      },
      partial, acc);
}

}  // namespace

template <typename T>
cudaError_t Run(const T* partial, T* acc, int64_t n, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return Launch(&AddPartialKernel<T>, ElementShape<T>(n), stream, partial, acc, n);
}

template cudaError_t Run(const float*, float*, int64_t, cudaStream_t);
template cudaError_t Run(const uint64_t*, uint64_t*, int64_t, cudaStream_t);

}  // namespace moe::partial_sum
