// Arguments of both paths of bias.h, in the memory of one device. Internal. Plain C++: .cu files
// include it. Functions are instantiated for float, BFloat16 and Float16.
#ifndef MOE_KERNELS_BIAS_BIAS_OP_H_
#define MOE_KERNELS_BIAS_BIAS_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::bias {

// AddBias for the rows of one group: y[n, c] = T(float(y[n, c]) + bias[c]).
template <typename T>
struct Add {
  MatrixView<T> y;    // [N, C]
  const float* bias;  // [C]
  // [2], on a CUDA device: the group's first row of y, and its end; nullptr: all rows.
  const int64_t* rows = nullptr;
};

// BiasGradient.
template <typename T>
struct Gradient {
  MatrixView<const T> dy;  // [N, C]
  float* d_bias;           // [C]
  Write write;
  // [segments + 1], on a CUDA device: rows [rows[0], rows[segments]) of dy; nullptr: all rows.
  const int64_t* rows = nullptr;
  int64_t segments = 0;
};

// The specification, in plain loops.
template <typename T>
void Reference(const Add<T>& add);
template <typename T>
void Reference(const Gradient<T>& gradient);

// The same bits on CUDA: both enqueue on `stream` and return the launch error alone.
template <typename T>
cudaError_t Run(const Add<T>& add, cudaStream_t stream);
template <typename T>
cudaError_t Run(const Gradient<T>& gradient, cudaStream_t stream);

}  // namespace moe::bias

#endif  // MOE_KERNELS_BIAS_BIAS_OP_H_
