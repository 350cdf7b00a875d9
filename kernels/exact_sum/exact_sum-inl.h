// Additions to exact sums in lanes. Compiled once per SIMD target.
#if defined(MOE_KERNELS_EXACT_SUM_EXACT_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_EXACT_SUM_EXACT_SUM_INL_H_
#undef MOE_KERNELS_EXACT_SUM_EXACT_SUM_INL_H_
#else
#define MOE_KERNELS_EXACT_SUM_EXACT_SUM_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DoubleTag = hn::CappedTag<double, 8>;
using LongTag = hn::RebindToSigned<DoubleTag>;
using HalfTag = hn::Rebind<float, DoubleTag>;  // as many float32 as there are float64 lanes
constexpr int64_t kDoubles = static_cast<int64_t>(hn::MaxLanes(DoubleTag()));

// The general case. Returns 1 for what the grid cannot hold.
inline int64_t AccumulateOne(float partial, double inverse_unit, int64_t limit, int64_t* sum) {
  const double q = std::nearbyint(static_cast<double>(partial) * inverse_unit);
  if (!(std::abs(q) < 0x1p63)) return 1;  // also NaN
  const auto term = static_cast<int64_t>(q);
  if (term > limit || term < -limit) return 1;
  *sum += term;
  return 0;
}

// sum[i] += round(partial[i] * inverse_unit); returns the number of elements that are no number or
// whose |q| is above `limit`, which add 0.
//
// For |y| < 2^51, y + 1.5 * 2^52 has a unit of 1 in its last place: the addition rounds y to the
// nearest integer, ties to even, and the low bits of the sum are that integer. Vectors that hold
// anything larger go through the general case.
HWY_INLINE int64_t Accumulate(const float* partial, double inverse_unit, int64_t limit,
                              int64_t* sum, int64_t n) {
  const DoubleTag d;
  const LongTag dl;
  const auto magic = hn::Set(d, 0x1.8p52);
  const auto unit = hn::Set(d, inverse_unit);
  // What is below an integer rounds to no more than it. A limit under 2^51 is exact in float64.
  const auto bound = hn::Set(d, std::min(0x1p51, static_cast<double>(limit)));
  int64_t non_finite = 0;
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) {
    const auto y = hn::Mul(hn::PromoteTo(d, hn::LoadU(HalfTag(), partial + i)), unit);
    if (HWY_UNLIKELY(!hn::AllTrue(d, hn::Lt(hn::Abs(y), bound)))) {
      for (int64_t j = i; j < i + kDoubles; ++j) {
        non_finite += AccumulateOne(partial[j], inverse_unit, limit, sum + j);
      }
      continue;
    }
    const auto q = hn::Sub(hn::BitCast(dl, hn::Add(y, magic)), hn::BitCast(dl, magic));
    hn::StoreU(hn::Add(hn::LoadU(dl, sum + i), q), dl, sum + i);
  }
  for (; i < n; ++i) non_finite += AccumulateOne(partial[i], inverse_unit, limit, sum + i);
  return non_finite;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
