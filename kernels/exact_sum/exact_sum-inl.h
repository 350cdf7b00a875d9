// Additions to exact sums in lanes. Compiled once per SIMD target.
#if defined(MOE_KERNELS_EXACT_SUM_EXACT_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_EXACT_SUM_EXACT_SUM_INL_H_
#undef MOE_KERNELS_EXACT_SUM_EXACT_SUM_INL_H_
#else
#define MOE_KERNELS_EXACT_SUM_EXACT_SUM_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include <hwy/highway.h>

#include "kernels/exact_sum/exact_sum_cpu.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DoubleTag = hn::CappedTag<double, 8>;
using LongTag = hn::RebindToSigned<DoubleTag>;
using HalfTag = hn::Rebind<float, DoubleTag>;  // as many float32 as there are float64 lanes
constexpr int64_t kDoubles = static_cast<int64_t>(hn::MaxLanes(DoubleTag()));

// The general case. Returns 1 for what the grid cannot hold.
template <SumWrite kWrite>
inline int64_t AccumulateOne(float partial, double inverse_unit, int64_t limit, int64_t* sum) {
  if constexpr (kWrite != SumWrite::kAdd) *sum = 0;
  const double q = std::nearbyint(static_cast<double>(partial) * inverse_unit);
  if (!(std::abs(q) < 0x1p63)) return 1;  // also NaN
  const auto term = static_cast<int64_t>(q);
  if (term > limit || term < -limit) return 1;
  *sum += term;
  return 0;
}

// The nearest integers, ties to even, of float32 values times a power of two, all |y| < 2^63.
//
// For |z| < 2^51, z + 1.5 * 2^52 has a unit of 1 in its last place: the addition rounds z to the
// nearest integer, ties to even, and the low bits of the sum are that integer. y is a multiple of
// 2^32 and a rest of at most 2^31, both of which take this way; the rest is exact, because y has 24
// bits. (Conversions to int64 are several times as long where a CPU has none, as AVX2.)
HWY_INLINE hn::Vec<LongTag> Nearest(hn::Vec<DoubleTag> y) {
  const DoubleTag d;
  const LongTag dl;
  const auto magic = hn::Set(d, 0x1.8p52);
  const auto high = hn::MulAdd(y, hn::Set(d, 0x1p-32), magic);
  const auto rest = hn::NegMulAdd(hn::Sub(high, magic), hn::Set(d, 0x1p32), y);
  const auto low = hn::Sub(hn::BitCast(dl, hn::Add(rest, magic)), hn::BitCast(dl, magic));
  return hn::Add(hn::ShiftLeft<32>(hn::BitCast(dl, high)), low);  // the low half of magic is 0
}

// One way of writing. kStreamed takes whole vectors alone: `sum` aligned, `n` a multiple of
// kDoubles. Vectors with an element at the limit or beyond go through the general case.
template <SumWrite kWrite>
HWY_INLINE int64_t AccumulateAs(const float* partial, double inverse_unit, int64_t limit,
                                int64_t* sum, int64_t n) {
  const DoubleTag d;
  const LongTag dl;
  const auto unit = hn::Set(d, inverse_unit);
  // What is below an integer rounds to no more than it. A limit from 2^53 on may be none of
  // float64's numbers: a little less is below it however it was rounded.
  const auto bound = hn::Set(d, static_cast<double>(limit) * (1 - 0x1p-52));
  int64_t non_finite = 0;
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) {
    const auto y = hn::Mul(hn::PromoteTo(d, hn::LoadU(HalfTag(), partial + i)), unit);
    if (HWY_UNLIKELY(!hn::AllTrue(d, hn::Lt(hn::Abs(y), bound)))) {
      for (int64_t j = i; j < i + kDoubles; ++j) {
        non_finite += AccumulateOne<kWrite>(partial[j], inverse_unit, limit, sum + j);
      }
      continue;
    }
    const auto q = Nearest(y);
    if constexpr (kWrite == SumWrite::kAdd) {
      hn::StoreU(hn::Add(hn::LoadU(dl, sum + i), q), dl, sum + i);
    } else if constexpr (kWrite == SumWrite::kStreamed) {
      hn::Stream(q, dl, sum + i);
    } else {
      hn::StoreU(q, dl, sum + i);
    }
  }
  for (; i < n; ++i) non_finite += AccumulateOne<kWrite>(partial[i], inverse_unit, limit, sum + i);
  return non_finite;
}

// ExactAccumulateRange. What kStreamed writes is for other threads after hwy::FlushStream.
inline int64_t Accumulate(const float* partial, double inverse_unit, int64_t limit, SumWrite write,
                          int64_t* sum, int64_t n) {
  if (write == SumWrite::kAdd) {
    return AccumulateAs<SumWrite::kAdd>(partial, inverse_unit, limit, sum, n);
  }
  const bool aligned = reinterpret_cast<uintptr_t>(sum) % (kDoubles * sizeof(int64_t)) == 0;
  if (write == SumWrite::kStreamed && aligned && n % kDoubles == 0) {
    return AccumulateAs<SumWrite::kStreamed>(partial, inverse_unit, limit, sum, n);
  }
  return AccumulateAs<SumWrite::kOverwrite>(partial, inverse_unit, limit, sum, n);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
