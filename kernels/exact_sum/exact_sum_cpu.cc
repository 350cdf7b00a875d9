#include "kernels/exact_sum/exact_sum_cpu.h"

#include <cmath>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/exact_sum/exact_sum_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

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

// For |y| < 2^51, y + 1.5 * 2^52 has a unit of 1 in its last place: the addition rounds y to the
// nearest integer, ties to even, and the low bits of the sum are that integer. Vectors that hold
// anything larger go through the general case.
int64_t Accumulate(const float* partial, double inverse_unit, int64_t limit, int64_t* sum,
                   int64_t n) {
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

void ToFloat(const int64_t* sum, double factor, float* out, int64_t n) {
  const DoubleTag d;
  const auto scale = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) {
    const auto x = hn::ConvertTo(d, hn::LoadU(LongTag(), sum + i));
    hn::StoreU(hn::DemoteTo(HalfTag(), hn::Mul(x, scale)), HalfTag(), out + i);
  }
  for (; i < n; ++i) out[i] = static_cast<float>(static_cast<double>(sum[i]) * factor);
}

double Squares(const float* x, int64_t n) {
  const DoubleTag d;
  constexpr int64_t kVectors = kPartials / kDoubles;
  hn::Vec<DoubleTag> lanes[kVectors];
  for (auto& v : lanes) v = hn::Zero(d);
  const int64_t body = n - n % kPartials;
  const auto add = [&](const float* from) HWY_ATTR {
    for (int64_t j = 0; j < kVectors; ++j) {
      const auto y = hn::PromoteTo(d, hn::LoadU(HalfTag(), from + j * kDoubles));
      lanes[j] = hn::Add(lanes[j], hn::Mul(y, y));  // the product is exact
    }
  };
  for (int64_t i = 0; i < body; i += kPartials) add(x + i);
  if (body < n) {
    float tail[kPartials] = {};
    std::copy(x + body, x + n, tail);
    add(tail);
  }
  double s[kPartials];
  for (int64_t j = 0; j < kVectors; ++j) hn::StoreU(lanes[j], d, s + j * kDoubles);
  for (int64_t width = kPartials / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) s[i] += s[i + width];
  }
  return s[0];
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(Accumulate);
HWY_EXPORT(ToFloat);
HWY_EXPORT(Squares);

int64_t ExactAccumulateRange(const float* partial, double inverse_unit, int64_t limit, int64_t* sum,
                             int64_t n) {
  return HWY_DYNAMIC_DISPATCH(Accumulate)(partial, inverse_unit, limit, sum, n);
}
void ExactToFloatRange(const int64_t* sum, double factor, float* out, int64_t n) {
  HWY_DYNAMIC_DISPATCH(ToFloat)(sum, factor, out, n);
}
double SumOfSquaresBlock(const float* x, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(Squares)(x, n);
}

}  // namespace moe
#endif  // HWY_ONCE
