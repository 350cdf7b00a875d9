#include "kernels/exact_sum/exact_sum_cpu.h"

#include <hwy/cache_control.h>

#include "kernels/base/highway_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/exact_sum/exact_sum_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"
#include "kernels/exact_sum/exact_sum-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

int64_t AccumulateRange(const float* partial, double inverse_unit, int64_t limit, SumWrite write,
                        int64_t* sum, int64_t n) {
  const int64_t non_finite = Accumulate(partial, inverse_unit, limit, write, sum, n);
  if (write == SumWrite::kStreamed) hwy::FlushStream();
  return non_finite;
}

HWY_INLINE void ToFloat(const int64_t* sum, double factor, float* out, int64_t n) {
  const DoubleTag d;
  const auto scale = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) {
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

HWY_EXPORT(AccumulateRange);
HWY_EXPORT(RowsToFloat);
HWY_EXPORT(Squares);

int64_t ExactAccumulateRange(const float* partial, double inverse_unit, int64_t limit,
                             SumWrite write, int64_t* sum, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(AccumulateRange)(partial, inverse_unit, limit, write, sum, n);
}
void ExactToFloatRows(const int64_t* sum, int64_t rows, int64_t cols, int64_t stride, double factor,
                      float* out) {
  HWY_DYNAMIC_DISPATCH(RowsToFloat)(sum, rows, cols, stride, factor, out);
}
double SumOfSquaresBlock(const float* x, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(Squares)(x, n);
}

}  // namespace moe
#endif  // HWY_ONCE
