#include <type_traits>

#include "kernels/base/cuda_elements.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/cast/cast_cuda.h"

namespace moe::cast {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// 16 bytes of it are one access, and as many elements of the wider type are two.
template <typename From, typename To>
using Narrower = std::conditional_t<(sizeof(From) < sizeof(To)), From, To>;

// A thread owns elements.
template <typename From, typename To>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    CastKernel(const From* in, To* out, int64_t n) {
  ForElements<Narrower<From, To>>(
      n,
      [&](int64_t i, auto width) {
        constexpr int kWidth = decltype(width)::value;
        const auto from = LoadElements<kWidth>(in + i);
        Elements<To, kWidth> to;
        for (int j = 0; j < kWidth; ++j) to.at[j] = To(static_cast<float>(from.at[j]));
        StoreElements(to, out + i);
      },
      in, out);
}

}  // namespace

template <typename From, typename To>
cudaError_t Run(const From* in, To* out, int64_t n, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return Launch(&CastKernel<From, To>, ElementShape<Narrower<From, To>>(n), stream, in, out, n);
}

template cudaError_t Run(const float*, BFloat16*, int64_t, cudaStream_t);
template cudaError_t Run(const float*, Float16*, int64_t, cudaStream_t);
template cudaError_t Run(const BFloat16*, float*, int64_t, cudaStream_t);
template cudaError_t Run(const Float16*, float*, int64_t, cudaStream_t);
template cudaError_t Run(const float*, float*, int64_t, cudaStream_t);

}  // namespace moe::cast
