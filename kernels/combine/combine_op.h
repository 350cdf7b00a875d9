// Arguments of both paths of combine.h, in the memory of one device. Internal. Plain C++: .cu files
// include it. Functions are instantiated for float, BFloat16 and Float16.
#ifndef MOE_KERNELS_COMBINE_COMBINE_OP_H_
#define MOE_KERNELS_COMBINE_COMBINE_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::combine {

// CombineRows.
template <typename T>
struct Combine {
  MatrixView<const T> rows;       // [S, H]
  const int64_t* slot_offset;     // [T + 1]
  const int32_t* row_of_slot;     // [slots], -1 = dropped
  const float* weight = nullptr;  // [slots], or nullptr: all 1
  MatrixView<T> out;              // [T, H]
  Write write = Write::kOverwrite;
};

// CombineWeightGradient.
template <typename T>
struct WeightGradient {
  MatrixView<const T> dy;    // [T, H]
  MatrixView<const T> rows;  // [S, H]
  const int64_t* slot_offset;
  const int32_t* row_of_slot;
  float* d_weight;  // [slots]
};

// The specification, in plain loops.
template <typename T>
void Reference(const Combine<T>& combine);
template <typename T>
void Reference(const WeightGradient<T>& gradient);

// The same bits on CUDA: both enqueue on `stream` and return the launch error alone. One thread a
// column adds a token's rows in choice order, and dot products are folded as in WideDot.
template <typename T>
cudaError_t Run(const Combine<T>& combine, cudaStream_t stream);
template <typename T>
cudaError_t Run(const WeightGradient<T>& gradient, cudaStream_t stream);

}  // namespace moe::combine

#endif  // MOE_KERNELS_COMBINE_COMBINE_OP_H_
