#include "kernels/exact_sum/exact_sum.h"

#include <cmath>

#include <hwy/cache_control.h>

#include "kernels/base/highway_targets.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/exact_sum/exact_sum_cpu.h"
#include "kernels/exact_sum/exact_sum_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/exact_sum/exact_sum.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"
#include "kernels/exact_sum/exact_sum-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

GridTally AccumulateRange(const float* partial, double inverse_unit, int64_t limit, SumWrite write,
                          int64_t* sum, int64_t n) {
  TallyLanes tally(inverse_unit, limit);
  Accumulate(partial, inverse_unit, limit, write, sum, n, tally);
  if (write == SumWrite::kStreamed) hwy::FlushStream();
  return tally.Sum(inverse_unit);
}

HWY_INLINE void ToFloat(const int64_t* sum, double factor, float* out, int64_t n) {
  const DoubleTag d;
  const auto scale = hn::Set(d, factor);
  // Without SIMD, Highway's DemoteTo turns overflow into the largest float, not infinity.
  constexpr bool kSimd = HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR;
  const int64_t in_lanes = kSimd ? n - n % kDoubles : 0;
  int64_t i = 0;
  for (; i < in_lanes; i += kDoubles) {
    const auto x = hn::ConvertTo(d, hn::LoadU(LongTag(), sum + i));
    hn::StoreU(hn::DemoteTo(HalfTag(), hn::Mul(x, scale)), HalfTag(), out + i);
  }
  for (; i < n; ++i) out[i] = static_cast<float>(static_cast<double>(sum[i]) * factor);
}

void RowsToFloat(const int64_t* sum, int64_t rows, int64_t cols, int64_t stride, double factor,
                 float* out) {
  for (int64_t r = 0; r < rows; ++r) ToFloat(sum + r * stride, factor, out + r * cols, cols);
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

GridTally ExactAccumulateRange(const float* partial, double inverse_unit, int64_t limit,
                               SumWrite write, int64_t* sum, int64_t n) {
  return MOE_SIMD(AccumulateRange)(partial, inverse_unit, limit, write, sum, n);
}
void ExactToFloatRows(const int64_t* sum, int64_t rows, int64_t cols, int64_t stride, double factor,
                      float* out) {
  MOE_SIMD(RowsToFloat)(sum, rows, cols, stride, factor, out);
}
double SumOfSquaresBlock(const float* x, int64_t n) {
  return MOE_SIMD(Squares)(x, n);
}

namespace exact_sum {

constexpr int64_t kGrain = int64_t{1} << 15;  // elements a range

void Run(const Accumulate& a, ThreadPool& threads) {
  const SumWrite write = a.write == Write::kAdd ? SumWrite::kAdd : SumWrite::kOverwrite;
  threads.For(a.n, kGrain, [&](int64_t begin, int64_t end) {
    AddAtomically(ExactAccumulateRange(a.partial + begin, a.inverse_unit, a.limit, write,
                                       a.sum + begin, end - begin),
                  *a.tally);
  });
}

void Run(const ToFloat& t, ThreadPool& threads) {
  threads.For(t.n, kGrain, [&](int64_t begin, int64_t end) {
    ExactToFloatRange(t.sum + begin, t.factor, t.out + begin, end - begin);
  });
}

}  // namespace exact_sum

absl::Status CheckGrid(absl::string_view function, const ExactGrid& grid) {
  if (grid.max_terms < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": max_terms is ", grid.max_terms, ", expected >= 1"));
  }
  // Beyond these limits the unit or its inverse is not a normal float64.
  if (grid.unit_log2 < -1000 || grid.unit_log2 > 1000) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": unit_log2 is ", grid.unit_log2, ", expected -1000 to 1000"));
  }
  return absl::OkStatus();
}

absl::Status ExactAccumulate(const ExactGrid& grid, absl::Span<const float> partial,
                             absl::Span<int64_t> sum, Write write, GridTally* tally,
                             Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckGrid("ExactAccumulate", grid));
  const auto n = static_cast<int64_t>(partial.size());
  MOE_RETURN_IF_ERROR(CheckLength("ExactAccumulate", "sum", sum.size(), n));
  return RunOp("ExactAccumulate",
               exact_sum::Accumulate{.partial = partial.data(),
                                     .inverse_unit = std::ldexp(1.0, -grid.unit_log2),
                                     .limit = grid.limit(),
                                     .sum = sum.data(),
                                     .write = write,
                                     .tally = tally,
                                     .n = n},
               stream);
}

absl::Status ExactToFloat(const ExactGrid& grid, absl::Span<const int64_t> sum, double scale,
                          absl::Span<float> out, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckGrid("ExactToFloat", grid));
  const auto n = static_cast<int64_t>(sum.size());
  MOE_RETURN_IF_ERROR(CheckLength("ExactToFloat", "out", out.size(), n));
  return RunOp("ExactToFloat",
               exact_sum::ToFloat{sum.data(), std::ldexp(scale, grid.unit_log2), out.data(), n},
               stream);
}

}  // namespace moe
#endif  // HWY_ONCE
