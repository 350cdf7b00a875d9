#include "kernels/norm/rms_norm_cpu.h"

#include <cmath>

#include "kernels/base/fixed_dot.h"
#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/rms_norm_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
HWY_INLINE void Normalize(const T* x, const float* weight, float rstd, int64_t n, T* y) {
  const auto scale = hn::Set(FloatTag(), rstd);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    StoreLanes(hn::Mul(hn::Mul(LoadLanes(x + i), scale), LoadLanes(weight + i)), y + i);
  }
  if (i == n) return;
  const auto last = hn::Mul(LoadFirst(x + i, n - i), scale);
  StoreFirst(hn::Mul(last, LoadFirst(weight + i, n - i)), y + i, n - i);
}

// sum_i (dy[i] * weight[i]) * x[i] in the order of FixedDot.
template <typename T>
HWY_INLINE float WeightedDot(const T* dy, const float* weight, const T* x, int64_t n) {
  FixedPartials sum;
  const int64_t body = n - n % kPartials;
  for (int64_t i = 0; i < body; i += kPartials) {
    for (int64_t j = 0; j < kPartials / kLanes; ++j) {
      const int64_t at = i + j * kLanes;
      const auto dn = hn::Mul(LoadLanes(dy + at), LoadLanes(weight + at));
      sum.lanes[j] = hn::MulAdd(dn, LoadLanes(x + at), sum.lanes[j]);
    }
  }
  for (int64_t i = body, j = 0; i < n; i += kLanes, ++j) {
    const int64_t rest = std::min(kLanes, n - i);
    const auto dn = hn::Mul(LoadFirst(dy + i, rest), LoadFirst(weight + i, rest));
    sum.lanes[j] = hn::MulAdd(dn, LoadFirst(x + i, rest), sum.lanes[j]);
  }
  return sum.Fold();
}

// rstd * (dy * weight - x * slope) (+ dx)
template <typename T>
HWY_INLINE void Backward(const RmsNormGradient<T>& row) {
  const float dot = WeightedDot(row.dy, row.weight, row.x, row.n);
  const auto slope = hn::Set(FloatTag(), row.rstd * row.rstd * (dot / static_cast<float>(row.n)));
  const auto rstd = hn::Set(FloatTag(), row.rstd);
  const bool add = row.write == Write::kAdd;
  const auto gradient = [&](auto dy, auto weight, auto x) HWY_ATTR {
    return hn::Mul(rstd, hn::NegMulAdd(x, slope, hn::Mul(dy, weight)));
  };
  int64_t i = 0;
  for (; i + kLanes <= row.n; i += kLanes) {
    auto d = gradient(LoadLanes(row.dy + i), LoadLanes(row.weight + i), LoadLanes(row.x + i));
    if (add) d = hn::Add(LoadLanes(row.dx + i), d);
    StoreLanes(d, row.dx + i);
  }
  if (i == row.n) return;
  const int64_t rest = row.n - i;
  auto d = gradient(LoadFirst(row.dy + i, rest), LoadFirst(row.weight + i, rest),
                    LoadFirst(row.x + i, rest));
  if (add) d = hn::Add(LoadFirst(row.dx + i, rest), d);
  StoreFirst(d, row.dx + i, rest);
}

template <typename T>
HWY_INLINE void WeightColumns(MatrixView<const T> x, const float* rstd, MatrixView<const T> dy,
                              float* d_weight, Write write) {
  const int64_t n = x.cols();
  float sum[kNormColumns] = {};
  for (int64_t t = 0; t < x.rows(); ++t) {
    const T* const x_row = x.row(t);
    const T* const dy_row = dy.row(t);
    const auto scale = hn::Set(FloatTag(), rstd[t]);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const auto product = hn::Mul(LoadLanes(dy_row + i), LoadLanes(x_row + i));
      StoreLanes(hn::MulAdd(product, scale, LoadLanes(sum + i)), sum + i);
    }
    if (i == n) continue;
    const auto product = hn::Mul(LoadFirst(dy_row + i, n - i), LoadFirst(x_row + i, n - i));
    StoreLanes(hn::MulAdd(product, scale, LoadLanes(sum + i)), sum + i);
  }
  for (int64_t i = 0; i < n; ++i)
    d_weight[i] = write == Write::kAdd ? d_weight[i] + sum[i] : sum[i];
}

template <typename T>
HWY_INLINE void Add(const T* a, const T* b, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    StoreLanes(hn::Add(LoadLanes(a + i), LoadLanes(b + i)), out + i);
  }
  if (i == n) return;
  StoreFirst(hn::Add(LoadFirst(a + i, n - i), LoadFirst(b + i, n - i)), out + i, n - i);
}

