// Arguments of both paths of fold_nodes.h, in the memory of one device. Internal. Plain C++: .cu
// files include it.
#ifndef MOE_KERNELS_GROUPED_GEMM_FOLD_NODES_OP_H_
#define MOE_KERNELS_GROUPED_GEMM_FOLD_NODES_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/tree_cut.h"

namespace moe::fold {

// Nodes in ascending order. After node i the last two that are left become their sum, folds[i]
// times, so that one is left in the end. Without nodes `out` is zeros.
template <typename T>
struct Fold {
  struct Node {
    const float* data;  // [N, H]
    int64_t stride;
  };
  int count = 0;
  Node node[kMaxTreeLeaves] = {};
  int8_t folds[kMaxTreeLeaves] = {};
  MatrixView<T> out;  // [N, H]
};

// Enqueues and returns the launch error alone. The CPU's bits, except that the CPU's sums for
// BFloat16 have no subnormal numbers.
template <typename T>
cudaError_t Run(const Fold<T>& fold, cudaStream_t stream);

}  // namespace moe::fold

#endif  // MOE_KERNELS_GROUPED_GEMM_FOLD_NODES_OP_H_
