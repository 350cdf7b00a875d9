// SIMD version of the softmax gate: one row at a time, padded to whole blocks of 16 experts in a
// scratch row, so that body and tail are the same code.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/topk_gate/topk_gate_cpu.cc"
#include "kernels/topk_gate/topk_gate_cpu.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <hwy/foreach_target.h>  // compiles this file once per SIMD target
#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace moe::HWY_NAMESPACE {  // NOLINT(readability-identifier-naming): Highway's own name
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Partials of the sum; no vector is wider, and E is padded to a multiple.
constexpr int64_t kBlock = 16;

// Order-preserving keys. No key of a number is below that of -infinity, 0x807fffff.
constexpr int32_t kTaken = std::numeric_limits<int32_t>::min();
constexpr int32_t kNanKey = kTaken + 1;

const hn::CappedTag<float, kBlock> kFloats;
const hn::RebindToSigned<decltype(kFloats)> kInts;
using Floats = hn::Vec<decltype(kFloats)>;
using Ints = hn::Vec<decltype(kInts)>;

// Signed integers in the order of the floats; -0 counts as +0, a NaN is below -infinity.
HWY_INLINE Ints KeyOf(Floats x) {
  const Ints bits = hn::BitCast(kInts, hn::Add(x, hn::Zero(kFloats)));  // -0 + 0 = +0
  const Ints flip = hn::And(hn::ShiftRight<31>(bits), hn::Set(kInts, 0x7fffffff));
  const auto is_nan = hn::RebindMask(kInts, hn::IsNaN(x));
  return hn::IfThenElse(is_nan, hn::Set(kInts, kNanKey), hn::Xor(bits, flip));
}

// Writes the keys of row [padded], padding as taken, and returns the largest number.
HWY_INLINE float KeysAndMax(const float* row, int64_t experts, int64_t padded, int32_t* keys) {
  const Floats lowest = hn::Set(kFloats, -std::numeric_limits<float>::infinity());
  Floats max = lowest;
  const auto lanes = static_cast<int64_t>(hn::Lanes(kFloats));
  for (int64_t e = 0; e < padded; e += lanes) {
    const Floats x = hn::LoadU(kFloats, row + e);
    max = hn::Max(max, hn::IfThenElse(hn::IsNaN(x), lowest, x));
    hn::StoreU(KeyOf(x), kInts, keys + e);
  }
  for (int64_t e = experts; e < padded; ++e) keys[e] = kTaken;
  return hn::GetLane(hn::MaxOfLanes(kFloats, max));
}

// row[e] = exp(row[e] - max); returns the sum in the contract's order.
HWY_INLINE float ExpAndSum(float* row, int64_t padded, float max) {
  alignas(64) std::array<float, kBlock> partial{};
  const Floats shift = hn::Set(kFloats, max);
  const auto lanes = static_cast<int64_t>(hn::Lanes(kFloats));
  for (int64_t e = 0; e < padded; e += kBlock) {
    for (int64_t j = 0; j < kBlock; j += lanes) {
      const Floats x = hn::Sub(hn::LoadU(kFloats, row + e + j), shift);
      const Floats y = hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(kFloats, x));  // Exp(NaN) is 0
      hn::StoreU(y, kFloats, row + e + j);
      hn::Store(hn::Add(hn::Load(kFloats, partial.data() + j), y), kFloats, partial.data() + j);
    }
  }
  for (size_t half = kBlock / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) partial[j] += partial[j + half];
  }
  return partial[0];
}

HWY_INLINE void DivideBy(float sum, int64_t padded, float* row) {
  const Floats divisor = hn::Set(kFloats, sum);
  const auto lanes = static_cast<int64_t>(hn::Lanes(kFloats));
  for (int64_t e = 0; e < padded; e += lanes) {
    hn::StoreU(hn::Div(hn::LoadU(kFloats, row + e), divisor), kFloats, row + e);
  }
}

// The id of the largest key, the lowest id among equals; marks it as taken.
HWY_INLINE int32_t TakeLargest(int64_t padded, int32_t* keys) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(kInts));
  Ints max = hn::Set(kInts, kTaken);
  for (int64_t e = 0; e < padded; e += lanes) max = hn::Max(max, hn::LoadU(kInts, keys + e));
  max = hn::MaxOfLanes(kInts, max);
  for (int64_t e = 0;; e += lanes) {  // ends: the maximum is among the keys
    const Ints block = hn::LoadU(kInts, keys + e);
    const intptr_t lane = hn::FindFirstTrue(kInts, hn::Eq(block, max));
    if (lane < 0) continue;
    // A whole vector is stored, since the next search loads whole vectors: a narrow store would not
    // be forwarded to it.
    const auto taken = hn::Eq(hn::Iota(kInts, 0), hn::Set(kInts, static_cast<int32_t>(lane)));
    hn::StoreU(hn::IfThenElse(taken, hn::Set(kInts, kTaken), block), kInts, keys + e);
    return static_cast<int32_t>(e + lane);
  }
}

void GateRows(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
              int64_t end) {
  const int64_t experts = logits.cols();
  const int64_t padded = (experts + kBlock - 1) / kBlock * kBlock;
  std::vector<float> row(static_cast<size_t>(padded));
  std::vector<int32_t> keys(static_cast<size_t>(padded));
  const auto row_bytes = static_cast<size_t>(experts) * sizeof(float);
  for (int64_t t = begin; t < end; ++t) {
    std::memcpy(row.data(), logits.row(t), row_bytes);
    for (int64_t e = experts; e < padded; ++e) {
      row[static_cast<size_t>(e)] = -std::numeric_limits<float>::infinity();  // exp gives 0
    }
    const float max = KeysAndMax(row.data(), experts, padded, keys.data());
    const float sum = ExpAndSum(row.data(), padded, max);
    DivideBy(sum, padded, row.data());
    std::memcpy(out.probs.row(t), row.data(), row_bytes);
    if (!out.log_sum_exp.empty()) {
      out.log_sum_exp[static_cast<size_t>(t)] =
          static_cast<float>(static_cast<double>(max) + std::log(static_cast<double>(sum)));
    }
    for (int64_t j = 0; j < out.expert.cols(); ++j) {
      const int32_t best = TakeLargest(padded, keys.data());
      out.expert(t, j) = best;
      out.value(t, j) = row[static_cast<size_t>(best)];
    }
  }
}

}  // namespace
}  // namespace moe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(GateRows);

void TopKGateCpu(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
                 int64_t end) {
  HWY_DYNAMIC_DISPATCH(GateRows)(logits, out, begin, end);
}

}  // namespace moe
#endif  // HWY_ONCE
