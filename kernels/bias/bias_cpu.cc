#include "kernels/bias/bias_cpu.h"

#include <algorithm>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bias/bias_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
HWY_INLINE void AddTo(const float* bias, int64_t n, T* y) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    StoreLanes(hn::Add(LoadLanes(y + i), LoadLanes(bias + i)), y + i);
  }
  if (i == n) return;
  StoreFirst(hn::Add(LoadFirst(y + i, n - i), LoadFirst(bias + i, n - i)), y + i, n - i);
}

template <typename T>
HWY_INLINE void SumColumns(MatrixView<const T> dy, float* d_bias, Write write) {
  const int64_t n = dy.cols();
  float sum[kBiasColumns] = {};
  if (write == Write::kAdd) std::copy_n(d_bias, n, sum);
  for (int64_t r = 0; r < dy.rows(); ++r) {
    const T* const row = dy.row(r);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      StoreLanes(hn::Add(LoadLanes(sum + i), LoadLanes(row + i)), sum + i);
    }
    if (i == n) continue;
    StoreLanes(hn::Add(LoadLanes(sum + i), LoadFirst(row + i, n - i)), sum + i);
  }
  std::copy_n(sum, n, d_bias);
}

void AddF32(const float* bias, int64_t n, float* y) {
  AddTo(bias, n, y);
}
void AddBF16(const float* bias, int64_t n, BFloat16* y) {
  AddTo(bias, n, y);
}
void AddF16(const float* bias, int64_t n, Float16* y) {
  AddTo(bias, n, y);
}
void ColumnsF32(MatrixView<const float> dy, float* d_bias, Write write) {
  SumColumns(dy, d_bias, write);
}
void ColumnsBF16(MatrixView<const BFloat16> dy, float* d_bias, Write write) {
  SumColumns(dy, d_bias, write);
}
void ColumnsF16(MatrixView<const Float16> dy, float* d_bias, Write write) {
  SumColumns(dy, d_bias, write);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(AddF32);
HWY_EXPORT(AddBF16);
HWY_EXPORT(AddF16);
HWY_EXPORT(ColumnsF32);
HWY_EXPORT(ColumnsBF16);
HWY_EXPORT(ColumnsF16);

template <>
void AddBiasRow(const float* bias, int64_t n, float* y) {
  HWY_DYNAMIC_DISPATCH(AddF32)(bias, n, y);
}
template <>
void AddBiasRow(const float* bias, int64_t n, BFloat16* y) {
  HWY_DYNAMIC_DISPATCH(AddBF16)(bias, n, y);
}
template <>
void AddBiasRow(const float* bias, int64_t n, Float16* y) {
  HWY_DYNAMIC_DISPATCH(AddF16)(bias, n, y);
}
template <>
void BiasGradientColumns(MatrixView<const float> dy, float* d_bias, Write write) {
  HWY_DYNAMIC_DISPATCH(ColumnsF32)(dy, d_bias, write);
}
template <>
void BiasGradientColumns(MatrixView<const BFloat16> dy, float* d_bias, Write write) {
  HWY_DYNAMIC_DISPATCH(ColumnsBF16)(dy, d_bias, write);
}
template <>
void BiasGradientColumns(MatrixView<const Float16> dy, float* d_bias, Write write) {
  HWY_DYNAMIC_DISPATCH(ColumnsF16)(dy, d_bias, write);
}

}  // namespace moe
#endif  // HWY_ONCE
