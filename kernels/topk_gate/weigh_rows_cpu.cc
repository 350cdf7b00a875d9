#include "kernels/topk_gate/weigh_rows_cpu.h"

#include <algorithm>
#include <cstdint>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/topk_gate/weigh_rows_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

// Choices are few: a wider vector would seldom be full.
using ChoiceTag = hn::CappedTag<float, 4>;
constexpr int64_t kChoiceLanes = static_cast<int64_t>(hn::MaxLanes(ChoiceTag()));

HWY_INLINE float SumOf(const float* row, int64_t k) {
  float sum = 0;
  for (int64_t j = 0; j < k; ++j) sum += row[j];
  return sum;
}

// row[j] = row[j] / sum * scale.
HWY_INLINE void DivideAndScale(float sum, float scale, int64_t k, float* row) {
  const ChoiceTag d;
  const auto divisor = hn::Set(d, sum), factor = hn::Set(d, scale);
  int64_t j = 0;
  for (; j + kChoiceLanes <= k; j += kChoiceLanes) {
    hn::StoreU(hn::Mul(hn::Div(hn::LoadU(d, row + j), divisor), factor), d, row + j);
  }
  for (; j < k; ++j) row[j] = row[j] / sum * scale;
}

void WeighRows(MatrixView<float> weight, const GateRule& rule, int64_t begin, int64_t end) {
  const int64_t k = weight.cols();
  for (int64_t t = begin; t < end; ++t) {
    float* const row = weight.row(t);
    const float sum =
        rule.weights == GateWeights::kNormalised ? SumOf(row, k) + rule.epsilon : 1.0f;
    DivideAndScale(sum == 0 ? 1.0f : sum, rule.scale, k, row);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

HWY_EXPORT(WeighRows);

void WeighRowsCpu(MatrixView<float> weight, const GateRule& rule, int64_t begin, int64_t end) {
  if (rule.weights == GateWeights::kScores && rule.scale == 1) return;
  HWY_DYNAMIC_DISPATCH(WeighRows)(weight, rule, begin, end);
}

void CountSelected(MatrixView<const int32_t> expert, absl::Span<int64_t> count) {
  std::fill(count.begin(), count.end(), int64_t{0});
  int64_t* const counts = count.data();
  for (int64_t t = 0; t < expert.rows(); ++t) {
    const int32_t* const ids = expert.row(t);
    for (int64_t j = 0; j < expert.cols(); ++j) ++counts[ids[j]];
  }
}

}  // namespace moe
#endif  // HWY_ONCE