void NormalizeF32(const float* x, const float* weight, float rstd, int64_t n, float* y) {
  Normalize(x, weight, rstd, n, y);
}
void NormalizeBF16(const BFloat16* x, const float* weight, float rstd, int64_t n, BFloat16* y) {
  Normalize(x, weight, rstd, n, y);
}
void NormalizeF16(const Float16* x, const float* weight, float rstd, int64_t n, Float16* y) {
  Normalize(x, weight, rstd, n, y);
}
void BackwardF32(const RmsNormGradient<float>& row) {
  Backward(row);
}
void BackwardBF16(const RmsNormGradient<BFloat16>& row) {
  Backward(row);
}
void BackwardF16(const RmsNormGradient<Float16>& row) {
  Backward(row);
}
void ColumnsF32(MatrixView<const float> x, const float* rstd, MatrixView<const float> dy,
                float* d_weight, Write write) {
  WeightColumns(x, rstd, dy, d_weight, write);
}
void ColumnsBF16(MatrixView<const BFloat16> x, const float* rstd, MatrixView<const BFloat16> dy,
                 float* d_weight, Write write) {
  WeightColumns(x, rstd, dy, d_weight, write);
}
void ColumnsF16(MatrixView<const Float16> x, const float* rstd, MatrixView<const Float16> dy,
                float* d_weight, Write write) {
  WeightColumns(x, rstd, dy, d_weight, write);
}
void AddF32(const float* a, const float* b, int64_t n, float* out) {
  Add(a, b, n, out);
}
void AddBF16(const BFloat16* a, const BFloat16* b, int64_t n, BFloat16* out) {
  Add(a, b, n, out);
}
void AddF16(const Float16* a, const Float16* b, int64_t n, Float16* out) {
  Add(a, b, n, out);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(NormalizeF32);
HWY_EXPORT(NormalizeBF16);
HWY_EXPORT(NormalizeF16);
HWY_EXPORT(BackwardF32);
HWY_EXPORT(BackwardBF16);
HWY_EXPORT(BackwardF16);
HWY_EXPORT(ColumnsF32);
HWY_EXPORT(ColumnsBF16);
HWY_EXPORT(ColumnsF16);
HWY_EXPORT(AddF32);
HWY_EXPORT(AddBF16);
HWY_EXPORT(AddF16);

namespace {

template <typename T>
float ReciprocalRms(const T* x, float epsilon, int64_t n) {
  return 1.0f / std::sqrt(FixedDot(x, x, n) / static_cast<float>(n) + epsilon);
}

}  // namespace

template <>
float RmsNormRow(const float* x, const float* weight, float epsilon, int64_t n, float* y) {
  const float rstd = ReciprocalRms(x, epsilon, n);
  HWY_DYNAMIC_DISPATCH(NormalizeF32)(x, weight, rstd, n, y);
  return rstd;
}
template <>
float RmsNormRow(const BFloat16* x, const float* weight, float epsilon, int64_t n, BFloat16* y) {
  const float rstd = ReciprocalRms(x, epsilon, n);
  HWY_DYNAMIC_DISPATCH(NormalizeBF16)(x, weight, rstd, n, y);
  return rstd;
}
template <>
float RmsNormRow(const Float16* x, const float* weight, float epsilon, int64_t n, Float16* y) {
  const float rstd = ReciprocalRms(x, epsilon, n);
  HWY_DYNAMIC_DISPATCH(NormalizeF16)(x, weight, rstd, n, y);
  return rstd;
}
template <>
void RmsNormBackwardRow(const RmsNormGradient<float>& row) {
  HWY_DYNAMIC_DISPATCH(BackwardF32)(row);
}
template <>
void RmsNormBackwardRow(const RmsNormGradient<BFloat16>& row) {
  HWY_DYNAMIC_DISPATCH(BackwardBF16)(row);
}
template <>
void RmsNormBackwardRow(const RmsNormGradient<Float16>& row) {
  HWY_DYNAMIC_DISPATCH(BackwardF16)(row);
}
template <>
void RmsNormWeightColumns(MatrixView<const float> x, const float* rstd, MatrixView<const float> dy,
                          float* d_weight, Write write) {
  HWY_DYNAMIC_DISPATCH(ColumnsF32)(x, rstd, dy, d_weight, write);
}
template <>
void RmsNormWeightColumns(MatrixView<const BFloat16> x, const float* rstd,
                          MatrixView<const BFloat16> dy, float* d_weight, Write write) {
  HWY_DYNAMIC_DISPATCH(ColumnsBF16)(x, rstd, dy, d_weight, write);
}
template <>
void RmsNormWeightColumns(MatrixView<const Float16> x, const float* rstd,
                          MatrixView<const Float16> dy, float* d_weight, Write write) {
  HWY_DYNAMIC_DISPATCH(ColumnsF16)(x, rstd, dy, d_weight, write);
}
template <>
void AddRow(const float* a, const float* b, int64_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(AddF32)(a, b, n, out);
}
template <>
void AddRow(const BFloat16* a, const BFloat16* b, int64_t n, BFloat16* out) {
  HWY_DYNAMIC_DISPATCH(AddBF16)(a, b, n, out);
}
template <>
void AddRow(const Float16* a, const Float16* b, int64_t n, Float16* out) {
  HWY_DYNAMIC_DISPATCH(AddF16)(a, b, n, out);
}

}  // namespace moe
#endif  // HWY_ONCE
