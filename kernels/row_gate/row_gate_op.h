// Arguments of both paths of row_gate.h, in the memory of one device. Internal. Plain C++: .cu
// files include it.
#ifndef MOE_KERNELS_ROW_GATE_ROW_GATE_OP_H_
#define MOE_KERNELS_ROW_GATE_ROW_GATE_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::row_gate {

// RowGate.
template <typename T>
struct Forward {
  MatrixView<const T> rows;  // [T, H]
  const float* logit;        // [T]
  float* gate;               // [T]
  MatrixView<T> y;           // [T, H]
};

// RowGateBackward.
template <typename T>
struct Backward {
  MatrixView<const T> rows;
  const float* gate;
  const T* weight;
  MatrixView<const T> dy;
  MatrixView<T> d_rows;
  float* d_logit;
  MatrixView<T> dx;
};

// RowGateWeightGradient.
template <typename T>
struct WeightGradient {
  MatrixView<const T> x;  // [T, H]
  const float* d_logit;   // [T]
  float* d_weight;        // [H]
  Write write;
};

// All enqueue on `stream` and return the launch error alone. Given the gates, the bits are the
// CPU's: dot products are folded as in WideDot, and a thread owns a column of d_weight.
template <typename T>
cudaError_t Run(const Forward<T>& forward, cudaStream_t stream);
template <typename T>
cudaError_t Run(const Backward<T>& backward, cudaStream_t stream);
template <typename T>
cudaError_t Run(const WeightGradient<T>& gradient, cudaStream_t stream);

}  // namespace moe::row_gate

#endif  // MOE_KERNELS_ROW_GATE_ROW_GATE_OP_H_
