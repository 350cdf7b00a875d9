// Arguments of both paths of rms_norm.h, in the memory of one device. Internal. Plain C++: .cu
// files include it.
#ifndef MOE_KERNELS_NORM_RMS_NORM_OP_H_
#define MOE_KERNELS_NORM_RMS_NORM_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/tree_cut.h"

namespace moe::rms_norm {

// Maps row i of [T * G, H] to a matrix [T, G * H], whose rows may have gaps between them.
struct Groups {
  int64_t count, cols;  // G, H

  template <typename T>
  MOE_HOST_DEVICE T* Row(MatrixView<T> m, int64_t i) const {
    return count == 1 ? m.row(i) : m.row(i / count) + i % count * cols;
  }
};

// RowTree: what a kernel reads of it.
struct Leaves {
  int count;                          // leaves
  int64_t begin[kMaxTreeLeaves + 1];  // their columns
};
struct Nodes {
  int leaves = 0;                // 0: a row has its own sum
  int count;                     // nodes
  MatrixView<const float> sums;  // [count, T]
  int first_leaf[kMaxTreeLeaves];
  int64_t cols;

  MOE_HOST_DEVICE float Sum(int64_t t) const;
};

// The sum of a tree's leaves, neighbours first, left + right. In registers: levels are constants in
// an unrolled loop.
class LeafFold {
 public:
  // Leaves in ascending order, `i` from 0. The sum of all, after the last one of a power of two.
  MOE_HOST_DEVICE float Add(int i, float value) {
    bool completes = true;  // the node of this level
    for (int level = 0; level < kLevels; ++level) {
      const bool right = (i >> level & 1) != 0;
      if (completes && !right) left_[level] = value;
      completes = completes && right;
      if (completes) value = left_[level] + value;
    }
    return value;
  }

 private:
  static constexpr int kLevels = 4;
  static_assert(kMaxTreeLeaves == 1 << kLevels);
  float left_[kLevels] = {};  // of each level the node that waits for its neighbour
};
MOE_HOST_DEVICE inline float Nodes::Sum(int64_t t) const {
  LeafFold fold;
  float sum = 0;
  for (int i = 0, j = 0; i < leaves; ++i) {
    const bool has_node = j < count && first_leaf[j] == i;  // else an empty child: 0
    sum = fold.Add(i, has_node ? *(sums.row(j) + t) : 0.0f);
    j += has_node ? 1 : 0;
  }
  return sum;
}

// RmsNormSquares, without weight and dy, and RmsNormDots.
template <typename T>
struct Sums {
  Leaves leaves;
  MatrixView<const T> x;  // [T, H]
  const float* weight;    // [H]
  MatrixView<const T> dy;
  float* sums;  // [T]
};

// RmsNorm.
template <typename T>
struct Forward {
  Groups groups;
  MatrixView<const T> x;  // [T, G * H]
  const float* weight;    // [H]
  float epsilon;
  MatrixView<T> y;  // [T, G * H]
  float* rstd;      // [T * G]
  Nodes nodes;

  int64_t rows() const { return x.rows() * groups.count; }
};

// RmsNormBackward.
template <typename T>
struct Backward {
  Groups groups;
  MatrixView<const T> x;
  const float* weight;
  const float* rstd;
  MatrixView<const T> dy;
  MatrixView<T> dx;
  Write write_dx;
  float* d_weight;  // [H]
  Write write_d_weight;
  Nodes nodes;

  int64_t rows() const { return x.rows() * groups.count; }
};

// All enqueue on `stream` and return the launch error alone. The bits are those of a CPU with
// fused multiply-add: half a warp shares a row's sum in the order of FixedDot, and a thread owns a
// column of d_weight.
template <typename T>
cudaError_t Run(const Sums<T>& sums, cudaStream_t stream);
template <typename T>
cudaError_t Run(const Forward<T>& forward, cudaStream_t stream);
template <typename T>
cudaError_t Run(const Backward<T>& backward, cudaStream_t stream);

}  // namespace moe::rms_norm

#endif  // MOE_KERNELS_NORM_RMS_NORM_OP_H_
