// What both paths of bias.h take, in the memory of one device. Internal. Plain C++: .cu
// files include it. Functions are instantiated for float, BFloat16 and Float16.
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
  // [2] of a CUDA device: the rows of the group are y's from the first to before the second;
  // nullptr: all of them.
  const int64_t* rows = nullptr;
};

// BiasGradient.
template <typename T>
struct Gradient {
  MatrixView<const T> dy;  // [N, C]
  float* d_bias;           // [C]
  Write write;
  // [segments + 1] of a CUDA device: rows [rows[0], rows[segments]) of dy; nullptr: all of them.
  const int64_t* rows = nullptr;
  int64_t segments = 0;
};

// The specification, in plain loops.
template <typename T>
void Reference(const Add<T>& add);
template <typename T>
void Reference(const Gradient<T>& gradient);

// The same bits: enqueue on `stream` and return; the error of the launch alone.
template <typename T>
cudaError_t Run(const Add<T>& add, cudaStream_t stream);
template <typename T>
cudaError_t Run(const Gradient<T>& gradient, cudaStream_t stream);

}  // namespace moe::bias

#endif  // MOE_KERNELS_BIAS_BIAS_OP_H_
