// float32 lanes over float and BFloat16 memory, for sources that Highway compiles once per target.
// Everything here gives a lane the same bits whatever the other lanes hold.
// (No plain include guard: foreach_target.h includes this file once per target.)
#if defined(MOE_KERNELS_BASE_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_BASE_SIMD_INL_H_
#undef MOE_KERNELS_BASE_SIMD_INL_H_
#else
#define MOE_KERNELS_BASE_SIMD_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

#include "kernels/base/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, the number of partial sums in FixedDot.
using FloatTag = hn::CappedTag<float, 16>;
using FloatLanes = hn::Vec<FloatTag>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(FloatTag()));

HWY_INLINE FloatLanes LoadLanes(const float* p) {
  return hn::LoadU(FloatTag(), p);
}

HWY_INLINE FloatLanes LoadLanes(const BFloat16* p) {
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::RebindToUnsigned<FloatTag> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

HWY_INLINE void StoreLanes(FloatLanes v, float* p) {
  hn::StoreU(v, FloatTag(), p);
}

// The rounding of BFloat16(float).
HWY_INLINE void StoreLanes(FloatLanes v, BFloat16* p) {
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::RebindToUnsigned<FloatTag> d32;
  const auto u = hn::BitCast(d32, v);
  const auto high = hn::ShiftRight<16>(u);
  const auto odd = hn::And(high, hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(u, hn::Set(d32, 0x7fff)), odd));
  const auto quiet = hn::Or(high, hn::Set(d32, 0x40));
  const auto is_number = hn::RebindMask(d32, hn::Eq(v, v));
  hn::StoreU(hn::TruncateTo(d16, hn::IfThenElse(is_number, rounded, quiet)), d16,
             reinterpret_cast<uint16_t*>(p));
}

// The first n <= kLanes elements; the other lanes hold 0.
template <typename T>
HWY_INLINE FloatLanes LoadFirst(const T* p, int64_t n) {
  T padded[kLanes] = {};
  std::copy_n(p, n, padded);
  return LoadLanes(padded);
}

// Lanes [0, n).
template <typename T>
HWY_INLINE void StoreFirst(FloatLanes v, T* p, int64_t n) {
  T padded[kLanes];
  StoreLanes(v, padded);
  std::copy_n(padded, n, p);
}

// e^x within 1 ulp for x <= 88.7; infinity above, 0 below -104; NaN stays NaN.
HWY_INLINE FloatLanes ExpLanes(FloatLanes x) {
  const FloatTag d;
  // Highway's range ends at 104; beyond 89 the result is infinite anyway.
  const auto y = hn::Exp(d, hn::Min(x, hn::Set(d, 100.0f)));
  return hn::IfThenElse(hn::Eq(x, x), y, x);
}

// The 16 partial sums of FixedDot: element i of a row goes to partial i mod 16.
constexpr int64_t kPartials = 16;
struct FixedPartials {
  FloatLanes lanes[kPartials / kLanes];

  HWY_INLINE FixedPartials() {
    for (FloatLanes& v : lanes) v = hn::Zero(FloatTag());
  }

  // Pairwise: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
  HWY_INLINE float Fold() const {
    float s[kPartials];
    for (int64_t i = 0; i < kPartials / kLanes; ++i) StoreLanes(lanes[i], s + i * kLanes);
    for (int64_t width = kPartials / 2; width > 0; width /= 2) {
      for (int64_t i = 0; i < width; ++i) s[i] += s[i + width];
    }
    return s[0];
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#endif  // MOE_KERNELS_BASE_SIMD_INL_H_
