// The CUDA path of row_gate.h. Internal: plain C++ between row_gate.cc (Abseil) and
// row_gate_cuda.cu (nvcc, no Abseil).
#ifndef MOE_KERNELS_ROW_GATE_ROW_GATE_CUDA_H_
#define MOE_KERNELS_ROW_GATE_ROW_GATE_CUDA_H_

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::row_gate {

// The arguments of RowGate, in device memory.
template <typename T>
struct CudaForward {
  MatrixView<const T> rows;  // [T, H]
  const float* logit;        // [T]
  float* gate;               // [T]
  MatrixView<T> y;           // [T, H]
};

// RowGateGradient, in device memory.
template <typename T>
struct CudaBackward {
  MatrixView<const T> rows;
  const float* gate;
  const T* weight;
  MatrixView<const T> dy;
  MatrixView<T> d_rows;
  float* d_logit;
  MatrixView<T> dx;
};

// The arguments of RowGateWeightGradient, in device memory.
template <typename T>
struct CudaWeightGradient {
  MatrixView<const T> x;  // [T, H]
  const float* d_logit;   // [T]
  float* d_weight;        // [H]
  Write write;
};

// Enqueue on `stream` and return; the error of the launch alone. The bits of row_gate.cc, given the
// gates: dot products are folded as WideDot folds them, and a thread owns a column of d_weight.
// Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t Run(const CudaForward<T>& forward, cudaStream_t stream);
template <typename T>
cudaError_t Run(const CudaBackward<T>& backward, cudaStream_t stream);
template <typename T>
cudaError_t Run(const CudaWeightGradient<T>& gradient, cudaStream_t stream);

}  // namespace moe::row_gate

#endif  // MOE_KERNELS_ROW_GATE_ROW_GATE_CUDA_H_
