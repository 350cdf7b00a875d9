// The CUDA path of combine.h. Internal: plain C++ between combine.cc (Abseil) and combine_cuda.cu
// (nvcc, no Abseil).
#ifndef MOE_KERNELS_COMBINE_COMBINE_CUDA_H_
#define MOE_KERNELS_COMBINE_COMBINE_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::combine {

// The arguments of CombineRows, in device memory.
template <typename T>
struct CudaCombine {
  MatrixView<const T> rows;       // [S, H]
  const int64_t* slot_offset;     // [T + 1]
  const int32_t* row_of_slot;     // [slots], -1 = dropped
  const float* weight = nullptr;  // [slots], or nullptr: all 1
  MatrixView<T> out;              // [T, H]
  Write write = Write::kOverwrite;
};

// The arguments of CombineWeightGradient, in device memory.
template <typename T>
struct CudaWeightGradient {
  MatrixView<const T> dy;    // [T, H]
  MatrixView<const T> rows;  // [S, H]
  const int64_t* slot_offset;
  const int32_t* row_of_slot;
  float* d_weight;  // [slots]
};

// Enqueue on `stream` and return; the error of the launch alone. The bits of combine.cc: a token's
// rows are added in choice order by one thread a column, and dot products are folded as WideDot
// folds them. Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t Run(const CudaCombine<T>& combine, cudaStream_t stream);
template <typename T>
cudaError_t Run(const CudaWeightGradient<T>& gradient, cudaStream_t stream);

}  // namespace moe::combine

#endif  // MOE_KERNELS_COMBINE_COMBINE_CUDA_H_
