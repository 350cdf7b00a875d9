// Additions to exact sums in SIMD lanes. Compiled once per SIMD target.
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

#include "kernels/exact_sum/exact_sum_cpu.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using DoubleTag = hn::CappedTag<double, 8>;
using LongTag = hn::RebindToSigned<DoubleTag>;
using HalfTag = hn::Rebind<float, DoubleTag>;  // as many float32 as there are float64 lanes
using BitsTag = hn::Rebind<int32_t, DoubleTag>;
// Counts set bits of masks as integers, which leaves the vector units free.
constexpr bool kMaskRegisters = HWY_TARGET <= HWY_AVX3;
constexpr int64_t kDoubles = static_cast<int64_t>(hn::MaxLanes(DoubleTag()));

// A GridTally in lanes, for sums that share a unit and a limit.
struct TallyLanes {
  // A value below an integer rounds to at most that integer. A limit from 2^53 on may not be a
  // float64; slightly less than its conversion is below it, however that rounded. The nearest
  // float32 may be above it, but float32 values below that one are not.
  HWY_INLINE TallyLanes(double inverse_unit, int64_t limit)
      : largest(hn::Zero(BitsTag())),
        inexact(hn::Zero(LongTag())),
        bound(static_cast<int32_t>(GridTally::BitsOf(
            static_cast<float>(static_cast<double>(limit) * (1 - 0x1p-52) / inverse_unit)))) {}

  // Tallies one element, whose magnitude is in units.
  void AddOne(double magnitude, bool is_inexact) {
    alone.inexact += is_inexact ? 1 : 0;
    largest_alone = std::max(largest_alone, magnitude);
  }
  void AddNonFinite(double magnitude) {
    ++alone.non_finite;
    largest_alone = magnitude >= 0 ? std::max(largest_alone, magnitude) : HUGE_VAL;  // NaN
  }

  GridTally Sum(double inverse_unit) const {
    int32_t magnitudes[kDoubles];
    int64_t counts[kDoubles];
    hn::StoreU(largest, BitsTag(), magnitudes);
    hn::StoreU(inexact, LongTag(), counts);
    GridTally sum = alone;
    sum.largest = GridTally::BitsOf(static_cast<float>(largest_alone / inverse_unit));
    for (int64_t i = 0; i < kDoubles; ++i) {
      sum.inexact += counts[i];
      sum.largest = std::max<int64_t>(sum.largest, magnitudes[i]);
    }
    return sum;
  }

  // |partial| as the bits of a float32: half the width of magnitudes in units
  hn::Vec<BitsTag> largest;
  hn::Vec<LongTag> inexact;
  int32_t bound;    // bits of a float32: partials below it are within the limit
  GridTally alone;  // elements outside of vectors
  double largest_alone = 0;
};

// The general case, for one element.
template <SumWrite kWrite>
inline void AccumulateOne(float partial, double inverse_unit, int64_t limit, int64_t* sum,
                          TallyLanes& tally) {
  if constexpr (kWrite != SumWrite::kAdd) *sum = 0;
  const double y = static_cast<double>(partial) * inverse_unit;
  const double q = std::nearbyint(y);
  const bool is_integer = std::abs(q) < 0x1p63;  // a NaN is not
  const int64_t term = is_integer ? static_cast<int64_t>(q) : 0;
  if (!is_integer || term > limit || term < -limit) return tally.AddNonFinite(std::abs(y));
  *sum += term;
  tally.AddOne(std::abs(y), q != y);
}

