#include "kernels/base/fixed_dot.h"

#include "kernels/base/highway_targets.h"
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
float Dot(const T* a, const T* b, int64_t n) {
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
float Sum(const T* a, int64_t n) {
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
double Wide(const T* a, const T* b, int64_t n) {
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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

template <typename T>
float FixedDot(const T* a, const T* b, int64_t n) {
  return MOE_SIMD(Dot<T>)(a, b, n);
}
template <typename T>
double WideDot(const T* a, const T* b, int64_t n) {
  return MOE_SIMD(Wide<T>)(a, b, n);
}
template <typename T>
float FixedSum(const T* a, int64_t n) {
  return MOE_SIMD(Sum<T>)(a, n);
}

#define MOE_INSTANTIATE(T)                              \
  template float FixedDot(const T*, const T*, int64_t); \
  template double WideDot(const T*, const T*, int64_t); \
  template float FixedSum(const T*, int64_t);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
#endif  // HWY_ONCE
