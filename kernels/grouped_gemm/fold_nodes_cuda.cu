#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/grouped_gemm/fold_nodes_op.h"

namespace moe::fold {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// Most nodes that wait for their right siblings, one of each size below the root's.
constexpr int kMostWaiting = 4;
static_assert(1 << kMostWaiting == kMaxTreeLeaves);

// A warp owns a row, a lane neighbouring columns of as many T as 16 bytes hold. Waiting nodes move
// through registers, the last one first; the next node is read before the last one is added.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    FoldKernel(const __grid_constant__ Fold<T> fold, bool in_vectors) {
  constexpr int kWidth = kVectorWidth<T>;
  const int64_t cols = fold.out.cols();
  const int64_t vector_columns = in_vectors ? cols - cols % kWidth : 0;
  ForRows<kWarpLanes>(fold.out.rows(), [&](int64_t row, int lane) {
    ForColumns<T>(cols, vector_columns, lane, kWarpLanes, [&](int64_t c, auto width) {
      using Sums = Elements<float, width.value>;
      const auto node = [&](int i) {
        return LoadElements<width.value>(fold.node[i].data + row * fold.node[i].stride + c);
      };
      Sums waiting[kMostWaiting] = {}, sum = {}, next = fold.count > 0 ? node(0) : Sums();
      MOE_NO_UNROLL
      for (int i = 0; i < fold.count; ++i) {
        if (i > 0) {
          MOE_UNROLL
          for (int w = kMostWaiting - 1; w > 0; --w) waiting[w] = waiting[w - 1];
          waiting[0] = sum;
        }
        sum = next;
        if (i + 1 < fold.count) next = node(i + 1);
        MOE_NO_UNROLL
        for (int n = 0; n < fold.folds[i]; ++n) {
          for (int j = 0; j < width.value; ++j) sum.at[j] = waiting[0].at[j] + sum.at[j];
          MOE_UNROLL
          for (int w = 0; w + 1 < kMostWaiting; ++w) waiting[w] = waiting[w + 1];
        }
      }
      Elements<T, width.value> rounded;
      for (int j = 0; j < width.value; ++j) rounded.at[j] = RoundTo<T>(sum.at[j]);
      Store(rounded, fold.out.row(row) + c);
    });
  });
}

bool Aligned(const void* data, int64_t stride_bytes) {
  const uintptr_t together =
      reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride_bytes);
  return together % kVectorBytes == 0;
}

}  // namespace

template <typename T>
cudaError_t Run(const Fold<T>& fold, cudaStream_t stream) {
  if (fold.out.rows() == 0 || fold.out.cols() == 0) return cudaSuccess;
  bool in_vectors = Aligned(fold.out.data(), fold.out.stride() * static_cast<int64_t>(sizeof(T)));
  for (int i = 0; i < fold.count; ++i) {
    const auto& node = fold.node[i];
    in_vectors = in_vectors && Aligned(node.data, node.stride * 4);
  }
  return Launch(&FoldKernel<T>, RowShape<kWarpLanes>(fold.out.rows()), stream, fold, in_vectors);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Fold, cudaStream_t)

}  // namespace moe::fold
