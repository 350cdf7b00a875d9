#include "kernels/base/fixed_dot.h"

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/base/fixed_dot.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

template <typename T>
HWY_INLINE float Dot(const T* a, const T* b, int64_t n) {
  FixedPartials sum;
  const int64_t body = n - n % kPartials;
  for (int64_t i = 0; i < body; i += kPartials) {
    for (int64_t j = 0; j < kPartials / kLanes; ++j) {
      const int64_t at = i + j * kLanes;
      sum.lanes[j] = hn::MulAdd(LoadLanes(a + at), LoadLanes(b + at), sum.lanes[j]);
    }
  }
  if (body == n) return sum.Fold();
  T tail_a[kPartials] = {};
  T tail_b[kPartials] = {};
  std::copy(a + body, a + n, tail_a);
  std::copy(b + body, b + n, tail_b);
  for (int64_t j = 0; j < kPartials / kLanes; ++j) {
    sum.lanes[j] =
        hn::MulAdd(LoadLanes(tail_a + j * kLanes), LoadLanes(tail_b + j * kLanes), sum.lanes[j]);
  }
  return sum.Fold();
}

template <typename T>
HWY_INLINE float Sum(const T* a, int64_t n) {
  FixedPartials sum;
  const int64_t body = n - n % kPartials;
  for (int64_t i = 0; i < body; i += kPartials) {
    for (int64_t j = 0; j < kPartials / kLanes; ++j) {
      sum.lanes[j] = hn::Add(sum.lanes[j], LoadLanes(a + i + j * kLanes));
    }
  }
  if (body == n) return sum.Fold();
  T tail[kPartials] = {};
  std::copy(a + body, a + n, tail);
  for (int64_t j = 0; j < kPartials / kLanes; ++j) {
    sum.lanes[j] = hn::Add(sum.lanes[j], LoadLanes(tail + j * kLanes));
  }
  return sum.Fold();
}

template <typename T>
HWY_INLINE double Wide(const T* a, const T* b, int64_t n) {
  double partial[kPartials] = {};
  const auto add = [&](int64_t at, int64_t i) {
    partial[i] += static_cast<double>(static_cast<float>(a[at + i])) *
                  static_cast<double>(static_cast<float>(b[at + i]));
  };
  const int64_t body = n - n % kPartials;
  for (int64_t at = 0; at < body; at += kPartials) {
    for (int64_t i = 0; i < kPartials; ++i) add(at, i);
  }
  for (int64_t i = 0; i < n - body; ++i) add(body, i);
  for (int64_t width = kPartials / 2; width >= 1; width /= 2) {
    for (int64_t i = 0; i < width; ++i) partial[i] += partial[i + width];
  }
  return partial[0];
}

float DotF32(const float* a, const float* b, int64_t n) {
  return Dot(a, b, n);
}
float DotBF16(const BFloat16* a, const BFloat16* b, int64_t n) {
  return Dot(a, b, n);
}
float DotF16(const Float16* a, const Float16* b, int64_t n) {
  return Dot(a, b, n);
}
double WideF32(const float* a, const float* b, int64_t n) {
  return Wide(a, b, n);
}
double WideBF16(const BFloat16* a, const BFloat16* b, int64_t n) {
  return Wide(a, b, n);
}
double WideF16(const Float16* a, const Float16* b, int64_t n) {
  return Wide(a, b, n);
}
float SumF32(const float* a, int64_t n) {
  return Sum(a, n);
}
float SumBF16(const BFloat16* a, int64_t n) {
  return Sum(a, n);
}
float SumF16(const Float16* a, int64_t n) {
  return Sum(a, n);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(DotF32);
HWY_EXPORT(DotBF16);
HWY_EXPORT(DotF16);
HWY_EXPORT(WideF32);
HWY_EXPORT(WideBF16);
HWY_EXPORT(WideF16);
HWY_EXPORT(SumF32);
HWY_EXPORT(SumBF16);
HWY_EXPORT(SumF16);

template <>
float FixedDot(const float* a, const float* b, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(DotF32)(a, b, n);
}
template <>
float FixedDot(const BFloat16* a, const BFloat16* b, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(DotBF16)(a, b, n);
}
template <>
float FixedDot(const Float16* a, const Float16* b, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(DotF16)(a, b, n);
}
template <>
double WideDot(const float* a, const float* b, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(WideF32)(a, b, n);
}
template <>
double WideDot(const BFloat16* a, const BFloat16* b, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(WideBF16)(a, b, n);
}
template <>
double WideDot(const Float16* a, const Float16* b, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(WideF16)(a, b, n);
}
template <>
float FixedSum(const float* a, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(SumF32)(a, n);
}
template <>
float FixedSum(const BFloat16* a, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(SumBF16)(a, n);
}
template <>
float FixedSum(const Float16* a, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(SumF16)(a, n);
}

}  // namespace moe
#endif  // HWY_ONCE
