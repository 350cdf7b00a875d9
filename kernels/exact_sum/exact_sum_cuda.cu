#include <math.h>

#include <cuda/atomic>

#include "kernels/base/cuda_fixed_dot.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/exact_sum/exact_sum_op.h"
#include "kernels/exact_sum/exact_term_cuda.h"

namespace moe::exact_sum {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A thread owns elements.
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) AccumulateKernel(Accumulate a) {
  ThreadTally tally;
  ForElements<float>(
      a.n,
      [&](int64_t i, auto width) {
        constexpr int kWidth = decltype(width)::value;
        const auto partial = Load<kWidth>(a.partial + i);
        Elements<int64_t, kWidth> sum = {};
        if (a.write == Write::kAdd) sum = LoadElements<kWidth>(a.sum + i);
        for (int j = 0; j < kWidth; ++j) {
          sum.at[j] += ExactTerm(partial.at[j], a.inverse_unit, a.limit, tally);
        }
        StoreElements(sum, a.sum + i);
      },
      a.partial, a.sum);
  AddTally(tally, a.tally);
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

// Half a warp owns a unit; each lane holds one of the 16 partial sums of its blocks. Terms are
// added as integers, so that their order does not matter.
template <class View>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) SquaresKernel(AddSquares<View> s) {
  ForRows<kPartials>(s.count, [&](int64_t u, int lane) {
    const SquaresUnit unit = s.units[u];
    const bool dense = unit.stride == unit.cols;
    const auto cols = static_cast<uint32_t>(unit.cols);
    const int64_t size = unit.rows * unit.cols;
    double total = 0;
    for (int64_t begin = 0; begin < size; begin += kSquaresBlock) {
      const int64_t count = size - begin < kSquaresBlock ? size - begin : kSquaresBlock;
      total += FixedSumOf<double>(count, lane, [&](int64_t i, double partial) {
        int64_t at = unit.begin + begin + i;
        if (!dense) {
          const auto element = static_cast<uint32_t>(begin + i);
          at = unit.begin + element / cols * unit.stride + element % cols;
        }
        const auto value = static_cast<double>(s.x.Scaled(s.x.sum[at]));
        return partial + value * value;
      });
    }
    if (lane != 0) return;
    const SquareSumTerm digits = SquareSumTermOf(total);
    const auto add = [](int64_t* sum, uint64_t term) {
      if (term == 0) return;  // also skips digits beyond the last one, which are 0
      ::cuda::atomic_ref<int64_t, ::cuda::thread_scope_device>(*sum).fetch_add(
          static_cast<int64_t>(term), ::cuda::memory_order_relaxed);
    };
    int64_t* const sum = s.sum + unit.sum * kSquareSumSize;
    if (digits.first < 0) return add(sum + kSquareSumDigits, 1);
    for (int i = 0; i < 3; ++i) add(sum + digits.first + i, digits.at[i]);
  });
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

template <class View>
cudaError_t Run(const AddSquares<View>& squares, cudaStream_t stream) {
  if (squares.count == 0) return cudaSuccess;
  return Launch(&SquaresKernel<View>, RowShape<kPartials>(squares.count), stream, squares);
}
template cudaError_t Run(const AddSquares<SumView<float>>&, cudaStream_t);
template cudaError_t Run(const AddSquares<SumView<int64_t>>&, cudaStream_t);

}  // namespace moe::exact_sum
