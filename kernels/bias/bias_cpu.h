// The two CPU implementations of the bias operations. Instantiated for float, BFloat16 and Float16.
#ifndef MOE_KERNELS_BIAS_BIAS_CPU_H_
#define MOE_KERNELS_BIAS_BIAS_CPU_H_

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// Plain loops: the specification.
template <typename T>
void AddBiasReference(MatrixView<T> y, const float* bias);
template <typename T>
void BiasGradientReference(MatrixView<const T> dy, float* d_bias, Write write);

// SIMD for the best target of this machine: one row, and a block of at most kBiasColumns columns.
template <typename T>
void AddBiasRow(const float* bias, int64_t n, T* y);
inline constexpr int64_t kBiasColumns = 64;
template <typename T>
void BiasGradientColumns(MatrixView<const T> dy, float* d_bias, Write write);

}  // namespace moe

#endif  // MOE_KERNELS_BIAS_BIAS_CPU_H_
