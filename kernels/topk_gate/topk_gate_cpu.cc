// SIMD version of the softmax gate: one row at a time, in a padded scratch row.
#include "kernels/topk_gate/topk_gate_cpu.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/base/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/topk_gate/topk_gate_cpu.cc"
#include <hwy/foreach_target.h>  // compiles this file once per SIMD target
// After foreach_target.h.
#include "kernels/topk_gate/gate_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::HWY_NAMESPACE {  // NOLINT(readability-identifier-naming): Highway's own name
namespace {

HWY_INLINE void DivideBy(float sum, int64_t padded, float* row) {
  const auto divisor = hn::Set(FloatTag(), sum);
  for (int64_t e = 0; e < padded; e += kLanes) {
    StoreLanes(hn::Div(LoadLanes(row + e), divisor), row + e);
  }
}

void GateRows(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
              int64_t end) {
  const int64_t experts = logits.cols();
  const int64_t padded = PaddedExperts(experts);
  std::vector<float> row(static_cast<size_t>(padded));
  std::vector<int32_t> keys(static_cast<size_t>(padded));
  for (int64_t t = begin; t < end; ++t) {
    CopyPadded(logits.row(t), experts, padded, row.data());
    WriteKeys(row.data(), experts, padded, keys.data());
    const ExpSum sum = ExpAndSum(padded, row.data());
    DivideBy(sum.sum, padded, row.data());
    std::copy_n(row.data(), experts, out.probs.row(t));
    if (!out.log_sum_exp.empty()) out.log_sum_exp[static_cast<size_t>(t)] = LogSumExp(sum);
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
