// Rows of expert scores as SIMD lanes: order-preserving keys, the search for the largest of them,
// and the sum of exponentials. For sources that Highway compiles once per target.
// A row is padded to whole blocks of kPartials experts, so that body and tail are the same code.
// (No plain include guard: foreach_target.h includes this file once per target.)
#if defined(MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_
#undef MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_
#else
#define MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/base/simd-inl.h"
#include "kernels/topk_gate/topk_gate_cpu.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {

using KeyTag = hn::RebindToSigned<FloatTag>;
using KeyLanes = hn::Vec<KeyTag>;

// Order-preserving keys. No key of a number is below that of -infinity, 0x807fffff.
constexpr int32_t kTaken = std::numeric_limits<int32_t>::min();
constexpr int32_t kNanKey = kTaken + 1;

HWY_INLINE int64_t PaddedExperts(int64_t experts) {
  return (experts + kPartials - 1) / kPartials * kPartials;
}

// to [padded] = from [experts], then -infinity, whose exponential is 0.
HWY_INLINE void CopyPadded(const float* from, int64_t experts, int64_t padded, float* to) {
  std::copy_n(from, experts, to);
  std::fill(to + experts, to + padded, -std::numeric_limits<float>::infinity());
}

// Signed integers in the order of the floats; -0 counts as +0, a NaN is below -infinity.
HWY_INLINE KeyLanes KeyOf(FloatLanes x) {
  const KeyTag d;
  const auto bits = hn::BitCast(d, hn::Add(x, hn::Zero(FloatTag())));  // -0 + 0 = +0
  const auto flip = hn::And(hn::ShiftRight<31>(bits), hn::Set(d, 0x7fffffff));
  const auto is_nan = hn::RebindMask(d, hn::IsNaN(x));
  return hn::IfThenElse(is_nan, hn::Set(d, kNanKey), hn::Xor(bits, flip));
}

// The keys of row [experts]; those of the padding are taken.
HWY_INLINE void WriteKeys(const float* row, int64_t experts, int64_t padded, int32_t* keys) {
  int64_t e = 0;
  for (; e + kLanes <= experts; e += kLanes) {
    hn::StoreU(KeyOf(LoadLanes(row + e)), KeyTag(), keys + e);
  }
  if (e < experts) hn::StoreU(KeyOf(LoadFirst(row + e, experts - e)), KeyTag(), keys + e);
  std::fill(keys + experts, keys + padded, kTaken);
}

// The id of the largest key, the lowest id among equals; marks it as taken.
HWY_INLINE int32_t TakeLargest(int64_t padded, int32_t* keys) {
  const KeyTag d;
  auto max = hn::Set(d, kTaken);
  for (int64_t e = 0; e < padded; e += kLanes) max = hn::Max(max, hn::LoadU(d, keys + e));
  max = hn::MaxOfLanes(d, max);
  for (int64_t e = 0;; e += kLanes) {  // ends: the maximum is among the keys
    const auto block = hn::LoadU(d, keys + e);
    const intptr_t lane = hn::FindFirstTrue(d, hn::Eq(block, max));
    if (lane < 0) continue;
    // A whole vector is stored, since the next search loads whole vectors: a narrow store would not
    // be forwarded to it.
    const auto taken = hn::Eq(hn::Iota(d, 0), hn::Set(d, static_cast<int32_t>(lane)));
    hn::StoreU(hn::IfThenElse(taken, hn::Set(d, kTaken), block), d, keys + e);
    return static_cast<int32_t>(e + lane);
  }
}

// row[e] = exp(row[e] - max) for the largest number of row [padded]; the sum is in the order of
// TopKGate's contract.
HWY_INLINE ExpSum ExpAndSum(int64_t padded, float* row) {
  const FloatTag d;
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto max = lowest;
  for (int64_t e = 0; e < padded; e += kLanes) {
    const auto x = LoadLanes(row + e);
    max = hn::Max(max, hn::IfThenElse(hn::IsNaN(x), lowest, x));
  }
  max = hn::MaxOfLanes(d, max);
  FixedPartials partial;
  for (int64_t e = 0; e < padded; e += kPartials) {
    for (int64_t j = 0; j < kPartials / kLanes; ++j) {
      float* const at = row + e + j * kLanes;
      const auto x = hn::Sub(LoadLanes(at), max);
      const auto y = hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));  // Exp(NaN) is 0
      StoreLanes(y, at);
      partial.lanes[j] = hn::Add(partial.lanes[j], y);
    }
  }
  return {.max = hn::GetLane(max), .sum = partial.Fold()};
}

}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#endif  // MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_