// The nearest integers, ties to even, of float32 values times a power of two, all |y| < 2^63;
// `inexact` marks the values that were not integers.
//
// For |z| < 2^51, z + 1.5 * 2^52 has a unit of 1 in its last place: the addition rounds z to the
// nearest integer, ties to even, and the low bits of the sum are that integer. y is split into a
// multiple of 2^32 and a rest of at most 2^31, which are both converted this way; the rest is
// exact, because y has 24 bits. (On CPUs without an instruction for it, such as AVX2, a conversion
// to int64 takes several times as long.)
HWY_INLINE hn::Vec<LongTag> Nearest(hn::Vec<DoubleTag> y, hn::Mask<DoubleTag>& inexact) {
  const DoubleTag d;
  const LongTag dl;
  const auto magic = hn::Set(d, 0x1.8p52);
  const auto high = hn::MulAdd(y, hn::Set(d, 0x1p-32), magic);
  const auto rest = hn::NegMulAdd(hn::Sub(high, magic), hn::Set(d, 0x1p32), y);
  const auto rounded = hn::Add(rest, magic);
  inexact = hn::Ne(hn::Sub(rounded, magic), rest);
  const auto low = hn::Sub(hn::BitCast(dl, rounded), hn::BitCast(dl, magic));
  return hn::Add(hn::ShiftLeft<32>(hn::BitCast(dl, high)), low);  // the low half of magic is 0
}

// The loop for one way of writing. kStreamed requires whole vectors: `sum` aligned, `n` a multiple
// of kDoubles. Vectors with an element at or above the limit use the general case.
template <SumWrite kWrite>
HWY_INLINE void AccumulateAs(const float* partial, double inverse_unit, int64_t limit, int64_t* sum,
                             int64_t n, TallyLanes& tally) {
  const DoubleTag d;
  const LongTag dl;
  const BitsTag db;
  const auto unit = hn::Set(d, inverse_unit);
  const auto bound = hn::Set(db, tally.bound);
  const auto no_sign = hn::Set(db, 0x7fffffff);
  auto largest = tally.largest;
  auto inexact = tally.inexact;
  int64_t inexact_count = 0;
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) {
    const auto value = hn::LoadU(HalfTag(), partial + i);
    // As integers magnitudes keep their order, with NaN above infinity.
    const auto magnitude = hn::And(hn::BitCast(db, value), no_sign);
    if (HWY_UNLIKELY(!hn::AllTrue(db, hn::Lt(magnitude, bound)))) {
      for (int64_t j = i; j < i + kDoubles; ++j) {
        AccumulateOne<kWrite>(partial[j], inverse_unit, limit, sum + j, tally);
      }
      continue;
    }
    hn::Mask<DoubleTag> rounded;
    const auto q = Nearest(hn::Mul(hn::PromoteTo(d, value), unit), rounded);
    largest = hn::Max(largest, magnitude);
    if constexpr (kMaskRegisters) {
      inexact_count += static_cast<int64_t>(hn::CountTrue(d, rounded));
    } else {
      inexact = hn::Sub(inexact, hn::VecFromMask(dl, hn::RebindMask(dl, rounded)));  // true is -1
    }
    if constexpr (kWrite == SumWrite::kAdd) {
      hn::StoreU(hn::Add(hn::LoadU(dl, sum + i), q), dl, sum + i);
    } else if constexpr (kWrite == SumWrite::kStreamed) {
      hn::Stream(q, dl, sum + i);
    } else {
      hn::StoreU(q, dl, sum + i);
    }
  }
  for (; i < n; ++i) {
    AccumulateOne<kWrite>(partial[i], inverse_unit, limit, sum + i, tally);
  }
  tally.largest = largest;
  tally.inexact = inexact;
  tally.alone.inexact += inexact_count;
}

// ExactAccumulateRange. Other threads may read what kStreamed writes only after hwy::FlushStream.
inline void Accumulate(const float* partial, double inverse_unit, int64_t limit, SumWrite write,
                       int64_t* sum, int64_t n, TallyLanes& tally) {
  if (write == SumWrite::kAdd) {
    return AccumulateAs<SumWrite::kAdd>(partial, inverse_unit, limit, sum, n, tally);
  }
  const bool aligned = reinterpret_cast<uintptr_t>(sum) % (kDoubles * sizeof(int64_t)) == 0;
  if (write == SumWrite::kStreamed && aligned && n % kDoubles == 0) {
    return AccumulateAs<SumWrite::kStreamed>(partial, inverse_unit, limit, sum, n, tally);
  }
  return AccumulateAs<SumWrite::kOverwrite>(partial, inverse_unit, limit, sum, n, tally);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
