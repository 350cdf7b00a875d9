#include "kernels/cross_entropy/cross_entropy_cpu.h"

#include <cmath>
#include <limits>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cross_entropy/cross_entropy_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

// The largest element. NaNs may be passed over: the sum of exponentials shows them.
HWY_INLINE float MaxOf(const float* x, int64_t n) {
  const FloatTag d;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  auto max = hn::Set(d, kLowest);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) max = hn::Max(max, LoadLanes(x + i));
  float result = hn::GetLane(hn::MaxOfLanes(d, max));
  for (; i < n; ++i) result = std::max(result, x[i]);
  return result;
}

// sum_i exp(x[i] - max) in the order of FixedSum.
HWY_INLINE float SumOfExp(const float* x, int64_t n, float max) {
  const auto offset = hn::Set(FloatTag(), max);
  FixedPartials sum;
  const int64_t body = n - n % kPartials;
  for (int64_t i = 0; i < body; i += kPartials) {
    for (int64_t j = 0; j < kPartials / kLanes; ++j) {
      const auto e = ExpLanes(hn::Sub(LoadLanes(x + i + j * kLanes), offset));
      sum.lanes[j] = hn::Add(sum.lanes[j], e);
    }
  }
  for (int64_t i = body, j = 0; i < n; i += kLanes, ++j) {
    const int64_t rest = std::min(kLanes, n - i);
    const auto e = ExpLanes(hn::Sub(LoadFirst(x + i, rest), offset));
    const auto inside = hn::FirstN(FloatTag(), static_cast<size_t>(rest));
    sum.lanes[j] = hn::Add(sum.lanes[j], hn::IfThenElseZero(inside, e));
  }
  return sum.Fold();
}

template <typename T>
HWY_INLINE float Row(const float* logits, int64_t n, int64_t target, float scale, T* d_logits) {
  const float max = MaxOf(logits, n);
  const float sum = SumOfExp(logits, n, max);
  const float to_target = logits[target] - max;
  const float loss = std::log(sum) - to_target;
  if (d_logits == nullptr) return loss;
  const auto offset = hn::Set(FloatTag(), max);
  const auto factor = hn::Set(FloatTag(), scale / sum);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const auto e = ExpLanes(hn::Sub(LoadLanes(logits + i), offset));
    StoreLanes(hn::Mul(e, factor), d_logits + i);
  }
  if (i < n) {
    const auto e = ExpLanes(hn::Sub(LoadFirst(logits + i, n - i), offset));
    StoreFirst(hn::Mul(e, factor), d_logits + i, n - i);
  }
  // The target's own element, rounded once: scale * (p - 1).
  d_logits[target] = T(scale * (std::exp(to_target) / sum - 1.0f));
  return loss;
}

float RowF32(const float* logits, int64_t n, int64_t target, float scale, float* d_logits) {
  return Row(logits, n, target, scale, d_logits);
}
float RowBF16(const float* logits, int64_t n, int64_t target, float scale, BFloat16* d_logits) {
  return Row(logits, n, target, scale, d_logits);
}
float RowF16(const float* logits, int64_t n, int64_t target, float scale, Float16* d_logits) {
  return Row(logits, n, target, scale, d_logits);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(RowF32);
HWY_EXPORT(RowBF16);
HWY_EXPORT(RowF16);

template <>
float CrossEntropyRow(const float* logits, int64_t n, int64_t target, float scale,
                      float* d_logits) {
  return HWY_DYNAMIC_DISPATCH(RowF32)(logits, n, target, scale, d_logits);
}
template <>
float CrossEntropyRow(const float* logits, int64_t n, int64_t target, float scale,
                      BFloat16* d_logits) {
  return HWY_DYNAMIC_DISPATCH(RowBF16)(logits, n, target, scale, d_logits);
}
template <>
float CrossEntropyRow(const float* logits, int64_t n, int64_t target, float scale,
                      Float16* d_logits) {
  return HWY_DYNAMIC_DISPATCH(RowF16)(logits, n, target, scale, d_logits);
}

}  // namespace moe
#endif  // HWY_ONCE
