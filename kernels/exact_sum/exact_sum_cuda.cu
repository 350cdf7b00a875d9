#include <math.h>

#include <cuda/atomic>

#include "kernels/base/cuda_elements.h"
#include "kernels/base/cuda_fixed_dot.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/exact_sum/exact_sum_op.h"

namespace moe::exact_sum {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A thread owns elements. Those that the grid cannot hold are rare: each thread that found some
// adds their number once, an integer, so that the order does not matter.
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) AccumulateKernel(Accumulate a) {
  int64_t non_finite = 0;
  ForElements<float>(
      a.n,
      [&](int64_t i, auto width) {
        constexpr int kWidth = decltype(width)::value;
        const auto partial = Load<kWidth>(a.partial + i);
        Elements<int64_t, kWidth> sum = {};
        if (a.write == Write::kAdd) sum = LoadElements<kWidth>(a.sum + i);
        for (int j = 0; j < kWidth; ++j) {
          const double q = rint(static_cast<double>(partial.at[j]) * a.inverse_unit);
          const bool is_integer = fabs(q) < 0x1p63;  // a NaN is not
          const int64_t term = is_integer ? static_cast<int64_t>(q) : 0;
          const bool holds = is_integer && term <= a.limit && term >= -a.limit;
          sum.at[j] += holds ? term : 0;
          non_finite += holds ? 0 : 1;
        }
        StoreElements(sum, a.sum + i);
      },
      a.partial, a.sum);
  if (non_finite == 0) return;
  ::cuda::atomic_ref<int64_t, ::cuda::thread_scope_device>(*a.non_finite)
      .fetch_add(non_finite, ::cuda::memory_order_relaxed);
}

// A thread owns elements.
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) ToFloatKernel(ToFloat t) {
  ForElements<float>(
      t.n,
      [&](int64_t i, auto width) {
        constexpr int kWidth = decltype(width)::value;
        const auto sum = LoadElements<kWidth>(t.sum + i);
        Elements<float, kWidth> out;
        for (int j = 0; j < kWidth; ++j) {
          out.at[j] = static_cast<float>(static_cast<double>(sum.at[j]) * t.factor);
        }
        Store(out, t.out + i);
      },
      t.sum, t.out);
}

// Half a warp owns a block of elements, each lane one of its 16 partial sums.
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) SquaresKernel(SumOfSquares s) {
  ForRows<kPartials>(SquaresBlocks(s.n), [&](int64_t block, int lane) {
    const int64_t begin = block * kSquaresBlock;
    const int64_t count = s.n - begin < kSquaresBlock ? s.n - begin : kSquaresBlock;
    const auto sum = FixedSumOf<double>(count, lane, [&](int64_t i, double partial) {
      const auto value = static_cast<double>(s.x[begin + i]);
      return partial + value * value;
    });
    if (lane == 0) s.block_sums[block] = sum;
  });
}

// One warp folds the blocks' sums in ascending order. Its lanes load 32 of them at a time, the next
// 32 while these are added; beyond the last block they hold 0, which changes no bit of a sum of
// squares.
__global__ void __launch_bounds__(kWarpLanes) FoldSquaresKernel(SumOfSquares s) {
  const int64_t blocks = SquaresBlocks(s.n);
  const auto load = [&](int64_t first) {
    const int64_t block = first + threadIdx.x;
    return block < blocks ? s.block_sums[block] : 0.0;
  };
  double total = 0, next = load(0);
  for (int64_t first = 0; first < blocks; first += kWarpLanes) {
    const double sums = next;
    next = load(first + kWarpLanes);
    for (int i = 0; i < kWarpLanes; ++i) total += __shfl_sync(0xffffffffu, sums, i);
  }
  if (threadIdx.x == 0) *s.result = total;
}

}  // namespace

cudaError_t Run(const Accumulate& accumulate, cudaStream_t stream) {
  if (accumulate.n == 0) return cudaSuccess;
  return Launch(&AccumulateKernel, ElementShape<float>(accumulate.n), stream, accumulate);
}

cudaError_t Run(const ToFloat& to_float, cudaStream_t stream) {
  if (to_float.n == 0) return cudaSuccess;
  return Launch(&ToFloatKernel, ElementShape<float>(to_float.n), stream, to_float);
}

cudaError_t Run(const SumOfSquares& squares, cudaStream_t stream) {
  if (squares.n > 0) {
    const LaunchShape shape = RowShape<kPartials>(SquaresBlocks(squares.n));
    const cudaError_t error = Launch(&SquaresKernel, shape, stream, squares);
    if (error != cudaSuccess) return error;
  }
  // No elements still give 0.
  return Launch(&FoldSquaresKernel, {dim3(1), dim3(kWarpLanes)}, stream, squares);
}

}  // namespace moe::exact_sum
