// Arguments of both paths of rms_norm.h, in the memory of one device. Internal. Plain C++: .cu
// files include it.
#ifndef MOE_KERNELS_NORM_RMS_NORM_OP_H_
#define MOE_KERNELS_NORM_RMS_NORM_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::rms_norm {

// Maps row i of [T * G, H] to a matrix [T, G * H], whose rows may have gaps between them.
struct Groups {
  int64_t count, cols;  // G, H

  template <typename T>
  MOE_HOST_DEVICE T* Row(MatrixView<T> m, int64_t i) const {
    return count == 1 ? m.row(i) : m.row(i / count) + i % count * cols;
  }
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

  int64_t rows() const { return x.rows() * groups.count; }
};

// Both enqueue on `stream` and return the launch error alone. The bits are those of a CPU with
// fused multiply-add: half a warp shares a row's sum in the order of FixedDot, and a thread owns a
// column of d_weight.
template <typename T>
cudaError_t Run(const Forward<T>& forward, cudaStream_t stream);
template <typename T>
cudaError_t Run(const Backward<T>& backward, cudaStream_t stream);

}  // namespace moe::rms_norm

#endif  // MOE_KERNELS_NORM_RMS_NORM_OP_H_
