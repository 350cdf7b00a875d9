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
  return FixedSumOf(n, [&](int64_t i, auto lanes, FloatLanes sum) MOE_LANES {
    return hn::MulAdd(lanes.Load(a + i), lanes.Load(b + i), sum);
  });
}

template <typename T>
float Sum(const T* a, int64_t n) {
  return FixedSumOf(n, [&](int64_t i, auto lanes, FloatLanes sum)
                           MOE_LANES { return hn::Add(sum, lanes.Load(a + i)); });
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

MOE_INSTANTIATE_FOR_STORAGE(FixedDot)
MOE_INSTANTIATE_FOR_STORAGE(WideDot)
MOE_INSTANTIATE_FOR_STORAGE(FixedSum)

}  // namespace moe
#endif  // HWY_ONCE
