// Rows and column blocks of RMS normalisation on the CPU. Instantiated for float, BFloat16 and
// Float16.
#ifndef MOE_KERNELS_NORM_RMS_NORM_CPU_H_
#define MOE_KERNELS_NORM_RMS_NORM_CPU_H_

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// Returns rstd.
template <typename T>
float RmsNormRow(const T* x, const float* weight, float epsilon, int64_t n, T* y);

template <typename T>
struct RmsNormGradient {
  const T* x;
  const float* weight;
  float rstd;
  const T* dy;
  T* dx;
  Write write;
  int64_t n;
};
template <typename T>
void RmsNormBackwardRow(const RmsNormGradient<T>& row);

// d_weight[h] (+)= sum_t (dy[t, h] * x[t, h]) * rstd[t], t ascending. At most kNormColumns columns.
inline constexpr int64_t kNormColumns = 64;
template <typename T>
void RmsNormWeightColumns(MatrixView<const T> x, const float* rstd, MatrixView<const T> dy,
                          float* d_weight, Write write);

template <typename T>
void AddRow(const T* a, const T* b, int64_t n, T* out);

}  // namespace moe

#endif  // MOE_KERNELS_NORM_RMS_NORM_CPU_H_
